"""PTX for what programs do, on a machine without a GPU: the loops are those of the CPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import kiln
from kiln.fuse.program import Fusing
from kiln.fuse.split import GRIDS
from kiln.generate.device import generate
from kiln.launch import program


@contextmanager
def kernels_noted():
    """The kernels that programs are fused into for a GPU while they are compiled for the CPU."""
    found, fuse, keeping = [], program.fuse, program.keeping

    def noted(graph, exact=False, fusing=Fusing()):
        found.extend(fuse(graph, exact, Fusing(GRIDS)).kernels)
        return fuse(graph, exact, fusing)

    program.fuse, program.keeping = noted, lambda *_: None
    try:
        yield found
    finally:
        program.fuse, program.keeping = fuse, keeping


def kernels_of(f, *inputs, dynamic=None):
    kiln.reset()
    with kernels_noted() as found:
        kiln.compile(f, fullgraph=True, dynamic=dynamic)(*inputs)
    return found


def device_of(f, *inputs, dynamic=None, aligned=True, clusters=True):
    """What is started on a GPU for a program, with its PTX."""
    made = generate(kernels_of(f, *inputs, dynamic=dynamic), aligned, clusters)
    return SimpleNamespace(text=made.ptx((9, 0)), starts=made.starts)
