"""What the model workloads share: building the trial's model and step, its check against the reference, its memory.

problem["head"]: a name of te_bench.kernels.linear_cross_entropy, problem["optimizer"]: one of te_bench.kernels.adamw,
problem["blocks"]: "fused"; absent, all logits at once, torch's fused AdamW, and blocks of one module after the other.
problem["linears"]: a peer's in place of te.Linear, of models.torchao_linears.
"""

import dataclasses
import gc
import math
import resource
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import _check, _errors, _operator
from te_bench.experiments.workloads._check import Quantity, judge
from te_bench.experiments.workloads._emulation import emulate
from te_bench.kernels import activation, adamw, attention, linear_cross_entropy, norm
from te_bench.models import faults, fp8, torchao_linears
from te_bench.models import recipe as recipes
from te_bench.models.recipe import Float8CurrentScaling
from te_bench.models.zoo.gpt import CONFIGS, GPT, GPTConfig
from te_bench.training.step import Optim, TrainStep, autocast

#: Unit round-off of the compute format: the floor below which two right answers may differ.
EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}
#: error <= FACTOR * (error of the library at this precision) + floor: FlashAttention's rule, tensor by tensor.
FACTOR = 2.0
#: FP8 rounds so coarsely that a wrong format hides below twice its error in any one tensor, so the geometric mean of all
#: tensors' error ratios to the emulation is held too. Right steps: 0.96 to 1.06 (tiny GPT, three shapes, 10 seeds each,
#: single tensors up to 1.46). E5M2 for inputs alone 1.15 or more, for weights 1.20, for both 1.35; no scale 1.24; a
#: doubled scale 1.48.
FP8_OVERALL = 1.12
FP8_LEAST = 0.5

#: Passes before the check of an FP8 step. Delayed scaling begins with scale 1, at which small gradients vanish, and with
#: them all that flows through their GEMM: each pass brings the next one down to its scale.
SETTLE = 4

#: What makes a step fast and nothing else: the references of the check are without.
FAST = ("head", "optimizer", "blocks", "linears")

#: Backends that keep the scores, and make dS of no rounded output.
UNFUSED = ("manual", "math")

#: Scores of a layer that the references hold at once: 128 MiB in float64, or those of one sequence.
TOGETHER = 2**24

#: What the head `fp8` multiplies softmax - onehot by, which is at most 1: a loss's mean over the targets comes after it.
HEAD_SCALE = 2.0**15

_PEAK = Path("/proc/self/clear_refs")

#: Of the loss, a mean over so many tokens that rounding cancels: half of ln(50304) / ln(50257) - 1, what padding in the
#: softmax would add, and for FP8 (one rounding of a weight touches every token) what the emulation was seen to stray.
LOSS_FLOOR = {"fp32": 4e-7, "bf16": 4e-5, "fp16": 4e-5, "fp8": 1e-3}


def capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def kernel_dtype(trial: Trial) -> str:
    """Of what kernels that do not multiply in FP8 read: bf16 in an fp8 trial, its precision in all others."""
    return {"fp8": "bf16"}.get(trial.precision, trial.precision)


def require_supported(trial: Trial) -> None:
    """Raise Unsupported, with the reason, when this machine cannot run the trial's rungs."""
    if trial.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("torch sees no NVIDIA GPU")
    config = config_of(trial)
    problem = attention.Problem(
        batch=1,
        heads=config.n_head,
        length=trial.number("block"),
        head_dim=config.n_embd // config.n_head,
        dtype=kernel_dtype(trial),
        causal=True,
        dropout=config.dropout,
        device=trial.device,
        capability=capability(trial.device),
    )
    for name in dict.fromkeys((trial.attention, _check.attention_of(trial))):  # an evaluation in bf16 takes the former
        reason = attention.load(name).unsupported(problem)
        if reason:
            raise Unsupported(f"{name}: {reason}")
    if trial.device == "cpu" and trial.precision == "fp16":
        raise Unsupported("fp16: its gradient scaler and half-precision training are for GPUs; use bf16 on a CPU")
    if trial.device == "cpu" and trial.mode in ("compile-reduce-overhead", "cudagraph"):
        raise Unsupported(f"{trial.mode}: CUDA graphs need an NVIDIA GPU")
    if trial.mode == "cudagraph" and trial.precision == "fp16":
        raise Unsupported("cudagraph with fp16: the gradient scaler decides on the host whether to step")
    _require_fast(trial, config)
    if trial.recipe:
        reason = recipes.load(trial.recipe).unsupported(trial.device, capability(trial.device))
        if reason:
            raise Unsupported(f"{trial.recipe}: {reason}")


def _require_fast(trial: Trial, config: GPTConfig) -> None:
    """Raise Unsupported when this machine cannot run the trial's head, optimizer or blocks."""
    machine: dict[str, Any] = {"device": trial.device, "capability": capability(trial.device)}
    head, optimizer, blocks, linears = (trial.problem.get(name) for name in FAST)
    reasons: dict[str, str | None] = {}
    if linears is not None:
        reasons[f"linears {linears}"] = torchao_linears.unsupported(**machine)
    if blocks is not None:
        reasons[f"blocks {blocks}"] = _no_blocks(trial, config, machine)
    if head is not None:
        problem = linear_cross_entropy.Problem(
            d=config.n_embd,
            vocab=config.vocab_size,
            padded=trial.number("padded_vocab"),
            dtype=kernel_dtype(trial),
            **machine,
        )
        reasons[f"head {head}"] = linear_cross_entropy.load(str(head)).unsupported(problem)
    if optimizer is not None:
        backend, cast = adamw.load(str(optimizer)), trial.precision == "fp8"
        reason = backend.unsupported(adamw.Problem(fp8=cast, **machine))
        if trial.mode == "cudagraph" and backend.move is None:
            reason = reason or "no captured graph can follow its table; choose triton"
        if trial.precision == "fp16":
            reason = reason or "fp16: it has no gradient scaler"
        reasons[f"optimizer {optimizer}"] = reason
    for name, reason in reasons.items():
        if reason:
            raise Unsupported(f"{name}: {reason}")


def _no_blocks(trial: Trial, config: GPTConfig, machine: dict[str, Any]) -> str | None:
    """Why the trial's blocks cannot be fused, or None."""
    if config.dropout:
        return f"dropout {config.dropout}: no fused kernel has it"
    if trial.device == "cpu":  # in plain PyTorch
        compiled = trial.mode.startswith("compile")
        return "compiled for a CPU nothing shows that they were fused; choose mode eager" if compiled else None
    cast = trial.precision == "fp8"
    norms = norm.Problem(n=config.n_embd, dtype=kernel_dtype(trial), kind="layernorm", quantized=cast, **machine)
    activations = activation.Problem(quantized=cast, **machine)
    return norm.load("triton").unsupported(norms) or activation.load("triton").unsupported(activations)


def config_of(trial: Trial) -> GPTConfig:
    block, vocab = trial.number("block"), trial.number("vocab")
    config = dataclasses.replace(CONFIGS[str(trial.problem["model"])], block_size=block, vocab_size=vocab)
    dropout = trial.problem.get("dropout")
    return config if dropout is None else dataclasses.replace(config, dropout=float(dropout))


def optim_of(trial: Trial) -> Optim:
    """Every field of Optim that the problem names."""
    names = {f.name for f in dataclasses.fields(Optim)}
    return Optim(**{key: value for key, value in trial.problem.items() if key in names})  # type: ignore[arg-type]


def sizes_of(trial: Trial) -> dict[str, int]:
    """What models.data asks for: block, batch and vocab, the true one."""
    return {name: trial.number(name) for name in ("block", "batch", "vocab")}


def build(trial: Trial) -> GPT:
    """The trial's model on its device; the seed decides the weights. problem: perturb_ulp and fault, where it asks."""
    recipe = recipes.load(trial.recipe) if trial.recipe else None
    if recipe is not None and "fault" in trial.problem:
        recipe = faults.load(str(trial.problem["fault"]))(recipe)
    padded, head, blocks = trial.number("padded_vocab"), trial.problem.get("head"), trial.problem.get("blocks")
    linears = trial.problem.get("linears")
    allow_tf32(trial.precision)
    torch.manual_seed(trial.seed)
    with torch.device(trial.device):
        model = GPT(
            config_of(trial),
            attention=trial.attention,
            padded_vocab_size=padded,
            recipe=None if linears is not None else recipe,
            head=None if head is None else str(head),
            blocks=None if blocks is None else str(blocks),
        )
    if linears is not None:
        torchao_linears.convert(model, str(linears), leave=("lm_head",))
    if "perturb_ulp" in trial.problem:
        model.perturb(trial.seed, trial.number("perturb_ulp"))
    return model


def step_of(trial: Trial) -> TrainStep:
    """One training step of the trial's model, in its precision and mode, by its optimizer."""
    optimizer = trial.problem.get("optimizer")
    return TrainStep(
        build(trial),
        optim_of(trial),
        precision=trial.precision,
        mode=trial.mode,
        optimizer=None if optimizer is None else str(optimizer),
    )


def allow_tf32(precision: str) -> None:
    """As nanoGPT sets it: under autocast only SDPA's math kernel multiplies in float32; "fp32" means IEEE float32."""
    torch.backends.cuda.matmul.allow_tf32 = precision in ("bf16", "fp16", "fp8")


def check_step(trial: Trial, tokens: Tensor, targets: Tensor, step: TrainStep) -> dict[str, Any]:
    """Hold loss and every gradient of one step to the same model in float64 with manual attention and no padding.

    The yardstick is the same model at the trial's own precision, eager, with manual attention, rounded as fused kernels do
    where the trial's is one, and FP8 emulated, attention's by manual_fp8 where the trial's is in FP8. The trial may err
    FACTOR times as much, tensor by tensor, plus a floor. Raises CheckFailed, naming the worst tensor.
    So may its scale, and each row of it (_errors); and attention is held apart (_operator).
    Models with dropout are compared without it, eagerly: random masks cannot be.
    """
    if config_of(trial).dropout:
        trial = dataclasses.replace(trial, mode="eager", problem={**trial.problem, "dropout": 0.0})
        step = step_of(trial)
    for _ in range(SETTLE if trial.recipe else 0):
        step.gradients(tokens, targets)
    loss, ours = step.gradients(tokens, targets)
    vocab = trial.number("vocab")
    unpadded = {name: value for name, value in trial.problem.items() if name not in FAST} | {"padded_vocab": vocab}
    exact = dataclasses.replace(trial, attention="manual", precision="fp64", recipe=None, problem=unpadded)
    definition = attention.yardstick(_check.attention_of(trial))
    library = dataclasses.replace(trial, attention=definition, recipe=None, problem=unpadded)
    true_loss, truth = _in_rows(exact, step.optim, tokens, targets)
    recipe = recipes.load(trial.recipe) if trial.recipe else None
    fp8_head = trial.problem.get("head") == "fp8"
    as_fused = definition == "manual" and trial.attention not in UNFUSED
    library_loss, yardstick = _in_rows(library, step.optim, tokens, targets, recipe, fp8_head, as_fused)
    allow_tf32(trial.precision)  # building the references set it for theirs
    padding = ours["transformer.wte.weight"][vocab:]
    ours["transformer.wte.weight"] = ours["transformer.wte.weight"][:vocab]
    truth, yardstick, ours = _parts(truth), _parts(yardstick), _parts(ours)

    floor = 4 * EPSILON[trial.precision]
    # Half-precision log-probabilities are rounded one by one (autocast on a GPU): four sigma of their mean's rounding.
    rounding = 4 * EPSILON[trial.precision] / math.sqrt(12 * targets.numel())
    loss_floor = LOSS_FLOOR["fp8" if fp8_head else trial.precision]
    loss_limit = FACTOR * abs(library_loss - true_loss) + (loss_floor + rounding) * abs(true_loss)
    quantities = [Quantity("loss", abs(loss - true_loss), loss_limit)]
    errors = {name: relative_error(yardstick[name], gradient) for name, gradient in truth.items()}
    typical = statistics.median(errors.values())  # a tensor where the library happened to round well is no yardstick
    for name, gradient in truth.items():
        limit = FACTOR * max(errors[name], typical) + floor
        quantities.append(Quantity(f"grad {name}", relative_error(ours.get(name), gradient), limit))
    slack = FACTOR if "linears" in trial.problem else 1.0  # a peer may round more coarsely than the recipe says
    rounded = {"typical": typical, "slack": slack}
    for name, gradient in truth.items():
        quantities += _errors.quantities(
            f"grad {name}", ours.get(name), gradient, yardstick[name], trial.precision, **rounded
        )
    if trial.precision == "fp8":
        ratios = [q.error / max(errors[name], 1e-30) for name, q in zip(truth, quantities[1:], strict=False)]
        overall = geometric_mean(ratios)
        if "linears" not in trial.problem:
            quantities.append(Quantity("grad, ratio to FP8 emulation", overall, FP8_OVERALL))
        # A step that rounds much less was not computed in FP8: bf16 0.07; E4M3 gradients, which is legal, 0.70.
        quantities.append(Quantity("grad, ratio of FP8 emulation to it", 1 / max(overall, 1e-30), 1 / FP8_LEAST))
    quantities.append(Quantity("grad padding rows", _largest(padding), 0.0))
    quantities += _check_attention(trial, tokens, targets, step)
    return judge("manual attention, fp64, unpadded, same weights", quantities)


def _check_attention(trial: Trial, tokens: Tensor, targets: Tensor, step: TrainStep) -> list[Quantity]:
    """_operator.check of an eager pass: of a micro-batch, or a few of its rows where the step may need less memory than it.

    `auto` gets the whole, for which it has chosen.
    """
    rows = len(tokens) // step.optim.accumulate
    if trial.mode != "eager" and attention.load(trial.attention).chosen is None:
        rows = min(rows, 4)
    name = _check.attention_of(trial)
    precision = "fp8" if attention.in_fp8(name) else kernel_dtype(trial)
    return _operator.check(step, tokens[:rows], targets[:rows], name, precision)


def numerics_of(trial: Trial, model: Any, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """{"numerics": te.numerics} of one more forward and backward pass, in eager mode and off the clock; {} without FP8."""
    if trial.recipe is None:
        return {}
    with fp8.record_numerics():
        with autocast(tokens.device, trial.precision), model.autocast():
            loss = model(tokens, targets)
        loss.backward()
    model.zero_grad(set_to_none=True)
    return {"numerics": fp8.numerics(model)}


def _in_rows(
    trial: Trial,
    optim: Optim,
    tokens: Tensor,
    targets: Tensor,
    recipe: recipes.Recipe | None = None,
    fp8_head: bool = False,
    as_fused: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """loss, gradients of the eager model a few sequences at a time: the reference fits wherever the trial does.

    Small problems go by micro-batches as the trial's do, so that FP8's scales are of the same tensors as there.
    With a recipe, its FP8 is emulated; with fp8_head, that of the head `fp8`, one scale a tensor, its gradient's
    fixed; as_fused: attention is rounded as fused kernels do.
    """
    rows = len(tokens) // optim.accumulate
    together = max(1, TOGETHER // (config_of(trial).n_head * tokens.shape[1] ** 2))
    together = max(count for count in range(1, rows + 1) if rows % count == 0 and count <= together)
    optim = dataclasses.replace(optim, accumulate=len(tokens) // together)
    model = build(trial)
    if trial.precision == "fp64":  # after the initialisation, so that the weights are the trial's own float32 ones
        model.double()
    if recipe is not None:
        emulate(model, recipe, leave=("lm_head",))
    if fp8_head:
        emulate(model.lm_head, Float8CurrentScaling(), gradient_scale=HEAD_SCALE * targets.numel())
    if as_fused:
        block: Any
        for block in model.transformer.h:
            block.attn.attention = _operator.as_fused
    step = TrainStep(model, optim, precision=trial.precision, mode="eager")
    return step.gradients(tokens, targets)


def _parts(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients with q's, k's and v's apart: v's is so much larger at first that a wrong scale of q k^T drowns in it."""
    parts: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if name.endswith("c_attn.weight"):
            parts |= {f"{name} {part}": rows for part, rows in zip("qkv", gradient.chunk(3), strict=True)}
        else:
            parts[name] = gradient
    return parts


def relative_error(x: Tensor | None, truth: Tensor) -> float:
    """||x - truth|| / ||truth|| in float64 accumulation; NaN for a gradient that is missing."""
    if x is None:
        return math.nan
    difference = torch.linalg.vector_norm((x - truth).double())
    return (difference / torch.linalg.vector_norm(truth.double()).clamp(min=1e-30)).item()


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(ratio, 1e-30)) for ratio in ratios))


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def reset_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif _PEAK.exists():
        _PEAK.write_text("5")  # forget the largest resident set so far (proc(5)): it was the check's


def peak_memory(device: str, step: TrainStep | None = None) -> dict[str, list[float]]:
    """Bytes: allocated and reserved at their peak since reset_memory; on a CPU the largest resident set since then."""
    if device != "cuda":
        return {"peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]}
    reserved = {"peak_reserved_bytes": [float(torch.cuda.max_memory_reserved())]}
    if step is not None and step.mode == "compile-reduce-overhead":
        return reserved  # torch's own graphs were captured before, and their replays allocate nothing
    captured = step.captured_peak_bytes if step else None
    return {"peak_allocated_bytes": [float(max(torch.cuda.max_memory_allocated(), captured or 0))], **reserved}
