"""Convolutions as loops: of one place, of few channels, of one channel each, and a row times a matrix."""

import pytest
import torch
from torch import nn

from kiln.expand import packed
from tests.expand.test_frozen import Residual, Seen, agrees, block, lively

CALLS = {"_convolution_pointwise", "_linear_pointwise", "convolution", "addmm"}


@pytest.fixture(autouse=True)
def in_loops(monkeypatch):
    monkeypatch.setattr(packed, "wide_vectors", lambda: True)
    monkeypatch.setattr(packed, "WEIGHT", 0)


def alone(module, *inputs):
    """The calls of a module that is loops alone; what it gives is eager's."""
    seen = Seen(module)
    agrees(seen, *inputs)
    assert CALLS.isdisjoint(seen.calls())
    return seen.calls()


@pytest.mark.parametrize("image", [(7, 7), (3, 5), (1, 29)], ids=str)
@pytest.mark.parametrize(("cin", "cout"), [(16, 32), (24, 24), (40, 144), (33, 8), (64, 96)])
def test_of_one_place(image, cin, cout):
    calls = alone(block(cin, cout, 1, act=nn.ReLU6()), torch.randn(2, cin, *image))
    assert calls == ["clone", "mul", "sum", "add", "hardtanh", "clone"]


WINDOWS = [
    dict(k=3, padding=1), dict(k=3, padding=1, stride=2), dict(k=5, padding=2), dict(k=3), dict(k=(3, 1), padding=(1, 0)),
    dict(k=3, padding=2, dilation=2), dict(k=3, padding=(2, 1), stride=(1, 2)), dict(k=5, padding=2, stride=2),
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize(("channels", "image"), [(16, (9, 8)), (58, (7, 7)), (32, (30, 41)), (96, (28, 28))], ids=str)
def test_of_one_channel_each(window, channels, image):
    layer = block(channels, channels, groups=channels, act=nn.Hardswish(), **window)
    alone(layer, torch.randn(2, channels, *image))


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize("cin", [1, 3])
def test_of_few_channels(window, cin):
    layer = nn.Sequential(nn.Conv2d(cin, 48, window["k"], **{k: n for k, n in window.items() if k != "k"}), nn.ReLU())
    calls = alone(layer, torch.randn(1, cin, 33, 30))
    assert calls.count("clone") == 1  # the image is read where it lies


def test_what_follows_is_part_of_the_loops():
    inner = nn.Sequential(
        block(16, 64, 1, act=nn.Hardswish()), block(64, 64, padding=1, groups=64, act=nn.SiLU()), block(64, 16, 1)
    )
    calls = alone(Residual(inner, nn.Identity()), torch.randn(1, 16, 14, 14))
    assert calls.count("clone") == 2 and calls[-3:] == ["add", "relu", "clone"]


def test_a_row_times_a_matrix():
    body = [block(8, 32, 1, act=nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10), nn.Tanh()]
    alone(lively(nn.Sequential(*body)), torch.randn(1, 8, 6, 6))


def test_what_is_no_number_stays_so():
    layer = nn.Sequential(block(16, 32, 1, act=nn.ReLU6()), block(32, 32, padding=1, groups=32, act=nn.ReLU()))
    x = torch.randn(1, 16, 8, 8)
    x[0, 3, 2, 2] = torch.nan
    got = Seen(layer)
    with torch.no_grad():
        torch.testing.assert_close(got(x), layer.eval()(x), equal_nan=True)


def test_other_convolutions_are_calls():
    for layer in (nn.Conv2d(16, 32, 3), nn.Conv2d(16, 30, 1), nn.Conv2d(16, 32, 1, groups=2), nn.Conv2d(4, 4, 3, groups=4)):
        seen = Seen(nn.Sequential(layer))
        agrees(seen, torch.randn(1, layer.in_channels, 8, 8))
        assert not CALLS.isdisjoint(seen.calls())
