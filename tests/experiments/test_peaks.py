import pytest

from te_bench.experiments.peaks import GPUS, peak


@pytest.mark.parametrize("name", sorted(GPUS))
def test_figures_are_dense_and_of_the_right_size(name):
    fp32, bf16, fp16, fp8 = (peak(name, precision) for precision in ("fp32", "bf16", "fp16", "fp8"))
    assert 1e13 < fp32 < 1e14  # a figure in the wrong unit is 1000 times off
    assert fp32 < bf16 == fp16 < 3e15
    assert fp8 is None or fp8 / bf16 == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(
    ("name", "precision", "figure"),
    [
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H200", "int8", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("nvidia h200", "bf16", None),
        (None, "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peak_by_the_exact_name(name, precision, figure):
    assert peak(name, precision) == figure


def test_what_an_h200_was_measured_to_do_is_below_its_peak():
    """facts of 2026-11-20: BF16 805 and FP8 1525 TFLOP/s at 8192^3."""
    assert 0.75 < 805e12 / peak("NVIDIA H200", "bf16") < 1
    assert 0.75 < 1525e12 / peak("NVIDIA H200", "fp8") < 1
