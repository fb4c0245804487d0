"""Ops of our own: the largest and the smallest element so far, without its place."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.fake import similar
from kiln.ops.table import rule

library = torch.library.Library("kiln", "FRAGMENT")
for name in ("running_max", "running_min"):
    library.define(f"{name}(Tensor x, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("running_max", lambda x, dim: x.cummax(dim).values, "CPU")
library.impl("running_min", lambda x, dim: x.cummin(dim).values, "CPU")
running_max, running_min = torch.ops.kiln.running_max.default, torch.ops.kiln.running_min.default


@rule(running_max, running_min)
def _running(x: torch.Tensor, dim: int) -> Any:
    return similar(x)
