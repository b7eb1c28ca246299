"""The folder is the registry and the file name is the name; nothing here imports a plug-in before it is asked for."""

import ast
import difflib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

PluginT = TypeVar("PluginT")


def names(package: str) -> list[str]:
    """Sorted names of the plug-ins in a package: its modules that do not start with an underscore."""
    folders = _places(package)
    return list(_listed(folders, tuple(Path(folder).stat().st_mtime_ns for folder in folders)))


def _places(package: str) -> tuple[str, ...]:
    module = sys.modules.get(package)
    return _folders(package, tuple(sys.path)) if module is None else tuple(module.__path__)


@functools.cache
def _folders(package: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Where a package that is not imported lies, of which the interpreter would ask its whole path each time."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not a package of te_bench"
    return tuple(spec.submodule_search_locations or ())


@functools.cache
def _listed(folders: tuple[str, ...], changed: tuple[int, ...]) -> tuple[str, ...]:
    """The modules of folders as they were last changed; a plan of a thousand trials asks for them ten thousand times."""
    found = pkgutil.iter_modules(folders)
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def _kind(package: str) -> str:
    """What a package holds, in words: an "attention backend" in kernels.attention.backends, a "suite" in suites."""
    above, _, folder = package.rpartition(".")
    operator = above.rpartition(".")[2]
    return {"backends": f"{operator} backend", "quickstart": "layer"}.get(folder, folder.rstrip("s")).replace("_", " ")


def load(package: str, name: str, attribute: str) -> Any:
    """The object `attribute` of plug-in `name`. Raises ValueError, with the near matches, for an unknown name."""
    check(_kind(package), name, names(package))
    return getattr(importlib.import_module(f"{package}.{name}"), attribute)


@dataclass(frozen=True)
class Family(Generic[PluginT]):
    """The plug-ins of a package that are each an object of one type, under one name in their modules."""

    package: str
    attribute: str
    kind: type[PluginT]

    def names(self) -> list[str]:
        """Sorted names of the plug-ins."""
        return names(self.package)

    def load(self, name: str) -> PluginT:
        """The plug-in in NAME.py. Raises ValueError, with the near matches, for an unknown name."""
        plugin = load(self.package, name, self.attribute)
        assert isinstance(plugin, self.kind)
        return plugin


def check(kind: str, name: str, legal: Sequence[str]) -> None:
    """Raise ValueError naming the near matches unless `name` is one of `legal`."""
    if name not in legal:
        raise ValueError(f"unknown {kind} {name!r}.{suggestion(name, legal)} Known: {', '.join(legal)}.")


def suggestion(name: str, legal: Sequence[str]) -> str:
    """ " Did you mean A or B?" of the legal names near to one that is not; "" where none is."""
    near = difflib.get_close_matches(name, legal, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def about(package: str, name: str) -> str:
    """The first line of a plug-in's docstring, read without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / f"{name}.py"
    return (ast.get_docstring(ast.parse(source.read_bytes())) or "").split("\n", 1)[0]


def saying(package: str, line: str) -> frozenset[str]:
    """The plug-ins whose files have that line, a comment after it apart, read without importing them."""
    return _saying(_places(package), tuple(names(package)), line)


@functools.cache
def _saying(folders: tuple[str, ...], known: tuple[str, ...], line: str) -> frozenset[str]:
    files = [Path(folder) / f"{name}.py" for folder in folders for name in known]
    texts = {file.stem: file.read_text("utf-8") for file in files if file.exists()}
    # By lines: of the recipes that takes half a millisecond, and a parser 16.
    return frozenset(
        name for name, text in texts.items() if any(one.partition("#")[0].rstrip() == line for one in text.splitlines())
    )
