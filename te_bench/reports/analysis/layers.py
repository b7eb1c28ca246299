"""Report the layer benchmark: the layers of each variant, and the time of each kernel in an iteration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.experiments.spec import NO_ATTENTION
from te_bench.reports.analysis.measures import finite
from te_bench.reports.analysis.ranking import StepRanking, rank_steps
from te_bench.reports.analysis.rows import Configuration, Group
from te_bench.reports.analysis.steps import MeasuredStep, measured_steps

#: Kinds of kernels by their names on a GPU and of operators on a CPU; the first that matches counts.
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"sdpa|scaled_dot_product|flash|fmha|attention|softmax"),
    ("GEMM", r"nvjet|gemm|xmma|cutlass|cublas|splitk|::(add|b)?mm\b|scaled_mm|^(scaled|block)_kernel"),
    # Also activations, losses and optimizers: kernels that memory limits. Inductor's fused kernels are named triton_...;
    # te_bench's own match the end of this pattern.
    (
        "norms, casts",
        r"norm|gamma|gelu|quant|cast|amax|transpose|triton_|^_(forward|backward|line|block|pair|update|add|joined|sum|tile)_"
        r"|block_formats|block_pack|^(step|numbers|squares|rows|add_rows|embed|statistics|fp8|count|mean|scale|rotary|turn)_kernel",
    ),
)
OTHER = "other"
FAMILIES = ("te_", "torchao_", "transformer_engine")  # prefixes of layers' names: te-bench's, then peers'


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayer:
    """A layer's time, {kernel: seconds an iteration} with the longest first, and seconds by kind.

    comparable: whether its mask is the baseline's, so that it computes the same function. gemm_flop_per_s: FLOP/s of its
    Linears in their kernels; None if attention also consists of GEMMs.
    """

    step: MeasuredStep
    comparable: bool
    kernels: Mapping[str, float]
    by_kind: Mapping[str, float]
    gemm_flop_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVariant:
    """The layers of one variant, fastest first, and the ranking of those that are comparable."""

    name: str
    layers: tuple[MeasuredLayer, ...]
    ranking: StepRanking

    @property
    def comparable(self) -> bool:
        """Whether all layers are comparable."""
        return all(layer.comparable for layer in self.layers)

    @property
    def compared(self) -> list[MeasuredLayer]:
        """The layers whose kernels are shown side by side: te-bench's and each peer's fastest, with and without FP8."""
        fastest: dict[tuple[str, bool], MeasuredLayer] = {}
        for layer in self.layers:
            trial = layer.step.configuration.trial
            family = next((name for name in FAMILIES if str(trial.problem.get("layer")).startswith(name)), None)
            if family and layer.kernels:
                fastest.setdefault((family, trial.precision == "fp8"), layer)
        return list(fastest.values())


def layer_variants(group: Group) -> tuple[LayerVariant, ...]:
    """Return the variants in the plan's order; each one's baseline is the group's baseline in that variant.

    If a run left the group's baseline out (--only), a plain layer replaces it.
    """
    configurations = group.of("layer")
    candidates = [configuration for configuration in configurations if configuration.id == group.baseline]
    candidates += [one for one in configurations if one.trial.problem.get("layer") == "plain"]
    chosen = _rival(candidates[0]) if candidates else None
    found = []
    for name in dict.fromkeys(configuration.shape for configuration in configurations):
        ours = [configuration for configuration in configurations if configuration.shape == name]
        baseline = next((one for one in ours if chosen is not None and _is(one, chosen)), None)
        layers = tuple(_measured(step, baseline) for step in measured_steps(ours, baseline, group.gpu))
        ranking = rank_steps([layer.step for layer in layers if layer.comparable])
        found.append(LayerVariant(name=name, layers=layers, ranking=ranking))
    return tuple(found)


def _measured(step: MeasuredStep, baseline: Configuration | None) -> MeasuredLayer:
    configuration, kernels = step.configuration, kernel_seconds(step.configuration)
    kinds = [*(name for name, _ in KINDS), OTHER] if kernels else []
    by_kind = {name: sum(s for kernel, s in kernels.items() if kind_of(kernel) == name) for name in kinds}
    gemm, flop = by_kind.get("GEMM"), finite(configuration.ok[0].work.get("gemm_flop")) if configuration.ok else None
    return MeasuredLayer(
        step=step,
        comparable=baseline is None or configuration.trial.problem.get("mask") == baseline.trial.problem.get("mask"),
        kernels=kernels,
        by_kind=by_kind,
        gemm_flop_per_s=flop / gemm
        if flop and gemm and configuration.trial.attention not in ("manual", "math")
        else None,
    )


def _rival(configuration: Configuration) -> tuple[object, ...]:
    trial = configuration.trial
    return trial.problem.get("layer"), trial.attention, trial.precision, trial.recipe, trial.mode


def _is(configuration: Configuration, rival: tuple[object, ...]) -> bool:
    """Return whether a configuration is that rival; an MLP alone is, whatever the rival's attention."""
    layer, attention, *rest = _rival(configuration)
    return (layer, *rest) == (rival[0], *rival[2:]) and attention in (rival[1], NO_ATTENTION)


def kernel_seconds(configuration: Configuration) -> dict[str, float]:
    """Return {kernel: seconds an iteration}, the mean over processes, the longest first; empty if none was profiled."""
    profiles = [found for record in configuration.ok if isinstance(found := record.work.get("kernel_s"), Mapping)]
    total: dict[str, float] = {}
    for profile in profiles:
        for name, value in profile.items():
            total[name] = total.get(name, 0.0) + (finite(value) or 0.0) / len(profiles)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name; "other" for copies, sums and unmatched names."""
    return next((name for name, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)
