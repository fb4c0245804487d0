"""Functions of f64 for GPUs, run on the CPU beside the C library's."""

import ctypes
import math
import random

import pytest

from kiln.generate.cpu import compile_text
from kiln.generate.ptx_library import LIBRARY, OF_TWO, library

REACH = {"exp": 700, "exp2": 1000, "expm1": 700, "log": 1e300, "log1p": 1e300, "log2": 1e300, "tanh": 30,
         "asin": 1, "acos": 1, "erf": 7}  # fmt: skip
SMALLEST = {"log": 1e-320, "log2": 1e-320}


@pytest.fixture(scope="module")
def code():
    text, calls = library(LIBRARY)
    entries = []
    for name in LIBRARY:
        given = ["double %x", "double %y"] if name in OF_TWO else ["double %x"]
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


@pytest.mark.parametrize("name", sorted(LIBRARY.keys() - OF_TWO))
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


SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    3.0,
    -2.0,
    -3.0,
    1e300,
    -1e300,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
)


@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_functions_of_two(name, code):
    f = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(code.address(f"entry_{name}"))
    library_s = getattr(ctypes.CDLL("libm.so.6"), name)
    library_s.restype, library_s.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    pick = random.Random(0)
    pairs = [(x, y) for x in SPECIAL for y in SPECIAL]
    for _ in range(3000):
        x = math.exp(pick.uniform(-30, 30)) * (1 if name == "pow" else pick.choice((-1, 1)))
        y = pick.uniform(-20, 20) if name == "pow" else pick.choice((-1, 1)) * math.exp(pick.uniform(-30, 30))
        pairs.append((x, y))
    for x, y in pairs:
        got, wanted = f(x, y), library_s(x, y)
        same = (
            got == wanted
            and math.copysign(1, got) == math.copysign(1, wanted)
            or got != got
            and wanted != wanted
        )
        near = math.isfinite(wanted) and wanted and abs(got - wanted) <= 6 * math.ulp(wanted)
        assert same or near, (x, y, got, wanted)
