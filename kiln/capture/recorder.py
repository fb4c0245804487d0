"""The recorder: torch calls on fake tensors become nodes of a torch.fx graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from kiln.base import computed, marks
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break, Bug
from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import mapped
from kiln.base.source import Derived, Source
from kiln.base.symbols import LIMIT
from kiln.capture import nodes
from kiln.capture.fake_arrays import RULES as ARRAYS
from kiln.capture.fake_arrays import FakeArray, OpenNumber, OpenText
from kiln.capture.frame import Unfit
from kiln.capture.module import CapturedGraph, CapturedModule
from kiln.capture.nodes import ACCESSORS, FACTORS, LEAVING, METHODS, OPERATORS, PLAIN, SWITCH, Args, Kwargs
from kiln.capture.spent import ending
from kiln.capture.wrappers import PLAIN_TYPES, Around, AroundMode, faked, is_wrapper, plain
from kiln.ops import rules  # noqa: F401  (fills the table of shape rules)
from kiln.ops.fake import LITERALS, FakeMode, FakeTensor, fake_like
from kiln.ops.forms import form_of
from kiln.ops.symint import SYMBOLIC, expr_of, wrap

_push_dispatch = torch._C._push_on_torch_dispatch_stack  # type: ignore[attr-defined]
_pop_dispatch = torch._C._pop_torch_dispatch_stack
_push_function = torch._C._push_on_torch_function_stack
_pop_function = torch._C._pop_torch_function_stack
_no_hooks = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class InputInfo:
    """A graph input: where its value comes from, and the value seen while capturing."""

    source: Source
    real: torch.Tensor | int | float | torch.Generator


@dataclass(frozen=True, slots=True)
class _Number:
    """Where the value of a symbol comes from: a size or stride of a graph input, an item, or an input."""

    what: str
    owner: Any  # the fake, or the source of a Python number
    dim: int


@dataclass(frozen=True, slots=True)
class _Input:
    """A registered tensor that no node has used yet."""

    source: Source | None
    real: torch.Tensor
    as_attr: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """An element of a node's result that no node has used yet."""

    whole: Node
    path: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """An item of a tensor that is iterated over, which no node has used yet."""

    whole: Node
    index: int


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """A tensor that was given the data of another: the node of that one, without a way for gradients."""

    node: Node


Binding: TypeAlias = Node | _Input | _Part | _Row | _Exchanged
Bound: TypeAlias = tuple[FakeTensor, Binding]


def whole(binding: Binding | None) -> Node | None:
    """The node that a tensor comes from."""
    if isinstance(binding, (_Part, _Row)):
        return binding.whole
    return binding if isinstance(binding, Node) else None


def moved(binding: Binding, copies: dict[Node, Node]) -> Binding:
    """What a tensor is in a copy of the nodes."""
    if isinstance(binding, (_Part, _Row)):
        return replace(binding, whole=copies[binding.whole])
    assert isinstance(binding, Node)
    return copies[binding]


@dataclass(frozen=True, slots=True)
class Mark:
    """How much was recorded at some time."""

    nodes: int
    erased: int
    changes: int


class _Images(dict[Node, Node]):
    """What stands in a copy for each node: itself, or the node of another tensor, where it is not copied."""

    def __init__(self, recorder: Recorder, others: dict[int, FakeTensor]) -> None:
        self._recorder, self._others = recorder, others

    def __missing__(self, node: Node) -> Node:
        fake, made = node.meta.get("example_value"), node
        if type(fake) is FakeTensor and self._recorder.knows(fake):
            made = self._recorder.node(self._others.get(id(fake), fake))
        self[node] = made
        return made


HINT = "move it out of the compiled function"
NO_DATA = "its data is not allocated yet"


class Recorder:
    """Builds one graph from the torch calls made on fake tensors."""

    def __init__(self) -> None:
        self.graph: Graph = CapturedGraph()
        self.where: Callable[[], str] | None = None
        self.within: Callable[[], str] | None = None  # the path of the module at work, for those who listen
        self.fakes: dict[int, FakeTensor] = {}
        self.dispatch = FakeMode()
        self.subclassed = False  # whether there are tensors of subclasses
        self.around: Around | None = None  # where tensors made of others are
        LITERALS.reset()
        self._bindings: dict[int, Binding] = {}
        self._alive: list[Any] = []
        self._nodes: list[Node] = []
        self._changes: list[tuple[FakeTensor, Binding | None]] = []
        self._firsts: dict[int, Node] = {}  # of inputs and parts of results: the node that was made for one
        self._inputs: dict[Node, InputInfo] = {}
        self._attrs: dict[str, Any] = {}
        self._attr_names: dict[int, str] = {}
        self._results: dict[int, Node] = {}
        #: Random generators that the next call has others for, by id: from what the graph draws instead.
        self.lent: dict[int, tuple[torch.Generator, InputInfo]] = {}
        self._symbols: dict[Symbol, _Number] = {}
        self._numbers: dict[Expr, Node] = {}
        self._start: Node = self.graph._root
        self.spent: set[Any] = set()  # nodes of autograd's that a backward pass in the graph has emptied
        self.watched = False  # whether autograd calls hooks that may do more than compute
        self.exchanged: dict[int, int] = {}  # how often tensors had been written that were given other data
        self._kept = 0
        self.asking = False  # whether torch is at work on fakes
        self._regions: list[int] = []
        self._erased: list[int] = []  # how many nodes were left when one was taken back
        self.region_count = 0
        self._mode = RecorderMode(self)

    # Tensors and their nodes

    def input(
        self,
        real: torch.Tensor,
        source: Source | None,
        as_attr: bool = False,
        shape: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None,
    ) -> FakeTensor:
        """The fake of `real`, registered as a graph input, or as an attribute of the graph module.

        `shape` is its sizes and strides where some are symbolic.
        """
        fake = self.fakes.get(id(real))
        if fake is None:
            subclass = type(real) is not FakeTensor and type(real) not in PLAIN_TYPES
            with _no_hooks() if subclass else nullcontext():
                if subclass and shape is None:
                    shape = torch.Tensor.size(real), torch.Tensor.stride(real)  # a class may say otherwise
                fake = real if isinstance(real, FakeTensor) else fake_like(real, *(shape or ()))
            self.fakes[id(real)] = fake
            self._alive.append(real)
            fake.pinned = True
            if subclass:
                return self._of_class(fake, real, source, as_attr)
            self.bind(fake, _Input(source, real, as_attr))
        return fake

    def _of_class(
        self, fake: FakeTensor, real: torch.Tensor, source: Source | None, as_attr: bool
    ) -> FakeTensor:
        """An input of a tensor subclass: it itself where it is made of others, else a plain tensor."""
        self.subclassed = True
        if is_wrapper(type(real)):
            fake.wrapped = self.wrap(real, None)
            self.bind(fake, _Input(source, real, as_attr))
        else:
            path = None if source is None else Derived(source, plain, "plain")
            self.bind(fake, _Input(path, plain(real), False))
        return fake

    def wrap(self, real: Any, source: Source | None, **how: Any) -> Any:
        """An instance of a class made of tensors around fakes, from now on for the calls of this recorder."""
        self._around()
        return faked(real, source, **{"part": lambda value, *_: fake_like(value), **how})

    def _around(self) -> Around:
        if self.around is None:
            self.around, self.dispatch = Around(), AroundMode()
        return self.around

    def symbol(self, symbol: Symbol, what: str, owner: Any, dim: int = 0) -> None:
        """Say what a symbol is: the "size" or "stride" of a fake, or the "value" at a path."""
        self._symbols[symbol] = _Number(what, owner, dim)

    def lend(self, generator: torch.Generator, source: Source) -> None:
        """Have the graph draw from a generator of its own, which gets the state of the one at this path."""
        self.lent[id(generator)] = torch.Generator(generator.device), InputInfo(source, generator)

    def drew(self, generator: torch.Generator) -> bool:
        """Whether the graph has drawn from a generator that is lent."""
        return id(self.lent[id(generator)][0]) in self._attr_names

    def knows(self, fake: FakeTensor) -> bool:
        """Whether `fake` was registered here or made by a recorded call."""
        return id(fake) in self._bindings

    def outside(self, node: Node) -> Any:
        """The object from outside that a node stands for."""
        return self._attrs[str(node.target)] if node.op == "get_attr" else self._inputs[node].real

    def given(self) -> list[tuple[FakeTensor, torch.Tensor]]:
        """The tensors from outside, each with its fake."""
        return [(self.fakes[id(real)], real) for real in self._alive if id(real) in self.fakes]

    def made_by(self, fake: FakeTensor) -> Any:
        """The function whose call gave `fake`; None when it is a part of a result, or an input."""
        binding = self._bindings.get(id(fake))
        return binding.target if isinstance(binding, Node) else None

    def node(self, fake: FakeTensor) -> Node:
        """The node that gives `fake`, created when this is its first use."""
        binding = self._bindings.get(id(fake))
        if type(binding) is Node:
            return binding
        if binding is None:
            raise Bug(f"{fake} was not made by this recorder")
        if type(binding) is _Exchanged:
            if fake.requires_grad and torch.is_grad_enabled():
                why = "a tensor whose data was assigned takes part in a computation with gradients"
                raise Break("metadata-mutation", why, "assign it before, or use copy_ under torch.no_grad()")
            return binding.node
        node = self._firsts[id(fake)] = self._materialise(binding, fake)  # type: ignore[arg-type]
        self.bind(fake, node)
        return node

    def bind(self, fake: FakeTensor, binding: Binding) -> None:
        """Say what a tensor is in the graph."""
        key = id(fake)
        previous = self._bindings.get(key)
        if previous is None:
            self._alive.append(fake)
        self._changes.append((fake, previous))
        self._bindings[key] = binding

    def exchange(self, fake: FakeTensor, other: FakeTensor) -> bool:
        """`fake.data = other`: from here on a tensor has the memory and the layout of another.

        Gives whether the graph has read it before.
        """
        read = type(self._bindings[id(fake)]) is Node
        torch.Tensor.data.__set__(fake, other)  # type: ignore[attr-defined]
        fake.value = None
        self.exchanged.setdefault(id(fake), fake._version)
        self.bind(fake, _Exchanged(self.node(other)))
        return read

    def _materialise(self, binding: _Input | _Part | _Row, fake: FakeTensor) -> Node:
        if isinstance(binding, _Row):
            row = self.graph.create_node("call_function", operator.getitem, (binding.whole, binding.index))
            return self._added(row, fake)
        if isinstance(binding, _Part):
            node = binding.whole
            for i, key in enumerate(binding.path):
                node = self._part(node, key, fake if i == len(binding.path) - 1 else None)
            return node
        if binding.as_attr or binding.source is None:
            return self._attribute(binding.real, str(binding.source or "_tensor_constant"), fake)
        return self._placeholder(binding.source, binding.real, fake)

    def _placeholder(self, source: Source, real: Any, example: Any) -> Node:
        with self.graph.inserting_after(self._start):
            node = self.graph.placeholder(nodes.identifier(str(source)))
        node.target = node.name  # two sources may read alike; the names of the arguments must differ
        self._start = node
        self._inputs[node] = InputInfo(source, real)
        return self._added(node, example)

    def _number(self, value: Any) -> Any:
        """A symbolic number as an fx argument: one node an expression, or a plain number where known."""
        expr = expr_of(value)
        if not isinstance(expr, Expr):
            return bool(value) if isinstance(value, torch.SymBool) else expr
        expr = expr.scope.simplify(expr)
        if not isinstance(expr, Expr):
            return expr
        known = self._numbers.get(expr)
        if known is None:
            known = self._numbers[expr] = self._computed(expr)
            known.meta["example_value"] = wrap(expr)
        return known

    def _computed(self, value: Any) -> Any:
        if isinstance(value, Symbol):
            return self._symbol_node(value)
        return computed.build(value, self._computed, self._compute) if isinstance(value, Expr) else value

    def _compute(self, function: Any, *args: Any) -> Node:
        """The one node of this call on numbers."""
        for user in next(a for a in args if isinstance(a, Node)).users:
            if user.target is function and user.args == args:
                return user
        return self._added(self.graph.create_node("call_function", function, args))

    def _symbol_node(self, symbol: Symbol) -> Node:
        known = self._numbers.get(symbol)
        if known is None:
            number, example = self._symbols[symbol], wrap(symbol)
            if type(number.owner) is not FakeTensor and symbol.high > LIMIT:
                raise Unfit  # no graph computes with an int that no machine word holds
            if number.what == "value":
                known = self._placeholder(number.owner, symbol.hint, example)
            else:
                owner = self.node(number.owner)
                args = (owner,) if number.what == "item" else (owner, number.dim)
                made = self.graph.create_node("call_method", number.what, args)
                known = self._added(made, example)
            self._numbers[symbol] = known
        return known

    def _part(self, whole: Node, key: Any, value: Any) -> Node:
        for user in whole.users:
            if user.target is operator.getitem and user.args == (whole, key):
                return user
        return self._added(self.graph.create_node("call_function", operator.getitem, (whole, key)), value)

    def _attribute(self, value: Any, hint: str, example: Any = None) -> Node:
        name = self._attr_names.get(id(value))
        if name is None:
            name = base = nodes.identifier(hint)
            count = 0
            while name in self._attrs:
                count += 1
                name = f"{base}_{count}"
            self._attrs[name] = value
            self._attr_names[id(value)] = name
        return self._added(self.graph.create_node("get_attr", name), example)

    def _added(self, node: Node, example: Any = None) -> Node:
        if example is not None:
            node.meta["example_value"] = example
        if self.where is not None:
            node.meta["stack_trace"] = self.where()
        if self.within is not None:
            node.meta["module"] = self.within()
        if self._regions:
            node.meta["checkpoint"] = self._regions[-1]
        self._nodes.append(node)
        return node

    # Calls

    def call(
        self, func: Any, args: Args = (), kwargs: Kwargs | None = None, shown: Args | None = None
    ) -> Any:
        """What `func` gives on these arguments, recorded as one node when tensors come out or are written.

        Where it cannot tell for fakes, what it gives on those `shown` is like it.
        """
        kwargs = kwargs or {}
        owner = getattr(func, "__self__", None)
        if isinstance(owner, torch.Tensor):
            func, args = getattr(torch.Tensor, func.__name__), (owner, *args)
        self._refuse(func, args)
        args, kwargs = mapped(args, self._faked), mapped(kwargs, self._faked)
        shown = args if shown is None else mapped(shown, self._faked)
        writes = self.dispatch.writes
        LITERALS.read.clear()
        if self.around is None:
            result = self._on_fakes(run, func, shown, kwargs)
        else:
            result = self._on_fakes(self.around, run, func, shown, kwargs)
        if LITERALS.read:  # tensors whose numbers torch has taken: the graph does with these
            taken = {id(fake): fake.value.item() for fake in LITERALS.read if fake.value is not None}
            args, kwargs = mapped((args, kwargs), lambda v: taken.get(id(v), v))
        return self._record(func, args, kwargs, result, wrote=self.dispatch.writes != writes)

    def _on_fakes(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function that calls torch gives on fakes; nothing of it is recorded."""
        outer, self.asking = self.asking, True
        _push_dispatch(self.dispatch)
        try:
            return function(*args)
        finally:
            _pop_dispatch(None)
            self.asking = outer

    def rows(self, fake: FakeTensor) -> tuple[FakeTensor, ...]:
        """The items of a tensor without gradient: views, each of them one node once it is used."""
        rows: tuple[FakeTensor, ...] = self._on_fakes(torch.unbind, fake)
        whole = self.node(fake)
        for i, row in enumerate(rows):
            self.bind(row, _Row(whole, i))
        return rows

    def declare(self, func: Any, args: Args, kwargs: Kwargs, like: torch.Tensor) -> FakeTensor:
        """Record a call that cannot run on fakes; its result is a new tensor with the layout of `like`."""
        result: FakeTensor = self._record(func, args, kwargs, fake_like(like), wrote=False)
        return result

    def _refuse(self, func: Any, args: Args) -> None:
        name = METHODS.get(func) if func.__hash__ is not None else None
        kind = LEAVING.get(name or "")
        if kind is not None:
            raise Break(kind, f"Tensor.{name} is called", HINT)
        if name == "requires_grad_" and args[0].pinned and args[0].real_type not in PLAIN_TYPES:
            # The graph has a plain tensor over the same memory.
            why = f"a {args[0].real_type.__name__} from outside is told whether it requires grad"
            raise Break("metadata-mutation", why, "tell it outside the compiled function")
        if getattr(func, "__name__", "") == "__set__" and getattr(func.__self__, "__name__", "") == "data":
            why = "an assignment to Tensor.data"
            raise Break("metadata-mutation", why, "use copy_ under torch.no_grad()")

    def _faked(self, value: Any) -> Any:
        """What is given to torch for a value: for a real tensor its fake."""
        kind = type(value)
        if kind is FakeTensor or kind in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self.input(value, None, as_attr=True)
        if kind is OpenNumber or kind is OpenText:
            raise value.needed()
        return ARRAYS["argument"](value) if kind is FakeArray else value

    def _record(self, func: Any, args: Args, kwargs: Kwargs, result: Any, wrote: bool) -> Any:
        fakes: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        nodes.collect(result, (), fakes)
        if any(is_wrapper(type(f)) for _, f in fakes):
            result = mapped(result, self._around().leave)
            nodes.collect(result, (), fakes := [])
        if not fakes and nodes.holds_fakes(result):
            why = f"a torch call gives a {type(result).__name__} with tensors in it"
            raise Break("foreign-object", why, "let it give tensors, or containers of them")
        if any(type(f) is not FakeTensor for _, f in fakes):
            made: dict[int, FakeTensor] = {}
            result = nodes.replace_real(result, made)
            fakes = [(path, made.get(id(f), f)) for path, f in fakes]
        if not fakes and not wrote and not nodes.changes_state(func) and marks.ALLOW not in marks.of(func):
            return result
        target = self._node(func, args, kwargs)
        node = self._added(target, result if fakes else None)
        for path, fake in fakes:
            self.bind(fake, _Part(node, path) if path else node)  # type: ignore[arg-type]
        return result

    def _node(self, func: Any, args: Args, kwargs: Kwargs) -> Node:
        name = METHODS.get(func)
        accessor = ACCESSORS.get(getattr(func, "__name__", "")) if name is None else None
        if accessor is not None:
            func, args = accessor, (args[0], func.__self__.__name__, *args[1 : 1 + (accessor is setattr)])
        if name is None:
            return self._call(func, args, kwargs)
        known = OPERATORS.get(name)
        if known is not None and not kwargs:
            function, swapped = known
            return self._call(function, args[::-1] if swapped else args)
        return self._call(name, args, kwargs, "call_method")

    def _call(self, target: Any, args: Args, kwargs: Kwargs | None = None, op: str = "call_function") -> Node:
        fx_args = tuple([self._argument(a) for a in args])
        fx_kwargs = {k: self._argument(v) for k, v in (kwargs or {}).items()}
        return self.graph.create_node(op, target, fx_args, fx_kwargs)

    def _argument(self, value: Any) -> Any:
        """`value` as an fx argument: nodes for tensors, attributes of the graph module for other objects."""
        kind = type(value)
        if kind is FakeTensor:
            return self.node(value)
        if kind in PLAIN:
            return value
        if kind is tuple or kind is list:
            return kind([self._argument(v) for v in value])
        if kind is torch.Size:
            return tuple([self._argument(v) for v in value])
        if kind in SYMBOLIC:
            return self._number(value)
        if kind is torch.Generator and id(value) in self.lent:
            value = self.lent[id(value)][0]
        if kind is dict and all(type(k) is str for k in value):
            return {k: self._argument(v) for k, v in value.items()}
        if kind is slice:
            return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*[self._argument(v) for v in value])
        if kind.__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
            if kind.__name__ != "bool":  # a truth is another number for torch than Python's
                return value.item()
        known = self._results.get(id(value))
        if known is None and (made := nodes.made_of(value)) is not None:
            return self._added(self._call(*made))
        return known if known is not None else self._attribute(value, f"_{kind.__name__}")

    def effect(self, func: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Call `func`, which changes torch's state, for real, and record that the graph does so here."""
        flips = func is SWITCH and args != (torch.is_grad_enabled(),)
        if flips and self._switched():
            return func(*args)
        result = func(*args, **(kwargs or {}))
        node = self._added(self._call(func, args, kwargs))
        if flips:
            node.meta["flips"] = True
        if result is not None and type(result) not in PLAIN:
            self._results[id(result)] = node
            self._alive.append(result)
        return result

    def hold(self, key: Any, value: Any) -> None:
        """Say that an item of what the latest call gave is this object, when the graph runs."""
        self._results[id(value)] = self._part(self._nodes[-1], key, None)
        self._alive.append(value)

    def holds(self, value: Any) -> bool:
        """Whether a node of the graph gives this object."""
        return id(value) in self._results

    def called(self, func: Any) -> bool:
        """Whether a call of `func` has been recorded."""
        return any(node.target is func for node in self._nodes)

    def _switched(self) -> bool:
        """Whether a switch of grad mode need not be recorded: nothing saw the last one, which goes too."""
        last = self._nodes[-1] if len(self._nodes) > self._kept else None
        if last is None or "flips" not in last.meta or last.next is not self.graph._root:
            return False
        self._nodes.pop()
        self._erased.append(len(self._nodes))
        self.graph.erase_node(last)
        return True

    def note(self, func: Any, args: Args = (), kwargs: Kwargs | None = None) -> None:
        """Record that the graph calls `func` here, without calling it now."""
        self.dispatch.sure = False
        self._added(self._call(func, args, kwargs))

    def record(self, func: Any, args: Args, gives: Callable[..., Any]) -> Any:
        """Record a call that cannot run on fakes, of which `gives` makes what it gives."""
        args, self.dispatch.sure = mapped(args, self._faked), False
        return self._record(func, args, {}, self._on_fakes(gives, *args), wrote=False)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Mark the nodes recorded meanwhile as a region whose values the backward pass computes again."""
        self.region_count += 1
        self._regions.append(self.region_count)
        try:
            yield
        finally:
            self._regions.pop()

    def mode(self) -> RecorderMode:
        """A context in which every torch function that native code calls is recorded."""
        return self._mode

    # Nodes again

    def count(self) -> Mark:
        """How much is recorded now, for `since`."""
        return Mark(len(self._nodes), len(self._erased), len(self._changes))

    def since(self, mark: Mark) -> list[Node] | None:
        """The nodes recorded since `mark`; None when one from before was taken back."""
        least = min(self._erased[mark.erased :], default=mark.nodes)
        return None if least < mark.nodes else self._nodes[mark.nodes :]

    def binding(self, fake: FakeTensor) -> Binding | None:
        """What a tensor is in the graph."""
        return self._bindings.get(id(fake))

    def rebound(self, mark: Mark, chosen: Callable[[FakeTensor], bool]) -> list[Bound]:
        """Those of the tensors that other nodes stand for since `mark`: functions have given them back."""
        found = {id(fake): fake for fake, _ in self._changes[mark.changes :] if chosen(fake)}
        bound = [(fake, self._bindings[key]) for key, fake in found.items()]
        return [(f, b) for f, b in bound if isinstance(b, Node) and b is not self._firsts.get(id(f))]

    def copyable(self, nodes: list[Node], own: set[int], known: dict[int, Any]) -> list[Node] | None:
        """Those of the nodes that each call has its own of; None where one cannot be copied.

        `own` are the ids of tensors for which others stand in a copy, `known` those of tensors from outside.
        """
        numbers = set(self._numbers.values())
        effects = set(self._results.values())
        chosen = []
        for node in nodes:
            target, example = node.target, node.meta.get("example_value")
            if node in effects or getattr(target, "__closure__", None) or isinstance(target, partial):
                return None
            first = self._firsts.get(id(example)) is node
            if node.op == "get_attr":
                if first and id(example) in own:
                    chosen.append(node)
                elif not first or id(example) not in known:
                    return None
            elif node.op != "placeholder" and node not in numbers and not (first and id(example) in own):
                chosen.append(node)
        return chosen

    def copy(self, nodes: list[Node], others: dict[int, FakeTensor], where: tuple[str, str],
             paths: dict[str, str]) -> dict[Node, Node]:  # fmt: skip
        """Record the nodes once more, with other tensors in place of some; the copy of each.

        `others` are what stands for tensors, by their ids; `where` is how the stack began in the nodes and
        begins now, `paths` the names of modules that others stand for.
        """
        copies = _Images(self, others)
        image, block, create = copies.__getitem__, object(), self.graph.create_node
        before, now = where
        here, within = self.where, self.within
        trace = path = ""
        try:
            self.where = lambda: trace
            if within is not None:
                self.within = lambda: paths.get(path, path)
            for node in nodes:
                op, meta = node.op, node.meta
                trace, path = meta["stack_trace"], meta.get("module", "")
                if before != now and trace.startswith(before):
                    trace = now + trace[len(before) :]
                if op == "get_attr":
                    image(node)
                    continue
                kwargs = node.kwargs
                made = copies[node] = create(
                    op, node.target, map_arg(node.args, image), kwargs and map_arg(kwargs, image)
                )
                example = meta.get("example_value")
                self._added(made, others.get(id(example), example))
                made.meta["copied"] = block, node
                if "flips" in meta:
                    made.meta["flips"] = True
        finally:
            self.where, self.within = here, within
        return copies

    # Marks and the end

    def checkpoint(self) -> Mark:
        """The present state, for `rollback`."""
        self._kept = len(self._nodes)
        return self.count()

    def rollback(self, mark: Mark) -> None:
        """Forget all that was recorded since `mark`."""
        for fake, previous in reversed(self._changes[mark.changes :]):
            if previous is None:
                del self._bindings[id(fake)]
            else:
                self._bindings[id(fake)] = previous
        del self._changes[mark.changes :]
        for node in reversed(self._nodes[mark.nodes :]):
            self._forget(node)
        gone = set(self._nodes[mark.nodes :])
        self._results = {key: node for key, node in self._results.items() if node not in gone}
        self._numbers = {key: node for key, node in self._numbers.items() if node not in gone}
        del self._nodes[mark.nodes :]
        self.fakes = {k: f for k, f in self.fakes.items() if id(f) in self._bindings}

    def _forget(self, node: Node) -> None:
        if node is self._start:
            self._start = node.prev
        self._inputs.pop(node, None)
        self.graph.erase_node(node)

    def finish(self, outputs: Sequence[FakeTensor]) -> tuple[GraphModule, list[InputInfo]]:
        """The graph module that returns `outputs` as a tuple, and its inputs in order."""
        self.graph.output(tuple([self._result(fake, outputs) for fake in outputs]))
        for node in [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr") and not n.users]:
            self._forget(node)
        used = {n.target for n in self.graph.nodes if n.op == "get_attr"}
        attributes = {name: value for name, value in self._attrs.items() if name in used}
        inputs = [self._inputs[n] for n in self.graph.nodes if n.op == "placeholder"]
        return CapturedModule(attributes, self.graph), inputs

    def ending(self, fake: FakeTensor, outputs: Sequence[FakeTensor]) -> Callable[[Any], Any] | None:
        """What gives an output its history, where it leaves the graph without one."""
        given = self.node(fake).op in ("placeholder", "get_attr")
        return None if given else ending(self.spent, fake, outputs)

    def _result(self, fake: FakeTensor, outputs: Sequence[FakeTensor]) -> Node:
        """The node that gives an output."""
        node = self.node(fake)
        if self.ending(fake, outputs) is None:
            return node
        return self._added(self.graph.call_method("detach", (node,)), fake.detach())


class RecorderMode(TorchFunctionMode):
    """Routes torch functions called by native code to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if self.recorder.asking:
            return func(*args, **(kwargs or {}))
        return self.recorder.call(func, args, kwargs)

    def __enter__(self) -> RecorderMode:
        _push_function(self)
        LITERALS.printing += 1
        return self

    def __exit__(self, *error: object) -> None:
        LITERALS.printing -= 1
        _pop_function()


def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What `func` gives; a factor that is a tensor without known contents does not change the shape of it."""
    try:
        return form_of(func, args, kwargs)(*args, **kwargs)
    except Break as e:
        tensors = {k: v for k, v in kwargs.items() if k in FACTORS and type(v) is FakeTensor}
        factors = {k: 1.0 if v.is_floating_point() else 1 for k, v in tensors.items()}
        if e.kind != "data-dependent" or not factors:
            raise
        return func(*args, **{**kwargs, **factors})
    except RuntimeError as error:
        if NO_DATA in str(error):
            raise Break("data-dependent", f"{describe(func)} reads the memory of a tensor", HINT) from error
        raise


def describe(func: Any) -> str:
    """The name of `func` for a message."""
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
