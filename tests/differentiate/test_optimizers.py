"""Compiled optimizer steps: eager's parameters over 20 steps, two compiles, none for a changed learning rate."""

import pytest
import torch
from torch import nn, optim

import kiln
from kiln.base import records

# Corrections are rounded to the parameters' type once they are read: the last bits differ from eager's.
EXACT, CLOSE = {"rtol": 0, "atol": 0}, {"rtol": 1e-6, "atol": 1e-7}

CASES = {
    "sgd": (lambda p, **k: optim.SGD(p, 0.1, foreach=False, **k), EXACT),
    "sgd-momentum": (lambda p, **k: optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True, foreach=False, **k), EXACT),
    "sgd-foreach": (lambda p, **k: optim.SGD(p, 0.1, 0.9, foreach=True, **k), EXACT),
    "adam": (lambda p, **k: optim.Adam(p, 0.01, foreach=False, **k), CLOSE),
    "adam-foreach": (lambda p, **k: optim.Adam(p, 0.01, foreach=True, amsgrad=True, **k), CLOSE),
    "adamw": (lambda p, **k: optim.AdamW(p, 0.01, foreach=False, **k), CLOSE),
    "adamw-foreach": (lambda p, **k: optim.AdamW(p, 0.01, foreach=True, **k), CLOSE),
    "nadam": (lambda p, **k: optim.NAdam(p, 0.01, foreach=False, **k), CLOSE),
    "radam": (lambda p, **k: optim.RAdam(p, 0.01, foreach=False, **k), CLOSE),
    "radam-foreach": (lambda p, **k: optim.RAdam(p, 0.01, weight_decay=0.1, foreach=True, **k), CLOSE),
    "adamax": (lambda p, **k: optim.Adamax(p, 0.01, foreach=False, **k), CLOSE),
    "adamax-foreach": (lambda p, **k: optim.Adamax(p, 0.01, foreach=True, **k), CLOSE),
    "asgd": (lambda p, **k: optim.ASGD(p, 0.01, t0=4, foreach=False, **k), CLOSE),
    "asgd-foreach": (lambda p, **k: optim.ASGD(p, 0.01, t0=4, foreach=True, **k), CLOSE),
    "adagrad": (lambda p, **k: optim.Adagrad(p, 0.01, lr_decay=0.1, foreach=False, **k), CLOSE),
    "adadelta": (lambda p, **k: optim.Adadelta(p, foreach=True, **k), CLOSE),
    "rmsprop": (lambda p, **k: optim.RMSprop(p, 0.01, momentum=0.9, centered=True, foreach=True, **k), CLOSE),
    "rprop": (lambda p, **k: optim.Rprop(p, 0.01, foreach=True, **k), EXACT),
    "muon": (lambda p, **k: optim.Muon([q for q in p if q.dim() == 2], 0.01, **k), CLOSE),
}
if not hasattr(optim, "Muon"):
    del CASES["muon"]
CAPTURABLE = {name: case for name, case in CASES.items() if name.startswith("adam") and "max" not in name}


def train(make, step_of, **options):
    """The parameters after 20 steps with a learning rate that falls each time, and what was compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = make(model.parameters(), **options)
    step = step_of(optimizer)
    x = torch.linspace(-1, 1, 40).view(5, 8)
    with records.collect() as log:
        for i in range(20):
            for group in optimizer.param_groups:
                group["lr"] *= 0.95
            model.zero_grad()
            model(x).pow(2).sum().backward()
            step()
    return list(model.parameters()), log


def check(log):
    assert not log.fallbacks and not log.breaks
    assert len(log.graphs) <= 2, [r.reasons for r in log.recompiles]  # the first call makes the state


@pytest.mark.parametrize("name", CASES)
def test_compiled_step(name):
    make, tolerance = CASES[name]
    expected, _ = train(make, lambda optimizer: optimizer.step)
    got, log = train(make, lambda optimizer: kiln.compile(optimizer.step, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(got, expected, **tolerance)
    check(log)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable(name):
    """On the CPU eager refuses capturable optimizers, so the plain one is compared with."""
    make, _ = CASES[name]
    expected, _ = train(make, lambda optimizer: optimizer.step)
    compiled = lambda optimizer: kiln.compile(optimizer.step, backend="aot_eager", fullgraph=True)  # noqa: E731
    got, log = train(make, compiled, capturable=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # counts are of f32 here
    check(log)


def test_a_function_that_calls_the_step():
    def step_of(optimizer):
        @kiln.compile(backend="aot_eager", fullgraph=True)
        def step():
            optimizer.step()

        return step

    make, tolerance = CASES["sgd-momentum"]
    expected, _ = train(make, lambda optimizer: optimizer.step)
    got, log = train(make, step_of)
    torch.testing.assert_close(got, expected, **tolerance)
    check(log)


@pytest.mark.parametrize("foreach", (False, True))
def test_the_step_at_which_a_branch_changes(foreach):
    """What decides it is computed in double precision: at step 5 it is 4.996, and 5.02 in f32."""

    def stepped(step_of):
        torch.manual_seed(0)
        weight, scale = nn.Parameter(torch.randn(6, 3).double()), nn.Parameter(torch.randn(()))
        optimizer = optim.RAdam([weight, scale], 0.1, foreach=foreach)
        step, seen = step_of(optimizer), []
        for _ in range(9):
            weight.grad, scale.grad = torch.randn(6, 3).double(), torch.randn(())
            step()
            seen.append((weight.detach().clone(), scale.detach().clone()))
        return seen

    expected = stepped(lambda optimizer: optimizer.step)
    with records.collect() as log:
        got = stepped(lambda optimizer: kiln.compile(optimizer.step, fullgraph=True))
    torch.testing.assert_close([w for w, _ in got], [w for w, _ in expected], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close([s for _, s in got], [s for _, s in expected])
    check(log)


@pytest.mark.parametrize("make", (optim.RAdam, optim.AdamW))
def test_numbers_are_made_once_and_results_where_they_were(make, tmp_path):
    """Powers of counts are taken before the loops over parameters, which write in their place."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    optimizer = make(model.parameters(), 0.01)
    step = kiln.compile(optimizer.step, fullgraph=True)
    model(torch.randn(3, 64)).sum().backward()
    step()
    with kiln.config.patch(dump=str(tmp_path)):
        step()
    (loops,), (plan,) = ([p.read_text() for p in tmp_path.glob(f"*/*_{name}.txt")] for name in ("loops", "plan"))
    first, _, last = loops.partition("stage 1")
    assert "pow" in first and "pow" not in last
    assert plan.count(" = empty []") == plan.count(" = empty"), plan  # but for counts


def test_adafactor_asks_for_values():
    """The counts that a graph has made and changed are read by Python after it."""
    make = lambda p: optim.Adafactor(p, 0.01, foreach=False)  # noqa: E731
    expected, _ = train(make, lambda optimizer: optimizer.step)
    got, log = train(make, lambda optimizer: kiln.compile(optimizer.step, backend="aot_eager"))
    torch.testing.assert_close(got, expected, **CLOSE)
    assert log.breaks and not log.fallbacks


def test_lbfgs_calls_for_gradients():
    """Its step is without gradients, and what it calls turns them on."""

    def trained(step_of):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 1), torch.linspace(-1, 1, 20).view(5, 4)
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        step = step_of(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            step(closure)
        return list(model.parameters())

    expected = trained(lambda optimizer: optimizer.step)
    with records.collect() as log:
        got = trained(lambda optimizer: kiln.compile(optimizer.step, backend="aot_eager"))
    torch.testing.assert_close(got, expected)
    assert not log.fallbacks


FUSED = {
    "sgd": lambda p: optim.SGD(p, 0.1, 0.9, fused=True),
    "adam": lambda p: optim.Adam(p, 0.01, fused=True),
    "adamw": lambda p: optim.AdamW(p, 0.01, amsgrad=True, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_of_a_scaler(name):
    """The step undoes the scale, and leaves all as it is where a gradient is infinite."""

    def trained(step_of):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = FUSED[name](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer.step = step_of(optimizer)
        x = torch.linspace(-1, 1, 40).view(5, 8)
        for i in range(8):
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).sum() * (float("inf") if i in (2, 5) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [*model.parameters(), *state]

    expected = trained(lambda optimizer: optimizer.step)
    with records.collect() as log:
        got = trained(lambda optimizer: kiln.compile(optimizer.step))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not log.fallbacks and log.graphs
    calls = [step.name for plan in log.plans for step in plan.steps if step.kind == "call"]
    assert not any("fused" in name for name in calls), calls
