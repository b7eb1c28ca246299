"""The published verdicts on FP8's convergence, which advice and reports quote."""

from dataclasses import dataclass

from te_bench.reports.analysis.naming import recipe_name

PASSED = "EQUIVALENT"
PAGE = "docs/convergence.md"  # which holds every verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A verdict of docs/convergence-records.md and of its records in results/; tests check that both agree.

    gap: nat above bf16, with the interval of its tests. sooner: how many times as fast it comes to bf16's final loss.
    """

    recipe: str
    fused: bool
    fp8_head: bool
    verdict: str
    records: str  # below results/
    arm: str  # its name in the report
    training: str = "300 steps"  # of GPT-2 124M
    margin: float = 0.02  # in nat
    gap: str
    sooner: str | None = None
    on: str | None = None  # the pairs that this is of, if not all

    @property
    def where(self) -> str:
        return f"results/{self.records}"

    def in_words(self, *, beside: bool = True) -> str:
        """Say the gap and the verdict; of a verdict that shows nothing, which recipe passes beside it, if there is one.

        beside=False: leave that recipe out.
        """
        head = " with an FP8 head" if self.fp8_head else ""
        said = f"GPT-2 124M{head}, {self.training}: {self.gap} nat above bf16, {self.verdict} within {self.margin:g}"
        if (passed := self._passed_beside()) and not beside:
            return f"{said} ({PAGE})"
        if passed:
            head = "an FP8" if passed.fp8_head else "a bf16"
            return f"{said}; by {recipe_name(passed.recipe)} with {head} head {passed.gap}, {PASSED} ({PAGE})"
        by = f"estimated from {self.on.replace(' share', ', which share')}" if self.on else "we estimate"
        sooner = f"; it reaches bf16's loss {self.sooner} as fast, {by}" if self.sooner else ""
        return f"{said}{sooner} ({self.where})"

    def _passed_beside(self) -> "Published | None":
        """Return the recipe that passed in the same training by the same kernels, unless this one did."""
        of = [one for one in PUBLISHED if (one.training, one.fused, one.verdict) == (self.training, self.fused, PASSED)]
        return None if self.verdict == PASSED else next(iter(of), None)


#: On an H200; of each recipe the longest training.
PUBLISHED = (
    Published(
        recipe="delayed_scaling_e4m3", fused=True, fp8_head=True, verdict="INCONCLUSIVE",
        records="h200/convergence-gpt2", arm="delayed scaling E4M3, fused, FP8 head",
        training="100 M tokens", margin=0.005, gap="0.0035 [0.0013, 0.0061]", sooner="1.25× [1.20, 1.26]",
        on="11 of 12 pairs share a host",
    ),
    Published(
        recipe="delayed_scaling_e4m3", fused=True, fp8_head=False, verdict="EQUIVALENT",
        records="h200/convergence-gpt2-e4m3", arm="delayed scaling E4M3, fused, bf16 head",
        training="100 M tokens", margin=0.005, gap="0.0025 [-0.0008, 0.0046]", sooner="1.14× [1.10, 1.15]",
        on="5 of 20 pairs share a host",
    ),
    Published(
        recipe="delayed_scaling", fused=True, fp8_head=True, verdict="INCONCLUSIVE",
        records="h200/convergence-gpt2", arm="delayed scaling, fused, FP8 head",
        training="100 M tokens", margin=0.005, gap="0.0060 [0.0043, 0.0083]",
    ),
    Published(
        recipe="delayed_scaling", fused=False, fp8_head=False, verdict="EQUIVALENT",
        records="h200/convergence-short", arm="delayed scaling", gap="0.0057 [-0.0004, 0.0145]",
    ),
)  # fmt: skip


def nearest(recipe: str | None, *, fused: bool, fp8_head: bool) -> Published | None:
    """Return the verdict on te-bench's kernels with this recipe, and fused blocks or not; of that head if there is one."""
    found = [one for one in PUBLISHED if (one.recipe, one.fused) == (recipe, fused)]
    return min(found, key=lambda one: one.fp8_head != fp8_head, default=None)
