"""GEMMs of a layer's Linears alone, forward and both gradients, in bf16 and FP8: te-bench's kernels beside cuBLASLt.

The sizes are those of Llama 3 8B with 8192 tokens, or --model's. Sums are as precise as te-bench's recipes ask: with a scale
a tensor fast in the forward pass and promoted in gradients, with block scaling always promoted. All operands are E4M3.
Block scaling's weight gradient, whose operands both have 1 x 128 blocks, is left out: no table chooses its kernel.
"""

from te_bench.experiments import suite_trials, tuning
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import NO_ATTENTION, Experiment, Options
from te_bench.kernels.gemm import table
from te_bench.models.configs import configs

SEEDS = 3
PLAIN = "reference"  # FP8's GEMM in float32, for a CPU
MODEL = {True: "llama3-8b", False: "tiny"}  # on a GPU, on a CPU
ROWS = {True: 8192, False: 128}
#: {how it is multiplied: a --shape's words in the forward pass, for x's gradient and for W's, or None without it}.
WAYS: dict[str, tuple[str, str, str | None]] = {
    "bf16": ("", "", ""),
    "tensor": (",fp8", ",fp8,promoted", ",fp8,promoted"),
    "block": (",fp8,block", ",fp8,block", None),
}


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    model = options.model or MODEL[cuda]
    if model not in configs():
        raise ValueError(
            f"--model {model}: the suite gemms knows only te-bench's own layers; give {', '.join(configs())}"
        )
    rows = (options.batch or 1) * (options.tokens or ROWS[cuda])
    trials = tuple(
        suite_trials.alone(options.device, "gemm", {**problem, "backend": name}, NO_ATTENTION, "bf16", "kernel", seed)
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for problem in _problems(model, rows)
        for name in sorted(table.rivals(table.read_problem(problem)), key=lambda name: name not in table.CUBLASLT)
        if (name != PLAIN if cuda else name in (PLAIN, table.TORCH))
    )
    return Experiment(
        suite="gemms",
        title=f"GEMMs of {model}: {rows} tokens",
        trials=trials,
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens"}),
    )


def _problems(model: str, rows: int) -> list[Settings]:
    """Return each product once: of a Linear with its weight, and its two gradients."""
    words = [
        f"{m},{n},{k}{asked}"
        for forward, of_x, of_weight in WAYS.values()
        for into, out in configs()[model].shape.products
        for m, n, k, asked in ((rows, out, into, forward), (rows, into, out, of_x), (out, into, rows, of_weight))
        if asked is not None
    ]
    return list(map(tuning.gemm_shape, dict.fromkeys(words)))
