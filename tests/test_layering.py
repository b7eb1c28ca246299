"""Imports go one way, and what must answer without torch never reaches it: read from the source, transitively."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each imports earlier ones only.
LAYERS = ("plugins", "kernels", "models", "training", "experiments", "reports", "gate", "advice", "cli")

#: Within reports: logs and numbers first, then the result of a group, pages last; exchange is with other tools' files.
REPORT_LAYERS = ("files", "analysis", "logs", "convergence", "group_result", "exchange", "history", "page")

#: These never import torch at module level, nor anything of te_bench that does.
TORCH_FREE = {
    "te_bench",
    "te_bench.plugins",
    "te_bench.kernels.attention",
    "te_bench.models",
    "te_bench.models.configs",
}
TORCH_FREE |= {f"te_bench.training.{name}" for name in ("corpus", "fewer_bits", "tokenizer")}
IN_EXPERIMENTS = (
    "doctor environment fork_server_preload measurement on_ray peaks plan presets problems processes progress "
)
IN_EXPERIMENTS += "ray_host run_options runner spec store suite_trials"
TORCH_FREE |= {f"te_bench.experiments.{name}" for name in IN_EXPERIMENTS.split()}
PACKAGES = "cli advice gate reports experiments.scaling experiments.suites models.rivals training.layouts"
TORCH_FREE_PACKAGES = tuple(f"te_bench.{name}" for name in PACKAGES.split())


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


def imported_upwards(module: str, inside: str, order: tuple[str, ...]) -> list[str]:
    """What a module imports of later folders of this package."""

    def place(name: str) -> int:
        _, dot, below = name.partition(f"{inside}.")
        return order.index(below.partition(".")[0]) if dot else -1

    names = (name for name in imports(module, deferred=True) if name.startswith(inside))
    return sorted(name for name in names if place(name) > place(module))


def test_imports_go_one_way_and_reports_compute_first_and_present_last() -> None:
    found = {module: imported_upwards(module, "te_bench", LAYERS) for module in MODULES}
    for module in MODULES:
        if module.startswith("te_bench.reports."):
            found[module] += imported_upwards(module, "te_bench.reports", REPORT_LAYERS)
    assert {module: names for module, names in found.items() if names} == {}


def test_every_folder_has_its_layer() -> None:
    assert {name.split(".")[2] for name in MODULES if name.startswith("te_bench.reports.")} == set(REPORT_LAYERS)
    assert {module.split(".")[1] for module in MODULES if "." in module} == set(LAYERS)


def test_torch_is_out_of_reach() -> None:
    for module in sorted(TORCH_FREE.union(m for m in MODULES if m.startswith(TORCH_FREE_PACKAGES))):
        chain = path_to_torch(module)
        assert chain is None, " -> ".join(chain or [])


@pytest.mark.parametrize("module", ["experiments.trial", "models.zoo.gpt", "kernels.attention.backends.flash"])
def test_the_test_can_see_torch(module: str) -> None:
    assert path_to_torch(f"te_bench.{module}")


def test_functions_and_type_checking_are_not_module_level() -> None:
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b\n"
    source += "class C:\n    import c\ntry:\n    import d\nfinally: ...\n"
    names = [node.names[0].name for node in at_module_level(ast.parse(source)) if isinstance(node, ast.Import)]
    assert names == ["c", "d"]
