"""Check which steps can keep weights and AdamW's moments in fewer bits than float32. Needs no torch."""


def unsupported(
    weights: str | None, states: str | None, *, ranks: bool = False, accumulate: int = 1, torchs: bool = False
) -> str | None:
    """Return why a step cannot keep weights or states in these formats (None: float32), or None if it can.

    ranks: several ranks share the step. accumulate: number of micro-batches. torchs: torch's AdamW updates.
    """
    if weights is None and states is None:
        return None
    if ranks:
        return "of steps on one GPU alone, for ranks would round apart"
    if weights is not None and accumulate > 1:
        return f"gradients of {accumulate} micro-batches would be summed in {weights}, which loses small ones; take 1"
    if torchs and states != weights:
        return "torch's AdamW keeps states in the weights' dtype; give both bf16, or an optimizer of te-bench's"
    return None
