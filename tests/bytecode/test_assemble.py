"""Code that the emitter builds runs and says where it is; code taken apart and put together again is the same."""

import sys
import traceback
from types import FunctionType

import pytest

from kiln.base.errors import Bug
from kiln.bytecode.assemble import Label
from kiln.bytecode.decode import decode
from kiln.bytecode.flow import stack_depths
from kiln.bytecode.versions import REAL
from tests.bytecode.samples import SAMPLES
from tests.bytecode.stdlib import code_objects
from tests.bytecode.test_resume import fresh, names, outcome
from tests.bytecode.writer import Writer, relocate


def emitter():
    e = Writer()
    e.raw("RESUME", 0)
    return e


def function(e, *args, line=1):
    code = e.finish("made", "made.py", line, len(args), args)
    return FunctionType(code, {"glob": 17, "__builtins__": __builtins__})


def collect(call):
    """call, as (result, exception)."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def test_attributes_and_items():
    e = emitter()
    e.load("o")
    e.attr("real")
    e.store("r")
    e.load("r")
    e.load("d")
    e.const("k")
    e.set_item()
    e.load("d")
    e.const("gone")
    e.del_item()
    e.load("d")
    e.const("k")
    e.item()
    e.delete("r")
    e.ret()
    d = {"gone": 1}
    assert function(e, "o", "d")(3, d) == 3
    assert d == {"k": 3}


def test_set_and_delete_attributes():
    class Thing:
        old = None

    thing = Thing()
    thing.old = 1
    e = emitter()
    e.const(5)
    e.load("o")
    e.set_attr("new")
    e.load("o")
    e.del_attr("old")
    e.load_global("glob")
    e.ret()
    assert function(e, "o")(thing) == 17
    assert (thing.new, thing.old) == (5, None)


def test_constants_keep_their_identity():
    thing, other = object(), [1]
    e = emitter()
    for value in (thing, other, 1, True, 1.0, thing):
        e.const(value)
    e.build("tuple", 6)
    e.ret()
    got = function(e)()
    assert got[0] is got[5] is thing and got[1] is other
    assert [type(v) for v in got[2:5]] == [int, bool, float]


def test_building_and_unpacking():
    e = emitter()
    e.load("x")
    e.unpack(3)
    e.build("list", 3)
    e.const("a")
    e.const("b")
    e.build("map", 1)
    e.const("c")
    e.const("d")
    e.build("string", 2)
    e.const(1)
    e.build("set", 1)
    e.const(0)
    e.const(2)
    e.build("slice", 2)
    e.build("tuple", 5)
    e.ret()
    assert function(e, "x")((1, 2, 3)) == ([3, 2, 1], {"a": "b"}, "cd", {1}, slice(0, 2))


def test_stack_moves_and_tests():
    e = emitter()
    e.load("a")
    e.load("b")
    e.copy(2)
    e.swap(3)
    e.pop()
    e.build("tuple", 2)
    e.load("a")
    e.load("b")
    e.compare("<=")
    e.load("a")
    e.load("a")
    e.is_(negated=True)
    e.load("a")
    e.const((1, 2))
    e.contains()
    e.build("tuple", 4)
    e.ret()
    assert function(e, "a", "b")(1, 2) == ((1, 2), True, False, True)


def test_calls():
    def target(*args, **kwargs):
        return args, kwargs

    e = emitter()
    e.begin_call()
    e.const(target)
    e.mid_call()
    e.load("x")
    e.load("x")
    e.load("x")
    e.end_call(3, ("k", "l"))
    e.begin_call()
    e.const(target)
    e.mid_call()
    e.end_call(0)
    e.begin_call()
    e.const(target)
    e.mid_call()
    e.const((1, 2))
    e.begin_call()
    e.const(dict)
    e.mid_call()
    e.const(3)
    e.end_call(1, ("z",))
    e.call_with_keywords()
    e.begin_call()
    e.const(target)
    e.mid_call()
    e.const((9,))
    e.raw("CALL_FUNCTION_EX", 0)
    e.build("tuple", 4)
    e.ret()
    assert function(e, "x")(5) == (((5,), {"k": 5, "l": 5}), ((), {}), ((1, 2), {"z": 3}), ((9,), {}))


@pytest.mark.parametrize("padding", [0, 1, 200, 300, 70_000])
def test_jumps_of_any_length(padding):
    e = emitter()
    loop, end, odd = Label(), Label(), Label()
    e.const(0)
    e.store("t")
    e.place(loop)
    e.load("n")
    e.jump_if(end, False)
    for _ in range(padding):
        e.raw("NOP")
    e.load("n")
    e.const(1)
    e.binary("-=")
    e.store("n")
    e.load("t")
    e.const(2)
    e.binary("+")
    e.store("t")
    e.load("n")
    e.const(5)
    e.compare("==")
    e.jump_if(odd, True)
    e.load("n")
    e.jump_if(loop, True)
    e.jump(end)
    e.place(odd)
    e.jump(loop)
    e.place(end)
    e.load("t")
    e.ret()
    assert function(e, "n")(10) == 20


@pytest.mark.parametrize("none", [True, False])
def test_jumps_on_none_both_ways(none):
    e = emitter()
    done, loop = Label(), Label()
    e.place(loop)
    e.load("x")
    e.const(None)
    e.store("x")
    e.jump_if_none(done, none)
    e.load("x")
    e.jump_if_none(loop, none)
    e.const("not " * none + "none first")
    e.ret()
    e.place(done)
    e.const("left")
    e.ret()
    assert function(e, "x")(1) == "left" if none else function(e, "x")(None) == "none first"


def test_handlers_and_take():
    e = emitter()
    e.take("x")
    start = e.here()
    e.load("y")
    e.raise_()
    end, handler = e.here(), Label()
    e.place(handler)
    e.protect(start, end, handler, depth=1)
    e.build("tuple", 2)
    e.ret()
    error = ValueError("seen")
    assert function(e, "x", "y")(1, error) == (1, error)
    assert sys.exception() is None


def test_many_variables_and_constants():
    e = emitter()
    for k in range(600):
        e.const(object())
        e.store(f"v{k}")
    e.load("v599")
    e.load("v0")
    e.build("tuple", 2)
    e.ret()
    made = function(e)
    assert made() == (made.__code__.co_consts[599], made.__code__.co_consts[0])


def test_lines_and_columns():
    e = emitter()
    e.line(12)
    e.const(1)
    e.position = (14, 15, 3, 9)
    e.const(0)
    e.binary("/")
    e.ret()
    made = function(e, line=10)
    assert list(made.__code__.co_positions())[-1] == (14, 15, 3, 9)
    assert [line for _, _, line in made.__code__.co_lines()] == [None, 12, 14]
    _, error = collect(made)
    assert traceback.extract_tb(error.__traceback__)[-1].lineno == 14


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda e: e.jump(Label()), "never placed"),
        (lambda e: e.raw("NO_SUCH"), "no instruction NO_SUCH"),
        (lambda e: e.raw("POP_TOP", 3), "POP_TOP does not take 3"),
        (lambda e: e.const(1), "past the last instruction"),
        (lambda e: e.place(e.here()), "placed twice"),
    ],
)
def test_mistakes_are_refused(steps, message):
    e = emitter()
    with pytest.raises(Bug, match=message):
        steps(e)
        function(e)


def test_two_depths_at_one_place_are_refused():
    e = emitter()
    join = Label()
    e.load("x")
    e.jump_if(join, True)
    e.const(1)
    e.place(join)
    e.const(2)
    e.ret()
    with pytest.raises(Bug, match="is reached with"):
        function(e, "x")


def test_fused_instructions_split_behind_the_sixteenth_variable():
    names = [f"v{k}" for k in range(20)]
    for pair in ("LOAD_FAST_LOAD_FAST",):
        if pair in REAL:
            e = Writer(names)
            e.raw("RESUME", 0)
            e.raw(pair, ("v0", "v15"))
            e.raw(pair, ("v0", "v16"))
            e.build("tuple", 4)
            e.ret()
            made = function(e, *names)
            assert made(*range(20)) == (0, 15, 0, 16)
            assert sum(i.name == pair for i in decode(made.__code__).instructions) == 1


def described(code):
    positions = list(code.co_positions())
    rows = [(i.name, i.flag, positions[i.offset >> 1]) for i in decode(code).instructions]
    return (
        rows,
        decode(code).handlers,
        code.co_varnames,
        code.co_cellvars,
        code.co_freevars,
        code.co_stacksize,
    )


def values(code):
    return [i.value for i in decode(code).instructions]


def test_standard_library_taken_apart_and_put_together():
    codes = code_objects()
    assert len(codes) > 10_000
    for code in codes:
        again = relocate(code)
        assert described(again) == described(code), code
        assert all(map(same_value, values(again), values(code))), code


def same_value(left, right):
    return left is right or (type(left) is type(right) and left == right)


def test_depths_stay_within_the_stack():
    for code in code_objects()[::8]:
        assert max(stack_depths(code)) <= code.co_stacksize


@pytest.mark.parametrize(("sample", "args", "kwargs"), SAMPLES, ids=list(names()))
def test_relocated_functions_behave_the_same(sample, args, kwargs):
    positional, keywords = fresh(args, kwargs)
    copied, copied_keywords = fresh(args, kwargs)
    again = FunctionType(
        relocate(sample.__code__),
        sample.__globals__,
        sample.__name__,
        sample.__defaults__,
        sample.__closure__,
    )
    again.__kwdefaults__ = sample.__kwdefaults__
    expected = outcome(lambda: sample(*positional, **keywords))
    assert outcome(lambda: again(*copied, **copied_keywords)) == expected
