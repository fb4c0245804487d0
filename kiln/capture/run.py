"""capture: from a function and its arguments to guards, a graph and residual code."""

from __future__ import annotations

import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from kiln.base import log, options, state, strict
from kiln.base.errors import Break, KilnError, Skip
from kiln.base.source import Arg, Const, Global
from kiln.capture import arrays as arrays
from kiln.capture import draws, flags, function_modes, open_numbers
from kiln.capture.finish import Captured, Compiler, Finisher
from kiln.capture.frame import Frame, Looked, Recalled, Replaced, Restart, Unfit, Unsettled, UserError
from kiln.capture.machine import Machine
from kiln.capture.rebuild import Unbuildable
from kiln.capture.recorder import Recorder
from kiln.capture.told import listener
from kiln.capture.varying import STATIC, Dynamic, Varying
from kiln.capture.world import World
from kiln.check.guards import Equals
from kiln.check.torch_guards import GlobalState
from kiln.ops.fake import LITERALS

ATTEMPTS = 12
CHANCES = 2  # how often a branch goes another way than it did before the graph breaks there: some turn once
LOOKED = "looked at"  # where the paths are kept of texts that a function looks at
WHOLE_FRAME = frozenset({"tensor-subclass", "tensor-layout"})  # such values would break at every instruction
NUMBERS_NEEDED = frozenset({"data-dependent", "branch-on-tensor"})
#: The level at which tensors carry tangents; graphs have none.
TANGENTS = Global(Const(vars(forward_ad), "forward_ad"), "_current_level")
UNSUPPORTED = 0x20 | 0x80 | 0x200  # generators and coroutines are not captured from the outside


def slot_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of the argument slots, in the order of a bound call."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return code.co_varnames[:count]


def capture(function: types.FunctionType, argv: tuple[Any, ...], compiler: Compiler,
            resume: Callable[[types.FunctionType], Any],
            cache: dict[Any, Any], fullgraph: bool = False, unstable: frozenset[str] = frozenset(),
            in_python: Callable[[Any], Any] = lambda target: target,
            specialises: bool = True, writes_last: bool = False,
            dynamic: Dynamic = STATIC) -> Captured:  # fmt: skip
    """Interpret a call of the function; Break under fullgraph, Skip when the frame must be left alone."""
    if function.__code__.co_flags & UNSUPPORTED:
        raise Skip(f"{function.__qualname__} is a generator or a coroutine")
    draws.declare_numpy()
    stop, reason = -1, None
    literals, copying = Literals(), True
    attempt = partial(attempt_at, function, argv, compiler, resume, cache, fullgraph, in_python,
                      (specialises, writes_last), literals)  # fmt: skip
    for _ in range(ATTEMPTS):
        try:
            with deep() as room:
                return attempt(unstable, stop, reason, room, dynamic, copying)
        except Break as e:
            if not fullgraph or literals.numbers is not None or e.kind not in NUMBERS_NEEDED:
                raise e if e.at is not None else literals.numbers or e from None
            literals.numbers = e
        except Unsettled as again:
            literals.tried(again.reason)
        except Unfit:
            dynamic = STATIC
        except Recalled:
            copying = False
        except Replaced as again:
            unstable |= again.sources
        except Looked as again:
            cache[LOOKED, function.__code__] |= {again.source, *beside(again.source, unstable)}
        except Restart as again:
            if again.step < 0 or again.step == stop:
                raise Skip(str(again.reason), again.reason) from None
            stop, reason = again.step, again.reason
            continue
        except (KilnError, KeyboardInterrupt, MemoryError):
            raise
        except Exception:
            if literals.numbers is None or options.config.strict:
                raise
            raise literals.numbers from None
        stop, reason = -1, None  # what is known now leads another way through the program
    raise Skip(f"no place to split {function.__qualname__} was found")


class Literals:
    """Whether tensors that are made of symbolic numbers have contents: not, unless that avoids a break."""

    def __init__(self) -> None:
        self.open = True
        self.broke: tuple[str, Any] | None = None
        self.numbers: Break | None = None  # why the graph has to read numbers of tensors

    def tried(self, reason: Break) -> None:
        """Note a break: known contents are tried next; should they break there too, it is as it was."""
        self.open = not self.open
        self.broke = reason.kind, reason.at

    def settle(self, reason: Break) -> None:
        """Raise Unsettled where the other way is to be tried."""
        if reason.kind not in NUMBERS_NEEDED or self.numbers is not None:
            return
        left = self.open and LITERALS.left and self.broke is None
        if left or not self.open and self.broke == (reason.kind, reason.at):
            raise Unsettled(reason)


def attempt_at(function: types.FunctionType, argv: tuple[Any, ...], compiler: Compiler,
               resume: Callable[[types.FunctionType], Any], cache: dict[Any, Any], fullgraph: bool,
               in_python: Callable[[Any], Any], backend: tuple[bool, bool], literals: Literals,
               unstable: frozenset[str], stop: int, reason: Break | None, room: int, dynamic: Dynamic,
               copying: bool) -> Captured:  # fmt: skip
    """One way through the program, which breaks at the step `stop` for a reason found on an earlier one."""
    recorder = Recorder()
    LITERALS.reset(literals.open or literals.numbers is not None)
    varying = Varying(dynamic)
    world = World(recorder, unstable, varying)
    world.specialises, world.writes_last = backend
    world.looked_at = frozenset(cache.setdefault((LOOKED, function.__code__), set()))
    machine = Machine(recorder, world, stop, reason)
    varying.scope.place = machine.place
    varying.scope.assume = partial(open_numbers.assume_sizes, machine)
    machine.room, machine.copying, machine.numbers = room, copying, literals.numbers is not None
    machine.whole = fullgraph
    machine.unforeseen = None if fullgraph or strict.now() else often(cache.setdefault("failures", Counter()))
    LITERALS.look = partial(flags.settled, machine)
    recorder.where = machine.where
    recorder.within = listener(machine)
    names = slot_names(function.__code__)
    world.remember(function, Const(function))
    world.guard(GlobalState.now())
    world.guard(Equals(TANGENTS, -1))
    cells = dict(zip(function.__code__.co_freevars, world.closure(function), strict=True))
    frame = Frame(function, {}, cells)
    slots = enumerate(zip(names, argv, strict=True))
    frame.lazy = {name: (value, Arg(i, name)) for i, (name, value) in slots}
    before = state.snapshot()
    modes = torch._C._len_torch_function_stack()

    def restore() -> None:
        state.restore(before)
        while torch._C._len_torch_function_stack() > modes:
            torch._C._pop_torch_function_stack()

    try:
        try:
            with state.unhooked():
                value = machine.run(frame)
            frame.locals.clear()
            frame.before.clear()
            machine.close_dropped()
            ended: Break | None = None
            function_modes.left(machine)
        except Break as e:
            ended = e
            function_modes.move_out(machine, fullgraph)
            literals.settle(e)
            if e.kind in WHOLE_FRAME and not fullgraph:
                frames = machine.broken or []
                if len(frames) <= 1:
                    raise Skip(str(e), e) from None
                raise Restart(frames[0].step, e) from None
            if not fullgraph and machine.advanced is not None and not machine.advanced[0].over():
                why = "the loop breaks again in its next turn"
                again = Break("foreign-iterator", why, "move the break out of the loop")
                raise Restart(machine.advanced[1], again) from None
            if (fullgraph or strict.now()) and e.kind != "raises":
                raise
        except UserError as e:
            if varying.reads:
                raise Unfit from None
            raise Restart(e.step, Break("raises", f"{told(e.error)} is raised here", "")) from None
        except (KilnError, Restart, Looked, Recalled, Unfit, Unsettled):
            raise
        except Exception as e:
            if not varying.reads or options.config.strict:
                raise
            text = f"{function.__qualname__} is compiled for fixed sizes: internal error with symbolic ones"
            log.warn_once(("symbolic", function.__code__), f"{text} ({type(e).__name__}: {e})")
            raise Unfit from None
        varying.refuse_specialised()
        world.refuse_replaced()
        machine.leave_contexts(recorded=True)
        finisher = Finisher(machine, frame, names, before, compiler, resume, cache, in_python)
        restore()
        frames = machine.broken or []
        try:
            captured = finisher.returned(value) if ended is None else finisher.broken(frames, ended)
        except Unbuildable as e:
            text = e.text if ended is None else f"{e.text} after the break at {ended.at}: {ended.why}"
            again = Break("rebuild", text, "keep such objects out of what lives across the break")
            raise Restart(e.step, again) from None
        world.finish_guards()
        captured.guards = world.guards
    finally:
        machine.leave_contexts()
        restore()
        release(machine, frame)
    if ended is not None:
        ended.__traceback__ = ended.__context__ = None
    return captured


def often(failures: Counter[str]) -> frozenset[str]:
    """The checks that have failed so often that they are not made again."""
    return frozenset(said for said, count in failures.items() if count >= CHANCES)


def beside(source: str, unstable: frozenset[str]) -> set[str]:
    """The other elements of a list, where a path leads to one: who looks at one text looks at them all."""
    start, _, place = source.rpartition("[")
    others = ((other, other.rpartition("[")) for other in unstable if place[:-1].isdigit())
    return {other for other, (base, _, at) in others if base == start and at[:-1].isdigit()}


def told(error: BaseException) -> str:
    """An exception in words, where they are not code of the program's."""
    kind = type(error)
    if isinstance(kind.__str__, types.FunctionType):
        return kind.__name__
    try:
        return f"{kind.__name__} ({error})"
    except Exception:
        return kind.__name__


def release(machine: Machine, root: Frame) -> None:
    """Let go of the program's objects, which a capture's parts would hold in cycles until a collection."""
    machine.ended = True
    machine.world.machine = LITERALS.look = None
    LITERALS.read.clear()
    # Tensors with symbolic sizes hold the scope where no collector sees it.
    machine.world.varying.scope.place = machine.world.varying.scope.assume = None
    for frame in (root, *(machine.broken or ())):
        for held in (frame.locals, frame.lazy, frame.stack, frame.before, frame.cells, frame.handled):
            held.clear()
    for part in (machine.world, machine.recorder, machine):
        for held in vars(part).values():
            if isinstance(held, (dict, list, set)):
                held.clear()


FRAMES_PER_CALL = 12  # at most so many frames of the interpreter for one of the program
_lock = threading.Lock()
_entered: list[int] = []  # the limits found on entry, the user's own first


@contextmanager
def deep() -> Iterator[int]:
    """Raise the recursion limit meanwhile; gives the number of frames that the program may still use."""
    with _lock:
        _entered.append(sys.getrecursionlimit())
        allowed = _entered[0]
        sys.setrecursionlimit(max(allowed * FRAMES_PER_CALL, sys.getrecursionlimit()))
    try:
        yield max(allowed - used(), 50)
    finally:
        with _lock:
            first = _entered[0]
            _entered.pop()
            if not _entered:
                sys.setrecursionlimit(first)


def used() -> int:
    """How many frames are on the stack."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth
