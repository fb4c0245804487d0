"""A script with five planted faults: each is named with its line, and its remedy, once applied, removes it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import kiln
from kiln import scripts
from kiln.base.records import Records
from kiln.observe.facts import facts

ROOT = Path(__file__).parents[2]

SCRIPT = """\
import zlib

import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        {branch}


class Rows(nn.Module):
    def forward(self, x):
        total = 0.0
        for row in x:
            total = total + {item}
        return x * total


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.rows = Gate(), Rows()
        self.scales = {made}

    def forward(self, x, times):
        x = self.gate(x) * times
        x = self.rows(x)
        {call}
        {scaled}
        return x + 1


model = torch.compile(Model())
for i in range(4):
    {changed}
    x = torch.linspace(-1, 1 + i, 12).reshape(3, 4)
    print(model(x, {times}).sum().item())
"""

# For each fault: its lines, those that the remedy makes of them, the line to be named, words of the remedy.
FAULTS = {
    "branch": (
        {"branch": "return x + 1 if x.sum() > 0 else x - 1"},
        {"branch": "return torch.where(x.sum() > 0, x + 1, x - 1)"},
        "return x + 1 if x.sum() > 0 else x - 1",
        "torch.where",
    ),
    "item": (
        {"item": "round(row.sum().item(), 6)"},
        {"item": "row.sum()"},
        "total = total + round(row.sum().item(), 6)",
        "keep the value a tensor, without .item()",
    ),
    "call": (
        {"call": "zlib.crc32(b'x')"},
        {"call": "pass"},
        "zlib.crc32(b'x')",
        "move the call out of the compiled function",
    ),
    "number": (
        {"times": "2 + i"},
        {"times": "torch.tensor(2 + i)"},
        "x = self.gate(x) * times",
        "pass times as a tensor, torch.tensor(3)",
    ),
    "list": (
        {"made": "[]", "scaled": "for scale in self.scales: x = x * scale", "changed": "model.scales = [0.5 + i] * (i + 1)"},
        {"made": "torch.ones(4)", "scaled": "x = x * self.scales.prod()", "changed": "model.scales[: i + 1] = 0.5 + i"},
        "for scale in self.scales: x = x * scale",
        "make self.scales once, outside of what is compiled",
    ),
}  # fmt: skip


def written(folder, fixed=()):
    """The script with some faults repaired, and where it is."""
    parts = {}
    for name, (fault, repaired, _, _) in FAULTS.items():
        parts.update(repaired if name in fixed else fault)
    path = folder / f"planted_{'_'.join(fixed) or 'all'}.py"
    path.write_text(SCRIPT.format(**parts))
    return path


def named(told):
    """The faults that the facts name at their lines, with the remedies given there."""
    found = {}
    for fact in (*told["breaks"], *told["recompiles"]):
        if fact["place"] is not None:
            found.setdefault(fact["place"]["text"], []).append((fact["place"]["line"], fact["remedy"]))
    return found


def explained(path, capsys):
    """The facts of a run, and what the script printed, here and without Kiln."""
    kiln.reset()
    records = Records()
    assert scripts.run(str(path), [], None, records) == 0
    printed = [float(line) for line in capsys.readouterr().out.split()]
    with mock.patch.object(torch, "compile", lambda model: model):
        runpy.run_path(str(path))
    return facts(records), printed, [float(line) for line in capsys.readouterr().out.split()]


def lines_of(path):
    return {line.strip(): number for number, line in enumerate(path.read_text().splitlines(), 1)}


def test_each_fault_is_named_at_its_line_with_a_remedy(tmp_path):
    path = written(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "kiln", "explain", "--json", str(path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found, lines = named(told), lines_of(path)
    for name, (_, _, line, remedy) in FAULTS.items():
        assert [text for number, text in found.get(line, ()) if number == lines[line] and remedy in text], (name, found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy_removes_its_fault_and_no_other(name, tmp_path, capsys):
    told, printed, plain = explained(written(tmp_path, (name,)), capsys)
    assert printed == pytest.approx(plain, rel=1e-4)
    found = named(told)
    assert FAULTS[name][2] not in found
    assert {other for other, (_, _, line, _) in FAULTS.items() if line in found} == set(FAULTS) - {name}


def test_all_remedies_together_leave_one_graph(tmp_path, capsys):
    told, printed, plain = explained(written(tmp_path, tuple(FAULTS)), capsys)
    assert printed == pytest.approx(plain, rel=1e-4)
    summary = told["summary"]
    assert (summary["graphs"], summary["breaks"], summary["recompiles"], summary["share"]) == (1, 0, 0, 1.0), named(told)
