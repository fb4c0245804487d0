"""How far rounding alone may move the results of a program, measured by running it with every op rounded otherwise.

What an op has exactly, as its float64 form shows (there: few binary places), stays as it is in the forward: what jumps is
drawn for such values alone.
Others are computed from inputs off by one place of float32 or wider, in which kernels compute, and are then off by a few
places of their own dtype, forward and backward. Sums are off by a part of what the absolute values of their terms add up to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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
#: Ops that add up, whose rounding grows with the number of elements; of the first ones no result is exact but by chance.
NORMS = re.compile("norm|var|std|softmax|logsumexp|conv|pool|attention|upsample_.*linear")
ADDS = re.compile(f"{NORMS.pattern}|sum|mean|mm|mv|dot|prod|loss|entropy|linear|trapez")


def unit(dtype: torch.dtype) -> float:
    """The last place of the type that a kernel computes a dtype in."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def again(func: Any, args: Any, kwargs: Any, change: Callable[[Any], Any]) -> Any:
    """The op of changed inputs, or None where those are no inputs for it."""
    if func._schema.is_mutable:
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    try:
        return func(*tree_map(change, args), **{k: v if k == "dtype" else change(v) for k, v in kwargs.items()})
    except Exception:
        return None


class Ops(TorchDispatchMode):
    """Runs each op in its own way, forward and backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # ops made of others come as they are there
            with self:
                results = func.decompose(*args, **kwargs or {})
            if results is not NotImplemented:
                return results
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Gapped(Ops):
    """Gives each op its inputs apart in memory: eager's loops over vectors and over single elements are not the same at NaN."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if floats(x)]
        if not func._schema.is_mutable and rounds(func, "", given):
            apart = again(func, args, kwargs, lambda x: torch.stack([x, x], -1)[..., 0] if floats(x) else x)
            for result, other in zip(listed(results), listed(apart), strict=False):
                if floats(result) and floats(other):
                    result.copy_(other)
        return results


class Disturbing(Ops):
    """Rounds the result of each op otherwise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def places(self, x: torch.Tensor, most: int) -> torch.Tensor:
        """Whole numbers from -most to most for each element."""
        return torch.randint(-most, most + 1, x.shape, generator=self.generator).to(x)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if floats(x)]
        wide = None
        if rounds(func, name, given):
            wide = given[0] if name == "_to_copy" else again(func, args, kwargs, lambda x: x.double() if floats(x) else x)
        moved = again(func, args, kwargs, self.moved) if wide is not None else None
        results = func(*args, **kwargs)
        if wide is None or moved is None:
            return results
        many = math.sqrt(max(x.numel() for x in given)) / 16 if ADDS.search(name) else 0.0
        if given[0].dtype == torch.float64 and re.match("var|std|_softmax", name):
            # Eager's sums have no wider type: exact arithmetic showed n / 14 places for 8,000 elements.
            many = max(many, 16 * many * many)
        # Gradients decide nothing: that one of them is exact is chance.
        exactly = NORMS.search(name) is None and torch._C._current_graph_task_id() == -1
        offset = self.offset(func, name, args, kwargs, results) * unit(given[0].dtype)
        for i, result in enumerate(listed(results)):
            if floats(result) and result.numel():
                off = listed(moved)[i].double()
                off = off + (offset if i == 0 else 0) * self.places(off.new_zeros(()) if name.startswith("native") else off, 2) * (1 + many)
                result.copy_(self.rounded(result, listed(wide)[i].double(), off, many, exactly))
        return results

    def offset(self, func: Any, name: str, args: Any, kwargs: Any, results: Any) -> torch.Tensor:
        """The terms that were added up, and means in units of what they are divided by: equal elements then have no norm of zero."""
        if name in SUMS:
            return again(func, args, kwargs, lambda x: x.double().abs() if floats(x) else x).double() / 4
        if re.fullmatch("native_.*norm", name) and results[1].numel():
            return (results[1].double().abs() * results[2].double()).max().nan_to_num(0.0, 0.0, 0.0)
        # The logarithm of a sum that is almost one is as far off as the sum.
        return torch.tensor(1.0 if re.match("_?log_softmax$|logsumexp|logcumsumexp", name) else 0.0, dtype=torch.float64)

    def moved(self, x: Any) -> Any:
        if not floats(x):
            return x
        x = x.float() if x.dtype.itemsize == 2 else x
        return x * (1 + self.places(x, 1) * torch.finfo(x.dtype).eps)

    def rounded(self, result: torch.Tensor, wide: torch.Tensor, off: torch.Tensor, many: float, exactly: bool) -> torch.Tensor:
        values = result.double()
        relative = self.places(off, 1 if result.dtype.itemsize == 2 else 2) * torch.finfo(result.dtype).eps
        off = off * (1 + relative + self.places(off, 2) * unit(result.dtype) * many)
        exact = (values * 2**20).frac() == 0 if result.dtype == torch.float64 else values == wide
        return torch.where(exact & exactly | ~values.isfinite() | ~off.isfinite(), values, off).to(result.dtype)


def floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def rounds(func: Any, name: str, given: list[Any]) -> bool:
    """Whether an op computes floats."""
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
    return bool(given) and not views and SELECTS.fullmatch(name) is None
