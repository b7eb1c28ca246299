"""Per-tensor current scaling: every tensor is scaled by its own amax, measured just before the cast."""

from dataclasses import dataclass, field

from te_bench.models.recipe._recipe import Format, Recipe
from te_bench.models.recipe.delayed_scaling import DelayedScaling


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """scale = FP8_MAX / amax(x), 1 if amax is 0, infinite or NaN; split accumulation in dgrad and wgrad.

    power_of_two rounds scales down to powers of two. fp8_dpa: attention in FP8, too, with a scale per head, always
    E4M3. bf16_wgrad: wgrad multiplies x and dy themselves, in their own precision; x is saved for it uncast, two bytes
    an element in bf16. Raises ValueError for Format.E5M2.
    Source: Transformer Engine, Float8CurrentScaling.
    """

    fp8_format: Format = Format.HYBRID
    power_of_two: bool = False
    fp8_dpa: bool = field(default=False, kw_only=True)
    bf16_wgrad: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format()

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    def by_given_scale(self) -> Recipe | None:
        kind = type(self)  # a subclass may cast differently
        usual = all(getattr(kind, name) is getattr(Recipe, name) for name in ("quantize", "block", "dtype"))
        if not usual or self.bf16_wgrad:
            return None
        return DelayedScaling(fp8_format=self.fp8_format, emulate=self.emulate)


RECIPE = Float8CurrentScaling()
