"""Ops of our own: the largest and the smallest element so far, without its place."""

from __future__ import annotations

import torch

from kiln.ops.fake import similar
from kiln.ops.table import RULES

library = torch.library.Library("kiln", "FRAGMENT")
for name in ("running_max", "running_min"):
    library.define(f"{name}(Tensor x, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("running_max", lambda x, dim: x.cummax(dim).values, "CPU")
library.impl("running_min", lambda x, dim: x.cummin(dim).values, "CPU")
running_max, running_min = torch.ops.kiln.running_max.default, torch.ops.kiln.running_min.default
RULES[running_max] = RULES[running_min] = lambda x, dim: similar(x)
