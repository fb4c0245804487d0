"""Kernels and programs as text for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kiln.fuse.nest import Apply, Buffer, Computed, Const, Fold, Kernel, Load, Nest, Place, Term


def show_kernels(kernels: Iterable[Kernel]) -> str:
    """The loops of kernels."""
    return "\n\n".join(show_kernel(kernel) for kernel in kernels)


def show_kernel(kernel: Kernel) -> str:
    """A kernel: what it reads and writes, and the loops of its stages."""
    reads, writes = kernel.buffers()
    lines = [f"kernel {kernel.name}({buffers(reads)}) -> {buffers(writes)}"]
    for number, stage in enumerate(kernel.stages):
        if len(kernel.stages) > 1:
            lines.append(f"  stage {number}")
        for nest in stage:
            lines += show_nest(nest)
    return "\n".join(lines)


def buffers(given: Iterable[Buffer]) -> str:
    return ", ".join(f"{b.name}: {dtype(b.dtype)}" for b in given)


def dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def show_nest(nest: Nest) -> list[str]:
    """The loops of a nest, line by line; what is folded is marked with the phase it is folded in."""
    lines: list[str] = []
    for depth, axis in enumerate(nest.axes):
        mark = "fold" if axis.reduced else "for"
        lines.append(f"{'  ' * (depth + 1)}{mark} {axis.variable} in {axis.low} .. {axis.size}")
    pad = "  " * (len(nest.axes) + 1)
    names: dict[int, str] = {}

    def text(term: Term) -> str:
        if id(term) in names:
            return names[id(term)]
        if isinstance(term, Const):
            return repr(term.value)
        if isinstance(term, Place):
            return f"({term.index}){at(term.places)}"
        assert isinstance(term, Load)
        valid = f" if {text(term.valid)} else 0" if term.valid is not None else ""
        return f"{term.buffer.name}[{term.index}]{at(term.places)}{valid}"

    def at(places: tuple[Computed, ...]) -> str:
        if not places:
            return ""
        return " where " + ", ".join(f"{p.symbol} = {text(p.term)} below {p.size}" for p in places)

    for term in nest.terms():
        if isinstance(term, (Apply, Fold)):
            name = f"t{len(names)}"
            if isinstance(term, Apply):
                what = f"{term.op}({', '.join(map(text, term.args))})"
            else:
                where = f" at {text(term.place)}" if term.place is not None else ""
                what = f"{term.kind} of {text(term.value)}{where}, phase {term.phase}"
            names[id(term)] = name
            lines.append(f"{pad}{name}: {dtype(term.dtype)} = {what}")
    for store in nest.stores:
        when = f", phase {store.phase}" if store.phase else ""
        when = f", once a row{when}" if store.kept else when
        sign = "+=" if store.adds else "="
        lines.append(f"{pad}{store.buffer.name}[{store.index}] {sign} {text(store.value)}{when}")
    return lines
