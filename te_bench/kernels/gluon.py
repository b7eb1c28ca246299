"""A check that all Gluon kernels need."""

from te_bench.kernels.architecture import HOPPER


def unsupported(device: str, capability: tuple[int, int] | None, interpreted: bool) -> str | None:
    """Return why Gluon kernels cannot run there, or None. interpreted: Triton's kernels are interpreted."""
    if interpreted:
        return "Gluon has no interpreter (Triton 3.7): needs an NVIDIA GPU, and no TRITON_INTERPRET"
    if device != "cuda":
        return "needs an NVIDIA GPU"
    if capability is not None and capability != HOPPER:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0: no products of warpgroups"
    return None
