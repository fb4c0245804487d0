"""KILN_LOG writes one line for each record of a topic that was asked for."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch, kiln
@kiln.compile(backend="eager")
def f(x):
    y = x + 1
    kiln.graph_break("because")
    return y * 2
f(torch.ones(2))
"""


def test_topics_asked_for_are_written():
    environment = {**os.environ, "KILN_LOG": "graphs,breaks", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("[kiln]")]
    assert [line.partition(" from ")[0] for line in lines if " ops" in line] == [
        "[kiln] graph: f: 1 ops, 1 inputs,",
        "[kiln] graph: f#1: 1 ops, 1 inputs,",
    ]
    assert sum(line.endswith(" captured") for line in lines) == 2
    assert [line for line in lines if "[graph-break-called]" in line and "because" in line]
    assert len(lines) == 5
