"""What arguments of modules can be: sizes, dtypes of parameters, epsilons and probabilities."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch

PARAMETERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _dtype(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value in PARAMETERS)


_SIZES = ("in_features", "out_features", "hidden_size", "ffn_hidden_size", "normalized_shape", "dim")
_HEADS = ("num_attention_heads", "num_gqa_groups", "kv_channels")

#: By an argument's name: what it can be, and that in words.
LEGAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*_SIZES, *_HEADS), (_size, "a whole number of at least 1")),
    **dict.fromkeys(
        ("eps", "layernorm_epsilon", "qk_norm_eps", "rotary_base"),
        (lambda value: _number(value) and value > 0, "a number greater than 0"),
    ),
    "rotary_percent": (lambda value: _number(value) and 0 < value <= 1, "a share: greater than 0, up to 1"),
    "hidden_dropout": (lambda value: _number(value) and 0 <= value <= 1, "a probability: from 0 to 1"),
    # What attention keeps is divided by 1 - dropout.
    "attention_dropout": (lambda value: _number(value) and 0 <= value < 1, "a probability: at least 0 and less than 1"),
    "params_dtype": (
        _dtype,
        f"a dtype of parameters: {', '.join(map(str, PARAMETERS))} or None (for FP8, call the module under te.autocast)",
    ),
}


def check(where: str, **given: Any) -> None:
    """Raise ValueError, with the value and what is legal, for an argument that no module can be made with."""
    for name, value in given.items():
        legal, words = LEGAL[name]
        if not legal(value):
            raise ValueError(f"{where}: {name}={value!r} is not {words}")
