"""What this machine can run, and why not what it can't. Imports torch, where there is one, when asked."""

import importlib.util
import shutil
from typing import Any

from te_bench.experiments import environment
from te_bench.experiments.spec import MODES, PRECISIONS

#: GPT-2's head size: the problem that every backend is asked about.
HEADS, LENGTH, HEAD_DIM = 12, 1024, 64


def examine() -> dict[str, dict[str, str]]:
    """{section: {name: answer}}; an answer is "ok", a value, or the reason why not."""
    gpus = environment.nvidia_gpus()
    device = environment.default_device()
    found = environment.capture(device, environment.visible_gpus()[:1] if device == "cuda" else ())
    machine = {key: str(value) for key, value in found["identity"].items() if value is not None}
    for gpu in gpus:
        machine[f"gpu {gpu['index']}"] = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, driver {gpu['driver']}"
    if gpus and (why := environment.no_cuda()):
        machine["gpu use"] = why
    answer: dict[str, dict[str, str]] = {"machine": machine, "packages": _packages()}
    if importlib.util.find_spec("torch") is None:
        return {**answer, "training": {"everything": "needs the package torch: pip install torch"}}
    return {**answer, **_capabilities(device)}


def _packages() -> dict[str, str]:
    """What is needed for some features only."""
    needed = {
        "datasets": "hf: data sets",
        "tokenizers": "bpe: and file: tokenisers",
        "triton": "torch.compile on a GPU",
        "torchao": "the layers torchao_*",
        "transformer_engine": "the layer transformer_engine",
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
        device = "cpu"  # a GPU that this build of torch can't use
    capability = torch.cuda.get_device_capability() if device == "cuda" else None

    def backend(name: str, dtype: str) -> str:
        problem: dict[str, Any] = {"batch": 1, "heads": HEADS, "length": LENGTH, "head_dim": HEAD_DIM, "causal": True}
        asked = attention.Problem(**problem, dtype=dtype, dropout=0.0, device=device, capability=capability)
        return attention.load(name).unsupported(asked) or "ok"

    def precision(name: str) -> str:
        if name == "fp16" and device == "cpu":
            return "needs a GPU"
        if name == "fp8":
            return "ok" if all(recipes[r].startswith("ok") for r in recipes) else "see the recipes"
        return "ok"

    def quantised(name: str) -> str:
        why = recipe.load(name).unsupported(device, capability)
        return why or ("ok" if device == "cuda" else "ok (exact emulation: right, not fast)")

    recipes = {name: quantised(name) for name in recipe.names()}

    def mode(name: str) -> str:
        if device == "cuda":
            return "ok"
        if name in ("compile-reduce-overhead", "cudagraph"):
            return "CUDA graphs need an NVIDIA GPU"
        return "needs a C++ compiler (g++ or clang++)" if name == "compile" and not _compiler() else "ok"

    return {
        f"attention ({device}, bf16)": {name: backend(name, "bf16") for name in attention.names()},
        f"attention ({device}, fp32)": {name: backend(name, "fp32") for name in attention.names()},
        "precisions": {name: precision(name) for name in PRECISIONS},
        "FP8 recipes": recipes,
        "modes": {name: mode(name) for name in MODES},
    }
