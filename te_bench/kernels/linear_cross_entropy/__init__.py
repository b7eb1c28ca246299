"""Linear cross-entropy rivals, one file each: mean_i CE(x_i W^T, t_i) over a padded vocabulary, differentiable by autograd.

Of W's Vp rows the first `vocab` count. The others are padding: outside the softmax, with a gradient of exactly zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins

IGNORED = -1  # the target that counts for nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """x (N, D), W (padded, D). `capability` is the GPU's compute capability, None on a CPU."""

    d: int
    vocab: int
    padded: int
    dtype: str  # of the products: "fp32", "bf16", "fp16"
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(x, weight, targets, *, vocab): (N, D), (Vp, D), (N,) int64 -> () float32, in nats, gradients to x and weight.

    Targets of -1 are ignored; where there are no others the loss is NaN and the gradients are 0, as F.cross_entropy has
    it. x and weight are of one dtype, or of any under torch.autocast, in whose dtype the products are then computed.
    copied: forward also takes copy, (Vp, D) or None: weight, rounded already.
    kernels: device -> regular expression over the names of the kernels, on a CPU operators, that prove it ran; a device that
    is absent has none. gemms(n, d, padded, itemsize, rounded): how many GEMMs of x (N, D) and (N, padded) logits of that
    itemsize a training pass is made of, (in FP8, in their dtype); rounded: dW is bfloat16, as W is, and not float32. Logits
    all at once are one, their gradients two.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    copied: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)
    gemms: Callable[[int, int, int, int, bool], tuple[int, int]] = lambda n, d, padded, itemsize, rounded: (0, 3)


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def check(x: Any, weight: Any, targets: Any, vocab: int) -> None:
    """Raise ValueError unless these are x (N, D), weight (Vp, D), targets (N,) int64 and 1 <= vocab <= Vp, on one device."""
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
