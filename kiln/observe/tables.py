"""Tables: facts for a person at a terminal."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kiln.observe.facts import Fact
from kiln.observe.roofline import Line

WIDTH = 110
"""Columns of what is shown where no terminal says how many it has."""
ROWS, TALL = 40, 16
"""Rows of a table, and of one whose rows take several lines; what is beyond is counted."""
PACKAGES = f"site-packages{os.sep}"
SHOWN = 8
"""Values of a history, ops of a kernel."""


def counted(n: int, noun: str) -> str:
    """A count with its noun: "1 graph", "2 graphs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def summary(facts: Fact) -> str:
    """One line of counts."""
    s = facts["summary"]
    counts = [counted(s["graphs"], "graph"), counted(s["ops"], "op")]
    if s["outside"]:
        share = min(s["share"], 0.99)
        counts[-1] += f" ({share:.0%} of the operations)"
    counts.append(counted(s["breaks"], "break"))
    if s["recompiles"]:
        counts.append(counted(s["recompiles"], "recompile"))
    if s["fallbacks"]:
        counts.append(f"{counted(s['fallbacks'], 'fallback')} to eager")
    if s["kernels"]:
        counts.append(counted(s["kernels"], "kernel"))
    if s["calls"]:
        counts.append(counted(s["calls"], "call") + " of eager kernels")
    return ", ".join(counts) + (f"; compiled in {s['seconds']:.2f} s" if s["seconds"] else "")


def text(facts: Fact) -> str:
    """The tables as plain text."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, no_color=True, highlight=False).print(shown(facts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def shown(facts: Fact) -> RenderableType:
    """Everything that is known, in sections; a section without content is left out."""
    parts: list[RenderableType] = [Text(summary(facts), style="bold")]
    for title, make in SECTIONS.items():
        content = make(facts)
        if content:
            parts += [Text(""), Text(title, style="bold cyan"), *content]
    return Group(*parts)


def graphs(facts: Fact) -> list[RenderableType]:
    rows = [
        (g["name"], str(g["ops"]), str(g["inputs"]), located(g["start"]), line_of(g["end"]))
        for g in facts["graphs"]
    ]
    return table(("graph", "ops", "inputs", "from", "to"), rows, right=(1, 2))


def breaks(facts: Fact) -> list[RenderableType]:
    return [Padding(block(lines), (0, 0, 0, 2)) for lines in map(break_lines, facts["breaks"])]


def break_lines(fact: Fact) -> list[tuple[str, str]]:
    """One break: kind and place, the line with carets, reason and remedy."""
    often = f", {fact['count']} times" if fact["count"] > 1 else ""
    where = fact["place"]["function"] if fact["place"] else fact["region"]
    lines = [("bold", f"[{fact['kind']}] {located(fact['place'])} in {where}{often}")]
    lines += code_lines(fact["place"])
    lines.append(("", f"reason: {fact['reason']}"))
    if fact["remedy"]:
        lines.append(("green", f"remedy: {fact['remedy']}"))
    return lines


def code_lines(place: Fact | None) -> list[tuple[str, str]]:
    if place is None or not place["text"]:
        return []
    lines = [("", f"    {place['text']}")]
    if place["width"]:
        lines.append(("red", "    " + " " * place["column"] + "^" * place["width"]))
    return lines


def recompiles(facts: Fact) -> list[RenderableType]:
    own = [fact for fact in facts["recompiles"] if not fact["follows"]]
    shown: list[RenderableType] = [Padding(block(recompile_lines(fact)), (0, 0, 0, 2)) for fact in own]
    rest = sum(fact["count"] for fact in facts["recompiles"] if fact["follows"])
    if rest:
        shown.append(Text(f"  and {counted(rest, 'time')} what goes on after breaks, with these"))
    return shown


def recompile_lines(fact: Fact) -> list[tuple[str, str]]:
    """One guard that failed: how often, the values, the line that reads it, the remedy."""
    lines = [("bold", f"{fact['region']} ({located(fact['function'])}): {counted(fact['count'], 'time')}")]
    lines.append(("", fact["guard"]))
    if fact["count"] > 1:
        values = [fact["changes"][0]["old"], *(change["new"] for change in fact["changes"])]
        more = " …" if len(values) > SHOWN else ""
        lines.append(("", f"values: {', '.join(values[:SHOWN])}{more}"))
    if fact["place"]:
        lines.append(("", f"read at {located(fact['place'])}"))
        lines += code_lines(fact["place"])
    if fact["limited"]:
        lines.append(("red", "the limit of entries is reached: it runs eagerly from now on"))
    lines.append(("green", f"remedy: {fact['remedy']}"))
    return lines


def fallbacks(facts: Fact) -> list[RenderableType]:
    found = []
    for fact in facts["fallbacks"]:
        file = f"; attach {fact['file']} to a report" if fact["file"] else ""
        found.append(Padding(Text(f"{fact['region']}: {fact['error']}{file}"), (0, 0, 0, 2)))
    return list(found)


def stages(facts: Fact) -> list[RenderableType]:
    own: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for stage in facts["stages"]:
        own[stage["stage"]] += stage["own"]
        runs[stage["stage"]] += 1
    whole = sum(own.values()) or 1.0
    rows = [
        (name, str(runs[name]), f"{spent * 1000:.1f} ms", f"{spent / whole:.0%}")
        for name, spent in own.most_common()
    ]
    return table(("stage", "runs", "time", "share"), rows, right=(1, 2, 3))


def kernels(facts: Fact) -> list[RenderableType]:
    """The kernels, those alike in one row, the ones that move most first."""
    alike: dict[object, list[Fact]] = {}
    for one in facts["kernels"]:
        key = one["graph"], one["half"], fused_text(one), one["reads"], one["writes"]
        alike.setdefault(key, []).append(one)
    rows = []
    for group in sorted(alike.values(), key=lambda group: -sum(map(moved, group))):
        first = group[0]
        name = first["id"] + (f" and {len(group) - 1} alike" if len(group) > 1 else "")
        launches = sum(one["launches"] for one in group)
        rows.append((name, fused_text(first), size(first["reads"]), size(first["writes"]), str(launches)))
    return table(("kernel", "fused", "reads", "writes", "launches"), rows, right=(2, 3, 4), most=TALL)


def moved(kernel: Fact) -> int:
    return int((kernel["reads"] + kernel["writes"]) * kernel["launches"])


def fused_text(kernel: Fact) -> str:
    """The ops of a kernel, and the lines that they stand on."""
    ops = [one["op"].rpartition(".")[2] for one in kernel["fused"]]
    counts = Counter(ops)
    names = [name if n == 1 else f"{n} {name}" for name, n in counts.items()]
    lines: dict[str, set[int]] = {}
    for one in kernel["fused"]:
        if one["place"] is not None:
            lines.setdefault(os.path.basename(one["place"]["file"]), set()).add(one["place"]["line"])
    where = [f"{file}:{span(sorted(found))}" for file, found in lines.items()]
    return shortened(names) + (f" ({shortened(where)})" if where else "")


def shortened(texts: Sequence[str]) -> str:
    more = f", … {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def span(numbers: Sequence[int]) -> str:
    """Numbers in order, neighbours as ranges: "3-5,9"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def memory(facts: Fact) -> list[RenderableType]:
    rows = []
    for plan in facts["plans"]:
        kinds = Counter(step["kind"] for step in plan["steps"])
        calls = kinds["native"] + kinds["python"]
        name = f"{plan['graph']} {plan['half']}"
        rows.append((name, size(plan["peak"]), size(plan["eager_peak"]), str(kinds["kernel"]), str(calls)))
    return table(("graph", "planned", "eager", "kernels", "eager calls"), rows, right=(1, 2, 3, 4))


def cache(facts: Fact) -> list[RenderableType]:
    counts = facts["cache"]
    if not any(counts.values()):
        return []
    return [Text(f"  {counts['hits']} found, {counts['misses']} not, {counts['written']} written")]


def roofline(lines: Sequence[Line]) -> RenderableType:
    """The kernels that were timed, the longest first."""
    rows = [
        (
            one["kernel"], ", ".join(one["fused"][:SHOWN]), size(one["bytes"]),
            f"{one['seconds'] * 1e6:.1f} µs", f"{one['bandwidth'] / 1e9:.1f} GB/s", f"{one['share']:.0%}",
            str(one["launches"]),
        )
        for one in lines
    ]  # fmt: skip
    titles = ("kernel", "fused", "bytes", "time", "bandwidth", "of a copy", "timed")
    shown = table(titles, rows, right=(2, 3, 4, 5, 6), most=TALL)
    return Group(Text(""), Text("Roofline", style="bold cyan"), *shown)


SECTIONS = {
    "Graphs": graphs,
    "Breaks": breaks,
    "Recompiles": recompiles,
    "Left to eager": fallbacks,
    "Time by stage": stages,
    "Kernels": kernels,
    "Memory beside inputs, at most": memory,
    "Disk cache": cache,
}


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = (), most: int = ROWS
) -> list[RenderableType]:
    """Rows below titles; nothing where there are none."""
    if not rows:
        return []
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, title in enumerate(titles):
        made.add_column(title, justify="right" if i in right else "left", overflow="fold")
    for row in rows[:most]:
        made.add_row(*map(Text, row))
    parts: list[RenderableType] = [Padding(made, (0, 0, 0, 2))]
    if len(rows) > most:
        parts.append(Text(f"  … and {len(rows) - most} more; --json gives all"))
    return parts


def block(lines: Iterable[tuple[str, str]]) -> Text:
    """Lines with their styles, the first at the margin."""
    made = Text()
    for i, (style, line) in enumerate(lines):
        made.append(("\n  " if i else "") + line, style=style)
    return made


def located(place: Fact | None) -> str:
    """A file and a line, the file relative to where we are when it lies below, or to where packages are."""
    if place is None:
        return "?"
    file = place["file"].removeprefix(os.getcwd() + os.sep)
    return f"{file.rpartition(PACKAGES)[2]}:{place['line']}"


def line_of(place: Fact | None) -> str:
    return f"{os.path.basename(place['file'])}:{place['line']}" if place else ""


def size(count: int) -> str:
    """A number of bytes for a person."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
