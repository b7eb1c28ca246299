# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GEMMs of `quantize.block_formats`' operands by Blackwell's tensor cores, which scale each block of K themselves.

Compiled for compute capabilities 10.0 and 12.0, and never run: so each process compares its products on a GPU before
their first use. Each product packs its operands first. Older GPUs have no such tensor cores, Triton's interpreter has no
tl.dot_scaled, and a GPU may refute it: there `block_formats` multiplies in half precision.
"""

import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.quantize import Operand, block_casts, packing
from te_bench.kernels.quantize.block_formats import NVFP4_BLOCK, NVFP4_LARGEST, alpha
from te_bench.kernels.tile import FLOATS, rounded

NAME = "block_scaled"  # in doctor's answers
#: A tile of D. Two fit on a processor of compute capability 10.0: registers, shared memory, columns of tensor memory.
SIDE, STAGES = 128, 3
PER_AMAXES = tl.constexpr(torch.tensor(1 / NVFP4_LARGEST**2).item())  # float32, like every constant of alpha
NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SAID = {"e4m3": "MXFP8", "e5m2": "MXFP8 with E5M2", "e2m1": "NVFP4"}
PROVES = (200, 136, 576)  # M, N, K: several tiles and steps of K, none of them full
#: The error that a sum may have, over that of its products' sizes: another order, and tensor cores that keep 14 bits.
SUMS = 5e-4
#: {device: why it does not run there}, of the devices that this process has multiplied on; None: it runs.
LACKS: dict[torch.device, str | None] = {}


def unsupported(device: str, capability: architecture.Capability) -> str | None:
    """Return why a device cannot run it, or None. Everyone who asks whether MXFP8 and NVFP4 are emulated asks this.

    A GPU that got a wrong product in this process cannot; nor can another of its compute capability.
    """
    if device != "cuda" or capability is None:
        return "needs an NVIDIA GPU"
    wrong = (why for known, why in LACKS.items() if why and capability_of(known) == capability)
    return architecture.lacks_block_scales(capability) or next(wrong, None)


def capability_of(device: torch.device) -> architecture.Capability:
    """Return a device's compute capability; None of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def supported(device: torch.device) -> bool:
    """Return whether this device runs it; the first call multiplies there, compares, waits for the GPU, and may warn.

    Nothing can be compared while a CUDA graph is captured: a first call then warns and returns False.
    """
    if device not in LACKS:
        lack = unsupported("cuda", capability_of(device))
        if lack is None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                _warn("was not compared yet, and a CUDA graph is being captured; run a step before the capture")
                return False
            lack = disproof(device)
            if lack is not None:
                _warn(f"{lack} on {device}")
        LACKS[device] = lack
    return LACKS[device] is None


def _warn(what: str) -> None:
    warnings.warn(f"{NAME}: {what}. MXFP8 and NVFP4 are emulated by bf16 GEMMs: right, and slower.", stacklevel=3)


def disproof(device: torch.device) -> str | None:
    """Return which format's product is wrong or fails on the device; None if all agree with the operands' in float64."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for name in packing.FORMATS:
            try:
                if not _agrees(name, device):
                    return f"its product of {SAID[name]} is wrong"
            except Exception as error:  # whatever a compiler, driver or GPU that never ran it raises
                return f"its product of {SAID[name]} fails: {type(error).__name__}: {error}"
    return None


def _agrees(name: str, device: torch.device) -> bool:
    """Compare a product of an operand that was stored along K and one that was not, with blocks of many sizes."""
    m, n, k = PROVES
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int) -> Tensor:
        sizes = torch.exp2(8 * torch.rand(rows, k // NVFP4_BLOCK, 1, generator=generator, device="cpu") - 4)
        x = torch.randn(rows, k // NVFP4_BLOCK, NVFP4_BLOCK, generator=generator, device="cpu")
        return (x * sizes).flatten(1).bfloat16().to(device)

    def cast(x: Tensor, dtype: torch.dtype, by_rows: bool) -> Operand:
        by_columns = not by_rows
        if name == "e2m1":
            q = block_casts.nvfp4(x, rowwise=by_rows, columnwise=by_columns)
        else:
            q = block_casts.mxfp8(x, dtype, rowwise=by_rows, columnwise=by_columns)
        return q.by_rows() if by_rows else q.by_columns()

    a_dtype = next((dtype for dtype, called in NAMES.items() if called == name), torch.float8_e4m3fn)
    a, b = cast(drawn(m), a_dtype, True), cast(drawn(n).t().contiguous(), torch.float8_e4m3fn, False)
    found = multiply(a.data, b.data, a.scale_inv, b.scale_inv, torch.float32, None, a_dtype).cpu().double()
    x, y = a.data.cpu().double(), b.data.cpu().double().t()
    factor = 1.0 if a.scale_inv is None else alpha(a.scale_inv.cpu(), b.scale_inv.cpu()).item()
    return bool(((found - factor * (x @ y)).abs() <= SUMS * factor * (x.abs() @ y.abs())).all())


@triton.jit
def alpha_of(a_scale_inv, b_scale_inv):
    """Return block_formats.alpha."""
    both = (tl.load(a_scale_inv) * 2688.0).to(tl.float32) * (tl.load(b_scale_inv) * 2688.0).to(tl.float32)
    return both * PER_AMAXES


@triton.jit
def _scales(desc, row, k, SIDE: tl.constexpr, TILES: tl.constexpr):
    """Return the scales of `SIDE` rows and `TILES` tiles of packing.BLOCKS, (rows, blocks), as a view."""
    tiles = tl.reshape(desc.load([0, row // 128, k * TILES, 0, 0]), (SIDE // 128, TILES, 32, 4, 4))
    return tl.reshape(tl.permute(tiles, (0, 3, 2, 1, 4)), (SIDE, TILES * 4))


@triton.jit(do_not_specialize_on_alignment=["a_scale_inv", "b_scale_inv", "bias"])
def block_scaled_gemm_kernel(
    a_desc, b_desc, a_scales, b_scales, a_scale_inv, b_scale_inv, bias, out, M, N, steps,
    A: tl.constexpr, B: tl.constexpr, DTYPE: tl.constexpr,
    SIDE: tl.constexpr, BYTES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write one tile of D = alpha a b^T + bias, alpha 1 without scale_inv, in float32 until rounded."""
    row, column = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    for k in tl.range(steps, num_stages=STAGES):
        a, b = a_desc.load([row, k * BYTES]), b_desc.load([column, k * BYTES])
        a_scale, b_scale = _scales(a_scales, row, k, SIDE, TILES), _scales(b_scales, column, k, SIDE, TILES)
        acc = tl.dot_scaled(a, a_scale, A, b.T, b_scale, B, acc)
    rows, columns = row + tl.arange(0, SIDE), column + tl.arange(0, SIDE)
    if a_scale_inv is not None:
        acc *= alpha_of(a_scale_inv, b_scale_inv)
    if bias is not None:
        acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(to, rounded(acc, DTYPE), (rows < M)[:, None] & (columns < N)[None, :])


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    a_dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """Compute D = alpha a b^T + bias of nonempty a (M, K) and b (N, K) in bf16 -> (M, N) out_dtype.

    Without scale_inv both are MXFP8's, a of a_dtype and b of E4M3; else NVFP4's, and alpha is block_formats.alpha.
    """
    m, n = len(a), len(b)
    formats = ("e2m1", "e2m1") if a_scale_inv is not None else (NAMES[a_dtype], "e4m3")
    _, per_byte, width, _ = packing.FORMATS[formats[0]]
    tiles = packing.BYTES * per_byte // (width * packing.BLOCKS)
    (a, a_scales), (b, b_scales) = (packing.packed(x, name) for x, name in zip((a, b), formats, strict=True))
    out = a.new_empty(m, n, dtype=out_dtype)
    of_data, of_scales = [SIDE, packing.BYTES], [1, SIDE // packing.ROWS, tiles, *a_scales.shape[3:]]
    with torch.cuda.device_of(a):
        block_scaled_gemm_kernel[triton.cdiv(m, SIDE), triton.cdiv(n, SIDE)](
            *(TensorDescriptor.from_tensor(x, of_data) for x in (a, b)),
            *(TensorDescriptor.from_tensor(x, of_scales) for x in (a_scales, b_scales)),
            *(a_scale_inv, b_scale_inv, None if bias is None else bias.contiguous(), out),
            *(m, n, a.shape[1] // packing.BYTES, *formats),
            DTYPE=FLOATS[out_dtype],
            SIDE=SIDE,
            BYTES=packing.BYTES,
            TILES=tiles,
            STAGES=STAGES,
            num_warps=4 if architecture.of_device(a.device).tensor_memory else 8,  # elsewhere D fills 128 registers
            num_stages=STAGES,
            enable_fp_fusion=False,
        )
    return out
