"""What attention's backward pass takes by every way of timing it, with the clock and the power of each way.

    python benchmarks/attention_protocols.py [--shape 2,16,8192,128] [--rounds 3] [--seconds 50]

About a minute on an NVIDIA GPU. The same call, `torch.autograd.grad` of one output, goes through each way by turns, in FP8
and in bf16; every second round goes backwards. A way differs from the harness's protocol `kernel` in one thing: whether the
L2 is overwritten, how many calls stand in one burst, what holds the GPU until they are queued, whether the chip rests, how
the tensors lie. GHz: of the processors right after a burst, by cycles that a kernel counts; W: of the GPU's own energy
counter over the way's time, the waits of the host among it. Then the kernels of one call, one by one. --series: what the
calls of a burst take one after the other once the chip has rested.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from te_bench.experiments import environment, timing
from te_bench.experiments.instruments import profiling
from te_bench.kernels import attention
from te_bench.kernels.attention.hopper import fp8_launch

RIVALS = ("triton_fp8", "gluon", "cudnn")
SPIN = 400_000  # cycles by which the clock is read
AHEAD = 0.004  # seconds that the GPU waits for ten calls' host
Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Way:
    """What differs; predicted: TFLOP/s in FP8 and in bf16 (gluon) at 2 x 16 x 8192 x 128, causal."""

    calls: int = 10  # a burst
    bursts: int = 10
    flush: bool = True
    hold: str = "spin"  # "spin", "matmul" or "no"
    rest: float = 0.0  # seconds between bursts
    lies: str = "apart"  # "apart", "as out": dout (B, T, H, D) in memory, "projected": q, k, v of one tensor as well
    forward: bool = False  # a forward pass before each backward pass, not timed
    whole: bool = False  # two events around a burst, not around each call
    predicted: tuple[int, int] = (585, 530)


WAYS = {
    "harness: timing.kernel": Way(),
    "10 a burst, L2 flushed, held by a spin": Way(),
    "the same, not held": Way(hold="no", predicted=(580, 528)),
    "the same, held, L2 as it is": Way(flush=False, predicted=(588, 532)),
    "the same, 50 ms of rest between bursts": Way(rest=0.05, predicted=(610, 550)),
    "the same, held by 50 ms of matmul": Way(hold="matmul", bursts=4, predicted=(525, 485)),
    "100 a burst, L2 flushed, held by a spin": Way(calls=100, bursts=1, predicted=(560, 510)),
    "two events around 50, held by a spin": Way(calls=50, bursts=2, flush=False, whole=True, predicted=(570, 520)),
    "two events around 50, held by 50 ms of matmul": Way(
        calls=50, bursts=2, flush=False, whole=True, hold="matmul", predicted=(525, 485)
    ),
    "a forward pass before each, L2 as it is": Way(calls=50, bursts=1, flush=False, forward=True, predicted=(540, 500)),
    "10 a burst, dout as out lies": Way(lies="as out", predicted=(580, 530)),
    "10 a burst, q, k, v of one projection": Way(lies="projected", predicted=(575, 528)),
    "500 in one go (its last 100), L2 as it is": Way(calls=500, bursts=1, flush=False, hold="no", predicted=(530, 485)),
}


@dataclasses.dataclass(frozen=True)
class Found:
    seconds: list[float]  # of single calls, or their mean where two events stand around all
    clock: float  # Hz
    watts: float | None


def tensors(shape: tuple[int, ...], lies: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, standard normal in bf16, (B, H, T, D), leaves or parts of one leaf."""
    batch, heads, length, width = shape
    if lies == "projected":
        mixed = torch.randn(batch, length, 3, heads, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        q, k, v = (x.transpose(1, 2) for x in mixed.unbind(2))
        return q, k, v
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))  # type: ignore[return-value]


class Rival:
    """One backend at the shape: its calls, by how the tensors lie."""

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name, self.shape = name, shape
        self.made: dict[str, tuple[Call, Call]] = {}

    def calls(self, lies: str) -> tuple[Call, Call]:
        """A forward pass whose output is let go, and the backward pass of another one."""
        if lies not in self.made:
            attend = functools.partial(
                attention.load(self.name).forward, causal=True, scale=1 / math.sqrt(self.shape[3])
            )
            q, k, v = tensors(self.shape, lies)
            out = attend(q, k, v)
            dout = torch.randn(self.shape, device="cuda", dtype=torch.bfloat16)
            if lies != "apart":
                dout = torch.empty_like(out).copy_(dout)
            backward = functools.partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
            self.made[lies] = functools.partial(attend, q, k, v), backward
        return self.made[lies]


def _holder(kind: str, calls: int) -> Call:
    if kind == "no":
        return lambda: None
    if kind == "spin":
        return functools.partial(torch.cuda._sleep, int(AHEAD * calls / 10 * timing.KERNEL_CLOCK))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(35):  # 1.5 ms each
            torch.mm(a, a)

    return multiply


def _clock() -> Callable[[], float]:
    """Queue it after a burst and ask it after the wait: Hz."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    torch.cuda._sleep(SPIN)
    after.record()
    return lambda: SPIN / (before.elapsed_time(after) / 1e3)


def bursts(rival: Rival, way: Way) -> tuple[list[float], list[float]]:
    """Seconds of the calls, the last 100 of them, and the clock after each burst."""
    forward, backward = rival.calls(way.lies)
    flush = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    hold = _holder(way.hold, way.calls)
    seconds: list[float] = []
    clocks: list[float] = []
    for _ in range(way.bursts):
        time.sleep(way.rest)
        edges = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(way.calls)]
        hold()
        for before, after in edges:
            if way.flush:
                flush.zero_()
            if way.forward:
                forward()
            before.record()
            backward()
            after.record()
        clock = _clock()
        torch.cuda.synchronize()
        clocks.append(clock())
        if way.whole:
            seconds.append(edges[0][0].elapsed_time(edges[-1][1]) / 1e3 / way.calls)
        else:
            seconds += [before.elapsed_time(after) / 1e3 for before, after in edges]
    return seconds[-100:], clocks


def measured(rival: Rival, name: str, way: Way, energy: Callable[[], float | None]) -> Found:
    before, began = energy(), time.perf_counter()
    if name.startswith("harness"):
        seconds = timing.kernel(rival.calls(way.lies)[1], "cuda")
        clock = _clock()
        torch.cuda.synchronize()
        clocks = [clock()]
    else:
        seconds, clocks = bursts(rival, way)
    lasted, after = time.perf_counter() - began, energy()
    watts = None if before is None or after is None else (after - before) / lasted
    return Found(seconds, statistics.median(clocks), watts)


def _energy() -> Callable[[], float | None]:
    """Joules that the GPU has taken since its driver was loaded."""
    handle = environment._handle(f"GPU-{torch.cuda.get_device_properties().uuid}")
    if handle is None:
        return lambda: None
    import pynvml

    return lambda: environment._try(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle, scale=1e-3)


def _turns(rivals: list[Rival], rounds: int, deadline: float) -> Iterator[tuple[Rival, str]]:
    """Every way of every rival, backwards every second round, until the deadline."""
    all_of_them = [(rival, name) for name in WAYS for rival in rivals]
    for turn in range(rounds):
        for pair in all_of_them if turn % 2 == 0 else reversed(all_of_them):
            if time.perf_counter() > deadline:
                return
            yield pair


def kernels(rival: Rival) -> None:
    """us of each kernel of one backward pass."""
    seconds = profiling.kernel_seconds(rival.calls("apart")[1], "cuda")
    print(f"\n{rival.name}, kernels of one backward pass, us (sum {1e6 * sum(seconds.values()):.0f})")
    for name, value in seconds.items():
        print(f"  {1e6 * value:8.1f}  {name[:100]}")


def series(rivals: list[Rival], flop: float) -> None:
    """TFLOP/s of each call of bursts after a rest; and of FP8's tiles dealt otherwise, after rests and in one go."""
    at = (0, 1, 2, 3, 5, 8, 12, 20, 30, 39)
    print("\nTFLOP/s of the i-th call of a burst, L2 as it is, medians of 7 bursts; NVML's clock in them")
    print(f"{'after a rest of':32}" + "".join(f"{i:>6}" for i in at))
    for rest in (0.0, 0.02, 0.1, 0.5):
        for rival in rivals:
            clocks: list[float] = []
            way = Way(calls=40, bursts=1, flush=False, rest=rest)
            each = []
            for _ in range(7):
                with _watched(clocks):
                    each.append(bursts(rival, way)[0])
            medians = [flop / statistics.median(one[i] for one in each) / 1e12 for i in at]
            told = f"{min(clocks, default=0) / 1e9:.2f} to {max(clocks, default=0) / 1e9:.2f} GHz"
            print(f"{f'{rest} s, {rival.name}':32}" + "".join(f"{x:6.0f}" for x in medians) + f"   {told}", flush=True)
    usual = dict(fp8_launch.BACKWARD)
    print("\nFP8, programs that share a head's rows: after 0.1 s of rest; the last 100 of 300 in one go")
    for sharing in (2, 4, 8, 16, 32, 132):
        fp8_launch.BACKWARD = {True: usual[True]._replace(sharing=sharing)}  # type: ignore[assignment]
        cells = []
        for way in (Way(calls=20, bursts=5, flush=False, rest=0.1), Way(calls=300, bursts=1, flush=False, hold="no")):
            cells.append(flop / statistics.median(bursts(rivals[0], way)[0]) / 1e12)
        print(f"  {sharing:4}: {cells[0]:6.0f} {cells[1]:6.0f}", flush=True)
    fp8_launch.BACKWARD = usual


@contextlib.contextmanager
def _watched(clocks: list[float]) -> Iterator[None]:
    """NVML's SM clock every 2 ms, in Hz, from a thread."""
    read, over = environment.clocks_of(f"GPU-{torch.cuda.get_device_properties().uuid}"), threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            clock = read().sm_clock_hz
            clocks.extend([] if clock is None else [clock])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2,16,8192,128", help="batch, heads, length, head_dim")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--series", action="store_true", help="call by call after rests, and FP8's tiles dealt otherwise"
    )
    parser.add_argument("--seconds", type=float, default=50, help="no way begins after so many")
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    batch, heads, length, width = shape = tuple(int(x) for x in args.shape.split(","))
    flop = 5 * batch * heads * length**2 * width
    torch.manual_seed(0)
    rivals = [Rival(name, shape) for name in args.rivals]
    for rival in rivals:
        for lies in ("apart", "as out", "projected"):
            for call in rival.calls(lies):
                call()
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, backward at {args.shape}, causal", flush=True)
    if args.series:
        series(rivals, flop)
        return
    energy = _energy()
    found: dict[tuple[str, str], list[Found]] = {}
    for rival, name in _turns(rivals, args.rounds, deadline):
        time.sleep(0.05)
        found.setdefault((name, rival.name), []).append(measured(rival, name, WAYS[name], energy))
    print(f"\n{'TFLOP/s (each round) | GHz | W':52}" + "".join(f"{rival.name:>44}" for rival in rivals))
    for name, way in WAYS.items():
        cells = []
        for rival in rivals:
            rounds = found.get((name, rival.name), [])
            each = ", ".join(f"{flop / statistics.median(f.seconds) / 1e12:.0f}" for f in rounds)
            clock = ", ".join(f"{f.clock / 1e9:.2f}" for f in rounds)
            watts = ", ".join("-" if f.watts is None else f"{f.watts:.0f}" for f in rounds)
            cells.append(f"{each} | {clock} | {watts}")
        print(f"{name:52}" + "".join(f"{cell:>44}" for cell in cells) + f"   predicted {way.predicted}", flush=True)
    for rival in rivals:
        kernels(rival)


if __name__ == "__main__":
    main()
