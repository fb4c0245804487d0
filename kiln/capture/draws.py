"""Numbers from random generators of Python: drawn before the graph runs, in the order of the program.

The graph goes on with a number of which its type is known, and for an int the range. A program that looks at
it breaks where it was drawn: capture begins again for that.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.expressions import Expr
from kiln.base.source import Arg, Const, Source
from kiln.capture import runtime
from kiln.capture.attributes import LOADED
from kiln.capture.calls import HANDLERS, METHODS, Args, Kwargs, handles, native
from kiln.capture.frame import Machine, Restart
from kiln.capture.recorder import Recorder
from kiln.capture.varying import Draw
from kiln.capture.world import nested
from kiln.ops.symint import expr_of, wrap

LARGEST = 1 << 62
#: Where floats lie that a method gives: the least, the most, and whether that one can be.
SPANS: dict[str, Any] = {
    **dict.fromkeys(("random", "random_sample", "rand"), lambda *args: (0.0, 1.0, False)),
    "uniform": lambda a=0.0, b=1.0: (min(a, b, a + (b - a)), max(a, b, a + (b - a)), True),
}


def refusal(function: Any) -> Break:
    name = f"{getattr(function, '__module__', None) or 'random'}.{function.__qualname__}"
    return Break("random-state", f"the number that {name} gives is needed", "draw it outside, and pass it in")


def number(m: Machine, function: Any, owner: Source | None, args: Args, found: range | None) -> Any:
    """A number that the function gives; an int is one of `found`."""
    reason, step = refusal(function), m.frames[-1].step
    reason.at = m.frames[-1].place()
    low, high = (min(found[0], found[-1]), max(found[0], found[-1])) if found is not None else (None, None)
    draw = Draw(f"__drawn{len(m.world.varying.draws)}", function, owner, args)
    symbol = m.world.varying.drawn(draw, low, high, Restart(step, reason))
    span = SPANS.get(function.__name__)
    if found is None and span is not None:
        m.world.varying.spans[symbol] = span(*args)
    m.recorder.symbol(symbol, "value", Arg(-1, draw.name))
    m.world.writes += 1
    return wrap(symbol)


def drawing(m: Machine, args: Args, kwargs: Kwargs, function: Any, like: Any, ints: Any) -> Any:
    """A method of generators; `like` is that of a generator of no consequence."""
    owner, *given = args
    if type(owner) is random.Random and owner is not SHARED and m.source(owner) is None:
        return native(m, function, args, kwargs)
    plain = type(owner) is type(like.__self__) and not kwargs and {*map(type, given)} <= {int, float}
    if not plain or type(m.recorder) is not Recorder:  # a graph in it may run more than once in a call
        raise refusal(function)
    result = m.native(like, *given)  # raises what it raises
    found = ints(*given) if ints else None
    if type(result) not in (int, float) or found and max(map(abs, (found[0], found[-1]))) > LARGEST:
        raise refusal(function)
    return number(m, function, m.source(owner) or Const(owner), tuple(given), found)


SHARED = random.random.__self__  # type: ignore[attr-defined]


def draws(generator: Any, floats: str, ints: dict[str, Any]) -> None:
    """Declare methods of such generators: those that give a float, and those that give an int of a range."""
    for name in (*floats.split(), *ints):
        function = getattr(type(generator), name)
        handles(function, told=True)(partial(drawing, like=getattr(generator, name), ints=ints.get(name)))


draws(
    random.Random(0),
    "random uniform triangular gauss normalvariate lognormvariate expovariate betavariate gammavariate",
    {"randint": lambda a, b: range(a, b + 1), "randrange": range, "getrandbits": lambda k: range(1 << k)},
)


@handles(random.Random.seed, random.Random.setstate, told=True)
def seeding(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A method that sets the state of a generator runs among the draws."""
    owner, *given = args
    if owner is not SHARED and m.source(owner) is None:
        return native(m, function, args, kwargs)
    constant = all(type(part) in (int, float, str, bytes, type(None)) for part in nested(given)
                   if type(part) is not tuple)  # fmt: skip
    if not given or given == [None] or kwargs or not constant or type(m.recorder) is not Recorder:
        raise Break("random-state", "a random generator is seeded", "seed it outside, or with a constant")
    number(m, function, m.source(owner) or Const(owner), tuple(given), None)


@handles(torch.manual_seed)
def manual_seed(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Torch's generators are seeded before the graph runs where it has drawn nothing yet, else by it."""
    first = not m.whole and not m.recorder.dispatch.draws and type(m.recorder) is Recorder
    if first and is_seed(*args, **kwargs):
        number(m, torch.manual_seed, None, (*args, *kwargs.values()), None)
    else:
        m.recorder.note(torch.manual_seed, args, kwargs)
        m.recorder.dispatch.draws.add(torch.device("cpu"))  # seeds that follow come after this one
    return m.world.constant(torch.default_generator)


@handles(torch.Generator)
def new_generator(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A generator is made before the graph runs, in every call, unless the graph stands for the program."""
    if m.whole or type(m.recorder) is not Recorder:
        return m.native(m.recorder.effect, torch.Generator, args, kwargs)
    made: torch.Generator = m.native(torch.Generator, *args, **kwargs)
    source = Arg(-1, aside(m, torch.Generator, None, (made.device,)))
    m.world.remember(made, source)
    m.recorder.lend(made, source)
    return made


def seeded(m: Machine, owner: torch.Generator, args: Args, kwargs: Kwargs) -> Any:
    """A generator that was made here is seeded before the graph runs, or by it where it has drawn from it."""
    source, seeds = m.source(owner), [*args, *kwargs.values()]
    lent = isinstance(source, Arg) and source.index == -1
    if lent and not m.recorder.drew(owner) and is_seed(*seeds):
        aside(m, runtime.seed_generator, source, (*seeds,))
        return owner
    if (lent or source is None) and all(type(seed) is int for seed in seeds):
        return m.native(m.recorder.effect, runtime.seed_generator, (owner, *seeds))
    raise Break("random-state", "a random generator is seeded", "seed it outside the compiled function")


METHODS[torch.Generator, "manual_seed"] = seeded


def aside(m: Machine, function: Any, owner: Source | None, args: Args) -> str:
    """Have a call made before the graph runs that changes nothing of others; the name of what it gives."""
    draw = Draw(f"__drawn{len(m.world.varying.draws)}", function, owner, args, lasting=False)
    m.world.varying.drawn(draw, None, None, None)
    m.world.writes += 1
    return draw.name


def is_seed(seed: Any) -> bool:
    """Whether torch takes the number for a seed, whatever it will be."""
    expr = expr_of(seed) if type(seed) is torch.SymInt else seed
    low, high = expr.scope.bounds(expr) if isinstance(expr, Expr) else (expr, expr)
    return type(seed) in (int, torch.SymInt) and low >= -(1 << 63) and high < 1 << 64


def declare_numpy() -> None:
    """Declare numpy's generators, once a program has loaded them: that takes as long as a small capture."""
    found = sys.modules.get("numpy.random")
    if found is not None and id(found.RandomState.rand) not in HANDLERS:
        names = """random uniform normal standard_normal beta gamma exponential laplace logistic lognormal
            triangular""".strip()
        draws(found.RandomState(0), f"{names} rand randn random_sample", {"randint": range})
        draws(found.default_rng(0), names, {})


LOADED.append(declare_numpy)
