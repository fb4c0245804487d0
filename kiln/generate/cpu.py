"""The CPU target: machine code in this process, vectors of the host's width."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

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


class Code:
    """Machine code in memory; lives as long as this object."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def compile_text(text: str, level: int = 2) -> Code:
    """Machine code for the functions of a module in LLVM's language."""
    known = host()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=known.name, features=known.features, opt=level, reloc="pic", codemodel="jitdefault", jit=True
    )
    parsed = llvm.parse_assembly(text)
    parsed.triple = llvm.get_default_triple()
    tuning = llvm.create_pipeline_tuning_options(speed_level=level)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return Code(engine)


def callable_at(address: int, *arguments: Any) -> Any:
    """A ctypes function for code at this address."""
    return ctypes.CFUNCTYPE(None, *arguments)(address)
