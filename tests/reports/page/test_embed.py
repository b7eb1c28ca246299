import pytest
from journals import environment, ladder_records, step_record, trial, write

from te_bench.reports.page.embed import embed

START, END = "<!-- te-bench:table run ladder -->", "<!-- /te-bench:table -->"


@pytest.fixture
def page(tmp_path):
    write(tmp_path / "run", ladder_records())
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{START}\nold\n{END}\n\nafter\n")
    return path


def test_table_is_replaced_and_the_rest_is_kept(page):
    assert embed(page, check=False)
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{START}\n\n| Configuration | ms/step |")
    assert text.endswith(f"|\n\n{END}\n\nafter\n")
    assert "old" not in text
    assert "| torch.compile bf16, flash attention | 27.4 |" in text


def test_check_writes_nothing(page):
    before = page.read_text()
    assert not embed(page, check=True)
    assert page.read_text() == before
    assert embed(page, check=False)
    assert embed(page, check=True)
    changed = page.read_text().replace("27.4", "26.5")
    page.write_text(changed)
    assert not embed(page, check=True)
    assert page.read_text() == changed


def test_several_tables_in_one_page(page):
    page.write_text(f"{START}\n{END}\nbetween\n<!-- te-bench:table run memory -->\n{END}\n")
    assert embed(page, check=False)
    text = page.read_text()
    assert text.index("ms/step") < text.index("between") < text.index("Peak allocated, GiB")


def test_table_in_two_environments_is_titled(page):
    other = environment("b", gpu="NVIDIA L4")
    write(page.parent / "run", [step_record(trial(), 9, where="b")], suite="other", body=other)
    assert embed(page, check=False)
    assert "**Time per training step, NVIDIA L4**" in page.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"<!-- te-bench:table run speed -->\n{END}\n", "unknown table 'speed'. Known: ladder"),
        (f"{START}\n", "has no end"),
        (f"{START}\n{START}\n{END}\n", "inside another"),
        (f"<!-- te-bench:table nowhere ladder -->\n{END}\n", "holds no journal"),
        (f"<!-- te-bench:table run attention -->\n{END}\n", "holds nothing for a table 'attention'"),
        ("no marker\n", "holds no generated table"),
    ],
)
def test_errors_name_what_is_wrong_and_write_nothing(page, text, message):
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        embed(page, check=False)
    assert page.read_text() == text


def test_page_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        embed(tmp_path / "missing.md", check=True)
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="cannot read"):
        embed(tmp_path / "latin.md", check=True)
