"""Checkpoint files that hold a GPT: nanoGPT's ckpt.pt, te-bench's own, which adds to it, and Hugging Face folders.

    checkpoints.save(model, Path("mine.pt"), recipe="delayed_scaling", corpus=corpus)
    found = checkpoints.load(Path("mine.pt"))
    model = found.build(attention="flash", recipe=recipes.load("delayed_scaling"))

A file is a torch.save of {"model": parameters by name, "model_args": the shape}, as nanoGPT's train.py writes it; te-bench
adds "fp8", the state of FP8 recipes, and "te_bench", what is known of the training. No code in a file is ever run.
Source: Karpathy, nanoGPT, train.py and sample.py; torch.load, weights_only.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_bench.models.modules.fp8_module import PREFIX
from te_bench.models.recipe import Recipe
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import tokenizer as tokenizers
from te_bench.training import weights
from te_bench.training.corpus import Corpus

FORMAT = 1  # of the part "te_bench"
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
OTHERS = ("bias", "dropout")  # nanoGPT's further model_args
GELU = ("none", "tanh")  # torch's `approximate`
#: What torch.compile and DistributedDataParallel put before every name.
WRAPPED = re.compile(r"^(?:_orig_mod\.|module\.)+")
MASK = re.compile(r"\.attn\.bias$")  # nanoGPT's causal mask, where it has no flash attention
READABLE = "nanoGPT's ckpt.pt, a file that te-bench saved, or a folder in the Hugging Face layout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint holds; None where it says nothing. Its tensors are on the CPU, and may be mapped from the file."""

    path: Path
    config: GPTConfig
    parameters: Mapping[str, Tensor]  # every parameter of GPT(config) by name, the tied head left out
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # the recipe's state, as in a state dict
    recipe: str | None = None  # the FP8 recipe that it was trained with
    tokenizer: str | None = None  # a spec of te_bench.training.tokenizer
    tokenizer_state: str | None = None
    data_sha256: str | None = None  # of the text that it was trained on

    def build(self, *, attention: str = "flash", recipe: Recipe | None = None) -> GPT:
        """The model, float32 on the CPU, unpadded; with a recipe its FP8 state too, as far as there is any."""
        model = weights.make_empty(self.config, attention=attention, recipe=recipe)
        tied = {"lm_head.weight": self.parameters["transformer.wte.weight"]}
        model.load_state_dict({**self.parameters, **tied, **(self.scales if recipe is not None else {})})
        return model

    def text_tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokeniser it was trained with, or None if the checkpoint does not hold it."""
        if self.tokenizer is None:
            return None
        return tokenizers.restore(self.tokenizer.partition(":")[0], self.tokenizer_state)


def save(
    model: GPT,
    path: Path,
    *,
    recipe: str | None = None,
    corpus: Corpus | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the model's true vocabulary, its FP8 state and its tokeniser to `path`, which is replaced as a whole.

    recipe: the name of the one it trained with. about: anything that JSON can hold, for a reader of the file.
    """
    parameters, scales = {}, {}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[2].startswith(PREFIX):
            scales[name] = tensor.cpu()
        elif name != "lm_head.weight":
            # A clone, for torch.save would write the padding of a slice along with it.
            rows = model.config.vocab_size if name == "transformer.wte.weight" else len(tensor)
            parameters[name] = tensor[:rows].detach().cpu().clone()
    parameters["lm_head.weight"] = parameters["transformer.wte.weight"]  # one storage: it is written once
    content = {
        "model": parameters,
        "model_args": {name: getattr(model.config, name) for name in (*SIZES, *OTHERS)},
        "fp8": scales,
        "te_bench": {
            "format": FORMAT,
            "gelu": model.config.gelu,
            "recipe": recipe,
            "tokenizer": corpus and corpus.tokenizer,
            "tokenizer_state": corpus and corpus.text_tokenizer().state,
            "data": corpus and corpus.data,
            "data_sha256": corpus and corpus.sha256,
            "about": dict(about or {}),
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with weights.replacing(path) as temporary:
        torch.save(content, temporary)


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder in the Hugging Face layout.

    Raises ValueError for what is not there, not readable, of another layout, or has tensors that do not fit its sizes.
    """
    if path.is_dir():
        return _load_folder(path)
    content = _unpickle(path)
    missing = [key for key in ("model", "model_args") if not isinstance(content.get(key), dict)]
    if missing:
        there = ", ".join(map(str, list(content)[:6])) or "nothing"
        raise ValueError(f"{path} has no {' and no '.join(missing)}: it holds {there}. Give {READABLE}")
    own = content.get("te_bench", {"format": FORMAT})
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        raise ValueError(f"{path} was saved by another version of te-bench: this one reads format {FORMAT}")
    odd = [name for name in ("recipe", "tokenizer", "tokenizer_state", "data_sha256") if not _is_text(own.get(name))]
    if odd:
        raise ValueError(f"{path} is damaged: its {odd[0]} is {own[odd[0]]!r}, not text")
    config = _read_config(path, content["model_args"], own.get("gelu", "none"))
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
    """A Hugging Face folder; a tokenizer.json in it is the model's."""
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
    """The dictionary in a file of torch.save. Only tensors and plain values are read; they stay in the file until used."""
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} does not say the model's sizes: give its folder, with a {weights.CONFIG} beside it")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}. Give {READABLE}") from error
    except pickle.UnpicklingError as error:
        what = "holds Python objects besides tensors and plain values, and loading those can run code"
        raise ValueError(f"{path} {what}: save its model and model_args alone") from error
    except (RuntimeError, LookupError, ValueError, TypeError, EOFError) as error:
        # torch's own words speak of its options, mmap and weights_only, which nobody here can set
        raise ValueError(
            f"{path} is no file of torch.save (PyTorch 1.6 or newer), or damaged. Give {READABLE}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not a dictionary. Give {READABLE}")
    return found


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _read_config(path: Path, given: Mapping[str, Any], gelu: str) -> GPTConfig:
    """The shape that model_args tells. Raises ValueError for a model that this GPT cannot be."""
    unknown = sorted(str(name) for name in given if name not in SIZES + OTHERS)
    if unknown:
        raise ValueError(
            f"{path}: model_args has {', '.join(unknown)}, which nanoGPT's GPT does not know: another model"
        )
    sizes: dict[str, Any] = {name: given.get(name) for name in SIZES}
    bias, dropout = given.get("bias", True), given.get("dropout", 0.0)  # nanoGPT's own defaults
    if not isinstance(bias, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(
            f"{path}: bias is {bias!r} and dropout {dropout!r}; needs True or False, and a number from 0 to 1"
        )
    if gelu not in GELU:
        raise ValueError(f"{path}: gelu is {gelu!r}; known: {', '.join(GELU)}")
    try:
        return GPTConfig(**sizes, bias=bias, dropout=float(dropout), gelu=gelu)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _match_parameters(path: Path, config: GPTConfig, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The parameters of a state dict by GPT's names. Raises ValueError, naming those that are not of `config`."""
    where = f"{path} does not hold the GPT that its model_args describe"
    named = ((str(key), WRAPPED.sub("", str(key)), tensor) for key, tensor in state.items())
    found = dict(weights.match_parameters(config, (entry for entry in named if not MASK.search(entry[1])), where))
    head = found.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, found["transformer.wte.weight"]):
        raise ValueError(f"{where}: lm_head.weight is not the token embedding, and only a tied head can be loaded")
    return found


def _check_scales(path: Path, state: Any) -> dict[str, Tensor]:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is damaged: its fp8 part is not a dictionary of tensors")
    return dict(state)
