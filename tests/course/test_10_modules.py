"""Modules: containers, sharing, buffers and attributes changed in forward, hooks, parametrisation, checkpoint, custom ops."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.support import RECOMPILES, How, kiln, one_graph, pin, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
SEQ = t(2, 3, 4)
IMG = t(2, 3, 8, 8)
LOG: list = []


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Block(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.scale = 0.5

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3, bias=False)})
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4) * i) for i in range(2)])
        self.table = nn.ParameterDict({"k": nn.Parameter(torch.ones(4))})
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)

    def forward(self, x, head="a"):
        for i, block in enumerate(self.blocks):
            x = block(x) + self.weights[i % len(self.weights)]
        x = x * self.table["k"] + self.offset
        return {name: h(x) for name, h in self.heads.items() if head in (name, "all")}


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 2), X), "Bilinear": (lambda: Twice(nn.Bilinear(4, 4, 2)), X),
    "Embedding": (lambda: nn.Embedding(5, 3), torch.tensor([[1, 4], [0, 2]])),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), torch.tensor([[1, 4], [0, 2]])),
    "Conv1d": (lambda: nn.Conv1d(3, 2, 2), SEQ), "Conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), IMG),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), t(1, 1, 4, 4, 4)), "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 2, 2), IMG),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), X), "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMG),
    "BatchNorm eval": (lambda: nn.BatchNorm2d(3).eval(), IMG), "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3), IMG),
    "LayerNorm": (lambda: nn.LayerNorm(4), X), "GroupNorm": (lambda: nn.GroupNorm(3, 3), IMG), "RMSNorm": (lambda: nn.RMSNorm(4), X),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMG), "AvgPool2d": (lambda: nn.AvgPool2d(2), IMG),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((1, None)), IMG), "Dropout": (lambda: nn.Dropout(0.5), X),
    "Dropout eval": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Tanh()).eval(), X), "GELU": (lambda: nn.GELU(), X), "PReLU": (lambda: nn.PReLU(), X),
    "Softmax": (lambda: nn.Softmax(-1), X), "Upsample": (lambda: nn.Upsample(scale_factor=2), IMG),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), t(1, 4, 2, 2)), "Flatten": (lambda: nn.Flatten(), IMG),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), X), "ZeroPad2d": (lambda: nn.ZeroPad2d(1), IMG), "Identity": (lambda: Twice(nn.Identity()), X),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), SEQ), "GRU": (lambda: nn.GRU(4, 5), SEQ),
    "RNN": (lambda: nn.RNN(4, 5, nonlinearity="relu"), SEQ), "LSTMCell": (lambda: nn.LSTMCell(4, 5), X), "GRUCell": (lambda: nn.GRUCell(4, 5), X),
    "RNNCell": (lambda: nn.RNNCell(4, 5), X), "MultiheadAttention": (lambda: Selfish(nn.MultiheadAttention(4, 2, batch_first=True)), SEQ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), SEQ),
    "TransformerEncoder eval": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2,
                                                              enable_nested_tensor=False).eval(), SEQ),
    "TransformerDecoderLayer": (lambda: Twice(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0)), SEQ),
    "CosineSimilarity": (lambda: Twice(nn.CosineSimilarity()), X), "MSELoss": (lambda: Twice(nn.MSELoss()), X),
    "Fold": (lambda: nn.Fold((4, 4), 2), t(1, 8, 9)), "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMG),
    "SyncBatchNorm eval": (lambda: nn.SyncBatchNorm(3).eval(), IMG), "AlphaDropout": (lambda: nn.AlphaDropout(), X),
}  # fmt: skip


class Twice(nn.Module):
    """Calls a module of two inputs, or one, with the same input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 1) if isinstance(self.inner, nn.Identity) else self.inner(x, x * 2)


class Selfish(Twice):
    def forward(self, x):
        return self.inner(x, x, x, need_weights=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, x = LAYERS[name]
    torch.manual_seed(0)
    one_graph(make(), x.clone().requires_grad_(x.is_floating_point()))


def test_layer_that_reads_a_number_from_its_buffer():
    same_as_eager(nn.BatchNorm1d(4, momentum=None), G, how=RECOMPILES)


def test_nested_modules_with_containers():
    one_graph(Net(), G)
    one_graph(Net(), G, head="all")
    one_graph(Net(1), G, "b")


@program(G, mlp())
def test_module_argument(x, m):
    return m(x) + 1, m[0].weight.shape, len(m), isinstance(m[1], nn.ReLU), m.training


NET = mlp()


@program(G)
def test_global_module(x):
    return NET(x).sum()


@program(X, nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]))
def test_module_list(x, layers):
    for i, layer in enumerate(layers):
        x = layer(x) + i
    for layer in reversed(layers[:2]):
        x = layer(x)
    return x, len(layers), layers[-1](x), [type(m).__name__ for m in layers], layers[0] in layers, [i for i, _ in enumerate(layers)]


@program(X, nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU()}))
def test_module_dict(x, d):
    for key in d:
        x = d[key](x)
    for key, m in d.items():
        x = m(x) + len(key)
    return x, list(d.keys()), "a" in d, len(d), [type(m).__name__ for m in d.values()]


@program(X, mlp())
def test_sequential(x, seq):
    y = x
    for layer in seq:
        y = layer(y)
    return seq(x) - y, seq[:2](x), seq[-1].out_features, len(seq), nn.Sequential(*[seq[0], seq[1]])(x)


@program(X, nn.Sequential(collections.OrderedDict(first=nn.Linear(4, 4), act=nn.Tanh())))
def test_named_sequential(x, seq):
    return seq(x), seq.first(x), [n for n, _ in seq.named_children()]


@program(X, nn.ParameterList([t(4), t(4)]), nn.ParameterDict({"w": nn.Parameter(t(4))}))
def test_parameter_containers(x, params, table):
    for p in params:
        x = x * p
    return x + table["w"], len(params), list(table), params[0].shape, [k for k, v in table.items()]


@program(X, Net())
def test_walking_a_module(x, net):
    total = sum(p.sum() for p in net.parameters())
    names = [n for n, _ in net.named_parameters()]
    kinds = [type(m).__name__ for m in net.modules()]
    return x * total, names[:3], len(names), kinds[:4], [n for n, b in net.named_buffers()], [n for n, _ in net.named_children()], \
        net.get_submodule("blocks.0").scale, sum(1 for _ in net.named_modules())  # fmt: skip


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.tied = [self.a, self.c]

    def forward(self, x):
        return self.b(self.a(x)) + self.c(x) + F.linear(x, self.tied[0].weight), self.a is self.b


def test_shared_submodules_and_tied_weights():
    one_graph(Shared(), G)


class Stats(nn.Module):
    """Buffers and attributes changed in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(3, 4), persistent=False)
        self.last, self.seen, self.names = None, [], {}

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.steps += 1
        self.cache = x * 2
        self.last = x.detach() + 1
        self.names["x"] = x.shape
        return x - self.mean + self.cache, self.steps * 2


def test_buffers_updated_in_forward():
    one_graph(Stats(), X, how=How(runs=2))


class Ranges(nn.Module):
    """Buffers that each call puts others in the place of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(1))
        self.register_buffer("high", torch.zeros(1))

    def forward(self, x):
        self.low = self.low * 0.9 + x.detach().amin() * 0.1
        self.high = torch.maximum(self.high, x.detach().amax())
        return x * self.high - self.low


@pytest.mark.parametrize("x", [X, G])
def test_buffers_replaced_in_forward(x):
    one_graph(nn.Sequential(Ranges(), Ranges(), Ranges()), x, how=How(runs=2))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        return x * self.calls


def test_number_counted_in_forward():
    r = same_as_eager(Stateful(), X, how=RECOMPILES)
    pin(r, graphs=r.graphs, how=How(runs=2))


class TensorState(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(3, 4)

    def forward(self, x):
        self.h = self.h * 0.5 + x
        return self.h.sin()


def test_plain_tensor_attribute_updated():
    one_graph(TensorState(), X)


class Modal(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.bn, self.lin = nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.drop(self.bn(self.lin(x)))
        return x if self.training else x * 2


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_train_and_eval(mode):
    one_graph(getattr(Modal(), mode)(), G)


def test_train_and_eval_set_in_forward():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Modal()

        def forward(self, x):
            self.inner.eval()
            y = self.inner(x)
            self.inner.train()
            return y + self.inner(x)

    one_graph(Switch(), X)


def hooked(kind):
    m = mlp()
    target = m[2]
    match kind:
        case "pre":
            target.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
        case "pre keyword":
            target.register_forward_pre_hook(lambda mod, args, kw: ((args[0] + 1,), kw), with_kwargs=True)
        case "forward":
            target.register_forward_hook(lambda mod, args, out: out + args[0].sum())
        case "forward keyword":
            target.register_forward_hook(lambda mod, args, kw, out: out * len(kw) + 1, with_kwargs=True)
        case "no result":
            target.register_forward_hook(lambda mod, args, out: LOG.append(tuple(out.shape)))
        case "keeps activation":
            target.register_forward_hook(lambda mod, args, out: setattr(mod, "act", out.detach()))
        case "root":
            m.register_forward_pre_hook(lambda mod, args: (args[0] + 1,))
            m.register_forward_hook(lambda mod, args, out: (out, out * 2))
        case "several":
            for k in range(3):
                target.register_forward_hook(lambda mod, args, out, k=k: out + k, prepend=k == 2)
        case "backward":
            target.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,))
        case "backward pre":
            target.register_full_backward_pre_hook(lambda mod, go: (go[0] * 3,))
        case "backward root":
            m.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,))
    return m


HOOKS = ["pre", "pre keyword", "forward", "forward keyword", "no result", "keeps activation", "root", "several", "backward",
         "backward pre", "backward root"]  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks(kind):
    one_graph(hooked(kind), G, how=How(setup=LOG.clear, state=lambda: LOG))


def test_hook_removed_again():
    m = mlp()
    handle = m[0].register_forward_hook(lambda mod, args, out: out * 100)
    handle.remove()
    one_graph(m, X)


def test_global_forward_hook():
    handle = nn.modules.module.register_module_forward_hook(lambda mod, args, out: out * 2)
    try:
        one_graph(mlp(), X)
    finally:
        handle.remove()


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def test_parametrization():
    m = nn.Linear(4, 4)
    parametrize.register_parametrization(m, "weight", Symmetric())
    one_graph(m, G)
    one_graph(nn.Sequential(m, nn.ReLU(), m), X)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_library_parametrizations(wrap):
    torch.manual_seed(0)
    one_graph(nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU()), X)


@pytest.mark.filterwarnings("ignore")
def test_lazy_modules_after_initialisation():
    torch.manual_seed(0)
    m = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    m(X)
    one_graph(m, X)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_checkpoint(reentrant):
    m = mlp()

    def f(x):
        return checkpoint(m, x, use_reentrant=reentrant) + checkpoint(lambda y: y.sin() * x, x, use_reentrant=reentrant)

    one_graph(f, G)


def test_checkpoint_with_dropout_and_keywords():
    def layer(x, *, p):
        return F.dropout(x, p, training=True).exp()

    one_graph(lambda x: checkpoint(layer, x, p=0.5, use_reentrant=False), G)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k=1):
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 30 * x**2 * ctx.k, None


class Split(torch.autograd.Function):
    @staticmethod
    def forward(x, n):
        return x * n, (x > 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.n = inputs
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.n * 7, None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


@program(G)
def test_autograd_function(x):
    return Cube.apply(x, 2) + 1, Straight.apply(x) * 2


@program(G)
def test_autograd_function_with_setup_context_and_several_outputs(x):
    y, mask = Split.apply(x, 3)
    return y + 1, mask


@program(G)
def test_autograd_function_under_no_grad(x):
    with torch.no_grad():
        y = Cube.apply(x, 2)
    return y, Cube.apply(x)


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Cube.apply(x * self.w, 2).sum() + Straight.apply(self.w).sum()


def test_autograd_function_in_a_module():
    one_graph(Clipped(), G)


@torch.library.custom_op("kilncourse::scale", mutates_args=())
def scale_op(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@scale_op.register_fake
def _(x, k):
    return torch.empty_like(x)


scale_op.register_autograd(lambda ctx, g: (g * ctx.k, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]))


@torch.library.custom_op("kilncourse::fill", mutates_args={"x"})
def fill_op(x: torch.Tensor, v: float) -> None:
    x.fill_(v)


LIBRARY = torch.library.Library("kilncourse2", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


@program(G)
def test_custom_op(x):
    return scale_op(x + 1, 2.0) * 3, torch.ops.kilncourse.scale(x, 0.5)


@program(X)
def test_custom_op_that_mutates(x):
    y = x + 1
    fill_op(y, 3.0)
    torch.ops.kilncourse.fill(x, 2.0)
    return y * 2


@program(G)
def test_library_op(x):
    return torch.ops.kilncourse2.twice(x) + torch.ops.aten.relu(x) + torch.ops.aten.add.Tensor(x, x)


@program(X)
def test_module_made_inside(x):
    torch.manual_seed(0)
    lin = nn.Linear(4, 2)
    act = nn.ReLU()
    return act(lin(x)), lin.in_features


@program(X, mlp())
def test_attributes_of_modules(x, m):
    w = m[0].weight
    m.tag = "seen"
    return F.linear(x, w, m[0].bias), w.requires_grad, hasattr(m, "tag"), getattr(m[0], "missing", None), m[0].extra_repr(), \
        "weight" in m[0]._parameters, isinstance(m, nn.Module)  # fmt: skip


class Custom(nn.Module):
    """Overrides more than forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.opts = {"k": 2}

    def __call__(self, x, *args):
        return super().__call__(x + 1, *args)

    def __getattr__(self, name):
        return 7 if name == "seven" else super().__getattr__(name)

    def __getitem__(self, i):
        return self.lin.weight[i]

    def __len__(self):
        return self.opts["k"]

    @property
    def w(self):
        return self.lin.weight

    def forward(self, x):
        return self.lin(x) * self.seven + self[0] + self.w.sum() * len(self), self.helper(x)

    @torch.no_grad()
    def helper(self, x):
        return x @ self.w


def test_module_that_overrides_call_and_getattr():
    one_graph(Custom(), G)


def test_methods_of_modules_as_entries():
    one_graph(Custom().helper, X)
    one_graph(Custom().forward, X)


class WithMissing(nn.Module):
    def forward(self, x):
        try:
            return self.nothing(x)
        except AttributeError as e:
            return x + 1, str(e)


def test_missing_attribute():
    one_graph(WithMissing(), X)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, scale=1, *, shift=0, **kw):
        return self.lin(x) * scale + shift + kw.get("extra", 0)


class Derived(Base):
    def forward(self, x, *args, **kw):
        return super().forward(x, *args, **kw).relu()


def test_inherited_forward_with_keywords():
    one_graph(Derived(), X, 2, shift=1, extra=3)
    one_graph(nn.Sequential(Derived(), Base()), X)


class Attention(nn.Module):
    def __init__(self, d=4, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())

    def forward(self, x, past=None):
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        s = (q @ k.mT) / k.shape[-1] ** 0.5
        s = s.masked_fill(~self.mask[k.shape[2] - n : k.shape[2], : k.shape[2]], torch.finfo(s.dtype).min)
        y = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)
        return self.out(y), (k, v)


def test_attention_with_cache():
    m = Attention()
    one_graph(m, SEQ)
    one_graph(m, SEQ, (t(2, 2, 1, 2), t(2, 2, 1, 2)))


class ResNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.down = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        out = self.relu(self.bn(self.conv(x)))
        out += self.down(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.relu(out), 1), 1))


def test_small_convolutional_net():
    one_graph(ResNetish(), IMG)
    one_graph(ResNetish().eval(), IMG)


def test_training_step_outside():
    torch.manual_seed(0)
    eager, mine = mlp(), mlp()
    compiled = kiln.compile(mine, backend="eager")
    for m, run in ((eager, eager), (mine, compiled)):
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            run(X).pow(2).sum().backward()
            opt.step()
    for a, b in zip(eager.parameters(), mine.parameters()):
        torch.testing.assert_close(a, b)


@program(X, nn.Linear(4, 4))
def test_functional_call_and_state_dict(x, m):
    params = {k: v * 2 for k, v in m.named_parameters()}
    return torch.func.functional_call(m, params, (x,)), list(m.state_dict())


def test_frozen_parameters():
    m = mlp()
    m[0].requires_grad_(False)
    one_graph(m, G)


def test_module_in_several_places_of_the_arguments():
    m = nn.Linear(4, 4)
    one_graph(lambda a, b, x: (a(x) + b["m"](x), a is b["m"]), m, {"m": m}, X)


def test_module_with_half_precision_and_autocast():
    one_graph(mlp().bfloat16(), X.bfloat16())

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.lin(x)
            return y.float() + self.lin(x)

    one_graph(Cast(), G)


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Buffer(torch.full((4,), 2.0))
        self.shift = nn.Buffer(torch.ones(4), persistent=False)
        self.plain = torch.zeros(4)


def test_buffers_of_modules_made_here_are_their_state():
    def f(x):
        module = Holding()
        return list(module.state_dict()), [name for name, _ in module.named_buffers()], x * module.scale + module.shift

    one_graph(f, t(3, 4))


class Failing(nn.Module):
    def forward(self, x, fails=True):
        if fails:
            raise ValueError("no")
        return x + 1


def test_hooks_that_are_always_called_are_called_where_a_module_raises():
    module, seen = Failing(), []
    module.register_forward_hook(lambda module, args, result: seen.append(result is None), always_call=True)

    def f(x):
        seen.clear()
        try:
            module(x)
        except ValueError as error:
            seen.append(str(error))
        return list(seen), module(x, fails=False)

    one_graph(f, t(3, 4))


@program(X)
def test_modules_made_without_memory(x):
    with torch.device("meta"):
        layer = torch.nn.Linear(4, 2)
    return layer(x.to("meta")).shape, layer.weight.device, torch.rand_like(layer.weight).device, x + 1


def test_a_call_with_a_star_does_not_show_what_is_called():
    class Unseen(nn.Linear):
        def __repr__(self):
            raise AssertionError("shown")

    inner = Unseen(4, 3)
    args = (X,)
    same_as_eager(lambda x: inner(*args) + x.sum(), X)
