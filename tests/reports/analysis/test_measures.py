import math
import statistics

import journals
import pytest
import scipy.stats
from journals import attention_records, checked, max_batch_record, record, step_record, trial, write

from te_bench.reports.analysis import hardware, measures
from te_bench.reports.analysis.rows import load_results


def group_of(tmp_path, records, **settings):
    [group] = load_results([write(tmp_path / "run", records, **settings)]).groups
    return group


def ladder(tmp_path, records, **settings):
    return {r.cell.trial.attention: r for r in measures.ladder(group_of(tmp_path, records, **settings))}


def timed(of, *latency, **work):
    return record(of, samples={"latency_s": list(latency)}, work=work)


def test_latency_is_the_geometric_mean_of_process_medians(tmp_path):
    processes = ((1, 3, 4), (2, 5, 6), (3, 225, 301))  # medians 3, 5 and 225
    rungs = ladder(tmp_path, [timed(trial(seed=seed), *steps) for seed, steps in enumerate(processes)])
    assert rungs["flash"].latency_s == pytest.approx(15)


@pytest.mark.parametrize("of_flash", [(0, 1, 2), (1, 2), (2,)])
def test_time_speedup_and_rank_are_one_estimate(tmp_path, of_flash):
    """Seeds of which one is slow for all; flash, which lacks some, has the speed-up and the time of those it has."""
    machine = (1.0, 1.0, 9.0)
    records = [timed(trial(attention="manual", seed=s), 40.0 * x) for s, x in enumerate(machine)]
    records += [timed(trial(attention="math", seed=s), 21.0 * x) for s, x in enumerate(machine)]
    records += [timed(trial(attention="flash", seed=s), 20.0 * machine[s]) for s in of_flash]
    rungs = ladder(tmp_path, records, baseline=trial(attention="manual").cell)
    assert list(rungs) == ["flash", "math", "manual"]
    assert rungs["flash"].speedup.value == pytest.approx(2.0)
    for rung in rungs.values():
        assert rungs["manual"].latency_s / rung.latency_s == pytest.approx(rung.speedup.value)


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


def test_one_seed_has_no_interval_and_no_baseline_no_speedup(tmp_path):
    assert measures.geometric_mean([2.0]) == measures.Ratio(value=2.0, n=1)
    assert measures.geometric_mean([]) is None
    records = [timed(trial(attention="manual"), 4.0), timed(trial(attention="flash"), 2.0)]
    assert ladder(tmp_path, records)["flash"].speedup is None


def test_baseline_is_one_by_definition(tmp_path):
    records = [timed(trial(attention="manual", seed=s), 4.0 + s) for s in range(2)]
    rung = ladder(tmp_path, records, baseline=records[0].trial.cell)["manual"]
    assert rung.is_baseline
    assert rung.speedup == measures.Ratio(value=1.0, n=2)


def test_baseline_that_failed_gives_no_speedup(tmp_path):
    slow = trial(attention="manual")
    rungs = ladder(tmp_path, [record(slow, outcome="oom"), timed(trial(), 2.0)], baseline=slow.cell)
    assert rungs["flash"].speedup is None
    assert rungs["manual"].latency_s is None


def test_different_work_is_not_compared(tmp_path):
    records = [timed(trial(attention="manual"), 4.0, tokens=100), timed(trial(), 2.0, tokens=200)]
    assert ladder(tmp_path, records, baseline=records[0].trial.cell)["flash"].speedup is None


def test_rates_and_mfu(tmp_path):
    records = [
        timed(trial(attention=name, precision=precision), 0.02, tokens=12288, flop=1e13)
        for name, precision in (("flash", "bf16"), ("cudnn", "fp8"), ("manual", "fp32"))
    ]
    rungs = ladder(tmp_path, records)
    assert rungs["flash"].tokens_per_s == pytest.approx(614_400)
    assert rungs["flash"].flop_per_s == pytest.approx(5e14)
    assert rungs["flash"].mfu == pytest.approx(5e14 / 989.5e12)
    assert (rungs["cudnn"].mfu, rungs["cudnn"].mfu_peak) == (rungs["flash"].mfu, "bf16")
    assert rungs["manual"].mfu_peak == "fp32"


def test_tf32_is_its_own_peak(tmp_path):
    [cell] = group_of(tmp_path, [timed(trial(precision="fp32", tf32=True), 1.0)]).cells
    assert measures.peak_precision(cell) == "tf32"


def test_unknown_gpu_has_no_mfu(tmp_path):
    body = journals.environment(gpu="NVIDIA H200 MIG 1g.18gb")
    rung = ladder(tmp_path, [timed(trial(), 0.02, tokens=1, flop=1e13)], body=body)["flash"]
    assert (rung.mfu, rung.mfu_peak) == (None, None)
    assert rung.flop_per_s == pytest.approx(5e14)


def test_ladder_is_fastest_first_and_unmeasured_last(tmp_path):
    records = [record(trial(attention="flex"), outcome="oom"), timed(trial(attention="math"), 3.0)]
    records += [timed(trial(attention="flash"), 1.0), record(trial(attention="ok_but_empty"))]
    assert list(ladder(tmp_path, records)) == ["flash", "math", "flex", "ok_but_empty"]


def test_memory_is_the_highest_peak(tmp_path):
    records = [step_record(trial(seed=seed), 10, gib) for seed, gib in enumerate((7.0, 9.0, 8.0))]
    rung = ladder(tmp_path, records)["flash"]
    assert rung.peak_allocated == 9 * 2**30
    assert rung.peak_rss is None


def test_missing_samples_are_none(tmp_path):
    rung = ladder(tmp_path, [record(trial(), samples={"latency_s": [None, 2.0]})])["flash"]
    assert (rung.latency_s, rung.tokens_per_s, rung.mfu, rung.peak_allocated) == (2.0, None, None, None)


@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantile_interpolates(q):
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert measures.quantile(values, q) == pytest.approx(scipy.stats.scoreatpercentile(values, 100 * q))


def test_attention_rates_by_shape(tmp_path):
    rungs = measures.attention(group_of(tmp_path, attention_records()))
    assert [r.cell.trial.attention for r in rungs[:4]] == ["mem_efficient", "flash", "cudnn", "manual"]
    flash = rungs[1]
    assert (flash.forward_flop_per_s, flash.backward_flop_per_s) == (pytest.approx(240e12), pytest.approx(192e12))
    assert rungs[3].forward_flop_per_s is None


def test_attention_is_compared_with_a_peer_seed_by_seed(tmp_path):
    def measured(kernel, seed, forward, backward, **problem):
        samples = {"forward_s": [forward] * 3, "backward_s": [backward] * 3}
        return record(trial("attention", kernel, seed=seed, **problem), samples=samples)

    records = [measured(kernel, seed, *figures) for kernel, times in {
        "flash": ((4.0, 8.0), (4.4, 8.0)), "cudnn": ((2.0, 4.0), (2.2, 4.0)), "gluon": ((1.0, 4.0), (1.0, 4.0)),
    }.items() for seed, figures in enumerate(times)]  # fmt: skip
    records += [measured("gluon", 0, 1.0, 1.0, length=4096), record(trial("attention", "manual"), outcome="oom")]
    found = {
        (r.cell.trial.attention, r.cell.trial.problem["length"]): r
        for r in measures.attention(group_of(tmp_path, records))
    }
    ours = found["gluon", 1024].over
    assert ours["forward"].value == pytest.approx(math.sqrt(2.0 * 2.2))
    assert ours["backward"].value == 1.0
    assert ours["both"].value == pytest.approx(math.sqrt(6.0 / 5.0 * 6.2 / 5.0))
    assert ours["both"].low < ours["both"].value < ours["both"].high
    assert found["flash", 1024].over["both"].value == pytest.approx(math.sqrt(6.0 / 12.0 * 6.2 / 12.4))
    nothing = found["gluon", 4096], found["manual", 1024], found["cudnn", 1024]
    assert [rung.over for rung in nothing] == [{}, {}, {}], "no peer, no seconds, itself"


def test_attentions_peer_is_the_one_with_most_shapes(tmp_path):
    there = [("math", 1), ("math", 2), ("flash", 1), ("flash", 2), ("cudnn", 1), ("gluon", 1)]
    records = [record(trial("attention", kernel, length=n), samples={"forward_s": [1.0]}) for kernel, n in there]
    assert measures.attention_peer(group_of(tmp_path, records)) == "flash"


def test_max_batch_reports_what_fits_and_what_failed(tmp_path):
    [found] = measures.max_batch(group_of(tmp_path, [max_batch_record("flash", 132)]))
    assert (found.max_batch, found.first_failed, found.peak_allocated) == (132, 136, 132 * 2**30)
    assert (found.limit_gib, found.tries) == (139, 3)


def test_numerics_keeps_every_draw(tmp_path):
    of = trial("attention_numerics", "manual")
    samples = {"error_scale_before": [1e-3, 2e-3], "error_scale_after": [3e-3], "error_sdpa": []}
    [found] = measures.numerics(group_of(tmp_path, [record(of, samples=samples, check={"allclose": False})]))
    assert (found.before, found.after, found.sdpa, found.allclose) == ((1e-3, 2e-3), (3e-3,), (), False)


def test_worst_quantity_is_nearest_its_limit(tmp_path):
    check = checked(("loss", 0.5, 1.0), ("out", 0.03, 0.04), ("padding", 0.0, 0.0), ("dq", 2.0, 9.0))
    records = [record(trial(), check=checked(("loss", 0.1, 1.0))), record(trial(seed=1), check=check)]
    [error] = measures.errors(group_of(tmp_path, records))
    assert (error.quantity, error.ratio) == ("out", pytest.approx(0.75))
    assert error.reference == "manual attention, fp32, same weights"


@pytest.mark.parametrize("quantity", [("padding", 1e-9, 0.0), ("dq", None, 0.1)])
def test_error_without_ratio_is_the_worst(tmp_path, quantity):
    failed = record(trial(attention="flex"), outcome="failed_check", check=checked(("dk", 5.0, 1.0), quantity))
    fine = record(trial(), check=checked(("loss", 0.1, 1.0)))
    first, second = measures.errors(group_of(tmp_path, [fine, failed]))
    assert (first.cell.trial.attention, first.quantity, first.ratio) == ("flex", quantity[0], None)
    assert second.ratio == pytest.approx(0.1)


def test_trial_that_was_not_checked_has_no_error(tmp_path):
    assert measures.errors(group_of(tmp_path, [record(trial()), record(trial(seed=1), check={"quantities": []})])) == ()


def test_peaks_are_those_of_the_records_gpu(tmp_path):
    assert hardware.peak(group_of(tmp_path, [record(trial())]).gpu, "bf16") == 989.5e12
