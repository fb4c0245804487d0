"""A region binds arguments as its function does, runs the first entry that fits, and otherwise asks `miss`."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import weakref

import pytest

from kiln import _hook
from kiln.base.source import Arg
from kiln.check.guards import Custom, Equals, TypeIs
from kiln.check.tree import GuardSet


def built(*guards):
    group = GuardSet()
    for guard in guards:
        group.add(guard)
    return group.build()


def module_level(x):
    """A docstring."""
    return x


REGION = _hook.Region(module_level, lambda region, argv: ("missed", *argv))
REGION.__dict__["__qualname__"] = "REGION"

SIGNATURES = [
    "", "a", "a, b", "a, b=2", "a, /, b", "a=1, /, b=2", "*args", "a, *args", "a, b=2, *args", "*, k", "*, k=3", "a, *, k, j=4",
    "**kw", "a, **kw", "a, /, **kw", "a, b=2, *args, k=3, **kw", "a, b=2, /, c=3, *args, k, j=5, **kw",
]  # fmt: skip
POSITIONAL = [(), (10,), (10, 20), (10, 20, 30), (10, 20, 30, 40)]
KEYWORDS = [{}, {"a": 1}, {"b": 1}, {"k": 7}, {"k": 7, "j": 8}, {"z": 9}, {"k": 7, "z": 9, "b": 3}]


def slots_function(signature):
    """A function of this signature that returns its argument slots in the order of co_varnames."""
    scope = {}
    exec(f"def function({signature}): pass", scope)
    names = scope["function"].__code__.co_varnames
    exec(f"def function({signature}): return ({''.join(name + ',' for name in names)})", scope)
    return scope["function"]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_arguments_are_bound_as_python_binds_them(signature):
    function = slots_function(signature)
    region = _hook.Region(function, lambda region, argv: argv)
    for args, kwargs in itertools.product(POSITIONAL, KEYWORDS):
        try:
            expected = function(*args, **kwargs)
        except TypeError as refusal:
            with pytest.raises(TypeError) as error:
                region(*args, **kwargs)
            assert str(error.value) == str(refusal)
        else:
            assert region(*args, **kwargs) == expected


def test_equal_but_different_keyword_strings():
    region = _hook.Region(lambda alpha, *, beta: None, lambda region, argv: argv)
    assert region(**{"".join(["al", "pha"]): 1, "".join(["be", "ta"]): 2}) == (1, 2)


def test_defaults_are_those_of_the_moment():
    def function(a, b=1, *, k=2):
        return None

    region = _hook.Region(function, lambda region, argv: argv)
    assert region(0) == (0, 1, 2)
    function.__defaults__ = (5,)
    function.__kwdefaults__ = {"k": 6}
    assert region(0) == (0, 5, 6)
    function.__defaults__ = None
    with pytest.raises(TypeError):
        region(0)


def test_entries_most_recently_hit_first():
    def function(x):
        return None

    region = _hook.Region(function, lambda region, argv: "missed")
    for value in (1, 2, 3):
        region.add(built(Equals(Arg(0, "x"), value)), lambda x: ("ran", x), value)
    assert [e.info for e in region.entries] == [3, 2, 1]
    assert region(1) == ("ran", 1)
    assert [e.info for e in region.entries] == [1, 3, 2]
    assert region(4) == "missed"
    assert [e.info for e in region.entries] == [1, 3, 2]
    region.clear()
    assert region.entries == [] and region(1) == "missed"


def test_switches():
    region = _hook.Region(lambda x: ("original", x), lambda region, argv: ("missed", *argv))
    region.add(built(Equals(Arg(0, "x"), 1)), lambda x: ("ran", x))
    region.limit_hit = True
    assert (region(1), region(2)) == (("ran", 1), ("original", 2))
    region.limit_hit = False
    assert region.entries[0].hit
    region.wait = 1
    assert (region(1), region(2), region(2)) == (("ran", 1), ("original", 2), ("missed", 2))
    region.enabled = False
    assert (region(1), region(2)) == (("original", 1), ("original", 2))
    region.enabled = True
    assert (region(1), region(2), region.call_original(x=3)) == (("ran", 1), ("missed", 2), ("original", 3))


def test_it_looks_like_its_function():
    region = _hook.Region(module_level, lambda region, argv: argv)
    assert (region.__name__, region.__doc__, region.__wrapped__) == (
        "module_level",
        "A docstring.",
        module_level,
    )
    assert inspect.signature(region) == inspect.signature(module_level)
    region.note = 1
    assert region.note == 1 and callable(region) and "module_level" in repr(region)
    assert copy.copy(region) is region and copy.deepcopy([region])[0] is region
    assert pickle.loads(pickle.dumps(REGION)) is REGION


def test_it_binds_as_a_method():
    class Model:
        region = _hook.Region(lambda self, x: None, lambda region, argv: argv)

    model = Model()
    assert model.region(1) == (model, 1)
    method = model.region
    assert method(x=2) == (model, 2) and method.__self__ is model
    assert Model.region(model, 3) == (model, 3)


def test_errors_pass_through():
    def fail(*args):
        raise KeyError("from inside")

    region = _hook.Region(lambda x: None, fail)
    with pytest.raises(KeyError):
        region(1)
    region.add(built(TypeIs(Arg(0, "x"), int)), fail)
    with pytest.raises(KeyError):
        region(1)


def test_a_guard_that_raises_does_not_hold_but_an_interrupt_passes():
    def interrupt(value):
        raise KeyboardInterrupt

    region = _hook.Region(lambda x: None, lambda region, argv: "missed")
    region.add(built(Custom(Arg(0, "x"), lambda v: v.nothing, "")), lambda x: "ran")
    assert region(1) == "missed"
    region.add(built(Custom(Arg(0, "x"), interrupt, "")), lambda x: "ran")
    with pytest.raises(KeyboardInterrupt):
        region(1)


def test_guards_may_change_the_entries():
    region = _hook.Region(lambda x: None, lambda region, argv: "missed")

    def clear(value):
        region.clear()
        gc.collect()
        return False

    for _ in range(3):
        region.add(built(Custom(Arg(0, "x"), clear, "")), lambda x: "ran")
    assert region(1) == "missed" and region.entries == []

    def clear_and_hold(value):
        region.clear()
        return True

    region.add(built(Custom(Arg(0, "x"), clear_and_hold, "")), lambda x: "ran")
    assert region(1) == "ran"


def test_recursion_through_a_region():
    def factorial(n):
        return 1 if n == 0 else n * region(n - 1)

    region = _hook.Region(factorial, lambda region, argv: region.call_original(*argv))
    region.add(built(TypeIs(Arg(0, "n"), int)), factorial)
    assert region(50) == 30414093201713378043612608166064768844377641568960512000000000000
    with pytest.raises(RecursionError):
        region(100000)


def test_a_cycle_through_a_region_is_collected():
    def make():
        def function(x):
            return region

        region = _hook.Region(function, lambda region, argv: argv)
        info = type("Info", (), {})()
        region.add(built(TypeIs(Arg(0, "x"), int)), function, info)
        region(1)
        return weakref.ref(region), weakref.ref(info)

    references = make()
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_wrong_use_is_refused():
    with pytest.raises(TypeError):
        _hook.Region(len, None)
    with pytest.raises(TypeError):
        REGION.add("guards", print)
    with pytest.raises(TypeError):
        built().check([1])
    with pytest.raises(ValueError):
        _hook.Guards([(0, _hook.FETCH_ARG, 0)], [])
    with pytest.raises(ValueError):
        _hook.Guards([], [(_hook.CHECK_IS, (0,), 1)])
