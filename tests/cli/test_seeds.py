"""docs/seeds.md: every command that it names plans trials, or is a file that is there."""

import re
import shlex
from pathlib import Path

import pytest
from in_process import Command

ROOT = Path(__file__).parents[2]
WRITTEN = re.findall(r"`((?:te-bench|python) [^`]+)`", (ROOT / "docs/seeds.md").read_text())
COMMANDS = [" ".join(one.split()) for one in WRITTEN]
RUNS = sorted({one for one in COMMANDS if one.startswith("te-bench run") and "mymod" not in one})


@pytest.mark.parametrize("run", RUNS)
def test_each_run_plans_trials(command: Command, run: str, tmp_path: Path) -> None:
    words = shlex.split(run)[2:]
    data = ["--data", "random"] if words[0] in ("convergence", "curves") else []
    seeds = [] if words[0] == "convergence" else ["--seeds", "1"]  # of fewer than its own a verdict would be refused
    done = command("plan", *words, *data, "--device", "cuda", *seeds)
    assert (done.code, "/s0" in done.out) == (0, True), done


def test_each_program_is_there() -> None:
    programs = [shlex.split(one)[1] for one in COMMANDS if one.startswith("python") and "-m" not in one]
    assert len(programs) == 3
    assert all((ROOT / program).is_file() for program in programs)
