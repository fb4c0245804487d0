"""A table of calls: every function of torch, torch.nn.functional and Tensor, as expressions over a few named tensors."""

from __future__ import annotations

import torch

from tests.support import t

SPD = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]])

TENSORS = {
    "x": t(3, 4), "y": t(3, 4).flip(0).contiguous() + 0.3, "u": torch.linspace(0.1, 0.9, 12).reshape(3, 4),
    "m": SPD, "v": t(4), "w": t(3), "i": torch.arange(12).reshape(3, 4) % 3, "j": torch.tensor([0, 2, 1]),
    "k": torch.arange(12).reshape(3, 4) % 2 == 0, "c": torch.complex(t(3, 4), t(3, 4).flip(1).contiguous()),
    "B": t(2, 3, 4), "D": t(2, 4, 3), "seq": t(2, 4, 8), "img": t(1, 4, 6, 6), "vol": t(1, 2, 4, 4, 4),
}  # fmt: skip

# One name: torch.f(a), a.f() and a.clone().f_() where they exist, with the argument named at the start of the row.
UNARY = """
x: abs absolute acosh arccosh asinh arcsinh atan arctan ceil cos cosh deg2rad erf erfc exp exp2 expm1 fix floor frac isfinite
x: isinf isnan isneginf isposinf isreal logical_not neg negative positive rad2deg reciprocal relu round sgn sigmoid sign
x: signbit sin sinc sinh square tan tanh trunc i0 selu nan_to_num clone detach angle conj conj_physical resolve_conj
x: resolve_neg adjoint ravel fliplr flipud t t_copy detach_copy alias_copy msort
x: argmax argmin max min amax amin mean median mode prod std std_mean sum var var_mean norm nanmean nanmedian nansum numel
x: aminmax count_nonzero argsort sort flatten squeeze squeeze_copy diag diagflat diag_embed
x: tril triu unbind unbind_copy is_complex is_conj is_floating_point is_inference is_neg is_signed get_device frexp diff
x: atleast_1d atleast_2d atleast_3d ones_like zeros_like diagonal diagonal_copy pinverse rot90
x: isnan gradient digamma lgamma
u: acos arccos asin arcsin atanh arctanh erfinv log log10 log1p log2 logit rsqrt sqrt digamma lgamma
i: bitwise_not all any abs neg sign
k: all any logical_not bitwise_not sum
m: cholesky_inverse det inverse logdet matrix_exp pinverse slogdet trace
c: view_as_real view_as_real_copy conj angle resolve_conj sgn conj_physical
w: diag diagflat
"""

# Two names: torch.f(a, b), a.f(b), a.clone().f_(b).
BINARY = """
x y: add atan2 arctan2 copysign div divide eq floor_divide fmax fmin fmod ge greater greater_equal gt heaviside
x y: hypot isclose le less less_equal lt logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mul multiply
x y: ne nextafter not_equal remainder rsub sub subtract true_divide dist max min is_same_size view_as reshape_as
x y: expand_as type_as
u u: pow xlogy igamma igammac
i i: bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm eq add mul
x v: add mul sub div mv maximum
m m: matmul mm kron
w v: outer ger
v v: dot inner vdot matmul
B D: matmul bmm
m w: mv matmul
"""

TORCH = """
torch.combinations(v)
torch.add(x, y, alpha=2), x.add(1), x.add_(y, alpha=0.5), 1 + x, x + 1, x - 1, 1 - x, x * 2, 2 * x, x / 2, 2 / u, x // 2, 5 % u
x**2, 2**x, x @ y.T, -x, +x, abs(x), ~k, k & ~k, k | k, k ^ k, i << 1, i >> 1, x < y, x <= 0, x > y, x >= 1, x == y, x != 0, 1 < x
torch.rsub(x, 1), torch.float_power(u, 2), x.float_power(2), torch.pow(2, x), torch.ldexp(x, i), torch.divide(x, y, rounding_mode="floor")
torch.addbmm(m, B, D), torch.addcdiv(x, y, u, value=0.5), torch.addcmul(x, y, u), torch.addmm(m, x, y.T), torch.addmv(w, x, v), torch.addr(x, w, v)
m.addbmm(B, D), x.addcdiv(y, u), x.addcmul(y, u), m.addmm(x, y.T), w.addmv(x, v), x.addr(w, v), torch.baddbmm(B @ D, B, D), (B @ D).baddbmm_(B, D)
m.clone().addmm_(x, y.T), m.clone().addbmm_(B, D), x.clone().addcdiv_(y, u), x.clone().addcmul_(y, u), w.clone().addmv_(x, v), x.clone().addr_(w, v)
torch.adaptive_avg_pool1d(seq, 3), torch.adaptive_max_pool1d(seq, 3), torch.avg_pool1d(seq, 2), torch.max_pool1d(seq, 2), torch.max_pool1d_with_indices(seq, 2)
torch.all(k, 0), torch.any(k, 1, keepdim=True), torch.amax(x, 1), torch.amin(x, (0, 1)), torch.aminmax(x, dim=0), torch.argmax(x, 1), x.argmin(0, True)
torch.argsort(x, descending=True), torch.as_strided_copy(x, (2, 2), (1, 2)), torch.as_strided_scatter(x, m[:2, :2], (2, 2), (1, 2)), x.as_strided((2, 2), (1, 2))
torch.atleast_2d(v), torch.atleast_3d(v, w), torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
torch.block_diag(x, m), torch.broadcast_tensors(x, v), torch.broadcast_to(v, (3, 4)), torch.bucketize(x, v.sort()[0])
torch.cartesian_prod(w, v), torch.cat([x, y]), torch.cat((x, y), dim=1), torch.concat([x, y], -1), torch.concatenate([x, y]), torch.cdist(x, y), torch.celu(x)
torch.linalg.multi_dot([m, m, m]), torch.channel_shuffle(img, 2), torch.cholesky_solve(m, torch.linalg.cholesky(m)), torch.chunk(x, 2), x.chunk(3, 1)
torch.clamp(x, -0.5, 0.5), x.clamp(min=0), x.clip(max=0.5), torch.clamp_max(x, 0), torch.clamp_min(x, 0), torch.clip(x, -1, 1), x.clamp_(0, 1), x.clip_(0.1), y.clamp_max_(0.4), y.clamp_min_(0.2)
torch.column_stack([x, y]), torch.complex(x, y), torch.polar(u, x), torch.constant_pad_nd(x, (1, 1), 0.5), torch.copysign(x, -1)
torch.conv1d(seq, t(3, 4, 2)), torch.conv2d(img, t(2, 4, 3, 3), padding=1), torch.conv3d(vol, t(1, 2, 2, 2, 2)), torch.conv_tbc(seq, t(3, 8, 2), t(2))
torch.conv_transpose1d(seq, t(4, 2, 2)), torch.conv_transpose2d(img, t(4, 2, 3, 3), stride=2), torch.conv_transpose3d(vol, t(2, 1, 2, 2, 2)), torch.convolution(img, t(2, 4, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
torch.cross(m, m + 1, dim=1), m.cross(m.T, 0), torch.cosine_similarity(x, y), torch.count_nonzero(i, 1), torch.cummax(x, 1), torch.cummin(x, 0)
torch.cumprod(x, 1), torch.cumsum(x, 0), x.cumsum(-1), x.cumprod(0), x.clone().cumsum_(1), x.clone().cumprod_(0), torch.cumulative_trapezoid(x), torch.logcumsumexp(x, 1), torch.trapezoid(x), torch.trapz(x, dim=0)
torch.diag(m, 1), torch.diag_embed(x, 1), torch.diagonal(B, 0, 1, 2), torch.diagonal_copy(m), torch.diagonal_scatter(m, w), torch.diff(x, dim=0), torch.dist(x, y, 1), torch.gradient(x, dim=1)
torch.dsplit(B, 2), torch.hsplit(x, 2), torch.vsplit(x, 3), torch.dstack([x, y]), torch.hstack([x, y]), torch.vstack([x, y]), torch.row_stack([x, y]), torch.stack([x, y], 1), torch.tensor_split(x, 3, 1)
torch.einsum("ij,kj->ik", x, y), torch.einsum("bij,bjk->bik", B, D), torch.einsum("ii->i", m), torch.embedding(x, j), torch.embedding_bag(x, j, torch.tensor([0, 2]))
torch.expand_copy(v, (3, 4)), v.expand(3, 4), w[:, None].expand(-1, 4), v.expand(2, 3, -1), torch.flatten(B, 1), B.flatten(0, 1), torch.flip(x, (0, 1)), x.flip(0), torch.roll(x, 1), x.roll((1, 2), (0, 1)), torch.rot90(x, 2)
torch.frexp(x), torch.frobenius_norm(x, (0, 1)), torch.nuclear_norm(m), torch.norm(x, 2, 1), x.norm(p="fro"), torch.norm_except_dim(x), torch.renorm(x, 2, 0, 1.0), x.renorm(1, 1, 0.5), x.clone().renorm_(2, 0, 1)
torch.full_like(x, 3), torch.ones_like(x, dtype=torch.int32), torch.zeros_like(i), torch.empty_like(x).shape, x.new_zeros(2, 3), x.new_ones((2,)), x.new_full((2, 2), 5), x.new_tensor([1, 2]), x.new_empty(3).shape, x.new_empty_strided((2, 2), (1, 2)).stride()
torch.gather(x, 1, i), x.gather(0, i), torch.take(x, j), x.take(j), torch.take_along_dim(x, i, 1), torch.index_select(x, 0, j), x.index_select(1, j), torch.index_add(x, 0, j, y), torch.index_copy(x, 0, j, y), torch.index_fill(x, 0, j, 3)
torch.index_put(x, (j,), v), x.index_put((j, j), w), x.clone().index_put_((j,), v, accumulate=True), torch.index_reduce(x, 0, j, y, "prod"), x.clone().index_reduce_(0, j, y, "amax"), x.clone().index_add_(0, j, y), x.clone().index_copy_(0, j, y), x.clone().index_fill_(1, j, 2)
torch.scatter(x, 1, i, y), x.scatter(0, i, 2.0), torch.scatter_add(x, 0, i, y), torch.scatter_reduce(x, 1, i, y, "amax"), x.clone().scatter_(1, i, y), x.clone().scatter_add_(0, i, y), x.clone().scatter_reduce_(0, i, y, "sum"), x.clone().scatter_(0, i, 1.5, reduce="add")
torch.put(x, j, w), x.clone().put_(j, w), torch.masked_fill(x, k, 0), x.masked_fill(k, -1e9), x.clone().masked_fill_(k, 2), torch.masked_scatter(x, k, y), x.clone().masked_scatter_(k, y), torch.select_scatter(x, v, 0, 1), torch.slice_scatter(x, y[:1], 0, 1, 2)
torch.heaviside(x, v), torch.histc(x, 4), torch.histogram(x, 3)[0].shape, torch.igamma(u, u), torch.instance_norm(seq, None, None, None, None, True, 0.1, 1e-5, False), torch.group_norm(img, 2), torch.layer_norm(x, (4,), v, v), torch.rms_norm(x, (4,))
torch.isin(i, j), torch.isclose(x, y, atol=1.0), torch.kthvalue(x, 2), torch.topk(x, 2), x.topk(2, 0, largest=False), torch.lerp(x, y, 0.5), x.lerp(y, u), x.clone().lerp_(y, 0.3), torch.logsumexp(x, 1), torch.log_softmax(x, -1), torch.softmax(x, 0), x.softmax(1, torch.float64)
torch.logit(u, eps=1e-3), torch.lu_solve(m, *torch.linalg.lu_factor(m)), torch.lu_unpack(*torch.linalg.lu_factor(m)), torch.matrix_power(m, 3), m.matrix_power(-1), torch.max(x, 1), torch.max(x, y), x.max(0, True), torch.min(x, 0), x.min(1), torch.mean(x, 1), x.mean((0, 1), keepdim=True), x.mean(dtype=torch.float64)
torch.max_pool2d(img, 2), torch.max_pool3d(vol, 2), torch.median(x, 1), torch.nanmedian(x, 0), torch.mode(i, 1), torch.meshgrid(w, v, indexing="ij"), torch.movedim(B, 0, 2), B.moveaxis(0, 1), torch.moveaxis(B, (0, 1), (1, 0)), torch.swapaxes(B, 0, 1), torch.swapdims(B, 0, 2), B.swapaxes(1, 2), B.swapdims(0, 1)
torch.mvlgamma(u + 3, 2), torch.polygamma(1, u), u.polygamma(2), torch.nan_to_num(x / 0, 1.0, 2.0, 3.0), torch.nansum(x, 0), torch.nanmean(x, 1), torch.quantile(x, 0.5), torch.nanquantile(x, torch.tensor([0.1, 0.9]), dim=1), x.quantile(0.3, 0, keepdim=True)
torch.narrow(x, 0, 1, 2), x.narrow(1, 0, 3), torch.narrow_copy(x, 0, 0, 2), torch.native_layer_norm(x, (4,), v, v, 1e-5), torch.native_group_norm(img, None, None, 1, 4, 36, 2, 1e-5), torch.native_channel_shuffle(img, 2), torch.native_batch_norm(x, v, v, None, None, True, 0.1, 1e-5)
torch.nonzero_static(i, size=4), torch.outer(w, v), torch.orgqr(m, w), torch.ormqr(m, w, m), torch.geqrf(m), torch.pairwise_distance(x, y), torch.pdist(x), torch.permute(B, (2, 0, 1)), B.permute(1, 0, 2), torch.permute_copy(B, (1, 0, 2)), torch.pixel_shuffle(img, 2), torch.pixel_unshuffle(img, 2)
torch.prelu(x, torch.tensor([0.3])), torch.prod(x, 0), x.prod(1, keepdim=True), torch.relu(x), x.relu_(), torch.repeat_interleave(x, 2, 1), x.repeat_interleave(3), x.repeat(2, 1), v.repeat(2, 3), torch.tile(x, (2, 2)), x.tile(2), torch.reshape(x, (4, 3)), x.reshape(-1), x.reshape(2, -1)
torch.round(x, decimals=1), x.round(decimals=2), torch.searchsorted(v.sort()[0], x), torch.segment_reduce(v, "sum", lengths=torch.tensor([1, 3])), torch.select(x, 0, 1), x.select(1, 2), torch.select_copy(x, 0, 0), torch.slice_copy(x, 0, 1), torch.slice_inverse(y[:2], x, 0, 0, 2)
torch.sort(x, 1, descending=True), x.sort(dim=0, stable=True), torch.split(x, 2), x.split([1, 2]), torch.split(x, [1, 3], 1), torch.split_with_sizes(x, [1, 2]), torch.split_copy(x, 2), torch.split_with_sizes_copy(x, [2, 1]), torch.unsafe_split(x, 2), torch.unsafe_chunk(x, 2), torch.unsafe_split_with_sizes(x, [1, 2])
torch.squeeze(x[None], 0), x[None].squeeze(), x[:, None].squeeze(1), torch.unsqueeze(x, 1), x.unsqueeze(-1), torch.unsqueeze_copy(x, 0), torch.std(x, 1), x.std(0, unbiased=False), torch.var(x, dim=1, correction=0), x.var((0, 1)), torch.std_mean(x, 1), torch.var_mean(x, 0)
torch.stft(v.repeat(8), 8, return_complex=True, window=torch.ones(8)), torch.fft.fft(x), torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fftshift(x), torch.fft.fft2(x)
torch.sum(x, 0), x.sum(1, keepdim=True), x.sum((0, 1)), x.sum(dtype=torch.float64), sum(x), k.sum(), torch.sum(i, -1), x.sum_to_size(1, 4), torch.svd(m)[1], torch.svd_lowrank(m, 2)[1].shape, torch.pca_lowrank(x, 2)[1].shape, torch.linalg.svd(m)[1], torch.linalg.qr(m), torch.qr(m)[1].shape
torch.tensordot(x, y, ([1], [1])), torch.tensordot(x, y, 2), torch.threshold(x, 0.1, 2.0), torch.transpose(x, 0, 1), x.transpose(-1, -2), torch.transpose_copy(x, 0, 1), x.t(), x.T, x.mT, c.H, c.mH, torch.adjoint(c), torch.triu(x, 1), torch.tril(x, -1), x.triu_(), y.tril_(1)
torch.unflatten(x, 1, (2, 2)), x.unflatten(0, (3, 1)), torch.unfold_copy(v, 0, 2, 1), v.unfold(0, 2, 1), torch.unravel_index(j, (3, 4)), torch.view_copy(x, (4, 3)), x.view(4, 3), x.view(-1), x.view(torch.int32), torch.view_as_complex(x.view(6, 2)), torch.view_as_complex_copy(x.view(6, 2)), x.view_as(y)
torch.where(k, x, y), torch.where(x > 0, x, 0.0), x.where(k, 1.0), torch.where(k, 1, 2), torch.xlogy(u, 2), torch.xlogy(2, u), torch.logaddexp(x, y), torch.triangular_solve(w[:, None], m)[0], torch.linalg.solve(m, w), torch.linalg.inv(m), torch.linalg.det(m), torch.linalg.norm(x), torch.linalg.eigh(m)[0], torch.cholesky(m), torch.linalg.cholesky(m), torch.linalg.vector_norm(x), torch.linalg.pinv(m), torch.linalg.matrix_norm(x)
torch.lu(m)[0].shape, torch.cosine_embedding_loss(x, y, torch.ones(3)), torch.hinge_embedding_loss(x, torch.ones(3, 4)), torch.margin_ranking_loss(w, w, w), torch.kl_div(x, u), torch.poisson_nll_loss(x, u, True, False, 1e-8, 1), torch.triplet_margin_loss(x, y, u), torch.binary_cross_entropy_with_logits(x, u)
torch.affine_grid_generator(t(1, 2, 3), (1, 1, 4, 4), False), torch.grid_sampler(img, t(1, 2, 2, 2), 0, 0, False), torch.grid_sampler_2d(img, t(1, 2, 2, 2), 0, 0, False), torch.grid_sampler_3d(vol, t(1, 2, 2, 2, 3), 0, 0, False)
torch.rnn_tanh_cell(x, m[:, :3], t(3, 4), t(3, 3)), torch.rnn_relu_cell(x, m, t(3, 4), t(3, 3)), torch.gru_cell(x, m, t(9, 4), t(9, 3)), torch.lstm_cell(x, (m, m), t(12, 4), t(12, 3)), torch.hardshrink(x), torch.hash_tensor(x), torch.histogramdd(x[:, :2], bins=[2, 2])[0].shape
torch.zeros(2, 3), torch.ones((2,)), torch.full((2, 2), 1.5), torch.empty(2).shape, torch.arange(5), torch.arange(0, 1, 0.25), torch.linspace(0, 1, 5), torch.logspace(0, 1, 3), torch.eye(3), torch.tensor([1, 2.5]), torch.tensor(3), torch.as_tensor([1, 2]), torch.scalar_tensor(2.0), torch.empty_strided((2, 2), (1, 2)).stride()
torch.tril_indices(3, 3), torch.triu_indices(3, 3), torch.hann_window(4), torch.hamming_window(4), torch.bartlett_window(4), torch.blackman_window(4), torch.kaiser_window(4), torch.vander(w), torch.complex(torch.ones(2), torch.ones(2)), torch.asarray([1, 2]), torch.heaviside(x, torch.tensor(0.5))
torch.special.expit(x), torch.special.gammaln(u), torch.special.erf(x), torch.special.logsumexp(x, 1), torch.special.xlog1py(u, u), torch.special.i0e(x), torch.special.entr(u), torch.special.softmax(x, 1), torch.special.zeta(u + 2, u)
torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255), torch.fake_quantize_per_channel_affine(x, torch.ones(3) * 0.1, torch.zeros(3, dtype=torch.int32), 0, 0, 255), torch.cummin(x, 1), torch.masked.sum(x, 1, mask=k)
torch.fix(x), torch.float_power(u, u), torch.frac(x), torch.sgn(c), torch.nanmean(x), torch.std(B, (1, 2)), torch.logical_xor(k, ~k), torch.ger(w, v), torch.inner(x, y), torch.mv(x, v), torch.bilinear(x, y, t(2, 4, 4), t(2)), torch.view_as_real_copy(c), torch.is_same_size(x, y), torch.real(c), torch.imag(c), c.real, c.imag, torch.abs(c), x.real, torch.real(x), torch.cumulative_trapezoid(x, dim=0)
"""

FUNCTIONAL = """
F.adaptive_avg_pool1d(seq, 4), F.adaptive_avg_pool2d(img, (2, 3)), F.adaptive_avg_pool3d(vol, 2), F.adaptive_max_pool1d(seq, 2), F.adaptive_max_pool2d(img, 2, return_indices=True), F.adaptive_max_pool3d(vol, 2)
F.adaptive_max_pool1d_with_indices(seq, 2), F.adaptive_max_pool2d_with_indices(img, 2), F.adaptive_max_pool3d_with_indices(vol, 2), F.avg_pool1d(seq, 2), F.avg_pool2d(img, 3, 2, 1), F.avg_pool3d(vol, 2)
F.affine_grid(t(1, 2, 3), (1, 1, 4, 4), align_corners=False), F.grid_sample(img, t(1, 3, 3, 2), align_corners=True), F.interpolate(img, scale_factor=2), F.interpolate(img, (3, 3), mode="bilinear"), F.interpolate(seq, 5, mode="linear", align_corners=True)
F.batch_norm(x, None, None, training=True), F.batch_norm(x, v.clone(), v.abs(), v, v), F.layer_norm(x, (4,)), F.group_norm(img, 2, t(4), t(4)), F.instance_norm(img), F.local_response_norm(img, 2), F.normalize(x), F.rms_norm(x, (4,), v), F.normalize(x, p=1.0, dim=0)
F.bilinear(x, y, t(2, 4, 4)), F.linear(x, t(2, 4), t(2)), F.linear(v, t(2, 4)), F.conv1d(seq, t(3, 4, 3), t(3), 2, 1), F.conv2d(img, t(4, 2, 3, 3), groups=2, padding="same"), F.conv3d(vol, t(2, 2, 1, 1, 1)), F.conv_transpose1d(seq, t(4, 1, 2)), F.conv_transpose2d(img, t(4, 1, 2, 2), stride=2), F.conv_transpose3d(vol, t(2, 1, 1, 1, 1)), F.conv_tbc(seq, t(3, 8, 2), t(2))
F.binary_cross_entropy(u, u), F.binary_cross_entropy_with_logits(x, u, pos_weight=v.abs()), F.cross_entropy(x, j), F.cross_entropy(x, u, label_smoothing=0.1), F.cross_entropy(x, j, ignore_index=1, reduction="none"), F.nll_loss(x.log_softmax(1), j), F.gaussian_nll_loss(x, y, u)
F.kl_div(x.log_softmax(1), u, reduction="batchmean")
F.l1_loss(x, y), F.mse_loss(x, y, reduction="sum"), F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.poisson_nll_loss(x, u), F.soft_margin_loss(x, y.sign()), F.hinge_embedding_loss(x, y.sign()), F.margin_ranking_loss(w, w + 1, w.sign()), F.multi_margin_loss(x, j), F.multilabel_margin_loss(x, i), F.multilabel_soft_margin_loss(x, k.float())
F.cosine_embedding_loss(x, y, w.sign()), F.cosine_similarity(x, y, 0), F.pairwise_distance(x, y), F.pdist(x), F.triplet_margin_loss(x, y, u), F.triplet_margin_with_distance_loss(x, y, u)
F.celu(x), F.elu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.glu(x), F.hardshrink(x), F.hardtanh(x), F.hardsigmoid(x), F.hardswish(x), F.leaky_relu(x), F.logsigmoid(x), F.log_softmax(x, 1), F.mish(x), F.prelu(x, torch.ones(1)), F.relu(x), F.relu6(x), F.selu(x), F.silu(x), F.softmax(x, 1), F.softmin(x, 1), F.softplus(x), F.softshrink(x), F.softsign(x), F.tanhshrink(x), F.threshold(x, 0, 1), F.sigmoid(x), F.tanh(x)
F.relu(x.clone(), inplace=True), F.silu(x.clone(), inplace=True), F.elu_(x.clone()), F.leaky_relu_(x.clone()), F.hardtanh_(x.clone()), F.threshold_(x.clone(), 0, 1), F.relu_(x.clone()), F.selu_(x.clone()), F.celu_(x.clone()), F.rrelu_(x.clone(), training=False), F.rrelu(x, training=False)
F.dropout(x, 0.5, training=False), F.dropout1d(seq, training=False), F.dropout2d(img, training=False), F.dropout3d(vol, training=False), F.alpha_dropout(x, training=False), F.feature_alpha_dropout(x, training=False)
F.embedding(j, x), F.embedding(j, x, padding_idx=0), F.embedding_bag(j[None], x, mode="mean"), F.one_hot(j, 3), F.fold(t(1, 8, 9), (4, 4), 2), F.unfold(img, 2), F.pad(x, (1, 1)), F.pad(img, (1, 1, 1, 1), mode="reflect"), F.pad(seq, (1, 2), mode="replicate"), F.pad(seq, (1, 1), mode="circular"), F.pad(x, (0, 1, 1, 0), value=3)
F.lp_pool1d(seq.abs(), 2, 2), F.lp_pool2d(img.abs(), 2, 2), F.lp_pool3d(vol.abs(), 2, 2), F.max_pool1d(seq, 2), F.max_pool2d(img, 2, stride=1), F.max_pool3d(vol, 2), F.max_pool1d_with_indices(seq, 2), F.max_pool2d_with_indices(img, 2), F.max_pool3d_with_indices(vol, 2)
F.max_unpool1d(*F.max_pool1d(seq, 2, return_indices=True), 2), F.max_unpool2d(*F.max_pool2d(img, 2, return_indices=True), 2), F.max_unpool3d(*F.max_pool3d(vol, 2, return_indices=True), 2), F.pixel_shuffle(img, 2), F.pixel_unshuffle(img, 2), F.channel_shuffle(img, 2), F.native_channel_shuffle(img, 2)
F.scaled_dot_product_attention(B, B, B), F.scaled_dot_product_attention(B, B, B, is_causal=True), F.scaled_dot_product_attention(B, B, B, torch.ones(3, 3, dtype=torch.bool).tril(), scale=0.5), F.multi_head_attention_forward(B, B, B, 4, 2, t(12, 4), t(12), None, None, False, 0.0, t(4, 4), t(4))
"""

METHODS = """
x.size(), x.size(0), x.shape, x.dim(), x.ndim, x.ndimension(), x.numel(), x.nelement(), x.stride(), x.stride(0), x.storage_offset(), x.element_size(), x.itemsize, x.nbytes, x.dtype, x.device, x.layout, x.is_contiguous(), x.T.is_contiguous(), x.dim_order(), len(x)
x.is_cpu, x.is_cuda, x.is_meta, x.is_sparse, x.is_quantized, x.is_mkldnn, x.is_nested, x.is_leaf, x.requires_grad, x.grad, x.grad_fn, x.retains_grad, x.output_nr, x.is_complex(), x.is_floating_point(), x.is_pinned(), x.is_mps, x.is_xla, x.is_xpu, x.is_ipu, x.is_vulkan, x.is_mtia, x.is_maia, x.is_sparse_csr, x.name
x.double(), x.half(), x.bfloat16(), x.int(), x.long(), x.short(), x.char(), u.byte(), x.bool(), x.cfloat(), x.cdouble(), x.chalf().dtype, x.float() is x, x.to(torch.float64), x.to(y), x.to("cpu"), x.to(torch.device("cpu"), torch.int32), x.to(dtype=torch.half, copy=True), x.type(torch.float64), x.type(), x.type_as(i), x.cpu() is x
x.contiguous() is x, x.T.contiguous(), img.contiguous(memory_format=torch.channels_last), img.to(memory_format=torch.channels_last), x.T.clone(memory_format=torch.preserve_format), x.clone(), x.detach(), x.data, x.expand_as(B), x.view_as(y), x.reshape_as(y.T), x.repeat(1, 2)
x.clone().fill_(2), x.clone().zero_(), x.clone().copy_(v), x.clone().fill_diagonal_(5), x.clone().add_(1).mul_(2).sub_(3).div_(4), x.clone().pow_(2), u.clone().sqrt_().log_().exp_(), x.clone().floor_divide_(2), x.clone().remainder_(2), x.clone().fmod_(0.5), x.clone().neg_().abs_().clamp_(0.1)
x.clone().eq_(y), x.clone().ge_(0), x.clone().gt_(0), x.clone().le_(0), x.clone().lt_(0), x.clone().ne_(0), x.clone().logical_not_(), k.clone().logical_and_(k), i.clone().bitwise_and_(1).bitwise_or_(2).bitwise_xor_(3), i.clone().bitwise_left_shift_(1), i.clone().bitwise_right_shift_(1), i.clone().bitwise_not_(), i.clone().lcm_(j[:, None]), i.clone().gcd_(j[:, None]), x.clone().greater_(0)
x.clone().lerp_(y, 0.2), x.clone().addcmul_(y, y), x.clone().atan2_(y), x.clone().copysign_(y), x.clone().hypot_(y), x.clone().nextafter_(y), x.clone().ldexp_(i), x.clone().xlogy_(u), x.clone().heaviside_(y), u.clone().igamma_(u), x.clone().masked_fill_(k, 0), u.clone().polygamma_(1)
x.index_add(0, j, y), x.diagonal(), x.unbind(1), x.masked_scatter(k, y), x.nansum(), x.logsumexp(1), x.argsort(1), m.cholesky_inverse(), m.inverse(), x.bernoulli(0.0), x.dist(y), x.hardshrink(), x.softmax(-1), x.log_softmax(0), x.select_scatter(v, 0, 0), x.slice_scatter(y, 0), x.squeeze(0), x.swapaxes(0, 1), x.tensor_split(2), x.to_dense()
torch.Tensor.add(x, y), torch.Tensor.size(x), torch.Tensor.relu(x), torch.Tensor.view(x, -1), torch.Tensor.__add__(x, 1), x.__rsub__(1), x.__neg__(), x.__getitem__(0), torch.Tensor.shape.__get__(x), torch.Tensor.T.__get__(x), x.__len__(), x.__eq__(y), x.__matmul__(y.T), x.__floordiv__(2)
x.requires_grad, (x * 2).requires_grad, x.detach().requires_grad_().requires_grad, x.is_inference(), x.is_set_to(y), x.dense_dim(), x.sparse_dim(), x.get_device(), x.is_signed(), x.isfinite().all()
x.sum().item(), float(x.sum()), int(j.sum()), k.any().item(), x + 1
x.as_subclass(torch.Tensor), x.unsqueeze(0).squeeze(0), x.grad is None, x.sum().sqrt().abs(), x.flatten().unfold(0, 3, 2), x.movedim(0, 1), x.ravel(), x.adjoint(), x.square().mean().rsqrt(), x.diff().cumsum(1), x.clone().squeeze().unsqueeze(1).expand(3, 2, 4)
"""

RANDOM = """
torch.rand(3), torch.rand_like(x), torch.randn(2, 2), torch.randn_like(x), torch.randint(0, 9, (3,)), torch.randint_like(i, 5), torch.randperm(5), torch.normal(0.0, 1.0, (2,)), torch.normal(x, u), torch.bernoulli(u), torch.multinomial(u, 2), torch.poisson(u), torch.binomial(torch.ones(3) * 5, torch.ones(3) * 0.5)
F.dropout(x), F.dropout(x, 0.3, True), F.dropout1d(seq), F.dropout2d(img), F.dropout3d(vol), F.alpha_dropout(x, training=True), F.feature_alpha_dropout(img, training=True), F.gumbel_softmax(x), F.gumbel_softmax(x, hard=True), F.rrelu(x, training=True), torch.rrelu(x, training=True), torch.dropout(x, 0.5, True), torch.native_dropout(x, 0.5, True), torch.alpha_dropout(x, 0.5, True), torch.feature_dropout(img, 0.5, True), torch.feature_alpha_dropout(img, 0.5, True)
x.clone().normal_(), x.clone().uniform_(), x.clone().random_(0, 5), x.clone().bernoulli_(0.5), x.clone().exponential_(), x.clone().geometric_(0.5), x.clone().cauchy_(), x.clone().log_normal_(), u.bernoulli(), x.new_empty(3).normal_(1, 2)
F.fractional_max_pool2d(img, 2, output_size=2), F.fractional_max_pool2d_with_indices(img, 2, output_size=2), F.fractional_max_pool3d(vol, 2, output_size=2), F.fractional_max_pool3d_with_indices(vol, 2, output_size=2), torch.nn.init.normal_(x.clone()), torch.nn.init.xavier_uniform_(x.clone())
torch.rand(2, generator=torch.Generator().manual_seed(3)), torch.randn(2, generator=torch.Generator().manual_seed(4))
"""

# How much comes out depends on the values: the graph reads that number.
SELECTED = """
torch.nonzero(x)
x.nonzero(as_tuple=True)
torch.argwhere(x)
torch.where(k)
torch.masked_select(x, k)
x[k]
torch.repeat_interleave(j)
x.repeat_interleave(j, 0)
"""

# The result, or its shape, depends on the values: the graph ends there and goes on after it.
DATA_DEPENDENT = """
x.long().sum().item() + 1
float(x.sum()) ** 2
int(x.sum())
bool(k.any())
complex(x.sum())
x.tolist()
x.numpy().tolist()
torch.unique(i)
i.unique(return_counts=True)
torch.unique_consecutive(i)
torch.equal(x, y)
torch.allclose(x, y)
torch.is_nonzero(x.sum())
torch.bincount(j)
F.one_hot(j)
1 if x.sum() > 0 else 2
[5, 6, 7][j[0]]
list(range(j[1]))
x.sum().__bool__()
str(x.sum())
f"{x.sum():.2f}"
round(x.sum().item(), 2)
sorted([x.sum(), y.sum()])
max(x.sum(), y.sum())
float(np.asarray(x).max())
torch.ctc_loss(y[:, None].log_softmax(2), i[:1, 1:3], torch.tensor([3]), torch.tensor([2]))
F.ctc_loss(y[:, None].log_softmax(2), i[:1, 1:3], torch.tensor([3]), torch.tensor([2]))
"""

# The shape is known, but the function looks at values on its way: a break is allowed.
LOOKS_INSIDE = """
torch.cov(x), x.cov()
torch.corrcoef(x), x.corrcoef()
torch.istft(torch.stft(v.repeat(8), 8, return_complex=True, window=torch.ones(8)), 8, window=torch.ones(8))
torch.lobpcg(torch.eye(9) * 2, 2)[0].shape
"""

# Not called above, by reason.
EXEMPT = {
    "quantised": """choose_qparams_optimized dequantize fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
        fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight
        fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis
        q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point quantize_per_channel quantize_per_tensor
        quantize_per_tensor_dynamic quantized_batch_norm quantized_gru_cell quantized_lstm_cell quantized_max_pool1d
        quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell quantized_rnn_tanh_cell qscheme""",
    "sparse and nested": """native_norm ccol_indices_copy col_indices_copy crow_indices_copy indices_copy row_indices_copy values_copy
        dsmm hsmm hspmm saddmm smm spmm sspaddmm ccol_indices coalesce col_indices crow_indices indices row_indices
        sparse_mask sparse_resize_ sparse_resize_and_clear_ resize_as_sparse_ to_sparse to_sparse_bsc to_sparse_bsr
        to_sparse_coo to_sparse_csc to_sparse_csr values to_padded_tensor is_coalesced to_mkldnn""",
    "another device": """miopen_batch_norm miopen_convolution miopen_convolution_add_relu miopen_convolution_relu
        miopen_convolution_transpose miopen_depthwise_convolution miopen_rnn batch_norm_backward_elemt
        batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_stats batch_norm_update_stats cuda ipu xpu mtia pin_memory record_stream is_distributed""",
    "symbolic": "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
    "recurrent layers, called through their modules": "lstm gru rnn_relu rnn_tanh",
    "metadata changed in place, with the breaks": """as_strided_ detach_ resize resize_ resize_as resize_as_ set_ squeeze_
        swapaxes_ swapdims_ t_ transpose_ unsqueeze_ module_load""",
    "memory, hooks, gradients: own programs": """storage storage_type untyped_storage share_memory_ const_data_ptr data_ptr is_shared
        register_hook register_post_accumulate_grad_hook retain_grad backward reinforce volatile grad_dtype apply_ map_ map2_
        index""",
    "gone or hidden": "eig lstsq solve symeig new chain_matmul linear_cross_entropy mvlgamma_ float_power_ is_nested",
}  # fmt: skip
# Exempt, but not there in the oldest version of PyTorch that is supported.
ADDED = "const_data_ptr linear_cross_entropy"
# Names of tensor dimensions, which later versions of PyTorch have no more.
REMOVED = "align_as align_to has_names names refine_names rename rename_"
