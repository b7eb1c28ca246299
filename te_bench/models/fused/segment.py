"""From one attention to the next: what follows a GEMM leaves a kernel ready for the next one.

    attention -> proj -> x + -> norm -> fc -> activation -> out -> x + [-> the next layer's norm -> qkv -> attention]

That is one autograd.Function, `Between`; `Enter` is what comes before the first attention. Addition, norm and cast are one
kernel, activation and cast another; in the backward pass the norm's gradient, the stream's and their rounding are one, the
activation's gradient, cast and bias gradient another, and the gradients of q, k and v are cast as one matrix. All is
rounded where modules one after the other round. Where a recipe needs the finished tensor for its scale the cast is a kernel
of its own; without a recipe nothing is cast, GEMMs read what the same kernels leave in bf16, and the activation and its
slope leave with the GEMMs beside them where that was measured to be faster (kernels.gemm.half).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_bench.kernels.activation import recomputed
from te_bench.kernels.gemm import half
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, joined
from te_bench.models.fused.projection import Projection, Saved
from te_bench.models.modules.gemms import restore, save_for_backward
from te_bench.models.modules.layernorm import Norm, backend
from te_bench.models.modules.layernorm_mlp import activate_quantize, activation_backend, activation_grad_quantize
from te_bench.models.modules.rotary import Rotation


class HeadColumns(NamedTuple):
    """How a projection's columns are dealt out: so many to q, k and v in turn, until all are."""

    q: int
    k: int
    v: int

    def split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of (M, F), views (M, turns, columns) each."""
        return mixed.view(mixed.shape[0], -1, sum(self)).split(self, 2)


class Segment(NamedTuple):
    """What lies between two attentions, but for the tensors that are trained.

    `after` is None behind the last layer, proj to out before the first; without a norm at the end, and then without what
    follows it, a segment leaves the stream.
    """

    proj: Projection | None
    fc: Projection | None
    out: Projection | None
    after: Projection | None
    norms: tuple[Norm | None, Norm | None]  # before the MLP and at the end
    heads: HeadColumns | None  # of `after`
    activation: str  # one of kernels.activation's kinds
    dtype: torch.dtype  # of what the GEMMs make
    training: bool  # whether gradients are recorded
    scale: Tensor | None = None  # that the activation is cast by, a copy; None where that output is kept
    rotation: Rotation | None = None  # of what `after` makes; Enter's alone


def _add_norm(
    projection: Projection | None,
    x: Tensor,
    branch: Tensor | None,
    weights: tuple[Tensor, Tensor | None],
    norm: Norm | None,
    segment: Segment,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """x + branch, norm of it as an operand of `projection`, mean, rstd; in x's dtype, uncast, without a projection."""
    stream = backend(x).residual
    assert stream is not None
    assert norm is not None
    cast = None if projection is None else projection.cast("input")
    if cast is not None:
        made: Any = stream.add_forward_quantized(
            x, branch, *weights, **norm._asdict(), via=segment.dtype, rowwise=True, columnwise=segment.training, **cast
        )
        return made
    dtype = x.dtype if projection is None else segment.dtype
    total, y, mean, rstd = stream.add_forward(x, branch, *weights, **norm._asdict(), dtype=dtype)
    if projection is None:
        return total, Quantized(y, None, None, None, Layout(dtype, TENSOR, None)), mean, rstd
    packed = projection.operand(y, "input", segment.training)
    return total, packed, mean, rstd


def _add_norm_backward(
    projection: Projection,
    dn: Tensor,
    kept: tuple[Any, ...],
    norm: Norm | None,
    residual: Tensor | None,
    biased: bool,
    total: Tensor | None,
    segment: Segment,
) -> tuple[Tensor, Quantized, Tensor, Tensor | None]:
    """dx, it as an operand of `projection`, whose output the branch was, dgamma, dbeta."""
    x, branch, gamma, mean, rstd = kept
    assert norm is not None
    options: dict[str, Any] = {**norm.of_backward(), "residual": residual}
    if x.dtype is segment.dtype and branch is None:  # rounded to this, dx would be written twice
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, **options)
        return dx, projection.operand(dx, "grad_output", True, total), dgamma, dbeta if biased else None
    stream = backend(x).residual
    assert stream is not None
    cast = projection.cast("grad_output")
    options |= {"biased": biased, "column_sum": total, "branch": branch}
    if cast is not None:
        made: Any = stream.backward_quantized(
            dn, x, gamma, mean, rstd, via=segment.dtype, rowwise=True, columnwise=True, **cast, **options
        )
        return made
    dx, copy, dgamma, dbeta = stream.backward_rounded(dn, x, gamma, mean, rstd, dtype=segment.dtype, **options)
    return dx, projection.operand(copy, "grad_output", True), dgamma, dbeta


def _fc_and_activation(n: Quantized, weight: Tensor, bias: Tensor | None, segment: Segment) -> tuple[Tensor, Quantized]:
    """What fc makes, and the activation of it as an operand of out."""
    fc, out = segment.fc, segment.out
    assert fc is not None
    assert out is not None
    if fc.gemms is None and half.is_faster(half.ACTIVATED, n.data, weight, segment.activation):
        h, a = half.activated(n.data, weight, bias, segment.activation)
        return h, out.operand(a, "input", segment.training)
    h = fc.forward(n, weight, bias, segment.dtype)
    if out.gemms is not None:
        return h, activate_quantize(
            out.gemms, h, segment.activation, columnwise=segment.training and segment.scale is None
        )
    return h, out.operand(activation_backend(h).forward(h, segment.activation), "input", segment.training)


def _activation_backward(
    g: Quantized, h: Tensor, total: Tensor | None, segment: Segment, kept: Saved
) -> tuple[Quantized, Saved]:
    """The gradient of h as an operand of fc, from that of what out makes; what was kept of the activation, or that again."""
    fc, out = segment.fc, segment.out
    assert fc is not None
    assert out is not None
    if out.gemms is None and half.is_faster(half.GRADIENT, g.data, kept[1].data, segment.activation):
        dh = half.gradient(g.data, kept[1].data, h, segment.activation)
        return fc.operand(dh, "grad_output", True, total), kept
    da = out.dgrad(g, kept, segment.dtype)
    if fc.gemms is None:
        dh = activation_backend(h).backward(da, h, segment.activation)
        return fc.operand(dh, "grad_output", True, total), kept
    if segment.scale is None:
        both = {"rowwise": True, "columnwise": True}
        return activation_grad_quantize(fc.gemms, da, h, segment.activation, **both, total=total), kept
    made, a_t = recomputed.recomputed(
        activation_backend(h),
        da,
        h,
        segment.activation,
        **fc.cast("grad_output"),
        value_scale=segment.scale,
        value_dtype=fc.gemms.recipe.dtype("input"),
        column_sum=total,
    )
    return made, (kept[0]._replace(data=a_t), kept[1])


def _bias_sums(bias: torch.dtype | None, like: Tensor, features: int) -> Tensor | None:
    """Where a bias gradient is to be gathered."""
    return None if bias is None else like.new_zeros(features, dtype=torch.float32)


def _dtypes(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple([None if t is None else t.dtype for t in tensors])


class Enter(torch.autograd.Function):
    """x (M, C), the norm's gamma, beta, a projection's weight, bias -> x, q, k, v (M, turns, columns): before attention.

    x goes on from here, so that the norm's gradient kernel adds what comes back of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, w: Tensor, b: Tensor | None, segment: Segment
    ) -> Any:
        assert segment.after is not None
        assert segment.heads is not None
        _, n, mean, rstd = _add_norm(segment.after, x, None, (gamma, beta), segment.norms[1], segment)
        qkv = segment.after.forward(n, w, b, segment.dtype)
        angles: tuple[Tensor, ...] = () if segment.rotation is None else segment.rotation[:2]
        save_for_backward(ctx, (x, gamma, mean, rstd, *angles), segment.after.saved(n, w))
        ctx.segment, ctx.dtypes = segment, _dtypes(w, b, beta)
        if segment.rotation is None:
            return x.view_as(x), *segment.heads.split(qkv)
        return x.view_as(x), *(part.flatten(0, 1).flatten(2) for part in segment.rotation.split(qkv, own=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor, *dqkv: Tensor) -> Any:
        (x, gamma, mean, rstd, *_), (n, w) = restore(ctx)  # angles that have changed are found here
        dn, dw, db = _after_backward(ctx.segment, dqkv, (n, w), ctx.dtypes)
        residual = dstream if ctx.needs_input_grad[0] else None
        options = ctx.segment.norms[1].of_backward()
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, residual=residual, **options)
        return dx, dgamma, dbeta if ctx.dtypes[2] else None, dw, db, None


def _joined_view(parts: list[Tensor]) -> Tensor | None:
    """torch.cat(parts, 1) without a copy, where attention left (M, C) parts side by side in one (M, 3C); else None."""
    first, (m, width) = parts[0], parts[0].shape
    strides = (len(parts) * width, 1)
    if torch.compiler.is_compiling() or any(p.shape != first.shape or p.stride() != strides for p in parts):
        return None
    one = first.untyped_storage().data_ptr()
    places = [p.storage_offset() - first.storage_offset() for p in parts]
    if any(p.untyped_storage().data_ptr() != one or p.dtype is not first.dtype for p in parts):
        return None
    there = places == [i * width for i in range(len(parts))]
    return first.as_strided((m, strides[0]), strides) if there else None


def _after_backward(
    segment: Segment, dqkv: tuple[Tensor, ...], kept: Saved, dtypes: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dn, dw and db of the projection from its output's three gradients."""
    projection, heads = segment.after, segment.heads
    assert projection is not None
    assert heads is not None
    turns = [part.to(segment.dtype) for part in dqkv]
    m, deals, _ = turns[0].shape
    total = _bias_sums(dtypes[1], turns[0], deals * sum(heads))
    cast = projection.cast("grad_output")
    if segment.rotation is not None:
        g = projection.operand(segment.rotation.gradient(turns).view(m, -1), "grad_output", True, total)
    else:
        parts = [part.reshape(m, -1) for part in turns]
        if cast is not None and cast.pop("counts") is None and joined.fits(parts, heads.q):
            g = joined.joined(parts, heads.q, **cast, column_sum=total)
        else:
            whole = _joined_view(parts) if deals == 1 else None
            whole = torch.cat(turns, 2).view(m, -1) if whole is None else whole
            g = projection.operand(whole, "grad_output", True, total)
    dn, dw = projection.backward(g, kept, (segment.dtype, dtypes[0]))
    return dn, dw, None if total is None else total.to(dtypes[1])


class Between(torch.autograd.Function):
    """x, attention's output y (M, C) -> the stream, q, k, v of the next layer; without a layer after it norm of the stream.

    After x, y and the segment: weight, bias of proj; the norm's; fc's; out's; the end's norm's, and of what follows it, or
    None, None each. Without a norm at the end the stream alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, segment: Segment, *weights: Any) -> Any:
        proj_w, proj_b, gamma, beta, fc_w, fc_b, out_w, out_b, *end, w, b = weights
        proj, fc, out = segment.proj, segment.fc, segment.out
        if segment.rotation is not None:  # the backward pass would turn back what nobody turned
            raise ValueError(
                "Between has no rotation of the next layer's query and key: leave its segment's rotation None, and rotate "
                "what it returns; a rotation of the first layer's is Enter's"
            )
        assert proj is not None
        assert fc is not None
        assert out is not None
        attended = proj.operand(y, "input", segment.training)
        branch = proj.forward(attended, proj_w, proj_b, segment.dtype)
        middle, n, mean, rstd = _add_norm(fc, x, branch, (gamma, beta), segment.norms[0], segment)
        h, a = _fc_and_activation(n, fc_w, fc_b, segment)
        made = out.forward(a, out_w, out_b, segment.dtype)
        halved = branch.dtype.itemsize < x.dtype.itemsize
        kept = [*((x, branch) if halved else (middle, None)), gamma, mean, rstd, h]
        operands = [*proj.saved(attended, proj_w), *fc.saved(n, fc_w), *out.saved(a, out_w)]
        ctx.segment, ctx.dtypes = segment, [_dtypes(*weights[i : i + 2]) for i in range(0, len(weights), 2)]
        if segment.norms[1] is None:
            save_for_backward(ctx, kept, operands)
            return middle + made
        total, n_end, mean_end, rstd_end = _add_norm(
            segment.after, middle, made, (end[0], end[1]), segment.norms[1], segment
        )
        kept += [total, end[0], mean_end, rstd_end]
        if segment.after is None:
            save_for_backward(ctx, kept, operands)
            return n_end.data
        save_for_backward(ctx, kept, [*operands, *segment.after.saved(n_end, w)])
        assert segment.heads is not None
        return (total, *segment.heads.split(segment.after.forward(n_end, w, b, segment.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        segment, (proj_types, norm_types, fc_types, out_types, end_types, after_types) = ctx.segment, ctx.dtypes
        tensors, operands = restore(ctx)
        norm, h, end = tuple(tensors[:5]), tensors[5], tensors[6:]
        proj_kept, fc_kept, out_kept, *after_kept = zip(operands[::2], operands[1::2], strict=True)
        dw = db = dgamma_end = dbeta_end = None
        width = norm[0].shape[1]
        totals = [
            _bias_sums(types[1], h, n) for types, n in ((proj_types, width), (fc_types, h.shape[1]), (out_types, width))
        ]
        if segment.norms[1] is None:
            dx = gradients[0].contiguous()
            g = segment.out.operand(dx.to(segment.dtype), "grad_output", True, totals[2])
        else:
            dn, *above = gradients
            residual = None
            if segment.after is not None:
                residual = dn
                dn, dw, db = _after_backward(segment, tuple(above), after_kept[0], after_types)
            ended, biased = (end[0], None, *end[1:]), end_types[1] is not None
            dx, g, dgamma_end, dbeta_end = _add_norm_backward(
                segment.out, dn, ended, segment.norms[1], residual, biased, totals[2], segment
            )
        g_h, out_kept = _activation_backward(g, h, totals[1], segment, out_kept)
        d_out = segment.out.wgrad(g, out_kept, out_types[0])
        g = g_h
        del g_h, out_kept, operands  # the activation, if it was made again
        dn, d_fc = segment.fc.backward(g, fc_kept, (segment.dtype, fc_types[0]))
        dx, g, dgamma, dbeta = _add_norm_backward(
            segment.proj, dn, norm, segment.norms[0], dx, norm_types[1] is not None, totals[0], segment
        )
        dy, d_proj = segment.proj.backward(g, proj_kept, (segment.dtype, proj_types[0]))
        biases = [
            None if sums is None else sums.to(types[1])
            for sums, types in zip(totals, (proj_types, fc_types, out_types), strict=True)
        ]
        return (
            *(dx, dy, None, d_proj, biases[0], dgamma, dbeta, d_fc, biases[1], d_out, biases[2]),
            *(dgamma_end, dbeta_end, dw, db),
        )
