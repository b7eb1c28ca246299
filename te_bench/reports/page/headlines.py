"""Put each answer of a report into a sentence. It says what intervals do not distinguish, with the reason."""

import math
from collections.abc import Mapping, Sequence

from te_bench.experiments import run_options
from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.stress import SEEDS
from te_bench.reports.analysis.ranking import UNPAIRED, FastestByShape, StepRanking, why_tied
from te_bench.reports.analysis.steps import MeasuredStep, emulates_blocks
from te_bench.reports.convergence.published import nearest
from te_bench.reports.convergence.stress import REFERENCE, StressLadder
from te_bench.reports.group_result import GroupResult, ReportResult
from te_bench.reports.page import text

BLOCK_FORMATS = "MXFP8 and NVFP4 are emulated by bf16 GEMMs: these times say nothing about a GPU that multiplies them."
EMULATED = "On a CPU FP8 and fused blocks are emulated: these times say nothing about a GPU."
ALIKE = 1.01  # peaks of memory up to this many times the least are as good
RANKED = 3  # fewer runs cannot rank a step beside steps of more: two give intervals that hold nearly anything
NAMED = 4  # configurations that a sentence names at most; it counts the rest


def headlines(report: ReportResult, *, commands: bool = True) -> list[str]:
    """Return the answers, most important first; if nothing ended ok, how trials ended.

    commands: an unfinished study says by which command it goes on.
    """
    found = []
    for result in report.groups:
        where = result.group.where
        for verdict in result.studies:
            said = verdict.sentence if commands else verdict.headline
            found.append((-1, f"{said} ({verdict.study.title}, {where})"))
        found += [(0, f"{said}, on {where}.") for said in map(_breaking, result.stress) if said]
        found += [(0, sentence) for sentence in _fastest(result.steps, "", where)]
        for variant in result.layers:
            if variant.comparable:
                found += [(0, said) for said in _fastest(variant.ranking, f" layer, {variant.name}", where)]
        found += [(1, answer) for answer in [*_scaled(result), *_lowest_losses(result), *_by_shape(result)]]
        largest = next((m for m in result.largest_batches if m.max_batch is not None), None)
        if largest:
            batch = text.count(largest.max_batch, or_more=largest.capped)
            found.append((2, f"Largest batch: {largest.configuration.label}: {batch} on {where}."))
    if not any(result.studies for result in report.groups):
        unproven = [trial for result in report.groups if (trial := _unproven(result))]
        found += [(1, _what_is_proven(trial)) for trial in unproven[:1]]
    if any(_emulated(result) for result in report.groups):
        found.append((3, EMULATED))
    elif any(
        emulates_blocks(step.configuration)
        for result in report.groups
        for step in result.steps.steps
        if step.latency_s is not None
    ):
        found.append((3, BLOCK_FORMATS))
    results = report.results
    if not found and any(row.outcome == "ok" for row in results.rows):
        return [f"{results.outcomes['ok']} of {len(results.rows)} trials ended ok; none of them ranks configurations."]
    if not found:
        ends = ", ".join(f"{n} {outcome}" for outcome, n in results.outcomes.items()) or "none was planned"
        return [f"Nothing was measured: 0 of {len(results.rows)} trials ended ok ({ends})."]
    return [sentence for _, sentence in sorted(found, key=lambda item: item[0])]


def _breaking(ladder: StressLadder) -> str | None:
    """Return at which learning rates each precision breaks, and whether one breaks before bf16; None if unknown."""
    known = {name: found for name, found in ladder.breaking.items() if name not in ladder.planted}
    if not known:
        return None
    rates = ", ".join(f"{name} {ladder.rates(found.median)}" for name, found in known.items())
    said = f"The median seed breaks at these learning rates: {rates} ({ladder.title})"
    if REFERENCE in known and len(known) > 1:
        few = min(found.seeds for found in known.values()) < SEEDS and not ladder.earlier
        shown = "No precision is"
        if ladder.earlier:
            shown = f"{text.listed(ladder.earlier, NAMED)} {'is' if len(ladder.earlier) == 1 else 'are'}"
        takes = f", for which it takes {SEEDS} seeds at least" if few else ""
        said = f"{shown} shown to break before bf16{takes}. {said}"
    return said + "".join(f". Planted and not seen: {name}" for name in ladder.unseen)


def _unproven(result: GroupResult) -> Trial | None:
    """Return the trial of a step that is, or may be, the fastest and has a part in fewer bits; None if there is none."""
    found = result.steps.fastest or [step for step in result.steps.steps if step.latency_s is not None][:1]
    return next((trial for step in found if _in_fewer_bits(trial := step.configuration.trial)), None)


def _in_fewer_bits(trial: Trial) -> int:
    """Return how many of products, weights and states have fewer bits than in bf16 training, which may change the loss."""
    return (trial.precision == "fp8") + len(run_options.fewer_words(trial.problem))


def _what_is_proven(trial: Trial) -> str:
    """Return the published verdict on a step in fewer bits, and the command that judges it."""
    problem = trial.problem
    fused = problem.get("blocks") == "fused" or bool(problem.get("parts"))  # a user's model with the fused kernels
    if words := run_options.fewer_words(problem):
        asked = [f"--{name} {problem[name]}" for name in ("weights", "states") if problem.get(name)]
        asked += [f"--recipes {trial.recipe}"] if trial.recipe else []
        return (
            f"These times do not say whether {' and '.join(words)} train like float32. No verdict on this step is "
            f"published; te-bench run convergence {' '.join(asked)} judges te-bench's AdamW with them."
        )
    of_others = problem.get("rival") or problem.get("linears")
    head = problem.get("head", "fp8" if problem.get("parts") else None) == "fp8"
    known = None if of_others else nearest(trial.recipe, fused=fused, fp8_head=head)
    published = f"Published: {known.in_words()}" if known else "No verdict on this step is published"
    if known and (problem.get("parts") or known.fp8_head != head):
        published = f"No study has judged this step. {published}"
    judges = f"te-bench run convergence --recipes {trial.recipe}{' --fused' if fused else ''}"
    return f"These times do not say whether FP8 trains like bf16. {published}; {judges} judges it."


def _emulated(result: GroupResult) -> bool:
    """Return whether the results have a CPU's time of an FP8 step."""
    rankings = [result.steps, *(variant.ranking for variant in result.layers)]
    timed = [step.configuration.trial for found in rankings for step in found.steps if step.latency_s is not None]
    timed += [step.configuration.trial for step in result.scaled if step.latency_s is not None]
    return any(trial.device == "cpu" and trial.precision == "fp8" for trial in timed)


def _fastest(found: StepRanking, what: str, where: str) -> list[str]:
    """Return what to use, or the steps that are not distinguished, then the others; [] if nothing was measured."""
    measured = [step for step in found.steps if step.latency_s is not None]
    if not measured:
        return []
    if len(measured) == 1:
        return [f"One configuration was measured{what and f' ({what[1:]})'}: {_time(measured[0])}, on {where}."]
    if not found.fastest:
        single = all(len(step.configuration.ok) == 1 for step in measured)
        runs = "in one run of each" if single else "by too few runs of the same seeds"
        return [f"Fastest{what and f'{what},'} {runs}, which may be chance: {_quoted(found.steps)}, on {where}."]
    sentences = []
    if len(found.fastest) == 1:
        sentences.append(f"Fastest{what}: {_quoted(found.steps, found.fastest[0])}, on {where}.")
    else:
        sentences += _of_the_tied(found, what, where)
        sentences += [f"Fastest of the others: {_time(found.slower[0])}."] if found.slower else []
    if found.alone:
        n, once = len(found.alone), sum(len(step.configuration.ok) == 1 for step in found.alone)
        number = f"{n} configurations" if n > 1 else "One configuration"
        why = "ran once" if once == n else UNPAIRED if once == 0 else f"ran once or {UNPAIRED}"
        why = why.replace("shares", "share") if n > 1 else why
        unranked = f"{number} {why}, so no interval compares {'them' if n > 1 else 'it'} with these"
        by_pair = ", by its pair with the baseline" if found.by_pairs and found.alone[0].speedup else ""
        sentences.append(f"{unranked}; the fastest{by_pair}: {_time(found.alone[0])}.")
    return sentences


def _of_the_tied(found: StepRanking, what: str, where: str) -> list[str]:
    """Return what to use if times do not decide: the baseline, else the fewest parts in fewer bits, then least memory."""
    runs = [len(step.configuration.ok) for step in found.fastest]
    few = [step for step, n in zip(found.fastest, runs, strict=True) if n < min(RANKED, max(runs))]
    enough = [step for step in found.fastest if step not in few]
    bits = [_in_fewer_bits(step.configuration.trial) for step in enough]
    some = [step for step, parts in zip(enough, bits, strict=True) if parts == min(bits)]
    peaks = [step.peak_allocated or step.peak_reserved or step.peak_rss or 0.0 for step in some]
    limit = ALIKE * min(peaks) if all(peaks) else math.inf
    light = [step for step, peak in zip(some, peaks, strict=True) if peak <= limit]
    have = next((step for step in found.fastest if step.is_baseline), None)
    best = have or light[0]  # the fastest of them
    said = []
    if others := [_in_brackets(step) for step in enough if step is not best]:
        reason = why_tied([step.configuration for step in enough])
        said.append(f"Not distinguished from it, any may be the fastest: {text.listed(others, NAMED)} ({reason}).")
    if rest := [_in_brackets(step, runs=True) for step in few if step is not best]:
        said.append(f"Too few runs to rank: {text.listed(rest, NAMED)}.")
    if have:
        keep = f"Keep the baseline{what and f' of the{what}'}, {_time(have)}, on {where}: none is shown to be faster."
        return [keep, " ".join(said)]
    plain = not any(run_options.fewer_words(step.configuration.trial.problem) for step in enough)
    why = []
    if mixed := len(some) < len(bits):
        why = ["no FP8, so its loss is not in question" if plain else "the fewest parts in fewer bits, for its loss"]
    if len(light) < len(some):
        why.append(f"the least memory of {('those without FP8' if plain else 'those') if mixed else 'these'}")
    said += [f"Chosen: {'; '.join(why)}."] if why else []
    use = f"For the{what}, use" if what else "Use"
    return [f"{use} {_quoted(found.steps, best)}, on {where}.", " ".join(said)]


def _in_brackets(step: MeasuredStep, *, runs: bool = False) -> str:
    times = f", {len(step.configuration.ok)} runs" if runs else ""
    return f"{step.configuration.label} ({text.milliseconds(step.latency_s)} ms{times})"


def _time(step: MeasuredStep) -> str:
    return f"{step.configuration.label}: {text.milliseconds(step.latency_s)} ms"


def _quoted(steps: Sequence[MeasuredStep], best: MeasuredStep | None = None) -> str:
    """Return a configuration, by default the first, with its speed-up over the baseline and its memory."""
    best = best or steps[0]
    baseline = next((step for step in steps if step.is_baseline and step.latency_s is not None), None)
    if best.is_baseline:
        return f"{_time(best)}, the baseline itself"
    if best.speedup and baseline:
        memory = _less_memory(best, baseline)
        return f"{_time(best)}, {text.speedup(best.speedup)} as fast as {baseline.configuration.label}{memory}"
    return _time(best)


def _less_memory(step: MeasuredStep, baseline: MeasuredStep) -> str:
    """Return the peak as a share of the baseline's, by a kind that both have: allocated, else reserved."""
    pairs = [
        (step.peak_allocated, baseline.peak_allocated, "peak"),
        (step.peak_reserved, baseline.peak_reserved, "reserved"),
    ]
    ours, theirs, kind = next((known for known in pairs if known[0] and known[1]), (None, None, ""))
    part = round(100 * ours / theirs) if ours and theirs else 100
    return "" if part == 100 else f", with {part} % of its {kind} memory"


def _scaled(result: GroupResult) -> list[str]:
    """Return the most tokens a second and GPU on the most GPUs, with the bandwidth of their link."""
    measured = [step for step in result.scaled if step.world > 1 and step.tokens_per_s is not None]
    if not measured:
        return []
    best = max(measured, key=lambda step: (step.world, step.tokens_per_s or 0.0))
    one, several = ("GPU", "GPUs") if best.configuration.trial.device == "cuda" else ("process", "processes")
    said = (
        f"Most tokens/s on {best.world} {several}: {best.configuration.label}: {text.count(best.tokens_per_s)} on each"
    )
    said += f", {text.percent(best.efficiency.value)} of one {one} alone" if best.efficiency else ""
    said += f", over a link of {text.plain(best.busbw / 1e9)} GB/s" if best.busbw else ""
    return [f"{said}, on {result.group.where}."]


def _lowest_losses(result: GroupResult) -> list[str]:
    """Return the lowest validation loss of each comparison, if several seeds distinguish it from the others."""
    if result.group.judged or result.stress:  # verdicts and ladders do not ask for the lowest loss
        return []
    answers = []
    for comparison in result.trainings:
        best = comparison.lowest
        shown = [f"{one.configuration.label} ({text.loss(one.best, one.deviation)})" for one in best]
        if len(best) == 1 < sum(training.best is not None for training in comparison.trainings):
            answers.append(f"Lowest validation loss ({comparison.title}): {shown[0]}, on {result.group.where}.")
        elif best:
            reason = f"{min(training.n for training in best)} runs of each"
            which = f"Not distinguished by their lowest validation loss ({comparison.title})"
            answers.append(f"{which}: {text.listed(shown, NAMED)}, on {result.group.where} ({reason}).")
    return answers


def _by_shape(result: GroupResult) -> list[str]:
    """Return on how many shapes each attention and each way of a part alone is the fastest, both passes together."""
    asked = [("attention, forward and backward", result.attention.fastest)]
    asked += [(f"{part.what} alone", part.fastest) for part in result.alone.values()]
    return [said for what, fastest in asked for said in _of_shapes(what, fastest, result.group.where)]


def _of_shapes(what: str, found: FastestByShape, where: str) -> list[str]:
    def on(n: int) -> str:
        return f" on {n}" if found.shapes > 1 else ""

    parts = [f"{name}{on(n)}" for name, n in _most_first(found.clear)]
    parts += [f"{name} not distinguished{on(n)}" for name, n in found.tied.items()]
    parts += [f"{name}{on(n)} in one run of each, which may be chance" for name, n in _most_first(found.once)]
    if not parts:
        return []
    shapes = f", of {found.shapes} shapes" if found.shapes > 1 else ""
    return [f"Fastest {what}{shapes}: {'; '.join(parts)}; on {where}."]


def _most_first(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: -item[1])
