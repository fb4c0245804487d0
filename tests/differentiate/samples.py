"""Calls of torch's sample inputs, eager and compiled: what they leave behind, and how the two are compared."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest
import torch

import kiln
from kiln.base import records

#: Where samples are, and of what dtype: KILN_DEVICE=cuda and KILN_DTYPE=bfloat16 run the lists on a GPU.
DEVICE = os.environ.get("KILN_DEVICE", "cpu")
DTYPE: torch.dtype = getattr(torch, os.environ.get("KILN_DTYPE", "float32"))
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
OPS = {
    op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
    for op in invocations.op_db
    if op.supports_dtype(DTYPE, DEVICE)
}
ALL = os.environ.get("KILN_ALL_SAMPLES") == "1"

#: Ops of which only the first so many results are compared.
SEEDED: dict[str, int] = {}

#: Ops whose results hold no defined values: only their layouts are compared.
UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

#: Ops that end the graph, with the kind of the break; results and gradients are compared all the same.
BREAKS: dict[str, set[str]] = {
    # the result is a Python value, or its shape depends on values
    **dict.fromkeys(
        ["allclose", "equal", "linalg.lstsq", "linalg.lstsq.grad_oriented", "unique", "unique_consecutive"],
        {"data-dependent"}),
    # the implementation looks at values: how long each target is, where to cut
    **dict.fromkeys(["narrow", "nn.functional.ctc_loss", "tensor_split"], {"data-dependent"}),
    # the memory of an argument is exchanged
    **dict.fromkeys(["resize_", "resize_as_"], {"metadata-mutation"}),
    # an argument or the result is sparse: the whole frame is left to Python
    **dict.fromkeys(["sparse.mm.reduce", "sparse.sampled_addmm"], {"tensor-layout"}),
    "to_sparse": {"sparse", "tensor-layout"},
    # an object of a class that the recorder does not know is an argument
    **dict.fromkeys(["nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"],
                    {"foreign-object"}),
}  # fmt: skip

if DEVICE == "cuda":
    jiterated = ["jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args",
                 "jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs"]  # fmt: skip
    BREAKS |= {
        **dict.fromkeys(jiterated, {"native-call"}),  # a kernel that is compiled from a text
        "combinations": {"data-dependent"},  # the mask of the indices is asked for its values
        "corrcoef": {"data-dependent"},
        "nn.functional.ctc_loss": {"data-dependent", "no-meta-kernel"},  # cuDNN's
    }
    # After two results come seed and offset of the generator: memory that nothing fills where nothing is dropped.
    SEEDED |= {"torch.ops.aten._efficient_attention_forward": 2, "torch.ops.aten._flash_attention_forward": 2}

#: Ops without tensors in and out: nothing is captured.
NO_GRAPH = {"broadcast_shapes"}

#: Ops that end the graph on some samples only.
SOMETIMES = {
    "__getitem__": {"data-dependent"},  # by a mask
    "cov": {"data-dependent"},  # whether weights are negative is asked of their values
    **dict.fromkeys(["masked_select", "nonzero"], {"data-dependent"}),  # of a number
    "repeat_interleave": {"data-dependent"},  # repeats given as a tensor
}

#: Ops whose graph is not differentiated ahead of time on some sample but runs as captured, and why.
FALLBACKS: dict[str, str] = {
    "index_fill": "the gradient of the value counts the distinct indices",
    "index_put": "the gradient of values put by a mask has as many as the mask holds",
}

if ALL:  # on a sample that others come before
    FALLBACKS["repeat_interleave"] = "how many elements there are follows from how often each is repeated"
if DEVICE == "cuda":
    SOMETIMES["nn.functional.gaussian_nll_loss"] = {"branch-on-tensor"}  # graphs check values on CPUs alone
    margins = ("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss")
    FALLBACKS |= dict.fromkeys(margins, "the gradient has no kernel for tensors without data")


@dataclass
class Outcome:
    """What one call left behind."""

    value: Any = None
    error: type | None = None
    gradients: list[Any] = field(default_factory=list)
    inputs: Any = None
    random: bool = False

#: Ops whose gradients have other strides than eager's, and why.
RESTRIDED: dict[str, str] = {"ormqr": "the formula of the gradient runs out of place on fakes"}

#: Ops that do not hold, and why.
EXCEPTIONS: dict[str, str] = {
    "linalg.eig": "eager looks at the values of the gradient, and raises when it depends on the phase of the eigenvectors",
}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def copied(value: Any, memo: dict[int, torch.Tensor]) -> Any:
    """The nest of arguments with equal tensors of the same layout; what is one tensor stays one."""
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            if value.layout is not torch.strided:
                memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            else:
                flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.detach().untyped_storage().clone())
                new = flat.as_strided(value.shape, value.stride(), value.storage_offset())
                memo[id(value)] = new.detach().requires_grad_(value.requires_grad)
        return memo[id(value)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([copied(v, memo) for v in value])
    return {k: copied(v, memo) for k, v in value.items()} if isinstance(value, dict) else value


def rng_state() -> torch.Tensor:
    """The state of the generator that ops on the samples draw from."""
    return torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()


def cotangent(t: torch.Tensor) -> torch.Tensor:
    """A fixed gradient of the layout of `t`."""
    values = torch.linspace(0.5, 1.5, max(t.numel(), 1))[: t.numel()].reshape(t.shape)
    return torch.empty_like(t, requires_grad=False).copy_(values)


def outcome(function: Any, sample: Any) -> Outcome:
    """The result of a call on copies of the sample, and the gradients of what needs them."""
    memo: dict[int, torch.Tensor] = {}
    args, kwargs = copied([sample.input, *sample.args], memo), copied(sample.kwargs, memo)
    found = Outcome()
    torch.manual_seed(5)
    seeded = rng_state()
    try:
        found.value = function(*args, **kwargs)
    except Exception as error:
        found.error = type(error)
        return found
    found.random = not torch.equal(seeded, rng_state())
    leaves = [t for t in memo.values() if t.requires_grad and t.is_leaf]
    roots = [t for t in tensors(found.value) if t.requires_grad and t.layout is torch.strided]
    if roots and leaves:
        try:
            found.gradients = list(torch.autograd.grad(roots, leaves, [cotangent(t) for t in roots], allow_unused=True))
        except Exception as error:
            found.gradients = [type(error)]
    found.inputs = [t.detach() for t in memo.values()]
    return found


def steps(t: torch.Tensor) -> list[int]:
    """The strides that lead from an element to another; sparse tensors have none."""
    if t.layout is not torch.strided:
        return []
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


def compare(expected: Any, got: Any, what: str, values: bool = True, strides: bool = True) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: {type(got)}"
        layout = [(tuple(t.shape), t.dtype, t.device, t.layout, t.requires_grad) for t in (expected, got)]
        assert layout[0] == layout[1], f"{what}: {layout[1]}, eager {layout[0]}"
        if expected.layout is torch.strided and strides:
            assert steps(expected) == steps(got), f"{what}: strides {got.stride()}, eager {expected.stride()}"
        if values:
            torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")
    elif isinstance(expected, (list, tuple)):
        assert type(expected) is type(got) and len(expected) == len(got), f"{what}: {got}"
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            compare(a, b, f"{what}[{i}]", values, strides)
    else:
        assert type(expected) is type(got) and (expected == got or expected != expected), f"{what}: {got}, eager {expected}"


@contextmanager
def unseeded() -> Iterator[None]:
    """Without the seeding that torch wraps around random ops: the tests seed, and the op alone is compiled."""
    kept = invocations.wrapper_set_seed
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    try:
        yield
    finally:
        invocations.wrapper_set_seed = kept


@dataclass
class Found:
    """What compiling the samples of an op brought to light."""

    breaks: set[str] = field(default_factory=set)
    fallbacks: list[Any] = field(default_factory=list)
    restrided: bool = False


Agree = Callable[[str, Any, Outcome, Outcome], None]
"""Fails where the outcome of a compiled call is not eager's: gets a place, the sample, eager's outcome and the other."""


def compared(name: str, found: Outcome) -> Outcome:
    """The part of what an op left behind that is the same twice."""
    if name not in SEEDED or found.value is None:
        return found
    return replace(found, value=found.value[: SEEDED[name]])


def check_op(name: str, compiled: Callable[[Any, Outcome], Any], agree: Agree, count: int | None) -> Found:
    """Call an op on its first samples, eagerly and compiled; an AssertionError where anything differs."""
    op, found = OPS[name], Found()
    with warnings.catch_warnings(), unseeded():
        warnings.simplefilter("ignore")
        backward = DTYPE in op.supported_backward_dtypes(torch.device(DEVICE).type)
        samples = op.sample_inputs(DEVICE, DTYPE, requires_grad=op.supports_autograd and backward)
        for number, sample in enumerate(islice(samples, count)):
            where = f"sample {number}"
            expected = outcome(op.op, sample)
            kiln.reset()
            with records.collect() as log:
                got = outcome(compiled(lambda *args, **kwargs: op.op(*args, **kwargs), expected), sample)
            assert not log.fallbacks or name in FALLBACKS, f"{where} fell back: {log.fallbacks}"
            assert expected.error == got.error, f"{where} raised {got.error}, eager {expected.error}"
            assert log.graphs or log.breaks or expected.error or name in NO_GRAPH, f"{where}: no graph"
            agree(where, sample, compared(name, expected), compared(name, got))
            found.breaks |= {b.kind for b in log.breaks}
            found.fallbacks += log.fallbacks
            pairs = zip(tensors(expected.gradients), tensors(got.gradients), strict=True)
            found.restrided = found.restrided or any(steps(a) != steps(b) for a, b in pairs)
    return found
