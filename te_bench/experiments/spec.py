"""What is measured (Trial, Experiment) and what came of it (Record): frozen, JSON both ways, no torch."""

import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench.experiments import problems
from te_bench.experiments.run_options import Options as Options  # where a gate asks both revisions for it

SCHEMA = 1

Scalar = str | int | float | bool | None

#: How a trial can end. Only "ok" carries timings; "interrupted" is the one outcome that a rerun replaces; "stopped" was not
#: begun, for a stopping rule fixed in the plan had no more need of it.
OUTCOMES = ("ok", "unsupported", "oom", "timeout", "crashed", "diverged", "failed_check", "stopped", "interrupted")

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
MODES = ("eager", "compile", "compile-reduce-overhead", "cudagraph")
PROTOCOLS = ("bench_py", "quickstart", "kernel", "turns", "curve", "bisection", "once")
DEVICES = ("cpu", "cuda")
OWN_ATTENTION = "own"  # of a user's model, as it and PyTorch choose it
ADVICE = "advise"  # the suite of a verb of its own, which plans as it goes
NO_ATTENTION = "none"  # of a trial whose workload computes none


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces; NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one configuration, fully resolved: everything that can change the result, and nothing else.

    `problem` holds the workload's own settings as JSON scalars, which `problems` declares and reads.
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
        """The id with the seed left out: trials that are repetitions of each other share it."""
        return digest({**self.to_json(), "seed": None})

    @property
    def name(self) -> str:
        """A readable name that `--only` matches against, e.g. train_step/gpt2-b12-t1024-V50304/flash/bf16/eager/s0."""
        parts = [self.workload, problems.label(self.problem), self.attention, self.precision]
        return "/".join([*parts, *([self.recipe] if self.recipe else []), self.mode, f"s{self.seed}"])

    def with_(self, **settings: Scalar) -> "Trial":
        """The trial with other settings of its problem, or more."""
        return dataclasses.replace(self, problem={**self.problem, **settings})

    def to_json(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "problem": dict(self.problem)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Trial":
        return cls(**value)


def matches(name: str, only: str | None) -> bool:
    """Whether a trial's name is like one of the patterns in `only`, between commas; without any it is."""
    return only is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns(only))


def patterns(only: str) -> list[str]:
    """The globs in `only`, each also with its brackets as they stand: pytest's names hold brackets, and commas in them."""
    given = [only, *(one.strip() for one in only.split(","))]
    return [*given, *(one.replace("[", "[[]") for one in given)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What a suite asks for: its trials in any order, and the configuration that speed-ups are quoted against.

    judgement: what a verdict will be judged by, fixed before the first step: margin, alpha, seeds and steps; pool, the
    bf16 runs for each run of a recipe, where all recipes share them; primary, Trial.cell of the recipe that is judged before
    the others; pilot, where the means stay hidden.
    heeds: the names in run_options.OPTIONS that the suite obeys, besides those that every suite or a trial does.
    asked: the options that it was made for, as run_options.words says them.
    whole: of a part that --only chose the experiment by whose plan the part is judged; None where no verdict is given.
    """

    suite: str
    title: str
    trials: tuple[Trial, ...]
    baseline: str | None = None  # Trial.cell of the configuration that is 1.00x
    judgement: Mapping[str, Scalar] = field(default_factory=dict)
    heeds: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()  # what of the suite is not there, or not for a user's model, a sentence each
    asked: tuple[str, ...] = ()
    whole: "Experiment | None" = None

    @property
    def of_losses(self) -> bool:
        """Whether what it is for is a verdict on losses, which a host's cores and its driver cannot change."""
        return bool(self.judgement)

    def judged_in(self, cells: Mapping[str, str]) -> Mapping[str, Scalar]:
        """Its judgement where each Trial.cell has become another, {old: new}."""
        return {key: cells[str(value)] if key == "primary" else value for key, value in self.judgement.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of the journal: how one trial ended. Raw samples in SI units; nothing derived.

    samples: latency_s (one per timed step), loss and step, val_loss, val_step and val_time_s, peak_allocated_bytes, ...
    A sample that is no finite number is null.
    check: what was compared with the reference: {"error": ..., "limit": ..., ...}. work: {"flop": ..., "tokens": ...}.
    """

    trial: Trial
    environment: str  # Environment.id
    outcome: str
    reason: str | None = None
    started_at: str  # UTC, ISO 8601
    wall_s: float  # the parent's clock, from the fork to the reply
    work_s: float | None = None  # the child's clock, inside the workload: wall_s - work_s is what te-bench costs
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
