"""A segment runs from one attention to the next: each GEMM's output goes through one kernel to the next GEMM's input.

    attention -> proj -> x + -> [norm -> up -> activation -> down -> x +] -> norm -> qkv -> [norms, rotation ->] attention

It is one autograd.Function, `Segment`. A decoder's first segment begins with the stream alone, its last ends with the
last norm. It holds any number of MLPs. Addition, norm and cast are one kernel, activation and cast another. In the
backward pass one kernel computes the norm's gradient, adds the stream's and rounds; one computes the activation's
gradient, casts it and sums the bias gradient; the gradients of q, k and v are cast as one matrix. Everything is rounded
where the separate modules would round. If a recipe needs the finished tensor for its scale, the cast is a separate
kernel. Without a recipe nothing is cast: GEMMs read bf16, and their epilogues compute activation and slope where that
was measured to be faster (kernels.gemm.half).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.activation import recomputed
from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.gemm import half
from te_bench.kernels.norm import Norm
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, joined
from te_bench.models.fused.projection import Projection, Saved
from te_bench.models.modules.gemms import restore, save_for_backward
from te_bench.models.modules.layernorm import backend
from te_bench.models.modules.layernorm_mlp import activate_quantize, activation_backend, activation_grad_quantize
from te_bench.models.modules.rotary import Rotation


class HeadColumns(NamedTuple):
    """The numbers of a projection's columns that go to q, k and v in turn, repeated until all are used."""

    q: int
    k: int
    v: int

    def split(self, mixed: Tensor) -> list[Tensor]:
        """Return q, k and v of (M, F), views (M, turns, columns) each."""
        return list(mixed.view(mixed.shape[0], -1, sum(self)).split(self, 2))


class MLP(NamedTuple):
    """An MLP: the norm before it, its two GEMMs and its activation."""

    norm: Norm
    up: Projection
    down: Projection
    activation: str  # one of kernels.activation's kinds
    scale: Tensor | None = None  # copy of the activation's scale; None: its FP8 is saved
    again: bool = False  # in half precision, recompute the activation instead of saving it


class Entry(NamedTuple):
    """The way into an attention: the qkv GEMM, and the norms and rotation of q and k."""

    qkv: Projection
    heads: HeadColumns
    head_dim: int
    q_norm: Norm | None = None  # over head_dim
    k_norm: Norm | None = None
    rotation: Rotation | None = None
    scale: Tensor | None = None  # copy of the scale of qkv's input; None: its FP8 is saved


class SegmentPlan(NamedTuple):
    """A segment without its trained tensors, whose order `Segment` describes."""

    proj: Projection | None  # of the attention before the segment
    mlps: tuple[MLP, ...]
    norm: Norm | None  # the last norm; None: the segment returns the stream
    entry: Entry | None  # of the attention after it; None: the segment returns the normed stream
    dtype: torch.dtype  # of the GEMMs' outputs
    training: bool  # whether gradients are recorded
    scale: Tensor | None = None  # copy of the scale of proj's input; None: its FP8 is saved


def _add_norm(
    projection: Projection | None,
    x: Tensor,
    branch: Tensor | None,
    weights: Sequence[Tensor | None],
    norm: Norm,
    plan: SegmentPlan,
    columnwise: bool = False,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """Return x + branch, its norm as an operand of `projection` (uncast in x's dtype if None), mean and rstd."""
    stream = backend(x).residual
    assert stream is not None
    gamma, beta = weights
    cast = None if projection is None else projection.cast("input")
    if cast is not None:
        made: Any = stream.add_forward_quantized(
            x, branch, gamma, beta, norm, via=plan.dtype, rowwise=True, columnwise=columnwise, **cast
        )
        return made
    dtype = x.dtype if projection is None else plan.dtype
    total, y, mean, rstd = stream.add_forward(x, branch, gamma, beta, norm, dtype=dtype)
    if projection is None:
        return total, Quantized(y, None, None, None, Layout(dtype, TENSOR, None)), mean, rstd
    return total, projection.operand(y, "input", columnwise), mean, rstd


def _normed_again(
    entry: Entry, norm: Norm, kept: Sequence[Any], beta: Tensor | None, read: Saved, dtype: torch.dtype
) -> Saved:
    """Rebuild the qkv GEMM's transposed FP8 input, for wgrad, by rerunning norm and cast; returns (input, weight)."""
    x, _, gamma, mean, rstd = kept
    stream, gemms = backend(x).residual, entry.qkv.gemms
    assert stream is not None
    assert gemms is not None
    cast = {"scale": entry.scale, "dtype": gemms.recipe.dtype("input"), "rowwise": False, "columnwise": True}
    _, n, _, _ = stream.add_forward_quantized(x, None, gamma, beta, norm, via=dtype, **cast, statistics=(mean, rstd))
    return read[0]._replace(data=n.data_t), read[1]


def _add_norm_backward(
    projection: Projection | None,
    dn: Tensor,
    kept: Sequence[Any],
    norm: Norm,
    residual: Tensor | None,
    biased: bool,
    total: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Quantized | None, Tensor, Tensor | None]:
    """Return dx, dx as an operand of `projection` (whose output the branch was; None without), dgamma, dbeta."""
    x, branch, gamma, mean, rstd = kept
    if projection is None or (x.dtype is dtype and branch is None):  # otherwise dx would be written twice
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, norm, residual=residual)
        g = None if projection is None else projection.operand(dx, "grad_output", True, total)
        return dx, g, dgamma, dbeta if biased else None
    stream = backend(x).residual
    assert stream is not None
    options: dict[str, Any] = {"residual": residual, "biased": biased, "column_sum": total, "branch": branch}
    dx, copy, dgamma, dbeta = stream.backward_rounded(dn, x, gamma, mean, rstd, norm, dtype=dtype, **options)
    return dx, projection.operand(copy, "grad_output", True), dgamma, dbeta


def _up_and_activation(
    n: Quantized, weight: Tensor, bias: Tensor | None, mlp: MLP, plan: SegmentPlan
) -> tuple[Tensor, Quantized]:
    """Return up's output h, and act(h) as an operand of down."""
    up, down, kind = mlp.up, mlp.down, mlp.activation
    if up.gemms is None and half.is_faster(half.ACTIVATED, n.data, weight, kind):
        h, a = half.activated(n.data, weight, bias, kind)
        return h, down.operand(a, "input", plan.training)
    h = up.forward(n, weight, bias, plan.dtype)
    if down.gemms is not None:
        return h, activate_quantize(down.gemms, h, kind, columnwise=plan.training and mlp.scale is None)
    return h, down.operand(activation_backend(h).forward(h, kind), "input", plan.training)


def _activation_backward(
    g: Quantized, h: Tensor, total: Tensor | None, mlp: MLP, kept: Saved, dtype: torch.dtype
) -> tuple[Quantized, Saved]:
    """Return h's gradient as an operand of up, given down's output's, and down's operands, rebuilt if needed."""
    up, down, kind = mlp.up, mlp.down, mlp.activation
    if down.gemms is None and not mlp.again and half.is_faster(half.GRADIENT, g.data, kept[1].data, kind):
        dh = half.gradient(g.data, kept[1].data, h, kind)
        return up.operand(dh, "grad_output", True, total), kept
    da = down.dgrad(g, kept, dtype)
    if mlp.again:
        dh, a = recomputed.gradient_and_value(activation_backend(h), da, h, kind)
        return up.operand(dh, "grad_output", True, total), (kept[0]._replace(data=a), kept[1])
    if up.gemms is None:
        return up.operand(activation_backend(h).backward(da, h, kind), "grad_output", True, total), kept
    if mlp.scale is None:
        both = {"rowwise": True, "columnwise": True}
        return activation_grad_quantize(up.gemms, da, h, kind, **both, total=total), kept
    made, a_t = recomputed.recomputed(
        activation_backend(h),
        da,
        h,
        kind,
        **up.cast("grad_output"),
        value_scale=mlp.scale,
        value_dtype=up.gemms.recipe.dtype("input"),
        column_sum=total,
    )
    return made, (kept[0]._replace(data=a_t), kept[1])


def _bias_sums(bias: torch.dtype | None, like: Tensor, features: int) -> Tensor | None:
    """Return a zeroed float32 buffer for a bias gradient; None without a bias."""
    return None if bias is None else like.new_zeros(features, dtype=torch.float32)


def _as(sums: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if sums is None else sums.to(dtype)


def _heads_of(entry: Entry, mixed: Tensor, gammas: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return q, k and v (M, turns, columns) of qkv's output, maybe in its memory, and the tensors to save."""
    rotation = entry.rotation
    angles: list[Tensor | None] = (
        [] if rotation is None else [rotation.q, rotation.k]
    )  # autograd detects changes to them
    if not gammas:
        if rotation is None:
            return entry.heads.split(mixed), angles
        return [part.flatten(0, 1).flatten(2) for part in rotation.split(mixed, own=True)], angles
    q, k, v = entry.heads.split(mixed)
    normed, kept = [q, k], angles  # a list: of `*normed, v` torch 2.11's compiler makes a tuple
    for i, (gamma, norm) in enumerate(zip(gammas, (entry.q_norm, entry.k_norm), strict=True)):
        assert norm is not None
        rows = normed[i].reshape(-1, entry.head_dim)
        y, mean, rstd = backend(rows).forward(rows, gamma, None, norm)
        kept += [rows, gamma, mean, rstd]
        normed[i] = y.view(normed[i].shape)
    if rotation is not None:
        by_head = [x.view(*rotation.outer, rotation.turns, -1, rotation.d) for x in normed]
        rotation.rotate(by_head, by_head)
    return [*normed, v.contiguous()], kept  # nothing keeps `mixed` alive


def _heads_backward(
    entry: Entry, gradients: list[Tensor], kept: list[Any], total: Tensor | None
) -> tuple[Quantized, list[Tensor]]:
    """Return the gradient of qkv's output as an operand of it, and those of the gains of q's and k's norms."""
    rotation, projection, m = entry.rotation, entry.qkv, len(gradients[0])
    gains: list[Tensor] = []
    if entry.q_norm is not None:
        if rotation is not None:
            kept, sources = kept[2:], [x.contiguous() for x in gradients[:2]]
            by_head = [x.view(*rotation.outer, rotation.turns, -1, rotation.d) for x in sources]
            turned = [torch.empty_like(x) for x in by_head]
            rotation.rotate(by_head, turned, transposed=True)
            gradients = [*(x.view(s.shape) for x, s in zip(turned, sources, strict=True)), gradients[2]]
        for i, norm in enumerate((entry.q_norm, entry.k_norm)):
            assert norm is not None
            rows, gamma, mean, rstd = kept[4 * i : 4 * i + 4]
            dy = gradients[i].reshape(rows.shape)
            dx, dgamma, _ = backend(rows).backward(dy, rows, gamma, mean, rstd, norm)
            gains.append(dgamma)
            gradients[i] = dx.view(gradients[i].shape)
    elif rotation is not None:
        whole = rotation.gradient(gradients).view(m, -1)
        return projection.operand(whole, "grad_output", True, total), gains
    parts, cast = [part.reshape(m, -1) for part in gradients], projection.cast("grad_output")
    if cast is not None and cast.pop("counts") is None and joined.fits(parts, entry.heads.q):
        return joined.joined(parts, entry.heads.q, **cast, column_sum=total), gains
    joint = _joined_view(parts) if gradients[0].shape[1] == 1 else None
    joint = torch.cat(gradients, 2).view(m, -1) if joint is None else joint
    return projection.operand(joint, "grad_output", True, total), gains


def _joined_view(parts: list[Tensor]) -> Tensor | None:
    """Return torch.cat(parts, 1) without a copy if the (M, C) parts lie side by side in one (M, 3C); else None."""
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


class Segment(torch.autograd.Function):
    """Compute x (M, C) and the last attention's output y (M, H D), or None -> the stream, the next attention's q, k, v.

    q, k and v are (M, turns, columns). Without a following attention it returns the normed stream; without a last norm
    only the stream. Weights, as far as the plan has their owners (None: no bias): weight, bias of proj; of each MLP its
    norm's gain and bias, up's and down's weight and bias; the last norm's; qkv's; gains of q_norm, k_norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, plan: SegmentPlan, *weights: Any) -> Any:
        tensors: list[Tensor | None] = []
        operands: list[Any] = []
        total, branch, rest = x, None, list(weights)
        if plan.proj is not None:
            assert y is not None
            (w, b), rest = rest[:2], rest[2:]
            attended = plan.proj.operand(y, "input", plan.training and plan.scale is None)
            branch = plan.proj.forward(attended, w, b, plan.dtype)
            operands += plan.proj.saved(attended, w)
            if plan.scale is not None:  # cast again from y, which attention saves anyway
                operands[0] = operands[0]._replace(data=y)
            del attended
        for number, mlp in enumerate(plan.mlps):
            (gamma, beta, up_w, up_b, down_w, down_b), rest = rest[:6], rest[6:]
            made, n, mean, rstd = _add_norm(mlp.up, total, branch, (gamma, beta), mlp.norm, plan, plan.training)
            middle = total if branch is None else made
            # The incoming stream is saved by its maker: with the half-precision branch it gives the sum again.
            halved = number == 0 and branch is not None and branch.dtype.itemsize < x.dtype.itemsize
            tensors += [*((total, branch) if halved else (middle, None)), gamma, mean, rstd]
            h, a = _up_and_activation(n, up_w, up_b, mlp, plan)
            total, branch = middle, mlp.down.forward(a, down_w, down_b, plan.dtype)
            tensors.append(h)
            read = a._replace(data=None) if mlp.again else a
            operands += [*mlp.up.saved(n, up_w), *mlp.down.saved(read, down_w)]
            del n, a, h, read
        ctx.plan, ctx.dtypes = plan, [None if w is None else w.dtype for w in weights]
        if plan.norm is None:
            save_for_backward(ctx, tensors, operands)
            return x.view_as(x) if branch is None else total + branch
        (gamma, beta), rest = rest[:2], rest[2:]
        qkv = None if plan.entry is None else plan.entry.qkv
        again = plan.entry is not None and plan.entry.scale is not None
        made, n, mean, rstd = _add_norm(qkv, total, branch, (gamma, beta), plan.norm, plan, plan.training and not again)
        total = x if branch is None else made
        tensors += [total, None, gamma, mean, rstd, beta if again else None]
        if plan.entry is None:
            save_for_backward(ctx, tensors, operands)
            return n.data
        (w, b), gammas = rest[:2], rest[2:]
        heads, kept = _heads_of(plan.entry, plan.entry.qkv.forward(n, w, b, plan.dtype), gammas)
        save_for_backward(ctx, [*tensors, *kept], [*operands, *plan.entry.qkv.saved(n, w)])
        return (x.view_as(x) if branch is None else total, *heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        plan: SegmentPlan = ctx.plan
        tensors, operands = restore(ctx)
        dtypes, of_weights = list(ctx.dtypes), []  # dtypes of the weights; their gradients, last first
        width = gradients[0].shape[-1]
        products = [plan.proj, *(mlp.down for mlp in plan.mlps)]  # the GEMM that made each norm's branch
        first = 0 if plan.proj is None else 2
        norms = len(plan.mlps) * 6

        def kept_of(number: int) -> list[Any]:
            return tensors[number * 6 : number * 6 + 5]

        def sums_of(product: Projection | None, number: int) -> Tensor | None:
            """Return the buffer for the bias gradient of the GEMM before norm `number`."""
            place = 1 if number == 0 else first + 6 * number - 1
            return None if product is None else _bias_sums(dtypes[place], gradients[0], width)

        sums = [sums_of(product, number) for number, product in enumerate(products)]
        end = first + norms
        if plan.norm is None:
            dx = gradients[0].contiguous()
            last = products[-1]
            g = None if last is None else last.operand(dx.to(plan.dtype), "grad_output", True, sums[-1])
        else:
            dn, *above = gradients
            residual = None
            if plan.entry is not None:
                branches = plan.proj is not None or bool(plan.mlps)
                residual = dn if branches or ctx.needs_input_grad[0] else None
                w_dtype, b_dtype = dtypes[end + 2 : end + 4]
                heads = [part.to(plan.dtype) for part in above]
                features = heads[0].shape[1] * sum(plan.entry.heads)
                total = _bias_sums(b_dtype, heads[0], features)
                g_qkv, gains = _heads_backward(plan.entry, heads, tensors[norms + 6 :], total)
                del heads, above
                read = (operands[-2], operands[-1])
                if plan.entry.scale is not None:
                    kept, beta = kept_of(len(plan.mlps)), tensors[norms + 5]
                    read = _normed_again(plan.entry, plan.norm, kept, beta, read, plan.dtype)
                dn, dw = plan.entry.qkv.backward(g_qkv, read, (plan.dtype, w_dtype))
                del g_qkv, read
                of_weights += [*reversed(gains), _as(total, b_dtype), dw]
            dx, g, dgamma, dbeta = _add_norm_backward(
                products[-1], dn, kept_of(len(plan.mlps)), plan.norm, residual, dtypes[end + 1] is not None, sums[-1],
                plan.dtype,
            )  # fmt: skip
            of_weights += [dbeta, dgamma]
        before = 0 if plan.proj is None else 2
        for number in reversed(range(len(plan.mlps))):
            mlp, at = plan.mlps[number], first + 6 * number
            up_read, down_read = (
                (operands[i], operands[i + 1]) for i in (before + 4 * number, before + 4 * number + 2)
            )
            h = tensors[number * 6 + 5]
            assert g is not None
            total = _bias_sums(dtypes[at + 3], h, h.shape[1])
            g_up, down_read = _activation_backward(g, h, total, mlp, down_read, plan.dtype)
            of_weights += [_as(sums[number + 1], dtypes[at + 5]), mlp.down.wgrad(g, down_read, dtypes[at + 4])]
            del down_read  # the recomputed activation
            dn, dw = mlp.up.backward(g_up, up_read, (plan.dtype, dtypes[at + 2]))
            del g_up
            of_weights += [_as(total, dtypes[at + 3]), dw]
            dx, g, dgamma, dbeta = _add_norm_backward(
                products[number],
                dn,
                kept_of(number),
                mlp.norm,
                dx,
                dtypes[at + 1] is not None,
                sums[number],
                plan.dtype,
            )
            of_weights += [dbeta, dgamma]
        dy = None
        if plan.proj is not None:
            assert g is not None
            attended, weight = operands[:2]
            if plan.scale is not None:
                attended = attended._replace(data=plan.proj.again(attended.data, plan.scale))
            dy, dw = plan.proj.backward(g, (attended, weight), (plan.dtype, dtypes[0]))
            of_weights += [_as(sums[0], dtypes[1]), dw]
        return dx, dy, None, *reversed(of_weights)
