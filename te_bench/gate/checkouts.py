"""Two revisions of a repository in a temporary folder that is gone whenever this process is, however it ends.

Files are written by `git checkout-index` from an index of their own: nothing is registered in the repository, as `git
worktree add` would, so that a gate that is killed leaves nothing to prune, and two gates at once do not meet.
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
    """A new folder. A second process removes it when this one ends, be it by SIGKILL."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with janitor.remove_at_end(folder):
        yield folder


def repository(inside: Path) -> Path:
    """The root of the git repository around a folder. Raises ValueError where there is none."""
    try:
        return Path(_git(inside, "rev-parse", "--show-toplevel"))
    except ValueError as error:
        raise ValueError(
            f"{inside} is in no git repository ({error}): run te-bench gate --base in a clone of the code under test, "
            "or compare two runs by --baseline DIR --candidate DIR"
        ) from None


def commit_of(root: Path, ref: str) -> str:
    """The commit that a branch, a tag or a hash names. Raises ValueError for one that is not there."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        hint = "; this clone is shallow: git fetch --unshallow" if shallow else ""
        raise ValueError(f"no revision {ref!r} in {root}: give a branch, a tag or a commit{hint}") from None


def dirty(root: Path) -> bool:
    """Whether tracked files differ from HEAD."""
    return bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def check_out(root: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into a new folder. Raises ValueError when git cannot."""
    folder.mkdir()
    index = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    _git(root, "read-tree", commit, environment=index)
    _git(root, "checkout-index", "--all", f"--prefix={folder}/", environment=index)


def _git(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """What git prints. Raises ValueError with its message."""
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
    """What git's hooks and its worktree-minded users set: it would have git look at another repository than the folder's.

    Those of its configuration stay, which may say that a folder is safe.
    """
    done = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split() if not name.startswith("GIT_CONFIG")}
