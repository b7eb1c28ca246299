"""Give plain names: the step's project, its precision, and the fewest choices that distinguish it in a report."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from te_bench.experiments import run_options
from te_bench.experiments.spec import NO_ATTENTION, OWN_ATTENTION, Scalar, Trial
from te_bench.experiments.suites.speed import OWN
from te_bench.models import rivals

TE_BENCH, EAGER, COMPILED = "te-bench", "PyTorch eager", "torch.compile"
FOREIGN = "pytest_benchmark"  # the workload of a benchmark that pytest-benchmark timed
COMMAND = "command"  # the workload of a command that a gate timed
NAMED = (FOREIGN, COMMAND)  # workloads whose trials the user names
PER_BLOCK = "per block"  # each transformer block by itself
COMPILED_BLOCKS = f"{COMPILED} {PER_BLOCK}"
WHOLE = "float32 weights and states"  # those of the control, when fewer bits are judged
SHAPED = ("attention", "attention_numerics")  # workloads whose problem is a shape rather than a model
STEPS = ("train_step", "training", "max_batch", "scaling", "layer")  # workloads that belong to a project

#: Settings that only te-bench's own step has, or a user's model with te-bench's kernels.
_OWN_PARTS = ("head", "optimizer", "blocks", "parts")
#: Settings of an attention problem's shape, which tables show beside the name.
_SHAPE = (
    "batch",
    "heads",
    "kv_heads",
    "length",
    "head_dim",
    "causal",
    "dropout",
    "window_left",
    "window_right",
    "documents",
)
_ARM = ("arm", "perturb_ulp", "fault", *run_options.JUDGED)  # settings that arm_name names
_RANKS = ("parallel", "world", "shard", "sequence_parallel", "overlap")  # said as: ddp x4, hsdp x4 in groups of 2

_KERNELS = {
    "manual": "written-out",
    "manual_fp8": "written-out FP8",
    "mem_efficient": "memory-efficient",
    "cudnn": "cuDNN",
    "flash4": "FlashAttention-4",
    "flex": "FlexAttention",
    "gluon": "Gluon",
    "triton": "Triton",
    "triton_fp8": "Triton FP8",
    "auto": "automatic",
    OWN_ATTENTION: "the model's own",
}
#: Words for modes of execution; other modes are named as they are.
MODES = {
    "compile": "compiled",
    "compile-blocks": f"compiled {PER_BLOCK}",
    "compile-reduce-overhead": "reduce-overhead",
    "cudagraph": "CUDA graph",
}
HEADS = {None: "all logits", "chunked": "chunked head", "fp8": "FP8 head"}
#: The quickstart's layers, by what they use of Transformer Engine's interface.
_LAYERS = {"te_basic": "te.Linear", "te_fused": "te.LayerNormMLP", "te_layer": "te.TransformerLayer"}
_PEERS = {"torchao": "torchao", "transformer_engine": "Transformer Engine"}
_BLOCK_FORMATS = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}
_OF_RECIPES = {**_BLOCK_FORMATS, "e4m3": "E4M3", "dpa": "with FP8 attention"}


def count_trials(number: int) -> str:
    """Return a number of trials in words: 1 trial, 2 trials."""
    return f"{number} trial{'' if number == 1 else 's'}"


def first_of(names: Sequence[str], most: int, comma: str = ", ") -> str:
    """Return at most `most` of the names, and how many more there are: a, b and 3 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{comma.join(names[:most])}{more}"


def plain_names(trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return {key: name} for trials that are compared with each other; different trials have different names.

    A name always has the step's project, its precision, how it is divided over GPUs, and what makes its work differ from
    the others'. Of its choices, in the order of `_CHOICES`, it has those that distinguish it from trials of the same name.
    """
    differing, fewer_bits = _differing(trials.values()), judges_fewer_bits(trials.values())
    precisions, protocols = ({getattr(trial, of) for trial in trials.values()} for of in ("precision", "protocol"))
    alike: dict[str, list[str]] = {}
    for key, trial in trials.items():
        words = _always(trial, differing, fewer_bits)
        words += [precision_name(trial)] if trial.workload in SHAPED and len(precisions) > 1 else []
        words += [f"timed as {trial.protocol}"] if len(protocols) > 1 else []
        alike.setdefault(", ".join(words), []).append(key)
    names = {}
    for begin, keys in alike.items():
        for key, words in _told_apart({key: trials[key] for key in keys}, [*_CHOICES.values(), *_rest(trials)]).items():
            names[key] = ", ".join(word for word in (begin, *words) if word)
    several = Counter((name, _shape_of(trials[key])) for key, name in names.items())
    again = {key for key, name in names.items() if several[name, _shape_of(trials[key])] > 1}
    told = {key: f"{name} ({trials[key].cell[:6]})" if key in again else name for key, name in names.items()}
    return told | {key: printable(str(one.problem["variant"])) for key, one in trials.items() if one.workload in NAMED}


def whose(trial: Trial) -> str:
    """Return the project whose step or layer a trial times: te-bench, PyTorch, torch.compile, or another."""
    layer = trial.problem.get("layer")
    if layer is not None:
        peer = next((name for name in _PEERS if str(layer).startswith(name)), None)
        if peer or str(layer) in _LAYERS:
            return _PEERS[peer] if peer else TE_BENCH
        return EAGER if trial.mode == "eager" else COMPILED
    if rival := rival_of(trial):
        return rival
    parts = any(trial.problem.get(part) for part in _OWN_PARTS)
    if parts or trial.precision == "fp8" or trial.attention in OWN:
        return TE_BENCH
    return EAGER if trial.mode == "eager" else COMPILED


def rival_of(trial: Trial) -> str | None:
    """Return the name of another project's step; None for te-bench's and PyTorch's."""
    name = str(trial.problem.get("rival") or trial.problem.get("linears") or "")
    if name in rivals.names():
        return rivals.load(name).title
    return name or None  # a journal may have rivals that this te-bench does not know


def rival_name(name: str) -> str:
    """Return a rival's title with its recipe: Liger; torchao FP8, current scaling; any other name unchanged."""
    if name not in rivals.names():
        return name
    rival = rivals.load(name)
    return f"{rival.title} {precision_name(rival)}, {recipe_name(rival.recipe)}" if rival.recipe else rival.title


def precision_name(of: Trial | rivals.Rival) -> str:
    """Return the precision in words: bf16, FP8, MXFP8, NVFP4."""
    if of.precision != "fp8":
        return of.precision
    return _BLOCK_FORMATS.get(str(of.recipe).partition("_")[0], "FP8")


def kernel_name(attention: str) -> str:
    """Return the plain name of an attention backend: cuDNN, te-bench Gluon."""
    word = _KERNELS.get(attention, attention)
    return f"{TE_BENCH} {word}" if attention.partition("_")[0] in OWN else word


def attention_name(attention: str) -> str:
    """Return the plain name of a step's attention: cuDNN attention, FlashAttention-4."""
    word = _KERNELS.get(attention, attention)
    return printable(word if "Attention" in word else f"{word} attention")


def recipe_name(recipe: str | None) -> str:
    """Return a recipe in words: delayed scaling, current scaling; "" for bf16."""
    words = (recipe or "").removeprefix("float8_").split("_")
    return printable(" ".join(_OF_RECIPES.get(word, word) for word in words))


def specification(trial: Trial) -> str:
    """Return all settings of a trial but its seed, in words."""
    settings: dict[str, Scalar] = {"attention": trial.attention, "precision": trial.precision, "recipe": trial.recipe}
    settings |= {"mode": trial.mode, **trial.problem, "protocol": trial.protocol, "device": trial.device}
    said = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return printable(f"{trial.workload}: {said}")


def arm_name(trial: Trial, fewer_bits: bool = False) -> str:
    """Return the name of an arm of a convergence run: bf16, bf16 A/A, a recipe, its fused step, or a broken recipe.

    fewer_bits: `judges_fewer_bits` of the arms in the same comparison.
    """
    kind = trial.problem.get("arm")
    how = run_options.shown(trial.problem, in_fp8=trial.recipe is not None)
    name = f"{recipe_name(trial.recipe) or trial.precision}{how}"
    name += f", {WHOLE}" if fewer_bits and kind == "control" else ""
    fault = f", broken on purpose: {str(trial.problem.get('fault')).replace('_', ' ')}" if kind == "broken" else ""
    return f"{name}{', A/A' if kind == 'aa' else ''}{fault}"


def judges_fewer_bits(trials: Collection[Trial]) -> bool:
    """Return whether every judged arm has weights or states in fewer bits than float32."""
    judged = [trial.problem for trial in trials if trial.problem.get("arm") == "recipe"]
    return bool(judged) and all(run_options.fewer_words(problem) for problem in judged)


def printable(text: str) -> str:
    """Return the text on one line, with U+FFFD for each unprintable character."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _differing(trials: Collection[Trial]) -> list[str]:
    """Return the keys of settings that make the trials' work differ, such as batch, model and mask; choices do not."""
    shaped = any(trial.workload in SHAPED for trial in trials)
    said = (*_CHOICES, *_RANKS, "weights", "states")
    chosen = {*said, "vocab", "padded_vocab", "rival", "linears", "amax_history_len", "variant"}
    keys = dict.fromkeys(key for trial in trials for key in trial.problem)
    named = [key for key in keys if key not in chosen and not (shaped and key in _SHAPE)]
    return [key for key in named if len({str(trial.problem.get(key)) for trial in trials}) > 1]


def _always(trial: Trial, differing: Collection[str], fewer_bits: bool) -> list[str]:
    """Return the words that every name has; fewer_bits: as in arm_name."""
    problem = trial.problem
    if {"arm", "lr_factor"} & problem.keys():
        told = (*_ARM, "lr_factor") if "learning_rate" in differing else _ARM  # the rate already includes its factor
        begin, differing = arm_name(trial, fewer_bits), [key for key in differing if key not in told]
    elif trial.workload in SHAPED:
        begin = kernel_name(trial.attention)
    else:
        begin = f"{whose(trial) if trial.workload in STEPS else trial.workload} {precision_name(trial)}"
    words = [begin]
    if begin.startswith((EAGER, COMPILED)) and trial.attention == "manual":  # rarely chosen, so it must be named
        words.append(_attention(trial))
    if "parallel" in problem:
        groups = f" in groups of {problem['shard']}" if "shard" in problem else ""
        tokens = " with sequence parallelism" if problem.get("sequence_parallel") else ""
        tokens += " that overlaps" if problem.get("overlap") else ""
        words.append(f"{problem['parallel']} x{problem['world']}{groups}{tokens}")
    if "arm" not in problem:
        words += run_options.fewer_words(problem)
    return [printable(word) for word in (*words, *(_setting(trial, key) for key in differing)) if word]


def _setting(trial: Trial, key: str) -> str:
    value = trial.problem.get(key)
    if value is None or key == "model":
        return str(value or "")
    return f"{value} {key}" if key == "mask" else f"{key.replace('_', ' ')} {value}"


def _told_apart(trials: Mapping[str, Trial], choices: list[Callable[[Trial], str]]) -> dict[str, list[str]]:
    """Return the words of the choices that split the trials, each choice within the parts that earlier choices left."""
    for place, choice in enumerate(choices):
        parts: dict[str, dict[str, Trial]] = {}
        for key, trial in trials.items():
            parts.setdefault(choice(trial), {})[key] = trial
        if len(parts) > 1:
            rest = choices[place + 1 :]
            return {
                key: [word, *words]
                for word, part in parts.items()
                for key, words in (_told_apart(part, rest) if len(part) > 1 else {one: [] for one in part}).items()
            }
    return {key: [] for key in trials}


def _attention(trial: Trial) -> str:
    return "" if trial.workload in SHAPED or trial.attention == NO_ATTENTION else attention_name(trial.attention)


def _mode(trial: Trial) -> str:
    plain = {"compile": "default mode", "compile-blocks": PER_BLOCK} if whose(trial) == COMPILED else {}
    return plain.get(trial.mode) or MODES.get(trial.mode, trial.mode)


def _vocabulary(trial: Trial) -> str:
    vocab, padded = (trial.problem.get(key) for key in ("vocab", "padded_vocab"))
    if vocab is None and padded is None:
        return ""
    size, kind = (padded, "vocabulary padded to") if padded not in (None, vocab) else (vocab, "vocabulary")
    return f"{kind} {size:,}" if isinstance(size, int) else f"{kind} {size}"


def _one_of(key: str, words: Mapping[str | None, str]) -> Callable[[Trial], str]:
    """Return a choice with these words for its values; a value without a word is named as it is."""

    def word(trial: Trial) -> str:
        value = trial.problem.get(key)
        return printable(words.get(value if value is None else str(value), f"{key} {value}"))

    return word


#: A user's choices, the most important first, with their words. Different values have different words.
_CHOICES: dict[str, Callable[[Trial], str]] = {
    "recipe": lambda trial: recipe_name(trial.recipe),
    "layer": lambda trial: _LAYERS.get(str(trial.problem.get("layer")), ""),
    "attention": _attention,
    "mode": _mode,
    "head": lambda trial: HEADS[None] if trial.problem.get("parts") else _one_of("head", HEADS)(trial),
    "blocks": _one_of("blocks", {None: "unfused blocks", "fused": "fused blocks"}),
    "parts": _one_of("parts", {None: "the model's kernels", "all": "te-bench's kernels"}),
    "head of parts": lambda trial: run_options.BF16_HEAD if trial.problem.get("head") else HEADS["fp8"],
    "optimizer": _one_of("optimizer", {None: "torch's AdamW", "triton": "te-bench's AdamW"}),
    "checkpointing": _one_of("checkpointing", {None: "no checkpointing", "blocks": "checkpointing"}),
    "gather": _one_of("gather", {None: "gathers as used", "fp8": "FP8 gathers"}),
    "vocabulary": _vocabulary,
}


def _rest(trials: Mapping[str, Trial]) -> list[Callable[[Trial], str]]:
    """Return the other settings as choices, for trials that nothing else distinguishes."""
    keys = dict.fromkeys(key for trial in trials.values() for key in trial.problem)
    shaped = any(trial.workload in SHAPED for trial in trials.values())
    others = [key for key in keys if not (shaped and key in _SHAPE)]
    return [*(lambda trial, key=key: _setting(trial, key) for key in others), lambda trial: trial.device]


def _shape_of(trial: Trial) -> str:
    """Return the shape of an attention problem, which tables show beside its name; "" for other workloads."""
    return str([trial.problem.get(key) for key in _SHAPE]) if trial.workload in SHAPED else ""
