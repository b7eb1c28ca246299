"""Transformer Engine's functions and classes about FP8 support and state, with te_bench's answers.

With return_reason an answer is (supported, reason); the reason is "" for yes.
"""

from functools import partial
from typing import Any

import torch

from te_bench.kernels import architecture
from te_bench.kernels.gemm import block_scaled
from te_bench.models import fp8
from te_bench.models.fp8 import autocast, fp8_autocast
from te_bench.models.recipe import DelayedScaling, Float8BlockScaling, Recipe

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "fp8_autocast",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]

Answer = bool | tuple[bool, str]


def _answer(reason: str | None, return_reason: bool) -> Answer:
    return (reason is None, reason or "") if return_reason else reason is None


def _unsupported(recipe: Recipe) -> str | None:
    """Return why te.autocast refuses a recipe here, or None."""
    return recipe.unsupported("cuda", torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _emulated(name: str) -> str | None:
    """Return why te_bench emulates a block format here, or None."""
    cuda = torch.cuda.is_available()
    asked = "cuda" if cuda else "cpu", torch.cuda.get_device_capability() if cuda else None
    lack = block_scaled.unsupported(*asked)
    if lack is None and not block_scaled.supported(torch.device("cuda", torch.cuda.current_device())):
        lack = block_scaled.unsupported(*asked)
    return lack and f"{lack}; te.recipe.{name}BlockScaling() has its numbers on any device, by bf16 GEMMs"


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Return whether te.autocast takes per-tensor recipes here: always, as they are emulated without a GPU."""
    return _answer(_unsupported(DelayedScaling()), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Return whether te.autocast takes Float8BlockScaling here."""
    return _answer(_unsupported(Float8BlockScaling()), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Return whether te.autocast multiplies MXFP8 here; elsewhere it emulates MXFP8BlockScaling."""
    return _answer(_emulated("MXFP8"), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Return whether te.autocast multiplies NVFP4 here; elsewhere it emulates NVFP4BlockScaling."""
    return _answer(_emulated("NVFP4"), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Return whether the GPU has bf16 tensor cores; True on a CPU, which computes in bf16 anyway."""
    lack = architecture.lacks_bf16(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return _answer(lack, return_reason)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return (major, minor, patch) of the cuDNN that torch loads; (0, 0, 0) without one."""
    version = torch.backends.cudnn.version() or 0
    major = 1000 if version < 90000 else 10000  # 8.9.7 is 8907, 9.10.2 is 91002
    return version // major, version % major // 100, version % 100


def get_device_compute_capability() -> tuple[int, int]:
    """Return the current GPU's compute capability; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_default_recipe() -> Recipe:
    """Return te.autocast's default recipe."""
    return DelayedScaling()


class FP8GlobalStateManager:
    """The settings of the innermost te.autocast. Modules keep their scales and histories: te.numerics reports them."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return fp8.current.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return fp8.current.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe; outside of every autocast the default one."""
        return fp8.current.recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return fp8.current.group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return False: te_bench keeps its parameters in high precision."""
        return False

    is_fp8_available = staticmethod(partial(is_fp8_available, return_reason=True))
    is_fp8_block_scaling_available = staticmethod(partial(is_fp8_block_scaling_available, return_reason=True))
    is_mxfp8_available = staticmethod(partial(is_mxfp8_available, return_reason=True))
    is_nvfp4_available = staticmethod(partial(is_nvfp4_available, return_reason=True))

    @classmethod
    def reset(cls) -> None:
        """Forget all autocasts, for a test that left one open. Modules keep their scales."""
        fp8.reset()
