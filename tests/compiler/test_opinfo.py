"""Every op that torch tests, compiled to native code: values, layouts and gradients are eager's.

By default each op gives its first sample; KILN_ALL_SAMPLES=1 (`make test-ops`) runs all of them. Values are compared
with a run in float64; what does not hold is listed with its reason.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

import kiln
from tests.compiler.nearness import Nearness
from tests.differentiate.samples import (
    ALL,
    BREAKS,
    EXCEPTIONS,
    OPS,
    RESTRIDED,
    SOMETIMES,
    UNDEFINED,
    Found,
    Outcome,
    check_op,
    compare,
    compared,
    outcome,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = None if ALL else 1
#: Ops whose numbers cancel, which have no argument whose last bits tell by how much; to the usual tolerances.
CANCELLING = {"signal.windows.nuttall": "four cosines nearly cancel at its ends"}


def check(name: str) -> Found:
    """Compare an op with eager on its samples; an AssertionError where anything differs."""

    def agree(where: str, sample: Any, expected: Outcome, got: Outcome) -> None:
        compare(expected.value, got.value, where, values=False)
        compare(expected.gradients, got.gradients, f"{where}: gradients", False, name not in RESTRIDED)
        compare(expected.inputs, got.inputs, f"{where}: inputs", values=False)
        if name in CANCELLING:
            compare(expected.value, got.value, where)
        elif name not in UNDEFINED:
            Nearness(partial(again, name, sample))(everything(expected), everything(got))

    def compiled(f: Any, expected: Outcome) -> Any:
        # Random numbers are compared where they are eager's.
        return kiln.compile(f, backend="kiln", options={"numerics": "eager"} if expected.random else {})

    return check_op(name, compiled, agree, SAMPLES)


def again(name: str, sample: Any, change: Any) -> list[Any]:
    """What eager gives for a changed sample."""
    other = copy.copy(sample)
    other.input, other.args, other.kwargs = (change(v) for v in (sample.input, sample.args, sample.kwargs))
    return everything(compared(name, outcome(OPS[name].op, other)))


def everything(found: Outcome) -> list[Any]:
    return [found.value, found.gradients, found.inputs]


@pytest.mark.parametrize("name", [n for n in OPS if n not in EXCEPTIONS])
def test_compiled_is_eager(name: str) -> None:
    found = check(name)
    allowed = BREAKS.get(name, set()) | SOMETIMES.get(name, set())
    assert found.breaks <= allowed, f"breaks: {found.breaks}"


@pytest.mark.parametrize("name", [n for n in EXCEPTIONS if n in OPS])
def test_listed_exception_still_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        check(name)
