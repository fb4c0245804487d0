"""Recording: aten calls on fake tensors become nodes of a Graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kiln.base.graph import Graph, Node, TensorSpec, label
from kiln.ops import rules  # noqa: F401  (fills the table of shape rules)
from kiln.ops.fake import FakeTensor, Mode, dispatch, fake_like, make
from kiln.ops.layout import is_dense
from kiln.ops.meta import DECOMPOSES, MUTATING
from kiln.ops.products import composite
from kiln.ops.symint import expr_of, wrap
from kiln.ops.table import RULES, aten

#: Leaves of arguments that a node holds as they are.
PLAIN = frozenset({int, float, bool, type(None), str, complex, torch.dtype, torch.device, torch.layout,
                   torch.memory_format})  # fmt: skip
#: Ops that transforms and autograd call with a number in the place of a tensor, and which number they give.
OF_NUMBERS = {aten._to_copy.default: lambda number: number, aten._conj.default: complex.conjugate}
#: Calls that give their argument the standing of a tensor of the program.
LIFTS = frozenset({aten.lift_fresh.default, aten.lift.default, aten.lift_fresh_copy.default})


def spec_of(value: Any) -> Any:
    """The type of what an op returned: TensorSpecs for fakes, in a tuple or list where there are several."""
    kind = type(value)
    if kind is FakeTensor:
        size, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
        if value._has_symbolic_sizes_strides:
            size, stride, offset = _exprs(size), _exprs(stride), leaf_of(offset)
        return TensorSpec(size, stride, value.dtype, value.device, offset)
    if kind is tuple or kind is list:
        return kind([spec_of(item) for item in value])
    return None if value is None else kind


def _exprs(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([leaf_of(n) for n in sizes])


def leaf_of(value: Any) -> Any:
    """A number as a graph holds it: a symbolic one as its expression."""
    return value if type(value) in PLAIN else expr_of(value)


def fake_of(spec: TensorSpec) -> FakeTensor:
    """A fake of this type, not bound to a node."""
    shape, stride = [wrap(n) for n in spec.shape], [wrap(n) for n in spec.stride]
    return make(shape, stride, spec.dtype, spec.device, wrap(spec.offset))


def copied(real: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does, holes included."""
    if not real.numel() or is_dense(tuple(real.shape), real.stride()):
        return real.clone()
    extent = 1 + sum([(n - 1) * s for n, s in zip(real.shape, real.stride(), strict=True)])
    return real.as_strided((extent,), (1,)).clone().as_strided(real.shape, real.stride())


#: What leaves tensors as they are: of sizes that a tensor does not have already, resize_ is refused.
SILENT = frozenset({aten.size.default, aten.resize_.default})


class Recording(Mode):
    """While it is entered, every aten call runs on fakes and is added to `graph`.

    A fake knows its node (`fake.node`), so it belongs to one recording at a time. A node stands for a tensor
    as the program sees it, one place in memory: an op that writes in place is a node of its own, and later
    reads still name the node of the tensor that it wrote. Ops of several results are one node and a getitem
    for each. Composite ops are recorded as what they consist of. Real tensors become CONSTANT nodes.

    `where`, `backward` and `region` are set by the owner and marked on the nodes that follow.
    """

    def __init__(self, graph: Graph | None = None) -> None:
        super().__init__()
        self.graph = graph or Graph()
        self.where = ""
        self.origin: Callable[[], str] | None = None
        """Tells for each call of a backward where the forward's is, while somebody listens."""
        self.backward = False
        self.region: int | None = None
        self.fakes: dict[Node, FakeTensor] = {}
        self._constants: dict[int, tuple[Tensor, Node]] = {}
        self._labels: dict[Any, str] = {}

    def stands_at(self, node: Node) -> None:
        """Let what is recorded from now on stand where a node of another graph stood."""
        self.where, self.backward, self.region = node.where, node.backward, node.region

    # Values and their nodes

    def input(self, name: str, fake: FakeTensor) -> Node:
        """A new input of the graph that stands for `fake`."""
        node = self.graph.input(name, spec_of(fake), self.backward)
        self.bind(fake, node)
        return node

    def bind(self, fake: FakeTensor, node: Node) -> None:
        """Let `node` stand for `fake`."""
        fake.node = node
        self.fakes[node] = fake

    def fake(self, node: Node) -> FakeTensor:
        """The tensor that a node stands for."""
        known = self.fakes.get(node)
        if known is None:
            known = fake_of(node.spec)
            self.bind(known, node)
        return known

    def node(self, value: Tensor) -> Node:
        """The node of a fake, or of a real tensor that the graph then holds as a constant."""
        bound: Node | None = value.node if type(value) is FakeTensor else None
        if bound is not None:
            return bound
        known = self._constants.get(id(value))
        if known is None:
            real = value.value if type(value) is FakeTensor and value.value is not None else value
            node = self.graph.constant(real.detach(), _spec_of_any(real))
            known = self._constants[id(value)] = (value, node)
        return known[1]

    def argument(self, value: Any) -> Any:
        """A nest of arguments with nodes in place of tensors and expressions in place of symbolic numbers."""
        kind = type(value)
        if kind is FakeTensor:
            node = value.node
            return node if node is not None else self.node(value)
        if kind is list or kind is tuple:
            argument = self.argument
            return kind([item if type(item) in PLAIN else argument(item) for item in value])
        if kind is torch.Size:
            return list(map(leaf_of, value))
        if isinstance(value, Tensor):
            return self.node(value)
        return value if kind in PLAIN else expr_of(value)

    # Calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A composite op with a rule of its own has a kernel of its own, which is what eager calls.
        if func not in RULES and DECOMPOSES[func]:
            with self:
                return composite(func, args, kwargs)
        out = dispatch(func, args, kwargs)
        if func not in SILENT:
            self.record(func, args, kwargs, out)
        return out

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Node | None:
        """Add a call of `func` that gave `out`; calls that neither make nor write a tensor are left out."""
        kind = type(out)
        if kind is FakeTensor:
            if func in LIFTS and type(args[0]) is not FakeTensor:
                self.bind(out, self._literal(args[0]))
                return None
            if func in OF_NUMBERS and not isinstance(args[0], Tensor):
                args = (OF_NUMBERS[func](args[0]),)
                func, kwargs = aten.scalar_tensor.default, {"dtype": out.dtype, "device": out.device}
        elif kind is not tuple and kind is not list and not (out is None or MUTATING[func]):
            return None
        argument = self.argument
        node = self.add(
            aten.zeros.default if func is aten._efficientzerotensor.default else func,  # which has no memory
            tuple([a if type(a) in PLAIN else argument(a) for a in args]),
            {k: argument(v) for k, v in kwargs.items()} if kwargs else {},
            spec_of(out),
        )
        if kind is FakeTensor:
            if out.node is None:
                out.node = node
                self.fakes[node] = out
        elif kind is tuple or kind is list:
            self._parts(node, out)
        return node

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> Node:
        """A new node of this place in the program."""
        where = self.where if self.origin is None else self.origin()
        node = Node(func, args, kwargs, spec, self._name(func), where, self.backward, self.region)
        self.graph.nodes.append(node)
        return node

    def _parts(self, whole: Node, out: Sequence[Any]) -> None:
        for i, item in enumerate(out):
            if type(item) is FakeTensor:
                if item.node is None:
                    self.bind(item, self._item(whole, i, whole.spec[i]))
            elif type(item) is list:
                part = self._item(whole, i, whole.spec[i])
                self._parts(part, item)

    def _item(self, whole: Node, i: int, spec: Any) -> Node:
        name = self.graph.name("getitem")
        item = Node(operator.getitem, (whole, i), {}, spec, name, whole.where, whole.backward, whole.region)
        self.graph.nodes.append(item)
        return item

    def _literal(self, real: Tensor) -> Node:
        """A node for contents written in the program, copied so that writes do not reach them."""
        kept = self.graph.constant(copied(real.detach()), _spec_of_any(real), "literal")
        kept.where, kept.backward, kept.region = self.where, self.backward, self.region
        return kept

    def _name(self, func: Any) -> str:
        text = self._labels.get(func)
        if text is None:
            text = self._labels[func] = label(func).strip("_") or "value"
        return self.graph.name(text)


def _spec_of_any(real: Tensor) -> TensorSpec:
    return TensorSpec(tuple(real.shape), real.stride(), real.dtype, real.device, real.storage_offset())


def recorded(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    """The aten graph of a function of tensors, without gradients, over types like those of `inputs`."""
    recording, fakes = Recording(), [fake_like(x) for x in inputs]
    for i, fake in enumerate(fakes):
        recording.input(f"x{i}", fake)
    with torch.no_grad(), recording:
        out = function(*fakes)
    outputs = out if isinstance(out, tuple) else (out,)
    recording.graph.outputs = tuple([recording.node(o) for o in outputs])
    return recording.graph
