"""Check that numbers are drawn by the trial's seed. Otherwise trials of three seeds are one trial three times."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from te_bench.experiments.measurement import CheckFailed


def require(what: str, seed: int, draw: Callable[[int], Iterable[Tensor]], given: Sequence[Tensor] = ()) -> None:
    """Raise CheckFailed unless `given` are the first of draw(seed), and another seed changes each tensor.

    what: a plural, for the message. A constant tensor follows no seed.
    """
    own = list(draw(seed))
    if not all(map(torch.equal, given, own)):
        raise CheckFailed(f"the {what} are not those of the seed {seed}")
    same = [torch.equal(a, b) for a, b in zip(own, draw(seed + 1), strict=True) if a.amin() < a.amax()]
    if any(same) or not same:
        raise CheckFailed(f"the {what} do not depend on the seed {seed}")
