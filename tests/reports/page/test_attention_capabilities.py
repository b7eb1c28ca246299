"""docs/attention.md says of each backend what the backend says of itself."""

from pathlib import Path

import pytest

from te_bench.reports.page import attention_capabilities, tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "attention.md"


pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def test_the_pages_rows_are_the_backends_own_words() -> None:
    page = PAGE.read_text().splitlines()
    heading, _, *rows = tables.markdown(attention_capabilities.table()).splitlines()
    assert heading in page
    shown = page[page.index(heading) + 2 :]
    shown = shown[: shown.index("")]
    assert len(shown) >= 8
    assert set(shown) <= set(rows)  # te-bench embed --check holds the page to all of them


def test_what_a_row_says() -> None:
    rows = {row[0].text: [value.text for value in row[1:]] for row in attention_capabilities.table().rows}
    assert "auto" not in rows
    assert rows["manual"] == [
        *("yes", "any", "bf16, fp16, fp32, fp64", "512", "yes", "yes", "yes", "yes"),
        *("as a mask", "padded", "yes", "yes"),
    ]
    assert rows["flash4"][1] == "9.0"  # installed or not
    assert (rows["triton"][0], *rows["triton"][8:10]) == ("no", "yes", "yes")
    assert rows["gluon"][1] == "9.0 only"
    assert (rows["cudnn"][7], rows["cudnn"][8]) == ("no", "no")
