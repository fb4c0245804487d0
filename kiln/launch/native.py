"""What the launcher needs of torch's libraries: found in the process, without torch's headers."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

import torch

from kiln import _held, _launch
from kiln.base.processor import is_multiplied_narrowly

#: In the order in which `_launch.c` takes them.
FUNCTIONS = (
    "aoti_torch_get_data_ptr", "aoti_torch_get_sizes", "aoti_torch_get_strides",
    "aoti_torch_get_storage_offset", "aoti_torch_get_dim", "aoti_torch_get_dtype", "aoti_torch_empty_strided",
    "aoti_torch_create_tensor_from_blob_v2", "aoti_torch__reinterpret_tensor", "aoti_torch_copy_",
    "aoti_torch_clone", "aoti_torch_delete_tensor_object", "aoti_torch_get_storage_size",
)  # fmt: skip
#: A tensor as an object of Python's, by what torch's releases call it; all take the address of the tensor.
WRAPS = (
    "_Z16THPVariable_WrapON2at10TensorBaseE",
    "_Z16THPVariable_WrapN2at10TensorBaseE",
    "_Z16THPVariable_WrapRKN2at10TensorBaseE",
)
#: A tensor's version; takes the address of the tensor.
VERSION = "_ZNK2at10TensorBase8_versionEv"
#: OneDNN's product of two matrices, written or added to a third, and the first of torch's releases whose
#: function was seen to take float32: what it refuses would end the process.
MULTIPLY = "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
SINCE = (2, 13)
#: What stands for torch's products where oneDNN has them faster.
PRODUCTS = ("kiln_mm_out", "kiln_addmm_out")
#: What hides keys from the ops of a thread, and what shows them again: an object is made and ended.
HIDE = "_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE"
SHOW = "_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev"
POOL = ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads")

#: Machines on which one call of many words and numbers serves for all C functions; see `_launch.h`.
CALLS_ANY = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def address(library: ctypes.CDLL, name: str) -> int:
    """Where a function of a library is."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _folder() -> Path:
    return Path(torch.__file__).parent / "lib"


@functools.cache
def library(name: str = "cpu") -> ctypes.CDLL:
    """One of torch's own libraries."""
    return ctypes.CDLL(str(_folder() / f"libtorch_{name}.so"))


@functools.cache
def set_up() -> None:
    """Give the launcher torch's functions: tensors, their memory, and the pool of threads."""
    host, python = library(), library("python")
    sample = torch.empty(1)
    words = range(16, 64, 8)
    offset = next(o for o in words if ctypes.c_uint64.from_address(id(sample) + o).value == sample._cdata)
    wrap = next(name for name in WRAPS if hasattr(python, name))
    threads = _threads()
    pool = [0] * len(POOL) if threads is None else [address(threads, name) for name in POOL]
    found = [address(host, name) for name in FUNCTIONS]
    defined = address(host, "aoti_torch_is_defined")
    hiding = [address(host, name) for name in (HIDE, SHOW)] if hides() else [0, 0]
    _launch.set_torch(offset, torch.Tensor, *found, address(python, wrap), *pool, defined, *hiding)
    _held.set_torch(offset, found[0], address(host, VERSION) if hasattr(host, VERSION) else 0)


@functools.cache
def hides() -> bool:
    """Whether plans can hide keys from the ops that they call."""
    return CALLS_ANY and all(hasattr(library(), name) for name in (HIDE, SHOW))


@functools.cache
def products() -> tuple[int, int]:
    """The addresses of what stands for torch's products in place; 0 where that is not to be had."""
    names = [name.replace("kiln_", "aoti_torch_cpu_") for name in PRODUCTS]
    found = all(hasattr(library(), name) for name in (*names, MULTIPLY))
    if not (CALLS_ANY and found and torch.__version__ >= SINCE):
        return 0, 0
    set_up()
    made: tuple[int, int] = _launch.set_products(*[address(library(), name) for name in (*names, MULTIPLY)])
    return made


def multiplies_in_place() -> bool:
    """Whether large products are oneDNN's, in place: where the library multiplies half of the vectors."""
    return is_multiplied_narrowly() and all(products())


def product_for(name: str) -> str:
    """The name of what stands for one of torch's products, or the name itself."""
    own = name.replace("aoti_torch_cpu_", "kiln_")
    return own if own in PRODUCTS and multiplies_in_place() else name


@functools.cache
def function(name: str) -> int:
    """The address of one of torch's C functions; 0 where there is none, or it cannot be called here."""
    if name in PRODUCTS:
        return products()[PRODUCTS.index(name)]
    place = library("cuda" if name.startswith("aoti_torch_cuda") else "cpu")
    return address(place, name) if CALLS_ANY and hasattr(place, name) else 0


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """The number that torch's C functions have for a dtype."""
    return int(getattr(library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


def _threads() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded; without one, kernels run on one thread."""
    for path in sorted(_folder().glob("libgomp*.so*")):
        return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
