"""Find the code of a factory: the files beside it, and the installed packages. None of it runs.

code = read(["mymod:make"])
code.sha256, code.packages
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

#: Packages that an environment's id covers already, by version or, for te-bench, by a hash of its code.
_KNOWN = frozenset(("torch", "triton", "te_bench"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """A factory's code. sha256: of its source files. packages: {distribution: version} of the packages they import."""

    sha256: str
    packages: Mapping[str, str]


def read(paths: Sequence[str]) -> Code:
    """Find the code of import paths: their files, and those that they import from the current folder and their own.

    Raises ValueError for a path to no module, or to one that is not Python.
    """
    files, installed = _found(paths)
    return Code(sha256=_sum_of(files), packages=versions(installed))


def sha256(paths: Sequence[str]) -> str:
    """Return `read(paths).sha256`, without the second that finding the packages takes."""
    return _sum_of(_found(paths)[0])


def _found(paths: Sequence[str]) -> tuple[dict[str, Path], set[str]]:
    """Return {module: file} of the user's code, and the top-level modules that it imports from elsewhere."""
    files: dict[str, Path] = {}
    installed: set[str] = set()
    for path in paths:
        module, sign, function = path.partition(":")
        if not sign or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{path}: give package.module:function")
        if not _collect(module, files, installed):
            raise ValueError(f"{path}: no module {module} in {Path.cwd()} nor among the installed packages")
    return files, installed


def _sum_of(files: Mapping[str, Path]) -> str:
    sums = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in sorted(files.items())}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def versions(modules: Collection[str]) -> dict[str, str]:
    """Return {distribution: version} of these top-level modules; Python's own and missing modules have none."""
    asked = sorted(set(modules) - _KNOWN - sys.stdlib_module_names)
    distributions = importlib.metadata.packages_distributions() if asked else {}
    names = sorted({name for module in asked for name in distributions.get(module, ())})
    return {name: importlib.metadata.version(name) for name in names}


def _collect(module: str, files: dict[str, Path], installed: set[str]) -> bool:
    """Add the module's file, those beside it that it imports, and the packages' names; return whether it exists."""
    own = _file(module)
    if own is None:
        return False
    top = _top(module)
    folders = (Path.cwd(), own.parents[module.count(".") + (own.stem == "__init__")])
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if name in files or file is None:
            continue
        if _top(name) == top or (_top(name) not in _KNOWN and _is_beside(file, folders)):
            files[name] = file
            waiting += [name.rpartition(".")[0], *_imports(file, name)]
        else:
            installed.add(_top(name))
    return True


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_beside(file: Path, folders: Collection[Path]) -> bool:
    """Return whether it is a user's own file below one of the folders, not in an environment of packages."""
    if file.is_relative_to(sysconfig.get_path("stdlib")) or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return any(file.is_relative_to(folder) for folder in folders)


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yield the modules that a file may import; for `from a import b` both a and a.b; none if it is not Python."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise ValueError(f"{file}: line {error.lineno}: {error.msg}") from None
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + (file.name == "__init__.py")] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    spec = _locate(module) if module else None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).exists() else None


def _locate(module: str) -> ModuleSpec | None:
    """Find a module, also from the current folder, as `python -m` does; nothing is imported."""
    first, *rest = module.split(".")
    try:
        spec = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(first)
    except ValueError:  # __main__ has no spec
        return None
    for part in rest:  # by its last name: the whole one needs an imported parent in a folder without __init__.py
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec
