"""A driver of no GPU: it notes what is started, and runs the loops of each function on the CPU."""

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass

from kiln import _launch
from kiln.base.begun import Begun
from kiln.base.expressions import Expr
from kiln.fuse.nest import Kernel
from kiln.fuse.program import Fusing
from kiln.fuse.split import GRIDS
from kiln.generate import code
from kiln.generate.device import generate
from kiln.launch import cuda
from kiln.launch import program as programs
from kiln.launch.device import DevicePlanner, OnDevice
from kiln.launch.native import set_up

WORD, INT = ctypes.c_void_p, ctypes.c_int
POINTERS = ctypes.POINTER(WORD)
CONTEXT, STREAM = 0x1000, 0x2000
REFUSED = 719


@dataclass
class Start:
    """A start that was noted: the function, blocks, threads, the stream, and the words that it was given."""

    function: object
    blocks: int
    threads: int
    stream: int
    words: tuple


class Driver:
    """The entry points of the driver; `starts` is what was started, `error` what it answers."""

    apart = False

    def __init__(self):
        self.starts, self.functions, self.contexts, self.error = [], {}, [CONTEXT], 0
        kinds = {
            "stream": (INT, INT, POINTERS),
            "launch": (INT, WORD, *[ctypes.c_uint] * 7, WORD, POINTERS, WORD),
            "current": (INT, POINTERS),
            "push": (INT, WORD),
            "pop": (INT, POINTERS),
            "text": (INT, INT, ctypes.POINTER(ctypes.c_char_p)),
            "launch_by": (INT, WORD, WORD, POINTERS, WORD),
        }
        self.entries = {name: ctypes.CFUNCTYPE(*kind)(getattr(self, name)) for name, kind in kinds.items()}
        _launch.set_driver(*[ctypes.cast(entry, WORD).value for entry in self.entries.values()])

    def stream(self, index, found):
        found[0] = STREAM
        return 0

    def current(self, found):
        found[0] = self.contexts[-1]
        return 0

    def push(self, context):
        self.contexts.append(context)
        return 0

    def pop(self, found):
        self.contexts.pop()
        return 0

    def text(self, error, found):
        found[0] = b"an illegal memory access was encountered"
        return 0

    def launch_by(self, configuration, handle, parameters, extra):
        return REFUSED  # nothing is started early here

    def launch(self, handle, bx, by, bz, tx, ty, tz, shared, stream, parameters, extra):
        if self.error:
            return self.error
        start, nests = self.functions[handle]
        given = [g for g in start.given]
        places = [parameters[0] + 8 * i for i in range(len(given))] if start.table else parameters
        words = tuple(ctypes.c_uint64.from_address(places[i]).value for i in range(len(given)))
        self.starts.append(Start(start.function, bx, tx, stream, words))
        assert (self.contexts[-1], by, bz, ty, tz) == (CONTEXT, 1, 1, 1, 1)
        assert shared == start.function.shared
        for nest in nests:
            self.run(nest, dict(zip(given, words, strict=True)))
        return 0

    def run(self, nest, given):
        (made,) = code.generate([Kernel("k", ((nest,),))])
        assert not made.sizes
        buffers = (WORD * len(made.buffers))(*[given[b] for b in made.buffers])
        status, address = ctypes.c_int64(), made.code.wait().address(made.names[0])
        entry = ctypes.CFUNCTYPE(None, WORD, WORD, WORD, ctypes.c_int64, ctypes.c_int64)(address)
        entry(ctypes.addressof(buffers), None, ctypes.addressof(status), 0, made.tasks[0])
        assert not status.value

    def handles(self, starts, fixed):
        """Handles for the functions of a kernel; where sizes vary they run nothing."""
        found = {}
        for start in starts:
            found[start.function] = handle = 16 * (len(self.functions) + 1)
            self.functions[handle] = (start, start.nests if fixed else ())
        return found

    def plan(self, program, device, store=None):
        """The plan of a program in the memory of the CPU whose kernels this driver starts."""
        set_up()
        made = generate(program.kernels)
        kernels = []
        for kernel, starts in zip(program.kernels, made.starts, strict=True):
            fixed = not any(isinstance(g, Expr) for start in starts for g in start.given)

            def find(functions, kernel=kernel, fixed=fixed):
                (starts,) = generate([kernel], aligned=False).starts
                handles = self.handles(starts, fixed)
                return {
                    f: handles[s.function] for f in functions for s in starts if s.function.text == f.text
                }

            kernels.append(OnDevice(kernel, starts, self.handles(starts, fixed), find))
        return DevicePlanner(program, kernels, (0, 0, CONTEXT), apart=self.apart).plan()


@contextmanager
def pretended():
    """Programs for the CPU become plans that a driver of no GPU starts."""
    driver, targets, keeping = Driver(), dict(programs.TARGETS), programs.keeping

    def link(program, device, settings, dump):
        plan = driver.plan(program, device)
        return Begun(lambda: plan)

    programs.keeping = lambda *_: None  # these plans are not for the disk
    programs.TARGETS["cpu"] = (Fusing(GRIDS), link)
    try:
        yield driver
    finally:
        cuda.driver.cache_clear()  # the next one that asks for it puts the driver of a GPU in place again
        programs.TARGETS.update(targets)
        programs.keeping = keeping
