"""Items of tensors at places that are numbers in tensors: one graph, with eager's views, writes and errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kiln.base import records
from tests.support import EAGER, How, Watch, kiln, one_graph, same_as_eager, t

X = t(4, 5, 6)
G = t(4, 5, 6, grad=True)
I = torch.tensor([1, 3, -2, 0])  # noqa: E741
BACKENDS = ["", "aot_eager", "kiln"]

READS = {
    "first": lambda x, i: x[i[0]],
    "second": lambda x, i: x[:, i[0]],
    "last": lambda x, i: x[..., i[1]],
    "between": lambda x, i: x[1:3, i[0], ::2],
    "two": lambda x, i: x[i[0], :, i[1]],
    "with a number": lambda x, i: x[2, i[2]],
    "new dims": lambda x, i: x[None, i[0], None, ..., 1:],
    "negative": lambda x, i: x[i[2]],
    "narrow": lambda x, i: x[i.to(torch.int32)[0], i.to(torch.int8)[1]],
    "computed": lambda x, i: x[x.sum((1, 2)).argmax()] + x[:, i.sum() - 1][0],
    "transposed": lambda x, i: x.transpose(0, 2)[:, i[1]],
    "beside indices": lambda x, i: x[i[0], [0, 2]] + x[i[0], i[:2].abs()],
    "in a loop": lambda x, i: torch.stack([x[b, i[b] - 1] for b in range(4)]),
    "for each": lambda x, i: sum(x[j] for j in i),
    "known": lambda x, i: x[0, 0] * torch.arange(5.0)[i[0]] + torch.tensor([1.0, 2.0, 3.0, 4.0])[i[1]],
}


@pytest.mark.parametrize("backend", BACKENDS, ids=["captured", "aot_eager", "kiln"])
@pytest.mark.parametrize("leaf", [X, G], ids=["plain", "grad"])
@pytest.mark.parametrize("read", READS)
def test_what_is_read_goes_on(read, leaf, backend):
    if backend and EAGER:
        pytest.skip("nothing to compile")
    f = READS[read]
    one_graph(lambda x, i: (f(x.relu() * 2, i) + 1).abs(), leaf, I, how=How(backend=backend))


@pytest.mark.parametrize("leaf", [X, G], ids=["plain", "grad"])
@pytest.mark.parametrize("read", READS)
def test_what_is_read_is_a_view(read, leaf):
    one_graph(READS[read], leaf, I)


def at_once(x, i):
    y = x * 2
    z = y[i[0]]
    z.add_(1)
    y.mul_(3)
    return z, y, y[:, i[1]]


def after(x, i):
    y = x * 2
    z = y[i[0]]
    y.zero_()
    return z + 1


WRITES = {
    "a number": lambda y, i: y.__setitem__(i[0], 2.5),
    "a truth": lambda y, i: y.__setitem__((slice(None), i[0]), True),
    "a row": lambda y, i: y.__setitem__((i[0], i[1]), y[0, 0].clone()),
    "of another type": lambda y, i: y.__setitem__((..., i[1]), i[0] * 7),
    "with ones before": lambda y, i: y.__setitem__((i[0], 1), torch.ones(1, 1, 6)),
    "of other rows": lambda y, i: y.__setitem__((slice(None), i[1]), y[:, i[2]] * 2),
    "with gradient": lambda y, i: y.__setitem__((2, i[0], slice(1, 4)), y[i[0], 0, :3] * 3),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=["captured", "aot_eager", "kiln"])
@pytest.mark.parametrize("leaf", [X, G], ids=["plain", "grad"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written(write, leaf, backend):
    if backend and EAGER:
        pytest.skip("nothing to compile")

    def f(x, i):
        y = x.relu() * 2
        WRITES[write](y, i)
        y[i[3]] += 1
        return y.abs()

    one_graph(f, leaf, I, how=How(backend=backend))


@pytest.mark.parametrize("f", [at_once, after])
@pytest.mark.parametrize("leaf", [X, G], ids=["plain", "grad"])
def test_views_that_are_written(f, leaf):
    one_graph(f, leaf, I)


@pytest.mark.parametrize("backend", BACKENDS, ids=["captured", "aot_eager", "kiln"])
def test_places_outside_of_the_tensor_raise(backend):
    if backend and EAGER:
        pytest.skip("nothing to compile")
    r = same_as_eager(lambda x, i: x.relu()[i[0]].abs(), X, torch.tensor([9]), how=How(backend=backend))
    assert type(r.raised) is IndexError


def test_other_places_need_no_other_graph():
    f = READS["in a loop"]
    for places in (I, torch.tensor([5, 1, 2, 3])):
        one_graph(f, G, places)


BOUNDS = {
    "up to": lambda x, i: torch.stack([x[b, : i[b] + 1].sum(0) for b in range(4)]),
    "from": lambda x, i: x[i[0] :].sum((0, 1)),
    "mean": lambda x, i: x[:, : i[1]].mean(1),
    "negative": lambda x, i: x[:, : i[1] - 5].sum(1),
    "beyond": lambda x, i: x[:, : i[1] + 9].sum(1),
    "narrow": lambda x, i: x.repeat(1, 60, 1)[:, : i.to(torch.int8)[1] - 4].sum(1),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_slices_up_to_a_number_in_a_tensor_in_full_graphs(bound):
    watch = Watch(BOUNDS[bound], fullgraph=True)
    for lengths in ([2, 3, 2, 4], [3, 4, 1, 3], [2, 2, 3, 3]):
        watch(X, torch.tensor(lengths))
    assert EAGER or len(watch.backend.modules) == 1
    for lengths in ([0, 1, 0, 0], [0, 0, 0, 0], [2, 3, 2, 4]):  # sizes of 0 and 1 run in Python
        watch(X, torch.tensor(lengths))


class LastOfEach(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x, lengths):
        h = self.rise(x).relu()
        return self.fall(torch.stack([h[b, lengths[b] - 1] for b in range(x.shape[0])])).tanh()


@pytest.mark.skipif(EAGER, reason="nothing to compile")
def test_the_last_of_each_row_is_compiled_as_one_graph():
    model, lengths = LastOfEach(), torch.tensor([3, 1, 5, 2])
    with records.collect() as seen:
        out = kiln.compile(model)(X, lengths)
    torch.testing.assert_close(out, model(X, lengths))
    assert (len(seen.graphs), len(seen.breaks), len(seen.fallbacks)) == (1, 0, 0)
