"""Programs that use the stack, the handlers and the cells of a frame in every way that the compiler knows.

Each is a function and its arguments; all they do is seen in the result, in the log or in the exception.
"""

import contextlib
from collections import namedtuple

SAMPLES = []


def sample(*args, **kwargs):
    """Keep the function with arguments for one call; further decorators add further calls."""

    def keep(function):
        SAMPLES.append((function, args, kwargs))
        return function

    return keep


class Manager:
    """A context manager that logs, and swallows exceptions of one type."""

    def __init__(self, log, swallow=()):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, traceback):
        self.log.append(("exit", kind and kind.__name__))
        return kind is not None and issubclass(kind, self.swallow)


class Base:
    scale = 3

    def value(self, x):
        return x * self.scale


Point = namedtuple("Point", "x y")


@sample(4)
def arithmetic(n):
    a, b = n, 2
    a += b * n - (-n) // 3
    a, b = b, a
    return (a, b, +n, ~n, not n, a < b, a == b, a in (1, 2), a is not None, n**2 % 5, n << 1 | 3)


@sample(5)
def loops(n):
    total = 0
    for i in range(n):
        for j in range(i):
            if j == 2:
                continue
            total += i * j
        else:
            total += 1
        if total > 20:
            break
    while total > 3:
        total -= 2
    return total, i, j


@sample([3, 0, 4])
@sample([])
def nested_calls(items):
    return sum(map(len, [str(x) * max(x, 1) for x in items]), len(items)) + max(
        *items, 1, 2, key=lambda v: -v
    )


@sample(1, 2, 3, 4, c=5, d=6)
def signature(a, b=7, *rest, c, **more):
    return dict(a=a, b=b, rest=rest, c=c, more=more, **{"k": (*rest, a)})


@sample("x", 3.14159)
def strings(s, f):
    return f"{s!r:>5} {f:.2f} {s}" + "%s-%d" % (s, 3) + f"{s=}"


@sample([1, 2, 3, 4], {"a": 1})
def containers(items, table):
    first, *middle, last = items
    items[1:3] = [9]
    items[0], table["b"] = table["a"], items[-1]
    del items[0], table["a"]
    head = items[:1]
    return [*items, *middle], {**table, "z": 1}, {first, last}, items[::-1], head, (*head,)


@sample(0)
@sample(1)
@sample("one")
def handlers(x):
    log = []
    try:
        log.append("try")
        log.append(1 / x)
    except ZeroDivisionError as error:
        log.append(str(error))
    except (TypeError, ValueError):
        log.append("type")
    else:
        log.append("else")
    finally:
        log.append("finally")
    return log


@sample(3)
def handlers_in_loop(n):
    log = []
    for i in range(n):
        try:
            try:
                if i == 1:
                    raise KeyError(i)
                log.append(i)
            finally:
                log.append("f")
        except KeyError as error:
            log.append(error.args)
            continue
        log.append("end")
    return log


@sample([])
def bare_raise(log):
    try:
        try:
            raise ValueError("inner")
        except ValueError:
            log.append("first")
            raise
    except ValueError as error:
        log.append(error.args)
        try:
            raise KeyError("second")
        except KeyError as other:
            log.append(type(other.__context__).__name__)
            log.append(other.__context__ is error)
            raise RuntimeError("third") from other


@sample([])
def exception_states(log):
    import sys

    log.append(sys.exc_info()[0])
    try:
        raise ValueError(1)
    except ValueError:
        log.append(sys.exc_info()[0])
        try:
            raise KeyError(2)
        except KeyError:
            log.append(sys.exc_info()[0])
        log.append(sys.exc_info()[0])
    log.append(sys.exc_info()[0])
    return log


@sample([])
def returns_in_finally(log):
    for i in range(3):
        try:
            try:
                log.append(i)
                if i == 1:
                    return log
            finally:
                log.append("cleanup")
        finally:
            log.append("outer")
    return None


@sample([], True)
@sample([], False)
def with_blocks(log, fail):
    with Manager(log) as m, Manager(log, (KeyError,)):
        log.append(m is not None)
        if fail:
            raise KeyError("lost")
    with contextlib.suppress(ValueError):
        log.append(int("x"))
    return log


@sample([])
def with_reraise(log):
    for i in range(2):
        with Manager(log, (KeyError,)):
            log.append(i)
            if i:
                raise ValueError(i)
            continue
    return log


@sample([])
def groups(log):
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2), KeyError(3)])
    except* ValueError as group:
        log.append(len(group.exceptions))
    except* TypeError:
        log.append("type")
        raise
    return log


@sample({"kind": "a", "rest": 1})
@sample([1, 2, 3])
@sample(Point(1, 5))
@sample(7)
@sample("s")
def matching(value):
    match value:
        case {"kind": kind, **rest}:
            return kind, rest
        case Point(x=1, y=y) if y > 3:
            return "point", y
        case [first, *others]:
            return first, others
        case int() | float():
            return "number"
        case _:
            return "other"


@sample([3, 1, 2], 10)
def comprehensions(items, k):
    i = "kept"
    squares = [i * i + k for i in items if i != 1]
    pairs = {i: [j for j in range(i)] for i in items}
    uniq = {x % 2 for x in items}
    lazy = sum(y + k for y in items)
    return squares, pairs, uniq, lazy, i


@sample([3, 0, 2])
def comprehension_raises(items):
    x = 5
    try:
        return [1 // x for x in items]
    except ZeroDivisionError:
        return x


@sample([1, 2, 3])
def comprehension_closures(items):
    calls = [lambda: x * 10 for x in items]
    shift = 3
    more = [lambda y=y: y + shift for y in items]
    shift = 4
    return [c() for c in calls], [c() for c in more]


@sample(3)
def closures(n):
    total = 0

    def add(k, scale=n):
        nonlocal total
        total += k * scale
        return total

    results = [add(i) for i in range(n)]
    n = 10
    results.append(add(1))
    del n
    try:
        results.append(n)
    except UnboundLocalError as error:
        results.append(str(error))
    return results, total


def _maker(start):
    count = start

    @sample([])
    def counter(log):
        nonlocal count
        log.append(count)
        count += 0
        log.append(count + start)
        return log

    return counter


_maker(5)


def _unbound():
    @sample([])
    def reader(log):
        try:
            log.append(later)
        except NameError as error:
            log.append((type(error), str(error), error.name))
        log.append("after")
        return later

    if SAMPLES is None:
        later = 1
    return reader


_unbound()


@sample([])
def deletes_unbound_cell(log):
    def inner():
        return x

    try:
        del x
    except UnboundLocalError as error:
        log.append(str(error))
    x = 1
    log.append(inner())
    del x
    try:
        inner()
    except NameError as error:
        log.append(str(error))
    return log


def fails(x):
    raise KeyError(x)


@sample([])
def cell_before_call(log):
    x = 1
    show = lambda: x  # noqa: E731
    try:
        fails(x)
    except KeyError as error:
        log.append(repr(error))
    log.append(show())
    fails(x)


@sample(True)
@sample(False)
def unbound(flag):
    if flag:
        x = 1
    try:
        return x
    except UnboundLocalError as error:
        return str(error)


class Child(Base):
    def value(self, x):
        bound = super().value
        other = super()
        return super().value(x) + other.value(1) + bound(2)

    def captured(self, x):
        return [super(Child, self).value(x) for _ in range(2)], (lambda: self.scale)(), super().value(1)


SAMPLES.append((Child.value, (Child(), 4), {}))
SAMPLES.append((Child.captured, (Child(), 4), {}))


@sample(None)
@sample(0)
@sample([1])
def truth(x):
    if x is None:
        a = "none"
    elif not x:
        a = "false"
    else:
        a = "true"
    b = x or "default"
    c = x and x[0]
    d = 1 < len(a) < 5
    return a, b, c, d, (a if x else b), [v for v in (x,) if v is not None]


@sample(3)
def asserts(x):
    assert x == 3
    assert x > 5, f"{x} is small"


@sample(0)
def imports(x):
    import math as m
    from os.path import basename, join

    return m.floor(2.5), join("a", basename("b/c"))


@sample(2)
def builds_class(x):
    class Local(Base):
        scale = x

        def value(self, y):
            return super().value(y) + x

    def typed(a: int, *, b: "str" = "q") -> float:
        return a, b

    return Local().value(5), typed(1), typed.__annotations__["a"], typed.__kwdefaults__


@sample(4)
def generator_loop(n):
    def numbers():
        for i in range(n):
            yield i

    total = []
    for v in numbers():
        total.append(v)
    for v in (w * 2 for w in total):
        total[0] += v
    return total


@sample(1)
def walrus(x):
    while (x := x * 2) < 20:
        pass
    return [y := x, y + 1, (z := y) + z], y, z


@sample(1)
def many_locals(x):
    a = b = c = d = e = f = g = h = i = j = k = l = m = n = o = p = q = r = x  # noqa: E741
    s, t = q, r
    a, b = t, s
    return a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s + t


@sample([])
def swallowed_in_handler(log):
    try:
        raise ValueError("a")
    except ValueError as outer:
        for k in range(2):
            with contextlib.suppress(KeyError):
                log.append((k, outer.args))
                raise KeyError(k)
        log.append(str(outer))
    finally:
        log.append("done")
    log.append("outer" in locals())
    return log
