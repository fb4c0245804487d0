"""Settings: what options and modes reach the compiler, and what is said of wrong ones."""

import os
import subprocess
import sys

import pytest
import torch

import kiln
from kiln import compiler
from kiln.base.options import Settings, UnknownOption
from kiln.launch import held


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """The settings of each graph that was compiled."""
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "cache"))
    found = []

    def watched(compile_it):
        return lambda graph, settings, *rest: found.append(settings) or compile_it(graph, settings, *rest)

    monkeypatch.setattr(compiler, "begin_graph", watched(compiler.begin_graph))
    monkeypatch.setattr(held, "compile_graph", watched(held.compile_graph))
    kiln.reset()
    return found


def test_options_reach_both_halves_and_the_backward_keeps_them(seen):
    x = torch.randn(5, requires_grad=True)
    compiled = kiln.compile(lambda x: (x * 2).sin(), options={"numerics": "eager", "memory_budget": 0})
    with kiln.config.patch(strict=True):
        out = compiled(x)
    with kiln.config.patch(numerics="fast"):
        out.sum().backward()
    assert seen == [Settings(strict=True, numerics="eager", memory_budget=0.0)] * 2


def test_modes_reach_the_compiler(seen):
    x = torch.randn(5)
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        torch.testing.assert_close(kiln.compile(lambda x: x * 2 + 1, mode=mode)(x), x * 2 + 1)
    kiln.compile(lambda x: x * 2 + 2)(x)
    assert [s.mode for s in seen] == ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "default"]
    assert [s.tunes for s in seen] == [False, False, True, True, False]


def test_settings_in_force_are_taken_when_the_backend_is_called(seen):
    compiled = kiln.compile(lambda x: x * 3)
    with kiln.config.patch(numerics="eager", random="own"):
        compiled(torch.randn(5))
    assert (seen[0].numerics, seen[0].random, seen[0].draws) == ("eager", "own", "eager")
    assert kiln.config.numerics == "fast"


def test_other_captures_hand_options_over(seen):
    graph = torch.fx.symbolic_trace(lambda x: x * 2)
    run = compiler.kiln(graph, [torch.randn(3)], mode="max-autotune", options={"random": "eager"})
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 2.0))
    assert (seen[0].mode, seen[0].random) == ("max-autotune", "eager")


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"numerics": "egaer"}, UnknownOption, "unknown value of option 'numerics': 'egaer': did you mean 'eager'. known are eager, fast"),
    ({"random": "philox"}, UnknownOption, "known are eager, masks, own"),
    ({"mode": "fastest"}, UnknownOption, "known are default, max-autotune, max-autotune-no-cudagraphs, reduce-overhead"),
    ({"numeric": "eager"}, UnknownOption, "option of backend 'kiln': 'numeric': did you mean 'numerics'"),
    ({"memory_budget": 1.5}, ValueError, "'memory_budget' is between 0.0 and 1.0, got 1.5"),
    ({"memory_budget": "all"}, TypeError, "'memory_budget' is of type float, got 'all'"),
    ({"cache_limit": -1}, ValueError, "'cache_limit' is between 0"),
])  # fmt: skip
def test_wrong_values_name_the_known_ones(options, error, text):
    with pytest.raises(error, match=text):
        kiln.compile(torch.sin, options=options)


def test_environment_variables_choose_defaults():
    program = "import kiln; print(kiln.config.numerics, kiln.config.random)"
    environment = {**os.environ, "KILN_NUMERICS": "eager", "KILN_RANDOM": "dice"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["eager", "eager"]
    assert "KILN_RANDOM: unknown value 'dice': known are eager, masks, own" in done.stderr
