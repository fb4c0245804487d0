"""Random training scripts: one compiled module is called several times, with something changed between the calls.

A script is played on three copies of its module: eager, compiled, and in float64, which says how exact eager is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn

import kiln
from kiln.base import records
from tests.fuse import layers
from tests.fuse.comparing import shared
from tests.fuse.layers import ENDS, LAYERS, Counted, Net, Scaled

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01, eps=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01, eps=1e-2, foreach=False),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01, eps=1e-2),
}
MODES: dict[str, Callable[[], Any]] = {
    "grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip
#: What may come before a call, with how often.
EVENTS = ("step",) * 4 + ("size",) * 2 + (
    *MODES, "train", "eval", "data", "data replaced", "frozen", "loaded", "replaced", "channels last", "noise", "input grad",
    "buffer", "double backward", "zeroed", "expanded", "attribute",
)  # fmt: skip
#: The part of a result that may differ, by the script's dtype.
NEAR = {"float64": 1e-9, "float32": 3e-4, "bfloat16": 0.1}
REFUSED = "second derivatives of a compiled graph that writes"


@dataclass
class Script:
    """A module and the events before its second call, the third, and so on."""

    kind: str
    layers: list[str]
    shape: tuple[int, ...]
    end: str = "value"
    events: list[str] = field(default_factory=list)
    seed: int = 7
    dtype: str = "float64"
    dynamic: bool | None = None
    optimizer: str = "SGD"
    width: int = 8

    def build(self) -> Net:
        torch.manual_seed(self.seed)
        table = nn.Embedding(11, self.width, padding_idx=0) if self.kind == "words" else None
        made = [eval(text, {**vars(layers), "nn": nn}) for text in self.layers]
        return Net(made, self.end, table).to(getattr(torch, self.dtype))


def drawn(r: Random) -> Script:
    """A random script."""
    kind = r.choice(("rows", "rows", "tokens", "images", "images", "words"))
    width = n = r.choice((2, 4, 6) if kind == "images" else (2, 4, 6, 8, 16, 34))
    now, chosen = {"words": "tokens"}.get(kind, kind), []
    for _ in range(r.randint(1, 5)):
        text, then = r.choice(LAYERS[now])
        m = r.choice((2, 4, 6, 10, 32))
        chosen.append(text.format(N=n, M=m))
        n = m if "{M}" in text else n * 4 if then == "more" else n
        chosen += ["First()"] if then in ("pair", "self") else []
        now = {"more": "images", "pair": "tokens", "self": "tokens", "twins": "rows"}.get(then, then)
    many = r.choice((2, 3))
    shapes = {
        "rows": (r.choice((2, 3, 5, 16)), width), "tokens": (many, r.choice((2, 5, 9)), width), "words": (many, r.choice((2, 5, 9))),
        "images": (many, width, r.choice((4, 6, 9)), r.choice((4, 8))),
    }  # fmt: skip
    end = r.choice([e for e in ENDS if kind != "words" or e != "written"])
    events = [r.choice(EVENTS) for _ in range(r.randint(2, 6))]
    jumps = any(name in text for text in chosen for name in ("Quantised", "Experts"))
    dtype = r.choice(("float64", "float64", "float32", "float32", "float32" if jumps else "bfloat16"))
    return Script(
        kind, chosen, shapes[kind], end, events, r.randrange(10**6), dtype, r.choice((None, None, True, False)), r.choice([*OPTIMIZERS]), width
    )


# Playing


class Player:
    """One copy of the module with its own optimizer, that does what the script says."""

    def __init__(self, script: Script, model: Net, called: Callable[..., Any], dtype: torch.dtype) -> None:
        self.script, self.model, self.called, self.dtype = script, model, called, dtype
        self.begin()
        self.shape, self.mode, self.laid, self.grad, self.random = script.shape, "grad", "", False, Random(script.seed)
        self.generator = torch.Generator().manual_seed(script.seed)

    def begin(self) -> None:
        self.optimizer = OPTIMIZERS[self.script.optimizer]([*self.model.parameters()] or [nn.Parameter(torch.zeros(1))])

    def rand(self, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) - 0.5).to(self.dtype)

    def event(self, what: str) -> None:
        """Change the module, or how it is called."""
        number, model = self.random.randrange(10**6), self.model
        if what in MODES:
            self.mode = what
        elif what in ("train", "eval"):
            model.train(what == "train")
        elif what == "size":
            tokens = self.script.kind in ("tokens", "words")
            self.shape = (number % 7 + 2, number % 6 + 2 if tokens else self.shape[1], *self.shape[2:])
        elif what in ("channels last", "expanded"):
            self.laid = what if self.laid != what else ""
        elif what == "input grad":
            self.grad = not self.grad
        elif what == "zeroed":
            self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        elif what == "loaded":
            model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})
        elif what in ("attribute", "replaced"):
            for module in model.modules():
                self.changed(module, what)
        elif what == "buffer":
            buffers = [b for b in model.buffers() if b.is_floating_point()]
            for buffer in buffers[number % len(buffers) :][:1] if buffers else ():
                buffer.add_(0.125)
        else:
            parameters = [*model.parameters()]
            for parameter in parameters[number % len(parameters) :][:1] if parameters else ():
                self.written(parameter, what)

    def changed(self, module: nn.Module, what: str) -> None:
        """Give a module another number, or another parameter."""
        if what == "attribute" and isinstance(module, nn.Dropout):
            module.p = 0.5
        elif what == "attribute" and isinstance(module, Scaled):
            module.factor = 0.25
        elif what == "replaced" and isinstance(module, nn.Linear) and not hasattr(module, "parametrizations"):
            module.weight = nn.Parameter(module.weight.detach() * 0.5)
            self.begin()

    def written(self, parameter: nn.Parameter, what: str) -> None:
        """Change a parameter."""
        if what == "data":
            parameter.data.mul_(0.5).add_(0.125)
        elif what == "data replaced":
            parameter.data = parameter.data * 0.75
        elif what == "frozen":
            parameter.requires_grad_(not parameter.requires_grad)
        elif what == "noise":
            with torch.no_grad():
                parameter += self.rand(*parameter.shape) * 0.25

    def input(self) -> torch.Tensor:
        if self.script.kind == "words":
            return torch.randint(0, 11, self.shape, generator=self.generator)
        x = self.rand(*self.shape) * 2
        # Eager's group norm ends the process in the backward of a channels-last image that requires no grad.
        if self.laid == "channels last" and "GroupNorm" not in str(self.script.layers):
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.transpose(0, -1).contiguous().transpose(0, -1)
        if self.laid == "expanded" and self.script.end != "written":
            x = x[:1].expand(self.shape)
        return x.requires_grad_(self.grad and self.script.end != "written")

    def call(self, event: str) -> dict[str, Any]:
        """What a call gave: facts to be equal and values to be near, and what a backward and a step left."""
        x = self.input()
        torch.manual_seed(self.script.seed)
        try:
            with MODES[self.mode]():
                out = self.called(x)
        except Exception as error:
            return {"error": type(error)}
        flat, tree = torch.utils._pytree.tree_flatten(out)
        results = [t for t in flat if isinstance(t, torch.Tensor)]
        held = [x, *self.model.parameters(), *self.model.buffers()]
        told: dict[str, Any] = {"tree": str(tree), "rest": [t for t in flat if not isinstance(t, torch.Tensor)]}
        told["shared"] = shared(results, held)
        told["same"] = [[a is b for b in (*results, *held)] for a in results]
        told["facts"] = [(t.dtype, tuple(t.shape), t.requires_grad, t.is_leaf, t.is_inference(), strides(t)) for t in results]
        told["values"] = [t.detach().clone() for t in (*results, x)]
        told["gradients"] = []
        roots = [t for t in results if t.grad_fn is not None]
        if roots:
            try:
                self.backward(roots, x, event)
            except Exception as error:
                told["backward error"] = REFUSED if REFUSED in str(error) else type(error)
            leaves = [*self.model.parameters(), *([x] if x.requires_grad else [])]
            told["gradients"] = [None if p.grad is None else p.grad.detach().clone() for p in leaves]
        told["state"] = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        told["calls"] = [m.calls for m in self.model.modules() if isinstance(m, Counted)]
        return told

    def backward(self, roots: list[torch.Tensor], x: torch.Tensor, event: str) -> None:
        weighted = [(t * torch.linspace(-1, 1, t.numel()).view(t.shape).to(t)).double().sum() for t in roots]
        loss = torch.stack(weighted).sum()
        if event == "double backward" and self.mode == "grad":
            leaves = [p for p in (*self.model.parameters(), x) if p.requires_grad]
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            loss = loss + sum(g.pow(2).sum() for g in first if g is not None)
        loss.backward()
        if event == "step":
            self.optimizer.step()
            if self.random.random() < 0.7:
                self.optimizer.zero_grad()


def strides(t: torch.Tensor) -> list[int] | None:
    """The strides that mean something."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else None


# Comparing


def check(script: Script) -> None:
    """Each call equals eager's: values, layouts, what shares memory, gradients, the module's state; nothing fell back."""
    kiln.reset()
    model = script.build()
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    dtype = getattr(torch, script.dtype)
    with records.collect() as log, kiln.config.patch(strict=True):
        options = {"numerics": "eager"} if "Dropout" in str(script.layers) else {}
        compiled = kiln.compile(mine, backend="kiln", dynamic=script.dynamic, options=options)
        players = [Player(script, model, model, dtype), Player(script, mine, compiled, dtype), Player(script, wide, wide, torch.float64)]
        part = NEAR[script.dtype]
        for i, event in enumerate(["", *script.events]):
            for player in players:
                player.event(event)
            part = max(part, 4e-2 if players[0].mode == "autocast" else 0)
            if not equal(f"call {i} after {event}", *(player.call(event) for player in players), part):
                break
    assert not log.fallbacks, f"fell back: {log.fallbacks}"


def equal(where: str, eager: dict[str, Any], mine: dict[str, Any], exact: dict[str, Any], part: float) -> bool:
    """Whether there is more to compare; fails where a call gave anything else than eager's."""
    assert eager.get("error") == mine.get("error"), f"{where}: raised {mine.get('error')}, eager {eager.get('error')}"
    if "error" in eager or mine.get("backward error") == REFUSED:
        return False
    for key in ("tree", "rest", "facts", "shared", "same", "calls", "backward error"):
        assert eager.get(key) == mine.get(key), f"{where}: {key} {mine.get(key)}, eager {eager.get(key)}"
    if "error" in exact or "backward error" in eager:
        return False
    for key in ("values", "gradients", "state"):
        # Of a bias before a norm, rounding is all of the gradient.
        sizes = [x.abs().max().item() for x in eager["gradients"] if x is not None and x.numel()] if key != "values" else []
        least = max([x for x in sizes if math.isfinite(x)] + [1e-2])
        assert len(eager[key]) == len(mine[key]), f"{where}: {len(mine[key])} {key}, eager {len(eager[key])}"
        for j, (a, b) in enumerate(zip(eager[key], mine[key], strict=True)):
            near(f"{where}: {key}[{j}]", a, b, exact[key][j] if j < len(exact[key]) else a, part, least)
    return True


def near(where: str, eager: Any, mine: Any, exact: Any, part: float, least: float) -> None:
    """One tensor is as far from eager's as eager's from the exact one, or a part of the largest value."""
    assert (eager is None) == (mine is None), f"{where}: {mine}, eager {eager}"
    if eager is None or not eager.numel():
        return
    assert (eager.dtype, eager.shape) == (mine.dtype, mine.shape), f"{where}: {mine.dtype} {mine.shape}"
    if not eager.is_floating_point():  # places of the largest may change with the last bits
        assert part > NEAR["float64"] or torch.equal(eager, mine), f"{where}: {mine}, eager {eager}"
        return
    a, b, c = eager.double(), mine.double(), (eager if exact is None or exact.shape != eager.shape else exact).double()
    assert torch.equal(a.isnan(), b.isnan()), f"{where}: {b.flatten()[:8]}, eager {a.flatten()[:8]}"
    finite = a.isfinite() & c.isfinite()
    if finite.any():
        allowed = 8 * (a - c)[finite].abs().max() + part * max(c[finite].abs().max(), least)
        worst = (b - a)[finite].abs().max()
        assert worst <= allowed, f"{where}: off by {worst}, allowed {allowed}\nmine  {b.flatten()[:8]}\neager {a.flatten()[:8]}"
