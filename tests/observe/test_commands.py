"""The commands on scripts and on the machine: what they print, their exit codes, their one-line errors."""

import ast
import json
import tarfile
import textwrap

import pytest
import torch
from typer.testing import CliRunner

import kiln
from kiln import doctor, scripts
from kiln.cli import app
from kiln.launch.cache import Cache

NET = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x)) + 1

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
print("arguments", sys.argv[1:], __name__)
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        kiln.reset()
        return str(path)

    return write


def command(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def told(*arguments, code=0):
    return json.loads(command(*arguments, code=code).stdout)


def test_explain_takes_the_modules_of_a_script_that_compiles_nothing(script):
    path = script(NET)
    call = torch.nn.Module.__call__
    facts = told("explain", "--json", path, "--epochs", "3")
    assert facts["error"] is None and [g["name"] for g in facts["graphs"]] == ["Net"]
    assert {plan["half"] for plan in facts["plans"]} == {"forward", "backward"}
    assert (facts["summary"]["breaks"], facts["summary"]["recompiles"]) == (0, 0)
    assert torch.nn.Module.__call__ is call and torch.compile.__module__ != "kiln.redirect"


def test_explain_takes_the_compile_calls_of_a_script_alone(script):
    text = """
    import torch
    layer = torch.nn.Linear(4, 4)
    @torch.compile
    def f(x):
        return x * 2
    f(layer(torch.ones(4)))
    """
    assert [g["region"] for g in told("explain", "--json", script(text))["graphs"]] == ["f"]
    assert [g["region"] for g in told("explain", "--json", "--all", script(text))["graphs"]] == ["Linear", "f"]


def test_explain_prints_tables_and_the_scripts_own_output(script):
    out = command("explain", script(NET), "--epochs", "3").stdout
    assert "arguments ['--epochs', '3'] __main__" in out
    for title in ("Graphs", "Time by stage", "Kernels", "Memory beside inputs"):
        assert f"\n{title}" in out
    assert "Roofline" not in out


def test_roofline_gives_each_kernel_a_time_and_a_share(script):
    lines = told("explain", "--json", "--roofline", script(NET))["roofline"]
    assert {line["kernel"].split()[1] for line in lines} == {"forward", "backward"}
    assert all(line["seconds"] > 0 and 0 < line["share"] and line["launches"] == 2 for line in lines)
    assert "of a copy" in command("explain", "--roofline", script(NET)).stdout


def test_run_ends_with_a_summary_and_the_scripts_exit_code(script):
    result = command("run", "--all", script(NET), "a", "-b")
    assert result.stdout == "arguments ['a', '-b'] __main__\n"
    assert result.stderr.startswith("kiln: 1 graph, 3 ops, 0 breaks, ")
    assert command("run", script(NET)).stderr == "kiln: 0 graphs, 0 ops, 0 breaks\n"
    command("run", script("import sys; sys.exit(7)"), code=7)
    assert told("run", "--all", "--json", script(NET))["graphs"] == 1


def test_a_script_without_anything_to_compile_is_said_to_be_so(script):
    assert "nothing was compiled" in command("explain", script("x = 1")).stdout


ERRORS = {
    "missing": (None, "No such file"),
    "syntax": ("def f(:\n", "script.py:1: SyntaxError: "),
    "binary": ("\x00", "null bytes"),
    "model": (
        "import torch\n@torch.compile\ndef f(x):\n    return x @ torch.ones(3)\nf(torch.ones(2))\n",
        "script.py:4 in f: RuntimeError: ",
    ),
    "import": ("import a_module_that_is_not_there\n", "script.py:1 in <module>: ModuleNotFoundError: "),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("verb", ["explain", "run"])
def test_errors_are_one_line(case, verb, script, tmp_path):
    text, wanted = ERRORS[case]
    path = script(text) if text is not None else str(tmp_path / "script.py")
    result = command(verb, path, code=1)
    assert not result.stdout and len(result.stderr.splitlines()) == 1, result.output
    assert result.stderr.startswith("kiln: ") and wanted in result.stderr
    if case == "model":
        assert "the program itself raises it, compiled or not" in result.stderr
    if verb == "explain":
        assert wanted in told("explain", "--json", path, code=1)["error"]


def test_every_command_shows_an_example():
    for name in ("explain", "run", "doctor"):
        assert f"Example: kiln {name}" in " ".join(command(name, "--help").stdout.split())
    assert "Example: kiln cache export" in " ".join(command("cache", "export", "--help").stdout.split())
    command("explain", code=2)


def test_doctor_finds_this_machine_well_and_says_what_to_do_where_not(monkeypatch):
    found = {one["part"]: one for one in told("doctor", "--json")["findings"]}
    assert all(found[part]["ok"] for part in ("Python", "torch", "capture", "LLVM", "compiler"))
    assert all(not one["remedy"] for one in found.values() if one["ok"])

    def broken():
        raise OSError("no such library")

    monkeypatch.setitem(doctor.CHECKS, "LLVM", (broken, "pip install llvmlite"))
    out = " ".join(command("doctor", code=1).stdout.split())
    assert "LLVM FAILS OSError: no such library remedy: pip install llvmlite" in out


def test_export_writes_whole_entries_to_an_archive(tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    monkeypatch.setenv("KILN_CACHE_DIR", str(folder))
    cache = Cache(folder, 1 << 20, create=True)
    cache.put("a" * 64, b"x" * 100)
    cache.put("b" * 64, b"y" * 100)
    cache.path("b" * 64).write_bytes(b"damaged")
    archive = tmp_path / "out.tar"
    assert told("cache", "export", str(archive), "--json")["entries"] == 1
    other = tmp_path / "other"
    with tarfile.open(archive) as packed:
        packed.extractall(other, filter="data")
    other.chmod(0o700)
    assert Cache(other, 1 << 20).get("a" * 64) == b"x" * 100
    assert "No such file" in command("cache", "export", str(tmp_path / "no" / "out.tar"), code=1).stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\nf = torch.compile(g)", True),
        ("from kiln import compile\n@compile\ndef f(): ...", True),
        ("model.compile()", True),
        ("import re\nre.compile('a')", False),
        ("from re import compile\ncompile('a')", False),
        ("compile('1', '', 'eval')", False),
    ],
)
def test_what_counts_as_compiling(text, found):
    assert scripts.compiles(ast.parse(text)) is found
