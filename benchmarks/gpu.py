"""Kernels on a GPU: bandwidth beside a device copy and eager, time to compile, time to start.

python benchmarks/gpu.py [megabytes]
"""

import sys
import time

import torch
from torch.nn import functional

import kiln
from kiln.generate.device import Function
from kiln.launch import cuda

MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 256


def rms_norm(x, w):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w


def cross_entropy(x, i):
    return functional.cross_entropy(x.float(), i)


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
    "softmax 32768 bf16": (lambda x: x.softmax(-1), 32768, 2, torch.bfloat16, ()),
    "softmax 50304 bf16": (lambda x: x.softmax(-1), 50304, 2, torch.bfloat16, ()),
    "layer norm 768 bf16": (lambda x, w, b: functional.layer_norm(x, (768,), w, b), 768, 2, torch.bfloat16, ("row", "row")),
    "layer norm 4096 f32": (lambda x, w, b: functional.layer_norm(x, (4096,), w, b), 4096, 2, torch.float32, ("row", "row")),
    "rms norm 4096 bf16": (rms_norm, 4096, 2, torch.bfloat16, ("row",)),
    "rms norm 8192 bf16": (rms_norm, 8192, 2, torch.bfloat16, ("row",)),
    "sum of rows f32": (lambda x: x.sum(-1), 4096, 1, torch.float32, ()),
    "sum of columns f32": (lambda x: x.sum(0), 4096, 1, torch.float32, ()),
    "sum of columns bf16": (lambda x: x.sum(0), 768, 1, torch.bfloat16, ()),
    "sum of all f32": (lambda x: x.sum(), 4096, 1, torch.float32, ()),
    "cross entropy 50304 bf16": (cross_entropy, 50304, 1, torch.bfloat16, ("places",)),
    "transpose f32": (lambda x: x.t().contiguous(), 4096, 2, torch.float32, ()),
}  # fmt: skip


def timed(f, turns=30):
    for _ in range(3):
        f()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(turns):
            f()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / turns)
    return best


def copied():
    """The bandwidth of a copy."""
    source = torch.randn(MEGABYTES << 18, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source)) / 1e6


def inputs(width, dtype, more):
    """The first input, of the size that is measured, and what else a kernel takes."""
    rows = (MEGABYTES << 20) // dtype.itemsize // width
    x = torch.randn(rows, width, device="cuda").to(dtype)
    others = {
        "same": lambda: torch.randn_like(x),
        "row": lambda: torch.randn(width, device="cuda").to(dtype),
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


def measure(name, clock, copy):
    f, width, moved, dtype, more = KERNELS[name]
    given = inputs(width, dtype, more)
    clock.reset()
    kiln.reset()
    start = time.perf_counter()
    g = kiln.compile(f, fullgraph=True)
    g(*given)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    mine, eager = timed(lambda: g(*given)), timed(lambda: f(*given))
    rate = moved * given[0].nbytes / mine / 1e6
    times = ", ".join(f"{k} {v * 1e3:5.1f}" for k, v in clock.seconds.items())
    print(
        f"{name:28}{rate:8.0f} GB/s {rate / copy:6.2f} of copy, {eager / mine:6.2f} x eager;"
        f" first call {first * 1e3:6.1f} ms, {times}"
    )


def main():
    print(torch.__version__, torch.cuda.get_device_name(), MEGABYTES, "MB")
    copy, clock = copied(), Clock()
    print(f"{'device copy':28}{copy:8.0f} GB/s")
    for name in KERNELS:
        measure(name, clock, copy)
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
