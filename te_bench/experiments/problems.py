"""The problems of the workloads: every setting of a trial, with type, unit and default.

`Trial.problem` holds the settings as the JSON that the trial's id hashes. `TrialProblem.of(trial)` reads them, `to_json`
writes them. A setting at its default may be absent from the JSON, so a new setting does not change earlier trials' ids.
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

#: Settings by name, as in JSON; a plan checks them by their workload's dataclass.
Settings = dict[str, Any]

#: How a trial's name shows a setting, in this order. Other settings only change the id.
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
    "scales": "",
    "fast_accum": "fast",
    **dict.fromkeys(("epilogue", "backend"), ""),
}
_TYPES = {int: "a whole number", float: "a number", str: "a name", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProblem:
    """The settings of one trial; `said` are those that its JSON contains."""

    threads: int | None = None  # of a CPU's torch
    said: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    others: ClassVar[str | None] = None  # the field that takes settings of any other name, if there is one

    @classmethod
    def of(cls, trial: "Trial") -> Self:
        """Return the trial's settings. Raise ValueError for a missing, unknown or wrongly typed one."""
        kind, settings = PROBLEMS[trial.workload], _settings(trial.workload)
        if not issubclass(kind, cls):
            raise ValueError(f"{trial.workload} poses no problem of the kind {cls.__name__}")
        others = {name: value for name, value in trial.problem.items() if name not in settings}
        if others and kind.others is None:
            plugins.check(f"setting of {trial.workload}", next(iter(others)), list(settings))
        for name, (hint, default) in settings.items():
            if name not in trial.problem and default is not MISSING:
                continue
            value = trial.problem.get(name)
            values, types = _legal(hint)
            if isinstance(value, str) and set(types) <= {NoneType}:
                plugins.check(name, value, values)
            if not _is(value, hint):
                raise ValueError(f"{trial.workload} needs {_words(hint)} for {name!r}, got {value!r}")
        given: dict[str, Any] = {name: trial.problem[name] for name in settings if name in trial.problem}
        said = frozenset(given)
        if kind.others is not None:
            given[kind.others] = others
        return kind(**given, said=said)

    def to_json(self) -> dict[str, Any]:
        """Return the settings of the trial's JSON, and all others that differ from their default."""
        values = {f.name: (getattr(self, f.name), f.default) for f in _fields(type(self))}
        kept = {name: value for name, (value, usual) in values.items() if name in self.said or value != usual}
        return kept | (getattr(self, self.others) if self.others else {})


def _fields(kind: type[TrialProblem]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if f.name not in ("said", kind.others)]


@functools.cache
def _settings(workload: str) -> dict[str, tuple[Any, Any]]:
    """Return {setting: (type, default or MISSING)}."""
    hints = get_type_hints(PROBLEMS[workload])
    return {f.name: (hints[f.name], f.default) for f in _fields(PROBLEMS[workload])}


@functools.cache
def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) not in (None, Literal) else (hint,)


@functools.cache
def _legal(hint: Any) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """Return the values that a hint lists, and the types of which it takes every value."""
    values = [choice for kind in _kinds(hint) if get_origin(kind) is Literal for choice in get_args(kind)]
    types = [kind for kind in _kinds(hint) if get_origin(kind) is not Literal]
    return tuple(values), (*types, int) if float in types else tuple(types)


def _is(value: object, hint: Any) -> bool:
    values, types = _legal(hint)
    return value in values or (bool in types if isinstance(value, bool) else isinstance(value, types))


def _words(hint: Any) -> str:
    names = [
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else _TYPES[kind] for kind in _kinds(hint)
    ]
    return " or ".join(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProblem(TrialProblem):
    """A model's training step; None: the default of the model, torch or training.step.Optim."""

    model: str  # a name of models.configs, or a user's
    block: int  # tokens of a sequence
    vocab: int
    padded_vocab: int
    layers: int | None = None  # fewer than the model's, for the check of a large model
    dropout: float | None = None
    head: str | None = None  # of kernels.linear_cross_entropy; None: all logits at once
    optimizer: str | None = None  # of kernels.adamw; None: torch's fused AdamW
    weights: Literal["bf16"] | None = None  # trained matrices, without a master copy; None: float32
    states: Literal["bf16", "fp8"] | None = None  # matrices' moments; None: float32
    blocks: Literal["fused"] | None = None  # None: one module after the other
    checkpointing: Literal["blocks"] | None = None  # what recomputes its activations; None: nothing
    rival: str | None = None  # of models.rivals; None: te-bench's own passes
    linears: str | None = None  # name of `rival` when all rivals were torchao's, in GPT-2's published trials
    learning_rate: float | None = None
    min_learning_rate: float | None = None
    warmup: int | None = None  # steps
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    grad_clip: float | None = None  # the gradients' largest norm; 0: unlimited
    accumulate: int | None = None  # micro-batches of a step
    data: str = "random"
    perturb_ulp: int | None = None  # units in the last place by which the initial weights are moved
    fault: str | None = None  # of models.faults, planted into the recipe
    batch: int | Literal["max"] | None = None  # sequences of a micro-batch, over all ranks
    parallel: str | None = None  # a mode of training.parallel; None: one process
    world: int | None = None  # number of ranks
    shard: int | None = None  # ranks of a group, for hsdp and fsdp2+tp
    sequence_parallel: Literal[True] | None = None  # for tp and fsdp2+tp: ranks share the tokens between layers
    overlap: Literal["symmetric"] | None = None  # of sequence_parallel's collectives with GEMMs; None: no overlap
    gather: Literal["fp8"] | None = None  # format of blocks' weights in fsdp2 and hsdp; None: their products' dtype
    arguments: str | None = None  # this and the following: for a user's model, as in models.sources.Source
    config: str | None = None
    sha256: str | None = None
    inputs: str | None = None
    loss: str | None = None
    packages: str | None = None
    parts: Literal["all"] | None = None  # of te.convert, for a user's model; None: what a recipe needs

    @property
    def replicas(self) -> int:
        """Return the number of parts into which the ranks divide a micro-batch."""
        from te_bench.training.parallel import replicas

        return 1 if self.world is None or self.parallel is None else replicas(self.parallel, self.world, self.shard)

    @property
    def source(self) -> "Source | None":
        """Return the source of a user's model; None for te-bench's own model."""
        from te_bench.models.sources import Source

        return None if self.config is None and self.sha256 is None else Source.of(self)

    @property
    def against(self) -> "Rival | None":
        """Return the rival whose step this is, or None."""
        from te_bench.models import rivals

        name = self.rival or self.linears
        return None if name is None else rivals.load(name)

    @property
    def as_it_is(self) -> bool:
        """Return whether mode cudagraph captures the step uncompiled: fused blocks, a rival's own, te.convert's parts."""
        if self.against is not None:
            return self.against.own_blocks
        return self.blocks is not None or self.parts is not None

    @property
    def optim(self) -> dict[str, Any]:
        """Return the settings that are fields of training.step.Optim."""
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

    memory_limit_gib: float | None = None  # None: the GPU's memory
    batch: int | None = None  # of one try


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProblem(StepProblem):
    """A training with loss curves, for a number of steps or seconds."""

    batch: int | Literal["max"]  # "max": the largest that fits
    data: str  # a data set; a text file goes by its name
    tokenizer: str | None = None
    corpus: str | None = None  # key of the token cache
    data_sha256: str | None = None
    order: Literal["once"] | None = None  # each training window is taken once; None: windows begin anywhere
    steps: int | None = None
    budget_s: float | None = None  # in place of steps
    eval_every: int | None = None  # steps
    eval_every_s: float | None = None
    eval_tokens: int | None = None  # None: the whole validation part
    early_eval_tokens: int | None = None  # of evaluations before the last quarter of the steps
    evaluate: Literal["both"] | None = None  # val_loss in bf16, and in the trial's own precision
    probes: int | None = None  # approximate number of FP8 probes, at evenly spaced evaluations
    memory_limit_gib: float | None = None
    share: int | None = None  # trials at a time on the GPU, if several
    arm: Literal["control", "aa", "recipe", "broken"] | None = None  # role in a study of convergence
    branch_at: int | None = None  # steps of the bf16 trunk that it continues; None: it has no trunk
    bf16_from: int | None = None  # step from which it trains in bf16; None: its own precision to the end
    lr_factor: float | None = None  # factor that learning_rate includes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem(TrialProblem):
    """One attention call on (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    kv_heads: int | None = None  # if keys and values are shared
    window_left: int | None = None  # row i sees keys i - left to i + right; -1: unlimited
    window_right: int | None = None
    documents: int | None = None  # documents in each sequence, of `lengths`, packed one after the other
    dropout: float = 0.0

    @property
    def window(self) -> tuple[int, int] | None:
        if self.window_left is None or self.window_right is None:
            return None
        return self.window_left, self.window_right

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of a sequence's documents: each is half of the rest, rounded up; the last is the rest."""
        found, left = [], self.length
        for _ in range((self.documents or 1) - 1):
            found.append(left - left // 2)
            left //= 2
        return (*found, left)

    def posed(self, dtype: str, device: str, capability: tuple[int, int] | None = None) -> "Problem":
        """Return the problem as the attention backends take it."""
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
    model: str | None = None  # the model with a layer of these sizes; None: the quickstart's layer
    variant: str  # "mlp": the norm and MLP only
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
    """A copy and a GEMM, which measure the device's ceilings."""

    copy_bytes: int
    edge: int  # the GEMM's M = N = K


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmProblem(TrialProblem):
    """One GEMM as in kernels.gemm.table.GemmShape, by one of its rivals."""

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
    """Loss and gradients of a head over n rows of d features, as in kernels.linear_cross_entropy.table.HeadShape."""

    n: int
    d: int
    vocab: int
    padded: int
    head: str  # of kernels.linear_cross_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceProblem(TrialProblem):
    """A norm or an activation of m rows and n columns, as in suites.pieces.PIECES."""

    kind: str  # of kernels.norm or kernels.activation
    call: str  # a function of their contract
    m: int
    n: int
    backend: str


#: {workload: its problem}.
PROBLEMS: dict[str, type[TrialProblem]] = {
    "train_step": TrainStepProblem,
    "scaling": TrainStepProblem,  # on one GPU or several, with the memory of each
    "survey": TrainStepProblem,  # profiled, not timed
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
    """Return whether the trial's workload makes training steps; an unknown workload makes none."""
    return issubclass(PROBLEMS.get(trial.workload, TrialProblem), StepProblem)


def source_of(trial: "Trial") -> "Source | None":
    """Return the source of the user's model whose step the trial is; None for any other trial."""
    return StepProblem.of(trial).source if is_step(trial) else None


def trunk_of(trial: "Trial") -> "Trial | None":
    """Return the bf16 control whose first `branch_at` steps the trial continues; None if it has no trunk.

    The control differs in precision, recipe, fault, the weights' perturbation and an FP8 head.
    """
    if trial.problem.get("branch_at") is None:
        return None
    control = _in_bf16(trial, without=("perturb_ulp", "fault"))
    return control.with_(arm="control")


def end_of(trial: "Trial") -> "Trial | None":
    """Return the bf16 training that the trial's steps from `bf16_from` on equal; None without `bf16_from`."""
    if trial.problem.get("bf16_from") is None:
        return None
    return _in_bf16(trial, without=("fault", "bf16_from", "perturb_ulp"))


def _in_bf16(trial: "Trial", without: tuple[str, ...]) -> "Trial":
    problem = {name: value for name, value in trial.problem.items() if name not in without}
    problem |= {"head": "chunked"} if problem.get("head") == "fp8" else {}
    return dataclasses.replace(trial, problem=problem, precision="bf16", recipe=None)


def world_of(trial: "Trial") -> int:
    """Return the trial's number of ranks; 1 without ranks."""
    world = trial.problem.get("world")
    return world if isinstance(world, int) else 1


def backend_of(trial: "Trial") -> str:
    """Return the torch.distributed backend between the trial's ranks."""
    return "nccl" if trial.device == "cuda" else "gloo"


def ranks_of(trial: "Trial") -> dict[str, Any]:
    """Return what a record's work says of ranks; {} without ranks."""
    if trial.problem.get("world") is None:
        return {}
    divided = {
        name: trial.problem[name]
        for name in ("parallel", "shard", "sequence_parallel", "overlap")
        if name in trial.problem
    }
    return {"world": world_of(trial), **divided, "backend": backend_of(trial)}


def label(settings: Mapping[str, Any]) -> str:
    """Return the settings that tell problems apart, as a trial's name shows them."""
    said = {
        name: "" if settings[name] is True else settings[name]
        for name in _SHOWN
        if settings.get(name, False) is not False
    }
    words = [f"{_SHOWN[name]}{value}" for name, value in said.items()]
    if "causal" in settings:  # only of attention
        words.append("causal" if settings["causal"] else "full")
        words += [f"dropout{settings['dropout']}"] if settings.get("dropout") else []
    return "-".join(words)
