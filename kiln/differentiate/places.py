"""Items that are read or written at places in tensors, `x[i, t]`: by ops, which need not know the number."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kiln.base.errors import Break
from kiln.ops.fake import FakeTensor
from kiln.ops.layout import is_place
from kiln.ops.meta import memory_of

aten = torch.ops.aten
BASIC = (int, slice, type(None), type(...))
IN_PLACE = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
WRITING = frozenset({operator.setitem, *(getattr(operator, name) for name in IN_PLACE)})


def has_places(node: fx.Node) -> bool:
    """Whether a call reads or writes an item at a place in a tensor."""
    if node.target not in (operator.getitem, operator.setitem) or len(node.args) < 2:
        return False
    parts = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
    return any(is_place(part.meta.get("example_value")) for part in parts if isinstance(part, fx.Node))


def item(node: fx.Node, x: Any, key: Any, *value: Any) -> Any:
    """What the call gives, by ops that take places as they are; a Break where they could be told apart."""
    parts = key if isinstance(key, tuple) else (key,)
    places = [part for part in parts if is_place(part)]
    plain = all(type(part) in BASIC or is_place(part) for part in parts)
    if not plain or any(t.device != x.device for t in places) or not (value or may_copy(node)):
        raise Break("data-dependent", "a number of a tensor says where to read", "read it outside")
    view, index = x, list[Any]()
    if any(type(part) is not slice or part != slice(None) for part in parts if not is_place(part)):
        view = x[tuple([slice(None) if is_place(part) else part for part in parts])]
    rest = x.dim() - sum(part is not None and part is not ... for part in parts)  # what `...` stands for
    for part in parts:
        dims = rest if part is ... else type(part) is not int
        index += [part.to(torch.int64)] if is_place(part) else [None] * dims
    if not value:
        return aten.index.Tensor(view, index)
    return aten.index_put_.default(view, index, fitting(value[0], view, len(places)))


def fitting(value: Any, view: torch.Tensor, places: int) -> torch.Tensor:
    """What is written, as a tensor of the same kind of no more dimensions than the item has."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=view.dtype, device=view.device)
    while value.dim() > view.dim() - places and value.shape[0] == 1:
        value = value[0]
    return value.to(view.device, view.dtype)


def may_copy(node: fx.Node) -> bool:
    """Whether nobody can tell a copy of what is read from a view: neither is left, nor written to."""
    made = node.meta.get("example_value")
    if type(made) is not FakeTensor or list(made.stride()) != sorted(made.stride(), reverse=True):
        return False
    memory, views, later = memory_of(made), {node}, node
    while later.op != "output":
        later = later.next
        inputs = set(later.all_input_nodes)
        if later.op == "output":
            return not views & inputs
        if writes(later) and any(lies_in(given, memory) for given in inputs):
            return False
        if views & inputs and lies_in(later, memory):
            views.add(later)
    raise ValueError("the graph has no output")


def lies_in(node: fx.Node, memory: torch.Tensor) -> bool:
    """Whether a tensor that a call gives lies in this one's memory."""
    made = node.meta.get("example_value")
    found = made if isinstance(made, (tuple, list)) else [made]
    return any(type(fake) is FakeTensor and memory_of(fake) is memory for fake in found)


def writes(node: fx.Node) -> bool:
    """Whether a call may write to a tensor that it is given."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    name, module = getattr(node.target, "__name__", "_"), getattr(node.target, "__module__", None) or ""
    known = module.startswith(("torch", "_operator")) and node.op == "call_function"
    asked = any(value is True for value in node.args) or any(node.kwargs.get(k) for k in ("inplace", "out"))
    return not known or name.partition(".")[0].endswith("_") or node.target in WRITING or asked
