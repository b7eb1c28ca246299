"""auto: the nearest measured row by its stated rule, the fastest there that can; else the first preferred that can."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import know
from test_contract import GPT2, a_problem, draw, run

from te_bench.kernels import attention, measured
from te_bench.kernels.attention import Problem, table
from te_bench.kernels.attention.backends import auto
from te_bench.kernels.measured import Timing

H200 = dataclasses.replace(a_problem(GPT2), capability=(9, 0))
HERE = "NVIDIA H300"  # of which nothing ships
SHIPPED_GPU = "NVIDIA H200"
SECONDS = {"triton": 3e-4, "cudnn": 2e-4, "flash": 4e-4}


def a_row(problem: Problem = H200, machine: str = HERE, **seconds: float) -> Timing:
    seconds = seconds or SECONDS
    return Timing(operator="attention", machine=machine, problem=table.whole(problem), seconds=seconds, source="a test")


def nearest(rows: Iterable[Timing], problem: Problem, machine: str = HERE) -> tuple[Timing, float] | None:
    know(*rows)
    return table.nearest(machine, problem)


pytestmark = pytest.mark.usefixtures("own")


# Which row


def test_the_same_problem_is_no_doubling_away() -> None:
    row = a_row()
    assert nearest([row], H200) == (row, 0.0)
    told = dataclasses.replace(H200, kv_heads=12, kv_length=1024, v_head_dim=64, capability=None)
    assert nearest([row], told) == (row, 0.0)
    assert nearest([row], H200, "NVIDIA H100") is None
    assert nearest([], H200) is None


@pytest.mark.parametrize(
    ("changes", "doublings"),
    [
        ({"batch": 24}, 1),
        ({"batch": 6, "heads": 24}, 0),
        ({"batch": 3}, 2),
        ({"length": 2048}, 3),  # of queries, of keys, and of the keys that a row may see
        ({"length": 2048, "kv_length": 1024}, 1),
        ({"batch": 12 * 2**6}, 6),
        ({"batch": 12 * 2**6 + 1}, None),
        ({"length": 8192}, None),
        ({"dtype": "fp16"}, None),
        ({"causal": False}, None),
        ({"mask": True}, None),
        ({"dropout": 0.1}, None),
        ({"window": (256, 0)}, None),
        ({"head_dim": 128}, None),
        ({"v_head_dim": 32}, None),
        ({"kv_heads": 6}, 1.0),
        ({"length": 0}, None),
        ({"device": "cpu"}, None),
    ],
    ids=str,
)
def test_how_far_a_problem_is(changes: dict[str, object], doublings: float | None) -> None:
    found = nearest([a_row()], dataclasses.replace(H200, **changes))  # type: ignore[arg-type]
    assert (None if found is None else found[1]) == doublings


def test_the_nearest_of_several_and_of_equals_the_same_in_any_order_of_the_file() -> None:
    near, twice, half = (a_row(dataclasses.replace(H200, batch=n)) for n in (12, 24, 6))
    wanted = dataclasses.replace(H200, batch=12)
    assert nearest([twice, near, half], wanted) == (near, 0.0)
    assert nearest([twice, half], wanted) == nearest([half, twice], wanted) == (twice, 1.0)


def test_windows_are_near_by_their_widths() -> None:
    row = a_row(dataclasses.replace(H200, window=(255, 0), causal=False))
    assert row.problem.causal
    for window, doublings in (((255, 0), 0), ((511, 0), 1), ((127, 0), 1), ((2**20, 0), 2)):
        for causal in (False, True):
            asked = dataclasses.replace(H200, causal=causal, window=window)
            assert nearest([row], asked) == (row, doublings)
    for window in ((255, 255), (-1, 255)):
        assert nearest([row], dataclasses.replace(H200, causal=False, window=window)) is None
    for window in (None, (-1, 0), (-1, 9)):  # all of them the causal mask alone
        assert nearest([a_row()], dataclasses.replace(H200, window=window)) == (a_row(), 0.0)


# Which backend


def test_the_fastest_there_that_can() -> None:
    rows = [a_row()]
    assert choice(rows, H200).name == "cudnn"
    assert choice(rows, H200).why.startswith(
        "measured: B12 H12 T1024 D64 bf16 causal on NVIDIA H300, us: cudnn 200, triton"
    )
    assert choice(rows, dataclasses.replace(H200, batch=24)).why.startswith("nearest measured, 1.0 doublings away")
    uneven = dataclasses.replace(H200, kv_length=2048)  # of which cuDNN and flash take no causal mask
    assert choice(rows, uneven).name == "triton"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cudnn"),
        ({"capability": (8, 0)}, "flash"),
        ({"mask": True}, "mem_efficient"),
        ({"window": (9, 0)}, "triton"),
        ({"window": (9, 0), "dtype": "fp32"}, "mem_efficient"),
        ({"window": (9, 0), "dtype": "fp64"}, "math"),
        ({"device": "cpu", "capability": None}, "flash"),
        ({"device": "cpu", "capability": None, "dropout": 0.5}, "math"),
        ({"device": "cpu", "capability": None, "window": (9, 0)}, "flash"),
    ],
    ids=str,
)
def test_the_first_of_the_preference_where_nothing_near_was_measured(changes: dict[str, object], name: str) -> None:
    for rows in ([], [a_row(dataclasses.replace(H200, head_dim=128))], [a_row(machine="another")]):
        found = choice(rows, dataclasses.replace(H200, **changes))  # type: ignore[arg-type]
        assert found.name == name
        assert "nothing near was measured" in found.why


def choice(rows: Iterable[Timing], problem: Problem) -> auto.Choice:
    know(*rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.knobs.runtime.interpret", False)
        return auto.choose(problem, HERE)


def test_a_choice_is_carried_out_remembered_and_proved() -> None:
    from te_bench.experiments.instruments.profiling import kernels_seen

    problem = a_problem((1, 2, 32, 16), "fp32", "cpu")
    here = measured.machine_name("cpu")
    assert (
        attention.wrong_kernel("auto", "cpu", [], eager=True)
        == "asked for auto, which chose no backend in this process"
    )
    for name, other in (("math", "flash"), ("flash", "math")):
        know(a_row(problem, here, **{name: 1e-6, other: 2e-6}))
        assert attention.rival("auto", problem) == name
        assert auto.chosen() == ()  # to ask is not to run
        seen = kernels_seen(lambda: run(attention.load("auto"), problem, draw(problem)), "cpu").names
        assert auto.chosen() == (name,)
        assert attention.wrong_kernel("auto", "cpu", seen, eager=True) is None
        another = attention.load(other)
        wrong = kernels_seen(functools.partial(run, another, problem, draw(problem)), "cpu").names
        said = attention.wrong_kernel("auto", "cpu", wrong, eager=True)
        assert said is not None
        assert f"auto, which chose {name}" in said
    assert attention.rival("flash", problem) == "flash"


def test_of_several_choices_any_may_have_run_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "chosen", lambda: ("cudnn", "triton"))
    backend = dataclasses.replace(auto.BACKEND, chosen=lambda: ("cudnn", "triton"))
    monkeypatch.setattr(auto, "BACKEND", backend)
    ours, cudnn, flash = "attention_forward_kernel", "cudnn_generated_sdpa", "pytorch_flash::flash_fwd_kernel"
    for seen in ([ours], [cudnn], [ours, cudnn]):
        assert attention.wrong_kernel("auto", "cuda", seen, eager=False) is None
    for seen in ([flash], [ours, flash], []):
        said = attention.wrong_kernel("auto", "cuda", seen, eager=False)
        assert said is not None
        assert "auto, which chose cudnn and triton" in said


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_breaks(dynamic: bool) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return auto.forward(q, k, v, causal=False, scale=0.3, window=(3, 0))

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for length in (16, 24):
        q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    torch._dynamo.reset()


# Tables


def test_the_users_own_rows_take_the_place_of_the_shipped_ones() -> None:
    shipped = measured.read(measured.SHIPPED, "attention")
    assert shipped == measured.timings("attention")
    mine = [a_row(machine=SHIPPED_GPU, flash=1e-4), a_row(dataclasses.replace(H200, head_dim=128), flash=1e-4)]
    know(*mine)
    assert measured.timings("attention") == (*mine, *(row for row in shipped if row.key != mine[0].key))
    assert auto.choose(H200, SHIPPED_GPU).name == "flash"


def test_a_table_that_is_none_is_named(own: Path) -> None:
    for broken in (
        "",
        "[]",
        '{"schema": 3, "rows": []}',
        '{"schema": 2, "rows": [{}]}',
        measured.text([a_row(flash=0.0)]),
        measured.text([a_row(dataclasses.replace(H200, batch=-1), flash=1.0)]),
        measured.text([a_row(flash=1.0)]).replace('"window": null', '"window": [3]'),
    ):
        own.write_text(broken)
        measured.forget()
        with pytest.raises(ValueError, match=r"measured.json.* is no .*measured time.* te-bench tune attention"):
            auto.choose(H200, HERE)


def test_the_shipped_table_is_what_the_published_records_say() -> None:
    from te_bench.reports.analysis import measured_times

    results = Path(__file__).resolve().parents[3] / "results" / "h200"
    made = measured_times.of_results("attention", [path.parent for path in sorted(results.glob("*/journal.jsonl"))])
    shipped = measured.read(measured.SHIPPED, "attention")
    assert set(map(row_text, made)) == set(map(row_text, shipped)), (
        "te-bench tune attention --from results/h200/... --table te_bench/kernels/measured.json"
    )
    assert auto.choose(H200, SHIPPED_GPU).why.startswith("measured")


def test_what_has_gone_since_it_was_measured_is_passed_over() -> None:
    know(a_row(gone=1e-9, auto=1e-8, flash=1e-4, math=1e-3))
    assert auto.choose(H200, HERE).name == "flash"


def row_text(row: Timing) -> str:
    return measured.text([row])


sizes = st.integers(1, 2**20)
windows = st.none() | st.tuples(st.integers(-1, 4096), st.integers(-1, 4096))


@settings(deadline=None, max_examples=20)
@given(
    st.builds(
        Problem, batch=sizes, heads=sizes, length=sizes, head_dim=sizes, dtype=st.sampled_from(["bf16", "fp32"]),
        causal=st.booleans(), dropout=st.just(0.0), device=st.just("cuda"), capability=st.just((9, 0)),
        kv_heads=st.none() | sizes, kv_length=st.none() | sizes, mask=st.booleans(), window=windows,
    ),
    st.dictionaries(st.text(min_size=1), st.floats(1e-9, 1e3), min_size=1),
)  # fmt: skip
def test_a_table_is_read_as_it_was_written(problem: Problem, seconds: dict[str, float]) -> None:
    row = dataclasses.replace(a_row(problem, flash=1.0), seconds=seconds)
    know(row)
    assert measured.timings("attention")[0] == row
    assert table.distance(row.problem, row.problem) == 0
    assert table.whole(row.problem) == row.problem
    assert math.isinf(table.distance(row.problem, dataclasses.replace(row.problem, mask=not row.problem.mask)))


@pytest.mark.gpu
def test_on_an_h200_the_table_decides_and_its_kernels_run() -> None:
    from te_bench.experiments.instruments.profiling import kernels_seen

    if torch.cuda.get_device_name() != SHIPPED_GPU:
        pytest.skip("the shipped table is an H200's")
    problem = a_problem(GPT2)
    [row] = [row for row in measured.timings("attention") if row.key == a_row(problem, SHIPPED_GPU).key]
    seen = kernels_seen(lambda: run(attention.load("auto"), problem, draw(problem)), "cuda").names
    assert auto.chosen() == (row.fastest()[0],)
    assert attention.wrong_kernel("auto", "cuda", seen, eager=True) is None


def test_a_folder_that_may_not_be_searched_holds_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's home, as in containers: root, who may search every folder, is told so here."""

    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refused)
    assert measured.users_choices(["attention"], "cpu") == []
    assert measured.timings("attention") == measured.read(measured.SHIPPED, "attention")
