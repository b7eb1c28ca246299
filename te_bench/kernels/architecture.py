"""What kernels ask of a GPU: its processors, of the device; what they offer, by the compute capability."""

import functools

import torch

Capability = tuple[int, int] | None  # None on a CPU

FP8_SINCE, TMA_SINCE, HOPPER = (8, 9), (9, 0), (9, 0)

# Of a processor with Hopper's compute capability.
HOPPER_SHARED_MEMORY = 227 * 1024  # bytes that one program may have
HOPPER_REGISTERS = 65536
HOPPER_L2 = 50 * 2**20  # bytes that a GPU's processors share


@functools.cache
def processors(device: torch.device, interpreted: int = 1) -> int:
    """Streaming multiprocessors of a GPU; `interpreted` on a CPU, few enough for a test's loops to turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """Bytes of a GPU's L2; Hopper's on a CPU, too, where its kernels are interpreted, or compiled without one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER:
        return HOPPER_L2
    return torch.cuda.get_device_properties(device).L2_cache_size


def lacks_fp8(capability: Capability) -> str | None:
    """Why a GPU has no FP8, or None."""
    if capability is None or capability >= FP8_SINCE:
        return None
    return f"FP8 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
