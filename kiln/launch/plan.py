"""Plans: a fused program as steps over slots and places in an arena, which one native call runs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln._launch import Plan
from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr, Symbol, hinted
from kiln.base.graph import CONSTANT, Node, TensorSpec, label, mapped
from kiln.base.keys import HIDDEN
from kiln.fuse.costs import LONG
from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.fuse.program import Program
from kiln.fuse.steps import Launch
from kiln.generate.code import Compiled
from kiln.generate.cpu import Code
from kiln.launch.events import Event, Events, apart_from, events_of, last_uses, lodgers, native_reads
from kiln.launch.inplace import heirs, never_fails, successors
from kiln.launch.memory import Lodging, size_of
from kiln.launch.native import dtype_code, function, hides, product_for, set_up
from kiln.launch.numbers import Numbers, Settled
from kiln.launch.shims import LASTING, lasting, signature, words_of, work_of_call
from kiln.launch.sources import Sources
from kiln.launch.text import Description
from kiln.ops.mersenne import IN_PYTHON

aten = torch.ops.aten

GRAIN = 60_000.0  # operations worth a thread
SLOT, PLACE = 0, 1  # as in _launch.h


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies in the arena: a lodging, and how many bytes after its start."""

    lodging: Lodging
    ahead: Any = 0


def plan_for(program: Program, compiled: Sequence[Compiled]) -> Plan:
    """The plan of a program whose kernels, in order, are these."""
    return linked(Planner(program, compiled).described(), compiled[0].code.wait() if compiled else None)


def linked(made: Description, code: Code | None, device: tuple[int, int, int] = (0, 0, 0)) -> Plan:
    """The plan that a description is of, with the functions of this process in place of their names."""
    set_up()
    settled = made.settled
    plan = Plan(
        tuple([LINKED[step[0]](step, code) for step in made.steps]), made.lodged, made.outputs,
        settled.symbols, made.constants, made.inputs, len(made.names), len(made.numbers) - 1, settled.fixed,
        settled.function(), replace(made, code=code), GRAIN, device,
    )  # fmt: skip
    plan.failing = made.sources
    called = [step[1] for step in made.steps if LINKED[step[0]] is with_function]
    if called and hides() and all(isinstance(op, torch._ops.OpOverload) for op in called):
        plan.hidden, plan.pure = HIDDEN.raw_repr(), True
    return plan


def with_addresses(step: tuple[Any, ...], code: Code | None) -> tuple[Any, ...]:
    """A launch of the functions that have these names in the code."""
    assert code is not None
    return step[0], tuple([(code.address(name), *rest) for name, *rest in step[1]]), *step[2:]


def with_function(step: tuple[Any, ...], code: Code | None) -> tuple[Any, ...]:
    """A call of what has this name in torch's library, or of an op through Python."""
    kind, op, arguments, names, results, packed, native, words, work, drops = step
    if isinstance(op, torch._ops.OpOverload):
        whole = len(arguments) == len(op._schema.arguments)  # what is left out is not the same for both
        op = binding(op) if whole and not native else op._op
    words = tuple([lasting(word) if word[0] in LASTING else word for word in words])
    return kind, op, arguments, names, results, packed, function(native) if native else 0, words, work, drops


@functools.cache
def binding(op: torch._ops.OpOverload) -> Any:
    """What calls an op from Python: torch's function of this name where it can be no other op.

    It reads its arguments faster than what goes by schemas. Ops of ours that are written in Python are so.
    """
    if op in IN_PYTHON:
        return IN_PYTHON[op]
    packet, own = op._overloadpacket, getattr(torch._C._VariableFunctions, op.__name__.split(".")[0], None)
    if own is None or op.namespace != "aten" or op._overloadname != "default":
        return op._op
    schemas = [getattr(packet, name)._schema for name in packet.overloads()]
    functional = [s for s in schemas if not any(argument.is_out for argument in s.arguments)]
    return own if len(functional) == 1 else op._op


def as_it_is(step: tuple[Any, ...], code: Code | None) -> tuple[Any, ...]:
    return step


LINKED = {"launch": with_addresses, "call": with_function}
LINKED |= dict.fromkeys(("make", "show", "grid"), as_it_is)


class Planner:
    """A plan in the making."""

    def __init__(
        self, program: Program, compiled: Sequence[Any], device: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        self.program = program
        self.device = device  # torch's numbers for it, and the driver's context
        self.events: Events = events_of(program)
        self.compiled = iter(compiled)
        self.code = compiled
        self.numbers = Numbers()
        self.last, self.memory = last_uses(self.events)
        self.lodgers = lodgers(self.events)
        self.apart = math.inf if device[0] else apart_from(self.events, self.lodgers, self.memory)
        self.lodgers = {node for node in self.lodgers if hinted(size_of(node.spec)) < self.apart}
        self.native = native_reads(self.events)
        self.lodgings: list[Lodging] = []
        self.homes: dict[Node, int | Place] = {}
        self.names: list[str] = []
        self.lodged: dict[Node, int] = {}
        self.tensors: list[tuple[int, Any]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.labels: list[str] = []
        self.sources: list[Launch | Node] = []
        """What kernels and calls come from, in order."""
        self.fresh: set[Node] = set()
        """Values in slots whose memory nothing but the plan knows."""
        self.taken: set[Node] = set()
        self.works: dict[int, float] = {}
        self.heirs: dict[Kernel, dict[Buffer, list[Buffer]]] = {}
        self.reads_first: Collection[Nest] = ()
        self.counted: tuple[int, Counter[Node]] = (-1, Counter())
        #: From which event on nothing can fail, after which the caller would find inputs half written.
        self.unfailing = 0 if program.overwrites else math.inf
        for number, event in enumerate(self.events.listed if program.overwrites else ()):
            launch = event.launch
            if event.ahead is None and (launch is None or not never_fails(launch.kernel)):
                self.unfailing = number + 1
        self.now = 0

    def plan(self) -> Plan:
        return linked(self.described(), None, self.device)

    def described(self) -> Description:
        """What the plan is made of, without anything of this process."""
        graph = self.program.graph
        for node in graph.inputs:
            self.slot(node)
        constants = [node for node in graph.nodes if node.op is CONSTANT and node in self.last]
        constants += [
            n for n in graph.nodes if n.op is CONSTANT and n in graph.outputs and n not in self.last
        ]
        for node in constants:
            self.slot(node)
        ending: dict[int, list[Node]] = {}
        for node, i in self.last.items():
            if node.op is not CONSTANT:
                ending.setdefault(i, []).append(node)
        for node in graph.inputs:
            if node not in self.last:
                ending.setdefault(0, []).append(node)
        for i, event in enumerate(self.events.listed):
            self.now = i
            before = len(self.steps)
            self.add(event)
            drops = [home for n in ending.get(i, ()) if type(home := self.homes.get(n)) is int]
            if drops and self.steps:
                place = max(len(self.steps), before) - 1
                self.steps[place] = (*self.steps[place][:-1], (*self.steps[place][-1], *drops))
        outputs = tuple([self.argument(out) for out in graph.outputs])
        settled: Settled = self.numbers.settle(self.lodgings, graph)
        steps, lodged = tuple(self.steps), tuple(self.tensors)
        return Description(
            steps, lodged, outputs, tuple(self.names), tuple(self.lodgings), settled,
            tuple(self.numbers.values), tuple(made.kernel.name for made in self.code), tuple(self.labels),
            len(graph.inputs), Sources([step[0] for step in steps], self.sources),
            tuple([node.args[0] for node in constants]),
        )  # fmt: skip

    # Homes

    def slot(self, node: Node) -> int:
        self.homes[node] = len(self.names)
        self.names.append(node.name)
        return len(self.names) - 1

    def home(self, node: Node) -> int | Place:
        return self.homes[self.events.value(node)]

    def lodge(self, name: str, spec: TensorSpec, last: int) -> Lodging:
        lodging = Lodging(name, size_of(spec), self.now, last)
        self.lodgings.append(lodging)
        return lodging

    def made(self, node: Node, left: Node | None = None) -> None:
        """Find a home for a value that the next step writes; `left` is a value whose home it may take."""
        home = None if left is None else self.homes[left]
        if isinstance(home, Place) and node in self.lodgers:
            lodging = self.lodge(node.name, node.spec, self.memory[node])
            home.lodging.heir, lodging.inherited = lodging, True
            self.homes[node] = Place(lodging)
        elif left is not None and type(home) is int:
            self.fresh.add(node)
            if (left.spec.shape, left.spec.stride) != (node.spec.shape, node.spec.stride):
                form, ahead = self.form(node.spec), self.numbers.run((0,))
                self.steps.append(("show", self.slot(node), home, form, ahead, ()))
                return
            self.homes[node] = home
            del self.homes[left]
            self.names[home] = f"{self.names[home]}={node.name}"
        elif node in self.lodgers:
            self.homes[node] = Place(self.lodge(node.name, node.spec, self.memory[node]))
        else:
            self.fresh.add(node)
            self.steps.append(("make", self.slot(node), self.form(node.spec), ()))

    def form(self, spec: TensorSpec) -> tuple[int, int, int, int]:
        shape, stride = self.numbers.run(spec.shape), self.numbers.run(spec.stride)
        return len(spec.shape), shape, stride, dtype_code(spec.dtype)

    def address(self, node: Node) -> tuple[int, int]:
        """What a kernel gets for a value."""
        home = self.home(node)
        if isinstance(home, Place):
            return PLACE, self.numbers.place(home.lodging, home.ahead)
        return SLOT, home

    def tensor(self, node: Node) -> tuple[int, int]:
        """What a call gets for a value."""
        node = self.events.value(node)
        home = self.homes[node]
        if not isinstance(home, Place):
            return SLOT, home
        found = self.lodged.get(node)
        if found is None:
            found = self.lodged[node] = len(self.tensors)
            place = self.numbers.place(home.lodging, home.ahead)
            self.tensors.append((place, self.form(node.spec)))
        return PLACE, found

    # Steps

    def add(self, event: Event) -> None:
        if event.launch is not None:
            self.launch(event.launch, next(self.compiled))
        elif event.ahead is not None:
            self.view(event)
        else:
            self.call(event)

    def launch(self, launch: Launch, compiled: Any) -> None:
        before = {node: self.address(node) for node in launch.reads.values()}
        self.taken, places = set(), dict[Buffer, tuple[int, int]]()
        for buffer, node in launch.writes.items():
            self.made(node, self.leaving(launch, buffer, node))
            places[buffer] = self.address(node)
        scratch = {buffer: self.scratch(buffer.name, spec) for buffer, spec in launch.scratch.items()}
        places.update(scratch)
        buffers = tuple([places[b] if b in places else before[launch.reads[b]] for b in compiled.buffers])
        self.sources.append(launch)
        step = self.started(compiled, buffers)
        drops = tuple([index for kind, index in scratch.values() if kind == SLOT])
        self.steps.append((*step[:-1], drops) if drops else step)

    def scratch(self, name: str, spec: TensorSpec) -> tuple[int, int]:
        """Memory for one step."""
        if hinted(size_of(spec)) < self.apart:
            return PLACE, self.numbers.place(self.lodge(name, spec, self.now))
        self.names.append(name)
        self.steps.append(("make", len(self.names) - 1, self.form(spec), ()))
        return SLOT, len(self.names) - 1

    def started(self, compiled: Any, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
        """The step that runs a kernel."""
        stages = []
        for nests, name, tasks in zip(compiled.kernel.stages, compiled.names, compiled.tasks, strict=True):
            count = max(float(getattr(tasks, "hint", tasks)), 1.0)
            stages.append((name, self.numbers.run((tasks,)), self.work(nests) / count))
        return "launch", tuple(stages), buffers, self.numbers.run(tuple(compiled.sizes)), ()

    def work(self, nests: Sequence[Nest]) -> float:
        known = self.works.get(id(nests))
        if known is None:
            known = self.works[id(nests)] = sum(map(work_of, nests))
        return known

    def leaving(self, launch: Launch, buffer: Buffer, node: Node) -> Node | None:
        """A value that a kernel reads last and in whose memory it may write a result."""
        pairs = self.heirs.get(launch.kernel)
        if pairs is None:
            pairs = self.heirs[launch.kernel] = heirs(launch.kernel, self.reads_first)
            if len(launch.kernel.stages) > 1 and not self.device[0]:
                for later, earlier in successors(launch.kernel).items():
                    pairs[later] = [*pairs.get(later, ()), *earlier]
        found = [launch.reads.get(read) or launch.writes.get(read) or node for read in pairs.get(buffer, ())]
        own = self.program.overwrites.get(node)
        for left in sorted(map(self.events.value, found), key=lambda left: left is not own):
            if left in self.homes and left not in self.taken and self.gives_way(left, node):
                self.taken.add(left)
                return left
        return None

    def readings(self, left: Node) -> int:
        """How many values in the memory of this one the step reads that is being planned."""
        if self.counted[0] != self.now:
            self.counted = self.now, Counter(map(self.events.owner, self.events.listed[self.now].reads))
        return self.counted[1][left]

    def gives_way(self, left: Node, node: Node) -> bool:
        """Whether a value may be overwritten by another: nothing else needs its memory, and that is ours.

        Inputs may be that the caller gives these very values to.
        """
        if self.program.overwrites.get(node) is left:
            last = self.readings(left) == 1 and self.memory[left] == self.now
            return self.now >= self.unfailing and last and left.spec == node.spec
        events = self.events
        if left in events.kept or left in events.owners or self.memory[left] != self.now:
            return False
        if self.readings(left) > 1:
            return False
        mine, its = left.spec, node.spec
        if (mine.dtype, size_of(mine)) != (its.dtype, size_of(its)):  # the kernel knows where elements lie
            return False
        return node in self.lodgers if isinstance(self.homes[left], Place) else left in self.fresh

    def view(self, event: Event) -> None:
        ahead, node = event.ahead, event.node
        assert node is not None
        base = self.home(node.args[0])
        if isinstance(base, Place):
            self.homes[node] = Place(base.lodging, base.ahead + ahead * node.spec.dtype.itemsize)
            return
        form, place = (*self.form(node.spec)[:3], 0), self.numbers.run((ahead,))
        self.steps.append(("show", self.slot(node), base, form, place, ()))

    def call(self, event: Event) -> None:
        node, shim = event.node, event.shim
        assert node is not None
        op, args, kwargs = (node.op, node.args, node.kwargs) if plain(node) else flattened(node)
        arguments = tuple([self.argument(a) for a in (*args, *kwargs.values())])
        names = tuple(kwargs) or None
        self.labels.append(label(node.op))
        self.sources.append(node)
        words = words_of(node, self.tensor, self.numbers.run) if shim is not None else None
        if shim is None or words is None:
            results, packed = self.results(node)
            self.steps.append(("call", op, arguments, names, results, packed, "", (), 0.0, ()))
            return
        if shim.writes:
            left = self.summand(node)
            self.made(node, left)
            results, packed = (), False
            out = ("h", (self.tensor(node),))
            # In an arena whose sizes vary it lies elsewhere; else adding to what lies there takes no copy.
            apart = left is None or isinstance(self.homes.get(left), Place)
            words = (out, *words) if apart else (out, out, *words[1:])
        else:
            results, packed = self.results(node)
            self.fresh.update(event.makes)
            words = (*words, *signature(node.op)[1])
        work = work_of_call(node)
        native = product_for(shim.name) if self.program.by_onednn else shim.name
        self.steps.append(("call", op, arguments, names, results, packed, native, words, work, ()))

    def summand(self, node: Node) -> Node | None:
        """The matrix in whose memory a product may be added to it."""
        if node.op is not aten.addmm.default:
            return None
        left, *factors = map(self.events.value, node.args[:3])
        fits = left not in factors and left.spec == node.spec and self.gives_way(left, node)
        return left if fits else None

    def results(self, node: Node) -> tuple[tuple[Any, ...], bool]:
        """Where the results of a call go, and whether they come as a sequence."""
        items = self.events.items.get(node)
        if items is None:
            return (self.result(node),), False
        count = max(items) + 1
        return tuple([self.result(items[i]) if i in items else (-1, False, None) for i in range(count)]), True

    def result(self, node: Node) -> tuple[int, bool, Any]:
        plain = isinstance(node.spec, TensorSpec) and node in self.native
        plain = plain and (node.spec.device.type == "cpu") == (self.device[0] == 0)
        return self.slot(node), node in self.events.owners, self.form(node.spec) if plain else None

    def argument(self, value: Any) -> tuple[str, Any]:
        """An argument of a Python function, or an output."""
        kind = type(value)
        if kind is Node:
            where, index = self.tensor(value)
            return ("p" if where == PLACE else "s"), index
        if kind is tuple or kind is list:
            parts = tuple([self.argument(item) for item in value])
            if all(part[0] == "o" for part in parts):
                return "o", value
            return ("t" if kind is tuple else "l"), parts
        if kind is Symbol and value in self.events.numbers:
            return "s", self.homes[self.events.numbers[value]]
        return ("c", self.numbers.object(value)) if isinstance(value, Expr) else ("o", value)


def plain(node: Node) -> bool:
    """Whether values stand in lists and tuples alone among the arguments of a call."""
    return _plain(node.args) and _plain(node.kwargs.values())


def _plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is dict or kind is slice or ((kind is list or kind is tuple) and not _plain(value)):
            return False
    return True


def flattened(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call whose values stand in dicts and slices as a call of them alone."""
    leaves: list[Any] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, (Node, Expr)):
            return leaf
        leaves.append(leaf)
        return Given(len(leaves) - 1)

    made = Flattened(node.op, mapped(node.args, place), mapped(node.kwargs, place))
    return made, tuple(leaves), {}


@dataclass(frozen=True, slots=True)
class Flattened:
    """A call of an op with values in the places of those that are Given."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *values: Any) -> Any:
        def value(leaf: Any) -> Any:
            return values[leaf.index] if type(leaf) is Given else leaf

        return self.op(*mapped(self.args, value), **mapped(self.kwargs, value))


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for an argument of a call that was flattened."""

    index: int


def work_of(nest: Nest) -> float:
    """The operations of a nest."""
    computed = nest.terms()
    return nest.volume() * sum(COSTS.get(getattr(term, "op", ""), 1.0) for term in computed)


#: Operations that a function is worth, where it is more than one.
COSTS = {
    **dict.fromkeys(("exp", "exp_below", "exp2", "expm1", "log", "log1p", "log2", "tanh", "erf"), 12.0),
    "sigmoid": 12.0,
    **dict.fromkeys(LONG | {"fmod", "remainder"}, 30.0),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 6.0),
}
