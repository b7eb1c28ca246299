"""The runner on a GPU: a step that does not fit is one typed row, the next runs, and the largest batch is the largest."""

from typing import Any

import pytest
from driving import PLANTED, rows, te_bench

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu-memory")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of the planted suite `gpu`, in its order."""
    directory, cache = tmp_path_factory.mktemp("gpu"), tmp_path_factory.mktemp("cache")
    where = ("--out", directory, "--cache", cache, "--device", "cuda", "--gpus", "0")
    done = te_bench("run", "gpu", *where, "--timeout", "120", main=PLANTED, timeout=150)
    found = rows(directory)
    assert len(found) == 3, done.stderr
    return found


def test_a_step_that_does_not_fit_is_a_row_and_the_next_one_runs(sweep: list[dict[str, Any]]) -> None:
    too_large, sound, _ = sweep
    assert too_large["outcome"] == "oom", too_large["reason"]
    assert too_large["reason"].startswith("GPU: CUDA out of memory")
    assert not too_large["samples"]
    assert sound["outcome"] == "ok", sound["reason"]
    assert len(sound["samples"]["latency_s"]) == 20


def test_the_largest_batch_fits_and_one_more_does_not(sweep: list[dict[str, Any]]) -> None:
    row = sweep[2]
    assert row["outcome"] == "ok", row["reason"]
    tries = {each["batch"]: each for each in row["work"]["tries"]}
    batch = int(row["samples"]["max_batch"][0])
    assert batch > 16
    assert tries[batch]["fits"]
    assert not tries[batch + 1]["fits"]
    assert all(each["fits"] == (number <= batch) for number, each in tries.items())
    limit = 8 * 2**30
    for each in tries.values():
        assert each["total_bytes"] == pytest.approx(limit, rel=0.01)
        if each["fits"]:
            assert 0 < each["peak_allocated_bytes"] <= each["peak_reserved_bytes"] <= limit
    assert len(tries) <= 24
