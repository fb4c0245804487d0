"""Random tensor programs compiled to native code: values, layouts, writes and gradients are eager's.

KILN_FUZZ says how many; `make fuzz` runs 20,000 that no run had before. A failure prints the smallest program.
"""

from __future__ import annotations

import os
from random import Random

import pytest

import kiln
from kiln.base import records
from kiln.launch import device
from kiln.launch import program as launched
from tests.fuse.comparing import compare, run
from tests.fuse.programs import PLAIN, Program, drawn

hypothesis = pytest.importorskip("hypothesis")
pytestmark = pytest.mark.filterwarnings("ignore")
MANY = int(os.environ.get("KILN_FUZZ", "0"))
SETTINGS = hypothesis.settings(
    max_examples=MANY or 120, derandomize=not MANY, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck), print_blob=False,
)  # fmt: skip


#: Writes that functions of values cannot express: such a graph runs as it was captured.
LEFT = ("as-strided", "write-to-view", "output-view", "overlapping-inputs")


def check(program: Program, *others: Program) -> None:
    """The program equals eager in one graph, and nothing fell back but what eager cannot differentiate either.

    With other programs of the same lines, the same function runs on their inputs, in their modes, too; sizes may vary.
    """
    sizes = [[given.shape for given in p.inputs] for p in (program, *others)]
    kiln.reset()
    with records.collect() as log, kiln.config.patch(strict=True):
        compiled = kiln.compile(program.function(PLAIN), backend="kiln", dynamic=None if all(s == sizes[0] for s in sizes) else True)
        eager = [compare(program, compiled)]
        for other in others:
            if eager[0].error is None and runs(other):
                eager.append(compare(other, compiled))
    if eager[0].error is None:
        breaks = [b for b in log.breaks if b.kind != "metadata-mutation"]
        assert not breaks, f"breaks: {breaks}"
        fallbacks = [f for f in log.fallbacks if not f.error.startswith(LEFT)]
        assert not fallbacks or any(e.backward_error for e in eager), f"fell back: {fallbacks}"


def runs(program: Program) -> bool:
    """Whether eager takes these inputs."""
    return run(program, program.function(PLAIN, device="cpu"), PLAIN, "cpu").error is None


def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[int] = []
    for maker in (launched, device):
        generate = maker.generate
        monkeypatch.setattr(
            maker, "generate", lambda made, *a, to=generate, **k: kernels.append(len(made)) or to(made, *a, **k)
        )

    @SETTINGS
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=False))
    def programs(random: Random) -> None:
        program = drawn(random)
        others = program.varied(random)
        hypothesis.note(f"{program.inputs}\n{program.text()}{[(p.mode, p.inputs) for p in (program, *others)]}")
        check(program, *others)

    programs()
    # Most graphs have kernels: the programs were compiled, not run op by op.
    assert sum(n > 0 for n in kernels) > len(kernels) / 2 > 50
