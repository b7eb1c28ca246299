"""The folder is the registry: names from files, near matches in errors, docstrings read without importing."""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import pytest

from te_bench import plugins

PACKAGES = [
    "te_bench.experiments.suites",
    "te_bench.experiments.workloads",
    "te_bench.kernels.activation.backends",
    "te_bench.kernels.adamw.backends",
    "te_bench.kernels.attention.backends",
    "te_bench.kernels.gemm.backends",
    "te_bench.kernels.linear_cross_entropy.backends",
    "te_bench.kernels.norm.backends",
    "te_bench.kernels.quantize.backends",
    "te_bench.models.recipe",
    "te_bench.models.rivals",
    "te_bench.training.layouts",
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two plug-ins, one of which cannot be imported, and a file that is none."""
    folder = tmp_path / "stalls"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "apples.py").write_text('"""Apples × pears.\n\nAnd more."""\nPRICE = 3\n')
    (folder / "broken.py").write_text('"""Broken, but it says so."""\nraise RuntimeError\n')
    (folder / "_shared.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "stalls"
    for name in [name for name in sys.modules if name.partition(".")[0] == "stalls"]:
        del sys.modules[name]


def test_names_are_the_files_without_an_underscore(package: str) -> None:
    assert plugins.names(package) == ["apples", "broken"]


@pytest.mark.parametrize("imported", [False, True])
def test_a_folder_is_read_again_when_it_has_changed_and_not_before(
    package: str, imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a thousand trials asks ten thousand times."""
    if imported:
        importlib.import_module(package)
    usual, read = pkgutil.iter_modules, []
    monkeypatch.setattr(pkgutil, "iter_modules", lambda folders: (read.append(folders), usual(folders))[1])
    plugins.names(package).clear()  # what one caller does with its list is no other's
    assert plugins.names(package) == ["apples", "broken"]
    assert len(read) == 1
    (tmp_path / "stalls" / "pears.py").write_text("")
    os.utime(tmp_path / "stalls", ns=(0, 0))  # whatever the file system's clock saw of it
    assert plugins.names(package) == ["apples", "broken", "pears"]
    assert len(read) == 2


def test_load_gives_the_attribute_of_the_file(package: str) -> None:
    assert plugins.load(package, "apples", "PRICE") == 3
    with pytest.raises(RuntimeError):
        plugins.load(package, "broken", "PRICE")


def test_an_unknown_name_is_refused_with_the_near_matches(package: str) -> None:
    with pytest.raises(ValueError) as caught:
        plugins.load(package, "aples", "PRICE")
    assert str(caught.value) == "unknown stall 'aples'. Did you mean apples? Known: apples, broken."
    with pytest.raises(ValueError, match=r"^unknown stall '\.\./x'\. Known: apples, broken\.$"):
        plugins.load(package, "../x", "PRICE")
    with pytest.raises(ValueError, match="unknown stall '_shared'"):
        plugins.load(package, "_shared", "PRICE")


def test_a_family_gives_its_type_and_nothing_else(package: str) -> None:
    prices, words = plugins.Family(package, "PRICE", int), plugins.Family(package, "PRICE", str)
    assert prices.names() == ["apples", "broken"]
    assert prices.load("apples") == 3
    with pytest.raises(AssertionError):
        words.load("apples")


def test_about_is_the_first_line_and_imports_nothing(package: str) -> None:
    assert plugins.about(package, "apples") == "Apples × pears."
    assert plugins.about(package, "broken") == "Broken, but it says so."
    assert "stalls.broken" not in sys.modules


def test_what_a_file_says_in_a_line_imports_nothing(package: str, tmp_path: Path) -> None:
    (tmp_path / "stalls" / "pears.py").write_text("RIPE = True  # × today\nraise RuntimeError\n", "utf-8")
    (tmp_path / "stalls" / "plums.py").write_text("def f():\n    RIPE = True\nRIPE = False\n")
    assert plugins.saying(package, "RIPE = True") == {"pears"}
    assert plugins.saying(package, "RIPE = False") == {"plums"}
    assert not plugins.saying(package, "RIPE = None")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_plugin_of_te_bench_says_what_it_is(name: str) -> None:
    assert plugins.names(name)
    for plugin in plugins.names(name):
        assert plugins.about(name, plugin), f"{name}.{plugin} has no docstring"
