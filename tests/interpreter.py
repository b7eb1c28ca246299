"""Triton's interpreter computing the same in a third of the time: a kernel's test is mostly its own overhead (3.6 and 3.7).

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
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _by_table(interpreter._convert_float)
    if hasattr(interpreter, "_patch_attr"):
        interpreter._patch_attr = _at_once(interpreter.interpreter_semantic)
    language = interpreter.tl.core
    language.block_type.__init__ = _filled_once(language.block_type.__init__, language.dtype)
    language.tensor.__init__ = _shaped_as_before(language.tensor.__init__)


def _by_name(right: Any) -> Any:
    """_get_np_dtype, which makes a table of all types for each look into it; a block's is its elements'."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = (dtype.element_ty if dtype.is_block() else dtype).name
        if name not in known:
            known[name] = right(dtype)
        return known[name]

    return look_up


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


def _at_once(semantic: Any) -> Any:
    """_patch_attr, whose functions go through one wrapper that asks for the semantic and one that takes it away."""
    code = "builtin.<locals>.wrapper"

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        asked = getattr(getattr(member, "__code__", None), "co_qualname", None) == code
        fn = member.__wrapped__ if asked else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return patch


def _filled_once(right: Any, plain: type) -> Any:
    """block_type's __init__: there are few, made again for every operation."""
    known: dict[Any, dict[str, Any]] = {}

    @functools.wraps(right)
    def fill(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if type(element) is not plain or any(type(size) is not int for size in sizes):
            return right(self, element, shape)
        key = (element.name, *sizes)
        if key not in known:
            right(self, element, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return fill


def _shaped_as_before(right: Any) -> Any:
    """tensor's __init__, which makes a constexpr of every size: one for all tensors of that shape."""
    known: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(right)
    def fill(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            right(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return fill
