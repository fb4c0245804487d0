"""Kernels are compiled by other threads, each once, also where several programs have it; no GPU is needed."""

import threading

import pytest
import torch

from kiln.generate import device
from kiln.generate.device import Function, generate
from kiln.generate.nvptx import WAITS, Unsupported, reads_early
from kiln.launch import cuda

from .emitted import kernels_of
from .programs import FOLDS, POINTWISE

NAMES = ["add", "broadcast", "layer norm", "softmax of 1000", "columns"]


@pytest.fixture
def driver(monkeypatch):
    """What the driver was given: PTX by device, and the names of loaded functions."""
    compiled, names = [], []

    def machine_code(text, device):
        compiled.append(text)
        return text.encode()

    def load(code, function, device):
        assert function.name.encode() in code
        names.append(function.name)
        return len(names)

    monkeypatch.setattr(cuda, "machine_code", machine_code)
    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "version", lambda: 13000)
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(cuda, "_making", {})
    return compiled, names


def functions_of(names):
    programs = {**POINTWISE, **FOLDS}
    made = []
    for name in names:
        f, *makers = programs[name]
        made += generate(kernels_of(f, *[make("cpu", torch.float32) for make in makers])).functions
    return made


def test_each_function_is_compiled_once(driver):
    compiled, names = driver
    functions = functions_of(NAMES)
    first = cuda.Loading(0, (9, 0)).add(*functions[:4]).finish
    second = cuda.Loading(0, (9, 0)).add(*functions[2:]).finish
    handles = second() | first()
    assert len(handles) == len(functions) == len(set(handles.values())) == len(names)
    assert sorted(compiled) == sorted(f.ptx((9, 0)) for f in functions)
    assert cuda.Loading(0, (9, 0)).add(*functions).finish() == handles and len(compiled) == len(functions)
    assert not cuda._making


def test_nothing_is_read_before_the_wait_of_machine_code(driver, monkeypatch):
    """What PTX says is only read may be read early; then it is compiled again, as memory that others write."""
    wait, load, other = (word.to_bytes(8, "little") + bytes(8) for word in (WAITS, 0x7981, 0x7919))
    good, early = other + wait + load, load + wait + other
    assert reads_early(early) and not reads_early(good) and not reads_early(load + other) and not reads_early(b"")
    (function,), given = functions_of(["add"]), []

    def machine_code(text, device):
        given.append(text)
        return (early if ".nc." in text else good) + function.name.encode()

    monkeypatch.setattr(cuda, "machine_code", machine_code)
    cuda.Loading(0, (9, 0)).add(function).finish()
    assert [".nc." in text for text in given] == [True, False]
    assert ".nc." not in function.ptx((10, 0)) and ".nc." in function.ptx((8, 0))


def test_what_cannot_be_compiled_is_raised_where_it_is_waited_for(driver):
    text = "declare float @unknown(float)\ndefine ptx_kernel void @k(ptr %p) {\n  ret void\n}"
    for _ in range(2):
        coming = cuda.Loading(0, (9, 0)).add(Function("k", text, 32)).finish
        with pytest.raises(Unsupported, match="unknown"):
            coming()


def test_threads_load_at_once(driver):
    functions, found, wanted = functions_of(NAMES), [], {}
    wanted = {f: f.ptx((9, 0)) for f in functions}

    def work(device):
        for _ in range(3):
            handles = cuda.Loading(device, (9, 0)).add(*functions).finish()
            found.append(handles.keys() == wanted.keys())
            cuda._loaded.clear()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 18 and set(driver[0]) == set(wanted.values())


@pytest.mark.parametrize("name", ["add", "broadcast", "layer norm", "softmax of 1000", "columns"])
def test_nests_that_are_alike_are_written_once(name, monkeypatch):
    f, *makers = {**POINTWISE, **FOLDS}[name]
    inputs = [make("cpu", torch.float32) for make in makers]
    kernels = [*kernels_of(f, *inputs), *kernels_of(f, *inputs)]
    written, emitter = [], device.GridEmitter
    monkeypatch.setattr(device, "GridEmitter", lambda nest, *how: written.append(nest) or emitter(nest, *how))
    made = generate(kernels)
    first, second = made.starts[: len(kernels) // 2], made.starts[len(kernels) // 2 :]
    assert len(written) == len([start for some in first for start in some])
    for one, other in zip(sum(first, []), sum(second, []), strict=True):
        assert (one.function, one.blocks, one.threads) == (other.function, other.blocks, other.threads)
        assert one.given == device.given(emitter(one.nests[0])) and one.nests[0] is not other.nests[0]
        assert other.given == device.given(emitter(other.nests[0]))
