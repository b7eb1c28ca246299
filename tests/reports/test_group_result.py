"""What is worked out of all journals, or not at all."""

from pathlib import Path

import journals
import pytest

from te_bench.reports import group_result


def test_an_analysis_that_fails_leaves_no_group_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StopIteration too, which would end a map."""
    runs = [
        journals.write(tmp_path / name, journals.ladder_records(1), baseline=journals.baseline_cell()) for name in "ab"
    ]

    def failing(*_: object) -> None:
        raise StopIteration

    assert group_result.load_report(runs).groups
    monkeypatch.setattr(group_result, "rank_steps", failing)
    with pytest.raises(StopIteration):
        group_result.load_report(runs)
