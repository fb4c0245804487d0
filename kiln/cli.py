"""The command `kiln`: what a person asks of an installation."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kiln import __version__
from kiln.base.options import config
from kiln.base.records import Records
from kiln.launch.cache import Cache, CacheRefused, folder, is_on

MORE = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True, add_completion=False, context_settings=MORE, pretty_exceptions_enable=False
)
cache = typer.Typer(no_args_is_help=True, context_settings=MORE)
app.add_typer(cache, name="cache", help="Show, check, export or clear the machine code that is kept on disk.")

#: Commands that hand what follows a script's name over to it.
SCRIPT = {**MORE, "allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
WIDTH = 110
"""Columns where no terminal says how many it has."""

Script = Annotated[str, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and what it is given.")]
Everything = Annotated[
    bool, typer.Option("--all", help="Compile the outermost calls of all modules, not compile calls alone.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def version(asked: bool) -> None:
    if asked:
        typer.echo(f"kiln {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print it.")]


@app.callback()
def main(shown: Version = False) -> None:
    """Kiln compiles ordinary PyTorch programs."""


@app.command(context_settings=SCRIPT)
def explain(
    context: typer.Context,
    script: Script,
    everything: Everything = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Time the kernels, against the bandwidth of a copy.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a script and tell what was captured, what broke and why, what recompiles, and what to change.

    Its compile calls go through Kiln; a script without any has its modules compiled, as with --all.
    Example: kiln explain train.py --epochs 1
    """
    records = Records()
    with _part("kiln.observe.calls").Calls(every=True) if roofline else nullcontext() as times:
        failed, code = _ran(script, context.args, everything or None, records, as_json)
    found = _part("kiln.observe.facts").facts(records)
    lines = _part("kiln.observe.roofline").lines(records, times) if roofline else []
    if as_json:
        typer.echo(json.dumps({"error": failed, **found, **({"roofline": lines} if roofline else {})}))
    elif failed is not None:
        _fail(failed)
    elif records.graphs or records.breaks or records.fallbacks:
        tables, console = _part("kiln.observe.tables"), _console()
        console.print(tables.shown(found))
        if roofline:
            console.print(tables.roofline(lines))
    else:
        typer.echo("nothing was compiled: the script calls neither torch.compile nor a module")
    raise typer.Exit(code)


@app.command(context_settings=SCRIPT)
def run(
    context: typer.Context, script: Script, everything: Everything = False, as_json: AsJson = False
) -> None:
    """Run a script with its compile calls answered by Kiln, and end with a line of what was done.

    The exit code is the script's. Example: kiln run --all train.py --epochs 1
    """
    records = Records(light=True)
    failed, code = _ran(script, context.args, everything, records, as_json)
    found = _part("kiln.observe.facts").facts(records)
    if as_json:
        typer.echo(json.dumps({"error": failed, "exit": code, **found["summary"]}))
    elif failed is not None:
        _fail(failed)
    else:
        typer.echo(f"kiln: {_part('kiln.observe.tables').summary(found)}", err=True)
    raise typer.Exit(code)


@app.command(context_settings=SCRIPT)
def report(
    context: typer.Context,
    script: Script,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page to write: report.html.")
    ] = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Run a script as explain does, and write a page of source, graphs, kernels, times and memory.

    The page is one file that needs no network. The exit code is 1 where the script fails; the page then
    shows how far it came. Example: kiln report train.py -o report.html
    """
    arguments = list(context.args)
    if output is None and arguments[:1] in (["-o"], ["--output"]) and len(arguments) > 1:
        output, arguments = Path(arguments[1]), arguments[2:]  # it may follow the script's name too
    to = output or Path("report.html")
    if not to.parent.is_dir():
        _fail(f"{to}: there is no folder {to.parent}")
    records = Records()
    with _part("kiln.observe.calls").Calls() as calls:
        failed, _ = _ran(script, arguments, everything or None, records, as_json)
    written = bool(records.totals) or failed is None
    if written:
        try:
            problems = [] if failed is None else [failed]
            _part("kiln.observe.report").write(to, records, calls, Path(script).name, problems)
        except OSError as error:
            _fail(f"{to}: {error.strerror or error}")
    found = _part("kiln.observe.facts").facts(records)
    if as_json:
        typer.echo(json.dumps({"error": failed, "file": str(to) if written else None, **found["summary"]}))
    elif written:
        typer.echo(f"{to}: {_part('kiln.observe.tables').summary(found)}")
    if failed is not None:
        _fail(failed)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Examine this machine: versions, processor, GPU, cache, and whether each part of Kiln works.

    The exit code is 1 where a part does not. Example: kiln doctor
    """
    try:
        findings = _part("kiln.doctor").examined()
    except ImportError as error:
        _fail(f"{error}; pip install --upgrade torchkiln")
    bad = [one for one in findings if one.ok is False]
    if as_json:
        shown = [{"part": o.part, "ok": o.ok, "found": o.found, "remedy": o.remedy} for o in findings]
        typer.echo(json.dumps({"kiln": __version__, "findings": shown}))
        raise typer.Exit(1 if bad else 0)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    marks = {True: ("ok", "green"), False: ("FAILS", "bold red"), None: ("-", "dim")}
    for one in findings:
        mark, style = marks[one.ok]
        remedy = f"\nremedy: {one.remedy}" if one.remedy and one.ok is False else ""
        table.add_row(one.part, Text(mark, style=style), Text(one.found + remedy, overflow="fold"))
    _console().print(Text(f"kiln {__version__}"), table)
    raise typer.Exit(1 if bad else 0)


@cache.command()
def show(as_json: AsJson = False) -> None:
    """Show where the cache is, how many entries it has and what they take.

    Example: kiln cache show --json
    """
    _, entries = _entries()
    time = datetime.fromtimestamp(entries[-1].used, UTC) if entries else None
    facts: dict[str, Any] = {
        "folder": str(folder()),
        "on": is_on(),
        "entries": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "limit": config.cache_bytes,
        "last_used": time.isoformat(timespec="seconds") if time else None,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("folder", facts["folder"] if facts["on"] else f"{facts['folder']} (off: KILN_CACHE)")
    table.add_row("entries", str(facts["entries"]))
    table.add_row("size", f"{_size(facts['bytes'])} of at most {_size(facts['limit'])}")
    table.add_row("last used", facts["last_used"] or "never")
    Console(soft_wrap=True).print(table)


@cache.command()
def check(as_json: AsJson = False) -> None:
    """Read every file and say which are damaged; the exit code is 1 if one is.

    Damaged files do no harm: they are misses. Example: kiln cache check
    """
    found, entries = _entries()
    faults = [str(entry.path) for entry in found.faults()] if found else []
    if as_json:
        typer.echo(json.dumps({"entries": len(entries), "damaged": faults}))
    else:
        typer.echo(f"{len(entries)} entries, {len(faults)} damaged")
        for path in faults:
            typer.echo(f"damaged: {path}")
    raise typer.Exit(1 if faults else 0)


@cache.command()
def export(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write, as kiln-cache.tar.")],
    as_json: AsJson = False,
) -> None:
    """Write all whole entries to an archive, to be unpacked into the cache folder of another machine.

    Machine code is looked up by the processor too, so that no other machine runs what it cannot.
    Example: kiln cache export kiln-cache.tar
    """
    found, entries = _entries()
    damaged = {entry.key for entry in found.faults()} if found else set()
    whole = [entry for entry in entries if entry.key not in damaged]
    try:
        with tarfile.open(to, "w") as archive:
            for entry in whole:
                archive.add(entry.path, arcname=entry.path.name)
    except OSError as error:
        _fail(f"{to}: {error.strerror or error}")
    size = to.stat().st_size
    facts = {"file": str(to), "entries": len(whole), "bytes": size}
    typer.echo(json.dumps(facts) if as_json else f"{len(whole)} entries, {_size(size)}, in {to}")


@cache.command()
def clear(as_json: AsJson = False) -> None:
    """Remove all entries.

    Programs that run keep the code they have. Example: kiln cache clear
    """
    found = _cache()
    removed = found.clear() if found else 0
    typer.echo(json.dumps({"removed": removed}) if as_json else f"{removed} entries removed")


def _ran(
    script: str, arguments: list[str], everything: bool | None, records: Records, quiet: bool
) -> tuple[str | None, int]:
    """What went wrong in a script, in one line, and its exit code."""
    scripts = _part("kiln.scripts")
    try:
        return None, scripts.run(script, arguments, everything, records, quiet)
    except scripts.ScriptFailed as error:
        return str(error), 1


def _cache() -> Cache | None:
    """The cache, on or off; None where there is none yet."""
    try:
        return Cache(folder(), config.cache_bytes)
    except FileNotFoundError:
        return None
    except (CacheRefused, OSError) as error:
        _fail(str(error))


def _entries() -> tuple[Cache | None, list[Any]]:
    found = _cache()
    return found, found.entries() if found else []


def _part(name: str) -> Any:
    """A part that is loaded when a command needs it: the command itself starts without torch."""
    return importlib.import_module(name)


def _console() -> Console:
    """Where tables go: as wide as the terminal, or of one width in a file."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDTH)


def _fail(why: str) -> NoReturn:
    typer.echo(f"kiln: {why}", err=True)
    raise typer.Exit(1)


def _size(count: int) -> str:
    return str(_part("kiln.observe.tables").size(count))
