"""Leaving a frame after any of its instructions and entering it again changes nothing that a program can see."""

import copy
import sys

import pytest

from tests.bytecode.samples import SAMPLES
from tests.bytecode.stepper import State, Stepper


def outcome(call):
    """The result or the exception of a call, in a form that compares; no exception stays handled."""
    assert sys.exception() is None
    try:
        result = "returned", call()
    except Exception as error:
        chain = []
        while error is not None:
            chain.append((type(error), str(error)))
            error = error.__context__
        result = "raised", chain
    assert sys.exception() is None
    return result


def fresh(args, kwargs):
    return copy.deepcopy(args), copy.deepcopy(kwargs)


def plain(value):
    """Replace what compares by identity."""
    return repr(value).split(" at 0x")[0]


def names():
    seen = {}
    for function, _, _ in SAMPLES:
        count = seen[function] = seen.get(function, 0) + 1
        yield f"{function.__name__}-{count}"


cases = pytest.mark.parametrize(("function", "args", "kwargs"), SAMPLES, ids=list(names()))


def bind(function, args, kwargs):
    positional, keywords = fresh(args, kwargs)
    return Stepper(function), positional, keywords


@cases
def test_one_instruction_at_a_time(function, args, kwargs):
    positional, keywords = fresh(args, kwargs)
    expected = outcome(lambda: function(*positional, **keywords))
    stepper, positional2, keywords2 = bind(function, args, kwargs)

    assert outcome(lambda: stepper.run(*positional2, **keywords2)) == expected
    assert plain(positional2) == plain(positional)


@cases
@pytest.mark.parametrize("how", ["resume", "finish"])
def test_leaving_at_every_instruction(function, args, kwargs, how):
    positional, keywords = fresh(args, kwargs)
    expected = outcome(lambda: function(*positional, **keywords))
    stop, ended = 0, False
    while not ended:
        stepper, positional2, keywords2 = bind(function, args, kwargs)

        def run():
            nonlocal ended
            state = stepper.start(*positional2, **keywords2)
            for _ in range(stop):
                state = stepper.step(state)
                if not isinstance(state, State):
                    ended = True
                    return state[0]
            return getattr(stepper, how)(state)

        got = outcome(run)
        assert got == expected, f"left after {stop} instructions"
        assert plain(positional2) == plain(positional)
        stop += 1
        ended = ended or stop > 400


@cases
def test_leaving_a_resume_function_again(function, args, kwargs):
    positional, keywords = fresh(args, kwargs)
    expected = outcome(lambda: function(*positional, **keywords))
    for stop in range(0, 200, 9):
        stepper, positional2, keywords2 = bind(function, args, kwargs)

        def run():
            state = stepper.start(*positional2, **keywords2)
            for _ in range(stop):
                state = stepper.step(state)
                if not isinstance(state, State):
                    return state[0]
            again, values = stepper.resume_function(state), state.values
            return Stepper(again).run(*values)

        assert outcome(run) == expected, f"left after {stop} instructions"
        assert plain(positional2) == plain(positional)
