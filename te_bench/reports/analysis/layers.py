"""The layer benchmark: its variants, each with rungs of its own, and where an iteration's time goes, kernel by kernel."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.experiments.spec import NO_ATTENTION
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.measures import Rung
from te_bench.reports.analysis.rows import Cell, Group

#: Kinds of kernels by their names on a GPU and of operators on a CPU; the first that matches counts.
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"sdpa|scaled_dot_product|flash|fmha|attention|softmax"),
    ("GEMM", r"nvjet|gemm|xmma|cutlass|cublas|splitk|::(add|b)?mm\b|scaled_mm|^(scaled|block)_kernel"),
    # And activations, losses and optimizers: what is bound by memory. Inductor's fused kernels are named triton_...;
    # te_bench's own as this pattern ends.
    (
        "norms, casts",
        r"norm|gamma|gelu|quant|cast|amax|transpose|triton_|^_(forward|backward|line|block|pair|update|add|joined|sum|tile)_"
        r"|^(step|squares|rows|add_rows|embed|statistics|fp8|count|mean|scale|rotary)_kernel",
    ),
)
OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The rungs of one variant, fastest first. Those whose mask is not the baseline's compute another function."""

    name: str
    rungs: tuple[Rung, ...]
    baseline: Cell | None

    def comparable(self, rung: Rung) -> bool:
        return self.baseline is None or rung.cell.trial.problem.get("mask") == self.baseline.trial.problem.get("mask")


def variants(group: Group) -> tuple[Variant, ...]:
    """The variants in the plan's order; each one's baseline is the group's, in that variant.

    Where a run left the group's baseline out (--only), a plain layer stands in for it.
    """
    cells = group.of("layer")
    names = dict.fromkeys(cell.shape for cell in cells)
    candidates = [cell for cell in cells if cell.id == group.baseline]
    candidates += [cell for cell in cells if cell.trial.problem.get("layer") == "plain"]
    chosen = _rival(candidates[0]) if candidates else None
    found = []
    for name in names:
        ours = [cell for cell in cells if cell.shape == name]
        baseline = next((cell for cell in ours if chosen is not None and _is(cell, chosen)), None)
        found.append(Variant(name=name, rungs=measures.rungs(ours, baseline, group.gpu), baseline=baseline))
    return tuple(found)


def _rival(cell: Cell) -> tuple[object, ...]:
    trial = cell.trial
    return trial.problem.get("layer"), trial.attention, trial.precision, trial.recipe, trial.mode


def _is(cell: Cell, rival: tuple[object, ...]) -> bool:
    """Whether a cell is that rival; the MLP alone is whatever its attention."""
    layer, attention, *rest = _rival(cell)
    return (layer, *rest) == (rival[0], *rival[2:]) and attention in (rival[1], NO_ATTENTION)


def kernels(cell: Cell) -> dict[str, float]:
    """{kernel: seconds an iteration}, the mean over a cell's processes, the longest first; empty if none was profiled."""
    profiles = [found for record in cell.ok if isinstance(found := record.work.get("kernel_s"), Mapping)]
    total: dict[str, float] = {}
    for profile in profiles:
        for name, value in profile.items():
            total[name] = total.get(name, 0.0) + (measures.finite(value) or 0.0) / len(profiles)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def kind(kernel: str) -> str:
    """The kind that a kernel's name tells, "other" for copies, sums and what has no pattern."""
    return next((name for name, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def by_kind(cell: Cell) -> dict[str, float]:
    """{kind: seconds an iteration} for every kind, empty if no kernel was profiled."""
    found = kernels(cell)
    names = [*(name for name, _ in KINDS), OTHER]
    return {name: sum(s for kernel, s in found.items() if kind(kernel) == name) for name in names} if found else {}


def gemm_flop_per_s(cell: Cell) -> float | None:
    """What the layer's Linears reach in their kernels; None where attention is made of GEMMs too."""
    seconds = by_kind(cell).get("GEMM")
    amount = measures.finite(cell.ok[0].work.get("gemm_flop")) if cell.ok else None
    return amount / seconds if amount and seconds and cell.trial.attention not in ("manual", "math") else None


def compared(variant: Variant) -> list[Rung]:
    """The rungs whose kernels are worth seeing side by side: the fastest of ours in FP8 and without, and of each peer."""

    def group_of(rung: Rung) -> tuple[str, bool]:
        family = str(rung.cell.trial.problem.get("layer"))
        family = next((name for name in ("te_", "torchao_", "transformer_engine") if family.startswith(name)), "")
        return family, rung.cell.trial.precision == "fp8"

    fastest: dict[tuple[str, bool], Rung] = {}
    for rung in variant.rungs:
        if group_of(rung)[0] and kernels(rung.cell):
            fastest.setdefault(group_of(rung), rung)
    return list(fastest.values())
