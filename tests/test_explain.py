"""The text of an explanation, from records made by hand."""

import pytest

from kiln.base.errors import KilnError, Place
from kiln.base.records import (
    BreakRecord,
    FallbackRecord,
    GraphRecord,
    RecompileRecord,
    Records,
    ResidualRecord,
)
from kiln.observe.explain import Captured, Explanation

TEXT = """\
1 graph, 2 ops, 1 break, 1 recompile, 1 frame left to Python

Graph 0 of f from f.py:1 in f: 2 ops, 1 input
    def forward(self, x):
        return x
  guards
    x is a tensor

Break 0 [branch-on-tensor] in f
    at f.py:3 in f
       if x.sum() < 0:
    reason: the condition is a tensor
    remedy: use torch.where

Recompiles
    f: x.shape was (2,), now (3,)

Left to Python
    g: a generator

Residual bytecode
    f:"""


class Graph:
    code = "\ndef forward(self, x):\n    return x\n"


def collected():
    records = Records()
    records.add(GraphRecord("g0", Graph(), 2, 1, Place("f.py", 1, "f"), "f", ("x is a tensor",)))
    place = Place("f.py", 3, "f", "    if x.sum() < 0:")
    records.add(BreakRecord("branch-on-tensor", place, "the condition is a tensor", "use torch.where", "f"))
    records.add(RecompileRecord("f", ("x.shape was (2,), now (3,)",)))
    records.add(FallbackRecord("g", "a generator"))
    records.add(ResidualRecord("f", (lambda x: x).__code__))
    return records


def test_explanation_reads_from_summary_to_bytecode():
    told = Explanation.of(collected(), 7)
    assert str(told).startswith(TEXT)
    assert "RETURN_VALUE" in told.bytecode()
    assert (told.result, told.ops, told.guards) == (7, 2, ("x is a tensor",))
    assert (told.graph_count, told.break_count) == (1, 1)


def test_captured_needs_exactly_one_graph():
    records = collected()
    captured = Captured.of(records, [[1]], 7)
    assert captured.example_inputs == (1,) and "x is a tensor" in str(captured)
    records.graphs.clear()
    with pytest.raises(
        KilnError, match=r"0 graphs captured where one is needed: g: a generator; \[branch-on-tensor\]"
    ):
        Captured.of(records, [], None)
