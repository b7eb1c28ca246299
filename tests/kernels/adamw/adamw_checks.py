"""What the tests of AdamW share: parameters of odd shapes, and AdamW in float64 as the paper writes it (no te_bench)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.adamw import BLOCK, Parameter
from te_bench.kernels.adamw.backends import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STATE = ("weight", "exp_avg", "exp_avg_sq")
COPIES = ("bf16", "data", "data_t", "scale_inv", "amax")
# Of no element, below, at and beyond a tile of 32 x 64, with lengths that are and are not multiples of 16.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 5), (7,), (2112,), (2, 3, 5), (33, 70), (48, 80))

#: Dtypes of weight and moments.
FORMS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, moments in FP8": (torch.bfloat16, E4M3),
    "moments in bf16": (torch.float32, torch.bfloat16),
    "moments in FP8": (torch.float32, E4M3),
}

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]


def parameter(
    shape: tuple[int, ...], room: Room, seed: int, layouts: str = "", target: torch.dtype = E4M3
) -> Parameter:
    """Of the shape, in room(shape, dtype); 1-D ones do not decay.

    layouts: among "b" (bf16), "r" (data), "t" (data_t), and "g", whose gradient is bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    f32 = torch.float32

    def filled(values: Tensor) -> Tensor:
        return room(shape, f32).copy_(values)

    weight, grad, m, v = torch.randn(4, *shape, generator=generator)
    fp8: dict[str, Any] = {}
    if "r" in layouts or "t" in layouts:
        fp8 = {
            "scale": room((), f32).fill_(100 + seed),
            "scale_inv": room((), f32).zero_(),
            "amax": room((), f32).zero_(),
        }
    if "r" in layouts:
        fp8["data"] = room(shape, target)
    if "t" in layouts:
        fp8["data_t"] = room(shape[::-1], target)
    if "b" in layouts:
        fp8["bf16"] = room(shape, torch.bfloat16).zero_()
    spread = torch.exp(3 * torch.randn(shape, generator=generator))  # gradients over several orders of magnitude
    return Parameter(
        weight=filled(weight),
        grad=room(shape, torch.bfloat16 if "g" in layouts else f32).copy_(grad * spread),
        exp_avg=filled(m),
        exp_avg_sq=filled(v.square()),
        weight_decay=0.1 if len(shape) > 1 else 0.0,
        **fp8,
    )


def parameters(room: Room, target: torch.dtype = E4M3, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    """Of all shapes; the matrices in one layout, in the other, and in both, some with bf16 alone; either gradient dtype."""
    kinds = ("brtg", "bt", "rg")
    made = []
    for i, shape in enumerate(shapes):
        made.append(parameter(shape, room, i, kinds[i % 3] if len(shape) == 2 else "bg" if i % 2 else "", target))
    return made


def few_bits(
    shape: tuple[int, ...],
    form: tuple[torch.dtype, torch.dtype],
    layouts: str = "",
    device: str = "cpu",
    offset: int = 0,
) -> Parameter:
    """`parameter`, with weight and moments in those dtypes, `offset` elements off an address that is a multiple of 16."""

    def room(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = math.prod(size)
        return torch.zeros(numel + offset, device=device).to(dtype)[offset:].view(size)

    p = parameter(shape, room, len(shape), layouts + ("g" if form[0] is torch.bfloat16 else ""))
    values: dict[str, Any] = {name: getattr(p, name) for name in p.__slots__}
    for name, dtype in zip(STATE, (form[0], form[1], form[1]), strict=True):
        value = values[name] * (1.0 if dtype is not E4M3 else 40.0)
        if dtype is E4M3:  # in its range, beyond which torch made NaN until 2.12, and saturates since
            value = value.clamp(-448, 448)
        if dtype is E4M3 and name == "exp_avg_sq":  # codes: many near the largest, few of 0
            value, dtype = (255 - value).clamp(min=0), reference.ROOTS
        values[name] = room(shape, dtype).copy_(value.to(dtype))
        if dtype in (E4M3, reference.ROOTS):
            values[f"{name}_scale"] = torch.rand(value.numel() // BLOCK, device=device) + 0.01
    return Parameter(**values)


def plain(device: str) -> Room:
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def copy(p: Parameter) -> Parameter:
    values = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    return Parameter(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()})


def assert_same(ours: Parameter, theirs: Parameter) -> None:
    """Bit for bit, gradients and the scales of moments too."""
    for name in (*STATE, *COPIES, "grad", "exp_avg_scale", "exp_avg_sq_scale"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine is not None:
            assert torch.equal(bits(mine), bits(other)), f"{name} of {tuple(ours.weight.shape)}"


def bits(x: Tensor) -> Tensor:
    """x's bits; of every NaN the same, for which one a device makes is not defined."""
    found = x.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    return found.masked_fill(x.cpu().float().isnan(), 0x7F)


def update(
    state: Sequence[Tensor],
    g: Tensor,
    rate: float,
    t: int,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> list[Tensor]:
    """w, m, v after update t, float64: algorithm 2 of arXiv:1711.05101."""
    (w, m, v), (b1, b2) = state, betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    direction = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return [w * (1 - rate * decay) - rate * direction, m, v]


def rate_of(t: int) -> float:
    """A learning rate for each step, exact in float32."""
    return 2.0**-9 * (1 + t % 3)


def gradient(shape: tuple[int, ...], t: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + t)
    g = torch.randn(shape, generator=generator) * math.exp(t % 4)
    return g * (g.abs() > 0.1)  # some are zero
