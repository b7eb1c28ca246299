"""The references of a check, for tests that change the trial's own step alone."""

from typing import Any

import pytest
from torch import Tensor

from te_bench.experiments.checks import training_step
from te_bench.experiments.spec import Trial


@pytest.fixture(scope="module")
def references() -> dict[tuple[object, ...], Any]:
    return {}


@pytest.fixture
def references_once(references: dict[tuple[object, ...], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of a seed's weights and batch, worked out once."""
    right = training_step.reference

    def in_rows(trial: Trial, optim: Any, tokens: Tensor, targets: Tensor, *fp8: Any) -> Any:
        key = (trial.id, optim, tuple(tokens.flatten().tolist()), *(repr(x) for x in fp8))
        if key not in references:
            references[key] = right(trial, optim, tokens, targets, *fp8)
        return references[key]

    monkeypatch.setattr(training_step, "reference", in_rows)
