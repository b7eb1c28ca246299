"""The workflow that a user copies: its own shell lines, run in a small repository, with stand-ins for what GitHub has."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from revisions import Repository

from te_bench.gate.output import MARKER

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[1] / "examples" / "ci" / "te-bench-gate.yml").read_text()
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
STEPS: list[dict[str, Any]] = [step for job in JOBS.values() for step in job["steps"]]
SHELL = {step["name"]: step["run"] for step in STEPS if "run" in step}
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
sys.argv += ["--device", "cpu"]
main()
"""
# gh api: answers with the comments that are there, through the filter that it is given, and notes what it is to post.
GH = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys

assert os.environ["GH_TOKEN"] == "token"
arguments = sys.argv[1:]
if "--method" not in arguments:
    endpoint, how = arguments[2], arguments[arguments.index("--jq") + 1]
    assert (arguments[:2], endpoint) == (["api", "--paginate"], "repos/team/repository/issues/7/comments")
    sys.exit(subprocess.run(["jq", "-r", how, "comments.json"]).returncode)
(body,) = [a.removeprefix("body=@") for a in arguments if a.startswith("body=@")]
said = [a for a in arguments[1:] if a.startswith("repos/") or a in ("POST", "PATCH")]
pathlib.Path("posted.json").write_text(json.dumps([*said, pathlib.Path(body).read_text()]))
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
    """step("Gate", BUDGET="1"): the step's lines, inside the repository, under the workflow's environment."""
    path = tmp_path / "bin"
    path.mkdir()
    for name, program in (("te-bench", TE_BENCH), ("gh", GH)):
        (path / name).write_text(program)
        (path / name).chmod(0o755)

    def run(name: str, **environment: str) -> Done:
        files = {which: tmp_path / which for which in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        for file in files.values():
            file.write_text("")
        given: Mapping[str, Any] = {"GITHUB_BASE_REF": "main", **WORKFLOW["env"], "MARGIN": "100%", **environment}
        done = subprocess.run(
            [*BASH, "-c", SHELL[name]],
            cwd=repository.root,
            env={
                **os.environ,
                **{key: str(value) for key, value in given.items()},
                **{key: str(file) for key, file in files.items()},
                "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout + done.stderr, *(file.read_text() for file in files.values()))

    return run


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
    assert (done.code, done.outputs) == (0, "answered=true\n"), done
    assert done.summary.startswith(f"{MARKER}\n**PASS")
    assert "::warning::" not in done.log
    written = repository.root / "gate"
    assert json.loads((written / "gate.json").read_text())["baseline"] == base
    assert (written / "gate.md").read_text() == done.summary
    assert (written / "gate.xml").read_text().startswith("<?xml")
    assert (written / "records" / "head" / "journal.jsonl").exists()


def test_a_regression_fails_whatever_else_is_let_through(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST, "gone": FAST}, {"a": SLOW})
    done = step("Gate", LET_THROUGH="3 4")
    assert (done.code, done.outputs) == (1, "answered=true\n"), done
    assert done.summary.startswith(f"{MARKER}\n**REGRESSION")


def test_undecided_is_let_through_with_a_warning_or_fails_as_the_team_chose(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", BUDGET="0.001")
    assert (done.code, "::warning::te-bench gate: exit code 3" in done.log) == (0, True), done
    assert done.summary.startswith(f"{MARKER}\n**INCONCLUSIVE")
    strict = step("Gate", BUDGET="0.001", LET_THROUGH="")
    assert (strict.code, "::warning::" in strict.log) == (3, False), strict


def test_a_trial_that_is_gone_fails_unless_the_team_accepts_it(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST, "gone": FAST}, {"a": FAST})
    soon = {"BUDGET": "0.001"}  # undecided, too: what is missing comes first
    assert step("Gate", **soon).code == 4
    assert step("Gate", **soon, LET_THROUGH="3 4").code == 0


@pytest.mark.parametrize("let_through", ["3", "3 4"])
def test_what_could_not_be_asked_fails_and_has_no_answer(repository: Repository, step: Step, let_through: str) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", BUDGET="soon", LET_THROUGH=let_through)
    assert (done.code, done.summary, done.outputs) == (2, "", "")
    assert "--budget soon" in done.log


def test_without_a_merge_base_it_says_what_is_missing(repository: Repository, step: Step) -> None:
    branched(repository, {"a": FAST}, {"a": FAST})
    done = step("Gate", GITHUB_BASE_REF="gone")
    assert (done.code, "::error::no commit is common to HEAD and gone" in done.log) == (2, True)
    repository.git("checkout", "--quiet", "--orphan", "unrelated")
    repository.commit({"b": FAST})
    assert step("Gate").code == 2


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq, which gh has built in")
def test_the_comment_is_the_gates_own_and_is_brought_up_to_date(repository: Repository, step: Step) -> None:
    (repository.root / "gate").mkdir()
    report = f"{MARKER}\n**PASS: ∞**\n"
    (repository.root / "gate" / "gate.md").write_text(report)
    quoted = {"id": 1, "user": {"login": "someone"}, "body": report}  # not to be edited, nor can it be
    other = {"id": 2, "user": {"login": "github-actions[bot]"}, "body": "of another workflow"}
    own = [{"id": n, "user": {"login": "github-actions[bot]"}, "body": f"{MARKER}\nold"} for n in (3, 4)]
    environment = {"GITHUB_REPOSITORY": "team/repository", "NUMBER": "7", "GH_TOKEN": "token"}

    def posted(*comments: Any) -> Any:
        (repository.root / "comments.json").write_text(json.dumps(comments))
        done = step("Comment", **environment)
        assert done.code == 0, done
        return json.loads((repository.root / "posted.json").read_text())

    assert posted(quoted, other) == ["POST", "repos/team/repository/issues/7/comments", report]
    assert posted(quoted, other, *own) == ["PATCH", "repos/team/repository/issues/comments/3", report]
    (repository.root / "gate" / "gate.md").write_text(report + 70_000 * "x")
    assert len(posted()[-1]) <= 65_536


@pytest.mark.parametrize("name", SHELL)
def test_shell_lines_are_sound(name: str) -> None:
    lines = SHELL[name]
    checked = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert lines.startswith("set -euo pipefail\n")
    assert "${{" not in lines  # what others write, such as a branch's name, would be run: it comes by the environment
    bare = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\[\[.*?\]\]|#.*", "", lines)
    assert not re.findall(r"(?<!=)\$[\w{]", bare), bare  # every variable is quoted


def test_each_job_may_do_what_it_needs_and_no_more() -> None:
    assert WORKFLOW["permissions"] == {}
    assert {name: job["permissions"] for name, job in JOBS.items()} == {
        "gate": {"contents": "read"},
        "comment": {"pull-requests": "write"},
    }
    assert WORKFLOW[True] == "pull_request"  # `on` is a boolean in YAML 1.1; pull_request_target would lend a token
    checkout = next(step for step in STEPS if "checkout" in step.get("uses", ""))
    assert checkout["with"] == {"fetch-depth": 0, "persist-credentials": False}
    assert all("checkout" not in step.get("uses", "") for step in JOBS["comment"]["steps"])
    assert "head.repo.full_name == github.repository" in JOBS["comment"]["if"]


def test_actions_are_pinned_to_a_major_version_and_jobs_end() -> None:
    ours = yaml.safe_load((Path(__file__).parents[1] / ".github" / "workflows" / "docs.yml").read_text())
    jobs = [*JOBS.values(), *ours["jobs"].values()]
    uses = {step["uses"] for job in jobs for step in job["steps"] if "uses" in step}
    assert len(uses) == len({action.partition("@")[0] for action in uses}) == 6, "each action has one version"
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in uses), uses
    assert all(0 < job["timeout-minutes"] <= 60 for job in jobs)
    assert (ours["permissions"], ours["jobs"]["build"]["permissions"]) == ({}, {"contents": "read"})
    upload = next(step for step in STEPS if "upload" in step.get("uses", ""))
    assert (upload["if"], upload["with"]["path"]) == ("always()", "gate/")
