"""How calls of torch's Python functions are captured where they are neither plain code nor a single node."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import sys
import types
import warnings
from collections import deque
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from kiln.base import state
from kiln.base.errors import Break, Skip
from kiln.base.graph import mapped
from kiln.base.outside import computes
from kiln.base.source import Const, Derived, Source
from kiln.capture import runtime, symbolic
from kiln.capture.calls import CALLERS, Args, Kwargs, call, declare, handles, leaf, refuses, runs_now
from kiln.capture.frame import Frame, Machine, Restart, UserError
from kiln.capture.world import CONSTANTS, nested, rooted
from kiln.check.guards import Custom, Equals, Is
from kiln.ops.fake import LITERALS, FakeTensor
from kiln.ops.layout import of_number


def folds(value: Any, *functions: Any) -> None:
    """Functions whose answer is the same for every captured program, some by their names under torch."""
    for function in functions:
        if isinstance(function, str):
            module, _, name = function.rpartition(".")
            function = getattr(sys.modules.get(f"torch.{module}"), name, None)
        if function is not None:
            handles(function)(lambda m, args, kwargs: value)


folds(True, "compiler.is_dynamo_compiling", "_utils.is_compiling")
folds(False, "jit.is_scripting", "jit.is_tracing", "_jit_internal.is_scripting", "onnx.is_in_onnx_export",
      "compiler.is_exporting", "_C._is_tracing", "jit._trace.is_tracing")  # fmt: skip
folds(None, "_C._get_tracing_state", "_C._log_api_usage_once")
# Log calls inside compiled code are dropped, as documented.
folds(False, logging.Logger.isEnabledFor)
for _name in "debug info warning error log exception critical warn fatal".split():
    folds(None, getattr(logging.Logger, _name), getattr(logging, _name))


def assertion(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if type(args[0]) is FakeTensor:
        return m.torch_call(torch._assert, args, kwargs)
    if not m.truth(args[0]):
        raise UserError(AssertionError(*args[1:]))


declare({
    torch.Tensor.__iter__: lambda m, args, kwargs: m.iterate(args[0]),
    torch.is_tensor: lambda m, args, kwargs: isinstance(args[0], torch.Tensor),
    torch.is_storage: lambda m, args, kwargs: isinstance(args[0], (torch.UntypedStorage, torch.TypedStorage)),
    torch.overrides.is_tensor_like: lambda m, args, kwargs: isinstance(args[0], torch.Tensor) or m.call(
        hasattr, (args[0], "__torch_function__")),
    torch._assert: assertion,
    torch._C._infer_size: lambda m, args, kwargs: m.call(torch.broadcast_shapes, args, kwargs),  # type: ignore[attr-defined]
    # A named block of a profile: the ops of a graph have no such blocks, the name is dropped.
    torch.autograd.profiler.record_function: lambda m, args, kwargs: m.call(
        m.world.constant(contextlib.nullcontext), ()),
})  # fmt: skip
refuses("random-state", "the state of the random generator is changed or read",
        "seed outside the compiled function",
        torch.seed, torch.random.fork_rng, torch.set_rng_state, torch.get_rng_state,
        torch.cuda.manual_seed_all)  # fmt: skip
refuses("global-state", "torch's default device is changed", "use `with torch.device(...)`",
        torch.set_default_device, torch.set_default_tensor_type)  # fmt: skip
refuses("global-state", "hooks on saved tensors are set", "set them around the compiled function",
        torch._C._autograd._push_saved_tensors_default_hooks,
        torch._C._autograd._pop_saved_tensors_default_hooks)  # fmt: skip
refuses("no-meta-kernel", "which kernel computes an attention is asked", "ask outside the compiled function",
        torch._fused_sdp_choice)  # fmt: skip
refuses("metadata-mutation", "two tensors are exchanged for each other", "make new tensors instead",
        torch.utils.swap_tensors)  # fmt: skip
refuses("tensor-layout", "a quantized tensor is made", "quantize outside the compiled function",
        torch.quantize_per_tensor, torch.quantize_per_channel, torch.quantize_per_tensor_dynamic,
        torch._make_per_tensor_quantized_tensor, torch._make_per_channel_quantized_tensor,
        torch._empty_affine_quantized, torch._empty_per_channel_affine_quantized)  # fmt: skip


def on_list(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A function that changes the tensors of a list: the list itself is what it gives."""
    result = leaf(m, function, args, kwargs)
    return args[0] if args and result is not None else result


_list = [torch.zeros(())]
if torch._foreach_neg_(_list) is _list:  # type: ignore[func-returns-value]
    _names = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    handles(*[getattr(torch, name) for name in _names], told=True)(on_list)


_as_strided = "as_strided as_strided_ as_strided_copy as_strided_scatter".split()


_by_place = [getattr(torch.ops.aten, name).default for name in _as_strided]
_by_place += [
    found for place in (torch, torch.Tensor, torch.ops.aten) for name in _as_strided
    if (found := getattr(place, name, None)) is not None
]  # fmt: skip


@handles(torch.Tensor.storage_offset, *_by_place, told=True)
def by_place(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """What counts from where memory starts: guards on tensors say nothing of where in it they begin."""
    counts = function is torch.Tensor.storage_offset or len(args) > 3 or "storage_offset" in kwargs
    value = args[0] if args else kwargs.get("self", kwargs.get("input"))
    if counts and type(value) is FakeTensor:
        reals = m.world.reals
        root = value if value._base is None else value._base
        # Memory that the program makes starts where it does in every call; what was detached shows no base.
        for fake in [root] if id(root) in reals else [f for f in m.world.keep if id(f) in reals]:
            if (source := m.source(fake)) is not None:
                offset = Derived(source, torch.Tensor.storage_offset, "storage_offset")
                m.world.guard(Equals(offset, reals[id(fake)].storage_offset()))
    return leaf(m, function, args, kwargs)


@handles(torch.compiler.is_compiling)
def is_compiling(m: Machine, args: Args, kwargs: Kwargs) -> bool:
    """Yes; but a module's call, which would leave out hooks that are always called, is as in eager."""
    return m.frames[-1].function.__code__ is not torch.nn.Module._call_impl.__code__


@handles(torch.nn.Parameter)
def parameter(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A parameter made here: one node."""
    data = args[0] if args else kwargs.get("data")
    if type(data) is not FakeTensor or data.real_type not in (torch.Tensor, torch.nn.Parameter):
        why = "a Parameter is made of no plain tensor"
        raise Break("tensor-subclass", why, "make it outside the compiled function")
    made = leaf(m, torch.nn.Parameter, args, kwargs)
    made.real_type = torch.nn.Parameter
    return made


@handles(torch.Tensor, *[cls for cls in torch._tensor_classes if cls.layout is torch.strided], told=True)
def legacy_tensor(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A tensor of a class: a `torch.Size` is its size; a tuple, which nodes have in its place, is data."""
    if not kwargs and len(args) == 1 and vary(args[0]):
        dtype = torch.get_default_dtype() if function is torch.Tensor else function.dtype
        cuda = function is not torch.Tensor and function.is_cuda
        if dtype.is_floating_point:
            return m.call(torch.tensor, (args[0],), {"dtype": dtype, "device": "cuda" if cuda else "cpu"})
    if kwargs or len(args) != 1 or type(args[0]) is not torch.Size:
        return leaf(m, function, args, kwargs)
    typed = function is not torch.Tensor
    device = {"device": "cuda"} if typed and function.is_cuda else {}
    return leaf(m, torch.empty, args, {"dtype": function.dtype, **device} if typed else {})


def vary(data: Any) -> bool:
    """Whether this is a nest of numbers, some of them symbolic, which old constructors read as they are."""
    if type(data) not in (list, tuple) or not symbolic.holds_symbols(data):
        return False
    plain = {int, float, bool, list, tuple} | symbolic.SYMBOLIC
    return all(type(v) in plain for v in nested(data))


@handles(torch.Tensor.new_tensor)
def new_tensor(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of data like another one: of numbers that vary, what `torch.tensor` makes of them."""
    if len(args) != 2 or type(args[0]) is not FakeTensor:
        return leaf(m, torch.Tensor.new_tensor, args, kwargs)
    if not vary(args[1]) and type(args[1]) not in symbolic.SYMBOLIC:
        return leaf(m, torch.Tensor.new_tensor, args, kwargs)
    like = {name: m.getattr(args[0], name) for name in ("dtype", "device") if kwargs.get(name) is None}
    return m.call(torch.tensor, args[1:], {**kwargs, **like})


@handles(torch._shape_as_tensor)
def shape_as_tensor(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A tensor's sizes as a tensor: made of numbers that are known."""
    shape = m.getattr(args[0] if args else kwargs["self"], "shape")
    return m.call(torch.tensor, ([*shape],), {"dtype": torch.int64, "device": "cpu"})


@handles(torch.Tensor.new)
def legacy_like(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of another's type; of a `torch.Size` as above."""
    sized = not kwargs and len(args) == 2 and type(args[1]) is torch.Size
    return leaf(m, torch.Tensor.new_empty if sized else torch.Tensor.new, args, kwargs)


@handles(torch.utils.hooks.BackwardHook)
def backward_hook(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """What a module uses to see the gradients that pass through it: an object of the graph."""
    if id(args[0]) not in m.world.pinned:
        raise another_module()
    if not all(lasts(m, hook) for hooks in args[1:] for hook in hooks):
        raise unlasting()
    m.recorder.watched = True
    return m.native(m.recorder.effect, torch.utils.hooks.BackwardHook, args, kwargs)


def unlasting() -> Break:
    """The refusal of hooks that are not the same whenever the graph runs."""
    why = "a hook closes over tensors of the graph, or what other calls may have another of"
    return Break("tensor-hook", why, "register it outside the compiled function")


def another_module() -> Break:
    """The refusal of hooks that each call has others of."""
    why = "backward hooks of a module that is not always the same one"
    return Break("backward-hook", why, "compile the module itself")


def watch(runs: Any, m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A step of the hook's at a module's inputs or outputs, where the graph has made the hook."""
    if not m.recorder.holds(args[0]):
        raise another_module()
    return m.torch_call(runs, args, kwargs)


declare({
    torch.utils.hooks.BackwardHook.setup_input_hook: functools.partial(watch, runtime.watch_inputs),
    torch.utils.hooks.BackwardHook.setup_output_hook: functools.partial(watch, runtime.watch_outputs),
})  # fmt: skip


@handles(torch.Tensor._is_view)  # type: ignore[attr-defined]
def is_view(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.getattr(args[0], "_base") is not None


@handles(torch.Tensor.register_hook)
def register_hook(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A hook on a gradient is a step of the graph, when all that it holds is the same in every call."""
    if kwargs or len(args) != 2 or not lasts(m, args[1]):
        raise unlasting()
    m.recorder.watched |= not computes(args[1])
    handle = m.native(m.recorder.effect, runtime.watch_gradient, args)
    m.steps[id(handle)] = m.safe_step()
    return handle


@handles(torch.utils.hooks.RemovableHandle.remove)
def remove_hook(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A hook that the graph registered is taken away by the graph."""
    if id(args[0]) in m.steps:
        return m.native(m.recorder.effect, runtime.remove_hook, args)
    return m.inline(torch.utils.hooks.RemovableHandle.remove, args, kwargs)


def lasts(m: Machine, value: Any) -> bool:
    """Whether a value that a hook or a function holds is the same whenever the graph runs."""
    if type(value) in CONSTANTS or id(value) in m.world.pinned:
        return True
    home = m.source(value)
    apart = FakeTensor | list | dict | set | deque | types.MethodType  # the program meets copies of these
    if home is not None and not isinstance(value, apart):
        return stays(m, value, home)
    match value:
        case tuple():
            parts: list[Any] = [*value]
        case types.MethodType():
            parts = [value.__self__, value.__func__]
        case functools.partial():
            parts = [value.func, *value.args, *value.keywords.values()]
        case types.FunctionType():
            parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                home = m.source(cell)
                if home is None or not rooted(home):
                    parts.append(m.world.read_cell(cell))
        case FakeTensor() | list() | dict() | set() | deque():  # what is here is not what the program has
            return False
        case _:
            return isinstance(value, types.BuiltinFunctionType | type)
    return all(lasts(m, part) for part in parts)


def stays(m: Machine, value: Any, home: Source) -> bool:
    """Whether an object from outside is the same in every call: guarded, but for one given to the call."""
    named = isinstance(value, types.FunctionType) and value.__globals__.get(value.__qualname__) is value
    if not named and not rooted(home):
        return False
    m.world.guard(Is(home, value))
    return True


class Named:
    """A callable under a name that generated code can refer to."""

    def __init__(self, function: Any, name: str, owner: Any) -> None:
        self.function, self.owner = function, owner
        self.__name__ = self.__qualname__ = name
        # fx takes whatever has a name under torch for one of torch's own functions
        self.__module__ = f"captured.{getattr(owner, '__module__', None)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@handles(torch.utils.checkpoint.checkpoint)
def checkpoint(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Activation checkpointing: inlined, its nodes marked as a region for the partition."""
    function, *rest = args
    named = set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters) - {"kwargs", "args"}
    options = {*named, "preserve_rng_state"}
    if kwargs.get("use_reentrant") is False and torch.is_grad_enabled():
        hooks_allowed(m)
    with m.recorder.region():
        return call(m, function, tuple(rest), {k: v for k, v in kwargs.items() if k not in options})


def hooks_allowed(m: Machine) -> None:
    """Raise where hooks on saved tensors are refused, as those of a checkpoint are."""
    refusal = _refusal()
    if refusal is not None:
        raise UserError(RuntimeError(refusal))
    what = Const(_refusal, "hooks on saved tensors")
    m.world.guard(Custom(what, lambda asked: asked() is None, "were not refused"))


_refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


@handles(warnings.warn, warnings.warn_explicit)
def warn(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A warning is given once, while capturing."""
    if not m.muted and not any(type(v) is FakeTensor for v in nested(args)):
        warnings.warn(*args, **{k: v for k, v in kwargs.items() if k != "stacklevel"})


def _in_python(m: Machine, why: str) -> Exception:
    """What leaves to Python the frame of the program that this happens in, or the call that led there."""
    reason = Break("side-effect", why, "do so around the compiled function")
    return Restart(m.frames[0].step, reason) if len(m.frames) > 1 else Skip(str(reason), reason)


@handles(warnings.catch_warnings.__enter__)
def catch_warnings(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Warnings within the block are not given; where the program keeps them, the frame runs in Python."""
    (block,) = args
    recorded = m.getattr(block, "_record")
    if m.source(block) is not None or recorded and not unnamed(m.frames[-1]):
        raise _in_python(m, "warnings are recorded")
    m.muted += 1
    m.world.entered[id(block)] = (runtime.muted, bool(recorded))


def unnamed(frame: Frame) -> bool:
    """Whether a frame is at a with statement that gives what it enters no name."""
    here, then = frame.code.instructions[frame.index : frame.index + 2]
    return here.name == "BEFORE_WITH" and then.name == "POP_TOP"


@handles(warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings, told=True)
def filter_warnings(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """Filters of a block stay as they are while capturing; code behind a break in the block has them."""
    if "error" in (*args[:1], kwargs.get("action")):
        raise _in_python(m, "warnings are made exceptions")
    blocks = [key for key, (run, *_) in m.world.entered.items() if run is runtime.muted]
    if not blocks:
        raise Break("side-effect", "a filter of warnings is set for good", "set it outside of the function")
    m.world.entered[blocks[-1]] += ((function, args, kwargs),)


@handles(warnings.catch_warnings.__exit__)
def caught_warnings(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if m.source(args[0]) is not None:
        raise Break("side-effect", "warnings are given again", "move the break out of the block")
    m.muted -= 1
    del m.world.entered[id(args[0])]


@handles(torch.autograd.grad_mode.inference_mode.__enter__)
def enter_inference(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    mode = m.getattr(args[0], "mode")
    context = m.native(m.recorder.effect, _enter_inference_mode, (mode,))
    m.world.entered[id(context)] = (_enter_inference_mode, mode)
    m.entered.append(context)
    m.setattr(args[0], "_inference_mode_context", context)


@handles(torch.autograd.grad_mode.inference_mode.__exit__)
def exit_inference(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    context = m.getattr(args[0], "_inference_mode_context")
    if m.source(context) is not None:
        raise entered_before("inference mode")
    m.entered.remove(context)
    m.world.entered[id(context)] = (type(None),)
    m.native(m.recorder.effect, _exit_inference_mode, (context,))


@handles(torch.device.__enter__)
def enter_device(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A default device: factories get it as an argument, so the graph needs no context."""
    m.devices.append(args[0])
    return args[0]


@handles(torch.device.__exit__)
def exit_device(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if not m.devices:
        raise entered_before("a default device")
    m.devices.pop()


def entered_before(what: str) -> Break:
    why = f"{what} was entered before this graph"
    return Break("foreign-context", why, "enter and leave it in one function")


# What a GPU is does not change.
runs_now(torch.cuda.get_device_capability, torch.cuda.get_device_properties, torch.cuda.get_device_name,
         torch.cuda.is_initialized, torch.cuda.is_bf16_supported)  # fmt: skip


@handles(torch.get_default_device)
def default_device_now(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.devices[-1] if m.devices else torch.get_default_device()


def literal_tensor(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A tensor from Python values; tensors of one element may stand among them."""
    listed = args and type(args[0]) in (list, tuple)
    made_of_tensors = listed and any(type(v) is FakeTensor for v in nested(args))
    made_of_numbers = args and LITERALS.open and symbolic.holds_symbols(m.world.touch_deep(args[0]))
    if made_of_tensors or made_of_numbers:
        LITERALS.left = LITERALS.left or bool(made_of_numbers)
        m.world.touch(args[0])
        shape = m.native(function, mapped(args[0], zeroed), *args[1:], **kwargs)
        return m.recorder.declare(function, args, kwargs, shape)
    return leaf(m, function, args, kwargs)


def zeroed(value: Any) -> Any:
    """Real zeros in place of a fake, and the number of now in place of a symbolic one."""
    if type(value) in symbolic.SYMBOLIC:
        return value.node.hint
    return torch.zeros(value.shape, dtype=value.dtype) if type(value) is FakeTensor else value


@handles(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.floor_divide, told=True)
def of_numbers(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """How a function that takes two numbers as well as tensors is captured: of a tensor made of the first."""
    if len(args) == 2 and {*map(type, args)} <= NUMBERS:
        first = leaf(m, torch.scalar_tensor, args[:1], {"dtype": of_number(type(args[0]))})
        args = (first, args[1])
    return leaf(m, function, args, kwargs)


NUMBERS = {bool, int, float, complex, *symbolic.SYMBOLIC}


def call_script(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    why = f"{type(function).__name__} is compiled by TorchScript"
    raise Break("script", why, "compile the Python function instead")


for _kind in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule, torch.jit.TopLevelTracedModule):
    CALLERS[_kind] = call_script


def call_scripted(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A scripted function: the Python that it was made of, or one node where it branches or loops."""
    written = getattr(function, "_torchdynamo_inline", None)
    if written is None or any(node.kind() in BRANCHING for node in function.inlined_graph.nodes()):
        return leaf(m, Named(function, function.name, function), args, kwargs)
    return call(m, m.world.constant(written), args, kwargs)


BRANCHING = frozenset({"prim::If", "prim::Loop"})
CALLERS[torch.jit.ScriptFunction] = call_scripted


WRITES: dict[Any, Any] = dict(state.ATTENTION)


@handles(*WRITES, told=True)
def read_switch(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A switch that the guard on torch's state leaves out gets its own, unless the program set it before."""
    value = m.native(function, *args, **kwargs)
    if not m.recorder.called(WRITES[function]):
        now = Derived(Const(function), operator.call, "now")
        m.world.guard(Custom(now, functools.partial(operator.eq, value), f"was {value}"))
    return value
