"""Change a module's class: a mixin is put before its own class, and survives copying and pickling."""

import contextlib
import copyreg
import functools
from typing import Any

from torch import nn


class Mixed:
    """The base of the mixins. A class made by `_mixed` has the name of the class that it extends.

    type(model)(config) makes a module that was never converted: it computes as its origin.
    """

    _te_origin: type[nn.Module]  # the class that the mixins were put before
    _te_mixins: tuple[type["Mixed"], ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce for pickle and copy: the class must be made again, because its name leads to the original."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        return (_fresh, (self._te_origin, *self._te_mixins), *made[2:])


@functools.cache
def _mixed(origin: Any, *mixins: Any) -> Any:
    names = {key: getattr(origin, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(origin)(origin.__name__, (*mixins, origin), {**names, "_te_origin": origin, "_te_mixins": mixins})


def _fresh(origin: Any, *mixins: Any) -> Any:
    made = _mixed(origin, *mixins)
    return made.__new__(made)


def mix(module: Any, mixin: type[Mixed], undo: contextlib.ExitStack) -> None:
    """Put `mixin` before the module's class and earlier mixins; nothing if it is there already.

    Raises what the class's metaclass, __init_subclass__ or __slots__ raises.
    """
    own: Any = type(module)
    if issubclass(own, mixin):
        return
    origin, mixins = (own._te_origin, own._te_mixins) if issubclass(own, Mixed) else (own, ())
    made: Any = _mixed(origin, *(mixin, *mixins))
    undo.callback(object.__setattr__, module, "__class__", own)
    object.__setattr__(module, "__class__", made)
