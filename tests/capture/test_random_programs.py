"""Random programs over tensors, containers, objects, loops, handlers, closures and breaks: three calls each, as eager.

A failing seed prints its program; `python -m tests.capture.test_random_programs 100 200` tries more seeds.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import random
import sys

import pytest
import torch

from tests.same import Same
from tests.support import collected, kiln, t

NUMBERS = ("n", "m", "1", "2", "len(L)", "o.n", "len(D)", "x.shape[0]", "(n % 3)", "sum(v for v in (1, 2))", "len(log)")
TENSORS = ("x", "y", "y", "o.t", "T[0]", "z", 'D["t"]')
CONDITIONS = ("n > 2", "len(L) % 2", "m < n", '"a" in D', "o.n == 1", "L", "n in (1, 2, 3)", 'D.get("q")', "not log", "o.flag",
              "isinstance(L[-1], int) if L else False", 's == "ab"')  # fmt: skip
TENSOR_CONDITIONS = ("y.sum() > 0", "x.mean() < 0.1", "(y > 5).any()", "o.t.sum() > 1")
LISTS = ("L.append({n})", "L.append({t})", "L.insert(0, n)", "L.extend([m, n])", "L.pop() if L else None", "L.reverse()", "L[:] = L[:5]",
         "L = L + [n]", "L += [m]", "del L[3:]", "log.append(n)", "log.append(len(L))", "T[0] = y", "M = [L, L]; M[0].append(n)")  # fmt: skip
DICTS = ('D["a"] = {n}', 'D.pop("a", None)', 'D.setdefault("q", []).append({n})', 'D["t"] = {e}', "D.update(b=n)", "D = dict(D)",
         'E = D; E["e"] = L', 'D["k" + str(n % 3)] = m')  # fmt: skip
OBJECTS = ("o.flag = not o.flag", "o.bump(1)", "o.l = L", "o.l.append(m)", "o.new = Bag(up=o, v=n)", 'setattr(o, "s" + str(n % 2), n)',
           'n = getattr(o, "s1", 5)', "o.d = D", "o, p = p, o", "p.n += o.n; p.n %= 50")  # fmt: skip
IN_PLACE = ("y.add_(1)", "o.t.mul_(0.5)", "x = x.clone(); x[0] = y[1]", "v = y.reshape(-1); v[0] = 3", "y = y + torch.rand(3, 4)",
            "z = y[0:2]; z = torch.cat([z, x[:1]])")  # fmt: skip
BREAKS = ("kiln.graph_break()", "log.append(float(y.sum()) > 1)", "off(o, log)", 'print(end="")')
ITERATION = ("n += sum(w for w in gen(3))", "L.extend(w for w in gen(2))", "a, *b = [n, m, 3]; n = len(b)", 's = f"{{n % 2}}" + s[:1]',
             "it = iter(range(4)); next(it); n = sum(it) + n", "m = max([n, m], key=lambda v: -v)",
             "log.extend(sorted(str(k) for k in D))", "q = {{k: len(str(w)) for k, w in D.items() if isinstance(w, int)}}; m += len(q)")  # fmt: skip
LOOPS = ("range(2)", "[1, 2, 3]", "list(D)[:2]", "gen(2)", "enumerate([5, 6])", "zip(range(2), L)", "reversed([1, 2])")
MANAGERS = ("torch.no_grad()", "Noting(log)", "Noting(log, True)", "noting(log)", "Noting(log), torch.no_grad()", "torch.enable_grad()",
            "contextlib.suppress(KeyError)")  # fmt: skip
FAULTS = ("raise KeyError(n)", "{}[n]", "pass", "raise ValueError(m)", "1 // (n % 2)", "L[99]", "x @ x")
HANDLED = ("KeyError", "ValueError", "LookupError", "(KeyError, ZeroDivisionError)", "Exception")
RERAISED = ("raise", "raise RuntimeError(n) from e", "raise RuntimeError(m)")
SIMPLE = ((18, ("{v} = {e}",)), (7, ("{i} = ({n} + {n} * {n}) % 50",)), (6, LISTS), (6, DICTS), (5, OBJECTS), (4, IN_PLACE), (4, BREAKS),
          (3, ITERATION))  # fmt: skip


class Bag:
    def __init__(self, **kw):
        self.__dict__.update(kw)

    def bump(self, k):
        self.n += k
        return self.n


class Noting:
    def __init__(self, log, swallow=False):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, kind, *rest):
        self.log.append(f"out {kind.__name__ if kind else None}")
        return self.swallow


@contextlib.contextmanager
def noting(log):
    log.append("enter")
    try:
        yield 3
    except KeyError:
        log.append("seen")
        raise
    finally:
        log.append("exit")


def gen(k):
    for i in range(k):
        v = yield i
        if v:
            yield v


def branch(a, k):
    return a * k + 1 if k > 1 else a * k - 1


def push(a, items):
    items.append(7)
    return a + len(items)


@kiln.disable
def off(o, log):
    log.append("off")
    o.n += 1


class Writer:
    """Writes one random program."""

    def __init__(self, seed):
        self.random, self.lines, self.functions = random.Random(seed), [], 0

    def pick(self, options):
        return self.random.choice(options)

    def chance(self, p):
        return self.random.random() < p

    def expression(self):
        a, b, n = self.pick(TENSORS), self.pick(TENSORS), self.pick(NUMBERS)
        return self.pick((f"{a} + {n}", f"{a} * 0.5 + {b}", f"{a}.sin()", f"{a} - {b}", f"torch.maximum({a}, {b})", f"{a}.relu()",
                          f"branch({a}, {n})", f"{a}.T.contiguous().T", f"torch.where({a} > 0, {a}, {b})", f"push({a}, L)"))  # fmt: skip

    def put(self, depth, text):
        self.lines.append("    " * depth + text)

    def block(self, depth, loop, size=3):
        for _ in range(self.random.randint(1, size)):
            self.statement(depth, loop)

    def simple(self, depth, loop):
        if loop and self.chance(0.04):
            return self.put(depth, self.pick(("break", "continue")))
        weights, groups = zip(*SIMPLE)
        (group,) = self.random.choices(groups, weights)
        parts = {"n": self.pick(NUMBERS), "t": self.pick(TENSORS), "e": self.expression(), "v": self.pick(("y", "z", "o.t", "x")),
                 "i": self.pick(("n", "m", "o.n"))}  # fmt: skip
        return self.put(depth, self.pick(group).format(**parts))

    def statement(self, depth, loop=False):
        compound = (self.branch, self.branch, self.loop, self.loop, self.handler, self.handler, self.manager, self.function)
        if depth > 4 or self.chance(0.55):
            self.simple(depth, loop)
        else:
            self.pick(compound)(depth, loop)

    def branch(self, depth, loop):
        self.put(depth, f"if {self.pick(CONDITIONS if self.chance(0.65) else TENSOR_CONDITIONS)}:")
        self.block(depth + 1, loop)
        if self.chance(0.5):
            self.put(depth, "else:")
            self.block(depth + 1, loop)

    def loop(self, depth, loop):
        if self.chance(0.3):
            self.put(depth, f"w{depth} = 0")
            self.put(depth, f"while w{depth} < {self.random.randint(1, 3)}:")
            self.put(depth + 1, f"w{depth} += 1")
        else:
            self.put(depth, f"for i{depth} in {self.pick(LOOPS)}:")
        self.block(depth + 1, True)
        if self.chance(0.3):
            self.put(depth, "else:")
            self.block(depth + 1, loop)

    def handler(self, depth, loop):
        self.put(depth, "try:")
        self.block(depth + 1, loop)
        self.put(depth + 1, self.pick(FAULTS))
        self.put(depth, f"except {self.pick(HANDLED)} as e:")
        self.put(depth + 1, "log.append(str(e)[:30])")
        self.block(depth + 1, loop, 1)
        if self.chance(0.25):
            self.put(depth + 1, self.pick(RERAISED))
        if self.chance(0.4):
            self.put(depth, "finally:")
            self.block(depth + 1, False, 1)

    def manager(self, depth, loop):
        self.put(depth, f"with {self.pick(MANAGERS)}:")
        self.block(depth + 1, loop)
        if self.chance(0.25):
            self.put(depth + 1, 'raise KeyError("w")')

    def function(self, depth, loop):
        self.functions += 1
        name = f"f{self.functions}"
        self.put(depth, f"def {name}(a, k=n):")
        self.put(depth + 1, "nonlocal n, y")
        self.put(depth + 1, self.pick(("n = (n + k) % 50", "y = y + a", "n = n % 50 + 1; y = y * 0.5")))
        self.put(depth + 1, self.pick(("kiln.graph_break()", "log.append(k)", "pass", "if a.sum() > 0: n += 1")))
        self.put(depth + 1, self.pick(("y = y + n", "y = y - a", "pass")))
        self.put(depth + 1, "return a + k + n")
        self.put(depth, f"z = {name}({self.pick(TENSORS)}) + {name}({self.pick(TENSORS)}, {self.pick(NUMBERS)})")

    def program(self):
        self.put(0, "def f(x, n, L, D, o, log):")
        self.put(1, 'm, z, y, s, T, p = 2, x, x * 1, "ab", [x + 1], Bag(n=3, t=x, l=[], flag=True, d={})')
        for _ in range(self.random.randint(3, 7)):
            self.statement(1)
        self.put(1, "return x, y, z, n, m, L, D, T, o, p, s")
        return "\n".join(self.lines)


def session(call):
    """Three calls on one world; what each gave, and the world after it."""
    world, out = (t(3, 4), [1, 2], {"a": 1, "t": t(3, 4) + 1}, Bag(n=1, t=t(3, 4) * 2, l=[0], flag=False, d={}), []), []
    x, *rest = world
    for number in range(3):
        torch.manual_seed(number)
        try:
            result = call(x, 1 + number // 2, *rest)
        except Exception as error:
            result = type(error), str(error)[:200]
        out.append(copy.deepcopy((result, world, torch.is_grad_enabled())))
        torch.set_grad_enabled(True)
    return out


def check(seed):
    text, name = Writer(seed).program(), f"<program {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = dict(globals())
    exec(compile(text, name, "exec"), scope)
    expected = session(scope["f"])
    with collected() as log:
        got = session(kiln.compile(scope["f"], backend="eager"))
    try:
        assert not log.fallbacks, f"fell back: {log.fallbacks}"
        Same()(expected, got, f"seed {seed}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{text}") from error


@pytest.mark.parametrize("seed", range(30))
def test_random_program(seed):
    check(seed)


if __name__ == "__main__":
    for tried in range(*map(int, sys.argv[1:])):
        try:
            check(tried)
        except AssertionError as failure:
            print(f"seed {tried}: {str(failure).splitlines()[0][:200]}", flush=True)
