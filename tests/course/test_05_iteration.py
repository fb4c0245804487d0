"""Iteration: builtin and itertools iterators, generators, yield from, generator expressions, user-defined iterators."""

from __future__ import annotations

import inspect
import itertools
from functools import reduce

import pytest
import torch

from tests.support import one_graph, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)

EXPRESSIONS = """
list(range(n)), list(range(1, 10, n)), list(range(5, 0, -2)), range(n)[-1], 2 in range(n), len(range(0, 10, 3))
range(n).start, range(1, 7, 2).step, range(n) == range(0, n), list(reversed(range(n))), range(10)[2:5], range(5).index(3)
list(zip(L, "abc")), list(zip(L, range(9), s)), list(zip()), dict(zip(s, L)), list(zip(*[(1, 2), (3, 4)]))
list(enumerate(s)), list(enumerate(L, start=n)), [i * v for i, v in enumerate(L)]
list(map(str, L)), list(map(lambda a, b: a + b, L, range(9))), sum(map(len, ["a", "bc"])), list(map(torch.Tensor.dim, [x]))
list(filter(None, [0, 1, "", "a"])), list(filter(lambda v: v > 1, L)), list(map(abs, filter(bool, [-1, 0, 2])))
list(reversed(L)), list(reversed(s)), "".join(reversed(s)), next(reversed(L)), list(reversed((1, 2)))
sorted(L), sorted(L, reverse=True), sorted(s), sorted(["bb", "a"], key=len), sorted(L, key=lambda v: -v)
sorted([(2, "a"), (1, "b")], key=lambda p: p[0]), sorted({"b": 1, "a": 2}.items()), sorted(L, key=None)
min(L, key=lambda v: -v), max(s, key=ord), max(L, default=0), min([], default="none"), max(3, n, 1), min("b", "a", key=ord)
sum(L), sum(L, 10), sum([[1], [2]], []), sum(v * v for v in L), any(L), all(v > 0 for v in L), any([]), all([])
next(iter(L)), next(iter([]), "end"), next((v for v in L if v > 2), None), next(iter({"k": 1}))
list(iter(s)), list(iter(lambda it=iter(range(9)): next(it), 4)), tuple(iter((1, 2)))
list(itertools.chain(L, s)), list(itertools.chain.from_iterable([L, [9]])), list(itertools.repeat(n, 2))
list(itertools.islice(itertools.count(n), 3)), list(itertools.islice(L, 1, None)), list(itertools.islice(range(9), 1, 8, 3))
list(itertools.product(L, "ab")), list(itertools.product(range(2), repeat=2)), list(itertools.permutations(L, 2))
list(itertools.combinations(L, 2)), list(itertools.combinations_with_replacement("ab", 2)), list(itertools.pairwise(L))
list(itertools.accumulate(L)), list(itertools.accumulate(L, lambda a, b: a * b, initial=2)), list(itertools.accumulate(L, max))
list(itertools.zip_longest(L, "a", fillvalue=0)), list(itertools.starmap(pow, [(2, 3), (3, 2)])), list(itertools.compress(s, [1, 0, 1]))
list(itertools.takewhile(lambda v: v > 1, L)), list(itertools.dropwhile(lambda v: v > 1, L)), list(itertools.filterfalse(bool, [0, 1]))
[(k, list(g)) for k, g in itertools.groupby("aabbc")], [k for k, _ in itertools.groupby(L, key=lambda v: v > 1)]
list(itertools.islice(itertools.cycle(L), 5)), [list(i) for i in itertools.tee(L, 2)], list(itertools.repeat(1, times=2))
reduce(lambda a, b: a + b, L), reduce(lambda a, b: a * b, L, n), reduce(max, L), reduce(lambda a, v: [*a, v], s, [])
list(v for v in L), tuple(v for v in L if v - 1), set(v % 2 for v in L), dict((v, v) for v in L), {*(v for v in L)}
[v for row in ([1], [2, 3]) for v in row], {k: [v for v in range(k)] for k in L}, [[j for j in range(i)] for i in range(3)]
list(zip(map(str, L), filter(None, L), reversed(L), enumerate(L))), len(list(zip(L, itertools.count())))
[a + b for a, b in zip(L, L[1:], strict=False)], max(zip(L, s)), dict(enumerate(s)), list(zip(x.shape, "ab"))
" ".join(str(v) for v in L), "".join(sorted(s)), ",".join(map(str, range(n))), bytes(range(3)), list(b"ab")
"""


@pytest.mark.parametrize("text", EXPRESSIONS.strip().splitlines())
def test_expressions(text):
    scope = {"itertools": itertools, "reduce": reduce, "torch": torch}
    one_graph(eval(f"lambda x, n, L, s: (x * 2, {text})", scope), X, 3, [3, 1, 2], "kiln")


@program(G, [1, 2, 3])
def test_iterators_over_tensors(x, items):
    y = x
    for i, (row, v) in enumerate(zip(x, items)):
        y = y + row * v * i
    for a, b in zip(x.unbind(0), reversed(x.split(1))):
        y = y + a - b
    return y, torch.stack(list(map(lambda r: r.sum(), x))), torch.cat([r.view(1, -1) for r in x if r.dim()])


@program(G)
def test_reduce_map_and_sorted_with_tensors(x):
    total = reduce(torch.add, [x, x + 1, x * 2])
    by_size = sorted([x, x[0], x[:2]], key=lambda v: v.numel())
    biggest = max([x[0], x, x[:1]], key=torch.numel)
    return total, by_size, biggest, sum([x, x, x]), sum((r for r in x), torch.zeros(4))


def count_up(n, start=0):
    for i in range(start, n):
        yield i


def halves(x, times):
    for _ in range(times):
        x = x / 2
        yield x
    return "done"


def delegating(x):
    first = yield from halves(x, 2)
    yield first
    second = yield from [1, 2]
    yield second


@program(G)
def test_generator_functions(x):
    return [v for v in halves(x, 3)], sum(halves(x, 2)), list(count_up(4)), list(zip(count_up(9), "ab"))


@program(G)
def test_generators_are_known_as_such(x):
    made = halves(x, 2), (i for i in range(3)), count_up(1), iter([x])
    return [inspect.isgenerator(each) for each in made], x * 2


@program(G)
def test_yield_from(x):
    return list(delegating(x))


@program(X)
def test_generator_made_inside(x):
    def rows():
        nonlocal x
        for r in range(x.shape[0]):
            yield x[r]
            x = x + 1

    return torch.stack(list(rows())), x


@program(X)
def test_next_send_and_return_value(x):
    def averager():
        total, n = 0, 0
        while True:
            value = yield total / max(n, 1)
            if value is None:
                return x * total
            total += value
            n += 1

    g = averager()
    out = [next(g), g.send(4), g.send(8)]
    try:
        g.send(None)
    except StopIteration as stop:
        return stop.value, out


@program(X)
def test_throw_and_close(x):
    log = []

    def careful():
        try:
            yield 1
        except ValueError as e:
            log.append(str(e))
            yield 2
        finally:
            log.append("closed")

    g, h = careful(), careful()
    a = [next(g), g.throw(ValueError("thrown"))]
    g.close()
    next(h)
    h.close()
    return x + len(log), a, log, list(g)


@program(X)
def test_generator_with_finally_runs_when_exhausted(x):
    log = []

    def gen():
        try:
            yield x + 1
            yield x + 2
        finally:
            log.append("end")

    return list(gen()), log


@program(X)
def test_generator_left_early(x):
    log = []

    def gen():
        for i in range(10):
            log.append(i)
            yield x + i

    for v in gen():
        if len(log) == 3:
            break
    return v, log


@program(X)
def test_generators_are_lazy_and_interleave(x):
    log = []

    def source():
        for i in range(3):
            log.append(("make", i))
            yield i

    def doubled(it):
        for v in it:
            log.append(("double", v))
            yield v * 2

    return x * sum(doubled(source())), log


@program(X)
def test_generator_expressions(x):
    k = 2
    g = (x * i * k for i in range(3))
    first = next(g)
    k = 10
    return first, list(g), sum(i for i in range(4) if i % 2), tuple(j for i in range(3) for j in range(i))


@program(X)
def test_recursive_generator(x):
    def walk(tree):
        if isinstance(tree, list):
            for sub in tree:
                yield from walk(sub)
        else:
            yield tree

    return [x * v for v in walk([1, [2, [3, 4]], [], 5])]


@program(X)
def test_exception_from_a_generator(x):
    def bad():
        yield 1
        raise KeyError("inside")

    got = []
    try:
        for v in bad():
            got.append(v)
    except KeyError as e:
        return x + 1, got, e.args


@program(X)
def test_stop_iteration_inside_a_generator_becomes_runtime_error(x):
    def bad():
        yield next(iter([]))

    try:
        list(bad())
    except RuntimeError as e:
        return x + 1, str(e)


class Countdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Rows:
    def __init__(self, x):
        self.x = x

    def __iter__(self):
        for i in range(len(self.x)):
            yield self.x[i]

    def __len__(self):
        return len(self.x)

    def __reversed__(self):
        return (self.x[i] for i in range(len(self.x) - 1, -1, -1))


@program(X, Countdown(3))
def test_user_iterator(x, it):
    first = next(it)
    for v in it:
        x = x + v
    return x, first, next(it, "end"), list(Countdown(2)), max(Countdown(4)), 2 in Countdown(3), [*Countdown(2)]


@program(G)
def test_user_iterable(x):
    rows = Rows(x)
    a, b, c = rows
    return torch.stack(list(rows)), a + b + c, len(rows), list(reversed(rows)), dict(enumerate(rows))[1]


@program(X)
def test_iterators_share_their_position(x):
    it = iter([1, 2, 3, 4, 5])
    pairs = list(zip(it, it))
    left = next(it, 9)
    chunks = iter(range(6))
    return x + left, pairs, [list(itertools.islice(chunks, 2)) for _ in range(3)]


@program(X)
def test_iterator_over_a_growing_list(x):
    items = [1]
    for v in items:
        if len(items) < 5:
            items.append(v + 1)
    return x * len(items), items


@program(X)
def test_dict_changed_during_iteration_raises(x):
    d = {"a": 1}
    try:
        for k in d:
            d[k + "x"] = 2
    except RuntimeError as e:
        return x + 1, str(e)


@program(X, {"a": 1, "b": 2})
def test_iteration_over_views(x, d):
    out = [k for k in d.keys()], [v for v in d.values()], [(v, k) for k, v in d.items()]
    it = iter(d)
    first = next(it)
    return x + d[first], out, next(it), next(it, None)


@program(X)
def test_nested_generators_and_closures(x):
    makers = [lambda i=i: (x * i + j for j in range(i)) for i in range(3)]
    return [list(m()) for m in makers]


@program(X)
def test_unpacking_iterators(x):
    a, b, *c = (i * i for i in range(5))
    d, (e, *f) = map(lambda v: v, (1, [2, 3]))
    return x + a + b, c, d, e, f, [*map(str, range(2)), *(v for v in "ab")], max(*range(3), 7)


@program(X)
def test_strict_zip_raises(x):
    try:
        list(zip([1, 2], [1], strict=True))
    except ValueError as e:
        return x + 1, str(e)


@program(X)
def test_sorted_is_stable_and_calls_key_once(x):
    calls = []

    def key(p):
        calls.append(p)
        return p[0]

    out = sorted([(1, "b"), (0, "z"), (1, "a")], key=key)
    return x + len(calls), out, sorted([3, 1, 2], key=lambda v: (v % 2, v), reverse=True)


@program(X)
def test_iter_of_callable_with_sentinel(x):
    items = [3, 2, 1, 0, 9]
    return x * sum(iter(lambda: items.pop(0), 0)), items


@program(X)
def test_enumerate_zip_and_map_objects_step_by_step(x):
    e, z, m = enumerate("ab", 1), zip("ab", [1, 2]), map(lambda v: x * v, [1, 2])
    return next(e), next(z), next(m), list(e), list(z), list(m), iter(e) is e, next(m, "end")


@program(X)
def test_itertools_with_tensors(x):
    pairs = [a * b for a, b in itertools.product([x, x + 1], [2, 3])]
    run = list(itertools.accumulate(x.unbind(), torch.add))
    return pairs, run, [a - b for a, b in itertools.combinations(x.unbind(), 2)], next(itertools.chain([x], [x + 1])) is x


@program(X)
def test_async_objects_are_only_mentioned(x):
    async def later():
        return 1

    return x + 1, later.__name__


@program(X)
def test_iterators_of_itertools_are_returned_where_they_stand(x):
    a, b, c = itertools.repeat(x + 1, 3), itertools.count(3), itertools.chain([x], [x * 2])
    next(a), next(b), next(c)
    return (list(a), next(b), list(c), list(itertools.compress([x, x * 2], [0, 1])),
            [itertools.repeat(x, 2), itertools.starmap(torch.add, [(x, x)]), itertools.islice([x, x * 3], 1, 2)])


def test_a_break_inside_an_iterator_does_not_lose_items():
    def f(x):
        chosen = itertools.filterfalse(lambda v: v > 1, iter([x.sum(), x.sum() * 0, x.sum() * -1]))
        first = next(chosen)
        return first, list(chosen)

    same_as_eager(f, X)


@program(X)
def test_rows_of_a_tensor_are_views(x):
    for row in x:
        row.add_(1.0)
    first = next(iter(x))
    return x * 2, first, [row is first for row in x]


def test_only_rows_that_are_used_are_nodes():
    assert one_graph(lambda x: next(iter(x)) + 1, X).ops == 2
    assert one_graph(lambda x: [row + 1 for row in x], X).ops == 6
