"""Triton's interpreter computing the same in half the time: a kernel's test is mostly its own overhead (3.6 and 3.7).

What is not there in another release is left as it is.
"""

import dataclasses
import functools
import sys
from typing import Any


def quicken() -> None:
    """Once Triton's interpreter is imported, take out of it what it does again and again, or for nothing."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "quickened"):
        return
    interpreter.quickened = True
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        # Every sum of integers is worked out once more, for an assertion that is made with `debug` alone.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    language = interpreter.tl.core
    language.block_type.with_element_ty = _made_once(language.block_type.with_element_ty, language.dtype)


def _by_name(right: Any) -> Any:
    """_get_np_dtype, which makes a table of all types for each look into it; a block's is its elements'."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = (dtype.element_ty if dtype.is_block() else dtype).name
        if name not in known:
            known[name] = right(dtype)
        return known[name]

    return look_up


def _made_once(right: Any, plain: type) -> Any:
    """block_type.with_element_ty: the same few blocks over and over, whose names take longest to write."""
    known: dict[Any, Any] = {}

    def with_element_ty(self: Any, element: Any) -> Any:
        if type(element) is not plain:  # pointers, which a name does not tell apart
            return right(self, element)
        key = (element.name, *self.shape)
        if key not in known:
            known[key] = right(self, element)
        return known[key]

    return with_element_ty


def _once_a_launch(interpreter: Any) -> Any:
    """_patch_lang, which every call of a device function repeats for all of triton.language: not where a launch has."""
    right, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if any(value is one for one in language))

    def patch(fn: Any) -> Any:
        if patched and languages(fn) <= patched:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope, outermost = right(fn), not patched
        patched.update(languages(fn))
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    return patch
