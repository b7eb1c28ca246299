"""The largest batch that fits: manual, flash and cuDNN attention, padded vocabulary or not; on a GPU the fastest steps."""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.suite_trials import VP, V

CPU_LIMIT_GIB = 2.0  # of the trial's own data: a demonstration of the bisection, not a property of the machine
#: What a configuration has of its own, attention, vocabulary, precision, mode.
Configuration = tuple[Settings, str, int, str, str]

_OURS: Settings = {"optimizer": "triton", "blocks": "fused", "head": "chunked"}
#: Steps of the suite `speed`.
FAST: tuple[Configuration, ...] = (
    ({}, "cudnn", VP, "bf16", "compile-reduce-overhead"),
    (_OURS, "gluon", VP, "bf16", "cudagraph"),
    (_OURS, "gluon", VP, "fp8", "cudagraph"),
    ({**_OURS, "head": "fp8"}, "gluon", VP, "fp8", "cudagraph"),
)


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    problem: Settings = {"model": "gpt2", "block": 1024} if cuda else {"model": "tiny", "block": 64}
    problem |= {**suite_trials.BENCH_PY, "vocab": V, "memory_limit_gib": None if cuda else CPU_LIMIT_GIB}
    rivals = (("manual", V), ("flash", V), ("flash", VP), ("cudnn", VP))
    configurations: list[Configuration] = [({}, *rival, "bf16" if cuda else "fp32", "eager") for rival in rivals]
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
        for seed in suite_trials.seeds(options, 1)
        for own, attention, padded, precision, mode in (*configurations, *(FAST if cuda else ()))
    ]
    return Experiment(suite="memory", title="Largest batch that fits", trials=tuple(trials), baseline=trials[0].cell)
