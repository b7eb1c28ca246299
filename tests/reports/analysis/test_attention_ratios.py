import math

import pytest
from journals import attention_records, record, result_of, trial


def test_attention_rates_by_shape(tmp_path):
    steps = result_of(tmp_path, attention_records()).attention.times
    assert [r.configuration.trial.attention for r in steps[:4]] == ["mem_efficient", "flash", "cudnn", "manual"]
    flash = steps[1]
    assert (flash.forward_flop_per_s, flash.backward_flop_per_s) == (pytest.approx(240e12), pytest.approx(192e12))
    assert steps[3].forward_flop_per_s is None


def test_attention_is_compared_with_a_peer_seed_by_seed(tmp_path):
    def measured(kernel, seed, forward, backward, **problem):
        samples = {"forward_s": [forward] * 3, "backward_s": [backward] * 3}
        return record(trial("attention", kernel, seed=seed, **problem), samples=samples)

    records = [measured(kernel, seed, *figures) for kernel, times in {
        "flash": ((4.0, 8.0), (4.4, 8.0)), "cudnn": ((2.0, 4.0), (2.2, 4.0)), "gluon": ((1.0, 4.0), (1.0, 4.0)),
    }.items() for seed, figures in enumerate(times)]  # fmt: skip
    records += [measured("gluon", 0, 1.0, 1.0, length=4096), record(trial("attention", "manual"), outcome="oom")]
    times = result_of(tmp_path, records).attention.times
    found = {(t.attention, t.problem["length"]): one for one in times if (t := one.configuration.trial)}
    ours = found["gluon", 1024].speedups
    assert ours["forward"].value == pytest.approx(math.sqrt(2.0 * 2.2))
    assert ours["backward"].value == 1.0
    assert ours["both"].value == pytest.approx(math.sqrt(6.0 / 5.0 * 6.2 / 5.0))
    assert ours["both"].low < ours["both"].value < ours["both"].high
    assert found["flash", 1024].speedups["both"].value == pytest.approx(math.sqrt(6.0 / 12.0 * 6.2 / 12.4))
    nothing = found["gluon", 4096], found["manual", 1024], found["cudnn", 1024]
    assert [step.speedups for step in nothing] == [{}, {}, {}], "no peer, no seconds, itself"


def test_attentions_peer_is_the_one_with_most_shapes(tmp_path):
    there = [("math", 1), ("math", 2), ("flash", 1), ("flash", 2), ("cudnn", 1), ("gluon", 1)]
    records = [record(trial("attention", kernel, length=n), samples={"forward_s": [1.0]}) for kernel, n in there]
    assert result_of(tmp_path, records).attention.peer == "flash"


def test_numerics_keeps_every_draw(tmp_path):
    of = trial("attention_numerics", "manual")
    samples = {"error_scale_before": [1e-3, 2e-3], "error_scale_after": [3e-3], "error_sdpa": []}
    [found] = result_of(tmp_path, [record(of, samples=samples, check={"allclose": False})]).scaling_errors
    assert (found.before, found.after, found.sdpa, found.allclose) == ((1e-3, 2e-3), (3e-3,), (), False)
