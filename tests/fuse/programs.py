"""Random tensor programs.

A program is text: a line for each op, drawn from `ROWS` by a random generator and kept when eager runs it. Ops that jump
are drawn for float values alone that eager has exactly, as the same lines in float64 show; see `comparing` for the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
WHOLE = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bl": torch.bool}
EXTENTS = (1, 1, 2, 3, 3, 4, 5, 8, 16, 17, 33, 64, 100)
MOST = 60_000  # elements of a value
LAYOUTS = ("plain",) * 5 + ("transposed", "stepped", "offset", "expanded", "padded", "inner step", "channels last")

#: Lines and how often they are drawn. Slots: t any tensor, f a float one, x an exact float one, e any exact one, i an
#: integer one, b a boolean one, q an integer or boolean one, m a matrix of floats, k floats of three or four dimensions,
#: g finite ones (eager's running mean of infinities depends on where they are), v a tensor to write to, w floats to
#: write to, s one with memory after its first element; the others are made for the tensor before them.
ROWS: list[tuple[int, tuple[str, ...]]] = [
    (14, ("{t} + {t}", "{t} - {f}", "{t} * {t}", "{t} + {n}", "{t} * {n}", "{n} - {t}", "{f} / ({f}.abs() + 1)", "torch.add({t}, {t}, alpha=2)",
          "{f} * {f} + {f}", "torch.lerp({f}, {f}, 0.25)", "{f} ** 2", "torch.addcmul({f}, {f}, {f}, value=0.5)", "-{f}")),
    (10, ("{f}.sin()", "{f}.exp()", "({f}.abs() + 0.5).log()", "{f}.tanh()", "F.gelu({f})", "F.silu({f})", "F.softplus({f})", "torch.sigmoid({f})",
          "{f}.erf()", "({f} * {f} + 1).rsqrt()", "{f}.abs().sqrt()", "torch.atan2({x}, {x})", "{f}.expm1()", "{f}.abs().log1p()", "{f}.cos()",
          "torch.exp2({f})", "({f}.abs() + 0.25).reciprocal()", "({f}.abs() + 0.5).pow({f})", "({f}.abs() + 0.5) ** 1.5", "{f}.atan()",
          "F.mish({f})", "F.elu({f})", "F.logsigmoid({f})", "torch.hypot({f}, {f})", "{f}.tan().clamp(-3, 3)", "({f} / 8).asin()",
          "torch.logaddexp({f}, {f})", "{f}.sinh()", "torch.xlogy({f}, {f}.abs() + 1)")),
    (9, ("{f}.relu()", "{t}.abs()", "torch.maximum({t}, {t})", "torch.minimum({t}, {t})", "{t}.clamp(-1, 1)", "{f}.clamp(min=0.25)", "F.leaky_relu({f}, 0.1)",
         "F.hardswish({f})", "F.hardtanh({f})", "{x}.floor()", "{x}.ceil()", "{x}.round()", "{x}.trunc()", "{x}.frac()", "{x}.sign()", "torch.clamp({f}, {f}, {f} + 1)",
         "torch.fmod({x}, {x} + 0.5)", "torch.remainder({x}, 1.5)", "torch.div({x}, 0.75, rounding_mode='floor')", "torch.div({x}, 1.5, rounding_mode='trunc')",
         "{x}.detach() // 0.5", "torch.fmax({f}, {f})", "torch.copysign({f}, {x})", "torch.nan_to_num({f})", "torch.heaviside({x}.detach(), {x}.detach())")),
    (8, ("{e} > {e}", "{e} == {e}", "{e} <= {n}", "{e} != {e}", "{e}.isnan()", "torch.isfinite({e})", "torch.where({b}, {t}, {t})", "torch.where({b}, {f}, 0.5)",
         "{f}.masked_fill({b}, 1.5)", "~{q}", "{q} & {q}", "{q} | {q}", "{q} ^ {q}", "torch.logical_and({e}, {e})", "torch.logical_not({e})", "torch.isclose({x}, {x})")),
    (6, ("{i} // 3", "{i} % 5", "{i} % -3", "{i} // -2", "torch.fmod({i}, 3)", "torch.div({i}, 3, rounding_mode='trunc')", "{i} << 2", "{i} >> 1", "{i} ** 2", "{i} ** 3", "{i} * {i}",
         "{i} - {q}", "{i} / 4", "torch.bitwise_not({i})", "{q} * {n}", "{q} + {f}", "-{i}", "torch.sign({i})", "{i}.abs()", "{i} // ({i}.abs() + 1)", "torch.gcd({i}, {i})", "{i} << {i} % 4")),
    (9, ("{f}.sum({d})", "{f}.mean({d}, keepdim=True)", "{t}.sum()", "{f}.amax({d})", "{t}.amin({d}, keepdim=True)", "{f}.softmax({d})", "{f}.log_softmax({d})", "{e}.any({d})",
         "{e}.all()", "{f}.var({d})", "{f}.std({d}, keepdim=True)", "torch.logsumexp({f}, {d})", "{f}.sum({dd})", "{f}.mean({dd}, keepdim=True)", "{e}.max({d})[0]", "{e}.argmax({d})", "{e}.min({d})[1]",
         "{q}.sum({d})", "{f}.norm(2, {d})", "{f}.prod({d})", "{q}.prod({d})", "{f}.amax({dd})", "{f}.cumsum({d})", "torch.var_mean({f}, {d})[0]", "{t}.amax()", "{e}.argmin()",
         "F.layer_norm({f}, {lastdim})", "F.normalize({f}, dim={d})", "{f}.sum({d}, dtype=f64)", "{q}.sum({d}, dtype=f32)", "torch.count_nonzero({e})", "{f}.mean()", "{f}.nansum({d})")),
    (12, ("{t}.permute({perm})", "{t}.transpose({d}, {d})", "{t}.reshape({shape})", "{t}.unsqueeze({d})", "{t}.squeeze()", "{t}[{at}]", "{t}[{at}]", "{t}.expand({wider})",
          "{t}.flatten()", "{t}.flip({d})", "{t}.contiguous()", "{t}.t() if {t}.dim() == 2 else {t}", "{t}.narrow({piece})", "{t}.movedim({d}, {d})", "{t}.diagonal()", "{t}.clone()",
          "{t}.repeat({times})", "{t}.roll(1, {d})", "{t}.unfold({window})", "{t}.select({place})", "torch.tril({f})", "{t}.chunk(2, {d})[-1]", "{s}.as_strided((2,), (1,))",
          "{t}.swapaxes({d}, {d}).contiguous()", "{t}.detach()", "{t}.view({shape})", "torch.atleast_2d({t})", "{t}.repeat_interleave(2, {d})")),
    (6, ("torch.cat([{t}, {t}], {d})", "torch.stack([{t}, {t}], {d})", "torch.cat([{f}, {f} * 2, {t}], {d})", "F.pad({f}, (1, 2))", "F.pad({t}, (0, 1, 2, 0), value=3)", "F.pad({f}, (-1, 1))",
         "F.pad({f}, (1, 1), mode='replicate')", "torch.cat([{t}.flatten(), {t}.flatten()])", "F.pad({f}, (2, -1, -1, 1))", "torch.constant_pad_nd({i}, (1, 0), 7)")),
    (5, ("{t}.index_select({picks})", "{t}[{index}]", "torch.gather({t}, {gathered})", "{t}.masked_fill({b}, 0)", "{t}.index_add({added})", "{t}.scatter({put})", "{f}.scatter_add({put})",
         "{t}.index_copy({added3})", "{t}.index_fill({filled})", "torch.select_scatter({t}, {t}.select({place}), {place})", "{f}.scatter_reduce({put}, 'amax')",
         "{f}.scatter_reduce({put}, 'sum', include_self=False)", "torch.slice_scatter({t}, {t}.narrow(0, 0, 1), 0, 0, 1)", "torch.bucketize({x}, torch.tensor([-1.0, 0.0, 1.5]))",
         "{t}[{index}, ...]", "{t}[..., {lastindex}]", "{t}[{index}, {index}]", "torch.index_put({f}, ({index},), {f}.sum(), accumulate=True)",
         "torch.index_put({f}, ({index},), torch.tensor(1.5), accumulate=True)", "F.one_hot(torch.arange(4), 5) * {n}", "torch.take_along_dim({t}, {gathered2})", "F.embedding({rows}, {m})")),
    (6, ("{v}.add_({t})", "{v}.mul_({n})", "{v}[{at}] = {t}", "{v}[{at}] = {n}", "{v}.copy_({t})", "{v}[{at}].mul_(2)", "{v}.t_() if {v}.dim() == 2 else {v}", "{v}.zero_()",
         "{v}[{at}] += {t}", "{v}.clamp_(-1, 1)", "{v}.masked_fill_({b}, 0.5)", "{v}.transpose({d}, {d}).add_(1)", "{v}.view(-1)[1:].sub_(1)", "{v}.flatten()[:1].fill_(2)", "{v}[{index}] = {n}",
         "{v}.diagonal().mul_(2)", "{v}.permute({perm}).add_(1)", "{v}.unsqueeze({d}).mul_(3)", "{v}.chunk(2, {d})[0].add_(1)", "{v}.narrow({piece}).zero_()", "{s}.as_strided((2,), (1,)).mul_(2)",
         "{v}.select({place}).fill_(1)", "{v}.index_add_({added})", "{v}.scatter_({put})", "{w}.sigmoid_()", "{w}.div_({f}.abs() + 1)", "{v}.unfold({window})[:1].mul_(2)", "{v}.flip({d}).add_(1)",
         "{v}[{at}].copy_({t})", "{w}.lerp_({f}, 0.5)", "{v}.t().mul_(2)", "{w}.relu_()", "{v}.squeeze().sub_(1)", "{t}[0].mul_(2)", "{v}.swapaxes({d}, {d})[:1].add_({t})")),
    (5, ("F.max_pool2d({k}, 2)", "F.avg_pool2d({k}, 2, stride=1)", "F.max_pool2d({k}, 3, 2, 1)", "F.adaptive_avg_pool2d({k}, 2)", "F.avg_pool2d({k}, 3, 2, 1, count_include_pad=False)", "F.max_pool1d({k}, 2)",
         "F.interpolate({k}, scale_factor=2)", "F.interpolate({k}, size=5, mode='linear')", "F.interpolate({k}, size=(3, 4), mode='bilinear')", "F.pad({k}, (1, 1), mode='reflect')", "F.pixel_shuffle({k}, 2)",
         "F.pad({k}, (1, 1, 1, 1), mode='circular')", "F.adaptive_max_pool1d({k}, 2)", "F.lp_pool1d({k}, 2, 2)", "F.unfold({k}, 2)", "F.group_norm({k}, 1)", "F.instance_norm({k})", "F.batch_norm({k}, None, None, training=True)",
         "F.conv2d({k}, torch.full((2, {k}.shape[1], 2, 2), 0.25))", "F.conv1d({k}, torch.full((3, {k}.shape[1], 1), 0.5))")),
    (4, ("{f}.cumprod({d})", "torch.logcumsumexp({f}, {d})", "{e}.cummax({d})[0]", "{e}.cummin({d})[1]", "{q}.cumsum({d})", "{f}.flip({d}).cumsum({d})", "{f}.cumsum({d}).sin()", "torch.diff({f}, dim={d})",
         "{e}.sort({d})[0]", "{x}.topk(1, {d})[0]", "{f}.sort({d}, descending=True)[0]", "{x}.median({d})[0]", "{x}.argsort({d}, stable=True)", "torch.cumulative_trapezoid({f}, dim={d})", "{x}.kthvalue(1, {d})[0]")),
    (3, ("F.cross_entropy({m}, torch.arange({m}.shape[0]) % {m}.shape[1])", "F.mse_loss({f}, {f}.detach() * 0.5)", "F.smooth_l1_loss({f}, {f}.flip(0))", "F.nll_loss({m}.log_softmax(1), torch.zeros({m}.shape[0], dtype=i64))",
         "F.glu({f}, {d})", "F.rms_norm({f}, {lastdim})", "F.cosine_similarity({f}, {f}, {d})", "F.kl_div({f}.log_softmax(-1), {f}.sigmoid())", "F.binary_cross_entropy_with_logits({f}, {f}.sigmoid().detach())",
         "F.threshold({x}, 0.25, 0)", "F.prelu({f}, torch.tensor([0.25]))", "F.softmin({f}, {d})", "F.hardsigmoid({f})", "F.hardshrink({x})", "F.softshrink({f})", "F.celu({f})", "F.selu({f})", "F.relu6({f})")),
    (5, ("{t}.to({ft})", "{e}.to({it})", "{t}.float()", "{e}.long()", "{e}.bool()", "{t}.double()", "{e}.to(bl)", "{f}.to(bf16)", "{t}.type_as({f})", "{e}.int()")),
    (3, ("torch.arange({len})", "torch.arange({len}) * {f}", "torch.full(({len},), 1.5) + {f}", "torch.zeros_like({t})", "torch.ones({len}, {len}).tril()", "torch.linspace(0, 1, {len})",
         "torch.eye({len}) * 2", "torch.arange(1, 9, 2, dtype=i32)", "torch.full_like({t}, 2)", "{t}.new_ones(3)", "torch.tensor(2.5) * {t}", "torch.tensor(3) + {t}", "torch.arange(0.5, 3.0, 0.5)")),
    (5, ("{t}.unbind({d})[-1]", "{t}.split(2, {d})[0]", "torch.stack({t}.unbind({d}), -1)", "torch.aminmax({f}, dim={d})[1]", "torch.var_mean({g}, {d})[1]", "{f}.std()", "torch.triu({t}, 1)", "torch.rot90({t}) if {t}.dim() > 1 else {t}",
         "{t}.tile(2)", "{f}.clamp(max={f}.mean())", "F.huber_loss({f}, {f}.detach() * 0.5)", "F.l1_loss({f}, {f}.flip(0) * 0.5)", "torch.where({b}, {q}, {q})", "{t}.diag_embed()", "torch.addmm({m}, {m}, {m})",
         "(lambda k: F.scaled_dot_product_attention({k}, k, k.flip(-1) * 0.5))({k})", "F.conv_transpose1d({k}, torch.full(({k}.shape[1], 2, 3), 0.25), stride=2)", "F.conv2d({k}, torch.full((4, {k}.shape[1], 3, 3), 0.125), stride=2, padding=1)",
         "F.batch_norm({k}, torch.zeros({k}.shape[1]), torch.ones({k}.shape[1]))", "{v}.fill_diagonal_(1)", "{w}.exp_()", "{v}.index_put_(({index},), {v}[:1].sum())", "{v}.t().copy_({t}.clone())", "torch.linalg.vector_norm({f}, dim={d})",
         "{t}.ravel()[::2]", "{f}.square().mean({d}, keepdim=True).add(1).rsqrt() * {f}", "torch.cat([{t}[:1], {t}[1:]])", "{t}[..., None] * {t}[..., None, :] if {t}.dim() == 1 else {t}", "{i}.remainder(4).float()", "{f}.nanmean({d})")),
    (4, ("{m} @ {m}.t()", "torch.mm({m}.t(), {m}) * 0.5", "F.linear({f}, {m})", "torch.matmul({f}, {f}.transpose(-1, -2)) if {f}.dim() > 1 else {f}", "torch.einsum('ij,kj->ik', {m}, {m})", "({m} @ {m}.t()).softmax(-1)",
         "torch.baddbmm({f}, {f}, {f})", "torch.outer({f}.flatten()[:5], {f}.flatten()[:7])")),
]  # fmt: skip
DRAWN = [line for weight, lines in ROWS for line in lines for _ in range(weight * 12 // len(lines) + 1)]
#: Lines whose results are rounded: one that eager happens to have exactly, a difference of equal ones, may come otherwise.
ROUNDED = {*ROWS[1][1], *(line for _, lines in ROWS for line in lines if re.search("soft|norm|var|std|log|lu\\(|cosine|entropy|kl_div|pool|sigmoid|lerp|conv|linear'", line))}
#: Lines whose results hold an extent twice, or are as many tensors: of long ones no memory holds them.
SQUARES = re.compile(r"unbind|split\(|diag_embed|None, :\]|@|mm\(|matmul|linear\(|einsum|eye\(|ones\(\{len\}, |attention")
IN_PLACE = re.compile(r"^\w+(\[.*\])?(\.\w+\([^)]*\))?(\[[^]]*\])? (\+)?= |^\w+.*\.\w+_\(")


#: Where programs run: KILN_DEVICE=cuda for a GPU.
DEVICE = os.environ.get("KILN_DEVICE", "cpu")


def on_device(name: str) -> Callable[..., torch.Tensor]:
    """One of torch's functions that make tensors, on the device."""
    make = getattr(torch, name)
    return lambda *args, **kwargs: make(*args, device=DEVICE, **kwargs)


MAKERS = ("arange", "eye", "full", "linspace", "ones", "tensor", "zeros")
PLACED = {f"{name}_": on_device(name) for name in MAKERS}


def placed(text: str) -> str:
    """Lines whose new tensors are on the device."""
    return text if DEVICE == "cpu" else re.sub(rf"\btorch\.({'|'.join(MAKERS)})\(", r"\1_(", text)


@dataclass
class Input:
    """A tensor that a program takes: shape, dtype by name, layout in memory, special values, and its own seed."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    special: bool
    grad: bool
    seed: int
    of: int | None = None
    """An earlier input that this one shows, by `view`, in place of one of its own."""
    view: str = "x"

    def make(self, dtypes: dict[str, torch.dtype], device: str | None = None) -> torch.Tensor:
        """The tensor; quarters between -2 and 2 for floats, and small whole numbers."""
        n = math.prod(self.shape)
        generator = torch.Generator().manual_seed(self.seed)
        if self.dtype in FLOATS:
            values = torch.randint(-8, 9, (n,), generator=generator).double() / 4
            if self.special and n:
                for value in (math.nan, math.inf, -math.inf, -0.0):
                    values[torch.randint(0, n, (1,), generator=generator)] = value
        else:
            values = torch.randint(0 if self.dtype in ("u8", "bl") else -6, 2 if self.dtype == "bl" else 7, (n,), generator=generator)
        values = values.reshape(self.shape).to(device or DEVICE, dtypes[self.dtype])
        return laid_out(values, self.layout).requires_grad_(self.grad)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout of memory."""
    rank = x.dim()
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if not rank:
        return x
    if layout == "transposed":
        order = list(range(rank))[::-1]
        return x.permute(order).contiguous().permute(order)
    if layout == "stepped":
        whole = x.new_ones(x.shape[0] * 2, *x.shape[1:])
        whole[::2] = x
        return whole[::2]
    if layout == "inner step":
        whole = x.new_ones(*x.shape[:-1], x.shape[-1] * 3)
        whole[..., 1::3] = x
        return whole[..., 1::3]
    if layout == "padded":
        whole = x.new_ones(*x.shape[:-1], x.shape[-1] + 2)
        whole[..., 1:-1] = x
        return whole[..., 1:-1]
    if layout == "channels last" and rank == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "expanded" and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@dataclass
class Program:
    """Inputs, lines and the names that are returned."""

    inputs: list[Input]
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    mode: str = ""

    def made(self, dtypes: dict[str, torch.dtype], device: str | None = None) -> list[torch.Tensor]:
        """The inputs; some may show the memory of others."""
        made: list[torch.Tensor] = []
        for given in self.inputs:
            made.append(given.make(dtypes, device) if given.of is None else eval(given.view, {"x": made[given.of]}))
        return made

    def entered(self) -> Any:
        """The context that it runs in."""
        return MODES[self.mode]()

    def text(self) -> str:
        arguments = ", ".join(f"a{i}" for i in range(len(self.inputs)))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({arguments}):\n{body}    return {', '.join(self.outputs)},\n"

    def function(self, dtypes: dict[str, torch.dtype], device: str | None = None) -> Callable[..., Any]:
        text = self.text() if device == "cpu" else placed(self.text())
        space: dict[str, Any] = {"torch": torch, "F": F, **PLACED, **dtypes}
        exec(compile(text, "<random program>", "exec"), space)
        function: Callable[..., Any] = space["program"]
        return function


    def resized(self, random: Random) -> Program:
        """The same lines for inputs of other sizes, equal ones staying equal; eager may refuse them."""
        extents = sorted({n for given in self.inputs for n in given.shape if n > 1})
        other = {n: random.choice((2, 3, 5, 7, 16, 17, 40)) for n in extents}
        inputs = [replace(given, shape=tuple(other.get(n, n) for n in given.shape)) for given in self.inputs]
        return replace(self, inputs=inputs)

    def toggled(self, random: Random) -> Program:
        """The same lines where other inputs require grad, or in another grad mode."""
        inputs = [replace(given, grad=given.dtype in FLOATS and not given.special and random.random() < 0.5) for given in self.inputs]
        mode = self.mode if self.mode == "autocast" else random.choice(("", "no_grad", "inference"))
        return replace(self, inputs=inputs, mode=mode)

    def varied(self, random: Random) -> list[Program]:
        """What the same function may be called with next."""
        found = []
        for _ in range(random.choice((0, 0, 1, 2, 3))):
            changed = (found or [self])[-1]
            found.append(changed.resized(random) if random.random() < 0.5 else changed.toggled(random))
        return found


def _autocast() -> Any:
    return torch.autocast(DEVICE, torch.bfloat16)


#: Where lines run.
MODES: dict[str, Callable[[], Any]] = {"": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode, "autocast": _autocast}
#: What an input shows of another one.
VIEWS = ("x", "x", "x.detach()", "x[..., :1]", "x.transpose(0, -1)", "x[1:]", "x.unsqueeze(0)", "x.flatten()")


PLAIN = {**FLOATS, **WHOLE}
EXACT = {**dict.fromkeys(FLOATS, torch.float64), **WHOLE}


# Drawing


class Drawing:
    """A program under construction, with the values that eager and exact arithmetic give."""

    def __init__(self, random: Random, lines: int) -> None:
        self.random = random
        self.program = Program(self.inputs(), mode=random.choice(("",) * 12 + ("no_grad", "inference", "autocast")))
        self.spaces = self.run()
        self.names = [f"a{i}" for i in range(len(self.program.inputs))]
        self.vague: set[str] = set()
        """Values that depend on rounded ones."""
        for _ in range(lines):
            for _ in range(6):
                if self.line(random.choice(DRAWN)):
                    break
        self.finish()

    def run(self) -> list[dict[str, Any]]:
        """The names and values of the program so far, in eager's dtypes and in float64."""
        spaces: list[dict[str, Any]] = []
        for dtypes in (PLAIN, EXACT):
            values = {f"a{i}": value for i, value in enumerate(self.program.made(dtypes, "cpu"))}
            spaces.append({"torch": torch, "F": F, **dtypes, **values})
            with self.program.entered():
                for line in self.program.lines:
                    exec(line, spaces[-1])
        return spaces

    def inputs(self) -> list[Input]:
        r = self.random
        rank = r.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
        whole = [r.choice(EXTENTS) for _ in range(rank)]
        if r.random() < 0.06 and rank:
            whole[r.randrange(rank)] = 0
        while math.prod(whole) > MOST / 4:
            whole[whole.index(max(whole))] = 3
        if r.random() < 0.004:
            whole = [1_000_003]
        made = []
        floats = r.random() < 0.75
        for i in range(r.choice((1, 2, 2, 3))):
            shape = [n if i == 0 or r.random() < 0.7 else 1 for n in whole]
            shape = shape[r.choice((0, 0, 0, 1)) if i else 0 :]
            names = ["f32"] * 8 + ["f64", "bf16", "f16"] if floats and i != 2 else [*PLAIN, "f32", "i64"]
            dtype = r.choice(names)
            grad = dtype in FLOATS and r.random() < 0.5
            made.append(Input(tuple(shape), dtype, r.choice(LAYOUTS), not grad and r.random() < 0.05, grad, r.randrange(1000)))
            if i and made[0].shape and r.random() < 0.04:
                made[-1] = replace(made[0], of=0, view=r.choice(VIEWS))
        return made

    def line(self, template: str) -> bool:
        """Add a line if its slots can be filled and eager runs it."""
        self.last = ""
        try:
            text = re.sub(r"\{(\w+)\}", lambda m: str(self.slot(m[1])), template)
        except (LookupError, ValueError):
            return False
        if SQUARES.search(template) and self.longest(text) > 1000:
            return False
        writes = IN_PLACE.match(re.sub(r"\{[sv]\}", "a", template).replace("{at}", "").replace("{index}", "")) is not None
        name = f"v{len(self.program.lines)}"
        line = text if writes else f"{name} = {text}"
        if not all(self.tried(line, name, space) for space in self.spaces):
            if writes:
                self.spaces = self.run()  # without what the line wrote
            return False
        self.program.lines.append(line)
        if not writes:
            self.names.append(name)
        if template in ROUNDED or not self.vague.isdisjoint(re.findall(r"\b[av]\d+\b", text)):
            self.vague |= self.sharing(re.match(r"\w+", line)[0]) if writes else {name}  # type: ignore[index]
        return True

    def longest(self, text: str) -> int:
        """The largest extent of tensors, and the largest number, in a line."""
        named = [n for name in re.findall(r"\b[av]\d+\b", text) for n in self.spaces[0][name].shape]
        return max([*named, *map(int, re.findall(r"\b\d+\b", text))], default=0)

    def sharing(self, name: str) -> set[str]:
        """The names of values in the same memory."""
        memory = self.spaces[0][name].untyped_storage().data_ptr()
        return {n for n in self.names if self.spaces[0][n].untyped_storage().data_ptr() == memory}

    def tried(self, line: str, name: str, space: dict[str, Any]) -> bool:
        try:
            with self.program.entered():
                exec(line, space)  # on the CPU: on a GPU an index out of range ends all that comes after
        except Exception:
            return False
        value = space.get(name)
        if value is None:
            # Integers filled with what requires grad do so too, by a fault of eager's; other calls on them raise.
            return not any(space[n].requires_grad and not space[n].is_floating_point() for n in self.names)
        fine = isinstance(value, torch.Tensor) and value.numel() <= max(MOST, max(v.numel() for v in self.tensors()))
        if fine and value.is_floating_point() and value.numel():
            sizes = value.detach().abs().double()
            fine = bool((sizes[sizes.isfinite()] < 1e4).all())
        if not fine:
            del space[name]
        return fine

    def tensors(self) -> list[torch.Tensor]:
        return [self.spaces[0][name] for name in self.names]

    def finish(self) -> None:
        """Choose what is returned: the last values, and some others."""
        r, program = self.random, self.program
        made = [name for name in self.names if name.startswith("v")] or self.names
        program.outputs = made[-r.choice((1, 1, 2, 3)) :]
        if r.random() < 0.2:
            program.outputs.append(r.choice(self.names))

    # Slots

    def slot(self, kind: str) -> Any:
        if kind in TENSORS:
            fitting = [n for n in self.names if TENSORS[kind](self, n)]
            # Later values are likelier; without any that fits, randrange raises.
            self.last = fitting[-1 - min(self.random.randrange(len(fitting)) for _ in range(3))]
            return self.last
        value = self.spaces[0][self.last] if self.last else torch.zeros(())
        return getattr(self, f"slot_{kind}")(value)

    def exact(self, name: str) -> bool:
        if name in self.vague:
            return False
        mine, exact = (space[name].detach() for space in self.spaces)
        return mine.shape == exact.shape and torch.equal(mine.double().nan_to_num(9.5), exact.double().nan_to_num(9.5))

    def slot_n(self, x: Any) -> str:
        return self.random.choice(("2", "3", "-1", "0.5", "1", "-2.5", "True"))

    def slot_d(self, x: torch.Tensor) -> int:
        return self.random.choice(range(-x.dim(), x.dim())) if x.dim() else 0

    def slot_dd(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(range(x.dim()), min(2, x.dim()))))

    def slot_lastdim(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(x.shape[-1:]) if x.dim() == 1 or self.random.random() < 0.7 else tuple(x.shape[-2:])

    def slot_perm(self, x: torch.Tensor) -> list[int]:
        return self.random.sample(range(x.dim()), x.dim())

    def slot_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Another shape for as many elements."""
        rest, shape = x.numel(), []
        while rest > 1 and len(shape) < 3:
            n = self.random.choice([d for d in (2, 3, 4, 5, 8, 16, 17, rest) if rest % d == 0])
            shape.append(n)
            rest //= n
        shape.append(rest)
        self.random.shuffle(shape)
        if self.random.random() < 0.3:
            shape.insert(self.random.randrange(len(shape) + 1), 1)
        if self.random.random() < 0.3 and x.numel():
            shape[self.random.randrange(len(shape))] = -1
        return tuple(shape)

    def slot_at(self, x: torch.Tensor) -> str:
        """Something between brackets: slices, numbers, None and an ellipsis."""
        r, parts = self.random, []
        for n in x.shape:
            parts.append(r.choice((":", ":", "1:", "::2", ":-1", "None", "...", "0", "-1", f"{n // 2}:", ":1", "1:-1", f"{n // 3}", f":{n // 2}", "-2:")))
            if parts[-1] == "...":
                break
        return ", ".join(parts) or "..."

    def slot_wider(self, x: torch.Tensor) -> tuple[int, ...]:
        shape = [self.random.choice((2, 3, 5)) if n == 1 else n for n in x.shape]
        return (*([self.random.choice((1, 2, 3))] if self.random.random() < 0.5 else []), *shape)

    def slot_piece(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        start = self.random.randrange(x.shape[dim] + 1)
        return f"{dim}, {start}, {self.random.randrange(x.shape[dim] - start + 1)}"

    def slot_place(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, {self.random.randrange(-x.shape[dim], x.shape[dim])}"

    def slot_window(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, {self.random.randint(1, max(x.shape[dim] // 2, 1))}, {self.random.choice((1, 2, 3))}"

    def slot_times(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.random.choice((1, 1, 2)) for _ in range(x.dim() + self.random.choice((0, 0, 1))))

    def places(self, size: int, count: int) -> str:
        return f"torch.tensor({[self.random.randrange(-size, size) for _ in range(count)]})"

    def slot_picks(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        n = x.shape[dim]
        return f"{dim}, torch.tensor({[self.random.randrange(n) for _ in range(self.random.choice((1, 3, 5)))]})"

    def slot_index(self, x: torch.Tensor) -> str:
        return self.places(x.shape[0], self.random.choice((1, 2, 4)))

    def slot_rows(self, x: torch.Tensor) -> str:
        return "torch.tensor([[0, 1, 0], [1, 1, 0]])"

    def slot_gathered(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, torch.arange({x.numel()}).view({tuple(x.shape)}) % {x.shape[dim]}"

    def slot_gathered2(self, x: torch.Tensor) -> str:
        dim, text = self.slot_gathered(x).split(", ", 1)
        return f"{text}, {dim}"

    def slot_put(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, torch.arange({x.shape[dim]}).view({tuple(-1 if d == dim else 1 for d in range(x.dim()))}).expand({tuple(x.shape)}).flip({dim}), {self.last}"

    def slot_added(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, torch.arange({x.shape[dim]}) // 2, {self.last}"

    def slot_added3(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, torch.arange({x.shape[dim]}).flip(0), {self.last}"

    def slot_filled(self, x: torch.Tensor) -> str:
        dim = self.random.randrange(x.dim())
        return f"{dim}, torch.tensor([0, {x.shape[dim] - 1}]), 2"

    def slot_lastindex(self, x: torch.Tensor) -> str:
        return self.places(x.shape[-1], self.random.choice((1, 2, 5)))

    def slot_len(self, x: torch.Tensor) -> int:
        return self.random.choice([n for v in self.tensors() for n in v.shape[-1:]])

    def slot_ft(self, x: torch.Tensor) -> str:
        return self.random.choice(("f32", "f32", "f64", "bf16", "f16"))

    def slot_it(self, x: torch.Tensor) -> str:
        return self.random.choice([*WHOLE]) if not x.is_floating_point() or bool((x >= 0).all()) else self.random.choice(("i64", "i32", "bl"))


def _dtype(drawing: Drawing, name: str) -> torch.dtype:
    dtype: torch.dtype = drawing.spaces[0][name].dtype
    return dtype


def _goes_on(x: torch.Tensor) -> bool:
    """Whether the memory of a tensor, or of what it views, has a known element after the first; eager may reserve more."""
    base = x if x._base is None else x._base
    last = base.storage_offset() + sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True))
    return x.numel() > 0 and x.storage_offset() < last


TENSORS: dict[str, Callable[[Drawing, str], bool]] = {
    "t": lambda d, n: True,
    "v": lambda d, n: not any(s == 0 and k > 1 for s, k in zip(d.spaces[0][n].stride(), d.spaces[0][n].shape, strict=True)),
    "f": lambda d, n: _dtype(d, n).is_floating_point,
    "g": lambda d, n: _dtype(d, n).is_floating_point and bool(d.spaces[0][n].data.isfinite().all()),
    "x": lambda d, n: _dtype(d, n).is_floating_point and d.exact(n),
    "e": lambda d, n: d.exact(n),
    "i": lambda d, n: not _dtype(d, n).is_floating_point and _dtype(d, n) is not torch.bool,
    "b": lambda d, n: _dtype(d, n) is torch.bool,
    "q": lambda d, n: not _dtype(d, n).is_floating_point,
    "w": lambda d, n: TENSORS["v"](d, n) and _dtype(d, n).is_floating_point,
    "s": lambda d, n: TENSORS["v"](d, n) and _goes_on(d.spaces[0][n]),
    "k": lambda d, n: _dtype(d, n).is_floating_point and d.spaces[0][n].dim() in (3, 4),
    "m": lambda d, n: _dtype(d, n).is_floating_point and d.spaces[0][n].dim() == 2,
}


def drawn(random: Random, lines: int = 8) -> Program:
    """A random program of about this many lines."""
    return Drawing(random, random.randint(1, lines)).program
