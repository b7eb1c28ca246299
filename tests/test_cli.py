"""The command line: usage errors exit 2 and say what is legal; nothing heavy is imported before it is needed."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from driving import rows, te_bench

from te_bench import __version__, cli, plugins
from te_bench.cli import look, options
from te_bench.experiments import doctor, environment, runner
from te_bench.experiments.spec import Trial
from te_bench.experiments.store import Store
from te_bench.models.recipe import rowwise_scaling


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> "Command":
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


class Command:
    """command("plan", "quick") runs te-bench in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["te-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code
        return Done(code if isinstance(code, int) else 0, *self.capsys.readouterr())


USAGE = [
    (
        ["run", "quik"],
        "unknown suite 'quik'. Did you mean quick? Known: attention, curves, fp8, layer, memory, nanogpt, quick.",
    ),
    (["plan", "nanogtp"], "unknown suite 'nanogtp'. Did you mean nanogpt?"),
    (["run", "quick", "--device", "cdua"], "unknown device 'cdua'. Did you mean cuda"),
    (["run", "nanogpt", "--only", "*/flush/*"], "--only '*/flush/*' matches no trial of nanogpt."),
    (["run", "quick", "--seeds", "0"], "--seeds 0: give 1 or more"),
    (["run", "quick", "--timeout", "0"], "--timeout 0: give seconds greater than 0"),
    (["run", "quick", "--timeout", "nan"], "--timeout nan: give seconds greater than 0"),
    (["run", "quick", "--budget", "0"], "--budget 0: give seconds greater than 0"),
    (["run", "curves", "--budget", "inf"], "--budget inf: give seconds greater than 0"),
    (["run", "quick", "--budget", "5"], "--budget: the suite quick has no time-budget trial"),
    (["run", "quick", "--data", "stdlb"], "unknown data set 'stdlb'"),
    (["run", "quick", "--data", "gpt2=stdlib"], "unknown model of --data 'gpt2'. Known: tiny."),
    (["run", "memory", "--data", "stdlib"], "--data: the suite memory trains on no data set"),
    (["list", "suits"], "unknown kind 'suits'. Did you mean suites? Known: suites, attention, recipes, layers,"),
    (["report", "nowhere"], "nowhere holds no journal.jsonl: it is not the --out directory of a te-bench run"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_a_usage_error_exits_2_says_what_is_legal_and_writes_nothing(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    device = ["--device", "cpu"] if arguments[0] == "run" and "--device" not in arguments else []
    cache = ["--cache", str(tmp_path / "cache")] if arguments[0] == "run" else []
    done = command(*arguments, *device, *cache)
    assert done.code == 2
    assert re.match("te-bench: (/.*/)?" + re.escape(message), done.err)  # a relative path may be shown whole
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument"),
        (["run", "quick", "--seeds", "many"], "Invalid value for '--seeds'"),
        (["run", "quick", "--sede", "1"], "No such option"),
    ],
)
def test_the_parser_s_own_errors_exit_2_too(command: Command, arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert message in done.err


def gpus(monkeypatch: pytest.MonkeyPatch, number: int = 2, *, cuda: str | None = "13.0") -> None:
    """A machine with so many GPUs, and a torch built for this CUDA."""
    found = [
        {"index": i, "name": "NVIDIA H200", "uuid": f"GPU-{'abcdef'[i]}", "driver": "580.1"} for i in range(number)
    ]
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: found)
    monkeypatch.setattr(environment, "_torch_build", lambda: {"version": "2.13.0", "cuda": cuda})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def uuids(gpus: str | None) -> list[str]:
    return [gpu["uuid"] for gpu in options.find_gpus("cuda", gpus)]


def test_cuda_without_a_gpu_says_what_to_do(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    for wanted in ("all", "0,1"):
        done = command("run", "quick", "--device", "cuda", "--gpus", wanted)
        assert done.code == 2
        assert "--device cuda: the NVIDIA driver reports no GPU here. Use --device cpu" in done.err


def test_cuda_with_a_torch_that_has_none_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, cuda=None)
    done = command("run", "quick", "--device", "cuda")
    assert done.code == 2
    assert "--device cuda: torch 2.13.0 is built without CUDA; install one that is not: https://pytorch.org" in done.err
    assert options.options(None, None, None, None, None).device == "cpu"


@pytest.mark.parametrize("wanted", ["2", "0,2", "0,0", "0, 0", "one", "0,", ""])
def test_gpus_that_are_not_there_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    gpus(monkeypatch)
    done = command("run", "quick", "--device", "cuda", "--gpus", wanted)
    assert done.code == 2
    assert f"--gpus {wanted}: the GPUs here are 0, 1; write all, or each index once" in done.err


def test_gpus_of_a_run_on_a_cpu_are_refused(command: Command) -> None:
    done = command("run", "quick", "--device", "cpu", "--gpus", "0")
    assert done.code == 2
    assert "--gpus 0: this run is on the cpu; leave it out, or add --device cuda" in done.err


def test_gpus_are_chosen_by_the_management_library_s_index_and_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    assert uuids(None) == uuids("all") == uuids("0, 1") == ["GPU-a", "GPU-b"]
    assert uuids("1") == ["GPU-b"]
    assert options.find_gpus("cpu", None) == []


def test_all_gpus_are_those_that_an_inherited_choice_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    assert uuids("all") == uuids(None) == ["GPU-d", "GPU-b"]
    assert uuids("0") == ["GPU-a"]  # said outright
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES='' leaves no GPU"):
        uuids("all")


def test_a_run_gives_each_child_a_uuid_and_describes_the_gpu_that_was_chosen(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus(monkeypatch)
    seen: dict[str, Any] = {}

    def stop(trials: object, store: Store, environment_id: str, **options: Any) -> None:
        seen.update(options, described=store.journal.environments[environment_id]["details"]["gpus"])
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", stop)
    assert command("run", "memory", "--device", "cuda", "--gpus", "1", "--out", tmp_path).code == 130
    assert seen["gpus"] == ["GPU-b"]
    assert [gpu["uuid"] for gpu in seen["described"]] == ["GPU-b"]


def bad_text(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.txt"
    if kind == "not UTF-8":
        path.write_bytes(b"plain text, and then \xff\xfe")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "short":
        path.write_text("too short for a block")
    elif kind == "directory":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not UTF-8", "not UTF-8"),
        ("empty", "empty"),
        ("short", "block"),
        ("directory", "directory"),
        ("missing", "No such file"),
    ],
)
def test_a_text_that_cannot_be_trained_on_exits_2_and_leaves_nothing_half_written(
    command: Command, tmp_path: Path, kind: str, message: str
) -> None:
    path = bad_text(tmp_path, kind)
    cache = tmp_path / "cache"
    done = command("run", "quick", "--device", "cpu", "--data", f"text:{path}", "--cache", cache)
    assert done.code == 2
    assert done.err.startswith("te-bench: ")
    assert path.name in done.err
    assert message.lower() in done.err.lower()
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()
    assert not list(cache.rglob("*.tmp"))


def test_an_out_that_cannot_be_written_exits_2(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("run", "memory", "--device", "cpu", "--out", tmp_path / "file" / "out")
    assert done.code == 2
    assert f"te-bench: cannot write to {tmp_path}/file/out: Not a directory. Choose another --out." in done.err


def test_a_file_that_cannot_be_read_exits_2_without_a_traceback(command: Command, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    done = command("report", tmp_path)
    assert (done.code, done.err) == (2, f"te-bench: {tmp_path}/journal.jsonl: Is a directory\n")


def test_data_belongs_to_a_model_or_to_all() -> None:
    assert options.data_sets(["char=text:a=b", "hf:x:y", "tiny=random"]) == {
        "char": "text:a=b",
        "": "hf:x:y",
        "tiny": "random",
    }
    assert options.data_sets(["text:a=b"]) == {"": "text:a=b"}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["stdlib", "random"], "--data random: every model has the data set stdlib already; give each model one"),
        (["a=stdlib", "a=stdlib"], "--data a=stdlib: the model a has the data set stdlib already"),
    ],
)
def test_two_data_sets_for_one_model_are_refused(specs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.data_sets(specs)


def test_version(command: Command) -> None:
    done = command("--version")
    assert (done.code, done.out) == (0, f"te-bench {__version__}\n")


@pytest.mark.parametrize("kind", look.KINDS)
def test_list_as_text_and_as_json(command: Command, kind: str) -> None:
    listed = json.loads(command("list", kind, "--json").out)
    assert listed
    assert all(set(row) == {"name", "about"} and row["about"] and "\n" not in row["about"] for row in listed)
    lines = command("list", kind).out.splitlines()
    assert [line.split()[0] for line in lines] == [row["name"] for row in listed]


def test_list_recipes_tells_what_each_does(command: Command) -> None:
    listed = {row["name"]: row["about"] for row in json.loads(command("list", "recipes", "--json").out)}
    assert set(listed) == {"delayed_scaling", "float8_block_scaling", "float8_current_scaling", "rowwise_scaling"}
    assert "amaxes of the steps before" in listed["delayed_scaling"]
    assert "transformer_engine" in command("list", "layers").out


def test_list_shows_suites_unless_told_otherwise(command: Command) -> None:
    assert command("list").out == command("list", "suites").out


def test_plan_gives_the_trials_that_run_would_do(command: Command) -> None:
    shown = json.loads(command("plan", "quick", "--device", "cpu", "--json", "--cache", "cache").out)
    trials = [
        Trial.from_json({name: value for name, value in trial.items() if name not in ("id", "name")})
        for trial in shown["trials"]
    ]
    assert [(t.id, t.name) for t in trials] == [(trial["id"], trial["name"]) for trial in shown["trials"]]
    assert shown["baseline"] in {t.cell for t in trials}
    text = command("plan", "quick", "--device", "cpu", "--cache", "cache").out.splitlines()
    assert [line.split()[0] for line in text[:-1]] == [t.id for t in trials]
    assert text[-1] == f"{len(trials)} trials: Quick look: tiny GPT, 2 x 64 tokens"


def test_doctor_says_what_can_run_and_why_not(command: Command) -> None:
    found = json.loads(command("doctor", "--json").out)
    assert {"machine", "packages", "precisions", "modes"} <= set(found)
    assert any(section.startswith("attention (") for section in found)
    assert "attention (" in command("doctor").out
    assert set(found["FP8 recipes"]) == set(plugins.names("te_bench.models.recipe"))
    assert all(answer.startswith("ok") for answer in found["FP8 recipes"].values())  # emulated where there is no GPU


def test_doctor_says_which_recipe_a_gpu_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise_scaling.RowwiseScaling, "unsupported", lambda self, device, capability: "no rows here")
    found = doctor._capabilities("cpu")
    assert found["FP8 recipes"]["rowwise_scaling"] == "no rows here"
    assert found["FP8 recipes"]["delayed_scaling"].startswith("ok")
    assert found["precisions"]["fp8"] == "see the recipes"


def test_doctor_does_not_promise_to_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvidia_gpus", list)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    modes = doctor.examine()["modes"]
    assert modes["compile"] == "needs a C++ compiler (g++ or clang++)"
    assert modes["eager"] == "ok"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor.examine()["modes"]["compile"] == "ok"


def test_doctor_says_why_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, cuda=None)
    monkeypatch.setitem(environment.nvidia_gpus()[0], "memory_bytes", 141 * 2**30)
    machine = doctor.examine()["machine"]
    assert machine["device"] == "cpu"
    assert machine["gpu use"].startswith("torch 2.13.0 is built without CUDA")


def test_a_missing_package_is_named_without_a_traceback(no_package: Callable[[str], dict[str, str]]) -> None:
    done = te_bench("list", "datasets", env=no_package("numpy"))
    assert (done.returncode, done.stderr) == (2, "te-bench: needs the package numpy: pip install numpy\n")


def test_a_module_of_our_own_that_is_missing_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "te_bench.models.configs", None)
    monkeypatch.setattr(sys, "argv", ["te-bench", "list", "models"])
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def test_listing_models_needs_no_torch(no_torch: dict[str, str]) -> None:
    done = te_bench("list", "models", env=no_torch)
    assert done.returncode == 0, done.stderr
    assert "gpt2-xl" in done.stdout


def test_a_process_that_a_test_starts_finds_te_bench_where_it_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import te_bench; print(te_bench.__file__)"]  # -S: nothing is installed
    found = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert Path(found.strip()) == Path(__file__).resolve().parents[1] / "te_bench" / "__init__.py"


# Import cost.


def seconds_of_help() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "te_bench.cli", "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def test_help_answers_within_three_tenths_of_a_second() -> None:
    assert min(seconds_of_help() for _ in range(5)) <= 0.3


HEAVY = ("torch", "numpy", "pandas", "matplotlib", "scipy", "datasets", "rich.progress")


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, te_bench.cli; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.fixture
def poisoned(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch, by whomsoever, ends the process."""
    package = tmp_path / "poisoned" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os; os.write(2, b'torch was imported'); os._exit(99)\n")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *([before] if before else [])])}


def test_the_poison_works(poisoned: dict[str, str]) -> None:
    done = te_bench("doctor", env=poisoned)
    assert (done.returncode, done.stderr) == (99, "torch was imported")


@pytest.mark.parametrize("suite", ["attention", "curves", "fp8", "layer", "memory", "nanogpt", "quick"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planning_never_imports_torch(poisoned: dict[str, str], tmp_path: Path, suite: str, device: str) -> None:
    data = ["--data", "random"] if suite == "curves" else []  # a BPE of 50257 words takes a minute to train
    done = te_bench("plan", suite, "--device", device, "--cache", tmp_path / "cache", *data, env=poisoned)
    assert done.returncode == 0, done.stderr


def test_reporting_and_listing_never_import_torch(poisoned: dict[str, str], tmp_path: Path) -> None:
    for kind in look.KINDS:
        assert te_bench("list", kind, env=poisoned).returncode == 0
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent / 'reports')!r})\n"
    code += f"import journals; from pathlib import Path; journals.everything(Path({str(tmp_path / 'run')!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **poisoned})
    done = te_bench("report", tmp_path / "run", env=poisoned)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()


@pytest.mark.slow
def test_a_real_run_from_plan_to_report_and_the_rerun_that_does_nothing(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    only = "train_step/*/[mf]*/*"
    arguments = ["quick", "--seeds", "1", "--device", "cpu", "--only", only, "--cache", cache]
    planned = json.loads(te_bench("plan", *arguments, "--json").stdout)["trials"]
    assert {trial["precision"] for trial in planned} == {"fp32", "bf16", "fp8"}
    done = te_bench("run", *arguments, "--out", out, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(out)
    assert [row["trial"]["id"] for row in written] == [trial["id"] for trial in planned]
    assert {row["outcome"] for row in written} == {"ok"}
    for row in written:
        assert len(row["samples"]["latency_s"]) == 20
        assert len(row["samples"]["loss"]) == 30  # 10 burn-in, 20 timed
    report = out / "report"
    assert all((report / name).stat().st_size for name in ("index.html", "report.md", "records.csv"))
    assert list(report.rglob("*.svg"))
    assert re.search(rf"^{len(planned)} ok$", done.stdout, re.MULTILINE)

    again = te_bench("run", *arguments, "--out", out, timeout=300)
    assert again.returncode == 0
    assert f"{len(planned)} of {len(planned)} trials are already in {out}" in again.stdout
    assert rows(out) == written


@pytest.mark.slow
def test_the_layer_suite_runs_on_a_cpu_and_is_reported(tmp_path: Path) -> None:
    done = te_bench("run", "layer", "--device", "cpu", "--out", tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(tmp_path / "out")
    assert {row["outcome"] for row in written} == {"ok"}
    assert {len(row["samples"]["latency_s"]) for row in written} == {50}
    told = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "One transformer layer, fair" in told
    assert "(another mask)" in told
