"""The largest batch that fits: manual, flash and cuDNN attention, padded vocabulary or not."""

from te_bench.experiments.spec import Experiment, Options, Scalar, Trial
from te_bench.experiments.suites import _rungs
from te_bench.experiments.suites._rungs import VP, V

CPU_LIMIT_GIB = 2.0  # of the trial's own data: a demonstration of the bisection, not a property of the machine


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    problem: dict[str, Scalar] = {"model": "gpt2", "block": 1024} if cuda else {"model": "tiny", "block": 64}
    problem |= {**_rungs.BENCH_PY, "vocab": V, "memory_limit_gib": None if cuda else CPU_LIMIT_GIB}
    rivals = [("manual", V), ("flash", V), ("flash", VP), ("cudnn", VP)]
    trials = [
        Trial(
            workload="max_batch",
            device=options.device,
            problem={**problem, "padded_vocab": padded},
            attention=attention,
            precision="bf16" if cuda else "fp32",
            protocol="bisection",
            seed=seed,
        )
        for seed in _rungs.seeds(options, 1)
        for attention, padded in rivals
    ]
    return Experiment(suite="memory", title="Largest batch that fits", trials=tuple(trials), baseline=trials[0].cell)
