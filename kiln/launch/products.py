"""Products with what follows of each element as one kernel, made by Triton where it is installed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.fuse.nest import Buffer, Kernel
from kiln.generate.device import Function, Started
from kiln.generate.product import Product, Tile, source

ENTRY = "kiln_product"
WARP = 32
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
HIDDEN = 2  # parameters after those of the source: memory that such kernels do not ask for


@functools.cache
def triton() -> Any:
    """Triton; None where it is not installed, or cannot be loaded."""
    try:
        return importlib.import_module("triton")
    except Exception:
        return None


@dataclass(frozen=True, eq=False, slots=True)
class Written(Function):
    """A function whose text is PTX, with the machine code that Triton made of it."""

    binary: bytes = b""

    def ptx(self, capability: tuple[int, int]) -> str:
        return self.text


@dataclass(frozen=True, eq=False, slots=True)
class Template(Kernel):
    """A kernel that is not made of nests alone."""

    product: Product
    tile: Tile
    capability: tuple[int, int]

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        writes = self.product.nest.buffers()[1]
        return [b for b in self.product.buffers() if b not in writes], writes

    def function(self, aligned: bool = True) -> Function:
        return compiled(self.product, self.tile, self.capability, aligned)

    def started(self) -> Started:
        given = (*self.product.buffers(), *[None] * HIDDEN)
        made = self.function()
        return Started(made, self.product.blocks(self.tile), made.threads, given, ())


@functools.cache
def module_of(text: str) -> Any:
    """A module of this text, which Triton reads in a file."""
    name = f"{ENTRY}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def compiled(product: Product, tile: Tile, capability: tuple[int, int], aligned: bool = True) -> Function:
    """The PTX of a product's kernel, with what it is started with."""
    library = triton()
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    text = source(product, tile, ENTRY)
    buffers = product.buffers()
    asked = library.compiler.ASTSource(
        fn=getattr(module_of(text), ENTRY),
        signature={f"p{i}": POINTERS[buffer.dtype] for i, buffer in enumerate(buffers)},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(buffers))} if aligned else {},
    )
    made = library.compile(
        asked,
        target=target("cuda", capability[0] * 10 + capability[1], WARP),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    threads, shared = WARP * made.metadata.num_warps, made.metadata.shared
    return Written(ENTRY, made.asm["ptx"], threads, shared, binary=made.asm["cubin"])
