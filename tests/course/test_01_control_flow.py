"""Control flow on Python values: branches, loops, match, conditions, comprehensions, unpacking, slices, f-strings.

PYTEST_DONT_REWRITE: the programs hold assert statements of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from tests.support import one_graph, program, t

X = t(3, 4)
G = t(3, 4, grad=True)
LIMIT = 3


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Circle:
    radius: float


@dataclass
class Square:
    side: float


@program(X, -1)
@program(X, 0)
@program(G, 5)
@program(G, 50)
def test_if_elif_else(x, n):
    if n < 0:
        return x - n
    elif n == 0:
        x = x.cos()
    elif n < 10:
        x = x.sin()
    else:
        x = x * n
    return x + 1


@program(X, True, None)
@program(X, False, [])
@program(X, False, [1])
def test_truth_of_values(x, flag, items):
    if flag and not items:
        x = x + 1
    if items is None or len(items) == 0:
        x = x * 2
    if items:
        x = x - items[0]
    return x if flag else -x


@program(G, 4)
@program(G, 0)
def test_for_range(x, n):
    for i in range(n):
        x = x * 2 + i
    return x.exp()


@program(G)
def test_for_with_continue_and_break(x):
    seen = []
    for i in range(10):
        if i % 2:
            continue
        if i > 6:
            break
        seen.append(i)
        x = x + i
    return x, seen, i


@program(X, 3)
@program(X, 30)
def test_for_else(x, wanted):
    for i in range(10):
        if i == wanted:
            x = x * i
            break
    else:
        x = x - 1
    return x


@program(X, 100)
def test_while(x, n):
    steps = 0
    while n > 1:
        n //= 3
        x = x + n
        steps += 1
    return x, steps


@program(X, 3)
@program(X, 8)
def test_while_else_with_break(x, stop):
    i = 0
    while i < 5:
        i += 1
        if i == stop:
            break
        x = x + i
    else:
        x = x * 10
    return x


@program(X)
def test_nested_loops_with_inner_break(x):
    for i in range(4):
        for j in range(4):
            if j > i:
                break
            if (i + j) % 3 == 0:
                continue
            x = x + i * j
    return x


@program(X)
def test_while_true_with_return_in_loop(x):
    n = 0
    while True:
        for k in (1, 2, 3):
            n += k
            x = x.sin()
            if n > 10:
                return x * n


@program(X, 0)
@program(X, 1)
@program(X, 2)
@program(X, 99)
def test_match_literals(x, n):
    match n:
        case 0:
            return x + 1
        case 1 | 2:
            return x * n
        case _:
            return x - 1


@program(X, [])
@program(X, [4])
@program(X, [4, 5])
@program(X, (1, 2, 3, 4))
def test_match_sequences(x, items):
    match items:
        case []:
            return x + 0.5
        case [one]:
            return x * one
        case [a, b]:
            return x * a + b
        case [first, *middle, last]:
            return x * first + sum(middle) - last


@program(X, {"op": "add", "by": 3})
@program(X, {"op": "mul", "by": 3, "more": 1})
@program(X, {"other": 1})
def test_match_mappings(x, command):
    match command:
        case {"op": "add", "by": by}:
            return x + by, {}
        case {"op": "mul", "by": by, **rest}:
            return x * by, rest
        case _:
            return x - 1, None


@program(X, Circle(2.0))
@program(X, Square(3.0))
@program(X, Point(1, 2))
@program(X, Point(0, 2))
@program(X, 3.5)
def test_match_classes_and_guards(x, shape):
    match shape:
        case Circle(radius=r) if r > 1:
            return x * r
        case Square(side):
            return x + side
        case Point(x=0, y=y):
            return x - y
        case Point(a, b):
            return x * a - b
        case float(v):
            return x / v


@program(X, "left")
@program(X, "up")
def test_match_strings_and_captured_names(x, way):
    match way:
        case "left" | "right" as side:
            return x + len(side)
        case other:
            return x * len(other)


@program(X, 3, 4)
def test_conditional_expressions(x, a, b):
    big = a if a > b else b
    sign = "neg" if a < 0 else "zero" if a == 0 else "pos"
    return x * big, sign


@program(X, 0, 5)
@program(X, 2, 0)
def test_boolean_expressions_give_operands(x, a, b):
    return x + (a or b), (a and b), not a, (a or None), (a and b or "neither")


@program(X, 5)
def test_chained_comparisons(x, n):
    inside = 0 < n <= 5 != 7
    return (x + 1 if inside else x - 1), 1 < n < 3 < 10, n in (1, 5), n not in {5}, n is not None


@program(X, 2)
@program(X, -2, raises=AssertionError)
def test_assert(x, n):
    assert n > 0, f"n must be positive, is {n}"
    assert isinstance(x, torch.Tensor) and x.dim() == 2
    return x * n


@program(G)
def test_list_comprehensions(x):
    parts = [x * i for i in range(4) if i != 2]
    grid = [[i * j for j in range(i)] for i in range(4)]
    flat = [v for row in grid for v in row if v]
    return torch.stack(parts).sum(0), grid, flat


@program(X)
def test_dict_and_set_comprehensions(x):
    powers = {f"p{i}": x**i for i in range(3)}
    back = {v: k for k, v in {"a": 1, "b": 2}.items()}
    return powers, back, {i % 3 for i in range(10)}, sum(v for v in (i * i for i in range(4)))


@program(X, 3)
def test_comprehension_sees_outer_names(x, n):
    scale = 2
    return [x * scale * i * n for i in range(n) if i < n], [(lambda: i + scale)() for i in range(2)]


@program(X)
def test_comprehension_does_not_leak_its_variable(x):
    i = 10
    _ = [i for i in range(3)]
    return x + i


@program(X, [1, 2, 3])
def test_unpacking(x, items):
    a, b, c = items
    (d, e), *f = (a, b), c, x
    first, *_, last = range(5)
    [g, h] = "gh"
    return x * a + b - c, d, e, f, first, last, g + h


@program(X, [1, 2], {"k": 3})
def test_unpacking_in_displays(x, items, d):
    return [*items, *range(2), x], (*items,), {*items, 9}, {**d, "x": x + 1, **{"k": 4}}


@program(X)
def test_unpacking_a_tensor(x):
    a, b, c = x
    first, *rest = x.unbind(1)
    return a + b * c, first, len(rest)


@program(X)
def test_swap_and_multiple_targets(x):
    a = b = x + 1
    c, d = 1, 2
    c, d = d, c
    a, b, c = b * c, a * d, c + d
    return a, b, c, d


@program(X, [5, 6, 7])
def test_walrus(x, items):
    if (n := len(items)) > 2:
        x = x + n
    total = 0
    while (k := total * 2 + 1) < 20:
        total = k
    return x, [y := 1, y**2], k, [m for v in items if (m := v % 3)]


@program(X, [1, 2, 3, 4, 5])
def test_slices_of_sequences(x, items):
    s = slice(1, None, 2)
    items[1:3] = [x, x + 1, 9]
    del items[-1:]
    return x * 2, items, items[::-1], "kiln"[s], (1, 2, 3)[:-1], s.indices(5)


@program(X, 3)
def test_slices_of_tensors(x, n):
    return x[1:n], x[:, ::2], x[..., -1], x[None, 1], x[1:, 1:3], x[:0]


@program(X, 3, 2.5, "kiln")
def test_f_strings(x, n, f, s):
    return x + 1, f"{n} {f:.2f} {s!r:>10} {n + 1=} {s:^{n + 6}}|{x.shape}{{}}", f"{x.dtype}", "%d-%s" % (n, s)


@program(X)
def test_del(x):
    y = x + 1
    z = [y, x]
    del y
    d = {"a": 1, "b": 2}
    del d["a"], z[0]
    try:
        y  # noqa: F821
    except UnboundLocalError as e:
        return z[0] * 2, d, str(e)


@program(X)
def test_augmented_assignment_of_values(x):
    n, s, items = 7, "a", [1]
    n += 3
    n -= 1
    n *= 2
    n //= 4
    n **= 2
    n %= 10
    n <<= 3
    n |= 1
    n ^= 2
    n &= 0xFF
    s += "b"
    s *= 2
    items += (2, 3)
    items *= 2
    return x * n, s, items


@program(X)
def test_numbers_and_operators(x):
    return x * (7 // 2 + 7 % 3 - 2**3 + (~5) + (6 >> 1) + (1 << 4)), 7 / 2, -7 // 2, divmod(-7, 2), 3 @ M(), -True


class M:
    def __rmatmul__(self, other):
        return ("rmatmul", other)


@program(X)
def test_global_constant_in_a_loop_bound(x):
    for i in range(LIMIT):
        x = x + i
    return x


@program(X)
def test_pass_and_ellipsis(x):
    if x.dim() == 2:
        pass
    else:
        ...
    return x + 1, ...


@program(X, 3)
def test_early_returns_from_nested_blocks(x, n):
    for i in range(5):
        if i == n:
            while True:
                try:
                    return x + i
                finally:
                    x = x * 100
    return x


@program(X)
def test_loop_over_shape(x):
    total = 0
    for i, size in enumerate(x.shape):
        total += i * size
    for row in range(x.size(0)):
        x = x + row * x.shape[-1]
    return x, total


@program(X)
def test_branch_on_shape_dtype_and_device(x):
    if x.shape[0] > 2 and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim == 2 and x.numel() < 100:
        return x.flatten()
    return x


@program(X)
def test_loop_over_tensor_rows(x):
    out = []
    for row in x:
        out.append(row * len(out))
    return torch.cat(out), len(x)


@program(X)
def test_deep_nesting_of_blocks(x):
    for a in range(2):
        with torch.no_grad():
            for b in range(2):
                try:
                    if a and b:
                        raise ValueError(a + b)
                    x = x + 1
                except ValueError as e:
                    x = x * e.args[0]
                else:
                    x = x - 0.5
                finally:
                    x = x + 0.25
    return x


@program(X)
def test_string_building_in_a_loop(x):
    parts = []
    for i, c in enumerate("kiln"):
        parts.append(c.upper() if i % 2 else c)
    return x * len(parts), "".join(parts), "-".join(reversed(parts))


def make_long(n):
    lines = ["def long(x):"] + [f"    x = x + {i} if {i} % 2 else x * 1.5" for i in range(n)] + ["    return x"]
    scope = {}
    exec("\n".join(lines), scope)
    return scope["long"]


@pytest.mark.parametrize("n", [5, 150])
def test_long_functions_need_extended_arguments(n):
    one_graph(make_long(n), X)


@program(X)
def test_many_constants_names_and_locals(x):
    a, b, c, d, e, f, g, h = range(8)
    k = (a, b, (c, d, [e, f, {"g": g, "h": h}]))
    a, (b, c) = k[1], k[2][:2]
    return x * (a + b + c), k


@program(X, None)
@program(X, 2)
def test_none_checks(x, scale):
    if scale is None:
        scale = x.shape[-1] ** -0.5
    return x * scale


@program(X)
def test_unreachable_code_is_not_run(x):
    if False:
        x.no_such_attribute
    return x + 1
    x.neither_this_one()


@program(X, raises=UnboundLocalError)
def test_unbound_local_raises(x):
    if x.dim() > 5:
        y = 1
    return x + y


@program(X, raises=NameError)
def test_undefined_global_raises(x):
    return x + no_such_name  # noqa: F821


@program(X)
def test_unpacking_errors(x):
    out = []
    for wrong in ([1], [1, 2, 3], 5):
        try:
            _a, _b = wrong
        except (ValueError, TypeError) as e:
            out.append(str(e))
    return x + 1, out


@program(X, 3)
def test_exec_time_constants_fold(x, n):
    return x + (n * 2 if __debug__ else 0), 0x10 + 0b11 + 1_000, 1e-3, 2j * 2, b"bytes"[0], "implicit" "join"


@program(X)
def test_star_in_index_and_subscript(x):
    idx = (0, 1)
    return x[*idx], x[idx], x[(slice(None), 1)]


@program(X)
def test_print_of_nothing_is_not_needed(x):
    out = []
    for i in range(3):
        out += [i] if i else []
        out.extend(j for j in range(i))
    return x.sum(), out
