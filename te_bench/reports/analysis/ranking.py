"""Which configuration is the best, as far as paired processes tell; and what they do not tell apart, with the reason.

The one with the least time on average is compared with each of the others, process by process with the same seed. Another
counts as slower where the one-sided t-test of the mean log-ratio says so at 5 % over the number of comparisons; those that
remain are not distinguished from it. The truly fastest is then among them with a probability of 95 %, whichever was taken
for it: leaving it out needs one of its own comparisons to err (Bonferroni; multiple comparisons with the best, after Gupta
1965, Technometrics 7:225, and Hsu 1984, Ann. Stat. 12:1136). Losses are compared in the same way, by differences.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from te_bench.experiments import host
from te_bench.reports.analysis.measures import CONFIDENCE, Rung, same_work, seconds_by_seed
from te_bench.reports.analysis.rows import Cell
from te_bench.reports.page.table import Value
from te_bench.reports.page.text import MISSING

Values = Mapping[tuple[str, int], float]  # of processes, by run and seed

FASTEST, TIED, SLOWER, ALONE = WORDS = "fastest", "not distinguished", "slower", "one run"
COLUMN = "Ranking"
FEW = 5  # processes: up to so many are "only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Places of what was compared: the best, or all that are not told apart from it, then what is shown to be worse.

    alone: of a single process, or with no two seeds in common with the best: nothing can be said of them. Where nothing can
    be compared all are.
    """

    best: tuple[int, ...]
    worse: tuple[int, ...]
    alone: tuple[int, ...]


def rank(values: Sequence[Values]) -> Ranking:
    """Rank by paired differences, smaller is better; `values` come in the order of their estimates, the least first."""
    first = next((place for place, found in enumerate(values) if len(found) > 1), 0)
    least = values[first] if values else {}
    differences = [[value - least[pair] for pair, value in found.items() if pair in least] for found in values]
    rivals = [place for place, found in enumerate(differences) if place != first and len(found) > 1]
    if not rivals:
        return Ranking(best=(), worse=(), alone=tuple(range(len(values))))
    worse = tuple(place for place in rivals if _above_0(differences[place], len(rivals)))
    best = tuple(sorted({first, *rivals} - {*worse}))
    return Ranking(best=best, worse=worse, alone=tuple(p for p in range(len(values)) if p not in (*best, *worse)))


def _above_0(differences: Sequence[float], comparisons: int) -> bool:
    """Whether the mean is, by a one-sided t-test at 5 % over the comparisons. What does not vary at all was copied: no."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    least = float(stdtrit(len(differences) - 1, 1 - (1 - CONFIDENCE) / comparisons))
    return error > 0 and statistics.fmean(differences) > least * error


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The measured rungs that do the same work, by what intervals say of them; see Ranking."""

    fastest: tuple[Rung, ...]
    slower: tuple[Rung, ...]
    alone: tuple[Rung, ...]

    def word(self, rung: Rung) -> str | None:
        """What the table says of a rung; None of one that was not ranked."""
        if rung in self.fastest:
            return FASTEST if len(self.fastest) == 1 else TIED
        return SLOWER if rung in self.slower else ALONE if rung in self.alone else None

    def notes(self) -> list[str]:
        """How the words are to be read."""
        said = []
        if len(self.fastest) > 1:
            reason = why([rung.cell for rung in self.fastest])
            said.append(f"Not distinguished: paired runs do not tell these from the fastest ({reason}).")
        if self.slower:
            said.append("Slower: than the fastest, by paired t-tests at 5 % over all comparisons.")
        return said


def ranked(standing: Standing, rung: Rung) -> Value:
    """The word in a table, sorted from the fastest on; a dash where nothing was ranked, for all then ran once."""
    said = standing.word(rung) if standing.fastest else None
    return Value(text=said or MISSING, sort=WORDS.index(said) if said and said != ALONE else None)


def standing(rungs: Sequence[Rung]) -> Standing:
    """Of rungs in the order of `analysis.rungs`, the fastest first."""
    ranked = [rung for rung in rungs if rung.latency_s is not None]
    ranked = [rung for rung in ranked if same_work(ranked[0].cell, rung.cell)]
    ranking = rank([logarithms(rung.cell, "latency_s") for rung in ranked])
    fastest, slower, alone = (tuple(ranked[p] for p in each) for each in (ranking.best, ranking.worse, ranking.alone))
    return Standing(fastest=fastest, slower=slower, alone=alone)


def logarithms(cell: Cell, *samples: str) -> dict[tuple[str, int], float]:
    """`analysis.seconds_by_seed`, whose logarithms are what is compared: differences of them are ratios."""
    return {pair: math.log(seconds) for pair, seconds in seconds_by_seed(cell, *samples).items()}


def why(cells: Sequence[Cell]) -> str:
    """Why these are not told apart: how few processes there were, and who disturbed them, where the records say so."""
    n = min(len(cell.ok) for cell in cells)
    reasons = [f"{'only ' if n <= FEW else ''}{n} runs of each"]
    states = [record.device_state for cell in cells for record in cell.ok]
    said = [(state.get("cpu_others") or 0.0, busy) for state in states if (busy := host.disturbance(state))]
    if said:
        times = f" in {len(said)} of {len(states)} runs" if len(said) < len(states) else ""
        reasons.append(f"the machine was busy{times}: {max(said)[1]}")
    return "; ".join(reasons)
