"""The gradient of a running product, for versions of PyTorch that make one of a fake element by element.

Those take it apart above autograd, where no `__torch_dispatch__` sees it, in ops for each element of a row. A
dispatch key that comes with the thread, as modes have, leads to the kernel here; every other op passes it by.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
#: A key made for tests of the dispatcher itself: no mode of a program has it.
KEY = "TESTING_ONLY_GenericMode"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]


def gradient(grad: Tensor, x: Tensor, dim: int, product: Tensor) -> Tensor:
    """The gradient of `product`, which is `x.cumprod(dim)`.

    An element before the first zero of its row has a part in the products up to there. The first zero itself
    has one in what follows, up to the second zero: in products as they would be with a one in its place.
    """
    if torch.is_grad_enabled() or x.numel() <= 1 or x.shape[dim] == 1:
        return aten.cumprod_backward.default._op_dk(COMPOSITE, grad, x, dim, product)
    x, product = x.to(grad.dtype).conj(), product.conj()
    zero, nothing = x == 0, grad.new_zeros(())
    zeros = zero.cumsum(dim)
    before, first = zeros == 0, zero & (zeros == 1)
    sums = torch.where(before, grad * product, nothing).flip(dim).cumsum(dim).flip(dim)
    others = x.masked_fill(first, 1).cumprod(dim)
    after = torch.where(zeros == 1, grad * others, nothing).sum(dim, keepdim=True)
    return torch.where(before, sums / x, torch.where(first, after, nothing))


def install() -> tuple[Callable[[], AbstractContextManager[Any]], tuple[Any, ...]]:
    """What has gradients of running products computed here while it is entered, and what must be kept."""
    others, ours = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    ours.impl("cumprod_backward", gradient)
    key = torch._C._dispatch_key_parse(KEY)  # type: ignore[attr-defined]
    return lambda: torch._C._IncludeDispatchKeyGuard(key), (others, ours)  # type: ignore[attr-defined]


as_a_whole, _KEPT = install() if torch.__version__ < (2, 13) else (nullcontext, ())
