"""Whose step a trial times."""

import pytest
from journals import trial

from te_bench.reports.analysis.fastest import EAGER, TE_BENCH, kind_of_step


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, EAGER),
        ({"mode": "compile"}, "torch.compile"),
        ({"parts": "all"}, TE_BENCH),  # a user's model with te-bench's kernels in it
        ({"parts": "all", "mode": "compile"}, TE_BENCH),
        ({"rival": "liger"}, "Liger"),
        ({"rival": "torchao_rowwise", "mode": "compile", "precision": "fp8"}, "torchao under torch.compile"),
    ],
)
def test_the_kind_of_a_step(settings: dict[str, str], kind: str) -> None:
    assert kind_of_step(trial(**settings)) == kind
