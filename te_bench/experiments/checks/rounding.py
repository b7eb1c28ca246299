"""Whether a tensor errs as rounding does, by two tests that average rounding away: of its scale, and of each row.

Rounding has no direction: of a gradient of a thousand elements that err by 10 % each, next to nothing lies along the
gradient itself. So its scale is known far better than its elements, and each row's error far better than the largest
element's. Both tests are told by a yardstick, right and rounded alike, how much rounding there is (docs/method.md).
"""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from te_bench.experiments.checks.quantity import Quantity
from te_bench.experiments.checks.tolerances import FACTOR, ROW_FACTOR, ROW_FLOOR, SCALE_FLOOR, SCALE_SIGMAS, TAIL

#: An error's largest directions, found by so many steps of a power iteration; what is left lies in many, and averages away.
DIRECTIONS = 16
POWER_STEPS = 4


def quantities(
    name: str,
    x: Tensor | None,
    truth: Tensor,
    yardstick: Tensor,
    precision: str,
    *,
    typical: float = 0.0,
    slack: float = 1.0,
    more: Sequence[Tensor] = (),
) -> list[Quantity]:
    """The scale of x, and its worst row or column as a share of what that may err; both in float64.

    typical: a relative error that is usual in the model, where the yardstick of this tensor happened to err less. slack:
    of a peer that may round more coarsely than the yardstick. more: further yardsticks.
    """
    if x is None:
        return [Quantity(f"{name}, scale", math.nan, 0.0)]
    truth = truth.double()
    found, known = x.double() - truth, [each.double() - truth for each in (yardstick, *more)]
    (a, _), scales = _scale(found, truth), [_scale(error, truth) for error in known]
    b = scales[0][0]
    beyond = max(a - max(b, 0.0), min(b, 0.0) - a)  # a, between the truth's scale and the yardstick's, is no error
    spreads = [[spread for _, spread in scales], [_spread_of_directions(error, truth) for error in known]]
    spread = max(map(root_mean_square, spreads))
    within = max(SCALE_SIGMAS * spread, limit([abs(scale) for scale, _ in scales]) if more else 0.0)
    return [
        Quantity(f"{name}, scale", max(beyond, 0.0), slack * (within + SCALE_FLOOR[precision])),
        Quantity(f"{name}, worst row", slack**-1 * _worst_row(found, known, truth, precision, typical), 1.0),
    ]


def root_mean_square(values: Sequence[float]) -> float:
    return math.hypot(*values) / math.sqrt(len(values))


def aside(x: Tensor | None, truth: Tensor) -> float:
    """Return the relative error of x beside the multiple of the truth that is nearest to it."""
    if x is None:
        return math.nan
    x, truth = x.double(), truth.double()
    nearest = (x * truth).sum() / truth.square().sum().clamp(min=1e-300) * truth
    return ((x - nearest).norm() / truth.norm().clamp(min=1e-30)).item()


def limit(errors: Sequence[float], least: float = 0.0) -> float:
    """Return what a tensor's error may be by those of yardsticks: FACTOR times their mean square's root, or `least`.

    Where they differ from each other, as of one number, it is as many standard deviations above their mean as a scale's.
    """
    spread = statistics.stdev(errors) if len(errors) > 1 else 0.0
    return max(FACTOR * max(root_mean_square(errors), least), statistics.fmean(errors) + SCALE_SIGMAS * spread)


def _scale(error: Tensor, truth: Tensor) -> tuple[float, float]:
    """<error, truth> / <truth, truth>, by how much the tensor is too large, and the standard error of that.

    The latter as if rows were drawn at random, and columns: elements of one row err together. Of a vector, elements.
    """
    square = truth.square()
    total = square.sum().clamp(min=1e-300)
    along = error * truth / total
    scale = along.sum()
    odd = along - scale * square / total
    if odd.dim() > 1:
        odd = odd.flatten(0, -2)
        parts = [odd.sum(0), odd.sum(1)]
    else:
        parts = [odd]
    return scale.item(), torch.cat(parts).square().sum().sqrt().item()


def _spread_of_directions(error: Tensor, truth: Tensor) -> float:
    """The standard error of `_scale` as if the error's largest directions pointed along the truth by chance. Of a vector, 0.

    Where all tokens are nearly alike, an error lies in one direction or two, and neither rows nor columns err apart.
    """
    if truth.dim() == 1:
        return 0.0
    if not error.isfinite().all():
        return math.nan
    error, truth = error.flatten(0, -2), truth.flatten(0, -2)
    if error.shape[0] < error.shape[1]:
        error, truth = error.mT, truth.mT
    generator = torch.Generator(error.device).manual_seed(0)
    width = error.shape[1]
    basis = torch.randn((width, min(DIRECTIONS, width)), generator=generator, dtype=error.dtype, device=error.device)
    for _ in range(POWER_STEPS):
        basis = torch.linalg.qr(error.mT @ (error @ basis)).Q
    seen = error @ basis
    turn = torch.linalg.eigh(seen.mT @ seen).eigenvectors
    along = ((seen @ turn) * (truth @ basis @ turn)).sum(0) / truth.square().sum().clamp(min=1e-300)
    return torch.linalg.vector_norm(along).item()


def _worst_row(error: Tensor, known: list[Tensor], truth: Tensor, precision: str, typical: float) -> float:
    """Over rows and columns: the error's norm over what it may be, ROW_FACTOR (1 + TAIL / sqrt(2 w)) noise + floor.

    Of a vector over elements.

    A row's noise is the yardstick's own error in it, or the mean of all rows' where that is larger. w: in how many
    directions the yardstick's errors lie, at most a row's elements; where one token decides over v's gradient they are few.
    """
    if not truth.numel():
        return 0.0
    error, truth, *known = (t[:, None] if t.dim() == 1 else t.flatten(0, -2) for t in (error, truth, *known))
    norms = [torch.linalg.vector_norm(each).item() for each in known]
    overall = max(root_mean_square(norms), typical * torch.linalg.vector_norm(truth).item())
    directions = statistics.fmean(map(_directions, known))
    shares = []
    for side in (1, 0) if truth.shape[1] > 1 else (1,):
        rows, width = truth.shape[1 - side], min(truth.shape[side], directions)
        noise = torch.stack([each.square().sum(side) for each in known]).mean(0).sqrt()
        noise = noise.clamp(min=overall / math.sqrt(rows))
        limit = ROW_FACTOR * (1 + TAIL / math.sqrt(2 * width)) * noise
        limit += ROW_FLOOR[precision] * torch.linalg.vector_norm(truth, dim=side)
        shares.append((torch.linalg.vector_norm(error, dim=side) / limit.clamp(min=1e-300)).max())
    return torch.stack(shares).max().item()


def _directions(x: Tensor) -> float:
    """Of the rows of x (M, N), and of its columns: (sum s^2)^2 / sum s^4 of its singular values s, at least 1."""
    gram = x.mT @ x if x.shape[0] > x.shape[1] else x @ x.mT
    squares = gram.square().sum()
    return max(1.0, (gram.trace().square() / squares.clamp(min=1e-300)).item())
