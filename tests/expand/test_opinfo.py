"""Every expansion against eager on the samples that ship with torch: values, gradients, strides and accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kiln.base import options
from kiln.base.errors import Break
from kiln.ops.table import EXPANSIONS
from tests.expand.sweep import OPS, Program, as_accurate, expandable, expanded, programs, same

#: The overloads whose expansions samples of torch's reach, each with up to two ops that do so at once.
REACHED: dict[str, list[str]] = {
    line.split()[0]: line.split()[1:] for line in (Path(__file__).parent / "reached.txt").read_text().splitlines()
}

#: Calls that differ from their graph before anything is expanded.
UNTRACED = {
    "as_strided.partial_views": "the sample reads memory outside its inputs",
    "ormqr": "the gradient's strides differ in the recorded graph",
    "tensor_split": "the C++ code reads the memory of the indices",
    "empty": "no values to compare",
    "empty_like": "no values to compare",
    "empty_permuted": "no values to compare",
    "empty_strided": "no values to compare",
    "new_empty": "no values to compare",
    "new_empty_strided": "no values to compare",
}
#: Random numbers are drawn otherwise at level prims: their distribution is tested in test_direct.py.
RANDOM = {"bernoulli", "nn.functional.fractional_max_pool3d", "rand_like", "uniform"}

#: Gradients of expansions by autograd that differ from the op's gradient, though the op's gradient, traced, agrees.
NOT_DIFFERENTIATED = {
    "native_layer_norm": "the op keeps mean and deviation out of its gradient",
    "fill": "the op gives a gradient of zeros, its expansion none",
    "linalg.norm.subgradients_at_zero": "the square root has no gradient at zero",
    "nn.functional.linear_cross_entropy.chunked": "an autograd function of its own",
}

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [name for name in OPS if name not in UNTRACED]
#: Enough ops to reach every expansion that the first samples reach.
QUICK = sorted({name for names in REACHED.values() for name in names})


@pytest.fixture(autouse=True)
def strict() -> Any:
    with options.config.patch(strict=True):
        yield


def traced(program: Program, grad: bool = True) -> Any:
    """The graph of a call that has something to expand, or None."""
    try:
        program.eager()
        graph = program.graph(grad)
    except (Break, RuntimeError, ValueError, NotImplementedError, AssertionError):
        return None
    return graph if expandable(graph) else None


def compare(name: str, count: int) -> set[Any]:
    """Compare samples in float64 at both levels; the ops that were expanded."""
    seen: set[Any] = set()
    dtype = torch.float64 if torch.float64 in OPS[name].dtypes else torch.int64
    for program in programs(name, dtype, count):
        graph = traced(program)
        if graph is not None:
            seen |= expandable(graph)
            wanted = program.eager()
            for level in ("core", "prims"):
                if level == "core" or name not in RANDOM:
                    same(program.run(expanded(graph, level)), wanted)
    return seen


@pytest.mark.parametrize("name", QUICK)
def test_values_and_gradients(name: str) -> None:
    assert {str(op) for op in compare(name, 2)} >= {op for op, names in REACHED.items() if name in names}


@pytest.mark.parametrize("name", [n for n in QUICK if n not in RANDOM])
def test_accuracy_in_float32(name: str) -> None:
    for program in programs(name, torch.float32, 1):
        graph = traced(program)
        if graph is not None:
            exact = program.cast(torch.float64).eager()
            found, eager = program.run(expanded(graph, "prims")), program.eager()
            if len(exact) == len(eager) and all(e.dtype is torch.float64 for e in exact):
                as_accurate(found, eager, exact)


@pytest.mark.parametrize("name", [n for n in QUICK if n not in RANDOM and n not in NOT_DIFFERENTIATED])
def test_expansion_differentiated_by_autograd(name: str) -> None:
    for program in programs(name, torch.float64, 1):
        graph = traced(program, grad=False)
        if graph is not None and any(t.requires_grad for t in program.inputs):
            if any(n.op._schema.is_mutable for n in graph.nodes if hasattr(n.op, "_schema")):
                continue
            wanted = program.eager()[len(graph.outputs) :]
            found = program.differentiated(expanded(graph, "prims"))
            same([t.contiguous() for t in found], [t.contiguous() for t in wanted])


@pytest.mark.slow
def test_every_sample() -> None:
    reached = {str(op) for name in NAMES for op in compare(name, 1000)}
    assert reached == REACHED.keys()


@pytest.mark.slow
def test_accuracy_of_every_op() -> None:
    for name in NAMES:
        if name not in RANDOM and name not in QUICK:
            test_accuracy_in_float32(name)


@pytest.mark.slow
def test_every_expansion_differentiated_by_autograd() -> None:
    for name in NAMES:
        if name not in RANDOM and name not in NOT_DIFFERENTIATED and name not in QUICK:
            test_expansion_differentiated_by_autograd(name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    for name in NAMES:
        for program in programs(name, dtype, 3) if name not in RANDOM else []:
            graph = traced(program, grad=False)
            if graph is None:
                continue
            wanted = program.eager()[: len(graph.outputs)]
            for level in ("core", "prims"):
                found = program.run(expanded(graph, level))
                if dtype is torch.bfloat16:
                    exact = program.cast(torch.float64).eager()[: len(graph.outputs)]
                    as_accurate(found, wanted, exact)
                else:
                    same(found, wanted, 1e-5, 1e-6)


def test_the_list_of_reached_expansions_names_expansions() -> None:
    assert {str(op) for op in EXPANSIONS} >= REACHED.keys()
