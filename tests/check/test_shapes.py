"""Guards of entries whose sizes and numbers vary: C and Python agree, and failures are told in words."""

from __future__ import annotations

import random

import pytest
import torch

from kiln.base.source import Arg, Attr, Const, DictAttr
from kiln.check.failures import failure
from kiln.check.guards import Equals
from kiln.check.shapes import MOST, AnyNumber, Conditions, Follows, Free, Read, ShapedMatch, plan, varying
from kiln.check.torch_guards import TensorMatch
from kiln.check.tree import GuardSet

X, N = Arg(0, "x"), Arg(1, "n")


def shaped(x, free, loose=()):
    return ShapedMatch.of(X, x, *plan(x.shape, x.stride(), free, frozenset(loose)))


def guarded(*guards):
    made = GuardSet()
    for guard in guards:
        made.add(guard)
    return made, made.build()


def agree(guards, built, argv):
    expected = [g.holds(argv) for g in guards.guards]
    first = expected.index(False) if False in expected else -1
    assert built.check(argv) is (first < 0)
    return None if first < 0 else guards.guards[first].why(argv)


def test_strides_follow_the_sizes_of_a_dense_tensor():
    x = torch.empty(4, 5, 6)
    two = Free(2)
    assert plan(x.shape, x.stride(), {0: two}, frozenset()) == ((two, 5, 6), (30, 6, 1))
    assert plan(x.shape, x.stride(), {2: two}, frozenset()) == ((4, 5, two), (Follows(1), Follows(2), 1))
    t = x.transpose(0, 2)
    assert plan(t.shape, t.stride(), {1: two}, frozenset()) == ((6, two, 4), (1, 6, Follows(1)))
    part = x[:, :3]
    assert plan(part.shape, part.stride(), {}, frozenset({0})) == ((4, 3, 6), (Free(), 6, 1))
    wide = x[:1].expand(3, 5, 6)
    assert plan(wide.shape, wide.stride(), {0: two}, frozenset()) == ((two, 5, 6), (0, 6, 1))


def test_what_a_shape_admits():
    guards, built = guarded(shaped(torch.empty(4, 5, 6), {0: Free(2), 1: Free(2, 100)}))

    def why(x):
        return agree(guards, built, (x, 0))

    assert why(torch.empty(4, 5, 6)) is None
    assert why(torch.empty(9, 100, 6)) is None
    assert why(torch.empty(1, 7, 6)) == "x.size(0) was 4, now 1 (compiled for 2…)"
    assert why(torch.empty(4, 101, 6)) == "x.size(1) was 5, now 101 (compiled for 2…100)"
    assert why(torch.empty(4, 5, 7)) == "x.size(2) was 6, now 7"
    assert why(torch.empty(4, 5, 8)[..., :6]) == "x.stride(1) is 8, and 6 in the layout compiled for"
    assert why(torch.empty(5, 4, 6).transpose(0, 1)) == "x.stride(0) is 6, and 120 in the layout compiled for"
    assert why(torch.empty(4, 5)) == "x.rank was 3, now 2"
    assert why(torch.empty(4, 5, 6, dtype=torch.int64)) == "x.dtype was torch.float32, now torch.int64"
    assert why(torch.empty(4, 5, 6, requires_grad=True)) == "x.requires_grad was False, now True"
    assert why(torch.nn.Parameter(torch.empty(4, 5, 6))).startswith("x was of type torch.Tensor")
    assert why(3).startswith("x was of type torch.Tensor, now builtins.int")


@pytest.mark.parametrize("seed", range(10))
def test_agreement_on_random_tensors(seed):
    rng = random.Random(seed)

    def tensor():
        sizes = [rng.randrange(4) for _ in range(rng.randrange(1, 8))]
        x = torch.empty([n + rng.randrange(2) for n in sizes])[tuple(slice(0, n) for n in sizes)]
        return x.permute(*rng.sample(range(x.dim()), x.dim()))

    for _ in range(30):
        x = tensor()
        free = {i: Free(rng.randrange(x.shape[i] + 1)) for i in range(x.dim()) if rng.random() < 0.5}
        guards, built = guarded(shaped(x, free, {i for i in range(x.dim()) if rng.random() < 0.3}))
        assert agree(guards, built, (x, 0)) is None
        for _ in range(20):
            agree(guards, built, (tensor(), 0))


def test_numbers():
    guards, built = guarded(AnyNumber(N, int, 3))
    assert all(agree(guards, built, (0, n)) is None for n in (0, -5, MOST, -MOST))
    assert agree(guards, built, (0, 2**63)) == f"n was 3, now {2**63}, which no machine word holds"
    assert agree(guards, built, (0, -(2**63))) is not None
    assert agree(guards, built, (0, True)) == "n was of type builtins.int, now builtins.bool"
    guards, built = guarded(AnyNumber(N, float, 0.5))
    assert all(agree(guards, built, (0, n)) is None for n in (0.0, float("nan"), float("inf")))
    assert agree(guards, built, (0, 1)) == "n was of type builtins.float, now builtins.int"


def conditions(*sources):
    reads = (Read(X, "size", 0), Read(X, "stride", 0), *map(Read, sources))
    statements = (
        ("x.size(0) % 2 == 0", lambda size, stride, n: size % 2 == 0),
        ("x.stride(0) < n", lambda size, stride, n: stride < n),
    )
    return Conditions(reads, lambda *v: all(f(*v) for _, f in statements), statements, (4, 3, 9))


def test_conditions_over_sizes_strides_and_numbers():
    guards, built = guarded(shaped(torch.empty(4, 3), {0: Free(2)}, {0}), AnyNumber(N, int, 9), conditions(N))
    assert agree(guards, built, (torch.empty(6, 3), 9)) is None
    assert agree(guards, built, (torch.empty(5, 3), 9)) == "x.size(0) was 4, now 5: compiled for x.size(0) % 2 == 0"
    assert agree(guards, built, (torch.empty(6, 3), 3)) == "n was 9, now 3: compiled for x.stride(0) < n"
    assert str(guards.guards[-1]) == "x.size(0) % 2 == 0 and x.stride(0) < n"
    fewer = failure(guards.guards[-1], (torch.empty(()), 9), "a line")
    assert fewer.place == "a line" and "can no longer be read" in str(fewer)


class Box:
    n = 0


def test_numbers_of_a_pinned_object_may_change():
    box = Box()
    box.n = 9
    path = DictAttr(Const(box, "box"), "n")
    guards, built = guarded(shaped(torch.empty(4, 3), {0: Free(2)}, {0}), AnyNumber(path, int, 9), conditions(path))
    for n in (9, 9, 5, 2, 7, 7.0, 7, 3, 4, 4):
        box.n = n
        holds = agree(guards, built, (torch.empty(6, 3), 0)) is None
        assert holds == (type(n) is int and n > 3)


def test_a_tensor_of_a_pinned_object_may_change_in_size():
    box = Box()
    box.t = torch.empty(4, 3)
    source = DictAttr(Const(box, "box"), "t")
    match = ShapedMatch.of(source, box.t, *plan((4, 3), (3, 1), {0: Free(2)}, frozenset()))
    guards, built = guarded(match)
    for n, holds in ((4, True), (4, True), (5, True), (1, False), (6, True), (6, True)):
        box.t = torch.empty(n, 3)
        assert (agree(guards, built, ()) is None) is holds
    box.t.resize_(2, 2)
    assert agree(guards, built, ()) == "box.t.size(1) was 3, now 2"


def test_what_varies_between_calls():
    x = torch.empty(4, 5)
    names = {str(read) for read in varying([TensorMatch.of(X, x), Equals(N, 3)], (torch.empty(4, 6), 4))}
    assert names == {"x.size(1)", "x.stride(0)", "n"}
    assert varying([TensorMatch.of(X, x), Equals(N, 3)], (x, 3)) == set()
    assert {str(r) for r in varying([shaped(x, {0: Free(2)}), AnyNumber(N, int, 3)], (x, 3))} == {"x.size(0)", "n"}
    assert varying([Equals(N, True), Equals(Attr(N, "gone"), 3), Equals(N, "a")], (x, False)) == set()
