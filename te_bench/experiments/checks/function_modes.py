"""What a user's pass is watched by, and what its references compute in another way, function by function."""

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_bench.experiments.checks import attention_rows


class Kinks(TorchFunctionMode):
    """Notes the functions called whose derivative jumps, each with the fewest numbers that a call of it was given."""

    NAMES = frozenset(
        ("relu", "relu_", "relu6", "leaky_relu", "threshold", "hardtanh", "hardswish", "max_pool2d", "topk")
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in self.NAMES:
            given = args[0] if args else next(iter((kwargs or {}).values()))
            self.found[name] = min(given.numel(), self.found.get(name, given.numel()))
        return func(*args, **(kwargs or {}))


class AsFused(TorchFunctionMode):
    """scaled_dot_product_attention rounded as fused kernels do; with a bias that is trained, which they lack, as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        trained = attn_mask is not None and attn_mask.requires_grad
        device = query.device.type
        if torch.is_autocast_enabled(device):  # rotary embedding in float32 gives that, and autocast takes it back
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        if trained or dropout_p or query.dim() != 4 or query.dtype not in (torch.bfloat16, torch.float16):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        bias = attn_mask
        if bias is not None and bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill(~bias, -math.inf)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return attention_rows.as_fused(query, key, value, causal=is_causal, scale=scale, bias=bias)


class Doubled(TorchFunctionMode):
    """What a module widens to float32, or makes without a dtype, is float64: norms and losses do the former."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[torch.dtype] = []  # a pass that is computed again enters the mode inside of itself

    def __enter__(self) -> Self:
        self.before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self.before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})
