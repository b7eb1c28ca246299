"""The lines that make a training step what is advised. No torch."""

import textwrap

from te_bench.advice.candidates import Choice, Question
from te_bench.models import rivals

WIDTH = 96  # of a line of code on a terminal, after its indent
KERNELS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
CLASSES = {
    "delayed_scaling": "DelayedScaling",
    "float8_current_scaling": "Float8CurrentScaling",
    "rowwise_scaling": "RowwiseScaling",
    "float8_block_scaling": "Float8BlockScaling",
}


def code(question: Question, choice: Choice) -> list[str]:
    """Python, with its imports: of a preset it makes `step(tokens, targets)`; of a user's `model` what to do with it."""
    if not question.preset:
        return _of_users(question, choice)
    options = [f'attention="{choice.attention}"']
    options += [f"padded_vocab_size={question.padded_vocab}"] if choice.padded else []
    options += [f"recipe=recipe.{CLASSES[choice.recipe]}()"] if choice.recipe else []
    options += [f'head="{choice.head}"'] if choice.head else []
    options += ['blocks="fused"'] if choice.fused else []
    lines = ["from te_bench.models import decoder, recipe" if choice.recipe else "from te_bench.models import decoder"]
    lines.append("from te_bench.training.step import Optim, TrainStep")
    move = '.to("cuda")' if question.device == "cuda" else ""
    made = [f'model = decoder.load("{question.model}", {", ".join(options)}){move}']
    if len(made[0]) > WIDTH:
        inside = textwrap.wrap(", ".join(options), WIDTH, break_on_hyphens=False)
        made = [f'model = decoder.load("{question.model}",', *(f"    {line}" for line in inside)]
        made[-1] += f"){move}"
    lines += made
    how = f'precision="{choice.precision}", mode="{choice.mode}"'
    how += ', optimizer="triton"' if choice.fused else ""
    lines.append(f"step = TrainStep(model, Optim(), {how})")
    return lines


def _of_users(question: Question, choice: Choice) -> list[str]:
    lines: list[str] = []
    theirs = rivals.load(choice.rival).adoption if choice.rival else None
    lines += theirs.code(question.vocab) if theirs else ()
    options = [f"recipe.{CLASSES[choice.recipe]}()"] if choice.recipe and not theirs else []
    options += [f'parts="{choice.parts}"'] if choice.parts else []
    if options:
        lines += ["import te_bench.models as te"]
        lines += ["from te_bench.models import recipe"] if choice.recipe else []
        lines += [f"te.convert(model, {', '.join(options)})  # before the optimizer is made"]
    if choice.attention in KERNELS:
        lines += ["from torch.nn.attention import SDPBackend, sdpa_kernel"]
        lines += [f"with sdpa_kernel(SDPBackend.{KERNELS[choice.attention]}):  # around forward and backward pass"]
        lines += ["    ..."]
    if choice.mode == "compile":
        lines.append("model = torch.compile(model, dynamic=False)")
    elif choice.mode == "compile-reduce-overhead":
        lines.append('model = torch.compile(model, mode="reduce-overhead", dynamic=False)')
    if choice.precision == "fp32":
        return [*lines, "# float32: no autocast"]
    return [*lines, "# the forward pass under torch.autocast(device, dtype=torch.bfloat16)"]
