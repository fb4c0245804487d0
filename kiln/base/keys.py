"""Autograd's and autocast's part of calling an op, which graphs of aten ops leave out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def _keys() -> Any:
    keys = torch._C.DispatchKey
    found = torch._C.DispatchKeySet(keys.ADInplaceOrView)
    casts = [name for name in dir(keys) if name.startswith("Autocast")]
    for name in ("AutogradFunctionality", "AutogradOther", *casts):
        found = found.add(getattr(keys, name))
    return found


# What a graph of aten ops needs no more: autograd's and autocast's part is in the graph already. Without them
# no op records a history, tracks views, counts versions or converts its arguments once more.
HIDDEN = _keys()
below = partial(torch._C._ExcludeDispatchKeyGuard, HIDDEN)
