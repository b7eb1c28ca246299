"""SDPA's unfused path: q and k are both scaled by sqrt(scale) before QK^T, in float32 for half-precision inputs.

Source: PyTorch, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
"""

from torch.nn.attention import SDPBackend

from te_bench.kernels.attention import Backend
from te_bench.kernels.attention.sdpa import pinned

forward = pinned(SDPBackend.MATH, grouped=lambda q: True)

BACKEND = Backend(forward=forward, operators="_scaled_dot_product_attention_math")
