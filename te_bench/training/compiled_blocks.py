"""torch.compile of each transformer block by itself, which PyTorch calls regional compilation.

What stands around the blocks runs in eager mode, where transformers leaves a causal mask out. Under torch.compile of the
whole model it makes one, with torch 2.11 always, later if it is given an attention_mask. Then no flash kernel runs.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from te_bench.models.checkpointing import blocks_of

MODE = "compile-blocks"
ONE_PROCESS = "blocks are compiled one by one in a single process only; choose mode compile"
UNSEEN = "fused kernels compute these blocks, so that no block is called; choose mode compile or cudagraph"


def lacks(model: nn.Module) -> str | None:
    """Return why no block of the model could be compiled, or None."""
    if getattr(model, "as_it_is", False):
        return UNSEEN
    return None if blocks_of(model) else f"{type(model).__name__} has no nn.ModuleList of blocks; choose mode compile"


class CompiledBlocks:
    """A model's blocks by nn.Module.compile; blocks that are alike share their code. Raises ValueError without blocks.

    They are compiled only inside `used()`. Outside it the module is as it was: checks, evaluations and other steps of it
    run in the mode that they ask for. Checkpointed blocks are compiled with their checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        if reason := lacks(model):
            raise ValueError(f"mode {MODE}: {reason}")
        self._compiled = {}
        for block in blocks_of(model):
            before = block._compiled_call_impl
            block.compile(dynamic=False)
            self._compiled[block] = block._compiled_call_impl
            block._compiled_call_impl = before

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Enclose a forward pass, and its backward pass: that may call blocks again."""
        before = {block: block._compiled_call_impl for block in self._compiled}
        for block, call in self._compiled.items():
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block, call in before.items():
                block._compiled_call_impl = call
