"""The CUDA driver, found in the process with dlopen: makes machine code of PTX and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import torch

from kiln import _launch
from kiln.generate.code import Store as Store
from kiln.generate.cpu import workers
from kiln.generate.device import Function
from kiln.generate.nvptx import depends_on, reading_in_order, reads_early
from kiln.launch.native import address, library

LOG = 8192  # bytes of what the driver says of a module that it refuses
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # names of options of the driver's loader
PTX = 1  # what the driver's linker is given
MOST_SHARED = 8  # name of an attribute of functions: the bytes of shared memory that a start may ask for
STREAM = "aoti_torch_get_current_cuda_stream"
#: What the launcher calls, in the order in which it takes them.
FUNCTIONS = (
    "cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGetErrorString",
    "cuLaunchKernelEx",
)  # fmt: skip


class DriverError(RuntimeError):
    """The driver refused something."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library, known to the launcher."""
    found = ctypes.CDLL("libcuda.so.1")
    _launch.set_driver(address(library("cuda"), STREAM), *[address(found, name) for name in FUNCTIONS])
    return found


def _checked(error: int, what: str) -> None:
    if error:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(error, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise DriverError(f"{what}: {said}")


@functools.cache
def context(device: int) -> int:
    """The address of a device's own context, the one that torch uses."""
    torch.cuda.init()
    number, made = ctypes.c_int(), ctypes.c_void_p()
    _checked(driver().cuDeviceGet(ctypes.byref(number), device), "no such device")
    _checked(driver().cuDevicePrimaryCtxRetain(ctypes.byref(made), number), "a device has no context")
    return made.value or 0


@contextmanager
def inside(device: int) -> Iterator[ctypes.CDLL]:
    """The driver with a device's context in force on this thread."""
    found, before = driver(), ctypes.c_void_p()
    _checked(found.cuCtxPushCurrent_v2(ctypes.c_void_p(context(device))), "a device has no context")
    try:
        yield found
    finally:
        found.cuCtxPopCurrent_v2(ctypes.byref(before))


class _Options:
    """Options of the driver under which it says why it refuses a module."""

    def __init__(self) -> None:
        self.said = ctypes.create_string_buffer(LOG)
        self.names = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        self.values = (ctypes.c_void_p * 2)(ctypes.addressof(self.said), LOG)

    def checked(self, error: int) -> None:
        why = self.said.value.decode(errors="replace").strip().replace("\n", "; ")
        _checked(error, f"the driver refuses a module ({why})" if why else "the driver refuses a module")


def machine_code(text: str, device: int) -> bytes:
    """PTX as code of a device."""
    data, options, state = text.encode() + b"\0", _Options(), ctypes.c_void_p()
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    with inside(device) as cuda:
        options.checked(cuda.cuLinkCreate_v2(2, options.names, options.values, ctypes.byref(state)))
        try:
            given = (ctypes.c_char_p(data), ctypes.c_size_t(len(data)), None, 0, None, None)
            options.checked(cuda.cuLinkAddData_v2(state, PTX, *given))
            options.checked(cuda.cuLinkComplete(state, ctypes.byref(made), ctypes.byref(size)))
            return ctypes.string_at(made, size.value)
        finally:
            cuda.cuLinkDestroy(state)


def load(code: bytes, function: Function, device: int) -> int:
    """The handle of a function in a module of machine code or PTX, which stays loaded."""
    name = function.name
    options, module, found = _Options(), ctypes.c_void_p(), ctypes.c_void_p()
    with inside(device) as cuda:
        given = (ctypes.c_char_p(code), 2, options.names, options.values)
        options.checked(cuda.cuModuleLoadDataEx(ctypes.byref(module), *given))
        error = cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode())
        _checked(error, f"a module has no {name}")
        if function.shared:
            error = cuda.cuFuncSetAttribute(found, MOST_SHARED, function.shared)
            _checked(error, f"a block has no {function.shared:,} bytes of shared memory")
    return found.value or 0


@functools.cache
def version() -> int:
    """The version of the driver."""
    found = ctypes.c_int()
    _checked(driver().cuDriverGetVersion(ctypes.byref(found)), "the driver has no version")
    return found.value


_loaded: dict[tuple[int, str], int] = {}
"""The functions that are loaded, by device and key of their code."""
_making: dict[tuple[int, str], Future[bytes]] = {}
"""The code that other threads are at."""
_lock = threading.RLock()


class Loading:
    """Functions on their way to a device: other threads compile each from the moment that it is added.

    Their code comes from memory, from disk, or from LLVM and the driver.
    """

    def __init__(self, device: int, capability: tuple[int, int], store: Store | None = None) -> None:
        self.device, self.capability, self.store = device, capability, store
        name = "sm_{}{}".format(*capability)
        self.target = f"{depends_on()}, reads in order, {name}, driver {version()}"
        self.keys: dict[Function, tuple[int, str]] = {}
        self.coming: dict[Function, Future[bytes]] = {}

    def add(self, *functions: Function) -> Loading:
        with _lock:
            for one in functions:
                text = f"{self.target}, {one.threads}, {one.shared}\n{one.text}".encode()
                key = self.keys[one] = self.device, hashlib.sha256(text).hexdigest()
                if key in _loaded:
                    continue
                if key not in _making:
                    _making[key] = workers().submit(_code, one, self.capability, *key, self.store)
                self.coming[one] = _making[key]
        return self

    def finish(self) -> dict[Function, int]:
        """The handles of all functions, once they are compiled."""
        with _lock:
            for one, code in self.coming.items():
                key = self.keys[one]
                _making.pop(key, None)
                if key not in _loaded:
                    _loaded[key] = load(code.result(), one, self.device)
            return {one: _loaded[key] for one, key in self.keys.items()}


def _code(
    function: Function, capability: tuple[int, int], device: int, key: str, store: Store | None
) -> bytes:
    kept = getattr(function, "binary", b"") or (store.get(key) if store is not None else None)
    if kept:
        return kept
    text = function.ptx(capability)
    code = reading_in_order(text).encode() + b"\0"  # which the driver's loader takes too
    with suppress(DriverError):
        code = machine_code(text, device)
        if reads_early(code):
            code = machine_code(reading_in_order(text), device)
        if store is not None:
            store.put(key, code)
    return code
