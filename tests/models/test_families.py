"""What models of transformers are taken for, and what they are fed, by a config.json."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_adopted import of_config

from te_bench.models import adopted, probe

pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = SIZES | {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
BART = {
    **{f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 1), ("attention_heads", 2))},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 64, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 2},
}
MARIAN = BART | {"model_type": "marian", "architectures": ["MarianMTModel"]}
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": TEXT | {"head_dim": 16, "sliding_window": 4},
    "vision_config": SIZES | {"image_size": 16, "patch_size": 8},
}
XLM = {"emb_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
FLAUBERT = XLM | {"model_type": "flaubert", "architectures": ["FlaubertWithLMHeadModel"]}
CLIP = {
    "model_type": "clip",
    "architectures": ["CLIPForImageClassification"],
    "vision_config": SIZES | {"image_size": 16, "patch_size": 8},
    "text_config": TEXT,
    "id2label": {str(i): str(i) for i in range(4)},
}
SPEECH = {"max_source_positions": 20, "max_target_positions": 32, "input_feat_per_channel": 16}
S2T = BART | SPEECH | {"model_type": "speech_to_text", "architectures": ["Speech2TextForConditionalGeneration"]}
MOONSHINE = TEXT | {"model_type": "moonshine", "architectures": ["MoonshineForConditionalGeneration"]}
IMAGE_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 65, "n_positions": 64}
IMAGE_GPT |= {"model_type": "imagegpt", "architectures": ["ImageGPTForImageClassification"]}


@pytest.mark.parametrize(
    ("config", "shape"),
    [(MARIAN, (2, 8)), (GEMMA3, (2, 8)), (FLAUBERT, (2, 8)), (CLIP, (2, 3, 16, 16))],
    ids=["MTModel", "a text model that sees", "WithLMHead that is masked", "a vision config"],
)
def test_a_class_is_known_by_transformers_tables(config: dict[str, Any], shape: Any, tmp_path: Path) -> None:
    """Neither by the ending of its name nor by settings at the top alone."""
    source = of_config(config, tmp_path)
    assert probe.find_out(source, 8).cls == config["architectures"][0]
    made = adopted.make(source, attention=adopted.OWN, device="cpu")
    inputs, targets = made.draw(2, 8, seed=0, device="cpu")
    assert inputs.shape == shape
    loss = adopted.Adopted(made)(inputs, targets)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("config", [S2T, MOONSHINE, IMAGE_GPT], ids=lambda config: config["model_type"])
def test_a_model_with_inputs_of_another_kind_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    said = f"te-bench does not know how to feed {config['architectures'][0]}: give --inputs and --loss"
    with pytest.raises(ValueError, match=said):
        probe.find_out(of_config(config, tmp_path), 8)


def test_what_a_config_s_model_raises_is_told_with_the_way_out(tmp_path: Path) -> None:
    xmod = TEXT | {"model_type": "xmod", "architectures": ["XmodForMaskedLM"], "languages": ["en_XX"]}
    with pytest.raises(ValueError, match=r"raised ValueError: .*; if it takes other inputs, give --inputs and --loss$"):
        probe.find_out(of_config(xmod, tmp_path), 8)
