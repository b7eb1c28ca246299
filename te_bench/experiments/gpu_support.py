"""Say which of te-bench's operators run on a GPU, by which backends, and why others do not. Needs no GPU.

"measured": results/ or the table of measured times have its times on that GPU. "runs": the tests run it there. "compiles,
never run": te-bench's own kernel, which the tests compile for such a GPU. "should run": nothing that it needs is missing,
and nobody has tried. "emulated", "missing" and "no" are followed by the reason.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from te_bench.kernels import (
    activation,
    adamw,
    attention,
    gemm,
    linear_cross_entropy,
    measured,
    norm,
    quantize,
    rotary,
)
from te_bench.kernels.architecture import ARCHITECTURES, Capability, Gpu
from te_bench.kernels.gemm import block_scaled, half
from te_bench.kernels.gemm import table as gemm_table
from te_bench.kernels.quantize import ROW, SQUARE, STRIP, TENSOR, Block, Layout
from te_bench.models import recipe

#: GPT-2's sizes, and the heads of larger models, about which every backend is asked.
TOKENS, WIDTH, INNER, VOCAB, PADDED = 12288, 768, 3072, 50257, 50304
HEAD_DIMS = (64, 128)
MEASURED, TESTED, COMPILES, UNTRIED = "measured", "runs", "compiles, never run", "should run"
EMULATED, MISSING, NO = "emulated: ", "missing: ", "no: "
#: Backends of te-bench's own kernels.
OWN = ("triton", "triton_fp8", "gluon", "chunked", "fp8", block_scaled.NAME)

#: GPUs on which all GPU tests have run, except those of NEW, {operator: backends}.
TESTED_ON = ("NVIDIA H200",)
NEW: dict[str, tuple[str, ...]] = {"linear cross-entropy": ("liger",)}
#: {GPU: {operator: backends}}: other GPUs, on which the tests of these backends have run.
TESTED_IN_PART = {
    "NVIDIA H100 80GB HBM3": {
        "attention": ("flash", "flex", "manual", "math", "mem_efficient", "triton", "triton_fp8"),
        "FP8 recipe": ("float8_block_scaling", "float8_current_scaling_dpa", "rowwise_scaling"),
        "rotary": ("triton",),
        "gemm": ("scaled_mm",),  # te-bench's FP8 steps use it there
    },
}

#: {GPU: {operator: backends}} of the records in results/. Those of measured.json are read from it.
PUBLISHED = {
    "NVIDIA H100 80GB HBM3": {
        "attention": ("cudnn", "gluon"),
        "FP8 recipe": ("delayed_scaling", "float8_current_scaling"),
        "linear cross-entropy": ("chunked", "fp8", "reference"),
        **dict.fromkeys(("quantize", "norm", "activation", "AdamW"), ("triton",)),
    },
    "NVIDIA H200": {
        "attention": (
            "cudnn", "flash", "flex", "gluon", "manual", "math", "mem_efficient", "triton", "triton_fp8",
        ),
        "FP8 recipe": (
            "delayed_scaling", "delayed_scaling_e4m3", "float8_block_scaling", "float8_current_scaling",
            "float8_current_scaling_dpa", "float8_current_scaling_e4m3", "rowwise_scaling",
        ),
        "linear cross-entropy": ("chunked", "fp8", "reference"),
        **dict.fromkeys(("quantize", "norm", "activation", "AdamW"), ("triton",)),
    },
}  # fmt: skip

RECIPE = "FP8 recipe"
Answer = str
Row = tuple[str, str, Answer]  # operator and problem, backend, answer


def rows(machine: str, capability: Capability, users_own: bool = True) -> list[Row]:
    """Return every operator's backends on a GPU with this NVML name and compute capability; capability None: on a CPU.

    users_own: also count the user's own measured times.
    """
    timed = _timed(machine, measured.timings if users_own else functools.partial(measured.read, measured.SHIPPED))
    published = PUBLISHED.get(machine, {})
    described = ARCHITECTURES.get(capability) if capability else None

    def known(operator: str, asked: str, name: str) -> Answer:
        if (operator, asked, name) in timed or name in published.get(operator, ()):
            return MEASURED
        in_part = TESTED_IN_PART.get(machine, {}).get(operator, ())
        on_all = machine in TESTED_ON and name not in NEW.get(operator, ())
        if capability is None or on_all or name in in_part:
            return TESTED
        own = name in OWN or (operator == RECIPE and recipe.load(name).block_formats)
        return COMPILES if own and described is not None and described.compiled else UNTRIED

    return [
        (f"{operator}{asked}", name, refusal or known(operator, asked, name))
        for operator, asked, name, refusal in _questions(capability)
    ]


def _timed(machine: str, timings: Callable[[str], Iterable[measured.Timing]]) -> set[tuple[str, str, str]]:
    """Return (operator, problem in words, backend) for every row of the machine in tables of measured times."""
    described: dict[str, Callable[[Any], str]] = {
        "attention": _attention, "gemm": lambda problem: _gemm(problem.dtype, problem.scales)
    }  # fmt: skip
    return {
        (operator, describe(row.problem), name)
        for operator, describe in described.items()
        for row in timings(operator)
        if row.machine == machine
        for name in row.seconds
    }


def _attention(problem: Any) -> str:
    return f", {problem.dtype}, heads of {problem.head_dim}"


def _gemm(dtype: str, scales: str | None) -> str:
    return f", FP8 by {scales}" if scales else f", {dtype}"


def _questions(capability: Capability) -> Iterator[tuple[str, str, str, Answer | None]]:
    """Yield (operator, problem in words, backend, refusal or None)."""
    device = "cpu" if capability is None else "cuda"
    for operator, asked, family, problem in _problems({"device": device, "capability": capability}):
        for name in family.names():
            yield operator, asked, name, _refusal(family.load(name).unsupported(problem))
    yield "gemm", _gemm("bf16", None), gemm_table.TORCH, None
    yield "gemm", _gemm("bf16", None), gemm_table.GLUON, _refusal(half.unsupported(INNER, WIDTH, device, capability))
    for form in ("MXFP8", "NVFP4"):
        yield "gemm", f", {form}", block_scaled.NAME, _refusal(block_scaled.unsupported(device, capability))
    for name in recipe.names():
        yield RECIPE, "", name, _emulation(recipe.load(name), device, capability)


def _refusal(why: str | None) -> Answer | None:
    if why is None:
        return None
    return (MISSING if why.startswith("pip install") else NO) + why


def _emulation(asked: recipe.Recipe, device: str, capability: Capability) -> Answer | None:
    """Return the answer for a recipe whose FP8 GEMMs use no tensor cores; None if they do."""
    why = asked.unsupported(device, capability)
    if why is None and device == "cuda" and asked.by_half_gemms(device, capability):
        return f"{EMULATED}the same numbers, by bf16 GEMMs"
    if why is None:
        return f"{EMULATED}the same numbers, slowly" if device == "cpu" else None
    emulated = dataclasses.replace(asked, emulate=True).unsupported(device, capability) is None
    return (EMULATED if emulated else NO) + why


def _problems(machine: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (operator, problem in words, its package, the problem)."""
    bf16: dict[str, Any] = {"dtype": "bf16", **machine}
    sizes: dict[str, Any] = {"batch": 12, "heads": 12, "length": 1024, "causal": True, "dropout": 0.0}
    for head_dim in HEAD_DIMS:
        asked = attention.Problem(**sizes, **bf16, head_dim=head_dim)
        yield "attention", _attention(asked), attention, asked
    for scales, a, b in (("tensor", TENSOR, TENSOR), ("row", ROW, ROW), ("block", STRIP, SQUARE)):
        problem = gemm.Problem(m=TOKENS, n=INNER, k=WIDTH, a=_e4m3(a), b=_e4m3(b), **machine)
        yield "gemm", _gemm("e4m3", scales), gemm, problem
    yield "quantize", " to FP8", quantize, quantize.Problem(**machine)
    for fp8 in (False, True):
        more = " into FP8" if fp8 else ", bf16"
        for kind in norm.KINDS:
            yield "norm", f": {kind}{more}", norm, norm.Problem(n=WIDTH, kind=kind, quantized=fp8, **bf16)
        yield "activation", more, activation, activation.Problem(quantized=fp8, **machine)
    yield "rotary", ", bf16", rotary, rotary.Problem(**bf16)
    yield "AdamW", "", adamw, adamw.Problem(fp8=False, **machine)
    yield "AdamW", " with FP8 copies", adamw, adamw.Problem(fp8=True, **machine)
    head = linear_cross_entropy.Problem(d=WIDTH, vocab=VOCAB, padded=PADDED, **bf16)
    yield "linear cross-entropy", "", linear_cross_entropy, head


def _e4m3(block: Block) -> Layout:
    return Layout(torch.float8_e4m3fn, block, torch.float32)


def describe(gpu: Gpu) -> dict[str, str]:
    """Return a GPU's row of the table of GPUs in words."""
    return {
        "name": gpu.machine,
        "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "processors": str(gpu.processors),
        "shared memory of a program": f"{gpu.shared_memory >> 10} KiB",
        "L2": f"{gpu.l2 >> 20} MiB",
        "memory bandwidth": f"{gpu.bandwidth / 1e9:,.0f} GB/s",
        "FP8": "yes" if gpu.fp8 else "no",
        "TMA": "yes" if gpu.tma else "no",
    }


def sections(machine: str, capability: Capability) -> dict[str, dict[str, Answer]]:
    """Return `rows` as doctor prints them: {operator and problem: {backend: answer}}."""
    found: dict[str, dict[str, Answer]] = {}
    for operator, name, answer in rows(machine, capability):
        found.setdefault(operator, {})[name] = answer
    return found
