"""attn_implementation="te_bench" and "te_bench_fp8": what transformers' own attention computes, or a ValueError."""

import copy
from typing import Any

import pytest
import torch
from families import LENGTH, assert_same, inputs, make, run, tokens
from torch import Tensor

import te_bench.models as te
from te_bench.kernels.attention.backends import auto
from te_bench.models import recipe

transformers = pytest.importorskip("transformers")

from te_bench.models.huggingface import attention  # noqa: E402

PADDED = torch.ones(3, LENGTH, dtype=torch.int64)
PADDED[0, 10:] = 0  # at the end, and at the beginning
PADDED[1, :4] = 0
UNPADDED = PADDED.bool()
UNPADDED[:, 1:] &= UNPADDED[:, :-1].clone()  # what a row of padding, which sees nothing, predicts counts for nothing
PACKED = torch.tensor([[*range(7), *range(9)], [*range(16)], [*range(3), *range(12), 0]])
BAND = torch.ones(3, 1, LENGTH, LENGTH).tril(2).bool()
LEAST = torch.finfo(torch.float32).min
GIVEN: dict[str, dict[str, Any]] = {
    "causal": {},
    "padded": {"attention_mask": PADDED, "labels": tokens().masked_fill(~UNPADDED, -100)},
    "not padded": {"attention_mask": torch.ones_like(PADDED)},
    "packed": {"position_ids": PACKED, "use_cache": False},
    "a mask of four dimensions": {"attention_mask": BAND},
    "a mask of numbers": {"attention_mask": torch.zeros(BAND.shape).masked_fill(~BAND, LEAST)},
}


CAUSAL = [(family, GIVEN[given]) for family in ("llama", "mistral", "qwen3") for given in GIVEN]
OTHERS = [("bert", {"attention_mask": PADDED}), *((family, {}) for family in ("vit", "whisper", "gpt2"))]


@pytest.mark.parametrize(("family", "given"), CAUSAL + OTHERS)
def test_it_computes_what_sdpa_does(family: str, given: dict[str, Any]) -> None:
    model = make(family)
    arguments = inputs(family) | given
    loss, gradients = run(model, arguments)
    model.set_attn_implementation("te_bench")
    again, found = run(model, arguments)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)


@pytest.mark.parametrize(("family", "given"), [("mistral", "causal"), ("mistral", "packed"), ("llama", "packed")])
def test_windows_and_packed_sequences_make_no_matrix(family: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask of T x S")

    monkeypatch.setattr(masking_utils, "sdpa_mask", fail)
    model = make(family)
    model.set_attn_implementation("te_bench")
    run(model, inputs(family) | GIVEN[given])


def test_chunks_and_blocks_of_other_models_are_seen_as_they_are() -> None:
    """Patterns of models that are not here: Llama 4's chunks are sequences, a block that sees all of itself is a matrix."""
    from transformers import masking_utils as masks

    left = torch.zeros(2, dtype=torch.int64)
    chunked = masks.chunked_causal_mask_function(6, left)
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]] * 2)
    block = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(blocks))
    for function, length, window in ((chunked, 16, 6), (block, 8, None)):
        sizes: dict[str, Any] = {"batch_size": 2, "q_length": length, "kv_length": length, "mask_function": function}
        shown = masks.sdpa_mask(**sizes, allow_is_causal_skip=False)
        seen = attention.mask(**sizes, local_size=window)
        q, k, v = torch.randn(3, 2, 2, length, 8)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        out, _ = attention.attention(None, q, k, v, seen)
        torch.testing.assert_close(out.transpose(1, 2), expected)
        assert isinstance(seen, Tensor) is (function is block)


def test_sequences_by_the_arguments_of_flash_attention() -> None:
    model = make("llama")
    model.set_attn_implementation("te_bench")
    ends = torch.tensor([0, 7, 16], dtype=torch.int32)
    arguments = {**{name: x[:1] for name, x in inputs("llama").items()}, "use_cache": False}
    loss, gradients = run(model, arguments | {"position_ids": PACKED[:1]})
    lengths = {f"cu_seq_lens_{side}": ends for side in "qk"} | {f"max_length_{side}": 9 for side in "qk"}
    again, found = run(model, arguments | {"position_ids": PACKED[:1]} | lengths)
    assert torch.equal(again, loss)
    assert_same(found, gradients, 1e-5)
    with pytest.raises(ValueError, match="cu_seq_lens_q says where sequences begin"):
        run(model, arguments | lengths | {"attention_mask": PADDED[:1]})


def test_dropout_drops() -> None:
    model = make("llama", attention_dropout=0.5)
    model.set_attn_implementation("te_bench")
    first, second = (run(model, inputs("llama"))[0] for _ in range(2))
    assert first != second
    model.eval()
    assert torch.equal(model(**inputs("llama")).loss, model(**inputs("llama")).loss)


def test_fp8_is_near_it_and_other_than_it() -> None:
    model = make("llama")
    loss, gradients = run(model, inputs("llama"))
    model.set_attn_implementation("te_bench_fp8")
    near, found = run(model, inputs("llama"))
    assert 0 < abs(near - loss) < 0.05
    for name, gradient in gradients.items():
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.95, name
    # te_bench under a recipe that asks for it
    other = make("llama")
    te.convert(other, recipe.Float8CurrentScaling(fp8_dpa=True), parts="attention")
    assert torch.equal(run(other, inputs("llama"))[0], near)


def test_the_kernel_is_auto_or_what_is_asked_for() -> None:
    model = make("llama")
    model.set_attn_implementation("te_bench")
    with torch.no_grad():
        model(**inputs("llama"))
    assert auto.chosen()
    with te.attention_kernel("math"):
        torch.testing.assert_close(model(**inputs("llama")).logits, make("llama")(**inputs("llama")).logits)
    with te.attention_kernel("cudnn"), pytest.raises(ValueError, match=r"attention_kernel\('cudnn'\) can't do this"):
        model(**inputs("llama"))


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("te_bench_fp8", {"attention_mask": PADDED}, "mask: FP8 attention has the causal one alone"),
        ("te_bench_fp8", {"position_ids": PACKED, "use_cache": False}, "Take attn_implementation='te_bench'"),
        ("te_bench", {"output_attentions": True}, "the weights of attention as an output"),
        (
            "te_bench",
            {"attention_mask": 0.5 * BAND},
            "the mask is torch.float32, to be added .* and not 0 or the least",
        ),
    ],
)
def test_what_it_cannot_do_it_refuses(name: str, given: dict[str, Any], words: str) -> None:
    model = make("llama")
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=words):
        model(**inputs("llama"), **given)


def test_its_output_can_be_viewed_as_transformers_own_can() -> None:
    """Some attentions call `view` on it."""
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8)
    out, _ = attention.attention(None, q, k, v, None)
    assert out.view(2, LENGTH, 32).shape == (2, LENGTH, 32)


def test_soft_caps_and_biases_of_positions_are_refused() -> None:
    for family, words in (("gemma2", "a soft cap of the scores"), ("t5", "a bias of the scores")):
        model = make(family)
        for inner in model.modules():
            if isinstance(inner, transformers.PreTrainedModel):  # transformers 5.17 gives T5's stacks nothing by itself
                inner.set_attn_implementation("te_bench")
        with pytest.raises(ValueError, match=words):
            model(**inputs(family))


def as_if_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers then hands over a mask as if rows were packed, and te-bench may look at no number."""
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    monkeypatch.setattr(attention, "_capturing", lambda _: True)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_graph_keeps_the_pattern_of_the_pass_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    model.set_attn_implementation("te_bench")
    loss, gradients = run(model, inputs(family))
    with monkeypatch.context() as patch:
        as_if_captured(patch)
        patch.setattr(attention, "_find_sequences", None)  # which would wait for the GPU
        again, found = run(model, inputs(family))
    torch.testing.assert_close(again, loss, rtol=0, atol=0)
    assert_same(found, gradients, 0)


@pytest.mark.parametrize(("given", "said"), [("packed", "is packed"), ("padded", "hides padding")])
def test_a_graph_of_packed_or_padded_rows_is_refused(given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    model.set_attn_implementation("te_bench")
    arguments = inputs("llama") | GIVEN[given]
    run(model, arguments)
    as_if_captured(monkeypatch)
    with pytest.raises(ValueError, match=said):
        run(model, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [name for name in GIVEN if not name.startswith("a mask")])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_on_a_gpu_in_bf16_it_is_as_near_to_float32_as_eager(family: str, given: str) -> None:
    exact = make(family, head_dim=64).cuda()
    arguments = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in (inputs(family) | GIVEN[given]).items()}
    exact.set_attn_implementation("eager")
    _, truth = run(exact, arguments)
    errors = []
    for name in ("eager", "te_bench"):
        model = copy.deepcopy(exact).bfloat16()
        model.set_attn_implementation(name)
        _, found = run(model, arguments)
        errors.append({name: (g.float() - truth[name]).norm() / truth[name].norm() for name, g in found.items()})
    for name, error in errors[1].items():
        assert error < 2 * errors[0][name] + 1e-2, name
