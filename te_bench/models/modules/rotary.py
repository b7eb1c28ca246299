"""Rotary position embeddings: pairs of features rotate by an angle that grows with the position.

Source: Su et al., "RoFormer", arXiv:2104.09864; interpolation: Chen et al., arXiv:2306.15595; interface: Transformer Engine.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.launch import rows_contiguous
from te_bench.kernels.rotary import Backend, Rotated
from te_bench.kernels.rotary.backends import reference as rotary_reference
from te_bench.kernels.rotary.backends import triton as rotary_triton
from te_bench.models.modules import arguments, attention_mask
from te_bench.models.modules.activations import FLOATS, is_recorded
from te_bench.models.modules.parameters import factory

Angles = Tensor | tuple[Tensor, Tensor]  # angles of queries and keys, or one each


class RotaryPositionEmbedding(nn.Module):
    """The angles position * rotary_base^(-2 i / d) of pair i: forward(S) -> (S, 1, 1, d) float32, each angle twice.

    d is int(dim * rotary_percent), and even. Not interleaved: i and i + d / 2 are a pair (GPT-NeoX, Llama);
    interleaved: 2 i and 2 i + 1 (GPT-J). With both interpolation arguments positions are divided by
    seq_len_interpolation_factor, or compressed into pretrained_max_position_embeddings if they exceed it. Raises
    ValueError for an odd d, and for a dim or base that is not positive.
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
        arguments.check(where, dim=dim, rotary_base=rotary_base, rotary_percent=rotary_percent)
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if dim < 2 or dim % 2:
            raise ValueError(f"{where}: dim * rotary_percent must be even and positive, got {dim}")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        self.register_buffer("inv_freq", rotary_base ** -_exponents(dim, factory(None, None)["device"]))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move inv_freq, but keep it float32: in bf16, angles would be wrong by radians. On leaving meta it is made."""
        before = self.inv_freq
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        made = self.rotary_base ** -_exponents(2 * len(before), device) if before.is_meta else before.to(device)
        self.inv_freq = made
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of positions offset ... offset + max_seq_len - 1."""
        # Always float32: in bf16, neighbouring positions beyond 256 would be equal.
        inverse = self.inv_freq.float()
        positions = torch.arange(max_seq_len, device=inverse.device, dtype=torch.float32) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        angles = positions[:, None] * inverse  # not a matrix product, which torch.autocast would round
        twice = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((angles, angles), dim=1)
        return twice[:, None, None, :]


def _exponents(dim: int, device: torch.device) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


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
    """Compute t cos(freqs) + rotated(t) sin(freqs); a pair (x, y) rotates to (-y, x); t (s, b, h, d) or (b, s, h, d).

    freqs (S, 1, 1, d2), S >= s, even d2 <= d: features beyond d2 are unchanged. "thd": t (rows, h, d); rows
    cu_seqlens[i] to cu_seqlens[i + 1], int32 or int64, are sequence i, and its first row uses freqs[0]; rows after the
    last sequence use arbitrary ones. It computes in float32 at least and returns t's dtype. On a GPU it is one kernel,
    whatever `fused` says, except for float64, under torch.compile, and with freqs that are learned or of another shape
    or dtype. Raises ValueError for context parallelism, start positions and a sequence longer than S. On a GPU and in
    compiled code cu_seqlens are not read: rows beyond S become NaN.
    """
    absent = {"start_positions": start_positions, "cp_size": None if cp_size == 1 else cp_size}
    for name, value in absent.items():
        if value is not None:
            raise ValueError(f"apply_rotary_pos_emb: te_bench has no {name}")
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"tensor_format={tensor_format!r} is not possible: sbhd, bshd or thd")
    if tensor_format == "thd":
        angles = _packed_angles(t, freqs, cu_seqlens)
        return apply_rotary_pos_emb(t[:, None], angles, interleaved=interleaved).squeeze(1)
    if cu_seqlens is not None:
        raise ValueError(f"apply_rotary_pos_emb: cu_seqlens is for tensor_format='thd', not {tensor_format!r}")
    batch_first = tensor_format == "bshd"
    check_angles(t.shape, freqs, batch_first)
    if can_rotate_fused(t, freqs):
        out: Tensor = _Rotate.apply(t, angles_of(t.shape, freqs, batch_first), batch_first, interleaved)
        return out
    angles = freqs[: t.shape[1]].transpose(0, 1) if batch_first else freqs[: t.shape[0]]
    return rotary_reference.turned(t, angles, interleaved, transposed=False).contiguous()


def check_angles(shape: Sequence[int], freqs: Tensor, batch_first: bool) -> None:
    """Raise ValueError if freqs (S, 1, 1, d2) do not cover the shape (s, b, h, d) or (b, s, h, d), or d2 is odd."""
    _check_form(freqs)
    form = "bshd" if batch_first else "sbhd"
    if len(shape) != 4 or freqs.shape[0] < shape[int(batch_first)] or freqs.shape[-1] > shape[-1]:
        raise ValueError(f"freqs {tuple(freqs.shape)} are too short or too wide for a {form} {tuple(shape)}")
    batch, heads = shape[int(not batch_first)], shape[2]
    if freqs.shape[1] not in (1, batch) or freqs.shape[2] not in (1, heads):
        raise ValueError(
            f"freqs {tuple(freqs.shape)} are of another batch or other heads than the {form} {tuple(shape)}"
        )


def _check_form(freqs: object) -> None:
    """Raise ValueError unless freqs are floating-point angles (S, ., ., d2), d2 even."""
    if not isinstance(freqs, Tensor) or not freqs.is_floating_point():
        got = freqs.dtype if isinstance(freqs, Tensor) else type(freqs).__name__
        raise ValueError(f"freqs must be a floating-point tensor of angles (S, 1, 1, d2), got {got}")
    if freqs.dim() != 4 or freqs.shape[3] % 2:
        raise ValueError(f"freqs {tuple(freqs.shape)} must be (S, 1, 1, d2), d2 even")


def angles_of(shape: Sequence[int], freqs: Tensor, batch_first: bool) -> Tensor:
    """Return (s, d2) of freqs that are `constant`."""
    return freqs[: shape[int(batch_first)], 0, 0]


def _packed_angles(t: Tensor, freqs: Tensor, cu_seqlens: Any) -> Tensor:
    """Return packed_angles for t (rows, h, d), checking what the host knows."""
    if t.dim() != 3:
        raise ValueError(f"apply_rotary_pos_emb: t must be thd, (rows, heads, features), got {tuple(t.shape)}")
    attention_mask.check_form("cu_seqlens", cu_seqlens, None, t.device)
    _check_form(freqs)
    if freqs.shape[3] > t.shape[2] or freqs.shape[2] not in (1, t.shape[1]):
        raise ValueError(f"freqs {tuple(freqs.shape)} are too wide, or of other heads, for a thd {tuple(t.shape)}")
    longest = 1
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():  # otherwise the host would wait for it
        longest = attention_mask.longest_of("cu_seqlens", cu_seqlens, len(t), None, t.device)
    return packed_angles(freqs, cu_seqlens, len(t), longest)


def packed_angles(freqs: Tensor, cu_seqlens: Tensor, rows: int, longest: int) -> Tensor:
    """Return (rows, 1, 1, d2): for row i of sequence b freqs[i - cu_seqlens[b]]; freqs (S, 1, 1, d2).

    It is differentiable, and only the device reads cu_seqlens, in about 11 small launches. Rows beyond S get NaN; rows
    after the last sequence do not, because 0 x NaN would reach the gradients. Raises ValueError for S < longest, and if
    freqs and cu_seqlens are on two devices.
    """
    _check_form(freqs)
    if freqs.shape[1] != 1 or len(freqs) < longest:
        raise ValueError(
            f"freqs {tuple(freqs.shape)} must be (S, 1, 1, d2), S at least the longest sequence's rows, {longest}"
        )
    if freqs.device != cu_seqlens.device:
        raise ValueError(f"freqs are on {freqs.device}, cu_seqlens on {cu_seqlens.device}: move them")
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    place = row - cu_seqlens[sequence]
    there = place.clamp(0, len(freqs) - 1)
    beyond = (place != there) & (sequence < len(cu_seqlens) - 1)
    return freqs[there].masked_fill_(beyond[:, None, None, None], math.nan)


def backend(x: Tensor) -> Backend:
    """Return the GPU's fused kernel, or plain operators, which torch.compile fuses."""
    return rotary_triton.BACKEND if x.is_cuda and not is_recorded() else rotary_reference.BACKEND


def can_rotate_fused(x: Tensor, *freqs: Tensor) -> bool:
    """Return whether the fused kernel can rotate x: in eager mode on a GPU."""
    return x.is_cuda and not is_recorded() and x.dtype in FLOATS and are_constant(*freqs)


def are_constant(*freqs: Tensor) -> bool:
    """Return whether all are as RotaryPositionEmbedding makes them: (S, 1, 1, d2) in float32, not learned."""
    return all(f.dtype is torch.float32 and f.shape[1:3] == (1, 1) and not f.requires_grad for f in freqs)


class _Rotate(torch.autograd.Function):
    """apply_rotary_pos_emb into a new tensor, by the kernel; angles (s, d2)."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, angles: Tensor, batch_first: bool, interleaved: bool) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.settings = batch_first, interleaved
        return _rotate(t, angles, batch_first, interleaved, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (angles,), (batch_first, interleaved) = ctx.saved_tensors, ctx.settings
        return _rotate(dy, angles, batch_first, interleaved, transposed=True), None, None, None


def _rotate(t: Tensor, angles: Tensor, batch_first: bool, interleaved: bool, transposed: bool) -> Tensor:
    t = rows_contiguous(t)
    out = t.new_empty(t.shape)
    x, y = ((z.transpose(0, 1) if batch_first else z)[:, :, None] for z in (t, out))
    backend(t).rotate([Rotated(x, y, angles)], interleaved=interleaved, transposed=transposed)
    return out


class Rotation(NamedTuple):
    """The rotation of queries and keys in a projection's output, (s, b, F) or (b, s, F); `outer`: its first two sizes.

    q and k: their angles, (s, d2), or tables of kernels.rotary. columns: how many of F go to q, k and v per turn; d:
    features of a head.
    """

    q: Tensor
    k: Tensor
    turns: int
    columns: tuple[int, int, int]
    d: int
    outer: tuple[int, int]
    batch_first: bool
    interleaved: bool
    tables: bool = False

    def by_head(self, mixed: Tensor) -> list[Tensor]:
        """Return q, k and v of mixed, views (*outer, turns, heads per turn, d)."""
        turns = mixed.view(*self.outer, self.turns, sum(self.columns))
        return [part.unflatten(-1, (part.shape[-1] // self.d, self.d)) for part in turns.split(self.columns, -1)]

    def rotate(self, sources: Sequence[Tensor], targets: Sequence[Tensor], transposed: bool = False) -> None:
        """Rotate q and k, and copy v if given; each (*outer, turns, heads per turn, d)."""
        if self.batch_first:
            sources, targets = ([t.transpose(0, 1) for t in tensors] for tensors in (sources, targets))
        angles = (self.q, self.k, None)[: len(sources)]
        parts = [Rotated(x, y, a) for x, y, a in zip(sources, targets, angles, strict=True)]
        backend(sources[0]).rotate(parts, interleaved=self.interleaved, transposed=transposed, tables=self.tables)

    def split(self, mixed: Tensor, own: bool) -> list[Tensor]:
        """Split mixed into q, k and v, with q and k rotated; in place if its memory may be reused (`own`).

        With several heads per turn, and others' between the turns, no single stride fits: those are copied.
        """
        q, k, v = self.by_head(mixed)
        turned = [x if own and 1 in x.shape[2:4] else x.new_empty(x.shape) for x in (q, k)]
        self.rotate((q, k), turned)
        return [*turned, v]

    def gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the projection's gradient, (*outer, F), given q's, k's, v's: (*outer, h, d) or (M, turns, columns)."""
        made = gradients[0].new_empty(*self.outer, self.turns * sum(self.columns))
        to = self.by_head(made)
        self.rotate([rows_contiguous(g).view(t.shape) for g, t in zip(gradients, to, strict=True)], to, transposed=True)
        return made


class _Split(torch.autograd.Function):
    """Split mixed into q, k, v with a dimension for heads, q and k rotated, in mixed's memory or beside it."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, rotation: Rotation, own: bool) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rotation.q, rotation.k)
        ctx.rotation = rotation
        heads = rotation.split(mixed, own)
        if own and not mixed.is_inference():
            torch.autograd.graph.increment_version(mixed)  # a backward pass that needs the old values then raises
        return tuple(x.flatten(2, 3) for x in heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors  # autograd raises if they have changed
        return ctx.rotation._replace(q=q, k=k).gradient(gradients), None, None


def split_rotated(mixed: Tensor, rotation: Rotation, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection (*outer, F) into q, k and v (*outer, h, d), q and k rotated.

    own: nobody else uses mixed, and its memory may be reused.
    """
    q, k, v = _Split.apply(mixed, rotation, own)
    return q, k, v
