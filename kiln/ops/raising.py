"""Ops whose kernels raise by the contents of tensors: an index out of range, a division by zero."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.layout import INTEGERS, PLAIN_DTYPES
from kiln.ops.levels import CORE, name_of
from kiln.ops.meta import DATA, MAKES, MUTATING, SEEDED, Facts

#: Ops that raise, for which dtypes of their results.
RAISES = {
    **dict.fromkeys(
        "index gather index_select embedding take scatter scatter_add scatter_reduce index_put "
        "index_add index_copy index_fill index_reduce put masked_scatter nll_loss_forward nll_loss2d_forward "
        "_embedding_bag _embedding_bag_forward_only binary_cross_entropy multi_margin_loss "
        "multilabel_margin_loss_forward max_unpool2d max_unpool3d histc _linalg_svd _linalg_eigh "
        "linalg_eig linalg_lstsq".split(),
        PLAIN_DTYPES,
    ),
    **dict.fromkeys(("div", "floor_divide", "remainder", "fmod"), INTEGERS),
}


def raises(func: Any, dtype: torch.dtype) -> bool:
    """Whether an op that gives elements of this dtype is known to raise by the contents of tensors."""
    return dtype in RAISES.get(name_of(func), ())


def _known(func: Any) -> bool:
    if DATA[func]:
        return False
    name = name_of(func).removesuffix("_")
    if SEEDED[func]:  # what draws may look at the chances that it is given in tensors
        given = sum("Tensor" in str(argument.type) for argument in func._schema.arguments)
        return name == "native_dropout" or given <= MUTATING[func]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return name in CORE or views or MAKES[func] or torch.Tag.pointwise in func.tags


#: Whether an op is one of those of which `RAISES` tells.
KNOWN = Facts(_known)


def surely_runs(func: Any, out: Any) -> bool:
    """Whether no contents of tensors let an op raise that gives such a result, as far as is known."""
    dtypes = RAISES.get(name_of(func).removesuffix("_"))
    return KNOWN[func] and (dtypes is None or isinstance(out, torch.Tensor) and out.dtype not in dtypes)
