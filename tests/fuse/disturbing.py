"""How far rounding alone may move the results of a program, measured by running it with every op rounded otherwise.

Results that an op has exactly, as its float64 form shows (there: few binary places), stay as they are: what jumps is drawn
for such values alone.
Others are computed from inputs off by one place of float32 or wider, in which kernels compute, and are then off by a few
places of their own dtype, forward and backward. Sums are off by a part of what the absolute values of their terms add up to.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: Ops whose results are elements of what they are given, or made of nothing.
SELECTS = re.compile(
    r"_?(amax|amin|max|min|maximum|minimum|fmax|fmin|aminmax|clamp.*|relu_?|threshold.*|hardtanh.*|sort|topk|kthvalue|median|cummax.*|cummin.*"
    r"|gather|index|index_select|index_fill_?|where|cat|stack|clone|copy_?|flip|roll|repeat|constant_pad_nd|scatter_?|masked_fill_?|fill_?|zero_?"
    r"|max_pool.*|adaptive_max_pool.*|tril|triu|select_.*|slice_.*|diagonal_.*|embedding|abs_?|neg_?|sign|floor|ceil|round|trunc|frac|full.*"
    r"|ones.*|zeros.*|arange|eye|empty.*|new_.*|linspace|scalar_tensor|upsample_nearest.*|pixel_.*|reflection_pad.*|replication_pad.*"
    r"|nan_to_num.*|copysign.*|lift.*|local_scalar_dense|one_hot|set_|resize_|sgn|heaviside|fmod|remainder|index_copy_?|scatter_reduce_?"
    r"|unfold_backward|as_strided.*|index_put_?)"
)
SUMS = ("sum", "nansum", "mean", "cumsum")


def unit(dtype: torch.dtype) -> float:
    """The last place of the type that a kernel computes a dtype in."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


class Disturbing(TorchDispatchMode):
    """Rounds the result of each op otherwise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def places(self, x: torch.Tensor, most: int) -> torch.Tensor:
        """Whole numbers from -most to most for each element."""
        return torch.randint(-most, most + 1, x.shape, generator=self.generator).to(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if floats(x)]
        wide = None
        if rounds(func, name, given):
            wide = given[0] if name == "_to_copy" else self.again(func, args, kwargs, lambda x: x.double() if floats(x) else x)
        moved = self.again(func, args, kwargs, self.moved) if wide is not None else None
        results = func(*args, **kwargs)
        if wide is None or moved is None:
            return results
        more = self.again(func, args, kwargs, lambda x: x.double().abs() if floats(x) else x) if name in SUMS else None
        for i, result in enumerate(listed(results)):
            if floats(result) and result.numel():
                room = torch.zeros_like(result, dtype=torch.float64) if more is None else unit(given[0].dtype) / 4 * listed(more)[i].to(torch.float64)
                result.copy_(self.rounded(result, listed(wide)[i].double(), listed(moved)[i].double(), room))
        return results

    def again(self, func: Any, args: Any, kwargs: Any, change: Any) -> Any:
        """The op of changed inputs, or None where those are no inputs for it."""
        if func._schema.is_mutable:  # what it writes, and the rest of its inputs, are the same but for their dtype
            args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        try:
            return func(*tree_map(change, args), **{k: v if k == "dtype" else change(v) for k, v in kwargs.items()})
        except Exception:
            return None

    def moved(self, x: Any) -> Any:
        if not floats(x):
            return x
        x = x.float() if x.dtype.itemsize == 2 else x
        return x * (1 + self.places(x, 1) * torch.finfo(x.dtype).eps)

    def rounded(self, result: torch.Tensor, wide: torch.Tensor, moved: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        values = result.double()
        off = moved * (1 + self.places(moved, 1 if result.dtype.itemsize == 2 else 2) * torch.finfo(result.dtype).eps)
        off = off + room * self.places(moved, 2)
        exact = (values * 2**20).frac() == 0 if result.dtype == torch.float64 else values == wide
        stays = exact | ~values.isfinite() | ~off.isfinite()
        return torch.where(stays, values, off).to(result.dtype)


def floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def rounds(func: Any, name: str, given: list[Any]) -> bool:
    """Whether an op computes floats."""
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
    return bool(given) and not views and SELECTS.fullmatch(name) is None
