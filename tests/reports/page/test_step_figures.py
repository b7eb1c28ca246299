"""The layer figure: bars that add up to what was measured, in every layer's row."""

import dataclasses

import pytest
from journals import layer_records, result_of

from te_bench.reports.page import gallery, step_figures


def bars(figure):
    """{row: [(left, width)]} of the drawn bars, in the order of drawing."""
    found = {}
    for patch in figure.axes[0].patches:
        found.setdefault(round(patch.get_y() + patch.get_height() / 2 - 0.45), []).append(
            (patch.get_x(), patch.get_width())
        )
    return found


LAYER = {"suite": "layer", "title": "The layer"}


def figure_of(tmp_path, records):
    result = result_of(tmp_path, records, **LAYER)
    [variant] = result.layers
    return result, step_figures.layer_times(variant.layers)


def test_parts_and_rest_add_up_to_the_time_measured(tmp_path):
    result, figure = figure_of(tmp_path, layer_records())
    steps = [layer.step for variant in result.layers for layer in variant.layers]
    rows = bars(figure)
    assert len(rows) == len(steps)
    for row, step in enumerate(steps):
        lefts, widths = zip(*rows[row], strict=True)
        assert sum(widths) == pytest.approx(step.latency_s * 1e3)
        assert lefts == pytest.approx([sum(widths[:i]) for i in range(len(widths))])  # no overlap, no hole
        assert widths[1] == max(widths)  # GEMM


def test_a_layer_without_a_profile_is_one_bar(tmp_path):
    records = [dataclasses.replace(one, work={}) for one in layer_records()]
    _, figure = figure_of(tmp_path, records)
    for row in bars(figure).values():
        assert [width > 0 for _, width in row] == [False, False, False, True, False]


def test_a_layer_that_was_not_measured_has_no_bar_and_a_page_without_layers_no_figure(tmp_path):
    records = layer_records()
    failed = dataclasses.replace(records[0], outcome="oom", samples={})
    _, figure = figure_of(tmp_path, [failed, *records[1:]])
    assert len(bars(figure)) == len(records) - 1
    result = result_of(tmp_path / "none", [failed], **LAYER)
    assert gallery.figures_of(result, "") == []


def test_it_is_in_the_gallery_under_its_section(tmp_path):
    result = result_of(tmp_path, layer_records(), **LAYER)
    [drawing] = [d for d in gallery.figures_of(result, "") if d.kind == "layer_time"]
    assert drawing.png.startswith(b"\x89PNG")
    assert "GEMM" in drawing.inline
