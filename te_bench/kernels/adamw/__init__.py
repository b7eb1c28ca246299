"""AdamW rivals, one file each: every parameter of a model in one step, with the copies that the next forward reads.

Loshchilov, Hutter, arXiv:1711.05101, in torch.optim.AdamW(fused=True)'s order, all float32, t counting from 1:
g = grad * multiplier; m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2;
w = (1 - rate * weight_decay) w - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps).

A weight without a master, in bf16, and moments in fewer bits are read as float32 and rounded once when they are written:

- A bf16 weight: stochastically. A step of rate 3e-4 is far less than half of bf16's spacing, 2^-8 of the weight, and rounded
  to the nearest it would be lost; like this it arrives on average.
- m in bf16: to the nearest, for each update brings in more new weight, 1 - beta1, than bf16 rounds away.
- v in bf16: stochastically. With beta2 = 0.999 v loses a thousandth an update; to the nearest it would never fall, and after
  one large gradient the steps of that weight would stay small for ever.
- sqrt(v) and m in FP8, BLOCK elements by one scale: stochastically, too, for three bits of mantissa are a sixteenth to an
  eighth apart. 16 random bits choose: with beta2 = 0.9999 a root falls by a share of it that 8 could not tell.
  sqrt(v) has half of v's exponents, and in E5M3 without a sign 31 binades: a gradient may be 10^9 times its neighbours'.
  One above 0 becomes no 0, by which m would be divided. In place of m, E4M3 has m / sqrt(v), of what is kept of sqrt(v),
  which is of one order of magnitude whatever the gradients are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins

BLOCK = 64  # elements of a row whose FP8 moments share a scale


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameter:
    """One parameter with its state, and where a step leaves what is made of the new weight. All contiguous.

    weight, the master, grad, exp_avg and exp_avg_sq: float32, of one shape; grad may be bfloat16, each parameter's apart:
    it is widened, and all sums are float32's. A bfloat16 weight has no master, and its gradient is bfloat16. exp_avg and
    exp_avg_sq may both be bfloat16, or in FP8, of a last dimension that is a multiple of BLOCK: exp_avg_sq is then uint8,
    the root's codes, of which c above 0 is (1 + c % 8 / 8) 2^(c // 8 - 31), and exp_avg float8_e4m3fn, the first moment
    over that root; exp_avg_sq_scale and exp_avg_scale, (numel / BLOCK,) float32, multiply away from FP8.
    bf16: the weight in bfloat16, of a master alone. data (M, N) and
    data_t (N, M), either or both: the FP8 of that bfloat16, fp8(bf16(weight) * scale), of a 2-D weight, by the rules of
    te_bench.kernels.quantize; scale, () float32, comes with them. scale_inv, () float32, becomes 1 / scale; amax, ()
    float32, becomes max(amax, max |bf16(weight)|), NaN above everything.
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
    """The parameters of a step on their device; a backend that launches kernels adds what these look up.

    It holds addresses: whoever lets a tensor go for another builds another table. A gradient stays where it is under
    zero_grad(set_to_none=False), and inside a captured CUDA graph, whose buffers never move; set_to_none=True moves it.
    """

    parameters: tuple[Parameter, ...]
    target: Any = None  # torch.float8_e4m3fn or torch.float8_e5m2, the same for all; None where none is cast to FP8
    rows: Any = None  # (parameters, fields) int64
    tiles: Any = None  # (programs, 2) int32: a row, and which of its tiles
    forms: Any = ()  # ((weight's dtype, moments' dtype), first program, programs), a launch each


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None
    fp8: bool  # data, data_t or moments in FP8 are wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. Nothing waits for the device, and a captured CUDA graph follows rate, step, multiplier and the scales.

    table(parameters) -> Table: built before a capture, for it copies addresses to the device. ValueError for what does
    not fit. An empty parameter is legal and nothing of it changes.
    step(table, *, rate, step, betas, eps, multiplier=None, seed=None) -> None: in place. rate, step and multiplier, ()
    float32 on the device: the learning rate, which update this is (1 for the first), and what gradients are multiplied
    by. seed, () int64: of what is rounded stochastically, whose bits are philox's of (seed; element, parameter, step).
    Gradients are only read. ValueError for betas outside [0, 1), a negative eps, and other tensors than these.
    norm(table, max_norm) -> norm, multiplier, () float32: the norm of all gradients together, and
    min(1, max_norm / (norm + 1e-6)), NaN where the norm is, as torch.nn.utils.clip_grad_norm_ defines it. The same bits
    in every run. ValueError unless max_norm is positive.
    move(table, parameters) -> Table: the table of parameters of the same shapes and dtypes at other addresses, which
    launches that a graph captured with the old one follow from now on. ValueError for other shapes and dtypes, and as
    `table`. None where no captured graph could follow.
    kernels: device -> regular expression over what a profiler names that proves a step ran: kernels, or ranges of the host.
    """

    table: Callable[..., Table]
    step: Callable[..., None]
    norm: Callable[..., tuple[Any, Any]]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    move: Callable[..., Table] | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
