"""Runs a function one instruction at a time, each in a function of its own made by `continue_code`.

The state of the frame passes through Python between any two instructions, and the exception table is followed here:
whatever the prologues and epilogues do not carry over is lost, and the result differs from a plain call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

from kiln.bytecode.decode import Instruction, decode
from kiln.bytecode.flow import stack_effect
from kiln.bytecode.resume import HANDLED, LASTI, NULL, VALUE, Epilogue, Slot, continue_code
from kiln.bytecode.versions import HERE, JUMPS, TERMINATORS
from tests.bytecode.writer import resume_code

LIMIT = 20_000
_functions: dict[tuple[Any, ...], FunctionType] = {}


class State:
    """A frame between two instructions."""

    def __init__(self, index: int, stack: list[tuple[Slot, Any]], variables: dict[str, Any]) -> None:
        self.index, self.stack, self.variables = index, stack, variables

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot, _ in self.stack)

    @property
    def values(self) -> list[Any]:
        carried = [value for slot, value in self.stack if slot in (VALUE, HANDLED)]
        return [*carried, *self.variables.values()]


class Stepper:
    """One function, to be run step by step."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.code = function.__code__
        self.decoded = decode(self.code)
        self.bare = self.code.replace(co_exceptiontable=b"")

    def start(self, *args: Any, **kwargs: Any) -> State:
        """The state before the first instruction of the body."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        variables = dict(bound.arguments)
        for name in self.code.co_cellvars:
            variables[name] = CellType(variables[name]) if name in variables else CellType()
        variables.update(zip(self.code.co_freevars, self.function.__closure__ or (), strict=True))
        first = next(i.index for i in self.decoded.instructions if i.name == "RESUME") + 1
        return State(first, [], variables)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the whole function, step by step."""
        state: State | tuple[Any] = self.start(*args, **kwargs)
        for _ in range(LIMIT):
            state = self.step(state)
            if not isinstance(state, State):
                return state[0]
        raise AssertionError("the function does not end")

    def step(self, state: State) -> State | tuple[Any]:
        """The state after one instruction, or the function's result in a tuple."""
        i = self.decoded.instructions[state.index]
        emulated = _EMULATED.get(i.name)
        known = {}
        try:
            if emulated is not None and emulated(i, state):
                state.index += 1
                return state
            known = {
                id(value): value.__traceback__ for _, value in state.stack if isinstance(value, BaseException)
            }
            result = next(_isolated(self._step_function(state), state.values))
        except BaseException as error:
            # An exception raised again in its own frame keeps its traceback, which `except*` looks at.
            return self._dispatch(state, error.with_traceback(known.get(id(error), error.__traceback__)))
        return result if isinstance(result, State) else (result,)

    def finish(self, state: State) -> Any:
        """Run one instruction under the handlers of the function, and all the rest in one resume function."""
        i = self.decoded.instructions[state.index]
        emulated = _EMULATED.get(i.name)
        if emulated is not None and emulated(i, state):
            state.index += 1
            return self.resume(state)
        epilogues = [
            e and Epilogue(self._resume_function(e.callable.args[0], e.stack, e.locals), e.stack, e.locals)
            for e in self._successors(i, state)
        ]
        code = continue_code(self.code, state.index, state.slots, tuple(state.variables), epilogues)
        return FunctionType(code, self.function.__globals__)(*state.values)

    def resume(self, state: State) -> Any:
        """Run all the rest in one resume function."""
        return self.resume_function(state)(*state.values)

    def resume_function(self, state: State) -> FunctionType:
        """The function that goes on from a state; it takes the values of the state."""
        return self._resume_function(state.index, state.slots, tuple(state.variables))

    def _resume_function(self, index: int, slots: tuple[Slot, ...], names: tuple[str, ...]) -> FunctionType:
        key = ("resume", self.code, index, slots, names)
        if key not in _functions:
            code = resume_code(self.code, index, slots, names)
            assert not code.co_cellvars and not code.co_freevars
            _functions[key] = FunctionType(code, self.function.__globals__)
        return _functions[key]

    def _step_function(self, state: State) -> FunctionType:
        key = ("step", self.bare, state.index, state.slots, tuple(state.variables))
        if key not in _functions:
            i = self.decoded.instructions[state.index]
            code = continue_code(self.bare, *key[2:], self._successors(i, state))
            _functions[key] = FunctionType(code, self.function.__globals__)
        return _functions[key]

    def _successors(self, i: Instruction, state: State) -> tuple[Epilogue | None, Epilogue | None]:
        fall = jump = None
        names = tuple(_bound_after(i, dict.fromkeys(state.variables)))
        if i.op not in TERMINATORS:
            slots = _slots_after(i, state.slots, stack_effect(i.op, i.arg))
            fall = Epilogue(partial(arrive, i.index + 1, slots, names), slots, names)
        if i.name == "FOR_ITER":
            slots = state.slots[:-1]
            jump = Epilogue(partial(arrive, i.value + HERE.for_exit_skip, slots, names), slots, names)
        elif i.op in JUMPS:
            slots = _slots_after(i, state.slots, stack_effect(i.op, i.arg, True))
            jump = Epilogue(partial(arrive, i.value, slots, names), slots, names)
        return fall, jump

    def _dispatch(self, state: State, error: BaseException) -> State:
        """The state at the handler of the instruction that raised."""
        handler = self.decoded.handler(state.index)
        if handler is None:
            raise error
        stack = state.stack[: handler.depth] + [(LASTI, 0)] * handler.lasti + [(VALUE, error)]
        return State(handler.target, stack, state.variables)


def _isolated(function: FunctionType, values: list[Any]) -> Iterator[Any]:
    # The exceptions handled in a generator are its own: one that the step has not popped goes with it.
    yield function(*values)


def arrive(index: int, slots: tuple[Slot, ...], names: tuple[str, ...], *values: Any) -> State:
    """The state that an epilogue hands over."""
    rest = iter(values)
    stack = [(slot, next(rest) if slot in (VALUE, HANDLED) else None) for slot in slots]
    return State(index, stack, dict(zip(names, rest, strict=True)))


def _bound_after(i: Instruction, bound: dict[str, None]) -> dict[str, None]:
    if i.name in ("STORE_FAST", "MAKE_CELL"):
        bound[i.value] = None
    elif i.name == "STORE_FAST_STORE_FAST":
        bound.update(dict.fromkeys(i.value))
    elif i.name == "STORE_FAST_LOAD_FAST":
        bound[i.value[0]] = None
    elif i.name == "DELETE_FAST":
        bound.pop(i.value, None)
    return bound


def _slots_after(i: Instruction, slots: tuple[Slot, ...], effect: int) -> tuple[Slot, ...]:
    if i.name == "SWAP":
        changed = list(slots)
        changed[-1], changed[-i.arg] = changed[-i.arg], changed[-1]
        return tuple(changed)
    if i.name == "COPY" and slots[-i.arg] is HANDLED:
        # The copy is for POP_EXCEPT; what stays below is dropped with the frame.
        at = len(slots) - i.arg
        return (*slots[:at], VALUE, *slots[at + 1 :], HANDLED)
    if i.name == "COPY":
        return (*slots, slots[-i.arg])
    if i.name == "PUSH_NULL":
        return (*slots, NULL)
    if i.name == "PUSH_EXC_INFO":
        return (*slots[:-1], HANDLED, VALUE)
    if i.name == "LOAD_GLOBAL" and i.flag:
        return (*slots, NULL, VALUE) if HERE.null_first else (*slots, VALUE, NULL)
    after = len(slots) + effect
    if i.name.startswith("CALL"):
        return (*slots[: after - 1], VALUE)
    return slots[:after] + (VALUE,) * (after - len(slots))


# Instructions whose result may be NULL or not, which no epilogue can foresee; done here instead.


def _method(i: Instruction, state: State) -> bool:
    if i.name == "LOAD_ATTR" and not i.flag:
        return False
    state.stack[-1:] = _callable(getattr(state.stack[-1][1], i.value))
    return True


def _super_method(i: Instruction, state: State) -> bool:
    if not i.flag:
        return False
    kind, cls, self = (value for _, value in state.stack[-3:])
    state.stack[-3:] = _callable(getattr(kind(cls, self), i.value))
    return True


def _callable(function: Callable[..., Any]) -> list[tuple[Slot, Any]]:
    pair = [(NULL, None), (VALUE, function)]
    return pair if HERE.null_first else pair[::-1]


def _put_away(i: Instruction, state: State) -> bool:
    bound = i.value in state.variables
    state.stack.append((VALUE, state.variables.pop(i.value)) if bound else (NULL, None))
    return True


def _store(i: Instruction, state: State) -> bool:
    if state.stack[-1][0] is not NULL:
        return False
    state.stack.pop()
    state.variables.pop(i.value, None)
    return True


def _store_and_load(i: Instruction, state: State) -> bool:
    if state.stack[-1][0] is not NULL:
        return False
    state.stack.pop()
    state.variables.pop(i.value[0], None)
    state.stack.append((VALUE, state.variables[i.value[1]]))
    return True


def _store_two(i: Instruction, state: State) -> bool:
    for name in i.value:
        slot, value = state.stack.pop()
        state.variables.pop(name, None)
        if slot is not NULL:
            state.variables[name] = value
    return True


def _nothing(i: Instruction, state: State) -> bool:
    return True


_EMULATED: dict[str, Callable[[Instruction, State], bool]] = {
    "LOAD_METHOD": _method,
    "LOAD_ATTR": _method,
    "LOAD_SUPER_ATTR": _super_method,
    "LOAD_FAST_AND_CLEAR": _put_away,
    "STORE_FAST": _store,
    "STORE_FAST_STORE_FAST": _store_two,
    "STORE_FAST_LOAD_FAST": _store_and_load,
    "KW_NAMES": _nothing,
    "PRECALL": _nothing,
}
