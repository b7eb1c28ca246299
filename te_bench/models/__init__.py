"""Modules, models and FP8 recipes. `import te_bench.models as te` reads like Transformer Engine.

zoo has the models; te_bench.training trains them and exchanges their weights with Hugging Face. torch is imported when
the first name is used: planning and reporting use models.configs and models.cost without it.
"""

import importlib
from typing import Any

#: {module: the names of it that `te.` offers}.
HOMES = {
    "te_bench.models.fp8": ("autocast", "fp8_autocast", "is_fp8_enabled", "checkpoint", "numerics", "record_numerics"),
    "te_bench.models.quantization": (
        "get_cudnn_version",
        "get_default_recipe",
        "get_device_compute_capability",
        "is_bf16_available",
        "is_fp8_available",
        "is_fp8_block_scaling_available",
        "is_mxfp8_available",
        "is_nvfp4_available",
    ),
    "te_bench.models.modules.linear": ("Linear",),
    "te_bench.models.modules.layernorm": ("LayerNorm", "RMSNorm"),
    "te_bench.models.modules.layernorm_linear": ("LayerNormLinear",),
    "te_bench.models.modules.layernorm_mlp": ("LayerNormMLP",),
    "te_bench.models.modules.attention": ("DotProductAttention", "MultiheadAttention"),
    "te_bench.models.modules.rotary": ("RotaryPositionEmbedding", "apply_rotary_pos_emb"),
    "te_bench.models.kernel_choice": ("attention_kernel",),
    "te_bench.models.conversion": ("convert", "larger_than"),
    "te_bench.models.weight_cache": ("cache_weights",),
    "te_bench.models.modules.transformer_layer": ("TransformerLayer",),
}
_HOME = {name: module for module, names in HOMES.items() for name in names}
_MODULES = ("attention", "distributed", "quantization", "recipe")  # e.g. te.attention

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME, *_MODULES]
