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
