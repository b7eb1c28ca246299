"""Whether what is advised trains like bf16: the nearest published verdict, and the command that proves it for a model."""

from dataclasses import dataclass

from te_bench.advice.candidates import FP8_HEAD, Choice, Question

STEPS, BATCH_TOKENS, SEEDS = 300, 12 * 1024, 8  # of --preset gpt2-short
ARMS, FUSED_ARMS = 4, 6  # control, A/A, the recipe, one broken; and with --fused the fused step with either head


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A verdict of docs/convergence.md, as its records in results/ have it; tests hold the two together."""

    recipe: str
    fused: bool
    fp8_head: bool
    verdict: str
    records: str  # below results/
    arm: str  # what the report calls it


#: GPT-2 124M, 300 steps of 12 x 1024 tokens, margin 0.02 nat, one H200, eight seeds.
PUBLISHED = (
    Published(
        recipe="delayed_scaling", fused=False, fp8_head=False, verdict="EQUIVALENT",
        records="h200/convergence-short", arm="delayed_scaling",
    ),
    Published(
        recipe="delayed_scaling", fused=True, fp8_head=False, verdict="INCONCLUSIVE",
        records="h200/convergence-short", arm="delayed_scaling, fused",
    ),
    Published(
        recipe="delayed_scaling", fused=True, fp8_head=True, verdict="INCONCLUSIVE",
        records="h200/convergence-short", arm="delayed_scaling, fused, FP8 head",
    ),
)  # fmt: skip
IN_WORDS = {"EQUIVALENT": "within 0.02 nat of bf16 after 300 steps", "INCONCLUSIVE": "eight seeds could not tell"}


def nearest(choice: Choice) -> Published | None:
    """The published verdict on the same recipe and the same kernels, te-bench's own."""
    if choice.rival:
        return None
    wanted = (choice.recipe, choice.fused, choice.head == FP8_HEAD)
    return next((p for p in PUBLISHED if (p.recipe, p.fused, p.fp8_head) == wanted), None)


def in_words(question: Question, choice: Choice, seconds: float) -> str:
    """One or two sentences; seconds: of a step of the choice, by which the command's cost is told."""
    if choice.precision == "fp32":
        return "Convergence: float32 rounds less than bf16; there is nothing to prove."
    if choice.recipe is None:
        return "Convergence: same bf16 arithmetic as now, so nothing changes."
    found = nearest(choice)
    if found is None:
        what = choice.rival or choice.recipe
        said = f"no verdict is published for {what} {'in fused blocks' if choice.fused else 'so'}"
    else:
        said = f"{found.verdict} for GPT-2 124M, {IN_WORDS[found.verdict]} (results/{found.records})"
    if not question.text:
        return f"Convergence: {said}; te-bench trains models of text alone, so yours is for you to judge."
    if choice.rival:
        said += f"; te-bench's {choice.recipe} has the same arithmetic"
    return f"Convergence: {said}; for your model, {_hours(question, choice, seconds)}: {command(question, choice)}."


def command(question: Question, choice: Choice) -> str:
    """What judges the recipe on the model."""
    said = f"te-bench run convergence --preset gpt2-short {question.said} --recipes {choice.recipe} --seeds {SEEDS}"
    return f"{said} --fused" if choice.fused else said


def _hours(question: Question, choice: Choice, seconds: float) -> str:
    steps = (FUSED_ARMS if choice.fused else ARMS) * SEEDS * STEPS * BATCH_TOKENS / question.tokens
    spent = steps * seconds
    return f"{spent / 3600:.2g} GPU hours" if spent >= 3600 else f"{max(1, round(spent / 60))} GPU minutes"
