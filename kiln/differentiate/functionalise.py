"""Functionalise: a recorded program in which ops write to memory becomes one of values alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.expressions import Expr, hinted
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, mapped, retarget
from kiln.differentiate.joint import Step
from kiln.differentiate.undo import UNDO
from kiln.differentiate.writes import FORMS, HIDDEN, Cloned, Form
from kiln.ops.fake import FakeTensor, dispatch
from kiln.ops.layout import contiguous, is_dense, overlaps
from kiln.ops.meta import RESHAPES
from kiln.ops.record import Recording, fake_of, spec_of
from kiln.ops.symint import wrap
from kiln.ops.table import aten

#: Views whose elements are not those of memory as they are there.
OTHER_ELEMENTS = frozenset({
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default,
    aten._neg_view.default,
})  # fmt: skip


@dataclass(eq=False, slots=True)
class Memory:
    """A piece of memory: the tensor that it was made as, and how often it was written."""

    root: Place
    version: int = 0
    written: bool = False
    seen: bool = False
    """Whether a write counts for autograd, which hidden ones do not."""


class Place:
    """A tensor as the program sees it: a view of another, or a memory's own; its present value when asked."""

    __slots__ = ("made", "memory", "node", "parent", "spec", "step", "version")

    def __init__(self, node: Node, spec: TensorSpec, parent: Place | None = None, step: Step | None = None):
        self.node, self.spec, self.parent, self.step = node, spec, parent, step
        self.made = node
        self.memory: Memory = Memory(self) if parent is None else parent.memory
        self.version = self.memory.version

    def path(self) -> list[Place]:
        """This place and those that it is a view of."""
        return [self, *(self.parent.path() if self.parent is not None else ())]

    def above(self) -> list[TensorSpec]:
        """The types of this tensor and of those that it is a view of."""
        return [place.spec for place in self.path()]

    def steps(self, base: Place | None = None) -> tuple[Step, ...]:
        """The views that lead from the memory's own tensor here, or from another on the path."""
        if self.parent is None or self.step is None or self is base:
            return ()
        return (*self.parent.steps(base), self.step)


class Functionaliser:
    """Reads recorded nodes in order and adds their functional form to `graph`.

    Recorded nodes name places in memory. Each place has a value, a node of `graph`; a write gives the place
    and every tensor that it is a view of new values, and other views of the memory are taken anew when next
    read. A node whose reads are what they were is taken over as it is.
    """

    def __init__(self, recording: Recording, learns: bool = False) -> None:
        self.recording = recording
        self.learns = learns  # whether gradients may be asked for
        self.graph = Graph()
        self.graph._names = recording.graph._names
        self._places: dict[Node, Place] = {}
        self._moved: dict[Node, Node] = {}
        """What stands for a recorded node that was replaced, where it is no place."""
        self._fakes: dict[Node, Any] = {}
        self._dirty = False
        self._context: Node | None = None
        self.turned: set[Place] = set()
        """Views of tensors that changed their own shape afterwards: eager has another history of them."""
        self.beyond: set[Place] = set()
        """What as_strided made of views: in eager no gradient leaves such a view, whatever memory is read."""

    # Places and values

    def place(self, node: Node) -> Place:
        """The place that a recorded node stands for."""
        found = self._places.get(node)
        if found is None:
            found = self._places[node] = Place(self._moved.get(node, node), node.spec)
            found.made = node
        return found

    def known(self, node: Node) -> bool:
        """Whether a recorded node was viewed or written."""
        return node in self._places

    def written(self, node: Node) -> bool:
        """Whether the memory of a recorded node was written."""
        place = self._places.get(node)
        return place is not None and place.memory.written

    def fake(self, place: Place) -> FakeTensor:
        """The tensor of the trace that the own place of a memory stands for."""
        return self.recording.fake(place.made)

    def value(self, node: Node) -> Node:
        """The node of `graph` with the present value of a recorded one."""
        place = self._places.get(node)
        return self._moved.get(node, node) if place is None else self.current(place)

    def current(self, place: Place) -> Node:
        """The present value of a place."""
        memory = place.memory
        if place.version != memory.version:
            parent, step = place.parent, place.step
            assert parent is not None and step is not None, "a write sets the value of the root"
            place.node = self.take(self.current(parent), step, parent.spec)
            place.version = memory.version
        return place.node

    def take(self, value: Node, step: Step, seen: TensorSpec) -> Node:
        """A view of `value` as it was taken of a tensor of the type `seen`."""
        args = step.args
        if step.op is aten.as_strided.default:
            value = self.from_start(value)
            args = self.shifted(args, value.spec, seen)
        whole = self.emit(step.op, (value, *args), step.kwargs)
        return whole if step.item is None else self.item(whole, step.item)

    def from_start(self, value: Node) -> Node:
        """`value` where memory starts: an op may give a tensor that starts as late as what it read."""
        fake = self.fake(self.place(value)) if value.op == INPUT else None
        if fake is not None and fake.requires_grad and not fake.is_contiguous():
            why = "as_strided writes to an argument that requires grad and is not contiguous"
            raise Break("as-strided", why, "use indexing")
        if value.spec.offset != 0 and self.learns:
            # Autograd takes the view of a gradient, too, with the place where the tensor starts.
            why = "as_strided looks at a tensor that starts as late as what it was made of, with gradients"
            raise Break("as-strided", why, "use indexing")
        return value if value.spec.offset == 0 else self.emit(aten.clone.default, (value,), {})

    def shifted(self, args: tuple[Any, ...], have: TensorSpec, seen: TensorSpec) -> tuple[Any, ...]:
        """The arguments of as_strided for a tensor that starts elsewhere in its memory than the one seen."""
        size, stride, *rest = args
        offset = rest[0] if rest and rest[0] is not None else seen.offset
        offset = offset - seen.offset + have.offset
        shape = tuple(map(wrap, have.shape))
        last = offset + sum([(n - 1) * s for n, s in zip(size, stride, strict=True)])
        dense = same_strides(have, seen) and is_dense(shape, tuple(map(wrap, have.stride)))
        end = math.prod(map(hinted, have.shape)) + hinted(have.offset)
        if not dense or hinted(offset) < 0 or hinted(last) >= end:
            raise Break("as-strided", "as_strided looks at memory that was laid out anew", "use indexing")
        return size, stride, offset

    def reshaped(self, value: Node, shape: tuple[Any, ...]) -> Node:
        """`value` in another shape, copied where no view can give it."""
        try:
            return self.emit(aten.view.default, (value, list(shape)), {})
        except RuntimeError:
            form = {"memory_format": torch.contiguous_format}
            value = self.emit(aten.clone.default, (value,), form)
            return self.emit(aten.view.default, (value, list(shape)), {})

    # Nodes

    def emit(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TensorSpec | None = None
    ) -> Node:
        """A new node at the end; a type that is not given is found by running the op on fakes."""
        out = None if spec is not None else self.run(op, args, kwargs)
        node = self.graph.call(op, args, kwargs, spec or spec_of(out), self._context)
        if out is not None:
            self._fakes[node] = out
        return node

    def scattered(self, op: Any, base: Node, value: Node, *where: Any, **kwargs: Any) -> Node:
        """`base` with `value` in a part of it; it lies in memory as `base` does."""
        layout = zip(base.spec.shape, base.spec.stride, strict=True)
        overlaps = any(step == 0 and extent != 1 for extent, step in layout)
        return self.emit(op, (base, value, *where), kwargs, None if overlaps else base.spec)

    def item(self, whole: Node, index: int) -> Node:
        """One result of an op of several."""
        node = self.graph.call(operator.getitem, (whole, index), {}, whole.spec[index], self._context)
        made = self._fakes.get(whole)
        if made is not None:
            self._fakes[node] = made[index]
        return node

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `op` gives on fakes of these nodes' types."""
        args, kwargs = mapped(args, self._fake), mapped(kwargs, self._fake)
        return op.shape(args, kwargs) if isinstance(op, Cloned) else dispatch(op, args, kwargs)

    def _fake(self, leaf: Any) -> Any:
        if type(leaf) is not Node:
            return wrap(leaf) if isinstance(leaf, Expr) else leaf
        fake = self._fakes.get(leaf)
        if fake is None:
            # A tensor that changed its own shape in the trace is not what it was here.
            recorded = self.recording.fakes.get(leaf)
            same = recorded is not None and spec_of(recorded) == leaf.spec
            fake = self._fakes[leaf] = recorded if same else fake_of(leaf.spec)
        return fake

    # Reading the recorded program

    def read(self, nodes: Iterable[Node]) -> None:
        """Add these recorded nodes."""
        for node in nodes:
            self._context = node
            op = node.op
            if self.turned and not node.backward:
                self._refuse_turned(node)
            if op is operator.getitem:
                self._getitem(node)
            elif op is CONSTANT:
                self.graph.nodes.append(node)
            else:
                form = FORMS[op]
                if form.views:
                    self._view(node, form)
                elif form.writes and (op not in HIDDEN or HIDDEN[op](node)):
                    self._write(node, form)
                else:
                    self._keep(node)

    def _keep(self, node: Node) -> Node:
        """Add a node that neither writes nor views, reading present values."""
        if self._dirty:
            now = {read: self.value(read) for read in node.inputs()}
            if any(new is not read for read, new in now.items()):
                copy = self._moved[node] = node.over(retarget(node.args, now), retarget(node.kwargs, now))
                self.graph.nodes.append(copy)
                return copy
        self.graph.nodes.append(node)
        return node

    def _getitem(self, node: Node) -> None:
        whole, index = node.args
        place = self._places.get(whole)
        new = self._keep(node)
        if place is not None and place.step is not None and isinstance(whole.spec, list | tuple):
            step = Step(place.step.op, place.step.args, place.step.kwargs, index)
            self._places[node] = Place(new, node.spec, place.parent, step)

    def _view(self, node: Node, form: Form) -> None:
        step = Step(node.op, node.args[1:], node.kwargs)
        viewed = parent = self.place(node.args[0])
        new = None
        if node.op is aten.as_strided.default:
            parent, step = self._over_memory(parent, node)
            given = parent.memory.root.made.op in (INPUT, CONSTANT)
            if not given or parent.memory.written or self.current(parent).spec.offset != parent.spec.offset:
                new = self._moved[node] = self.take(self.current(parent), step, parent.spec)
                self._dirty = True
        place = self._places[node] = Place(new or self._keep(node), node.spec, parent, step)
        if parent is not viewed:
            self.beyond.add(place)

    def _over_memory(self, parent: Place, node: Node) -> tuple[Place, Step]:
        """What as_strided views, with the step: the tensor of the whole memory, whatever it was called on."""
        given = dict(zip(("size", "stride", "storage_offset"), node.args[1:], strict=False)) | node.kwargs
        offset = given.get("storage_offset")
        offset = parent.spec.offset if offset is None else offset
        step = Step(node.op, (given["size"], given["stride"], offset), {})
        root = parent.memory.root
        return (parent, step) if any(s.op in OTHER_ELEMENTS for s in parent.steps()) else (root, step)

    def _write(self, node: Node, form: Form) -> None:
        written = form.written(node)
        if RESHAPES[node.op]:
            self._reshape(node, form)
            return
        self._dirty = True
        if "out" in node.kwargs:
            self._share(written)
        values = form.apply(self, node, written)
        for target, value in zip(written, values, strict=True):
            place = self.place(target)
            self.store(place, value, node.op not in HIDDEN)

    def _share(self, targets: Iterable[Node]) -> None:
        """Let what is asked for by out= be views where torch made them without saying so."""
        for node in targets:
            if node.op is aten._unsafe_view.default:
                step = Step(aten.view.default, node.args[1:], node.kwargs)
                self._places[node] = Place(self.value(node), node.spec, self.place(node.args[0]), step)

    def _reshape(self, node: Node, form: Form) -> None:
        """A tensor that changes its own shape is from now on a view of what it was."""
        target = node.args[0]
        parent = self.place(target)
        step = Step(form.twin, node.args[1:], node.kwargs)
        new = self.take(self.current(parent), step, parent.spec)
        self._dirty = True
        self.turned |= {p for p in self._places.values() if p is not parent and parent in p.path()}
        self._places[target] = Place(new, new.spec, parent, step)

    def _refuse_turned(self, node: Node) -> None:
        """Break where a view of a tensor that changed its own shape afterwards is computed with."""
        for read in node.inputs():
            if self._places.get(read) in self.turned and self.recording.fake(read).requires_grad:
                why = "a view is used of a tensor that changed its own shape afterwards"
                raise Break("write-to-view", why, "use the form that returns a view")

    def moved(self, node: Node, new: Node) -> None:
        """Let `new` stand for the recorded `node` from now on."""
        self._moved[node] = new

    # Writing

    def is_contiguous(self, spec: TensorSpec) -> bool:
        """Whether a tensor lies in memory in the order of its indices, without holes."""
        stride = contiguous(tuple([wrap(n) for n in spec.shape]))
        return all(a == wrap(b) for a, b in zip(stride, spec.stride, strict=True))

    def store(self, place: Place, value: Node, seen: bool) -> None:
        """Make `value` the contents of a place, and with it of what the place is a view of."""
        memory = place.memory
        value = self.cast(value, place.spec)
        path: list[tuple[Place, Node]] = []
        if any(overlaps(spec.shape, spec.stride) for spec in place.above()):
            # Elements of what is viewed share places: a new value for all does not say which was written.
            path.append((place, value))
            place, value = memory.root, self.put(place, value)
        while place.parent is not None and place.step is not None:
            path.append((place, value))
            parent = place.parent
            undo = UNDO.get(place.step.op)
            if undo is None:
                why = f"{place.step.op} gives a view into which a write cannot be undone"
                raise Break("write-to-view", why, "write to the tensor itself")
            value = undo(self, self.current(parent), value, place.step, parent.spec)
            place = parent
        path.append((place, self.laid(value, place.spec)))
        memory.version += 1
        memory.written = True
        memory.seen = memory.seen or seen
        for at, now in path:
            # What lies otherwise than the view did is taken anew where it is read.
            if at.parent is None or same_strides(now.spec, at.spec):
                at.node, at.version = now, memory.version

    def put(self, place: Place, value: Node) -> Node:
        """The contents of a memory with `value` where a view lies in it."""
        root, spec = place.memory.root, place.spec
        shared = any(overlaps(each.shape, each.stride) for each in (spec, root.spec))
        if shared or any(s.op in OTHER_ELEMENTS for s in place.steps()):
            why = "a tensor is written whose elements share places in memory"
            raise Break("write-to-view", why, "write to a copy of it")
        step = Step(aten.as_strided.default, (list(spec.shape), list(spec.stride), spec.offset), {})
        return UNDO[step.op](self, self.current(root), value, step, root.spec)

    def cast(self, value: Node, spec: TensorSpec) -> Node:
        """`value` with the dtype, shape and device that `spec` has."""
        if value.spec.dtype is not spec.dtype:
            value = self.emit(aten._to_copy.default, (value,), {"dtype": spec.dtype})
        if value.spec.shape != spec.shape:
            value = self.emit(aten.expand.default, (value, list(spec.shape)), {})
        if value.spec.device != spec.device:
            value = self.emit(aten._to_copy.default, (value,), {"device": spec.device})
        return value

    def exact(self, value: Node, spec: TensorSpec) -> Node:
        """`value` with the strides that `spec` has, also where they do not matter."""
        value = self.laid(value, spec)
        if value.spec.stride == spec.stride:
            return value
        # A copy that starts where memory starts may lie otherwise than what was copied.
        value = self.laid(self.from_start(value), spec)
        layout = list(spec.shape), list(spec.stride), value.spec.offset
        own = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, value.spec.offset)
        return self.emit(aten.as_strided.default, (value, *layout), {}, own)

    def laid(self, value: Node, spec: TensorSpec) -> Node:
        """`value` with the strides that `spec` has."""
        if same_strides(value.spec, spec):
            return value
        if self.is_contiguous(spec):
            return self.emit(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        shape, stride = list(spec.shape), list(spec.stride)
        own = TensorSpec(spec.shape, spec.stride, value.spec.dtype, value.spec.device)
        empty = self.emit(aten.new_empty_strided.default, (value, shape, stride), {}, own)
        return self.emit(aten.copy.default, (empty, value), {}, empty.spec)


def same_strides(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two types of one shape lie alike in memory; the strides of single elements do not matter."""
    if a.stride == b.stride or 0 in a.shape:
        return True
    return all(n == 1 or wrap(s) == wrap(t) for n, s, t in zip(a.shape, a.stride, b.stride, strict=True))
