import re
import xml.etree.ElementTree as ElementTree

import journals
import pytest
from journals import HOSTILE, curve_record, record, step_record, trial, write
from matplotlib.backends.backend_agg import FigureCanvasAgg

from te_bench.reports import curves, figures, gallery
from te_bench.reports.rows import load_results


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    [group] = load_results([journals.everything(tmp_path_factory.mktemp("full") / "run")]).groups
    return group


@pytest.fixture(scope="module")
def drawings(group):
    return {drawing.name: drawing for drawing in gallery.of_group(group, "")}


KINDS = ("ladder", "memory", "floor_kinds", "layer_time", "loss_step", "loss_time", "max_batch")
KINDS += ("attention_forward", "attention_backward", "numerics")


def test_every_figure_is_drawn(drawings):
    assert set(drawings) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_svg_is_xml_and_png_a_png(drawings, kind):
    drawing = drawings[kind]
    for svg in (drawing.inline, drawing.svg.decode()):
        root = ElementTree.fromstring(svg)
        assert len([e for e in root.iter() if e.tag.endswith("}path")]) > 3
    assert drawing.png.startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("kind", KINDS)
def test_inline_svg_follows_the_page_s_colour(drawings, kind):
    inline = drawings[kind].inline
    assert "currentColor" in inline
    assert figures.INK not in inline
    grounds = [
        re.search(r'id="[^"]*\bpatch_1">.*?style="([^"]*)"', svg, re.DOTALL)[1]
        for svg in (inline, drawings[kind].svg.decode())
    ]
    assert grounds == ["fill: none", "fill: #ffffff"]
    assert "<style" not in inline
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", inline)


def test_ids_are_unique_over_all_figures_and_every_reference_has_its_target(drawings):
    together = "".join(drawing.inline for drawing in drawings.values())
    ids = re.findall(r'\bid="([^"]+)"', together)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', together))
    assert {first or second for first, second in wanted} <= set(ids)


def test_same_records_give_the_same_bytes(group, drawings):
    again = {drawing.name: drawing for drawing in gallery.of_group(group, "")}
    assert again == drawings


def test_ladder_says_time_speedup_and_what_failed(drawings):
    svg = drawings["ladder"].inline
    for text in ("ms, 3.78× [3.77, 3.80]", "103.8 ms, baseline", ">oom<", "ms per step", "cudagraph"):
        assert text in svg


def texts_of(figure):
    """Every text that is drawn; a tick's label beyond the end of its axis is not."""
    [axes] = figure.axes
    texts = [*axes.texts, axes.xaxis.label, axes.yaxis.label, *(t for legend in figure.legends for t in legend.texts)]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_text()]


def test_texts_do_not_overlap_and_stay_inside(group):
    """On the canvas's own measure, every pair of texts of every figure."""
    builders = [figures.ladder(group), figures.memory(group), figures.max_batch(group), figures.numerics(group)]
    builders += [figures.attention(group, way) for way in ("forward", "backward")]
    builders += [figures.losses(comparison, "step") for comparison in curves.comparisons(group)]
    for build in builders:
        with figures.mpl.rc_context(figures._STYLE):
            figure = build()
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            renderer = canvas.get_renderer()
            boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts_of(figure)]
        for text, box in boxes:
            assert box.x0 >= -1, text
            assert box.x1 <= figure.bbox.width + 1, text
        for i, (first, a) in enumerate(boxes):
            for second, b in boxes[i + 1 :]:
                apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 2 or b.y1 <= a.y0 + 2
                assert apart, (first, second)


def test_band_is_drawn_for_several_seeds_only(tmp_path):
    for seeds, shown in ((1, False), (3, True)):
        write(tmp_path / str(seeds), [curve_record(trial("training", seed=s), 0.1 * s) for s in range(seeds)])
        [group] = load_results([tmp_path / str(seeds)]).groups
        drawing = {d.name: d for d in gallery.of_group(group, "")}["loss_step"]
        assert ("smallest to largest" in drawing.inline) is shown


def test_names_are_text_whatever_they_hold(tmp_path):
    name = HOSTILE + r' $\frac{1}{0}$ "quoted" id="x" ' + "\x00" + "n" * 200
    write(tmp_path / "run", [step_record(trial(attention=name), 10)], title=name)
    [group] = load_results([tmp_path / "run"]).groups
    for drawing in gallery.of_group(group, ""):
        assert "<script" not in drawing.inline
        root = ElementTree.fromstring(drawing.inline)
        assert any("$\\frac{1}{0}$" in (element.text or "") for element in root.iter())


def test_nothing_measured_draws_nothing(tmp_path):
    write(tmp_path / "run", [record(trial(), outcome="oom"), record(trial("attention"), outcome="oom")])
    [group] = load_results([tmp_path / "run"]).groups
    assert gallery.of_group(group, "") == []


def test_single_step_and_single_point_can_be_drawn(tmp_path):
    one = record(trial("training"), samples={"val_step": [5.0], "val_loss": [2.0], "val_time_s": [0.1]})
    write(tmp_path / "run", [record(trial(), samples={"latency_s": [0.1]}), one])
    [group] = load_results([tmp_path / "run"]).groups
    assert {d.name for d in gallery.of_group(group, "")} == {"ladder", "loss_step", "loss_time"}
