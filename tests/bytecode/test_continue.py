"""Functions that leave a frame: epilogues, replaced calls, handlers, lifetimes, refusals."""

import gc
import sys
import traceback
import weakref
from types import CellType, FunctionType

import pytest

from kiln.base.errors import Bug, Skip
from kiln.bytecode.decode import decode
from kiln.bytecode.flow import live
from kiln.bytecode.resume import (
    HANDLED,
    LASTI,
    NULL,
    VALUE,
    Epilogue,
    Replace,
    continue_code,
    resume_places,
)
from kiln.bytecode.versions import HERE
from tests.bytecode.writer import resume_code


def find(function, name, value=None, nth=0):
    """The index of the nth instruction of that name and value."""
    found = [
        i.index for i in decode(function.__code__).instructions if i.name == name and value in (None, i.value)
    ]
    return found[nth]


def runs(code):
    return FunctionType(code, globals())


def record(*args):
    return "left", args


def add(a, b):
    c = a + b
    return c * 2


def test_epilogue_gets_stack_and_locals():
    at = find(add, "BINARY_OP", "+")
    code = continue_code(
        add.__code__, at, (VALUE, VALUE), ("a",), [Epilogue(record, (VALUE,), ("a",))]
    )  # fmt: skip
    assert runs(code)(3, 4, "kept") == ("left", (7, "kept"))
    made, known = (len(decode(each).instructions) for each in (code, add.__code__))
    assert code.co_varnames[-1] != "b" and made < known + 16


def test_without_epilogue_control_goes_on():
    at = find(add, "BINARY_OP", "+")
    assert runs(continue_code(add.__code__, at, (VALUE, VALUE), (), []))(3, 4) == 14


def branch(x):
    if x:
        return "yes"
    return "no"


def test_each_arm_of_a_branch_has_its_epilogue():
    decoded = decode(branch.__code__)
    at = next(i.index for i in decoded.instructions if i.name.startswith("POP_JUMP"))
    arms = [Epilogue(lambda *a: ("fall", a), (), ("x",)), Epilogue(lambda *a: ("jump", a), (), ("x",))]
    made = runs(continue_code(branch.__code__, at, (VALUE,), ("x",), arms))
    assert made(True, 1) == ("fall", (1,))
    assert made(False, 2) == ("jump", (2,))
    half = runs(continue_code(branch.__code__, at, (VALUE,), ("x",), [None, arms[1]]))
    assert half(True, 1) == "yes"
    assert half(False, 2) == ("jump", (2,))


def loop(items):
    total = 0
    for item in items:
        total += item
    return total


def test_end_of_a_loop():
    at = find(loop, "FOR_ITER")
    arms = [
        Epilogue(lambda *a: ("item", a), (VALUE, VALUE), ("total",)),
        Epilogue(lambda *a: ("end", a), (), ("total",)),
    ]
    made = runs(continue_code(loop.__code__, at, (VALUE,), ("total",), arms))
    items = iter([5])
    assert made(items, 1) == ("item", (items, 5, 1))
    assert made(items, 1) == ("end", (1,))
    numbers = (n for n in ())
    assert made(numbers, 1) == ("end", (1,))
    target = decode(loop.__code__).instructions[at].value + HERE.for_exit_skip
    assert runs(resume_code(loop.__code__, target, (), ("total",)))(9) == 9


def guarded(x, log):
    for _ in range(1):
        try:
            log.append(x.thing)
        except AttributeError as error:
            log.append(type(error).__name__)
        finally:
            log.append("finally")
    return log


def test_exception_of_the_instruction_goes_to_its_handlers():
    at = find(guarded, "LOAD_ATTR", "thing")
    shape = (VALUE, *((NULL, VALUE) if HERE.null_first else (VALUE, NULL)), VALUE)
    after = (*shape[:-1], VALUE)
    code = continue_code(guarded.__code__, at, shape, ("x", "log", "_"), [Epilogue(record, after, ("x",))])
    log = []
    assert runs(code)(iter(()), log.append, object(), None, log, 0) == ["AttributeError", "finally"]
    thing = Thing()
    thing.thing = 5
    assert runs(code)(iter(()), log.append, thing, None, log, 0)[0] == "left"


def calls(x, log):
    try:
        got = fails(x)
    except KeyError:
        got = "caught"
    log.append(got)
    return got


def fails(x):
    raise KeyError(x)


def gives(*args):
    return args


@pytest.mark.parametrize(
    ("mode", "slots", "extra", "expected"),
    [
        ("push", (VALUE,), (), ("left", ((1, 2), [], 7))),
        ("drop", (), (), ("left", ([], 7))),
        ("object", (VALUE,), ("mine",), ("left", ("mine", [], 7))),
    ],
)
def test_replaced_call(mode, slots, extra, expected):
    at = find(calls, "CALL")
    code = continue_code(
        calls.__code__, at, (), ("log", "x"), [Epilogue(record, slots, ("log", "x"))],
        Replace(gives, ("a in g", "b in g"), mode),
    )  # fmt: skip
    assert runs(code)([], 7, *extra, 1, 2) == expected


def test_resumed_with_a_replaced_call():
    at = find(calls, "CALL")
    code, places = resume_places(calls.__code__, at, (), ("log", "x"), Replace(gives, ("a in g",), "push"))
    log = []
    assert runs(code)(log, 7, 1) == (1,) and log == [(1,)]
    assert [index for index in places.values() if index == at] == [at], "the call stands for the replaced one"
    failing, _ = resume_places(calls.__code__, at, (), ("log", "x"), Replace(fails, ("a in g",), "push"))
    assert runs(failing)(log, 7, 1) == "caught"


def test_replaced_call_stays_under_the_handlers():
    at = find(calls, "CALL")
    code = continue_code(
        calls.__code__, at, (), ("log", "x"), [Epilogue(record, (VALUE,), ())], Replace(fails, ("v",), "push")
    )
    log = []
    assert runs(code)(log, 7, 1) == "caught"
    assert log == ["caught"]


def handling(log):
    try:
        raise ValueError("a")
    except ValueError:
        try:
            raise KeyError("b")
        except KeyError:
            log.append(sys.exception())
            raise


def state_in_handler():
    """The place of the append in the inner handler, and the slots there."""
    at = find(handling, "LOAD_FAST", "log")
    return at, (HANDLED, HANDLED)


def test_handled_exceptions_are_there_again():
    at, slots = state_in_handler()
    outer, inner = ValueError("x"), KeyError("y")
    log = []
    with pytest.raises(KeyError) as caught:
        runs(resume_code(handling.__code__, at, slots, ("log",)))(outer, inner, log)
    assert caught.value is inner and log == [inner]
    assert sys.exception() is None


def test_epilogue_pops_handled_exceptions():
    at, slots = state_in_handler()
    seen = []

    def leave(*args):
        seen.append(sys.exception())
        return args

    code = continue_code(handling.__code__, at, slots, ("log",), [Epilogue(leave, (*slots, VALUE), ())])
    outer, inner = ValueError("x"), KeyError("y")
    assert runs(code)(outer, inner, "log") == (outer, inner, "log")
    assert seen == [None] and sys.exception() is None


def test_place_of_a_raise_needs_no_parameter():
    def f(log):
        try:
            fails(1)
        finally:
            log.append(1)

    decoded = decode(f.__code__)
    at = next(i.index for i in decoded.instructions if i.name == "RERAISE" and i.arg)
    made = runs(resume_code(f.__code__, at, (VALUE, LASTI, VALUE), ("log",)))
    with pytest.raises(KeyError, match="2"):
        made(None, KeyError(2), [])


class Thing:
    pass


def test_stack_parameters_do_not_outlive_their_use():
    def use(x):
        x = None
        return alive()

    thing = Thing()
    alive = weakref.ref(thing)
    at = next(i.index for i in decode(use.__code__).instructions if i.name == "STORE_FAST")
    made = runs(resume_code(use.__code__, at, (VALUE,), ("alive",)))
    # The value is stored over x and nothing else holds it; the closure's cell carries the probe.
    box = [thing]
    del thing
    assert made(box.pop(), CellType(lambda: alive() is not None)) is True
    gc.collect()
    assert alive() is None


def test_epilogue_hands_its_references_over():
    log = []

    def leave(value, x):
        frame = sys._getframe(1)
        log.append([name for name, held in frame.f_locals.items() if held is value or held is x])

    at = find(add, "BINARY_OP", "+")
    code = continue_code(add.__code__, at, (VALUE, VALUE), ("a",), [Epilogue(leave, (VALUE,), ("a",))])
    runs(code)([1], [2], "a")
    assert log == [[]]


def test_cells_are_passed_as_cells():
    def outer():
        total = 0

        def bump():
            nonlocal total
            total += 1
            return total

        return bump

    bump = outer()
    at = find(bump, "LOAD_CONST", 1)
    cell = CellType(10)
    code = resume_code(bump.__code__, at, (VALUE,), ("total",))
    assert not code.co_freevars
    assert runs(code)(20, cell) == 21
    assert cell.cell_contents == 21
    with pytest.raises(Bug, match="without total"):
        resume_code(bump.__code__, at, (VALUE,), ())


def test_resume_of_a_resume():
    first = resume_code(loop.__code__, find(loop, "STORE_FAST", "item"), (VALUE, VALUE), ("total",))
    at = find(runs(first), "BINARY_OP", "+=")
    second = resume_code(first, at, (VALUE, VALUE, VALUE), ())
    assert runs(second)(iter([10, 100]), 1, 2) == 113
    assert len(decode(second).instructions) <= len(decode(first).instructions) + 4


def test_places_lead_back_to_the_original():
    at = find(loop, "STORE_FAST", "item")
    code, places = resume_places(loop.__code__, at, (VALUE, VALUE), ("total",))
    copied, original = decode(code).instructions, decode(loop.__code__).instructions
    assert at in places.values()
    for row, index in places.items():
        assert (copied[row].name, copied[row].line) == (original[index].name, original[index].line)


def test_tracebacks_name_the_function_and_the_line():
    def f(x):
        y = gives(x)
        return (
            y
            + fails(x)
        )  # fmt: skip

    code = resume_code(f.__code__, find(f, "STORE_FAST", "y"), (VALUE,), ("x",))
    with pytest.raises(KeyError) as caught:
        runs(code)(1, 2)
    with pytest.raises(KeyError) as plain:
        f(2)
    ours, theirs = (traceback.extract_tb(c.value.__traceback__)[1] for c in (caught, plain))
    assert (ours.lineno, ours.name, ours.filename, ours.colno) == (
        theirs.lineno, theirs.name, theirs.filename, theirs.colno,
    )  # fmt: skip


def test_wrong_depth_is_refused():
    at = find(add, "BINARY_OP", "+")
    with pytest.raises(Bug, match="1 values are on the stack where an epilogue expects 2"):
        continue_code(add.__code__, at, (VALUE, VALUE), (), [Epilogue(record, (VALUE, VALUE), ())])
    with pytest.raises(Bug):
        resume_code(loop.__code__, find(loop, "FOR_ITER"), (), ("total",))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="every load checks on 3.11")
def test_a_variable_read_unchecked_must_be_given():
    with pytest.raises(Bug, match="without total"):
        resume_code(loop.__code__, find(loop, "FOR_ITER"), (VALUE,), ())


def test_generators_and_bodies_are_left_alone():
    def generator():
        yield 1

    with pytest.raises(Skip, match="generator"):
        resume_code(generator.__code__, 4, (), ())
    with pytest.raises(Skip, match="body of a class or of a module"):
        resume_code(compile("x = 1", "m", "exec"), 1, (), ())


def test_live_variables():
    def f(a, b, c):
        d = a
        for _ in range(b):
            d += 1
        c = d
        return c

    first = decode(f.__code__).instructions[0].index
    assert live(f.__code__, first + 1) == {"a", "b"}
    assert live(f.__code__, find(f, "FOR_ITER")) == {"d"}
    assert live(f.__code__, find(f, "STORE_FAST", "c")) == set()
