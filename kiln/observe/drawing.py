"""Drawings: graphs as the page draws them, small: nodes refer to tables of module paths, places and texts."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kiln.observe.facts import Fact

#: Names that begin with an underscore, and sentences on classes and functions.
PLUMBING = re.compile(r"(^|\W)_\w|as the class defines it|of its own$|has the code and")

LONGEST = 60_000
"""Characters of a kernel's code that a page holds."""

TITLES = {"ll": "LLVM", "ptx": "PTX"}
DRAWN = {"attribute": "parameter", "call": "op"}
ENDS = frozenset({"input", "constant", "output"})
NAMED = ENDS | {"parameter", "saved"}
"""The kinds of nodes that are shown by their own names, not by those of ops."""


class Table:
    """Numbers for things, each kept once, in the order in which they come."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._known: dict[Any, int] = {}

    def add(self, key: Any, item: Any = None) -> int:
        """The number of a thing; `item` is what stands for it where that is not the key."""
        if key not in self._known:
            self._known[key] = len(self.items)
            self.items.append(key if item is None else item)
        return self._known[key]


def drawings(facts: Fact, files: Table) -> list[dict[str, Any]]:
    """The graphs of a run, each in its forms: as captured, and each half in primitives with its kernels."""
    return [Drawing(facts, graph, files).drawn() for graph in facts["graphs"]]


class Drawing:
    """One graph being drawn."""

    def __init__(self, facts: Fact, graph: Fact, files: Table) -> None:
        self.facts, self.graph, self.files = facts, graph, files
        self.ops = {op["name"]: op for op in graph["operations"]}

    def drawn(self) -> dict[str, Any]:
        """The graph with its forms."""
        graph, name = self.graph, self.graph["name"]
        halves = [self.half(one) for one in self.facts["values"] if one["graph"] == name]
        forms = [*halves, self.captured(halves[0])] if halves else []
        if not halves and graph["operations"]:
            forms = [self.captured(None)]
        return {
            "title": name, "region": graph["region"], "place": place(graph["start"]),
            "end": place(graph["end"]), "ops": graph["ops"], "inputs": graph["inputs"], "views": forms,
            "guards": [
                {"text": one["text"], "place": place(one["place"]), "inside": inside(one)}
                for one in graph["guards"]
            ],
            "missing": "" if forms else "Its nodes were not recorded: nobody collected when it was captured.",
        }  # fmt: skip

    def captured(self, computed: dict[str, Any] | None) -> dict[str, Any]:
        """The graph as it was captured; its kernels are those of a form `like` which it is computed."""
        form = Form("captured", "Captured", self.files)
        launches: dict[str, Counter[int]] = {}
        for node in computed["nodes"] if computed else ():
            if node["g"] >= 0 and node.get("f"):
                launches.setdefault(node["f"], Counter())[node["g"]] += 1
        for op in self.graph["operations"]:
            launch = launches[op["name"]].most_common(1)[0][0] if op["name"] in launches else -1
            kind = DRAWN.get(op["kind"], op["kind"])
            if op["calls"] and launch < 0:
                kind = "call"
            label = op["op"] if op["kind"] == "call" else op["name"]
            path = [] if kind in ENDS else parts(op["module"])
            form.node(op["name"], label, kind, op["inputs"], op["spec"], path, op["stack"], launch)
        made = form.drawn(self.text("", "captured"))
        return {**made, "like": computed["name"]} if computed else made

    def half(self, half: Fact) -> dict[str, Any]:
        """A half in primitives; those of one captured op are a module of their own."""
        name = half["half"]
        form = Form(name, name.capitalize() or "Compiled", self.files)
        key = self.graph["name"], name
        plan = next((one for one in self.facts["plans"] if (one["graph"], one["half"]) == key), None)
        launches = self.launches(form, plan, name)
        sizes = Counter(value["origin"] for value in half["values"] if value["kind"] not in ENDS)
        for value in half["values"]:
            op = self.ops.get(value["origin"] or value["name"])
            kind, path = value["kind"], parts(op["module"]) if op else []
            if kind == "input" and op:
                kind = "saved" if value["origin"] else DRAWN.get(op["kind"], "input")
            elif op and sizes[value["origin"]] > 1:
                path = [*path, op["name"]]
            label = value["name"] if kind in NAMED else value["op"]
            path = [] if kind == "input" else path
            form.node(value["name"], label, kind, value["inputs"], value["spec"], path,
                      op["stack"] if op else [], launches.get(value["step"], -1), value["call"],
                      value["origin"])  # fmt: skip
        made = form.drawn(self.text(name, "prims"))
        if plan is not None:
            steps = max([len(plan["steps"]), *(one["last"] + 1 for one in half["lodged"])])
            made["memory"] = {
                "arena": plan["arena"], "peak": plan["peak"], "eager": plan["eager_peak"], "steps": steps,
                "values": half["lodged"], "alive": [step["bytes"] for step in plan["steps"]],
                "running": plan["eager"],
            }  # fmt: skip
        return made

    def launches(self, form: Form, plan: Fact | None, half: str) -> dict[int, int]:
        """For each step of a plan that runs a kernel its number in the drawing; a kernel may run often."""
        kernels = {one["id"]: one for one in self.facts["kernels"] if one["graph"] == self.graph["name"]}
        key = self.graph["name"], half
        texts = [one for one in self.facts["texts"] if (one["graph"], one["half"]) == key]
        functions = {one["language"]: split(one) for one in texts if one["language"] in TITLES}
        numbers: dict[int, int] = {}
        for number, step in enumerate(plan["steps"] if plan else ()):
            kernel = kernels.get(step["kernel"])
            if kernel is not None:
                numbers[number] = len(form.kernels)
                form.kernel(kernel, functions)
        return numbers

    def text(self, half: str, stage: str) -> str:
        wanted = self.graph["name"], half, stage
        texts = {(one["graph"], one["half"], one["stage"]): one["text"] for one in self.facts["texts"]}
        return str(texts.get(wanted, ""))


class Form:
    """One form of a graph in the making."""

    def __init__(self, name: str, label: str, files: Table) -> None:
        self.name, self.label, self.files = name, label, files
        self.nodes: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}
        self.kernels: list[dict[str, Any]] = []
        self.paths, self.places, self.codes = Table(), Table(), Table()

    def node(
        self, name: str, op: str, kind: str, inputs: Iterable[str], spec: str, path: Sequence[str],
        stack: Sequence[Fact], launch: int, call: str = "", origin: str = "",
    ) -> None:  # fmt: skip
        """Add a node after those that it reads."""
        self.numbers[name] = len(self.nodes)
        where = tuple([(self.files.add(one["file"]), one["line"], one["function"]) for one in stack])
        made = {
            "n": name, "o": op, "k": kind, "s": spec, "p": self.paths.add(tuple(path), list(path)),
            "w": self.places.add(where, list(map(list, where))), "g": launch,
            "i": [self.numbers[one] for one in inputs if one in self.numbers],
        }  # fmt: skip
        self.nodes.append({**made, **({"a": call} if call else {}), **({"f": origin} if origin else {})})

    def kernel(self, kernel: Fact, functions: dict[str, dict[str, str]]) -> None:
        """Add a launch of a kernel; its ops are counted when all nodes are there."""
        codes = [self.codes.add(("Loops", kernel["nest"]), {"title": "Loops", "text": kernel["nest"]})]
        for language, known in functions.items():
            text = code_of(kernel["functions"], known)
            if text:
                codes.append(self.codes.add((language, text), {"title": TITLES[language], "text": text}))
        self.kernels.append({
            "name": kernel["name"], "id": kernel["id"], "device": kernel["device"], "ops": 0,
            "what": ", ".join(dict.fromkeys(one["op"].rpartition(".")[2] for one in kernel["fused"])),
            "reads": kernel["reads"], "writes": kernel["writes"], "bytes": kernel["reads"] + kernel["writes"],
            "codes": codes,
        })  # fmt: skip

    def drawn(self, text: str) -> dict[str, Any]:
        """The form, and beside it its graph as a program."""
        counts = Counter(node["g"] for node in self.nodes)
        for number, kernel in enumerate(self.kernels):
            kernel["ops"] = counts[number]
        return {
            "name": self.name, "label": self.label, "nodes": self.nodes, "paths": self.paths.items,
            "places": self.places.items, "kernels": self.kernels, "codes": self.codes.items, "code": text,
        }  # fmt: skip


def place(fact: Fact | None) -> dict[str, Any] | None:
    """A place without its text."""
    if fact is None:
        return None
    return {"file": fact["file"], "line": fact["line"], "function": fact["function"]}


def inside(guard: Fact) -> bool:
    """Whether a guard is on how Python and torch call things: hooks, classes, what code of torch's reads."""
    if " tensor " in guard["text"]:
        return False
    at = guard["place"]
    return bool(PLUMBING.search(guard["text"])) or at is not None and in_torch(at["file"])


def in_torch(file: str) -> bool:
    """Whether a file is torch's own, or Kiln's."""
    homes = (str(getattr(sys.modules.get(name), "__path__", [" "])[0]) for name in ("torch", "kiln"))
    return any(file.startswith(home + os.sep) for home in homes)


def parts(module: str) -> list[str]:
    return module.split(".") if module else []


def split(text: Fact) -> dict[str, str]:
    """The functions of a module by name: of LLVM's language, or of PTX."""
    found: dict[str, str] = {}
    lines: list[str] = []
    name = ""
    for line in text["text"].splitlines():
        if not name and line.startswith(("define ", ".visible .entry ", ".func ")):
            name = line.partition("(")[0].replace("@", " ").split()[-1]
        if name:
            lines.append(line)
        if name and line == "}":
            found[name] = "\n".join(lines)
            name, lines = "", []
    return found


def code_of(names: Sequence[str], functions: dict[str, str]) -> str:
    """The text of functions and of those of the module that they call."""
    todo, found = list(reversed(names)), dict[str, str]()
    while todo:
        name = todo.pop()
        if name in found or name not in functions:
            continue
        found[name] = functions[name]
        called = (part.partition("(")[0] for part in functions[name].split("@")[1:])
        todo += [one for one in called if one in functions and one not in found]
    text = "\n\n".join(found.values())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n… {len(text) - LONGEST} more characters"


def op_lines(ops: Iterable[Fact]) -> Counter[tuple[str, int]]:
    """How many ops of a graph each line of the program stands for, in all frames of their stacks."""
    lines: Counter[tuple[str, int]] = Counter()
    for op in ops:
        if op["kind"] == "call":
            lines.update({(one["file"], one["line"]) for one in op["stack"]})
    return lines
