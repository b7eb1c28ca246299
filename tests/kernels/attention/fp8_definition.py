"""FP8 attention in float64 of the operands that FP8 leaves, with what the kernels are allowed to differ from it."""

import math

import torch
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")


def trip(x: Tensor) -> Tensor:
    """x (B, H, T, D), float64, to E4M3 by each head's own amax and back."""
    scale = 448.0 / x.float().abs().amax((2, 3), keepdim=True)
    return (x.float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


def slots(keys: int) -> list[int]:
    """Which key is in each slot of the transposed values; keys: a multiple of 16.

    Thread t of four has columns 2 t and 2 t + 1 of every eight, and gives four in a row of every sixteen.
    """
    return [16 * a + 8 * b + 2 * t + c for a in range(keys // 16) for t in range(4) for b in range(2) for c in range(2)]


def definition(tensors: list[Tensor], causal: bool, scale: float, rounded: bool = True) -> list[Tensor]:
    """out, dq, dk, dv of q, k, v, dout: S, P V and dP of rounded operands, dQ, dK and dV of K, Q and dO as they are.

    rounded=False: of none; nothing of te_bench's is in it, and P and dS are rounded nowhere.
    """
    q, k, v, dout = (t.detach().double() for t in tensors)
    of_query = [h * k.shape[1] // q.shape[1] for h in range(q.shape[1])]
    q8, k8, v8, dout8 = (trip(x) if rounded else x for x in (q, k, v, dout))
    k, k8, v8 = k[:, of_query], k8[:, of_query], v8[:, of_query]
    scores = q8 @ k8.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], device=q.device).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    dweights = dout8 @ v8.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    shared = (v.shape[1], -1)
    dk = (scale * dscores.mT @ q).unflatten(1, shared).sum(2)
    dv = (weights.mT @ dout).unflatten(1, shared).sum(2)
    return [weights @ v8, scale * dscores @ k, dk, dv]


def sqnr(exact: Tensor, value: Tensor) -> float:
    """Signal to quantisation noise, in decibels; -inf where the value is not finite."""
    noise = (value.double() - exact).norm().item()
    if not math.isfinite(noise):
        return -math.inf
    return 20 * math.log10(exact.norm().item() / max(noise, 1e-300))
