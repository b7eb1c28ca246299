"""The families of transformers models: how each is built from a config, called with (inputs, targets), and fed.

causal      tokens and the next ones; masked    tokens of which 15 % are hidden and guessed (BERT)
seq2seq     tokens and the decoder's (T5); image  pixels and a class (ViT); speech  a spectrogram and tokens (Whisper)
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models.calling import Forward, forward_of
from te_bench.models.sources import Refused

Draw = Callable[[int, int, torch.Generator, str], tuple[Tensor, Tensor]]

HIDDEN = 15  # percent of the tokens, Devlin et al. 2019
IGNORED = -100  # transformers' label of tokens that are not scored

#: {ending of a transformers class name: its family}.
_ENDINGS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForImageClassification": "image",
    "ForConditionalGeneration": "seq2seq",
    "ForSpeechSeq2Seq": "speech",
}
#: {family: (Auto class, transformers' table of model types)}, searched in this order if no class is named.
_AUTO = {
    "speech": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
#: Config keys for the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "block_size", "max_seq_len", "seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A transformers module's family: how it is called and fed. sequence: its only sequence length, None for any.

    labels: whether targets are labels of tokens, by transformers' rules: IGNORED counts for nothing.
    """

    name: str
    forward: Forward
    draw: Draw | None  # None: tokens, as for every language model
    sequence: int | None = None
    labels: bool = False


def build(config: str, *, attention: str | None, layers: int | None) -> nn.Module:
    """Build a float32 model with random weights from a config.json's text. attention: transformers' name, or None.

    Raises ValueError for a config that transformers does not know, and for an attention that the model lacks.
    """
    import transformers
    from transformers.models.auto import configuration_auto

    settings = json.loads(config)
    kind = settings.pop("model_type")
    if kind not in configuration_auto.CONFIG_MAPPING:
        raise Refused(f"model_type {kind!r} is unknown to transformers {transformers.__version__}")
    family = _family_of_config(settings.get("architectures"), kind)
    whole: Any = configuration_auto.CONFIG_MAPPING[kind]
    made = whole.from_dict(shortened(settings, layers))
    said = {} if attention is None else {"attn_implementation": attention}
    auto = getattr(transformers, _AUTO[family][0])
    model: nn.Module = auto.from_config(made, dtype=torch.float32, **said)
    t5 = hasattr(model, "_shift_right") and not hasattr(made, "decoder")  # T5Gemma has one; its decoder begins with bos
    if t5 and getattr(made, "decoder_start_token_id", None) is None:
        begins = "its config has no decoder_start_token_id, the token with which its decoder begins"
        raise Refused(f"{begins}: write it into the config.json, T5's is 0")
    return model


def shortened(settings: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the config with at most `layers` layers; lists with one entry per layer are cut."""
    if layers is None:
        return settings
    found = {key: settings[key] for key in LAYERS if isinstance(settings.get(key), int)}
    lists = {key: value[:layers] for key, value in settings.items() if isinstance(value, list) and key == "layer_types"}
    return settings | {key: min(value, layers) for key, value in found.items()} | lists


def _family_of_config(architectures: list[str] | None, kind: str) -> str:
    """Find the family by the class that the config names, else by transformers' tables of model types."""
    there = list(_classes(kind))
    if architectures:
        named = _family_of_class(architectures[0], kind)
        there = [family for family in there if family == named]
    if not there:
        learns = "next tokens, hidden tokens, a class of images or a sequence from text or speech"
        what = architectures[0] if architectures else f"model_type {kind!r}"
        raise Refused(f"{what} is not of a family that te-bench feeds ({learns}): give a factory and --inputs")
    return there[0]


def _classes(kind: str) -> dict[str, tuple[str, ...]]:
    """Return {family: transformers' classes of that model type}."""
    from transformers.models.auto import modeling_auto

    found = {family: getattr(modeling_auto, table).get(kind) for family, (_, table) in _AUTO.items()}
    return {family: (cls,) if isinstance(cls, str) else tuple(cls) for family, cls in found.items() if cls}


def _family_of_class(cls: str, kind: str) -> str | None:
    """Find a class's family by transformers' tables, which tell Whisper's from T5's, else by its name's ending."""
    known = (family for family, classes in _classes(kind).items() if cls in classes)
    by_name = (family for ending, family in _ENDINGS.items() if cls.endswith(ending))
    return next(known, None) or next(by_name, None)


def is_of_transformers(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def calling(name: str, module: nn.Module, judge: Forward | None, unknown: str) -> tuple[Family | None, Forward]:
    """Return the module's family and its callable: the user's judge, else its family's, else by its forward.

    unknown: the message of the ValueError for a transformers class with neither.
    """
    theirs = is_of_transformers(module)
    family = family_of(module) if theirs else None
    if judge is not None:
        return family, judge
    if family is not None:
        return family, family.forward
    if theirs:
        raise Refused(unknown)
    return None, forward_of(name, module)


def family_of(module: Any) -> Family | None:
    """Return the family of a transformers model; None if te-bench cannot feed it."""
    config, reads = module.config, module.main_input_name
    name = _family_of_class(type(module).__name__, config.model_type)
    labels = type(module).forward.__module__.startswith("transformers.")  # a user's own may compute another loss
    if name == "image" and reads == "pixel_values":
        seen = getattr(config, "vision_config", config)
        sides = _sides(seen)
        patch = getattr(seen, "patch_size", None)
        sequence = (sides[0] // patch) * (sides[1] // patch) + 1 if isinstance(patch, int) else 1
        return Family(name=name, forward=_image, draw=_images(seen, sides, config.num_labels), sequence=sequence)
    if name in ("seq2seq", "speech") and reads == "input_features":
        known = hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")
        return Family(name="speech", forward=_speech, draw=_spectrograms(config), labels=labels) if known else None
    if name in ("seq2seq", "speech") and reads == "input_ids":
        return Family(name="seq2seq", forward=_seq2seq, draw=None, labels=labels)
    if name == "causal":
        return Family(name=name, forward=_causal(module), draw=None, labels=labels)
    return Family(name=name, forward=_masked(config), draw=None) if name == "masked" else None


def _causal(module: Any) -> Callable[[nn.Module, Tensor, Tensor], Any]:
    """Return a callable with the model's own loss; targets are the next tokens already, so no label is shifted."""
    import inspect

    takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(module).forward).parameters.values())
    if takes and hasattr(module, "loss_function"):
        # Its loss takes a view of the targets, which are often a slice of a batch.
        return lambda model, x, y: model(input_ids=x, labels=y, shift_labels=y.contiguous(), use_cache=False)
    return lambda model, x, y: model(input_ids=x, use_cache=False).logits


def _masked(config: Any) -> Callable[[nn.Module, Tensor, Tensor], Any]:
    """Hide tokens by their values and positions, so that a captured graph and every precision hide the same."""
    mask = getattr(config, "mask_token_id", None) or config.get_text_config().vocab_size - 1

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = (x * 7919 + places * 104729) % 100 < HIDDEN
        hidden[:, 0] = True  # at least one
        return model(input_ids=x.masked_fill(hidden, mask), labels=x.masked_fill(~hidden, IGNORED))

    return forward


def labelled(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Call the model with tokens and labels, which transformers' loss takes unshifted."""
    return model(input_ids=x, labels=y)


def _seq2seq(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model(input_ids=x, labels=y, use_cache=False)


def _image(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(model(pixel_values=x).logits.float(), y)


def _speech(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model(input_features=x, labels=y, use_cache=False)


def _sides(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _images(config: Any, sides: tuple[int, int], classes: int) -> Draw:
    shape = (getattr(config, "num_channels", 3), *sides)

    def draw(batch: int, tokens: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(batch, *shape, generator=generator, device=device)
        return pixels, torch.randint(classes, (batch,), generator=generator, device=device)

    return draw


def _spectrograms(config: Any) -> Draw:
    frames = 2 * config.max_source_positions  # the first of two convolutions halves them

    def draw(batch: int, tokens: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
        features = torch.randn(batch, config.num_mel_bins, frames, generator=generator, device=device)
        return features, torch.randint(config.vocab_size, (batch, tokens), generator=generator, device=device)

    return draw
