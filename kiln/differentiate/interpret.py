"""Runs a captured fx graph node by node, with other tensors in place of its own."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from kiln.base.errors import Break
from kiln.differentiate import masks, places
from kiln.ops.cudnn_rnn import MODES, of_any_length, of_packed
from kiln.ops.forms import FORMS, form_of
from kiln.ops.symint import SYMBOLIC, below_zero


def fetch(module: Any, path: str) -> Any:
    """What the module holds under a dotted name."""
    return operator.attrgetter(path)(module)


def over_leaves(nest: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nest, in which containers may be of classes of their own, with a function applied to its leaves."""
    if isinstance(nest, (list, tuple)):
        items = [over_leaves(item, leaf) for item in nest]
        if isinstance(nest, list):
            return items
        return type(nest)(*items) if hasattr(nest, "_fields") else tuple(items)
    if isinstance(nest, dict):
        return {key: over_leaves(item, leaf) for key, item in nest.items()}
    if isinstance(nest, slice):
        return slice(*[over_leaves(part, leaf) for part in (nest.start, nest.stop, nest.step)])
    return leaf(nest)


def argument(value: Any, known: dict[fx.Node, Any]) -> Any:
    """A nest of fx arguments with the values of its nodes."""
    return over_leaves(value, lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else leaf)


@contextlib.contextmanager
def owned_tensors(
    module: fx.GraphModule, path: str, owned: Callable[[str, torch.Tensor], Any]
) -> Iterator[Any]:
    """A module that the graph calls, its parameters and buffers replaced for a while."""
    called = fetch(module, path)
    names = {id(t): f"{path}.{name}" for name, t in called.state_dict(keep_vars=True).items()}
    for name, tensor in (*called.named_parameters(), *called.named_buffers()):
        names.setdefault(id(tensor), f"{path}.{name}")
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for part in called.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        changed.append((held, name, tensor))
                        held[name] = owned(names[id(tensor)], tensor)
        yield called
    finally:
        for held, name, tensor in reversed(changed):
            held[name] = tensor


def joined(
    data: Any, dtype: torch.dtype | None = None, device: Any = None, *, function: Any, **rest: Any
) -> torch.Tensor:
    """A tensor of nested lists with tensors of one element or open numbers among them, unknown to fakes."""
    leaves: list[Any] = []
    shape = _flattened(data, leaves)
    if isinstance(data, torch.Tensor) or not any(isinstance(v, (torch.Tensor, *SYMBOLIC)) for v in leaves):
        return function(data, dtype=dtype, device=device, **rest)  # type: ignore[no-any-return]
    number = torch.full if dtype is None else functools.partial(torch.full, dtype=dtype)
    parts = [number((), v) if type(v) in SYMBOLIC else torch.as_tensor(v) for v in leaves]
    dtype = functools.reduce(torch.promote_types, [v.dtype for v in parts]) if dtype is None else dtype
    made = torch.stack([v.detach().to(device, dtype).reshape(()) for v in parts]).view(shape)
    return made.requires_grad_() if rest.get("requires_grad") else made


def _flattened(data: Any, leaves: list[Any]) -> list[int]:
    """The shape of nested lists, whose leaves are added to `leaves`."""
    if not isinstance(data, (list, tuple)):
        leaves.append(data)
        return []
    inner: list[int] = []
    for item in data:
        inner = _flattened(item, leaves)
    return [len(data), *inner]


def method_of(owner: Any, name: str) -> Callable[..., Any]:
    """The method as a function that takes its owner first."""
    method = getattr(owner, name)
    return lambda _, *rest, **named: method(*rest, **named)


def call(function: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a function or method gives; a number that is given as a tensor, to be read, stays a tensor."""
    try:
        return form_of(function, args, kwargs)(*args, **kwargs)
    except Break as error:
        scaled = SCALED.get(name.removesuffix("_"))
        if error.kind != "data-dependent" or scaled is None:
            raise
        x, *rest = args
        factors = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        added = scaled(*rest, **factors)
        return x.add_(added) if name.endswith("_") else x.add(added)


#: What is added to the first argument, for functions with a factor that may be given as a tensor.
SCALED: dict[str, Callable[..., Any]] = {
    "add": lambda other, *, alpha: alpha * other,
    "sub": lambda other, *, alpha: -alpha * other,
    "addcmul": lambda a, b, *, value: value * a * b,
    "addcdiv": lambda a, b, *, value: value * a / b,
}


def packed(pool: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a pool gives, in eager's layout: its own kernel on CPUs, where no gradient is asked, packs."""
    result = pool(x, *args, **kwargs)
    other = x.requires_grad and torch.is_grad_enabled() or x.device.type != "cpu"
    return result if other or isinstance(result, tuple) else result.contiguous()


def one_hot(x: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
    """Which class each number is, by an op that raises where it is none: of fakes torch does not ask that."""
    if x.dtype is not torch.int64 or below_zero(num_classes):
        return functional.one_hot(x, num_classes)
    if below_zero(num_classes - 1):
        raise Break("data-dependent", "of no classes none is right", "the graph runs as it is, and raises")
    classes = torch.arange(num_classes, device=x.device)
    return functional.one_hot(classes.index_select(0, x.reshape(-1)).view(x.shape), num_classes)


def recurrent(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A recurrent network, unless eager's kernels are called for any number of steps."""
    if len(args) == 9 and not of_packed(args) and of_any_length(function, args):
        raise Break("data-dependent", "how many steps a recurrent network takes varies", "")
    return function(*args, **kwargs)


def matrix_rank(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """The rank of matrices, also where a tensor is given for it: torch leaves one of another class alone."""
    rank = torch.linalg.matrix_rank(*args, **kwargs)
    return rank if out is None else torch.abs(rank, out=out)


#: What runs in a trace in place of functions that read the contents of tensors, or do better knowing them, or
#: ask whether a tensor is of torch's own class.
STAND_INS: dict[Any, Any] = {
    functional.scaled_dot_product_attention: masks.attention,
    functional.one_hot: one_hot,
    torch.linalg.matrix_rank: matrix_rank,
    **{f: functools.partial(recurrent, f) for f in MODES},
    **{f: functools.partial(joined, function=f) for f in (torch.tensor, torch.as_tensor, torch.asarray)},
    **{pool: functools.partial(packed, pool) for pool in (functional.max_pool1d, torch.max_pool1d)},
}  # fmt: skip


def interpret(
    module: fx.GraphModule,
    inputs: list[Any],
    owned: Callable[[str, Any], Any],
    entering: Callable[[fx.Node], None] = lambda node: None,
    instead: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> Any:
    """The output nest of the graph on `inputs`.

    `owned` gives what stands for something that the module, or a module that the graph calls, holds under a
    name; `entering` is told of each node before it runs; for those in `instead` others stand.
    """
    known: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        kind = node.op
        if node in instead:
            known[node] = known[instead[node]]
            continue
        entering(node)
        args = [argument(a, known) for a in node.args]
        kwargs = {k: argument(v, known) for k, v in node.kwargs.items()}
        if kind == "call_function" and places.has_places(node):
            known[node] = places.item(node, *args)
        elif kind == "call_function":
            function = STAND_INS.get(node.target, node.target)
            known[node] = call(function, getattr(function, "__name__", ""), args, kwargs)
        elif kind == "call_method":
            method = getattr(torch.Tensor, node.target, None) if isinstance(args[0], torch.Tensor) else None
            function = method if method in FORMS else method_of(args[0], node.target)
            known[node] = call(function, node.target, args, kwargs)
        elif kind == "placeholder":
            known[node] = next(given)
        elif kind == "get_attr":
            known[node] = owned(node.target, fetch(module, node.target))
        elif kind == "call_module":
            with owned_tensors(module, node.target, owned) as called:
                known[node] = called(*args, **kwargs)
        else:
            return args[0]
    raise ValueError("the graph has no output")
