"""Many nests of one body in one launch: optimizers' steps and other lists of tensors."""

import pytest
import torch
from torch import nn, optim

import kiln
from kiln.generate.ptx_table import LARGEST, WORD, most_entries
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

from .driver import pretended

SHAPES = [(64, 32), (64,), (10, 64), (10,), (33, 3)] * 24

OPTIMIZERS = {
    "sgd": (lambda p: optim.SGD(p, 0.1, weight_decay=0.01, foreach=True), 1),
    "momentum": (lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True), 1),
    "adam": (lambda p: optim.Adam(p, 0.01, foreach=True, capturable=True), 2),
    "adamw": (lambda p: optim.AdamW(p, 0.01, foreach=True, capturable=True), 2),
    "adamw one by one": (lambda p: optim.AdamW(p, 0.01, foreach=False, capturable=True), 2),
}


def parameters(device="cpu", shapes=SHAPES):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_is_one_launch(name):
    """With the counts of Adam's steps, which the others read, in one of their own."""
    make, launches = OPTIMIZERS[name]
    mine, theirs = parameters(), parameters()
    kiln.reset()
    with pretended() as driver:
        step = kiln.compile(make(mine).step, fullgraph=True)
        for _ in range(3):
            driver.starts.clear()
            before = [(p.data_ptr(), p._version) for p in mine]
            step()
            assert [p.data_ptr() for p in mine] == [place for place, _ in before]
            assert all(p._version > version for p, (_, version) in zip(mine, before, strict=True))
    assert len(driver.starts) == launches
    assert driver.starts[-1].blocks == sum(-(-p.numel() // 1024) for p in mine)
    optimizer = make(theirs)
    optimizer.param_groups[0]["capturable"] = False  # which eager refuses on a CPU
    for _ in range(3):
        optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_and_their_state_are_written_in_place():
    mine = parameters()
    optimizer = optim.SGD(mine, 0.1, 0.9, foreach=True)
    kiln.reset()
    with pretended() as driver:
        step = kiln.compile(optimizer.step, fullgraph=True)
        for _ in range(3):
            driver.starts.clear()
            step()
    (start,) = driver.starts
    written = [*mine, *[optimizer.state[p]["momentum_buffer"] for p in mine]]
    assert all(start.words.count(value.data_ptr()) == 2 for value in written)  # read, and written


def test_lists_of_tensors():
    inputs = [torch.randn(n) for n in (1000, 7, 64, 4096)]

    def f(*given):
        return tuple(torch._foreach_add(torch._foreach_mul(list(given), 2.0), 1.0))

    with pretended() as driver:
        got = compile_graph(recorded(f, *inputs))(list(inputs))
    torch.testing.assert_close(list(got), list(f(*inputs)))
    (start,) = driver.starts
    assert start.function.text.count("byval") == 1 and start.blocks == 1 + 1 + 1 + 4


def test_tables_are_cut_where_parameters_end():
    inputs = [torch.randn(5) for _ in range(1500)]
    with pretended() as driver:
        plan = compile_graph(recorded(lambda *given: tuple([x + 1 for x in given]), *inputs))
        plan(list(inputs))
    most = most_entries(4)
    assert most * 4 * WORD <= LARGEST < 2 * most * 4 * WORD
    assert len(driver.starts) == -(-1500 // most)


def test_ptx():
    """Entries are found in the parameter, and memory is read 16 bytes at a time, but for what is left over."""
    inputs = [torch.randn(n) for n in (1000, 7, 64)]
    with pretended() as driver:
        compile_graph(recorded(lambda *given: tuple([x * 2 for x in given]), *inputs))(list(inputs))
    text = driver.starts[0].function.ptx((9, 0))
    assert "ld.param" in text and "ld.global.v4" in text and "st.global.v4" in text
    assert "ld.local" not in text and ".local" not in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu(name):
    make, _ = OPTIMIZERS[name]
    mine, theirs = parameters("cuda"), parameters("cuda")
    kiln.reset()
    step, eager = kiln.compile(make(mine).step, fullgraph=True), make(theirs)
    for _ in range(4):
        step()
        eager.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


FUSED = {
    "sgd": lambda p: optim.SGD(p, 0.1, 0.9, fused=True),
    "adam": lambda p: optim.Adam(p, 0.01, amsgrad=True, fused=True),
    "adamw": lambda p: optim.AdamW(p, 0.01, fused=True),
}


def scaled_steps(make, device, compiled):
    """Parameters, gradients and state after steps of a scaler that finds infinities in some."""
    mine = parameters(device, SHAPES[:5])
    optimizer = make(mine)
    step = kiln.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
    for found in (0.0, 0.0, 1.0, 0.0):
        optimizer.grad_scale = torch.full((), 4.0, device=device)
        optimizer.found_inf = torch.full((), found, device=device)
        for p in mine:
            p.grad = torch.full_like(p, 3.0) * p.detach()
        step()
    return [*mine, *[p.grad for p in mine], *[v for s in optimizer.state.values() for v in s.values() if v is not None]]


@pytest.mark.parametrize("name", FUSED)
def test_a_scalers_step_is_three_launches_at_most(name):
    make = FUSED[name]
    kiln.reset()
    with pretended() as driver:
        got = scaled_steps(make, "cpu", compiled=True)
        assert len(driver.starts) <= 4 * 3
    torch.testing.assert_close(got, scaled_steps(make, "cpu", compiled=False), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FUSED)
def test_a_scalers_step_on_a_gpu(name):
    make = FUSED[name]
    kiln.reset()
    got, expected = (scaled_steps(make, "cuda", compiled) for compiled in (True, False))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
