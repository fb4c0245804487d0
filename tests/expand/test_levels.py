"""The lists of ops, and the table that shows them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import kiln
from kiln.ops.catalogue import entries
from kiln.ops.levels import COMPOSED, CORE, KERNELS, PRIMITIVES, level_of, name_of
from kiln.ops.table import EXPANSIONS, aten


def test_lists_are_closed_and_of_a_size_to_know() -> None:
    assert (len(PRIMITIVES), len(CORE)) == (85, 242)
    assert all(hasattr(aten, name) for name in CORE)


def test_composed_ops_expand_and_kernels_do_not() -> None:
    names = {name_of(op) for op in EXPANSIONS}
    assert COMPOSED <= names
    assert not KERNELS & names


def test_expansions_are_of_ops_that_write_nothing() -> None:
    assert [op for op in EXPANSIONS if op._schema.is_mutable] == []


@pytest.mark.parametrize(
    ("op", "level"),
    [
        (aten.add.Tensor, "prims"),
        (aten.mm.default, "kernel"),
        (aten.gelu.default, "core"),
        (aten.mish.default, "aten"),
        (aten.cauchy.default, "aten"),
    ],
)
def test_level(op: torch._ops.OpOverload, level: str) -> None:
    assert level_of(op) == level


def test_table_has_every_op() -> None:
    known = {entry.name: entry for entry in entries()}
    assert len(known) > 1500
    assert known["gelu.default"].level == "core" and known["gelu.default"].expansion.startswith("kiln/ops/expansions/activations.py:")
    assert known["gelu.default"].rule.startswith("kiln/ops/pointwise.py:")
    assert known["cauchy.default"].level == "call" and known["cauchy.default"].rule == "meta kernel"
    assert known["layer_norm.default"].level == "composite"


def test_table_prints() -> None:
    out = io.StringIO()
    kiln.ops.table("softplus", file=out)
    header, *rows = out.getvalue().splitlines()
    assert header.split() == ["op", "level", "shape", "rule", "expansion"]
    assert [row.split()[:2] for row in rows] == [["softplus.default", "aten"], ["softplus_backward.default", "aten"]]


def test_the_documentation_lists_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "levels.md").read_text()
    for name in PRIMITIVES:
        assert f"| `{name}` | " in text, "each primitive says what it means"
    for name in (*KERNELS, *COMPOSED):
        assert f"`{name}`" in text
    assert f"| {len(CORE)} ops" in text and f"{len(PRIMITIVES)} primitives" in text and f"{len(KERNELS)} kernels" in text
