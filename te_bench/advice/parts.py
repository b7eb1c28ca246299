"""Which parts a step by a choice is made of, and the trial that times each alone. No torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from te_bench.advice.candidates import CHUNKED, COMPILED, FP8_HEAD, RECIPES, Choice, Question, alone
from te_bench.experiments.spec import OWN_ATTENTION, Record, Trial
from te_bench.experiments.suite_trials import MULTIPLE
from te_bench.reports.analysis import layers
from te_bench.reports.analysis.measures import finite, quantile, seconds_of

LINEAR, ATTENTION, HEAD = "linear", "attention", "linear_cross_entropy"  # workloads
SAMPLES = {LINEAR: ("kernel_s",), ATTENTION: ("forward_s", "backward_s"), HEAD: ("kernel_s",)}
#: Attention and heads that are many operators of PyTorch: torch.compile fuses their softmax, and pads an odd width.
PLAIN = ("manual", "math", "reference")
#: Of a part's samples the quantile that predictions take: on a CPU whose other core is busy half of all calls may take a
#: hundred times as long (24 ms in place of 0.25; two vCPUs, AMD EPYC), and the fastest quarter still says what it takes.
QUIET = 0.25
NOISY = 1.5  # a part whose upper quartile is more than so many times its lower one


class Part(NamedTuple):
    """One kind of part of a step: a workload, its problem's settings in order, and by what it is computed.

    mode: "compile" for what torch.compile fuses or pads in a step, whose time in eager mode says nothing of that.
    """

    workload: str
    problem: tuple[tuple[str, Any], ...]
    rival: str  # a recipe or a precision; an attention backend
    precision: str = "bf16"
    mode: str = "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a survey found a model's step to be made of: sizes of Linears, of attentions and of the head, with calls.

    head: (rows, in_features, classes), None where the model makes no logits that te-bench could replace; a user's is one of
    linears, too, which te.convert's parts replace. own_kernel: what SDPA runs in the model as it is.
    """

    linears: Mapping[tuple[int, int, int], int]
    kept: Mapping[tuple[int, int, int], int] = field(default_factory=dict)  # calls that stay in bf16 under any recipe
    attentions: Mapping[tuple[tuple[str, Any], ...], int] = field(default_factory=dict)
    head: tuple[int, int, int] | None = None
    own_kernel: str = "math"

    @classmethod
    def of(cls, work: Mapping[str, Any], shares: int = 1) -> "Made":
        """By the work of a survey's record, which is of one of so many shares of the batch.

        Attention with a mask has no trial of its own, and is not among them.
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
        )


def _users_head(work: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The head that te.convert's parts replace: the Linear that transformers' causal models call lm_head."""
    heads = [found for found in work["linears"] if found["out_features"] == work["vocab"]]
    names = [name for found in heads for name in found.get("names", ())]
    return heads[0] if len(names) == 1 and names[0].endswith(".lm_head") else None


def _sizes(found: Mapping[str, int], shares: int) -> tuple[int, int, int]:
    return shares * found["rows"], found["in_features"], found["out_features"]


def parts_of(question: Question, made: Made, choice: Choice) -> Counter[Part]:
    """How many of which part a step by that choice has; what every choice shares, the rest of the step, is none."""
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
    # What a model's own attention runs is known of the survey alone.
    attention = made.own_kernel if choice.attention == OWN_ATTENTION else choice.attention
    for shape, calls in made.attentions.items():
        found[Part(ATTENTION, shape, attention, half, _mode(choice, attention))] += calls
    if made.head is not None and (question.preset or choice.parts):
        rows, d, vocab = made.head
        name = choice.head or "reference"
        padded = question.padded_vocab if choice.padded else vocab
        if choice.parts:
            name, padded = FP8_HEAD if choice.recipe else CHUNKED, -(-vocab // MULTIPLE) * MULTIPLE
        head = (("n", rows), ("d", d), ("vocab", vocab), ("padded", padded), ("head", name))
        found[Part(HEAD, head, name, half, _mode(choice, name))] += 1
    return +found


def _mode(choice: Choice, computed_by: str) -> str:
    """In which a part is timed: a Linear, SDPA's kernels and te-bench's own are calls that a compiler leaves as they are."""
    return "compile" if choice.mode in COMPILED and computed_by in PLAIN else "eager"


def trial(question: Question, part: Part) -> Trial:
    """The trial that times the part alone."""
    problem = dict(part.problem)
    if part.workload == ATTENTION:
        return alone(question, ATTENTION, problem, attention=part.rival, precision=part.precision, mode=part.mode)
    if part.workload == LINEAR and part.precision == "fp8":
        return alone(question, LINEAR, problem, precision="fp8", recipe=part.rival)
    return alone(question, part.workload, problem, precision=part.precision, mode=part.mode)


def differing(question: Question, made: Made, choice: Choice) -> list[Part]:
    """The parts in which a choice differs from the step that is measured whole in its place, attention first."""
    ours, whole = parts_of(question, made, choice), parts_of(question, made, question.frame(choice))
    order = (ATTENTION, LINEAR, HEAD)
    return sorted([*(ours - whole), *(whole - ours)], key=lambda part: order.index(part.workload))


def deciding(question: Question, made: Made, choices: Iterable[Choice]) -> list[Part]:
    """The parts in which choices differ from the steps that are measured whole; those of the most promising first.

    A part that many choices need comes before one that few do; of FP8's, all that a recipe needs before the next one's.
    """
    needed: Counter[Part] = Counter()
    for choice in choices:
        needed.update(differing(question, made, choice))
    order = {LINEAR: 0, HEAD: 1, ATTENTION: 2}
    recipes = {name: place for place, name in enumerate(RECIPES)}
    return sorted(
        needed,
        key=lambda p: (-needed[p], order[p.workload], recipes.get(p.rival, len(recipes)), p.rival, p.problem, p.mode),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """Seconds of a part alone; products: of its matrix products, where a profile tells them from its casts.

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
    """None where the trial has no result."""
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
