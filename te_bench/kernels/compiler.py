"""Calls to torch's compiler, deferred until it is imported, which takes nearly as long as importing torch."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

COMPILER = "torch._dynamo"
_waiting: list[Callable[[], object]] = []


def when_imported(tell: Callable[[], object]) -> None:
    """Call tell() right after the compiler's import, or at once if it is imported.

    A decorator of torch.compiler imports the compiler. Nothing is traced before: torch.compile imports it first.
    """
    if COMPILER in sys.modules:
        tell()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder())
    _waiting.append(tell)


class _Finder(importlib.abc.MetaPathFinder):
    """Find the compiler once, as the default finders do, and make its loader run the waiting calls."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            while _waiting:
                _waiting.pop(0)()

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec
