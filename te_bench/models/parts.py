"""The parts of a decoder's blocks, by which a model describes itself to models.fused, checks and costs.

A part is made anew for each pass from the modules' current tensors, because an optimizer replaces them.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from te_bench.kernels.norm import Norm
from te_bench.models.modules.layernorm import LayerNorm, RMSNorm


class NormPart(NamedTuple):
    """A LayerNorm or an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    norm: Norm

    @classmethod
    def of(cls, module: Any) -> Self:
        """Make the part of torch's or te's LayerNorm or RMSNorm. Raises ValueError for others, or without gain, eps."""
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm | LayerNorm | RMSNorm):
            raise ValueError(f"a {type(module).__name__} says not which norm it is: make the NormPart of its tensors")
        if module.weight is None:
            raise ValueError(f"{module}: fused blocks take a norm with a gain; give it one")
        if module.eps is None:  # torch's default for nn.RMSNorm
            raise ValueError(f"{module}: eps=None takes the input's dtype's: set its eps to a number")
        kind = "rmsnorm" if isinstance(module, nn.RMSNorm | RMSNorm) else "layernorm"
        centred = getattr(module, "zero_centered_gamma", False)  # torch's have none
        return cls(module.weight, getattr(module, "bias", None), Norm(module.eps, centred, kind))


class LinearPart(NamedTuple):
    """x W^T + b, and the module that holds the GEMM's FP8 state, as its weight number `gemm`.

    beside: Linears stacked below the module's, sharing its GEMM and scales. others: their weights, stored here because
    a checkpoint's recomputation finds other tensors in the modules.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    gemm: int = 0
    beside: tuple[Any, ...] = ()
    others: tuple[Tensor, ...] = ()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All weights that multiply as one."""
        return self.weight, *self.others

    @classmethod
    def of(cls, module: Any, *beside: Any) -> Self:
        """Make the part of nn.Linears or te.Linears."""
        return cls(module, module.weight, module.bias, 0, beside, tuple(other.weight for other in beside))


class AttentionPart(NamedTuple):
    """x + proj(attention(qkv(norm(x)))): `heads` queries and `groups` keys and values of `head_dim` features.

    The columns of qkv go to q, k and v in `turns` turns: with one turn all of q, then of k, then of v. q_norm and
    k_norm are over head_dim, before the rotation. `module.attention` is the attention itself.
    """

    module: Any
    norm: NormPart
    qkv: LinearPart
    proj: LinearPart
    heads: int
    groups: int
    head_dim: int
    turns: int = 1
    q_norm: NormPart | None = None
    k_norm: NormPart | None = None


class MLPPart(NamedTuple):
    """x + down(activation(up(norm(x)))); a gated activation applies to the first half of up's columns."""

    norm: NormPart
    up: LinearPart
    down: LinearPart
    activation: str  # one of kernels.activation.KINDS


Part = AttentionPart | MLPPart
