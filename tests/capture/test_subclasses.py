"""Tensor subclasses: classes with Python in them, and classes made of other tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from kiln.base import records
from tests.support import EAGER, kiln

pytestmark = pytest.mark.skipif(EAGER, reason="asks Kiln itself")


class Plain(torch.Tensor):
    """A class that adds nothing."""


class Noted(torch.Tensor):
    """A class that carries a note from op to op."""

    note = 1
    unit: str

    def __init__(self, *args, **kw):
        self.unit = "m"

    @property
    def twice(self):
        return self.note * 2

    @twice.setter
    def twice(self, value):
        self.note = value // 2

    def scaled(self, by):
        return self * by + self.note

    def to(self, *args, **kw):
        made = super().to(*args, **kw)
        made.note = self.note + 10
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, cls) and isinstance(args[0], cls):
            out.note = args[0].note
        return out


class Swapped(torch.Tensor):
    """A class that gives other ops than those asked for."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        swapped = {torch.sin: torch.cos, torch.Tensor.add: torch.Tensor.sub, torch.Tensor.__rsub__: torch.add}
        with torch._C.DisableTorchFunctionSubclass():
            return swapped.get(func, func)(*args, **(kwargs or {}))


class Quantized(torch.nn.Parameter):
    """A parameter with a note, as files of quantised weights make them."""

    def __new__(cls, data, requires_grad=False, scale=None):
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    def __init__(self, *args, scale=None, **kw):
        self.scale = scale

    def plain(self):
        return torch.Tensor._make_subclass(torch.Tensor, self, self.requires_grad)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        scale = next((a.scale for a in args if isinstance(a, cls)), None)
        return cls(out, scale=scale) if isinstance(out, torch.Tensor) else out


class Added(torch.Tensor):
    """A class with an operator of its own."""

    def __add__(self, other):
        return torch.Tensor.mul(self, other)

    __radd__ = __add__


class Holder:
    """No tensor, and yet torch functions take it."""

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [a.inner if isinstance(a, Holder) else a for a in args]
        return Holder(func(*plain, **(kwargs or {})))


class Pair(torch.Tensor):
    """Two tensors and a factor that go as one."""

    @staticmethod
    def __new__(cls, a, b, factor=1):
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a, b, factor=1):
        self.a, self.b, self.factor = a, b, factor

    def __repr__(self):
        return f"Pair({self.a}, {self.b})"

    def __tensor_flatten__(self):
        return (["a"] if self.b is None else ["a", "b"]), self.factor

    @staticmethod
    def __tensor_unflatten__(parts, factor, size, stride):
        return Pair(parts["a"], parts.get("b"), factor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        pairs = [a for a in args if isinstance(a, Pair)]
        factor = pairs[0].factor
        first = func(*[a.a if isinstance(a, Pair) else a for a in args], **(kwargs or {}))
        other = None
        if pairs[0].b is not None:
            other = func(*[a.b * factor if isinstance(a, Pair) else a for a in args], **(kwargs or {}))
        if not isinstance(first, torch.Tensor):
            return first
        return return_and_correct_aliasing(func, args, kwargs or {}, Pair(first, other, factor))


def of(kind, *size, note=None, grad=False):
    x = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size).as_subclass(kind)
    if note is not None:
        x.note = note
    return x.requires_grad_() if grad else x


def state(value):
    """What is compared of a result."""
    if isinstance(value, (tuple, list)):
        return type(value), [state(v) for v in value]
    if isinstance(value, Pair):
        return Pair, state(value.a), state(value.b), value.factor, value.requires_grad
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            rounded = value.detach().as_subclass(torch.Tensor).mul(1000).round().tolist()
            numbers = rounded, value.requires_grad, value.stride()
        return type(value), numbers, {k: v for k, v in vars(value).items() if k != "inner"}
    return (Holder, state(value.inner)) if isinstance(value, Holder) else value


def same(f, *makers, backend="eager", graphs=1):
    """Twice compiled in one graph, as in eager, results and arguments."""
    seen = []

    def counting(gm, inputs):
        seen.append(gm)
        return kiln.lookup_backend(backend)(gm, inputs)

    compiled = kiln.compile(f, backend=counting, fullgraph=True)
    for _ in range(2):
        mine, theirs = [m() for m in makers], [m() for m in makers]
        assert state(compiled(*mine)) == state(f(*theirs))
        assert [state(v) for v in mine] == [state(v) for v in theirs]
    assert len(seen) == graphs
    return seen


def methods(x):
    return x.scaled(3), x.twice, x.to(torch.float64), x.unit if hasattr(x, "unit") else None, x.T, x[0] + 1, 2 - x


def written(x):
    x.twice = 8
    y = x * 2
    y.add_(1)
    x.add_(y)
    return y, x, y is x, isinstance(y, Noted), type(y) is Noted


def several(x, y):
    return torch.cat([x, y]), torch.stack((y, x)), x.split(2), torch.nn.functional.relu(x - y), x.max(), x.max(0)[0]


PROGRAMS = [
    (methods, [lambda: of(Noted, 3, 2, note=5)]),
    (methods, [lambda: of(Noted, 2, 2, grad=True)]),
    (written, [lambda: of(Noted, 4)]),
    (several, [lambda: of(Noted, 4, note=7), lambda: of(Noted, 4)]),
    (several, [lambda: of(Plain, 4), lambda: torch.ones(4)]),
    (lambda x: (torch.sin(x), x.sin(), x + 1, 1 - x, x.shape, x * x), [lambda: of(Swapped, 4)]),
    (lambda x: (x + 2, 2 + x, x * 2), [lambda: of(Added, 4)]),
    (lambda x: ((x * 2 + (x * 2).scale).plain() * 3, x @ x), [lambda: Quantized(torch.eye(2), scale=4)]),
    (lambda x: Noted(x * 2) + 1, [lambda: torch.ones(3)]),
    (lambda x: (x.as_subclass(Plain), x.as_subclass(Noted).scaled(2)), [lambda: torch.ones(3)]),
    (lambda h: torch.mul(h, torch.ones(2)), [lambda: Holder(torch.arange(2.0))]),
    (lambda x: (x.as_subclass(torch.Tensor).mul_(2), x), [lambda: of(Noted, 3)]),
]


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize(("f", "makers"), PROGRAMS)
def test_a_class_with_python_in_it(f, makers, backend):
    same(f, *makers, backend=backend)


def test_gradients_reach_the_tensor_of_the_class():
    x, y = of(Noted, 3, grad=True), of(Noted, 3, grad=True)
    kiln.compile(lambda x: x.scaled(x), fullgraph=True)(x).sum().backward()
    y.scaled(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_parameter_of_a_class_is_read_anew_in_each_call():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Quantized(torch.ones(3), scale=2)

        def forward(self, x):
            return x * self.weight.plain() + self.weight.scale

    module = Scale()
    compiled = kiln.compile(module, fullgraph=True)
    x = torch.arange(3.0)
    assert torch.equal(compiled(x), x + 2)
    module.weight.data.fill_(5)
    assert torch.equal(compiled(x), 5 * x + 2)
    module.weight.scale = 7
    assert torch.equal(compiled(x), 5 * x + 7)


@pytest.mark.parametrize("kind", [torch.Tensor, Plain, Noted])
def test_a_parameter_of_a_class_is_of_that_class(kind):
    def f(x):
        p = torch.nn.Parameter(x)
        module = torch.nn.Module()
        module.weight = p
        facts = type(p), isinstance(p, torch.nn.Parameter), isinstance(x, torch.nn.Parameter), type(p + 1), p.is_leaf
        return p, facts, [name for name, _ in module.named_parameters()]

    (p, *facts), (q, *known) = (g(torch.ones(3).as_subclass(kind)) for g in (kiln.compile(f, backend="eager"), f))
    assert facts == known and type(p) is type(q) and p.equal(q) and isinstance(p, torch.nn.Parameter)


TOLD: list = []


class Telling(torch.Tensor):
    """A class that notes what it is told of."""

    __slots__ = ("left",)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("mul", "sum", "grad", "backward"):
            TOLD.append((func.__name__, args[0].left if hasattr(args[0], "left") else None))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("back", [torch.Tensor.backward, torch.autograd.backward])
def test_the_class_is_told_of_backward_and_gradients_are_plain(back, backend):
    def f(x):
        back((x * 2).sum())
        return x.grad

    def seen(f):
        TOLD.clear()
        x = torch.ones(3).as_subclass(Telling).requires_grad_()
        x.left = 3
        return type(f(x)), type(x.grad), x.grad.tolist(), list(TOLD)

    assert seen(kiln.compile(f, backend=backend)) == seen(f)


def test_parameters_are_written_as_parameters():
    p = torch.nn.Parameter(torch.ones(2))
    assert kiln.compile(lambda p: p.__repr__(), backend="eager")(p) == repr(p)


def test_another_class_or_note_is_another_graph():
    compiled = kiln.compile(lambda x: x.scaled(2) if isinstance(x, Noted) else x + 1, fullgraph=True)
    for x in (of(Noted, 3), of(Noted, 3, note=9), torch.ones(3), of(Plain, 3), of(Noted, 3, note=9)):
        expected = x.scaled(2) if isinstance(x, Noted) else x + 1
        assert state(compiled(x)) == state(expected)


def test_a_class_across_a_break():
    def f(x):
        y = x * 2
        y.note = 4
        kiln.graph_break()
        with torch._C.DisableTorchFunctionSubclass():
            z = torch.sin(y)
            kiln.graph_break()
            w = torch.cos(y)
        return y.scaled(2), z, w

    got, expected = kiln.compile(f, backend="eager")(of(Noted, 3)), f(of(Noted, 3))
    assert state(got) == state(expected)


def test_methods_that_native_code_looks_up_keep_the_frame_in_python():
    class Sized(torch.Tensor):
        def __len__(self):
            return 99

    x = torch.ones(3).as_subclass(Sized)
    assert kiln.compile(len, backend="eager")(x) == 99
    with pytest.raises(kiln.Break, match="tensor-subclass"):
        kiln.compile(lambda x: len(x), fullgraph=True)(x)


def pair(*size, b=True, factor=2, grad=False):
    x = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
    return Pair(x.clone().requires_grad_(grad), x + 10 if b else None, factor)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("f", [
    lambda x: (x * 2).sin(),
    lambda x: (x.t().contiguous(), x.shape, x.dtype, x is x, type(x) is Pair, isinstance(x + 1, Pair)),
    lambda x: ((x + 1).a * 2, (x + 1).factor, x.b, x),
    lambda x: (x.add_(1), x),
    lambda x: x.view(-1)[1:].mul_(2),
    lambda x: torch.nn.functional.linear(torch.ones(4, 3), x),
])  # fmt: skip
def test_a_class_made_of_tensors(f, backend):
    same(f, lambda: pair(2, 3), backend=backend)


def test_parts_and_facts_of_a_class_made_of_tensors_are_guarded():
    seen = []
    compiled = kiln.compile(lambda x: x * 2, fullgraph=True, backend=lambda gm, _: seen.append(gm) or gm)
    for count, x in ((1, pair(2, 3)), (1, pair(2, 3)), (2, pair(2, 3, b=False)), (3, pair(2, 3, factor=3)),
                     (4, pair(3, 3)), (4, pair(2, 3, factor=3))):  # fmt: skip
        assert state(compiled(x)) == state(x * 2)
        assert len(seen) == count


def test_sizes_of_a_class_made_of_tensors_vary():
    for dynamic, marked, graphs in ((True, False, 1), (None, True, 1), (None, False, 2), (False, False, 3)):
        seen = []
        compiled = kiln.compile(lambda x: (x * 2, x.shape[0] + 1, x.a.shape[1], x.mean()), fullgraph=True, dynamic=dynamic,
                                backend=lambda gm, _, seen=seen: seen.append(gm) or gm)  # fmt: skip
        for size in ((2, 3), (4, 5), (6, 7)):
            x = pair(*size)
            if marked:
                kiln.mark_dynamic(x, 0)
                kiln.mark_dynamic(x, 1)
            assert state(compiled(x)) == state((x * 2, x.shape[0] + 1, x.a.shape[1], x.mean()))
        assert len(seen) == graphs


class Sized(torch.Tensor):
    """A tensor in another, of the sizes that it is told."""

    @staticmethod
    def __new__(cls, a, size=None):
        size = a.shape if size is None else size
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=a.dtype, device=a.device)

    def __init__(self, a, size=None):
        self.a = a

    def __tensor_flatten__(self):
        return ["a"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Sized(parts["a"], size)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        first = func(*[a.a if isinstance(a, Sized) else a for a in args], **(kwargs or {}))
        return Sized(first, args[0].shape)


def test_sizes_that_a_class_made_of_tensors_is_told_vary_as_those_of_its_parts():
    def f(x):
        y = x * 2
        return y.a, y.shape, x.shape[0] + 1

    for dynamic, marked, graphs in ((True, False, 1), (None, True, 1), (None, False, 2)):
        seen = []
        compiled = kiln.compile(f, fullgraph=True, dynamic=dynamic,
                                backend=lambda gm, _, seen=seen: seen.append(gm) or gm)  # fmt: skip
        for size in ((2, 3), (4, 5), (6, 7)):
            x = Sized(torch.ones(size))
            if marked:
                kiln.mark_dynamic(x, (0, 1))
            assert state(compiled(x)) == state(f(x))
        assert len(seen) == graphs
        other = Sized(torch.ones(4, 4), torch.Size((2, 8)))
        assert state(compiled(other)) == state(f(other))
        assert len(seen) == graphs + 1


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_gradients_of_a_class_made_of_tensors(backend):
    mine, theirs = pair(2, 3, grad=True), pair(2, 3, grad=True)
    kiln.compile(lambda x: (x * x).sum(), fullgraph=True, backend=backend)(mine).backward()
    (theirs * theirs).sum().backward()
    assert state(mine.grad) == state(theirs.grad)


def test_a_weight_made_of_tensors():
    module = torch.nn.Linear(3, 2, bias=False)
    module.weight = torch.nn.Parameter(pair(2, 3), requires_grad=False)
    x = torch.ones(4, 3)
    assert state(kiln.compile(module, fullgraph=True)(x)) == state(module(x))


class Claiming(torch.Tensor):
    @property
    def shape(self):
        return torch.Size([7])


def test_sizes_are_the_tensors_whatever_its_class_says_of_its_shape():
    def f(x):
        return x * 2, x.sum(0), x.shape

    compiled = kiln.compile(f, fullgraph=True)
    for size in ((3, 4), (5, 2), (5, 2)):
        x = torch.randn(size).as_subclass(Claiming)
        expected, got = f(x), compiled(x)
        assert got[2] == expected[2] == (7,)
        for a, b in zip(expected[:2], got[:2], strict=True):
            assert type(a) is type(b) is Claiming and a.size() == b.size()
            torch.testing.assert_close(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor))


def test_parameters_without_a_size_are_left_to_python():
    module = torch.nn.LazyLinear(3)
    compiled = kiln.compile(module)
    with records.collect() as log:
        out = compiled(torch.randn(2, 5))
    assert out.shape == (2, 3) and not log.fallbacks
    assert {b.kind for b in log.breaks} <= {"tensor-subclass"}


@pytest.mark.parametrize("kind", [torch.Tensor, Plain, Noted])
def test_tensors_of_a_class_are_told_that_they_require_grad(kind):
    def f(x):
        x.requires_grad_()
        return x.detach().view_as(x).requires_grad_()

    x = torch.ones(3).as_subclass(kind)
    made = kiln.compile(f, backend="eager")(x)
    assert all(t.requires_grad and t.is_leaf and type(t) is kind for t in (x, made))


@pytest.mark.skipif(EAGER, reason="asks Kiln itself")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
def test_a_call_of_the_graph_gives_a_class_made_of_tensors(backend):
    two = kiln.allow_in_graph(lambda x: (Pair(x.clone(), x + 1, 3), x * 2))
    same(lambda x: two(x)[0].view(-1), lambda: torch.ones(2, 2), backend=backend)
    same(lambda x: (two(x)[0], two(x)[1] + 1), lambda: torch.ones(2), backend=backend)


@pytest.mark.skipif(EAGER, reason="asks Kiln itself")
def test_a_call_of_the_graph_gives_an_object_with_tensors():
    @kiln.allow_in_graph
    def held(x):
        holder = Holder(x)
        holder.inner = x + 1
        return holder

    with records.collect() as seen:
        assert kiln.compile(lambda x: held(x).inner * 2, backend="eager")(torch.ones(2)).tolist() == [4, 4]
    assert [record.kind for record in seen.breaks] == ["foreign-object"] and not seen.fallbacks
