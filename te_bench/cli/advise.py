"""te-bench advise: which settings to train a model with on this machine, by measurement."""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_bench.cli import run as runs
from te_bench.cli.options import Device, Fresh, Gpus, again, find_gpus, results_of, warn

if TYPE_CHECKING:
    from te_bench.advice.advise import Evidence
    from te_bench.advice.candidates import Question
    from te_bench.experiments.spec import Options, Record, Trial
    from te_bench.experiments.store import Journal, Plan

NOTHING = 4
BUDGET = "10min"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 900.0  # of one trial


def _some_model(model: str | None) -> str:
    if model is None:
        raise typer.BadParameter("give tiny for a try, a config.json, or package.module:factory")
    return model


def advise(
    model: Annotated[
        str | None,
        typer.Option(
            help="A name of `te-bench list models`, package.module:factory, or a Hugging Face config. Required.",
            callback=_some_model,
        ),
    ] = None,
    model_args: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the factory; repeatable.")
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Function that draws a batch, as for `run`.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Function from outputs to a loss, as for `run`.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence. Default: the model's longest, at most 1024 for your own model."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences of a step. Default: 12,288 tokens' worth, at most 12; on a CPU at most 4."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that a step may take, such as 80GiB. Default: all.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for all measurements: 90s, 10min or 2h.")] = BUDGET,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Results. Default: runs/advise-MODEL and the other options.")
    ] = None,
    device: Device = None,
    gpus: Gpus = None,
    fresh: Fresh = False,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Measure nothing; write the answer again from the records in --out.")
    ] = False,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="With --recorded: write the answer again in a published folder, too.")
    ] = False,
) -> None:
    """Say which attention, precision and mode to train a model with here. Measures parts and whole steps."""
    from te_bench import plugins
    from te_bench.advice import candidates
    from te_bench.advice.advise import NothingMeasured, Run
    from te_bench.experiments import environment, plan, run_options
    from te_bench.experiments.spec import DEVICES, Options
    from te_bench.experiments.store import own
    from te_bench.models.configs import configs
    from te_bench.reports.exchange import submission

    journal = _recorded(out, [device, gpus, memory, fresh or None]) if recorded else None
    machine = None if journal is None else dict(journal.environments[_asked(journal)[-1].environment])
    where = device or (machine["identity"]["device"] if machine else environment.default_device())
    assert model is not None
    asked = Options(
        device=where,
        model=model,
        model_args=tuple(model_args) if model_args else None,
        inputs=inputs,
        loss=loss,
        tokens=tokens,
        batch=batch,
        budget_s=run_options.seconds(budget),
    )
    plugins.check("device", where, list(DEVICES))
    run_options.check(asked)
    limit = None if memory is None else size(memory)
    found = find_gpus(where, gpus) if machine is None else machine["details"].get("gpus", [])
    if gpus is not None and len(found) > 1:
        raise ValueError(f"--gpus {gpus}: advice is for one GPU; name one")
    chosen = found[:1]
    capability = tuple(chosen[0]["capability"]) if chosen and chosen[0].get("capability") else None
    question = candidates.of_model(asked, capability)
    if journal is not None:
        question = _as_recorded(question, journal)
    directory = out or folder(asked)
    if not fresh:
        _same_question(directory, question, recorded)
    published = recorded and submission.is_published(directory)
    if rewrite and not published:
        raise ValueError("--rewrite needs --recorded and a published folder: leave it out")
    if not recorded:
        plan.require_room_on_a_cpu(asked)
    own(directory / "advice")
    machine = machine or environment.capture(where, chosen)
    assert asked.budget_s is not None
    room = float(chosen[0]["memory_bytes"]) if chosen else None
    carry_out = _Trials(
        question,
        directory,
        machine,
        [gpu["uuid"] for gpu in chosen] or [None],
        asked=run_options.words(asked),
        deadline=time.monotonic() + asked.budget_s,
        fresh=fresh,
        recorded=recorded,
    )
    budget_s = 0.0 if recorded else asked.budget_s
    if question.preset and tokens and tokens > (longest := configs()[model].block_size):
        warn(f"warning: --tokens {tokens}: {model}'s longest sequence has {longest}; steps of more take longer")
    if not recorded and (slow := plan.slow_on_a_cpu([question.trial(question.have)], asked)):
        warn(f"warning: {slow}")
    try:
        evidence = Run(
            question, carry_out, budget_s=budget_s, memory=limit, room=room, known=carry_out.known()
        ).gather()
    except NothingMeasured as nothing:
        said = str(nothing).replace("(--timeout)", "; a larger --budget gives it longer")
        print(f"Nothing could be measured: {said.replace('see logs/', f'see {directory}/logs/')}")
        raise typer.Exit(NOTHING) from None
    raise typer.Exit(_answer(evidence, directory, machine["id"], limit, published=published, rewrite=rewrite))


def _recorded(out: Path | None, others: Sequence[str | bool | None]) -> "Journal":
    """Return the journal of the folder. Raise ValueError if it holds no answer, or if options would measure."""
    from te_bench.experiments import store

    if any(other is not None for other in others):
        raise ValueError("--recorded measures nothing: leave --device, --gpus, --memory and --fresh out")
    if out is None:
        raise ValueError("--recorded reads a folder: name it with --out")
    journal = store.load(out) if store.written(out) else store.Journal()
    if not _asked(journal):
        raise ValueError(f"{out} holds no records of te-bench advise")
    return journal


def _asked(journal: "Journal") -> "list[Plan]":
    from te_bench.experiments.spec import ADVICE

    return [plan for plan in journal.plans if plan.suite == ADVICE]


def _as_recorded(question: "Question", journal: "Journal") -> "Question":
    """Return the question with the packages, recipes and the optimizer of captured parts that the recorded trials name.

    Records of a recipe that another has replaced since answer with it, unless they have the other, too. Records whose
    survey counts no blocks are older than mode compile-blocks, and did not leave it out for lack of time.
    """
    from te_bench.advice import candidates
    from te_bench.experiments.adoption import PER_BLOCK

    trials = [trial for plan in reversed(_asked(journal)) for trial in plan.trials]
    packages = next((t["problem"]["packages"] for t in trials if "packages" in t["problem"]), None)
    if packages is not None:
        question = replace(question, problem={**question.problem, "packages": packages})
    captured = (t["problem"] for t in trials if t["problem"].get("parts") and t["mode"] == "cudagraph")
    optimizer = next((problem.get("optimizer") for problem in captured), question.optimizer)
    surveys = [record for record in journal.records.values() if record.trial.workload == "survey"]
    knows = any("blocks" in record.work for record in surveys) or any(trial["mode"] == PER_BLOCK for trial in trials)
    choices = tuple(choice for choice in question.choices if knows or choice.mode != PER_BLOCK)
    recipes, [first, *_] = {trial["recipe"] for trial in trials}, candidates.RECIPES
    left_out = dict(question.left_out)
    for old in [old for old in candidates.REPLACED if old in recipes and first not in recipes]:
        choices = tuple(replace(c, recipe=old) if (c.recipe, c.rival) == (first, None) else c for c in choices)
        left_out.pop(old)
    return replace(question, optimizer=optimizer, choices=choices, left_out=left_out)


def folder(asked: "Options") -> Path:
    """Return the folder of a question: runs/advise-MODEL, and the other options that the command line gives."""
    from te_bench.experiments.spec import ADVICE

    said = [*(asked.model_args or ()), *(path for path in (asked.inputs, asked.loss) if path)]
    said += [f"b{asked.batch}"] if asked.batch else []
    said += [f"t{asked.tokens}"] if asked.tokens else []
    path = results_of(ADVICE, asked, None)
    return path.with_name("-".join([path.name, *(re.sub(r"[^A-Za-z0-9._-]", "-", word) for word in said)]))


def _same_question(directory: Path, question: "Question", recorded: bool) -> None:
    """Raise ValueError for a folder that answers another question: its steps would be ranked beside this one's."""
    from te_bench.experiments import store
    from te_bench.experiments.spec import ADVICE

    plans = store.load(directory).plans if store.written(directory) else []
    baseline = question.trial(question.have).cell
    other = next((plan for plan in plans if plan.suite == ADVICE and plan.baseline != baseline), None)
    if other is not None:
        raise ValueError(
            f"{directory} holds the answer on another model, code or device ({' '.join(other.asked)}): "
            + ("give the same" if recorded else "name another folder with --out, or set that answer aside with --fresh")
        )


@dataclass(slots=True)
class _Trials:
    """Run trials into the directory's journal, one at a time, on one GPU or the CPU."""

    question: "Question"
    directory: Path
    machine: dict[str, Any]
    slots: list[Any]
    asked: tuple[str, ...]
    deadline: float
    fresh: bool
    recorded: bool
    warned: bool = False  # whether the user knows that the machine is busy

    def known(self) -> set[str]:
        """Return the ids of trials that have ended in this environment, which do not run again."""
        return {trial for trial, record in self._ended().items() if not self._cut_short(record)}

    def _ended(self) -> "dict[str, Record]":
        """Return the journal's records of this environment by trial id."""
        from te_bench.experiments import store

        if self.fresh or not store.written(self.directory):
            return {}
        return {
            trial: r for (trial, where), r in store.load(self.directory).records.items() if where == self.machine["id"]
        }

    def _cut_short(self, record: "Record") -> bool:
        """Return whether the trial was interrupted, or timed out under a smaller limit than the present one."""
        if record.outcome != "timeout":
            return record.outcome == "interrupted"
        return not self.recorded and record.wall_s + 1 < self._timeout()

    def _timeout(self) -> float:
        return min(max(self.deadline - time.monotonic(), LEAST_TIMEOUT_S), MOST_TIMEOUT_S)

    def __call__(self, trials: "Sequence[Trial]") -> "list[Record]":
        from te_bench.experiments import host, plan, store
        from te_bench.experiments.measurement import Context
        from te_bench.experiments.spec import ADVICE, Experiment

        for trial in trials:
            plan.check(trial)
        question = self.question
        if self.recorded:
            held = store.load(self.directory).records
            lacking = [trial.name for trial in trials if (trial.id, self.machine["id"]) not in held]
            if lacking:
                raise ValueError(
                    f"{self.directory} holds no record of {lacking[0]}: give the model and batch of its run"
                )
            return [held[trial.id, self.machine["id"]] for trial in trials]
        experiment = Experiment(
            suite=ADVICE,
            title=f"Advice: {question.title}",
            trials=tuple(trials),
            baseline=question.trial(question.have).cell,
            asked=self.asked,
        )
        ended = self._ended()
        timeout, retry = self._timeout(), any(t.id in ended and self._cut_short(ended[t.id]) for t in trials)
        fresh, self.fresh = self.fresh, False
        context = Context(check=any(trial.seed == 0 for trial in trials))  # later runs of a step need no check
        options: dict[str, Any] = {"timeout": timeout, "context": context, "retry": retry, "fresh": fresh}
        options["warned"] = self.warned
        records = runs.carry_out(experiment, self.directory, self.machine, self.slots, **options)
        self.warned = self.warned or any(host.disturbance(record.device_state) for record in records)
        return records


def size(said: str) -> float:
    """Return the bytes of a size such as 80GiB, 80GB or 512MiB. Raise ValueError for anything else."""
    units = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}
    text = said.strip().lower()
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * units[unit]
    except (KeyError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"--memory {said}: give a size greater than 0 with its unit: 80GiB, 80GB, 512MiB")
    return value


def _answer(
    evidence: "Evidence", directory: Path, environment: str, limit: float | None, *, published: bool, rewrite: bool
) -> int:
    """Write the answer, pages and report beside the journal, print the answer, return the exit code.

    Of a published folder, write nothing or, with rewrite, the answer alone: the site makes its pages.
    """
    from te_bench.advice import answer, decision, page, traps
    from te_bench.experiments.spec import ADVICE
    from te_bench.reports.analysis.rows import load_results
    from te_bench.reports.files import write_atomically
    from te_bench.reports.page import render

    group = decision.group_of(load_results([directory]), ADVICE, environment)
    found = decision.decide(evidence, group, limit)
    findings = traps.of_evidence(evidence)
    shown = directory / page.MARKDOWN
    if rewrite or not published:
        said = json.dumps(answer.to_json(evidence, found, findings), indent=2)
        write_atomically(directory / "advice.json", f"{said}\n".encode())
        command = again("--rewrite")
        write_atomically(shown, page.markdown(evidence, found, findings, command))
        if not published:
            render.write_report([directory], directory / "report")
            shown = page.write_page(evidence, found, findings, directory / "advice", command)
    print(answer.terminal(evidence, found, findings, str(shown)))
    return found.exit_code
