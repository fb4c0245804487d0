"""Iterators of the program that live in the interpreter; native code may iterate over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from kiln.base.errors import Break
from kiln.capture import attributes
from kiln.capture.frame import Frame, Machine, Restart, UserError, Yielded, set_context
from kiln.capture.world import MISSING

MOST_TURNS = 64  # of a generator from outside, which may have no end


def stop_iteration(result: Any) -> StopIteration:
    """The end of a generator that returned `result`."""
    return StopIteration() if result is None else StopIteration(result)


def ended_early(error: StopIteration) -> RuntimeError:
    """What the end of an iteration becomes that leaves a generator by being raised."""
    made = RuntimeError("generator raised StopIteration")
    made.__cause__ = made.__context__ = error
    return made


class Iterating:
    """An iterator of the interpreter's own."""

    def __iter__(self) -> Self:
        return self


class Generator(Iterating):
    """A generator of the program, suspended in the interpreter; native code may iterate over it."""

    def __init__(self, machine: Machine, frame: Frame) -> None:
        self.machine, self.frame, self.done, self.started = machine, frame, False, False
        self.safe = machine.safe_step()
        frame.mode = "opaque"
        machine.generators[id(frame)] = self.safe
        machine.world.keep.append(frame)
        #: For one that stands for a generator from outside: the step that first moved it on, and the turns.
        self.moved, self.turns = -1, 0

    #: What guards the place of a generator from outside when it is first moved on.
    settle: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.started and not self.done and not self.machine.ended and self.settle is None:
            self.machine.dropped.append(self)

    def __next__(self) -> Any:
        value = self.advance()
        if value is MISSING:
            raise stop_iteration(self.result)
        return value

    result: Any = None

    def advance(self, sent: Any = None, error: BaseException | None = None) -> Any:
        """Run to the next yield; MISSING at the end, with the return value in `result`."""
        frame, machine = self.frame, self.machine
        if any(running is frame for running in machine.frames):
            raise UserError(ValueError("generator already executing"))
        if not self.started and sent is not None:
            raise UserError(TypeError("can't send non-None value to a just-started generator"))
        if self.done:
            if error is not None:
                raise UserError(error)
            return MISSING
        if self.settle is not None:
            self.move(self.settle)
        if not self.started:
            self.started = True
            if error is not None:
                self.done = True
                raise UserError(error)
        elif error is not None:
            frame.index -= 1
            frame.stack.append(sent)
            self.thrown(UserError(error))
        else:
            frame.stack.append(sent)
        try:
            self.result = machine.run(frame)
        except Yielded as y:
            return y.value
        except UserError as e:
            self.done = True
            if isinstance(e.error, StopIteration):
                e.error = ended_early(e.error)
            raise
        self.done = True
        return MISSING

    def thrown(self, raised: UserError) -> None:
        """Go to the handler of an exception that is raised where the generator waits, or end it."""
        frame, machine, error = self.frame, self.machine, raised.error
        raised.step = machine.raised.setdefault(id(error), machine.safe_step())
        machine.world.keep.append(error)
        if frame.handled and machine.source(error) is None:
            set_context(error, frame.handled[-1])
        machine.frames.append(frame)
        try:
            machine.note(frame, frame.code.instructions[frame.index], raised)
            machine.unwind(frame, raised)
        except UserError:
            self.done = True
            raise
        finally:
            machine.frames.pop()
            del raised  # whose traceback leads here

    def move(self, settle: Callable[[], None]) -> None:
        """A generator from outside goes on: what it does is the program's, if it comes to its end."""
        if self.moved < 0:
            self.moved = self.machine.generators[id(self.frame)] = self.machine.safe_step()
            settle()
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise self.left()

    def left(self) -> Restart:
        """Begin again, and leave a generator from outside to Python, where it does not come to its end."""
        why = "a generator made outside is advanced and not brought to its end"
        return Restart(self.moved, Break("foreign-iterator", why, "make it inside, or pass a list"))

    def send(self, value: Any) -> Any:
        return self.finish(self.advance(value))

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        error = kind
        if isinstance(kind, type) and issubclass(kind, BaseException):
            given = value if isinstance(value, tuple) else () if value is None else (value,)
            error = value if isinstance(value, kind) else self.machine.call(kind, given)
        elif not isinstance(kind, BaseException):
            text = "exceptions must be classes or instances deriving from BaseException"
            raise UserError(TypeError(f"{text}, not {type(kind).__name__}"))
        elif value is not None:
            raise UserError(TypeError("instance exception may not have a separate value"))
        return self.finish(self.advance(None, error))

    def finish(self, value: Any) -> Any:
        if value is MISSING:
            raise UserError(stop_iteration(self.result))
        return value

    def close(self) -> None:
        if not self.done and self.started:
            try:
                self.advance(None, GeneratorExit())
            except UserError as e:
                if not isinstance(e.error, (GeneratorExit, StopIteration)):
                    raise
            else:
                if not self.done:
                    raise UserError(RuntimeError("generator ignored GeneratorExit"))
        self.done = True


class Indexed(Iterating):
    """The old iteration protocol: `__getitem__` with 0, 1, 2, … until IndexError."""

    def __init__(self, machine: Machine, value: Any) -> None:
        self.machine, self.value, self.at = machine, value, 0

    def __next__(self) -> Any:
        method = attributes.type_lookup(self.machine, type(self.value), "__getitem__")
        try:
            item = self.machine.call(method, (self.value, self.at))
        except UserError as e:
            if isinstance(e.error, (IndexError, StopIteration)):
                raise StopIteration from None
            raise
        self.at += 1
        return item


class Mapped(Iterating):
    """`map` or `filter` over iterators of the program."""

    def __init__(self, machine: Machine, kind: Any, function: Any, iterators: list[Any]) -> None:
        self.machine, self.kind, self.function, self.iterators = machine, kind, function, iterators

    def __next__(self) -> Any:
        m = self.machine
        while True:
            values = []
            for iterator in self.iterators:
                value = m.next(iterator)
                if value is MISSING:
                    raise StopIteration
                values.append(value)
            if self.kind is map:
                return m.call(self.function, tuple(values))
            if m.truth(values[0] if self.function is None else m.call(self.function, (values[0],))):
                return values[0]


class Callback:
    """A function of the program that native code calls: the calls come back to the interpreter."""

    __slots__ = ("machine", "value")

    def __init__(self, machine: Machine, value: Any) -> None:
        self.machine, self.value = machine, value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.machine.call(self.value, args, kwargs)
