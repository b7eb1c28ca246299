"""GEMMs in half precision, and an MLP's two with the activation in the epilogue of one, its slope in that of the other.

    x @ w.T + bias          h = x @ up.T + bias, y = f(h)          dh = (g @ down) * f'(h)

By the kernel of the Gluon GEMM where it was measured to be faster than cuBLASLt (_half_measured.py): its epilogues run under
other tiles' products, which counts where K is short. h is not read again, and the gradient of y never leaves a processor.
Rounded where a GEMM and a kernel after it would round.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels import gluon as _gluon
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import Epilogue, policy
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.half_measured import GPU, ROWS
from te_bench.kernels.gemm.hopper.plans import TURNS, Plan, plan

TWO_OUT = TURNS._replace(parts=4, slots=2)  # of both h and y: halves of 128 x 128 would not fit in the registers
PRODUCT, ACTIVATED, GRADIENT = "product", "activated", "gradient"


def wins(role: str, a: Tensor, b: Tensor, kind: str | None = None) -> bool:
    """Whether the kernel takes a (M, K) and b, (N, K) or of a GRADIENT (K, N), and was measured to be the faster one.

    role: PRODUCT, ACTIVATED or GRADIENT; kind: of the activation.
    """
    if torch.compiler.is_compiling() or not a.is_cuda or (kind is not None and KINDS[kind][1]):
        return False
    half = a.dtype.itemsize == 2 and a.dtype is b.dtype and a.dim() == b.dim() == 2
    legal = half and all(x.is_contiguous() and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 for x in (a, b))
    if not legal:
        return False
    n, k = b.shape[::-1] if role == GRADIENT else b.shape
    return k == a.shape[1] and n % 8 == 0 and _chosen(role, a.shape[0], n, k, a.get_device())


@functools.lru_cache(maxsize=4096)  # sequences of many lengths would fill it for ever
def _chosen(role: str, m: int, n: int, k: int, device: int) -> bool:
    if not choose(role, m, n, k, gpu=torch.cuda.get_device_name(device)):
        return False
    return (
        _gluon.unsupported("cuda", torch.cuda.get_device_capability(device), gluon.MISSING, gluon.INTERPRETED) is None
    )


def choose(role: str, m: int, n: int, k: int, *, gpu: str) -> bool:
    """Whether the kernel is measurably faster there than cuBLASLt, and the activation's kernel, on that GPU."""
    asked = [row for row in ROWS if (row.role, row.n, row.k) == (role, n, k)] if gpu == GPU else []
    row = policy.nearest(asked, m)
    return row is not None and row.apart >= policy.LEAST * row.gluon


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by the faster one: x (M, K), weight (N, K), bias (N,) -> (M, N), in `out` where it is given.

    For what PyTorch refuses it raises as PyTorch does. Of the kernel's product autograd knows nothing.
    """
    if wins(PRODUCT, x, weight) and _fits(x, weight, bias, out):
        return _product(x, weight, bias, out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> bool:
    """Whether bias is one of the product's and out is one that it may write."""
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return False
    shape = x.shape[0], weight.shape[0]
    return out is None or (
        out.dtype is x.dtype and out.shape == shape and out.is_contiguous() and out.data_ptr() % 16 == 0
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, chosen: Plan | None = None) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    _launch(x, weight, bias, Epilogue(), out, chosen=chosen)
    return out


def activated(
    x: Tensor, up: Tensor, bias: Tensor | None, kind: str, chosen: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """h = x @ up.T + bias and f(h), where the kernel `wins`: x (M, K), up (N, K), bias (N,) -> (M, N) x2."""
    h, y = (x.new_empty((x.shape[0], up.shape[0])) for _ in range(2))
    _launch(x, up, bias, Epilogue(activation=kind, keep=True), y, pre=h, chosen=chosen)
    return h, y


def gradient(g: Tensor, down: Tensor, h: Tensor, kind: str, chosen: Plan | None = None) -> Tensor:
    """dh = (g @ down) * f'(h), where the kernel `wins`: g (M, K), down (K, N), h (M, N) -> (M, N)."""
    dh = torch.empty_like(h)
    made = Epilogue(activation=kind, residual=True)  # h comes in as a residual does, and takes its shared memory
    _launch(g, down, None, made, dh, residual=h, chosen=chosen)
    return dh


def _launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    made: Epilogue,
    out: Tensor,
    *,
    pre: Tensor | None = None,
    residual: Tensor | None = None,
    chosen: Plan | None = None,
) -> None:
    """The kernel; with a residual, an activation's input, b (K, N) and the activation's slope there."""
    p = chosen or (TWO_OUT if pre is not None else plan(a.dtype, promote=False, epilogue=made, residual=residual))
    left, numbers = (out, pre, residual, None, None), (None, None, bias, None, None, None)
    slope = residual is not None
    gluon.run(p, a, b, left, numbers, made, a.dtype, kind="none", promote=False, across=slope, gradient=slope)
