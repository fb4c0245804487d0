"""Machine code by CUDA's linker, where it is there; no GPU is needed."""

from types import SimpleNamespace

import pytest

from kiln.launch import cuda, linker

from .test_loading import driver, functions_of

assert driver


def library_of(calls, refuses=(), version=(13, 0), spelled="{}"):
    """A linker that gives the text back, and notes what it is asked."""

    def function(name):
        def run(*given):
            calls.append(name)
            if name == "nvJitLinkVersion":
                for place, number in zip(given, version, strict=True):
                    place._obj.value = number
            if name == "nvJitLinkAddData":
                run.text = given[2].value
                texts.append(run.text)
            if name == "nvJitLinkGetLinkedCubinSize":
                given[1]._obj.value = len(texts[-1])
            if name == "nvJitLinkGetLinkedCubin":
                given[1].raw = texts[-1]
            return name in refuses

        return run

    texts = []
    return SimpleNamespace(**{spelled.format(name): function(name) for name in linker.FUNCTIONS})


@pytest.mark.parametrize("spelled", ["{}", "__{}_13_0"])
@pytest.mark.parametrize("refuses", [(), ("nvJitLinkComplete",), ("nvJitLinkCreate",)])
def test_a_linker_makes_the_code_where_there_is_one(driver, refuses, spelled, monkeypatch):
    """What it does not make the driver does."""
    compiled, _ = driver
    calls, (function,) = [], functions_of(["add"])
    monkeypatch.setattr(linker, "USED", True)
    monkeypatch.setattr(linker.ctypes, "CDLL", lambda name: library_of(calls, refuses, spelled=spelled))
    linker.linker.cache_clear()
    try:
        assert cuda.Loading(0, (9, 0)).add(function).finish()
        assert "linker 13.0" in cuda.Loading(0, (9, 0)).target
    finally:
        linker.linker.cache_clear()
    assert bool(compiled) == bool(refuses) and "nvJitLinkVersion" in calls
    assert calls.count("nvJitLinkDestroy") == ("nvJitLinkCreate" not in refuses)


def test_a_linker_that_is_newer_than_the_driver_is_not_used(monkeypatch):
    monkeypatch.setattr(linker, "USED", True)
    monkeypatch.setattr(linker.ctypes, "CDLL", lambda name: library_of([], version=(13, 1)))
    linker.linker.cache_clear()
    try:
        assert linker.linker(13000)[1] == linker.linker(14000)[1] == "" and linker.linker(13010)[1] == "linker 13.1"
    finally:
        linker.linker.cache_clear()
