"""y = x W^T + b with the three GEMMs of training in FP8 under te.autocast."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.quantize import Operand, Quantized
from te_bench.models import fp8
from te_bench.models.modules import arguments, symmetric
from te_bench.models.modules.activations import compute_dtype, flatten
from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.models.modules.gathered import Gathered, turned
from te_bench.models.modules.gemms import NOT_NEEDED, Gemms, restore, save_for_backward
from te_bench.models.modules.parameters import Tracker, default_init, factory, fork_rng
from te_bench.models.modules.tensor_parallel import Division, Ranks, divide, mark, outer


class _Linear(torch.autograd.Function):
    """Compute x (M, K), weight (N, K), bias (N,) -> (M, N) of x's dtype; saves one byte per element for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemms: Gemms,
        w: Quantized | None,
        training: bool,
    ) -> Tensor:
        """`training`: whether gradients are recorded; inside a Function's forward this cannot be asked."""
        needed = ctx.needs_input_grad
        need_dx, need_dw = training and needed[0], training and needed[1]
        if w is None:
            q, w = gemms.quantize_pair(x, weight, x_columnwise=need_dw, w_columnwise=need_dx)
        else:
            q = gemms.quantize(x, "input", rowwise=True, columnwise=need_dw)
        ctx.turns = w.data_t is None  # then the weight is gathered again for dgrad, which transposes it
        kept = w.by_rows() if ctx.turns else w.by_columns()
        save_for_backward(ctx, (), (q.by_columns(), kept if need_dx else NOT_NEEDED))
        ctx.gemms, ctx.dtypes = gemms, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return gemms.fprop(q, w, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, (x_t, w_t) = restore(ctx)
        if ctx.turns and ctx.needs_input_grad[0]:
            w_t = turned(w_t)
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        dx, dw, db = linear_backward(ctx.gemms, dy, x_t, w_t, ctx.needs_input_grad[:3], x_dtype, w_dtype)
        return dx, dw, None if db is None else db.to(b_dtype), None, None, None


# torch.autograd.Function.apply without functorch transforms ends here. Calling it directly skips a check of each
# argument, 3 of a call's 75 us (H200, torch 2.11).
_apply_eagerly: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


def _apply() -> Callable[..., Tensor]:
    """Return _Linear.apply, or its faster equivalent."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _Linear.apply
    return _apply_eagerly


def linear_backward(
    gemms: Gemms,
    dy: Tensor,
    x_t: Operand,
    w_t: Operand,
    needed: Sequence[bool],
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dw and the float32 sum of dy's rows, each if needed."""
    need_dx, need_dw, need_db = needed
    dy = dy.contiguous()
    db = dy.new_zeros(dy.shape[1], dtype=torch.float32) if need_db else None
    if not (need_dx or need_dw):
        return None, None, None if db is None else dy.sum(0, dtype=torch.float32)
    g = gemms.quantize(dy, "grad_output", rowwise=need_dx, columnwise=need_dw, column_sum=db)
    dx = None
    if need_dx:
        dx, g = gemms.dgrad_and_gather(g, w_t, x_dtype, need_dw)
    dw = gemms.wgrad(g, x_t, w_dtype) if need_dw else None
    return dx, dw, db


def linear(division: Division | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y = x W^T + b in x's dtype, in high precision; the weight may be divided among ranks."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if division is None:
        return F.linear(x, weight, bias)
    if (group := division.ranks.symmetric) is not None:
        fused = symmetric.GatherLinear if division.mode == "column" else symmetric.LinearScatter
        y = fused.apply(x.flatten(0, -2), weight, group).view(*outer(x, division), len(weight))
        return y if bias is None else y + bias
    if division.mode == "column":
        return F.linear(division.enter(x), weight, bias)
    y = division.leave(F.linear(x, weight))
    return y if bias is None else y + bias


class SplitParameters:
    """A weight and bias stored as several parameters, concatenated along the output features when used.

    split: None, names ("query", "key", "value"), or {name: output features}. Parameters are then called query_weight,
    query_bias and so on, as in Transformer Engine. A column-parallel Linear has a rank's share of each.
    """

    def __init__(
        self, split: Iterable[str] | Mapping[str, int] | None, features: int, division: Division | None = None
    ):
        if split is None:
            sizes = {"": features}
        elif isinstance(split, Mapping):
            sizes = {f"{name.removesuffix('_')}_": size for name, size in split.items()}
        else:
            names = [split] if isinstance(split, str) else list(split)
            if not names or features % len(names):
                raise ValueError(f"parameters_split: {features} output features do not divide into {len(names)} parts")
            sizes = {f"{name.removesuffix('_')}_": features // len(names) for name in names}
        if sum(sizes.values()) != features:
            raise ValueError(f"parameters_split: the parts {sizes} do not add up to {features} output features")
        for size in sizes.values():
            arguments.check("parameters_split", out_features=size)
        if division is not None and division.mode == "column":
            sizes = {name: division.ranks.part(f"{name}out_features", size) for name, size in sizes.items()}
        self.sizes, self.division = sizes, division
        self.weights = [f"{name}weight" for name in sizes]
        self.biases = [f"{name}bias" for name in sizes]

    def register(self, module: nn.Module, in_features: int, bias: bool, options: dict[str, Any]) -> None:
        for weight, out, size in zip(self.weights, self.biases, self.sizes.values(), strict=True):
            module.register_parameter(weight, nn.Parameter(torch.empty(size, in_features, **options)))
            module.register_parameter(out, nn.Parameter(torch.empty(size, **options)) if bias else None)
        own = module._parameters
        mark(self.division, [own[name] for name in self.weights], [own[name] for name in self.biases])

    def reset(self, module: nn.Module, init_method: Callable[[Tensor], Any]) -> None:
        """Initialise every weight by init_method, every bias to 0."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            init_method(getattr(module, weight))
            if getattr(module, bias) is not None:
                nn.init.zeros_(getattr(module, bias))

    def weight_and_bias(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        own = module._parameters  # faster than getattr
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]  # type: ignore[return-value]
        weights = [getattr(module, name) for name in self.weights]
        biases = [getattr(module, name) for name in self.biases]
        if len(weights) == 1:
            return weights[0], biases[0]
        return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class Linear(Fp8Module):
    """y = x W^T + b; x (..., in_features) -> (..., out_features) in torch.autocast's dtype, or x's.

    Arguments, defaults and parameter names are Transformer Engine's; init_method defaults to N(0, 0.023), biases to 0.
    return_bias gives (y without the bias, bias). parallel_mode "column" or "row" divides it among tp_group: see
    tensor_parallel; in_features and out_features are then a rank's. Raises ValueError for unsupported arguments.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        get_rng_state_tracker: Tracker = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.check("Linear", others, **sizes, params_dtype=params_dtype)
        ranks = Ranks("Linear", tp_group, tp_size, sequence_parallel, others)
        division = divide(ranks, parallel_mode)
        super().__init__(ranks, (division,))
        self.parallel_mode = parallel_mode
        if division is not None and parallel_mode == "row":
            in_features = ranks.part("in_features", in_features)
        self.use_bias, self.return_bias, self.name = bias, return_bias, name
        self.init_method = init_method or default_init
        self.tracker = (get_rng_state_tracker, rng_tracker_name)
        self.split = SplitParameters(parameters_split, out_features, division)
        self.in_features, self.out_features = in_features, sum(self.split.sizes.values())
        options = factory(device, params_dtype)
        self.split.register(self, in_features, bias, options)
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def resize(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        """Replace the one whole weight (out, in_features) and its bias (out,)."""
        self.weight, self.bias = weight, bias
        self.out_features = len(weight)
        self.split = SplitParameters(None, self.out_features, self.divisions[0])
        self.forget_weights()

    def _initialise(self) -> None:
        with fork_rng(*self.tracker):
            self.split.reset(self, self.init_method)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """Return y, or (y, bias) with return_bias. is_first_microbatch: True keeps the FP8 weight, False reuses it."""
        if others:
            arguments.reject("Linear.forward", others)
        x = inp
        weight, bias = self.split.weight_and_bias(self)
        self.check_input(x, self.in_features, weight)
        dtype = compute_dtype(x)
        added = None if self.return_bias or bias is None else bias
        if (division := self.divisions[0]) is not None:
            x = division.take(x, dtype)
        region = fp8.current
        if not region.enabled:
            self.without_fp8()
            x = x.to(dtype)
            if region.calibrating:
                self.calibrate(0, x, weight)
            y = linear(division, x, weight, added)
        else:
            gemms, w = self.gemms(), None
            is_first_microbatch = self.which_microbatch(gemms, 0, is_first_microbatch)
            if isinstance(weight, Gathered):
                w = weight.quantized()
            elif is_first_microbatch is not None:
                w = self.quantized_weight(gemms, weight, 0, is_first_microbatch, columnwise=True)
            y = _apply()(flatten(x, dtype), weight, added, gemms, w, torch.is_grad_enabled())
            y = y if x.dim() == 2 else y.view(*outer(x, gemms.divided), self.out_features)
        return (y, None if bias is None else bias.to(dtype)) if self.return_bias else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
