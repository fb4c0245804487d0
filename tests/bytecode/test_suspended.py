"""A generator that was left at a yield goes on in a new one."""

import inspect
from types import FunctionType

import pytest

from kiln.bytecode.decode import decode
from kiln.bytecode.resume import VALUE, suspended_code


def counting(n, log):
    i = 0
    try:
        while i < n:
            got = yield i
            log.append(got)
            i += got or 1
    except KeyError as error:
        log.append(error.args)
        yield "thrown"
    finally:
        log.append("closed")
    return "end"


def over(items):
    for item in items:
        yield item * 2


def yields(function):
    return [i.index for i in decode(function.__code__).instructions if i.name == "YIELD_VALUE"]


def suspended(function, index, slots, values, variables):
    code = suspended_code(function.__code__, index, slots, tuple(variables))
    assert inspect.isgenerator(made := FunctionType(code, globals())(*values, *variables.values()))
    if index is not None:
        assert next(made) is None
    return made


def left_after_one():
    log = []
    return suspended(counting, yields(counting)[0], (), (), {"n": 3, "log": log, "i": 0}), log


def test_goes_on_with_what_is_sent():
    made, log = left_after_one()
    assert made.send(1) == 1
    assert next(made) == 2
    with pytest.raises(StopIteration) as ended:
        next(made)
    assert ended.value.value == "end"
    assert log == [1, None, None, "closed"]


def test_exceptions_thrown_in_reach_the_handlers():
    made, log = left_after_one()
    assert made.throw(KeyError("x")) == "thrown"
    assert list(made) == []
    assert log == [("x",), "closed"]


def test_closing_runs_the_cleanup():
    made, log = left_after_one()
    made.close()
    assert log == ["closed"]


def test_stop_iteration_inside_is_a_runtime_error():
    made, _ = left_after_one()
    with pytest.raises(RuntimeError, match="StopIteration"):
        made.throw(StopIteration())


def test_iterators_on_the_stack_are_carried():
    items = iter([5, 6])
    made = suspended(over, yields(over)[0], (VALUE,), (items,), {"item": 4})
    assert list(made) == [10, 12]


def test_not_started():
    assert list(suspended(over, None, (), (), {"items": [1, 2]})) == [2, 4]
    assert list(suspended(counting, None, (), (), {"n": 2, "log": []})) == [0, 1]
