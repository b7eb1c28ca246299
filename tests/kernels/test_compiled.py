"""Every Triton kernel, as its launcher compiles it for an H200, without one: no spills, no serialised tensor cores, no trap.

The shapes are GPT-2 124M's at 12 x 1024 tokens, and 4096 for a large model's rows. What a launch's constants and
alignments do not depend on is tried once.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiled
import pytest
import torch
import triton
import triton.language as tl
from compiled import Compiled, faults
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.gate import planted_faults
from te_bench.kernels import architecture
from te_bench.kernels.activation import kernels as activation
from te_bench.kernels.activation import recomputed
from te_bench.kernels.adamw import Parameter
from te_bench.kernels.adamw.backends import triton as adamw
from te_bench.kernels.attention.portable import backward as attention_backward
from te_bench.kernels.attention.portable import forward as attention
from te_bench.kernels.gemm import Backend, block_formats, half
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.backends import triton as gemm
from te_bench.kernels.gemm.operands import BLOCKS
from te_bench.kernels.gemm.portable import tiles
from te_bench.kernels.linear_cross_entropy import kernels as cross_entropy
from te_bench.kernels.linear_cross_entropy import tied
from te_bench.kernels.norm import kernels as norm
from te_bench.kernels.norm import residual_backward
from te_bench.kernels.norm import residual_forward as residual
from te_bench.kernels.quantize import Layout, Operand, block_kernels, fine_kernels, history, joined, packing, turn
from te_bench.kernels.quantize import kernels as quantizers
from te_bench.kernels.rotary import Rotated
from te_bench.kernels.rotary import kernels as rotary

M, D, F, V = 12288, 768, 3072, 50304
E4M3, E5M2, BF16, FP32, FP64 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64
BOTH = (True, True)
PROCESSORS = 132
ELEMENTS = 128 * 64 // 256  # a thread of the tile that turns logits into FP8

Call = Callable[[], object]


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype)  # its pages are never touched


def one(dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones((), dtype=dtype)


def on_an_h200(call: Call) -> Call:
    """The call with the H200's number of processors, of which launchers make constants."""

    def there() -> None:
        architecture.processors = lambda device, interpreted=1: PROCESSORS  # type: ignore[assignment]
        call()

    return there


# GEMMs


def operands(shape: tuple[int, int, int], pair: tuple[str, str], formats: tuple[torch.dtype, ...]) -> list[Operand]:
    *heights, k = shape
    layouts = [Layout(dtype, BLOCKS[kind], FP32) for dtype, kind in zip(formats, pair, strict=True)]
    each = zip(heights, layouts, strict=True)
    return [Operand(matrix(rows, k, of.format), torch.empty(of.scale_shape(rows, k)), of) for rows, of in each]


def product(
    shape: tuple[int, int, int], pair: tuple[str, str] = ("tensor", "tensor"),
    formats: tuple[torch.dtype, ...] = (E4M3, E4M3),
    fast_accum: bool = True, out_dtype: torch.dtype = BF16, backend: Backend = gemm.BACKEND,
) -> Call:  # fmt: skip
    """With a bias."""
    options = {"out_dtype": out_dtype, "fast_accum": fast_accum, "bias": torch.empty(shape[1])}
    return lambda: backend.forward(*operands(shape, pair, formats), **options)


UP, DOWN, WGRAD = (M, F, D), (M, D, F), (F, D, M)
ROWS = ("row", "row")

GEMM: dict[str, Call] = {
    "up": product(UP),
    "up by rows": product(UP, ROWS),
    "up in float32": product(UP, out_dtype=FP32),
    "down": product(DOWN),
    "dgrad, promoted": product(UP, formats=(E5M2, E4M3), fast_accum=False),
    "wgrad": product(WGRAD, formats=(E5M2, E4M3)),
    "up by rows, promoted": product(UP, ROWS, fast_accum=False),
    "up by blocks, tiles": product(UP, ("block", "tile")),
    "up by blocks": product(UP, ("block", "block")),
    "up by tiles, blocks": product(UP, ("tile", "block")),
}
#: What another one has besides is not tried alone: of rows' scales the epilogue (promoted).
IN_GLUON: dict[str, Call] = {
    "up": product(UP, backend=gluon.BACKEND),
    "up in float32": product(UP, out_dtype=FP32, backend=gluon.BACKEND),
    "dgrad, promoted": product(UP, formats=(E5M2, E4M3), fast_accum=False, backend=gluon.BACKEND),
    "wgrad": product(WGRAD, formats=(E5M2, E4M3), backend=gluon.BACKEND),
    "up by rows, promoted": product(UP, ROWS, fast_accum=False, backend=gluon.BACKEND),
}

# Casts, norms, activations, the optimizer, the loss


def of_tensor(scale: Tensor | None, dtype: torch.dtype, x: Tensor, layouts: tuple[bool, bool], *rest: Any) -> Call:
    return lambda: quantizers.per_tensor(x, scale, dtype, *layouts, False, *rest)


QUANTIZE: dict[str, Call] = {
    "scaled": of_tensor(one(), E4M3, matrix(M, D), BOTH, one(), None, None),
    "scaled, a gradient": of_tensor(one(), E5M2, matrix(M, F), BOTH, one(), torch.zeros(3).long(), torch.zeros(F)),
    "scaled, float32": of_tensor(one(), E4M3, matrix(M, D, FP32), BOTH, one(), None, torch.zeros(D)),
    "scaled, float32 via bf16": of_tensor(one(), E5M2, matrix(M, D, FP32), BOTH, one(), None, torch.zeros(D), BF16),
    "tensor": of_tensor(None, E4M3, matrix(M, F), BOTH, None, None, None),
    "pair": lambda: quantizers.pair(matrix(M, D), one(), one(), matrix(F, D), one(), one(), E4M3, *BOTH),
    "joined": lambda: joined.kernel([matrix(M, D) for _ in range(3)], D, one(), E5M2, one(), None),
    "joined by heads, with sums": lambda: joined.kernel(
        [matrix(M, 4096) for _ in range(3)], 128, one(), E5M2, one(), torch.zeros(3 * 4096)
    ),
    "turned": lambda: turn.turn_by_kernel(matrix(F, D).to(E4M3)),
    "row": lambda: fine_kernels.per_row(matrix(M, F), E4M3, *BOTH, False, None),
    "block": lambda: fine_kernels.per_block(matrix(M, F), E4M3, 1, *BOTH, True, None),
    "tile": lambda: fine_kernels.per_block(matrix(M, F), E4M3, 128, *BOTH, True, None),
    "mxfp8": lambda: block_kernels.mxfp8(matrix(M, F), E4M3, 1, *BOTH),
    "mxfp8, weight": lambda: block_kernels.mxfp8(matrix(F, D), E4M3, 32, *BOTH),
    "nvfp4": lambda: block_kernels.nvfp4(matrix(M, F), 1, *BOTH, True, None),
    "nvfp4, gradient": lambda: block_kernels.nvfp4(matrix(M, F), 1, *BOTH, True, one(torch.int64)),
    "nvfp4, product": lambda: block_formats.finish(matrix(M, F, FP32), one(FP64), one(FP64), BF16, matrix(1, F)[0]),
    "nvfp4, weight": lambda: block_kernels.nvfp4(matrix(F, D, FP32), 16, *BOTH, False, None),
    "mxfp8, packed": lambda: packing.packed(matrix(M, F).t(), "e4m3"),
    "nvfp4, packed": lambda: packing.packed(matrix(M, F).t(), "e2m1"),
    "history": lambda: history.launch([(torch.zeros(16, 48), *torch.ones(3, 48))], 0, "max"),
}


def normed(n: int, kind: str) -> dict[str, Call]:
    x, weight, rows = matrix(M, n), torch.empty(n), torch.empty(M)
    bias, mean = (torch.empty(n), rows) if kind == "layernorm" else (None, None)
    options = one(), E4M3, *BOTH, one(), None
    return {
        f"{kind} of {n}": lambda: norm.forward(x, weight, bias, 1e-5, False, kind),
        f"{kind} of {n} in FP8": lambda: residual.add_forward(x, None, weight, bias, 1e-5, False, kind, BF16, *options),
        f"{kind} of {n}, backward": lambda: norm.backward(x, x, weight, mean, rows, False, x),
    }


def in_a_stream(n: int, biased: bool) -> dict[str, Call]:
    """Of a float32 stream, as under autocast."""
    x, branch, weight, rows = matrix(M, n, FP32), matrix(M, n), torch.empty(n), torch.empty(M)
    bias, column_sum = (torch.empty(n), torch.zeros(n)) if biased else (None, None)
    forward = x, branch, weight, bias, 1e-5, False, "layernorm", BF16
    backward = branch, x, weight, rows, rows, False, x, biased, BF16, None, column_sum
    name = f"{n} in a stream" + ", with biases" * biased
    return {
        name: lambda: residual.add_forward(*forward, None, None, False, False, None, None),
        f"{name}, in FP8": lambda: residual.add_forward(*forward, one(), E4M3, *BOTH, one(), None),
        f"{name}, backward": lambda: residual_backward.backward_rounded(*backward),
        f"{name}, backward of what was not kept": lambda: residual_backward.backward_rounded(*backward, branch),
    }


NORM = normed(D, "layernorm") | normed(4096, "rmsnorm")
NORM["layernorm of a sum of 4096 in bf16, in FP8"] = lambda: residual.add_forward(
    *(matrix(M, 4096), matrix(M, 4096), torch.empty(4096), torch.empty(4096), 1e-5, False, "layernorm", BF16),
    *(one(), E4M3, *BOTH, one(), None),
)
NORM |= in_a_stream(D, True) | in_a_stream(4096, False)  # of a short row, biases and their sums come on top


def activated(kind: str) -> dict[str, Call]:
    gated = activation.KINDS[kind][1]
    x, dy = matrix(M, F * 2 if gated else F), matrix(M, F)
    cast, column_sum = (one(), E4M3, *BOTH, one(), None), torch.zeros(x.shape[1])
    looks = {"amax": one(), "counts": None, "column_sum": column_sum}
    return {
        kind: lambda: activation.forward(x, kind),
        f"{kind} in FP8": lambda: activation.forward_quantized(x, kind, *cast),
        f"{kind}, backward": lambda: activation.backward(dy, x, kind),
        f"{kind}, backward, and again": lambda: activation.backward(dy, x, kind, torch.empty_like(dy)),
        f"{kind}, backward in FP8": lambda: activation.backward_quantized(dy, x, kind, *cast, column_sum),
        f"{kind}, backward in FP8, and again": lambda: recomputed.kernel(
            dy, x, kind, one(), E5M2, one(), E4M3, **looks
        ),
    }


ACTIVATION = activated("gelu") | activated("gelu_erf") | activated("swiglu")


def step(bf16: bool, target: torch.dtype | None, weights: torch.dtype = FP32, moments: torch.dtype = FP32) -> Call:
    """With copies; and the norm, where there are none."""

    def call() -> None:
        more = {"bf16": matrix(F, D)} if bf16 else {}
        if target is not None:
            more |= {"data": matrix(F, D, target), "data_t": matrix(D, F, target)}
            more |= {name: one() for name in ("scale", "scale_inv", "amax")}
        state = {"weight": matrix(F, D, weights), "grad": matrix(F, D, weights)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = matrix(F, D, torch.uint8 if (name, moments) == ("exp_avg_sq", E4M3) else moments)
            more |= {f"{name}_scale": torch.empty(F * D // 64)} if moments is E4M3 else {}
        seed = None if (weights, moments) == (FP32, FP32) else one(torch.int64)
        table = adamw.table([Parameter(**state, **more)])
        adamw.step(table, rate=one(), step=one(), betas=(0.9, 0.95), eps=1e-8, multiplier=one(), seed=seed)
        if not more:
            adamw.norm(table, 1.0)

    return call


def losses(gradient: bool) -> None:
    n = 2048
    factor = torch.empty(()) if gradient else None
    cross_entropy.rows(matrix(n, V), torch.empty(n, dtype=torch.int64), torch.empty(n), 50257, factor)


def losses_in_fp8() -> None:
    n = 2048
    made = matrix(n, V, E5M2), matrix(V, M, E5M2)
    cross_entropy.fp8_rows(matrix(n, V), torch.empty(n, dtype=torch.int64), torch.empty(n), 50257, *made, 0)


def in_place(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, one(), x


def attend(
    head_dim: int, left: int = -1, mask: tuple[int, int, int] | None = None, dropout: float = 0.0, groups: int = 4,
    length: int = 1024,
) -> Call:  # fmt: skip
    """Forward and backward, causal; mask: its sizes but for the keys'."""

    def call() -> None:
        q = torch.empty(2, 4, length, head_dim, dtype=BF16)
        k = v = torch.empty(2, groups, length, head_dim, dtype=BF16)
        hidden = None if mask is None else torch.empty(*mask, length, dtype=torch.uint8).expand(2, 4, length, length)
        extent = attention.Extent(left, 0, hidden)
        seed = torch.zeros(2, dtype=torch.int64) if dropout else None
        out, lse = attention.forward(q, k, v, extent, 0.125, dropout, seed)
        attention_backward.backward(attention_backward.Attended(q, k, v, out, lse, seed), out, extent, 0.125, dropout)

    return call


def attend_packed(head_dim: int, left: int = -1, groups: int = 4) -> Call:
    """Causal, of sequences one after the other."""

    def call() -> None:
        q = torch.empty(1, 4, 4096, head_dim, dtype=BF16)
        k = v = torch.empty(1, groups, 4096, head_dim, dtype=BF16)
        starts = torch.zeros(5, dtype=torch.int32)
        packed, extent = attention.Packed(starts, starts, 1024, 1024), attention.Extent(left, 0, None)
        out, lse = attention.forward(q, k, v, extent, 0.125, 0.0, None, packed=packed)
        attention_backward.backward(
            attention_backward.Attended(q, k, v, out, lse, None), out, extent, 0.125, 0.0, packed
        )

    return call


#: What comes on top of another is tried with it, where both fit; padding alone is any mask with strides of 0.
ATTENTION: dict[str, Call] = {
    "64": attend(64),
    "64, 1000 rows, window": attend(64, left=256, length=1000),
    "64, any mask": attend(64, mask=(2, 4, 1024)),
    "64, dropout": attend(64, dropout=0.1),
    "64, packed": attend_packed(64),
    "64, packed, window, shared heads": attend_packed(64, 256, 1),
    "128": attend(128),
    "128, packed, shared heads": attend_packed(128, groups=1),
    "128, window, dropout": attend(128, left=256, dropout=0.1),
    "128, shared heads": attend(128, groups=1),
    "256": attend(256),
}


def turned(
    head_dim: int, *, backward: bool = False, interleaved: bool = False, groups: int = 1, rest: int = 0,
    dtype: torch.dtype = BF16, tables: bool = False,
) -> Call:  # fmt: skip
    """q and k in place of a projection of 4 x 2048 tokens, or gradients of q, k and v into one of it; 16 heads."""

    def call() -> None:
        mixed = torch.empty(2048, 4, groups, 16 // groups + 2, head_dim, dtype=dtype)
        angles = torch.empty(2048, (head_dim - rest) * (2 if tables else 1))
        parts = [*mixed.split((16 // groups, 1, 1), 3)]
        apart = [torch.empty(p.shape, dtype=dtype) for p in parts] if backward else parts
        sources = zip(apart, parts, (angles, angles, None), strict=True)
        rotary.rotate([Rotated(*given) for given in sources][: 3 if backward else 2], interleaved, backward, tables)

    return call


def turned_far_apart() -> None:
    """A gradient (B, H, T, D) of 2^31 elements and more."""
    mixed = torch.empty(2**31 + 2**24, dtype=BF16).view(1, 129, 2**17, 128).permute(2, 0, 1, 3)[:, :, None]
    rotary.rotate([Rotated(mixed, mixed, torch.empty(2**17, 128))], False, True)


ROTARY: dict[str, Call] = {
    "64": turned(64),
    "64, backward": turned(64, backward=True),
    "128": turned(128),
    "128, backward": turned(128, backward=True),
    "128, tables": turned(128, tables=True),
    "128, interleaved": turned(128, interleaved=True),
    "128, interleaved, backward": turned(128, backward=True, interleaved=True),
    "128, a quarter, backward, shared heads": turned(128, backward=True, groups=4, rest=96),
    "256, float32": turned(256, dtype=FP32),
    "128, backward, far apart": turned_far_apart,
}

IN_AN_MLP = ("gelu", "gelu_erf", "silu")

FAMILIES: dict[str, dict[str, Call]] = {
    "attention": ATTENTION,
    "gemm": GEMM,
    "gemm, in Gluon": IN_GLUON,
    "halves": {
        "product, biased": lambda: half.product(matrix(M, D), matrix(F, D), matrix(1, F)[0], None),
        **{kind: lambda f=kind: half.activated(matrix(M, D), matrix(F, D), None, f) for kind in IN_AN_MLP},
        **{
            f"{kind}, slope": lambda f=kind: half.gradient(matrix(M, D), matrix(D, F), matrix(M, F), f)
            for kind in IN_AN_MLP
        },
    },
    "quantize": QUANTIZE,
    "norm": NORM,
    "activation": ACTIVATION,
    "rotary": ROTARY,
    "gate": {"a planted slow-down": lambda: planted_faults.spin(1e-5)},
    "adamw": {
        "step": step(False, None), "bf16": step(True, None), "E5M2": step(False, E5M2), "bf16, E4M3": step(True, E4M3),
        "half": step(False, None, BF16, BF16), "half, E4M3": step(False, E4M3, BF16, BF16),
        "half, states in FP8": step(False, None, BF16, E4M3), "half, E4M3, states in FP8": step(False, E4M3, BF16, E4M3),
        "bf16, states in bf16": step(True, None, FP32, BF16), "bf16, states in FP8": step(True, E4M3, FP32, E4M3),
    },
    "linear cross-entropy": {
        "loss": lambda: losses(False), "loss and gradient": lambda: losses(True), "FP8": losses_in_fp8,
        "count": lambda: cross_entropy.count(torch.zeros(M).long()),
        "mean": lambda: cross_entropy.mean(torch.empty(M), torch.empty(3, 4)),
        "scaled": lambda: cross_entropy.scale(matrix(M, D, FP32), one(), matrix(M, D)),
        "scaled in place": lambda: cross_entropy.scale(*in_place(matrix(V, D, FP32))),
        "scaled in place, bf16": lambda: cross_entropy.scale(*in_place(matrix(V, D))),
        "scaled in place, almost 2^31": lambda: cross_entropy.scale(*in_place(matrix(2**20 - 1, 2**11))),
        "tied": lambda: tied.add_rows_by_kernel(matrix(V, D, FP32), matrix(M, D, FP32), torch.zeros(M).long()),
        "embedded": lambda: tied.embed_by_kernel(matrix(V, D, FP32), matrix(1024, D, FP32), torch.zeros(12, 1024).long()),
    },
}  # fmt: skip

# What the gate must find


@triton.jit
def spoilt_kernel(a_desc, b_desc, d_desc, K, IMPRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product whose partial sums leave the tensor core's registers in the middle of a block of K."""
    acc = tl.zeros((128, 256), dtype=tl.float32)
    for k in range(0, K, 128):
        acc = tl.dot(a_desc.load([0, k]), b_desc.load([0, k]).T, acc, max_num_imprecise_acc=IMPRECISE)
    d_desc.store([0, 0], acc.to(tl.bfloat16))


@triton.jit
def pointer_kernel(a, b, d, K):  # type: ignore[no-untyped-def]
    """bf16 by pointers: neither TMA nor FP8."""
    rows, columns, along = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
    acc = tl.zeros((128, 128), dtype=tl.float32)
    for k in range(0, K, 64):
        x = tl.load(a + rows[:, None] * K + k + along[None, :])
        acc = tl.dot(x, tl.load(b + columns[:, None] * K + k + along[None, :]).T, acc)
    tl.store(d + rows[:, None] * 128 + columns[None, :], acc.to(tl.bfloat16))


@triton.jit
def exchanging_kernel(x, y):  # type: ignore[no-untyped-def]
    """The trap: float32 read along one way, its FP8 written along the other."""
    rows, columns = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    v = tl.load(x + rows * 128 + columns)
    tl.store(y + columns * 128 + rows, v.to(tl.float8e4nv))


def with_tile(changed: tiles.Tile, call: Call) -> Call:
    def there() -> None:
        usual, gemm.tile = gemm.tile, lambda *_, **__: changed
        call()
        gemm.tile = usual

    return there


def serialised() -> None:
    a, b, d = matrix(128, 512, E4M3), matrix(256, 512, E4M3), matrix(128, 256)
    descriptors = [TensorDescriptor.from_tensor(x, shape) for x, shape in ((a, [128, 128]), (b, [256, 128]))]
    spoilt_kernel[(1,)](*descriptors, TensorDescriptor.from_tensor(d, [128, 256]), 512, IMPRECISE=32, num_warps=8)


BROKEN: dict[str, Call] = {
    "two accumulators": with_tile(tiles.LARGE, product(UP, fast_accum=False)),
    "five stages": with_tile(tiles.LARGE._replace(stages=5), product(UP)),
    "partial sums of 32": serialised,
    "pointers": lambda: pointer_kernel[(1,)](matrix(128, 512), matrix(128, 512), matrix(128, 128), 512),
    "exchange": lambda: exchanging_kernel[(1,)](matrix(128, 128, FP32), matrix(128, 128, E4M3)),
}

CALLS = {f"{family}/{name}": on_an_h200(call) for family, calls in FAMILIES.items() for name, call in calls.items()}
CALLS |= {f"broken/{name}": on_an_h200(call) for name, call in BROKEN.items()}


#: GEMMs of E5M2 gradients with E4M3; the others are of E4M3 alone.
MIXED = {f"{family}/{name}" for family in ("gemm", "gemm, in Gluon") for name in ("dgrad, promoted", "wgrad")}


def made(family: str, folder: Path) -> list[Compiled]:
    """The family's kernels, by the child process that compiles all of them."""
    return [
        kernel for kernel in compiled.compiled(__name__, tuple(CALLS), folder) if kernel.call.split("/")[0] == family
    ]


def missing(kernel: Compiled) -> list[str]:
    """What a GEMM must have, of FP8 tensor cores and TMA, and has not."""
    formats = "E5M2.E4M3" if kernel.call in MIXED else "E4M3.E4M3"
    wanted = {
        "FP8 tensor cores": rf"\bQGMMA\.\w+\.F32\.{formats}",
        "TMA loads": r"\bUTMALDG",
        "TMA out": r"\bUTMASTG",
    }
    found = [name for name, instruction in wanted.items() if not kernel.count(instruction)]
    for instruction in (rf"wgmma\.mma_async[\w.]*f32\.{formats.lower()}", r"cp\.async\.bulk\.tensor"):
        found += [] if re.search(instruction, kernel.ptx) else [instruction]
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("family", FAMILIES)
def test_published_kernels_compile_for_hopper_without_faults(family: str, folder: Path) -> None:
    kernels = made(family, folder)
    print(*kernels, sep="\n")  # pytest -s: the table
    assert {kernel.call for kernel in kernels} == {name for name in CALLS if name.startswith(f"{family}/")}
    found = [(kernel, fault) for kernel in kernels for fault in faults(kernel)]
    if family.startswith("gemm"):
        found += [(kernel, f"no {lack}") for kernel in kernels for lack in missing(kernel)]
    assert not found, "\n".join(f"{kernel}\n  {fault}" for kernel, fault in found)
    if family == "attention":
        check_attention(kernels)
    if family == "halves":
        for kernel in kernels:
            check_halves(kernel)
    if family == "quantize":
        check_quantizers(kernels)
    if family == "activation":
        for kernel in kernels:
            if kernel.kernel.endswith("_cast_kernel"):
                check_casts(kernel)
    if family == "rotary":
        for kernel in kernels:
            check_rotary(kernel)
    if family == "gate":
        check_spin(*kernels)
    if family == "adamw":
        for kernel in kernels:
            check_adamw(kernel)
    if family == "linear cross-entropy":
        check_row_kernels({kernel.kernel: kernel for kernel in kernels if not kernel.call.endswith("/loss")})
        check_bits(kernels)


def check_halves(kernel: Compiled) -> None:
    """bf16 tensor cores, TMA in and out, and an epilogue that is short beside 12 blocks of K."""
    assert kernel.count(r"\bHGMMA\.64x128x16\.F32\.BF16"), str(kernel)
    for instruction in (r"\bUTMALDG", r"\bUTMASTG"):
        assert kernel.count(instruction), f"{kernel}: no {instruction}"
    # Both warpgroups' code: a tensor core takes 6144 cycles for a tile of 12 blocks, in which a scheduler issues as much.
    issued = len(re.findall(r"^\s+/\*[0-9a-f]+\*/\s", kernel.sass, re.M)) / 2
    assert issued < 4000, f"{kernel}: {issued} instructions"


def check_attention(kernels: list[Compiled]) -> None:
    """On tensor cores; GPT-2's with several programs a processor."""
    programs = {"attention_forward_kernel": 4, "attention_backward_rows_kernel": 3, "attention_backward_keys_kernel": 2}
    for kernel in kernels:
        if kernel.call.endswith("256") and "backward" in kernel.kernel:
            continue
        assert kernel.count(r"\bHGMMA"), str(kernel)
        if kernel.call == "attention/64":
            assert kernel.programs >= programs[kernel.kernel], str(kernel)


def check_quantizers(kernels: list[Compiled]) -> None:
    """Each element cast once for both layouts, or once for each; bytes out by 8 or 16, transposed by twos; 24 warps."""
    casts = {
        "_cast_kernel": 1,
        "_joined_kernel": 1,
        "_pair_kernel": 1,
        "_tile_kernel": 1,
        "_line_cast_kernel": 2,
        "_block_kernel": 2,
    }
    fewer_warps = {"quantize/scaled, a gradient": 12, "quantize/block": 16}  # faster so (H200, 2026-11-21)
    for kernel in kernels:
        if kernel.kernel not in casts:
            continue
        elements = 128 * (128 if kernel.kernel in ("_tile_kernel", "_block_kernel") else 64) // (32 * kernel.warps)
        conversions = re.findall(r"cvt\.[\w.]*e[45]m[23]x2[\w.]*", kernel.ptx)
        assert len(conversions) == casts[kernel.kernel] * elements // 2, str(kernel)
        assert all("satfinite" in conversion for conversion in conversions), "what is too large is not clamped before"
        assert re.search(r"(ld|st)matrix", kernel.ptx), f"{kernel}: the transpose goes byte by byte"
        assert not re.findall(r"st\.global[\w.]*b(?:8|16)\b", kernel.ptx), f"{kernel}: bytes leave one by one"
        assert kernel.programs * kernel.warps >= fewer_warps.get(kernel.call, 24), str(kernel)
        check_casts(kernel)


def check_casts(kernel: Compiled) -> None:
    """FP8 leaves its conversion by fours: ptxas 12.8 mixes up bytes that it sees both together and alone."""
    results = re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+([^,]+),", kernel.ptx)
    assert results, f"{kernel}: no cast"
    assert set(results) <= {"low", "high"}, f"{kernel}: {set(results)}"


def check_rotary(kernel: Compiled) -> None:
    """16 bytes at a time; a cosine and a sine for each of a thread's angles, once; 12 warps."""
    accesses = re.findall(r"\b(?:ld|st)\.global[\w.]*", kernel.ptx)
    narrow = [access for access in accesses if "v4.b32" not in access]
    assert len(accesses) >= 10, str(kernel)
    few = kernel.call.endswith("shared heads")  # angles: a thread has 2 pairs of them, for 16 bytes of others
    assert len(narrow) <= 2 * few, f"{kernel}: {narrow}"
    assert kernel.programs * kernel.warps >= 12, str(kernel)
    angles = 0 if kernel.call.endswith("tables") else 8 if few else 16
    assert len(re.findall(r"\bcvt\.rzi\.s32\.f32", kernel.ptx)) == angles, "which quarter of the circle"


def check_spin(kernel: Compiled) -> None:
    """The wall clock is read before the loop and in it, and a branch leads back there."""
    assert re.search(r"%globaltimer.*\n(\$L\w+):.*%globaltimer.*bra\s+\1;", kernel.ptx, re.S), kernel.ptx


def check_adamw(kernel: Compiled) -> None:
    """Three programs of 8 warps; 16-byte accesses; no float32 or FP8 tile transposed."""
    programs = {"numbers_kernel": 1, "step_kernel": 3, "squares_kernel": 8, "norm_kernel": 4}
    assert kernel.programs >= programs[kernel.kernel], str(kernel)
    if kernel.kernel != "step_kernel":
        return
    if "half" in kernel.call or "states" in kernel.call:
        # Weight, gradient (once in each of its dtypes) and moments of bf16 are a load each; random bits need no exchange.
        assert len(re.findall(r"ld\.global[\w.:]*\.v4", kernel.ptx)) >= (4 if "FP8" in kernel.call else 6), str(kernel)
        moved = re.findall(r"(?:convert_layout|tt\.trans) .*: tensor<(\w+)x(\w+), ", kernel.ttgir)
        assert {dtype for size, dtype in moved if "x" in size} <= {"bf16", "i1", "f32"}, f"{kernel}: {moved}"
        return
    each = adamw.TILE["ROWS"] * adamw.TILE["COLUMNS"] // (32 * kernel.warps * 4)  # 16-byte accesses a thread and tensor
    loads = len(re.findall(r"ld\.global[\w.:]*\.v4", kernel.ptx))
    assert loads == 4 * each + each // 2, str(kernel)  # or a bf16 gradient's
    assert len(re.findall(r"st\.global[\w.:]*\.v4", kernel.ptx)) >= 3 * each, str(kernel)
    wide = re.findall(r"tt\.load .*32x64x!tt\.ptr<f32>, (#\w+)>", kernel.ttgir)
    assert len(wide) == 4, str(kernel)
    assert len(set(wide)) == 1, f"{kernel}: {wide}"
    assert re.search(re.escape(wide[0]) + r" = .*sizePerThread = \[1, 4\]", kernel.ttgir), "float32 apiece"
    # The trap: a float32 or an FP8 tile must not change its owner.
    moved = re.findall(r"(?:convert_layout|tt\.trans) .*: tensor<\w+x(\w+), ", kernel.ttgir)
    assert set(moved) <= {"bf16", "i1"}, f"{kernel}: {moved}"
    assert ("tt.trans" in kernel.ttgir) == ("E" in kernel.call), str(kernel)
    assert "fma.rn.f32" in kernel.ptx, str(kernel)
    assert "mul.rn.f32" in kernel.ptx, str(kernel)


def check_row_kernels(by_name: dict[str, Compiled]) -> None:
    """Three quarters of a processor's threads, but for FP8's tile; 16-byte accesses: whole blocks and the last apart."""
    wide = {"rows_kernel": (8, 4), "statistics_kernel": (4, 0), "fp8_kernel": (4, 4)}
    for name, (loads, stores) in wide.items():
        kernel = by_name[name]
        assert len(re.findall(r"ld\.global[\w.]*v4", kernel.ptx)) == loads, str(kernel)
        assert len(re.findall(r"st\.global[\w.]*v4", kernel.ptx)) == stores, str(kernel)
        assert kernel.programs * kernel.warps >= (32 if name == "fp8_kernel" else 48), str(kernel)
        assert "ex2.approx.f32" not in kernel.ptx, f"{name}: an exp2 with denormals is four instructions for one"
    fp8 = by_name["fp8_kernel"].ptx
    assert "stmatrix" in fp8, "the transpose goes through shared memory byte by byte"
    assert not re.findall(r"st\.global[\w.]*b(8|16)\b", fp8), "bytes leave one by one"
    assert fp8.count("cvt.rn.satfinite.e5m2x2") == ELEMENTS // 2, "each element is cast once, two at a time"
    # Of a token's rows a thread adds its own columns: as many loads as rows and no exchange of sums.
    rows = by_name["add_rows_kernel"]
    assert len(re.findall(r"ld\.global[\w.]*v4", rows.ptx)) == tied.ROWS + 1, str(rows)
    assert rows.programs * rows.warps >= 48, str(rows)
    assert rows.shared <= 64, str(rows)
    embed = by_name["embed_kernel"]
    assert len(re.findall(r"(ld|st)\.global[\w.]*v4", embed.ptx)) == 3 * tied.LOOKUP["ROWS"] // 2, str(embed)
    assert embed.programs * embed.warps >= 48, str(embed)


def check_bits(kernels: list[Compiled]) -> None:
    """A step beyond almost 2^31 elements is counted by 64 bits, others by 32; rows of both tables are found by 64."""
    for kernel in (kernel for kernel in kernels if kernel.kernel == "scale_kernel"):
        bits = re.findall(r"scf\.for .* : (i\d+)", kernel.ttgir)
        assert bits == ["i64" if kernel.call.endswith("almost 2^31") else "i32"], f"{kernel}: {bits}"
    (embed,) = (kernel for kernel in kernels if kernel.kernel == "embed_kernel")
    assert re.findall(r"tt\.addptr .* tensor<\d+x1x(i\d+)", embed.ttgir) == ["i64"] * 3, str(embed)


@pytest.mark.slow
@pytest.mark.xdist_group("compiled")
def test_the_gate_finds_what_is_broken(folder: Path) -> None:
    """Tiles that are not published, and kernels that nobody should write."""
    found = {kernel.call.split("/")[1]: " ".join(faults(kernel) + missing(kernel)) for kernel in made("broken", folder)}
    expected = {
        "two accumulators": "bytes spilled",
        "five stages": "bytes shared >",
        "partial sums of 32": "C751",
        "pointers": "FP8 tensor cores TMA loads TMA out",
        "exchange": "FP8 that changes its thread",
    }
    assert {name: words for name, words in expected.items() if words not in found[name]} == {}, found
