"""Compare steps over several GPUs with the same step on one: tokens a second of each GPU, efficiency, a rank's memory."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench.experiments.problems import world_of
from te_bench.experiments.scaling import layout, one_gpu, shapes
from te_bench.experiments.scaling.predict import predict
from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import Ratio, finite, median, numbers, of_processes, paired_ratio
from te_bench.reports.analysis.naming import TE_BENCH, rival_of
from te_bench.reports.analysis.rows import Configuration, Group

#: The kinds of a rank's memory, as records name them.
KINDS = ("weights", "gradients", "states", "fp8_copies", "fp8_operands")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledStep:
    """A step over `world` GPUs: throughput of one GPU in 1/s; seconds, joules and bytes."""

    configuration: Configuration
    world: int
    latency_s: float | None = None
    tokens_per_s: float | None = None
    efficiency: Ratio | None = None  # a GPU's throughput over that of the same step on one GPU
    predicted_s: float | None = None  # by `plan scaling`, from the same step on one GPU
    # Seconds of one step, mean over ranks (instruments.communication).
    compute_s: float | None = None
    collectives_s: float | None = None
    exposed_s: float | None = None
    waiting_s: float | None = None  # None if collectives_s and exposed_s include it
    energy_per_token: float | None = None  # of all GPUs
    busbw: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)  # of the rank with the highest peak, by KINDS and "peak"

    @property
    def parallel(self) -> str | None:
        """The kind of parallelism; None on one GPU."""
        mode = self.configuration.trial.problem.get("parallel")
        return mode if isinstance(mode, str) and self.world > 1 else None

    @property
    def project(self) -> str:
        """The project that the step belongs to."""
        return rival_of(self.configuration.trial) or TE_BENCH

    @property
    def sequences(self) -> float | None:
        """Sequences of each rank."""
        batch = finite(self.configuration.trial.problem.get("batch"))
        return None if batch is None else batch / self.world

    @property
    def idle_s(self) -> float | None:
        """Seconds of a step in which a GPU neither computes nor sends: it waits for its host's launches or another rank."""
        if self.latency_s is None or self.compute_s is None or self.exposed_s is None:
            return None
        return max(0.0, self.latency_s - self.compute_s - self.exposed_s)

    @property
    def rest(self) -> float | None:
        """Bytes of the peak that belong to none of KINDS."""
        peak = self.memory.get("peak")
        return None if peak is None else peak - sum(self.memory.get(kind, 0.0) for kind in KINDS)


def scaled_steps(group: Group) -> tuple[ScaledStep, ...]:
    """Return the steps as planned, those on one GPU first."""
    configurations = group.of("scaling")
    alone = {_work(one): one for one in configurations if world_of(one.trial) == 1}
    found = [_scaled(one, alone.get(_work(one))) for one in configurations]
    return tuple(sorted(found, key=lambda step: step.world))


def _work(configuration: Configuration) -> str:
    """Return a key of the step without how it is divided over GPUs: all settings, and each rank's sequences."""
    trial, world = configuration.trial, world_of(configuration.trial)
    divided = ("parallel", "world", "sequence_parallel", "overlap", "batch")
    problem = {key: value for key, value in trial.problem.items() if key not in divided}
    batch = finite(trial.problem.get("batch"))
    each = None if batch is None else batch / world
    return str((trial.attention, trial.precision, trial.recipe, trial.mode, each, sorted(problem.items())))


def _scaled(configuration: Configuration, alone: Configuration | None) -> ScaledStep:
    world, records = world_of(configuration.trial), configuration.ok
    latency = of_processes(records, "latency_s")
    if not latency:
        return ScaledStep(configuration=configuration, world=world)
    tokens = finite(records[0].work.get("tokens"))
    joules = of_processes(records, "energy_j")
    links = [record.work.get("interconnect") for record in records]
    return ScaledStep(
        configuration=configuration,
        world=world,
        latency_s=latency,
        tokens_per_s=tokens / latency / world if tokens else None,
        efficiency=None if alone is None else _efficiency(alone, configuration),
        predicted_s=None if alone is None else _predicted(alone, configuration),
        compute_s=_mean(records, "compute_s"),
        collectives_s=_mean(records, "collectives_s"),
        exposed_s=_mean(records, "exposed_s"),
        waiting_s=_mean(records, "waiting_s"),
        energy_per_token=joules / tokens if joules and tokens else None,
        busbw=median(numbers([link.get("busbw") for link in links if isinstance(link, Mapping)])),
        memory=_memory(records),
    )


def _efficiency(alone: Configuration, configuration: Configuration) -> Ratio | None:
    """Return the time on one GPU over that on all: each rank has as many sequences as the one GPU."""
    if configuration.id == alone.id:
        return Ratio(value=1.0, n=len(alone.ok))
    return paired_ratio(alone, configuration, "latency_s")


def _predicted(alone: Configuration, configuration: Configuration) -> float | None:
    """Return the step's expected seconds; None if the model of `plan scaling` does not cover the step."""
    trial, world = configuration.trial, world_of(configuration.trial)
    problem, seconds = trial.problem, of_processes(alone.ok, "latency_s")
    name, mode, batch, tokens = (problem.get(key) for key in ("model", "parallel", "batch", "block"))
    if world == 1 or not seconds or trial.device != "cuda" or not isinstance(batch, int) or not isinstance(tokens, int):
        return None
    if batch < world or tokens < 1:
        return None
    if name not in shapes.known() or mode not in layout.MODES or trial.precision not in layout.PRECISIONS:
        return None
    over = layout.Layout(mode=mode, world=world, gpus_per_node=world, link=math.inf, tp=world if mode == "tp" else 1)
    asked: dict[str, Any] = {"batch": batch // over.copies, "precision": trial.precision}
    one = one_gpu.Measured(model=name, tokens=tokens, seconds=seconds, how="", **(asked | {"batch": batch // world}))
    work = layout.Work(config=shapes.model(name, tokens), **asked)
    try:
        return predict(work, over, one.rate, math.inf).seconds
    except ValueError:  # the time on one GPU is impossible
        return None


def _ranks(record: Record) -> list[Mapping[str, Any]]:
    ranks = record.work.get("ranks")
    return [rank for rank in ranks if isinstance(rank, Mapping)] if isinstance(ranks, list) else []


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is None or there are none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _mean(records: Iterable[Record], name: str) -> float | None:
    """Return the mean over ranks, and its median over repetitions."""
    means = []
    for record in records:
        values = [finite(rank.get(name)) for rank in _ranks(record)]
        total = _sum(values)
        means += [] if total is None else [total / len(values)]
    return median(means)


def _memory(records: Iterable[Record]) -> dict[str, float]:
    ledgers = []
    for rank in (rank for record in records for rank in _ranks(record)):
        memory = rank.get("memory")
        if isinstance(memory, Mapping):
            ledgers.append({kind: held for kind in (*KINDS, "peak") if (held := finite(memory.get(kind))) is not None})
    return max(ledgers, key=lambda one: one.get("peak", sum(one.values())), default={})
