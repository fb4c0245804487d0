"""Ops over lists of tensors whose numbers change types."""

import pytest
import torch

import kiln

RAISED = "result type ComplexFloat can't be cast to the desired output type Float"


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("op, value", [
    (torch._foreach_pow, [1j + 0.5, 0.2]),
    (torch._foreach_add, [1j, 2.0]),
    (torch._foreach_mul, torch.tensor(1j)),
])  # fmt: skip
def test_complex_numbers_beside_real_tensors(op, value, backend):
    tensors = [torch.rand(3), torch.rand(2)]
    wanted = op(tensors, value)
    found = kiln.compile(lambda tensors: op(tensors, value), fullgraph=True, backend=backend)(tensors)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("value", [2j, [1.0, 2j]])
def test_complex_numbers_are_not_written_to_real_tensors(value, backend):
    def f(tensors):
        torch._foreach_add_(tensors, value)
        return tensors

    for g in (f, kiln.compile(f, backend=backend)):
        with pytest.raises(RuntimeError, match=RAISED):
            g([torch.ones(3), torch.ones(2)])
