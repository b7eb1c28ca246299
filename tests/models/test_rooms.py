"""Who may know whom in te_bench.models: recipes and te.autocast lie below modules, and recipes alone know their state."""

from pathlib import Path

import pytest
from test_layering import imports

import te_bench.models
from te_bench.models import recipe

ROOT = Path(te_bench.models.__file__).parent
BELOW = ["te_bench.models.fp8", "te_bench.models.kernel_choice"]
BELOW += [f"te_bench.models.recipe.{path.stem}" for path in (ROOT / "recipe").glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("module", BELOW)
def test_recipes_and_autocast_know_no_module(module: str) -> None:
    above = ("te_bench.models.modules", "te_bench.models.fused", "te_bench.models.zoo", "te_bench.models.conversion")
    assert not [name for name in imports(module, deferred=True) if name.startswith(above)]


def test_no_module_knows_the_names_of_what_a_recipe_keeps() -> None:
    files = [path for folder in ("modules", "fused", "zoo") for path in (ROOT / folder).glob("*.py")]
    assert len(files) > 10
    assert "amax_history_fwd" in recipe.saved_names
    assert not [(path.name, name) for path in files for name in recipe.saved_names if name in path.read_text()]
