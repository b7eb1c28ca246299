"""te-bench tune: measure what this machine is fastest with, and keep it where the code that chooses looks."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_bench.cli.options import Device, Gpus, find_gpus

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Record, Scalar
    from te_bench.kernels.attention.table import Cell

KINDS = ("attention",)
INCOMPLETE = 4
ROUNDS = 2
SHAPE = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+),(\d+),(causal|full|window=(\d*):(\d*))")


def tune(
    what: Annotated[str, typer.Argument(help=f"What to tune: {', '.join(KINDS)}.")],
    device: Device = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H[/Hkv],T,D,MASK",
            help="A problem; MASK is causal, full or window=LEFT:RIGHT. Several may be given. Default: those of the suite.",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    rivals: Annotated[
        str | None, typer.Option(metavar="A,B", help="Backends to measure. Default: all that can.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes of each backend and shape, the rivals by turns.")] = ROUNDS,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where records go. Default: runs/tune-attention.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table to bring up to date. Default: your own, which auto reads."),
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option("--from", metavar="DIR", help="Take these runs' records and measure nothing.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of one trial.")] = 300.0,
    gpus: Gpus = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set earlier results in DIR aside and start anew.")] = False,
) -> None:
    """Measure attention backends, each checked against float64 first, and write the table that the backend auto goes by."""
    from te_bench import plugins
    from te_bench.kernels.attention import table as times
    from te_bench.reports.analysis import attention_times

    plugins.check("kind", what, list(KINDS))
    path = table or times.user_table()
    if path is None:
        raise ValueError("no home folder to keep a table in: name one with --table FILE")
    own = table is None
    _known(path, own)  # before anything is measured
    incomplete = False
    if results:
        asked = {"rounds": None if rounds == ROUNDS else rounds, "fresh": fresh or None}
        _refuse(shape=shape, rivals=rivals, dtype=dtype, out=out, device=device, gpus=gpus, **asked)
        cells = attention_times.of_results(results)
    else:
        directory = out or Path("runs/tune-attention")
        experiment = _experiment(device, shape or [], dtype, rivals, rounds)
        records = _measure(experiment, directory, gpus=gpus, timeout=timeout, fresh=fresh)
        incomplete = any(record.outcome not in ("ok", "unsupported") for record in records)
        cells = _of_this_run(directory, records)
    if cells:
        before = _known(path, own)
        _write(path, times.merged(before, cells))
        print("\n".join([*_lines(cells), *_lost(before, cells), f"table: {path}"]))
    else:
        print(f"nothing passed: {path} is as it was")
    if incomplete or not cells:
        raise typer.Exit(INCOMPLETE)


def _known(path: Path, own: bool) -> "tuple[Cell, ...]":
    """The cells of the table, () where there is none. The user's own that cannot be read, an older one say, is set aside."""
    from te_bench.kernels.attention import table as times

    try:
        return times.read(path) if path.exists() else ()
    except ValueError as error:
        if not (own and path.is_file()):
            raise
        aside = path.with_suffix(".bad")
        path.replace(aside)
        print(f"set aside as {aside}: {error}")
        return ()


def _lost(before: "Sequence[Cell]", cells: "Sequence[Cell]") -> list[str]:
    """A line for each problem whose cell no longer has backends that it had."""
    known = {cell.key: cell.seconds for cell in before}
    gone = [(cell, sorted(known.get(cell.key, {}).keys() - cell.seconds.keys())) for cell in cells]
    return [f"{label(cell)}: no longer in the table: {', '.join(names)}" for cell, names in gone if names]


def _refuse(**given: object) -> None:
    """Raise ValueError for an option of a measurement where nothing is measured."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} with --from, which measures nothing: leave one of them out")


def _experiment(
    device: str | None, shapes: Sequence[str], dtype: str | None, rivals: str | None, rounds: int
) -> "Experiment":
    """The trials, in running order. Raises ValueError for what is not known."""
    from te_bench import plugins
    from te_bench.experiments import environment, plan
    from te_bench.experiments.spec import DEVICES, Experiment, Options
    from te_bench.experiments.suites import attention as suite
    from te_bench.kernels import attention

    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: give 1 or more")
    options = Options(device=device or environment.default_device())
    plugins.check("device", options.device, list(DEVICES))
    cuda = options.device == "cuda"
    precision = dtype or ("bf16" if cuda else "fp32")
    plugins.check("dtype", precision, ["fp32", "bf16", "fp16"])
    able = [name for name in attention.names() if name != attention.AUTO and not attention.in_fp8(name)]
    names = able if rivals is None else list(dict.fromkeys(name.strip() for name in rivals.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--rivals names none; known: {', '.join(able)}")
    for name in names:
        plugins.check("rival", name, able)
    problems = list({json.dumps(p): p for p in map(problem, shapes)}.values())
    problems = problems or [suite.problem(*sizes) for sizes in (suite.GPU_SHAPES if cuda else suite.CPU_SHAPES)]
    trials = suite.rivals(options, problems, names, precision, range(rounds))
    for trial in trials:
        plan.check(trial)
    return Experiment(suite="attention", title="Attention, tuned", trials=plan.interleave(trials))


def problem(text: str) -> "dict[str, Scalar]":
    """The settings of a --shape. Raises ValueError for what is none."""
    found = SHAPE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"--shape {text}: give B,H,T,D,MASK such as 12,12,1024,64,causal or 2,32/8,4096,128,window=255:0"
        )
    batch, heads, kv_heads, length, head_dim, mask, left, right = found.groups()
    settings: dict[str, Scalar] = {
        "batch": int(batch),
        "heads": int(heads),
        "length": int(length),
        "head_dim": int(head_dim),
        "causal": mask == "causal",
    }
    if not all(settings[name] for name in ("batch", "heads", "length", "head_dim")):
        raise ValueError(f"--shape {text}: every size must be at least 1")
    if kv_heads is not None:
        if not int(kv_heads) or int(heads) % int(kv_heads):
            raise ValueError(f"--shape {text}: {kv_heads} key heads must divide the {heads} query heads")
        settings["kv_heads"] = int(kv_heads)
    if mask.startswith("window"):
        if not left and not right:
            raise ValueError(f"--shape {text}: a window without an end is full: write full")
        settings |= {"window_left": int(left or -1), "window_right": int(right or -1)}
    return settings


def _measure(
    experiment: "Experiment", directory: Path, *, gpus: str | None, timeout: float, fresh: bool
) -> "list[Record]":
    """Run the trials that this environment has no record of, as `te-bench run` does; the records of all of them."""
    from te_bench.experiments import environment, runner
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.progress import Progress
    from te_bench.experiments.store import Plan, Store

    if not timeout > 0 or math.isinf(timeout):
        raise ValueError(f"--timeout {timeout:g}: give seconds greater than 0")
    device = experiment.trials[0].device
    chosen = find_gpus(device, gpus)
    machine = environment.capture(device, chosen)
    trials = experiment.trials
    with Store(directory, fresh=fresh) as store:
        store.add_environment(machine)
        store.add_plan(Plan.of(experiment, machine["id"]))
        left = runner.to_do(trials, store.journal, machine["id"], retry=False)
        try:
            with Progress(len(trials), len(trials) - len(left), max(len(chosen), 1)) as progress:
                runner.run(
                    trials,
                    store,
                    machine["id"],
                    gpus=[gpu["uuid"] for gpu in chosen] or [None],
                    timeout_s=timeout,
                    context=Context(),
                    progress=progress,
                )
        except KeyboardInterrupt:
            print(f"\nStopped; the table is as it was. The same command goes on in {directory}.")
            raise typer.Exit(130) from None
        return [store.journal.records[trial.id, machine["id"]] for trial in trials]


def _of_this_run(directory: Path, records: "Sequence[Record]") -> "tuple[Cell, ...]":
    """The cells of the problems that were asked for, not of what lies in the directory beside them. Prints failures."""
    from te_bench.kernels.attention import table as times
    from te_bench.reports.analysis import attention_times

    for record in records:
        if record.outcome != "ok":
            print(f"{record.outcome}: {record.trial.name}: {record.reason}")
    asked = {
        times.whole(attention_times.problem_of(r.trial.problem, r.trial.precision, r.trial.device)) for r in records
    }
    if not any(record.outcome == "ok" for record in records):
        return ()
    cells = attention_times.of_results([directory], records[0].environment)
    return tuple(cell for cell in cells if cell.problem in asked)


def _write(path: Path, cells: "Sequence[Cell]") -> None:
    from te_bench.kernels.attention import table as times
    from te_bench.reports.files import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, times.text(cells).encode())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}. Name another file with --table.") from error


def _lines(cells: "Sequence[Cell]") -> list[str]:
    """A line a problem: the fastest, and the others as multiples of its seconds."""
    lines = []
    for cell in cells:
        first, *others = cell.fastest()
        best = cell.seconds[first]
        slower = ", ".join(f"{name} {cell.seconds[name] / best:.2f}x" for name in others)
        lines.append(f"{label(cell)}: {first} {best * 1e3:.3f} ms{f' ({slower})' if slower else ''}")
    return lines


def label(cell: "Cell") -> str:
    """B12 H12 T1024 D64 causal bf16, as the reports name a shape."""
    p = cell.problem
    heads = f"H{p.heads}" + (f"/{p.kv_heads}" if p.kv_heads != p.heads else "")
    mask = "causal" if p.causal else "full"
    mask = f"window {p.window[0]}:{p.window[1]}" if p.window else mask
    return f"B{p.batch} {heads} T{p.length} D{p.head_dim} {mask} {p.dtype}"
