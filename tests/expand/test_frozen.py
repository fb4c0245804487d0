"""Graphs without gradients over held weights: what they become, and that a change of a weight is seen."""

import copy
from unittest import mock
from unittest.mock import ANY

import pytest
import torch
from torch import nn

import kiln
from kiln.base import records
from kiln.base.graph import label
from kiln.expand import onednn, packed
from kiln.launch import held

FREEZE = held.freeze


class Seen:
    """A compiled module, and the frozen graphs that it has come to."""

    def __init__(self, module, **options):
        self.module = module.eval()
        self.compiled = kiln.compile(module, fullgraph=True, **options)
        self.frozen = []

    def __call__(self, *inputs):
        def freeze(graph, places):
            found = FREEZE(graph, places)
            self.frozen.append(found)
            return found

        with mock.patch.object(held, "freeze", freeze), torch.no_grad(), kiln.config.patch(strict=True):
            return self.compiled(*inputs)

    def calls(self):
        """What the last graph calls, views aside."""
        return [label(node.op) for node in self.frozen[-1].rest.nodes if label(node.op) not in VIEWS]

    def node(self, name):
        return next(node for node in self.frozen[-1].rest.nodes if label(node.op) == name)


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed, "WEIGHT", 0)
    monkeypatch.setattr(packed, "wide_vectors", lambda: False)  # loops are in test_convolved


def test_small_weights_stay_as_they_are(monkeypatch):
    monkeypatch.undo()
    seen = Seen(nn.Linear(64, 64))
    agrees(seen, torch.randn(8, 64))
    assert seen.frozen == [None]
    assert checked(nn.Linear(512, 512), torch.randn(8, 512)).calls() == ["_linear_pointwise"]


VIEWS = {"permute", "view", "t", "getitem", "transpose", "slice", "squeeze", "unsqueeze", "unfold"}


def checked(module, *inputs, **options):
    """The module compiled; its result is eager's, near in value to a run in float64 and of eager's layout."""
    seen = Seen(module, **options)
    agrees(seen, *inputs)
    return seen


def agrees(seen, *inputs):
    with torch.no_grad():
        expected = seen.module(*inputs)
        exact = copy.deepcopy(seen.module).double()(*[
            x.double() if x.is_floating_point() else x for x in inputs
        ])  # fmt: skip
    for _ in range(held.PLAIN + 2):
        got = seen(*inputs)
        assert got.stride() == expected.stride() and got.dtype is expected.dtype
        error, own = ((x.double() - exact).abs().max().item() for x in (got, expected))
        assert error <= 2 * own + 1e-6 * exact.abs().max().item()


def lively(module):
    """The module with statistics that are not those of a new one."""
    torch.manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(part.weight, 0.5, 2.0)
            nn.init.normal_(part.bias)
    return module


def block(cin=8, cout=16, k=3, act=None, **conv):
    parts = [nn.Conv2d(cin, cout, k, bias=False, **conv), nn.BatchNorm2d(cout)]
    return lively(nn.Sequential(*parts, *([act] if act else [])))


def test_convolution_norm_and_function_are_one_call():
    seen = checked(block(padding=1, act=nn.SiLU()), torch.randn(2, 8, 9, 9))
    assert seen.calls() == ["clone", "_convolution_pointwise", "clone"]
    assert "swish" in seen.node("_convolution_pointwise").args


def test_between_convolutions_values_stay_channels_last():
    net = nn.Sequential(block(act=nn.ReLU()), nn.MaxPool2d(2), block(16, 8, act=nn.SiLU()))
    seen = checked(net, torch.randn(2, 8, 12, 12))
    assert seen.calls().count("clone") == 2
    assert seen.calls().count("_convolution_pointwise") == 2


class Residual(nn.Module):
    def __init__(self, first, second, act=True):
        super().__init__()
        self.first, self.second, self.act = first, second, act

    def forward(self, x):
        y = self.second(self.first(x)) + x
        return torch.relu(y) if self.act else y


def test_residual_is_added_in_the_call():
    seen = checked(
        Residual(block(8, 8, padding=1, act=nn.ReLU()), block(8, 8, padding=1)), torch.randn(1, 8, 10, 10)
    )
    assert seen.calls() == ["clone", "_convolution_pointwise", "relu", "_convolution_pointwise", "relu", "clone"]
    assert [str(n.op) for n in seen.frozen[-1].rest.nodes if "pointwise" in label(n.op)] == [
        "mkldnn._convolution_pointwise.default", "mkldnn._convolution_pointwise.binary",
    ]  # fmt: skip


def test_inverted_residual():
    inner = nn.Sequential(
        block(8, 32, 1, act=nn.Hardswish()), block(32, 32, padding=1, groups=32, act=nn.SiLU()), block(32, 8, 1)
    )
    seen = checked(Residual(inner, nn.Identity(), act=False), torch.randn(1, 8, 14, 14))
    assert seen.calls() == ["clone", "_linear_pointwise", "_convolution_pointwise", "_linear_pointwise", "clone"]
    assert str([n for n in seen.frozen[-1].rest.nodes if "linear" in label(n.op)][1].op).endswith("binary")


TAKEN = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Hardswish(), nn.LeakyReLU(0.2)]
CLAMPING = [nn.ReLU(), nn.ReLU6(), nn.Hardsigmoid(), nn.Hardtanh(), nn.LeakyReLU(0.0)]


@pytest.mark.parametrize("act", [*TAKEN, *CLAMPING], ids=repr)
def test_layer_with_a_function(act):
    own = [] if act in TAKEN else [ANY]
    seen = checked(linear := nn.Sequential(nn.Linear(24, 40), act), torch.randn(2, 6, 24))
    assert seen.calls() == ["_linear_pointwise", *own]
    convolved = checked(conv := nn.Sequential(nn.Conv2d(3, 8, 3), act), torch.randn(2, 3, 8, 8))
    assert convolved.calls() == ["clone", "_convolution_pointwise", *own, "clone"]
    for special in (torch.nan, torch.inf, -torch.inf):
        rows, image = torch.randn(2, 6, 24), torch.randn(2, 3, 8, 8)
        rows[0, 1, 2] = image[1, 1, 2, 2] = special
        with torch.no_grad():
            for module, found, x in ((linear, seen, rows), (conv, convolved, image)):
                torch.testing.assert_close(found(x), module(x), equal_nan=True)


def test_linear_forms():
    assert checked(nn.Linear(16, 8, bias=False), torch.randn(5, 16)).calls() == ["_linear_pointwise"]
    assert checked(lively(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))), torch.randn(5, 16)).calls() == [
        "_linear_pointwise"
    ]
    # One row is bound by reading the weight: nothing is packed.
    assert checked(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), torch.randn(1, 16)).frozen == [None]


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return x @ self.weight


def test_weight_of_a_product_may_be_given_inputs_first():
    assert checked(Turned(), torch.randn(5, 16)).calls() == ["_linear_pointwise"]


@pytest.mark.parametrize("conv", [
    dict(stride=2), dict(padding=1, dilation=2), dict(groups=4), dict(padding=(1, 0), stride=(2, 1)), dict(k=1, stride=2),
    dict(k=1, padding=1), dict(k=(3, 1)), dict(padding="same"),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("form", ["plain", "last", "strided"])
def test_windows_and_layouts(conv, form):
    conv = dict(conv)
    x = torch.randn(2, 8, 11, 13)
    if form == "last":
        x = x.to(memory_format=torch.channels_last)
    elif form == "strided":
        x = torch.randn(2, 8, 22, 13)[:, :, ::2]
    seen = checked(nn.Sequential(nn.Conv2d(8, 16, conv.pop("k", 3), **conv), nn.ReLU()), x)
    assert "convolution" not in seen.calls()


CONVS = {1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
         3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d)}  # fmt: skip


@pytest.mark.parametrize("conv", [
    {}, dict(stride=2, padding=1), dict(padding=2, dilation=2), dict(groups=4), dict(groups=8), dict(k=1), dict(bias=False),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("dims", [1, 3])
def test_rows_and_volumes(dims, conv):
    conv = dict(conv)
    layer, _, norm = CONVS[dims]
    net = nn.Sequential(
        layer(8, 16, conv.pop("k", 3), **conv), lively(norm(16)), nn.SiLU(), layer(16, 8, 1), nn.ReLU()
    )
    seen = checked(net, torch.randn(2, 8, *[9] * dims))
    assert not {"convolution", "native_batch_norm", "silu"} & set(seen.calls())
    assert seen.calls().count("clone") <= 2


@pytest.mark.parametrize("conv", [{}, dict(stride=2, padding=1, output_padding=1), dict(dilation=2)], ids=repr)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions(dims, conv):
    _, layer, norm = CONVS[dims]
    net = nn.Sequential(layer(8, 12, 3, **conv), lively(norm(12)), nn.Tanh(), layer(12, 8, 2, 2, bias=False))
    seen = checked(net, torch.randn(2, 8, *[6] * dims))
    assert seen.calls().count("_convolution_transpose_pointwise") == 2
    assert not {"convolution", "native_batch_norm", "tanh"} & set(seen.calls())
    layer = layer(8, 12, 3, groups=2)
    assert "convolution" in checked(nn.Sequential(layer, nn.Linear(8, 2)), torch.randn(2, 8, *[6] * dims)).calls()


class Added(nn.Module):
    """What is added to a convolution over rows, and to a transposed one."""

    def __init__(self):
        super().__init__()
        self.rows, self.back = nn.Conv1d(8, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 3, padding=1)

    def forward(self, x):
        y = torch.relu(x + self.rows(x))
        return torch.cat([y, self.back(y) + y], 1).softmax(1)


def test_sums_over_rows():
    seen = checked(Added(), torch.randn(2, 8, 12))
    assert seen.calls().count("add") == 1, "a transposed convolution's call has no room for it"


@pytest.mark.parametrize("conv", [dict(stride=2), dict(padding=1), dict(padding=2, dilation=2)], ids=repr)
def test_large_weights_over_rows_are_products_of_windows(monkeypatch, conv):
    monkeypatch.setattr(packed, "LONG", 192)
    net = nn.Sequential(nn.Conv1d(8, 16, 3, **conv), nn.GELU(), nn.Conv1d(16, 4, 2), nn.BatchNorm1d(4))
    seen = checked(net, torch.randn(2, 8, 20))
    assert seen.calls().count("_linear_pointwise") == 1
    assert seen.calls().count("_convolution_pointwise") == 1
    assert "gelu" not in seen.calls()


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)
        z = nn.functional.interpolate(self.c(nn.functional.avg_pool2d(y, 2)), scale_factor=2.0)
        return torch.flatten(nn.functional.adaptive_avg_pool2d(z, 3), 1) + z.mean()


def test_pooling_joining_and_resampling_follow():
    seen = checked(Joined(), torch.randn(2, 4, 12, 12))
    assert seen.calls().count("clone") <= 2


@pytest.mark.parametrize("pool", [
    nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d((3, 2), 1, (1, 0), dilation=2),
], ids=repr)  # fmt: skip
def test_pooling_between_convolutions(pool):
    seen = checked(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), pool, nn.Conv2d(16, 8, 1)), torch.randn(2, 3, 30, 31))
    assert "max_pool2d_with_indices" not in seen.calls()
    # Where nothing is channels-last, eager's kernel stays.
    plain = nn.Sequential(pool, nn.Flatten(), nn.Linear(pool(torch.ones(1, 3, 12, 12)).numel(), 4))
    assert "max_pool2d_with_indices" in checked(plain, torch.randn(2, 3, 12, 12)).calls()


def test_a_view_that_channels_last_does_not_allow():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4))
    seen = checked(net, torch.randn(2, 3, 6, 6))
    assert {"_convolution_pointwise", "_linear_pointwise"} <= set(seen.calls())


class Again(nn.Module):
    """Layers that are called three times."""

    def __init__(self):
        super().__init__()
        self.rows, self.image = nn.Linear(24, 24), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, x, image):
        for _ in range(3):
            x, image = self.rows(x).tanh(), self.image(image).relu()
        return x.sum() + image.mean() + self.rows(x[:4])


def test_a_weight_that_is_used_again_is_packed_once():
    seen = checked(Again(), torch.randn(8, 24), torch.randn(2, 8, 6, 6))
    assert seen.calls().count("_linear_pointwise") == 4
    packs = [label(node.op) for node in seen.frozen[-1].once.nodes]
    assert packs.count("packed_linear") == 2, "one for each number of rows"
    assert packs.count("packed_convolution") == packs.count("normalised") == 1


class Tapered(nn.Module):
    """Layers whose weights lie inputs first, of several sizes."""

    def __init__(self):
        super().__init__()
        sizes = [(24, 40), (40, 16), (16, 24)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(n, m) / 5) for n, m in sizes])

    def forward(self, x):
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


def test_weights_that_lie_inputs_first_are_laid_out_in_the_same_memory(monkeypatch):
    laid_out, places = onednn.laid_out, []

    def seen_at(weight):
        made = laid_out(weight)
        places.append(made.data_ptr())
        return made

    monkeypatch.setattr(onednn, "laid_out", seen_at)
    seen = checked(Tapered(), torch.randn(8, 24))
    assert seen.calls().count("_linear_pointwise") == 3
    assert len(places) == 3 and len(set(places)) == 1
    assert onednn.scratch.memory is None


def test_weights_are_packed_when_they_have_been_used_for_some_calls(monkeypatch):
    module = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3))
    seen, x = Seen(module), torch.randn(8, 24)
    for again in range(2):
        first = seen(x)
        if not again:
            pack, rows = held.packed_linear, []
            monkeypatch.setattr(held, "packed_linear", lambda w, n: rows.append(n) or pack(w, n))
        for _ in range(held.PLAIN - 1):
            assert seen(x).equal(first) and not rows
        assert seen(x).equal(first) and rows == [8, 8]
        assert seen(x).equal(first) and rows == [8, 8]
        rows.clear()
        sgd(module)  # from anew: packed weights that change at each call would be a copy in each
        assert not seen(x).equal(first)
        sgd(module)


def test_weights_that_lie_in_no_order_of_a_matrix_are_packed_at_once(monkeypatch):
    laid_out, made = onednn.laid_out, []
    monkeypatch.setattr(onednn, "laid_out", lambda w: made.append(w.shape) or laid_out(w))
    module = Tapered()
    module.weights = nn.ParameterList([nn.Parameter(torch.randn(24, 80)[:, ::2])])
    seen = checked(module, torch.randn(8, 24))
    assert made == [(40, 24)] and seen.calls().count("_linear_pointwise") == 1


def sgd(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5)


def load(module):
    module.load_state_dict({k: v + 0.25 for k, v in module.state_dict().items()})


def new_data(module):
    for p in module.parameters():
        p.data = p.data * 1.5


def through_data(module):
    for p in module.parameters():
        p.data.mul_(0.5)


def statistics(module):
    for b in module.buffers():
        if b.is_floating_point():
            b.mul_(2.0)


def one_of_them(module):
    with torch.no_grad():
        next(module.parameters())[0, 0] += 1.0


def masked(module):
    """What a mask leaves as it was lies where one would look first: in the middle, and at the end."""
    for p in module.parameters():
        flat = p.data.view(-1)
        mask = torch.arange(flat.numel()) % 3 > 0
        mask[flat.numel() // 2 - 4 : flat.numel() // 2 + 4] = mask[-4:] = True
        flat.mul_(mask + 0.5 * ~mask)


def single_elements(module):
    """Of what is small, through numpy."""
    for b in module.buffers():
        if b.is_floating_point():
            b.numpy()[1] += 0.5


CHANGES = [sgd, load, new_data, through_data, statistics, one_of_them, masked, single_elements]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changed_weights_are_seen(change):
    net = nn.Sequential(block(4, 8, act=nn.ReLU()), nn.Flatten(), nn.Linear(8 * 16, 4))
    seen = checked(net, x := torch.randn(3, 4, 6, 6))
    for _ in range(2):
        before = seen(x)
        change(net)
        agrees(seen, x)
        assert not torch.equal(before, seen(x))
    assert len(seen.frozen) == 1


def test_a_new_parameter_is_another_graph():
    net = nn.Linear(6, 6)
    seen = checked(net, x := torch.randn(3, 6))
    net.weight = nn.Parameter(torch.zeros(6, 6))
    agrees(seen, x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        self.calls.add_(1)
        return x * (self.calls * 2) + self.scale.exp()


def test_what_the_graph_writes_is_not_kept():
    mine, other = Counting(), Counting()
    other.load_state_dict(mine.state_dict())
    compiled = kiln.compile(mine, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(compiled(torch.ones(4)), other(torch.ones(4)))
    assert torch.equal(mine.calls, torch.full((4,), 3.0))


class Giving(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        doubled = self.weight * 2
        return x + doubled, doubled, doubled.t()


def test_outputs_are_new_in_every_call():
    compiled = kiln.compile(net := Giving(), fullgraph=True)
    with torch.no_grad():
        first = compiled(torch.zeros(4, 4))
        first[1].zero_()
        second = compiled(torch.zeros(4, 4))
        assert torch.equal(second[1], net.weight * 2) and torch.equal(second[2], (net.weight * 2).t())
        assert second[2].data_ptr() == second[1].data_ptr()


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.rand(8))

    def forward(self, x):
        places = torch.arange(x.shape[0], dtype=torch.float32)
        return x * (places[:, None] * self.rates).cos()


def test_constants_are_computed_once():
    seen = checked(Angles(), torch.randn(5, 8))
    assert seen.calls() == ["mul"]


def test_random_numbers_are_not_kept():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand(4)

    compiled = kiln.compile(Noisy(), fullgraph=True)
    with torch.no_grad():
        assert not torch.equal(compiled(torch.zeros(4)), compiled(torch.zeros(4)))


@pytest.mark.parametrize("options", [{"freeze": False}, {"numerics": "eager"}], ids=str)
def test_switched_off(options):
    seen = Seen(nn.Linear(8, 8), options=options)
    x = torch.randn(4, 8)
    assert torch.allclose(seen(x), seen.module(x)) and not seen.frozen


def test_gradients_switch_it_off():
    seen = Seen(net := nn.Linear(8, 8))
    with torch.enable_grad():
        out = seen.compiled(x := torch.randn(4, 8))
        out.sum().backward()
    assert not seen.frozen and net.weight.grad is not None
    agrees(seen, x)
    assert len(seen.frozen) == 1


def test_inference_tensors_are_not_kept():
    with torch.inference_mode():
        net = nn.Linear(8, 8)
    seen = Seen(net)
    with torch.inference_mode():
        x = torch.randn(4, 8)
        before = seen(x)
        net.weight.zero_()
        assert torch.allclose(seen(x), net(x)) and not torch.equal(before, seen(x))


def test_either_way_of_switching_gradients_off():
    seen = checked(net := block(4, 8, act=nn.ReLU()), x := torch.randn(2, 4, 6, 6))
    with torch.inference_mode():
        net[0].weight.data.mul_(2.0)
        assert torch.allclose(seen.compiled(x), net(x), atol=1e-5)
    agrees(seen, x)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-8, 8, (1024, 1024), dtype=torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) / 8)


def test_what_takes_much_more_memory_is_computed_in_each_call():
    seen = checked(Quantised(), torch.randn(4, 1024))
    assert seen.frozen == [None]


def test_a_tensor_of_the_surroundings_may_change():
    table = torch.arange(6.0)

    class Reads(nn.Module):
        def forward(self, x):
            return x + (table * 2).sin()

    compiled = kiln.compile(Reads(), fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(compiled(torch.zeros(6)), (table * 2).sin(), atol=1e-6)
            table.add_(1)


def test_sizes_may_vary():
    compiled = kiln.compile(net := nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 64):
            x = torch.randn(rows, 8)
            assert torch.allclose(compiled(x), net(x), atol=1e-5)
        images = kiln.compile(conv := block(4, 8, act=nn.ReLU()).eval(), dynamic=True)
        for rows in (2, 5):
            x = torch.randn(rows, 4, 8, 8)
            assert torch.allclose(images(x), conv(x), atol=1e-4)


class Places(nn.Module):
    def forward(self, x, target):
        chosen = x[torch.arange(4), target] + torch.zeros(4)
        waves = torch.sin(torch.arange(6) / 7)
        return chosen, x * waves


def test_what_follows_from_nothing_is_held_by_the_plan(monkeypatch):
    """No call asks whether it has changed: nothing stands between the guards and the plan."""
    monkeypatch.setattr(held, "Held", mock.Mock(side_effect=AssertionError))
    seen, x, target = Seen(Places()), torch.randn(4, 6), torch.tensor([3, 0, 5, 5])
    for _ in range(3):
        got = seen(x, target)
        torch.testing.assert_close(got, Places()(x, target))
    (frozen,) = seen.frozen
    assert [label(node.op) for node in frozen.once.nodes] == ["arange", "div", "sin"]


def test_numbers_in_order_are_made_by_loops():
    seen, x, target = Seen(Places()), torch.randn(4, 6), torch.tensor([3, 0, 5, 5])
    seen(x, target)
    assert {"arange", "zeros", "index"} <= {label(node.op) for node in seen.frozen[-1].rest.nodes}
    kiln.reset()
    with records.collect() as log, torch.no_grad():
        kiln.compile(lambda x: x[:, torch.arange(5, -1, -1)] + 1)(x)
    assert [kernel.reads for kernel in log.kernels] == [x.nbytes], "no places are read"


def test_weights_of_which_only_the_size_is_asked():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.unread = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

        def forward(self, x):
            return x * self.scale * torch.sin(torch.ones_like(self.unread).cumsum(0) / 7)

    agrees(Seen(Sized()), torch.randn(5, 6))
