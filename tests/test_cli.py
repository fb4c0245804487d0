"""The command `kiln`: what it prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kiln import __version__
from kiln.cli import app
from kiln.launch.cache import Cache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "kept"
    monkeypatch.setenv("KILN_CACHE_DIR", str(place))
    monkeypatch.delenv("KILN_CACHE", raising=False)
    return place


def kiln(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def asked(*arguments, code=0):
    return json.loads(kiln(*arguments, "--json", code=code).stdout)


def filled(folder):
    cache = Cache(folder, 1 << 20, create=True)
    cache.put("a" * 64, b"x" * 1000)
    cache.put("b" * 64, b"y" * 3000)
    return cache


def test_show_says_where_it_is_and_what_it_takes(folder):
    empty = asked("cache", "show")
    assert (empty["folder"], empty["entries"], empty["bytes"], empty["on"]) == (str(folder), 0, 0, True)
    assert empty["last_used"] is None and not folder.exists()
    cache = filled(folder)
    full = asked("cache", "show")
    assert full["entries"] == 2 and full["bytes"] == sum(entry.size for entry in cache.entries())
    text = "".join(kiln("cache", "show").stdout.split())
    assert str(folder) in text and "4.0KiBofatmost1.0GiB" in text


def test_show_says_that_it_is_off(folder, monkeypatch):
    monkeypatch.setenv("KILN_CACHE", "0")
    assert asked("cache", "show")["on"] is False
    assert "off:KILN_CACHE" in "".join(kiln("cache", "show").stdout.split())


def test_check_finds_damage_and_exits_with_1(folder):
    cache = filled(folder)
    assert asked("cache", "check") == {"entries": 2, "damaged": []}
    path = cache.path("a" * 64)
    path.write_bytes(path.read_bytes()[:-1])
    assert asked("cache", "check", code=1) == {"entries": 2, "damaged": [str(path)]}
    assert f"damaged: {path}" in kiln("cache", "check", code=1).stdout


def test_clear_removes_all_entries(folder):
    assert asked("cache", "clear") == {"removed": 0}
    cache = filled(folder)
    assert asked("cache", "clear") == {"removed": 2} and cache.entries() == []
    assert kiln("cache", "clear").stdout == "0 entries removed\n"


def test_a_refused_folder_is_one_line_and_exit_code_1(folder):
    folder.mkdir()
    folder.chmod(0o755)
    for command in ("show", "check", "clear"):
        result = kiln("cache", command, code=1)
        assert result.stderr.startswith("kiln: ") and "chmod 700" in result.stderr and not result.stdout


def test_help_shows_an_example_and_wrong_use_exits_with_2(folder):
    for command in ("show", "check", "clear"):
        assert f"Example: kiln cache {command}" in " ".join(kiln("cache", command, "--help").stdout.split())
    assert "cache" in kiln("--help").stdout and kiln("--version").stdout == f"kiln {__version__}\n"
    kiln("cache", "sow", code=2)


def test_the_command_is_light():
    program = "import sys, kiln.cli; print('torch' in sys.modules, 'llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
    done = subprocess.run([sys.executable, "-m", "kiln", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"kiln {__version__}\n"
