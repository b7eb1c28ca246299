import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from te_bench.reports.convergence import equivalence, power
from te_bench.reports.convergence.equivalence import Verdict, compare, judge, outliers

# Final validation losses of one 124M GPT training script, seeds differing: modded-nanogpt (MIT, Keller Jordan and others),
# records/track_1_short/2024-12-10_MFUTweaks, the first ten and the next ten.
SPEEDRUN = (
    (3.2752, 3.2776, 3.2798, 3.2758, 3.2796, 3.2810, 3.2777, 3.2797, 3.2771, 3.2819),
    (3.2794, 3.2793, 3.2773, 3.2764, 3.2824, 3.2785, 3.2810, 3.2765, 3.2785, 3.2810),
)
SD = 0.0019  # of all 40 of them
MARGIN = 0.003
SIMULATIONS = 2000


@pytest.fixture
def quick(monkeypatch):
    """What is told beside the verdict and has no part in it is left out: it took half of the time."""
    for name in ("seeds_needed", "seeds_beyond", "tost_power", "detectable", "outliers"):
        monkeypatch.setattr(equivalence, name, lambda *_, **__: None)


def at_most(rate, simulations=SIMULATIONS):
    """The most hits that a true rate produces in 999 of 1,000 such simulations."""
    return stats.binom.ppf(0.999, simulations, rate)


def arms(gap=0.0, n=10, seed=0, correlation=0.0, sd=SD):
    draw = np.random.default_rng(seed)
    control = draw.normal(size=n)
    candidate = correlation * control + math.sqrt(1 - correlation**2) * draw.normal(size=n)
    return 3.28 + gap + sd * candidate, 3.28 + sd * control


def shifted(gaps, control=(3.281, 3.279, 3.283, 3.280, 3.278)):
    return [a + b for a, b in zip(control, gaps, strict=True)], list(control)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("gap", [0.0, 0.002, -0.004])
def test_student_s_interval_stands_beside_and_lies_within(gap, paired):
    candidate, control = arms(gap)
    found = compare(candidate, control, margin=MARGIN, paired=paired)
    if paired:
        gaps = candidate - control
        student = stats.t.interval(0.9, gaps.size - 1, gaps.mean(), stats.sem(gaps))
    else:
        student = stats.ttest_ind(candidate, control, equal_var=False).confidence_interval(0.9)
    assert found.t_interval == pytest.approx(tuple(student))
    assert found.interval[0] < found.t_interval[0] < found.t_interval[1] < found.interval[1]


def test_p_values_are_the_levels_at_which_the_interval_touches_the_margin():
    candidate, control = arms(0.0008)
    found = compare(candidate, control, margin=MARGIN)
    assert found.claims.non_inferior < 0.5
    touching = compare(candidate, control, margin=MARGIN, alpha=found.claims.non_inferior).interval
    assert touching[1] == pytest.approx(MARGIN, rel=0.01)
    assert found.claims.inferior > 0.5


def test_the_pairs_are_described():
    candidate, control = arms(0.001, n=6, correlation=0.9)
    found = compare(candidate, control, margin=MARGIN)
    gaps = candidate - control
    assert (found.n, found.gap, found.sd) == (6, pytest.approx(gaps.mean()), pytest.approx(gaps.std(ddof=1)))
    assert found.correlation == pytest.approx(np.corrcoef(candidate, control)[0, 1])
    assert found.power == pytest.approx(power.power(6, found.sd, MARGIN))
    assert found.seeds_needed == power.seeds_needed(found.sd, MARGIN)
    assert found.seeds_needed_at_gap == power.seeds_needed(found.sd, MARGIN, gap=found.gap)
    assert power.power(6, found.sd, found.detectable) == pytest.approx(0.8, abs=0.01)


def test_unpaired_takes_arms_of_unequal_lengths_and_knows_no_correlation():
    candidate, control = arms(n=8)[0], arms(n=5, seed=1)[1]
    found = compare(candidate, control, margin=MARGIN, paired=False)
    assert (found.n, found.n_control, found.correlation) == (8, 5, None)
    assert found.sd == pytest.approx(math.hypot(candidate.std(ddof=1), control.std(ddof=1)))


def test_verdicts():
    noise = np.array([-2, -1, 0, 1, 2]) * 1e-4
    assert compare(*shifted(noise), margin=MARGIN).verdict is Verdict.EQUIVALENT
    assert compare(*shifted(noise - 0.003), margin=MARGIN).verdict is Verdict.NON_INFERIOR
    assert compare(*shifted(noise + 0.004), margin=MARGIN).verdict is Verdict.INFERIOR
    unclear = compare(*shifted(noise + 0.003), margin=MARGIN)
    assert unclear.verdict is Verdict.INCONCLUSIVE
    assert unclear.seeds_needed is not None
    noisy = compare(*shifted(40 * noise + 0.0005), margin=MARGIN)
    assert noisy.verdict is Verdict.INCONCLUSIVE  # no significant difference is no equivalence
    assert f"{noisy.seeds_needed_at_gap} to " in noisy.reason  # the spread of 5 pairs is itself uncertain


def test_real_seeds_against_themselves_are_equivalent_and_a_gap_of_the_margin_is_not():
    assert compare(*SPEEDRUN, margin=MARGIN, paired=False).verdict is Verdict.EQUIVALENT
    worse = [loss + MARGIN for loss in SPEEDRUN[0]]
    assert compare(worse, SPEEDRUN[1], margin=MARGIN, paired=False).verdict is Verdict.INCONCLUSIVE


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(-50, 50), min_size=5, max_size=5).filter(lambda g: len(set(g)) > 1),
    shift=st.floats(-0.005, 0.005),
)
def test_equivalent_means_that_the_interval_lies_within_the_margin(gaps, shift):
    control = (3.281234567, 3.279345678, 3.283456789, 3.280567891, 3.278678912)
    found = compare(*shifted(np.array(gaps) * 1e-4 + shift, control), margin=MARGIN)
    assume(found.interval is not None)  # two runs may end on one loss
    low, high = found.interval
    assert (found.verdict is Verdict.EQUIVALENT) == (low >= -MARGIN and high <= MARGIN)
    assert (found.verdict is Verdict.INFERIOR) == (low >= MARGIN)
    assert (found.verdict is Verdict.NON_INFERIOR) == (high <= MARGIN and low < -MARGIN)


def test_the_interval_leans_where_the_gaps_do():
    found = compare(*shifted(np.array([0, 0, 1, 1, 30]) * 1e-4), margin=MARGIN)
    low, high = found.interval
    assert high - found.gap > 1.4 * (found.gap - low)  # one gap far up: the mean may lie further up


def test_a_gap_far_from_the_others_is_told():
    assert outliers(np.array([0.1, -0.2, 0.3, 0.0, -0.1, 0.2, 5.0]) * 1e-3) == (6,)
    assert outliers([1.0, -1.0, 0.5]) == ()
    draw = np.random.default_rng(5).normal(size=(2000, 8))
    assert sum(bool(outliers(row)) for row in draw) <= at_most(0.01)


@pytest.mark.parametrize("paired", [True, False])
def test_copied_runs_under_different_seeds_carry_no_verdict(paired):
    draw = np.random.default_rng(2)
    candidate, control = (list(np.round(3.28 + 1e-4 * draw.normal(size=3), 5)) * 4 for _ in range(2))
    found = compare(candidate, control, margin=MARGIN, paired=paired)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "candidate: runs 1 and 4 ended on the very same loss" in found.reason
    once = list(3.28 + 1e-4 * draw.normal(size=6))
    assert compare(once, [*once[:5], once[0]], margin=MARGIN, paired=paired).reason.startswith("control: runs 1 and 6")
    # of ten losses with four decimals two may well meet
    rounded = [list(np.round(arm, 4)) for arm in SPEEDRUN]
    assert compare(*rounded, margin=MARGIN, paired=paired).interval is not None


def test_two_pairs_are_too_few_for_any_claim():
    for gap in (0.0, 0.1):
        found = compare([3.281 + gap, 3.279 + gap], [3.2811, 3.2789], margin=MARGIN)
        assert (found.verdict, found.interval) == (Verdict.INCONCLUSIVE, None)
        assert "3 are needed at least" in found.reason


def test_gaps_that_do_not_vary_carry_no_verdict():
    found = compare(*shifted(np.full(5, 0.001)), margin=MARGIN)
    assert (found.verdict, found.interval, found.sd) == (Verdict.INCONCLUSIVE, None, 0.0)
    assert "do not vary" in found.reason
    assert judge({"x": shifted(np.full(5, 0.001))}, margin=MARGIN)["x"].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("paired", [True, False])
def test_an_arm_of_one_run_counted_several_times_carries_no_verdict(paired):
    copies, varied = [3.28] * 5, [3.2801, 3.2799, 3.2802, 3.2798, 3.2800]
    for candidate, control in ((copies, varied), (varied, copies)):
        found = compare(candidate, control, margin=MARGIN, paired=paired)
        assert (found.verdict, found.interval, found.claims.equivalent) == (Verdict.INCONCLUSIVE, None, 1.0)
        assert "all 5 runs of a configuration ended on the very same loss" in found.reason


def test_a_gap_beyond_the_margin_says_how_many_seeds_would_show_that():
    noise = np.array([-2, -1, 0, 1, 2]) * 1e-3
    worse = compare(*shifted(noise + 0.004), margin=MARGIN)
    assert worse.verdict is Verdict.INCONCLUSIVE
    assert worse.seeds_needed_at_gap == power.seeds_beyond(worse.sd, worse.gap - MARGIN)
    assert "too few seeds to tell whether the gap is more than 0.003" in worse.reason
    assert re.search(rf"{worse.seeds_needed_at_gap} to \d+ seeds each would show it INFERIOR", worse.reason)
    [judged] = judge({"x": shifted(noise + 0.004)}, margin=MARGIN).values()
    assert judged.seeds_needed == worse.seeds_needed_at_gap
    better = compare(*shifted(10 * noise - 0.004), margin=MARGIN)
    assert better.verdict is Verdict.INCONCLUSIVE
    assert better.seeds_needed_at_gap == power.seeds_beyond(better.sd, MARGIN - better.gap)
    assert re.search(rf"{better.seeds_needed_at_gap} to \d+ seeds each would show it NON_INFERIOR", better.reason)


@pytest.mark.parametrize(("decimals", "told"), [(2, True), (3, False)])
def test_losses_that_are_equal_as_rounded_prove_no_equality_within_a_margin_that_rounding_hides(decimals, told):
    ended = [round(x, decimals) for x in (3.281, 3.312, 3.254)]
    found = compare(ended, ended, margin=MARGIN)
    assert (found.verdict is Verdict.INCONCLUSIVE) is told
    assert ("losses of 2 decimals hide a gap of the margin 0.003" in found.reason) is told


@pytest.mark.parametrize("alpha", [1e-6, 0.0, 0.5])
def test_an_error_rate_that_no_table_holds_is_refused(alpha):
    with pytest.raises(ValueError, match=r"give an error rate from 1e-05 to below 0.5"):
        judge({"x": ([3.2, 3.3, 3.4], [3.2, 3.31, 3.4])}, margin=MARGIN, alpha=alpha)


def test_identical_runs_are_equivalent_only_over_seeds_that_differ():
    control = [3.281, 3.279, 3.283]
    assert compare(control, control, margin=MARGIN).verdict is Verdict.EQUIVALENT
    assert judge({"x": (control, control)}, margin=MARGIN)["x"].verdict is Verdict.EQUIVALENT
    assert compare([3.28] * 3, [3.28] * 3, margin=MARGIN).verdict is Verdict.INCONCLUSIVE
    assert compare([3.28] * 3, [3.28] * 3, margin=MARGIN, paired=False).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("control", "settings", "message"),
    [
        ([1, 2], {"margin": 0}, "margin 0: give"),
        ([1, 2], {"margin": math.inf}, "margin inf"),
        ([1, 2], {"margin": 1, "alpha": 0.5}, r"alpha 0\.5: give"),
        ([1, 2], {"margin": 1, "alpha": 0}, "alpha 0: give"),
        ([1, 1e99], {"margin": 1}, r"control, run 2 of 2: 1e\+99 is not a loss; write nan"),
    ],
)
def test_what_cannot_be_judged_is_told(control, settings, message):
    with pytest.raises(ValueError, match=message):
        judge({"x": ([1, 2], control)}, **settings)


def test_over_the_candidates_p_values_are_those_of_holm_by_statsmodels():
    gaps = {"a": 0, "b": 0.001, "c": 0.0015, "d": 0.0015, "e": 0.006}
    family = {name: arms(gap, seed=seed) for seed, (name, gap) in enumerate(gaps.items())}
    family["as b"] = arms(0.001, seed=1)
    found = judge(family, margin=MARGIN)
    for claim in ("equivalent", "non_inferior", "inferior"):
        alone = [getattr(compare(*pair, margin=MARGIN).claims, claim) for pair in family.values()]
        adjusted = multipletests(alone, method="holm")[1]
        assert [getattr(judged.claims, claim) for judged in found.values()] == pytest.approx(list(adjusted), rel=1e-12)
    assert {judged.family for judged in found.values()} == {6}


def test_a_claim_that_does_not_outlive_holm_is_inconclusive_and_says_so():
    candidate, control = arms(0.001, n=10)
    # p = 0.03: below 0.05, above 0.05 / 4
    margin = max(map(abs, compare(candidate, control, margin=1.0, alpha=0.03).interval))
    alone = compare(candidate, control, margin=margin)
    assert alone.verdict is Verdict.EQUIVALENT
    others = {name: arms(margin, seed=seed) for seed, name in enumerate("bcd", start=20)}
    found = judge({"a": (candidate, control), **others}, margin=margin)["a"]
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason.startswith("EQUIVALENT on its own, not after Holm over 4 candidates")
    assert found.seeds_needed == power.seeds_needed(alone.sd, margin, gap=alone.gap, alpha=0.0125)


def test_the_primary_candidate_has_all_of_alpha_and_the_others_pass_only_after_it():
    """Of EQUIVALENT and NON_INFERIOR; INFERIOR, which contradicts neither, is Holm's over all."""
    margin, gaps = MARGIN, {"a": 0, "b": 0.001, "c": 0.006}
    family = {name: arms(gap, seed=seed) for seed, (name, gap) in enumerate(gaps.items())}
    alone = {name: compare(*pair, margin=margin).claims for name, pair in family.items()}
    plain = judge(family, margin=margin)
    for primary in family:
        found = judge(family, margin=margin, primary=primary)
        first, own = alone[primary], found[primary]
        assert (own.claims.equivalent, own.claims.non_inferior) == (first.equivalent, first.non_inferior)
        assert own.family == 1
        rest = judge({name: pair for name, pair in family.items() if name != primary}, margin=margin)
        for name, other in rest.items():
            assert found[name].claims.equivalent == max(other.claims.equivalent, first.equivalent)
            assert found[name].claims.non_inferior == max(other.claims.non_inferior, first.non_inferior)
            assert found[name].family == 2
        assert all(found[name].claims.inferior == plain[name].claims.inferior for name in family)
    assert judge(family, margin=margin, primary="b")["a"].verdict is Verdict.NON_INFERIOR
    assert judge(family, margin=margin, primary="c")["a"].verdict is Verdict.INCONCLUSIVE
    stays = judge(family, margin=margin, primary="b", diverged={"b": "nan"})["a"]
    assert (stays.verdict, stays.claims.equivalent) == (Verdict.INCONCLUSIVE, 1)


def test_power_and_what_it_could_have_shown_are_those_of_holm_s_hardest_step():
    """The share of studies in which a candidate passes at rank 1 of its family; the primary one has the whole of alpha."""
    family = {name: arms(seed=seed) for seed, name in enumerate("abcd")}
    alone = {name: compare(*pair, margin=MARGIN) for name, pair in family.items()}
    for primary, alpha in (
        (None, dict.fromkeys("abcd", 0.05 / 4)),
        ("a", {"a": 0.05, **dict.fromkeys("bcd", 0.05 / 3)}),
    ):
        for name, judged in judge(family, margin=MARGIN, primary=primary).items():
            sd, found = alone[name].sd, judged.comparison
            assert found.power == pytest.approx(power.power(10, sd, MARGIN, alpha=alpha[name]))
            assert power.power(10, sd, found.detectable, alpha=alpha[name]) == pytest.approx(0.8, abs=0.01)
            assert found.seeds_needed == power.seeds_needed(sd, MARGIN, alpha=alpha[name])
    [one] = judge({"a": family["a"]}, margin=MARGIN).values()
    assert one.comparison == alone["a"]


def test_a_candidate_that_waits_for_the_primary_one_says_so_and_asks_for_no_seeds_of_its_own():
    good, bad = arms(seed=0, sd=SD / 4), arms(MARGIN, seed=2)
    found = judge({"a": good, "b": bad}, margin=MARGIN, primary="b")
    assert compare(*good, margin=MARGIN).verdict is Verdict.EQUIVALENT
    assert (found["a"].verdict, found["a"].seeds_needed) == (Verdict.INCONCLUSIVE, None)
    assert found["a"].reason.startswith("would be EQUIVALENT, but only if b, which is judged first, is too: ends")
    # of its own it has too few, and the first one must pass besides
    wide = arms(seed=3, sd=2 * SD)
    too_few = judge({"a": wide, "b": bad}, margin=MARGIN, primary="b")["a"]
    assert too_few.seeds_needed > 10
    assert too_few.reason.endswith("if that is its true gap; and it passes only where b does, which is judged first")


def test_seeds_to_show_the_primary_candidate_inferior_are_holm_s_over_all():
    """As its INFERIOR is; what it passes by has the whole of alpha."""
    worse, good = arms(1.7 * MARGIN, seed=2), {name: arms(seed=seed) for seed, name in enumerate("bcdefg", start=10)}
    alone = compare(*worse, margin=MARGIN)
    margin = alone.gap - 1.01 * (alone.gap - alone.interval[0])  # shown above it on its own, by little
    alone = compare(*worse, margin=margin)
    assert alone.verdict is Verdict.INFERIOR
    found = judge({"a": worse, **good}, margin=margin, primary="a")
    assert found["a"].verdict is Verdict.INCONCLUSIVE
    assert found["a"].reason.startswith("INFERIOR on its own, not after Holm over 7 candidates")
    assert found["a"].seeds_needed == power.seeds_beyond(alone.sd, alone.gap - margin, alpha=0.05 / 7)
    other = judge({"a": worse, **good}, margin=margin, primary="b")["a"]
    assert other.seeds_needed == found["a"].seeds_needed
    passes = judge({"a": worse, **good}, margin=2 * alone.gap, primary="a")["a"]
    assert passes.seeds_needed == power.seeds_needed(alone.sd, 2 * alone.gap, gap=alone.gap, alpha=0.05)


def test_diverged_wins_over_any_losses_and_stays_in_the_family():
    same = shifted(np.array([-2, -1, 0, 1, 2]) * 1e-4)
    diverged = {"a": "2 of 5 runs: the loss is nan at step 30", "c": "no run ended"}
    found = judge({"a": same, "b": same}, margin=MARGIN, diverged=diverged)
    assert (found["a"].verdict, found["a"].reason) == (Verdict.DIVERGED, diverged["a"])
    assert found["c"].verdict is Verdict.DIVERGED
    assert found["a"].comparison is None
    assert found["b"].verdict is Verdict.EQUIVALENT
    assert found["b"].claims.equivalent == pytest.approx(3 * compare(*same, margin=MARGIN).claims.equivalent)
    found = judge({"a": ([math.nan, math.nan], [1, 2])}, margin=1, diverged={"a": "nan"})  # nor need they be numbers
    assert found["a"].verdict is Verdict.DIVERGED


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("n", [3, 9])
def test_false_equivalence_of_unpaired_arms_at_the_margin_is_at_most_alpha(n):
    """Of pairs test_skewed holds it. By a spread so small that the power elsewhere is 1, the rate comes nearest to alpha."""
    wrong = {Verdict.EQUIVALENT, Verdict.NON_INFERIOR}
    drawn = (arms(MARGIN, n=n, seed=seed, sd=SD / 4) for seed in range(SIMULATIONS))
    runs = [compare(*pair, margin=MARGIN, paired=False) for pair in drawn]
    hits = sum(run.verdict in wrong for run in runs)
    assert hits <= at_most(0.05)
    assert hits >= stats.binom.ppf(0.001, SIMULATIONS, 0.005)  # and not for never claiming
    # INFERIOR is wrong at the margin too, in its own direction
    assert sum(run.verdict is Verdict.INFERIOR for run in runs) <= at_most(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("paired", "correlation"), [(True, 0.7), (False, 0.0)])
def test_power_is_as_planned_within_three_points(paired, correlation):
    sd = power.gap_sd(SD, correlation)
    n = power.seeds_needed(sd, MARGIN, paired=paired)
    drawn = (arms(n=n, seed=seed, correlation=correlation) for seed in range(SIMULATIONS))
    runs = [compare(*pair, margin=MARGIN, paired=paired) for pair in drawn]
    reached = sum(run.verdict is Verdict.EQUIVALENT for run in runs) / SIMULATIONS
    assert reached == pytest.approx(power.power(n, sd, MARGIN, paired=paired), abs=0.03)
    assert reached > 0.77


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("primary", [None, "0", "2"])
@pytest.mark.parametrize("gaps", [(MARGIN,) * 4, (MARGIN, MARGIN, 0, 0)])
def test_the_family_s_error_over_four_recipes_is_at_most_alpha(gaps, primary):
    """One control shared by four recipes; a recipe diverged on the way is never called anything else."""
    wrong = broken = 0
    for seed in range(SIMULATIONS):
        draw = np.random.default_rng(seed)
        control = 3.28 + SD * draw.normal(size=9)
        # close pairs, so that the test has power and every recipe at the margin its alpha
        family = {str(i): (control + gap + SD / 4 * draw.normal(size=9), control) for i, gap in enumerate(gaps)}
        found = judge(family, margin=MARGIN, primary=primary)
        good = (Verdict.EQUIVALENT, Verdict.NON_INFERIOR)
        wrong += any(found[str(i)].verdict in good for i, gap in enumerate(gaps) if gap)
        if seed % 10 == 0:
            broken += judge(family, margin=MARGIN, diverged={"3": "nan"})["3"].verdict is Verdict.DIVERGED
    assert wrong <= at_most(0.05)
    assert wrong >= 0.0005 * SIMULATIONS  # never claiming gives 0
    assert broken == SIMULATIONS // 10
