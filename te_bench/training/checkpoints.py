"""Checkpoint files that hold a decoder: te-bench's own, nanoGPT's ckpt.pt, and Hugging Face folders.

    checkpoints.save(model, Path("mine.pt"), recipe="delayed_scaling", corpus=corpus)
    found = checkpoints.load(Path("mine.pt"))
    model = found.build(attention="flash", recipe=recipes.load("delayed_scaling"))

A file is a torch.save of {"model": parameters by name, "te_bench": family, configuration and what is known of the training,
"fp8": the state of FP8 recipes}. A GPT's has "model_args", the shape as nanoGPT's train.py writes it, too, so that nanoGPT
reads it; a file with no more than "model" and "model_args" is nanoGPT's own. No code in a file is ever run.
Source: Karpathy, nanoGPT, train.py and sample.py; torch.load, weights_only.
"""

import dataclasses
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from te_bench import plugins
from te_bench.models import decoder
from te_bench.models.configs import DecoderConfig, configs
from te_bench.models.decoder import Decoder
from te_bench.models.modules.fp8_module import PREFIX
from te_bench.models.recipe import Recipe
from te_bench.training import tokenizer as tokenizers
from te_bench.training import weights
from te_bench.training.corpus import Corpus
from te_bench.training.durable import replacing
from te_bench.training.parallel import SINGLE, Parallel

FORMAT = 2  # of the part "te_bench"
NANOGPT = "gpt"  # the family that nanoGPT trains
#: Fields of the configuration that nanoGPT has under the same names, with nanoGPT's defaults.
MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
DEFAULTS: dict[str, Any] = {"bias": True, "dropout": 0.0}
#: Prefixes that torch.compile and DistributedDataParallel put before every parameter's name.
WRAPPED = re.compile(r"^(?:_orig_mod\.|module\.)+")
MASK = re.compile(r"\.attn\.bias$")  # nanoGPT's causal mask, where it has no flash attention
READABLE = "nanoGPT's ckpt.pt, a file that te-bench saved, or a folder in the Hugging Face layout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The content of a checkpoint; a field is None where the file does not say. Tensors are on the CPU, or mapped."""

    path: Path
    config: DecoderConfig
    parameters: Mapping[str, Tensor]  # every parameter of the model by name, unpadded, a tied head left out
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # the recipe's state, as in a state dict
    recipe: str | None = None  # the FP8 recipe that it was trained with
    tokenizer: str | None = None  # a spec of te_bench.training.tokenizer
    tokenizer_state: str | None = None
    data_sha256: str | None = None  # SHA-256 of the text that it was trained on

    def build(self, *, attention: str = "flash", recipe: Recipe | None = None) -> Decoder:
        """Return the model, float32 on the CPU, unpadded; with a recipe also the FP8 state that the file holds."""
        model = weights.make_empty(self.config, attention=attention, recipe=recipe)
        held = {id(parameter): self.parameters[name] for name, parameter in model.named_parameters()}
        state = {name: held[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
        try:
            model.load_state_dict({**state, **(self.scales if recipe is not None else {})})
        except RuntimeError as error:
            raise ValueError(f"{self.path}: its fp8 part is of another model; evaluate it without a recipe") from error
        return model

    def text_tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokeniser it was trained with, or None if the checkpoint does not hold it."""
        if self.tokenizer is None:
            return None
        return tokenizers.restore(self.tokenizer.partition(":")[0], self.tokenizer_state)


def save(
    model: Decoder,
    path: Path,
    *,
    recipe: str | None = None,
    corpus: Corpus | None = None,
    about: Mapping[str, Any] | None = None,
    parallel: Parallel = SINGLE,
) -> None:
    """Write the model without padding rows, its FP8 state and its tokeniser to `path`, replacing the whole file.

    recipe: name of the recipe it trained with. about: any JSON value for a reader of the file. parallel: how the
    training was divided; every rank calls this, and rank 0 writes the file that one process would.
    """
    # Clone, because torch.save would write a slice's padding too. A tied head's table is written once.
    clones = {
        id(p): parallel.whole(p.detach(), p)[: model.config.vocab_size if model.has_padding(p) else None].cpu().clone()
        for p in model.parameters()
    }
    fields = dataclasses.asdict(model.config)
    content = {
        "model": {name: clones[id(p)] for name, p in model.named_parameters(remove_duplicate=False)},
        "fp8": {
            name: tensor.cpu()
            for name, tensor in model.state_dict().items()
            if name.rpartition(".")[2].startswith(PREFIX)
        },
        "te_bench": {
            "format": FORMAT,
            "family": model.config.family,
            "config": fields,
            "recipe": recipe,
            "tokenizer": corpus and corpus.tokenizer,
            "tokenizer_state": corpus and corpus.text_tokenizer().state,
            "data": corpus and corpus.data,
            "data_sha256": corpus and corpus.sha256,
            "about": dict(about or {}),
        },
    }
    if model.config.family == NANOGPT:
        content["model_args"] = {name: fields[name] for name in MODEL_ARGS}
    if parallel.rank:
        return
    write(content, path)


def write(content: Any, path: Path) -> None:
    """Write `content` by torch.save, replacing the whole file; create its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:  # given a path, torch raises RuntimeError
        torch.save(content, file)


def load(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`, a file or a folder in the Hugging Face layout.

    Raises ValueError if it is missing, unreadable, in another layout, or has tensors that do not fit its sizes.
    """
    if path.is_dir():
        return _load_folder(path)
    content = _unpickle(path)
    nanogpts = "te_bench" not in content
    own = {} if nanogpts else content["te_bench"]
    if not nanogpts and (not isinstance(own, dict) or own.get("format") != FORMAT):
        raise ValueError(f"{path} was saved by another version of te-bench: this one reads format {FORMAT}")
    needed = ("model", "model_args") if nanogpts else ("model",)
    missing = [key for key in needed if not isinstance(content.get(key), dict)]
    if missing:
        there = ", ".join(map(str, list(content)[:6])) or "nothing"
        raise ValueError(f"{path} has no {' and no '.join(missing)}: it holds {there}. Give {READABLE}")
    odd = [
        name
        for name in ("recipe", "tokenizer", "tokenizer_state", "data_sha256")
        if not isinstance(own.get(name), str | None)
    ]
    if odd:
        raise ValueError(f"{path} is damaged: its {odd[0]} is {own[odd[0]]!r}, not text")
    try:
        fields = {**DEFAULTS, **content["model_args"]} if nanogpts else own.get("config")
        config = _read_config(str(NANOGPT if nanogpts else own.get("family")), fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tokenizer = own.get("tokenizer")
    if tokenizer is not None and tokenizers.check(tokenizer)[0] != "bytes" and own.get("tokenizer_state") is None:
        raise ValueError(f"{path} is damaged: its tokenizer {tokenizer!r} has no state")
    return Checkpoint(
        path=path,
        config=config,
        parameters=_match_parameters(path, config, content["model"]),
        scales=_check_scales(path, content.get("fp8", {})),
        recipe=own.get("recipe"),
        tokenizer=tokenizer,
        tokenizer_state=own.get("tokenizer_state"),
        data_sha256=own.get("data_sha256"),
    )


def _load_folder(path: Path) -> Checkpoint:
    """Read a Hugging Face folder; its tokenizer.json, if there, is the model's."""
    model = weights.load(path, attention="manual")
    tokenizer = path / "tokenizer.json"
    state = tokenizers.read(str(tokenizer)) if tokenizer.exists() else None
    return Checkpoint(
        path=path,
        config=model.config,
        parameters={name: parameter.detach() for name, parameter in model.named_parameters()},
        tokenizer=None if state is None else f"file:{tokenizer}",
        tokenizer_state=state,
    )


def _unpickle(path: Path) -> dict[Any, Any]:
    """Return the dictionary in a torch.save file. It reads only tensors, mapped until used, and plain values."""
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} does not say the model's sizes: give its folder, with a {weights.CONFIG} beside it")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}. Give {READABLE}") from error
    except pickle.UnpicklingError as error:
        what = "holds Python objects besides tensors and plain values, and loading those can run code"
        raise ValueError(f"{path} {what}: save its model and model_args alone") from error
    except (RuntimeError, LookupError, ValueError, TypeError, EOFError) as error:
        # torch's message speaks of its options mmap and weights_only, which our user cannot set
        raise ValueError(
            f"{path} is no file of torch.save (PyTorch 1.6 or newer), or damaged. Give {READABLE}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a dictionary. Give {READABLE}")
    return content


def _read_config(family: str, fields: Any) -> DecoderConfig:
    """Build the configuration that a file describes. Raises ValueError for an unknown family or field."""
    known = {config.family: type(config) for config in configs().values()}
    plugins.check("family of models", family, list(known))
    config: DecoderConfig = _rebuild(known[family], fields)
    return config


def _rebuild(kind: Any, fields: Any) -> Any:
    """Build the dataclass whose asdict is `fields`. Raises ValueError for other fields and other types of values."""
    if not isinstance(fields, dict):
        raise ValueError(f"a {kind.__name__} is {type(fields).__name__}, not a dictionary of its fields")
    gone = dataclasses.MISSING
    required = {f.name: f.default is gone and f.default_factory is gone for f in dataclasses.fields(kind)}
    unknown = sorted(str(name) for name in fields if name not in required)
    if unknown:
        raise ValueError(f"a {kind.__name__} has no {', '.join(unknown)}: another model")
    lacking = [name for name, needed in required.items() if needed and name not in fields]
    if lacking:
        raise ValueError(f"no {', '.join(lacking)}: a {kind.__name__} needs them")
    hints = get_type_hints(kind)
    return kind(**{name: _restore(name, hints[name], value) for name, value in fields.items()})


def _restore(name: str, hint: Any, value: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    inner = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if inner and isinstance(value, dict):
        return _rebuild(inner[0], value)
    plain = all(isinstance(kind, type) for kind in kinds)
    if plain and type(value) not in (*kinds, *((int,) if float in kinds else ())):
        raise ValueError(f"{name} is {value!r}: give {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _match_parameters(path: Path, config: DecoderConfig, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return a state dict's tensors by the model's names. Raises ValueError naming those that do not fit `config`."""
    where = f"{path} does not hold the model that it describes"
    named = ((str(key), WRAPPED.sub("", str(key)), tensor) for key, tensor in state.items())
    with torch.device("meta"):
        model = decoder.build(config, attention="manual")
    known = (entry for entry in named if config.family != NANOGPT or not MASK.search(entry[1]))
    return {place.parameter: tensor for place, tensor in weights.match_tensors(model, known, where)}


def _check_scales(path: Path, state: Any) -> dict[str, Tensor]:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is damaged: its fp8 part is not a dictionary of tensors")
    return dict(state)
