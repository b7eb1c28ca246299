"""The answer of a ladder of training steps, in one sentence and one picture: the fastest configuration of each kind."""

from dataclasses import dataclass

from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.speed import OWN
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.measures import Rung
from te_bench.reports.analysis.rows import Group
from te_bench.reports.page import figures, text

#: Settings that only te-bench's own fast step has.
OWN_PARTS = ("head", "optimizer", "blocks")
EAGER = "PyTorch, eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The fastest configuration of one kind: who runs it and in which precision."""

    who: str
    precision: str
    rung: Rung
    seconds: float

    @property
    def name(self) -> str:
        attention = f", {self.rung.cell.trial.attention} attention" if self.who == EAGER else ""
        return f"{self.who}{attention}, {self.precision}"

    @property
    def takes(self) -> str:
        return f"{text.milliseconds(self.seconds)} ms"


def who(trial: Trial) -> str:
    """Whose step a trial times: te-bench's, a peer's, torch.compile's or eager PyTorch's."""
    if trial.problem.get("linears"):
        return "torchao under torch.compile"
    parts = any(trial.problem.get(part) for part in OWN_PARTS)
    if parts or trial.precision == "fp8" or trial.attention in OWN:
        return "te-bench"
    return EAGER if trial.mode == "eager" else "torch.compile"


def choices(group: Group) -> tuple[Choice, ...]:
    """The fastest configuration of each kind and precision, fastest first; of the baseline's kind, the baseline.

    The baseline stands for its kind because the ladder's speed-ups are quoted against it.
    """
    found: dict[tuple[str, str], Choice] = {}
    for rung in measures.ladder(group):  # fastest first
        if rung.latency_s is None:
            continue
        trial = rung.cell.trial
        choice = Choice(who=who(trial), precision=trial.precision, rung=rung, seconds=rung.latency_s)
        kind = (choice.who, choice.precision)
        if kind not in found or rung.is_baseline:
            found[kind] = choice
    return tuple(sorted(found.values(), key=lambda choice: choice.seconds))


def sentence(group: Group) -> str:
    """What the fastest step takes, then the baseline's kind, then the others; only two kinds or more make a headline."""
    fastest, *others = _several(group)
    others.sort(key=lambda other: not other.rung.is_baseline)
    told = []
    for other in others:
        ratio = measures.speedup(other.rung.cell, fastest.rung.cell)
        longer = f", {text.speedup(ratio)} as long" if ratio else ""
        told.append(f"{other.name}: {other.takes}{longer}.")
    return f"**{fastest.name}: {fastest.takes}. {told[0]}** {' '.join(told[1:])}".rstrip()


def figure(group: Group) -> figures.Drawing:
    """A bar for each kind, ms a step. Raises ValueError where fewer than two kinds were timed."""
    found = _several(group)
    alt = "; ".join(f"{choice.name} {choice.takes}" for choice in found)
    drawn = [
        figures.Bar(
            name=choice.name,
            value=choice.seconds * 1e3,
            remark=choice.takes,
            colour=figures.COLOURS[0] if choice.who == "te-bench" else figures.FAINT,
        )
        for choice in found
    ]
    caption = f"{group.title}, {group.where}"
    return figures.draw("headline", "headline", caption, alt, lambda: figures.bars(drawn, "ms a step"))


def _several(group: Group) -> tuple[Choice, ...]:
    found = choices(group)
    if len(found) < 2:
        raise ValueError(f"{group.suite}: a headline compares two kinds of training step or more; timed: {len(found)}")
    return found
