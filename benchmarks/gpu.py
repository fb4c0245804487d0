"""Kernels on a GPU: bandwidth beside a device copy of as many bytes and eager, time to compile, time to start.

python benchmarks/gpu.py [megabytes ...]

Calls over several sets of inputs and results, more than a cache holds, are recorded and replayed: neither
starts nor the cache decide.
"""

import functools
import sys
import time
from functools import partial

import torch
from torch.nn import functional

import kiln
from kiln.generate.device import Function
from kiln.launch import cuda

MEGABYTES = [int(size) for size in sys.argv[1:]] or [16, 64, 256]
BEYOND = 1 << 29  # bytes that no cache holds
CALLS = 32  # recorded at once
aten = torch.ops.aten


def rms_norm(x, w):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w


def cross_entropy(x, i):
    return functional.cross_entropy(x.float(), i)


def losses(x, i):
    return functional.cross_entropy(x.float(), i, reduction="none")


class Gradient:
    """A function, and its gradient for its first argument."""

    def __init__(self, f):
        self.f = f

    def __call__(self, x, *more):
        x = x.detach().requires_grad_()
        loss = self.f(x, *more)
        return loss.detach(), torch.autograd.grad(loss, x, one(x.device))


@functools.cache
def one(device):
    return torch.ones((), device=device)


def layer_norm_gradients(grad, x, mean, scale, w):
    return aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean, scale, w, w, [True] * 3)


def softmax_gradient(grad, y):
    return aten._softmax_backward_data(grad, y, -1, y.dtype)


def adam(p, g, m, v):
    m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


#: name: function, width of a row, how many tensors of the first's size move, further inputs by width.
KERNELS = {
    "add f32": (lambda x: x + 1, 4096, 2, torch.float32, ()),
    "gelu bf16": (functional.gelu, 4096, 2, torch.bfloat16, ()),
    "gelu tanh bf16": (lambda x: functional.gelu(x, approximate="tanh"), 4096, 2, torch.bfloat16, ()),
    "silu mul bf16": (lambda x, y: functional.silu(x) * y, 4096, 3, torch.bfloat16, ("same",)),
    "silu mul f32": (lambda x, y: functional.silu(x) * y, 4096, 3, torch.float32, ("same",)),
    "bias gelu bf16": (lambda x, b: functional.gelu(x + b), 3072, 2, torch.bfloat16, ("row",)),
    "softmax 1024 bf16": (lambda x: x.softmax(-1), 1024, 2, torch.bfloat16, ()),
    "softmax 4096 f32": (lambda x: x.softmax(-1), 4096, 2, torch.float32, ()),
    "softmax 16384 bf16": (lambda x: x.softmax(-1), 16384, 2, torch.bfloat16, ()),
    "softmax 32768 bf16": (lambda x: x.softmax(-1), 32768, 2, torch.bfloat16, ()),
    "softmax 50304 bf16": (lambda x: x.softmax(-1), 50304, 2, torch.bfloat16, ()),
    "softmax 128256 bf16": (lambda x: x.softmax(-1), 128256, 2, torch.bfloat16, ()),
    "layer norm 768 bf16": (lambda x, w, b: functional.layer_norm(x, (768,), w, b), 768, 2, torch.bfloat16, ("row", "row")),
    "layer norm 4096 f32": (lambda x, w, b: functional.layer_norm(x, (4096,), w, b), 4096, 2, torch.float32, ("row", "row")),
    "layer norm 32768 bf16": (lambda x, w, b: functional.layer_norm(x, (32768,), w, b), 32768, 2, torch.bfloat16, ("row", "row")),
    "rms norm 4096 bf16": (rms_norm, 4096, 2, torch.bfloat16, ("row",)),
    "rms norm 8192 bf16": (rms_norm, 8192, 2, torch.bfloat16, ("row",)),
    "sum of rows f32": (lambda x: x.sum(-1), 4096, 1, torch.float32, ()),
    "sum of columns f32": (lambda x: x.sum(0), 4096, 1, torch.float32, ()),
    "sum of columns bf16": (lambda x: x.sum(0), 768, 1, torch.bfloat16, ()),
    "sum of all f32": (lambda x: x.sum(), 4096, 1, torch.float32, ()),
    "cross entropy 50304 bf16": (cross_entropy, 50304, 1, torch.bfloat16, ("places",)),
    "losses 32000 bf16": (losses, 32000, 1, torch.bfloat16, ("places",)),
    "losses 128256 bf16": (losses, 128256, 1, torch.bfloat16, ("places",)),
    # The logits are the caller's, who may write to them: a copy is kept for the gradient.
    "cross entropy and gradient bf16": (Gradient(cross_entropy), 50304, 4, torch.bfloat16, ("places",)),
    "transpose f32": (lambda x: x.t().contiguous(), 4096, 2, torch.float32, ()),
    "gelu gradient bf16": (lambda grad, x: aten.gelu_backward(grad, x), 4096, 3, torch.bfloat16, ("same",)),
    "softmax gradient 1024 bf16": (softmax_gradient, 1024, 3, torch.bfloat16, ("same",)),
    "softmax gradient 50304 bf16": (softmax_gradient, 50304, 3, torch.bfloat16, ("same",)),
    "layer norm gradients 4096 bf16": (layer_norm_gradients, 4096, 3, torch.bfloat16, ("same", "each", "each", "row")),
    "layer norm gradients 1024 bf16": (layer_norm_gradients, 1024, 3, torch.bfloat16, ("same", "each", "each", "row")),
    "layer norm gradients 768 bf16": (layer_norm_gradients, 768, 3, torch.bfloat16, ("same", "each", "each", "row")),
    "adam f32": (adam, 4096, 7, torch.float32, ("same",) * 3),
}  # fmt: skip


def timed(calls):
    """The microseconds of a call, of those that are recorded one after the other."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / len(calls))
    del kept
    return best * 1e3


@functools.cache
def copied(size):
    """The time of a copy that moves so many bytes."""
    count = size // 8 // 16384 * 16384
    pairs = [[torch.randn(count, device="cuda") for _ in range(2)] for _ in range(max(BEYOND // size, 2))]
    times = timed([partial(target.copy_, source) for source, target in pairs] * max(CALLS // len(pairs), 1))
    return times * size / (8 * count)


def inputs(megabytes, width, dtype, more):
    """The first input, of the size that is measured, and what else a kernel takes."""
    rows = (megabytes << 20) // dtype.itemsize // width
    x = torch.randn(rows, width, device="cuda").to(dtype)
    others = {
        "same": lambda: torch.randn_like(x),
        "row": lambda: torch.randn(width, device="cuda").to(dtype),
        "each": lambda: torch.rand(rows, 1, device="cuda"),
        "places": lambda: torch.randint(0, width, (rows,), device="cuda"),
    }
    return [x, *[others[kind]() for kind in more]]


class Clock:
    """What LLVM and the driver take."""

    def __init__(self):
        self.seconds = {"LLVM": 0.0, "driver": 0.0}
        ptx, code = Function.ptx, cuda.machine_code

        def generated(function, capability):
            return self.noted("LLVM", lambda: ptx(function, capability))

        def coded(*args):
            return self.noted("driver", lambda: code(*args))

        Function.ptx, cuda.machine_code = generated, coded

    def noted(self, name, f):
        start = time.perf_counter()
        result = f()
        self.seconds[name] += time.perf_counter() - start
        return result

    def reset(self):
        self.seconds = dict.fromkeys(self.seconds, 0.0)


def compiled(f):
    if isinstance(f, Gradient):
        return Gradient(kiln.compile(f.f, fullgraph=True))
    return kiln.compile(f, fullgraph=True)


def measure(name, clock, megabytes):
    f, width, moved, dtype, more = KERNELS[name]
    given = inputs(megabytes, width, dtype, more)
    size = moved * given[0].nbytes
    sets = [given, *[inputs(megabytes, width, dtype, more) for _ in range(BEYOND // size)]]
    clock.reset()
    kiln.reset()
    start = time.perf_counter()
    g = compiled(f)
    g(*given)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    repeated = sets * max(CALLS // len(sets), 1)
    mine, eager = (timed([partial(run, *some) for some in repeated]) for run in (g, f))
    times = ", ".join(f"{k} {v * 1e3:5.1f}" for k, v in clock.seconds.items())
    print(
        f"{name:32}{size / mine / 1e3:8.0f} GB/s {copied(size) / mine:6.2f} of copy, {eager / mine:6.2f} x eager;"
        f" first call {first * 1e3:6.1f} ms, {times}"
    )


def main():
    print(torch.__version__, torch.cuda.get_device_name())
    clock = Clock()
    for megabytes in MEGABYTES:
        size = megabytes << 21
        print(f"{megabytes} MB; {'device copy':22}{size / copied(size) / 1e3:8.0f} GB/s")
        for name in KERNELS:
            measure(name, clock, megabytes)
    small = torch.randn(1024, device="cuda")
    g = kiln.compile(lambda x: x * 2 + 1, fullgraph=True)
    g(small)
    torch.cuda.synchronize()
    for name, f in (("kiln", lambda: g(small)), ("eager, one op", lambda: small * 2)):
        start = time.perf_counter()
        for _ in range(2000):
            f()
        torch.cuda.synchronize()
        print(f"a call of 1,024 elements, {name}: {(time.perf_counter() - start) / 2000 * 1e6:.1f} us")


if __name__ == "__main__":
    main()
