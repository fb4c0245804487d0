"""Kiln compiles ordinary PyTorch programs: `kiln.compile(f)` does the job of `torch.compile(f)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kiln.base.collecting import uncollected

if TYPE_CHECKING:
    from kiln.ahead import aot as aot
    from kiln.api import allow_in_graph as allow_in_graph
    from kiln.api import assume_constant_result as assume_constant_result
    from kiln.api import compile as compile
    from kiln.api import config as config
    from kiln.api import disable as disable
    from kiln.api import disallow_in_graph as disallow_in_graph
    from kiln.api import error_on_graph_break as error_on_graph_break
    from kiln.api import explain as explain
    from kiln.api import graph_break as graph_break
    from kiln.api import install as install
    from kiln.api import is_compiling as is_compiling
    from kiln.api import list_backends as list_backends
    from kiln.api import lookup_backend as lookup_backend
    from kiln.api import mark_dynamic as mark_dynamic
    from kiln.api import mark_static as mark_static
    from kiln.api import minify as minify
    from kiln.api import records as records
    from kiln.api import register_backend as register_backend
    from kiln.api import reset as reset
    from kiln.api import set_stance as set_stance
    from kiln.api import skip_frame as skip_frame
    from kiln.api import step_unsupported as step_unsupported
    from kiln.api import uninstall as uninstall
    from kiln.base.errors import Break as Break
    from kiln.base.errors import Bug as Bug
    from kiln.base.errors import KilnError as KilnError
    from kiln.base.errors import RecompileError as RecompileError
    from kiln.base.errors import Skip as Skip
    from kiln.modes.fake import fake as fake
    from kiln.modes.measure import measure as measure
    from kiln.observe.profile import profile as profile
    from kiln.observe.report import report as report

__version__ = "0.1.0"

_FUNCTIONS = (
    "allow_in_graph", "assume_constant_result", "capture", "compile", "config", "disable",
    "disallow_in_graph", "error_on_graph_break", "explain", "graph_break", "install", "is_compiling",
    "list_backends", "lookup_backend", "mark_dynamic", "mark_static", "minify", "records", "register_backend",
    "reset", "set_stance", "skip_frame", "step_unsupported", "uninstall",
)  # fmt: skip
#: Ways in beside compile: names that a folder of their own holds.
_MODES = {
    "aot": "kiln.ahead", "fake": "kiln.modes.fake", "measure": "kiln.modes.measure",
    "profile": "kiln.observe.profile", "report": "kiln.observe.report",
}  # fmt: skip
_ERRORS = ("Break", "Bug", "KilnError", "RecompileError", "Skip")


# The public names load at first use: the parts that need no torch (bytecode, the hook) import without it, and
# `import kiln` weighs nothing.
def __getattr__(name: str) -> Any:
    if name in _ERRORS:
        value = getattr(importlib.import_module("kiln.base.errors"), name)
    elif name in _MODES:
        value = getattr(importlib.import_module(_MODES[name]), name)
    elif name == "capture":
        # Both a folder of the package and a public function: the folder's module, which answers calls.
        _api()
        value = importlib.import_module("kiln.capture")
    elif name == "ops":
        importlib.import_module("kiln.ops.table")
        value = importlib.import_module("kiln.ops")
    elif name in _FUNCTIONS:
        value = getattr(_api(), name)
    else:
        raise AttributeError(f"module 'kiln' has no attribute {name!r}")
    globals()[name] = value
    return value


def _api() -> Any:
    with uncollected():  # which would walk all of torch's objects, for nothing
        api = importlib.import_module("kiln.api")
        # All names at once: captured code that reads one of them finds it, and does not start an import.
        globals().update({name: getattr(api, name) for name in _FUNCTIONS if name != "capture"})
        return api


def __dir__() -> list[str]:
    return sorted((*_FUNCTIONS, *_MODES, *_ERRORS, "__version__"))
