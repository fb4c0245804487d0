"""The CUDA driver: loads PTX, found in the process with dlopen."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from kiln import _cuda

LOG = 8192  # bytes of what the driver says of a module that it refuses
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # names of options of the driver's loader
#: What the launcher calls.
FUNCTIONS = (
    "cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGetErrorString",
)  # fmt: skip


class DriverError(RuntimeError):
    """The driver refused something."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library, known to the launcher."""
    library = ctypes.CDLL("libcuda.so.1")
    host = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    sample = torch.empty(1)
    words = range(16, 64, 8)
    offset = next(o for o in words if ctypes.c_uint64.from_address(id(sample) + o).value == sample._cdata)
    _cuda.set_driver(
        offset, _address(host, "aoti_torch_get_data_ptr"), *[_address(library, name) for name in FUNCTIONS]
    )
    return library


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


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


class Loaded:
    """A module in the memory of a device."""

    def __init__(self, text: str, device: int) -> None:
        library, before = driver(), ctypes.c_void_p()
        self._module = ctypes.c_void_p()
        self._functions: dict[str, int] = {}
        said = ctypes.create_string_buffer(LOG)
        options = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(said), LOG)
        _checked(library.cuCtxPushCurrent_v2(ctypes.c_void_p(context(device))), "a device has no context")
        try:
            error = library.cuModuleLoadDataEx(
                ctypes.byref(self._module), ctypes.c_char_p(text.encode()), 2, options, values
            )
            why = said.value.decode(errors="replace").strip().replace("\n", "; ")
            _checked(error, f"the driver refuses a module ({why})" if why else "the driver refuses a module")
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def function(self, name: str) -> int:
        """The handle of a kernel."""
        known = self._functions.get(name)
        if known is None:
            found = ctypes.c_void_p()
            error = driver().cuModuleGetFunction(ctypes.byref(found), self._module, name.encode())
            _checked(error, f"a module has no {name}")
            known = self._functions[name] = found.value or 0
        return known
