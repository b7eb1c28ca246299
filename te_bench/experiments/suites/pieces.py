"""Norms and activations alone, both passes, also with the cast to FP8: te-bench, torch.compile, Liger, torch's operators.

The sizes are a layer's: 16384 tokens, width 4096 for norms and 14336 for activations, or --model's widths.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import NO_ATTENTION, Experiment, Options, Trial
from te_bench.kernels import norm
from te_bench.models.configs import configs

SEEDS = 3
PLAIN, OURS, TORCH, LIGER = "reference", "triton", "torch", "liger"


def _norm(*others: str) -> dict[str, tuple[str, ...]]:
    alone = ("forward_quantized", "add_forward", "add_forward_quantized")
    return {"forward": others, "backward": others, **dict.fromkeys(alone, ())}


def _activation(*others: str) -> dict[str, tuple[str, ...]]:
    return {"forward": others, "backward": others, "forward_quantized": (), "backward_quantized": ()}


#: {kind of norm or activation: {function of the contract of kernels.norm or kernels.activation: backends besides PLAIN and
#: OURS}}.
PIECES = {
    "rmsnorm": _norm(TORCH, LIGER),
    "swiglu": _activation(LIGER),
    "layernorm": _norm(TORCH, LIGER),
    "gelu": _activation(TORCH),
    "gelu_erf": _activation(TORCH),
}
USUAL = ("rmsnorm", "swiglu", "layernorm", "gelu")  # kinds without --model
GPU: Settings = {"batch": 2, "tokens": 8192, "hidden": 4096, "ffn": 14336}
CPU: Settings = {"batch": 2, "tokens": 64, "hidden": 128, "ffn": 448}


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    kinds: tuple[str, ...] = USUAL
    sizes = GPU if cuda else CPU
    if options.model is not None:
        if options.model not in configs():
            raise ValueError(
                f"--model {options.model}: the suite pieces knows only te-bench's own layers; give {', '.join(configs())}"
            )
        shape = configs()[options.model].shape
        kinds, sizes = (shape.norm, shape.activation), sizes | {"hidden": shape.hidden, "ffn": shape.ffn}
    rows = (options.batch or sizes["batch"]) * (options.tokens or sizes["tokens"])
    trials = tuple(
        Trial(
            workload="piece",
            device=options.device,
            problem={
                **{"kind": kind, "call": call, "backend": name},
                **{"m": rows, "n": sizes["hidden" if kind in norm.KINDS else "ffn"]},
            },
            attention=NO_ATTENTION,
            precision="bf16" if cuda else "fp32",
            mode="compile" if cuda and name == PLAIN else "eager",
            protocol="kernel",
            seed=seed,
        )
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for kind in kinds
        for call in PIECES[kind]
        for name in rivals(kind, call)
        if cuda or name in (PLAIN, TORCH)
    )
    return Experiment(
        suite="pieces",
        title=f"Norms and activations of {options.model or 'a layer'}: {rows} tokens",
        trials=trials,
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens"}),
    )


def rivals(kind: str, call: str) -> tuple[str, ...]:
    """Return the backends of a piece: PLAIN (the baseline, compiled on a GPU), OURS, and others."""
    return PLAIN, OURS, *PIECES[kind][call]
