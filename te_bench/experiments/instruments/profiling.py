"""What a profiler sees of a call: the operators and kernels that ran, how often, and their seconds."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from te_bench.experiments import exclusive

#: How Kineto names the GPU's copies and fills; and the driver the kernels of its own by which a captured graph does some of
#: them, "memcpy32_post" and "memset32" (H200, CUDA 13.0).
COPIES = ("Memcpy ", "Memset ", "memcpy32", "memset32")
LOOKS = {"cuda": 2, "cpu": 1}  # calls that kernels_seen makes
PROFILED = 3  # calls under the profiler, whose mean kernel_seconds is
KERNELS = 60  # names that kernel_seconds holds; the seconds of all others go together

#: What of the host's events `Seen.counts` has: products, norms and activations of PyTorch, operators and autograd Functions
#: of te_bench, what torch.compile made, and the driver's launches. An operator inside one of WHOLE is a part of that one and
#: not counted.
HOST = re.compile(
    r"aten::(mm|addmm|_scaled_mm(_v2)?|_fused_adamw_)$|te_bench::|Segment(Backward)?$|Torch-Compiled Region|"
    r"aten::(native_layer_norm|rms_norm|_fused_rms_norm|gelu)(_backward)?$|RsqrtBackward0$|cudaGraphLaunch|cu(da)?LaunchKernel"
)
WHOLE = re.compile(r"aten::(mm|addmm|_scaled_mm(_v2)?|_fused_adamw_)$|te_bench::")
OF_A_CPU = re.compile(rf"attention|scaled_mm|^(?:{HOST.pattern})")


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a profiler saw of one call.

    names: the attention and FP8 operators and every GPU kernel, longest total time first. launches: kernels that the GPU
    ran, each as often as it did, those that a captured graph replays among them. Copies and fills by the driver are left
    out, by whatever means: libraries decide by their own heuristics whether to clear a workspace. None on a CPU, whose
    operators launch nothing, and where the profiler saw no GPU.
    counts: how often each of these kernels ran, and what HOST names of the host; on a CPU the key of a product in PyTorch
    has the operands' dtype too, "aten::mm c10::BFloat16", where the profiler tells it (torch 2.13).
    """

    names: list[str]
    launches: int | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def kernels_seen(call: Callable[[], object], device: str) -> Seen:
    """The operators and kernels that a call runs, and its launches, the fewer of two: what else ran is not its own.

    Whoever wants to count launches has called it before.
    """
    first = seen_once(call, device)
    if device != "cuda":
        return first
    second = seen_once(call, device)
    if not (first.launches and second.launches):
        return Seen(first.names, None, second.counts)
    fewer = first if first.launches < second.launches else second
    return Seen(first.names, fewer.launches, fewer.counts)


def seen_once(call: Callable[[], object], device: str) -> Seen:
    if device == "cuda":
        torch.cuda.synchronize()  # what was queued before is not the call's
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=device != "cuda") as profiler:  # and dtypes
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    if device != "cuda":
        return _seen_on_cpu(profiler)
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    launches = 0
    event: FunctionEvent
    for event in profiler.events() or []:
        on_gpu = "CUDA" in str(event.device_type)
        if on_gpu or "attention" in event.name or "scaled_mm" in event.name:
            seconds[event.name] = seconds.get(event.name, 0.0) + (event.device_time if on_gpu else 0.0)
        if on_gpu and not spans_kernels(event) and not event.name.startswith(COPIES):
            launches += 1
            counts[event.name] += 1
        elif not on_gpu and HOST.match(event.name) and not _a_part(event):
            counts[event.name] += 1
    names = [name[:200] for name in sorted(seconds, key=lambda name: -seconds[name])]
    return Seen(names, launches or None, counts)  # no call of ours runs nothing: the profiler saw no GPU


def _seen_on_cpu(profiler: profile) -> Seen:
    """By Kineto's own events: profiler.events() makes objects and a tree of all 4,000 of a small step, half a second."""
    found = [event for event in profiler.profiler.kineto_results.events() if OF_A_CPU.search(event.name())]  # type: ignore[union-attr]
    names: dict[str, None] = {}
    counts: Counter[str] = Counter()
    # When what counts as one ends, and each name: the autograd engine says some twice.
    ends: dict[tuple[int, str], int] = {}
    for event in sorted(found, key=lambda event: (event.start_ns(), -event.end_ns())):
        name, thread = event.name(), event.start_thread_id()
        if "attention" in name or "scaled_mm" in name:
            names[name[:200]] = None
        if not HOST.match(name):
            continue
        if event.start_ns() >= max(ends.get((thread, ""), 0), ends.get((thread, name), 0)):
            counts[_of_dtype(name, event.dtypes())] += 1
            ends[thread, "" if WHOLE.match(name) else name] = event.end_ns()
    return Seen(list(names), None, counts)


def _a_part(event: FunctionEvent) -> bool:
    """Whether the event is inside of a product or an operator that counts as one."""
    parent = event.cpu_parent
    while parent is not None and not WHOLE.match(parent.name):
        parent = parent.cpu_parent
    return parent is not None


def _of_dtype(name: str, dtypes: Sequence[str]) -> str:
    return f"{name} {dtypes[0]}" if dtypes and dtypes[0] and name in ("aten::mm", "aten::addmm") else name


def kernel_seconds(call: Callable[[], object], device: str) -> dict[str, float]:
    """{kernel: seconds a call} on a GPU, {operator: seconds of its own} on a CPU, the longest first."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with exclusive.alone(), profile(activities=activities) as profiler:
        exclusive.meet()  # it begins sooner in one rank than in another, which the collectives would wait for
        for _ in range(PROFILED):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    event: FunctionEvent
    for event in profiler.events() or []:
        annotation = event.is_user_annotation or (on_gpu and spans_kernels(event))
        if ("CUDA" in str(event.device_type)) == on_gpu and not annotation:
            own = event.device_time if on_gpu else event.self_cpu_time_total
            seconds[event.name[:200]] = seconds.get(event.name[:200], 0.0) + own / 1e6 / PROFILED
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    kept, rest = ordered[:KERNELS], ordered[KERNELS:]
    return dict(kept) | ({f"({len(rest)} others)": sum(value for _, value in rest)} if rest else {})


def kernel_spans(call: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, begin, end) in seconds of everything that a GPU did in PROFILED calls, by one clock."""
    with exclusive.alone(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        exclusive.meet()
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or []
        if "CUDA" in str(event.device_type) and not spans_kernels(event)
    ]


def spans_kernels(event: FunctionEvent) -> bool:
    """Whether a GPU's event is an annotation, of a compiled graph or a collective: it spans the kernels that it names."""
    return bool(event.is_user_annotation) or event.name.startswith(("## ", "Torch-Compiled", "nccl:", "FSDP::"))
