"""y = act(norm(x) W1^T + b1) W2^T + b2: norm and activation also cast to FP8 where the recipe allows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_bench import plugins
from te_bench.kernels.activation import KINDS, Backend
from te_bench.kernels.activation.backends import reference as activation_reference
from te_bench.kernels.activation.backends import triton as activation_triton
from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.norm import Norm
from te_bench.kernels.quantize import Quantized
from te_bench.models import fp8
from te_bench.models.modules import arguments
from te_bench.models.modules.activations import FLOATS, compute_dtype, flatten, is_recorded
from te_bench.models.modules.gemms import NOT_NEEDED, Gemms, restore, save_for_backward
from te_bench.models.modules.layernorm import backend, check_normalization
from te_bench.models.modules.layernorm_linear import NormedModule, norm_quantize
from te_bench.models.modules.linear import linear, linear_backward
from te_bench.models.modules.parameters import Tracker, default_init, factory, fork_rng
from te_bench.models.modules.tensor_parallel import MODES, Ranks, divide, mark


def activation_backend(x: Tensor) -> Backend:
    return activation_triton.BACKEND if x.is_cuda else activation_reference.BACKEND


def activate_quantize(gemms: Gemms, h: Tensor, kind: str, *, columnwise: bool) -> Quantized:
    """Return act(h) in FP8, in one pass if the recipe allows, else in two."""
    kernels = activation_backend(h)
    cast = gemms.recipe.epilogue("input", gemms.input)
    if cast is None:
        return gemms.quantize(kernels.forward(h, kind), "input", rowwise=True, columnwise=columnwise)
    return kernels.forward_quantized(h, kind, **cast._asdict(), rowwise=True, columnwise=columnwise)


def activation_grad_quantize(
    gemms: Gemms, da: Tensor, h: Tensor, kind: str, *, rowwise: bool, columnwise: bool, total: Tensor | None
) -> Quantized:
    """Return the gradient of h in FP8, given that of act(h); its sum over rows is added to `total`."""
    kernels = activation_backend(h)
    cast = gemms.recipe.epilogue("grad_output", gemms.grad_output)
    if cast is None:
        dh = kernels.backward(da, h, kind)
        return gemms.quantize(dh, "grad_output", rowwise=rowwise, columnwise=columnwise, column_sum=total)
    options = {**cast._asdict(), "rowwise": rowwise, "columnwise": columnwise, "column_sum": total}
    return kernels.backward_quantized(da, h, kind, **options)


class _Activation(torch.autograd.Function):
    """Compute act(h), (M, F) -> (M, F / gate), by the fused kernels; saves only h."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(h)
        ctx.kind = kind
        return activation_backend(h).forward(h, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return activation_backend(h).backward(da.contiguous(), h, ctx.kind), None


def activate(h: Tensor, kind: str) -> Tensor:
    """Compute act(h) in h's dtype: fused kernels in eager mode on a GPU, else for Inductor to fuse."""
    flat = flatten(h, h.dtype)
    fused = h.is_cuda and not is_recorded() and h.dtype in FLOATS
    a = _Activation.apply(flat, kind) if fused else activation_reference.BACKEND.forward(flat, kind)
    return a.view(*h.shape[:-1], a.shape[1])


class _LayerNormMLP(torch.autograd.Function):
    """Compute x (M, K), gamma, beta (K,), w1 (F, K), b1, w2 (K, F / gate), b2 -> y (M, K), and norm(x) if requested.

    It saves x, the activation's input, and one byte per element of both GEMMs' inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        settings: tuple[Norm, str, bool],
        gemms: tuple[Gemms, Gemms],
        weights: tuple[Quantized, Quantized],
    ) -> Any:
        norm, kind, keep = settings
        (fc1, fc2), (q1, q2) = gemms, weights
        need_norm, need_dw1, need_dw2 = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        n, kept, mean, rstd = norm_quantize(fc1, x, gamma, beta, norm, columnwise=need_dw1, keep=keep)
        h = fc1.fprop(n, q1, x.dtype, b1)
        a = activate_quantize(fc2, h, kind, columnwise=need_dw2)
        y = fc2.fprop(a, q2, x.dtype, b2)
        w1_t = q1.by_columns() if need_norm else NOT_NEEDED
        save_for_backward(ctx, (x, gamma, mean, rstd, h), (n.by_columns(), a.by_columns(), w1_t, q2.by_columns()))
        ctx.gemms, ctx.norm, ctx.kind = gemms, norm, kind
        ctx.dtypes = [None if t is None else t.dtype for t in (w1, b1, w2, b2)]
        return (y, kept) if keep else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dkept: Tensor | None = None) -> tuple[Tensor | None, ...]:
        (x, gamma, mean, rstd, h), (n_t, a_t, w1_t, w2_t) = restore(ctx)
        (fc1, fc2), norm = ctx.gemms, ctx.norm
        w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
        need_norm = any(ctx.needs_input_grad[:3])
        need_dw1, need_db1, need_dw2, need_db2 = ctx.needs_input_grad[3:7]
        below = need_norm or need_dw1 or need_db1
        da, dw2, db2 = linear_backward(fc2, dy, a_t, w2_t, (below, need_dw2, need_db2), x.dtype, w2_dtype)
        dx = dgamma = dbeta = dw1 = db1 = None
        if da is not None:
            db1 = da.new_zeros(h.shape[1], dtype=torch.float32) if need_db1 else None
            g = activation_grad_quantize(
                fc1, da, h, ctx.kind, rowwise=need_norm, columnwise=need_dw1 or not need_norm, total=db1
            )
            del da  # as large as the activation's input: 0.25 GiB of the peak at the quickstart's size
            if need_dw1:
                dw1 = fc1.wgrad(g, n_t, w1_dtype)
            if need_norm:
                dn = fc1.dgrad(g, w1_t, x.dtype)
                dn = dn if dkept is None else dn + dkept
                dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, norm)
        biases = [None if b is None else b.to(t) for b, t in ((db1, b1_dtype), (db2, b2_dtype))]
        return dx, dgamma, dbeta, dw1, biases[0], dw2, biases[1], None, None, None


class LayerNormMLP(NormedModule):
    """y = act(norm(x) W1^T + b1) W2^T + b2; x (..., hidden_size) -> the same shape, in torch.autocast's dtype or x's.

    Gated activations (geglu, swiglu, ...) have 2 x ffn_hidden_size rows in W1, the activated half first. Arguments,
    defaults and parameter names are Transformer Engine's. set_parallel_mode divides W1 by columns and W2 by rows among
    tp_group, each half of a gated W1 by itself: see tensor_parallel. Raises ValueError for unsupported arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        get_rng_state_tracker: Tracker = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        name: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        sizes = {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size}
        arguments.check("LayerNormMLP", others, **sizes, eps=eps, params_dtype=params_dtype)
        ranks = Ranks("LayerNormMLP", tp_group, tp_size, sequence_parallel, others)
        divisions = [divide(ranks, mode if set_parallel_mode else None) for mode in MODES]
        own = ranks.part("ffn_hidden_size", ffn_hidden_size) if set_parallel_mode else ffn_hidden_size
        plugins.check("activation", activation, list(KINDS))
        norm = Norm(eps, zero_centered_gamma, check_normalization(normalization))
        options = factory(device, params_dtype)
        super().__init__(ranks, divisions, hidden_size, norm, options, return_bias, return_layernorm_output)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.use_bias, self.name = bias, name
        self.init_methods = (init_method or default_init, output_layer_init_method or default_init)
        self.tracker = get_rng_state_tracker
        width = own * (2 if KINDS[activation][1] else 1)
        self.fc1_weight = nn.Parameter(torch.empty(width, hidden_size, **options))
        self.fc1_bias = nn.Parameter(torch.empty(width, **options)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, own, **options))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **options)) if bias else None
        mark(divisions[0], (self.fc1_weight,), (self.fc1_bias,))
        mark(divisions[1], (self.fc2_weight,), (self.fc2_bias,))
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _initialise(self) -> None:
        super()._initialise()
        with fork_rng(self.tracker):
            self.init_methods[0](self.fc1_weight)
            self.init_methods[1](self.fc2_weight)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """Return y, then fc2's bias with return_bias, then norm(x) with return_layernorm_output; a tuple if several."""
        if others:
            arguments.reject("LayerNormMLP.forward", others)
        self.check_input(inp, self.hidden_size, self.fc1_weight)
        x = inp.to(compute_dtype(inp))
        b2 = None if self.return_bias else self.fc2_bias
        run = self._fp8 if fp8.current.enabled else self._high_precision
        y, normed = run(x, b2, is_first_microbatch)
        return self._outputs(y, self.fc2_bias, normed)

    def _high_precision(
        self, x: Tensor, b2: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        self.without_fp8()
        normed = self._normalize(x)
        fc1, fc2 = self.divisions
        hidden = activate(linear(fc1, normed, self.fc1_weight, self.fc1_bias), self.activation)
        if fp8.current.calibrating:
            self.calibrate(0, normed, self.fc1_weight)
            self.calibrate(1, hidden, self.fc2_weight)
        return linear(fc2, hidden, self.fc2_weight, b2), normed

    def _fp8(self, x: Tensor, b2: Tensor | None, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor | None]:
        gemms = (self.gemms(0), self.gemms(1))
        columnwise = torch.is_grad_enabled()
        weights = tuple(
            self.quantized_weight(gemms[i], weight, i, is_first_microbatch, columnwise=columnwise)
            for i, weight in enumerate((self.fc1_weight, self.fc2_weight))
        )
        out = _LayerNormMLP.apply(
            flatten(x, x.dtype),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            b2,
            (self.norm, self.activation, self.return_layernorm_output),
            gemms,
            weights,
        )
        return self._shape(out, x)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, activation={self.activation!r}, bias={self.use_bias}"
