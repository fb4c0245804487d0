"""Bandwidth of generated kernels as a share of a copy's within the same buffers, and time against eager.

    python benchmarks/kernels.py [--sizes 1,8,64] [--threads 1,2] [--only softmax] [--compile] [--rounds 15] [--busy]

On a busy machine `--busy` takes CPU time, of all threads together, and leaves eager out; threads that wait must
sleep then (OMP_WAIT_POLICY=passive).

A kernel writes into memory that is kept from turn to turn, as the copy does: neither pays for fresh pages.
Its bytes are those of the inputs and outputs, once each. Sizes are MB of all of them together.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kiln.base.graph import Node, TensorSpec
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.fuse.steps import Call, Launch
from kiln.generate.code import Compiled, generate
from kiln.generate.cpu import compile_text
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

MB = 1 << 20
GOAL = 0.8  # of a copy's bandwidth
ENTRY = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)  # as generate/code.py writes it

#: One thread's share of the tasks of a stage.
SHARE = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define void @share(ptr %job) {
  %n = call i32 @omp_get_num_threads()
  %i = call i32 @omp_get_thread_num()
  %team = sext i32 %n to i64
  %me = sext i32 %i to i64
  %next = add i64 %me, 1
  %p1 = getelementptr i64, ptr %job, i64 1
  %p2 = getelementptr i64, ptr %job, i64 2
  %p3 = getelementptr i64, ptr %job, i64 3
  %p4 = getelementptr i64, ptr %job, i64 4
  %entry = load ptr, ptr %job
  %buffers = load ptr, ptr %p1
  %sizes = load ptr, ptr %p2
  %status = load ptr, ptr %p3
  %tasks = load i64, ptr %p4
  %a = mul i64 %tasks, %me
  %begin = sdiv i64 %a, %team
  %b = mul i64 %tasks, %next
  %end = sdiv i64 %b, %team
  call void %entry(ptr %buffers, ptr %sizes, ptr %status, i64 %begin, i64 %end)
  ret void
}
"""


class Kernels:
    """The kernels of a function over inputs, with outputs that are kept."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self.graph = recorded(function, *inputs)
        self.program = fuse(expand(self.graph, "prims", FOR_LOOPS))
        calls = [s.node for s in self.program.steps if isinstance(s, Call) and not s.node.op.is_view]
        self.calls = [n for n in calls if n.op._schema.name != "aten::empty"]
        launches = [s for s in self.program.steps if isinstance(s, Launch)]
        self.memory: dict[Any, torch.Tensor] = dict(zip(self.program.graph.inputs, inputs, strict=True))
        self.jobs: list[Any] = []
        self.kept: list[Any] = []
        for launch, made in zip(launches, generate([s.kernel for s in launches]), strict=True):
            self.add(launch, made)
        self.bytes = sum(t.nbytes for n, t in self.memory.items() if isinstance(n, Node))
        self.count = len(launches)
        pool = ctypes.CDLL(None)
        self.parallel = pool.GOMP_parallel
        self.code = compile_text(SHARE)
        self.share = ctypes.c_void_p(self.code.address("share"))

    def add(self, launch: Launch, made: Compiled) -> None:
        owners = {**launch.reads, **launch.writes}
        for buffer in made.buffers:
            key = owners.get(buffer, buffer)
            if key not in self.memory:
                spec: TensorSpec = key.spec if isinstance(key, Node) else launch.scratch[buffer]
                storage = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
                self.memory[key] = torch.empty(storage, dtype=spec.dtype).fill_(1)
        pointers = [self.memory[owners.get(b, b)].data_ptr() for b in made.buffers]
        buffers = (ctypes.c_void_p * len(pointers))(*pointers)
        status, sizes = ctypes.c_int64(0), (ctypes.c_int64 * 1)(0)
        addresses = [made.code.wait().address(name) for name in made.names]
        for address, tasks in zip(addresses, made.tasks, strict=True):
            job = (ctypes.c_int64 * 5)(
                address, ctypes.addressof(buffers), ctypes.addressof(sizes), ctypes.addressof(status), tasks
            )
            self.jobs.append(job)
        self.kept.append((made, buffers, status, sizes))

    def halves(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        """The two halves of a buffer: copying one to the other moves as many bytes as using all of it once."""
        memory = self.memory[node]
        flat = memory.as_strided((memory.untyped_storage().nbytes() // memory.itemsize,), (1,), 0)
        half = len(flat) // 2
        return flat[half : 2 * half], flat[:half]

    def run(self, threads: int) -> None:
        for job in self.jobs:
            if threads > 1 and job[4] > 1:
                self.parallel(self.share, job, threads, 0)
            else:
                ENTRY(job[0])(job[1], job[2], job[3], 0, job[4])


Case = Callable[[int], "tuple[Callable[..., Any], tuple[torch.Tensor, ...]]"]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.strip("_")] = function
    return function


def floats(count: int, buffers: int) -> int:
    """Elements of one of some equal buffers that together have so many bytes."""
    return count // (4 * buffers)


def rows(count: int, buffers: int, width: int = 1024) -> tuple[int, int]:
    return max(floats(count, buffers) // width, 1), width


HALF = torch.bfloat16
#: Of one tensor: the function, how many such tensors are read and written, the width of rows, the dtype.
SIMPLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, int, torch.dtype]] = {
    "copy": (torch.clone, 2, 1, torch.float32),
    "exp": (torch.exp, 2, 1, torch.float32),
    "sin": (lambda a: torch.sin(a * 10), 2, 1, torch.float32),
    "tanh_chain": (lambda a: torch.tanh(a * 0.5) * 2 + 1, 2, 1, torch.float32),
    "softplus": (functional.softplus, 2, 1, torch.float32),
    "softplus_bf16": (functional.softplus, 2, 1, HALF),
    "silu_bf16": (functional.silu, 2, 1, HALF),
    "gelu_bf16": (functional.gelu, 2, 1, HALF),
    "gelu_tanh": (lambda a: functional.gelu(a, approximate="tanh"), 2, 1024, torch.float32),
    "gelu_tanh_bf16": (lambda a: functional.gelu(a, approximate="tanh"), 2, 1024, HALF),
    "pow": (lambda a: torch.pow(a, 2.3), 2, 1, torch.float32),
    "pow_bf16": (lambda a: torch.pow(a, 2.3), 2, 1, HALF),
    "sum_full": (torch.sum, 1, 1, torch.float32),
    "sum_rows": (lambda a: a.sum(-1), 1, 1024, torch.float32),
    "sum_short_rows": (lambda a: a.sum(-1), 1, 48, torch.float32),
    "sum_columns": (lambda a: a.sum(0), 1, 1024, torch.float32),
    "amax_rows": (lambda a: a.amax(-1), 1, 1024, torch.float32),
    "amax_full": (torch.amax, 1, 1, torch.float32),
    "argmax_rows": (lambda a: a.argmax(-1), 1, 1024, torch.float32),
    "var_full": (torch.var, 1, 1, torch.float32),
    "var_rows": (lambda a: a.var(-1), 1, 1024, torch.float32),
    "var_columns": (lambda a: a.var(0), 1, 1024, torch.float32),
    "var_columns_bf16": (lambda a: a.var(0), 1, 1024, HALF),
    "std_rows": (lambda a: a.std(-1), 1, 1024, torch.float32),
    "softmax": (lambda a: functional.softmax(a, -1), 2, 1024, torch.float32),
    "softmax_128": (lambda a: functional.softmax(a, -1), 2, 128, torch.float32),
    "softmax_50257": (lambda a: functional.softmax(a, -1), 2, 50257, torch.float32),
    "softmax_bf16": (lambda a: functional.softmax(a, -1), 2, 1024, HALF),
    "softmax_columns": (lambda a: functional.softmax(a, 0), 2, 1024, torch.float32),
    "log_softmax": (lambda a: functional.log_softmax(a, -1), 2, 1024, torch.float32),
    "log_softmax_bf16": (lambda a: functional.log_softmax(a, -1), 2, 1024, HALF),
    "log_softmax_50257_bf16": (lambda a: functional.log_softmax(a, -1), 2, 50257, HALF),
    "logsumexp": (lambda a: a.logsumexp(-1), 1, 1024, torch.float32),
    "logsumexp_50257": (lambda a: a.logsumexp(-1), 1, 50257, torch.float32),
    "logsumexp_bf16": (lambda a: a.logsumexp(-1), 1, 1024, HALF),
    "logsumexp_50257_bf16": (lambda a: a.logsumexp(-1), 1, 50257, HALF),
    "layer_norm_bf16": (lambda a: functional.layer_norm(a, a.shape[-1:]), 2, 1024, HALF),
    "cumsum": (lambda a: a.cumsum(-1), 2, 1024, torch.float32),
    "cumsum_bf16": (lambda a: a.cumsum(-1), 2, 1024, HALF),
    "cumsum_columns": (lambda a: a.cumsum(0), 2, 1024, torch.float32),
}


def simple(function: Callable[[torch.Tensor], torch.Tensor], buffers: int, width: int, dtype: torch.dtype) -> Case:
    def made(n: int) -> Any:
        r, c = rows(n * 4 // dtype.itemsize, buffers, width)
        x = torch.randn(*((r, c) if width > 1 else (r,)))
        return function, ((x.abs() if function in POSITIVE else x).to(dtype),)

    return made


POSITIVE = {SIMPLE["pow"][0], SIMPLE["pow_bf16"][0]}
CASES.update({name: simple(*given) for name, given in SIMPLE.items()})


@case
def chain(n: int) -> Any:
    size = floats(n, 3)
    return (lambda a, b: torch.relu(a * 2 + b) - b * 0.5), (torch.randn(size), torch.randn(size))


@case
def chain_bf16(n: int) -> Any:
    size = floats(n, 3) * 2
    args = tuple(torch.randn(size).to(torch.bfloat16) for _ in range(2))
    return (lambda a, b: torch.relu(a * 2 + b)), args


@case
def add_row(n: int) -> Any:
    r, c = rows(n, 2)
    return (lambda a, b: a * 1.5 + b), (torch.randn(r, c), torch.randn(c))


@case
def gelu(n: int) -> Any:
    r, c = rows(n, 2)
    return (lambda a, b: functional.gelu(a + b)), (torch.randn(r, c), torch.randn(c))


@case
def gelu_residual(n: int) -> Any:
    r, c = rows(n, 3)
    return (lambda a, b, x: functional.gelu(a + b) + x), (torch.randn(r, c), torch.randn(c), torch.randn(r, c))


@case
def silu_mul(n: int) -> Any:
    return (lambda a, b: functional.silu(a) * b), (torch.randn(*rows(n, 3)), torch.randn(*rows(n, 3)))


@case
def gelu_backward(n: int) -> Any:
    args = (torch.randn(*rows(n, 3)), torch.randn(*rows(n, 3)))
    return (lambda g, x: torch.ops.aten.gelu_backward(g, x)), args


@case
def mean_square(n: int) -> Any:
    return (lambda a, b: ((a - b) ** 2).mean()), (torch.randn(floats(n, 2)), torch.randn(floats(n, 2)))


@case
def layer_norm(n: int) -> Any:
    r, c = rows(n, 2, 768)
    return (lambda a, w, b: functional.layer_norm(a, (c,), w, b)), (torch.randn(r, c), torch.randn(c), torch.randn(c))


@case
def layer_norm_residual(n: int) -> Any:
    r, c = rows(n, 3, 768)
    args = (torch.randn(r, c), torch.randn(r, c), torch.randn(c), torch.randn(c))
    return (lambda a, x, w, b: functional.layer_norm(a + x, (c,), w, b)), args


@case
def rms_norm(n: int) -> Any:
    r, c = rows(n, 2)
    args = (torch.randn(r, c), torch.randn(c))
    return (lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * w), args


@case
def layer_norm_backward(n: int) -> Any:
    r, c = rows(n, 3, 768)
    args = (torch.randn(r, c), torch.randn(r, c), torch.randn(r, 1), torch.rand(r, 1), torch.randn(c))
    backward = torch.ops.aten.native_layer_norm_backward
    return (lambda g, x, m, s, w: backward(g, x, [c], m, s, w, w, [True, True, True])), args


@case
def batch_norm_training(n: int) -> Any:
    side = max(int((floats(n, 2) / (8 * 64)) ** 0.5), 1)
    args = (torch.randn(8, 64, side, side), torch.randn(64), torch.randn(64))
    return (lambda x, w, b: functional.batch_norm(x, None, None, w, b, True)), args


@case
def batch_norm_planes(n: int) -> Any:
    batch = max(floats(n, 2) // (64 * 28 * 28), 1)
    args = (torch.randn(batch, 64, 28, 28), torch.randn(64), torch.randn(64))
    return (lambda x, w, b: functional.batch_norm(x, None, None, w, b, True)), args


@case
def cross_entropy(n: int) -> Any:
    r, c = rows(n, 1, 30522)
    return functional.cross_entropy, (torch.randn(r, c), torch.randint(0, c, (r,)))


@case
def cross_entropy_bf16(n: int) -> Any:
    function, (x, target) = cross_entropy(2 * n)
    return function, (x.to(HALF), target)


@case
def cross_entropy_backward(n: int) -> Any:
    r, c = rows(n, 2, 8192)

    def gradient(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        places = torch.arange(c)
        return (functional.softmax(x, -1) - (places == target[:, None]).to(torch.float32)) / r

    return gradient, (torch.randn(r, c), torch.randint(0, c, (r,)))


@case
def transpose(n: int) -> Any:
    side = int(floats(n, 2) ** 0.5) // 16 * 16
    return (lambda a: a.t().contiguous()), (torch.randn(side, side),)


@case
def transpose_add(n: int) -> Any:
    side = int(floats(n, 3) ** 0.5) // 16 * 16
    return (lambda a, b: a.t() + b), (torch.randn(side, side), torch.randn(side, side))


@case
def heads(n: int) -> Any:
    batch = max(floats(n, 2) // (128 * 768), 1)
    return (lambda a: a.view(batch, 128, 12, 64).transpose(1, 2).contiguous()), (
        torch.randn(batch, 128, 768),
    )


@case
def channels_last(n: int) -> Any:
    batch = max(floats(n, 2) // (64 * 56 * 56), 1)
    return (lambda a: a.permute(0, 2, 3, 1).contiguous()), (torch.randn(batch, 64, 56, 56),)


@case
def cat(n: int) -> Any:
    r, c = rows(n, 4)
    return (lambda a, b: torch.cat([a, b], 1)), (torch.randn(r, c), torch.randn(r, c))


@case
def rope(n: int) -> Any:
    batch = max(floats(n, 2) // (8 * 128 * 64), 1)

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return rotated, (torch.randn(batch, 8, 128, 64), torch.randn(128, 64), torch.randn(128, 64))


@case
def embedding(n: int) -> Any:
    r, c = rows(n, 2)
    return (lambda t, i: functional.embedding(i, t)), (torch.randn(r, c), torch.randperm(r))


@case
def gather(n: int) -> Any:
    r, c = rows(n, 4)
    return (lambda x, i: torch.gather(x, 1, i)), (torch.randn(r, c), torch.randint(0, c, (r, c)))


@case
def adam(n: int) -> Any:
    size = floats(n, 7)

    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Any:
        m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
        return p - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v

    return step, (torch.randn(size), torch.randn(size), torch.randn(size), torch.rand(size))


def seconds(call: Callable[[], object], turns: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in range(turns):
        call()
    return (clock() - start) / turns


def measured(name: str, size: int, threads: int, rounds: int, compiled: bool, busy: bool) -> str:
    """One line: what share of a copy's bandwidth the kernels reach, and how the calls compare."""
    function, inputs = CASES[name](size * MB)
    kernels = Kernels(function, inputs)
    if kernels.calls:
        return f"{name:24} {size:4} MB: eager calls {[n.op._schema.name for n in kernels.calls]}"
    halves = [kernels.halves(n) for n in kernels.memory if isinstance(n, Node)]

    def copy() -> None:
        for target, source in halves:
            target.copy_(source)

    own = compile_graph(kernels.graph)
    ways: dict[str, Callable[[], object]] = {
        "kernels": lambda: kernels.run(threads),
        "copy": copy,
        "eager": lambda: function(*inputs),
        "call": lambda: own(list(inputs)),
    }
    if busy:
        ways = {key: ways[key] for key in ("kernels", "copy")}
    clock = time.process_time if busy else time.perf_counter
    if compiled:
        other = torch.compile(function)
        ways["compile"] = lambda: other(*inputs)
    torch.set_num_threads(threads)
    best = dict.fromkeys(ways, float("inf"))
    turns = {key: max(1, int(2e-3 / max(seconds(call, 1), 1e-9))) for key, call in ways.items()}
    with torch.no_grad():
        for _ in range(rounds):
            for key, call in ways.items():
                call()  # what the way before left in the caches, fresh pages above all, is written back meanwhile
                best[key] = min(best[key], seconds(call, turns[key], clock))
    share = best["copy"] / best["kernels"]
    line = (
        f"{name:24} {kernels.bytes / MB:6.1f} MB {threads} thr: {kernels.bytes / best['kernels'] / 1e9:6.1f} GB/s "
        f"{share:5.2f} of a copy {' ' if share >= GOAL else '<'} {kernels.count} kernels of {len(kernels.jobs)} stages"
    )
    if not busy:
        line += f", eager {best['eager'] / best['kernels']:5.2f}x (call {best['eager'] / best['call']:5.2f}x)"
    return line + (f", torch.compile {best['eager'] / best['compile']:5.2f}x" if compiled else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,8,64")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="CPU time, of kernels and copies alone")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(CASES)
    for name in names:
        for size in map(int, given.sizes.split(",")):
            for threads in map(int, given.threads.split(",")):
                torch.manual_seed(0)
                print(measured(name, size, threads, given.rounds, given.compile, given.busy), flush=True)


if __name__ == "__main__":
    main()
