"""The comparison of random programs takes any order of rounding, and no wrong value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuse.comparing import compare
from tests.fuse.programs import PLAIN, Input, Program

pytestmark = pytest.mark.filterwarnings("ignore")
FLOATS = ("f64", "f32", "bf16", "f16")


def judged(inputs: list[Input], line: str, other: str) -> None:
    """Compare what one line gives with another one in place of its compiled form."""
    program = Program(inputs, [f"v0 = {line}"], ["v0"])
    compare(program, replace(program, lines=[f"v0 = {other}"]).function(PLAIN))


#: What kernels with a fault would give in place of a line.
WRONG: dict[str, tuple[str, str]] = {
    "a sum without its last element": ("a0.sin().sum(-1)", "a0.sin()[..., :-1].sum(-1)"),
    "a sum with one element twice": ("a0.sin().sum(-1)", "torch.cat([a0, a0[..., :1]], -1).sin().sum(-1)"),
    "a mean of fewer": ("a0.cos().mean(-1)", "a0.cos().sum(-1) / 90"),
    "elements off by one": ("a0.cos()", "a0.cos().roll(1, -1)"),
    "the last element of a row": ("a0.exp()", "torch.cat([a0.exp()[..., :-1], a0[..., -1:]], -1)"),
    "one element of many": ("a0 + 8", "torch.where(torch.arange(300).view(3, 100) == 217, a0 + 8.25, a0 + 8)"),
    "a maximum that starts at zero": ("(-a0.abs() - 1).amax(-1)", "(-a0.abs() - 1).amax(-1).clamp(min=0)"),
    "a product that starts at two": ("(a0.abs() / 4 + 0.75).prod(-1)", "(a0.abs() / 4 + 0.75).prod(-1) * 2"),
    "a running sum that lost its carry": ("a0.sin().cumsum(-1)", "torch.cat([a0[:, :64].sin().cumsum(-1), a0[:, 64:].sin().cumsum(-1)], -1)"),
    "a variance of all": ("a0.view(30, 10).sin().var(-1)", "a0.view(30, 10).sin().var(-1, correction=0)"),
    "a softmax over one element less": ("a0.softmax(-1)", "a0.exp() / a0[:, :-1].exp().sum(-1, keepdim=True)"),
    "a norm that forgot its epsilon": ("F.layer_norm(a0 / 512, (100,))", "F.layer_norm(a0 / 512, (100,), eps=0)"),
    "a gradient without one row": ("a0 * a1.sin()", "torch.cat([a0[:-1] * a1.sin(), a0[-1:] * a1.detach().sin()])"),
    "a gradient of another slope": ("F.leaky_relu(a0, 0.1)", "F.leaky_relu(a0, 0.1).detach() + a0 * 0.1 - (a0 * 0.1).detach()"),
    "a gradient off by one": ("a0 * a0.cos()", "a0.detach() * a0.cos() + (a0 - a0.detach()) * a0.cos().detach().roll(1, -1)"),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_found(name: str, dtype: str) -> None:
    inputs = [Input((3, 100), dtype, "plain", False, True, 7), Input((1, 100), dtype, "plain", False, True, 8)]
    with pytest.raises(AssertionError):
        judged(inputs, *WRONG[name])


@pytest.mark.parametrize("line", ["a0.exp()", "a0.sin().sum(-1)", "F.layer_norm(a0, (100,))", "a0.softmax(-1)", "(a0 / 3).cumsum(-1)"])
@pytest.mark.parametrize(("dtype", "narrow"), [("f64", "f32"), ("f32", "f16"), ("f32", "bf16")])
def test_a_narrower_type_is_found(line: str, dtype: str, narrow: str) -> None:
    with pytest.raises(AssertionError):
        judged([Input((3, 100), dtype, "plain", False, False, 7)], line, f"({line.replace('a0', f'a0.to({narrow})')}).to({dtype})")
    with pytest.raises(AssertionError):
        judged([Input((3, 100), dtype, "plain", False, False, 7)], line, f"({line}).to({narrow}).to({dtype})")


@pytest.mark.parametrize(("line", "other"), [("a0.floor()", "a0.ceil()"), ("a0 > 0.25", "a0 >= 0.25"), ("a0.argmax(-1)", "a0.argmax(-1) * 0"), ("a0.long()", "a0.floor().long()")])
def test_other_jumps_are_found(line: str, other: str) -> None:
    with pytest.raises(AssertionError):
        judged([Input((3, 100), "f32", "plain", False, False, 7)], line, other)


@pytest.mark.parametrize("line", ["torch.where(a0 > 0, a0, 0)", "a0.nan_to_num(0, posinf=torch.inf).relu()", "a0.relu().clamp(max=1e4)"])
def test_numbers_in_place_of_special_ones_are_found(line: str) -> None:
    with pytest.raises(AssertionError):
        judged([Input((3, 100), "f32", "plain", True, False, 7)], "a0.relu()", line)


#: The same values, rounded otherwise.
OTHERWISE: dict[str, tuple[str, str]] = {
    "a sum from the end": ("a0.sin().sum(-1)", "a0.sin().flip(-1).cumsum(-1)[..., -1].contiguous()"),
    "a mean in pieces": ("a0.cos().mean(-1)", "a0.cos().view(3, 4, 25).sum(1).sum(-1) * (1 / 100)"),
    "no rounding in between": ("a0.sin().exp().cos()", "a0.double().sin().exp().cos().to(a0.dtype)"),
    "a norm in two passes": ("F.layer_norm(a0, (100,))", "(lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt())(a0.double()).to(a0.dtype)"),
    "a sum of columns for a gradient": ("a0 * a1.sin()", "torch.cat([a0[i:i + 1] * a1.sin() for i in (2, 0, 1)])[torch.tensor([1, 2, 0])]"),
    "a gradient of a long sum": ("a0.flatten() * a1[0, :1].expand(300)", "torch.cat([a0.flatten()[i:i + 1] * a1[0, :1] for i in range(300)])"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OTHERWISE)
def test_other_rounding_is_fine(name: str, dtype: str) -> None:
    judged([Input((3, 100), dtype, "plain", False, True, 7), Input((1, 100), dtype, "plain", False, True, 8)], *OTHERWISE[name])


def test_a_value_that_was_written_through_another_is_compared() -> None:
    program = Program([Input((1,), "f32", "plain", False, True, 7)], ["v0 = a0 - 1", "v1 = v0.expand((2,))", "v0[:1].fill_(2)", "v2 = v1 * 1"], ["v2"])
    with pytest.raises(AssertionError):
        compare(program, replace(program, lines=[*program.lines[:-1], "v2 = v1 * 1.25"]).function(PLAIN))
