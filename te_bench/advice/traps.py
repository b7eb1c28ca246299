"""Find what costs users much time or memory, and no tool reports, in the records of an unchanged model. Pure; no torch."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench.advice.advise import Evidence
from te_bench.advice.candidates import Choice
from te_bench.advice.code import per_block
from te_bench.advice.decision import LinearGain, linear_gains
from te_bench.advice.steps import extent, frame_of, typical
from te_bench.experiments.adoption import PER_BLOCK
from te_bench.experiments.spec import Record
from te_bench.reports.analysis import naming
from te_bench.reports.page import text

MULTIPLE = 64  # GEMMs are fast if the vocabulary is a multiple of it
SMALL = 2**20  # a tensor with fewer elements costs nothing in any dtype
SLOW_KERNELS = ("math", "mem_efficient")  # SDPA chooses them silently
#: Names of GPU kernels, by which te_bench's attention backends recognise them.
FAST_KERNEL = re.compile(r"pytorch_flash|cudnn.*sdpa|cudnn.*flash|sdpa_sm\d+_flash")
MEM_EFFICIENT = re.compile(r"fmha_cutlass")
MASKED = 1.3  # limit over eager mode's attention: kernels vary by a tenth, and a causal mask costs 3.3 times the time
SLOWER = 1.02  # compiled over eager: two runs of a step differ by less


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A trap: what was found, why it costs, its measured cost if any, and the line that avoids it.

    records: the ids of trials that show it. seconds: its cost in one step, or None if that was not measured.
    """

    name: str
    what: str
    why: str
    mend: str
    records: tuple[str, ...]
    seconds: float | None = None
    noisy: bool = False  # whether the times behind `seconds` are

    @property
    def cost(self) -> str:
        if self.seconds is None:
            return "not measured"
        return f"{text.milliseconds(self.seconds)} ms a step{' (noisy)' if self.noisy else ''}"


class PerBlock(NamedTuple):
    """The lines that compile each block of the model by itself, and the runs of that step, if there are any."""

    lines: Sequence[str]
    runs: Sequence[Record] = ()


def of_evidence(evidence: Evidence) -> list[Finding]:
    """Return the traps in the user's model. Linears too small for FP8 count only on a GPU."""
    question, have = evidence.question, evidence.question.have
    costs = _measured(evidence)
    eager, compiled = (evidence.steps.get(dataclasses.replace(have, mode=mode), ()) for mode in ("eager", "compile"))
    return findings(
        evidence.survey,
        eager,
        compiled,
        linear_gains(evidence) if question.device == "cuda" else (),
        vocab=question.vocab,
        blocks=_per_block(evidence),
        seconds={name: cost.seconds for name, cost in costs.items()},
        noisy={name for name, cost in costs.items() if cost.noisy},
    )


def _per_block(evidence: Evidence) -> PerBlock | None:
    """Return how the user's step compiles each block; None if that is no choice, or does not run.

    Untimed, it is for transformers' models alone: they make a mask under torch.compile of the whole.
    """
    question, choice = evidence.question, dataclasses.replace(evidence.question.have, mode=PER_BLOCK)
    if choice not in question.choices or choice in evidence.wrong:
        return None
    runs = evidence.steps.get(choice, ())
    return PerBlock(per_block(question), runs) if runs or question.of_transformers else None


class _Cost(NamedTuple):
    """Seconds that a trap costs a step, by the times of parts alone."""

    seconds: float
    noisy: bool


def _measured(evidence: Evidence) -> dict[str, _Cost]:
    """Return what traps cost by parts alone: attention over the fastest, an odd vocabulary over the padded one."""
    question = evidence.question
    have = question.have
    mended = {
        "vocabulary": [dataclasses.replace(have, padded=True)],
        "attention": [dataclasses.replace(have, attention=name) for name in {c.attention for c in question.choices}],
    }
    saved = {name: max(_saved(evidence, choice) for choice in choices) for name, choices in mended.items()}
    return {name: cost for name, cost in saved.items() if cost.seconds > 0}


def _saved(evidence: Evidence, choice: Choice) -> _Cost:
    """Return what the choice saves over the user's step; 0 if a part was not timed."""
    prediction = evidence.predictions.get(choice)
    if prediction is None:
        return _Cost(0.0, noisy=False)
    return _Cost(sum(prediction.gains.values()), any(evidence.times[part].noisy for part in prediction.parts))


def findings(
    survey: Record,
    eager: Sequence[Record],
    compiled: Sequence[Record],
    gains: Sequence[LinearGain] = (),
    *,
    vocab: int | None = None,
    blocks: PerBlock | None = None,
    seconds: Mapping[str, float] | None = None,
    noisy: Collection[str] = (),
) -> list[Finding]:
    """Return all traps that an unchanged model's records show, the most expensive first.

    eager, compiled: runs of its whole steps. gains: of its Linears, if the GPU has FP8. vocab: the model's vocabulary,
    for a survey that saw no logits. blocks: how each block is compiled, if that is possible. seconds: {name of a trap:
    its measured cost}. noisy: names of traps with disturbed times.
    """
    found = [*_of_survey(survey, vocab), *_of_launches(eager), *_of_compile(eager, compiled, blocks), *_of_fp8(gains)]
    found += _of_breaks(compiled, naming.COMPILED)
    found += _of_breaks(blocks.runs if blocks else (), naming.COMPILED_BLOCKS)
    known = seconds or {}
    priced = [
        f if f.seconds is not None else dataclasses.replace(f, seconds=known.get(f.name), noisy=f.name in noisy)
        for f in found
    ]
    return sorted(priced, key=lambda finding: -(finding.seconds or 0.0))


def _of_survey(survey: Record, vocab: int | None) -> Iterator[Finding]:
    work, shown = survey.work, functools.partial(Finding, records=(survey.trial.id,))
    for call in work["attentions"]:
        if call["kernel"] in SLOW_KERNELS:
            why, mend = _slow(call)
            what = f"Attention runs the {call['kernel']} kernel in {call['calls']} calls of a step."
            yield shown(name="attention", what=what, why=why, mend=mend)
    if work["written_out"]:
        yield shown(
            name="attention",
            what=f"Attention is written out: {work['written_out']} softmaxes over all scores in a step.",
            why="every score is written to memory and read again, and kept for the backward pass",
            mend='Call F.scaled_dot_product_attention; with transformers attn_implementation="sdpa", if the model takes it.',
        )
    classes = work["vocab"] or vocab
    logits = [found["rows"] * classes for found in work["linears"] if found["out_features"] == classes]
    few = logits and max(logits) < SMALL  # e.g. a classifier, which has one row an image
    if classes is not None and classes > MULTIPLE and classes % MULTIPLE and not few:
        yield shown(
            name="vocabulary",
            what=f"The vocabulary, {classes}, is no multiple of {MULTIPLE}.",
            why="rows of the logits are not aligned: the head's products take slower kernels",
            mend=f"Pad embedding and head to {-(-classes // MULTIPLE) * MULTIPLE} rows.",
        )
    wide = sum(loss["elements"] for loss in work["losses"] if loss["dtype"] == "float32")
    if wide >= SMALL:
        yield shown(
            name="logits",
            what=f"The loss reads logits in float32: {text.gib(4.0 * wide)} GiB.",
            why="they are twice as large as in bf16, and so are their log-probabilities and gradients",
            mend='Use a head that keeps no logits: head="chunked" of te-bench, or Liger\'s fused linear cross-entropy.',
        )
    if work["norms_in_float32"] >= SMALL:
        yield shown(
            name="norms",
            what=f"Norms give float32 under autocast: {text.gib(4.0 * work['norms_in_float32'])} GiB a pass.",
            why="torch.autocast computes and returns them in float32, and a cast follows before each product",
            mend="Take te's norms: te.convert swaps them.",
        )
    if work.get("experts_in_float32"):  # older surveys lack it
        yield shown(
            name="experts",
            what=f"Under autocast {work['experts_in_float32']} products of experts in each pass compute in float32.",
            why="torch.autocast does not reach grouped_mm, which goes by the weights' dtype",
            mend='Take te.convert(model, parts="experts"), or keep the weights in bf16.',
        )
    if highest := max([*work["dropout"].values(), *(call["dropout"] for call in work["attentions"])], default=0.0):
        yield shown(
            name="dropout",
            what=f"The model trains with dropout {highest:g}.",
            why="te-bench's fused blocks, FP8 attention and cuDNN's FP8 have none, and some attention kernels refuse it",
            mend="Set it to 0, as language models are pretrained today.",
        )
    optimizer = work["optimizer"]
    if optimizer is not None and not optimizer["fused"]:
        yield shown(
            name="optimizer",
            what=f"The model's own optimizer, {optimizer['name']}, is not fused.",
            why="it launches several kernels for each group of parameters and reads each several times",
            mend="Give it fused=True.",
        )


def _slow(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return why no faster kernel takes the call, and how to fix the first reason."""
    found = []
    if call["mask"]:
        mend = "Give is_causal=True in place of a causal mask; pack sequences in place of masking padding."
        found.append(("it is given a mask, which the flash kernel does not take", mend))
    if (dtype := call["dtype"]) not in ("bfloat16", "float16"):
        found.append((f"its dtype is {dtype}", "Run it under torch.autocast, or cast q, k and v to bf16."))
    if (features := call["head_dim"]) > 256 or features % 8:
        found.append((f"its heads have {features} features", "Give heads a multiple of 8 features, 256 at most."))
    if call["dropout"]:
        found.append((f"its dropout is {call['dropout']:g}", "Set attention's dropout to 0."))
    if not found:
        return "SDPA found no faster kernel for it", "Pin a kernel: with sdpa_kernel(SDPBackend.CUDNN_ATTENTION)."
    return "; ".join(why for why, _ in found), found[0][1]


def _fast_kernel(record: Record) -> bool:
    return any(FAST_KERNEL.search(name) for name in record.kernels)


def _of_launches(eager: Sequence[Record]) -> Iterator[Finding]:
    frame = frame_of(eager)
    if frame.waits and frame.kernels is not None:
        idle = frame.seconds - frame.kernels
        yield Finding(
            name="launches",
            what=f"The GPU waits for Python in {text.percent(idle / frame.seconds)} of a step.",
            why="Python launches its kernels more slowly than the GPU runs them",
            mend='Capture the step, mode="cudagraph" (docs/huggingface.md), or train more sequences at a time.',
            records=tuple(record.trial.id for record in eager),
            seconds=idle,
        )


def _of_compile(eager: Sequence[Record], compiled: Sequence[Record], blocks: PerBlock | None) -> Iterator[Finding]:
    if not (eager and compiled):
        return
    masked = list(_of_masks(eager, compiled, blocks))
    yield from masked
    reason = masked or (blocks and blocks.runs)  # untimed blocks are tried for attention's sake alone
    yield from _slower_compile(eager, compiled, blocks if reason else None)


def _of_masks(eager: Sequence[Record], compiled: Sequence[Record], blocks: PerBlock | None) -> Iterator[Finding]:
    first = compiled[0]
    if _fast_kernel(eager[0]) and not _fast_kernel(first):
        slow = any(MEM_EFFICIENT.search(name) for name in first.kernels)
        yield Finding(
            name="compiled_attention",
            what="Under torch.compile attention loses its fast kernel"
            + (": the memory-efficient one runs." if slow else ": none of SDPA's runs."),
            why="the model gives it a mask there that it does not give in eager mode, or it is traced as plain products",
            mend=_by_block(eager, compiled, blocks)
            or "Leave torch.compile out, or pin the kernel and leave the mask out where it is the causal one.",
            records=(eager[0].trial.id, first.trial.id),
        )
    elif (took := _attention_s(eager[0])) and (takes := _attention_s(first)) > MASKED * took:
        yield Finding(
            name="compiled_attention",
            what=f"Under torch.compile attention takes {text.milliseconds(takes)} ms of a step, in eager mode "
            f"{text.milliseconds(took)}.",
            why="as a rule the model gives it a mask there that it leaves out in eager mode: the kernel then skips nothing",
            mend=_by_block(eager, compiled, blocks)
            or "Leave torch.compile out, or leave the mask out where it is the causal one.",
            records=(eager[0].trial.id, first.trial.id),
            seconds=takes - took,
        )


def _of_breaks(runs: Sequence[Record], name: str) -> Iterator[Finding]:
    breaks = runs[0].work.get("graph_breaks") if runs else None
    if breaks:
        yield Finding(
            name="graph_breaks",
            what=f"{name} breaks the graph {breaks} {'times' if breaks > 1 else 'time'}.",
            why="each piece is compiled by itself, and Python runs between them",
            mend="TORCH_LOGS=graph_breaks python train.py names the lines; take them out of forward.",
            records=(runs[0].trial.id,),
        )


def _by_block(eager: Sequence[Record], compiled: Sequence[Record], blocks: PerBlock | None) -> str:
    """Return whether to compile each block in place of the model, or to try; "" if that is not possible, or slower."""
    if blocks is None:
        return ""
    *before, line = blocks.lines
    how = "".join(f", with {setting.partition('  #')[0]}" for setting in before) + f": {line}."
    if not blocks.runs:
        return f"Try torch.compile of each block (not timed here), where attention should keep its kernel{how}"
    seconds = typical(blocks.runs)
    took = f"{text.milliseconds(seconds)} ms a step"
    if seconds >= typical(compiled):
        return ""
    if seconds >= typical(eager):
        return f"Leave torch.compile out: {naming.PER_BLOCK} it takes {took}."
    return f"Compile each block ({took}){how}"


def _attention_s(record: Record) -> float:
    """Return the seconds of a step's attention kernels under the profiler; 0 if none were seen."""
    profile = record.work.get("kernel_s") or {}
    return math.fsum(s for name, s in profile.items() if FAST_KERNEL.search(name) or MEM_EFFICIENT.search(name))


def _slower_compile(eager: Sequence[Record], compiled: Sequence[Record], blocks: PerBlock | None) -> Iterator[Finding]:
    """Yield a finding if all compiled runs are slower than all eager ones; with one run of each, a cautious one."""
    before, after = typical(eager), typical(compiled)
    beyond = extent(compiled)[0] > SLOWER * extent(eager)[1]
    if not math.isfinite(after) or after <= SLOWER * before:
        return
    said = f"{text.milliseconds(after)} ms in place of {text.milliseconds(before)}"
    shown = tuple(record.trial.id for record in (*eager, *compiled))
    if beyond and len(eager) + len(compiled) > 2:
        yield Finding(
            name="compile",
            what=f"torch.compile makes the step slower: {said}.",
            why="it saves less by fusing than it loses elsewhere, for example by another attention kernel",
            mend=_by_block(eager, compiled, blocks) or "Leave torch.compile out.",
            records=shown,
            seconds=after - before,
        )
    elif len(compiled) == 1:
        yield Finding(
            name="compile",
            what=f"torch.compile looked slower (one run): {said}; not decided.",
            why="if it is, it saves less by fusing than it loses elsewhere, for example by another attention kernel",
            mend="Run again with a larger --budget, or on a quiet machine, to decide.",
            records=shown,
        )


def _of_fp8(gains: Sequence[LinearGain]) -> Iterator[Finding]:
    for gain in gains:
        if gain.fp8 is None or gain.ratio is None or gain.ratio >= 1 or gain.noisy:
            continue
        rows, k, n = gain.sizes
        yield Finding(
            name="small_fp8_layer",
            what=f"A Linear of {k} to {n} features on {rows} rows is slower in FP8: {1 / gain.ratio:.2f}× as long.",
            why="its casts cost more than its three products save",
            mend=f"Leave it in bf16: te.convert(model, recipe, filter=...) without the layers of {k} to {n}.",
            records=(gain.bf16.record.trial.id, gain.fp8.record.trial.id),
            seconds=gain.calls * (gain.fp8.seconds - gain.bf16.seconds),
        )
