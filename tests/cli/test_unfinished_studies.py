"""A study's interim answer: no page, table, figure or answer has it until the plan is done, or the study is given up."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from convergence_runs import JUDGEMENT, TRUTH, pool_records, study_records, write_study
from in_process import Command
from journals import environment, only_group, write

from te_bench.reports.page import published, tables

APART = {**TRUTH, "aa": 0.011, "delayed_scaling": 0.007, "rowwise_scaling": -0.013, "broken": 0.09}
PLANNED = range(8)


def begun(directory: Path, truth: Mapping[str, float], seeds: int = 5, **changes: Any) -> Path:
    """A study of eight seeds, of which so many have ended."""
    every, judgement = study_records(truth, PLANNED, sd=0.0004), {**JUDGEMENT, "seeds": len(PLANNED), **changes}
    done = [one for one in every if one.trial.seed < seeds]
    planned = [one.trial for one in every]
    return write(directory, done, planned=planned, suite="convergence", title="Convergence", judgement=judgement)


def told(command: Command, run: Path, results: Path) -> dict[str, bytes]:
    """All that te-bench says of a run: its report's files, its verdict, its answers, and its entry in the gallery."""
    assert command("report", run).code == 0
    found = {str(path.relative_to(run)): path.read_bytes() for path in (run / "report").rglob("*") if path.is_file()}
    asked = {"verdict": ("verdict", run), "margin": ("verdict", run, "--margin", "0.02"), "show": ("show", run)}
    asked |= {f"show {question}": ("show", run, question) for question in ("verdict", "fastest", "error")}
    found |= {name: command(*words).out.encode() for name, words in asked.items()}
    found["gallery"] = published.gallery(results, ".").encode()
    return found


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of published results whose one run is h200/study, and the place to call te-bench from."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "README.md").write_text("| `h200/study` | `te-bench run convergence` | an H200 |\n")
    (folder / "published.toml").write_text('["h200/study"]\nsuite = "convergence"\n')
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(("pool", "figures"), [(None, "undrawn"), (3, "drawn_once")])
def test_nothing_that_is_said_of_an_unfinished_study_depends_on_its_gaps(
    command, results, tmp_path, request, pool, figures
) -> None:
    """Whatever a recipe, A/A and the fault end above bf16, every byte is the same; a figure's, too, of a pool."""
    request.getfixturevalue(figures)
    said = []
    for number, truth in enumerate((TRUTH, APART)):
        run = results / "h200" / "study"
        if pool is None:
            begun(run, truth)
        else:  # before the first look, which comes after three of eight rounds
            every = pool_records(truth, 8, pool, sd=0.0004)
            done = [one for one in every if one.trial.seed < 2 * pool]
            plan = {**JUDGEMENT, "seeds": 8, "pool": pool}
            write(run, done, planned=[r.trial for r in every], suite="convergence", title="Study", judgement=plan)
        said.append(told(command, run, results))
        run.rename(tmp_path / f"kept{number}")
    assert said[0].keys() == said[1].keys()
    assert [name for name, what in said[0].items() if what != said[1][name]] == []
    report = said[0]["report/report.md"].decode()
    assert "hidden ± 0.00" in report
    assert "hidden, so that nobody stops or changes the study by an interim answer" in report
    assert not any("verdict_gap" in name or "verdict_forest" in name for name in said[0])


@pytest.mark.usefixtures("undrawn")
def test_what_is_done_is_shown(command: Command, results: Path) -> None:
    said = told(command, begun(results / "h200" / "study", APART, seeds=8), results)
    assert b"hidden" not in said["report/report.md"]
    assert {"report/figures/verdict_gap.svg", "report/figures/verdict_forest.svg"} <= said.keys()
    assert b"3.28" in said["gallery"]
    assert b"+0.00" in said["show"]


@pytest.mark.usefixtures("undrawn")
def test_a_look_that_decides_shows_what_it_decided_and_nothing_else(command: Command, tmp_path: Path) -> None:
    truth = {
        **TRUTH,
        "delayed_scaling": 0.02,
        "rowwise_scaling": 0.0028,
    }  # one INFERIOR at once, one for long not known
    every = pool_records(truth, 8, 3, sd=0.001)
    done, plan = [one for one in every if one.trial.seed < 9], {**JUDGEMENT, "seeds": 8, "pool": 3}
    run = write(tmp_path / "run", done, planned=[r.trial for r in every], suite="convergence", judgement=plan)
    assert command("report", run).code == 0
    curves = (run / "report" / "report.md").read_text().partition("## Loss curves")[2].partition("## Conf")[0]
    rows = {line.split(" | ")[0]: line for line in curves.splitlines()}
    lines = command("verdict", run).out.splitlines()
    [inferior], [hidden] = (
        [line for line in lines if line.startswith(f"{name} scaling  ")] for name in ("delayed", "rowwise")
    )
    assert "INFERIOR" in inferior
    assert "+0.0" in inferior
    assert "+0.0" not in hidden
    assert "| 3.3003 ± 0.0004 | +0.0201 |" in rows["| delayed scaling"]
    assert "hidden ±" in rows["| rowwise scaling"]


def test_a_wider_margin_shows_nothing_that_the_plan_has_not_decided(command: Command, tmp_path: Path) -> None:
    """After five of ten rounds A/A is not decided: no margin shows its gap either."""
    every = pool_records({**TRUTH, "aa": 0.002}, 10, 2, sd=0.0025)
    planned = [one.trial for one in every]
    done = [one for one in every if one.trial.seed < 10 or one.trial.problem["arm"] == "broken"]
    plan = {**JUDGEMENT, "seeds": 10, "pool": 2}
    run = write(tmp_path / "run", done, planned=planned, suite="convergence", title="Study", judgement=plan)
    shown = [command("verdict", run, "--margin", margin).out for margin in (0.003, 0.02, 0.5)]
    assert all("A/A: gap" not in said and "bf16, A/A not finished" in " ".join(said.split()) for said in shown), shown


def test_a_recipe_that_is_not_done_has_no_verdict_where_the_rest_is(command: Command, results: Path) -> None:
    run = results / "h200" / "study"
    every = study_records(TRUTH, PLANNED, sd=0.0004)
    done = [one for one in every if one.trial.recipe != "rowwise_scaling" or one.trial.seed < 4]
    judgement = {**JUDGEMENT, "seeds": len(PLANNED)}
    planned = [one.trial for one in every]
    write(run, done, planned=planned, suite="convergence", title="Convergence", judgement=judgement)
    rows = [line.split() for line in command("verdict", run).out.splitlines()]
    assert ["rowwise", "scaling", "not", "finished"] in [row[:4] for row in rows]
    assert ["delayed", "scaling", "EQUIVALENT"] in [row[:3] for row in rows]


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_arm_is_not_tested_for_divergence(command: Command, results: Path) -> None:
    run = begun(results / "h200" / "study", TRUTH)
    assert command("report", run).code == 0
    page = (run / "report" / "report.md").read_text()
    assert "| delayed scaling | 0 of 5 |" in page
    assert "p against bf16" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_study_that_is_given_up_shows_its_gaps_and_never_has_a_verdict(command: Command, results: Path) -> None:
    run = begun(results / "h200" / "study", APART)
    assert command("verdict", run, "--break-off", " ").code == 2
    done = command("verdict", run, "--break-off", "the text was wrong.")
    assert done.code == 4, done.err
    begin = "No verdict: exploration, broken off after 25 of 40 runs: the text was wrong."
    assert " ".join(done.out.split()).startswith(begin)
    assert "Go on" not in done.out
    said = told(command, run, results)
    assert b"hidden" not in said["report/report.md"]
    assert "report/figures/verdict_gap.svg" in said
    rest = begun(results.parent / "rest", APART, seeds=8)  # of the same plan, all of it
    assert command("merge", run, rest, "--out", "all").code == 0
    whole = command("verdict", "all")
    assert (whole.code, "broken off after 40 of 40 runs" in whole.out) == (4, True), whole.out


def test_a_study_that_is_done_keeps_its_verdict_beside_one_that_is_given_up(command: Command, tmp_path: Path) -> None:
    """As of one text and another in a folder, or before and after an update of torch."""
    run = write_study(tmp_path / "run", study_records(sd=0.0003))
    other = {"data_sha256": "cd34", "data": "text:other.txt"}
    apart = [dataclasses.replace(one, trial=one.trial.with_(**other)) for one in study_records(sd=0.0003)]
    elsewhere = [dataclasses.replace(one, environment="env-new") for one in study_records(sd=0.0003)]
    for planned, where in ((apart, None), (elsewhere, environment("env-new", torch="2.12.0"))):
        done = [one for one in planned if one.trial.seed < 3]
        trials = [one.trial for one in planned]
        write(run, done, planned=trials, suite="convergence", title="Convergence", judgement=JUDGEMENT, body=where)
        assert command("verdict", run, "--break-off", "why").code == 4
    said = command("verdict", run)
    assert (said.out.count("exploration, broken off"), "EQUIVALENT: delayed scaling and rowwise" in said.out) == (
        2,
        True,
    )


def test_a_study_that_is_done_is_not_given_up(command: Command, tmp_path: Path) -> None:
    run = write_study(tmp_path / "run", study_records(sd=0.0003))
    done = command("verdict", run, "--break-off", "a gap that I do not like")
    assert (done.code, "holds no study whose planned runs are not done" in done.err) == (2, True)
    assert command("verdict", run).code == 0
    assert command("verdict", "--baseline", run, "--candidate", run, "--margin", 0.1, "--break-off", "why").code == 2


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_says_its_margin_pairs_power_and_cost(command: Command, tmp_path: Path) -> None:
    """A synthetic run takes 1.5 s: 25 of them 0.0104 hours."""
    run = write_study(tmp_path / "run", study_records(sd=0.0003))
    said = "Margin 0.003 nat, 5 pairs, power 100 % at a true gap of 0; 25 runs, 0.01 GPU hours"
    verdict = " ".join(command("verdict", run).out.split())
    assert re.search(rf"nat\)\. char, text:play\.txt, \d+ steps, [^.]+\. {said}", verdict)  # of what, and how long
    assert said in " ".join(command("show", run).out.split())
    assert command("report", run).code == 0
    assert said in (run / "report" / "report.md").read_text()
    said = "Margin 0.003 nat; 25 of 40 runs, 0.01 of about 0.0"
    assert said in " ".join(command("verdict", begun(tmp_path / "begun", TRUTH)).out.split())


@pytest.mark.parametrize(("gpu", "known"), [("NVIDIA H200", True), ("NVIDIA B200", False)])
def test_the_cost_of_runs_that_no_record_times_is_estimated_for_a_hopper_alone(
    gpu: str, known: bool, command: Command, tmp_path: Path
) -> None:
    every, body = study_records(TRUTH, PLANNED), environment("env-h200", gpu)
    done, planned = [one for one in every if one.trial.precision == "bf16"], [one.trial for one in every]
    about = {"suite": "convergence", "title": "Convergence", "judgement": {**JUDGEMENT, "seeds": len(PLANNED)}}
    run = write(tmp_path / "run", done, planned=planned, body=body, **about)
    said = command("verdict", run).out
    assert f"{len(done)} of {len(every)} runs, 0.0067 " in said
    assert ("of about" in said) == known


def test_runs_that_share_a_gpu_cost_their_share_of_it(command: Command, tmp_path: Path) -> None:
    run = write_study(tmp_path / "run", study_records(sd=0.0003, share=5))
    assert "25 runs, 0.0021 GPU hours" in command("verdict", run).out


def test_show_offers_a_study_s_verdict_and_begins_with_it(command: Command, tmp_path: Path) -> None:
    run = write_study(tmp_path / "run", study_records(sd=0.0003))
    lines = command("show", run).out.splitlines()
    assert lines[0].startswith("EQUIVALENT: delayed scaling and rowwise scaling train like bf16")
    assert lines[-1].endswith("verdict|fastest")
    verdict = command("show", run, "verdict").out.splitlines()
    assert verdict == lines[: len(verdict)]
    assert max(map(len, verdict)) <= 80
    assert [line.split()[0] for line in verdict if "EQUIVALENT  " in line] == ["delayed", "rowwise", "bf16,"]
    fastest = command("show", run, "fastest").out
    assert fastest.startswith("tokens a second of a training")
    assert "Nothing was timed" not in fastest


def test_a_verdict_stands_once_its_own_runs_are_done_whatever_else_is_to_go(command: Command, tmp_path: Path) -> None:
    """A/A and the fault are done as well; what is undecided says how far it is above bf16, and what more would cost."""
    truth = {**TRUTH, "delayed_scaling": 0.0025}

    def said(aa: float) -> tuple[str, str]:
        every = study_records({**truth, "aa": aa}, sd=0.0006)
        done = [one for one in every if one.trial.recipe != "rowwise_scaling"]
        planned = [one.trial for one in every]
        run = write(tmp_path / str(aa), done, planned=planned, suite="convergence", title="S", judgement=JUDGEMENT)
        found = command("verdict", run)
        assert found.code == 4
        [reasons] = tables.tables_of(only_group(run), "verdict_reasons")
        return " ".join(found.out.split()), str([value.text for value in reasons.rows[0]])

    out, why = said(0.0)
    assert re.match(
        r"INCONCLUSIVE: delayed scaling \(gap \+0\.00\d+, 90 % interval \[\+0\.\d+, \+0\.\d+\]; at least \d+ seeds "
        r"needed\) ends above bf16, perhaps by more than 0\.003 nat\. Unfinished: 5 of 25 trials to go\. Go on: te-bench",
        out,
    )
    assert "'INCONCLUSIVE'" in why
    assert "(void)" not in out
    out, why = said(0.05)  # A/A is far from bf16
    assert out.startswith("Unfinished: 5 of 25 trials to go.")
    assert "'INCONCLUSIVE (void)'" in why


def part_of(directory: Path, truth: Mapping[str, float], left: Collection[str], **more: Any) -> Path:
    """A study of eight seeds without the records of these recipes."""
    every = study_records(truth, PLANNED, sd=0.0004, **more)
    done = [one for one in every if one.trial.recipe not in left or one.trial.problem["arm"] == "broken"]
    planned, judgement = [one.trial for one in every], {**JUDGEMENT, "seeds": len(PLANNED)}
    return write(directory, done, planned=planned, suite="convergence", title="S", judgement=judgement)


def test_a_recipe_that_passes_alone_waits_for_those_that_it_is_judged_with(command: Command, tmp_path: Path) -> None:
    """Holm counts runs that are to go as lost: more of its own seeds would not help."""
    others = ("rowwise_scaling", "float8_block_scaling", "float8_current_scaling", "mxfp8_block_scaling")
    truth = {**dict.fromkeys(("control", "aa", "delayed_scaling", *others), 0.0), "broken": 0.05}
    truth["delayed_scaling"] = 0.002
    run = part_of(tmp_path / "part", truth, others)
    out = " ".join(command("verdict", run).out.split())
    assert re.match(
        r"waits for the others: delayed scaling \(gap \+0\.00\d+, [^;]+\]\) is done, and judged with the others\. Un",
        out,
    )
    assert "delayed scaling waits for the others +0.00" in out
    assert "EQUIVALENT: delayed scaling, " in command("verdict", part_of(tmp_path / "whole", truth, ())).out


def test_a_recipe_that_is_lost_or_diverged_is_named(command: Command, tmp_path: Path) -> None:
    lost = {("delayed_scaling", 2): "oom"}
    run = write_study(tmp_path / "lost", study_records(sd=0.0003, outcomes=lost))
    assert "; not finished: delayed scaling." in " ".join(command("verdict", run).out.split())
    alone = {name: gap for name, gap in TRUTH.items() if name != "rowwise_scaling"}
    run = write_study(tmp_path / "alone", study_records(alone, sd=0.0003, outcomes=lost))
    assert command("verdict", run).out.startswith("No verdict: delayed scaling has no result for seed 2 (oom).")
    every = study_records(alone, sd=0.0003, outcomes={("delayed_scaling", 0): "diverged"})
    done = [one for one in every if one.trial.problem["arm"] != "recipe" or not one.trial.seed]
    planned = [one.trial for one in every]
    run = write(tmp_path / "begun", done, planned=planned, suite="convergence", title="S", judgement=JUDGEMENT)
    assert command("verdict", run).out.startswith(
        "DIVERGED: delayed scaling diverged. Unfinished: 4 trials to go.\nGo on: te-bench run"
    )


def test_the_summary_has_a_line_for_each_recipe_of_every_study_of_the_longest_training(
    command: Command, results: Path, tmp_path: Path
) -> None:
    exact = study_records({**TRUTH, "rowwise_scaling": 0.0}, sd=0.0003)
    finals = {one.trial.seed: one.samples["val_loss"] for one in exact if one.trial.problem["arm"] == "control"}
    for one in exact:
        if one.trial.recipe == "rowwise_scaling":
            one.samples["val_loss"] = finals[one.trial.seed]
    diverged = study_records(
        {**TRUTH, "rowwise_scaling": 0.02}, sd=0.0003, outcomes={("delayed_scaling", 1): "diverged"}
    )
    write_study(results / "h200" / "a", exact)
    write_study(results / "h200" / "b", diverged)
    (results / "published.toml").write_text("".join(f'["h200/{n}"]\nsuite = "convergence"\n' for n in "ab"))
    page = tmp_path / "page.md"
    page.write_text("<!-- te-bench:table results verdict_summary -->\n<!-- /te-bench:table -->\n")
    assert command("embed", page).code == 0
    said = page.read_text()
    assert said.count("- **") == 4
    assert (
        "- **rowwise scaling: EQUIVALENT at a margin of 0.003 nat.** It ends as bf16 does (5 seeds; 25 runs, " in said
    )
    assert "- **delayed scaling: DIVERGED** (" in said
    assert "- **rowwise scaling: INFERIOR at a margin of 0.003 nat.** It ends 0.0" in said
    assert "None" not in said


def test_published_verdicts_say_margin_pairs_power_and_cost(command: Command, results: Path, tmp_path: Path) -> None:
    """A row for each gap that counts, one for what is not finished, one for what is void; none of exploration."""
    listed = ""
    for name, make in {
        "a": lambda where: write_study(where, study_records(sd=0.0003)),
        "b": lambda where: begun(where, TRUTH),
        "c": lambda where: write_study(where, study_records({**TRUTH, "aa": 0.05}, sd=0.0003)),
        "d": lambda where: begun(where, TRUTH),
    }.items():
        make(results / "h200" / name)
        listed += f'["h200/{name}"]\nsuite = "convergence"\n'
    command("verdict", results / "h200" / "d", "--break-off", "why")
    (results / "published.toml").write_text(listed)
    page = tmp_path / "page.md"
    marks = [
        f"<!-- te-bench:table results {name} -->\n<!-- /te-bench:table -->\n"
        for name in ("verdicts", "verdict_summary")
    ]
    page.write_text("".join(marks))
    assert command("embed", page).code == 0
    table, summary = page.read_text().split("<!-- /te-bench:table -->")[:2]
    rows = [line for line in table.splitlines() if line.startswith("| char")]
    both, cost = "| char, 400 steps | delayed scaling; rowwise scaling", "0.01 GPU hours"
    ends, alone = (
        "#, 90 % \\[#, #\\], 95 % \\[#, #\\] (±#) | # \\[#, #\\]",
        "| char, 400 steps | {} | EQUIVALENT | #3 | {} | 5 | 100 % | 25 runs, # GPU hours | h200/a |",
    )
    assert [re.sub(r"[+-]?0\.\d{4}|\d\.\d\d×?", "#", row) for row in rows] == [
        *(alone.format(name, ends) for name in ("delayed scaling", "rowwise scaling")),
        f"{both} | not finished | #3 | — | — | — | — | 25 of 40 runs, # of about #6 GPU hours | h200/b |",
        f"{both} | EQUIVALENT (void) | #3 | — | — | 5 | 100 % | 25 runs, # GPU hours | h200/c |",
    ]
    assert summary.count("- **") == 2
    begins = "- **delayed scaling: EQUIVALENT at a margin of 0.003 nat.** It ends 0.0"
    assert f"char, 400 steps, 7 M tokens a run:\n\n{begins}" in summary
    assert f"; 5 seeds, power 100 % at a gap of 0; 25 runs, {cost}). It reaches bf16's final loss " in summary
    assert "void" not in summary


def test_the_gallery_names_a_study_by_what_it_asks(results: Path) -> None:
    begun(results / "h200" / "study", TRUTH)
    assert "<b>char, 400 steps: delayed scaling; 1 more</b>" in published.gallery(results, ".")


@pytest.mark.usefixtures("undrawn")
def test_bf16_is_spelt_in_one_way_whatever_a_plan_s_title_says(command: Command, tmp_path: Path) -> None:
    run = write(
        tmp_path / "run", study_records(), suite="convergence", title="Does FP8 train like BF16?", judgement=JUDGEMENT
    )
    assert command("report", run).code == 0
    page = (run / "report" / "report.md").read_text()
    assert "# Does FP8 train like bf16?" in page
    assert "BF16" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_training_is_compared_with_bf16_over_the_seeds_of_both(command: Command, tmp_path: Path) -> None:
    """bf16's seeds lie apart by far more than the recipe's gap, 0.02, to bf16 on its own seed."""
    records = study_records({"control": 0.0, "rowwise_scaling": 0.02}, sd=0.0)
    kept = [one for one in records if one.trial.recipe is None or one.trial.seed == 3]
    run = write(tmp_path / "run", kept, suite="curves")
    assert command("report", run).code == 0
    curves = (run / "report" / "report.md").read_text().partition("## Loss curves")[2]
    assert re.search(r"^\| rowwise scaling \| 3\.\d+ \| \+0\.0200 \|", curves, re.MULTILINE)
