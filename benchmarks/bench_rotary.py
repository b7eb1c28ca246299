"""Rotary embeddings: the kernels, and from a QKV projection's output to q, k and v with and without the gradient.

    python benchmarks/bench_rotary.py [--json FILE]

prints of the latter how many bytes a second beside a copy's, those counted that the fused way must move: q and k read and
written, and in the backward pass three gradients. A minute on an NVIDIA GPU.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch

from te_bench.experiments import timing
from te_bench.kernels import rotary
from te_bench.kernels.rotary import Rotated
from te_bench.kernels.rotary.backends.reference import turned
from te_bench.models.modules.rotary import RotaryPositionEmbedding, Rotation, split_rotated

#: B, T, H, D
SIZES = {"cuda": [(4, 2048, 32, 128), (12, 1024, 12, 64)], "cpu": [(1, 128, 4, 64)]}
WAYS = ["fused", "plain", "compiled"]


def split_plainly(mixed, freqs, heads):
    """q, k, v (b, s, h, d) of mixed (b, s, 3 h d), by the operators that run without the kernel."""
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in mixed.chunk(3, -1))
    angles = freqs.transpose(0, 1)
    return turned(q, angles, False, False), turned(k, angles, False, False), v


def ways(mixed, size):
    """way -> a call that gives q, k and v of mixed."""
    b, t, h, d = size
    freqs = RotaryPositionEmbedding(d).to(mixed.device)(t)
    rotation = Rotation(freqs[:, 0, 0], freqs[:, 0, 0], 1, (h * d,) * 3, d, (b, t), True, False)
    compiled = torch.compile(split_plainly, fullgraph=True, dynamic=False)
    return {
        "fused": partial(split_rotated, mixed, rotation, own=True),
        "plain": partial(split_plainly, mixed, freqs, h),
        "compiled": partial(compiled, mixed, freqs, h),
    }


def parts_of(mixed, backward):
    """Of a projection (b, t, 3, h, d): q and k in place; or gradients q, k and v, and the projection's that they go to."""
    _, t, _, _, d = mixed.shape
    angles = RotaryPositionEmbedding(d).to(mixed.device)(t)[:, 0, 0]
    q, k, v = (x.transpose(0, 1)[:, :, None] for x in mixed.unbind(2))
    if not backward:
        return [Rotated(x, x, angles) for x in (q, k)]
    made = [x.transpose(0, 1)[:, :, None] for x in torch.empty_like(mixed).unbind(2)]
    return [Rotated(x, y, a) for x, y, a in zip((q, k, v), made, (angles, angles, None), strict=True)]


def with_gradient(call, mixed, gradients):
    return torch.autograd.grad(call(), mixed, gradients)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("backend", rotary.names())
def bench_rotary(cuda_benchmark, randn, device, dtype, capability, backend, index, interleaved, direction):
    """In place of q and k; gradients of q, k and v into one of the projection."""
    if index >= len(SIZES[device]):
        pytest.skip("one shape on a CPU")
    b, t, h, d = SIZES[device][index]
    rival = rotary.load(backend)
    if reason := rival.unsupported(rotary.Problem(dtype=dtype, device=device, capability=capability)):
        pytest.skip(f"{backend}: {reason}")
    backward = direction == "backward"
    parts = parts_of(randn(b, t, 3, h, d), backward)
    call = partial(rival.rotate, parts, interleaved=interleaved, transposed=backward)
    cuda_benchmark(call, group=f"rotary {direction} {b}x{t}x{h}x{d}", dtype=dtype, b=b, t=t, h=h, d=d)


@pytest.mark.parametrize("passes", ["forward", "both"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def bench_rotary_by_modules(cuda_benchmark, randn, device, dtype, way, index, passes):
    if index >= len(SIZES[device]):
        pytest.skip("one shape on a CPU")
    b, t, h, d = size = SIZES[device][index]
    mixed = randn(b, t, 3 * h * d).requires_grad_(passes == "both")
    call = ways(mixed, size)[way]
    if passes == "both":
        call = partial(with_gradient, call, mixed, [randn(b, t, h, d) for _ in range(3)])
    cuda_benchmark(call, group=f"rotary {passes} {b}x{t}x{h}x{d}", dtype=dtype, b=b, t=t, h=h, d=d)


def rivals(mixed, size):
    """Of the way from the projection to q, k and v: name -> call and bytes."""
    b, t, h, d = size
    third = mixed.nbytes // 3
    calls = {f"{way}, forward": (call, 4 * third) for way, call in ways(mixed, size).items()}
    leaf = mixed.clone().requires_grad_()
    gradients = [torch.randn(b, t, h, d, device=mixed.device, dtype=mixed.dtype) for _ in "qkv"]
    for way, call in ways(leaf, size).items():
        calls[f"{way}, both"] = partial(with_gradient, call, leaf, gradients), 10 * third
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    table = {}
    for size in SIZES[device]:
        b, t, h, d = size
        mixed = torch.randn(b, t, 3 * h * d, device=device).to(dtype)
        calls = {"copy": (partial(torch.empty_like(mixed).copy_, mixed), 2 * mixed.nbytes)}
        calls |= rivals(mixed, size)
        print(f"\nB{b} T{t} H{h} D{d} {dtype}, the L2 cold", flush=True)
        found = table[f"B{b} T{t} H{h} D{d}"] = {}
        for name, (call, nbytes) in calls.items():
            seconds = statistics.median(timing.kernel(call, device))
            rate = found[name] = {"us": 1e6 * seconds, "GB/s": nbytes / seconds / 1e9}
            of_copy = rate["GB/s"] / found["copy"]["GB/s"]
            print(f"  {name:46s} {rate['us']:8.1f} us {rate['GB/s']:6.0f} GB/s, {of_copy:.2f} of a copy's", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
