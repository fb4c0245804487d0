"""Ops without a shape rule: meta kernels on twins without data, remembered by layout; or the op on zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.ops.quiet import keep_compiler_out
from kiln.ops.table import aten, overload

META = torch.device("meta")
REMEMBERED = 20_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """All that is known of an output tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Same:
    """An output that is one of the argument tensors, by its position among them."""

    index: int


class Facts(dict[Any, T]):
    """A dict from op to a fact about it, computed when first asked."""

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self.ask = ask

    def __missing__(self, op: Any) -> T:
        fact = self[op] = self.ask(op)
        return fact


DATA_DEPENDENT = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten._pack_padded_sequence.default,
    aten.equal.default, aten.allclose.default,
}  # fmt: skip
DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

#: Ops whose result's shape depends on data only when an index is a mask.
MASKED = {aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default}
INDEXING = {aten.index.Tensor, aten.index.Tensor_out, aten._unsafe_index.Tensor}

#: Whether an overload writes into one of its arguments.
MUTATING = Facts(lambda func: bool(func._schema.is_mutable))
#: Whether it does so without anything above its kernel that counts the write: lists, ops of programs.
UNCOUNTED = Facts(
    lambda func: MUTATING[func]
    and (
        not func._schema.returns
        if func.namespace == "aten"
        else not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")
    )
)
#: Whether the shape of an overload's result, or a Python value that it gives, depends on contents.
DATA = Facts(lambda func: func in DATA_DEPENDENT or not DATA_TAGS.isdisjoint(func.tags))
#: Whether an overload draws random numbers.
SEEDED = Facts(lambda func: torch.Tag.nondeterministic_seeded in func.tags)
#: Arguments with which overloads draw none after all.
IDLE = {"dropout_p": 0, "train": False, "training": False}
#: Whether an overload changes the shape or strides of its argument.
RESHAPES = Facts(lambda func: torch.Tag.inplace_view in func.tags)
DECOMPOSES = Facts(
    lambda func: torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
)
MAKES = Facts(lambda func: any(a.name == "device" for a in func._schema.arguments))

_MEMO: dict[Any, Any] = {}


def draws(node: Any) -> bool:
    """Whether a node draws random numbers: it stays though nobody reads it, for the numbers drawn later."""
    return type(node.op) is torch._ops.OpOverload and SEEDED[node.op]


def drawing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op that may draw random numbers does."""
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in IDLE and given == IDLE[argument.name] and isinstance(given, (int, float)):
            return False
    return True


def by_mask(indices: Any) -> bool:
    """Whether one of the indices selects by truth, so that the number of elements depends on data."""
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


Ask = Callable[[Any, tuple[Any, ...], dict[str, Any], list[Tensor]], Any]


def infer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Ask | None = None
) -> tuple[Any, list[Tensor]]:
    """A nest of Layout, Same and plain values that says what `func` returns, and the tensors given to it.

    What is not remembered is asked of the meta kernels, or of `ask`.
    """
    tensors: list[Tensor] = []
    try:
        key = (
            func,
            torch.get_default_dtype(),
            _key(args, tensors),
            *[(k, _key(v, tensors)) for k, v in kwargs.items()],
        )
        known = _MEMO.get(key)
    except TypeError:
        key, known = (), None
    if known is not None:
        return known, tensors
    answer = (ask or ask_meta)(func, args, kwargs, tensors)
    if key:
        if len(_MEMO) > REMEMBERED:
            _MEMO.clear()
        _MEMO[key] = answer
    return answer, tensors


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """A hashable stand-in for an argument: what of it the shape of a result can depend on."""
    kind = type(value)
    if kind is int or kind is float or kind is bool or kind is complex:
        return kind, value
    if kind is tuple or kind is list:
        return tuple([_key(v, tensors) for v in value])
    if isinstance(value, Tensor):
        # A tensor given twice must not be taken for two tensors of one layout.
        place = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
        if place < len(tensors):
            return place
        tensors.append(value)
        flags = value.is_complex() and value.is_conj(), value.is_neg()
        return value.shape, value.stride(), value.dtype, value.device, value.storage_offset(), flags
    return value


def with_twins(nest: Any, tensors: list[Tensor], twins: list[Any]) -> Any:
    """The nest with the twin of each tensor in its place."""
    by_id = {id(t): twin for t, twin in zip(tensors, twins, strict=True)}
    return mapped(nest, lambda value: by_id[id(value)] if isinstance(value, Tensor) else value)


def ask_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What `func` returns on meta tensors of these layouts, described."""
    twins = [twin_of(t) for t in tensors]
    args, kwargs = with_twins((args, kwargs), tensors, twins)
    device = common_device(tensors)
    if kwargs.get("device") is not None:
        device = full_device(kwargs["device"])
        kwargs["device"] = META
    elif not tensors and MAKES[func]:
        kwargs["device"] = META
    if kwargs.get("layout") not in (None, torch.strided):
        raise Break(
            "sparse", f"{func} makes a sparse tensor", "keep sparse tensors out of the compiled function"
        )
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    before = [(t, t.shape, t.stride()) for t in written(func, args, kwargs)]
    out = func(*args, **kwargs)
    if any(t.shape != size or t.stride() != stride for t, size, stride in before):
        if func._schema.name.endswith("_"):
            # In place, that is an error of the program: eager tells it.
            raise ValueError("the result does not fit into the tensor")
        raise Break("metadata-mutation", f"{func} resizes its output", "pass an output of the right shape")
    return describe(out, twins, device)


def describe(value: Any, known: list[Tensor], device: torch.device | None) -> Any:
    """The nest of tensors `value` as layouts, those in `known` by position; a `device` replaces their own."""
    if isinstance(value, Tensor):
        for i, tensor in enumerate(known):
            if tensor is value:
                return Same(i)
        if value.layout is not torch.strided:
            raise Break(
                "sparse", f"a tensor of layout {value.layout} is made", "keep it out of the compiled function"
            )
        conj, neg, place = value.is_conj(), value.is_neg(), device or value.device
        return Layout(value.shape, value.stride(), value.dtype, place, value.storage_offset(), conj, neg)
    if isinstance(value, (list, tuple)):
        items = [describe(v, known, device) for v in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def twin_of(value: Tensor) -> Tensor:
    """A meta tensor of the same layout as `value`."""
    size, stride, offset = value.shape, value.stride(), value.storage_offset()
    if offset:
        twin = torch.empty(reach(value), dtype=value.dtype, device=META).as_strided(size, stride, offset)
    else:
        twin = torch.empty_strided(size, stride, dtype=value.dtype, device=META)
    return flagged(twin, value.is_conj(), value.is_neg())


def reach(value: Tensor) -> int:
    """How many elements the memory of a tensor has at least, what lies before it included."""
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int(value.storage_offset() + (1 + last if value.numel() else 0))


def flagged(tensor: T, conj: bool, neg: bool) -> T:
    """The tensor, which from now on says that it is the conjugate or the negative of what is in memory."""
    if conj:
        torch._C._set_conj(tensor, True)
    if neg:
        torch._C._set_neg(tensor, True)
    return tensor


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that `func` writes into."""
    if not MUTATING[func]:
        return
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(declared.name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    yield item


def common_device(tensors: list[Tensor]) -> torch.device:
    """The device on which an op over these tensors runs: scalars on the CPU go anywhere."""
    found: torch.device | None = None
    for tensor in tensors:
        if found is None or found.type == "cpu" and tensor.dim():
            found = tensor.device
    return found or torch.device("cpu")


def full_device(device: torch.device | str | int) -> torch.device:
    """`device` with its index filled in where the kind has one."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


keep_compiler_out()


CPU = torch.device("cpu")
LARGEST = 1 << 26
LARGEST_LAYOUT = 1 << 16

#: Ops whose meta kernels give other strides than their kernels for the CPU, or take what these refuse.
UNLIKE = frozenset(map(overload, (
    "_fft_r2c _fft_c2r _fft_c2c _linalg_svd linalg_eig index_put _unsafe_index_put max_unpool2d max_unpool3d "
    "index_put_ index_add index_add_ index_copy index_copy_ index_fill_.int_Scalar index_fill_.int_Tensor "
    "put index_fill.int_Scalar index_fill.int_Tensor put_ index_reduce index_reduce_ index_select "
    "select_scatter diagonal_scatter _softmax _log_softmax nll_loss_forward histc logcumsumexp "
    "bernoulli uniform_ max min mode median.dim linalg_cross binary_cross_entropy searchsorted.Tensor"
).split()))  # fmt: skip
#: Elementwise ops that raise on zeros.
DIVIDING = frozenset({"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"})
ASKED = Facts(
    lambda func: func in UNLIKE
    or torch.Tag.pointwise in func.tags
    and not any(arg.is_out for arg in func._schema.arguments)  # which the op may give another size
)


def too_large(tensors: list[Tensor]) -> bool:
    """Whether the arguments hold too many elements for the op to be run for real."""
    return bool(sum(t.numel() for t in tensors) > LARGEST)


def asked(func: Any, args: tuple[Any, ...]) -> Ask | None:
    """What is asked: the op itself, on small numbers, where only that knows what it takes and is cheap."""
    x = next((a for a in args if isinstance(a, Tensor)), None)
    small = ASKED[func] and x is not None and x.device.type == "cpu" and x.numel() <= LARGEST_LAYOUT
    chosen = func in MASKED and by_mask(args[1])  # on zeros a mask chooses nothing
    return consult if small and not chosen else None


def consult(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What `func` returns for zeros so laid out, described; eager's error comes out when there is one."""
    twins = filled(tensors, int(func._schema.name.rstrip("_") in DIVIDING))
    args, kwargs = with_twins((args, kwargs), tensors, twins)
    if kwargs.get("generator") is not None:
        kwargs = {**kwargs, "generator": None}
    state = torch.get_rng_state()
    try:
        out = func(*args, **kwargs)
    finally:
        torch.set_rng_state(state)
    return describe(out, twins, tensors[0].device if tensors else None)


def filled(tensors: list[Tensor], byte: int = 0) -> list[Tensor]:
    """Real tensors of such bytes on the CPU, laid out as `tensors` are, those of one memory in one memory."""
    memories: dict[int, Tensor] = {}
    for t in sorted(tensors, key=lambda t: -reach(t) * t.itemsize):
        size = -(-reach(t) * t.itemsize // 16) * 16
        memories.setdefault(id(memory_of(t)), torch.full((size,), byte, dtype=torch.uint8, device=CPU))
    twins = []
    for t in tensors:
        memory = memories[id(memory_of(t))].view(t.dtype)
        twin = memory.as_strided(t.shape, t.stride(), t.storage_offset())
        twins.append(flagged(twin, t.is_conj(), t.is_neg()))
    return twins


class Memory:
    """What fakes that lie in one memory have in common; it is `own` where a call made it.

    It is none of them: what a node of autograd saves of its own result would keep that result, which keeps
    the node, and nobody could let go of them.
    """

    __slots__ = ("own",)

    def __init__(self, own: bool) -> None:
        self.own = own


def memory_of(value: Any) -> Any:
    """The memory that a fake lies in; any other tensor stands for its own."""
    memory = getattr(value, "root", None)
    if memory is None and hasattr(type(value), "root"):
        memory = value.root = Memory(own=False)
    return value if memory is None else memory
