"""Count what torch.compile did in a trial, by Dynamo's own counters: graph breaks and recompilations.

    begin(trial)              at the trial's start, before any compilation
    ... check, time ...
    work |= counts(trial)     after the last timed call, before untimed calls compile

torch 2.11 and 2.13 have the same counters, and PyTorch's own benchmarks read them (pytorch/pytorch,
benchmarks/dynamo/common.py, get_dynamo_stats).
"""

from te_bench.experiments.problems import LayerProblem, StepProblem, TrialProblem
from te_bench.experiments.spec import Trial

#: Dynamo's counters of code that it could not trace. "graph_break" alone misses a branch on data, a frame left to Python
#: because it breaks inside a loop, and a frame given up at the recompilation limit (torch 2.13).
BREAKS = ("graph_break", "unimplemented")


def begin(trial: Trial) -> None:
    """Forget what this process compiled, in a mode that compiles; otherwise that code would count as recompiled.

    This may touch CUDA, so call it after any fork.
    """
    if not _compiles(trial):
        return
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def _compiles(trial: Trial) -> bool:
    """Return whether the trial compiles; fused blocks, layers and rivals with their own blocks are captured uncompiled."""
    p = TrialProblem.of(trial)
    as_it_is = isinstance(p, LayerProblem) or (isinstance(p, StepProblem) and p.as_it_is)
    return trial.mode != "eager" and not (trial.mode == "cudagraph" and as_it_is)


def counts(trial: Trial) -> dict[str, int]:
    """Return {"graph_breaks", "recompiles"} since `begin`; {} if the trial's mode does not compile.

    graph_breaks: places at which tracing stopped, counted each time that they were traced. recompiles: compilations of code
    that had been compiled before, for any reason.
    """
    if not _compiles(trial):
        return {}
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": sum(sum(counters[kind].values()) for kind in BREAKS),
        "recompiles": sum(compilations - 1 for compilations in FRAME_COMPILE_COUNTER.values()),
    }
