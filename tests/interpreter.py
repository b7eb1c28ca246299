"""Triton's interpreter computing the same in a quarter of the time: a kernel's test is mostly its overhead (3.6 and 3.7).

What is not there in another release is left as it is.
"""

import dataclasses
import functools
import sys
from typing import Any


def quicken() -> None:
    """Once Triton's interpreter is imported, take out of it what it does again and again, or for nothing."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    # The compiler shares classes with it: where kernels are compiled, they stay as they are.
    if interpreter is None or hasattr(interpreter, "quickened") or not interpreter.triton.knobs.runtime.interpret:
        return
    interpreter.quickened = True
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter)
    if hasattr(interpreter, "_patch_lang_tensor"):
        interpreter._patch_lang_tensor = _with_an_index(interpreter._patch_lang_tensor)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        # Every sum of integers is worked out once more, for an assertion that is made with `debug` alone.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _by_table(interpreter._convert_float)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
        interpreter._patch_attr = _called_straight(interpreter)
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    for of, name, quick in (
        (core.dtype, "__eq__", _if_not_itself),
        (core.block_type, "__init__", _type_of_known_shape(core)),
        (core.tensor, "__init__", _tensor_of_known_shape),
        (semantic, "broadcast_impl_value", _unless_alike),
        (semantic, "binary_op_type_checking_impl", _unless_of_a_type(core.tensor)),
    ):
        if hasattr(of, name):
            right = getattr(of, name)
            setattr(of, name, functools.wraps(right)(quick(right)))


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


def _with_an_index(right: Any) -> Any:
    """_patch_lang_tensor, whose scalars are arrays of one element: NumPy 2.4 makes no integer of them (Triton 3.6)."""

    def patch(tensor: Any, scope: Any) -> None:
        right(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

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


def _by_name(right: Any) -> Any:
    """_get_np_dtype, which makes a table of all types for each look into it."""
    known: dict[str, Any] = {}

    @functools.wraps(right)
    def look_up(one: Any) -> Any:
        if one.name not in known:
            known[one.name] = right(one)
        return known[one.name]

    return look_up


def _called_straight(interpreter: Any) -> Any:
    """_patch_attr, whose functions sort out their keywords at each call, and then check that they were given one."""

    def patch(to: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(to, name, call)

    return patch


def _type_of_known_shape(core: Any) -> Any:
    """block_type.__init__, which makes a shape, its name and its number of elements in five passes: once of each."""
    known: dict[Any, dict[str, Any]] = {}

    def quick(right: Any) -> Any:
        def init(self: Any, element_ty: Any, shape: Any) -> None:
            values = shape.values if type(shape) is core.tuple else shape
            sizes = tuple([value.value if type(value) is core.constexpr else value for value in values])
            if set(map(type, sizes)) != {int}:
                return right(self, element_ty, shape)
            if (element_ty.name, sizes) not in known:
                right(self, element_ty, shape)
                known[element_ty.name, sizes] = dict(vars(self))
            vars(self).update(known[element_ty.name, sizes], element_ty=element_ty)

        return init

    return quick


def _tensor_of_known_shape(right: Any) -> Any:
    """tensor.__init__, which makes a shape of constants and its type anew for the result of every operation."""
    known: dict[Any, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            right(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return init


def _if_not_itself(right: Any) -> Any:
    """dtype.__eq__, which compares names, and unwraps the other one for it."""

    def equal(self: Any, other: Any) -> bool:
        return self is other or right(self, other)

    return equal


def _unless_alike(right: Any) -> Any:
    """broadcast_impl_value, which asks five times whether two scalars are blocks and compares two shapes thrice over."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        alike = b.is_block() and a.shape.values == b.shape.values if a.is_block() else not b.is_block()
        return (lhs, rhs) if alike else right(self, lhs, rhs)

    return broadcast


def _unless_of_a_type(tensor: Any) -> Any:
    """binary_op_type_checking_impl, which works out which type two numbers of one type have, and casts them to it."""

    def quick(right: Any) -> Any:
        def check(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
            # The fourth option is a quotient's, of which halves are none.
            if type(lhs) is type(rhs) is tensor and len(options) < 4 and not named:
                a = lhs.dtype
                if a.name == rhs.dtype.name and not a.is_ptr():
                    return self.broadcast_impl_value(lhs, rhs)
            return right(self, lhs, rhs, *options, **named)

        return check

    return quick
