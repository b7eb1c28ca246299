"""What one training step of a decoder must at least compute, move and hold. No torch.

Each fused pass over a tensor reads its inputs and writes its outputs once; parameters, optimizer states and the residual
stream are float32, as under autocast, or as is said; all else is bf16 or, where a GEMM of a recipe reads it, FP8 in two
layouts (two bytes an element as well). A GEMM's own operands are left out: at these sizes they hide behind its FLOP.
All comes from a configuration's `shape`, whatever its family: tied tables or two, positions learned or turned by, grouped
queries, gated activations, RMSNorm, biases.
"""

from dataclasses import dataclass

from te_bench.kernels.adamw import BLOCK
from te_bench.models.configs import DecoderConfig, Shape

#: Bytes an element of weights or moments, by their format; of FP8 moments BLOCK elements share a float32 scale.
BYTES = {None: 4.0, "bf16": 2.0, "fp8": 1 + 4 / BLOCK}

GEMM, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER = "GEMM", "attention", "loss", "elementwise", "optimizer"

#: Elements of a model's FP8 weights from which on each lasts in one layout, and dgrad turns it: a second layout of so many
#: takes 0.5 GiB.
ONCE = 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """FLOP in bf16 and in FP8, and bytes to and from memory, of all kernels of one kind in one step."""

    kind: str
    bf16_flop: int = 0
    fp8_flop: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of one kind of tensor while the head makes its gradients, which is where a step's memory is at its peak."""

    what: str
    bytes: int


def parameters(config: DecoderConfig, padded_vocab: int) -> int:
    """Elements of all weights, a tied head's once."""
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
    """The least of a forward and backward pass with one update, block_size tokens a sequence.

    fp8: the layers' Linears compute in FP8; fp8_head: so does the head; clipped: gradients are, by their norm. Causal
    attention is bf16, with 2.5 times the forward pass's FLOP in the backward pass, where it is computed again. weights and
    states: the formats of weights and moments, None for float32. A bf16 weight has a bf16 gradient, and no bf16 copy.
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
        # weight, gradient and both moments read, all but the gradient written; the gradient's norm; the copies for GEMMs
        Cost(kind=OPTIMIZER, bytes=round(update * parameters(config, padded_vocab)) + 2 * copied),
    )


NORM = 4 + 2 + 4 + 2  # residual stream and branch read, their sum and its norm written


def _layer_elementwise(s: Shape, fp8: bool) -> int:
    """Bytes a token of what a layer does between its GEMMs and its attention."""
    norms = 2 * (NORM + 2 + 4 + 4 + 4)  # back: gradients of norm and stream and the stream read, one written
    branches = 2 * 2  # the stream's gradient, written once more, rounded for the branch's last GEMM
    # Its output is cast, and the gradients of q, k and v.
    attention = (2 + 2) * (s.heads * s.head_dim + s.qkv) if fp8 else 0
    # In bf16 one without a gate and its slope leave with the GEMMs beside them, whose operands hide behind their FLOP.
    up = 2 if s.gated else 1
    activation = s.ffn * ((2 * up + 2) + (2 + 2 * up + 2 * up)) if fp8 or s.gated else 0
    return s.hidden * (norms + branches) + attention + _turned(s, fp8) + activation


def _turned(s: Shape, fp8: bool) -> int:
    """Bytes a token of queries and keys that turn, and of their gradients that turn back, in FP8 as they are cast."""
    return 0 if s.learned_positions else (2 + 2) * (s.heads + s.groups) * s.head_dim * (1 if fp8 else 2)


def _outer_elementwise(s: Shape) -> int:
    """Of the last norm and the embedding."""
    embedding = (4 + 4) + (4 + 4 + 4)
    return s.hidden * (NORM + 10 + embedding)


IN_BF16 = ("mxfp8", "nvfp4")  # granularities whose recipes keep bf16: they emulate
BLOCK = 128  # elements of a row that share a scale, and rows of a weight


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
    """What a step of fused blocks, table AdamW and a head in chunks holds at its peak, block_size tokens a sequence.

    fp8: the layers' Linears compute in FP8; else in bf16, where a gated activation is made again and not kept. known: with
    scales known beforehand, as delayed scaling's: any activation is made again, and the optimizer leaves weights in FP8.
    Otherwise the activation is kept in FP8, and beside weights in bf16 what the backward pass reads of them. granularity: a
    recipe's, what shares a scale. A tensor's one scale is not counted. turns: large models (ONCE) with scales known
    beforehand hold weights in FP8 once, qkv and proj keep nothing that they read, and a tied FP8 head reads no copy of its
    table, as in every step of one process that torch.compile does not compile.
    logits: rows of them that the head makes at a time, which in bf16 become their own gradient; fp8_head: that is kept for
    dx of `strip` rows and for dW of `chunk` rows. No gradient of a parameter is there yet but, in bf16, the head's.
    weights and states: as in `step`; of bf16 weights the residual stream is bf16, too.
    """
    s = config.shape
    n, layers = batch * s.length, s.layers
    vectors = layers * s.vectors + s.last_vectors  # in float32 whatever the others are
    matrices = parameters(config, padded_vocab) - vectors
    linear, head = s.weights * layers, padded_vocab * s.hidden
    tokens, attended = n * s.hidden, n * s.heads * s.head_dim
    statistics = (8 if s.norm == "layernorm" else 4) * n * (2 * layers + 1)  # mean and rstd, or rstd alone
    normed = n * (s.heads + s.groups) * (2 * s.head_dim + 4) if s.head_norms else 0  # what is normed, and rstd
    size = 2 if granularity in IN_BF16 else 1
    once = turns and fp8 and known and linear >= ONCE
    if fp8:
        operands = size * (tokens if once else 2 * tokens + attended + (0 if known else n * s.ffn))
    else:
        operands = 2 * (2 * tokens + (0 if s.gated else n * s.ffn))
    copies = (1 if once else 2) * linear if weights is None or (fp8 and known) else 0
    copies += 2 * head if weights is None and not (once and fp8_head and s.tied) else 0
    copies += size * linear if fp8 and not known else 0  # beside bf16
    wide = 4 if weights is None else 2  # the stream
    scales, scales_of_weights = _scales(s, n, granularity) if fp8 else (0, 0)
    return (
        Held(what="weights", bytes=round(BYTES[weights] * matrices) + 4 * vectors),
        Held(what="AdamW's moments", bytes=round(2 * BYTES[states] * matrices) + 8 * vectors),
        # In bf16, or in FP8 in both layouts.
        Held(what="weights for GEMMs", bytes=copies + layers * scales_of_weights),
        # What the embedding made; then after each block the stream, and before its MLP what attention added.
        Held(what="residual stream", bytes=wide * tokens + layers * (wide + 2) * tokens + statistics),
        # q, k, v, the output, and a logarithm for each row and head
        Held(what="attention", bytes=layers * (2 * (n * s.qkv + attended) + 4 * n * s.heads + normed)),
        Held(what="the activation's input", bytes=layers * 2 * n * s.ffn * (2 if s.gated else 1)),
        # In FP8, transposed, what the Linears read; in bf16 what all read but attention's output.
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
    """Bytes of the scales that the backward pass reads: of what a layer's Linears read of n tokens, and of their weights."""
    attended, up = s.heads * s.head_dim, s.ffn * (2 if s.gated else 1)
    products = ((s.hidden, s.qkv), (attended, s.hidden), (s.hidden, up), (s.ffn, s.hidden))
    if granularity == "tensor" or granularity in IN_BF16:
        return 0, 0
    if granularity == "row":
        return (4 * sum(read for read, _ in products),) * 2
    blocks = sum(-(-read // BLOCK) * -(-made // BLOCK) for read, made in products)
    return 4 * -(-n // BLOCK) * sum(read for read, _ in products), 4 * blocks
