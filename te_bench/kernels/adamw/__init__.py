"""AdamW rivals, one file each: every parameter of a model in one step, with the copies that the next forward reads.

Loshchilov, Hutter, arXiv:1711.05101, in torch.optim.AdamW(fused=True)'s order, all float32, t counting from 1:
g = grad * multiplier; m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2;
w = (1 - rate * weight_decay) w - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps).

A bf16 weight without a master, and moments in fewer bits, are read as float32 and rounded once when written:

- A bf16 weight: stochastically. A step with rate 3e-4 is far below half of bf16's spacing, 2^-8 of the weight. Rounding
  to nearest would lose it; stochastic rounding keeps it on average.
- m in bf16: to nearest, because an update replaces a share 1 - beta1, more than bf16 rounds away.
- v in bf16: stochastically. With beta2 = 0.999 v loses a thousandth per update; rounded to nearest it would never fall,
  and one large gradient would keep that weight's steps small for ever.
- sqrt(v) and m in FP8, one scale per BLOCK elements: stochastically, because neighbours with three mantissa bits are
  1/16 to 1/8 apart. It takes 16 random bits: with beta2 = 0.9999 a root falls by less than 8 bits resolve.
  sqrt(v) has half of v's exponents; unsigned E5M3 has 31 binades, so a gradient may be 10^9 times its neighbours'.
  A positive root never becomes 0, because m is divided by it. E4M3 stores m / sqrt(v), with the rounded root,
  instead of m: its magnitude does not depend on the gradients'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins

BLOCK = 64  # elements of a row whose FP8 moments share a scale


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameter:
    """A parameter, its state, and the copies of the new weight that a step writes. All are contiguous.

    weight (the master), grad, exp_avg and exp_avg_sq: float32, of one shape; each grad may be bfloat16 and is widened,
    and all sums are float32. A bfloat16 weight has no master, and its gradient is bfloat16. exp_avg and exp_avg_sq may
    both be bfloat16, or both FP8 if the last dimension is a multiple of BLOCK. In FP8 exp_avg_sq is uint8, the codes of
    the root, where c > 0 means (1 + c % 8 / 8) 2^(c // 8 - 31); exp_avg is float8_e4m3fn, the first moment divided by
    that root; exp_avg_sq_scale and exp_avg_scale, (numel / BLOCK,) float32, multiply on the way back from FP8.
    bf16: the weight in bfloat16, only with a master. data (M, N) and data_t (N, M), either or both, only for a 2-D
    weight: fp8(bf16(weight) * scale) by the rules of te_bench.kernels.quantize, with scale, () float32. scale_inv, ()
    float32, becomes 1 / scale; amax, () float32, becomes max(amax, max |bf16(weight)|), where NaN wins.
    """

    weight: Any
    grad: Any
    exp_avg: Any
    exp_avg_sq: Any
    weight_decay: float = 0.0
    bf16: Any = None
    data: Any = None
    data_t: Any = None
    scale: Any = None
    scale_inv: Any = None
    amax: Any = None
    exp_avg_scale: Any = None
    exp_avg_sq_scale: Any = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """The parameters of a step on their device; a backend that launches kernels adds its lookup tables.

    It holds addresses: after a tensor moves, build another table. Gradients stay in place under
    zero_grad(set_to_none=False) and inside a captured CUDA graph; set_to_none=True moves them.
    """

    parameters: tuple[Parameter, ...]
    target: Any = None  # torch.float8_e4m3fn or torch.float8_e5m2 for all; None if none is cast to FP8
    rows: Any = None  # (parameters, fields) int64
    tiles: Any = None  # (programs, 2) int32: a row of the table, and one of its tiles
    forms: Any = ()  # ((weight's dtype, moments' dtype), first program, programs) per launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None
    fp8: bool  # FP8 copies or moments are needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. Nothing waits for the device, and a captured CUDA graph follows rate, step, multiplier and the scales.

    table(parameters) -> Table: built before a capture, because it copies addresses to the device. Raises ValueError if
    dtypes or shapes do not fit. An empty parameter is legal and stays as it is.
    step(table, *, rate, step, betas, eps, multiplier=None, seed=None) -> None: in place. rate, step and multiplier, ()
    float32 on the device, are the learning rate, the update's number (from 1) and the gradients' factor. seed, ()
    int64, is for stochastic rounding, whose bits are philox's of (seed; element, parameter, step). Gradients are only
    read. Raises ValueError for betas outside [0, 1), a negative eps, and other kinds of tensors.
    norm(table, max_norm) -> norm, multiplier, () float32: the norm of all gradients together, and min(1, max_norm /
    (norm + 1e-6)), NaN if the norm is, as torch.nn.utils.clip_grad_norm_ defines it; bitwise the same in every run.
    Raises ValueError unless max_norm is positive.
    move(table, parameters) -> Table: the table of parameters of the same shapes and dtypes at other addresses, which
    launches captured with the old table use from then on. Raises ValueError for other shapes and dtypes, and as
    `table`. None if no captured graph can follow.
    kernels: device -> regular expression over a profiler's names (kernels or host ranges) that proves a step ran.
    """

    table: Callable[..., Table]
    step: Callable[..., None]
    norm: Callable[..., tuple[Any, Any]]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    move: Callable[..., Table] | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
