"""What configurations are called: plain, short, and never two of a report the same."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import trial

from te_bench import plugins
from te_bench.experiments import plan
from te_bench.experiments.spec import MODES, PRECISIONS, Options, Trial
from te_bench.experiments.store import Plan as StoredPlan
from te_bench.experiments.store import Store
from te_bench.reports.analysis.naming import COMPILED, EAGER, TE_BENCH, arm_name, plain_names, specification, whose
from te_bench.reports.analysis.rows import Group, load_results

RESULTS = Path(__file__).parents[3] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/*/journal.jsonl*"))


def shared(group: Group) -> list[tuple[object, ...]]:
    """The names that two configurations of a group have though they stand side by side."""
    seen = Counter((c.trial.workload, *c.course, c.shape, c.label) for c in group.configurations)
    return [name for name, times in seen.items() if times > 1]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_no_two_published_configurations_share_a_name(folder: Path) -> None:
    groups = load_results([folder]).groups
    assert groups
    assert [shared(group) for group in groups] == [[] for _ in groups]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", plugins.names("te_bench.experiments.suites"))
def test_no_two_configurations_of_a_suite_share_a_name(suite: str, device: str, tmp_path: Path) -> None:
    data = {"": "random"} if suite in ("curves", "convergence", "stress") else {}
    experiment = plan.resolve(suite, Options(device=device, data=data, seeds=1))
    with Store(tmp_path) as store:
        store.add_environment({"id": "e", "identity": {}})
        store.add_plan(StoredPlan.of(experiment, "e"))
    [group] = load_results([tmp_path]).groups
    assert len(group.configurations) == len({one.cell for one in experiment.trials})
    assert shared(group) == []


STEPS = st.builds(
    trial,
    attention=st.sampled_from(["flash", "cudnn", "manual", "gluon"]),
    precision=st.sampled_from(PRECISIONS),
    recipe=st.sampled_from([None, "delayed_scaling", "float8_current_scaling", "nvfp4_block_scaling"]),
    mode=st.sampled_from(MODES),
    head=st.sampled_from([None, "chunked", "fp8"]),
    blocks=st.sampled_from([None, "fused"]),
    rival=st.sampled_from([None, "liger", "torchao_rowwise", "gone, since"]),
    optimizer=st.sampled_from([None, "triton", "reference"]),
    checkpointing=st.sampled_from([None, "blocks"]),
    batch=st.sampled_from([8, 12]),
    padded_vocab=st.sampled_from([50257, 50304]),
    learning_rate=st.sampled_from([None, 1e-3]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=12, unique_by=lambda one: one.cell))
def test_names_differ_whatever_is_compared(steps: list[Trial]) -> None:
    names = plain_names({one.cell: one for one in steps})
    assert len(set(names.values())) == len(steps)
    for one in steps:  # and whose step it is, and in which precision, is always said
        assert names[one.cell].lower().startswith(whose(one).lower())
        assert "16" in names[one.cell] or "32" in names[one.cell] or "FP" in names[one.cell]


def named(*trials: Trial) -> list[str]:
    return list(plain_names({one.cell: one for one in trials}).values())


FAST = {"attention": "gluon", "mode": "cudagraph", "head": "fp8", "blocks": "fused", "optimizer": "triton"}
EIGHT = {"precision": "fp8", "recipe": "delayed_scaling"}


def test_a_name_says_what_a_user_chooses_and_no_more_than_tells_it_apart() -> None:
    fastest, compiled = trial(**FAST, **EIGHT), trial(attention="cudnn", mode="compile-reduce-overhead")
    begun = trial(attention="manual", padded_vocab=50257)
    plain = ["te-bench FP8", "torch.compile bf16", "PyTorch eager bf16, written-out attention"]
    assert named(fastest, compiled, begun) == plain
    without = trial(**{**FAST, "head": "chunked"}, **EIGHT)
    assert named(fastest, without) == ["te-bench FP8, FP8 head", "te-bench FP8, chunked head"]
    other = trial(**FAST, precision="fp8", recipe="float8_current_scaling")
    assert named(fastest, without, other) == [
        "te-bench FP8, delayed scaling, FP8 head",
        "te-bench FP8, delayed scaling, chunked head",
        "te-bench FP8, current scaling",
    ]
    assert named(trial("attention", "gluon"), trial("attention", "cudnn")) == ["te-bench Gluon", "cuDNN"]


def test_each_way_of_torch_compile_has_its_name() -> None:
    ways = [trial(mode=mode) for mode in ("compile", "compile-blocks", "compile-reduce-overhead")]
    said = ["torch.compile bf16, default mode", "torch.compile bf16, per block", "torch.compile bf16, reduce-overhead"]
    assert named(*ways) == said
    torchao = [trial(mode=mode, rival="torchao_rowwise", **EIGHT) for mode in ("compile", "compile-blocks")]
    assert named(*torchao) == ["torchao FP8, compiled", "torchao FP8, compiled per block"]


def test_a_users_head_in_bf16_has_its_name_beside_one_in_fp8() -> None:
    ways = [trial(parts="all", mode="cudagraph", **more, **EIGHT) for more in ({}, {"head": "chunked"})]
    assert named(*ways) == ["te-bench FP8, FP8 head", "te-bench FP8, bf16 head"]
    assert named(*ways, trial(parts="all", mode="cudagraph")) == [*named(*ways), "te-bench bf16"]
    assert named(trial(**EIGHT), ways[0]) == ["te-bench FP8, eager", "te-bench FP8, CUDA graph"]


def test_what_makes_the_work_another_is_said_of_all() -> None:
    said = ["PyTorch eager bf16, batch 12", "torch.compile bf16, batch 64"]
    assert named(trial(), trial(batch=64, mode="compile")) == said


def test_the_specification_has_every_setting_but_the_seed() -> None:
    said = specification(trial(**FAST, **EIGHT, seed=3))
    for setting in ("attention=gluon", "recipe=delayed_scaling", "optimizer=triton", "padded_vocab=50304", "batch=12"):
        assert setting in said
    assert "seed" not in said


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({}, EAGER),
        ({"mode": "compile"}, COMPILED),
        ({"parts": "all"}, TE_BENCH),  # a user's model with te-bench's kernels in it
        ({"parts": "all", "mode": "compile"}, TE_BENCH),
        ({"rival": "liger"}, "Liger"),
        ({"rival": "torchao_rowwise", "mode": "compile", "precision": "fp8"}, "torchao"),
        ({"rival": "of another te-bench"}, "of another te-bench"),
    ],
)
def test_whose_step_a_trial_times(settings: dict[str, str], who: str) -> None:
    assert whose(trial(**settings)) == who


@pytest.mark.parametrize(
    ("precision", "blocks", "head", "name"),
    [
        ("fp8", "fused", "chunked", "delayed scaling, fused, bf16 head"),
        ("fp8", "fused", None, "delayed scaling, fused, bf16 head"),
        ("fp8", "fused", "fp8", "delayed scaling, fused, FP8 head"),
        ("fp8", None, "chunked", "delayed scaling"),
        ("bf16", "fused", "chunked", "bf16, fused"),
    ],
)
def test_a_study_names_the_head_of_a_fused_step_in_fp8(precision: str, blocks: str, head: str, name: str) -> None:
    recipe = "delayed_scaling" if precision == "fp8" else None
    settings = {"arm": "recipe", "blocks": blocks, "head": head}
    assert arm_name(trial(precision=precision, recipe=recipe, **settings)) == name
