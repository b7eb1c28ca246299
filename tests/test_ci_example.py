"""The action and the workflows: its own shell lines, run in a small repository, with stand-ins for what GitHub has."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from revisions import Repository

from te_bench.gate import config
from te_bench.gate.output import MARKER

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: dict[str, dict[str, Any]] = {step["name"]: step for step in ACTION["runs"]["steps"]}
SHELL = {name: step["run"] for name, step in STEPS.items()}
EXAMPLES = sorted((ROOT / "examples" / "ci").glob("*.yml"))
OURS = (ROOT / ".github" / "workflows").glob("*.yml")
WORKFLOWS = {path: yaml.safe_load(path.read_text()) for path in [*EXAMPLES, *OURS]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What te-bench depends on, and what of it a gate on commands does without.
NEEDED = {re.split(r"[^\w-]", one)[0] for one in PROJECT["dependencies"]}
LEFT_OUT = {"torch", "triton", "tokenizers", "safetensors"}
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # `shell: bash`, as GitHub starts it
FAST, SLOW = 0.002, 0.006

# Rounds of a tenth of a second, judged once.
TE_BENCH = f"""#!{sys.executable}
import sys
from te_bench.cli import main
from te_bench.gate import paired_trial, revisions

paired_trial.SHARED = ()
paired_trial.TURN_S, paired_trial.TIMED_S, paired_trial.MOST_TURNS = 0.004, 0.03, 6
revisions.LOOKS = (5,)
sys.argv += [] if "--config" in sys.argv else ["--device", "cpu"]
main()
"""
# gh api: answers with the comments that are there, through the filter that it is given, and notes what it is to do.
GH = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys

assert os.environ["GH_TOKEN"] == "token"
arguments = sys.argv[1:]
if "--jq" in arguments:
    endpoint, how = arguments[2], arguments[arguments.index("--jq") + 1]
    if arguments == ["api", "user", "--jq", ".login"]:
        known = pathlib.Path("login")
        print(known.read_text() if known.exists() else '{{"message": "not accessible"}}')
        sys.exit(not known.exists())
    assert (arguments[:2], endpoint) == (["api", "--paginate"], "repos/team/repository/issues/7/comments")
    sys.exit(pathlib.Path("unreadable").exists() or subprocess.run(["jq", "-r", how, "comments.json"]).returncode)
body = [pathlib.Path(a.removeprefix("body=@")).read_text() for a in arguments if a.startswith("body=@")]
said = [a for a in arguments[1:] if a.startswith(("repos/", "id=")) or a in ("POST", "PATCH")]
with open("done.jsonl", "a") as file:
    print(json.dumps([*said, *body]), file=file)
sys.exit(("POST" in said or "id=N3" in said) and pathlib.Path("read-only").exists())
"""
# python3 of a version: makes a virtual environment whose python notes what it is asked to install.
PYTHON3 = f"""#!{sys.executable}
import os, pathlib, sys

if sys.argv[1] == "-c":
    sys.version_info = tuple(map(int, os.environ["VERSION"].split(".")))
    exec(sys.argv[2])
python = pathlib.Path(sys.argv[3]) / "bin" / "python"
python.write_text('#!/bin/sh\\necho "$@" >> "$RUNNER_TEMP/installed"\\n')
python.chmod(0o755)
"""


class Done(NamedTuple):
    code: int
    log: str
    summary: str
    outputs: str


Step = Callable[..., Done]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def step(repository: Repository, tmp_path: Path) -> Step:
    """step("Gate", BUDGET="1s"): the step's lines, inside the repository, with the inputs that it is given."""
    path = tmp_path / "te-bench" / "bin"  # of the virtual environment that the first step makes
    path.mkdir(parents=True)
    for name, program in (("te-bench", TE_BENCH), ("gh", GH), ("python3", PYTHON3)):
        (path / name).write_text(program)
        (path / name).chmod(0o755)
    inputs = {name.upper().replace("-", "_"): str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    inputs |= {"MARGIN": "100%", "SUITE": "quick", "GITHUB_BASE_REF": "main", "RUNNER_TEMP": str(tmp_path)}

    def run(name: str, **environment: str) -> Done:
        files = {which: tmp_path / which for which in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        for file in files.values():
            file.write_text("")
        env = {**os.environ, **inputs, **environment, **{key: str(file) for key, file in files.items()}}
        env["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}"
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False}
        done = subprocess.run([*BASH, "-c", SHELL[name]], cwd=repository.root, env=env, **how)
        return Done(done.returncode, done.stdout + done.stderr, *(file.read_text() for file in files.values()))

    return run


def test_the_installation_is_pinned_and_without_torch_but_for_a_suite(step: Step, tmp_path: Path) -> None:
    where = {"GITHUB_ACTION_PATH": str(ROOT), "VERSION": "3.11"}
    old = step("Install te-bench", **{**where, "VERSION": "3.10"})
    assert (old.code, "::error::te-bench needs Python 3.11 or newer as python3" in old.log) == (2, True), old
    installed, pip = tmp_path / "installed", "-m pip install -q --disable-pip-version-check "
    assert not installed.exists()
    assert step("Install te-bench", **where, SUITE="quick").code == 0
    assert installed.read_text() == f"{pip}-c {ROOT}/constraints.txt {ROOT}\n"
    installed.unlink()
    assert step("Install te-bench", **where, SUITE="").code == 0
    packages, own = installed.read_text().splitlines()
    assert own == f"{pip}--no-deps {ROOT}"
    assert packages.startswith(f"{pip}-c {ROOT}/constraints.txt ")
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in constraints if "==" in line}
    named = packages.removeprefix(f"{pip}-c {ROOT}/constraints.txt ")
    assert {*named.split()} == NEEDED - LEFT_OUT <= pinned
    page = (ROOT / "docs" / "gate-any-repository.md").read_text()
    assert f"\n    pip install {named}\n    pip install --no-deps " in page  # what a user types is the action's


def test_commands_are_gated_by_what_the_action_installs(repository: Repository, step: Step, tmp_path: Path) -> None:
    (repository.root / "te-bench.toml").write_text('[bench.nap]\ncommand = "sleep 0.01"')
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "-m", "a")
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({sorted(LEFT_OUT)})\n")
    path = os.pathsep.join([str(absent), os.environ["PYTHONPATH"]])
    done = step("Gate", SUITE="", BASE="HEAD", BUDGET="0.06s", PYTHONPATH=path)
    assert (done.code, "INCONCLUSIVE: 1 INCONCLUSIVE of 1 timed" in done.summary) == (0, True), done


def branched(repository: Repository, base: Mapping[str, Any], head: Mapping[str, Any]) -> str:
    """A pull request's repository: main is at the first revision, HEAD one commit on. The first one's hash."""
    commit = repository.commit(base)
    repository.git("update-ref", "refs/remotes/origin/main", commit)
    repository.commit(head)
    return commit


def test_unchanged_code_passes_and_is_compared_with_the_merge_base(repository: Repository, step: Step) -> None:
    base = branched(repository, {"a": FAST}, {"a": FAST})
    ahead = repository.git("rev-parse", "HEAD")
    repository.git("checkout", "--quiet", "--detach", base)
    repository.git("update-ref", "refs/remotes/origin/main", repository.commit({"other": FAST}))  # main went on
    repository.git("checkout", "--quiet", "--detach", ahead)
    done = step("Gate")
    assert (done.code, done.outputs) == (0, "code=0\nanswered=true\n"), done
    assert done.summary.startswith(f"{MARKER}\n**PASS")
    assert "::warning::" not in done.log
    written = repository.root / "te-bench-gate"
    assert json.loads((written / "gate.json").read_text())["baseline"] == base
    assert (written / "gate.md").read_text() == done.summary
    assert (written / "gate.xml").read_text().startswith("<?xml")
    assert (written / "records" / "head" / "journal.jsonl").exists()


def test_a_regression_fails_whatever_else_is_let_through(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST, "gone": FAST}, {"a": SLOW})
    done = step("Gate", LET_THROUGH="3 4")
    assert (done.code, done.outputs) == (1, "code=1\nanswered=true\n"), done
    assert done.summary.startswith(f"{MARKER}\n**REGRESSION")


def test_undecided_is_let_through_with_a_warning_or_fails_as_the_team_chose(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", BUDGET="0.06s")
    assert (done.code, "::warning::te-bench gate: exit code 3" in done.log) == (0, True), done
    assert done.summary.startswith(f"{MARKER}\n**INCONCLUSIVE")
    strict = step("Gate", BUDGET="0.06s", LET_THROUGH="")
    assert (strict.code, "::warning::" in strict.log) == (3, False), strict


def test_a_trial_that_is_gone_fails_unless_the_team_accepts_it(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST, "gone": FAST}, {"a": FAST})
    done = step("Gate", BUDGET="0.06s", LET_THROUGH="3 4")  # undecided, too: what is missing comes first
    assert (done.code, done.outputs) == (0, "code=4\nanswered=true\n"), done


def test_what_could_not_be_asked_fails_and_has_no_answer(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", BUDGET="soon", LET_THROUGH="3 4")
    assert (done.code, done.summary, done.outputs) == (2, "", "code=2\n")
    assert "--budget soon" in done.log


def test_without_a_merge_base_it_says_what_is_missing(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", GITHUB_BASE_REF="gone")
    assert (done.code, "::error::no commit is common to HEAD and 'gone'" in done.log) == (2, True)
    repository.git("checkout", "--quiet", "--orphan", "unrelated")
    repository.commit({"b": FAST})
    assert step("Gate").code == 2


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq, which gh has built in")
def test_the_comment_is_the_gates_own_and_older_ones_are_folded(repository: Repository, step: Step) -> None:
    (repository.root / "te-bench-gate").mkdir()
    written = repository.root / "te-bench-gate" / "gate.md"
    report = f"{MARKER}\n**PASS: ∞**\n"
    written.write_text(report)

    def comment(number: int, kind: str, body: str, login: str = "github-actions[bot]") -> dict[str, Any]:
        return {"id": number, "node_id": f"N{number}", "user": {"type": kind, "login": login}, "body": body}

    quoted = comment(1, "User", report, "someone")  # not to be edited, nor can it be
    other = comment(2, "Bot", "of another workflow")
    own = [comment(n, "Bot", f"{MARKER}\nold") for n in (3, 4, 5)]
    environment = {"GITHUB_REPOSITORY": "team/repository", "NUMBER": "7", "GH_TOKEN": "token"}

    def done(*comments: Any, **named: str) -> Any:
        (repository.root / "comments.json").write_text(json.dumps(comments))
        (repository.root / "done.jsonl").unlink(missing_ok=True)
        found = step("Comment", **environment, **named)
        assert found.code == 0, found
        lines = (repository.root / "done.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], "::notice::" in found.log

    post = ["POST", "repos/team/repository/issues/7/comments", report]
    assert done(quoted, other) == ([post], False)
    patch = ["PATCH", "repos/team/repository/issues/comments/5", report]
    assert done(quoted, other, *own) == ([patch, ["id=N3"], ["id=N4"]], False)
    # Gates of one pull request that have names keep apart, and say their names.
    named = [
        ["POST", "repos/team/repository/issues/7/comments", f"<!-- te-bench gate {n} -->\n### {n}\n\n**PASS: ∞**\n"]
        for n in "ab"
    ]
    assert done(quoted, *own, NAME="a") == ([named[0]], False)
    of_a = comment(6, "Bot", named[0][-1])
    assert done(*own, of_a, NAME="b") == ([named[1]], False)
    assert done(*own, of_a, NAME="<!--a-->\n")[0][0][-1].startswith("<!-- te-bench gate !--a-- -->\n")
    assert done(*own, of_a, NAME="a")[0] == [["PATCH", "repos/team/repository/issues/comments/6", named[0][-1]]]
    assert done(*own, of_a) == ([patch, ["id=N3"], ["id=N4"]], False)
    # With a person's token the comments are this person's.
    (repository.root / "login").write_text("someone")
    assert done(*own, quoted)[0] == [["PATCH", "repos/team/repository/issues/comments/1", report]]
    assert done(*own)[0] == [post]
    (repository.root / "login").unlink()
    (repository.root / "read-only").touch()  # a token that may not: the summary has the answer
    assert done(quoted) == ([post], True)
    assert done(quoted, *own) == ([patch, ["id=N3"], ["id=N4"]], True)  # of what cannot be folded the next one is
    (repository.root / "unreadable").touch()
    (repository.root / "done.jsonl").touch()
    unread = step("Comment", **environment)
    assert (unread.code, "this token reads no comments" in unread.log) == (0, True), unread
    (repository.root / "unreadable").unlink()
    written.write_text(report + 70_000 * "x")
    assert len(done()[0][0][-1]) <= 65_536


@pytest.mark.parametrize("name", SHELL)
def test_shell_lines_are_sound(name: str) -> None:
    lines = SHELL[name]
    checked = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert lines.startswith("set -euo pipefail\n")
    assert "${{" not in lines  # what others write, such as a branch's name, would be run: it comes by the environment
    bare = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\[\[.*?\]\]|#.*", "", lines)
    assert not re.findall(r"(?<!=)\$[\w{]", bare), bare  # every variable is quoted


@pytest.mark.parametrize(
    ("changed", "commented"),
    [
        ({}, True),
        ({"cancelled()": True}, False),
        ({"steps.gate.outputs.answered": ""}, False),
        ({"inputs.comment": "false"}, False),
        ({"github.event.pull_request.head.repo.full_name": "fork/repository"}, False),
    ],
)
def test_when_there_is_a_comment(changed: dict[str, Any], commented: bool) -> None:
    """Also after a regression, which fails the step before; GitHub's expression is read as Python."""
    values: dict[str, Any] = {
        "cancelled()": False,
        "steps.gate.outputs.answered": "true",
        "inputs.comment": "true",
        "github.event.pull_request.head.repo.full_name": "team/repository",
        "github.repository": "team/repository",
    }
    said = STEPS["Comment"]["if"].strip("${} \n").replace("&&", " and ").replace("!cancelled", "not cancelled")
    for name, value in (values | changed).items():
        assert name in said
        said = said.replace(name, repr(value))
    assert eval(said) is commented
    assert ACTION["outputs"]["exit-code"]["value"] == "${{ steps.gate.outputs.code }}"
    assert STEPS["Gate"]["id"] == "gate"


def test_forks_have_no_comment_and_inputs_come_by_the_environment() -> None:
    assert [name for name, step in STEPS.items() if "token" in str(step.get("env"))] == ["Comment"]
    for example in EXAMPLES:  # `on` is a boolean in YAML 1.1; pull_request_target would lend a token to anybody's code
        workflow = WORKFLOWS[example]
        assert workflow[True] == "pull_request"
        assert [job["permissions"] for job in workflow["jobs"].values()] == [
            {"contents": "read", "pull-requests": "write"}
        ]
        checkout = workflow["jobs"]["gate"]["steps"][0]
        assert checkout["with"] == {"fetch-depth": 0, "persist-credentials": False}


def test_each_action_has_one_version() -> None:
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    uses = {step["uses"] for job in jobs for step in job["steps"] if step.get("uses", "").startswith("actions/")}
    assert len(uses) == len({action.partition("@")[0] for action in uses}) > 3, uses


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit_and_jobs_end_and_may_do_no_more_than_they_need(path: Path) -> None:
    workflow = WORKFLOWS[path]
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert all(0 < job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())
    uses = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    pinned = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}|\./|OWNER/te-bench@COMMIT")
    assert uses
    assert all(pinned.fullmatch(action) for action in uses), uses
    known = {*ACTION["inputs"]}
    steps = (step for job in workflow["jobs"].values() for step in job["steps"])
    given = [step.get("with", {}) for step in steps if step.get("uses") == "./"]
    assert all(known >= {*one} for one in given)


def test_the_example_config_is_one() -> None:
    found = config.read(ROOT / "examples" / "ci" / "te-bench.toml")
    assert [(one.name, one.writes) for one in found.commands] == [("start", False), ("inside", True), ("suite", True)]
    example = (ROOT / "examples" / "ci" / "te-bench.toml").read_text().splitlines()[1:]
    page = (ROOT / "docs" / "gate-any-repository.md").read_text().splitlines()
    assert "\n".join(example) in "\n".join(line.removeprefix("    ") for line in page)
