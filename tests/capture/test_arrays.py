"""numpy in compiled programs: arrays over tensors are recorded, arrays passed in are inputs, contents are asked on demand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kiln
from kiln.base import records
from tests.same import Same
from tests.support import EAGER, Counting, Watch, one_graph, pin, program, same_as_eager, t

needs_kiln = pytest.mark.skipif(EAGER, reason="asks Kiln itself")

# Values whose sums and products are exact: numpy and torch add in different orders.
X = torch.arange(12.0).reshape(3, 4) - 4
A = np.arange(6.0).reshape(2, 3) - 2


@program(X)
def test_functions_and_methods(x):
    a = x.numpy()
    return np.mean(a, 1), a.T, a.reshape(4, 3), np.concatenate([a, a * np.float32(2)]), a.max(axis=0), np.where(a > 0, a, 0)


@program(X)
def test_back_to_tensors(x):
    a = (x + 1).numpy() * 2
    return torch.from_numpy(a) + 1, torch.tensor(a), torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(a.sum())


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("array", [np.array(2.0), np.arange(4.0), np.arange(4, dtype=np.float32)])
def test_operators_of_a_tensor_and_an_array_are_those_of_numpy(array):
    r = same_as_eager(lambda x, a: (x + a, x * a - a, (x - 1) @ np.ones(4), x == np.ones(4)), X, array)
    pin(r)


@program(A)
def test_arrays_are_inputs(a):
    return a.sum() / len(a), np.linalg.norm(a[0]), [row * 2 for row in a], a.dtype, a.shape, a @ a.T


@program(A)
def test_scalars_are_scalars(a):
    one = a[1, 1]
    return one, type(one) is np.float64, isinstance(one, float), isinstance(one, np.ndarray), isinstance(a, np.ndarray), type(a)


@program(X, np.float64(0.5), np.int64(3), np.bool_(True))
def test_scalars_in_lists_have_dtypes(x, half, three, true):
    listed = [half, 1]
    return torch.tensor(listed), torch.tensor([[three / 4], [2.5]]), torch.as_tensor((three, 1.5, x.sum())), torch.tensor([true])


@program(X, np.bool_(True))
def test_a_truth_is_a_number(x, true):
    return torch.full((2,), true), x.long() + true, torch.arange(true), x * true


def test_scalars_in_a_list_that_goes_on_after_a_break():
    def weigh(x):
        places, weights = x.numpy(), []
        for j in range(places[0]):
            weights.append(1 - (places[1] - j) / 40)
        return torch.tensor(weights)

    pin(same_as_eager(weigh, torch.tensor([2, 3])), breaks=1, graphs=2)


@program(A)
def test_writes_go_through_views(a):
    row, kept = a[0], a[1, 1]
    row[:] = 5.0
    a[1, 1] = 7.0
    a += 1
    return a, row, kept


@program(A, breaks=1, graphs=1)
def test_what_tensors_do_not_have_runs_in_numpy(a):
    b = a * 2
    return b, b[::-1]


@program(A.astype(np.uint8), breaks=1, graphs=1)
def test_other_dtypes_than_numpys_run_in_numpy(a):
    return (a + a).sum()


@program(A, breaks=1, graphs=2)
def test_memory_that_leaves(a):
    a += 1
    text = a.tobytes()
    a += 1
    return text, a


@program(X, np.array([4, 3]))
def test_contents_on_demand(x, shape):
    return x.reshape(tuple(shape)), x * int(shape[0]), x * float(shape.sum())


@program(A, breaks=1, graphs=2)
def test_an_array_lives_across_a_break(a):
    b = a * 2
    kiln.graph_break()
    return b + 1, b


@program(t(3, grad=True), raises=RuntimeError)
def test_numpy_of_a_tensor_with_gradient(x):
    return x.numpy()


@program(t(3, grad=True))
def test_numpy_by_force(x):
    return x.numpy(force=True)


def test_other_contents_do_not_recompile():
    backend = Counting()
    compiled = kiln.compile(lambda a: np.multiply(a, 2.0).sum(0), backend=backend)
    for k in range(4):
        a = np.arange(6.0).reshape(2, 3) + k
        assert np.array_equal(compiled(a), np.multiply(a, 2.0).sum(0))
    assert len(backend.modules) == 1
    for a in (np.arange(6.0), np.arange(6)):
        assert np.array_equal(compiled(a), np.multiply(a, 2.0).sum(0))
    assert len(backend.modules) == 3


def test_contents_that_were_asked_for_are_guarded():
    compiled = kiln.compile(lambda x, a: x * float(a[0]), backend="eager")
    for k in range(4):
        assert compiled(X, np.array([k, 1])).equal(X * float(k))


def test_results_share_memory_as_in_numpy():
    compiled = kiln.compile(lambda x, a: (x.numpy(), a.T, a, a + 0), backend="eager", fullgraph=True)
    x, a = X.clone(), A.copy()
    view, turned, same, fresh = compiled(x, a)
    x[0, 0], a[0, 0] = 50.0, 60.0
    assert view[0, 0] == 50.0 and turned[0, 0] == 60.0 and same is a and fresh[0, 0] != 60.0


@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int8, np.int64, np.bool_, np.complex128])
def test_every_kind_of_number(kind):
    a = np.array([0, 1, 1, 0]).astype(kind)
    r = same_as_eager(lambda a: (a + a, a.sum(), a == 1, a.astype(np.complex128), np.stack([a, a])), a)
    pin(r, 1, 0)


# ---------------------------------------------------------------------- scalars


SCALED = {
    "times": lambda x, y: x * y,
    "reflected": lambda x, y: y * x,
    "keyword": lambda x, y: torch.clamp(x, max=y),
    "filled": lambda x, y: x.clone().fill_(y),
    "returned": lambda x, y: (x + 1, y, y + y),
    "tensor": lambda x, y: torch.as_tensor(y) + x,
    "item": lambda x, y: x * y.item() + 1,
}
LOOKED_AT = {
    "branch": lambda x, y: x + 1 if y > 3 else x - 1,
    "int": lambda x, y: x * int(y),
    "key": lambda x, y: {y: x}[y] * 2,
    "mixed": lambda x, y: x * (y * 2 + np.sqrt(y)),
}


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64], ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", [*SCALED, *LOOKED_AT])
def test_a_scalar_that_varies(name, kind):
    f = {**SCALED, **LOOKED_AT}[name]
    for x in (torch.rand(3), torch.rand(3, dtype=torch.float64), torch.arange(3)):
        kiln.reset()
        compiled = kiln.compile(f, backend="eager", fullgraph=True)
        with kiln.records() as seen:
            for i in range(2, 6):
                torch.testing.assert_close(compiled(x, kind(i)), f(x, kind(i)), rtol=0, atol=0)
        assert len(seen.graphs) == (2 if name in SCALED else 4)


@pytest.mark.parametrize("value", [np.float64(0.5), np.array(0.5), np.float32(0.5), np.int8(3)])
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor], ids=lambda f: f.__name__)
def test_a_tensor_of_one_element_has_the_dtype_of_the_scalar(make, value):
    def f(x):
        return make(value), make(value) + x

    for x in (torch.ones(2), torch.arange(2)):
        got, want = kiln.compile(f, backend="eager", fullgraph=True)(x), f(x)
        assert [a.dtype for a in got] == [a.dtype for a in want]
        torch.testing.assert_close(got, want)


@program(np.arange(1, 7))
def test_integers_are_divided_in_doubles(a):
    return a / 4, 2 / a, np.true_divide(a, a.sum())


def test_integers_that_vary_are_divided_in_one_graph():
    counting = Counting()
    compiled = kiln.compile(lambda x, n: (x + 1, n / 2), backend=counting)
    for n in range(1, 6):
        got = compiled(X, np.int64(n))[1]
        assert type(got) is np.float64 and got == n / 2
    assert len(counting.modules) == 2


def test_an_array_of_a_size_that_varies():
    def f(x):
        return x.numpy().sum(), x * 2

    with kiln.config.patch(strict=True):
        compiled = kiln.compile(f, dynamic=True)
        for n in (2, 3, 5):
            assert compiled(torch.ones(n))[0] == n


ONE_GRAPH_FOR_ALL = {
    "sum": lambda a, n: (a.sum() / n, a.mean(), np.stack([a, a])),
    "facts": lambda a, n: (a + a.shape[0], a.size, a.nbytes, a.strides, a.ndim),
    "operators": lambda a, n: (a - n * 2, n * a, a // n, a * np.float64(2)),
    "views": lambda a, n: (a.reshape(-1, 1), a[: n - 1], a[::2], a.T),
    "filled": lambda a, n: (np.zeros((n, 2)), np.full((n,), 7.0), np.arange(n) * 2, a[0] * np.eye(n)),
    "joined": lambda a, n: np.concatenate([a, np.ones(n)]),
    "to torch": lambda a, n: (torch.tensor(np.arange(n)) + 1, torch.from_numpy(a) * n),
}


@needs_kiln
@pytest.mark.parametrize("name", ONE_GRAPH_FOR_ALL)
def test_sizes_of_arrays_vary_in_one_graph(name):
    f, counting = ONE_GRAPH_FOR_ALL[name], Counting()
    compiled = kiln.compile(f, backend=counting, fullgraph=True)
    for n in (2, 3, 4, 5):
        Same()(f(np.arange(n + 3.0), n), compiled(np.arange(n + 3.0), n))
    assert len(counting.modules) == 2


@needs_kiln
def test_a_size_that_numpy_must_know_is_held_to_it():
    def f(a, n):
        return np.tile(a, n), np.sqrt(n), len(a), [row + 1 for row in a]

    compiled = kiln.compile(f, backend="eager", fullgraph=True)
    for n in (2, 3, 4):
        Same()(f(np.arange(n + 1.0), n), compiled(np.arange(n + 1.0), n))


@needs_kiln
def test_an_array_of_another_kind_is_compiled_again():
    counting = Counting()
    compiled = kiln.compile(lambda a: a + 1, backend=counting)
    kinds = (np.arange(4.0), np.arange(4), np.arange(4.0).reshape(2, 2), np.arange(6.0)[::-1], np.float64(3), [1])
    for value in kinds[:-1] * 2:
        got, expected = compiled(value), value + 1
        assert type(got) is type(expected) and got.dtype == expected.dtype and np.array_equal(got, expected)
    with pytest.raises(TypeError):
        compiled(kinds[-1])


def tensor_written(array, tensor, x):
    tensor.add_(x)
    return array.sum() + 0, tensor * 2


def array_written(array, tensor, x):
    array[0] = 7
    return tensor * 2 + x


def written_in_turn(array, tensor, x):
    tensor.add_(x)
    array[0] = 7
    y = tensor * 2
    np.add(array, 1, out=array)
    return y, array.mean(), tensor + x


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
@pytest.mark.parametrize("shared", [tensor_written, array_written, written_in_turn])
@pytest.mark.filterwarnings("ignore")
def test_memory_of_an_array_and_a_tensor(shared, backend):
    """A tensor over the memory of an array has a storage of its own, and yet what one writes the other reads."""
    runs = []
    for compile in (lambda f: f, lambda f: kiln.compile(f, backend=backend)):
        kiln.reset()
        array = np.zeros(4, np.float32)
        tensor = torch.from_numpy(array)
        held = compile(lambda x, array=array, tensor=tensor: shared(array, tensor, x))
        given = compile(shared)
        with records.collect() as log:
            results = [held(torch.full((4,), float(i))) for i in range(4)]
            for i in range(3):
                other = np.full(4, float(i), np.float32)
                results += [given(other, torch.from_numpy(other), torch.ones(4)), other]
        runs.append((results, array, tensor))
    Same()(*runs)
    assert log.graphs


@needs_kiln
@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
@pytest.mark.filterwarnings("ignore")
def test_two_tensors_of_one_array(backend):
    def program(a, b):
        a.add_(1)
        return a * b

    compiled, array = kiln.compile(program, backend=backend), np.ones(3, np.float32)
    for _ in range(2):  # first apart, then over one memory
        Same()(program(torch.ones(3), torch.ones(3)), compiled(torch.ones(3), torch.ones(3)))
        one = torch.ones(3)
        Same()(program(one, one.view(3)), compiled(torch.from_numpy(array), torch.from_numpy(array)))
        array[:] = 1


def compared_after_a_write(tensor, array):
    tensor[0] += 1
    return torch.ones(3) == array, array.tolist()


@needs_kiln
def test_contents_are_read_after_writes_to_tensors_over_the_same_memory():
    compiled = kiln.compile(compared_after_a_write, backend="eager")
    for shared in (False, True, False):
        tensors = [torch.ones(3), torch.ones(3)]
        arrays = [x.numpy() if shared else np.ones(3, np.float32) for x in tensors]
        mine, eager = (f(x, a) for f, x, a in zip((compiled, compared_after_a_write), tensors, arrays, strict=True))
        torch.testing.assert_close(mine, eager)


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_tensors_of_constant_arrays_with_holes(backend):
    def f():
        x = np.arange(30.0).reshape(5, 6)
        return torch.from_numpy(x[:, 1]), torch.from_numpy(x[::2, ::3]), torch.as_tensor(x.T)

    torch.testing.assert_close(kiln.compile(f, backend=backend)(), f())


def indexed(x, places, mask):
    y = x * 2
    y[places, 0] = 1
    return x[places], x[:, places[:2]], x[places[:, None], places[None]], x[mask], y


def test_tensors_are_indexed_by_arrays_of_any_contents():
    watch = Watch(indexed)
    for kind in (np.int64, np.int32):
        for first in range(3):
            mask = np.arange(4) >= first % 2
            watch(torch.arange(16.0).view(4, 4), np.arange(3, dtype=kind)[::-1].copy() + first % 2, mask)
    watch.pin(graphs=2, breaks=0, recompiles=1)


def given_tensors(x, y, a):
    made = np.ones_like(x, dtype=np.float64), np.full_like(x, 2.4), np.concatenate([x, y, a]), np.where(x > 0, x, y)
    shared = np.broadcast_to(y, (2, 3, 4))
    y.add_(1)
    return *made, shared, np.negative(x), np.maximum(x, a), np.dot(x, y.T), np.add(x, y, out=a)


@pytest.mark.filterwarnings("ignore:__array")
def test_functions_of_numpy_see_arrays_in_tensors():
    one_graph(given_tensors, X, X + 1, np.ones((3, 4), np.float32))


@pytest.mark.filterwarnings("ignore:__array")
@pytest.mark.parametrize("f", [
    lambda x: np.isnan(x), lambda x: np.divmod(x, 2.0), lambda x: np.sin(x.sum()), lambda x: np.clip(x, 0, 0.5),
    lambda x: np.transpose(x), lambda x: np.sum(x), lambda x: np.sin(x.clone().requires_grad_()), lambda x: np.where(x),
])  # fmt: skip
def test_other_functions_of_numpy_run_in_python(f):
    r = same_as_eager(f, t(3, 4))
    assert EAGER or r.breaks or r.raised
