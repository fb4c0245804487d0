"""Report: what was collected of a run as one HTML page, from a program or from the command."""

from __future__ import annotations

import atexit
import json
import linecache
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

from kiln.base.log import warn
from kiln.base.records import Records
from kiln.observe.calls import Call, Calls
from kiln.observe.drawing import Table, drawings, in_torch, op_lines, place
from kiln.observe.facts import Fact, facts

MOST_FILES = 40
LONGEST_FILE = 20_000
"""Lines of a file that a page holds."""


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
        write(self.path, self.records.copy(), self.calls, self.title)
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

    def __exit__(self, *error: object) -> None:
        self.close()


def write(path: Path, records: Records, calls: Calls, title: str, problems: Sequence[str] = ()) -> None:
    """Write the page of a run; `problems` are what a person must know before the rest."""
    data = page_data(records, calls.best, title)
    text = page({**data, "problems": [*problems, *data["problems"]]})
    path.write_text(text, encoding="utf-8", errors="replace")


def page_data(records: Records, calls: Mapping[str, Call], title: str) -> dict[str, Any]:
    """What the page shows of a run; it says so where a part cannot be made of the records."""
    problems: list[str] = []

    def part(what: str, make: Callable[..., Any], *given: Any, otherwise: Any = ()) -> Any:
        try:
            return make(*given)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            problems.append(f"{what} cannot be shown: the record is damaged ({why}).")
            return otherwise

    files = Table()
    made: Fact | None = part("What was captured", facts, records, True, otherwise=None)
    if made is None:
        return {"title": title, "about": about(), "problems": problems}
    graphs = part("The graphs", drawings, made, files)
    return {
        "title": title,
        "about": about(),
        "problems": problems,
        "summary": part("The summary", counts, made["summary"], len(made["breaks"])),
        "graphs": graphs,
        "paths": files.items,
        "files": part("The source", sources, made["graphs"], made["breaks"]),
        "breaks": made["breaks"],
        "fallbacks": made["fallbacks"],
        "recompiles": [{**one, "place": place(one["place"])} for one in made["recompiles"]],
        "timeline": {
            "compile": part("The stages", compile_lanes, made["stages"], graphs, otherwise={}),
            "call": part("The calls", call_lanes, calls, graphs, otherwise={}),
        },
    }


def about() -> str:
    """What ran, and when."""
    torch = getattr(sys.modules.get("torch"), "__version__", "?")
    kiln = getattr(sys.modules.get("kiln"), "__version__", "?")
    when = datetime.now().strftime("%-d %B %Y, %H:%M")
    return f"kiln {kiln}, torch {torch}, Python {platform.python_version()} on {platform.machine()}, {when}"


def counts(given: Fact, places: int) -> list[dict[str, Any]]:
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
        eager = given["eager_peak"]
        made.append({"label": "Memory planned", "value": given["peak"], "unit": "bytes", "eager": eager})
    return made


def sources(graphs: Sequence[Fact], breaks: Sequence[Fact]) -> list[dict[str, Any]]:
    """The files of the program, with the lines that graphs hold and the breaks; the user's own come first."""
    lines: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for number, graph in enumerate(graphs):
        for (file, line), count in op_lines(graph["operations"]).items():
            lines[file][line][number] = count
    stops: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(breaks):
        if one["place"] is not None:
            stops[one["place"]["file"]].append(number)
    own = [file for file in {**lines, **stops} if not in_torch(file) and linecache.getlines(file)]
    own.sort(key=lambda file: (installed(file), -len(lines[file]) - 50 * len(stops[file])))
    return [
        {
            "path": file, "library": installed(file), "breaks": stops[file],
            "lines": [line.rstrip("\n") for line in linecache.getlines(file)[:LONGEST_FILE]],
            "tints": {
                str(line): {"graphs": list(found), "ops": max(found.values())}
                for line, found in lines[file].items()
            },
        }
        for file in own[:MOST_FILES]
    ]  # fmt: skip


def installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def compile_lanes(stages: Sequence[Fact], graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
    """The steps of the quickest call of each graph; the kernels that are drawn learn what they took."""
    known = {
        f"{graph['title']} {view['name']}": (number, view)
        for number, graph in enumerate(graphs)
        for view in graph["views"]
    }
    lanes = []
    order = {title: number for number, title in enumerate(known)}
    for title, call in sorted(calls.items(), key=lambda item: order.get(item[0], len(order))):
        graph, view = known.get(title, (None, None))
        kernels = Counter[str]()
        spans = []
        for name, start, taken in call.spans():
            kind, _, rest = name.removeprefix("kiln.").partition(" ")
            label, _, ops = rest.partition(" ")
            span = {"label": label, "kind": kind, "start": start, "seconds": taken, "own": taken, "note": ops}
            if view is not None and kind == "kernel":
                number = launch(view, label, kernels)
                span |= {"graph": graph, "view": view["name"], "kernel": number}
                if number is not None:
                    view["kernels"][number]["seconds"] = taken
            spans.append(span)
        lanes.append({"name": title or "graph", "spans": spans, "seconds": call.seconds})
    return {"lanes": lanes}


def launch(view: Mapping[str, Any], name: str, seen: Counter[str]) -> int | None:
    """Which of the launches of a kernel comes next."""
    named = [i for i, kernel in enumerate(view["kernels"]) if kernel["name"].partition(".")[0] == name]
    seen[name] += 1
    return named[seen[name] - 1] if seen[name] <= len(named) else None


PARTS = Path(__file__).parent / "page"
SCRIPTS = ("dom", "layout", "graph", "paint", "views", "charts", "inspect", "main")
"""The scripts of the page, in the order in which they run."""

ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""What could end the script that holds the data, or be read as markup; JSON has these in strings only."""


def page(data: Mapping[str, Any]) -> str:
    """The text of the HTML file that shows `data`; sources and names in it may hold any text."""
    text = Template((PARTS / "page.html").read_text(encoding="utf-8"))
    return text.substitute(
        title=escape(str(data.get("title", "Kiln"))),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script="\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        data=written(data).translate(ESCAPED),
    )


def written(data: Any) -> str:
    """Data as JSON that a browser reads: it knows neither infinities nor objects of Python's."""
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(data), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value of dicts, lists, texts and finite numbers; what is none of these as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and isfinite(value):
        return value
    return str(value)
