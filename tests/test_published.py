"""Published records are of a clean tree and of today's suites, and tables agree; published.toml lists the exceptions."""

import math
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import geometric_mean, mean, median, stdev
from typing import Any

import numpy as np
import pytest

from te_bench.advice import convergence
from te_bench.experiments import estimate, plan
from te_bench.experiments.spec import Options, Trial
from te_bench.experiments.store import Journal, load
from te_bench.experiments.suites.convergence import BROKEN
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.rows import TIMED, load_results, trial_of
from te_bench.reports.convergence import design, loss_verdict, planning
from te_bench.reports.convergence.equivalence import LossComparison, Verdict, compare
from te_bench.reports.convergence.skewed import mean_of
from te_bench.reports.convergence.study import Study, studies
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.exchange.submission import against_the_suite, is_clean, settled
from te_bench.reports.page import text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PUBLISHED: dict[str, dict[str, Any]] = tomllib.loads((RESULTS / "published.toml").read_text())
FOLDERS = sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("*/*/journal.jsonl*"))
MARKER = re.compile(r"^<!-- te-bench:table (?:\.\./)?results/(\S+) (\S+) -->", re.MULTILINE)


@cache
def journal(folder: str) -> Journal:
    return load(RESULTS / folder)


def known(folder: str) -> dict[str, str]:
    return PUBLISHED[folder].get("known", {})


def test_every_folder_says_how_it_was_planned() -> None:
    assert set(PUBLISHED) == set(FOLDERS) | {"disagreements"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_records_are_of_a_clean_tree(folder: str) -> None:
    found = journal(folder)
    dirty = sorted({environment for _, environment in found.records if not is_clean(found.environments[environment])})
    reason = known(folder).get("dirty")
    assert bool(dirty) == bool(reason), (
        f"environments of a dirty or unknown tree: {dirty}; published.toml says {reason!r}"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_records_are_of_the_plan_that_the_suite_makes_today(folder: str) -> None:
    said = PUBLISHED[folder]
    options = dict(said.get("options", {}))
    if "recipes" in options:
        options["recipes"] = tuple(options["recipes"])
    today = plan.resolve(
        said["suite"], Options(device="cuda", data={"": "random"} if said.get("trains") else {}, **options)
    )
    old, missing = against_the_suite(journal(folder), today)
    reason = known(folder).get("old_plan")
    assert bool(old) == bool(reason), f"today's {said['suite']} would not run {old[:5]}; published.toml says {reason!r}"
    reason = known(folder).get("missing")
    assert bool(missing) == bool(reason), f"no record of {missing[:5]}; published.toml says {reason!r}"


def test_a_plan_s_times_are_those_of_the_records() -> None:
    """Of each folder's trials of a kind at most 1.75 times too long or too short, of all of a kind at most 1.34 times."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for folder in FOLDERS:
        for record in journal(folder).records.values():
            if record.outcome == "ok" and (seconds := estimate.seconds(record.trial)) is not None:
                for of in (folder, "all"):
                    found[record.trial.workload, of].append((seconds, record.wall_s))
    for (workload, of), both in found.items():
        estimated, took = map(sum, zip(*both, strict=True))
        most = 1.34 if of == "all" else 1.75
        assert 1 / most < estimated / took < most, (
            f"{workload} of {of}: {estimated:.0f} s estimated, {took:.0f} recorded"
        )
    assert {workload for workload, _ in found} > {
        "train_step",
        "training",
        "scaling",
        "max_batch",
        "layer",
        "attention",
    }


def test_a_step_that_gpus_share_is_planned_by_the_share_of_each() -> None:
    one = next(r.trial for r in journal("h200/scaling").records.values() if r.trial.problem.get("world", 1) == 1)
    eight = one.with_(world=8, parallel="ddp", batch=8 * one.problem["batch"])
    assert estimate.seconds(eight) == pytest.approx(estimate.seconds(one))


def test_an_emulated_format_s_steps_take_as_many_times_a_bf16_step_s_time_as_recorded() -> None:
    steps = defaultdict(list)
    for record in journal("h200/speed-emulated").records.values():
        steps[record.trial.recipe].append(median(record.samples["latency_s"]))
    for recipe, seconds in steps.items():
        for name, times in estimate.EMULATED.items():
            if (recipe or "").startswith(name):
                assert geometric_mean(seconds) / geometric_mean(steps[None]) == pytest.approx(times, abs=0.005)


def test_no_two_tables_give_one_configuration_two_figures() -> None:
    """The same trial, seeds aside, on the same GPU, in tables of two folders: one time, to the printed digit."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    tabled = {folder for page in pages for folder, _ in MARKER.findall(page.read_text()) if folder in FOLDERS}
    printed: dict[tuple[str, str | None, str], dict[str, str]] = defaultdict(dict)
    for folder in sorted(tabled):
        for group in load_results([RESULTS / folder]).groups:
            for configuration in group.configurations:
                for sample in TIMED:
                    if seconds := measures.of_processes(configuration.ok, sample):
                        printed[configuration.trial.name.rsplit("/", 1)[0], group.gpu, sample][folder] = (
                            text.milliseconds(seconds)
                        )
    found = defaultdict(list)
    for (name, _, sample), figures in printed.items():
        if len(set(figures.values())) > 1:
            found[" ".join(sorted(figures))].append(f"{name} {sample}: {figures}")
    allowed = PUBLISHED["disagreements"]
    assert set(found) == set(allowed), dict(found)


def test_a_trial_of_another_plan_is_seen() -> None:
    """The comparison sees a changed setting and heeds neither the seed nor whose text was trained on."""
    [of, *_] = [trial_of(value) for value in journal("h200/convergence").plans[0].trials]
    same = of.to_json() | {"seed": 99, "problem": {**of.problem, "corpus": "other", "data_sha256": "other"}}
    assert settled(of) == settled(Trial.from_json(same))
    assert settled(of) != settled(Trial.from_json(of.to_json() | {"problem": {**of.problem, "learning_rate": 1.0}}))


@cache
def study(name: str) -> Study:
    [group] = load_results([RESULTS / "h200" / name]).groups
    [found] = studies(group)
    return found


def arms(name: str) -> dict[str, dict[int, float]]:
    return {arm.name: arm.finals for arm in study(name).arms}


def test_the_gaps_that_plans_expect_are_those_of_the_records() -> None:
    def gaps(name: str) -> list[float]:
        of = study(name)
        done = [arm for arm in of.recipes if arm.finals]
        return [float(np.mean([loss - of.base(arm)[seed] for seed, loss in arm.finals.items()])) for arm in done]

    first, bf16 = gaps("convergence-gpt2")[0], study("convergence-gpt2").control
    assert study("convergence-gpt2").primary == study("convergence-gpt2").recipes[0]
    assert round(first, 4) == planning.GAPS["gpt2"]
    assert round(first / np.mean(list(bf16.finals.values())), 4) == planning.SHARE
    short = max(gaps("convergence-short") + gaps("convergence-dpa"))
    [assumed] = [spread for of, spread in planning.ASSUMED if of["steps"] == 300]
    assert round(short, 4) == assumed.gap


def test_the_planted_fault_was_caught_in_each_published_training_that_plans_take_it_from() -> None:
    found = {
        one.broken.trial.problem["steps"]: one
        for one in map(study, ("convergence-short", "convergence-gpt2", "convergence-char"))
    }
    for model, steps, branch_at in planning.FAULT_SEEN:
        if model == "tiny":
            continue
        of, problem = found[steps], found[steps].control.trial.problem
        assert (problem["model"], problem.get("branch_at")) == (model, branch_at)
        gap = min(of.broken.finals.values()) - max(of.control.finals.values())
        assert gap > 10 * of.number("margin")


def test_the_spreads_that_plans_of_gpt2_assume_are_those_of_the_study() -> None:
    """Of single runs, by which a pool is planned, about their configuration's mean; of pairs, about a seed's mean, too."""
    control = study("convergence-gpt2").control.trial.problem
    runs = np.array([[*arm.finals.values()] for arm in study("convergence-gpt2").arms if len(arm.finals) == 12])
    centred = runs - runs.mean(axis=1, keepdims=True)
    noise, df = centred - centred.mean(axis=0), (len(runs) - 1) * (runs.shape[1] - 1)
    [single], [pair] = (
        [known for of, known in table if of["model"] == "gpt2" and all(control.get(key) == of[key] for key in of)]
        for table in (design.ASSUMED, planning.ASSUMED)
    )
    assert single.sd == pytest.approx(math.sqrt(runs.var(axis=1, ddof=1).mean()), abs=5e-5)
    assert single.df == runs.shape[1] - 1
    assert pair.aa_sd / math.sqrt(2) == pytest.approx(math.sqrt((noise**2).sum() / df), abs=5e-6)
    assert (pair.pairs - 1, pair.bf16_runs) == (df, 2)


def test_the_spreads_that_one_run_a_side_is_told_are_those_of_the_records() -> None:
    """Of runs and of gaps; the least spread of runs is of another project."""
    short, e4m3 = arms("convergence-short"), arms("convergence-e4m3")
    gaps = [
        stdev(loss - arm[bf16][seed] for seed, loss in arm[recipe].items() if seed in arm[bf16])
        for arm, recipe, bf16 in (
            (e4m3, "current scaling E4M3, fused, bf16 head", "bf16, fused"),
            (short, "delayed scaling, fused, FP8 head", "bf16"),
        )
    ]
    assert gaps == pytest.approx([sd for sd, _ in loss_verdict.GAPS_SD], rel=0.05)
    assert stdev(short["bf16"].values()) == pytest.approx(loss_verdict.RUNS_SD[1][0], rel=0.05)


def test_what_a_short_run_takes_beside_its_steps_is_that_of_the_records() -> None:
    """Advice tells by it how long a pilot of the user's model takes."""
    ended = [record for record in journal("h200/convergence-short").records.values() if record.outcome == "ok"]
    beside = median(record.wall_s - max(record.samples["time_s"]) for record in ended)
    assert beside == pytest.approx(convergence.BESIDE_STEPS_S, abs=0.5)


def test_exploration_s_gaps_are_a_fit_to_the_losses_of_its_records() -> None:
    """By seed and by the gradients' format; of the folder that asks which part costs, the FP8 head's whole run counts."""
    formats = {
        None: None,
        "float8_current_scaling_e4m3": "E4M3",
        "float8_current_scaling": "E5M2",
        "delayed_scaling": "E5M2",
    }
    folders = [f"h200/convergence-{name}" for name in ("first", "e4m3", "pilot", "parts")]
    found = [
        (record.trial.seed, formats[record.trial.recipe], record.samples["val_loss"][-1])
        for folder in folders
        for record in journal(folder).records.values()
        if record.outcome == "ok" and (not folder.endswith("parts") or record.trial.problem["head"] == "fp8")
        if "bf16_from" not in record.trial.problem
    ]
    assert len(found) == 22
    terms = [*range(4), "E5M2", "E4M3"]
    design = [[float(term in (seed, form)) for term in terms] for seed, form, _ in found]
    e5m2, e4m3 = np.linalg.lstsq(np.array(design), np.array([loss for *_, loss in found]), rcond=None)[0][4:]
    page = (RESULTS.parent / "docs" / "convergence-records.md").read_text(encoding="utf-8")
    assert f"**With E5M2 gradients GPT-2 ended {e5m2:.4f} nat above bf16" in page
    assert f"with E4M3's {e4m3:.4f}" in page


def test_the_page_on_convergence_opens_with_the_numbers_of_the_records() -> None:
    """Gaps, intervals, time to equal loss, and what a surer answer takes, of the three recipes whose runs are done."""
    with_head, without_head = study("convergence-gpt2"), study("convergence-gpt2-e4m3")
    found, other = judge_study(with_head), judge_study(without_head)
    e4m3, e5m2 = (one for one in found.recipes if one.judgement.comparison)
    [passed] = other.recipes
    assert (e4m3.arm.trial.recipe, e5m2.arm.trial.recipe) == ("delayed_scaling_e4m3", "delayed_scaling")
    assert passed.judgement.verdict == Verdict.EQUIVALENT
    took = {
        arm.kind: mean(run.record.wall_s for run in arm.runs.values() if run.record)
        for arm in with_head.arms
        if arm.ended
    }

    def comparison(one: ArmVerdict) -> LossComparison:
        assert one.judgement.comparison is not None
        return one.judgement.comparison

    def row(one: ArmVerdict, of: StudyVerdict) -> str:
        c = comparison(one)
        return f"| {c.gap:.4f} ({of.gap_percent(one):.2f} %) | {ends(c.interval)} | {ends(c.interval_95)} |"

    def takes(one: ArmVerdict) -> str:
        fewest, most = map(int, re.findall(r"(\d+) to (\d+) seeds each would show it", one.judgement.reason)[0])
        a_seed = took["control"] + took["aa"] + mean(run.record.wall_s for run in one.arm.runs.values() if run.record)
        hours = [(seeds * a_seed + BROKEN * took["broken"]) / 3600 for seeds in (fewest, most)]
        likely = "not shown; likely" if comparison(one).gap < found.margin else "not shown; not likely"
        return f" {likely} | 12; {fewest} to {most} would show it, {hours[0]:.0f} to {hours[1]:.0f} GPU hours |"

    def sooner(one: ArmVerdict) -> str:
        assert one.speedup is not None
        ratio = one.speedup.to_equal_loss
        assert ratio is not None
        return f"{ratio.value:.2f} times {{}}(95 % [{ratio.low:.2f}, {ratio.high:.2f}])"

    def gaps(one: ArmVerdict, of: Study, without: int) -> list[float]:
        return [one.arm.finals[seed] - of.base(one.arm)[seed] for seed in one.seeds if seed != without]

    def less(one: ArmVerdict, beside: ArmVerdict) -> LossComparison:
        """Compare two recipes by the seeds of the first."""
        return compare(*([of.arm.finals[seed] for seed in e4m3.seeds] for of in (one, beside)), margin=found.margin)

    page, more = (
        " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())
        for name in ("convergence", "convergence-questions")
    )

    def ends(interval: tuple[float, float] | None, to: str = " to ") -> str:
        assert interval is not None
        return f"{interval[0]:.4f}{to}{interval[1]:.4f}"

    outlier = mean_of(gaps(passed, without_head, 23))
    said = [
        row(passed, other) + " **shown** | 20, 3.4 GPU hours |",
        *(row(one, found) + takes(one) for one in (e4m3, e5m2)),
        f"bf16's loss {sooner(e4m3).format('as fast ')} with one, and {sooner(passed).format('')} without",
        f"without that seed the gap is {outlier.value:.4f} (90 % [{ends(outlier.interval(0.05), ', ')}])",
        f"Evaluated in FP8 the gaps are {passed.native_gap:.4f}, {e4m3.native_gap:.4f} and {e5m2.native_gap:.4f}, above",
        f"E5M2 ended {less(e5m2, e4m3).gap:.4f} nat above E4M3 (95 % [{ends(less(e5m2, e4m3).interval_95, ', ')}])",
        f"Without seed 10, which lies far off, the gaps are {mean(gaps(e4m3, with_head, 10)):.4f} and "
        f"{mean(gaps(e5m2, with_head, 10)):.4f}.",
    ]
    assert len(passed.seeds) == 20
    assert len(e4m3.seeds) == len(e5m2.seeds) == 12
    assert [one for one in said if one not in page] == []
    head = less(e4m3, passed)
    assert (
        f"E4M3 ended {-head.gap:.4f} nat lower with an FP8 head than with one in bf16 (95 % ["
        f"{ends(head.interval_95, ', ')}])" in more
    )
