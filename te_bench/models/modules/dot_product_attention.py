"""DotProductAttention: attention without parameters, by the kernel that attention_kernel selects.

Shapes: s positions, b batch, h heads, g groups of heads that share a key and a value, d features of a head (e of a value).
**True in a mask hides**; attention_mask.py says what the mask types mean.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_bench.kernels import compiler
from te_bench.kernels.attention import Backend, Problem, attend
from te_bench.kernels.attention.backends.auto import DTYPES
from te_bench.kernels.attention.packed import attend_packed
from te_bench.models import fp8, kernel_choice
from te_bench.models.kernel_choice import Report
from te_bench.models.modules import arguments, attention_mask
from te_bench.models.modules.activations import compute_dtype
from te_bench.models.modules.attention_mask import MaskTensor, Sequences, Sizes, Visible, Window, pack
from te_bench.models.modules.parameters import Tracker, fork_rng
from te_bench.models.modules.tensor_parallel import Parallelised, Ranks


@compiler.constant
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def check_format(where: str, qkv_format: str) -> str:
    if qkv_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"{where}: qkv_format={qkv_format!r} is not possible: sbhd, bshd or thd")
    return qkv_format


def check_heads(where: str, heads: int, groups: int | None, attention_type: str, dropout: float) -> int:
    """Return the number of groups. Raises ValueError for impossible settings."""
    groups = heads if groups is None else groups
    arguments.check(where, num_attention_heads=heads, num_gqa_groups=groups, attention_dropout=dropout)
    if heads % groups:
        raise ValueError(f"{where}: num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}")
    if attention_type not in ("self", "cross"):
        raise ValueError(f"{where}: attention_type={attention_type!r} is not possible: self or cross")
    return groups


def _channels(where: str, kv_channels: int | tuple[int, int]) -> tuple[int, int]:
    """Return the features of a query's and a value's head."""
    pair = kv_channels if isinstance(kv_channels, tuple | list) else (kv_channels, kv_channels)
    if len(pair) != 2:
        raise ValueError(f"{where}: kv_channels={kv_channels!r} is not possible: one number, or (key's, value's)")
    for channels in pair:
        arguments.check(where, kv_channels=channels)
    return pair[0], pair[1]


def _attend(backend: Backend, extent: Visible, scale: float, dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    causal, window, mask, empty = extent
    out = attend(backend, q, k, v, causal=causal, scale=scale, dropout=dropout, mask=mask, window=window)
    return out if empty is None else out.masked_fill(empty, 0.0)


def _attend_packed(
    backend: Backend, sequences: Sequences, scale: float, dropout: float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """`_attend` for packed sequences in a batch of one."""
    starts, longest, causal, window = sequences
    options: dict[str, Any] = {"causal": causal, "window": window}
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out = attend_packed(backend, q, k, v, *starts, longest, scale=scale, dropout=dropout, **options)
    return out.transpose(0, 1)[None]


def _emulate() -> bool | None:
    """Return whether FP8 is emulated; None if attention computes in the inputs' precision."""
    recipe = fp8.recipe_of_attention()
    return None if recipe is None else recipe.emulate


def _without_gaps(given: Mapping[str, Any], starts: tuple[Tensor | None, Tensor | None] | None) -> dict[str, Any]:
    """Drop cu_seqlens_q_padded and cu_seqlens_kv_padded from the arguments if they imply no rows between sequences.

    starts: the sequences' own, which they must equal; None for formats without such rows.
    """
    names = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    none = {name for name in names if isinstance(given.get(name), Tensor) and starts is None}
    for name, own in zip(names, starts or (), strict=False):
        padded = given.get(name)
        if isinstance(padded, Tensor) and own is not None and (padded is own or torch.equal(padded, own)):
            none.add(name)
    return {name: value for name, value in given.items() if name not in none}


def describe(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window | None, mask: bool, dropout: float
) -> Problem:
    """Return the problem of q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) for `kernel_choice`."""
    batch, heads, length, head_dim = q.shape
    return Problem(
        batch=batch,
        heads=heads,
        length=length,
        head_dim=head_dim,
        dtype=DTYPES[q.dtype],
        causal=causal,
        dropout=dropout,
        device=q.device.type,
        capability=_capability(q.device.index) if q.is_cuda else None,
        kv_heads=k.shape[1],
        kv_length=k.shape[2],
        v_head_dim=v.shape[-1],
        mask=mask,
        window=window,
    )


class DotProductAttention(Parallelised, nn.Module):
    """Compute softmax(scale Q K^T, masked) V for query (s, b, h, d), key (t, b, g, d), value (t, b, g, e) -> (s, b, h
    e).

    "bshd": (b, s, h, d) and so on -> (b, s, h e). "thd": packed sequences, (rows, h, d) and so on -> (rows, h e), under
    a padding type, with cu_seqlens only; rows of no sequence are 0. kv_channels: d, or (d, e); softmax_scale defaults
    to d^-1/2. A query that sees no key gives 0, with gradient 0. Masks and windows: attention_mask.py. Dropout draws
    from torch's generator. A recipe with fp8_dpa computes in FP8, causal or full, without dropout, and raises
    ValueError otherwise. Each of tp_size ranks has its share of heads and groups. Arguments and defaults are
    Transformer Engine's; those after bottom_right_diagonal are keyword-only. Raises ValueError for biases, context
    parallelism and KV caches.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        get_rng_state_tracker: Tracker = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        name: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        super().__init__()
        where = "DotProductAttention"
        arguments.reject(where, others)
        groups = check_heads(where, num_attention_heads, num_gqa_groups, attention_type, attention_dropout)
        self.ranks = Ranks(where, tp_group, tp_size, sequence_parallel)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.num_attention_heads_per_partition = self.ranks.part("num_attention_heads", num_attention_heads)
        self.num_gqa_groups_per_partition = self.ranks.part("num_gqa_groups", groups)
        self.head_dim_qk, self.head_dim_v = _channels(where, kv_channels)
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.qkv_format = check_format(where, qkv_format)
        self.attn_mask_type = attention_mask.check_type(attn_mask_type)
        attention_mask.check_window(self.attn_mask_type, window_size)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.tracker = get_rng_state_tracker
        self.layer_number, self.name = 1 if layer_number is None else layer_number, name
        self.softmax_scale = 1 / math.sqrt(self.head_dim_qk) if softmax_scale is None else softmax_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in ("_extra_state", "fused_attention._extra_state"):  # Transformer Engine's, for FP8 attention
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: MaskTensor = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        **others: Any,
    ) -> Tensor:
        """Return the context. attention_mask counts only for mask types with padding or arbitrary in their name.

        None means the constructor's value. checkpoint_core_attention recomputes attention in the backward pass.
        """
        layout = self._layout(qkv_format)
        if others:
            starts = (cu_seqlens_q, cu_seqlens_kv) if layout == "thd" else None
            arguments.reject("DotProductAttention.forward", _without_gaps(others, starts))
        (q, k, v), seen, problem = self._pose(
            (query_layer, key_layer, value_layer),
            layout,
            attention_mask,
            (cu_seqlens_q, cu_seqlens_kv),
            (max_seqlen_q, max_seqlen_kv),
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
        )
        if q.numel() == 0 or k.shape[2] == 0:  # kernels refuse it; 0 x inputs keeps the graph of an empty batch
            out = (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros(*q.shape[:3], v.shape[-1])
        else:
            backend = kernel_choice.backend(kernel_choice.choose(problem, _emulate()))
            attend: Callable[..., Tensor] = _attend_packed if layout == "thd" else _attend
            run = partial(attend, backend, seen, self.softmax_scale, problem.dropout)
            out = self._compute(run, (q, k, v), problem.dropout, checkpoint_core_attention)
        context = out.permute(2, 0, 1, 3) if layout == "sbhd" else out.transpose(1, 2)
        return context[0].flatten(1) if layout == "thd" else context.flatten(2)

    def _pose(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        layout: str,
        mask: MaskTensor,
        cu_seqlens: tuple[Tensor | None, Tensor | None],
        max_seqlens: tuple[int | None, int | None],
        attn_mask_type: str | None,
        window_size: Window | None,
        bottom_right_diagonal: bool | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Visible | Sequences, Problem]:
        """Return query, key and value in `_inputs`' layout, what each row sees, and the kernel's problem.

        None means the constructor's value.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        asked: dict[str, Any] = {
            "window_size": self.window_size if window_size is None else window_size,
            "bottom_right_diagonal": (
                self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
            ),
        }
        if layout == "thd":
            if mask is not None:
                raise ValueError("DotProductAttention: thd tells padding by cu_seqlens: leave attention_mask out")
            q, k, v = self._rows(*given)
            totals = q.shape[2], k.shape[2]
            packed = pack(kind, totals, q.device, cu_seqlens=cu_seqlens, max_seqlens=max_seqlens, **asked)
            (rows, keys), batch = packed.longest, len(packed.starts[0]) - 1
            whole = self._problem(q, k, v, packed.causal, packed.window)
            return (q, k, v), packed, replace(whole, batch=batch, length=rows, kv_length=keys, packed=True)
        q, k, v = self._inputs(*given, layout)
        sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        for name, said, length in zip(("q", "kv"), max_seqlens, (sizes.rows, sizes.keys), strict=True):
            if said is not None and said != length:
                raise ValueError(
                    f"max_seqlen_{name}={said} must be the tensors' {length}; they are for qkv_format='thd'"
                )
        seen = attention_mask.build(kind, sizes, q.device, attention_mask=mask, cu_seqlens=cu_seqlens, **asked)
        return (q, k, v), seen, self._problem(q, k, v, seen.causal, seen.window, seen.mask is not None)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`_inputs` for packed sequences, as a batch of one."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3:
                raise ValueError(
                    f"DotProductAttention: {name}_layer must be thd, (rows, heads, features), got {tuple(x.shape)}"
                )
        return self._inputs(query[None], key[None], value[None], "bshd")

    def _compute(self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], dropout: float, again: bool) -> Tensor:
        """Call run(*inputs), recomputed in the backward pass if `again`; dropout draws from the tracker's generator."""
        # Outside the checkpoint, which draws again from the generator that it finds here.
        with fork_rng(self.tracker if dropout else None):
            return checkpoint(run, *inputs, use_reentrant=False) if again else run(*inputs)

    def backend_report(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **options: Any) -> Report:
        """Return which backend forward would run with these arguments, and why the others cannot; computes nothing."""
        _, _, problem = self._pose(
            (query_layer, key_layer, value_layer),
            self._layout(options.get("qkv_format")),
            options.get("attention_mask"),
            (options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")),
            (options.get("max_seqlen_q"), options.get("max_seqlen_kv")),
            *(options.get(name) for name in ("attn_mask_type", "window_size", "bottom_right_diagonal")),
        )
        return kernel_choice.report(problem, _emulate())

    def _layout(self, qkv_format: str | None) -> str:
        return self.qkv_format if qkv_format is None else check_format("DotProductAttention.forward", qkv_format)

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return views (B, H, T, D), (B, G, S, D), (B, G, S, E), in torch.autocast's dtype if it is on."""
        heads = {
            "query": (self.num_attention_heads_per_partition, self.head_dim_qk),
            "key": (self.num_gqa_groups_per_partition, self.head_dim_qk),
            "value": (self.num_gqa_groups_per_partition, self.head_dim_v),
        }
        for (name, expected), x in zip(heads.items(), (query, key, value), strict=True):
            if x.dim() != 4 or tuple(x.shape[2:]) != expected:
                raise ValueError(
                    f"DotProductAttention: {name}_layer must be {layout} with {expected[0]} heads of {expected[1]}, "
                    f"got {tuple(x.shape)}"
                )
            if x.dtype != query.dtype or x.device != query.device or x.dtype not in DTYPES:
                raise ValueError(
                    f"DotProductAttention: {name}_layer is {x.dtype} on {x.device}, query_layer {query.dtype} on "
                    f"{query.device}: one of {', '.join(map(str, DTYPES))} and one device for all"
                )
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        dtype = compute_dtype(query)
        q, k, v = (x.permute(order).to(dtype) for x in (query, key, value))
        if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"DotProductAttention: query_layer {tuple(query.shape)}, key_layer {tuple(key.shape)} and value_layer "
                f"{tuple(value.shape)} differ in batch or keys ({layout})"
            )
        return q, k, v

    def _problem(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Window | None, mask: bool = False
    ) -> Problem:
        dropout = self.attention_dropout if self.training else 0.0
        return describe(q, k, v, causal=causal, window=window, mask=mask, dropout=dropout)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, channels={self.head_dim_qk}, "
            f"mask={self.attn_mask_type}, format={self.qkv_format}"
        )
