import math
import statistics

import journals
import pytest
import scipy.stats
from journals import record, result_of, step_record, trial

from te_bench.experiments import peaks
from te_bench.reports.analysis.measures import Ratio, geometric_mean
from te_bench.reports.analysis.steps import peak_precision


def ladder(tmp_path, records, **settings):
    return {r.configuration.trial.attention: r for r in result_of(tmp_path, records, **settings).steps.steps}


def timed(of, *latency, **work):
    return record(of, samples={"latency_s": list(latency)}, work=work)


def test_latency_is_the_geometric_mean_of_process_medians(tmp_path):
    processes = ((1, 3, 4), (2, 5, 6), (3, 225, 301))  # medians 3, 5 and 225
    found = ladder(tmp_path, [timed(trial(seed=seed), *steps) for seed, steps in enumerate(processes)])
    assert found["flash"].latency_s == pytest.approx(15)


@pytest.mark.parametrize("of_flash", [(0, 1, 2), (1, 2), (2,)])
def test_time_speedup_and_rank_are_one_estimate(tmp_path, of_flash):
    """Seeds of which one is slow for all; flash, which lacks some, has the speed-up and the time of those it has."""
    machine = (1.0, 1.0, 9.0)
    records = [timed(trial(attention="manual", seed=s), 40.0 * x) for s, x in enumerate(machine)]
    records += [timed(trial(attention="math", seed=s), 21.0 * x) for s, x in enumerate(machine)]
    records += [timed(trial(attention="flash", seed=s), 20.0 * machine[s]) for s in of_flash]
    steps = ladder(tmp_path, records, baseline=trial(attention="manual").cell)
    assert list(steps) == ["flash", "math", "manual"]
    assert steps["flash"].speedup.value == pytest.approx(2.0)
    for step in steps.values():
        assert steps["manual"].latency_s / step.latency_s == pytest.approx(step.speedup.value)


def test_speedup_pairs_seeds_and_has_a_t_interval(tmp_path):
    slow, fast = (100.0, 110.0, 130.0), (50.0, 50.0, 52.0)
    records = [timed(trial(attention="manual", seed=s), x) for s, x in enumerate(slow)]
    records += [timed(trial(attention="flash", seed=s), x) for s, x in reversed(list(enumerate(fast)))]
    speedup = ladder(tmp_path, records, baseline=trial(attention="manual").cell)["flash"].speedup
    logs = [math.log(a / b) for a, b in zip(slow, fast, strict=True)]
    low, high = scipy.stats.t.interval(0.95, 2, loc=statistics.fmean(logs), scale=scipy.stats.sem(logs))
    assert speedup.n == 3
    assert speedup.value == pytest.approx((2 * 2.2 * 2.5) ** (1 / 3))
    assert (speedup.low, speedup.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))


def test_seeds_without_a_partner_do_not_count(tmp_path):
    records = [timed(trial(attention="manual", seed=s), 10.0) for s in (0, 1)]
    records += [timed(trial(attention="flash", seed=s), 5.0 if s else 1.0) for s in (1, 2)]
    speedup = ladder(tmp_path, records, baseline=trial(attention="manual").cell)["flash"].speedup
    assert (speedup.value, speedup.n, speedup.low) == (2.0, 1, None)


def test_one_seed_has_no_interval():
    assert geometric_mean([2.0]) == Ratio(value=2.0, n=1)
    assert geometric_mean([]) is None


def test_baseline_is_one_by_definition(tmp_path):
    records = [timed(trial(attention="manual", seed=s), 4.0 + s) for s in range(2)]
    step = ladder(tmp_path, records, baseline=records[0].trial.cell)["manual"]
    assert step.is_baseline
    assert step.speedup == Ratio(value=1.0, n=2)


def test_without_a_baseline_that_did_the_same_work_there_is_no_speedup(tmp_path):
    slow = trial(attention="manual")
    baseline = {"baseline": slow.cell}
    for number, (beside, settings) in enumerate(
        ((timed(slow, 4), {}), (record(slow, outcome="oom"), baseline), (timed(slow, 4, tokens=100), baseline))
    ):
        steps = ladder(tmp_path / f"{number}", [beside, timed(trial(), 2.0, tokens=200)], **settings)
        assert steps["flash"].speedup is None
        assert (steps["manual"].latency_s is None) == (beside.outcome == "oom")


def test_rates_and_mfu(tmp_path):
    records = [
        timed(trial(attention=name, precision=precision), 0.02, tokens=12288, flop=1e13)
        for name, precision in (("flash", "bf16"), ("cudnn", "fp8"), ("manual", "fp32"))
    ]
    steps = ladder(tmp_path, records)
    assert steps["flash"].tokens_per_s == pytest.approx(614_400)
    assert steps["flash"].flop_per_s == pytest.approx(5e14)
    assert steps["flash"].mfu == pytest.approx(5e14 / 989.5e12)
    assert (steps["cudnn"].mfu, steps["cudnn"].mfu_peak) == (steps["flash"].mfu, "bf16")
    assert steps["manual"].mfu_peak == "fp32"


def test_tf32_is_its_own_peak(tmp_path):
    [configuration] = result_of(tmp_path, [timed(trial(precision="fp32", tf32=True), 1.0)]).group.configurations
    assert peak_precision(configuration) == "tf32"


def test_unknown_gpu_has_no_mfu(tmp_path):
    body = journals.environment(gpu="NVIDIA H200 MIG 1g.18gb")
    step = ladder(tmp_path, [timed(trial(), 0.02, tokens=1, flop=1e13)], body=body)["flash"]
    assert (step.mfu, step.mfu_peak) == (None, None)
    assert step.flop_per_s == pytest.approx(5e14)


def test_ladder_is_fastest_first_and_unmeasured_last(tmp_path):
    records = [record(trial(attention="flex"), outcome="oom"), timed(trial(attention="math"), 3.0)]
    records += [timed(trial(attention="flash"), 1.0), record(trial(attention="ok_but_empty"))]
    assert list(ladder(tmp_path, records)) == ["flash", "math", "flex", "ok_but_empty"]


def test_memory_is_the_highest_peak(tmp_path):
    records = [step_record(trial(seed=seed), 10, gib) for seed, gib in enumerate((7.0, 9.0, 8.0))]
    step = ladder(tmp_path, records)["flash"]
    assert step.peak_allocated == 9 * 2**30
    assert step.peak_rss is None


def test_missing_samples_are_none(tmp_path):
    step = ladder(tmp_path, [record(trial(), samples={"latency_s": [None, 2.0]})])["flash"]
    assert (step.latency_s, step.tokens_per_s, step.mfu, step.peak_allocated) == (2.0, None, None, None)


def test_peaks_are_those_of_the_records_gpu(tmp_path):
    assert peaks.peak(result_of(tmp_path, [record(trial())]).group.gpu, "bf16") == 989.5e12
