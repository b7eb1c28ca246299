"""Checks of a model's parts for rivals that compute whole blocks."""

import functools

from te_bench.models.configs import DecoderConfig


@functools.cache
def unlike_llama(config: DecoderConfig, *, biases: bool = False) -> str | None:
    """Return why the model's blocks differ from Llama's (RMSNorm, SwiGLU, rotary positions, stacked q, k, v), or None.

    Attention and MLP must alternate; Linears may have biases only if `biases`. Nothing is allocated.
    """
    import torch

    from te_bench.models import decoder
    from te_bench.models.parts import AttentionPart, MLPPart

    with torch.device("meta"):
        model = decoder.build(config)
    parts = model.parts()
    if not parts:
        return "it does not say its parts"
    attentions, mlps = parts[::2], parts[1::2]
    norms = [part.norm.norm for part in parts]
    if any(norm.kind != "rmsnorm" or norm.zero_centered_gamma for norm in norms):
        return "its norms are no plain RMSNorm"
    if not all(isinstance(p, AttentionPart) and p.turns == 1 for p in attentions):
        return "its blocks do not begin with attention of q, k and v one after the other"
    if not all(isinstance(p, MLPPart) and p.activation == "swiglu" for p in mlps):
        return "its blocks do not end with a SwiGLU MLP"
    if model.angles(1) is None:
        return "its positions are learned"
    linears = [
        linear for p in parts for linear in ((p.qkv, p.proj) if isinstance(p, AttentionPart) else (p.up, p.down))
    ]
    if not biases and any(linear.bias is not None for linear in linears):
        return "some of its Linears have biases"
    return None
