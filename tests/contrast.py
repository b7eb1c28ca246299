"""What of a drawing is too faint to read on a page of te-bench's, by WCAG 2.1's contrast, in light and dark."""

import re
from pathlib import Path

import te_bench

LEAST = 4.5  # WCAG 2.1, 1.4.3, level AA
CSS = (Path(te_bench.__file__).parent / "reports" / "page" / "templates" / "report.css").read_text(encoding="utf-8")
TEXT = re.compile(r"<text\b[^>]*>")
FILL = re.compile(r"(?:fill: ?|fill=\")([^;\"]+)")


def palettes() -> dict[str, dict[str, str]]:
    """The page's colours by name, in light and dark."""
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block)) for block in CSS.split(":root {")[1:3])
    return {"light": light, "dark": light | dark}


def contrast(one: str, other: str) -> float:
    """Of two colours, #rrggbb: 1 to 21."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def faint_texts(svg: str) -> list[str]:
    """Of an inlined figure: the mode and the fill of each text below LEAST."""
    fills = {found[1] if (found := FILL.search(text)) else "#000000" for text in TEXT.findall(svg)}
    return [
        f"{mode}: {fill}"
        for mode, colours in palettes().items()
        for fill in sorted(fills)
        if contrast(colours["ink"] if fill == "currentColor" else fill, colours["ground"]) < LEAST
    ]


def _luminance(colour: str) -> float:
    shares = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares)
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
