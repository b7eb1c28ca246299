"""Hold what ran in a step or a layer, part by part, to what the trial asked for.

The parts are GEMMs by precision, fused blocks, head, optimizer and execution mode; kernel_parts tells them by names. What a
trial asks for is counted from its model, not from the modules that were built: a Linear is three GEMMs, fprop, dgrad and
wgrad.

    expected = expected_of_step(trial, rows) or expected_of_layer(trial)    {part: (least, most)}
    parts(seen.counts, device)                     {part: how often it ran}
    require(trial, seen, measurement, expected)    CheckFailed where they disagree; else work["ran"] has the counts
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from te_bench.experiments import trial_model
from te_bench.experiments.adoption import MANUAL
from te_bench.experiments.checks import update
from te_bench.experiments.checks.kernel_parts import FAMILIES, GEMMS, kernels_of, kernels_of_rivals, parts
from te_bench.experiments.instruments import profiling
from te_bench.experiments.instruments.profiling import Seen
from te_bench.experiments.measurement import CheckFailed, Measurement, Unsupported
from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import NO_ATTENTION, OWN_ATTENTION, Trial
from te_bench.kernels import attention, linear_cross_entropy
from te_bench.kernels.activation import KINDS
from te_bench.models import decoder
from te_bench.models import recipe as recipes
from te_bench.models.adopted import Adopted
from te_bench.models.configs import DecoderConfig
from te_bench.models.parts import AttentionPart, MLPPart
from te_bench.models.sources import PINNED
from te_bench.training import compiled_blocks
from te_bench.training.step import TrainStep

Range = tuple[int, int | None]  # the least and the most that is right; None is no limit
Expected = dict[str, Range]

LINEARS = 4  # of a layer: QKV as one, the projection, and the MLP's two
PASSES = 3  # GEMMs of a Linear: fprop, dgrad, wgrad; a recipe may leave wgrad in half precision
SOME: Range = (1, None)
NONE: Range = (0, 0)

WORDS = {
    "gemm_fp8": "GEMMs in FP8",  # or FP4
    "gemm_half": "GEMMs in half precision",
    "gemm_float": "GEMMs in float32 or wider",
    "block_format_casts": "casts to MXFP8 or NVFP4",
    "fused_blocks": "fused blocks",
    "rotary": "rotations of queries and keys",
    "rows": "activations and norms of heads",
    "compiled": "what torch.compile made",
    "graphs": "replays of a captured graph",
    "host_launches": "kernels launched one by one",
}


def _same_kernels(name: str, head: linear_cross_entropy.Backend, device: str) -> bool:
    return device in head.kernels and linear_cross_entropy.load(name).kernels.get(device) == head.kernels[device]


def expected_of_step(trial: Trial, rows: int, model: nn.Module | None = None) -> Expected:
    """Return what a training step of the trial is made of. rows: tokens of a micro-batch; model: of a user's step."""
    if isinstance(model, Adopted):
        return _expected_of_adopted(trial, model)
    config = trial_model.config_of(trial)
    p, made = StepProblem.of(trial), _made_of(config)
    accumulate = trial_model.optim_of(trial).accumulate
    linears = len(made.linears)
    kept = 0 if trial.recipe is None else len(recipes.load(trial.recipe).keeps(made.linears))
    expected = _gemms(trial, (linears - kept) * accumulate)
    expected = _plus(expected, _plain(trial), PASSES * kept * accumulate)
    overlaps = p.overlap is not None and trial.device == "cuda"
    pieces = (p.world or 1) // p.replicas if overlaps else 1  # fprop and dgrad are a GEMM for each rank's rows
    for part, some in ((_linears(trial), linears - kept), (_plain(trial), kept)):
        expected = _plus(expected, part, (PASSES - 1) * (pieces - 1) * some * accumulate)
    if p.checkpointing is not None:  # a block computes its products again, but for the last, of which nothing is kept
        least, most = expected[_linears(trial)]
        again = (linears - kept - made.parts) * accumulate * pieces
        expected[_linears(trial)] = (least + again, None if most is None else most + linears * accumulate * pieces)
        if expected["block_format_casts"] != NONE:
            expected["block_format_casts"] = (expected["block_format_casts"][0], None)
    their_head = p.against.head if p.against else None
    head = their_head(config) if their_head else linear_cross_entropy.load(p.head or "reference")
    chosen = {f"{family}_{getattr(p, family) or 'torch'}" for family in FAMILIES}
    if their_head:  # it may be one of te_bench's backends, too
        chosen |= {f"head_{name}" for name in linear_cross_entropy.names() if _same_kernels(name, head, trial.device)}
    for part in (*kernels_of(trial.device), "optimizer_torch"):
        least = accumulate if part.startswith("head") else 1
        expected[part] = (least, None) if part in chosen else NONE
    if trial.device != "cpu" or "cpu" not in head.kernels:  # there the head is one operator and shows no GEMM
        half = 2 if _plain(trial) == "gemm_half" else 4
        in_fp8, others = head.gemms(rows, config.shape.hidden, p.padded_vocab, half, _rounds_head(trial, config))
        expected = _plus(_plus(expected, "gemm_fp8", accumulate * in_fp8), _plain(trial), accumulate * others)
    # On a GPU a kernel adds and norms before each part and at the end; on a CPU a Function ends at each attention.
    times = accumulate * (made.parts + 1 if trial.device == "cuda" else made.attentions + 1)
    fused = p.blocks is not None
    expected["fused_blocks"] = (times, times) if fused else NONE
    if fused and trial.device == "cuda" and not trial.mode.startswith("compile"):
        turns = accumulate * made.turns
        expected["rotary"] = (turns, turns)
        expected["rows"] = (accumulate * made.rows, None)
    if trial.device == "cuda":
        theirs = f"rival_{p.against.title}" if p.against else None
        for part in kernels_of_rivals():
            expected[part] = (accumulate * made.parts, None) if part == theirs else NONE
    return expected | _mode(trial, as_it_is=p.as_it_is, theirs=_by_operators_of_its_own(trial))


def _rounds_head(trial: Trial, config: DecoderConfig) -> bool:
    """Return whether the gradient of the head's weight is bfloat16, as of a bfloat16 weight or an optimizer's copy.

    A table that the embedding shares has one gradient for both. Under a compiler each makes its own.
    """
    p = StepProblem.of(trial)
    compiled = _compiles(trial, p.as_it_is) and trial.mode != compiled_blocks.MODE
    copied = p.optimizer is not None and (not config.shape.tied or compiled)
    return trial.precision in ("bf16", "fp8") and (p.weights == "bf16" or copied)


def _expected_of_adopted(trial: Trial, model: Adopted) -> Expected:
    """Return what is known of a user's step: GEMMs of its precision, a head by name, a rival's kernels, optimizer, mode."""
    p, accumulate = StepProblem.of(trial), trial_model.optim_of(trial).accumulate
    least = accumulate * model.gemms
    # first_pass is eager; under torch.compile te.convert's blocks go layer by layer.
    fused = SOME if model.fused and not trial.mode.startswith("compile") else NONE
    expected: Expected = {"gemm_fp8": NONE, "block_format_casts": NONE, "fused_blocks": fused}
    if trial.precision == "fp8":
        if _casts_blocks(trial):
            expected["block_format_casts"] = (least, None)
        if _linears(trial) == "gemm_fp8":
            expected["gemm_fp8"] = (least, None)
        if _has_half_wgrad(trial):
            expected["gemm_half"] = (least // (PASSES - 1), None)
    if trial.precision in ("bf16", "fp16") and any(isinstance(module, nn.Linear) for module in model.modules()):
        expected["gemm_half"] = SOME  # its own code may leave autocast
    chosen = {f"optimizer_{p.optimizer or 'torch'}", f"head_{p.head}"}
    for part in (*kernels_of(trial.device), "optimizer_torch"):
        if part.startswith("optimizer") or p.head is not None:
            expected[part] = SOME if part in chosen else NONE
    if trial.device == "cuda" and p.against is not None and p.against.kernels is not None:
        expected[f"rival_{p.against.title}"] = SOME
    return expected | _mode(trial, as_it_is=p.as_it_is, theirs=True)  # its own code may compile parts of itself


@dataclasses.dataclass(frozen=True, slots=True)
class MadeOf:
    """How many parts of each kind all blocks of a model have, as the model describes itself.

    linears: names of all but the head. turns: rotations of queries and keys, forward and backward. rows: gated
    activations and norms of heads, each a kernel that goes by rows.
    """

    parts: int
    linears: tuple[str, ...]
    attentions: int
    turns: int
    rows: int


@functools.cache
def _made_of(config: DecoderConfig) -> MadeOf:
    """Count them by the model's parts and modules; no weight is allocated."""
    with torch.device("meta"):
        model = decoder.build(config)
    parts, rotary = model.parts(), model.angles(1) is not None
    attentions = [part for part in parts if isinstance(part, AttentionPart)]
    gated = [part for part in parts if isinstance(part, MLPPart) and KINDS[part.activation][1]]
    normed = [norm for part in attentions for norm in (part.q_norm, part.k_norm) if norm is not None]
    turns = 2 * len(attentions) if rotary else 0
    named = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears = tuple(name for name in named if name != model.head_name)
    return MadeOf(len(parts), linears, len(attentions), turns, len(gated) + len(normed))


def expected_of_layer(
    trial: Trial, *, linears: int = LINEARS, theirs: bool = False, emulated: bool = False
) -> Expected:
    """Return what an iteration of a layer is made of, or of its MLP alone with two `linears`.

    theirs: the layer is of a library that compiles parts of itself in any mode. emulated: FP8 without FP8's GEMMs; a
    captured graph shows none of its products.
    """
    expected = _gemms(trial, linears)
    if emulated:
        expected["gemm_float"] = (0, None)
        if trial.mode == "cudagraph":
            del expected["gemm_fp8"]
    return expected | _mode(trial, as_it_is=True, theirs=theirs)


def expected_of_head(trial: Trial, head: str) -> Expected:
    """Return what a head alone is made of: its own kernels, none of another head's, and a compiler's or none."""
    own = f"head_{head}"
    heads = [part for part in kernels_of(trial.device) if part.startswith("head_")]
    return {part: SOME if part == own else NONE for part in heads} | _mode(trial, as_it_is=True)


def _plain(trial: Trial) -> str:
    """Return the part that GEMMs without FP8 are."""
    return "gemm_float" if trial.precision == "fp32" else "gemm_half"


def _linears(trial: Trial) -> str:
    """Return the part that the products of the trial's Linears are."""
    return "gemm_fp8" if trial.precision == "fp8" and not _by_half_gemms(trial) else _plain(trial)


def _by_half_gemms(trial: Trial) -> bool:
    here = torch.cuda.get_device_capability() if trial.device == "cuda" and torch.cuda.is_available() else None
    return trial.recipe is not None and recipes.load(trial.recipe).by_half_gemms(trial.device, here)


def _casts_blocks(trial: Trial) -> bool:
    return trial.recipe is not None and recipes.load(trial.recipe).block_formats


def _has_half_wgrad(trial: Trial) -> bool:
    return trial.recipe is not None and recipes.load(trial.recipe).bf16_wgrad


def _plus(expected: Expected, part: str, times: int) -> Expected:
    least, most = expected[part]
    return {**expected, part: (least + times, None if most is None else most + times)}


def _gemms(trial: Trial, linears: int) -> Expected:
    """Return the GEMMs of so many Linears; on a GPU attention of ordinary operators has more of the same names."""
    ordinary = trial.device == "cuda" and trial.attention != NO_ATTENTION
    ordinary = ordinary and trial_model.attention_of(trial) in _without_kernels()
    expected: Expected = {part: (0, None if ordinary and part != "gemm_fp8" else 0) for part in GEMMS}
    casts = PASSES * linears if _casts_blocks(trial) else 0  # of x, W and dy
    expected["block_format_casts"] = (casts, casts)
    plain = linears if _has_half_wgrad(trial) else 0
    return _plus(_plus(expected, _plain(trial), plain), _linears(trial), PASSES * linears - plain)


@functools.cache
def _without_kernels() -> list[str]:
    """Return the attention backends that no kernel of a GPU tells; `auto` hands on to others."""
    backends = {name: attention.load(name) for name in attention.names()}
    return [name for name, backend in backends.items() if "cuda" not in backend.kernels and backend.choose is None]


def _compiles(trial: Trial, as_it_is: bool) -> bool:
    return trial.mode.startswith("compile") or (trial.mode == "cudagraph" and not as_it_is)


def _mode(trial: Trial, *, as_it_is: bool, theirs: bool = False) -> Expected:
    """Return what the execution mode launches. as_it_is: mode cudagraph compiles nothing.

    A step that is captured whole leaves the host few kernels to launch.
    """
    expected: Expected = {}
    if _compiles(trial, as_it_is):
        expected["compiled"] = SOME
    elif trial.mode == "eager" and not theirs and not _attention_compiled(trial):
        expected["compiled"] = NONE
    if trial.device == "cuda":
        expected["graphs"] = SOME if trial.mode in ("compile-reduce-overhead", "cudagraph") else NONE
    if trial.mode == "cudagraph":
        expected["host_launches"] = (0, PASSES * LINEARS - 1)  # fewer than a block has GEMMs
    return expected


def _attention_compiled(trial: Trial) -> bool:
    return (
        trial.attention not in (NO_ATTENTION, OWN_ATTENTION)
        and attention.load(trial_model.attention_of(trial)).compiled
    )


def _by_operators_of_its_own(trial: Trial) -> bool:
    """Return whether a rival's step calls attention by operators of its own."""
    if "rival" not in trial.problem:
        return False
    rival = StepProblem.of(trial).against
    return rival is not None and rival.own_attention


def disagreement(expected: Expected, ran: Mapping[str, int]) -> str | None:
    """Return which parts did not run as they were asked for, with both numbers, or None."""
    reasons = []
    for part, (least, most) in expected.items():
        if least <= ran[part] and (most is None or ran[part] <= most):
            continue
        right = str(least) if most == least else f"{least} or more" if most is None else f"{most} at most"
        reasons.append(f"{WORDS.get(part, part.replace('_', ' '))}: {right} expected, {ran[part]} ran")
    return "; ".join(reasons) or None


def require(trial: Trial, seen: Seen, measurement: Measurement, expected: Expected) -> Measurement:
    """Return the measurement with kernels, launches and work["ran"]. Raises CheckFailed, without timings."""
    measurement = require_attention(trial, seen, measurement)
    ran = parts(seen.counts, trial.device, half=trial.precision != "fp32")
    measurement = dataclasses.replace(measurement, work={**measurement.work, "ran": ran})
    if reason := disagreement(expected, ran):
        raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))
    return measurement


def require_step(
    trial: Trial, step: TrainStep, call: Callable[[], object], tokens: int, measurement: Measurement
) -> Measurement:
    """Return `require` of a few calls, each a step of `tokens` on all ranks. Raises CheckFailed for another step's calls."""
    with update.made(step, lambda: profiling.LOOKS[trial.device]):
        seen = profiling.kernels_seen(call, trial.device)
    rows = tokens // step.optim.accumulate // step.parallel.replicas
    return require(trial, seen, measurement, expected_of_step(trial, rows, step.model))


def require_attention(trial: Trial, seen: Seen, measurement: Measurement) -> Measurement:
    """Return the measurement with its kernels and, in work, the launches that were counted and `auto`'s choice.

    Raises CheckFailed, without timings, if another attention ran; Unsupported if a compiler made that of it.
    """
    more: dict[str, Any] = {} if seen.launches is None else {"launches": seen.launches}
    if trial.attention == NO_ATTENTION:
        return dataclasses.replace(measurement, kernels=seen.names, work={**more, **measurement.work})
    if trial.attention == OWN_ATTENTION:
        more = {"chosen": ", ".join(attention.seen(trial.device, seen.names)) or "none that has a name", **more}
        return dataclasses.replace(measurement, kernels=seen.names, work={**more, **measurement.work})
    eager = trial.mode == "eager" and not _by_operators_of_its_own(trial)
    reason = attention.wrong_kernel(trial_model.attention_of(trial), trial.device, seen.names, eager=eager)
    if reason:
        without = dataclasses.replace(measurement, samples={}, kernels=seen.names)
        if compiled := _made_by_compiler(trial, seen):
            raise Unsupported(compiled, without)
        raise CheckFailed(reason, without)
    chosen = attention.load(trial.attention).chosen
    if chosen is not None:
        more = {"chosen": ", ".join(chosen()), **more}
    return dataclasses.replace(measurement, kernels=seen.names, work={**more, **measurement.work})


def _made_by_compiler(trial: Trial, seen: Seen) -> str | None:
    """Return a reason if Inductor made a kernel of written-out attention (torch._inductor.fx_passes.fuse_attention).

    None if it stayed written out. A model's eager steps show whether it is written out at all.
    """
    if trial.mode == "eager" or trial_model.attention_of(trial) != MANUAL:
        return None
    found = [name for name in attention.seen(trial.device, seen.names) if name in PINNED]
    if not found:
        return None
    return (
        f"torch.compile turned the written-out attention into {' and '.join(found)} attention: that is the step "
        "torch.compile gives you; in mode eager it stays written out"
    )
