"""What one training step of models.zoo.gpt, and a pass of the quickstart's layer, must at least compute and move. No torch.

Each fused pass over a tensor reads its inputs and writes its outputs once; parameters, optimizer states and the residual
stream are float32, as under autocast, all else bf16 or, where a GEMM of a recipe reads it, FP8 in two layouts (two bytes an
element as well). A GEMM's own operands are left out: at these sizes they hide behind its FLOP.
N = batch x block tokens, C = n_embd, L = n_layer, T = block, Vp = padded vocabulary, P = parameters.
"""

from dataclasses import dataclass

from te_bench.models.configs import GPTConfig

GEMM, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER = "GEMM", "attention", "loss", "elementwise", "optimizer"
WEIGHTS = "weights"


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


def parameters(config: GPTConfig, padded_vocab: int) -> int:
    """Elements of all weights, the tied head's once."""
    c = config.n_embd
    biases = 11 * c if config.bias else 0  # 3C + C + 4C + C, and C for each of two norms
    return (
        padded_vocab * c
        + config.block_size * c
        + config.n_layer * (12 * c * c + 2 * c + biases)
        + c * (1 + config.bias)
    )


def step(
    config: GPTConfig, *, batch: int, padded_vocab: int, fp8: bool, fp8_head: bool, clipped: bool
) -> tuple[Cost, ...]:
    """The least of a forward and backward pass with one update, block_size tokens a sequence.

    fp8: the layers' Linears compute in FP8; fp8_head: so does the head; clipped: gradients are, by their norm. Causal
    attention is bf16, with 2.5 times the forward pass's FLOP in the backward pass, where it is computed again.
    """
    n, c, layers = batch * config.block_size, config.n_embd, config.n_layer
    linears, head = 6 * n * 12 * c * c * layers, 6 * n * c * padded_vocab
    weights = 12 * c * c * layers + c * padded_vocab  # those that a GEMM reads in half precision or FP8
    in_fp8 = linears * fp8 + head * fp8_head
    return (
        Cost(kind=GEMM, bf16_flop=linears + head - in_fp8, fp8_flop=in_fp8),
        Cost(kind=ATTENTION, bf16_flop=(2 + 5) * n * config.block_size * c * layers),
        Cost(kind=LOSS, bytes=4 * n * padded_vocab),  # logits read once, their gradient written once
        Cost(kind=ELEMENTWISE, bytes=_elementwise(config, n, fp8)),
        # weight, gradient and both moments read, all but the gradient written; the gradient's norm; the copies for GEMMs
        Cost(kind=OPTIMIZER, bytes=(16 + 12 + 4 * clipped) * parameters(config, padded_vocab) + 2 * weights),
    )


def _elementwise(config: GPTConfig, n: int, fp8: bool) -> int:
    c, layers = config.n_embd, config.n_layer
    norms = (2 * layers + 1) * (4 + 2 + 4 + 2)  # residual stream and branch read, their sum and its norm written
    norms_backward = 2 * layers * (2 + 4 + 4 + 4) + 10  # gradients of norm and stream and the stream read, one written
    branches = 2 * layers * 2  # the stream's gradient, written once more, rounded for the branch's last GEMM
    attention = layers * ((2 + 2) + 3 * (2 + 2)) if fp8 else 0  # its output, and the gradients of q, k and v, quantized
    # In bf16 it and its slope leave with the GEMMs beside them, whose operands hide behind their FLOP.
    gelu = 4 * layers * ((2 + 2) + (2 + 2 + 2)) if fp8 else 0
    embedding = (4 + 4) + (4 + 4 + 4)
    return n * c * (norms + norms_backward + branches + attention + gelu + embedding)


def layer(
    *, hidden: int, ffn: int, sequence: int, batch: int, fp8: bool, causal: bool = True, mlp: bool = False
) -> tuple[Cost, ...]:
    """The least of a forward and backward pass of a layer with 4 hidden^2 + 2 hidden ffn weights, all bf16 but its GEMMs.

    Gradients are added to those that are there, as the quickstart has it, and weights cast anew. mlp: the second norm and
    the MLP alone, without a residual. With a GELU; the input needs no gradient beyond that of its norm.
    """
    n = sequence * batch
    weights = 2 * hidden * ffn + (0 if mlp else 4 * hidden**2)
    cast = (2 + 2) * fp8  # bf16 read, FP8 written in both layouts
    norm, norm_backward, added = 2 + 2, 2 + 2 + 2, 2 + 2  # added: a branch read, the sum written
    if mlp:
        stream = norm + norm_backward + cast  # that of the output's gradient
    else:
        second = norm + added + norm_backward + 2
        # Cast: attention's output, the gradients of the output, of the stream before the MLP and of q, k and v.
        stream = norm + norm_backward + second + (2 + added) + (1 + 1 + 1 + 3) * cast
    gelu = (2 + 2) + (2 + 2 + 2) if fp8 else 0
    flop = 6 * n * weights
    costs = (
        Cost(kind=GEMM, bf16_flop=0 if fp8 else flop, fp8_flop=flop if fp8 else 0),
        Cost(kind=ATTENTION, bf16_flop=(4 + 10) * n * sequence * hidden // (2 if causal else 1)),
        Cost(kind=ELEMENTWISE, bytes=n * (hidden * stream + ffn * gelu)),
        Cost(kind=WEIGHTS, bytes=weights * (cast + (2 + 2 + 2))),
    )
    return tuple(cost for cost in costs if not (mlp and cost.kind == ATTENTION))


def memory(
    config: GPTConfig,
    *,
    batch: int,
    padded_vocab: int,
    fp8: bool,
    fp8_head: bool,
    logits: int,
    strip: int = 0,
    chunk: int = 0,
) -> tuple[Held, ...]:
    """What a step of fused blocks, table AdamW and a head in chunks holds at its peak, block_size tokens a sequence.

    fp8: the layers' Linears compute in FP8 with scales known beforehand, so that GELU's output is made again; else in bf16.
    logits: rows of them that the head makes at a time, which in bf16 become their own gradient; fp8_head: that is kept for
    dx of `strip` rows and for dW of `chunk` rows. No gradient of a parameter is there yet but, in bf16, the head's.
    """
    n, c, layers = batch * config.block_size, config.n_embd, config.n_layer
    held = parameters(config, padded_vocab)
    linear, head = 12 * c * c * layers, padded_vocab * c
    tokens = n * c
    statistics = 8 * n * (2 * layers + 1)  # mean and rstd
    return (
        Held(what="weights", bytes=4 * held),
        Held(what="AdamW's moments", bytes=8 * held),
        Held(what="weights for GEMMs", bytes=2 * (linear + head)),  # in bf16, or in FP8 in both layouts
        # What the embedding made; then after each block the stream, and before its MLP what attention added.
        Held(what="residual stream", bytes=4 * tokens + layers * (4 + 2) * tokens + statistics),
        # q, k, v, the output, and a logarithm for each row and head
        Held(what="attention", bytes=layers * ((3 + 1) * 2 * tokens + 4 * n * config.n_head)),
        Held(what="GELU's input", bytes=layers * 2 * 4 * tokens),
        # In FP8, transposed, what the three Linears before GELU read; in bf16 what all read but attention's output.
        Held(what="operands of weight gradients", bytes=layers * tokens * (3 if fp8 else 2 + 2 + 2 * 4)),
        Held(what="head: hidden states and their gradient", bytes=(4 + 4) * tokens),
        Held(what="head: operands", bytes=2 * (tokens + head) if fp8_head else 2 * tokens),
        Held(
            what="head: logits and their gradients",
            bytes=padded_vocab * (2 * logits + (strip + chunk) * fp8_head),
        ),
        Held(what="head: its weight's gradient", bytes=0 if fp8_head else 4 * head),
    )
