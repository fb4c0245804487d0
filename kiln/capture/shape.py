"""What an instruction takes from the stack and puts on it."""

from __future__ import annotations

from kiln.bytecode.decode import Instruction
from kiln.bytecode.flow import stack_effect
from kiln.bytecode.resume import VALUE, Slot

#: How many values an instruction pushes; None: of a kind that cannot be told.
PUSHES = {
    "BEFORE_WITH": 2, "FOR_ITER": 1, "LOAD_FAST_LOAD_FAST": 2, "IMPORT_STAR": 0,
    **dict.fromkeys(("LOAD_METHOD", "LOAD_SUPER_ATTR", "SEND", "YIELD_VALUE", "PUSH_NULL", "PUSH_EXC_INFO",
                     "COPY", "RETURN_GENERATOR", "BEFORE_ASYNC_WITH")),
}  # fmt: skip
ONE = (
    "LOAD", "BUILD", "UNARY", "BINARY", "FORMAT", "IMPORT", "GET_", "COMPARE", "CONTAINS", "IS_OP", "CALL",
    "MATCH", "CONVERT", "MAKE_FUNCTION", "WITH_EXCEPT_START", "LIST_TO_TUPLE", "CHECK_EXC",
)  # fmt: skip


def pushes(instruction: Instruction) -> int | None:
    """How many values an instruction pushes when it falls through; None when their kind cannot be told."""
    name = instruction.name
    if name in PUSHES:
        return PUSHES[name]
    if instruction.flag and name in ("LOAD_ATTR", "LOAD_GLOBAL"):
        return None
    if name == "UNPACK_SEQUENCE":
        return instruction.arg
    if name == "UNPACK_EX":
        assert instruction.arg is not None
        return (instruction.arg & 255) + 1 + (instruction.arg >> 8)
    return 1 if name.startswith(ONE) else 0


def after(shape: tuple[Slot, ...], instruction: Instruction, jump: bool) -> tuple[Slot, ...] | None:
    """The shape of the stack after an instruction; None when Python must go on alone."""
    count = pushes(instruction)
    if count is None:
        return None
    if jump and instruction.name == "FOR_ITER":
        return shape[:-1]  # behind what the end of a loop passes over, whose effect some releases count here
    net = stack_effect(instruction.op, instruction.arg, jump)
    if jump:
        return shape[: len(shape) + net] if net <= 0 else None
    taken = count - net
    return (*shape[: len(shape) - taken], *[VALUE] * count)


def operands(instruction: Instruction) -> int:
    """How many values an instruction takes from the stack."""
    return (pushes(instruction) or 0) - stack_effect(instruction.op, instruction.arg)
