"""Frames that start while the hook is on run as regions, and everything else runs as it always does."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import sys
import threading
import traceback
import weakref

import pytest

from kiln import _hook
from tests.hook.support import hooked


def tag(region, argv):
    return ("region", region.__name__, *argv)


def original(region, argv):
    return region.call_original(*argv)


def test_a_frame_runs_as_its_region():
    def inner(a, b=2, *rest, k=5, **more):
        captured = a
        return lambda: captured

    def outer():
        return inner(1), inner(1, 3, 4, k=6, z=7), inner(a=0)

    with hooked(tag, inner):
        results = outer()
    assert results == (
        ("region", "inner", 1, 2, 5, (), {}),
        ("region", "inner", 1, 3, 6, (4,), {"z": 7}),
        ("region", "inner", 0, 2, 5, (), {}),
    )
    assert inner(1)() == 1


def test_functions_with_closures_cells_and_one_stack_slot():
    outside = 5

    def nothing():
        pass

    def reads():
        return outside

    def argument_in_a_cell(x):
        return lambda: x

    with hooked(tag, nothing, reads, argument_in_a_cell):
        assert nothing() == ("region", "nothing")
        assert reads() == ("region", "reads")
        assert argument_in_a_cell(3) == ("region", "argument_in_a_cell", 3)


def test_none_marks_the_code_until_it_is_forgotten():
    def plain():
        return 1

    with hooked(tag) as callback:
        plain(), plain()
        assert callback.asked.count("plain") == 1
        _hook.forget(plain.__code__)
        plain()
        assert callback.asked.count("plain") == 2
        _hook.skip(plain.__code__)
        plain()
        assert callback.asked.count("plain") == 2


def test_what_the_callback_leaves_alone_is_so_from_its_first_frame_on():
    def inner():
        return 1

    def outer():
        return inner()

    with hooked(tag, inner) as callback:
        regions = callback.regions

        class Answers(dict):
            def get(self, function):
                if function is outer:
                    _hook.leave_alone(outer.__code__)
                return regions.get(function)

        callback.regions = Answers()
        assert [outer(), inner(), outer()] == [1, ("region", "inner"), 1]
        assert callback.asked.count("outer") == 1


def test_other_answers_leave_the_frame_alone_this_time():
    def plain():
        return 1

    asked = []

    def callback(function, argv):
        asked.append(function)
        return False

    before = _hook.set_frame_callback(callback)
    _hook.enter()
    try:
        assert plain() == 1 and plain() == 1
    finally:
        _hook.leave()
        _hook.set_frame_callback(before)
    assert asked.count(plain) == 2


def test_functions_of_one_code_have_their_own_regions():
    def make(n):
        def function():
            return n

        return function

    one, two, three = make(1), make(2), make(3)
    with hooked(lambda region, argv: region.function.__closure__[0].cell_contents * 10, one, two) as callback:
        callback.regions[three] = None
        for _ in range(3):
            assert (one(), two()) == (10, 20)
        assert callback.asked.count("function") >= 2


def test_an_error_in_the_callback_is_reported_and_the_frame_runs(monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(report.exc_type))

    def fail(function, argv):
        raise ValueError("in the callback")

    def plain():
        return 1

    before = _hook.set_frame_callback(fail)
    _hook.enter()
    try:
        assert plain() == 1
    finally:
        _hook.leave()
        _hook.set_frame_callback(before)
    assert ValueError in reports


def test_pause_and_nesting():
    def function():
        return "original"

    with hooked(tag, function):
        _hook.pause()
        _hook.pause()
        assert function() == "original"
        _hook.resume()
        assert function() == "original"
        _hook.resume()
        assert function() == ("region", "function")
        _hook.enter()
        _hook.leave()
        assert function() == ("region", "function")
    assert function() == "original"
    assert _hook.depth() == (0, 0, 0)
    with pytest.raises(RuntimeError):
        _hook.leave()
    with pytest.raises(RuntimeError):
        _hook.resume()


def test_the_original_is_never_diverted_again():
    def function(a, b=2, *rest, k=5, **more):
        return "original", a, b, rest, k, more

    with hooked(lambda region, argv: region.call_original(*argv[:2]), function) as callback:
        assert function(1) == ("original", 1, 2, (), 5, {})
        callback.regions[function].limit_hit = True
        assert function(1, 2, 3, k=4, z=5) == ("original", 1, 2, (3,), 4, {"z": 5})
        callback.regions[function].enabled = False
        assert function(1, 2, 3, k=4, z=5) == ("original", 1, 2, (3,), 4, {"z": 5})


def test_recursive_originals_are_diverted_one_by_one():
    seen = []

    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    def miss(region, argv):
        seen.append(argv)
        return region.call_original(*argv)

    with hooked(miss, factorial):
        assert factorial(10) == 3628800
    assert seen == [(n,) for n in range(10, -1, -1)]


def test_deep_recursion_ends_in_recursion_error():
    def down(n):
        return down(n + 1)

    with hooked(original, down):
        with pytest.raises(RecursionError):
            down(0)
        with pytest.raises(RecursionError):
            (lambda f: f(f))(lambda f: f(f))


def test_generators_and_coroutines_are_left_alone():
    def generator(n):
        for i in range(n):
            got = yield i
            if got:
                yield got

    async def coroutine(n):
        await asyncio.sleep(0)
        return n

    async def agenerator(n):
        for i in range(n):
            yield i

    async def main():
        return await coroutine(3), [i async for i in agenerator(3)]

    with hooked(tag, generator, coroutine, agenerator) as callback:
        running = generator(3)
        assert next(running) == 0 and running.send("x") == "x"
        with pytest.raises(ValueError):
            running.throw(ValueError)
        assert list(generator(3)) == [0, 1, 2]
        assert asyncio.run(main()) == (3, [0, 1, 2])
    assert not {"generator", "coroutine", "agenerator"} & set(callback.asked)


def test_class_bodies_and_modules_are_left_alone():
    with hooked(tag) as callback:
        exec("class Made:\n    x = 1\n")
    assert "Made" not in callback.asked


def test_exceptions_keep_their_type_and_show_the_frame():
    def function(x):
        return x

    def miss(region, argv):
        raise LookupError("from miss")

    with hooked(miss, function):
        with pytest.raises(LookupError) as error:
            function(1)
    names = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert names[-2:] == ["function", "miss"]
    lines = [line for _, line in traceback.walk_tb(error.value.__traceback__)]
    assert lines[-2] == function.__code__.co_firstlineno


def test_the_frame_can_be_looked_at_and_outlives_its_run():
    def function(x, y):
        return x

    frames = []

    def miss(region, argv):
        frames.append(sys._getframe(1))
        return frames[-1].f_locals["x"], frames[-1].f_code.co_name

    with hooked(miss, function):
        assert function(7, [8]) == (7, "function")
    assert frames[0].f_locals["y"] == [8] and frames[0].f_lineno


def test_arguments_live_while_the_region_runs():
    class Thing:
        pass

    def function(thing):
        return None

    def miss(region, argv):
        reference = weakref.ref(argv[0])
        del argv
        sys._getframe(1).f_locals.clear() if sys.version_info < (3, 13) else None
        gc.collect()
        return reference() is not None

    with hooked(miss, function):
        assert function(Thing())


@pytest.mark.parametrize("kind", ["settrace", "setprofile", "cprofile", "monitoring"])
def test_tracers_and_profilers(kind):
    def function(x):
        y = x + 1
        return y

    def outer():
        return [function(i) for i in range(3)], plain(2)

    def plain(x):
        return x * 2

    events = []

    def trace(frame, event, arg):
        if frame.f_code.co_name in ("function", "plain"):
            events.append((frame.f_code.co_name, event))
        return trace

    for miss, expected in ((tag, [("region", "function", i) for i in range(3)]), (original, [1, 2, 3])):
        events.clear()
        with hooked(miss, function):
            if kind == "settrace":
                before = sys.gettrace()
                sys.settrace(trace)
                try:
                    result = outer()
                finally:
                    sys.settrace(before)
            elif kind == "setprofile":
                before = sys.getprofile()
                sys.setprofile(trace)
                try:
                    result = outer()
                finally:
                    sys.setprofile(before)
            elif kind == "cprofile":
                profiler = cProfile.Profile()
                result = profiler.runcall(outer)
                events += [
                    (e.code.co_name, "call") for e in profiler.getstats() if hasattr(e.code, "co_name")
                ]
            else:
                result = monitored(outer, events)
        assert result == (expected, 4)
        names = {name for name, _ in events}
        assert {"plain", "function"} <= names
        assert outer() == ([1, 2, 3], 4)


def monitored(outer, events):
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        pytest.skip("sys.monitoring came with 3.12")
    tool = 4
    monitoring.use_tool_id(tool, "test")
    kinds = (
        monitoring.events.PY_START
        | monitoring.events.PY_RETURN
        | monitoring.events.LINE
        | monitoring.events.INSTRUCTION
    )
    for event in (monitoring.events.PY_START, monitoring.events.LINE):
        monitoring.register_callback(tool, event, lambda code, where: events.append((code.co_name, "event")))
    monitoring.set_events(tool, kinds)
    try:
        return outer()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def test_other_threads_are_left_alone():
    def function():
        return "original"

    answers = []
    with hooked(tag, function):
        thread = threading.Thread(target=lambda: answers.append(function()))
        thread.start()
        thread.join()
        assert function() == ("region", "function")
    assert answers == ["original"]


def test_threads_enter_on_their_own():
    def function(x):
        return "original", x

    callback_region = _hook.Region(function, tag)
    before = _hook.set_frame_callback(lambda f, argv: callback_region if f is function else None)
    barrier = threading.Barrier(4)
    wrong = []

    def work():
        for i in range(200):
            barrier.wait()
            _hook.enter()
            got = function(i)
            _hook.leave()
            if got != ("region", "function", i) or function(i) != ("original", i):
                wrong.append(got)

    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _hook.set_frame_callback(before)
    assert not wrong and _hook.depth() == (0, 0, 0)


def test_a_region_that_dies_lets_the_function_run():
    def function():
        return "original"

    with hooked(tag, function) as callback:
        assert function() == ("region", "function")
        reference = weakref.ref(callback.regions.pop(function))
        gc.collect()
        assert reference() is None
        assert function() == "original"


def test_a_runner_works_in_its_trampoline_only():
    def function():
        return "original"

    codes = []

    def miss(region, argv):
        codes.append(sys._getframe(1).f_code)
        return None

    with hooked(miss, function):
        function()
    (runner,) = codes[0].co_consts
    with pytest.raises(RuntimeError):
        ~runner
