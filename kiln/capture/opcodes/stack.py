"""Stack shuffling, constants, variables, globals and names."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from kiln.base.errors import Break
from kiln.base.source import Const
from kiln.bytecode.decode import Instruction
from kiln.capture import operators
from kiln.capture.frame import NULL, RETURN, Frame, Machine, Unread, UserError
from kiln.capture.opcodes.table import computes, consumes, opcode, steps
from kiln.capture.variables import first_read, unbound
from kiln.capture.world import DELETED, MISSING
from kiln.check.guards import Custom


@opcode("SWAP")
def swap(m: Machine, f: Frame, i: Instruction) -> Any:
    s, n = f.stack, i.arg
    s[-1], s[-n] = s[-n], s[-1]  # type: ignore[operator]


@opcode("KW_NAMES")
def kw_names(m: Machine, f: Frame, i: Instruction) -> Any:
    f.kwnames = i.value


@opcode("LOAD_FAST", "LOAD_FAST_CHECK")
def load_fast(m: Machine, f: Frame, i: Instruction) -> Any:
    try:
        f.stack.append(f.locals[i.value])
    except KeyError:
        f.stack.append(first_read(m, f, i.value))


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.value in f.lazy:
        first_read(m, f, i.value)
    f.stack.append(f.locals.pop(i.value, NULL))


@opcode("STORE_FAST", "STORE_FAST_MAYBE_NULL")
def store_fast(m: Machine, f: Frame, i: Instruction) -> Any:
    value = f.stack.pop()
    f.lazy.pop(i.value, None)
    if value is NULL:
        f.locals.pop(i.value, None)
    elif type(value) is Unread:
        f.locals.pop(i.value, None)
        f.lazy[i.value] = (value.value, value.source)
    else:
        f.locals[i.value] = value


@opcode("DELETE_FAST")
def delete_fast(m: Machine, f: Frame, i: Instruction) -> Any:
    if f.lazy.pop(i.value, None) is not None:
        return
    if i.value not in f.locals:
        raise unbound(i.value)
    del f.locals[i.value]


@opcode("LOAD_FAST_LOAD_FAST")
def load_two(m: Machine, f: Frame, i: Instruction) -> Any:
    for name in i.value:
        f.stack.append(f.locals[name] if name in f.locals else first_read(m, f, name))


@opcode("STORE_FAST_STORE_FAST")
def store_two(m: Machine, f: Frame, i: Instruction) -> Any:
    for name in i.value:
        f.lazy.pop(name, None)
        f.locals[name] = f.stack.pop()


@opcode("STORE_FAST_LOAD_FAST")
def store_load(m: Machine, f: Frame, i: Instruction) -> Any:
    first, second = i.value
    f.lazy.pop(first, None)
    f.locals[first] = f.stack.pop()
    f.stack.append(f.locals[second] if second in f.locals else first_read(m, f, second))


def free_unbound(name: str, f: Frame) -> UserError:
    if name in f.code.code.co_cellvars:
        return unbound(name)
    text = f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"
    return UserError(NameError(text, name=name))


@opcode("MAKE_CELL")
def make_cell(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.value in f.lazy:
        first_read(m, f, i.value)
    cell = types.CellType(f.locals.pop(i.value)) if i.value in f.locals else types.CellType()
    m.world.made_cells.add(id(cell))
    m.world.keep.append(cell)
    f.cells[i.value] = cell


def load_deref(m: Machine, f: Frame, i: Instruction) -> Any:
    value = m.world.read_cell(f.cells[i.value])
    if value is MISSING:
        raise free_unbound(i.value, f)
    return value


def named(m: Machine, f: Frame, i: Instruction, space: Any, other: Callable[[], Any]) -> Any:
    """A name of a class body: its own, or another; the metaclass may have given it a mapping of its kind."""
    if type(space) is dict:
        return space[i.value] if i.value in space else other()
    try:
        return operators.getitem(m, space, i.value)
    except UserError as e:
        if not isinstance(e.error, KeyError):
            raise
    return other()


def named_or_deref(m: Machine, f: Frame, i: Instruction, space: Any) -> Any:
    return named(m, f, i, space, lambda: load_deref(m, f, i))


def delete_name(m: Machine, f: Frame, i: Instruction) -> None:
    try:
        operators.delitem(m, f.locals, i.value)
    except UserError as e:
        raise undefined(i.value) if isinstance(e.error, KeyError) else e from None


def undefined(name: str) -> UserError:
    return UserError(NameError(f"name '{name}' is not defined", name=name))


@opcode("DELETE_DEREF")
def delete_deref(m: Machine, f: Frame, i: Instruction) -> Any:
    load_deref(m, f, i)
    m.world.write_cell(f.cells[i.value], MISSING)


def find_global(m: Machine, f: Frame, name: str) -> Any:
    value = m.world.read_global(f.globals, name)
    if value is MISSING or value is DELETED:
        space = f.globals.get("__builtins__", builtins)
        space = vars(space) if isinstance(space, types.ModuleType) else space
        if name not in space:
            raise undefined(name)
        plain = space is BUILTIN and id(space) not in m.world.spaces
        value = BUILTIN[name] if plain else m.world.read_global(space, name)
        if space is BUILTIN:
            m.world.builtin(name, value)
    return value


BUILTIN = vars(builtins)


@opcode("LOAD_GLOBAL")
def load_global(m: Machine, f: Frame, i: Instruction) -> Any:
    value = find_global(m, f, i.value)
    if i.flag and sys.version_info < (3, 13):
        f.stack.append(NULL)
    f.stack.append(value)
    if i.flag and sys.version_info >= (3, 13):
        f.stack.append(NULL)


@opcode("DELETE_GLOBAL")
def delete_global(m: Machine, f: Frame, i: Instruction) -> Any:
    if m.world.read_global(f.globals, i.value) in (MISSING, DELETED):
        raise undefined(i.value)
    m.world.write_global(f.globals, i.value, MISSING)


@opcode("IMPORT_NAME")
def import_name(m: Machine, f: Frame, i: Instruction) -> Any:
    names, level = f.stack[-1], f.stack[-2]
    full = absolute_name(i.value, level, f.globals) if level else i.value
    if full not in sys.modules:
        refuse_absent(m, full.partition(".")[0])
        raise Break("import", f"{full} is imported for the first time", "import it at the top of the file")
    value = m.native(__import__, i.value, f.globals, None, names, level)
    del f.stack[-2:]
    f.stack.append(m.world.constant(value))


def refuse_absent(m: Machine, name: str) -> None:
    """Raise what Python raises for a module that is not installed, as long as modules are sought as now."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    path = list(sys.path)

    def lacks(system: Any) -> bool:
        return name not in system.modules and system.path == path

    m.world.guard(Custom(Const(sys), lacks, f"lacks the module {name}"))
    raise UserError(ModuleNotFoundError(f"No module named {name!r}", name=name))


def absolute_name(name: str, level: int, space: dict[str, Any]) -> str:
    """What a relative import leads to."""
    package = space.get("__package__") or space.get("__name__", "").rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


@opcode("IMPORT_FROM")
def import_from(m: Machine, f: Frame, i: Instruction) -> Any:
    try:
        f.stack.append(m.getattr(f.stack[-1], i.value))
    except UserError as e:
        if isinstance(e.error, AttributeError):
            module = f.stack[-1]
            name, path = (getattr(module, key, None) for key in ("__name__", "__file__"))
            text = f"cannot import name {i.value!r} from {name or '<unknown module name>'!r}"
            error = ImportError(f"{text} ({path or 'unknown location'})", name=name, path=path)
            raise UserError(error) from None
        raise


@opcode("RETURN_CONST")
def return_const(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN


steps({
    **dict.fromkeys(("NOP", "RESUME", "PRECALL", "NOT_TAKEN", "COPY_FREE_VARS"), lambda m, f, i: None),
    "LOAD_CONST": lambda m, f, i: f.stack.append(i.value),
    "RETURN_VALUE": lambda m, f, i: RETURN,
})  # fmt: skip
computes(0, {
    "PUSH_NULL": lambda m, f, i: NULL,
    "RETURN_GENERATOR": lambda m, f, i: None,
    "COPY": lambda m, f, i: f.stack[-i.arg],
    "LOAD_CLOSURE": lambda m, f, i: f.cells[i.value],
    "LOAD_DEREF": load_deref,
    "LOAD_CLASSDEREF": lambda m, f, i: named_or_deref(m, f, i, f.locals),
    "LOAD_LOCALS": lambda m, f, i: f.locals,
    "LOAD_NAME": lambda m, f, i: named(m, f, i, f.locals, lambda: find_global(m, f, i.value)),
})  # fmt: skip
computes(1, {"LOAD_FROM_DICT_OR_DEREF": lambda m, f, i, space: named_or_deref(m, f, i, space)})
consumes(0, {
    "DELETE_NAME": delete_name,
    "SETUP_ANNOTATIONS": lambda m, f, i: f.locals.setdefault("__annotations__", {}),
})  # fmt: skip
consumes(1, {
    "POP_TOP": lambda m, f, i, value: None,
    "END_FOR": lambda m, f, i, value: None,
    "STORE_DEREF": lambda m, f, i, value: m.world.write_cell(f.cells[i.value], value),
    "STORE_NAME": lambda m, f, i, value: operators.setitem(m, f.locals, i.value, value),
    "STORE_GLOBAL": lambda m, f, i, value: m.world.write_global(f.globals, i.value, value),
})  # fmt: skip
