"""How frames go on after a break: the breaking instruction in Python, then all that is left as one region.

Every frame from the captured one down to the breaking one has a function that runs its part in Python: the
innermost runs the instruction, the others call the next one in the place of their call. The state that they
leave is handed to one region: the outermost frame goes on at its call, with what is left of the next frame
called in its place, and so on. A frame that may come back to its call, in a loop or a recursion, goes on as a
region of its own, which then serves all turns. Where a frame has come to its end, so or in Python as it
handled what the instruction raised, its caller goes on with the result.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.bytecode import versions
from kiln.bytecode.flow import landing, reachable
from kiln.bytecode.resume import (
    LASTI,
    NULL,
    OBJECT,
    VALUE,
    Epilogue,
    Replace,
    Slot,
    continue_code,
    resume_places,
)
from kiln.capture import runtime
from kiln.capture.frame import Frame
from kiln.capture.rebuild import Rebuilder, bound, objects, push_frame, slots
from kiln.capture.shape import after, operands
from kiln.capture.variables import INSIDE

Ways = list[tuple[int, tuple[Slot, ...]] | None]  # where an instruction leads: the place, the stack there
NESTED = 2  # calls at one place, one within the other, that go on together: in a recursion all share a region


@dataclass(slots=True)
class Onward:
    """How a frame, and those it called, go on."""

    function: types.FunctionType  # what runs in Python
    push: Callable[[Rebuilder], int]  # pushes its arguments, gives their number
    rests: dict[int, types.FunctionType]  # by way out: what is left for the caller to go on with
    gives: bool  # whether the function may give what the frame returns
    again: bool  # whether what goes on comes back to the break


class Resumption:
    """The functions that go on after one break."""

    def __init__(
        self, cache: dict[Any, Any], resume: Callable[[types.FunctionType], Any], stopped: bool
    ) -> None:
        self.cache, self.resume, self.stopped = cache, resume, stopped
        self.codes: list[types.CodeType] = []  # what runs in Python, outermost frame first
        self.given: frozenset[int] = frozenset()  # ids of objects that the breaking instruction is given

    def onward(self, frames: list[Frame], k: int = 0) -> Onward:
        """How frame k goes on: as a region, with those it called, or within that of its caller."""
        frame = frames[k]
        self.given = objects(frames[-1].before)
        places = [self.origin(each.code.code, each.index) for each in frames[: k + 1]]
        last = k == len(frames) - 1
        ways: Ways = ways_out(frame) if last else [(landing(frame.code.code, frame.index + 1), ())]
        again = any(way is not None and comes_back(frame, way[0]) for way in ways)
        head = not k or again or places.count(places[k]) > NESTED
        return self.breaking(frame, ways, head) if last else self.calling(frames, k, again, head)

    def breaking(self, frame: Frame, ways: Ways, head: bool) -> Onward:
        rests: dict[int, types.FunctionType] = {}
        epilogues: list[Epilogue | None] = []
        loops = False
        for way, out in enumerate(ways):
            if out is None:
                epilogues.append(None)
                continue
            index, shape = out
            names, again = bound(frame, index, self.given), comes_back(frame, index)
            function = self.function(frame, index, shape, names)
            rests[way], loops = function, loops or again
            leave, given = (_hook.later, self.region(function)) if head else (runtime.Rest, way)
            epilogues.append(Epilogue(leave, shape, names, (given,)))
        names = bound(frame, frame.index, self.given)
        target = self.in_python(frame, frame.before, names, epilogues)
        gives = head or None in epilogues or frame.code.handler(frame.index) is not None
        left = {} if head else rests
        return Onward(target, lambda r: push_frame(r, frame, frame.before, names), left, gives, loops)

    def calling(self, frames: list[Frame], k: int, again: bool, head: bool) -> Onward:
        frame, inner, callee = frames[k], self.onward(frames, k + 1), frames[k + 1]
        depth = len(frame.before) - operands(frame.code.instructions[frame.index])
        kept, called = frame.before[:depth], frame.before[depth:]
        shape, names, mode = slots(kept), bound(frame, frame.index, self.given), callee.mode
        # Of a call that broke before, what is left again stands in the place of the program's own call.
        first = next((value.mode for value in called if type(value) is runtime.Within), mode)
        own = tuple([name for name in names if name != OBJECT])
        names = (*own, OBJECT) if OBJECT in names else names
        rests = {
            way: self.function(frame, frame.index, shape, own, rest, first)
            for way, rest in inner.rests.items()
        }
        done, ways = None, None
        if inner.gives:
            index, result = landing(frame.code.code, frame.index + 1), () if mode == "drop" else (VALUE,)
            done = self.region(self.function(frame, index, (*shape, *result), names))
        if head:
            ways = {way: self.region(rest) for way, rest in rests.items()}
        depth = sum(slot not in (NULL, LASTI) for slot in shape)
        extra = (OBJECT,) if mode == "object" else ()
        given = depth, mode, done, ways
        epilogue = Epilogue(runtime.behind_call, (*shape, VALUE), (*names, *extra), given)
        call, parameters = inner.function, named(inner.function.__code__)
        replace = Replace(_hook.later, parameters, "push", (call,), _hook.driven)
        target = self.in_python(frame, kept, (*names, *extra), [epilogue], replace)

        def push(r: Rebuilder) -> int:
            count = push_frame(r, frame, kept, names)
            if extra:
                r.push(callee.payload)
            return count + len(extra) + inner.push(r)

        gives = head or inner.gives or frame.code.handler(frame.index) is not None
        return Onward(target, push, {} if head else rests, gives, again)

    def in_python(
        self, frame: Frame, kept: list[Any], names: tuple[str, ...], epilogues: Sequence[Epilogue | None],
        replace: Replace | None = None,
    ) -> types.FunctionType:  # fmt: skip
        """What runs the frame's instruction, or the call in its place, and leaves."""
        state = slots(kept), names
        built = continue_code(frame.code.code, frame.index, *state, epilogues, replace, _hook.let_go)
        _hook.skip(built)
        _hook.hide(built, _hook.GENERATED)
        self.codes.insert(0, built)
        return types.FunctionType(built, frame.globals)

    def function(self, frame: Frame, index: int, shape: tuple[Slot, ...], names: tuple[str, ...],
                 rest: types.FunctionType | None = None, mode: str = "") -> types.FunctionType:  # fmt: skip
        """What goes on at `index`, or with the rest of the call there; one for each place and shape."""
        code, place = self.origin(frame.code.code, index)
        key = code, place, shape, names, id(frame.globals), id(rest), mode
        known: types.FunctionType | None = self.cache.get(key)
        if known is None:
            replace = rest and Replace(runtime.Within(rest, mode), named(rest.__code__), mode)
            built, places = resume_places(code, place, shape, names, replace)
            self.cache["origin", id(built)] = (built, code, places)
            known = self.cache[key] = types.FunctionType(built, frame.globals)
            known.__qualname__, known.__module__ = frame.function.__qualname__, frame.function.__module__
        return known

    def region(self, function: types.FunctionType) -> Any:
        """The region of a function that goes on."""
        region = function if self.stopped else self.cache.get(("region", id(function)))
        if region is None:
            _hook.skip(function.__code__)
            region = self.cache["region", id(function)] = self.resume(function)
        return region

    def origin(self, code: types.CodeType, index: int) -> tuple[types.CodeType, int]:
        """The user's function and the instruction behind a place in a resume function, so that paths join."""
        _, original, places = self.cache.get(("origin", id(code)), (code, code, {}))
        return (original, places[index]) if index in places else (code, index)


def ways_out(frame: Frame) -> Ways:
    """Where the breaking instruction leads, behind it and by its jump; None where Python must go on alone."""
    instruction = frame.code.instructions[frame.index]
    jumping = instruction.op in versions.JUMPS
    ways: Ways = []
    for jump in (False, True) if jumping else (False,):
        ends = instruction.op in versions.TERMINATORS and not jumping
        shape = None if ends else after(slots(frame.before), instruction, jump)
        index = instruction.value if jump else frame.index + 1
        if jump and instruction.name == "FOR_ITER":
            index += versions.HERE.for_exit_skip
        ways.append(None if shape is None else (landing(frame.code.code, index), shape))
    return ways


def comes_back(frame: Frame, index: int) -> bool:
    """Whether what goes on at `index` may come to the frame's instruction again."""
    return frame.index in reachable(frame.code.code, (index,))


def named(code: types.CodeType) -> tuple[str, ...]:
    """The parameters of a called function, under names that tell of it."""
    names: dict[str, None] = {}
    for name in code.co_varnames[: code.co_argcount]:
        name = name if INSIDE in name else f"{name}{INSIDE}{code.co_name}"
        while name in names:
            name += "'"
        names[name] = None
    return tuple(names)
