"""Records to numbers: medians, ratios with intervals, throughput, MFU. A value that was not measured is None."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import stdtrit

from te_bench.experiments.spec import Record
from te_bench.kernels.attention import in_fp8
from te_bench.reports.analysis import hardware
from te_bench.reports.analysis.rows import Cell, Group

CONFIDENCE = 0.95
LONGEST = 1e9  # seconds: 30 years; a time beyond is no measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Geometric mean of n paired ratios with its 95 % t-interval on the logarithms; no interval below two pairs."""

    value: float
    n: int
    low: float | None = None
    high: float | None = None


OWN_GRAPHS = "compile-reduce-overhead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A cell of train_step or layer: seconds per step, speed-up over the baseline, throughput in 1/s, memory in bytes."""

    cell: Cell
    is_baseline: bool
    latency_s: float | None = (
        None  # the baseline's over the speed-up; without one, geometric mean of the processes' medians
    )
    low_s: float | None = None  # 5th and 95th percentile of all timed steps
    high_s: float | None = None
    speedup: Ratio | None = None
    tokens_per_s: float | None = None
    flop_per_s: float | None = None
    mfu: float | None = None
    mfu_peak: str | None = None  # the precision whose peak the MFU is a fraction of
    peak_allocated: float | None = None
    peak_reserved: float | None = None
    peak_rss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRung:
    """A cell of attention: seconds and FLOP/s of the forward and the backward pass alone."""

    cell: Cell
    forward_s: float | None = None
    backward_s: float | None = None
    forward_flop_per_s: float | None = None
    backward_flop_per_s: float | None = None
    #: How many times as fast as the peer: forward, backward, both.
    over: Mapping[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Largest relative error against fp64 of each draw, q scaled before or after QK^T, and of SDPA."""

    cell: Cell
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    sdpa: tuple[float, ...] = ()
    allclose: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBatch:
    """A cell of max_batch: the largest batch that fits, its peak memory in bytes, and the smallest that did not fit."""

    cell: Cell
    max_batch: float | None = None
    peak_allocated: float | None = None
    first_failed: float | None = None
    limit_gib: float | None = None
    tries: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """The quantity of a cell that came closest to its limit, or went furthest over it, among all its repetitions."""

    cell: Cell
    quantity: str | None = None
    error: float | None = None
    limit: float | None = None
    ratio: float | None = None  # error / limit: above 1 fails
    reference: str | None = None


def numbers(values: object) -> list[float]:
    """The finite numbers among recorded values; what was not measured (None, a missing key) drops out."""
    if not isinstance(values, Iterable):
        return []
    return [number for number in map(finite, values) if number is not None]


def seconds_of(record: Record, sample: str) -> list[float]:
    """The times among a record's samples of a kind: above 0, and no longer than a machine runs."""
    return [time for time in numbers(record.samples.get(sample)) if 0 < time < LONGEST]


def step_seconds(samples: Mapping[str, object]) -> float | None:
    """Seconds per step of a training curve; None where it is too short to tell.

    The loss is read every few steps, and all steps of a read carry its time: from the end of the first read that is on the
    clock, for compiled steps are not, to the end of the last.
    """
    steps, times = (numbers(samples.get(name)) for name in ("step", "time_s"))
    first = next((time for time in times if time > 0), None)
    if first is None or len(steps) != len(times):
        return None
    end = max(i for i, time in enumerate(times) if time == first)
    return (times[-1] - first) / (steps[-1] - steps[end]) if steps[-1] > steps[end] else None


def finite(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def highest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation between order statistics, as numpy's default."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def geometric_mean(ratios: Sequence[float]) -> Ratio | None:
    """exp(mean(log r)) with the 95 % t-interval of the mean, n - 1 degrees of freedom; None for no ratios."""
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    centre, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return Ratio(value=math.exp(centre), n=n)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(logs) / math.sqrt(n)
    return Ratio(value=math.exp(centre), n=n, low=math.exp(centre - half), high=math.exp(centre + half))


def of_processes(records: Iterable[Record], sample: str) -> float | None:
    """Geometric mean over processes of each process's median of one kind of sample."""
    found = geometric_mean([value for record in records if (value := of_process(record, sample))])
    return found.value if found else None


def typical(records: Iterable[Record], sample: str) -> float | None:
    """Median over processes of each process's median: what one process that was disturbed does not move."""
    return median([value for record in records if (value := of_process(record, sample))])


def of_process(record: Record, sample: str) -> float | None:
    """Median of one process's times of a kind; None where it has none."""
    return median(seconds_of(record, sample))


def ladder(group: Group) -> tuple[Rung, ...]:
    """The train_step cells, fastest first, then those that were not measured in the plan's order."""
    cells = group.of("train_step")
    baseline = next((cell for cell in cells if cell.id == group.baseline), None)
    return rungs(cells, baseline, group.gpu)


def rungs(cells: Iterable[Cell], baseline: Cell | None, gpu: str | None) -> tuple[Rung, ...]:
    """The cells with their figures, fastest first, then those that were not measured in the order given."""
    found = [_rung(cell, baseline, gpu) for cell in cells]
    return tuple(sorted(found, key=lambda rung: math.inf if rung.latency_s is None else rung.latency_s))


def _rung(cell: Cell, baseline: Cell | None, gpu: str | None) -> Rung:
    is_baseline = baseline is not None and cell.id == baseline.id
    latency, ratio = of_processes(cell.ok, "latency_s"), speedup(baseline, cell) if baseline else None
    if not latency:
        return Rung(cell=cell, is_baseline=is_baseline)
    if ratio and baseline and not is_baseline:  # one estimate, whichever seeds are missing
        latency = (of_processes(baseline.ok, "latency_s") or math.nan) / ratio.value
    steps = [step for record in cell.ok for step in seconds_of(record, "latency_s")]
    tokens, flop = (finite(cell.ok[0].work.get(key)) for key in ("tokens", "flop"))
    reached = flop / latency if flop else None
    of_peak = peak_precision(cell)
    peak = hardware.peak(gpu, of_peak)
    return Rung(
        cell=cell,
        is_baseline=is_baseline,
        latency_s=latency,
        low_s=quantile(steps, 0.05),
        high_s=quantile(steps, 0.95),
        speedup=ratio,
        tokens_per_s=tokens / latency if tokens else None,
        flop_per_s=reached,
        mfu=reached / peak if reached and peak else None,
        mfu_peak=of_peak if reached and peak else None,
        # torch's own graphs allocate nothing when they are replayed: what early records have there is no peak.
        peak_allocated=None if cell.trial.mode == OWN_GRAPHS else _peak(cell, "peak_allocated_bytes"),
        peak_reserved=_peak(cell, "peak_reserved_bytes"),
        peak_rss=_peak(cell, "peak_rss_bytes"),
    )


def peak_precision(cell: Cell) -> str:
    """The precision whose peak an MFU is quoted against.

    An FP8 step does part of its work in BF16, so its ideal time is not that of either peak alone: quoted against BF16.
    fp32 is quoted against TF32 when the problem says that TF32 was allowed ("tf32": true).
    """
    trial = cell.trial
    if trial.precision == "fp8":
        return "bf16"
    return "tf32" if trial.precision == "fp32" and trial.problem.get("tf32") else trial.precision


def _peak(cell: Cell, sample: str) -> float | None:
    return highest(value for record in cell.ok for value in numbers(record.samples.get(sample)))


def speedup(baseline: Cell, cell: Cell) -> Ratio | None:
    """Baseline's median latency over the cell's, paired by run and seed; None when they do not do the same work.

    The baseline is 1 by definition and has no interval.
    """
    if cell.id == baseline.id:
        return Ratio(value=1.0, n=len(cell.ok))
    if not same_work(baseline, cell):
        return None
    ours, theirs = (seconds_by_seed(each, "latency_s") for each in (cell, baseline))
    return geometric_mean([theirs[pair] / ours[pair] for pair in ours if pair in theirs])


def same_work(one: Cell, other: Cell) -> bool:
    """Whether two cells' steps process as many tokens."""
    return len({record.work.get("tokens") for cell in (one, other) for record in cell.ok}) < 2


def seconds_by_seed(cell: Cell, *samples: str) -> dict[tuple[str, int], float]:
    """{(run, seed): the sum of a process's medians of these samples}, of the processes that have all of them."""
    found = {}
    for row in cell.rows:
        if row.record and row.outcome == "ok":
            medians = [of_process(row.record, sample) for sample in samples]
            if all(medians):
                found[row.run, row.trial.seed] = sum(value for value in medians if value)
    return found


#: What a record of attention was timed in.
PASSES = ("forward_s", "backward_s")
#: Attention that others ship, by which the rest is measured.
PEERS = ("cudnn", "flash", "math")


def attention_peer(group: Group) -> str | None:
    """The backend that a group's attention is compared with: the one of PEERS with most cells, the first of several."""
    there = [cell.trial.attention for cell in group.of("attention") if cell.ok]
    return max((name for name in PEERS if name in there), key=there.count, default=None)


def attention(group: Group) -> tuple[AttentionRung, ...]:
    """The attention cells, together by shape, in the plan's order."""
    rungs = []
    cells, peer = _by_shape(group.of("attention")), attention_peer(group)
    for cell in cells:
        forward, backward = (of_processes(cell.ok, f"{way}_s") for way in ("forward", "backward"))
        work: Mapping[str, Any] = cell.ok[0].work if cell.ok else {}
        same = dataclasses.replace(cell.trial, attention=peer or "", seed=0)
        peers = (other for other in cells if dataclasses.replace(other.trial, seed=0) == same)
        rungs.append(
            AttentionRung(
                cell=cell,
                forward_s=forward,
                backward_s=backward,
                forward_flop_per_s=_rate(work.get("forward_flop"), forward),
                backward_flop_per_s=_rate(work.get("backward_flop"), backward),
                over=_over(next(peers, None), cell),
            )
        )
    return tuple(rungs)


def attention_by_shape(group: Group) -> list[list[AttentionRung]]:
    """The kernels that were timed in both passes, together where all else is the same, the fastest first.

    Attention in FP8 stands apart from attention that is not: it computes with other numbers.
    """
    together: dict[tuple[str, bool], list[tuple[float, AttentionRung]]] = {}
    for rung in attention(group):
        seconds = list(seconds_by_seed(rung.cell, *PASSES).values())
        if total := geometric_mean(seconds):
            alike = dataclasses.replace(rung.cell.trial, attention="", seed=0).id, in_fp8(rung.cell.trial.attention)
            together.setdefault(alike, []).append((total.value, rung))
    return [[rung for _, rung in sorted(found, key=lambda item: item[0])] for found in together.values()]


def _over(peer: Cell | None, cell: Cell) -> dict[str, Ratio]:
    """The peer's seconds over the cell's, paired by run and seed: forward, backward and both. Nothing of the peer itself."""
    if peer is None or peer.id == cell.id:
        return {}
    found = {}
    for way, samples in {"forward": PASSES[:1], "backward": PASSES[1:], "both": PASSES}.items():
        ours, theirs = (seconds_by_seed(each, *samples) for each in (cell, peer))
        ratio = geometric_mean([theirs[pair] / ours[pair] for pair in ours if pair in theirs])
        if ratio is not None:
            found[way] = ratio
    return found


def _rate(flop: object, seconds: float | None) -> float | None:
    amount = finite(flop)
    return amount / seconds if amount and seconds else None


def _by_shape(cells: Sequence[Cell]) -> list[Cell]:
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    return sorted(cells, key=lambda cell: shapes.index(cell.shape))


def numerics(group: Group) -> tuple[Numerics, ...]:
    """The attention_numerics cells, the draws of all their repetitions together."""
    return tuple(
        Numerics(
            cell=cell,
            before=_draws(cell, "error_scale_before"),
            after=_draws(cell, "error_scale_after"),
            sdpa=_draws(cell, "error_sdpa"),
            allclose=_all([record.check.get("allclose") for record in cell.ok]),
        )
        for cell in _by_shape(group.of("attention_numerics"))
    )


def _draws(cell: Cell, sample: str) -> tuple[float, ...]:
    return tuple(value for record in cell.ok for value in numbers(record.samples.get(sample)))


def _all(answers: Sequence[object]) -> bool | None:
    known = [bool(answer) for answer in answers if answer is not None]
    return all(known) if known else None


def max_batch(group: Group) -> tuple[MaxBatch, ...]:
    """The max_batch cells, largest batch first; the smallest of a cell's repetitions counts, for it is what fits."""
    found = [_max_batch(cell) for cell in group.of("max_batch")]
    return tuple(sorted(found, key=lambda m: math.inf if m.max_batch is None else -m.max_batch))


def _max_batch(cell: Cell) -> MaxBatch:
    batches = [value for record in cell.ok for value in numbers(record.samples.get("max_batch"))]
    largest = min(batches, default=None)
    tries = [attempt for record in cell.ok for attempt in record.work.get("tries") or []]
    failed = [attempt.get("batch") for attempt in tries if not attempt.get("fits")]
    fitted = [a.get("peak_allocated_bytes") for a in tries if a.get("fits") and a.get("batch") == largest]
    return MaxBatch(
        cell=cell,
        max_batch=largest,
        peak_allocated=highest(numbers(fitted)),
        first_failed=min(numbers(failed), default=None),
        limit_gib=finite(cell.trial.problem.get("memory_limit_gib")),
        tries=len(tries),
    )


def errors(group: Group) -> tuple[Error, ...]:
    """Every cell that was checked, the one nearest to its limit first. Failed checks count too."""
    found = [_worst(cell) for cell in group.cells]
    known = [error for error in found if error is not None]
    return tuple(sorted(known, key=lambda error: -math.inf if error.ratio is None else -error.ratio))


def _worst(cell: Cell) -> Error | None:
    records = [row.record for row in cell.rows if row.record and row.record.check]
    found = [worst_quantity(cell, record.check) for record in records]
    return max((e for e in found if e), key=lambda e: math.inf if e.ratio is None else e.ratio, default=None)


def worst_quantity(cell: Cell, check: Mapping[str, Any]) -> Error | None:
    """The quantity of one check with the largest error / limit; one whose error is unknown is worse than any."""
    found = []
    for quantity in check.get("quantities") or []:
        error, limit = finite(quantity.get("error")), finite(quantity.get("limit"))
        known = error is not None and limit is not None
        ratio = None if not known or (limit == 0 and error) else 0.0 if not error else error / (limit or math.nan)
        found.append(
            Error(
                cell=cell,
                quantity=str(quantity.get("name")),
                error=error,
                limit=limit,
                ratio=ratio,
                reference=check.get("reference"),
            )
        )
    return max(found, key=lambda e: math.inf if e.ratio is None else e.ratio, default=None)
