"""Every attention backend, forward and backward, against float64 by the rule error <= 2 x manual's at its dtype + floor."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from te_bench.kernels import attention
from te_bench.kernels.attention import Backend, Problem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(2, 3, 64, 16), (1, 2, 1, 32), (2, 1, 100, 64), (1, 4, 257, 64), (3, 2, 128, 128)]
GPT2 = (12, 12, 1024, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def a_problem(shape: tuple[int, ...] = GPT2, dtype: str = "bf16", device: str = "cuda", **changes: object) -> Problem:
    batch, heads, length, head_dim = shape
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    values = {"causal": True, "dropout": 0.0, "device": device, "capability": capability, **changes}
    return Problem(batch=batch, heads=heads, length=length, head_dim=head_dim, dtype=dtype, **values)  # type: ignore[arg-type]


def supported(name: str, problem: Problem) -> Backend:
    """The backend; skips the test, with the backend's own reason, where it has one."""
    backend = attention.load(name)
    reason = backend.unsupported(problem)
    if reason:
        pytest.skip(reason)
    return backend


def draw(problem: Problem, factor: float = 1.0, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout: normal; q is `factor` times as large."""
    generator = torch.Generator().manual_seed(seed)
    size = (problem.batch, problem.heads, problem.length, problem.head_dim)
    tensors = [torch.randn(size, generator=generator) for _ in range(4)]
    tensors[0] *= factor
    return [t.to(problem.device, DTYPES[problem.dtype]) for t in tensors]


def run(backend: Backend, problem: Problem, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """out, dq, dk, dv, computed in `dtype`."""
    q, k, v = (t.to(dtype or t.dtype).detach().requires_grad_() for t in tensors[:3])
    out = backend.forward(q, k, v, causal=problem.causal, scale=1 / math.sqrt(problem.head_dim))
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))]


def assert_as_good_as_manual(backend: Backend, problem: Problem, tensors: list[Tensor]) -> None:
    manual = attention.load("manual")
    truth = run(manual, problem, tensors, torch.float64)
    yardstick = run(manual, problem, tensors)
    ours = run(backend, problem, tensors)
    for name, exact, library, value in zip(("out", "dq", "dk", "dv"), truth, yardstick, ours, strict=True):
        floor = 2 * largest(exact.to(value.dtype) - exact) + 16 * torch.finfo(torch.float32).eps * largest(exact)
        if problem.length == 1 and name in ("dq", "dk"):  # softmax of one score is 1 whatever the score: exactly 0
            floor = 1e-5  # what is left of float32's dO V^T - delta
            assert largest(exact) < 1e-12
        assert largest(value - exact) <= 2 * largest(library - exact) + floor, name


def largest(x: Tensor) -> float:
    return x.double().abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", attention.names())
def test_contract(name: str, shape: tuple[int, ...], dtype: str, causal: bool, device: str) -> None:
    if name == "flex" and (shape, dtype) != (SHAPES[3], "bf16"):
        pytest.skip(
            "each problem of FlexAttention compiles for seconds: one odd length, causal and not, stands for all"
        )
    problem = a_problem(shape, dtype, device, causal=causal)
    assert_as_good_as_manual(supported(name, problem), problem, draw(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("name", attention.names())
def test_contract_at_gpt2s_shape_by_its_own_kernels(name: str) -> None:
    from te_bench.experiments.workloads._check import kernels_seen

    problem = a_problem((2, 12, 1024, 64))
    backend = supported(name, problem)
    tensors = draw(problem)
    assert_as_good_as_manual(backend, problem, tensors)
    seen = kernels_seen(lambda: run(backend, problem, tensors), "cuda")
    assert attention.wrong_kernel(name, "cuda", seen, eager=True) is None, seen
    assert any("gemm" in s or "nvjet" in s or "cutlass" in s or "attention" in s or "flash" in s for s in seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [n for n in attention.names() if n != "flex"])
def test_scores_in_the_thousands_stay_finite_and_right(name: str, dtype: str, device: str) -> None:
    problem = a_problem((1, 2, 65, 64), dtype, device)
    backend = supported(name, problem)
    tensors = draw(problem, factor=1000.0)
    assert all(t.isfinite().all() for t in run(backend, problem, tensors))
    out, exact = run(backend, problem, tensors)[0], run(attention.load("manual"), problem, tensors, torch.float64)[0]
    # Scores of 1000 rounded to bf16 are off by 4, which turns near ties; most rows have a clear winner.
    rows = (out - exact).double().abs().amax(-1).flatten()
    assert rows.median() < 0.05
    assert rows.max() < 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [n for n in attention.names() if n != "flex"])
def test_a_causal_row_depends_on_nothing_after_it(name: str, device: str) -> None:
    problem = a_problem((1, 2, 70, 64), "bf16", device)
    backend = supported(name, problem)
    q, k, v, dout = draw(problem)
    before = run(backend, problem, [q, k, v, dout])[0]
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 40:], v2[:, :, 40:] = 1e3, -1e3
    after = run(backend, problem, [q, k2, v2, dout])[0]
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [n for n in attention.names() if n != "flex"])
def test_the_scale_is_the_one_given(name: str, device: str) -> None:
    problem = a_problem((1, 2, 64, 64), "bf16", device)
    backend = supported(name, problem)
    q, k, v, _ = draw(problem)
    uniform = backend.forward(q, k, v, causal=False, scale=1e-30)
    torch.testing.assert_close(uniform.float(), v.float().mean(2, keepdim=True).expand_as(v), atol=4e-3, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", attention.names())
def test_dropout_drops_on_average_nothing(name: str, device: str) -> None:
    problem = a_problem((8, 4, 64, 64), "bf16" if device == "cuda" else "fp32", device, dropout=0.2)
    backend = supported(name, problem)
    q, k, v, _ = draw(problem)
    torch.manual_seed(0)
    once = backend.forward(q, k, v.abs(), causal=True, scale=0.125, dropout=0.2)
    again = backend.forward(q, k, v.abs(), causal=True, scale=0.125, dropout=0.2)
    without = backend.forward(q, k, v.abs(), causal=True, scale=0.125)
    assert not torch.equal(once, again)
    assert once.float().mean().item() == pytest.approx(without.float().mean().item(), rel=0.02)


# What each cannot do.

FLASH_LIMITS = [
    ({"dtype": "fp32"}, "dtype fp32"),
    ({"capability": (7, 5)}, "7.5 < 8.0"),
]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mem_efficient", {"device": "cpu"}, "NVIDIA GPU"),
        ("mem_efficient", {"head_dim": 12}, "multiple of 8"),
        ("mem_efficient", {"head_dim": 6, "dtype": "fp32"}, "multiple of 4"),
        ("cudnn", {"device": "cpu"}, "NVIDIA GPU"),
        ("cudnn", {"head_dim": 60}, "head_dim 60"),
        ("cudnn", {"head_dim": 136}, "head_dim 136"),
        ("cudnn", {"length": 1}, "length 1"),
        ("flash", {"device": "cpu", "dropout": 0.1}, "dropout"),
        ("flash", {"head_dim": 264}, "head_dim 264 > 256"),
        ("flex", {"device": "cpu"}, "needs a GPU"),
        ("flex", {"dropout": 0.1}, "dropout 0.1"),
        ("flex", {"head_dim": 8}, "head_dim 8 < 16"),
        *[(name, changes, reason) for name in ("flash", "cudnn") for changes, reason in FLASH_LIMITS],
    ],
)
def test_what_a_backend_cannot_do_it_says(name: str, changes: dict[str, object], reason: str) -> None:
    h200 = dataclasses.replace(a_problem(), capability=(9, 0))
    backend = attention.load(name)
    assert backend.unsupported(h200) is None
    said = backend.unsupported(dataclasses.replace(h200, **changes))
    assert said is not None
    assert reason in said


@pytest.mark.parametrize("name", ["manual", "math"])
def test_ordinary_operators_can_do_everything(name: str) -> None:
    for device in ("cpu", "cuda"):
        for dtype in DTYPES:
            problem = a_problem((1, 1, 3, 5), dtype, dropout=0.5, causal=False)
            assert attention.load(name).unsupported(dataclasses.replace(problem, device=device)) is None


@pytest.mark.parametrize("name", ["mem_efficient", "cudnn"])
def test_a_pinned_kernel_never_falls_back(name: str) -> None:
    problem = a_problem((1, 1, 16, 16), "fp32", "cpu")
    assert attention.load(name).unsupported(problem)
    with pytest.raises(RuntimeError):
        run(attention.load(name), problem, draw(problem))


def test_unknown_backend_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"unknown attention 'flush'\. Did you mean flash\?"):
        attention.load("flush")


# Which kernel ran. Names as torch.profiler gave them on an H200 (torch 2.11, CUDA 13, 2026-11-21).

GEMM = ["nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "void at::native::(anonymous namespace)::cunn_SoftMaxForward"]
SEEN = {
    "flash": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<64",
    ],
    "cudnn": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x64_1x1x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>",
        "void cudnn::fusion::convert_dq_to_16bits<true, 64>",
    ],
    "mem_efficient": [
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t",
        "fmha_cutlassB_bf16_aligned_64x64_k64_seqaligned_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<",
    ],
    "flex": ["triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_zeros_1"],
    "manual": [],
    "math": [],
}
OPERATOR = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "mem_efficient": "aten::_scaled_dot_product_efficient_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


def test_the_examples_cover_every_backend() -> None:
    assert sorted(SEEN) == attention.names()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("ran", SEEN)
@pytest.mark.parametrize("asked", SEEN)
def test_a_backend_is_known_by_its_kernels_and_by_no_others(asked: str, ran: str, eager: bool) -> None:
    seen = [*GEMM, *SEEN[ran], *([OPERATOR[ran]] if eager and ran in OPERATOR else [])]
    reason = attention.wrong_kernel(asked, "cuda", seen, eager=eager)
    alike = not eager and {asked, ran} == {"manual", "math"}  # compiled, both are matrix products and a softmax
    if asked == ran or alike or (asked, ran) == ("manual", "math"):
        assert reason is None
    else:
        assert reason is not None
        assert asked in reason


def test_a_kernel_of_another_backend_beside_its_own_is_noticed() -> None:
    for asked in SEEN:
        for other in ("flash", "cudnn", "mem_efficient", "flex"):
            seen = [*GEMM, *SEEN[asked], *SEEN[other][:1], *([OPERATOR[asked]] if asked in OPERATOR else [])]
            assert (attention.wrong_kernel(asked, "cuda", seen, eager=True) is None) == (asked == other)


@pytest.mark.parametrize("asked", ["flash", "math", "manual"])
def test_on_a_cpu(asked: str) -> None:
    from te_bench.experiments.workloads._check import kernels_seen

    problem = a_problem((1, 2, 32, 16), "fp32", "cpu")
    seen = kernels_seen(lambda: run(attention.load(asked), problem, draw(problem)), "cpu")
    assert attention.wrong_kernel(asked, "cpu", seen, eager=True) is None, seen
    for other in {"flash", "math"} - {asked}:
        assert attention.wrong_kernel(other, "cpu", seen, eager=True)
