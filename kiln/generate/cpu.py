"""The CPU target: machine code in this process, vectors of the host's width."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import llvmlite
import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class Host:
    """What the code generator knows of the processor."""

    name: str
    features: str
    vector_bytes: int


@functools.cache
def host() -> Host:
    """The processor of this machine; starts LLVM on the first call."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = llvm.get_host_cpu_features()
    wide = 64 if found.get("avx512f") else 32 if found.get("avx2") else 16
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

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


LEVEL = 2
"""How much LLVM optimises."""


def compile_text(text: str) -> Code:
    """Machine code for the functions of a module in LLVM's language."""
    return load(machine_code(text))


def depends_on() -> str:
    """What machine code depends on beside its text: the code generator and the processor."""
    known = host()
    version = ".".join(map(str, llvm.llvm_version_info))
    return f"llvmlite {llvmlite.__version__}, LLVM {version}, {known.name}, {known.features}, level {LEVEL}"


def machine_code(text: str) -> bytes:
    """An object file with the functions of a module."""
    machine = _machine()
    return bytes(machine.emit_object(_optimised(text, machine)))


def assembly(text: str) -> str:
    """The functions of a module in the processor's language."""
    machine = _machine()
    return str(machine.emit_assembly(_optimised(text, machine)))


def _optimised(text: str, machine: Any) -> Any:
    """A module as LLVM's passes leave it."""
    parsed = llvm.parse_assembly(text, llvm.create_context())
    parsed.triple = llvm.get_default_triple()
    tuning = llvm.create_pipeline_tuning_options(speed_level=LEVEL)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def load(code: bytes) -> Code:
    """The functions of an object file, ready to be called."""
    if b"__trunc" in code:  # among the names of what it calls
        conversions()
    return _loaded(code)


def _loaded(code: bytes) -> Code:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Code(engine)


def _machine() -> Any:
    known = host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=known.name, features=known.features, opt=LEVEL, reloc="pic", codemodel="jitdefault", jit=True
    )
