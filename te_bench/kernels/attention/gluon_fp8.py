"""Our own FP8 attention for Hopper: forward in Gluon, casts and the backward pass `triton_fp8`'s.

A warp fetches by TMA, two or three warpgroups multiply and weigh: `gluon`'s order in E4M3. Heads of 64 and 128.
"""

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem, gluon, manual_fp8, triton_fp8

if gluon.MISSING is None:
    from te_bench.kernels.attention import _gluon_fp8_launch


def unsupported(p: Problem) -> str | None:
    return manual_fp8.unsupported(p) or gluon.unsupported(p)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, keep: bool) -> triton_fp8.Made:
    return triton_fp8.cast_and_attend(_gluon_fp8_launch.forward, q, k, v, causal, scale, keep)


_forward_op = torch.library.custom_op("te_bench::gluon_fp8_attention_forward", _forward, mutates_args=())
_forward_op.register_fake(triton_fp8.fake)
triton_fp8.FORWARDS["gluon"] = _forward, _forward_op


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float) -> tuple[Tensor, Tensor]:
    """`triton_fp8.attention` for heads of 64 and 128, those of the values among them, on a Hopper GPU."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[3] not in gluon.WIDTHS or x.shape[3] != q.shape[3] or not x.is_cuda:
            raise ValueError(f"{name} is {tuple(x.shape)} on {x.device}: heads of 64 or 128 on a GPU; take triton_fp8")
    return triton_fp8.attention(q, k, v, causal=causal, scale=scale, kernel="gluon")


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """attention's out."""
    if dropout or mask is not None:
        raise ValueError("dropout and masks: FP8 attention has none")
    return attention(q, k, v, causal=causal, scale=scale)[0]


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"^gluon_fp8_attention_forward_kernel"},
    fp8=True,
)
