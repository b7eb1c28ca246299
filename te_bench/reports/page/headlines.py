"""The answers of a report in a sentence each. What intervals do not tell apart is said to be so, with the reason."""

from collections.abc import Sequence

from te_bench.reports.analysis import curves, layers, measures, ranking
from te_bench.reports.analysis.measures import Rung
from te_bench.reports.analysis.rows import Group, Results
from te_bench.reports.page import text, verdict_tables

NAMED = 4  # configurations that a sentence names; of more, the number of the rest


def headlines(results: Results) -> list[str]:
    """The most important answers first; what ended how, when nothing ended ok."""
    found = []
    for group in results.groups:
        found += [(-1, f"{v.sentence} ({v.study.title}, {group.where})") for v in verdict_tables.of_group(group)]
        found += [(0, sentence) for sentence in _fastest(group, measures.ladder(group), "")]
        for variant in layers.variants(group):
            if all(map(variant.comparable, variant.rungs)):
                found += [(0, sentence) for sentence in _fastest(group, variant.rungs, f" layer, {variant.name}")]
        found += [(1, answer) for answer in [*_lowest_losses(group), *_attention(group)]]
        largest = next((m for m in measures.max_batch(group) if m.max_batch is not None), None)
        if largest:
            found.append((2, f"Largest batch: {largest.cell.label}: {text.count(largest.max_batch)} on {group.where}."))
    if not found and any(row.outcome == "ok" for row in results.rows):
        return [f"{results.outcomes['ok']} of {len(results.rows)} trials ended ok; none of them ranks configurations."]
    if not found:
        ends = ", ".join(f"{n} {outcome}" for outcome, n in results.outcomes.items()) or "none was planned"
        return [f"Nothing was measured: 0 of {len(results.rows)} trials ended ok ({ends})."]
    return [sentence for _, sentence in sorted(found, key=lambda item: item[0])]


def _fastest(group: Group, rungs: Sequence[Rung], what: str) -> list[str]:
    """The fastest of these, or those that are not told apart, then what is to be said of the others; nothing of none."""
    measured = [rung for rung in rungs if rung.latency_s is not None]
    if not measured:
        return []
    if len(measured) == 1:
        return [f"One configuration was measured{what and f' ({what[1:]})'}: {_time(measured[0])}, on {group.where}."]
    found = ranking.standing(rungs)
    if not found.fastest:
        single = all(len(rung.cell.ok) == 1 for rung in measured)
        reason = "one run of each" if single else "no two have two runs in pairs"
        return [f"Fastest{what}, which no interval confirms ({reason}): {_quoted(rungs)}, on {group.where}."]
    sentences = []
    if len(found.fastest) == 1:
        sentences.append(f"Fastest{what}: {_quoted(rungs, found.fastest[0])}, on {group.where}.")
    else:
        names = [f"{rung.cell.label} ({text.milliseconds(rung.latency_s)} ms/batch)" for rung in found.fastest]
        reason = ranking.why([rung.cell for rung in found.fastest])
        tied = f"{text.listed(names, NAMED)}, on {group.where} ({reason})"
        sentences.append(f"Not distinguished, any may be the fastest{what}: {tied}.")
        sentences += [f"Fastest of the others: {_time(found.slower[0])}."] if found.slower else []
    if found.alone:
        number = f"{len(found.alone)} configurations" if len(found.alone) > 1 else "One configuration"
        once = f"{number} ran once, so no interval compares them with these"
        sentences.append(f"{once}; the fastest: {_time(found.alone[0])}.")
    return sentences


def _time(rung: Rung) -> str:
    return f"{rung.cell.label}: {text.milliseconds(rung.latency_s)} ms/batch"


def _quoted(rungs: Sequence[Rung], best: Rung | None = None) -> str:
    """A configuration, the first by default, with its speed-up over the baseline."""
    best = best or rungs[0]
    baseline = next((rung for rung in rungs if rung.is_baseline and rung.latency_s is not None), None)
    if best.is_baseline:
        return f"{_time(best)}, the baseline itself"
    if best.speedup and baseline:
        return f"{_time(best)}, {text.speedup(best.speedup)} over {baseline.cell.label}"
    return _time(best)


def _lowest_losses(group: Group) -> list[str]:
    """The lowest validation loss of each comparison, where several seeds tell it from the others."""
    if group.judged:  # of what is judged against each other the lowest loss is no answer
        return []
    answers = []
    for comparison in curves.comparisons(group):
        arms = sorted((arm for arm in comparison.arms if arm.best is not None), key=lambda arm: arm.best or 0.0)
        best = [arms[place] for place in ranking.rank([curves.lowest(arm.cell) for arm in arms]).best]
        shown = [f"{arm.cell.label} ({text.loss(arm.best, arm.deviation)})" for arm in best]
        if len(best) == 1 < len(arms):
            answers.append(f"Lowest validation loss ({comparison.title}): {shown[0]}, on {group.where}.")
        elif best:
            reason = f"{min(arm.n for arm in best)} runs of each"
            which = f"Not distinguished by their lowest validation loss ({comparison.title})"
            answers.append(f"{which}: {text.listed(shown, NAMED)}, on {group.where} ({reason}).")
    return answers


def _attention(group: Group) -> list[str]:
    """On how many shapes each attention is the fastest, forward and backward together."""
    compared = [shape for shape in measures.attention_by_shape(group) if len(shape) > 1]
    clear: dict[str, int] = {}
    once: dict[str, int] = {}
    tied = []
    for rungs in compared:
        best = ranking.rank([ranking.logarithms(rung.cell, *measures.PASSES) for rung in rungs]).best
        if len(best) > 1:
            tied.append(" and ".join(sorted(rungs[place].cell.trial.attention for place in best)))
        else:
            names = clear if best else once
            name = rungs[best[0] if best else 0].cell.trial.attention
            names[name] = names.get(name, 0) + 1
    parts = [f"{name} on {n}" for name, n in _most(clear)]
    parts += [f"{name} not distinguished on {tied.count(name)}" for name in dict.fromkeys(tied)]
    parts += [f"{name} on {n} by single runs, which no interval confirms" for name, n in _most(once)]
    if not parts:
        return []
    return [
        f"Fastest attention, forward and backward, of {len(compared)} shapes: {'; '.join(parts)}; on {group.where}."
    ]


def _most(counted: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: -item[1])
