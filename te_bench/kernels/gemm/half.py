"""GEMMs in half precision, and an MLP's two with the activation in the epilogue of one, its slope in that of the other.

    x @ w.T + bias          h = x @ up.T + bias, y = f(h)          dh = (g @ down) * f'(h)

The Gluon GEMM's kernel is used where it was measured to be faster than cuBLASLt (te_bench.kernels.measured): its
epilogues run during other tiles' products, which matters for short K. h is not read again, and the gradient of y never
leaves an SM. Rounding is that of a GEMM and a separate kernel.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels import architecture, measured
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import table
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.hopper import plans

ALIGNMENT = 8  # elements of a row
ACTIVATED, GRADIENT = table.ACTIVATED, table.GRADIENT


def is_faster(epilogue: str | None, a: Tensor, b: Tensor, kind: str | None = None) -> bool:
    """Return whether the kernel supports a (M, K) and b, (N, K) or (K, N) for a GRADIENT, and was measured as faster.

    epilogue: None, ACTIVATED or GRADIENT; kind: of the activation.
    """
    if torch.compiler.is_compiling() or not a.is_cuda or (kind is not None and KINDS[kind][1]):
        return False
    half = a.dtype.itemsize == 2 and a.dtype is b.dtype and a.dim() == b.dim() == 2
    legal = half and all(x.is_contiguous() and x.shape[1] % ALIGNMENT == 0 and x.data_ptr() % 16 == 0 for x in (a, b))
    if not legal:
        return False
    n, k = b.shape[::-1] if epilogue == GRADIENT else b.shape
    return k == a.shape[1] and n % ALIGNMENT == 0 and _is_chosen(epilogue, a.shape[0], n, k, a.get_device())


@functools.lru_cache(maxsize=4096)  # bounded, because sequences vary in length
def _is_chosen(epilogue: str | None, m: int, n: int, k: int, device: int) -> bool:
    processors = architecture.processors(torch.device("cuda", device))
    if not choose(epilogue, m, n, k, gpu=torch.cuda.get_device_name(device), processors=processors):
        return False
    return unsupported(n, k, "cuda", torch.cuda.get_device_capability(device)) is None


measured.on_forget(_is_chosen.cache_clear)


def choose(epilogue: str | None, m: int, n: int, k: int, *, gpu: str, processors: int) -> bool:
    """Return whether the kernel is measurably faster on that GPU than cuBLASLt and the activation's kernel.

    Uses bf16's measurements: float16 takes as long.
    """
    row = table.nearest(gpu, processors, m, n=n, k=k, dtype="bf16", epilogue=epilogue)
    usual = table.TORCH if epilogue is None else table.SEPARATE
    return row is not None and row.choose(usual, (table.GLUON,), table.LEAST_GAIN) == table.GLUON


def unsupported(n: int, k: int, device: str, capability: architecture.Capability) -> str | None:
    """Return why the kernel cannot multiply (M, K) by (K, N) there, or None."""
    if n % ALIGNMENT or k % ALIGNMENT:
        return f"N {n} and K {k} must be multiples of {ALIGNMENT}: TMA rows start at 16-byte addresses"
    return architecture.lacks_gluon(device, capability, gluon.INTERPRETED)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias by the faster kernel, in `out` if given: x (M, K), weight (N, K), bias (N,) -> (M,
    N).

    It raises PyTorch's errors for unsupported inputs. Autograd does not see the kernel's product.
    """
    if is_faster(None, x, weight) and _fits(x, weight, bias, out):
        return product(x, weight, bias, out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> bool:
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return False
    shape = x.shape[0], weight.shape[0]
    return out is None or (
        out.dtype is x.dtype and out.shape == shape and out.is_contiguous() and out.data_ptr() % 16 == 0
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias by the kernel, if supported: x (M, K), weight (N, K), bias (N,) -> (M, N)."""
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    gluon.run(plans.plan(x.dtype, promote=False), x, weight, bias, out)
    return out


def activated(x: Tensor, up: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Compute h = x @ up.T + bias and f(h), if supported: x (M, K), up (N, K), bias (N,) -> (M, N) x2."""
    h, y = (x.new_empty((x.shape[0], up.shape[0])) for _ in range(2))
    gluon.run(plans.ACTIVATED, x, up, bias, y, h, activation=kind)
    return h, y


def gradient(g: Tensor, down: Tensor, h: Tensor, kind: str) -> Tensor:
    """Compute dh = (g @ down) * f'(h), if supported: g (M, K), down (K, N), h (M, N) -> (M, N)."""
    dh = torch.empty_like(h)
    gluon.run(plans.GRADIENT, g, down, None, dh, h, activation=kind, gradient=True)
    return dh
