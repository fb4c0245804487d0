"""Small functions that residual code calls: they rebuild objects and write to the outside world."""

from __future__ import annotations

import contextlib
import gc
import linecache
import random
import threading
import types
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch

from kiln import _hook
from kiln.base import log
from kiln.base.errors import is_untouched
from kiln.base.places import places_of
from kiln.base.tracebacks import add_lines


def make_function(code: types.CodeType, space: dict[str, Any], told: Any, defaults: Any, closure: Any,
                  kwdefaults: Any, attributes: dict[str, Any]) -> types.FunctionType:  # fmt: skip
    function = types.FunctionType(code, space, told[0], defaults, closure)
    function.__kwdefaults__ = kwdefaults
    function.__dict__.update(attributes)
    function.__qualname__, function.__module__, function.__doc__ = told[1:]
    return function


ERROR_MEMBERS = ("name", "obj", "path", "name_from", "msg")


def error_state(error: BaseException) -> dict[str, Any]:
    """What an exception holds beside its arguments and its chain."""
    native = {name: value for name in ERROR_MEMBERS if (value := native_member(error, name)) is not None}
    return {**native, **error.__dict__}


def native_member(error: BaseException, name: str) -> Any:
    for base in type(error).__mro__:
        if isinstance(base.__dict__.get(name), types.MemberDescriptorType):
            return getattr(error, name, None)
    return None


def make_error(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception made by the native part of its class alone."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & 1 << 9)
    error: BaseException = base.__new__(cls, *args)
    base.__init__(error, *args)
    error.args = args
    for name, value in attributes.items():
        object.__setattr__(error, name, value)
    return error


def chain_error(error: BaseException, cause: BaseException | None, context: BaseException | None,
                suppress: bool, trace: types.TracebackType | None) -> None:  # fmt: skip
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppress
    error.__traceback__ = trace


def make_object(cls: type) -> Any:
    """An instance without its `__init__`; the native base class decides which `__new__` serves."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & 1 << 9)
    return base.__new__(cls)


UNSET: Any = object()


def read_member(member: Any, value: Any) -> Any:
    """The value of a slot, UNSET when it has none."""
    try:
        return member.__get__(value)
    except AttributeError:
        return UNSET


def make_random(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


def can_make(cls: type) -> bool:
    """Whether the class allows instances without its own `__new__`; native classes with a state do not."""
    try:
        make_object(cls)
    except TypeError:
        return False
    return True


def fill_object(value: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> None:
    if attributes:
        value.__dict__.update(attributes)
    for name, item in slots.items():
        object.__setattr__(value, name, item)


def mapping_type(value: Any) -> Any:
    """The native class whose methods keep a dict consistent."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def contents(value: Any) -> dict[Any, Any]:
    """The items of a dict in its own order, whatever its subclass says."""
    return {key: dict.__getitem__(value, key) for key in mapping_type(value).__iter__(value)}


def fill_dict(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    write = mapping_type(value).__setitem__
    for key, item in items.items():
        write(value, key, item)


def viewed(view: Any) -> Any:
    """The dict that a view of its keys, values or items shows."""
    return proxied(view.mapping)


def dict_view(mapping: Any, kind: str) -> Any:
    """The view of a dict whose type is called dict_keys, odict_items and the like."""
    return getattr(mapping_type(mapping), kind.partition("_")[2])(mapping)


def proxied(view: Any) -> Any:
    """The mapping that a mappingproxy shows."""
    return gc.get_referents(view)[0]


def set_state(iterator: Any, state: Any) -> Any:
    if type(iterator).__module__ != "itertools":
        iterator.__setstate__(state)
        return iterator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the protocol goes away for these
        iterator.__setstate__(state)
    return iterator


def write_dict(value: dict[Any, Any], changed: dict[Any, Any], deleted: tuple[Any, ...]) -> None:
    delete = mapping_type(value).__delitem__
    for key in deleted:
        delete(value, key)
    fill_dict(value, changed)


#: How containers of native classes are filled.
FILLS: tuple[tuple[Any, Any], ...] = (
    (OrderedDict, fill_dict), (dict, fill_dict), (list, list.extend), (set, set.update),
    (deque, deque.extend),
)  # fmt: skip


def rewrite(value: Any, items: Any) -> None:
    """Have a container hold these items and no others."""
    kind, fill = next(one for one in FILLS if isinstance(value, one[0]))
    kind.clear(value)
    fill(value, items)


def entered(kind: Any) -> Any:
    """A context of this class that is entered."""
    made = kind()
    made.__enter__()
    return made


def muted(record: bool, *filters: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
    """A block of warnings that is entered, with what was set in it; what it may `record` nobody reads."""
    block = warnings.catch_warnings(record=record)
    block.__enter__()
    for function, args, kwargs in filters:
        function(*args, **kwargs)
    return block


def write_attribute(owner: Any, name: str, value: Any) -> None:
    native_slot(type(owner), "__setattr__")(owner, name, value)


def delete_attribute(owner: Any, name: str) -> None:
    """Delete an attribute that may have been set and deleted during capture alone."""
    with contextlib.suppress(AttributeError):
        native_slot(type(owner), "__delattr__")(owner, name)


def native_slot(cls: type, name: str) -> Any:
    """The nearest implementation of a special method in native code, past the user's."""
    slots = (base.__dict__.get(name) for base in cls.__mro__)
    return next(slot for slot in slots if isinstance(slot, types.WrapperDescriptorType))


def delete_item(space: dict[str, Any], name: str) -> None:
    space.pop(name, None)


def generator_states(devices: tuple[torch.device, ...]) -> list[tuple[torch.device, Any]]:
    """The states of the random generators of devices."""
    if devices == (CPU,):
        return [(CPU, torch.default_generator.get_state())]
    here = [(d, torch.get_rng_state()) for d in devices if d.type == "cpu"]
    others = [d for d in devices if d.type not in ("cpu", "meta")]  # on which nothing is drawn
    return here + [(d, torch.get_device_module(d).get_rng_state(d)) for d in others]


CPU = torch.device("cpu")


def set_generators(states: list[tuple[torch.device, Any]]) -> None:
    """Put the generators of devices back into these states."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


class Foreseen:
    """What checks of branches say, of one graph; how often each has failed is counted."""

    def __init__(self, texts: set[str], failures: Counter[str]) -> None:
        self.texts, self.failures = frozenset(texts), failures
        self.forget: Any = bool  # takes the entry out that has this

    def failed(self, raised: str) -> bool:
        """Whether one of them was raised."""
        failing = {text for text in self.texts if " ".join(text.split()) in raised}
        self.failures.update(failing)
        if failing:
            self.forget(self)
        return bool(failing)


def wrote_nothing(checks: tuple[str, ...], error: BaseException) -> bool:
    """Whether a graph had not written anything yet when it raised: its checks of branches come first."""
    return is_untouched(error) or any(said in str(error) for said in checks)


def ran_in_python(name: str, foreseen: Foreseen, raised: str) -> None:
    """Tell, once, that a graph raised what the frame itself did not let out."""
    if foreseen.failed(raised):
        return
    log.warn_once(("replay", name, raised), f"{name} ran in Python since its graph raised {raised}")


def retell(places: dict[str, str], error: BaseException) -> None:
    """Put lines of the program in the place of those of a captured graph's own function in a traceback."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(GRAPHS):
        trace = trace.tb_next
    if trace is not None:
        line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        where = places.get(line.partition("=")[0].partition(":")[0].strip(), "")
        if where:
            error.__traceback__ = trace.tb_next
            add_lines(error, places_of(where))


GRAPHS = "<eval_with_key>"
"""What torch.fx calls the files of its functions."""


class Rest:
    """An inlined call that was left in its middle: on which way out, and the state to go on with."""

    __slots__ = ("values", "way")

    def __init__(self, way: int, *values: Any) -> None:
        self.way, self.values = way, values


class Within:
    """The rest of an inlined call; where it is captured it is inlined, too. `mode` is the call's own."""

    __slots__ = ("function", "mode")

    def __init__(self, function: types.FunctionType, mode: str) -> None:
        self.function, self.mode = function, mode

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def behind_call(depth: int, mode: str, done: Any, ways: dict[int, Any] | None, *args: Any) -> Any:
    """Go on with a frame whose inlined call broke, its result at `depth` of the arguments.

    Where the call was left in its middle, its state joins that of the frame: `ways` go on with both, or the
    frame's own caller. Where the call has come to its end, `done` goes on.
    """
    result, own = args[depth], (*args[:depth], *args[depth + 1 :])
    if type(result) is Rest:
        values = (*own, *result.values)
        return Rest(result.way, *values) if ways is None else _hook.later(ways[result.way], *values)
    if mode == "object":
        own, result = own[:-1], own[-1]
    here = () if mode == "drop" else (result,)
    return _hook.later(done, *own[:depth], *here, *own[depth:])


def advanced(function: Any, *args: Any) -> Any:
    """A generator of this function that has been brought to its first yield."""
    generator = function(*args)
    next(generator)
    return generator


def finished_generator() -> Any:
    """A generator that is at its end."""
    return advanced(lambda: (None for _ in "x"))


def watch_inputs(hook: Any, args: Any) -> Any:
    """The inputs of a module with backward hooks, tied to its hook object."""
    return hook.setup_input_hook(args)


def watch_outputs(hook: Any, result: Any) -> Any:
    return hook.setup_output_hook(result)


def watch_gradient(tensor: Any, hook: Any) -> Any:
    return tensor.register_hook(hook)


def keeping_data(tensor: Any) -> Any:
    """A tensor of its own over the data that this one has now."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def clear_gradients(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.grad = None


def remove_hook(handle: Any) -> None:
    handle.remove()


def pass_on(states: Iterable[torch.Generator], to: Iterable[torch.Generator]) -> None:
    """Give generators the states of others."""
    for one, other in zip(states, to, strict=True):
        other.set_state(one.get_state())


def lending(graph: Any, lent: list[torch.Generator]) -> Any:
    """A graph that draws from these generators in the place of those that come as its last arguments."""
    lock = threading.RLock()
    running = 0

    def run(*args: Any) -> Any:
        nonlocal running
        given, real = args[: -len(lent)], args[-len(lent) :]
        with lock:
            before = [own.get_state() for own in lent] if running else ()  # an op of the graph led here
            running += 1
            try:
                pass_on(real, lent)
                result = graph(*given)
                pass_on(lent, real)
            finally:
                running -= 1
                for own, state in zip(lent, before, strict=False):
                    own.set_state(state)
        return result

    return run


def seed_generator(generator: Any, seed: int) -> Any:
    return generator.manual_seed(seed)


def attribute_writes(shadow: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """How the attributes of a container are brought up to date."""
    before, now = shadow.space, getattr(shadow.copy, "__dict__", {})
    deleted = [(delete_attribute, (shadow.copy, name)) for name in before if name not in now]
    return deleted + [(write_attribute, (shadow.copy, name, item)) for name, item in now.items()
                      if name not in before or before[name] is not item]  # fmt: skip
