"""A machine whose times are a formula: advice on it, from records that it makes and a journal that holds them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from journals import environment, record, write

from te_bench.advice import candidates, decision
from te_bench.advice.advise import Evidence, Run
from te_bench.advice.candidates import Choice, Question
from te_bench.advice.decision import Decision
from te_bench.experiments.spec import Options, Record, Trial
from te_bench.reports.analysis.rows import load_results

GPU = environment()
#: Seconds per FLOP of a Linear, and of a Linear's casts per element, by precision.
RATE = {"bf16": 1 / 600e12, "fp8": 1 / 1000e12, "fp32": 1 / 50e12}
CAST = {"bf16": 0.0, "fp8": 2e-12, "fp32": 0.0}
MODES = {"eager": 1.3, "compile": 1.1, "compile-blocks": 1.15, "compile-reduce-overhead": 1.05, "cudagraph": 1.0}
ATTENTION_MS = {"flash": 0.20, "cudnn": 0.10, "triton": 0.16, "gluon": 0.12, "manual": 2.0, "own": 0.20}
HEAD_MS = {"reference": 5.0, "chunked": 4.0, "fp8": 3.0}
REST_MS = 4.0


def survey_work(question: Question, layers: int = 12, width: int = 768, **changes: Any) -> dict[str, Any]:
    """What a survey of a GPT finds."""
    rows = question.tokens
    sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    linear = {"rows": rows, "calls": layers, "kept": 0, "names": []}
    call = {"batch": question.problem["batch"], "heads": 12, "kv_heads": 12, "head_dim": 64, "calls": layers}
    call |= {"length": question.problem["block"], "keys": question.problem["block"], "dtype": "bfloat16"}
    call |= {"causal": True, "mask": False, "dropout": 0.0, "kernel": "flash"}
    found = {
        "linears": [linear | {"in_features": k, "out_features": n} for k, n in sizes],
        "head": {"rows": rows, "in_features": width, "out_features": question.vocab},
        "attentions": [call],
        "losses": [{"classes": question.vocab, "dtype": "bfloat16", "elements": rows * question.vocab}],
        **dict.fromkeys(("written_out", "norms", "norms_in_float32", "experts_in_float32"), 0),
    }
    return found | {"dropout": {}, "vocab": question.vocab, "optimizer": None} | changes


class Machine:
    """machine(trials) -> records. times_of_step scales whole steps by trial; fails is {part of a
    trial's name: outcome, or "outcome: reason"}."""

    def __init__(
        self,
        question: Question,
        *,
        survey: Mapping[str, Any] | None = None,
        times_of_step: Callable[[Trial], float] = lambda trial: 1.0,
        fails: Mapping[str, str] | None = None,
        gib: Callable[[Trial], float] = lambda trial: 10.0,
        rate: Mapping[str, float] = RATE,
        wall: Callable[[Trial], float] = lambda trial: 1.5,
    ):
        self.wall, self.clock, self.gib, self.rate = wall, 0.0, gib, rate
        self.known: Collection[str] = ()
        self.question, self.times_of_step, self.fails = question, times_of_step, fails or {}
        self.survey = {**survey_work(question), **(survey or {})}
        self.asked: list[Trial] = []
        self.checked: dict[str, bool] = {}  # by trial id
        self.records: list[Record] = []

    def __call__(self, trials: Sequence[Trial]) -> list[Record]:
        self.asked += trials
        done = [dataclasses.replace(self._record(trial), wall_s=self.wall(trial)) for trial in trials]
        self.clock += sum(record.wall_s for record in done if record.trial.id not in self.known)
        self.records += done
        return done

    def _record(self, trial: Trial) -> Record:
        outcome = next((outcome for name, outcome in self.fails.items() if name in trial.name), "ok")
        if outcome != "ok":
            outcome, _, reason = outcome.partition(": ")
            return record(trial, outcome=outcome, reason=reason or "planted")
        if trial.workload == "survey":
            return record(trial, work=self.survey)
        if trial.workload == "train_step":
            seconds = self.step(trial) * self.times_of_step(trial)
            noise = [1 + 0.001 * math.sin(7 * trial.seed + i + int(trial.cell[:4], 16)) for i in range(20)]
            samples = {"latency_s": [seconds * n for n in noise], "peak_allocated_bytes": [self.gib(trial) * 2**30]}
            return record(trial, samples=samples, work={"tokens": self.question.tokens, "graph_breaks": 0})
        return record(trial, **self.part(trial))

    def linear(self, m: int, k: int, n: int, precision: str) -> tuple[float, float]:
        """Seconds of the products, and of the casts."""
        return 6 * m * k * n * self.rate[precision], CAST[precision] * (3 * m * k + 3 * m * n + k * n)

    def part(self, trial: Trial) -> dict[str, Any]:
        p: Mapping[str, Any] = trial.problem
        if trial.workload == "linear":
            products, casts = self.linear(p["tokens"], p["in_features"], p["out_features"], trial.precision)
            work = {"kernel_s": {"nvjet_qqtst_128x256": products, "_line_kernel": casts}}
            return {"samples": {"kernel_s": [products + casts]}, "work": work}
        if trial.workload == "attention":
            ms = ATTENTION_MS[trial.attention]
            return {"samples": {"forward_s": [0.3e-3 * ms], "backward_s": [0.7e-3 * ms]}}
        return {"samples": {"kernel_s": [self.head(p["head"], p["padded"], trial.mode)]}}

    def head(self, name: str, padded: int, mode: str) -> float:
        """Torch's own is as fast compiled, which fuses it and pads its width, as the one in chunks is in any mode."""
        if name == "reference" and mode.startswith("compile"):
            return 1e-3 * HEAD_MS["chunked"]
        return 1e-3 * HEAD_MS[name] * (1 if padded % 64 == 0 else 1.5)

    def step(self, trial: Trial) -> float:
        """As parts add up to it; in fused blocks casts cost nothing."""
        p: Mapping[str, Any] = trial.problem
        fused = "blocks" in p
        total = (REST_MS if not fused else 1.0) * 1e-3
        for found in self.survey["linears"]:
            sizes = found["rows"], found["in_features"], found["out_features"]
            products, casts = self.linear(*sizes, trial.precision)
            total += found["calls"] * (products + (0 if fused else casts))
        total += sum(c["calls"] for c in self.survey["attentions"]) * ATTENTION_MS[trial.attention] * 1e-3
        total += self.head(p.get("head", "reference"), p["padded_vocab"], trial.mode)
        return total + (MODES[trial.mode] - 1) * 20e-3


def question(model: str = "gpt2", device: str = "cuda", **options: Any) -> Question:
    return candidates.of_model(Options(device=device, model=model, **options), (9, 0) if device == "cuda" else None)


def gathered(machine: Machine, **options: Any) -> Evidence:
    """By the clock of the machine, which goes on by each trial's wall; those known take none."""
    machine.known = options.get("known", ())
    given = {"budget_s": 1e6, "memory": None, "room": None, "known": (), "say": lambda _: None} | options
    return Run(machine.question, machine, clock=lambda: machine.clock, **given).gather()


def decided(machine: Machine, evidence: Evidence, folder: Path, memory: float | None = None) -> Decision:
    """By a journal of all that the machine recorded."""
    have = machine.question.trial(machine.question.have).cell
    write(folder, machine.records, suite="advise", title="Advice", body=GPU, baseline=have)
    return decision.decide(evidence, decision.group_of(load_results([folder]), "advise", GPU["id"]), memory)


def fused(recipe: str | None = None, attention: str = "cudnn", head: str = "chunked") -> Choice:
    made: dict[str, Any] = {"mode": "cudagraph", "fused": True, "padded": True}
    return Choice(attention=attention, precision="fp8" if recipe else "bf16", recipe=recipe, head=head, **made)
