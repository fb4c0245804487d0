"""Writes the pages that are made of the code: breaks.md of the table of kinds, interface.md of the docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import kiln
from kiln.base.kinds import Kind, kinds

HERE = Path(__file__).parent

GROUPS = {
    "Compiling": "compile disable disallow_in_graph allow_in_graph assume_constant_result graph_break skip_frame "
    "step_unsupported error_on_graph_break is_compiling set_stance reset config install uninstall",
    "Sizes that vary": "mark_dynamic mark_static",
    "Seeing what happened": "explain records report profile minify capture",
    "Backends": "register_backend list_backends lookup_backend aot",
    "Tensors without data": "fake measure",
    "Errors": "KilnError Break Skip Bug RecompileError",
}

BREAKS = '''\
# Why did it break

A graph ends where Python has to go on by itself: a branch on data, a print, code that cannot be seen into. The program does what it
does in eager; what is lost is speed. Each break has a kind (a stable id), a place, a reason and a remedy: `kiln.explain(f)(*args)` and `kiln explain script.py` list them, `KILN_LOG=breaks`
logs each once, `fullgraph=True` raises the first. Code around a break stays captured: the graph before it, the callers' graphs, and the rest, which goes on
in a resume function.

This page is made of the table in `kiln/base/kinds.toml`; each program on it is run by the tests. Programs are called with `args`, or with `torch.ones(3)`.

{table}

An exception that leaves the function is not a break: the graph before it runs, then the raising code runs in Python, so that type, message
and traceback are eager's. An op that raises only when it runs (an index out of range, a singular matrix) ends its graph; where the graph has written nothing, the frame
runs again in Python, so that handlers, `with` blocks and pending writes behave as in eager.

## Each kind

{each}

## Graphs that are not differentiated ahead of time

A backend that differentiates graphs (`kiln`, `aot_eager`, `kiln.aot`) leaves some as they were captured: they run op by op, as with `eager`, with one line in the log.

{ahead_table}

{ahead}

## Decisions that a program can notice

- **Warnings** (`warnings.warn`) inside captured code are given once, while capturing; **logging** calls are dropped.
- **Modules** are known by identity. A second instance along the same path makes one more entry that serves every instance of that class.
- **Loops** that break in every turn are cut at the loop's head; a loop whose later turns do not break goes on as one graph.
- **Numbers and strings** from outside are constants of a graph, guarded by value. At most `config.cache_limit` entries are kept; then the
  function runs in Python, with one warning that names the guard that keeps failing.
- **`functools.lru_cache`**: called with constants the cache itself answers; otherwise the function is captured as if the cache had missed.
- **`torch.utils.checkpoint`**: the function is captured in place; backends that differentiate compute its values again in the backward pass.
- **Custom `autograd.Function`s** are one node; their forward and backward run as they are.
'''


def breaks() -> str:
    """The page of kinds."""
    both = [[kind for kind in kinds().values() if kind.ahead is ahead] for ahead in (False, True)]
    tables, texts = (["\n".join(rows(part)) for part in both], ["\n\n".join(map(section, part)) for part in both])
    return BREAKS.format(table=tables[0], each=texts[0], ahead_table=tables[1], ahead=texts[1])


def rows(part: list[Kind]) -> list[str]:
    head = ["| kind | what happened | what to do |", "| --- | --- | --- |"]
    return head + [f"| [`{kind.name}`](#{kind.name}) | {kind.meaning} | {kind.remedy} |" for kind in part]


def section(kind: Kind) -> str:
    text = f"### {kind.name}\n\n{kind.meaning[0].upper()}{kind.meaning[1:]}. Remedy: {kind.remedy}."
    if not kind.failing:
        return text + " No short program leads here."
    since = f" (Python {kind.python} and later)" if kind.python else ""
    return (
        f"{text}\n\nBreaks{since}:\n\n```python\n{kind.failing.strip()}\n```\n\n"
        f"Does not:\n\n```python\n{kind.fixed.strip()}\n```"
    )


def interface() -> str:
    """The page of public names."""
    parts = ["# Interface\n\nEvery public name, as `help(kiln.name)` shows it. A name that does not exist, be it an argument, "
             "backend, mode, option or stance, raises an error that lists what does. The command is described by `kiln --help`."]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [entry(name) for name in names.split()]
    parts.append("## Ops\n\n`kiln.ops.table()` prints every op with its level, shape rule and expansion: [Levels of ops](levels.md).")
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> str:
    value = getattr(kiln, name)
    if name == "capture":
        value = sys.modules["kiln.api"].capture
    signature = "" if not callable(value) or isinstance(value, type) and issubclass(value, Exception) else signed(value)
    text = TEXTS.get(name) or inspect.getdoc(value) or ""
    return f"### `{name}{signature}`\n\n{text}"


def signed(value: object) -> str:
    """Parameters without annotations, which the text names where they matter."""
    found = inspect.signature(value)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "unknown_arguments"]
    text = str(found.replace(parameters=plain, return_annotation=found.empty))
    return re.sub(r"<[^>]*>", "…", text)


#: Names that are not Kiln's own functions.
TEXTS = {
    "is_compiling": "Whether the caller is being captured; `torch.compiler.is_compiling` is the same function.",
    "config": "The settings in force: `config.cache_limit` reads one, `config.patch(cache_limit=32)` puts others in force for a "
    "with block or a function. [Compiler](compiler.md#settings) lists them.",
}

PAGES = {"breaks.md": breaks, "interface.md": interface}

if __name__ == "__main__":
    for page, made in PAGES.items():
        (HERE / page).write_text(made())
