"""Answer planning's questions on a user's model: `python -m te_bench.models.probe`, question on stdin, JSON on stdout.

An empty line before the JSON says that the model was built.

The model has tensors with shapes and no memory, if possible; no GPU is visible.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from te_bench.models import adopted, calling, checkpointing
from te_bench.models.sources import TOO_LARGE, TRIED, Facts, Refused, Source, lacks, on_one_line

SDPA = F.scaled_dot_product_attention


class Attended(TorchFunctionMode):
    """Count calls of scaled_dot_product_attention, and the scores of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.scores = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SDPA:
            q, k = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
            self.calls += 1
            self.scores += q.shape[-3] * q.shape[-2] * k.shape[-2]
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        with mock.patch.object(F, "scaled_dot_product_attention", self._seen):  # no mode sees calls inside it
            return func(*args, **(kwargs or {}))

    def _seen(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(SDPA, (), args, kwargs)


def find_out(source: Source, tokens: int, built: Callable[[], object] = lambda: None) -> Facts:
    """Return the facts of a model; calls `built` before its forward pass.

    Raises ValueError, one sentence, if it cannot be built or trained.
    """

    def facts(most: int) -> Callable[[], Facts]:
        return lambda: _facts(source, most, built)

    return adopted.without_memory(source, facts(tokens), otherwise=facts(min(tokens, TRIED)))


def _facts(source: Source, tokens: int, built: Callable[[], object]) -> Facts:
    made = adopted.make(source, attention=adopted.OWN, device="cpu")
    built()
    tokens = made.sequence or min(tokens, made.block or tokens)
    model = adopted.Adopted(made)
    inputs, targets = made.draw(adopted.PROBE_BATCH, tokens, seed=0, device="cpu")
    attended = Attended()
    with attended:
        loss = _a_first_pass(source, model, inputs, targets, doing=f"its forward of {tokens} tokens")
    if not loss.requires_grad:
        raise ValueError(f"{source.model}: its loss depends on no weight that is trained")
    strange = _strange_leaves(loss, model)
    lasting = _strange_leaves(adopted.a_pass(model, inputs, targets), model) if strange else {}
    if shapes := [tuple(leaf.shape) for key, leaf in strange.items() if key in lasting]:  # others are made in a pass
        cls = type(made.module).__name__
        lost = f"{cls} has a weight {shapes[0]} that is no nn.Parameter of it, so that no optimizer"
        raise ValueError(f"{source.model}: {lost} trains it: make it one, and keep modules in an nn.ModuleList")
    return Facts(
        vocab=made.vocab,
        block=made.block,
        sequence=made.sequence,
        parameters=sum(p.numel() for p in model.parameters()),
        sdpa=attended.calls,
        scores=attended.scores,
        tried=tokens,
        text=made.text,
        manual=made.has_manual,
        logits=made.drawn is None and source.loss is None and calling.gives_logits(made.module, inputs, targets),
        float32=all(p.dtype is torch.float32 for p in made.module.parameters()),
        cls=type(made.module).__name__,
        blocks=checkpointing.expression(made.module),
        head=adopted.convert_head(made.module) or "",
    )


def _a_first_pass(source: Source, model: torch.nn.Module, *batch: torch.Tensor, doing: str) -> torch.Tensor:
    """Return the loss of a batch; what a config's model raises may come of the inputs that te-bench drew."""
    try:
        loss: torch.Tensor = adopted.called(source.model, adopted.a_pass, model, *batch, doing=doing)
    except Refused as error:
        if source.config is None or source.inputs is not None:
            raise
        raise Refused(f"{error}; if it takes other inputs, give --inputs and --loss") from error
    return loss


def _strange_leaves(loss: torch.Tensor, model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return the tensors, by their ids, that get a gradient of the loss but are no parameters of the model."""
    known = set(map(id, model.parameters()))
    leaves = [getattr(node, "variable", None) for node in adopted.graph_of(loss)]  # only AccumulateGrad has one
    return {id(leaf): leaf for leaf in leaves if leaf is not None and id(leaf) not in known}


def main() -> None:
    """Answer on stdout; whatever the user's code prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    said: dict[str, Any]

    def built() -> None:
        print(file=answer, flush=True)  # tells where the user's code was, if it ends this process

    try:
        with contextlib.redirect_stdout(sys.stderr):
            said = dataclasses.asdict(find_out(Source(**question["source"]), question["tokens"], built))
    except ValueError as error:
        said = {"error": on_one_line(str(error))[:600]}
    except ModuleNotFoundError as error:
        said = {"error": f"{question['source']['model']}: {lacks(error)}"}
    except MemoryError:
        said = {"error": f"{question['source']['model']}: building it ran out of memory: {TOO_LARGE}"}
    answer.write(json.dumps(said))
    answer.flush()
    os._exit(0)  # end whatever the user's code has started


if __name__ == "__main__":
    main()
