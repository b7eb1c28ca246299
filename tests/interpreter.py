"""Triton's interpreter computing the same in half of the time: a kernel's test is mostly its overhead (3.6 and 3.7).

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
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _by_table(interpreter._convert_float)


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


def _by_table(right: Any) -> Any:
    """_convert_float, bit by bit in some thirty passes, of each number by itself: looked up where there are few of them."""
    import numpy as np

    @functools.cache
    def table(source: str, target: str, rounding: Any) -> Any:
        bits = types[source].primitive_bitwidth
        return right(np.arange(2**bits, dtype=f"uint{bits}"), types[source], types[target], rounding)

    types: dict[str, Any] = {}

    @functools.wraps(right)
    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        types[source.name], types[target.name] = source, target
        if not (x.flags.c_contiguous and x.ndim):  # a view has other shapes, and what is looked up with a number is one
            return right(x, source, target, rounding)
        bits = x.view(f"uint{source.primitive_bitwidth}")
        if source.primitive_bitwidth <= 16:
            return table(source.name, target.name, rounding)[bits]
        cut_off = (source.name, target.name, rounding) == ("fp32", "bf16", None)
        if cut_off and not np.any((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF):  # but for subnormal numbers
            return (bits >> 16).astype(np.uint16)
        return right(x, source, target, rounding)

    return convert
