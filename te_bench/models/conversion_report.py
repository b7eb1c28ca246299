"""The report of `convert`: what it did to a model's layers, and its table."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A swapped layer. parameters: elements of its weight, which FP8 GEMMs read; 0 for a norm."""

    name: str
    before: str
    after: str
    parameters: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer that stayed, and why. parameters: elements that stay out of FP8 GEMMs; 0 for a norm."""

    name: str
    kind: str
    reason: str
    parameters: int


@dataclass(frozen=True, slots=True)
class TeLayer:
    """A layer that was te's before. parameters: elements of its weights, which FP8 GEMMs read; 0 for a norm."""

    name: str
    kind: str
    parameters: int


@dataclass(frozen=True, slots=True)
class OtherWeight:
    """A weight in none of these layers, and why it stays. kind: the class of the module that owns it.

    multiplied: how many of its elements multiply a token; None if unknown.
    """

    name: str
    kind: str
    reason: str
    parameters: int
    multiplied: int | None


@dataclass(frozen=True, slots=True)
class ConvertedPart:
    """A part of PARTS, such as an MLP. after: what computes it; None if it stays for `reason`.

    parameters: elements that the part's FP8 GEMMs read and no layer counts.
    """

    part: str
    name: str
    kind: str
    after: str | None
    reason: str | None
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class Conversion:
    """The report of `convert`, also of layers converted before; str() is its table.

    parameters: all of the model's. by_itself: calling the model enters the recipe; otherwise your te.autocast does.
    """

    converted: tuple[ConvertedLayer, ...]
    kept: tuple[KeptLayer, ...]
    parameters: int
    found: tuple[TeLayer, ...] = ()
    outside: tuple[OtherWeight, ...] = ()
    parts: tuple[ConvertedPart, ...] = ()
    by_itself: bool = True

    @property
    def gemm_parameters(self) -> int:
        """How many of the parameters FP8 GEMMs read under a recipe."""
        return sum(sum(entry.parameters for entry in some) for some in (self.converted, self.found, self.parts))

    @property
    def flop_share(self) -> float:
        """The share of a token's weight-GEMM FLOP that is in FP8; weights of unknown FLOP are left out."""
        stays = sum(k.parameters for k in self.kept) + sum(o.multiplied or 0 for o in self.outside)
        return self.gemm_parameters / max(self.gemm_parameters + stays, 1)

    def __str__(self) -> str:
        rows = [(c.name, c.before, ", ".join(filter(None, (f"te.{c.after}", c.note)))) for c in self.converted]
        rows += [(f.name, f"te.{f.kind}", "te's already") for f in self.found]
        rows += [(k.name, k.kind, f"kept: {k.reason}") for k in self.kept]
        rows += [(p.name or "the model", p.kind, f"{p.part}: {p.after or f'kept: {p.reason}'}") for p in self.parts]
        taken = {part.name for part in self.parts if part.after is not None and part.part == "experts"}
        outside = [weight for weight in self.outside if weight.name.rpartition(".")[0] not in taken]
        rows += [(o.name, o.kind, f"kept: {o.reason}") for o in outside]
        # Layers of a stack whose names differ only in a number share a row.
        alike = Counter((_without_numbers(name), was, _without_numbers(now)) for name, was, now in rows)
        table = [("layers", "", "was", "is"), *((where, f"{n} x", was, now) for (where, was, now), n in alike.items())]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in table]
        share = self.gemm_parameters / max(self.parameters, 1)
        total = len(self.converted) + len(self.kept) + len(self.found)
        already = f", {len(self.found)} te's already" if self.found else ""
        already += f", {len(outside)} weights outside of layers" if outside else ""
        unknown = sum(o.parameters for o in self.outside if o.multiplied is None)
        but = f", not counting {unknown:,} parameters whose use is not known" if unknown else ""
        asks = not self.by_itself and self.gemm_parameters
        under = "no recipe, so FP8 only under your te.autocast: there " if asks else ""
        lines.append(
            f"{len(self.converted)} of {total} layers converted{already}; {under}FP8 GEMMs read {self.gemm_parameters:,} of "
            f"{self.parameters:,} parameters ({share:.1%}) and do {self.flop_share:.1%} of a token's FLOP with weights{but}"
        )
        if self.parts:
            by_kernels = Counter(entry.part for entry in self.parts if entry.after is not None)
            counted = ", ".join(f"{n} {part}" for part, n in by_kernels.items()) or "none"
            lines.append(f"by te-bench's kernels: {counted}")
        return "\n".join(lines)


def _without_numbers(text: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in text.split("."))
