"""What is called the fastest, and how often the truly fastest is left out."""

import dataclasses
import math

import numpy as np
import pytest
from journals import record, result_of, step_record, trial

from te_bench.reports.analysis import measures, ranking


def ladder(tmp_path, milliseconds, **changes):
    """The ranking of {attention: ms of each seed}."""
    runs = [(name, seed, ms) for name, times in milliseconds.items() for seed, ms in enumerate(times)]
    records = [step_record(trial(attention=name, seed=seed), ms, **changes) for name, seed, ms in runs]
    return result_of(tmp_path, records).steps


def words(found):
    return {step.configuration.trial.attention: found.word(step) for step in found.steps}


def test_the_fastest_is_one_where_every_pair_says_so(tmp_path):
    times = {"math": (20.0, 20.4, 20.2), "flash": (10.0, 10.2, 10.1), "cudnn": (12.0, 12.1, 12.2)}
    assert words(ladder(tmp_path, times)) == {"flash": "fastest", "cudnn": "slower", "math": "slower"}


def test_what_pairs_do_not_tell_apart_is_not_distinguished(tmp_path):
    times = {"flash": (10.0, 10.4, 10.2), "cudnn": (10.3, 10.3, 10.4), "math": (20.0, 20.4, 20.2)}
    found = ladder(tmp_path, times)
    assert [step.configuration.trial.attention for step in found.fastest] == ["flash", "cudnn"]
    assert [step.configuration.trial.attention for step in found.slower] == ["math"]
    assert found.reason == "only 3 runs of each"


def test_two_are_told_apart_where_the_interval_of_their_ratio_is(tmp_path):
    """A one-sided test at 5 % tells these, of which the 95 % interval holds 1."""
    found = ladder(tmp_path, {"flash": (10.0, 10.0, 10.1), "math": (12.5, 15.0, 20.0)})
    assert words(found) == {"flash": "not distinguished", "math": "not distinguished"}
    told = words(ladder(tmp_path / "2", {"flash": (10.0, 10.0, 10.1), "math": (14.0, 15.0, 16.0)}))
    assert told == {"flash": "fastest", "math": "slower"}


def test_pairs_are_compared_and_not_what_all_seeds_have_in_common(tmp_path):
    """Every third run is 9 times as slow: of the pairs it takes nothing."""
    times = {"flash": (10.0, 10.1, 90.5), "cudnn": (12.0, 12.2, 108.0)}
    assert words(ladder(tmp_path, times)) == {"flash": "fastest", "cudnn": "slower"}


def test_pairs_of_the_same_two_gpus_are_one_observation(tmp_path):
    """As merged from two machines: chips differ alike in each pair, however many there are."""

    def on(gpu, attention, times):
        found = [step_record(trial(attention=attention, seed=seed), ms) for seed, ms in enumerate(times)]
        return [dataclasses.replace(one, device_state=one.device_state | {"uuid": gpu}) for one in found]

    here = [*on("GPU-a", "math", (20.0, 20.4, 20.2)), *on("GPU-a", "flash", (10.0, 10.2, 10.1))]
    there = on("GPU-b", "cudnn", (9.9, 10.1, 10.0))
    steps = result_of(tmp_path, [*here, *there]).steps
    assert words(steps) == {"flash": "fastest", "cudnn": ranking.UNPAIRED, "math": "slower"}
    of = {step.configuration.trial.attention: step.configuration for step in steps.steps}
    beside, merged = (measures.speedup(of["math"], of[name]) for name in ("flash", "cudnn"))
    assert (beside.n, beside.low is not None) == (3, True)
    assert (merged.n, merged.low) == (1, None)
    assert merged.value == pytest.approx(2.02, abs=0.005)


def test_pairs_whose_gpus_change_places_count_each(tmp_path):
    """As in a sweep over two GPUs, whose chips are 2 % apart."""

    def on(turn, attention, ms):
        one = [step_record(trial(attention=attention, seed=s), ms * (1 + 0.02 * ((s + turn) % 2))) for s in range(8)]
        return [dataclasses.replace(r, device_state={"uuid": f"GPU-{(s + turn) % 2}"}) for s, r in enumerate(one)]

    steps = result_of(tmp_path, [*on(0, "math", 21.0), *on(1, "flash", 20.0)]).steps
    slower, faster = sorted((step.configuration for step in steps.steps), key=lambda one: one.trial.attention)[::-1]
    told = measures.speedup(slower, faster)
    assert (told.n, told.value) == (8, pytest.approx(1.05, abs=0.001))
    assert 1.02 < told.low < told.high < 1.08


def test_a_single_run_is_neither_fastest_nor_slower(tmp_path):
    times = {"flash": (10.0, 10.1, 10.2), "cudnn": (12.0, 12.2, 12.3), "math": (9.0,), "manual": (100.0,)}
    expected = {"math": "one run", "flash": "fastest", "cudnn": "slower", "manual": "one run"}
    assert words(ladder(tmp_path, times)) == expected


def test_several_runs_of_other_seeds_than_the_fastest_are_not_called_one(tmp_path):
    records = [step_record(trial(attention=name, seed=s), 10.0 + s) for name in ("flash", "cudnn") for s in range(3)]
    records += [step_record(trial(attention="math", seed=s), 15.0) for s in range(2, 5)]
    found = result_of(tmp_path, records).steps
    assert words(found)["math"] == ranking.UNPAIRED


def test_times_by_pairs_are_those_of_steps_with_fewer_runs_than_the_baseline(tmp_path):
    baseline = trial(attention="flash").cell

    def by_pairs(name, **times):
        runs = [(way, seed, ms) for way, each in times.items() for seed, ms in enumerate(each)]
        records = [step_record(trial(attention=way, seed=seed), ms) for way, seed, ms in runs]
        return result_of(tmp_path / name, records, baseline=baseline).steps.by_pairs

    assert by_pairs("alike", flash=(10.0, 10.1, 10.2), cudnn=(9.0,), math=(20.0,))
    assert by_pairs("two", flash=(10.0, 10.1, 10.2), cudnn=(9.0, 9.1, 9.2), math=(20.0,))
    assert not by_pairs("all", flash=(10.0, 10.1), cudnn=(9.0, 9.1, 9.2), math=(20.0, 20.1))


def test_runs_of_other_work_are_not_ranked(tmp_path):
    records = [step_record(trial(attention="flash", seed=s), 10.0 + s) for s in range(3)]
    half = [step_record(trial(attention="math", batch=6, seed=s), 6.0 + s) for s in range(3)]
    records += [dataclasses.replace(one, work={"tokens": 6144}) for one in half]
    found = result_of(tmp_path, records).steps
    assert (found.fastest, found.slower) == ((), ())
    assert [step.configuration.trial.attention for step in found.alone] == ["math"]


def test_steps_of_the_baselines_batch_are_ranked_and_a_smaller_batch_is_not_the_fastest(tmp_path):
    records = [
        step_record(trial(attention=name, seed=s), ms) for name, ms in (("math", 20), ("flash", 10)) for s in (0, 1)
    ]
    small = [step_record(trial(attention="flash", batch=6, seed=s), 6.0) for s in (0, 1)]
    records += [dataclasses.replace(one, work={"tokens": 6144}) for one in small]
    found = result_of(tmp_path, records, baseline=records[0].trial.cell)
    assert {step.configuration.trial.problem["batch"] for step in (*found.steps.fastest, *found.steps.slower)} == {12}
    assert [one.step.configuration.trial.problem["batch"] for one in found.fastest] == [12]


def test_copies_show_nothing(tmp_path):
    times = {"flash": (10.0, 10.0, 10.0), "cudnn": (20.0, 20.0, 20.0)}
    assert set(words(ladder(tmp_path, times)).values()) == {"not distinguished"}


def test_the_reason_says_who_disturbed_what_was_timed(tmp_path):
    busy = {"host_cores": 2, "cpu_others": 1.6, "cpu_idle": 0.01, "cpu_stolen": 0.04, "load_average": 5.04}
    quiet = busy | {"cpu_others": 0.0, "cpu_stolen": 0.0}
    records = [record(trial(seed=s), samples={"latency_s": [0.1 + s]}) for s in range(3)]
    for states, said in (
        ([busy, quiet, quiet], "only 3 runs of each; the machine was busy in 1 of 3 runs: other programs took 1.6 of 2 "
         "cores (load 5.0) and its host took 4 % of the CPU time away"),
        ([{}, {}, {}], "only 3 runs of each"),
        ([quiet] * 3, "only 3 runs of each"),
    ):  # fmt: skip
        told = [dataclasses.replace(one, device_state=state) for one, state in zip(records, states, strict=True)]
        result = result_of(tmp_path / str(len(said)) / str(len(states[0])), told)
        assert ranking.why_tied(result.group.configurations) == said


def noises(kind, random, shape):
    """Log-times beside what a seed has in common, of about 2 %."""
    if kind == "normal":
        return 0.02 * random.standard_normal(shape)
    if kind == "t3":
        return 0.02 * random.standard_t(3, shape)
    if kind == "one in ten much slower":
        return 0.02 * random.standard_normal(shape) + 0.5 * (random.random(shape) < 0.1)
    return 0.02 * random.standard_normal(shape) * np.geomspace(0.2, 5, shape[1])[None, :, None]  # each its own spread


@pytest.mark.parametrize("runs", [2, 3, 5])
@pytest.mark.parametrize("kind", ["normal", "t3", "one in ten much slower", "spreads of their own"])
def test_the_truly_fastest_is_left_out_in_5_percent_at_most(kind, runs):
    """Of 6 that are equally fast, the first being called the fastest: the hardest case. 500 simulated runs."""
    random = np.random.default_rng(7)
    draws, rivals = 500, 6
    logs = noises(kind, random, (draws, rivals, runs)) + random.standard_normal((draws, 1, runs))
    missed = 0
    for drawn in logs:
        order = np.argsort(drawn.mean(axis=1))
        values = [{("run", seed): drawn[place, seed] for seed in range(runs)} for place in order]
        missed += list(order).index(0) not in ranking.rank(values).best
    assert missed / draws <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)


def test_a_clear_winner_is_found_with_three_runs():
    random = np.random.default_rng(8)
    found = 0
    for _ in range(300):
        drawn = 0.005 * random.standard_normal((3, 3)) + np.log([[1.0], [1.47], [6.0]])
        values = [{("run", seed): row[seed] for seed in range(3)} for row in drawn]
        found += ranking.rank(values).best == (0,)
    assert found >= 297
