"""Who made the processor, as the system tells it."""

import pathlib

import pytest

from kiln.base import processor


@pytest.mark.parametrize(
    ("told", "found"),
    [("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t: 1\n", "GenuineIntel"), ("BogoMIPS\t: 50.00\n", ""), (None, "")],
)
def test_the_maker_is_read_from_the_system(monkeypatch, tmp_path, told, found):
    path = tmp_path / "cpuinfo"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(processor, "Path", lambda _: pathlib.Path(path))
    assert processor.maker.__wrapped__() == found
