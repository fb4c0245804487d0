"""torch's global state: read through Python, and through functions of libc10 and libtorch that C can call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from kiln import _hook
from kiln.check import layout

State = dict[str, Any]

_DEVICES = ("cpu", "cuda")

# In the order that `_hook.set_state_functions` takes: library, mangled name.
_FUNCTIONS = (
    ("c10", "_ZN3c1013AutogradState13get_tls_stateEv"),
    ("c10", "_ZN3c1017get_default_dtypeEv"),
    ("torch_cpu", "_ZN2at13globalContextEv"),
    ("torch_cpu", "_ZNK2at7Context23deterministicAlgorithmsEv"),
    ("torch_cpu", "_ZNK2at7Context31deterministicAlgorithmsWarnOnlyEv"),
    ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"),
    ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv"),
    ("c10", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
    ("torch_cpu", "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE"),
    ("torch_cpu", "_ZN2at8autocast25is_autocast_cache_enabledEv"),
)
_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"


def read_state() -> State:
    """All switches that change what torch functions do, by the name that a recompile reason gives them."""
    autocast = tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward-mode grad": torch._C._is_fwd_grad_enabled(),
        "autocast dtype (cpu, cuda)": autocast,
        "autocast cache": torch.is_autocast_cache_enabled() if any(autocast) else None,
        "default dtype": torch.get_default_dtype(),
        "default device": _default_device(),
        "deterministic algorithms (on, warn only)": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch function (on, all off)": (
            torch._C._is_torch_function_enabled(),
            torch._C._is_torch_function_all_disabled(),
        ),
        "torch function modes": tuple(map(type, _get_current_function_mode_stack())),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys (included, excluded)": (
            torch._C._dispatch_tls_local_include_set().raw_repr(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        ),
    }


def observed() -> bool:
    """Whether modes see the torch calls of this thread, and may make something else of them."""
    modes = _get_current_function_mode_stack()
    return torch._C._len_torch_dispatch_stack() > 0 or any(type(m) is not DeviceContext for m in modes)


def _default_device() -> str:
    modes = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
    return str(modes[-1].device) if modes else "cpu"


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))


def _set_functions(included: int = 0, excluded: int = 0) -> None:
    functions = (getattr(_library(where), name) for where, name in _FUNCTIONS)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    offset, *bits = _autograd_bits()
    _hook.set_state_functions(_library("c10")._name, _KEYS, offset, sum(bits), included, excluded, *addresses)


@functools.cache
def _autograd_bits() -> tuple[int, int, int, int]:
    """The offset of a byte in the autograd state; its bits for grad, forward-mode grad and inference mode."""
    where = getattr(_library("c10"), _FUNCTIONS[0][1])
    where.restype = ctypes.c_void_p
    start = ctypes.string_at(where(), 32)

    def changed() -> list[int]:
        return [a ^ b for a, b in zip(start, ctypes.string_at(where(), 32), strict=True)]

    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        grads = changed()
    (offset,) = (i for i, bits in enumerate(grads) if bits)
    forward = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(not forward)
    fwd = changed()[offset]
    torch._C._set_fwd_grad_enabled(forward)
    with torch.autograd.set_multithreading_enabled(not torch._C._is_multithreading_enabled()):
        others = changed()[offset] | grads[offset] | fwd
    with torch.inference_mode(not torch.is_inference_mode_enabled()):
        inference = changed()[offset] & ~others
    _demand([bit.bit_count() for bit in (grads[offset], fwd, inference)] == [1, 1, 1], "one bit a mode")
    return offset, grads[offset], fwd, inference


def _demand(true: bool, what: str) -> None:
    if not true:
        raise LookupError(f"torch's state is not where it was expected: {what}")


def operand(state: State) -> tuple[int, ...] | None:
    """What `_hook.CHECK_STATE` compares, or None when only Python can tell."""
    if state["torch function modes"] or state["torch dispatch modes"]:
        return None
    modes = state["grad mode"], state["forward-mode grad"], state["inference mode"]
    on, all_off = state["torch function (on, all off)"]
    deterministic, warn_only = state["deterministic algorithms (on, warn only)"]
    autocast = (-1 if d is None else _code(d) for d in state["autocast dtype (cpu, cuda)"])
    cache = state["autocast cache"]
    return (
        sum(bit for bit, is_on in zip(_autograd_bits()[1:], modes, strict=True) if is_on),
        *state["dispatch keys (included, excluded)"],
        _code(state["default dtype"]),
        0 if on else 2 if all_off else 1,
        deterministic | warn_only << 1,
        *autocast,
        2 if cache is None else int(cache),
    )


def _code(dtype: torch.dtype) -> int:
    return layout.kind_word(dtype, torch.device("cpu")) & 0xFFFF


def _verify() -> None:
    """Compares what C reads with what Python reads, in the present state."""
    state, words = read_state(), _hook.state_words()
    _demand(words[4] == len(state["torch function modes"]), "function modes")
    _demand(words[6] == state["torch dispatch modes"], "dispatch modes")
    _demand(words[8] == _code(torch.get_autocast_dtype("cpu")), "autocast dtype")
    _demand(words[9] == torch.is_autocast_cache_enabled(), "autocast cache")
    spec = operand(state)
    if spec is not None:
        _demand(_hook.Guards([], [(_hook.CHECK_STATE, (), spec)]).check(()), "the whole state")


_TRIALS = (
    contextlib.nullcontext,
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    functools.partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
    functools.partial(torch.autocast, "cpu", torch.bfloat16),
    BaseTorchFunctionMode,
    torch._C.DisableTorchFunctionSubclass,
    torch._C.DisableTorchFunction,
)


@functools.cache
def ready() -> bool:
    """Whether C reads the global state; finds out how, and verifies it, on the first call."""
    if not layout.ready():
        return False
    try:
        _set_functions()
        words = _hook.state_words()
        included, excluded = read_state()["dispatch keys (included, excluded)"]
        _set_functions(words[1] ^ included, words[2] ^ excluded)
        for trial in _TRIALS:
            with trial():
                _verify()
    except Exception:
        _hook.set_state_functions()
        return False
    return True
