import math

import gates_at_once
import numpy as np
import pytest
from scipy import stats

from te_bench.gate import decision as gate
from te_bench.gate.decision import FAMILY, GateVerdict, decide

LOOKS = (6, 10, 15, 20)
WIGGLE = np.array([0.004, -0.006, 0.001, 0.003, -0.002, 0.005, -0.004, 0.0, 0.002, -0.003])  # mean 0


def ratios(slower: float, scale: float = 1.0, n: int = 10) -> list[float]:
    """n ratios around 1 + slower, in another order for each `slower`."""
    logs = np.resize(np.roll(WIGGLE, round(1000 * slower)), n)
    return list(np.exp(math.log1p(slower) + scale * logs))


def verdicts(found) -> dict[str, GateVerdict]:
    return {name: one.verdict for name, one in found.trials.items()}


def test_slower_the_same_faster_and_undecided():
    found = decide({"slow": ratios(0.05), "same": ratios(0.0), "fast": ratios(-0.1), "near": ratios(0.0201)})
    assert [str(one) for one in verdicts(found).values()] == ["REGRESSION", "PASS", "IMPROVED", "INCONCLUSIVE"]
    slow, same, fast, near = found.trials.values()
    assert slow.low > 1.02
    assert same.low < 1 < same.high < 1.02
    assert fast.high < 1
    assert near.low < 1.02 < near.high
    assert slow.ratio == pytest.approx(1.05, abs=0.002)
    assert found.more == {}  # one look: nothing more was planned


def test_the_margin_decides_what_is_slow():
    data = {"a": ratios(0.05)}
    assert decide(data, margin=0.1).trials["a"].verdict is GateVerdict.PASS
    assert decide(data, margin=0.04).trials["a"].verdict is GateVerdict.REGRESSION
    assert decide(data).family is None


def test_the_smallest_slow_down_found_is_always_told():
    quiet, loud = (decide({"a": ratios(0.0, scale)}, margin=0.02).trials["a"] for scale in (1, 8))
    assert 0.02 < quiet.detectable < 0.03
    assert loud.detectable - 0.02 == pytest.approx(8 * (quiet.detectable - 0.02), rel=0.05)
    assert loud.verdict is GateVerdict.INCONCLUSIVE
    assert loud.needed > 10
    assert f"{loud.needed} pairs would decide it" in loud.reason


def test_the_pairs_needed_are_bounded_by_mde():
    near = {"a": ratios(0.0195, 4)}
    needed = [decide(near, mde=mde).trials["a"].needed for mde in (0.002, 0.01, None)]
    assert needed[0] > 10 * needed[1] > 10 * 2
    assert needed[1] > needed[2]


def test_undecided_trials_ask_for_pairs_up_to_their_next_look():
    data = {"slow": ratios(0.2, n=12), "near": ratios(0.021, n=12), "new": ratios(0.0, n=1), "none": []}
    found = decide(data, looks=LOOKS)
    assert found.more == {"near": 3, "new": 5, "none": 6}
    assert found.trials["slow"].pairs == 10  # the look that decided
    last = decide({"near": ratios(0.021, n=20)}, looks=LOOKS)
    assert (verdicts(last), last.more) == ({"near": GateVerdict.INCONCLUSIVE}, {})


def test_rounds_without_a_pair_do_not_count():
    data = ratios(0.05, n=6)
    with_none = [*data[:2], None, *data[2:5], None]
    found = decide({"a": with_none}, looks=LOOKS).trials["a"]
    assert (found.pairs, found.more) == (5, 1)
    again, whole = (decide({"a": pairs}, looks=LOOKS).trials["a"].ratio for pairs in ([*with_none, data[5]], data))
    assert again == pytest.approx(whole)


def test_between_looks_nothing_is_decided_and_later_pairs_do_not_undo_a_verdict():
    data = ratios(0.2, n=6)
    decided = decide({"a": data}, looks=LOOKS)
    assert verdicts(decided) == {"a": GateVerdict.REGRESSION}
    assert verdicts(decide({"a": data[:5]}, looks=LOOKS)) == {"a": GateVerdict.INCONCLUSIVE}
    assert verdicts(decide({"a": [*data, 1.25, 0.9, 1.25]}, looks=LOOKS)) == verdicts(decided)
    assert verdicts(decide({"a": [*data, *[0.9, 1.3] * 7]}, looks=LOOKS)) == {"a": GateVerdict.REGRESSION}


def test_a_trial_that_ends_between_two_looks_is_judged_there():
    data = {"slow": ratios(0.035, n=9), "few": ratios(0.035, n=4), "near": ratios(0.0205, n=9)}
    going_on, ended = (decide(data, looks=LOOKS, ended=ended) for ended in (False, True))
    assert set(verdicts(going_on).values()) == {GateVerdict.INCONCLUSIVE}
    assert verdicts(ended) == verdicts(going_on) | {"slow": GateVerdict.REGRESSION}
    assert [one.pairs for one in ended.trials.values()] == [9, 4, 9]
    # 4 pairs do not reach the first look: nothing is claimed
    for pairs, looks in ((9, (6, 9)), (6, (6,)), (10, (6, 10)), (4, (6, 10))):
        assert gate.looks_until(pairs, (6, 10)) == looks


def test_undecided_trials_that_look_slower_are_suspect():
    # "new" is of too few pairs to suspect it
    data = {"slow": ratios(0.03, 3, n=5), "same": ratios(0.0, 3, n=5), "new": ratios(0.03, n=2)}
    found = decide(data | {"found": ratios(0.5, n=6)}, looks=LOOKS)
    assert found.trials["found"].verdict is GateVerdict.REGRESSION
    assert {name for name, one in found.trials.items() if one.suspect} == {"slow"}
    # by all its pairs, not by those up to its last look
    turned = decide({"a": [*ratios(0.03, 3, n=6), *ratios(-0.1, n=3)]}, looks=LOOKS).trials["a"]
    assert (turned.pairs, turned.ratio > 1.02, turned.suspect) == (6, True, False)


def test_of_two_claims_that_contradict_each_other_slower_counts():
    data = [*ratios(0.0, n=20), *[0.95, 1.3] * 20]  # it passes at 20 pairs, and would not have been run on
    assert verdicts(decide({"a": data[:20]}, looks=(20, 60))) == {"a": GateVerdict.PASS}
    assert verdicts(decide({"a": data}, looks=(20, 60))) == {"a": GateVerdict.REGRESSION}


def test_early_looks_claim_only_what_is_overwhelming():
    slow = ratios(0.035, 1.5, n=6)
    assert verdicts(decide({"a": slow})) == {"a": GateVerdict.REGRESSION}
    assert verdicts(decide({"a": slow}, looks=LOOKS)) == {"a": GateVerdict.INCONCLUSIVE}


def test_a_claim_passes_its_share_of_alpha_on():
    # p of r < 1 + margin between alpha / 4 and alpha: alone among four it passes only once the others have
    weak = ratios(0.0, 5)
    alone = decide({"weak": weak}).trials["weak"]
    assert alone.verdict is GateVerdict.PASS
    others = {name: ratios(slower) for name, slower in (("a", 0.0), ("b", 0.001), ("c", -0.001))}
    assert verdicts(decide({"weak": weak, **others}))["weak"] is GateVerdict.PASS
    undecided = {name: ratios(slower) for name, slower in (("a", 0.0201), ("b", 0.0202), ("c", 0.0199))}
    assert verdicts(decide({"weak": weak, **undecided}))["weak"] is GateVerdict.INCONCLUSIVE


def test_the_mean_of_the_family_finds_what_no_trial_shows():
    # nine trials whose noise, ten orders of the same numbers but one, nearly cancels
    data = {f"t{i}": list(np.exp(0.035 + 5 * np.roll(WIGGLE, i))) for i in range(9)}
    found = decide(data)
    assert found.family.verdict is GateVerdict.REGRESSION
    assert set(verdicts(found).values()) == {GateVerdict.INCONCLUSIVE}
    # noise that all trials share is no evidence nine times over
    together = {f"t{i}": list(np.exp(0.035 + 5 * WIGGLE)) for i in range(9)}
    assert decide(together).family.verdict is GateVerdict.INCONCLUSIVE


def test_the_mean_passes_when_every_trial_does_and_asks_for_nothing():
    data = {"early": ratios(0.0, 0.2, n=6), "late": ratios(0.0, 2, n=20)}
    found = decide(data, looks=LOOKS)
    assert verdicts(found) == {"early": GateVerdict.PASS, "late": GateVerdict.PASS}
    assert found.family.verdict is GateVerdict.PASS
    undecided = decide({**data, "late": ratios(0.0205, 2, n=15)}, looks=LOOKS)
    assert undecided.more == {"late": 5}
    assert undecided.family.verdict is GateVerdict.INCONCLUSIVE


def test_rounds_in_which_a_trial_has_no_ratio_are_none_of_the_family_s():
    data = {"a": [1.0, None, 1.1, 1.2], "b": [1.0, 1.0, None, 0.9]}
    family = decide(data).family
    assert family.pairs == 2
    assert family.ratio == pytest.approx(math.sqrt(math.sqrt(1.2 * 0.9)))


def test_the_same_records_twice_are_no_pass():
    found = decide({"a": [1.0] * 8}).trials["a"]
    assert found.verdict is GateVerdict.INCONCLUSIVE
    assert "same records twice" in found.reason
    assert found.low is found.high is found.detectable is None


def test_pairs_far_apart_at_an_early_look_do_not_overflow():
    apart = [1.0, 3e3, 1.0, 1e-4, 2.0]
    found = decide({"a": apart, "b": ratios(0.0, n=5)}, looks=(5, 60)).trials["a"]
    assert (found.low, found.high, found.detectable) == (None, None, None)


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_fewer_than_five_pairs_claim_nothing(n):
    # with two speeds a process, as memory is laid out, all of n pairs are slow by chance in 4^-n of cases
    found = decide({"a": ratios(0.5, 0.01, n=n)}).trials["a"]
    assert (found.verdict, found.pairs) == (GateVerdict.INCONCLUSIVE, n)
    assert "at least 5" in found.reason
    assert decide({"a": ratios(0.5, 0.01, n=5)}).trials["a"].verdict is GateVerdict.REGRESSION


def test_a_trial_that_is_called_as_the_family_is_told_to_be_renamed():
    with pytest.raises(ValueError, match="rename"):
        decide({FAMILY: [1.0]})


def live(logs: np.ndarray, most: int):
    """A gate of len(logs) trials with time for `most` pairs: which `decide` asks for, suspects first; and the pairs run."""
    have = {f"t{i}": 0 for i in range(len(logs))}
    need = dict.fromkeys(have, gate.SUSPECT_FROM)
    ended = False
    while True:
        if not ended:
            for name, more in need.items():
                have[name] += min(more, most - sum(have.values()))
        found = decide({t: list(np.exp(logs[i, : have[t]])) for i, t in enumerate(have)}, looks=LOOKS, ended=ended)
        if ended or not found.more:
            return found, sum(have.values())
        suspects = {name: more for name, more in found.more.items() if found.trials[name].suspect}
        need = suspects or found.more  # to their next looks at once, where a gate asks after each pair
        ended = sum(have.values()) == most


def simulated(kind: str, slower: list[float], *, share: float = 1.0, simulations: int = 2000) -> gates_at_once.Gates:
    """Gates with time for a share of the pairs that all trials could have.

    `decide` agrees on the first 5, and on the first 15 of those that tell something: an error rate is of these.
    """
    rng = np.random.default_rng(13)
    shape = (simulations, len(slower), LOOKS[-1])
    noise = rng.standard_t(3, shape) if kind == "t3" else rng.standard_normal(shape)
    if kind == "contaminated":
        noise = np.where(rng.random(shape) < 0.05, 10 * noise, noise)
    logs, most = 0.015 * noise + np.log1p(slower)[:, None], int(share * len(slower) * LOOKS[-1])
    found = gates_at_once.live(logs, most, looks=LOOKS)
    telling = np.flatnonzero((found.verdicts != GateVerdict.INCONCLUSIVE).any(1))[:15]
    for one in {*range(5), *telling.tolist()}:
        decision, run = live(logs[one], most)
        expected = list(found.verdicts[one]), found.pairs[one]
        assert ([judgement.verdict for judgement in decision.judgements.values()], run) == expected
    return found


def how_many(verdicts: np.ndarray, *which: GateVerdict) -> int:
    """The gates in which any trial or their mean has one of these verdicts."""
    return int(np.isin(verdicts.astype(str), which).any(axis=1).sum())


KINDS = pytest.mark.parametrize("kind", ["normal", "t3", "contaminated"])
MOST = stats.binom.ppf(0.999, 2000, 0.05)


@KINDS
def test_no_change_hardly_ever_alarms_and_mostly_passes(kind):
    found = simulated(kind, [0.0] * 6)
    assert how_many(found.verdicts, GateVerdict.REGRESSION) <= 2
    assert how_many(found.verdicts, GateVerdict.IMPROVED) <= MOST
    # an interval that allows for alike pairs takes 1 in 10 more
    passing = {"normal": 0.96, "t3": 0.78, "contaminated": 0.89}[kind]
    assert 2000 - how_many(found.verdicts, GateVerdict.INCONCLUSIVE) >= passing * 2000
    assert found.pairs.mean() < 6 * 17.5  # of 20: the sequential rule saves


@pytest.mark.parametrize(("kind", "share"), [("normal", 1.0), ("t3", 1.0), ("contaminated", 1.0), ("normal", 0.6)])
def test_trials_at_the_margin_are_claimed_either_way_within_alpha(kind, share):
    found = simulated(kind, [0.02] * 6, share=share)
    assert how_many(found.verdicts, GateVerdict.REGRESSION) <= MOST
    assert how_many(found.verdicts, GateVerdict.PASS, GateVerdict.IMPROVED) <= MOST


@KINDS
def test_one_slow_trial_among_six_is_found(kind):
    found = simulated(kind, [0.05, 0, 0, 0, 0, 0]).verdicts
    assert np.mean(found[:, 0] == GateVerdict.REGRESSION) >= 0.97
    # the five that did not change are claimed slower in no more than alpha
    assert how_many(found[:, 1:-1], GateVerdict.REGRESSION) <= 2
