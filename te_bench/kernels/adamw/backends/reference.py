"""AdamW in plain PyTorch. Runs anywhere; on a CPU bit for bit torch.optim.AdamW(fused=True)'s vectorised loop.

Every operation rounds once to float32, but for two that are multiply-adds with one rounding: m, and the last of v. torch's
CUDA kernel computes parts of it in float64 and may differ in the last bit; so does its CPU loop over what no vector fills.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from te_bench.kernels.adamw import Backend, Parameter, Problem, Table
from te_bench.kernels.quantize.backends import reference as quantizer

FLOATS = ("weight", "grad", "exp_avg", "exp_avg_sq")
GRADIENTS = (torch.float32, torch.bfloat16)
NUMBERS = ("scale", "scale_inv", "amax")
TENSORS = (*FLOATS, "bf16", "data", "data_t", *NUMBERS)  # of a Parameter, in the order of its dataclass
RANGE = "te_bench::adamw_reference"  # by which a profiler knows a step, made as it is of ordinary operators
WRITTEN = ("weight", "exp_avg", "exp_avg_sq", "bf16", "data", "data_t", "scale_inv")


def unsupported(p: Problem) -> str | None:
    return None


def table(parameters: Sequence[Parameter]) -> Table:
    """The parameters, checked. Raises ValueError for what does not fit together: dtypes, shapes, strides, devices."""
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
    """Raise ValueError, beginning with `where`, unless p is what Parameter says."""
    shape = p.weight.shape
    transposed = shape[::-1]
    expected: dict[str, tuple[torch.Size, tuple[torch.dtype, ...]]] = {
        name: (shape, (torch.float32,)) for name in FLOATS
    }
    expected["grad"] = (shape, GRADIENTS)
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
    cast = p.data is not None or p.data_t is not None
    if cast and len(shape) != 2:
        raise ValueError(f"{where}: data of a weight {tuple(shape)}: FP8 layouts are of 2-D weights")
    if cast and p.scale is None:
        raise ValueError(f"{where}: data without a scale: give the () float32 that multiplies towards FP8")
    if not cast and any(getattr(p, name) is not None for name in NUMBERS):
        raise ValueError(f"{where}: scale, scale_inv or amax without data or data_t: ask for a layout")
    if not 0 <= p.weight_decay < math.inf:
        raise ValueError(f"{where}: weight_decay {p.weight_decay}: it must be finite and at least 0")


def check_step(
    table: Table, rate: Tensor, step: Tensor, betas: tuple[float, float], eps: float, multiplier: Tensor | None
) -> None:
    """Raise ValueError unless the tensors are () float32 on the table's device, betas in [0, 1) and eps at least 0."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas}: each must be at least 0 and below 1")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps {eps}: it must be finite and at least 0")
    device = table.parameters[0].weight.device if table.parameters else rate.device
    for name, t in (("rate", rate), ("step", step), ("multiplier", multiplier)):
        if t is not None and (t.dim() or t.dtype != torch.float32 or t.device != device):
            raise ValueError(
                f"{name} {tuple(t.shape)} of {t.dtype} on {t.device}: it must be () of torch.float32 on {device}"
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
) -> None:
    """AdamW's step-th update of every parameter, in place, and its copies; see Backend. ValueError: check_step."""
    check_step(table, rate, step, betas, eps, multiplier)
    beta1, beta2 = betas
    rate64, step64 = rate.double(), step.double()
    step_size = (rate64 / (beta1**step64 - 1)).float()  # what multiplies m / (...): negative
    bias_correction2_sqrt = (1 - beta2**step64).sqrt().float()

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=rate.device)  # a fill: legal in a capture

    for p in table.parameters:
        g = p.grad.float() if multiplier is None else p.grad.float() * multiplier
        # From the nearer end, as torch.lerp: exact where beta1 is 0.
        weight, start = (number(1 - beta1), p.exp_avg) if 1 - beta1 < 0.5 else (number(1 - beta1) - 1, g)
        m = _multiply_add(weight, g - p.exp_avg, start)
        v = _multiply_add(number(1 - beta2) * g, g, p.exp_avg_sq * number(beta2))
        denominator = _root(v) / bias_correction2_sqrt + number(eps)
        decay = (1 - rate64 * p.weight_decay).float()
        p.weight.copy_(p.weight * decay + step_size * m / denominator)
        p.exp_avg.copy_(m)
        p.exp_avg_sq.copy_(v)
        _emit(p)


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once: float64 holds the product of two float32 exactly."""
    return (a.double() * b.double() + c.double()).float()


def _root(x: Tensor) -> Tensor:
    """sqrt(x) to the nearest float32: torch's own on a CPU is one off for a fifth of all numbers (torch 2.13, MKL)."""
    return x.double().sqrt().float()


def _emit(p: Parameter) -> None:
    """bf16, data, data_t, scale_inv and amax of p's weight, where they are asked for."""
    half = p.weight.to(torch.bfloat16)
    if p.bf16 is not None:
        p.bf16.copy_(half)
    target = p.data if p.data is not None else p.data_t
    if target is None or not half.numel():
        return
    made = quantizer.scaled(half, p.scale, target.dtype, rowwise=True, columnwise=True, amax=p.amax)
    for ours, theirs in ((p.data, made.data), (p.data_t, made.data_t), (p.scale_inv, made.scale_inv)):
        if ours is not None:
            ours.copy_(theirs)


def norm(table: Table, max_norm: float) -> tuple[Tensor, Tensor]:
    """norm = sqrt(sum of all g^2), min(1, max_norm / (norm + 1e-6)), () float32; torch.nn.utils.clip_grad_norm_'s.

    Raises ValueError unless max_norm is positive.
    """
    check_norm(max_norm)
    # In float32: torch rounds the norm of each bfloat16 tensor to bfloat16.
    found = torch.nn.utils.get_total_norm([p.grad.float() for p in table.parameters])
    return found, multiplier_of(found, max_norm)


def multiplier_of(norm: Tensor, max_norm: float) -> Tensor:
    # A tensor over a tensor: torch multiplies a number by the reciprocal, which rounds twice.
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)


def check_norm(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be positive; leave the clipping out for none")


BACKEND = Backend(
    table=table,
    step=step,
    norm=norm,
    unsupported=unsupported,
    kernels=dict.fromkeys(("cpu", "cuda"), f"^{RANGE}$"),
)
