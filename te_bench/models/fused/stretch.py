"""From one attention to the next: what follows a GEMM leaves a kernel ready for the next one.

    attention -> proj -> x + -> norm -> fc -> activation -> out -> x + [-> the next layer's norm -> qkv -> attention]

That is one autograd.Function, `Between`; `Enter` is what comes before the first attention. Addition, norm and cast are one
kernel, activation and cast another; in the backward pass the norm's gradient, the stream's and their rounding are one, the
activation's gradient, cast and bias gradient another, and the gradients of q, k and v are cast as one matrix. Rounded where
modules one after the other round. Where a recipe needs the finished tensor for its scale the cast is a kernel of its own;
without a recipe nothing is cast, GEMMs read what the same kernels leave in bf16, and the activation and its slope leave with
the GEMMs beside them where that was measured to be faster (kernels.gemm._half).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from te_bench.kernels.activation import recomputed
from te_bench.kernels.gemm import half
from te_bench.kernels.quantize import Quantized, joined
from te_bench.models.modules._module import Fp8Module, Gemms
from te_bench.models.modules.layernorm import backend
from te_bench.models.modules.layernorm_linear import Norm
from te_bench.models.modules.layernorm_mlp import activate_quantize, activation_backend, activation_grad_quantize
from te_bench.models.modules.rotary import Rotation


def unwatched(modules: Iterable[nn.Module]) -> bool:
    """Whether stretches may pass by the modules: they compute as torch's and te's do, nobody listens to them, and all that
    each has is trained, or nothing is.
    """
    return not _has_any_global_hook() and all(map(_untouched, modules))


def watched(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Why the named modules are not `unwatched`."""
    if _has_any_global_hook():
        return "a hook listens to every module (torch.nn.modules.module.register_module_*_hook)"
    for name, module in modules:
        if _untouched(module):
            continue
        frozen = [own for own, p in module.named_parameters(recurse=False) if not p.requires_grad]
        if "forward" in module.__dict__:
            return f"{name}.forward was replaced"
        if not _computes_as_torch_or_te(module):
            return f"{name} is a {type(module).__qualname__}, whose forward is its own"
        return f"{name}.{frozen[0]} is frozen" if frozen and not _has_hooks(module) else f"{name} has a hook"
    raise AssertionError("nothing watches these modules")


def _has_hooks(module: nn.Module) -> bool:
    own = module.__dict__
    return any(own[f"_{which}_hooks"] for which in ("forward", "forward_pre", "backward", "backward_pre"))


def _computes_as_torch_or_te(module: nn.Module) -> bool:
    """Whether its forward is one that stretches know, not one of a subclass or a wrapper."""
    home: str = type(module).forward.__module__
    return home.startswith(("torch.nn.", "te_bench."))


def _untouched(module: nn.Module) -> bool:
    own = module.__dict__  # asked of 145 modules in an eager pass of a fused GPT-2: 0.13 ms
    if not _computes_as_torch_or_te(module):
        return False
    if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    parameters = own["_parameters"]
    if not parameters or not torch.is_grad_enabled():
        return True
    return all(p is None or p.requires_grad for p in parameters.values())


class Product(NamedTuple):
    """A Linear's three GEMMs: in FP8 with `w`, the weight in FP8, or, with gemms None, in the activations' precision.

    An operand is Quantized; in the activations' precision data and data_t are one and the same matrix.
    """

    gemms: Gemms | None
    w: Quantized | None

    @classmethod
    def of(cls, module: Fp8Module, weight: Tensor, gemm: int, is_first_microbatch: bool | None, training: bool) -> Self:
        """The product of a module's weight number `gemm` under the present autocast; is_first_microbatch as in te.Linear."""
        gemms = module.gemms(gemm)
        kept = False if is_first_microbatch is None and module._reuse else is_first_microbatch
        return cls(gemms, module.quantized_weight(gemms, weight, gemm, kept, columnwise=training))

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
            return half.multiply(x.data, weight, bias)
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


class Heads(NamedTuple):
    """How a projection's columns are dealt out: so many to q, k and v in turn, until all are."""

    q: int
    k: int
    v: int

    def split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of (M, F), views (M, turns, columns) each."""
        return mixed.view(mixed.shape[0], -1, sum(self)).split(self, 2)


class Plan(NamedTuple):
    """What of a stretch is no tensor to be trained.

    `after` is None behind the last layer, proj to out before the first; without a norm at the end, and then without what
    follows it, a stretch leaves the stream.
    """

    proj: Product | None
    fc: Product | None
    out: Product | None
    after: Product | None
    norms: tuple[Norm | None, Norm | None]  # before the MLP and at the end
    heads: Heads | None  # of `after`
    activation: str  # one of kernels.activation's kinds
    dtype: torch.dtype  # of what the GEMMs make
    training: bool  # whether gradients are recorded
    scale: Tensor | None = None  # that the activation is cast by, a copy; None where that output is kept
    rotation: Rotation | None = None  # of what `after` makes; Enter's alone


def _add_norm(
    product: Product | None,
    x: Tensor,
    branch: Tensor | None,
    weights: tuple[Tensor, Tensor | None],
    norm: Norm | None,
    plan: Plan,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """x + branch, norm of it as an operand of `product`, mean, rstd; in x's dtype, uncast, without a product."""
    stream = backend(x).residual
    assert stream is not None
    assert norm is not None
    cast = None if product is None else product.cast("input")
    if cast is not None:
        made: Any = stream.add_forward_quantized(
            x, branch, *weights, **norm._asdict(), via=plan.dtype, rowwise=True, columnwise=plan.training, **cast
        )
        return made
    dtype = x.dtype if product is None else plan.dtype
    total, y, mean, rstd = stream.add_forward(x, branch, *weights, **norm._asdict(), dtype=dtype)
    packed = Quantized(y, None, None, None) if product is None else product.operand(y, "input", plan.training)
    return total, packed, mean, rstd


def _add_norm_backward(
    product: Product,
    dn: Tensor,
    kept: tuple[Any, ...],
    norm: Norm | None,
    residual: Tensor | None,
    biased: bool,
    total: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Quantized, Tensor, Tensor | None]:
    """dx, it as an operand of `product`, whose output the branch was, dgamma, dbeta."""
    x, branch, gamma, mean, rstd = kept
    assert norm is not None
    options: dict[str, Any] = {"zero_centered_gamma": norm.zero_centered_gamma, "kind": norm.kind, "residual": residual}
    if x.dtype is plan.dtype and branch is None:  # rounded to this, dx would be written twice
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, **options)
        return dx, product.operand(dx, "grad_output", True, total), dgamma, dbeta if biased else None
    stream = backend(x).residual
    assert stream is not None
    cast = product.cast("grad_output")
    options |= {"biased": biased, "column_sum": total, "branch": branch}
    if cast is not None:
        made: Any = stream.backward_quantized(
            dn, x, gamma, mean, rstd, via=plan.dtype, rowwise=True, columnwise=True, **cast, **options
        )
        return made
    dx, copy, dgamma, dbeta = stream.backward_rounded(dn, x, gamma, mean, rstd, dtype=plan.dtype, **options)
    return dx, product.operand(copy, "grad_output", True), dgamma, dbeta


def _up(n: Quantized, weight: Tensor, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Quantized]:
    """What fc makes, and the activation of it as an operand of out."""
    fc, out = plan.fc, plan.out
    assert fc is not None
    assert out is not None
    if fc.gemms is None and half.is_faster(half.ACTIVATED, n.data, weight, plan.activation):
        h, a = half.activated(n.data, weight, bias, plan.activation)
        return h, out.operand(a, "input", plan.training)
    h = fc.forward(n, weight, bias, plan.dtype)
    if out.gemms is not None:
        return h, activate_quantize(out.gemms, h, plan.activation, columnwise=plan.training and plan.scale is None)
    return h, out.operand(activation_backend(h).forward(h, plan.activation), "input", plan.training)


def _up_backward(
    g: Quantized, h: Tensor, total: Tensor | None, plan: Plan, kept: tuple[Any, ...]
) -> tuple[Quantized, tuple[Any, ...]]:
    """The gradient of h as an operand of fc, from that of what out makes; what was kept of the activation, or that again."""
    fc, out = plan.fc, plan.out
    assert fc is not None
    assert out is not None
    if out.gemms is None and half.is_faster(half.GRADIENT, g.data, kept[2], plan.activation):
        dh = half.gradient(g.data, kept[2], h, plan.activation)
        return fc.operand(dh, "grad_output", True, total), kept
    da = out.dgrad(g, kept, plan.dtype)
    if fc.gemms is None:
        dh = activation_backend(h).backward(da, h, plan.activation)
        return fc.operand(dh, "grad_output", True, total), kept
    if plan.scale is None:
        both = {"rowwise": True, "columnwise": True}
        return activation_grad_quantize(fc.gemms, da, h, plan.activation, **both, total=total), kept
    made, a_t = recomputed.recomputed(
        activation_backend(h),
        da,
        h,
        plan.activation,
        **fc.cast("grad_output"),
        value_scale=plan.scale,
        value_dtype=fc.gemms.recipe.dtype("input"),
        column_sum=total,
    )
    return made, (a_t, *kept[1:])


def _no_sums(bias: torch.dtype | None, like: Tensor, features: int) -> Tensor | None:
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
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, w: Tensor, b: Tensor | None, plan: Plan
    ) -> Any:
        assert plan.after is not None
        assert plan.heads is not None
        _, n, mean, rstd = _add_norm(plan.after, x, None, (gamma, beta), plan.norms[1], plan)
        qkv = plan.after.forward(n, w, b, plan.dtype)
        angles: tuple[Tensor, ...] = () if plan.rotation is None else plan.rotation[:2]
        ctx.save_for_backward(x, gamma, mean, rstd, *plan.after.kept(n, w), *angles)
        ctx.plan, ctx.dtypes = plan, _dtypes(w, b, beta)
        if plan.rotation is None:
            return x.view_as(x), *plan.heads.split(qkv)
        return x.view_as(x), *(part.flatten(0, 1).flatten(2) for part in plan.rotation.split(qkv, own=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor, *dqkv: Tensor) -> Any:
        x, gamma, mean, rstd, *kept = ctx.saved_tensors[:8]  # angles that have changed are found here
        norm = ctx.plan.norms[1]
        dn, dw, db = _after_backward(ctx.plan, dqkv, tuple(kept), ctx.dtypes)
        options: dict[str, Any] = {"zero_centered_gamma": norm.zero_centered_gamma, "kind": norm.kind}
        options["residual"] = dstream if ctx.needs_input_grad[0] else None
        dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, **options)
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
    """dn, dw and db of the projection from its output's three gradients."""
    product, heads = plan.after, plan.heads
    assert product is not None
    assert heads is not None
    turns = [part.to(plan.dtype) for part in dqkv]
    m, deals, _ = turns[0].shape
    total = _no_sums(dtypes[1], turns[0], deals * sum(heads))
    cast = product.cast("grad_output")
    if plan.rotation is not None:
        g = product.operand(plan.rotation.back(turns).view(m, -1), "grad_output", True, total)
    else:
        parts = [part.reshape(m, -1) for part in turns]
        if cast is not None and cast.pop("counts") is None and joined.fits(parts, heads.q):
            g = joined.joined(parts, heads.q, **cast, column_sum=total)  # 31.5 us for 35 of a whole one
        else:
            whole = _whole(parts) if deals == 1 else None
            whole = torch.cat(turns, 2).view(m, -1) if whole is None else whole
            g = product.operand(whole, "grad_output", True, total)
    dn, dw = product.backward(g, kept, (plan.dtype, dtypes[0]))
    return dn, dw, None if total is None else total.to(dtypes[1])


class Between(torch.autograd.Function):
    """x, attention's output y (M, C) -> the stream, q, k, v of the next layer; without a layer after it norm of the stream.

    After x, y and the plan: weight, bias of proj; the norm's; fc's; out's; the end's norm's, and what follows it, or None,
    None each. Without a norm at the end the stream alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, plan: Plan, *weights: Any) -> Any:
        proj_w, proj_b, gamma, beta, fc_w, fc_b, out_w, out_b, *end, w, b = weights
        proj, fc, out = plan.proj, plan.fc, plan.out
        if plan.rotation is not None:  # the backward pass would turn back what nobody turned
            raise ValueError(
                "Between has no rotation of the next layer's query and key: leave its plan's rotation None, and rotate what "
                "it returns; a rotation of the first layer's is Enter's"
            )
        assert proj is not None
        assert fc is not None
        assert out is not None
        attended = proj.operand(y, "input", plan.training)
        branch = proj.forward(attended, proj_w, proj_b, plan.dtype)
        middle, n, mean, rstd = _add_norm(fc, x, branch, (gamma, beta), plan.norms[0], plan)
        h, a = _up(n, fc_w, fc_b, plan)
        made = out.forward(a, out_w, out_b, plan.dtype)
        halved = branch.dtype.itemsize < x.dtype.itemsize
        kept = [
            *((x, branch) if halved else (middle, None)),
            *(gamma, mean, rstd, h),
            *(*proj.kept(attended, proj_w), *fc.kept(n, fc_w), *out.kept(a, out_w)),
        ]
        ctx.plan, ctx.dtypes = plan, [_dtypes(*weights[i : i + 2]) for i in range(0, len(weights), 2)]
        if plan.norms[1] is None:
            ctx.save_for_backward(*kept)
            return middle + made
        total, n_end, mean_end, rstd_end = _add_norm(plan.after, middle, made, (end[0], end[1]), plan.norms[1], plan)
        kept += [total, end[0], mean_end, rstd_end]
        ctx.save_for_backward(*kept, *(() if plan.after is None else plan.after.kept(n_end, w)))
        if plan.after is None:
            return n_end.data
        assert plan.heads is not None
        return (total, *plan.heads.split(plan.after.forward(n_end, w, b, plan.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        plan, (proj_types, norm_types, fc_types, out_types, end_types, after_types) = ctx.plan, ctx.dtypes
        saved = ctx.saved_tensors
        norm, h = saved[:5], saved[5]
        proj_kept, fc_kept, out_kept, (*end,), after_kept = (saved[i : i + 4] for i in range(6, 26, 4))
        dw = db = dgamma_end = dbeta_end = None
        width = norm[0].shape[1]
        totals = [
            _no_sums(types[1], h, n) for types, n in ((proj_types, width), (fc_types, h.shape[1]), (out_types, width))
        ]
        if plan.norms[1] is None:
            dx = gradients[0].contiguous()
            g = plan.out.operand(dx.to(plan.dtype), "grad_output", True, totals[2])
        else:
            dn, *above = gradients
            residual = None
            if plan.after is not None:
                residual = dn
                dn, dw, db = _after_backward(plan, tuple(above), after_kept, after_types)
            dx, g, dgamma_end, dbeta_end = _add_norm_backward(
                plan.out,
                dn,
                (end[0], None, *end[1:]),
                plan.norms[1],
                residual,
                end_types[1] is not None,
                totals[2],
                plan,
            )
        g_h, out_kept = _up_backward(g, h, totals[1], plan, out_kept)
        d_out = plan.out.wgrad(g, out_kept, out_types[0])
        g, out_kept = g_h, None
        del g_h
        dn, d_fc = plan.fc.backward(g, fc_kept, (plan.dtype, fc_types[0]))
        dx, g, dgamma, dbeta = _add_norm_backward(
            plan.proj, dn, norm, plan.norms[0], dx, norm_types[1] is not None, totals[0], plan
        )
        dy, d_proj = plan.proj.backward(g, proj_kept, (plan.dtype, proj_types[0]))
        biases = [
            None if sums is None else sums.to(types[1])
            for sums, types in zip(totals, (proj_types, fc_types, out_types), strict=True)
        ]
        return (
            *(dx, dy, None, d_proj, biases[0], dgamma, dbeta, d_fc, biases[1], d_out, biases[2]),
            *(dgamma_end, dbeta_end, dw, db),
        )
