"""C and Python agree on every guard, sealed or not, whatever happens to the objects."""

from __future__ import annotations

import gc
import random

import pytest

from kiln import _hook
from kiln.base.source import Arg, Const, DictAttr, Item
from kiln.check.guards import Absent, Contains, Equals, Is, Length, TypeIs
from kiln.check.tree import GuardSet, Moved, Pattern
from tests.check import world


def build(thing, argument, loose, namespace):
    guards = GuardSet()
    pinned, other = world.roots()
    for guard in world.guards_of(Const(thing, "thing"), thing):
        guards.add(guard)
    guards.add(Is(pinned, argument))
    for source, value in ((pinned, argument), (other, loose)):
        for guard in world.guards_of(source, value, 1):
            guards.add(guard)
    for guard in (*world.class_guards(), *world.global_guards(namespace)):
        guards.add(guard)
    return guards


def agree(guards, built, argv):
    expected = [g.holds(argv) for g in guards.guards]
    first = expected.index(False) if False in expected else -1
    assert built.check(argv) is (first < 0)
    assert built.check(argv) is (first < 0)
    if first >= 0:
        assert guards.guards[first].why(argv)
    return first < 0


@pytest.fixture(autouse=True)
def classes():
    kind = world.Thing.kind
    yield
    world.restore_classes(kind)


@pytest.mark.parametrize("seed", range(40))
def test_agreement_under_random_changes(seed):
    rng = random.Random(seed)
    held = broke = 0
    for _ in range(6):
        world.restore_classes("thing")
        thing, argument, loose = world.make_thing(), world.make_thing(1), world.make_thing(1)
        namespace = {"LIMIT": 10, "thing": world.make_thing(0)}
        guards = build(thing, argument, loose, namespace)
        built = guards.build()
        argv = (argument, loose)
        assert agree(guards, built, argv)
        for _ in range(25):
            target = rng.choice([thing, argument, loose, namespace["thing"]])
            world.change(rng, target)
            if rng.random() < 0.1:
                namespace[rng.choice(["LIMIT", "unrelated", "len"])] = rng.choice([10, 11])
            if agree(guards, built, argv):
                held += 1
            else:
                broke += 1
                if rng.random() < 0.7:
                    break
    assert held and broke


def test_changes_that_are_undone_hold_again():
    thing = world.make_thing()
    guards = GuardSet()
    for guard in world.guards_of(Const(thing), thing):
        guards.add(guard)
    built = guards.build()
    for _ in range(50):
        assert built.check(())
        thing.child.flag = False
        assert not built.check(())
        thing.child.flag = True
        assert built.check(())
        before = thing.child
        thing.child = world.make_thing(1)
        assert not built.check(())
        thing.child = before
        assert built.check(())
        before.child.unrelated = object()
        assert built.check(())


def test_a_seal_covers_the_pinned_tree():
    thing = world.make_thing()
    guards = GuardSet()
    for guard in world.guards_of(Const(thing), thing):
        guards.add(guard)
    built = guards.build()
    assert built.sealed is None
    assert built.check(())
    counts = built.sealed
    # left each time: sets, deques, ordered dicts of several keys, Python predicates, attributes by the generic protocol
    assert (
        counts["fetches"] <= 6
        and counts["checks"] <= 3 * 8
        and counts["dicts"] + counts["links"] + counts["words"] > 50
    )


def test_a_dict_of_the_same_address_is_not_taken_for_the_old_one():
    thing = world.make_thing(0)
    guards = GuardSet()
    for guard in world.guards_of(Const(thing), thing, 0):
        guards.add(guard)
    built = guards.build()
    assert built.check(())
    for i in range(200):
        thing.table = {"a": 1, "b": world.Thing(), 3: "three"}
        assert built.check(())
        thing.table = {"a": 2, "b": world.Thing(), 3: "three"}
        assert not built.check(())
        gc.collect(0)


def test_the_epoch_moves_with_every_dict():
    if _hook.dict_epoch() is None:
        pytest.skip("this interpreter's counter was not found")
    thing = world.make_thing(0)
    guards = GuardSet()
    for guard in world.guards_of(Const(thing), thing, 0):
        guards.add(guard)
    built = guards.build()
    assert built.check(())
    changes = [
        lambda: setattr(thing, "flag", False),
        lambda: thing.__dict__.update(unrelated=1),
        lambda: thing.__dict__.pop("unrelated"),
        lambda: thing.table.setdefault("z", 1),
        lambda: thing.table.popitem(),
        lambda: thing.empty.update(a=1),
        lambda: thing.empty.clear(),
        lambda: setattr(thing.module, "value", 4),
        lambda: delattr(thing.module, "value"),
    ]
    for change in changes:
        before = _hook.dict_epoch()
        change()
        assert _hook.dict_epoch() != before


def test_calls_without_keywords_leave_the_epoch_alone():
    def function(x, **more):
        return x

    region = _hook.Region(function, None)
    guards = GuardSet()
    guards.add(TypeIs(Arg(0, "x"), int))
    region.add(guards.build(), lambda x, more: more)
    kept = [region(1), region(2)]
    assert kept == [{}, {}] and kept[0] is not kept[1]
    kept[0]["mine"] = 1
    assert region(3) == {}
    region = _hook.Region(function, None)
    region.add(guards.build(), lambda x, more: x)
    region(1)
    before = _hook.dict_epoch()
    for _ in range(5):
        region(1)
    assert _hook.dict_epoch() == before


class Part:
    """What a path leads through: attributes, a dict and a list."""

    def __init__(self, n: int) -> None:
        self.n, self.names, self.items, self.inner = n, {"a": n}, [n, n], object()


def test_guards_moved_to_other_roots():
    """A pattern over another root is checked in C as its guards are, written one by one."""
    first, second = Part(3), Part(3)
    root = Const(first, "first")
    paths = [
        None,
        DictAttr(root, "n"),
        DictAttr(root, "names"),
        DictAttr(root, "items"),
        DictAttr(root, "inner"),
    ]
    steps = [(path, 0 if path else -1) for path in paths]
    steps.append((Item(paths[2], "a"), 2))
    steps.append((Item(paths[3], 1), 3))
    sources = [root, *paths[1:], steps[5][0], steps[6][0]]
    kinds = [
        (TypeIs(root, Part), 0), (Absent(root, "late"), 0), (Equals(sources[1], 3), 1), (Length(sources[3], 2), 3),
        (Is(sources[4], first.inner), 4), (Contains(sources[2], "a", True), 2), (Equals(sources[5], 3), 5),
        (Equals(sources[6], 3), 6),
    ]  # fmt: skip
    pattern = Pattern(steps, [(guard, place, guard.emit()) for guard, place in kinds])
    guards = GuardSet()
    guards.add(TypeIs(Arg(0, "x"), int))
    moved = Moved(pattern, {0: Const(second, "second")}, [0, 1, 2, 3, 4, 5, 7], {4: second.inner})
    guards.add(moved, "here")
    built = guards.build()
    assert [str(guard.source).partition(".")[0] for guard in guards.guards] == ["x"] + ["second"] * 7
    assert guards.place(guards.guards[1]) == "here" and len(guards.guards) == 8

    def changed(change, back):
        change()
        assert not agree(guards, built, (1,))
        back()
        assert agree(guards, built, (1,))

    assert agree(guards, built, (1,))
    first.n = first.items[1] = 7  # the first object is none of theirs
    assert agree(guards, built, (1,)) and not agree(guards, built, ("x",))
    second.names["a"] = 4  # not among the chosen ones
    assert agree(guards, built, (1,))
    inner = second.inner
    changed(lambda: setattr(second, "n", 4), lambda: setattr(second, "n", 3))
    changed(lambda: setattr(second, "late", 4), lambda: delattr(second, "late"))
    changed(lambda: second.items.append(3), second.items.pop)
    changed(lambda: second.items.__setitem__(1, 5), lambda: second.items.__setitem__(1, 3))
    changed(lambda: setattr(second, "inner", first.inner), lambda: setattr(second, "inner", inner))
    changed(second.names.clear, lambda: second.names.update(a=1))
