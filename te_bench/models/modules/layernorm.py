"""LayerNorm and RMSNorm, alone and as functions that the fused modules share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.norm import Backend, Norm
from te_bench.kernels.norm.backends import reference as norm_reference
from te_bench.kernels.norm.backends import triton as norm_triton
from te_bench.models.modules import arguments
from te_bench.models.modules.activations import FLOATS, compute_dtype, flatten, is_recorded
from te_bench.models.modules.parameters import factory, materialise
from te_bench.models.modules.tensor_parallel import Ranks

KINDS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def backend(x: Tensor) -> Backend:
    """Return the kernels for x (M, N) on a GPU, or plain PyTorch: elsewhere, and for rows that they do not support."""
    by_kernels = x.is_cuda and x.shape[-1] <= norm_triton.LARGEST_N
    return norm_triton.BACKEND if by_kernels else norm_reference.BACKEND


def check_normalization(normalization: str) -> str:
    """Return the kernels' name of a normalization. Raises ValueError for an unknown one."""
    if normalization not in KINDS:
        raise ValueError(f"normalization={normalization!r} is not possible: {' or '.join(KINDS)}")
    return KINDS[normalization]


class _Norm(torch.autograd.Function):
    """Compute the norm of x (M, N) by the fused kernels; saves statistics instead of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        y, mean, rstd = backend(x).forward(x, weight, bias, norm)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dw, db = backend(x).backward(dy.contiguous(), x, weight, mean, rstd, ctx.norm)
        return dx, dw, db, None


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """Compute the norm over the last dimension in x's dtype: fused kernels in eager mode on a GPU, else for Inductor.

    It computes in float32 at least, also 1 + weight and sums over rows: on a CPU F.layer_norm sums bf16 rows in bf16.
    """
    if x.is_cuda and not is_recorded() and x.dtype in FLOATS:
        y: Tensor = _Norm.apply(flatten(x, x.dtype), weight, bias, norm)
        return y.view(x.shape)
    wide = torch.promote_types(x.dtype, torch.float32)
    gamma = weight.to(wide) + 1 if norm.zero_centered_gamma else weight.to(wide)
    if norm.kind == "rmsnorm":
        return F.rms_norm(x.to(wide), weight.shape, gamma, norm.eps).to(x.dtype)
    beta = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, gamma, beta, norm.eps).to(x.dtype)


def _either(where: str, **given: Any) -> Any:
    """Return the value of an argument with two names. Raises ValueError if both are given."""
    values = [value for value in given.values() if value is not None]
    if len(values) > 1:
        raise ValueError(f"{where}: {' and '.join(given)} are two names of one argument: give one of them")
    return values[0] if values else None


def _size(where: str, normalized_shape: Any) -> Any:
    sizes = tuple(normalized_shape) if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    if len(sizes) != 1:
        raise ValueError(f"{where}: one normalised dimension, got {sizes}")
    return sizes[0]


class _NormModule(nn.Module):
    kind: str
    #: Ranks that norm different features, such as their own heads: parameter gradients are summed over them.
    ranks: Ranks | None = None

    def __init__(
        self,
        normalized_shape: int | tuple[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ):
        super().__init__()
        where = type(self).__name__
        size = _size(where, _either(where, normalized_shape=normalized_shape, hidden_size=hidden_size))
        params_dtype = _either(where, dtype=dtype, params_dtype=params_dtype)
        arguments.check(where, others, normalized_shape=size, eps=eps, params_dtype=params_dtype)
        self.normalized_shape, self.eps, self.zero_centered_gamma = (size,), eps, zero_centered_gamma
        options = factory(device, params_dtype)
        self.weight = nn.Parameter(torch.empty(size, **options))
        self.bias = nn.Parameter(torch.empty(size, **options)) if self.kind == "layernorm" else None
        self.sequence_parallel = sequence_parallel
        self.reset_parameters(defer_init=options["device"].type == "meta")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # Transformer Engine writes an empty one
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise again; parameters on the meta device move to a real one. defer_init: change nothing."""
        if defer_init:
            return
        materialise(self)
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.sequence_parallel is not None:  # Megatron-LM sums marked gradients over its ranks
            for p in self.parameters():
                p.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if x.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"{type(self).__name__}: the input's last dimension must be {self.normalized_shape[0]}, "
                f"got shape {tuple(x.shape)}"
            )
        if not x.is_floating_point() or x.dtype.itemsize == 1:
            raise ValueError(f"{type(self).__name__}: float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.device != self.weight.device:
            raise ValueError(
                f"{type(self).__name__}: the input is on {x.device}, the parameters on {self.weight.device}: move one"
            )
        norm = Norm(self.eps, self.zero_centered_gamma, self.kind)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.ranks is not None:
            weight, bias = self.ranks.add_up(weight), None if bias is None else self.ranks.add_up(bias)
        return normalize(x.to(compute_dtype(x)), weight, bias, norm)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_NormModule):
    """y = (x - mean) / sqrt(var + eps) * gamma + beta over the last dimension; gamma is 1 + weight if
    zero_centered_gamma.
    """

    kind = "layernorm"


class RMSNorm(_NormModule):
    """y = x / sqrt(mean(x^2) + eps) * gamma over the last dimension; gamma is 1 + weight if zero_centered_gamma."""

    kind = "rmsnorm"
