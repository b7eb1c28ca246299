"""Which blocks of a model a recipe leaves in high precision, by the names of their modules."""

import math
from collections.abc import Iterable


def in_last_blocks(names: Iterable[str], share: float) -> frozenset[str]:
    """Of dotted names those in the last ceil(share x blocks) blocks, and those in no block, a head's; none of a share of 0.

    A block is a number in a name, such as 3 in transformer.h.3.mlp; of several lists of modules the longest counts. Raises
    ValueError where the share is above 0 and no name has a number.
    """
    if not share:
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
        raise ValueError(f"bf16_last={share}: the model's layers are in no numbered blocks; leave it at 0")
    blocks = max(found.values(), key=len)
    last = sorted(blocks)[-math.ceil(share * len(blocks)) :]
    return frozenset(outside).union(*(blocks[number] for number in last))
