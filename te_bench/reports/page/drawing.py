"""Draw figures as SVG and PNG, with equal bytes for equal records, in colours that colour-blind readers can distinguish.

A figure is 5.2 inches wide, so that its text is readable when a telephone shows it 370 pixels wide: names stand above
their bars, not beside them. Hatches and markers repeat what colours say.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 5.2  # inches
LINE = 68  # characters that fit in the width
NAME = 64  # characters of a line of a name above its bar
INK = "#1b1f24"  # text and axes; becomes currentColor in an inlined SVG
WHITE = "fill: #ffffff"  # the background of a file, drawn first
FAINT = "#8a9099"  # secondary lines and bars, visible on white and on the page's dark background; too faint for text

# Okabe and Ito, Color Universal Design (2008), without yellow, which is invisible on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a9099")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

STYLE: Any = {  # Any, because matplotlib 3.11 types the keys and 3.9 does not
    "font.family": "DejaVu Sans",  # comes with matplotlib: equal widths on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "te-bench",
    "text.parse_math": False,  # names may have a $
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A named figure; inline: the SVG for a page; svg, png: files; alt: a description of what it shows."""

    name: str
    kind: str
    caption: str
    alt: str
    inline: str
    svg: bytes
    png: bytes


styled = mpl.rc_context(STYLE)  # decorates functions that make figures: artists take their colours when made


@styled
def draw(name: str, kind: str, caption: str, alt: str, figure: Figure) -> Drawing:
    """Return a figure rendered for the page (transparent, text in the page's colour) and as files (on white)."""
    svg, png = (_saved(figure, kind_of_file) for kind_of_file in ("svg", "png"))
    inline = _inlined(svg.decode().replace(f'style="{WHITE}"', 'style="fill: none"', 1), name, alt)
    return Drawing(name=name, kind=kind, caption=caption, alt=alt, inline=inline, svg=svg, png=png)


def _saved(figure: Figure, file_format: str) -> bytes:
    for axes in figure.axes:
        axes.set_facecolor("none")
    stream = io.BytesIO()
    undated = {"Date": None, "Creator": None} if file_format == "svg" else {"Software": None}
    figure.savefig(stream, format=file_format, facecolor="white", metadata=undated)
    return stream.getvalue()


def _inlined(svg: str, name: str, alt: str) -> str:
    """Return only the svg element, with ids unique in the page, and its ink in the page's text colour."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<style type=\"text/css\">.*?</style>", "", body, flags=re.DOTALL)  # the page has this style
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = body.replace(INK, "currentColor")
    label = alt.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def blank(height: float) -> Figure:
    """Return an empty figure of the page's width, `height` inches high."""
    return Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")


def line_style(place: int) -> dict[str, Any]:
    """Return colour and marker of a figure's line; of 49 lines no two have the same pair."""
    marker = MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]
    return {"color": COLOURS[place % len(COLOURS)], "marker": marker}


def without_y(axes: Axes) -> None:
    """Remove ticks and line at the left, where names stand above their bars."""
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int, *, left: bool = False) -> None:
    figure.legend(
        handles=list(handles),
        loc="outside lower left" if left else "outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
    )
