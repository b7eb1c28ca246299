"""Which parts of a step or a layer ran, and how often, by the names that a profiler saw.

A GPU's kernels tell parts by their names, from within a captured graph too; a CPU's operators tell them by theirs.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from te_bench import plugins
from te_bench.kernels import adamw, linear_cross_entropy
from te_bench.kernels.gemm import BLOCK_SCALED_KERNEL
from te_bench.models import rivals

#: Settings of a trial's problem that name a backend, and the package of backends.
FAMILIES: dict[str, Any] = {"head": linear_cross_entropy, "optimizer": adamw}

GEMMS = ("gemm_fp8", "gemm_half", "gemm_float")

#: Kernels that multiply matrices: cuBLAS's and cuBLASLt's (nvjet, xmma, CUTLASS and older GPUs'), and te_bench's.
GEMM = re.compile(r"nvjet|gemm|gemv|cutlass|xmma|^scaled_kernel$")
#: Others whose names have such words: attention, Inductor's fusions around a product, sums after a split K, and operators,
#: whose kernels are counted.
OTHER = re.compile(
    r"attention|flash|fmha|sdpa|splitKreduce|^triton_(poi|red|per)|^void at::native|^(aten|te_bench)::", re.IGNORECASE
)
#: nvjet's letters are the operands' types: q and r are E4M3 and E5M2, t is bfloat16, h is float16.
IN_FP8 = re.compile(rf"nvjet_(sm\d+_)?[qr]|e4m3|e5m2|^scaled_kernel$|^gluon_gemm_fp8_kernel$|^{BLOCK_SCALED_KERNEL}$")
IN_HALF = re.compile(r"nvjet_(sm\d+_)?[th]|bf16|bfloat|f16|fp16|h16|h884|half")

PRODUCT = re.compile(r"aten::(mm|addmm)\b")  # a CPU's operator
EMULATED = "te_bench::reference_gemm"
PRODUCT_FP8 = re.compile(r"te_bench::(\w+_gemm|scaled_mm)$|aten::_scaled_mm")
PRODUCT_HALF = "te_bench::block_formats_product"  # of operands cast to MXFP8 or NVFP4, by half-precision GEMMs
HALVES, FLOATS = ("c10::BFloat16", "c10::Half"), ("float", "double")

#: device -> the pattern of a part's kernels. Heads and optimizers say their own.
CASTS = {"cuda": r"^(mxfp8|nvfp4)_cast_kernel$", "cpu": r"^te_bench::(mxfp8|nvfp4)_cast$"}
FUSED = {"cuda": r"^_add_forward(_cast)?_kernel$", "cpu": r"^Segment$"}
#: Kernels that fused blocks launch beside; a compiler makes its own of what they do.
BESIDE = {"rotary": r"^rotary_kernel$", "rows": r"^_forward(_cast)?_kernel$"}
TORCH_ADAMW = {"cuda": r"FusedOptimizerTensorListMetadata", "cpu": r"^aten::_fused_adamw_$"}
COMPILED = r"^Torch-Compiled Region|^triton_(poi|red|per|tem)_"


def gemm_of(kernel: str) -> str | None:
    """Return one of GEMMS by the name of a GPU's kernel, or None for what multiplies no matrices."""
    if not GEMM.search(kernel) or OTHER.search(kernel):
        return None
    if IN_FP8.search(kernel):
        return "gemm_fp8"
    return "gemm_half" if IN_HALF.search(kernel) else "gemm_float"


def _product_of(operator: str, half: bool) -> str | None:
    """Return one of GEMMS by a CPU's operator. half: whether an untold dtype counts as half precision."""
    if PRODUCT_FP8.match(operator):
        return "gemm_fp8"
    if operator == PRODUCT_HALF:
        return "gemm_half"
    if not PRODUCT.match(operator):
        return None
    if operator.endswith(HALVES) or (half and not operator.endswith(FLOATS)):
        return "gemm_half"
    return "gemm_float"


def parts(counts: Mapping[str, int], device: str, *, half: bool = True) -> dict[str, int]:
    """Return {part: how often it ran} of a profiler's counts (Seen.counts); every part is there, 0 if nothing ran.

    half: whether a CPU's products are in half precision where no dtype says so.
    """
    gemm: Callable[[str], str | None] = gemm_of if device == "cuda" else lambda name: _product_of(name, half)
    patterns = {
        "block_format_casts": CASTS[device],
        "fused_blocks": FUSED[device],
        "optimizer_torch": TORCH_ADAMW[device],
        "compiled": COMPILED,
    }
    patterns |= kernels_of(device)
    if device == "cuda":
        patterns |= {"graphs": r"^cudaGraphLaunch", "host_launches": r"^cu(da)?LaunchKernel", **BESIDE}
        patterns |= kernels_of_rivals()
    found = Counter(dict.fromkeys((*GEMMS, *patterns), 0))
    for name, times in counts.items():
        if kind := gemm(name):
            found[kind] += times
        elif device == "cuda" and name == EMULATED:
            found["gemm_fp8"] += times
        for part, pattern in patterns.items():
            found[part] += times if re.search(pattern, name) else 0
    return dict(found)


@functools.cache
def kernels_of(device: str) -> dict[str, str]:
    """Return {"head_NAME" or "optimizer_NAME": the pattern of its kernels} of those that have names on the device."""
    found = {
        f"{family}_{name}": plugins.load(f"{of.__name__}.backends", name, "BACKEND").kernels
        for family, of in FAMILIES.items()
        for name in of.names()
    }
    return {part: kernels[device] for part, kernels in found.items() if device in kernels}


@functools.cache
def kernels_of_rivals() -> dict[str, str]:
    """Return {"rival_TITLE": the pattern of its kernels on a GPU} of rivals that have their own."""
    known = [rivals.load(name) for name in rivals.names()]
    return {f"rival_{rival.title}": rival.kernels for rival in known if rival.kernels is not None}
