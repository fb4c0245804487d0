"""The CPU target: machine code in this process, vectors of the host's width."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite.binding import ffi

from kiln.base.dataclass import dataclass
from kiln.generate.llvm import THOROUGH


@dataclass(frozen=True, slots=True)
class Host:
    """What the code generator knows of the processor."""

    name: str
    features: str
    vector_bytes: int

    @property
    def reads_lanes_faster(self) -> bool:
        """Whether elements here and there in the nearest caches are read faster one by one than at once."""
        return self.name.startswith("znver")

    @property
    def halves_vectors(self) -> bool:
        """Whether vectors of 64 bytes go through the processor in two halves."""
        return self.name == "znver4"


@functools.cache
def host() -> Host:
    """The processor of this machine; starts LLVM on the first call."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = llvm.get_host_cpu_features()
    wide = 64 if found.get("avx512dq") else 32 if found.get("avx2") else 16
    features = found.flatten()
    if wide == 64:
        features += ",-prefer-256-bit"
    return Host(llvm.get_host_cpu_name(), features, wide)


#: Conversions that LLVM may call and that few C libraries define. `copysign` of a half type and a double is
#: one case.
CONVERSIONS = """
define half @kiln__truncdfhf2(double %x) {
  %f = fptrunc double %x to float
  %h = fptrunc float %f to half
  ret half %h
}
define bfloat @kiln__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %bias = add i32 %odd, 32767
  %sum = add i32 %bits, %bias
  %nan = fcmp uno float %x, %x
  %rounded = select i1 %nan, i32 2143289344, i32 %sum
  %top = lshr i32 %rounded, 16
  %short = trunc i32 %top to i16
  %h = bitcast i16 %short to bfloat
  ret bfloat %h
}
define bfloat @kiln__truncdfbf2(double %x) {
  %f = fptrunc double %x to float
  %h = call bfloat @kiln__truncsfbf2(float %f)
  ret bfloat %h
}
"""


@functools.cache
def conversions() -> Code:
    """The conversions in machine code, made known under the names that LLVM calls them by."""
    code = _loaded(machine_code(CONVERSIONS))
    for name in ("__truncdfhf2", "__truncsfbf2", "__truncdfbf2"):
        if not llvm.address_of_symbol(name):
            llvm.add_symbol(name, code.address(f"kiln{name}"))
    return code


class Code:
    """Machine code in memory; lives as long as this object."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines
        self.key = ""  # under which it is kept on disk

    def address(self, name: str) -> int:
        return next((found for one in self._engines if (found := int(one.get_function_address(name)))), 0)


LEVEL = 2
"""How much LLVM's code generator optimises."""
SIMPLIFIED = 1
"""How much its passes do before, on functions that need more than a few of them."""


def compile_text(text: str) -> Code:
    """Machine code for the functions of a module in LLVM's language."""
    return load(machine_code(text))


def depends_on() -> str:
    """What machine code depends on beside its text: the code generator and the processor."""
    known = host()
    version = ".".join(map(str, llvm.llvm_version_info))
    levels = f"levels {SIMPLIFIED} and few, {LEVEL}"
    return f"llvmlite {llvmlite.__version__}, LLVM {version}, {known.name}, {known.features}, {levels}"


def machine_code(text: str) -> bytes:
    """Object files, one after the other, with the functions of a module."""
    return joined([object_file(text)])


def assembly(text: str) -> str:
    """The functions of a module in the processor's language."""
    return _generated(text, binary=False).decode()


def object_file(text: str) -> bytes:
    """An object file with the functions of a module; modules may be compiled at the same time."""
    return _generated(text, binary=True)


def _generated(text: str, binary: bool) -> bytes:
    machine = _machine()
    with module(text) as parsed:
        _optimise(parsed, machine)
        return emitted(parsed, machine, binary)


@contextmanager
def module(text: str) -> Iterator[Any]:
    """A module in a context of its own, which go in this order; a collector would not keep to it."""
    with llvm.create_context() as context, llvm.parse_assembly(text, context) as parsed:
        yield parsed


def emitted(parsed: Any, machine: Any, binary: bool) -> bytes:
    """What a target's code generator makes of a module with a context of its own: an object file, or text."""
    with ffi.OutputString() as error:
        made = at_once("LLVMPY_TargetMachineEmitToMemory")(machine, parsed, int(binary), error)
        if not made:
            raise RuntimeError(str(error))
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(made), ffi.lib.LLVMPY_GetBufferSize(made))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(made)


SHARE = 1 << 14
"""Characters of text that are worth a thread."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def workers() -> ThreadPoolExecutor:
    """The threads that compile; who waits for one that has not begun helps."""
    return ThreadPoolExecutor(_cores(), "kiln")


os.register_at_fork(after_in_child=lambda: workers.cache_clear())


@dataclass(frozen=True, eq=False, slots=True)
class Making:
    """An object file that another thread makes, or the one that wants it where none has begun."""

    text: str
    future: Future[bytes]

    def result(self) -> bytes:
        return object_file(self.text) if self.future.cancel() else self.future.result()


def compiling(text: str) -> list[Making]:
    """The object files of a module, which other threads make meanwhile."""
    parts = parts_of(text, min(len(text) // SHARE + 1, _cores()))
    return [Making(part, workers().submit(object_file, part)) for part in parts]


def _optimise(parsed: Any, machine: Any) -> None:
    """Let LLVM's passes work on a module.

    Nests come as vectors and unrolled, with what is the same in all turns before their loops: a few passes
    do, where there is no memory that could be registers, and no loop to be unrolled.
    """
    parsed.triple = llvm.get_default_triple()
    tuning = llvm.create_pipeline_tuning_options(speed_level=SIMPLIFIED)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    with llvm.create_pass_builder(machine, tuning) as builder:
        usual, few = builder.getFunctionPassManager(), llvm.create_new_function_pass_manager()
        few.add_loop_rotate_pass()
        few.add_instruction_combine_pass()
        few.add_simplify_cfg_pass()
        for function in parsed.functions:
            if not function.is_declaration:
                passes = usual if THOROUGH in b" ".join(function.attributes).decode() else few
                at_once("LLVMPY_RunNewFunctionPassManager")(passes, function, builder)


def at_once(name: str) -> Any:
    """A function of LLVM's without llvmlite's lock: what works on a context of its own needs none."""
    locked = getattr(ffi.lib, name)
    return getattr(locked, "_cfn", locked)


def parts_of(text: str, count: int) -> list[str]:
    """A module as at most `count` modules of about the same length that call nothing of each other."""
    head, *bodies = text.replace("\ndefine ", "\n\0define ").split("\0")
    if count < 2 or len(bodies) < 2:
        return [text]
    group = {re.search(r"@(\w+)", body)[1]: [body] for body in bodies}  # type: ignore[index]
    for name, body in zip(list(group), bodies, strict=True):
        for called in set(re.findall(r"call \w+ @(\w+)", body)):
            mine, its = group[name], group.get(called)
            if its is not None and its is not mine:
                mine += its
                group.update((one, mine) for one, held in group.items() if held is its)
    parts: list[list[str]] = [[] for _ in range(count)]
    together = {id(held): held for held in group.values()}.values()
    for held in sorted(together, key=lambda held: -sum(map(len, held))):
        min(parts, key=lambda part: sum(map(len, part))).extend(held)
    return ["".join([head, *part]) for part in parts if part]


LENGTH = struct.Struct("<Q")


def joined(objects: Sequence[bytes]) -> bytes:
    """Object files as one piece of data."""
    return b"".join([LENGTH.pack(len(made)) + made for made in objects])


def separate(data: bytes) -> list[bytes]:
    """The object files in a piece of data."""
    made, place = [], 0
    while place < len(data):
        (length,) = LENGTH.unpack_from(data, place)
        made.append(data[place + LENGTH.size :][:length])
        place += LENGTH.size + length
    return made


def load(code: bytes) -> Code:
    """The functions of an object file, ready to be called."""
    if b"__trunc" in code:  # among the names of what it calls
        conversions()
    return _loaded(code)


def _loaded(code: bytes) -> Code:
    return Code(list(map(_engine, separate(code))))


def _engine(code: bytes) -> Any:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine() -> Any:
    known = host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=known.name, features=known.features, opt=LEVEL, reloc="pic", codemodel="jitdefault", jit=True
    )
