"""List every choice that applies to a model on a device, and make the trial that measures a choice. No torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_bench import plugins
from te_bench.experiments import run_options, suite_trials
from te_bench.experiments.adoption import ALL, CHUNKED, OPTIMIZER, PER_BLOCK, Adoptee, adoptee, without_rivals
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import NO_ATTENTION, OWN_ATTENTION, Options, Trial
from te_bench.models import rivals
from te_bench.models.configs import configs
from te_bench.reports.analysis import naming

FP8_HEAD = "fp8"
WHOLE = ("compile", "compile-reduce-overhead")  # modes that compile a whole model
COMPILED = (PER_BLOCK, *WHOLE)
LENGTH = 1024  # tokens of a sequence of a user's model, if neither the model nor --tokens gives them
DELAYED = "delayed_scaling_e4m3"  # the recipe whose scales are known before a cast
CURRENT = "float8_current_scaling"
#: Recipes in the order of measurement; the budget may not hold all.
RECIPES = (DELAYED, CURRENT, "rowwise_scaling", "float8_block_scaling")
#: {recipe: why DELAYED is measured in its place}; answers that measured it before are still read.
REPLACED = {"delayed_scaling": f"no study shows that its gradients in E5M2 train like bf16; one shows it of {DELAYED}"}
OURS = ("gluon", "triton")  # te-bench's attention kernels
#: On a GPU every attention that trains, the most promising first; on a CPU those that it has kernels for.
ATTENTIONS = {"cuda": ("cudnn", "flash", "gluon", "triton"), "cpu": ("flash", "manual")}
_MODES = {
    "eager": "eager",
    PER_BLOCK: naming.COMPILED_BLOCKS,
    "compile": naming.COMPILED,
    "compile-reduce-overhead": f"{naming.COMPILED} reduce-overhead",
    "cudagraph": "one CUDA graph",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to train a model.

    fused: te-bench's blocks and optimizer. padded: the vocabulary is padded to a multiple of 64. accumulate: the number of
    micro-batches that the batch is cut into. parts: te.convert's parts for a user's model, whose head is in the recipe's
    FP8 unless `head` is chunked, in bf16. rival: another project that trains the model, with the arithmetic of `recipe`.
    checkpointing: blocks keep only their inputs, and recompute the rest in the backward pass.
    """

    attention: str
    precision: str = "bf16"
    recipe: str | None = None
    mode: str = "eager"
    head: str | None = None
    fused: bool = False
    padded: bool = False
    parts: str | None = None
    rival: str | None = None
    accumulate: int = 1
    checkpointing: bool = False

    def changes(self, have: "Choice") -> int:
        """Return in how many settings this choice differs from the user's; parts replace the head, in FP8 or in bf16."""
        names = [f.name for f in dataclasses.fields(self) if not (self.parts and f.name == "head")]
        return sum(getattr(self, name) != getattr(have, name) for name in names)

    @property
    def fp8_head(self) -> bool:
        """Whether a causal model's head is in FP8: one by name, or te.convert's."""
        return self.head == FP8_HEAD or bool(self.parts and self.recipe and self.head is None)

    @property
    def of_others(self) -> bool:
        """Whether the choice needs nothing of te-bench: PyTorch alone, or a rival."""
        return self.rival is not None or not (self._ours or self.padded or self.mode not in ("eager", *COMPILED))

    @property
    def begins(self) -> str:
        """The step's project and precision: te-bench FP8, PyTorch eager bf16, Liger bf16; a rival's recipe, too."""
        if self.rival and self.recipe:
            return naming.rival_name(self.rival)
        theirs = naming.EAGER if self.mode == "eager" else naming.COMPILED
        whose = naming.rival_name(self.rival) if self.rival else naming.TE_BENCH if self._ours else theirs
        return f"{whose} {'FP8' if self.recipe else self.precision}"

    def beside(self, other: "Choice") -> str:
        """Return the choice in words beside another: the same with rowwise scaling, no padded vocabulary."""
        if self.begins != other.begins:
            return self.words()
        mine, theirs = self._details(), other._details()
        said = {"attention": "te-bench's attention" if self.parts else naming.attention_name(self.attention)}
        if self.parts and other.parts:
            said["head"] = f"the head in {'FP8' if self.fp8_head else 'bf16'}"
            mine["head"] = mine["head"] and said["head"]
        differs = [word or said.get(name, f"no {theirs[name]}") for name, word in mine.items() if word != theirs[name]]
        return f"the same with {', '.join(differs)}"

    def words(self) -> str:
        """Return the choice by the plain names of reports: te-bench FP8, delayed scaling, one CUDA graph."""
        return ", ".join(filter(None, (self.begins, *self._details().values())))

    @property
    def _ours(self) -> bool:
        return bool(self.recipe or self.head or self.fused or self.parts or self.attention in OURS)

    def _details(self) -> dict[str, str]:
        """Return {setting: words} for what `begins` does not say; "" for a setting that needs no word."""
        mode = _MODES[self.mode]
        if not (self.rival or self._ours):  # `begins` names the mode
            mode = mode.removeprefix(naming.COMPILED if self.mode in COMPILED else "eager").strip()
        converted = self.recipe and not (self.rival or self.parts)  # only Linears are converted, and attention is named
        silent = self.attention == OWN_ATTENTION and not converted
        return {
            "recipe": "" if self.rival else naming.recipe_name(self.recipe),
            "attention": "" if silent else naming.attention_name(self.attention),
            "head": run_options.BF16_HEAD if self.parts and self.head else naming.HEADS[self.head] if self.head else "",
            "fused": "fused blocks and AdamW" if self.fused else "",
            "padded": "padded vocabulary" if self.padded else "",
            "accumulate": f"{self.accumulate} micro-batches" if self.accumulate > 1 else "",
            "checkpointing": "checkpointed blocks" if self.checkpointing else "",
            "mode": mode,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A model on a device, and the choices for it.

    problem: the settings that all steps share. have: the user's assumed step, the unchanged model in eager bf16. said:
    the command line's options about the model. given: its --model. cls: the class of a user's model. blocks: as in its
    Facts. head: the name of a user's head that te.convert replaces, which a survey finds. preset: whether the model is
    te-bench's own. left_out: {choice that does not apply: the reason}. optimizer: the name in kernels.adamw for captured
    steps with te.convert's parts, or None for torch's fused AdamW; all other steps of a user's model have torch's.
    """

    model: str
    said: str
    title: str
    device: str
    problem: Settings
    vocab: int
    padded_vocab: int
    have: Choice
    choices: tuple[Choice, ...]
    given: str = ""
    cls: str = ""
    blocks: str = ""
    head: str = ""
    preset: bool = True
    text: bool = True  # the model learns from text
    logits: bool = False  # a user's model takes only tokens and returns logits
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optimizer: str | None = OPTIMIZER

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return int(self.problem["batch"] * self.problem["block"])

    def frame(self, choice: Choice) -> Choice:
        """Return the frame of a choice: the step that is measured whole, from which the choice's step is predicted.

        A frame has the choice's mode and blocks, with the model's own attention and head in bf16. A rival's step is its own
        frame, because te-bench does not look at its parts.
        """
        if choice.rival:
            return choice
        return Choice(
            attention=self.have.attention,
            precision="fp32" if choice.precision == "fp32" else "bf16",
            mode=choice.mode,
            head=CHUNKED if choice.fused else None,
            fused=choice.fused,
            padded=choice.fused and choice.padded,
            parts=choice.parts,
        )

    @property
    def frames(self) -> tuple[Choice, ...]:
        """All steps that are measured whole, the user's first."""
        return tuple(dict.fromkeys(map(self.frame, self.choices)))

    def hopeful(self, frame: Choice) -> Choice | None:
        """Return the most promising choice whose frame is `frame`, or None if there is none.

        It has the first other attention and the first recipe of their lists (no recipe on a CPU, which emulates FP8), and a
        chunked head, or that of te.convert's parts.
        """
        attentions = [name for name in ATTENTIONS[self.device] if name != self.have.attention]
        others = [choice for choice in self.choices if self.frame(choice) == frame != choice and not choice.rival]

        def place(choice: Choice) -> tuple[int, int, bool, bool]:
            recipe = rank(choice.recipe) if self.device == "cuda" else int(choice.recipe is not None)
            by = recipe, [*attentions, choice.attention].index(choice.attention)
            return (*by, choice.head != (None if choice.parts else CHUNKED), not choice.padded)

        return min(others, key=place, default=None)

    def with_head(self, name: str | None) -> "Question":
        """Return the question for a user's model with that head, if te.convert replaces one.

        Its captured step by DELAYED is then also a choice with the head in bf16, which trains like bf16 in a study.
        """
        shown = [
            dataclasses.replace(choice, head=CHUNKED)
            for choice in self.choices
            if name and choice.parts and (choice.recipe, choice.mode) == (DELAYED, "cudagraph")
        ]
        return dataclasses.replace(self, head=name or "", choices=(*self.choices, *shown))

    def checkpointed(self, choice: Choice) -> Choice | None:
        """Return the choice with checkpointed blocks; None if it has them, or cannot have them.

        Fused blocks cannot, nor a rival's own, nor blocks in torch.compile's CUDA graphs, which overwrite what is kept.
        """
        own = choice.fused or (choice.rival is not None and rivals.load(choice.rival).own_blocks)
        if choice.checkpointing or own or choice.mode == "compile-reduce-overhead":
            return None
        return dataclasses.replace(choice, checkpointing=True)

    def optimizer_of(self, choice: Choice) -> str | None:
        """Return the optimizer's name in kernels.adamw if te-bench makes the whole step; None: torch's fused AdamW."""
        if choice.fused:
            return OPTIMIZER
        return self.optimizer if choice.parts and choice.mode == "cudagraph" else None

    def trial(self, choice: Choice, seed: int = 0) -> Trial:
        """Return the trial of a training step by the choice."""
        settings: Settings = {**self.problem}
        if self.preset:
            settings |= {"vocab": self.vocab, "padded_vocab": self.padded_vocab if choice.padded else self.vocab}
        settings |= {"head": choice.head} if choice.head else {}
        if choice.accumulate > 1:
            settings |= {"batch": settings["batch"] // choice.accumulate, "accumulate": choice.accumulate}
        settings |= {"parts": choice.parts} if choice.parts else {}
        settings |= {"rival": choice.rival} if choice.rival else {}
        settings |= {"blocks": "fused"} if choice.fused else {}
        settings |= {"optimizer": name} if (name := self.optimizer_of(choice)) else {}
        settings |= {"checkpointing": "blocks"} if choice.checkpointing else {}
        return Trial(
            workload="train_step",
            device=self.device,
            problem=settings,
            attention=choice.attention,
            precision=choice.precision,
            recipe=choice.recipe,
            mode=choice.mode,
            seed=seed,
        )

    def survey(self, share: int = 1, *, checkpointing: bool = False) -> Trial:
        """Return the trial that surveys the unchanged model's step, on one of `share` equal parts of the batch."""
        choice = dataclasses.replace(self.have, checkpointing=checkpointing)
        return dataclasses.replace(self.of_batch(choice, self.batch // share), workload="survey", protocol="once")

    def of_batch(self, choice: Choice, batch: int) -> Trial:
        """Return the trial of a training step by the choice on `batch` sequences."""
        trial = self.trial(choice)
        return trial.with_(batch=batch)

    @property
    def of_transformers(self) -> bool:
        """Whether transformers made the user's model, of a config."""
        return "config" in self.problem

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return int(self.problem["batch"])

    @property
    def shares(self) -> tuple[int, ...]:
        """The numbers of equal micro-batches to try: doubling, and last one sequence each."""
        doubled = (2**k for k in range(1, self.batch.bit_length()))
        return tuple(dict.fromkeys(n for n in (*doubled, self.batch) if n > 1 and self.batch % n == 0))


def of_model(options: Options, capability: tuple[int, int] | None) -> Question:
    """Return the question for --model: te-bench's own model, or a user's. Raises ValueError if it is neither."""
    own = adoptee(options)
    return _of_preset(options, capability) if own is None else _of_users(options, own, capability)


def _sized(options: Options, block: int) -> Settings:
    usual: Settings = {"model": options.model, "batch": 12 if options.device == "cuda" else 4, "block": block}
    sized = suite_trials.sized(options, usual)
    threads = suite_trials.threads_of(options, sized["model"])
    return {**sized, **threads, **suite_trials.BENCH_PY, "data": "random"}


def _of_users(options: Options, own: Adoptee, capability: tuple[int, int] | None) -> Question:
    """Return the question for a user's model: its own attention and SDPA's kernels, te.convert's recipes, and modes."""
    cuda = options.device == "cuda"
    problem = {**_sized(options, LENGTH), **own.source.settings}
    vocab = own.facts.vocab
    problem |= {"vocab": vocab, "padded_vocab": vocab}
    have = Choice(attention=OWN_ATTENTION)
    left_out = {
        "heads, fused blocks, a padded vocabulary": "options of te-bench's own models; yours has what te-bench's parts bring"
    }
    left_out |= without_rivals(options.device)
    pinned = [name for name in ATTENTIONS[options.device] if name in own.attentions]
    if not own.facts.sdpa:
        left_out["attention kernels"] = "the model calls no scaled_dot_product_attention"
    recipes = _recipes(options.device, capability, left_out)
    attentions = [OWN_ATTENTION, *(name for name in pinned if suite_trials.can_hold(options, name, problem))]
    choices = _choices(have, attentions, recipes, heads=(None,), cuda=cuda, fusable=False, pads=False)
    # With parts, attention is te-bench's own, and a recipe brings a head in FP8.
    own_attention = [choice for choice in choices if choice.attention == OWN_ATTENTION and choice.precision != "fp32"]
    choices += [dataclasses.replace(choice, parts=ALL) for choice in own_attention]
    # A graph does not wait for Python. With transformers' own attention it would hold a mask, and lose the fast kernel.
    eager = [choice for choice in own_attention if choice.mode == "eager"] if cuda else []
    choices += [dataclasses.replace(choice, parts=ALL, mode="cudagraph") for choice in eager]
    # Around compiled blocks the model runs eagerly: transformers leaves a causal mask out, and the fast kernel stays.
    choices += [dataclasses.replace(choice, mode=PER_BLOCK) for choice in eager]
    choices += _of_rivals() if cuda else []
    if cuda and not own.facts.blocks:
        choices = [choice for choice in choices if choice.mode != PER_BLOCK]
        left_out[naming.COMPILED_BLOCKS] = "the model has no nn.ModuleList of blocks"
    return Question(
        model=own.source.model,
        said=" ".join(run_options.words(dataclasses.replace(options, tokens=None, batch=None, budget_s=None))),
        given=options.model or "",
        cls=own.facts.cls,
        blocks=own.facts.blocks,
        title=f"{own.source.model}, {problem['batch']} x {problem['block']} tokens",
        device=options.device,
        problem=problem,
        vocab=vocab,
        padded_vocab=vocab,
        have=have,
        choices=tuple(in_order(have, choices)),
        preset=False,
        text=own.facts.text,
        logits=own.facts.logits,
        left_out=left_out,
        optimizer=own.optimizer,
    )


def _of_rivals() -> list[Choice]:
    """Return the rivals' steps of a user's model, each as the rival's users train."""
    order = (None, *RECIPES)  # of the budget, tensorwise scaling comes first: torchao's fastest
    adopting = sorted(
        ((name, rivals.load(name)) for name in rivals.adopting()),
        key=lambda one: (*order, one[1].recipe).index(one[1].recipe),
    )
    return [
        Choice(attention=OWN_ATTENTION, precision=rival.precision, recipe=rival.recipe, mode=mode, rival=name)
        for name, rival in adopting
        if rival.adoption is not None
        for mode in rival.adoption.modes
    ]


def _of_preset(options: Options, capability: tuple[int, int] | None) -> Question:
    assert options.model is not None, "the command line asks for it"
    config = configs()[options.model]
    cuda = options.device == "cuda"
    problem = _sized(options, config.block_size)
    dropout, vocab = config.dropout, config.vocab_size
    # The user's kernel is what SDPA chooses on an NVIDIA GPU. On a CPU SDPA's flash kernel has no dropout.
    have = Choice(attention="manual" if dropout and not cuda else "flash")
    padded = -(-vocab // suite_trials.MULTIPLE) * suite_trials.MULTIPLE
    fusable = cuda and not dropout
    left_out = {"float8_current_scaling_dpa": "attention in FP8 is off unless asked for"}
    if not fusable:
        left_out["fused blocks"] = "no fused kernel has dropout" if cuda else "te-bench's fused step is for GPUs"
    recipes = _recipes(options.device, capability, left_out)
    attentions = [name for name in ATTENTIONS[options.device] if suite_trials.can_hold(options, name, problem)]
    attentions = [have.attention, *(name for name in attentions if name != have.attention and not dropout)]
    pads = padded != vocab
    choices = _choices(have, attentions, recipes, heads=(None, CHUNKED), cuda=cuda, fusable=fusable, pads=pads)
    return Question(
        model=options.model,
        said=f"--model {options.model}",
        title=f"{suite_trials.called(problem)}, {problem['batch']} x {problem['block']} tokens",
        device=options.device,
        problem=problem,
        vocab=vocab,
        padded_vocab=padded,
        have=have,
        choices=tuple(choices),
        left_out=left_out,
    )


def _recipes(device: str, capability: tuple[int, int] | None, left_out: dict[str, str]) -> list[str]:
    """Return the recipes to measure there. A CPU emulates FP8, so one recipe is enough."""
    if device == "cpu":
        left_out["other recipes"] = f"a CPU emulates FP8, as {CURRENT} shows"
        return [CURRENT]
    if capability is not None and capability < (8, 9):
        left_out["FP8"] = f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores (8.9)"
        return []
    left_out |= REPLACED
    known = plugins.names("te_bench.models.recipe")
    return [name for name in (*RECIPES, *suite_trials.recipes()) if name in known and name not in REPLACED]


def _choices(
    have: Choice,
    attentions: list[str],
    recipes: list[str],
    *,
    heads: tuple[str | None, ...],
    cuda: bool,
    fusable: bool,
    pads: bool,
) -> list[Choice]:
    """Return each combination once, the user's first."""
    modes = ("eager", *WHOLE) if cuda else ("eager", "compile")
    precisions: list[dict[str, Any]] = [{}, *({"precision": "fp8", "recipe": name} for name in dict.fromkeys(recipes))]
    widths = (False, True) if pads else (False,)
    found = [have]
    found += [
        Choice(attention=attention, mode=mode, head=head, padded=padded, **precision)
        for mode in modes
        for attention in attentions
        for precision in precisions
        for head in heads
        for padded in widths
    ]
    if not cuda:
        found.append(dataclasses.replace(have, precision="fp32"))
    if fusable:
        found += [
            Choice(attention=attention, mode="cudagraph", head=head, fused=True, padded=pads, **precision)
            for attention in attentions
            for precision in precisions
            for head in ((CHUNKED, FP8_HEAD) if precision else (CHUNKED,))
        ]
    return in_order(have, list(dict.fromkeys(found)))


def rank(recipe: str | None) -> int:
    """Return a recipe's place in the order of measurement; others come last."""
    return (*RECIPES, recipe).index(DELAYED if recipe in REPLACED else recipe)


def in_order(have: Choice, choices: list[Choice]) -> list[Choice]:
    """Return choices in the order of measurement: the user's, captured steps, eager ones, compiled blocks, compiled models.

    Captured steps do not wait for Python, unlike eager steps of many kernels. Alike blocks share what is compiled, a model
    takes minutes. Of each, PyTorch's own come first, then rivals', then those with te.convert's parts.
    """
    modes = ("cudagraph", "eager", PER_BLOCK, *WHOLE)

    def place(choice: Choice) -> tuple[bool, int, int, int]:
        mode, whose = modes.index(choice.mode), 2 if choice.parts else 1 if choice.rival else 0
        return choice != have, min(mode, modes.index(WHOLE[0])), whose, mode

    return sorted(choices, key=place)


def alone(question: Question, workload: str, problem: Settings, **more: Any) -> Trial:
    """Return the trial of one part of a step."""
    fields: dict[str, Any] = {"attention": NO_ATTENTION, "protocol": "kernel", **more}
    threads = {name: value for name, value in question.problem.items() if name == "threads"}
    return Trial(workload=workload, device=question.device, problem={**threads, **problem}, **fields)
