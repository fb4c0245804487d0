"""Gradients of leaves lie as the leaves do when they are added to them, and as eager's where they are asked for."""

import pytest
import torch

import kiln


def net():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1))
    return made, torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)


def asked(run, module, x):
    return torch.autograd.grad(run(x).square().sum(), list(module.parameters()))


def hooked(run, module, x):
    seen = {}
    hooks = [p.register_hook(lambda g, n=n: seen.update({n: g})) for n, p in module.named_parameters()]
    run(x).square().sum().backward()
    for hook in hooks:
        hook.remove()
    return [seen[name] for name, _ in module.named_parameters()]


def added(run, module, x):
    run(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


def added_twice(run, module, x):
    run(x).square().sum().backward()
    return added(run, module, x)


@pytest.mark.parametrize("way", [asked, hooked, added, added_twice])
@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_gradients_lie_as_in_eager(way, backend):
    module, x = net()
    compiled = kiln.compile(module, backend=backend)
    for _ in range(2):
        found, expected = [], []
        for run, into in ((module, expected), (compiled, found)):
            module.zero_grad()
            into += way(run, module, x)
        assert [g.stride() for g in found] == [g.stride() for g in expected]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert asked(module, module, x)[0].stride() != module[0].weight.stride()


def test_autograd_copies_no_gradient():
    module, x = net()
    compiled, copies = kiln.compile(module), {}
    for run in (module, compiled):
        added(run, module, x)
        module.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            added(run, module, x)
        module.zero_grad()
        events = seen.profiler.function_events
        copies[run] = sum(e.name == "aten::new_empty_strided" and "AccumulateGrad" in str(e.cpu_parent) for e in events)
    assert copies == {module: 2, compiled: 0}


def test_a_gradient_that_is_given_lies_as_its_leaf():
    x = torch.randn(3, 4, requires_grad=True)
    compiled, given = kiln.compile(lambda x: x * 1.0 + 0.0, backend="aot_eager"), torch.randn(4, 3).t()
    for _ in range(2):
        x.grad = None
        compiled(x).backward(given)
        assert x.grad.stride() == (4, 1) and torch.equal(x.grad, given)
