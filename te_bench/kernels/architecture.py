"""What kernels ask of a GPU, and what GPUs offer: by compute capability, by name, and of the device that is there."""

import functools
import re
from dataclasses import dataclass

import torch

from te_bench import plugins

Capability = tuple[int, int] | None  # None on a CPU

BF16_SINCE, FP8_SINCE, TMA_SINCE, HOPPER = (8, 0), (8, 9), (9, 0), (9, 0)
KIB, MIB = 1024, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What all GPUs of a compute capability have.

    shared_memory: bytes that one program may have, opted in. warpgroups: products of warpgroups (wgmma), which the kernels
    in Gluon are made of. tensor_memory: products leave their sums in a memory of their own (tcgen05). Without either,
    products read their operands from registers (mma.sync). compiled: every Triton kernel is compiled for it by the tests.
    """

    shared_memory: int
    compiled: bool = False
    warpgroups: bool = False
    tensor_memory: bool = False

    @property
    def products_from_registers(self) -> bool:
        return not (self.warpgroups or self.tensor_memory)


#: CUDA C++ Programming Guide 13.0, 5.1, technical specifications per compute capability: shared memory per thread block.
ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (7, 5): Architecture(shared_memory=64 * KIB),
    (8, 0): Architecture(shared_memory=163 * KIB, compiled=True),
    (8, 6): Architecture(shared_memory=99 * KIB, compiled=True),
    (8, 7): Architecture(shared_memory=163 * KIB),
    (8, 9): Architecture(shared_memory=99 * KIB, compiled=True),
    (9, 0): Architecture(shared_memory=227 * KIB, compiled=True, warpgroups=True),
    (10, 0): Architecture(shared_memory=227 * KIB, compiled=True, tensor_memory=True),
    (10, 3): Architecture(shared_memory=227 * KIB, tensor_memory=True),
    (12, 0): Architecture(shared_memory=99 * KIB, compiled=True),
    (12, 1): Architecture(shared_memory=99 * KIB),
}

# Of a processor with Hopper's compute capability.
HOPPER_SHARED_MEMORY = ARCHITECTURES[HOPPER].shared_memory  # bytes that one program may have
HOPPER_REGISTERS = 65536
HOPPER_L2 = 50 * MIB  # bytes that a GPU's processors share


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One product. machine: its name as NVML gives it; l2 in bytes, bandwidth of its memory in bytes a second."""

    machine: str
    capability: tuple[int, int]
    processors: int
    l2: int
    bandwidth: float

    @property
    def shared_memory(self) -> int:
        """Bytes that one program may have."""
        return architecture(self.capability).shared_memory

    @property
    def fp8(self) -> bool:
        return self.capability >= FP8_SINCE

    @property
    def tma(self) -> bool:
        return self.capability >= TMA_SINCE


def _gpu(machine: str, capability: tuple[int, int], processors: int, l2_mib: float, gigabytes: float) -> Gpu:
    l2, bandwidth = int(l2_mib * MIB), gigabytes * 1e9
    return Gpu(machine=machine, capability=capability, processors=processors, l2=l2, bandwidth=bandwidth)


#: By the name that people say. From NVIDIA's whitepapers (processors, L2) and datasheets (bandwidth).
GPUS: dict[str, Gpu] = {
    # A100 Tensor Core GPU Architecture; A100 datasheet (80 GB, SXM)
    "A100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 2039),
    # Ampere GA102 GPU Architecture; A10 datasheet
    "A10": _gpu("NVIDIA A10", (8, 6), 72, 6, 600),
    "RTX 3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 936),
    # Ada GPU Architecture; L4 and L40S datasheets
    "L4": _gpu("NVIDIA L4", (8, 9), 58, 48, 300),
    "L40S": _gpu("NVIDIA L40S", (8, 9), 142, 96, 864),
    "RTX 4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 1008),
    # H100 Tensor Core GPU Architecture; H100 and H200 datasheets
    "H100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 3350),
    "H100 PCIe": _gpu("NVIDIA H100 PCIe", (9, 0), 114, 50, 2000),
    "H200": _gpu("NVIDIA H200", (9, 0), 132, 50, 4800),
    # Blackwell datasheet (HGX B200, per GPU); processors and L2 as CUDA gives them
    "B200": _gpu("NVIDIA B200", (10, 0), 148, 126, 8000),
    # RTX Blackwell GPU Architecture; RTX PRO Blackwell GPU Architecture, RTX PRO 6000 Server Edition datasheet
    "RTX 5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 1792),
    "RTX PRO 6000": _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 128, 1597),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, whatever its case, with or without "NVIDIA", "GeForce" and "RTX"; or as NVML has it.

    Raises ValueError, with the names there are, for another one.
    """
    by_name = {_plain(said): gpu for known, gpu in GPUS.items() for said in (known, gpu.machine)}
    if _plain(name) not in by_name:
        plugins.check("GPU", name, list(GPUS))
    return by_name[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"NVIDIA|GEFORCE|RTX|[\s-]", "", name.upper())


def architecture(capability: tuple[int, int]) -> Architecture:
    """Of a compute capability; one that is not in the table is taken for the nearest older one there."""
    known = [each for each in ARCHITECTURES if each <= capability]
    return ARCHITECTURES[max(known, default=min(ARCHITECTURES))]


@functools.cache
def of_device(device: torch.device) -> Architecture:
    """Of a device; Hopper's on a CPU, where its kernels are interpreted, or compiled without a GPU."""
    return architecture(torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER)


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


def lacks_bf16(capability: Capability) -> str | None:
    """Why a GPU has no tensor cores of bf16, or None."""
    if capability is None or capability >= BF16_SINCE:
        return None
    return f"bf16 needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"


def lacks_tma(capability: Capability) -> str | None:
    """Why a GPU has no Tensor Memory Accelerator, which kernels fed by descriptors need, or None."""
    if capability is None or capability >= TMA_SINCE:
        return None
    return f"TMA needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
