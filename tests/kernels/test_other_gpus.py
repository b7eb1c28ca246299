"""Every Triton kernel that `te-bench doctor` says a GPU runs, as its launcher compiles it for that GPU, without one.

For each architecture that the table calls compiled, but Hopper, which test_compiled.py and its neighbours hold to more.
A kernel compiles, its shared memory is what a program may have there, no loop spills, and FP8 products are made of FP8.
Nothing here has run.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import compiled
import pytest
import test_compiled
import torch
from attention import test_triton_fp8_compiled
from compiled import Compiled, spilled_in_loops
from test_compiled import E4M3, E5M2, UP, WGRAD, matrix, one

import te_bench
from te_bench.experiments import gpu_support
from te_bench.kernels import architecture
from te_bench.kernels.architecture import ARCHITECTURES, HOPPER
from te_bench.kernels.gemm import BLOCK_SCALED_KERNEL, block_scaled
from te_bench.kernels.norm.backends.triton import LARGEST_N

Call = Callable[[], object]

#: {name: GPU}, one for each architecture, the oldest first.
BY_AGE = sorted(architecture.GPUS.items(), key=lambda item: item[1].capability)
GPUS = {
    name: architecture.GPUS[name]
    for capability, name in {gpu.capability: name for name, gpu in BY_AGE}.items()
    if ARCHITECTURES[capability].compiled and capability != HOPPER
}
FP8_ATTENTION, BLOCK_SCALED = "FP8 attention", "block-scaled gemm"
LARGEST = f"layernorm of {LARGEST_N}, backward"  # the norm with the most shared memory, and it spills (LARGEST_N)
#: What test_compiled has no need of, for Hopper's tiles are others.
MORE: dict[str, dict[str, Call]] = {
    "attention": {
        "16": test_compiled.attend(16),
        "32, dropout": test_compiled.attend(32, dropout=0.1),
        "64, shared heads": test_compiled.attend(64, groups=1),
        "256, dropout": test_compiled.attend(256, dropout=0.1),
    },
    FP8_ATTENTION: {"32": test_triton_fp8_compiled.attend(32)},
    "gemm": {"up by blocks in float32": test_compiled.product(UP, ("block", "tile"), out_dtype=torch.float32)},
    "norm": {LARGEST: test_compiled.normed(LARGEST_N, "layernorm")[LARGEST]},
}


def block_scaled_product(shape: tuple[int, int, int], form: torch.dtype | None, columns: bool = False) -> Call:
    """form: of MXFP8's a; None is NVFP4. columns: of operands stored along M and N, without a bias."""

    def call() -> None:
        m, n, k = shape
        a, b = (matrix(k, rows).t() if columns else matrix(rows, k) for rows in (m, n))
        alpha = one(torch.float64) if form is None else None
        bias = None if columns else torch.empty(n)
        block_scaled.multiply(a, b, alpha, alpha, torch.bfloat16, bias, form or E4M3)

    return call


#: Each packs its operands as well.
BLOCK_SCALED_CALLS = {
    "mxfp8, up": block_scaled_product(UP, E4M3),
    "mxfp8, wgrad of E5M2": block_scaled_product(WGRAD, E5M2, columns=True),
    "nvfp4, up": block_scaled_product(UP, None),
    "nvfp4, wgrad": block_scaled_product(WGRAD, None, columns=True),
}
FP8_CALLS = {name: call for name, call in test_triton_fp8_compiled.CALLS.items() if "compiled in" not in name}
FAMILIES = {
    family: calls | MORE.get(family, {})
    for family, calls in (test_compiled.FAMILIES | {FP8_ATTENTION: FP8_CALLS, BLOCK_SCALED: BLOCK_SCALED_CALLS}).items()
    if family not in ("gemm, in Gluon", "halves")
}

#: Tiles that go by the GPU, or fill its shared memory: on each.
FITTED = (f"{FP8_ATTENTION}/128", "gemm/up by rows", "gemm/up by blocks", "attention/256", f"norm/{LARGEST}")
FITTED += tuple(f"{BLOCK_SCALED}/{name}" for name in BLOCK_SCALED_CALLS)
#: One call of each other kernel, on the oldest GPU that runs it.
QUICK = (
    *("norm/rmsnorm of 4096", "norm/768 in a stream, with biases, backward", "rotary/128, backward", "adamw/step"),
    *("activation/swiglu", "activation/swiglu, backward", "gate/a planted slow-down"),
    *("quantize/mxfp8", "quantize/nvfp4, gradient", "quantize/nvfp4, product"),
    *(f"linear cross-entropy/{name}" for name in ("loss and gradient", "count", "mean", "scaled", "tied", "embedded")),
)
QUICK_IN_FP8 = (
    *(
        f"quantize/{name}"
        for name in ("scaled, a gradient", "tensor", "pair", "joined", "turned", "row", "block", "tile")
    ),
    *("quantize/history", "norm/layernorm of 768 in FP8", "norm/rmsnorm of 4096 in FP8", "activation/swiglu in FP8"),
    *("activation/swiglu, backward in FP8", "activation/swiglu, backward in FP8, and again", "adamw/bf16, E4M3"),
    "linear cross-entropy/FP8",
)


def promised(gpu: str, family: str, name: str) -> bool:
    """Whether doctor says that the GPU runs it."""
    fp8 = any(word in name for word in ("FP8", "E4M3", "E5M2"))
    if "packed" in name and family == "quantize":
        family = BLOCK_SCALED
    operator, backend = {
        "attention": ("attention, bf16, heads of 128", "triton"),
        FP8_ATTENTION: ("attention, bf16, heads of 128", "triton_fp8"),
        "gemm": (f"gemm, FP8 by {'block' if 'block' in name else 'row'}", "triton"),
        BLOCK_SCALED: (f"gemm, {name[:5].upper()}", "block_scaled"),
        "quantize": ("FP8 recipe", "nvfp4_block_scaling")
        if name[:5] in ("mxfp8", "nvfp4")
        else ("quantize to FP8", "triton"),
        "norm": (f"norm: layernorm{' into FP8' if fp8 else ', bf16'}", "triton"),
        "activation": (f"activation{' into FP8' if fp8 else ', bf16'}", "triton"),
        "rotary": ("rotary, bf16", "triton"),
        "adamw": ("AdamW with FP8 copies" if fp8 else "AdamW", "triton"),
        "linear cross-entropy": ("linear cross-entropy", "fp8" if fp8 else "chunked"),
        "gate": ("linear cross-entropy", "chunked"),
    }[family]
    return not answers(gpu)[operator, backend].startswith("no: ")


@functools.cache
def answers(gpu: str) -> dict[tuple[str, str], str]:
    rows = gpu_support.rows(GPUS[gpu].machine, GPUS[gpu].capability)
    return {(operator, backend): answer for operator, backend, answer in rows}


def on(gpu: str, family: str, name: str) -> Call:
    """The call as on that GPU, of whose description launchers make constants; nothing where doctor refuses it."""
    known = GPUS[gpu]

    def there() -> None:
        architecture.of_device = lambda device: architecture.architecture(known.capability)  # type: ignore[assignment]
        architecture.processors = lambda device, interpreted=1: known.processors  # type: ignore[assignment]
        architecture.l2_bytes = lambda device: known.l2  # type: ignore[assignment]
        if promised(gpu, family, name):
            FAMILIES[family][name]()

    return there


CALLS = {
    f"{gpu}/{family}/{name}": on(gpu, family, name)
    for gpu in GPUS
    for family, calls in FAMILIES.items()
    for name in calls
}
CAPABILITIES = {name: 10 * major + minor for name in CALLS for major, minor in [GPUS[name.split("/")[0]].capability]}


#: What the products of a kernel's PTX are.
PRODUCTS = dict.fromkeys(("scaled_kernel", "fp8_attention_forward_kernel"), r"f32\.e[45]m[23]\.e4m3|kind::f8f6f4")


def faults(kernel: Compiled) -> list[str]:
    gpu = architecture.GPUS[kernel.call.split("/")[0]]
    found = []
    if kernel.shared > gpu.shared_memory:
        found.append(f"{kernel.shared} bytes shared > {gpu.shared_memory}")
    if kernel.spills and LARGEST not in kernel.call and (inside := spilled_in_loops(kernel)):
        found.append(f"{kernel.spills} bytes spilled, by {inside} instructions in loops")
    right = PRODUCTS.get(kernel.kernel)
    if kernel.kernel == BLOCK_SCALED_KERNEL:
        right = rf"kind::{'mxf4nvf4' if 'nvfp4' in kernel.call else 'mxf8f6f4'}\.block_scale"
    if right is not None:
        products = set(re.findall(r"\b(?:mma\.sync|tcgen05\.mma)\S+", kernel.ptx))
        wrong = sorted(x for x in products if not re.search(right, x))
        found += [f"a product of another format: {product}" for product in wrong] + ["no products"] * (not products)
    return found


def check(kernels: list[Compiled]) -> None:
    print(*kernels, sep="\n")  # pytest -s: the table
    found = [f"{kernel}\n  {fault}" for kernel in kernels for fault in faults(kernel)]
    assert not found, "\n".join(found)


def triton_kernels() -> set[str]:
    """The names of all there are, but for those that go with Gluon's."""
    folder = Path(te_bench.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py") if "hopper" not in path.parts]
    jitted = r"^ *@triton\.jit.*\n *def (\w+_kernel)\("
    return {name for source in sources for name in re.findall(jitted, source, re.MULTILINE)}


def test_each_architecture_that_is_called_compiled_has_a_gpu() -> None:
    called = {capability for capability, described in ARCHITECTURES.items() if described.compiled}
    assert called == {gpu.capability for gpu in GPUS.values()} | {HOPPER}


@pytest.mark.slow
@pytest.mark.xdist_group("compiled-other-gpus")
def test_the_most_demanding_tiles_compile_for_other_gpus(folder: Path) -> None:
    oldest, with_fp8 = next(iter(GPUS)), next(name for name, gpu in GPUS.items() if gpu.fp8)
    chosen = [f"{gpu}/{name}" for gpu in GPUS for name in FITTED]
    chosen += [f"{oldest}/{name}" for name in QUICK] + [f"{with_fp8}/{name}" for name in QUICK_IN_FP8]
    kernels = compiled.compiled(__name__, tuple(chosen), folder)
    check(kernels)
    assert {kernel.kernel for kernel in kernels} == triton_kernels()
    assert {kernel.call.split("/")[0] for kernel in kernels} == GPUS.keys()


@pytest.mark.other_gpus
@pytest.mark.parametrize("gpu", GPUS)
def test_all_kernels_compile_for_other_gpus(gpu: str, folder: Path) -> None:
    kernels = compiled.compiled(__name__, tuple(name for name in CALLS if name.startswith(f"{gpu}/")), folder)
    check(kernels)
    seen = {kernel.call.split("/")[1] for kernel in kernels}
    refused = {FP8_ATTENTION: not GPUS[gpu].fp8, "gemm": not GPUS[gpu].tma}
    refused[BLOCK_SCALED] = architecture.lacks_block_scales(GPUS[gpu].capability) is not None
    assert FAMILIES.keys() - seen == {family for family, without in refused.items() if without}, "what doctor refuses"


MADE = {"registers": 255, "warps": 8, "warnings": (), "ttgir": "", "capability": 120}


def test_the_gate_finds_what_does_not_fit() -> None:
    made = {**MADE, "kernel": "k", "ptx": ""}
    large = Compiled(call="RTX 5090/gemm/up", shared=100 * 1024, spills=0, sass="", **made)
    assert faults(large) == [f"{100 * 1024} bytes shared > {99 * 1024}"]
    sass = "\n".join(
        f"        /*{16 * at:04x}*/   {line} ;"
        for at, line in enumerate(("STL [R1], R2", "LDL R2, [R1]", "BRA 0x10", "EXIT"))
    )
    spilt = Compiled(call="A100/gemm/up", shared=0, spills=8, sass=sass, **made)
    assert faults(spilt) == ["8 bytes spilled, by 1 instructions in loops"]
    outside = sass.replace("BRA 0x10", "BRA 0x20")
    assert faults(Compiled(call="A100/gemm/up", shared=0, spills=8, sass=outside, **made)) == []


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {", []),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4 [", []),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {",
            ["a product of another format: mma.sync.aligned.m16n8k16"],
        ),
        ("fma.rn.f32", ["no products"]),
    ],
)
def test_the_gate_finds_products_that_are_not_of_fp8(ptx: str, found: list[str]) -> None:
    kernel = Compiled(**MADE, call="RTX 5090/gemm/up", kernel="scaled_kernel", ptx=ptx, shared=0, spills=0, sass="")
    assert len(faults(kernel)) == len(found)
    assert all(fault.startswith(start) for fault, start in zip(faults(kernel), found, strict=True))


def test_the_gate_finds_block_scaled_products_of_another_format() -> None:
    ptx = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X ["
    for call, text, right in (("mxfp8, up", ptx, True), ("nvfp4, up", ptx, False), ("mxfp8, up", ptx[:44], False)):
        made = {**MADE, "kernel": block_scaled.block_scaled_gemm_kernel.__name__, "shared": 0, "spills": 0, "sass": ""}
        assert (faults(Compiled(call=f"B200/{BLOCK_SCALED}/{call}", ptx=text, **made)) == []) == right
