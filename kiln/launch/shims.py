"""Eager kernels that have a C entry in torch's library, and how their arguments are passed.

An argument is a word by what the schema says of its type; a list is two, its address and its length. The
kinds are those that `_call.c` knows: `h` a tensor, `o` a tensor or nothing, `l` tensors, `i` a number, `p`
the address of numbers, `P` the address of such an address, `n` a constant, `d` and `D` a real number
and the address of one, `b` bytes, `r` where a result goes. Until a plan is linked there are `t` and `T`
too, a text and the address of its address, and `f`, the address of the addresses of numbers.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import hinted
from kiln.base.graph import Node, TensorSpec, argument, tensors
from kiln.launch.native import dtype_code, function
from kiln.ops.levels import with_gradients
from kiln.ops.table import overload

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn

Word: TypeAlias = "tuple[str, Any]"
WORDS, HELD = 24, 64  # as in _call.c


@dataclass(frozen=True, slots=True)
class Shim:
    """The C entry of an op; one that `writes` takes the tensor for its result first."""

    name: str
    writes: bool = False


def _packed_layers() -> dict[Any, Shim]:
    """Layers with packed weights, where this build of torch has them."""
    if not torch.backends.mkldnn.is_available() or not hasattr(mkldnn, "_linear_pointwise"):
        return {}
    return {
        mkldnn._convolution_pointwise.default: Shim("aoti_torch_cpu_mkldnn__convolution_pointwise"),
        mkldnn._convolution_pointwise.binary: Shim("aoti_torch_cpu_mkldnn__convolution_pointwise_binary"),
        mkldnn._convolution_transpose_pointwise.default: Shim(
            "aoti_torch_cpu_mkldnn__convolution_transpose_pointwise"
        ),
        mkldnn._linear_pointwise.default: Shim("aoti_torch_cpu__linear_pointwise"),
        mkldnn._linear_pointwise.binary: Shim("aoti_torch_cpu__linear_pointwise_binary"),
    }


#: Kernels that fail by sizes and dtypes alone, which were seen when the graph was traced, not by values.
_ON_CPU: dict[Any, Shim] = {
    **{overload(name): Shim(f"aoti_torch_cpu_{name}_out", True) for name in "mm addmm bmm baddbmm".split()},
    **{overload(name): Shim(f"aoti_torch_cpu_{name}") for name in with_gradients(
        "convolution max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d "
        "_scaled_dot_product_flash_attention_for_cpu") | {"cat"}},
    **_packed_layers(),
}  # fmt: skip
#: What draws numbers from torch's default generator.
_DRAWS: dict[Any, Shim] = {
    overload(name): Shim(f"aoti_torch_cpu_{name.replace('.', '_')}")
    for name in "rand randn randint randint.low randperm rand_like randn_like".split()
}
_ON_CUDA: dict[Any, Shim] = {
    **{
        op: Shim(shim.name.replace("_cpu_", "_cuda_"), shim.writes)
        for op, shim in _ON_CPU.items()
        if op.namespace == "aten" and not op.name().endswith(("_for_cpu", "_for_cpu_backward"))
    },
    **{
        overload(name): Shim(f"aoti_torch_cuda_{name}")
        for kind in ("flash", "efficient", "cudnn")
        for name in with_gradients(f"_scaled_dot_product_{kind}_attention")
    },
    aten._addmm_activation.default: Shim("aoti_torch_cuda__addmm_activation"),
}
#: For each type of device the ops that have a C entry.
SHIMS: dict[str, dict[Any, Shim]] = {"cpu": _ON_CPU | _DRAWS, "cuda": _ON_CUDA}


def shim_of(node: Node) -> Shim | None:
    """The C entry for a node, where its op has one that takes such tensors."""
    specs = [n.spec for n in node.inputs()] or list(tensors([node.spec]))
    where = next((spec.device.type for spec in specs if isinstance(spec, TensorSpec)), "")
    found = SHIMS.get(where, {}).get(node.op)
    if found is None or not function(found.name):
        return None
    specs += [node.spec] if isinstance(node.spec, TensorSpec) else list(node.spec)
    plain = all(
        isinstance(spec, TensorSpec) and spec.device.type == where and not spec.dtype.is_complex
        for spec in specs
        if spec is not None and type(spec) is not int
    )
    # Numbers go as floating-point ones, which kernels of integers refuse.
    return found if plain and (node.op in _DRAWS or specs[0].dtype.is_floating_point) else None


Ref: TypeAlias = "tuple[int, int]"


def words_of(
    node: Node, ref: Callable[[Node], Ref], numbers: Callable[[tuple[Any, ...]], int]
) -> tuple[Word, ...] | None:
    """The words that a node's arguments are, without its result; None where one has no such form."""
    made: list[Word] = []
    arguments, results = signature(node.op)
    for i, (name, default, make) in enumerate(arguments):
        value = argument(node, i, name, default)
        words = make(value, ref, numbers) if make is not None else None
        if words is None:
            return None
        made += words
    refs = sum([len(word[1]) for word in made if word[0] in "hol"])
    return tuple(made) if len(made) + len(results) <= WORDS and refs <= HELD else None


@functools.cache
def signature(op: Any) -> tuple[tuple[tuple[str, Any, Any], ...], tuple[Word, ...]]:
    """The arguments of an op by name, default and what makes words of them; the words of its results."""
    schema = op._schema
    makers = [NAMED.get(one.name) or MAKERS.get(str(one.type).replace("SymInt", "int").replace(
              "Optional", "optional")) for one in schema.arguments]  # fmt: skip
    arguments = [(one.name, one.default_value, make) for one, make in zip(schema.arguments, makers)]
    results = [("q" if str(one.type) == "int" else "r", i) for i, one in enumerate(schema.returns)]
    return tuple(arguments), tuple(results)


@functools.lru_cache(None, typed=True)
def _lasting(*values: Any) -> int:
    """The address of a text, of a number, or of such addresses, which stays: layers use few of them."""
    kept: Any
    if isinstance(values[0], str):
        kept = ctypes.create_string_buffer(values[0].encode())
    elif isinstance(values[0], float):
        kept = ctypes.c_double(values[0])
    else:
        kept = (ctypes.c_void_p * len(values))(*values)
    _LASTING.append(kept)
    return ctypes.addressof(kept)


_LASTING: list[Any] = []


LASTING: dict[str, Callable[[Any], int]] = {
    "t": _lasting,
    "T": lambda text: _lasting(_lasting(text)),
    "f": lambda values: _lasting(*map(_lasting, values)) if values else 0,
}


def lasting(word: Word) -> Word:
    """A text, or numbers, as the word that `_call.c` takes: their address."""
    return "n", LASTING[word[0]](word[1])


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _number(value: Any, ref: Any, numbers: Any) -> list[Word] | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [("d", float(value))] if plain else None


def _maybe_number(value: Any, ref: Any, numbers: Any) -> list[Word] | None:
    if value is None:
        return [("n", 0)]
    return [("D", float(value))] if isinstance(value, (int, float)) else None


#: The words of an argument by its type; None for a value that has none. `ref` says what a node is in a plan,
#: `numbers` where numbers stand in its table.
MAKERS: dict[str, Callable[[Any, Any, Any], list[Word] | None]] = {
    "Tensor": lambda value, ref, numbers: [("h", (ref(value),))] if isinstance(value, Node) else None,
    "optional[Tensor]": lambda value, ref, numbers: [("o", () if value is None else (ref(value),))],
    "List[Tensor]": lambda value, ref, numbers: (
        None if not all(isinstance(one, Node) for one in value)
        else [("l", tuple(map(ref, value))), ("n", len(value))]),
    "int": lambda value, ref, numbers: None if isinstance(value, Node) else [("i", numbers((value,)))],
    "optional[int]": lambda value, ref, numbers: [("n", 0)] if value is None else [("p", numbers((value,)))],
    "List[int]": lambda value, ref, numbers: [("p", numbers(_listed(value))), ("n", len(_listed(value)))],
    "optional[List[int]]": lambda value, ref, numbers: (
        [("n", 0), ("n", 0)] if value is None else [("P", numbers(tuple(value))), ("n", len(value))]),
    "bool": lambda value, ref, numbers: [("n", int(value))],
    "List[bool]": lambda value, ref, numbers: [
        ("b", struct.pack(f"={len(value)}i", *map(int, value))), ("n", len(value))],
    **dict.fromkeys(("float", "number", "Scalar"), _number),
    **dict.fromkeys(("optional[float]", "optional[number]"), _maybe_number),
    "str": lambda value, ref, numbers: [("t", value)],
    "optional[str]": lambda value, ref, numbers: [("n", 0)] if value is None else [("T", value)],
    "List[optional[number]]": lambda value, ref, numbers: [
        ("f", tuple(map(float, value))), ("n", len(value))],
}  # fmt: skip


def _dtype(value: Any, ref: Any, numbers: Any) -> list[Word]:
    code = value if value is None or isinstance(value, int) else dtype_code(value)
    return [("n", 0) if code is None else ("b", struct.pack("=i", code))]


def _device(value: Any, ref: Any, numbers: Any) -> list[Word] | None:
    if value is None:
        return [("n", 0), ("n", 0)]
    return [("b", struct.pack("=i", 0)), ("n", 0)] if value == torch.device("cpu") else None


#: The words of arguments that say what is made, by their names: on the CPU, in rows.
NAMED: dict[str, Callable[[Any, Any, Any], list[Word] | None]] = {
    "dtype": _dtype,
    "layout": lambda value, ref, numbers: [("n", 0)] if value in (None, torch.strided) else None,
    "pin_memory": lambda value, ref, numbers: None if value else [("n", 0)],
    "memory_format": lambda value, ref, numbers: [("n", 0)] if value is None else None,
    "device": _device,
}  # fmt: skip


def work_of_call(node: Node) -> float:
    """About how many operations an eager kernel makes, for what letting go of the GIL is worth."""
    read = list(tensors([read.spec for read in node.inputs()])) or tensors([node.spec])
    shapes = [[*map(hinted, spec.shape)] for spec in read]
    return float(sum(map(math.prod, shapes)) * max((shape[-1] for shape in shapes if shape), default=1))
