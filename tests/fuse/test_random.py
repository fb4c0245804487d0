"""Random tensor programs compiled to native code: values, layouts, writes and gradients are eager's.

KILN_FUZZ says how many; `make fuzz` runs 20,000 that no run had before. A failure prints the smallest program.
"""

from __future__ import annotations

import os
from random import Random

import pytest

import kiln
from kiln.base import records
from kiln.launch import program as launched
from tests.fuse.programs import PLAIN, Program, compare, drawn

hypothesis = pytest.importorskip("hypothesis")
pytestmark = pytest.mark.filterwarnings("ignore")
MANY = int(os.environ.get("KILN_FUZZ", "0"))
SETTINGS = hypothesis.settings(
    max_examples=MANY or 120, derandomize=not MANY, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck), print_blob=False,
)  # fmt: skip


def check(program: Program) -> None:
    """The program equals eager in one graph, and nothing fell back but what eager cannot differentiate either."""
    kiln.reset()
    with records.collect() as log, kiln.config.patch(strict=True):
        eager = compare(program, kiln.compile(program.function(PLAIN), backend="kiln"))
    if eager.error is None:
        assert not log.breaks, f"breaks: {log.breaks}"
        assert not log.fallbacks or eager.backward_error is not None, f"fell back: {log.fallbacks}"


def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[int] = []
    generate = launched.generate
    monkeypatch.setattr(launched, "generate", lambda made: kernels.append(len(made)) or generate(made))

    @SETTINGS
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=False))
    def programs(random: Random) -> None:
        program = drawn(random)
        hypothesis.note(f"{program.inputs}\n{program.text()}")
        check(program)

    programs()
    # Most graphs have kernels: the programs were compiled, not run op by op.
    assert sum(n > 0 for n in kernels) > len(kernels) / 2 > 50
