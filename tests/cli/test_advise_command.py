"""te-bench advise on the command line: a real answer on a CPU, exit codes, and one sentence for each wrong word."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from advice_machine import Machine, question
from in_process import Command, gpus

from te_bench.cli import advise
from te_bench.experiments import environment, host, runner
from te_bench.experiments.spec import Trial
from te_bench.experiments.store import Store, load

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = ("advise", "--model", "tiny", "--device", "cpu")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Trials of the tiny model on a CPU are answered by a formula."""
    machine = Machine(question("tiny", "cpu"))

    def run(trials: Sequence[Trial], store: Store, environment_id: str, **options: Any) -> None:
        for trial in runner.to_do(trials, store.journal, environment_id, retry=options["retry"]):
            machine.checked[trial.id] = options["executor"].check
            (made,) = machine([trial])
            store.add(type(made).from_json({**made.to_json(), "environment": environment_id}))
            options["progress"](made, None)

    monkeypatch.setattr(runner, "Supervisor", lambda *_, context, **options: context)
    monkeypatch.setattr(runner, "run", run)
    return machine


def test_an_answer_from_real_trials(command: Command, tmp_path: Path) -> None:
    """As much as no budget holds: the survey and the step as it is."""
    done = command(*TINY, "--tokens", 16, "--batch", 1, "--budget", "0.1s", "--out", "run")
    assert done.code == 3, done.err
    assert "Undecided: in 1 s only what you have was measured." in done.out
    assert "combinations" in done.out.splitlines()[0]
    said = json.loads((tmp_path / "run" / "advice.json").read_text())
    assert said["answer"]["seconds"] > 0
    assert {record.trial.workload for record in load(tmp_path / "run").records.values()} == {"survey", "train_step"}
    assert (tmp_path / "run" / "advice" / "index.html").exists()
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_an_answer_and_the_same_again_measures_nothing(command: Command, simulated: Machine, tmp_path: Path) -> None:
    done = command(*TINY)
    assert done.code == 0, done.out + done.err
    assert "Use " in done.out
    assert "as fast as what you have" in done.out
    assert len(done.out.partition("\n")[2].splitlines()) <= 20 + done.out.count("already in")
    first = len(simulated.asked)
    again = command(*TINY)
    assert again.code == 0
    assert "1 of 1 trial is already in" in again.out
    assert len(simulated.asked) == first
    assert (tmp_path / "runs" / "advise-tiny" / "advice.json").exists()
    report = (tmp_path / "runs" / "advise-tiny" / "report" / "report.md").read_text()
    assert "    te-bench advise --model tiny --device cpu --out my-run\n" in report


def test_a_busy_machine_is_warned_of_once_for_all_stages(command, simulated, monkeypatch):
    monkeypatch.setattr(host, "disturbance", lambda state: "other programs took 2 cores")
    done = command(*TINY)
    assert done.err.count("[1/1] ") > 1
    assert done.err.count("warning: the machine is busy: other programs took 2 cores during") == 1


def test_an_answer_from_records_measures_nothing(command, simulated, tmp_path, monkeypatch):
    first = command(*TINY, "--out", "run")
    said = json.loads((tmp_path / "run" / "advice.json").read_text())
    asked = len(simulated.asked)
    monkeypatch.setattr(environment, "capture", None)  # the machine is the records'
    again = command("advise", "--model", "tiny", "--out", "run", "--recorded")
    assert again.code == 0, again.err
    assert next(line for line in again.out.splitlines() if line.startswith("Use ")) in first.out
    assert len(simulated.asked) == asked
    once_more = json.loads((tmp_path / "run" / "advice.json").read_text())
    assert {**once_more, "took_s": 0} == {**said, "took_s": 0}


def test_an_answer_from_published_records_writes_there_only_if_it_is_asked_to(command, simulated, tmp_path):
    folder = tmp_path / "results" / "h200" / "tiny"
    command(*TINY, "--out", folder)
    (tmp_path / "results" / "published.toml").touch()
    for made in ("advice", "report"):
        shutil.rmtree(folder / made)
    (folder / "advice.md").unlink()

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = files()
    words = ("advise", "--model", "tiny", "--out", folder, "--recorded")
    done = command(*words)
    assert (done.code, "Use " in done.out) == (0, True), done
    assert files() == before
    assert command(*words, "--rewrite").code == 0
    assert files().keys() - before.keys() == {str(folder / "advice.md")}
    assert "advise --model tiny --out" in (page := (folder / "advice.md").read_text())
    assert "--rewrite" not in page
    done = command(*TINY, "--rewrite")
    assert (done.code, done.err) == (2, "te-bench: --rewrite needs --recorded and a published folder: leave it out\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--out", "empty"), "empty holds no records of te-bench advise"),
        ((), "--recorded reads a folder: name it with --out"),
        (("--out", "run", "--device", "cpu"), "--recorded measures nothing: leave --device, --gpus, --memory and"),
        (("--out", "run", "--batch", 2), "run holds the answer on another model, code or device"),
    ],
)
def test_what_records_cannot_answer_is_said(command, simulated, words, reason):
    command(*TINY, "--budget", "1s", "--out", "run")
    done = command("advise", "--model", "tiny", *words, "--recorded")
    assert done.code == 2
    assert done.err.startswith(f"te-bench: {reason}")
    assert len(done.err.splitlines()) == 1


def test_a_step_is_checked_by_its_first_run_alone(command: Command, simulated: Machine) -> None:
    command(*TINY)
    assert {trial.seed for trial in simulated.asked} == {0, 1, 2}
    assert all(simulated.checked[trial.id] == (trial.seed == 0) for trial in simulated.asked)


def test_each_question_has_a_folder_of_its_own_and_that_of_another_is_refused(command, simulated, tmp_path):
    words = (*TINY, "--budget", "1s")
    command(*words)
    command(*words, "--batch", 2, "--tokens", 32)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"advise-tiny", "advise-tiny-b2-t32"}
    words += ("--out", "mine")
    command(*words)
    before = (tmp_path / "mine" / "journal.jsonl").read_bytes()
    done = command(*words, "--batch", 2)
    assert done.code == 2
    assert done.err.startswith("te-bench: mine holds the answer on another model, code or device (--model tiny")
    assert "name another folder with --out" in done.err
    assert (tmp_path / "mine" / "journal.jsonl").read_bytes() == before
    assert command(*words, "--batch", 2, "--fresh").code == 3


@pytest.mark.usefixtures("asked_here")
def test_configs_in_folders_of_the_same_name_do_not_meet(command: Command, simulated: Machine, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}
    codes = []
    for parent, layers in (("a", 1), ("b", 2)):
        path = tmp_path / parent / "mine" / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**config, "num_hidden_layers": layers}))
        done = command("advise", "--model", path, "--device", "cpu", "--budget", "1s")
        codes.append(done.code)
    assert codes == [3, 2]
    assert "runs/advise-mine holds the answer on another model" in done.err


def test_what_a_small_budget_cut_short_a_larger_one_measures(command: Command, simulated: Machine) -> None:
    simulated.fails, simulated.wall = {"train_step": "timeout"}, lambda trial: 60.0
    assert command(*TINY, "--budget", "1s").code == 4
    asked = len(simulated.asked)
    assert command(*TINY, "--budget", "1s").code == 4
    assert len(simulated.asked) == asked  # it would have no longer than before
    simulated.fails = {}
    assert command(*TINY, "--budget", "10min").code == 0
    step = next(trial for trial in simulated.asked if trial.workload == "train_step")
    assert simulated.asked.count(step) == 2


def test_nothing_measured_ends_with_4(command: Command, simulated: Machine) -> None:
    simulated.fails = {"train_step": "oom"}
    done = command(*TINY)
    assert (done.code, "Nothing could be measured: oom: planted" in done.out) == (4, True), done.out
    simulated.fails = {"train_step": "crashed: RuntimeError: planted; see logs/0a.log"}
    assert "planted; see run/logs/0a.log" in command(*TINY, "--out", "run").out


def test_sequences_beyond_the_models_longest_are_warned_of(command: Command, simulated: Machine) -> None:
    assert "warning: --tokens 100: tiny's longest sequence has 64" in command(*TINY, "--tokens", 100).err
    assert "longest" not in command(*TINY, "--tokens", 64).err


def test_a_loss_that_is_nan_is_told_in_a_sentence(command: Command, tmp_path: Path) -> None:
    model = "import torch\n\n\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    model += "        self.e = torch.nn.Embedding(64, 64)\n\n    def forward(self, x):\n"
    model += "        return self.e(x) * float('nan')\n"
    (tmp_path / "nanloss.py").write_text(model)
    done = command("advise", "--model", "nanloss:M", "--device", "cpu", "--tokens", 16, "--batch", 1)
    said = "the loss of the first batch is NaN (bf16 autocast); no step was timed"
    assert (done.code, done.out.splitlines()[-1]) == (4, f"Nothing could be measured: nanloss:M: diverged: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "tinyy"], "unknown model 'tinyy'. Did you mean tiny"),
        (["--model", "tiny", "--memory", "80"], "--memory 80: give a size greater than 0 with its unit"),
        (["--model", "tiny", "--memory", "-1GiB"], "--memory -1GiB: give a size"),
        (["--model", "tiny", "--budget", "soon"], "--budget soon: give a time greater than 0"),
        (["--model", "tiny", "--tokens", "0"], "--tokens 0: give 1 or more"),
        (["--model", "tiny", "--batch", "0"], "--batch 0: give 1 to 16777216"),
        (["--model", "tiny", "--device", "tpu"], "unknown device 'tpu'"),
        (["--model", "tiny", "--device", "cpu", "--gpus", "0"], "--gpus 0: this run is on the cpu"),
    ],
)
def test_wrong_words_get_one_sentence_and_leave_nothing(words, said, command, tmp_path):
    done = command("advise", *words)
    assert done.code == 2
    assert done.err.startswith(f"te-bench: {said}")
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("here", "more", "said"),
    [(0, (), "reports no GPU here"), (2, ("--gpus", "0,1"), "--gpus 0,1: advice is for one GPU; name one")],
)
def test_no_gpu_and_several_are_refused(here, more, said, command, monkeypatch):
    gpus(monkeypatch, here)
    done = command("advise", "--model", "gpt2", "--device", "cuda", *more)
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("said", "bytes_"), [("80GiB", 80 * 2**30), ("80 gb", 80e9), ("512MiB", 2**29), ("1.5GB", 1.5e9)]
)
def test_sizes(said: str, bytes_: float) -> None:
    assert advise.size(said) == bytes_
