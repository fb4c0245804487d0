"""Who made the processor, as the system tells it."""

import pathlib

import pytest

from kiln.base import processor


def of_amd(family: int) -> str:
    return f"processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t: 2\n"


@pytest.mark.parametrize(
    ("told", "maker", "narrowly"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 26\nmodel\t: 1\n", "GenuineIntel", False),
        (of_amd(25), "AuthenticAMD", False),
        (of_amd(26), "AuthenticAMD", True),
        ("BogoMIPS\t: 50.00\n", "", False),
        (None, "", False),
    ],
)
def test_what_the_system_tells_of_the_processor(monkeypatch, tmp_path, told, maker, narrowly):
    path = tmp_path / "cpuinfo"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(processor, "Path", lambda _: pathlib.Path(path))
    monkeypatch.setattr(processor, "told", processor.told.__wrapped__)
    assert (processor.maker(), processor.is_multiplied_narrowly()) == (maker, narrowly)
