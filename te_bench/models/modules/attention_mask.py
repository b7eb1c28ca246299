"""Transformer Engine's mask types and windows as (causal, mask) for te_bench.kernels.attention. **True hides.**

Source: Transformer Engine 2.x, DotProductAttention: the mask tensor counts for padding and arbitrary types only; causal
means aligned at the top left, every other type aligns its window at the bottom right, unless told; padding is at the end.
"""

import itertools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

MaskTensor = Tensor | tuple[Tensor, Tensor] | None
Window = tuple[int, int]


class Sizes(NamedTuple):
    """(B, H, T, S): batch, heads, query rows and keys."""

    batch: int
    heads: int
    rows: int
    keys: int


def check_type(attn_mask_type: str) -> str:
    """The canonical name of a mask type. Raises ValueError for an unknown one."""
    name = attn_mask_type.replace(",", "_") if isinstance(attn_mask_type, str) else ""
    name = "padding_causal" if name == "causal_padding" else name
    if name not in TYPES:
        raise ValueError(f"attn_mask_type={attn_mask_type!r} is not possible: one of {', '.join(TYPES)}")
    return name


def check_window(attn_mask_type: str, window_size: Window | None) -> Window:
    """(left, right), -1 for no limit; right is 0 under a causal type. Raises ValueError for what the type can't have."""
    pair = (-1, -1) if window_size is None else window_size
    whole = isinstance(pair, tuple | list) and [type(side) for side in pair] == [int, int]
    if not whole:
        raise ValueError(f"window_size={window_size!r} is not possible: two whole numbers, (left, right)")
    left, right = pair
    if "causal" in attn_mask_type:
        if left < -1 or right < -1:
            raise ValueError(f"window_size={window_size} with {attn_mask_type}: (-1, 0), or (left, 0) with left >= 0")
        return left, 0  # what a window shows beyond the diagonal, the causal mask hides
    if (left, right) == (-1, 0):
        warnings.warn(f"window_size=(-1, 0) with {attn_mask_type} is no window, as in Transformer Engine", stacklevel=2)
        return -1, -1
    if (left, right) != (-1, -1) and (left < 0 or right < 0):
        raise ValueError(f"window_size={window_size} with {attn_mask_type}: (-1, -1), or both at least 0")
    return left, right


def build(
    attn_mask_type: str,
    sizes: Sizes,
    device: torch.device,
    *,
    attention_mask: MaskTensor = None,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    window_size: Window | None = None,
    bottom_right_diagonal: bool | None = None,
) -> tuple[bool, Tensor | None]:
    """(causal, mask): mask is bool and broadcasts to (B, H, T, S), or is None where the causal flag says all.

    attention_mask: (B, 1, 1, T) for padding, a pair (B, 1, 1, T), (B, 1, 1, S) where queries and keys differ, anything that
    broadcasts to (B, H, T, S) for arbitrary. cu_seqlens (B + 1,), int32 or int64, of queries and keys stand in for a
    padding mask. Raises ValueError for what of these can't be; values of cu_seqlens go unread in compiled code and while
    a CUDA graph is captured.
    """
    kind = check_type(attn_mask_type)
    window = check_window(kind, window_size)
    bottom_right = "bottom_right" in kind or ("causal" not in kind and bottom_right_diagonal is not False)
    mask: Tensor | None = None
    offset: int | Tensor = sizes.keys - sizes.rows if bottom_right else 0
    if "padding" in kind:
        query, key = _padding(attention_mask, cu_seqlens, sizes, device)
        mask = query.transpose(-2, -1) | key  # a padded query sees nothing, so it gives 0
        if bottom_right:
            offset = _lengths(key) - _lengths(query)
    elif kind == "arbitrary":
        mask = _arbitrary(attention_mask, sizes, device)
    if window == (-1, -1):
        return False, mask
    if window == (-1, 0) and not isinstance(offset, Tensor) and offset == 0:
        return True, mask
    band = _band(sizes, window, offset, device)
    return False, band if mask is None else mask | band


def _padding(
    given: MaskTensor, cu_seqlens: tuple[Tensor | None, Tensor | None], sizes: Sizes, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The padding of the queries (B, 1, 1, T) and of the keys (B, 1, 1, S)."""
    if given is None:
        starts_q, starts_kv = cu_seqlens
        if starts_q is None or starts_kv is None:
            raise ValueError("a padding mask type needs attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        return (
            _ends("cu_seqlens_q", starts_q, sizes.batch, sizes.rows, device),
            _ends("cu_seqlens_kv", starts_kv, sizes.batch, sizes.keys, device),
        )
    if isinstance(given, Tensor):
        if sizes.rows != sizes.keys:
            raise ValueError(
                f"{sizes.rows} queries and {sizes.keys} keys: attention_mask must be a pair of padding masks"
            )
        given = (given, given)
    if not isinstance(given, tuple | list) or len(given) != 2:
        what = f"{len(given)} of them" if isinstance(given, tuple | list) else type(given).__name__
        raise ValueError(f"attention_mask must be one padding mask, or a pair for queries and keys; got {what}")
    query, key = given
    for name, mask, length in (("queries", query, sizes.rows), ("keys", key, sizes.keys)):
        _check_mask(f"attention_mask of the {name}", mask, device)
        if mask.shape != (sizes.batch, 1, 1, length):
            raise ValueError(
                f"attention_mask of the {name} must be {(sizes.batch, 1, 1, length)}, got {tuple(mask.shape)}"
            )
    return query, key


def _ends(name: str, starts: Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    """(B, 1, 1, length): True from each sequence's length on. starts (B + 1,): cumulative lengths."""
    if not isinstance(starts, Tensor) or starts.dtype not in (torch.int32, torch.int64):
        got = starts.dtype if isinstance(starts, Tensor) else type(starts).__name__
        raise ValueError(f"{name} must be a tensor of torch.int32 or torch.int64, got {got}")
    if starts.shape != (batch + 1,):
        raise ValueError(f"{name} must be {(batch + 1,)}, got {tuple(starts.shape)}")
    if starts.device != device:
        raise ValueError(f"{name} is on {starts.device}, the query on {device}: move it")
    if not torch.compiler.is_compiling() and not (starts.is_cuda and torch.cuda.is_current_stream_capturing()):
        _check_starts(name, starts, length)
    lengths = starts[1:] - starts[:-1]
    return torch.arange(length, device=device) >= lengths.view(-1, 1, 1, 1)


#: The lengths that cumulative lengths were found possible for, and their version then: a model's layers share them, and
#: to read them the host waits for the GPU.
_possible: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _check_starts(name: str, starts: Tensor, length: int) -> None:
    """Raise ValueError for cumulative lengths of which no sequence of at most `length` positions can be made."""
    known = None if starts.is_inference() else (starts._version, length)
    if starts.is_meta or (known is not None and _possible.get(starts) == known):
        return
    values = starts.tolist()
    why = None if values[0] == 0 else f"they start at {values[0]}, not 0"
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            why = why or f"sequence {i} would end at {end}, before it begins at {begin}"
        elif end - begin > length:
            why = why or f"sequence {i} would have {end - begin} of {length} positions"
    if why is not None:
        raise ValueError(f"{name}={values}: {why}; give 0 and then the sums of the sequences' lengths")
    if known is not None:
        _possible[starts] = known


def _arbitrary(given: MaskTensor, sizes: Sizes, device: torch.device) -> Tensor:
    if not isinstance(given, Tensor):
        raise ValueError("attn_mask_type='arbitrary' needs attention_mask, one bool tensor")
    _check_mask("attention_mask", given, device)
    mask = given.view((1,) * (4 - given.dim()) + tuple(given.shape)) if given.dim() < 4 else given
    fits = mask.dim() == 4 and all(got in (1, size) for got, size in zip(mask.shape, sizes, strict=True))
    if not fits:
        raise ValueError(
            f"attention_mask {tuple(given.shape)} does not broadcast to (batch, heads, queries, keys) = {tuple(sizes)}"
        )
    return mask


def _check_mask(name: str, mask: Tensor, device: torch.device) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a tensor of torch.bool with True for what is hidden, got {got}")
    if mask.device != device:
        raise ValueError(f"{name} is on {mask.device}, the query on {device}: move it")


def _lengths(padding: Tensor) -> Tensor:
    """(B, 1, 1, 1) int64: how many positions are not padding."""
    return (~padding).sum(-1, keepdim=True)


def _band(sizes: Sizes, window: Window, offset: int | Tensor, device: torch.device) -> Tensor:
    """(T, S), or (B, 1, T, S) for an offset of each sequence: True unless i + offset - left <= j <= i + offset + right."""
    ahead = torch.arange(sizes.keys, device=device) - torch.arange(sizes.rows, device=device)[:, None] - offset  # j - i
    left, right = window
    hidden = ahead > right if right >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    return hidden | (ahead < -left) if left >= 0 else hidden
