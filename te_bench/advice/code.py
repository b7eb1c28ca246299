"""Write the lines of Python that make a user's training step the advised one. No torch."""

import json
import textwrap

from te_bench.advice.candidates import COMPILED, Choice, Question
from te_bench.experiments.adoption import PER_BLOCK
from te_bench.models import rivals
from te_bench.models.sources import HUB

NOTHING = "# Nothing to change."
CHECKPOINTING = "from te_bench.models.checkpointing import checkpoint_blocks"
CHECKPOINTED = "checkpoint_blocks(model)  # before the step is made"
FUNCTIONAL = "import torch.nn.functional as F"
OPTIM = ("learning_rate", "weight_decay", "grad_clip")
WIDTH = 96  # of a line of code on a terminal, after its indent
KERNELS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
#: Endings of transformers' classes that fill no key/value cache.
WITHOUT_CACHE = ("ForMaskedLM", "Classification")
MADE = {
    "delayed_scaling_e4m3": "recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)",
    "delayed_scaling": "recipe.DelayedScaling()",
    "float8_current_scaling": "recipe.Float8CurrentScaling()",
    "rowwise_scaling": "recipe.RowwiseScaling()",
    "float8_block_scaling": "recipe.Float8BlockScaling()",
}


def code(question: Question, choice: Choice) -> list[str]:
    """Return lines of Python, with imports, from the model to the loss of a batch, which the user draws."""
    if not question.preset:
        return [NOTHING] if choice == question.have else _of_users(question, choice)
    options = [f'attention="{choice.attention}"']
    options += [f"padded_vocab_size={question.padded_vocab}"] if choice.padded else []
    options += [f"recipe={_made(choice.recipe)}"] if choice.recipe else []
    options += [f'head="{choice.head}"'] if choice.head else []
    options += ['blocks="fused"'] if choice.fused else []
    lines = ["from te_bench.models import decoder, recipe" if choice.recipe else "from te_bench.models import decoder"]
    lines += [CHECKPOINTING] if choice.checkpointing else []
    lines.append("from te_bench.training.step import Optim, TrainStep")
    move = '.to("cuda")' if question.device == "cuda" else ""
    made = [f'model = decoder.load("{question.model}", {", ".join(options)}){move}']
    if len(made[0]) > WIDTH:
        inside = textwrap.wrap(", ".join(options), WIDTH, break_on_hyphens=False)
        made = [f'model = decoder.load("{question.model}",', *(f"    {line}" for line in inside)]
        made[-1] += f"){move}"
    lines += made
    lines += [CHECKPOINTED] if choice.checkpointing else []
    *lines, step = [*lines, *_step(question, choice)]
    return [*lines, f"{step}  # loss = step(tokens, targets)"]


def _made(recipe: str) -> str:
    """Return the expression that makes the recipe of that name, which may be a file of the user's."""
    return MADE.get(recipe, f'recipe.load("{recipe}")')


def _noted(line: str, note: str) -> list[str]:
    """Return the line with a comment behind it, or before it if both together are too wide."""
    both = f"{line}  # {note}"
    return [both] if len(both) <= WIDTH else [f"# {note}", line]


def _step(question: Question, choice: Choice) -> list[str]:
    """The lines that make the step, with the optimizer's settings that it was timed with."""
    settings = {name: question.problem[name] for name in OPTIM if name in question.problem}
    settings |= {"accumulate": choice.accumulate} if choice.accumulate > 1 else {}
    how = f'precision="{choice.precision}", mode="{choice.mode}"'
    optimizer = question.optimizer_of(choice)
    how += f', optimizer="{optimizer}"' if optimizer else ""
    return [
        f"optim = Optim({', '.join(f'{name}={value}' for name, value in settings.items())})  # as timed: set yours",
        f"step = TrainStep(model, optim, {how})",
    ]


def _of_users(question: Question, choice: Choice) -> list[str]:
    imports, made, call = _model(question, choice)
    lines = [made]
    theirs = rivals.load(choice.rival).adoption if choice.rival else None
    lines += theirs.code(question.vocab) if theirs else ()
    options = [_made(choice.recipe)] if choice.recipe and not theirs else []
    options += [f'parts="{choice.parts}"'] if choice.parts else []
    if choice.parts and choice.head:
        lines.append(f"fp8 = {options[0]}")  # what follows is too long for one line
        options = ["fp8", *options[1:], f'filter=lambda name, module: name != "{question.head}"']
    if choice.mode == "cudagraph":
        return _captured(question, choice, imports, lines, options)
    if options:
        imports += ["import te_bench.models as te"]
        imports += ["from te_bench.models import recipe"] if choice.recipe else []
        lines += _noted(f"te.convert(model, {', '.join(options)})", "before the optimizer is made")
    imports += [CHECKPOINTING] if choice.checkpointing else []
    lines += [CHECKPOINTED] if choice.checkpointing else []
    if choice.mode == "compile":
        lines.append("model = torch.compile(model, dynamic=False)")
    elif choice.mode == PER_BLOCK:
        lines += per_block(question)
    elif choice.mode == "compile-reduce-overhead":
        lines.append('model = torch.compile(model, mode="reduce-overhead", dynamic=False)')
    around = []
    if choice.attention in KERNELS:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        around.append(f"sdpa_kernel(SDPBackend.{KERNELS[choice.attention]})")
    if choice.precision != "fp32":
        around.append(f'torch.autocast("{question.device}", dtype=torch.bfloat16)')
    body, cut = [call], choice.accumulate
    if cut > 1:
        lines.append(
            f"# for each of {cut} micro-batches of {question.batch // cut} sequences, then a step of the optimizer"
        )
    if cut > 1 or choice.attention in KERNELS:
        backward = f"(loss / {cut}).backward()" if cut > 1 else "loss.backward()"
        body.append(f"{backward}  # by the same kernel" if choice.attention in KERNELS else backward)
    imports = ["import torch", *imports] if around or choice.mode in COMPILED else imports
    if not around:
        return [*imports, *lines, "# float32: without autocast", *body]
    return [*imports, *lines, f"with {', '.join(around)}:", *(f"    {line}" for line in body)]


def per_block(question: Question) -> list[str]:
    """Return the lines that compile each block of a user's model, the last of which does."""
    lines = [f"for block in {question.blocks}: block.compile(dynamic=False)"]
    if question.of_transformers and not question.cls.endswith(WITHOUT_CACHE):
        lines.insert(0, "model.config.use_cache = False  # its state would have each block compiled anew")
    return lines


def _captured(question: Question, choice: Choice, imports: list[str], made: list[str], options: list[str]) -> list[str]:
    """Return the lines for a user's model and its optimizer in one CUDA graph; options: te.convert's after the model."""
    judge = str(question.problem.get("loss") or "").rpartition(":")[2]
    given = [f"recipe={options[0]}", *options[1:]] if choice.recipe else options
    given += [f"loss={judge}"] if judge else []
    return [
        *(line for line in imports if line != FUNCTIONAL),
        "from te_bench.models.adopt import adopt",
        *(["from te_bench.models import recipe"] if choice.recipe else []),
        *([CHECKPOINTING] if choice.checkpointing else []),
        "from te_bench.training.step import Optim, TrainStep",
        *made,
        *_noted(f"model = adopt(model, {', '.join(given)})", "model.module holds your weights"),
        *([CHECKPOINTED] if choice.checkpointing else []),
        *_step(question, choice),
        "loss = step(inputs, targets)  # of one shape; it updates the weights"
        + (f"; targets: {_targets(question)}" if question.text else ""),
    ]


def _targets(question: Question) -> str:
    """Return what adopt's language models learn, by the class of the model."""
    words = {"ForMaskedLM": "hidden tokens, -100 elsewhere", "ForConditionalGeneration": "labels"}
    return next((said for ending, said in words.items() if question.cls.endswith(ending)), "the next tokens")


def _model(question: Question, choice: Choice) -> tuple[list[str], str, str]:
    """Return the imports, the line that makes the model, and the line that computes its loss, as the command line says."""
    problem = question.problem
    move = '.to("cuda")' if question.device == "cuda" else ""
    judge = str(problem.get("loss") or "").partition(":")
    imports = [f"from {judge[0]} import {judge[2]}"] if judge[0] else []
    call = "loss = model(inputs, targets)  # as you call it"
    if judge[0]:
        call = f"loss = {judge[2]}(model(inputs), targets)"
    elif question.logits:
        imports = [FUNCTIONAL]
        call = "loss = F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten())"
    if "config" in problem:
        imports = [f"from transformers import AutoConfig, {question.cls}", *imports]
        written_out = ', attn_implementation="eager"' if choice.attention == "manual" else ""
        config = f'AutoConfig.from_pretrained("{question.given.removeprefix(HUB)}"{written_out})'
        return imports, f"model = {question.cls}({config}){move}", call if judge[0] else "loss = model(**batch).loss"
    module, _, factory = question.model.partition(":")
    arguments = json.loads(str(problem.get("arguments", "{}")))
    said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return [f"from {module} import {factory}", *imports], f"model = {factory}({said}){move}", call
