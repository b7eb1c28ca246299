"""Linear cross-entropy by PyTorch's own operators, with all the logits in memory at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels.linear_cross_entropy import IGNORED, Backend, check


def forward(x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Return mean_i CE(x_i W^T, t_i) in nats; x (N, D), weight (Vp, D) of any float dtype, targets (N,) int64 -> ().

    The result is float32, or float64 for float64. Raises ValueError for shapes that do not fit, else PyTorch's errors.
    """
    check(x, weight, targets, vocab)
    loss = cross_entropy(F.linear(x, weight), targets, vocab=vocab)
    return loss if loss.dtype is torch.float64 else loss.float()


def cross_entropy(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Return the mean loss in nats; logits (N, Vp) of any float dtype, targets (N,) int64 -> (). -1 is ignored.

    It overwrites the padding columns of `logits` with -inf: exp(-inf) is 0, so softmax and gradient are exactly 0
    there. That writes 47 of GPT-2's 50304 columns instead of passing over all. The write is hidden from autograd, which
    is sound because no operator saves the logits before the softmax does. Pass no view: autograd answers a write to a
    view's storage with as_strided, a copy of all the logits' gradients. On a GPU torch's autocast keeps the
    log-probabilities of bf16 logits in bf16, as for nanoGPT: converting them to float32 first would cost a tenth of
    GPT-2 124M's step.
    """
    if vocab < logits.shape[-1]:
        with torch.no_grad():
            logits[:, vocab:] = float("-inf")
    return F.cross_entropy(logits, targets, ignore_index=-1)


def rows(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the row kernels' results: -log p_t and p - onehot(t) with p = softmax(z[:vocab]), 0 in the padding.

    logits (N, Vp), targets (N,) -> (N,) and (N, Vp), in float32, or float64 for float64. Both are 0 for an ignored
    target, and NaN for one outside the vocabulary.
    """
    z = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    log_p = z.log_softmax(1)
    index = targets.clamp(0, vocab - 1)[:, None]
    losses = -log_p.gather(1, index).squeeze(1)
    gradient = log_p.exp().scatter_add_(1, index, torch.full_like(log_p[:, :1], -1.0))
    ignored, illegal = targets == IGNORED, (targets < IGNORED) | (targets >= vocab)
    losses = losses.masked_fill(ignored, 0.0).masked_fill(illegal, torch.nan)
    gradient = gradient.masked_fill(ignored[:, None], 0.0).masked_fill(illegal[:, None], torch.nan)
    return losses, F.pad(gradient, (0, logits.shape[1] - vocab))


BACKEND = Backend(forward=forward)
