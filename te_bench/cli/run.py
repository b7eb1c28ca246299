"""te-bench run: run the trials of a suite and write the report."""

import contextlib
import functools
import importlib
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_bench.cli import budget as planned
from te_bench.cli.interrupts import exit_code
from te_bench.cli.options import (
    Fresh,
    Gpus,
    On,
    Only,
    RayAddress,
    Suite,
    Timeout,
    Timings,
    Within,
    again,
    check_on,
    find_gpus,
    places,
    results_of,
    say,
    warn,
    with_options,
)

if TYPE_CHECKING:
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.on_ray import Cluster, Wanted
    from te_bench.experiments.spec import Experiment, Options, Record, Trial

INCOMPLETE = 4
#: Outcomes of trials that only --retry repeats.
REPEATED = ("unsupported", "oom", "timeout", "crashed", "failed_check")
TRUNKS = "trunks"


@with_options
def run(
    suite: Suite,
    asked: "Options",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Results. Default: runs/SUITE and the values of --model, --weights and --states."
        ),
    ] = None,
    only: Only = None,
    timings: Timings = None,
    underpowered: Annotated[
        bool, typer.Option("--underpowered", help="Run a plan even if its verdict would probably be INCONCLUSIVE.")
    ] = False,
    timeout: Timeout = 900.0,
    within: Within = None,
    gpus: Gpus = None,
    checkpoints: Annotated[Path | None, typer.Option(metavar="DIR", help="Save trained models here.")] = None,
    on: On = None,
    ray_address: RayAddress = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat the trials that did not end ok.")] = False,
    fresh: Fresh = False,
) -> None:
    """Run a suite, each trial in its own process, and write the report. A repeated command continues where it stopped."""
    from te_bench.experiments import environment, host, on_ray, runner
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.plan import require_room_on_a_cpu, slow_on_a_cpu
    from te_bench.experiments.problems import world_of
    from te_bench.experiments.store import own, written

    check_on(on, ray_address, gpus)
    if on is not None and asked.gpus_per_trial and (asked.share or 1) > 1:
        raise ValueError(f"--share {asked.share}: with --on ray it does not go with --gpus-per-trial; leave one out")
    began = datetime.now(UTC)
    limit = None if within is None else planned.Limit(within)
    chosen = find_gpus(asked.device, gpus) if on is None else []
    directory = results_of(suite, asked, out)
    own(directory / "report")
    if on is None and (fresh or not written(directory)):  # otherwise there may be no trial to run
        runner.start_fork_server(on_cpu=asked.device == "cpu")
    with contextlib.ExitStack() as opened:
        in_cluster = opened.enter_context(on_ray.connected(ray_address, warn)) if on is not None else None
        experiment, forecast, refused = planned.resolve_with_seeds(
            suite, only, asked, out=directory, timings=timings, gpus=gpus, fresh=fresh, in_cluster=in_cluster
        )
        require_room_on_a_cpu(asked)
        for sentence in forecast.sentences() if forecast else ():  # before the run spends hours
            say(sentence, indent="    ")
        for sentence in experiment.left_out:
            say(f"left out: {sentence}", indent="    ")
        if long := planned.beforehand(experiment):
            say(long, indent="    ")
        if refused and not underpowered:
            designs = planned.proposals(suite, only, asked, out=out, directory=directory, timings=timings, gpus=gpus)
            others = "; te-bench plan with the same options names designs that conclude"
            raise ValueError(refused + (others if on is None and designs and designs.found else ""))
        if slow := slow_on_a_cpu(experiment.trials, asked):
            warn(f"warning: {slow}")
        if checkpoints is not None and on is None:  # a cluster's hosts have their own folders
            _require_writable(checkpoints)
        by_table = planned.by_table(experiment)
        at_once = functools.partial(planned.trials_at_once, experiment)
        cluster: Cluster | None = None
        if on is None:
            machine = environment.capture(asked.device, chosen, by_table=by_table, losses=experiment.of_losses)
            slots = slots_on(experiment.trials, [gpu["uuid"] for gpu in chosen], asked.gpus_per_trial, asked.share)
            slots = slots or [None] * at_once(host.cores())
        else:
            each = asked.gpus_per_trial or max(map(world_of, experiment.trials)) / (asked.share or 1)
            wanted = on_ray.Wanted(
                device=asked.device, by_table=by_table, gpus=each, at_once=at_once, losses=experiment.of_losses
            )
            cluster = find_hosts(wanted)
            machine, slots = cluster.machine, cluster.places
        importlib.import_module("te_bench.reports.page.render")  # takes a second, while the fork server imports
        context = Context(cache=asked.cache, checkpoints=checkpoints, trunks=trunks_of(directory, machine["id"]))
        if limit is not None:
            limit.known = dict(forecast.trial_s) if forecast else {}
        ended = carry_out(
            experiment,
            directory,
            machine,
            slots,
            cluster,
            timeout=timeout,
            context=context,
            retry=retry,
            fresh=fresh,
            limit=limit,
        )
    _finish(directory, ended, limit, began)


def _require_writable(checkpoints: Path) -> None:
    """Create the folder and write a file there, before hours of training. Raise ValueError if it cannot be written."""
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=checkpoints).close()
    except OSError as error:
        raise ValueError(
            f"--checkpoints {checkpoints}: {error.strerror}; give a folder that te-bench can write to"
        ) from error


def trunks_of(directory: Path, environment_id: str) -> Path:
    """Return the directory in which the run's branches share their trunks, for one environment as its records are."""
    from te_bench.experiments.store import own

    return own(directory / TRUNKS).resolve() / environment_id


def slots_on(trials: "Sequence[Trial]", gpus: list[str], per_trial: int | None, share: int | None) -> list[Any]:
    """Return a set of GPUs for each trial that runs at a time. Raise ValueError if there is no set.

    In a comparison of steps on few and many GPUs each trial runs alone; a trial that needs more GPUs does not run.
    """
    compared = any(trial.workload == "scaling" for trial in trials)
    return places(gpus, per_trial or (len(gpus) if compared else 1)) * (share or 1)


def find_hosts(wanted: "Wanted") -> "Cluster":
    """Return the cluster's hosts that can run such trials; print how many, and which are excluded."""
    from te_bench.experiments import on_ray

    cluster = on_ray.Cluster(wanted, warn)
    trials, hosts = (
        f"{count} {thing}{'s' if count > 1 else ''}"
        for count, thing in ((len(cluster.places), "trial"), (len(cluster.hosts), "host"))
    )
    print(f"on ray: {trials} at a time, on {hosts}")
    return cluster


def carry_out(
    experiment: "Experiment",
    directory: Path,
    machine: dict[str, Any],
    slots: Sequence[Any],
    cluster: "Cluster | None" = None,
    *,
    timeout: float,
    context: "Context",
    retry: bool = False,
    fresh: bool = False,
    unchanged: str = "",
    warned: bool = False,
    limit: "planned.Limit | None" = None,
) -> "list[Record]":
    """Run the trials without a record of this environment; return the records of all trials.

    slots: GPUs, None for the CPU, or the places of the cluster; each runs one trial at a time. warned: the command has
    already said that the machine is busy. limit: keeps back, and then holds, trials that would not end in time. If a part of
    a study is run first, the whole plan is written before it. No loss of a study is printed, for its gaps are hidden.

    Ctrl-C ends te-bench with the command to continue, and with what is `unchanged`.
    """
    from te_bench.experiments import environment, on_ray, runner
    from te_bench.experiments.progress import Progress
    from te_bench.experiments.store import Plan, Store
    from te_bench.reports.convergence import stopping
    from te_bench.reports.convergence.earlier_runs import first_plan

    trials, here = experiment.trials, machine["id"]
    with Store(directory, fresh=fresh) as store:
        if store.journal.torn:
            print(f"{directory}: the journal's last line was incomplete and is removed; what it held is done again")
        store.add_environment(machine)
        if experiment.whole is not None and first_plan(experiment.whole, store.journal, here) is None:
            # the verdict judges the whole plan, whichever part runs first
            store.add_plan(Plan.of(experiment.whole, here))
        store.add_plan(Plan.of(experiment, here))
        if fresh and context.trunks is not None and context.trunks.exists():  # like the journal
            context.trunks.rename(context.trunks.with_name(f"{here}.{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"))
        done = len(trials) - len(runner.to_do(trials, store.journal, here, retry=retry))
        if done:
            print(f"{done} of {len(trials)} {'trials are' if len(trials) > 1 else 'trial is'} already in {directory}")
        executor: runner.Executor
        if cluster is not None:
            executor = on_ray.RayExecutor(cluster, directory, timeout_s=timeout, context=context)
        else:
            how: dict[str, Any] = {"timeout_s": timeout, "context": context}
            how |= {"state": environment.of_times(machine), "on_cpu": all(trial.device == "cpu" for trial in trials)}
            executor = runner.Supervisor(directory, here, slots, **how)

        def runs_this_code() -> bool:
            return bool(environment.code_hash() == machine["identity"]["code"])

        try:
            called = _called(trials, [record.trial for record in store.journal.records.values()])
            found = (lambda record: "") if experiment.judgement else _found
            with Progress(len(trials), done, len(slots), called, found, warned=warned) as progress:
                late = runner.run(
                    trials,
                    store,
                    here,
                    executor=executor,
                    progress=progress,
                    retry=retry,
                    needless=stopping.stopping_rule(experiment.suite, store.journal, here),
                    in_time=(lambda _: True) if limit is None else limit.in_time(store.journal.records),
                    unchanged=runs_this_code,
                )
        except KeyboardInterrupt as interrupt:
            from te_bench.reports.analysis.naming import count_trials

            left = len(runner.to_do(trials, store.journal, here, retry=retry))
            print(f"\nStopped with {count_trials(left)} to go{unchanged}. To go on: {again()}")
            raise typer.Exit(exit_code(interrupt)) from None
        if late and not runs_this_code():
            raise ValueError(
                f"te_bench's code has been changed since this run began, with {len(late)} trials to go, which would not run "
                "the code of the others. With that code again, the same command goes on; with this one it begins anew."
            )
        records = store.journal.records
        if limit is not None:
            limit.left = late
        return [records[trial.id, here] for trial in trials if (trial.id, here) in records]


def _called(trials: "Sequence[Trial]", ended: "Sequence[Trial]") -> Callable[["Trial"], str]:
    """Return a function for a trial's short name in its folder; it names workload and seed only if they differ."""
    from te_bench.reports.analysis import rows

    names = rows.names({trial.cell: trial for trial in (*ended, *trials)})
    workloads, seeds = ({getattr(trial, of) for trial in trials} for of in ("workload", "seed"))

    def called(trial: "Trial") -> str:
        what = f"{trial.workload.replace('_', ' ')}: " if len(workloads) > 1 else ""
        name = f"{rows.shape_of(trial)} {names[trial.cell]}".strip()
        return f"{what}{name}{f', seed {trial.seed}' if len(seeds) > 1 else ''}"

    return called


def _found(record: "Record") -> str:
    """Return the result of an ok trial in words: its times, or its last loss; "" for any other trial."""
    from te_bench.reports.analysis import measures
    from te_bench.reports.analysis.alone import SAMPLE
    from te_bench.reports.analysis.rows import TIMED
    from te_bench.reports.page import text

    times = [(where, measures.of_process(record, sample)) for sample, where in {**TIMED, SAMPLE: ""}.items()]
    said = [f"{where.strip('/')} {text.milliseconds(took)} ms".strip() for where, took in times if took is not None]
    losses = measures.numbers(record.samples.get("val_loss"))
    return ", ".join([*said, *(f"loss {text.loss(last)}" for last in losses[-1:])])


def _finish(directory: Path, records: "list[Record]", limit: "planned.Limit | None", began: datetime) -> None:
    """Write the report and print the summary. Exit 4 unless every trial gave its result or was not needed.

    Also exit 4 if all trials are unsupported, because nothing was measured. began: when the command did; failures that are
    older were found on record.
    """
    from te_bench.reports.page import render, tables

    index = render.write_report([directory], directory / "report")
    print(tables.summary([directory]))
    for record in records:
        if record.outcome not in ("ok", "stopped"):
            print(f"{record.outcome}: {record.trial.name}: {record.reason}")
    before = [r for r in records if r.outcome in REPEATED and datetime.fromisoformat(r.started_at) < began]
    if before:
        many = f"{len(before)} of these are" if len(before) > 1 else "1 of these is"
        say(f"{many} on record from an earlier command: --retry repeats {'them' if len(before) > 1 else 'it'}.")
    for line in _stopped([record for record in records if record.outcome == "stopped"]):
        print(line)
    counts = Counter(record.outcome for record in records)
    print(
        f"trials of this command: {', '.join(f'{number} {outcome}' for outcome, number in counts.most_common()) or 'none'}"
    )
    print(f"report: {index}")
    left = None if limit is None else limit.how_to_go_on(again())
    if left:
        print(left)
    _say_too_few_for_a_gate(directory, records)
    nothing = bool(records) and all(record.outcome == "unsupported" for record in records)
    if nothing:
        say("Nothing was measured: no trial of this command is supported here. te-bench doctor says what is.")
    failed = [record for record in records if record.outcome not in ("ok", "unsupported", "stopped")]
    to_find_out = {"arm", "lr_factor"}  # settings of trials that are run to see whether they diverge
    if (
        left
        or nothing
        or any(record.outcome != "diverged" or to_find_out.isdisjoint(record.trial.problem) for record in failed)
    ):
        raise typer.Exit(INCOMPLETE)


def _say_too_few_for_a_gate(directory: Path, records: "list[Record]") -> None:
    """Say how to get enough seeds for a gate on these records, if a timed trial has too few."""
    from te_bench.gate.question import FEWEST, SEEDS
    from te_bench.reports.analysis.rows import TIMED

    timed = Counter(r.trial.cell for r in records if r.outcome == "ok" and TIMED.keys() & r.samples.keys())
    seeds = min(timed.values(), default=FEWEST)
    if seeds < FEWEST:
        many = f"{seeds} seeds a trial are" if seeds > 1 else "1 seed a trial is"
        anew = " and without --fresh" if "--fresh" in sys.argv else ""
        say(
            f"To compare these times with another run's by te-bench gate --baseline {shlex.quote(str(directory))}, {many} "
            f"too few: a gate needs {FEWEST}, better {SEEDS}. This command with --seeds {SEEDS}{anew} adds the missing ones."
        )


def _stopped(records: "list[Record]") -> list[str]:
    """Return a line for each configuration whose last seeds were not needed."""
    from te_bench.reports.analysis.naming import first_of
    from te_bench.reports.analysis.rows import grouped

    arms = grouped(records, lambda record: record.trial.cell).values()
    return [f"stopped: {first_of([one.trial.name for one in arm], 1)}: {arm[0].reason}" for arm in arms]
