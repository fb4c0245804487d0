"""Functions of torch whose native form reads sizes as plain numbers, for those that are symbolic."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.nn import functional

from kiln.base.arithmetic import call, mul
from kiln.base.expressions import CALLS
from kiln.ops.lift import is_symbolic
from kiln.ops.symint import SYMBOLIC, expr_of, wrap
from kiln.ops.table import aten

#: Mode and number of resampled dimensions: the op, and whether corners may be aligned.
OPS: dict[tuple[str, int], tuple[Any, bool]] = {
    **{("nearest", n): (getattr(aten, f"upsample_nearest{n}d"), False) for n in (1, 2, 3)},
    **{("nearest-exact", n): (getattr(aten, f"_upsample_nearest_exact{n}d"), False) for n in (1, 2, 3)},
    ("linear", 1): (aten.upsample_linear1d, True),
    ("bilinear", 2): (aten.upsample_bilinear2d, True),
    ("trilinear", 3): (aten.upsample_trilinear3d, True),
    ("bicubic", 2): (aten.upsample_bicubic2d, True),
}


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """What torch's function gives, by the op that takes the size of the result."""
    dims = input.dim() - 2
    found = OPS.get((mode, dims))
    given = size if scale_factor is None else scale_factor
    unclear = (size is None) == (scale_factor is None) or recompute_scale_factor and size is not None
    if found is None or antialias or unclear:
        return functional.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    parts = list(given) if isinstance(given, (list, tuple)) else [given] * dims
    scales: list[Any] = [None] * dims
    if size is None:
        if not recompute_scale_factor:
            scales = parts = [float(scale) for scale in parts]
        parts = [scaled(n, scale) for n, scale in zip(input.shape[2:], parts, strict=True)]
    op, aligns = found
    corners = (bool(align_corners),) if aligns else ()
    result: Tensor = op.default(input, parts, *corners, *scales)
    return result


def scaled(n: Any, scale: Any) -> Any:
    """The size of a dimension of `n` elements after scaling."""
    if type(scale) in SYMBOLIC:
        return wrap(call("math.trunc", mul(call("float", expr_of(n)), expr_of(scale))))
    if type(n) not in SYMBOLIC:
        return int(n * scale)
    if float(scale).is_integer():
        return wrap(mul(expr_of(n), int(scale)))
    return wrap(call("math.trunc", mul(call("float", expr_of(n)), scale)))


def linspace(start: Any, end: Any, steps: Any, **options: Any) -> Tensor:
    """What torch's function gives, from both ends to the middle."""
    kind = options.get("dtype") or torch.get_default_dtype()
    plain = all(type(n) in (int, float) for n in (start, end)) and options.get("out") is None
    if not plain or kind not in (torch.float32, torch.float64) or steps < 2:
        return torch.linspace(start, end, steps, **options)
    step, half = (end - start) / (steps - 1), steps // 2
    wanted = options.pop("requires_grad", False)
    places = torch.arange(steps, **{**options, "dtype": kind})
    result = torch.where(places < half, places * step + start, (places - (steps - 1)) * step + end)
    return result.requires_grad_() if wanted else result


def window(name: str, alpha: float, beta: float, length: Any, *given: Any, **options: Any) -> Tensor:
    """What a window of raised cosines is, by its formula."""
    periodic = given[0] if given else options.pop("periodic", True)
    kind = options.get("dtype") or torch.get_default_dtype()
    if len(given) > 1 or options.keys() - {"dtype", "device"} or not kind.is_floating_point or length < 2:
        return getattr(torch, name)(length, periodic, *given[1:], **options)  # type: ignore[no-any-return]
    step = 2 * math.pi / (length if periodic else length - 1)
    return (torch.arange(length, **{**options, "dtype": kind}) * step).cos() * -beta + alpha


def kron(input: Tensor, other: Tensor) -> Tensor:
    """What torch's function gives: each element of one times the other, laid out as blocks."""
    rank = max(input.dim(), other.dim())
    a, b = ((*[1] * (rank - x.dim()), *x.shape) for x in (input, other))
    each = input.reshape([n for size in a for n in (size, 1)])
    blocks = other.reshape([n for size in b for n in (1, size)])
    return (each * blocks).reshape([m * n for m, n in zip(a, b, strict=True)])


def cov(input: Tensor, *, correction: Any = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """What torch's function gives, of rows that are at least two numbers long."""
    weighted = fweights is not None or aweights is not None
    if weighted or type(correction) is not int or correction > 1 or input.dim() != 2 or input.is_complex():
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    count = input.shape[1]
    centred = input - (input.sum(1) / count).unsqueeze(1)
    return torch.mm(centred, centred.t()).squeeze() / (count - correction)


def corrcoef(input: Tensor) -> Tensor:
    """What torch's function gives."""
    if input.dim() != 2 or input.is_complex():
        return torch.corrcoef(input)
    found = cov(input)
    spread = found.diagonal().sqrt()
    return (found / spread.unsqueeze(1) / spread).clip(-1, 1)


def stft(
    input: Tensor, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None,
    center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: Any = None,
    return_complex: Any = None, align_to_window: Any = None,
) -> Tensor:  # fmt: skip
    """What torch's function gives for real signals: the frames one beside the other, and their spectra."""
    given = (hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex)
    plain = isinstance(window, Tensor) and win_length in (None, n_fft) and tuple(window.shape) == (n_fft,)
    fits = type(n_fft) is int and input.dim() in (1, 2) and input.shape[-1] > n_fft
    odd = input.is_complex() or align_to_window or plain and window.is_complex()
    if odd or not (plain and fits and return_complex):
        return torch.stft(input, n_fft, *given, align_to_window)
    if center:
        batched = functional.pad(input.view(1, -1, input.shape[-1]), [n_fft // 2] * 2, pad_mode)
        input = batched.view(*input.shape[:-1], batched.shape[-1])
    frames = input.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length) * window
    spectrum = torch.fft.rfft if onesided is None or onesided else torch.fft.fft
    return spectrum(frames, norm="ortho" if normalized else "backward").transpose(-2, -1)


def item(x: Any, index: Any) -> Any:
    """`x[index]`, symbolic numbers in it by `select`, which takes them as they are."""
    parts = index if type(index) is tuple else (index,)
    if not isinstance(x, Tensor) or not any(type(part) is SymInt for part in parts):
        return operator.getitem(x, index)
    if not all(part is None or part is Ellipsis or type(part) in (int, SymInt, slice) for part in parts):
        return operator.getitem(x, index)
    used = sum([type(part) in (int, SymInt, slice) for part in parts])
    chosen, dim = [], 0
    for part in parts:
        if type(part) is SymInt:
            chosen.append((dim, part))
        dim += x.dim() - used if part is Ellipsis else type(part) is not int
    view = x[tuple([slice(None) if type(part) is SymInt else part for part in parts])]
    for dim, place in reversed(chosen):
        view = view.select(dim, place)
    return view


def set_item(x: Any, index: Any, value: Any) -> None:
    """`x[index] = value`, symbolic numbers in it as in `item`."""
    parts = index if type(index) is tuple else (index,)
    plain = all(part is None or part is Ellipsis or type(part) in (int, SymInt, slice) for part in parts)
    if isinstance(x, Tensor) and plain and any(type(part) is SymInt for part in parts):
        x, index = item(x, index), Ellipsis
    operator.setitem(x, index, value)


def asked(x: Any, number: Any) -> bool:
    """Whether the derivative with respect to a tensor would ask what a symbolic number is."""
    followed = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
    return followed and type(number) in SYMBOLIC and x.dtype in (torch.float32, torch.float64)


def beside(x: Tensor, number: Any) -> Tensor:
    """A symbolic number as a tensor that changes no dtype, of which autograd asks nothing."""
    return torch.full((), number, dtype=x.dtype, device=x.device)


def power(function: Any, x: Any, exponent: Any, *rest: Any) -> Any:
    """`x ** exponent`, by the function that is given; of two tensors autograd keeps the power itself."""
    if asked(x, exponent):
        written = function in IN_PLACE
        found = torch.pow(x.clone() if written else x, beside(x, exponent)).clone()
        return x.copy_(found) if written else found
    if asked(exponent, x):
        return torch.pow(beside(exponent, x), exponent).clone()
    return function(x, exponent, *rest)


IN_PLACE = frozenset({Tensor.pow_, Tensor.__ipow__, operator.ipow})


def lerp(function: Any, input: Tensor, end: Any, weight: Any) -> Tensor:
    """What torch's function gives."""
    found: Tensor = function(input, end, beside(input, weight) if asked(input, weight) else weight)
    return found


def applied(name: str, function: Any, x: Any, *rest: Any) -> Any:
    """A function of the module math on a symbolic number."""
    return function(x, *rest) if rest or type(x) not in SYMBOLIC else wrap(call(name, expr_of(x)))


#: What stands for a function where its arguments have symbolic sizes.
FORMS: dict[Any, Any] = {
    functional.interpolate: interpolate,
    torch.linspace: linspace,
    torch.hann_window: partial(window, "hann_window", 0.5, 0.5),
    torch.hamming_window: partial(window, "hamming_window", 0.54, 0.46),
    torch.kron: kron,
    torch.cov: cov,
    torch.corrcoef: corrcoef,
    torch.stft: stft,
    **{f: partial(power, f) for f in (torch.pow, Tensor.pow, Tensor.__pow__, operator.pow, *IN_PLACE)},
    **{f: partial(lerp, f) for f in (torch.lerp, Tensor.lerp, Tensor.lerp_)},
    **dict.fromkeys((operator.getitem, Tensor.__getitem__), item),
    **dict.fromkeys((operator.setitem, Tensor.__setitem__), set_item),
    **{f: partial(applied, name, f) for name, f in CALLS.items() if name.startswith("math.")},
}


def form_of(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function that takes these arguments, or what stands for it."""
    form = FORMS.get(function) if function.__hash__ is not None else None
    return function if form is None or "out" in kwargs or not is_symbolic((args, kwargs)) else form
