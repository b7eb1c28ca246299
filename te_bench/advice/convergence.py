"""Whether what is advised trains like bf16: the nearest published verdict, and the command that proves it for a model."""

from te_bench.advice.candidates import FP8_HEAD, Choice, Question
from te_bench.reports.convergence import published
from te_bench.reports.convergence.published import Published

STEPS, BATCH_TOKENS, SEEDS = 300, 12 * 1024, 8  # of --preset gpt2-short
ARMS, FUSED_ARMS = 4, 6  # control, A/A, the recipe, one broken; and with --fused the fused step with either head


def nearest(choice: Choice) -> Published | None:
    """The published verdict on the same recipe and the same kernels, te-bench's own."""
    if choice.rival:
        return None
    return published.nearest(choice.recipe, fused=choice.fused, fp8_head=choice.head == FP8_HEAD)


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
        said = found.in_words()
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
