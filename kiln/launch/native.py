"""What the launcher needs of torch's libraries: found in the process, without torch's headers."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from kiln import _held, _launch


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@functools.cache
def set_up() -> None:
    """Give the launcher torch's functions: where a tensor's memory is, and its pool of threads."""
    folder = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    sample = torch.empty(1)
    words = range(16, 64, 8)
    offset = next(o for o in words if ctypes.c_uint64.from_address(id(sample) + o).value == sample._cdata)
    pool = [_address(threads, name) for name in (
        "GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads")
    ] if (threads := _threads(folder)) is not None else [0, 0, 0, 0]  # fmt: skip
    data_pointer = _address(library, "aoti_torch_get_data_ptr")
    _launch.set_torch(offset, data_pointer, *pool)
    _held.set_torch(offset, data_pointer)


def _threads(folder: Path) -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded; without one, kernels run on one thread."""
    for path in sorted(folder.glob("libgomp*.so*")):
        return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
