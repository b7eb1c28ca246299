"""te-bench list, plan and doctor: what exists, what a run would do, what this machine can do."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_bench.cli import budget as planned
from te_bench.cli.options import Gpus, Json, Only, Suite, Timings, Within, results_of, say, with_options

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Options
    from te_bench.reports.convergence.proposals import Proposals

WIDEST = 56  # characters of the column of plain names; a longer name pushes its line
KINDS = ("suites", "attention", "recipes", "layers", "rivals", "datasets", "models", "logs")


def list_(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(KINDS)}.")] = "suites", as_json: Json = False
) -> None:
    """List suites, attention backends, FP8 recipes, layers, rivals, datasets, models, or formats of training logs."""
    from te_bench import plugins

    plugins.check("kind", kind, list(KINDS))
    rows = _listing(kind)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}}  {row['about']}")


def _listing(kind: str) -> list[dict[str, str]]:
    """Return [{"name", "about"}]; about is the first line of a docstring, read without importing the file."""
    from te_bench import plugins

    if kind == "datasets":
        from te_bench.training.corpus import DATASETS

        return [{"name": name, "about": about} for name, about in DATASETS.items()]
    if kind == "models":
        from te_bench.models.configs import configs

        shapes = {name: config.shape for name, config in configs().items()}
        return [
            {"name": name, "about": f"{s.layers} layers, {s.heads} heads, width {s.hidden}, block {s.length}"}
            for name, s in shapes.items()
        ]
    package = {
        "suites": "te_bench.experiments.suites",
        "attention": "te_bench.kernels.attention.backends",
        "recipes": "te_bench.models.recipe",
        "layers": "te_bench.models.quickstart",
        "rivals": "te_bench.models.rivals",
        "logs": "te_bench.reports.logs.formats",
    }[kind]
    return [{"name": name, "about": plugins.about(package, name)} for name in plugins.names(package)]


@with_options
def plan(
    suite: Suite,
    asked: "Options",
    only: Only = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's results, as for `run`.")] = None,
    timings: Timings = None,
    gpus: Gpus = None,
    within: Within = None,
    as_json: Json = False,
) -> None:
    """Say how long a run takes and what it can show, and list its trials in order, without running them.

    `te-bench plan scaling --world 1024` predicts a model's step on many GPUs; add --help for its options.
    """
    from te_bench.experiments.adoption import adoptee
    from te_bench.experiments.plan import slow_on_a_cpu
    from te_bench.reports.convergence.budget import BudgetError, TooSmallError

    limit = None if within is None else planned.Limit(within)
    directory = results_of(suite, asked, out)
    designs = planned.proposals(suite, only, asked, out=out, directory=directory, timings=timings, gpus=gpus)
    if designs and designs.instead and not as_json:
        _say_designs(designs)
        if within is not None:
            say(
                f"--within {within}: te-bench plan with the options of one of these says which trials end",
                indent="    ",
            )
        return
    least = designs.least_time() if designs else ""
    try:
        experiment, forecast, refused = planned.resolve_with_seeds(
            suite, only, asked, out=directory, timings=timings, gpus=gpus
        )
    except BudgetError as error:
        if designs is None or not designs.instead:
            raise ValueError(least if least and isinstance(error, TooSmallError) else _and(str(error), least)) from None
        print(json.dumps({"suite": suite, "trials": [], "refused": str(error), "designs": designs.to_json()}, indent=2))
        return
    sitting = None
    if limit is not None:
        here = planned.environment_of(experiment, asked, gpus)
        sitting = planned.what_ends(experiment, directory, forecast, limit, here)
    if as_json:
        more = {} if forecast is None else {**forecast.to_json(), "refused": refused}
        print(json.dumps({**_to_json(experiment, designs, sitting), **more}, indent=2))
        return
    said = list(forecast.sentences()) if forecast else [planned.time_of(experiment, directory, adoptee(asked))]
    if within is not None and sitting is not None:
        said.append(sitting.sentence(within, forecast.machine.on if forecast else ", one at a time"))
    if slow := slow_on_a_cpu(experiment.trials, asked):
        said.append(f"warning: {slow}")
    _say_plan(experiment, said, designs)
    if refused:
        raise ValueError(_and(f"no plan to run: {refused}", least))


def _and(refusal: str, least: str) -> str:
    return f"{refusal}; {least}" if least else refusal


def _to_json(experiment: "Experiment", designs: "Proposals | None", sitting: planned.Sitting | None) -> dict[str, Any]:
    why = {trial: {"unsupported": reason} for trial, reason in _undivided(experiment).items()}
    trials = [{"id": t.id, "name": t.name, **t.to_json(), **why.get(t.id, {})} for t in experiment.trials]
    more: dict[str, Any] = {"judgement": dict(experiment.judgement)} if experiment.judgement else {}
    more |= {} if designs is None else {"designs": designs.to_json()}
    more |= {} if sitting is None else {"within": dataclasses.asdict(sitting)}
    return {"suite": experiment.suite, "baseline": experiment.baseline, "trials": trials, **more}


def _say_plan(experiment: "Experiment", said: Sequence[str], designs: "Proposals | None") -> None:
    """Print how long the trials take and what is said of them, other designs, and last the trials, which may be hundreds.

    A trial is named plainly and as --only takes it.
    """
    from te_bench.reports.analysis.naming import count_trials
    from te_bench.reports.analysis.rows import listed_names

    undivided = _undivided(experiment)
    plain = listed_names({trial.cell: trial for trial in experiment.trials})
    width = min(max(map(len, plain.values()), default=0), WIDEST)
    print(f"{len(experiment.trials)} trials: {experiment.title}")
    for reason, number in Counter(undivided.values()).items():
        say(f"unsupported: {count_trials(number)}: {reason}", indent="    ")
    for sentence in experiment.left_out:
        say(f"left out: {sentence}", indent="    ")
    long = planned.beforehand(experiment)
    for sentence in [*([long] if long else []), *said]:
        say(sentence, indent="    ")
    if designs and len(designs.found) > 1:
        _say_designs(designs)
    for trial in experiment.trials:
        print(f"{plain[trial.cell]:{width}} ", trial.name, *(["(unsupported)"] if trial.id in undivided else []))


def _say_designs(designs: "Proposals") -> None:
    for sentence, command in designs.sentences():
        say(sentence, indent="    ")
        if command:
            print(f"    {command}")


def _undivided(experiment: "Experiment") -> dict[str, str]:
    """Return {id: why} of trials whose step cannot be divided over their ranks; some modes need torch to answer."""
    trials = [trial for trial in experiment.trials if "parallel" in trial.problem]
    if not trials:
        return {}
    from te_bench.experiments.problems import is_step
    from te_bench.experiments.trial_model import indivisible

    return {trial.id: reason for trial in trials if is_step(trial) and (reason := indivisible(trial))}


def doctor(
    as_json: Json = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Ask about this GPU, such as A100 or RTX 4090; it need not be here."),
    ] = None,
) -> None:
    """Say what this machine, or a named GPU, can run, and why it cannot run the rest."""
    from te_bench.experiments import doctor as diagnosis

    found = diagnosis.examine() if gpu is None else diagnosis.examine_gpu(gpu)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for section, rows in found.items():
        print(section)
        width = max((len(name) for name in rows), default=0)
        for name, answer in rows.items():
            print(f"  {name:{width}}  {answer}")
    if gpu is None:
        from te_bench.cli import welcome
        from te_bench.experiments import environment

        print(f"\nnext: {welcome.advise(bool(environment.nvidia_gpus()))} says what to train a model with here")
