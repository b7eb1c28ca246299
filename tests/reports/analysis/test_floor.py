"""A step against its floor: kinds of kernels, ceilings of the same run, nothing where something lacks."""

import dataclasses
from pathlib import Path

import journals
import pytest
from journals import STEP_KERNELS, ceilings_record, step_record, trial

from te_bench.models import cost
from te_bench.reports.analysis import floor
from te_bench.reports.page import step_figures
from te_bench.reports.page.tables import tables_of

PUBLISHED = Path(__file__).parents[3] / "results" / "h200" / "speed"
BF16 = trial(attention="cudnn", mode="cudagraph")
FP8 = trial(attention="cudnn", mode="cudagraph", precision="fp8", recipe="delayed_scaling", head="fp8")


def steps():
    made = [step_record(BF16, 24.5), step_record(FP8, 21.7)]
    for one in made:
        one.work["kernel_s"] = dict(STEP_KERNELS)
    return made


def result_of(tmp_path, records):
    return journals.result_of(tmp_path, records, suite="speed", baseline=BF16.cell)


def test_a_kernels_name_tells_its_kind():
    kinds = (cost.GEMM, cost.ATTENTION, cost.LOSS, cost.OPTIMIZER)
    twice = [kind for kind in kinds for _ in range(2)]
    assert [floor.kind_of(name) for name in STEP_KERNELS] == [*twice, *[cost.ELEMENTWISE] * 3]
    ours = ("step_kernel", "numbers_kernel", "squares_kernel", "norm_kernel")
    assert {floor.kind_of(name) for name in ours} == {cost.OPTIMIZER}


def test_the_floor_is_what_the_ceilings_give(tmp_path):
    result = result_of(tmp_path, [*steps(), ceilings_record()])
    flop = {"bf16_flop_per_s": 2 * 8192**3 / 2e-3, "fp8_flop_per_s": 2 * 8192**3 / 1e-3}
    assert result.floor.ceilings == floor.Ceilings(bytes_per_s=4e12, **flop)
    fp8, bf16 = result.floor.breakdowns
    assert (fp8.step.configuration.trial.precision, bf16.step.configuration.trial.precision) == ("fp8", "bf16")
    for found in (fp8, bf16):
        assert found.measured_s == pytest.approx(sum(STEP_KERNELS.values()))
        assert found.floor_s == pytest.approx(sum(part.floor_s for part in found.kinds))
    parts = {part.cost.kind: part for part in bf16.kinds}
    gemm = parts[cost.GEMM]
    assert gemm.floor_s == pytest.approx(gemm.cost.bf16_flop / (2 * 8192**3 / 2e-3))
    assert gemm.measured_s == pytest.approx(4.7e-3)
    assert parts[cost.LOSS].floor_s == pytest.approx(4 * 12288 * 50304 / 4e12)
    assert {p.cost.kind: p for p in fp8.kinds}[cost.GEMM].floor_s == pytest.approx(gemm.floor_s / 2)


def test_the_tables_show_it(tmp_path):
    result = result_of(tmp_path, [*steps(), ceilings_record()])
    [floors], [kinds], [kernels] = (tables_of(result, name) for name in ("floor", "floor_kinds", "floor_kernels"))
    assert [row[0].text for row in floors.rows][1].endswith("(baseline)")
    step, least = (float(floors.rows[0][i].sort) for i in (3, 1))
    assert floors.rows[0][4].sort == pytest.approx(step / least)
    assert "4.00 TB/s" in floors.note
    assert "FP8 1,100 TFLOP/s" in floors.note
    assert len(kinds.rows) == 2 * 5
    assert kernels.rows[0][2].text.startswith("nvjet")


def test_the_figure_s_bars_are_floor_and_step(tmp_path):
    figure = step_figures.against_floor(result_of(tmp_path, [*steps(), ceilings_record()]))
    rows = {}
    for patch in figure.axes[0].patches:
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2 - 0.45), []).append(patch.get_width())
    fp8, bf16 = result_of(tmp_path / "2", [*steps(), ceilings_record()]).floor.breakdowns
    widths = [sum(row) / 1e3 for row in rows.values()]
    assert widths == pytest.approx([fp8.floor_s, fp8.step.latency_s, bf16.floor_s, bf16.step.latency_s])


def test_nothing_published_is_faster_than_its_floor():
    result = journals.only_group(PUBLISHED)
    found = result.floor.breakdowns
    assert len(found) == len(result.group.of("train_step")) > 10
    for breakdown in found:
        trial = breakdown.step.configuration.trial
        for part in breakdown.kinds:
            if trial.attention == "manual" and part.cost.kind == cost.ATTENTION:
                continue  # written out, it is GEMMs and elementwise kernels
            assert part.measured_s >= 0.99 * part.floor_s, (trial.name, part)


def test_a_ceiling_is_the_fastest_call_of_any_process(tmp_path):
    slow, fast = {"copy_s": [2e-3, 1e-3], "gemm_bf16_s": [4e-3, 3e-3]}, {"copy_s": [4e-3], "gemm_bf16_s": [5e-3, 2e-3]}
    records = [ceilings_record(samples=slow), ceilings_record(samples=fast)]
    records[1] = dataclasses.replace(records[1], trial=dataclasses.replace(records[1].trial, seed=1))
    found = result_of(tmp_path, [*steps(), *records]).floor.ceilings
    assert found.bytes_per_s == 4e9 / 1e-3
    assert found.bf16_flop_per_s == 2 * 8192**3 / 2e-3


@pytest.mark.parametrize(
    "records",
    [
        lambda: steps(),  # no ceilings
        lambda: [*steps(), ceilings_record(samples={}, outcome="oom")],
        lambda: [step_record(BF16, 24.5), ceilings_record()],  # no kernels
        lambda: [ceilings_record()],
    ],
)
def test_nothing_is_made_up(tmp_path, records):
    result = result_of(tmp_path, records())
    assert all(tables_of(result, name) == [] for name in ("floor", "floor_kinds", "floor_kernels"))
    assert step_figures.against_floor(result) is None


@pytest.mark.parametrize("recipe", ["rowwise_scaling_bf16_wgrad", "float8_current_scaling_dpa", "nvfp4_block_scaling"])
def test_a_recipe_that_has_more_or_less_in_fp8_than_the_linears_has_no_floor(tmp_path, recipe):
    others = [dataclasses.replace(one, trial=dataclasses.replace(FP8, recipe=recipe)) for one in steps()[1:]]
    [only] = result_of(tmp_path, [steps()[0], *others, ceilings_record()]).floor.breakdowns
    assert only.step.configuration.trial.precision == "bf16"


def test_no_fp8_floor_without_an_fp8_ceiling(tmp_path):
    samples = {"copy_s": [1e-3], "gemm_bf16_s": [2e-3]}
    [only] = result_of(tmp_path, [*steps(), ceilings_record(samples=samples)]).floor.breakdowns
    assert only.step.configuration.trial.precision == "bf16"
