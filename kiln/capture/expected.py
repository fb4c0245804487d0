"""Branches on a tensor of which one arm does nothing but raise: the graph checks that the other one is taken.

Likewise with those that are foreseen (`foreseen.py`). Should a check fail in a call, the graph raises and the
frame runs again in Python, which does or raises what the program does. So it is done only where the program
has written nothing yet that lasts: no graph writes before the checks that stood before its writes. What a
backend compiles that writes at its end may check later, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.bytecode.decode import Instruction
from kiln.capture.fake_arrays import OpenNumber
from kiln.capture.foreseen import foreseen, text_of
from kiln.capture.frame import Frame, Machine, Restart, place_at
from kiln.capture.recorder import Recorder
from kiln.ops.fake import FakeTensor, constant_of
from kiln.ops.meta import memory_of

LONGEST = 80  # instructions of an arm that is looked at
#: What an arm may do on its way to its raise: make the exception, and the text of it.
HARMLESS = ("LOAD_", "BUILD_", "FORMAT_", "CALL", "PRECALL", "PUSH_NULL", "KW_NAMES", "BINARY_", "COMPARE_OP",
            "UNARY_", "COPY", "SWAP", "NOP", "CACHE", "CONVERT_VALUE", "STORE_FAST", "POP_TOP",
            "IMPORT_")  # fmt: skip


def taken(m: Machine, frame: Frame, instruction: Instruction, sense: bool) -> bool:
    """The truth of the condition on the stack, a tensor or its number, at a jump when that is `sense`."""
    top = frame.stack[-1]
    value = top.tensor if type(top) is OpenNumber else top
    if constant_of(value) is not None or value.numel() != 1 or value.device.type != "cpu":
        return m.truth(top)
    written = m.recorder.dispatch.lasting
    if type(m.recorder) is not Recorder or written and not m.world.writes_last:
        return m.truth(top)
    jumped = raises(frame, instruction.value)
    said = text_of(place_at(frame.code, frame.index - 1))  # the condition's: a jump stands for the statement
    truth = sense is not jumped
    if jumped == raises(frame, frame.index + 1):
        found = foreseen(m, value, said)
        if found is None:
            return m.truth(top)
        truth = found
        m.foreseen.add(said)
    condition = value if truth else m.torch_call(torch.logical_not, (value,), {})
    m.recorder.note(torch._assert_async, (condition, said))
    m.world.looked = True
    m.expected.append((m.step, refusal(), said))
    if written:
        m.late.add(said)
    return truth


def raises(frame: Frame, index: int) -> bool:
    """Whether the code from here on goes straight to a raise."""
    for instruction in frame.code.instructions[index : index + LONGEST]:
        if instruction.name == "RAISE_VARARGS":
            return True
        if not instruction.name.startswith(HARMLESS):
            return False
    return False


def refusal() -> Break:
    """The break where a branch depends on a tensor."""
    return Break("branch-on-tensor", "the condition is the value of a tensor",
                 "use torch.where, or move the branch out of the compiled function")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tensor that stands for whichever of two values a comparison chooses, and the step that chose.

    It serves while nobody can tell it from the one that is chosen: none of them is written afterwards.
    """

    tensor: FakeTensor
    of: tuple[Any, Any]
    step: int
    versions: tuple[int, ...]

    @classmethod
    def made(cls, m: Machine, tensor: FakeTensor, of: tuple[Any, Any]) -> Chosen:
        return cls(tensor, of, m.safe_step(), versions(m, (tensor, *of)))

    def serves(self, m: Machine, outputs: list[FakeTensor]) -> bool:
        """Whether it may stand in a graph with these outputs.

        It may be one of them where nothing may break and both others are tensors of the graph's own that
        nothing else leads to.
        """
        if versions(m, (self.tensor, *self.of)) != self.versions:
            return False
        others = [out for out in outputs if out is not self.tensor]
        if len(others) == len(outputs):
            return True
        lent = {id(memory_of(out)) for out in others}
        return m.whole and all(
            type(value) is FakeTensor and getattr(memory_of(value), "own", False)
            and id(memory_of(value)) not in lent for value in self.of
        )  # fmt: skip


def versions(m: Machine, values: Iterable[Any]) -> tuple[int, ...]:
    """How often each of the tensors among some values has been written to; inference tensors do not tell."""
    tensors = (value for value in values if type(value) is FakeTensor)
    return tuple(m.recorder.dispatch.writes if t.is_inference() else t._version for t in tensors)


def indistinct(m: Machine, *values: Any) -> None:
    """The program asks which object a value is: one that stands for either of two is neither."""
    for chosen in m.chosen:
        if any(value is chosen.tensor for value in values):
            raise Restart(chosen.step, refusal())
