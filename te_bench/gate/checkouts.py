"""Check out two revisions of a repository into a temporary folder, which is removed however this process ends.

`git checkout-index` writes the files, from an index of its own. The repository registers nothing, unlike with
`git worktree add`: a killed gate leaves nothing to prune, and two gates can run at once.
"""

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from te_bench.experiments import janitor

PREFIX = "te-bench-gate-"


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Yield the real path of a new folder. A second process removes it when this process ends, even by SIGKILL."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    with janitor.remove_at_end(folder):
        yield folder


def repository(inside: Path) -> Path:
    """Return the root of the git repository around a folder. Raise ValueError if there is none."""
    try:
        return Path(_git(inside, "rev-parse", "--show-toplevel"))
    except ValueError as error:
        raise ValueError(
            f"{inside} is in no git repository ({error}): run te-bench gate --base in a clone of the code under test, "
            "or compare two runs by --baseline DIR --candidate DIR"
        ) from None


def commit_of(root: Path, ref: str) -> str:
    """Return the commit that a branch, a tag or a hash names. Raise ValueError if the repository lacks it."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        hint = "; this clone is shallow: git fetch --unshallow" if shallow else ""
        raise ValueError(f"no revision {ref!r} in {root}: give a branch, a tag or a commit{hint}") from None


def dirty(root: Path) -> bool:
    """Return whether tracked files differ from HEAD."""
    return bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def check_out(root: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into a new folder. Raise ValueError if git fails."""
    folder.mkdir()
    index = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    _git(root, "read-tree", commit, environment=index)
    _git(root, "checkout-index", "--all", f"--prefix={folder}/", environment=index)


def _git(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return what git prints. Raise ValueError with git's message if it fails."""
    words = ["git", "-c", "core.splitIndex=false", "-C", str(folder), *arguments]
    try:
        inherited = {name: value for name, value in os.environ.items() if name not in _elsewhere()}
        own = {**inherited, "GIT_OPTIONAL_LOCKS": "0", **(environment or {})}
        done = subprocess.run(words, capture_output=True, text=True, env=own, check=False)
    except FileNotFoundError:
        raise ValueError("git is not installed") from None
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip()


@functools.cache
def _elsewhere() -> set[str]:
    """Return the variables, set by git hooks for instance, that would point git at another repository than the folder's.

    GIT_CONFIG* variables are kept: they may mark a folder as safe.
    """
    done = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split() if not name.startswith("GIT_CONFIG")}
