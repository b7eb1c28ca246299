"""te-bench submit: a run that lacks something is refused in a sentence each; a whole one is entered under results/."""

import dataclasses
import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import journals
import pytest
from in_process import Command

from te_bench.experiments import plan, run_options
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.store import JOURNAL, Plan, Store, load
from te_bench.reports.exchange.submission import against_the_suite
from te_bench.reports.page import published

pytestmark = pytest.mark.usefixtures("undrawn")

ASKED = {"model": "llama-tiny", "batch": 4}
TABLE = "| folder | command | measured |\n|---|---|---|\n"


@pytest.fixture(scope="module")
def suite() -> Experiment:
    options = Options(device="cuda", seeds=1, **ASKED)  # type: ignore[arg-type]
    return dataclasses.replace(plan.resolve("fp8", options), asked=run_options.words(options))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/ of an empty checkout, in which te-bench runs."""
    folder = tmp_path / "checkout" / "results"
    folder.mkdir(parents=True)
    (folder / "published.toml").write_text('# how\n\n[disagreements]\n"a b" = "chips"\n')
    (folder / "README.md").write_text(TABLE)
    monkeypatch.chdir(folder.parent)
    return folder


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, suite: Experiment) -> Write:
    """write("run", outcome="oom"): a run of the suite whose first record has these fields; with record=None it has none."""

    def make(name: str, experiment: Experiment = suite, body: Mapping[str, Any] | None = None, **first: Any) -> Path:
        with Store(tmp_path / name) as store:
            store.add_environment(journals.environment() | (body or {}))
            store.add_plan(Plan.of(experiment, "env-h200"))
            for place, trial in enumerate(experiment.trials):
                if place or "record" not in first:
                    record = journals.step_record(trial, 20 + place)
                    store.add(record if place else dataclasses.replace(record, **first))
        return tmp_path / name

    return make


def test_a_whole_run_is_entered_and_published(command: Command, results: Path, write: Write, suite: Experiment) -> None:
    run = write("speed.1")
    (results / "h200" / "taken").mkdir(parents=True)
    taken = command("submit", run, "--name", "taken")
    assert (taken.code, taken.out) == (2, "")
    assert "published already: choose another --name" in taken.err
    done = command("submit", run)
    assert (done.code, done.err) == (0, "")
    folder = results / "h200" / "speed.1"
    assert (folder / JOURNAL).read_bytes() == (run / JOURNAL).read_bytes()
    assert (folder / "report" / "index.html").is_file()
    assert "    git switch -c results-h200-speed.1\n" in done.out
    assert "    gh pr create --title 'Results: h200/speed.1' --body 'te-bench run fp8 --model llama-tiny" in done.out
    said = tomllib.loads((results / "published.toml").read_text())
    assert said["h200/speed.1"] == {"suite": "fp8", "options": ASKED}
    assert said["disagreements"] == {"a b": "chips"}
    today = plan.resolve("fp8", Options(device="cuda", **ASKED))  # type: ignore[arg-type]
    assert against_the_suite(load(folder), today) == ([], [])

    [entry] = published.runs(results)
    assert (entry.folder, entry.listed) == ("h200/speed.1", True)
    assert entry.command.startswith("`te-bench run fp8 --model llama-tiny --batch 4 ")
    assert "NVIDIA H200, 2026-11-20, clean tree of commit `0123456`" in entry.measured
    assert len(suite.trials) > 1
    assert published.gallery(results, ".").count("<tr data-model") == len(suite.trials)


def test_a_journal_that_is_published_is_refused_with_its_name_and_what_is_known_of_it(command, results, write):
    run = write("first", body=details(git_dirty=True))
    folder = results / "h200" / "speed"
    shutil.copytree(run, folder)
    listed = results / "published.toml"
    listed.write_text('["h200/speed"]\nsuite = "fp8"\nknown.dirty = "no git"\n\n[disagreements]\n')
    before = listed.read_text()
    number = len(load(run).records)
    for again, more in ((run, ()), (run, ("--name", "other")), (folder, ())):
        done = command("submit", again, *more)
        said = f"{again}: {number} of {number} records are published already, in h200/speed (known.dirty: no git)"
        assert (done.code, done.err) == (2, f"te-bench: {said}: submit a run with other records\n"), done
    assert listed.read_text() == before
    measured_again = {"started_at": "2026-11-21T00:00:00+00:00"}  # of the same configuration on the same machine
    part = write("part", outcome="oom", **measured_again)
    assert f"{number - 1} of {number} records are published already" in command("submit", part).err


def details(**changed: object) -> dict[str, Any]:
    return {"details": journals.environment()["details"] | changed}


ON_CPU = {"identity": journals.environment(gpu=None)["identity"]}


@pytest.mark.parametrize(
    ("first", "body", "said"),
    [
        ({}, details(git_dirty=True), ["is of commit 0123456 with uncommitted changes"]),
        ({}, details(git_commit=None), ["names no commit"]),
        ({}, ON_CPU, ["This run is of a CPU; only runs on a GPU are "]),
        ({}, details(git_dirty=True) | ON_CPU, ["This run is of a CPU; only"]),
        ({"outcome": "failed_check"}, {}, ["trials failed the check, train_step/llama-tiny"]),
        ({"outcome": "interrupted"}, {}, ["trials were interrupted, train_step/llama-tiny"]),
        ({"check": {}}, {}, ["trials ended ok and hold no check"]),
        (
            {"record": None},
            details(git_dirty=None),
            ["uncommitted", "planned trials have no record", "has no record of"],
        ),
    ],
)
def test_each_lack_is_a_sentence(command, results, write, first, body, said):
    done = command("submit", write("run", body=body, **first))
    assert (done.code, done.out) == (4, "")
    sentences = done.err.splitlines()
    assert len(sentences) == len(said), sentences
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True)), sentences
    assert sorted(path.name for path in results.iterdir()) == ["README.md", "published.toml"]


def test_a_damaged_journal_and_a_name_that_leaves_the_folder_are_refused(command, results, write):
    run = write("run")
    done = command("submit", run, "--name", "../gate")
    said = "te-bench: --name ../gate: give one folder's name of letters, digits, dots and dashes\n"
    assert (done.code, done.err) == (2, said)
    journal = run / JOURNAL
    journal.write_bytes(journal.read_bytes().replace(b'"schema":1', b'"schema":2', 1))
    done = command("submit", run)
    assert (done.code, done.out) == (2, "")
    assert "checksum mismatch" in done.err
    assert not (results / "h200").exists()


def test_what_was_left_out_takes_a_reason(command: Command, results: Path, write: Write, suite: Experiment) -> None:
    """A run of --only: its own plan is complete, the suite's is not."""
    run = write("part", dataclasses.replace(suite, trials=suite.trials[:1], asked=(*suite.asked, "--only", "*x*")))
    refused = command("submit", run)
    assert refused.code == 4
    assert refused.err.startswith(f"The suite fp8 has no record of {len(suite.trials) - 1} configurations, train_step")
    assert command("submit", run, "--missing", 'only the "first" 😀').code == 0
    said = tomllib.loads((results / "published.toml").read_text())["h200/part"]
    assert said == {"suite": "fp8", "options": ASKED, "known": {"missing": 'only the "first" 😀'}}


def test_a_run_in_which_nothing_worked_is_refused_and_what_crashed_takes_a_reason(
    command: Command, results: Path, write: Write, suite: Experiment
) -> None:
    one = dataclasses.replace(suite, trials=suite.trials[:1], asked=(*suite.asked, "--only", "*x*"))
    nothing = command("submit", write("nothing", one, outcome="crashed"), "--missing", "no compiler")
    assert (nothing.code, nothing.err) == (4, "None of 1 trials ended ok: there is nothing to publish.\n")
    for outcome in ("crashed", "timeout"):
        run = write(outcome, outcome=outcome)
        refused = command("submit", run)
        n, first = len(suite.trials), suite.trials[0].name
        said = f"1 of {n} trials crashed or ran out of time, {first} first: run them again, or give the reason"
        assert (refused.code, refused.err) == (4, f"{said} with --missing.\n")
    assert command("submit", run, "--missing", "a limit of 900 s").code == 0
    assert tomllib.loads((results / "published.toml").read_text())["h200/timeout"]["known"] == {
        "missing": "a limit of 900 s"
    }


@pytest.mark.parametrize("asked", [("--batch",), ("--batch", "abc"), ("--only",)])
def test_a_plan_that_nobody_asked_for_so_is_one_sentence_and_advice_is_refused(command, results, write, suite, asked):
    done = command("submit", write("odd", dataclasses.replace(suite, asked=asked)))
    assert done.code in (2, 4)
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err
    done = command("submit", write("advice", dataclasses.replace(suite, suite="advise", asked=asked)))
    assert (done.code, done.out, "holds advice" in done.err) == (2, "", True)


def test_elsewhere_it_names_the_command_for_a_clone(command: Command, write: Write, tmp_path: Path) -> None:
    run = write("run")
    done = command("submit", run.name)
    said = f"{tmp_path} is in no clone of te-bench: submit copies a run to results/ of one. Clone te-bench's repository"
    assert (done.code, done.err) == (2, f"te-bench: {said}, and there run te-bench submit {run}\n")
