"""The largest batch that fits: manual, flash and cuDNN attention, padded vocabulary or not; on a GPU the fastest steps."""

from te_bench.experiments.spec import Experiment, Options, Scalar, Trial
from te_bench.experiments.suites import _rungs
from te_bench.experiments.suites._rungs import VP, V

CPU_LIMIT_GIB = 2.0  # of the trial's own data: a demonstration of the bisection, not a property of the machine
#: What a rung has of its own, attention, vocabulary, precision, mode.
Rung = tuple[dict[str, Scalar], str, int, str, str]

_OURS: dict[str, Scalar] = {"optimizer": "triton", "blocks": "fused", "head": "chunked"}
#: Steps of the suite `speed`.
FAST: tuple[Rung, ...] = (
    ({}, "cudnn", VP, "bf16", "compile-reduce-overhead"),
    (_OURS, "gluon", VP, "bf16", "cudagraph"),
    (_OURS, "gluon", VP, "fp8", "cudagraph"),
    ({**_OURS, "head": "fp8"}, "gluon", VP, "fp8", "cudagraph"),
)


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    problem: dict[str, Scalar] = {"model": "gpt2", "block": 1024} if cuda else {"model": "tiny", "block": 64}
    problem |= {**_rungs.BENCH_PY, "vocab": V, "memory_limit_gib": None if cuda else CPU_LIMIT_GIB}
    rivals = (("manual", V), ("flash", V), ("flash", VP), ("cudnn", VP))
    rungs: list[Rung] = [({}, *rival, "bf16" if cuda else "fp32", "eager") for rival in rivals]
    trials = [
        Trial(
            workload="max_batch",
            device=options.device,
            problem={**problem, **own, "padded_vocab": padded},
            attention=attention,
            precision=precision,
            recipe="delayed_scaling" if precision == "fp8" else None,
            mode=mode,
            protocol="bisection",
            seed=seed,
        )
        for seed in _rungs.seeds(options, 1)
        for own, attention, padded, precision, mode in (*rungs, *(FAST if cuda else ()))
    ]
    return Experiment(suite="memory", title="Largest batch that fits", trials=tuple(trials), baseline=trials[0].cell)
