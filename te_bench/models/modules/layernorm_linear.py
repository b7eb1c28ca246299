"""y = norm(x) W^T + b: the norm also casts to FP8 if the recipe knows the scale beforehand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.norm import Norm
from te_bench.kernels.quantize import Quantized
from te_bench.models import fp8
from te_bench.models.modules import arguments
from te_bench.models.modules.activations import compute_dtype, flatten
from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.models.modules.gemms import NOT_NEEDED, Gemms, restore, save_for_backward
from te_bench.models.modules.layernorm import backend, check_normalization, normalize
from te_bench.models.modules.linear import SplitParameters, linear, linear_backward
from te_bench.models.modules.parameters import Tracker, default_init, factory, fork_rng
from te_bench.models.modules.tensor_parallel import Division, Ranks, divide, mark_partial, outer


def norm_quantize(
    gemms: Gemms, x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm, *, columnwise: bool, keep: bool
) -> tuple[Quantized, Tensor | None, Tensor | None, Tensor]:
    """Return norm(x) in FP8, norm(x) if `keep`, mean and rstd; in one pass if the recipe allows, else in two."""
    kernels = backend(x)
    cast = None if keep else gemms.recipe.epilogue("input", gemms.input)
    if cast is None:
        y, mean, rstd = kernels.forward(x, gamma, beta, norm)
        q = gemms.quantize(y, "input", rowwise=True, columnwise=columnwise)
        return q, y if keep else None, mean, rstd
    gathers = gemms.gathers("input")
    options = {**cast._asdict(), "rowwise": True, "columnwise": columnwise and not gathers}
    q, mean, rstd = kernels.forward_quantized(x, gamma, beta, norm, **options)
    return gemms.gather(q, "input", columnwise) if gathers else q, None, mean, rstd


class _LayerNormLinear(torch.autograd.Function):
    """Compute x (M, K), gamma, beta (K,), weight (N, K), bias (N,) -> y (M, N), and norm(x) (M, K) if requested."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        gemms: Gemms,
        w: Quantized,
        keep: bool,
    ) -> Any:
        need_norm, need_dw = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        q, kept, mean, rstd = norm_quantize(gemms, x, gamma, beta, norm, columnwise=need_dw, keep=keep)
        w_t = w.by_columns() if need_norm else NOT_NEEDED
        save_for_backward(ctx, (x, gamma, mean, rstd), (q.by_columns(), w_t))
        ctx.gemms, ctx.norm = gemms, norm
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        y = gemms.fprop(q, w, x.dtype, bias)
        return (y, kept) if keep else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dkept: Tensor | None = None) -> tuple[Tensor | None, ...]:
        (x, gamma, mean, rstd), (x_t, w_t) = restore(ctx)
        norm, (w_dtype, b_dtype) = ctx.norm, ctx.dtypes
        needed = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        dn, dw, db = linear_backward(ctx.gemms, dy, x_t, w_t, needed, x.dtype, w_dtype)
        dx = dgamma = dbeta = None
        if dn is not None:
            dn = dn if dkept is None else dn + dkept
            dx, dgamma, dbeta = backend(x).backward(dn, x, gamma, mean, rstd, norm)
        return dx, dgamma, dbeta, dw, None if db is None else db.to(b_dtype), None, None, None, None


class NormedModule(Fp8Module):
    """A module whose GEMMs read norm(x): the norm's parameters, and forward's optional outputs."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        ranks: Ranks,
        divisions: Sequence[Division | None],
        features: int,
        norm: Norm,
        options: dict[str, Any],
        return_bias: bool,
        return_normed: bool,
    ) -> None:
        super().__init__(ranks, divisions)
        self.norm, self.return_bias, self.return_layernorm_output = norm, return_bias, return_normed
        self.layer_norm_weight = nn.Parameter(torch.empty(features, **options))
        bias = nn.Parameter(torch.empty(features, **options)) if norm.kind == "layernorm" else None
        self.register_parameter("layer_norm_bias", bias)
        mark_partial(ranks, (self.layer_norm_weight, bias))

    def _initialise(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.norm.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _normalize(self, x: Tensor) -> Tensor:
        return normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _shape(self, out: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Reshape an autograd.Function's results on x as a matrix: y, and norm(x) if it was kept."""
        y, normed = out if self.return_layernorm_output else (out, None)
        division = self.divisions[0] if len(self.divisions) == 1 else None  # two divisions cancel out
        return y.view(*outer(x, division), y.shape[-1]), None if normed is None else normed.view(x.shape)

    def _outputs(self, y: Tensor, bias: Tensor | None, normed: Tensor | None) -> Any:
        """Return y, then the bias with return_bias, then norm(x) with return_layernorm_output; a tuple if several."""
        extras = [None if bias is None else bias.to(y.dtype)] if self.return_bias else []
        extras += [normed] if self.return_layernorm_output else []
        return (y, *extras) if extras else y


class LayerNormLinear(NormedModule):
    """y = norm(x) W^T + b; x (..., in_features) -> (..., out_features) in torch.autocast's dtype, or x's.

    Arguments, defaults and parameter names are Transformer Engine's. return_layernorm_output gives (y, norm(x));
    return_bias (y without the bias, bias). parallel_mode "column" divides it among tp_group: see tensor_parallel.
    Raises ValueError for unsupported arguments.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        get_rng_state_tracker: Tracker = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        name: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.check("LayerNormLinear", others, **sizes, eps=eps, params_dtype=params_dtype)
        ranks = Ranks("LayerNormLinear", tp_group, tp_size, sequence_parallel, others)
        division = divide(ranks, parallel_mode)
        if division is not None and parallel_mode == "row":
            raise ValueError(
                "LayerNormLinear: parallel_mode='row' is not possible: a norm needs whole rows; use 'column'"
            )
        norm = Norm(eps, zero_centered_gamma, check_normalization(normalization))
        options = factory(device, params_dtype)
        super().__init__(ranks, (division,), in_features, norm, options, return_bias, return_layernorm_output)
        self.parallel_mode = parallel_mode
        self.use_bias, self.name = bias, name
        self.init_method, self.tracker = init_method or default_init, get_rng_state_tracker
        self.split = SplitParameters(parameters_split, out_features, division)
        self.in_features, self.out_features = in_features, sum(self.split.sizes.values())
        self.split.register(self, in_features, bias, options)
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _initialise(self) -> None:
        super()._initialise()
        with fork_rng(self.tracker):
            self.split.reset(self, self.init_method)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """Return y, then the bias with return_bias, then norm(x) with return_layernorm_output; a tuple if several."""
        if others:
            arguments.reject("LayerNormLinear.forward", others)
        weight, bias = self.split.weight_and_bias(self)
        self.check_input(inp, self.in_features, weight)
        dtype = compute_dtype(inp)
        x = inp.to(dtype)
        added = None if self.return_bias or bias is None else bias
        normed: Tensor | None
        if not fp8.current.enabled:
            self.without_fp8()
            normed = self._normalize(x)
            if fp8.current.calibrating:
                self.calibrate(0, normed, weight)
            y = linear(self.divisions[0], normed, weight, added)
        else:
            y, normed = self._fp8(x, weight, added, is_first_microbatch)
        return self._outputs(y, bias, normed)

    def _fp8(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        gemms = self.gemms()
        w = self.quantized_weight(gemms, weight, 0, is_first_microbatch, columnwise=torch.is_grad_enabled())
        norm = self.layer_norm_weight, self.layer_norm_bias
        settings = self.norm, gemms, w, self.return_layernorm_output
        return self._shape(_LayerNormLinear.apply(flatten(x, x.dtype), *norm, weight, bias, *settings), x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
