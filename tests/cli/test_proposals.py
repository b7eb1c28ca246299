"""--budget of a convergence plan: which designs conclude in it, how sure, and by which command."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from in_process import Command, gpus

GPT2 = ("convergence", "--device", "cuda", "--data", "random", "--preset", "gpt2")
FIRST = "delayed scaling E4M3, fused, FP8 head"


@pytest.fixture(autouse=True)
def _on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)


def designs(command: Command, *arguments: object) -> list[dict[str, Any]]:
    done = command("plan", *GPT2, *arguments, "--json")
    assert done.code == 0, done.err
    return list(json.loads(done.out)["designs"])


def planned(command: Command, words: str) -> dict[str, Any]:
    """The plan of a proposed command, which is not refused."""
    said = shlex.split(words)
    assert said[:2] == ["te-bench", "run"]
    assert command("plan", *said[2:]).code == 0
    return dict(json.loads(command("plan", *said[2:], "--json").out))


@pytest.mark.parametrize(("hours", "number"), [(1.5, 1), (2, 2), (3, 3), (5, 3)])
def test_the_proposed_commands_conclude_within_the_budget_as_is_said(
    command: Command, hours: float, number: int
) -> None:
    found = designs(command, "--budget", f"{hours}h")
    assert len(found) == number
    assert [one["power"][2] for one in found] == sorted((one["power"][2] for one in found), reverse=True)
    for one in found:
        plan = planned(command, one["command"])
        assert plan["estimate"]["elapsed_s"] == pytest.approx(one["seconds"])
        assert one["seconds"] <= hours * 3600
        assert (plan["judgement"]["seeds"], len(plan["trials"])) == (one["rounds"], one["runs"])
        assert min(plan["conclusion"][of]["power"] for of in ("alone", "aa")) >= 0.795
        [own] = [option for option in plan["conclusion"]["options"] if option["rounds"] == one["rounds"]]
        assert (own["power"], own["power_of_others"]) == (one["power"], one["power_of_others"])
        recipes = {t["id"] for t in plan["trials"] if t["problem"]["arm"] == "recipe" and not t["seed"]}
        assert one["recipes"] == (FIRST if len(recipes) == 1 else f"7 recipes, {FIRST} first")
        assert ("nothing of the 6 other recipes" in one["shows"]) == (len(recipes) == 1)
        _says_what_the_others_have(one, plan)
        branch = any("branch_at" in trial["problem"] for trial in plan["trials"])
        assert ("of FP8 before" in one["shows"]) == ("(from step 1,200 of 2,035)" in one["shows"]) == branch


def _says_what_the_others_have(one: dict[str, Any], plan: dict[str, Any]) -> None:
    """Six recipes pass only where the first and A/A do, and at the sixth of alpha."""
    others = one["power_of_others"]
    if one["recipes"] == FIRST:
        assert (others, "whether it trains" in one["shows"]) == (None, True)
        return
    assert others[0] == pytest.approx(one["power"][0] * plan["conclusion"]["hardest"]["power"])
    assert "whether the first trains like bf16" in one["shows"]
    told = ", ".join(f"{share:.0%}" for share in others)
    assert f"the 6 others pass only where it does, the hardest with a power of {told}" in one["shows"]


def test_a_budget_too_small_for_all_recipes_names_one_alone_and_branches(command: Command) -> None:
    done = command("plan", *GPT2, "--budget", "3h")
    said = " ".join(done.out.split())
    assert done.code == 0
    assert "training/" not in said  # not the trials of a plan that would be refused
    assert said.startswith("As asked, the study does not conclude within 3 h. These do, the strongest first. Power is")
    alone = "--only '*-control-*,*-aa-*,*-broken-*,*/delayed_scaling_e4m3/*' --seeds 17"
    assert re.search(
        rf"{FIRST}: 17 seeds, 54 runs, 2\.85 GPU hours, power 100%, 98%, \d+%, \d+%\. Shows whether it", said
    )
    assert (
        "where its true gap in nat is 0, 0.0017, 0.0025, 0.0035 (the last, 0.0035, is what published studies make likely):"
        in said
    )
    assert f"te-bench run convergence --device cuda --preset gpt2 --data random {alone}" in done.out
    assert "10 seeds, 96 runs, 2.74 GPU hours, power 83%" in said
    assert "--preset gpt2 --branch-at 1200 --data random --seeds 10\n" in done.out
    commands = re.findall(
        r"Random\s+tokens\s+teach\s+a\s+model\s+nothing:\s+run\s+it\s+with\s+--data\s+text:FILE\n +te-bench run",
        done.out,
    )
    assert len(commands) == done.out.count("--data random") == 3


def test_the_page_has_the_designs_of_today(command: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "convergence.md").read_text()
    rows = [
        row.split("|")[2:-1] for row in re.findall(r"^\| (?:the first recipe|all seven), .* seeds \|.*$", page, re.M)
    ]
    found = designs(command, "--budget", "2h")
    told = [
        [
            one["runs"],
            f"{one['seconds'] / 3600:.1f}",
            *(f"{share:.0%}" for share in one["power"]),
            "-" if one["power_of_others"] is None else f"{one['power_of_others'][0]:.0%}",
        ]
        for one in found
    ]
    assert [[cell.strip().replace(" %", "%") for cell in row] for row in rows] == [
        [str(cell) for cell in row] for row in told
    ]


def test_the_design_as_asked_is_planned_where_it_concludes_with_what_else_would(command: Command) -> None:
    done = command("plan", *GPT2, "--budget", "5h", "--out", "mine")
    said = " ".join(done.out.split())
    assert (done.code, "What 10 seeds can conclude" in said) == (0, True)
    assert "Designs that conclude within 5 h, the strongest first." in said
    assert "--data random --out mine --seeds 10\n" in done.out
    [own] = [one for one in designs(command, "--budget", "5h") if one["asked"]]
    assert own["rounds"] == 10
    alone = command("plan", *GPT2, "--budget", "40h").out  # nothing has more power
    assert "Designs that conclude" not in alone


def test_where_no_design_concludes_the_least_time_in_which_one_does_is_said(command: Command) -> None:
    done = command("plan", *GPT2, "--budget", "20min")
    assert done.code == 2
    assert done.err.startswith("te-bench: no design concludes in --budget 20 min; the least takes about ")
    assert done.err.count(" seeds, ") == 0  # of what concludes alone
    [least] = re.findall(
        r"the least takes about (\d+) min\. Random tokens teach a model nothing: run it with --data text:FILE:\n",
        done.err,
    )
    plan = planned(command, done.err.splitlines()[1].strip())
    assert plan["estimate"]["elapsed_s"] <= int(least) * 60
    assert len(designs(command, "--budget", f"{least}min")) == 1
    assert command("plan", *GPT2, "--budget", f"{int(least) - 1}min").code == 2


@pytest.mark.parametrize(
    "more",
    [
        ("--seeds", 3),
        ("--design", "pool"),
        ("--as-pilot",),
        ("--learning-rate", "6e-4"),  # of whose spread nothing is known
        ("--only", "*bf16*"),
    ],
    ids=str,
)
def test_nothing_is_proposed_where_nothing_is_left_to_choose(command: Command, more: tuple[object, ...]) -> None:
    done = command("plan", *GPT2, "--budget", "3h", *more)
    assert "conclude within" not in done.out + done.err


def test_what_the_command_line_fixes_stays(command: Command) -> None:
    """A branch is not made a whole training, nor one recipe several; what excludes branches has none."""
    branches = designs(command, "--budget", "2h", "--branch-at", "1200")
    assert branches
    assert all("--branch-at 1200" in one["command"] for one in branches)
    one = designs(command, "--budget", "2h", "--recipes", "rowwise_scaling")
    assert [(each["recipes"], each["asked"]) for each in one] == [
        ("rowwise scaling, fused, bf16 head", False),
        ("rowwise scaling, fused, bf16 head", True),
    ]
    assert not any("other recipe" in each["shows"] for each in one)
    two = designs(command, "--budget", "2h", "--recipes", "rowwise_scaling,delayed_scaling")
    assert any("--recipes rowwise_scaling " in one["command"] for one in two)
    [both] = [one for one in two if one["recipes"] not in ("rowwise scaling, fused, bf16 head",)]
    assert (both["recipes"], "whether each trains" in both["shows"]) == ("2 recipes", True)  # none is judged first
    ending = designs(command, "--budget", "5h", "--recipes", "rowwise_scaling", "--bf16-from", "1730")
    assert not any("--branch-at" in one["command"] for one in ending)


@pytest.mark.slow  # of 9,003 trials, four times
@pytest.mark.parametrize(("preset", "margin", "hours"), [("gpt2", 0.0006, 1000), ("gpt2-short", 0.0035, 54)])
def test_a_budget_larger_than_any_study_s_is_as_many_seeds_as_a_run_takes(
    command: Command, preset: str, margin: float, hours: int
) -> None:
    """Of a margin that needs them all."""
    asked = ("plan", *GPT2[:-1], preset, "--margin", margin, "--budget", f"{hours}h")
    done = command(*asked)
    assert (done.code, "What 1000 seeds can conclude" in done.out) == (0, True)
    [one] = [found for found in json.loads(command(*asked, "--json").out)["designs"] if found["asked"]]
    assert one["rounds"] == 1000
    assert len(planned(command, one["command"])["trials"]) == one["runs"]


@pytest.mark.parametrize("hours", [30, 1000])
def test_a_budget_is_spent_until_more_seeds_hardly_help(command: Command, hours: int) -> None:
    """And what the rest of it would buy is said."""
    done = command("plan", *GPT2, "--budget", f"{hours}h")
    said, most = " ".join(done.out.split()), {30: 62, 1000: 1000}[hours]
    assert (done.code, "What 24 seeds can conclude" in said) == (0, True)
    assert f"24 seeds suffice for half the margin. --seeds {most}, which --budget {hours} h holds, take" in said
    [told] = re.findall(r"a power of ([\d%, ]+) in place of 100%, 100%, 98%, 67%", said)
    few, enough = (
        [
            o
            for o in json.loads(command("plan", *GPT2, "--seeds", n, "--json").out)["conclusion"]["options"]
            if o["rounds"] == n
        ]
        for n in (23, 24)
    )
    assert few[0]["power"][2] <= 0.97 < enough[0]["power"][2]
    [own] = [one for one in designs(command, "--budget", f"{hours}h") if one["asked"]]
    assert (own["rounds"], told.startswith("100%, 100%, 100%, ")) == (24, True)
    assert "suffice for half" not in command("plan", *GPT2, "--budget", "7h").out
    assert "suffice for half" not in command("plan", *GPT2, "--budget", "30h", "--seeds", 30).out


def test_a_plan_in_json_says_why_its_run_is_refused(command: Command) -> None:
    """By power, or because the budget holds no verdict: then it has no trials; JSON is for who asks for it."""
    for hours, has, reason in (
        (1.5, False, "a verdict needs 10 seeds, which take about 5 h"),
        (2, True, "with a power of"),
        (5, True, None),
    ):
        found = json.loads(command("plan", *GPT2, "--budget", f"{hours}h", "--json").out)
        assert bool(found["trials"]) == has
        assert found["refused"] is None if reason is None else reason in found["refused"]
        assert "{" not in command("plan", *GPT2, "--budget", f"{hours}h").out
    done = command("plan", *GPT2, "--budget", "20min", "--json")
    assert (done.code, done.out, "no design concludes in --budget 20 min" in done.err) == (2, "", True)


def test_who_plans_a_sitting_is_told_where_other_designs_are_named(command: Command) -> None:
    done = command("plan", *GPT2, "--budget", "2h", "--within", "10s")
    assert done.out.endswith("\n--within 10s: te-bench plan with the options of one of these says which trials end\n")
    [words, *_] = re.findall(r"^ +te-bench run (.*)$", done.out, re.M)
    assert "--within 10s: no trial that is left ends" in command("plan", *shlex.split(words), "--within", "10s").out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--budget", "2h"), True),
        (("--budget", "9h", "--seeds", 5), False),
        (("--budget", "2h", "--only", "*-control-*,*-aa-*,*-broken-*,*/rowwise_scaling/*"), False),
        (("--budget", "40h", "--design", "pool"), False),
    ],
    ids=str,
)
def test_a_run_that_is_refused_says_who_names_other_designs_if_it_does(
    command: Command, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...], named: bool
) -> None:
    gpus(monkeypatch, 1)
    done = command("run", *GPT2, *more)
    assert (done.code, "with a power of" in done.err) == (2, True), done.err
    assert ("te-bench plan with the same options names designs that conclude" in done.err) == named
    assert bool(json.loads(command("plan", *GPT2, *more, "--json").out).get("designs")) == named
