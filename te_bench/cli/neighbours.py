"""te-bench neighbours: do trials that run at the same time disturb each other's times on this host?"""

from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Device, Gpus, Only, Timeout, find_gpus

OUT = Path("runs") / "neighbours"

Suite = Annotated[str, typer.Argument(help="Suite whose first timed trial is run; --only chooses among its trials.")]
Rounds = Annotated[int, typer.Option(metavar="N", help="Rounds: the trial alone, beside others, and alone again.")]
Places = Annotated[
    int | None,
    typer.Option(metavar="N", help="On a CPU: number of trials at a time, with the timed one. Default: 2."),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory for the rounds, neighbours.jsonl.")]


def neighbours(
    suite: Suite = "quick",
    rounds: Rounds = 8,
    only: Only = None,
    gpus: Gpus = None,
    places: Places = None,
    device: Device = None,
    out: Out = OUT,
    timeout: Timeout = 900.0,
) -> None:
    """Time one trial alone and beside copies of it on every other GPU, and print the slow-down with its interval."""
    from te_bench.experiments import environment
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.runner import Supervisor
    from te_bench.experiments.spec import Options
    from te_bench.gate import neighbours as measured

    on = device or environment.default_device()
    chosen = find_gpus(on, gpus)
    if on == "cuda" and places is not None:
        raise ValueError(f"--places {places}: only for a CPU; on GPUs --gpus chooses the places")
    if on != "cuda" and places is not None and places < 2:
        raise ValueError(f"--places {places}: give 2 or more; one of them runs the timed trial")
    where = [gpu["uuid"] for gpu in chosen] if on == "cuda" else [None] * (places or 2)
    trial = measured.first_timed(suite, Options(device=on, seeds=1), only)
    machine = environment.capture(on, chosen)

    def supervise() -> Supervisor:
        state = environment.of_times(machine)
        return Supervisor(out, machine["id"], [], state=state, timeout_s=timeout, context=Context(), on_cpu=on == "cpu")

    found = measured.measure(trial, where, supervise, out, rounds=rounds, say=lambda line: print(line, flush=True))
    print("\n".join(measured.sentences(found)))
