"""Test a mean one-sidedly with an error rate that holds for skewed gaps: a t-test, cautious if the sample is skewed.

Critical values hold for an exponential distribution, and for one gap in ten that lies 4 standard deviations off.

Student's t at alpha 0.05 calls 13 to 16 % of exponential gaps at the margin good: if the long tail is not in the sample,
its mean and spread are both too small. So t is divided by 1 + g / 4 if the sample's skewness g is above 0. Few gaps hardly
show their skewness, so critical values come from simulated gaps of the SHAPES, not from a normal distribution:
`skewed.json` holds them, and `python -m te_bench.reports.convergence.skewed` writes it.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]
Shape = Callable[[np.random.Generator, tuple[int, ...]], Array]  # draws gaps of mean 0, a row for each case

#: The text that accompanies every claim.
ASSUMPTION = (
    "The error rate holds for gaps that are normal, heavy on both sides, as skewed as an exponential distribution, or of "
    "which one in ten lies 4 standard deviations off. Larger outliers can hide from so few runs"
)
#: Among 0, 0.25, 0.5, 1 and 2, this needs the smallest margin at a power of 80 % for 3 to 13 normal gaps.
LEAN = 0.25
FEWEST = 3  # two gaps have no skewness
MOST = 100  # more gaps use the critical values of so many, which are a little too large
TABLE = Path(__file__).with_name("skewed.json")

# The table's numbers of gaps and levels, and its number of simulated cases, by which a level of 5 % is off by 0.04 points.
_NUMBERS = (*range(3, 21), 24, 30, 40, 60, MOST)
_LEVELS = (*(10 ** (k / 5 - 5) for k in range(19)), 0.05, *(k / 10 for k in range(1, 10)), 0.97, 0.99, 0.999)
LEAST_ALPHA = _LEVELS[0]  # no test is tabled below
_TABLED = 400_000
_CHUNK = 20_000


def exponential(draw: np.random.Generator, size: tuple[int, ...]) -> Array:
    return draw.standard_exponential(size) - 1


def one_in_ten(draw: np.random.Generator, size: tuple[int, ...]) -> Array:
    return draw.standard_normal(size) + 4 * (draw.random(size) < 0.1) - 0.4


def normal(draw: np.random.Generator, size: tuple[int, ...]) -> Array:
    return draw.standard_normal(size)


SHAPES: tuple[Shape, ...] = (exponential, one_in_ten)  # both with rare high gaps, which hide a high mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """An estimated mean, its standard error, the skewness of its gaps, and its degrees of freedom."""

    value: float
    se: float
    skewness: float
    df: float

    def p_below(self, bound: float) -> float:
        """Return the p-value of the claim that the true mean lies below `bound`."""
        levels, (values, _) = np.log(_LEVELS), _tabled(self.df)
        found = np.arcsinh(float(worse((self.value - bound) / self.se, self.skewness)))
        return float(np.exp(np.interp(found, np.arcsinh(values), levels, right=0.0)))

    def p_above(self, bound: float) -> float:
        return self._mirrored.p_below(-bound)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval of bounds that the tests in both directions at alpha do not exclude."""
        limit = critical(self.df, alpha)
        return -self._mirrored._upper(limit), self._upper(limit)

    @property
    def _mirrored(self) -> "Mean":
        return Mean(value=-self.value, se=self.se, skewness=-self.skewness, df=self.df)

    def _upper(self, limit: float) -> float:
        return self.value + self.se * float(reach(self.skewness, limit))


def mean_of(gaps: Sequence[float] | Array) -> Mean:
    """Return the mean of 3 or more gaps, which vary; of 2, without skewness."""
    x = np.asarray(gaps, dtype=np.float64)
    n, sd = x.size, float(x.std(ddof=1))
    skewness = float(np.sum(((x - x.mean()) / sd) ** 3)) * n / ((n - 1) * (n - 2)) if n >= FEWEST else 0.0
    return Mean(value=float(x.mean()), se=sd / math.sqrt(n), skewness=skewness, df=n - 1)


def worse(t: Array | float, skewness: Array | float) -> Array:
    """Return t / (1 + g / 4) if t < 0 and the skewness g > 0; else t."""
    return np.asarray(np.where(np.asarray(t) < 0, t / _longer(skewness), t))


def reach(skewness: Array | float, limit: float) -> Array:
    """Return how many standard errors below its bound an estimate must lie for `worse` to equal `limit`."""
    return np.asarray(-limit * _longer(skewness) if limit < 0 else np.full_like(skewness, -limit, dtype=np.float64))


def _longer(skewness: Array | float) -> Array:
    return np.asarray(1 + LEAN * np.maximum(skewness, 0))


def critical(df: float, alpha: float) -> float:
    """Return what `worse` must not exceed for a claim at the level alpha, for gaps of any of the SHAPES."""
    return _level(_tabled(df)[0], alpha)


def typical_reach(df: float, alpha: float) -> float:
    """Return the `reach`, in standard errors, with the test's own power for normal gaps, whose skewness varies."""
    return -_level(_tabled(df)[1], alpha)


def _level(values: Array, alpha: float) -> float:
    if alpha < LEAST_ALPHA:
        return -math.inf  # too rare to simulate: no claim
    return float(np.sinh(np.interp(math.log(alpha), np.log(_LEVELS), np.arcsinh(values))))


def _tabled(df: float) -> tuple[Array, Array]:
    """Return critical values and typical reaches by level, for the table's next smaller number of gaps, from FEWEST on."""
    return _table()[max(n for n in _NUMBERS if n <= int(df) + 1)]


@functools.cache
def _table() -> dict[int, tuple[Array, Array]]:
    return {int(n): (np.array(a), np.array(b)) for n, (a, b) in json.loads(TABLE.read_text()).items()}


# ---- by simulation


def simulated(shape: Shape, looks: Sequence[int], draws: int, *, seed: int) -> Array:
    """Return (looks, draws): `worse` of the first n gaps, n in `looks`, of `draws` cases."""
    mean, se, skewness = _means(shape, looks, draws, seed)
    return worse(mean / se, skewness)


def _means(shape: Shape, looks: Sequence[int], draws: int, seed: int) -> tuple[Array, Array, Array]:
    """Return three (looks, draws): mean, standard error and skewness of the first n gaps."""
    draw, n = np.random.default_rng(seed), np.array(looks)[:, None]
    parts = []
    for first in range(0, draws, _CHUNK):
        gaps = shape(draw, (min(_CHUNK, draws - first), looks[-1])).T.copy()
        one, two, three = (np.cumsum(power, axis=0)[n[:, 0] - 1] for power in (gaps, gaps**2, gaps**3))
        mean = one / n
        se = np.sqrt((two - n * mean**2) / (n * (n - 1)))
        third = (three - 3 * mean * two + 2 * n * mean**3) / (n * (n - 1) * (n - 2))
        parts.append((mean, se, third / se**3 * np.sqrt(n)))
    mean, se, skewness = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return mean, se, skewness


def tabulate(n: int) -> tuple[list[float], list[float]]:
    """Return the critical values of n gaps by level, the strictest over SHAPES, and typical reaches with a t's sign."""
    from te_bench.reports.convergence.power import reach_of

    shapes = [np.quantile(simulated(s, (n,), _TABLED, seed=1), _LEVELS) for s in SHAPES]
    values = np.min([*shapes, stdtrit(n - 1, _LEVELS)], axis=0)  # normal gaps need Student's at least
    typical = []
    for limit in values:
        if limit > -0.5:  # nobody makes a claim at such a level
            typical.append(float(limit))
        else:
            typical.append(-reach_of(float(np.quantile(np.maximum(*shown(n, limit, _TABLED // 4)), 0.8)), n - 1))
    return [round(float(v), 4) for v in values], [round(v, 4) for v in typical]


def shown(n: int, limit: float, draws: int) -> tuple[Array, Array]:
    """Return two (draws,), for cases of n normal gaps of mean 0: the least bound that the mean is shown to lie below, and
    the least one whose negative it is shown to lie above.

    In true standard errors of the mean.
    """
    mean, se, skewness = (part[0] for part in _means(normal, (n,), draws, seed=2))
    return math.sqrt(n) * (se * reach(skewness, limit) + mean), math.sqrt(n) * (se * reach(-skewness, limit) - mean)


if __name__ == "__main__":
    TABLE.write_text("{\n" + ",\n".join(f'"{n}": {json.dumps(tabulate(n))}' for n in _NUMBERS) + "\n}\n")
