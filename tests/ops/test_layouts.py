"""Shape rules against the real ops on tensors of odd layouts: permuted, strided, expanded, with extents of 0 and 1."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kiln.base.errors import Break
from kiln.ops import rules  # noqa: F401
from kiln.ops.fake import FakeMode, fake_like, make
from kiln.ops.table import RULES, aten

Random = random.Random
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool,
          torch.int8, torch.complex64]  # fmt: skip


def shape(r: Random, rank: int | None = None) -> list[int]:
    rank = r.randrange(5) if rank is None else rank
    return [r.choice([1, 2, 3, 4, 1, 2, 3, 5, 0] if r.random() < 0.15 else [1, 2, 3, 4]) for _ in range(rank)]


def values(r: Random, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(size).to(dtype) + 0.25
    return torch.randint(0, 2, size).to(dtype) if dtype is torch.bool else torch.randint(1, 3, size).to(dtype)


def tensor(r: Random, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this size whose strides are of a random kind."""
    kind = r.choice(["plain", "plain", "permuted", "step", "expanded", "channels_last", "offset", "odd_ones"])
    if kind == "permuted" and size:
        order = list(range(len(size)))
        r.shuffle(order)
        back = [order.index(i) for i in range(len(size))]
        return values(r, [size[i] for i in order], dtype).permute(back)
    if kind == "step" and size:
        d = r.randrange(len(size))
        return values(r, [n * 2 if i == d else n for i, n in enumerate(size)], dtype)[
            (slice(None),) * d + (slice(None, None, 2),)
        ]
    if kind == "expanded" and size:
        d = r.randrange(len(size))
        return values(r, [1 if i == d else n for i, n in enumerate(size)], dtype).expand(size)
    if kind == "channels_last" and len(size) == 4:
        return values(r, size, dtype).contiguous(memory_format=torch.channels_last)
    if kind == "offset":
        return values(r, [2, *size], dtype)[1]
    if kind == "odd_ones" and 1 in size:
        x = values(r, size, dtype)
        return x.as_strided(x.shape, [7 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])
    return values(r, size, dtype)


def thinned(r: Random, size: list[int]) -> list[int]:
    """A size that broadcasts to `size`."""
    out = [1 if r.random() < 0.3 else n for n in size]
    return out[r.randrange(len(out) + 1) if r.random() < 0.3 else 0 :]


def said(value: Any, given: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        for i, t in enumerate(given):
            if t is value:
                return i
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return [said(v, given) for v in value]
    return type(value)


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


def faked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fake_like(value)
    return type(value)([faked(v) for v in value]) if isinstance(value, (list, tuple)) else value


#: Errors about dtypes that a kernel lacks: meta kernels do not raise them, the graph does when it runs.
LATE = ("not implemented for", "not supported for", "not supported with", "Boolean")


def check(func: Any, args: tuple[Any, ...], **kwargs: Any) -> None:
    """The fake result has the layout of the real one, or both raise the same type."""
    fakes = faked(args)
    with torch.no_grad():
        try:
            expected: Any = said(func(*args, **kwargs), flat(args))
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            if any(text in str(error) for text in LATE):
                return
            expected = type(error)
        try:
            with FakeMode():
                found: Any = said(func(*fakes, **kwargs), flat(fakes))
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            found = type(error)
    layouts = [(tuple(t.shape), t.stride(), t.dtype) for t in flat(args)]
    assert found == expected, f"{func}{layouts} {[a for a in args if not flat(a)]} {kwargs}"


def number(r: Random) -> Any:
    return r.choice([2, 0.5, True, 3])


def probability(r: Random) -> float:
    return r.choice([0.0, 0.5, 1])


UNARY = [f for f in RULES if f.namespace == "aten" and [str(a.type) for a in f._schema.arguments if not a.has_default_value()] == ["Tensor"]
         and f not in (aten.lift.default, aten.lift_fresh.default)]  # fmt: skip
BINARY = [f for f in RULES if [str(a.type) for a in f._schema.arguments][:2] == ["Tensor", "Tensor"]
          and len([a for a in f._schema.arguments if not a.has_default_value()]) == 2
          and f.__name__.split(".")[0] not in ("mm", "bmm", "embedding", "binary_cross_entropy", "checked")]  # fmt: skip
SCALAR = [
    f
    for f in RULES
    if [str(a.type) for a in f._schema.arguments][:2] in (["Tensor", "number"], ["Tensor", "float"])
]


@pytest.mark.parametrize("func", UNARY, ids=str)
def test_unary(func: Any) -> None:
    r = Random(0)
    for _ in range(40):
        x = tensor(r, shape(r), r.choice(DTYPES))
        # How long this one's result is follows from contents, where it is not said.
        check(func, (x,), **({"output_size": int(x.sum().real)} if func is aten.repeat_interleave.Tensor else {}))


@pytest.mark.parametrize("size", [(3, 0, 1), (2, 2), ()], ids=str)
def test_repeats_that_eager_refuses(size: tuple[int, ...]) -> None:
    """Though how long the result would be is not known."""
    check(aten.repeat_interleave.Tensor, (torch.ones(size, dtype=torch.int32),))


@pytest.mark.parametrize("size", [(3,), (0,)], ids=str)
def test_repeats_whose_sum_is_not_known(size: tuple[int, ...]) -> None:
    fake = fake_like(torch.ones(size, dtype=torch.int32))
    with pytest.raises(Break, match="needs the values"), FakeMode():
        aten.repeat_interleave.Tensor(fake)


@pytest.mark.parametrize("func", BINARY, ids=str)
def test_binary(func: Any) -> None:
    r = Random(1)
    kwargs = {"rounding_mode": "floor"} if func is aten.div.Tensor_mode else {}
    for _ in range(80):
        size = shape(r)
        dtype = r.choice(DTYPES)
        other = (
            dtype if r.random() < 0.7 or "mod" in str(func) or "remainder" in str(func) else r.choice(DTYPES)
        )
        if "backward" in str(func):
            check(func, (tensor(r, size, dtype), tensor(r, size, dtype)))
            continue
        b = tensor(r, thinned(r, size) if r.random() < 0.5 else size, other)
        a = tensor(r, thinned(r, size) if r.random() < 0.3 and not func._schema.is_mutable else size, dtype)
        check(func, (a, b), **kwargs)


@pytest.mark.parametrize("func", [f for f in BINARY if f in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor,
                                                             aten.add_.Tensor, aten.mul_.Tensor, aten.maximum.default,
                                                             aten.eq.Tensor, aten.remainder.Tensor)] + SCALAR, ids=str)  # fmt: skip
def test_number(func: Any) -> None:
    r = Random(2)
    for _ in range(60):
        x = tensor(r, shape(r), r.choice(DTYPES))
        check(
            func, (x, probability(r) if func in (aten.bernoulli_.float, aten.uniform_.default) else number(r))
        )


def test_where() -> None:
    r = Random(3)
    for _ in range(200):
        size = shape(r)
        a, b = (tensor(r, thinned(r, size), r.choice(DTYPES)) for _ in range(2))
        check(aten.where.self, (tensor(r, thinned(r, size), torch.bool), a, b))


def test_masked_fill() -> None:
    r = Random(4)
    for _ in range(200):
        size = shape(r)
        x, mask = tensor(r, size, r.choice(DTYPES)), tensor(r, thinned(r, size), torch.bool)
        check(aten.masked_fill.Scalar, (x, mask, number(r)))
        check(aten.masked_fill_.Scalar, (x, mask, number(r)))
        check(aten.masked_fill.Tensor, (x, mask, values(r, [], r.choice(DTYPES))))


@pytest.mark.parametrize("func", [aten.addcmul.default, aten.addcdiv.default, aten.addcmul_.default, aten.addcdiv_.default,
                                  aten.lerp.Tensor], ids=str)  # fmt: skip
def test_ternary(func: Any) -> None:
    r = Random(5)
    for _ in range(100):
        size = shape(r)
        dtype = r.choice(DTYPES[:5])
        check(
            func,
            (tensor(r, size, dtype), tensor(r, thinned(r, size), dtype), tensor(r, thinned(r, size), dtype)),
        )


def test_clamp() -> None:
    r = Random(6)
    for _ in range(100):
        check(
            aten.clamp.default,
            (tensor(r, shape(r), r.choice(DTYPES)), r.choice([None, 0, 0.5]), r.choice([None, 1, 1.5])),
        )


def dims(r: Random, rank: int) -> list[int]:
    found = r.sample(range(rank), r.randrange(rank + 1)) if rank else []
    return [d - rank if r.random() < 0.5 else d for d in found]


def test_views() -> None:
    r = Random(7)
    for _ in range(600):
        size = shape(r)
        x, rank = tensor(r, size, torch.float32), len(size)
        some = r.randrange(-rank - 1, rank + 1)
        check(aten.transpose.int, (x, some, r.randrange(-rank - 1, rank + 1)))
        check(aten.unsqueeze.default, (x, r.randrange(-rank - 2, rank + 2)))
        check(aten.squeeze.dim, (x, some))
        check(aten.squeeze.dims, (x, dims(r, rank)))
        check(aten.permute.default, (x, r.sample(range(rank), rank)))
        check(aten.select.int, (x, some, r.randrange(-4, 4)))
        ends = [r.choice([None, -2, -1, 0, 1, 2, 9, -9]) for _ in range(2)]
        check(aten.slice.Tensor, (x, some, *ends, r.choice([1, 1, 2, 3])))
        check(aten.split.Tensor, (x, r.choice([1, 2, 3]), some))
        check(aten.unbind.int, (x, some))
        target = [r.choice([n, -1, n * 2 if n == 1 else n]) for n in size]
        check(aten.expand.default, (x, [r.choice([1, 2])] * r.randrange(3) + target))


def test_view() -> None:
    r = Random(8)
    for _ in range(1500):
        x = tensor(r, shape(r), torch.float32)
        target, left = [], x.numel()
        for _ in range(r.randrange(5)):
            options = [n for n in range(1, left + 1) if left % n == 0]
            target.append(r.choice([1, *options]) if options else r.choice([0, 1, 2]))
            left //= target[-1] or 1
        if r.random() < 0.8:
            target.append(r.choice([left, -1]))
        check(aten.view.default, (x, target))


def test_copies() -> None:
    r = Random(9)
    formats = [None, torch.preserve_format, torch.contiguous_format, torch.channels_last]
    for _ in range(500):
        x = tensor(r, shape(r), r.choice(DTYPES))
        layout = r.choice(formats)
        check(aten.clone.default, (x,), memory_format=layout)
        check(
            aten._to_copy.default, (x,), dtype=r.choice([None, torch.float64, x.dtype]), memory_format=layout
        )
        check(aten.empty_like.default, (x,), memory_format=layout)
        check(aten.copy_.default, (x, tensor(r, thinned(r, list(x.shape)), r.choice(DTYPES))))


REDUCTIONS = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default]


def test_reductions() -> None:
    r = Random(10)
    for _ in range(400):
        x = tensor(r, shape(r), r.choice(DTYPES))
        keep, one = r.random() < 0.5, r.randrange(-x.dim() - 1, x.dim() + 1)
        for func in REDUCTIONS:
            check(func, (x, dims(r, x.dim()), keep))
        for func in (aten.max.dim, aten.argmax.default, aten.any.dim):
            check(func, (x, one, keep))
        for func in (aten.sum.default, aten.mean.default, aten.any.default, aten.all.default):
            check(func, (x,))
        check(aten.cumsum.default, (x, one))
        check(aten._softmax.default, (x, one, False))
        check(aten._log_softmax.default, (x, one, False))


def test_matrix_products() -> None:
    r = Random(11)
    for _ in range(300):
        m, n, k, b = (r.choice([0, 1, 2, 3, 4]) for _ in range(4))
        dtype = r.choice(DTYPES)
        other = dtype if r.random() < 0.9 else r.choice(DTYPES)
        wrong = k + (r.random() < 0.1)
        x, y = tensor(r, [m, k], dtype), tensor(r, [wrong, n], other)
        check(aten.mm.default, (x, y))
        check(aten.addmm.default, (tensor(r, thinned(r, [m, n]), dtype), x, y))
        x, y = tensor(r, [b, m, k], dtype), tensor(r, [b, wrong, n], other)
        check(aten.bmm.default, (x, y))
        check(aten.baddbmm.default, (tensor(r, thinned(r, [b, m, n]), dtype), x, y))


def test_joining() -> None:
    r = Random(12)
    for _ in range(400):
        size = shape(r)
        dtype = r.choice(DTYPES)
        same = [
            tensor(r, size, dtype if r.random() < 0.9 else r.choice(DTYPES)) for _ in range(r.randrange(1, 4))
        ]
        dim = r.randrange(-len(size) - 1, len(size) + 1)
        check(aten.stack.default, (same, dim))
        check(aten.cat.default, (same, dim))


def test_convolution() -> None:
    r = Random(13)
    for _ in range(400):
        rank, groups, transposed = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2]), r.random() < 0.4
        dtype = r.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        inner, kernel = r.choice([1, 2]), [r.choice([1, 2, 3])] * rank
        x = tensor(r, [r.choice([1, 2]), inner * groups, *[r.choice([2, 3, 5]) for _ in range(rank)]], dtype)
        w = tensor(r, [*((inner * groups, 4 // groups) if transposed else (4, r.choice([inner, inner, 3]))), *kernel], dtype)
        bias, step = r.choice([None, values(r, [4], dtype)]), r.choice([1, 2])
        check(
            aten.convolution.default,
            (x, w, bias, [step], [r.choice([0, min(1, kernel[0] - 1)])], [r.choice([1, 2])], transposed, [r.choice([0, step - 1])], groups),
        )


def test_normalisation() -> None:
    r = Random(14)
    for _ in range(200):
        dtype = r.choice([torch.float32, torch.float64, torch.bfloat16])
        x = tensor(r, [r.choice([1, 2]), 3, *shape(r, r.choice([0, 1, 2, 2]))], dtype)
        given = [r.choice([None, values(r, [3], dtype)]) for _ in range(2)]
        stats = r.choice([[None, None], [torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)]])
        training = stats[0] is None or r.random() < 0.5
        check(aten.native_batch_norm.default, (x, *given, *stats, training, 0.1, 1e-5))
        inner = list(x.shape[r.randrange(1, x.dim()) :])
        scale = [r.choice([None, values(r, inner, dtype)]) for _ in range(2)]
        check(aten.native_layer_norm.default, (x, inner, *scale, 1e-5))


def test_entropy() -> None:
    r = Random(16)
    for _ in range(50):
        size, dtype = shape(r), r.choice([torch.float32, torch.bfloat16])
        grad, x, target = (tensor(r, size, dtype) * 0.5 for _ in range(3))
        check(aten.binary_cross_entropy.default, (x, target, None, r.choice([0, 0, 1])))
        check(aten.binary_cross_entropy_backward.default, (grad, x, target, None, 0))


def test_embedding() -> None:
    r = Random(15)
    for _ in range(100):
        weight = tensor(r, [4, 3], r.choice(DTYPES))
        check(
            aten.embedding.default,
            (weight, tensor(r, shape(r), r.choice([torch.int64, torch.int32, torch.float32]))),
        )


def test_factories() -> None:
    r = Random(16)
    for _ in range(200):
        size, dtype = shape(r), r.choice([None, *DTYPES])
        check(aten.zeros.default, (size,), dtype=dtype, device="cpu")
        check(aten.full.default, (size, number(r)), dtype=dtype, device="cpu")
        bounds = [r.choice([0, 1, 5, -3, 2.5, 7]) for _ in range(2)]
        check(
            aten.arange.start_step,
            (*bounds, r.choice([1, 2, 0.3, -1])),
            dtype=r.choice([None, torch.float32, torch.int64]),
            device="cpu",
        )
        check(aten.arange.default, (r.choice([0, 3, 2.5, -1]),), device="cpu")
        x = tensor(r, shape(r), r.choice(DTYPES))
        check(aten.new_zeros.default, (x, size), dtype=dtype)
        check(aten.new_full.default, (x, size, number(r)))
        check(aten.full_like.default, (x, number(r)), dtype=dtype)
        check(aten.scalar_tensor.default, (number(r),), dtype=dtype, device="cpu")


GRADIENTS = {
    "threshold": (0,), "leaky_relu": (0.1, False), "hardtanh": (-1, 1), "softplus": (1, 20), "softshrink": (0.5,),
    "hardshrink": (0.5,), "hardswish": (), "hardsigmoid": (), "mish": (),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_activations(name: str) -> None:
    r = Random(17)
    for _ in range(100):
        size, dtype = shape(r), r.choice(DTYPES[:5])
        func = getattr(aten, f"{name}_backward").default
        check(func, (tensor(r, size, dtype), tensor(r, size, dtype), *GRADIENTS[name]))


def test_gradients_of_normalisation() -> None:
    r = Random(18)
    for _ in range(100):
        dtype = r.choice([torch.float32, torch.float64])
        x = tensor(r, [2, 3, *shape(r, 2)], dtype)
        if 0 in x.shape:
            continue
        grad, weight, stats = (
            tensor(r, list(x.shape), dtype),
            values(r, [3], dtype),
            [values(r, [3], dtype) for _ in range(4)],
        )
        check(
            aten.native_batch_norm_backward.default, (grad, x, weight, *stats, True, 1e-5, [True, True, True])
        )
        inner = list(x.shape[2:])
        outer = [values(r, [2, 3, 1, 1], dtype) for _ in range(2)]
        scale = [values(r, inner, dtype) for _ in range(2)]
        check(aten.native_layer_norm_backward.default, (grad, x, inner, *outer, *scale, [True, True, True]))


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((3, 16, 16), (1, 3, 48), (1, 3, 48)),
        ((4, 1, 2), (1, 4, 4), (1, 4, 4)),
        ((2, 8, 4, 4), (128, 1, 32, 8), (128, 1, 32, 8)),
        ((2, 8, 4, 4), (256, 16, 4, 1), (128, 16, 4, 1)),
    ],
)
def test_batch_norms_on_a_gpu_keep_the_order_of_dimensions(size: Any, stride: Any, expected: Any) -> None:
    x = make(size, stride, torch.float32, torch.device("cuda", 0))
    out = RULES[aten.native_batch_norm.default](x, None, None, None, None, True, 0.1, 1e-5)
    assert out[0].stride() == expected and out[1].shape == (size[1],)
