"""The call protocol: what happens when the program calls something.

Python functions are inlined, torch functions become nodes, native functions known to be free of side effects
run now on the real objects, and everything else breaks the graph. Dispatch is by identity first (HANDLERS),
then by the callable's type.
"""

from __future__ import annotations

import _heapq
import array
import bisect
import contextlib
import dataclasses
import functools
import gc
import operator
import random
import reprlib
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd.graph import Node

from kiln import _hook
from kiln.base import live, marks
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break, Bug, Skip
from kiln.base.source import Attr, Const, Derived, DictAttr, Item, Source
from kiln.capture import attributes, purity, repeated, symbolic
from kiln.capture import nested as hooked
from kiln.capture.fake_arrays import FakeArray, OpenNumber, OpenText
from kiln.capture.frame import Machine, Restart, Unread, UserError
from kiln.capture.identity import KEYED, SEARCHED, counts, settle_keys, sought
from kiln.capture.iterators import Callback, Generator
from kiln.capture.nodes import Args as Args
from kiln.capture.nodes import Kwargs as Kwargs
from kiln.capture.runtime import Within
from kiln.capture.world import BUILTIN_METHOD, CONSTANTS, MISSING, nested
from kiln.check.guards import Custom, Length
from kiln.ops.fake import FakeTensor

#: By id of the callable; filled by builtin_calls and torch_calls.
HANDLERS: dict[int, Callable[[Any, Args, Kwargs], Any]] = {}
ALIVE: list[Any] = []
ONE, TWO, THREE = range(1, 2), range(2, 3), range(3, 4)
#: Builtins without keyword arguments, but for a few, and how many others they take: with more or less Python
#: itself says what is wrong.
POSITIONAL = {id(function): counts for function, counts in (
    (isinstance, TWO), (issubclass, TWO), (len, ONE), (hasattr, TWO), (getattr, range(2, 4)),
    (setattr, THREE), (delattr, TWO), (callable, ONE), (id, ONE), (hash, ONE), (iter, range(1, 3)),
    (next, range(1, 3)), (repr, ONE), (bool, range(2)), (all, ONE), (any, ONE), (abs, ONE),
    (functools.reduce, range(2, 4)), (filter, TWO), (map, range(2, 99)), (format, range(1, 3)),
    (operator.getitem, TWO), (operator.setitem, THREE), (operator.delitem, TWO), (operator.contains, TWO),
    (operator.truth, ONE), (operator.not_, ONE), (operator.is_, TWO), (operator.is_not, TWO),
    (object.__delattr__, TWO), (object.__setattr__, THREE), (type.__setattr__, THREE),
    (object.__getattribute__, TWO), (type.__getattribute__, TWO), (vars, range(2)), (dir, range(2)),
    (locals, range(1)), (globals, range(1)), (reversed, ONE), (sum, range(1, 3)), (sorted, ONE),
    (max, range(1, 99)), (min, range(1, 99)), (list, range(2)), (tuple, range(2)), (set, range(2)),
    (frozenset, range(2)),
)}  # fmt: skip
KEYWORDED = frozenset(map(id, (sum, sorted, max, min)))


def handles(*functions: Any, told: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how calls of these very objects are captured; `told`: the handler is told which it is."""

    def declare(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[id(function)] = functools.partial(handler, function=function) if told else handler
            ALIVE.append(function)
        return handler

    return declare


def declare(rules: dict[Any, Callable[..., Any]]) -> None:
    """Declare how calls of these very objects are captured, a row each."""
    for function, handler in rules.items():
        handles(function)(handler)


def runs_now(*functions: Any) -> None:
    """Declare that calls of these very objects run as they are."""
    handles(*functions, told=True)(lambda m, args, kwargs, function: m.native(function, *args, **kwargs))


def refuses(kind: str, why: str, hint: str, *functions: Any) -> None:
    """Declare that calls of these very objects break the graph."""

    def handler(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        raise Break(kind, why, hint)

    handles(*functions)(handler)


def call(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str = "opaque") -> Any:
    """Call anything."""
    if m.modes and (found := attributes.MODES["intercept"](m, function, args, kwargs)) is not MISSING:
        return found
    if type(function) is not types.FunctionType and (action := marked_action(function)) is not None:
        return action(m, function, args, kwargs)
    handler = HANDLERS.get(id(function))
    if handler is not None:
        if m.world.texts and id(function) not in KEEPING:
            look(nested((*args, *kwargs.values())))
        if unfit(function, args, kwargs):
            return m.native(function, *args, **kwargs)
        return handler(m, args, kwargs)
    caller = CALLERS.get(type(function))
    if caller is not None:
        return caller(m, function, args, kwargs, mode)
    for kind, caller in CALLER_BASES:
        if isinstance(function, kind):
            return caller(m, function, args, kwargs, mode)
    return call_object(m, function, args, kwargs, mode)


def unfit(function: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a builtin refuses these arguments."""
    counts = POSITIONAL.get(id(function))
    return counts is not None and (len(args) not in counts or bool(kwargs) and id(function) not in KEYWORDED)


def look(values: Iterable[Any]) -> None:
    """Raise where a text that was left open is among the values."""
    for value in values:
        if type(value) is OpenText:
            raise value.needed()


#: Builtins that do not look at texts which they are given.
KEEPING = frozenset(map(id, (isinstance, type, list, tuple, dict, zip, enumerate, iter, next, reversed)))


# ---------------------------------------------------------------------- Python functions


def call_function(m: Machine, function: types.FunctionType, args: Args, kwargs: Kwargs, mode: str) -> Any:
    action = marked_action(function)
    if action is not None:
        m.world.identify_marks(function, marks.of(function))
        return action(m, function, args, kwargs)
    special = BY_CODE.get(id(function.__code__))
    if special is not None:
        return special(m, function, args, kwargs)
    caller = POLICIES.get(purity.python_policy(function))
    if caller is call_world and is_patched(function):
        return call_wrapped(m, function, args, kwargs)
    # What is asked of a generator is not to be asked of what stands for it here.
    if caller is None or caller is POLICIES["native"] and any(type(v) is Generator for v in args):
        return m.inline(function, args, kwargs, mode)
    return caller(m, function, args, kwargs, mode)


def is_patched(function: types.FunctionType) -> bool:
    """Whether PyTorch's compiler, once used in the process, has put this around a function of optimizers."""
    around = function.__globals__.get("__name__") == "torch._dynamo.eval_frame"
    wraps = around and "__wrapped__" in vars(function)
    return wraps and (function.__module__ or "").startswith("torch.optim")


def call_rest(m: Machine, rest: Within, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """What is left of an inlined call that broke; its variables are looked at when they are first read."""
    frame = m.enter(rest.function, args, kwargs)
    frame.mode = mode
    frame.lazy = {name: (v.value, v.source) for name, v in frame.locals.items() if type(v) is Unread}
    frame.locals = {name: v for name, v in frame.locals.items() if name not in frame.lazy}
    return m.run(frame)


def call_wrapped(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A wrapper that adds nothing here: what it wraps is called."""
    return call(m, m.getattr(function, "__wrapped__"), args, kwargs)


def call_dispatch(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """The choice that functools.singledispatch makes for a class."""
    (cls,) = args
    chosen = m.native(function, cls)
    text = f"chose {chosen.__qualname__} for {cls.__name__}"
    m.world.guard(Custom(Const(function), lambda dispatch: dispatch(cls) is chosen, text))
    return m.world.constant(chosen)


#: Treatments of functions that the standard library makes again and again.
BY_CODE: dict[int, Callable[..., Any]] = {
    id(dataclasses._recursive_repr(repr).__code__): call_wrapped,  # type: ignore[attr-defined]
    id(reprlib.recursive_repr()(repr).__code__): call_wrapped,
    id(torch._compile._disable_dynamo(repr).__code__): call_wrapped,  # type: ignore[attr-defined]
    id(functools.singledispatch(call_wrapped).dispatch.__code__): call_dispatch,  # type: ignore[attr-defined]
}


def call_own(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A method of the interpreter's own iterators: what it raises beyond the end of iteration is our bug."""
    try:
        return function(*args, **kwargs)
    except StopIteration as e:
        raise UserError(e) from None


def call_world(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A function that talks to the world; a generator of random numbers made here is no part of that."""
    if args and type(args[0]) is random.Random and m.source(args[0]) is None:
        return native(m, function, args, kwargs)
    name = f"{function.__module__}.{function.__qualname__}"
    raise Break("side-effect", f"{name} has effects outside the graph",
                "move the call out of the compiled function")  # fmt: skip


def call_leaf(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    return leaf(m, function, args, kwargs)


def leaf(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A torch function: one node."""
    for value in (*args, *kwargs.values()):
        m.world.touch_deep(value)
    for value in nested((*args, *kwargs.values())):
        if type(value) in PLAIN_ARGUMENTS:
            continue
        if hasattr(type(value), "__torch_function__") and not isinstance(value, torch.Tensor):
            result = SUBCLASSED["intercept"](m, function, args, kwargs)
            if result is not MISSING:
                return result
        if foreign(m, value):
            raise Break("foreign-object",
                        f"a {type(value).__name__} from outside is an argument of a torch call",
                        "pass tensors and Python constants")  # fmt: skip
    return m.torch_call(function, args, kwargs)


#: How tensors of subclasses are made, and what they make of torch calls; filled by `subclasses`.
SUBCLASSED: dict[str, Any] = {}
PLAIN_ARGUMENTS = frozenset({*CONSTANTS, FakeTensor, list, tuple, dict})


def foreign(m: Machine, value: Any) -> bool:
    """Whether a value from outside holds a state that no guard covers."""
    values = (*purity.VALUES, torch.Tensor, torch.Generator)
    return m.world.unguarded(value) and id(value) not in m.world.pinned and not isinstance(value, values)


def marked_action(function: Any) -> Callable[..., Any] | None:
    """What a mark of the user's says about calls of this callable."""
    return MARKED.get(min(marks.of(function) & MARKED.keys(), default=""))


#: Marks that break the graph: the kind, the reason, in which {} is the function, and the remedy.
BREAKING = {
    marks.BREAK: ("graph-break-called", "kiln.graph_break() was called", "remove the call of graph_break"),
    marks.STOP: ("stopped", "step_unsupported() was called", "remove the call"),
    marks.DISABLE: ("disabled", "{} is disabled for compilation", "remove kiln.disable"),
    marks.SKIP: ("skipped-function", "{} is kept out of compilation", "remove kiln.disable"),
    marks.DISALLOW: ("disallowed", "{} is kept out of graphs", "remove disallow_in_graph"),
}


def marked_break(mark: str, m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    kind, why, hint = BREAKING[mark]
    said = "" if "{}" in why else str(args[0]) if args else kwargs.get("msg")
    raise Break(kind, said or why.format(getattr(function, "__qualname__", function)), hint)


def marked_skip_frame(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    raise Skip(str(args[0]) if args else "skip_frame() was called")


def marked_constant(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    value = m.native(function, *args, **kwargs)
    return m.world.outside(value, Const(value)) if isinstance(value, torch.Tensor) else value


MARKED: dict[str, Callable[..., Any]] = {
    marks.ALLOW: leaf, marks.CONSTANT: marked_constant, marks.SKIP_FRAME: marked_skip_frame,
    **{mark: functools.partial(marked_break, mark) for mark in BREAKING},
}  # fmt: skip


def bind(m: Machine, function: types.FunctionType, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The local variables that a call starts with."""
    code = function.__code__
    names, count, kwonly = code.co_varnames, code.co_argcount, code.co_kwonlyargcount
    values = dict(zip(names[:count], args, strict=False))
    extra = args[count:]
    rest: dict[str, Any] = {}
    flags = code.co_flags
    if kwargs:
        allowed = names[code.co_posonlyargcount : count + kwonly]
        for name, value in kwargs.items():
            if name in allowed:
                if name in values:
                    refused(m, function, args, kwargs)
                values[name] = value
            elif flags & 8:
                rest[name] = value
            else:
                refused(m, function, args, kwargs)
    if extra and not flags & 4:
        refused(m, function, args, kwargs)
    if len(values) < count + kwonly:
        fill_defaults(m, function, values, names, count)
        if any(name not in values for name in names[: count + kwonly]):
            refused(m, function, args, kwargs)
    at = count + kwonly
    if flags & 4:
        values[names[at]] = tuple(extra)
        at += 1
    if flags & 8:
        values[names[at]] = rest
    return values


def fill_defaults(m: Machine, function: Any, values: dict[str, Any], names: Args, count: int) -> None:
    source = m.source(function)
    defaults, kwdefaults = function.__defaults__ or (), function.__kwdefaults__ or {}
    first = count - len(defaults)
    given = [(names[first + i], "__defaults__", i, value) for i, value in enumerate(defaults)]
    given += [(n, "__kwdefaults__", n, value) for n, value in kwdefaults.items()]
    for name, table, key, value in given:
        if name not in values:
            path = None if source is None else Item(Attr(source, table), key)
            values[name] = value if path is None or type(value) in CONSTANTS else m.world.outside(value, path)


def refused(m: Machine, function: types.FunctionType, args: Args, kwargs: Kwargs) -> NoReturn:
    """Arguments that do not fit: Python itself says so before it runs anything."""
    m.native(function, *args, **kwargs)
    raise Bug(f"the arguments of {function.__qualname__} are not understood, but Python takes them")


# ---------------------------------------------------------------------- other callables


def call_method(m: Machine, function: types.MethodType, args: Args, kwargs: Kwargs, mode: str) -> Any:
    return call(m, function.__func__, (function.__self__, *args), kwargs, mode)


def call_partial(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    inner, fixed, named = (part_of(m, function, name) for name in ("func", "args", "keywords"))
    m.world.touch(named)
    return call(m, inner, (*fixed, *args), {**named, **kwargs}, mode)


def part_of(m: Machine, function: Any, name: str) -> Any:
    """What a partial function calls or hands on; a class made of partial may have another by that name."""
    part = vars(functools.partial)[name]
    if attributes.mro_lookup(type(function), name) is part:
        return m.getattr(function, name)
    value, source = part.__get__(function), m.source(function)
    return value if source is None else m.world.outside(value, Derived(source, part.__get__, name))


def call_cached(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """functools.lru_cache: where it knows the arguments the cache answers, as in eager; else it misses."""
    if not all(stays(m, value) for value in (function, *args, *kwargs.values())):
        return call(m, m.world.constant(function.__wrapped__), args, kwargs)
    ask = Asked(args, tuple(kwargs.items()))
    result = m.native(ask, function)
    if type(result) in CONSTANTS or isinstance(result, (type, types.ModuleType, types.FunctionType)):
        return result
    return m.world.outside(result, Derived(Const(function, function.__name__), ask, "result"))


def stays(m: Machine, value: Any) -> bool:
    """Whether a value is a constant, or an object that is the same in every call."""
    source = m.source(value)
    return type(value) in CONSTANTS or isinstance(source, Const) and source.value is value


@dataclass(frozen=True, slots=True)
class Asked:
    """A call with these arguments."""

    args: Args
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self, function: Any) -> Any:
        return function(*self.args, **dict(self.kwargs))


def call_region(m: Machine, region: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A function that is compiled already is inlined, unless it is to be one graph and would be split."""
    function = m.world.constant(region.function)
    if m.whole or region not in live.whole:
        return call(m, function, args, kwargs, mode)
    try:
        return call(m, function, args, kwargs)
    except Break as e:
        raise Restart(m.safe_step(), e) from None


def call_object(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """Any object whose class defines `__call__`."""
    method = attributes.type_lookup(m, type(function), "__call__")
    if method is None:
        raise UserError(TypeError(f"'{type(function).__name__}' object is not callable"))
    if isinstance(method, types.FunctionType):
        return call(m, method, (function, *args), kwargs, mode)
    bound = method
    if hasattr(type(method), "__get__"):
        bound = attributes.bind(m, method, function, type(function), "__call__")
    if type(bound) is types.MethodWrapperType:
        raise unknown(function)
    return call(m, bound, args, kwargs, mode)


def call_module(m: Machine, module: torch.nn.Module, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """An nn.Module: what an earlier call of one like it recorded, or else its `__call__`."""
    parts = vars(module).get("_modules")  # none of one that is made in what goes on after a break
    if parts is None or not parts and type(module).__module__.startswith("torch.nn.modules."):
        return enter_module(m, module, args, kwargs, mode)  # one or two ops
    return repeated.call(m, module, args, kwargs, lambda: enter_module(m, module, args, kwargs, mode))


def enter_module(m: Machine, module: torch.nn.Module, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """Interpret a call of a module: straight to forward when no hook is registered anywhere."""
    lazy = "_initialize_hook" in module.__dict__ and isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)
    if lazy and m.source(module) is not None:
        # A lazy module takes its shapes from its first arguments, and its parameters are drawn now. One that
        # the program makes does so in every call: its hook is interpreted.
        if m.recorder.dispatch.draws:
            why = f"a {type(module).__name__} is initialized after random numbers were drawn"
            raise Break("random-state", why, "call the module once before it is compiled")
        m.native(module._infer_parameters, module, args, kwargs)
    cls = type(module)
    entry = attributes.type_lookup(m, cls, "__call__")
    if isinstance(entry, staticmethod):
        return call(m, entry, args, kwargs, mode)
    if entry is not PLAIN_CALL or not unhooked(m, module):
        return call(m, entry, (module, *args), kwargs, mode)
    return call(m, m.getattr(module, "forward"), args, kwargs, mode)


PLAIN_CALL = torch.nn.Module.__call__
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple((name, getattr(torch.nn.modules.module, name)) for name in (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
))  # fmt: skip


def unhooked(m: Machine, module: torch.nn.Module) -> bool:
    """Whether no hook sees a call of the module, and nothing takes the place of its forward."""
    source, space, shadows = m.source(module), module.__dict__, m.world.shadow_of
    if any(space.get(name) for name in HOOKS) or any(table for _, table in GLOBAL_HOOKS):
        return False
    tables = (*[space.get(name) for name in HOOKS], *[table for _, table in GLOBAL_HOOKS]) if shadows else ()
    if any(shadows[id(table)].changed() for table in tables if id(table) in shadows):
        return False  # one has been registered meanwhile
    if source is None:
        return True
    if space.get("_compiled_call_impl") is not None or "forward" in space:
        return False
    if id(module) in m.world.instance or id(space) in m.world.shadow_of:
        return False
    for name, table in GLOBAL_HOOKS:
        m.world.guard(Length(Const(table, name), 0))
    for name in HOOKS:
        m.world.guard(Length(DictAttr(source, name), 0))
    return True


# ---------------------------------------------------------------------- classes

TYPE_CALL = attributes.mro_lookup(type, "__call__")


def call_class(m: Machine, cls: type, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """Make an instance: `__new__`, then `__init__`, each inlined where it is Python."""
    meta_call = attributes.mro_lookup(type(cls), "__call__")
    if meta_call is not TYPE_CALL and not purity.native_class(cls):
        if isinstance(meta_call, types.FunctionType):
            m.world.class_attr(type(cls), "__call__", meta_call)
            return m.inline(meta_call, (cls, *args), kwargs, "opaque")
        if isinstance(meta_call, type):  # not bound: a TypedDict is made by `dict`
            m.world.class_attr(type(cls), "__call__", meta_call)
            return call(m, m.world.constant(meta_call), args, kwargs, mode)
    if purity.native_class(cls):
        return native(m, cls, args, kwargs)
    if purity.leaf_class(cls):
        return leaf(m, cls, args, kwargs)
    return make(m, cls, args, kwargs, mode)


def make(m: Machine, cls: type, args: Args, kwargs: Kwargs, mode: str = "opaque") -> Any:
    """type.__call__ for the user's classes."""
    if issubclass(cls, torch.Tensor) and cls is not torch.Tensor:
        return SUBCLASSED["made"](m, cls, args, kwargs)
    init = attributes.mro_lookup(cls, "__init__")
    if isinstance(init, types.FunctionType) and purity.talks(init):
        call_world(m, init, args, kwargs, mode)  # whole: what it does on the way is of no use to the program
    if hasattr(cls, "__del__"):
        # It may be made again after a break, or never be needed; a file must be closed once all the same.
        why = f"a {cls.__name__} is made, whose __del__ is to run once"
        raise Break("finalizer", why, "make it outside the compiled function")
    maker = attributes.type_lookup(m, cls, "__new__")
    if isinstance(maker, staticmethod):
        maker = maker.__func__
    if isinstance(maker, types.FunctionType):
        made = call(m, m.world.constant(maker), (cls, *args), kwargs)
    elif maker is object.__new__ or maker is attributes.mro_lookup(object, "__new__"):
        made = m.native(object.__new__, cls, *args, **kwargs)
    else:
        made = native(m, maker, (cls, *args), kwargs, known=purity.native_base(cls), what=cls)
    if not isinstance(made, cls):
        return made
    init = attributes.type_lookup(m, type(made), "__init__")
    if isinstance(init, types.FunctionType):
        result = m.inline(init, (made, *args), kwargs, "object" if mode == "push" else "opaque", payload=made)
        if result is not None:
            raise UserError(TypeError(f"__init__() should return None, not '{type(result).__name__}'"))
    elif init is not attributes.mro_lookup(object, "__init__"):
        native(m, init, (made, *args), kwargs, known=purity.native_base(cls), what=cls)
    return made


# ---------------------------------------------------------------------- native code


def call_builtin(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A builtin function, or a native method bound to its object."""
    owner = getattr(function, "__self__", None)
    if type(owner) is FakeTensor:
        target = getattr(torch.Tensor, function.__name__)
        handler, given = HANDLERS.get(id(target)), (owner, *args)
        return leaf(m, target, given, kwargs) if handler is None else handler(m, given, kwargs)
    caller = POLICIES.get(purity.builtin_policy(function))
    if caller is not None:
        return caller(m, function, args, kwargs, mode)
    # The owner of a function that bindings of C++ make is a record of theirs, of which it is no method.
    method = isinstance(owner, type) or hasattr(type(owner), function.__name__)
    trusted = method or (function.__module__ or "").startswith("torch.")
    if owner is not None and not isinstance(owner, types.ModuleType) and trusted:
        return call_native_method(m, function, owner, function.__name__, args, kwargs)
    raise unknown(function)


def call_setting(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A read of a setting of torch's, guarded unless the program may have set it itself."""
    value = native(m, function, args, kwargs)
    if not args and not kwargs and type(value) in CONSTANTS:
        m.world.setting(function, value)
    return value


def call_effect(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A write of a setting: a node of the graph, made now, too."""
    m.world.switched = m.world.switched or not function.__name__.startswith(purity.MODE_WRITES)
    return m.native(m.recorder.effect, function, args, kwargs)


def call_native_method(m: Machine, function: Any, owner: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """A native method of an object: safe when the object is a constant, or made or shadowed by capture."""
    if args and isinstance(owner, KEYED) and symbolic.holds_symbols(args[0]) and not counts(m, args[0]):
        args = (symbolic.concrete(args[0]), *args[1:])
    special = HANDLERS.get(id(getattr(type(owner), name, None)))
    if special is not None:
        return special(m, (owner, *args), kwargs)
    kinds = (*type(owner).__mro__, *([Node] if isinstance(owner, Node) else ()))
    handler = next((h for kind in kinds if (h := METHODS.get((kind, name)))), None)
    if handler is not None:
        result = handler(m, owner, args, kwargs)
        if result is not MISSING:
            return result
    m.world.touch(owner)
    if isinstance(owner, type):
        known = purity.native_base(owner) or purity.native_class(owner)
        return native(m, function, args, kwargs, known=known, what=owner)
    if not isinstance(owner, purity.VALUES) and m.world.unguarded(owner):
        raise unknown(function)
    return native(m, function, args, kwargs)


#: Native methods with a treatment of their own; MISSING: go on.
METHODS: dict[tuple[type, str], Callable[..., Any]] = {}


def call_descriptor(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """An unbound native method: `list.append(xs, x)`, `object.__setattr__(o, n, v)`, `Tensor.add(x, y)`."""
    if args and type(args[0]) is FakeTensor and function.__objclass__ in torch.Tensor.__mro__[:-1]:
        return leaf(m, function, args, kwargs)
    if not args:
        return m.native(function, *args, **kwargs)
    return call_native_method(
        m, functools.partial(function, args[0]), args[0], function.__name__, args[1:], kwargs
    )


def call_method_wrapper(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A slot of a native type bound to its object: `(1).__add__`, `super().__init__`."""
    owner, name = function.__self__, function.__name__
    if type(owner) is FakeTensor:
        return leaf(m, getattr(torch.Tensor, name), (owner, *args), kwargs)
    if type(owner) is types.GetSetDescriptorType and args and type(args[0]) is FakeTensor:
        return attributes.load(m, args[0], owner.__name__)
    descriptor = getattr(function.__objclass__, name) if hasattr(function, "__objclass__") else None
    handler = HANDLERS.get(id(descriptor))
    if handler is not None:
        return handler(m, (owner, *args), kwargs)
    if name == "__init__" and not isinstance(owner, type):
        return native(m, function, args, kwargs, known=purity.native_base(type(owner)), what=type(owner))
    return call_native_method(m, function, owner, name, args, kwargs)


OVER_LIST = "iterate over a list"


def native(
    m: Machine, function: Any, args: Args, kwargs: Kwargs, known: bool = True, what: Any = None
) -> Any:
    """Run native code now, on real objects and fake tensors; callbacks come back to the interpreter."""
    if not known:
        raise unknown(what or function)
    world = m.world
    for value in (*args, *kwargs.values()):
        (world.touch_deep if purity.reads_deeply(function) else world.touch)(value)
        path = world.source(value)
        if isinstance(value, BUFFERS) and path is not None:
            raise Break("foreign-object", f"the memory of {path} is read", "pass bytes")
        if hasattr(type(value), "__next__") and path is not None and id(value) not in world.streams:
            raise Break("foreign-iterator", f"{path} is a {type(value).__name__} made outside", OVER_LIST)
    if any(type(value) in CALLABLE for value in (*args, *kwargs.values())) and purity.calls_back(function):
        args = tuple(callback(m, value) for value in args)
        kwargs = {name: callback(m, value) for name, value in kwargs.items()}
    parts = list(nested((*args, *kwargs.values())))
    kinds: set[Any] = {type(value) for value in parts}
    if not HOLDERS.isdisjoint(kinds) and symbolic.needs_numbers(function, purity.reads_deeply(function)):
        for value in parts:
            if isinstance(value, OpenNumber):
                raise value.needed()
        if function in CHANGES and args and isinstance(args[0], list):
            list.__setitem__(args[0], slice(None), [symbolic.concrete(item) for item in args[0]])
        args, kwargs = symbolic.concrete(args), symbolic.concrete(kwargs)
    if FakeArray in kinds and function in (bytes, bytearray, memoryview):
        why = "the memory of an array is read"
        raise Break("data-dependent", why, "read it outside the compiled function")
    owner = function.args[0] if type(function) is functools.partial else getattr(function, "__self__", None)
    if args and isinstance(owner, SEARCHED) and getattr(function, "__name__", "") in SEARCHES:
        args = (sought(m, owner, args[0]), *args[1:])
    elif getattr(function, "__name__", "") not in ORDERED:
        settle_keys(m, (owner, *parts))
    run = called_back(m, function, owner, *args, *kwargs.values())
    moves = any(hasattr(kind, "__next__") for kind in kinds)
    recorded = FakeTensor in kinds
    world.looked = world.looked or recorded
    with m.recorder.mode() if recorded else contextlib.nullcontext():
        return m.view(m.consume(run, args, kwargs) if moves else m.native(run, *args, **kwargs))


def called_back(m: Machine, function: Any, *values: Any) -> Any:
    """Native code, so that methods of the program's which it runs for these values are interpreted."""
    kinds: set[Any] = {type(value) for value in nested(values, hashed=True)}
    risky = any(kind not in PLAIN_ARGUMENTS and purity.has_dunders(kind) for kind in kinds)
    return hooked.interpreting(m, function) if risky else function


#: Methods of containers that look for what they are given.
SEARCHES = frozenset("get pop setdefault add discard remove index count __contains__ __getitem__ __setitem__"
                     " __delitem__ move_to_end".split())  # fmt: skip
#: Native code that leaves keys as they are.
ORDERED = frozenset("items keys values copy clear popitem len iter list tuple reversed ref".split())
#: Native code that changes the list that it is given first.
CHANGES = frozenset({
    *[f for name in vars(_heapq) if isinstance(f := getattr(_heapq, name), types.BuiltinFunctionType)],
    bisect.insort_left, bisect.insort_right,
})  # fmt: skip
BUFFERS = (bytearray, memoryview, array.array)
HOLDERS = symbolic.SYMBOLIC | {torch.Size, slice, OpenNumber, OpenText}
CALLABLE = frozenset({types.FunctionType, types.MethodType, functools.partial, type})


def callback(m: Machine, value: Any) -> Any:
    """A native callable that hands a Python function's calls to the interpreter."""
    python = type(value) in (types.FunctionType, types.MethodType, functools.partial)
    made = isinstance(value, type) and not purity.native_class(value)
    return Callback(m, value) if python or made else value


def unknown(function: Any) -> Break:
    names = (getattr(function, key, None) for key in ("__qualname__", "__name__"))
    name = next(filter(None, names), type(function).__name__)
    module = getattr(function, "__module__", None) or type(function).__module__
    return Break("native-call",
                 f"{module}.{name} is native code that is not known to be free of side effects",
                 "move the call out of the compiled function, "
                 "or mark a wrapper with kiln.allow_in_graph")  # fmt: skip


def call_weak(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """A weak reference: one made here leads to what the program still holds."""
    value, source = m.native(function, *args, **kwargs), m.source(function)
    if source is not None:
        return followed(m, value, Derived(source, operator.call, "target"))
    if value is None or m.source(value) is not None or held(m, value):
        return m.view(value)
    why = f"a weak reference leads to a {type(value).__name__} that the program has let go"
    raise Break("weak-reference", why, "hold a reference to the object")


def held(m: Machine, value: Any) -> bool:
    """Whether a variable or the stack of the program leads to an object that was made here."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [part for f in m.frames for part in (f.locals, f.cells, f.stack)]
    while todo and len(seen) < 1 << 14:
        if (part := todo.pop()) is value:
            return True
        if id(part) not in seen and not isinstance(part, (type, types.ModuleType, FakeTensor)):
            seen[id(part)] = part
            todo += gc.get_referents(part)
    return False


def followed(m: Machine, value: Any, path: Source) -> Any:
    """What a weak reference from outside leads to, in every call, where no other path leads to it."""
    known = None if value is None else m.source(value)
    if known is not None:
        return m.world.again(value, known, known)
    if isinstance(value, torch.nn.Module):  # which the graph would hold
        why = f"a weak reference leads to a {type(value).__name__} that nothing else leads to"
        raise Break("weak-reference", why, "hold a reference to the module")
    return m.world.outside(value, path)


def proxied(m: Machine, proxy: Any) -> Any:
    """What a weak proxy from outside stands for."""
    source = m.source(proxy)
    assert source is not None
    return followed(m, m.native(target, proxy), Derived(source, target, "target"))


def target(proxy: Any) -> Any:
    return proxy.__reduce_ex__.__self__


for _proxy in weakref.ProxyTypes:
    attributes.LOADERS[_proxy] = lambda m, value, name: m.getattr(proxied(m, value), name)
    attributes.STORERS[_proxy] = lambda m, value, name, item: m.setattr(proxied(m, value), name, item)


@handles(weakref.ref)
def make_weak(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A weak reference; what it leads to lives as long as the program holds it."""
    if len(args) != 1 or kwargs:
        why = "a weak reference with a callback is made"
        raise Break("weak-reference", why, "make it outside the compiled function")
    return m.native(weakref.ref, *args)


CALLERS: dict[type, Callable[..., Any]] = {
    types.FunctionType: call_function,
    types.MethodType: call_method,
    types.BuiltinFunctionType: call_builtin,
    BUILTIN_METHOD: call_builtin,
    types.MethodDescriptorType: call_descriptor,
    types.WrapperDescriptorType: call_descriptor,
    types.ClassMethodDescriptorType: call_descriptor,
    types.MethodWrapperType: call_method_wrapper,
    functools.partial: call_partial,
    functools._lru_cache_wrapper: call_cached,
    weakref.ref: call_weak,
    weakref.KeyedRef: call_weak,
    weakref.CallableProxyType: lambda m, f, args, kwargs, mode: call(m, proxied(m, f), args, kwargs, mode),
    staticmethod: lambda m, f, args, kwargs, mode: call(m, m.world.constant(f.__func__), args, kwargs, mode),
    _hook.Region: call_region,
    Within: call_rest,
    torch._ops.OpOverload: call_leaf,
    torch._ops.OpOverloadPacket: call_leaf,
}
#: By what `purity` says of functions; others are inlined, or not known.
POLICIES: dict[str, Callable[..., Any]] = {
    "leaf": call_leaf,
    "native": lambda m, function, args, kwargs, mode: native(m, function, args, kwargs),
    "setting": call_setting,
    "effect": call_effect,
    "own": call_own,
    "break": call_world,
    "dropped": lambda m, function, args, kwargs, mode: None,
}
CALLER_BASES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (torch.nn.Module, call_module),
    (type, call_class),
    (functools.partial, call_partial),
)
