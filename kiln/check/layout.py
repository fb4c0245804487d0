"""Finds where torch keeps a tensor's properties in memory, so that C reads them without Python.

What is found is verified on tensors of all kinds; what does not verify is left to Python calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from kiln import _hook

_SPAN = 256  # bytes of a TensorImpl, and of its autograd metadata, that are looked at
_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
_DTYPES = tuple(getattr(torch, name) for name in _NAMES.split())
_KEYS = (
    "CPU CUDA Meta ADInplaceOrView AutogradCPU AutogradCUDA AutogradMeta AutocastCPU AutocastCUDA "
    "Conjugate Negative"
).split()


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _words(address: int) -> tuple[int, ...]:
    return tuple(_word(address + offset) for offset in range(0, _SPAN, 8))


def _only(candidates: Iterable[int]) -> int:
    (found,) = candidates
    return found


def keys_of(tensor: torch.Tensor) -> int:
    """The dispatch key set of a tensor as an integer."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No mode or subclass sees the torch calls inside."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@functools.cache
def _plain_keys() -> int:
    """The dispatch keys of tensors whose sizes, strides and storage are plain memory."""
    keys = [getattr(torch._C.DispatchKey, name) for name in _KEYS]
    return functools.reduce(int.__or__, [int(torch._C.DispatchKeySet(key).raw_repr()) for key in keys])


def is_plain(keys: int) -> bool:
    """Whether a tensor with these dispatch keys may be compared as memory."""
    return ready() and not keys & ~_plain_keys()


def _agreed(candidates: Callable[[], Iterable[int]], times: int = 8) -> int:
    """The first offset that is a candidate every time: what lies behind an object in memory is chance."""
    return min(set.intersection(*[set(candidates()) for _ in range(times)]))


def _find_layout() -> tuple[int, ...]:
    """Offsets in bytes, in the order that `_hook.set_tensor_layout` takes."""
    sample = torch.empty(2, 3, 4)
    impl = _only(o for o in range(16, 64, 8) if _word(id(sample) + o) == sample._cdata)
    dims = _agreed(_dims_offsets)
    words = _words(sample._cdata)
    inline = _only(n for n in range(3, 9) if words[dims // 8 + 1 + n :][:3] == (12, 4, 1))
    keys = _agreed(_keys_offsets)
    kind = _agreed(_kind_offsets)
    meta = _agreed(lambda: _meta_offsets(dims))
    requires_grad = _agreed(lambda: _requires_grad_offsets(meta))
    grad_fn = _agreed(lambda: _grad_fn_offsets(meta, requires_grad))
    view = _agreed(lambda: _view_offsets(meta, requires_grad))
    return impl, meta, dims, kind, keys, requires_grad, grad_fn, view, inline, 0xFF_FFFF_FFFF


def _dims_offsets() -> Iterator[int]:
    """Where the rank stands, followed by the sizes."""
    sample = torch.empty(2, 3, 4)
    words = _words(sample._cdata)
    return (8 * i for i in range(len(words) - 11) if words[i : i + 4] == (3, 2, 3, 4))


def _keys_offsets() -> Iterator[int]:
    sample = torch.empty(2, 3, 4)
    return (8 * i for i, word in enumerate(_words(sample._cdata)) if word == keys_of(sample))


def _kind_offsets() -> Iterator[int]:
    """The word that starts with the dtype (2 bytes), the device's type, index and presence (a byte each)."""
    others = [torch.empty(2, 3, 4, dtype=dtype) for dtype in _DTYPES]
    meta = torch.empty(2, 3, 4, device="meta")

    def fits(offset: int) -> bool:
        codes = [ctypes.c_uint16.from_address(t._cdata + offset).value for t in others]
        cpu, far = (ctypes.string_at(t._cdata + offset + 2, 3) for t in (others[0], meta))
        dtype_fits = len(set(codes)) == len(codes) and codes[0] == 6
        return dtype_fits and cpu == b"\0\xff\1" and far[0] != 0 and far[2] == 1

    return (offset for offset in range(0, 192, 8) if fits(offset))


def _meta_offsets(dims: int) -> Iterator[int]:
    """The pointer to the autograd metadata, which only a tensor with gradients has."""
    plain, leaf = torch.empty(2, 3, 4), torch.empty(2, 3, 4, requires_grad=True)
    pairs = zip(_words(plain._cdata)[: dims // 8], _words(leaf._cdata), strict=False)
    return (8 * i for i, (without, pointer) in enumerate(pairs) if not without and pointer)


def _requires_grad_offsets(meta: int) -> Iterator[int]:
    leaf = torch.empty(2, 3, 4, requires_grad=True)
    address = _word(leaf._cdata + meta)
    on = ctypes.string_at(address, _SPAN)
    leaf.requires_grad_(False)
    off = ctypes.string_at(address, _SPAN)
    return (i for i, pair in enumerate(zip(on, off, strict=True)) if pair == (1, 0))


def _grad_fn_offsets(meta: int, requires_grad: int) -> Iterator[int]:
    result = torch.mul(torch.empty(2, 3, 4, requires_grad=True), 2)
    grad_fn = result.grad_fn
    node = _word(id(grad_fn) + 16)  # what the Python object of a grad_fn holds first
    words = _words(_word(result._cdata + meta))
    return (8 * i for i, word in enumerate(words) if word == node and 8 * i < requires_grad)


def _view_offsets(meta: int, requires_grad: int) -> Iterator[int]:
    """The byte of the autograd metadata that says that a tensor is a view of another one."""
    base = torch.empty(4, 6)
    with torch.enable_grad():
        tensors = (base[:2], torch.nn.Parameter(base))
        view, plain = (ctypes.string_at(_word(t._cdata + meta), _SPAN) for t in tensors)
    return (i for i in range(requires_grad + 1, requires_grad + 8) if (view[i], plain[i]) == (1, 0))


def _samples() -> Iterator[torch.Tensor]:
    for dtype in _DTYPES:
        yield torch.empty(3, dtype=dtype)
    for shape in ((), (0,), (1,), (4, 5), (2, 3, 4, 5, 6), (2, 1, 2, 1, 2, 3), (1,) * 9):
        yield torch.empty(shape)
        yield torch.empty(shape, device="meta", dtype=torch.float64)
    base = torch.empty(4, 6, requires_grad=True)
    yield from (base, base.t(), base[:, ::2], base.detach(), base * 2, torch.nn.Parameter(torch.empty(2, 2)))
    yield torch.nn.Parameter(torch.empty(2, 2), requires_grad=False)
    with torch.enable_grad():
        owner = torch.ones(4, 4)
        part = owner[:2]
        owner.mul_(torch.ones(4, requires_grad=True))
        yield part
    yield base.detach().requires_grad_(True).requires_grad_(False)
    yield torch.view_as_complex(torch.empty(2, 2)).conj()
    with torch.inference_mode():
        yield torch.empty(2, 2)


def kind_word(dtype: torch.dtype, device: torch.device) -> int:
    """The word that tensors of this dtype and device carry."""
    return _kind_word(dtype, str(device))


@functools.cache
def _kind_word(dtype: torch.dtype, device: str) -> int:
    with _undisturbed():
        return int(_hook.tensor_words(torch.empty(0, dtype=dtype, device=device))[0])


def _verify_layout() -> None:
    for tensor in _samples():
        expected = kind_word(tensor.dtype, tensor.device), keys_of(tensor), tensor.requires_grad
        _demand(_hook.tensor_words(tensor) == expected, tensor)
        operand = type(tensor), *expected, tuple(tensor.shape), tuple(tensor.stride())
        guards = _hook.Guards([(-1, _hook.FETCH_ARG, 0)], [(_hook.CHECK_TENSOR, (0,), operand)])
        _demand(guards.check((tensor,)), tensor)


def _demand(true: bool, tensor: torch.Tensor) -> None:
    if not true:
        raise LookupError(f"a tensor is not as the layout has it: {tensor.dtype}, {tuple(tensor.shape)}")


@functools.cache
def ready() -> bool:
    """Whether C reads tensors as memory; finds the layout on the first call."""
    try:
        with _undisturbed(), torch.inference_mode(False), torch.enable_grad():
            _hook.set_tensor_layout(*_find_layout())
            _verify_layout()
    except Exception:
        _hook.set_tensor_layout()
        return False
    return True
