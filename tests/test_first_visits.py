"""Three first visits by README.md alone, each to a decision in at most three commands: README's own words are what is run.

Each starts in an empty folder with an empty home. What a visitor would decide from the first screen is held to the records.
"""

import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from driving import te_bench
from revisions import Repository

from te_bench.experiments.store import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ANSWERS = (ROOT / "docs" / "advise.md").read_text()
SCREEN = 24  # lines of a terminal


class Visit:
    """visit("te-bench advise", "--budget", "1s") runs the README's one command that begins so, with these words more."""

    def __init__(self, folder: Path):
        self.folder, self.home, self.typed = folder / "here", folder / "home", 0
        self.folder.mkdir()
        self.home.mkdir()

    def __call__(self, begins: str, *more: object, **options: object) -> subprocess.CompletedProcess[str]:
        self.typed += 1
        assert self.typed <= 3
        env = {"HOME": str(self.home), **options.pop("env", {})}  # type: ignore[dict-item]
        return te_bench(*command(begins), *more, cwd=self.folder, env=env, **options)


def command(begins: str) -> list[str]:
    """The words after te-bench of the one command in README.md, quoted or in a block, that begins so."""
    quoted = [*re.findall(r"^    (te-bench [^#\n]*)", README, re.MULTILINE), *re.findall(r"`(te-bench [^`]*)`", README)]
    [found] = {one.strip() for one in quoted if one.startswith(begins)}
    return shlex.split(found)[1:]


def answers_in(page: str) -> list[str]:
    """The lines of the answer that the page quotes."""
    [block] = re.findall(r"^    Use te-bench .*\n(?:    .*\n)*", page, re.MULTILINE)
    return [line.removeprefix("    ") for line in block.splitlines()]


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    return Visit(tmp_path)


def screen(done: subprocess.CompletedProcess[str]) -> str:
    """What stands on one screen, its lines joined."""
    lines = done.stdout.splitlines()
    assert len(lines) <= SCREEN, done.stdout
    return " ".join(" ".join(lines).split())


@pytest.mark.slow
def test_a_laptop_without_a_gpu_decides_what_to_train_a_model_with(visit: Visit) -> None:
    """The fastest step that was measured, or what it has where nothing is told from that; and no FP8."""
    done = visit("te-bench advise --model tiny", "--budget", "12s")
    said = screen(done)
    folder = visit.folder / "runs" / "advise-tiny"
    assert (visit.folder / done.stdout.splitlines()[-1].removeprefix("report: ")).is_file()
    assert "FP8 does not pay on a CPU, which emulates it: this says nothing about a GPU." in said
    decided = re.search(r"(Use|Undecided:|Keep what you have,) ([^.:]*)", said)
    assert decided, said
    undecided = decided[1] == "Undecided:"
    assert done.returncode == (3 if undecided else 0), done
    copied = re.search(r'TrainStep\(model, optim, precision="(\w+)", mode="([\w-]+)"\)', said)  # the code to copy
    assert copied, said
    assert copied.groups() == ("bf16", "eager") if decided[1] != "Use" else copied[1] in ("bf16", "fp32")
    if decided[1] == "Use":
        quoted = re.search(r"(\d[\d.]*)× \[([\d.]+), ([\d.]+)\] as fast as what you have \(([^)]*)\)", said)
        assert quoted, said
        ratio, low, _ = map(float, quoted.groups()[:3])
        assert low > 1
        chosen = json.loads((folder / "advice.json").read_text())["answer"]
        now, use = (tuple(chosen[which][name] for name in TOLD) for which in ("have", "use"))
        seconds = steps(folder)
        assert ratio == pytest.approx(seconds[now] / seconds[use], rel=0.01)
        assert seconds[use] < 1.03 * min(seconds.values()) or "Not distinguished from it:" in said


TOLD = ("precision", "attention", "mode", "head")


def steps(folder: Path) -> dict[tuple[object, ...], float]:
    """{TOLD of a configuration: geometric mean of its runs' medians}, from the journal alone."""
    found = defaultdict(list)
    for record in load(folder).records.values():
        trial = record.trial
        if trial.workload == "train_step" and record.outcome == "ok":
            told = (trial.precision, trial.attention, trial.mode, trial.problem.get("head"))
            found[told].append(statistics.median(record.samples["latency_s"]))
    return {told: math.prod(runs) ** (1 / len(runs)) for told, runs in found.items()}


def test_an_h200_with_a_llama_decides_by_the_published_records(visit: Visit) -> None:
    """README's picture and quoted answer, its command, the table of answers and the records agree; none is written."""
    pytest.importorskip("transformers")
    for name in ("examples", "results"):  # of the checkout that it has
        (visit.folder / name).symlink_to(ROOT / name)
    words = command("te-bench advise --model examples/configs/llama-3.2-1b")
    folder = ROOT / words[words.index("--out") + 1]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = visit("te-bench advise --model examples/configs/llama-3.2-1b")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    said = screen(done)
    [advised] = re.findall(r"^\*\*Advised for all \d+ models: (.*)\*\*$", ANSWERS, re.MULTILINE)
    [row] = [line for line in ANSWERS.splitlines() if re.match(r"\| llama-3.2-1b \| \d\.\d\d×", line)]
    _, speedup, times, bf16, rival, over, _, memories, tokens = (
        cell.strip().replace("\\", "") for cell in row.strip("|").split("|")
    )
    (now, step), (memory_now, memory), (rival, rivals) = (
        cell.split(between) for cell, between in ((times, " → "), (memories, " → "), (rival, ", "))
    )
    quoted = [line for line in answers_in(README) if line != "[...]"]
    assert len(quoted) > 5
    assert [line for line in done.stdout.splitlines() if line in quoted] == quoted
    assert said.startswith(f"Use {advised}, Gluon attention. {speedup} as fast as what you have (")
    assert f"{over} as fast as the best that was measured without te-bench ({rival} bf16, eager)" in said
    assert f"all by {advised}.**" in README  # the first screen: a sentence, and the picture by its words
    shown = " → ".join(f"{float(ms):.3g}" for ms in (now, bf16, step))
    assert f"; llama-3.2-1b {shown}, {speedup.split(' [')[0]} ({rival} bf16 {float(rivals):.3g}); " in README
    assert f"Without FP8: te-bench bf16, one CUDA graph, {bf16} ms a step; FP8 is " in said
    assert f"Memory: {memory} instead of {memory_now} GiB. Predicted: " in said
    assert f"Measured: {step} ms a step." in said
    assert "Convergence: no study has judged this step. GPT-2 124M with an FP8 head, 100 M tokens: 0.00" in said
    assert "A pilot tells in 15 GPU minutes how many seeds your model takes: te-bench run" in said
    seconds = [
        [
            record.samples["latency_s"]
            for record in load(folder).records.values()
            if f"train_step/hf:llama-3.2-1b-b1-t8192-{wanted}" in record.trial.name and record.outcome == "ok"
        ]
        for wanted in (
            "V128256/own/bf16/eager/",
            "V128256-liger/own/bf16/eager/",
            "V128256-adamw-triton-parts-all/own/fp8/delayed_scaling/cudagraph/",
        )
    ]
    for runs, quoted, least in zip(seconds, (now, rivals, step), (3, 1, 3), strict=True):
        assert len(runs) >= least
        medians = [statistics.median(run) for run in runs]
        assert 1e3 * math.prod(medians) ** (1 / len(medians)) == pytest.approx(float(quoted), rel=0.01)
    own = command("te-bench advise --model path/to/config.json")  # the same question as the reader's own will be
    assert own[3:] == words[3 : words.index("--out")]
    assert tokens == "{} × {}".format(*own[4::2])


@pytest.mark.slow
def test_a_maintainer_has_a_gate_that_passes_unchanged_code_and_catches_a_slow_down(visit: Visit) -> None:
    """By README's te-bench.toml, of a package of the name that it has there."""
    [config] = re.findall(r"(?:^    (?:margin|budget|\[bench|command).*\n)+", README, re.MULTILINE)
    repository = Repository(visit.folder / "project")
    visit.folder = repository.root
    package = repository.root / "mypackage"
    package.mkdir()

    def commit(seconds: float, readme: str) -> None:
        (package / "__main__.py").write_text(f"import time\ntime.sleep({seconds})\n")
        (repository.root / "README").write_text(readme)
        repository.git("add", "--all")
        repository.git("commit", "--quiet", "-m", "a")

    (repository.root / "te-bench.toml").write_text(re.sub("^    ", "", config, flags=re.MULTILINE))
    commit(0.06, "one")
    repository.git("checkout", "--quiet", "-b", "branch")
    commit(0.06, "another")
    python = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    quick = visit.home.parent / "quick.py"  # a third of the seconds for a pair
    quick.write_text(
        "from te_bench import cli\nfrom te_bench.gate import commands\ncommands.TIMED_S = 0.3\ncli.main()\n"
    )

    def gate(code: int) -> subprocess.CompletedProcess[str]:
        """Until it says so, three times at most: one gate in 20 may be wrong, and a busy machine's undecided."""
        for _ in range(3):
            if (done := visit("te-bench gate --config", main=quick, env=python)).returncode == code:
                break
            visit.typed -= 1  # the same command
        return done

    done = gate(0)
    assert (done.returncode, done.stdout.startswith("PASS: 1 PASS of 1 timed. Margin 5 %")) == (0, True), done
    commit(0.12, "another")
    done = gate(1)
    said = screen(done)
    assert (done.returncode, said.startswith("REGRESSION: 1 REGRESSION of 1 timed.")) == (1, True), done
    how = r"start is (\d\.\d+) times as slow \[(\d\.\d+), (\d\.\d+)\]"
    assert re.search(how, " ".join(README.split()))  # README quotes what it looks like
    # By typical calls, or by the mean of all where a busy machine hides those: each has a margin of its own.
    by = re.search(f"{how}(?:, above the margin of (5) %| over all calls on average, above (12.5) %)", said)
    assert by, said
    ratio, low, high = map(float, by.groups()[:3])
    assert 1 + float(by[4] or by[5]) / 100 < low <= ratio <= high
    assert 1.2 < ratio < 2.5  # the interpreter's own start is on both sides, and what else runs
