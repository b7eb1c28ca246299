"""Estimate how long a trial takes on an H200: by the published records, the FLOP of its step and its recipe.

Records of the same trial, where a run has them, say it better.
"""

import re
from collections.abc import Collection

from te_bench.experiments.adoption import Adoptee
from te_bench.experiments.problems import StepProblem, TrainingProblem, is_step, world_of
from te_bench.experiments.spec import Trial
from te_bench.models import cost
from te_bench.models.configs import configs

#: Seconds of a trial, eager or with a CUDA graph: for any mode and model; for any model; for each TFLOP of its steps.
#: tests/test_published.py holds them to the records of results/.
SECONDS = {
    "train_step": (0.0, 6.5, 0.34),  # speed, speed-b64, -medium, -large, -xl, speed-llama3-1b: 9 to 77 TFLOP a step
    "training": (25.0, 0.0, 0.00221),  # convergence-first: GPT-2's seven runs of 75,000 TFLOP take 190 s on average
    "scaling": (20.0, 6.5, 0.34),  # scaling, scaling-te, scaling-tp
    "max_batch": (0.0, 50.0, 0.0),  # memory
    "layer": (0.0, 6.0, 0.0),  # layer, layer-fused, mlp
    "attention": (0.0, 5.0, 0.0),  # attention, attention-gqa
    "ceilings": (0.0, 9.0, 0.0),  # speed
}
#: Operators alone without records; their trials are timed as attention's.
GUESSED = ("attention_numerics", "gemm", "linear", "linear_cross_entropy", "piece")
SECONDS |= dict.fromkeys(GUESSED, SECONDS["attention"])
#: Times as long under torch.compile, by precision: the records of "train_step".
COMPILED = {"fp8": 4.9, "bf16": 2.3}
#: Times as long as bf16's a step of an emulated format takes: results/h200/speed-emulated. Steps in FP8: 0.8 to 1.2.
EMULATED = {"mxfp8": 1.23, "nvfp4": 1.63}


def by(trials: Collection[Trial]) -> str:
    """Return for which GPU the trials' seconds are estimated, and by what."""
    workloads = {trial.workload for trial in trials}
    guessed, recorded = workloads & set(GUESSED), workloads - set(GUESSED)
    how = []
    if recorded:
        flop = " and the FLOP of a step" if any(SECONDS[workload][2] for workload in recorded) else ""
        how.append(f"by published records of like trials{flop}")
    if guessed:
        of = f" for {', '.join(sorted(guessed)).replace('_', ' ')}" if recorded else ""
        how.append(f"a guess{of}: as attention's")
    return f"estimated for an H200, {'; '.join(how)}"


def holds_for(chip: str | None) -> bool:
    """Return whether an H200's times serve for the GPU: for an H200, an H100, and one that is not known."""
    return chip is None or re.search(r"\bH[12]00\b", chip) is not None


def step_flop(trial: Trial, own: Adoptee | None = None) -> float | None:
    """Return 6 FLOP for each weight and token of a step; None without a step, or for a user's model without `own`."""
    if not is_step(trial):
        return None
    p, known = StepProblem.of(trial), configs()
    if own is None and p.model not in known:
        return None
    weights = own.facts.parameters if own else cost.parameters(known[p.model], p.padded_vocab)
    batch = p.batch if isinstance(p.batch, int) else 1
    return 6.0 * weights * batch * (p.accumulate or 1) * p.block


def steps_of(trial: Trial) -> int | None:
    """Return the trial's steps in a plan: a branch's own, and for the control, which runs first, also the trunk's."""
    p = TrainingProblem.of(trial)
    return p.steps if p.steps is None or p.arm == "control" else p.steps - (p.branch_at or 0)


def seconds(trial: Trial, own: Adoptee | None = None) -> float | None:
    """Return the seconds of a trial that has a GPU, or its ranks' GPUs, for itself; None if the records do not say.

    own: the user's model that the trial trains.
    """
    problem, trains = trial.problem, trial.workload == "training"
    if (
        trial.device != "cuda"
        or trial.workload not in SECONDS
        or "share" in problem
        or (trains and "parallel" in problem)
    ):
        return None
    beside, start, of_tflop = SECONDS[trial.workload]
    if problem.get("budget_s"):
        return beside + float(str(problem["budget_s"]))
    steps = steps_of(trial) if trains else 1
    flop = step_flop(trial, own) if of_tflop else 0.0
    if steps is None or flop is None:
        return None
    emulated = next((times for name, times in EMULATED.items() if (trial.recipe or "").startswith(name)), 1.0)
    compiled = COMPILED.get(trial.precision, COMPILED["bf16"]) if trial.mode.startswith("compile") else 1.0
    tflop = flop / 1e12 / world_of(trial)  # of each of its GPUs
    return beside + compiled * (start + of_tflop * steps * tflop * emulated)
