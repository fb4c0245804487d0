"""Functions of f64 for GPUs, run on the CPU beside the C library's."""

import ctypes
import math
import random

import pytest

from kiln.generate.cpu import compile_text
from kiln.generate.ptx_library import LIBRARY, library

REACH = {"exp": 700, "exp2": 1000, "expm1": 700, "log": 1e300, "log1p": 1e300, "log2": 1e300, "tanh": 30}
SMALLEST = {"log": 1e-320, "log2": 1e-320}


@pytest.fixture(scope="module")
def code():
    text, calls = library(LIBRARY)
    entries = []
    for name in LIBRARY:
        given = ["double %x", "double %y"] if name == "fmod" else ["double %x"]
        text = text.replace(f"@{name}(", f"@own_{name}(")
        entries.append(
            f"define double @entry_{name}({', '.join(given)}) {{\n"
            f"  %r = call double @own_{name}({', '.join(given)})\n  ret double %r\n}}"
        )
    return compile_text("\n".join([*calls.values(), text, *entries]))


def value(f, *x):
    try:
        return f(*x)
    except OverflowError:
        return math.inf
    except ValueError:
        return -math.inf if x == (0.0,) else math.nan


def samples(name):
    pick = random.Random(0)
    for _ in range(3000):
        size = math.exp(pick.uniform(math.log(SMALLEST.get(name, 1e-12)), math.log(REACH.get(name, 1e300))))
        yield size if name.startswith("log") else pick.choice((-1, 1)) * size
    yield from (0.0, 1.0, 1e22, 2.0**20, 2.0**30 + 1, math.inf, math.nan)


@pytest.mark.parametrize("name", sorted(LIBRARY.keys() - {"fmod"}))
def test_functions(name, code):
    f = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(code.address(f"entry_{name}"))
    for x in samples(name):
        got, wanted = f(x), value(getattr(math, name, lambda x: 2.0**x), x)
        same = got == wanted or (got != got and wanted != wanted)
        assert same or abs(got - wanted) <= 8 * math.ulp(wanted) + 1e-300, (x, got, wanted)


def test_rest_of_division(code):
    f = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(code.address("entry_fmod"))
    pick = random.Random(0)
    for _ in range(2000):
        x, y = (pick.choice((-1, 1)) * math.exp(pick.uniform(-80, 80)) for _ in range(2))
        assert f(x, y) == math.fmod(x, y), (x, y)
    assert f(3.0, math.inf) == 3.0 and math.isnan(f(1.0, 0.0)) and math.isnan(f(math.inf, 1.0))
