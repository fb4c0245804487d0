"""Raising, catching and handling exceptions."""

from __future__ import annotations

from typing import Any

from kiln.base.errors import Break
from kiln.bytecode.decode import Instruction
from kiln.capture.frame import Frame, Handled, Machine, UserError
from kiln.capture.opcodes.table import computes, not_captured, opcode


@opcode("PUSH_EXC_INFO")
def push_exc_info(m: Machine, f: Frame, i: Instruction) -> Any:
    error = f.stack.pop()
    f.stack.append(Handled(error, f.handled[-1] if f.handled else None))
    f.handled.append(error)
    f.stack.append(error)


@opcode("POP_EXCEPT")
def pop_except(m: Machine, f: Frame, i: Instruction) -> Any:
    slot = f.stack.pop()
    if isinstance(slot, Handled):
        slot.active = False
    if f.handled:
        f.handled.pop()


@opcode("CHECK_EXC_MATCH")
def check_exc_match(m: Machine, f: Frame, i: Instruction) -> Any:
    error, kinds = f.stack[-2:]
    refuse_others(kinds)
    f.stack[-1] = isinstance(error, kinds)


def refuse_others(kinds: Any) -> None:
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            text = "catching classes that do not inherit from BaseException is not allowed"
            raise UserError(TypeError(text))


@opcode("CHECK_EG_MATCH")
def check_group_match(m: Machine, f: Frame, i: Instruction) -> Any:
    """`except* kinds`: the part of the group that matches is handled, the rest stays below it."""
    error, kinds = f.stack[-2:]
    refuse_others(kinds)
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if issubclass(kind, BaseExceptionGroup):
            text = "catching ExceptionGroup with except* is not allowed. Use except instead."
            raise UserError(TypeError(text))
    match, rest = split_group(m, error, kinds)
    f.stack[-2:] = [error if match is None else rest, match]
    if match is not None:
        f.handled[-1] = match
        next(slot for slot in reversed(f.stack) if isinstance(slot, Handled) and slot.active).error = match


def split_group(m: Machine, error: Any, kinds: Any) -> tuple[Any, Any]:
    if error is None:
        return None, None
    if isinstance(error, kinds):
        return error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error]), None
    return m.native(error.split, kinds) if isinstance(error, BaseExceptionGroup) else (None, error)


def remaining_group(original: BaseException, errors: list[BaseException | None]) -> BaseException | None:
    """What the except* clauses of a try statement leave: errors they raised, parts that nobody handled."""
    if not errors or not isinstance(original, BaseExceptionGroup):
        return errors[0] if errors else None
    raised = [e for e in errors if e is not None and not same_origin(e, original)]
    kept = {id(leaf) for e in errors if e is not None and same_origin(e, original) for leaf in leaves(e)}
    rest = original.split(lambda e: id(e) in kept)[0] if kept else None
    if rest is not None:
        raised.append(rest)
    return raised[0] if len(raised) == 1 else BaseExceptionGroup("", raised) if raised else None


def same_origin(a: BaseException, b: BaseException) -> bool:
    return isinstance(a, BaseExceptionGroup) and all(
        getattr(a, name, None) is getattr(b, name, None)
        for name in ("__notes__", "__traceback__", "__cause__", "__context__")
    )


def leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for e in error.exceptions for leaf in leaves(e)]


@opcode("PREP_RERAISE_STAR", "CALL_INTRINSIC_2")
def prepare_reraise(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.name == "CALL_INTRINSIC_2" and i.value != "INTRINSIC_PREP_RERAISE_STAR":
        raise not_captured(i.value)
    f.stack[-2:] = [remaining_group(*f.stack[-2:])]


def as_error(m: Machine, value: Any, what: str) -> BaseException:
    made = value
    if isinstance(value, type) and issubclass(value, BaseException):
        made = m.call(value, ())
        if not isinstance(made, BaseException):
            text = f"calling {value} should have returned an instance of BaseException, not {type(made)}"
            raise UserError(TypeError(text))
    if not isinstance(made, BaseException):
        raise UserError(TypeError(f"{what} must derive from BaseException"))
    return made


@opcode("RAISE_VARARGS")
def raise_varargs(m: Machine, f: Frame, i: Instruction) -> Any:
    if not i.arg:
        handled = m.handled()
        raise UserError(RuntimeError("No active exception to reraise") if handled is None else handled)
    error = as_error(m, f.stack[-i.arg], "exceptions")
    if m.source(error) is not None:
        raise Break("raises", f"a {type(error).__name__} from outside is raised here", "")
    if i.arg == 2:
        cause = f.stack[-1]
        error.__cause__ = cause if cause is None else as_error(m, cause, "exception causes")
    raise UserError(error)


@opcode("RERAISE")
def reraise(m: Machine, f: Frame, i: Instruction) -> Any:
    raise UserError(f.stack[-1])


computes(0, {"LOAD_ASSERTION_ERROR": lambda m, f, i: AssertionError})
