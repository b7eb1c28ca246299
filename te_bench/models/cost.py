"""Compute what one training step of a decoder must at least compute, move and hold. No torch.

Each fused pass over a tensor reads its inputs and writes its outputs once; parameters, optimizer states and the residual
stream are float32, as under autocast, or as is said; all else is bf16 or, where a GEMM of a recipe reads it, FP8 in two
layouts (two bytes an element as well). A GEMM's own operands are left out: at these sizes they hide behind its FLOP.
All comes from a configuration's `shape`, whatever its family: tied tables or two, positions learned or turned by, grouped
queries, gated activations, RMSNorm, biases.
"""

from dataclasses import dataclass

from te_bench.kernels.adamw import BLOCK
from te_bench.models.configs import DecoderConfig, Shape

#: Bytes per element of weights or moments, by format; BLOCK elements of FP8 moments share a float32 scale.
BYTES = {None: 4.0, "bf16": 2.0, "fp8": 1 + 4 / BLOCK}

GEMM, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER = "GEMM", "attention", "loss", "elementwise", "optimizer"

#: From this many FP8 weight elements on, each weight is stored in one layout, and dgrad transposes it: a second layout
#: takes 0.5 GiB.
ONCE = 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The FLOP in bf16 and in FP8, and bytes of memory traffic, of all kernels of one kind in a step."""

    kind: str
    bf16_flop: int = 0
    fp8_flop: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The bytes of one kind of tensor at a step's memory peak, which is while the head computes its gradients."""

    what: str
    bytes: int


def parameters(config: DecoderConfig, padded_vocab: int) -> int:
    """Return the elements of all weights; a tied head counts once."""
    s = config.shape
    tables = padded_vocab * (1 if s.tied else 2) + (s.length if s.learned_positions else 0)
    return tables * s.hidden + s.layers * (s.weights + s.vectors) + s.last_vectors


def step(
    config: DecoderConfig,
    *,
    batch: int,
    padded_vocab: int,
    fp8: bool,
    fp8_head: bool,
    clipped: bool,
    weights: str | None = None,
    states: str | None = None,
) -> tuple[Cost, ...]:
    """Return the lower bounds of a forward and backward pass with one update, block_size tokens a sequence.

    fp8: the layers' Linears compute in FP8; fp8_head: so does the head; clipped: gradients are clipped by their norm.
    Causal attention is bf16, with 2.5 times the forward FLOP in the backward pass, which recomputes it. weights and
    states: the formats of weights and moments, None for float32. A bf16 weight has a bf16 gradient and no bf16 copy.
    """
    s = config.shape
    n = batch * s.length
    linears, head = 6 * n * s.weights * s.layers, 6 * n * s.hidden * padded_vocab
    multiplied = s.weights * s.layers + s.hidden * padded_vocab  # weights that a GEMM reads in half precision or FP8
    copied = s.weights * s.layers * fp8 if weights else multiplied
    update = 2 * BYTES[weights] + (1 + clipped) * BYTES[weights] + 4 * BYTES[states]
    in_fp8 = linears * fp8 + head * fp8_head
    return (
        Cost(kind=GEMM, bf16_flop=linears + head - in_fp8, fp8_flop=in_fp8),
        Cost(kind=ATTENTION, bf16_flop=(2 + 5) * n * s.length * s.heads * s.head_dim * s.layers),
        Cost(kind=LOSS, bytes=4 * n * padded_vocab),  # logits read once, their gradient written once
        Cost(kind=ELEMENTWISE, bytes=n * (s.layers * _layer_elementwise(s, fp8) + _outer_elementwise(s))),
        # reads weight, gradient (again for its norm) and moments; writes all but the gradient, and the GEMMs' copies
        Cost(kind=OPTIMIZER, bytes=round(update * parameters(config, padded_vocab)) + 2 * copied),
    )


NORM = 4 + 2 + 4 + 2  # reads residual stream and branch, writes their sum and its norm


def _layer_elementwise(s: Shape, fp8: bool) -> int:
    """Return the bytes per token of a layer's work between its GEMMs and its attention."""
    norms = 2 * (NORM + 2 + 4 + 4 + 4)  # backward: reads gradients of norm and stream and the stream, writes one
    branches = 2 * 2  # the stream's gradient is rounded once more for the branch's last GEMM
    # Casts of attention's output and of the gradients of q, k and v.
    attention = (2 + 2) * (s.heads * s.head_dim + s.qkv) if fp8 else 0
    # In bf16, GEMM epilogues compute an ungated activation and its slope at no cost.
    up = 2 if s.gated else 1
    activation = s.ffn * ((2 * up + 2) + (2 + 2 * up + 2 * up)) if fp8 or s.gated else 0
    return s.hidden * (norms + branches) + attention + _turned(s, fp8) + activation


def _turned(s: Shape, fp8: bool) -> int:
    """Return the bytes per token of rotating queries, keys and their gradients; FP8 casts the gradients on the way."""
    return 0 if s.learned_positions else (2 + 2) * (s.heads + s.groups) * s.head_dim * (1 if fp8 else 2)


def _outer_elementwise(s: Shape) -> int:
    """Return the bytes per token of the last norm and the embedding."""
    embedding = (4 + 4) + (4 + 4 + 4)
    return s.hidden * (NORM + 10 + embedding)


IN_BF16 = ("mxfp8", "nvfp4")  # granularities whose recipes emulate, storing bf16
BLOCK = 128  # elements of a row that share a scale, and rows of a weight's block


def memory(
    config: DecoderConfig,
    *,
    batch: int,
    padded_vocab: int,
    fp8: bool,
    fp8_head: bool,
    logits: int,
    strip: int = 0,
    chunk: int = 0,
    known: bool = True,
    granularity: str = "tensor",
    weights: str | None = None,
    states: str | None = None,
    turns: bool = True,
) -> tuple[Held, ...]:
    """Return the bytes held at the peak of a step with fused blocks, table AdamW and a chunked head, block_size tokens
    each.

    fp8: the layers' Linears compute in FP8; else in bf16, where a gated activation is recomputed, not saved. known:
    scales are known beforehand (delayed scaling): any activation is recomputed, and the optimizer writes FP8 weights.
    Otherwise the FP8 activation is saved and, besides bf16 weights, what the backward pass reads of them. granularity:
    what shares a scale; a tensor's one scale is not counted. turns: large models (ONCE) with known scales hold FP8
    weights in one layout, qkv and proj save no inputs, and a tied FP8 head has no bf16 table.
    logits: rows of logits made at a time; in bf16 they become their own gradient. fp8_head: the gradient is kept for dx
    of `strip` rows, for dW of `chunk` rows. The only parameter gradient is, in bf16, the head's. weights, states: as in
    `step`.
    """
    s = config.shape
    n, layers = batch * s.length, s.layers
    vectors = layers * s.vectors + s.last_vectors  # always float32
    matrices = parameters(config, padded_vocab) - vectors
    linear, head = s.weights * layers, padded_vocab * s.hidden
    tokens, attended = n * s.hidden, n * s.heads * s.head_dim
    statistics = (8 if s.norm == "layernorm" else 4) * n * (2 * layers + 1)  # mean and rstd, or rstd alone
    normed = n * (s.heads + s.groups) * (2 * s.head_dim + 4) if s.head_norms else 0  # normed heads and rstd
    size = 2 if granularity in IN_BF16 else 1
    once = turns and fp8 and known and linear >= ONCE
    if fp8:
        operands = size * (tokens if once else 2 * tokens + attended + (0 if known else n * s.ffn))
    else:
        operands = 2 * (2 * tokens + (0 if s.gated else n * s.ffn))
    copies = (1 if once else 2) * linear if weights is None or (fp8 and known) else 0
    copies += 2 * head if weights is None and not (once and fp8_head and s.tied) else 0
    copies += size * linear if fp8 and not known else 0  # beside the bf16 copy
    wide = 4 if weights is None else 2  # the stream's bytes an element
    scales, scales_of_weights = _scales(s, n, granularity) if fp8 else (0, 0)
    return (
        Held(what="weights", bytes=round(BYTES[weights] * matrices) + 4 * vectors),
        Held(what="AdamW's moments", bytes=round(2 * BYTES[states] * matrices) + 8 * vectors),
        # In bf16, or in FP8 in both layouts.
        Held(what="weights for GEMMs", bytes=copies + layers * scales_of_weights),
        # The embedding's output; the stream after each block; attention's output before its MLP.
        Held(what="residual stream", bytes=wide * tokens + layers * (wide + 2) * tokens + statistics),
        # q, k, v, the output, and the logsumexp of each row and head
        Held(what="attention", bytes=layers * (2 * (n * s.qkv + attended) + 4 * n * s.heads + normed)),
        Held(what="the activation's input", bytes=layers * 2 * n * s.ffn * (2 if s.gated else 1)),
        # The Linears' inputs: transposed in FP8; in bf16 all but attention's output.
        Held(what="operands of weight gradients", bytes=layers * (operands + scales)),
        Held(what="head: hidden states and their gradient", bytes=(wide + 4) * tokens),
        Held(what="head: operands", bytes=2 * (tokens + head) if fp8_head else 2 * tokens),
        Held(
            what="head: logits and their gradients",
            bytes=padded_vocab * (2 * logits + (strip + chunk) * fp8_head),
        ),
        Held(what="head: its weight's gradient", bytes=0 if fp8_head else 4 * head),
    )


def _scales(s: Shape, n: int, granularity: str) -> tuple[int, int]:
    """Return the bytes of scales that the backward pass reads: of a layer's inputs (n tokens), and of its weights."""
    if granularity == "tensor" or granularity in IN_BF16:
        return 0, 0
    if granularity == "row":
        return (4 * sum(read for read, _ in s.products),) * 2
    blocks = sum(-(-read // BLOCK) * -(-made // BLOCK) for read, made in s.products)
    return 4 * -(-n // BLOCK) * sum(read for read, _ in s.products), 4 * blocks
