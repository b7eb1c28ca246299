"""The faults of a gate's self-test are as large as they say."""

import functools
import statistics
from collections.abc import Callable

import pytest
import torch
from revisions import Repository

from te_bench.gate import interleaved_clock, paired_trial, planted_faults


def test_a_revision_has_the_fault_that_is_planted_in_it_and_the_other_none(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_trial, "SHARED", ("torch",))
    repository = Repository(tmp_path / "repository")
    repository.commit({"a": 0.002})
    server = paired_trial.ForkServer(tmp_path / "log", device="cpu")
    try:
        revisions = [paired_trial.RevisionProcess(name, repository.root, server) for name in ("base", "head")]
        for revision in revisions:
            revision.wait_for_imports(repository.root)
            revision.ask("plan", suite="spinning", only=None, options={"device": "cpu"})
        trials = {revision.name: revision.answer()["trials"][0] for revision in revisions}
        ways = ({"slower": 1}, {"crash": True})
        slower, crashed = (paired_trial.run(revisions, trials, timeout_s=60.0, faults={"head": one}) for one in ways)
    finally:
        server.close()
    base, head = (statistics.median(record.samples["latency_s"]) for record in slower)
    assert 1.5 < head / base < 3
    assert [record.outcome for record in crashed] == ["ok", "crashed"]


def test_on_a_gpu_a_slow_down_is_less_by_what_its_own_launch_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    spun: list[float] = []
    monkeypatch.setattr(planted_faults, "spin", spun.append)

    def block_of(timed: Callable[[], object]) -> planted_faults.Block:
        spun.clear()
        timed()
        return lambda calls: [1.02 if spun else 1.0] * calls

    slower = planted_faults.plant(lambda: None, "cuda", block_of, slower=0.05)
    spun.clear()
    slower()
    assert spun == [pytest.approx(0.03)]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("flush", [True, False])
def test_a_planted_slow_down_is_as_large_as_asked_for(flush: bool) -> None:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def call() -> torch.Tensor:
        return a @ b

    block_of = functools.partial(interleaved_clock.cuda_block, flush=flush)
    slower = planted_faults.plant(call, "cuda", block_of, slower=0.05)
    one, other = (block_of(each) for each in (call, slower))
    ratios = [statistics.median(other(20)) / statistics.median(one(20)) for _ in range(10)]
    assert statistics.median(ratios) == pytest.approx(1.05, abs=0.015)
