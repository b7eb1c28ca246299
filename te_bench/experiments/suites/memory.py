"""The largest batch that fits: manual, flash and cuDNN attention, vocabulary padded or not; on a GPU the fastest steps.

Models: GPT-2 124M, on a CPU a tiny GPT, or --model. Attention that keeps its scores is left out if the scores of one
sequence do not fit.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial

CPU_LIMIT_GIB = 2.0  # of the trial's own data; shows the bisection, not the machine's limit
#: Settings of a configuration's own, attention, vocabulary, precision, mode.
Configuration = tuple[Settings, str, bool, str, str]
OWN, PADDED = False, True

_OURS: Settings = {"optimizer": "triton", "blocks": "fused", "head": "chunked"}
#: Steps of the suite `speed`.
FAST: tuple[Configuration, ...] = (
    ({}, "cudnn", PADDED, "bf16", "compile-reduce-overhead"),
    (_OURS, "gluon", PADDED, "bf16", "cudagraph"),
    (_OURS, "gluon", PADDED, "fp8", "cudagraph"),
    ({**_OURS, "head": "fp8"}, "gluon", PADDED, "fp8", "cudagraph"),
)


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    problem = suite_trials.sized(options, {"model": "gpt2", "block": 1024} if cuda else {"model": "tiny", "block": 64})
    own_vocab, padded_vocab = (
        suite_trials.vocabulary(options, problem["model"], padded=wide) for wide in (OWN, PADDED)
    )
    problem |= {**suite_trials.BENCH_PY, "vocab": own_vocab, "memory_limit_gib": None if cuda else CPU_LIMIT_GIB}
    rivals = (("manual", OWN), ("flash", OWN), ("flash", PADDED), ("cudnn", PADDED))
    configurations: list[Configuration] = [({}, *rival, "bf16" if cuda else "fp32", "eager") for rival in rivals]
    trials = [
        Trial(
            workload="max_batch",
            device=options.device,
            problem={**problem, **own, "padded_vocab": padded_vocab if padded else own_vocab},
            attention=attention,
            precision=precision,
            recipe="delayed_scaling" if precision == "fp8" else None,
            mode=mode,
            protocol="bisection",
            seed=seed,
        )
        for seed in suite_trials.seeds(options, 1)
        for own, attention, padded, precision, mode in (*configurations, *(FAST if cuda else ()))
        if suite_trials.can_hold(options, attention, problem)
    ]
    trials = list({trial.id: trial for trial in trials}.values())
    return Experiment(
        suite="memory",
        title=f"Largest batch that fits: {suite_trials.called(problem)}, sequences of {problem['block']} tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "tokens"}),
    )
