"""Which blocks of a model a recipe leaves in high precision, by the names of their modules."""

import math
from collections.abc import Iterable


def in_end_blocks(names: Iterable[str], first: float, last: float) -> frozenset[str]:
    """Of dotted names those in the first and last ceil(share x blocks) blocks; with the last those in no block, a head's.

    A block is a number in a name, such as 3 in transformer.h.3.mlp; of several lists of modules the longest counts. A share
    of 0 has none. Raises ValueError where a share is above 0 and no name has a number.
    """
    if not first and not last:
        return frozenset()
    found: dict[str, dict[int, set[str]]] = {}
    outside = set[str]()
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is not None:
            found.setdefault(".".join(parts[:place]), {}).setdefault(int(parts[place]), set()).add(name)
        else:
            outside.add(name)
    if not found:
        said = f"bf16_last={last}" if last else f"bf16_first={first}"
        raise ValueError(f"{said}: the model's layers are in no numbered blocks; leave it at 0")
    blocks = max(found.values(), key=len)

    def whole(share: float) -> int:  # 0.07 x 100 blocks is 7, and a float above it
        return max(1, math.ceil(share * len(blocks) - 1e-9)) if share else 0

    numbers = sorted(blocks)
    ends = {*numbers[: whole(first)], *numbers[len(numbers) - whole(last) :]}
    return frozenset(outside if last else ()).union(*(blocks[number] for number in ends))
