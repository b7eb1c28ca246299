"""Find what this machine can run, and why it cannot run the rest. Imports torch on demand, if installed."""

import functools
import importlib.util
import shutil
from typing import Any

from te_bench.experiments import environment
from te_bench.experiments.problems import AttentionProblem
from te_bench.experiments.spec import MODES, PRECISIONS

#: GPT-2's head size, about which every backend is asked.
HEADS, LENGTH, HEAD_DIM = 12, 1024, 64
ATTENTION = AttentionProblem(batch=1, heads=HEADS, length=LENGTH, head_dim=HEAD_DIM, causal=True)
VOCAB = 50257

#: Other projects' layers: {file in models/layer: (package, recipe to ask about)}.
LAYERS = {
    "torchao_rowwise": ("torchao", "rowwise_scaling"),
    "torchao_tensorwise": ("torchao", "float8_current_scaling"),
    "transformer_engine": ("transformer_engine", "delayed_scaling"),
}


def examine() -> dict[str, dict[str, str]]:
    """Return {section: {name: answer}}; an answer is "ok", a value, or the reason for a refusal."""
    gpus = environment.nvidia_gpus()
    mig = environment.names_mig()
    device = "cpu" if mig else environment.default_device()
    found = environment.capture(device, environment.visible_gpus()[:1] if device == "cuda" else ())
    known = {key: value for key, value in found["identity"].items() if key not in environment.OF_GPUS}
    machine = {key: str(value) for key, value in known.items() if value is not None}
    for gpu in gpus:
        machine[f"gpu {gpu['index']}"] = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, driver {gpu['driver']}"
    if why := mig or (environment.no_cuda() if gpus else None):
        machine["gpu use"] = why
    answer: dict[str, dict[str, str]] = {"machine": machine, "packages": _packages()}
    if importlib.util.find_spec("torch") is None:
        return {**answer, "training": {"everything": "needs the package torch: pip install torch"}}
    return {**answer, **_capabilities(device)}


def examine_gpu(name: str) -> dict[str, dict[str, str]]:
    """Return {section: {name: answer}} of a GPU that need not be present. Raise ValueError, with the list, if unknown."""
    from te_bench.experiments import gpu_support
    from te_bench.kernels import architecture

    gpu = architecture.find_gpu(name)
    return {"GPU": gpu_support.describe(gpu), **gpu_support.sections(gpu.machine, gpu.capability)}


def _packages() -> dict[str, str]:
    """Return the state of the packages that only some features need."""
    needed = {
        "datasets": "hf: data sets",
        "tokenizers": "bpe: and file: tokenisers",
        "triton": "torch.compile on a GPU",
    }
    rows = {name: "ok" if importlib.util.find_spec(name) else f"missing ({use})" for name, use in needed.items()}
    return {**rows, "C++ compiler": _compiler() or "missing (torch.compile on a CPU)"}


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _capabilities(device: str) -> dict[str, dict[str, str]]:
    import torch

    from te_bench.kernels import attention
    from te_bench.models import recipe

    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"  # this build of torch cannot use the GPU
    capability = torch.cuda.get_device_capability() if device == "cuda" else None

    def backend(name: str, dtype: str) -> str:
        return attention.load(name).unsupported(ATTENTION.posed(dtype, device, capability)) or "ok"

    def precision(name: str) -> str:
        if name == "fp16" and device == "cpu":
            return "needs a GPU"
        if name == "fp8":
            return "ok" if all(recipes[r].startswith("ok") for r in recipes) else "see the recipes"
        return "ok"

    def quantised(name: str) -> str:
        asked = recipe.load(name)
        emulated = device != "cuda" or asked.by_half_gemms(device, capability)
        runs = "ok (exact emulation: right, not fast)" if emulated else "ok"
        return asked.unsupported(device, capability) or runs

    recipes = {name: quantised(name) for name in recipe.names()}

    def mode(name: str) -> str:
        if device == "cuda":
            return "ok"
        if name in ("compile-reduce-overhead", "cudagraph"):
            return "CUDA graphs need an NVIDIA GPU"
        return "needs a C++ compiler (g++ or clang++)" if name.startswith("compile") and not _compiler() else "ok"

    return {
        f"attention ({device}, bf16)": {name: backend(name, "bf16") for name in attention.names()},
        f"attention ({device}, fp32)": {name: backend(name, "fp32") for name in attention.names()},
        "precisions": {name: precision(name) for name in PRECISIONS},
        "FP8 recipes": recipes,
        "rivals": rivals(device, capability),
        "modes": {name: mode(name) for name in MODES},
        **_operators(capability),
    }


def _operators(capability: tuple[int, int] | None) -> dict[str, dict[str, str]]:
    """Return what the present GPU runs, and what was measured on it; {} without a GPU."""
    import torch

    from te_bench.experiments import gpu_support

    return {} if capability is None else gpu_support.sections(torch.cuda.get_device_name(), capability)


def rivals(device: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """Return {package (its kind): answer} for other projects' code, asked for bf16, or FP8, on this machine."""
    from te_bench.kernels import attention, linear_cross_entropy, norm

    machine: dict[str, Any] = {"dtype": "bf16", "device": device, "capability": capability}
    # On a CPU two of them refuse before they look for their package. A Hopper GPU supports both, so that only the package
    # can be missing there.
    hopper: dict[str, Any] = {"dtype": "bf16", "device": "cuda", "capability": (9, 0)}
    head = functools.partial(linear_cross_entropy.Problem, d=HEADS * HEAD_DIM, vocab=VOCAB, padded=-(-VOCAB // 64) * 64)
    flash4, liger = attention.load("flash4"), linear_cross_entropy.load("liger")
    found = {
        "flash-attn-4 (attention)": flash4.unsupported(ATTENTION.posed(**hopper))
        or flash4.unsupported(ATTENTION.posed(**machine)),
        "liger-kernel (linear cross-entropy)": liger.unsupported(head(**hopper)) or liger.unsupported(head(**machine)),
    }
    for kind in norm.KINDS:
        asked = norm.Problem(n=HEADS * HEAD_DIM, kind=kind, quantized=False, **machine)
        found[f"liger-kernel ({kind})"] = norm.load("liger").unsupported(asked)
    for name, (package, recipe) in LAYERS.items():
        found[f"{package} (layer {name})"] = _layer(name, recipe, device)
    return {name: _answer(why) for name, why in found.items()}


def _layer(name: str, recipe: str, device: str) -> str | None:
    """Return why a rival that builds a whole layer cannot run, or None."""
    from te_bench.models import quickstart

    sizes: dict[str, Any] = {"hidden": HEADS * HEAD_DIM, "ffn": 4 * HEADS * HEAD_DIM, "heads": HEADS, "batch": 1}
    how: dict[str, Any] = {"dropout": 0.0, "mask": "causal", "attention": "flash", "precision": "fp8"}
    asked = quickstart.LayerConfig(**sizes, **how, sequence=LENGTH, device=device, recipe=recipe)
    return quickstart.load(name).unsupported(asked)


def _answer(why: str | None) -> str:
    """Return a uniform answer: "ok", "missing: pip install ...", or the reason."""
    if why is None:
        return "ok"
    _, install, package = why.partition("pip install")
    return f"missing: {install}{package}" if install else why
