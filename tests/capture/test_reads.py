"""Every read of the outside world is guarded: change it between calls, and the results are those of eager."""

from __future__ import annotations

import array
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import json
import os
import pathlib
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.same import Same
from tests.support import kiln, t

pytestmark = pytest.mark.filterwarnings("ignore")


class Bag:
    k = 1

    def __init__(self, **kw):
        self.__dict__.update(kw)

    def method(self, x):
        return x + self.n


class Int(int):
    pass


class Str(str):
    def __len__(self):
        return 7


class One:
    v = 1


class Two:
    v = 2


@dataclasses.dataclass
class Data:
    n: int
    items: list


Pair = namedtuple("Pair", "a b")
Color = enum.Enum("Color", "RED GREEN")


def times(k):
    return lambda x: x * k


def tagged(x, **kw):
    for name, value in kw.items():
        setattr(x, name, value)
    return x


def outcome(f, *args):
    try:
        return f(*args)
    except Exception as error:
        return type(error), str(error)


# A function and the further arguments of its calls: each twice, then each once more.
ARGUMENTS = {
    "numpy scalar": (lambda x, n: x * float(n), [(np.float32(2),), (np.float32(3),), (np.int64(3),), (2,)]),
    "numpy array": (lambda x, a: x + float(a.sum()), [(np.ones(3),), (np.ones(3) * 2,), (np.ones(2),)]),
    "from_numpy": (lambda x, a: x + torch.from_numpy(a), [(np.ones(4, np.float32),), (np.ones(4, np.float32) * 2,)]),
    "decimal": (lambda x, d: x * float(d), [(decimal.Decimal("1.5"),), (decimal.Decimal("2.5"),)]),
    "fraction": (lambda x, d: x * float(d), [(fractions.Fraction(1, 2),), (fractions.Fraction(1, 3),)]),
    "date": (lambda x, d: x * d.year, [(datetime.date(2020, 1, 1),), (datetime.date(2021, 1, 1),)]),
    "path": (lambda x, p: x * len(p.name), [(pathlib.Path("/a/b"),), (pathlib.Path("/a/bcd"),)]),
    "bytes": (lambda x, b: x * b[0], [(b"a",), (b"b",), (bytearray(b"a"),), (bytearray(b"b"),)]),
    "complex": (lambda x, c: x * c, [(1j,), (2j,), (1 + 0j,)]),
    "int subclass": (lambda x, i: (x * i, type(i).__name__), [(3,), (Int(3),), (Int(4),), (True,)]),
    "str subclass": (lambda x, s: x * len(s), [("ab",), (Str("ab"),)]),
    "partial": (lambda x, p: p(x), [(functools.partial(torch.add, other=1),), (functools.partial(torch.add, other=2),),
                                    (functools.partial(torch.mul, other=2),)]),
    "bound method": (lambda x, m: m(x), [(Bag(n=1).method,), (Bag(n=2).method,)]),
    "closure": (lambda x, f: f(x), [(times(1),), (times(2),), (times(t(4)),)]),
    "class": (lambda x, c: x * c.v + c().v, [(One,), (Two,)]),
    "module": (lambda x, m: m(x), [(nn.Linear(4, 4),), (nn.Linear(4, 4),), (nn.Linear(4, 2),), (nn.ReLU(),)]),
    "device": (lambda x, d: x.to(d), [(torch.device("cpu"),), ("cpu",), ("meta",)]),
    "nested tuple": (lambda x, q: x * q[0][1], [(((1, 2),),), (((1, 3),),)]),
    "list in tuple": (lambda x, q: x * sum(q[0]), [(([1, 2],),), (([1, 3],),), (([1, 2, 3],),)]),
    "named tuple": (lambda x, q: x * q.a, [(Pair(1, 2),), (Pair(2, 2),)]),
    "optional tensor": (lambda x, m: x + 1 if m is None else x * m, [(None,), (t(4),)]),
    "kind of dict": (lambda x, d: (x + len(d), type(d).__name__), [({"a": 1},), (OrderedDict(a=1),), (defaultdict(int, a=1),)]),
    "default factory": (lambda x, d: x + d["q"], [(defaultdict(lambda: 1),), (defaultdict(lambda: 2),), (defaultdict(int),)]),
    "truth": (lambda x, o: x + 1 if o else x - 1, [([],), ([1],), ({},), ("",), ("a",), (0,), (Bag(),), (None,)]),
    "in a list": (lambda x, s: x + ("a" in s), [(["a", "b"],), (["c", "b"],), (["b", "a"],)]),
    "sorted": (lambda x, s: x * sorted(s)[0], [([3, 1],), ([3, 2],), ([3, 2, 0],)]),
    "equal dicts": (lambda x, d: x + (d == {"a": [1]}), [({"a": [1]},), ({"a": [2]},)]),
    "equal lists": (lambda x, s: x + (s == [1, [2]]), [([1, [2]],), ([1, [3]],)]),
    "equal tuples": (lambda x, s: x + (s == (1, (2, "a"))), [((1, (2, "a")),), ((1, (2, "b")),)]),
    "equal sets": (lambda x, s: x + (s == {1, 2}), [({1, 2},), ({1, 3},)]),
    "equal dataclasses": (lambda x, a, b: x + (a == b), [(Data(1, [1]), Data(1, [1])), (Data(1, [1]), Data(1, [2])),
                                                         (Data(2, [1]), Data(1, [1]))]),
    "f-string": (lambda x, o: (x + 1, f"{o}"), [(1,), (2,), ([1, 2],), ([1, 3],), ({"a": 1},), ({"a": 2},), (Data(1, []),),
                                                (Data(2, []),)]),
    "str and repr": (lambda x, o: (x + 1, str(o), repr(o)), [([1, [2]],), ([1, [3]],), ((1, 2),), ((1, 3),)]),
    "unpacked": (lambda x, o: (lambda a, *b: x + a * len(b))(*o), [([1, 2],), ([1, 2, 3],), ([2, 2],)]),
    "unpacked keywords": (lambda x, o: (lambda a, **b: x + a * len(b))(**o), [({"a": 1, "b": 2},), ({"a": 1},), ({"a": 3, "b": 2},)]),
    "zipped": (lambda x, o, p: x + sum(a * b for a, b in zip(o, p)), [([1, 2], [3, 4]), ([1, 2], [3, 5]), ([1, 2], [3])]),
    "kinds": (lambda x, o: x + 1 if isinstance(o, (list, tuple)) else x, [([],), ({},), (3,), (torch.Size([1]),)]),
    "list of tensors": (lambda x, s: torch.stack(s).sum() + x, [([t(2), t(2)],), ([t(2)],), ([t(3), t(3)],)]),
    "tensor attribute": (lambda x, y: x + getattr(y, "tag", 5), [(t(4),), (tagged(t(4), tag=1),), (tagged(t(4), tag=2),)]),
    "contiguity": (lambda x, y: y + 1 if y.is_contiguous() else y * 2, [(t(3, 4),), (t(4, 3).T,), (t(4).expand(3, 4),)]),
    "grad": (lambda x, y: x + 1 if y.grad is None else x + y.grad, [(t(4, grad=True),), (tagged(t(4, grad=True), grad=torch.ones(4)),)]),
    "leaf": (lambda x, y: x + 1 if y.is_leaf else x - 1, [(t(4, grad=True),), (t(4, grad=True) * 2,)]),
    "kind of index": (lambda x, i: x[i], [(torch.tensor([0]),), (torch.tensor([0], dtype=torch.int32),),
                                          (torch.tensor([True, False, True]),)]),
    "enum": (lambda x, e: x * e.value, [(Color.RED,), (Color.GREEN,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    f, calls = ARGUMENTS[name]
    compiled = kiln.compile(f, backend="eager")
    for call in [c for c in calls for _ in (0, 1)] + calls:
        Same()(outcome(f, t(3, 4), *call), outcome(compiled, t(3, 4), *call), f"{name} {call}")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.n, self.items, self.cfg = 2, [1, 2], {"k": [1]}
        self.register_buffer("buf", None)

    def helper(self, x):
        return x * self.n

    def forward(self, x):
        y = self.helper(self.b(self.a(x))) * sum(self.items) + self.cfg["k"][0]
        return y if self.buf is None else y + self.buf


def run(x, m):
    return m(x)


def fresh(**parts):
    """A new class, and an object of it."""
    return type("Fresh", (type("Base", (), {"v": 1}),), parts)


# What lives outside, a function of it, and changes between the calls.
WORLD = {
    "class of a module": (Net, run, [lambda m: setattr(m.b[1], "__class__", nn.Tanh), lambda m: object.__setattr__(m.b[1], "__class__", nn.ReLU)]),
    "dict of a module": (Net, run, [lambda m: setattr(m.b[0], "__dict__", vars(nn.Linear(4, 4))), lambda m: object.__setattr__(m.a, "__dict__", vars(nn.Linear(4, 4, bias=False)))]),
    "forward hook": (Net, run, [lambda m: setattr(m, "h", m.b[0].register_forward_hook(lambda *a: a[2] + 1)), lambda m: m.h.remove()]),
    "pre hook": (Net, run, [lambda m: m.a.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))]),
    "list of a module": (Net, run, [lambda m: m.items.append(5), lambda m: m.items.__setitem__(0, 9)]),
    "config of a module": (Net, run, [lambda m: m.cfg["k"].__setitem__(0, 7), lambda m: m.cfg.__setitem__("k", [8])]),
    "buffer appears": (Net, run, [lambda m: setattr(m, "buf", torch.ones(4)), lambda m: setattr(m, "buf", None)]),
    "submodule swapped": (Net, run, [lambda m: m.b.__setitem__(1, nn.Sigmoid()), lambda m: m.b.append(nn.Tanh())]),
    "_modules": (Net, run, [lambda m: m._modules.__setitem__("a", nn.Linear(4, 4, bias=False))]),
    "_parameters": (Net, run, [lambda m: m.a._parameters.__setitem__("weight", nn.Parameter(torch.zeros(4, 4)))]),
    "bias gone": (Net, run, [lambda m: setattr(m.a, "bias", None)]),
    "method of an instance": (Net, run, [lambda m: setattr(m, "helper", lambda x: x * 100), lambda m: delattr(m, "helper")]),
    "state dict": (Net, run, [lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})]),
    "data": (Net, run, [lambda m: setattr(m.a.weight, "data", torch.ones(4, 4))]),
    "frozen": (Net, run, [lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)]),
    "number to tensor": (Net, run, [lambda m: setattr(m, "n", torch.tensor(3.0)), lambda m: setattr(m, "n", 4)]),
    "weight as a plain tensor": (Net, run, [lambda m: (delattr(m.a, "weight"), vars(m.a).__setitem__("weight", torch.eye(4)))]),
    "attribute": (lambda: Bag(n=1), lambda x, o: x * o.n, [lambda o: setattr(o, "n", 2), lambda o: setattr(o, "n", 2.0),
                                                           lambda o: setattr(o, "n", torch.ones(4))]),
    "shadowing": (Bag, lambda x, o: x * o.k, [lambda o: setattr(o, "k", 5), lambda o: delattr(o, "k")]),
    "deep dict": (lambda: {"a": {"b": [1, {"c": 2}]}}, lambda x, o: x * o["a"]["b"][1]["c"], [
        lambda o: o["a"]["b"][1].__setitem__("c", 3), lambda o: o["a"].__setitem__("b", [0, {"c": 9}])]),
    "list": (lambda: [1], lambda x, o: x + len(o) + sum(o), [lambda o: o.append(2), lambda o: o.clear()]),
    "loop over a list": (lambda: [1, 2], lambda x, o: [x * v for v in o], [lambda o: o.reverse(), lambda o: o.append(3)]),
    "loop over items": (lambda: {"a": 1, "b": 2}, lambda x, o: [(k, x * v) for k, v in o.items()], [
        lambda o: (o.pop("a"), o.__setitem__("a", 1)), lambda o: o.update(c=3)]),
    "set": (lambda: {1, 2}, lambda x, o: [x * v for v in sorted(o)], [lambda o: o.add(5), lambda o: o.remove(1)]),
    "deque": (lambda: deque([1, 2]), lambda x, o: [x * v for v in o], [lambda o: o.rotate(1), lambda o: o.append(4)]),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda x, o: (x + 1, list(o)), [lambda o: o.move_to_end("a")]),
    "counter": (lambda: Counter("aab"), lambda x, o: (x * o["a"], o.most_common(1)), [lambda o: o.update("bbb")]),
    "tensors in a list": (lambda: [torch.ones(4)], lambda x, o: x + o[0], [
        lambda o: o[0].mul_(3), lambda o: o.__setitem__(0, torch.zeros(4)), lambda o: o.__setitem__(0, torch.zeros(3, 4))]),
    "tensor resized": (lambda: Bag(t=torch.ones(4)), lambda x, o: x + o.t, [lambda o: o.t.resize_(1), lambda o: o.t.requires_grad_()]),
    "alias appears": (lambda: Bag(a=torch.ones(4), b=torch.ones(4)), lambda x, o: (o.a.add_(1).clone(), x + o.b), [
        lambda o: setattr(o, "b", o.a), lambda o: setattr(o, "a", torch.ones(4)), lambda o: setattr(o, "b", o.a[:])]),
    "aliased lists appear": (lambda: Bag(a=[1], b=[1]), lambda x, o: (o.a.append(1), x + len(o.b)), [
        lambda o: (o.a.clear(), setattr(o, "b", o.a))]),
    "property": (lambda: fresh(p=property(lambda s: 1))(), lambda x, o: x * o.p, [
        lambda o: setattr(type(o), "p", property(lambda s: 2)), lambda o: setattr(type(o), "p", 7)]),
    "__getattr__ added": (lambda: fresh()(), lambda x, o: x * getattr(o, "w", 1), [
        lambda o: setattr(type(o), "__getattr__", lambda s, n: 5)]),
    "__len__ and __bool__ added": (lambda: fresh()(), lambda x, o: x + 1 if o else x - 1, [
        lambda o: setattr(type(o), "__len__", lambda s: 0), lambda o: setattr(type(o), "__bool__", lambda s: True)]),
    "__eq__ added": (lambda: fresh()(), lambda x, o: x + (o == 3), [lambda o: setattr(type(o), "__eq__", lambda s, q: True)]),
    "__call__ changed": (lambda: fresh(__call__=lambda s, x: x + 1)(), lambda x, o: o(x), [
        lambda o: setattr(type(o), "__call__", lambda s, x: x * 9)]),
    "base class": (lambda: fresh()(), lambda x, o: x * o.v, [lambda o: setattr(type(o).__mro__[1], "v", 3),
                                                             lambda o: setattr(type(o), "v", 4), lambda o: delattr(type(o), "v")]),
    "bases": (lambda: fresh()(), lambda x, o: x * o.v, [lambda o: setattr(type(o), "__bases__", (fresh(v=8),))]),
    "class of an object": (lambda: Bag(n=1), lambda x, o: (x * o.n, type(o).__name__), [
        lambda o: setattr(o, "__class__", type("Other", (Bag,), {"n": property(lambda s: 50)}))]),
    "default list": (lambda: lambda x, s=[1]: x * len(s), lambda x, f: f(x), [lambda f: f.__defaults__[0].append(2)]),
    "function attribute": (lambda: lambda x: x, lambda x, f: x + getattr(f, "tag", 0), [lambda f: setattr(f, "tag", 4)]),
    "code": (lambda: lambda x: x + 1, lambda x, f: f(x), [lambda f: setattr(f, "__code__", (lambda x: x * 7).__code__)]),
    "keywords of a partial": (lambda: functools.partial(torch.add, other=1), lambda x, f: f(x), [
        lambda f: f.keywords.__setitem__("other", 9)]),
    "module of Python": (lambda: types.ModuleType("mine"), lambda x, m: x + getattr(m, "v", 0), [
        lambda m: setattr(m, "v", 3), lambda m: setattr(m, "v", 4), lambda m: delattr(m, "v")]),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda x, m: x * m.a, [lambda m: setattr(m, "a", 3)]),
    "proxy": (lambda: (lambda d: Bag(p=types.MappingProxyType(d), d=d))({"a": 1}), lambda x, o: x * o.p["a"], [
        lambda o: o.d.__setitem__("a", 5)]),
    "chain map": (lambda: ChainMap({"a": 1}, {"b": 2}), lambda x, o: x * o["a"] * o["b"], [
        lambda o: o.maps[1].__setitem__("b", 5), lambda o: o.maps[0].__setitem__("b", 9)]),
    "slot": (lambda: type("Slotted", (), {"__slots__": ("a",)})(), lambda x, o: x + getattr(o, "a", 1), [
        lambda o: setattr(o, "a", 3), lambda o: delattr(o, "a")]),
    "user dict": (lambda: UserDict(a=1), lambda x, o: x * o["a"] + len(o), [lambda o: o.__setitem__("b", 5)]),
    "list of a class": (lambda: type("C", (), {"s": [1]}), lambda x, c: x * len(c.s) + c().s[0], [
        lambda c: c.s.append(2), lambda c: c.s.__setitem__(0, 4), lambda c: setattr(c, "s", [5])]),
    "class method": (lambda: type("C", (), {"v": 1, "get": classmethod(lambda c: c.v)}), lambda x, c: x * c.get(), [
        lambda c: setattr(c, "v", 3)]),
    "keys": (lambda: {"a": 1}, lambda x, d: x + len(d.keys() & {"a", "b"}), [lambda d: d.__setitem__("b", 1)]),
    "truth of a dict": (dict, lambda x, d: x + 1 if d else x - 1, [lambda d: d.__setitem__("b", 1)]),
    "nested equality": (lambda: [[1]], lambda x, d: x + (d == [[1]]), [lambda d: d[0].append(1)]),
    "index": (lambda: ["a", "b"], lambda x, d: x + d.index("b"), [lambda d: d.insert(0, "q"), lambda d: d.__setitem__(0, "b")]),
    "count": (lambda: [1, 1], lambda x, d: x + d.count(1), [lambda d: d.__setitem__(0, 2)]),
    "copies": (lambda: [1, 2], lambda x, d: (x + 1, d.copy(), d[:], list(d), [*d], d + [0], d * 2), [lambda d: d.__setitem__(0, 9)]),
    "list in a tuple": (lambda: ([1],), lambda x, d: (x + sum(d[0]), str(d), d == ([1],)), [lambda d: d[0].append(5)]),
    "json": (lambda: {"a": [1]}, lambda x, d: (x + 1, json.dumps(d)), [lambda d: d["a"].append(5)]),
    "deepcopy": (lambda: {"a": [1]}, lambda x, d: (x + 1, copy.deepcopy(d)), [lambda d: d["a"].append(5)]),
    "nested sort": (lambda: [[2], [1]], lambda x, d: (x + 1, sorted(d), max(d)), [lambda d: d[0].__setitem__(0, 0)]),
    "nested format": (lambda: [[2], [1]], lambda x, d: (x + 1, "{}".format(d), "%s" % (d,), repr(d)), [lambda d: d[1].append(7)]),
    "nested numbers": (lambda: [[2.0], [1.0]], lambda x, d: x[0, 0] + torch.tensor(d), [lambda d: d[1].__setitem__(0, 7.0)]),
    "nested concatenation": (lambda: [[2], [1]], lambda x, d: (x + 1, sum(d, [])), [lambda d: d[1].__setitem__(0, 7)]),
    "nested truth": (lambda: [[], [1]], lambda x, d: (x + 1, any(d), all(d)), [lambda d: d[0].append(1)]),
    "memory of bytes": (lambda: bytearray(b"a"), lambda x, d: (x + 1, bytes(d), bytes(memoryview(d))), [lambda d: d.__setitem__(0, 98)]),
    "memory of an array": (lambda: array.array("i", [1]), lambda x, d: (x + d[0], list(d), sum(d)), [lambda d: d.__setitem__(0, 7)]),
    "index that an object gives": (lambda: fresh(n=0, __index__=lambda s: s.n)(), lambda x, o: (x + [1, 2, 3][o], "abc"[o]), [
        lambda o: setattr(o, "n", 2), lambda o: setattr(o, "n", 5)]),
    "kinds of items": (lambda: [[], [1]], lambda x, d: (x + 1, [type(v).__name__ for v in d]), [lambda d: d.__setitem__(0, ())]),
}  # fmt: skip


def history(name, compiled):
    build, f, changes = WORLD[name]
    thing = build()

    def program(x):
        return f(x, thing)

    call, results = kiln.compile(program, backend="eager") if compiled else program, []
    for change in [*changes, lambda o: None]:
        results += [outcome(call, t(3, 4)), outcome(call, t(3, 4))]
        change(thing)
    return [*results, outcome(call, t(3, 4))]


@pytest.mark.parametrize("name", WORLD)
def test_world(name):
    Same()(history(name, False), history(name, True), name)


def test_folders_and_files(tmp_path, monkeypatch):
    def f(x):
        return x + os.path.exists("file"), os.getcwd(), os.path.abspath("file"), os.path.join("a", "b")

    compiled = kiln.compile(f, backend="eager")
    for folder in ("one", "two", "one"):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        Same()(f(t(2)), compiled(t(2)))
        pathlib.Path("file").touch()
        Same()(f(t(2)), compiled(t(2)))


def test_what_a_tensor_is_a_view_of():
    def f(x):
        return x.view(-1)._base is x, x._is_view(), x[0]._base.shape, (x * 2)._is_view()

    compiled, whole = kiln.compile(f, backend="eager", fullgraph=True), torch.ones(4, 3)
    for x in (whole[1:3], torch.ones(2, 3), whole[1:3]):
        assert compiled(x) == f(x)


def test_versions_while_the_program_writes():
    def f(x):
        before = x._version
        x.add_(1)
        between = x._version
        x[0].mul_(2)
        return before, between, x._version

    compiled, x, y = kiln.compile(f, backend="eager", fullgraph=True), torch.ones(2), torch.ones(2)
    for _ in range(2):
        assert compiled(x) == f(y)
