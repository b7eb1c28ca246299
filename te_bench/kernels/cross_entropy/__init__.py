"""Cross-entropy rivals, one file each: the mean loss in nats over a padded vocabulary, differentiable by autograd."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """logits (N, padded) of which the first `vocab` columns count. `capability` is None on a CPU."""

    vocab: int
    padded: int
    dtype: str  # "fp32", "bf16", "fp16"
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(logits, targets, *, vocab): (N, Vp), (N,) int64 -> (); target -1 is ignored; may overwrite logits."""

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
