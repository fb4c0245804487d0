"""Builtins and the standard library, as far as free of side effects; warnings and logging by their stated policy."""

# ruff: noqa: F401 (the expressions below are evaluated with these names)

from __future__ import annotations

import abc
import bisect
import collections
import collections.abc
import copy
import dataclasses
import enum
import fractions
import functools
import heapq
import inspect
import itertools
import json
import logging
import math
import numbers
import operator
import os
import pathlib
import random
import re
import string
import sys
import types
import typing
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch

from tests.support import EAGER, How, Watch, kiln, one_graph, pin, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)


@dataclasses.dataclass
class Record:
    n: int = 2
    items: list = dataclasses.field(default_factory=list)


class Plain:
    """Doc of Plain."""

    k = 3

    def __init__(self):
        self.v = 1

    def method(self, a, b=2, *args, c: int = 3, **kw) -> int:
        """Doc."""
        return a


def annotated(a: int, b: str = "x", *rest: float, key: bool, **kw: typing.Any) -> torch.Tensor: ...


EXPRESSIONS = """
isinstance(n, int), isinstance(s, (int, str)), issubclass(bool, int), type(n), type(L) is list, callable(len), callable(n)
isinstance(n, int | str), isinstance(L, collections.abc.Sequence), isinstance(d, collections.abc.Mapping), isinstance(n, numbers.Number)
isinstance(x, torch.Tensor), torch.is_tensor(x), isinstance(torch.float32, torch.dtype), isinstance(p, Plain), type(p).__name__
hasattr(p, "v"), hasattr(p, "zz"), getattr(p, "k"), getattr(p, "zz", 5), vars(p), p.__class__.__doc__, Plain.__module__
len(L), len(s), len(d), len(x), abs(-n), abs(-f), round(f), round(2.567, 2), pow(n, 2), pow(n, -1), pow(7, 2, 5), divmod(17, n)
min(L), max(L), sum(L), min(n, 2), max(s), int(f), int("12"), int("ff", 16), float("2.5"), float(n), bool(L), complex(1, n), str(n)
bin(n), hex(255), oct(8), chr(97), ord("a"), ascii("é"), repr(s), format(f, ".3f"), format(n, "05d"), hash(n), hash("a") == hash("a")
f.is_integer(), f.as_integer_ratio(), (255).bit_length(), (5).to_bytes(2, "big"), int.from_bytes(b"ab", "big"), f.hex(), float.fromhex("0x1p3")
n.real, n.imag, (3).__add__(4), n.numerator, (2 + 3j).conjugate(), f.__class__, True + True, 7 .bit_count()
all([1, n]), any([0, n]), list(map(str, L)), list(filter(None, L)), sorted(L), list(reversed(L)), list(enumerate(s)), list(zip(L, s))
slice(1, n).stop, slice(None).indices(5), range(n)[0], bytes(3), bytes(bytearray(b"a")), memoryview(b"ab")[0], frozenset(L), set(s)
id(L) == id(L), dir(p)[-1], globals()["__name__"] != "", object() is not None, NotImplemented, __debug__, type(None), Ellipsis
s.upper(), s.capitalize(), s.title(), s.swapcase(), s.center(9, "*"), s.ljust(6) + "|", s.rjust(6), s.zfill(6), "{}".format(n)
s.find("l"), s.rfind("z"), s.index("i"), s.count("k"), s.startswith("ki"), s.endswith(("x", "n")), s.replace("k", "b"), s * 2
"a,b,c".split(","), "a b".split(), "a\\nb".splitlines(), "k=v".partition("="), "a.b.c".rsplit(".", 1), "-".join(["a", "b"])
"  a ".strip(), "xxa".lstrip("x"), "axx".rstrip("x"), "prefix_a".removeprefix("prefix_"), "a.py".removesuffix(".py"), "ab"[::-1]
"abc".isalpha(), "12".isdigit(), "a1".isalnum(), " ".isspace(), "Ab".islower(), "a_b".isidentifier(), "abc".translate({97: "z"})
"{a:>{w}} {0!r} {b[k]} {c.k}".format(n, a=1, w=4, b={"k": 2}, c=p), "%s %5.2f %(x)s" % {"x": 1} if False else "%s|%5.2f" % (s, f)
s.encode(), b"ab".decode(), b"ab".hex(), "é".encode("utf-8"), s.casefold(), s in "kilns", "a" < "b", sorted(s), str.maketrans("a", "b")
math.sqrt(n), math.pi, math.floor(f), math.ceil(f), math.log(n), math.log2(8), math.log(8, 2), math.exp(1), math.sin(f), math.prod(L)
math.gcd(12, 18), math.lcm(4, 6), math.factorial(5), math.comb(5, 2), math.isclose(0.1 + 0.2, 0.3), math.isnan(math.nan), math.inf
math.hypot(3, 4), math.copysign(1, -0.0), math.trunc(f), math.fsum([0.1] * 3), math.atan2(1, 2), math.degrees(1), math.isqrt(17), math.tanh(f)
operator.add(n, 2), operator.itemgetter(1)(L), operator.attrgetter("k")(p), operator.methodcaller("upper")(s), operator.itemgetter("a", "b")(d)
operator.mul(x, 2).shape, operator.getitem(L, 0), operator.contains(L, 2), operator.not_(n), operator.is_(n, n), operator.index(n), operator.neg(n)
operator.lt(1, n), operator.eq(L, [1]), operator.floordiv(7, n), operator.matmul(x, x.T).shape, operator.truth(L), operator.concat([1], [2]), operator.countOf(L, 1)
functools.reduce(operator.mul, L), functools.partial(pow, 2)(n), functools.partial(int, base=2)("11"), sorted(L, key=functools.cmp_to_key(lambda a, b: b - a))
copy.copy(L), copy.deepcopy({"a": [n]}), copy.copy(p).v, copy.deepcopy(L) is L, copy.copy((1,)), copy.deepcopy(p).v, copy.copy(d) == d
dataclasses.asdict(Record()), dataclasses.replace(Record(), n=5).n, [q.name for q in dataclasses.fields(Record)], dataclasses.is_dataclass(Record)
typing.cast(int, n), typing.get_origin(list[int]), typing.get_args(dict[str, int]), repr(typing.Optional[int]), repr(list[int]), repr(int | None), typing.TYPE_CHECKING
str(inspect.signature(annotated)), list(inspect.signature(p.method).parameters), inspect.signature(annotated).parameters["b"].default, inspect.isfunction(annotated)
inspect.signature(annotated).bind(1, "b", key=True).arguments, inspect.ismethod(p.method), inspect.isclass(Plain), inspect.getdoc(Plain), inspect.getmro(Plain)
inspect.signature(annotated).parameters["key"].kind.name, inspect.Parameter.empty, inspect.isgeneratorfunction(annotated), inspect.getfullargspec(annotated).args
annotated.__name__, annotated.__annotations__["b"], annotated.__defaults__, annotated.__kwdefaults__, p.method.__doc__, Plain.method.__qualname__
itertools.chain.from_iterable([[1], [2]]).__next__(), list(itertools.islice(itertools.count(), 2)), collections.Counter(s).most_common(1)
bisect.bisect_left([1, 2, 4], n), bisect.bisect([1, 2, 4], 2), heapq.nsmallest(2, L), heapq.nlargest(1, L), heapq.heappop([1, 2])
re.match(r"(\\w)(\\d)", "a1").groups(), re.sub("k", "b", s), re.findall(r"\\d", "a1b2"), re.compile("l+").search(s).start(), bool(re.fullmatch("k.*", s))
json.dumps({"a": [1, None, True]}, sort_keys=True), json.loads('{"a": 1.5}'), string.ascii_lowercase[:3], string.Template("$a").substitute(a=1)
fractions.Fraction(1, 3) + 1, types.SimpleNamespace(a=1).a, types.MappingProxyType(d)["a"], sys.version_info >= (3, 11), sys.maxsize > 2**32
os.path.join("a", "b"), os.path.basename("/a/b.c"), os.path.splitext("a.b"), os.sep, sys.platform.startswith("l"), sys.byteorder
enum.Enum("E", "A B").A.name, collections.namedtuple("N", "a b")(1, 2).b, OrderedDict(a=1), abc.ABC.__name__, Plain.__mro__[-1] is object
np.prod([2, 3]), np.sqrt(4.0), np.array([1, 2]).sum(), np.float32(1.5), int(np.int64(3)), np.arange(3).tolist(), np.pi, np.dtype("float32").itemsize
torch.finfo(torch.float32).eps, torch.iinfo(torch.int64).max, torch.finfo(x.dtype).min, torch.Size([2, 3]).numel(), torch.device("cpu").type
torch.is_floating_point(x), torch.float16.is_floating_point, torch.float32.itemsize, torch.promote_types(torch.int8, torch.float16), torch.result_type(x, 1)
torch.get_default_dtype(), torch.is_grad_enabled(), torch.broadcast_shapes((2, 1), (3,)), torch.can_cast(torch.float, torch.int), torch.__version__ >= "2"
torch.distributed.is_available() and torch.distributed.is_initialized()
torch.cuda.is_available(), torch.backends.mkldnn.is_available(), torch.get_num_threads() > 0, torch.is_inference_mode_enabled(), torch.numel(x)
"""


def scope():
    return dict(globals())


@pytest.mark.parametrize("text", EXPRESSIONS.strip().splitlines())
def test_expressions(text):
    one_graph(eval(f"lambda x, n, f, s, L, d, p: (x * 2, {text})", scope()), X, 3, 2.5, "kiln", [3, 1, 2],
              {"a": 1, "b": 2}, Plain())  # fmt: skip


@program(G)
def test_numbers_from_math_feed_tensor_ops(x):
    return x * math.sqrt(x.shape[-1]) + math.log(2) - math.pi, x / abs(-3), round(x.shape[0] / 2) * x, x ** int("2")


@program(X)
def test_copy_of_containers_with_tensors(x):
    items = [x, {"y": x + 1}]
    shallow = copy.copy(items)
    shallow.append(3)
    return shallow, items, shallow[1] is items[1], copy.copy(items[1])


@program(X, Record(items=[1]))
def test_copy_of_objects(x, r):
    a, b = copy.copy(r), copy.deepcopy(r)
    a.n = 9
    b.items.append(x)
    return x + r.n, a, b, a.items is r.items, b.items is r.items


@program(X)
def test_numpy_on_constants(x):
    w = np.linspace(0, 1, 4)
    k = float(np.mean([1.0, 2.0, 3.0]))
    return x * k + torch.tensor(w, dtype=torch.float32), np.arange(3), w.shape, torch.from_numpy(np.ones(4, np.float32)) + x


@program(X)
def test_inspect_signature_of_functions_made_inside(x):
    def f(a, b=3, *, c):
        return a

    sig = inspect.signature(f)
    bound = sig.bind(x, c=1)
    bound.apply_defaults()
    return f(*bound.args, **bound.kwargs) + 1, str(sig), list(bound.arguments), [p.kind.name for p in sig.parameters.values()]


@program(X)
def test_filtering_keywords_by_signature(x):
    options = {"alpha": 2, "unknown": 1}

    def f(y, *, alpha=1, beta=0):
        return y * alpha + beta

    known = {k: v for k, v in options.items() if k in inspect.signature(f).parameters}
    return f(x, **known), sorted(known)


@program(X)
def test_typing_constructs_at_run_time(x):
    T = typing.TypeVar("T")

    def f(v: typing.Optional[int] = None, w: "torch.Tensor | None" = None) -> typing.Union[int, str]:
        return v

    y: torch.Tensor = x + 1
    z: list[int] = []
    return y, typing.cast("torch.Tensor", y), f(3), T.__name__, z


def warns(x):
    warnings.warn("this is old", UserWarning, stacklevel=2)
    return x + 1


@pytest.mark.filterwarnings("ignore:this is old")
def test_warnings_do_not_break():
    one_graph(warns, X)


@pytest.mark.filterwarnings("default:this is old")
def test_a_warning_is_heard_at_the_first_call():
    with pytest.warns(UserWarning, match="this is old"):
        Watch(warns).compiled(X)


@pytest.mark.filterwarnings("ignore:quiet")
def test_warning_filters_and_contexts():
    def f(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("quiet")
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_graph(f, X)


def recorded():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("heard")
    return len(caught)


def test_warnings_that_are_recorded_for_nobody():
    def f(x):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            warnings.warn("unheard")
            y = x + 1
        return y

    def broken(x):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            kiln.graph_break()
            warnings.warn("unheard")
            y = x + 1
        return y * 2

    before = warnings.filters
    one_graph(f, X)
    pin(same_as_eager(broken, X), 2, 2)  # the block is left in Python
    assert warnings.filters is before


def raised():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn("heard")
        except UserWarning:
            return 2


@pytest.mark.parametrize("heard", [recorded, raised])
def test_warnings_that_the_program_hears_are_given_in_every_call(heard):
    compiled = Watch(lambda x: (x.sin() + heard()).cos()).compiled
    before = warnings.filters
    for _ in range(3):
        assert torch.equal(compiled(X), (X.sin() + heard()).cos())
    assert warnings.filters is before


def within(x):
    with warnings.catch_warnings():
        yield x + 1
        yield x + 2


def test_a_block_that_outlives_the_graph_can_be_left():
    def f(x):
        steps = within(x)
        return next(steps), steps

    before = warnings.filters
    first, steps = Watch(f).compiled(X)
    assert torch.equal(first, X + 1) and torch.equal(next(steps), X + 2) and next(steps, None) is None
    assert warnings.filters is before


LOGGER = logging.getLogger("course")


@program(X)
def test_logging_below_the_level_does_nothing(x):
    LOGGER.debug("value %s", 3)
    if LOGGER.isEnabledFor(logging.DEBUG):
        x = x * 100
    logging.getLogger("course").info("not shown %d", 1)
    return x + 1


RECORD = LOGGER.makeRecord("course", logging.INFO, "file", 1, "%d rows", (3,), None)


@program(X)
def test_what_logging_answers(x):
    return x + LOGGER.getEffectiveLevel(), logging.getLevelName(20), RECORD.getMessage(), LOGGER.hasHandlers()


def test_a_handler_formats_its_records():
    one_graph(lambda x: (x + 1, logging.Handler.format(HANDLER, RECORD)), X)


HANDLER = logging.Handler()


def test_logging_does_not_break(caplog):
    def f(x):
        LOGGER.warning("shape %s", tuple(x.shape))
        return x + 1

    with caplog.at_level(logging.WARNING, "course"):
        one_graph(f, X)
    assert "shape (3, 4)" in caplog.text


@program(G)
def test_random_of_python(x):
    return x * random.random() + random.randint(1, 6) if False else x + 1


def heads():
    return random.Random(3).random()


@program(X)
def test_seeded_generator_object_made_inside(x):
    return x * heads()


def test_python_random_is_drawn_at_every_call():
    """A graph must not freeze a random number: both calls and the state after them are eager's."""
    same_as_eager(lambda x: x * random.random(), X, how=How(recompiles=True))


def test_time_is_not_frozen():
    import time

    def f(x):
        return x + 1, time.perf_counter()

    w = Watch(f).compiled
    assert w(X)[1] < w(X)[1]


@program(X)
def test_imports_inside(x):
    import math as m
    from os.path import join

    from torch.nn import functional as F

    return F.relu(x) * m.pi, join("a", "b")


@program(X)
def test_getattr_setattr_with_computed_names(x):
    r = Record()
    for i in range(3):
        setattr(r, f"w{i}", x * i)
    return sum(getattr(r, f"w{i}") for i in range(3)), [k for k in vars(r)]


@program(X)
def test_type_as_constructor(x):
    return x + 1, type(3)("4"), type([])((1, 2)), x.new_ones(2), type(Record())(7), dict([("a", x)])["a"] is x


@program(X)
def test_isinstance_over_many_types(x):
    def visit(v):
        if isinstance(v, dict):
            return {k: visit(u) for k, u in v.items()}
        if isinstance(v, (list, tuple)) and not hasattr(v, "_fields"):
            return type(v)(visit(u) for u in v)
        if isinstance(v, torch.Tensor):
            return v * 2
        return v

    return visit({"a": [x, (x + 1, "s")], "b": 3, "c": None})


@program(X)
def test_pytree(x):
    import torch.utils._pytree as pytree

    leaves, spec = pytree.tree_flatten({"a": x, "b": [x + 1, 2]})
    return pytree.tree_unflatten([v * 2 for v in leaves], spec), pytree.tree_map(lambda v: v + 1, (x, [x]))


@program(X)
def test_lru_cache_methods_and_cached_property(x):
    class Cached:
        def __init__(self):
            self.calls = 0

        @functools.cached_property
        def table(self):
            self.calls += 1
            return [1, 2]

        @functools.cache
        def value(self, k):
            return k * 2

    c = Cached()
    return x + sum(c.table) + len(c.table) + c.value(3) + c.value(3), c.calls


@program(X)
def test_total_ordering_and_wraps(x):
    @functools.total_ordering
    class Ranked:
        def __init__(self, r):
            self.r = r

        def __eq__(self, o):
            return self.r == o.r

        def __lt__(self, o):
            return self.r < o.r

    return x + 1, Ranked(1) <= Ranked(2), Ranked(3) > Ranked(2), sorted([Ranked(2), Ranked(1)])[0].r


def test_is_compiling_is_true_during_capture():
    seen = []

    def f(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    Watch(f).compiled(X)
    assert EAGER or seen == [True]
    assert not torch.compiler.is_compiling()


@program(X)
def test_string_formatting_of_tensor_facts(x):
    return x + 1, f"{x.shape} {x.dtype} {x.device} {x.ndim}", str(x.shape), repr(x.dtype), "%s" % (tuple(x.shape),)


@program(X)
def test_constants_of_sys(x):
    return x + len("abc"), sys.maxunicode, sys.float_info.max, sys.implementation.name, type(x).__mro__[0].__name__


@program(X, {"k": t(4)})
def test_chained_library_calls(x, d):
    pairs = sorted(((k, v.numel()) for k, v in d.items()), key=operator.itemgetter(1))
    total = functools.reduce(operator.add, map(operator.itemgetter(1), pairs), 0)
    return x * total, pairs, "; ".join(map("{0[0]}={0[1]}".format, pairs))


@program(X)
def test_pure_paths(x):
    path = pathlib.PurePosixPath("a/b") / "c.pt"
    return x + len(path.parts), path.suffix, str(path.with_suffix(".txt")), sys.intern("a" + "b")
