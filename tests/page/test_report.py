"""Reports of real programs: what the page holds, from a program and from the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import kiln
from kiln.base.dump import Dump
from kiln.base.graph import Graph, TensorSpec
from kiln.base.records import GraphRecord, Records, StageRecord
from kiln.cli import app
from kiln.fuse.program import Fusing, fuse
from kiln.fuse.split import GRIDS
from kiln.generate.device import generate
from kiln.launch import told
from kiln.observe.calls import Calls
from kiln.observe.drawing import code_of, split
from kiln.observe.report import Report, page_data
from kiln.observe.report import page as text_of

PROGRAM = '''\
import torch
from torch import nn
import kiln

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if x.sum() > 1e9:  # "</script>"
            return x
        return torch.softmax(x, dim=-1)

net = Net()
compiled = kiln.compile(net)
for n in (4, 6):
    x = torch.randn(n, 16)
    result = compiled(x)
    torch.testing.assert_close(result, net(x))
    result.sum().backward()
'''
LINES = PROGRAM.splitlines()
FORWARD = LINES.index("        return x + torch.tanh(self.linear(self.norm(x)))") + 1
BRANCH = next(i for i, line in enumerate(LINES) if "1e9" in line) + 1


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def report(program):
    """The page that the command writes about the program."""
    kiln.reset()
    page = program.parent / "report.html"
    done = command("report", str(program), "-o", str(page))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{page}: ")
    return page


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def data_in(page):
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def test_the_page_holds_the_run(program, report):
    data = data_in(report)
    assert data["problems"] == [] and data["title"] == "train.py"
    (file,) = data["files"]
    assert file["lines"] == LINES and file["path"] == str(program)
    assert file["tints"][str(FORWARD)]["ops"] == 8  # norm, linear, tanh and the sum, of two blocks
    (stop,) = data["breaks"]
    assert (stop["kind"], stop["place"]["line"], file["breaks"]) == ("branch-on-tensor", BRANCH, [0])
    assert stop["place"]["text"][stop["place"]["column"] :].startswith("x.sum()")
    first = data["graphs"][0]
    assert [view["name"] for view in first["views"]] == ["forward", "backward", "captured"]
    assert any("x.shape" in one["source"] or "shape" in one["guard"] for one in data["recompiles"])
    labels = {span["kind"] for lane in data["timeline"]["compile"]["lanes"] for span in lane["spans"]}
    assert {"capture", "differentiate", "expand", "fuse", "generate", "plan"} <= labels
    assert {lane["name"] for lane in data["timeline"]["call"]["lanes"]} >= {"Net forward", "Net backward"}


def test_nodes_have_modules_lines_kernels_and_code(program, report):
    data = data_in(report)
    view = data["graphs"][0]["views"][0]
    nodes = {node["n"]: node for node in view["nodes"]}
    assert {node["k"] for node in view["nodes"]} >= {"input", "parameter", "reduction", "pointwise", "call", "output"}
    tanh = next(node for node in view["nodes"] if node["o"] == "tanh")
    assert view["paths"][tanh["p"]][:2] == ["blocks", "0"] and tanh["s"] == "float32[4, 16]"
    assert [data["paths"][file] for file, line, _ in view["places"][tanh["w"]] if line == FORWARD] == [str(program)]
    kernel = view["kernels"][tanh["g"]]
    texts = {view["codes"][i]["title"]: view["codes"][i]["text"] for i in kernel["codes"]}
    assert texts["Loops"].startswith(f"kernel {kernel['name'].partition('.')[0]}(") and "tanh" in texts["Loops"]
    assert texts["LLVM"].startswith("define ") and texts["LLVM"].rstrip().endswith("}")
    assert kernel["ops"] == sum(node["g"] == tanh["g"] for node in view["nodes"]) > 1
    for number, node in enumerate(view["nodes"]):
        assert all(read < number for read in node["i"])
    memory = view["memory"]
    assert memory["values"] and all(one["name"] in nodes and one["last"] < memory["steps"] for one in memory["values"])
    captured = data["graphs"][0]["views"][-1]
    drawn = [node for node in captured["nodes"] if node["o"] == "torch.tanh"]
    assert [view["kernels"][node["g"]]["name"] for node in drawn] and all(node["g"] >= 0 for node in drawn)


def test_the_page_of_a_run_in_a_browser(report, opened):
    seen = opened(report)
    main = seen.section("source")
    assert main.locator(".row.stop").get_attribute("data-line") == str(BRANCH)
    seen.section("graphs")
    seen.click_item("tanh")
    side = seen.locator(".side").inner_text()
    assert f"train.py:{FORWARD}" in side and "torch.tanh(self.linear(self.norm(x)))" in side and "define " in side
    for name in ("overview", "timeline", "guards", "recompiles", "memory"):
        assert "cannot be shown" not in seen.section(name).inner_text()
    assert seen.errors == []


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 2


def test_from_a_program(tmp_path):
    kiln.reset()
    net, x = Small(), torch.randn(3, 8)
    path = tmp_path / "page.html"
    with kiln.report(path) as report:
        assert isinstance(report, Report) and not path.exists()
        torch.testing.assert_close(kiln.compile(net)(x), net(x))
    data = data_in(path)
    assert [graph["title"] for graph in data["graphs"]] == ["Small"] and data["problems"] == []
    with torch.no_grad():
        kiln.compile(Small())(x)  # what comes later is not collected
    report.write()
    assert len(data_in(path)["graphs"]) == 1


def test_the_page_is_written_when_the_program_ends(tmp_path):
    page = tmp_path / "end.html"
    program = f"import torch, kiln; kiln.report({str(page)!r}); kiln.compile(lambda x: x.sin() + 1)(torch.ones(3))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert len(data_in(page)["graphs"]) == 1


def test_a_folder_that_does_not_exist_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="the folder of the report does not exist"):
        kiln.report(tmp_path / "no" / "page.html")
    done = command("report", "-o", str(tmp_path / "no" / "page.html"), __file__)
    assert done.exit_code == 1 and "there is no folder" in done.stderr


@pytest.mark.parametrize(("text", "error"), [("x = ", "SyntaxError"), ("raise ValueError('no data')", "ValueError: no data")])
def test_a_script_that_fails(tmp_path, text, error):
    path = tmp_path / "bad.py"
    path.write_text(text)
    done = command("report", str(path), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 1 and error in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_a_script_that_fails_late_has_a_page_that_says_so(tmp_path):
    path, page = tmp_path / "late.py", tmp_path / "page.html"
    path.write_text("import torch\ntorch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2))\n1 / 0\n")
    done = command("report", "--json", "-o", str(page), str(path))
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and "late.py:3" in told["error"] and told["graphs"] == 1
    data = data_in(page)
    assert "ZeroDivisionError" in data["problems"][0] and len(data["graphs"]) == 1


def test_an_empty_record_is_no_problem():
    data = page_data(Records(), {}, "nothing")
    assert (data["problems"], data["graphs"], data["files"]) == ([], [], [])


def test_damaged_records_leave_what_can_be_shown():
    with Records() as records:
        kiln.compile(Small())(torch.ones(2, 8))
    records.graphs[0] = replace(records.graphs[0], operations=(None,))
    data = page_data(records, {}, "damaged")
    assert len(data["problems"]) == 1 and "cannot be shown: the record is damaged" in data["problems"][0]
    assert "record is damaged" in text_of(data)
    light = Records()
    light.add(GraphRecord("f", None, 3, 1, None, "f"))
    light.add(StageRecord("f", "capture", "", 1.0, 0.5))
    data = page_data(light, {}, "light")
    assert data["problems"] == [] and "were not recorded" in data["graphs"][0]["missing"]


def test_calls_are_measured_only_meanwhile():
    compiled, x = kiln.compile(Small()), torch.ones(2, 8)
    with torch.no_grad():
        compiled(x)
        with Calls() as calls:
            compiled(x)
            compiled(x)
        (call,) = calls.best.values()
        assert [name.split()[0] for name, _, _ in call.spans()] == ["kiln.call", "kiln.kernel"]
        assert all(0 <= start and taken >= 0 and start + taken <= call.seconds for _, start, taken in call.spans())
        count = len(call.steps)
        compiled(x)
        assert len(call.steps) == count and list(calls.best.values()) == [call]


def test_code_of_a_kernel_is_cut_out_of_its_module():
    text = "declare float @f(float)\n\ndefine void @nest0(ptr %a) {\n  ret void\n}\n\ndefine void @nest1(ptr %a) {\n  ret void\n}\n\ndefine void @entry0(ptr %b) {\n  call void @nest1(ptr %b)\n  ret void\n}\n"
    functions = split({"graph": "f", "half": "forward", "stage": "kernels", "language": "ll", "text": text})
    assert list(functions) == ["nest0", "nest1", "entry0"]
    assert [line for line in code_of(["entry0"], functions).splitlines() if "define" in line] == ["define void @entry0(ptr %b) {", "define void @nest1(ptr %a) {"]
    graph, spec = Graph(), TensorSpec((64, 256), (256, 1), torch.float32, torch.device("cuda:0"))
    x = graph.input("x", spec)
    graph.outputs = (graph.call(torch.ops.aten.sin.default, (x,), spec=spec),)
    made = generate(fuse(graph, False, Fusing(GRIDS)).kernels)
    (start,) = made.starts[0]
    ptx = split({"graph": "f", "half": "forward", "stage": "kernels", "language": "ptx", "text": made.ptx((9, 0))})
    assert code_of([start.function.name], ptx).startswith(f".visible .entry {start.function.name}(")


def test_functions_of_a_program_for_a_gpu_are_told(monkeypatch):
    """As on a machine with a GPU, up to the start of kernels."""
    graph, spec = Graph(), TensorSpec((64, 256), (256, 1), torch.float32, torch.device("cuda:0"))
    x = graph.input("x", spec)
    graph.outputs = (graph.call(torch.ops.aten.exp.default, (x,), spec=spec),)
    monkeypatch.setattr(told, "capability", lambda device: (9, 0))
    with Records() as records:
        told.tell(fuse(graph, False, Fusing(GRIDS)), graph, torch.device("cuda:0"), Dump("f").of("inference"), None)
    (kernel,), (text,) = records.kernels, [one for one in records.texts if one.language == "ptx"]
    assert kernel.device == "cuda" and f".entry {kernel.functions[0]}(" in text.text
    records.add(GraphRecord("f", None, 1, 1, None, "f"))
    (view,) = [one for one in page_data(records, {}, "gpu")["graphs"][0]["views"] if one["name"] == "inference"]
    assert [view["codes"][i]["title"] for i in view["kernels"][0]["codes"]] == ["Loops", "PTX"]
