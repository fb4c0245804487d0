"""How near to the exact result a compiled one must be: about as near as eager's, by a run in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

HALVES = dict.fromkeys((torch.bfloat16, torch.float16), torch.float64)
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128, **HALVES}
#: Units in the last place of the largest number that a result may be off, whatever eager's error is.
ULPS = 8


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], dtypes: dict[Any, Any]) -> Any:
    """A nest of arguments with other values in its float tensors, which keep their layout, and other dtypes."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in WIDER or value.layout is not torch.strided:
            return value
        new = torch.empty_like(value, dtype=dtypes.get(value.dtype, value.dtype))
        return new.copy_(change(value.detach())).requires_grad_(value.requires_grad)
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([changed(v, change, dtypes) for v in value])
    return {k: changed(v, change, dtypes) for k, v in value.items()} if isinstance(value, dict) else value


def doubled(value: Any) -> Any:
    """The arguments in double precision."""
    return changed(value, lambda x: x, WIDER)


def disturbed(value: Any, seed: int) -> Any:
    """The arguments with the last bits of their numbers changed."""
    generator = torch.Generator().manual_seed(seed)

    def change(x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(x.dtype).eps
        return x * (1 + torch.randint(-1, 2, x.shape, generator=generator).to(x.device) * eps)

    return changed(value, change, {})


class Nearness:
    """Fails where a result is more than twice as far from the exact one as eager's, and by some last bits.

    `run` gives eager's results for arguments after a change. Where the result is further off, eager's error is that of
    some runs on arguments with other last bits: numbers that cancel leave rounding errors, which are as large as they
    happen to be. Without an exact result of the same shape, a result must be as near to eager's as torch's tests ask.
    """

    def __init__(self, run: Callable[[Callable[[Any], Any]], Any]) -> None:
        self.exact = flat(run(doubled))
        self.noise = functools.cache(lambda: [flat(run(functools.partial(disturbed, seed=s))) for s in range(4)])

    def __call__(self, expected: Any, got: Any) -> None:
        eager, mine = flat(expected), flat(got)
        assert len(eager) == len(mine)
        whole = self.exact if len(self.exact) == len(eager) else [None] * len(eager)
        for place, (a, b, c) in enumerate(zip(eager, mine, whole, strict=True)):
            if not isinstance(a, torch.Tensor):
                continue
            if not comparable(a, c) or not (a.is_floating_point() or a.is_complex()):
                torch.testing.assert_close(b, a, equal_nan=True, msg=lambda text, i=place: f"result {i}: {text}")
            elif a.numel():
                self.tensor(a, b, c, place)

    def tensor(self, expected: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, place: int) -> None:
        eps = torch.finfo(expected.dtype).eps
        eager, mine, true = (numbers(t) for t in (expected, got, exact))
        same = (eager == true) | (eager.isnan() & true.isnan())
        wrong = same & ~eager.isfinite() & ~((mine == eager) | (mine.isnan() & eager.isnan()))
        wrong |= eager.isfinite() & true.isfinite() & ~mine.isfinite()
        assert not wrong.any(), f"result {place}: {mine[wrong][:5]}, eager {eager[wrong][:5]}"
        finite = eager.isfinite() & true.isfinite()
        if not finite.any():
            return
        e, m, x = (t[finite] for t in (eager, mine, true))
        floor = ULPS * eps * x.abs().max() + 1e-38
        error, allowed = (m - x).abs(), 2 * (e - x).abs().max() + floor
        if (error <= allowed).all():
            return
        for other in self.noise():
            if place < len(other) and comparable(expected, other[place]):
                found = numbers(other[place])[finite]
                allowed = max(allowed, 2 * (found - x).abs().nan_to_num(0, 0).max() + floor)
        worst = int(error.argmax())
        assert error[worst] <= allowed, (
            f"result {place}: {m[worst]} is off by {error[worst]:.3g}, eager's worst by {(e - x).abs().max():.3g}, "
            f"allowed {allowed:.3g}, exact {x[worst]}"
        )


def flat(value: Any) -> list[Any]:
    """The leaves of a nest."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def comparable(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and b.shape == a.shape and b.layout is torch.strided


def numbers(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in double precision."""
    t = t.detach().resolve_conj()
    return torch.view_as_real(t).double() if t.is_complex() else t.double()
