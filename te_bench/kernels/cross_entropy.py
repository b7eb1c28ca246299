"""Cross-entropy over a padded vocabulary, by PyTorch's own operators.

loss = mean_i(logsumexp(z_i[:V]) - z_i[target_i]): columns V..Vp-1 are padding, outside the softmax, with zero gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
