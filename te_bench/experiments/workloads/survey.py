"""What one eager step of a model is made of: its Linears, attention, loss and norms. Nothing is timed or checked.

work: linears, each with the rows that it is given, how often a step calls it, and how many of the calls stay in bf16 under a
recipe (kept); head, the last Linear of te-bench's own models where it makes the logits, which is then none of them;
attentions, the calls of SDPA by shape, with the kernel that each ran; written_out, softmaxes over keys that no kernel
computes; losses, the logits of each cross-entropy; norms and norms_in_float32, elements that norms gave, and that they gave
in float32 under autocast; experts_in_float32, calls of grouped_mm that did so; dropout, {module: probability}; vocab;
optimizer, where the model says which it makes; blocks, the number of transformer blocks; parameters; converted_head, the
name of the head of a user's model that te.convert replaces, or None.
"""

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from te_bench.experiments import trial_model
from te_bench.experiments.measurement import Context, Diverged, Measurement
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import adopted, conversion
from te_bench.models.adopted import Adopted
from te_bench.models.checkpointing import blocks_of
from te_bench.models.modules.linear import Linear
from te_bench.training.step import autocast, fp8_autocast

#: aten's operators of SDPA's kernels; what has none of them is computed by "math".
KERNELS = {
    "flash": re.compile(r"_scaled_dot_product_flash_attention(_for_cpu)?$"),
    "mem_efficient": re.compile(r"_scaled_dot_product_efficient_attention$"),
    "cudnn": re.compile(r"_scaled_dot_product_cudnn_attention$"),
}
MATH = "math"


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_supported(trial)
    batch = train_step.random_batches(trial)[0]
    model = trial_model.model_of(trial)
    converted = functools.partial(_converted, model) if isinstance(model, Adopted) else None
    found = look(model, *batch, trial.precision, converted=converted)
    found |= {"converted_head": adopted.convert_head(model.module)} if isinstance(model, Adopted) else {}
    if not math.isfinite(loss := found["loss"]):
        shown = str(loss).replace("nan", "NaN")
        raise Diverged(f"the loss of the first batch is {shown} ({trial.precision} autocast); no step was timed")
    return Measurement(work=found)


def _converted(model: Adopted) -> set[str]:
    """The layers that te.convert takes, by their names in the model, which has them then."""
    return {f"module.{layer.name}" for layer in conversion.convert(model.module).converted}


def look(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    precision: str,
    *,
    converted: Callable[[], Collection[str]] | None = None,
) -> dict[str, Any]:
    """The work of a survey: one forward pass of the model under autocast, and what it says of itself.

    converted: asked after the pass, which layers a recipe would compute in FP8, the head among them; by default all Linears
    but the head, which is then apart.
    """
    device = inputs.device
    with contextlib.ExitStack() as open_:
        seen = _Modules(model, open_)
        operators = open_.enter_context(_Operators())
        calls = open_.enter_context(_Calls(operators))
        open_.enter_context(autocast(device, precision))
        open_.enter_context(fp8_autocast(model))
        loss = model(inputs, targets)
    vocab = max((classes for classes, _ in operators.losses), default=None)
    head = seen.take_last(vocab) if converted is None else None
    takes = None if converted is None else converted()
    return {
        "linears": [
            {**_sizes(key), "calls": len(names), "names": names[:3]}
            | {"kept": 0 if takes is None else sum(name not in takes for name in names)}
            for key, names in seen.linears.items()
            if names
        ],
        "head": head,
        "attentions": [{**dict(key), "calls": number} for key, number in calls.attentions.items()],
        "written_out": operators.written_out,
        "losses": [
            {"classes": classes, "dtype": dtype, "elements": elements}
            for (classes, dtype), elements in operators.losses.items()
        ],
        "norms": seen.norms,
        "norms_in_float32": seen.norms_in_float32,
        "experts_in_float32": calls.experts_in_float32,
        "dropout": {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0},
        "vocab": vocab,
        "optimizer": _own_optimizer(model),
        "blocks": len(blocks_of(model)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": float(loss.detach()),
    }


def _sizes(key: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("rows", "in_features", "out_features"), key, strict=True))


class _Modules:
    """Hooks that note each call of a Linear by its sizes, and count norms that leave half precision."""

    def __init__(self, model: nn.Module, open_: contextlib.ExitStack):
        self.linears: dict[tuple[int, int, int], list[str]] = {}  # names, in the order of their calls
        self.last: tuple[int, int, int] | None = None
        self.norms = self.norms_in_float32 = 0
        hook: Callable[..., None]
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Linear) or type(module).__name__ == "Conv1D":  # transformers' GPT-2
                hook = self._linear(name)
            elif re.search(r"(Layer|RMS)_?Norm", type(module).__name__):
                hook = self._norm
            else:
                continue
            open_.callback(module.register_forward_hook(hook).remove)

    def _linear(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            y = out[0] if isinstance(out, tuple) else out
            k, n = given[0].shape[-1], y.shape[-1]
            self.last = (given[0].numel() // k, k, n)
            self.linears.setdefault(self.last, []).append(name)

        return hook

    def take_last(self, vocab: int | None) -> dict[str, int] | None:
        """Sizes of the last Linear, which is then none of `linears`, where it makes this many logits; or None."""
        if self.last is None or self.last[2] != vocab:
            return None
        self.linears[self.last].pop()
        return _sizes(self.last)

    def _norm(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        self.norms += y.numel()
        if torch.is_autocast_enabled(y.device.type) and y.dtype is torch.float32:
            self.norms_in_float32 += y.numel()


class _Operators(TorchDispatchMode):
    """Attention's kernels, softmaxes of scores, and the logits that a loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.written_out = 0
        self.losses: dict[tuple[int, str], int] = {}  # (classes, dtype): elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        self.kernels += [kernel for kernel, pattern in KERNELS.items() if pattern.match(name)]
        if name in ("_softmax", "_safe_softmax") and args[0].dim() == 4:
            self.written_out += 1
        if name == "_log_softmax":
            key = args[0].shape[-1], str(args[0].dtype).removeprefix("torch.")
            self.losses[key] = self.losses.get(key, 0) + args[0].numel()
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Calls of scaled_dot_product_attention, each with the kernel that it ran; and of grouped_mm outside of autocast."""

    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, operators: _Operators):
        super().__init__()
        self.operators = operators
        self.attentions: Counter[tuple[tuple[str, Any], ...]] = Counter()
        self.experts_in_float32 = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].dtype is torch.float32:
            self.experts_in_float32 += torch.is_autocast_enabled(args[0].device.type)
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(self.NAMES, args, strict=False)), **(kwargs or {})}
        kernels, written_out = len(self.operators.kernels), self.operators.written_out
        out = func(*args, **(kwargs or {}))
        ran = self.operators.kernels[kernels:]
        self.operators.written_out = written_out  # math's own softmax
        q, k = given["query"], given["key"]
        self.attentions[
            ("batch", q.shape[0]),
            ("heads", q.shape[-3]),
            ("kv_heads", k.shape[-3]),
            ("length", q.shape[-2]),
            ("keys", k.shape[-2]),
            ("head_dim", q.shape[-1]),
            ("dtype", str(out.dtype).removeprefix("torch.")),
            ("causal", bool(given.get("is_causal", False))),
            ("mask", given.get("attn_mask") is not None),
            ("dropout", float(given.get("dropout_p", 0.0))),
            ("kernel", ran[0] if ran else MATH),
        ] += 1
        return out


def _own_optimizer(model: nn.Module) -> dict[str, Any] | None:
    """The optimizer of a model that makes its own without being told how, as Lightning's modules do."""
    for part in model.modules():
        make = getattr(part, "configure_optimizers", None)
        if callable(make):
            try:
                made = make()
            except TypeError:  # nanoGPT's wants to be told the rate
                return None
            if isinstance(made, torch.optim.Optimizer):
                return {"name": type(made).__name__, "fused": bool(made.param_groups[0].get("fused"))}
    return None
