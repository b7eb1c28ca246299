"""Report attention alone: seconds of both passes, the fastest backend of each shape, and where to scale q."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_bench.kernels.attention import in_fp8
from te_bench.reports.analysis.measures import (
    Ratio,
    finite,
    geometric_mean,
    numbers,
    of_processes,
    paired_ratio,
    seconds_by_seed,
)
from te_bench.reports.analysis.naming import kernel_name
from te_bench.reports.analysis.ranking import FastestByShape, fastest_by_shape, rank_times
from te_bench.reports.analysis.rows import Configuration, Group, grouped


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTime:
    """Attention timed alone: seconds and FLOP/s of the forward and the backward pass, joules of both."""

    configuration: Configuration
    forward_s: float | None = None
    backward_s: float | None = None
    both_s: float | None = None
    forward_flop_per_s: float | None = None
    backward_flop_per_s: float | None = None
    energy_j: float | None = None
    #: Speed-ups over the peer: forward, backward, both.
    speedups: Mapping[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """The attention to take for one shape, forward and backward together.

    times: those of both passes, in their Ranking's order. best: how many are not distinguished from the first, with it;
    0 if single runs alone compare them. over_next: how many times as fast as the second the first is.
    """

    times: tuple[AttentionTime, ...]
    best: int
    over_next: Ratio | None

    @property
    def fp8(self) -> bool:
        return in_fp8(self.times[0].configuration.trial.attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingErrors:
    """The largest relative error against fp64 of each draw, with q scaled before or after QK^T, and of SDPA."""

    configuration: Configuration
    before: tuple[float, ...]
    after: tuple[float, ...]
    sdpa: tuple[float, ...]
    allclose: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTimes:
    """A group's times of attention alone; `peer`: the backend that others are compared with."""

    times: tuple[AttentionTime, ...]
    peer: str | None
    choices: tuple[AttentionChoice, ...]
    fastest: FastestByShape


#: The timed samples of a record of attention.
PASSES = ("forward_s", "backward_s")
#: Other projects' attention that te-bench's is compared with.
PEERS = ("cudnn", "flash", "math")


def attention_peer(group: Group) -> str | None:
    """Return the one of PEERS with the most configurations in a group, the first of equals; None if there is none."""
    there = [configuration.trial.attention for configuration in group.of("attention") if configuration.ok]
    return max((name for name in PEERS if name in there), key=there.count, default=None)


def attention_times(group: Group) -> AttentionTimes:
    """Return the times of attention, grouped by shape, in the plan's order."""
    configurations, peer = _by_shape(group.of("attention")), attention_peer(group)
    times = tuple(_time(configuration, configurations, peer) for configuration in configurations)
    choices = _choices(times)
    named = [([kernel_name(time.configuration.trial.attention) for time in one.times], one.best) for one in choices]
    return AttentionTimes(times=times, peer=peer, choices=choices, fastest=fastest_by_shape(named))


def _time(configuration: Configuration, configurations: Sequence[Configuration], peer: str | None) -> AttentionTime:
    forward, backward = (of_processes(configuration.ok, sample) for sample in PASSES)
    both = geometric_mean(list(seconds_by_seed(configuration, *PASSES).values()))
    work: Mapping[str, Any] = configuration.ok[0].work if configuration.ok else {}
    same = dataclasses.replace(configuration.trial, attention=peer or "", seed=0)
    peers = (other for other in configurations if dataclasses.replace(other.trial, seed=0) == same)
    return AttentionTime(
        configuration=configuration,
        forward_s=forward,
        backward_s=backward,
        both_s=both.value if both else None,
        forward_flop_per_s=_rate(work.get("forward_flop"), forward),
        backward_flop_per_s=_rate(work.get("backward_flop"), backward),
        energy_j=of_processes(configuration.ok, "energy_j"),
        speedups=_speedups(next(peers, None), configuration),
    )


def _speedups(peer: Configuration | None, configuration: Configuration) -> dict[str, Ratio]:
    """Return the peer's seconds over these, paired by run and seed: forward, backward and both; {} for the peer itself."""
    if peer is None or peer.id == configuration.id:
        return {}
    passes = {"forward": PASSES[:1], "backward": PASSES[1:], "both": PASSES}
    ratios = {way: paired_ratio(peer, configuration, *samples) for way, samples in passes.items()}
    return {way: ratio for way, ratio in ratios.items() if ratio is not None}


def _choices(times: Sequence[AttentionTime]) -> tuple[AttentionChoice, ...]:
    """Return the choice among the kernels that were timed in both passes, for each setting of all else.

    Attention in FP8 is compared with itself alone, because its numbers differ.
    """

    def alike(time: AttentionTime) -> tuple[str, bool]:
        trial = time.configuration.trial
        return dataclasses.replace(trial, attention="", seed=0).id, in_fp8(trial.attention)

    timed = sorted((time for time in times if time.both_s), key=lambda time: time.both_s or 0.0)
    together = grouped(timed, alike)
    return tuple(_choice(together[key]) for key in dict.fromkeys(map(alike, times)) if key in together)


def _choice(times: Sequence[AttentionTime]) -> AttentionChoice:
    ranking = rank_times([time.configuration for time in times], *PASSES)
    ranked = tuple(times[place] for place in ranking.order)
    over_next = paired_ratio(ranked[1].configuration, ranked[0].configuration, *PASSES) if ranked[1:] else None
    return AttentionChoice(times=ranked, best=len(ranking.best), over_next=over_next)


def _rate(flop: object, seconds: float | None) -> float | None:
    amount = finite(flop)
    return amount / seconds if amount and seconds else None


def _by_shape(configurations: Sequence[Configuration]) -> list[Configuration]:
    shapes = list(dict.fromkeys(configuration.shape for configuration in configurations))
    return sorted(configurations, key=lambda one: shapes.index(one.shape))


def scaling_errors(group: Group) -> tuple[ScalingErrors, ...]:
    """Return the errors of the attention_numerics configurations, each with the draws of all its repetitions."""
    return tuple(map(_scaling_errors, _by_shape(group.of("attention_numerics"))))


def _scaling_errors(configuration: Configuration) -> ScalingErrors:
    before, after, sdpa = (
        tuple(value for record in configuration.ok for value in numbers(record.samples.get(f"error_{name}")))
        for name in ("scale_before", "scale_after", "sdpa")
    )
    told = [bool(one) for record in configuration.ok if (one := record.check.get("allclose")) is not None]
    allclose = all(told) if told else None
    return ScalingErrors(configuration=configuration, before=before, after=after, sdpa=sdpa, allclose=allclose)
