"""Every suite on both devices: resolvable, no trial twice, the baseline among its cells, each seed a repetition."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from te_bench import plugins
from te_bench.experiments import environment, plan, suites, trial_model
from te_bench.experiments.runner import at_once
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.suite_trials import corpus_problem
from te_bench.kernels.attention.backends import gluon
from te_bench.models import recipe, rivals

SUITES = plugins.names(suites.__name__)
CHANGES = ("window_left", "window_right", "documents", "dropout")  # of a shape of attention


def resolve(suite: str, device: str, cache: Path, seeds: int | None = None) -> Experiment:
    trains = suite in ("convergence", "curves", "stress") or (device == "cpu" and suite in ("quick", "demo"))
    data = {"": "random"} if trains else {}
    return plan.resolve(suite, Options(device=device, seeds=seeds, data=data, cache=cache))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_sound(suite: str, device: str, tmp_path: Path) -> None:
    experiment = resolve(suite, device, tmp_path)
    assert experiment.suite == suite
    assert experiment.title
    ids = Counter(trial.id for trial in experiment.trials)
    assert not [trial_id for trial_id, times in ids.items() if times > 1]
    assert {trial.device for trial in experiment.trials} == {device}
    assert experiment.baseline is None or experiment.baseline in {trial.cell for trial in experiment.trials}
    assert all((trial.precision == "fp8") == (trial.recipe is not None) for trial in experiment.trials)
    assert not list(tmp_path.iterdir())  # random data leaves nothing in the cache


@pytest.mark.parametrize(
    "suite", ["attention", "fp8", "gemms", "heads", "layer", "nanogpt", "pieces", "scaling", "speed"]
)
def test_every_time_on_a_gpu_is_of_three_processes_or_more(suite: str, tmp_path: Path) -> None:
    timed = Counter(t.cell for t in resolve(suite, "cuda", tmp_path).trials if t.protocol != "once")
    assert min(timed.values()) >= 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", SUITES)
def test_more_seeds_repeat_the_cells_and_add_none(suite: str, device: str, tmp_path: Path) -> None:
    one, three = (resolve(suite, device, tmp_path, seeds) for seeds in (1, 3))
    assert {t.cell for t in one.trials} == {t.cell for t in three.trials}
    assert {t.seed for t in one.trials} == {0}
    assert {t.seed for t in three.trials} == {0, 1, 2}
    assert {t.id for t in one.trials} < {t.id for t in three.trials}


@pytest.mark.parametrize(("suite", "beginning"), [("nanogpt", "manual"), ("layer", "manual"), ("fp8", "cudnn")])
def test_speed_ups_are_over_what_users_begin_with(suite: str, beginning: str, tmp_path: Path) -> None:
    """What else these suites have on a GPU tests/test_published.py holds: the trials of the records that are published."""
    experiment = resolve(suite, "cuda", tmp_path, seeds=1)
    first = experiment.trials[0]
    assert experiment.baseline == first.cell
    assert (first.attention, first.precision, first.mode) == (beginning, "bf16", "eager")


def test_quick_on_a_cpu_has_what_the_issue_asks_for(tmp_path: Path) -> None:
    trials = resolve("quick", "cpu", tmp_path).trials
    steps = [t for t in trials if t.workload == "train_step"]
    assert len({t.attention for t in steps}) >= 3
    assert {t.problem["padded_vocab"] for t in steps} == {50257, 50304}
    assert {t.precision for t in steps} == {"fp32", "bf16", "fp8"}
    assert [t.precision for t in trials if t.workload == "training"] == ["bf16", "fp8"]


def test_a_demo_on_a_cpu_has_short_trials_of_one_thread(tmp_path: Path) -> None:
    demo, quick = (resolve(suite, "cpu", tmp_path).trials for suite in ("demo", "quick"))
    assert {t.precision for t in demo} == {t.precision for t in quick}
    assert {t.problem["padded_vocab"] for t in demo if t.workload == "train_step"} == {256}
    assert {t.problem["threads"] for t in demo} == {1}
    assert at_once(demo, 8) == 1  # steps are timed
    short, long = ([t.problem["steps"] for t in each if t.workload == "training"] for each in (demo, quick))
    assert len(short) == len(long)
    assert max(short) < min(long)


def test_quick_on_a_hopper_gpu_is_gpt2_as_the_suite_speed_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda: [gpu(9, 0, 141)])
    here = resolve("quick", "cuda", tmp_path)
    assert len(here.trials) == 2 * 3
    speed = {t.id: t for t in resolve("speed", "cuda", tmp_path).trials}
    assert {t.id for t in here.trials} <= set(speed)
    assert here.baseline == resolve("speed", "cuda", tmp_path).baseline
    begun, compiled, fused = here.trials[:3]
    first = (begun.attention, begun.precision, begun.mode, begun.problem["padded_vocab"])
    assert first == ("manual", "bf16", "eager", 50257)
    assert (compiled.cell, compiled.mode) == (here.baseline, "compile-reduce-overhead")
    assert (fused.attention, fused.recipe, fused.mode) == ("gluon", "delayed_scaling", "cudagraph")
    assert [fused.problem[key] for key in ("head", "blocks", "optimizer")] == ["fp8", "fused", "triton"]
    monkeypatch.setattr(environment, "visible_gpus", list)  # planned where there is no GPU
    assert resolve("quick", "cuda", tmp_path).trials == here.trials


def gpu(major: int, minor: int, gib: int) -> dict[str, Any]:
    return {"name": "a GPU", "capability": [major, minor], "memory_bytes": gib * 2**30}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_quick_asks_a_gpu_for_what_it_can_and_for_fp8_where_there_is_any(tmp_path, monkeypatch, capability):
    monkeypatch.setattr(environment, "visible_gpus", lambda: [gpu(*capability, 80)])
    trials = resolve("quick", "cuda", tmp_path, seeds=1).trials
    monkeypatch.setattr(trial_model, "capability", lambda device: capability)
    monkeypatch.setattr(trial_model.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    for trial in trials:
        trial_model.require_supported(trial)  # raises Unsupported
    fp8 = recipe.load("delayed_scaling").unsupported("cuda", capability) is None
    assert [t.precision for t in trials] == ["bf16", "bf16", "fp8" if fp8 else "bf16"]
    assert {t.problem["batch"] for t in trials} == {12}


def test_quick_asks_a_small_gpu_for_a_smaller_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_gpus", lambda: [gpu(8, 9, 24)])
    here = resolve("quick", "cuda", tmp_path)
    assert {t.problem["batch"] for t in here.trials} == {4}
    assert here.title == "Quick look: GPT-2 124M, 4 x 1024 tokens"


def test_speed_has_the_rivals_and_ours_in_bf16_and_in_both_fp8_recipes(tmp_path: Path) -> None:
    everything = resolve("speed", "cuda", tmp_path, seeds=1).trials
    [roof] = [t for t in everything if t.workload == "ceilings"]
    assert roof.problem["copy_bytes"] > 50 * 2**20  # an H200's L2
    trials = [t for t in everything if t is not roof]
    recipes = (None, "delayed_scaling", "float8_current_scaling")
    [peer] = [t for t in trials if "linears" in t.problem]
    assert (peer.problem["linears"], peer.precision, peer.mode) == ("torchao_tensorwise", "fp8", "compile")
    trials.remove(peer)
    plain = {(t.recipe, t.mode) for t in trials if "optimizer" not in t.problem and t.attention != "manual"}
    assert plain == {(recipe, mode) for recipe in recipes for mode in ("compile-reduce-overhead", "cudagraph")}
    ours = {(t.recipe, t.mode, t.problem.get("head")) for t in trials if t.problem.get("optimizer") == "triton"}
    assert ours == {(recipe, "cudagraph", head) for recipe in recipes for head in ("chunked", "fp8")} - {
        (None, "cudagraph", "fp8")
    }
    fused = [t for t in trials if t.problem.get("blocks") == "fused"]
    for kernel in ("cudnn", "triton", "gluon", "flash4"):
        assert {(t.recipe, t.mode, t.problem.get("head")) for t in fused if t.attention == kernel} == ours
    assert all("-blocks-fused" in t.name for t in fused)
    assert {(t.problem["model"], t.problem["batch"], t.problem["block"]) for t in trials} == {("gpt2", 12, 1024)}
    assert len({t.name for t in [*trials, peer]}) == len(trials) + 1
    small = [t for t in resolve("speed", "cpu", tmp_path).trials if t.workload == "train_step"]
    assert {(t.mode, t.problem.get("optimizer")) for t in small} == {("eager", None), ("eager", "reference")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_speed_of_a_llama_has_every_rival_as_its_users_train(device: str, tmp_path: Path) -> None:
    asked = Options(device=device, seeds=1, cache=tmp_path, model="llama3-1b", batch=1)
    trials = [t for t in plan.resolve("speed", asked).trials if t.workload == "train_step"]
    found = [(t.problem["rival"], t.precision, t.recipe, t.mode) for t in trials if "rival" in t.problem]
    every = {name: rivals.load(name) for name in rivals.names()}
    assert sorted(found) == sorted((n, r.precision, r.recipe, mode) for n, r in every.items() for mode in r.modes)
    assert not any("linears" in t.problem for t in trials)
    assert all(f"-{t.problem['rival']}/" in t.name for t in trials if "rival" in t.problem)


def test_scaling_has_other_projects_steps_as_they_divide_them(tmp_path: Path) -> None:
    """On one GPU torchtitan's are over a group of one rank, what a project has a ddp of is one process's.

    Of a GPT there are those that are no Llama's alone.
    """

    def found(**options: Any) -> set[tuple[str, str | None, str, int | None]]:
        trials = plan.resolve("scaling", Options(seeds=1, cache=tmp_path, **options)).trials
        settings = [(t.problem, t.mode) for t in trials if "rival" in t.problem]
        return {(p["rival"], p.get("parallel"), mode, p.get("world")) for p, mode in settings}

    over = [("fsdp2", 1), *((parallel, world) for parallel in ("fsdp2", "tp") for world in (2, 4, 8))]
    titans = {("torchtitan", parallel, "compile", world) for parallel, world in over}
    titans |= {("torchtitan", parallel, "cudagraph", world) for parallel, world in over if parallel == "fsdp2"}
    assert titans <= found(device="cuda", model="llama3-1b", batch=1)
    assert titans <= found(device="cuda")
    engine = "transformer_engine_delayed"
    assert {one for one in found(device="cuda", model="llama3-1b", batch=1) if one[0] == engine} == {
        (engine, None, "eager", None),
        *((engine, parallel, "eager", world) for parallel in ("ddp", "fsdp2", "tp") for world in (2, 4, 8)),
    }
    assert {rival.partition("_")[0] for rival, *_ in found(device="cuda")} == {"torchao", "torchtitan"}
    asked = found(device="cuda", model="llama3-1b", batch=1, recipes=("rowwise_scaling",))
    assert {rival for rival, *_ in asked} == {"torchao_rowwise", "torchtitan"}
    small = {(parallel, world) for parallel, world in over if world < 4}
    assert found(device="cpu") == {("torchtitan", parallel, "eager", world) for parallel, world in small}


def test_scaling_has_a_project_that_divides_by_tp_alone_as_one_process_on_one_gpu(tmp_path, monkeypatch):
    load = rivals.load
    by_tp: dict[str, Any] = {"torchtitan": {"ranks": {"tp": ("compile",)}}}
    monkeypatch.setattr(rivals, "load", lambda name: dataclasses.replace(load(name), **by_tp.get(name, {})))
    trials = plan.resolve("scaling", Options(seeds=1, cache=tmp_path, device="cuda")).trials
    found = {(t.problem.get("parallel"), t.problem.get("world")) for t in trials if t.problem.get("rival") in by_tp}
    assert found == {(None, None), ("tp", 2), ("tp", 4), ("tp", 8)}


def test_scaling_has_the_fastest_step_of_one_gpu_under_ddp(tmp_path: Path) -> None:
    """Fused, in bf16 and under one recipe; no CPU fuses anything."""

    def found(**options: Any) -> list[tuple[str | None, int | None, str | None, int]]:
        trials = plan.resolve("scaling", Options(seeds=1, cache=tmp_path, **options)).trials
        fused = [t for t in trials if "blocks" in t.problem]
        assert {(t.attention, t.mode, t.workload) for t in fused} <= {("gluon", "cudagraph", "scaling")}
        return [(t.problem.get("parallel"), t.problem.get("world"), t.recipe, t.problem["batch"]) for t in fused]

    ways = [(None, None, 12), *(("ddp", world, 12 * world) for world in (2, 4, 8))]
    assert found(device="cuda") == [
        (parallel, world, recipe, batch) for parallel, world, batch in ways for recipe in (None, "delayed_scaling")
    ]
    assert {recipe for _, _, recipe, _ in found(device="cuda", recipes=("float8_current_scaling",))} == {
        None,
        "float8_current_scaling",
    }
    assert found(device="cpu") == []


def test_speed_of_another_model_and_batch(tmp_path: Path) -> None:
    """The same configurations, but for manual attention: at GPT-2 XL's size it is no beginning any more."""

    def steps(device: str = "cuda", **options: Any) -> list[Trial]:
        found = plan.resolve("speed", Options(device=device, seeds=1, cache=tmp_path, **options))
        assert found.baseline == found.trials[0].cell
        return [t for t in found.trials if t.workload == "train_step"]

    usual, large, wide = steps(), steps(model="gpt2-xl", batch=6), steps(batch=64)
    assert len(large) == len(wide) == len(usual) - 1
    assert {(t.problem["model"], t.problem["batch"], t.problem["block"]) for t in large} == {("gpt2-xl", 6, 1024)}
    assert {(t.problem["model"], t.problem["batch"], t.problem["block"]) for t in wide} == {("gpt2", 64, 1024)}
    assert "manual" not in {t.attention for t in (*large, *wide)}
    assert [t.id for t in steps(model="gpt2", batch=12)] == [t.id for t in usual]
    assert {t.problem["batch"] for t in steps("cpu", batch=2)} == {2}
    with pytest.raises(ValueError, match=r"--model char: it trains with dropout"):
        steps(model="char")
    with pytest.raises(ValueError, match=r"--batch 0: give 1 to 16777216"):
        steps(batch=0)


def test_the_same_text_in_another_folder_is_the_same_trial(tmp_path: Path) -> None:
    problems = []
    for folder in ("here", "there"):
        path = tmp_path / folder / "play.txt"
        path.parent.mkdir()
        path.write_text("To be, or not to be. " * 400)
        options = Options(device="cpu", cache=tmp_path / "cache")
        problems.append(corpus_problem(options, "tiny", f"text:{path}", "bytes", 64))
    assert problems[0] == problems[1]
    assert problems[0]["data"] == "text:play.txt"
    path.write_text("That is the question. " * 400)
    assert problems[0] == corpus_problem(options, "tiny", f"cached:{problems[0]['corpus']}", "bytes", 64)
    assert corpus_problem(options, "tiny", f"text:{path}", "bytes", 64)["corpus"] != problems[0]["corpus"]


def test_a_large_vocabulary_is_padded_to_a_multiple_of_64_and_a_small_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{i} {i * i}" for i in range(20_000)))
    options = Options(device="cpu", cache=tmp_path / "cache")
    small = corpus_problem(options, "tiny", f"text:{path}", "bytes", 64)
    assert small["padded_vocab"] == small["vocab"]
    large = corpus_problem(options, "tiny", f"text:{path}", "bpe:1500", 64)
    assert (large["vocab"], large["padded_vocab"]) == (1500, 1536)


def test_memory_has_the_fastest_steps_of_speed_on_a_gpu(tmp_path: Path) -> None:
    def steps(suite: str, workload: str) -> set[tuple[Any, ...]]:
        trials = resolve(suite, "cuda", tmp_path, seeds=1).trials
        own = ("head", "optimizer", "blocks", "padded_vocab")
        found = (t for t in trials if t.workload == workload and t.mode != "eager")
        return {(*map(t.problem.get, own), t.attention, t.precision, t.recipe, t.mode) for t in found}

    fast = steps("memory", "max_batch")
    assert len(fast) == 4
    assert fast <= steps("speed", "train_step")
    assert not [t for t in resolve("memory", "cpu", tmp_path).trials if t.mode != "eager"]


def test_heads_have_every_head_at_every_shape_beside_all_the_logits_compiled(tmp_path: Path) -> None:
    experiment = resolve("heads", "cuda", tmp_path, seeds=1)
    shapes: dict[tuple[Any, ...], list[Any]] = {}
    for t in experiment.trials:
        shapes.setdefault(tuple(map(t.problem.get, ("n", "d", "vocab"))), []).append((t.problem["head"], t.mode))
    assert (8192, 4096, 128256) in shapes
    wanted = {("reference", "compile"), *((name, "eager") for name in ("chunked", "fp8", "liger"))}
    assert all(set(found) == wanted for found in shapes.values())
    assert {min(v for _, _, v in shapes), max(v for _, _, v in shapes)} == {32000, 256000}


def test_pieces_are_those_of_the_issue_by_every_rival_that_has_them(tmp_path: Path) -> None:
    def planned(**asked: Any) -> tuple[dict[Any, set[Any]], set[tuple[Any, ...]]]:
        experiment = plan.resolve("pieces", Options(seeds=1, cache=tmp_path, **asked))
        by: dict[Any, set[Any]] = {}
        for t in experiment.trials:
            by.setdefault((t.problem["kind"], t.problem["call"]), set()).add((t.problem["backend"], t.mode))
        assert experiment.trials[0].cell == experiment.baseline
        return by, {(t.problem["kind"], t.problem["m"], t.problem["n"]) for t in experiment.trials}

    ours = {("reference", "compile"), ("triton", "eager")}
    by, sizes = planned(device="cuda")
    assert by["rmsnorm", "forward"] == by["rmsnorm", "backward"] == ours | {("torch", "eager"), ("liger", "eager")}
    assert by["swiglu", "forward"] == ours | {("liger", "eager")}
    assert by["rmsnorm", "forward_quantized"] == by["swiglu", "forward_quantized"] == ours
    assert {("layernorm", "add_forward"), ("gelu", "backward_quantized")} <= by.keys()
    assert {("rmsnorm", 16384, 4096), ("swiglu", 16384, 14336)} < sizes
    assert planned(device="cuda", model="llama3-8b")[1] == {("rmsnorm", 16384, 4096), ("swiglu", 16384, 14336)}
    asked = {"model": "gpt2", "batch": 3, "tokens": 1000}
    assert planned(device="cuda", **asked)[1] == {("layernorm", 3000, 768), ("gelu_erf", 3000, 3072)}
    on_cpu, small = planned(device="cpu")
    assert set().union(*on_cpu.values()) == {("reference", "eager"), ("torch", "eager")}
    assert max(m * n for _, m, n in small) < 2**17


def test_gemms_are_a_layers_forward_and_backward_beside_cublaslt(tmp_path: Path) -> None:
    experiment = resolve("gemms", "cuda", tmp_path, seeds=1)
    by: dict[tuple[Any, ...], list[Any]] = {}
    for t in experiment.trials:
        p = t.problem
        by.setdefault((p.get("scales"), p.get("fast_accum", False), p["m"], p["n"], p["k"]), []).append(p["backend"])
    assert experiment.trials[0].cell == experiment.baseline
    # Of the square projection the forward pass and x's gradient are one product, but for the precision of tensor's sums.
    # W's gradient by blocks is left out.
    assert len(by) == 12 + 12 + 8 - 2
    assert len({t.name for t in experiment.trials}) == len(experiment.trials)
    assert by["tensor", True, 8192, 28672, 4096] == ["scaled_mm", "gluon", "triton"]
    assert {shape[1:2] for shape in by if shape[0] == "block"} == {(False,)}
    assert ("tensor", False, 28672, 4096, 8192) in by
    assert by[None, False, 8192, 4096, 14336] == ["torch", "gluon"]
    asked: dict[str, Any] = {"device": "cpu", "model": "gpt2", "batch": 2, "tokens": 64, "seeds": 1}
    small = plan.resolve("gemms", Options(cache=tmp_path, **asked))
    assert {t.problem["m"] for t in small.trials} == {128, 3 * 768, 768, 4 * 768}
    assert {t.problem["backend"] for t in small.trials} == {"torch", "reference"}


def test_attention_has_the_shapes_of_shared_heads(tmp_path: Path) -> None:
    trials = [t for t in resolve("attention", "cuda", tmp_path).trials if t.problem.get("kv_heads") == 8]
    assert {(t.problem["batch"], t.problem["length"]) for t in trials} == {(4, 2048), (1, 8192)}
    assert {"flash4", "gluon", "cudnn", "triton_fp8"} <= {t.attention for t in trials}


@pytest.mark.parametrize(
    ("device", "most", "wanted"),
    [
        (
            "cuda",
            60,
            {
                (1024, 64): {("window_left", 511), ("documents", 4), ("dropout", 0.1)},
                (2048, 128): {("window_left", 1023), ("window_left", 511), ("documents", 4), ("dropout", 0.1)},
            },
        ),
        ("cpu", 24, {(128, 32): {("window_left", 63), ("documents", 4), ("dropout", 0.1)}}),
    ],
)
def test_attention_changes_one_thing_of_a_shape_beside_the_plain_one(
    device: str, most: int, wanted: dict[Any, Any], tmp_path: Path
) -> None:
    trials = [t for t in resolve("attention", device, tmp_path, seeds=1).trials if t.workload == "attention"]
    plain = {str((t.problem, t.attention)) for t in trials}
    found: dict[Any, Any] = {}
    changed = [t for t in trials if t.problem.keys() & {"window_left", "documents", "dropout"}]
    for t in changed:
        kept = {name: value for name, value in t.problem.items() if name not in CHANGES}
        assert str((kept, t.attention)) in plain
        [one] = [(name, t.problem[name]) for name in CHANGES if name in t.problem and name != "window_right"]
        assert t.problem.get("window_right", 0) == 0
        found.setdefault((t.problem["length"], t.problem["head_dim"]), set()).add(one)
    assert found == wanted
    assert len(changed) <= most
    assert {"triton", "gluon", "cudnn", "flash4", "auto"} <= {t.attention for t in changed}


def test_speed_of_other_recipes_has_no_fp8_head_where_a_recipe_refuses_it(tmp_path: Path) -> None:
    recipes = ("mxfp8_block_scaling", "nvfp4_block_scaling_bf16_end")
    trials = plan.resolve("speed", Options(device="cuda", seeds=1, recipes=recipes, cache=tmp_path)).trials
    fused = [t for t in trials if t.problem.get("blocks") == "fused" and t.attention == "gluon"]
    found = {(t.recipe, t.problem["head"]) for t in fused}
    assert found == {(None, "chunked"), *((name, "chunked") for name in recipes), (recipes[0], "fp8")}
