"""Every op that torch has samples for, on symbolic sizes: eager's layouts at the sizes of now, no internal error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from kiln.base.errors import Break
from kiln.base.symbols import Scope
from kiln.ops import rules  # noqa: F401
from kiln.ops.fake import FakeMode, fake_like
from kiln.ops.lift import hint_of
from kiln.ops.symint import wrap

SAMPLES = 2
#: Of these ops some sample needs a symbol to be one number. Most have arguments that say so, as `view` has; the
#: others have no rule for sizes. The list may only become shorter.
SPECIALISES = frozenset(
    """
    _chunk_cat _segment_reduce _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _upsample_bilinear2d_aa addbmm addr alias_copy aminmax as_strided_copy block_diag broadcast_to chunk
    corrcoef cov cross diag diag_embed diagflat diagonal_copy dist dsplit expand expand_copy fft.fft fft.fft2
    fft.fftn fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifft2 fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn
    fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn geqrf gradient grid_sampler_2d
    grid_sampler_3d histogram histogramdd hsplit isin kron linalg.cholesky linalg.cholesky_ex
    linalg.cond linalg.cross linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh
    linalg.householder_product linalg.inv linalg.inv_ex linalg.ldl_factor linalg.ldl_factor_ex
    linalg.ldl_solve linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_rank
    linalg.multi_dot linalg.pinv linalg.qr linalg.solve linalg.solve_ex linalg.solve_triangular
    linalg.svdvals linalg.tensorinv linalg.tensorsolve lu lu_solve lu_unpack mode narrow_copy
    native_layer_norm nn.functional.adaptive_max_pool3d nn.functional.bilinear
    nn.functional.channel_shuffle nn.functional.embedding_bag nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.glu nn.functional.grid_sample nn.functional.group_norm
    nn.functional.interpolate nn.functional.layer_norm nn.functional.linear_cross_entropy
    nn.functional.max_pool1d nn.functional.max_unpool1d nn.functional.max_unpool2d
    nn.functional.max_unpool3d nn.functional.multi_head_attention_forward
    nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.pdist
    nn.functional.unfold nn.functional.upsample_bilinear nn.functional.upsample_nearest norm normal
    ormqr pca_lowrank permute_copy pinverse qr reshape reshape_as rot90 slice_scatter split split_with_sizes
    split_with_sizes_copy squeeze_copy stft svd_lowrank t_copy take take_along_dim transpose_copy
    triangular_solve unbind unbind_copy unflatten unfold_copy unsafe_chunk unsafe_split unsqueeze_copy
    view view_as view_as_complex view_copy vsplit
    """.split()
)


def strides(size: Any, stride: Any) -> tuple[int, ...]:
    """The strides that mean something."""
    return () if 0 in size else tuple([s for n, s in zip(size, stride, strict=True) if n != 1])


def layout(value: torch.Tensor) -> Any:
    size = tuple([hint_of(n) for n in value.shape])
    return size, strides(size, [hint_of(s) for s in value.stride()]), value.dtype


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def symbolic(sample: Any, scope: Scope) -> Any:
    """The sample with fakes, one symbol for each size of at least 2."""
    symbols: dict[int, Any] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        for n in value.shape:
            if n >= 2 and n not in symbols:
                symbols[n] = wrap(scope.symbol(n))
        return fake_like(value, [symbols.get(n, n) for n in value.shape])

    return tree_map(twin, (sample.input, list(sample.args), sample.kwargs))


def samples(op: Any) -> Any:
    """Samples that eager takes, with what it gives."""
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:SAMPLES]:
        try:
            yield sample, op.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ops_on_symbolic_sizes() -> None:
    warnings.simplefilter("ignore")
    specialising, wrong, count = set(), [], 0
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name.startswith("sparse"):
            continue
        for sample, expected in samples(op):
            scope = Scope()
            first, args, kwargs = symbolic(sample, scope)
            try:
                with FakeMode():
                    found = op.op(first, *args, **kwargs)
            except Break:
                continue
            except Exception as error:
                # Native code that asks for plain numbers where it cannot be given any: capture starts again.
                if op.name == "tensor_split" and "symbolic sizes" in str(error):
                    continue
                wrong.append((op.name, repr(error)))
                continue
            count += 1
            for f, e in zip(tensors(found), tensors(expected), strict=True):
                if layout(f) != layout(e):
                    wrong.append((op.name, layout(f), layout(e)))
            if any(c.op == "==" for c in scope.conditions):
                specialising.add(op.name)
    assert wrong == []
    assert count > 900
    assert specialising <= SPECIALISES, sorted(specialising - SPECIALISES)
