"""Objects: attributes, properties, descriptors, special methods, dataclasses, named tuples, enums, slots, identity."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypedDict, TypeVar, runtime_checkable

import pytest
import torch

from tests.support import How, one_graph, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)


class Bag:
    """An open object."""

    kind = "bag"

    def __init__(self, **kw):
        self.__dict__.update(kw)


class Holder:
    def __init__(self, x, n=2):
        self.x = x
        self.n = n
        self._hidden = 1

    @property
    def doubled(self):
        return self.x * 2

    @property
    def hidden(self):
        return self._hidden

    @hidden.setter
    def hidden(self, value):
        self._hidden = value * 10

    @hidden.deleter
    def hidden(self):
        self._hidden = "deleted"

    def scaled(self):
        return self.x * self.n


@program(G, Bag(scale=2, inner=Bag(bias=t(4))))
def test_attribute_reads(x, bag):
    return x * bag.scale + bag.inner.bias, bag.kind, bag.inner.kind


@program(X, Bag(n=1))
def test_attribute_writes(x, bag):
    bag.n += 1
    bag.last = x * bag.n
    bag.items = [bag.last]
    bag.self = bag
    bag.kind = "mine"
    return bag.last + 1, bag.kind, Bag.kind


@program(X, Bag(a=1, b=2))
def test_attribute_deletes(x, bag):
    del bag.a
    try:
        bag.a
    except AttributeError as e:
        message = str(e)
    return x * bag.b, message, hasattr(bag, "a"), vars(bag)


@program(X, Bag(a=1))
def test_getattr_family(x, bag):
    setattr(bag, "b", 5)
    y = x * getattr(bag, "b") + getattr(bag, "zzz", 7) + getattr(bag, "a", 9)
    delattr(bag, "a")
    return y, hasattr(bag, "b"), sorted(bag.__dict__), "a" in vars(bag), [n for n in dir(bag) if n[0] != "_"]


@program(G, Holder(t(3, 4)))
def test_properties(x, h):
    h.hidden = 3
    a = h.hidden
    del h.hidden
    return h.doubled + x, a, h.hidden, type(h).doubled.fget(h), isinstance(type(h).doubled, property)


@program(X, Holder(1))
def test_property_without_setter(x, h):
    try:
        h.doubled = 3
    except AttributeError as e:
        return x + h.doubled, str(e)


class Typed:
    """A data descriptor."""

    def __init__(self, default):
        self.default = default

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name, self.default)

    def __set__(self, obj, value):
        if not isinstance(value, (int, torch.Tensor)):
            raise TypeError(f"{self.name} must be a number, not {value!r}")
        setattr(obj, self.name, value)

    def __delete__(self, obj):
        delattr(obj, self.name)


class NonData:
    def __get__(self, obj, owner):
        return ("nondata", obj is None)


class Described:
    n = Typed(3)
    w = Typed(None)
    nd = NonData()


@program(X, Described())
def test_descriptors(x, d):
    before = d.n
    d.n = 5
    d.w = x + d.n
    try:
        d.n = "no"
    except TypeError as e:
        message = str(e)
    first = d.nd
    d.nd = "shadow"
    y = d.w * d.n
    del d.n
    return y, before, message, first, d.nd, Described.nd, Described.n.name, d.n


class Fallback:
    def __init__(self):
        self.real = 1

    def __getattr__(self, name):
        if name.startswith(("no", "__")):
            raise AttributeError(name)
        return len(name)


class Recording:
    def __getattribute__(self, name):
        if name.startswith("get_"):
            return lambda x: x * len(name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name, value):
        object.__setattr__(self, name, (value, "set"))

    def __delattr__(self, name):
        object.__setattr__(self, name, "gone")


@program(X, Fallback())
def test_getattr_hook(x, f):
    return x * f.abcd + f.real, getattr(f, "none", "default"), hasattr(f, "nope"), hasattr(f, "yes")


@program(X, Recording())
def test_getattribute_and_setattr_hooks(x, r):
    r.a = 3
    first = r.a
    del r.a
    return r.get_it(x), first, r.a


class Layer:
    def __init__(self, w):
        self.w = w

    def __call__(self, x, *, k=1):
        return x * self.w + k


@program(G, Layer(t(4, grad=True)))
def test_call(x, layer):
    return layer(x), layer(x, k=2), layer.__call__(x), callable(layer)


def test_callable_object_as_entry():
    one_graph(Layer(t(4)), X)
    one_graph(Layer(t(4, grad=True)), G, k=4)


class Vector:
    """Most special methods of a container."""

    def __init__(self, *items):
        self.items = list(items)

    def __getitem__(self, i):
        return Vector(*self.items[i]) if isinstance(i, slice) else self.items[i]

    def __setitem__(self, i, v):
        self.items[i] = v

    def __delitem__(self, i):
        del self.items[i]

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __reversed__(self):
        return reversed(self.items)

    def __contains__(self, v):
        return any(v is i for i in self.items)

    def __bool__(self):
        return bool(self.items) and self.items[0] is not None

    def __eq__(self, other):
        return isinstance(other, Vector) and len(self) == len(other)

    def __hash__(self):
        return hash(len(self.items))

    def __repr__(self):
        return f"Vector({len(self)})"

    def __str__(self):
        return f"<{len(self)}>"

    def __format__(self, spec):
        return f"fmt[{spec}]"

    def __index__(self):
        return len(self)

    def __int__(self):
        return 10 * len(self)

    def __float__(self):
        return 0.5 + len(self)


@program(X, Vector(1, 2, 3))
def test_container_protocol(x, v):
    v[0] = x
    v[1] = x + v[2]
    del v[2]
    return v[0] + v[1], len(v), x in v, 7 in v, [type(i).__name__ for i in v], len(v[:1]), bool(v), list(reversed(v))


@program(X, Vector(1, 2), Vector())
def test_truth_equality_hash_and_conversions(x, v, empty):
    table = {v: "two", Vector(): "none"}
    if v and not empty:
        x = x + 1
    return x, v == Vector(7, 8), v != empty, table[Vector(0, 0)], hash(v), repr(v), str(v), f"{v:>3}", int(v), float(v), \
        [10, 20, 30][v], range(v)  # fmt: skip


class OldIter:
    def __getitem__(self, i):
        if i > 2:
            raise IndexError(i)
        return i * 10

    def __len__(self):
        return 0


@program(X)
def test_iteration_and_truth_by_getitem_and_len(x):
    o = OldIter()
    return x + sum(o), list(o), 20 in o, bool(o), (o and 1) is o


class Num:
    """Arithmetic of both sides over a tensor or number."""

    def __init__(self, v):
        self.v = v

    def __add__(self, o):
        return Num(self.v + (o.v if isinstance(o, Num) else o))

    def __radd__(self, o):
        return Num(o + self.v)

    def __iadd__(self, o):
        self.v = self.v + o
        return self

    def __sub__(self, o):
        return NotImplemented

    def __rsub__(self, o):
        return ("rsub", o.v if isinstance(o, Num) else o)

    def __mul__(self, o):
        return Num(self.v * o)

    __rmul__ = __mul__

    def __matmul__(self, o):
        return ("matmul", o)

    def __truediv__(self, o):
        return Num(self.v / o)

    def __floordiv__(self, o):
        return ("floordiv", o)

    def __mod__(self, o):
        return ("mod", o)

    def __rpow__(self, o):
        return ("rpow", o)

    def __neg__(self):
        return Num(-self.v)

    def __pos__(self):
        return self

    def __invert__(self):
        return "inverted"

    def __abs__(self):
        return Num(abs(self.v))

    def __lt__(self, o):
        return True

    def __ge__(self, o):
        return "ge"

    def __and__(self, o):
        return ("and", o)

    def __rlshift__(self, o):
        return ("rlshift", o)

    def __divmod__(self, o):
        return ("divmod", o)

    def __round__(self, n=None):
        return ("round", n)


@program(G)
def test_arithmetic_dunders(x):
    n = Num(x)
    m = n
    m += 5
    return ((n + 1).v, (1 + n).v, (n + n).v, (n * 2).v, (2 * n).v, (n / 2).v, (-n).v, abs(n).v, m is n, +n is n)


@program(X)
def test_reflected_and_rare_dunders(x):
    n = Num(2)
    sub = 3 - n
    try:
        n - 3
    except TypeError as e:
        message = str(e)
    return x * n.v, sub, message, n @ 1, n // 1, n % 1, 2**n, ~n, n < 1, n >= 1, 1 > n, n & 1, 1 << n, divmod(n, 2), \
        round(n, 1), n - Num(5) if False else 0  # fmt: skip


class Weird(Num):
    def __radd__(self, o):
        return "subclass first"

    def __eq__(self, other):
        return "eq"

    def __ne__(self, other):
        return "ne"

    __hash__ = None


@program(X)
def test_reflected_method_of_a_subclass_comes_first(x):
    return x + 1, Num(1) + Weird(2), (Weird(1) == 2), (Weird(1) != 2), 3 == Weird(1)


@program(X, Num(t(4)))
def test_tensor_with_object_that_reflects(x, n):
    return x * n.v, (n * x).v, (n + x).v


@dataclass
class Config:
    hidden: int = 4
    scale: float = 2.0
    names: list = field(default_factory=list)
    weight: torch.Tensor | None = None

    def __post_init__(self):
        self.total = self.hidden * 2


@dataclass(frozen=True)
class Frozen:
    n: int
    x: torch.Tensor | None = None


@dataclass(order=True)
class Ordered:
    rank: int
    label: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: object = None


@dataclass
class Derived(Config):
    extra: dataclasses.InitVar[int] = 0
    more: tuple = field(default=(1, 2), kw_only=True)

    def __post_init__(self, extra):
        super().__post_init__()
        self.total += extra


@program(G, Config(weight=t(4)))
def test_dataclass_read(x, cfg):
    return x * cfg.weight * cfg.scale + cfg.total, len(cfg.names)


@program(X)
def test_dataclass_made_and_changed(x):
    cfg = Config(3, names=["a"], weight=x + 1)
    cfg.hidden += 1
    cfg.names.append("b")
    return cfg, x * cfg.total, Config() == Config(), Config() == Config(5), repr(Ordered(1, "a"))


@program(X, Frozen(2, t(4)))
def test_frozen_dataclass_and_replace(x, f):
    g = dataclasses.replace(f, n=f.n + 1)
    try:
        g.n = 5
    except dataclasses.FrozenInstanceError as e:
        message = str(e)
    return x * g.n + g.x, g, message, hash(Frozen(1)) == hash(Frozen(1)), Frozen(1) == Frozen(1)


@program(X)
def test_dataclass_functions(x):
    cfg = Derived(2, extra=5, more=(3,))
    names = [f.name for f in dataclasses.fields(cfg)]
    return (x + cfg.total, names, dataclasses.asdict(Ordered(1, "z")), dataclasses.astuple(Ordered(2)),
            dataclasses.is_dataclass(cfg), Ordered(1) < Ordered(2), max([Ordered(1), Ordered(3)]).rank, cfg)  # fmt: skip


@program(X, Slotted(3, t(4)))
def test_slotted_dataclass(x, s):
    return x * s.a + s.b, dataclasses.replace(s, a=9), s == Slotted(3, s.b)


@program(X)
def test_dataclass_made_inside(x):
    @dataclass
    class Local:
        v: torch.Tensor
        n: int = 2

        def run(self):
            return self.v * self.n

    return Local(x, 3).run(), Local(x + 1).run()


Pair = namedtuple("Pair", ["first", "second"])


class Sized(NamedTuple):
    x: torch.Tensor
    n: int = 1

    @property
    def big(self):
        return self.n > 1

    def scaled(self):
        return self.x * self.n


@program(G, Pair(2, t(4)))
def test_namedtuple(x, p):
    q = p._replace(first=5)
    a, b = q
    return x * a + b, q, Pair._make([1, x]), q._asdict()["first"], Pair._fields, p[0], p.second, len(p), Pair(1, 2) == (1, 2)


@program(X, Sized(t(3, 4), 3))
def test_typed_namedtuple_with_methods(x, s):
    return s.scaled() + x, s.big, Sized(x), s._field_defaults, isinstance(s, tuple)


class Color(enum.Enum):
    RED = 1
    GREEN = "green"

    @property
    def loud(self):
        return self.name + "!"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    C = A | B


class Word(str, enum.Enum):
    YES = "yes"


@program(X, Color.RED)
@program(X, Color.GREEN)
def test_enum(x, color):
    y = x + 1 if color is Color.RED else x - 1
    return y, color.name, color.value, color.loud, Color["RED"] == color, Color("green"), [c.name for c in Color], \
        {Color.RED: 1}.get(color), color in Color, len(Color)  # fmt: skip


@program(X, Level.HIGH, Flags.A, Word.YES)
def test_int_enum_flag_and_str_enum(x, level, flags, word):
    return (x * level, level > Level.LOW, level + 1, flags | Flags.B, Flags.C & flags, Flags.B in Flags.C, word == "yes",
            word.upper(), bool(flags & Flags.B), isinstance(level, int), Level(1))  # fmt: skip


class Slots:
    __slots__ = ("a", "b", "__weakref__")

    def __init__(self, a):
        self.a = a


class SlotsAndDict(Slots):
    def __init__(self, a):
        super().__init__(a)
        self.extra = 1


@program(X, Slots(3))
@program(X, SlotsAndDict(3))
def test_slots(x, s):
    unset = hasattr(s, "b")
    s.b = x * s.a
    s.a = None
    try:
        s.zzz = 1
        message = "has a dict"
    except AttributeError as e:
        message = str(e)
    return s.b + 1, unset, message, s


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self, x): ...

    @property
    @abc.abstractmethod
    def name(self): ...

    def twice(self, x):
        return 2 * self.area(x)


class Disc(Shape):
    name = "disc"

    def area(self, x):
        return x * 3.14


@runtime_checkable
class HasArea(Protocol):
    def area(self, x): ...


@program(G, Disc())
def test_abc_and_protocol(x, shape):
    try:
        Shape()
    except TypeError as e:
        message = str(e)
    return shape.twice(x), shape.name, isinstance(shape, Shape), issubclass(Disc, Shape), isinstance(shape, HasArea), \
        isinstance(3, HasArea), message  # fmt: skip


class A:
    tag = ["a"]

    def who(self):
        return "A"


class B(A):
    def who(self):
        return "B" + super().who()


class Mixin:
    def who(self):
        return "mixin " + super().who()


class C(Mixin, B):
    tag = [*A.tag, "c"]


@program(X, C())
def test_inheritance(x, c):
    return x + len(c.tag), c.who(), [k.__name__ for k in type(c).__mro__], isinstance(c, (int, A)), type(c) is C, \
        issubclass(C, B), C.__bases__, c.__class__.__name__  # fmt: skip


@program(X)
def test_class_made_inside(x):
    class Local(A):
        factor = 3

        def __init__(self, v):
            self.v = v

        def run(self):
            return self.v * self.factor * type(self).factor

    class Sub(Local):
        factor = 4

    return Sub(x).run(), Local(x + 1).run(), Local.__name__, issubclass(Sub, A), Sub(1).who()


@program(X)
def test_class_made_inside_closes_over_a_tensor(x):
    class Local:
        def run(self):
            return x * 2

    return Local().run() + 1


@program(X)
def test_class_made_by_type(x):
    cls = type("Made", (A,), {"n": 4, "run": lambda self, v: v * self.n})
    return cls().run(x), cls.__name__, cls().who()


@program(X)
def test_objects_made_inside_and_returned(x):
    h = Holder(x + 1)
    h.n = 5
    h.extra = {"me": h}
    return h, [h, h], h.scaled()


@program(X, Bag(v=1))
def test_identity_is_kept(x, bag):
    a = [x]
    b = [x]
    c = a
    return x + 1, a is b, a is c, a == b, x is a[0], bag is bag, bag.__dict__ is bag.__dict__, None is None, (c, a, b)


@program(X, t(3, 4))
def test_identity_of_tensors(x, y):
    z = x
    w = x.view(12)
    return w + 1, x is z, x is y, w is x, x.T is x.T, [i is x for i in (x, y, z)], y is not z


def test_identity_of_aliased_arguments():
    one_graph(lambda x, y: (x + y, x is y), X, X)
    one_graph(lambda x, y, z: (x + y, x is z, y is z), X, t(3, 4), X)


@program(X, Bag(v=1), Bag(v=1))
def test_id_semantics(x, a, b):
    seen = {id(a): "a", id(b): "b"}
    memo = {id(x): x + 1}
    return memo[id(x)], seen[id(a)], id(a) == id(b), id(a) == id(a), len({id(x), id(a), id(b)}), hash(a) == hash(a)


@program(X, Bag(v=1), Bag(v=1))
def test_default_equality_and_hash(x, a, b):
    return x + 1, a == b, a == a, a != b, a in [b, a], {a: 1, b: 2}[b], len({a, b, a}), [b, a].index(a)


@program(X)
def test_tensors_as_keys(x):
    y = x + 1
    d = {x: "x", y: "y"}
    s = {x, y, x}
    return d[y], len(s), x in s, y * 2, x in d, list(d.values())


@program(X)
def test_class_attributes_read_through_instance_and_class(x):
    return x * Level.HIGH.value + len(C.tag), C.tag is c_tag(), getattr(C, "missing", 3), C.__dict__["tag"] is C.tag


def c_tag():
    return C().tag


class Counter:
    made = 0

    def __init__(self):
        Counter.made += 1
        self.number = Counter.made


def reset_counter():
    Counter.made = 0


@program(X, how=How(setup=reset_counter, state=lambda: Counter.made))
def test_class_attributes_written(x):
    a, b = Counter(), Counter()
    Counter.made += 10
    return x * Counter.made, a.number, b.number


class Meta(type):
    registry: list[str] = []

    def __call__(cls, *args):
        obj = super().__call__(*args)
        obj.made_by = "meta"
        return obj

    @property
    def label(cls):
        return "label " + cls.__name__

    def __len__(cls):
        return 42


class WithMeta(metaclass=Meta):
    def __init__(self, n):
        self.n = n


@program(X)
def test_metaclass(x):
    w = WithMeta(3)
    return x * w.n + len(WithMeta), w.made_by, WithMeta.label


class Singleton:
    _one = None

    def __new__(cls, n=1):
        obj = super().__new__(cls)
        obj.from_new = n * 2
        return obj

    def __init__(self, n=1):
        self.n = n


class Sub(int):
    def __new__(cls, v):
        return super().__new__(cls, v + 1)

    def twice(self):
        return self * 2


@program(X)
def test_new_and_init(x):
    s = Singleton(4)
    return x * s.from_new + s.n, Sub(4) + 1, Sub(4).twice(), type(Sub(3)).__name__, object.__new__(A).who()


class Sentinel:
    def __class_getitem__(cls, item):
        return (cls.__name__, item)

    def __init_subclass__(cls, tag="none", **kw):
        cls.tagged = tag


T_ = TypeVar("T_")


class Box(Generic[T_]):
    def __init__(self, v: T_):
        self.v = v


@program(X)
def test_class_getitem_init_subclass_and_generic(x):
    class Tagged(Sentinel, tag="here"):
        pass

    return x + 1, Sentinel[int], Tagged.tagged, Box(x * 2).v, Box[int](3).v


@pytest.mark.parametrize("text", ["x.__class__ is torch.Tensor", "type(x)", "isinstance(x, torch.nn.Parameter)",
                                  "x.__class__.__name__", "issubclass(type(x), object)", "hasattr(x, 'shape')"])  # fmt: skip
def test_type_questions_about_tensors(text):
    f = eval(f"lambda x: (x + 1, {text})", {"torch": torch})
    one_graph(f, X)
    one_graph(f, torch.nn.Parameter(t(3, 4)))


@program(X)
def test_attributes_on_tensors(x):
    y = x + 1
    y.tag = "made here"
    x.note = [1]
    return y, y.tag, hasattr(x, "note"), x.note


@program(X, Bag(items=[1], d={"k": [x for x in (1, 2)]}))
def test_nested_state_is_read_and_written(x, bag):
    bag.items.append(x * 2)
    bag.d["k"][0] += 5
    bag.d["new"] = Bag(y=x + bag.d["k"][0])
    return bag.d["new"].y


class Tagged(tuple):
    """A tuple with an attribute."""

    def __new__(cls, items, scale=3):
        made = super().__new__(cls, items)
        made.scale = scale
        return made


@program(Tagged((t(3), 1)))
def test_a_tuple_of_a_class_with_attributes(tagged):
    tagged.scale = tagged.scale + 1
    tagged.last = tagged[0] * tagged.scale
    return tagged.last + tagged[1], tagged


class Amount:
    """A tensor in a wrapper that has its own arithmetic on either side."""

    def __init__(self, value):
        self.value = value

    def __sub__(self, other):
        return Amount(self.value - getattr(other, "value", other))

    def __rsub__(self, other):
        return Amount(other - self.value)

    def __isub__(self, other):
        self.value = self.value - other
        return self

    def __matmul__(self, other):
        return Amount(self.value @ other)

    def __rmatmul__(self, other):
        return NotImplemented

    def __imul__(self, other):
        return NotImplemented

    def __mul__(self, other):
        return NotImplemented

    def __rmul__(self, other):
        return Amount(other * self.value)

    def __lt__(self, other):
        return ("less", self.value < other)

    def __gt__(self, other):
        return ("greater", self.value > other)


class Told(Amount):
    """The same, which torch tells of its calls."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        values = [a.value if isinstance(a, Amount) else a for a in args]
        return cls(function(*values, **(kwargs or {}))), function.__name__


def either_side(make, x):
    return make(x * 2) - x, x - make(x * 2), make(x) - make(x), make(x) @ x.T, x * make(x)


def in_place(make, x):
    amount, other, left = make(x), x * 2, x * 3
    amount -= x
    other -= make(x)
    left *= make(x)
    return amount, other, left


def compared(make, x):
    return make(x) < x, x < make(x), make(x) > x, x >= make(x).value


class Share(float):
    """A number that knows another addition, of which only those that it is the left operand of are."""

    def __add__(self, other):
        return ("share", other * 2)

    __radd__ = __lt__ = __gt__ = __add__


class Row(list):
    pass


def numbers_and_lists(x):
    row, items = Row([x]), collections.deque([1])
    row += x * 2
    items += x[0]
    return Share(2) + x, x + Share(2), Share(0.5) < x, x < Share(0.5), list(row), items


def test_numbers_and_lists_of_other_classes_beside_tensors():
    one_graph(numbers_and_lists, X)


def a_product_that_nobody_knows(make, x):
    return make(x) * 2, x @ make(x)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [Amount, Told])
@pytest.mark.parametrize("f", [either_side, in_place, compared])
def test_objects_with_arithmetic_beside_tensors(f, kind, given):
    one = kind(t(3, 4) + 1)
    one_graph(lambda x, one: f((lambda value: one) if given else kind, x), X, one)


@pytest.mark.parametrize("kind", [Amount, Told])
def test_arithmetic_that_nobody_knows_is_refused_as_in_eager(kind):
    same_as_eager(a_product_that_nobody_knows, kind, X)


class Item(TypedDict):
    value: torch.Tensor
    count: int


class Made(type):
    __call__ = list


class Letters(metaclass=Made):
    pass


@program(X)
def test_classes_whose_metaclass_has_another_class_make_instances(x):
    item = Item(value=x * 2, count=1)
    return item, type(item) is dict, Item({"value": x, "count": 2}), Letters("ab"), [Letters] == [Letters]
