"""Expansions of ops over lists of tensors: `_foreach_*` and fused optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import HALF, widened
from kiln.ops.table import EXPANSIONS, aten, expansion, expansions

#: `_foreach_` ops of one list.
UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
#: `_foreach_` ops of two lists, or of a list and a number, numbers or a tensor.
BINARY = "add sub mul div maximum minimum clamp_min clamp_max pow".split()


def _each(operation: Callable[..., Any], tensors: list[Tensor], *others: Any, **scale: Any) -> list[Tensor]:
    """The operation for each tensor of a list, with what stands beside it in others, or is for all."""
    rows = [other if isinstance(other, (list, tuple)) else [other] * len(tensors) for other in others]
    return [operation(*row, **scale) for row in zip(tensors, *rows, strict=True)]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("maximum", "clamp_min"), lambda x, bound: (
        torch.maximum(x, bound) if isinstance(bound, Tensor) else torch.clamp(x, min=bound))),
    **dict.fromkeys(("minimum", "clamp_max"), lambda x, bound: (
        torch.minimum(x, bound) if isinstance(bound, Tensor) else torch.clamp(x, max=bound))),
}  # fmt: skip


def _declare(name: str, run: Callable[..., Any]) -> None:
    packet = getattr(aten, f"_foreach_{name}", None)
    for overload in packet.overloads() if packet is not None else ():
        target = getattr(packet, overload)
        if not target._schema.is_mutable and overload != "ScalarAndTensor":
            expansion(target, complex_too=True)(run)


for _name in (*UNARY, *BINARY, "lerp"):
    _declare(_name, partial(_each, _OPERATIONS.get(_name) or getattr(torch, _name)))


def _scaled(operation: Callable[..., Any], x: Tensor, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
    """The factor after the product or quotient, and one rounding: the order of the GPU's kernels."""
    wide = [value.float() if x.dtype in HALF else value for value in (x, a, b)]
    combined = wide[1] * wide[2] if operation is torch.addcmul else wide[1] / wide[2]
    return (wide[0] + combined * factor).to(x.dtype)


def _combined(
    operation: Callable[..., Any], tensors: list[Tensor], first: list[Tensor], second: list[Tensor],
    values: Any = 1,
) -> Any:  # fmt: skip
    factors = values if isinstance(values, (list, tuple)) else [values] * len(tensors)
    if isinstance(values, Tensor):
        # The factors of all as one tensor: each multiplies as a tensor without dimensions does.
        if values.device.type == "cpu" and all(x.device.type == "cuda" for x in tensors):
            return [
                _scaled(operation, x, a, b, values.select(0, i))
                for i, (x, a, b) in enumerate(zip(tensors, first, second, strict=True))
            ]
        if any(x.device != values.device or x.dtype in HALF for x in tensors):
            return NotImplemented
        first = [a * values.select(0, i) for i, a in enumerate(first)]
        factors = [1] * len(tensors)
    return [operation(x, a, b, value=v) for x, a, b, v in zip(tensors, first, second, factors, strict=True)]


_declare("addcmul", partial(_combined, torch.addcmul))
_declare("addcdiv", partial(_combined, torch.addcdiv))


expansions({
    "_foreach_norm.Scalar": lambda tensors, order=2, dtype=None: [
        torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors],
    "_foreach_pow.ScalarAndTensor": lambda base, exponents: [torch.pow(base, x) for x in exponents],
})  # fmt: skip


# Scaled gradients, in their functional forms


@expansion(aten._amp_foreach_non_finite_check_and_unscale.default)
def unscaled(grads: list[Tensor], found: Tensor, factor: Tensor) -> Any:
    """Gradients of a loss that was scaled, times a factor; and 1 where one of them is not finite."""
    if not grads:
        return NotImplemented
    finite = [torch.isfinite(g).all() for g in grads]
    found = torch.where(reduce(torch.logical_and, finite), found, 1.0)
    return [(widened(g) * factor.reshape(())).to(g.dtype) for g in grads], found


# Fused optimizer steps, in their functional forms: the new values of all lists. Half types are computed with
# in f32, and rounded once where a value is stored.


def _scaled_back(grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Gradients of a loss that was scaled, as those of the loss itself."""
    if scale is None:
        return list(grads)
    return [(widened(g) / scale.reshape(())).to(g.dtype) for g in grads]


def _unless(found: Tensor | None, *lists: tuple[list[Tensor], list[Tensor]]) -> Any:
    """Lists of new values beside the old ones, which stay where some gradient was `found` to be infinite."""
    if found is None:
        return [new for new, _ in lists]
    stays = found.reshape(()) == 1
    return [[torch.where(stays, b, a) for a, b in zip(*pair, strict=True)] for pair in lists]


def _prepared(grad: Tensor, parameter: Tensor, decay: float, maximize: bool) -> Tensor:
    grad = -grad if maximize else grad
    return grad + parameter * decay if decay else grad


def _adam(
    decoupled: bool, parameters: list[Tensor], grads: list[Tensor], means: list[Tensor],
    squares: list[Tensor], largest: list[Tensor], steps: list[Tensor], *, lr: Any, beta1: float, beta2: float,
    weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None,
    found_inf: Any = None,
) -> Any:  # fmt: skip
    plain = _scaled_back(grads, grad_scale)
    new: tuple[list[Tensor], ...] = ([], [], [], [])
    for i, (*own, step) in enumerate(zip(parameters, plain, means, squares, steps, strict=True)):
        p, g, m, v = map(widened, own)
        g = _prepared(g, p, 0 if decoupled else weight_decay, maximize)
        p = p - p * (lr * weight_decay) if decoupled and weight_decay else p
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        highest = torch.maximum(widened(largest[i]), v) if amsgrad else v
        # The corrections for the start are taken in double precision, as one number.
        count = step.to(torch.float64)
        rise = 1 - torch.pow(beta1, count)
        spread = torch.sqrt(highest) / torch.sqrt(1 - torch.pow(beta2, count)) + eps
        p = p - m * (lr / rise) / spread
        for out, value in zip(new, (p, m, v, highest), strict=True):
            out.append(value.to(own[0].dtype))
    old = parameters, means, squares, largest if amsgrad else squares
    moved, first, second, tops, plain = _unless(found_inf, *zip(new, old, strict=True), (plain, grads))
    return moved, plain, first, second, tops if amsgrad else []


for _packet, _decoupled in ((aten._fused_adam, False), (aten._fused_adamw, True)):
    for _overload in ("default", "tensor_lr"):
        expansion(getattr(_packet, _overload))(partial(_adam, _decoupled))


@expansion(aten._fused_sgd.default, aten._fused_sgd.tensor_lr)
def sgd(
    parameters: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *, weight_decay: float,
    momentum: float, lr: Any, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool,
    grad_scale: Any = None, found_inf: Any = None,
) -> Any:  # fmt: skip
    plain = _scaled_back(grads, grad_scale)
    moved, kept = [], []
    for i, own in enumerate(zip(parameters, plain, strict=True)):
        p, g = map(widened, own)
        g = _prepared(g, p, weight_decay, maximize)
        if momentum:
            buffer = g.clone() if is_first_step else widened(buffers[i]) * momentum + g * (1 - dampening)
            kept.append(buffer.to(own[0].dtype))
            g = g + buffer * momentum if nesterov else buffer
        moved.append((p - g * lr).to(own[0].dtype))
    old = buffers if momentum else []
    moved, plain, kept = _unless(found_inf, (moved, parameters), (plain, grads), (kept, old))
    return moved, plain, kept


assert aten._foreach_add.List in EXPANSIONS, "torch names its ops over lists otherwise"
