"""Recordings of plans on a machine without a GPU: a graph stands for what was recorded, and replays it."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kiln
from kiln.base.begun import Begun
from kiln.launch import graphs, program
from kiln.launch.graphs import Recorded

from .driver import pretended


class Graph(SimpleNamespace):
    def pool(self):
        return 0, id(self)


class Pretended:
    """Notes recordings and replays; a replay writes into the outputs of the recording, and reads its inputs.

    It spoils what others have in the same memory: what was saved, and what guests wrote.
    """

    def __init__(self, monkeypatch):
        self.recorded, self.replayed, self.stream, self.runs = 0, 0, 1, []
        self.made = weakref.WeakSet()
        record = self.record
        monkeypatch.setattr(
            graphs.Recording, "record", lambda one, plan, given, side, pool: record(one, plan, given)
        )
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(graphs, "_hosts", weakref.WeakSet())
        monkeypatch.setattr(graphs, "_stream", lambda device: self.stream)
        monkeypatch.setattr(graphs, "_capturing", lambda: False)
        monkeypatch.setattr(graphs, "shared", lambda *_: (None, torch.empty(0)))
        link = program.TARGETS["cpu"][1]

        def recorded(given, device, settings, dump):
            run = Recorded(link(given, device, settings, dump).finish(), 0)
            self.runs.append(run)
            return Begun(lambda: run)

        monkeypatch.setitem(program.TARGETS, "cpu", (program.TARGETS["cpu"][0], recorded))

    def record(self, recording, plan, given):
        self.recorded += 1
        self.made.add(recording)
        me = weakref.ref(recording)
        places = [unowned(x) for x in given]
        outputs = plan(list(given))
        inside = {id(x) for x in given}
        written = [
            (k, x) for k, x in enumerate(outputs) if isinstance(x, torch.Tensor) and id(x) not in inside
        ]

        def replay():
            self.replayed += 1
            made = plan(list(places))
            for other in self.made - {me()}:
                for k, out in enumerate(other.lent.outputs if other.memory is me().memory else ()):
                    if isinstance(out, torch.Tensor) and (other.is_guest or k in other.saved):
                        out.view(torch.uint8).fill_(255)
            for k, kept in written:
                kept.copy_(made[k])

        recording.graph.replay = replay
        return outputs


def unowned(x):
    """The memory of a tensor, as a graph knows it: nobody holds it."""
    if not isinstance(x, torch.Tensor):
        return x
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = (ctypes.c_char * (extent * x.element_size())).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())


@pytest.fixture
def gpu():
    kiln.reset()
    with pretended(), pytest.MonkeyPatch.context() as patched:
        yield Pretended(patched)
    kiln.reset()
    gc.collect()


def f(x, w):
    return torch.relu(x @ w) @ w


X, W = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8), requires_grad=False)


def compiled(function=f, **options):
    return kiln.compile(function, fullgraph=True, options={"freeze": False}, **options)


def test_after_two_calls_a_plan_is_replayed(gpu):
    g = compiled()
    for turn in range(6):
        torch.testing.assert_close(g(X, W), f(X, W))
        assert gpu.recorded == (turn >= 2) and gpu.replayed == max(turn - 1, 0)


def test_inputs_that_move_are_copied_and_parameters_are_read_where_they_are(gpu):
    g, kept = compiled(), []
    for turn in range(6):
        kept.append(torch.randn(4, 8))
        torch.testing.assert_close(g(kept[-1], W), f(kept[-1], W))
        with torch.no_grad():
            W.mul_(0.9)
    assert gpu.recorded == 1 and gpu.replayed == 4 and gpu.runs[0].moving == b"\1\0"


def test_an_input_that_begins_to_move_is_copied_from_then_on(gpu):
    g, kept = compiled(), []
    for _ in range(4):
        g(X, W)
    assert gpu.recorded == 1 and gpu.runs[0].moving == b"\0\0"
    for _ in range(4):
        kept.append(torch.randn(4, 8))
        torch.testing.assert_close(g(kept[-1], W), f(kept[-1], W))
    assert gpu.recorded == 2 and gpu.replayed == 6


def test_small_outputs_are_copied_and_stay_what_they_were(gpu):
    g, results = compiled(), []
    inputs = [torch.randn(4, 8) for _ in range(6)]
    results = [g(x, W) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, f(x, W))
    assert gpu.recorded == 1


def test_large_outputs_are_lent_and_no_recording_writes_what_is_held(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    g = compiled()
    inputs = [torch.randn(4, 8) for _ in range(8)]
    results = [g(x, W) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, f(x, W))
    assert gpu.recorded == 2  # one more while the first rests; then the plan itself
    part = results[2][1:]
    del result, results
    torch.testing.assert_close(part, f(inputs[2], W)[1:])  # a view of it holds it too
    before, out = gpu.replayed, None
    for x in inputs:
        out = g(x, W)  # the last result is held while the next is computed
        torch.testing.assert_close(out, f(x, W))
    assert gpu.recorded == 2 and gpu.replayed > before
    torch.testing.assert_close(part, f(inputs[2], W)[1:])


def test_each_stream_has_recordings_of_its_own(gpu):
    g = compiled()
    for turn in range(8):
        gpu.stream = 1 + turn % 2
        torch.testing.assert_close(g(X, W), f(X, W))
    assert gpu.recorded == 2


def test_sizes_that_vary_have_recordings_up_to_a_limit(gpu, caplog):
    g = compiled(dynamic=True)
    for rows in range(2, 20):
        assert g(torch.randn(rows, 8), W).shape == (rows, 8)
    assert gpu.recorded == graphs.MOST
    assert sum("no longer replayed" in record.message for record in caplog.records) == 1


def test_a_training_step(gpu):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    g = kiln.compile(model, fullgraph=True)
    losses, expected = [], []
    for x in [torch.randn(5, 8) for _ in range(7)]:
        model.zero_grad()
        model(x).square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        expected.append(model(x).square().mean().item())
        model.zero_grad()
        out = g(x)
        loss = out.square().mean()
        loss.backward()
        losses.append(loss)
        for mine, theirs in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(mine.grad, theirs)
    torch.testing.assert_close(torch.stack(losses), torch.tensor(expected))
    forward, backward = gpu.runs
    assert (forward.made, backward.made) == (1, 1)
    assert sum(backward.moving) == 2, backward.moving  # the batch and the gradient that comes in


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_large_results_of_training_are_lent_until_somebody_keeps_one(gpu, held, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    g, kept = kiln.compile(model, fullgraph=True), []
    for x in [torch.randn(5, 8) for _ in range(9)]:
        model.zero_grad()
        model(x).square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        out = g(x)
        out.square().mean().backward()
        for mine, theirs in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(mine.grad, theirs)
        if held:
            kept.append((x, out.detach()))
        del out
    for x, out in kept:
        torch.testing.assert_close(out, model(x).detach())
    forward = gpu.runs[0]
    (recording,) = [one for found in forward.known.values() for one in found]
    assert (forward.copies, forward.made, len(recording.copied)) == ((True, 2, 1) if held else (False, 1, 0))


def test_two_forwards_before_their_backwards(gpu):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    g = kiln.compile(model, fullgraph=True)
    for _ in range(6):
        a, b = torch.randn(5, 8), torch.randn(5, 8)
        model.zero_grad()
        (model(a).square().mean() + model(b).square().mean()).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (g(a).square().mean() + g(b).square().mean()).backward()
        for mine, theirs in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(mine.grad, theirs)
    assert gpu.replayed


class Both:
    """A model that is trained and evaluated, and the same as eager has it."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        self.g = kiln.compile(self.model, fullgraph=True)
        self.kept = []  # so that no input lies where one before it lay

    def given(self):
        self.kept.append(torch.randn(5, 8))
        return self.kept[-1]

    def train(self, between=lambda: None):
        x, found = self.given(), []
        for f, then in ((self.model, lambda: None), (self.g, between)):
            self.model.zero_grad()
            loss = f(x).square().mean()
            then()
            loss.backward()
            found.append([p.grad.clone() for p in self.model.parameters()])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs)

    def evaluate(self):
        x = self.given()
        with torch.no_grad():
            out, expected = self.g(x), self.model(x)
        torch.testing.assert_close(out, expected)
        return out, expected

    def turns(self, count):
        for _ in range(count):
            self.train()
            self.evaluate()


def only(run):
    (recording,) = [one for found in run.known.values() for one in found]
    return recording


def test_an_evaluation_is_in_memory_of_what_training_saves(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    both = Both()
    both.turns(8)
    forward, backward, inference = gpu.runs
    assert only(inference).is_guest and only(inference).memory is only(forward).memory
    assert only(backward).memory is not only(forward).memory
    recorded, before = gpu.recorded, gpu.replayed
    both.turns(3)
    assert gpu.recorded == recorded and gpu.replayed == before + 9


def test_results_of_an_evaluation_may_be_held_while_training_goes_on(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    both = Both()
    both.turns(6)
    inference = gpu.runs[2]
    assert only(inference).is_guest
    held, before = both.evaluate(), gpu.replayed
    for _ in range(3):
        both.train()  # by the plan itself
        torch.testing.assert_close(*held)
    assert gpu.replayed == before
    held = [held]
    for _ in range(5):  # now that this was in the way once, it has memory of its own
        held.append(both.evaluate())
        both.train()
    for out, expected in held:
        torch.testing.assert_close(out, expected)
    assert inference.alone and not any(one.is_guest for found in inference.known.values() for one in found)
    del held, out, expected
    before = gpu.replayed
    both.turns(2)
    assert gpu.replayed == before + 6


def test_an_evaluation_between_a_forward_and_its_backward(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    both = Both()
    both.turns(6)
    inference = gpu.runs[2]
    for _ in range(3):
        both.train(both.evaluate)
    assert inference.alone and not only(inference).is_guest
    before = gpu.replayed
    both.train(both.evaluate)
    assert gpu.replayed == before + 3


def test_a_guest_whose_host_is_gone_is_recorded_again(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    both = Both()
    both.turns(6)
    forward, _, inference = gpu.runs
    forward.known.clear()
    gc.collect()
    assert only(inference).memory.left
    both.turns(6)
    assert only(inference).memory is only(forward).memory and not inference.alone


def test_what_cannot_be_recorded_runs_as_it_is(gpu, caplog, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs.Recording, "record", refuse)
    g = compiled()
    for _ in range(5):
        torch.testing.assert_close(g(X, W), f(X, W))
    (said,) = [record.message for record in caplog.records if "no longer replayed" in record.message]
    assert "operation not permitted" in said and "more" not in said
