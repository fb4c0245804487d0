"""Reports: what is said, and written to a file, of an error of ours after which a program goes on."""

from __future__ import annotations

import hashlib
import platform
import sys
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from kiln.base import log, records
from kiln.base.folders import folder

REPORTS = "reports"
PACKAGES = ("torchkiln", "torch", "llvmlite", "numpy")


def words_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def fell_back(name: str, error: BaseException, what: str, *parts: str) -> None:
    """Tell of an internal error in one line, with the file that a report needs."""
    said = words_of(error)
    file = report(f"{name} {what}", error, *parts)
    records.emit(records.FallbackRecord(name, said, file))
    attach = f"attach {file} to a report, or " if file else ""
    text = f"{name} {what} ({said}); {attach}set KILN_STRICT=1 to see it raised"
    log.warn_once(("fallback", name, said), text)


def report(title: str, error: BaseException, *parts: str) -> str:
    """Write a report of an internal error and give the path of the file; "" where none can be written.

    Equal errors at equal places share a file.
    """
    trace = "".join(traceback.format_exception(error))
    text = "\n\n".join([title, versions(), trace, *filter(None, parts)]) + "\n"
    path = folder() / REPORTS / f"{hashlib.sha256((title + trace).encode()).hexdigest()[:12]}.txt"
    with suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(text)
        return str(path)
    return ""


def versions() -> str:
    """The versions of what an error may depend on."""
    found = [f"Python {sys.version}", platform.platform()]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return "\n".join(found)
