"""Dumps: what each stage made of a graph, as text, and edited files in place of a stage's own result."""

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import log
from kiln.expand.edited import EditedFile

FORWARD = ["forward.py", "forward_prims.py", "forward_loops.txt", "forward_kernels.ll", "forward_kernels.s", "forward_plan.txt"]
BACKWARD = [name.replace("forward", "backward") for name in FORWARD]


def scaled(x):
    return torch.relu(x) * 3 + 1


@pytest.fixture
def run(tmp_path):
    """Compiles a function anew, with a folder for dumps, and calls it."""

    def called(f, *inputs, **more):
        kiln.reset()
        with kiln.config.patch(strict=True):
            return kiln.compile(f, options={"dump": str(tmp_path), **more})(*inputs)

    return called


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def edited(path, before, after):
    """Write the edited file of a dumped one."""
    text = path.read_text()
    assert before in text, text
    path.with_suffix(f".edited{path.suffix}").write_text(text.replace(before, after))


def test_a_folder_for_each_graph_and_a_file_for_each_stage(run, tmp_path):
    x = torch.randn(6, 8, requires_grad=True)
    run(lambda x: F.softmax(x * 2, -1).sin(), x).sum().backward()
    (folder,) = tmp_path.iterdir()
    assert folder.name == "000_lambda"
    names = files(folder)
    assert names[:2] == ["00_captured.py", "01_joint.py"]
    for half, stages in (("forward", FORWARD), ("backward", BACKWARD)):  # compiled side by side, each counted for itself
        assert [name for name in names if half in name] == [f"{2 + i:02}_{stage}" for i, stage in enumerate(stages)]
    texts = {name[3:]: (folder / name).read_text() for name in names}
    assert "torch.nn.functional.softmax" in texts["captured.py"]
    assert "aten._softmax.default" in texts["forward.py"] and "aten.exp.default" in texts["forward_prims.py"]
    assert "fold i1 in 0 .. 8" in texts["forward_loops.txt"] and "sum of" in texts["forward_loops.txt"]
    assert "define void @entry0" in texts["forward_kernels.ll"] and "entry0:" in texts["forward_kernels.s"]
    assert "k0(x, " in texts["forward_plan.txt"]


def test_graphs_print_as_programs_that_run(run, tmp_path):
    x = torch.randn(5, 4)
    run(lambda x: F.layer_norm(x, (4,)) + torch.tensor([1.0, 2.0, 3.0, 4.0]), x)
    (path,) = tmp_path.glob("*/*_inference_prims.py")
    space = {"torch": torch, "constant": {"literal": torch.tensor([1.0, 2.0, 3.0, 4.0])}.__getitem__}
    exec(path.read_text(), space)
    torch.testing.assert_close(space["graph"](x)[0], F.layer_norm(x, (4,)) + torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize(("stage", "before", "after"), [
    ("inference.py", "mul.Tensor(relu, 3)", "mul.Tensor(relu, 5)"),
    ("inference_prims.py", "mul.Tensor(relu, 3.0)", "mul.Tensor(relu, 5.0)"),
    ("inference_kernels.ll", "0x4008000000000000", "0x4014000000000000"),  # 3.0 and 5.0
])  # fmt: skip
def test_an_edited_file_takes_the_place_of_a_stages_result(run, tmp_path, stage, before, after):
    x = torch.randn(40)
    torch.testing.assert_close(run(scaled, x), scaled(x))
    (path,) = tmp_path.glob(f"*/*_{stage}")
    edited(path, before, after)
    torch.testing.assert_close(run(scaled, x), torch.relu(x) * 5 + 1)
    path.with_suffix(f".edited{path.suffix}").unlink()
    torch.testing.assert_close(run(scaled, x), scaled(x))


def test_edited_backward(run, tmp_path):
    x = torch.ones(4, requires_grad=True)
    run(scaled, x).sum().backward()
    (path,) = tmp_path.glob("*/*_backward_prims.py")
    edited(path, "3.0", "7.0")
    (gradient,) = torch.autograd.grad(run(scaled, x).sum(), x)
    assert gradient.tolist() == [7.0] * 4


def test_edited_graphs_with_sizes_that_vary(tmp_path):
    def f(x):
        return x.reshape(-1) * x.shape[0] + 1

    for factor in (1, 10):
        kiln.reset()
        compiled = kiln.compile(f, dynamic=True, options={"dump": str(tmp_path)})
        for n in (3, 8):
            x = torch.ones(n, 2)
            torch.testing.assert_close(compiled(x), x.reshape(-1) * n + factor)
        (path,) = tmp_path.glob("*/*_inference_prims.py")
        edited(path, ", 1.0)", ", 10.0)")


def test_an_edited_file_of_another_result_is_left_out(run, tmp_path, caplog):
    x = torch.randn(8)
    run(scaled, x)
    (path,) = tmp_path.glob("*/*_inference_prims.py")
    edited(path, "3.0", "5.0")
    with caplog.at_level(logging.WARNING, logger="kiln"):
        torch.testing.assert_close(run(lambda x: x - 4, x), x - 4)  # another graph of the same number
        assert not caplog.records
        path.write_text(path.read_text().replace("relu", "neg"))
        torch.testing.assert_close(run(scaled, x), scaled(x))
    assert f"{path.stem}.edited.py is left out" in caplog.text


@pytest.mark.parametrize(("stage", "text", "said"), [
    ("inference_prims.py", "def graph(x):\n    return (torch.ops.aten.sum.default(x),)\n", r"value 0 that it gives is float32\[\], not float32\[8\]"),
    ("inference_prims.py", "def graph(x):\n    return (x, x)\n", "gives 2 values, not 1"),
    ("inference_prims.py", "def graph(x):\n    return (y,)\n", "NameError"),
    ("inference_kernels.ll", "define nothing\n", "LLVM IR parsing error"),
])  # fmt: skip
def test_edited_files_that_cannot_be_used_are_named(run, tmp_path, stage, text, said):
    x = torch.randn(8)
    run(scaled, x)
    (path,) = tmp_path.glob(f"*/*_{stage}")
    path.with_suffix(f".edited{path.suffix}").write_text(text)
    with pytest.raises(EditedFile, match=rf"(?s){re.escape(path.stem)}\.edited.*{said}"):
        run(scaled, x)


def test_topics_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(log, "topics", frozenset(log.TOPICS))
    kiln.reset()
    with caplog.at_level(logging.INFO, logger="kiln"):
        kiln.compile(scaled)(torch.randn(9))
    said = [record.getMessage() for record in caplog.records]
    for start, part in {
        "graph: scaled captured": "torch.relu(x)",
        "graph: scaled inference_prims": "aten.relu.default(x)",
        "guards: scaled": "x is a float32 tensor of shape (9,) on cpu",
        "code: scaled": "return __out[0]",
        "kernels: scaled": "for i0 in 0 .. 9",
        "llvm: scaled": "define void @entry0",
        "time: scaled inference fuse": "ms",
        "plan: scaled": "k0(x, ",
    }.items():
        assert [text for text in said if text.startswith(start) and part in text], (start, said)


def test_environment_variables(tmp_path):
    program = "import kiln, torch; kiln.compile(lambda x: x * 2)(torch.randn(3))"
    environment = {**os.environ, "KILN_LOG": "loops,lops", "KILN_DUMP": str(tmp_path / "made"), "KILN_STRICT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "KILN_LOG: unknown topics lops; known are all, breaks, cache, code" in done.stderr
    assert "kernels: <lambda> inference_loops\nkernel k0(x: float32)" in done.stderr
    assert "02_inference_prims.py" in files(tmp_path / "made" / "000_lambda")
