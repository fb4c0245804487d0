"""Guards on tensors and on torch's global state: C and Python agree, and the reason names old and new."""

from __future__ import annotations

import random
import threading

import pytest

torch = pytest.importorskip("torch")

from kiln import _hook  # noqa: E402
from kiln.base.source import Arg, Const, DictAttr, Item  # noqa: E402
from kiln.check import layout, state  # noqa: E402
from kiln.check.guards import Distinct, Length, TypeIs  # noqa: E402
from kiln.check.torch_guards import GlobalState, TensorMatch  # noqa: E402
from kiln.check.tree import GuardSet  # noqa: E402


class Sub(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def samples():
    base = torch.randn(4, 6)
    leaf = torch.randn(4, 6, requires_grad=True)
    with torch.inference_mode():
        inference = torch.randn(4, 6)
    return [
        base, base.clone(), base.t(), base[:, ::2], base[:2], base.double(), base.half(), base.bfloat16(), base.int(), base > 0,
        leaf, leaf.detach(), leaf * 2, (leaf * 2).detach(), leaf.t(), leaf.detach().requires_grad_(True).requires_grad_(False),
        torch.nn.Parameter(base.clone()), torch.nn.Parameter(base.clone(), requires_grad=False), base.as_subclass(Sub), Wrapper(base),
        torch.empty(4, 6, device="meta"), torch.empty(()), torch.empty(0, 6), torch.empty(1, 2, 3, 4, 5, 6, 7), torch.empty(1, 2, 3, 4, 5, 7, 6),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.view_as_complex(torch.randn(4, 2)).conj(),
        base.to_sparse(), inference, torch.empty(4, 6, dtype=torch.complex64), torch.nn.Buffer(base.clone()), 3, None, "text",
    ]  # fmt: skip


def test_the_layouts_are_found():
    assert layout.ready()
    assert state.ready()


def test_every_pair_of_tensors():
    values = samples()
    source = Arg(0, "x")
    for expected in values:
        if not isinstance(expected, torch.Tensor):
            continue
        guards = GuardSet()
        guards.add(TensorMatch.of(source, expected))
        built = guards.build()
        for value in values:
            holds = guards.guards[0].holds((value,))
            assert built.check((value,)) is holds, (expected, value)
            assert holds is (guards.guards[0].why((value,)) == "x matches")
        assert built.check((expected,))


def test_plain_tensors_are_compared_in_c():
    kinds = [TensorMatch.of(Arg(0, "x"), t).emit()[0] for t in samples() if isinstance(t, torch.Tensor)]
    assert kinds.count(_hook.CHECK_TEST) == 2  # the wrapper and the sparse one


def change(rng, parameters, models):
    p = rng.choice(parameters)
    model = rng.choice(models)
    with torch.no_grad():
        rng.choice([
            lambda: setattr(p, "data", p.data.clone()),
            lambda: setattr(p, "data", p.data.double()),
            lambda: setattr(p, "data", p.data.float()),
            lambda: setattr(p, "data", p.data.t()),
            lambda: setattr(p, "data", torch.empty(8, 8)),
            lambda: p.requires_grad_(rng.random() < 0.7),
            lambda: p.add_(1),
            lambda: p.resize_(8, 8),
            lambda: p.t_(),
            lambda: p.unsqueeze_(0),
            lambda: p.squeeze_(0),
            lambda: p.set_(torch.empty(8, 8)),
            lambda: setattr(p, "grad", torch.zeros_like(p)),
            lambda: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.empty(8, 8))),
            lambda: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.empty(8, 8).half())),
            lambda: model.train(rng.random() < 0.5),
            lambda: model.float(),
            lambda: model.half(),
            lambda: setattr(model, "weight", torch.nn.Parameter(torch.empty(8, 8))),
            lambda: model.register_forward_hook(print).remove(),
            lambda: setattr(p, "__class__", rng.choice([torch.nn.Parameter, torch.nn.Buffer])),
        ])()  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_agreement_on_pinned_parameters(seed):
    rng = random.Random(seed)
    held = broke = 0
    for _ in range(5):
        models = [torch.nn.Linear(8, 8) for _ in range(3)]
        guards = GuardSet()
        sources = []
        for i, model in enumerate(models):
            base = Const(model, f"m{i}")
            guards.add(TypeIs(base, torch.nn.Linear))
            guards.add(Length(DictAttr(base, "_forward_hooks"), 0))
            for name, parameter in model.named_parameters():
                sources.append(Item(DictAttr(base, "_parameters"), name))
                guards.add(TensorMatch.of(sources[-1], parameter))
        argument = torch.randn(2, 8)
        guards.add(TensorMatch.of(Arg(0, "x"), argument))
        guards.add(Distinct([Arg(0, "x"), *sources]))
        guards.add(GlobalState.now())
        built = guards.build()
        parameters = [p for m in models for p in m.parameters()]
        for argv in [(argument,)] * 15 + [(parameters[0].data,), (models[0].bias,)]:
            expected = [g.holds(argv) for g in guards.guards]
            first = expected.index(False) if False in expected else -1
            assert built.check(argv) is (first < 0)
            assert built.check(argv) is (first < 0)
            held, broke = held + (first < 0), broke + (first >= 0)
            if first >= 0 and rng.random() < 0.5:
                break
            try:
                change(rng, parameters, models)
            except (RuntimeError, IndexError, TypeError):
                pass
    assert held and broke


def model_guards(depth, settled):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(depth)))
    guards = GuardSet()
    for name, layer in model._modules.items():
        base = Item(DictAttr(Const(model, "model"), "_modules"), name)
        guards.add(Length(DictAttr(base, "_forward_hooks"), 0))
        for key, parameter in layer._parameters.items():
            guards.add(TensorMatch.of(Item(DictAttr(base, "_parameters"), key), parameter))
    built = guards.build(settled)
    assert built.check(()) and built.check(())
    return model, built


@pytest.mark.parametrize("settled", [False, True])
def test_what_settled_guards_see(settled):
    model, built = model_guards(32, settled)
    model.double()
    assert not built.check(())
    model.float()
    assert built.check(())
    handle = model[20].register_forward_hook(print)
    assert not built.check(())
    handle.remove()
    assert built.check(())
    model[20].weight = torch.nn.Parameter(torch.empty(4, 5))
    assert not built.check(())
    model[20].weight = torch.nn.Parameter(torch.empty(4, 4))
    assert built.check(())


def test_settled_guards_find_a_single_tensor_changed_in_place_in_turn():
    model, built = model_guards(32, True)
    model[20].bias.data = model[20].bias.data.double()
    assert False in [built.check(()) for _ in range(10)]


def test_an_alias_among_many_values():
    tensors = [torch.empty(2) for _ in range(40)]
    guards = GuardSet()
    pinned = [Const(t, f"t{i}") for i, t in enumerate(tensors[:30])]
    guards.add(Distinct([*pinned, *(Arg(i, f"a{i}") for i in range(10))]))
    built = guards.build()
    argv = tuple(tensors[30:])
    for _ in range(3):
        assert built.check(argv)
        assert not built.check((tensors[3], *argv[1:]))
        assert not built.check((*argv[:9], argv[0]))
    assert "a0" in guards.guards[0].why((tensors[3], *argv[1:]))


STATES = {
    "no_grad": (lambda: torch.no_grad(), "grad mode was True, now False"),
    "inference": (lambda: torch.inference_mode(), "grad mode was True, now False"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast dtype (cpu, cuda) was (None, None), now (torch.bfloat16, None)"),
    "device": (lambda: torch.device("meta"), "default device was cpu, now meta"),
    "function": (lambda: torch._C.DisableTorchFunctionSubclass(), "torch function (on, all off) was (True, False), now (False, False)"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_changed_state_fails_and_is_named(name):
    enter, why = STATES[name]
    guards, inside = GuardSet(), GuardSet()
    guards.add(GlobalState.now())
    built = guards.build()
    with enter():
        inside.add(GlobalState.now())
        built_inside = inside.build()
        assert guards.guards[0].why(()) == why
        assert not guards.guards[0].holds(()) and not built.check(())
        assert inside.guards[0].holds(()) and built_inside.check(())
    assert guards.guards[0].holds(()) and built.check(())
    assert not inside.guards[0].holds(()) and not built_inside.check(())


def test_process_wide_state():
    guards = GuardSet()
    guards.add(GlobalState.now())
    built = guards.build()
    assert built.check(())
    torch.set_default_dtype(torch.float64)
    try:
        assert not built.check(()) and not guards.guards[0].holds(())
    finally:
        torch.set_default_dtype(torch.float32)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        assert not built.check(()) and not guards.guards[0].holds(())
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)
    assert built.check(())


def test_state_is_read_from_the_thread_that_asks():
    guards = GuardSet()
    guards.add(GlobalState.now())
    built = guards.build()
    answers = []

    def other():
        answers.append(built.check(()))
        with torch.no_grad():
            answers.append(built.check(()))

    with torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not built.check(())
    assert answers == [True, False]


def test_autocast_dtypes_are_told_apart():
    with torch.autocast("cpu", torch.bfloat16):
        guards = GuardSet()
        guards.add(GlobalState.now())
        built = guards.build()
        assert built.check(())
    with torch.autocast("cpu", torch.float16):
        assert not built.check(()) and not guards.guards[0].holds(())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert not built.check(()) and not guards.guards[0].holds(())
    with torch.autocast("cpu", torch.bfloat16):
        assert built.check(())


def test_the_layout_is_found_whatever_lies_behind_the_tensors():
    junk: list[bytes] = []
    found = set()
    for turn in range(60):
        junk += [b"\1" * size for size in range(16, 600, 7 + turn % 5)]
        del junk[:: 2 + turn % 3]
        found.add(layout._find_layout())
    assert len(found) == 1
