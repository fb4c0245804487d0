"""Every aten call that torch's own samples lead to, forward and backward: what the fakes say of it against the real op.

The samples of an op run on real tensors. Each call that reaches the kernels on the way is run again on fakes of its
arguments, and all that can be known without data must agree: shape, strides, offset, dtype, device, conjugation, which
results are arguments, and which share their memory. What differs is listed below, by overload.

By default each op gives its first samples; KILN_ALL_SAMPLES=1 (`make test-ops`) runs all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kiln.base.errors import Break
from kiln.ops import rules  # noqa: F401
from kiln.ops.aliases import base_of
from kiln.ops.fake import FakeMode, fake_like
from kiln.ops.meta import DATA

pytestmark = pytest.mark.filterwarnings("ignore")
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
aten = torch.ops.aten
OPS = {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in invocations.op_db}
ALL = os.environ.get("KILN_ALL_SAMPLES") == "1"
SAMPLES = None if ALL else 3
ERRORS = None if ALL else 3
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool) if ALL else (torch.float32,)

#: Overloads whose fakes are described otherwise than eager's results, and why that is all right.
DIFFERENT: dict[str, str] = {
    "aten.col2im.default": "the meta kernel gives an empty batch the strides of the padded image",
    **dict.fromkeys(["aten.ldexp_.default", "aten.logit_.default"], "into booleans: the graph raises when it runs"),
    **dict.fromkeys(["aten._foreach_sub.Scalar", "aten._foreach_sub_.Scalar"], "of a boolean: the graph raises when it runs"),
}

#: Overloads that fakes refuse though their shapes do not depend on data.
REFUSED: dict[str, str] = {
    **dict.fromkeys(["aten.resize_.default", "aten.resize_as_.default"], "the memory of an argument is exchanged"),
    **dict.fromkeys(["aten._to_sparse.default", "aten._to_sparse.sparse_dim"], "the result is sparse"),
    **dict.fromkeys(["aten.addbmm_.default", "aten.addr_.default"], "eager resizes a tensor that is too small"),
}

#: Ops some of whose errors are raised by the graph when it runs, not when the fakes are made.
LATE: dict[str, str] = {
    **dict.fromkeys(["gather", "masked_fill", "scatter", "scatter_add", "multinomial"], "the kernel looks at values"),
    **dict.fromkeys(["aminmax", "complex"], "the kernel looks at the dtype of `out`"),
    "take": "the kernel looks for an overlap of `out` and the input",
    **dict.fromkeys(["amax", "amin"], "the kernel takes at most 64 dimensions"),
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def mapped(value: Any, leaf: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(v, leaf) for v in value])
    return {k: mapped(v, leaf) for k, v in value.items()} if isinstance(value, dict) else value


def described(value: Any, given: list[torch.Tensor]) -> Any:
    """All that can be asked of the results of a call without their data."""
    if isinstance(value, torch.Tensor):
        same = [i for i, t in enumerate(given) if t is value]
        layout = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
        return (*layout, value.is_conj(), value.is_neg(), same)
    if isinstance(value, (tuple, list)):
        return [described(v, given) for v in value]
    return type(value)


def owners(func: Any, args: Any, kwargs: Any, out: Any) -> list[Any]:
    """For each result, the arguments whose memory it shares."""
    given = [t for t in tensors((args, kwargs)) if plain(t) and t.untyped_storage().nbytes()]
    found = []
    for place, item in enumerate(out if isinstance(out, tuple) else (out,)):
        for t in tensors(item):
            if plain(t) and t.untyped_storage().nbytes():
                found.append((place, t, {id(g) for g in given if same_memory(g, t)}))
    return found


def plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class Again(TorchDispatchMode):
    """Runs each call on fakes of its arguments, and notes where the fakes say other things than the real op."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.calls: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        if func.namespace != "aten" or not all(map(plain, given)) or DATA[func]:
            return func(*args, **kwargs)
        memo: dict[int, torch.Tensor] = {}

        def twin(t: torch.Tensor) -> torch.Tensor:
            return memo.setdefault(id(t), fake_like(t))

        fake_args, fake_kwargs = mapped(args, twin), mapped(kwargs, twin)
        fakes = list(tensors((fake_args, fake_kwargs)))
        text = f"{[(tuple(t.shape), t.stride(), t.dtype) for t in given]} {[a for a in args if not list(tensors(a))]} {kwargs}"
        try:
            with torch.no_grad(), FakeMode():
                found: Any = described(func(*fake_args, **fake_kwargs), fakes)
        except Break as refusal:
            self.refused[str(func)] = f"{refusal}"
            return func(*args, **kwargs)
        except Exception as error:
            found = type(error)
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            self.note(func, found, type(error), text)
            raise
        if all(map(plain, tensors(out))):
            self.note(func, found, described(out, given), text)
            self.check_owners(func, args, kwargs, out)
        return out

    def note(self, func: Any, found: Any, expected: Any, text: str) -> None:
        self.calls.add(func)
        if found != expected:
            self.wrong[str(func)] = f"{func} {text}\n  fake {found}\n  real {expected}"

    def check_owners(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for place, t, shared in owners(func, args, kwargs, out):
            base = base_of(func, args, kwargs, place)
            if isinstance(base, (list, tuple)):
                continue
            if (base is None) != (not shared) or (base is not None and id(base) not in shared):
                self.wrong[f"{func}"] = f"{func}: shares memory {bool(shared)}, said {base is not None}"


def dtypes_of(op: Any) -> list[torch.dtype]:
    found = [d for d in DTYPES if op.supports_dtype(d, "cpu")]
    return found or sorted(op.dtypes, key=str)[:1]


def samples_of(op: Any, dtype: torch.dtype) -> list[Any]:
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    return list(islice(op.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES))


def run(function: Any, sample: Any) -> None:
    """The op and, where something needs a gradient, its backward pass."""
    try:
        out = function(sample.input, *sample.args, **sample.kwargs)
        roots = [t for t in tensors(out) if t.requires_grad and plain(t)]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    except Exception:
        # What a sample raises, it raises in eager: that the fakes raise it too is noted call by call.
        pass


def replay(name: str) -> Again:
    op = OPS[name]
    again = Again()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes_of(op):
            for sample in samples_of(op, dtype):
                with again:
                    run(op.op, sample)
                    if op.inplace_variant:
                        run(in_place(op), sample)
    return again


def in_place(op: Any) -> Any:
    """The form of an op that writes into its first argument, on a copy of it."""
    return lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)


def outcome(function: Any, sample: Any) -> Any:
    try:
        function(sample.input, *sample.args, **sample.kwargs)
    except Break as refusal:
        return refusal.kind
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.error_inputs_func])
def test_errors_are_those_of_eager(name: str) -> None:
    op = OPS[name]
    for number, error in enumerate(islice(op.error_inputs("cpu"), ERRORS)):
        sample = error.sample_input
        if not all(map(plain, tensors((sample.input, sample.args, sample.kwargs)))):
            continue
        memo: dict[int, torch.Tensor] = {}
        given = {"input": sample.input, "args": sample.args, "kwargs": sample.kwargs}
        fakes = mapped(given, lambda t, memo=memo: memo.setdefault(id(t), fake_like(t)))
        with FakeMode():
            found = outcome(op.op, SimpleNamespace(**fakes))
        expected = outcome(op.op, sample)
        # A break leaves the call to Python, which raises what eager raises.
        late = found is None and name in LATE
        assert found == expected or type(found) is str or late, f"sample {number}: fake {found}, real {expected}"


def agrees(again: Again) -> None:
    """Fail where fakes and real ops differed, but for what is listed."""
    wrong = {func: text for func, text in again.wrong.items() if func not in DIFFERENT}
    refused = {func: text for func, text in again.refused.items() if func not in REFUSED}
    assert not wrong, "\n".join(wrong.values())
    assert not refused, refused


LISTS = {
    op.name: op
    for name in ("unary", "binary", "pointwise", "reduce", "other")
    for op in getattr(invocations, f"foreach_{name}_op_db")
}


@pytest.mark.parametrize("name", LISTS)
def test_fakes_agree_with_ops_over_lists(name: str) -> None:
    op, again = LISTS[name], Again()
    for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), SAMPLES):
        for function in (op.method_variant, op.inplace_variant):
            if function is not None:
                copies = mapped(sample.input, lambda t: t.detach().clone())
                given = sample.input if function is op.method_variant else copies
                with again:
                    run(function, SimpleNamespace(input=given, args=sample.args, kwargs=sample.kwargs))
    agrees(again)


@pytest.mark.parametrize("name", OPS)
def test_fakes_agree_with_the_real_op(name: str) -> None:
    agrees(replay(name))
