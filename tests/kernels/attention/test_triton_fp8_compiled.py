"""FP8 attention in Triton as it compiles for Hopper: FP8 products, no spills, no byte that changes its thread."""

from collections.abc import Callable
from pathlib import Path

import compiled
import pytest
import torch
import triton
from compiled import faults

from te_bench.kernels.attention import fp8_quantize
from te_bench.kernels.attention.fp8_quantize import E4M3, Heads
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward

BF16 = torch.bfloat16
Call = Callable[[], object]


def attend(head_dim: int, *, causal: bool = True, groups: int = 4, length: int = 1024) -> Call:
    def call() -> None:
        q = torch.empty(2, 4, length, head_dim, dtype=BF16)
        k = torch.empty(2, groups, length, head_dim, dtype=BF16)
        for keep in (True, False):
            fp8_quantize.quantize(q, k, k, keep=keep)
        q8, k8 = heads(q), heads(k)
        out, lse = torch.empty(2, length, 4, head_dim, dtype=BF16).transpose(1, 2), torch.empty(2, 4, length)
        fp8_forward.forward(out, lse, (q8, k8, k8), length, causal, 0.125)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
        fp8_backward.backward(gradients, q, q, k, out, lse, (q8, k8, k8), causal, 0.125)

    return call


def heads(x: torch.Tensor) -> Heads:
    wide, padded = fp8_quantize.width(x.shape[3]), fp8_quantize.padded(x.shape[2])
    data = torch.empty(*x.shape[:2], padded, wide, dtype=E4M3)
    return Heads(data, data.view(*x.shape[:2], padded // 128, wide, 128), torch.empty(*x.shape[:2]))


#: Parts of tiles come on top of whole ones, and shared heads on top of an own one's loop.
CALLS: dict[str, Call] = {
    "64, full, 1000 rows": attend(64, causal=False, length=1000),
    "64, 1000 rows, shared heads": attend(64, length=1000, groups=1),
    "80": attend(80),
    "128": attend(128),
    "128, many keys, shared heads and parts of tiles": attend(128, length=5000, groups=1),
    "128, full, 1000 rows": attend(128, causal=False, length=1000),
    "128, one row": attend(128, length=1),
}


def one_row_compiled_in() -> None:
    """The cast as it was: of T = 1 as a constant ptxas makes nonsense."""
    kernel = fp8_quantize.fp8_attention_cast_kernel
    fp8_quantize.fp8_attention_cast_kernel = triton.jit(kernel.fn)
    try:
        fp8_quantize.quantize(*[torch.empty(2, 4, 1, 128, dtype=BF16)] * 3, keep=False)
    finally:
        fp8_quantize.fp8_attention_cast_kernel = kernel


CALLS["one row, compiled in"] = one_row_compiled_in


@pytest.mark.slow
def test_it_compiles_without_faults(folder: Path) -> None:
    *kernels, _, broken = compiled.compiled(__name__, tuple(CALLS), folder)
    print(*kernels, sep="\n")  # pytest -s: the table
    assert len(kernels) == 9 * (len(CALLS) - 1)
    assert any("packed with what is none" in fault for fault in faults(broken)), "the gate sees the wrong bytes"
    found = []
    for kernel in kernels:
        # Of the forward pass the operand's layout is another one's name: the shuffles say whether bytes move.
        wrong = [x for x in faults(kernel) if "changes its thread" not in x or "forward" not in kernel.kernel]
        found += [f"{kernel}\n  {fault}" for fault in wrong]
    assert not found, "\n".join(found)
    for kernel in kernels:
        loops = 1 if kernel.call.endswith("full") else 2
        if "forward" in kernel.kernel:
            assert kernel.count("QGMMA")
            assert not kernel.count("HGMMA")
            # Four for each of a thread's two rows' maxima, a loop, and of their sums: none is of weights.
            assert kernel.count(r"\bSHFL") == 8 * loops, str(kernel)
        if "rows" in kernel.kernel or "keys" in kernel.kernel:
            assert kernel.count("QGMMA"), "S and dP are products of FP8"
            assert kernel.count("HGMMA"), "the others are not"
            assert not kernel.count(r"\bSHFL"), str(kernel)
