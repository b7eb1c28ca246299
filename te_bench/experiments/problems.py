"""The problems of the workloads: each setting that a trial may have, with its type, its unit and its default.

`Trial.problem` holds the settings as the JSON that the trial's id hashes; `TrialProblem.of(trial)` reads them, and `to_json`
writes them back. A setting at its default need not be in the JSON: a new one leaves the ids of earlier trials as they are.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from te_bench import plugins

if TYPE_CHECKING:
    from te_bench.experiments.spec import Trial
    from te_bench.kernels.attention import Problem
    from te_bench.models.rivals import Rival
    from te_bench.models.sources import Source

#: Settings by name, as JSON holds them: a plan checks them by their workload's dataclass.
Settings = dict[str, Any]

#: How a trial's name shows a setting, in this order; of what is not here the id alone tells.
_SHOWN = {
    **dict.fromkeys(("model", "arm", "fault", "layer", "variant", "dtype", "kind", "call"), ""),
    "branch_at": "from",
    "bf16_from": "bf16-from",
    "batch": "b",
    "sequence": "s",
    "block": "t",
    "padded_vocab": "V",
    "heads": "h",
    "kv_heads": "g",
    "window_left": "w",
    "window_right": "w",
    "documents": "documents",
    "length": "t",
    "head_dim": "d",
    "lr_factor": "lr",
    "head": "head-",
    "optimizer": "adamw-",
    "weights": "weights-",
    "states": "states-",
    "parts": "parts-",
    "blocks": "blocks-",
    "checkpointing": "checkpointed-",
    **dict.fromkeys(("rival", "linears"), ""),
    "parallel": "",
    "world": "x",
    "shard": "shard",
    "sequence_parallel": "sp",
    "overlap": "overlap-",
    "gather": "gather-",
    "edge": "n",
    "tokens": "t",
    "in_features": "k",
    "out_features": "n",
    "m": "m",
    "n": "n",
    "k": "k",
    "d": "d",
    **dict.fromkeys(("scales", "epilogue", "backend"), ""),
}
_TYPES = {int: "a whole number", float: "a number", str: "a name", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProblem:
    """The settings of one trial; `said` are those that its JSON has."""

    threads: int | None = None  # of a CPU's torch
    said: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    others: ClassVar[str | None] = None  # the field that takes settings of any other name, where there is one

    @classmethod
    def of(cls, trial: "Trial") -> Self:
        """The trial's settings. Raises ValueError for one that is missing, not known, or of another type."""
        kind, settings = PROBLEMS[trial.workload], _settings(trial.workload)
        if not issubclass(kind, cls):
            raise ValueError(f"{trial.workload} poses no problem of the kind {cls.__name__}")
        others = {name: value for name, value in trial.problem.items() if name not in settings}
        if others and kind.others is None:
            plugins.check(f"setting of {trial.workload}", next(iter(others)), list(settings))
        for name, (hint, default) in settings.items():
            value = trial.problem.get(name)
            if isinstance(value, str) and all(kind is NoneType or get_origin(kind) is Literal for kind in _kinds(hint)):
                plugins.check(name, value, [choice for kind in _kinds(hint) for choice in get_args(kind)])
            if not _is(value, hint) and (name in trial.problem or default is MISSING):
                raise ValueError(f"{trial.workload} needs {_words(hint)} for {name!r}, got {value!r}")
        given: dict[str, Any] = {name: trial.problem[name] for name in settings if name in trial.problem}
        said = frozenset(given)
        if kind.others is not None:
            given[kind.others] = others
        return kind(**given, said=said)

    def to_json(self) -> dict[str, Any]:
        """The settings that the trial's JSON has, and any other that is not at its default."""
        values = {f.name: (getattr(self, f.name), f.default) for f in _fields(type(self))}
        kept = {name: value for name, (value, usual) in values.items() if name in self.said or value != usual}
        return kept | (getattr(self, self.others) if self.others else {})


def _fields(kind: type[TrialProblem]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if f.name not in ("said", kind.others)]


@functools.cache
def _settings(workload: str) -> dict[str, tuple[Any, Any]]:
    """{setting: (type, default or MISSING)}."""
    hints = get_type_hints(PROBLEMS[workload])
    return {f.name: (hints[f.name], f.default) for f in _fields(PROBLEMS[workload])}


@functools.cache
def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) not in (None, Literal) else (hint,)


def _is(value: object, hint: Any) -> bool:
    return any(
        value in get_args(kind)
        if get_origin(kind) is Literal
        else isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        for kind in _kinds(hint)
    )


def _words(hint: Any) -> str:
    names = [
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else _TYPES[kind] for kind in _kinds(hint)
    ]
    return " or ".join(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProblem(TrialProblem):
    """A model's training step; what is None is as the model, torch or training.step.Optim has it."""

    model: str  # a name of models.configs, or a user's
    block: int  # tokens of a sequence
    vocab: int
    padded_vocab: int
    layers: int | None = None  # fewer than the model has, which is how the check of a large one fits
    dropout: float | None = None
    head: str | None = None  # of kernels.linear_cross_entropy; None: all logits at once
    optimizer: str | None = None  # of kernels.adamw; None: torch's fused AdamW
    weights: Literal["bf16"] | None = None  # matrices that are trained, without a master; None: float32
    states: Literal["bf16", "fp8"] | None = None  # matrices' moments; None: float32
    blocks: Literal["fused"] | None = None  # None: one module after the other
    checkpointing: Literal["blocks"] | None = None  # whose activations are computed again; None: all are kept
    rival: str | None = None  # of models.rivals; None: te-bench's own passes
    linears: str | None = None  # what `rival` was called when all rivals were torchao's: GPT-2's published trials
    learning_rate: float | None = None
    min_learning_rate: float | None = None
    warmup: int | None = None  # steps
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    grad_clip: float | None = None  # the gradients' largest norm; 0: any
    accumulate: int | None = None  # micro-batches of a step
    data: str = "random"
    perturb_ulp: int | None = None  # units in the last place by which the weights are moved that it begins with
    fault: str | None = None  # of models.faults, planted into the recipe
    batch: int | Literal["max"] | None = None  # sequences of a micro-batch, over all ranks
    parallel: str | None = None  # a mode of training.parallel; None: one process
    world: int | None = None  # its ranks
    shard: int | None = None  # ranks of a group, of hsdp and fsdp2+tp
    sequence_parallel: Literal[True] | None = None  # of tp and fsdp2+tp: ranks share the tokens between layers
    overlap: Literal["symmetric"] | None = None  # of sequence_parallel's collectives with GEMMs; None: none
    gather: Literal["fp8"] | None = None  # of blocks' weights by fsdp2 or hsdp; None: in the dtype of their products
    arguments: str | None = None  # this and the following: of a user's model, as models.sources.Source has them
    config: str | None = None
    sha256: str | None = None
    inputs: str | None = None
    loss: str | None = None
    packages: str | None = None
    parts: Literal["all"] | None = None  # of te.convert, of a user's model; None: what a recipe needs

    @property
    def replicas(self) -> int:
        """Into how many parts its ranks divide a micro-batch."""
        from te_bench.training.parallel import replicas

        return 1 if self.world is None or self.parallel is None else replicas(self.parallel, self.world, self.shard)

    @property
    def source(self) -> "Source | None":
        """Where a user's model comes from; None for one of te-bench's own."""
        from te_bench.models.sources import Source

        return None if self.config is None and self.sha256 is None else Source.of(self)

    @property
    def against(self) -> "Rival | None":
        """The rival whose step it is."""
        from te_bench.models import rivals

        name = self.rival or self.linears
        return None if name is None else rivals.load(name)

    @property
    def as_it_is(self) -> bool:
        """Whether mode cudagraph captures the step with no compiler: fused blocks, a rival's own, te.convert's parts."""
        if self.against is not None:
            return self.against.own_blocks
        return self.blocks is not None or self.parts is not None

    @property
    def optim(self) -> dict[str, Any]:
        """What it says of training.step.Optim's fields."""
        values = {name: getattr(self, name) for name in OPTIM}
        return {name: value for name, value in values.items() if value is not None}


#: Settings that are fields of training.step.Optim.
OPTIM = (
    *("learning_rate", "min_learning_rate", "warmup", "weight_decay"),
    *("beta1", "beta2", "grad_clip", "accumulate"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStepProblem(StepProblem):
    """One training step at a fixed batch."""

    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBatchProblem(StepProblem):
    """The largest batch that fits."""

    memory_limit_gib: float | None = None  # None: all of the GPU
    batch: int | None = None  # of one try


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProblem(StepProblem):
    """A training to a curve, of so many steps or seconds."""

    batch: int | Literal["max"]  # "max": the largest that fits
    data: str  # a data set; a text file goes by its name
    tokenizer: str | None = None
    corpus: str | None = None  # key of the token cache
    data_sha256: str | None = None
    order: Literal["once"] | None = None  # of the training windows, each taken once; None: they begin anywhere
    steps: int | None = None
    budget_s: float | None = None  # in place of steps
    eval_every: int | None = None  # steps
    eval_every_s: float | None = None
    eval_tokens: int | None = None  # None: the whole validation part
    early_eval_tokens: int | None = None  # of evaluations before the last quarter of the steps
    evaluate: Literal["both"] | None = None  # val_loss in bf16 whatever the trial trains in, and as it trains
    probes: int | None = None  # about how many looks at the FP8 numerics, at evaluations that are evenly spaced
    memory_limit_gib: float | None = None
    share: int | None = None  # trials at a time on the GPU, where there are several
    arm: Literal["control", "aa", "recipe", "broken"] | None = None  # what it is in a study of convergence
    branch_at: int | None = None  # steps of the bf16 trunk that it goes on from; None: it begins with the first step
    bf16_from: int | None = None  # step from which on it trains in bf16; None: in its own precision to the end
    lr_factor: float | None = None  # what learning_rate was multiplied by


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem(TrialProblem):
    """One attention call on (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    kv_heads: int | None = None  # where keys and values are shared
    window_left: int | None = None  # row i sees keys i - left to i + right alone; -1: no end
    window_right: int | None = None
    documents: int | None = None  # so many in each sequence, of `lengths`, all packed one after the other
    dropout: float = 0.0

    @property
    def window(self) -> tuple[int, int] | None:
        if self.window_left is None or self.window_right is None:
            return None
        return self.window_left, self.window_right

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of a sequence's documents: each half of what is left, rounded up, but the last, which is the rest."""
        found, left = [], self.length
        for _ in range((self.documents or 1) - 1):
            found.append(left - left // 2)
            left //= 2
        return (*found, left)

    def posed(self, dtype: str, device: str, capability: tuple[int, int] | None = None) -> "Problem":
        """What a backend is asked to do."""
        from te_bench.kernels.attention import Problem

        return Problem(
            batch=self.batch * len(self.lengths),
            heads=self.heads,
            length=max(self.lengths),
            head_dim=self.head_dim,
            dtype=dtype,
            causal=self.causal,
            dropout=float(self.dropout),
            device=device,
            capability=capability,
            kv_heads=self.kv_heads,
            window=self.window,
            packed=self.documents is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProblem(TrialProblem):
    """A transformer layer on (sequence, batch, hidden)."""

    layer: str  # a name of models.quickstart
    model: str | None = None  # whose layer it is, of these sizes; None: the quickstart's
    variant: str  # "mlp" is the norm and MLP alone
    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int
    dropout: float
    mask: str  # "full" or "causal"
    recipe_settings: Mapping[str, Any] = field(default_factory=dict)
    others: ClassVar[str | None] = "recipe_settings"


@dataclass(frozen=True, kw_only=True, slots=True)
class CeilingsProblem(TrialProblem):
    """What is copied and multiplied to see what the device reaches."""

    copy_bytes: int
    edge: int  # the GEMM's M = N = K


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmProblem(TrialProblem):
    """One GEMM, as kernels.gemm.table.GemmShape says it, by one of its rivals."""

    m: int
    n: int
    k: int
    dtype: Literal["e4m3", "bf16"]  # of the operands
    backend: str
    scales: Literal["tensor", "row", "block"] | None = None
    fast_accum: bool = False
    epilogue: Literal["activated", "gradient"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearProblem(TrialProblem):
    """One Linear of a training step: x (tokens, in_features), W (out_features, in_features)."""

    tokens: int
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadProblem(TrialProblem):
    """Loss and gradients of a head over n rows of d features, as kernels.linear_cross_entropy.table.HeadShape says it."""

    n: int
    d: int
    vocab: int
    padded: int
    head: str  # of kernels.linear_cross_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceProblem(TrialProblem):
    """A norm or an activation of m rows and n columns, as suites.pieces.PIECES has it."""

    kind: str  # of kernels.norm or kernels.activation
    call: str  # a function of their contract
    m: int
    n: int
    backend: str


#: {workload: its problem}.
PROBLEMS: dict[str, type[TrialProblem]] = {
    "train_step": TrainStepProblem,
    "scaling": TrainStepProblem,  # over one GPU or several, and what it takes of each
    "survey": TrainStepProblem,  # looked at, and not timed
    "max_batch": MaxBatchProblem,
    "training": TrainingProblem,
    "attention": AttentionProblem,
    "attention_numerics": AttentionProblem,
    "layer": LayerProblem,
    "ceilings": CeilingsProblem,
    "gemm": GemmProblem,
    "linear": LinearProblem,
    "linear_cross_entropy": HeadProblem,
    "piece": PieceProblem,
}


def is_step(trial: "Trial") -> bool:
    """Whether its workload makes training steps; one of which no problem is known makes none."""
    return issubclass(PROBLEMS.get(trial.workload, TrialProblem), StepProblem)


def source_of(trial: "Trial") -> "Source | None":
    """Where the user's model comes from whose step the trial is; None for any other trial."""
    return StepProblem.of(trial).source if is_step(trial) else None


def trunk_of(trial: "Trial") -> "Trial | None":
    """The training whose first `branch_at` steps the trial goes on from, its study's bf16 control; None where it has none.

    It differs in what an arm is: precision, recipe, fault, the weights' perturbation and an FP8 head.
    """
    if trial.problem.get("branch_at") is None:
        return None
    control = _in_bf16(trial, without=("perturb_ulp", "fault"))
    return control.with_(arm="control")


def end_of(trial: "Trial") -> "Trial | None":
    """The training in bf16 that the trial's steps from `bf16_from` on are; None where it ends in its own precision."""
    if trial.problem.get("bf16_from") is None:
        return None
    return _in_bf16(trial, without=("fault", "bf16_from", "perturb_ulp"))


def _in_bf16(trial: "Trial", without: tuple[str, ...]) -> "Trial":
    problem = {name: value for name, value in trial.problem.items() if name not in without}
    problem |= {"head": "chunked"} if problem.get("head") == "fp8" else {}
    return dataclasses.replace(trial, problem=problem, precision="bf16", recipe=None)


def world_of(trial: "Trial") -> int:
    """How many ranks the trial has; 1 for any that spans none."""
    world = trial.problem.get("world")
    return world if isinstance(world, int) else 1


def backend_of(trial: "Trial") -> str:
    """The backend of torch.distributed between its ranks."""
    return "nccl" if trial.device == "cuda" else "gloo"


def ranks_of(trial: "Trial") -> dict[str, Any]:
    """What a record's work says of ranks; nothing of a trial that spans none."""
    if trial.problem.get("world") is None:
        return {}
    divided = {
        name: trial.problem[name]
        for name in ("parallel", "shard", "sequence_parallel", "overlap")
        if name in trial.problem
    }
    return {"world": world_of(trial), **divided, "backend": backend_of(trial)}


def label(settings: Mapping[str, Any]) -> str:
    """The settings that tell one problem from another at a glance, as a trial's name shows them."""
    said = {name: "" if settings[name] is True else settings[name] for name in _SHOWN if name in settings}
    words = [f"{_SHOWN[name]}{value}" for name, value in said.items()]
    if "causal" in settings:  # of attention alone
        words.append("causal" if settings["causal"] else "full")
        words += [f"dropout{settings['dropout']}"] if settings.get("dropout") else []
    return "-".join(words)
