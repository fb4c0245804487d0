"""Modules: an object of a module's own class that shares its state and answers calls in another way."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch


class Shared:
    """Mixed into the class of a module's twin: all state is the original's, only `__call__` differs.

    The twin's `__dict__` is the original's, so parameters, buffers, hooks, `training` and any attribute set
    on one are seen on the other; `__class__` is the original's too, for code that replaces the class of a
    module (lazy modules, parametrizations).
    """

    _kiln_original: torch.nn.Module
    _kiln_again: Callable[[Any], Any]

    def __init_subclass__(cls, **_: Any) -> None:
        # The original's class may register its subclasses; a twin is not one of them.
        pass

    @property
    def __class__(self) -> type:
        return type(type(self)._kiln_original)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        type(self)._kiln_original.__class__ = cls

    @property
    def _orig_mod(self) -> torch.nn.Module:
        """The original, under the name by which libraries look for it."""
        return type(self)._kiln_original

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self)._kiln_original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            setattr(type(self)._kiln_original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(type(self)._kiln_original, name)

    def __dir__(self) -> list[str]:
        return dir(type(self)._kiln_original)

    def __repr__(self) -> str:
        return repr(type(self)._kiln_original)

    def __copy__(self) -> Any:
        return type(self)._kiln_again(copy.copy(type(self)._kiln_original))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self)._kiln_again(copy.deepcopy(type(self)._kiln_original, memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self)._kiln_again, (type(self)._kiln_original,)


def twin(module: torch.nn.Module, call: Callable[..., Any], again: Callable[[Any], Any]) -> Any:
    """A twin of the module that answers calls with `call(*args, **kwargs)`; `again` makes a twin of a copy.

    `again` is pickled with the twin, so it must be picklable wherever the module is to be.
    """
    base = type(module)
    body = {
        "_kiln_original": module,
        "_kiln_again": staticmethod(again),
        "__call__": staticmethod(call),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    made = types.new_class(base.__name__, (Shared, base), exec_body=lambda namespace: namespace.update(body))
    result: Any = object.__new__(made)
    object.__setattr__(result, "__dict__", module.__dict__)
    return result


def original(value: Any) -> Any:
    """The module behind a twin; any other value is its own original."""
    return type(value)._kiln_original if issubclass(type(value), Shared) else value


def call_function(module: torch.nn.Module) -> Callable[..., Any]:
    """The plain function behind `module(...)`, hooks included, to be called with the module first."""
    call: Any = type(module).__call__
    call = getattr(call, "function", call)  # a region over the plain one, where all modules are compiled
    if isinstance(module, torch.fx.GraphModule):
        # A GraphModule's own __call__ only adds a rewritten traceback around this one.
        call = torch.nn.Module.__call__
    return call  # type: ignore[no-any-return]


def alike(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules have parts of the same classes, tensors of the same facts and equal settings."""
    return bool(parts(module) == parts(other))


def parts(module: torch.nn.Module) -> Any:
    """The classes and settings of a module's parts and the facts of its tensors, which must have some."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) for _, tensor in tensors):
        return object()
    facts = [(name, type(t), t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]
    return [(name, type(part), settings(part)) for name, part in module.named_modules()], facts


def settings(part: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers and texts, or tuples of these."""
    plain = {type(None), bool, int, float, str}
    groups = {name: value if type(value) is tuple else (value,) for name, value in vars(part).items()}
    return {name: group for name, group in groups.items() if plain.issuperset(map(type, group))}


def watched(module: Any) -> bool:
    """Whether a hook sees gradients that pass through a module: such a one must be the same in every call."""
    return any(part._backward_hooks or part._backward_pre_hooks for part in original(module).modules())
