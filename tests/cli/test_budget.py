"""--budget and --pilot of a convergence run: seeds from records, what they can conclude, and what to run first."""

import dataclasses
import json
import lzma
import math
import random
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import journals
import pytest
from in_process import Command, Started, gpus

from te_bench.cli import budget
from te_bench.experiments import environment, plan, runner
from te_bench.experiments.spec import Options, Record, Trial
from te_bench.experiments.store import JOURNAL, PACKED, Store, load
from te_bench.reports.convergence.planning import duration

STEPS, BESIDE_S = 40, 4.0
STEP_S = {None: 0.1, "delayed_scaling": 0.2, "float8_current_scaling": 0.3}
#: Of one seed over the 150 steps of preset cpu: bf16 twice and delayed_scaling; and of six seeds current scaling broken.
SEED_S = 3 * BESIDE_S + 150 * (0.1 + 0.1 + 0.2)
BROKEN_S = BESIDE_S + 150 * 0.3
CONVERGENCE = ("convergence", "--device", "cpu", "--data", "random", "--recipes", "delayed_scaling")


def trials(seeds: int | None = 1, steps: int | None = STEPS, device: str = "cpu", **asked: Any) -> tuple[Trial, ...]:
    given = {"data": {"": "random"}, "recipes": ("delayed_scaling",), "preset": "cpu", **asked}
    return plan.resolve("convergence", Options(device=device, seeds=seeds, steps=steps, **given)).trials


def ended(trial: Trial, gap: float = 0.0, **changes: Any) -> Record:
    """A training with a read of the loss every ten steps, which ends on 3 + gap."""
    steps, step_s = int(str(trial.problem["steps"])), STEP_S[trial.recipe]
    samples = {
        "step": [float(step) for step in range(steps)],
        "loss": [3.0] * steps,
        "time_s": [step_s * 10 * (1 + step // 10) for step in range(steps)],
        "val_step": [float(steps)],
        "val_loss": [3.0 + gap],
    }
    done = journals.record(trial, "env", samples=samples, **changes)
    return dataclasses.replace(done, wall_s=BESIDE_S + steps * step_s)


def write(directory: Path, records: Sequence[Record], chip: str | None = None, **judgement: Any) -> Path:
    """A run of the records on this machine's CPU, or on another chip."""
    device = records[0].trial.device
    identity = environment.capture("cpu")["identity"] | {"device": device}
    identity |= {} if chip is None else {"gpu" if device == "cuda" else "cpu": chip}
    body = {"id": "env", "identity": identity, "details": {}}
    fixed = {"margin": 0.01, "alpha": 0.05, "seeds": 1, "steps": STEPS, **judgement}
    return journals.write(directory, records, suite="convergence", title="Convergence", body=body, judgement=fixed)


@pytest.fixture(autouse=True)
def _one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cores there are, but where a test says otherwise."""
    monkeypatch.setattr(runner, "at_once", lambda trials, cores: 1)


@pytest.fixture
def pilot(tmp_path: Path) -> Path:
    return write(tmp_path / "pilot", [ended(trial) for trial in trials()])


def planned(command: Command, *arguments: object) -> dict[str, Any]:
    done = command("plan", *CONVERGENCE, *arguments, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def plainly(text: str) -> str:
    """Without the ends of its lines."""
    return " ".join(text.split())


def estimate(device_s: float, elapsed_s: float, at_once: int) -> dict[str, Any]:
    return {"device_s": pytest.approx(device_s), "elapsed_s": pytest.approx(elapsed_s), "at_once": at_once}


def seconds(seeds: float) -> float:
    return seeds * SEED_S + min(seeds, 6) * BROKEN_S


@pytest.mark.parametrize(("budget", "seeds"), [(seconds(3), 3), (seconds(3.99), 3), (seconds(9.01), 9)])
def test_a_budget_is_as_many_seeds_as_it_holds(command: Command, pilot: Path, budget: float, seeds: int) -> None:
    found = planned(command, "--budget", f"{budget}s", "--pilot", pilot, "--margin", 0.004)
    assert {trial["seed"] for trial in found["trials"]} == set(range(seeds))
    assert found["judgement"]["seeds"] == found["conclusion"]["seeds"] == seeds
    assert found["estimate"]["device_s"] == pytest.approx(seconds(seeds))


def test_a_budget_after_a_pilot_takes_eight_seeds_if_it_holds_them(command: Command, tmp_path: Path) -> None:
    """However alike the pilot's gaps are: fewer that a pilot chose err too often."""
    draw = random.Random(1)
    records = [ended(trial, 1e-4 * draw.gauss(0, 1)) for trial in trials(4, None, as_pilot=True)]
    pilot = write(tmp_path / "pilot", records, seeds=4, pilot=True)
    for held, seeds in ((100, 8), (5.5, 5)):
        assert planned(command, "--budget", f"{seconds(held)}s", "--pilot", pilot)["judgement"]["seeds"] == seeds


def test_a_budget_is_spent_on_all_gpus_at_once(command, monkeypatch, tmp_path):
    gpus(monkeypatch, 4)
    records = [ended(trial) for trial in trials(device="cuda")]
    write(tmp_path / "pilot", records, chip="NVIDIA H200")
    where = ("--device", "cuda", "--preset", "cpu", "--pilot", tmp_path / "pilot", "--budget")
    for chosen, gpu_count, seeds in (("all", 4, 8), ("0,2", 2, 4)):
        found = planned(command, *where, f"{seconds(seeds) / gpu_count}s", "--gpus", chosen)
        assert found["judgement"]["seeds"] == seeds
        assert found["estimate"]["elapsed_s"] == pytest.approx(seconds(seeds) / gpu_count)
    monkeypatch.setattr(environment, "nvidia_gpus", list)  # planned from a machine without any
    assert planned(command, *where, f"{seconds(6) / 3}s", "--gpus", "0,1,2")["judgement"]["seeds"] == 6


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_gpus_that_are_shared_have_more_trials_at_a_time_each_slower(here, command, monkeypatch, tmp_path):
    gpus(monkeypatch, 2)
    alone, shared = ([ended(trial) for trial in trials(device="cuda", share=share)] for share in (None, 3))
    write(tmp_path / "alone", alone, chip="NVIDIA H200")
    write(tmp_path / "shared", shared, chip="NVIDIA H200")
    if not here:
        monkeypatch.setattr(environment, "nvidia_gpus", list)
    asked = ("--device", "cuda", "--preset", "cpu", "--gpus", "0,1", "--share", "3")
    found = planned(command, *asked, "--budget", f"{seconds(6) / 6}s", "--pilot", tmp_path / "shared")
    assert {trial["problem"]["share"] for trial in found["trials"]} == {3}
    assert found["judgement"]["seeds"] == 6
    assert found["estimate"] == estimate(seconds(6) / 3, seconds(6) / 6, 6)
    said = plainly(command("plan", *CONVERGENCE, *asked, "--seeds", "6", "--pilot", tmp_path / "shared").out)
    assert "on 2 GPUs, 3 at a time on each" in said
    other = command("plan", *CONVERGENCE, *asked, "--budget", "1h", "--pilot", tmp_path / "alone")
    assert (other.code, "no record says how long a seed takes" in other.err) == (2, True)


@pytest.mark.parametrize(
    ("within", "gpus_", "told"), [(130, "0", "4 of the 8"), (130, "0,1", "8 of the 8"), (58, "0", "3 of the 8")]
)
def test_what_a_time_holds_is_planned_by_how_long_each_configuration_takes(
    within, gpus_, told, command, monkeypatch, tmp_path
):
    """Of two seeds: 19 s a bf16 run, 34 s one by delayed scaling, 49 s one that is broken; shorter ones go ahead."""
    gpus(monkeypatch, 2)
    write(tmp_path / "pilot", [ended(trial) for trial in trials(device="cuda")], chip="NVIDIA H200")
    asked = ("--device", "cuda", "--preset", "cpu", "--seeds", "2", "--pilot", tmp_path / "pilot", "--gpus", gpus_)
    done = command("plan", *CONVERGENCE, *asked, "--within", f"{within}s")
    assert f"--within {within}s: {told}" in done.out


def test_what_a_time_holds_is_of_the_trials_that_run_would_do(command: Command, tmp_path: Path) -> None:
    """Neither one that was interrupted nor another machine's record is done."""
    of, asked = trials(2, steps=None), ("--preset", "cpu", "--seeds", "2", "--out", tmp_path / "out", "--within", "1h")
    here = environment.capture("cpu")
    for body, left in (({**here, "id": "elsewhere"}, 8), (here, 6)):
        records = [journals.record(of[0], body["id"]), journals.record(of[1], body["id"])]
        interrupted = journals.record(of[2], body["id"], outcome="interrupted", reason="killed")
        journals.write(tmp_path / "out", [*records, interrupted], suite="convergence", planned=of[3:], body=body)
        assert f"--within 1h: {left} of the {left} trials" in plainly(command("plan", *CONVERGENCE, *asked).out)
        told = json.loads(command("plan", *CONVERGENCE, *asked, "--json").out)["within"]
        assert (told["seconds"], told["left"], told["ends"]) == (3600, left, left)


@pytest.mark.parametrize(
    ("start_s", "told"),
    [
        (2, "to go on: te-bench run x"),
        (25, "the shortest takes 40 s, and with its start te-bench needs --within at least 65 s"),
    ],
)
def test_the_same_command_is_advised_only_where_it_would_begin_a_trial(start_s, told, monkeypatch):
    [one, *_] = trials()
    now = 0.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    limit = budget.Limit("60s")
    now = start_s
    fits = limit.in_time({one.id: dataclasses.replace(journals.record(one, "env"), wall_s=40.0)})
    begins = fits(one)
    now = 30.0
    assert (begins, fits(one)) == (start_s == 2, False)
    limit.left = [one]
    assert limit.how_to_go_on("te-bench run x") == f"1 trial would not have ended --within 60s: {told}"


def test_what_a_time_holds_is_not_guessed(command: Command) -> None:
    done = command("plan", *CONVERGENCE, "--within", "10min")
    assert "--within 10min: no record says how long these trials take" in done.out
    refused = command("plan", *CONVERGENCE, "--within", "10", "--json")
    assert (refused.code, refused.out, "--within 10: say the unit" in refused.err) == (2, "", True)


def test_a_pilot_of_another_suite_is_refused(command: Command, tmp_path: Path) -> None:
    other = journals.write(tmp_path / "speed", [journals.step_record(journals.trial(device="cpu"), 10.0)])
    refused = command("plan", *CONVERGENCE, "--seeds", "5", "--pilot", other)
    assert refused.code == 2
    assert f"--pilot {other} holds no run of convergence" in refused.err


def test_a_budget_is_spent_on_as_many_cores_as_trials_run_on_at_once(command, monkeypatch, pilot):
    monkeypatch.setattr(runner, "at_once", lambda trials, cores: 3)
    asked = ("--budget", f"{seconds(6) / 3}s", "--pilot", pilot)
    found = planned(command, *asked)
    assert found["judgement"]["seeds"] == 6
    assert found["estimate"] == estimate(seconds(6), seconds(6) / 3, 3)
    assert "on 3 cores" in command("plan", *CONVERGENCE, *asked).out
    refused = command("plan", *CONVERGENCE, "--budget", f"{SEED_S / 3}s", "--pilot", pilot)
    assert (refused.code, "on 3 cores" in refused.err) == (2, True)


def test_records_of_another_chip_say_nothing(command: Command, tmp_path: Path) -> None:
    other = write(tmp_path / "pilot", [ended(trial) for trial in trials()], chip="another CPU")
    done = command("plan", *CONVERGENCE, "--budget", "1h", "--pilot", other)
    assert done.code == 2
    assert "no record says how long a seed takes on this machine (4 of 4 configurations" in done.err


def test_two_kinds_of_gpu_and_none_here_are_not_guessed_between(command, monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    [first, *_] = trials(device="cuda")
    directory = write(tmp_path / "pilot", [ended(first)], chip="NVIDIA H200")
    with Store(directory) as store:
        body = {"id": "other", "identity": {"device": "cuda", "gpu": "NVIDIA B200"}, "details": {}}
        store.add_environment(body)
        store.add(dataclasses.replace(ended(first), environment="other"))
    done = command("plan", *CONVERGENCE, "--device", "cuda", "--pilot", directory)
    assert done.code == 2
    assert "--pilot: its records are of NVIDIA B200, NVIDIA H200, and this machine has no GPU to say which" in done.err


def test_fused_steps_are_timed_by_fused_steps_alone(command: Command, pilot: Path, tmp_path: Path) -> None:
    done = command("plan", *CONVERGENCE, "--fused", "--budget", "1h", "--pilot", pilot)
    assert (done.code, "(2 of 6 configurations" in done.err) == (2, True)
    fused = write(tmp_path / "fused", [ended(trial) for trial in trials(fused=True)])
    assert planned(command, "--fused", "--budget", "1h", "--pilot", fused)["estimate"]["device_s"]


def test_a_pilot_fills_the_gpus_that_are_shared(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    done = command("plan", *CONVERGENCE, "--device", "cuda", "--preset", "cpu", "--share", "4", "--budget", "1h")
    said = done.err.replace("--recipes delayed_scaling ", "")
    assert (done.code, "--share 4 --data random --seeds 4 " in said) == (2, True)


def test_a_gpu_that_is_shared_has_as_many_trials(command, monkeypatch, started, tmp_path):
    gpus(monkeypatch, 2)
    for number, more in enumerate(((), ("--share", "3"))):
        asked = ("--device", "cuda", "--gpus", "0,1", "--underpowered", *more, "--out", tmp_path / str(number))
        assert command("run", *CONVERGENCE, *asked).code == 130
    alone, shared = (run.options["executor"].free for run in started)
    assert (len(set(alone)), len(alone), sorted(shared)) == (2, 2, sorted(3 * alone))


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--fused",),
        ("--batch", 4, "--accumulate", 2, "--learning-rate", 2e-3, "--warmup", 70, "--steps", 80),
        ("--weights", "bf16", "--states", "fp8"),
        ("--branch-at", 75),
        ("--bf16-from", 100),
        ("--device", "cuda", "--preset", "cpu", "--share", "3"),
    ],
    ids=str,
)
def test_without_records_the_pilot_to_run_is_said_and_running_it_is_enough(more, command, monkeypatch, tmp_path):
    gpus(monkeypatch, 1)
    done = command("plan", *CONVERGENCE, *more, "--budget", "1h", "--out", "my run")
    assert done.code == 2
    said = shlex.split(done.err.splitlines()[1])
    assert said[:3] == ["te-bench", "run", "convergence"]
    assert said[-2:] == ["--out", "my run-pilot"]
    assert done.err.splitlines()[-1].endswith("--pilot 'my run-pilot'")
    pilot = command("plan", *said[2:], "--json")
    found = json.loads(pilot.out)["trials"]
    records = [ended(Trial.from_json(_fields(trial))) for trial in found]
    write(tmp_path / "my run-pilot", records, chip="NVIDIA H200" if "cuda" in more else None)
    again = planned(command, *more, "--budget", "1h", "--out", "my run", "--pilot", "my run-pilot")
    assert again["estimate"]["device_s"]


def test_the_pilot_of_a_pool_is_the_beginning_of_its_run(command: Command, tmp_path: Path) -> None:
    settings = ("--preset", "cpu-pool", "--steps", "40", "--learning-rate", "0.002", "--warmup", "10")
    asked = (*CONVERGENCE, *settings, "--budget", "1h")
    done = command("plan", *asked, "--out", "my run")
    said = shlex.split(done.err.splitlines()[1])
    assert said[-3:] == ["--as-pilot", "--out", "my run"]
    assert done.err.splitlines()[-1].endswith("again with --out 'my run'")
    first = json.loads(command("plan", *said[2:], "--json").out)["trials"]
    write(tmp_path / "my run", [ended(Trial.from_json(_fields(trial))) for trial in first], pilot=True)
    again = planned(command, *settings, "--budget", "1h", "--out", "my run")
    assert {trial["id"] for trial in first} <= {trial["id"] for trial in again["trials"]}
    assert again["judgement"]["seeds"] > 3


def _fields(trial: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in trial.items() if key not in ("id", "name")}


def test_an_arm_that_no_record_times_is_named(command: Command, tmp_path: Path) -> None:
    some = write(tmp_path / "pilot", [ended(trial) for trial in trials() if trial.problem["arm"] != "recipe"])
    done = command("plan", *CONVERGENCE, "--budget", "1h", "--pilot", some)
    one = "training/tiny-recipe-b8-t64-V50304/flash/fp8/delayed_scaling/eager/s0"
    assert f"(1 of 4 configurations, such as {one})" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "1m", "--as-pilot"], "--budget 60 s: a pilot needs 3 seeds, which take about"),
        (["--budget", "10m", "--seeds", "7"], "--seeds 7 take about 14 min, and --budget is 10 min: give --seeds 4"),
        (["--pilot", "nowhere"], "nowhere holds no journal.jsonl: it is not the --out directory"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_what_a_budget_cannot_carry_is_told_and_nothing_written(command, pilot, tmp_path, verb, arguments, message):
    timings = [] if "--pilot" in arguments else ["--pilot", pilot]
    done = command(verb, *CONVERGENCE, *timings, *arguments)
    assert done.code == 2
    assert done.err.startswith(f"te-bench: {message}")
    assert not (tmp_path / "runs").exists()


def test_a_budget_too_small_names_the_least_that_concludes(command: Command, pilot: Path) -> None:
    asked = (*CONVERGENCE, "--pilot", pilot)
    for verb, told in (("plan", "no design concludes in --budget 60 s; the least takes about"), ("run", "")):
        done = command(verb, *asked, "--budget", "1m")
        assert (done.code, told in done.err) == (2, True)
    [seeds] = re.findall(r"--budget 60 s: a verdict needs (\d+) seeds, which take about", done.err)
    assert command("plan", *asked, "--seeds", seeds).code == 0
    assert command("plan", *asked, "--seeds", int(seeds) - 1).code == 2


@pytest.mark.parametrize(
    ("suite", "option", "message"),
    [
        ("stress", ["--budget", "1h"], "--budget: the suite stress has no time-budget trial; leave it out"),
        ("quick", ["--pilot", "x"], "--pilot: the suite quick gives no verdict to plan for; leave it out"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_other_suites_refuse_them(command: Command, verb: str, suite: str, option: list[str], message: str) -> None:
    done = command(verb, suite, "--device", "cpu", "--data", "random", *option)
    assert (done.code, done.err[: len(message) + 10]) == (2, f"te-bench: {message}")


def test_a_time_budget_is_seconds_as_before(command: Command) -> None:
    done = command("plan", "curves", "--device", "cpu", "--data", "random", "--budget", "2m", "--json")
    found = json.loads(done.out)
    assert {trial["problem"].get("budget_s") for trial in found["trials"]} == {120.0, None}
    assert set(found) == {"suite", "baseline", "trials"}


def test_a_plan_says_which_trials_a_time_budget_ends(command: Command) -> None:
    said = command("plan", "curves", "--device", "cpu", "--data", "random", "--budget", "2s", "--seeds", "1").out
    assert "2 trials train for 2 s each; the other 2 for 400 steps, however long\n" in said


def test_a_plan_says_what_the_largest_batch_takes_on_a_cpu(command: Command) -> None:
    said = " ".join(command("plan", "memory", "--device", "cpu").out.split())
    assert (
        "each trial tries some 20 batches of up to 2 GiB; for a small model on two cores that takes 0.5 to 3 min"
        in said
    )


def test_a_run_that_has_begun_keeps_its_seeds_whatever_its_own_records_say(command: Command, tmp_path: Path) -> None:
    """Its plan was fixed before its first step; but a run of another length is another run."""
    begun = [ended(trial) for trial in trials(3, None)]
    write(tmp_path / "out", begun, seeds=3, steps=150)
    assert planned(command, "--budget", "10h", "--out", tmp_path / "out")["judgement"]["seeds"] == 3
    journal = tmp_path / "out" / JOURNAL
    journal.with_name(PACKED).write_bytes(lzma.compress(journal.read_bytes()))
    journal.unlink()
    assert planned(command, "--budget", "10h", "--out", tmp_path / "out")["judgement"]["seeds"] == 3
    write(tmp_path / "other", [ended(trial) for trial in trials()], seeds=1)
    assert planned(command, "--budget", f"{seconds(7)}s", "--out", tmp_path / "other")["judgement"]["seeds"] == 7


def test_seeds_after_the_plan_are_told_not_to_count(command: Command, tmp_path: Path) -> None:
    """The verdict judges the first plan's seeds by its margin, and so does the forecast; another run begins elsewhere."""
    write(tmp_path / "out", [ended(trial) for trial in trials(3, None)], seeds=3, steps=150)
    for asked, changed in (
        (["--seeds", 4], "seeds 4 came"),
        (["--seeds", 2, "--margin", "0.02"], "margin 0.02 and seeds 2 came"),
    ):
        found = planned(command, *asked, "--out", tmp_path / "out")
        assert found["conclusion"]["seeds"] == 3
        said = " ".join(command("plan", *CONVERGENCE, *asked, "--out", tmp_path / "out").out.split())
        assert "What 3 seeds can conclude, margin 0.01 nat" in said
        assert f"{changed} after this run's first plan, which counts; to change it, give another --out" in said
    assert "What 4 seeds can conclude" in command("plan", *CONVERGENCE, "--seeds", 4, "--out", tmp_path / "new").out


def test_what_is_known_of_the_spread_is_used_and_else_said_to_be_assumed(command: Command, tmp_path: Path) -> None:
    flat = plainly(command("plan", *CONVERGENCE, "--seeds", "5", "--margin", "0.003").out)
    said = "What 5 seeds can conclude, margin 0.003 nat: spread of a pair's gap: sd 0.0015 nat, assumed: that of FP8"
    assert said in flat
    assert "5 seeds; planned with its 80 % upper bound, 0.0023" in flat
    power = (
        r"\(alpha 0\.05\): by its own test power \d+% at a true gap of 0; 80 % takes 11 seeds, or with 5 a margin of"
    )
    assert re.search(power, flat)
    assert "takes 7 seeds" not in flat  # by the estimate itself
    chance = "chance that a recipe and A/A are both called EQUIVALENT, where the true gap in nat is:"
    assert f"{chance} seeds runs CPU h 0 0.001 0.0015 3" in flat  # no loss of this training is known, and so no gap
    assert "take --seeds 22: the fewest with 80 % where the true gap is half the margin, 12 where it is 0" in flat
    assert re.search(
        r" 10 36 - 56% .* 12 42 - 83% .* 20 66 - 100% \d+% 7\d%", flat
    )  # at 0, and with 20 at half the margin
    assert "Holm" not in flat  # one recipe
    assert "time: not known until you run a pilot and give its folder by --pilot DIR" in flat
    for option, value in (("steps", 77), ("learning-rate", 2e-3), ("warmup", 5), ("accumulate", 2), ("batch", 9)):
        other = plainly(command("plan", *CONVERGENCE, "--seeds", "5", f"--{option}", value).out)
        assert "power: not known, because no record shows how far gaps of this training vary" in other
        assert "run the same with --as-pilot --out DIR, then plan with --pilot DIR" in other

    shared = {0: 0.004, 1: -0.004, 2: 0.002, 3: -0.002}
    own = {0: 0.0002, 1: 0.0002, 2: -0.0002, 3: -0.0002}
    gaps = {"control": lambda s: shared[s], "recipe": lambda s: shared[s] + own[s] + 0.1}
    before = [t for t in trials(4, None) if t.problem["arm"] in gaps]
    write(tmp_path / "old", [ended(t, gaps[str(t.problem["arm"])](t.seed)) for t in before], seeds=4)
    found = planned(command, "--seeds", "5", "--pilot", tmp_path / "old")["conclusion"]["spread"]
    assert found["pairs"] == 4
    assert found["correlation"] > 0.99
    assert found["sd"] == pytest.approx(0.00365, rel=0.01)
    text = plainly(command("plan", *CONVERGENCE, "--pilot", tmp_path / "old").out)
    assert "measured on 4 seeds, pair correlation 1.00" in text


def test_a_plan_whose_planted_fault_no_record_has_shown_says_so(command: Command, tmp_path: Path) -> None:
    """The verdict on thirty steps was void: a fault takes time to be seen."""
    told = "planted fault: no record shows how far it ends above bf16 in this training"
    for design in ("pairs", "pool"):
        for steps, unseen in ((30, True), (150, False)):
            asked = (*CONVERGENCE, "--design", design, "--steps", steps, "--seeds", 3)
            assert (told in plainly(command("plan", *asked).out)) == unseen
        assert told not in plainly(command("plan", *CONVERGENCE, "--design", design, "--steps", 30, "--as-pilot").out)
    part = ("--steps", 30, "--seeds", 3, "--only", "*-control-*,*-aa-*,*-recipe-*")
    assert told not in plainly(command("plan", *CONVERGENCE, *part).out)
    pilot = write(tmp_path / "pilot", [ended(trial) for trial in trials(3, 30, as_pilot=True)], seeds=3, pilot=True)
    assert told not in plainly(command("plan", *CONVERGENCE, "--steps", 30, "--pilot", pilot).out)


def test_the_trials_of_a_plan_stand_behind_what_it_says(command: Command) -> None:
    lines = command("plan", *CONVERGENCE, "--seeds", "5").out.splitlines()
    names = [trial.name for trial in trials(5, None)]
    assert [line.rpartition("  ")[2] for line in lines[-len(names) :]] == names
    assert lines[0].startswith(f"{len(names)} trials: Convergence")


def test_holm_s_hardest_step_is_said(command: Command, pilot: Path) -> None:
    several = ("--recipes", "delayed_scaling,rowwise_scaling,float8_block_scaling,float8_current_scaling")
    asked = ("--seeds", "8", "--pilot", pilot)
    text = plainly(command("plan", *CONVERGENCE[:-2], *several, *asked).out)
    assert "the hardest of 4 recipes (Holm, alpha 0.0125): by its own test power" in text
    assert "time: not known" in text  # rowwise and block scaling were not in the pilot
    minutes = f"{seconds(8) / 60:.3g}"
    assert f"time: about {minutes} CPU minutes" in plainly(command("plan", *CONVERGENCE, *asked).out)


def test_a_run_takes_the_seeds_of_its_budget(command, started, pilot, tmp_path):
    out = tmp_path / "out"
    done = command("run", *CONVERGENCE, "--budget", f"{seconds(6.5)}s", "--pilot", pilot, "--out", out)
    assert done.code == 130
    assert "What 6 seeds can conclude" in done.out
    [run] = started
    assert len(run.trials) == 6 * 4
    fixed = {"margin": 0.01, "alpha": 0.05, "seeds": 6, "steps": 150, "bf16_runs": 2, "fault_runs": 6}
    assert load(out).plans[0].judgement == fixed
    assert run.options["needless"](run.trials[0]) is None


@pytest.mark.usefixtures("started")
def test_a_run_says_what_its_seeds_can_conclude_before_it_begins(command: Command, tmp_path: Path) -> None:
    asked = ("--seeds", "3", "--margin", "0.003", "--underpowered", "--out", tmp_path / "out")
    done = command("run", *CONVERGENCE, *asked)
    assert done.code == 130
    assert done.out.startswith("What 3 seeds can conclude, margin 0.003 nat:\n")
    assert re.search(r"one recipe on its own \(alpha 0\.05\): by its own test power \d+%", done.out)
    quick = command("run", "quick", "--device", "cpu", "--out", tmp_path / "quick")
    assert "can conclude" not in quick.out


@pytest.mark.usefixtures("started")
def test_a_plan_without_power_is_refused_unless_it_is_asked_for(command: Command, tmp_path: Path) -> None:
    asked = ("run", *CONVERGENCE[:5], "--margin", "0.003", "--out", tmp_path / "out")
    refused = command(*asked)
    assert refused.code == 2
    said = plainly(refused.err)
    assert (
        "6 seeds would show both a recipe and A/A to be EQUIVALENT within 0.003 nat, at a true gap of 0, with a" in said
    )
    assert re.search(r"It takes --seeds \d+, or --margin 0\.0\d+, or gaps that vary by 0\.0\d+ \(sd\) or less", said)
    assert said.endswith("; te-bench run begins such a run only with --underpowered")
    planned = command("plan", *asked[1:])
    assert planned.code == 2
    assert "no plan to run: 6 seeds would show both a recipe and A/A to be EQUIVALENT" in plainly(planned.err)
    assert not (tmp_path / "out").exists()
    seeds, margin = re.findall(r"--seeds (\d+), or --margin ([0-9.]+)", said)[0]
    for number, more in enumerate((["--seeds", seeds], ["--margin", str(1.05 * float(margin))])):
        assert command(*asked[:-1], tmp_path / str(number), *more).code == 130
    assert command(*asked, "--underpowered").code == 130
    assert command(*asked).code == 130  # it has begun
    another = command(*asked, "--fused")  # the same bf16, and configurations that are new to it
    assert another.code == 2
    assert "te-bench run begins such a run only with --underpowered" in plainly(another.err)


@pytest.mark.parametrize("preset", ["cpu", "char", "gpt2-short"])
def test_the_presets_have_the_power_that_they_need_or_say_that_it_is_not_known(command: Command, preset: str) -> None:
    done = command("plan", "convergence", "--device", "cpu", "--data", "random", "--preset", preset, "--json")
    known = json.loads(done.out)["conclusion"]
    assert (known is None) == (preset == "char")
    assert known is None or known["hardest"]["power"] >= 0.8


@pytest.mark.parametrize("seeds", [6, 10, 12])  # the margin of 12 has figures that are not said
def test_the_margin_that_a_refused_plan_would_take_is_taken(command: Command, seeds: int) -> None:
    asked = ("plan", *CONVERGENCE[:5], "--seeds", seeds, "--margin")
    [margin] = re.findall(r"It takes --seeds \d+, or --margin ([0-9.]+), or", plainly(command(*asked, "0.001").err))
    assert command(*asked, margin).code == 0


def test_timings_that_tell_nothing_of_the_spread_say_why(command: Command, pilot: Path) -> None:
    said = plainly(command("plan", *CONVERGENCE, "--pilot", pilot).out)
    assert "--pilot gives no spread: its training is another: " in said
    assert "steps 40 there, 150 here" in said


def test_trials_on_two_gpus_each_cost_both_and_are_not_timed_by_those_on_one(command: Command, tmp_path: Path) -> None:
    """As the verdict counts them: two at a time on four GPUs."""
    over = {"parallel": "ddp", "gpus_per_trial": 2}
    asked = ("--device", "cuda", "--data", "random", "--preset", "gpt2", "--recipes", "delayed_scaling", "--seeds", 10)
    asked = (*asked, "--margin", 0.1, "--gpus", "0,1,2,3", "--parallel", "ddp", "--gpus-per-trial", 2)
    for settings in ({}, over):
        of: dict[str, Any] = {"device": "cuda", "preset": "gpt2", "as_pilot": True, **settings}
        records = [ended(trial) for trial in trials(3, None, **of)]
        pilot = write(tmp_path / str(len(settings)), records, chip="NVIDIA H200", pilot=True, seeds=3)
        known = command("plan", "convergence", *asked, "--pilot", pilot, "--json")
        told = json.loads(known.out)["estimate"]
        one_at_a_time = sum(10 * done.wall_s for done in records if not done.trial.seed) - 7 * records[3].wall_s
        took = (2 * one_at_a_time, one_at_a_time / 2) if settings else (None, None)
        assert (told["device_s"], told["elapsed_s"], told["at_once"]) == (*map(pytest.approx, took), 2)
    said = plainly(command("plan", "convergence", *asked, "--pilot", pilot).out)
    assert (
        f"about {2 * one_at_a_time / 3600:.3g} GPU hours, {duration(one_at_a_time / 2)} on 4 GPUs, 2 for each trial"
        in said
    )


# ---- a pool of bf16 runs

# Runs of GPT-2 vary by 0.0149 (sd, as the plan has it): a margin at which a pool of tens of rounds decides.
POOL = ("convergence", "--device", "cuda", "--data", "random", "--preset", "gpt2", "--design=pool", "--margin=0.0159")


def pool(*arguments: object, command: Command) -> tuple[int, str, str]:
    done = command("plan", *POOL, *arguments)
    return done.code, plainly(done.out), plainly(done.err)


def test_what_a_pilot_timed_is_known_and_the_rest_assumed(command: Command, tmp_path: Path) -> None:
    """207.5 s a bf16 run and 614.5 s one by current scaling, broken or not; of the six other recipes 190 s are estimated."""
    asked: dict[str, Any] = {"preset": "gpt2", "design": "pool", "recipes": None, "as_pilot": True}
    first = trials(seeds=None, steps=None, device="cuda", **asked)
    known = [
        one for one in first if one.recipe in (None, "float8_current_scaling") and one.problem["head"] == "chunked"
    ]
    write(tmp_path / "pilot", [ended(trial) for trial in known], chip="NVIDIA H200", pilot=True, pool=3, seeds=3)
    found = json.loads(command("plan", *POOL, "--pilot", tmp_path / "pilot", "--json").out)
    assert found["estimate"]["device_s"] == pytest.approx(12 * (3 * 207.5 + 614.5 + 6 * 190) + 3 * 614.5, rel=0.01)
    _, said, _ = pool("--pilot", tmp_path / "pilot", command=command)
    assert "(6 of 10 configurations estimated for an H200, by published records of like trials" in said


def test_a_part_of_a_plan_that_has_begun_has_the_power_of_the_plan(command, monkeypatch, started, tmp_path):
    """Seven recipes were planned: two that are run first are judged among seven."""
    gpus(monkeypatch, 1)
    out = ("--seeds", 21, "--out", tmp_path / "run")
    _, whole, _ = pool(*out, command=command)
    assert command("run", *POOL, *out).code == 130  # it has written its plan
    part = ("--only", "*-control-*,*-aa-*,*-recipe-*chunked*/delayed_scaling/*,*-recipe-*chunked*/rowwise_scaling/*")
    code, said, _ = pool(*out, *part, command=command)
    assert (code, "Holm over 7" in said, "one run of every recipe (2)" in said) == (0, True, True)
    assert "105 in all looks" in said  # none of the planted fault
    row = re.search(r" 21 213 [\d.]+ ([\d% ]+) \*", whole)
    assert row
    assert re.search(rf" 21 105 [\d.]+ {row[1]} \*", said)
    assert "Holm over 7" in pool("--seeds", 21, "--out", tmp_path / "other", *part, command=command)[1]  # as it will be


def test_the_presets_of_whole_trainings_follow_their_plan(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve seeds have 80 % power by the spread that is assumed, which is named with its source."""
    gpus(monkeypatch, 0)
    asked = ("plan", "convergence", "--device", "cuda", "--data", "random", "--preset")
    for preset in ("gpt2", "llama"):
        found = json.loads(command(*asked, preset, "--json").out)
        seeds = found["judgement"]["seeds"]
        assert found["judged_first"] == "delayed scaling E4M3, fused, FP8 head"
        assert found["conclusion"]["alone"]["power"] >= 0.8
        [planned] = [one for one in found["conclusion"]["options"] if one["rounds"] == seeds]
        both = found["conclusion"]["alone"]["power"] * found["conclusion"]["aa"]["power"]
        assert planned["power"][0] == pytest.approx(both)
        assert planned["power_of_others"][0] == pytest.approx(both * found["conclusion"]["hardest"]["power"])
        assert (planned["runs"], planned["seconds"]) == (seeds * 9 + 3, found["estimate"]["device_s"])
        assert len(found["trials"]) == seeds * 9 + 3
    for option, value in (("learning-rate", 6e-4), ("warmup", 100)):  # of the same time, and of another spread
        done = command(*asked, "gpt2", f"--{option}", value)
        assert (done.code, "power: not known" in plainly(done.out), "5.86 GPU hours" in done.out) == (0, True, True)
    said = plainly(command(*asked, "gpt2").out)
    assert (
        "sd 0.0027 nat, assumed: that of a gap to two bf16 runs, by GPT-2's 48 runs of twelve seeds in results/h200"
        in said
    )
    assert "judged first, delayed scaling E4M3, fused, FP8 head (alpha 0.05): by its own test power" in said
    assert "the hardest of the other 6 (Holm, alpha 0.00833), which pass only where it does: by its own test" in said
    # gaps of 0, a third and half of the margin, and of GPT-2's study
    assert (
        "(the last, 0.0035, is what published studies make likely): seeds runs GPU h 0 0.0017 0.0025 0.0035 | 0 0.0017 "
        in said
    )
    [row, others] = re.findall(r" 12 111 5\.86 ([\d% ]+) \| ([\d% ]+) \*", said)[0]
    shown, after = ([int(each.rstrip("%")) for each in of.split()] for of in (row, others))
    assert shown[0] > 90 > shown[2] > 50 > shown[3]
    assert (len(after), after == sorted(after, reverse=True)) == (4, True)
    assert all(other < first for other, first in zip(after, shown, strict=True))
    assert "warning: where the true gap is half the margin" not in said
    short = plainly(command(*asked, "gpt2", "--seeds", 10).out)
    assert "warning: where the true gap is half the margin, 0.0025 nat, 42% of such studies show it" in short
    assert "| 0" not in command(*asked, "gpt2", "--only", "*-control-*,*-aa-*,*/delayed_scaling_e4m3/*").out
    assert (
        "a pool of bf16 runs takes 29 times as many runs for the same interval: two runs of one seed correlate by 0.97"
        in said
    )
    assert "time: about 5.86 GPU hours (estimated for an H200, by published records of like trials" in said


def test_a_budget_of_a_gpu_s_training_needs_no_pilot_for_its_time(command, monkeypatch):
    """Nine runs of 190 s a seed of GPT-2 124M; of another model as many times as its FLOP; of shared GPUs not known."""
    gpus(monkeypatch, 0)
    asked = ("plan", "convergence", "--device", "cuda", "--data", "random", "--preset", "gpt2")
    assert json.loads(command(*asked, "--budget", "7h", "--json").out)["judgement"]["seeds"] == 14
    for design, fewest in (("pairs", "3 seeds, which take about 17"), ("pool", "3 rounds, which take about 19")):
        done = command(*asked, "--model", "gpt2-xl", "--design", design)
        said = plainly(done.out)
        assert (done.code, "power: not known" in said) == (0, True), said
        assert "estimated for an H200, by published records of like trials and the FLOP of a step" in said
        shared = command(*asked, "--share", 2, "--design", design)  # each slower, nobody knows by how much
        assert ("time: not known" in shared.out, "power: not known" in shared.out) == (True, False)
        done = command(*asked, "--share", 2, "--design", design, "--budget", "7h")
        assert (done.code, "no record says how long a seed takes" in done.err) == (2, True)
        done = command(*asked, "--model", "gpt2-xl", "--design", design, "--budget", "7h")
        assert (done.code, f"a verdict needs {fewest}" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("chip", "estimated"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA B200", False)],
)
def test_a_gpu_other_than_a_hopper_takes_a_pilot(chip, estimated, command, monkeypatch, tmp_path):
    """Whether it is in this machine, or in the records of a pilot that timed some of the configurations."""
    gpt2 = ("plan", "convergence", "--device", "cuda", "--data", "random", "--preset", "gpt2")
    control = trials(device="cuda", preset="gpt2", recipes=None, steps=2035)[0]
    write(tmp_path / "pilot", [ended(control)], chip=chip)
    for here, more in ((1, ()), (0, ("--pilot", tmp_path / "pilot"))):
        gpus(monkeypatch, here, name=chip)
        assert ("time: about" in command(*gpt2, *more).out) == estimated
        done = command(*gpt2, *more, "--budget", "9h")
        assert (done.code, "Run a pilot" in done.err) == ((0, False) if estimated else (2, True)), done.err


def test_what_a_budget_proposes_keeps_the_pilots_that_time_it(command, monkeypatch, pilot, tmp_path):
    """Two folders, of which the second has what the first lacks; on two cores the time that passes is said, too."""
    first = write(tmp_path / "a pilot", [ended(trial) for trial in trials()[:1]])
    monkeypatch.setattr(runner, "at_once", lambda trials, cores: 2)
    asked = ("--pilot", first, "--pilot", pilot, "--budget")
    found = [one for minutes in (4, 7) for one in planned(command, *asked, f"{minutes}min")["designs"]]
    assert {one["asked"] for one in found} == {False, True}  # a branch, and the whole training
    for one in found:
        words = shlex.split(one["command"])[2:]
        plan = json.loads(command("plan", *words, "--json").out)
        assert (plan["judgement"]["seeds"], len(plan["trials"])) == (one["rounds"], one["runs"])
        assert plan["estimate"]["elapsed_s"] == pytest.approx(one["seconds"] / 2)
    said = plainly(command("plan", *CONVERGENCE, *asked, "4min").out)
    assert "does not conclude within 4 min on 2 cores. These do" in said
    cost, elapsed = f"{found[0]['seconds'] / 60:.3g} CPU minutes", duration(found[0]["seconds"] / 2)
    assert f"runs, {cost}, {elapsed} on 2 cores, power" in said


def test_a_plan_by_a_pilot_of_pairs_says_which_design_takes_fewer_runs(command: Command, tmp_path: Path) -> None:
    """Alike where a seed moves both runs of a pair, and a pool where it moves neither; of a pilot no mean is told."""
    for number, (shared, own, cheaper) in enumerate(((0.01, 0.001, False), (0.0, 0.002, True))):
        draw, records = random.Random(number), []
        asked: dict[str, Any] = {"recipes": ("delayed_scaling", "float8_current_scaling"), "as_pilot": True}
        of_seed = {seed: shared * draw.gauss(0, 1) for seed in range(6)}
        for trial in trials(6, None, **asked):
            gap = {"recipe": 0.5, "broken": 2.0}.get(str(trial.problem["arm"]), 0.0)
            records.append(ended(trial, gap + of_seed[trial.seed] + own * draw.gauss(0, 1)))
        directory = write(tmp_path / str(number), records, pilot=True, seeds=6)
        recipes = ("--recipes", "delayed_scaling,float8_current_scaling")
        said = plainly(command("plan", *CONVERGENCE[:-2], *recipes, "--pilot", directory).out)
        assert "measured on 6 seeds, pair correlation" in said
        assert ("for the same interval: --design pool" in said) == cheaper, said
        assert "0.5" not in said.partition("planned with")[0]


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_pilot_of_pairs_too_short_to_tell_a_spread_is_refused(seeds: int, command: Command, tmp_path: Path) -> None:
    asked = (*CONVERGENCE, "--as-pilot", "--out", tmp_path / "out")
    for verb in ("plan", "run"):
        done = command(verb, *asked, "--seeds", seeds)
        told = f"--seeds {seeds}: a pilot of pairs takes 3 seeds, for fewer gaps hardly show how far they vary"
        assert (done.code, told in plainly(done.err)) == (2, True), done.err
    assert command("plan", *asked, "--seeds", 3).code == 0


@pytest.mark.parametrize("design", ["pairs", "pool"])
def test_a_pilot_that_is_made_longer_tells_its_spread_by_all_of_it(
    design: str, command: Command, tmp_path: Path
) -> None:
    """No mean of it was seen: nothing speaks against more seeds."""
    draw, fixed = random.Random(4), {"margin": 0.01, "alpha": 0.05, "steps": 150, "pilot": True}
    fixed |= {"pool": 2} if design == "pool" else {}
    asked: dict[str, Any] = {"steps": None, "as_pilot": True, "design": design}
    longer = trials(6, **asked)
    records = [ended(trial, 0.01 * draw.gauss(0, 1) + (trial.problem["arm"] == "broken")) for trial in longer]
    directory = write(tmp_path / "pilot", records, **fixed, seeds=6)
    known = command("plan", *CONVERGENCE, "--design", design, "--pilot", directory, "--seeds", 500).out
    [short] = load(directory).plans
    earlier = {"trials": short.trials[:12], "judgement": {**short.judgement, "seeds": 3}, "started_at": "2020-01-01"}
    with Store(directory) as store:
        store.add_plan(dataclasses.replace(short, **earlier))
    assert "measured" in known
    assert command("plan", *CONVERGENCE, "--design", design, "--pilot", directory, "--seeds", 500).out == known
    said = plainly(
        command("plan", *CONVERGENCE, "--design", design, "--as-pilot", "--seeds", 7, "--out", directory).out
    )
    assert "came after this run's first plan" not in said


def test_a_plan_of_one_recipe_is_refused_where_its_aa_would_leave_it_void(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A/A is held to one bf16 run and the recipe to two: nine seeds show the recipe in 90 % of studies, A/A in 76 %."""
    gpus(monkeypatch, 0)
    one = (
        "plan",
        "convergence",
        "--device",
        "cuda",
        "--data",
        "random",
        "--preset",
        "gpt2",
        "--recipes",
        "rowwise_scaling",
    )
    done = command(*one, "--seeds", 9)
    assert done.code == 2
    assert (
        "A/A, without which no verdict counts: by its own test power 76% at a true gap of 0; 80 % takes 10 seeds"
        in (plainly(done.out))
    )
    assert (
        "9 seeds would show both a recipe and A/A to be EQUIVALENT within 0.005 nat, at a true gap of 0, " in done.err
    )
    assert "with a power of 69% only" in done.err
    assert "It takes --seeds 10, or --margin 0.0054, or gaps that vary by 0.0028 (sd) or less, not 0.003" in done.err
    assert command(*one, "--seeds", 10).code == 0


@pytest.mark.parametrize(
    "design",
    [
        ("--preset", "gpt2", "--device", "cuda", "--data", "random", "--seeds", 9),
        ("--preset", "cpu-pool", "--device", "cpu", "--seeds", 4),
    ],
    ids=["pairs", "pool"],
)
def test_the_power_that_a_plan_is_refused_by_is_the_one_that_its_table_prints(command, monkeypatch, design):
    """Of a recipe and A/A together: each has 80 % in four rounds of the pool, and both have 74 %."""
    gpus(monkeypatch, 0)
    done = command("plan", "convergence", *design)
    [printed] = re.findall(r"^ +\d+ .*?(\d+)%.* \*$", done.out, re.M)
    [held] = re.findall(r"with a power of (\d+)% only", done.err)
    assert (done.code, held) == (2, printed)
    assert int(held) < 80
    [needed] = re.findall(r"It takes --seeds (\d+)", done.err)
    done = command("plan", "convergence", *design[:-1], needed)
    [printed] = re.findall(r"^ +\d+ .*?(\d+)%.* \*$", done.out, re.M)
    assert (done.code, int(printed) >= 80) == (0, True)


def test_gaps_of_a_small_margin_have_two_figures_and_one_round_is_no_rounds(command):
    pool = ("plan", "convergence", "--preset", "cpu-pool", "--device", "cpu")
    said = plainly(command(*pool, "--margin", "0.0001").out)
    assert "rounds runs CPU h 0 0.000033 0.00005 4 27" in said
    assert "half the margin, 0.00005 nat, 0% of such studies" in said
    done = command(*pool, "--seeds", 1)
    assert "The design: 1 round, each of one run" in done.out
    assert "1 round would show both" in done.err


def test_an_alpha_too_small_for_any_claim_is_refused_with_what_it_would_take(command):
    done = command("plan", *CONVERGENCE[:3], "--preset", "cpu", "--alpha", "0.00001")
    assert (done.code, "It takes a larger --alpha; " in done.err) == (2, True), done.err


def test_a_pool_of_one_recipe_is_refused_where_its_aa_would_leave_it_void(command, monkeypatch):
    """A/A is held to one bf16 run a round and the recipe to two: 17 rounds show the recipe in 83 %, A/A in 71 %."""
    gpus(monkeypatch, 0)
    one = ("--recipes", "rowwise_scaling")
    code, said, why = pool(*one, "--seeds", 17, command=command)
    assert (code, "chance that a recipe and A/A are both called EQUIVALENT" in said) == (2, True)
    [shown] = re.findall(
        r"17 rounds would show both a recipe and A/A to be EQUIVALENT .* with a power of (\d+)% only", why
    )
    assert int(shown) < 71
    [needed] = re.findall(r"It takes --seeds (\d+) ", why)
    assert pool(*one, "--seeds", needed, command=command)[0] == 0


@pytest.mark.usefixtures("started")
def test_a_part_that_begins_anew_with_other_code_is_judged_among_all_too(command: Command, tmp_path: Path) -> None:
    both = (*CONVERGENCE[:-1], "delayed_scaling,float8_current_scaling")
    planned = trials(seeds=6, steps=None, recipes=("delayed_scaling", "float8_current_scaling"))
    write(tmp_path / "run", [ended(one) for one in planned[:1]], seeds=6)  # of another environment
    part = ("--only", "*-control-*,*-aa-*,*-recipe-*/delayed_scaling/*")
    assert command("run", *both, *part, "--out", tmp_path / "run").code == 130
    assert [len(plan.trials) for plan in load(tmp_path / "run").plans] == [1, 6 * 5, 18]


@pytest.mark.usefixtures("started")
def test_a_part_of_pairs_that_have_begun_is_planned_as_it_will_be_judged(command: Command, tmp_path: Path) -> None:
    """Two recipes are planned: one that is run first is judged among two, and the part writes the whole plan."""
    both = (*CONVERGENCE[:-1], "delayed_scaling,float8_current_scaling")
    part = ("--only", "*-control-*,*-aa-*,*-recipe-*/delayed_scaling/*")
    assert command("run", *both, "--out", tmp_path / "run").code == 130
    for out in ("run", "other"):
        said = plainly(command("plan", *both, *part, "--out", tmp_path / out).out)
        assert "the hardest of 2 recipes (Holm, alpha 0.025)" in said
    for _ in range(2):  # the second goes on by the same plan
        assert command("run", *both, *part, "--out", tmp_path / "part").code == 130
    begun, parts = load(tmp_path / "run").plans, load(tmp_path / "part").plans
    assert [len(plan.trials) for plan in parts] == [6 * 5, 18, 18]
    assert parts[0].trials == begun[0].trials
    assert parts[0].asked == begun[0].asked
    said = plainly(
        command("verdict", tmp_path / "part").out
    )  # not the part's command, which would end and leave the rest
    assert (
        "30 of 30 trials to go. Go on: te-bench run convergence --recipes delayed_scaling,float8_current_scaling"
        in said
    )
    assert "--only" not in said
    assert "--device cpu --seeds 6 " in said
    one_seed = plainly(command("plan", *both, "--only", "*/s0", "--out", tmp_path / "run").out)
    assert re.search(r" 6 5 (-|[\d.]+) .* \*", one_seed), one_seed


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("began", "then"), [("pool", "pairs"), ("pairs", "pool")])
def test_a_run_that_began_by_one_design_does_not_go_on_by_the_other(began, then, command, tmp_path):
    """It would be judged by the first, of which its runs are no part; a pilot's runs may become either's."""
    asked = (*CONVERGENCE, "--seeds", 6)
    assert command("run", *asked, "--design", began, "--out", tmp_path / "run").code == 130
    done = command("run", *asked, "--design", then, "--out", tmp_path / "run")
    told = f"--design {then}: the first plan in {tmp_path / 'run'} has the design {began}, which counts; give --design"
    assert (done.code, told in plainly(done.err)) == (2, True), done.err
    pilot = ("--out", tmp_path / "pilot")
    assert command("run", *CONVERGENCE, "--as-pilot", "--design", began, *pilot).code == 130
    assert command("run", *asked, "--design", then, *pilot).code == 130


def test_a_design_that_cannot_conclude_is_refused_with_what_it_would_take(command, monkeypatch):
    gpus(monkeypatch, 0)
    code, said, why = pool("--budget", "7h", command=command)
    assert code == 2
    assert "The design: 12 rounds" in said  # the most that the budget holds
    assert (
        "12 rounds would show both a recipe and A/A to be EQUIVALENT within 0.0159 nat, at a true gap of 0, with" in why
    )
    takes = r"It takes --seeds (\d+) \([0-9.]+ GPU hours\), or --margin 0\.0\d+, or runs that vary by"
    [needed] = re.findall(takes, why)
    assert pool("--seeds", needed, command=command)[0] == 0
    assert pool("--budget", "20h", command=command)[0] == 0
    code, _, why = pool("--budget", "1h", command=command)
    assert (code, "--budget 60 min: a verdict needs 21 rounds, which take about 11.3 h" in why) == (2, True)
    code, _, why = pool("--budget", "1h", "--margin", "0.0001", command=command)
    assert (code, "holds no verdict, and by the planned spread no number of rounds would" in why) == (2, True)
    for only in ("*/bf16/*", "*recipe*"):  # a part of the plan
        assert pool("--seeds", 21, "--only", only, command=command)[0] == 0
    code, said, _ = pool("--as-pilot", command=command)
    assert (code, "The pilot: 3 rounds" in said) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--as-pilot", "--seeds", 1], "--seeds 1: so short a pilot leaves 1 of the 6 degrees of freedom that a"),
        (["--alpha", "1e-5"], "a pool's test of 7 recipes knows no critical values below 0.0007; give that or more"),
    ],
)
def test_a_plan_that_can_tell_nothing_at_all_is_refused(command, monkeypatch, arguments, message):
    gpus(monkeypatch, 0)
    code, _, why = pool(*arguments, command=command)
    assert (code, message in why) == (2, True), why


def test_a_pilot_that_failed_says_so(command: Command, tmp_path: Path) -> None:
    asked = {"preset": "cpu-pool", "recipes": ("delayed_scaling",), "as_pilot": True}
    records = [ended(trial, outcome="timeout", reason="stopped") for trial in trials(None, 40, **asked)]
    directory = write(tmp_path / "pilot", records, seeds=3, pool=2, pilot=True)
    said = command("plan", *CONVERGENCE, "--preset", "cpu-pool", "--steps", 40, "--pilot", directory).out
    assert "too few runs of each of its configurations have ended, or their losses do not vary" in plainly(said)


def test_a_pilot_tells_its_spread_and_hides_its_means(command: Command, tmp_path: Path) -> None:
    """Whatever is added to one recipe's losses, the plan is the same, word for word."""
    asked = {"preset": "cpu-pool", "recipes": ("delayed_scaling", "float8_current_scaling"), "as_pilot": True}
    planned, told = trials(None, None, **asked), []
    noise = {trial.id: 0.01 * random.Random(trial.id).gauss(0, 1) for trial in planned}
    for number, gap in enumerate((0.0, 0.7, -3.0)):
        moved = ("recipe", "float8_current_scaling")
        records = [ended(t, noise[t.id] + gap * ((t.problem["arm"], t.recipe) == moved)) for t in planned]
        kept = {"seeds": 3, "pool": 2, "pilot": True, "steps": 150}
        directory = write(tmp_path / str(number), records, **kept)
        where = ("--preset", "cpu-pool", "--pilot", directory, "--seeds", 8)
        done = command("plan", *CONVERGENCE[:-2], "--recipes", "delayed_scaling,float8_current_scaling", *where)
        told.append(done.out)
        assert "measured, 8 df; planned with" in plainly(done.out)
    assert told[0] == told[1] == told[2]
    squares = defaultdict(list)
    for trial in planned:
        if trial.problem["arm"] != "broken":
            squares[trial.cell].append(noise[trial.id])
    sd = math.sqrt(sum(statistics.variance(each) for each in squares.values()) / len(squares))
    assert f"spread of single runs: sd {sd:.2g} nat" in plainly(told[0])


def test_runs_that_the_plan_s_margin_made_needless_are_not_missing_at_a_tighter_one(command, tmp_path):
    """INCONCLUSIVE at 0.02, where the wider margin stopped the recipe after three of five rounds; and no run is lost."""
    draw, records = random.Random(5), []
    for trial in trials(5, None, preset="cpu-pool"):
        gap = {"broken": 2.0, "recipe": 0.018}.get(str(trial.problem["arm"]), 0.0)
        if trial.problem["arm"] == "recipe" and trial.seed >= 6:
            records.append(ended(trial, outcome="stopped", reason="EQUIVALENT"))
        else:
            wide = 0.005 if trial.problem["arm"] == "recipe" else 0.001
            records.append(ended(trial, gap + wide * draw.gauss(0, 1)))
    kept = {"margin": 0.1, "tighter": 0.02, "seeds": 5, "pool": 2, "steps": 150}
    directory = write(tmp_path / "run", records, **kept)
    assert command("verdict", directory).code == 0
    done = command("verdict", directory, "--margin", 0.02)
    assert (done.code, "rounds of the plan" in done.out) == (3, False), done.out


def test_a_plan_goes_on_where_its_pilot_ended(command: Command, started: list[Started], tmp_path: Path) -> None:
    asked = ("run", *CONVERGENCE, "--preset", "cpu-pool", "--out", tmp_path / "out")
    assert command(*asked, "--as-pilot").code == 130
    assert command(*asked, "--seeds", 6).code == 130
    pilot, whole = ({trial.id for trial in run.trials} for run in started)
    assert pilot < whole
    assert [plan.judgement.get("pilot") for plan in load(tmp_path / "out").plans] == [True, None]
    refused = command(*asked, "--seeds", 6, "--margin", 0.001)  # a run that has begun is not refused
    assert refused.code == 130


def branch_ended(trial: Trial) -> Record:
    """A branch, or the control with its trunk."""
    whole = ended(trial)
    at = int(str(trial.problem["branch_at"]))
    step_s, trunk_s = STEP_S[trial.recipe], 0.1 * at if trial.problem["arm"] == "control" else 0.0
    samples = {name: whole.samples[name][at:] for name in ("step", "loss", "time_s")}
    trunk = {"sha256": f"{trial.seed}", "trained": bool(trunk_s), "took_s": trunk_s}
    took = BESIDE_S + trunk_s + len(samples["step"]) * step_s
    return dataclasses.replace(whole, samples={**whole.samples, **samples}, work={"trunk": trunk}, wall_s=took)


def test_a_plan_of_branches_says_what_they_prove_and_counts_each_trunk_once(command: Command, tmp_path: Path) -> None:
    asked = ("--preset", "cpu", "--branch-at", "100")
    pilot = write(tmp_path / "pilot", [branch_ended(trial) for trial in trials(branch_at=20)])
    done = command("plan", *CONVERGENCE, *asked, "--pilot", pilot)
    said = plainly(done.out)
    scope = "FP8 in the last 33 % of training (from step 100 of 150) alone; it says nothing of FP8 before"
    assert f"the verdict is of {scope}" in said
    assert "6 trunks in bf16, one a seed" in said
    assert "power: not known" in said  # another preset's whole trainings tell nothing of it
    found = planned(command, *asked, "--pilot", pilot)
    a_seed, broken_s = 3 * BESIDE_S + 150 * 0.1 + 50 * (0.1 + 0.2), BESIDE_S + 50 * 0.3
    assert found["estimate"]["device_s"] == pytest.approx(6 * (a_seed + broken_s))
    assert found["judged"] == "FP8 in the last 33 % of training (from step 100 of 150)"
    budget_ = ("--budget", f"{7.1 * a_seed + 6 * broken_s}s", "--pilot", pilot)
    assert planned(command, *asked, *budget_)["judgement"]["seeds"] == 7
    few = command("plan", *CONVERGENCE, *asked, "--budget", f"{5 * (a_seed + broken_s)}s", "--pilot", pilot)
    assert (few.code, "a verdict needs 6 seeds" in plainly(few.err)) == (2, True)


def test_a_branch_without_its_trunk_ends_within_a_time_that_holds_the_trunk_too(command, tmp_path):
    """As the run does, which begins none that would have to train a trunk and end late."""
    out = write(tmp_path / "out", [branch_ended(trial) for trial in trials(branch_at=20)])
    asked = ("--preset", "cpu", "--steps", STEPS, "--branch-at", 20, "--seeds", 2, "--out", out, "--within")
    for within, told in ((7.9, "no trial that is left ends; the shortest takes 8 s"), (14, "2 of the 8 trials")):
        assert told in plainly(command("plan", *CONVERGENCE, *asked, f"{within}s").out)
    limit = budget.Limit("7s")
    limit.in_time({(one.trial.id, "env"): one for one in map(branch_ended, trials(branch_at=20))})
    limit.left = list(trials(2, branch_at=20))[4:]  # of the second seed, whose trunk is not there
    assert "the shortest takes 8 s" in str(limit.how_to_go_on("te-bench run x"))


def test_a_run_of_too_few_trunks_is_refused(command: Command, tmp_path: Path) -> None:
    asked = ("run", *CONVERGENCE, "--preset", "cpu", "--branch-at", "100", "--out", tmp_path / "out")
    done = command(*asked, "--seeds", "5")
    assert (done.code, plainly(done.err)) == (
        2,
        "te-bench: --seeds 5: a plan of branches takes 6 trunks, one a seed; give 6 or more",
    )
    for bad, why in ((0, "give 1 or more"), (150, "the training has 150 steps")):
        done = command(*asked, "--branch-at", bad)
        assert (done.code, why in plainly(done.err), len(done.err.splitlines())) == (2, True, 1)


def test_a_plan_of_branches_promises_nothing_of_fewer_trunks_than_a_verdict_takes(command: Command) -> None:
    asked = ("plan", *CONVERGENCE, "--preset", "cpu", "--branch-at", "75", "--seeds")
    enough, few = (plainly(command(*asked, seeds).out) for seeds in (6, 5))
    assert "power over 99% at a true gap of 0" in enough
    assert "80 % takes 6 seeds" in enough
    assert "(alpha 0.05): nothing: a verdict needs 6 seeds at least; 80 % takes 6" in few


def test_a_pilot_of_branches_tells_their_spread(command: Command, tmp_path: Path) -> None:
    asked = ("--preset", "cpu", "--branch-at", "100")
    shown = plainly(command("plan", *CONVERGENCE, *asked, "--as-pilot").out)
    assert "a pilot: it measures how far losses vary" in shown
    assert "take --seeds" not in shown
    draw = random.Random(3)
    records = []
    for trial in trials(seeds=None, steps=None, branch_at=100, as_pilot=True):
        gap = draw.gauss(0, 0.001) + (0.5 if trial.problem["arm"] == "broken" else 0.0)
        one = branch_ended(trial)
        records.append(dataclasses.replace(one, samples={**one.samples, "val_loss": [3.0 + gap]}))
    pilot = write(tmp_path / "pilot", records, pilot=True, seeds=6, steps=150)
    told = planned(command, *asked, "--pilot", pilot)["conclusion"]["spread"]
    assert (told["assumed"], told["pairs"]) == (None, 6)
    hidden = command("verdict", pilot)
    assert (hidden.code, "these runs are a pilot" in plainly(hidden.out)) == (4, True)


@pytest.mark.parametrize(
    "first", [None, ("rowwise_scaling",)], ids=["first judges one before the others", "judges none"]
)
def test_a_run_that_has_begun_is_planned_by_who_is_judged_first_in_its_first_plan(
    first, command, monkeypatch, tmp_path
):
    """Whoever the command that is given now would judge first."""
    gpus(monkeypatch, 1)
    given: dict[str, Any] = {"device": "cuda", "preset": "gpt2", "data": {"": "random"}}
    one = plan.resolve("convergence", Options(**given, recipes=first))
    control = [trial for trial in one.trials if trial.problem["arm"] == "control"]
    rest = [trial for trial in one.trials if trial not in control]
    body = {"id": "env", "identity": {"device": "cuda", "gpu": "NVIDIA H200"}, "details": {}}
    settings = {"suite": one.suite, "body": body, "judgement": one.judgement, "baseline": one.baseline}
    journals.write(tmp_path / "run", [], planned=[*control, *rest], **settings)
    asked = (
        "plan",
        "convergence",
        "--device",
        "cuda",
        "--data",
        "random",
        "--preset",
        "gpt2",
        "--out",
        tmp_path / "run",
    )
    more = ("--recipes", "rowwise_scaling") if first is None else ()
    found = json.loads(command(*asked, *more, "--json").out)
    assert found.get("judged_first") == (None if first else "delayed scaling E4M3, fused, FP8 head")
    assert found["conclusion"]["primary"] == (first is None)
    assert found["conclusion"]["recipes"] == 7
    assert "primary" not in command(*asked, *more).out
