"""FP8 attention: its kernels checked, then tiles timed beside cuDNN's and Gluon's bf16 attention.

    python benchmarks/attention_fp8_tiles.py [--json FILE]  check, long and time: at most 14 minutes
    python benchmarks/attention_fp8_tiles.py check [NAME]   quantize or triton_fp8 against float64 of what FP8 leaves;
                                                            without a name both, each at most 150 s
    python benchmarks/attention_fp8_tiles.py long           accuracy at 16384 keys, at most 2 minutes
    python benchmarks/attention_fp8_tiles.py time           TFLOP/s, candidates by turns, at most 7 minutes

On a Hopper GPU, with Triton 3.6 or newer. Each piece is a process that is killed if it hangs; a check with a name, and what
has --here, is none.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from _race import Calls, apart, keep, race, told
from torch import Tensor

from te_bench.kernels.attention import fp8_quantize, load
from te_bench.kernels.attention.autograd import empty_gradients, empty_results
from te_bench.kernels.attention.backends import manual_fp8, triton_fp8
from te_bench.kernels.attention.hopper import fp8_launch
from te_bench.kernels.attention.hopper.launch import ALL, Plan
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward
from te_bench.kernels.attention.portable.launch import Tile

SHAPES = {  # B, H, T, D, causal, the forward pass's bar in TFLOP/s
    "B1 H16 T16384 D128 full": (1, 16, 16384, 128, False, 800),
    "B1 H16 T16384 D128 causal": (1, 16, 16384, 128, True, 0),
    "B2 H16 T8192 D128 causal": (2, 16, 8192, 128, True, 0),
    "B4 H32 T2048 D128 causal": (4, 32, 2048, 128, True, 0),
    "B4 H16 T8192 D64 causal": (4, 16, 8192, 64, True, 0),
    "B12 H12 T1024 D64 causal": (12, 12, 1024, 64, True, 0),
}
CASES = [  # B, H, Hkv, T, S, D, causal
    (1, 2, 2, 128, 128, 64, False), (1, 2, 2, 128, 128, 128, False), (2, 4, 2, 300, 300, 64, True),
    (2, 4, 2, 300, 300, 128, True), (1, 2, 1, 1, 200, 64, False), (1, 2, 2, 65, 1000, 128, False),
    (3, 12, 12, 1000, 1000, 64, True), (2, 8, 8, 2048, 2048, 128, True),
]  # fmt: skip
CAST = [(2, 3, 200, 64), (1, 4, 1000, 128), (2, 2, 64, 80)]  # B, H, T, D of what is quantised
TILES = [  # of triton_fp8's forward pass, none of which spills for heads of 128, or for those of 64
    Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 2, 128, 2), Tile(64, 64, 4, 3, 128, 2),
    Tile(64, 64, 4, 3, 96), Tile(64, 128, 4, 2, 128), Tile(64, 128, 4, 3, 128), Tile(64, 128, 4, 2, 168, 2),
    Tile(64, 128, 4, 2, 160, 2), Tile(128, 64, 8, 3, 128, 2), Tile(128, 64, 8, 4, 128, 2),
]  # fmt: skip
GLUON_PLANS = [Plan(3, 128, 2, 1, 160), Plan(3, 128, 3, 2, 160)]  # of heads of 128
GLUON_BACKWARD = [
    Plan(2, 64, stages, slots, 240, sharing=sharing)
    for stages, slots in ((2, 2), (2, 3), (3, 2))
    for sharing in (4, ALL)
]
OF_ROWS = [None, Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2)]  # None: those that ship
OF_KEYS = [Tile(32, 128, 8, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 2)]
casts = partial(fp8_quantize.quantize, keep=True)


def there_and_back(x: Tensor) -> Tensor:
    """What E4M3 leaves of x, a scale a head."""
    x = x.float()
    scale = 448 / x.abs().amax((2, 3), keepdim=True)
    return (x * scale).to(torch.float8_e4m3fn).double() / scale.double()


def decibels(truth: Tensor, x: Tensor) -> float:
    """Of signal to noise."""
    return 20 * math.log10(truth.norm().item() / max((truth - x.double()).norm().item(), 1e-300))


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """out, dq, dk, dv in float64 of what FP8 leaves."""
    group = q.shape[1] // k.shape[1]
    q8, k8, v8, dout8 = map(there_and_back, (q, k, v, dout))
    k8, v8, keys = (x.repeat_interleave(group, 1) for x in (k8, v8, k.double()))
    scores = q8 @ k8.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], device=q.device).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    dp = dout8 @ v8.mT
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
    dk, dv = (
        x.unflatten(1, (k.shape[1], group)).sum(2) for x in (scale * ds.mT @ q.double(), weights.mT @ dout.double())
    )
    return [weights @ v8, scale * ds @ keys, dk, dv]


def check_quantize() -> None:
    for batch, heads, rows, width in CAST:
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(batch, rows, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
            x[0, 1] = 0
            *_, made = fp8_quantize.quantize(x, x, x, keep=True)
            assert made.data is not None
            assert made.data_t is not None
            data, scale_inv = manual_fp8.quantize_heads(x)
            sixteens = range(0, made.data.shape[2], 16)
            order = [a + 8 * b + 2 * t + c for a in sixteens for t in range(4) for b in range(2) for c in range(2)]
            ours, ours_t = made.data.view(torch.uint8), made.data_t.view(torch.uint8)
            same = torch.equal(ours[:, :, :rows, :width], data.view(torch.uint8))
            transposed = torch.equal(ours_t, ours[:, :, order].unflatten(2, (-1, 128)).mT)
            scales = torch.equal(made.scale_inv, scale_inv[..., 0, 0])
            print("quantize", (batch, heads, rows, width), dtype, "rows", same, "transposed", transposed,
                  "scale_inv", scales, flush=True)  # fmt: skip


def check(which: str) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if which == "quantize":
        return check_quantize()
    for case in CASES:
        batch, heads, kv_heads, rows, keys, width, causal = case
        sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows)
        *leaves, dout = (torch.randn((batch, *size, width), device="cuda").bfloat16() for size in sizes)
        q, k, v = (x.requires_grad_() for x in leaves)
        results = []
        by_triton = partial(triton_fp8.attention, deterministic=True)
        for attention in (triton_fp8.attention, by_triton, manual_fp8.attention):
            out, _ = attention(q, k, v, causal=causal, scale=width**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
            torch.cuda.synchronize()
        with torch.no_grad():
            truth = exact(q, k, v, dout, causal, width**-0.5)
        *ours, definition = ([decibels(t, x) for t, x in zip(truth, made, strict=True)] for made in results)
        for name, own in zip(("ours", "deterministic"), ours, strict=True):
            right = rows == 1 or all(a >= min(b, 45) - 1 for a, b in zip(own, definition, strict=True))
            figures = name, *map("{:.1f}".format, own), "definition", *map("{:.1f}".format, definition), "dB"
            print(which, case, "ok" if right else "WRONG", *figures, flush=True)


def forward_calls(shape: str) -> Calls:
    batch, heads, rows, width, causal, _ = SHAPES[shape]
    q, k, v = (torch.randn(batch, heads, rows, width, device="cuda").bfloat16() for _ in range(3))
    scale, cast = width**-0.5, casts(q, k, v)
    given = (*empty_results(q, v), cast, rows, causal, scale)
    backends = {
        "cudnn bf16": load("cudnn").forward, "gluon bf16": load("gluon").forward,
        "triton_fp8 with casts": load("triton_fp8").forward,
    }  # fmt: skip
    return {
        **{name: partial(forward, q, k, v, causal=causal, scale=scale) for name, forward in backends.items()},
        "casts of q, k, v": partial(fp8_quantize.quantize, q, k, v, keep=False),
        **{f"in Triton {tuple(tile)}": partial(fp8_forward.forward, *given, tile) for tile in TILES},
        **{f"in Gluon {plan[:5]}": partial(fp8_launch.forward, *given, plan) for plan in GLUON_PLANS if width == 128},
    }


def backward_calls(shape: str) -> Calls:
    batch, heads, rows, width, causal, _ = SHAPES[shape]
    q, k, v, dout = (torch.randn(batch, heads, rows, width, device="cuda").bfloat16() for _ in range(4))
    scale, cast = width**-0.5, casts(q, k, v)
    out, lse = empty_results(q, v)
    fp8_forward.forward(out, lse, cast, rows, causal, scale)
    given = empty_gradients(q, k, v), dout, q, k, out, lse, cast, causal, scale
    ours = partial(fp8_backward.backward, *given)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = {name: load(name).forward(*leaves, causal=causal, scale=scale) for name in ("cudnn", "gluon")}
    return {
        **{f"{n} bf16": partial(torch.autograd.grad, y, leaves, dout, retain_graph=True) for n, y in theirs.items()},
        **{f"in Triton, rows {tile and tuple(tile)}": partial(ours, tile, None) for tile in OF_ROWS},
        **{f"in Triton, keys {tuple(tile)}": partial(ours, None, tile) for tile in OF_KEYS},
        **{
            f"in Gluon, {p.stages} and {p.slots} places, sharing {'all' if p.sharing == ALL else p.sharing}": partial(
                fp8_launch.backward, *given, p
            )
            for p in GLUON_BACKWARD
            if width == 128
        },
    }


def measure(file: Path | None) -> None:
    table = {}
    for shape, (batch, heads, rows, width, causal, bar) in SHAPES.items():
        flop = 4 * batch * heads * rows * rows * width // (2 if causal else 1)
        with torch.no_grad():
            medians = race(partial(forward_calls, shape), rounds=7, forgiving=True)
        table[f"{shape} forward"] = told(f"{shape} forward: bar {bar or '-'}", flop, medians)
        medians = race(partial(backward_calls, shape), rounds=5, forgiving=True)
        table[f"{shape} backward"] = told(f"{shape} backward", flop * 5 // 2, medians)
        keep(table, file)


def long() -> None:
    """512 rows of 16384 keys with values whose mean is not 0: what the tensor core's own sums lose."""
    keys, scale = 16384, 128**-0.5
    for mean in (0.0, 1.0):
        q, k, v = (torch.randn(1, 1, keys, 128, device="cuda").bfloat16() for _ in range(3))
        v = (v + mean).bfloat16()
        (out, lse), cast = empty_results(q, v), casts(q, k, v)
        weights = (there_and_back(q)[..., :512, :] @ there_and_back(k).mT * scale).softmax(-1)
        truth = weights @ there_and_back(v)
        for name, kernel in (("Triton", fp8_forward), ("Gluon", fp8_launch)):
            kernel.forward(out, lse, cast, keys, False, scale)
            first = out[..., :512, :]
            ratio = (first.double().sum() / truth.sum()).item()
            print(
                f"16384 keys, mean {mean}, {name}: {decibels(truth, first):.1f} dB, sums {ratio:.5f} of theirs",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "check", "long", "time"))
    parser.add_argument("name", nargs="?", help="of what is checked, in this process")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.name:
        return check(asked.name)
    if asked.here:
        return long() if asked.what == "long" else measure(asked.json)
    if asked.what in ("check", "all"):
        for name in ("quantize", "triton_fp8"):
            apart(150, "check", name)
    if asked.what in ("long", "all"):
        apart(120, "long", "--here")
    if asked.what in ("time", "all"):
        apart(420, "time", "--here", *(["--json", str(asked.json)] if asked.json else []))


if __name__ == "__main__":
    main()
