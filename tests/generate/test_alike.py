"""Nests that differ in their buffers and in the names of loops alone have one form, and one function."""

import torch

import kiln
from kiln.base import records
from kiln.base.symbols import Scope
from kiln.fuse.axes import axes_for
from kiln.fuse.nest import Apply, Buffer, Const, Fold, Kernel, Load, Nest, Store
from kiln.generate import code
from kiln.generate.alike import form

F32 = torch.float32


def scaled(factor=2.0, shape=(4, 8), op="mul", dtype=F32, turned=False, same=False, scope=None):
    """A matrix times a number."""
    axes = axes_for(scope or Scope(), shape)
    i, j = [a.variable for a in axes]
    read = Buffer("x", dtype)
    place = j * shape[0] + i if turned else i * shape[1] + j
    value = Apply(op, (Load(read, place, dtype), Const(factor, dtype)), dtype)
    return Nest(tuple(axes), [Store(read if same else Buffer("y", dtype), i * shape[1] + j, value, 0, False)])


def summed(kind="sum", shared=True):
    """A sum of two numbers, which are one or only equal."""
    (axis,) = axes_for(Scope(), (16,))
    loads = [Load(b, axis.variable, F32) for b in [Buffer("x", F32)] * 2]
    value = Apply("add", (loads[0], loads[0] if shared else loads[1]), F32)
    return Nest((axis,), [Store(Buffer("y", F32), 0, Fold(kind, value, F32, 0), 1, True)])


def test_names_do_not_count():
    scope = Scope()
    assert form(scaled()) == form(scaled()) == form(scaled(scope=scope)) == form(scaled(scope=scope))
    assert form(summed()) == form(summed())


def test_all_else_counts():
    others = [
        scaled(), scaled(3.0), scaled(0.0), scaled(-0.0), scaled(2), scaled(shape=(8, 4)), scaled(op="add"),
        scaled(dtype=torch.float64), scaled(turned=True), scaled(same=True), summed(), summed("amax"),
        summed(shared=False),
    ]  # fmt: skip
    assert len(set(map(form, others))) == len(others)


def test_sizes_that_vary_belong_to_one_nest():
    scope = Scope()
    rows = scope.symbol(5, "x.size(0)")
    nests = [scaled(shape=(rows, 8), scope=scope) for _ in range(2)]
    assert [form(nest) for nest in nests] == [(nest, (0, 0)) for nest in nests]


def test_what_is_alike_is_written_once(monkeypatch):
    written = []
    monkeypatch.setattr(code, "Emitter", lambda nest, *how, make=code.Emitter: written.append(nest) or make(nest, *how))
    made = code.generate([Kernel(f"k{i}", ((scaled(factor),),)) for i, factor in enumerate((2.0, 2.0, 5.0))])
    assert len(written) == 2 and made[0].names == made[1].names != made[2].names


def test_where_it_begins_does_not_count():
    def shifted(ahead, apart):
        """The sum of a row and of one further on, stored further on."""
        (axis,) = axes_for(Scope(), (16,))
        x, i = Buffer("x", F32), axis.variable
        value = Apply("add", (Load(x, i + ahead, F32), Load(x, i + (ahead + apart), F32)), F32)
        return Nest((axis,), [Store(Buffer("y", F32), i + 2 * ahead, value, 0, False)])

    assert form(shifted(0, 16)) == (form(shifted(8, 16))[0], (0, 0))
    assert form(shifted(8, 16))[1] == (8, 16)
    assert form(shifted(8, 16))[0] != form(shifted(8, 32))[0]


def test_steps_over_one_tensor_share_their_code():
    def steps(x, w):
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ w)
        return h, x.flip(0) + 1

    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(12, 5, 7, generator=made), torch.randn(7, 7, generator=made) / 7
    with records.collect() as found:
        got = kiln.compile(steps, fullgraph=True)(x, w)
    torch.testing.assert_close(got, steps(x, w))
    (code,) = found.codes
    assert code.kernels >= 12 and code.distinct <= 5


def test_stores_that_are_added_are_seen():
    nest, more = scaled(), scaled(op="add")
    (store,) = more.stores
    assert len(nest.terms()) == 3 and [b.name for b in nest.used()] == ["x", "y"]
    nest.stores.append(store)
    assert len(nest.terms()) == 6 and len(nest.used()) == 4
