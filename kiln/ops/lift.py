"""Ops without a shape rule on symbolic sizes: lifted from what the meta kernel says of now, or concrete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.ops.layout import Mismatch, followed, is_dense, overlaps
from kiln.ops.meta import Layout, Same, asked, flagged, infer, memory_of
from kiln.ops.sizes import sizes_of
from kiln.ops.symint import SYMBOLIC, expr_of, specialised

Make = Callable[..., Tensor]
Twins = list[tuple[Tensor, Tensor]]


def is_symbolic(value: Any) -> bool:
    """Whether there is a symbolic number in a nest of arguments."""
    if isinstance(value, Tensor):
        return value._has_symbolic_sizes_strides  # type: ignore[attr-defined, no-any-return]
    if isinstance(value, (list, tuple)):
        return any(is_symbolic(item) for item in value)
    if isinstance(value, dict):
        return any(is_symbolic(item) for item in value.values())
    return type(value) in SYMBOLIC


def lifted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """What `func` returns on symbolic sizes; NotImplemented when that is known for concrete ones only.

    The meta kernel is asked at the sizes of now. What it says of sizes is replaced by what `sizes_of` says,
    provided that the two agree.
    """
    if not is_symbolic((args, kwargs)):
        return NotImplemented
    try:
        found = sizes_of(func, args, kwargs)
    except Mismatch:
        return NotImplemented
    twins: Twins = []
    hinted_args, hinted_kwargs = replaced((args, kwargs), twins, make, hint_of)
    if found is NotImplemented and not _gives_arguments(func) or any(map(_ambiguous, twins)):
        return NotImplemented
    try:
        answer, tensors = infer(func, hinted_args, hinted_kwargs, asked(func, hinted_args))
    except Break:
        raise
    except Exception:
        return NotImplemented
    proposals = [] if found is NotImplemented else list(found)
    return _built(answer, originals(tensors, twins), proposals, make)


def _ambiguous(twin: tuple[Tensor, Tensor]) -> bool:
    """Whether dimensions of a tensor overlap: which is the outer one changes with its sizes."""
    size, stride = twin[0].shape, twin[0].stride()
    moving = [d for d, s in enumerate(stride) if s != 0]
    return overlaps([size[d] for d in moving], [stride[d] for d in moving])


def _gives_arguments(func: Any) -> bool:
    """Whether all that `func` returns is among its arguments, as of ops in place."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and r.alias_info.is_write for r in returns)


def _built(answer: Any, tensors: list[Tensor], proposals: list[Any], make: Make) -> Any:
    """The fakes for an answer of `infer` with the proposed sizes; proposals are used up, but for the last."""
    kind = type(answer)
    if kind is Same:
        return tensors[answer.index]
    if kind is tuple or kind is list:
        items = []
        for item in answer:
            built = _built(item, tensors, proposals, make)
            if built is NotImplemented:
                return NotImplemented
            items.append(built)
        return kind(items)
    if kind is not Layout:
        return answer
    if not proposals:
        return NotImplemented
    size = proposals.pop(0) if len(proposals) > 1 else proposals[0]
    if tuple([hint_of(n) for n in size]) != tuple(answer.size) or not is_dense(answer.size, answer.stride):
        return NotImplemented
    if answer.offset or answer.conj or answer.neg:
        return NotImplemented
    stride = followed(size, answer.size, answer.stride)
    return make(size, stride, answer.dtype, answer.device)


def hint_of(value: Any) -> Any:
    """The number that a symbolic value is now, without recording that."""
    value = expr_of(value)
    return getattr(value, "hint", value)


def concretely(value: Any, twins: Twins, make: Make) -> Any:
    """A nest of arguments with the sizes that they have now, which their scope records."""
    return replaced(value, twins, make, specialised)


def replaced(value: Any, twins: Twins, make: Make, number: Callable[[Any], Any]) -> Any:
    """A nest of arguments with `number` applied to symbolic values.

    `twins` gets each tensor that replaces another, with the one that it stands for.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return twin_of(value) if value._has_symbolic_sizes_strides else value
        if type(value) is torch.Size:
            return tuple(map(leaf, value))
        return number(value) if type(value) in SYMBOLIC else value

    def twin_of(original: Tensor) -> Tensor:
        for twin, known in twins:
            if known is original:
                return twin
        size, stride = [number(n) for n in original.shape], [number(n) for n in original.stride()]
        twin = make(size, stride, original.dtype, original.device, number(original.storage_offset()))
        twin.root = memory_of(original)  # type: ignore[attr-defined]
        twins.append((flagged(twin, original.is_conj(), original.is_neg()), original))
        return twin

    return mapped(value, leaf)


def originals(tensors: list[Tensor], twins: Twins) -> list[Tensor]:
    """The tensors for which `tensors` stand."""
    return [next((original for twin, original in twins if twin is t), t) for t in tensors]
