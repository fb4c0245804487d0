"""How near to eager the compiled form of a random program must come.

Beside eager's values the same lines make the values in float64, on the CPU. Each element may be twice as far from the
exact one as eager's is, and some places; where that does not do, as far as eager's own results are, with each op rounded
otherwise, and, for a GPU, as eager's on the CPU are: constants of some of its kernels are of float32, it sorts NaN by their
signs, and has no order of writes to one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuse.disturbing import Disturbing, Gapped
from tests.fuse.programs import DEVICE, EXACT, PLAIN, Program

#: Times what rounding moved eager's own results by, in up to 24 draws.
SLACK = 4.0


@dataclass
class Ran:
    """What a call gave: results, the inputs as it left them, gradients (None where it has none), or an error."""

    results: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    """Which results share memory with which results and inputs."""
    error: Exception | None = None
    backward_error: Exception | None = None


def run(program: Program, function: Callable[..., Any], dtypes: dict[str, torch.dtype], device: str | None = None, within: Any = None) -> Ran:
    """Call a program's function on fresh inputs and send fixed gradients back, `within` a context."""
    made, ran, within = program.made(dtypes, device), Ran(), within or nullcontext()
    try:
        with program.entered(), within:
            ran.results = list(function(*made))
    except Exception as error:
        ran.error = error
        return ran
    ran.inputs = made
    ran.shared = shared(ran.results, made)
    leaves = [x for x in made if x.requires_grad and x.is_leaf]
    roots = [x for x in ran.results if x.requires_grad]
    if leaves and roots:
        cotangents = [torch.linspace(-1, 1, max(x.numel(), 1))[: x.numel()].view(x.shape).to(x) for x in roots]
        try:
            with within:
                ran.gradients = list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))
        except Exception as error:
            ran.backward_error = error
    return ran


def shared(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[tuple[int, int]]:
    memory = [x.untyped_storage().data_ptr() if x.numel() else -1 - i for i, x in enumerate((*results, *inputs))]
    return [(i, j) for i in range(len(results)) for j in range(i + 1, len(memory)) if memory[i] == memory[j]]


def compare(program: Program, compiled: Callable[..., Any]) -> Ran:
    """What eager gives; fails where the compiled form gives anything else, but for the last bits."""
    eager = run(program, program.function(PLAIN), PLAIN)
    exact = run(program, program.function(EXACT, "cpu"), EXACT, "cpu")
    if exact.error is not None:  # what the CPU has not
        exact = run(program, program.function(EXACT), EXACT)
    mine = run(program, compiled, PLAIN)
    run(program, compiled, PLAIN)  # what the first call gave is the caller's: another one leaves it alone
    if type(eager.error) is not type(mine.error):
        raise AssertionError(f"raised {mine.error!r}, eager {eager.error!r}") from mine.error
    if eager.error is not None:
        return eager
    if eager.backward_error is None and mine.backward_error is not None:
        raise AssertionError(f"backward raised {mine.backward_error!r}") from mine.backward_error
    assert eager.shared == mine.shared, f"share memory: {mine.shared}, eager {eager.shared}"
    others: list[Ran] = []
    for draws in (0, 3, 8, 24):  # rounding errors are compared with the largest of as many, so few of them say little
        modes = [Disturbing(seed) if seed else Gapped() for seed in range(len(others), draws)]
        others += [run(program, program.function(PLAIN), PLAIN, within=mode) for mode in modes]
        if len(others) == 3 and DEVICE != "cpu":
            others[2] = run(program, program.function(PLAIN, "cpu"), PLAIN, "cpu")
        try:
            same(program, eager, mine, exact, others)
            break
        except Far:
            if draws == 24:
                raise
    return eager


class Far(AssertionError):
    """Values further from exact ones than is allowed."""


def same(program: Program, eager: Ran, mine: Ran, exact: Ran, others: list[Ran]) -> None:
    """The results, inputs and gradients of one call are near those of another."""
    if program.mode == "inference":  # a view claims to require grad where what it shows does
        eager, mine, exact = (replace(ran, results=[x.detach() for x in ran.results]) for ran in (eager, mine, exact))
    for what in ("results", "inputs"):
        near(what, getattr(eager, what), getattr(mine, what), getattr(exact, what), [getattr(o, what) for o in others])
    if not any(o.backward_error for o in (eager, exact, *others)):
        near("gradients", eager.gradients, mine.gradients, exact.gradients, [o.gradients for o in others])


def near(what: str, eager: list[Any], mine: list[Any], exact: list[Any], others: list[list[Any]]) -> None:
    """The results of one kind, each no further from the exact one than eager's, in some units of the last place."""
    assert len(eager) == len(mine), f"{len(mine)} {what}, eager {len(eager)}"
    exact = exact if len(exact) == len(eager) else eager  # a cast to what float64 is already gives the input itself
    for place, (a, b, c) in enumerate(zip(eager, mine, exact, strict=True)):
        where = f"{what}[{place}]"
        assert (a is None) == (b is None), f"{where}: {b}, eager {a}"
        if a is None or c is None:
            continue
        if what == "gradients":  # without a history; eager's running maximum gives an empty input itself for its gradient
            assert a.requires_grad or not b.requires_grad, f"{where} requires grad"
            a, b = a.detach(), b.detach()
        for name in ("dtype", "shape", "requires_grad"):
            assert getattr(a, name) == getattr(b, name), f"{where}.{name}: {getattr(b, name)}, eager {getattr(a, name)}"
        if what != "gradients" and a.numel():  # the strides of what has one place mean nothing
            strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
            assert strides[0] == strides[1], f"{where}.stride: {b.stride()}, eager {a.stride()}"
        # A cast to what float64 is in exact arithmetic gives the input itself, whose shape may be changed then.
        a, b, c = a.detach(), b.detach(), (c if c.shape == a.shape else a.double()).detach().to(a.device)
        found = [o[place] for o in others if place < len(o)]
        noise = [n.detach().to(a.device) for n in found if n is not None and n.shape == a.shape]
        if not a.is_floating_point():  # sizes other than those it was drawn for may round what jumps
            wrong = (a != b) & ~torch.stack([torch.zeros_like(a, dtype=torch.bool), *(n != a for n in noise)]).any(0)
            if wrong.any():
                raise Far(f"{where}: {b[wrong][:5]}, eager {a[wrong][:5]}; {int(wrong.sum())} of {wrong.numel()}")
        elif a.numel():
            values(where, a, b, c.double(), [n.double() for n in noise])


def values(where: str, eager: torch.Tensor, mine: torch.Tensor, exact: torch.Tensor, noise: list[torch.Tensor]) -> None:
    """Each element is as near to the exact one as those of eager are, or is the infinity or NaN that one of them is."""
    info = torch.finfo(eager.dtype)
    # The type's own rounding, of one op for halves, which are computed in float32, and less than the numbers that are next to zero.
    places, tiny = (1 if eager.dtype.itemsize == 2 else 4) * info.eps, max(4 * info.smallest_normal * info.eps, 1e-37)
    nearest = exact.to(eager.dtype).double()
    eager, mine = eager.double(), mine.double()
    exact = torch.where(exact.isfinite() | ~eager.isfinite(), exact, eager)  # what float64 overflows where eager does not
    spread = torch.zeros_like(eager)
    for other in (eager, *noise):
        far = (other - exact).abs()
        spread = torch.maximum(spread, torch.where(far.isfinite(), far, 0.0))
    allowed = (SLACK if noise else 2.0) * spread + places * exact.abs() + tiny
    fine = ((mine - exact).abs() <= allowed) & exact.isfinite()
    for other in (eager, nearest, *noise):
        fine |= ~other.isfinite() & ((mine == other) | (mine.isnan() & other.isnan()))
    if not fine.all():
        off = torch.where(fine, 0.0, (mine - exact).abs() / allowed)
        at = int(off.nan_to_num(math.inf).flatten().argmax())
        one = [float(x.flatten()[at]) for x in (mine, eager, exact, allowed)]
        raise Far(f"{where}, element {at}: {one[0]}, eager {one[1]}, exact {one[2]}, allowed {one[3]}; {int((~fine).sum())} of {fine.numel()}")
