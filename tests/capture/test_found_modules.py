"""Programs met in modules of the field: recurrent layers, numpy constants, folded tensors, odd attribute hooks."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kiln.base import records
from tests.support import RECOMPILES, kiln, one_graph, pin, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
SEQ = t(3, 2, 4)
TABLE = np.arange(4.0)
SCALE = np.float32(2.5)


class Options(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


OPTIONS = Options(deep=True, inner=Options(width=3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("train", [False, True])
def test_recurrent_layers_are_one_graph(kind, train):
    torch.manual_seed(0)
    one_graph(kind(4, 5, num_layers=2, bidirectional=True).train(train), SEQ)


@program(X)
def test_numpy_on_constants(x):
    half = int(np.ceil(x.shape[0] / 2))
    eye = torch.autograd.Variable(torch.from_numpy(np.array([1, 0, 0, 1]).astype(np.float32))).view(1, 4).repeat(x.shape[0], 1)
    eye += 1
    return x * half * np.sqrt(4.0), eye, np.array([1, 2]), np.float64(2) * x


@program(X)
def test_numpy_from_outside(x):
    return x * torch.as_tensor(TABLE) + torch.tensor(np.linspace(0, 1, 4)) * SCALE + TABLE[1], np.prod(x.shape)


def test_an_array_that_changes_recompiles():
    table = np.arange(4.0)

    def f(x):
        return x + torch.as_tensor(table)

    compiled = kiln.compile(f, backend="eager")
    assert torch.equal(compiled(X), f(X))
    table[1] = 7
    assert torch.equal(compiled(X), f(X))


@program(X, t(7))
def test_sizes_through_tensors(x, y):
    gap = torch.tensor([y.size(0) - x.size(0)])
    x = F.pad(x, [gap // 2, gap - gap // 2])
    if gap > 0:
        x = x + 1
    return x, int(torch.tensor(3.7).floor()), torch.tensor([1.0, 2.0]).sum().item()


@program(X, graphs=2, breaks=1)
def test_a_changed_constant_is_no_constant(x):
    a = torch.tensor([1.0, 2.0])
    view = a[1:]
    a.fill_(-5)
    return x + 1 if view.sum() > 0 else x - 1


@program(X, graphs=2, breaks=1)
def test_a_constant_changed_through_data_is_no_constant(x):
    a = torch.tensor([1.0, 2.0])
    a.data.fill_(-5)
    return x + 1 if a.sum() > 0 else x - 1


@program(X, graphs=2, breaks=1)
def test_a_constant_changed_in_a_list_is_no_constant(x):
    a = torch.tensor([1.0, 2.0])
    torch._foreach_sub_([a, x.clone()], 5.0)
    return x + 1 if a.sum() > 0 else x - 1


@program(X, graphs=2, breaks=1)
def test_a_constant_changed_by_a_check_is_no_constant(x):
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([x / 0.0], found, torch.ones(()))
    return x + 1 if found > 0 else x - 1


LIBRARY = torch.library.Library("kiln_found", "DEF")
LIBRARY.define("count(Tensor(a!) x, Tensor y) -> Tensor")
LIBRARY.impl("count", lambda x, y: (x.add_(1), y * 2)[1], "CPU")
LIBRARY.impl("count", lambda x, y: torch.empty_like(y), "Meta")


@program(X, graphs=2, breaks=1)
def test_a_constant_changed_by_an_op_of_the_program_is_no_constant(x):
    count = torch.zeros(())
    y = torch.ops.kiln_found.count(count, x)
    return y + 1 if count > 0 else y - 1


@program(G)
def test_selection_by_a_constant_mask(x):
    mask = ~torch.eye(3, 4, dtype=torch.bool)
    return x[mask] * 2, x.masked_select(mask), x[torch.arange(3) > 0]


@program(X)
def test_a_tensor_of_tensors(x):
    parts = [x[i].sum() for i in range(3)]
    return torch.tensor(parts), torch.tensor([parts[:2], parts[1:]], dtype=torch.float64), torch.as_tensor([1, parts[0]])


@program(X)
def test_native_attribute_hooks(x):
    mine = Options()
    mine.bias = 5
    return x * OPTIONS.inner.width + mine.bias if OPTIONS.deep else x


@program(X)
def test_calls_that_change_nothing_are_nodes(x):
    return F.dropout(x.float().contiguous(), 0.5, training=False) + 1


def test_calls_that_change_nothing_are_counted():
    r = same_as_eager(lambda x: F.dropout(x.float().contiguous(), 0.5, training=False) + 1, X)
    pin(r)
    assert r.ops == 4


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        ctx.save_for_backward(x)
        ctx.keep = keep
        return x if keep else x.sign() * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


@program(G)
def test_autograd_function_in_generated_code(x):
    return Signed.apply(x, False) + 1


@program(X)
def test_autograd_function_without_gradients(x):
    with torch.no_grad():
        return Signed.apply(x, False) + 1, Signed.apply(x, True)


def test_lazy_modules_take_their_shapes_while_capturing():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))
    out = kiln.compile(net, backend="eager", fullgraph=True)(X)
    assert torch.equal(out, net(X))
    assert type(net[0]) is nn.Linear


def sweep(x, n):
    y = torch.zeros(3, 4)
    for _ in range(n):
        y = (x * 2 + y).sin()
        if y.sum() > 100:
            break
    return y


def test_a_loop_variable_that_nobody_reads_does_not_recompile():
    r = same_as_eager(sweep, X, 9)
    assert r.graphs <= 4


def mean(values):
    values = itertools.filterfalse(lambda v: v != v, iter(values))
    total = next(values)
    for n, v in enumerate(values, 2):
        total += v
    return total / n


def test_capture_leaves_generators_from_outside_alone():
    """The generator cannot be rebuilt after the break, so it comes to the next graph from outside."""
    same_as_eager(lambda x: mean((row * 2).sum() for row in x), X)


def test_the_contents_of_a_constant_keep_their_layout():
    def f(x):
        mask = (torch.arange(12).view(1, 3, 4, 1) * 2).transpose(1, 2).contiguous().view(-1, 3)
        return x + mask.sum(), mask

    pin(same_as_eager(f, X))


@program(X, graphs=2, breaks=2)
def test_the_text_of_a_tensor_is_not_made_while_capturing(x):
    return "{}/loss".format(x.sum()), "%s" % (x.mean(),)  # noqa: UP030, UP031, UP032


@program(X, nn.Parameter(t(4)))
def test_what_a_tensor_is(x, w):
    kinds = (torch.autograd.Variable, torch.Tensor, nn.Parameter, nn.Buffer, torch.FloatTensor, torch.LongTensor, tuple)
    return x + w, [isinstance(x, kind) for kind in kinds], [isinstance(w, kind) for kind in kinds]


@program(X, 0.0)
def test_a_layer_that_is_never_dropped_does_not_break(x, chance):
    for layer in (torch.sin, torch.cos):
        drawn = torch.rand([])
        if drawn < chance:
            continue
        if 1.0 > drawn:
            x = layer(x)
    return x


@program(X, 0.5, graphs=2, breaks=1)
def test_a_layer_that_may_be_dropped_is_decided_in_every_call(x, chance):
    return x if torch.rand([]) < chance else x.sin()


@program(t(8, 2), True)
def test_numbers_divided_by_torch_are_sizes(x, flag):
    chunks = torch.div(x.size(0), 3, rounding_mode="trunc") - 1
    made = torch.add(x.size(1), 2.5), torch.true_divide(7, 2), torch.mul(flag, flag), torch.floor_divide(-7, 2)
    return x.new_zeros(chunks), x.view(torch.div(x.size(0), 2, rounding_mode="floor"), 4), *made


class Seeding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.seed = int(torch.randint(9, ()))
        torch.manual_seed(ctx.seed)
        return x * torch.rand(4)

    @staticmethod
    def backward(ctx, grad):
        torch.manual_seed(ctx.seed)
        return grad * torch.rand(4)


class Reseeding(Seeding):
    @staticmethod
    def forward(ctx, x):
        ctx.seed = 5
        torch.manual_seed(ctx.seed)
        return x * torch.rand(4)


@pytest.mark.parametrize(("cls", "graphs"), [(Seeding, 2), (Reseeding, 3)])
def test_a_function_that_seeds_runs_in_python(cls, graphs):
    pin(same_as_eager(lambda x: cls.apply(x.sin()).cos(), G), graphs=graphs, breaks=1)


class Kept:
    def __init__(self):
        self.seen = {"all": []}


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        (kept.seen["all"] if isinstance(kept, Kept) else kept).extend((x * 3, 5))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


@pytest.mark.parametrize("make", [list, Kept], ids=["list", "object"])
def test_a_function_that_changes_what_it_is_given_runs_in_python(make):
    def f(x):
        kept = make()
        return Keeping.apply(x.sin(), kept).cos(), kept

    pin(same_as_eager(f, G), graphs=3, breaks=1)


@program(X, t(8, 3), graphs=2, breaks=1)
def test_bounds_of_a_slice_that_are_tensors_leave_with_it(x, table):
    start = x.long().sum() - 2
    return table[start : start + 2, :] + 1


@program(X, graphs=2, breaks=1)
def test_a_slice_of_tensors_is_made_again(x):
    part = slice(x.sum(), None, x)
    kiln.graph_break()
    return part.start, part.stop, x + part.step


@program(X, (slice(0, 2), slice(t(1), None)))
def test_slices_from_outside(x, parts):
    return x[parts[0], 1:], x + parts[1].start, parts[0], parts[1].stop


@torch.jit.script
def span(x, most: int):
    return torch.tensor(min(max(x.size(0), x.size(1)), most))


@torch.jit.script
def doubled(x):
    return x * 2 if x.size(0) > 2 else x


@program(X, t(8, 3))
def test_scripted_functions_without_branches_are_interpreted(x, table):
    half = span(x, 6) - 1
    return table[4 - half : 4 + half, :], doubled(x)


class Hooking(nn.Module):
    """Registers a hook on its layer in the forward pass: for the one call, or once for all."""

    def __init__(self, stays):
        super().__init__()
        self.layer, self.stays, self.handle = nn.Linear(4, 4), stays, None

    def forward(self, x):
        seen = []
        if self.stays:
            if self.handle is None:
                self.handle = self.layer.register_forward_hook(lambda module, args, out: out * 2)
            return self.layer(x)
        self.layer._forward_hooks[-1] = lambda module, args, out: seen.append(out)
        y = self.layer(x)
        del self.layer._forward_hooks[-1]
        return y + seen[0] + self.layer(y)


@pytest.mark.parametrize(("stays", "graphs"), [(False, 1), (True, 2)])
def test_hooks_registered_in_the_forward_pass_see_it(stays, graphs):
    torch.manual_seed(0)
    expected, module = Hooking(stays), Hooking(stays)
    module.load_state_dict(expected.state_dict())
    with kiln.records() as log:
        compiled = kiln.compile(module, backend="eager")
        for _ in range(4):
            torch.testing.assert_close(compiled(X), expected(X))
            assert len(module.layer._forward_hooks) == len(expected.layer._forward_hooks) == stays
    assert (len(log.graphs), len(log.breaks)) == (graphs, 0)
    if stays:
        module.handle.remove()
        assert not module.layer._forward_hooks


class Weakly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.__dict__["seen"] = weakref.ref(self.layer)
        return self.seen()(x), self.seen is weakref.ref(self.layer)


def test_weak_references_to_what_the_module_holds():
    module = Weakly()
    with kiln.records() as log:
        y, same = kiln.compile(module, backend="eager")(X)
    assert (len(log.graphs), len(log.breaks), same, module.seen()) == (1, 0, True, module.layer)
    torch.testing.assert_close(y, module.layer(X))


def test_checkpointed_sequences_are_one_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    one_graph(lambda x: torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False), X)


class Late(torch.nn.Sequential):
    def __init__(self, *layers):
        kiln.graph_break()
        super().__init__(*layers)


def test_a_module_is_called_whose_making_was_split():
    def f(x, layer):
        return Late(layer, torch.nn.ReLU())(x)

    same_as_eager(f, t(2, 3), torch.nn.Linear(3, 3), how=RECOMPILES)  # it is another one in each call


@pytest.mark.filterwarnings("ignore")
def test_torchscript_traces_a_module_while_its_maker_is_compiled():
    def f(x):
        return torch.jit.trace(torch.nn.Linear(3, 3), x)(x).shape

    with records.collect() as seen:
        assert kiln.compile(f, backend="eager")(t(2, 3)) == (2, 3)
    assert not seen.fallbacks
