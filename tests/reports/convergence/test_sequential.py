import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, stdtrit

from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.sequential import decide, looks, spent, t_levels

SD = 0.0019 * math.sqrt(2)
MARGIN = 0.003


def rejected(at, levels, simulations, seed=0):
    """Share of simulated true null hypotheses, normal gaps around the margin, rejected by each look."""
    gaps = np.random.default_rng(seed).normal(size=(simulations, at[-1]))
    gone, shares = np.zeros(simulations, dtype=bool), []
    for n, level in zip(at, levels, strict=True):
        first = gaps[:, :n]
        t = first.mean(axis=1) * math.sqrt(n) / first.std(axis=1, ddof=1)
        gone |= t < stdtrit(n - 1, level)
        shares.append(gone.mean())
    return np.array(shares)


#: Five equal looks at one-sided 0.025: Lan-DeMets' O'Brien-Fleming bounds, as gsDesign and Reboussin's program give them.
KNOWN_VARIANCE = ndtr([-4.8769, -3.3570, -2.6803, -2.2898, -2.0310])


def test_of_many_seeds_the_levels_are_the_published_ones_of_a_known_variance():
    assert t_levels((16, 32, 48, 64, 80), 0.025) == pytest.approx(KNOWN_VARIANCE, rel=0.02)


def test_one_look_is_a_fixed_test():
    assert t_levels((8,), 0.05) == (pytest.approx(0.05),)


@pytest.mark.parametrize("at", [(3, 4, 5), (3, 4, 5, 6, 7, 8), (4, 8, 12)])
@pytest.mark.parametrize("alpha", [0.05, 0.0125])
def test_t_levels_spend_alpha_exactly_at_few_seeds(at, alpha):
    simulations = 200_000
    shares = rejected(at, t_levels(at, alpha), simulations)
    budget = spent(np.array(at) / at[-1], alpha)
    assert np.all(np.abs(shares - budget) <= 4 * np.sqrt(budget * (1 - budget) / simulations) + 1e-5)


def test_looks():
    assert looks(3, 12) == (3, 5, 8, 10, 12)
    assert looks(3, 5) == (3, 4, 5)
    assert looks(5, 5) == (5,)
    for wrong in ((1, 5), (6, 5)):
        with pytest.raises(ValueError, match="looks from"):
            looks(*wrong)


def test_it_waits_for_the_next_look_and_ends_at_the_last():
    gaps = [0.0021, 0.0041, 0.0011, 0.0032, 0.0043, 0.0029, 0.0019, 0.0034]
    assert decide(gaps[:2], looks=(3, 6, 8), margin=MARGIN) is None
    assert decide(gaps[:5], looks=(3, 6, 8), margin=MARGIN) == decide(gaps[:3], looks=(3, 6, 8), margin=MARGIN)
    assert decide(gaps, looks=(3, 6, 8), margin=MARGIN).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [(0, Verdict.EQUIVALENT), (0.02, Verdict.INFERIOR), (-0.02, Verdict.NON_INFERIOR)],
)
def test_what_is_plain_stops_early_and_later_gaps_do_not_undo_it(gap, verdict):
    gaps = gap + 1e-5 * np.array([1, -2, 1, 0, 2, -1, 1, -1])
    early = decide(gaps[:4], looks=(4, 6, 8), margin=MARGIN)
    assert (early.verdict, early.n) == (verdict, 4)
    assert decide([*gaps[:4], 1, -1, 1, -1], looks=(4, 6, 8), margin=MARGIN) == early


def test_non_inferior_waits_for_the_last_seed_where_equivalence_may_come_yet():
    gaps = -MARGIN + 1e-4 * np.array([1, -2, 1, 0, 2, -1, 1, -2])
    assert decide(gaps[:6], looks=(4, 6, 8), margin=MARGIN) is None
    assert decide(gaps, looks=(4, 6, 8), margin=MARGIN).verdict is Verdict.NON_INFERIOR


def test_what_was_shown_stays_shown():
    gaps = [-0.0025, -0.0022, -0.0028, -0.0025, 0.01, -0.01, 0.012, -0.006]
    assert decide(gaps[:4], looks=(4, 8), margin=MARGIN) is None
    assert decide(gaps, looks=(4, 8), margin=MARGIN).verdict is Verdict.NON_INFERIOR
    assert decide(gaps, looks=(8,), margin=MARGIN).verdict is Verdict.INCONCLUSIVE


def test_seeds_that_would_not_help_are_not_run():
    gaps = MARGIN + 1e-3 * np.array([1, -1, 1, -1, 1, -1, 1, -1])
    stopped = decide(gaps, looks=(4, 8, 10), margin=MARGIN)
    assert (stopped.verdict, stopped.n) == (Verdict.INCONCLUSIVE, 8)
    assert "the other 2 seeds would hardly" in stopped.reason


def test_gaps_without_spread():
    assert decide([0.0] * 3, looks=(3, 5), margin=MARGIN).verdict is Verdict.EQUIVALENT
    assert decide([0.001] * 3, looks=(3, 5), margin=MARGIN) is None
    assert decide([0.001] * 5, looks=(3, 5), margin=MARGIN).verdict is Verdict.INCONCLUSIVE


def test_what_cannot_be_decided_is_told():
    with pytest.raises(ValueError, match="gap 2 of 3 is nan"):
        decide([0, math.nan, 0], looks=(3, 5), margin=MARGIN)
    with pytest.raises(ValueError, match="margin -1"):
        decide([0, 1, 0], looks=(3, 5), margin=-1)
    for at in ((), (2, 4), (5, 3)):
        with pytest.raises(ValueError, match="numbers that rise"):
            decide([0, 1, 0], looks=at, margin=MARGIN)
    for at in ((), (1, 4), (5, 3)):
        with pytest.raises(ValueError, match="numbers that rise"):
            t_levels(at)


@pytest.mark.slow
@pytest.mark.parametrize("at", [(3, 4, 5), (3, 4, 5, 6, 7, 8), (3, 5, 8, 10, 12)])
def test_the_error_rate_over_all_looks_is_at_most_alpha(at):
    simulations = 2000
    most = stats.binom.ppf(0.999, simulations, 0.05)
    # a small spread takes the other bound out of play, so that the rate is alpha itself
    gaps = MARGIN / 10 * np.random.default_rng(7).normal(size=(simulations, at[-1]))
    for sign, wrong in (
        (1, {Verdict.EQUIVALENT, Verdict.NON_INFERIOR}),
        (1, {Verdict.INFERIOR}),
        (-1, {Verdict.EQUIVALENT}),
    ):
        found = [decide(row + sign * MARGIN, looks=at, margin=MARGIN) for row in gaps]
        assert sum(decision.verdict in wrong for decision in found) <= most


@pytest.mark.slow
def test_it_saves_seeds_for_little_power():
    gaps = SD / 1.7 * np.random.default_rng(8).normal(size=(1000, 12))
    early, late = ([decide(row, looks=at, margin=MARGIN) for row in gaps] for at in ((4, 6, 8, 10, 12), (12,)))
    assert np.mean([decision.n for decision in early]) < 10
    shown = [np.mean([decision.verdict is Verdict.EQUIVALENT for decision in found]) for found in (early, late)]
    assert 0.9 < shown[1] < shown[0] + 0.06
