"""Writes what pages take from the code: kinds of breaks into breaks.md, docstrings into interface.md."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import kiln

HERE = Path(__file__).parent


@dataclass
class Kind:
    """A kind of break, or of a graph that is not differentiated (`ahead`): what it means and what to do.

    `failing` and `fixed` are programs that define `f`, and `args` or `calls` for its arguments where it takes
    other than one tensor; `since` is the first version of Python that reads them.
    """

    name: str
    meaning: str
    remedy: str
    failing: str
    fixed: str
    ahead: bool = False
    since: str = ""


def kinds() -> dict[str, Kind]:
    """All kinds by name, read from kinds.toml."""
    text = (HERE / "kinds.toml").read_text(encoding="utf-8")
    return {name: Kind(name, **row) for name, row in tomllib.loads(text).items()}


GROUPS = {
    "Compiling": "compile disable disallow_in_graph allow_in_graph assume_constant_result graph_break "
    "skip_frame step_unsupported error_on_graph_break is_compiling set_stance reset config install uninstall",
    "Sizes that vary": "mark_dynamic mark_static",
    "Seeing what happened": "explain records report profile minify capture",
    "Backends": "register_backend list_backends lookup_backend aot",
    "Tensors without data": "fake measure",
    "Errors": "KilnError Break Skip Bug RecompileError",
}

#: Names that are not Kiln's own functions.
TEXTS = {
    "is_compiling": "Whether the caller is being captured; `torch.compiler.is_compiling` is the same.",
    "config": "The settings in force: `config.cache_limit` reads one, `config.patch(cache_limit=32)` puts "
    "others in force for a with block or a function. [Compiler](compiler.md#settings) lists them.",
}

HEAD = """\
# Interface

Every public name, as `help(kiln.name)` shows it. A name that does not exist, be it an argument, backend,
mode, option or stance, raises an error that lists what does. `kiln --help` describes the command."""

TAIL = """\
## Ops

`kiln.ops.table()` prints every op with its level, shape rule and expansion: [Levels of ops](levels.md)."""


def breaks() -> str:
    """The page of kinds: what stands between its marks is made of the table."""
    usual, ahead = ([kind for kind in kinds().values() if kind.ahead is which] for which in (False, True))
    parts = {
        "table": "\n".join(rows(usual)), "each": "\n\n".join(map(section, usual)),
        "ahead_table": "\n".join(rows(ahead)), "ahead": "\n\n".join(map(section, ahead)),
    }  # fmt: skip
    text = (HERE / "breaks.md").read_text()
    for name, part in parts.items():
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        text = f"{before}<!-- {name} -->\n\n{part}\n\n{rest[rest.index('<!-- end -->') :]}"
    return text


def rows(part: list[Kind]) -> list[str]:
    head = ["| kind | what happened | what to do |", "| --- | --- | --- |"]
    return head + [f"| [`{kind.name}`](#{kind.name}) | {kind.meaning} | {kind.remedy} |" for kind in part]


def section(kind: Kind) -> str:
    text = f"### {kind.name}\n\n{kind.meaning[0].upper()}{kind.meaning[1:]}. Remedy: {kind.remedy}."
    if kind.since:
        text += f" (Python {kind.since} and later.)"
    return (
        f"{text}\n\nBreaks:\n\n```python\n{kind.failing.strip()}\n```\n\n"
        f"Does not:\n\n```python\n{kind.fixed.strip()}\n```"
    )


def interface() -> str:
    """The page of public names."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [entry(name) for name in names.split()]
    parts.append(TAIL)
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> str:
    value = getattr(kiln, name)
    if name == "capture":
        value = sys.modules["kiln.api"].capture
    error = isinstance(value, type) and issubclass(value, Exception)
    signature = signed(value) if callable(value) and not error else ""
    text = TEXTS.get(name) or inspect.getdoc(value) or ""
    return f"### `{name}{signature}`\n\n{text}"


def signed(value: object) -> str:
    """Parameters without annotations, which the text names where they matter."""
    found = inspect.signature(value)
    shown = [p for p in found.parameters.values() if p.name != "unknown_arguments"]
    plain = [p.replace(annotation=p.empty) for p in shown]
    text = str(found.replace(parameters=plain, return_annotation=found.empty))
    return re.sub(r"<[^>]*>", "…", text)


PAGES = {"breaks.md": breaks, "interface.md": interface}

if __name__ == "__main__":
    for page, made in PAGES.items():
        (HERE / page).write_text(made())
