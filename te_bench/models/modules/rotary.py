"""Rotary position embeddings: pairs of features turn by an angle that grows with the position.

Source: Su et al., "RoFormer", arXiv:2104.09864; interpolation: Chen et al., arXiv:2306.15595; interface: Transformer Engine.
"""

import torch
from torch import Tensor, nn

from te_bench.models.modules import _arguments
from te_bench.models.modules._module import factory


class RotaryPositionEmbedding(nn.Module):
    """Angles position * rotary_base^(-2 i / d) of feature pair i: forward(S) -> (S, 1, 1, d) float32, each angle twice.

    d is int(dim * rotary_percent), and even. Not interleaved: i and i + d / 2 are a pair (GPT-NeoX, Llama); interleaved:
    2 i and 2 i + 1 (GPT-J). With both interpolation arguments positions are divided by seq_len_interpolation_factor, or
    squeezed into pretrained_max_position_embeddings where they would leave it. Raises ValueError for an odd d, and for a
    dim or a base that is not positive.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ):
        super().__init__()
        where = "RotaryPositionEmbedding"
        _arguments.check(where, dim=dim, rotary_base=rotary_base, rotary_percent=rotary_percent)
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if dim < 2 or dim % 2:
            raise ValueError(f"{where}: dim * rotary_percent must be even and positive, got {dim}")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=factory(None, None)["device"]) / dim
        self.register_buffer("inv_freq", rotary_base**-exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions offset ... offset + max_seq_len - 1."""
        # float32 whatever the module was cast to: in bf16 neighbouring positions beyond 256 would be one.
        inverse = self.inv_freq.float()
        positions = torch.arange(max_seq_len, device=inverse.device, dtype=torch.float32) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        angles = positions[:, None] * inverse  # no matrix product: torch.autocast would round it
        twice = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((angles, angles), dim=1)
        return twice[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """t cos(freqs) + rotated(t) sin(freqs), where a pair (x, y) rotated is (-y, x); t (s, b, h, d) or (b, s, h, d).

    freqs (S, 1, 1, d2), S >= s, even d2 <= d: the features beyond d2 pass. Computed in float32 at least, returned in t's
    dtype. fused makes no difference. Raises ValueError for thd, context parallelism and start positions.
    """
    absent = {
        "start_positions": start_positions,
        "cu_seqlens": cu_seqlens,
        "cp_size": None if cp_size == 1 else cp_size,
    }
    for name, value in absent.items():
        if value is not None:
            raise ValueError(f"apply_rotary_pos_emb: te_bench has no {name}")
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format={tensor_format!r} is not possible: sbhd or bshd (te_bench has no thd)")
    length, turned = t.shape[0 if tensor_format == "sbhd" else 1], freqs.shape[-1]
    if t.dim() != 4 or freqs.shape[0] < length or turned > t.shape[-1]:
        raise ValueError(f"freqs {tuple(freqs.shape)} are too short or too wide for a {tensor_format} {tuple(t.shape)}")
    angles = freqs[:length] if tensor_format == "sbhd" else freqs[:length].transpose(0, 1)
    x, rest = t[..., :turned], t[..., turned:]
    x = x.to(torch.promote_types(t.dtype, torch.float32))
    y = (x * angles.cos() + _rotated(x, interleaved) * angles.sin()).to(t.dtype)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def _rotated(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
