"""Fake tensors: tensors of true size, stride, dtype, device and autograd state, without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.ops.aliases import base_of
from kiln.ops.exceeding import NUMBERED, exceeds
from kiln.ops.layout import Mismatch, followed, is_dense, preserved
from kiln.ops.lift import Twins, concretely, hint_of, is_symbolic, lifted, originals
from kiln.ops.meta import (
    DATA,
    DECOMPOSES,
    INDEXING,
    MUTATING,
    RESHAPES,
    SEEDED,
    UNCOUNTED,
    Layout,
    Memory,
    Same,
    asked,
    by_mask,
    consult,
    drawing,
    flagged,
    infer,
    memory_of,
    too_large,
    written,
)
from kiln.ops.products import KEYS as PRODUCTS
from kiln.ops.products import composite
from kiln.ops.raising import surely_runs
from kiln.ops.symint import SEEN, plain, specialised
from kiln.ops.table import aten, rule, rule_of

_wrap = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_push = torch._C._push_on_torch_dispatch_stack  # type: ignore[attr-defined]
_pop = torch._C._pop_torch_dispatch_stack
_strided = torch.strided

#: In-place ops that give a tensor other memory, which no fake can follow.
REALLOCATING = frozenset(
    overload for packet in (aten.set_, aten.resize_, aten.resize_as_) for overload in
    (getattr(packet, name) for name in packet.overloads())
)  # fmt: skip

#: A literal of more elements than this is not kept as a constant.
LARGEST_CONSTANT = 1024
LARGEST_FOLDED = 4096
#: Factories whose contents are known.
FILLED = frozenset(
    overload for packet in (aten.eye, aten.zeros, aten.ones, aten.full, aten.arange, aten.tril_indices,
                            aten.triu_indices, aten.scalar_tensor)
    for overload in (getattr(packet, name) for name in packet.overloads()) if not overload._schema.is_mutable
)  # fmt: skip


class Placed(Tensor):
    """A tensor that may know what memory it lies in, apart from the attributes that a program gives it."""

    __slots__ = ("root",)

    root: Memory


class FakeTensor(Placed):
    """A tensor without data, made only by `make` and `fake_like`.

    `real_type` is the exact Python type of the tensor it stands for. `pinned` forbids to change its shape.
    `value` is the real tensor when the contents are a constant of the program, valid while `_version` is
    `value_version`. `node` is what stands for it in the graph of the recording that it belongs to.
    `wrapped` is what a tensor made of others consists of: an instance of its class around fakes.
    `root` is the memory that it lies in.
    """

    real_type: type = Tensor
    pinned: bool = False
    node: Any = None
    value: Tensor | None = None
    value_version: int = 0
    memory: Any = None
    wrapped: Any = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        if LITERALS.printing:
            hint = "format its shape or dtype, or print outside"
            raise Break("data-dependent", "the value of a tensor is formatted", hint)
        grad = ", requires_grad=True" if self.requires_grad else ""
        sizes = ", ".join([str(getattr(n, "node", n)) for n in self.shape])
        return f"FakeTensor(({sizes}), dtype={self.dtype}, device='{self.device}'{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensor:
        memo[id(self)] = copy = fake_like(self)
        return copy


#: For each kind of device that this machine lacks and somebody pretends to have: what makes fakes on it.
ELSEWHERE: dict[str, Any] = {}


def make(
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    offset: int = 0,
    requires_grad: bool = False,
) -> FakeTensor:
    """A new fake of this layout; `stride` None means contiguous."""
    if ELSEWHERE and device.type in ELSEWHERE:
        return ELSEWHERE[device.type](size, stride, dtype, device, offset, requires_grad)  # type: ignore[no-any-return]
    keys = None
    if SEEN.symbols:
        size, stride, offset = plain(size), plain(stride), plain(offset)
        if PRODUCTS is not None and any(type(n) is torch.SymInt for n in (*size, *(stride or ()))):
            keys = PRODUCTS
    start = None if stride is None else offset
    fake: FakeTensor = _wrap(
        FakeTensor, size, stride, start, None, dtype, _strided, device, False, requires_grad,
        _extra_dispatch_keys=keys,
    )  # fmt: skip
    return fake


def similar(x: Tensor, dtype: torch.dtype | None = None) -> FakeTensor:
    """A new contiguous fake of the size and the device of `x`, and of its dtype where no other is given."""
    return make(x.shape, None, dtype or x.dtype, x.device)


def in_order(x: Tensor, dtype: torch.dtype | None = None) -> FakeTensor:
    """The same with its dimensions in memory in the order that those of `x` have."""
    return make(x.shape, preserved(x.shape, x.stride()), dtype or x.dtype, x.device)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns on these arguments, as fakes, with the contents that follow from constants."""
    if SEEN.symbols:
        args, kwargs = plain(args), plain(kwargs)
    out = shaped(func, args, kwargs)
    if (LITERALS.made or func in FILLED) and type(out) is FakeTensor:
        fold(out, func, args, kwargs)
    if UNCOUNTED[func]:
        changed = [t for t in written(func, args, kwargs) if type(t) is FakeTensor and not t.is_inference()]
        increment_version(changed)
    return out


class Literals:
    """Whether a tensor of known contents was made since `reset`; how deep the program's native code runs.

    While `open`, what is made of symbolic numbers has no known contents, and `left` says that there was such
    a tensor; else the numbers become constants.
    """

    made = False
    printing = 0
    open = True
    left = False
    look: Callable[[FakeTensor], Tensor | None] | None = None
    """Gives what else is known of the contents of a tensor, where the program needs them."""

    def __init__(self) -> None:
        self.read: list[FakeTensor] = []
        """The tensors whose one number torch has taken, while capturing."""

    def reset(self, open: bool = True) -> None:
        self.made = self.left = False
        self.open = open


LITERALS = Literals()


def fold(out: FakeTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the contents of `out` when they follow from constants of the program."""
    leave = SEEN.symbols and LITERALS.open and is_symbolic((out, args, kwargs))
    if not leave and args and type(args[0]) is FakeTensor and args[0].value is None:
        return None  # by far the most calls
    if MUTATING[func]:
        LITERALS.left = LITERALS.left or leave
        return None if leave else follow(out, func, args, kwargs)
    if out.value is not None or SEEDED[func]:
        return
    tensors = tensors_in((args, kwargs))
    if func not in FILLED and not tensors or not all(map(is_known, tensors)):
        return
    if leave:
        LITERALS.left = True
    elif out.numel() <= LARGEST_FOLDED and out.device.type == "cpu" and not out.is_inference():
        out.value, out.value_version = func(*lowered(list(args)), **lowered(kwargs)), out._version
        LITERALS.made = True


def follow(out: FakeTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the new contents of a constant that `func` wrote into, when they follow from constants."""
    if out is not args[0] or constant_of(out) is None or SEEDED[func] or out.is_inference():
        return
    if len(list(written(func, args, kwargs))) != 1 or not all(map(is_known, tensors_in((args, kwargs)))):
        return
    # Views of the old contents keep those: what they stand for is not known any more.
    new = lowered(out).clone()
    func(new, *lowered(list(args[1:])), **lowered(kwargs))
    # The version of `out` is counted up when this dispatch returns.
    out.value, out.value_version = new, out._version + 1


def lowered(nest: Any) -> Any:
    """The nest with the known contents in place of fakes."""
    return mapped(nest, lambda v: constant_of(v) if isinstance(v, FakeTensor) else specialised(v))


def shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns, without its contents."""
    if NUMBERED[func] and exceeds(func, args, kwargs):
        return refuse(Mismatch("a number exceeds its dtype"), func, args, kwargs)
    rule = rule_of(func)
    if rule is not None:
        try:
            out: Any = rule(*args, **kwargs)
        except Mismatch as error:
            out = error
        if isinstance(out, Mismatch):  # eager's error has no other one before it
            return refuse(out, func, args, kwargs)
        if out is not NotImplemented:
            return out
    return general(func, args, kwargs)


def general(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns when it has no rule, or its rule does not cover these arguments."""
    if DATA[func] and not DECOMPOSES[func] and not (func in INDEXING and not by_mask(args[1])):
        chosen = by_constant_mask(func, args, kwargs)
        return constant_or_break(func, args, kwargs) if chosen is None else chosen
    if func.namespace == "profiler":
        # These mark the time of the capture, and give no tensors.
        return func(*args, **kwargs)
    if RESHAPES[func]:
        return reshape_in_place(func, args, kwargs)
    if DECOMPOSES[func]:
        with INNER:
            return composite(func, args, kwargs)
    if MUTATING[func] and any(overlaps(t) for t in written(func, args, kwargs)):
        return refuse(Mismatch("elements share a place"), func, args, kwargs)
    twins: Twins = []
    if SEEN.symbols:
        out = registered(func, args, kwargs) if func.namespace != "aten" else NotImplemented
        if out is NotImplemented:
            out = lifted(func, args, kwargs, make)
        if out is not NotImplemented:
            return out
        args, kwargs = concretely((args, kwargs), twins, make)
    try:
        answer, tensors = infer(func, args, kwargs, asked(func, args))
    except Break:
        raise
    except Exception as error:
        answer, tensors = error, []
    if isinstance(answer, Exception):
        answer, tensors = second_opinion(answer, func, args, kwargs)
    return build(answer, originals(tensors, twins) if twins else tensors)


def registered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a custom op gives on symbolic sizes, by the function that the program registered for fakes."""
    entry = torch._library.simple_registry.singleton.find(func.name())
    kernel = entry.fake_impl.kernel
    if kernel is None or MUTATING[func] or not is_symbolic((args, kwargs)):
        return NotImplemented
    try:
        with INNER:
            return kernel.func(*args, **kwargs)
    except Exception:
        return NotImplemented


def refuse(error: Mismatch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise what eager raises on these arguments; should it not, its result."""
    twins: Twins = []
    if SEEN.symbols:
        args, kwargs = concretely((args, kwargs), twins, make)
    tensors = tensors_in((args, kwargs))
    if too_large(tensors):
        answer, tensors = infer(func, args, kwargs)
    else:
        answer, tensors = second_opinion(error, func, args, kwargs)
    return build(answer, originals(tensors, twins) if twins else tensors)


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of `tensor` share a place by broadcasting."""
    stride = tensor.stride()
    return 0 in stride and any(s == 0 and n > 1 for s, n in zip(stride, tensor.shape, strict=True))


def second_opinion(
    error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Tensor]]:
    """What the real op says where the meta kernel failed: mostly the error that eager raises."""
    tensors = tensors_in((args, kwargs))
    # A custom op without a rule says so by another type.
    missing = isinstance(error, NotImplementedError) or "no fake impl registered" in str(error)
    if func.namespace != "aten" and "data-dependent shape" in str(error):
        why = f"what {func} gives has a size that depends on values"
        raise Break("data-dependent", why, "move it out of the compiled function") from None
    answer, refused = None, not missing
    if missing and not func._schema.returns:
        return None, tensors
    if func.namespace == "aten" and not too_large(tensors):
        try:
            answer, refused = consult(func, args, kwargs, tensors), False
        except Break:
            raise
        except Exception as real:
            error = real
    if refused:  # out here, where no other error is its context
        raise error
    if answer is None:
        why = f"{func} has no kernel for tensors without data"
        raise Break("no-meta-kernel", why, "register one with torch.library.register_fake") from error
    return answer, tensors


def build(answer: Any, tensors: list[Tensor]) -> Any:
    """The fakes that an answer of `infer` describes."""
    kind = type(answer)
    if kind is Layout:
        fake = make(answer.size, answer.stride, answer.dtype, answer.device, answer.offset)
        return flagged(fake, answer.conj, answer.neg)
    if kind is Same:
        return tensors[answer.index]
    if kind is tuple or kind is list:
        return kind([build(item, tensors) for item in answer])
    return answer


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return [value] if isinstance(value, Tensor) else []


def reshape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the shape or strides of a fake as `func` would; Break for a tensor that others see."""
    fake = args[0]
    if func is aten.resize_.default and not kwargs and tuple(args[1]) == tuple(fake.shape):
        return fake  # as where the result of a factory is given
    if func in REALLOCATING or not isinstance(fake, FakeTensor) or fake.pinned:
        why = f"{func} changes the shape, strides or memory of a tensor in place"
        raise Break("metadata-mutation", why, "use the form that returns a new tensor")
    # Of symbolic sizes squeeze_.dim reads memory that is not there.
    if func is aten.squeeze_.dim:
        func, args = aten.squeeze_.dims, (fake, [args[1]])
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    return fake


def by_constant_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a selection by masks gives when the masks are constants of the program; None when they are not."""
    if func is aten.masked_select.default:
        known = constant_of(args[1]) if type(args[1]) is FakeTensor else None
        if known is None:
            return None
        count = int(known.expand(torch.broadcast_shapes(args[0].shape, known.shape)).sum())
        return make((count,), None, args[0].dtype, args[0].device)
    if func not in INDEXING:
        return None
    places: list[Any] = []
    for index in args[1]:
        if index is None or not by_mask([index]):
            places.append(index)
        elif type(index) is FakeTensor and (known := constant_of(index)) is not None:
            places += [literal(place) for place in known.nonzero(as_tuple=True)]
        else:
            return None
    return shaped(func, (args[0], places, *args[2:]), kwargs)


DATA_HINT = "use a form whose shape does not depend on values, or move it out of the compiled function"
#: What to do about ops whose results Python needs.
DATA_HINTS = dict.fromkeys(
    ("aten._local_scalar_dense.default", "aten.item.default"),
    "keep the value a tensor, without .item(), float() or int(), or move it out of the compiled function",
)


def constant_or_break(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a data-dependent op gives when its tensors are constants of the program; else Break."""
    tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)]
    if any(needed(t) is None for t in tensors):
        why = f"{func} needs the values of a tensor"
        reason = Break("data-dependent", why, DATA_HINTS.get(str(func), DATA_HINT))
        reason.read = tensors[0] if str(func) in DATA_HINTS else None
        raise reason
    if LITERALS.look is not None and str(func) in DATA_HINTS:
        LITERALS.read += tensors
    return literal(func(*lowered(list(args)), **lowered(kwargs)))


def constant_of(fake: FakeTensor) -> Tensor | None:
    """The real tensor that `fake` stands for when its contents are known."""
    if fake.value is None or fake._version != fake.value_version:
        return None
    return fake.value


def needed(fake: FakeTensor) -> Tensor | None:
    """The same, where the program cannot go on without."""
    known = constant_of(fake)
    if known is None and LITERALS.look is not None and (known := LITERALS.look(fake)) is not None:
        fake.value, fake.value_version = known, fake._version
        LITERALS.made = True
    return known


def is_known(tensor: Tensor) -> bool:
    """Whether a tensor is a fake whose contents are known."""
    return type(tensor) is FakeTensor and constant_of(tensor) is not None


def literal(value: Any) -> Any:
    """Fakes for the real tensors in `value`, their contents kept as constants."""
    if isinstance(value, (list, tuple)):
        return type(value)([literal(v) for v in value])
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    fake = make(value.shape, value.stride(), value.dtype, value.device)
    if value.numel() <= LARGEST_CONSTANT and not fake.is_inference():
        fake.value, fake.value_version = value, fake._version
        LITERALS.made = True
    return fake


#: Ops that make a tensor of the program's literal, which nobody else has.
LIFTED = frozenset({aten.lift_fresh.default, aten.lift.default})


@rule(*LIFTED)
def _lift(value: Tensor) -> Any:
    return literal(value)


class Mode(TorchDispatchMode):
    """A dispatch mode that is entered without the checks of its base class, which import torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that the base class would add imports it on the first call

    def __enter__(self) -> Self:
        _push(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop(None)


class FakeMode(Mode):
    """While it is entered, every aten call gives fakes: factories too, and calls on real tensors.

    `writes` counts the calls that wrote into one of their arguments, and `lasting` says whether one wrote to
    memory that was there before; `draws` are the devices whose random generators drew numbers, `sure` says
    that no contents of tensors would have let a call raise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.lasting = False
        self.draws: set[torch.device] = set()
        self.sure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if MUTATING[func]:
            self.writes += 1
            targets, given = list(written(func, args, kwargs)), tensors_in((args, kwargs))
            self.lasting = self.lasting or not all(getattr(memory_of(t), "own", False) for t in targets)
            pairs = [(t, other) for t in targets for other in given if other is not t]
            if any(memory_of(t) is memory_of(other) and crosses(t, other) for t, other in pairs):
                return refuse(Mismatch("what is written shares places with what is read"), func, args, kwargs)
        out = dispatch(func, args, kwargs)
        self.sure = self.sure and surely_runs(func, out)
        note_memory(out, func, args, kwargs)
        if SEEDED[func] and drawing(func, args, kwargs):
            self.draws.update(t.device for t in tensors_in(out))
        return out


def note_memory(out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note of new fakes whose memory they lie in: that of an argument, or their own.

    Of what a composite op gives its parts have noted it: `to` may give a view or a copy.
    """
    for place, part in enumerate(out if len(func._schema.returns) > 1 else (out,)):
        base = None if func in LIFTED else base_of(func, args, kwargs, place)
        for fake in tensors_in(part):
            if type(fake) is FakeTensor and fake is not base and not hasattr(fake, "root"):
                fake.root = memory_of(base) if isinstance(base, Tensor) else Memory(base is None)


def crosses(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gaps, in one memory, share some places, or all in another order."""
    layouts = []
    for t in (a, b):
        size, stride = tuple(map(hint_of, t.shape)), tuple(map(hint_of, t.stride()))
        if 0 in size or not is_dense(size, stride):
            return False
        begin = hint_of(t.storage_offset()) * t.itemsize
        layouts.append((begin, begin + math.prod(size) * t.itemsize, stride))
    (start, end, _), (other, last, _) = layouts
    return start < last and other < end and layouts[0] != layouts[1]


#: Entered while a composite op runs inside a dispatch, where the mode that called it is off.
INNER = FakeMode()


class _Computed(torch.autograd.Function):
    """Gives a fake that has a grad_fn, for a real tensor that is not a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # type: ignore[override]
        return make(leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def refuse_exotic(real: Tensor) -> None:
    """Raise Break for tensors that have no strides or whose dtype carries more than its numbers."""
    if real.is_nested:
        raise Break(
            "tensor-layout", "a nested tensor is used", "pad it, or keep it out of the compiled function"
        )
    if real.layout is not torch.strided:
        raise Break(
            "sparse", f"a tensor of layout {real.layout} is used", "convert it with to_dense() outside"
        )
    if real.is_quantized:
        raise Break("tensor-layout", f"a quantised tensor ({real.dtype}) is used", "dequantise it outside")
    if torch._C._functorch.is_legacy_batchedtensor(real):
        raise Break("tensor-layout", "a tensor of a batch of gradients is used", "compile what it is made of")
    if real.requires_grad and not (real.is_floating_point() or real.is_complex()):
        # Filled with a tensor that requires grad, eager's integers do too, and most calls on them raise.
        why = f"a tensor of {real.dtype} requires grad"
        raise Break("tensor-layout", why, "fill it with a detached tensor")


def fake_like(
    real: Tensor, size: Sequence[Any] | None = None, stride: Sequence[Any] | None = None
) -> FakeTensor:
    """A fake with the layout and the autograd state of `real`; `size` and `stride` stand for its own.

    Strides that are not given follow the sizes: one that is a product of sizes stays that product.
    """
    refuse_exotic(real)
    if size is not None and stride is None:
        stride = followed(size, real.shape, real.stride())
    grad, leaf = real.requires_grad, real.is_leaf
    # A tensor made outside inference mode stays a normal tensor inside it, and the other way round.
    with torch.inference_mode(real.is_inference()):
        fake = make(
            real.shape if size is None else size,
            real.stride() if stride is None else stride,
            real.dtype,
            real.device,
            real.storage_offset(),
            grad and leaf,
        )
        if grad and not leaf:
            with torch.enable_grad():
                fake = _Computed.apply(fake.requires_grad_())
    kind = real.real_type if isinstance(real, FakeTensor) else type(real)
    if kind is not Tensor:
        fake.real_type = kind
    if isinstance(real, torch.nn.Parameter):
        fake._is_param = True  # type: ignore[attr-defined]
    return flagged(fake, real.is_conj(), real.is_neg())
