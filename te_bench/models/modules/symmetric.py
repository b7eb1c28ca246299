"""A GEMM and the collective before or after it as one operator of torch's symmetric memory, so that they overlap.

The ranks of a group copy each other's rows from memory that all can read. While one share of the rows is multiplied,
the next is copied: a GEMM becomes as many as there are ranks. Functions take a group's name.
Source: torch.distributed._symmetric_memory of torch 2.11 and 2.13; its operators exist only on CUDA.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory  # defines torch.ops.symm_mem

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.gemm.backends.scaled_mm import ALIGNMENT
from te_bench.kernels.quantize import Operand
from te_bench.models.recipe import Recipe

_torchs: Any = _symmetric_memory
_ops: Any = torch.ops.symm_mem


def unsupported(ranks: int) -> str | None:
    """Return why the `ranks` ranks of this process's group cannot read each other's memory, or None."""
    if dist.get_backend() == "gloo" or not torch.cuda.is_available():
        return "symmetric memory needs NVIDIA GPUs of one host"
    here, gpus = torch.cuda.current_device(), torch.cuda.device_count()
    if gpus < ranks:
        return f"symmetric memory needs all of a group's GPUs in one host, and this rank sees {gpus} for {ranks}"
    for other in range(gpus):
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"symmetric memory needs P2P, and GPU {here} cannot read the memory of GPU {other}"
    return None


def unshared(group: str) -> str | None:
    """Return why the ranks of a group can allocate no shared memory, or None. Every rank must call it."""
    try:
        _torchs.get_symm_mem_workspace(group, min_size=1)  # it grows with the messages
    except RuntimeError as error:
        return f"torch lets these GPUs share no memory ({' '.join(str(error).split())[:200]})"
    return None


def lacks(recipe: Recipe) -> str | None:
    """Return why no operator of symmetric memory computes the recipe's GEMMs, or None."""
    name = type(recipe).__name__
    if recipe.bf16_wgrad:
        return f"{name}(bf16_wgrad=True) reads all ranks' rows uncast for wgrad"
    if recipe.by_given_scale() is None:
        return f"{name} has more than one scale a tensor, or casts in a way of its own"
    return f"{name}(emulate=True) multiplies by no GEMM of cuBLASLt's" if recipe.emulate else None


def misaligned(weight: Tensor) -> str | None:
    """Return why cuBLASLt cannot multiply a rank's share of an FP8 weight (N, K), which cannot be padded; or None."""
    if not any(size % ALIGNMENT for size in weight.shape):
        return None
    rows, columns = weight.shape
    return f"a rank's share of a weight is {rows} x {columns}, and in FP8 both must be multiples of {ALIGNMENT}"


def gather_matmul(own: Tensor, b: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return all ranks' rows A of own (m, K), and A @ b, b (K, N), in own's dtype."""
    # Always ask for A: without it, some GPUs gather a few rows by NVLink multicast.
    whole, (product,) = _ops.fused_all_gather_matmul(own.contiguous(), [b], 0, group, return_A=True)
    return whole, product


def matmul_scatter(a: Tensor, b: Tensor, group: str) -> Tensor:
    """Return this rank's rows of the sum over the ranks of a (M, K) @ b (K, N), sent in a's dtype."""
    made: Tensor = _ops.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, group)
    return made


def gather_matmul_fp8(own: Operand, b: Operand, dtype: torch.dtype, fast: bool, group: str) -> tuple[Tensor, Tensor]:
    """Return all ranks' FP8 rows A of own (m, K), and dequantise(A) @ dequantise(b).T, b (N, K), in `dtype`."""
    scales, none = (own.scale_inv, [b.scale_inv]), [None]
    whole, (product,) = _ops.fused_all_gather_scaled_matmul(
        own.data, [b.data.t()], *scales, 0, group, none, none, [dtype], [fast]
    )
    return whole, product


def matmul_scatter_fp8(a: Operand, b: Operand, dtype: torch.dtype, fast: bool, group: str) -> Tensor:
    """Return this rank's rows of the sum over ranks of dequantise(a) @ dequantise(b).T, (M, K), (N, K), in `dtype`."""
    shape = [a.data.shape[0], b.data.shape[0]]
    scales: Any = a.scale_inv, b.scale_inv
    made: Tensor = _ops.fused_scaled_matmul_reduce_scatter(
        a.data, b.data.t(), *scales, "sum", 0, 0, group, shape, None, None, dtype, fast
    )
    return made


class GatherLinear(torch.autograd.Function):
    """Compute x (m, K) of a rank, weight (N, K) -> all ranks' x @ W^T, saving all x; dx is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        whole, y = _without_autocast(gather_matmul, x, weight.t(), group)
        ctx.save_for_backward(whole, weight)
        ctx.group = group
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        whole, weight = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = matmul_scatter(dy, weight, ctx.group) if need_dx else None
        return dx, dy.t() @ whole if need_dw else None, None


class LinearScatter(torch.autograd.Function):
    """Compute x (M, K) of a rank, weight (N, K) -> its rows of the ranks' sum of x @ W^T; dy is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _without_autocast(matmul_scatter, x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        whole, dx = gather_matmul(dy, weight, ctx.group)
        return dx if need_dx else None, whole.t() @ x if need_dw else None, None


def _without_autocast(operator: Any, *args: Any) -> Any:
    """Call an operator without autocast, which would sum a scatter's parts in float32 (torch 2.11)."""
    if torch.compiler.is_compiling():
        return operator(*args)
    with torch.autocast(args[0].device.type, enabled=False):
        return operator(*args)
