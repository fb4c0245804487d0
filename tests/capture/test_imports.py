"""Modules that a program imports on its way: what they do at import is no part of the program's graphs."""

import sys

import torch

import kiln
from kiln.base import records


def test_what_an_import_runs_is_left_alone(tmp_path, monkeypatch):
    source = "import torch\ndef helper(t):\n    return t * 3 + 1\nVALUE = helper(torch.ones(2))\n"
    (tmp_path / "imported_on_the_way.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def f(x):
        y = x + 1
        import imported_on_the_way

        return y * imported_on_the_way.VALUE + imported_on_the_way.helper(x)

    with records.collect() as told:
        result = kiln.compile(f, backend="eager")(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 12.0))
    assert [record.kind for record in told.breaks] == ["import"]
    assert {record.region for record in told.graphs} == {f.__qualname__} and len(told.graphs) == 2
    del sys.modules["imported_on_the_way"]


def test_a_module_that_is_not_installed(tmp_path, monkeypatch):
    def f(x):
        try:
            import imported_if_there
        except ImportError as error:
            return x + 1, str(error), error.name
        return x * imported_if_there.VALUE, "", ""

    x = torch.ones(2)
    with records.collect() as told:
        compiled = kiln.compile(f, backend="eager", fullgraph=True)
        for _ in range(2):
            got = compiled(x)
            assert torch.equal(got[0], x + 1) and got[1:] == f(x)[1:]
    assert (len(told.graphs), len(told.breaks), len(told.recompiles)) == (1, 0, 0)
    (tmp_path / "imported_if_there.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(kiln.compile(f, backend="eager")(x)[0], x * 5)
    del sys.modules["imported_if_there"]
