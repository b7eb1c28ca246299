"""What every verb is told: usage errors exit 2, say what is legal and write nothing; GPUs, data sets, times."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import journals
import pytest
from in_process import Command, gpus

from te_bench.cli import options, run
from te_bench.experiments import environment, host, plan
from te_bench.experiments.run_options import OPTIONS, Options
from te_bench.experiments.spec import Trial
from te_bench.experiments.store import load
from te_bench.reports.convergence.planning import duration

SUITES = (
    "attention, convergence, curves, demo, fp8, gemms, heads, layer, memory, nanogpt, pieces, quick, scaling, "
    "speed, stress"
)
TOGETHER = "--gpus-per-trial N goes with --parallel ddp, fsdp2, fsdp2+tp, hsdp, tp or zero1: give both"
OF_SCALING = "the suite scaling has ddp, fsdp2, tp on each number of GPUs; leave it out and choose trials by --only"
PREDICTED = "or predict a step by te-bench plan scaling --world N"
OF_SHARD = "--shard 2 goes with --gpus-per-trial N --parallel fsdp2+tp or hsdp: no other mode"
OF_4 = "--parallel hsdp: give --shard 2, how many of --gpus-per-trial 4 share the weights; got 3"
OF_8 = "--parallel hsdp: give --shard 2 or 4, how many of --gpus-per-trial 8 share the weights"
USAGE = [
    (["run", "quik"], f"unknown suite 'quik'. Did you mean quick? Known: {SUITES}."),
    (["plan", "nanogtp"], "unknown suite 'nanogtp'. Did you mean nanogpt?"),
    (["run", "nanogpt", "--only", "*/flush/*"], "--only '*/flush/*' matches no trial of nanogpt."),
    (
        ["run", "nanogpt", "--only", "*/flash/*", "--only", "*/cudnn/*"],
        "--only is given twice: give it once, its values between commas",
    ),
    (["run", "quick", "--gpus", "0", "--gpus", "1"], "--gpus is given twice: give it once, its values between commas"),
    (
        ["plan", "fp8", "--recipes", "delayed_scaling", "--recipes=bf16"],
        "--recipes is given twice: give it once, its values",
    ),
    (["run", "quick", "--timeout", "0"], "--timeout 0: give seconds greater than 0"),
    (["run", "quick", "--timeout", "nan"], "--timeout nan: give seconds greater than 0"),
    *(
        (["run", "curves", "--budget", no], f"--budget {no}: give a time greater than 0 with its unit: 90s")
        for no in ("0", "0h", "-5", "-2h", "inf", "nan", "1e999h", "m", "soon", "2 days", "1h30m", "90sec")
    ),
    (["run", "speed", "--gpus-per-trial", "2"], TOGETHER),
    (["run", "speed", "--parallel", "ddp"], TOGETHER),
    *(
        (["run", "speed", "--gpus-per-trial", n, "--parallel", "ddp"], f"--gpus-per-trial {n}: give 2 to 1024; for one")
        for n in ("0", "1", "1025")
    ),
    *(
        ([verb, "scaling", *words], f"{words[0]}: {OF_SCALING} '*-{mode}-x2/*', {PREDICTED}")
        for verb, words, mode in (
            ("plan", ("--parallel", "fsdp2"), "fsdp2"),
            ("run", ("--parallel", "tp", "--gpus-per-trial", "2"), "tp"),
            ("plan", ("--parallel", "hsdp"), "fsdp2"),
            ("plan", ("--gpus-per-trial", "2"), "fsdp2"),
            ("run", ("--shard", "2"), "fsdp2"),
        )
    ),
    (
        ["run", "fp8", "--gpus-per-trial", "2", "--parallel", "ddp", "--gather", "fp8"],
        "--gather fp8 goes with --gpus-per-trial N --parallel fsdp2 or hsdp: no other mode gathers weights",
    ),
    *(
        (["run", "speed", "--gpus-per-trial", world, "--parallel", mode, *shard], said)
        for world, mode, shard, said in (
            ("8", "hsdp", (), OF_8),
            ("4", "hsdp", ("--shard", "3"), OF_4),
            ("2", "hsdp", (), "--parallel hsdp: --gpus-per-trial 2 make no groups of equal size; choose fsdp2 or ddp"),
            ("4", "fsdp2", ("--shard", "2"), OF_SHARD),
        )
    ),
    *((["run", "convergence", "--share", n], f"--share {n}: give 1 to 16") for n in ("0", "17")),
    (["run", "speed", "--shard", "1"], "--shard 1: give 2 to 512"),
    (["run", "speed", "--gpus-per-trial", "2", "--parallel", "pipeline"], "unknown mode of parallelism 'pipeline'. K"),
    (
        ["run", "speed", "--batch", "6", "--gpus-per-trial", "4", "--parallel", "ddp"],
        "a batch of 6 does not divide into 4 ranks: give --batch 4, or another --gpus-per-trial",
    ),
    (
        ["run", "fp8", "--batch", "6", "--gpus-per-trial", "8", "--parallel", "fsdp2+tp", "--shard", "2"],
        "a batch of 6 does not divide into 4 groups of 2 ranks: give --batch 4, or another --gpus-per-trial",
    ),
    (
        ["run", "fp8", "--gpus-per-trial", "2", "--parallel", "fsdp2", "--gather", "fp8", "--only", "*/bf16/*"],
        "--gather fp8 applies to steps in FP8, and --only '*/bf16/*' chooses none; leave one of them out",
    ),
    (["run", "attention", "--gpus-per-trial", "2", "--parallel", "ddp"], "--parallel: the suite attention has no"),
    (["run", "quick", "--gpus", "0"], "--gpus 0: this run is on the cpu; leave it out, or add --device cuda"),
    (["list", "suits"], "unknown kind 'suits'. Did you mean suites? Known: suites, attention, recipes, layers,"),
    (["report", "nowhere"], "nowhere holds no journal.jsonl: it is not the --out directory of a te-bench run"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_a_usage_error_exits_2_says_what_is_legal_and_writes_nothing(command, tmp_path, arguments, message):
    device = ["--device", "cpu"] if arguments[0] == "run" and "--device" not in arguments else []
    cache = ["--cache", str(tmp_path / "cache")] if arguments[0] == "run" else []
    done = command(*arguments, *device, *cache)
    assert done.code == 2
    assert re.match("te-bench: (/.*/)?" + re.escape(message), done.err)  # a relative path may be shown whole
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_the_parser_s_own_errors_exit_2_too(command: Command) -> None:
    for said, message in (
        ("rnu", "No such command 'rnu'"),
        ("run", "Missing argument"),
        ("advise", "Invalid value for '--model': give tiny for a try, a config.json, or package.module:factory"),
        ("run quick --seeds many", "Invalid value for '--seeds'"),
        ("run quick --sede 1", "No such option"),
    ):
        done = command(*said.split())
        assert (done.code, message in done.err) == (2, True), done.err


def test_every_study_has_a_folder_of_its_own() -> None:
    asked = Options(device="cpu", model="tiny", weights="bf16")
    for changes, folder in (
        ({"weights": None}, "convergence-tiny"),
        ({}, "convergence-tiny-weights-bf16"),
        ({"states": "fp8"}, "convergence-tiny-weights-bf16-states-fp8"),
        ({"model": None}, "convergence-weights-bf16"),
    ):
        assert options.results_of("convergence", replace(asked, **changes), None) == Path("runs", folder)
    assert options.results_of("convergence", asked, Path("mine")) == Path("mine")


def uuids(gpus: str | None) -> list[str]:
    return [gpu["uuid"] for gpu in options.find_gpus("cuda", gpus)]


def test_cuda_without_a_gpu_says_what_to_do(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    for wanted in ("all", "0,1"):
        done = command("run", "quick", "--device", "cuda", "--gpus", wanted)
        assert done.code == 2
        assert "--device cuda: the NVIDIA driver reports no GPU here. Use --device cpu" in done.err


def test_cuda_with_a_torch_that_has_none_says_what_to_install(command, monkeypatch):
    gpus(monkeypatch, cuda=None)
    done = command("run", "quick", "--device", "cuda")
    assert done.code == 2
    assert "--device cuda: torch 2.13.0 is built without CUDA; install one that is not: https://pytorch.org" in done.err
    assert environment.default_device() == "cpu"


@pytest.mark.parametrize("wanted", ["2", "0,2", "0,0", "0, 0", "one", "0,"])
def test_gpus_that_are_not_there_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    gpus(monkeypatch)
    done = command("run", "quick", "--device", "cuda", "--gpus", wanted)
    assert done.code == 2
    assert f"--gpus {wanted}: the GPUs here are 0, 1; write all, or each index once" in done.err


def test_gpus_are_chosen_by_the_management_library_s_index_and_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    assert uuids(None) == uuids("all") == uuids("0, 1") == ["GPU-a", "GPU-b"]
    assert uuids("1") == ["GPU-b"]
    assert options.find_gpus("cpu", None) == []


def test_trials_of_several_gpus_have_a_set_of_them_each() -> None:
    """What is left over stays idle; with fewer than one trial asks for there is no run."""
    here = ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"]
    assert options.places(here, None) == here
    assert options.places(here, 2) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    assert options.places([], 2) == []
    with pytest.raises(ValueError, match="--gpus-per-trial 8: only 5 GPUs are here; give fewer, or --device cpu"):
        options.places(here, 8)


@pytest.mark.parametrize("only", ["*-ddp-x2/*", "*V50304/*"])
def test_trials_that_are_compared_over_gpus_have_no_neighbour(only: str) -> None:
    here = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    of_scaling = plan.resolve("scaling", Options(device="cuda"), only=only).trials
    assert run.slots_on(of_scaling, here, None, None) == ["GPU-a,GPU-b,GPU-c,GPU-d"]
    others = plan.resolve("speed", Options(device="cuda")).trials
    assert run.slots_on(others, here, None, 2) == here * 2
    assert run.slots_on(others, here, 2, None) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]


def test_all_gpus_are_those_that_an_inherited_choice_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    assert uuids("all") == uuids(None) == ["GPU-d", "GPU-b"]
    assert uuids("0") == ["GPU-a"]  # said outright
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES='' leaves no GPU"):
        uuids("all")


def test_a_run_gives_each_child_a_uuid_and_describes_the_gpu_that_was_chosen(command, monkeypatch, started, tmp_path):
    gpus(monkeypatch)
    assert command("run", "memory", "--device", "cuda", "--gpus", "1", "--out", tmp_path).code == 130
    [run] = started
    assert run.options["executor"].free == ["GPU-b"]
    assert [gpu["uuid"] for gpu in run.environment["details"]["gpus"]] == ["GPU-b"]


@pytest.mark.usefixtures("started")
def test_each_model_has_a_folder_of_its_own_unless_out_says_another(command: Command, tmp_path: Path) -> None:
    for model in ("tiny", "llama-tiny"):
        command("run", "speed", "--device", "cpu", "--model", model, "--only", "ceilings*")
    command("run", "speed", "--device", "cpu", "--model", "tiny", "--only", "ceilings*", "--out", "mine")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"speed-tiny", "speed-llama-tiny"}
    assert (tmp_path / "mine" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"plain text, and then \xff\xfe", "not UTF-8"), (b"too short for a block", "block"), (None, "No such file")],
)
def test_a_text_that_cannot_be_trained_on_exits_2_and_leaves_nothing_half_written(command, tmp_path, content, message):
    path, cache = tmp_path / "bad.txt", tmp_path / "cache"
    if content is not None:
        path.write_bytes(content)
    done = command("run", "quick", "--device", "cpu", "--data", f"text:{path}", "--cache", cache)
    assert done.code == 2
    assert done.err.startswith("te-bench: ")
    assert path.name in done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()
    assert not list(cache.rglob("*.tmp"))


def test_what_cannot_be_written_or_read_exits_2_without_a_traceback(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("run", "memory", "--device", "cpu", "--out", tmp_path / "file" / "out")
    assert done.code == 2
    assert f"te-bench: cannot write to {tmp_path}/file/out: Not a directory. Choose another --out." in done.err
    (tmp_path / "journal.jsonl").mkdir()
    done = command("report", tmp_path)
    assert (done.code, done.err) == (2, f"te-bench: {tmp_path}/journal.jsonl: Is a directory\n")


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_verb_takes_every_option_of_a_run_as_it_is_declared(command: Command, verb: str) -> None:
    done = command(verb, "--help")
    said = " ".join(done.out.split())
    assert done.code == 0
    for option in OPTIONS.values():
        assert re.search(rf"(?<!\S){option.flag}(?![-\w])", said), option.flag
        assert option.help.partition(" ")[0] in said


@pytest.mark.parametrize("verb", ["merge", "report", "history", "embed", "verdict"])
def test_several_folders_are_one_word_in_the_usage(command: Command, verb: str) -> None:
    assert re.search(r" [{[][A-Z]+[]}]\.\.\.$", command(verb, "--help").out.splitlines()[0])


def test_an_option_that_is_said_reaches_the_plan(command: Command) -> None:
    said = ["--device", "cpu", "--seeds", 2, "--model", "tiny", "--batch", 3, "--only", "*/flash/bf16/*"]
    done = command("plan", "speed", *said)
    assert done.code == 0, done.err
    assert "train_step/tiny-b3-t" in done.out
    trials = [line for line in done.out.splitlines() if "train_step" in line]
    assert {line.rpartition("/")[2] for line in trials} == {"s0", "s1"}


def test_a_plan_says_how_long_its_trials_took_before(command: Command, tmp_path: Path) -> None:
    """A record of the same configuration tells of every seed; without one a GPU's are estimated by published ones."""
    asked = ("plan", "speed", "--device", "cpu", "--model", "tiny", "--only", "*/flash/bf16/*", "--out", "run")
    assert "time: not known, because none of these trials has run in run;" in " ".join(command(*asked).out.split())
    trials = json.loads(command(*asked, "--seeds", 2, "--json").out)["trials"]
    planned = [Trial.from_json({key: one[key] for key in one.keys() - {"id", "name"}}) for one in trials]
    first = replace(journals.record(planned[0]), wall_s=70.0)
    failed = journals.record(replace(planned[0], seed=7), outcome="crashed")
    journals.write(tmp_path / "run", [first, failed])
    one_cell = [one for one in planned if one.cell == planned[0].cell]
    assert len(one_cell) == 2 < len(planned)
    said = " ".join(command(*asked, "--seeds", 2).out.split())
    assert (
        "time: about 3 min for 2 of them, the others having no time, one at a time, as long as they took in run" in said
    )
    journals.write(tmp_path / "run", [replace(journals.record(one), wall_s=10.0) for one in planned[1:]])
    said = " ".join(command(*asked, "--seeds", 2).out.split())
    seconds = sum(statistics.median([70, 10]) if one in one_cell else 10 for one in planned)
    assert f"time: about {duration(seconds)}, one at a time, as long as they took in run" in said


@pytest.mark.parametrize(
    ("suite", "how"),
    [
        ("speed", "by published records of like trials and the FLOP of a step"),
        ("layer", "by published records of like trials"),
        ("attention", "by published records of like trials; a guess for attention numerics: as attention's"),
        *((suite, "a guess: as attention's") for suite in ("gemms", "heads", "pieces")),
    ],
)
def test_a_plan_says_by_what_a_gpu_s_time_is_estimated_and_calls_a_guess_one(
    command: Command, suite: str, how: str
) -> None:
    [told] = re.findall(r"(?m)^time: about \d+ min, (.*(?:\n    .*)*)$", command("plan", suite, "--device", "cuda").out)
    assert " ".join(told.split()) == f"one at a time, estimated for an H200, {how}"


def test_what_nobody_foresaw_is_no_verdict(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own exit code for it is 1, which says: inferior."""
    from te_bench.experiments import doctor

    def broken() -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(doctor, "examine", broken)
    done = command("doctor")
    assert done.code == 70
    assert "RuntimeError: nobody foresaw this" in done.err
    assert "this is a fault of te-bench, and no result" in done.err


def test_a_verdict_s_runs_go_on_on_a_host_with_other_cores_and_times_do_not(command, monkeypatch, started, tmp_path):
    gpus(monkeypatch)
    of = {"convergence": ("--preset", "gpt2-short", "--data", "random", "--underpowered"), "memory": ()}
    for suite, asked in of.items():
        for cores in (16, 32):
            monkeypatch.setattr(host, "cores", lambda cores=cores: cores)
            command("run", suite, *asked, "--device", "cuda", "--out", tmp_path / suite)
    once, again, here, elsewhere = (run.environment for run in started)
    assert once["id"] == again["id"]
    assert [machine["details"]["cores"] for machine in (once, again)] == [16, 32]
    assert len(load(tmp_path / "convergence").environments) == 1
    assert here["id"] != elsewhere["id"]


def test_the_command_that_goes_on_does_not_set_aside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["te-bench", "run", "speed", "--fresh", "--within", "20min", "--out", "a b"])
    assert options.again() == "te-bench run speed --within 20min --out 'a b'"
