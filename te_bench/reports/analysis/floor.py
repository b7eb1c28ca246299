"""Compare a training step's time by kind of kernel with its floor: its FLOP and bytes at this device's ceilings."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from te_bench.experiments.problems import TrainStepProblem
from te_bench.experiments.suite_trials import on_request
from te_bench.models import cost
from te_bench.models.configs import configs
from te_bench.models.cost import Cost
from te_bench.reports.analysis.layers import kernel_seconds
from te_bench.reports.analysis.measures import finite, numbers
from te_bench.reports.analysis.rows import Configuration, Group
from te_bench.reports.analysis.steps import MeasuredStep

#: Kinds by the names of kernels; the first match counts. Unmatched kernels are elementwise: Inductor's fused kernels,
#: norms, activations, casts, embeddings, and the driver's copies and fills.
KINDS: tuple[tuple[str, str], ...] = (
    (cost.ATTENTION, r"cudnn|sdpa|flash|fmha|attention"),
    (cost.OPTIMIZER, r"multi_tensor|adam|^(step|numbers|squares|norm)_kernel"),
    (
        cost.LOSS,
        r"^(rows|statistics|fp8|count|mean|scale)_kernel|cunn_SoftMax|^(?!.*layer_norm).*(log_softmax|nll_loss|cross_entropy)",
    ),
    (cost.GEMM, r"nvjet|gemm|xmma|cutlass|cublas|splitk|^scaled_kernel"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The byte/s of a copy and the FLOP/s of large GEMMs; fp8 is None if the device has no FP8 unit."""

    bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """The kernels of one kind: their FLOP and bytes, the seconds of these at the ceilings, and the measured seconds."""

    cost: Cost
    floor_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """A step's seconds by kind of kernel and by kernel, longest first, without the gaps between kernels."""

    step: MeasuredStep
    kinds: tuple[KindTime, ...]
    kernels: Mapping[str, float]

    @property
    def floor_s(self) -> float:
        return sum(kind.floor_s for kind in self.kinds)

    @property
    def measured_s(self) -> float:
        return sum(kind.measured_s for kind in self.kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """All measured steps whose kernels were timed, fastest first; none without ceilings."""

    ceilings: Ceilings | None
    breakdowns: tuple[Breakdown, ...] = ()

    @property
    def compared(self) -> list[Breakdown]:
        """The steps to show side by side: the baseline, and the fastest of each precision."""
        fastest: dict[str, Breakdown] = {}
        for found in self.breakdowns:
            fastest.setdefault(found.step.configuration.trial.precision, found)
        return [b for b in self.breakdowns if b.step.is_baseline or b in fastest.values()]


def ceilings(group: Group) -> Ceilings | None:
    """Return the ceilings by the fastest call in any of the group's processes; None if it measured none.

    The mean over seconds at the chip's power limit is no ceiling: a single kernel between others may be faster.
    """

    def rate(sample: str, work: str) -> float | None:
        found = [
            amount / min(seconds)
            for configuration in group.of("ceilings")
            for record in configuration.ok
            if (seconds := numbers(record.samples.get(sample))) and (amount := finite(record.work.get(work)))
        ]
        return max(found) if found else None

    copy, bf16 = rate("copy_s", "copy_bytes"), rate("gemm_bf16_s", "gemm_flop")
    if copy is None or bf16 is None:
        return None
    return Ceilings(bytes_per_s=copy, bf16_flop_per_s=bf16, fp8_flop_per_s=rate("gemm_fp8_s", "gemm_flop"))


def floor_of(group: Group, steps: Sequence[MeasuredStep]) -> Floor:
    """Return the floor of a group's steps, which come fastest first."""
    at = ceilings(group)
    if at is None:
        return Floor(ceilings=None)
    found = [_breakdown(step, at) for step in steps if step.latency_s is not None]
    return Floor(ceilings=at, breakdowns=tuple(breakdown for breakdown in found if breakdown is not None))


def _breakdown(step: MeasuredStep, at: Ceilings) -> Breakdown | None:
    kernels, costs = kernel_seconds(step.configuration), _costs(step.configuration)
    if not kernels or not costs or (at.fp8_flop_per_s is None and any(c.fp8_flop for c in costs)):
        return None
    seconds = dict.fromkeys((c.kind for c in costs), 0.0)
    for kernel, value in kernels.items():
        seconds[kind_of(kernel)] += value
    kinds = tuple(KindTime(cost=c, floor_s=_floor(c, at), measured_s=seconds[c.kind]) for c in costs)
    return Breakdown(step=step, kinds=kinds, kernels=kernels)


def _costs(configuration: Configuration) -> tuple[Cost, ...]:
    """Return what the trial's step must compute and move; () if no formula covers it.

    No formula covers a user's model, another precision, several ranks, or a recipe that computes more or less than the
    blocks' Linears in FP8.
    """
    trial = configuration.trial
    config, precision = configs().get(str(trial.problem.get("model"))), trial.precision
    if config is None or precision not in ("bf16", "fp8") or "world" in trial.problem or trial.recipe in on_request():
        return ()
    p = TrainStepProblem.of(trial)
    return cost.step(
        dataclasses.replace(config, block_size=p.block, vocab_size=p.vocab),
        batch=p.batch,
        padded_vocab=p.padded_vocab,
        fp8=precision == "fp8",
        fp8_head=p.head == "fp8",
        clipped=p.grad_clip != 0,
        weights=p.weights,
        states=p.states,
    )


def _floor(c: Cost, at: Ceilings) -> float:
    """Return the seconds of FLOP and bytes, added: each kernel of a kind is limited by one or the other."""
    return c.bf16_flop / at.bf16_flop_per_s + c.fp8_flop / (at.fp8_flop_per_s or 1.0) + c.bytes / at.bytes_per_s


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((name for name, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), cost.ELEMENTWISE)
