"""Compute each training step's and layer's seconds, speed-up over the baseline, throughput, MFU and memory."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from te_bench.experiments import peaks
from te_bench.kernels.gemm import BLOCK_SCALED_KERNEL
from te_bench.reports.analysis.measures import (
    Ratio,
    finite,
    highest,
    numbers,
    of_processes,
    quantile,
    seconds_of,
    speedup,
)
from te_bench.reports.analysis.rows import Configuration

OWN_GRAPHS = "compile-reduce-overhead"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """The figures of a training step or a layer's iteration: throughput in 1/s, energy in joules, memory in bytes."""

    configuration: Configuration
    is_baseline: bool
    #: The baseline's seconds over the speed-up; without a baseline, the geometric mean of the processes' medians.
    latency_s: float | None = None
    low_s: float | None = None  # 5th and 95th percentile of all timed steps
    high_s: float | None = None
    speedup: Ratio | None = None
    energy_j: float | None = None
    energy_per_token: float | None = None
    tokens_per_s: float | None = None
    flop_per_s: float | None = None
    mfu: float | None = None
    mfu_peak: str | None = None  # the precision whose peak the MFU is a fraction of
    peak_allocated: float | None = None
    peak_reserved: float | None = None
    peak_rss: float | None = None


def measured_steps(
    configurations: Iterable[Configuration], baseline: Configuration | None, gpu: str | None
) -> tuple[MeasuredStep, ...]:
    """Return the configurations' figures, fastest first, then the unmeasured ones in the given order."""
    found = [_measured(configuration, baseline, gpu) for configuration in configurations]
    return tuple(sorted(found, key=lambda step: math.inf if step.latency_s is None else step.latency_s))


def emulates_blocks(configuration: Configuration) -> bool:
    """Return whether Linears were cast to MXFP8 or NVFP4 and multiplied in bf16; no GPU's MXFP8 time can be read off."""
    return any(
        record.work.get("ran", {}).get("block_format_casts") and BLOCK_SCALED_KERNEL not in record.kernels
        for record in configuration.ok
    )


def _measured(configuration: Configuration, baseline: Configuration | None, gpu: str | None) -> MeasuredStep:
    is_baseline = baseline is not None and configuration.id == baseline.id
    latency, ratio = of_processes(configuration.ok, "latency_s"), speedup(baseline, configuration) if baseline else None
    if not latency:
        return MeasuredStep(configuration=configuration, is_baseline=is_baseline)
    if ratio and baseline and not is_baseline:  # so that time and speed-up agree if seeds are missing
        latency = (of_processes(baseline.ok, "latency_s") or math.nan) / ratio.value
    steps = [step for record in configuration.ok for step in seconds_of(record, "latency_s")]
    tokens, flop = (finite(configuration.ok[0].work.get(key)) for key in ("tokens", "flop"))
    reached, joules = flop / latency if flop else None, of_processes(configuration.ok, "energy_j")
    of_peak = peak_precision(configuration)
    peak = peaks.peak(gpu, of_peak)
    if peak is not None:
        peak *= int(configuration.trial.problem.get("world") or 1)  # of all its GPUs
    return MeasuredStep(
        configuration=configuration,
        is_baseline=is_baseline,
        latency_s=latency,
        low_s=quantile(steps, 0.05),
        high_s=quantile(steps, 0.95),
        speedup=ratio,
        energy_j=joules,
        energy_per_token=joules / tokens if joules and tokens else None,
        tokens_per_s=tokens / latency if tokens else None,
        flop_per_s=reached,
        mfu=reached / peak if reached and peak else None,
        mfu_peak=of_peak if reached and peak else None,
        # torch's own graphs allocate nothing in a replay, so early records hold no peak of theirs.
        peak_allocated=None if configuration.trial.mode == OWN_GRAPHS else _peak(configuration, "peak_allocated_bytes"),
        peak_reserved=_peak(configuration, "peak_reserved_bytes"),
        peak_rss=_peak(configuration, "peak_rss_bytes"),
    )


def peak_precision(configuration: Configuration) -> str:
    """Return the precision whose peak an MFU is a fraction of.

    For an FP8 step it is bf16: part of its work is in bf16, so neither peak alone gives its ideal time.
    For fp32 it is TF32 if the problem allowed TF32 ("tf32": true).
    """
    trial = configuration.trial
    if trial.precision == "fp8":
        return "bf16"
    return "tf32" if trial.precision == "fp32" and trial.problem.get("tf32") else trial.precision


def _peak(configuration: Configuration, sample: str) -> float | None:
    return highest(value for record in configuration.ok for value in numbers(record.samples.get(sample)))
