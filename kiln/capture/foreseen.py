"""Branches on tensors that go one way in most calls are taken to go as in this one, which the graph checks.

So it is with conditions over masks, flags and lengths that the program was given, and with those that ask
whether numbers are finite. Should one go the other way in a call, the frame runs in Python, and is
captured anew; the second time the graph breaks there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kiln.base.errors import Place
from kiln.capture.frame import Machine
from kiln.capture.recorder import Recorder
from kiln.ops.fake import FakeTensor

MOST = 16  # ops between the program's tensors and the condition
LARGEST = 1 << 22  # elements of a tensor that is looked at
#: Questions about each number, and the answer that is to be expected.
USUAL = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
#: Ops that are computed to find out.
COMPUTED = frozenset("""
    any all sum max min amax amin count_nonzero eq ne lt le gt ge equal logical_not logical_and logical_or
    logical_xor and_ or_ xor invert not_ add sub mul floordiv mod neg abs getitem to bool int long float type
    squeeze unsqueeze view reshape flatten expand size numel bitwise_and bitwise_or bitwise_not
""".split())  # fmt: skip


class Unforeseen(Exception):
    """The value is not to be had, or of no use for other calls."""


def foreseen(m: Machine, condition: FakeTensor, said: str) -> bool | None:
    """How the branch goes of which a check says this when it fails; None where there is no telling."""
    if m.unforeseen is None or said in m.unforeseen:
        return None
    try:
        return bool(value_of(m.recorder, m.recorder.node(condition), {}))
    except Exception:
        return None


def text_of(place: Place) -> str:
    """What a check says when it fails."""
    return f"the branch at {place.file}:{place.line}:{place.column} went another way"


def value_of(recorder: Recorder, node: Node, known: dict[Node, Any]) -> Any:
    """What a node gives on the program's tensors."""
    if node in known:
        return known[node]
    if node.op in ("placeholder", "get_attr"):
        real = recorder.outside(node)
        if type(real) is torch.Tensor and (real.is_floating_point() or real.is_complex()):
            raise Unforeseen
        if isinstance(real, torch.Tensor) and real.numel() > LARGEST:
            raise Unforeseen
        known[node] = real
        return real
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in USUAL:
        known[node] = torch.full((1,) * node.meta["example_value"].dim(), USUAL[name])
        return known[node]
    if name not in COMPUTED or len(known) > MOST:
        raise Unforeseen
    args, kwargs = map_arg((node.args, node.kwargs), lambda part: value_of(recorder, part, known))
    call = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
    known[node] = call(*args, **kwargs)
    return known[node]
