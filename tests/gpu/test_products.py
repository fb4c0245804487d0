"""Products with what follows of them as one kernel by Triton: which are found, their text, what is remembered."""

import pytest
import torch
from torch.nn import functional as F

import kiln
from kiln.fuse.program import Fusing
from kiln.fuse.split import GRIDS
from kiln.generate.device import Function
from kiln.generate.product import TILES, source
from kiln.launch import device, products, program, templates
from kiln.launch.device import DevicePlanner, OnDevice
from kiln.launch.products import Template

HALF = torch.bfloat16
X, W, B, R = (torch.randn(*s).to(HALF) for s in ((2, 128, 256), (512, 256), (512,), (2, 128, 512)))


def program_of(f, *inputs):
    """What a program for a GPU is fused into, over tensors of the CPU."""
    kiln.reset()
    found, fuse, keeping = [], program.fuse, program.keeping

    def noted(graph, exact=False, fusing=Fusing()):
        found.append(fuse(graph, exact, Fusing(GRIDS)))
        return fuse(graph, exact, fusing)

    program.fuse, program.keeping = noted, lambda *_: None
    try:
        kiln.compile(f, fullgraph=True, options={"freeze": False})(*inputs)
    finally:
        program.fuse, program.keeping = fuse, keeping
    return found[0]


FOUND = {
    "an activation": lambda x, w, b, r: F.gelu(F.linear(x, w, b)),
    "a residual": lambda x, w, b, r: F.linear(x, w) + r,
    "a gate": lambda x, w, b, r: F.silu(F.linear(x, w, b)) * r,
    "a scale for columns": lambda x, w, b, r: F.linear(x, w) * b + 1,
}


@pytest.mark.parametrize("name", FOUND)
def test_products_that_one_nest_reads(name):
    (pair,) = templates.found(program_of(FOUND[name], X, W, B, R))
    assert pair.product.sizes == (256, 512, 256) and pair.product.strides == ((256, 1), (1, 256))
    assert pair.product.blocks(TILES[0]) == 2 * 4


LEFT = {
    "read twice": lambda x, w, b, r: (lambda y: (y.relu(), y.sum(-1) @ y.sum(-1).t()))(F.linear(x, w)),
    "a result": lambda x, w, b, r: F.linear(x, w),
    "read by folds": lambda x, w, b, r: F.linear(x, w).softmax(-1),
    "read in another order": lambda x, w, b, r: F.linear(x[0], w).t().contiguous() + 1,
    "f32": lambda x, w, b, r: F.linear(x.float(), w.float()).relu(),
    "random places": lambda x, w, b, r: F.linear(x[0], w)[torch.arange(127, -1, -1)] * 2,
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_are_left_alone(name):
    assert not templates.found(program_of(LEFT[name], X, W, B, R))


def test_the_text():
    (pair,) = templates.found(program_of(FOUND["a scale for columns"], X, W, B, R))
    text = source(pair.product, TILES[0], "product")
    assert (
        text
        == """import triton
import triton.language as tl


@triton.jit
def product(p0, p1, p2, p3):
    pid = tl.program_id(0)
    first = pid // 32 * 8
    size = min(2 - first, 8)
    rows = (first + pid % 32 % size) * 128 + tl.arange(0, 128)
    columns = pid % 32 // size * 128 + tl.arange(0, 128)
    ks = tl.arange(0, 64)
    a = p0 + rows[:, None] * 256 + ks[None, :] * 1
    b = p1 + ks[:, None] * 1 + columns[None, :] * 256
    sums = tl.zeros((128, 128), tl.float32)
    for _ in range(0, 256, 64):
        sums = tl.dot(tl.load(a), tl.load(b), sums)
        a += 64
        b += 64
    there = (rows < 256)[:, None] & (columns < 512)[None, :]
    zeros = tl.zeros_like(sums).to(tl.int32)
    i2 = columns[None, :]
    i1 = rows[:, None]
    t0 = sums
    t1 = tl.load(p2 + i2 + zeros, there).to(tl.float32)
    t2 = (t0 * t1)
    t3 = 1.0
    t4 = (t2 + t3)
    tl.store(p3 + i2 + 512*i1 + zeros, (t4).to(tl.bfloat16), there)
"""
    )


def test_places_beyond_the_matrix_are_not_read():
    inputs = [torch.randn(*s).to(HALF) for s in ((200, 256), (328, 256), (328,), (200, 328))]
    (pair,) = templates.found(program_of(FOUND["an activation"], *inputs))
    text = source(pair.product, TILES[0], "product")
    assert "(rows % 200)[:, None]" in text and "(columns % 328)[None, :]" in text and ", there)" in text


class Disk(dict):
    def put(self, key, data):
        self[key] = data


@pytest.fixture
def no_gpu(monkeypatch):
    """Plans that do nothing, and times by the order of what is timed."""
    monkeypatch.setattr(templates, "triton", lambda: "installed")
    monkeypatch.setattr(templates, "capability", lambda _: (9, 0))
    monkeypatch.setattr(templates, "plan_on", lambda program, device: lambda values: program)
    monkeypatch.setattr(products, "compiled", lambda *_: Function("kiln_product", "ptx", 128, 4096))
    times = [2.0, 1.0, 1.5, 3.0]
    asked = []

    def seconds(run):
        run()
        asked.append(run)
        return times[(len(asked) - 1) % len(times)]

    monkeypatch.setattr(templates, "seconds", seconds)
    return asked


def test_a_faster_tile_takes_the_place_of_both(no_gpu):
    made = program_of(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) @ w, X, W, B, R)
    before, store = len(made.steps), Disk()
    tuned = templates.with_templates(made, torch.device("cuda"), store, "f")
    assert len(tuned.steps) == before - 1 and list(store.values()) == [str(TILES[0]).encode()]
    (template,) = [k for k in tuned.kernels if isinstance(k, Template)]
    asked = len(no_gpu)
    assert len(templates.with_templates(made, torch.device("cuda"), store, "f").steps) == before - 1
    assert len(no_gpu) == asked  # the winner was remembered
    (start,) = [template.started()]
    assert start.threads == 128 and start.blocks == 8 and start.given[-2:] == (None, None)
    kernels = [
        OnDevice(k, [template.started()] if k is template else [], {start.function: 16}, lambda _: {})
        for k in tuned.kernels
    ]
    kernels[0].handles = {kernels[0].starts[0].function: 16}
    plan = DevicePlanner(tuned, kernels, (0, 0, 0)).plan()
    (step,) = [step for step in plan.owner.steps if step[0] == "grid"]
    assert step[1][0][:3] == (16, 128, 4096) and len(step[2]) == 4


def test_the_library_stays_where_it_is_faster(no_gpu, monkeypatch):
    monkeypatch.setattr(templates, "GAIN", 0.1)
    made, store = program_of(FOUND["a residual"], X, W, B, R), Disk()
    assert templates.with_templates(made, torch.device("cuda"), store, "f").steps == made.steps
    assert list(store.values()) == [b"usual"]


def test_without_triton_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(templates, "triton", lambda: None)
    made = program_of(FOUND["a residual"], X, W, B, R)
    assert templates.with_templates(made, torch.device("cuda"), None, "f") is made
    assert device.Template is Template


def test_triton_takes_the_text():
    pytest.importorskip("triton")
    (pair,) = templates.found(program_of(FOUND["a gate"], X, W, B, R))
    made = products.compiled(pair.product, TILES[0], (9, 0))
    assert made.threads == 128 and made.shared and made.binary and "wgmma" in made.ptx((9, 0))
    assert ".entry kiln_product" in made.text
