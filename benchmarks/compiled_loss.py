"""Whether torch.compile's GPT computes its loss: three calls of one step, as Inductor writes them and with a barrier more.

    python benchmarks/compiled_loss.py [--model gpt2-large] [--layers 4] [--batch 12] [--time]

Half a minute on an NVIDIA GPU; --time: then the whole model's step with the barrier, checked and timed as `te-bench run
speed` does it, up to five minutes more. A kernel that loops over rows of more than 1024 columns may store a row and load it
again in its next loop; where other threads load what these stored, a barrier must lie between, which torch 2.11's Inductor
leaves out. Then the loss is another in every call. Source: PyTorch's issue 190517 and pull request 190519.
"""

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from te_bench.experiments import suite_trials
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Options
from te_bench.experiments.workloads import train_step
from te_bench.models.zoo.gpt import CONFIGS, GPT
from te_bench.training.data import Batches
from te_bench.training.step import Optim, TrainStep


@contextlib.contextmanager
def barriers() -> Iterator[None]:
    """Inductor's kernels wait before a loop loads what another one has stored; nothing compiled earlier is taken."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    usual = TritonKernel.load

    def load(self: Any, name: str, index: Any) -> Any:
        if self.inside_reduction and not self.persistent_reduction and name in self.cse.invalidated_stores:
            self.loads.writeline("tl.debug_barrier()")
        return usual(self, name, index)

    TritonKernel.load = load  # type: ignore[method-assign]
    try:
        with config.patch(force_disable_caches=True):
            yield
    finally:
        TritonKernel.load = usual  # type: ignore[method-assign]


def padded(vocab: int) -> int:
    """To a multiple of 64, as the suites' configurations."""
    return -(-vocab // 64) * 64


def losses(model: str, layers: int, batch: int, device: str, mode: str) -> list[float]:
    """Of three calls of the same step, with the same weights and tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = dataclasses.replace(CONFIGS[model], n_layer=layers)
    attention = "cudnn" if device == "cuda" else "math"
    gpt = GPT(config, attention=attention, padded_vocab_size=padded(config.vocab_size)).to(device)
    step = TrainStep(gpt, Optim(), precision="bf16", mode=mode)
    tokens = Batches(None, block=config.block_size, batch=batch, vocab=config.vocab_size, seed=0).at(0)
    return [step.gradients(*(t.to(device) for t in tokens))[0] for _ in range(3)]


def timed(model: str, batch: int, device: str) -> float:
    """Median ms of a compiled step with barriers, once it has passed the suite's check."""
    torch._dynamo.reset()
    config = CONFIGS[model]
    problem = {"model": model, "batch": batch, "block": config.block_size}
    attention, mode = ("cudnn", "compile-reduce-overhead") if device == "cuda" else ("math", "compile")
    trial = suite_trials.step(Options(device=device), problem, attention, "bf16", mode, 0)
    vocabulary = {"vocab": config.vocab_size, "padded_vocab": padded(config.vocab_size)}
    trial = dataclasses.replace(trial, problem={**trial.problem, **vocabulary})
    with barriers():
        found = train_step.run(trial, Context())
    return 1e3 * statistics.median(found.samples["latency_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-large", choices=CONFIGS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--time", action="store_true", help="time the whole model's step, too")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = asked.model, asked.layers, asked.batch, device
    eager = losses(*given, "eager")

    def told(found: list[float]) -> str:
        return ", ".join(f"{loss - eager[0]:+.6f}" for loss in found)

    print(f"eager: {told(eager)} of {eager[0]:.6f}", flush=True)
    print(f"compile: {told(losses(*given, 'compile'))}", flush=True)
    with barriers():
        print(f"compile, with barriers: {told(losses(*given, 'compile'))}", flush=True)
    if asked.time:
        print(f"{asked.model}, {asked.batch} sequences: {timed(asked.model, asked.batch, device):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
