"""te-bench gate --config: three small projects, of a script, a pytest-benchmark suite and a package that is built."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from in_process import Command
from revisions import Repository

from te_bench.experiments.store import load
from te_bench.gate import checkouts, commands, config, revisions

PYTHON = f"{sys.executable} -I -S"
SCRIPT = "sleep {seconds}\n"
SUITE = """
import time
def test_changed(benchmark):
    benchmark.pedantic(time.sleep, ({seconds},), rounds=3)
def test_same(benchmark):
    benchmark.pedantic(time.sleep, (0.02,), rounds=3)
"""
# Built by its setup, which writes a module; times itself.
PACKAGE = {
    "build.py": "import pathlib\npathlib.Path('src/size.py').write_text('SIZE = {size}')\n",
    "src/bench.py": """
import json, sys, time
from size import SIZE
def once():
    began = time.perf_counter()
    sum(i * i for i in range(SIZE))
    return time.perf_counter() - began
figures = {{"work": [once() for _ in range(9)], {more}}}
json.dump(figures, open(sys.argv[1], "w"))
""",
}
ALONE = 'env = { PYTEST_DISABLE_PLUGIN_AUTOLOAD = "1" }'
Files = Callable[..., str]


@pytest.fixture
def commit(repository: Repository) -> Files:
    """commit({"a.py": "..."}) is a revision of these files; its hash."""

    def write(files: dict[str, str]) -> str:
        for name, content in files.items():
            path = repository.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        repository.git("add", "--all")
        repository.git("commit", "--quiet", "--allow-empty", "-m", "a")
        return repository.git("rev-parse", "HEAD")

    return write


@pytest.fixture
def gate(command: Command, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """gate(base, the config's text), by few runs a pair: on a quiet machine 5 pairs tell."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # pytest-benchmark measures nothing in a worker
    monkeypatch.setattr(revisions, "LOOKS", (5, 8, 12, 20))
    monkeypatch.setattr(commands, "TIMED_S", 0.3)

    def run(base: str, text: str, *arguments: object) -> Any:
        file = tmp_path / "te-bench.toml"
        file.write_text(f'margin = "10%"\n{text}')
        done = command("gate", "--config", file, "--base", base, "--out", tmp_path / "out", *arguments)
        assert not list(temporary.iterdir())
        return done

    return run


def answer(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / "gate.json").read_text())
    return found


def test_a_script_that_takes_twice_as_long_is_found_and_an_unchanged_one_passes(gate, commit, tmp_path):
    base = commit({"job.sh": SCRIPT.format(seconds=0.05)})
    commit({"job.sh": SCRIPT.format(seconds=0.1)})
    text = '[bench.job]\ncommand = "sh job.sh"'
    done = gate(base, text)
    assert (done.code, "REGRESSION: 1 REGRESSION of 1 timed" in done.out) == (1, True), done
    [found] = answer(tmp_path)["trials"]
    assert found["name"] == "job"
    assert 1.02 < found["low"] < found["ratio"] < 2.5  # beyond the margin, 2 %: how far is for the host's noise to say
    assert found["ratio"] > 1.4
    assert found["calls"] >= 2 * found["pairs"] >= 2 * 5  # several runs a pair
    done = gate("HEAD", text, "--margin", "60%")  # which goes before the file's
    assert (done.code, "PASS: 1 " in done.out, "Margin 60 %" in done.out) == (0, True, True), done


def test_a_pytest_benchmark_suite_is_judged_by_benchmark(gate, commit, tmp_path):
    base = commit({"bench_it.py": SUITE.format(seconds=0.02)})
    commit({"bench_it.py": SUITE.format(seconds=0.028)})
    pytest_benchmark = "-m pytest -q -p pytest_benchmark.plugin bench_it.py --benchmark-json={json}"
    text = f"""
        {ALONE}
        [bench.suite]
        command = "{sys.executable} {pytest_benchmark}"
        statistic = "median"
    """
    done = gate(base, text)
    assert done.code == 1, done
    found = {one["name"]: one for one in answer(tmp_path)["trials"]}
    verdicts = {name: one["verdict"] in ("PASS", "IMPROVED") for name, one in found.items()}
    assert verdicts == {"suite: bench_it.py::test_changed": False, "suite: bench_it.py::test_same": True}
    assert 1.3 < found["suite: bench_it.py::test_changed"]["ratio"] < 1.5
    runs_of: dict[int, set[Any]] = {}  # one run writes both figures
    for record in load(tmp_path / "out" / "head").records.values():
        runs_of.setdefault(record.trial.seed, set()).add((record.started_at, record.wall_s))
    assert all(len(runs) == 1 for runs in runs_of.values())


def test_a_package_is_set_up_in_each_revision_and_timed_by_its_own_figures(gate, commit, tmp_path):
    def package(size: int, more: str = "") -> dict[str, str]:
        return {name: content.format(size=size, more=more) for name, content in PACKAGE.items()}

    base = commit(package(50_000, '"gone": 1e-3'))
    head = commit(package(70_000))
    text = f"""
        setup = ["{PYTHON} build.py"]
        env = {{ PYTHONPATH = "{{root}}/src" }}
        [bench.package]
        command = "{sys.executable} -S src/bench.py {{json}}"
    """
    done = gate(base, text)
    assert done.code == 1, done
    [found] = answer(tmp_path)["trials"]
    assert (found["name"], found["verdict"]) == ("package: work", "REGRESSION")
    assert 1.25 < found["ratio"] < 1.6
    [missing] = answer(tmp_path)["findings"]
    assert (missing["name"], missing["message"]) == ("package: gone", "in the baseline, not in the candidate")
    begun = done.err.splitlines()
    assert begun[:3] == ["round 1: every trial", *(f"  setup of {one}: {PYTHON} build.py" for one in ("base", "head"))]

    commit({"build.py": "raise SystemExit('no compiler')"})
    done = gate(head, text)
    assert done.code == 4, done
    said = " ".join(done.out.split())
    assert "head: te-bench.toml: setup[0] ended with exit code 1: no compiler" in said


def test_a_command_that_breaks_is_one_sentence(gate: Callable[..., Any], commit: Files, tmp_path: Path) -> None:
    base = commit({"job.sh": SCRIPT.format(seconds=0.01)})
    commit({"job.sh": "echo looking; echo the input is gone; exit 3"})
    text = '[bench.job]\ncommand = "sh job.sh"'
    done = gate(base, text)
    assert done.code == 4, done
    [found] = answer(tmp_path)["findings"]
    assert found["message"] == "crashed, ok in the baseline: seed 0: ended with exit code 3: the input is gone"
    assert "looking" in (tmp_path / "out" / "trials.log").read_text()
    in_both = {
        "sh job.sh": "ended with exit code 3: the input is gone",
        "no-such-program 1": "cannot be started: no-such-program: No such file or directory",
        "true {json}": "wrote nothing to {json}",
        "true a\\u0000b": "cannot be started: embedded null byte",
    }
    for words, why in in_both.items():
        done = gate("HEAD", f'[bench.job]\ncommand = "{words}"')
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith(f"te-bench: te-bench.toml: bench.job: in both revisions the command {why}\n")


def test_a_command_whose_output_has_no_place_is_one_sentence(gate: Callable[..., Any], commit: Files) -> None:
    commit({})
    done = gate("HEAD", """setup = ["sh -c 'rm {root}.output; mkdir {root}.output'"]\n[bench.job]\ncommand = "true\"""")
    said = "in both revisions the command cannot be started: .*/head.output: Is a directory\n"
    assert (done.code, bool(re.search(said, done.err))) == (2, True), done


def test_the_change_that_adds_the_first_benchmark_is_told_what_to_do(gate, commit, tmp_path):
    base = commit({})
    commit({"new.py": "import sys; open(sys.argv[1], 'w').write('0.01')"})
    done = gate(base, f'[bench.inside]\ncommand = "{PYTHON} new.py {{json}}"')
    said = " ".join(done.out.split())
    assert (done.code, "INCOMPLETE: nothing was timed on both sides" in said) == (4, True), done
    assert "inside: runs in the candidate and fails in the baseline: ended with exit code 2: " in said
    assert "can't open file" in said
    assert said.endswith("Note: if the candidate adds inside, merge it first or allow exit code 4.")


def test_each_round_says_its_pair_and_the_time_that_is_left_at_most(gate, commit):
    commit({"job.sh": SCRIPT.format(seconds=0.01)})
    done = gate("HEAD", '[bench.job]\ncommand = "sh job.sh"', "--margin", "0.1%", "--budget", "3s")
    rounds = [line for line in done.err.splitlines() if line.startswith("round ")]
    assert rounds[0] == "round 1: every trial"
    ahead = r"round (\d+), pair (\d+) of at most (\d+), at most about ([1-3]) s left"
    said = f"{ahead}: 1 trial(?: that may be slower)?: job"
    told = [re.fullmatch(said, line) for line in rounds[1:]]
    assert [(one[1], one[2]) for one in told] == [(str(n), str(n)) for n in range(2, len(told) + 2)]
    assert all(int(one[2]) <= int(one[3]) for one in told)
    left = [int(one[4]) for one in told]
    assert left == sorted(left, reverse=True)
    first, *others = [line for line in done.err.splitlines() if line.startswith("  ")]
    assert ("s of them to start" in first, others) == (True, [])


def test_only_runs_no_bench_that_it_leaves_out_and_takes_brackets_as_they_stand(gate, commit, tmp_path):
    names = ["test_a[1000]", "test_a[1]", "test_a[x, y]"]
    written = json.dumps(dict.fromkeys(names, 1.0))
    commit({"figures.py": f"import sys\nopen(sys.argv[1], 'w').write({written!r})\n"})
    text = f"""
        [bench.other]
        command = "no-such-program"
        [bench.figures]
        command = "no-such-program {{json}}"
        [bench.suite]
        command = "{PYTHON} figures.py {{json}}"
    """
    for only, among in {
        "suite: test_a[1000]": names[:1],
        "suite: test_a[x, y]": names[2:],
        "suite: test_a[1*": names[:2],
        "suite: *[1]": names[1:2],
    }.items():
        done = gate("HEAD", text, "--only", only, "--budget", "0.1s")
        assert done.code == 3, done
        assert {one["name"] for one in answer(tmp_path)["trials"]} == {f"suite: {name}" for name in among}
    done = gate("HEAD", f'setup = ["false"]\n{text}', "--only", "suits")  # before the setup, which would fail
    assert done.err.endswith("suits' matches nothing that te-bench.toml measures; its benches: other, figures, suite\n")


def test_a_gate_that_is_refused_leaves_the_finished_one_as_it_was(gate, commit, tmp_path):
    def kept() -> dict[str, bytes]:
        found = (path for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".jsonl"))
        return {str(path): path.read_bytes() for path in found}

    base = commit({"job.sh": SCRIPT.format(seconds=0.01)})
    commit({"job.sh": "exit 3"})
    text = '[bench.job]\ncommand = "sh job.sh"'
    assert gate(base, text, "--head", base, "--budget", "0.1s").code == 3
    before = kept()
    assert len(before) == 4
    for refused in (
        ("HEAD", text),  # fails in both revisions
        (base, text, "--head", base, "--only", "jub"),
        ("nowhere", text),
        (base, text, "--head", base, "--alpha", 0.7),
    ):
        assert gate(*refused).code == 2
        assert kept() == before
    assert gate(base, text).code == 4
    assert len(kept()) == 6  # both journals of the first gate are kept


@pytest.mark.parametrize(
    ("body", "how", "said"),
    [
        (
            "class TestA:\n @pytest.mark.parametrize('n', [1.5])\n"
            f" def test_b(self, n): raise ValueError('{'very ' * 20}gone')",
            "",
            f"bench_it.py::TestA::test_b[1.5]: ValueError: {'very ' * 20}gone; 1 failed in ",
        ),
        (
            "def test_a(): pass\ndef test_b(): assert [1, 2] == [1, 3]\ndef test_c(): assert 0",
            "--tb=short",
            "bench_it.py::test_b: assert [1, 2] == [1, 3]; 2 failed, 1 passed in ",
        ),
        ("@pytest.fixture\ndef f(): 1 / 0\ndef test_a(f): pass", "", "::test_a: ZeroDivisionError: division by zero;"),
        ("import nope", "", "bench_it.py: ModuleNotFoundError: No module named 'nope'; 1 error in "),
        ("def test_a(): assert 0", "--tb=no", "bench_it.py::test_a - assert 0; 1 failed in "),
    ],
    ids=["case", "second", "fixture", "collecting", "no traceback"],
)
def test_of_a_pytest_that_fails_a_test_and_its_error_are_told(gate, commit, body, how, said):
    commit({"bench_it.py": f"import pytest\n{body}\n"})
    done = gate("HEAD", f'{ALONE}\n[bench.suite]\ncommand = "{sys.executable} -m pytest -q {how} bench_it.py"')
    assert (done.code, done.err.count("\n")) == (2, 2), done
    assert said in done.err


def test_a_run_that_hangs_is_stopped_with_all_that_it_started_and_its_last_line_is_told(gate, commit, tmp_path):
    commit({"job.sh": "echo looking; echo waiting for a lock; setsid sleep 1234.5 & wait"})
    done = gate("HEAD", 'timeout = 0.3\n[bench.job]\ncommand = "sh job.sh"')
    said = "in both revisions the command stopped after 0.3 s (timeout): waiting for a lock"
    assert (done.code, said in done.err) == (2, True), done
    assert "looking" in (tmp_path / "out" / "trials.log").read_text()
    assert not [one for one in psutil.process_iter(["cmdline"]) if "1234.5" in (one.info["cmdline"] or [])]


def test_1_a_regression_stands_if_what_runs_the_commands_is_killed(gate, commit, tmp_path):
    journal = tmp_path / "out" / "head" / "journal.jsonl"
    kill = f"""
        if [ $(grep -c '"kind":"record"' {journal}) -ge 9 ]; then
            runner=$PPID
            for i in 1 2; do runner=$(cut -d' ' -f4 /proc/$runner/stat); done
            kill -9 $runner
            sleep 60
        fi
    """
    base = commit({"slow.sh": SCRIPT.format(seconds=0.02), "same.sh": SCRIPT.format(seconds=0.02)})
    commit({"slow.sh": SCRIPT.format(seconds=0.1), "same.sh": f"{kill}\n{SCRIPT.format(seconds=0.02)}"})
    done = gate(base, '[bench.slow]\ncommand = "sh slow.sh"\n[bench.same]\ncommand = "sh same.sh"', "--margin", "0.1%")
    said = " ".join(done.out.split())
    assert (done.code, "1 REGRESSION" in said) == (1, True), done
    assert "the process that runs commands ended by SIGKILL" in said
    assert "may say why" not in said  # the log is empty
    assert not (tmp_path / "out" / "gate.json").exists()


ONE = '[bench.a]\ncommand = "true"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[bench.a", "is not TOML: "),
        ("", "bench: give a table for each command to time"),
        (f'setups = ["a"]\n{ONE}', "setups is no key. Did you mean setup? Known: bench, setup,"),
        (f'{ONE}margin = "5%"\n', "bench.a.margin is no key. margin goes above the first [bench.NAME]"),
        ('[bench]\ncommand = "true"\n', "[bench] needs a name: [bench.start]"),
        ('[bench]\na = "true"\n', 'bench.a: give a table: [bench.a], command = "..."'),
        ("[bench.a]\n", "bench.a.command is missing: the command to time"),
        ("[bench.a]\ncommand = 3\n", "bench.a.command: 3; give a command as a string"),
        ('[bench.a]\ncommand = "echo \'"\n', 'bench.a.command: "echo \'"; give a command as a string (No'),
        (f"{ONE}statstic = 1\n", "bench.a.statstic is no key. Did you mean statistic? Known:"),
        (f'{ONE}statistic = "min"\n', "bench.a.statistic: only figures that a command writes to {json} have one"),
        ('[bench.a]\ncommand = "a {json}"\nstatistic = "mean"\n', "bench.a.statistic: 'mean'; give one of min, median"),
        (f'setup = "make"\n{ONE}', "setup: 'make'; give a list of commands"),
        (f"setup = [1]\n{ONE}", "setup[0]: 1; give a command as a string"),
        (f'directory = "../x"\n{ONE}', "directory: '../x'; give a folder of the repository, relative to its root"),
        (f"env = {{ A = 1 }}\n{ONE}", "env.A: 1; give a string"),
        (f'env = {{ A = "a\\u0000b" }}\n{ONE}', "env.A: 'a\\x00b'; give a string without NUL"),
        (f'env = {{ "A=B" = "x" }}\n{ONE}', "env: 'A=B'; give the variable a name that is not empty and holds no = "),
        (f'env = {{ "" = "x" }}\n{ONE}', "env: ''; give the variable a name"),
        (f'env = {{ "A\\u0000" = "x" }}\n{ONE}', "env: 'A\\x00'; give the variable a name"),
        (
            '[bench.a]\ncommand = "a && b"\n',
            "bench.a.command: 'a && b'; give the command without &&, with && in quotes, or as sh -c '...', because no "
            "shell runs it",
        ),
        ('[bench.a]\ncommand = "a|b"\n', "give the command without |, with"),
        ("[bench.a]\ncommand = \"a '>' 2>b\"\n", "give the command without >, with"),
        ('[bench.a]\ncommand = "a $HOME"\n', "give the command without $, with"),
        (
            '[bench.a]\ncommand = "A=1 b"\n',
            "bench.a.command: 'A=1 b'; give the command without A=, by env = { A = \"...\" } or as sh -c",
        ),
        ('[bench.a]\ncommand = "a tests/*.py"\n', "give the command without *, with"),
        ('[bench.a]\ncommand = "a b?.py"\n', "give the command without ?, with"),
        ('[bench.a]\ncommand = "a ~/b"\n', "give the command without ~, with"),
        ('[bench.a]\ncommand = "a # b"\n', "give the command without #, with"),
        ('[bench.a]\ncommand = "a {jsn}"\n', "give {json} or {root} in place of {jsn}, which stands for nothing"),
        ('[bench.a]\ncommand = "a --out={out}"\n', "in place of {out}, which stands for nothing"),
        ("[bench.a]\ncommand = \"sh -c 'a {JSON}'\"\n", "in place of {JSON}, which stands for nothing"),
        (f'setup = ["make; make install"]\n{ONE}', "setup[0]: 'make; make install'; give the command without ;, with"),
        (f'env = {{ A = "{{rot}}/src" }}\n{ONE}', "env.A: '{rot}/src'; give {json} or {root} in place of {rot}"),
        (f"warmup = 0\n{ONE}", "warmup: 0; give a whole number from 1"),
        (f"timeout = 0\n{ONE}", "timeout: 0; give seconds, more than 0"),
        (f'margin = "5"\n{ONE}', "margin 5: give more than 0 % and at most 100 %, with the % sign"),
        (f'budget = "soon"\n{ONE}', "budget soon: give a time greater than 0"),
    ],
)
def test_a_bad_config_is_one_sentence_with_file_and_key(command: Command, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "te-bench.toml"
    file.write_text(text)
    done = command("gate", "--config", file, "--base", "main")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"te-bench: {file}"), done
    assert said in done.err
    assert done.err.count("\n") == 1


def test_what_goes_with_a_config(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(revisions, "run", lambda question, *_, **__: asked.append(question) or sys.exit(0))
    monkeypatch.setattr(checkouts, "repository", lambda inside: inside)
    monkeypatch.setattr(checkouts, "dirty", lambda root: False)
    one = ONE.replace("true", "sh -c 'a  b'")
    (tmp_path / "a.toml").write_text(f'margin = "5%"\nbudget = "90s"\ntimeout = 7\n{one}')
    command("gate", "--config", "a.toml", "--base", "main")
    command("gate", "--config", "a.toml", "--base", "main", "--margin", "3%", "--budget", "1min", "--timeout", 9)
    assert [(one.margin, one.budget_s, one.timeout_s) for one in asked] == [(0.05, 90, 7), (0.03, 60, 9)]
    assert [one.commands.commands[0].words for one in asked] == [("sh", "-c", "a  b")] * 2
    done = command("gate", "--config", "a.toml", "--base", "main", "--suite", "quick")
    assert (done.code, "--suite: only for suites, and --config times commands instead" in done.err) == (2, True)
    assert "add a revision to compare with" in command("gate", "--config", "a.toml").err
    assert "cannot read b.toml: No such file" in command("gate", "--config", "b.toml", "--base", "main").err


def test_what_quotes_hold_is_the_commands_own(tmp_path: Path) -> None:
    words = ["sh", "-c", "a && b > $HOME | awk '{print}'"]
    file = tmp_path / "te-bench.toml"
    file.write_text(f"env = {{ A = '{{name}}' }}\n[bench.a]\ncommand = {json.dumps(shlex.join(words))}")
    [command] = config.read(file).commands
    assert command.words == tuple(words)


def test_figures_that_a_command_writes_are_seconds(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for written, statistic, figures in (
        (0.5, "min", {"": 0.5}),
        ([3, 1, 2, 9], "min", {"": 1}),
        ([3, 1, 2, 9], "median", {"": 2.5}),
        ({"a": 1, "b": [2, 4]}, "median", {"a": 1, "b": 3}),
        ({"benchmarks": [{"fullname": "x::y", "stats": {"min": 1, "median": 2}}]}, "median", {"x::y": 2}),
    ):
        file.write_text(json.dumps(written))
        assert commands.read_figures(file, statistic) == figures
    for wrong in ("", "{}", "[]", "0", "-1", "true", '"1"', '{"a": [1, null]}', '{"benchmarks": 1}', "NaN"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"JSON|json"):
            commands.read_figures(file, "min")
