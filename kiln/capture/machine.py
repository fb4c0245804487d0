"""The interpreter: runs the bytecode of a frame on real objects and fake tensors, and inlines its calls."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _exit_inference_mode
from torch.utils._device import _device_constructors

from kiln.base import tracebacks
from kiln.base.errors import Break, Bug, Skip
from kiln.base.source import Source
from kiln.bytecode.decode import Instruction
from kiln.capture import (  # noqa: F401  (some are here for the handlers that they declare)
    attributes,
    backward,
    builtin_calls,
    calls,
    copies,
    expected,
    function_modes,
    functions,
    library_calls,
    masks,
    number_calls,
    open_numbers,
    operators,
    optimizer_calls,
    purity,
    scans,
    sequences,
    subclasses,
    symbolic,
    torch_calls,
    transforms,
)
from kiln.capture.frame import (
    LAST_INSTRUCTION,
    RETURN,
    YIELD,
    Frame,
    Looked,
    Recalled,
    Restart,
    Unfit,
    UserError,
    Yielded,
    set_context,
)
from kiln.capture.iterators import Generator, Indexed
from kiln.capture.nodes import Args, Kwargs
from kiln.capture.opcodes.all import TABLE
from kiln.capture.recipes import Call
from kiln.capture.recorder import Recorder, describe
from kiln.capture.variables import PASSIVE, read_all
from kiln.capture.world import MISSING, World
from kiln.check.guards import Distinct, FunctionState
from kiln.ops.fake import FakeTensor, needed

CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


class Machine:
    """One capture: a stack of frames, the recorder of torch calls and the knowledge of the outside world."""

    def __init__(
        self, recorder: Recorder, world: World, stop_at: int = -1, stop_reason: Break | None = None
    ) -> None:
        self.recorder, self.world = recorder, world
        world.machine = self
        self.frames: list[Frame] = []
        self.step = 0
        self.stop_at, self.stop_reason = stop_at, stop_reason
        self.room = 1000  # how deep calls may nest, as Python's own limit has it
        self.broken: list[Frame] | None = None  # the frames as they stood when a Break was raised
        self.generators: dict[int, int] = {}  # id of a generator's frame -> the step that made it
        self.ended = False
        self.dropped: list[Generator] = []  # suspended generators that the program has let go
        self.whole = False  # whether the graph stands for the program, and nothing may break
        self.numbers = False  # whether numbers of tensors are symbols of the graph
        self.places: dict[Any, Any] = {}  # masks by id and version, and where they are true
        self.merged: dict[int, Any] = {}  # what tensors become by writes under masks, by id
        self.batches: dict[int, Any] = {}  # sizes of packed sequences by id, and how many they are
        #: How many blocks without the hooks of tensor subclasses the program has entered.
        self.aside = int(not torch._C._is_torch_function_enabled())
        self.muted = 0  # blocks around the program's warnings that it has entered
        self.devices: list[torch.device] = []  # default devices that the program has entered
        self.modes: list[tuple[Any, int]] = []  # torch function modes that it has entered, and the steps
        self.entered: list[Any] = []  # native contexts that the program has entered and not left
        #: The first iterator from outside that was moved on, and the step.
        self.advanced: tuple[Any, int] | None = None
        self.moved = -1  # the last step that took something from an iterator
        self.raised: dict[int, int] = {}  # id of an exception -> the step that raised it first
        #: Steps at which the graph checks that something is as it was, the breaks without that, and what the
        #: checks of branches say, before which nothing is written.
        self.expected: list[tuple[int, Break, str]] = []
        self.late: set[str] = set()  # what those checks say that come after writes
        self.selecting = (-1, expected.refusal())  # the step, and the break, of a call that selects
        #: What checks of branches say that are taken to go as they do now; what those said that have failed,
        #: None where no branch is taken so.
        self.foreseen: set[str] = set()
        self.unforeseen: frozenset[str] | None = None
        self.chosen: list[expected.Chosen] = []  # tensors that stand for one of two values
        #: Tensors that get other data than the graph has read before, and the steps at which they do.
        self.exchanged: list[tuple[int, FakeTensor]] = []
        self.calls: dict[Any, list[Call] | None] = {}  # those of modules, by what must be equal in two
        self.copying, self.copies = True, 0  # whether others are copied from them, and how many were
        self.memos: list[Any] = []  # what the deep copies of the program have made so far
        self.steps: dict[int, int] = {}  # id of an object that cannot be rebuilt -> the step that made it
        self.lines: dict[tuple[Any, int], str] = {}  # code and place in it -> the line, as tracebacks show it

    # ------------------------------------------------------------------ running

    def run(self, frame: Frame) -> Any:
        """Interpret a frame until it returns; UserError when the program raises out of it."""
        if len(self.frames) >= self.room:
            raise UserError(RecursionError("maximum recursion depth exceeded"))
        self.frames.append(frame)
        try:
            return self.loop(frame)
        except Break:
            if self.broken is None:
                self.broken = list(self.frames)
            raise
        finally:
            self.frames.pop()

    def loop(self, frame: Frame) -> Any:
        instructions, stack = frame.code.instructions, frame.stack
        table, stop_at = TABLE, self.stop_at
        while True:
            instruction = instructions[frame.index]
            self.step = step = self.step + 1
            frame.step = step
            frame.before = stack.copy()
            if self.dropped:
                self.close_dropped()
            if step == stop_at:
                assert self.stop_reason is not None
                raise self.located(self.stop_reason, frame)
            if frame.unread and instruction.name not in PASSIVE:
                read_all(self, frame, instruction)
                frame.before = stack.copy()
            try:
                jump = table[instruction.op](self, frame, instruction)
            except UserError as e:
                self.note(frame, instruction, e)
                self.unwind(frame, e)
                continue
            except Break as e:
                reason = self.located(e, frame)
                if self.moved == step and self.broken is None:
                    # The instruction is to see all that the iterator gives: capture breaks before it.
                    raise Restart(self.safe_step(), reason) from None
                raise reason from None
            if jump is None:
                frame.index += 1
            elif jump is RETURN:
                return stack.pop()
            elif jump is YIELD:
                frame.index += 1
                raise Yielded(stack.pop())
            else:
                frame.index = jump

    def note(self, frame: Frame, instruction: Instruction, raised: UserError) -> None:
        """Let an exception know where it comes from; one that is raised again knows it already."""
        error = raised.error
        if raised.step < 0:
            raised.step = self.raised.setdefault(id(error), self.safe_step())
            self.world.keep.append(error)
            if instruction.name == "RERAISE" or instruction.name == "RAISE_VARARGS" and not instruction.arg:
                return
            if self.source(error) is None:
                set_context(error, self.handled())
        if self.source(error) is None:
            code = frame.code.code
            line = instruction.line or code.co_firstlineno
            tracebacks.add_place(error, code, frame.globals, instruction.offset, line)

    def handled(self) -> BaseException | None:
        """The exception that the program handles, in this frame or in one that called it."""
        return next((frame.handled[-1] for frame in reversed(self.frames) if frame.handled), None)

    def look_at(self, history: bool) -> None:
        """The program looks at a fact of a tensor, or at its history, which copied calls have another of."""
        self.world.looked = True
        if history:
            self.world.writes += 1  # so the present call is not copied
            if self.copies:
                raise Recalled

    def located(self, reason: Break, frame: Frame) -> Break:
        if reason.at is None:
            reason.at = frame.place()
        return reason

    def close_dropped(self) -> None:
        """What Python does when a suspended generator dies: close it, and forget what it raises."""
        while self.dropped:
            try:
                self.dropped.pop().close()
            except UserError:
                continue

    def leave_contexts(self, recorded: bool = False) -> None:
        """Leave what the program had entered when capture ended; the graph leaves it too when it is kept."""
        while self.entered:
            context = self.entered.pop()
            if recorded:
                self.recorder.effect(_exit_inference_mode, (context,))
            else:
                _exit_inference_mode(context)

    def where(self) -> str:
        """The stack of the program, for the nodes of the graph."""
        lines = []
        for frame in self.frames:
            known = self.lines.get((frame.code, frame.index))
            if known is None:
                code = frame.code.code
                line = frame.code.instructions[frame.index].line or code.co_firstlineno
                known = f'  File "{code.co_filename}", line {line}, in {code.co_name}'
                self.lines[frame.code, frame.index] = known
            lines.append(known)
        return "\n".join(lines)

    def place(self) -> Any:
        """Where the program stands; None when it has ended."""
        return self.frames[-1].place() if self.frames else None

    def unwind(self, frame: Frame, raised: UserError) -> None:
        """Go to the handler that covers the current instruction, or leave the frame."""
        handler = frame.code.handler(frame.index)
        if handler is None:
            try:
                raise raised
            finally:
                del raised  # whose traceback leads here
        error = raised.error
        del frame.stack[handler.depth :]
        if handler.lasti:
            frame.stack.append(LAST_INSTRUCTION)
        frame.stack.append(error)
        frame.index = handler.target

    def safe_step(self, frames: list[Frame] | None = None) -> int:
        """The step of the innermost instruction at which the program, or that of `frames`, can be split."""
        frames = self.frames if frames is None else frames
        for i, frame in enumerate(frames):
            if i and frame.mode == "opaque":
                owner = self.generators.get(id(frame))
                return frames[i - 1].step if owner is None else owner
        return frames[-1].step if frames else -1

    # ------------------------------------------------------------------ calls

    def call(self, function: Any, args: Args = (), kwargs: Kwargs | None = None, mode: str = "opaque") -> Any:
        """Call anything as the program would; `mode` says how the calling instruction uses the result."""
        return calls.call(self, function, args, kwargs or {}, mode)

    def inline(self, function: types.FunctionType, args: Args, kwargs: Kwargs, mode: str = "opaque",
               payload: Any = None) -> Any:  # fmt: skip
        """Interpret a call of a Python function."""
        special = calls.BY_CODE.get(id(function.__code__))
        if special is not None:
            return special(self, function, args, kwargs)
        frame = self.enter(function, args, kwargs)
        frame.mode, frame.payload = mode, payload
        flags = function.__code__.co_flags
        if flags & CO_GENERATOR:
            for instruction in frame.code.instructions:  # a call goes so far: what it made cells of stays so
                frame.index = instruction.index
                if instruction.name == "RETURN_GENERATOR":
                    break
                TABLE[instruction.op](self, frame, instruction)
            return Generator(self, frame)
        if flags & (CO_COROUTINE | CO_ASYNC_GENERATOR):
            why = f"{function.__qualname__} is a coroutine"
            raise Break("coroutine", why, "await outside the compiled function")
        return self.run(frame)

    def enter(self, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Frame:
        """A frame with the arguments bound; UserError(TypeError) when they do not fit."""
        values = calls.bind(self, function, args, kwargs)
        code = function.__code__
        source = self.world.source(function)
        if source is not None:
            self.world.guard(FunctionState.of(source, function))
        return Frame(function, values, dict(zip(code.co_freevars, self.world.closure(function), strict=True)))

    def native(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run native code of the program; its exceptions are the program's."""
        try:
            return function(*args, **kwargs)
        except (UserError, Break, Bug, Skip, Restart, Looked, Recalled, Unfit, Yielded, RecursionError):
            raise
        except Exception as e:
            if isinstance(e.__context__, UserError):
                e.__context__ = None
            raise UserError(e.with_traceback(None)) from None  # without the interpreter's own frames

    def operate(self, function: Callable[..., Any], /, *args: Any, about: Args | None = None) -> Any:
        """Run native code that may run methods of its arguments, or of what it is `about` among them."""
        about = args if about is None else about
        return self.native(calls.called_back(self, function, *about), *args)

    def consume(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run native code that moves iterators; where it breaks, capture starts anew and breaks before it."""
        try:
            return self.native(function, *args, **kwargs)
        except Break as reason:
            if self.broken is not None or reason.at is not None:
                raise
            raise Restart(self.safe_step(), reason) from None

    def torch_call(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """A call that becomes one node of the graph."""
        found = self.intercepted(function, args, kwargs)
        if found is not MISSING:
            return found
        if self.devices and function in _device_constructors() and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.devices[-1]}
        if self.numbers and function in masks.ITEMS and type(args[0]) is FakeTensor:
            args = masks.with_places(self, *args)
        try:
            result = self.native(self.recorder.call, function, args, kwargs)
            # Anything but a new tensor tells a fact of the arguments: a number, a count, no work due.
            if type(result) is not FakeTensor or any(result is value for value in args):
                self.world.looked = True
            return result
        except Break as e:
            self.world.looked = True
            if e.kind == "data-dependent":
                found = masks.placed(self, function, args, kwargs)
                if found is not MISSING:
                    return found
                if e.at is None:
                    e.why = f"{describe(function)}: {e.why}"
                found = masks.selected(self, function, args, kwargs, e)
                if found is not MISSING:
                    return found
                found = open_numbers.given(self, function, args, kwargs, e)
                if found is not MISSING:
                    return found
            raise
        except UserError as e:
            self.world.looked = True
            if self.world.varying.reads:
                raise Unfit from None  # its message may tell of sizes, which the program may read
            if e.error.args and isinstance(e.error.args[0], str) and "FakeTensor" in e.error.args[0]:
                e.error.args = (e.error.args[0].replace("FakeTensor", "Tensor"), *e.error.args[1:])
            raise

    def intercepted(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """What others than the recorder make of a call: modes and classes of the program's, known masks."""
        found = MISSING
        if self.modes and getattr(function, "__module__", None) == "_operator":
            found = function_modes.intercept(self, function, args, kwargs, asked=True)
        if found is MISSING and self.recorder.subclassed:
            found = subclasses.intercept(self, function, args, kwargs)
        if found is MISSING and self.places:
            found = masks.written(self, function, args)
        if found is MISSING and self.batches:
            found = sequences.first(self, function, args)
        return found

    # ------------------------------------------------------------------ protocol helpers

    def getattr(self, value: Any, name: str, mode: str = "opaque") -> Any:
        return attributes.load(self, value, name, mode)

    def setattr(self, value: Any, name: str, item: Any, mode: str = "opaque") -> None:
        attributes.store(self, value, name, item, mode)

    def truth(self, value: Any) -> bool:
        """`bool(value)` as the program would see it."""
        kind = type(value)
        if kind is bool:
            return bool(value)
        if kind is FakeTensor:
            if self.modes:
                raise function_modes.unseen("the truth")
            known = needed(value)
            if known is not None:
                return bool(self.native(bool, known))
            raise expected.refusal()
        if kind in symbolic.SYMBOLIC:
            return symbolic.truth(value)
        known = self.world.occupied(value)
        if known is not None:
            return known
        self.world.touch(value)
        name = "__len__" if attributes.mro_lookup(kind, "__bool__") is MISSING else "__bool__"
        attributes.type_lookup(self, kind, "__bool__")
        method = attributes.type_lookup(self, kind, name)
        if isinstance(method, types.FunctionType):
            return bool(self.native(operators.TRUTH[name], self.inline(method, (value,), {})))
        return bool(self.operate(bool, value))

    def iterate(self, value: Any) -> Any:
        """`iter(value)` as the program would see it."""
        world = self.world
        kind = type(value)
        if kind is FakeTensor:
            if self.modes:
                raise function_modes.unseen("the rows")
            if not value.dim():
                return self.native(iter, value)
            self.world.looked = True
            if value.requires_grad:
                return iter(self.torch_call(torch.Tensor.unbind, (value, 0), {}))
            return iter(self.recorder.rows(value))
        if kind.__module__ in purity.OWN_MODULES:
            return value
        method = attributes.type_lookup(self, kind, "__iter__")
        if isinstance(method, types.FunctionType):
            made = self.call(method, (value,))
            if not hasattr(type(made), "__next__"):
                raise UserError(TypeError(f"iter() returned non-iterator of type '{type(made).__name__}'"))
            return made
        if attributes.mro_lookup(kind, "__iter__") is MISSING:
            indexed = attributes.type_lookup(self, kind, "__getitem__")
            if isinstance(indexed, types.FunctionType):
                return Indexed(self, value)
            if indexed is None:
                return self.native(iter, value)
        if id(value) in world.streams:
            return value
        if world.unguarded(value) and not isinstance(value, SAFE_ITERABLES):
            why = f"{world.source(value)} is a {kind.__name__} made outside"
            raise Break("foreign-iterator", why, calls.OVER_LIST)
        return self.native(iter, world.touch(value))

    def next(self, iterator: Any) -> Any:
        """The next item, or MISSING at the end."""
        kind = type(iterator)
        if kind.__module__ in purity.OWN_MODULES:
            value = next(iterator, MISSING)
            self.moved = self.frames[-1].step
            return self.view(value)
        method = attributes.type_lookup(self, kind, "__next__")
        try:
            if isinstance(method, types.FunctionType):
                value = self.inline(method, (iterator,), {})
                self.moved = self.frames[-1].step
                return value
            stream = self.world.streams.get(id(iterator))
            if stream is not None and self.advanced is None:
                self.advanced = (stream, self.safe_step())
            if self.world.source(iterator) is not None and stream is None:
                why = f"a {kind.__name__} made outside is advanced"
                raise Break("foreign-iterator", why, calls.OVER_LIST)
            with self.recorder.mode():
                value = self.consume(next, (iterator,), {})
        except UserError as e:
            if isinstance(e.error, StopIteration):
                if id(iterator) in self.world.streams:
                    self.world.streams[id(iterator)].ended = True
                return MISSING
            raise
        self.moved = self.frames[-1].step
        return self.view(value)

    def same(self, a: Any, b: Any) -> bool:
        """`a is b`, guarded when both come from outside and only their types are known to stay."""
        if type(a) is FakeTensor and type(b) is FakeTensor:
            self.world.looked = True
            if self.chosen and a is not b:
                expected.indistinct(self, a, b)
        if a is not b and not open_numbers.UNKNOWN.isdisjoint((type(a), type(b))):
            return open_numbers.one_object(self, a, b)
        if a is not b and type(a) is type(b):
            left, right = self.world.source(a), self.world.source(b)
            if left is not None and right is not None and left != right and type(a) is not FakeTensor:
                self.world.guard(Distinct((left, right)))
        return a is b

    def view(self, value: Any) -> Any:
        """The program's view of a value that native code handed out: real tensors become their fakes."""
        if isinstance(value, torch.Tensor) and type(value) is not FakeTensor:
            return self.recorder.input(value, None, as_attr=True)
        return value

    def source(self, value: Any) -> Source | None:
        return self.world.source(value)


SAFE_ITERABLES: tuple[type, ...] = (
    str, bytes, range, tuple, frozenset, type, types.MappingProxyType, *purity.DICT_VIEWS,
)  # fmt: skip
