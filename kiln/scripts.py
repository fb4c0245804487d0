"""Scripts: programs that know nothing of Kiln, run with their compile calls or modules compiled by it."""

from __future__ import annotations

import ast
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kiln import _hook, api, backends, pipeline
from kiln.base.errors import KilnError
from kiln.base.options import Compile
from kiln.base.records import Records

HERE = str(Path(__file__).parent)
PATTERNS = ("re", "regex")
"""Modules whose `compile` is for patterns."""


class ScriptFailed(KilnError):
    """The script could not be read, or raised; the message is one line."""


def run(
    path: str, arguments: Sequence[str], everything: bool | None, records: Records, quiet: bool = False
) -> int:
    """Run a script as `python path arguments…` would and collect the records; gives its exit code.

    `everything` compiles the outermost calls of modules as well; None does so for a script that compiles
    nothing itself. With `quiet` what the script prints goes to the error stream.
    """
    source = read(path)
    if everything is None:
        everything = not compiles(source)
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    try:
        with ExitStack() as stack:
            stack.enter_context(api.install())
            if everything:
                stack.enter_context(all_modules())
            if quiet:
                stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(records)
            runpy.run_path(path, run_name="__main__")
        return 0
    except SystemExit as leaving:
        return left_with(leaving.code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ScriptFailed(one_line(error, path)) from error
    finally:
        sys.argv, sys.path[0] = argv, first


def read(path: str) -> ast.Module:
    """The syntax tree of a script; ScriptFailed where there is none."""
    try:
        return ast.parse(Path(path).read_bytes(), path)
    except (OSError, ValueError) as error:
        raise ScriptFailed(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except SyntaxError as error:
        raise ScriptFailed(f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}") from None


def compiles(tree: ast.Module) -> bool:
    """Whether a script compiles something itself: it names `compile` of something that compiles models."""
    return any(map(names_compile, ast.walk(tree)))


def names_compile(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "compile" and getattr(node.value, "id", "") not in PATTERNS
    named = isinstance(node, ast.ImportFrom) and any(alias.name == "compile" for alias in node.names)
    return named and getattr(node, "module", "") not in PATTERNS


def left_with(code: Any) -> int:
    """The exit code that Python gives for `sys.exit(code)`; a message is printed."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def one_line(error: BaseException, path: str) -> str:
    """What a script raised, and where in the program."""
    places = [place for place in traceback.extract_tb(error.__traceback__) if is_users(place.filename)]
    where = f"{places[-1].filename}:{places[-1].lineno} in {places[-1].name}" if places else path
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    whose = "" if within_kiln(error) else "; the program itself raises it, compiled or not"
    return f"{where}: {said}{whose}"


def is_users(file: str) -> bool:
    library = str(Path(torch.__file__).parent)
    return not file.startswith((HERE, library, "<")) and Path(file).name != "runpy.py"


def within_kiln(error: BaseException) -> bool:
    """Whether the innermost code that raised is Kiln's own."""
    if isinstance(error, KilnError):
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(HERE) and files[-1] != __file__


@contextmanager
def all_modules() -> Iterator[None]:
    """Compile every module at its outermost call, until a program compiles something itself."""
    plain: Any = torch.nn.Module.__call__
    known: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
    backend = backends.resolve(backends.DEFAULT, None, {})

    def compiled(region: Any, argv: tuple[Any, ...]) -> Any:
        module, args, kwargs = argv
        if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            return plain(module, *args, **kwargs)
        own = known.get(module)
        if own is None:
            asked = Compile(backend, name=type(module).__qualname__)
            own = known[module] = pipeline.region(plain, asked)
        return own(module, *args, **kwargs)

    torch.nn.Module.__call__ = _hook.Region(plain, compiled)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = plain  # type: ignore[method-assign]
