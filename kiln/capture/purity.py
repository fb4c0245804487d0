"""Tables of what may run at capture: native code without side effects, torch functions that are nodes."""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import math
import numbers
import operator
import os
import re
import string
import types
from typing import Any

import torch

#: Python modules of torch whose functions are single nodes of a graph.
LEAF_MODULES = frozenset({
    "torch.functional", "torch.nn.functional", "torch._tensor", "torch._VF", "torch._jit_internal",
    "torch._linalg_utils", "torch._lobpcg", "torch.nn._reduction", "torch._ops", "torch.nested",
    "torch._lowrank",
})  # fmt: skip
#: Python functions inside those modules that are ordinary code; the loss raises where a variance is negative.
NOT_LEAF = frozenset(
    {"is_scripting", "is_tracing", "_overload_method", "handle_torch_function", "gaussian_nll_loss"}
)
#: Modules of the standard library and of torch whose Python functions run as they are.
NATIVE_MODULES = frozenset({
    "re", "re._compiler", "re._parser", "typing", "typing_extensions", "inspect", "enum", "string",
    "textwrap", "fractions", "decimal", "numbers", "statistics", "heapq", "_py_abc", "abc", "ast",
    "posixpath", "genericpath", "fnmatch", "torch._prims_common", "importlib.metadata", "importlib.util",
    "packaging.version", "torch._utils", "torch.torch_version", "json", "json.decoder", "json.encoder",
    "difflib", "colorsys", "types", "torch.overrides", "torch._sources",
})  # fmt: skip
#: Functions of os.path that ask for more than their arguments: what they ask is seen where they are inlined.
PATHS_ON_DISK = frozenset("""
    abspath exists expanduser expandvars getatime getctime getmtime getsize isdir isfile islink ismount
    lexists realpath relpath samefile sameopenfile
""".split())  # fmt: skip
#: Modules whose functions talk to the world.
BREAK_MODULES = frozenset({
    "torch.random", "torch.serialization", "torch.hub", "shutil", "tempfile", "torch._dynamo.eval_frame",
    "torch.distributed.distributed_c10d", "torch.cuda.random", "pdb", "bdb", "traceback", "torch.autograd",
    "torch._tensor_str", "weakref",
})  # fmt: skip
#: What asks only whether there are process groups.
ASKING = frozenset({"is_initialized", "WORLD", "default_pg"})
BREAK_PACKAGES = frozenset(
    "numpy random pickle subprocess socket threading asyncio multiprocessing queue concurrent".split()
)
#: The interpreter's own iterators, met by the program as ordinary objects.
OWN_MODULES = frozenset({"kiln.capture.iterators", "kiln.capture.builtin_calls"})
#: Torch's own compiler, once used, has every new module noted for itself: programs see nothing of it.
DROPPED_FUNCTIONS = frozenset({("torch._dynamo.mutation_guard", "tag")})

#: Function transforms: they switch torch's dispatch while they run their function.
TRANSFORMS = frozenset(f"torch._functorch.{name}" for name in ("apis", "eager_transforms", "vmap"))


@functools.cache
def python_policy_of(module: str, name: str) -> str:
    if module in LEAF_MODULES and name not in NOT_LEAF:
        return "leaf"
    if module in ("posixpath", "genericpath") and name in PATHS_ON_DISK:
        return "inline"
    if module in NATIVE_MODULES:
        return "native"
    root = module.partition(".")[0]
    if module in OWN_MODULES:
        return "own"
    if module == "kiln.base.strict":
        return "native" if name in ("now", "put") else "inline"
    if root == "kiln" and not module.startswith(("kiln.capture.", "kiln.ops.")):
        return "break"
    if root == "numpy" and not module.startswith(("numpy.random", "numpy.testing")):
        return "array"
    if module == "torch.distributed.distributed_c10d" and name in ASKING:
        return "inline"
    if module in BREAK_MODULES or root in BREAK_PACKAGES:
        return "break"
    if (module, name) in DROPPED_FUNCTIONS:
        return "dropped"
    return "inline"


def python_policy(function: types.FunctionType) -> str:
    """How a call of a Python function is captured: inline, leaf (one node), native (run now) or break."""
    module = function.__globals__.get("__name__") or ""
    whole = module == "torch._functorch.apis" and "<locals>" not in function.__code__.co_qualname
    if module in TRANSFORMS and not whole:
        return "break"
    policy = python_policy_of(module, function.__name__)
    # A wrapper that a library has put around a function of others' calls that.
    return "inline" if policy == "native" and function.__module__ != module else policy


def talks(init: types.FunctionType) -> bool:
    """Whether objects that are made so have to do with the world: files, threads, processes."""
    return python_policy(init) == "break" and init.__globals__.get("__name__") not in ("random", "weakref")


#: Those that have no handler of their own.
PURE_BUILTINS = frozenset("ascii bin chr hex oct ord".split())
PURE_MODULES = frozenset({
    "math", "_operator", "operator", "itertools", "_functools", "_collections", "cmath", "_bisect", "_heapq",
    "_struct", "unicodedata", "_string", "_abc", "_stat", "_sre", "_typing", "_json",
})  # fmt: skip
#: Walks over nests of arguments of fx nodes, which call what they are given.
MAPS = frozenset(filter(None, (getattr(torch._C, f"_fx_map_{name}", None) for name in ("aggregate", "arg"))))
PURE_NATIVES = frozenset({str.maketrans, bytes.maketrans, os.getpid, os.fspath, os.cpu_count,
                          operator.index}) | MAPS  # fmt: skip

TORCH_NODES: set[int] = set()
for _space in (torch, torch._C._VariableFunctions, torch._C._nn, torch._C._fft, torch._C._linalg,
               torch._C._special, torch._VF, torch.ops):  # fmt: skip
    for _name in dir(_space):
        _value, _state = getattr(_space, _name, None), ("_set_", "_is_", "_get_", "is_grad", "set_")
        if isinstance(_value, types.BuiltinFunctionType) and not _name.startswith(_state):
            TORCH_NODES.add(id(_value))

READS = ("_get_", "_is_", "_are_", "_has_")  # torch._C's naming of functions that only answer
STATE_READS = frozenset("""
    is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype
    get_autocast_cpu_dtype get_autocast_gpu_dtype is_autocast_cache_enabled get_default_dtype
    get_num_threads is_anomaly_enabled is_anomaly_check_nan_enabled _len_torch_function_stack
    _len_torch_dispatch_stack get_autocast_xla_dtype is_multithreading_enabled promote_types result_type
    can_cast is_floating_point is_complex is_signed is_same_size _cuda_isCurrentStreamCapturing
    _cuda_getDeviceCount _cuda_getDevice get_num_interop_threads is_vulkan_available _dispatch_keys
    _dispatch_tls_is_dispatch_key_excluded _profiler_enabled _profiler_type
""".split())  # fmt: skip
#: Those of what a program may change at any time, which the guard on torch's state as a whole leaves out.
SETTINGS = frozenset("""
    get_num_threads is_anomaly_enabled is_anomaly_check_nan_enabled _is_multithreading_enabled
    _is_view_replay_enabled _is_grad_layout_enforcement_enabled _profiler_enabled _profiler_type
    _get_flash_sdp_enabled _get_fa3_sdp_enabled _get_mem_efficient_sdp_enabled _get_math_sdp_enabled
    _get_overrideable_sdp_enabled _get_cudnn_sdp_enabled
""".split()) | {
    name for name in vars(torch._C) if name.startswith("_get_") and f"_set_{name[5:]}" in vars(torch._C)
} - {"_get_tracing_state", "_get_deterministic_algorithms", "_get_torch_function_state"}  # fmt: skip
#: How the names of writes begin that change no setting of these.
MODE_WRITES = ("_set_grad_enabled", "set_autocast", "autocast_", "clear_autocast", "_set_default_dtype")
STATE_WRITES = frozenset("""
    _set_grad_enabled set_autocast_enabled set_autocast_cpu_enabled set_autocast_dtype
    set_autocast_cpu_dtype set_autocast_gpu_dtype autocast_increment_nesting autocast_decrement_nesting
    set_autocast_cache_enabled clear_autocast_cache _set_default_dtype _set_deterministic_algorithms
    _set_cudnn_enabled _set_cudnn_benchmark _set_cudnn_deterministic _set_cudnn_allow_tf32
    _set_cudnn_depthwise_kernel _set_mkldnn_enabled _set_mkldnn_deterministic _set_onednn_allow_tf32
    set_flush_denormal _set_multithreading_enabled set_anomaly_enabled _set_float32_matmul_precision
    _set_cublas_allow_tf32 _set_deterministic_fill_uninitialized_memory
""".split())  # fmt: skip


def builtin_policy(function: Any) -> str:
    """How a call of a builtin function is captured: leaf, effect, native, setting, or unknown."""
    name, owner = function.__name__, function.__self__
    module = function.__module__ or ""
    if (
        module.startswith("torch")
        or isinstance(owner, type) and owner.__name__ == "_VariableFunctionsClass"
        or isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch")
    ):  # fmt: skip
        if name in STATE_WRITES or name.startswith("_set_sdp"):
            return "effect"
        if name in STATE_READS or name.startswith(READS):
            return "setting" if name in SETTINGS else "native"
    if id(function) in TORCH_NODES:
        return "leaf"
    if function in PURE_NATIVES:
        return "native"
    if owner is builtins:
        return "native" if name in PURE_BUILTINS else "unknown"
    pure = isinstance(owner, types.ModuleType) and owner.__name__ in PURE_MODULES
    return "native" if pure or module in PURE_MODULES else "unknown"


NATIVE_CLASSES = frozenset({
    bool, bytearray, bytes, complex, dict, enumerate, filter, float, frozenset, int, list, map, object,
    property, range, reversed, set, slice, staticmethod, classmethod, str, tuple, type, zip,
    collections.deque, collections.OrderedDict, collections.defaultdict, functools.partial, torch.Size,
    torch.device, torch.dtype, torch.finfo, torch.iinfo, torch.layout, types.SimpleNamespace,
    types.MappingProxyType, types.MethodType, types.CellType, decimal.Decimal, fractions.Fraction,
    datetime.timedelta, datetime.datetime, datetime.date, re.Pattern, memoryview, types.GenericAlias,
    operator.attrgetter, operator.itemgetter, operator.methodcaller, string.Template, numbers.Number, super,
    types.FunctionType,
})  # fmt: skip
#: Views of dicts: an outside one shows what stands for its dict.
DICT_VIEWS = (type({}.keys()), type({}.values()), type({}.items()),
              *(type(getattr(collections.OrderedDict(), name)())
                for name in ("keys", "values", "items")))  # fmt: skip
#: Objects that hold nothing but a value: their native methods are always safe.
VALUES = (
    str, bytes, int, float, complex, type(None), tuple, frozenset, range, slice, re.Pattern, re.Match,
    torch.dtype, torch.device, type, types.MappingProxyType, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.timedelta, enum.Enum, operator.attrgetter, operator.itemgetter,
    operator.methodcaller, types.GenericAlias, types.UnionType, types.FunctionType, types.CodeType,
    torch.finfo, torch.iinfo, *DICT_VIEWS,
)  # fmt: skip
CALL_BACK = frozenset({map, filter, sorted, min, max, functools.reduce, *MAPS,
                       *(v for v in vars(itertools).values() if isinstance(v, type))})  # fmt: skip
#: Native methods and functions that call back, by name.
CALL_BACK_NAMES = frozenset("sort reduce sub subn accumulate".split())


def native_class(cls: type) -> bool:
    """Whether instances are made natively, without side effects."""
    library = cls.__module__ in ("itertools", "typing", "torch.return_types")
    return library or cls in NATIVE_CLASSES or isinstance(cls, enum.EnumMeta)


def leaf_class(cls: type) -> bool:
    """Whether making an instance is a torch call."""
    return cls in (torch.Tensor, torch.autograd.Variable) or type(cls) is type(torch.FloatTensor)


def native_base(cls: type) -> bool:
    """Whether the native part of a user's class is one that may run at capture time."""
    natives = [base for base in cls.__mro__ if not base.__flags__ & 1 << 9]
    return all(base in NATIVE_BASES or issubclass(base, BaseException) for base in natives)


NATIVE_BASES = NATIVE_CLASSES | {object, int, float, str, math.__class__, torch._C._FunctionBase}


DUNDERS = tuple(f"__{name}__" for name in """
    eq ne lt le gt ge hash bool len iter next getitem setitem delitem contains call index int float complex
    str repr format bytes neg pos invert abs round enter exit missing reversed length_hint
""".split())  # fmt: skip
DUNDERS += tuple(f"__{way}{name}__" for way in ("", "r", "i") for name in """
    add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift
""".split())  # fmt: skip


@functools.lru_cache(maxsize=4096)
def has_dunders(cls: Any) -> bool:
    """Whether native code that meets an instance may run Python code of its class."""
    known = cls.__module__.partition(".")[0] in ("torch", "kiln", "collections", "enum")
    if known or not cls.__flags__ & 1 << 9:
        return False
    found = (vars(base).get(name) for base in cls.__mro__ for name in DUNDERS)
    return any(not isinstance(method, NATIVE_METHODS) for method in found)


NATIVE_METHODS = (types.NoneType, types.WrapperDescriptorType, types.MethodDescriptorType,
                  types.ClassMethodDescriptorType, types.BuiltinFunctionType)  # fmt: skip


SHALLOW = frozenset("""
    append insert extend setdefault update add pop popitem get popleft appendleft __setitem__ __getitem__
    items keys values copy clear list tuple dict zip enumerate len isinstance issubclass iter next map
    filter reversed OrderedDict deque defaultdict partial callable type id set frozenset extendleft rotate
    move_to_end __len__ __iter__ __init__ __new__ reverse discard fromkeys
""".split())  # fmt: skip


def reads_deeply(function: Any) -> bool:
    """Whether native code may read what the containers among its arguments hold, below the first level."""
    function = function.func if isinstance(function, functools.partial) else function
    name, module = (getattr(function, key, "") for key in ("__name__", "__module__"))
    return name not in SHALLOW and module != "itertools"


def calls_back(function: Any) -> bool:
    """Whether native code may call the Python functions it is given."""
    known = type(function).__hash__ is not None and function in CALL_BACK
    return known or getattr(function, "__name__", "") in CALL_BACK_NAMES
