"""Two minutes on a laptop or seconds on a GPU: a few rungs of everything, on a tiny GPT."""

from te_bench.experiments.spec import Experiment, Options, Scalar, Trial
from te_bench.experiments.suites import _rungs
from te_bench.experiments.suites._rungs import VP, V

SEEDS = 3
BLOCK = 64


def experiment(options: Options) -> Experiment:
    # A CPU computes bf16 slowly: there the kernels are compared in fp32.
    cuda = options.device == "cuda"
    common = "bf16" if cuda else "fp32"
    rivals = ["manual", "math", "mem_efficient", "flash"] if cuda else ["manual", "math", "flash"]
    rungs = [(name, V, common) for name in rivals]
    rungs += [("flash", VP, common), *([("cudnn", VP, common)] if cuda else [])]
    rungs += [("flash" if p != "fp32" else "manual", VP, p) for p in ("fp32", "bf16", "fp8") if p != common]
    problem: dict[str, Scalar] = {"model": "tiny", "batch": 2, "block": BLOCK}
    ladder = [
        _rungs.step(options, problem, attention, padded, precision, "eager", seed)
        for seed in _rungs.seeds(options, SEEDS)
        for attention, padded, precision in rungs
    ]
    return Experiment(
        suite="quick",
        title="Quick look: tiny GPT, 2 x 64 tokens",
        trials=(*ladder, *_curves(options), *_numerics(options)),
        baseline=ladder[0].cell,
    )


def _curves(options: Options) -> list[Trial]:
    """The same short training in bf16 and in fp8: one pair of loss curves."""
    data = _rungs.corpus_problem(options, options.data_for("tiny", "stdlib"), "bytes", BLOCK)
    problem: dict[str, Scalar] = {
        **data,
        "model": "tiny",
        "batch": 16,
        "block": BLOCK,
        "steps": 100,
        "eval_every": 25,
        "eval_tokens": 16384,
        "learning_rate": 3e-3,
        "min_learning_rate": 3e-4,
        "warmup": 20,
    }
    return [
        _rungs.training(options, problem, "flash", precision, "eager", seed)
        for seed in _rungs.seeds(options, 1)
        for precision in ("bf16", "fp8")
    ]


def _numerics(options: Options) -> list[Trial]:
    return [
        Trial(
            workload="attention_numerics",
            device=options.device,
            problem={"batch": 1, "heads": 4, "length": 256, "head_dim": 64, "causal": True},
            attention="flash",
            precision="bf16",
            protocol="once",
            seed=seed,
        )
        for seed in _rungs.seeds(options, 1)
    ]
