"""What each op writes and views, from its schema, and the functional form of ops that write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Node, mapped
from kiln.ops.fake import dispatch
from kiln.ops.meta import SEEDED, Facts
from kiln.ops.table import aten

if TYPE_CHECKING:
    from kiln.differentiate.functionalise import Functionaliser


@dataclass(frozen=True, slots=True)
class InGradMode:
    """An op that gives what its backward needs only in grad mode, called in it."""

    op: Any

    @property
    def __name__(self) -> str:
        return f"{self.op._schema.name.split('::')[-1]}_in_grad_mode"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, outside autograd."""

        def apart(leaf: Any) -> Any:
            return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

        with torch.enable_grad():
            return self.op(*mapped(args, apart), **mapped(kwargs, apart))


#: Ops that look at grad mode when they run.
LOOKS_AT_GRAD_MODE = frozenset({aten.mkldnn_rnn_layer.default})

#: Ops that write though their schema does not say so: which arguments, and when.
HIDDEN: dict[Any, Callable[[Node], bool]] = {}
_HIDDEN_ARGUMENTS: dict[Any, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Cloned:
    """An op that writes and has no functional twin, run on copies: its results, then the copies."""

    op: Any
    written: tuple[int, ...]
    fresh: int

    @property
    def __name__(self) -> str:
        return f"{self.op._schema.name.split('::')[-1]}_on_copies"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Copy what is written, run, give the results that are not what was written, then the copies."""
        return self.through(lambda t: t.clone(), self.op, args, kwargs)

    def shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The same on fakes, which need no copies."""
        return self.through(lambda t: dispatch(aten.clone.default, (t,), {}),
                            lambda *a, **k: dispatch(self.op, a, k), args, kwargs)  # fmt: skip

    def through(self, copy: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Run `call` with what is written replaced by copies."""
        copies: dict[int, Any] = {}
        order: list[int] = []
        for place in self.written:
            name = self.op._schema.arguments[place].name
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else () if value is None else (value,):
                order.append(id(tensor))
                if id(tensor) not in copies:
                    copies[id(tensor)] = copy(tensor)

        def swapped(leaf: Any) -> Any:
            return copies.get(id(leaf), leaf)

        out = call(*mapped(args, swapped), **mapped(kwargs, swapped))
        given = out if isinstance(out, (list, tuple)) else (out,)
        return (*given[: self.fresh], *[copies[key] for key in order])


class Form:
    """What an op does to memory: whether it gives views, what it writes, and its functional twin."""

    __slots__ = ("fresh", "names", "op", "twin", "views", "writes")

    def __init__(self, op: Any) -> None:
        self.op = op
        self.views = False
        self.writes: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()
        self.twin: Any = None
        self.fresh = 0
        schema = getattr(op, "_schema", None)
        if schema is None:
            return
        self.names = tuple([a.name for a in schema.arguments])
        self.writes = _HIDDEN_ARGUMENTS.get(op, ()) or tuple(
            [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        )
        self.fresh = sum(r.alias_info is None for r in schema.returns)
        if self.writes:
            self.twin = twin_of(op)
        else:
            self.views = self.fresh < len(schema.returns)

    def argument(self, node: Node, name: str) -> Any:
        """The argument of a node by its name in the schema; None where it is left out."""
        place = self.names.index(name)
        return node.args[place] if place < len(node.args) else node.kwargs.get(name)

    def written(self, node: Node) -> list[Node]:
        """The recorded nodes that a call writes, in the order of the arguments."""
        found: list[Node] = []
        for name in self.writes:
            value = self.argument(node, name)
            found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return found

    def apply(self, f: Functionaliser, node: Node, written: list[Node]) -> list[Node]:
        """Add the functional form of a call; the new values of what it writes."""
        special = SPECIAL.get(self.op)
        if special is not None:
            return special(f, node)

        def now(leaf: Any) -> Any:
            return f.value(leaf) if type(leaf) is Node else leaf

        if self.twin is None or self.in_turn(f, node, written) or self.scatters(f, written):
            keys = tuple([self.names.index(name) for name in self.writes])
            op: Any = Cloned(self.op, keys, self.fresh)
            args, kwargs = mapped(node.args, now), mapped(node.kwargs, now)
        else:
            op = self.twin
            args, kwargs = self.twin_arguments(node, now)
        new = f.emit(op, args, kwargs)
        if self.fresh:
            single = not isinstance(node.spec, (list, tuple)) and isinstance(new.spec, (list, tuple))
            f.moved(node, f.item(new, 0) if single else new)
        return self.results(f, new, len(written))

    def scatters(self, f: Functionaliser, written: list[Node]) -> bool:
        """Whether random numbers, which are drawn in the order of memory, fill memory of an unusual order."""
        if not SEEDED[self.op]:
            return False
        specs = [f.place(target).spec for target in written]
        return not all(map(f.is_contiguous, specs))

    def in_turn(self, f: Functionaliser, node: Node, written: list[Node]) -> bool:
        """Whether a list op reads, for later elements, what it wrote for earlier ones."""
        if not isinstance(node.args[0] if node.args else None, list):
            return False
        memories = [f.place(target).memory for target in written]
        rest = [f.place(read).memory for read in node.inputs()]
        return len(set(memories)) < len(memories) or len([m for m in rest if m in memories]) > len(memories)

    def twin_arguments(self, node: Node, now: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call for the functional twin, which lacks out= and may add to the end."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        left_out = False
        for declared in self.twin._schema.arguments:
            name = declared.name if declared.name in self.names else OTHER_NAMES.get(declared.name)
            if name not in self.names:
                left_out = True
                continue
            place = self.names.index(name)
            if place < len(node.args):
                value = mapped(node.args[place], now)
            elif name in node.kwargs:
                value = mapped(node.kwargs[name], now)
            elif not declared.has_default_value():
                value = self.op._schema.arguments[place].default_value
            else:
                left_out = True
                continue
            if declared.kwarg_only or left_out:
                kwargs[declared.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def results(self, f: Functionaliser, new: Node, count: int) -> list[Node]:
        """The new values in the result of a twin: after the results that the op has anyway."""
        if not isinstance(new.spec, (list, tuple)):
            return [new]
        values: list[Node] = []
        for i in range(self.fresh, len(new.spec)):
            part = f.item(new, i)
            many = isinstance(new.spec[i], (list, tuple))
            values += [f.item(part, j) for j in range(len(new.spec[i]))] if many else [part]
        return [v for v in values if v.spec is not None][:count] if len(values) != count else values


def twin_of(op: Any) -> Any:
    """The overload that computes what `op` writes and returns it; None where there is none."""
    known = TWINS.get(op)
    if known is not None:
        return known
    schema = op._schema
    space, _, name = schema.name.partition("::")
    outs = {a.name for a in schema.arguments if a.kwarg_only and a.alias_info is not None}
    wanted = {a.name: str(a.type) for a in schema.arguments if a.name not in outs}
    best: tuple[int, Any] | None = None
    stem = name.removesuffix("_")
    for candidate in dict.fromkeys((stem, f"{stem}_functional", f"{name}_functional")):
        packet = getattr(getattr(torch.ops, space), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            extra = _extra(found._schema, wanted)
            fits = len(found._schema.returns) == _returns(schema)
            if extra is not None and fits and (best is None or extra < best[0]):
                best = extra, found
    return best[1] if best is not None else None


def _returns(schema: Any) -> int:
    """How many results a functional twin has."""
    fresh = sum(r.alias_info is None for r in schema.returns)
    writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not fresh and len(writes) == 1 and "List" in str(writes[0].type):
        return 1
    return fresh + len(writes)


def _extra(schema: Any, wanted: dict[str, str]) -> int | None:
    """How many arguments a candidate has beyond those wanted; None where it does not take these."""
    if schema.is_mutable:
        return None
    have = {a.name: str(a.type) for a in schema.arguments}
    if any(have.get(name) != kind for name, kind in wanted.items()):
        return None
    rest = [a for a in schema.arguments if a.name not in wanted]
    return len(rest) if all(a.has_default_value() for a in rest) else None


#: The form of every op met so far.
FORMS = Facts(Form)

#: What arguments of twins are called by ops of other libraries.
OTHER_NAMES = {"momentum": "exponential_average_factor", "eps": "epsilon"}
#: Functional twins whose names do not follow from the op's.
TWINS: dict[Any, Any] = {
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    aten.cudnn_batch_norm.default: aten._batch_norm_with_update_functional.default,
    aten.miopen_batch_norm.default: aten._batch_norm_with_update_functional.default,
}


def _trains(node: Node) -> bool:
    """Whether a batch norm updates running statistics."""
    form = FORMS[node.op]
    names = set(form.names)
    training = form.argument(node, "training" if "training" in names else "train")
    return bool(training) and form.argument(node, "running_mean") is not None


for _op in TWINS:
    HIDDEN[_op] = _trains
    _HIDDEN_ARGUMENTS[_op] = ("running_mean", "running_var")


def _copy(f: Functionaliser, node: Node) -> list[Node]:
    """`copy_`: the value is the source, cast and spread where it must be."""
    source = node.args[1]
    return [f.value(source)] if type(source) is Node else _filled(f, node)


def _filled(f: Functionaliser, node: Node) -> list[Node]:
    """`fill_` and `zero_`: a new tensor, which needs nothing of the old one."""
    spec = f.place(node.args[0]).spec
    number = node.args[1] if len(node.args) > 1 else 0
    if type(number) is Node:
        return [f.value(number)]
    kwargs = {"dtype": spec.dtype, "device": spec.device}
    return [f.emit(aten.full.default, (list(spec.shape), number), kwargs)]


SPECIAL: dict[Any, Callable[[Any, Node], list[Node]]] = {
    aten.copy_.default: _copy,
    aten.zero_.default: _filled,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
}
