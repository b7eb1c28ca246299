"""One attention call, forward and backward apart, after its output and gradients were held to float64.

precision is the dtype of q, k and v. Documents are packed: (rows, heads, features), all sequences' one after the other.
samples: forward_s, backward_s; peak_*_bytes of both, with the buffer that overwrites the L2; on a GPU that counts it
energy_j (1), of a forward and a backward pass, one pair right after the other.
work: forward_flop = 4 B H T^2 D, halved when causal, of documents each one's T^2, and for a window 4 B H D for each key
that a row sees; dropout adds none; backward_flop = 2.5 times that; on a GPU launches, the kernels of a forward and a
backward pass; of `auto` chosen, the backend that it chose, which is the one that was checked and whose kernels had to run;
in a mode that compiles graph_breaks and recompiles, one of them the check's where that had to be smaller.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import held, rounding, seeds, what_ran
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, Quantity, judge, of_largest
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.checks.tolerances import ACCUMULATED, FACTOR
from te_bench.experiments.instruments import compilation, energy, memory
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.problems import AttentionProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels import attention
from te_bench.kernels.attention.packed import attend_packed
from te_bench.kernels.attention.sdpa import repeat_heads

#: Of the share that dropout keeps: one step of 8 bits, in which PyTorch's flash counts it, and so many standard errors.
KEPT_STEP, KEPT_SIGMAS = 2.0**-8, 5.0
CHECK_SCORES = 2**26  # at most so many float64 scores (0.5 GiB) are held by the reference: it gets fewer heads


def run(trial: Trial, context: Context) -> Measurement:
    # The backward pass is timed again and again on one graph, whose buffers a compiled one must not give away.
    with torch._functorch.config.patch(donated_buffer=False):
        return _run(trial, context)


def _run(trial: Trial, context: Context) -> Measurement:
    p, problem = AttentionProblem.of(trial), problem_of(trial)
    backend, chosen = attention.load(trial.attention), attention.rival(trial.attention, problem)
    require(trial.attention, backend.unsupported(attention.posed(backend, problem)))
    compilation.begin(trial)
    forward = _bind(trial, backend)
    # At the check's size, where that is smaller, `auto` might choose another.
    checked = forward if chosen == trial.attention else _bind(trial, attention.load(chosen))
    if trial.mode == "compile":
        forward = torch.compile(forward, dynamic=False)
        checked = forward if chosen == trial.attention else torch.compile(checked, dynamic=False)
    check = check_attention(trial, checked) if context.check else CHECKED_BEFORE
    q, k, v, dout = inputs(trial, p.batch, p.heads)
    if context.check:
        of = functools.partial(dataclasses.replace, trial)
        seeds.require("inputs", trial.seed, lambda seed: inputs(of(seed=seed), p.batch, p.heads), (q, k, v, dout))
    out = forward(q, k, v)
    flop = 4 * p.batch * p.heads * p.head_dim * seen_pairs(p)
    work: dict[str, Any] = {"forward_flop": flop, "backward_flop": 5 * flop // 2}
    if chosen != trial.attention:
        work["chosen"] = chosen

    ahead = Timed(lambda: forward(q, k, v))
    back = Timed(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    memory.reset(trial.device)
    samples = {"forward_s": ahead.samples(timing.kernel, trial.device)}
    left = [_few(p, ahead.take().detach()).cpu()]  # beside the backward pass it would take memory
    samples |= {"backward_s": back.samples(timing.kernel, trial.device)}
    peaks = memory.peak(trial.device)
    held.require(peaks, held.of_tensors([dout, out]) + 2 * held.of_tensors([q, k, v]))  # and their gradients
    samples |= peaks
    work |= compilation.counts(trial)

    measurement = Measurement(check=check, work=work, samples=samples)
    if not context.check:  # a gate's later rounds need times and memory alone
        return measurement

    if not p.dropout:  # whose weights nobody knows
        # One head has only its share of the gradients of keys and values that others share.
        apart = _checked(p)[1] == p.heads or p.kv_heads in (None, p.heads)
        left += [_few(p, each).cpu() for each in back.take()[: 3 if apart else 1]]
        few = [_few(p, each.detach()).requires_grad_() for each in (q, k, v, dout)]
        judge("manual attention, fp64", _quantities(trial, few, [each.to(trial.device) for each in left]))
    both = Timed(lambda: (ahead(), back()))
    measurement = what_ran.require_attention(trial, both.seen(trial.device), measurement)
    seconds = sum(statistics.median(samples[way]) for way in ("forward_s", "backward_s"))
    joules = energy.sample(both, trial.device, [seconds])
    return dataclasses.replace(measurement, samples={**measurement.samples, **joules})


def problem_of(trial: Trial) -> attention.Problem:
    p = AttentionProblem.of(trial)
    trial_model.require_device(trial.device)
    return p.posed(trial.precision, trial.device, trial_model.capability(trial.device))


def seen_pairs(p: AttentionProblem) -> int:
    """Return how many keys all rows of one head of a sequence see; of a causal document half of T^2, as everybody counts."""
    if p.window is None:
        return sum(length**2 // (2 if p.causal else 1) for length in p.lengths)
    left, right = (p.length if side < 0 else side for side in p.window)
    right = 0 if p.causal else right
    return sum(min(i + right, length - 1) - max(i - left, 0) + 1 for length in p.lengths for i in range(length))


def inputs(trial: Trial, batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, dout: standard normal, (batch, heads, T, D) in the trial's dtype; k and v have their share of heads.

    Documents are (1, heads, batch T, D), and lie in memory as (batch T, heads, D).
    """
    p = AttentionProblem.of(trial)
    generator = torch.Generator(trial.device).manual_seed(trial.seed)
    shared = p.heads // p.kv_heads if p.kv_heads else 1
    dtype = trial_model.DTYPES[trial.precision]

    def draw(n: int) -> Tensor:
        packed = p.documents is not None
        size = (batch * p.length, n, p.head_dim) if packed else (batch, n, p.length, p.head_dim)
        drawn = torch.randn(size, generator=generator, device=trial.device).to(dtype)
        return drawn.transpose(0, 1)[None] if packed else drawn

    counts = heads, max(1, heads // shared), max(1, heads // shared), heads
    q, k, v, dout = map(draw, counts)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def check_attention(trial: Trial, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Hold out, dq, dk and dv to FlashAttention's rule: max error <= 2 x manual attention's at the same dtype + floor.

    A backend that computes in FP8 is held to manual_fp8. The floor is twice what rounding the exact result to the dtype
    costs, and 16 units of float32's accumulation: in fp32 manual's own error is by chance as small as 0.7 of that (CPU flash
    and math, 1.3 x the rule). The scale of each is held too, for one large element does not decide over it. With dropout the
    backend is made to show which weights it drops, and the definition drops the same. Raises CheckFailed.
    """
    p = AttentionProblem.of(trial)
    given = inputs(trial, *_checked(p))
    if not p.dropout:
        return judge("manual attention, fp64", _quantities(trial, given, _gradients(forward, given)))
    exact_inputs = [t.detach().double() for t in given]
    forward = _seeded(forward, trial.seed)
    kept = _weights(forward, given) > 0
    seen = _weights(functools.partial(_written_out, p), exact_inputs) > 0
    share, total = (kept & seen).sum().item() / seen.sum().item(), seen.sum().item()
    spread = math.sqrt(p.dropout * (1 - p.dropout) / total)
    off = abs(share - (1 - p.dropout))
    quantities = [Quantity("kept share", off, KEPT_STEP + KEPT_SIGMAS * spread)]
    return judge("manual attention, fp64", quantities + _quantities(trial, given, _gradients(forward, given), kept))


def _checked(p: AttentionProblem) -> tuple[int, int]:
    """Return how many sequences and heads the check is of."""
    return (p.batch, p.heads) if p.length**2 * p.batch * p.heads <= CHECK_SCORES else (1, 1)


def _few(p: AttentionProblem, x: Tensor) -> Tensor:
    """Return the sequences and heads that the check is of, from a tensor of all."""
    batch, heads = _checked(p)
    return x[:batch, :heads] if p.documents is None else x[:, :heads, : batch * p.length]


def _quantities(
    trial: Trial, given: Sequence[Tensor], ours: list[Tensor], kept: Tensor | None = None
) -> list[Quantity]:
    """Return what out, dq, dk and dv, or the first of these, err and may err. kept: the weights that dropout left."""
    p = AttentionProblem.of(trial)
    without = trial.with_(dropout=0.0)
    manual: Callable[..., Tensor] = functools.partial(_written_out, p)
    yardstick = attention.yardstick(trial.attention)
    definition = manual if yardstick == "manual" else _bind(without, attention.load(yardstick))
    if kept is not None:
        manual, definition = (_with_loss(way, kept, p.dropout) for way in (manual, definition))
    truth = _gradients(manual, [t.detach().double().requires_grad_() for t in given])
    library = _gradients(definition, given)
    precision = "fp8" if attention.in_fp8(trial.attention) else trial.precision
    quantities, scales = [], []
    for name, exact, known, value in zip(("out", "dq", "dk", "dv"), truth, library, ours, strict=False):
        rounded = (exact.to(value.dtype).double() - exact).abs().max().item()
        floor = FACTOR * rounded + ACCUMULATED * exact.abs().max().item()
        quantities.append(of_largest(name, value, exact, known, floor))
        scales.append(rounding.quantities(name, value, exact, known, precision)[0])
    return quantities + scales


def _written_out(p: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention by its definition, with every mask of the problem, and by nothing that backends share."""
    if p.documents is not None:  # (1, H, B T, D) to (B, H, T, D)
        q, k, v = (x[0].unflatten(1, (-1, p.length)).transpose(0, 1) for x in (q, k, v))
    rows = torch.arange(p.length, device=q.device)
    document = torch.repeat_interleave(torch.arange(len(p.lengths)), torch.tensor(p.lengths)).to(q.device)
    ahead = rows[None, :] - rows[:, None]  # of a row's own key
    sees = document[:, None] == document[None, :]
    left, right = p.window or (-1, -1)
    sees &= (ahead >= -left) | (left < 0)
    sees &= (ahead <= right) | (right < 0)
    sees &= (ahead <= 0) | (not p.causal)
    scores = q @ repeat_heads(k, q.shape[1]).mT * (1 / math.sqrt(p.head_dim))
    out = scores.masked_fill(~sees, -math.inf).softmax(-1) @ repeat_heads(v, q.shape[1])
    return out if p.documents is None else out.transpose(0, 1).flatten(1, 2)[None]


def _bind(trial: Trial, backend: attention.Backend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the backend as a function of `inputs`, with the trial's masks, documents and dropout, and scale 1 / sqrt(D)."""
    p = AttentionProblem.of(trial)
    options: dict[str, Any] = {"causal": p.causal, "scale": 1 / math.sqrt(p.head_dim)}
    options |= {"dropout": p.dropout} if p.dropout else {}
    if p.documents is not None:

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            starts, longest = _starts(p.lengths * (q.shape[2] // p.length), q.device), max(p.lengths)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            out = attend_packed(backend, q, k, v, starts, starts, (longest, longest), **options, window=p.window)
            return out.transpose(0, 1)[None]

        return packed
    if p.window is None:
        return lambda q, k, v: backend.forward(q, k, v, **options)
    return lambda q, k, v: attention.attend(backend, q, k, v, **options, window=p.window)


@functools.lru_cache(maxsize=2)
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each packed sequence begins, and where the last ends: (sequences + 1,) int32."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _seeded(forward: Callable[..., Tensor], seed: int) -> Callable[..., Tensor]:
    """Return `forward` with the seed set before each call, so that dropout loses the same weights."""

    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return forward(q, k, v)

    return seeded


def _weights(forward: Callable[..., Tensor], tensors: Any) -> Tensor:
    """Return what each value is multiplied by, (B, H, T, S): the output if the values are rows of the unit matrix."""
    q, k, v, _ = tensors
    width = v.shape[3]
    unit, parts = torch.eye(width, dtype=v.dtype, device=v.device), []
    for first in range(0, k.shape[2], width):
        values = torch.zeros_like(v)
        count = min(width, k.shape[2] - first)
        values[:, :, first : first + count] = unit[:count]
        parts.append(forward(q, k, values.requires_grad_()).detach()[..., :count])
    return torch.cat(parts, -1)


def _with_loss(forward: Callable[..., Tensor], kept: Tensor, dropout: float) -> Callable[..., Tensor]:
    """Return the definition's attention, written out once more from those of its weights that are `kept`."""

    def lossy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.shape[2]
        unit = torch.eye(keys, dtype=v.dtype, device=v.device).expand(*k.shape[:2], keys, keys)
        return (forward(q, k, unit) * kept / (1 - dropout)) @ repeat_heads(v, q.shape[1])

    return lossy


def _gradients(forward: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Any) -> list[Tensor]:
    q, k, v, dout = tensors
    out = forward(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
