"""Nothing leaks: references and memory blocks are counted over many calls, recompiles and diverted frames."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref

import pytest

from kiln import _hook
from kiln.base.source import Arg, Const
from kiln.check.guards import Absent, Distinct, Equals, Is, Keys, Length, TypeIs
from kiln.check.tree import GuardSet
from tests.check import world
from tests.hook.support import hooked

CALLS, RECOMPILES = 10_000, 1_000


class Info:
    pass


def entry_guards(thing, value):
    guards = GuardSet()
    guards.add(Is(Arg(0, "thing"), thing))
    for guard in world.guards_of(Const(thing), thing, 1):
        guards.add(guard)
    guards.add(Equals(Arg(1, "x"), value))
    guards.add(TypeIs(Arg(2, "rest"), tuple))
    guards.add(Length(Arg(2, "rest"), 1))
    guards.add(Keys(Arg(3, "more"), ("k",)))
    guards.add(Absent(Arg(0, "thing"), "nothing_here"))
    guards.add(Distinct([Arg(0, "thing"), Arg(1, "x"), Arg(2, "rest")]))
    return guards


def growth(work, *objects):
    """What a round of work adds: references to the objects (over all rounds) and memory blocks (least of all rounds)."""
    work()
    gc.collect()
    references = list(map(sys.getrefcount, objects))
    blocks = [sys.getallocatedblocks()]
    for _ in range(4):
        work()
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    more = min(after - before for before, after in itertools.pairwise(blocks))
    return [b - a for a, b in zip(references, map(sys.getrefcount, objects))], max(more, 0)


def test_calls_that_hit_and_calls_that_miss():
    def function(thing, x, *rest, **more):
        return x

    def run(thing, x, rest, more):
        return rest

    def miss(region, argv):
        return argv

    thing, value, extra = world.make_thing(1), 10**20, object()
    region = _hook.Region(function, miss)
    region.add(entry_guards(thing, value).build(), run)
    other = world.make_thing(0)

    def work():
        for _ in range(CALLS // 2):
            assert region(thing, value, extra, k=1) == (extra,)
            region(other, value, extra, k=1)
            thing.child.flag = True

    references, blocks = growth(
        work, thing, other, value, extra, region, function, run, miss, region.entries[0].guards
    )
    assert references == [0] * 9
    assert blocks < 50


def test_guards_that_fail_at_every_place():
    thing = world.make_thing(1)
    argv = (thing, 1, (2,), {"k": 3})
    built = entry_guards(thing, 1).build()
    wrong = [
        (1, 1, (2,), {"k": 3}), (thing, 2, (2,), {"k": 3}), (thing, 1, [2], {"k": 3}), (thing, 1, (), {"k": 3}),
        (thing, 1, (2,), {"j": 3}), (thing, 1, (2,), None), (thing, 1), (),
    ]  # fmt: skip

    def work():
        for _ in range(1000):
            assert built.check(argv)
            for bad in wrong:
                assert not built.check(bad)

    references, blocks = growth(work, thing, argv, built, *wrong)
    assert references == [0] * (3 + len(wrong))
    assert blocks < 50


def test_recompiles():
    def function(thing, x, *rest, **more):
        return x

    thing = world.make_thing(1)
    counted = (
        thing,
        thing.__dict__,
        thing.child,
        thing.child.__dict__,
        thing.table,
        thing.function,
        thing.constants,
    )
    infos = weakref.WeakSet()

    def miss(region, argv):
        info = Info()
        infos.add(info)
        region.add(entry_guards(thing, argv[1]).build(), lambda thing, x, rest, more: x, info)
        if len(region.entries) > 8:
            region.clear()
        return argv[1]

    region = _hook.Region(function, miss)

    def work():
        for i in range(RECOMPILES // 10):
            assert region(thing, i, 0, k=1) == i
            assert region(thing, i, 0, k=1) == i
        region.clear()

    for _ in range(8):
        work()
    references, blocks = growth(work, *counted)
    assert references == [0] * len(counted)
    assert blocks < 100
    gc.collect()
    assert len(infos) == 0


def test_regions_come_and_go():
    alive = weakref.WeakSet()

    def work():
        for _ in range(RECOMPILES):

            def function(x):
                return region

            region = _hook.Region(function, lambda region, argv: argv)
            guards = GuardSet()
            guards.add(TypeIs(Arg(0, "x"), int))
            region.add(guards.build(), function)
            assert region(1) is region
            alive.add(region)
            del region

    _, blocks = growth(work)
    assert len(alive) == 0 and blocks < 100


def test_diverted_frames():
    def function(thing, *rest, k=None):
        captured = thing
        return lambda: captured

    def miss(region, argv):
        if argv[1] == "original":
            return region.call_original(argv[0], *argv[2])
        if argv[1] == "raise":
            raise LookupError
        return argv[0]

    thing, extra = object(), object()

    with hooked(miss, function) as callback:

        def work():
            for i in range(CALLS // 4):
                assert function(thing, extra) is thing
                assert function(thing, extra, k="original")() is thing
                with pytest.raises(LookupError):
                    function(thing, k="raise")

        references, blocks = growth(
            work, thing, extra, function, function.__code__, miss, callback.regions[function]
        )
        assert references == [0] * 6
        assert blocks < 100


def test_functions_that_are_made_and_diverted_each_time():
    alive = weakref.WeakSet()

    def miss(region, argv):
        return region.call_original(*argv)

    def callback(function, argv):
        if function.__name__ != "made":
            return None
        region = _hook.Region(function, miss)
        function.__dict__["region"] = region
        alive.add(region)
        return region

    def work():
        for i in range(RECOMPILES):

            def made(x):
                return x, i

            assert made(1) == (1, i)

    _hook.skip(miss.__code__)
    before = _hook.set_frame_callback(callback)
    _hook.enter()
    try:
        _, blocks = growth(work)
    finally:
        _hook.leave()
        _hook.set_frame_callback(before)
    gc.collect()
    assert len(alive) <= 1 and blocks < 100
