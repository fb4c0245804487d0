"""Layers that are alike are interpreted once and copied; one that differs in anything is interpreted itself."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records
from kiln.capture import repeated
from kiln.check.tree import Moved
from tests.support import t

SEEN: list[torch.Tensor] = []
COUNT = 0
SCALE = 2.0


class Block(nn.Module):
    """A layer with a child, parameters, a buffer, an attribute of each kind, and a loop."""

    def __init__(self, inner: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)
        self.register_buffer("shift", torch.full((4,), 0.1))
        self.p, self.kinds, self.sizes = 0.5, ("relu", 2), [1, 2]

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.up(self.norm(x)).relu()
        for size in self.sizes:
            y = y * size
        return x + F.dropout(self.down(y), self.p, self.training) * scale + self.shift


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(kind: type = Block, count: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(*[kind() for _ in range(count)])


@pytest.fixture
def copies(monkeypatch):
    """The modules whose calls were copied, in order."""
    found: list[nn.Module] = []
    real = repeated.copied

    def copied(m, earlier, module, tensors):
        result = real(m, earlier, module, tensors)
        found.append(module)
        return result

    monkeypatch.setattr(repeated, "copied", copied)
    return found


def outcome(model, x, call):
    """What a call of the model gives: values, gradients, buffers, attributes and random numbers used."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = call(x)
    leaves = [out] if isinstance(out, torch.Tensor) else list(out)
    if any(leaf.requires_grad for leaf in leaves):
        sum(leaf.sum() for leaf in leaves if leaf.requires_grad).backward()
    grads = [x.grad] + [p.grad for p in model.parameters()]
    model.zero_grad()
    buffers = [b.clone() for b in model.buffers()]
    return [leaf.detach() for leaf in leaves], grads, buffers, torch.get_rng_state()


def graph_of(model, x, monkeypatch, backend="eager"):
    """The captured graph without any copying, and its guards."""
    with monkeypatch.context() as patch, records.collect() as found:
        patch.setattr(repeated, "MOST", 0)
        kiln.compile(copy.deepcopy(model), backend=backend, fullgraph=True)(x.clone().requires_grad_())
    return found.graphs[0].graph.code, sorted(map(str, found.graphs[0].guards))


def check(model, x, backend="eager"):
    """Compile the model: equal to eager in two calls, one graph, no fallback."""
    twin = copy.deepcopy(model)
    compiled = kiln.compile(model, backend=backend, fullgraph=True)
    with records.collect() as found:
        for _ in range(2):
            torch.testing.assert_close(outcome(model, x, compiled), outcome(twin, x, twin))
    assert len(found.graphs) == 1 and not found.breaks and not found.fallbacks
    return found.graphs[0].graph


X = t(3, 4)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_equal_layers_are_copied(copies, monkeypatch, train, backend):
    model = stack().train(train)
    code, guards = graph_of(model, X, monkeypatch, backend)
    with records.collect() as found:
        graph = check(model, X, backend)
    assert copies == list(model.layers)[2:]  # the first reads a tensor from outside, the second a result
    assert graph.code == code
    assert sorted(map(str, found.graphs[0].guards)) == guards


def test_nodes_of_copies_tell_their_own_places(copies, monkeypatch):
    model = stack()
    with records.collect() as found:
        kiln.compile(model, backend="eager")(X)
    told = [
        (n.meta["stack_trace"], n.meta["module"])
        for n in found.graphs[0].graph.graph.nodes
        if n.op != "output"
    ]
    with monkeypatch.context() as patch, records.collect() as found:
        patch.setattr(repeated, "MOST", 0)
        kiln.reset()
        kiln.compile(model, backend="eager")(X)
    nodes = found.graphs[0].graph.graph.nodes
    assert told == [(n.meta["stack_trace"], n.meta["module"]) for n in nodes if n.op != "output"]
    assert len(copies) == 2


def rebuilt(change):
    """A stack in which `change` was made to the last layer but one, of five."""
    model = stack(count=5)
    change(model.layers[3], model)
    return model


def set_forward(layer, model):
    layer.forward = types.MethodType(lambda self, x: x - self.up.bias.sum(), layer)


def set_child_forward(layer, model):
    layer.down.forward = lambda x: x[..., :4] * 3


def double_hook(module, args, out):
    return out * 2


def early_hook(module, args):
    return (args[0] + 1,)


class Louder(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 4


CHANGES = {
    "number": lambda layer, model: setattr(layer, "p", 0.25),
    "kind of number": lambda layer, model: setattr(layer, "p", 0),
    "text in a tuple": lambda layer, model: setattr(layer, "kinds", ("gelu", 2)),
    "longer list": lambda layer, model: setattr(layer, "sizes", [1, 2, 3]),
    "item of a list": lambda layer, model: setattr(layer, "sizes", [1, 5]),
    "tuple for a list": lambda layer, model: setattr(layer, "sizes", (1, 2)),
    "training flag": lambda layer, model: layer.train(not layer.training),
    "training flag of a child": lambda layer, model: layer.norm.train(not layer.training),
    "width": lambda layer, model: model.layers.__setitem__(3, Block(inner=8)),
    "no bias": lambda layer, model: setattr(layer, "up", nn.Linear(4, 6, bias=False)),
    "class of a child": lambda layer, model: setattr(layer, "down", Louder(6, 4)),
    "frozen weights": lambda layer, model: layer.requires_grad_(False),
    "frozen weight": lambda layer, model: layer.up.weight.requires_grad_(False),
    "strides": lambda layer, model: setattr(layer.up, "weight", nn.Parameter(torch.randn(4, 6).t())),
    "buffer of other size": lambda layer, model: layer.register_buffer("shift", torch.full((1,), 0.2)),
    "buffer that is none": lambda layer, model: layer.register_buffer("extra", None),
    "hook": lambda layer, model: layer.register_forward_hook(double_hook),
    "early hook": lambda layer, model: layer.register_forward_pre_hook(early_hook),
    "hook of a child": lambda layer, model: layer.down.register_forward_hook(double_hook),
    "forward": set_forward,
    "forward of a child": set_child_forward,
    "tied weight": lambda layer, model: setattr(layer.up, "weight", model.layers[2].up.weight),
    "tied within": lambda layer, model: setattr(layer.norm, "bias", layer.norm.weight),
    "shared child": lambda layer, model: setattr(layer, "up", model.layers[1].up),
    "shared layer": lambda layer, model: model.layers.__setitem__(3, model.layers[2]),
    "wrapped": lambda layer, model: model.layers.__setitem__(3, nn.Sequential(layer)),
    "parametrized": lambda layer, model: nn.utils.parametrizations.orthogonal(layer.up),
    "attribute too many": lambda layer, model: setattr(layer, "other", 3),
}
#: Changes that the program cannot see.
UNSEEN = {"text in a tuple", "training flag of a child", "buffer that is none", "attribute too many"}
#: Those that make something the same where others have two that are alike.
SHARING = {"shared child"}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("train", [False, True])
def test_a_layer_that_differs_is_not_copied(copies, monkeypatch, name, train):
    model = stack(count=5).train(train)
    CHANGES[name](model.layers[3], model)
    layers = list(model.layers)
    code, _ = graph_of(model, X, monkeypatch)
    assert check(model, X).code == code
    if name == "shared layer":
        assert copies == [layers[2], layers[4]]
    elif name in UNSEEN | SHARING:
        assert copies == layers[2:]
    else:
        assert layers[3] not in copies and copies.count(layers[4]) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(copies, dtype):
    model = stack(count=5)
    model.layers[3].to(dtype)
    model.layers[3].register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))
    model.layers[3].register_forward_hook(lambda module, args, out: out.to(torch.float32))
    check(model, X)
    assert copies == [model.layers[2], model.layers[4]]


AFTERWARDS = {
    "number": lambda layer: setattr(layer, "p", 0.125),
    "list": lambda layer: layer.sizes.append(3),
    "training": lambda layer: layer.train(),
    "parameter": lambda layer: setattr(layer.up, "weight", nn.Parameter(torch.ones(6, 4))),
    "hook": lambda layer: layer.down.register_forward_hook(double_hook),
    "child": lambda layer: setattr(layer, "down", Louder(6, 4)),
    "forward": lambda layer: set_forward(layer, None),
    "buffer": lambda layer: setattr(layer, "shift", torch.ones(4)),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_copies_are_guarded(copies, name):
    """A change to a copied layer after the first call is seen by the next one."""
    model = stack().eval()
    twin = copy.deepcopy(model)
    compiled = kiln.compile(model, backend="eager")
    compiled(X)
    assert model.layers[2] in copies
    for changed in (model, twin):
        torch.manual_seed(3)
        AFTERWARDS[name](changed.layers[2])
    torch.testing.assert_close(outcome(model, X, compiled), outcome(twin, X, twin))


@pytest.mark.parametrize("name", AFTERWARDS)
def test_guards_of_copies_are_written_when_one_fails(copies, monkeypatch, name):
    """Copies check the guards of the first layer over their own paths; no guard object is made for that."""
    written: list[Moved] = []
    real = Moved.guards
    monkeypatch.setattr(Moved, "guards", lambda self: written.append(self) or real(self))
    model = stack(count=6).eval()
    compiled = kiln.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), model(X))
    assert len(copies) >= 4 and not written
    AFTERWARDS[name](model.layers[4])
    with records.collect() as seen:
        compiled(X)
    assert len(written) == len(set(map(id, written)))
    (found,) = seen.recompiles
    assert found.reasons[0].startswith("self.layers.4")
    assert found.failures[0].place is not None


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Global(Block):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return super().forward(x) * COUNT


class Listing(Block):
    def forward(self, x):
        SEEN.append(x)
        return super().forward(x) + len(SEEN)


class Scaled(Block):
    def forward(self, x):
        return super().forward(x) * SCALE


class ScaledStack(Stack):
    def forward(self, x):
        global SCALE
        for i, layer in enumerate(self.layers):
            SCALE = float(i)
            x = layer(x)
        return x


def reset():
    global COUNT, SCALE
    COUNT, SCALE = 0, 2.0
    SEEN.clear()


@pytest.mark.parametrize("kind", [Counting, Global, Listing])
def test_writes_are_made_for_every_layer(copies, kind):
    model = stack(kind).eval()
    twin = copy.deepcopy(model)
    compiled = kiln.compile(model, backend="eager", fullgraph=True)
    reset()
    got = [compiled(X), compiled(X)]
    state = COUNT, len(SEEN), [getattr(layer, "calls", 0) for layer in model.layers]
    reset()
    torch.testing.assert_close(got, [twin(X), twin(X)])
    assert state == (COUNT, len(SEEN), [getattr(layer, "calls", 0) for layer in twin.layers])
    reset()
    assert not [layer for layer in copies if type(layer) is kind]


def test_a_global_written_between_calls(copies):
    torch.manual_seed(0)
    model = ScaledStack(*[Scaled() for _ in range(4)]).eval()
    reset()
    expected = model(X)
    reset()
    torch.testing.assert_close(kiln.compile(model, backend="eager", fullgraph=True)(X), expected)
    reset()
    assert not copies


class Gathering(nn.Module):
    """Gives its layers a list made here, which they fill."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Filling() for _ in range(4)])

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = layer(x, found)
        return (x, *found)


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, found):
        found.append(x * len(found))
        return self.inner(x)


def test_a_list_that_layers_fill(copies):
    torch.manual_seed(0)
    check(Gathering(), X)
    assert not copies


class Ordered(nn.Module):
    """Layers that ask which one they are."""

    def __init__(self, first) -> None:
        super().__init__()
        self.inner, self.peers = nn.Linear(4, 4), [first or self]

    def forward(self, x):
        return self.inner(x) + (1 if self.peers[0] is self else 2)


def test_which_layer_it_is(copies):
    torch.manual_seed(0)
    first = Ordered(None)
    model = Stack(Ordered(first), Ordered(first), Ordered(first), first, Ordered(first))
    check(model, X)
    assert first not in copies and len(copies) == 2


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True)


@pytest.mark.parametrize("train", [False, True])
def test_buffers_that_are_written(copies, train):
    check(stack(Batched).train(train), X)
    assert len(copies) == 2


class Editing(Stack):
    """Changes what its layers give in place, shape and all."""

    def forward(self, x):
        x = x + 1
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x.mul_(i + 1)
            if i == 2:
                x.t_()
                x = x.t().contiguous()
        return x


def test_results_that_are_written(copies):
    torch.manual_seed(0)
    model = Editing(*[Block() for _ in range(5)]).eval()
    compiled = kiln.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
    assert copies == [model.layers[i] for i in (1, 2, 4)]  # the fourth is given a view


class Overwriting(Block):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


def test_arguments_that_are_written(copies):
    model = stack(Overwriting).eval()
    with torch.no_grad():
        torch.testing.assert_close(kiln.compile(model, backend="eager")(X.clone()), model(X.clone()))
    assert not copies


class Returning(nn.Module):
    """Gives its argument, a parameter, a new tensor and a constant, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, again):
        same = x.to(torch.float32)
        return {"same": same, "weight": self.inner.weight, "new": [self.inner(x), 3], "equal": x is again}


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returning() for _ in range(4)])

    def forward(self, x):
        x, total, equal = x + 1, 0, 0
        for i, layer in enumerate(self.layers):
            found = layer(x, x if i % 2 else x * 1)
            found["new"].append(i)
            x = found["new"][0] + found["same"] @ found["weight"] * found["new"][1] + len(found["new"])
            equal = equal * 2 + found["equal"]
        return x * equal


def test_results_of_every_kind(copies):
    torch.manual_seed(0)
    model = Taking()
    check(model, X)
    assert copies == list(model.layers)[2:]


class Quiet(nn.Module):
    """Switches gradients off for a part, and may be called under other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            weight = self.inner.weight.softmax(0)
        return self.inner(x) * weight.sum() + x


class Switching(Stack):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            with torch.set_grad_enabled(i != 2):
                x = layer(x)
        return x


def test_switches(copies, monkeypatch):
    torch.manual_seed(0)
    model = Switching(*[Quiet() for _ in range(5)])
    code, _ = graph_of(model, X, monkeypatch)
    assert check(model, X).code == code
    assert model.layers[2] not in copies


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Block()

    def forward(self, x):
        for _ in range(6):
            x = self.cell(x)
        return x


def test_one_module_called_again_and_again(copies):
    torch.manual_seed(0)
    model = Recurrent()
    check(model, X)
    assert copies == [model.cell] * 4


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


def test_what_a_copy_inside_read_is_compared(copies, monkeypatch):
    """A layer with a copied layer in it is copied only where that one is the same, too."""
    torch.manual_seed(0)
    model = Stack(Nested(), Nested(), Nested(), Nested())
    model.layers[3].second.sizes = [1, 3]
    code, _ = graph_of(model, X, monkeypatch)
    assert check(model, X).code == code
    assert model.layers[2] in copies and model.layers[3] not in copies and model.layers[3].first in copies


class Breaking(Stack):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 3:
                kiln.graph_break()
        return x


def test_a_break_after_copies(copies):
    torch.manual_seed(0)
    model = Breaking(*[Block() for _ in range(6)]).eval()
    compiled = kiln.compile(model, backend="eager")
    with records.collect() as found:
        torch.testing.assert_close(compiled(X), model(X))
    assert len(found.graphs) == 2 and model.layers[3] in copies


class Inspecting(Stack):
    def forward(self, x):
        x = super().forward(x)
        return x, x.grad_fn.name() == "AddBackward0", x._version


def test_a_program_that_looks_at_the_history_of_tensors(copies):
    torch.manual_seed(0)
    model = Inspecting(*[Block() for _ in range(4)]).eval()
    got, expected = kiln.compile(model, backend="eager")(X), model(X)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1:] == expected[1:]


def test_sizes_that_vary(copies):
    model = stack().eval()
    compiled = kiln.compile(model, backend="eager", dynamic=True)
    with records.collect() as found:
        for n in (3, 5, 9):
            torch.testing.assert_close(compiled(t(n, 4)), model(t(n, 4)))
    assert len(found.graphs) == 1 and len(copies) == 2


def test_inference_mode(copies):
    model = stack().eval()
    with torch.inference_mode():
        torch.testing.assert_close(kiln.compile(model, backend="kiln")(X), model(X))
    assert len(copies) == 2
