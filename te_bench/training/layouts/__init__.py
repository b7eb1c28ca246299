"""Layouts of model families in Hugging Face folders, one file each: LAYOUT in NAME.py, NAME as in models.zoo. No torch.

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
    """A tensor of the folder: it holds the next `rows` rows of a parameter, or all remaining rows."""

    key: str
    rows: int | None = None
    transposed: bool = False  # (in, out) in the folder, (out, in) here


def whole(config: DecoderConfig, name: str) -> list[Piece]:
    """Return the single piece of a parameter that is stored whole under its own name."""
    return [Piece(name)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a family's folder. The callables take Decoder's names of parameters and never its modules.

    model_types: values in config.json that `read` knows. prefix: of keys; files of a model without its head omit it.
    ignored: keys (with prefix) that are no parameters. zeros: {key: elements} of vectors that the folder has and our
    model has not. read and describe raise ValueError for settings that the other format cannot express.
    """

    model_types: tuple[str, ...]
    prefix: str
    ignored: Pattern[str]
    read: Callable[[Settings], DecoderConfig]
    describe: Callable[[DecoderConfig], dict[str, Any]] = field(repr=False)
    pieces: Callable[[DecoderConfig, str], list[Piece]] = whole
    zeros: Callable[[DecoderConfig], dict[str, int]] = lambda config: {}


_family = plugins.Family(__name__, "LAYOUT", Layout)
names = _family.names


def load(family: str) -> Layout:
    """Return the family's layout. Raises ValueError if it has none."""
    if family not in names():
        raise ValueError(f"no file of te_bench/training/layouts is {family}'s: its weights go into checkpoints alone")
    return _family.load(family)


def of_model_type(model_type: object) -> Layout:
    """Return the layout that reads this model_type. Raises ValueError if none does."""
    layouts = [_family.load(name) for name in names()]
    known = [name for layout in layouts for name in layout.model_types]
    if model_type not in known:
        raise ValueError(f"model_type is {model_type!r}; known: {', '.join(known)}")
    return next(layout for layout in layouts if model_type in layout.model_types)


# Checks that the layouts share.


def require(settings: Settings, only: Settings) -> None:
    """Raise ValueError if a setting is present and differs from the only value that can be loaded."""
    for key, value in only.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{key} is {settings[key]!r}; only {value!r} can be loaded")


def read_sizes(settings: Settings, *keys: str) -> list[int]:
    """Return the sizes under these keys. Raises ValueError unless all are positive integers."""
    odd = [key for key in keys if type(settings.get(key)) is not int or settings[key] < 1]
    if odd:
        raise ValueError(f"{', '.join(f'{key} is {settings.get(key)!r}' for key in odd)}; give positive integers")
    return [settings[key] for key in keys]
