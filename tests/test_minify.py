"""`kiln.minify`: programs with a planted fault become small scripts that still show it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kiln
from kiln.launch import held
from tests import faults

ROOT = Path(__file__).parent.parent


def program(x, w, b):
    """Many ops, of which each fault is about one."""
    y = torch.nn.functional.layer_norm(x @ w + b, (8,))
    kiln.graph_break()
    for _ in range(3):
        y = (y * 2 + b).relu() - y.mean(-1, keepdim=True)
    z = torch.tanh(y[:, :4]) + y.cumsum(-1)[:, :4]
    s = torch.softmax(z, -1)
    return (s * z).sum(0), y.max()


def arguments():
    torch.manual_seed(3)
    return torch.randn(16, 8), torch.randn(8, 8), torch.randn(8)


def alone(path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("backend", "kind", "said"),
    [
        (faults.wrong, "differs", "Tensor-likes are not close"),
        (faults.raising, "raises", "no rule for cumsum"),
        (faults.crashing, "crashes", "SIGSEGV"),
    ],
    ids=["wrong values", "an exception", "a crash"],
)
def test_a_fault_is_cut_out(tmp_path, backend, kind, said):
    made = kiln.minify(program, *arguments(), path=tmp_path / "report.py", backend=backend)
    assert made.outcome.kind == kind and said in made.outcome.detail
    assert made.calls == 1 and made.of > 10 and made.confirmed
    op = {"differs": "tanh", "raises": "cumsum", "crashes": "softmax"}[kind]
    assert op in made.text and "layer_norm" not in made.text
    assert "1 of " in str(made) and kind in str(made)
    if kind == "differs":  # the script passes once the fault is gone
        made.path.write_text(made.text.replace("backend=backend", "backend='eager'"))
        assert "compiled and eager agree" in alone(made.path).stdout


def test_gradients_sizes_and_values_get_smaller(tmp_path):
    x = torch.randn(16, 12, requires_grad=True)
    made = kiln.minify(lambda x: x.exp().tanh() * x, x, path=tmp_path / "r.py", backend=faults.wrong)
    assert made.calls == 1 and "requires_grad_" not in made.text and "randn" not in made.text
    assert "tensor([[1.0]]" in made.text


def test_modules_and_their_parameters(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    made = kiln.minify(model, torch.randn(4, 8), path=tmp_path / "r.py", backend=faults.wrong)
    assert made.calls == 1 and "tanh" in made.text and "linear" not in made.text and made.confirmed


def test_a_fault_that_would_fall_back_is_found(tmp_path, monkeypatch):
    """Planted in this process alone: the script, run on its own, does not fail, and the result says so."""
    real = held.compile_graph

    def faulty(graph, *rest):
        if any("tanh" in str(node.op) for node in graph.nodes):
            raise LookupError("no loops for tanh")
        return real(graph, *rest)

    monkeypatch.setattr(held, "compile_graph", faulty)
    with torch.no_grad():
        made = kiln.minify(program, *arguments(), path=tmp_path / "r.py")
    assert made.outcome.kind == "raises" and "no loops for tanh" in made.outcome.detail
    assert made.calls == 1 and "tanh" in made.text and not made.confirmed
    assert "on its own the script does not fail" in str(made)


def unfit(x):
    y = x + 1
    if y.sum() > 0:
        y = y * 2
    return y


def test_a_fault_of_capture_gives_the_source(tmp_path):
    made = kiln.minify(unfit, torch.ones(3), path=tmp_path / "r.py", backend="eager", fullgraph=True)
    assert made.calls == 0 and "def unfit(x):" in made.text and made.confirmed
    assert "branch-on-tensor" in alone(made.path).stderr


def test_programs_that_agree_or_fail_anyway_are_refused():
    with pytest.raises(kiln.KilnError, match="agree"):
        kiln.minify(torch.sin, torch.ones(3), backend="eager")
    with pytest.raises(kiln.KilnError, match="in eager, too: IndexError"):
        kiln.minify(lambda x: x[5], torch.ones(3), backend="eager")
