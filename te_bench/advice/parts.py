"""The parts of a choice's training step, and the trial that times each part alone. No torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from te_bench.advice.candidates import COMPILED, FP8_HEAD, Choice, Question, alone, rank
from te_bench.experiments.adoption import CHUNKED
from te_bench.experiments.spec import OWN_ATTENTION, Record, Trial
from te_bench.experiments.suite_trials import MULTIPLE
from te_bench.reports.analysis import layers
from te_bench.reports.analysis.measures import finite, quantile, seconds_of

LINEAR, ATTENTION, HEAD = "linear", "attention", "linear_cross_entropy"  # workloads
SAMPLES = {LINEAR: ("kernel_s",), ATTENTION: ("forward_s", "backward_s"), HEAD: ("kernel_s",)}
#: Attention and heads of many PyTorch operators: torch.compile fuses their softmax, and pads an odd width.
PLAIN = ("manual", "math", "reference")
#: The quantile of a part's samples that predictions use. On a CPU with another core busy, half of all calls may take a
#: hundred times as long (24 ms instead of 0.25; two vCPUs, AMD EPYC); the fastest quarter is not disturbed.
QUIET = 0.25
NOISY = 1.5  # a part is noisy if its upper quartile exceeds its lower quartile times this


class Part(NamedTuple):
    """One kind of part of a step: a workload, the settings of its problem in order, and what computes it.

    mode: "compile" for a part that torch.compile fuses or pads in a step, whose time in eager mode would mislead.
    """

    workload: str
    problem: tuple[tuple[str, Any], ...]
    rival: str  # a recipe or a precision; an attention backend
    precision: str = "bf16"
    mode: str = "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a survey found in a model's step: the sizes of its Linears, of its attentions and of its head, with calls.

    head: (rows, in_features, classes), or None if te-bench cannot replace how the model makes logits. The head of a
    user's model is also among the linears, which te.convert's parts replace. own_kernel: the SDPA kernel that the
    unchanged model runs. converted_head: the name of the head that te.convert replaces.
    """

    linears: Mapping[tuple[int, int, int], int]
    kept: Mapping[tuple[int, int, int], int] = field(default_factory=dict)  # calls that stay in bf16 under any recipe
    attentions: Mapping[tuple[tuple[str, Any], ...], int] = field(default_factory=dict)
    head: tuple[int, int, int] | None = None
    own_kernel: str = "math"
    converted_head: str | None = None

    @classmethod
    def of(cls, work: Mapping[str, Any], shares: int = 1) -> "Made":
        """Return what a survey's record says, for a whole batch of `shares` times the surveyed sequences.

        Attention with a mask is left out, because it has no trial of its own.
        """
        attentions: Counter[tuple[tuple[str, Any], ...]] = Counter()
        for call in work["attentions"]:
            if not call["mask"] and call["length"] == call["keys"]:
                shape = {name: call[name] for name in ("batch", "heads", "length", "head_dim", "causal")}
                shape["batch"] *= shares
                shape |= {} if call["kv_heads"] == call["heads"] else {"kv_heads": call["kv_heads"]}
                attentions[tuple(shape.items())] += call["calls"]
        linears = {_sizes(found, shares): found for found in work["linears"]}
        head = work.get("head") or _users_head(work)
        return cls(
            linears={size: found["calls"] for size, found in linears.items()},
            kept={size: found["kept"] for size, found in linears.items() if found["kept"]},
            attentions=attentions,
            head=_sizes(head, shares) if head else None,
            own_kernel=next((call["kernel"] for call in work["attentions"] if not call["mask"]), "math"),
            converted_head=work.get("converted_head"),
        )


def _users_head(work: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return the head that te.convert's parts replace: the Linear that transformers' causal models call lm_head."""
    heads = [found for found in work["linears"] if found["out_features"] == work["vocab"]]
    names = [name for found in heads for name in found.get("names", ())]
    return heads[0] if len(names) == 1 and names[0].endswith(".lm_head") else None


def _sizes(found: Mapping[str, int], shares: int) -> tuple[int, int, int]:
    return shares * found["rows"], found["in_features"], found["out_features"]


def parts_of(question: Question, made: Made, choice: Choice) -> Counter[Part]:
    """Return {part: its number in a step by the choice}, without the rest of the step, which all choices share."""
    found: Counter[Part] = Counter()
    replaced = made.head if choice.parts else None
    for (rows, k, n), calls in made.linears.items():
        if (rows, k, n) == replaced:
            continue
        sizes = (("tokens", rows), ("in_features", k), ("out_features", n))
        kept = made.kept.get((rows, k, n), 0) if choice.recipe else 0
        found[Part(LINEAR, sizes, choice.recipe or choice.precision, choice.precision)] += calls - kept
        found[Part(LINEAR, sizes, "bf16")] += kept
    half = "fp32" if choice.precision == "fp32" else "bf16"
    # Only the survey says which kernel a model's own attention runs.
    attention = made.own_kernel if choice.attention == OWN_ATTENTION else choice.attention
    for shape, calls in made.attentions.items():
        found[Part(ATTENTION, shape, attention, half, _mode(choice, attention))] += calls
    if made.head is not None and (question.preset or choice.parts):
        rows, d, vocab = made.head
        name = choice.head or "reference"
        padded = question.padded_vocab if choice.padded else vocab
        if choice.parts:
            name, padded = FP8_HEAD if choice.fp8_head else CHUNKED, -(-vocab // MULTIPLE) * MULTIPLE
        head = (("n", rows), ("d", d), ("vocab", vocab), ("padded", padded), ("head", name))
        found[Part(HEAD, head, name, half, _mode(choice, name))] += 1
    return +found


def _mode(choice: Choice, computed_by: str) -> str:
    """Return the mode to time a part in: eager for a Linear, SDPA's and te-bench's kernels, which compilers leave alone."""
    return "compile" if choice.mode in COMPILED and computed_by in PLAIN else "eager"


def trial(question: Question, part: Part) -> Trial:
    """Return the trial that times the part alone."""
    problem = dict(part.problem)
    if part.workload == ATTENTION:
        return alone(question, ATTENTION, problem, attention=part.rival, precision=part.precision, mode=part.mode)
    if part.workload == LINEAR and part.precision == "fp8":
        return alone(question, LINEAR, problem, precision="fp8", recipe=part.rival)
    return alone(question, part.workload, problem, precision=part.precision, mode=part.mode)


def differing(question: Question, made: Made, choice: Choice) -> list[Part]:
    """Return the parts in which a choice differs from its frame (question.frame), attention first."""
    ours, whole = parts_of(question, made, choice), parts_of(question, made, question.frame(choice))
    order = (ATTENTION, LINEAR, HEAD)
    return sorted([*(ours - whole), *(whole - ours)], key=lambda part: order.index(part.workload))


def deciding(question: Question, made: Made, choices: Iterable[Choice]) -> list[Part]:
    """Return the parts in which choices differ from their frames, in the order in which to measure them.

    A part that more choices need comes first. Of FP8's parts, all of one recipe come before the next recipe's.
    """
    needed: Counter[Part] = Counter()
    for choice in choices:
        needed.update(differing(question, made, choice))
    order = {LINEAR: 0, HEAD: 1, ATTENTION: 2}
    return sorted(
        needed,
        key=lambda p: (-needed[p], order[p.workload], rank(p.rival), p.rival, p.problem, p.mode),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """The seconds of a part alone; products: those of its matrix products, if a profile separates them from its casts.

    spread: the upper quartile of its times over the lower one.
    """

    seconds: float
    products: float | None
    record: Record
    spread: float = 1.0

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY


def time_of(part: Part, record: Record | None) -> PartTime | None:
    """Return the time of a part by the record of its trial, or None if the trial has no result."""
    if record is None or record.outcome != "ok":
        return None
    quiet, loud = (
        [quantile(seconds_of(record, sample), q) for sample in SAMPLES[part.workload]] for q in (QUIET, 1 - QUIET)
    )
    if not all(quiet):
        return None
    profile = record.work.get("kernel_s")
    products = None
    if part.workload == LINEAR and isinstance(profile, Mapping):
        products = sum(finite(s) or 0.0 for kernel, s in profile.items() if layers.kind_of(kernel) == "GEMM")
    seconds, slow = (sum(value for value in values if value) for values in (quiet, loud))
    return PartTime(seconds=seconds, products=products or None, record=record, spread=slow / seconds)
