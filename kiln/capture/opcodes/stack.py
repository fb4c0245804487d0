"""Stack shuffling, constants, variables, globals and names."""

from __future__ import annotations

import builtins
import sys
import types
from typing import TYPE_CHECKING, Any

from kiln.base.errors import Break
from kiln.bytecode.decode import Instruction
from kiln.capture.frame import NULL, RETURN, Frame, Unread, UserError
from kiln.capture.opcodes.table import opcode
from kiln.capture.variables import first_read, unbound
from kiln.capture.world import DELETED, MISSING

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


@opcode("NOP", "RESUME", "PRECALL", "NOT_TAKEN")
def nothing(m: Machine, f: Frame, i: Instruction) -> Any:
    return None


@opcode("POP_TOP", "END_FOR")
def pop_top(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.pop()


@opcode("PUSH_NULL")
def push_null(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(NULL)


@opcode("COPY")
def copy(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(f.stack[-i.arg])  # type: ignore[operator]


@opcode("SWAP")
def swap(m: Machine, f: Frame, i: Instruction) -> Any:
    s, n = f.stack, i.arg
    s[-1], s[-n] = s[-n], s[-1]  # type: ignore[operator]


@opcode("LOAD_CONST")
def load_const(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)


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
    return UserError(
        NameError(
            f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"
        )
    )


@opcode("MAKE_CELL")
def make_cell(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.value in f.lazy:
        first_read(m, f, i.value)
    cell = types.CellType(f.locals.pop(i.value)) if i.value in f.locals else types.CellType()
    m.world.made_cells.add(id(cell))
    m.world.keep.append(cell)
    f.cells[i.value] = cell


@opcode("COPY_FREE_VARS")
def copy_free_vars(m: Machine, f: Frame, i: Instruction) -> Any:
    return None


@opcode("LOAD_CLOSURE")
def load_closure(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(f.cells[i.value])


@opcode("LOAD_DEREF", "LOAD_CLASSDEREF")
def load_deref(m: Machine, f: Frame, i: Instruction) -> Any:
    value = m.world.read_cell(f.cells[i.value])
    if value is MISSING:
        raise free_unbound(i.value, f)
    f.stack.append(value)


@opcode("STORE_DEREF")
def store_deref(m: Machine, f: Frame, i: Instruction) -> Any:
    m.world.write_cell(f.cells[i.value], f.stack.pop())


@opcode("DELETE_DEREF")
def delete_deref(m: Machine, f: Frame, i: Instruction) -> Any:
    if m.world.read_cell(f.cells[i.value]) is MISSING:
        raise free_unbound(i.value, f)
    m.world.write_cell(f.cells[i.value], MISSING)


def find_global(m: Machine, f: Frame, name: str) -> Any:
    value = m.world.read_global(f.globals, name)
    if value is MISSING or value is DELETED:
        space = f.globals.get("__builtins__", builtins)
        space = vars(space) if isinstance(space, types.ModuleType) else space
        if name not in space:
            raise UserError(NameError(f"name '{name}' is not defined"))
        value = (
            BUILTIN[name]
            if space is BUILTIN and m.world.spaces.get(id(space)) is None
            else m.world.read_global(space, name)
        )
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


@opcode("LOAD_NAME")
def load_name(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(f.locals[i.value] if i.value in f.locals else find_global(m, f, i.value))


@opcode("STORE_NAME")
def store_name(m: Machine, f: Frame, i: Instruction) -> Any:
    f.locals[i.value] = f.stack.pop()


@opcode("DELETE_NAME")
def delete_name(m: Machine, f: Frame, i: Instruction) -> Any:
    f.locals.pop(i.value, None)


@opcode("STORE_GLOBAL")
def store_global(m: Machine, f: Frame, i: Instruction) -> Any:
    m.world.write_global(f.globals, i.value, f.stack.pop())


@opcode("DELETE_GLOBAL")
def delete_global(m: Machine, f: Frame, i: Instruction) -> Any:
    if m.world.read_global(f.globals, i.value) in (MISSING, DELETED):
        raise UserError(NameError(f"name '{i.value}' is not defined"))
    m.world.write_global(f.globals, i.value, MISSING)


@opcode("IMPORT_NAME")
def import_name(m: Machine, f: Frame, i: Instruction) -> Any:
    names, level = f.stack[-1], f.stack[-2]
    package = (
        f.globals.get("__package__") or f.globals.get("__name__", "").rpartition(".")[0] if level else ""
    )
    absolute = i.value if not level else "." * level + i.value
    full = importlib_name(absolute, package) if level else i.value
    if full not in sys.modules:
        raise Break("import", f"{full} is imported for the first time", "import it at the top of the file")
    value = m.native(__import__, i.value, f.globals, None, names, level)
    del f.stack[-2:]
    f.stack.append(m.world.constant(value))


def importlib_name(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    rest = name[level:]
    return f"{base}.{rest}" if rest else base


@opcode("IMPORT_FROM")
def import_from(m: Machine, f: Frame, i: Instruction) -> Any:
    try:
        f.stack.append(m.getattr(f.stack[-1], i.value))
    except UserError as e:
        if isinstance(e.error, AttributeError):
            raise UserError(
                ImportError(f"cannot import name {i.value!r} from {f.stack[-1].__name__!r}")
            ) from None
        raise


@opcode("RETURN_VALUE")
def return_value(m: Machine, f: Frame, i: Instruction) -> Any:
    return RETURN


@opcode("RETURN_CONST")
def return_const(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN
