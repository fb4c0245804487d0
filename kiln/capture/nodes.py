"""What a torch call is in a graph: methods, operators, breaks, plain arguments, and nests of results."""

from __future__ import annotations

import collections
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.ops.fake import FakeTensor, fake_like

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
METHODS: dict[Any, str] = {}
for _name in dir(torch.Tensor):
    _member = getattr(torch.Tensor, _name)
    if callable(_member) and not isinstance(_member, type) and type(_member).__name__ != "method":
        METHODS.setdefault(_member, _name)

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_OTHERS = "lt le eq ne gt ge neg pos abs invert getitem setitem".split()
_OPERATORS = [f"__{name}__" for name in (*_BINARY, *map("i{}".format, _BINARY), *_OTHERS)]
#: Tensor methods that Python's operators call: the operator, and whether the operands are swapped.
OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    **{f"__r{n}__": (getattr(operator, f"__{n}__"), True) for n in _BINARY},
    **{n: (getattr(operator, n), False) for n in _OPERATORS},
}

#: Tensor methods and attributes whose result leaves the world of tensors, with the kind of break.
LEAVING = {name: kind for kind, names in {
    "data-dependent": "tolist numpy __array__",
    "data-pointer": "data_ptr __dlpack__",
    "storage": "storage untyped_storage _typed_storage share_memory_ pin_memory",
    "pickle": "__reduce_ex__",
    "deepcopy": "__deepcopy__",
    "backward": "backward",
    "tensor-hook": "register_hook register_post_accumulate_grad_hook",
    "sparse": "to_sparse to_sparse_csr to_mkldnn",
    "metadata-mutation": "set_ resize_ resize_as_",
}.items() for name in names.split()}  # fmt: skip

#: Keyword arguments that scale or fill, so that a tensor given for the number leaves the shape as it is.
FACTORS = frozenset({"alpha", "beta", "value"})

#: What the methods of descriptors are, as functions of an object and a name.
ACCESSORS: dict[str, Any] = {"__get__": getattr, "__set__": setattr, "__delete__": delattr}

#: The switch of grad mode, which contexts flip back and forth.
SWITCH = torch._C._set_grad_enabled

#: Argument values that an fx node holds as they are.
PLAIN = {
    int, float, bool, str, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format, bytes, range,
}  # fmt: skip

ATTRIBUTE_DICTS = re.compile(r"\.(_modules|_parameters|_buffers)\b")


STATEFUL = frozenset({"__set__", "__delete__", "retain_grad", "_assert_async"})


def changes_state(func: Any) -> bool:
    """Whether `func` is named as one that changes its argument, such as `requires_grad_`, or checks it."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__") or name in STATEFUL


def identifier(text: str) -> str:
    """`text` as an attribute name: `self.layers[0].weight` gives `self_layers_0_weight`."""
    name = re.sub(r"\W+", "_", ATTRIBUTE_DICTS.sub("", text)).rstrip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name


def made_of(value: Any) -> tuple[Callable[..., Any], Args] | None:
    """The call that makes an object of the program's with fake tensors in it; None for any other."""
    if not holds_fakes(value):
        return None
    kind: Any = type(value)
    if kind in NESTS:
        return kind, ([*(value.items() if isinstance(value, dict) else value)],)
    if kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
        return instance, (kind, {**vars(value)})
    why = f"a {kind.__name__} with tensors in it is an argument of a torch call"
    raise Break("foreign-object", why, "pass tensors and Python constants")


def holds_fakes(value: Any) -> bool:
    """Whether a fake tensor stands in a value's items or attributes, or in theirs."""
    left: list[Any] = [value]
    seen: set[int] = set()
    while left:
        item: Any = left.pop()
        if type(item) is FakeTensor:
            return True
        kind = type(item)
        if id(item) in seen or kind in PLAIN or kind.__module__.startswith(("torch", "kiln")):
            continue
        seen.add(id(item))
        if issubclass(kind, (*NESTS,)):
            left += [*item, *(item.values() if issubclass(kind, dict) else ())]
        left += getattr(item, "__dict__", {}).values() if kind.__flags__ & 1 << 9 else ()
    return False


NESTS = frozenset({list, tuple, dict, set, frozenset, collections.deque, collections.OrderedDict})


def instance(kind: Any, attributes: Kwargs) -> Any:
    """An object of a class with these attributes, as it was when the program handed it on."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def collect(value: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], torch.Tensor]]) -> None:
    """Append every tensor in the nest `value` with its path."""
    if isinstance(value, torch.Tensor):
        found.append((path, value))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            collect(item, (*path, i), found)
    elif isinstance(value, dict):
        for key, item in value.items():
            collect(item, (*path, key), found)


def replace_real(value: Any, made: dict[int, FakeTensor]) -> Any:
    """The nest `value` with a fake for each real tensor."""
    if isinstance(value, torch.Tensor) and type(value) is not FakeTensor:
        if id(value) not in made:
            made[id(value)] = fake_like(value)
        return made[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[replace_real(v, made) for v in value])
    if isinstance(value, (tuple, list)):
        return type(value)([replace_real(v, made) for v in value])
    if isinstance(value, dict):
        return type(value)({k: replace_real(v, made) for k, v in value.items()})
    return value
