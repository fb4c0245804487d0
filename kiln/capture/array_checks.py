"""Whether tensors do what numpy does: guards on arrays, and both tried on stand-ins for a graph's arrays."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.expressions import Condition, Expr
from kiln.base.graph import mapped
from kiln.capture.calls import Args, Kwargs
from kiln.capture.fake_arrays import ArrayFunction, FakeArray
from kiln.check.guards import Guard
from kiln.ops.symint import SYMBOLIC, expr_of, specialised

HINT = "use the torch function instead, or move the call out of the compiled function"
TYPES = (numpy.generic, bool, int, float, complex)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayEquals(Guard):
    """The dtype, shape and contents of a small array."""

    value: Any

    def __str__(self) -> str:
        facts = f"an array of {self.value.dtype} with shape {self.value.shape}"
        return f"{self.source} is {facts} and its contents"

    def test(self, value: Any) -> bool:
        mine = self.value
        return (type(value) is type(mine) and value.dtype == mine.dtype and value.shape == mine.shape
                and value.tobytes() == mine.tobytes())  # fmt: skip

    def describe(self, value: Any) -> str:
        return " was an array with other contents"

    def key(self) -> object:
        return ArrayEquals, self.source, self.value.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class ArrayMatch(Guard):
    """What an array is, apart from its contents and its layout, which the guard of its tensor covers."""

    facts: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.source} is an array of {self.facts[1]}"

    def test(self, value: Any) -> bool:
        return facts_of(value) == self.facts

    def describe(self, value: Any) -> str:
        return f" was an array of {self.facts[1]}"


def facts_of(value: Any) -> tuple[Any, ...]:
    if type(value) is not numpy.ndarray:
        return (type(value),)
    return numpy.ndarray, value.dtype, value.flags.writeable and all(stride >= 0 for stride in value.strides)


def refusal(what: str, why: str) -> Break:
    return Break("numpy", f"numpy's {what} {why}", HINT)


def stand_ins(value: Any, of: Callable[[FakeArray], Any] = lambda array: array.like) -> Any:
    """The nest with stand-ins for the arrays of the graph, and numbers as they are in this call."""
    return mapped(value, lambda v: of(v) if type(v) is FakeArray else seen(v))


def seen(value: Any) -> Any:
    """The number that one which varies is in this call: nobody decides on it."""
    if type(value) not in SYMBOLIC:
        return value
    expr = expr_of(value)
    opened = isinstance(expr, (Expr, Condition)) and expr.scope.is_open(expr)
    return specialised(value) if opened else value.node.hint


def sizes(tensor: Any) -> tuple[int, ...]:
    """The shape that a tensor has in this call."""
    return tuple(map(seen, tensor.shape))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def check_values(node: ArrayFunction, function: Callable[..., Any], args: Args, kwargs: Kwargs, name: str,
                 target: FakeArray | None) -> None:  # fmt: skip
    """Refuse where tensors give other values than numpy, on the stand-ins or on numbers that are none."""
    for lace in (False, True):
        copies: dict[int, Any] = {}

        def copied(array: FakeArray, lace: bool = lace, copies: dict[int, Any] = copies) -> Any:
            if id(array) not in copies:
                copies[id(array)] = laced(array.like) if lace else array.like.copy()
            return copies[id(array)]

        theirs = stand_ins((args, kwargs), copied)
        given = [(copy, copy.tobytes()) for key, copy in copies.items() if key != id(target)]
        copies.clear()
        mine = mapped(stand_ins((args, kwargs), copied), functools.partial(tensor_of, name in KEYED))
        try:
            with quiet():
                expected = function(*theirs[0], **theirs[1])
        except Exception:
            continue  # the call itself will say
        if any(array.tobytes() != before for array, before in given):
            raise refusal(name, "writes to its arguments")
        try:
            with quiet():
                got = node(*mine[0], **mine[1])
        except Exception as e:
            raise refusal(name, f"raises {type(e).__name__} on tensors: {e}") from None
        if target is not None:
            at = kwargs.get("out") is None
            expected, got = (theirs[0][0], mine[0][0]) if at else (theirs[1]["out"], mine[1]["out"])
        if not same_values(expected, got):
            raise refusal(name, "gives other values on tensors")


def laced(like: Any) -> Any:
    """A copy with infinities, zeros and what is no number among its floats; complex ones stay as they are."""
    copy = numpy.array(like)
    if copy.dtype.kind == "f" and copy.size:
        flat = copy.reshape(-1)
        odd = numpy.array([numpy.nan, numpy.inf, -0.0, -numpy.inf, 0.5, -1.5, 0.0], dtype=copy.dtype)
        flat[::2] = numpy.resize(odd, flat[::2].shape)
    return copy if isinstance(like, numpy.ndarray) else copy[()]


def tensor_of(keyed: bool, value: Any) -> Any:
    """A tensor for an array, as `lower` makes it for the node."""
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, numpy.generic):
        return value.item() if keyed else torch.from_numpy(numpy.array(value))
    return dtype_name(value)


def same_values(expected: Any, got: Any) -> bool:
    """Whether numpy's result and that of tensors are one: rounding apart, the sign of zero included."""
    if type(expected) in (list, tuple):
        alike = type(got) in (list, tuple) and len(got) == len(expected)
        return alike and all(map(same_values, expected, got))
    if not isinstance(expected, (numpy.ndarray, numpy.generic)):
        return True
    if not isinstance(got, torch.Tensor):
        return False
    a, b = numpy.asarray(expected), got.detach().resolve_conj().resolve_neg().numpy()
    if a.shape != b.shape or a.dtype != b.dtype:
        return True  # the node's result will say
    if a.dtype.kind not in "fc":
        return bool(numpy.array_equal(a, b))
    with quiet():
        close = TOLERANCE.get(a.dtype.name, 1e-9)
        if not numpy.allclose(a, b, rtol=close, atol=close, equal_nan=True):
            return False
        zeros = (a == 0) & (b == 0)
        parts = ((a.real, b.real), (a.imag, b.imag)) if a.dtype.kind == "c" else ((a, b),)
        signs = [(numpy.signbit(x[zeros]), numpy.signbit(y[zeros])) for x, y in parts]
        return all(bool(numpy.array_equal(x, y)) for x, y in signs)


TOLERANCE = {"float16": 1e-2, "float32": 1e-4, "complex64": 1e-4}
KEYED = ("__getitem__", "__setitem__")


def dtype_name(value: Any) -> Any:
    """The name of a dtype; other values as they are."""
    if isinstance(value, numpy.dtype) or isinstance(value, type) and issubclass(value, TYPES):
        return numpy.dtype(value).name
    return value
