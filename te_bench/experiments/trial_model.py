"""Build the model, training step and batches of a trial, and check that this machine can run them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.experiments.adoption import CHUNKED
from te_bench.experiments.measurement import CheckFailed, Unsupported, require
from te_bench.experiments.problems import StepProblem, source_of
from te_bench.experiments.spec import Trial
from te_bench.kernels import activation, adamw, attention, linear_cross_entropy, norm
from te_bench.models import adopted, checkpointing, decoder, faults, kernel_choice
from te_bench.models import recipe as recipes
from te_bench.models.adopted import Adopted
from te_bench.models.configs import DecoderConfig, configs
from te_bench.models.decoder import Decoder
from te_bench.models.rivals import Rival
from te_bench.training import compiled_blocks, fewer_bits, parallel, ways
from te_bench.training.corpus import Corpus
from te_bench.training.data import Batches
from te_bench.training.parallel import Parallel
from te_bench.training.step import Optim, TrainStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOKED_AT = 64  # elements of each parameter that are checked for a perturbation


def require_device(device: str) -> None:
    """Raise Unsupported for a GPU that torch does not see."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("torch sees no NVIDIA GPU")


def machine_of(device: str) -> dict[str, Any]:
    """Return what a kernel's problem says of the machine: device and compute capability."""
    return {"device": device, "capability": capability(device)}


def capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def kernel_dtype(trial: Trial) -> str:
    """Return the input dtype of kernels without FP8: bf16 in an fp8 trial, else the trial's precision."""
    return {"fp8": "bf16"}.get(trial.precision, trial.precision)


def attention_of(trial: Trial) -> str:
    """Return the attention backend of a training pass: the trial's, or the FP8 one for a recipe with fp8_dpa."""
    recipe = None if trial.recipe is None else recipes.load(trial.recipe)
    if source_of(trial) is not None:
        return trial.attention
    if recipe is None or not recipe.fp8_dpa or attention.in_fp8(trial.attention):
        return trial.attention
    return kernel_choice.in_fp8(trial.device, recipe.emulate)


def attention_problem(config: DecoderConfig, dtype: str, device: str) -> attention.Problem:
    """Return the attention problem of one sequence, the longest of the model."""
    shape = config.shape
    return attention.Problem(
        batch=1,
        heads=shape.heads,
        kv_heads=shape.groups,
        length=shape.length,
        head_dim=shape.head_dim,
        dtype=dtype,
        causal=True,
        dropout=config.dropout,
        device=device,
        capability=capability(device),
    )


def require_supported(trial: Trial) -> None:
    """Raise Unsupported, with the reason, if this machine cannot run the trial."""
    require_device(trial.device)
    own = StepProblem.of(trial).source is None
    if own:
        problem = attention_problem(config_of(trial), kernel_dtype(trial), trial.device)
        for name in dict.fromkeys((trial.attention, attention_of(trial))):  # an evaluation in bf16 uses the former
            require(name, attention.load(name).unsupported(problem))
    elif (rival := StepProblem.of(trial).against) is not None:
        _require_rival(trial, rival)
    elif StepProblem.of(trial).head not in (None, CHUNKED if StepProblem.of(trial).parts else None):
        raise Unsupported(f"head {StepProblem.of(trial).head}: a user's model takes {CHUNKED}, with te-bench's parts")
    elif trial.recipe is not None and recipes.load(trial.recipe).fp8_dpa:
        raise Unsupported(f"{trial.recipe}: attention in FP8 is for te-bench's own models; choose another recipe")
    elif trial.device == "cpu" and trial.attention in ("mem_efficient", "cudnn"):
        raise Unsupported(f"{trial.attention}: needs an NVIDIA GPU")
    if trial.device == "cpu" and trial.precision == "fp16":
        raise Unsupported("fp16: its gradient scaler and half-precision training are for GPUs; use bf16 on a CPU")
    if trial.device == "cpu" and trial.mode in ("compile-reduce-overhead", "cudagraph"):
        raise Unsupported(f"{trial.mode}: CUDA graphs need an NVIDIA GPU")
    if trial.mode == "cudagraph" and trial.precision == "fp16":
        raise Unsupported("cudagraph with fp16: the gradient scaler decides on the host whether to step")
    if own:
        _require_fast(trial, config_of(trial))
    _require_checkpointing(trial)
    _require_compiled_blocks(trial)
    _require_optimizer(trial)
    _require_parallel(trial)
    if trial.recipe:
        require(trial.recipe, recipes.load(trial.recipe).unsupported(trial.device, capability(trial.device)))


def _require_rival(trial: Trial, rival: Rival) -> None:
    """Raise Unsupported if the rival cannot train the user's model on this machine."""
    p = StepProblem.of(trial)
    assert p.source is not None
    if rival.adoption is None:
        raise Unsupported(f"rival {p.rival}: it trains only te-bench's own models")
    module = adopted.described(p.source).module
    require(f"rival {p.rival}", rival.adoption.unsupported(module, trial.device, capability(trial.device)))


def _require_fast(trial: Trial, config: DecoderConfig) -> None:
    """Raise Unsupported if this machine cannot run the trial's head, blocks or rival."""
    machine = machine_of(trial.device)
    p = StepProblem.of(trial)
    if p.against is not None:
        require(f"rival {p.rival or p.linears}", p.against.unsupported(config, trial.device, machine["capability"]))
    if p.blocks is not None:
        require(f"blocks {p.blocks}", _no_blocks(trial, config, machine))
    if p.head is not None:
        problem = linear_cross_entropy.Problem(
            d=config.shape.hidden,
            vocab=config.vocab_size,
            padded=p.padded_vocab,
            dtype=kernel_dtype(trial),
            **machine,
        )
        require(f"head {p.head}", linear_cross_entropy.load(p.head).unsupported(problem))
        if p.head == "fp8" and trial.recipe is not None and (reason := recipes.load(trial.recipe).lacks_fp8_head()):
            raise Unsupported(f"head fp8: {reason}; choose chunked")


def _require_optimizer(trial: Trial) -> None:
    """Raise Unsupported if this machine cannot run the trial's optimizer, or keep its weights and states."""
    p = StepProblem.of(trial)
    if p.weights is not None or p.states is not None:
        require(f"weights {p.weights or 'float32'}, states {p.states or 'float32'}", _no_fewer_bits(trial))
    if p.optimizer is not None:
        backend, cast = adamw.load(p.optimizer), "fp8" in (trial.precision, p.states)
        reason = backend.unsupported(adamw.Problem(fp8=cast, **machine_of(trial.device)))
        if trial.mode == "cudagraph" and backend.move is None:
            reason = reason or "no captured graph can follow its table; choose triton"
        if trial.precision == "fp16":
            reason = reason or "fp16: it has no gradient scaler"
        require(f"optimizer {p.optimizer}", reason)


def _no_fewer_bits(trial: Trial) -> str | None:
    """Return why the trial's weights and states cannot have fewer bits than float32, or None."""
    p = StepProblem.of(trial)
    if p.source is not None:
        return "only for te-bench's own models; leave --weights and --states out"
    if trial.precision not in ("bf16", "fp8"):
        return f"{trial.precision}: only for steps in bf16 and fp8"
    return fewer_bits.unsupported(
        p.weights,
        p.states,
        ranks=p.parallel is not None,
        accumulate=p.accumulate or 1,
        torchs=p.optimizer is None,
    )


def _require_checkpointing(trial: Trial) -> None:
    """Raise Unsupported for a step whose blocks' activations cannot be recomputed."""
    p = StepProblem.of(trial)
    if p.checkpointing is None:
        return
    reason = None
    if p.blocks is not None or (p.against is not None and p.against.own_blocks):
        reason = "these blocks are not modules, so their activations cannot be dropped; leave blocks out"
    elif trial.mode == "compile-reduce-overhead":
        reason = "torch.compile's own CUDA graphs overwrite what a block has kept; choose mode compile or cudagraph"
    elif p.source is not None and not checkpointing.blocks_of(adopted.described(p.source).module):
        reason = f"{p.source.model} has no nn.ModuleList of blocks"
    require("checkpointing", reason)


def _require_compiled_blocks(trial: Trial) -> None:
    """Raise Unsupported for a step whose blocks cannot be compiled one by one."""
    if trial.mode != compiled_blocks.MODE:
        return
    p = StepProblem.of(trial)
    reason = None
    if p.parallel is not None:
        reason = compiled_blocks.ONE_PROCESS
    elif p.as_it_is:
        reason = compiled_blocks.UNSEEN
    elif p.source is not None:
        reason = compiled_blocks.lacks(adopted.described(p.source).module)
    require(trial.mode, reason)


def _require_parallel(trial: Trial) -> None:
    """Raise Unsupported if the trial's step cannot be divided over ranks as asked."""
    p = StepProblem.of(trial)
    rival = p.against
    if p.parallel is None:
        if rival is not None and not rival.modes:
            raise Unsupported(f"rival {p.rival}: its steps are over ranks; give --parallel {' or '.join(rival.ranks)}")
        return
    if reason := indivisible(trial):
        raise Unsupported(reason)
    require(f"parallel {p.parallel}", parallel_of(trial).unsupported(**_how(trial)))


def indivisible(trial: Trial) -> str | None:
    """Return why the trial's step cannot be divided over ranks, as far as that is known on any machine; or None."""
    p = StepProblem.of(trial)
    if p.parallel is None:
        return None
    reason = p.against and _no_way(p, p.against)
    recipe = trial.recipe and recipes.load(trial.recipe)
    reason = reason or _mode_of(p).refused(**_how(trial), gather=p.gather, recipe=recipe) or _no_heads(p)
    return reason and f"parallel {p.parallel}: {reason}"


def _no_heads(p: StepProblem) -> str | None:
    """Return why ranks cannot share the layers of te-bench's own model, or None; other models answer themselves."""
    if p.source is not None or p.parallel not in parallel.SHARING or p.world is None:
        return None
    shape, ranks = configs()[p.model].shape, p.world // p.replicas
    for what, size in (("heads", shape.heads), ("heads of keys and values", shape.groups), ("features", shape.ffn)):
        if size % ranks:
            return f"the {size} {what} of {p.model} do not divide into {ranks} ranks; give fewer, or choose ddp"
    return None


def _how(trial: Trial) -> dict[str, Any]:
    """Return the arguments of a mode of parallelism's checks."""
    p = StepProblem.of(trial)
    return {"precision": trial.precision, "mode": trial.mode, "optimizer": p.optimizer, "blocks": p.blocks}


def _no_way(p: StepProblem, rival: Rival) -> str | None:
    """Return why the rival's step cannot be divided over ranks as asked, or None."""
    name = f"rival {p.rival or p.linears}"
    if rival.way is None:
        return f"{name} has no step over ranks; choose te-bench's own"
    if p.parallel not in rival.ranks:
        return f"{name} divides its steps by {' or '.join(rival.ranks)}; choose one of them"
    if p.source is not None:
        return f"{name} divides only the steps of te-bench's own models"
    if p.gather is not None or p.checkpointing is not None:
        return f"{name} has no gather and no checkpointing of te-bench's; leave them out"
    if p.sequence_parallel is not None:
        return f"{name} shares tokens in its own way; leave sequence_parallel out"
    return None


def _no_blocks(trial: Trial, config: DecoderConfig, machine: dict[str, Any]) -> str | None:
    if config.dropout:
        return f"dropout {config.dropout}: no fused kernel has it"
    if not decoder.family(config).says_parts():
        return f"{config.family} does not say its parts"
    if trial.device == "cpu":  # in plain PyTorch
        compiled = trial.mode.startswith("compile")
        return "compiled for a CPU, no record shows that they were fused; choose mode eager" if compiled else None
    cast = trial.precision == "fp8"
    norms = norm.Problem(
        n=config.shape.hidden, dtype=kernel_dtype(trial), kind=config.shape.norm, quantized=cast, **machine
    )
    activations = activation.Problem(quantized=cast, **machine)
    return norm.load("triton").unsupported(norms) or activation.load("triton").unsupported(activations)


def config_of(trial: Trial) -> DecoderConfig:
    p = StepProblem.of(trial)
    config = dataclasses.replace(configs()[p.model], block_size=p.block, vocab_size=p.vocab)
    if p.layers is not None:
        config = dataclasses.replace(config, **{config.LAYERS: p.layers})
    return config if p.dropout is None else dataclasses.replace(config, dropout=float(p.dropout))


def optim_of(trial: Trial) -> Optim:
    return Optim(**StepProblem.of(trial).optim)


def sizes_of(trial: Trial) -> dict[str, int]:
    """Return the arguments of training.data: block, batch and vocab, the unpadded one."""
    p = StepProblem.of(trial)
    assert isinstance(p.batch, int), "whoever asks for the largest has found it"
    return {"block": p.block, "batch": p.batch, "vocab": p.vocab}


def batches_of(trial: Trial, corpus: Corpus | None = None) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function from a step's number to (inputs, targets) on the device: from the corpus, or random."""
    source, sizes = StepProblem.of(trial).source, sizes_of(trial)
    sizes["batch"] *= optim_of(trial).accumulate
    if corpus is None and source is not None and (made := adopted.described(source)).drawn is not None:
        return lambda number: made.draw(
            sizes["batch"], sizes["block"], seed=trial.seed << 32 | number, device=trial.device
        )
    once = trial.problem.get("order") == "once"
    return Batches(corpus, **sizes, seed=trial.seed, device=trial.device, once=once).at


def recipe_of(trial: Trial) -> recipes.Recipe | None:
    """Return the trial's recipe, with its planted fault if it has one."""
    recipe, fault = recipes.load(trial.recipe) if trial.recipe else None, StepProblem.of(trial).fault
    return faults.load(fault)(recipe) if recipe is not None and fault is not None else recipe


def adopted_of(trial: Trial, kernel: str | None = None) -> Adopted:
    """Return the trial's user model on its device, with weights by the seed. kernel: as for Adopted."""
    p = StepProblem.of(trial)
    assert p.source is not None
    allow_tf32(trial.precision)
    made = adopted.make(p.source, attention=trial.attention, device=trial.device, seed=trial.seed, layers=p.layers)
    dtypes = {p.dtype for p in made.module.parameters()} - {torch.float32}
    if dtypes and (trial.precision in ("fp32", "fp16") or p.optimizer is not None):
        what = trial.precision if p.optimizer is None else f"optimizer {p.optimizer}"
        raise Unsupported(f"{what}: the model's parameters are {', '.join(map(str, dtypes))}; it wants float32")
    perturb(made.module, trial)
    how: dict[str, Any] = {"dropout": p.dropout != 0, "kernel": kernel, "parts": p.parts}
    how |= {"filter": lambda name, _: name.rpartition(".")[2] != "lm_head"} if p.head is not None else {}
    if p.against is not None:
        return Adopted(made, rival=p.against.adoption, **how)
    return Adopted(made, recipe=recipe_of(trial), **how)


def build(trial: Trial) -> Decoder:
    """Return the trial's decoder on its device, with weights by the seed."""
    p, recipe = StepProblem.of(trial), recipe_of(trial)
    allow_tf32(trial.precision)
    torch.manual_seed(trial.seed)
    with torch.device(trial.device):
        model = decoder.build(
            config_of(trial),
            attention=trial.attention,
            padded_vocab_size=p.padded_vocab,
            recipe=recipe if p.against is None else None,
            head=p.head,
            blocks=p.blocks,
        )
    if p.against is not None:
        p.against.build(model)
    if p.weights is not None:
        model.halve()
    perturb(model, trial)
    return model


def perturb(model: nn.Module, trial: Trial) -> None:
    """Move each weight by the trial's number of units in the last place, by the same pattern for any weights.

    Raise CheckFailed if none moved.
    """
    ulps = StepProblem.of(trial).perturb_ulp
    if ulps is None:
        return
    few = [(p, p.detach().flatten()[:LOOKED_AT].clone()) for p in model.parameters()]
    if isinstance(model, Decoder):
        model.perturb(trial.seed, ulps)
    else:
        adopted.perturb(model.module if isinstance(model, Adopted) else model, trial.seed, ulps)
    if all(torch.equal(p.detach().flatten()[:LOOKED_AT], before) for p, before in few):
        raise CheckFailed(f"perturb_ulp {ulps}: no weight moved")


def model_of(trial: Trial) -> Decoder | Adopted:
    """Return the trial's model, te-bench's own or a user's, with checkpointed blocks if the trial asks for them."""
    p = StepProblem.of(trial)
    model = build(trial) if p.source is None else adopted_of(trial)
    if p.checkpointing is not None:
        checkpointing.checkpoint_blocks(model)
    return model


def step_of(trial: Trial) -> TrainStep:
    """Return one training step of the trial's model, in its precision and mode, with its optimizer."""
    p = StepProblem.of(trial)
    return TrainStep(
        model_of(trial),
        optim_of(trial),
        precision=trial.precision,
        mode=trial.mode,
        optimizer=p.optimizer,
        parallel=parallel_of(trial),
        states=p.states,
    )


def parallel_of(trial: Trial) -> Parallel:
    """Return how the trial's step is divided over the ranks, of which this process is one."""
    p = StepProblem.of(trial)
    if p.parallel is None:
        return parallel.SINGLE
    names = ("shard", "sequence_parallel", "overlap", "gather") if p.against is None else ()
    return _mode_of(p)(**{name: value for name in names if (value := getattr(p, name)) is not None})


def _mode_of(p: StepProblem) -> type[Parallel]:
    """Return the class that divides a step over ranks: te-bench's, or a rival's own."""
    assert p.parallel is not None
    if p.against is None:
        own: type[Parallel] = parallel.kind(p.parallel)
        return own
    assert p.against.way is not None, "_no_way refuses it"
    theirs: type[Parallel] = ways.kind(p.against.way, p.parallel)
    return theirs


def allow_tf32(precision: str) -> None:
    """Set TF32 as nanoGPT does: under autocast only SDPA's math kernel multiplies in float32; "fp32" means IEEE float32."""
    torch.backends.cuda.matmul.allow_tf32 = precision in ("bf16", "fp16", "fp8")
