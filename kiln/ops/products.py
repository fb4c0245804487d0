"""Matrix products of symbolic sizes, for versions of PyTorch whose own `matmul` asks for plain numbers.

`matmul` is taken apart above autograd, where no `__torch_dispatch__` sees it. Symbolic fakes carry a dispatch
key that nothing else has, and for which `matmul` has a kernel here; every other op passes that key by. In
inference mode a `__torch_dispatch__` sees composite ops, and takes them apart by `composite`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from kiln.ops import layout

aten = torch.ops.aten
#: A key made for tests of the dispatcher itself: no tensor of a program has it.
KEY = "TESTING_ONLY_GenericWrapper"
#: What a symbolic fake has among its dispatch keys; None where PyTorch computes with symbolic sizes itself.
KEYS: Any = None
#: The kernel of a composite op; a Python version of it that torch may have differs in what it runs.
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """What `torch.matmul` gives, by the ops and in the order in which it calls them."""
    with torch._C.DisableTorchFunction():
        kind = a.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            a, b = lowered(a, kind), lowered(b, kind)
        try:
            return product(a, b)
        except layout.Mismatch:
            return aten.matmul.default._op_dk(COMPOSITE, a, b)  # says what is wrong


def composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite op gives, by the ops that it calls."""
    if func is aten.matmul.default and KEYS is not None:
        return matmul(*args)
    return func._op_dk(COMPOSITE, *args, **kwargs)


def lowered(x: Tensor, kind: str) -> Tensor:
    """The operand as autocast hands it to `matmul`."""
    eligible = x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == kind
    return x.to(torch.get_autocast_dtype(kind)) if eligible else x


def product(a: Tensor, b: Tensor) -> Tensor:
    m, n = a.dim(), b.dim()
    if m == 0 or n == 0:
        raise layout.Mismatch("both arguments to matmul need to be at least 1D")
    if m <= 2 and n <= 2:
        if n == 1:
            return a.dot(b) if m == 1 else a.mv(b)
        return a.unsqueeze(0).mm(b).squeeze_(0) if m == 1 else a.mm(b)
    if folds(a, b):
        return folded(a, b)
    return batched(a, b)


def folds(a: Tensor, b: Tensor) -> bool:
    """Whether the batches of the larger operand become rows of one matrix, without a copy of it."""
    larger = a if a.dim() >= b.dim() else b.mT
    if min(a.dim(), b.dim()) > 2:
        return False
    if a.requires_grad or b.requires_grad:
        return True  # the gradient of the smaller one then needs no sum over batches
    if a.dim() == 2:
        return False
    shape, stride = larger.shape, larger.stride()
    steps = all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(larger.dim() - 2))
    return larger.numel() == 0 or steps


def folded(a: Tensor, b: Tensor) -> Tensor:
    """The product as one of matrices, or of a matrix and a vector."""
    turned = b.dim() > a.dim()
    large = b.mT if turned else a
    small = b if not turned else a.t() if a.dim() == 2 else a
    *rows, inner = large.shape
    matrix = large.reshape(prod(rows), inner)
    if small.dim() == 1:
        return aten._unsafe_view(matrix.mv(small), rows)
    out = aten._unsafe_view(matrix.mm(small), [*rows, small.shape[1]])
    return out.mT.contiguous() if turned else out


def batched(a: Tensor, b: Tensor) -> Tensor:
    """The product as one of batches of matrices."""
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        # Fakes are of a subclass, for which one matrix against many is always folded.
        if a.shape[0] == 1:
            return product(a.squeeze(0), b)
        if b.shape[0] == 1:
            return product(a, b.squeeze(0))
    vector = b.dim() == 1
    left = list(a.shape[-2:]) if a.dim() > 1 else [1, a.shape[0]]
    right = list(b.shape[-2:])
    batch = list(layout.broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2])))
    count = prod(batch)
    x = a.expand([*batch, *left]).reshape([count, *left])
    y = b.expand([*batch, *right]).reshape([count, *right])
    if vector:
        return aten._unsafe_view(x.bmm(y.unsqueeze(2)).squeeze(-1), [*batch, *left[:1]])
    return aten._unsafe_view(x.bmm(y), [*batch, *(left[:1] if a.dim() > 1 else []), right[1]])


def install() -> tuple[Any, ...]:
    """Have `matmul` of symbolic fakes computed here; what must be kept for that."""
    global KEYS
    KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))  # type: ignore[attr-defined]
    others, ours = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    ours.impl("matmul", matmul)
    return others, ours


_KEPT = install() if torch.__version__ < (2, 13) else ()
