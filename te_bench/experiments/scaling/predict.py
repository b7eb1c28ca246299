"""Predict a training step on many GPUs from the speed of one and the time of collectives. Pure calculation, no torch.

A step consists of its compute, the collectives that compute does not hide, a pipeline's bubble and the optimizer's update:
- FLOP: as in models/cost.py, 2 a weight and token forward, 4 backward; causal attention 2 and 5 (it is recomputed).
- Sharded weights (FSDP2): each layer is gathered before its forward and its backward pass, and its gradient is
  reduce-scattered. One layer is prefetched. Exposed are the first gather, the last reduce-scatter, and of each layer
  max(0, collectives - compute) (the prefetch is torch.distributed.fsdp's; the sum is te-bench's).
- DDP: buckets of 25 MiB (torch's bucket_cap_mb) are all-reduced during the backward pass; the token table's come last.
- Tensor parallelism with sequence parallelism: two all-gathers and two reduce-scatters a layer and pass (Korthikanti et
  al. 2022), all exposed. Recomputing "selective" repeats the gathers (torchtitan keeps the reduced outputs), "full" repeats
  all. Sliced (async TP), exposed are a slice of 1 / tp and what exceeds the products.
- Pipeline: (pp - 1) / (chunks * micro_batches) of a step idle (Narayanan et al. 2021), with evenly divided layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.experiments.scaling.collectives import GATHER, REDUCE, Collective, collective
from te_bench.experiments.scaling.layout import UPDATES, Layout, Rate, Work
from te_bench.models import cost

BUCKET = 25 * 2**20
#: Bytes per parameter of AdamW's update: float32 weight, gradient and moments are read, all but the gradient written.
UPDATE = 28
#: A step is bound by compute if compute takes at least this share of its time.
MOSTLY = 0.9
TOO_LITTLE = "memory"
#: The kinds of models/cost.py that a step keeps from a layer's forward to its backward pass.
KEPT = ("residual stream", "attention", "the activation's input", "operands of weight gradients")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One step on one layout; seconds and bytes of one rank. communication_s: of all collectives, hidden or not."""

    layout: Layout
    seconds: float
    tokens: int  # of all ranks together
    compute_s: float
    communication_s: float
    exposed_s: float
    bubble_s: float
    sent: float
    memory: Mapping[str, float]
    bound: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds / self.layout.world


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """One layer's forward or backward pass on one rank: its compute, and its collectives of tensor parallelism."""

    compute: float
    sent: Collective
    exposed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def predict(work: Work, layout: Layout, rate: Rate, memory: float) -> Prediction:
    """Predict the step on GPUs with so many bytes of memory."""
    s = work.config.shape
    forward, backward = _passes(work, layout, rate)
    head = 6 * work.tokens / layout.cp * s.hidden * s.vocab / rate.bf16 / layout.tp
    both = (forward.compute + backward.compute) * s.layers + head
    tensor, tensor_exposed = (
        (forward.sent + backward.sent).times(s.layers),
        (forward.exposed + backward.exposed) * s.layers,
    )
    idle = 1 + (layout.pp - 1) / (layout.chunks * work.micro_batches)
    many = work.micro_batches / layout.pp
    data, data_exposed = _data_parallel(work, layout, forward, backward)
    held = cost.parameters(work.config, s.vocab) / (layout.tp * layout.pp * layout.shards.ranks)
    compute = both * many + UPDATE * held / UPDATES
    exposed = tensor_exposed * many + data_exposed
    bubble = (both + tensor_exposed) * many * (idle - 1)
    seconds = compute + exposed + bubble
    all_of_it = tensor.times(many) + data
    kept = _memory(work, layout)
    others = {
        "bubble": bubble,
        "TP on NVLink": tensor_exposed * many,
        _bound_of(layout, data): data_exposed,
    }
    bound = "compute" if compute >= MOSTLY * seconds else max(others, key=lambda name: others[name])
    return Prediction(
        layout=layout,
        seconds=seconds,
        tokens=work.tokens * work.micro_batches * layout.copies,
        compute_s=compute,
        communication_s=all_of_it.seconds,
        exposed_s=exposed,
        bubble_s=bubble,
        sent=all_of_it.sent,
        memory=kept,
        bound=TOO_LITTLE if sum(kept.values()) > memory else bound,
    )


def _bound_of(layout: Layout, data: Collective) -> str:
    if data.latency > data.seconds / 2:
        return "latency"
    return "node links" if max(layout.shards.nodes, layout.replicas.nodes) > 1 else "NVLink"


def _passes(work: Work, layout: Layout, rate: Rate) -> tuple[_Pass, _Pass]:
    """Return a layer's forward and backward pass, for one micro-batch on one rank."""
    s = work.config.shape
    n = work.tokens / layout.cp
    of_linears = rate.fp8 if work.precision == "fp8" else rate.bf16
    linears = 2 * n * s.weights / layout.tp / of_linears
    attention = 2 * n * s.length * s.heads * s.head_dim / layout.tp / rate.bf16
    again = {"none": (0.0, 0.0), "selective": (0.5 * linears, 0.0), "full": (linears, attention)}[work.recompute]
    gathered = collective(GATHER, n * s.hidden * (1 if work.precision == "fp8" else 2), layout.tensor)
    scattered = collective(GATHER, n * s.hidden * 2, layout.tensor)
    once = (gathered + scattered).times(2)
    resent = {"none": Collective(), "selective": gathered.times(2), "full": once}[work.recompute]

    def of(products: float, others: float, sent: Collective) -> _Pass:
        exposed = sent.seconds
        if layout.sliced:
            exposed = min(exposed, exposed / layout.tp + max(0.0, exposed - products))
        return _Pass(compute=products + others, sent=sent, exposed=exposed)

    return of(linears, attention, once), of(2 * linears + again[0], 2.5 * attention + again[1], once + resent)


def _data_parallel(work: Work, layout: Layout, forward: _Pass, backward: _Pass) -> tuple[Collective, float]:
    """Return a step's collectives over copies of the model, and their exposed seconds."""
    s = work.config.shape
    layer, table = s.weights / layout.tp, s.hidden * s.vocab / layout.tp
    layers = s.layers / layout.pp
    tables = 1 if s.tied or layout.pp > 1 else 2  # in a pipeline the first stage holds one, the last the other
    if layout.mode == "ddp":
        rest = _buckets(4 * (layer * layers + table * (tables - 1)), layout)
        last = _buckets(4 * table, layout)
        return rest + last, last.seconds + max(0.0, rest.seconds - backward.seconds * layers)
    of_layer = 1 if work.precision == "fp8" else 2
    gather, gather_table = (collective(GATHER, size, layout.shards) for size in (of_layer * layer, 2 * table))
    reduce, reduce_table = (_reduced(work, layout, elements) for elements in (layer, table))
    # Pipeline stages keep the gathered weights, and reduce after the last micro-batch.
    times, gathers = (1, 1) if layout.pp > 1 else (work.micro_batches, 2)
    exposed = gather_table.seconds + reduce_table.seconds
    exposed += layers * max(0.0, gather.seconds - forward.seconds)
    again = gather.seconds if gathers == 2 else 0.0
    exposed += layers * max(0.0, again + reduce.seconds - backward.seconds)
    if tables == 2:
        exposed += max(0.0, gather_table.seconds - forward.seconds) + max(0.0, reduce_table.seconds - backward.seconds)
    sent = (gather.times(gathers) + reduce).times(layers) + (gather_table + reduce_table).times(tables)
    return sent.times(times), exposed * times


def _reduced(work: Work, layout: Layout, elements: float) -> Collective:
    """Return a gradient's reduce-scatter over shards, and a shard's all-reduce over replicas."""
    size = work.reduce_bytes * elements
    scattered = collective(GATHER, size, layout.shards)
    return scattered + collective(REDUCE, size / layout.shards.ranks, layout.replicas)


def _buckets(size: float, layout: Layout) -> Collective:
    number = math.ceil(size / BUCKET)
    return collective(REDUCE, size / number, layout.replicas).times(number) if number else Collective()


def _memory(work: Work, layout: Layout) -> dict[str, float]:
    """Estimate the bytes of a rank, without the allocator's waste and NCCL's buffers."""
    s = work.config.shape
    fp8 = work.precision == "fp8"
    parts = layout.tp * layout.pp
    held = cost.parameters(work.config, s.vocab) / parts
    layer, layers, table = s.weights / layout.tp, s.layers / layout.pp, s.hidden * s.vocab / layout.tp
    of_layer = 1 if fp8 else 2
    if layout.shards.ranks == 1 or layout.pp > 1:
        gathered = 2 * held  # half-precision copies of all weights that a rank uses
    else:
        gathered = max(2 * layer * of_layer, layer * of_layer + 2 * table) + work.reduce_bytes * max(layer, table)
    n = work.tokens / layout.cp / layout.tp
    every = cost.memory(
        work.config, batch=work.batch, padded_vocab=s.vocab, fp8=fp8, fp8_head=False, logits=1, turns=False
    )
    of_one = sum(kept.bytes for kept in every if kept.what in KEPT) / s.layers / layout.cp / layout.tp
    kept_layers = {"none": layers, "selective": layers / 2 + 1, "full": 1.0}[work.recompute]
    borders = 2 * n * s.hidden * layers if work.recompute != "none" else 0.0
    in_flight = min(work.micro_batches, layout.pp)
    return {
        "weights, gradients and states": 16 * held / layout.shards.ranks,
        "gathered": gathered,
        "activations": (of_one * kept_layers + borders) * in_flight,
        "logits": 6.0 * n * s.vocab,  # in half precision, and as float32 for the loss
    }
