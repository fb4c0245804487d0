"""Functions for a GPU whose threads share nothing, run thread by thread on the CPU: what is written, not the nest."""

import ctypes
import re

import pytest
import torch
from torch import nn

import kiln
from kiln.expand import channels
from kiln.fuse import neighbours
from kiln.generate import cpu

from .driver import Driver, pretended

HALF = torch.bfloat16
#: The place of a thread, which the machine would know.
PLACE = """
@thread = internal global i32 0
@block = internal global i32 0
define i32 @thread_is() noinline { %v = load i32, ptr @thread
 ret i32 %v }
define i32 @block_is() noinline { %v = load i32, ptr @block
 ret i32 %v }
define void @put(i32 %t, i32 %b) noinline { store i32 %t, ptr @thread
 store i32 %b, ptr @block
 ret void }
"""


def on_the_cpu(function):
    """A function for a GPU as one of this machine's."""
    text = re.sub(r"^(declare .*nvvm|\s*call void asm sideeffect .griddep).*$", "", function.text, flags=re.MULTILINE)
    for name, other in (("tid", "thread_is"), ("ctaid", "block_is")):
        text = text.replace(f"@llvm.nvvm.read.ptx.sreg.{name}.x", f"@{other}")
    assert "nvvm" not in text and "addrspace" not in text  # threads share nothing
    return cpu.compile_text(text.replace("ptx_kernel ", "") + PLACE)


@pytest.fixture
def ran(monkeypatch):
    """The functions over several neighbours, which run thread by thread."""
    found, loops = [], Driver.launch

    def launch(self, handle, blocks, by, bz, threads, ty, tz, shared, stream, parameters, extra):
        start, nests = self.functions[handle]
        if not any(neighbours.results_at_once(nest).several for nest in nests):
            return loops(self, handle, blocks, by, bz, threads, ty, tz, shared, stream, parameters, extra)
        code = on_the_cpu(start.function)
        words = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(len(start.given))]
        put = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int32)(code.address("put"))
        entry = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * len(words))(code.address(start.function.name))
        for place in range(blocks * threads):
            put(place % threads, place // threads)
            entry(*words)
        found.append(start.function.text)
        return 0

    monkeypatch.setattr(Driver, "launch", launch)
    monkeypatch.setattr(channels, "FEWEST", 1)
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(neighbours, "THREADED", 1)  # few results as many
    return found


CASES = [(3, 9, 64, 1), (5, 9, 64, 1), (5, 14, 72, 1), (5, 14, 72, 2), (7, 12, 96, 1), (7, 5, 64, 1), (7, 14, 8, 2), (3, 14, 58, 2), (3, 9, 116, 1)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("wide", "size", "many", "step"), CASES)
def test_convolutions_of_one_channel_each(wide, size, many, step, bias, ran):
    torch.manual_seed(0)
    conv = nn.Conv2d(many, many, wide, step, wide // 2, groups=many, bias=bias)
    model = nn.Sequential(conv, nn.ReLU()).to(HALF)
    image = torch.randn(2, many, size, size).to(HALF).to(memory_format=torch.channels_last)
    found = []
    kiln.reset()
    for run in (kiln.compile(model, fullgraph=True), model):
        x = image.clone().requires_grad_()
        with pretended(), kiln.config.patch(strict=True):
            out = run(x)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), x)])
    for got, expected in zip(*found, strict=True):
        assert (got - expected).float().norm() <= 0.002 * expected.float().norm()
    assert ran and (wide == 3 or any("phi" in text for text in ran))  # rows of wide filters are a loop
