"""Show what te-bench finds here and what to type next, for te-bench without a command."""

import importlib.metadata
from collections import Counter
from pathlib import Path

from te_bench import __version__
from te_bench.experiments import environment, store
from te_bench.models import rivals

RUNS = Path("runs")
LATEST = 3  # number of runs named


def lines() -> list[str]:
    """Return the lines for an 80-column terminal."""
    gpus, runs = environment.nvidia_gpus(), _runs()
    return [
        f"te-bench {__version__} says which attention kernel and which precision to train",
        "your transformer with on your GPU, with proof.",
        "",
        f"  GPU     {_named(gpus) or 'none: FP8 is emulated, and times say nothing about a GPU'}",
        f"  rivals  {_rivals() or 'none installed; te-bench list rivals'}",
        f"  runs    {runs or 'none in this folder'}",
        "",
        "Next:",
        *(f"  {command:<45} {what}" for command, what in _next(bool(gpus), bool(runs))),
    ]


def _named(gpus: list[dict[str, object]]) -> str:
    counted = Counter(str(gpu["name"]) for gpu in gpus)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items())


def _rivals() -> str:
    """Name the installed rivals' packages, and FlashAttention-4, whose kernels are an attention backend."""
    known = {package: rival.title for rival in map(rivals.load, rivals.names()) for package in rival.packages}
    found = []
    for distribution, name in {**known, "flash-attn-4": "FlashAttention-4"}.items():
        try:
            found.append(f"{name} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _runs() -> str:
    journals = [path for name in (store.JOURNAL, store.PACKED) for path in RUNS.glob(f"*/{name}")]
    latest = sorted(journals, key=lambda path: path.stat().st_mtime, reverse=True)
    named = ", ".join(str(path.parent) for path in latest[:LATEST])
    return f"{named} and {len(latest) - LATEST} more" if len(latest) > LATEST else named


def advise(gpu: bool) -> str:
    """Return the first command for a machine with or without a GPU."""
    return f"te-bench advise --model {'gpt2 --budget 3min' if gpu else 'tiny'}"


def _next(gpu: bool, ran: bool) -> list[tuple[str, str]]:
    seen = [("te-bench show DIR", "the answers of a run")] if ran else []
    return [
        (advise(gpu), "what to train a model with"),
        ("te-bench demo", "a minute: a first report"),
        *seen,
        ("te-bench doctor", "what runs here, and why not"),
        ("te-bench --help", "all commands"),
    ]
