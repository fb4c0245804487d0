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
from kiln.generate.llvm import BRIEF, THOROUGH

#: Processors whose instruction that reads lanes here and there may not read ahead since 2023, when what it
#: read so was found to be seen by other programs: it waits, for stores past the caches, too.
WAITING = frozenset((
    "haswell broadwell skylake skylake-avx512 cascadelake cooperlake cannonlake "
    "icelake-client icelake-server tigerlake rocketlake"
).split())  # fmt: skip


@dataclass(frozen=True, slots=True)
class Host:
    """What the code generator knows of the processor."""

    name: str
    features: str
    vector_bytes: int

    @property
    def reads_lanes_faster(self) -> bool:
        """Whether elements here and there in the nearest caches are read faster one by one than at once."""
        return self.name.startswith("znver") or self.waits_for_lanes

    @property
    def waits_for_lanes(self) -> bool:
        """Whether the instruction that reads elements here and there waits for all that came before it."""
        return self.name in WAITING

    @property
    def halves_vectors(self) -> bool:
        """Whether vectors of 64 bytes go through the processor in two halves."""
        return self.name == "znver4"

    @property
    def finds_few_beside(self) -> bool:
        """Whether elementary functions of several vectors go faster written side by side, in any memory."""
        return self.name == "znver5"

    @property
    def reads_in_steps(self) -> bool:
        """Whether memory comes fastest in one place, where several instructions read whole lines in steps.

        Where much is computed lines have to be asked for before.
        """
        return self.name == "znver5" or self.foresees_little

    @property
    def is_called_slowly(self) -> bool:
        """Whether torch's library has wide vectors for others alone: small products are slow calls there."""
        return self.name in ("znver4", "znver5")

    @property
    def takes_lines_near(self) -> bool:
        """Whether lines that are asked for come fastest to the nearest cache, shortly before they are due."""
        return self.name == "znver5"

    @property
    def foresees_little(self) -> bool:
        """Whether memory waits for what does not come in order, or after a pause, unless it is asked for."""
        return self.name in ("skylake-avx512", "cascadelake", "cooperlake")


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

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.key = ""  # under which it is kept on disk

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


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
    levels = f"levels {SIMPLIFIED} after few, {LEVEL}, 0 where brief, static"
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
    try:
        tools = _idle.pop()
    except IndexError:
        tools = Tools()
    brief = _functions(text) == _functions(text, BRIEF)
    try:
        with module(text) as parsed:
            quick("LLVMPY_SetTarget")(parsed, tools.triple)
            if not brief:
                tools.optimise(parsed, _functions(text, THOROUGH))
            return emitted(parsed, tools.brief if brief else tools.machine, binary)
    finally:
        _idle.append(tools)


def _functions(text: str, marked: str = "") -> list[str]:
    """The names of a module's functions that bear a mark."""
    heads = [line for line in text.split("\n") if line.startswith("define ") and marked in line]
    return [line.partition("@")[2].partition("(")[0] for line in heads]


class Tools:
    """What LLVM makes machine code with, for one thread at a time.

    Nests come as vectors and unrolled, with what is the same in all turns before their loops: a few passes
    do, where there is no memory that could be registers, and no loop to be unrolled.
    """

    def __init__(self) -> None:
        self.triple, self.machine, self.brief = llvm.get_default_triple().encode(), _machine(), _machine(0)
        tuning = llvm.create_pipeline_tuning_options(speed_level=SIMPLIFIED)
        tuning.loop_vectorization = tuning.slp_vectorization = False
        self.builder = llvm.create_pass_builder(self.machine, tuning)
        self.usual, self.few = self.builder.getFunctionPassManager(), llvm.create_new_module_pass_manager()
        self.few.add_loop_rotate_pass()
        self.few.add_instruction_combine_pass()
        self.few.add_simplify_cfg_pass()

    def optimise(self, parsed: Any, thorough: Sequence[str]) -> None:
        """Let LLVM's passes work on a module, more of them on some of its functions."""
        at_once("LLVMPY_RunNewModulePassManager")(self.few, parsed, self.builder)
        for name in thorough:
            function = quick("LLVMPY_GetNamedFunction")(parsed, name.encode())
            at_once("LLVMPY_RunNewFunctionPassManager")(self.usual, function, self.builder)


_idle: list[Tools] = []
"""Tools that no thread uses."""


@contextmanager
def module(text: str) -> Iterator[Any]:
    """A module in a context of its own, which go in this order; a collector would not keep to it."""
    context, error = quick("LLVMPY_ContextCreate")(), ctypes.c_char_p()
    try:
        parsed = at_once("LLVMPY_ParseAssembly")(context, text.encode(), ctypes.byref(error))
        if not parsed:
            raise _failed(error, "LLVM IR parsing error\n")
        try:
            verify(parsed)  # code of a wrong module would end the process
            yield parsed
        finally:
            quick("LLVMPY_DisposeModule")(parsed)
    finally:
        quick("LLVMPY_ContextDispose")(context)


def verify(parsed: Any) -> None:
    """Raise what is wrong with a module."""
    error = ctypes.c_char_p()
    if quick("LLVMPY_VerifyModule")(parsed, ctypes.byref(error)):
        raise _failed(error)


def emitted(parsed: Any, machine: Any, binary: bool) -> bytes:
    """What a target's code generator makes of a module with a context of its own: an object file, or text."""
    error = ctypes.c_char_p()
    made = at_once("LLVMPY_TargetMachineEmitToMemory")(machine, parsed, int(binary), ctypes.byref(error))
    if not made:
        raise _failed(error)
    try:
        return ctypes.string_at(quick("LLVMPY_GetBufferStart")(made), quick("LLVMPY_GetBufferSize")(made))
    finally:
        quick("LLVMPY_DisposeMemoryBuffer")(made)


def _failed(error: ctypes.c_char_p, what: str = "") -> RuntimeError:
    told = (error.value or b"").decode()
    quick("LLVMPY_DisposeString")(error)
    return RuntimeError(what + told)


def at_once(name: str) -> Any:
    """A function of LLVM's without llvmlite's lock: what works on a context of its own needs none."""
    locked = getattr(ffi.lib, name)
    return getattr(locked, "_cfn", locked)


@functools.cache
def quick(name: str) -> Any:
    """A function of LLVM's that takes no time: it keeps Python's lock, which to get again would take some."""
    like = at_once(name)
    made = getattr(ctypes.PyDLL(ffi.lib._name, handle=ffi.lib._handle), name)
    made.argtypes, made.restype = like.argtypes, like.restype
    return made


SHARE = 1 << 14
"""Characters of text that are worth a thread."""


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def workers() -> ThreadPoolExecutor:
    """The threads that compile; who waits for one that has not begun helps."""
    return ThreadPoolExecutor(cores(), "kiln")


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
    parts = parts_of(text, min(len(text) // SHARE + 1, cores()))
    # Made in another thread, they would wait for Python's lock many times.
    _idle.extend([Tools() for _ in range(min(len(parts), cores()) - len(_idle))])
    return [Making(part, workers().submit(object_file, part)) for part in parts]


def parts_of(text: str, count: int) -> list[str]:
    """A module as at most `count` modules of about the same length, and one of the brief functions.

    They declare what they call of each other.
    """
    head, *bodies = f"\n{text}".replace("\ndefine ", "\n\0define ").split("\0")
    declared = dict(map(_declared, bodies))
    parts: list[list[str]] = [[] for _ in range(count + 1)]
    for body in sorted(bodies, key=len, reverse=True):
        shortest = min(parts[:count], key=lambda part: sum(map(len, part)))
        (parts[count] if BRIEF in body.partition("\n")[0] else shortest).append(body)

    def whole(part: list[str]) -> str:
        called = {name for body in part for name in re.findall(r"call \w+ @(\w+)", body)}
        called.difference_update(_functions("".join(part)))
        return "".join([head, *[f"{declared[name]}\n" for name in declared if name in called], *part])

    return [whole(part) for part in parts if part]


def _declared(body: str) -> tuple[str, str]:
    """The name of a function, and how others declare it."""
    found = re.match(r"define (.*@(\w+)\(.*\))", body)
    return (found[2], f"declare {found[1]}") if found else ("", "")


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
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    for one in separate(code):
        engine.add_object_file(llvm.ObjectFileRef.from_data(one))
    engine.finalize_object()
    return Code(engine)


def _machine(level: int = LEVEL) -> Any:
    known = host()
    # Object files that are loaded together have no table of addresses in common, which others would ask for.
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=known.name, features=known.features, opt=level, reloc="static", codemodel="jitdefault", jit=True
    )
