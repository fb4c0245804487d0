"""Every op that torch tests, compiled with `aot_eager`: values, layouts and gradients are eager's.

By default each op gives its first samples; KILN_ALL_SAMPLES=1 (`make test-ops`) runs all of them. What breaks the graph
and what does not hold yet is listed below with its reason; a listed op that holds on all its samples fails the list.
"""

from __future__ import annotations

from typing import Any

import pytest

import kiln
from tests.differentiate.samples import (
    ALL,
    BREAKS,
    EXCEPTIONS,
    FALLBACKS,
    OPS,
    RESTRIDED,
    SOMETIMES,
    UNDEFINED,
    Found,
    Outcome,
    check_op,
    compare,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = None if ALL else 2


def check(name: str) -> Found:
    """Compare an op with eager on its samples; an AssertionError where anything differs."""
    values = name not in UNDEFINED

    def agree(where: str, sample: Any, expected: Outcome, got: Outcome) -> None:
        compare(expected.value, got.value, where, values)
        compare(expected.gradients, got.gradients, f"{where}: gradients", values, name not in RESTRIDED)
        compare(expected.inputs, got.inputs, f"{where}: inputs")

    return check_op(name, lambda f, expected: kiln.compile(f, backend="aot_eager"), agree, SAMPLES)


@pytest.mark.parametrize("name", [n for n in OPS if n not in EXCEPTIONS])
def test_aot_eager_is_eager(name: str) -> None:
    found = check(name)
    allowed = BREAKS.get(name, set()) | SOMETIMES.get(name, set())
    assert found.breaks <= allowed, f"breaks: {found.breaks}"
    # What is listed must still happen.
    assert found.breaks or name not in BREAKS
    assert found.fallbacks or name not in FALLBACKS
    assert found.restrided or name not in RESTRIDED


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_listed_exception_still_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        check(name)
