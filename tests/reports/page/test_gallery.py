import re
import xml.etree.ElementTree as ElementTree

import pytest
from contrast import faint_texts
from journals import (
    HOSTILE,
    STEP_KERNELS,
    ceilings_record,
    curve_record,
    everything,
    only_group,
    record,
    result_of,
    step_record,
    trial,
    write,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg

from te_bench.reports.page import attention_figures, gallery, loss_figures, step_figures
from te_bench.reports.page.drawing import INK, styled


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return only_group(everything(tmp_path_factory.mktemp("full") / "run"))


def drawn(result):
    return {drawing.name: drawing for drawing in gallery.figures_of(result, "")}


@pytest.fixture(scope="module")
def drawings(result):
    return drawn(result)


def test_a_description_says_each_thing_once(drawings):
    for name, drawing in drawings.items():
        words = re.split(r": | on ", drawing.alt)
        assert len(words) == len({word.partition(",")[0] for word in words}), (name, drawing.alt)
        assert drawing.alt.startswith(drawing.caption)


FLOP = ("forward_flop", "backward_flop")
KINDS = ("ladder", "memory", "floor_kinds", "layer_time", "loss_step", "loss_time", "max_batch")
KINDS += ("attention", "attention-2", "attention-3", "numerics")


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
    assert INK not in inline
    assert faint_texts(inline) == []
    for svg, ground in ((inline, "none"), (drawings[kind].svg.decode(), "#ffffff")):
        assert re.search(r'id="[^"]*\bpatch_1">.*?style="([^"]*)"', svg, re.DOTALL)[1] == f"fill: {ground}"
    assert "<style" not in inline
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", inline)


def test_ids_are_unique_over_all_figures_and_every_reference_has_its_target(drawings):
    together = "".join(drawing.inline for drawing in drawings.values())
    ids = re.findall(r'\bid="([^"]+)"', together)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', together))
    assert {first or second for first, second in wanted} <= set(ids)


def test_ladder_says_time_speedup_and_what_failed(drawings):
    svg = drawings["ladder"].inline
    for text in ("ms, 3.78× [3.77, 3.80]", "103.8 ms, baseline", ">oom<", "ms per step", "CUDA graph"):
        assert text in svg


def texts_of(figure):
    """Every text that is drawn; a tick's label beyond the end of its axis is not."""
    texts = [t for legend in figure.legends for t in legend.texts]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_text()]


@styled
def test_texts_do_not_overlap_and_stay_inside(result):
    """On the canvas's own measure, every pair of texts of every figure."""
    figures = [getattr(step_figures, name)(result) for name in ("ladder", "memory", "largest_batch")]
    figures.append(attention_figures.scaling_errors(result))
    figures += attention_figures.times(result).values()
    figures += [loss_figures.losses(comparison, "step") for comparison in result.trainings]
    for figure in figures:
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


@styled
def test_names_that_differ_at_their_end_are_drawn_to_their_end(tmp_path):
    long = {"recipe": "float8_current_scaling", "precision": "fp8", "mode": "cudagraph", "head": "fp8"}
    ends = ("torchao_tensorwise", "torchao_rowwise")
    records = [step_record(trial(**long, linears=end), 10) for end in ends]
    for one in records:
        one.work["kernel_s"] = STEP_KERNELS
    result = result_of(tmp_path, [*records, ceilings_record()])
    losses = loss_panels(tmp_path / "curves", *(curve_record(trial("training", **long, linears=end)) for end in ends))
    figures = [(step_figures.ladder(result), ends), (step_figures.memory(result), ends)]
    figures += [(losses, ends), (step_figures.against_floor(result), ends[:1])]
    for figure, shown in figures:
        said = " ".join(" ".join(text.get_text().split()) for text in texts_of(figure))
        assert "…" not in said
        assert all(f"linears {end}" in said for end in shown)


def test_attention_is_sorted_and_named_shape_by_shape(result):
    for figure in attention_figures.times(result).values():
        forward, backward = figure.axes
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["Forward, TFLOP/s", "Backward, TFLOP/s"]
        shape, *said = [text.get_text() for text in forward.texts]
        assert shape.startswith("B")
        assert said[:4] == ["cuDNN", "410.0", "flash", "240.0"]
        assert said[-2:] == ["written-out", "oom"]
        assert [text.get_text() for text in backward.texts] == ["328.0", "192.0", "96.0", "oom"]
        assert forward.get_xlim() == backward.get_xlim()


def test_attention_has_a_figure_for_each_family_of_at_most_eight_shapes(tmp_path):
    changes = ({}, {"causal": False}, {"kv_heads": 4}, {"window_left": 511, "window_right": 0}, {"documents": 4})
    changes += ({"dropout": 0.1}, {"head_dim": 128}, *({"length": 256 * i} for i in range(5, 13)))
    measured = {"samples": {"forward_s": [1.0], "backward_s": [2.0]}, "work": dict.fromkeys(FLOP, 1e14)}
    records = [
        record(trial("attention", kernel, **one), **measured) for one in changes for kernel in ("flash", "triton_fp8")
    ]
    found = attention_figures.times(result_of(tmp_path, records))
    families = [f"heads of {one}" for one in ("64, causal", "64, causal, 2", "64, full", "64 that share keys, causal")]
    families += [f"heads of {one}" for one in ("64, window", "64, packed", "64, dropout", "128, causal")]
    assert list(found) == families
    headings = [text.get_text() for text in found[families[0]].axes[0].texts if text.get_weight() == "bold"]
    assert len(headings) == 8
    assert {text.get_text() for text in found[families[1]].axes[0].texts} > {"flash", "te-bench Triton FP8"}


def loss_panels(tmp_path, *records):
    [comparison] = result_of(tmp_path, records).trainings
    return loss_figures.losses(comparison, "step")


def test_a_training_loss_of_many_steps_is_a_curve_and_no_fence(tmp_path):
    figure = loss_panels(tmp_path, curve_record(trial("training"), stop=20000))
    validation, training = figure.axes
    assert (validation.get_ylabel(), training.get_ylabel()) == ("validation loss", "training loss")
    [line] = training.lines
    assert 30 < len(line.get_xdata()) <= 60
    turns = (line.get_ydata()[1:] > line.get_ydata()[:-1]).sum()
    assert turns < 30  # of single steps every second one turns
    assert "means over 1/60" in " ".join(text.get_text() for text in figure.legends[0].texts)


def test_a_loss_that_rises_again_stays_in_the_frame(tmp_path):
    """As of a model that overfits: its first fall alone is above, and the legend says from where."""
    val = [4.0, 2.5, 1.6, 1.5, 1.45, 1.44, 1.46, 1.5, 1.55, 1.6, 1.65, 1.7]
    steps = [250.0 * i for i in range(len(val))]
    one = record(trial("training"), samples={"val_step": steps, "val_loss": val, "val_time_s": steps})
    figure = loss_panels(tmp_path, one)
    [axes] = figure.axes
    low, high = axes.get_ylim()
    assert low < 1.44
    assert 1.7 < high < 2.5
    assert "its first fall, from 4, is above the frame" in " ".join(t.get_text() for t in figure.legends[0].texts)


@pytest.mark.usefixtures("drawn_once")
def test_band_is_drawn_for_several_seeds_only(tmp_path):
    for seeds, shown in ((1, False), (3, True)):
        records = [curve_record(trial("training", seed=s), 0.1 * s) for s in range(seeds)]
        drawing = drawn(only_group(write(tmp_path / str(seeds), records)))["loss_step"]
        assert ("smallest to largest" in drawing.inline) is shown


def test_names_are_text_whatever_they_hold(tmp_path):
    name = HOSTILE + r' $\frac{1}{0}$ "quoted" id="x" ' + "\x00" + "n" * 200
    records = [step_record(trial(attention=kernel), 10) for kernel in (name, "flash")]
    for drawing in drawn(result_of(tmp_path, records, title=name)).values():
        assert "<script" not in drawing.inline
        root = ElementTree.fromstring(drawing.inline)
        assert any("$\\frac{1}{0}$" in (element.text or "") for element in root.iter())


def test_nothing_measured_draws_nothing_and_a_single_step_and_point_can_be_drawn(tmp_path):
    nothing = record(trial(), outcome="oom"), record(trial("attention"), outcome="oom")
    assert drawn(only_group(write(tmp_path / "nothing", nothing))) == {}
    one = record(trial("training"), samples={"val_step": [5.0], "val_loss": [2.0], "val_time_s": [0.1]})
    result = result_of(tmp_path, [record(trial(), samples={"latency_s": [0.1]}), one])
    assert set(drawn(result)) == {"ladder", "loss_step", "loss_time"}
