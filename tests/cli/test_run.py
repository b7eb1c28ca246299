"""Real runs from plan to report."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import journals
import pytest
from driving import PLANTED, rows, te_bench
from in_process import Command

from te_bench.experiments import environment, runner
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Store, load


@pytest.mark.slow
def test_a_real_run_from_plan_to_report_and_the_rerun_that_does_nothing(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    only = "train_step/*-V50304/*"  # padded, in every precision
    arguments = ["quick", "--seeds", "1", "--device", "cpu", "--only", only, "--cache", cache]
    planned = json.loads(te_bench("plan", *arguments, "--json").stdout)["trials"]
    assert {trial["precision"] for trial in planned} == {"fp32", "bf16", "fp8"}
    done = te_bench("run", *arguments, "--out", out, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("PyTorch eager fp32", "te-bench FP8"):  # each result as it comes
        line = rf"^\[\d/{len(planned)}\] {name}.*: [\d.,]+ ms \([\d.]+ s(, \d+:\d\d left)?\)$"
        assert re.search(line, done.stderr, re.MULTILINE)
    written = rows(out)
    assert [row["trial"]["id"] for row in written] == [trial["id"] for trial in planned]
    assert {row["outcome"] for row in written} == {"ok"}
    for row in written:
        assert len(row["samples"]["latency_s"]) == 20
        assert len(row["samples"]["loss"]) == 30  # 10 burn-in, 20 timed
    report = out / "report"
    assert all((report / name).stat().st_size for name in ("index.html", "report.md", "records.csv"))
    assert list(report.rglob("*.svg"))
    assert re.search(rf"^trials of this command: {len(planned)} ok$", done.stdout, re.MULTILINE)
    said = " ".join(done.stdout.split())
    assert "by te-bench gate --baseline" in said
    assert (
        "1 seed a trial is too few: a gate needs 5, better 8. This command with --seeds 8 adds the missing ones."
        in said
    )

    again = te_bench("run", *arguments, "--out", out, timeout=300)
    assert again.returncode == 0
    assert f"{len(planned)} of {len(planned)} trials are already in {out}" in again.stdout
    assert rows(out) == written


@pytest.mark.slow
def test_the_layer_suite_runs_on_a_cpu_and_is_reported(tmp_path: Path) -> None:
    preloaded = PLANTED.with_name("te_bench_preloaded.py")
    only = "layer/*[nr]-f*/*[l8]/[fd]*[2d]*"  # plain in fp32, te_layer by delayed scaling: test_layer_timed.py has every one
    arguments = ["layer", "--device", "cpu", "--only", only, "--out", tmp_path / "out"]
    done = te_bench("run", *arguments, main=preloaded, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(tmp_path / "out")
    assert {row["outcome"] for row in written} == {"ok"}
    assert {row["trial"]["recipe"] for row in written} == {None, "delayed_scaling"}
    assert {len(row["samples"]["latency_s"]) for row in written} == {50}
    told = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "One transformer layer, fair" in told
    assert "(another mask)" in told


@pytest.mark.slow
def test_the_pieces_suite_runs_on_a_cpu_and_is_reported(tmp_path: Path) -> None:
    done = te_bench("run", "pieces", "--device", "cpu", "--model", "llama-tiny", "--out", tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(tmp_path / "out")
    assert {row["outcome"] for row in written} == {"ok"}
    assert {(row["trial"]["problem"]["kind"], row["trial"]["problem"]["n"]) for row in written} == {
        ("rmsnorm", 64),
        ("swiglu", 192),
    }
    assert len(re.findall(r": [\d.,]+ ms \([\d.]+ s", done.stderr)) == len(written)
    assert "Fastest norms and activations alone, of " in done.stdout
    told = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "Norms and activations alone" in told
    assert "| RMSNorm forward with the FP8 cast | 128 x 64 | PyTorch eager |" in told


@pytest.mark.slow
def test_branches_of_two_commands_go_on_from_one_trunk_in_the_run_s_folder(tmp_path: Path) -> None:
    """Which may be deleted: whoever needs it then trains it again, and says so."""
    of_it = ("--device", "cpu", "--preset", "cpu", "--steps", 20, "--branch-at", 10, "--data", "random", "--seeds", 1)
    asked = ("run", "convergence", *of_it, "--recipes", "float8_current_scaling", "--underpowered", "--out", tmp_path)
    done = te_bench(*asked, "--only", "*-control-*,*-aa-*")
    assert done.returncode == 0, done.stdout + done.stderr
    [kept] = (tmp_path / "trunks").glob("*/*/curve.json")
    shutil.rmtree(kept.parent)
    assert te_bench(*asked, "--only", "*-recipe-*").returncode == 0
    found = {row["trial"]["problem"]["arm"]: row for row in rows(tmp_path)}
    trunks = {arm: row["work"]["trunk"] for arm, row in found.items()}
    assert {arm: trunk["trained"] for arm, trunk in trunks.items()} == {"control": True, "aa": False, "recipe": True}
    assert len({trunk["sha256"] for trunk in trunks.values()}) == 1  # on a CPU
    assert kept.parent.name == found["control"]["trial"]["id"]
    assert {row["samples"]["trunk_loss"][-1] for row in found.values()} == {found["aa"]["samples"]["trunk_loss"][-1]}
    assert te_bench(*asked, "--only", "*-control-*", "--fresh").returncode == 0
    assert [row["work"]["trunk"]["trained"] for row in rows(tmp_path)] == [True]
    assert len(list((tmp_path / "trunks").glob("*.*/*/curve.json"))) == 1  # the earlier one, set aside


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("supported", "code"), [(0, 4), (1, 0)])
def test_a_run_of_which_nothing_is_supported_measured_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, supported: int, code: int
) -> None:
    """Which a CI job that waits for a measurement must see; a part that is not supported is an answer."""

    def run(trials: Sequence[Trial], store: Store, environment_id: str, **options: Any) -> list[Trial]:
        for number, trial in enumerate(trials):
            ok = journals.step_record(trial, 10.0, where=environment_id)
            refused = journals.record(trial, environment_id, "unsupported", reason="no FP8 here")
            if (trial.id, environment_id) not in store.journal.records:
                started = datetime.now(UTC).isoformat()
                store.add(dataclasses.replace(ok if number < supported else refused, started_at=started))
        return []

    monkeypatch.setattr(runner, "run", run)
    asked = ("run", "quick", "--device", "cpu", "--seeds", "1", "--only", "train_step/*", "--out", tmp_path / "run")
    for repeated in (False, True):  # the second time of what is on record
        done = command(*asked)
        assert ("on record from an earlier command: --retry repeats" in " ".join(done.out.split())) is repeated
        assert done.code == code, done.out + done.err
        assert ("Nothing was measured: no trial of this command is supported here." in done.out) is (supported == 0)
        assert "unsupported: train_step/" in done.out


@pytest.mark.usefixtures("undrawn")
def test_a_folder_for_models_is_written_to_before_the_first_trial(
    command: Command, started: list, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    asked = ("run", "quick", "--device", "cpu", "--seeds", "1", "--only", "train_step/*", "--out", tmp_path / "run")
    refused = command(*asked, "--checkpoints", tmp_path / "file" / "kept")
    assert (refused.code, started) == (2, [])
    assert "/file/kept: Not a directory; give a folder that te-bench can write to" in " ".join(refused.err.split())
    command(*asked, "--checkpoints", tmp_path / "new" / "kept")
    assert (list((tmp_path / "new").rglob("*")), len(started)) == ([tmp_path / "new" / "kept"], 1)


class Edited:
    """An executor of one place, beside which somebody edits te-bench's code while the second trial runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.free, self.running, self.begun = [None], list[Trial](), 0
        self.monkeypatch, self.where = monkeypatch, ""

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, trial: Trial, place: Any) -> None:
        self.running.append(trial)
        self.begun += 1

    def ended(self) -> Iterator[Record]:
        if self.begun == 2:
            self.monkeypatch.setattr(environment, "code_hash", lambda package=None: "edited")
        self.free.append(None)
        yield journals.step_record(self.running.pop(), 10.0, where=self.where)

    def kill(self) -> None:
        pass


@pytest.mark.usefixtures("undrawn")
def test_no_trial_begins_on_other_code_than_the_run_began_with(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process would import that code, and its record name the first."""
    executor, first = Edited(monkeypatch), environment.code_hash

    def supervisor(directory: Path, environment_id: str, *arguments: Any, **options: Any) -> Edited:
        executor.where = environment_id
        return executor

    monkeypatch.setattr(runner, "Supervisor", supervisor)
    asked = ("run", "quick", "--device", "cpu", "--seeds", "1", "--only", "train_step/*", "--out", tmp_path / "run")
    done = command(*asked)
    assert (done.code, executor.begun, len(load(tmp_path / "run").records)) == (2, 2, 2)
    assert "code has been changed since this run began, with 4 trials to go" in " ".join(done.err.split())
    monkeypatch.setattr(environment, "code_hash", first)  # with that code again
    assert (command(*asked).code, executor.begun, len(load(tmp_path / "run").records)) == (0, 6, 6)
