"""attn_implementation="te_bench" and "te_bench_fp8": te-bench's attention kernels behind transformers' interface.

    import te_bench.models.huggingface
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="te_bench")

"te_bench" is `auto` (the fastest measured for the problem) or te.attention_kernel's choice; under a recipe with fp8_dpa
it computes in FP8, as "te_bench_fp8" always does. Unsupported problems raise ValueError.

transformers makes one mask a pass and hands it to every layer. Ours is `Seen`, which expresses causal, windows, padding
and packed sequences without a T x S matrix; only other patterns are a matrix.
Source: transformers 5.17 and 5.23, masking_utils.py and integrations/sdpa_attention.py. **True in their masks shows.**
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem, attend, posed
from te_bench.kernels.attention.backends import auto
from te_bench.kernels.attention.packed import attend_packed
from te_bench.models import fp8, kernel_choice
from te_bench.models.modules.activations import compute_dtype
from te_bench.models.modules.dot_product_attention import describe
from te_bench.models.subclassing import Mixed

NAME, NAME_FP8 = "te_bench", "te_bench_fp8"

#: {argument that transformers may pass and te-bench does not support: its meaning}.
ABSENT = {
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias of the scores",
    "head_mask": "a mask of heads",
    "cache": "a paged cache",
    "output_attentions": "the weights of attention as an output",
}


class Seen(NamedTuple):
    """The keys that a row sees: inside the window, none after the row if causal, and not hidden by the mask.

    mask: bool, broadcasts to (B, H, T, S), True hides. starts: int32, where sequences begin in the rows of the whole
    batch, then the number of rows; longest: the longest sequence's rows. Rows see nothing of another sequence.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    mask: Tensor | None = None
    starts: Tensor | None = None
    longest: int = 0


@torch.compiler.disable(reason="te_bench's mask looks at padding and packed sequences")  # type: ignore[untyped-decorator]
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Seen | Tensor | None:
    """Make a mask from the arguments of transformers' mask functions. It waits for the GPU to find padding or packing.

    attention_mask (B, S) is True for keys that are no padding. Patterns that `Seen` cannot express, and a cache's, give
    transformers' own tensor, (B, 1, T, S); None means a row sees everything. A CUDA graph capture cannot wait: the
    graph keeps the pattern of the last pass of the same sizes. Raises ValueError if that was packed or padded.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    padding = padding_of(attention_mask, kv_length + kv_offset)
    hidden = None if padding is None else ~padding[:, None, None, :]
    whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if mask_function is bidirectional_mask_function and local_size is None and kv_offset == 0:
        return Seen(mask=hidden)
    if whole and (mask_function is causal_mask_function or not use_vmap):
        sizes = (batch_size, q_length, local_size, str(device))
        if mask_function is causal_mask_function:
            found: Seen | None = Seen(causal=True)
        elif _capturing(device):
            found = _of_the_last_pass(sizes)
        else:
            found = _find_sequences(mask_function, batch_size, q_length, local_size, device)
        _FOUND[sizes] = found if found is None or found.starts is None else PACKED
        if found is not None and (found.starts is None or padding is None):
            return found._replace(mask=hidden)
    shown = sdpa_mask(
        batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, use_vmap=use_vmap, allow_is_causal_skip=False, device=device,
    )  # fmt: skip
    assert shown is not None  # skipping the mask is not allowed
    return None if q_length == 1 and bool(shown.all()) else shown


def padding_of(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """Return attention_mask widened to `keys` keys, or None if nothing is padding."""
    if attention_mask is None:
        return None
    if _capturing(attention_mask.device):
        raise ValueError("a CUDA graph cannot tell whether attention_mask hides padding: capture the step without it")
    if attention_mask.shape[-1] == keys and bool(attention_mask.all()):
        return None
    return torch.nn.functional.pad(attention_mask.bool(), (0, keys - attention_mask.shape[-1]))


PACKED = "packed"
#: {(batch, length, window, device): causal pattern of the last pass of these sizes}; holds no tensors.
_FOUND: dict[tuple[int, int, int | None, str], Seen | str | None] = {}


def _capturing(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _of_the_last_pass(sizes: tuple[int, int, int | None, str]) -> Seen | None:
    """Return the last pass's pattern: in a capture transformers cannot check for packing, and passes a packed mask."""
    if sizes not in _FOUND:
        raise ValueError(
            "a CUDA graph keeps a pattern of attention that the pass before it had: run one before the capture"
        )
    found = _FOUND[sizes]
    if isinstance(found, str):
        raise ValueError(
            "a CUDA graph keeps one pattern of attention, and this batch is packed: train it without a graph"
        )
    return found


def _find_sequences(function: Any, batch: int, length: int, window: int | None, device: Any) -> Seen | None:
    """Find a causal pattern in which each row sees back to the start of its sequence or window; None for any other.

    transformers expresses it as a function of batch, head, row and key, which is called for each row's neighbours. One
    that joins two patterns (blocks that see all of themselves) is not covered. A chunk counts as a sequence, which a
    window of its length does not cut.
    """
    if function.__name__ == "or_mask":
        return None
    rows = torch.arange(length, device=device)
    batches, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)
    if length < 2:
        return Seen(causal=True)
    ahead = function(batches, head, rows[:-1], rows[1:])
    behind = torch.ones(batch, length, dtype=torch.bool, device=device)
    behind[:, 1:] = function(batches, head, rows[1:], rows[:-1])
    behind[:, 0] = False  # each batch row begins a sequence
    if bool(ahead.any()):
        return None
    sliding = None if window is None or window >= length else (window - 1, 0)
    starts = torch.nonzero(~behind.flatten()).flatten()
    if len(starts) == batch:
        return Seen(True, sliding)
    starts = torch.cat((starts, starts.new_full((1,), batch * length)))
    return Seen(True, sliding, None, starts.int(), int((starts[1:] - starts[:-1]).max()))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    *,
    in_fp8: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute softmax(scaling Q K^T, masked) V; query (B, H, T, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv).

    Returns (B, T, H, Dv). attention_mask: from `mask`; or broadcasting to (B, H, T, S), bool, True for visible keys, or
    numbers, 0 for these and the dtype's least for others; or None: causal as is_causal or the module says, with
    sliding_window. cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k describe sequences packed in a batch of
    one. Raises ValueError for the unsupported.
    """
    for name, meaning in ABSENT.items():
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(
                f"attn_implementation={_name(in_fp8)!r} has no {name}, {meaning}: take attn_implementation='eager'"
            )
    seen = _read(module, query, attention_mask, sliding_window, is_causal, in_fp8)
    dtype = compute_dtype(query)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if others.get("cu_seq_lens_q") is not None:
        seen = _read_sequences(seen, others)
    options: dict[str, Any] = {"causal": seen.causal, "window": seen.window, "dropout": dropout}
    problem = describe(q, k, v, mask=seen.mask is not None, **options)
    if seen.starts is None:
        backend = _choose(problem, in_fp8)
        out = attend(backend, q, k, v, mask=seen.mask, scale=scale, **options)
        return out.transpose(1, 2).contiguous(), None  # some models view it
    starts_k, longest_k = others.get("cu_seq_lens_k"), others.get("max_length_k")
    starts = seen.starts, seen.starts if starts_k is None else starts_k
    longest = seen.longest, seen.longest if longest_k is None else int(longest_k)
    sizes: dict[str, Any] = {"batch": len(seen.starts) - 1, "length": longest[0], "kv_length": longest[1]}
    backend = _choose(replace(problem, packed=True, **sizes), in_fp8)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = attend_packed(backend, q, k, v, *starts, longest, scale=scale, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


attention_fp8 = functools.partial(attention, in_fp8=True)


def _read(
    module: Any, query: Tensor, given: Any, sliding_window: int | None, is_causal: bool | None, in_fp8: bool
) -> Seen:
    if isinstance(given, Seen):
        return given
    if isinstance(given, Tensor):
        return Seen(mask=_hidden(given, in_fp8))
    asked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(asked) and query.shape[2] > 1  # with a single row, all keys in the cache precede it
    if sliding_window is None:
        return Seen(causal)
    return Seen(causal, (sliding_window - 1, 0 if causal else sliding_window - 1))


def _hidden(given: Tensor, in_fp8: bool) -> Tensor:
    """Return a mask's hidden keys: False of a bool one, its dtype's least numbers of one to be added to the scores.

    A row that sees no key is then hidden wholly, where the least number added to all its scores would let it see all.
    Raises ValueError if it adds other numbers.
    """
    if given.dtype is torch.bool:
        return ~given
    what = f"attn_implementation={_name(in_fp8)!r}: the mask is {given.dtype}, to be added to the scores"
    if _capturing(given.device):
        raise ValueError(f"{what}, whose numbers a CUDA graph cannot look at: train without a graph")
    if given.is_floating_point() and not given.requires_grad:
        hidden = given <= torch.finfo(given.dtype).min / 2
        if bool((hidden | (given == 0)).all()):
            return hidden
    raise ValueError(f"{what}, and not 0 or the least number everywhere: give a bool one, True for what is seen")


def _read_sequences(seen: Seen, given: dict[str, Any]) -> Seen:
    """Add the sequences of transformers' flash attention arguments."""
    if seen.mask is not None:
        raise ValueError("cu_seq_lens_q says where sequences begin: leave attention_mask out")
    starts, longest = given["cu_seq_lens_q"], given.get("max_length_q")
    longest = (starts[1:] - starts[:-1]).max() if longest is None else longest
    return seen._replace(starts=starts, longest=int(longest))


def _choose(problem: Problem, in_fp8: bool) -> Backend:
    """Return the backend that computes the problem. Raises ValueError if the requested one cannot."""
    if not in_fp8:
        recipe = fp8.recipe_of_attention()
        if recipe is None and kernel_choice.current is None:
            return auto.BACKEND
        return kernel_choice.backend(kernel_choice.choose(problem, None if recipe is None else recipe.emulate))
    recipe = fp8.current.recipe
    name = kernel_choice.in_fp8(problem.device, recipe is not None and recipe.emulate)
    name = name if kernel_choice.current is None else kernel_choice.current
    backend = kernel_choice.backend(name)
    reason = backend.unsupported(posed(backend, problem)) if backend.fp8 else "it has no FP8"
    if reason is not None:
        raise ValueError(
            f"attn_implementation={NAME_FP8!r}: {name} can't do this: {reason}. Take attn_implementation={NAME!r}"
        )
    return backend


def _name(in_fp8: bool) -> str:
    return NAME_FP8 if in_fp8 else NAME


class Attending(Mixed):
    """A mixin before the class of a model with our attention: unpickling it imports, and so registers, ours."""


def register() -> None:
    """Register both names with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in ((NAME, attention), (NAME_FP8, attention_fp8)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
