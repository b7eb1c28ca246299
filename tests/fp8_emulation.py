"""FP8 in float64, written from the formats and the recipes' rules alone, and the check that holds modules to it.

Nothing here comes from te_bench: a mistake in its quantisers, GEMMs or modules must not be in their yardstick too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # mantissa bits, smallest normal exponent, largest
FLOOR = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 2.0**-40}


def rounded(x: Tensor, name: str) -> Tensor:
    """Float64 values to the nearest of an FP8 format, ties to even, saturating; NaN stays."""
    bits, least, limit = FORMATS[name]
    values = x.detach().double().cpu().numpy()
    exponent = np.frexp(values)[1] - 1
    step = np.ldexp(1.0, np.maximum(exponent, least) - bits)
    return torch.from_numpy(np.clip(np.rint(values / step) * step, -limit, limit))


def scale_of(amax: Tensor, name: str, power_of_two: bool) -> Tensor:
    """Float32: largest / amax, 1 where amax is 0, infinite or NaN; saturated at float32's largest."""
    values = amax.detach().float().cpu().numpy()
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(FORMATS[name][2]) / values, np.finfo(np.float32).max)
    if power_of_two:
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1]).astype(np.float32)
    return torch.from_numpy(np.where((values > 0) & np.isfinite(values), scale, np.float32(1.0)))


@dataclass(frozen=True)
class Fp8:
    """A recipe's numbers: formats, what shares a scale, delayed scales by (role, gemm), whether wgrad is in FP8, too."""

    forward: str = "e4m3"
    backward: str = "e5m2"
    granularity: str = "tensor"
    power_of_two: bool = False
    wgrad: bool = True
    scales: dict[tuple[str, int], float] | None = field(default=None, compare=False)

    def through(self, x: Tensor, role: str, gemm: int) -> Tensor:
        """x (rows, K), K being what the GEMM contracts, to FP8 and back."""
        name = self.backward if role == "grad_output" else self.forward
        rows, k = x.shape
        high, wide = {"tensor": (rows, k), "row": (1, k), "block": (128 if role == "weight" else 1, 128)}[
            self.granularity
        ]
        if not x.numel():
            return x
        padded = F.pad(x.detach().cpu(), (0, -k % wide, 0, -rows % high))
        blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        if self.scales is None:
            scale = scale_of(blocks.abs().amax((1, 3), keepdim=True), name, self.power_of_two)
        else:
            scale = torch.tensor(self.scales[role, gemm], dtype=torch.float32)
        back = rounded(blocks.float() * scale, name) / scale.double()
        return back.view(padded.shape)[:rows, :k].to(x.device)


class _Gemm(torch.autograd.Function):
    """x (M, K) W^T (N, K) and both gradients in float64, each operand rounded along what its GEMM contracts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fp8: Fp8 | None, gemm: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.fp8, ctx.gemm = fp8, gemm
        return x @ w.t() if fp8 is None else fp8.through(x, "input", gemm) @ fp8.through(w, "weight", gemm).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), fp8, gemm = ctx.saved_tensors, ctx.fp8, ctx.gemm
        if fp8 is None:
            return dy @ w, dy.t() @ x, None, None
        dx = fp8.through(dy, "grad_output", gemm) @ fp8.through(w.t(), "weight", gemm).t()
        if not fp8.wgrad:
            return dx, dy.t() @ x, None, None
        dw = fp8.through(dy.t(), "grad_output", gemm) @ fp8.through(x.t(), "input", gemm).t()
        return dx, dw, None, None


class _Stored(torch.autograd.Function):
    """A float64 value rounded to `dtype`, where a module keeps it in memory, and its gradient alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.to(ctx.dtype).double(), None


Parameters = dict[str, Tensor]
Function = Callable[[Parameters, Tensor, Fp8 | None, torch.dtype], Tensor]


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = _Stored.apply(x, dtype)
    return result


def gemm(x: Tensor, w: Tensor, b: Tensor | None, fp8: Fp8 | None, dtype: torch.dtype, number: int = 0) -> Tensor:
    y: Tensor = _Gemm.apply(x.reshape(-1, x.shape[-1]), w, fp8, number)
    return stored(y if b is None else y + b, dtype).view(*x.shape[:-1], w.shape[0])


def linear(p: Parameters, x: Tensor, fp8: Fp8 | None, dtype: torch.dtype) -> Tensor:
    return gemm(stored(x, dtype), p["weight"], p.get("bias"), fp8, dtype)


def norm(p: Parameters, x: Tensor, dtype: torch.dtype) -> Tensor:
    gamma, beta = p["layer_norm_weight"], p.get("layer_norm_bias")
    if beta is None:
        return stored(F.rms_norm(x, gamma.shape, 1 + gamma, 1e-5), dtype)
    return stored(F.layer_norm(x, gamma.shape, gamma, beta, 1e-5), dtype)


def layernorm_linear(p: Parameters, x: Tensor, fp8: Fp8 | None, dtype: torch.dtype) -> Tensor:
    return gemm(norm(p, stored(x, dtype), dtype), p["weight"], p.get("bias"), fp8, dtype)


def gelu(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def swiglu(h: Tensor) -> Tensor:
    gate, value = h.chunk(2, -1)
    return F.silu(gate) * value


def layernorm_mlp(activation: Callable[[Tensor], Tensor] = gelu) -> Function:
    def function(p: Parameters, x: Tensor, fp8: Fp8 | None, dtype: torch.dtype) -> Tensor:
        h = gemm(norm(p, stored(x, dtype), dtype), p["fc1_weight"], p.get("fc1_bias"), fp8, dtype)
        return gemm(stored(activation(h), dtype), p["fc2_weight"], p.get("fc2_bias"), fp8, dtype, 1)

    return function


def transformer_layer(heads: int) -> Function:
    """Causal self-attention and gelu MLP, pre-norm, (s, b, hidden)."""

    def function(p: Parameters, x: Tensor, fp8: Fp8 | None, dtype: torch.dtype) -> Tensor:
        def below(prefix: str) -> Parameters:
            return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}

        qkv = below("self_attention.layernorm_qkv.")
        for part in ("weight", "bias"):
            qkv[part] = torch.cat([qkv[f"{name}_{part}"] for name in ("query", "key", "value")])
        s, b, c = x.shape
        q, k, v = (
            t.reshape(s, b, heads, -1).permute(1, 2, 0, 3) for t in layernorm_linear(qkv, x, fp8, dtype).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        attended = stored(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v, dtype)
        attended = attended.permute(2, 0, 1, 3).reshape(s, b, c)
        h = stored(x + linear(below("self_attention.proj."), attended, fp8, dtype), dtype)
        return stored(h + layernorm_mlp()(below("layernorm_mlp."), h, fp8, dtype), dtype)

    return function


def compute(
    function: Function, parameters: Parameters, x: Tensor, dy: Tensor, fp8: Fp8 | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """y, dx and the gradients of all parameters, float64."""
    p = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    x = x.detach().double().requires_grad_()
    y = function(p, x, fp8, dtype)
    y.backward(dy.double())
    return {"y": y.detach(), "dx": _grad(x)} | {name: _grad(value) for name, value in p.items()}


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def faults(
    ours: dict[str, Tensor], truth: dict[str, Tensor], emulated: dict[str, Tensor], dtype: torch.dtype
) -> list[str]:
    """What is wrong with the results of an FP8 module, quantity by quantity; [] where nothing is.

    Against the exact result, our error is between half and twice the emulation's, besides a floor for rounding to
    `dtype`: no zero, no sign, no scale, and no high precision under an FP8 name passes. And we are nearer to the
    emulation than a third of what FP8 costs: another format, or another rounding, has an error of its own.
    """
    found = []
    if ours.keys() != truth.keys():
        found.append(f"quantities {sorted(ours)} instead of {sorted(truth)}")
    for name in ours.keys() & truth.keys():
        exact, size = truth[name], truth[name].norm()
        if ours[name].shape != exact.shape:
            found.append(f"{name}: shape {tuple(ours[name].shape)} instead of {tuple(exact.shape)}")
            continue
        value = ours[name].double()
        error, expected = (value - exact).norm(), (emulated[name] - exact).norm()
        distance, floor = (value - emulated[name]).norm(), FLOOR[dtype] * size
        if not error <= 2 * expected + floor:
            found.append(f"{name}: error {error / size:.2e}, of the emulation {expected / size:.2e}")
        elif not error >= 0.5 * expected - floor:
            found.append(f"{name}: error {error / size:.2e} is too small for FP8, {expected / size:.2e}")
        elif not distance <= expected / 3 + floor:
            found.append(f"{name}: {distance / size:.2e} from the emulation, whose error is {expected / size:.2e}")
    return found
