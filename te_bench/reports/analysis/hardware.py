"""Peak dense FLOP/s and memory bandwidth of the GPUs that NVIDIA publishes figures for; an unknown GPU has none.

Vendors quote tensor-core rates with 2:4 sparsity, twice the dense rate that training can use: these are dense.
"""

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Dense peaks in FLOP/s (None: the GPU has no such unit), memory bandwidth in byte/s, and where they are published.

    bf16, fp16 and fp8 accumulate in fp32, as torch does; fp32 is the rate outside the tensor cores.
    """

    fp32: float
    tf32: float
    bf16: float
    fp16: float
    fp8: float | None
    bandwidth: float
    source: str


# The figures marked "with sparsity" in a source are halved here.
_A100 = "NVIDIA A100 datasheet, nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf: nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 datasheet: resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "NVIDIA H200 datasheet: nvidia.com/en-us/data-center/h200/"
_ADA = "NVIDIA Ada GPU architecture whitepaper V2.01, appendix A (RTX 4090) and C (L4)"


def _ampere(gigabytes_per_s: float) -> Gpu:
    return Gpu(
        fp32=19.5 * TERA,
        tf32=156 * TERA,
        bf16=312 * TERA,
        fp16=312 * TERA,
        fp8=None,
        bandwidth=gigabytes_per_s * 1e9,
        source=_A100,
    )


# SXM5 boards of H100 and H200 carry the same die at the same clock: they differ in memory only.
def _hopper_sxm(terabytes_per_s: float, source: str) -> Gpu:
    return Gpu(
        fp32=67 * TERA,
        tf32=989 / 2 * TERA,
        bf16=1979 / 2 * TERA,
        fp16=1979 / 2 * TERA,
        fp8=3958 / 2 * TERA,
        bandwidth=terabytes_per_s * TERA,
        source=source,
    )


_H100_PCIE = Gpu(
    fp32=51 * TERA,
    tf32=756 / 2 * TERA,
    bf16=1513 / 2 * TERA,
    fp16=1513 / 2 * TERA,
    fp8=3026 / 2 * TERA,
    bandwidth=2.0 * TERA,
    source=_H100,
)
_H100_NVL = Gpu(
    fp32=60 * TERA,
    tf32=835 / 2 * TERA,
    bf16=1671 / 2 * TERA,
    fp16=1671 / 2 * TERA,
    fp8=3341 / 2 * TERA,
    bandwidth=3.9 * TERA,
    source=_H100,
)
_H200_NVL = Gpu(
    fp32=60 * TERA,
    tf32=835 / 2 * TERA,
    bf16=1671 / 2 * TERA,
    fp16=1671 / 2 * TERA,
    fp8=3341 / 2 * TERA,
    bandwidth=4.8 * TERA,
    source=_H200,
)
_B200 = Gpu(
    fp32=75 * TERA,
    tf32=2.2e15 / 2,
    bf16=4.5e15 / 2,
    fp16=4.5e15 / 2,
    fp8=9e15 / 2,
    bandwidth=8e12,  # HGX B200: 8 TB/s a GPU
    source="NVIDIA Blackwell datasheet, HGX B200 per GPU: resources.nvidia.com/en-us-blackwell-architecture",
)
_L4 = Gpu(
    fp32=30.3 * TERA,
    tf32=120 / 2 * TERA,
    bf16=242 / 2 * TERA,
    fp16=242 / 2 * TERA,
    fp8=485 / 2 * TERA,
    bandwidth=300e9,
    source=f"NVIDIA L4 datasheet: nvidia.com/en-us/data-center/l4/; {_ADA}",
)
_L40S = Gpu(
    fp32=91.6 * TERA,
    tf32=366 / 2 * TERA,
    bf16=362.05 * TERA,  # printed dense; half of the 733 beside it would be 366.5
    fp16=362.05 * TERA,
    fp8=1466 / 2 * TERA,
    bandwidth=864e9,
    source="NVIDIA L40S datasheet: resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
)
_RTX_4090 = Gpu(  # GeForce halves the tensor cores' rate when they accumulate in fp32
    fp32=82.6 * TERA,
    tf32=82.6 * TERA,
    bf16=165.2 * TERA,
    fp16=165.2 * TERA,
    fp8=330.3 * TERA,
    bandwidth=1008e9,
    source=_ADA,
)

#: By the whole name that NVML gives: a MIG slice or a variant with another clock is another name and has no peak here.
GPUS = {
    "NVIDIA A100-SXM4-40GB": _ampere(1555),
    "NVIDIA A100-PCIE-40GB": _ampere(1555),
    "NVIDIA A100-SXM4-80GB": _ampere(2039),
    "NVIDIA A100 80GB PCIe": _ampere(1935),
    "NVIDIA H100 80GB HBM3": _hopper_sxm(3.35, _H100),
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _hopper_sxm(4.8, _H200),
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA B200": _B200,
    "NVIDIA L4": _L4,
    "NVIDIA L40S": _L40S,
    "NVIDIA GeForce RTX 4090": _RTX_4090,
}


def lookup(name: str | None) -> Gpu | None:
    """The figures of the GPU that NVML calls `name`, or None when they are not known."""
    return GPUS.get(name) if name else None


def peak(name: str | None, precision: str) -> float | None:
    """Peak dense FLOP/s at a precision (fp32, tf32, bf16, fp16, fp8), or None when it is not known."""
    gpu = lookup(name)
    if gpu is None or precision not in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        return None
    figure: float | None = getattr(gpu, precision)
    return figure
