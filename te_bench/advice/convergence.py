"""Say whether the advised step trains like bf16: the nearest published verdict, and a command that tests the model."""

from te_bench.advice.candidates import OURS, Choice, Question
from te_bench.experiments.suites.convergence import PILOT
from te_bench.reports.analysis.naming import recipe_name, rival_name
from te_bench.reports.convergence import published
from te_bench.reports.convergence.published import PASSED, Published

STEPS, BATCH_TOKENS = 300, 12 * 1024  # of --preset gpt2-short
BESIDE_STEPS_S = 28.0  # of a run: start, check, capture and evaluations; the median of results/h200/convergence-short
ARMS = 4  # control, A/A, the recipe, one broken


def nearest(choice: Choice) -> Published | None:
    """Return the published verdict on the same recipe and kernels; te-bench's parts of a user's model are the fused ones."""
    if choice.rival:
        return None
    return published.nearest(choice.recipe, fused=_has_fused_kernels(choice), fp8_head=choice.fp8_head)


def is_shown(choice: Choice) -> bool:
    """Return whether a published study of the same recipe, kernels and head is EQUIVALENT."""
    found = nearest(choice)
    return found is not None and (found.verdict, found.fp8_head) == (PASSED, choice.fp8_head)


def preference(choice: Choice, have: Choice, memory: float | None) -> tuple[int, bool, bool, float]:
    """Return the key of steps about as fast: the fewest changes, then the best published verdict, then the least memory."""
    return choice.changes(have), not is_shown(choice), nearest(choice) is None, memory or 0.0


def in_words(question: Question, choice: Choice, seconds: float, *, beside: bool = True) -> str:
    """Return a few sentences about convergence, and perhaps a command on a line of its own.

    seconds: of one step of the choice, to tell the command's cost.

    beside: whether to quote the recipe that passed beside one that did not.
    """
    if choice.precision == "fp32":
        return "Convergence: float32 rounds less than bf16; there is nothing to prove."
    if choice.recipe is None:
        if _has_fused_kernels(choice) or choice.rival or choice.head or choice.attention in OURS:
            return "Convergence: bf16 as now, by other kernels; loss and gradients were checked, no whole training compared."
        return "Convergence: same bf16 arithmetic as now, so nothing changes."
    found = nearest(choice)
    if found is None:
        what = rival_name(choice.rival) if choice.rival else recipe_name(choice.recipe)
        said = f"no verdict is published for {what} {'in fused blocks' if choice.fused else 'so'}"
    else:
        said = f"no study has judged this step. {found.in_words(beside=beside)}"
    if not question.text:
        return (
            f"Convergence: {said}; te-bench trains models of text alone: judge two runs of yours by te-bench verdict."
        )
    if choice.rival:
        said += f"; te-bench's {recipe_name(choice.recipe)} has the same arithmetic"
    cost, pilot = _hours(question, seconds), command(question, choice)
    return f"Convergence: {said}. A pilot tells in {cost} how many seeds your model takes:\n{pilot}"


def command(question: Question, choice: Choice) -> str:
    """Return the command of a pilot of this step alone.

    No record shows how far runs of the user's model vary, or how many seeds it takes.
    """
    said = f"te-bench run convergence --preset gpt2-short {question.said} --recipes {choice.recipe}"
    fused = f" --fused --head {'fp8' if choice.fp8_head else 'bf16'}" if _has_fused_kernels(choice) else ""
    return f"{said}{fused} --as-pilot"


def _has_fused_kernels(choice: Choice) -> bool:
    return bool(choice.fused or choice.parts)


def _hours(question: Question, seconds: float) -> str:
    spent = ARMS * PILOT * (STEPS * BATCH_TOKENS / question.tokens * seconds + BESIDE_STEPS_S)
    return f"{spent / 3600:.2g} GPU hours" if spent >= 3600 else f"{max(1, round(spent / 60))} GPU minutes"
