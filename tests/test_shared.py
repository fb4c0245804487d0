"""Modules of one class that are compiled one by one, and modules that come along one path: one graph for all."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import kiln

X = torch.linspace(-1, 1, 64).reshape(2, 4, 8)


class Plain(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rise, self.fall, self.norm = nn.Linear(8, width), nn.Linear(width, 8), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.fall(self.rise(x).relu()) * self.calls


@pytest.fixture
def Block():  # noqa: N802
    """A class of its own, so that nothing is shared with other tests."""
    return type("Block", (Plain,), {})


def as_twins(blocks, **how):
    return [kiln.compile(block, **how) for block in blocks]


def in_place(blocks, **how):
    """What `Module.compile` does."""
    for block in blocks:
        block._compiled_call_impl = kiln.compile(block._call_impl, **how)
    return blocks


@pytest.mark.parametrize("compiled", [as_twins, in_place])
def test_blocks_that_are_compiled_one_by_one_have_one_graph(Block, compiled):
    blocks = [Block() for _ in range(4)]
    plain = copy.deepcopy(blocks)
    with kiln.records() as seen:
        made = compiled(blocks, backend="eager")
        for _ in range(2):
            for block, expected in zip(made, plain, strict=True):
                out, wanted = block(X), expected(X)
                assert out.equal(wanted)
                out.sum().backward(), wanted.sum().backward()
    for block, expected in zip(blocks, plain, strict=True):
        assert all(a.grad.equal(b.grad) for a, b in zip(block.parameters(), expected.parameters(), strict=True))
        assert block.calls == 2
    assert (len(seen.graphs), len(seen.breaks), len(seen.recompiles)) == (1, 0, 0)


def graphs(run):
    with kiln.records() as seen:
        run()
    return len(seen.graphs)


def test_a_block_that_was_called_is_compiled_for_itself(Block):
    first, second = (kiln.compile(block, backend="eager") for block in (Block(), Block()))
    apart = kiln.compile(Block(), backend="eager", fullgraph=True)
    assert graphs(lambda: (first(X), second(X))) == 1 and graphs(lambda: apart(X)) == 1
    late = kiln.compile(Block(), backend="eager", fullgraph=True)  # the one before was called alone
    assert graphs(lambda: late(X)) == 1
    joins = kiln.compile(Block(), backend="eager")
    assert graphs(lambda: joins(X)) == 0


def test_what_is_built_otherwise_has_graphs_of_its_own(Block):
    wide, frozen, hooked, set_otherwise = Block(16), Block().requires_grad_(False), Block(), Block()
    hooked.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    set_otherwise.norm.eps = 1e-3
    for other in (wide, frozen, hooked, set_otherwise):
        both = as_twins([Block(), other], backend="eager", fullgraph=True)
        assert graphs(lambda both=both: [block(X) for block in both]) == 2


def test_explain_compiles_anew(Block):
    blocks = [Block() for _ in range(2)]
    for compiled in as_twins(blocks):
        compiled(X)
    assert kiln.explain(blocks[1])(X).graph_count == 1


def test_a_block_that_goes_leaves_nothing(Block):
    blocks = [Block() for _ in range(3)]
    made = as_twins(blocks, backend="eager")
    for block in made:
        block(X)
    gone = weakref.ref(blocks.pop(0))
    del made[0], block
    gc.collect()
    assert gone() is None and graphs(lambda: made[0](X)) == 0


def test_modules_along_one_path_have_two_graphs(Block):
    run = kiln.compile(lambda block, x: block(x), backend="eager")
    blocks = [Block() for _ in range(4)]
    assert graphs(lambda: [run(block, X) for block in blocks]) == 2


def test_for_inference_each_has_what_follows_from_its_weights(Block):
    for eval_first in (True, False):
        blocks = [Block() for _ in range(12)]
        if eval_first:
            made = as_twins([block.eval() for block in blocks], backend="eager")
        else:
            made = as_twins(blocks, backend="eager")
            [block.eval() for block in blocks]
        with torch.no_grad():
            assert graphs(lambda made=made: [block(X) for block in made]) == 12
            assert graphs(lambda made=made: [block(X) for block in made]) == 0


def test_what_goes_on_after_a_break_is_shared_too(Block):
    class Broken(Block):
        def forward(self, x):
            x = super().forward(x)
            kiln.graph_break()
            return self.norm(x)

    made = as_twins([Broken() for _ in range(4)], backend="eager")
    assert graphs(lambda: [block(X) for block in made]) == 2
    assert graphs(lambda: [block(X) for block in made]) == 0


def test_a_function_that_is_compiled_again_is_captured_once():
    def f(x, by=2.0):
        kiln.graph_break()
        return x * by

    assert graphs(lambda: [kiln.compile(f, backend="eager")(X) for _ in range(3)]) == 1
    both = [kiln.compile(f, backend="eager") for _ in range(2)]
    assert graphs(lambda: [one(X.double()) for one in both]) == 1
    f.__defaults__ = (3.0,)
    assert both[0](X).equal(X * 3.0) and kiln.compile(f, backend="eager")(X).equal(X * 3.0)
    assert graphs(lambda: kiln.compile(f, backend="aot_eager")(X)) == 1
    kiln.reset()
    assert graphs(lambda: [kiln.compile(f, backend="eager")(X) for _ in range(3)]) == 1


def test_a_function_that_was_compiled_goes_with_its_last_user():
    def f(x):
        return x * 2

    kiln.compile(f, backend="eager")(X)
    left = weakref.ref(f)
    gc.disable()
    try:
        del f
        assert left() is None
    finally:
        gc.enable()


def test_a_module_that_is_compiled_again_has_one_graph(Block):
    block = Block().eval()
    first, second = (kiln.compile(block, backend="eager") for _ in range(2))
    assert graphs(lambda: (first(X), second(X))) == 1


def test_a_function_that_is_made_again_is_captured_once():
    def step(x, by):
        return kiln.compile(lambda y, by=by: (y * by).sin(), backend="eager")(x)

    assert graphs(lambda: [step(X, 2.0) for _ in range(3)]) == 1
    assert step(X, 3.0).equal((X * 3.0).sin())
    assert kiln.explain(lambda x: x.cos(), backend="eager")(X).graph_count == 1


def test_what_a_function_was_given_goes_with_it():
    def step(model, x):
        return kiln.compile(lambda module, y: module(y) + 1, backend="eager")(model, x)

    def run():
        model = nn.Linear(8, 8)
        step(model, X)
        return weakref.ref(model)

    left = run()
    gc.collect()
    assert left() is None


def test_a_function_that_closes_over_others_is_captured_for_itself():
    def step(x, by):
        return kiln.compile(lambda y: (y * by).sin(), backend="eager")(x)

    assert [step(X, by).equal((X * by).sin()) for by in (2.0, 3.0)] == [True, True]


def tripled(x):
    return x * 3


def test_functions_between_graphs_are_compiled_as_the_call_asks_that_leads_to_them():
    seen = []

    def backend_of(name):
        def backend(graph, inputs):
            def run(*args):
                seen.append(name)
                return graph.forward(*args)

            return run

        return backend

    def compiled(name):
        def f(x):
            return aside(x.sin()).cos()

        @kiln.disable(recursive=False)
        def aside(x):
            return tripled(x)

        return kiln.compile(f, backend=backend_of(name))

    made = [compiled("one"), compiled("two")]
    for f in (*made, *made):
        torch.testing.assert_close(f(X), (X.sin() * 3).cos())
    assert seen == ["one"] * 3 + ["two"] * 3 + ["one"] * 3 + ["two"] * 3
