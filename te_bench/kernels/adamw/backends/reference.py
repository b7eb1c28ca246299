"""AdamW in plain PyTorch. Runs anywhere; on a CPU bit for bit torch.optim.AdamW(fused=True)'s vectorised loop.

Every operation rounds once to float32, except two multiply-adds with a single rounding: m, and the last one of v.
torch's CUDA kernel computes parts in float64 and may differ in the last bit; so may its CPU loop's scalar remainder.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from te_bench.kernels.adamw import BLOCK, Backend, Parameter, Table
from te_bench.kernels.quantize.backends import reference as quantizer
from te_bench.kernels.quantize.block_formats import philox

FLOATS = ("weight", "grad", "exp_avg", "exp_avg_sq")
GRADIENTS = (torch.float32, torch.bfloat16)
NUMBERS = ("scale", "scale_inv", "amax")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
TENSORS = (*FLOATS, "bf16", "data", "data_t", *NUMBERS, *SCALES)  # of a Parameter, in its dataclass's order
MOMENTS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
ROUNDS = 7  # of philox: the fewest that pass BigCrush (Salmon et al., SC 2011)
LEAST_SCALE = 2.0**-126  # also for a block of zeros
ROOTS = torch.uint8  # dtype that stores FP8 roots: torch has no E5M3
SHIFT, OFFSET, TOP = 20, 768, 1.875  # a root's code + OFFSET is a float32's upper bits; the largest root is TOP
RANGE = "te_bench::adamw_reference"  # a step's name in a profiler, because it consists of ordinary operators
WRITTEN = ("weight", "exp_avg", "exp_avg_sq", "bf16", "data", "data_t", "scale_inv", *SCALES)


def table(parameters: Sequence[Parameter]) -> Table:
    """Return a table of the checked parameters. Raises ValueError if dtypes, shapes, strides or devices misfit."""
    written: dict[int, str] = {}
    devices, targets = set(), set()
    for i, p in enumerate(parameters):
        _check(p, f"parameter {i}")
        targets |= {t.dtype for t in (p.data, p.data_t) if t is not None}
        for name in TENSORS:
            tensor = getattr(p, name)
            if tensor is None:
                continue
            devices.add(str(tensor.device))
            if name in WRITTEN and tensor.numel():
                before = written.setdefault(tensor.data_ptr(), f"{name} of parameter {i}")
                if before != f"{name} of parameter {i}":
                    raise ValueError(f"{name} of parameter {i} is {before}: a step writes each once; give it once")
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(devices))}: a table is of one device")
    if len(targets) > 1:
        raise ValueError(f"data of {', '.join(sorted(map(str, targets)))}: a table casts to one of them")
    return Table(parameters=tuple(parameters), target=next(iter(targets), None))


def _check(p: Parameter, where: str) -> None:
    """Raise ValueError, beginning with `where`, unless p satisfies Parameter's rules."""
    shape = p.weight.shape
    transposed = shape[::-1]
    expected: dict[str, tuple[torch.Size, tuple[torch.dtype, ...]]] = {
        name: (shape, (torch.float32,)) for name in FLOATS
    }
    half = p.weight.dtype is torch.bfloat16
    expected["weight"] = (shape, GRADIENTS)
    expected["grad"] = (shape, (torch.bfloat16,) if half else GRADIENTS)
    expected["exp_avg"] = (shape, MOMENTS)
    in_fp8 = p.exp_avg.dtype is torch.float8_e4m3fn
    expected["exp_avg_sq"] = (shape, (ROOTS if in_fp8 else p.exp_avg.dtype,))
    expected |= dict.fromkeys(SCALES, (torch.Size((p.weight.numel() // BLOCK,)), (torch.float32,)))
    expected |= {name: (torch.Size(()), (torch.float32,)) for name in NUMBERS}
    expected |= {"bf16": (shape, (torch.bfloat16,)), "data": (shape, quantizer.FORMATS)}
    expected |= {"data_t": (transposed, quantizer.FORMATS)}
    for name, (legal, dtypes) in expected.items():
        t = getattr(p, name)
        if t is not None and (t.shape != legal or t.dtype not in dtypes or not t.is_contiguous()):
            raise ValueError(
                f"{where}: {name} {tuple(t.shape)} of {t.dtype}, strides {t.stride()}: it must be {tuple(legal)} of "
                f"{' or '.join(map(str, dtypes))}, contiguous"
            )
    if any((getattr(p, name) is not None) != in_fp8 for name in SCALES):
        raise ValueError(
            f"{where}: moments of {p.exp_avg.dtype}: {' and '.join(SCALES)} are of those in FP8, which need both"
        )
    if in_fp8 and (not shape or shape[-1] % BLOCK):
        fits = f"rows must be multiples of {BLOCK}; keep them in bf16"
        raise ValueError(f"{where}: moments in FP8 of a weight {tuple(shape)}: {fits}")
    if half and p.bf16 is not None:
        raise ValueError(f"{where}: bf16 of a weight in bfloat16: it is that weight; leave bf16 out")
    cast = p.data is not None or p.data_t is not None
    if cast and len(shape) != 2:
        raise ValueError(f"{where}: data of a weight {tuple(shape)}: FP8 layouts are of 2-D weights")
    if cast and p.scale is None:
        raise ValueError(f"{where}: data without a scale: give the () float32 that multiplies towards FP8")
    if not cast and any(getattr(p, name) is not None for name in NUMBERS):
        raise ValueError(f"{where}: scale, scale_inv or amax without data or data_t: ask for a layout")
    if not 0 <= p.weight_decay < math.inf:
        raise ValueError(f"{where}: weight_decay {p.weight_decay}: it must be finite and at least 0")


def form(p: Parameter) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the weight and its moments."""
    return p.weight.dtype, p.exp_avg.dtype


def check_step(
    table: Table,
    rate: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    multiplier: Tensor | None,
    seed: Tensor | None,
) -> None:
    """Raise ValueError unless the tensors are () float32 on the table's device, betas in [0, 1) and eps at least 0.

    seed is () int64 there, and required if anything is rounded stochastically.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas}: each must be at least 0 and below 1")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps {eps}: it must be finite and at least 0")
    device = table.parameters[0].weight.device if table.parameters else rate.device
    if seed is None and any(form(p) != (torch.float32, torch.float32) for p in table.parameters):
        raise ValueError("no seed: weights and moments in fewer bits are rounded stochastically; give a () int64")
    for name, t in (("rate", rate), ("step", step), ("multiplier", multiplier), ("seed", seed)):
        dtype = torch.int64 if name == "seed" else torch.float32
        if t is not None and (t.dim() or t.dtype != dtype or t.device != device):
            raise ValueError(
                f"{name} {tuple(t.shape)} of {t.dtype} on {t.device}: it must be () of {dtype} on {device}"
            )


@record_function(RANGE)
@torch.no_grad()
def step(
    table: Table,
    *,
    rate: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    multiplier: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """Apply AdamW's step-th update to every parameter, in place, and write its copies. Raises as check_step."""
    check_step(table, rate, step, betas, eps, multiplier, seed)
    beta1, beta2 = betas
    rate64, step64 = rate.double(), step.double()
    step_size = (rate64 / (beta1**step64 - 1)).float()  # the factor of m / (...): negative
    bias_correction2_sqrt = (1 - beta2**step64).sqrt().float()

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=rate.device)  # a fill is legal in a capture

    for i, p in enumerate(p for p in table.parameters if p.weight.numel()):
        g = p.grad.float() if multiplier is None else p.grad.float() * multiplier
        exp_avg, exp_avg_sq = _moments(p)
        # Interpolate from the nearer end, as torch.lerp does: exact for beta1 = 0.
        weight, start = (number(1 - beta1), exp_avg) if 1 - beta1 < 0.5 else (number(1 - beta1) - 1, g)
        m = _multiply_add(weight, g - exp_avg, start)
        v = _multiply_add(number(1 - beta2) * g, g, exp_avg_sq * number(beta2))
        denominator = _root(v) / bias_correction2_sqrt + number(eps)
        decay = (1 - rate64 * p.weight_decay).float()
        w = p.weight.float() * decay + step_size * m / denominator
        stochastic = form(p) != (torch.float32, torch.float32)
        bits = random_bits(seed, w.numel(), i, step).view(w.shape) if stochastic and seed is not None else None
        p.weight.copy_(w if bits is None or p.weight.dtype is torch.float32 else stochastic_bf16(w, bits & 0xFFFF))
        _keep(p, m, v, bits)
        _emit(p)


def _moments(p: Parameter) -> tuple[Tensor, Tensor]:
    """Return exp_avg and exp_avg_sq in float32."""
    if p.exp_avg_scale is None:
        return p.exp_avg.float(), p.exp_avg_sq.float()
    root = _times(roots(p.exp_avg_sq), p.exp_avg_sq_scale)
    return _times(p.exp_avg.float(), p.exp_avg_scale) * root, root * root


def _times(x: Tensor, scales: Tensor) -> Tensor:
    return (x.view(-1, BLOCK) * scales[:, None]).view(x.shape)


def _keep(p: Parameter, m: Tensor, v: Tensor, bits: Tensor | None) -> None:
    """Store the moments, rounded as the module says. The upper 8 of each one's 16 bits are its own."""
    if p.exp_avg_scale is not None and bits is not None:
        root = _root(v)
        p.exp_avg_sq_scale.copy_(_scales(root, TOP))
        p.exp_avg_sq.copy_(stochastic_root(_times(root, 1 / p.exp_avg_sq_scale), bits >> 16) * (root > 0))
        kept = _times(roots(p.exp_avg_sq), p.exp_avg_sq_scale)
        ratio = torch.where(kept > 0, m / kept, 0.0)
        p.exp_avg_scale.copy_(_scales(ratio, 448.0))
        p.exp_avg.copy_(stochastic_e4m3(_times(ratio, 1 / p.exp_avg_scale), (bits >> 8) & 0xFFFF).to(p.exp_avg.dtype))
        return
    p.exp_avg.copy_(m)
    p.exp_avg_sq.copy_(v if bits is None or p.exp_avg_sq.dtype is torch.float32 else stochastic_bf16(v, bits >> 16))


def _scales(x: Tensor, top: float) -> Tensor:
    """Return each block's scale: its largest magnitude divided by `top`."""
    largest = x.view(-1, BLOCK).abs().amax(1)
    return (largest / torch.full_like(largest, top)).clamp(min=LEAST_SCALE)


def stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 x to a bfloat16 neighbour, with probability by distance; bits: 16 random ones per element.

    The magnitude is rounded, so infinity and NaN stay.
    """
    moved = (x.view(torch.int32) + bits.int()) & -0x10000
    return torch.where(x.isnan(), x, moved.view(torch.float32)).to(torch.bfloat16)


def stochastic_e4m3(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 x stochastically to an E4M3 neighbour, saturating, as float32; bits: 16 random ones each."""
    exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp(min=121)  # of 2^-6, below which the spacing is constant
    inverse, spacing = (b.int().view(torch.float32) for b in ((257 - exponent) << 23, (exponent - 3) << 23))
    places = x.abs() * inverse
    below = places.floor()
    up = (places - below) > (bits.float() + 0.5) / 65536
    return ((below + up) * spacing).clamp(max=448.0).copysign(x)


def roots(codes: Tensor) -> Tensor:
    """Convert codes of unsigned E5M3 to float32: 0, then 1.125 x 2^-31 to 1.875, without subnormals."""
    return torch.where(codes > 0, ((codes.int() + OFFSET) << SHIFT).view(torch.float32), 0.0)


def stochastic_root(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 x in 0 to 1.875 to the code of an unsigned E5M3 neighbour other than 0; NaN gives 0."""
    moved = (x.view(torch.int32) + (bits.int() << SHIFT - 16) + (1 << SHIFT - 17)) >> SHIFT
    return torch.where(x >= 0, (moved - OFFSET).clamp(1, 255), 0).to(ROOTS)


def random_bits(seed: Tensor, count: int, number: int, step: Tensor) -> Tensor:
    """Return 32 random bits per element as int64: philox's words at (element / 4, number, step) in turn."""
    quarter = torch.arange(-(-count // 4), device=seed.device)
    return philox(seed, quarter, number, step.long(), ROUNDS).flatten()[:count]


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once: float64 holds the product of two float32 exactly."""
    return (a.double() * b.double() + c.double()).float()


def _root(x: Tensor) -> Tensor:
    """Return sqrt(x), correctly rounded: torch's CPU result is one off for a fifth of all numbers (torch 2.13, MKL)."""
    return x.double().sqrt().float()


def _emit(p: Parameter) -> None:
    """Write the requested copies of p's weight: bf16, data, data_t, scale_inv and amax."""
    half = p.weight.to(torch.bfloat16)
    if p.bf16 is not None:
        p.bf16.copy_(half)
    target = p.data if p.data is not None else p.data_t
    if target is None or not half.numel():
        return
    made = quantizer.quantize(half, target.dtype, scale=p.scale, rowwise=True, columnwise=True, amax=p.amax)
    for ours, theirs in ((p.data, made.data), (p.data_t, made.data_t), (p.scale_inv, made.scale_inv)):
        if ours is not None:
            ours.copy_(theirs)


def norm(table: Table, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return norm = sqrt(sum of all g^2) and min(1, max_norm / (norm + 1e-6)), () float32, as clip_grad_norm_.

    Raises ValueError unless max_norm is positive.
    """
    check_norm(max_norm)
    # In float32, because torch rounds each bfloat16 tensor's norm to bfloat16.
    whole = torch.nn.utils.get_total_norm([p.grad.float() for p in table.parameters])
    return whole, multiplier_of(whole, max_norm)


def multiplier_of(norm: Tensor, max_norm: float) -> Tensor:
    # Divide two tensors: torch multiplies a number by the reciprocal, which rounds twice.
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)


def check_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be positive; leave the clipping out for none")


BACKEND = Backend(
    table=table,
    step=step,
    norm=norm,
    kernels=dict.fromkeys(("cpu", "cuda"), f"^{RANGE}$"),
)
