"""Runs the programs of the table of kinds."""

import contextlib
import io
import sys
import warnings

import torch

import kiln
from kiln.base import records
from kiln.base.errors import Break, Skip


def run(text, ahead=False, fullgraph=False):
    """The kinds of breaks of a program; of graphs that are not differentiated where `ahead`."""
    space = {"torch": torch, "kiln": kiln, "__name__": "example"}
    backend = "aot_eager" if ahead else "eager"
    kiln.reset()
    found = []
    with records.collect() as told, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "<example>", "exec"), space)
        if "import colorsys" in text and not text.startswith("import"):
            sys.modules.pop("colorsys", None)
        compiled = kiln.compile(space["f"], backend=backend, fullgraph=fullgraph)
        for args in space.get("calls", [space.get("args", (torch.ones(3),))]):
            try:
                compiled(*args)
            except Break as error:
                found.append(error.kind)
            except Skip as error:
                found.append(error.broke.kind if error.broke else "skipped")
            except RuntimeError as error:
                if "a leaf Variable that requires grad" in str(error):
                    raise
    torch.set_default_device(None)
    if ahead:
        return found + [record.error.partition(":")[0] for record in told.fallbacks]
    assert not told.fallbacks or fullgraph or found, told.fallbacks
    return found + [record.kind for record in told.breaks]
