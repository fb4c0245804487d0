"""Fakes on devices that this machine lacks: they say the device, and C++ takes them for meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.fake import ELSEWHERE, FakeTensor
from kiln.ops.meta import META

_wrap = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

#: How the dispatcher spells the kinds of devices in its keys.
KEYS = {"privateuseone": "PrivateUse1", **{kind: kind.upper() for kind in "cuda xpu mps hpu mtia".split()}}


class AbsentFake(FakeTensor):
    """A fake on a device that this machine lacks.

    The autograd engine asks the driver of a tensor's device for streams and threads, so a tensor may not say
    a device to C++ that has no driver. What Python asks is answered here; the dispatcher sees the device's
    keys.
    """

    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return bool(self.place.type == "cuda")

    def get_device(self) -> int:
        return self.place.index or 0


def lacks(kind: str) -> bool:
    """Whether this machine has no device of this kind; a kind that torch does not know is an error."""
    if kind in ("cpu", "meta"):
        return False
    module: Any = torch.get_device_module(kind)
    available: bool = module.is_available()
    return not available


def pretend(kind: str) -> None:
    """Let fakes be made on devices of a kind that this machine lacks."""
    if kind in ELSEWHERE:
        return
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    for prefix in ("", "Autograd", "Autocast"):
        key = getattr(torch._C.DispatchKey, prefix + KEYS.get(kind, kind), None)
        if key is not None:
            keys |= torch._C.DispatchKeySet(key)

    def make(size: Any, stride: Any, dtype: Any, device: Any, offset: int, requires_grad: bool) -> AbsentFake:
        start = None if stride is None else offset
        fake: Any = _wrap(
            AbsentFake, size, stride, start, None, dtype, torch.strided, META, False, requires_grad,
            _extra_dispatch_keys=keys,
        )  # fmt: skip
        fake.place = torch.device(device.type, device.index or 0)
        return fake  # type: ignore[no-any-return]

    ELSEWHERE[kind] = make
