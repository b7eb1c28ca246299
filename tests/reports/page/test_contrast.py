"""The colours of te-bench's pages and figures, by WCAG 2.1's contrast; test_page.py measures pages in a browser."""

import pytest
from contrast import LEAST, contrast, faint_texts, palettes


def test_the_measure_is_wcag_s():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert faint_texts('<text style="fill: currentColor">a</text><text x="1">b</text>') == ["dark: #000000"]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_colour_of_text_can_be_read(mode):
    colours = palettes()[mode]
    grounds = [colours[name] for name in ("ground", "raised")]
    ratios = {
        (name, ground): contrast(colours[name], ground) for name in ("ink", "quiet", "accent") for ground in grounds
    }
    assert min(ratios.values()) >= LEAST, ratios
