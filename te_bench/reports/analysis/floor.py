"""Where a training step's time goes, against the least that its FLOP and bytes would take at this device's ceilings."""

import dataclasses
import re
from dataclasses import dataclass

from te_bench.models import cost
from te_bench.models.configs import CONFIGS
from te_bench.models.cost import Cost
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.layers import kernels as kernels  # part of this module's interface
from te_bench.reports.analysis.measures import Rung
from te_bench.reports.analysis.rows import Cell, Group

#: Kinds by the names of kernels; the first that matches counts, and what has no pattern is elementwise: Inductor's fused
#: kernels, norms, activations, casts, embeddings, and the driver's copies and fills.
KINDS: tuple[tuple[str, str], ...] = (
    (cost.ATTENTION, r"cudnn|sdpa|flash|fmha|attention"),
    (cost.OPTIMIZER, r"multi_tensor|adam|^(step|squares|norm)_kernel"),
    (
        cost.LOSS,
        r"^(rows|statistics|fp8|count|mean|scale)_kernel|cunn_SoftMax|^(?!.*layer_norm).*(log_softmax|nll_loss|cross_entropy)",
    ),
    (cost.GEMM, r"nvjet|gemm|xmma|cutlass|cublas|splitk|^scaled_kernel"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """byte/s of a copy, FLOP/s of large GEMMs; fp8 None where the device has no such unit."""

    bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The kernels of one kind: what they must compute and move, seconds that this takes at the ceilings, seconds it took."""

    cost: Cost
    floor_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """A rung's step in parts; gaps are what its latency has beside kernels, when no profiler looks."""

    rung: Rung
    parts: tuple[Part, ...]

    @property
    def floor_s(self) -> float:
        return sum(part.floor_s for part in self.parts)

    @property
    def measured_s(self) -> float:
        return sum(part.measured_s for part in self.parts)


def ceilings(group: Group) -> Ceilings | None:
    """Those of the fastest call in any of the group's processes; None when it measured none.

    What a chip at its power limit does over seconds is below what a kernel between others may do: no ceiling.
    """

    def rate(sample: str, work: str) -> float | None:
        found = [
            amount / min(seconds)
            for cell in group.of("ceilings")
            for record in cell.ok
            if (seconds := measures.numbers(record.samples.get(sample)))
            and (amount := measures.finite(record.work.get(work)))
        ]
        return max(found) if found else None

    copy, bf16 = rate("copy_s", "copy_bytes"), rate("gemm_bf16_s", "gemm_flop")
    if copy is None or bf16 is None:
        return None
    return Ceilings(bytes_per_s=copy, bf16_flop_per_s=bf16, fp8_flop_per_s=rate("gemm_fp8_s", "gemm_flop"))


def breakdowns(group: Group) -> tuple[Breakdown, ...]:
    """Of every measured GPT step whose kernels were timed, fastest first; none without ceilings."""
    found = ceilings(group)
    if found is None:
        return ()
    rungs = [rung for rung in measures.ladder(group) if rung.latency_s is not None]
    return tuple(b for rung in rungs if (b := _breakdown(rung, found)) is not None)


def compared(group: Group) -> list[Breakdown]:
    """Those worth seeing side by side: the baseline and the fastest step of each precision."""
    found = breakdowns(group)
    fastest: dict[str, Breakdown] = {}
    for breakdown in found:
        fastest.setdefault(breakdown.rung.cell.trial.precision, breakdown)
    return [b for b in found if b.rung.is_baseline or b in fastest.values()]


def _breakdown(rung: Rung, at: Ceilings) -> Breakdown | None:
    measured, costs = kernels(rung.cell), _costs(rung.cell)
    if not measured or not costs or (at.fp8_flop_per_s is None and any(c.fp8_flop for c in costs)):
        return None
    seconds = dict.fromkeys((c.kind for c in costs), 0.0)
    for kernel, value in measured.items():
        seconds[kind(kernel)] += value
    return Breakdown(
        rung=rung,
        parts=tuple(Part(cost=c, floor_s=_floor(c, at), measured_s=seconds[c.kind]) for c in costs),
    )


def _costs(cell: Cell) -> tuple[Cost, ...]:
    """What the trial's step must do; nothing for a model that is no GPT of ours or a precision without a formula."""
    problem = cell.trial.problem
    config, precision = CONFIGS.get(str(problem.get("model"))), cell.trial.precision
    if config is None or precision not in ("bf16", "fp8"):
        return ()
    config = dataclasses.replace(config, block_size=cell.trial.number("block"), vocab_size=cell.trial.number("vocab"))
    head = problem.get("head") == "fp8"
    batch, padded = cell.trial.number("batch"), cell.trial.number("padded_vocab")
    clipped = bool(problem.get("grad_clip", 1.0))
    return cost.step(config, batch=batch, padded_vocab=padded, fp8=precision == "fp8", fp8_head=head, clipped=clipped)


def _floor(c: Cost, at: Ceilings) -> float:
    """FLOP and bytes one after the other: kernels of one kind are bound by the one or by the other."""
    return c.bf16_flop / at.bf16_flop_per_s + c.fp8_flop / (at.fp8_flop_per_s or 1.0) + c.bytes / at.bytes_per_s


def kind(kernel: str) -> str:
    """The kind that a kernel's name tells."""
    return next((name for name, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), cost.ELEMENTWISE)
