"""The distribution: what it depends on is what it imports, and one version is everywhere."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import te_bench

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "liger-kernel": "liger_kernel", "flash-attn-4": "flash_attn"}
OF_THE_TESTS = {"docs", "test"}
#: Not named in pyproject.toml: rivals of other indexes, and parts of what is named.
BROUGHT = {"transformer_engine", "huggingface_hub", "markupsafe"}


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[^A-Za-z0-9_-]", one)[0] for one in requirements}
    return {IMPORTED_AS.get(name, name) for name in found}


def imported() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "te_bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"te_bench"}


def test_te_bench_needs_what_it_imports_and_no_more() -> None:
    extras = PROJECT["optional-dependencies"]
    known = names(PROJECT["dependencies"])
    assert known <= imported(), "in dependencies, and nowhere imported"
    optional = set().union(*(names(extras[extra]) for extra in extras.keys() - OF_THE_TESTS))
    assert imported() - known <= optional | BROUGHT
    assert not known & optional


def test_flash_attention_4_which_has_betas_alone_can_be_installed() -> None:
    """pip takes a beta only where the requirement names one."""
    [one] = [each for each in PROJECT["optional-dependencies"]["rivals"] if each.startswith("flash-attn-4")]
    assert Requirement(one).specifier.prereleases


def test_one_version_is_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert PROJECT["version"] == te_bench.__version__ == str(cited)


def test_the_citations_title_is_the_first_sentence_of_readme() -> None:
    title = yaml.safe_load((ROOT / "CITATION.cff").read_text())["title"]
    assert f"**{title.replace(':', ' measures', 1)}.**" in (ROOT / "README.md").read_text().splitlines()[:5]


@pytest.mark.parametrize("newer", ["", "torch", "triton"])
def test_the_oldest_torch_and_triton_are_seen_to_be_what_runs(newer: str, tmp_path: Path) -> None:
    """Lost from PYTHONPATH, they would leave it to the pinned ones."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    dry = ["make", "--dry-run", "compile-oldest"]
    planned = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sees = next(place for place, line in enumerate(planned) if "__version__" in line)
    assert all(sees < place for place, line in enumerate(planned) if " pytest " in line)
    path, _, *asks = shlex.split(planned[sees])
    assert path == f"PYTHONPATH={ROOT}/build/oldest"
    for name in ("torch", "triton"):
        [asked] = [one.partition(";")[0].replace(">=", "==") for one in PROJECT["dependencies"] if one.startswith(name)]
        assert asked in planned[sees]
        version = asked.removeprefix(f"{name}==")
        found = f"{version}0" if name == newer else f"{version}.0+cpu"
        (tmp_path / f"{name}.py").write_text(f"__version__ = {found!r}\n")
    done = subprocess.run([sys.executable, *asks], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is bool(newer)
    assert not newer or f"to run, and not what is imported: ['{newer}==" in done.stderr
