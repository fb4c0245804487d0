"""Libraries of kernels take long to be ready for their first call: threads have them ready meanwhile.

They load parts of themselves and kernels when they are first called, some tenths of a second in all. A call
of each kind that a graph has, over few elements, is made while the graph is compiled. Threads that have ended
leave what they have of a library (handles, their memory) to the next one that asks torch for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from kiln.base.graph import Graph, TensorSpec

aten = torch.ops.aten

#: What is called ahead.
AHEAD = frozenset({"products", "convolutions", "gradients"})
#: Elements of each dimension of what is multiplied.
FEW = 64

_begun: dict[tuple[Any, ...], threading.Thread] = {}
"""What is called ahead, or was, by the kind of call, its device and its dtype."""


def products(make: Callable[..., torch.Tensor]) -> None:
    a = make(FEW, FEW)
    aten.addmm.default(a[0], a, a)


def _images(make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = make(1, FEW, 8, 8), make(FEW, FEW, 3, 3)
    return x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)


def convolutions(make: Callable[..., torch.Tensor]) -> None:
    aten.convolution.default(*_images(make), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def gradients(make: Callable[..., torch.Tensor]) -> None:
    x, w = _images(make)
    shape = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    aten.convolution_backward.default(x, x, w, *shape, [True, True, False])


#: A call of a library for each kind of ops.
CALLS: dict[Any, Callable[[Callable[..., torch.Tensor]], None]] = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), products),
    aten.convolution.default: convolutions,
    aten.convolution_backward.default: gradients,
}


def begin(graph: Graph, device: torch.device) -> list[threading.Thread]:
    """Begin to have ready what the calls of a graph on a GPU need: the threads that are at it."""
    found: dict[tuple[Any, ...], threading.Thread] = {}
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return []
    for node in graph.nodes:
        call = CALLS.get(node.op)
        spec = node.args[0].spec if call is not None else None
        if call is None or call.__name__ not in AHEAD:
            continue
        if isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
            key = call, device, spec.dtype
            if key not in _begun:
                stream = torch.cuda.current_stream(device)
                _begun[key] = threading.Thread(target=_called, args=(*key, stream), daemon=True)
                _begun[key].start()
            found[key] = _begun[key]
    return list(found.values())


def wait(begun: list[threading.Thread]) -> None:
    """Wait for what was begun."""
    for thread in begun:
        thread.join()


def _called(call: Callable[..., None], device: torch.device, dtype: torch.dtype, stream: Any) -> None:
    def make(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    # On the program's stream: libraries keep memory for each. Should it fail, the graph's own call says why.
    with suppress(RuntimeError), torch.cuda.stream(stream), torch.no_grad():
        call(make)
