"""Transformer Engine's quickstart layer: as published, and in variants that all compute one function; or --model's layer.

"faithful": dropout 0.1, and the original's masks: full for the plain layer, causal inside TransformerLayer, which therefore
computes another function with half of the attention work. "fair": no dropout, causal everywhere. "mlp": its norm and MLP,
te.LayerNormMLP against the plain one. Of a model, such as llama3-8b, only "fair", without the quickstart's first steps:
plain PyTorch by kernels and compiled, te.TransformerLayer, torchao and Transformer Engine.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import NO_ATTENTION, Experiment, Options, Trial
from te_bench.models.configs import configs

SEEDS = 3
GPU: Settings = {"hidden": 4096, "ffn": 16384, "heads": 32, "sequence": 2048, "batch": 4}
CPU: Settings = {"hidden": 128, "ffn": 512, "heads": 4, "sequence": 64, "batch": 2}
FAITHFUL: Settings = {"variant": "faithful", "dropout": 0.1, "mask": "full"}
FAIR: Settings = {"variant": "fair", "dropout": 0.0, "mask": "causal"}
MLP: Settings = {**FAIR, "variant": "mlp"}
HISTORY = 16  # the quickstart's amax_history_len

DELAYED, CURRENT, ROWWISE = "delayed_scaling", "float8_current_scaling", "rowwise_scaling"
THEIRS = (DELAYED, CURRENT, "float8_block_scaling")  # recipes that Transformer Engine supports on Hopper

#: Attention and mode of te_layer's configurations, besides cuDNN in eager mode: te-bench's kernel, and both captured.
OURS = (("gluon", "eager"), ("cudnn", "cudagraph"), ("gluon", "cudagraph"))

BOTH = ("eager", "compile")

Configuration = tuple[str, str, str | None, str]  # layer, attention, recipe (None: no FP8), mode


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    sizes = GPU if cuda else CPU
    if options.model is not None:
        return _of_model(options, options.model, sizes)
    if given := [f"--{name}" for name in ("batch", "tokens") if getattr(options, name) is not None]:
        raise ValueError(f"{given[0]}: the quickstart's layer has its own; give it with --model, or leave it out")
    faithful = _faithful("cudnn" if cuda else "math", theirs=cuda)  # flash on a CPU has no dropout
    fair = _fair_gpu() if cuda else _fair_cpu()
    trials = []
    for seed in suite_trials.seeds(options, SEEDS if cuda else 1):
        trials += [_trial(options, sizes | FAITHFUL, configuration, seed) for configuration in faithful]
        trials += [_trial(options, sizes | FAIR, configuration, seed) for configuration in fair]
        trials += [_trial(options, sizes | MLP, configuration, seed) for configuration in _mlp(cuda)]
    s, b, h = (sizes[key] for key in ("sequence", "batch", "hidden"))
    title = f"Transformer Engine's quickstart layer: sequence {s}, batch {b}, hidden {h}"
    return Experiment(
        suite="layer", title=title, trials=tuple(trials), baseline=trials[0].cell, heeds=frozenset({"model"})
    )


def _of_model(options: Options, model: str, usual: Settings) -> Experiment:
    """Return the layer of a model: torch.compile in bf16 first; --batch sequences of --tokens."""
    cuda = options.device == "cuda"
    others = [name for name, config in configs().items() if not config.shape.learned_positions]
    if model not in configs():
        raise ValueError(f"--model {model}: the suite layer knows only te-bench's own layers; give {', '.join(others)}")
    shape = configs()[model].shape
    if shape.learned_positions:
        raise ValueError(
            f"--model {model}: a GPT's layer is the quickstart's layer; leave --model out, or give {', '.join(others)}"
        )
    sized = suite_trials.sized(options, {"batch": usual["batch"], "block": usual["sequence"]})
    sizes: Settings = {"model": model, "hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads}
    sizes |= {"sequence": sized["block"], "batch": sized["batch"]}
    plain = (
        [(kernel, mode) for kernel in ("cudnn", "flash") for mode in reversed(BOTH)] if cuda else [("flash", "eager")]
    )
    compared: list[Configuration] = [("plain_sdpa", kernel, None, mode) for kernel, mode in plain]
    compared += [*_whole_gpu(), *_peers_gpu()] if cuda else _whole_cpu()
    trials = [
        _trial(options, sizes | FAIR, configuration, seed)
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for configuration in compared
    ]
    return Experiment(
        suite="layer",
        title=f"A layer of {suite_trials.called(sizes)}: {sizes['batch']} x {sizes['sequence']} tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens"}),
    )


def _faithful(kernel: str, *, theirs: bool) -> list[Configuration]:
    """Return the five steps of the quickstart; those before TransformerLayer write attention out."""
    found: list[Configuration] = [("plain", "manual", None, "eager"), ("plain_sdpa", kernel, None, "eager")]
    found += [("te_basic", "manual", None, "eager"), ("te_fused", "manual", None, "eager")]
    whole = ("te_layer", "transformer_engine") if theirs else ("te_layer",)
    return found + [(layer, kernel, recipe, "eager") for layer in whole for recipe in (None, DELAYED)]


def _fair_gpu() -> list[Configuration]:
    found: list[Configuration] = [("plain", "manual", None, "eager")]
    found += [("plain_sdpa", kernel, None, mode) for kernel in ("flash", "cudnn") for mode in BOTH]
    found += [(layer, "cudnn", None, mode) for layer in ("te_basic", "te_fused") for mode in BOTH]
    return [*found, *_whole_gpu(), *_peers_gpu()]


def _whole_gpu() -> list[Configuration]:
    """Return te.TransformerLayer in bf16 and in each recipe."""
    recipes = suite_trials.recipes()
    found: list[Configuration] = [("te_layer", "cudnn", None, mode) for mode in BOTH]
    for recipe in recipes:
        modes = BOTH if recipe in (DELAYED, CURRENT) else ("eager",)
        found += [("te_layer", "cudnn", recipe, mode) for mode in modes]
    return found + [("te_layer", kernel, recipe, mode) for recipe in (None, *recipes) for kernel, mode in OURS]


def _peers_gpu() -> list[Configuration]:
    found: list[Configuration] = [
        ("torchao_tensorwise", "cudnn", CURRENT, "compile"),
        ("torchao_rowwise", "cudnn", ROWWISE, "compile"),
    ]
    return found + [("transformer_engine", "cudnn", recipe, "eager") for recipe in (None, *THEIRS)]


def _mlp(cuda: bool) -> list[Configuration]:
    modes = ("eager", "cudagraph") if cuda else ("eager",)
    found: list[Configuration] = [
        ("plain", NO_ATTENTION, None, mode) for mode in (("eager", "compile") if cuda else modes)
    ]
    recipes = (None, *suite_trials.recipes())
    found += [("te_layer", NO_ATTENTION, recipe, mode) for recipe in recipes for mode in modes]
    return found + [("transformer_engine", NO_ATTENTION, recipe, "eager") for recipe in (None, *THEIRS) if cuda]


def _fair_cpu() -> list[Configuration]:
    found: list[Configuration] = [("plain", "manual", None, "eager")]
    found += [(layer, "flash", None, "eager") for layer in ("plain_sdpa", "te_basic", "te_fused")]
    return found + _whole_cpu()


def _whole_cpu() -> list[Configuration]:
    return [("te_layer", "flash", recipe, "eager") for recipe in (None, *suite_trials.recipes())]


def _trial(options: Options, problem: Settings, configuration: Configuration, seed: int) -> Trial:
    layer, attention, recipe, mode = configuration
    if problem["variant"] == "faithful" and layer in ("te_layer", "transformer_engine"):
        problem = {**problem, "mask": "causal"}
    if recipe == DELAYED and "model" not in problem:
        problem = {**problem, "amax_history_len": HISTORY}
    return Trial(
        workload="layer",
        device=options.device,
        problem={"layer": layer, **problem},
        attention=attention,
        precision="fp8" if recipe else "bf16" if options.device == "cuda" else "fp32",
        recipe=recipe,
        mode=mode,
        protocol="quickstart",
        seed=seed,
    )
