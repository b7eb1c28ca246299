"""Trial and Experiment (what to measure) and Record (the result): frozen, JSON both ways, no torch."""

import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench.experiments import problems
from te_bench.experiments.run_options import Options as Options  # a gate imports it from here, in both revisions

SCHEMA = 1

Scalar = str | int | float | bool | None

#: How a trial can end. Only "ok" has times. A rerun replaces only "interrupted". "stopped": the trial did not start, because
#: a stopping rule fixed in the plan no longer needed it.
OUTCOMES = ("ok", "unsupported", "oom", "timeout", "crashed", "diverged", "failed_check", "stopped", "interrupted")

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
MODES = ("eager", "compile", "compile-blocks", "compile-reduce-overhead", "cudagraph")
PROTOCOLS = ("bench_py", "quickstart", "kernel", "turns", "curve", "bisection", "once")
DEVICES = ("cpu", "cuda")
OWN_ATTENTION = "own"  # a user's model's own attention, as the model and PyTorch choose it
ADVICE = "advise"  # the suite of `te-bench advise`, which plans as it goes
NO_ATTENTION = "none"  # of a trial whose workload has no attention


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces. Raise ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one configuration, fully resolved: everything that can change the result, and nothing else.

    `problem` holds the workload's settings as JSON scalars; `problems` declares and reads them.
    """

    workload: str
    device: str
    problem: Mapping[str, Scalar]
    attention: str
    precision: str = "bf16"
    recipe: str | None = None
    mode: str = "eager"
    protocol: str = "bench_py"
    seed: int = 0

    @property
    def id(self) -> str:
        return digest(self.to_json())

    @property
    def cell(self) -> str:
        """The id without the seed, which repetitions of a trial share."""
        return digest({**self.to_json(), "seed": None})

    @property
    def name(self) -> str:
        """A readable name, which `--only` matches: train_step/gpt2-b12-t1024-V50304/flash/bf16/eager/s0."""
        parts = [self.workload, problems.label(self.problem), self.attention, self.precision]
        return "/".join([*parts, *([self.recipe] if self.recipe else []), self.mode, f"s{self.seed}"])

    def with_(self, **settings: Scalar) -> "Trial":
        """Return the trial with changed or added settings of its problem."""
        return dataclasses.replace(self, problem={**self.problem, **settings})

    def to_json(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "problem": dict(self.problem)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Trial":
        return cls(**value)


def matches(name: str, only: str | None) -> bool:
    """Return whether a trial's name matches one of the comma-separated patterns in `only`; None matches all."""
    return only is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns(only))


def patterns(only: str) -> list[str]:
    """Return the globs in `only`, each also with literal brackets: pytest's names hold brackets, with commas in them."""
    given = [only, *(one.strip() for one in only.split(","))]
    return [*given, *(one.replace("[", "[[]") for one in given)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A suite's request: its trials in any order, and the configuration that speed-ups refer to.

    judgement: the parameters of the verdict, fixed before the first step: margin, alpha, seeds and steps; pool, the number
    of bf16 runs per run of a recipe, if all recipes share them; primary, Trial.cell of the recipe that is judged first;
    pilot, if the means stay hidden.
    heeds: the names in run_options.OPTIONS that the suite obeys, besides those that every suite or a trial obeys.
    asked: the options of the experiment, in run_options.words' form.
    whole: for a part chosen by --only, the experiment whose plan judges the part; None without a verdict.
    """

    suite: str
    title: str
    trials: tuple[Trial, ...]
    baseline: str | None = None  # Trial.cell of the configuration that is 1.00x
    judgement: Mapping[str, Scalar] = field(default_factory=dict)
    heeds: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()  # a sentence for each part of the suite that is missing
    asked: tuple[str, ...] = ()
    whole: "Experiment | None" = None

    @property
    def of_losses(self) -> bool:
        """Return whether the experiment is for a verdict on losses, which a host's cores and driver cannot change."""
        return bool(self.judgement)

    def judged_in(self, cells: Mapping[str, str]) -> Mapping[str, Scalar]:
        """Return the judgement after each Trial.cell has changed, {old: new}."""
        return {key: cells[str(value)] if key == "primary" else value for key, value in self.judgement.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of the journal: how one trial ended. Raw samples in SI units; nothing derived.

    samples: latency_s (one per timed step), loss and step, val_loss, val_step and val_time_s, peak_allocated_bytes, ... A
    non-finite sample is null. check: the comparison with the reference: {"error": ..., "limit": ..., ...}. work: {"flop":
    ..., "tokens": ...}.
    """

    trial: Trial
    environment: str  # Environment.id
    outcome: str
    reason: str | None = None
    started_at: str  # UTC, ISO 8601
    wall_s: float  # the parent's clock, from the fork to the reply
    work_s: float | None = None  # the child's clock, inside the workload: te-bench itself costs wall_s - work_s
    check: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, list[float]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    device_state: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome

    @property
    def key(self) -> tuple[str, str]:
        """The done-key: this trial in this environment."""
        return self.trial.id, self.environment

    def to_json(self) -> dict[str, Any]:
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**value, "trial": {"id": self.trial.id, **self.trial.to_json()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Record":
        if value["schema"] != SCHEMA:
            raise ValueError(f"record schema {value['schema']}; this te-bench reads schema {SCHEMA}")
        trial = {k: v for k, v in value["trial"].items() if k != "id"}
        return cls(**{**value, "trial": Trial.from_json(trial)})
