"""Expansions that no sample of torch's reaches, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import rand, randint, randn, tensor

from kiln.base import options
from kiln.ops.levels import level_of, name_of
from kiln.ops.table import EXPANSIONS, aten
from tests.expand.sweep import Program, expanded, same
from tests.expand.test_opinfo import REACHED

D = torch.float64


def pair() -> list[torch.Tensor]:
    return [rand(3, 4, dtype=D) + 0.1, rand(5, dtype=D) + 0.1]


def other() -> list[torch.Tensor]:
    return [rand(3, 4, dtype=D) + 0.2, rand(5, dtype=D) + 0.2]


def images(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=D)


def adam(rate: Any, **more: Any) -> tuple[Any, ...]:
    lists = pair(), other(), pair(), pair(), pair() if more["amsgrad"] else [], [tensor(3.0), tensor(4.0)]
    return *lists, {"lr": rate, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **more}


def sgd(rate: Any, first: bool, nesterov: bool, **more: Any) -> tuple[Any, ...]:
    return pair(), other(), pair(), {
        "lr": rate, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0 if nesterov else 0.2,
        "nesterov": nesterov, "maximize": False, "is_first_step": first, **more,
    }  # fmt: skip


RATE = tensor(0.1, dtype=D)
PLAIN = {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
FULL = {"weight_decay": 0.1, "amsgrad": True, "maximize": True}
#: What a scaler of losses gives: its scale, and whether a gradient was infinite.
SCALED = [{"grad_scale": tensor(4.0), "found_inf": tensor([found])} for found in (0.0, 1.0)] + [{"found_inf": tensor(1.0)}, {"grad_scale": tensor(3.0)}]

#: An overload, positional arguments and, last, a dict of those by name.
CALLS: list[tuple[Any, Any]] = [
    (aten._is_all_true.default, lambda: (tensor([[True, False], [True, True]]),)),
    (aten._is_any_true.default, lambda: (tensor([[False, False], [False, True]]),)),
    (aten.fill.Tensor, lambda: (images(3, 4).t(), tensor(2.0, dtype=D))),
    (aten.copy.default, lambda: (images(4, 3).t(), randn(4))),
    (aten.copy.default, lambda: (images(3, 4).t(), images(4, 3))),
    (aten._unsafe_index.Tensor, lambda: (images(3, 4), [None, tensor([1, 3, 1])])),
    (aten._unsafe_index_put.default, lambda: (images(3, 4), [None, tensor([1, 3, 1])], images(3, 3), True)),
    (aten.index_put.default, lambda: (images(3, 4), [tensor([True, False, True])], tensor(2.0, dtype=D))),
    (aten._native_batch_norm_legit_functional.default,
     lambda: (images(3, 4, 5), rand(4, dtype=D), rand(4, dtype=D), rand(4, dtype=D), rand(4, dtype=D), True, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_functional.default,
     lambda: (images(3, 4, 5), None, None, rand(4, dtype=D), rand(4, dtype=D), False, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_no_training.default,
     lambda: (images(3, 4, 5), rand(4, dtype=D), None, rand(4, dtype=D), rand(4, dtype=D), 0.1, 1e-5)),
    (aten.native_batch_norm.default,
     lambda: (images(3, 4, 5, 2).to(memory_format=torch.channels_last), rand(4, dtype=D), rand(4, dtype=D), None, None, True, 0.1, 1e-5)),
    (aten._native_batch_norm_legit.no_stats, lambda: (images(3, 4, 5), rand(4, dtype=D), None, True, 0.1, 1e-5)),
    (aten.upsample_nearest2d.default, lambda: (images(1, 2, 3, 4), [5, 7], None, None)),
    (aten.upsample_nearest3d.default, lambda: (images(1, 2, 3, 4, 2), [6, 2, 3], 2.0, None, None)),
    (aten._upsample_nearest_exact2d.default, lambda: (images(1, 2, 3, 4), [5, 7], None, None)),
    (aten._upsample_nearest_exact3d.default, lambda: (images(1, 2, 3, 4, 2), [6, 2, 3], 2.0, None, None)),
    (aten.reflection_pad2d.default, lambda: (images(2, 3, 4), [1, 2, 2, 0])),
    (aten.reflection_pad3d.default, lambda: (images(2, 3, 4, 3), [1, 2, 2, 0, 1, 1])),
    (aten.replication_pad3d.default, lambda: (images(2, 3, 4, 3), [1, 2, 5, 0, 1, 1])),
    (aten.nll_loss2d_forward.default, lambda: (images(2, 3, 4, 5), randint(0, 3, (2, 4, 5)), rand(3, dtype=D), 1, 2)),
    (aten.nll_loss2d_backward.default, lambda: (
        images(2, 4, 5), images(2, 3, 4, 5), randint(0, 3, (2, 4, 5)), rand(3, dtype=D), 0, 2, tensor(3.0, dtype=D))),
    (aten.all.dims, lambda: (randint(0, 2, (3, 4)), [0, 1], True)),
    (aten.any.dims, lambda: (randint(0, 2, (3, 4)), [1], False)),
    (aten.count_nonzero.dim_IntList, lambda: (randint(0, 2, (3, 4)), [0])),
    (aten.lerp.Tensor, lambda: (images(3, 4), images(3, 4), rand(3, 4, dtype=D))),
    (aten.bitwise_and.Scalar, lambda: (randint(0, 99, (5,)), 12)),
    (aten.bitwise_or.Scalar, lambda: (randint(0, 99, (5,)), 12)),
    (aten.bitwise_xor.Scalar, lambda: (randint(0, 99, (5,)), 12)),
    (aten.bitwise_and.Tensor, lambda: (randint(0, 99, (5,)), randint(0, 99, (5,), dtype=torch.int32))),
    (aten.bitwise_or.Tensor, lambda: (randint(0, 99, (5,)), randint(0, 99, (5,), dtype=torch.int32))),
    (aten.bitwise_xor.Tensor, lambda: (randint(0, 99, (5,)), randint(0, 99, (5,), dtype=torch.int32))),
    (aten.bitwise_left_shift.Tensor, lambda: (randint(0, 99, (5,)), randint(0, 5, (5,), dtype=torch.int32))),
    (aten.bitwise_left_shift.Tensor_Scalar, lambda: (randint(0, 99, (5,)), 2)),
    (aten.bitwise_right_shift.Tensor, lambda: (randint(-99, 99, (5,)), randint(0, 5, (5,), dtype=torch.int32))),
    (aten.bitwise_right_shift.Tensor_Scalar, lambda: (randint(-99, 99, (5,)), 2)),
    *[(getattr(aten, name).Scalar_Tensor, lambda: (12, randint(1, 9, (5,), dtype=torch.int32)))
      for name in "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift remainder".split()],
    (aten.remainder.Scalar_Tensor, lambda: (2.5, randint(1, 9, (5,)))),
    (aten._neg_view.default, lambda: (images(3, 4),)),
    (aten.fmod.Scalar, lambda: (randint(-9, 9, (5,)), 2.5)),
    (aten.div.Scalar_mode, lambda: (images(5), 2, {"rounding_mode": "floor"})),
    (aten.floor_divide.Scalar, lambda: (images(5), 2)),
    (aten.clamp.default, lambda: (randint(-9, 9, (5,)), -1.5, 3)),
    (aten.clamp_max.default, lambda: (images(5), 0.5)),
    (aten._addmm_activation.default, lambda: (images(4), images(3, 5), images(5, 4), {"use_gelu": False})),
    (aten.norm.Scalar, lambda: (images(3, 4), 3)),
    (aten._reshape_alias.default, lambda: (images(3, 4), [2, 6], [6, 1])),
    (aten.unsafe_split_with_sizes.default, lambda: (images(3, 4), [1, 3], 1)),
    (aten._to_copy.default, lambda: (images(3, 4), {"dtype": torch.float32, "device": torch.device("cpu")})),
    (aten.cat.default, lambda: ([images(3, 4), randint(0, 9, (2, 4))],)),
    (aten.prod.dim_int, lambda: (randint(1, 3, (3, 4), dtype=torch.int32), 1)),
    (aten.sum.dim_IntList, lambda: (images(3, 4).to(torch.bfloat16), [1], True, {"dtype": torch.float32})),
    (aten._adaptive_avg_pool2d.default, lambda: (images(2, 3, 4, 6).to(memory_format=torch.channels_last), [2, 3])),
    (aten._adaptive_avg_pool2d.default, lambda: (images(2, 3, 4, 6), [1, 1])),
    (aten._adaptive_avg_pool2d_backward.default, lambda: (images(2, 3, 2, 3), images(2, 3, 4, 6))),
    (aten._adaptive_avg_pool2d_backward.default,
     lambda: (images(2, 3, 1, 1), images(2, 3, 4, 6).to(memory_format=torch.channels_last))),
    (aten._adaptive_avg_pool3d.default, lambda: (images(3, 4, 6, 2), [2, 3, 1])),
    (aten._adaptive_avg_pool3d_backward.default, lambda: (images(3, 2, 3, 1), images(3, 4, 6, 2))),
    (aten.native_dropout_backward.default, lambda: (images(3, 4), images(3, 4) > 0, 2.0)),
    *[(getattr(getattr(aten, name), "default" if rate is not RATE else "tensor_lr"), lambda r=rate, m=more: adam(r, **m))
      for name in ("_fused_adam", "_fused_adamw") for rate in (0.1, RATE) for more in (PLAIN, FULL)],
    *[(aten._fused_sgd.default if rate is not RATE else aten._fused_sgd.tensor_lr, lambda r=rate, f=first, n=nesterov: sgd(r, f, n))
      for rate in (0.1, RATE) for first in (True, False) for nesterov in (True, False)],
    *[(getattr(aten, name).default, lambda m=more, s=scaled: adam(0.1, **m, **s))
      for name in ("_fused_adam", "_fused_adamw") for more in (PLAIN, FULL) for scaled in SCALED],
    *[(aten._fused_sgd.default, lambda f=first, s=scaled: sgd(0.1, f, True, **s)) for first in (True, False) for scaled in SCALED],
    (aten._foreach_norm.Scalar, lambda: (pair(), 2)),
    (aten._foreach_pow.ScalarAndTensor, lambda: (2.0, pair())),
    (aten._foreach_add.Tensor, lambda: (pair(), tensor(2.0, dtype=D), {"alpha": 0.5})),
    (aten._foreach_mul.Tensor, lambda: (pair(), tensor(2.0, dtype=D))),
    (aten._foreach_div.Tensor, lambda: (pair(), tensor(2.0, dtype=D))),
    (aten._foreach_lerp.List, lambda: (pair(), other(), pair())),
    (aten._foreach_lerp.Scalar, lambda: (pair(), other(), 0.7)),
    (aten._foreach_lerp.ScalarList, lambda: (pair(), other(), [0.2, 0.7])),
    *[(getattr(packet, overload), lambda v=value: (pair(), other(), pair(), v))
      for packet in (aten._foreach_addcmul, aten._foreach_addcdiv) for overload, value in (("Scalar", 0.5), ("ScalarList", [0.5, 2.0]), ("Tensor", tensor([0.5, 2.0], dtype=D)))],
    *[(op, lambda: (pair(),)) for op in EXPANSIONS if name_of(op).startswith("_foreach_") and str(op).endswith(".default")],
    *[(op, lambda o=value: (pair(), o)) for name in "add sub mul div maximum minimum clamp_min clamp_max pow".split()
      for overload, value in (("Scalar", 2.5), ("ScalarList", [2.5, 0.5]), ("List", other()))
      for op in [getattr(getattr(aten, f"_foreach_{name}"), overload)]],
]  # fmt: skip

#: Expansions that are compared elsewhere, or nowhere.
ELSEWHERE = {
    "aten.empty_like.default": "no values", "aten.new_empty.default": "no values",
    "aten.new_empty_strided.default": "no values",
    "aten.rand_like.default": "random", "aten.bernoulli.p": "random", "aten.uniform.default": "random",
    "aten.normal_functional.default": "random", "aten.native_dropout.default": "random",
    "aten._batch_norm_with_update_functional.default": "of GPUs, in tests/gpu",
    "aten.cudnn_batch_norm_backward.default": "of GPUs, in tests/gpu",
    "aten._amp_foreach_non_finite_check_and_unscale.default": "of lists, in tests/capture/test_backward.py",
    "aten.lift.default": "recorded as the literal that it lifts",
    "aten.lift_fresh.default": "recorded as the literal that it lifts",
}  # fmt: skip


@pytest.fixture(autouse=True)
def strict() -> Any:
    with options.config.patch(strict=True):
        yield


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda i: str(CALLS[i][0]).removeprefix("aten."))
def test_call(number: int) -> None:
    op, arguments = CALLS[number]
    torch.manual_seed(0)
    *args, last = arguments()
    args, kwargs = (args, last) if isinstance(last, dict) else ([*args, last], {})
    program = Program(op, tuple(args), kwargs)
    wanted = program.eager()
    graph = program.graph()
    for level in ("core", "prims"):
        result = expanded(graph, level)
        same(program.run(result), wanted)
    assert level_of(op) == "prims" or op not in {n.op for n in result.nodes}


def test_every_expansion_is_compared_somewhere() -> None:
    assert {str(op) for op in EXPANSIONS} == REACHED.keys() | {str(op) for op, _ in CALLS} | ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("op", "args", "mean", "deviation"),
    [
        (aten.rand_like.default, (), 0.5, 12**-0.5),
        (aten.bernoulli.p, (0.3,), 0.3, 0.21**0.5),
        (aten.uniform.default, (-1.0, 3.0), 1, 4 * 12**-0.5),
        (aten.normal_functional.default, (2.0, 3.0), 2, 3),
    ],
    ids=str,
)
def test_distribution(op: Any, args: tuple[float, ...], mean: float, deviation: float) -> None:
    program = Program(op, (torch.zeros(100, 1000, dtype=D), *args))
    graph = expanded(program.graph(), "prims")
    assert {name_of(n.op) for n in graph.nodes} <= {"rand", "randn", "lt", "_to_copy", "mul", "add"}
    (found,) = program.run(graph)
    assert abs(found.mean() - mean) < 0.05 and abs(found.std() - deviation) < 0.05


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_keeps_its_mask(p: float) -> None:
    program = Program(aten.native_dropout.default, (torch.ones(100, 1000), p, True))
    graph = expanded(program.graph(), "prims")
    assert [name_of(n.op) for n in graph.nodes] == ["rand", "lt", "_to_copy", "mul", "mul"]
    found, mask = program.run(graph)
    assert torch.equal(found, mask * (1 / (1 - p) if p < 1 else 0.0))
    assert abs(mask.float().mean() - (1 - p)) < 0.01
