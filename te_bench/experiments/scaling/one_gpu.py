"""The speed of one GPU, from a step measured on it: its FLOP over its seconds without the update."""

from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.experiments.scaling.layout import PRECISIONS, UPDATES, Rate
from te_bench.experiments.scaling.predict import UPDATE
from te_bench.experiments.scaling.shapes import model
from te_bench.models import cost

TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A whole step that ran alone on one GPU. update: bytes that its optimizer moves per parameter."""

    model: str
    batch: int
    tokens: int
    precision: str
    seconds: float
    how: str
    update: int = UPDATE

    @property
    def flop(self) -> float:
        config = model(self.model, self.tokens)
        costs = cost.step(
            config, batch=self.batch, padded_vocab=config.shape.vocab, fp8=False, fp8_head=False, clipped=False
        )
        return float(sum(one.bf16_flop for one in costs))

    @property
    def rate(self) -> Rate:
        """One rate for all FLOP of the step, in any precision. Raise ValueError for an impossible time."""
        left = self.seconds - self._updating(self.update)
        if left <= 0:
            raise ValueError(
                f"a step of {self.model} in {self.seconds * 1e3:.3g} ms is shorter than its optimizer's update: "
                "no GPU of this prediction is so fast; give --tflops"
            )
        return Rate(bf16=self.flop / left, fp8=self.flop / left)

    @property
    def said(self) -> str:
        step = (
            f"{self.seconds * 1e3:.4g} ms a step of {self.model}, {self.batch} x {self.tokens} tokens, {self.precision}"
        )
        said = f"{step}, {self.how}: {self.rate.bf16 / TERA:.0f} TFLOP/s"
        if not (more := self._updating(UPDATE) - self._updating(self.update)):
            return said
        return f"{said}; predicted are float32 weights and states, whose update takes {1e3 * more:.1f} ms more"

    def _updating(self, bytes_each: int) -> float:
        """Return the seconds of AdamW's update with so many bytes read and written for each parameter."""
        config = model(self.model, self.tokens)
        return bytes_each * cost.parameters(config, config.shape.vocab) / UPDATES


#: The default steps. The 8B steps: one H200, bf16 weights and AdamW states, torch 2.11, 2026-11-23.
KNOWN: Mapping[tuple[str, str], Measured] = {
    ("h200", "bf16"): Measured(
        model="llama3-8b", batch=1, tokens=8192, precision="bf16", seconds=0.7712, update=14,
        how="torch.compile on one H200",
    ),
    ("h200", "fp8"): Measured(
        model="llama3-8b", batch=1, tokens=8192, precision="fp8", seconds=0.6435, update=14,
        how="torchao's tensorwise recipe and torch.compile on one H200",
    ),
    ("h100", "bf16"): Measured(
        model="llama3-1b", batch=1, tokens=8192, precision="bf16", seconds=0.1541,
        how="te-bench's fused step on one H100 (results/h100/speed-llama3-1b)",
    ),
    ("h100", "fp8"): Measured(
        model="llama3-1b", batch=1, tokens=8192, precision="fp8", seconds=0.1181,
        how="te-bench's fused step on one H100 (results/h100/speed-llama3-1b)",
    ),
}  # fmt: skip


def stated(tflops: float) -> Rate:
    """Return one rate for all FLOP of a step."""
    return Rate(bf16=tflops * TERA, fp8=tflops * TERA)


def nearest(steps: list[Measured], name: str, precision: str) -> Measured | None:
    """Return the fastest step of that model and precision, else of the model with the most FLOP; None without steps."""
    assert precision in PRECISIONS
    same = [step for step in steps if step.precision == precision]
    exact = [step for step in same if step.model == name]
    if exact:
        return max(exact, key=lambda step: step.rate.bf16)
    largest = max((step.flop for step in same), default=0.0)
    return max((step for step in same if step.flop == largest), key=lambda step: step.rate.bf16, default=None)
