"""Render the templates of pages, with what every page has: style, script, tables as Markdown."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from te_bench.reports import CONTROL
from te_bench.reports.page import tables

_TEMPLATES = Path(__file__).parent / "templates"


def rendered(name: str, content: Mapping[str, Any]) -> bytes:
    """Return a rendered template with its content and what every page has; an undefined name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    shared = {
        "markdown": tables.markdown,
        "escape_markdown": tables.escape,
        "style": Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "inline": Markup,  # only for te-bench's own SVG, whose text matplotlib has escaped
    }
    return CONTROL.sub("\ufffd", environment.get_template(name).render({**shared, **content})).encode()
