"""What is decided otherwise for machines with many threads: fewer bytes, reads of several neighbours, few launches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln.expand import channels, padding
from kiln.fuse import windows
from kiln.fuse.nest import Fold, Load, Place, terms
from kiln.generate.grid import laid
from tests.gpu.driver import pretended
from tests.gpu.emitted import kernels_noted

HALF = torch.bfloat16


def nests_of(f, *inputs):
    """The nests of a program for a GPU, forward and, where there are gradients, backward."""
    kiln.reset()
    with kernels_noted() as found:
        out = kiln.compile(f, fullgraph=True)(*inputs)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward()
    return [nest for kernel in found for nest in kernel.nests]


def stored(nests):
    return [store.buffer.dtype for nest in nests for store in nest.stores if not store.kept]


def loads(nest):
    return [t for t in terms(s.value for s in nest.stores) if isinstance(t, Load)]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)).float().square().mean()


def test_functions_of_halves_are_computed_again_and_not_kept_as_floats():
    nests = nests_of(Gated().to(HALF), torch.randn(256, 32).to(HALF))
    assert torch.float32 not in stored(nests)
    assert sum(1 for nest in nests for t in terms(s.value for s in nest.stores) if getattr(t, "op", "") == "sigmoid") == 3


def test_costly_gradients_and_the_sums_of_their_columns_are_two_kernels():
    def gradient(x, grad):
        slope = grad * (1 - torch.tanh(x) ** 2)
        return slope, slope.sum(0)

    each, *sums = nests_of(gradient, torch.randn(512, 256).to(HALF), torch.randn(512, 256).to(HALF))
    assert len(each.axes) == 1 and not each.folds()
    assert all(len(loads(nest)) == 1 for nest in sums)


def variance(x):
    far = x - x.mean(0, keepdim=True)
    square = (far * far).mean(0, keepdim=True)
    return far * torch.rsqrt(square + 1e-5), square


def test_means_and_squared_distances_come_of_one_reading():
    x = torch.randn(20000, 64) * 0.1 + 100
    nests = nests_of(variance, x)
    assert [max((f.phase for f in nest.folds()), default=-1) for nest in nests] == [0, 0, -1]
    assert len({t.buffer for t in loads(nests[-1])}) == 3  # the mean and the factor are there, once a column
    kiln.reset()
    with pretended():
        mine = kiln.compile(variance, fullgraph=True)(x)
    for got, exact, eager in zip(mine, variance(x.double()), variance(x), strict=True):
        assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-5 * exact.abs().max()
    x[0], x[5000], x[-1] = 0, -1000, 0  # far off, as the first, the last or a single element may be
    kiln.reset()
    with pretended():
        mine = kiln.compile(variance, fullgraph=True)(x)
    for got, exact, eager in zip(mine, variance(x.double()), variance(x), strict=True):
        assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-5 * exact.abs().max()
    x = torch.randn(20000, 64) * 0.1 + 100
    x[0, 0], x[5, 1] = torch.inf, torch.nan
    kiln.reset()
    with pretended():
        mine = kiln.compile(variance, fullgraph=True)(x)
    assert mine[1][0, :2].isnan().all() and not mine[1][0, 2:].isnan().any()


class Head(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words, self.head = words, nn.Linear(32, words, bias=False)

    def forward(self, x, y):
        return F.cross_entropy(self.head(x).float(), y)


def test_scores_of_an_odd_number_of_words_are_read_several_at_once(monkeypatch):
    monkeypatch.setattr(padding, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(padding, "LEAST", 1)
    model, x, y = Head(1501).to(HALF), torch.randn(256, 32).to(HALF), torch.randint(0, 1501, (256,))
    nests = nests_of(model, x, y)
    model.zero_grad()
    along = [nest for nest in nests if any(axis.size == 1504 for axis in nest.axes) and len(nest.axes) == 2]
    folded, *_, spread = [nest for nest in along if any(t.buffer.name == "mm" for t in loads(nest))]
    assert [f.kind for f in folded.folds()] == ["amax", "sum"]
    for nest in (folded, spread):
        assert all(t.valid is None for t in loads(nest))
        computed = [t for t in terms(s.value for s in nest.stores) if isinstance(t, Place) and t.places]
        assert not any("where" in str(getattr(c.term, "args", [""])[0]) for t in computed for c in t.places[1:])
    kiln.reset()
    with pretended():
        loss = kiln.compile(model, fullgraph=True)(x, y)
        loss.backward()
    mine, model.head.weight.grad = model.head.weight.grad.clone(), None
    expected = model(x, y)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    assert (mine - model.head.weight.grad).norm() <= 0.02 * model.head.weight.grad.norm()


class Normed(nn.Module):
    def __init__(self, many):
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(many)])

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x)).flip(0)
        return x


def test_factors_of_channels_are_made_once_before_all_else():
    model = Normed(6).to(HALF).eval()
    x = torch.randn(64, 8, 64, 64).to(HALF)
    with torch.no_grad(), kiln.config.patch(freeze=False):
        kiln.reset()
        with kernels_noted() as found:
            kiln.compile(model, fullgraph=True)(x)
    first, *others = found
    assert (len(first.nests), [len(nest.axes) for nest in first.nests]) == (6, [1] * 6)
    used = [t for kernel in others for nest in kernel.nests for t in terms(s.value for s in nest.stores)]
    assert not any(getattr(t, "op", "") == "rsqrt" for t in used)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 2, 0), (2, 1, 1)])
def test_pooling_of_halves_and_its_gradient_are_loops(monkeypatch, kernel, stride, padding):
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))
    pool = nn.MaxPool2d(kernel, stride, padding)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), pool, nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*layers).to(HALF)
    x = torch.randn(2, 3, 21, 18).to(HALF)
    found = []
    for run in (kiln.compile(model, fullgraph=True), model):
        model.zero_grad()
        kiln.reset()
        with pretended():
            out = run(x)
            out.float().square().sum().backward()
        found.append([out.detach(), *[p.grad.clone() for p in model.parameters()]])
    for got, expected in zip(*found, strict=True):
        assert (got - expected).norm() <= 0.02 * expected.norm() and got.stride() == expected.stride()
    nests = nests_of(lambda x: model(x).float().square().mean(), x)
    gathered = [n for n in nests if sum(t.buffer.dtype is torch.int8 for t in loads(n)) > (1 if stride < kernel else 0)]
    assert len(gathered) == 1 and not any(isinstance(t, Fold) for t in terms(s.value for s in gathered[0].stores))


def losses_of(rows, words, kind=HALF):
    x, places = torch.randn(rows, words).to(kind), torch.randint(0, words, (rows,))
    places[3] = -100
    x[5], x[6, : words // 2], x[7, 100], x[8, 100] = -torch.inf, -torch.inf, torch.inf, torch.nan
    x[9], x[10, words // 2 :] = torch.finfo(kind).min, torch.finfo(kind).min
    return x, places


def mean_loss(x, places):
    return F.cross_entropy(x.float(), places)


def test_rows_that_processors_share_badly_are_cut_where_their_losses_are_folded():
    """Each part leaves its largest value, its sum of powers and the one that is asked for; the mean folds them."""
    x, places = losses_of(140, 24576)
    first, second = nests_of(mean_loss, x, places)
    assert [(a.size, a.reduced) for a in first.axes] == [(140, False), (2, False), (12288, True)]
    assert [f.kind for f in first.folds()] == ["amax", "sum"] and len(first.stores) == 3
    assert [(a.size, a.reduced) for a in second.axes] == [(140, True)]
    assert {f.kind for f in second.folds()} == {"sum"} and not any(t.places for t in loads(second))
    for alone in (x, torch.empty(264, 24576, dtype=HALF), torch.empty(140, 24568, dtype=HALF)):
        f = mean_loss if alone is not x else lambda x, i: F.cross_entropy(x.float(), i, reduction="none")
        rows, *_ = nests_of(f, alone, torch.zeros(len(alone), dtype=torch.int64))
        assert len(rows.axes) == 2  # losses by themselves, rows enough for all, parts of whole reads


@pytest.mark.parametrize("kind", [HALF, torch.float32])
@pytest.mark.parametrize("rest", [slice(None), slice(9, None)], ids=["infinities", "numbers"])
def test_losses_of_parts_are_those_of_rows(kind, rest):
    x, places = losses_of(149, 24576, kind)
    x, places = x[rest].contiguous().requires_grad_(kind is HALF), places[rest].contiguous()
    first, second, *_ = nests_of(mean_loss, x, places)
    assert len(first.axes) == 3 and len(second.axes) == 1
    x.grad = None

    def both(x, places):
        losses = F.cross_entropy(x.float(), places, reduction="none")
        return losses, losses.sum()

    kiln.reset()
    with pretended():
        mine = [kiln.compile(mean_loss, fullgraph=True)(x, places), *kiln.compile(both, fullgraph=True)(x, places)]
        if x.requires_grad:
            mine[0].backward()
            mine.append(x.grad)
    x.grad = None
    eager = [mean_loss(x, places), *both(x, places)]
    if x.requires_grad:
        eager[0].backward()
        eager.append(x.grad)
    assert eager[0].isnan() == (rest.start is None)
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_a_copy_that_is_kept_for_gradients_is_made_while_parts_are_read():
    x, places = losses_of(264, 24576)
    forward, ends, *_ = nests_of(mean_loss, x.requires_grad_(), places)
    assert [a.size for a in forward.axes] == [264, 2, 12288]
    assert [s.buffer.name for s in forward.stores if not s.kept] == ["clone"]
    assert {s.buffer.name for s in ends.stores} >= {"amax", "log"} and ends.axes[0].reduced
    longest = torch.empty(9000, 24576, dtype=HALF).requires_grad_()
    rows, *_ = nests_of(mean_loss, longest[:1].expand(9000, -1), torch.zeros(9000, dtype=torch.int64))[:1]
    assert len(rows.axes) == 2  # rows in such numbers keep processors busy


def test_a_sum_of_all_is_cut_into_more_parts_than_sums_of_columns():
    everything, columns = (nests_of(lambda x, d=d: x.sum(d), torch.empty(1 << 13, 1 << 10))[0] for d in (None, 0))
    assert everything.axes[0].size == 256 and columns.axes[0].size == 66


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_what_lies_across_is_turned_before_its_rows_are_folded(dtype):
    x, w = torch.randn(4, 128, 160).to(dtype), torch.randn(128).to(dtype)

    def f(x, w):
        y = (x.relu().transpose(1, 2) + w).contiguous()
        return F.layer_norm(y, (128,)) + y

    turning, folding = nests_of(f, x, w)
    assert not turning.reduced and laid(turning).across is not None
    assert folding.reduced and laid(folding).width == (8 if dtype is HALF else 4)
    kiln.reset()
    with pretended():
        torch.testing.assert_close(kiln.compile(f, fullgraph=True)(x, w), f(x, w), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("how", [{}, {"padding": 1}, {"padding": 1, "count_include_pad": False, "ceil_mode": True}])
def test_means_of_windows_of_halves_are_loops(monkeypatch, form, how):
    monkeypatch.setattr(windows, "DEVICES", frozenset({"cpu"}))
    x = torch.randn(2, 16, 9, 12).to(HALF).to(memory_format=form)

    def f(x):
        return F.avg_pool2d(x.relu(), 2, 2, **how) + 1

    (nest,) = nests_of(f, x)
    assert len(loads(nest)) == 4
    kiln.reset()
    with pretended():
        got = kiln.compile(f, fullgraph=True)(x)
    torch.testing.assert_close(got, f(x), rtol=0.01, atol=0.01)
    assert got.stride() == f(x).stride()
