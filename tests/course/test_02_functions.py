"""Functions: closures, globals, arguments of every kind, partial, decorators, caches, recursion, methods, super()."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tests.support import How, kiln, one_graph, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
SCALE = 3
COUNT = 0
TABLE: dict[str, Callable] = {}


def double(x):
    return x * 2


def affine(x, scale=2, shift=1):
    return x * scale + shift


def everything(a, /, b, c=3, *args, d, e=5, **kw):
    return a * b + c + sum(args) + d - e + sum(kw.values()), (a.shape, b, c, args, d, e, kw)


@program(G)
def test_calls_are_inlined(x):
    return double(affine(double(x))).sum()


@program(G, 5)
def test_defaults_and_keywords(x, n):
    return affine(x), affine(x, 3), affine(x, shift=n), affine(shift=1, x=x, scale=n)


@program(X)
def test_all_kinds_of_parameters(x):
    return (
        everything(x, 2, d=1),
        everything(x, 2, 3, 4, 5, d=1, e=2, z=9),
        everything(x, b=2, d=1, c=0),
        everything(*[x, 2], **{"d": 4, "q": 1}),
        everything(*(x, 2), *range(2), d=1, **{"e": 0}, **{"w": 1}),
    )


@program(X, 1, 2, k=3)
def test_entry_with_varargs(x, *args, scale=2, **kw):
    return x * scale + sum(args) + kw["k"], args, kw


@program(X)
def test_entry_with_defaults(x, scale=2, *, shift=1, items=(1, 2)):
    return x * scale + shift + sum(items)


@program(X)
@program(X, y=4)
def test_positional_only_and_keyword_entry(x, /, *, y=3):
    return x + y


@program(X)
def test_wrong_arguments_raise_as_eager(x):
    out = []
    calls = [lambda: double(), lambda: double(x, 1), lambda: affine(x, scalee=2), lambda: affine(x, x=1),
             lambda: everything(x, 2), lambda: everything(a=x, b=1, d=2)]  # fmt: skip
    for call in calls:
        try:
            call()
        except TypeError as e:
            out.append(str(e))
    return x + 1, out


def test_wrong_arguments_of_the_entry():
    for args, kw in [((), {}), ((X, 1, 2, 3), {}), ((X,), {"no": 1}), ((X,), {"x": X})]:
        r = same_as_eager(affine, *args, **kw)
        assert isinstance(r.raised, TypeError)


@program(G, 3)
def test_closures_and_cells(x, n):
    k = n * 2

    def inner(y):
        def innermost(z):
            return z * k + n

        return innermost(y) - k

    k += 1
    return inner(x), inner(x + 1)


@program(G)
def test_nonlocal(x):
    total, calls = x * 0, 0

    def add(y):
        nonlocal total, calls
        total = total + y
        calls += 1
        return total

    for i in range(3):
        add(x * i)
    return total, calls


@program(X)
def test_late_binding_of_loop_variables(x):
    late = [lambda: i for i in range(3)]
    early = [lambda i=i: i for i in range(3)]
    return x * sum(f() for f in late), [f() for f in late], [f() for f in early]


def make_scaler(scale, bias):
    def scaler(x):
        return x * scale + bias

    return scaler


def test_closure_made_outside():
    one_graph(make_scaler(3, torch.ones(4)), X)
    f = make_scaler(2, t(4))
    one_graph(lambda x: f(x) + f(x + 1), G)


@program(X)
def test_closure_made_inside_and_returned(x):
    f = make_scaler(3, x + 1)
    return f(x), f


def outer_counter():
    n = 0

    def step(x):
        nonlocal n
        n += 1
        return x + n

    def reset():
        nonlocal n
        n = 0

    return step, reset, lambda: n


def test_nonlocal_of_an_outer_function_is_written():
    step, reset, read = outer_counter()
    one_graph(step, X, how=How(setup=reset, state=read))


@program(X)
def test_global_reads(x):
    return double(x) * SCALE


def set_count(n=0):
    global COUNT
    COUNT = n


@program(X, how=How(setup=set_count, state=lambda: COUNT))
def test_global_writes(x):
    global COUNT
    COUNT += 1
    y = x + COUNT
    set_count(COUNT + 10)
    return y * COUNT


def drop_table():
    TABLE.clear()


@program(X, how=How(setup=drop_table, state=lambda: TABLE))
def test_global_container_filled(x):
    TABLE["double"] = double
    TABLE["x"] = x
    return TABLE["double"](x)


def define():
    global LATER
    LATER = 1


@program(X, how=How(setup=define, state=lambda: "LATER" in globals()))
def test_global_deleted(x):
    global LATER
    y = x + LATER
    del LATER
    try:
        return LATER
    except NameError as e:
        return y, str(e)


@program(G)
def test_lambdas(x):
    compose = lambda f, g: lambda v: g(f(v))  # noqa: E731
    return compose(lambda v: v + 1, lambda v: v * 2)(x), (lambda *a, **k: (len(a), sorted(k)))(1, 2, b=1, a=2)


@program(G)
def test_partial(x):
    f = functools.partial(affine, scale=3)
    g = functools.partial(f, shift=2)
    h = functools.partial(torch.add, alpha=2)
    return f(x), g(x, scale=1), h(x, x), functools.partial(everything, x, 1)(2, d=1)[0], g.func is affine, g.keywords


class Named(functools.partial):
    __slots__ = ("func",)  # another than partial's, which is what is called

    def __init__(self, func):
        self.func = func


OUTSIDE = Named(functools.partial(affine, scale=3))


@program(X)
def test_partial_of_a_class_with_a_func_of_its_own(x):
    made = Named(functools.partial(torch.add, x))
    return made(x), made.func(1), OUTSIDE(x), OUTSIDE.func is not affine, made.args[0] is x


def test_partial_as_entry():
    one_graph(functools.partial(affine, scale=4), X)
    one_graph(lambda f, x: f(x), functools.partial(affine, shift=t(4)), X)


@program(X)
def test_partial_returned(x):
    return functools.partial(affine, x + 1, shift=2)


class Poly:
    k = 2

    def eval(self, x, shift):
        return x * self.k + shift

    run = functools.partialmethod(eval, shift=5)


def logged(f):
    @functools.wraps(f)
    def wrapper(*args, **kw):
        wrapper.calls.append(f.__name__)
        return f(*args, **kw) + 1

    wrapper.calls = []
    return wrapper


def times(n):
    def decorate(f):
        def wrapper(x):
            for _ in range(n):
                x = f(x)
            return x

        return wrapper

    return decorate


@logged
def decorated(x):
    """Doc."""
    return x * 3


@times(3)
@times(2)
def grown(x):
    return x + 1


@program(G, how=How(setup=lambda: decorated.calls.clear(), state=lambda: decorated.calls))
def test_decorators(x):
    return decorated(x), grown(x), decorated.__name__, decorated.__doc__, decorated.__wrapped__(x)


@program(X)
def test_decorators_made_inside(x):
    @logged
    @times(2)
    def inner(y):
        return y * y

    return inner(x), inner.calls


@functools.lru_cache
def cached_size(n):
    return n * 10


@functools.cache
def cached_scale(n, *, k=1):
    return n + k


@program(X)
def test_lru_cache(x):
    return x * cached_size(3) + cached_size(3) + cached_scale(2, k=4), cached_size.__wrapped__(2)


@program(G, 5)
def test_recursion(x, n):
    def down(y, k):
        return y if k == 0 else down(y.sin() + k, k - 1)

    return down(x, n), factorial(n), fib(7)


def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def even(n):
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


@program(X)
def test_mutual_recursion(x):
    return x + 1 if even(10) else x - 1


@program(X, 40)
def test_deep_recursion(x, n):
    return x + 1 if n == 0 else recurse(x, n)


def recurse(x, n):
    return x if n == 0 else recurse(x + n, n - 1)


class Base:
    factor = 2

    def __init__(self, k=3):
        self.k = k

    def scale(self, x):
        return x * self.k

    @classmethod
    def grow(cls, x):
        return x * cls.factor

    @staticmethod
    def shift(x, by=1):
        return x + by

    @classmethod
    def make(cls, k):
        return cls(k)

    def chain(self, x):
        return [type(self).__name__, x + 1]


class Left(Base):
    factor = 5

    def scale(self, x):
        return super().scale(x) + 1

    @classmethod
    def grow(cls, x):
        return super().grow(x) + 10

    def chain(self, x):
        return ["left", *super().chain(x)]


class Right(Base):
    def chain(self, x):
        return ["right", *super(Right, self).chain(x)]


class Both(Left, Right):
    def chain(self, x):
        return ["both", *super().chain(x)]


@program(G, Base(4))
@program(G, Left(4))
@program(G, Both())
def test_methods(x, obj):
    return obj.scale(x), obj.grow(x), obj.shift(x), type(obj).shift(x, by=2), obj.make(2).scale(x), obj.chain(x)


@program(X, Both())
def test_bound_and_unbound_methods_as_values(x, obj):
    m = obj.scale
    return m(x), Base.scale(obj, x), Left.grow(x), m.__self__ is obj, m.__func__ is Left.scale, [f(x) for f in (m, m)]


def test_bound_method_as_entry():
    one_graph(Both(7).scale, X)
    one_graph(Left.grow, X)
    one_graph(Base.shift, X)
    one_graph(lambda p, x: p.run(x), Poly(), X)


@program(X)
def test_bound_method_returned(x):
    return x + 1, Both(2).scale


@program(X, Left(2))
def test_super_in_nested_and_class_methods(x, obj):
    class Inner(Left):
        def scale(self, y):
            return [super(Inner, self).scale(y + i) for i in range(2)][1]

        @classmethod
        def grow(cls, y):
            return super().grow(y), __class__ is cls

    return Inner(3).scale(x), Inner.grow(x)


@program(X)
def test_functions_as_values(x):
    ops = {"double": double, "sin": torch.sin, "relu": torch.nn.functional.relu, "neg": lambda v: -v, "exp": torch.Tensor.exp}
    y = x
    for name in sorted(ops):
        y = ops[name](y)
    return y, [f.__name__ for f in ops.values()], ops["double"] is double, callable(ops["sin"])


@program(X, double)
@program(X, torch.sin)
@program(X, torch.nn.functional.gelu)
@program(X, Base(2).scale)
@program(X, torch.nn.ReLU())
def test_function_arguments(x, f):
    return f(x) + 1, f == f, f is double


@program(X)
def test_default_is_evaluated_once(x):
    def collect(v, into=[]):  # noqa: B006
        into.append(v)
        return into

    collect(1)
    return x * len(collect(2)), collect(3)


@program(X)
def test_function_attributes(x):
    def f(y):
        f.calls += 1
        return y * f.calls

    f.calls = 0
    f.tag = {"a": 1}
    return f(f(x)), f.calls, f.tag, f.__name__, f.__qualname__.split(".")[-1], f.__defaults__, f.__doc__


@program(X)
def test_annotations_and_signature_of_inner_function(x):
    def f(a: int, *, b: str = "k") -> torch.Tensor:
        """Inner."""
        return x * a

    return f(2), sorted(f.__annotations__), f.__kwdefaults__, f.__code__.co_argcount, f.__doc__


@program(X)
def test_functions_in_a_pipeline(x):
    def pipe(v, *stages):
        return functools.reduce(lambda acc, stage: stage(acc), stages, v)

    return pipe(x, double, torch.sin, lambda v: v + 1, functools.partial(affine, scale=2))


@program(X)
def test_singledispatch(x):
    return describe(x), describe(3), describe("s"), describe([1])


@functools.singledispatch
def describe(v):
    return ("object", v)


@describe.register
def _(v: int):
    return ("int", v + 1)


@describe.register(torch.Tensor)
def _(v):
    return ("tensor", v + 1)


@program(X)
def test_locals_with_the_same_names_in_inlined_frames(x):
    def x1(x, y=1):
        y = x + y
        return y

    y = 5
    return x1(x) + x1(x, y) * y


@program(X)
def test_argument_tuples_are_new_and_kwargs_are_copies(x):
    def f(*args, **kw):
        kw["new"] = 1
        return args, kw

    d = {"a": x + 1}
    args, kw = f(*[1, 2], **d)
    return args, kw, d


@program(X, [1])
def test_arguments_are_passed_by_reference(x, items):
    def fill(a, n):
        a.append(n)
        a = []
        a.append("lost")
        return n

    return x * fill(items, 5), items


@program(X)
def test_cell_seen_by_two_functions(x):
    value = x

    def put(v):
        nonlocal value
        value = v

    def get():
        return value

    put(get() + 1)
    put(get() * 2)
    return get(), value is get()


@program(X)
def test_cell_before_assignment(x):
    def get():
        return value

    try:
        get()
    except NameError as e:
        message = str(e)
    value = x + 1
    return get(), message


@program(X)
def test_cell_deleted(x):
    value = 1

    def get():
        return value

    first = get()
    del value
    try:
        get()
    except NameError as e:
        return x + first, str(e)


@program(X)
def test_compiled_function_called_inside(x):
    return COMPILED(x) + 1


COMPILED = kiln.compile(affine, backend="eager")


@program(G)
def test_operator_functions_and_method_descriptors(x):
    return torch.Tensor.add(x, 1), torch.Tensor.__mul__(x, 2), str.upper("a"), list.__len__([1]), dict.get({"a": 1}, "a")


@program(X)
def test_is_compiling(x):
    n = 1 if torch.compiler.is_compiling() or kiln.is_compiling() else 1
    return x + n
