"""The stack after an instruction, and where control really goes: the same facts on every release. Needs no torch."""

from __future__ import annotations

import pytest

from kiln.bytecode.decode import decode
from kiln.bytecode.flow import landing, stack_depths
from kiln.bytecode.resume import VALUE
from kiln.bytecode.versions import HERE, JUMPS, TERMINATORS
from kiln.capture.shape import after, operands
from tests.bytecode.samples import SAMPLES

CODES = list({function.__code__: None for function, _, _ in SAMPLES})


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.co_name)
def test_the_shape_fits_the_place_where_control_goes(code):
    depths = stack_depths(code)
    for i in decode(code).instructions:
        before = (VALUE,) * depths[i.index]
        if depths[i.index] < 0:
            continue
        fallen = after(before, i, jump=False)
        if fallen is not None and i.op not in TERMINATORS:
            assert len(fallen) == depths[i.index + 1], i
            assert 0 <= operands(i) <= len(before), i
        if i.op in JUMPS:
            target = i.value + (HERE.for_exit_skip if i.name == "FOR_ITER" else 0)
            jumped = after(before, i, jump=True)
            assert jumped is None or len(jumped) == depths[target], i


def test_both_ways_out_of_a_loop_can_be_resumed():
    found = [
        (code, i)
        for code in CODES
        for i in decode(code).instructions
        if i.name == "FOR_ITER" and stack_depths(code)[i.index] >= 0
    ]
    assert len(found) > 5
    for code, i in found:
        before = (VALUE,) * stack_depths(code)[i.index]
        assert after(before, i, jump=False) == (*before, VALUE)
        assert after(before, i, jump=True) == before[:-1]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.co_name)
def test_landing_passes_over_nothing_that_acts(code):
    instructions, depths = decode(code).instructions, stack_depths(code)
    for i in instructions:
        at = landing(code, i.index)
        assert landing(code, at) == at
        assert not (instructions[at].op in TERMINATORS and instructions[at].op in JUMPS)
        if depths[i.index] >= 0:
            assert depths[at] == depths[i.index]


def test_the_turns_of_a_loop_land_at_one_place():
    def f(x):
        while x < 100:
            x = x * 2
        return x + 1

    instructions = decode(f.__code__).instructions
    first, again = (i for i in instructions if i.name.startswith("POP_JUMP"))
    body = landing(f.__code__, first.index + 1)
    taken = {landing(f.__code__, at) for at in (again.index + 1, again.value)}
    assert taken == {body, landing(f.__code__, first.value)}


def test_a_loop_of_jumps_alone_ends():
    def f():
        while True:
            pass

    for i in decode(f.__code__).instructions:
        landing(f.__code__, i.index)
