"""Peak dense FLOP/s of the GPUs for which NVIDIA publishes figures.

Vendors quote tensor-core rates with 2:4 sparsity, twice the dense rate that training can use; these are dense. bf16, fp16
and fp8 accumulate in fp32, like in torch; fp32 is the rate without tensor cores.
"""

from collections.abc import Mapping

TERA = 1e12


def _gpu(*, fp32: float, bf16: float, fp8: float | None) -> Mapping[str, float | None]:
    """Return FLOP/s from TFLOP/s; fp16 has the rate of bf16; fp8 None: the GPU has no FP8 unit."""
    rates = {"fp32": fp32, "bf16": bf16, "fp16": bf16, "fp8": fp8}
    return {precision: None if rate is None else rate * TERA for precision, rate in rates.items()}


# Figures that a source gives "with sparsity" are divided by two here.
# NVIDIA A100 datasheet, nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf: nvidia.com/en-us/data-center/a100/
_A100 = _gpu(fp32=19.5, bf16=312, fp8=None)
# NVIDIA H100 datasheet: resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
# NVIDIA H200 datasheet: nvidia.com/en-us/data-center/h200/
# SXM5 boards of H100 and H200 carry the same die at the same clock and differ only in memory. So do the NVL boards.
_HOPPER_SXM = _gpu(fp32=67, bf16=1979 / 2, fp8=3958 / 2)
_HOPPER_NVL = _gpu(fp32=60, bf16=1671 / 2, fp8=3341 / 2)

#: Keys are NVML's full names. A MIG slice, or a variant with another clock, has another name and no peak here.
GPUS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 PCIe": _gpu(fp32=51, bf16=1513 / 2, fp8=3026 / 2),
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    # NVIDIA Blackwell datasheet, HGX B200 per GPU: resources.nvidia.com/en-us-blackwell-architecture
    "NVIDIA B200": _gpu(fp32=75, bf16=4500 / 2, fp8=9000 / 2),
    # NVIDIA L4 datasheet: nvidia.com/en-us/data-center/l4/, and the Ada GPU architecture whitepaper V2.01, appendix C
    "NVIDIA L4": _gpu(fp32=30.3, bf16=242 / 2, fp8=485 / 2),
    # NVIDIA L40S datasheet: resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    # It prints bf16 dense as 362.05; half of the sparse 733 would be 366.5.
    "NVIDIA L40S": _gpu(fp32=91.6, bf16=362.05, fp8=1466 / 2),
    # NVIDIA Ada GPU architecture whitepaper V2.01, appendix A. GeForce halves what accumulates in fp32.
    "NVIDIA GeForce RTX 4090": _gpu(fp32=82.6, bf16=165.2, fp8=330.3),
}


def peak(name: str | None, precision: str) -> float | None:
    """Return the peak dense FLOP/s of a GPU by its NVML name, for fp32, bf16, fp16 or fp8; None if unknown."""
    return GPUS.get(name or "", {}).get(precision)
