"""Profile a call: the operators and kernels that ran, their counts and their seconds."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from te_bench.experiments import exclusive

#: Prefixes of copies and fills: Kineto's names, and the driver's own kernels that do some of them in a captured graph,
#: "memcpy32_post" and "memset32" (H200, CUDA 13.0).
COPIES = ("Memcpy ", "Memset ", "memcpy32", "memset32")
LOOKS = {"cuda": 2, "cpu": 1}  # calls that kernels_seen makes
PROFILED = 3  # calls under the profiler; kernel_seconds is their mean
KERNELS = 60  # names in kernel_seconds; all other kernels share one entry

#: The host events that `Seen.counts` has: PyTorch's products, norms and activations, te_bench's operators and autograd
#: Functions, torch.compile's regions, and the driver's launches. An operator inside one of WHOLE is a part of it, and not
#: counted.
HOST = re.compile(
    r"aten::(mm|addmm|_scaled_mm(_v2)?|_fused_adamw_)$|te_bench::|Segment(Backward)?$|Torch-Compiled Region|"
    r"aten::(native_layer_norm|rms_norm|_fused_rms_norm|gelu)(_backward)?$|RsqrtBackward0$|cudaGraphLaunch|cu(da)?LaunchKernel"
)
WHOLE = re.compile(r"aten::(mm|addmm|_scaled_mm(_v2)?|_fused_adamw_)$|te_bench::")
OF_A_CPU = re.compile(rf"attention|scaled_mm|^(?:{HOST.pattern})")


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a profiler saw of one call.

    names: the attention and FP8 operators and every GPU kernel, longest total time first. launches: the number of kernels
    that the GPU ran, with those that a captured graph replays. Copies and fills are left out, because libraries decide by
    heuristics whether to clear a workspace. None on a CPU, whose operators launch nothing, and if the profiler saw no GPU.
    counts: how often each of these kernels, and each of HOST's events, ran; on a CPU the key of a PyTorch product includes
    the operands' dtype, "aten::mm c10::BFloat16", if the profiler reports it (torch 2.13).
    """

    names: list[str]
    launches: int | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def kernels_seen(call: Callable[[], object], device: str) -> Seen:
    """Return what a call runs, and the smaller launch count of two calls: additional kernels are not the call's own.

    To count launches, warm the call up first.
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
        torch.cuda.synchronize()  # exclude work queued before the call
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
    return Seen(names, launches or None, counts)  # every call runs something; 0 means that the profiler saw no GPU


def _seen_on_cpu(profiler: profile) -> Seen:
    """Read Kineto's own events: profiler.events() builds a tree of a small step's 4,000 events, in half a second."""
    found = [event for event in profiler.profiler.kineto_results.events() if OF_A_CPU.search(event.name())]  # type: ignore[union-attr]
    names: dict[str, None] = {}
    counts: Counter[str] = Counter()
    # The end of the last WHOLE event, and of each name: the autograd engine reports some events twice.
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
    """Return whether the event lies inside a WHOLE product or operator."""
    parent = event.cpu_parent
    while parent is not None and not WHOLE.match(parent.name):
        parent = parent.cpu_parent
    return parent is not None


def _of_dtype(name: str, dtypes: Sequence[str]) -> str:
    return f"{name} {dtypes[0]}" if dtypes and dtypes[0] and name in ("aten::mm", "aten::addmm") else name


def kernel_seconds(call: Callable[[], object], device: str) -> dict[str, float]:
    """Return {kernel: seconds per call} on a GPU, {operator: its own seconds} on a CPU, the longest first."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with exclusive.alone(), profile(activities=activities) as profiler:
        exclusive.meet()  # the profiler starts at different times in the ranks, and collectives would wait
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
    """Return (name, begin, end), in seconds of one clock, of everything that a GPU did in PROFILED calls."""
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
    """Return whether a GPU event is an annotation, of a compiled graph or a collective, which spans other kernels."""
    return bool(event.is_user_annotation) or event.name.startswith(("## ", "Torch-Compiled", "nccl:", "FSDP::"))
