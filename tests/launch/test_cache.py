"""The disk cache: what is found is what was kept, damage is a miss, and a second process generates nothing."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kiln.base import log
from kiln.launch import cache as disk_cache
from kiln.launch.cache import ABANDONED, MAGIC, Cache, CacheRefused, disk

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "kept", 1 << 20, create=True)


@pytest.mark.smoke
def test_what_is_kept_is_found(cache):
    assert cache.get(KEY) is None
    cache.put(KEY, b"machine code")
    assert cache.get(KEY) == b"machine code" and cache.get(OTHER) is None
    cache.put(KEY, b"")
    assert cache.get(KEY) == b""
    assert [entry.key for entry in cache.entries()] == [KEY]
    assert os.stat(cache.folder).st_mode & 0o777 == 0o700
    assert os.stat(cache.path(KEY)).st_mode & 0o777 == 0o600


def cut(held):
    return held[: len(held) // 2]


DAMAGES = {
    "cut": cut,
    "empty": lambda held: b"",
    "header alone": lambda held: held[: len(MAGIC)],
    "one bit": lambda held: held[:-1] + bytes([held[-1] ^ 1]),
    "more": lambda held: held + b"\0",
    "another program's": lambda held: b"\x80\x04K\x01." + held,
    "another version's": lambda held: held.replace(b"cache 1", b"cache 2"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_miss_and_goes(cache, damage):
    cache.put(KEY, b"machine code" * 100)
    path = cache.path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    assert [entry.key for entry in cache.faults()] == [KEY]
    assert cache.get(KEY) is None and not path.exists()
    cache.put(KEY, b"again")
    assert cache.get(KEY) == b"again" and not cache.faults()


def test_a_file_of_another_key_is_a_miss(cache):
    cache.put(KEY, b"machine code")
    os.rename(cache.path(KEY), cache.path(OTHER))
    assert cache.get(OTHER) is None


def test_links_are_not_followed(cache, tmp_path):
    cache.put(KEY, b"machine code")
    outside = tmp_path / "outside"
    os.rename(cache.path(KEY), outside)
    os.symlink(outside, cache.path(KEY))
    assert cache.get(KEY) is None and cache.entries() == []


def test_the_least_lately_used_goes_first(tmp_path):
    size = len(disk_cache.sealed(KEY, b"x" * 1000))
    cache = Cache(tmp_path / "kept", 3 * size, create=True)
    for age, key in enumerate("cde"):
        cache.put(key, b"x" * 1000)
        os.utime(cache.path(key), (1000 + age, 1000 + age))
    assert cache.get("c") is not None  # used now
    cache.put("f", b"x" * 1000)
    assert len(cache.entries()) == 4  # nobody looks after each write
    os.utime(cache.folder / disk_cache.MARK, (1000, 1000))
    cache.put("f", b"x" * 1000)
    assert {entry.key for entry in cache.entries()} == {"c", "e", "f"}
    cache.put("g", b"x" * 4000)  # larger than all that may be kept
    assert {entry.key for entry in cache.entries()} == {"c", "e", "f"}


def test_unfinished_files_are_taken_away(cache):
    old = cache.folder / "left.part"
    old.write_bytes(b"half")
    new = cache.folder / "now.part"
    new.write_bytes(b"half")
    before = os.stat(new).st_mtime - ABANDONED - 10
    os.utime(old, (before, before))
    cache.put(KEY, b"machine code")
    assert not old.exists() and new.exists()
    assert cache.clear() == 2 and [path.name for path in cache.folder.iterdir()] == [disk_cache.MARK]


def test_an_open_folder_is_refused_with_one_line(tmp_path, monkeypatch, caplog):
    place = tmp_path / "open"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(CacheRefused, match=f"chmod 700 {place}"):
        Cache(place, 1000)
    monkeypatch.setenv("KILN_CACHE_DIR", str(place))
    monkeypatch.delenv("KILN_CACHE", raising=False)
    log.forget()
    assert disk(1000) is None and disk(1000) is None
    assert len([r for r in caplog.records if "open to other users" in r.message]) == 1


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheRefused, match="another user"):
        Cache(tmp_path, 1000)


def test_a_folder_that_cannot_be_made_switches_the_cache_off(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "file" / "kept"))
    monkeypatch.delenv("KILN_CACHE", raising=False)
    assert disk(1000) is None


def test_it_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("KILN_CACHE", "0")
    assert disk(1000) is None
    monkeypatch.setenv("KILN_CACHE", "1")
    assert disk(0) is None and disk(1000) is not None


def test_threads_write_and_read_whole_files(cache):
    wrong = []

    def work(number):
        for turn in range(50):
            key = f"{(number + turn) % 5}"
            cache.put(key, key.encode() * 1000)
            found = cache.get(key)
            if found not in (None, key.encode() * 1000):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not cache.faults() and len(cache.entries()) == 5


PROGRAM = """
import json, sys, torch
import kiln
from kiln.base import records
from kiln.generate import cpu
generated = []
emit = cpu.object_file
cpu.object_file = lambda text: generated.append(text) or emit(text)

def f(x, y):
    return torch.softmax(x * SCALE, -1) + torch.nn.functional.gelu(y)

x, y = torch.linspace(-3, 3, 96).reshape(8, 12).requires_grad_(), torch.linspace(-1, 1, 96).reshape(8, 12)
out = kiln.compile(f, fullgraph=True)(x, y)
(out * y).sum().backward()
grad, x.grad = x.grad, None
expected = f(x, y)
(expected * y).sum().backward()
torch.testing.assert_close(out, expected)
torch.testing.assert_close(grad, x.grad)
print(json.dumps([[r.source for r in records.log.codes], len(generated)]))
"""


def in_process(folder, scale=2.0, **environment):
    """Where the code of forward and backward came from in a new process, and how often LLVM generated code."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("SCALE", str(scale))], capture_output=True, text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KILN_CACHE_DIR": str(folder), "KILN_CACHE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_generates_no_code(tmp_path):
    folder = tmp_path / "kept"
    sources, generated = in_process(folder)
    assert sources == ["compiled"] * 2 and generated >= 2
    assert in_process(folder) == [["disk"] * 2, 0]
    # Another program finds nothing of it: a constant is part of the text.
    assert in_process(folder, scale=3.0)[0] == ["compiled"] * 2
    for path in folder.glob("*.kiln"):
        path.write_bytes(cut(path.read_bytes()))
    assert in_process(folder)[0] == ["compiled"] * 2
    assert in_process(folder, KILN_CACHE="0")[0] == ["compiled"] * 2


def test_the_key_holds_what_code_depends_on(monkeypatch):
    from kiln.generate import code

    kept = {}

    class Store:
        def get(self, key):
            return kept.get(key)

        def put(self, key, data):
            kept[key] = data

    text = "define void @entry0() {\n ret void\n}\n"
    held = [code.code_for(text, Store())]
    assert held[0].source == "compiled" and held[0].wait().address("entry0")
    assert code.code_for(text, Store()).source == "memory"
    held.clear()
    assert code.code_for(text, Store()).source == "disk"
    monkeypatch.setattr(code, "depends_on", lambda: "another processor")
    for other in (text, text.replace("entry0", "entry1")):
        made = code.code_for(other, Store())
        assert made.source == "compiled" and made.wait()
    assert len(kept) == 3
