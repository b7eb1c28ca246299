"""The batch against memory on a simulated machine: micro-batches, checkpointed blocks, larger batches."""

import dataclasses
import json
from pathlib import Path

import pytest
from advice_machine import Machine, decided, gathered, question
from journals import record

from te_bench.advice import answer, code, page
from te_bench.advice.advise import NothingMeasured
from te_bench.advice.candidates import Choice, Question
from te_bench.advice.decision import checkpointing, larger_batches
from te_bench.experiments import plan
from te_bench.experiments.spec import Record, Trial

GIB = 2.0**30


def again(trial: Trial) -> bool:
    return trial.problem.get("checkpointing") == "blocks"


def gib(trial: Trial) -> float:
    """4, and for each sequence at a time 2, by checkpointed blocks a half."""
    return 4.0 + trial.problem["batch"] * (0.5 if again(trial) else 2.0)


def machine(
    asked: Question, *, forward: float = 1.3, cut: float = 1.1, faster: float = 1.0, limit: float | None = None
) -> Machine:
    """forward: times the seconds by checkpointed blocks; cut: for each time the batch is halved; faster: per token, where
    it is doubled; limit: GiB, beyond which all run out of memory.
    """

    def seconds(trial: Trial) -> float:
        p = trial.problem
        share, times = p.get("accumulate", 1), max(1.0, p["batch"] / asked.batch)
        of_batch = times / faster if times == 2 else times
        return (forward if again(trial) else 1.0) * cut ** (share.bit_length() - 1) * of_batch

    made = Machine(asked, gib=gib, times_of_step=seconds)
    if limit is not None:
        record_of = made._record

        def short_of_memory(trial: Trial) -> Record:
            takes = gib(trial) if trial.workload in ("survey", "train_step") else 0.0
            return record(trial, outcome="oom", reason="planted") if takes > limit else record_of(trial)

        made._record = short_of_memory  # type: ignore[method-assign]
    return made


def steps_of(made: Machine) -> list[Trial]:
    return [trial for trial in made.asked if trial.workload == "train_step"]


def test_where_one_sequence_fits_by_checkpointed_blocks_alone_they_are_advised(tmp_path: Path) -> None:
    made = machine(question(batch=1))
    limit = 5.0 * GIB
    evidence = gathered(made, memory=limit)
    found = decided(made, evidence, tmp_path, limit)
    assert (found.use.checkpointing, found.use.fused, found.exit_code) == (True, False, 0)
    assert found.memory == 4.5 * GIB
    said = " ".join(answer.sentences(evidence, found, []))
    assert "checkpointed blocks" in said.partition(".")[0]
    assert "Checkpointed blocks save 1.50 of 6.00 GiB and cost 30.0 % more time." in said
    lines = code.code(made.question, found.use)
    assert "checkpoint_blocks(model)  # before the step is made" in lines
    for trial in filter(again, steps_of(made)):
        plan.check(trial)
    assert not any(choice.checkpointing for choice in evidence.predictions)  # measured, not guessed


@pytest.mark.parametrize(("cut", "by"), [(1.02, "micro-batches"), (2.0, "checkpointed blocks")])
def test_of_micro_batches_and_checkpointed_blocks_the_faster_that_fits_is_advised(cut, by, tmp_path):
    made = machine(question(batch=4), cut=cut)
    limit = 7.0 * GIB
    evidence = gathered(made, memory=limit)
    found = decided(made, evidence, tmp_path, limit)
    assert found.use.checkpointing == (by == "checkpointed blocks")
    assert found.use.accumulate == (4 if by == "micro-batches" else 1)
    said = answer.sentences(evidence, found, [])
    assert by in said[0]
    (other,) = (sentence for sentence in said if sentence.startswith("Checkpointed blocks"))
    assert ("in place of micro-batches: " in other) == (by == "micro-batches")


def test_checkpointed_blocks_are_cut_only_as_far_as_they_must_be(tmp_path: Path) -> None:
    """Where a micro-batch fits without them, those of as few sequences by them are not tried."""
    made = machine(question(batch=16), cut=2.0)
    limit = 8.5 * GIB
    found = decided(made, gathered(made, memory=limit), tmp_path, limit)
    assert (found.use.checkpointing, found.use.accumulate) == (True, 2)
    tried = {(t.problem.get("accumulate", 1), again(t)) for t in steps_of(made) if not t.seed and gib(t) <= 8.5}
    assert tried == {(8, False), (2, True)}


def test_where_all_runs_out_of_memory_but_by_checkpointed_blocks_they_are_advised(tmp_path: Path) -> None:
    """The survey, too, is made by them."""
    made = machine(question(batch=1), limit=5.0)
    evidence = gathered(made)
    found = decided(made, evidence, tmp_path)
    assert found.use.checkpointing
    assert again(evidence.survey.trial)
    said = answer.sentences(evidence, found, [])
    assert "Without checkpointed blocks this step runs out of memory." in said
    with pytest.raises(NothingMeasured, match="oom: planted"):
        gathered(machine(question(batch=1), limit=1.0))


def test_a_model_without_blocks_keeps_its_micro_batches(tmp_path: Path) -> None:
    made = machine(question(batch=4))
    made.fails = {"checkpointed": "unsupported"}
    limit = 7.0 * GIB
    evidence = gathered(made, memory=limit)
    found = decided(made, evidence, tmp_path, limit)
    assert found.use.accumulate == 4
    assert len(list(filter(again, steps_of(made)))) == 1
    assert [choice.checkpointing for choice in evidence.wrong] == [True]


def unfused(**options: int) -> Question:
    """A question whose fastest choices have blocks that can be checkpointed."""
    asked = question("tiny", "cpu", **options)
    return dataclasses.replace(asked, choices=tuple(c for c in asked.choices if c.precision == "bf16" and not c.head))


def test_a_batch_that_fits_by_checkpointed_blocks_alone_is_told_with_what_they_cost(tmp_path: Path) -> None:
    made = machine(unfused(batch=4))
    evidence = gathered(made, room=28.0 * GIB)
    assert sorted(evidence.larger) == [8]  # 16 would take 36 GiB
    assert sorted(evidence.again) == [4, 16, 32]  # 8 fits without
    found = decided(made, evidence, tmp_path)
    assert not found.use.checkpointing
    said = answer.sentences(evidence, found, [])
    assert "Checkpointed blocks save 6.00 of 12.0 GiB and cost 30.0 % more time, by one run." in said
    (paid,) = checkpointing(evidence)
    assert paid.slower == pytest.approx(1.3, rel=0.01)
    speeds = {(larger.batch, larger.choice.checkpointing): larger.faster for larger in larger_batches(evidence)}
    assert speeds == pytest.approx({(8, False): 1.0, (16, True): 1 / 1.3, (32, True): 1 / 1.3}, rel=0.01)
    stored = json.loads(json.dumps(answer.to_json(evidence, found, [])))
    assert stored["checkpointing"][0]["memory_bytes"] == 6 * GIB
    assert set(stored["checkpointing"][0]["records"]) <= {made_of.trial.id for made_of in made.records}
    html = page.write_page(evidence, found, [], tmp_path / "advice", "te-bench advise").read_text()
    assert "Memory against batch" in html
    assert "memory saved for time paid" in html


def test_a_larger_batch_that_is_faster_by_checkpointed_blocks_is_named_so(tmp_path: Path) -> None:
    made = machine(unfused(batch=4), faster=2.0)
    evidence = gathered(made, room=14.0 * GIB)
    assert (sorted(evidence.larger), sorted(evidence.again)) == ([], [4, 8, 16])
    said = answer.sentences(evidence, decided(made, evidence, tmp_path), [])
    assert "A batch of 8 fits by checkpointed blocks, 8.00 GiB: 1.54× as fast per token, by one run." in said


@pytest.mark.parametrize("room", [None, 1000.0 * GIB])
def test_where_memory_is_no_matter_nothing_is_checkpointed(room: float | None) -> None:
    made = machine(unfused(batch=4))
    evidence = gathered(made, room=room)
    assert not any(map(again, made.asked))
    assert checkpointing(evidence) == []


def test_without_time_for_them_they_are_left_out(tmp_path: Path) -> None:
    made = machine(question(batch=2))
    limit = 4.2 * GIB
    evidence = gathered(made, memory=limit, budget_s=1.0)
    found = decided(made, evidence, tmp_path, limit)
    assert not any(map(again, made.asked))
    assert "checkpointed blocks" in evidence.left_out
    assert found.why.endswith("tries smaller micro-batches and checkpointed blocks.")


@pytest.mark.parametrize(
    ("choice", "can"),
    [
        (Choice(attention="flash"), True),
        (Choice(attention="flash", mode="compile", precision="fp8", recipe="delayed_scaling"), True),
        (Choice(attention="flash", mode="compile-reduce-overhead"), False),
        (Choice(attention="flash", mode="cudagraph", fused=True), False),
        (Choice(attention="own", mode="cudagraph", parts="all"), True),
        (Choice(attention="own", rival="liger"), False),
        (Choice(attention="own", precision="fp8", recipe="delayed_scaling", rival="transformer_engine_delayed"), False),
        (Choice(attention="own", precision="fp8", recipe="rowwise_scaling", rival="torchao_rowwise"), True),
    ],
)
def test_blocks_that_are_modules_can_be_checkpointed(choice: Choice, can: bool) -> None:
    found = question().checkpointed(choice)
    assert (found is not None) == can
    if found is not None:
        assert "checkpointed blocks" in found.words()
        assert found.beside(choice) == "the same with checkpointed blocks"
        assert question().checkpointed(found) is None
