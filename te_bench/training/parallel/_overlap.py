"""Checks of whether a Linear pair's GEMMs can overlap with their collectives: ranks, mode, recipe and shapes."""

from collections.abc import Iterable
from typing import Any

from te_bench import plugins
from te_bench.models.modules import symmetric
from te_bench.models.modules.linear import Linear
from te_bench.training.parallel import OVERLAPS, Indivisible


def check(overlap: str | None, sequence_parallel: bool) -> None:
    """Raise ValueError for an unknown overlap, and for one without sequence_parallel."""
    if overlap is not None:
        plugins.check("overlap", overlap, list(OVERLAPS))
        if not sequence_parallel:
            raise ValueError(f"overlap {overlap} is of what sequence_parallel gathers and scatters: give both")


def unsupported(overlap: str | None, ranks: int, mode: str) -> str | None:
    """Return why groups of `ranks` ranks cannot overlap in this execution mode, or None."""
    if overlap is None:
        return None
    reason = "one rank has no collectives" if ranks < 2 else symmetric.unsupported(ranks)
    if reason is None and mode not in ("eager", "compile"):
        reason = f"the replay of a captured graph shows nobody its operators; choose mode eager or compile, not {mode}"
    return None if reason is None else f"overlap {overlap}: {reason}"


def meet(overlap: str | None, group: Any) -> None:
    """Set up memory shared by the group's ranks; every rank must call it. Raises Indivisible if they cannot share."""
    if overlap is not None and (reason := symmetric.unshared(group.group_name)):
        raise Indivisible(f"overlap {overlap}: {reason}; leave it out")


def begin(overlap: str | None, layer: Any, recipe: Any) -> None:
    """Switch overlap on for a rank's share of a Linear. Raises Indivisible if no operator does its GEMM."""
    if overlap is None or layer.divisions[0] is None:
        return
    in_fp8 = recipe is not None and isinstance(layer, Linear)
    if in_fp8 and (reason := symmetric.lacks(recipe) or symmetric.misaligned(layer.get_parameter("weight"))):
        raise Indivisible(f"overlap {overlap}: {reason}; leave it out")
    layer.divisions[0].ranks.overlaps = True


def numbers(pairs: Iterable[tuple[str, Any]]) -> int:
    """Count, per token, column Linears' inputs and row Linears' outputs: gathers and scatters each move so many."""
    return sum(layer.in_features if mode == "column" else layer.out_features for mode, layer in pairs)
