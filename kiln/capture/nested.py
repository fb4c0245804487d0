"""Frames between those of graphs: the program's are captured through the hook, Kiln's own are hidden."""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from kiln import _hook
from kiln.base import marks, state
from kiln.capture import purity
from kiln.capture.frame import UserError

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
FOREIGN = (HERE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
           os.path.dirname(os.__file__) + os.sep, "<")  # fmt: skip
# What compiles kernels does so while the program runs, too, by means (LLVM, Triton) that are Python code.
STAGES = tuple([os.path.join(HERE, stage) + os.sep for stage in ("expand", "fuse", "generate", "launch")])
PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)
current = threading.local()  # .machine: the capture that runs native code


def install(region_of: Callable[[types.FunctionType, Any], Any]) -> None:
    """Say how the frame hook finds the region of a function."""

    def found(function: types.FunctionType, argv: tuple[Any, ...]) -> Any:
        code = function.__code__
        if code.co_name == "__del__" or code.co_filename.startswith(STAGES):
            # Objects die when the collector finds them, anybody's: what they do then is not the program.
            _hook.leave_alone(code)
            return None
        machine = getattr(current, "machine", None)
        if machine is not None:
            return interpreted(machine, function)
        family = _hook.family()
        if family is None or not ours(function):
            return None
        if packaged(code) and tensorless(code, function.__globals__, argv):
            DECLINED[code] = DECLINED.get(code, 0) + 1
            return None if DECLINED[code] > PATIENCE else False  # to be asked again, or never
        return region_of(function, family)

    _hook.set_frame_callback(found)


def ours(function: types.FunctionType) -> bool:
    """Whether a frame of it is worth capturing: the user's code, not torch's nor the standard library's."""
    code = function.__code__
    if code.co_name.startswith("<") and code.co_name != "<lambda>" or marks.of(function):
        return False
    if str(function.__globals__.get("__name__")).partition(".")[0] == "numpy":
        return False
    return packaged(code) or not code.co_filename.startswith(FOREIGN)


def packaged(code: types.CodeType) -> bool:
    """Whether it is code of an installed library, neither torch's nor Kiln's."""
    name = code.co_filename
    return any(part in name for part in PACKAGES) and not name.startswith(FOREIGN[:2])


def tensorless(code: types.CodeType, there: dict[str, Any], values: Iterable[Any]) -> bool:
    """Whether code has nothing to do with tensors: none is among the values, nor named what makes them.

    Such code of libraries (locks, progress bars, parsers) breaks at every turn, and has nothing to capture.
    """
    return not any(map(of_torch, map(there.get, code.co_names))) and not holds_tensors(values)


def of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in ("torch", "numpy")


def holds_tensors(values: Iterable[Any]) -> bool:
    """Whether tensors, arrays or modules are among the values, or in what a few of them hold, and these."""
    return any(issubclass(kind := type(value), COMPUTING) or kind.__module__ == "numpy"
               for value in held_within(values))  # fmt: skip


def watched(value: Any) -> bool:
    """Whether a weak reference or a finaliser would notice that a value is gone, or what it holds."""
    return any(hasattr(type(part), "__del__") or weakref.getweakrefcount(part) > 0
               for part in held_within((value,)) if not issubclass(type(part), SHARED))  # fmt: skip


def held_within(values: Iterable[Any]) -> Iterator[Any]:
    """Values, a few of the parts that they hold, and a few of the parts of these."""
    left = list(values)
    for _ in range(STEPS):
        yield from left
        left = list(islice((part for value in left for part in islice(held_by(value), PARTS)), 8 * PARTS))


def held_by(value: Any) -> Iterable[Any]:
    """What an object holds, as far as tensors may be there."""
    if type(value) in weakref.ProxyTypes:  # what it stands for may be gone
        return ()
    match value:
        case list():
            return list.__iter__(value)
        case tuple():
            return tuple.__iter__(value)
        case dict():
            return dict.values(value)
        case types.MethodType():
            return (value.__self__, value.__func__)
        case types.FunctionType():
            cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
            return [cell.cell_contents for cell in cells] + list(value.__defaults__ or ())
        case type() | types.ModuleType():
            return ()
        case _:
            return list(getattr(value, "__dict__", {}).values())


COMPUTING = (torch.Tensor, torch.nn.Module)
#: What lives on without a variable, and is known weakly for its own sake.
SHARED = (type, types.ModuleType, types.CodeType, torch.nn.Module)
#: How far tensors are looked for: so many steps, and so many parts of each value.
STEPS, PARTS = 4, 24
#: How often code that had no tensors is asked about again.
PATIENCE = 32
DECLINED: weakref.WeakKeyDictionary[types.CodeType, int] = weakref.WeakKeyDictionary()


def interpreting(machine: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Native code run by a capture: the Python frames that it starts are interpreted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = getattr(current, "machine", None)
        current.machine = machine
        with hook(on=True):
            try:
                return function(*args, **kwargs)
            finally:
                current.machine = before

    _hook.skip(run.__code__)
    return run


def interpreted(machine: Any, function: types.FunctionType) -> Any:
    own = function.__code__.co_filename.startswith(HERE)
    if own or purity.python_policy(function) in ("native", "array"):
        return None

    def inline(region: Any, argv: tuple[Any, ...]) -> Any:
        now: Any = getattr(current, "machine", None)
        if now is not machine:
            return _hook.original(function, argv)  # code knows the region that ran last, whoever's
        with hook(on=False):
            args, kwargs = unbound(function, argv)
            try:
                return machine.call(function, args, kwargs)
            except UserError as e:
                if not isinstance(e.error, Exception):
                    raise
                error = e.error
        raise error  # native code may wait for it

    region = _hook.Region(function, inline)
    machine.world.keep.append(region)
    return region


class hook:  # noqa: N801
    """The frame hook, on or off for a while, whatever it was before."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.pauses = _hook.depth()[1]
        if self.on:
            for _ in range(self.pauses):
                _hook.resume()
            _hook.enter()
        else:
            _hook.pause()

    def __exit__(self, *error: object) -> None:
        if self.on:
            _hook.leave()
            for _ in range(self.pauses):
                _hook.pause()
        else:
            _hook.resume()


def again(function: types.FunctionType, before: tuple[Any, ...]) -> Callable[..., Any]:
    """The function itself on bound arguments, with torch's switches as they were when it was called."""

    def run(*argv: Any) -> Any:
        state.restore(before)
        return _hook.original(function, argv)

    _hook.skip(run.__code__)
    return run


def unchanged(function: types.FunctionType, family: Any) -> Callable[..., Any]:
    """A function that could not be captured, as it is, on bound arguments; its calls still may be."""
    return _hook.in_python(lambda *argv: _hook.original(function, argv), family)


def eager(function: types.FunctionType) -> Callable[..., Any]:
    """The function itself on bound arguments, in Python with all that it calls."""

    def run(*argv: Any) -> Any:
        with hook(on=False):
            return _hook.original(function, argv)

    return run


def unbound(function: types.FunctionType, argv: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that bind to these argument slots."""
    code = function.__code__
    at, kwonly = code.co_argcount, code.co_kwonlyargcount
    named = dict(zip(code.co_varnames[at : at + kwonly], argv[at : at + kwonly], strict=True))
    rest = list(argv[at + kwonly :])
    extra = rest.pop(0) if code.co_flags & 4 else ()
    return (*argv[:at], *extra), {**named, **(rest.pop(0) if code.co_flags & 8 else {})}


def hide(*modules: types.ModuleType) -> None:
    """Keep the functions of these modules out of tracebacks, but for the one that raises."""
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                _hide(value)


def _hide(value: object) -> None:
    match value:
        case types.FunctionType():
            _hide(value.__code__)
        case type():
            for member in vars(value).values():
                if not isinstance(member, type):
                    _hide(member)
        case staticmethod() | classmethod():
            _hide(value.__func__)
        case types.CodeType():
            _hook.hide(value, _hook.INNER)
            for const in value.co_consts:
                _hide(const)
