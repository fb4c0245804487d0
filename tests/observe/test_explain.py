"""What `kiln.explain` says: the facts of a run, and the text of them from records made by hand."""

import json

import pytest
import torch
from torch import nn

import kiln
from kiln.base import records as recorded
from kiln.base.errors import KilnError, Place
from kiln.base.records import (
    BreakRecord,
    Failure,
    FallbackRecord,
    Fused,
    GraphRecord,
    KernelRecord,
    PlanRecord,
    RecompileRecord,
    Records,
    StageRecord,
    Step,
)
from kiln.observe.explain import Captured
from kiln.observe.facts import facts
from kiln.observe.tables import text

TEXT = """\
1 graph, 2 ops (67% of the operations), 1 break, 1 recompile, 1 fallback to eager, 1 kernel, 1 call of eager kernels; \
compiled in 0.50 s

Graphs
  graph  ops  inputs  from    to
  f        2       1  f.py:1  f.py:3

Breaks
  [branch-on-tensor] f.py:3 in f
        if x.sum() < 0:
           ^^^^^^^^^^^
    reason: the condition is a tensor
    remedy: use torch.where

Recompiles
  f (f.py:1): 1 time
    n was 2, now 3
    read at f.py:2
        y = x * n
                ^
    remedy: pass n as a tensor

Left to eager
  g: a generator; attach /tmp/report.txt to a report

Time by stage
  stage    runs      time  share
  backend     1  300.0 ms    60%
  capture     1  200.0 ms    40%

Kernels
  kernel          fused     reads  writes  launches
  f inference k0  mul (f.py:2)  2.0 KiB    16 B         3

Memory beside inputs, at most
  graph        planned    eager  kernels  eager calls
  f inference     16 B  1.0 KiB        1            1
"""


class Graph:
    code = "\ndef forward(self, x):\n    return x\n"


def collected():
    records = Records()
    read = Place("f.py", 2, "f", "y = x * n", 8, 1)
    records.add(GraphRecord("f", Graph(), 2, 1, Place("f.py", 1, "f"), "f", ("x is a tensor",), Place("f.py", 3, "f")))
    place = Place("f.py", 3, "f", "if x.sum() < 0:", 3, 11)
    records.add(BreakRecord("branch-on-tensor", place, "the condition is a tensor", "use torch.where", "f"))
    failure = Failure("n was 2, now 3", "n", "2", "3", read, "pass n as a tensor")
    records.add(RecompileRecord("f", ("n was 2, now 3",), Place("f.py", 1, "f"), (failure,)))
    records.add(FallbackRecord("g", "a generator", "/tmp/report.txt"))
    records.add(StageRecord("f", "backend", "", 10.1, 0.3))
    records.add(StageRecord("f", "capture", "", 10.0, 0.5))
    records.add(KernelRecord("f", "inference", "k0", "for i", (Fused("mul", "", read),), 2048, 16, launches=3))
    steps = (Step("kernel", "k0", bytes=16), Step("native", "mm", bytes=8))
    records.add(PlanRecord("f", "inference", steps, 64, (8, 1024)))
    return records


def words(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_text_reads_from_summary_to_memory():
    wanted = words(TEXT)
    # The summary is as wide as it is; all else stands line by line.
    assert words(" ".join(text(facts(collected())).split("\n\n")[0].split())) == wanted[:1]
    assert words(text(facts(collected())).partition("\n\n")[2]) == wanted[2:]


def test_facts_are_plain_data_and_an_empty_run_has_them_too():
    made = facts(collected())
    assert json.loads(json.dumps(made)) == made
    empty = facts(Records())
    assert empty.keys() == made.keys() and empty["summary"]["share"] == 0.0
    assert text(empty) == "0 graphs, 0 ops, 0 breaks"


def branch(x):
    y = x * 2
    if y.sum() < 0:
        return y - 1
    return y + 1


def test_explain_names_lines_columns_and_the_kernel_of_each_op():
    told = kiln.explain(branch)(torch.ones(3))
    torch.testing.assert_close(told.result, branch(torch.ones(3)))
    made = told.facts
    first = branch.__code__.co_firstlineno
    assert [(g["start"]["line"] - first, g["end"]["line"] - first) for g in made["graphs"]] == [(1, 2), (4, 4)]
    (broke,) = made["breaks"]
    assert (broke["place"]["line"] - first, broke["place"]["text"]) == (2, "if y.sum() < 0:")
    assert broke["place"]["text"][broke["place"]["column"] :][: broke["place"]["width"]] == "y.sum() < 0"
    calls = [op for op in made["graphs"][0]["operations"] if op["kind"] == "call"]
    assert [(op["op"], op["spec"], op["place"]["line"] - first) for op in calls] == [
        ("operator.mul", "float32[3]", 1),
        ("Tensor.sum", "float32[]", 2),
        ("operator.lt", "bool[]", 2),
    ]
    (kernel,) = (k for k in made["kernels"] if k["graph"] == made["graphs"][0]["name"])
    assert all(op["kernels"] == [kernel["id"]] for op in calls)
    assert [f["op"] for f in kernel["fused"]] == ["operator.mul", "Tensor.sum", "operator.lt"]
    assert (kernel["reads"], kernel["writes"]) == (12, 13)
    assert made["summary"]["ops"] == 4 and made["summary"]["share"] == 0.8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.inner(x)) + x


def test_both_halves_are_told_by_module_and_source_line():
    compiled = kiln.compile(nn.Sequential(Block(), Block()))
    with kiln.records() as seen:
        compiled(torch.randn(2, 4)).sum().backward()
    made = facts(seen)
    modules = {op["module"] for op in made["graphs"][0]["operations"] if op["kind"] == "call"}
    assert modules == {"0", "0.inner", "1", "1.inner"}
    assert {plan["half"] for plan in made["plans"]} == {"forward", "backward"}
    origins = {f["origin"] for k in made["kernels"] if k["half"] == "backward" for f in k["fused"]}
    assert {"relu", "relu_1"} <= origins
    lines = {f["place"]["text"] for k in made["kernels"] for f in k["fused"] if f["origin"].startswith("relu")}
    assert lines == {"return torch.relu(self.inner(x)) + x"}
    stages = {stage["stage"] for stage in made["stages"]}
    assert {"capture", "differentiate", "partition", "expand", "fuse", "generate", "plan", "guards"} <= stages
    assert all(stage["own"] > -1e-3 for stage in made["stages"])


@pytest.mark.parametrize("how", ["place", "name"])
def test_a_recompile_of_a_module_speaks_of_its_forward(how):
    compiled = kiln.compile(Block())
    with kiln.records() as seen:
        for n in (2, 3, 4):
            x = torch.randn(n, 4)
            compiled(x) if how == "place" else compiled(x=x)
    (fact,) = facts(seen)["recompiles"]
    assert (fact["guard"], fact["count"]) == ("x.shape was (2, 4), now (3, 4)", 1)
    assert fact["function"]["function"] == "Block.forward"
    assert fact["place"]["text"] == "return torch.relu(self.inner(x)) + x"
    assert fact["place"]["text"][fact["place"]["column"]] == "x"
    assert "call kiln.mark_dynamic(x, 0)" in fact["remedy"]


def test_memory_is_planned_below_what_eager_holds():
    def chain(x):
        return (((x + 1) * 2).sin() - 1).cos()

    (plan,) = kiln.explain(chain)(torch.ones(1000)).facts["plans"]
    assert (plan["peak"], plan["eager_peak"]) == (4000, 8000)


def test_listening_changes_no_result_with_sizes_that_vary():
    def grow(x):
        return (x @ x.t()).relu().sum(0)

    compiled = kiln.compile(grow)
    with kiln.records() as seen:
        for n in (2, 3, 5, 7):
            x = torch.randn(n, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            compiled(x).sum().backward()
            grow(y).sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
    assert len(seen.graphs) == 2 and len(seen.recompiles) == 1


def test_nothing_costly_is_made_for_nobody():
    with recorded.Records(light=True) as seen:
        kiln.compile(branch)(torch.ones(4))
    assert not seen.kernels and not seen.plans and not seen.texts
    assert all(g.graph is None and not g.operations for g in seen.graphs) and len(seen.graphs) == 2
    assert kiln.records().totals["graphs"] >= 2


def test_captured_needs_exactly_one_graph():
    records = collected()
    captured = Captured.of(records, [[1]], 7)
    assert captured.example_inputs == (1,) and "x is a tensor" in str(captured)
    records.graphs.clear()
    with pytest.raises(
        KilnError, match=r"0 graphs captured where one is needed: g: a generator; \[branch-on-tensor\]"
    ):
        Captured.of(records, [], None)
