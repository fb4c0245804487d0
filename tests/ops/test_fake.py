"""Fake tensors in programs: what eager says of every intermediate, the fakes say too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiln.base.errors import Break
from kiln.ops import rules  # noqa: F401
from kiln.ops.fake import FakeMode, FakeTensor, fake_like

pytestmark = pytest.mark.filterwarnings("ignore")


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad,
            value.is_leaf, type(value.grad_fn).__name__, value._is_view(), value.is_conj(), value.is_neg(),
        )  # fmt: skip
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    return [described(v) for v in vars(value).values()] if hasattr(value, "hidden") else value


def x() -> Tensor:
    return torch.randn(2, 3, 4, 4)


def same(program: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run `program` on real tensors and on fakes, compare all that can be asked of the results, return the fakes."""
    real = [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad) for t in inputs
    ]
    expected = program(*real)
    with FakeMode():
        found = program(*[fake_like(t) for t in inputs])
    assert described(found) == described(expected)
    return found


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda a: [a + 1, 2 - a, a * 0.5, a / 3, a // 2, a % 2, a**2, 2**a, -a, abs(a), a @ a, ~(a > 0)],
    "compare": lambda a: [a == 0, a != a, a < 1, a.logical_and(a), a.isnan(), a.isclose(a), a.eq(1) & a.gt(0)],
    "in place": lambda a: [(b := a * 1).add_(1), b.mul_(b), b.clamp_(0, 1), b.exp_(), b.zero_(), b.copy_(a), b],
    "in place operators": lambda a: _augmented(a * 1),
    "views": lambda a: [a.view(2, -1), a.reshape(3, -1), a.T if a.dim() == 2 else a.mT, a.permute(3, 1, 0, 2), a[None],
                        a.unfold(2, 2, 1), a.diagonal(0, 2, 3), a.narrow(1, 0, 2), a.movedim(1, -1), a.flatten(1),
                        a.unflatten(1, (3, 1)), a.expand(5, 2, 3, 4, 4), a.as_strided((2, 2), (1, 2)), a.swapaxes(0, 1)],
    "view chains": lambda a: [a.transpose(1, 2).reshape(2, -1), a.permute(0, 2, 3, 1).contiguous().view(2, 16, 3)],
    "write through view": lambda a: [(b := a * 1)[0].add_(1).shape, b[:, 1].mul_(2).shape, b.view(-1)[0].fill_(3).shape, b],
    "joining": lambda a: [torch.cat([a, a], 1), torch.stack([a, a], -1), torch.hstack([a, a]), a.repeat(2, 1, 1, 2),
                          a.split(2, 1), a.chunk(2, 2), a.unbind(1), torch.tensor_split(a, 3, 2), a.tile(2)],
    "indexing": lambda a: [a[0], a[..., 1], a[:, None, 1:], a[::2, 1:3], a[torch.tensor([0, 1])],
                           a[:, torch.tensor([[0, 1], [2, 0]])], a[torch.tensor([0, 1]), torch.tensor([2, 0])], a[[0, 1]],
                           a[:, [0, 2], 1], a[torch.tensor([1]), :, torch.tensor([0])], a[..., -1, None], a[True],
                           a[numpy.array([0, 1])], a[torch.tensor(1)]],
    "index assignment": lambda a: [_assigned(a * 1)],
    "gather": lambda a: [a.gather(1, torch.zeros(2, 2, 4, 4, dtype=torch.long)), a.index_select(1, torch.tensor([0, 2])),
                         a.scatter(1, torch.zeros(2, 1, 4, 4, dtype=torch.long), 1.0), a.take(torch.tensor([0, 5])),
                         a.index_add(0, torch.tensor([0]), a[:1]), a.masked_fill(a > 0, 0.0), torch.where(a > 0, a, 0.0),
                         a.masked_scatter(a > 0, a), torch.take_along_dim(a, torch.zeros(2, 3, 4, 1, dtype=torch.long), 3)],
    "reductions": lambda a: [a.sum(), a.mean(1), a.sum((1, 2), keepdim=True), a.max(), a.max(1), a.argmax(-1), a.std(),
                             a.var(1), a.norm(), a.norm(dim=1), a.logsumexp(1), a.prod(), a.cumsum(1), a.any(), a.all(1),
                             a.median(), a.amax((1, 2)), a.topk(2), a.sort(1), a.argsort(), a.kthvalue(1), a.aminmax(),
                             torch.var_mean(a, 1), a.softmax(1), a.log_softmax(-1), a.nansum()],
    "casts": lambda a: [a.to(torch.float64), a.half(), a.long(), a.bool(), a.to("cpu"), a.type(torch.int32), a.type_as(a),
                        a.float(), a.clone(), a.contiguous(memory_format=torch.channels_last), a.detach(), a.double()],
    "new": lambda a: [a.new_zeros(2), a.new_ones((2, 3)), a.new_full((2,), 1), a.new_empty(3), a.new_tensor([1.0, 2.0]),
                      torch.zeros_like(a), torch.ones_like(a, dtype=torch.int64), torch.empty_like(a), torch.rand_like(a),
                      torch.full_like(a, 2), torch.randn_like(a), torch.randint_like(a, 3)],
    "factories": lambda a: [torch.zeros(2, 3), torch.ones(2, dtype=torch.int32), torch.arange(5), torch.arange(0, 1, 0.25),
                            torch.linspace(0, 1, 5), torch.eye(3), torch.full((2,), 3), torch.full((2,), 1.5), torch.empty(0),
                            torch.rand(2), torch.randn(2, requires_grad=True), torch.randint(0, 5, (3,)), torch.randperm(4),
                            torch.tensor(3), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2], [3, 4]], dtype=torch.float64),
                            torch.as_tensor([1, 2]), torch.scalar_tensor(2.0), torch.tril_indices(3, 3), torch.empty_strided((2, 2), (1, 2)),
                            torch.normal(0.0, 1.0, (2,)), torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"),
                            torch.complex(torch.ones(2), torch.ones(2)), torch.logspace(0, 1, 3), torch.hann_window(5)],
    "random": lambda a: [torch.bernoulli(a.sigmoid()), a.clone().uniform_(), a.clone().normal_(), F.dropout(a, 0.5, True),
                         torch.multinomial(a.flatten(1).abs() + 1, 2), torch.poisson(a.abs()), F.dropout2d(a), F.alpha_dropout(a, 0.5, True),
                         F.gumbel_softmax(a), torch.rand(2, generator=torch.Generator())],
    "activations": lambda a: [f(a) for f in (F.relu, F.gelu, F.silu, F.elu, F.selu, F.celu, F.mish, F.hardswish, F.softplus,
                                             F.hardtanh, F.hardsigmoid, F.leaky_relu, F.relu6, F.logsigmoid, F.softsign,
                                             F.tanhshrink, F.softshrink, F.tanh, F.sigmoid)],
    "norms": lambda a: [F.layer_norm(a, (4, 4)), F.group_norm(a, 3), F.instance_norm(a), F.rms_norm(a, (4,)), F.normalize(a),
                        F.local_response_norm(a, 2), F.batch_norm(a, torch.zeros(3), torch.ones(3)),
                        F.batch_norm(a, torch.zeros(3), torch.ones(3), training=True)],
    "pooling": lambda a: [F.max_pool2d(a, 2), F.avg_pool2d(a, 2), F.adaptive_avg_pool2d(a, 1), F.adaptive_max_pool2d(a, 2),
                          F.lp_pool2d(a, 2, 2), F.max_pool2d(a, 2, return_indices=True), F.fractional_max_pool2d(a, 2, 2),
                          F.adaptive_avg_pool2d(a, (2, 3)), F.unfold(a, 2), F.pixel_shuffle(a.repeat(1, 4, 1, 1), 2)],
    "convolutions": lambda a: [F.conv2d(a, torch.randn(5, 3, 3, 3), torch.randn(5), padding=1),
                               F.conv_transpose2d(a, torch.randn(3, 5, 2, 2), stride=2), F.conv1d(a[0], torch.randn(2, 4, 3)),
                               F.conv2d(a, torch.randn(3, 1, 3, 3), groups=3, padding="same"),
                               F.conv3d(a[None], torch.randn(1, 2, 2, 2, 2)),
                               F.conv2d(a.contiguous(memory_format=torch.channels_last), torch.randn(5, 3, 3, 3))],
    "resizing": lambda a: [F.interpolate(a, scale_factor=2), F.interpolate(a, size=7, mode="bilinear"), F.pad(a, (1, 2)),
                           F.pad(a, (1, 1, 1, 1), mode="reflect"), F.grid_sample(a, torch.zeros(2, 5, 5, 2), align_corners=False),
                           F.affine_grid(torch.zeros(2, 2, 3), [2, 3, 4, 4]), F.interpolate(a, scale_factor=0.5, mode="area"),
                           a.roll(1, 0), a.flip(1), a.rot90(1, (2, 3)), torch.tril(a), a.triu()],
    "losses": lambda a: [F.mse_loss(a, a), F.l1_loss(a, a), F.cross_entropy(a, torch.zeros(2, 4, 4, dtype=torch.long)),
                         F.nll_loss(a, torch.zeros(2, 4, 4, dtype=torch.long)), F.kl_div(a, a), F.smooth_l1_loss(a, a),
                         F.binary_cross_entropy_with_logits(a, a), F.binary_cross_entropy(a.sigmoid(), a.sigmoid()),
                         F.huber_loss(a, a), F.cosine_similarity(a, a), F.poisson_nll_loss(a, a)],
    "products": lambda a: [torch.einsum("bcij,bcjk->bik", a, a), a @ a.mT, torch.matmul(a, a[0, 0, 0]), torch.bmm(a[0], a[1, :]),
                           torch.tensordot(a, a, ([2, 3], [2, 3])), torch.baddbmm(a[0], a[0], a[1]), torch.outer(a[0, 0, 0], a[0, 0, 1]),
                           torch.addmm(a[0, 0], a[0, 1], a[1, 1]), torch.kron(a[0, 0], a[0, 1]), torch.cdist(a[0], a[1]),
                           F.bilinear(a, a, torch.randn(2, 4, 4)), F.linear(a, torch.randn(5, 4)), torch.chain_matmul(a[0, 0], a[0, 1])],
    "attention": lambda a: [F.scaled_dot_product_attention(a, a, a), F.scaled_dot_product_attention(a, a, a, is_causal=True),
                            F.scaled_dot_product_attention(a, a, a, attn_mask=a.sum(1, keepdim=True) > 0)],
    "linalg": lambda a: [torch.linalg.svd(a), torch.linalg.qr(a), torch.linalg.eigh(a @ a.mT), torch.linalg.inv(a),
                         torch.linalg.det(a), torch.linalg.solve(a, a), torch.linalg.norm(a), torch.linalg.cholesky(a @ a.mT + 4 * torch.eye(4)),
                         torch.linalg.eig(a), torch.linalg.matrix_power(a, 2), torch.linalg.lu(a), torch.linalg.pinv(a)],
    "fft": lambda a: [torch.fft.fft(a), torch.fft.rfft(a), torch.fft.fft2(a), torch.fft.irfft(torch.fft.rfft(a)), torch.fft.fftshift(a),
                      torch.fft.rfft2(a), torch.stft(a.flatten(1), 8, return_complex=True, window=torch.hann_window(8))],
    "complex": lambda a: [(c := torch.complex(a, a)), c.conj(), c.conj() * 2, c.abs(), c.angle(), c.real, c.imag, torch.view_as_real(c),
                          c.conj().imag, c.resolve_conj(), c.mH, torch.polar(a, a), c.conj().clone()],
    "embedding": lambda a: [F.embedding(torch.zeros(2, 3, dtype=torch.long), a[0, 0]), F.one_hot(torch.zeros(3, dtype=torch.long), 4),
                            F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), a[0, 0])],
    "autograd": lambda a: [a.detach().requires_grad_(), a.data, (a * 2).grad_fn is None, a.requires_grad, a.is_leaf],
    "scripted size": lambda a: [a.shape, a.size(1), a.numel(), a.dim(), a.stride(), a.is_contiguous(), a.element_size(),
                                a.is_floating_point(), a.storage_offset(), len(a), a.ndim, a.nbytes, a.dtype, a.device],
}  # fmt: skip


def _augmented(b: Tensor) -> list[Tensor]:
    c = b
    c += 1
    c *= b
    c -= 2
    c /= 2
    return [c, b]


def _assigned(b: Tensor) -> Tensor:
    b[0] = 1
    b[:, 1] = 2.5
    b[..., 0] = b[..., 1]
    b[torch.tensor([0, 1])] = 3
    b[b > 0] = 0
    b[:, None, 0, 1:] = 7
    b[[0, 1], :, 2] = b[[1, 0], :, 1]
    b[0, 0, 0, 0] = torch.tensor(2.0)
    b[torch.tensor([True, False])] = 4
    return b


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, grad: bool) -> None:
    same(PROGRAMS[name], x().requires_grad_(grad))


@pytest.mark.parametrize(
    "name", ["arithmetic", "views", "reductions", "norms", "convolutions", "casts", "new"]
)
def test_program_without_autograd(name: str) -> None:
    with torch.no_grad():
        same(PROGRAMS[name], x().requires_grad_())


@pytest.mark.parametrize(
    "name", ["arithmetic", "in place", "joining", "attention", "products", "norms", "activations", "resizing"]
)
def test_program_in_inference_mode(name: str) -> None:
    with torch.inference_mode():
        a, program = x(), PROGRAMS[name]
        expected = program(a)
        with FakeMode():
            found = program(fake_like(a))

        def layout(v: Any) -> Any:
            return (
                [layout(i) for i in v]
                if isinstance(v, (list, tuple))
                else (v.shape, v.stride(), v.dtype, v.is_inference())
            )

        assert layout(found) == layout(expected)


@pytest.mark.parametrize("name", ["arithmetic", "products", "convolutions", "norms", "attention", "losses"])
def test_program_under_autocast(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        same(PROGRAMS[name], x())


MODULES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lambda: (nn.LSTM(4, 5, 2, batch_first=True), torch.randn(2, 3, 4)),
    "gru": lambda: (nn.GRU(4, 5, bidirectional=True), torch.randn(2, 3, 4)),
    "rnn": lambda: (nn.RNN(4, 5), torch.randn(2, 3, 4)),
    "lstm cell": lambda: (nn.LSTMCell(4, 5), torch.randn(2, 4)),
    "batch norm": lambda: (nn.BatchNorm2d(3), x()),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16), torch.randn(3, 2, 8)),
    "attention": lambda: (nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)),
    "embedding": lambda: (nn.Embedding(5, 3, padding_idx=0), torch.zeros(2, 2, dtype=torch.long)),
    "embedding bag": lambda: (nn.EmbeddingBag(5, 3, mode="max"), torch.zeros(2, 2, dtype=torch.long)),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, training: bool) -> None:
    module, a = MODULES[name]()
    module.train(training)
    inputs = (a, a, a) if isinstance(module, nn.MultiheadAttention) else (a,)
    expected = module(*inputs)
    state = {k: fake_like(v) for k, v in [*module.named_parameters(), *module.named_buffers()]}
    with FakeMode() as mode:
        found = torch.func.functional_call(module, state, tuple(fake_like(i) for i in inputs))
    assert described(found) == described(expected)
    if isinstance(module, nn.BatchNorm2d):
        assert (mode.writes > 0) == training


def test_gradients() -> None:
    a, w = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(5, 4))
    fake_a, fake_w = fake_like(a), fake_like(w)
    with FakeMode():
        F.gelu(F.linear(fake_a, fake_w)).sum().backward()
    for fake, real in ((fake_a, a), (fake_w, w)):
        assert (
            type(fake.grad) is FakeTensor
            and fake.grad.shape == real.shape
            and fake.grad.stride() == real.stride()
        )


def test_fake_like() -> None:
    a = torch.randn(3, 4, requires_grad=True)
    for real in (
        a,
        a * 2,
        a.detach(),
        a[1:].t(),
        nn.Parameter(a.detach()),
        torch.arange(3),
        a.detach().expand(2, 3, 4),
    ):
        fake = fake_like(real)
        keep = lambda t: (
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_leaf,
        )  # noqa: E731
        assert keep(fake) == keep(real)
        assert (fake.grad_fn is None) == (real.grad_fn is None)
        assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
        assert fake.real_type is type(real)
    with pytest.raises(RuntimeError, match="leaf"), FakeMode():
        fake_like(a).add_(1)
    assert "FakeTensor((3, 4)" in repr(fake_like(a))


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("data-dependent", lambda a: a.sum().item()),
        ("data-dependent", lambda a: bool(a.sum() > 0)),
        ("data-dependent", lambda a: int(a.sum())),
        ("data-dependent", lambda a: a[a > 0]),
        ("data-dependent", lambda a: a.nonzero()),
        ("data-dependent", lambda a: torch.unique(a)),
        ("data-dependent", lambda a: torch.equal(a, a)),
        ("data-dependent", lambda a: a.repeat_interleave(a.long()[0, 0, 0, :2], 0)),
        ("metadata-mutation", lambda a: a.clone().resize_(2)),
        ("metadata-mutation", lambda a: a.clone().set_(a)),
        ("sparse", lambda a: a.to_sparse()),
        ("sparse", lambda a: torch.empty(2, layout=torch.sparse_coo)),
        ("metadata-mutation", lambda a: torch.add(a, 1, out=torch.empty(0))),
    ],
)
def test_break(kind: str, program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Break) as caught, FakeMode():
        program(fake_like(x()))
    assert caught.value.kind == kind


def test_exotic_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
    for kind, real in (("sparse", torch.eye(3).to_sparse()), ("tensor-layout", quantised), ("tensor-layout", nested)):
        with pytest.raises(Break) as caught:
            fake_like(real)
        assert caught.value.kind == kind


ERRORS: list[Callable[[Tensor], Any]] = [
    lambda a: a + torch.randn(7),
    lambda a: a @ torch.randn(3, 2),
    lambda a: F.linear(a, torch.randn(5, 7)),
    lambda a: a.view(5),
    lambda a: a.transpose(1, 2).view(-1),
    lambda a: a.sum(9),
    lambda a: a.expand(3, 3, 4, 4),
    lambda a: torch.cat([a, a[0]]),
    lambda a: a.add_(torch.randn(5, 2, 3, 4, 4)),
    lambda a: a.long().add_(0.5),
    lambda a: torch.mm(a[0, 0], a[0, 0].double()),
    lambda a: F.conv2d(a, torch.randn(5, 4, 3, 3)),
    lambda a: a[9],
    lambda a: a[:, :, :, :, 0],
    lambda a: a.permute(0, 1),
    lambda a: torch.stack([a, a[0]]),
    lambda a: a.expand(5, 2, 3, 4, 4).add_(1),
    lambda a: F.embedding(a, a),
    lambda a: a.gather(0, a),
    lambda a: a.split([1, 1], 1),
    lambda a: F.cross_entropy(a[0, 0], torch.zeros(3, dtype=torch.long)),
    lambda a: torch.bmm(a, a),
    lambda a: a.bool() - a.bool(),
    lambda a: F.layer_norm(a, (5,)),
    lambda a: torch.einsum("ij,jk->ik", a, a),
    lambda a: a.squeeze(7),
    lambda a: torch.arange(0, 5, -1),
    lambda a: torch.zeros(-1),
    lambda a: a.mean(dtype=torch.int64),
    lambda a: a.unfold(0, 5, 1),
    lambda a: F.max_pool2d(a, 9),
]


@pytest.mark.parametrize("program", ERRORS)
def test_errors_are_those_of_eager(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Exception) as eager:
        program(x())
    with pytest.raises(Exception) as found, FakeMode():
        program(fake_like(x()))
    assert (type(found.value), str(found.value)) == (type(eager.value), str(eager.value))


def test_constants_fold() -> None:
    with FakeMode():
        assert torch.tensor(3.5).item() == 3.5
        assert int(torch.tensor(3)) == 3 and bool(torch.tensor(True))
        counter = torch.tensor(1)
        counter.view(1).add_(1)
        with pytest.raises(Break):
            counter.item()


def test_memory_of_meta_answers_is_exact() -> None:
    a = fake_like(torch.randn(3, 4))
    with FakeMode():
        assert torch.nan_to_num(a, 1.0).dtype is torch.float32
        assert torch.add(a, a).shape == (3, 4) and torch.cumprod(a, 0).shape == (3, 4)
        assert torch.full_like(a, 1).dtype is torch.float32
        assert torch.bincount is not None and torch.special.i0(a.long()).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.special.i0(a.long()).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


QUIET = """
import sys, torch
import torch.nn.functional as F
import kiln.capture.recorder
from kiln.ops.fake import FakeMode, fake_like
a = fake_like(torch.randn(2, 3, 8, 8, requires_grad=True))
with FakeMode():
    b = F.gelu(F.batch_norm(F.conv2d(a, torch.randn(4, 3, 3, 3)), torch.zeros(4), torch.ones(4), training=True))
    b = F.layer_norm(b, (6,)) + F.softmax(b, -1).std() + torch.special.erfcx(b) + torch.nextafter(b, b).detach() + b.relu().erf()
    b = F.interpolate(b, scale_factor=2, mode="bicubic") + torch.logit(torch.rand(1)) + torch.nan_to_num(b).sum()
    b = F.scaled_dot_product_attention(b, b, b)
    torch.nn.LSTM(12, 4)(b[0])[0].sum().backward()
loaded = [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))]
assert not loaded, loaded
"""


def test_torch_compiler_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", QUIET], check=True)
