"""te-bench verdict of a convergence run and of a user's own losses."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from convergence_runs import JUDGEMENT, TRUTH, arm_trial, study_records, write_study
from in_process import Command, Done
from journals import record, step_record, trial, write

from te_bench.reports.group_result import load_report
from te_bench.reports.page.headlines import headlines

BF16 = [3.280, 3.281, 3.279, 3.282, 3.278, 3.2805]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    truth = {**TRUTH, "float8_block_scaling": 0.02, "float8_current_scaling": 0.0028}
    records = study_records(truth, sd=0.0002, outcomes={("rowwise_scaling", 2): "diverged"})
    return write_study(tmp_path / "run", records, JUDGEMENT)


@pytest.fixture
def judged(command: Command, tmp_path: Path) -> Callable[..., Done]:
    """judged("3.1\n3.2", "3.2\n3.1", "--paired"): the verdict on the second file against the first, by their text."""

    def of(baseline: str, candidate: str, *more: object, margin: object = 0.003) -> Done:
        for name, losses in (("a.csv", baseline), ("b.csv", candidate)):
            (tmp_path / name).write_text(losses)
        return command("verdict", "--baseline", "a.csv", "--candidate", "b.csv", "--margin", margin, *more)

    return of


def flat(text: str) -> str:
    return " ".join(text.split())


def test_exit_code_and_sentences_of_a_run_and_another_margin_is_exploration(command: Command, run: Path) -> None:
    done = command("verdict", run)
    assert done.code == 1, done.err
    assert done.out.startswith("EQUIVALENT: delayed scaling trains like bf16")
    assert "rowwise scaling: 1 of 5 runs, seed 2" in done.out
    assert "The error rate holds for gaps that are normal" in flat(done.out)
    assert max(map(len, done.out.splitlines())) <= 100
    other = command("verdict", run, "--margin", "0.03")
    assert "margin 0.03 was chosen after the plan, which says 0.003" in flat(other.out)


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_verdict_fits_the_terminal_and_breaks_no_word(command, run, columns: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = command("verdict", run)
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= columns
    assert max(len(line) for line in lines if "  " not in line.strip()) <= 100  # sentences stay readable
    assert "Configuration" in done.out
    assert ("delayed scaling, broken on purpose: frozen scale  " in done.out) == (columns == 160)


@pytest.mark.parametrize("runs", [1, 2])
def test_the_verdict_says_that_a_recipe_is_held_to_two_bf16_runs_where_it_is(command, tmp_path, runs: int) -> None:
    write_study(tmp_path / "run", study_records(sd=0.0003), {**JUDGEMENT, "bf16_runs": runs})
    said = "a recipe is compared with the mean of bf16's two runs of each seed, the control's and A/A's"
    assert (said in flat(command("verdict", tmp_path / "run").out)) == (runs == 2)


def test_the_verdict_says_who_is_judged_first_and_why_another_recipe_waits_for_it(command, tmp_path) -> None:
    truth = {**TRUTH, "float8_block_scaling": 0.02}
    plan = {**JUDGEMENT, "primary": arm_trial("float8_block_scaling", 0).cell}
    write_study(tmp_path / "run", study_records(truth, sd=0.0002), plan)
    out = flat(command("verdict", tmp_path / "run").out)
    assert re.search(  # and no number of their own seeds is asked for
        r"delayed scaling \(gap [^;()]+\); rowwise scaling \(gap [^;()]+\) are undecided; block scaling is judged first, "
        r"and the others pass only where it does\.",
        out,
    )
    assert "delayed scaling: would be EQUIVALENT, but only if block scaling, which is judged first, is too" in out
    assert "Note: block scaling is judged first, by itself; another recipe passes only where it does." in out
    assert "judged first" not in command("verdict", write_study(tmp_path / "plain", study_records(truth))).out


def test_a_pilot_without_recipes_tells_its_noise_and_no_verdict(command: Command, tmp_path: Path) -> None:
    pilot = write_study(tmp_path / "run", study_records({"control": 0.0, "aa": 0.0}, sd=0.0003))
    done = command("verdict", pilot)
    assert done.code == 4, done.err
    assert flat(done.out).startswith("No verdict: char, ")
    said = "has no recipe yet. bf16 against itself: EQUIVALENT, ends within 0.003 nat of the control: gap"
    assert said in flat(done.out)
    said = "bf16 against itself: INCONCLUSIVE, too few seeds to tell 0.0001 from nothing"
    assert said in flat(command("verdict", pilot, "--margin", "0.0001").out)
    assert command("verdict", write_study(tmp_path / "one", study_records({"control": 0.0}))).code == 2


def test_an_unfinished_run_says_how_to_go_on_and_one_of_another_suite_is_told(command: Command, tmp_path: Path) -> None:
    lost = {("aa", 4): "interrupted", ("broken", 4): "interrupted"}
    begun = [r for r in study_records(sd=0.0002, outcomes=lost) if r.trial.seed != 3]
    planned = [r.trial for r in study_records(sd=0.0002)]
    directory = write(tmp_path / "my run", begun, planned=planned, suite="convergence", judgement=JUDGEMENT)
    done = command("verdict", directory)
    assert done.code == 4
    said, goes_on, *_ = done.out.splitlines()
    assert said == "Unfinished: 7 of 25 trials to go."
    assert goes_on.startswith("Go on: te-bench run convergence --device cuda --seeds 5")
    assert Path(re.findall(r"--out '(.*)'$", goes_on)[0]).resolve() == directory
    assert "not finished" in done.out
    assert "(not run yet)" not in done.out
    assert "interrupted" in done.out
    assert headlines(load_report([directory]))[0].startswith("Unfinished: 7 of 25 trials to go.")
    write(tmp_path / "a run", [record(arm_trial("control", 0), outcome="oom")], suite="nanogpt")
    done = command("verdict", "a run")
    said = "no bf16 control and recipe to compare: te-bench run convergence --out 'a run'"
    assert (done.code, said in done.err) == (2, True), done.err
    done = command("verdict", write(tmp_path / "demo", [step_record(trial(), 10.0)], suite="demo"))
    said = "demo holds no convergence run: te-bench run convergence, then te-bench verdict runs/convergence\n"
    assert (done.code, done.err.endswith(said)) == (2, True), done.err


@pytest.mark.parametrize(
    ("losses", "more", "code", "word"),
    [
        ([3.281, 3.280, 3.279, 3.282, 3.278, 3.2805], [], 0, "EQUIVALENT"),
        ([3.330, 3.331, 3.329, 3.332, 3.328, 3.3305], [], 1, "INFERIOR"),
        ([3.290, 3.270, 3.285, 3.262, 3.301, 3.2805], [], 3, "INCONCLUSIVE"),
        ([3.2801, 3.2809, 3.2792, 3.2821, 3.2779, 3.2806], ["--paired"], 0, "EQUIVALENT"),
    ],
)
def test_a_user_s_own_losses(judged, losses, more, code, word):
    done = judged(*("val_loss\n" + "\n".join(map(str, arm)) for arm in (BF16, losses)), *more)
    assert done.code == code, done.err
    assert done.out.startswith(f"{word}: ")


def curves(loss: Callable[[int, int], float]) -> str:
    rows = [f"{step},{loss(step, seed)},{seed}" for seed in range(4) for step in range(0, 1001, 200)]
    return "step,loss,seed\n" + "\n".join(rows)


def test_curves_whose_gap_still_opens_and_a_baseline_that_overfits_carry_no_verdict(judged) -> None:
    def falling(step: int, seed: int, opening: float = 0.0) -> float:
        return 4 - step / 1000 + seed / 10 + opening * (step - 1000) / 1000

    a = curves(falling)
    done = judged(a, curves(lambda step, seed: falling(step, seed) + seed * 1e-4), "--paired")
    assert done.code == 0, done.err
    assert done.out.startswith("EQUIVALENT: ")
    assert "Note: " in done.out
    assert "the loss still falls, by 0.2 over the last 200 steps" in flat(done.out)
    done = judged(a, curves(lambda step, seed: falling(step, seed, 0.02) + seed * 1e-4), "--paired")
    assert done.code == 3
    assert done.out.startswith("INCONCLUSIVE: the gap still moves: by +0.004 over the last 200 steps")
    assert "More seeds alone do not help: the gap still moves" in done.out
    turned = [curves(lambda step, seed, by=by: 3 + abs(step - 500) / 1000 + seed * (0.1 + by)) for by in (0, 1e-4)]
    done = judged(*turned, "--paired")
    assert (done.code, "the baseline overfits: its loss ends" in done.out) == (3, True), done.err


@pytest.mark.parametrize(
    ("level", "margin", "said"),
    [
        (
            2.31,
            5,
            "--margin 5 is 220 % of the loss 2.31. A margin is in nat, not in per cent: 5 % of this loss is 0.12 nat",
        ),
        (
            2.31,
            0.25,
            "--margin 0.25 is 11 % of the loss 2.31. A margin is in nat, not in per cent: 0.25 % of this loss is",
        ),
        (2.31, 0.23, None),
        (0.02, 0.003, None),  # small, however low the loss
        (0.02, 0.02, "--margin 0.02 is 100 % of the loss 0.02"),
        (0.0001, 0.003, "--margin 0.003 is 3000 % of the loss 0.0001"),
        (-0.02, 0.05, None),  # of densities, whose losses have no zero to be a share of
    ],
)
def test_a_margin_that_any_candidate_would_meet_is_refused(
    judged, level: float, margin: float, said: str | None
) -> None:
    a, b = (
        "val_loss\n" + "\n".join(f"{level * (1 + n * 1e-4 + off * 1e-5):.12f}" for n in range(5)) + "\n"
        for off in (0, 1)
    )
    done = judged(a, b, margin=margin)
    assert (done.code, said is None or said in done.err) == (0 if said is None else 2, True), done.err
    if said is None:
        assert done.out.startswith(f"EQUIVALENT: ends within {margin:g} nat of the baseline")


def test_what_certainty_costs_is_said_without_contradiction(judged) -> None:
    """Decided with fewer pairs than a plan would take, and too few to begin with at a margin that few would do for."""
    gaps = (-0.0012, 0.0031, 0.0005, -0.0018, 0.0016, 0.0004)
    a, b = ("\n".join(f"{x + on * gap:.4f}" for x, gap in zip(BF16, gaps, strict=True)) + "\n" for on in (0, 1))
    said = flat(judged(a, b, "--paired", margin=0.0033).out)
    assert said.startswith("EQUIVALENT")
    assert "A verdict stands with 6 pairs. Planned anew, a study would take 8 to reach one in 80 % of cases" in said
    assert "takes 8" not in said
    few = flat(judged("3.28\n3.281\n", "3.29\n3.292\n", margin=0.03).out)
    assert "The margin 0.03 takes 3 to 11 runs a side" in few
    tiny = flat(judged("3.28\n3.281\n", "3.29\n3.292\n", margin=1e-9).out)
    assert "The margin 1e-09 takes more than" in tiny


def test_a_candidate_that_ends_below_by_more_than_the_margin_is_said_to(judged) -> None:
    losses = [["\n".join(f"{x + off + n * 1e-4:.4f}" for n, x in enumerate(BF16)) + "\n"] for off in (0.0, -0.02)]
    done = judged(losses[0][0], losses[1][0])
    said = "NON_INFERIOR: ends less than 0.003 nat above the baseline, and it ends further below than the margin"
    assert flat(done.out).startswith(said)
    done = judged(losses[0][0], losses[1][0], margin=0.02)
    assert "and perhaps further than that below it" in done.out


def test_large_shares_and_whole_steps_are_written_out(judged) -> None:
    wide = "\n".join(f"{x}" for x in (1.0, 9.0, 2.0, 7.5)), "\n".join(f"{x}" for x in (21.0, 12.0, 25.0, 19.5))
    said = flat(judged(f"{wide[0]}\n", f"{wide[1]}\n", margin=0.4).out)
    assert re.search(r"nat \(\d{3} %\) above", said)
    assert "e+0" not in said
    a, b = (
        "step,loss,seed\n"
        + "".join(f"{s},{4 - s / 100 + seed * (1 + off) / 10},{seed}\n" for seed in range(3) for s in range(50))
        for off in (0, 1e-3)
    )
    assert "over the last 5 steps" in flat(judged(a, b).out)


def test_one_run_far_off_is_told_and_sizes_beyond_reason_are_readable(judged) -> None:
    done = judged("3.280\n3.281\n3.279\n3.282\n", "3.280\n3.281\n1e30\n3.282\n", "--paired")
    assert (done.code, done.err) == (3, "")
    assert "row 3 ends 1e+30 above the median of its runs; write nan if it diverged" in flat(done.out)
    assert "+2.5e+29" in done.out
    assert max(map(len, done.out.splitlines()[2:16])) < 100


def test_final_losses_alone_say_what_they_cannot_tell(judged) -> None:
    one_sided = curves(lambda step, seed: 3.28 + seed / 1e4)  # one arm's curves are none of the gap
    done = judged("3.280\n3.281\n3.279\n", one_sided, margin=0.05)
    assert done.code == 0, done.err
    assert "Note: a configuration has no curves" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give the --out directory"),
        ("--baseline a.csv", "give the --out directory"),
        ("--baseline a.csv --candidate b.csv", "--margin: state the largest gap"),
        ("--baseline a.csv --candidate b.csv --margin 0", "margin 0.0"),
        ("--baseline a.csv --candidate b.csv --margin 0.003 --alpha 0.7", "alpha 0.7"),
        ("--baseline nan.csv --candidate b.csv --margin 0.003", "nan.csv: the baseline itself diverged, row 2"),
        ("--baseline none.csv --candidate b.csv --margin 0.003", "none.csv"),
        ("run --baseline a.csv --candidate b.csv", "not both"),
        ("empty", "journal.jsonl"),
        (
            "a.csv b.csv",
            "a.csv is no te-bench run, whose folder holds journal.jsonl: give other trainers' logs by side",
        ),
        ("nowhere", "nowhere holds no journal.jsonl"),
    ],
)
def test_bad_input_is_told(command: Command, tmp_path: Path, arguments: str, message: str) -> None:
    for name, losses in {"a": "1 2 3", "b": "1 2 4", "nan": "1 nan 2"}.items():
        (tmp_path / f"{name}.csv").write_text(losses.replace(" ", "\n") + "\n")
    (tmp_path / "empty").mkdir()
    done = command("verdict", *arguments.split())
    assert (done.code, message in done.err, "Traceback" in done.err) == (2, True, False), done


@pytest.mark.parametrize(("size", "code"), [("1e99", 2), ("1e-90", 3), ("1e-300", 3)])
def test_sizes_that_no_loss_has_give_no_verdict_and_no_traceback(judged, size: str, code: int) -> None:
    a, b = ("".join(f"{n}{size[1:]}\n" for n in order) for order in ((1, 2, 3, 5), (2, 1, 5, 3)))
    done = judged(a, b, margin=size if code == 3 else 0.003)
    assert (done.code, "Traceback" in done.err) == (code, False), done.err


def test_what_files_hold_moves_no_cursor(judged, command: Command) -> None:
    hostile = "name,loss\n" + "".join(f"\x1b[31m\x1b]0;x\x07{n % 2},{8 + n / 7}\n" for n in range(4))
    for more in ((), ("--paired",)):
        done = judged(f"{hostile}x,3.8\n", f"{hostile}x,3.9\n", *more)
        assert "mixes 3 labels" in done.out
        assert not re.search("[\x1b\x07]", done.out + done.err)
    wrong = command("verdict", "--baseline", "\x1b[31mno.csv", "--candidate", "b.csv", "--margin", "1")
    assert (wrong.code, "\x1b" in wrong.err) == (2, False)
