"""The needs of kernels and the features of GPUs: by compute capability, by name, and for the current device."""

import functools
import re
from dataclasses import dataclass

import torch

from te_bench import plugins

Capability = tuple[int, int] | None  # None on a CPU

BF16_SINCE, FP8_SINCE, TMA_SINCE, HOPPER, BLOCK_SCALES_SINCE = (8, 0), (8, 9), (9, 0), (9, 0), (10, 0)
KIB, MIB = 1024, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The features of all GPUs of a compute capability.

    shared_memory: bytes that a program can use, with opt-in. warpgroups: warpgroup matrix products (wgmma), which the
    Gluon kernels use. tensor_memory: products accumulate in tensor memory (tcgen05). Without either, operands come from
    registers (mma.sync). compiled: the tests compile every Triton kernel for it.
    """

    shared_memory: int
    compiled: bool = False
    warpgroups: bool = False
    tensor_memory: bool = False

    @property
    def products_from_registers(self) -> bool:
        return not (self.warpgroups or self.tensor_memory)


#: Source: CUDA C++ Programming Guide 13.0, 5.1, specifications per compute capability: shared memory per block.
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

# An SM of Hopper's compute capability.
HOPPER_SHARED_MEMORY = ARCHITECTURES[HOPPER].shared_memory  # bytes that a program can use
HOPPER_REGISTERS = 65536
HOPPER_L2 = 50 * MIB  # bytes that a GPU's SMs share


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU product. machine: its NVML name; l2 in bytes; memory bandwidth in bytes per second."""

    machine: str
    capability: tuple[int, int]
    processors: int
    l2: int
    bandwidth: float

    @property
    def shared_memory(self) -> int:
        """Bytes that a program can use."""
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


#: GPUs by their common names. Source: NVIDIA's whitepapers (SMs, L2) and datasheets (bandwidth).
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
    # Blackwell datasheet (HGX B200, per GPU); SMs and L2 as CUDA reports them
    "B200": _gpu("NVIDIA B200", (10, 0), 148, 126, 8000),
    # RTX Blackwell GPU Architecture; RTX PRO Blackwell GPU Architecture, RTX PRO 6000 Server Edition datasheet
    "RTX 5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 1792),
    "RTX PRO 6000": _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 128, 1597),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name (case, "NVIDIA", "GeForce" and "RTX" do not matter), or of that NVML name.

    Raises ValueError with the known names.
    """
    by_name = {_plain(said): gpu for known, gpu in GPUS.items() for said in (known, gpu.machine)}
    if _plain(name) not in by_name:
        plugins.check("GPU", name, list(GPUS))
    return by_name[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"NVIDIA|GEFORCE|RTX|[\s-]", "", name.upper())


def architecture(capability: tuple[int, int]) -> Architecture:
    """Return a compute capability's architecture; an unlisted one gets the nearest older one's."""
    known = [each for each in ARCHITECTURES if each <= capability]
    return ARCHITECTURES[max(known, default=min(ARCHITECTURES))]


@functools.cache
def of_device(device: torch.device) -> Architecture:
    """Return a device's architecture; Hopper's for a CPU, which interprets or only compiles its kernels."""
    return architecture(torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER)


@functools.cache
def processors(device: torch.device, interpreted: int = 1) -> int:
    """Return a GPU's number of SMs; `interpreted` on a CPU, small enough for a test's loops to repeat."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """Return a GPU's L2 size in bytes; Hopper's for a CPU, which interprets its kernels or compiles them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER:
        return HOPPER_L2
    return torch.cuda.get_device_properties(device).L2_cache_size


def lacks_fp8(capability: Capability) -> str | None:
    """Return why a GPU lacks FP8, or None."""
    return _lacks("FP8", FP8_SINCE, capability)


def lacks_bf16(capability: Capability) -> str | None:
    """Return why a GPU lacks bf16 tensor cores, or None."""
    return _lacks("bf16", BF16_SINCE, capability)


def lacks_tma(capability: Capability) -> str | None:
    """Return why a GPU lacks the Tensor Memory Accelerator, which kernels with descriptors need, or None."""
    return _lacks("TMA", TMA_SINCE, capability)


def lacks_block_scales(capability: Capability) -> str | None:
    """Return why a GPU lacks tensor cores that scale blocks of MXFP8 and NVFP4, or None."""
    return _lacks("a tensor core with block scales", BLOCK_SCALES_SINCE, capability)


def lacks_gluon(device: str, capability: Capability, interpreted: bool) -> str | None:
    """Return why Gluon kernels cannot run there, or None. interpreted: Triton's kernels are interpreted."""
    if interpreted:
        return "Gluon has no interpreter (Triton 3.7): needs an NVIDIA GPU, and no TRITON_INTERPRET"
    if device != "cuda":
        return "needs an NVIDIA GPU"
    if capability is not None and capability != HOPPER:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0: no products of warpgroups"
    return None


def _lacks(feature: str, since: tuple[int, int], capability: Capability) -> str | None:
    if capability is None or capability >= since:
        return None
    return "{} needs compute capability {}.{}, this GPU has {}.{}".format(feature, *since, *capability)
