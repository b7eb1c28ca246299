"""GPT weights in the Hugging Face GPT-2 layout: a folder with config.json and model.safetensors.

    weights.save(model, Path("mine"))
    model = weights.load(Path("mine"), attention="cudnn", padded_vocab_size=50304)

transformers' GPT2LMHeadModel.from_pretrained and save_pretrained read and write the same folder. Nothing is unpickled.
Source: transformers, models/gpt2 (its Conv1D holds a Linear's weight transposed) and configuration_gpt2.py.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from te_bench.models.recipe import Recipe
from te_bench.models.zoo.gpt import GPT, GPTConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EPSILON = 1e-5  # torch.nn.LayerNorm's, and GPT-2's

#: activation_function -> torch's `approximate`; every name but "gelu" means the tanh form.
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
#: Settings that would make it another model, with the one value that is GPT-2's; absent means that value.
FIXED: Mapping[str, Any] = {
    "model_type": "gpt2",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "layer_norm_epsilon": EPSILON,
}
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # (in, out) there, (out, in) here
IGNORED = re.compile(r"\.attn\.(masked_)?bias$|^lm_head\.weight$")  # causal masks, and the head, which is tied


def save(model: GPT, folder: Path) -> None:
    """Write the model's true vocabulary to `folder`, zeros where it has no biases; each file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(_describe(model.config), indent=2) + "\n"
    old = folder / CONFIG
    with replacing(old) as described, replacing(folder / WEIGHTS) as weights:  # the weights are replaced first
        save_file(dict(_export(model)), weights, metadata={"format": "pt"})
        described.write_text(config, encoding="utf-8")
        if old.exists() and old.read_bytes() != config.encode():
            old.unlink()  # so that a crash between the two files leaves no configuration with another model's weights


def load(
    folder: Path, *, attention: str = "flash", padded_vocab_size: int | None = None, recipe: Recipe | None = None
) -> GPT:
    """The model in `folder`, float32 on the CPU, its padding rows zero.

    Raises ValueError for a folder without safetensors, for another kind of model, and for missing, unknown or misshapen
    tensors, naming them.
    """
    config = _read_config(folder)
    model = make_empty(config, attention=attention, padded_vocab_size=padded_vocab_size, recipe=recipe)
    parameters = dict(model.named_parameters())
    where = f"{folder} does not hold the GPT-2 that its {CONFIG} describes"
    with torch.no_grad():
        for name, tensor in match_parameters(config, _name_tensors(folder), where, transposed=CONV1D):
            parameters[name][: len(tensor)].copy_(tensor)
            parameters[name][len(tensor) :].zero_()
    return model


def make_empty(config: GPTConfig, **options: Any) -> GPT:
    """The model on the CPU, its memory as it was found; draws no random numbers."""
    with torch.device("meta"):
        model = GPT(config, **options)
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight  # leaving the meta device unties it
    return model


def match_parameters(
    config: GPTConfig, tensors: Iterable[tuple[str, str, Any]], where: str, transposed: re.Pattern[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of those of GPT(config)'s parameters, and of its head, of (key in the file, name, value).

    transposed: the names of matrices that are (in, out) there. Raises ValueError at the end, naming what does not fit.
    """
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in GPT(config, attention="manual").named_parameters()}
    missing, wrong = {**shapes, "lm_head.weight": shapes["transformer.wte.weight"]}, []
    for key, name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape is None:
            wrong.append(f"{key} is unknown or there twice")
            continue
        turned = transposed is not None and transposed.search(name) is not None
        expected = shape[::-1] if turned else shape
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or list(tensor.shape) != expected:
            there = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            wrong.append(f"{key} is {there}, not floating point {expected}")
        else:
            yield name, tensor.t() if turned else tensor
    wrong += [f"{name} is missing" for name in missing if name in shapes]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{where}: {'; '.join(wrong[:5])}{more}")


def _describe(config: GPTConfig) -> dict[str, Any]:
    return {
        **FIXED,
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": {"none": "gelu", "tanh": "gelu_new"}[config.gelu],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _read_config(folder: Path) -> GPTConfig:
    """What config.json says, as far as this GPT can be it. Raises ValueError, naming what it cannot be."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG}: give a folder in the Hugging Face layout") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    for key, only in FIXED.items():
        if found.get(key, only) != only:
            raise ValueError(f"{path}: {key} is {found[key]!r}; only {only!r} can be loaded")
    sizes: dict[str, Any] = {
        key: found.get(key) for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    odd = [key for key, size in sizes.items() if type(size) is not int or size < 1]
    if odd:
        raise ValueError(f"{path}: {', '.join(f'{key} is {sizes[key]!r}' for key in odd)}; give positive integers")
    if found.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(
            f"{path}: n_inner is {found['n_inner']!r}; only 4 n_embd = {4 * sizes['n_embd']} can be loaded"
        )
    activation = found.get("activation_function", "gelu_new")
    if activation not in list(GELU):
        raise ValueError(f"{path}: activation_function is {activation!r}; known: {', '.join(GELU)}")
    dropouts = [found.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    if not isinstance(dropouts[0], int | float) or dropouts != dropouts[:1] * 3:
        raise ValueError(f"{path}: resid_pdrop, embd_pdrop and attn_pdrop are {dropouts}; give them one number")
    return GPTConfig(
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        n_embd=sizes["n_embd"],
        block_size=sizes["n_positions"],
        vocab_size=sizes["vocab_size"],
        dropout=float(dropouts[0]),
        bias=True,
        gelu=GELU[activation],
    )


def _export(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor as transformers writes them: no padding rows, Conv1D transposed, a bias beside every weight."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu()
        if name == "transformer.wte.weight":
            tensor = tensor[: model.config.vocab_size]
        yield name, (tensor.t() if CONV1D.search(name) else tensor).contiguous()
        if not model.config.bias and "wte" not in name and "wpe" not in name:
            yield f"{name.removesuffix('weight')}bias", tensor.new_zeros(len(tensor))


def _name_tensors(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """(key, GPT's name, tensor) of the folder's, but for causal masks and the head."""
    for key, tensor in _read_tensors(folder):
        name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
        if not IGNORED.search(name):
            yield key, name, tensor


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors, one file or several under an index."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        if not (folder / INDEX).exists():
            pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
            hint = f"{pickled[0]} is a pickle, which can run code: convert it to safetensors first" if pickled else ""
            raise ValueError(f"{folder} has no {WEIGHTS}" + (f"; {hint}" if hint else ""))
        names = _read_shards(folder / INDEX)
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    yield key, file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {folder / name}: {error}") from error


def _read_shards(index: Path) -> list[str]:
    """The files an index names, all of which lie beside it."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files") from error
    if not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise ValueError(f"{index} names files that are not safetensors beside it")
    return names


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which it replaces when the block ends well; else it goes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
