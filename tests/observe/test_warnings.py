"""Warnings: one line, once for each place, with what to do; an internal error leaves a file for a report."""

import re
from pathlib import Path

import pytest
import torch

import kiln
from kiln import pipeline
from kiln.base import log, records


@pytest.fixture
def said(caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("KILN_STRICT", raising=False)
    kiln.reset()
    log.forget()
    with kiln.config.patch(strict=False):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "kiln"]


def line_of(function, text):
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines[first - 1 :], first) if text in line)


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.names = ["a"]

    def forward(self, x):
        for name in self.names:
            x = x + len(name)
        return x


def test_a_recompile_that_keeps_happening_is_said_once_with_its_line_and_remedy(said):
    model = Counter()
    compiled = kiln.compile(model, backend="eager")
    for i in range(7):
        model.names = ["a"] * (i + 1)
        compiled(torch.ones(2))
    (text,) = said()
    assert "\n" not in text and "Counter" in text and "is compiled again and again, 3 times so far" in text
    assert f"{__file__}:{line_of(Counter.forward, 'for name in')}" in text
    assert "self.names had length 3, now 4" in text and "make self.names once" in text


def test_a_changing_size_is_said_with_the_mark_that_ends_it(said):
    def grown(x):
        return x * 2

    compiled = kiln.compile(grown, backend="eager", dynamic=False)
    for n in range(2, 8):
        compiled(torch.ones(n))
    (text,) = said()
    assert "grown" in text and "x.shape was (4,), now (5,)" in text and "compile without dynamic=False" in text
    told = kiln.explain(grown, backend="eager")
    told(torch.ones(2))
    (recompile,) = told(torch.ones(3)).facts["recompiles"]
    assert "call kiln.mark_dynamic(x, 0)" in recompile["remedy"]
    kiln.reset()
    marked = kiln.compile(lambda x: x * 2, backend="eager")
    with kiln.records() as seen:
        for n in range(2, 8):
            x = torch.ones(n)
            kiln.mark_dynamic(x, 0)
            marked(x)
    assert not seen.recompiles and len(said()) == 1


def test_the_limit_of_entries_is_said_once_with_the_guard_and_its_remedy(said):
    def labelled(x, name):
        return x + len(name)

    compiled = kiln.compile(labelled, backend="eager", options=None)
    with kiln.config.patch(cache_limit=2), kiln.records() as seen:
        for name in ("a", "b", "c", "d", "e"):
            assert compiled(torch.ones(2), name).equal(torch.full((2,), 2.0))
    (text,) = said()
    assert "was compiled 2 times and runs eagerly from now on" in text and "name was 'b', now 'c'" in text
    assert "keep name the same in every call" in text
    assert [one.limited for one in seen.recompiles] == [False, True]


def looping(x):
    total = 0.0
    for row in x.unbind():
        total += round(row.sum().item(), 6)
    return x * total


def test_a_break_in_a_loop_is_said_once_with_its_line_and_remedy(said):
    compiled = kiln.compile(looping, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(4, 2)), looping(torch.ones(4, 2)))
    about = [text for text in said() if "a loop leaves the graph in every turn" in text and "[data-dependent]" in text]
    (text,) = about
    assert f"{__file__}:{line_of(looping, '.item()')}" in text and "keep the value a tensor, without .item()" in text


def test_an_internal_error_leaves_a_file_to_attach(said, monkeypatch):
    def broken(*args, **kwargs):
        raise AssertionError("an invariant does not hold")

    monkeypatch.setattr(pipeline, "capture", broken)

    def doubled(x):
        return x * 2

    compiled = kiln.compile(doubled, backend="eager")
    with kiln.records() as seen:
        assert compiled(torch.ones(2)).equal(torch.full((2,), 2.0))
        compiled(torch.ones(2))
    (text,) = said()
    assert "doubled runs eagerly after an internal error (AssertionError: an invariant does not hold)" in text
    file = Path(re.search(r"attach (\S+) to a report", text)[1])
    written = file.read_text()
    for part in ("Python 3", "torch 2", "Traceback", "an invariant does not hold", "return x * 2"):
        assert part in written
    (record,) = seen.fallbacks
    assert record.file == str(file)


def test_a_graph_that_is_not_compiled_leaves_a_file_with_it(said, monkeypatch):
    def broken(*args, **kwargs):
        raise AssertionError("no code")

    monkeypatch.setattr("kiln.launch.program.fuse", broken)
    compiled = kiln.compile(lambda x: x.sin() + 1)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
    (text,) = said()
    assert "is not compiled and runs op by op (AssertionError: no code)" in text
    assert "torch.ops.aten.sin.default" in Path(re.search(r"attach (\S+) to a report", text)[1]).read_text()


def test_nothing_is_emitted_by_a_call_that_hits():
    compiled = kiln.compile(lambda x: x * 2 + 1)
    compiled(torch.ones(3))
    with records.Records() as seen:
        for _ in range(10):
            compiled(torch.ones(3))
    assert repr(seen) == "Records()"
