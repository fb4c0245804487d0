"""`kiln.fake()`: while it is entered, tensors have all but data, so models of any size are built and run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kiln.base.errors import Break
from kiln.ops import rules
from kiln.ops.fake import ELSEWHERE, FakeMode, FakeTensor, dispatch
from kiln.ops.meta import META, MUTATING

assert rules.RULES

HINTS = {
    "data-dependent": "fake tensors have no values: do this outside kiln.fake(), or give a Python number; "
    "libraries that know compilers keep off values under kiln.fake(compiling=True)",
    "metadata-mutation": "fake tensors have no memory: use the form that returns a new tensor",
}

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class fake(FakeMode):  # noqa: N801
    """A context in which every tensor that torch makes is fake: true shape, strides, dtype, device, no data.

    Factories, modules, their initialisation, moves between devices and dtypes, forward, backward and
    optimizers work as they are; what asks for values raises Break. Real tensors may be used with fakes and
    stay unchanged. With `compiling`, torch.compiler.is_compiling() is True meanwhile, so that libraries take
    the paths without looks at values that they have for compilers.
    """

    def __init__(self, compiling: bool = False) -> None:
        super().__init__()
        self.compiling = compiling
        self.before = False
        self.place: torch.device | None = None
        self.moves = _Moves(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.place is not None and kwargs.get("device") == META:
            # C++ took the options of an absent device's tensor, or the device was exchanged on the way in.
            kwargs["device"] = self.place
        if MUTATING[func]:
            self.writes += 1
        try:
            return dispatch(func, args, kwargs)
        except Break as refusal:
            raise Break(refusal.kind, refusal.why, HINTS.get(refusal.kind, refusal.hint)) from None

    def __enter__(self) -> fake:
        teach_initialisers()
        if self.compiling:
            self.before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        self.moves.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.moves.__exit__(*error)
        if self.compiling:
            torch.compiler._is_compiling_flag = self.before


class _Moves(TorchFunctionMode):
    """Exchanges devices that this machine lacks for the meta device on the way into torch.

    Torch initialises a device before it dispatches, which fails where there is none.
    """

    def __init__(self, mode: fake) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.exchanged(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *[self.exchanged(a) for a in args[1:]])
        elif func in SHORTHANDS:
            func, args, kwargs = self.spelled_out(SHORTHANDS[func], func, args, kwargs)
        if func in READERS and kwargs.get("device") == META and self.mode.place is not None:
            # These fill their memory themselves: on the CPU, then, and what they made moves.
            del kwargs["device"]
            return torch.Tensor.to(func(*args, **kwargs), META)
        result = func(*args, **kwargs)
        if func == _SET_DATA and type(args[0]) is not type(args[1]):
            adopt(args[0], args[1])
        return result

    def exchanged(self, device: Any) -> Any:
        """The meta device for one that is lacking, which is remembered; else `device`, be it what it may."""
        if type(device) is str:
            try:
                wanted = torch.device(device)
            except RuntimeError:
                return device
        elif isinstance(device, torch.device):
            wanted = device
        else:
            return device
        if not lacks(wanted.type):
            return device
        pretend(wanted.type)
        self.mode.place = torch.device(wanted.type, wanted.index or 0)
        return META

    def spelled_out(self, kind: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """`x.cuda(1)` as a call of `to`, where the machine lacks such devices."""
        if not lacks(kind):
            return func, args, kwargs
        index = kwargs.pop("device", None) if "device" in kwargs else (args[1] if len(args) > 1 else None)
        device = index if isinstance(index, (str, torch.device)) else torch.device(kind, index or 0)
        return torch.Tensor.to, (args[0], self.exchanged(device)), kwargs


READERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
SHORTHANDS = {torch.Tensor.cuda: "cuda", torch.Tensor.xpu: "xpu"}


def adopt(fake: Any, data: Any) -> None:
    """Let `fake`, whose tensor was exchanged for that of `data`, say the device of `data`."""
    if isinstance(fake, FakeTensor) and isinstance(data, FakeTensor):
        fake.__class__ = type(data)
        if isinstance(data, AbsentFake):
            fake.place = data.place  # type: ignore[attr-defined]


@functools.cache
def teach_initialisers() -> None:
    """Let the initialiser that draws until all values fit take fakes as they are: no draw ever tells."""
    original = torch.nn.init._no_grad_trunc_normal_

    @functools.wraps(original)
    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal


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
