"""Report: what was collected of a run as one HTML page, from a program or from the command."""

from __future__ import annotations

import atexit
import linecache
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kiln.base.log import warn
from kiln.base.records import Records
from kiln.observe.calls import Call, Calls
from kiln.observe.document import page
from kiln.observe.drawing import Table, drawings, op_lines, place
from kiln.observe.facts import facts
from kiln.observe.shape import BreakFact, Facts, GraphFact, StageFact, SummaryFact

MOST_FILES = 40
LONGEST_FILE = 20_000
"""Lines of a file that a page holds."""

T = TypeVar("T")


def report(path: str | os.PathLike[str]) -> Report:
    """Collect what is compiled and run from here on, and write it as a page at `path`.

    The page is written when the program ends, or at the end of a block: `with kiln.report("report.html"):`.
    A program that is measured for a page runs a little slower.
    """
    return Report(path)


class Report:
    """A page that is being collected for; `write` writes what there is so far."""

    def __init__(self, path: str | os.PathLike[str], title: str = "") -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"the folder of the report does not exist: {self.path.parent}")
        self.title = title or os.path.basename(sys.argv[0] or "") or "program"
        self.records, self.calls = Records(), Calls()
        self._open, self._process = True, os.getpid()
        self.records.__enter__()
        self.calls.__enter__()
        atexit.register(self._leave)

    def write(self) -> Path:
        """Write the page of what was collected so far; gives its path."""
        text = page(page_data(self.records.copy(), self.calls.best, self.title))
        self.path.write_text(text, encoding="utf-8", errors="replace")
        return self.path

    def close(self) -> None:
        """Collect no more, and write the page."""
        if self._open:
            self.discard()
            self.write()

    def discard(self) -> None:
        """Collect no more, and write nothing."""
        self._open = False
        atexit.unregister(self._leave)
        self.calls.__exit__(None, None, None)
        self.records.__exit__(None, None, None)

    def _leave(self) -> None:
        if os.getpid() != self._process:  # a child that was forked off is not the program
            return
        try:
            self.close()
        except OSError as error:
            warn(f"the report was not written: {error}")

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def page_data(records: Records, calls: Mapping[str, Call], title: str) -> dict[str, Any]:
    """What the page shows of a run; a part that cannot be made of the records is left out, and the page says so."""
    problems: list[str] = []

    def part(what: str, make: Callable[[], T], otherwise: T) -> T:
        try:
            return make()
        except Exception as error:
            problems.append(f"{what} cannot be shown: the record is damaged ({type(error).__name__}: {error}).")
            return otherwise

    files = Table()
    told: Facts | None = part("What was captured", lambda: facts(records, texts=True), None)
    if told is None:
        return {"title": title, "about": about(), "problems": problems}
    made = told
    graphs: list[dict[str, Any]] = part("The graphs", lambda: drawings(made, files), [])
    return {
        "title": title,
        "about": about(),
        "problems": problems,
        "summary": part("The summary", lambda: counts(made["summary"], len(made["breaks"])), []),
        "graphs": graphs,
        "paths": files.items,
        "files": part("The source", lambda: sources(made["graphs"], made["breaks"]), []),
        "breaks": made["breaks"],
        "fallbacks": made["fallbacks"],
        "recompiles": [{**one, "place": place(one["place"])} for one in made["recompiles"]],
        "timeline": {
            "compile": part("The stages", lambda: compile_lanes(made["stages"], graphs), {}),
            "call": part("The calls", lambda: call_lanes(calls, graphs), {}),
        },
    }


def about() -> str:
    """What ran, and when."""
    torch = getattr(sys.modules.get("torch"), "__version__", "?")
    kiln = getattr(sys.modules.get("kiln"), "__version__", "?")
    when = datetime.now().strftime("%-d %B %Y, %H:%M")
    return f"kiln {kiln}, torch {torch}, Python {platform.python_version()} on {platform.machine()}, {when}"


def counts(given: SummaryFact, places: int) -> list[dict[str, Any]]:
    """The numbers at the top of the page."""
    made: list[dict[str, Any]] = [{"label": "Graphs", "value": given["graphs"]}]
    if given["ops"] + given["outside"]:
        note = f"{given['ops']} of {given['ops'] + given['outside']} operations"
        made.append({"label": "Captured", "value": f"{100 * given['share']:.0f} %", "note": note})
    made.append({"label": "Breaks", "value": places, "bad": places > 0})
    made.append({"label": "Recompiles", "value": given["recompiles"]})
    if given["fallbacks"]:
        made.append({"label": "Left to Python", "value": given["fallbacks"], "bad": True})
    made.append({"label": "Kernels", "value": given["kernels"], "note": f"and {given['calls']} eager calls"})
    made.append({"label": "Compiling took", "value": given["seconds"], "unit": "seconds"})
    if given["peak"]:
        made.append({"label": "Memory planned", "value": given["peak"], "unit": "bytes", "eager": given["eager_peak"]})
    return made


def sources(graphs: Sequence[GraphFact], breaks: Sequence[BreakFact]) -> list[dict[str, Any]]:
    """The files of the program with the lines that graphs hold and the breaks in them, those of most lines first."""
    lines: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for number, graph in enumerate(graphs):
        for (file, line), count in op_lines(graph["operations"]).items():
            lines[file][line][number] = count
    stops: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(breaks):
        if one["place"] is not None:
            stops[one["place"]["file"]].append(number)
    own = [file for file in dict.fromkeys((*lines, *stops)) if not in_torch(file) and linecache.getlines(file)]
    own.sort(key=lambda file: (installed(file), -len(lines[file]) - 50 * len(stops[file])))
    return [
        {
            "path": file, "library": installed(file), "breaks": stops[file],
            "lines": [line.rstrip("\n") for line in linecache.getlines(file)[:LONGEST_FILE]],
            "tints": {
                str(line): {"graphs": list(found), "ops": max(found.values())} for line, found in lines[file].items()
            },
        }
        for file in own[:MOST_FILES]
    ]  # fmt: skip


def in_torch(file: str) -> bool:
    """Whether a file is torch's own, or Kiln's."""
    homes = (str(getattr(sys.modules.get(name), "__path__", [" "])[0]) for name in ("torch", "kiln"))
    return any(file.startswith(home + os.sep) for home in homes)


def installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def compile_lanes(stages: Sequence[StageFact], graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The stages over time: for each graph as many lanes as stages contain each other."""
    numbers = {graph["title"]: number for number, graph in enumerate(graphs)}
    lanes: dict[tuple[str, int], list[dict[str, Any]]] = {}
    around: list[float] = []
    for one in stages:
        while around and around[-1] <= one["start"] + 1e-9:
            around.pop()
        spans = lanes.setdefault((one["graph"], len(around)), [])
        around.append(one["start"] + one["seconds"])
        label = f"{one['stage']} ({one['half']})" if one["half"] else one["stage"]
        spans.append({
            "label": label, "kind": one["stage"], "start": one["start"], "seconds": one["seconds"],
            "own": one["own"], "graph": numbers.get(one["graph"]),
        })  # fmt: skip
    order = {name: i for i, name in enumerate(dict.fromkeys(graph for graph, _ in lanes))}
    listed = sorted(lanes.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    seen: Counter[str] = Counter()
    made = []
    for (graph, _), spans in listed:
        made.append({"name": graph or "other", "inner": bool(seen[graph]), "spans": spans})
        seen[graph] += 1
    return {"lanes": made, "total": sum(one["own"] for one in stages)}


def call_lanes(calls: Mapping[str, Call], graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The steps of the quickest call of each graph."""
    known = {f"{graph['title']} {view['name']}": (number, view) for number, graph in enumerate(graphs) for view in graph["views"]}
    lanes = []
    for title, call in calls.items():
        graph, view = known.get(title, (None, None))
        kernels = Counter[str]()
        spans = []
        for name, start, taken in call.steps:
            kind, _, rest = name.removeprefix("kiln.").partition(" ")
            label, _, ops = rest.partition(" ")
            span = {"label": label, "kind": kind, "start": start, "seconds": taken, "own": taken, "note": ops}
            if view is not None and kind == "kernel":
                span |= {"graph": graph, "view": view["name"], "kernel": launch(view, label, kernels)}
            spans.append(span)
        lanes.append({"name": title or "graph", "spans": spans, "seconds": call.seconds})
    return {"lanes": lanes}


def launch(view: Mapping[str, Any], name: str, seen: Counter[str]) -> int | None:
    """Which of the launches of a kernel comes next."""
    found = [number for number, kernel in enumerate(view["kernels"]) if kernel["name"].partition(".")[0] == name]
    seen[name] += 1
    return found[seen[name] - 1] if seen[name] <= len(found) else None
