"""Every module of torch.nn that torch has samples for, compiled with `aot_eager`: values, states and gradients are eager's."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

import kiln
from kiln.base import records
from tests.differentiate.samples import DEVICE, DTYPE, compare, copied, cotangent, rng_state, tensors

pytestmark = pytest.mark.filterwarnings("ignore")
common_modules = pytest.importorskip("torch.testing._internal.common_modules")
MODULES = {info.name: info for info in common_modules.module_db if DTYPE in info.dtypes}
ALL = os.environ.get("KILN_ALL_SAMPLES") == "1"
SEEDED = torch.Generator(DEVICE).manual_seed(5).get_state()
SAMPLES = None if ALL else 3

#: Modules that end the graph, with the kinds of the breaks.
BREAKS: dict[str, set[str]] = {
    # without a momentum, the factor is a Python number made of the count of batches
    **dict.fromkeys(["nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d"], {"data-dependent"}),
    # the implementation looks at values: how long each target is
    "nn.CTCLoss": {"data-dependent"},
    # the first call of a lazy module makes its parameters: it is left to Python
    **dict.fromkeys([f"nn.LazyConv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)], {"tensor-subclass"}),
}

#: Modules that end the graph on some samples only.
SOMETIMES = {
    # whether the mask is causal is asked of its values
    **dict.fromkeys(["nn.Transformer", "nn.TransformerEncoder"], {"branch-on-tensor"}),
    # an object of a class that the recorder does not know is an argument
    "nn.LinearCrossEntropyLoss": {"foreign-object"},
}

if DEVICE == "cuda":
    SOMETIMES |= {
        **dict.fromkeys(["nn.RNN", "nn.GRU", "nn.LSTM"], {"metadata-mutation"}),  # cuDNN has weights side by side
        **dict.fromkeys(["nn.GRUCell", "nn.CTCLoss"], {"no-meta-kernel"}),
        "nn.GaussianNLLLoss": {"branch-on-tensor"},  # graphs check values on CPUs alone
    }

#: Modules that eager differentiates in training mode alone, on GPUs.
MODES = dict.fromkeys(("nn.RNN", "nn.GRU", "nn.LSTM") if DEVICE == "cuda" else (), (True,))


def step(run: Any, module: nn.Module, args: list[Any], kwargs: dict[str, Any], leaves: list[torch.Tensor]) -> Any:
    """The result, the gradients of parameters and inputs, and the state after one call, or the error."""
    torch.manual_seed(5)
    try:
        out = run(*args, **kwargs)
    except Exception as error:
        return type(error)
    leaves = [*leaves, *[p for p in module.parameters() if p.requires_grad]]
    roots = [t for t in tensors(out) if t.requires_grad]
    gradients: Any = []
    if roots and leaves:
        gradients = torch.autograd.grad(roots, leaves, [cotangent(t) for t in roots], allow_unused=True)
    return list(tensors(out)), list(gradients), [t.detach() for t in module.state_dict().values()]


Agree = Callable[[str, Callable[[Callable[[Any], Any]], Any], Any, Any], None]
"""Fails where the second result is not the first: gets a place and a function that runs eager after a change."""


def check(name: str, training: bool, compiled: Callable[[nn.Module, bool], Any], agree: Agree, count: int | None) -> set[str]:
    """The kinds of the breaks on the samples of a module; an AssertionError where anything differs from eager."""
    info = MODULES[name]
    kinds: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = info.module_inputs_func(info, device=DEVICE, dtype=DTYPE, requires_grad=True, training=training)
        for number, sample in enumerate(islice(samples, count)):
            if sample.forward_input is None:
                continue
            torch.manual_seed(3)
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            module.to(DEVICE, DTYPE).train(training)

            def run(change: Callable[[Any], Any], form: Callable[[nn.Module], Any], made: nn.Module = module, given: Any = sample.forward_input) -> Any:
                mine, memo = change(copy.deepcopy(made)), {}
                args, kwargs = copied(change(list(given.args)), memo), copied(change(given.kwargs), memo)
                return step(form(mine), mine, args, kwargs, [t for t in memo.values() if t.requires_grad])

            expected = run(lambda value: value, lambda m: m)
            random = not torch.equal(rng_state(), SEEDED)
            kiln.reset()
            with records.collect() as log:
                got = run(lambda value: value, lambda m, drawn=random: compiled(m, drawn))
            assert not log.fallbacks, f"sample {number} fell back: {log.fallbacks}"
            agree(f"sample {number}", lambda change, again=run: again(change, lambda m: m), expected, got)
            assert log.graphs or log.breaks or isinstance(expected, type), f"sample {number}: no graph"
            kinds |= {b.kind for b in log.breaks}
    return kinds


def same(where: str, again: Any, expected: Any, got: Any) -> None:
    compare(expected, got, where)


@pytest.mark.parametrize("name", MODULES)
def test_aot_eager_is_eager(name: str) -> None:
    kinds: set[str] = set()
    for training in MODES.get(name, (True, False)):
        kinds |= check(name, training, lambda m, random: kiln.compile(m, backend="aot_eager"), same, SAMPLES)
    assert kinds <= BREAKS.get(name, set()) | SOMETIMES.get(name, set()), f"breaks: {kinds}"
    assert kinds or name not in BREAKS, "a listed break does not happen any more"
