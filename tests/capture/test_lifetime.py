"""Nothing leaks: not over calls, not over recompiles, not when a compiled model is dropped; and threads do not mix."""

import gc
import threading
import weakref

import pytest
import torch

import kiln
from kiln.base import records
from kiln.ops.fake import FakeTensor
from tests.same import Same


def scaled(x, k):
    return torch.relu(x + k) * 2


def alive():
    gc.collect()
    return len(gc.get_objects())


def test_ten_thousand_calls_leave_nothing():
    f, x = kiln.compile(scaled, backend="eager"), torch.randn(4)
    for k in range(3):
        f(x, k)
    before = alive()
    for i in range(10_000):
        f(x, i % 3)
    assert alive() - before < 20


def test_a_thousand_recompiles_leave_nothing():
    f, x = kiln.compile(scaled, backend="eager"), torch.randn(4)
    for _ in range(20):
        kiln.reset()
        f(x, 1)
    before = alive()
    for _ in range(1_000):
        kiln.reset()
        f(x, 1)
    assert alive() - before < 1_000


def test_a_dropped_model_is_freed():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    compiled = kiln.compile(model, backend="eager")
    compiled(x)
    weight = weakref.ref(model.weight)
    del model, compiled
    gc.collect()
    assert weight() is None


def test_eight_threads_compile_and_call():
    f, failures = kiln.compile(scaled, backend="eager"), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(40):
            x, k = torch.randn(2 + i % 3, generator=generator), (i * 7 + seed) % 5
            if not torch.equal(f(x, k), scaled(x, k)):
                failures.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def lives(program, *args):
    """When the tensors die that a program makes with `made`, among the moments that it passes."""
    seen = []

    @kiln.disable
    def made(name, value):
        value = value + 0
        weakref.finalize(value, seen.append, f"{name} is gone")
        return value

    @kiln.disable
    def passes(moment, value=None):
        seen.append(moment)

    program(made, passes, *args)
    return seen


def dies_as_in_eager(program):
    """The calls of a program compiled: what dies between two moments is the same."""

    def between(seen):
        parts, part = [], set()
        for event in seen:
            if event.endswith("gone"):
                part.add(event)
            else:
                parts += [part, event]
                part = set()
        return [*parts, part]

    compiled, x = kiln.compile(program, backend="eager"), torch.randn(4)
    lives(compiled, x)
    for _ in range(2):
        assert between(lives(compiled, x)) == between(lives(program, x))


def straight(made, passes, x):
    a = made("a", x)
    b = made("b", a * 2)
    passes("first", a)
    c = made("c", a + b)
    del a, b
    passes("second")
    d = c.sin()
    c = None
    passes("third")
    return d


def test_what_is_handed_on_after_a_break_dies_with_its_variable():
    dies_as_in_eager(straight)


def within(made, passes, a):
    b = made("b", a.cos())
    passes("inner")
    del a
    c = made("c", b + 1)
    del b
    passes("inner again")
    return c * 2


def nested(made, passes, x):
    c = within(made, passes, made("a", x))
    passes("outer")
    c = made("d", c + 1)
    passes("outer again")
    return c + 1


def test_what_is_handed_on_within_inlined_calls_dies_with_its_variable():
    dies_as_in_eager(nested)


def turns(made, passes, x):
    total = made("total", x)
    for i in range(3):
        x = made(f"x{i}", x + 1)
        passes(f"turn {i}")
        total = made(f"total{i}", total + x)
        passes(f"end {i}")
    return total * 2


def test_what_a_loop_hands_on_dies_with_its_variable():
    dies_as_in_eager(turns)


def handled(made, passes, x):
    a = made("a", x)
    try:
        passes("tried")
        b = made("b", a * 2)
        del a
        passes("computed")
        raise ValueError
    except ValueError:
        passes("handled")
        c = b + 1
        del b
    passes("left")
    return c


def test_what_goes_through_handlers_dies_with_its_variable():
    dies_as_in_eager(handled)


def test_what_the_breaking_call_does_not_need_is_gone_while_it_runs():
    def program(made, passes, x):
        a = made("a", x)
        b = a * 2
        del a
        passes("now", b)
        return b + 1

    dies_as_in_eager(program)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_fakes_go_where_autograd_saves_results(backend):
    """A node of autograd's that saves its own result, as that of relu does, keeps no fake of it alive."""

    def fakes() -> int:
        gc.collect()
        return sum(type(o) is FakeTensor for o in gc.get_objects())

    def once(width: int) -> None:
        layer = torch.nn.Linear(width, width)
        kiln.compile(lambda x: layer(x).relu().exp().sum(), backend=backend)(torch.ones(2, width)).backward()

    once(3)
    before = fakes()
    for width in range(4, 8):
        once(width)
    assert fakes() <= before


def test_what_a_program_raises_while_it_is_captured_keeps_nothing_alive():
    class Holder:
        pass

    def f(x, holder):
        first = next(number for number in (x + holder.value, x))
        try:
            raise ValueError
        except ValueError:
            return first

    gc.collect()
    gc.disable()
    try:
        holder = Holder()
        holder.value = 2
        kiln.compile(f, backend="eager")(torch.ones(2), holder)
        known, holder = weakref.ref(holder), None
        assert known() is None
    finally:
        gc.enable()


class Holder:
    def __init__(self, value):
        self.value = value


class Child:
    def __init__(self, parent):
        self.parent = weakref.ref(parent)


def local_watched(x, seen):
    holder = Holder(x + 1)
    watch = weakref.ref(holder)
    seen()
    return watch() is None, x * 2


def tensor_watched(x, seen):
    y = x + 1
    watch = weakref.ref(y)
    seen()
    return watch() is None, x * 2


def parent_watched(x, seen):
    holder = [Holder(x + 1)]
    child = Child(holder[0])
    seen()
    return child.parent().value * 2


def watched_within_a_call(x, seen):
    def started(value, kept):
        kept.append(weakref.ref(value))
        seen()
        return value.value + 1

    holder, kept = Holder(x), []
    y = started(holder, kept)
    return kept[0]() is None, y


def watched_over_two_breaks(x, seen):
    holder = Holder(x)
    watch = weakref.ref(holder)
    seen()
    x = x + 1
    seen()
    return watch() is None, x


def watched_by_a_proxy(x, seen):
    holder = Holder(x)
    proxy = weakref.proxy(holder)
    seen()
    return proxy.value * 2


def watched_by_a_dict(x, seen):
    holder = Holder(x)
    known = weakref.WeakValueDictionary()
    known["a"] = holder
    seen()
    return len(known), known["a"].value * 2


def watched_by_a_set(x, seen):
    holder = Holder(x)
    known = weakref.WeakSet([holder])
    seen()
    return len(known), x * 2


def deleted(x, seen):
    holder = Holder(x)
    watch = weakref.ref(holder)
    seen()
    del holder
    seen()
    return watch() is None, x * 2


class Folder:
    """Goes with the last variable that holds it, whoever reads its path."""

    def __init__(self):
        self.path = {"open": True}

    def __del__(self):
        self.path["open"] = False


folder_made = kiln.disable(Folder)


def gone_with_its_variable(x, seen):
    folder = folder_made()
    path = folder.path
    x = x + 1
    seen()
    return path["open"], x


@pytest.mark.parametrize("program, breaks", [
    (local_watched, 1), (tensor_watched, 1), (parent_watched, 1), (watched_within_a_call, 1),
    (watched_over_two_breaks, 2), (watched_by_a_proxy, 2), (watched_by_a_set, 2), (deleted, 2),
    (gone_with_its_variable, 2),
])  # fmt: skip
def test_what_is_watched_lives_on_after_a_break(program, breaks):
    x = torch.ones(3)
    compiled, seeing = kiln.compile(program, backend="eager"), kiln.disable(lambda: None)
    with records.collect() as seen:
        results = [compiled(x, seeing) for _ in range(3)]
    for result in results:
        Same()(program(x, seeing), result)
    assert len(seen.breaks) == breaks


def test_what_a_native_dict_watches_lives_on_after_a_break():
    x, seeing = torch.ones(3), kiln.disable(lambda: None)
    compiled = kiln.compile(watched_by_a_dict, backend="eager")
    for _ in range(2):
        Same()(watched_by_a_dict(x, seeing), compiled(x, seeing))
