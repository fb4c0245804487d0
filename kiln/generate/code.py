"""Kernels to machine code: all kernels of a program in one module."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.fuse.nest import Buffer, Kernel
from kiln.generate.cpu import Code, compile_text, host
from kiln.generate.kernel import NAME, Emitter

_ENTRY = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """A kernel in machine code: its address, the order of its buffers and sizes, its tasks."""

    kernel: Kernel
    address: int
    entry: Any
    buffers: tuple[Buffer, ...]
    sizes: tuple[Any, ...]
    tasks: Any
    code: Code


def generate(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Machine code for kernels, in their order; kernels that differ in names alone share it."""
    if not kernels:
        return []
    width = host().vector_bytes // 4
    emitters = [Emitter(kernel, width) for kernel in kernels]
    names: dict[str, str] = {}
    texts = [emitter.module.definitions() for emitter in emitters]
    for text in texts:
        names.setdefault(text, f"kernel{len(names)}")
    declared = {name: line for emitter in emitters for name, line in emitter.module.declarations().items()}
    code = compile_text(
        "\n".join(
            [*declared.values(), *(text.replace(f"@{NAME}", f"@{name}") for text, name in names.items())]
        )
    )
    made = []
    for emitter, text in zip(emitters, texts, strict=True):
        address = code.address(names[text])
        made.append(
            Compiled(
                emitter.kernel,
                address,
                _ENTRY(address),
                tuple(emitter.buffers),
                tuple(emitter.sizes),
                emitter.tasks(),
                code,
            )
        )
    return made
