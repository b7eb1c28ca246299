"""Imports go one way, and what must answer without torch never reaches it: read from the source, transitively."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "plugins",
    "kernels",
    "models",
    "training",
    "experiments",
    "reports",
    "gate",
    "advice",
    "cli",
)  # each imports earlier ones only

#: Within reports: logs and numbers first, then the result of a group, pages last; exchange is with other tools' files.
REPORT_LAYERS = ("files", "analysis", "logs", "convergence", "group_result", "exchange", "history", "page")

#: These never import torch at module level, nor anything of te_bench that does.
TORCH_FREE = (
    "te_bench",
    "te_bench.plugins",
    "te_bench.kernels.attention",
    "te_bench.models",
    "te_bench.models.configs",
    "te_bench.training.corpus",
    "te_bench.training.fewer_bits",
    "te_bench.training.tokenizer",
    *(
        f"te_bench.experiments.{name}"
        for name in (
            *(
                "doctor",
                "environment",
                "fork_server_preload",
                "measurement",
                "plan",
                "presets",
                "problems",
                "processes",
            ),
            *("on_ray", "progress", "ray_host", "run_options", "runner", "spec", "store", "suite_trials"),
        )
    ),
)
TORCH_FREE_PACKAGES = (
    "te_bench.cli",
    "te_bench.advice",
    "te_bench.gate",
    "te_bench.reports",
    "te_bench.experiments.scaling",
    "te_bench.experiments.suites",
    "te_bench.models.rivals",
    "te_bench.training.layouts",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "te_bench").rglob("*.py"))}


@functools.cache  # every module reaches the same few
def imports(module: str, *, deferred: bool) -> frozenset[str]:
    """Modules that it imports: at module level, and with `deferred` inside functions and for type checkers too."""
    tree = ast.parse(MODULES[module].read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree) if deferred else at_module_level(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(name for name in found if not name.startswith("te_bench") or name in MODULES)


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not the bodies of functions, nor `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


def with_parents(name: str) -> set[str]:
    """Importing a.b.c runs a and a.b first."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def path_to_torch(module: str, seen: set[str] | None = None) -> list[str] | None:
    """The chain of module-level imports that ends in torch or triton, or None; `seen` are known to reach neither."""
    seen = set() if seen is None else seen
    seen.add(module)
    for name in sorted(imports(module, deferred=False)):
        if name.partition(".")[0] in ("torch", "triton"):
            return [module, name]
        for reached in sorted(with_parents(name) & set(MODULES)):
            if reached not in seen and (chain := path_to_torch(reached, seen)):
                return [module, *chain]
    return None


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 else -1


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    upwards = {
        name for name in imports(module, deferred=True) if name.startswith("te_bench") and layer(name) > layer(module)
    }
    assert not upwards, f"{module} imports {', '.join(sorted(upwards))}"


def report_layer(module: str) -> int:
    parts = module.split(".")
    return REPORT_LAYERS.index(parts[2]) if len(parts) > 2 else -1


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("te_bench.reports.")])
def test_reports_compute_first_and_present_last(module: str) -> None:
    inside = {name for name in imports(module, deferred=True) if name.startswith("te_bench.reports.")}
    upwards = {name for name in inside if report_layer(name) > report_layer(module)}
    assert not upwards, f"{module} imports {', '.join(sorted(upwards))}"


def test_every_folder_has_its_layer() -> None:
    assert {name.split(".")[2] for name in MODULES if name.startswith("te_bench.reports.")} == set(REPORT_LAYERS)
    assert {module.split(".")[1] for module in MODULES if "." in module} == set(LAYERS)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name in TORCH_FREE or name.startswith(TORCH_FREE_PACKAGES)]
)
def test_torch_is_out_of_reach(module: str) -> None:
    chain = path_to_torch(module)
    assert chain is None, " -> ".join(chain or [])


def test_the_torch_free_modules_are_all_there() -> None:
    assert set(TORCH_FREE) <= set(MODULES)


@pytest.mark.parametrize(
    "module", ["te_bench.experiments.trial", "te_bench.models.zoo.gpt", "te_bench.kernels.attention.backends.flash"]
)
def test_the_test_can_see_torch(module: str) -> None:
    assert path_to_torch(module)


def test_functions_and_type_checking_are_not_module_level() -> None:
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b\n"
    source += "class C:\n    import c\ntry:\n    import d\nfinally: ...\n"
    names = [node.names[0].name for node in at_module_level(ast.parse(source)) if isinstance(node, ast.Import)]
    assert names == ["c", "d"]
