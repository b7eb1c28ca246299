"""The command line: a verb is a stage. list -> plan -> run -> report, and doctor.

Exit codes: 0 done; 2 usage (the message says what is legal); 4 incomplete: some planned trial has no result.
130 after Ctrl-C. Nothing heavy is imported before a verb needs it, so `te-bench --help` answers at once.
"""

import json
import math
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_bench import __version__

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Options, Record

INCOMPLETE = 4
KINDS = ("suites", "attention", "recipes", "layers", "datasets", "models")

app = typer.Typer(
    name="te-bench",
    help="Which attention kernel and which precision to train transformers with on your GPU, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Suite = Annotated[str, typer.Argument(help="A suite's name; `te-bench list suites` shows them.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is a GPU.")]
Only = Annotated[str | None, typer.Option(metavar="GLOB", help="Only trials whose name matches, e.g. '*/flash/*'.")]
Seeds = Annotated[int | None, typer.Option(help="Repetitions of every trial. Default: the suite's own number.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[MODEL=]SPEC", help="Data set to train on: stdlib, text:PATH, hf:NAME[:CONFIG][:COLUMN], random."
    ),
]
Budget = Annotated[float | None, typer.Option(metavar="SECONDS", help="Training time of each time-budget trial.")]
Cache = Annotated[Path | None, typer.Option(metavar="DIR", help="Where token files are cached.")]
Gpus = Annotated[
    str | None, typer.Option(help="Indices such as 0,1, as in nvidia-smi, or all: one trial on each at a time.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Entry point: a ValueError, a file that can't be used and a missing package are the user's to read; exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"te-bench: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "te_bench").partition(".")[0]
        if package == "te_bench":  # a fault of ours
            raise
        print(f"te-bench: needs the package {package}: pip install {package}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `te-bench list | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        print(f"te-bench: {error.filename or 'cannot go on'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"te-bench {__version__}")
        raise typer.Exit


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(KINDS)}.")] = "suites", as_json: Json = False
) -> None:
    """Show what there is: suites, attention backends, FP8 recipes, layers, datasets, models."""
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
    """[{"name", "about"}], each about the first line of a docstring, read without importing the file."""
    from te_bench import plugins

    if kind == "datasets":
        from te_bench.models.corpus import DATASETS

        return [{"name": name, "about": about} for name, about in DATASETS.items()]
    if kind == "models":
        from te_bench.models.configs import CONFIGS

        return [
            {"name": name, "about": f"{c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, block {c.block_size}"}
            for name, c in CONFIGS.items()
        ]
    package = {
        "suites": "te_bench.experiments.suites",
        "attention": "te_bench.kernels.attention",
        "recipes": "te_bench.models.recipe",
        "layers": "te_bench.models.layer",
    }[kind]
    return [{"name": name, "about": plugins.about(package, name)} for name in plugins.names(package)]


@app.command()
def plan(
    suite: Suite,
    device: Device = None,
    only: Only = None,
    seeds: Seeds = None,
    data: Data = None,
    budget: Budget = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Show the trials that `run` would do, in order, without doing them."""
    experiment = _resolve(suite, only, _options(device, seeds, data, budget, cache))
    if as_json:
        trials = [{"id": t.id, "name": t.name, **t.to_json()} for t in experiment.trials]
        print(json.dumps({"suite": suite, "baseline": experiment.baseline, "trials": trials}, indent=2))
        return
    for trial in experiment.trials:
        print(trial.id, trial.name)
    print(f"{len(experiment.trials)} trials: {experiment.title}")


@app.command()
def run(
    suite: Suite,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where results go. Default: runs/SUITE.")] = None,
    device: Device = None,
    only: Only = None,
    seeds: Seeds = None,
    data: Data = None,
    budget: Budget = None,
    cache: Cache = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of one trial.")] = 900.0,
    gpus: Gpus = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat the trials that did not end ok.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set earlier results in DIR aside and start anew.")] = False,
) -> None:
    """Run a suite, one process a trial, and write the report. A rerun goes on where the last one stopped."""
    from te_bench.experiments import environment, runner
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.store import Plan, Store

    if not timeout > 0:  # nor is NaN
        raise ValueError(f"--timeout {timeout:g}: give seconds greater than 0")
    options = _options(device, seeds, data, budget, cache)
    chosen = _gpus(options.device, gpus)
    slots = [gpu["uuid"] for gpu in chosen] or [None]
    directory = out or Path("runs") / suite
    experiment = _resolve(suite, only, options)
    machine = environment.capture(options.device, chosen)
    with Store(directory, fresh=fresh) as store:
        store.add_environment(machine)
        store.add_plan(
            Plan(
                suite=suite,
                title=experiment.title,
                environment=machine["id"],
                trials=tuple(t.to_json() for t in experiment.trials),
                baseline=experiment.baseline,
                started_at=_now(),
            )
        )
        total = len(experiment.trials)
        done = total - len(runner.to_do(experiment.trials, store.journal, machine["id"], retry=retry))
        if done:
            print(f"{done} of {total} trials are already in {directory}")
        try:
            with _progress(total, done, len(slots)) as progress:
                runner.run(
                    experiment.trials,
                    store,
                    machine["id"],
                    gpus=slots,
                    timeout_s=timeout,
                    context=Context(cache=cache),
                    progress=progress,
                    retry=retry,
                )
        except KeyboardInterrupt:
            left = len(runner.to_do(experiment.trials, store.journal, machine["id"], retry=retry))
            again = shlex.join(word for word in sys.argv[1:] if word != "--fresh")
            print(f"\nStopped with {left} trials to go. To go on: te-bench {again}")
            raise typer.Exit(130) from None
        records = [store.journal.records[(t.id, machine["id"])] for t in experiment.trials]
    _finish(directory, records)


def _finish(directory: Path, records: "list[Record]") -> None:
    """Write the report, print the summary, and exit 4 unless every trial ended ok or unsupported."""
    from te_bench.reports import render, tables

    index = render.write_report([directory], directory / "report")
    print(tables.summary([directory]))
    for record in records:
        if record.outcome != "ok":
            print(f"{record.outcome}: {record.trial.name}: {record.reason}")
    counts = Counter(record.outcome for record in records)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    print(f"report: {index}")
    if set(counts) - {"ok", "unsupported"}:
        raise typer.Exit(INCOMPLETE)


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="--out directories of runs; several are merged.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the report goes. Default: DIR/report.")] = None,
) -> None:
    """Write index.html, report.md, records.csv and the figures of one or several runs."""
    from te_bench.reports import render

    print(render.write_report(directories, out or directories[0] / "report"))


@app.command()
def embed(
    pages: Annotated[list[Path], typer.Argument(help="Markdown files with te-bench:table markers.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a table is out of date.")] = False,
) -> None:
    """Bring the tables in Markdown files up to date with the records that they name."""
    from te_bench.reports import embed as tables

    stale = [page for page in pages if not tables.embed(page, check=check)]
    if check and stale:
        print(f"out of date: {', '.join(map(str, stale))}. Run: te-bench embed {' '.join(map(str, stale))}")
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can run, and why not what it can't."""
    from te_bench.experiments import doctor as diagnosis

    found = diagnosis.examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for section, rows in found.items():
        print(section)
        width = max((len(name) for name in rows), default=0)
        for name, answer in rows.items():
            print(f"  {name:{width}}  {answer}")


def _options(
    device: str | None, seeds: int | None, data: list[str] | None, budget: float | None, cache: Path | None
) -> "Options":
    from te_bench.experiments import environment
    from te_bench.experiments.spec import Options

    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"--budget {budget:g}: give seconds greater than 0")
    return Options(
        device=device or environment.default_device(), seeds=seeds, data=_data(data or []), budget_s=budget, cache=cache
    )


def _data(specs: list[str]) -> dict[str, str]:
    """{model or "": data set} of the --data options; MODEL= is recognised by the sign before any colon.

    Raises ValueError for a model that is given two.
    """
    chosen: dict[str, str] = {}
    for spec in specs:
        head = spec.split(":", 1)[0]
        model, _, name = spec.partition("=") if "=" in head else ("", "", spec)
        if model in chosen:
            whose = f"the model {model}" if model else "every model"
            raise ValueError(f"--data {spec}: {whose} has the data set {chosen[model]} already; give each model one")
        chosen[model] = name
    return chosen


def _resolve(suite: str, only: str | None, options: "Options") -> "Experiment":
    from te_bench.experiments import plan

    return plan.resolve(suite, options, only=only)


def _gpus(device: str, gpus: str | None) -> list[dict[str, Any]]:
    """The GPUs to run on, [] on a CPU. Raises ValueError for GPUs that are not here or that torch can't use."""
    from te_bench.experiments import environment

    if device != "cuda":
        if gpus is not None:
            raise ValueError(f"--gpus {gpus}: this run is on the {device}; leave it out, or add --device cuda")
        return []
    here = {str(gpu["index"]): gpu for gpu in environment.nvidia_gpus()}
    if not here:
        raise ValueError(
            "--device cuda: the NVIDIA driver reports no GPU here. Use --device cpu; `te-bench doctor` says more."
        )
    if why := environment.no_cuda():
        raise ValueError(f"--device cuda: {why}")
    if gpus in (None, "all"):
        if visible := environment.visible_gpus():
            return visible
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={listed!r} leaves no GPU; unset it, or choose with --gpus or --device cpu"
        )
    wanted = [index.strip() for index in gpus.split(",")]
    if set(wanted) - set(here) or len(set(wanted)) < len(wanted):
        raise ValueError(f"--gpus {gpus}: the GPUs here are {', '.join(here)}; write all, or each index once")
    return [here[index] for index in wanted]


def _progress(total: int, done: int, slots: int) -> Any:
    from te_bench.experiments.progress import Progress

    return Progress(total, done, slots)


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
