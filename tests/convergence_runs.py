"""Synthetic convergence runs with known truth: an arm's gap, the noise between seeds, and what goes wrong on which seed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from journals import record, trial, write

from te_bench.experiments.spec import Record
from te_bench.reports.analysis.rows import load_results
from te_bench.reports.convergence.study import Study, studies

STEPS, EVERY = 400, 20
JUDGEMENT = {"margin": 0.003, "alpha": 0.05, "seeds": 5, "steps": STEPS}
#: {arm: true gap}: what each arm ends above bf16.
TRUTH = {"control": 0.0, "aa": 0.0, "delayed_scaling": 0.0, "rowwise_scaling": 0.0, "broken": 0.05}
FASTER = 0.9  # an FP8 step's time over a bf16 step's


def arm_trial(arm: str, seed: int, **changes: Any) -> Any:
    """The trial of an arm; a name that is none of control, aa and broken is a recipe."""
    settings: dict[str, Any] = {"steps": STEPS, "learning_rate": 1e-3, "min_learning_rate": 0.0, "evaluate": "both"}
    settings |= {"aa": {"perturb_ulp": 1}, "broken": {"fault": "frozen_scale"}}.get(arm, {}) | changes
    kind = arm if arm in ("control", "aa", "broken") else "recipe"
    recipe = {"control": None, "aa": None, "broken": "delayed_scaling"}.get(arm, arm)
    fields = {"precision": "fp8" if recipe else "bf16", "recipe": recipe, "protocol": "curve", "seed": seed}
    return trial("training", arm=kind, **settings, **fields)


def run_record(arm: str, seed: int, gap: float, noise: float, outcome: str = "ok", **changes: Any) -> Record:
    """A curve that falls as 1 / step to 3.28 and ends `gap` + `noise` above it; a diverged one stops half-way."""
    of = arm_trial(arm, seed, **changes)
    if outcome not in ("ok", "diverged"):
        return record(of, outcome=outcome, reason=f"{outcome}: what happened")
    end = STEPS if outcome == "ok" else STEPS // 2
    steps = np.arange(0, end, 5)
    val_steps = np.arange(EVERY, end + 1, EVERY)
    rng = np.random.default_rng([seed, len(arm)])
    second = 0.01 * (1.0 if of.recipe is None else FASTER) * (1 + 0.002 * math.sin(seed))

    def curve(at: np.ndarray) -> np.ndarray:
        return 3.28 + 2 / (1 + at / 20) - 2 / (1 + STEPS / 20) + (gap + noise) * at / STEPS

    samples: dict[str, list[float | None]] = {
        "step": steps.astype(float).tolist(),
        "loss": (curve(steps) + 0.02 * rng.standard_normal(steps.size)).tolist(),
        "grad_norm": (1 + 0.1 * rng.standard_normal(steps.size)).tolist(),
        "time_s": (second * steps).tolist(),
        "val_step": val_steps.astype(float).tolist(),
        "val_time_s": (second * val_steps).tolist(),
        "val_loss": curve(val_steps).tolist(),
        "val_loss_native": (curve(val_steps) + (0.001 if of.recipe else 0.0)).tolist(),
    }
    if of.recipe:
        samples["probe_step"] = [100.0, 200.0, 300.0, 400.0]
        for layer in range(4):
            for role, size in (("input", 4.0), ("weight", 0.5), ("grad_output", 1e-4)):
                name = f"h.{layer}.mlp.c_fc.{role}"
                samples[f"amax:{name}"] = [size * (1 + layer + step / 100) for step in range(4)]
                samples[f"saturated:{name}"] = [0.0, 1e-6, 1e-5, 1e-4]
                samples[f"underflowed:{name}"] = [1e-3 * (layer + 1)] * 4
    reason = f"the loss is nan at step {end}" if outcome == "diverged" else None
    done = record(of, outcome=outcome, reason=reason, samples=samples, work={"tokens": 16384, "batch": 64})
    branch_at = of.problem.get("branch_at")
    return done if branch_at is None else _branched(done, int(str(branch_at)))


def _branched(whole: Record, branch_at: int) -> Record:
    """What a branch of this run records, of a trunk that all of its seed share."""
    own: dict[str, Any] = {}
    for at, of_them in (
        ("step", ("loss", "grad_norm", "time_s")),
        ("val_step", ("val_loss", "val_time_s", "val_loss_native")),
    ):
        steps = whole.samples[at]
        first = sum(step < branch_at + (at == "val_step") for step in steps)
        for name in (at, *of_them):
            own[name] = whole.samples[name][first:]
            if name in ("step", "loss", "grad_norm", "val_step", "val_loss"):
                own[f"trunk_{name}"] = whole.samples[name][:first]
    trunk = {"sha256": f"trunk {whole.trial.seed}", "trained": whole.trial.problem["arm"] == "control", "took_s": 1.0}
    return dataclasses.replace(whole, samples={**whole.samples, **own}, work={**whole.work, "trunk": trunk})


def study_records(
    truth: Mapping[str, float] = TRUTH,
    seeds: Sequence[int] = range(5),
    sd: float = 0.0015,
    outcomes: Mapping[tuple[str, int], str] | None = None,
    **changes: Any,
) -> list[Record]:
    """Each seed has a noise that all its arms share, and each run a noise of its own with the deviation `sd`."""
    records = []
    for seed in seeds:
        shared = 0.002 * np.random.default_rng(seed).standard_normal()
        for place, (arm, gap) in enumerate(truth.items()):
            own = sd * np.random.default_rng([7, seed, place]).standard_normal()
            outcome = (outcomes or {}).get((arm, seed), "ok")
            records.append(run_record(arm, seed, gap, shared + own, outcome, **changes))
    return records


def pool_records(
    truth: Mapping[str, float],
    rounds: int,
    ratio: int,
    sd: float = 0.0015,
    outcomes: Mapping[tuple[str, int], str] | None = None,
    **changes: Any,
) -> list[Record]:
    """Rounds of one run of every recipe and `ratio` of bf16, the last of them A/A's, and three of the broken recipe."""
    records = []
    for number in range(rounds):
        first = number * ratio
        for place, (arm, gap) in enumerate(truth.items()):
            if arm == "broken" and number >= 3:
                continue
            seeds = {"control": range(first, first + ratio - 1), "aa": [first + ratio - 1]}.get(arm, [first])
            for seed in seeds:
                own = sd * np.random.default_rng([11, seed, place]).standard_normal()
                records.append(run_record(arm, seed, gap, own, (outcomes or {}).get((arm, seed), "ok"), **changes))
    return records


def study_of(directory: Path, records: Sequence[Record], judgement: Mapping[str, Any] = JUDGEMENT) -> Study:
    return study_at(write_study(directory, records, judgement))


def study_at(*directories: Path) -> Study:
    """The only one there."""
    [group] = load_results(directories).groups
    [study] = studies(group)
    return study


def write_study(directory: Path, records: Sequence[Record], judgement: Mapping[str, Any] = JUDGEMENT) -> Path:
    return write(directory, records, suite="convergence", title="Convergence", judgement=judgement)
