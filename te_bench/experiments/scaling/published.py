"""Compare predictions with published throughputs. Each family has one fitted constant, from its smallest world.

The constant is the share of the GPU's peak that one GPU reaches: of the bf16 peak for work in bf16, of the FP8 peak for work
in FP8. It covers GPU kind, power limit and software, and nothing between GPUs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from te_bench.experiments.scaling.layout import GPUS, Layout, Rate, Work
from te_bench.experiments.scaling.predict import predict
from te_bench.experiments.scaling.shapes import model

LINK = 50e9  # 400 Gb/s a GPU, in all families
FITTED, MORE, OTHER = "fitted", "more GPUs", "another model or layout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Published tokens per second and GPU, for a work on a layout."""

    what: str
    tokens_per_second: float
    work: Work
    layout: Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Figures of one software, GPU kind and precision; the first has the smallest model on the smallest world."""

    name: str
    source: str
    gpu: str
    figures: tuple[Figure, ...]


def _llama(size: str, batch: int, precision: str, *, micro_batches: int = 1, recompute: str = "none") -> Work:
    return Work(
        config=model(f"llama3-{size}", 8192), batch=batch, precision=precision, micro_batches=micro_batches,
        recompute=recompute,
    )  # fmt: skip


def _mpt(size: str, batch: int, *, micro_batches: int = 1, recompute: str = "none") -> Work:
    """Return an MPT step; llm-foundry reduces gradients in bf16 (fsdp_config: mixed_precision: PURE)."""
    return Work(
        config=model(f"mpt-{size}", 2048), batch=batch, precision="bf16", micro_batches=micro_batches,
        recompute=recompute, reduce_bytes=2,
    )  # fmt: skip


def _on(world: int, *, tp: int = 1, pp: int = 1, chunks: int = 1, cp: int = 1, sliced: bool = False) -> Layout:
    mode = "fsdp2+tp" if tp > 1 else "fsdp2"
    return Layout(mode=mode, world=world, link=LINK, tp=tp, pp=pp, chunks=chunks, cp=cp, sliced=sliced)


def _titan(precision: str, in_8: float, in_128: float, of_70b: Sequence[float], of_8b: Sequence[float]) -> list[Figure]:
    """Return torchtitan's figures on H100: FSDP alone, and with TP 8, plain and async."""
    eight, seventy = _llama("8b", 2, precision, recompute="selective"), _llama("70b", 16, precision, recompute="full")
    narrow = _llama("8b", 12, precision, recompute="selective")
    return [
        Figure(what="Llama 8B FSDP", tokens_per_second=in_8, work=eight, layout=_on(8)),
        Figure(what="Llama 8B FSDP", tokens_per_second=in_128, work=eight, layout=_on(128)),
        *(
            Figure(what=f"Llama 8B FSDP 8, {how}TP 8", tokens_per_second=speed, work=narrow, layout=layout)
            for how, speed, layout in zip(
                ("", "async "), of_8b, (_on(64, tp=8), _on(64, tp=8, sliced=True)), strict=True
            )
        ),
        *(
            Figure(what=f"Llama 70B FSDP 32, {how}TP 8", tokens_per_second=speed, work=seventy, layout=layout)
            for how, speed, layout in zip(
                ("", "async "), of_70b, (_on(256, tp=8), _on(256, tp=8, sliced=True)), strict=True
            )
        ),
    ]


def _deep(what: str, speed: float, chunks: int) -> Figure:
    """Return 405B in 8 stages, batch 32. Its micro-batches are unpublished: 8 reproduce both schedules' published ratio."""
    layout = _on(512, tp=8, pp=8, chunks=chunks, sliced=True)
    work = _llama("405b", 4, "fp8", micro_batches=8, recompute="full")
    return Figure(what=f"Llama 405B FSDP 8, async TP 8, PP 8 {what}", tokens_per_second=speed, work=work, layout=layout)


TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, container 25.11, DGX-H100"

FAMILIES = (
    Family(
        name="torchtitan, H100 500 W, bf16", source=TITAN, gpu="h100",
        figures=tuple(_titan("bf16", 6667, 6514, (597.3, 652.4), (4378, 4809.4))),
    ),
    Family(
        name="torchtitan, H100 500 W, FP8", source=TITAN, gpu="h100",
        figures=(
            *_titan("fp8", 8532, 8380, (809.8, 942.4), (5078.1, 5570.1)),
            _deep("1F1B", 100, 1),
            _deep("interleaved", 128, 2),
        ),
    ),
    Family(
        name="torchtitan, H200, FP8",
        source="pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md", gpu="h200",
        figures=tuple(
            Figure(
                what="Llama 8B FSDP", tokens_per_second=speed, work=_llama("8b", 2, "fp8", recompute="selective"),
                layout=_on(world),
            )
            for world, speed in ((32, 10938), (64, 10753))
        ),
    ),
    Family(
        name="llm-foundry, H100, bf16", source="mosaicml/llm-foundry, scripts/train/benchmarking/README.md", gpu="h100",
        figures=(
            *(
                Figure(what="MPT 1B FSDP", tokens_per_second=speed, work=_mpt("1b", batch), layout=_on(world))
                for world, batch, speed in ((8, 14, 45455), (16, 20, 46037), (32, 20, 45130), (64, 20, 44402))
            ),
            *(
                Figure(what="MPT 13B FSDP", tokens_per_second=speed, work=_mpt("13b", 2), layout=_on(world))
                for world, speed in ((8, 4792), (16, 4767), (32, 4811), (64, 4800))
            ),
            *(
                Figure(
                    what="MPT 70B FSDP", tokens_per_second=speed, layout=_on(world),
                    work=_mpt("70b", batch, micro_batches=micro_batches, recompute="full"),
                )
                for world, batch, micro_batches, speed in ((32, 2, 16, 882), (64, 8, 4, 1039))
            ),
        ),
    ),
    Family(
        name="Megatron-Bridge, H100, FP8", source=BRIDGE, gpu="h100",
        figures=(
            Figure(
                what="Llama 8B FSDP", tokens_per_second=14451, layout=_on(8),
                work=_llama("8b", 1, "fp8", micro_batches=16),
            ),
            Figure(
                what="Llama 70B TP 4, PP 8", tokens_per_second=1602, layout=_on(64, tp=4, pp=8, chunks=5),
                work=_llama("70b", 1, "fp8", micro_batches=64),
            ),
            Figure(
                what="Llama 405B TP 8, PP 8, CP 2", tokens_per_second=292,
                layout=_on(1024, tp=8, pp=8, chunks=8, cp=2), work=_llama("405b", 1, "fp8", micro_batches=64),
            ),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A figure with its prediction. The error is meaningless for the figure on which the family's constant is fitted."""

    family: Family
    figure: Figure
    efficiency: float
    predicted: float

    @property
    def fitted(self) -> bool:
        return self.figure is self.family.figures[0]

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the published value; above 0 the prediction is too fast."""
        return self.predicted / self.figure.tokens_per_second - 1

    @property
    def kind(self) -> str:
        """How the figure differs from the fitted figure of its family."""
        return FITTED if self.fitted else MORE if self.figure.what == self.family.figures[0].what else OTHER


def fit(figure: Figure, gpu: str) -> float:
    """Return the share of the GPU's peak with which the prediction equals the published figure."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _speed(figure, gpu, middle) < figure.tokens_per_second else (low, middle)
    return high


def _speed(figure: Figure, gpu: str, efficiency: float) -> float:
    of = GPUS[gpu]
    rate = Rate(bf16=efficiency * of.peak("bf16"), fp8=efficiency * of.peak("fp8"))
    return predict(figure.work, figure.layout, rate, of.memory).tokens_per_second


def validate() -> list[Compared]:
    """Return every published figure with its prediction, family by family."""
    found = []
    for family in FAMILIES:
        efficiency = fit(family.figures[0], family.gpu)
        for figure in family.figures:
            predicted = _speed(figure, family.gpu, efficiency)
            found.append(Compared(family=family, figure=figure, efficiency=efficiency, predicted=predicted))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Number, median and maximum of absolute errors."""

    number: int
    median: float
    worst: float


def errors(compared: Sequence[Compared], kinds: Sequence[str] = (MORE, OTHER)) -> Errors:
    """Return the errors of the predictions of these kinds."""
    sizes = [abs(one.error) for one in compared if one.kind in kinds]
    return Errors(number=len(sizes), median=statistics.median(sizes), worst=max(sizes))
