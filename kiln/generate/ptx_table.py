"""One kernel for many nests of one body: a block finds its own in a table, the parameter of the kernel."""

from __future__ import annotations

from kiln.fuse.nest import Nest
from kiln.generate.grid import power_of_two
from kiln.generate.llvm import I32, I64, PTR, Value
from kiln.generate.ptx import GridEmitter

WORD = 8
#: Bytes of a kernel's parameters at most, from this version of PTX on; and those that all versions take.
LARGEST, LEAST_VERSION, SMALL = 32764, 81, 4096


class TableEmitter(GridEmitter):
    """Writes nests of one body, of any lengths, as one kernel: `void ([words x i64])`.

    An entry has the number of the first block of its nest, the addresses of its buffers, and its sizes.
    `entries` is a power of two; entries that are left over start after the last block.
    """

    def __init__(self, nest: Nest, aligned: bool, entries: int) -> None:
        self.entries = entries
        super().__init__(nest, aligned)

    @property
    def words(self) -> int:
        """The words of an entry."""
        return 1 + len(self.buffers) + len(self.sizes)

    def locate(self) -> None:
        fn, words = self.fn, self.words
        fn.takes(f"ptr byval([{self.entries * words} x i64]) align {WORD} %table")
        table = Value(fn, "%table", PTR)
        number = self.unsigned(self.special("ctaid.x")).to(I64)
        place, step = fn.constant(0, I64), self.entries // 2
        while step:
            later = place + step
            first = fn.load(fn.at(table, later * words, I64), I64)
            place = (first <= number).where(later, place)
            step //= 2
        entry = fn.at(table, place * words, I64)
        self.thread = self.special("tid.x")
        self.block = (number - fn.load(entry, I64)).to(I32)
        for i, buffer in enumerate(self.buffers):
            self.pointers[buffer] = fn.load(fn.at(entry, 1 + i, I64), PTR)
        for i, size in enumerate(self.sizes):
            self.variables[size] = fn.load(fn.at(entry, 1 + len(self.buffers) + i, I64), I64)

    def store_all(self) -> None:
        for store in self.nest.stores:  # nothing says that stores leave alone what is still to be read
            self.value(store.value)
        super().store_all()


def most_entries(words: int) -> int:
    """How many nests a table takes at most, a power of two, where an entry has so many words."""
    return power_of_two(LARGEST // (words * WORD) + 1) // 2
