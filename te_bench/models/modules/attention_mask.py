"""Translate Transformer Engine's mask types and windows for te_bench.kernels.attention. **True hides.**

Source: Transformer Engine 2.x, DotProductAttention: the mask tensor counts only for padding and arbitrary types; causal
aligns at the top left, every other type aligns its window at the bottom right, unless told; padding is at the end.
"""

import itertools
import warnings
from typing import Any, NamedTuple

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


class Visible(NamedTuple):
    """The keys that a row sees: inside the window, none after the row if causal, and not hidden by the mask.

    mask: bool, broadcasts to (B, H, T, S). empty: bool (B, 1, T, 1), rows that see nothing at all: padded queries,
    which would otherwise turn the keys' padding (B, 1, 1, S) into a T x S mask.
    """

    causal: bool = False
    window: Window | None = None  # (left, right): row i sees keys i - left to i + right; -1 means no limit
    mask: Tensor | None = None
    empty: Tensor | None = None


def check_type(attn_mask_type: str) -> str:
    """Return the canonical name of a mask type. Raises ValueError for an unknown one."""
    name = attn_mask_type.replace(",", "_") if isinstance(attn_mask_type, str) else ""
    name = "padding_causal" if name == "causal_padding" else name
    if name not in TYPES:
        raise ValueError(f"attn_mask_type={attn_mask_type!r} is not possible: one of {', '.join(TYPES)}")
    return name


def check_window(attn_mask_type: str, window_size: Window | None) -> Window:
    """Return (left, right), -1 for no limit; right is 0 if causal. Raises ValueError for an impossible window."""
    pair = (-1, -1) if window_size is None else window_size
    whole = isinstance(pair, tuple | list) and [type(side) for side in pair] == [int, int]
    if not whole:
        raise ValueError(f"window_size={window_size!r} is not possible: two whole numbers, (left, right)")
    left, right = pair
    if "causal" in attn_mask_type:
        if left < -1 or right < -1:
            raise ValueError(f"window_size={window_size} with {attn_mask_type}: (-1, 0), or (left, 0) with left >= 0")
        return left, 0  # the causal mask hides keys beyond the diagonal anyway
    if (left, right) == (-1, 0):
        warnings.warn(f"window_size=(-1, 0) with {attn_mask_type} is no window, as in Transformer Engine", stacklevel=2)
        return -1, -1
    if (left, right) != (-1, -1) and (left < 0 or right < 0):
        raise ValueError(f"window_size={window_size} with {attn_mask_type}: (-1, -1), or both at least 0")
    return left, right


def _is_bottom_right(kind: str, asked: bool | None) -> bool:
    """Return whether windows align at the bottom right: a causal type's name decides, other types follow `asked`."""
    return "bottom_right" in kind or ("causal" not in kind and asked is not False)


def _is_unread(starts: Tensor) -> bool:
    """Return whether the host must not read values: in compiled code and during graph capture."""
    return torch.compiler.is_compiling() or (starts.is_cuda and torch.cuda.is_current_stream_capturing())


def build(
    attn_mask_type: str,
    sizes: Sizes,
    device: torch.device,
    *,
    attention_mask: MaskTensor = None,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    window_size: Window | None = None,
    bottom_right_diagonal: bool | None = None,
) -> Visible:
    """Return what each row sees. A T x S mask is made only if bottom-right alignment moves a window's ends.

    attention_mask: (B, 1, 1, T) for padding; a pair (B, 1, 1, T), (B, 1, 1, S) if queries and keys differ; any that
    broadcasts to (B, H, T, S) for arbitrary. cu_seqlens (B + 1,), int32 or int64, of queries and keys replace a padding
    mask. Raises ValueError for impossible arguments; cu_seqlens' values are not read in compiled code and graph
    captures.
    """
    kind = check_type(attn_mask_type)
    window = check_window(kind, window_size)
    bottom_right = _is_bottom_right(kind, bottom_right_diagonal)
    mask: Tensor | None = None
    empty: Tensor | None = None
    offset: int | Tensor = sizes.keys - sizes.rows if bottom_right else 0
    if "padding" in kind:
        query, mask = _padding(attention_mask, cu_seqlens, sizes, device)
        empty = query.transpose(-2, -1)
        if bottom_right:
            offset = 0 if query is mask else _lengths(mask) - _lengths(query)
    elif kind == "arbitrary":
        mask = _arbitrary(attention_mask, sizes, device)
    if window == (-1, -1):
        return Visible(mask=mask, empty=empty)
    moved = _move_window(window, offset)
    if moved is not None:
        causal = moved[1] == 0
        return Visible(causal, None if moved[0] < 0 and causal else moved, mask, empty)
    band = _make_band(sizes, window, offset, device)
    return Visible(mask=band if mask is None else mask | band, empty=empty)


def _move_window(window: Window, offset: int | Tensor) -> Window | None:
    """Move a window from key i to key i + offset; None if an end passes i, or the offset differs between sequences.

    A causal window that then ends before or after i is no longer causal.
    """
    if isinstance(offset, Tensor):
        return None
    if offset == 0:  # the usual case; to compiled code, with varying sizes, a branch instead of a sum
        return window
    left, right = (side if side < 0 else side + move for side, move in zip(window, (-offset, offset), strict=True))
    passed = (window[0] >= 0 > left) or (window[1] >= 0 > right)
    return None if passed else (left, right)


class Sequences(NamedTuple):
    """Packed sequences, and which keys of their sequence rows see."""

    starts: tuple[Tensor, Tensor]  # of queries and keys, (sequences + 1,)
    longest: tuple[int, int]
    causal: bool
    window: Window | None


def pack(
    attn_mask_type: str,
    totals: tuple[int, int],
    device: torch.device,
    *,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    max_seqlens: tuple[int | None, int | None],
    window_size: Window | None = None,
    bottom_right_diagonal: bool | None = None,
) -> Sequences:
    """Describe packed sequences: totals are the rows of queries and keys, cu_seqlens (sequences + 1,) their starts.

    max_seqlens, the longest lengths, are read from the device if omitted. Raises ValueError for a type without padding,
    and for a window that bottom-right alignment moves by each sequence's lengths.
    """
    kind = check_type(attn_mask_type)
    if "padding" not in kind:
        raise ValueError(
            f"attn_mask_type={attn_mask_type!r} with thd: one of {', '.join(t for t in TYPES if 'padding' in t)}"
        )
    left, right = check_window(kind, window_size)
    starts_q, starts_kv = cu_seqlens
    if starts_q is None or starts_kv is None:
        raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
    bottom_right = _is_bottom_right(kind, bottom_right_diagonal)
    if bottom_right and (left, right) != (-1, -1) and starts_q is not starts_kv:
        raise ValueError(
            f"{kind} with thd, a window and other lengths of keys: give one tensor as cu_seqlens_q and cu_seqlens_kv, take "
            "padding_causal, or pad the sequences (bshd)"
        )
    if len(starts_q) != len(starts_kv):
        raise ValueError(f"cu_seqlens_q is of {len(starts_q) - 1} sequences, cu_seqlens_kv of {len(starts_kv) - 1}")
    longest = (
        longest_of("cu_seqlens_q", starts_q, totals[0], max_seqlens[0], device),
        longest_of("cu_seqlens_kv", starts_kv, totals[1], max_seqlens[1], device),
    )
    window = None if left < 0 and right <= 0 else (left, right)
    return Sequences((starts_q, starts_kv), longest, right == 0, window)


def longest_of(name: str, starts: Any, total: int, given: int | None, device: torch.device) -> int:
    """Return the longest sequence's length, given or read. Raises ValueError for impossible starts."""
    check_form(name, starts, None, device)
    longest = name.replace("cu_seqlens", "max_seqlen")
    if given is not None and given < 1:
        raise ValueError(f"{longest}={given}: must be at least 1")
    if _is_unread(starts):
        if given is None:
            raise ValueError(f"{longest} must be given in compiled code and while a CUDA graph is captured")
        return given
    _check_starts(name, starts, total if given is None else given, total)
    if given is not None:
        return given
    version = None if starts.is_inference() else starts._version
    known: tuple[int, int] | None = _read.get(starts)
    if known is None or known[0] != version:  # read once for all layers: the host waits for it
        known = version or 0, int((starts[1:] - starts[:-1]).max().clamp(min=1))
        if version is not None:
            _read[starts] = known
    return known[1]


def _padding(
    given: MaskTensor, cu_seqlens: tuple[Tensor | None, Tensor | None], sizes: Sizes, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the padding of queries (B, 1, 1, T) and of keys (B, 1, 1, S); one tensor if they are the same."""
    if given is None:
        starts_q, starts_kv = cu_seqlens
        if starts_q is None or starts_kv is None:
            raise ValueError("a padding mask type needs attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        query = _pad_from_starts("cu_seqlens_q", starts_q, sizes.batch, sizes.rows, device)
        if starts_kv is starts_q and sizes.rows == sizes.keys:
            return query, query
        return query, _pad_from_starts("cu_seqlens_kv", starts_kv, sizes.batch, sizes.keys, device)
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


def _pad_from_starts(name: str, starts: Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    """Return (B, 1, 1, length), True from each sequence's length on. starts (B + 1,): cumulative lengths."""
    check_form(name, starts, batch, device)
    if not _is_unread(starts):
        _check_starts(name, starts, length)
    lengths = starts[1:] - starts[:-1]
    return torch.arange(length, device=device) >= lengths.view(-1, 1, 1, 1)


def check_form(name: str, starts: Any, batch: int | None, device: torch.device) -> None:
    """Raise ValueError unless starts are (batch + 1,), or (2 or more,), whole numbers on the device."""
    if not isinstance(starts, Tensor) or starts.dtype not in (torch.int32, torch.int64):
        got = starts.dtype if isinstance(starts, Tensor) else type(starts).__name__
        raise ValueError(f"{name} must be a tensor of torch.int32 or torch.int64, got {got}")
    if starts.dim() != 1 or len(starts) < 2 or batch not in (None, len(starts) - 1):
        expected = "(sequences + 1,)" if batch is None else (batch + 1,)
        raise ValueError(f"{name} must be {expected}, got {tuple(starts.shape)}")
    if starts.device != device:
        raise ValueError(f"{name} is on {starts.device}, the query on {device}: move it")


#: Checked cumulative lengths: {starts: (version, length, total)}. A model's layers share them, because the host waits
#: for the GPU to read them.
_possible: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: {cumulative lengths: (version, longest length read)}.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _check_starts(name: str, starts: Tensor, length: int, total: int | None = None) -> None:
    """Raise ValueError unless the cumulative lengths give sequences of at most `length`, `total` rows in all."""
    known = None if starts.is_inference() else (starts._version, length, total)
    if starts.is_meta or (known is not None and _possible.get(starts) == known):
        return
    values = starts.tolist()
    why = None if values[0] == 0 else f"they start at {values[0]}, not 0"
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            why = why or f"sequence {i} would end at {end}, before it begins at {begin}"
        elif end - begin > length:
            why = why or f"sequence {i} would have {end - begin} of {length} positions"
    if total is not None and values[-1] > total:
        why = why or f"they end at {values[-1]} of {total} positions"
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
    """Return (B, 1, 1, 1) int64: how many positions are not padding."""
    return (~padding).sum(-1, keepdim=True)


def _make_band(sizes: Sizes, window: Window, offset: int | Tensor, device: torch.device) -> Tensor:
    """Return (T, S), or (B, 1, T, S) for offsets by sequence: False if i + offset - left <= j <= i + offset + right."""
    ahead = torch.arange(sizes.keys, device=device) - torch.arange(sizes.rows, device=device)[:, None] - offset  # j - i
    left, right = window
    hidden = ahead > right if right >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    return hidden | (ahead < -left) if left >= 0 else hidden
