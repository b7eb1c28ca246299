"""Linear cross-entropy rivals, one file each: mean_i CE(x_i W^T, t_i) over a padded vocabulary, differentiable by autograd.

Of W's Vp rows the first `vocab` count. The others are padding: outside the softmax, with gradients of exactly zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins

IGNORED = -1  # target that counts for nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """x (N, D), W (padded, D). `capability` is the GPU's compute capability, None on a CPU."""

    d: int
    vocab: int
    padded: int
    dtype: str  # of the GEMMs: "fp32", "bf16", "fp16"
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(x, weight, targets, *, vocab): (N, D), (Vp, D), (N,) int64 -> () float32, in nats, gradients to x and weight.

    Targets of -1 are ignored; if all are, the loss is NaN and the gradients are 0, as in F.cross_entropy. x and weight
    have one dtype, or any under torch.autocast, in whose dtype the GEMMs then run. copied: forward also takes copy,
    (Vp, D) or None: the weight, already rounded. kernels: device -> regular expression over the names of kernels (on a
    CPU operators) that prove it ran; no entry means it has none. gemms(n, d, padded, itemsize, rounded): numbers of GEMMs
    of a training pass, (in FP8, in their dtype), for x (N, D) and (N, padded) logits of that itemsize; rounded: dW is bf16
    as W is, not float32; logits all at once are one, their gradients two.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    copied: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)
    gemms: Callable[[int, int, int, int, bool], tuple[int, int]] = lambda n, d, padded, itemsize, rounded: (0, 3)


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def check(x: Any, weight: Any, targets: Any, vocab: int) -> None:
    """Raise ValueError unless x is (N, D), weight (Vp, D), targets (N,) int64, 1 <= vocab <= Vp, on one device."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: x must be (N, D) and weight (Vp, D); "
            "flatten batch and sequence first: x.flatten(0, -2)"
        )
    if targets.shape != x.shape[:1] or str(targets.dtype) != "torch.int64":
        raise ValueError(
            f"targets {targets.dtype} {tuple(targets.shape)}: int64 ({x.shape[0]},), one class for each row of x"
        )
    if not 1 <= vocab <= weight.shape[0]:
        raise ValueError(f"vocab {vocab}: from 1 to {weight.shape[0]}, the rows of weight")
    if not x.device == weight.device == targets.device:
        raise ValueError(f"x on {x.device}, weight on {weight.device}, targets on {targets.device}: move them to one")
