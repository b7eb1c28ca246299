"""te-bench verdict on other people's logs, from the paths of a shell to the page for a colleague."""

import html.parser
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import run_logs as logs
from in_process import Command, Done

pytestmark = pytest.mark.usefixtures("drawn_once")
WRITERS: dict[str, Callable[[Path, float], Path]] = {
    "nanogpt": lambda folder, end: logs.nanogpt(folder / "train.log", end),
    "torchtitan": lambda folder, end: logs.torchtitan(folder / "console.txt", end),
    "megatron": lambda folder, end: logs.megatron(folder / "out.log", end),
    "huggingface": logs.huggingface,
    "wandb": logs.wandb_jsonl,
    "tensorboard": logs.tensorboard,
    "csv": lambda folder, end: logs.wandb_csv(folder / "history.csv", end),
}
GAPS = (0.001, 0.0012, 0.0009, 0.0011)


@pytest.fixture
def two(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def write(kind: str) -> tuple[Path, Path]:
        for seed, gap in enumerate(GAPS):
            for side, end in (("bf16", 3.0), ("fp8", 3.0 + gap)):
                WRITERS[kind](tmp_path / side / f"seed{seed}", end + seed * 0.0007)
        return tmp_path / "bf16", tmp_path / "fp8"

    return write


@pytest.mark.parametrize("kind", WRITERS)
def test_a_folder_a_side_ends_in_a_verdict(kind, two, command):
    bf16, fp8 = two(kind)
    done = command("verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.003")
    assert done.code == 0, done.err
    assert done.out.startswith("EQUIVALENT: ends within 0.003 nat of the baseline: gap +0.00")
    said = " ".join(done.out.split())
    assert "Runs 4 pairs" in said
    assert "Needed for 80 % power 3 pairs To show what the measured gap is 3 pairs Judged" in said
    assert "Judged: the last validation loss" in said
    assert "(0.035 %) above" in said
    assert "A verdict stands with 4 pairs. Planned anew, a study would take 3 to reach one in 80 % of cases" in said
    assert "the margin 0.003 takes" not in said


def test_every_path_up_to_the_next_option_belongs_to_its_side(two, command):
    bf16, fp8 = two("nanogpt")
    sides = [sorted(side.glob("seed*")) for side in (bf16, fp8)]
    done = command("verdict", "--baseline", *sides[0], f"--candidate={sides[1][0]}", *sides[1][1:], "--margin", "0.003")
    assert done.code == 0, done.err
    assert "4 pairs" in done.out


@pytest.mark.parametrize("more", [[], ["--paired"]])
def test_a_seed_without_a_partner_is_left_out_of_the_pairs_and_named(more, two, command, tmp_path):
    _, fp8 = two("nanogpt")
    (fp8 / "seed3" / "train.log").write_text("number of parameters: 10.65M\nCUDA out of memory\n")
    page = tmp_path / "x.html"
    done = command("verdict", "--baseline", "bf16", "--candidate", "fp8", "--margin", "0.003", "--html", page, *more)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "Runs 3 pairs" in said
    assert "fp8/seed3/train.log: no loss in it. A training that died before its first loss is missing here" in said
    assert (
        "Note: seed 3 of bf16 has no partner and is left out; --no-paired judges all runs. If a run of fp8 is missing "
        "because it diverged, the verdict is DIVERGED." in said
    )
    assert "not paired" not in said
    assert "3, left out" in page.read_text()
    done = command("verdict", "--baseline", "fp8", "--candidate", "bf16", "--margin", "0.003", *more)
    said = " ".join(done.out.split())
    assert "Note: seed 3 of bf16 has no partner and is left out; --no-paired judges all runs. " in said
    assert "is missing because it diverged" not in said


def test_a_candidate_that_diverged_counts_without_a_partner_too(two, command):
    bf16, fp8 = two("nanogpt")
    (bf16 / "seed3" / "train.log").unlink()
    log = fp8 / "seed3" / "train.log"
    log.write_text(re.sub(r"(step 100: .*val loss ).*", r"\1nan", log.read_text()))
    done = command("verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.003")
    assert (done.code, done.out.partition("\n")[0]) == (1, "DIVERGED: 1 of 4 runs, seed 3: the loss is nan at step 100")


def test_few_seeds_in_both_are_paired_on_request_alone(two, command):
    _, fp8 = two("nanogpt")
    for seed in (1, 2, 3):
        (fp8 / f"seed{seed}").rename(fp8 / f"seed{seed + 10}")
    done = command("verdict", "--baseline", "bf16", "--candidate", "fp8", "--margin", "0.02")
    said = " ".join(done.out.split())
    assert "the runs are not paired, because few seeds are in both: --paired pairs seed 0 alone." in said
    (fp8 / "seed0").rename(fp8 / "seed10")
    done = command("verdict", "--baseline", "bf16", "--candidate", "fp8", "--margin", "0.02")
    said = " ".join(done.out.split())
    none = "no name is in both: seeds 0, 1, 2, 3 of bf16 and seeds 10, 11, 12, 13 of fp8."
    assert f"the runs are not paired, because {none}" in said


def test_the_page_is_one_file_that_says_what_was_asked_and_what_came_out(two, command, tmp_path):
    bf16, fp8 = two("megatron")
    page = tmp_path / "for" / "you.html"
    done = command("verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.0011", "--html", page)
    assert done.code == 3
    assert f"page: {page}" in done.out
    content = page.read_text()
    headings = re.findall(r"<h[12]>(.*?)</h[12]>", content)
    assert headings == [
        "These runs do not show whether the candidate trains like the baseline.",
        "What was asked",
        "What came out",
        "What more certainty costs",
        "In numbers",
        "What to know",
    ]
    assert content.count("<figure") == 2
    assert "more pairs," in content
    assert not re.search(r'(?:src|href)="(?!data:|#)', content)
    html.parser.HTMLParser().feed(content)


def test_a_page_replaces_nothing_but_an_earlier_page(two, command, tmp_path):
    bf16, fp8 = two("csv")
    log = bf16 / "seed0" / "history.csv"
    before = log.read_bytes()
    asked = ["verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.003", "--html"]
    for page in (log, bf16):
        done = command(*asked, page)
        assert (done.code, f"--html {page} is there and is no page of te-bench" in done.err) == (2, True), done
    assert log.read_bytes() == before
    for _ in range(2):
        assert command(*asked, tmp_path / "page.html").code == 0


def test_a_candidate_that_diverged_has_a_page_without_a_gap(two, command, tmp_path):
    bf16, fp8 = two("nanogpt")
    log = fp8 / "seed2" / "train.log"
    log.write_text(re.sub(r"(step 100: .*val loss ).*", r"\1nan", log.read_text()))
    logs.written(fp8 / "seed3" / "train.log", "iter 0: loss nan, time 10.00ms, mfu 30.00%\n")  # before any validation
    page = tmp_path / "x.html"
    done = command("verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.003", "--html", page)
    said = "DIVERGED: 2 of 4 runs, seeds 3, 2: the loss is nan at step 0"
    assert (done.code, done.out.partition("\n")[0]) == (1, said)
    assert "The candidate diverged." in page.read_text()
    assert page.read_text().count("<figure") == 1
    assert "candidate, mean of 2" in page.read_text()
    assert "+nan" not in page.read_text()


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_for_any_verdict_are_told_how_many_it_takes(seeds, two, command, tmp_path):
    bf16, fp8 = two("torchtitan")
    sides = [[side / f"seed{seed}" / "console.txt" for seed in range(seeds)] for side in (bf16, fp8)]
    page = tmp_path / "x.html"
    asked = ["--margin", "0.003", "--html", page]
    done = command("verdict", "--baseline", *sides[0], "--candidate", *sides[1], *asked)
    assert done.code == 3, done.err
    said = " ".join(done.out.split())
    assert "p: " not in said
    assert "error rate" not in said
    assert said.startswith("INCONCLUSIVE: one run says" if seeds == 1 else "INCONCLUSIVE: 2 seeds do not show")
    assert "nat (0.03" in said
    assert "these runs do not show how sure that is" in said
    assert "A verdict takes 3 seeds a side, and is worth much with 8" in said
    assert "The margin 0.003 takes 15 to 794 runs a side, as runs vary by 0.0024 (sd, " in said
    assert "or 9 to 195 pairs of one seed and the same batches, as gaps vary by 0.002 (" in said
    assert "The margin 0.003 takes 15 to 794 runs a side" in page.read_text()


def test_the_page_and_the_metric_are_of_logs_alone(command: Command, tmp_path: Path) -> None:
    done = command("verdict", tmp_path, "--html", tmp_path / "x.html")
    assert done.code == 2
    assert "--metric, --html and --paired go with --baseline and --candidate" in done.err


def of_both(path: Path, kind: str) -> Path:
    """One CSV with four runs of both sides: W&B's panel, curves one below the other, or final losses."""
    runs = {
        f"{s}-seed{n}": logs.course(3 + n * 7e-4 + g * (s == "fp8"))
        for n, g in enumerate(GAPS)
        for s in ("bf16", "fp8")
    }
    if kind == "panel":
        head = ",".join(f'"{run} - val/loss","{run} - val/loss__MIN"' for run in runs)
        lines = [f"Step,{head}"]
        lines += [f"{s},{','.join(f'{r[n]},{r[n]}' for r in runs.values())}" for n, s in enumerate(logs.STEPS)]
    elif kind == "long":
        lines = [
            "step,val_loss,run",
            *(f"{s},{r[n]},{run}" for run, r in runs.items() for n, s in enumerate(logs.STEPS)),
        ]
    else:
        lines = ["run,val_loss", *(f"{run},{r[-1]}" for run, r in runs.items())]
    return logs.written(path, "\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", ["panel", "long", "finals"])
def test_one_table_of_both_sides_is_divided_by_the_names_of_its_runs(kind, command, tmp_path):
    of_both(tmp_path / "both.csv", kind)

    def asked(baseline: str, candidate: str) -> Done:
        return command("verdict", "--baseline", baseline, "--candidate", candidate, "--margin", "0.003")

    done = asked("both.csv:bf16-*", "both.csv:FP8*")
    assert done.code == 0, done.err
    assert "Runs 4 pairs" in " ".join(done.out.split())
    how = (
        "give each its own; of one table for both, its runs: --baseline 'both.csv:bf16-*' --candidate 'both.csv:fp8-*'"
    )
    same = asked("both.csv", "both.csv")
    assert (same.code, how in same.err) == (2, True), same.err
    shared = asked("both.csv:bf16-*", "both.csv:*")
    said = "hold the same file, byte for byte (both.csv:bf16-* and both.csv:*)"
    assert (shared.code, said in shared.err) == (2, True), shared.err
    none = asked("both.csv:bf16-*", "both.csv:fp4-*")
    said = (
        "both.csv:fp4-* matches none: its runs are bf16-seed0, fp8-seed0, bf16-seed1, fp8-seed1, bf16-seed2 and 3 more"
    )
    assert (none.code, said in none.err) == (2, True), none.err


def test_a_table_without_names_of_runs_has_none_to_choose(command, tmp_path):
    logs.written(tmp_path / "both.csv", "val_loss\n3.1\n3.2\n")
    done = command("verdict", "--baseline", "both.csv:bf16", "--candidate", "both.csv:fp8", "--margin", "0.003")
    assert (done.code, "both.csv:bf16 matches none: it names no runs" in done.err) == (2, True), done.err


def test_a_name_that_is_no_utf_8_is_shown_and_ends_nothing(two, command, tmp_path):
    bf16, fp8 = two("nanogpt")
    (bf16 / "seed0").rename(bf16 / "a\udcff\u202e")  # as Python has a byte 0xff
    done = command("verdict", "--baseline", bf16, "--candidate", fp8, "--margin", "0.2", "--html", tmp_path / "a.html")
    assert done.code == 0, done.err
    assert "a\ufffd\ufffd" in done.out
    assert "a\ufffd\ufffd" in (tmp_path / "a.html").read_text()
