"""FP8 recipes, one file each. A recipe owns its quantisation and its GEMM policy per role and per GEMM.

Roles are "input", "weight" and "grad_output"; GEMMs are "fprop", "dgrad" and "wgrad". Linear never asks for a name.
"""

from enum import Enum
from typing import Any, Protocol

from te_bench import plugins


class Format(Enum):
    """FP8 formats as (forward, backward). E5M2 is for gradients: two mantissa bits are too few for activations."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")


class Recipe(Protocol):
    """What Linear needs: quantise a tensor for a role, and multiply two quantised tensors for a GEMM."""

    def quantize(self, x: Any, role: str) -> tuple[Any, Any]:
        """data, scale_inv of a (M, N) tensor."""

    def gemm(self, a: tuple[Any, Any], b: tuple[Any, Any], gemm: str, out_dtype: Any) -> Any:
        """D = a @ b.T for K-major operands (M, K), (N, K) -> (M, N)."""

    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        """Why this device cannot run the recipe, or None."""


def names() -> list[str]:
    return plugins.names(__name__)


def load(name: str) -> Recipe:
    """The recipe in NAME.py with its default settings. Raises ValueError for an unknown name."""
    recipe: Recipe = plugins.load(__name__, name, "RECIPE")
    return recipe
