"""Shape rules of ops over lists of tensors: `_foreach_*`, and fused optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import FakeTensor
from kiln.ops.layout import FLOATS
from kiln.ops.pointwise import like
from kiln.ops.table import LATE, Rule

#: These give one number for each tensor, or are not elementwise.
OTHERS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_copy", "_foreach_powsum"})


def plain(value: Any, like: list[Tensor]) -> bool:
    """Whether an argument takes part without changing type or layout of what it meets."""
    if isinstance(value, (list, tuple)):
        return len(value) == len(like) and all(map(alike, value, like))
    return not isinstance(value, complex) and (
        not isinstance(value, Tensor) or value.dim() < 2 and not value.is_complex())  # fmt: skip


def alike(item: Any, mate: Tensor) -> bool:
    """Whether a number or tensor of a list leaves its mate's type and layout as they are."""
    if not isinstance(item, Tensor):
        return not isinstance(item, complex)
    return (
        item.dtype is mate.dtype and item.device == mate.device
        and item.shape == mate.shape and item.stride() == mate.stride()
    )  # fmt: skip


def usual(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all lists hold floats of the same types and layouts, as those of optimizers do."""
    return (
        isinstance(tensors, (list, tuple)) and bool(tensors)
        and all(type(x) is FakeTensor and x.dtype in FLOATS for x in tensors)
        and all(plain(value, tensors) for value in (*args, *kwargs.values()))  # type: ignore[arg-type]
    )


def in_place(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if usual(tensors, args, kwargs):
        return None
    for value in (*args, *kwargs.values()):
        for x, item in zip(tensors, value if isinstance(value, (list, tuple)) else [value] * len(tensors)):
            if isinstance(item, complex):
                # Torch's own refusal of what a real tensor cannot hold: its rule for lists does not look.
                torch.empty(0, dtype=x.dtype).mul_(item)
    return NotImplemented


def functional(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    return [like(x, x.dtype) for x in tensors] if usual(tensors, args, kwargs) else NotImplemented


def rule(overload: Any) -> Rule | None:
    """The rule of an overload of this family."""
    schema = overload._schema
    if schema.name.partition("::")[2].rstrip("_") in OTHERS or any(a.is_out for a in schema.arguments):
        return None
    if str(schema.arguments[0].type) != "List[Tensor]":
        return lambda base, exponents: functional(exponents, base)
    return in_place if schema.is_mutable else functional


def steps(*lists: Any, **kwargs: Any) -> None:
    """A fused optimizer step writes to its lists and gives nothing."""


LATE["aten::_foreach_"] = rule
for _name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
    LATE[f"aten::{_name}"] = lambda overload: None if overload._schema.returns else steps
