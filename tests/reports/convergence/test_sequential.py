import math

import numpy as np
import pytest
from scipy.special import ndtr, stdtrit

from te_bench.reports.convergence.sequential import spent, t_levels


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
