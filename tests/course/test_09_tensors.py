"""Tensors in programs: indexing and assignment, in-place ops, views, out=, shapes, scalars, numpy, hooks, grad calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support import How, one_graph, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
B = t(2, 3, 4)
ROWS = torch.tensor([2, 0])
MASK = torch.tensor([True, False, True])

INDEXES = """
0
-1
1, 2
..., 0
:
1:
:-1
::2
:, 1:3
None
None, ..., None
:, None, 1
...
0, ..., -1
r
r, 1
:, r
r, r
[0, 1]
:, [2, 0, 1]
r[:, None], r[None]
(0, 1)
slice(0, 2)
slice(None), slice(1, 3)
1:n
n - 1
None, r
r, None
x.shape[0] - 1
"""


@pytest.mark.parametrize("index", INDEXES.strip().splitlines())
def test_index_and_assign(index):
    scope = {"torch": torch}
    read = eval(f"lambda x, r, n: x[{index}] * 2", scope)
    one_graph(read, G, ROWS, 2)
    one_graph(read, B, torch.tensor([1, 0]), 2)
    exec(f"def write(x, r, n):\n    y = x * 1\n    y[{index}] = 5\n    x[{index}] += 1\n    return y, x[{index}].shape", scope)
    one_graph(scope["write"], X, ROWS, 2)


@program(X, MASK)
def test_mask_assignment(x, mask):
    x[mask] = 7
    x[x > 1] = -1.0
    y = x.clone()
    y[~mask, 1] = 3
    return y


@program(X)
def test_factories_are_given_their_results(x):
    y, z, noise = torch.empty(3, 4), x.clone(), torch.empty_like(x)
    torch.ones(y.size(), out=y)
    torch.arange(12, out=z.view(-1))
    torch.randn(3, 4, out=noise)
    x.add_(torch.full(x.shape, 2.0, out=y))
    return x * y + z, noise


@program(X, MASK)
def test_mask_read(x, mask):
    y = x * 2
    z = y[mask]
    return z + 1


@program(G)
def test_assign_tensors_and_gradients(x):
    y = torch.zeros(3, 4)
    y[0] = x[1]
    y[:, 1] = x[:, 2] * 2
    y[1:, 2:] = x[:2, :2]
    y[..., -1] += x.sum(1)
    return y


@program(X)
def test_delete_is_refused(x):
    try:
        del x[0]
    except TypeError as e:
        return x + 1, str(e)


@program(X, t(3, 4))
def test_in_place_on_arguments(x, y):
    x.add_(1).mul_(y)
    y += x
    y *= 2
    x -= 1
    x.zero_()
    return x + y, x is x.add_(3)


@program(G)
def test_in_place_on_intermediates_with_gradients(x):
    y = x * 2
    y.add_(1)
    y.mul_(x)
    y[0].zero_()
    z = y.relu()
    z += 1
    return z


@program(G, raises=RuntimeError)
def test_in_place_on_a_leaf_that_requires_grad(x):
    x.add_(1)
    return x


@program(G)
def test_in_place_on_a_leaf_under_no_grad(x):
    with torch.no_grad():
        x.mul_(2)
        x -= 0.1
    return x * 3


@program(X)
def test_views_share_memory(x):
    v = x.view(12)
    row, col, tr = x[0], x[:, 1], x.T
    v[0] = 100
    row.add_(1)
    tr.mul_(2)
    return v, row, col, tr, x.sum(), x[1:].unsqueeze(0)


@program(X)
def test_view_of_an_intermediate_is_written(x):
    y = x + 1
    z = y[1:]
    z.fill_(3)
    w = y.view(-1)[2:4]
    w += 10
    return y, z


@program(X)
def test_outputs_that_are_inputs_or_views(x):
    return x, x.view(-1), x.T, x[0], x.detach(), x + 0, x.expand(2, 3, 4)


def test_arguments_that_share_memory():
    base = t(12)
    one_graph(lambda a, b: (a.add_(1), b * 2, a + b), base, base)
    one_graph(lambda a, b: (a.add_(1), (b * 2).sum()), base, base.view(3, 4))
    one_graph(lambda a, b: (a.add_(1), b * 2), base[:4], base[2:6])


@program(X)
def test_out_arguments(x):
    out, low, idx = torch.empty(3, 4), torch.empty(3), torch.empty(3, dtype=torch.long)
    r = torch.add(x, 1, out=out)
    torch.min(x, 1, out=(low, idx))
    torch.mul(x, 2, out=x)
    torch.stack([low, low], out=(two := torch.empty(2, 3)))
    return r is out, out, low, idx, x, two


@program(X, torch.zeros(3, 4))
def test_out_argument_from_outside(x, out):
    torch.sin(x, out=out)
    return out + 1


@program(B)
def test_shape_arithmetic(x):
    b, n, d = x.shape
    half = d // 2
    y = x.view(b * n, d)[:, :half].reshape(b, n, -1, half)
    z = x.reshape(b, n, 2, half).transpose(1, 2).contiguous().view(b, 2 * n, -1)
    scale = x.size(-1) ** -0.5
    return y * scale, z, x.new_zeros(b, n + 1), torch.arange(n).expand(b, n), x.shape[:-1] + (half, 2), b * n * d == x.numel()


@program(X)
def test_sizes_in_conditions_and_loops(x):
    while x.shape[0] < 10:
        x = torch.cat([x, x])
    for _ in range(x.size(0) % 5):
        x = x[1:]
    return x if x.numel() % 2 else x * 2, tuple(x.size()), list(x.stride())


@program(X)
def test_dtypes_and_devices_compare(x):
    return (x + 1, x.dtype == torch.float32, x.dtype is torch.float32, x.dtype in (torch.half, torch.bfloat16), x.device == torch.device("cpu"),
            x.device.type == "cpu", x.device.index, str(x.device), x.dtype != x.long().dtype, x.is_floating_point(),
            {torch.float32: "f"}[x.dtype], torch.device("cpu") == x.device, x.layout == torch.strided)  # fmt: skip


@program(X, 2, 2.5, True)
def test_scalars_and_type_promotion(x, n, f, b):
    i = torch.arange(3)
    return x * n, x + f, x * b, i + n, i + f, i / 2, i // 2, i * True, x.half() + f, x.double() + x, i.int() + i, 2**i, -i, f * i


@program(X)
def test_zero_dimensional_tensors(x):
    s = torch.tensor(2.0)
    return x * s, x + torch.tensor(3), s * 2, s.expand(3), torch.stack([s, s]), x.sum().reshape(1), s.dim(), s.shape, x[0, 0] + s


@program(X)
def test_item_of_a_constant_tensor_may_fold(x):
    return x + 1, torch.tensor([1, 2, 3]).shape[0]


@program(X)
def test_tensor_constructors_from_tensors(x):
    return torch.tensor([[1, 2], [3, 4]]) * 2, torch.as_tensor(x) is x, x.clone(), torch.tensor(x.shape), torch.tensor([1.0], dtype=torch.float64)


@program(X)
def test_list_of_lists_with_python_numbers(x):
    pos = [[i * j for j in range(4)] for i in range(3)]
    return x + torch.tensor(pos), torch.tensor(pos, dtype=x.dtype, device=x.device) * x


@program(X, np.arange(4, dtype=np.float32))
def test_numpy_arrays_as_constants(x, a):
    return x * float(a.shape[0]), x + torch.tensor([1.0, 2.0, 3.0, 4.0]), a.dtype == np.float32


@program(X)
def test_numpy_of_a_tensor_is_part_of_the_graph(x):
    y = x * 2
    a = y.numpy()
    return y + 1, a.shape, a


@program(X)
def test_numpy_function_of_a_tensor_is_part_of_the_graph(x):
    y = x * 2
    a = np.square(y.numpy())
    return y + 1, a


@program(X)
def test_random_ops_in_a_program(x):
    keep = torch.rand_like(x) > 0.3
    noise = torch.randn(3, 4) * 0.1
    return F.dropout(x * keep + noise, 0.2, training=True), torch.randint(0, 10, (2,)), torch.randperm(4)


def test_seed_set_inside_gives_eager_numbers():
    def f(x):
        torch.manual_seed(3)
        a = torch.rand(2)
        torch.manual_seed(3)
        return x + 1, a, torch.rand(2)

    same_as_eager(f, X)


@program(G)
def test_detach_and_requires_grad(x):
    y = (x * 2).detach()
    z = y.requires_grad_()
    return x * y, z.requires_grad, y is z, x.requires_grad, (x * 2).requires_grad, x.detach().requires_grad


@program(G)
def test_tensor_hooks(x):
    y = x * 2
    y.register_hook(lambda g: g * 10)
    return y.sin()


def test_gradients_taken_inside():
    def by_grad(x):
        y = (x * x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g + 1

    def by_backward(x):
        (x * x).sum().backward()
        return x.grad * 2

    same_as_eager(by_grad, G)
    same_as_eager(by_backward, G)


@program(G)
def test_parameters_of_several_dtypes(x):
    h = x.to(torch.bfloat16)
    return (h @ h.T).float(), h.sum(), (h + 1).dtype, x.double().mean()


@program(torch.complex(t(3, 4), t(3, 4)))
def test_complex_arithmetic(c):
    return c * c.conj(), c.abs(), c.real + c.imag, torch.view_as_real(c).sum(-1), c @ c.mH, 1j * c, c.is_complex()


@program(t(2, 3, 4, 5))
def test_memory_formats(x):
    y = x.to(memory_format=torch.channels_last)
    z = y.relu()
    return z, z.is_contiguous(memory_format=torch.channels_last), z.stride(), y.contiguous(), torch.empty_like(y).stride()


@program(t(3, 4).T)
def test_strides_of_results_from_a_transposed_input(x):
    return x + 1, x.sum(0), x.contiguous(), x.reshape(-1), torch.zeros_like(x), x.clone(), x[1:] * 2, x.exp().T


@program(t(0, 4))
def test_empty_tensors(x):
    return x + 1, x.sum(), x.sum(0), torch.cat([x, torch.ones(1, 4)]), x.view(4, 0), x.numel() == 0, [r for r in x]


@program(X)
def test_chained_unpacking_of_results(x):
    values, indices = x.max(1)
    (a, b), c = x.split([1, 2])[1].unbind(), x.chunk(2, 1)[0]
    u = torch.topk(x, 2)
    return values + a[0], indices, b, c, u.values, u.indices, u[0] is u.values, type(u).__name__, len(u)


@program(X)
def test_result_tuples_keep_their_type(x):
    return x.sort(), torch.max(x, 1), torch.linalg.qr(x), torch.var_mean(x), x.split(2), x.unbind(1)


@program(G)
def test_attention_by_hand(x):
    q, k, v = (x @ x.T).unbind(0)
    s = torch.outer(q, k) / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(3, 3).tril() == 0, float("-inf"))
    return F.softmax(s, dim=-1) @ v


@program(X)
def test_where_clamp_and_masks(x):
    mask = (x > 0) & (x < 1) | (x == x.max())
    return torch.where(mask, x, -x), mask.float().sum(), (~mask).any(), x[:, 0].masked_fill(mask[:, 0], 9), mask.all(1)


@program(X)
def test_operators_with_reflected_python_numbers(x):
    return 1 + x, 2 - x, 3 * x, 1 / (x + 5), 2**x, 7 // (x + 5), 7 % (x + 5), True & (x > 0), 1 < x, 1 == x, 0 != x, -x, +x, abs(x)


@program(X)
def test_len_iter_and_contains_of_shapes(x):
    return [r.sum() for r in x], len(x), 4 in x.shape, x.shape.index(4), x.shape.count(3), [*x.shape], x.shape[-1:] + x.shape


@program(X)
def test_einsum_and_tensordot_with_lists(x):
    return torch.einsum("ij,ij->i", x, x), torch.tensordot(x, x, dims=2), torch.inner(x, x)


@program(X)
def test_functions_with_python_implementations(x):
    return torch.cartesian_prod(x[0], x[1]).shape, torch.block_diag(x, x), torch.meshgrid(x[0], x[1], indexing="xy"), torch.norm(x), \
        torch.atleast_3d(x).shape, torch.broadcast_tensors(x, x[0]), F.normalize(x), F.interpolate(x[None], 8), torch.cdist(x, x)  # fmt: skip


@program(X)
def test_namedtuple_results_and_keywords(x):
    r = torch.max(input=x, dim=1, keepdim=True)
    s = x.sum(dim=(0, 1), dtype=torch.float64)
    return r.values, s, torch.sum(input=x, dim=0), x.std(dim=1, correction=0), x.flatten(start_dim=0, end_dim=-1)


@program(X, F.relu)
@program(X, torch.Tensor.sin)
@program(X, torch.nn.functional.softplus)
def test_ops_given_as_arguments(x, op):
    return op(x) + op(x * 2)


@program(torch.nn.Parameter(t(3, 4)))
def test_parameter_argument(p):
    return p * 2, isinstance(p, torch.nn.Parameter), p.data + 1, p.detach() * 3


@program(X)
def test_parameter_made_inside(x):
    w = torch.nn.Parameter(torch.ones(4))
    return x * w, isinstance(w, torch.nn.Parameter), w.requires_grad


@program(X)
def test_set_data_and_copy(x):
    y = torch.zeros(3, 4)
    y.copy_(x)
    y.add_(1)
    return y, x.data is x, y.shape == x.shape


@program(G, how=How(options={"fullgraph": True}))
def test_full_graph_asked_for(x):
    return F.gelu(x @ x.T).sum()


@program(X)
def test_metadata_changed_in_place(x):
    y = x * 2
    y.t_()
    y.unsqueeze_(0).squeeze_(0)
    return y + 1, y.shape


def test_vmap_and_jvp_are_right():
    same_as_eager(lambda x: torch.vmap(torch.sin)(x) + 1, X)
    same_as_eager(lambda x: torch.func.grad(lambda v: (v * v).sum())(x), X)


def test_a_tensor_that_is_subclassed_gives_eager_results():
    class Tagged(torch.Tensor):
        def __deepcopy__(self, memo):
            return self.clone()

    same_as_eager(lambda x: x + 1, t(2).as_subclass(Tagged))


def test_an_index_tensor_without_dimensions_gives_eager_results():
    same_as_eager(lambda x, i: x[i] + x[torch.tensor(1)], X, torch.tensor(1))


SIZED = {
    "class": lambda x: torch.FloatTensor(x.size()).fill_(1),
    "integers": lambda x: torch.LongTensor(x.size()).fill_(1),
    "tensor": lambda x: torch.Tensor(x.shape).fill_(1),
    "like": lambda x: x.new(x.shape).fill_(1),
    "like a number": lambda x: x.sum().new(x.sum().shape).fill_(1),
    "constant": lambda x: x.new(torch.Size([2, 3])).fill_(1),
    "data": lambda x: x.new((2, 3)),
    "values": lambda x: x.new_tensor(x.shape),
}


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED)
def test_sizes_and_tuples_mean_different_things_to_old_constructors(make):
    one_graph(make, X)
    one_graph(make, X, how=How(options={"dynamic": True}))


def test_a_shape_as_a_tensor_is_made_of_known_numbers():
    def f(x):
        rows, columns = torch._shape_as_tensor(x)
        room = x.new_ones(4, 4) if 2 * columns - 1 > 6 else x.new_zeros(rows, columns)
        return room, torch.arange(columns - rows, columns), torch._shape_as_tensor(x) * 2

    one_graph(f, X)
    one_graph(f, X, how=How(options={"dynamic": True}))
