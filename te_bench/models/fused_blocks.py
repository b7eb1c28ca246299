"""GPT-2's blocks from one attention to the next: what follows a GEMM leaves a kernel ready for the next one.

    attention -> c_proj -> x + -> ln_2 -> c_fc -> GELU -> c_proj -> x + -> the next block's ln_1 -> c_attn -> attention

That is one autograd.Function. Addition, norm and cast are one kernel, GELU and cast another; in the backward pass the norm's
gradient, the stream's and their rounding are one, GELU's gradient, cast and bias gradient another, and the gradients of q,
k and v are cast as one matrix. The modules are those of models.gpt, with their parameters, recipes and weights that an
optimizer left in FP8; what is computed is what they compute one by one, rounded where they round. Where a recipe needs the
finished tensor for its scale the cast is a kernel of its own; without a recipe nothing is cast, and GEMMs read what the
same kernels leave in bf16.

From pass to pass a block keeps one float32 stream and what the attention added to it, in bf16: their sum is added up again.
Where the scale is known beforehand GELU's output is made again by the kernel that makes its gradient, and not kept either:
models.cost says how many bytes that leaves.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from te_bench.kernels.activation import _recomputed
from te_bench.kernels.quantize import Quantized, _joined
from te_bench.models import fp8
from te_bench.models.modules._module import FLOATS, Gemms, compute_dtype
from te_bench.models.modules.layernorm import backend
from te_bench.models.modules.layernorm_mlp import activate_quantize, activation_backend, activation_grad_quantize

GELU = {"none": "gelu_erf", "tanh": "gelu"}  # torch's `approximate` -> a kind of kernels.activation

Attend = Callable[..., Tensor]


class Product(NamedTuple):
    """A Linear's three GEMMs: in FP8 with `w`, the weight in FP8, or, with gemms None, in the activations' precision.

    An operand is Quantized; in the activations' precision data and data_t are one and the same matrix.
    """

    gemms: Gemms | None
    w: Quantized | None

    def operand(self, y: Tensor, role: str, columnwise: bool, total: Tensor | None = None) -> Quantized:
        """y (M, K) for the GEMMs; the sum over its rows is added to total."""
        if self.gemms is not None:
            return self.gemms.quantize(y, role, rowwise=True, columnwise=columnwise, total=total)
        if total is not None:
            total.add_(y.sum(0, dtype=torch.float32))
        return Quantized(y, None, y, None)

    def cast(self, role: str) -> Any:
        """What whoever makes an operand may cast it by, as keyword arguments; None where it may not."""
        if self.gemms is None:
            return None
        cast = self.gemms.recipe.epilogue(role, getattr(self.gemms, role))
        return None if cast is None else cast._asdict()

    def forward(self, x: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.gemms is None:
            return F.linear(x.data, weight, bias)
        assert self.w is not None
        return self.gemms.fprop(x, self.w, dtype, bias)

    def kept(self, x: Quantized, weight: Tensor) -> tuple[Any, ...]:
        """What `backward` takes of a forward pass."""
        if self.gemms is None:
            return x.data, None, weight, None
        assert self.w is not None
        # Both layouts are of one scale, where one of them is not made yet.
        return x.data_t, x.scale_inv if x.data_t is None else x.scale_inv_t, self.w.data_t, self.w.scale_inv_t

    def dgrad(self, g: Quantized, kept: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        _, _, w_t, w_inv = kept
        return g.data @ w_t if self.gemms is None else self.gemms.dgrad(g, w_t, w_inv, dtype)

    def wgrad(self, g: Quantized, kept: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        x_t, x_inv, _, _ = kept
        return g.data.t() @ x_t if self.gemms is None else self.gemms.wgrad(g, x_t, x_inv, dtype)

    def backward(self, g: Quantized, kept: tuple[Any, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Any, Any]:
        """dx and dw, of these dtypes."""
        return self.dgrad(g, kept, dtypes[0]), self.wgrad(g, kept, dtypes[1])


class Plan(NamedTuple):
    """What of a stretch is no tensor to be trained; `after` is None behind the last block, proj to out before the first."""

    proj: Product | None
    fc: Product | None
    out: Product | None
    after: Product | None
    eps: tuple[float, float]  # of ln_2 and of the norm at the end
    gelu: str
    dtype: torch.dtype  # of what the GEMMs make
    training: bool  # whether gradients are recorded
    scale: Tensor | None = None  # that GELU's output is cast by, a copy; None where that output is kept


def _add_norm(
    product: Product | None, x: Tensor, branch: Tensor | None, norm: tuple[Tensor, Tensor | None, float], plan: Plan
) -> tuple[Tensor, Quantized, Tensor, Tensor]:
    """x + branch, norm of it as an operand of `product`, mean, rstd; in x's dtype, uncast, without a product."""
    stream = backend(x).residual
    assert stream is not None
    gamma, beta, eps = norm
    cast = None if product is None else product.cast("input")
    if cast is not None:
        made: Any = stream.add_forward_quantized(
            x, branch, gamma, beta, eps=eps, via=plan.dtype, rowwise=True, columnwise=plan.training, **cast
        )
        return made
    dtype = x.dtype if product is None else plan.dtype
    total, y, mean, rstd = stream.add_forward(x, branch, gamma, beta, eps=eps, dtype=dtype)
    packed = Quantized(y, None, None, None) if product is None else product.operand(y, "input", plan.training)
    return total, packed, mean, rstd


def _add_norm_backward(
    product: Product,
    dn: Tensor,
    kept: tuple[Any, ...],
    residual: Tensor | None,
    biased: bool,
    total: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Quantized, Tensor, Tensor | None]:
    """dx, it as an operand of `product`, whose output the branch was, dgamma, dbeta."""
    x, branch, gamma, mean, rstd = kept
    stream = backend(x).residual
    assert stream is not None
    cast = product.cast("grad_output")
    options: dict[str, Any] = {"residual": residual, "biased": biased, "column_sum": total, "branch": branch}
    if cast is not None:
        made: Any = stream.backward_quantized(
            dn, x, gamma, mean, rstd, via=plan.dtype, rowwise=True, columnwise=True, **cast, **options
        )
        return made
    dx, copy, dgamma, dbeta = stream.backward_rounded(dn, x, gamma, mean, rstd, dtype=plan.dtype, **options)
    return dx, product.operand(copy, "grad_output", True), dgamma, dbeta


def _activated(product: Product, h: Tensor, plan: Plan) -> Quantized:
    if product.gemms is not None:
        return activate_quantize(product.gemms, h, plan.gelu, columnwise=plan.training and plan.scale is None)
    return product.operand(activation_backend(h).forward(h, plan.gelu), "input", plan.training)


def _activated_backward(
    product: Product, da: Tensor, h: Tensor, total: Tensor | None, plan: Plan, kept: tuple[Any, ...]
) -> tuple[Quantized, tuple[Any, ...]]:
    """The gradient of h as an operand of `product`, and what was kept of GELU's output, or that output again."""
    if product.gemms is None:
        dh = activation_backend(h).backward(da, h, plan.gelu)
        return product.operand(dh, "grad_output", True, total), kept
    if plan.scale is None:
        both = {"rowwise": True, "columnwise": True}
        return activation_grad_quantize(product.gemms, da, h, plan.gelu, **both, total=total), kept
    g, a_t = _recomputed.recomputed(
        activation_backend(h),
        da,
        h,
        plan.gelu,
        **product.cast("grad_output"),
        value_scale=plan.scale,
        value_dtype=product.gemms.recipe.dtype("input"),
        column_sum=total,
    )
    return g, (a_t, *kept[1:])


def _no_sums(bias: torch.dtype | None, like: Tensor, features: int) -> Tensor | None:
    """Where a bias gradient is to be gathered."""
    return None if bias is None else like.new_zeros(features, dtype=torch.float32)


def _dtypes(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple([None if t is None else t.dtype for t in tensors])


class _Enter(torch.autograd.Function):
    """x (M, C), ln_1's gamma, beta, c_attn's weight, bias -> q, k, v (M, C) each: before the first attention."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, w: Tensor, b: Tensor | None, plan: Plan
    ) -> Any:
        assert plan.after is not None
        _, n, mean, rstd = _add_norm(plan.after, x, None, (gamma, beta, plan.eps[1]), plan)
        qkv = plan.after.forward(n, w, b, plan.dtype)
        ctx.save_for_backward(x, gamma, mean, rstd, *plan.after.kept(n, w))
        ctx.plan, ctx.dtypes = plan, _dtypes(w, b, beta)
        return qkv.chunk(3, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dqkv: Tensor) -> Any:
        x, gamma, mean, rstd, *kept = ctx.saved_tensors
        dn, dw, db = _after_backward(ctx.plan, dqkv, tuple(kept), ctx.dtypes)
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd)
        return dx, dgamma, dbeta if ctx.dtypes[2] else None, dw, db, None


def _whole(parts: list[Tensor]) -> Tensor | None:
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
    plan: Plan, dqkv: tuple[Tensor, ...], kept: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dn, dw and db of c_attn from its three gradients."""
    product = plan.after
    assert product is not None
    parts = [part.to(plan.dtype) for part in dqkv]
    features = sum(part.shape[1] for part in parts)
    total = _no_sums(dtypes[1], parts[0], features)
    cast = product.cast("grad_output")
    whole = _whole(parts)
    if whole is not None:
        g = product.operand(whole, "grad_output", True, total)
    elif cast is not None and cast.pop("counts") is None and total is None and _joined.fits(parts):
        g = _joined.joined(parts, **cast)
    else:
        g = product.operand(torch.cat(parts, 1), "grad_output", True, total)
    dn, dw = product.backward(g, kept, (plan.dtype, dtypes[0]))
    return dn, dw, None if total is None else total.to(dtypes[1])


class _Between(torch.autograd.Function):
    """x, attention's output y (M, C) -> the stream, q, k, v of the next block; behind the last one ln_f of the stream.

    After them: weight, bias of c_proj; ln_2's; c_fc's; mlp.c_proj's; those of the norm at the end; c_attn's or None, None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, plan: Plan, *weights: Any) -> Any:
        proj_w, proj_b, gamma, beta, fc_w, fc_b, out_w, out_b, gamma_end, beta_end, w, b = weights
        proj, fc, out = plan.proj, plan.fc, plan.out
        assert proj is not None
        assert fc is not None
        assert out is not None
        attended = proj.operand(y, "input", plan.training)
        branch = proj.forward(attended, proj_w, proj_b, plan.dtype)
        middle, n, mean, rstd = _add_norm(fc, x, branch, (gamma, beta, plan.eps[0]), plan)
        h = fc.forward(n, fc_w, fc_b, plan.dtype)
        a = _activated(out, h, plan)
        total, n_end, mean_end, rstd_end = _add_norm(
            plan.after, middle, out.forward(a, out_w, out_b, plan.dtype), (gamma_end, beta_end, plan.eps[1]), plan
        )
        halved = branch.dtype.itemsize < x.dtype.itemsize
        ctx.save_for_backward(
            *((x, branch) if halved else (middle, None)),
            *(gamma, mean, rstd, total, gamma_end, mean_end, rstd_end, h),
            *(*proj.kept(attended, proj_w), *fc.kept(n, fc_w), *out.kept(a, out_w)),
            *(() if plan.after is None else plan.after.kept(n_end, w)),
        )
        ctx.plan, ctx.dtypes = plan, [_dtypes(*weights[i : i + 2]) for i in range(0, len(weights), 2)]
        if plan.after is None:
            return n_end.data
        return (total, *plan.after.forward(n_end, w, b, plan.dtype).chunk(3, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        plan, (proj_types, norm_types, fc_types, out_types, end_types, after_types) = ctx.plan, ctx.dtypes
        saved = ctx.saved_tensors
        norm, norm_end, h = saved[:5], (saved[5], None, *saved[6:9]), saved[9]
        proj_kept, fc_kept, out_kept, after_kept = (saved[i : i + 4] for i in (10, 14, 18, 22))
        dw = db = residual = None
        if plan.after is None:
            (dn,) = gradients
        else:
            residual, *dqkv = gradients
            dn, dw, db = _after_backward(plan, tuple(dqkv), after_kept, after_types)
        width = norm[0].shape[1]
        totals = [
            _no_sums(types[1], h, n) for types, n in ((proj_types, width), (fc_types, h.shape[1]), (out_types, width))
        ]
        dx, g, dgamma_end, dbeta_end = _add_norm_backward(
            plan.out, dn, norm_end, residual, end_types[1] is not None, totals[2], plan
        )
        da = plan.out.dgrad(g, out_kept, plan.dtype)
        g_h, out_kept = _activated_backward(plan.fc, da, h, totals[1], plan, out_kept)
        del da
        d_out = plan.out.wgrad(g, out_kept, out_types[0])
        g, out_kept = g_h, None
        del g_h
        dn, d_fc = plan.fc.backward(g, fc_kept, (plan.dtype, fc_types[0]))
        dx, g, dgamma, dbeta = _add_norm_backward(plan.proj, dn, norm, dx, norm_types[1] is not None, totals[0], plan)
        dy, d_proj = plan.proj.backward(g, proj_kept, (plan.dtype, proj_types[0]))
        biases = [
            None if sums is None else sums.to(types[1])
            for sums, types in zip(totals, (proj_types, fc_types, out_types), strict=True)
        ]
        return (
            *(dx, dy, None, d_proj, biases[0], dgamma, dbeta, d_fc, biases[1], d_out, biases[2]),
            *(dgamma_end, dbeta_end, dw, db),
        )


def _linear(module: Any, dtype: torch.dtype, training: bool) -> tuple[Product, Tensor, Tensor | None]:
    """The GEMMs of an nn.Linear or a te Linear, its weight and its bias."""
    weight, bias = module.weight, module.bias
    if not fp8.current.enabled:
        return Product(None, None), weight.to(dtype), None if bias is None else bias.to(dtype)
    gemms = module.gemms()
    kept = False if module._reuse else None
    return Product(gemms, module.quantized_weight(gemms, weight, 0, kept, columnwise=training)), weight, bias


def _scales(blocks: list[Any], training: bool) -> list[Tensor | None]:
    """What each block's GELU is cast by, copied, for scales move on between the passes; None where it is to be kept."""
    region = fp8.current
    absent: list[Tensor | None] = [None] * len(blocks)
    if not (training and region.enabled) or region.unusual or torch.compiler.is_compiling():
        return absent
    # In the order in which they multiply: who asks first makes a state, and ranks, of which one may have evaluated before,
    # share their amaxes in the order of the states.
    order = [(b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj) for b in blocks]
    gemms = [[linear.gemms() for linear in linears][-1] for linears in order]
    casts = [known.recipe.epilogue("input", known.input) for known in gemms]
    gradients = [known.recipe.epilogue("grad_output", known.grad_output) for known in gemms]
    return absent if None in (*casts, *gradients) else [*torch.stack([cast.scale for cast in casts]).unbind()]


def run(blocks: Iterable[Any], last: nn.LayerNorm, x: Tensor, *, attend: Attend, heads: int, gelu: str) -> Tensor:
    """`last` of what the blocks make of x (B, T, C); attend is kernels.attention's forward, gelu torch's `approximate`.

    The result is of x's dtype. Raises ValueError for an x of float64: the kernels compute in float32.
    """
    B, T, C = x.shape
    if x.dtype not in FLOATS:
        raise ValueError(f"blocks fused: float32, bfloat16 or float16, got {x.dtype}; build the model without blocks")
    dtype, training = compute_dtype(x), torch.is_grad_enabled()
    layers = list(blocks)
    stream = x.reshape(B * T, C)
    first = layers[0]
    after, w, b = _linear(first.attn.c_attn, dtype, training)
    plan = Plan(None, None, None, after, (0.0, first.ln_1.eps), GELU[gelu], dtype, training)
    qkv = _Enter.apply(stream, first.ln_1.weight, first.ln_1.bias, w, b, plan)
    for block, following, scale in zip(layers, [*layers[1:], None], _scales(layers, training), strict=True):
        q, k, v = (t.view(B, T, heads, -1).transpose(1, 2) for t in qkv)
        y = attend(q, k, v, causal=True, scale=1 / math.sqrt(C // heads), dropout=0.0)
        y = y.transpose(1, 2).reshape(B * T, C)
        linears = [_linear(m, dtype, training) for m in (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
        norm = last if following is None else following.ln_1
        end: Any = (None, None, None) if following is None else _linear(following.attn.c_attn, dtype, training)
        (proj, proj_w, proj_b), (fc, fc_w, fc_b), (out, out_w, out_b) = linears
        plan = Plan(proj, fc, out, end[0], (block.ln_2.eps, norm.eps), GELU[gelu], dtype, training, scale)
        weights = (proj_w, proj_b, block.ln_2.weight, block.ln_2.bias, fc_w, fc_b, out_w, out_b)
        made = _Between.apply(stream, y.to(dtype), plan, *weights, norm.weight, norm.bias, *end[1:])
        if following is not None:
            stream, *qkv = made
    return made.view(B, T, C)
