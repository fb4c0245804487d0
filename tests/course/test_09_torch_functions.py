"""Tensors, by table: every function of torch and torch.nn.functional, every method and property of a tensor."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides

from tests.course.calls import (
    ADDED,
    BINARY,
    DATA_DEPENDENT,
    EXEMPT,
    FUNCTIONAL,
    LOOKS_INSIDE,
    METHODS,
    RANDOM,
    REMOVED,
    SELECTED,
    TENSORS,
    TORCH,
    UNARY,
)
from tests.support import one_graph, pin, program, same_as_eager, t

pytestmark = pytest.mark.filterwarnings("ignore")
SCOPE = {"torch": torch, "F": F, "t": t, "np": np}


def rows(table):
    return [line for line in table.strip().splitlines() if line]


def families(table):
    """(arguments, name) of each row of names."""
    return list(dict.fromkeys((args, n) for args, names in (r.split(": ") for r in rows(table)) for n in names.split()))


def spelled(args, name):
    """The calls of one name as function, method and in-place method, as far as they exist."""
    first, *rest = args.split()
    calls = [f"torch.{name}({', '.join(args.split())})"] if hasattr(torch, name) else []
    if hasattr(torch.Tensor, name):
        calls.append(f"{first}.{name}({', '.join(rest)})")
    if hasattr(torch.Tensor, name + "_") and name not in METADATA and args.split()[0] not in "ik":
        calls.append(f"{first}.clone().{name}_({', '.join(rest)})")
    return calls


METADATA = {"t", "squeeze", "detach", "transpose", "logical_and", "resize_as"}


def lambda_of(text):
    names = [n for n in TENSORS if re.search(rf"(?<![\w.\"]){n}\b", text)]
    return eval(f"lambda {', '.join(names)}: ({text},)", dict(SCOPE)), [TENSORS[n] for n in names]


@pytest.mark.parametrize(("args", "name"), families(UNARY) + families(BINARY), ids=lambda v: v.replace(" ", ""))
def test_named(args, name):
    one_graph(*as_program(", ".join(spelled(args, name))))


def pieces(table):
    """Rows taken apart at top-level commas, a few expressions to a test."""
    out = []
    for row in rows(table):
        depth, start, parts = 0, 0, []
        for n, ch in enumerate(row + ","):
            depth += (ch in "([{") - (ch in ")]}")
            if ch == "," and depth == 0:
                parts.append(row[start:n].strip())
                start = n + 1
        parts = [p for p in parts if p]
        out += [", ".join(parts[n : n + 4]) for n in range(0, len(parts), 4)]
    return out


@pytest.mark.parametrize("text", pieces(TORCH))
def test_torch(text):
    one_graph(*as_program(text))


@pytest.mark.parametrize("text", pieces(FUNCTIONAL))
def test_functional(text):
    one_graph(*as_program(text))


@pytest.mark.parametrize("text", pieces(METHODS))
def test_methods_and_properties(text):
    one_graph(*as_program(text))


@pytest.mark.parametrize("text", pieces(RANDOM))
def test_random_numbers_are_those_of_eager(text):
    one_graph(*as_program(text))


def as_program(text):
    """A program that has at least one op, whatever the text asks."""
    f, tensors = lambda_of(f"x + 1, {text}")
    return f, *tensors


@pytest.mark.parametrize("text", ["x.exp().sum(), (x * y).mean(0), F.softmax(x @ y.T, -1)", "torch.cat([x, y]).relu().T",
                                  "F.layer_norm(x, (4,), v, v), F.linear(x, y), F.gelu(x), x.std(), x[1:].prod()"])  # fmt: skip
def test_gradients(text):
    f, tensors = lambda_of(text)
    one_graph(f, *[x.clone().requires_grad_() for x in tensors])


def between(text):
    """What a program does with a call between two others."""
    names = ["x", "y", "i", "j", "k", "v"]
    scope = dict(SCOPE)
    exec(f"def f({', '.join(names)}):\n  before = x * 2\n  r = {text}\n  return before + 1, r", scope)
    return same_as_eager(scope["f"], *[TENSORS[n] for n in names])


@pytest.mark.parametrize("text", rows(SELECTED))
def test_calls_that_select(text):
    pin(between(text), graphs=1)


@pytest.mark.parametrize("text", rows(DATA_DEPENDENT))
def test_data_dependent_calls_break(text):
    pin(between(text), graphs=2, breaks=1)


@pytest.mark.parametrize("text", rows(LOOKS_INSIDE))
def test_calls_that_look_at_values(text):
    r = same_as_eager(*as_program(text))
    assert r.raised is None and r.breaks <= 1 + text.count("x.c")


def test_the_table_is_complete():
    overridable = get_testing_overrides()
    wanted = {n for n in dir(torch) if n[0] != "_" and callable(getattr(torch, n)) and getattr(torch, n) in overridable}
    wanted |= {n for n in dir(F) if n[0] != "_" and callable(getattr(F, n)) and getattr(F, n) in overridable}
    wanted |= {n for n in dir(torch.Tensor) if n[0] != "_"}
    text = " ".join((TORCH, FUNCTIONAL, METHODS, RANDOM, DATA_DEPENDENT, SELECTED, LOOKS_INSIDE))
    called = set(re.findall(r"\.(\w+)", text)) | {name for _, name in families(UNARY) + families(BINARY)}
    called |= {c.removesuffix("(").split(".")[-1] for args, name in families(UNARY) + families(BINARY)
               for c in re.findall(r"\.\w+_\(", " ".join(spelled(args, name)))}  # fmt: skip
    exempt = {name for names in EXEMPT.values() for name in names.split()}
    exempt -= {name for name in ADDED.split() if name not in wanted}
    wanted -= set(REMOVED.split())
    assert not wanted - called - exempt, f"missing: {sorted(wanted - called - exempt)}"
    assert not exempt - wanted, f"exempt but not there: {sorted(exempt - wanted)}"


@program([t(3), t(2)], (t(3), t(2)))
def test_functions_that_change_lists_give_the_list(items, pair):
    made = [item * 2 for item in items]
    same = torch._foreach_add_(items, 1) is items, torch._foreach_neg_(pair) is pair, torch._foreach_abs_(made)
    return same, made, same[-1] is made


def test_which_kernel_attention_takes_is_asked_in_python():
    same_as_eager(lambda q: (torch._fused_sdp_choice(q, q, q), q + 1), t(1, 2, 3, 4))


@pytest.mark.parametrize("f", [
    lambda x, out: torch.nonzero(x, out=out), lambda x, out: torch.nonzero(input=x) + out.numel(),
    lambda x, out: torch.masked_select(x, x > 0, out=out.view(-1)),
])  # fmt: skip
def test_selections_that_are_given_their_result(f):
    same_as_eager(f, torch.tensor([1, 0, 3]), torch.empty(0, 1, dtype=torch.long))
