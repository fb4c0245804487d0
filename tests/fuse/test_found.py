"""The smallest programs that once gave another result than eager, and the edges of arithmetic."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import records
from tests.fuse.programs import Input, Program
from tests.fuse.test_random import check

pytestmark = pytest.mark.filterwarnings("ignore")


def plain(*shape: int, dtype: str = "f32", layout: str = "plain", grad: bool = False) -> Input:
    return Input(shape, dtype, layout, False, grad, 7)


#: Lines over inputs a0, a1, …; the last line is returned.
PROGRAMS: dict[str, tuple[list[Input], list[str]]] = {
    "cat of what is empty": ([plain(64, 0), plain(0)], ["v0 = torch.cat([a1.flatten(), a0.flatten()])"]),
    "a comparison of halves as 16 bits": ([plain(17, 40, dtype="bf16")], ["v0 = (a0 == 0).to(torch.int16)"]),
    "which halves are no numbers, as 16 bits": ([plain(3, 50, dtype="bf16")], ["v0 = (a0 / (a0 - a0)).isnan().to(torch.int16) * 3"]),
    "flip without dimensions": ([plain()], ["v0 = a0.flip(0)", "v1 = torch.exp2(torch.lerp(v0, a0, 0.25).reshape(1, 1))"]),
    "variance of one number": ([plain(17, 33)], ["v0 = torch.var_mean(a0.amax(), 0)[1]"]),
    "doubles rounded to halves": ([plain(17, 33, dtype="f64")], ["v0 = a0.sin() * a0.tanh()", "v1 = v0.exp().to(torch.float16) + v0.log1p().to(torch.bfloat16)"]),
    "copysign of halves, from double": ([plain(5, 17, dtype="f16")], ["v0 = a0.cos().tanh()"]),
    "a quotient of indices below zero": ([plain(33, 5)], ["v0 = F.pad(a0, (1, 2)).reshape(2, 2, 1, 3, 22).abs()"]),
    "a long sum": ([plain(1_000_003), plain(dtype="bf16", grad=True)], ["a0.copy_(a1)", "v0 = torch.fmax(a0, a1)"]),
    "a sum of long rows": ([plain(100_000, 3)], ["v0 = (a0 + 100).sum(0)"]),
    "a slice that starts before the start": ([plain(2, 1, grad=True)], ["v0 = a0.abs().sqrt()[:, -2:]"]),
    "addcmul of two dtypes": ([plain(4, 33, dtype="f16"), plain(1, 33)], ["v0 = torch.addcmul(a0, a1, a1, value=0.5)"]),
    "a number of another dtype": ([plain(64, dtype="f16"), plain()], ["v0 = torch.addcmul(a1, a0, a1, value=0.5)"]),
    "bounds of another dtype": ([plain(33), plain(dtype="f64")], ["v0 = torch.clamp(a1, a0, a1 + 1)"]),
    "a window of a view, beyond it": ([plain(1, 8, grad=True)], ["v0 = a0.select(1, 5).as_strided((2,), (1,))"]),
    "places of nothing": ([plain(0, 0)], ["v0 = a0.index_fill(0, torch.tensor([0, -1]), 2)", "v1 = a0.index_add(1, torch.tensor([0, 1]), a0.new_ones(0, 2)) + v0"]),
    "round with decimals": ([plain(17)], ["v0 = (a0 / 3).round(decimals=2) + 1"]),
    "logaddexp of two dtypes": ([plain(dtype="bf16"), plain()], ["v0 = torch.logaddexp(a0, a1)"]),
    "alpha beside a number": ([plain(3, 2)], ["v0 = a0 > 0", "v1 = torch.add(0.25, v0, alpha=0.5)", "v2 = torch.sub(2, a0, alpha=3)"]),
    "alpha of booleans": ([plain(3, 2)], ["v0 = a0 > 0", "v1 = torch.add(v0, ~v0, alpha=2)"]),
    "copy into a layout with gaps": ([plain(8, 2, 16, dtype="f64", layout="padded"), plain(8, 2, 16, grad=True)],
                                     ["a0.copy_(a1)", "v0 = torch.minimum(a1, a0)"]),
    "a product of what was copied into gaps": ([plain(17, 5, 1, layout="padded")],
                                               ["v0 = a0.div_(a0.abs() + 1)", "v1 = torch.matmul(v0, v0.transpose(-1, -2))"]),
    "a product of rows written in gaps": ([plain(3, 4, 2, layout="inner step", grad=True), plain(3, 4, 2, layout="padded")],
                                          ["a1[:1].mul_(2)", "v0 = F.linear(a1 * a0, a1[0])", "v1 = torch.baddbmm(v0[:1, :1], a1.transpose(1, 2), a1)"]),
    "a part of an argument with gaps": ([plain(2, 1, 1, layout="padded")], ["a0.view(-1)[1:].sub_(1)", "v0 = a0 * 2"]),
    "a part of more with gaps": ([plain(3, 5, 1, layout="padded")], ["a0.view(-1)[1:].sub_(1)", "v0 = torch.matmul(a0, a0.transpose(-1, -2))"]),
    "log_sigmoid is contiguous": ([plain(16, 3, 64, layout="transposed")], ["v0 = F.logsigmoid(a0).atan()"]),
    "an index within a part": ([plain(6, 3), plain(6, 3)], ["v0 = torch.cat([a0[torch.arange(6) - 3], a1]) * 2"]),
    "a division within a part": ([plain(6, dtype="i64"), plain(3, dtype="i64")],
                                 ["v0 = torch.cat([a0 // (a0.abs() + 1), a1 % (a1.abs() + 2)]) + 1"]),
    "one place of an argument with gaps": ([plain(1, 1, dtype="i32", layout="padded")], ["a0.flatten()[:1].fill_(2)", "v0 = a0 + 1"]),
    "as_strided of a view that starts later": ([plain(3, 4)], ["v0 = a0 * 1", "v0[1:].as_strided((2,), (1,), 0).mul_(2)", "v1 = v0 + 1"]),
    "a result in the place of what another one reads, too, by a choice that depends on the place": (
        [plain(1, 64, dtype="bf16", grad=True)],
        ["v0 = F.pad(a0, (1, 2))", "v1 = torch.select_scatter(v0, a0.select(1, -1), 1, -55)", "v2 = F.linear(v1, (v1.abs() + 0.5) ** 1.5)"],
    ),
    "halves that are written where others are kept as they were": (
        [plain(4, 16, 1, dtype="f16")], ["v0 = a0.amax(-1)", "v1 = v0.chunk(2, 1)[-1]", "v2 = a0.exp_()", "v3 = v1.flatten()"]),
    "a softmax of what is one number at several places": ([plain(17, 1, 1, layout="expanded")], ["v0 = a0[torch.tensor([-10, -17])].softmax(0)"]),
    "a mean along the dimension that a number has not": ([plain()], ["v0 = (a0 * 2).mean(-1)"]),
    "as_strided of a value": ([plain(100, 33, dtype="bf16", grad=True)], ["v0 = (a0 != a0).as_strided((2,), (1,))", "v1 = v0 + 2"]),
    "a row of an expanded argument": ([plain(3, 4, layout="expanded")], ["a0[0].add_(1)", "v0 = a0 * 2"]),
    "a row of an expanded value": ([plain(1, 4)], ["v0 = a0 * 2", "v0.expand(3, 4)[0].mul_(3)", "v1 = v0 + 1"]),
    "windows of a number": ([plain(grad=True)], ["v0 = a0 * 2", "v1 = v0.unfold(0, 1, 1) + v0.unfold(0, 0, 2).sum()"]),
    "a norm after a write into a turned image of one column": (
        [plain(1, 16, 33, 1, layout="transposed")],
        ["v0 = torch.index_put(a0, (torch.tensor([-1, -1]),), a0.sum(), accumulate=True)", "v1 = F.group_norm(v0, 1)"]),
    "windows of one number": ([plain(3, grad=True)], ["v0 = a0.sum().unfold(-1, 1, 1) * 2", "v1 = a0.prod().unfold(0, 0, 1)"]),
    "windows that overlap": ([plain(3, 4)], ["a0.unfold(0, 2, 1)[0].add_(1)", "v0 = a0 * 1"]),
    "a product of an argument that starts later": ([plain(2, 2, 64, layout="inner step", grad=True)],
                                                   ["v0 = torch.matmul(a0, a0.transpose(-1, -2))"]),
    "deviation of equal halves": ([plain(3, 100, 3, dtype="bf16", layout="padded", grad=True)],
                                  ["v0 = (a0 * a0 + 1).rsqrt()", "v1 = v0.std(2, keepdim=True)"]),
    "a sixth in double precision": ([plain(17, dtype="f64", grad=True)], ["v0 = F.hardsigmoid(a0)"]),
    "halves that are compared": ([plain(4, 1, 100, dtype="f16", grad=True)],
                                 ["v0 = torch.add(a0, a0, alpha=2).sin()", "v1 = v0.scatter_reduce(0, torch.arange(4).view(-1, 1, 1).expand(4, 1, 100).flip(0), v0, 'amax')"]),
    "strides of two dtypes": ([plain(16, 8, layout="transposed"), plain(16, 8, dtype="f16", grad=True)], ["v0 = torch.xlogy(a0, a1.abs() + 1)"]),
    "a loss of nothing": ([plain(1, 0, grad=True)], ["v0 = F.mse_loss(a0, a0.detach() * 0.5)"]),
    "a loss of two half dtypes": ([plain(3, dtype="f16", grad=True), plain(3)], ["v0 = F.binary_cross_entropy_with_logits(a0, a1.bfloat16().clamp(0, 1))"]),
    "a loss of two dtypes": ([plain(3), plain(3)], ["v0 = F.mse_loss(a0.bfloat16(), a1)"]),
    "a sum of negative zeros": ([plain(3, 1, grad=True), plain(3, 8)], ["v0 = (a0 * 0).trunc().sum(-1)", "v1 = torch.atan2(v0, v0)", "v2 = -(a1 * a1 * 0)", "v3 = torch.atan2(v2.sum(1), v2.sum(1)) + v1"]),
    "channels last, shuffled": ([plain(8, 8, 1, 17, layout="channels last", grad=True)], ["v0 = F.pixel_shuffle(a0, 2)"]),
    "a flip keeps the strides of one place": ([plain(1, 1, 64, 17, dtype="bf16")], ["v0 = F.pad(a0.transpose(1, -1).flip(-4), (-1, 1))"]),
    "logaddexp of turned tensors": ([plain(2, 3, layout="transposed")], ["v0 = torch.logaddexp(a0.chunk(2, -1)[-1], a0)"]),
    "a part of what was written to later": ([plain(100, 8, grad=True)], ["v0 = a0 * 2", "v1 = v0.chunk(2, -2)[-1]", "v0.diagonal().mul_(2)", "v2 = v1"]),
    "a norm of a part, channels last": ([plain(5, 16, 6, 6, layout="channels last")], ["v0 = F.batch_norm(a0[:, :, 1:], None, None, training=True)"]),
    "a norm of one column, turned": ([plain(1, 3, 100, 1, layout="transposed")], ["v0 = F.batch_norm(a0 * 2, None, None, training=True)"]),
    "lanes that want an element in turn": ([plain(17), plain()], ["v0 = torch.atan2(a0, a1)", "v1 = torch.stack([v0, v0], -1) * -2.5", "v2 = torch.cat([v1.flatten(), v1.flatten()])"]),
    "a norm over one element": ([plain(3, 1, 5, grad=True), plain(1, 4, dtype="bf16")], ["v0 = a0.norm(2, -2)", "v1 = torch.linalg.vector_norm(a1, dim=0).sum() + v0"]),
    "a norm of elements that are one": ([plain(3, 2, 4, 1, grad=True)], ["v0 = torch.nan_to_num(torch.sigmoid(a0)).norm(2, -1)"]),
    "a mean of one negative zero": ([plain(), plain()], ["v0 = -(a0 * a0 * 0)", "v1 = torch.atan2(torch.stack([a1, v0.sum()]), v0.mean())"]),
    "a logit loss is of its target's dtype": ([plain(16), plain(16, dtype="f16", grad=True)],
                                              ["v0 = F.binary_cross_entropy_with_logits(a0, a1.sigmoid().detach())", "v1 = v0 * v0 + v0"]),
    "a slice of an expanded argument": ([plain(8, 3, dtype="f16", layout="expanded", grad=True), plain(8, 3)],
                                        ["v0 = torch.slice_scatter(a0, a1.narrow(0, 0, 1), 0, 0, 1)"]),
    "rows of no columns": ([plain(4, 0, grad=True)], ["v0 = F.embedding(torch.tensor([[0, 1, 0], [1, 1, 0]]), a0.abs().log1p())"]),
    "channels last, rolled": ([plain(3, 8, 5, 4, layout="channels last")], ["v0 = a0.roll(1, 0)"]),
    "a loss is of its input's dtype": ([plain(3, 4, dtype="f16", layout="transposed", grad=True), plain(3, 4)],
                                       ["v0 = F.huber_loss(a0, a1, reduction='none')", "v1 = F.soft_margin_loss(a0, a1) * v0"]),
    "what is given its own value": ([plain(1, 1, dtype="i64", layout="padded"), plain(3, grad=True)], ["a0.copy_(a0)", "v0 = a1 * 2"]),
    "a norm of one half": ([plain(64, 1, 1, dtype="f16", grad=True)],
                           ["v0 = a0 / (a0.abs() + 1)", "v1 = F.group_norm(v0 * v0 + v0, 1)"]),
    "a deviation of one half": ([plain(33, 1, dtype="f16", grad=True)], ["v0 = torch.var_mean(a0.cos(), 1)[0]"]),
    "resampling of infinities": ([replace(plain(1, 4, 3, 1), special=True), replace(plain(1, 2, 5, 7), special=True)],
                                 ["v0 = F.interpolate(a0, size=(3, 4), mode='bilinear')", "v1 = F.interpolate(a1, size=(9, 7), mode='bicubic')[:, :, :3, :4]", "v2 = torch.cat([v0, v1], 1)"]),
    "pooling without a batch": ([plain(1, 5, 2, layout="transposed", grad=True)], ["v0 = F.adaptive_avg_pool2d(a0 * 2, 2)"]),
    "windows larger than what they go over": ([plain(2, 3, 1, 1, grad=True)], ["v0 = F.max_pool2d(a0 * 2, 2, ceil_mode=True)", "v1 = F.avg_pool2d(a0 * 2, 2, ceil_mode=True)"]),
    "a running sum of complex numbers": ([plain(2, 3)], ["v0 = torch.view_as_real(torch.complex(a0, a0 * 2).cumsum(1))"]),
    "windows that are filled": ([plain(33, 1, 5, 1, grad=True)], ["v0 = a0.unfold(0, 7, 3).index_fill(0, torch.tensor([0, 8]), 2)"]),
    "a step function of two layouts": ([plain(4, 17, 64, 1, layout="transposed")], ["v0 = torch.heaviside(a0.topk(1, -4)[0], a0.trunc())"]),
    "a running maximum of nothing": ([plain(0, 3, grad=True)], ["v0 = (a0 * 2).cummax(-1)[0]"]),
    "a gradient in single precision of doubles": ([plain(64, dtype="f64", grad=True)], ["v0 = a0.float().cumsum(0).sin()"]),
    "a gradient of one number that cancels": ([plain(33, 100, grad=True), plain(1, 1, grad=True)],
                                              ["v0 = (a1 * a1 + a0).flip(1).cumsum(1)", "v1 = torch.copysign(a1, v0)"]),
    "a norm of equal elements": ([plain(1, 16, 3, 33)], ["a0.select(0, 0).fill_(1)", "v0 = F.group_norm(F.mish(a0), 1).mean()"]),
    "a result equal to what is written": ([plain(3, grad=True), plain(3)], ["a1.zero_()", "v0 = a1 / (a0.abs() + 1)", "v1 = v0.zero_()"]),
    "a convolution over no channels is of both dtypes": ([plain(2, 0, 4, dtype="bf16")], ["v0 = torch.ones(3, dtype=F.conv1d(a0, torch.ones(3, 0, 1)).dtype) * 2"]),
    "a mean of infinities": ([replace(plain(4, 7, 5), special=True)], ["v0 = torch.var_mean(a0.clamp(min=0.25), 1)[1]"]),
}  # fmt: skip


#: The same for inputs of two sizes, the second of which the first one's kernels serve.
RESIZED: dict[str, tuple[list[Input], list[Input], list[str]]] = {
    "strides that vary": ([plain(2, 3, layout="stepped", grad=True)], [plain(16, 16, layout="stepped", grad=True)], ["v0 = a0.flatten() * 2"]),
    "a view whose sizes are known together": ([plain(1, 3, 100, grad=True)], [plain(1, 6, 50, grad=True)], ["v0 = a0.view(6, 5, 2, 5) * 2"]),
    "a number made of sizes": ([plain(3, grad=True)], [plain(40, grad=True)], ["v0 = F.mse_loss(a0, a0.detach() * 0.5)"]),
    "a border of sizes": ([plain(1, 1, 17, grad=True)], [plain(1, 1, 9, grad=True)], ["v0 = F.pad(a0, (1, 1, 1, 1), mode='circular')"]),
    "sizes that an argument had": ([plain(1, 33, 4, layout="inner step", grad=True)], [plain(1, 7, 4, layout="inner step", grad=True)],
                                   ["v0 = F.layer_norm(torch.minimum(a0, a0.long()), (4,))"]),
    "sizes that are one": ([plain(16, 1, 3, grad=True), plain(16, 3, 3, dtype="u8")], [plain(40, 1, 3, grad=True), plain(40, 3, 3, dtype="u8")],
                           ["v0 = a1.float() * a1 + a0"]),
    "a product of sizes that is known": ([plain(4, 3, 16)], [plain(8, 2, 12)],
                                         ["v0 = a0.flatten()", "v1 = torch.gather(v0, 0, torch.arange(192))", "v2 = v1.cumsum(0).masked_fill(v0 <= 2, 1.5)"]),
    "halves of sizes": ([plain(4, 6, grad=True)], [plain(3, 8, grad=True)], ["v0 = F.glu(a0)"]),
    "sizes that are asked for": ([plain(5, 4, 4, grad=True)], [plain(3, 2, 2, grad=True)], ["v0 = F.interpolate(a0, scale_factor=2)"]),
    "as_strided from a place of sizes": ([plain(4, 5, 3, 16)], [plain(2, 5, 17, 7)], ["v0 = a0 + a0", "v1 = v0[0, :2, -1, 5]", "v1.as_strided((2,), (1,)).mul_(2)", "v2 = v1"]),
    "log-softmax over columns": ([plain(3, 1, 3, grad=True)], [plain(16, 1, 16, grad=True)], ["v0 = a0.log_softmax(0)"]),
    "a loss of several sizes": ([plain(4, 3, grad=True)], [plain(2, 2, grad=True)], ["v0 = F.nll_loss(a0.log_softmax(1), torch.zeros(a0.shape[0], dtype=i64))"]),
    "nothing of several sizes": ([plain(8, 0, 64, grad=True)], [plain(3, 0, 5, grad=True)], ["v0 = a0.transpose(-3, -1).relu().norm(2, -1)"]),
    "nothing that is written": ([plain(3, 0, 16, grad=True)], [plain(17, 0, 3, grad=True)], ["v0 = F.silu(a0)", "v1 = v0[0].mul_(2)"]),
    "a size that became known, in strides": ([plain(1, 2, 3, 1)], [plain(1, 2, 16, 1, grad=True)],
                                             ["v0 = a0.scatter(1, torch.arange(2).view(1, -1, 1, 1).expand(1, 2, 3, 1).flip(1), a0)", "v1 = F.relu6(a0)"]),
    "windows that overlap, more of them and fewer": ([plain(5, 40, dtype="i64")], [plain(16, 9, dtype="i64")], ["v0 = a0.unfold(1, 7, 1) % 3"]),
    "running values of a written part": ([plain(8, 4, 1, 100)], [plain(16, 8, 1, 40)],
                                         ["v0 = F.pixel_shuffle(a0, 2)", "v0[::2, ...].mul_(2)", "v1 = v0.cummax(2)[0]"]),
    "strides that are compared": ([plain(17, 1, 3, dtype="i16")], [plain(7, 1, 2, dtype="i16")],
                                  ["v0 = a0.int()", "v1 = torch.add(v0.unfold(2, 1, 3), v0, alpha=2)"]),
    "a border along rows whose distance varies": ([plain(17, 100, 3, 1)], [plain(17, 7, 2, 1)], ["v0 = F.pad(a0, (0, 1, 2, 0), value=3)"]),
    "a sum that grows long": ([plain(3, 3, 3, 33, layout="transposed")], [plain(40, 40, 40, 2, layout="transposed")],
                              ["v0 = F.binary_cross_entropy_with_logits(a0, a0.sigmoid().detach())"]),
    "a size known by its half": ([plain(17, 4, 2, grad=True)], [plain(40, 17, 2, grad=True)], ["v0 = torch.copysign(F.glu(a0 * 2, 2), a0)"]),
}  # fmt: skip


#: The same in other modes.
IN_MODES: dict[str, tuple[str, list[Input], list[str]]] = {
    "one of several, in inference mode": ("inference", [plain(5)], ["v0 = F.one_hot(torch.arange(4), 5) + a0"]),
    "the one part of nothing, in inference mode": ("inference", [plain(0)], ["v0 = a0.split(2, 0)[0]"]),
    "a part without grad mode": ("no_grad", [plain(3, 4, grad=True)], ["v0 = a0 * 2", "v1 = a0[1:]"]),
    "memory of an argument that requires grad": ("no_grad", [plain(8, 4, layout="transposed", grad=True)], ["a0.as_strided((2,), (1,)).sub_(1)", "v0 = a0 + 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_MODES)
def test_program_in_a_mode(name: str) -> None:
    mode, inputs, lines = IN_MODES[name]
    check(Program(inputs, lines, [lines[-1].split(" = ")[0]], mode))


@pytest.mark.parametrize("name", RESIZED)
def test_program_of_two_sizes(name: str) -> None:
    first, second, lines = RESIZED[name]
    outputs = [lines[-1].split(" = ")[0]]
    check(Program(first, lines, outputs), Program(second, lines, outputs))


#: Several outputs that view a tensor which changed its own shape: its gradient is of the first one.
TURNED: dict[str, list[str]] = {
    "squeezed by a product": ["v0 = F.linear(a0[0], a0[:1])", "v1 = v0.expand(2)", "v2 = v0.contiguous()"],
    "turned": ["v0 = a0 * 2", "v0.t_()", "v1 = v0.expand(2, 3, 3)", "v2 = v0[0]"],
    "turned after it was viewed": ["v0 = a0 * 2", "v1 = v0[0]", "v0.t_()", "v2 = v0[1]"],
}


@pytest.mark.parametrize("name", TURNED)
def test_views_of_what_changed_its_shape(name: str) -> None:
    check(Program([plain(3, 3, grad=True)], TURNED[name], ["v1", "v2"]))


#: Outputs that were detached from one another and written since, each with a history of its own.
DETACHED: dict[str, list[str]] = {
    "from a value": ["v0 = a0 * 2", "v1 = v0.detach()", "v1.lerp_(v0, 0.5)"],
    "from a value without a history": ["v0 = a1 * 2", "v1 = v0.detach()", "v1.mul_(a0)"],
    "from a part": ["v0 = a0 * 2", "v1 = v0.detach()[:1]", "v1.mul_(a0[:1])"],
    "from an argument": ["v0 = a1.detach()", "v1 = v0.mul_(a0)"],
}


@pytest.mark.parametrize("name", DETACHED)
def test_outputs_with_other_histories_than_what_they_view(name: str) -> None:
    check(Program([plain(3, 3, grad=True), plain(3, 3)], DETACHED[name], ["v0", "v1"]))


@pytest.mark.parametrize("lines", (["v1 = v0.transpose(0, 1)", "v0.t_()"], ["v1 = v0[0]", "v0.t_()"], ["v1 = v0[0]", "v0.t_()", "v1 = v1 * 3"]))
def test_a_view_of_what_changed_its_shape_afterwards(lines: list[str]) -> None:
    check(Program([plain(3, 3, grad=True)], ["v0 = a0 * 2", *lines], ["v1"]))


def test_a_value_that_is_overwritten_is_read_no_more() -> None:
    """The C library is asked for single elements, which LLVM loads when it needs them."""
    lines = ["v0 = F.scaled_dot_product_attention(a0, a0, a0)", "v1 = v0 * 0.1", "v2 = F.softplus(v0)"]
    check(Program([plain(5, 3, 3, 100, dtype="f64")], lines, ["v1", "v2"]))


def test_integers_that_require_grad() -> None:
    """A fault of eager's: what is filled with a tensor that requires grad requires it too."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        whole = x.bool()
        whole[:1, :1] = x.sum()
        return whole

    x = torch.ones(2, 3, requires_grad=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        assert torch.equal(kiln.compile(fill)(x), fill(x))
    assert {b.kind for b in log.breaks} <= {"capture-raised", "tensor-layout"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    inputs, lines = PROGRAMS[name]
    check(Program(inputs, lines, [lines[-1].split(" = ")[0]]))


def same(f, *inputs):
    """The same values, dtypes and layouts as eager, bit for bit but for the last ones; or the same error."""

    def called(g):
        try:
            out = g(*[x.clone() for x in inputs])
        except Exception as error:
            return error
        return out if isinstance(out, tuple) else (out,)

    kiln.reset()
    expected = called(f)
    with records.collect() as log, kiln.config.patch(strict=True):
        got = called(kiln.compile(f, backend="kiln"))
    assert not log.fallbacks
    if isinstance(expected, Exception):
        assert type(expected) is type(got), f"{got!r}, eager {expected!r}"
        return got
    assert not isinstance(got, Exception), got
    for a, b in zip(expected, got, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(b, a, equal_nan=True)
    return None


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    a, three = torch.arange(-20, 20).to(dtype), torch.full((40,), 3, dtype=dtype)
    least, minus = torch.full((20,), torch.iinfo(dtype).min, dtype=dtype), torch.full((20,), -1).to(dtype)
    counts = torch.arange(40).to(dtype)
    same(lambda a, b: (a // b, a % b, a // -b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")), a, three)
    same(lambda a, b: (a % b, -a, a.abs(), a * a, a - 1), least, minus)
    same(lambda a, n: (a << n, a >> n, a << 70, a >> 70, a << -n, a >> -n), a, counts)
    same(lambda a, n: (a**2, a**5, a**64, a**n, a**-n), a, counts)
    same(lambda a: (a.amax(), a.amin(), a.sum(), a.prod(), a.argmax(), a.any(), a.all()), a)
    same(lambda a: (a.float(), a.bool(), a.to(torch.uint8), a.to(torch.int8), a.half(), a / 3), a)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("f", [torch.floor_divide, torch.remainder, torch.fmod])
def test_division_by_zero_raises(dtype, f):
    error = same(f, torch.arange(40).to(dtype), (torch.arange(40) % 7).to(dtype))
    assert isinstance(error, RuntimeError) and "ZeroDivisionError" in str(error)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_floats_that_fit_no_integer(dtype):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 1e10, -1e10, 3e9, -3e9, 2.5, -2.5, 300.0, -300.0, 70000.0])
    same(lambda x: (x.to(dtype), x.double().to(dtype), x[:9].to(dtype)), x.repeat(3))


def test_booleans():
    a, b = torch.tensor([True, False, True, True]), torch.tensor([True, True, False, False])
    same(lambda a, b: (a + b, a * b, a ^ b, ~a, a < b, a <= b, a.sum(), a.amax(), a.amin(), a.prod(), a + 1, a.cumsum(0)), a, b)
    same(lambda a, b: a - b, a, b)


@pytest.mark.parametrize("f", [lambda x: x**x, lambda x: True**x, lambda x: x % True, lambda x: x % x, lambda x: True << x, lambda x: 2 << (x + 0.5)])
def test_what_eager_has_no_kernel_for(f):
    assert isinstance(same(f, torch.tensor([True, False])), NotImplementedError)


@pytest.mark.parametrize("number", [0.1, 0.3, 1.1, 2.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_number_is_compared_with_halves_as_a_half(dtype, number):
    x = torch.tensor([number, -number, 2 * number, number / 2]).to(dtype)
    same(lambda x: (x == number, x != number, x < number, x >= number, x % number, number % x, number // x, torch.fmod(x, number)), x)
    same(lambda x: (x - number, x + number, number - x, torch.full_like(x, number) - x, x.clamp(max=number) == number), x)
    same(lambda x: (F.threshold(x, number, 20.0), F.hardshrink(x, number)), x)


def test_a_number_that_varies_is_a_half_beside_halves():
    f = kiln.compile(lambda x, n: (x == n, x % n, x**n), dynamic=True)
    for n in (0.1, 0.3, 1e-8):
        x = torch.tensor([n, 0.0, 2.0], dtype=torch.float16)
        for mine, eager in zip(f(x, n), (x == n, x % n, x**n), strict=True):
            torch.testing.assert_close(mine, eager, equal_nan=True)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_bound_of_integers_is_one(dynamic):
    x, f = torch.arange(-3, 4), kiln.compile(lambda x, n: F.threshold(x, n, 5), dynamic=dynamic)
    assert all(torch.equal(f(x, n), F.threshold(x, n, 5)) for n in (-1.25, 1.5))


@pytest.mark.parametrize("number", [0.1, 0.3, 1.1, 2.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_halves_at_a_number(dtype, number):
    def gradients(x):
        x = x.detach().requires_grad_()
        made = F.hardtanh(x, -number, number), F.threshold(x, number, 20.0), F.hardshrink(x, number), F.softshrink(x, number)
        return tuple(torch.autograd.grad(y.sum(), x)[0] for y in made)

    same(gradients, torch.tensor([number, -number, 2 * number, -3 * number, number / 2]).to(dtype))


@pytest.mark.parametrize("f", [
    lambda a, b: (torch.where(a > 0, a, torch.zeros_like(a)), (a > 0) * a * 2),
    lambda a, b: (((a + 1) * b).bfloat16(), (a + 1) * 2),
], ids=["moved", "beside float32"])  # fmt: skip
def test_what_two_results_in_bfloat16_share(f):
    same(f, torch.arange(-32, 32).bfloat16(), torch.arange(64.0))


@pytest.mark.parametrize("by", [torch.tensor(1e5), torch.tensor([70001]), torch.tensor(1.003, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_scaled_by_a_number_with_all_its_places(dtype, by):
    x = torch.tensor([1e-3, 0.5, 3.0, -2.0, 100.0], dtype=dtype)
    f = kiln.compile(lambda x, by: (x * by, x / by, torch.div(x, by, rounding_mode="floor"), by * x, torch.xlogy(x, by) > 1e4))
    for mine, eager in zip(f(x, by), (x * by, x / by, x // by, by * x, torch.xlogy(x, by) > 1e4), strict=True):
        assert torch.equal(mine, eager)


def test_of_two_zeros_the_first():
    a = torch.tensor([0.0, -0.0]).repeat(20)
    same(lambda a, b: (torch.fmax(a, b).signbit(), torch.fmin(a, b).signbit()), a, -a)


def test_special_numbers():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 2.5, -2.5, 0.0, -0.0])
    a, b = (t.contiguous() for t in torch.meshgrid(x, x, indexing="ij"))
    same(lambda a, b: (a + b, a * b, a / b, torch.maximum(a, b), torch.fmax(a, b), torch.atan2(a, b), torch.pow(a, b)), a, b)
    same(lambda a, b: (torch.fmod(a, b), torch.remainder(a, b), torch.div(a, b, rounding_mode="floor"), a > b, a != b), a, b)
    same(lambda x: (x.exp(), x.log(), x.sin(), x.tanh(), x.sigmoid(), x.erf(), x.sqrt(), x.rsqrt(), x.round(), x.sign()), x)
    same(lambda x: (x.clamp(-1, 1), x.clamp(math.nan, 1), x.clamp(2, 1), x.amax(), x.argmax(), x.argmin()), x)


@pytest.mark.parametrize("places", [[0, -1, 3], [4], [-5], [100_000]], ids=str)
def test_indices_outside(places):
    x, i = torch.randn(4, 5), torch.tensor(places)
    same(lambda x, i: x[i] * 2, x, i)
    same(lambda x, i: x.index_select(0, i) * 2, x, i)
    same(lambda x, i: torch.gather(x * 2, 0, i[:, None]), x, i)
    same(lambda x, i: F.embedding(i, x) * 2, x, i)


def test_what_is_empty():
    same(lambda e: (e + 1, e.sum(0), e.mean(), e.prod(1), e.reshape(3, 0) + 1, e.all(1), e.softmax(1), e.T @ e), torch.empty(0, 3))
    same(lambda e: e.amax(0), torch.empty(0, 3))
    same(lambda x, i: x[i] + 1, torch.randn(3, 4), torch.empty(0, dtype=torch.long))


def test_parts_of_conjugates():
    z = torch.randn(3, 4, dtype=torch.complex64)
    same(lambda z: (z.conj().imag + 1, z.real * 2, z.abs() + 1, z * z), z)
    negative = z.conj().imag
    assert negative.is_neg()
    kiln.reset()
    assert torch.equal(kiln.compile(lambda n: n * 2 + 1, backend="kiln")(negative), negative * 2 + 1)


def test_pools_of_rows_are_packed_where_eagers_are():
    x = torch.randn(2, 16, 24).transpose(1, 2)
    for pool in (lambda x: F.max_pool1d(x * 2, 2), torch.nn.MaxPool1d(3), lambda x: torch.max_pool1d(x + 1, 2)):
        for given in (x, x.clone().requires_grad_()):
            kiln.reset()
            assert kiln.compile(pool, backend="kiln")(given).stride() == pool(given).stride()


def test_strides_of_extents_of_one_are_eagers():
    x = torch.randn(2, 1, 2).transpose(0, 1)  # (1, 2, 2) with strides (2, 2, 1)
    for norm in (lambda x: F.layer_norm(x, (2,)), lambda x: F.rms_norm(x * 2, (2,)), lambda x: F.group_norm(x, 1)):
        for given in (x, x.clone().requires_grad_()):
            kiln.reset()
            assert kiln.compile(norm, backend="kiln")(given).stride() == norm(given).stride()


def test_halves_that_are_only_moved_keep_subnormal_numbers():
    x = torch.tensor([1.1e-38, -1e-39, 3e-39, 2.5] * 40).bfloat16()
    for move in (
        torch.clone, lambda x: torch.cat([x, x]), lambda x: F.pad(x, (1, 2), value=-1.5), lambda x: torch.where(x > 0, x, -2),
        lambda x: x.view(4, 40).t().contiguous(), lambda x: x[torch.arange(0, 160, 3)], lambda x: x.roll(5), lambda x: x.masked_fill(x > 1, 0),
    ):  # fmt: skip
        kiln.reset()
        assert torch.equal(kiln.compile(move, backend="kiln")(x), move(x))


def test_many_tensors():
    same(lambda *given: functools.reduce(torch.add, given), *[torch.randn(3) for _ in range(300)])
    same(lambda x: tuple(x + i for i in range(70)), torch.randn(3))


def test_a_backward_compiled_inside_a_region_is_not_captured():
    def step(x):
        y = (x.sin() * 2).sum()
        y.backward()
        return x.grad * 2

    x, y = (torch.linspace(0, 1, 5).requires_grad_() for _ in range(2))
    torch.testing.assert_close(kiln.compile(step, backend="kiln")(x), step(y))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_gradients_of_what_is_empty_have_no_history(shape):
    x = torch.empty(shape, requires_grad=True)
    y = kiln.compile(lambda a: a.cummax(0)[0], backend="kiln", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert gradient.shape == x.shape and not gradient.requires_grad


@pytest.mark.parametrize("f", [F.elu, F.celu, F.selu, F.hardswish, F.hardtanh, F.relu6, F.hardshrink, F.softshrink])
def test_gradients_at_nan_are_those_of_eagers_vectors(f):
    x, y = (torch.tensor([math.nan, 1.0, -1.0, 0.0]).repeat(32).requires_grad_() for _ in range(2))
    kiln.compile(f, backend="kiln", fullgraph=True)(x).sum().backward()
    f(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


def test_a_view_comes_after_the_view_that_a_kernel_stores():
    def program(a):
        v = a.tanh().select(1, 1)
        return torch.copysign(v, a), v.flatten().expand((64,))

    x = torch.randn(1, 3, 64, 1, requires_grad=True)
    torch.testing.assert_close(kiln.compile(program, backend="kiln", fullgraph=True)(x), program(x))
