"""Texts that vary from call to call: kept, one graph is good for all; looked at, each has a graph of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support import EAGER, Watch, t

X = t(2, 3)
NAMES = [f"n{i}" for i in range(4)]
KNOWN = dict.fromkeys(NAMES, 1)


class Tagged(nn.Module):
    """Layers that hand a name on, and keep it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, name):
        for layer in self.layers:
            x = layer(x).relu()
        self.name = name
        return x, name


def batch(x, name):
    given = {"x": x, "path": name, "tags": (name, "fixed")}
    return {key: value * 2 if isinstance(value, torch.Tensor) else value for key, value in given.items()}


KEPT = {
    "returned": lambda x, name: (x * 2, name, [name, (name,)]),
    "batch": batch,
    "asked for its kind": lambda x, name: (x * 2 if isinstance(name, str) else x, name is None, type(name) is str),
    "module": Tagged(),
}
LOOKED_AT = {
    "compared": lambda x, name: x * 2 if name == "n1" else x * 3,
    "key": lambda x, name: x * KNOWN[name],
    "attribute": lambda x, name: (x + 1, getattr(Tagged, name, None)),
    "written": lambda x, name: (x + 1, f"{name}!", "%s" % name, name + "a", "a" + name, ",".join([name])),
    "walked": lambda x, name: (x + 1, [c for c in name], len(name), name[1:]),
    "searched": lambda x, name: (x + 1, "2" in name, name in "n1n2", name in ("n1", "n2"), [name].count("n1")),
    "asked whether it is one": lambda x, name: (x + 1, name is "n1"[:], bool(name)),  # noqa: F632
    "ordered": lambda x, name: (x + 1, max(name, "n2"), sorted([name, "n2"])),
    "hashed": lambda x, name: (x + 1, {name}, {name: 1}, name in KNOWN),
    "copied": lambda x, name: (x + 1, copy.deepcopy([name])),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    watch = Watch(KEPT[name])
    for text in NAMES:
        watch(X, text)
    watch.pin(graphs=2, breaks=0, recompiles=1)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_looked_at(name):
    watch = Watch(LOOKED_AT[name])
    for text in NAMES * 2:
        watch(X, text)
    watch.pin(graphs=4, breaks=0, recompiles=3)


def test_kept_in_one_branch():
    """A text that a program looked at once is one that it looks at."""
    watch = Watch(lambda x, name: (x + 1, name if x.shape[0] == 2 else name.upper()))
    for text in NAMES:
        watch(X, text)
        watch(t(3, 3), text)
    watch.pin(breaks=0)


def test_caught():
    """What eager raises is raised, and the program catches it."""

    def f(x, name):
        try:
            return x[0] + 1, "abc"[name]
        except TypeError as error:
            return x * 2, str(error), name

    watch = Watch(f)
    for text in NAMES:
        watch(X, text)
    watch.pin(breaks=0)


def test_texts_that_change_together_are_left_open_together():
    def f(x, pairs):
        kept = [patch for _, patch in pairs]
        return x * 2, kept

    watch = Watch(f)
    for n in range(5):
        watch(X, [(f"a{n}", f"b{n}"), (f"c{n}", f"d{n}"), ("same", f"e{n}")])
    assert EAGER or len(watch.backend.modules) == 2


def test_written_before_a_break_and_joined_after_it():
    def f(x, name):
        return x + 1, f"{name}{print(end='')}!"

    watch = Watch(f)
    for text in NAMES:
        watch(X, text)
    watch.pin(breaks=4)


def test_many_that_are_looked_at_together():
    """The elements of a list are looked at one after the other: it is found out for all at once."""
    watch = Watch(lambda x, names: [x * len(name) for name in names])
    for n in range(4):
        watch(t(3 + n // 2), [f"{n}{'-' * k}" for k in range(20)])
    watch.pin(graphs=4, breaks=0, recompiles=3)


def test_one_that_is_looked_at_in_a_function_that_is_compiled_for_more_reasons():
    watch = Watch(lambda x, name: (x * len(name), name))
    for n, text in enumerate(NAMES * 2):
        watch(t(2 + n % 2), text)
    watch.pin(graphs=4, breaks=0, recompiles=3)
