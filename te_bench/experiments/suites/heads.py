"""A head's loss and both gradients, 32 k to 256 k classes: all logits (compiled), in chunks, in FP8, and by Liger.

The shapes are those of `te-bench tune head`; torch.compile's head with all logits is the baseline.
"""

from te_bench.experiments import suite_trials, tuning
from te_bench.experiments.spec import NO_ATTENTION, Experiment, Options, Trial
from te_bench.kernels import linear_cross_entropy

SEEDS = 3
ALL_LOGITS = "reference"


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    shapes = tuning.KINDS["head"].defaults(cuda)
    # The baseline first; it is compiled on a GPU only.
    names = sorted(linear_cross_entropy.names(), key=lambda name: name != ALL_LOGITS)
    trials = tuple(
        Trial(
            workload="linear_cross_entropy",
            device=options.device,
            problem={**shape, "head": name},
            attention=NO_ATTENTION,
            precision="bf16" if cuda else "fp32",
            mode="compile" if cuda and name == ALL_LOGITS else "eager",
            protocol="kernel",
            seed=seed,
        )
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for shape in shapes
        for name in names
    )
    return Experiment(suite="heads", title="Heads: loss and both gradients", trials=trials, baseline=trials[0].cell)
