"""Every module of torch.nn that torch has samples for, compiled to native code: values, states and gradients are eager's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import kiln
from tests.compiler.nearness import Nearness
from tests.differentiate.samples import compare
from tests.differentiate.test_modules import ALL, BREAKS, MODES, MODULES, SOMETIMES, check

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = None if ALL else 1


def agree(where: str, again: Any, expected: Any, got: Any) -> None:
    """Layouts are eager's, values as near to the exact ones."""

    def run(change: Any) -> Any:
        def modules_too(value: Any) -> Any:
            if not isinstance(value, nn.Module):
                return change(value)
            for tensor in (*value.parameters(), *value.buffers()):
                tensor.data = change(tensor.data)
            return value

        return again(modules_too)

    compare(expected, got, where, values=False)
    if not isinstance(expected, type):
        Nearness(run)(expected, got)


def compiled(module: nn.Module, random: bool) -> Any:
    return kiln.compile(module, backend="kiln", options={"numerics": "eager"} if random else {})


@pytest.mark.parametrize("name", MODULES)
def test_compiled_is_eager(name: str) -> None:
    kinds: set[str] = set()
    for training in MODES.get(name, (True, False)):
        kinds |= check(name, training, compiled, agree, SAMPLES)
    assert kinds <= BREAKS.get(name, set()) | SOMETIMES.get(name, set()), f"breaks: {kinds}"
