"""Plans for people: the steps with their slots, places in the arena, sizes and frees."""

from __future__ import annotations

from typing import Any

from kiln.base.dataclass import dataclass
from kiln.launch.memory import Lodging, rounded
from kiln.launch.numbers import Settled
from kiln.launch.sources import Sources


@dataclass(frozen=True, slots=True)
class Description:
    """What a plan was made of; it keeps the code alive, and `str` lists the steps."""

    steps: tuple[tuple[Any, ...], ...]
    lodged: tuple[tuple[int, Any], ...]
    outputs: tuple[Any, ...]
    names: tuple[str, ...]
    lodgings: tuple[Lodging, ...]
    settled: Settled
    numbers: tuple[Any, ...]
    kernels: tuple[str, ...]
    labels: tuple[str, ...]
    inputs: int
    sources: Sources
    constants: tuple[Any, ...] = ()
    code: Any = None

    def __str__(self) -> str:
        return "\n".join(_Text(self).lines())


class _Text:
    """The lines of a plan."""

    def __init__(self, plan: Description) -> None:
        self.plan = plan
        self.kernels, self.labels = iter(plan.kernels), iter(plan.labels)

    def lines(self) -> list[str]:
        plan = self.plan
        total = plan.numbers[-1]
        size = f"{total} bytes" if total is not None else "sizes vary"
        made = [f"plan: {len(plan.steps)} steps, {len(plan.names)} slots, arena of {size}"]
        for one in plan.lodgings:
            place = f"{one.offset:>8}" if one.offset >= 0 else "       ?"
            bytes_ = rounded(one.size) if type(one.size) is int else one.size
            made.append(f"  {place}  {one.name}: {bytes_} bytes, steps {one.first} to {one.last}")
        for i, step in enumerate(plan.steps):
            drops = "".join(f"; free {plan.names[slot]}" for slot in step[-1])
            made.append(f"{i:4}  {getattr(self, step[0])(step)}{drops}")
        made.append(f"      return {', '.join(map(self.argument, plan.outputs))}")
        return made

    def number(self, place: int) -> str:
        value = self.plan.numbers[place]
        return "?" if value is None else str(value)

    def form(self, form: tuple[int, int, int, int]) -> str:
        rank, shape, stride, _ = form
        sizes, steps = (", ".join(map(self.number, range(at, at + rank))) for at in (shape, stride))
        return f"[{sizes}] by [{steps}]"

    def buffer(self, ref: tuple[int, int]) -> str:
        return f"arena+{self.number(ref[1])}" if ref[0] else self.plan.names[ref[1]]

    def argument(self, argument: tuple[str, Any]) -> str:
        kind, value = argument
        if kind == "s":
            return str(self.plan.names[value])
        if kind == "p":
            return f"arena+{self.number(self.plan.lodged[value][0])}"
        if kind == "c":
            return "?"
        if kind == "o":
            return repr(value) if isinstance(value, SHOWN) else str(value)
        inner = ", ".join(map(self.argument, value))
        return f"[{inner}]" if kind == "l" else f"({inner})"

    def launch(self, step: tuple[Any, ...]) -> str:
        stages = ", ".join(f"{self.number(tasks)} tasks" for _, tasks, _ in step[1])
        return f"{next(self.kernels)}({', '.join(map(self.buffer, step[2]))}): {stages}"

    def grid(self, step: tuple[Any, ...]) -> str:
        starts = ", ".join(f"{self.number(blocks)} x {threads}" for _, threads, _, blocks, *_ in step[1])
        return f"{next(self.kernels)}({', '.join(map(self.buffer, step[2]))}): {starts} threads"

    def make(self, step: tuple[Any, ...]) -> str:
        return f"{self.plan.names[step[1]]} = empty {self.form(step[2])}"

    def show(self, step: tuple[Any, ...]) -> str:
        _, slot, source, form, ahead, _ = step
        names = self.plan.names
        return f"{names[slot]} = view of {names[source]} {self.form(form)} + {self.number(ahead)}"

    def call(self, step: tuple[Any, ...]) -> str:
        _, _, arguments, names, results, _, native, words, _, _ = step
        count = len(arguments) - len(names or ())
        given = [self.argument(a) for a in arguments[:count]]
        given += [f"{n}={self.argument(a)}" for n, a in zip(names or (), arguments[count:], strict=True)]
        made = [self.plan.names[slot] if slot >= 0 else "_" for slot, _, _ in results]
        if native and not results:
            kind, index = words[0][1][0]
            made = [self.argument(("p" if kind else "s", index))]
        way = "native " if native else ""
        return f"{', '.join(made)} = {way}{next(self.labels)}({', '.join(given)})"


SHOWN = (int, float, bool, str, list, tuple, type(None))
