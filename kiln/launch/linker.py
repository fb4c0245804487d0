"""CUDA's linker of machine code, a library that torch loads: it makes code of PTX without the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

#: Whether it is used where it is there.
USED = False
#: What it is called by the versions of CUDA.
NAMES = {13: "libnvJitLink.so.13", 12: "libnvJitLink.so.12"}
PTX = 2  # what it is given
FUNCTIONS = """nvJitLinkCreate nvJitLinkDestroy nvJitLinkAddData nvJitLinkComplete nvJitLinkGetLinkedCubinSize
    nvJitLinkGetLinkedCubin nvJitLinkVersion""".split()


class Refused(Exception):
    """The linker did not do something."""


@functools.cache
def linker(driver: int) -> tuple[Callable[..., Any], str]:
    """A function that calls the linker's, and its version; none where a driver may not take what it makes."""
    for release, name in NAMES.items() if USED else ():
        try:
            found = ctypes.CDLL(name)
            functions = {each: _function(found, each, release) for each in FUNCTIONS}
        except (OSError, AttributeError):
            continue

        def call(each: str, *args: Any, functions: Any = functions) -> None:
            if functions[each](*args):
                raise Refused(each)

        major, minor = ctypes.c_uint(), ctypes.c_uint()
        call("nvJitLinkVersion", ctypes.byref(major), ctypes.byref(minor))
        if 1000 * major.value + 10 * minor.value <= driver < 1000 * (major.value + 1):
            return call, f"linker {major.value}.{minor.value}"
    return _none, ""


def _function(library: Any, name: str, release: int) -> Any:
    """A function by its name, or by that which it has for programs that are built with a release of CUDA."""
    return getattr(library, name, None) or getattr(library, f"__{name}_{release}_0")


def _none(each: str, *args: Any) -> None:
    raise Refused(each)


def machine_code(text: str, capability: tuple[int, int], driver: int) -> bytes:
    """PTX as code of an architecture, for a version of the driver; Refused where that is not to be had."""
    call, _ = linker(driver)
    data, handle, size = text.encode() + b"\0", ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)("-arch=sm_{}{}".format(*capability).encode())
    call("nvJitLinkCreate", ctypes.byref(handle), ctypes.c_uint32(1), options)
    try:
        given = ctypes.c_char_p(data), ctypes.c_size_t(len(data)), ctypes.c_char_p(b"kiln")
        call("nvJitLinkAddData", handle, ctypes.c_int(PTX), *given)
        call("nvJitLinkComplete", handle)
        call("nvJitLinkGetLinkedCubinSize", handle, ctypes.byref(size))
        made = ctypes.create_string_buffer(size.value)
        call("nvJitLinkGetLinkedCubin", handle, made)
        return made.raw
    finally:
        call("nvJitLinkDestroy", ctypes.byref(handle))
