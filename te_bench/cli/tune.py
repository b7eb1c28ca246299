"""te-bench tune: measure the fastest backends on this machine, and keep the times in the table that kernels use."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_bench.cli.options import Device, Fresh, Gpus, On, RayAddress, Timeout, check_on, find_gpus, said, warn
from te_bench.cli.run import INCOMPLETE, carry_out, find_hosts

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Record
    from te_bench.kernels.measured import Timing

KINDS = ("attention", "gemm", "epilogue", "head")
MEASURING = ("device", "shape", "dtype", "rivals", "rounds", "out", "timeout", "gpus", "on", "ray_address", "fresh")


def tune(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help=f"What to tune: {', '.join(KINDS)}.")],
    device: Device = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="Attention: B,H[/Hkv],T,D,MASK; MASK is causal, full or window=LEFT:RIGHT. GEMM: M,N,K, bf16, or "
            "M,N,K,fp8[,row][,promoted], or M,N,K,fp8,block. Epilogue: M,N,K,activated or gradient. Head: "
            "N,D,VOCAB[/PADDED]. Repeatable. Default: the suite's shapes, or the installed table's.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of attention and heads. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    rivals: Annotated[
        str | None, typer.Option(metavar="A,B", help="Backends to measure. Default: all that can run.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes for each backend and shape, the backends in turn.")] = 2,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Records. Default: runs/tune-WHAT.")] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Table to update. Default: your own, by which te-bench chooses kernels."),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="DIR", help="Measure nothing; take the records of these runs."),
    ] = None,
    timeout: Timeout = 300.0,
    gpus: Gpus = None,
    on: On = None,
    ray_address: RayAddress = None,
    fresh: Fresh = False,
) -> None:
    """Measure backends, each checked against float64 first, and write the table by which attention's auto and GEMMs choose.

    Heads are not chosen by the table: for them it only shows which one to name.
    """
    from te_bench import plugins
    from te_bench.experiments import on_ray, tuning
    from te_bench.kernels import measured
    from te_bench.reports.analysis import measured_times
    from te_bench.reports.files import write_file

    plugins.check("kind", what, list(KINDS))
    path = table or measured.user_table()
    if path is None:
        raise ValueError("there is no home folder for a table: name a table with --table FILE")
    own = table is None
    _known(path, own)  # fail before anything is measured
    incomplete = False
    if results:
        if measuring := said(context, *MEASURING):
            raise ValueError(f"{measuring} with --from, which measures nothing: leave one of them out")
        found = measured_times.of_results(what, results)
    else:
        directory = out or Path(f"runs/tune-{what}")
        experiment = tuning.experiment(what, device, shape or [], dtype, rivals, rounds)
        check_on(on, ray_address, gpus)
        with contextlib.ExitStack() as opened:
            if on is not None:
                opened.enter_context(on_ray.connected(ray_address, warn))
            records = _measure(experiment, directory, gpus=gpus, on_ray=on is not None, timeout=timeout, fresh=fresh)
        incomplete = any(record.outcome not in ("ok", "unsupported") for record in records)
        found = _of_this_run(what, directory, records)
    if found:
        before = _known(path, own)
        write_file(path, measured.text(measured.merged(before, found)).encode(), "--table")
        print("\n".join([*_lines(found), *_lost(before, found), f"table: {path}"]))
    else:
        print(f"nothing passed: {path} is unchanged")
    if incomplete or not found:
        raise typer.Exit(INCOMPLETE)


def _known(file: Path, own: bool) -> "tuple[Timing, ...]":
    """Return the table's rows, () if there is none. Set the user's own table aside if it, or a row, cannot be read."""
    from te_bench.kernels import measured
    from te_bench.reports.files import write_file

    if not measured.exists(file):
        return ()
    if not own:
        return measured.read(file)
    try:
        rows, wrong = measured.read_good(file)
    except ValueError as error:
        if not file.is_file():
            raise
        rows, wrong = (), [str(error)]
    if wrong:
        aside = file.with_suffix(".bad")
        file.replace(aside)
        print(f"set aside as {aside}: {'; '.join(wrong)}")
        if rows:
            write_file(file, measured.text(rows).encode(), "--table")
    return rows


def _lost(before: "Sequence[Timing]", found: "Sequence[Timing]") -> list[str]:
    """Return a line for each problem whose row lost backends."""
    known = {row.key: row.seconds for row in before}
    gone = [(row, sorted(known.get(row.key, {}).keys() - row.seconds.keys())) for row in found]
    return [f"{label(row)}: no longer in the table: {', '.join(names)}" for row, names in gone if names]


def _measure(
    experiment: "Experiment", directory: Path, *, gpus: str | None, on_ray: bool, timeout: float, fresh: bool
) -> "list[Record]":
    from te_bench.experiments import environment
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.on_ray import Wanted

    device = experiment.trials[0].device
    heads = any(trial.workload == "linear_cross_entropy" for trial in experiment.trials)
    by_table = ("gemm",) if heads else ()
    cluster = find_hosts(Wanted(device=device, by_table=by_table)) if on_ray else None
    chosen = find_gpus(device, gpus) if cluster is None else []
    return carry_out(
        experiment,
        directory,
        environment.capture(device, chosen, by_table=by_table) if cluster is None else cluster.machine,
        [gpu["uuid"] for gpu in chosen] or [None] if cluster is None else cluster.places,
        cluster,
        timeout=timeout,
        context=Context(),
        fresh=fresh,
        unchanged=", and the table unchanged",
    )


def _of_this_run(what: str, directory: Path, records: "Sequence[Record]") -> "tuple[Timing, ...]":
    """Return the rows of the problems asked for, without other records in the directory. Print failures."""
    from te_bench.reports.analysis import measured_times

    for record in records:
        if record.outcome != "ok":
            print(f"{record.outcome}: {record.trial.name}: {record.reason}")
    asked = {measured_times.problem_of(record.trial) for record in records}
    if not any(record.outcome == "ok" for record in records):
        return ()
    found = measured_times.of_results(what, [directory], records[0].environment)
    return tuple(row for row in found if row.problem in asked)


def _lines(rows: "Sequence[Timing]") -> list[str]:
    """Return a line per problem: the fastest backend, and the others as multiples of its time."""
    lines = []
    for row in rows:
        first, *others = row.fastest()
        best = row.seconds[first]
        slower = ", ".join(f"{name} {row.seconds[name] / best:.2f}x" for name in others)
        lines.append(f"{label(row)}: {first} {best * 1e3:.3f} ms{f' ({slower})' if slower else ''}")
    return lines


def label(row: "Timing") -> str:
    """Name a shape as reports do: B12 H12 T1024 D64 causal bf16; M12288 N768 K3072 fp8 row; N12288 D768 V50257/50304."""
    p = row.problem
    if row.operator == "gemm":
        words = [f"M{p.m} N{p.n} K{p.k}", "fp8" if p.scales else p.dtype, p.scales, p.epilogue]
        words += ["promoted"] if p.scales in ("tensor", "row") and not p.fast_accum else []
        return " ".join(word for word in words if word)
    if row.operator == "linear_cross_entropy":
        return f"N{p.n} D{p.d} V{p.vocab}/{p.padded} {p.dtype}"
    heads = f"H{p.heads}" + (f"/{p.kv_heads}" if p.kv_heads != p.heads else "")
    mask = "causal" if p.causal else "full"
    mask = f"window {p.window[0]}:{p.window[1]}" if p.window else mask
    more = [*(["packed"] if p.packed else []), *([f"dropout {p.dropout}"] if p.dropout else [])]
    return " ".join([f"B{p.batch} {heads} T{p.length} D{p.head_dim} {mask}", *more, p.dtype])
