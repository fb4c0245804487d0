"""Large products of f32 on the CPU are linear layers of oneDNN's: which, and what they give."""

import pytest
import torch
from torch import nn

import kiln
from kiln.base.graph import label
from kiln.expand import products
from kiln.expand.onednn import available
from kiln.launch import program

pytestmark = pytest.mark.skipif(not available(), reason="this build of torch has no oneDNN")
NAMES = ("mm", "addmm", "_linear_pointwise")


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The products that graphs call, small ones too."""
    found = []

    def noted(graph, biased=False):
        graph = products.by_onednn(graph, biased)
        found.extend(label(node.op) for node in graph.nodes if label(node.op) in NAMES)
        return graph

    monkeypatch.setattr(products, "LEAST", 1 << 12)
    monkeypatch.setattr(products, "maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(products, "is_multiplied_narrowly", lambda: False)
    monkeypatch.setattr(program, "multiplies_in_place", lambda: False)
    monkeypatch.setattr(program, "keeping", lambda *_: None)
    monkeypatch.setattr(program, "by_onednn", noted)
    return found


def compiled(function, **options):
    return kiln.compile(function, fullgraph=True, options={"freeze": False, "strict": True, **options})


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(16, 32, 48), (17, 33, 129), (1, 64, 100), (64, 100, 1)])
def test_products_of_matrices_either_way(turned, sizes, called):
    rows, summed, columns = sizes
    a, b = torch.randn(rows, summed), torch.randn(columns, summed).t() if turned else torch.randn(summed, columns)
    for f, given in ((torch.mm, (a, b)), (torch.addmm, (torch.randn(columns), a, b))):
        got, expected = compiled(f)(*given), f(*given)
        assert called.pop() == "_linear_pointwise" and not called
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


def test_what_else_is_eagers(called):
    def calls(function, *given):
        torch.testing.assert_close(compiled(function)(*given), function(*given))
        return called.pop()

    a, b, row = torch.randn(16, 64), torch.randn(64, 32), torch.randn(32)
    assert calls(torch.mm, a.double(), b.double()) == "mm"
    assert calls(torch.mm, a.bfloat16(), b.bfloat16()) == "mm"
    assert calls(torch.mm, a[:, ::2], b[::2]) == "mm"
    assert calls(torch.mm, torch.randn(64, 16).t(), b) == "mm", "it would be copied"
    assert calls(torch.mm, a[:1, :4], b[:4, :4]) == "mm", "too small to gain"
    assert calls(lambda r, x, y: torch.addmm(r, x, y, alpha=2), row, a, b) == "addmm"
    assert calls(torch.addmm, torch.randn(16, 32), a, b) == "addmm"
    torch.testing.assert_close(compiled(torch.mm, numerics="eager")(a, b), a @ b, rtol=0, atol=0)
    assert not called, "it is not looked at"


def test_no_copy_is_made_of_large_weights(monkeypatch, called):
    monkeypatch.setattr(products, "LARGEST", 64 * 32 * 4 - 1)
    compiled(torch.mm)(torch.randn(16, 64), torch.randn(64, 32))
    assert called.pop() == "mm"
    compiled(torch.mm)(torch.randn(16, 64), torch.randn(32, 64).t())
    assert called == ["_linear_pointwise"], "the weight of a layer is read as it lies"


def test_none_is_made_where_the_library_has_code_for_the_processor(monkeypatch, called):
    monkeypatch.setattr(products, "maker", lambda: products.MKL)
    compiled(torch.mm)(torch.randn(16, 64), torch.randn(64, 32))
    assert called.pop() == "mm"
    compiled(torch.mm)(torch.randn(16, 64), torch.randn(32, 64).t())
    assert called == ["_linear_pointwise"], "the weight of a layer is read as it lies"


def test_less_is_large_where_the_library_multiplies_half_of_the_vectors(monkeypatch, called):
    monkeypatch.setattr(products, "LEAST", 1 << 30)
    monkeypatch.setattr(products, "LEAST_NARROWLY", 1 << 12)
    given = torch.randn(16, 64), torch.randn(64, 32)
    for narrowly in (True, False):
        monkeypatch.setattr(products, "is_multiplied_narrowly", lambda narrowly=narrowly: narrowly)
        kiln.reset()
        torch.testing.assert_close(compiled(torch.mm)(*given), torch.mm(*given))
    assert called == ["_linear_pointwise", "mm"]


def test_layers_with_a_bias_alone_where_products_are_made_in_place(monkeypatch, called):
    monkeypatch.setattr(program, "multiplies_in_place", lambda: True)
    a, b, row = torch.randn(16, 64), torch.randn(64, 32), torch.randn(32)
    torch.testing.assert_close(compiled(torch.mm)(a, b), a @ b)
    torch.testing.assert_close(compiled(torch.addmm)(row, a, b), row + a @ b)
    assert called == ["mm", "_linear_pointwise"]


def test_infinities_and_nan_stay_in_their_rows():
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    a[2, 3], a[5, 1] = float("nan"), float("inf")
    torch.testing.assert_close(compiled(torch.mm)(a, b), a @ b, equal_nan=True)


def test_gradients_of_layers(called):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48, bias=False))
    x, sent = torch.randn(4, 9, 48, requires_grad=True), torch.randn(4, 9, 48)
    leaves = [x, *layers.parameters()]
    expected = torch.autograd.grad(layers(x), leaves, sent)
    got = torch.autograd.grad(compiled(layers)(x), leaves, sent)
    assert sorted(called) == ["_linear_pointwise"] * 4 + ["mm"] * 2, "weights' gradients are eager's"
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)


def test_gradients_of_a_weight_that_is_used_again_are_added_as_they_are_made(called, monkeypatch):
    monkeypatch.setattr(products, "LEAST", 1 << 30)
    monkeypatch.setattr(program, "by_onednn", products.by_onednn)
    made = []

    def noted(graph):
        graph = products.summed_up(graph)
        made.append([label(node.op) for node in graph.nodes])
        return graph

    monkeypatch.setattr(program, "summed_up", noted)
    layer, x = nn.Linear(24, 24, bias=False), torch.randn(8, 24, requires_grad=True)

    def again(x):
        for _ in range(4):
            x = layer(x).tanh()
        return x

    leaves = [x, layer.weight]
    expected = torch.autograd.grad(again(x).sum(), leaves)
    got = torch.autograd.grad(compiled(again)(x).sum(), leaves)
    torch.testing.assert_close(got, expected)
    backward = made[-1]
    assert (backward.count("addmm"), backward.count("mm")) == (3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_products(dtype, called):
    a, b, c, d = (torch.randn(6, 6).to(dtype) for _ in range(4))

    def sums(a, b, c, d):
        first = a @ b
        both = a @ c + first
        return both + (c @ d + d @ a), first.relu(), (a @ d + b) @ c, (b @ b) + (b @ b)

    close = {"rtol": 0.05, "atol": 0.1} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(compiled(sums)(a, b, c, d), sums(a, b, c, d), **close)
