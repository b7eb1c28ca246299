"""Does it matter where attention is scaled? The appendix of PyTorch's post on accelerated nanoGPT, with an answer.

Scaling q before QK^T against scaling the scores after it, and against SDPA, all at the trial's dtype, each by its largest
error against float64, relative to the largest output; and the post's own test, torch.allclose between SDPA and manual.
samples: error_scale_before, error_scale_after, error_sdpa (one a draw).
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.experiments.checks import what_ran
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention
from te_bench.kernels import attention as kernels

DRAWS = 8


def run(trial: Trial, context: Context) -> Measurement:
    p = attention.problem_of(trial)
    backend = kernels.load(trial.attention)
    require(trial.attention, backend.unsupported(p))
    scale = 1 / math.sqrt(p.head_dim)
    samples: dict[str, list[float]] = {"error_scale_before": [], "error_scale_after": [], "error_sdpa": []}
    close = 0
    for draw in range(DRAWS):
        seeded = dataclasses.replace(trial, seed=trial.seed * DRAWS + draw)
        q, k, v, _ = (t.detach() for t in attention.inputs(seeded, p.batch, p.heads))
        exact = _scaled_after(q.double(), k.double(), v.double(), scale, p.causal)
        after = _scaled_after(q, k, v, scale, p.causal)
        sdpa = backend.forward(q, k, v, causal=p.causal, scale=scale)
        samples["error_scale_before"].append(_error(_scaled_before(q, k, v, scale, p.causal), exact))
        samples["error_scale_after"].append(_error(after, exact))
        samples["error_sdpa"].append(_error(sdpa, exact))
        close += torch.allclose(sdpa, after)
    check = {"allclose": close == DRAWS, "allclose_draws": close, "draws": DRAWS}
    seen = profiling.kernels_seen(lambda: backend.forward(q, k, v, causal=p.causal, scale=scale), trial.device)
    return what_ran.require_attention(trial, seen, Measurement(check=check, samples=samples))


def _scaled_before(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax((sqrt(s) Q) (sqrt(s) K)^T) V: what SDPA's math kernel does."""
    root = math.sqrt(scale)
    return _softmax((q * root) @ (k * root).transpose(-2, -1), causal) @ v


def _scaled_after(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(s (Q K^T)) V: what nanoGPT wrote."""
    return _softmax((q @ k.transpose(-2, -1)) * scale, causal) @ v


def _softmax(scores: Tensor, causal: bool) -> Tensor:
    if causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~past, float("-inf"))
    return F.softmax(scores, dim=-1)


def _error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()
