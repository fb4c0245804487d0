"""Every code object of the standard library, the largest collection of real bytecode at hand."""

import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

# Test data and programs for other interpreters, some of which do not even parse.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested(const)


@cache
def code_objects() -> list[CodeType]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[CodeType] = []
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT.intersection(path.relative_to(root).parts):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.extend(nested(compile(path.read_bytes(), str(path), "exec", dont_inherit=True)))
    return found
