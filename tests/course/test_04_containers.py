"""Containers read, made, nested and mutated: their methods, views, comparisons; transformers' ModelOutput."""

from __future__ import annotations

import collections
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from transformers.utils.generic import ModelOutput

from tests.support import Watch, one_graph, program, t

X = t(3, 4)
G = t(3, 4, grad=True)
NAMES = {"torch": torch, "deque": deque, "OrderedDict": OrderedDict, "defaultdict": defaultdict, "Counter": Counter,
         "ChainMap": ChainMap, "MappingProxyType": MappingProxyType, "collections": collections}  # fmt: skip


def body(text):
    """A program from statements over x, L, T, D, S; it gives all of them back."""
    lines = "\n    ".join(text.split("; "))
    scope = dict(NAMES)
    exec(f"def run(x, L, T, D, S):\n    r = None\n    {lines}\n    return x + 1, r, L, T, D, S", scope)
    return scope["run"]


LISTS = """
L.append(x); r = L[-1] is x
L.extend([4, x]); L.extend((5,)); r = len(L)
L.insert(1, x * 2); L.insert(-1, 7)
r = L.pop(); r = (r, L.pop(0))
L.remove(2)
L.reverse()
L.sort(); L.sort(reverse=True)
L.sort(key=lambda v: -v)
L.clear()
r = L.copy(); r.append(9)
r = L.index(2), L.count(1), L.index(2, 1)
L[0] = x; L[-1] = x + 2
L[1:] = [x]; L[:0] = [8, 9]
L[::2] = [10, 20]
del L[0]; del L[-1]
L += [4]; L *= 2
r = L + [4], L * 2, 2 * L, [0] * 3
r = 2 in L, 7 not in L, len(L), max(L), min(L), sum(L)
r = L == [3, 1, 2], L != [3], L < [4], L >= [3, 1], [1, [2]] == [1, [2]]
r = L[:], L[::-1], L[-2:], L[5:], L[slice(0, 2)]
r = list(reversed(L)), sorted(L), list(enumerate(L)), list(zip(L, L[1:]))
a, b, c = L; r = [c, b, a]
r = [i for i in L if i > 1], [*L, *L]
L.append(L[0]); L.append(L)
M = [[0] * 2 for _ in range(2)]; M[0][1] = x; r = M
M = [[0]] * 2; M[0].append(1); r = M, M[0] is M[1]
r = isinstance(L, list), type(L) is list, list("abc"), list(range(3)), list(D), list(S)
for v in list(L): L.append(v)
r = [v for v in iter(L)], next(iter(L)), any(v > 2 for v in L), all(L)
"""

TUPLES = """
r = T[0], T[-1], T[1:], len(T), T + (3,), T * 2
r = T.index(2), T.count(1), 1 in T, T == (1, 2, 3), T < (2,), hash(T) == hash((1, 2, 3))
r = tuple(L), tuple(v * 2 for v in T), (*T, *L), (x,), (), tuple(x.shape)
a, *b = T; r = b
U = (x, [x]); U[1].append(2); r = U
r = {T: 1}[(1, 2, 3)], (x, x + 1)[1]
r = max(T), sum(T), sorted(T, reverse=True), tuple(reversed(T)), isinstance(T, tuple)
"""

DICTS = """
D["new"] = x; D["a"] = x + 1
r = D["a"], D.get("b"), D.get("zz"), D.get("zz", 7)
del D["a"]
r = D.pop("a"), D.pop("zz", None)
r = D.popitem()
r = D.setdefault("a", 5), D.setdefault("q", [])
D.setdefault("q", []).append(x)
D.update({"z": x}); D.update(a=9); D.update([("k", 1)])
D |= {"m": 2}; r = D | {"a": 0}
D.clear()
r = D.copy(); r["only"] = 1
r = list(D), list(D.keys()), list(D.values()), list(D.items()), len(D)
r = "a" in D, "zz" not in D, "a" in D.keys(), 1 in D.values(), ("a", 1) in D.items()
r = D == {"a": 1, "b": 2}, D != {}, {} == {}
r = dict(D), dict(a=1), dict([("k", 2)]), dict(zip("ab", L)), dict.fromkeys("ab", 0), {**D, "c": 3}
r = {k: v * 2 for k, v in D.items()}, {v: k for k, v in D.items()}
for k in list(D): D[k + k] = D.pop(k)
for k, v in D.items(): D[k] = v + 1
r = sorted(D, reverse=True), max(D), list(reversed(D)), sorted(D.items(), key=lambda kv: -kv[1])
D["n"] = {}; D["n"]["m"] = {"x": x}; r = D["n"]["m"]["x"] * 2
D[1] = "int"; D[(1, "t")] = "tuple"; D[None] = "none"; D[x.dtype] = "dtype"; r = D[torch.float32]
D[x] = "tensor"; r = D[x]
r = D.keys() & {"a", "z"}, D.keys() | {"z"}, D.keys() - {"a"}, D.items() ^ {("a", 1)}, D.keys() == {"a", "b"}
V = D.values(); D["later"] = 5; r = list(V), len(V)
r = isinstance(D, dict), iter(D).__next__(), next(iter(D.items())), [*D], {*D}
D[True] = "t"; D[1] = "one"; r = list(D)
"""

SETS = """
S.add(9); S.add(1)
S.remove(1); S.discard(77)
S.update([5, 6], {7}); S |= {8}
S -= {1}; S &= {2, 3, 4}; S ^= {3, 10}
S.difference_update([1]); S.intersection_update([2, 3]); S.symmetric_difference_update({2, 9})
S.clear()
r = S.copy(), set(L), set("aab"), {1, 1, 2}, frozenset(L), {v % 2 for v in L}
r = 1 in S, 7 not in S, len(S), S == {1, 2, 3}, S != set(), S < {1, 2, 3, 4}, S >= {1}, S.issubset([1, 2, 3])
r = S | {4}, S & {1}, S - {1}, S ^ {1, 5}, S.union([9]), S.isdisjoint({8}), S.issuperset({1})
r = sorted(S), sum(S), max(S), {frozenset({1}): 2}[frozenset({1})], frozenset(S) | {9}, hash(frozenset({1}))
S.add(x); r = x in S
S.add((1, "t")); S.add(None); S.add(x.dtype)
r = {x, x}.pop() is x, len({x, x + 1})
"""

DEQUES = """
d = deque(L); d.append(x); d.appendleft(0); r = d
d = deque(L, maxlen=2); d.append(9); r = d, d.maxlen, len(d)
d = deque(L); d.rotate(1); r = d, d.pop(), d.popleft()
d = deque(L); d.extend([7]); d.extendleft([8, 9]); d.reverse(); r = d
d = deque(L); d.insert(1, 5); d.remove(2); del d[0]; r = d.index(1), d.count(1), 5 in d; d[0] = x; r = r, d, d[-1]
d = deque([x]); r = d.copy(), d == deque([x]), bool(deque()), list(reversed(d)), deque() + deque([1])
q = deque([(0, x)]); n, y = q.popleft(); q.append((n + 1, y * 2)); r = q, len(q)
"""

OTHERS = """
o = OrderedDict(b=1, a=x); o["c"] = 3; o.move_to_end("b"); r = o, list(o), o.popitem(last=False)
o = OrderedDict([("a", 1)]); r = o == OrderedDict(a=1), o == {"a": 1}, list(reversed(o)), o.pop("a"), len(o)
d = defaultdict(list); d["k"].append(x); d["k"].append(2); r = d, len(d["none"]), "zz" in d, d.get("q")
d = defaultdict(lambda: 5); d["a"] += 1; r = d["a"], d["b"], sorted(d)
d = defaultdict(int, {"a": 1}); d["b"] += 2; r = d, d.default_factory
d = defaultdict(lambda: defaultdict(int)); d["a"]["b"] += 1; r = d["a"]["b"], d["q"]["z"]
c = Counter("abca"); c["z"] += 1; r = c, c.most_common(1), c["none"], sum(c.values()), c.total()
c = Counter(L) + Counter([1]); c.update([1, 1]); c.subtract([3]); r = c, sorted(c.elements())
m = ChainMap({"a": 1}, D); r = m["a"], m["b"], sorted(m), len(m)
p = MappingProxyType(D); r = p["a"], list(p), len(p), "b" in p
P = collections.namedtuple("P", "a b"); p = P(x, 2); r = p.b, p[0] is x, P._fields
"""


def programs(text):
    return [line for line in text.strip().splitlines() if line.strip()]


@pytest.mark.parametrize("text", programs(LISTS + TUPLES + DICTS + SETS + DEQUES + OTHERS))
def test_methods(text):
    one_graph(body(text.strip().removesuffix(";").rstrip("; ")), X, [3, 1, 2], (1, 2, 3), {"a": 1, "b": 2}, {1, 2, 3})


@pytest.mark.parametrize("text", [
    "L.pop(9)", "L.remove(77)", "L.index(77)", "L[9]", "D['zz']", "D.pop('zz')", "S.remove(77)", "T[9]", "[].pop()",
    "{}.popitem()", "L['a']", "T.index(9)", "deque().pop()", "OrderedDict(a=1)['b']", "{[]: 1}", "{L}", "L + T", "L < 3",
    "T[0] + 'a'", "(lambda v: v[0])(None)", "D[L]", "deque(maxlen=-1)", "max([])", "dict([1])", "L.no_such_method",
])  # fmt: skip
def test_errors_have_their_type_and_text(text):
    f = body(f"try: {text}; except Exception as e: r = type(e), str(e)")
    one_graph(f, X, [3, 1, 2], (1, 2, 3), {"a": 1, "b": 2}, {1, 2, 3})


@program(G, [t(4), (t(4, grad=True), {"k": t(4), "deep": [t(4)]})])
def test_nested_arguments(x, tree):
    first, (second, rest) = tree
    return {"sum": x + first * second + rest["k"] - rest["deep"][0], "back": (tree, [rest])}


@program(X, {"w": t(4), "n": 2, "opts": {"bias": True, "names": ["a", "b"]}})
def test_config_dict(x, cfg):
    y = x * cfg["w"] * cfg["n"]
    if cfg["opts"]["bias"] and "b" in cfg["opts"]["names"]:
        y = y + len(cfg["opts"]["names"])
    return y


@program(X, [1, 2])
def test_mutating_while_building(x, items):
    acc = []
    for i, v in enumerate(items):
        acc.append(x * v)
        items[i] = acc
    acc[0] = acc[1]
    return acc, items, acc[0] is acc[1], items[0] is acc


@program(G)
def test_outputs_keep_their_structure(x):
    return {"a": [x + 1, (x, None)], "b": (), 3: {"s": {1, 2}}, "t": deque([x * 2], maxlen=3), "o": OrderedDict(z=x.sum())}


@program(G)
def test_shared_and_cyclic_outputs(x):
    shared = [x + 1]
    loop = {"shared": shared}
    loop["self"] = loop
    return shared, loop, [shared, [shared]]


@program(X)
def test_same_tensor_twice_in_the_output(x):
    y = x + 1
    return y, [y, x], {"y": y}, x


@program(X, [t(4), t(4)])
def test_list_of_tensors(x, ws):
    ws.append(ws[0] + x)
    out = torch.stack([w.sum() for w in ws])
    ws[0], ws[1] = ws[1], ws[0]
    return out, ws.pop(), len(ws)


@program(X, {"a": t(4), "b": t(4)})
def test_dict_of_tensors(x, d):
    for k, v in d.items():
        x = x + v * len(k)
    d["sum"] = x
    return {k: v + 1 for k, v in d.items()}


@program(X, deque([1, 2, 3], maxlen=3), OrderedDict(b=1, a=2), defaultdict(list, k=[1]), Counter("abb"), frozenset({1, 2}))
def test_rich_containers_as_arguments(x, d, o, dd, c, fs):
    d.append(x * 2)
    o.move_to_end("b")
    dd["k"].append(3)
    dd["new"].append(x)
    c["a"] += 5
    return x * len(fs) + d[0] + o["a"] + c["b"], list(o), c.most_common(), 1 in fs, fs | {9}


@program(X)
def test_breadth_first_search(x):
    graph = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}
    queue, seen, order = deque(["a"]), {"a"}, []
    while queue:
        node = queue.popleft()
        order.append(node)
        for n in graph[node]:
            if n not in seen:
                seen.add(n)
                queue.append(n)
        x = x + len(order)
    return x, order


class MyList(list):
    def total(self):
        return sum(self)

    def append(self, v):
        super().append(v * 2)


class MyDict(dict):
    def __missing__(self, key):
        return f"<{key}>"

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class MyTuple(tuple):
    __slots__ = ()

    @property
    def last(self):
        return self[-1]


@program(X, MyList([1, 2]), MyDict(a=1), MyTuple((1, 2)))
def test_subclasses_of_containers(x, ml, md, mt):
    ml.append(3)
    md["n"] = x
    made = MyList([5])
    made.append(x)
    made.tag = "t"
    return x * ml.total() + mt.last, md["zz"], md.a, made, MyDict(k=x + 1), len(mt), isinstance(ml, list), mt


@program(X, UserList([1, 2]), UserDict(a=1))
def test_user_containers(x, ul, ud):
    ul.append(3)
    ud["b"] = x
    return x + sum(ul) + ud["a"], list(ud), len(ul)


@program(X, SimpleNamespace(a=1, b=SimpleNamespace(c=2)))
def test_simple_namespace(x, ns):
    ns.a += ns.b.c
    ns.new = x + ns.a
    return ns.new * 2, ns == SimpleNamespace(), SimpleNamespace(k=x + 1)


@program(X)
def test_sizes_are_tuples(x):
    s = x.shape
    return x.reshape(s[::-1]), s, s[0], s + (5,), list(s), torch.Size([1, 2]), s == (3, 4), s.numel(), isinstance(s, tuple), \
        x.view(*s[:1], -1).shape, len(s), max(s)  # fmt: skip


@program(X)
def test_comparison_of_nested_containers(x):
    a, b = [1, {"k": (2, 3)}], [1, {"k": (2, 3)}]
    return x + (a == b), a is b, [x] == [x], (1, "a") < (1, "b"), {"k": x} == {"k": x}, [1, 2] > [1], {1} <= {1, 2}


@program(X, [[1, 2], [3]])
def test_mutation_through_an_alias(x, m):
    row = m[0]
    row.append(x)
    m[1] = row
    row[0] = "changed"
    return x + 1, m[0] is m[1]


def test_aliased_arguments_stay_aliased():
    items = [1]
    one_graph(lambda x, a, b: (a.append(x), len(b), a is b, x + 1), X, items, items)



def grown(x, log, window):
    """What only grows at its end, and is read there."""
    log.append(x.sum())
    log += [x * 2]
    log.extend((x.shape[0], "turn"))
    window.append(x + 1)
    return log[-3] + 1, log[-1] if log else None


def test_what_only_grows_is_not_looked_into():
    """A list that a program writes its history to has another length in every call."""
    watch = Watch(grown)
    for n in range(4):
        watch(X, [X] * n, deque([X] * n, maxlen=3))
    watch.pin(graphs=1, breaks=0, recompiles=0)


def test_a_length_that_varies_is_a_number():
    """A program that asks how long its history is, and no more."""

    def bounded(x, log):
        if log:
            x = x + 1
        log.append(x.sum())
        return x * len(log) if len(log) < 9 else x

    watch = Watch(bounded)
    for n in (0, 1, 2, 3, 4, 7, 8, 9, 2):
        watch(X, [1.5] * n)
    watch.pin(graphs=4, breaks=0, recompiles=3)  # none, one, more, and beyond the bound


@pytest.mark.parametrize("look", [
    lambda x, log: (len(log), bool(log)), lambda x, log: (log[0], log[-1], log[-3]), lambda x, log: log[5:] + log,
    lambda x, log: log.extend(log), lambda x, log: (log.append(log), log[-1] is log), lambda x, log: log.pop(0),
    lambda x, log: log.extend(v for v in (1, x)), lambda x, log: log.insert(0, x), lambda x, log: log.clear(),
])  # fmt: skip
def test_what_grew_is_looked_into(look):
    one_graph(lambda x, log: (log.append(x * 2), look(x, log), log.append(1), x + 1), X, [X, 1, [2]])


def model_output():
    from dataclasses import dataclass

    @dataclass
    class Seq(ModelOutput):
        loss: torch.Tensor | None = None
        logits: torch.Tensor | None = None
        hidden: tuple | None = None

    return Seq


SEQ = model_output()


@program(G)
def test_model_output_made(x):
    out = SEQ(logits=x * 2, hidden=(x, x + 1))
    out.loss = x.sum()
    return out


@program(X, SEQ(logits=t(4)))
def test_model_output_read(x, out):
    y = x + out.logits + out["logits"] + out[0]
    return y, out.loss is None, list(out.keys()), len(out), "loss" in out, out.to_tuple(), [k for k, v in out.items()]


@program(X)
def test_model_output_changed(x):
    out = SEQ(logits=x + 1)
    out["loss"] = x.mean()
    out.hidden = (x,)
    first, *rest = out.to_tuple()
    return first, len(rest), out[:2], out.get("hidden"), isinstance(out, OrderedDict), out
