"""What torch.compile did in a trial, by Dynamo's own counters: graph breaks and recompilations.

    begin(trial)              where the trial starts, before anything is compiled
    ... check, time ...
    work |= counts(trial)     after the last timed call, before what is not timed compiles too

The counters are Dynamo's in torch 2.11 and 2.13 alike, and PyTorch's own benchmarks read them (pytorch/pytorch,
benchmarks/dynamo/common.py, get_dynamo_stats).
"""

from te_bench.experiments.problems import LayerProblem, StepProblem, TrialProblem
from te_bench.experiments.spec import Trial

#: Where Dynamo notes what it could not trace. "graph_break" alone lacks a branch on data, a frame left to Python whole
#: because it breaks inside a loop, and one given up at the recompilation limit (torch 2.13).
BREAKS = ("graph_break", "unimplemented")


def begin(trial: Trial) -> None:
    """Forget what this process compiled, in a mode that compiles: code compiled before would count as recompiled.

    It may touch CUDA, so it comes after any fork.
    """
    if not _compiles(trial):
        return
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def _compiles(trial: Trial) -> bool:
    """Fused blocks, layers and what rivals compute by themselves are captured as they are."""
    p = TrialProblem.of(trial)
    as_it_is = isinstance(p, LayerProblem) or (isinstance(p, StepProblem) and p.as_it_is)
    return trial.mode != "eager" and not (trial.mode == "cudagraph" and as_it_is)


def counts(trial: Trial) -> dict[str, int]:
    """{"graph_breaks", "recompiles"} since `begin`; {} where the trial's mode compiles nothing.

    graph_breaks: places at which tracing stopped, once for each time that they were traced. recompiles: compilations of
    code that had been compiled before, whatever the reason; a first compilation is none.
    """
    if not _compiles(trial):
        return {}
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": sum(sum(counters[kind].values()) for kind in BREAKS),
        "recompiles": sum(compilations - 1 for compilations in FRAME_COMPILE_COUNTER.values()),
    }
