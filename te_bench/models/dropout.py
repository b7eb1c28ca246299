"""Find and remove a module's dropout rates."""

from collections.abc import Iterator

from torch import nn


def rates(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, attribute) of every dropout rate: nn.Dropout's p, and floats with "drop" in their name."""
    for holder in module.modules():
        names = ("p",) if isinstance(holder, nn.modules.dropout._DropoutNd) else ()
        for name, value in list(vars(holder).items()):
            if (name in names or "drop" in name) and isinstance(value, float) and 0 < value <= 1:
                yield holder, name


def remove_dropout(module: nn.Module) -> None:
    """Set every rate of dropout to 0."""
    for holder, name in list(rates(module)):
        setattr(holder, name, 0.0)
