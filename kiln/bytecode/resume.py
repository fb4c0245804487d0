"""Code that goes on in the middle of a function, or runs one instruction and hands the state on."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from types import CodeType
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.errors import Bug, Skip
from kiln.bytecode.assemble import Emitter, Label
from kiln.bytecode.body import CELL_USERS, Body, make_cell
from kiln.bytecode.decode import Code, decode
from kiln.bytecode.flow import needed, reachable, stack_depths, stack_effect
from kiln.bytecode.versions import HERE, JUMPS, REAL, TERMINATORS


class Slot(Enum):
    """What one slot of the stack holds while a frame is handed on; every slot is named, bottom first."""

    VALUE = "value"
    """An object, carried by a parameter."""
    NULL = "null"
    """The NULL of a call sequence, or an unbound variable that a comprehension has put away; no parameter."""
    HANDLED = "handled"
    """What PUSH_EXC_INFO leaves below the exception; the parameter carries the exception being handled."""
    LASTI = "lasti"
    """The place of a raise, for RERAISE; no parameter."""


VALUE, NULL, HANDLED, LASTI = Slot.VALUE, Slot.NULL, Slot.HANDLED, Slot.LASTI


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Where control leaves: what `callable(*given, *values of the stack, *locals)` gives is returned."""

    callable: Any
    stack: tuple[Slot, ...]
    locals: tuple[str, ...]
    given: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Replace:
    """A call in the place of an instruction whose operands are not on the stack: `callable(*given, *names)`.

    The names are parameters behind the others; `through`, where it is given, is called with the result. With
    mode "push" the result stands for what the instruction pushes, with "drop" nothing is pushed, with
    "object" the parameter OBJECT, before the names, is.
    """

    callable: Any
    names: tuple[str, ...]
    mode: str
    given: tuple[Any, ...] = ()
    through: Any = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this adds behind the others."""
        return (OBJECT, *self.names) if self.mode == "object" else self.names


OBJECT, _DROPPED = "__object", "__dropped"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FUNCTION = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
_CALL_HEAD = frozenset(REAL[name] for name in ("KW_NAMES", "PRECALL") if name in REAL)
_CALL = REAL["CALL"]


def resume_places(
    code: CodeType, index: int, stack: Sequence[Slot], locals: Sequence[str], replace: Replace | None = None
) -> tuple[CodeType, dict[int, int]]:
    """The code of a function that takes the state of a frame of `code` and goes on at instruction `index`.

    Parameters: the values of the stack, bottom first, then the variables `locals`, those that are cells
    or free carrying the cell. Every variable that may still be read must be given if it is bound.
    With it comes, for each instruction that starts a copied one, the index of that one in `code`.
    """
    decoded = _checked(code)
    if replace is not None:
        builder = _Builder(code, stack, locals, index, _after(decoded, index, index, None, None), replace)
        builder.prologue()
        called = builder.replaced(replace, index)
        builder.body.copy(index + 1)
        return builder.finish(), {**builder.body.places(), called: index}
    index = _entry(decoded, index)
    builder = _Builder(code, stack, locals, index, reachable(code, (index,)))
    builder.prologue()
    builder.body.copy(index)
    return builder.finish(), builder.body.places()


def suspended_code(
    code: CodeType, index: int | None, stack: Sequence[Slot], locals: Sequence[str]
) -> CodeType:
    """The code of a generator function whose first `next` brings it to the YIELD_VALUE at `index`.

    The stack is the one below the value that is yielded. Without an index the generator has not started,
    and no `next` is needed.
    """
    decoded = decode(code)
    start = max(i.index for i in decoded.instructions if i.name == "RETURN_GENERATOR") + 3
    at = start if index is None else index
    builder = _Builder(
        code, stack, locals, at, reachable(code, (at,)), depth=len(stack) + (index is not None)
    )
    builder.e.raw("RETURN_GENERATOR")
    builder.e.pop()
    builder.prologue()
    if index is not None:
        builder.e.const(None)
    builder.body.copy(at)
    return builder.finish()


def continue_code(
    code: CodeType,
    index: int,
    stack: Sequence[Slot],
    locals: Sequence[str],
    epilogues: Sequence[Epilogue | None],
    replace: Replace | None = None,
    first: Any = None,
) -> CodeType:
    """The code of a function that takes the same state, runs the instruction `index` and then leaves.

    The first epilogue is for the fall-through, the second for the jump; where one is None or missing,
    control goes on in `code`. An exception goes to the handlers of the instruction, and on from there.
    Before all else `first` is called, where it is given.
    """
    decoded = _checked(code)
    index = _entry(decoded, index)
    last = index
    while decoded.instructions[last].op in _CALL_HEAD:
        last += 1
    fall, jump = (*epilogues, None, None)[:2]
    taken = [name for e in (fall, jump) if e is not None for name in e.locals]
    builder = _Builder(code, stack, locals, index, _after(decoded, index, last, fall, jump), replace, taken)
    builder.prologue(first)
    builder.step(last, fall, jump)
    builder.body.copy()
    return builder.finish()


def _checked(code: CodeType) -> Code:
    if code.co_flags & _GENERATORS:
        raise Skip(
            f"{code.co_qualname} is a generator or a coroutine: its frame cannot be left and entered again"
        )
    if code.co_flags & _FUNCTION != _FUNCTION:
        raise Skip(f"{code.co_qualname} is the body of a class or of a module")
    decoded = decode(code)
    if len(set(decoded.locals)) != len(decoded.locals):
        raise Skip(f"{code.co_qualname} has two variables of one name")
    return decoded


def _entry(decoded: Code, index: int) -> int:
    """The index to start from: the instructions that prepare a call go together with it."""
    start = next(i.index for i in decoded.instructions if i.name == "RESUME")
    index = max(index, start + 1)
    if decoded.instructions[index].op == _CALL or decoded.instructions[index].op in _CALL_HEAD:
        while decoded.instructions[index - 1].op in _CALL_HEAD:
            index -= 1
    return index


def _after(decoded: Code, index: int, last: int, fall: Epilogue | None, jump: Epilogue | None) -> set[int]:
    """The instructions that run when `index` to `last` run and control leaves through the epilogues."""
    starts = []
    final = decoded.instructions[last]
    if fall is None and final.op not in TERMINATORS:
        starts.append(last + 1)
    if jump is None and final.op in JUMPS:
        starts.append(final.value)
    handlers = (decoded.handler(at) for at in range(index, last + 1))
    starts.extend(handler.target for handler in handlers if handler is not None)
    return reachable(decoded.code, starts) | set(range(index, last + 1))


class _Builder:
    """A function in the making: parameters, prologue, copied body, epilogues."""

    def __init__(
        self,
        code: CodeType,
        stack: Sequence[Slot],
        locals: Sequence[str],
        index: int,
        running: set[int],
        replace: Replace | None = None,
        taken: Iterable[str] = (),
        depth: int | None = None,
    ) -> None:
        self.depth = len(stack) if depth is None else depth
        self.code, self.stack, self.locals = code, tuple(stack), tuple(locals)
        self.index, self.running, self.replace = index, running, replace
        taken = {*locals, *taken}
        most = range(code.co_stacksize + len(taken))
        self.names = [name for k in most if (name := f"__stack{k}") not in taken]
        carried = sum(slot in (VALUE, HANDLED) for slot in self.stack)
        self.parameters = [*self.names[:carried], *self.locals]
        if replace is not None:
            self.parameters += replace.parameters
        self.e = Emitter(tuple(dict.fromkeys((*self.parameters, *decode(code).locals))))
        self.body = Body(code, self.e, self._depths())

    def _depths(self) -> tuple[int, ...]:
        """The depth of the stack before each instruction, checked against the one given."""
        given = self.depth
        known = stack_depths(self.code)
        if known[self.index] < 0:
            known = stack_depths(self.code, (self.index, given))
        if self.replace is None and known[self.index] != given:
            raise Bug(
                f"{self.code.co_qualname} has {known[self.index]} values on the stack at {self.index}, "
                f"not {given}"
            )
        return known

    def prologue(self, first: Any = None) -> None:
        """Build the stack up from the parameters, which are unbound on the way."""
        e = self.e
        self.body.at(self.index)
        e.raw("RESUME", 0)
        if first is not None:
            e.callee(first)
            e.end_call(0)
            e.pop()
        for name in self._missing_cells():
            make_cell(e, name)
        at = 0
        for slot in self.stack:
            if slot is NULL:
                e.push_null()
            elif slot is LASTI:
                e.const(0)
            else:
                e.take(self.names[at])
                at += 1
                if slot is HANDLED:
                    e.raw("PUSH_EXC_INFO")
                    e.pop()

    def _missing_cells(self) -> list[str]:
        instructions = self.body.decoded.instructions
        used = {instructions[at].value for at in self.running if instructions[at].op in CELL_USERS}
        missing = used.difference(self.locals)
        free = missing.intersection(self.code.co_freevars)
        unbound = free | needed(self.code, self.index, self.running).difference(self.locals, missing)
        if unbound:
            raise Bug(
                f"{self.code.co_qualname} cannot go on at {self.index} without {', '.join(sorted(unbound))}"
            )
        return sorted(missing)

    def step(self, last: int, fall: Epilogue | None, jump: Epilogue | None) -> None:
        """Run the instructions up to `last`, or the call that replaces them, and leave."""
        final = self.body.decoded.instructions[last]
        depth = len(self.stack)
        arm = Label()
        if self.replace is not None:
            self.replaced(self.replace, last)
            self._leave(fall, last + 1, depth + (self.replace.mode != "drop"))
            return
        for at in range(self.index, last + 1):
            self.body.settle(at)
            self.body.emit(at, {final.value: arm} if final.op in JUMPS else {})
        if final.op not in TERMINATORS:
            self._leave(fall, last + 1, depth + stack_effect(final.op, final.arg))
        if final.op in JUMPS:
            self.e.place(arm)
            self._arrive(
                final.value, final.name == "FOR_ITER", jump, depth + stack_effect(final.op, final.arg, True)
            )

    def _arrive(self, target: int, exhausted: bool, epilogue: Epilogue | None, depth: int) -> None:
        """Leave on the taken arm of a jump, after what the end of a loop passes over."""
        for _ in range(HERE.for_exit_skip if exhausted else 0):
            i = self.body.decoded.instructions[target]
            self.body.emit(target, {})
            depth += stack_effect(i.op, i.arg)
            target += 1
        self._leave(epilogue, target, depth)

    def replaced(self, replace: Replace, index: int) -> int:
        """Emit the call in the place of the instruction `index`, under its handlers; gives its row."""
        e, start = self.e, len(self.e)
        if replace.through is not None:
            e.callee(replace.through)
        self._call(replace.callable, replace.given, replace.names)
        if replace.through is not None:
            e.end_call(1)
        row = len(e) - 1
        if replace.mode != "push":
            e.pop()
        if replace.mode == "object":
            e.take(OBJECT)
        self.body.cover(start, index)
        return row

    def _leave(self, epilogue: Epilogue | None, index: int, depth: int) -> None:
        """Hand the state on, or go on in the body where there is nobody to hand it to."""
        e = self.e
        if epilogue is None:
            e.jump(self.body.label(index))
            return
        if len(epilogue.stack) != depth:
            raise Bug(f"{depth} values are on the stack where an epilogue expects {len(epilogue.stack)}")
        # Columns that no instruction of a program has: tracebacks leave these places out.
        e.position = (e.position[0], e.position[0], 0, 0)
        carried = sum(slot in (VALUE, HANDLED) for slot in epilogue.stack)
        at = carried
        for slot in reversed(epilogue.stack):
            if slot is NULL:
                # Storing a NULL leaves the variable unbound; other ways to drop it would follow the pointer.
                e.store(_DROPPED)
            elif slot is LASTI:
                e.pop()
            else:
                at -= 1
                self._put_away(slot, self.names[at])
        self._call(epilogue.callable, epilogue.given, (*self.names[:carried], *epilogue.locals))
        e.ret()

    def _call(self, function: Any, given: Sequence[Any], names: Sequence[str]) -> None:
        """Call with constants and with variables, which are unbound on the way."""
        self.e.callee(function)
        for value in given:
            self.e.const(value)
        for name in names:
            self.e.take(name)
        self.e.end_call(len(given) + len(names))

    def _put_away(self, slot: Slot, name: str) -> None:
        e = self.e
        if slot is HANDLED:
            e.callee(sys.exception)
            e.end_call(0)
            e.store(name)
            e.raw("POP_EXCEPT")
        else:
            e.store(name)

    def finish(self) -> CodeType:
        """The code object, under the name and place of the original."""
        code = self.code
        return self.e.finish(
            code.co_name, code.co_filename, code.co_firstlineno, len(self.parameters), self.parameters,
            code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS), qualname=code.co_qualname,
        )  # fmt: skip
