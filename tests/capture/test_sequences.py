"""Packed sequences in one graph: how long they are is read by it; recurrent networks between are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support import EAGER, Counting, kiln

pytestmark = pytest.mark.skipif(EAGER, reason="asks Kiln itself")


class Tagger(nn.Module):
    """What a network says of each word, or of each text, of several lengths."""

    def __init__(self, network, in_order, batch_first, whole=False, of_text=False):
        super().__init__()
        self.network, self.out = network, nn.LazyLinear(3)
        self.in_order, self.batch_first, self.whole, self.of_text = in_order, batch_first, whole, of_text

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x * 2, lengths, self.batch_first, self.in_order)
        found, state = self.network(packed)
        longest = x.shape[self.batch_first] if self.whole else None
        found, known = pad_packed_sequence(found, self.batch_first, -1.0, longest)
        if self.of_text:
            found = state[0][-1] if isinstance(state, tuple) else state[-1]
        return self.out(found).relu(), known


def step(model, run, x, lengths, learns):
    """What a call gives, and the gradients; the error where it raises."""
    model.zero_grad()
    x = x.clone().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        try:
            found, known = run(x, lengths)
        except RuntimeError as error:
            return type(error), str(error)
        if learns:
            found.square().sum().backward()
    return found, known, found.stride(), x.grad, [p.grad for p in model.parameters()]


NETWORKS = {
    "lstm": lambda: nn.LSTM(8, 6, batch_first=True),
    "gru": lambda: nn.GRU(8, 6, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(8, 6, nonlinearity="relu"),
    "layers": lambda: nn.LSTM(8, 6, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(8, 6, proj_size=4),
}


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("how", [(True, True), (False, True, True), (False, False, False, True)])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_graph(name, how, learns, backend):
    torch.manual_seed(0)
    model, counting = Tagger(NETWORKS[name](), *how), Counting(backend)

    def given(lengths):
        x = torch.randn(len(lengths), 6, 8)
        return x if model.batch_first else x.transpose(0, 1).contiguous(), torch.tensor(lengths)

    model(*given([6, 5, 3, 2]))
    compiled = kiln.compile(model, backend=counting)
    for lengths in ([6, 5, 3, 2], [6, 6, 4, 1], [5, 4, 2, 1], [4, 4, 4, 4]):
        x, lengths = given(lengths)
        torch.testing.assert_close(step(model, compiled, x, lengths, learns), step(model, model, x, lengths, learns))
    assert len(counting.modules) == 1
    # More and fewer sequences; of one word each; in no order, and empty ones, which eager may refuse.
    for lengths in ([5, 4, 3], [6, 4, 3, 2, 1], [1, 1, 1], [2, 3, 1, 4], [3, 0, 1], [5, 4, 3]):
        x, lengths = given(lengths)
        mine, theirs = (step(model, run, x, lengths, learns) for run in (compiled, model))
        assert mine == theirs if theirs[0] is RuntimeError else torch.testing.assert_close(mine, theirs) is None


def test_how_many_sequences_vary():
    model, counting = Tagger(nn.GRU(8, 6), False, True), Counting("kiln")
    compiled = kiln.compile(model, backend=counting)
    for lengths in ([6, 5, 3, 2], [5, 4, 3], [6, 4, 3, 2, 1], [3, 2]):
        x, lengths = torch.randn(len(lengths), 6, 8), torch.tensor(lengths)
        torch.testing.assert_close(step(model, compiled, x, lengths, True), step(model, model, x, lengths, True))
    assert len(counting.modules) == 2


def test_the_number_of_sequences_is_a_tensor_to_the_program():
    def program(x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return packed.data.sum() / packed.batch_sizes[0], packed.batch_sizes[0], packed.batch_sizes

    counting, x, lengths = Counting("kiln"), torch.randn(3, 5, 2), torch.tensor([5, 4, 1])
    compiled = kiln.compile(program, backend=counting)
    torch.testing.assert_close(compiled(x, lengths), program(x, lengths))
    assert len(counting.modules) == 1


def test_dropout_between_layers_breaks():
    torch.manual_seed(0)
    model, counting = Tagger(nn.LSTM(8, 6, 2, dropout=0.5), True, True), Counting("kiln")
    x, lengths, found = torch.randn(3, 5, 8), torch.tensor([5, 4, 1]), []
    for run in (model, model, kiln.compile(model, backend=counting)):  # the first call makes a weight
        torch.manual_seed(1)
        found.append(step(model, run, x, lengths, True))
    torch.testing.assert_close(found[2], found[1])
    assert len(counting.modules) > 1


class Named(nn.Module):
    """What a network says of each word, and at the end of each text: all sequences are of one length."""

    def __init__(self, network, dropout):
        super().__init__()
        network.dropout = dropout
        self.network, self.out = network, nn.LazyLinear(3)

    def forward(self, x, state):
        found, (last, *_) = self.network((x * 2).tanh(), state)
        return self.out(found).relu(), last.exp()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dropout", [0, 0.5])
@pytest.mark.parametrize("name", NETWORKS)
def test_sequences_of_any_length_have_one_graph(name, dropout, learns, backend):
    torch.manual_seed(0)
    if dropout and name != "layers":
        pytest.skip("nothing is dropped after the last layer")
    network = NETWORKS[name]()
    model, counting = Named(network, dropout), Counting(backend)
    width = network.proj_size or network.hidden_size

    def given(rows, steps):
        x = torch.randn(rows, steps, 8)
        state = torch.randn(network.num_layers * (1 + network.bidirectional), rows, width)
        cell = torch.randn(*state.shape[:2], network.hidden_size)
        x = x if network.batch_first else x.transpose(0, 1).contiguous()
        return x, (state, cell) if isinstance(network, nn.LSTM) else state

    def stepped(run, args):
        torch.manual_seed(1)
        return step(model, run, *args, learns)

    model(*given(2, 3))
    compiled = kiln.compile(model, backend=counting, fullgraph=True)
    sizes = [(3, 5), (4, 7), (2, 9), (6, 6), (5, 3), (3, 30)]
    for args in (given(*size) for size in sizes):
        torch.testing.assert_close(stepped(compiled, args), stepped(model, args))
    assert len(counting.modules) == 2  # for the first sizes, and for all
    for args in (given(*size) for size in ((1, 4), (4, 1), (1, 1), (0, 4), (4, 0), (3, 8))):
        found, expected = stepped(compiled, args), stepped(model, args)
        assert found == expected if isinstance(expected[0], type) else torch.testing.assert_close(found, expected) is None


def test_other_numbers_of_sequences_are_steps_of_one_graph():
    torch.manual_seed(0)
    model, counting = Named(nn.RNN(8, 6), 0), Counting("kiln")
    compiled = kiln.compile(model, backend=counting, fullgraph=True)
    for rows in (3, 4, 5, 6):
        x, state = torch.randn(4, rows, 8), torch.randn(1, rows, 6)
        torch.testing.assert_close(compiled(x, state), model(x, state))
    assert len(counting.modules) == 2 and counting.modules[-1].graph.find_nodes(op="call_function", target=torch.rnn_tanh)
