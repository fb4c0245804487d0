"""The command `kiln`: what a person asks of an installation."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kiln import __version__
from kiln.base.options import config
from kiln.launch.cache import Cache, CacheRefused, folder, is_on

MORE = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True, add_completion=False, context_settings=MORE, pretty_exceptions_enable=False
)
cache = typer.Typer(no_args_is_help=True, context_settings=MORE)
app.add_typer(cache, name="cache", help="Show, check or clear the machine code that is kept on disk.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def version(asked: bool) -> None:
    if asked:
        typer.echo(f"kiln {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print it.")]


@app.callback()
def main(shown: Version = False) -> None:
    """Kiln compiles ordinary PyTorch programs."""


@cache.command()
def show(as_json: AsJson = False) -> None:
    """Show where the cache is, how many entries it has and what they take.

    Example: kiln cache show --json
    """
    found = _cache()
    entries = found.entries() if found else []
    facts: dict[str, Any] = {
        "folder": str(folder()),
        "on": is_on(),
        "entries": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "limit": config.cache_bytes,
        "last_used": _time(entries[-1].used) if entries else None,
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
    found = _cache()
    entries = found.entries() if found else []
    faults = [str(entry.path) for entry in found.faults()] if found else []
    if as_json:
        typer.echo(json.dumps({"entries": len(entries), "damaged": faults}))
    else:
        typer.echo(f"{len(entries)} entries, {len(faults)} damaged")
        for path in faults:
            typer.echo(f"damaged: {path}")
    raise typer.Exit(1 if faults else 0)


@cache.command()
def clear(as_json: AsJson = False) -> None:
    """Remove all entries.

    Programs that run keep the code they have. Example: kiln cache clear
    """
    found = _cache()
    removed = found.clear() if found else 0
    typer.echo(json.dumps({"removed": removed}) if as_json else f"{removed} entries removed")


def _cache() -> Cache | None:
    """The cache, on or off; None where there is none yet."""
    try:
        return Cache(folder(), config.cache_bytes)
    except FileNotFoundError:
        return None
    except (CacheRefused, OSError) as error:
        _fail(str(error))


def _fail(why: str) -> NoReturn:
    typer.echo(f"kiln: {why}", err=True)
    raise typer.Exit(1)


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
