"""apply_rotary_pos_emb of transformers by the rotary kernel, in converted models only.

An attention of transformers calls the function by its name in the family's file. A converted attention runs the same
code with that name bound to ours. Whether the family's function is the usual one is found by trial.
"""

import contextlib
import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.launch import rows_contiguous
from te_bench.kernels.rotary import Rotated
from te_bench.kernels.rotary.backends import reference
from te_bench.models.modules.activations import FLOATS, is_recorded
from te_bench.models.modules.rotary import backend
from te_bench.models.subclassing import Mixed, mix

FUNCTION = "apply_rotary_pos_emb"


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return q cos + rotated(q) sin, and the same for k; a pair (x, y) of features i and i + d / 2 rotates to (-y, x).

    q (B, H, T, D), k (B, Hkv, T, D), or with unsqueeze_dim=2 (B, T, H, D) and so on; cos, sin (B or 1, T, d), d <= D:
    further features are unchanged. It computes in float32, where transformers rounds in between.
    """
    if is_recorded() or q.dtype not in FLOATS or q.dtype is not k.dtype or not q.numel():
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q, k = (reference.turned_by(x, cos, sin, interleaved=False) for x in (q, k))
        return q, k
    tables = torch.cat((cos, sin), -1).float()
    rotated: tuple[Tensor, Tensor] = _Rotate.apply(q, k, tables, unsqueeze_dim == 1)
    return rotated


class _Rotate(torch.autograd.Function):
    """Rotate q and k by one kernel; tables (B or 1, T, 2 d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, tables: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tables)
        ctx.heads_first = heads_first
        return _rotate(q, k, tables, heads_first, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        (tables,) = ctx.saved_tensors
        return *_rotate(dq, dk, tables, ctx.heads_first, transposed=True), None, None


def _rotate(q: Tensor, k: Tensor, tables: Tensor, heads_first: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    q, k = rows_contiguous(q), rows_contiguous(k)
    made = torch.empty_like(q), torch.empty_like(k)
    # (T, B, 1, H, D); one batch row at a time if each sequence has its own positions
    order = (2, 0, 1, 3) if heads_first else (1, 0, 2, 3)
    sources, targets = ([x.permute(order)[:, :, None] for x in pair] for pair in ((q, k), made))
    for i, table in enumerate(tables):
        part = slice(None) if len(tables) == 1 else slice(i, i + 1)
        parts = [Rotated(x[:, part], y[:, part], table) for x, y in zip(sources, targets, strict=True)]
        backend(q).rotate(parts, interleaved=False, transposed=transposed, tables=True)
    return made


class Rotary(Mixed):
    """A mixin before an attention's class: runs its forward with our `apply_rotary_pos_emb`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: Any = cls._te_origin.forward
        # Without "__name__", by which torch.compile would look the globals up in the module.
        names = {name: value for name, value in own.__globals__.items() if name != "__name__"}
        names[FUNCTION] = apply_rotary_pos_emb
        made = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        functools.update_wrapper(made, own)
        made.__kwdefaults__ = own.__kwdefaults__
        cls.forward = made  # type: ignore[attr-defined]


def calls(module: Any) -> bool:
    """Return whether a module's forward calls a function named apply_rotary_pos_emb."""
    return FUNCTION in getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())


def convert(module: Any, undo: contextlib.ExitStack) -> str:
    """Let an attention rotate by the kernel; returns a description. Raises ValueError with the reason if it stays."""
    origin = module._te_origin if isinstance(module, Mixed) else type(module)
    forward = origin.forward
    if not isinstance(forward, types.FunctionType) or FUNCTION not in forward.__code__.co_names:
        raise ValueError(f"its forward, which calls {FUNCTION}, is wrapped in another function")
    if "forward" in vars(module):
        raise ValueError("its forward was replaced")
    if not _is_usual(forward.__globals__[FUNCTION]):
        raise ValueError(f"its {FUNCTION} is another one than Llama's")
    mix(module, Rotary, undo)
    return "queries and keys in one kernel"


@functools.cache
def _is_usual(function: Any) -> bool:
    """Return whether a function computes what ours does, with all features and, if it can, with a part."""
    drawn: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    q, k = (torch.randn(2, heads, 3, 8, **drawn) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 3, 8, **drawn)
    try:
        made = function(q, k, cos, sin)
        return all(
            torch.allclose(x, y, atol=1e-5) for x, y in zip(made, apply_rotary_pos_emb(q, k, cos, sin), strict=True)
        )
    except Exception:  # whatever it raises, it computes something else
        return False
