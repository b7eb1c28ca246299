"""How families of models lie in Hugging Face folders, one file each: LAYOUT in NAME.py, NAME as in models.zoo. No torch.

    layout = layouts.load(config.family)
    layout.describe(config)                                  # config.json
    layout.pieces(config, "model.layers.0.mlp.gate_up_proj.weight")     # two tensors, gate_proj and up_proj

A file of one's own here is all that training.weights needs to read and write the folders of a further family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from re import Pattern
from typing import Any, NamedTuple

from te_bench import plugins
from te_bench.models.configs import DecoderConfig

Settings = Mapping[str, Any]  # what config.json says


class Piece(NamedTuple):
    """A tensor of the folder: the next `rows` rows of a parameter, or all that are left of it."""

    key: str
    rows: int | None = None
    transposed: bool = False  # (in, out) there, (out, in) here


def whole(config: DecoderConfig, name: str) -> list[Piece]:
    """The pieces of a parameter that is a tensor of the same name."""
    return [Piece(name)]


def no_zeros(config: DecoderConfig) -> dict[str, int]:
    """No tensor is made up."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A family's folder. The callables take Decoder's names of parameters and never its modules.

    model_types: those of config.json that `read` knows. prefix: of keys, which files of a model without
    its head lack. ignored: keys that are no parameters, prefix included. zeros: {key: elements} of vectors that the folder
    has and a model of this configuration has not. read and describe raise ValueError for what the other cannot say.
    """

    model_types: tuple[str, ...]
    prefix: str
    ignored: Pattern[str]
    read: Callable[[Settings], DecoderConfig]
    describe: Callable[[DecoderConfig], dict[str, Any]] = field(repr=False)
    pieces: Callable[[DecoderConfig, str], list[Piece]] = whole
    zeros: Callable[[DecoderConfig], dict[str, int]] = no_zeros


_family = plugins.Family(__name__, "LAYOUT", Layout)
names = _family.names


def load(family: str) -> Layout:
    """The layout of that family. Raises ValueError for one that has none."""
    if family not in names():
        raise ValueError(f"no file of te_bench/training/layouts is {family}'s: its weights go into checkpoints alone")
    return _family.load(family)


def of_model_type(model_type: object) -> Layout:
    """The layout that reads such a config.json. Raises ValueError for a type that none reads."""
    found = [_family.load(name) for name in names()]
    known = [name for layout in found for name in layout.model_types]
    if model_type not in known:
        raise ValueError(f"model_type is {model_type!r}; known: {', '.join(known)}")
    return next(layout for layout in found if model_type in layout.model_types)


# What the files have in common.


def require(found: Settings, only: Settings) -> None:
    """Raise ValueError where a setting is another than the only one that can be loaded; absent means that one."""
    for key, value in only.items():
        if found.get(key, value) != value:
            raise ValueError(f"{key} is {found[key]!r}; only {value!r} can be loaded")


def read_sizes(found: Settings, *keys: str) -> list[int]:
    """The sizes under these keys. Raises ValueError for those that are none."""
    odd = [key for key in keys if type(found.get(key)) is not int or found[key] < 1]
    if odd:
        raise ValueError(f"{', '.join(f'{key} is {found.get(key)!r}' for key in odd)}; give positive integers")
    return [found[key] for key in keys]
