"""FP8 GEMM by cuBLASLt, one scale per tensor, per row or per block.

Source: NVIDIA cuBLAS documentation, FP8 matmul: sm_89 and newer, K and N multiples of 16 (M is free, D being row-major), not
E5M2 x E5M2; 1 x 128 and 128 x 128 scales on sm_90 only. pytorch/pytorch, ScaledBlas.cpp: how torch hands them over.
"""

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from te_bench.kernels import architecture
from te_bench.kernels.gemm import Backend, Problem
from te_bench.kernels.gemm.operands import check, granularities, refusal
from te_bench.kernels.gemm.operators import as_operator
from te_bench.kernels.quantize import BLOCK, PLAIN, TENSOR, Operand

ALIGNMENT = 16  # of N and K, in elements: 16 bytes of FP8
SCALE_ALIGNMENT = 4  # of per-tensor scales, rows of 1 x 128 scales, and K blocks of 128 x 128 scales: 16 bytes
PER_TENSOR = (TENSOR, torch.float32, PLAIN)  # a Layout without its format
RECIPES = {"block": ScalingType.BlockWise1x128.value, "tile": ScalingType.BlockWise128x128.value}

VectorT = TypeVar("VectorT", Tensor, Tensor | None)


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU"
    if p.capability is not None and p.capability < architecture.FP8_SINCE:
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.9"
    if reason := refusal(p.a, p.b):
        return reason
    in_blocks, e5m2 = granularities(p.a, p.b)[0] in RECIPES, torch.float8_e5m2
    if p.a.format is p.b.format is e5m2:
        return "E5M2 x E5M2: cuBLASLt has no such kernel"
    if in_blocks and e5m2 in (p.a.format, p.b.format):
        return "E5M2 with block scales: torch hands cuBLASLt E4M3 only"  # torch 2.11: "Invalid scaling configuration"
    return lacks_block_scales(p.capability) if in_blocks else None


def lacks_block_scales(capability: architecture.Capability) -> str | None:
    """Return why cuBLASLt cannot multiply operands with scales per 1 x 128 and 128 x 128 there, or None."""
    if capability is None or capability[0] == 9:
        return None
    return f"block scales: cuBLASLt has them on compute capability 9.x only, not {capability[0]}.{capability[1]}"


def forward(
    a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Compute D = dequantise(a) @ dequantise(b).T + bias; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

    K and N that cuBLASLt does not support are zero-padded, and the result is sliced. fast_accum keeps the tensor core's
    14-bit accumulator for all of K; without it cuBLASLt promotes to float32. It also applies to row scales; block
    scales ignore it, because every block of 128 is promoted when scaled. bias is rounded to out_dtype and added in
    float32 by the epilogue; to a float32 D it is added afterwards. Row scales are cuBLASLt's on sm_90, elsewhere
    CUTLASS's, which writes only bfloat16: for other dtypes the unscaled product is computed in float32 and scaled
    afterwards. Raises ValueError for operands that cannot be multiplied.
    """
    if torch.compiler.is_compiling():
        return _operator(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)
    x, y, x_inv, y_inv = a.data, b.data, a.scale_inv, b.scale_inv
    # Training's fast path: this Python branch costs less than a microsecond, the checked path several.
    if a.layout[1:] == b.layout[1:] == PER_TENSOR and x.dim() == y.dim() == 2:
        (m, k), n = x.shape, y.shape[0]
        fits = bias is None or bias.shape == (n,)  # torch would broadcast another one to a float32 D
        if m and k and n and fits and not (k % ALIGNMENT or n % ALIGNMENT):
            return _multiply(x, y, x_inv, y_inv, bias, out_dtype, fast_accum)
    kind, _ = check(a, b, bias)
    (m, k), n = x.shape, y.shape[0]
    if not (m and k and n):
        nothing = x.new_zeros((m, n), dtype=out_dtype)
        return nothing if bias is None else nothing + bias.to(out_dtype)
    if kind in RECIPES:
        return _block(a, b, bias, out_dtype)
    x, y, bias = _pad(x, 1, ALIGNMENT), _pad(y, ALIGNMENT, ALIGNMENT), _pad_vector(bias, 0.0)
    if kind == "row":
        x_inv, y_inv = x_inv[:, None], _pad_vector(y_inv, 1.0)[None]
        if out_dtype is not torch.bfloat16 and not architecture.of_device(x.device).warpgroups:
            one = x_inv.new_ones(())
            out = _multiply(x, y, one, one, None, torch.float32, fast_accum).mul_(x_inv).mul_(y_inv)
            return (out if bias is None else out.add_(bias))[:, :n].to(out_dtype).contiguous()
    return _multiply(x, y, x_inv, y_inv, bias, out_dtype, fast_accum)[:, :n].contiguous()


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Call torch._scaled_mm once, with scales () and () or (M, 1) and (1, N)."""
    fused = bias is not None and out_dtype is not torch.float32  # torch refuses a bias for a float32 D
    added = None
    if fused and bias is not None:
        added = bias if bias.dtype is out_dtype else bias.to(out_dtype)
    out = torch._scaled_mm(a, b.mT, a_scale_inv, b_scale_inv, added, None, out_dtype, fast_accum)
    return out if fused or bias is None else out.add_(bias)


def _block(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Compute the GEMM of block scales (sm_90), with scales in te_bench.kernels.quantize's layouts."""
    kinds = granularities(a.layout, b.layout)
    m, n = a.data.shape[0], b.data.shape[0]
    x, y, bias = _pad(a.data, SCALE_ALIGNMENT, BLOCK), _pad(b.data, ALIGNMENT, BLOCK), _pad_vector(bias, 0.0)
    fused = bias is not None and out_dtype is not torch.float32
    out = torch._scaled_mm_v2(
        x,
        y.t(),
        [_layout(a.scale_inv, x.shape[0], kinds[0])],
        [RECIPES[kinds[0]]],
        [],
        [_layout(b.scale_inv, y.shape[0], kinds[1])],
        [RECIPES[kinds[1]]],
        [],
        bias.to(out_dtype) if fused and bias is not None else None,
        out_dtype,
    )
    if bias is not None and not fused:
        out += bias
    return out if out.shape == (m, n) else out[:m, :n].contiguous()


# It is one operator, because torch's fake implementation takes fewer shapes than its kernel (for block scales only
# whole blocks), Inductor's lowering may misread the scales' strides (pytorch/pytorch#195751), and if D was sliced or
# added to in place in an autograd.Function, the compiled backward pass got zeros (torch 2.11).
_operator = as_operator("scaled_mm", forward)


def _layout(scale_inv: Tensor, rows: int, kind: str) -> Tensor:
    """Return scales as cuBLASLt reads them, padded with 1.

    1 x 128: (rows, K blocks), rows contiguous. 128 x 128: (K blocks rounded up to 4, row blocks), K contiguous; without
    the rounding products are wrong (pytorch/pytorch#166752).
    """
    if kind == "block":
        missing = rows - scale_inv.shape[0]
        padded = F.pad(scale_inv, (0, 0, 0, missing), value=1.0) if missing else scale_inv
        columns = padded.t().contiguous()
        # Also for one block of K, whose stride is arbitrary: torch lets a's be 1 only if b's is (ScaledBlas.cpp, 2.11).
        return columns.as_strided((rows, columns.shape[0]), (1, rows))
    missing = -scale_inv.shape[1] % SCALE_ALIGNMENT
    return (F.pad(scale_inv, (0, missing), value=1.0) if missing else scale_inv.contiguous()).t()


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x zero-padded to multiples of rows and columns, or x itself."""
    bottom, right = -x.shape[0] % rows, -x.shape[1] % columns
    if not bottom and not right:
        return x
    # Pad bytes, because not every device pads FP8; zero is 0 in both formats.
    return F.pad(x.view(torch.uint8), (0, right, 0, bottom)).view(x.dtype)


def _pad_vector(x: VectorT, value: float) -> VectorT:
    """Return a bias (N,), or the scales of b's rows, padded with `value` to a multiple of 16; x itself if it fits."""
    return x if x is None or not x.shape[0] % ALIGNMENT else F.pad(x, (0, -x.shape[0] % ALIGNMENT), value=value)


BACKEND = Backend(forward=forward, unsupported=unsupported)
