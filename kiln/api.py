"""The public functions of Kiln, and nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from kiln import _hook, _launch, backends, modules, pipeline, redirect
from kiln.base import dump, live, log, marks, strict
from kiln.base import records as recorded
from kiln.base.later import later
from kiln.base.options import Backend, Compile, unknown
from kiln.base.options import config as config
from kiln.shared import Alike, Kept, outline

if TYPE_CHECKING:
    from kiln.observe.explain import Captured, Explanation
    from kiln.observe.minify import Minified

register_backend = backends.register_backend
list_backends = backends.list_backends
lookup_backend = backends.lookup_backend

explanation = later("kiln.observe.explain:Explanation")
captured = later("kiln.observe.explain:Captured.of")
reduced = later("kiln.observe.minify:minify")

ARGUMENTS = ("model", "fullgraph", "dynamic", "backend", "mode", "options", "disable")


def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Backend = backends.DEFAULT,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
    **unknown_arguments: Any,
) -> Any:
    """Give a callable that captures what `model` does as graphs and runs them through the backend.

    `model` is a function, method, lambda, module, class or any callable; without it, the result is a
    decorator. The results are those of `model`. `fullgraph=True` raises where the graph would break, also
    where the function is called inside another compiled function.
    `dynamic=None` takes sizes and numbers as fixed until a call shows that they vary, True takes all sizes
    and ints of the arguments as varying at once, False takes none so (docs/dynamic.md).
    """
    for name in unknown_arguments:
        raise unknown("argument of compile", name, ARGUMENTS)
    if mode is not None and options:
        raise ValueError("compile takes a mode or options, not both: mode is a name for a set of options")
    given = dict(options or {})
    bound = backends.resolve(backend, mode, given)
    if disable:
        return (lambda function: function) if model is None else model
    asked = Compile(bound, bool(fullgraph), dynamic, mode, MappingProxyType(given))
    again = functools.partial(
        compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options
    )
    return again if model is None else _compiled(model, asked, again)


def _compiled(model: Any, asked: Compile, again: Callable[[Any], Any]) -> Any:
    """The compiled form of any kind of callable: of the same kind, around one region."""
    apart = type(model) is _Apart
    model = modules.original(model.module if apart else model)
    if isinstance(model, _hook.Region):
        model = model.function
    if marks.SKIP in marks.of(model):
        model = model.__wrapped__
    match model:
        case torch.jit.ScriptModule():
            return model
        case torch.nn.Module():
            function = modules.call_function(model)
            named = replace(asked, name=type(model).__qualname__)
            called = _region(function, named, None if apart else model)
            return modules.twin(model, MethodType(called, model), again)
        case FunctionType() if model.__globals__.get("__name__", "").startswith("torch._functorch."):
            # What a transform makes is captured where it is called.
            outer: Any = functools.wraps(model)(lambda *args, **kwargs: model(*args, **kwargs))
            return _shared(outer, asked)
        case FunctionType():
            return _shared(model, asked)
        case MethodType(__func__=FunctionType() as method) if not isinstance(model.__self__, torch.nn.Module):
            return MethodType(_shared(method, asked, asked.setting("cache_limit") // 2), model.__self__)
        case MethodType():
            return MethodType(_region(model.__func__, asked, model.__self__), model.__self__)
        case staticmethod() | classmethod():
            return type(model)(_region(model.__func__, asked))
        case functools.partial():
            return functools.partial(_compiled(model.func, asked, again), *model.args, **model.keywords)
        case type():
            setattr(model, "__call__", _region(model.__call__, asked))  # noqa: B010
            return model
    if not callable(model):
        raise TypeError(f"compile takes a callable or a module, got {model!r}")
    call = inspect.getattr_static(type(model), "__call__", None)
    if isinstance(call, (FunctionType, _hook.Region)):
        return MethodType(_region(call, asked), model)
    return _region(_python_function(model), asked)


def _shared(function: FunctionType, asked: Compile, most: int | None = None) -> Any:
    """The region of a function: one for all compile calls that ask for the same, or with `most` entries."""
    if marks.of(function):
        return pipeline.region(function, asked)
    named = function.__globals__.get(function.__qualname__) is function
    by_code = not named and function.__closure__ is None and REGIONS not in function.__dict__
    settings = tuple(sorted(asked.options.items(), key=lambda item: item[0]))
    what = id(function.__globals__ if by_code else function)  # decorators copy the dict of a function
    key = (what, id(asked.backend), asked.fullgraph, asked.dynamic, asked.mode, settings, config.now)
    try:
        hash(key)
    except TypeError:
        return pipeline.region(function, asked)
    # Kept by the function, so that both go together, or by its code if the function holds nothing else. One
    # that is no name of its module must go when nobody uses it: what is kept does not lead to it.
    if by_code:
        regions: dict[Any, Any] = UNNAMED.setdefault(function.__code__, {})
    else:
        regions = function.__dict__.setdefault(REGIONS, {})
    known = regions.get(key)
    if known is None:
        if by_code and len(regions) >= MOST:
            regions.pop(next(iter(regions)), None)
        if named:
            made: Any = pipeline.region(function, asked)
        else:
            alike = None if by_code else _one_of(function, asked, key[1:])
            made = Kept(_alike(function), asked, most, alike)
        known = regions.setdefault(key, made)
    return known if named else pipeline.region(function, asked, known)


def _one_of(function: FunctionType, asked: Compile, how: tuple[Any, ...]) -> Alike | None:
    """What a function shares with others that are made again and again and close over other objects."""
    kinds = outline(function)
    if kinds is None or not function.__closure__:
        return None
    key = ("alike", id(function.__globals__), kinds, *how)
    groups = UNNAMED.setdefault(function.__code__, {})
    if key not in groups:
        if len(groups) >= MOST:
            groups.pop(next(iter(groups)), None)
        groups.setdefault(key, Alike(function.__code__, asked))
    found: Alike = groups[key]
    found.count += 1
    return found


REGIONS = "__kiln_regions__"
#: What is kept for functions that are made again and again, by their code, and for how many compile calls.
UNNAMED: WeakKeyDictionary[CodeType, dict[Any, Any]] = WeakKeyDictionary()
MOST = 8


def _region(function: Any, asked: Compile, owner: Any = None) -> Any:
    """A region around the plain function behind any callable, which may be a method of a module."""
    if isinstance(function, _hook.Region):
        function = function.function
    if not isinstance(function, FunctionType):
        function = _python_function(function)
    if isinstance(owner, torch.nn.Module):
        return pipeline.module_region(function, modules.original(owner), asked)
    return pipeline.region(function, asked)


def _python_function(native: Callable[..., Any]) -> FunctionType:
    """A Python function that calls one without bytecode of its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    for name in ("__name__", "__qualname__", "__doc__"):
        value = getattr(native, name, None)
        if isinstance(value, str):
            setattr(call, name, value)
    return call  # type: ignore[return-value]


def reset() -> None:
    """Forget everything that was captured: every compiled callable captures anew at its next call.

    Memory that compiled graphs keep between calls goes back to the system.
    """
    live.clear()
    pipeline.forget()
    _launch.trim()
    recorded.forget()
    log.forget()
    dump.forget()


def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Keep a callable out of capture: its calls break the graph and run in Python.

    With `recursive`, so does everything that it calls; without, what it calls may be captured on its own.
    """
    if fn is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    fn = modules.original(fn)
    again = functools.partial(disable, recursive=recursive, reason=reason)
    if isinstance(fn, torch.nn.Module):
        call = MethodType(again(modules.call_function(fn)), fn)
        return modules.twin(fn, call, again)
    if isinstance(fn, type):
        for name in ("__init__", "__call__"):
            if isinstance(inspect.getattr_static(fn, name, None), FunctionType):
                setattr(fn, name, again(getattr(fn, name)))
        return fn
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(again(fn.__func__))
    if isinstance(fn, MethodType):
        return MethodType(again(fn.__func__), fn.__self__)
    if not callable(fn):
        raise TypeError(f"disable takes a callable or a module, got {fn!r}")
    target = fn.function if isinstance(fn, _hook.Region) else fn

    def disabled(*args: Any, **kwargs: Any) -> Any:
        _hook.pause()
        try:
            return target(*args, **kwargs)
        finally:
            _hook.resume()

    apart = _apart(target)

    def skipped(*args: Any, **kwargs: Any) -> Any:
        return apart(*args, **kwargs)

    wrapper = functools.update_wrapper(disabled if recursive else skipped, target)
    marks.add(wrapper, marks.DISABLE if recursive else marks.SKIP)
    return wrapper


def _apart(function: Any) -> Any:
    """The function under a code object of its own that the frame hook leaves alone."""
    if not isinstance(function, FunctionType):
        return function
    copy = _copied(function)
    copy.__code__ = function.__code__.replace()
    _hook.skip(copy.__code__)
    marks.add(copy, marks.SKIP)
    return copy


def _copied(function: Any) -> FunctionType:
    """A function of its own with the code, the defaults and the cells of another."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _alike(function: Any) -> FunctionType:
    """A function of its own that is like another to whoever asks."""
    copy = _copied(function)
    for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update({k: v for k, v in function.__dict__.items() if k != REGIONS})
    return copy


def _mark(fn: Any, mark: str, against: str = "") -> Any:
    """Mark one callable, or each of a list, and give it back."""
    for one in fn if isinstance(fn, (list, tuple)) else (fn,):
        if not callable(one):
            raise TypeError(f"a callable or a list of callables is needed, got {one!r}")
        marks.add(one, mark)
        marks.remove(one, against)
    return fn


def allow_in_graph(fn: Any) -> Any:
    """Put calls of `fn` into the graph as one node without looking inside."""
    return _mark(fn, marks.ALLOW, against=marks.DISALLOW)


def disallow_in_graph(fn: Any) -> Any:
    """Break the graph at calls of `fn` and run them in Python."""
    return _mark(fn, marks.DISALLOW, against=marks.ALLOW)


def assume_constant_result(fn: Any) -> Any:
    """Take the result of the first call of `fn` in a capture as a constant; the caller vouches for it."""
    return _mark(fn, marks.CONSTANT)


def graph_break(msg: str = "") -> None:
    """End the graph here when captured, for the reason `msg`; does nothing in Python."""


marks.add(graph_break, marks.BREAK)


def skip_frame(msg: str = "") -> None:
    """Leave the frame that calls this to Python when captured; what it calls may be captured on its own."""


def step_unsupported(msg: str = "") -> None:
    """End the graph here when captured, and run the rest of the frame in Python."""


marks.add(skip_frame, marks.SKIP_FRAME)
marks.add(step_unsupported, marks.STOP)
error_on_graph_break = strict.error_on_graph_break


# One function under both names, so that code that asks either gets the same answer.
is_compiling = torch.compiler.is_compiling


def mark_dynamic(
    t: torch.Tensor, index: int | Iterable[int], *, min: int | None = None, max: int | None = None
) -> None:
    """Say that these dimensions of the tensor vary, between `min` and `max` where given.

    Their sizes are symbolic from the first call, 0 and 1 included. A program that holds such a dimension to
    one size is refused with the line that does. `dynamic=False` overrules the mark.
    """
    low, high = 0 if min is None else min, max
    for i in (index,) if isinstance(index, int) else (index := tuple(index)):
        if -t.dim() <= i < t.dim() and (t.shape[i] < low or high is not None and t.shape[i] > high):
            raise ValueError(f"dimension {i} has size {t.shape[i]}, which is not between {low} and {high}")
    _mark_dims(t, index, ("dynamic", min, max))


def mark_static(t: torch.Tensor, index: int | Iterable[int] | None = None) -> None:
    """Say that these dimensions of the tensor, or all, do not vary: each size gets a graph of its own."""
    _mark_dims(t, range(t.dim()) if index is None else index, ("static", None, None))


def _mark_dims(t: torch.Tensor, index: int | Iterable[int], what: tuple[str, int | None, int | None]) -> None:
    dims = dict(getattr(t, "_kiln_dims", ()))
    for i in (index,) if isinstance(index, int) else index:
        if not -t.dim() <= i < t.dim():
            raise IndexError(f"dimension {i} of a tensor with {t.dim()} dimensions")
        dims[i % t.dim()] = what
    t._kiln_dims = dims  # type: ignore[attr-defined]


class set_stance:  # noqa: N801
    """Put a stance in force: at once as a function, for a block in a with statement, or as a decorator.

    "default" captures; "force_eager" runs everything in Python; "eager_on_recompile" and "fail_on_recompile"
    use what is captured, and where nothing fits run in Python, or raise; "eager_then_compile" and
    "aot_eager_then_compile" run the first call of each function without the backend and take from it which
    sizes vary.
    """

    def __init__(self, stance: str = "default") -> None:
        self._stance = stance
        self._before = live.set_stance(stance)

    def __enter__(self) -> set_stance:
        return self

    def __exit__(self, *error: object) -> None:
        live.set_stance(self._before)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        live.set_stance(self._before)

        @functools.wraps(fn)
        def with_stance(*args: Any, **kwargs: Any) -> Any:
            with set_stance(self._stance):
                return fn(*args, **kwargs)

        return with_stance


class _Apart:
    """A module that shares nothing with others that are built alike."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def _anew(f: Any) -> Any:
    """What shares nothing that was compiled for `f` or what is like it; other callables do not anyway."""
    if isinstance(f, torch.nn.Module):
        return _Apart(f)
    if not isinstance(f, (FunctionType, _hook.Region)) or marks.of(f):
        return f
    copy: Any = _alike(f.function if isinstance(f, _hook.Region) else f)
    copy.__dict__[REGIONS] = {}
    return copy


def explain(f: Any, **arguments: Any) -> Callable[..., Explanation]:
    """Give a callable that runs `f` freshly compiled and tells what was captured, what broke, and why."""
    compiled = compile(_anew(f), **arguments)

    @functools.wraps(getattr(f, "__wrapped__", f), updated=())
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with recorded.collect() as collected:
            result = compiled(*args, **kwargs)
        found: Explanation = explanation(collected, result)
        return found

    return explained


def records() -> recorded.Records:
    """The records that compiling left so far: the latest of each kind, without what is costly to make.

    In a with statement, `with kiln.records() as seen:`, it collects in full what happens meanwhile, in all
    threads.
    """
    return recorded.log.copy()


def capture(f: Any, *args: Any, **kwargs: Any) -> Captured:
    """Run `f` once and give its full graph with the guards under which it stands for `f`; breaks raise."""
    seen: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(list(inputs))
        return backends.eager(graph, inputs)

    with recorded.collect() as collected:
        result = compile(f, fullgraph=True, backend=keep)(*args, **kwargs)
    found: Captured = captured(collected, seen, result)
    return found


def minify(f: Any, *args: Any, path: Any = None, **arguments: Any) -> Minified:
    """Reduce a program on which Kiln fails, or gives other values than eager, to a small script for a report.

    `arguments` are those of `compile`. Runs the program in copies of this process, looks for the graph that
    fails, drops ops, outputs and sizes as long as it fails in the same way, and writes a script to `path`
    ("kiln_report.py") that ends with an error while the fault is there. Where capture itself fails the script
    holds the function's source. A program that does not fail is a KilnError.
    """
    found: Minified = reduced(f, args, arguments, path, compile)
    return found


def install() -> redirect.Redirection:
    """Answer `torch.compile` and its companions with Kiln until `uninstall`, or for a with block."""
    return redirect.redirect(
        {
            (torch, "compile"): redirect.torch_compile(compile),
            (torch.compiler, "reset"): reset,
            (torch.compiler, "disable"): disable,
            (torch.compiler, "allow_in_graph"): allow_in_graph,
            (torch.compiler, "assume_constant_result"): assume_constant_result,
            (torch.compiler, "list_backends"): list_backends,
            (torch.compiler, "set_stance"): set_stance,
        }
    )


uninstall = redirect.undo


class _CallablePackage(ModuleType):
    """`kiln.capture` is a folder of this package and a public function: the folder's module answers calls."""

    def __call__(self, f: Any, *args: Any, **kwargs: Any) -> Captured:
        return capture(f, *args, **kwargs)


sys.modules["kiln.capture"].__class__ = _CallablePackage
