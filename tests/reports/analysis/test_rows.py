import dataclasses
import json
import shutil
import zlib

import journals
import pytest
from journals import environment, record, step_record, trial, write

from te_bench.experiments.spec import OUTCOMES, canonical_json
from te_bench.experiments.store import JOURNAL, Store
from te_bench.reports.analysis.rows import differences, environment_labels, load_results, printable

LATER = "2026-11-20T13:00:00+00:00"


def test_planned_trial_without_record_has_not_run_yet(tmp_path):
    done, missing = trial(attention="flash"), trial(attention="math")
    [group] = load_results([write(tmp_path / "run", [step_record(done, 10)], planned=[missing])]).groups
    rows = {configuration.trial.attention: configuration.rows[0] for configuration in group.configurations}
    outcomes = {name: (row.outcome, row.reason) for name, row in rows.items()}
    assert outcomes == {"flash": ("ok", None), "math": ("not run yet", "rerun the same command to go on")}


def test_rows_are_the_plan_s_trials_in_its_environment(tmp_path):
    elsewhere = environment("env-b", gpu="NVIDIA B200")
    directory = write(tmp_path / "run", [step_record(trial(), 10)], suite="one")
    write(directory, [step_record(trial(), 5, where="env-b")], suite="two", body=elsewhere)
    results = load_results([directory])
    told = [("one", "env-h200", "NVIDIA H200"), ("two", "env-b", "NVIDIA B200")]
    assert [(g.suite, g.environment, g.gpu) for g in results.groups] == told
    assert [row.record.samples["latency_s"][0] > 0.007 for row in results.rows if row.record] == [True, False]


def test_subset_run_after_a_full_run_keeps_every_row_and_the_baseline(tmp_path):
    slow, fast, more = trial(attention="math"), trial(attention="flash"), trial(attention="flash", seed=1)
    full = [step_record(slow, 10), step_record(fast, 5)]
    directory = write(tmp_path / "run", full, title="first", baseline=slow.cell)
    write(directory, [step_record(more, 4)], planned=[fast], title="second")
    [group] = load_results([directory]).groups
    assert (group.title, group.baseline) == ("second", slow.cell)
    assert [[row.trial for row in one.rows] for one in group.configurations] == [[slow], [fast, more]]
    assert {row.outcome for configuration in group.configurations for row in configuration.rows} == {"ok"}
    write(directory, [], planned=[fast], baseline=fast.cell)
    [group] = load_results([directory]).groups
    assert group.baseline == fast.cell


def test_change_of_environment_keeps_both_groups_the_newest_first(tmp_path):
    kept, left = trial(attention="math"), trial(attention="flash")
    directory = write(tmp_path / "run", [step_record(kept, 10)], planned=[left], baseline=kept.cell)
    newer = environment("env-b", torch="2.13.0")
    write(directory, [], planned=[kept, left], body=newer)
    old, new = ("env-h200", [("math", "ok")]), ("env-b", [("math", "not run yet"), ("flash", "not run yet")])
    assert _ends(directory) == [new, old]
    write(directory, [], planned=[kept])  # back in the first: there it can go on
    assert _ends(directory) == [("env-h200", [("math", "ok"), ("flash", "not run yet")])]


def _ends(directory):
    """Environment of each group, with attention and outcome of its rows."""
    groups = load_results([directory]).groups
    rows = [[row for configuration in group.configurations for row in configuration.rows] for group in groups]
    ends = [[(row.trial.attention, row.outcome) for row in found] for found in rows]
    return list(zip([group.environment for group in groups], ends, strict=True))


def test_seeds_are_repetitions_of_one_cell(tmp_path):
    seeds = [trial(seed=seed) for seed in range(3)]
    records = [step_record(seeds[0], 10), record(seeds[1], outcome="oom", reason="out of memory")]
    [group] = load_results([write(tmp_path / "run", records, planned=seeds)]).groups
    [configuration] = group.configurations
    assert [row.outcome for row in configuration.rows] == ["ok", "oom", "not run yet"]
    assert (len(configuration.ok), configuration.outcome) == (1, "ok")


def test_runs_in_one_environment_merge_and_keep_their_names(tmp_path):
    first = write(tmp_path / "a" / "run", [step_record(trial(), 10)])
    second = write(tmp_path / "b" / "run", [dataclasses.replace(step_record(trial(), 12), started_at=LATER)])
    results = load_results([first, second, first])
    [group] = results.groups
    assert [row.run for row in group.configurations[0].rows] == ["run", "run (2)"]
    assert results.outcomes == {"ok": 2}


def test_measurement_in_two_runs_counts_once(tmp_path):
    slow, fast = trial(attention="math"), trial(attention="flash")
    first = write(tmp_path / "run", [step_record(slow, 10), step_record(fast, 5)])
    copy = shutil.copytree(first, tmp_path / "copy")
    assert load_results([first, copy]).rows == load_results([first]).rows
    write(copy, [dataclasses.replace(step_record(fast, 6), started_at=LATER)])  # measured again
    write(copy, [], planned=[slow], suite="other")  # measured once, asked for by two suites
    found = [(row.suite, row.run, row.trial.attention) for row in load_results([first, copy]).rows]
    first = [("nanogpt", "run", "math"), ("nanogpt", "run", "flash")]
    assert found == [*first, ("nanogpt", "copy", "flash"), ("other", "copy", "math")]


@pytest.mark.parametrize("names", [("kind", "body"), ("body", "kind")])
def test_journal_lines_without_a_head_are_read(tmp_path, names):
    directory = journals.everything(tmp_path / "run")
    expected = load_results([directory])
    lines = [json.loads(line) for line in (directory / JOURNAL).read_bytes().splitlines()]
    assert any("key" in line for line in lines)
    texts = [",".join(f'"{name}":{canonical_json(line[name])}' for name in names) + "}" for line in lines]
    texts = [f'{{"crc32":"{zlib.crc32(text.encode()):08x}",{text}\n' for text in texts]
    (directory / JOURNAL).write_text("".join(texts))
    assert load_results([directory]) == expected


def test_labels_name_what_differs(tmp_path):
    configurations = [
        trial(padded_vocab=50257),
        trial(),
        trial(precision="fp8", recipe="current", mode="compile"),
        trial(batch=64),
        trial("attention", "cudnn"),
        trial("attention", "cudnn", precision="fp16", length=2048),
        trial("training", "flash"),
        trial("training", "flash", data="stdlib"),
    ]
    [group] = load_results([write(tmp_path / "run", [], planned=configurations)]).groups
    assert [configuration.label for configuration in group.configurations] == [
        "PyTorch eager bf16, batch 12, vocabulary 50,257",
        "PyTorch eager bf16, batch 12, vocabulary padded to 50,304",
        "te-bench FP8, batch 12",
        "PyTorch eager bf16, batch 64",
        "cuDNN, bf16",
        "cuDNN, fp16",
        "PyTorch eager bf16",
        "PyTorch eager bf16",
    ]
    assert [one.shape for one in group.configurations[4:6]] == ["B12 H12 T1024 D64 causal", "B12 H12 T2048 D64 causal"]


def test_environments_are_told_apart_by_what_differs():
    bodies = {
        "a": environment("a", torch="2.11.0"),
        "b": environment("b", torch="2.13.0"),
        "c": environment("c", gpu=None, cpu="EPYC"),
        "d": environment("d", torch="2.13.0"),
        "e": {},
    }
    labels = environment_labels(bodies)
    assert labels["a"] == "NVIDIA H200, torch 2.11.0"
    assert labels["c"] == "EPYC"
    assert labels["e"] == "unknown machine"
    assert labels["b"].startswith("NVIDIA H200, torch 2.13.0")
    assert labels["b"] != labels["d"]


def test_what_older_records_do_not_say_of_a_machine_is_no_difference():
    old, new = {"torch": "2.11.0"}, {"torch": "2.11.0", "power_limit_w": 700.0, "kernels": {}}
    assert differences(old, new) == ()
    assert differences(new, new | {"power_limit_w": 350.0}) == ("power_limit_w: 700.0 -> 350.0",)


def test_every_key_of_an_environment_may_be_missing(tmp_path):
    bare = {"id": "bare", "identity": {"device": None}, "details": {"packages": None}}
    [group] = load_results([write(tmp_path / "run", [step_record(trial(), 10, where="bare")], body=bare)]).groups
    assert (group.where, group.gpu) == ("unknown machine", None)


def test_directory_without_journal_or_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match=JOURNAL):
        load_results([tmp_path])
    with Store(tmp_path) as store:
        store.add_environment(environment())
    with pytest.raises(ValueError, match="without a plan"):
        load_results([tmp_path])


def test_a_journal_whose_line_of_the_machine_was_deleted_is_refused(tmp_path):
    directory = write(tmp_path / "run", [step_record(trial(), 10)])
    lines = (directory / JOURNAL).read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"kind":"environment"' not in line]
    assert len(kept) == len(lines) - 1
    (directory / JOURNAL).write_bytes(b"".join(kept))
    with pytest.raises(ValueError, match="the line that names the machine of some records is missing from its journal"):
        load_results([directory])


def test_trials_planned_twice_count_once(tmp_path):
    directory = write(tmp_path / "run", [step_record(trial(), 10)])
    with Store(directory) as store:
        plan = store.journal.plans[-1]
        store.add_plan(dataclasses.replace(plan, trials=plan.trials * 2))
    assert len(load_results([directory]).rows) == 1


def test_what_cannot_be_shown_is_replaced():
    assert printable("a\tb\nc\x00d\u202ee") == "a b c\N{REPLACEMENT CHARACTER}d\N{REPLACEMENT CHARACTER}e"


def test_outcomes_are_counted(tmp_path):
    results = load_results([journals.everything(tmp_path / "run")])
    assert sum(results.outcomes.values()) == len(results.rows)
    assert set(results.outcomes) == {*OUTCOMES, "not run yet"}
