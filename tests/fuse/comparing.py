"""How near to eager the compiled form of a random program must come.

Beside eager's values the same lines make the values in float64, and values with the last bits of each float result
disturbed: a compiled result may be as far from the exact one as these are. A float result that eager has exactly is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuse.programs import EXACT, PLAIN, Program


def disturbed(seed: int) -> Callable[..., Any]:
    """Changes the last bits of a float result that is not exact, seen by values that are no quarters."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(x: Any, rounded: bool = False) -> Any:
        """`rounded` where a value may be exact by chance; a zero is then what is left of a difference, if others are not exact."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
            return x
        with torch.no_grad():
            eps = torch.finfo(x.dtype).eps
            noise = torch.randint(-2, 3, x.shape, generator=generator).to(x) * eps
            exact = (x * 16).frac() == 0
            noise = torch.where(x == 0, noise, noise * x) if rounded and not exact.all() else noise * x
            noise = torch.where(exact & (not rounded) | ~noise.isfinite(), torch.zeros_like(noise), noise)
        return x + noise

    return disturb


def gapped(x: Any, rounded: bool = False) -> Any:
    """The same values apart in memory: eager's loops over vectors and over single elements are not the same at NaN."""
    return torch.stack([x, x], -1)[..., 0] if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def shifted(x: Any, rounded: bool = False) -> Any:
    """The zeros of a norm of equal elements moved: it divides what rounding left of them by almost nothing."""
    return x + min(512 * torch.finfo(x.dtype).eps, 0.01) if rounded and x.is_floating_point() and not x.any() else x


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


def run(program: Program, function: Callable[..., Any], dtypes: dict[str, torch.dtype], device: str | None = None) -> Ran:
    """Call a program's function on fresh inputs and send fixed gradients back."""
    made, ran = program.made(dtypes, device), Ran()
    try:
        with program.entered():
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
    try:
        same(program, eager, mine, exact, [])
    except AssertionError:  # with the room that disturbed bits show
        changes = [*(disturbed(seed) for seed in range(3)), gapped, shifted]
        same(program, eager, mine, exact, [run(program, program.function(PLAIN, change), PLAIN) for change in changes])
    return eager


def same(program: Program, eager: Ran, mine: Ran, exact: Ran, others: list[Ran]) -> None:
    """The results, inputs and gradients of one call are near those of another."""
    # Where eager's own type is the widest there is, its sums of many are no more exact than the compiled ones.
    longest = max([math.prod(one.shape) for one in program.inputs], default=1)
    many = max(math.sqrt(longest) / 16, 1.0)
    widest = torch.finfo(torch.float64).eps * math.sqrt(longest) / 16
    # A result may have gone through narrower types, too, whose rounding eager happens to have done away with.
    given = {one.dtype for one in program.inputs} | {h for h in ("f16", "bf16", "f32") if h in program.text()}
    given |= {"bf16"} if program.mode == "autocast" else set()
    narrow = [torch.finfo(PLAIN[h]).eps for h in ("f16", "bf16") if h in given]
    room = max([widest, *(eps / 16 for eps in narrow)]) if others else widest
    if program.mode == "inference":  # a view claims to require grad where what it shows does
        eager, mine, exact = (replace(ran, results=[x.detach() for x in ran.results]) for ran in (eager, mine, exact))
    for what in ("results", "inputs"):
        near(what, getattr(eager, what), getattr(mine, what), getattr(exact, what), [getattr(o, what) for o in others], 4.0, room, many if others else 1.0)
    if not any(o.backward_error for o in (eager, exact, *others)):
        halves = [eps / 512 for eps in narrow]
        single = [torch.finfo(torch.float32).eps / 64] if "f32" in given or ".float()" in program.text() else []
        least = max([widest, *halves, *single])
        near("gradients", eager.gradients, mine.gradients, exact.gradients, [o.gradients for o in others], 16.0, least)


def near(what: str, eager: list[Any], mine: list[Any], exact: list[Any], others: list[list[Any]], slack: float, least: float,
         many: float = 1.0) -> None:  # fmt: skip
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
        a, b, c = a.detach(), b.detach(), (c if c.shape == a.shape else a.double()).detach()
        if not a.is_floating_point():
            assert torch.equal(a, b), f"{where}: {b}, eager {a}"
        elif a.numel():
            found = [o[place] for o in others if place < len(o)]
            noise = [n.detach() for n in found if n is not None and n.shape == a.shape]
            values(where, a.double(), b.double(), c, noise, slack, max(torch.finfo(a.dtype).eps * many, least))


def values(where: str, eager: torch.Tensor, mine: torch.Tensor, exact: torch.Tensor, noise: list[torch.Tensor], slack: float, eps: float) -> None:
    finite = eager.isfinite() & exact.isfinite()
    same = (eager == exact) | (eager.isnan() & exact.isnan())
    for n in noise:
        finite &= n.isfinite()
        same &= (eager == n) | (eager.isnan() & n.isnan())
    wrong = same & ~eager.isfinite() & ~((mine == eager) | (mine.isnan() & eager.isnan()))
    assert not wrong.any(), f"{where}: {mine[wrong][:5]}, eager {eager[wrong][:5]}"
    if not finite.any():
        return
    e, m, x = eager[finite], mine[finite], exact[finite]
    allowed = slack * max([(y.double()[finite] - x).abs().max() for y in (*noise, eager)] + [4 * eps * max(x.abs().max(), 1.0)])
    worst = (m - x).abs()
    assert (worst <= allowed).all(), f"{where}: off by {worst.max()}, allowed {allowed}\nmine  {m.flatten()[:12]}\neager {e.flatten()[:12]}"
