"""Other projects' ways of dividing a training step over ranks: MODES in NAME.py, {mode: a training.parallel.Parallel}.

A rival (te_bench.models.rivals) names its way. The model is te-bench's own, as the rival has built it.
"""

from typing import Any

from te_bench import plugins


def kind(name: str, mode: str) -> Any:
    """Return the class of the project's own `mode` of parallelism; an instance spans all ranks of the process group."""
    return plugins.load(__name__, name, "MODES")[mode]
