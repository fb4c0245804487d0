"""Programs of other people's models in small, each of which once gave another result than eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records


@pytest.fixture(autouse=True)
def strict():
    kiln.reset()
    with kiln.config.patch(strict=True):
        yield


def trained(model, x):
    """Results, and gradients of their sum, after the same seed."""
    torch.manual_seed(0)
    out = model(x)
    out.sum().backward()
    return [out, *[p.grad for p in model.parameters()], *model.buffers()]


@pytest.mark.parametrize("size", [(4, 3, 16, 16), (2, 3, 7, 9), (3, 3, 2, 2)], ids=str)
def test_gradients_behind_a_normalised_batch_are_eagers_to_the_last_bit(size):
    # The bias of a convolution before the norm has no gradient but for rounding.
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False),
        nn.LeakyReLU(0.2), nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    other, x = copy.deepcopy(model), torch.randn(size) * 3 + 1
    expected, found = trained(model, x), trained(kiln.compile(other), x)
    for a, b in zip(expected[:9], found[:9], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(found[9:], expected[9:])


@pytest.mark.parametrize("norm", [
    nn.BatchNorm1d(8), nn.Sequential(nn.Unflatten(1, (8, 1, 1)), nn.BatchNorm2d(8), nn.Flatten()),
], ids=["rows", "maps of one place"])  # fmt: skip
def test_samples_without_places_are_normalised_as_eager_does(norm):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 2))
    other, x = copy.deepcopy(model), torch.randn(5, 6)
    for a, b in zip(trained(model, x), trained(kiln.compile(other), x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_sigmoid_is_eagers_to_the_last_bit():
    x = torch.randn(4096) * 10  # whole vectors: eager takes another function for the rest
    assert torch.equal(kiln.compile(torch.sigmoid)(x), torch.sigmoid(x))


def test_means_of_windows_are_eagers_to_the_last_bit():
    x = torch.randn(4, 16, 10, 10)
    for pool in (nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2, 1, ceil_mode=True)):
        f = lambda x: pool(x * 2)  # noqa: E731, B023
        assert torch.equal(kiln.compile(f)(x), f(x))


def draws(x, w):
    a = F.dropout(x, 0.3)
    b = torch.randn_like(x)
    c = F.dropout(torch.relu(a @ w), 0.5)
    d = F.dropout2d(c.view(2, 4, 4, 8).contiguous(memory_format=torch.channels_last), 0.4)
    e = torch.bernoulli(torch.full((5,), 0.3))
    return a + b, c, torch.rand(3), d, e, F.alpha_dropout(c, 0.2), F.dropout(d, 0.25), F.dropout(a.double(), 0.1), torch.randperm(5)


@pytest.mark.parametrize("grad", [False, True])
def test_draws_are_eagers_in_eagers_order(grad):
    x, w = torch.randn(32, 8), torch.randn(8, 8)
    ends = []
    for f in (draws, kiln.compile(draws)):
        torch.manual_seed(3)
        given = [t.clone().requires_grad_(grad) for t in (x, w)]
        out = f(*given)
        ends.append([*out, torch.rand(2)])
        if grad:
            sum(t.sum() for t in out if t.requires_grad).backward()
            ends[-1] += [t.grad for t in given]
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("count", [0, 1, 311, 312, 313, 1000, 5003])
@pytest.mark.parametrize("p", [0.0, 0.1, 1 / 3, 0.9, 1.0])
def test_masks_and_what_is_drawn_after_them(count, p):
    ends = []
    for mask in (lambda: torch.empty(count).bernoulli_(p).bool(), lambda: torch.ops.kiln.bernoulli([count], [1], p)):
        torch.manual_seed(5)
        torch.rand(count % 7)
        ends.append([mask(), torch.rand(3), mask(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("function", [nn.ReLU(), nn.LeakyReLU(0.1), nn.SiLU(), nn.Sigmoid(), nn.Hardtanh(), nn.GELU()], ids=str)
def test_a_function_of_a_convolution_and_something_added(function):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return function(self.conv(x) + x)

    block, x = Block().eval(), torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(kiln.compile(block)(x), block(x), rtol=1e-4, atol=1e-5)


def test_a_product_added_rounds_once():
    a, b, c = torch.randn(3, 1000)
    assert torch.equal(kiln.compile(lambda a, b, c: torch.addcmul(a, b, c, value=0.5) * 1.0)(a, b, c), torch.addcmul(a, b, c, value=0.5))


LAYOUTS = {
    "channels last": lambda: torch.randn(2, 8, 4, 6).contiguous(memory_format=torch.channels_last),
    "one image": lambda: torch.randn(1, 8, 4, 6).contiguous(memory_format=torch.channels_last),
    "volumes": lambda: torch.randn(2, 8, 4, 6, 4).contiguous(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 2, 6, 8).permute(1, 3, 0, 2),
    "stepped": lambda: torch.randn(2, 8, 4, 12)[..., ::2],
}
MOVING = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: torch.native_channel_shuffle(x, 2),
    "roll": lambda x: x.roll(1, 0),
    "roll of channels": lambda x: x.roll(3, 1),
    "roll by a whole size": lambda x: x.roll(4, 2),
    "roll over two": lambda x: x.roll((1, -2), (1, 3)),
    "roll of everything": lambda x: x.roll(5),
    "flip": lambda x: x.flip(1, 2),
    "rot90": lambda x: x.rot90(1, [2, 3]),
    "reflect": lambda x: F.pad(x, (1, 2) * (x.dim() - 2), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2) * (x.dim() - 2), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 2) * (x.dim() - 2), mode="circular"),
    "upsample": lambda x: F.interpolate(x, scale_factor=2),
    "rrelu": F.rrelu,
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("dynamic", [False, True], ids=["plain", "symbolic"])
def test_strides_of_what_is_moved(name, dynamic):
    f, met = MOVING[name], 0
    compiled = kiln.compile(lambda x: f(x), dynamic=dynamic)
    for layout, make in LAYOUTS.items():
        x = make()
        if layout == "volumes" and name in ("pixel_shuffle", "pixel_unshuffle"):
            continue
        out, wanted = compiled(x), f(x)
        assert torch.equal(out, wanted), layout
        assert out.stride() == wanted.stride(), layout
        met += 1
    assert met >= 4


def test_a_size_known_by_its_half():
    def f(x):
        return torch.copysign(F.glu(x * 2, 2), x)

    compiled = kiln.compile(f, dynamic=True)
    x, y = (torch.linspace(-1, 1, 136).view(17, 4, 2).requires_grad_() for _ in range(2))
    for g, given in ((compiled, x), (f, y)):
        g(given).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    with pytest.raises(RuntimeError, match="must be even"):
        compiled(torch.randn(17, 4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 7, 64, 67])
def test_clamped_zeros_keep_their_sign(dtype, count):
    def f(x):
        given = x.relu(), x.clamp(min=0), x.clamp(min=-0.0), x.clamp(max=0), x.clamp(0, 6), F.relu6(x), F.hardtanh(x, -1, 0)
        return [torch.copysign(torch.full_like(x, 2), y) for y in given]

    x = torch.tensor([-0.0, 0.0, -1.0, 1.0], dtype=dtype).repeat(count)
    assert all(torch.equal(a, b) for a, b in zip(kiln.compile(f)(x), f(x), strict=True))


@pytest.mark.parametrize("reduced", ["amax", "max", "norm", "scatter_reduce"])
def test_the_largest_is_found_again_by_its_gradient(reduced):
    def f(x):
        y = (torch.addcmul(x, x, x, value=0.5) + 3).erf()
        places = torch.arange(x.shape[1]).flip(0).expand(x.shape)
        return {
            "amax": lambda: y.amax(1),
            "max": lambda: y.max(),
            "norm": lambda: y.norm(float("inf"), 1),
            "scatter_reduce": lambda: y.scatter_reduce(1, places, y, "amax"),
        }[reduced]()

    torch.manual_seed(0)
    x = (torch.randn(64, 5) * 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for g, given in ((kiln.compile(f), x), (f, y)):
        g(given).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.mse_loss, F.soft_margin_loss])
@pytest.mark.parametrize(("of", "wanted"), [(torch.half, torch.float), (torch.float, torch.half), (torch.float, torch.double)])
def test_an_eager_kernel_may_give_another_dtype_than_was_foreseen(loss, of, wanted):
    torch.manual_seed(0)
    x, y, target = torch.randn(7).to(of), torch.randn(7).to(of), torch.randn(7).to(wanted)
    y.copy_(x)
    for f, given in ((kiln.compile(lambda a, b: loss(a, b)), x), (loss, y)):
        f(given.requires_grad_(), target).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_zeros_without_memory_are_zeros():
    """The tangent of what does not depend on an input is a tensor that has no memory."""

    def f(x):
        return torch.func.hessian(lambda a: a.sin().sum())(x)

    x, graphs = torch.linspace(-1, 1, 5), []
    torch.testing.assert_close(kiln.compile(f)(x), f(x))

    def kept(module, examples):
        graphs.append(str(module.graph))
        return module.forward

    kiln.compile(f, backend=kiln.aot(kept))(x)
    assert "zeros" in graphs[0] and "_efficientzerotensor" not in graphs[0]


@pytest.mark.parametrize("f", [lambda r: r.sum() * 2, lambda r: r.mean() / 2.5, lambda r: torch.add(r.sum(), 3, alpha=2)])
def test_numbers_and_single_elements_meet_in_a_transform(f):
    x = torch.randn(3, 5)
    torch.testing.assert_close(kiln.compile(torch.vmap(f), fullgraph=True)(x), torch.vmap(f)(x))


@pytest.mark.parametrize("f", [
    lambda x, k: torch.tensor(k) + x, lambda x, k: torch.tensor([[k, x.sum()], [1, k]]), lambda x, k: torch.as_tensor([1, x.sum()]),
    lambda x, k: torch.asarray([k, x.max()], dtype=torch.float64), lambda x, k: torch.tensor([x.shape[0], k]),
])  # fmt: skip
def test_tensors_of_numbers_that_vary_are_compiled_once(f):
    compiled = kiln.compile(f)
    with records.collect() as log:
        for i, k in enumerate((0.1, 0.3, 0.35, 0.77)):
            x = torch.randn(i + 3)
            torch.testing.assert_close(compiled(x, k), f(x, k))
    assert len(log.graphs) == 2 and not log.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_powers_whose_exponent_varies_are_compiled_once(dtype):
    def f(x, k):
        return x**k * 2

    compiled, x = kiln.compile(f), torch.tensor([1.0, -2.0, 3.0, 0.0]).to(dtype)
    with records.collect() as log:
        for k in (2, 3, 5, 4):
            torch.testing.assert_close(compiled(x, k), f(x, k))
    assert len(log.graphs) == 2 and not log.fallbacks


@pytest.mark.parametrize("chosen", [max, min])
def test_the_largest_of_several_numbers_that_vary(chosen):
    def f(x, numbers):
        return x * chosen(numbers)

    compiled, x = kiln.compile(f, dynamic=True), torch.ones(3)
    for numbers in ([4, 2, 3], [4, 2, 9], [5, 7, 6]):
        torch.testing.assert_close(compiled(x, numbers), f(x, numbers))


@pytest.mark.parametrize("dynamic", [None, True])
def test_products_of_blocks_are_written_where_out_says(dynamic):
    def f(a, b, out):
        like = torch.empty_like(torch.kron(a, b))
        torch.kron(a, b, out=out)
        return torch.kron(a, b, out=like), like

    compiled = kiln.compile(f, dynamic=dynamic)
    for n in (2, 3):
        a, b = torch.randn(n, n), torch.randn(2, n)
        mine, eager = torch.zeros(2, 2 * n, n * n)
        torch.testing.assert_close(compiled(a, b, mine), f(a, b, eager), rtol=0, atol=0)
        torch.testing.assert_close(mine, eager, rtol=0, atol=0)
