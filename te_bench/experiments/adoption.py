"""Apply a suite to a user's model: what planning knows of the model, and which of the suite's trials it can run.

The model runs a suite's trials of PyTorch's attention kernels, precisions, execution modes and optimizers. Heads, fused
blocks and padded vocabularies belong to te-bench's own decoders. In the suites of LADDERS the model's steps are compared
with the same steps with te.convert's parts and, on a GPU, with torch.compile of each block and the rivals that can train
the model.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from te_bench.experiments.problems import is_step
from te_bench.experiments.run_options import Options
from te_bench.experiments.spec import OWN_ATTENTION, Experiment, Trial
from te_bench.models import rivals, sources
from te_bench.models.sources import PINNED, Facts, Source

MANUAL = "manual"
OURS = {"head": "heads", "blocks": "fused blocks"}
LADDERS = ("speed", "nanogpt")  # suites that ask for the fastest step
ALL = "all"  # parts of te.convert
CHUNKED = "chunked"  # the head in bf16, also of a user's model whose parts are in FP8
OPTIMIZER = "triton"  # of te-bench's own steps
PER_BLOCK = "compile-blocks"  # torch.compile's users compile a model so, and torchao's
CONVERTED = ("bf16", "fp8")  # precisions that the parts support


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoptee:
    """A user's model, and what is known of it."""

    source: Source
    facts: Facts

    @property
    def attentions(self) -> tuple[str, ...]:
        """The backends that can replace the model's scaled_dot_product_attention; none if the model does not call it."""
        return (*([MANUAL] if self.facts.manual else []), *PINNED) if self.facts.sdpa else ()

    @property
    def optimizer(self) -> str | None:
        """The optimizer, in kernels.adamw, of captured steps with te.convert's parts; None: torch's fused AdamW."""
        return OPTIMIZER if self.facts.float32 else None


def adoptee(options: Options) -> Adoptee | None:
    """Return the user's model that --model names; None for a preset or no model. Raise ValueError if it cannot train."""
    if options.model is None:
        return None
    return _known(options.model, options.model_args or (), options.inputs, options.loss, options.tokens)


@functools.cache
def _known(
    model: str, arguments: tuple[str, ...], inputs: str | None, loss: str | None, tokens: int | None
) -> Adoptee | None:
    source = sources.identify(model, arguments, inputs, loss)
    if source is None:
        return None
    return Adoptee(source=source, facts=sources.ask(source, tokens=tokens or sources.TRIED))


def adapt(experiment: Experiment, options: Options) -> Experiment:
    """Return the suite's experiment for the user's model: the trials that apply, and a sentence on each kind that does not.

    Raise ValueError for a training suite if the model does not learn text.
    """
    own = adoptee(options)
    if own is None:
        return experiment
    if not own.facts.text and any(trial.workload == "training" for trial in experiment.trials):
        raise ValueError(
            f"--model {options.model}: the suite {experiment.suite} trains on text, and this model takes none; the suites "
            "speed, nanogpt, fp8, memory and scaling measure its step"
        )
    adapted = [t for trial in experiment.trials for t in _adapted(trial, own)]
    baseline = next((t.cell for t in adapted if is_step(t)), adapted[0].cell)
    left_out = (*experiment.left_out, *_left_out(experiment.trials), *_without(own, experiment.trials))
    if experiment.suite in LADDERS:
        others = [*_per_block(adapted), *_of_rivals(adapted)]
        if any(trial.mode == PER_BLOCK for trial in others) and not own.facts.blocks:
            others = [trial for trial in others if trial.mode != PER_BLOCK]
            left_out += ("torch.compile of each block: the model has no nn.ModuleList of blocks",)
        adapted += [*_with_parts(adapted), *others]
        left_out += tuple(f"{what}: {why}" for what, why in without_rivals(options.device).items())
    trials = list({trial.id: trial for trial in adapted}.values())
    cells = {trial.cell: one.cell for trial in experiment.trials for one in _adapted(trial, own)[:1]}
    return dataclasses.replace(
        experiment,
        trials=tuple(trials),
        baseline=baseline,
        left_out=left_out,
        judgement=experiment.judged_in(cells),
    )


def _adapted(trial: Trial, own: Adoptee) -> list[Trial]:
    """Return the trial with the model's own attention and, if the model can use it, with the trial's kernel.

    Return none for a rival's trial: which rivals train a user's model does not depend on the suite (_of_rivals).
    """
    if not is_step(trial):
        return [trial]
    p = trial.problem
    if p.get("rival") or p.get("linears"):
        return []
    bf16_head = p.get("parts") and p.get("head") == CHUNKED
    problem = {key: value for key, value in p.items() if key not in OURS or (key == "head" and bf16_head)}
    vocab = {"vocab": own.facts.vocab, "padded_vocab": own.facts.vocab}
    adapted = dataclasses.replace(trial, attention=OWN_ATTENTION, problem={**problem, **own.source.settings, **vocab})
    if trial.attention not in own.attentions or _is_arm(trial):
        return [adapted]
    return [adapted, dataclasses.replace(adapted, attention=trial.attention)]


def _with_parts(trials: Iterable[Trial]) -> list[Trial]:
    """Return the steps with te-bench's kernels in the model; te-bench's attention replaces the model's."""
    return [
        trial.with_(parts=ALL)
        for trial in trials
        if is_step(trial) and trial.attention == OWN_ATTENTION and trial.precision in CONVERTED
    ]


def _per_block(trials: Iterable[Trial]) -> list[Trial]:
    """Return torch.compile's bf16 steps of the model's own attention with each block compiled by itself; on a GPU."""
    return [
        dataclasses.replace(trial, mode=PER_BLOCK)
        for trial in trials
        if is_step(trial) and trial.device == "cuda" and trial.attention == OWN_ATTENTION
        if trial.precision == "bf16" and trial.mode in ("compile", "compile-reduce-overhead")
    ]


def _of_rivals(trials: Iterable[Trial]) -> list[Trial]:
    """Return rivals' steps of the model with its own attention, once for each seed; none on a CPU."""
    like = {trial.seed: trial for trial in trials if is_step(trial)}
    return [
        dataclasses.replace(
            trial,
            attention=OWN_ATTENTION,
            problem={**{key: value for key, value in trial.problem.items() if key != "optimizer"}, "rival": name},
            precision=rival.precision,
            recipe=rival.recipe,
            mode=mode,
        )
        for trial in like.values()
        if trial.device == "cuda"
        for name, rival in ((name, rivals.load(name)) for name in rivals.adopting())
        if rival.adoption is not None
        for mode in rival.adoption.modes
    ]


def without_rivals(device: str) -> dict[str, str]:
    """Return {rivals of one GPU that do not train a user's model on that device: why}."""
    if device != "cuda":
        return {"rivals": "for a GPU"}
    others = [name for name in rivals.names() if rivals.load(name).modes and name not in rivals.adopting()]
    return {f"rivals {', '.join(others)}": "for te-bench's own models"} if others else {}


def _is_arm(trial: Trial) -> bool:
    """Return whether the trial's losses are compared, for which one attention is enough."""
    return "arm" in trial.problem or "lr_factor" in trial.problem


def _left_out(trials: Iterable[Trial]) -> list[str]:
    steps = [trial for trial in trials if is_step(trial) and "parts" not in trial.problem]
    found = [words for key, words in OURS.items() if any(trial.problem.get(key) for trial in steps)]
    if any(trial.problem["padded_vocab"] != trial.problem["vocab"] for trial in steps):
        found.append("a padded vocabulary")
    return [f"{', '.join(found)}: for te-bench's own models"] if found else []


def _without(own: Adoptee, trials: Iterable[Trial]) -> list[str]:
    asked = {trial.attention for trial in trials if is_step(trial) and not _is_arm(trial)}
    missing = sorted(asked - {*own.attentions, OWN_ATTENTION})
    kernels = [name for name in missing if name in PINNED]
    others = [name for name in missing if name not in PINNED]
    said = [f"attention {', '.join(kernels)}: the model calls no scaled_dot_product_attention"] if kernels else []
    return said + ([f"attention {', '.join(others)}: the model cannot be asked for it"] if others else [])
