"""Eight threads call, compile, change what guards read, and divert frames at once."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest

from kiln import _hook
from kiln.base.source import Arg, Const, DictAttr
from kiln.check.guards import Custom, Equals, Is, TypeIs
from kiln.check.tree import GuardSet
from tests.check import world

THREADS, SECONDS = 8, 1.5


@pytest.fixture(autouse=True)
def quick_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(work):
    errors = []
    end = time.monotonic() + SECONDS

    def guarded(number):
        rng = random.Random(number)
        try:
            while time.monotonic() < end:
                work(number, rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def slow_true(value):
    time.sleep(0)
    return True


def test_compile_and_call():
    thing = world.make_thing(1)

    def function(x, factor):
        return x * factor, thing.child.number

    def miss(region, argv):
        x, factor = argv
        number = thing.child.number
        guards = GuardSet()
        for guard in world.guards_of(Const(thing), thing, 0):
            guards.add(guard)
        guards.add(Equals(DictAttr(DictAttr(Const(thing), "child"), "number"), number))
        guards.add(TypeIs(Arg(0, "x"), type(x)))
        guards.add(Equals(Arg(1, "factor"), factor))
        guards.add(Custom(Arg(0, "x"), slow_true, "was slow"))
        region.add(guards.build(), lambda x, _: (x * factor, number), factor)
        if len(region.entries) > 6:
            region.clear()
        return x * factor, number

    region = _hook.Region(function, miss)
    numbers = {12345.5, 1.0}

    def work(number, rng):
        x, factor = rng.randrange(100), rng.randrange(10)
        product, seen = region(x, factor)
        assert product == x * factor and seen in numbers
        if rng.random() < 0.05:
            thing.child.number = rng.choice([12345.5, 1.0])
        if rng.random() < 0.05:
            thing.child.unrelated = rng.random()
        if rng.random() < 0.02:
            thing.child.child = world.make_thing(0)
        if rng.random() < 0.01:
            region.clear()

    in_threads(work)


def test_one_guard_set_for_all_threads():
    things = [world.make_thing(1), world.make_thing(1)]
    guards = GuardSet()
    guards.add(Is(Arg(0, "thing"), things[0]))
    for guard in world.guards_of(Arg(0, "thing"), things[0], 1):
        guards.add(guard)
    guards.add(Custom(Arg(0, "thing"), slow_true, "was slow"))
    built = guards.build()

    def work(number, rng):
        assert not built.check((things[1],))
        built.check((things[0],))
        if number == 0:
            things[0].table["b"] = world.Thing()
            things[0].child.flag = rng.random() < 0.5
            if rng.random() < 0.1:
                child = things[0].child
                things[0].child = world.make_thing(0)
                things[0].child = child
            things[0].child.flag = True

    in_threads(work)
    assert built.check((things[0],))


def test_frames_are_diverted_in_each_thread():
    def function(x):
        return "original", x

    def miss(region, argv):
        return "region", argv[0]

    region = _hook.Region(function, miss)
    _hook.skip(miss.__code__)
    before = _hook.set_frame_callback(lambda f, argv: region if f is function else None)

    def work(number, rng):
        x = rng.randrange(100)
        if number % 2:
            assert function(x) == ("original", x)
            return
        _hook.enter()
        try:
            assert function(x) == ("region", x)
            _hook.pause()
            assert function(x) == ("original", x)
            _hook.resume()
            assert region.call_original(x) == ("original", x)
        finally:
            _hook.leave()

    try:
        in_threads(work)
    finally:
        _hook.set_frame_callback(before)
    assert _hook.depth() == (0, 0, 0)
