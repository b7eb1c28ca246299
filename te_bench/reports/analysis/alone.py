"""Name each part of a step that is timed alone (heads, norms, GEMMs), and find the fastest way at each shape."""

from dataclasses import dataclass

from te_bench.kernels.gemm.table import CUBLASLT
from te_bench.reports.analysis.measures import Ratio, of_processes, paired_ratio
from te_bench.reports.analysis.naming import COMPILED, EAGER, HEADS, TE_BENCH
from te_bench.reports.analysis.ranking import FastestByShape, fastest_by_shape, rank_times
from te_bench.reports.analysis.rows import Configuration, Group, grouped

SAMPLE = "kernel_s"
PLAIN = "reference"  # the baseline of a head, which makes all logits, and of a part in plain PyTorch
LIGER = "Liger"
OF_HEADS = {PLAIN: "all logits", "liger": LIGER}
OF_PIECES = {"triton": TE_BENCH, "liger": LIGER, "torch": "PyTorch's operator"}
OF_GEMMS = {**dict.fromkeys(CUBLASLT, "cuBLASLt"), "gluon": f"{TE_BENCH} Gluon", "triton": f"{TE_BENCH} Triton"}
SCALES = {"tensor": "a scale a tensor", "row": "a scale a row", "block": "block scaling"}
IN_FP8 = "in FP8"
KINDS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "swiglu": "SwiGLU", "gelu": "tanh GELU", "gelu_erf": "GELU"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAlone:
    """One way to compute a part: the seconds of a call, and its speed over the baseline of its shape."""

    configuration: Configuration
    part: str  # e.g. RMSNorm forward; for a head "" or IN_FP8; for a GEMM its operands
    sizes: str  # tokens x width; for heads x classes; for GEMMs M x N x K
    name: str
    seconds: float | None
    speedup: Ratio | None

    @property
    def shape(self) -> str:
        return f"{self.part} {self.sizes}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """The parts of one kind, by shape. `fastest` leaves out heads in FP8, which compute other numbers."""

    what: str
    times: tuple[TimeAlone, ...]
    fastest: FastestByShape


def alone(group: Group) -> dict[str, Alone]:
    """Return {"heads": ..., "pieces": ..., "gemms": ...} of a group, empty if it measured none."""
    return {
        "heads": _alone(group, "heads", "linear_cross_entropy", ("n", "d", "vocab", "padded"), "head"),
        "pieces": _alone(group, "norms and activations", "piece", ("kind", "call", "m", "n"), "backend"),
        "gemms": _alone(
            group, "GEMMs", "gemm", ("m", "n", "k", "dtype", "scales", "fast_accum", "epilogue"), "backend"
        ),
    }


def _alone(group: Group, what: str, workload: str, settings: tuple[str, ...], way: str) -> Alone:
    shapes = grouped(group.of(workload), lambda one: (one.trial.precision, *map(one.trial.problem.get, settings)))
    times, ranked = [], []
    for ways in shapes.values():
        baselines = CUBLASLT if workload == "gemm" else (PLAIN,)
        baseline = next((one for one in ways if one.trial.problem.get(way) in baselines), None)
        found = [_time(one, baseline) for one in ways]
        times += found
        alike = (time for time in found if time.seconds and time.part != IN_FP8)
        timed = sorted(alike, key=lambda time: time.seconds or 0.0)
        ranking = rank_times([time.configuration for time in timed], SAMPLE)
        ranked.append(([timed[place].name for place in ranking.order], len(ranking.best)))
    return Alone(what=what, times=tuple(times), fastest=fastest_by_shape(ranked))


def _time(one: Configuration, baseline: Configuration | None) -> TimeAlone:
    part, sizes, name = _NAMES[one.trial.workload]
    return TimeAlone(
        configuration=one,
        part=part(one),
        sizes=" x ".join(str(one.trial.problem.get(key)) for key in sizes),
        name=name(one),
        seconds=of_processes(one.ok, SAMPLE),
        speedup=None if baseline is None or baseline is one else paired_ratio(baseline, one, SAMPLE),
    )


def _head_part(one: Configuration) -> str:
    return IN_FP8 if one.trial.problem.get("head") == "fp8" else ""


def _head(one: Configuration) -> str:
    head = str(one.trial.problem.get("head"))
    compiled = f", {COMPILED}" if one.trial.mode == "compile" else ""
    return f"{OF_HEADS.get(head) or HEADS.get(head, head)}{compiled}"


def _backend(one: Configuration) -> str:
    name = str(one.trial.problem.get("backend"))
    return (COMPILED if one.trial.mode == "compile" else EAGER) if name == PLAIN else OF_PIECES.get(name, name)


def _part(one: Configuration) -> str:
    """Return a part's name: RMSNorm forward; sum and RMSNorm forward with the FP8 cast; SwiGLU backward."""
    kind, call = (str(one.trial.problem.get(key)) for key in ("kind", "call"))
    added = "sum and " if call.startswith("add_") else ""
    fp8 = " with the FP8 cast" if call.endswith("_quantized") else ""
    return f"{added}{KINDS.get(kind, kind)} {call.removeprefix('add_').removesuffix('_quantized')}{fp8}"


def _product(one: Configuration) -> str:
    """Return how a GEMM multiplies: bf16; FP8, a scale a tensor, fast sums."""
    problem = one.trial.problem
    if problem.get("dtype") != "e4m3":
        return str(problem.get("dtype"))
    sums = ", fast sums" if problem.get("fast_accum") else ""
    return f"FP8, {SCALES.get(str(problem.get('scales')), problem.get('scales'))}{sums}"


def _multiplier(one: Configuration) -> str:
    name = str(one.trial.problem.get("backend"))
    return EAGER if name == PLAIN or one.trial.device == "cpu" else OF_GEMMS.get(name, name)


#: {workload: functions that name a part and the way that computes it, and between them the settings with its sizes}.
_NAMES = {
    "linear_cross_entropy": (_head_part, ("n", "d", "vocab"), _head),
    "piece": (_part, ("m", "n"), _backend),
    "gemm": (_product, ("m", "n", "k"), _multiplier),
}
