import pytest


@pytest.fixture(autouse=True)
def held_on_a_gpu_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test on a GPU holds its trials to the limits that are asked on a CPU alone, and so tells whether they hold there."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("te_bench.experiments.checks.tolerances.DEVICES", frozenset({"cpu", "cuda"}))
