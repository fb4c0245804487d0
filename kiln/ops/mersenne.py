"""Masks of eager's numbers, drawn faster than eager draws them: one call of `kiln::bernoulli` for each.

Torch's generator on the CPU gives one number after the other. Here the words that a mask needs are made many
at once from the state that torch shows, and the state moves on by as many: later draws are eager's too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kiln import _mersenne
from kiln.base.graph import Graph, Made, Node, TensorSpec, argument, substituted
from kiln.ops.fake import make
from kiln.ops.layout import fills_memory
from kiln.ops.meta import draws
from kiln.ops.table import RULES, aten

BITS = 53  # of a number that is compared with the chance of a one
STATE_BYTES = 5056  # of the state whose order `_mersenne.c` knows
CPU = torch.device("cpu")

library = torch.library.Library("kiln", "FRAGMENT")
library.define(
    "bernoulli(SymInt[] size, SymInt[] stride, float p) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)


def bernoulli(size: Any, stride: Any, p: float) -> torch.Tensor:
    """True with the chance `p`, where `Tensor.bernoulli_(p)` on a tensor of these strides would give ones."""
    if not 0 <= p <= 1 or not draws_as_eager():
        return torch.empty_strided(size, stride).bernoulli_(p).to(torch.bool)
    return _drawn_at_once(size, stride, p)


def _drawn_at_once(size: Any, stride: Any, p: float) -> torch.Tensor:
    generator = torch.default_generator
    state = generator.get_state()
    out = torch.empty_strided(size, stride, dtype=torch.bool)
    _mersenne.bernoulli(state.data_ptr(), out.numel(), math.ceil(math.ldexp(p, BITS)), out.data_ptr())
    generator.set_state(state)
    return out


@cache
def draws_as_eager() -> bool:
    """Whether torch draws masks from this generator here: on some processors it takes those of a library."""
    before = torch.get_rng_state()
    if before.numel() != STATE_BYTES:
        return False
    drawn, states = [], []
    try:
        for draw in (_drawn_at_once, lambda size, stride, p: torch.empty(size).bernoulli_(p).to(torch.bool)):
            torch.set_rng_state(before)
            drawn.append(draw((64,), (1,), 0.5))
            states.append(torch.get_rng_state())
    finally:
        torch.set_rng_state(before)
    return bool(torch.equal(*drawn) and torch.equal(*states))


library.impl("bernoulli", bernoulli, "CompositeExplicitAutograd")
own_bernoulli = torch.ops.kiln.bernoulli.default
#: Ops of ours and the functions that they are.
IN_PYTHON = {own_bernoulli: bernoulli}


RULES[own_bernoulli] = lambda size, stride, p: make(size, stride, torch.bool, CPU)


def quicken(graph: Graph) -> Graph:
    """The graph with its masks from torch's default generator drawn by `kiln::bernoulli`, in place."""

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        drawn = _drawn(graph, node) if _is_mask(node) else None
        return None if drawn is None else (drawn, drawn[-1])

    # A mask no longer reads the tensor that it is drawn for, nor what was drawn for that one.
    return substituted(graph, instead, keep=draws)


def _drawn(graph: Graph, node: Node) -> list[Node]:
    spec: TensorSpec = node.spec
    bits = replace(spec, dtype=torch.bool, offset=0)
    chance = argument(node, 1, "p", 0.5)
    made = Made(graph, node)
    mask = made.call(own_bernoulli, bits, list(spec.shape), list(spec.stride), chance)
    if spec.dtype is not torch.bool:
        made.call(aten._to_copy.default, replace(spec, offset=0), mask, dtype=spec.dtype)
    return made.nodes


def _is_mask(node: Node) -> bool:
    if node.op is not aten.bernoulli.p or node.kwargs.get("generator") is not None:
        return False
    spec: TensorSpec = node.spec
    chance = argument(node, 1, "p", 0.5)
    return spec.device.type == "cpu" and type(chance) is float and fills_memory(spec)
