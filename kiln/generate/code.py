"""Kernels to machine code: all kernels of a program in one module."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.fuse.nest import Buffer, Kernel
from kiln.generate.cpu import Code, compile_module, host
from kiln.generate.kernel import Emitter
from kiln.generate.llvm import Module

_ENTRY = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """A kernel in machine code: its address, the order of its buffers and sizes, and how many tasks it has."""

    kernel: Kernel
    address: int
    entry: Any
    buffers: tuple[Buffer, ...]
    sizes: tuple[Any, ...]
    tasks: Any
    code: Code


def generate(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Machine code for kernels, in their order."""
    if not kernels:
        return []
    module = Module()
    width = host().vector_bytes // 4
    emitters = [Emitter(module, kernel, width) for kernel in kernels]
    for emitter in emitters:
        emitter.emit()
    code = compile_module(module)
    made = []
    for emitter in emitters:
        address = code.address(emitter.kernel.name)
        made.append(
            Compiled(emitter.kernel, address, _ENTRY(address), tuple(emitter.buffers), tuple(emitter.sizes),
                     emitter.tasks(), code)  # fmt: skip
        )
    return made
