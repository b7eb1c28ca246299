"""The table of measured times: an operator reads its own rows and no other's, and forgetting is complete."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_bench.kernels import architecture, measured
from te_bench.kernels.gemm import half, policy
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.table import GemmShape
from te_bench.kernels.measured import Timing
from te_bench.kernels.quantize import TENSOR, Layout, Operand

GPU = "NVIDIA H300"  # of which nothing ships
SHAPE = GemmShape(m=64, n=48, k=32, dtype="bf16")
FP8 = GemmShape(m=64, n=48, k=32, dtype="e4m3", scales="tensor", fast_accum=True)
BAD = '{"operator": "%s", "machine": "x", "problem": {"no": 1}, "seconds": {"a": 1.0}, "source": ""}'


def a_row(shape: GemmShape = SHAPE, **seconds: float) -> Timing:
    return Timing(operator="gemm", machine=GPU, problem=shape, seconds=seconds, source="a test")


pytestmark = pytest.mark.usefixtures("own")


def with_row(table: str, row: str) -> str:
    return table.replace('"rows": [\n', f'"rows": [\n{row},\n')


def test_other_operators_rows_stop_no_gemm(own: Path) -> None:
    row = a_row(torch=1.0, gluon=2.0)
    rows = measured.text([row])
    for other in ("attention", "linear_cross_entropy", "norm"):
        rows = with_row(rows, BAD % other)
    own.write_text(rows)
    assert measured.timings("gemm")[0] == row


@pytest.mark.parametrize(
    ("operator", "kind"), [("attention", "attention"), ("gemm", "gemm"), ("linear_cross_entropy", "head")]
)
def test_a_bad_row_is_named_with_the_command_that_measures_it_anew(own: Path, operator: str, kind: str) -> None:
    own.write_text(with_row(measured.text([a_row(torch=1.0)]), BAD % operator))
    with pytest.raises(ValueError, match=rf"measured.json: row 1 is no measured time .* te-bench tune {kind}$"):
        measured.timings(operator)


def test_a_bad_value_is_named_whatever_its_type(own: Path) -> None:
    problem = '{"batch": 1, "heads": 1, "length": 8, "head_dim": 8, "dtype": ["bf16"], "causal": true, '
    problem += '"dropout": 0.0, "device": "cuda"}'
    own.write_text(with_row(measured.text([a_row(torch=1.0)]), (BAD % "attention").replace('{"no": 1}', problem)))
    with pytest.raises(ValueError, match=r"row 1 is no measured time \(unhashable"):
        measured.timings("attention")


def test_to_forget_is_to_choose_anew_of_gemms_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(architecture, "processors", lambda _: 132)
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setitem(policy.LAUNCHES, "gluon", lambda *_, **__: "gluon's")
    monkeypatch.setattr(policy.scaled_mm, "forward", lambda *_, **__: "cuBLASLt's")

    def choices() -> tuple[bool, Any]:
        a, b = on_a_gpu(64, 32, torch.bfloat16), on_a_gpu(48, 32, torch.bfloat16)
        x, w = on_a_gpu(64, 32, torch.float8_e4m3fn), on_a_gpu(48, 32, torch.float8_e4m3fn)
        scaled = [Operand(fp8, torch.ones(()), Layout(fp8.dtype, TENSOR, torch.float32)) for fp8 in (x, w)]
        return half.is_faster(None, a, b), policy.forward(*scaled, out_dtype=torch.bfloat16, fast_accum=True)

    for fast, slow in ((1.0, 2.0), (2.0, 1.0)):
        own.write_text(measured.text([a_row(gluon=fast, torch=slow), a_row(FP8, gluon=fast, scaled_mm=slow)]))
        measured.forget()
        assert choices() == ((True, "gluon's") if fast < slow else (False, "cuBLASLt's"))


def on_a_gpu(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """What is asked of a matrix on a GPU before a kernel is chosen."""
    x = torch.zeros(rows, columns, dtype=dtype)
    return SimpleNamespace(
        shape=x.shape, dtype=dtype, is_cuda=True, dim=x.dim, is_contiguous=x.is_contiguous, data_ptr=x.data_ptr,
        get_device=lambda: 0,
    )  # fmt: skip
