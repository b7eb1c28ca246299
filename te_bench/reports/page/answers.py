"""Answer one question about a run on a terminal: a sentence, and bars of characters, the best first."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_bench.reports.analysis.alone import TimeAlone
from te_bench.reports.analysis.attention import AttentionTime
from te_bench.reports.analysis.layers import LayerVariant
from te_bench.reports.analysis.measures import Ratio, typical
from te_bench.reports.analysis.naming import FOREIGN, kernel_name, printable
from te_bench.reports.analysis.rows import Configuration
from te_bench.reports.analysis.scaled import ScaledStep
from te_bench.reports.analysis.steps import MeasuredStep
from te_bench.reports.convergence.verdict import HIDDEN
from te_bench.reports.group_result import GroupResult, ReportResult
from te_bench.reports.page import tables, text, verdict_tables
from te_bench.reports.page.alone_tables import IN_FP8
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.table import Table

WIDTH, HEIGHT = 80, 24  # characters of a terminal
BY_PAIRS = "of fewer runs than the baseline's, the baseline's ms over the speed-up"
LEAST_BAR = 8  # characters of the longest bar, if names are long
EIGHTHS = " ▏▎▍▌▋▊▉█"
#: Replacements for a terminal with ASCII only.
PLAIN = str.maketrans({"×": "x", "—": "-", "±": "+-", "−": "-"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBar:
    """A name, the length of its bar in any unit, and the text at its end."""

    name: str
    value: float
    shown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Bars under a heading with their unit."""

    heading: str
    bars: tuple[TextBar, ...]


Part = Chart | Table | str


def answer(report: ReportResult, question: str | None, *, run: str = "RUN", ascii_only: bool = False) -> list[str]:
    """Return at most 24 lines of 80 characters; question: one of QUESTIONS, or None for all answers of the folder `run`."""
    rows, ends, rest = _answered(report, question or "verdict", ascii_only), list[str](), "te-bench report shows all"
    if question is None:
        judged = [found.sentence for result in report.groups for found in result.studies]
        rows = rows if judged else []
        rest = f"te-bench show {run} verdict" if judged else rest
        said = [sentence for sentence in headlines(report) if not sentence.startswith(tuple(judged))]
        rows += [line for sentence in said for line in _wrapped(sentence)]
        ends = _ends(report, run)
    if ascii_only:  # before lines are counted, because a sign may become two characters
        rows, ends = [_plain(row) for row in rows], [_plain(line) for line in ends]
    lines = _cut([row.split("\n") for row in rows], HEIGHT - len(ends), rest)
    return [*lines, *ends]


def _cut(rows: Sequence[Sequence[str]], height: int, rest: str) -> list[str]:
    """Return the lines of the first whole rows that fit, and how many more `rest` shows: a row may differ by its end."""
    total = sum(map(len, rows))
    if total <= height:
        return [line for row in rows for line in row]
    lines: list[str] = []
    for row in rows:
        notice = _wrapped(f"{total - len(lines)} more lines: {rest}.")
        if len(lines) + len(row) + len(notice) > height:
            break
        lines += row
    return [*lines, *notice]


def _plain(row: str) -> str:
    """Return a row in ASCII; a line that a sign makes too long continues below."""
    lines = row.translate(PLAIN).encode("ascii", "replace").decode().split("\n")
    return "\n".join(part for line in lines for part in (textwrap.wrap(line, WIDTH) if len(line) > WIDTH else [line]))


def specifications(report: ReportResult) -> list[str]:
    """Return all settings behind each name, in as many lines as needed."""
    found = []
    for result in report.groups:
        for configuration in result.group.configurations:
            found.append(_named(configuration))
            found += _wrapped(configuration.specification, indent="    ")
    return found


def _ends(report: ReportResult, run: str) -> list[str]:
    """Return how many trials ended ok, and what else can be asked."""
    results = report.results
    ended = _wrapped(
        f"{results.outcomes.get('ok', 0)} of {len(results.rows)} planned trials ended ok{report.unjudged}."
    )
    known = [name for name, (asked, _) in QUESTIONS.items() if any(asked(result) for result in report.groups)]
    return ended + (_wrapped(f"Ask on: te-bench show {run} {'|'.join(known)}") if known else [])


def _answered(report: ReportResult, question: str, ascii_only: bool) -> list[str]:
    """Return the answer's lines; a row of a table or a bar whose name continues below is one item."""
    ask, nothing = QUESTIONS[question]
    lines: list[str] = []
    for result in report.groups:
        found = ask(result)
        if found and len(report.groups) > 1:
            lines += _wrapped(f"{result.group.title or result.group.suite} on {result.group.where}")
        for part in found:
            if isinstance(part, Table):
                lines += tables.terminal(part, WIDTH)
            else:
                lines += drawn(part, ascii_only) if isinstance(part, Chart) else _wrapped(part)
    if question == "fastest" and lines and not any(result.trainings for result in report.groups):
        lines = [*_wrapped(headlines(report)[0]), "", *lines]
    return lines or _wrapped(nothing)


def drawn(chart: Chart, ascii_only: bool = False) -> list[str]:
    """Return the heading, and an item for each bar; a long name continues below, on further lines of it."""
    shown = max(len(bar.shown) for bar in chart.bars)
    names = min(max(len(bar.name) for bar in chart.bars), WIDTH - shown - LEAST_BAR - 2)
    longest, most = WIDTH - shown - names - 2, max(bar.value for bar in chart.bars) or 1.0
    lines = _wrapped(chart.heading)
    for bar in chart.bars:
        first, *more = textwrap.wrap(bar.name, names, subsequent_indent="  ", break_on_hyphens=False) or [""]
        filled = _filled(bar.value / most * longest, ascii_only).ljust(longest)
        lines.append("\n".join([f"{first.ljust(names)} {filled} {bar.shown}".rstrip(), *more]))
    return lines


def _filled(characters: float, ascii_only: bool) -> str:
    """Return a bar of so many characters, to an eighth of one."""
    if ascii_only:
        return "#" * max(1, round(characters))
    eighths = max(1, round(8 * characters))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _wrapped(said: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        printable(said), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _named(configuration: Configuration) -> str:
    return f"{configuration.shape} {configuration.label}".strip()


def _interval(ratio: Ratio | None) -> str:
    return f"  {text.speedup(ratio)}" if ratio else ""


def _verdict(result: GroupResult) -> list[Part]:
    """Return each study's verdict in words, its cost, and its table without the columns that find no room."""
    said: list[Part] = []
    for found in result.studies:
        said += [found.sentence, f"{verdict_tables.effort(found)}."]
        if brief := verdict_tables.brief(found):
            said.append(brief.only([column.title for column in brief.columns if column.title != "To equal loss"]))
        said += [f"{HIDDEN}."] if HIDDEN in found.notes else []
    return said


def _fastest(result: GroupResult) -> list[Part]:
    charts: list[Part] = []
    ranked = [("a step", result.steps)]
    ranked += [(f"forward and backward of a layer, {one.name}", one.ranking) for one in _by_variant(result)]
    for what, ranking in ranked:
        bars = (_step_bar(step) for step in ranking.steps if step.latency_s)
        pairs = f"; {BY_PAIRS}" if ranking.by_pairs else ""
        charts += _chart(f"ms {what}, and its speed-up over the baseline{pairs}", bars)
    scaled = sorted((step for step in result.scaled if step.tokens_per_s), key=lambda step: -(step.tokens_per_s or 0.0))
    speeds = ((step.configuration.label, step.tokens_per_s or 0.0) for step in scaled)
    bars = (TextBar(name=name, value=speed, shown=text.count(speed)) for name, speed in speeds)
    charts += _chart("tokens a second of each GPU", bars)
    trained = [one for comparison in result.trainings if comparison.timed for one in comparison.trainings]
    paced = sorted((-(one.tokens_per_s or 0.0), one.configuration.label) for one in trained if one.tokens_per_s)
    charts += _chart(
        "tokens a second of a training", (TextBar(name=n, value=-v, shown=text.count(-v)) for v, n in paced)
    )
    called = ((typical(one.ok, "latency_s"), one.label) for one in result.group.of(FOREIGN))
    bars = (
        TextBar(name=n, value=s, shown=f"{text.milliseconds(s)} ms") for s, n in sorted((s, n) for s, n in called if s)
    )
    charts += _chart("ms a call of each benchmark", bars)
    return [*charts, *_attention(result), *_alone(result)]


def _chart(heading: str, bars: Iterable[TextBar]) -> list[Chart]:
    shown = tuple(bars)
    return [Chart(heading=heading, bars=shown)] if shown else []


def _by_variant(result: GroupResult) -> list[LayerVariant]:
    """Return the layer variants, those with only comparable layers first."""
    return sorted(result.layers, key=lambda one: not one.comparable)


def _step_bar(step: MeasuredStep) -> TextBar:
    faster = "  baseline" if step.is_baseline else _interval(step.speedup)
    return TextBar(
        name=step.configuration.label, value=step.latency_s or 0.0, shown=f"{text.milliseconds(step.latency_s)}{faster}"
    )


def _attention(result: GroupResult) -> list[Chart]:
    """Return the fastest kernel of each shape, both passes; kernels in FP8, whose numbers differ, have their own chart."""
    peer = result.attention.peer
    over = f", and its speed-up over {kernel_name(peer)}" if peer else ""
    charts: list[Chart] = []
    for fp8, what in ((False, "The fastest of each shape"), (True, IN_FP8)):
        first = [choice.times[0] for choice in result.attention.choices if choice.fp8 == fp8]
        charts += _chart(f"{what}, both passes{over}", map(_attention_bar, first))
    return charts


def _attention_bar(time: AttentionTime) -> TextBar:
    ratio = time.speedups.get("both")
    return TextBar(
        name=f"{time.configuration.shape}: {time.configuration.label}",
        value=ratio.value if ratio else 1.0,
        shown=f"{text.milliseconds(time.both_s)} ms{_interval(ratio)}",
    )


def _alone(result: GroupResult) -> list[Chart]:
    """Return the fastest head, and norm or activation, of each shape."""
    charts: list[Chart] = []
    for part in result.alone.values():
        best: dict[str, TimeAlone] = {}
        for time in sorted((one for one in part.times if one.seconds), key=lambda one: one.seconds or 0.0):
            best.setdefault(time.shape, time)
        bars = (
            TextBar(
                name=f"{shape}: {time.name}",
                value=time.speedup.value if time.speedup else 1.0,
                shown=f"{text.milliseconds(time.seconds)} ms{_interval(time.speedup)}",
            )
            for shape, time in best.items()
        )
        charts += _chart(f"The fastest {part.what} alone of each shape, and its speed-up over the baseline", bars)
    return charts


def _memory(result: GroupResult) -> list[Part]:
    steps, charts = result.steps.steps, list[Part]()
    peaks: tuple[tuple[str, Callable[[MeasuredStep], float | None]], ...] = (
        ("GiB allocated at the peak of a step", lambda step: step.peak_allocated),
        (
            "GiB reserved at the peak of a step, where allocated is not known",
            lambda step: None if step.peak_allocated else step.peak_reserved,
        ),
        ("GiB resident at the peak of a step", lambda step: step.peak_rss if not step.peak_reserved else None),
    )
    for what, peak in peaks:
        of_baseline = next((p for step in steps if step.is_baseline and (p := peak(step))), None)
        charts += _least_first(what, [(peak(step), step.configuration.label) for step in steps], text.gib, of_baseline)
    most = [
        TextBar(
            name=one.configuration.label,
            value=one.max_batch,
            shown=text.count(one.max_batch, or_more=one.capped),
        )
        for one in result.largest_batches  # largest first
        if one.max_batch
    ]
    if most:
        fewest = f"; the fewest: {most[-1].shown}" if len(most) > 1 else ""
        charts.append(f"The most: {most[0].name}, {most[0].shown} sequences{fewest}.")
    charts += _chart("Sequences of the largest batch that fits", most)
    ranks = [(step.memory.get("peak"), step.configuration.label) for step in result.scaled]
    return [*charts, *_least_first("GiB at the peak of the fullest rank", ranks, text.gib)]


def _least_first(
    heading: str,
    counted: Sequence[tuple[float | None, str]],
    show: Callable[[float | None], str],
    of_baseline: float | None = None,
) -> list[Part]:
    """Return a sentence about the least, compared with the baseline, and bars of all; zeros are left out."""
    held = sorted((value, name) for value, name in counted if value)
    if not held:
        return []
    least, first = held[0]
    part = round(100 * least / of_baseline) if of_baseline else 100
    said = f"The least: {first}" + (f", {part} % of the baseline's." if part != 100 else ".")
    bars = tuple(TextBar(name=name, value=value, shown=show(value)) for value, name in held)
    return [said if len(held) > 1 else f"One was measured: {first}.", Chart(heading=heading, bars=bars)]


def _errors(result: GroupResult) -> list[Part]:
    """Return the errors over their limits, worst first; above its limit, a check has failed."""
    if not result.errors:
        return []
    worst = result.errors[0]
    where = "Beyond" if worst.ratio is None or worst.ratio > 1 else "Nearest to"
    how = f"{text.plain(worst.error)} of at most {text.plain(worst.limit)}"
    named = Counter(_named(one.configuration) for one in result.errors)

    def name(configuration: Configuration) -> str:
        plain = _named(configuration)  # a step and a training may have the same name
        return plain if named[plain] == 1 else f"{plain}, {configuration.trial.workload.replace('_', ' ')}"

    said: list[Part] = [f"{where} its limit: {name(worst.configuration)}, {worst.quantity}: {how}."]
    found = ((name(one.configuration), one.ratio) for one in result.errors if one.ratio is not None)
    bars = (TextBar(name=of, value=min(ratio, 1.0), shown=text.plain(ratio)) for of, ratio in found)
    return [*said, *_chart("Worst error / limit, above 1 a check fails", bars)]


def _unsupported(result: GroupResult) -> list[Part]:
    """Return the configurations that did not end ok, by outcome and reason."""
    ended: dict[tuple[str, str], dict[str, None]] = {}
    for configuration in result.group.configurations:
        for row in configuration.rows:
            if row.outcome != "ok":
                reason = printable(row.reason or "no reason was recorded")
                ended.setdefault((row.outcome, reason), {})[_named(configuration)] = None
    return [f"{outcome}: {text.listed(list(names), 4)}: {reason}" for (outcome, reason), names in ended.items()]


def _energy(result: GroupResult) -> list[Part]:
    steps: list[ScaledStep | MeasuredStep] = [*result.scaled, *result.steps.steps]
    of_tokens = [(1e3 * (s.energy_per_token or 0.0), s.configuration.label) for s in steps]
    baseline = next((1e3 * (s.energy_per_token or 0.0) for s in result.steps.steps if s.is_baseline), None)
    found = _least_first("mJ a token, of all GPUs", of_tokens, text.plain, baseline)
    for one in _by_variant(result):  # apart, because variants compute different functions
        of_layers = [(s.energy_j, s.configuration.label) for s in one.ranking.steps]
        baseline = next((s.energy_j for s in one.ranking.steps if s.is_baseline), None)
        found += _least_first(f"J forward and backward of a layer, {one.name}", of_layers, text.plain, baseline)
    times = result.attention.times
    for shape in dict.fromkeys(time.configuration.shape for time in times):
        alike = [time for time in times if time.configuration.shape == shape]
        counted = [(1e3 * (time.energy_j or 0.0), time.configuration.label) for time in alike]
        found += _least_first(f"mJ forward and backward of attention, {shape}", counted, text.plain)
    return found


#: {question: (the function that answers it for a group, the answer if nothing was recorded)}.
QUESTIONS: Mapping[str, tuple[Callable[[GroupResult], Sequence[Part]], str]] = {
    "verdict": (_verdict, "No study of convergence is in this run."),
    "fastest": (_fastest, "Nothing was timed."),
    "memory": (_memory, "No peak of memory was recorded: the suites speed, nanogpt, quick and memory do."),
    "error": (_errors, "No check has an error on record."),
    "unsupported": (_unsupported, "Every planned trial ended ok."),
    "energy": (_energy, "No energy was recorded: steps, layers and attention count it, on GPUs that have a counter."),
}
