"""Graphs at lower levels: what is expanded to what, what is kept, and what stays a call."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import options
from kiln.base.errors import Bug
from kiln.base.graph import Graph
from kiln.base.symbols import Scope
from kiln.expand.expand import Expander, check, expand
from kiln.ops import symint
from kiln.ops.fake import make
from kiln.ops.levels import name_of
from kiln.ops.record import Recording
from kiln.ops.table import EXPANSIONS, aten
from tests.expand.sweep import Program, same
from tests.graphs import run_graph


def names(graph: Graph) -> list[str]:
    return [name_of(node.op) or "getitem" for node in graph.nodes]


def prims(function: Any, *args: torch.Tensor) -> Graph:
    """The call at level prims, checked against eager."""
    program = Program(function, args)
    wanted = program.eager()
    with options.config.patch(strict=True):
        graph = expand(program.graph(), "prims")
    same(program.run(graph), wanted, 1e-5, 1e-6)
    return graph


# What is expanded to what


def test_gelu() -> None:
    assert names(prims(F.gelu, torch.randn(4))) == ["mul", "mul", "erf", "add", "mul"]


def test_softmax() -> None:
    graph = prims(lambda x: x.softmax(-1), torch.randn(3, 4))
    assert names(graph) == ["amax", "sub", "exp", "sum", "div"]


def test_layer_norm() -> None:
    graph = prims(lambda x, w: F.layer_norm(x, (4,), w), torch.randn(3, 4), torch.randn(4))
    assert names(graph) == ["var_mean", "getitem", "getitem", "add", "rsqrt", "sub", "mul", "mul"]


def test_golden_text() -> None:
    graph = prims(lambda x: F.silu(x) + 1, torch.randn(4))
    assert str(graph) == """\
def graph(x0: 'float32[4]', x1: 'float32[4]'):
    sigmoid = torch.ops.aten.sigmoid.default(x0)  # float32[4]
    mul = torch.ops.aten.mul.Tensor(x0, sigmoid)  # float32[4]
    add = torch.ops.aten.add.Tensor(mul, 1.0)  # float32[4]
    return (add,)"""


def test_core_keeps_core_ops() -> None:
    graph = Program(lambda x: F.mish(F.gelu(x)).softmax(0), (torch.randn(4),)).graph()
    assert names(expand(graph, "core")) == ["gelu", "exp", "log1p", "tanh", "mul", "_softmax"]


def test_aten_is_the_graph_itself() -> None:
    graph = Program(F.gelu, (torch.randn(4),)).graph()
    assert expand(graph, "aten") is graph
    with pytest.raises(ValueError, match="one of aten, core, prims, not 'primitive'"):
        expand(graph, "primitive")


# Types are explicit at level prims


def test_operands_are_promoted_by_nodes() -> None:
    graph = prims(lambda x, n: x * n + True, torch.randn(4), torch.arange(4))
    assert names(graph) == ["_to_copy", "mul", "add"]
    assert graph.nodes[-1].args[1] == 1.0 and type(graph.nodes[-1].args[1]) is float


def test_half_types_are_computed_in_float32_and_rounded_once() -> None:
    graph = prims(F.silu, torch.randn(4).to(torch.bfloat16))
    assert names(graph) == ["_to_copy", "sigmoid", "mul", "_to_copy"]
    assert [n.spec.dtype for n in graph.nodes] == [torch.float32] * 3 + [torch.bfloat16]


def test_alpha_goes() -> None:
    assert names(prims(lambda x, y: torch.sub(x, y, alpha=3), torch.randn(4), torch.randn(4))) == ["mul", "sub"]


def test_integer_division_computes_in_floating_numbers() -> None:
    assert names(prims(lambda x: x / 2, torch.arange(4))) == ["_to_copy", "div"]


def test_arithmetic_of_truth() -> None:
    x, y = torch.tensor([True, False]), torch.tensor([True, True])
    assert names(prims(lambda x, y: (x + y) * (x + True), x, y)) == ["bitwise_or", "bitwise_or", "bitwise_and"]


def test_check_finds_mixed_operands() -> None:
    graph = Program(torch.mul, (torch.randn(4), torch.arange(4))).graph()
    with pytest.raises(Bug, match=r"mixes torch.float32 and torch.int64"):
        check(graph, "prims")


# Layouts and aliases


def test_strides_are_eagers() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    graph = prims(lambda x: (torch.zeros_like(x) + F.gelu(x)).softmax(1), x)
    assert graph.outputs[0].spec.stride == x.softmax(1).stride()


def test_other_strides_are_mended_by_a_copy() -> None:
    graph = prims(lambda x: x.masked_fill(x > 0, 1.0), torch.randn(3, 4).t())
    assert names(graph)[-1] == "clone" and graph.outputs[0].spec.stride == (3, 1)


def test_a_result_is_not_an_input() -> None:
    graph = prims(lambda x: torch.pow(x, 1), torch.randn(4))
    assert names(graph) == ["clone"]


def test_aliases_are_dissolved() -> None:
    graph = prims(lambda x: x.detach() * 2, torch.randn(4))
    assert names(graph) == ["mul"]


# What is kept


def test_places_and_marks_are_kept() -> None:
    graph = Program(lambda x: F.gelu(x), (torch.randn(4),)).graph()
    (node,) = graph.nodes
    node.where, node.backward, node.region = "model.py:3", True, 2
    result = expand(graph, "prims")
    assert {(n.where, n.backward, n.region) for n in result.nodes} == {("model.py:3", True, 2)}


def test_inputs_and_unused_nodes_are_kept() -> None:
    graph = Program(lambda x: (x.exp(), F.gelu(x))[1], (torch.randn(4),)).graph()
    result = expand(graph, "core")
    assert names(result) == ["exp", "gelu"]
    assert [n.name for n in result.inputs] == [n.name for n in graph.inputs]
    assert [n.spec for n in result.inputs] == [n.spec for n in graph.inputs]


def test_an_op_is_worked_out_once_for_one_type() -> None:
    count = 0

    def counted(x: torch.Tensor, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(x, **kwargs)

    original = EXPANSIONS[aten.gelu.default]
    graph = Program(lambda x: F.gelu(F.gelu(F.gelu(x))), (torch.randn(4),)).graph()
    expander = Expander("prims")
    EXPANSIONS[aten.gelu.default] = counted
    try:
        assert names(expander.run(graph)) == ["mul", "mul", "erf", "add", "mul"] * 3
    finally:
        EXPANSIONS[aten.gelu.default] = original
    assert count == 1


def test_numbers_of_other_kinds_are_other_types() -> None:
    graph = prims(lambda x: x + 1 + 1.0 - 0.0 + -0.0, torch.zeros(2))
    assert [n.args[1] for n in graph.nodes] == [1.0, 1.0, 0.0, -0.0]
    assert str(graph.nodes[-1].args[1]) == "-0.0"


# What stays a call


def test_an_unknown_op_stays_a_call() -> None:
    graph = prims(lambda x: torch.special.i0(x).exp(), torch.randn(4))
    assert names(graph) == ["i0" if "i0" in names(graph) else "special_i0", "exp"]


def test_complex_numbers_stay_with_eagers_kernels() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    graph = Program(torch.tanh, (x,)).graph()
    assert names(expand(graph, "prims")) == ["tanh"]
    assert names(expand(Program(lambda x: x.mean(), (x,)).graph(), "prims")) == ["mean"]


def test_a_failing_expansion_leaves_the_call(caplog: Any) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no idea")

    graph = Program(F.silu, (torch.randn(4),)).graph()
    original, EXPANSIONS[aten.silu.default] = EXPANSIONS[aten.silu.default], fails
    try:
        with caplog.at_level(logging.WARNING, "kiln"), options.config.patch(strict=False):
            assert names(expand(graph, "prims")) == ["silu"]
        assert "the expansion of aten.silu.default fails, its kernel is called: no idea" in caplog.text
        with pytest.raises(Bug, match="no idea"), options.config.patch(strict=True):
            expand(graph, "prims")
    finally:
        EXPANSIONS[aten.silu.default] = original


def test_an_expansion_that_gives_another_type_is_a_fault() -> None:
    graph = Program(F.silu, (torch.randn(4),)).graph()
    original, EXPANSIONS[aten.silu.default] = EXPANSIONS[aten.silu.default], lambda x: x.double()
    try:
        with pytest.raises(Bug, match=r"float64\[4\] on cpu in place of float32\[4\]"), options.config.patch(strict=True):
            expand(graph, "prims")
    finally:
        EXPANSIONS[aten.silu.default] = original


# What surrounds the compilation


def test_autocast_and_modes_have_no_say() -> None:
    graph = Program(lambda x: F.softmax(x, -1), (torch.randn(3, 4).to(torch.bfloat16),)).graph()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
        surrounded = expand(graph, "prims")
    assert str(surrounded) == str(expand(graph, "prims"))


# Symbolic sizes


def test_symbolic_sizes_stay_symbolic() -> None:
    scope = Scope()
    size = scope.symbol(5, "x.size(0)")
    recording = Recording()
    x = make((symint.wrap(size), 8), (8, 1), torch.float32, torch.device("cpu"))
    recording.input("x", x)
    with recording:
        out = F.gelu(F.layer_norm(x, (8,))).softmax(0).mean(0)
    recording.graph.outputs = (recording.node(out),)
    graph = expand(recording.graph, "prims").check()
    assert graph.nodes[-1].args[1] == size and scope.records == []
    value = torch.randn(7, 8)
    (found,) = run_graph(graph, value, resolve=lambda leaf: leaf.evaluate({size: 7}) if hasattr(leaf, "scope") else leaf)
    torch.testing.assert_close(found, F.gelu(F.layer_norm(value, (8,))).softmax(0).mean(0))


def test_halves_of_a_half_that_varies_are_joined() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return F.glu(x[:, : x.shape[1] // 2], -1).sin()

    mine = kiln.compile(half, fullgraph=True)
    for n in (8, 12, 20, 36):
        x, y = (torch.linspace(-2, 2, 3 * n).view(3, n).requires_grad_() for _ in range(2))
        mine(x).sum().backward()
        half(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
