"""The smallest programs of faults that the course brought to light."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
import types

import pytest
import torch

from kiln.base import records
from tests.support import EAGER, SAME_OBJECTS, Watch, kiln, one_graph, program, same_as_eager, t

X = t(3, 4)


class Bag:
    def __init__(self, **values):
        self.__dict__.update(values)


class Slot:
    __slots__ = ("a",)


def test_objects_that_were_different_must_stay_different():
    def f(x, a, b):
        return (x + 1 if a is b else x - 1), id(a) == id(b)

    watch = Watch(f)
    one, two = Bag(v=1), Bag(v=1)
    watch(X, one, two)
    watch(X, one, one)
    watch.pin(graphs=2, recompiles=1)


def test_a_list_that_is_also_another_argument():
    def f(x, a, b):
        a.append(1)
        return x * len(b)

    watch = Watch(f)
    watch(X, [1], [1])
    same = [1]
    watch(X, same, same)
    watch.pin(recompiles=1)


@program(X, Bag(), how=SAME_OBJECTS)
def test_attribute_set_and_deleted_again(x, bag):
    bag.v = 1
    del bag.v
    return x + 1, hasattr(bag, "v")


@program(X, Slot())
def test_slot_without_a_value(x, s):
    return x + 1, hasattr(s, "a")


def test_slot_that_gets_a_value():
    watch = Watch(lambda x, s: (x + 1, hasattr(s, "a")))
    s = Slot()
    watch(X, s)
    s.a = 1
    watch(X, s)
    watch.pin(graphs=2, recompiles=1)


@program(X, {"a": 1}, how=SAME_OBJECTS)
def test_dict_written_before_it_is_read(x, d):
    d["new"] = x * 2
    return x + 1


@program(X, {"a": 1})
def test_dict_written_then_read(x, d):
    d["a"] = 2
    d["new"] = 3
    return x + d["a"], list(d.items()), len(d), "new" in d


@program(X, collections.OrderedDict(a=1, b=2))
def test_order_of_an_ordered_dict_is_its_own(x, d):
    d.move_to_end("a")
    return x + 1, list(d.items())


@program(X)
def test_containers_that_hold_themselves(x):
    a, d, q = [x + 1], collections.defaultdict(list), collections.deque(maxlen=3)
    a.append(a)
    d["me"] = d
    q.append([q])
    return a, d, q


@program(X, {"a": 1})
def test_views_of_dicts_leave(x, d):
    own = {"x": 1}
    return x + 1, own.items(), own.keys(), d.values(), collections.OrderedDict(own).items()


@program(X)
def test_plain_objects_leave(x):
    return x + 1, types.SimpleNamespace(v=x), bytearray(b"ab"), type(object())


@program(X)
def test_identity_as_a_key(x):
    y = x + 1
    memo = {id(x): x, id(y): y}
    return memo[id(y)] * 2, id(x) in memo, hash(x) == hash(x), type(id(x)) is int


def test_the_number_of_an_address_breaks():
    r = same_as_eager(lambda x: (x + 1, id(x) % 1), X)
    assert [b.kind for b in r.found] == ["identity"]


@program(X)
def test_cleanup_of_a_handler_that_raises_again(x):
    try:
        try:
            raise KeyError("k")
        except KeyError as e:
            raise ValueError("v") from e
    except ValueError as e:
        return x + 1, repr(e.__cause__), repr(e.__context__)


@program(X, raises=ValueError)
def test_exception_leaves_with_its_context(x):
    try:
        {}["k"]
    except KeyError:
        raise ValueError(x.shape[0])


@contextlib.contextmanager
def scaled():
    try:
        yield 2
    except KeyError:
        kiln.graph_break()


def test_break_while_an_exception_is_handled():
    def f(x):
        with scaled() as k:
            x = x * k
            raise KeyError
        return x + 1

    same_as_eager(f, X)


@program(X)
def test_deep_recursion(x):
    def down(n):
        return x * 2 if n == 0 else down(n - 1)

    return down(300)


@program(X)
def test_copies_of_objects(x):
    bag = Bag(items=[1], x=x)
    a = copy.copy(bag)
    b = copy.deepcopy(Bag(items=bag.items, more={"k": (1, [2])}))
    return x + 1, a.items is bag.items, a.x is x, b.items == bag.items, b.items is bag.items, b.more


@program(X)
def test_comparison_function_as_a_key(x):
    return x + 1, sorted([1, 3, 2], key=functools.cmp_to_key(lambda a, b: b - a))


def test_generator_made_inside_is_seeded_in_every_call():
    one_graph(lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(3)), X)


def test_parameter_made_inside():
    one_graph(lambda x: torch.nn.functional.linear(x, torch.nn.Parameter(torch.ones(2, 4))), X)


class Doubled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x):
        self.last = x * 2
        self.other = x + 1
        return self.last + 1


def test_buffer_replaced_in_every_call():
    one_graph(Doubled(), X)


@program(t(3, 4, grad=True))
def test_hook_on_a_gradient(x):
    y = x * 2
    y.register_hook(lambda g: g * 10)
    return y.sin()


def test_code_that_runs_graphs_is_not_captured():
    def f(x):
        y = x * 2
        kiln.graph_break()
        return y + 1

    assert same_as_eager(f, X).graphs == 2


def test_class_that_closes_over_a_tensor_and_leaves():
    def f(x):
        class Local:
            def run(self):
                return x * 2

        return Local()

    got = kiln.compile(f, backend="eager")(X)
    torch.testing.assert_close(got.run(), X * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(EAGER, reason="compares with eager itself")
def test_packed_sequences_and_quantized_tensors_are_left_to_eager():
    net = torch.nn.GRU(3, 4)
    lengths = torch.tensor([4, 2])

    def recurrent(x):
        return net(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))[1] * 2

    def quantized(x):
        y = torch.quantize_per_tensor(x * 2, 0.1, 0, torch.qint8).dequantize()
        return y + len(str(y.dtype))

    for f in (recurrent, quantized):
        x = t(4, 2, 3)
        torch.testing.assert_close(kiln.compile(f)(x), f(x))


@pytest.mark.skipif(EAGER, reason="compares with eager itself")
def test_a_lazy_module_is_initialized_in_the_programs_order():
    outs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.LazyLinear(3))
        outs.append((kiln.compile(net) if compiled else net)(t(4, 6)))
    torch.testing.assert_close(*outs)


def test_a_thread_is_made_by_python_as_a_whole():
    def f(x):
        thread = threading.Thread(target=print, kwargs={"end": ""})
        thread.start()
        thread.join()
        return x + 1

    watch = Watch(f)
    for _ in range(3):
        watch(X)
    watch.pin(breaks=3, recompiles=0)


@functools.lru_cache
def cached_layer(width):
    return torch.nn.Linear(width, width)


@functools.cache
def cached_table(length, *, by=1):
    return torch.arange(float(length)) * by


@functools.cache
def cached_record(name):
    return {"name": name, "calls": []}


@pytest.mark.skipif(EAGER, reason="counts what Kiln captures")
def test_what_a_cache_holds_is_the_same_object_in_every_call():
    def f(x):
        record = cached_record("a")
        record["calls"].append(len(record["calls"]))
        same = cached_table(4, by=2) is cached_table(4, by=2)
        return cached_layer(4)(x) + cached_table(4, by=2), same, record

    cached_record.cache_clear()
    compiled, found = kiln.compile(f, backend="eager", fullgraph=True), []
    with records.collect() as log:
        found = [compiled(X) for _ in range(3)]
        layer, table = cached_layer(4)(X), cached_table(4, by=2)
        for out, same, record in found:
            torch.testing.assert_close(out, layer + table)
            assert same and record is cached_record("a")
        assert record["calls"] == [0, 1, 2]
        cached_layer.cache_clear()
        torch.testing.assert_close(compiled(X)[0], cached_layer(4)(X) + table)
    assert len(log.breaks) == 0


@pytest.mark.skipif(EAGER, reason="counts what Kiln captures")
def test_a_cache_of_sizes_answers_once_for_each():
    made = []

    @functools.cache
    def mask(length):
        made.append(length)
        return torch.ones(length, length).tril()

    compiled = kiln.compile(lambda x: mask(x.shape[0]) @ x, backend="eager", dynamic=False)
    for length in (3, 4, 3, 4, 3):
        torch.testing.assert_close(compiled(t(length, 2)), torch.ones(length, length).tril() @ t(length, 2))
    assert made == [3, 4]
