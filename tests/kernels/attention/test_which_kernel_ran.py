"""A backend is known by the kernels that a profiler saw, and by no other's."""

import pytest
from test_contract import a_problem, draw, run

from te_bench.kernels import attention

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
    "flash4": [  # names of its kernels for other GPUs, with this GPU's number: not seen on an H200 yet
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrf16gmemalign16",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensorptr",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensorptrf16gmemalign",
    ],
    "triton": [
        "attention_forward_kernel",
        "attention_backward_rows_kernel",
        "attention_backward_keys_kernel",
    ],
    "gluon": [
        "gluon_attention_forward_kernel",
        "gluon_attention_backward_rows_kernel",
        "gluon_attention_backward_keys_kernel",
        "gluon_attention_delta_kernel",
        "gluon_attention_backward_fused_kernel",
        "attention_dq_of_sums_kernel",
    ],
    "triton_fp8": [
        "fp8_attention_amax_kernel",
        "fp8_attention_cast_kernel",
        "fp8_attention_forward_kernel",
        "fp8_attention_forward_gluon_kernel",
        "fp8_attention_delta_kernel",
        "fp8_attention_backward_rows_kernel",
        "fp8_attention_backward_keys_kernel",
        "fp8_attention_backward_gluon_kernel",
        "attention_dq_of_sums_kernel",
    ],
    "flex": ["triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_zeros_1"],
    "manual": [],
    "manual_fp8": [],
    "math": [],
}
PLAIN = {"manual", "manual_fp8", "math"}  # ordinary operators; eager, math is known by its own
OPERATOR = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "mem_efficient": "aten::_scaled_dot_product_efficient_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


def test_the_examples_cover_every_backend() -> None:
    assert sorted([*SEEN, "auto"]) == attention.names()  # auto has no kernels of its own: test_auto.py


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("ran", SEEN)
@pytest.mark.parametrize("asked", SEEN)
def test_a_backend_is_known_by_its_kernels_and_by_no_others(asked: str, ran: str, eager: bool) -> None:
    seen = [*GEMM, *SEEN[ran], *([OPERATOR[ran]] if eager and ran in OPERATOR else [])]
    reason = attention.wrong_kernel(asked, "cuda", seen, eager=eager)
    alike = {asked, ran} <= PLAIN and not (eager and asked == "math")
    if asked == ran or alike:
        assert reason is None
    else:
        assert reason is not None
        assert asked in reason


def test_a_kernel_of_another_backend_beside_its_own_is_noticed() -> None:
    for asked in SEEN:
        for other in (name for name in SEEN if SEEN[name]):
            seen = [*GEMM, *SEEN[asked], *SEEN[other][:1], *([OPERATOR[asked]] if asked in OPERATOR else [])]
            assert (attention.wrong_kernel(asked, "cuda", seen, eager=True) is None) == (asked == other)


@pytest.mark.parametrize("asked", ["flash", "math", "manual"])
def test_on_a_cpu(asked: str) -> None:
    from te_bench.experiments.instruments.profiling import kernels_seen

    problem = a_problem((1, 2, 32, 16), "fp32", "cpu")
    seen = kernels_seen(lambda: run(attention.load(asked), problem, draw(problem)), "cpu").names
    assert attention.wrong_kernel(asked, "cpu", seen, eager=True) is None, seen
    for other in {"flash", "math"} - {asked}:
        assert attention.wrong_kernel(other, "cpu", seen, eager=True)
