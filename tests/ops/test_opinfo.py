"""Fake tensors against the real ops on torch's own samples: one sample of each op that torch tests, and its in-place form.

Everything that a program can ask of a result without its data is compared: shape, strides, offset, dtype, device,
whether it needs a gradient, its grad_fn, whether it is a view or one of the arguments. What differs is listed below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kiln.base.errors import Break
from kiln.ops import rules  # noqa: F401
from kiln.ops.fake import FakeMode, fake_like

pytestmark = pytest.mark.filterwarnings("ignore")
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
OPS = {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in invocations.op_db}

#: Ops that are refused, with the kind of the break.
REFUSED = {
    # the result is a Python value, or its shape depends on values
    **dict.fromkeys(
        ["allclose", "argwhere", "bincount", "equal", "item", "linalg.lstsq", "linalg.lstsq.grad_oriented",
         "masked_select", "nn.functional.ctc_loss", "nn.functional.one_hot", "nonzero", "unique", "unique_consecutive"], "data-dependent"),
    # the implementation asks whether all values are positive, or all weights the same
    **dict.fromkeys(["nn.functional.gaussian_nll_loss"], "data-dependent"),
    # the memory of an argument is exchanged
    **dict.fromkeys(["resize_", "resize_as_"], "metadata-mutation"),
    **dict.fromkeys(["to_sparse", "sparse.mm.reduce", "sparse.sampled_addmm"], "sparse"),
}  # fmt: skip

#: Ops whose result is described otherwise than eager's.
DIFFERENT = {
    "linalg.tensorinv": "eager reshapes plain tensors by an alias of its own, subclasses by a view: the grad_fn differs",
    "tensor_split": "the C++ code reads the memory of the indices; the recorder turns that error into a break",
}


def described(value: Any, given: list[torch.Tensor]) -> Any:
    """All that can be asked of a result without its data."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.layout
        same = [i for i, t in enumerate(given) if t is value]
        history = value.requires_grad, value.is_leaf, type(value.grad_fn).__name__, value._is_view()
        bits = value.is_conj(), value.is_neg()
        return (
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.device,
            history,
            bits,
            same,
        )
    if isinstance(value, (tuple, list)):
        return [described(v, given) for v in value]
    return value if isinstance(value, (int, str, torch.dtype)) else type(value)


class Fakes:
    """Fakes of the tensors in a nest of arguments, one for each."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.real: list[torch.Tensor] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.made:
                self.real.append(value)
                self.made[id(value)] = fake_like(value)
            return self.made[id(value)]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)([self(v) for v in value])
        return {k: self(v) for k, v in value.items()} if isinstance(value, dict) else value

    @property
    def all(self) -> list[torch.Tensor]:
        return list(self.made.values())


def outcome(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
    try:
        result = function(*args, **kwargs)
    except Break:
        raise
    except Exception as error:
        return type(error)
    return described(result, given), [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in given]


def sample_of(op: Any) -> Any:
    if not op.dtypes:
        return None
    dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else sorted(op.dtypes, key=str)[0]
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
    return next(iter(samples), None)


def compare(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fakes = Fakes()
    fake_args, fake_kwargs = fakes(args), fakes(kwargs)
    with FakeMode():
        found = outcome(function, fake_args, fake_kwargs, fakes.all)
    assert found == outcome(function, args, kwargs, fakes.real)


@pytest.mark.parametrize("name", [n for n in OPS if n not in REFUSED and n not in DIFFERENT])
def test_result(name: str) -> None:
    op = OPS[name]
    sample = sample_of(op)
    if sample is None:
        pytest.skip("torch has no sample")
    compare(op.op, (sample.input, *sample.args), sample.kwargs)


@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if op.inplace_variant and n not in REFUSED and n not in DIFFERENT]
)
def test_in_place(name: str) -> None:
    op = OPS[name]
    sample = sample_of(op)
    if sample is None:
        pytest.skip("torch has no sample")
    with torch.no_grad():
        compare(op.inplace_variant, (sample.input.clone(), *sample.args), sample.kwargs)


@pytest.mark.parametrize("name", DIFFERENT)
def test_listed_difference_still_exists(name: str) -> None:
    op = OPS[name]
    sample = sample_of(op)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(op.op, (sample.input, *sample.args), sample.kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    op = OPS[name]
    sample = sample_of(op)
    fakes = Fakes()
    with pytest.raises(Break) as caught, FakeMode():
        op.op(*fakes((sample.input, *sample.args)), **fakes(sample.kwargs))
    assert caught.value.kind == REFUSED[name]
