"""What the command line imports: nothing heavy before it is needed, and torch only to run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import journals
import pytest
from driving import te_bench

from te_bench import cli, plugins
from te_bench.cli import look


def test_a_missing_package_is_named_without_a_traceback(no_package: Callable[[str], dict[str, str]]) -> None:
    done = te_bench("list", "datasets", env=no_package("numpy"))
    assert (done.returncode, done.stderr) == (2, "te-bench: needs the package numpy: pip install numpy\n")


def test_a_module_of_our_own_that_is_missing_is_our_fault(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "te_bench.models.configs", None)
    monkeypatch.setattr(sys, "argv", ["te-bench", "list", "models"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 70
    said = capsys.readouterr().err
    assert "ModuleNotFoundError: import of te_bench.models.configs halted" in said
    assert "pip install" not in said


@pytest.mark.parametrize("words", [["--only", ""], ["--only="]])
def test_an_empty_argument_is_refused_as_an_unset_variable(words: list[str]) -> None:
    done = te_bench("run", "demo", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"te-bench: the argument {words[0] if len(words) == 1 else 'after --only'} is empty: is a variable unset?\n"
    )


def test_a_value_that_ends_in_an_equals_sign_is_not_empty() -> None:
    done = te_bench("plan", "quick", "--device", "cpu", "--model-args=suffix=")
    assert "is empty" not in done.stderr


def test_a_closed_output_is_no_fault() -> None:
    command = 'exec "$0" -m te_bench.cli list recipes >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, sys.executable], check=False).returncode == 0


@pytest.mark.parametrize(  # what a command prints, what Typer prints, and what ends by another code
    ("words", "unbuffered"),
    [
        ("list recipes", ""),
        ("list recipes", "1"),
        ("--help", ""),
        ("verdict --baseline 0 --candidate 1 --margin 1e-2", "1"),
    ],
)
def test_a_pipe_whose_reader_has_gone_ends_like_sigpipe(words: str, unbuffered: str, tmp_path: Path) -> None:
    for side in "01":
        (tmp_path / side).write_text(f"3.280{side}\n3.281{side}\n3.279{side}\n3.282{side}\n")
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "te_bench.cli", *words.split()]
    done = subprocess.run(
        command, stdout=writes, stderr=subprocess.PIPE, cwd=tmp_path, check=False, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_process_that_a_test_starts_finds_te_bench_where_it_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import te_bench; print(te_bench.__file__)"]  # -S: nothing is installed
    found = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert Path(found.strip()) == Path(__file__).resolve().parents[2] / "te_bench" / "__init__.py"


# Import cost.


def seconds_of_help() -> float:
    """Of the processor's time, which others that run here do not stretch."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "te_bench.cli", "--help"], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_answers_within_three_tenths_of_a_second() -> None:
    assert 0.01 < min(seconds_of_help() for _ in range(5)) <= 0.3


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


#: te-bench called again and again, each call said before it begins: of one that imports torch its name is the last.
AGAIN = """
import json
import sys

from te_bench import cli

for arguments in json.loads(sys.argv[1]):
    print(*arguments, flush=True)
    sys.argv[1:] = arguments
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, ended.code
"""


def called(calls: list[list[str]], env: dict[str, str]) -> None:
    """te-bench by each list of arguments, in one process."""
    command = [sys.executable, "-c", AGAIN, json.dumps(calls)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-500:]}{done.stderr}"


def test_planning_never_imports_torch(poisoned: dict[str, str], tmp_path: Path) -> None:
    """But of steps over ranks, for only the modes of parallelism know what they cannot divide."""
    calls = [
        ["plan", suite, "--device", device, "--cache", str(tmp_path / "cache")]
        + (
            ["--data", "random"] if suite in ("convergence", "curves", "stress") else []
        )  # a BPE takes a minute to train
        for device in ("cpu", "cuda")
        for suite in plugins.names("te_bench.experiments.suites")
        if suite != "scaling"
    ]
    called(calls, poisoned)


def test_reporting_and_listing_never_import_torch(poisoned: dict[str, str], tmp_path: Path) -> None:
    journals.everything(tmp_path / "run")
    called([*(["list", kind] for kind in look.KINDS), ["report", str(tmp_path / "run")]], poisoned)
    assert list((tmp_path / "run").rglob("index.html"))


REPORTING = """
import sys
import numpy

def leggauss(order):
    raise AssertionError("takes seconds on a busy machine")

numpy.polynomial.legendre.leggauss = leggauss
import te_bench.reports.page.render
print([name for name in ("scipy.optimize", "scipy.stats", "torch") if name in sys.modules])
"""


def test_a_report_prepares_nothing_that_only_some_reports_show() -> None:
    assert subprocess.check_output([sys.executable, "-c", REPORTING], text=True) == "[]\n"


def test_a_sentence_at_a_run_s_end_imports_no_figures() -> None:
    code = "import sys, te_bench.gate.question; from te_bench.cli.options import say; say('2 of 2 trials ok')"
    code += "; print([name for name in ('matplotlib', 'scipy') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "2 of 2 trials ok\n[]\n"


def test_a_trial_imports_no_scipy() -> None:
    code = "import sys, te_bench.experiments.trial, te_bench.experiments.workloads.train_step; print('scipy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
