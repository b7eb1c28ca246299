"""How near honest steps come to the limits of their check: the largest share of its limit, of each kind of quantity.

    python benchmarks/check_margins.py [--seeds 200] [--device cpu] [--model tiny] [--only fp8]

Each configuration is built anew from every seed, and its first step checked as a trial's is. On a CPU the tiny GPT: a second
a step and configuration. On a GPU GPT-2 124M of 4 x 1024 tokens, as the ladders run it: eager, compiled, captured, in fused
blocks with the FP8 head; some 5 s a step after its compilation. A step that fails is printed, and the script ends with 1.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from te_bench.experiments import trial_model
from te_bench.experiments.checks import training_step
from te_bench.experiments.measurement import CheckFailed, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import recipe as recipes

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"model": "tiny", "batch": 4, "block": 64, "vocab": 250, "padded_vocab": 256},
    "gpt2": {"model": "gpt2", "batch": 4, "block": 1024, "vocab": 50257, "padded_vocab": 50304},
}
KINDS = ("loss", "norm", "scale", "row", "ratio", "attention, scale", "attention, row")
FAST = {"head": "chunked", "blocks": "fused"}


def configurations(device: str, model: str) -> Iterator[tuple[str, Trial]]:
    """Name and trial of seed 0."""
    cuda = device == "cuda"
    optimizer = "triton" if cuda else "reference"

    def trial(
        precision: str, recipe: str | None = None, attention: str = "flash", mode: str = "eager", **more: Any
    ) -> Trial:
        problem = {**SIZES[model], **more}
        how: dict[str, Any] = {"precision": precision, "recipe": recipe, "attention": attention, "mode": mode}
        return Trial(workload="train_step", device=device, problem=problem, **how)

    yield "fp32", trial("fp32")
    yield "bf16", trial("bf16")
    yield "bf16 fused", trial("bf16", optimizer=optimizer, **FAST)
    if cuda:
        yield "fp16", trial("fp16")
        for attention in ("cudnn", "gluon", "triton", "auto"):
            yield f"bf16 {attention}", trial("bf16", attention=attention)
        yield "bf16 compile", trial("bf16", attention="cudnn", mode="compile")
        yield "bf16 fused cudagraph", trial("bf16", attention="gluon", mode="cudagraph", optimizer=optimizer, **FAST)
    for recipe in recipes.names():
        yield f"fp8 {recipe}", trial("fp8", recipe)
        fused = {**FAST, "head": "fp8", "optimizer": optimizer}
        yield f"fp8 {recipe} fused", trial("fp8", recipe, **fused)
        if cuda:
            yield f"fp8 {recipe} compile", trial("fp8", recipe, attention="cudnn", mode="compile")
            yield f"fp8 {recipe} fused cudagraph", trial("fp8", recipe, attention="gluon", mode="cudagraph", **fused)


def kind_of(name: str) -> str:
    """Which of KINDS a quantity is."""
    if name.startswith("layer "):
        return "attention, row" if name.endswith("row") else "attention, scale"
    if name == "loss" or "ratio" in name:
        return "loss" if name == "loss" else "ratio"
    return {"scale": "scale", "worst row": "row"}.get(name.rpartition(", ")[2], "norm")


def shares(trial: Trial) -> tuple[dict[str, float], str | None]:
    """The largest error / limit of each kind, and why the check failed, where it did."""
    reason = None
    torch._dynamo.reset()
    try:
        trial_model.require_supported(trial)
        check = training_step.check_step(trial, *train_step.random_batches(trial)[0], trial_model.step_of(trial))
    except CheckFailed as failed:
        reason, check = str(failed), failed.measurement.check
    found: dict[str, float] = {}
    for q in check["quantities"]:
        if q["limit"] or q["error"]:
            share = float("inf") if q["error"] is None else q["error"] / (q["limit"] or 1e-30)
            found[kind_of(q["name"])] = max(share, found.get(kind_of(q["name"]), 0.0))
    return found, reason


def margins(trials: Iterator[Trial]) -> tuple[dict[str, float], list[str]]:
    """Of many trials, the largest shares and all failures."""
    worst: dict[str, float] = {}
    reasons: list[str] = []
    for trial in trials:
        found, reason = shares(trial)
        worst = {kind: max(found.get(kind, 0.0), worst.get(kind, 0.0)) for kind in KINDS}
        reasons += [] if reason is None else [f"seed {trial.seed}: {reason}"]
    return worst, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="tiny, or gpt2 (on a GPU)")
    parser.add_argument("--seeds", type=int, default=0, help="200 on a CPU, 3 on a GPU")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="configurations whose name begins so")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    model, count = args.model or ("gpt2" if cuda else "tiny"), args.seeds or (3 if cuda else 200)
    print(
        f"{f'{model}, {count} seeds':40}" + "".join(f"{kind:>18}" for kind in KINDS) + f"{'s a step':>10}", flush=True
    )
    failed = 0
    for name, trial in configurations(args.device, model):
        if not name.startswith(args.only):
            continue
        began = time.perf_counter()
        try:
            worst, reasons = margins(dataclasses.replace(trial, seed=args.first + i) for i in range(count))
        except Unsupported as reason:
            print(f"{name:40} unsupported: {reason}", flush=True)
            continue
        each = (time.perf_counter() - began) / count
        print(f"{name:40}" + "".join(f"{worst[kind]:18.3f}" for kind in KINDS) + f"{each:10.1f}", flush=True)
        print("".join(f"    {reason}\n" for reason in reasons), end="", flush=True)
        failed += len(reasons)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
