"""Products with what follows of them as one kernel by Triton: which are found, their text, what is remembered."""

import pytest
import torch
from torch.nn import functional as F

import kiln
from kiln.fuse.program import Fusing
from kiln.fuse.split import GRIDS
from kiln.fuse.steps import Call, Launch
from kiln.generate.device import Function
from kiln.generate.product import TILES, source
from kiln.launch import device, gpu, products, program, templates
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
    (site,) = templates.found(program_of(FOUND[name], X, W, B, R))
    product = site.forms["after"].product
    assert product.sizes == (256, 512, 256) and product.strides == ((256, 1), (1, 256))
    assert product.blocks(TILES[0]) == 2 * 4


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
    (site,) = templates.found(program_of(FOUND["a scale for columns"], X, W, B, R))
    text = source(site.forms["after"].product, TILES[0], "product")
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
        a_tile = tl.load(a)
        b_tile = tl.load(b)
        sums = tl.dot(a_tile, b_tile, sums)
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


BEFORE = {
    "a cast of a matrix": (lambda x, w, b, r: F.linear(x.float().exp().to(HALF), w), {"before"}),
    "casts of weights": (lambda x, w, b, r: F.linear(x, (w.float() * 2).to(HALF), b), {"before"}),
    "both sides": (lambda x, w, b, r: F.linear(x * 2, w, b) + r, {"before", "after", "both"}),
    "a gate": (lambda x, w, b, r: F.linear(F.silu(x) * b[:256], w), {"before"}),
}


@pytest.mark.parametrize("name", BEFORE)
def test_matrices_made_where_they_are_read(name):
    f, forms = BEFORE[name]
    (site,) = templates.found(program_of(f, X, W, B, R))
    assert site.forms.keys() == forms
    form = site.forms["before"]
    assert len(form.covers) >= 2 and form.covers[-1] is site.call
    text = source(form.product, TILES[0], "product")
    assert "ks += 64" in text and "tl.dot(a_tile, b_tile, sums)" in text and text.count("tl.store") == 1


NOT_BEFORE = {
    "read twice": lambda x, w, b, r: (lambda y: (F.linear(y, w), y.sum(-1)))(x * 2),
    "a result": lambda x, w, b, r: (lambda y: (F.linear(y, w), y))(x * 2),
    "a fold": lambda x, w, b, r: F.linear(F.layer_norm(x, (256,)), w),
    "a part of it": lambda x, w, b, r: F.linear((x.repeat(2, 1, 1) * 2)[2:], w),
}


@pytest.mark.parametrize("name", NOT_BEFORE)
def test_matrices_that_others_need(name):
    assert not templates.found(program_of(NOT_BEFORE[name], X, W, B, R))


def test_the_text_of_a_matrix_that_is_made():
    (site,) = templates.found(program_of(lambda x, w, b, r: F.linear(x * 2 + 1, w), X, W, B, R))
    text = source(site.forms["before"].product, TILES[0], "product")
    inside = text[text.index("    for _") : text.index("    there")]
    assert (
        inside
        == """    for _ in range(0, 256, 64):
        a_zeros = tl.zeros((128, 64), tl.int32)
        i2 = (rows[:, None] * 256 + ks[None, :])
        a_t0 = tl.load(p1 + i2 + a_zeros).to(tl.float32)
        a_t1 = 2.0
        a_t2 = (a_t0 * a_t1)
        a_t3 = 1.0
        a_t4 = (a_t2 + a_t3)
        a_tile = a_t4.to(tl.bfloat16)
        b_tile = tl.load(b)
        sums = tl.dot(a_tile, b_tile, sums)
        b += 64
        ks += 64
"""
    )


def test_places_beyond_the_matrix_are_not_read():
    inputs = [torch.randn(*s).to(HALF) for s in ((200, 256), (328, 256), (328,), (200, 328))]
    (site,) = templates.found(program_of(FOUND["an activation"], *inputs))
    text = source(site.forms["after"].product, TILES[0], "product")
    assert "(rows % 200)[:, None]" in text and "(columns % 328)[None, :]" in text and ", there)" in text


class Disk(dict):
    def put(self, key, data):
        self[key] = data


@pytest.fixture
def no_gpu(monkeypatch):
    """Plans that do nothing, and times by the order of what is timed."""
    monkeypatch.setattr(templates, "triton", lambda: "installed")
    monkeypatch.setattr(templates, "capability", lambda _: (9, 0))
    monkeypatch.setattr(templates, "plan_on", lambda program, device: lambda: lambda values: program)
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
    # The second product would take the activation before it, which is gone.
    assert list(store.values()) == [f"{form} {TILES[0]}".encode() for form in ("after", "before")]
    assert len(tuned.steps) == before - 1
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


def test_what_comes_before_and_follows_goes_with_the_product(no_gpu, monkeypatch):
    """Steps that it takes the place of are gone, the views between them too."""
    made, store = program_of(BEFORE["both sides"][0], X, W, B, R), Disk()
    monkeypatch.setattr(templates, "fastest", lambda site, device: f"both {TILES[1]}")
    tuned = templates.with_templates(made, torch.device("cuda"), store, "f")
    (template,) = tuned.kernels
    assert isinstance(template, Template) and template.tile is TILES[1]
    assert not any(isinstance(step, Call) and step.node.op in templates.PRODUCTS for step in tuned.steps)
    (launch,) = [step for step in tuned.steps if isinstance(step, Launch)]
    assert len(launch.reads) == 4 and len(launch.writes) == 1


@pytest.mark.skipif(
    not torch.cuda.is_available() or products.triton() is None, reason="needs a GPU and Triton"
)
@pytest.mark.parametrize("form", ["before", "after", "both"])
@pytest.mark.parametrize("name", [*BEFORE, *FOUND])
def test_values_on_a_gpu(name, form, monkeypatch):
    f = BEFORE[name][0] if name in BEFORE else FOUND[name]
    inputs = [x.cuda() for x in (X, W, B, R)]
    taken = []

    def forced(site, device):
        taken.append(form in site.forms)
        return f"{form} {TILES[len(taken) % len(TILES)]}" if taken[-1] else templates.USUAL

    monkeypatch.setattr(templates, "fastest", forced)
    monkeypatch.setattr(gpu, "disk", lambda _: None)
    kiln.reset()
    got = kiln.compile(f, fullgraph=True, mode="max-autotune")(*inputs)
    want = f(*inputs).float()
    assert taken and (got.float() - want).norm() <= 0.01 * want.norm()


def test_without_triton_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(templates, "triton", lambda: None)
    made = program_of(FOUND["a residual"], X, W, B, R)
    assert templates.with_templates(made, torch.device("cuda"), None, "f") is made
    assert device.Template is Template


def test_triton_takes_the_text():
    pytest.importorskip("triton")
    (site,) = templates.found(program_of(FOUND["a gate"], X, W, B, R))
    made = products.compiled(site.forms["after"].product, TILES[0], (9, 0))
    assert made.threads == 128 and made.shared and made.binary and "wgmma" in made.ptx((9, 0))
    assert ".entry kiln_product" in made.text
