"""The convergence and stress suites: what pairs share, what tells arms apart, and what the user's words change."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_models import MODULE

from te_bench.experiments import plan, presets, suite_trials
from te_bench.experiments.problems import end_of, trunk_of
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.suites import convergence
from te_bench.kernels.attention import Problem, load
from te_bench.models import recipe as recipes
from te_bench.models.configs import configs
from te_bench.reports.analysis.naming import arm_name
from te_bench.reports.convergence.skewed import mean_of

EMULATED = ("mxfp8_block_scaling", "nvfp4_block_scaling", "nvfp4_block_scaling_bf16_end")
RECIPES = ["delayed_scaling", "float8_block_scaling", "float8_current_scaling", "rowwise_scaling"]
E4M3 = {"delayed_scaling": "delayed_scaling_e4m3"}
#: What may differ between the arms of one seed, and nothing else.
ARM = ("arm", "perturb_ulp", "fault")


def resolve(suite: str = "convergence", device: str = "cpu", **asked: Any) -> Experiment:
    return plan.resolve(suite, Options(device=device, **{"data": {"": "random"}, **asked}))


def shared(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.problem.items() if key not in ARM}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", sorted(presets.PRESETS.keys() - convergence.POOLED))
def test_the_arms_of_a_seed_differ_in_their_arm_alone(device: str, preset: str) -> None:
    experiment = resolve(device=device, preset=preset)
    first = experiment.trials[0]
    two_heads = preset in presets.FUSED
    usual = [E4M3.get(name, name) for name in RECIPES] if preset == "gpt2-short" else RECIPES
    more = (suite_trials.FP8_ATTENTION, "delayed_scaling_e4m3") if two_heads else ()
    alike = [t for t in experiment.trials if t.problem.get("head") == first.problem.get("head")]
    assert all(shared(t) == shared(first) for t in alike)
    ways = {(t.mode, t.attention, t.workload, t.protocol) for t in experiment.trials}
    assert ways == {(first.mode, first.attention, "training", "curve")}
    assert first.problem["min_learning_rate"] == 0
    assert first.problem["evaluate"] == "both"
    assert experiment.baseline == next(t.cell for t in experiment.trials if t.problem["arm"] == "control")
    for seed in range(int(str(experiment.judgement["seeds"]))):
        arms = [t for t in experiment.trials if t.seed == seed]
        names = ("arm", "perturb_ulp", "fault")
        found = {(t.precision, t.recipe, *(t.problem.get(name) for name in names)) for t in arms}
        assert found == {
            ("bf16", None, "control", None, None),
            ("bf16", None, "aa", 1, None),
            *(("fp8", name, "recipe", None, None) for name in (*usual, *more)),
            *[("fp8", convergence.FAULTY, "broken", None, convergence.FAULT)]
            * (seed < int(str(experiment.judgement["fault_runs"]))),
        }
        assert len(arms) == len(found) + two_heads
    assert len({t.name for t in experiment.trials}) == len(experiment.trials)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_steps_are_arms_of_their_own(device: str) -> None:
    plain, fused = (resolve(device=device, recipes=("delayed_scaling",), fused=asked).trials for asked in (None, True))
    known = {trial.id for trial in plain}
    more = {trial.id: trial for trial in fused if trial.id not in known}
    assert len(fused) - len(plain) == len(more) == 2 * len({t.seed for t in plain})  # two heads
    ways = [{key: trial.problem[key] for key in ("blocks", "head", "optimizer")} for trial in more.values()]
    optimizer = "triton" if device == "cuda" else "reference"
    assert ways[0] == {"blocks": "fused", "head": "chunked", "optimizer": optimizer}
    assert ways[1] == {"blocks": "fused", "head": "fp8", "optimizer": optimizer}
    assert {arm_name(t) for t in more.values()} == {
        "delayed scaling, fused, bf16 head",
        "delayed scaling, fused, FP8 head",
    }


@pytest.mark.parametrize("preset", ["cpu", "llama"])
def test_a_recipe_has_an_arm_with_an_fp8_head_unless_it_keeps_the_head_out_of_fp8(preset: str) -> None:
    names = tuple(recipes.names())
    trials = resolve(device="cuda", preset=preset, seeds=1, recipes=names, fused=True).trials
    planned = {t.recipe for t in trials if t.problem.get("head") == "fp8" and t.problem["arm"] == "recipe"}
    assert planned == {name for name in names if recipes.load(name).lacks_fp8_head() is None}


def test_what_the_file_of_a_new_recipe_says_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8_HEAD, and ON_REQUEST: it runs where it is named, and its head is never one that it refuses."""
    said = "FP8_HEAD = False\nON_REQUEST = True\nRECIPE = Float8CurrentScaling(bf16_last=0.5)\n"
    own = f'"""Half."""\nfrom te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling\n{said}'
    (tmp_path / "halved.py").write_text(own)
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    trials = [resolve(recipes=("halved",), fused=True).trials, resolve("speed", data={}, recipes=("halved",)).trials]
    for named in ([t for t in planned if t.recipe == "halved"] for planned in trials):
        assert named
        assert "fp8" not in {t.problem.get("head") for t in named}
    assert "halved" not in {t.recipe for t in resolve("fp8", data={}).trials}


@pytest.mark.parametrize("preset", ["gpt2-short", "gpt2"])
@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_a_head_chooses_the_one_fused_step_that_is_judged(head: str, preset: str) -> None:
    asked: dict[str, Any] = {"device": "cuda", "preset": preset, "recipes": ("delayed_scaling_e4m3",), "fused": True}
    both, one = (
        {t.cell: t for t in resolve(**asked, head=of).trials if t.problem["arm"] == "recipe"} for of in (None, head)
    )
    (only,) = one.values()
    assert only.cell in both
    by_default = resolve(**asked | {"recipes": None}, head=head).trials
    assert only.cell in {t.cell for t in by_default}
    assert "delayed_scaling" not in {t.recipe for t in by_default}
    assert (only.problem["blocks"], only.problem["head"]) == ("fused", {"bf16": "chunked", "fp8": "fp8"}[head])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"head": "fp8"}, r"^--head fp8 needs --fused: it chooses the head of the fused step$"),
        ({"head": "bf16", "weights": "bf16"}, r"^--head bf16 needs --fused"),
        ({"head": "fp16", "fused": True}, r"^unknown --head 'fp16'"),
        (
            {"head": "fp8", "fused": True, "recipes": ("float8_current_scaling_bf16_end",)},
            r"^--head fp8: the recipes keep a part of the head out of FP8; give --head bf16$",
        ),
    ],
)
def test_a_head_that_cannot_be_judged_is_refused_in_a_sentence(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve(**asked)


@pytest.fixture
def llama(asked_here: None, tmp_path: Path) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128}
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("preset", ["cpu", "gpt2"])
def test_of_a_user_s_model_the_steps_with_te_bench_s_kernels_are_arms(llama: str, preset: str) -> None:
    """That is what advise advises."""
    own: dict[str, Any] = {"model": llama, "preset": preset, "recipes": ("delayed_scaling",), "seeds": 1, "steps": 30}
    plain, fused = (resolve(**own, fused=asked) for asked in (None, True))
    more = [trial for trial in fused.trials if trial.id not in {one.id for one in plain.trials}]
    said = {arm_name(t): (t.problem["parts"], t.problem.get("head"), t.recipe) for t in more}
    assert said.keys() == {
        "delayed scaling, te-bench's kernels",
        "delayed scaling, te-bench's kernels, bf16 head",
    }
    assert set(said.values()) == {("all", None, "delayed_scaling"), ("all", "chunked", "delayed_scaling")}
    assert len(plain.trials) + 2 == len(fused.trials)
    with pytest.raises(ValueError, match=r"--branch-at 9 with --fused: .*; leave --fused out$"):
        resolve(**own, fused=True, branch_at=9)


@pytest.mark.parametrize("preset", [None, "cpu", "char", "gpt2-short"])
def test_by_default_a_user_s_model_is_judged_by_delayed_scaling_with_gradients_in_e4m3(llama: str, preset: str) -> None:
    trials = resolve(model=llama, preset=preset, seeds=1).trials
    judged = sorted(str(t.recipe) for t in trials if t.problem["arm"] == "recipe")
    assert judged == sorted(E4M3.get(name, name) for name in RECIPES)


@pytest.mark.usefixtures("asked_here")
def test_a_user_s_model_without_a_head_that_te_bench_replaces_has_one_step_with_its_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODULE)
    own: dict[str, Any] = {"model": "own:make", "recipes": ("delayed_scaling",), "seeds": 1, "steps": 30}
    for head, arms in ((None, 2), ("fp8", 1)):
        recipes = [t for t in resolve(**own, fused=True, head=head).trials if t.problem["arm"] == "recipe"]
        assert len(recipes) == arms
        assert recipes[-1].problem["parts"] == "all"
        assert not any("head" in trial.problem for trial in recipes)
    with pytest.raises(ValueError, match=r"^--head bf16: te.convert replaces no head of own:make; give --head fp8$"):
        resolve(**own, fused=True, head="bf16")


def test_weights_and_states_in_fewer_bits_are_judged_against_float32s() -> None:
    experiment = resolve(device="cpu", weights="bf16", states="fp8", recipes=("delayed_scaling",), steps=300)
    arms = {arm_name(trial): trial for trial in experiment.trials}
    judged = ["bf16, bf16 weights, FP8 states", "delayed scaling, bf16 weights, FP8 states"]
    assert list(arms) == ["bf16", "bf16, A/A", *judged, "current scaling, broken on purpose: flushed gradients"]
    for name, trial in arms.items():
        fewer = {key: trial.problem.get(key) for key in ("weights", "states", "optimizer")}
        expected = ("bf16", "fp8", "reference") if name in judged else (None, None, None)
        assert tuple(fewer.values()) == expected
        assert (trial.problem["arm"] == "recipe") is (name in judged)
    assert experiment.title.startswith("Convergence: do bf16 weights and FP8 states train like float32?")
    alone = resolve(device="cpu", states="bf16").trials
    assert {arm_name(t) for t in alone if t.problem["arm"] == "recipe"} == {"bf16, bf16 states"}
    with pytest.raises(ValueError, match="a study answers one question; leave --fused out"):
        resolve(device="cpu", states="bf16", fused=True)
    for preset in ("gpt2", "llama"):
        assert resolve(device="cuda", preset=preset, weights="bf16", states="bf16").trials
        with pytest.raises(ValueError, match=f"--weights: preset {preset}: .* micro-batches .* or give --states alone"):
            resolve(device="cuda", preset=preset, weights="bf16", accumulate=4)  # no recipe's trial would run
        assert resolve(device="cuda", preset=preset, weights="float32", states="bf16", accumulate=4).trials


@pytest.mark.parametrize("suite", ["convergence", "stress"])
def test_rate_warm_up_and_micro_batches_are_the_users(suite: str) -> None:
    """gpt2-short: 300 steps of 12 sequences, 60 of warm-up to 6e-4, one micro-batch."""
    usual = {"learning_rate": 6e-4, "min_learning_rate": 0.0, "warmup": 60, "accumulate": 1, "steps": 300}

    def first(**asked: Any) -> dict[str, Any]:
        found = resolve(suite, device="cuda", preset="gpt2-short", **asked).trials
        assert {t.problem["warmup"] for t in found} == {found[0].problem["warmup"]}
        return {key: found[0].problem.get(key) for key in usual}

    assert first() == usual
    assert first(learning_rate=1e-3) == {**usual, "learning_rate": 1e-3}
    assert first(warmup=0) == {**usual, "warmup": 0}
    assert first(steps=100) == {**usual, "steps": 100, "warmup": 20}
    assert first(steps=100, warmup=60) == {**usual, "steps": 100}  # as it was said, more than a fifth
    assert first(accumulate=4) == {**usual, "accumulate": 4}
    assert first(accumulate=4, tokens=100 * 4 * 12 * 1024)["steps"] == 100


def test_what_the_preset_has_said_again_is_the_same_trial() -> None:
    for preset, said in (
        ("cpu", {"learning_rate": 1e-3, "warmup": 15, "accumulate": 1}),
        ("gpt2", {"learning_rate": 3e-4, "warmup": 400, "accumulate": 1}),
    ):
        usual, again = (resolve(preset=preset, seeds=1, **more).trials for more in ({}, said))
        assert [trial.id for trial in usual] == [trial.id for trial in again]


def test_a_plan_has_runs_enough_of_its_fault_for_it_to_be_seen() -> None:
    """The share of simulated studies that call it INFERIOR, by how far above the margin it ends, in sd of its gaps.

    Of 10 seeds of the tiny GPT on a CPU 3.4, from the first step and from half-way on; of the 8 of
    results/h200/convergence-short 13.8.
    """
    draw = np.random.default_rng(5)
    for asked, excess in (({}, 3.4), ({"branch_at": 75}, 3.4), ({"preset": "gpt2-short", "device": "cuda"}, 13.8)):
        runs = sum(t.problem["arm"] == "broken" for t in resolve(seeds=10, **asked).trials)
        seen = [mean_of(excess + draw.standard_normal(runs)).p_above(0.0) <= 0.05 for _ in range(1000)]
        assert np.mean(seen) > 0.98, asked


def test_tokens_of_a_sequence_are_no_length_of_a_training() -> None:
    """A batch of 4 sequences of 64 tokens: 20 steps are 5,120."""
    for tokens, steps in ((64, "1 step"), (19 * 256, "19 steps")):
        said = f"--tokens {tokens}: it is how long a run trains here, .* {steps} of 256 tokens; give 5120 or more"
        with pytest.raises(ValueError, match=said):
            resolve(device="cpu", batch=4, tokens=tokens)
    assert {t.problem["steps"] for t in resolve(device="cpu", batch=4, tokens=5120).trials} == {20}


def test_on_a_cpu_early_evaluations_are_short() -> None:
    """Few tokens for evaluations that enter no verdict; those that do see all."""
    for p in (t.problem for t in resolve().trials):
        assert int(str(p["early_eval_tokens"])) * 4 == p["eval_tokens"]


def test_a_tiny_gpt_has_one_thread_of_a_cpu() -> None:
    for suite in ("convergence", "stress"):
        assert {t.problem["threads"] for t in resolve(suite).trials} == {1}
        assert not [t for t in resolve(suite, model="char").trials if "threads" in t.problem]
        assert not [t for t in resolve(suite, device="cuda", preset="cpu").trials if "threads" in t.problem]


def test_seeds_are_outermost_so_that_a_run_may_stop_between_them() -> None:
    seeds = [t.seed for t in resolve(seeds=3).trials]
    assert seeds == sorted(seeds)
    assert set(seeds) == {0, 1, 2}


def test_what_a_verdict_is_judged_by_is_in_the_plan() -> None:
    fixed = {"margin": 0.005, "tighter": 0.003, "alpha": 0.05, "seeds": 12, "steps": 2035}
    pairs = {**fixed, "bf16_runs": 2, "fault_runs": 3}  # the control's and A/A's
    for preset in ("gpt2", "llama"):
        experiment = resolve(preset=preset)
        [primary] = {t.cell for t in experiment.trials if t.recipe == "delayed_scaling_e4m3"}
        assert experiment.judgement == {**pairs, "primary": primary}
    asked: dict[str, Any] = {"checkpointing": True, "parallel": "ddp", "gpus_per_trial": 2}
    divided = resolve(preset="gpt2", device="cuda", **asked)
    assert {t.recipe for t in divided.trials if t.cell == divided.judgement["primary"]} == {"delayed_scaling_e4m3"}
    pairs["primary"] = resolve(preset="gpt2").judgement["primary"]
    assert "tighter" not in resolve(preset="gpt2", margin=0.01).judgement
    assert resolve(preset="gpt2", as_pilot=True).judgement == {**pairs, "seeds": 3, "pilot": True}
    assert resolve(preset="gpt2", design="pool").judgement == {**fixed, "pool": 3}
    assert "pool" not in resolve(preset="cpu-pool", design="pairs").judgement
    assert "primary" not in resolve(preset="gpt2", recipes=("delayed_scaling_e4m3", "rowwise_scaling")).judgement
    short = {"margin": 0.02, "alpha": 0.05, "seeds": 14, "steps": 300, "bf16_runs": 2, "fault_runs": 3}
    assert resolve(preset="gpt2-short").judgement == short
    assert resolve(preset="char").judgement["seeds"] == 8
    mine = resolve(margin=0.5, alpha=0.01, seeds=2, steps=27)
    assert mine.judgement == {"margin": 0.5, "alpha": 0.01, "seeds": 2, "steps": 27, "bf16_runs": 2, "fault_runs": 6}
    assert all(t.problem["steps"] == 27 for t in mine.trials)


@pytest.mark.parametrize("preset", ["cpu-pool", "gpt2"])
def test_a_round_has_a_run_of_every_recipe_and_several_of_bf16(preset: str) -> None:
    pool: dict[str, Any] = {"device": "cuda", "preset": preset, "design": "pool"}
    experiment = resolve(**pool, seeds=4)
    ratio = int(str(experiment.judgement["pool"]))
    recipes = {t.cell for t in experiment.trials if t.problem["arm"] == "recipe"}
    seeds: list[int] = []
    for number in range(4):
        own = range(number * ratio, (number + 1) * ratio)
        trials = [t for t in experiment.trials if t.seed in own]
        kinds = Counter(str(t.problem["arm"]) for t in trials)
        assert kinds == Counter(control=ratio - 1, aa=1, recipe=len(recipes), broken=int(number < 3))
        bf16 = [t.seed for t in trials if t.precision == "bf16"]
        assert sorted(bf16) == list(own)  # each of a seed of its own
        seeds += [t.seed for t in trials]
    assert {t.seed for t in experiment.trials} == set(seeds)
    order = [t.seed // ratio for t in experiment.trials]
    assert order == sorted(order)  # a run that is stopped leaves whole rounds, and at most one that is not
    more = {t.id for t in resolve(**pool, seeds=6).trials}
    assert {t.id for t in experiment.trials} < more  # a plan of more rounds goes on with what is there
    assert {t.id for t in resolve(**pool, as_pilot=True).trials} < more


@pytest.mark.parametrize(("preset", "model"), [("gpt2", "gpt2"), ("llama", "llama-114m")])
def test_the_verdicts_of_gpt2_and_llama_are_of_the_fused_step(preset: str, model: str) -> None:
    trials = resolve(device="cuda", preset=preset, seeds=1).trials
    made = {(t.problem["model"], t.problem["blocks"], t.problem["optimizer"]) for t in trials}
    assert made == {(model, "fused", "triton")}
    judged = {(t.recipe, t.problem["head"]) for t in trials if t.problem["arm"] == "recipe"}
    own = {("delayed_scaling", "fp8"), ("delayed_scaling_e4m3", "fp8"), ("float8_current_scaling_dpa", "chunked")}
    assert {t.attention for t in trials} == {"gluon"}  # planned without a GPU: for a Hopper
    assert judged == own | {(name, "chunked") for name in RECIPES}
    assert {t.problem["head"] for t in trials if t.precision == "bf16"} == {"chunked"}
    p = trials[0].problem
    assert 100e6 <= p["batch"] * p["block"] * p["accumulate"] * p["steps"] < 100.1e6  # tokens
    assert (p["eval_tokens"], p["early_eval_tokens"], p["order"]) == (4 * 2**20, 2**18, "once")
    assert preset != "gpt2" or (p["batch"], p["block"], p["vocab"], p["padded_vocab"]) == (48, 1024, 50257, 50304)
    assert 100e6 < configs()[model].shape.weights * 12 + 50257 * 768 < 150e6


def test_a_model_whose_heads_gluon_does_not_take_has_attention_that_runs() -> None:
    """As a first try of the preset on a GPU has it, of a tiny model."""
    for model, shape in ((name, config.shape) for name, config in configs().items() if not config.dropout):
        for trial in resolve(device="cuda", preset="gpt2", model=model, seeds=1).trials:
            size = {"batch": 2, "heads": shape.heads, "length": 1024, "head_dim": shape.head_dim}
            posed = Problem(**size, dtype="bf16", causal=True, dropout=0.0, device="cuda", capability=(9, 0))
            reason = load(trial.attention).unsupported(posed) or ""  # that there is no GPU here is no matter
            assert not reason.startswith("head_dim"), model


@pytest.mark.parametrize("recipes", range(1, 17))
def test_as_many_bf16_runs_as_tell_most(recipes: int) -> None:
    """The variance of a gap, 1 + 1 / ratio, for a given number of runs; Dunnett's rule is sqrt(recipes)."""
    cost = {ratio: (recipes + ratio) * (1 + 1 / ratio) for ratio in (2, 3, 4)}
    assert cost[convergence.best_ratio(recipes)] == pytest.approx(min(cost.values()))


def test_each_token_is_seen_once_or_the_plan_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("".join(f"line {n}\n" for n in range(9000)))
    asked: dict[str, Any] = {"preset": "cpu-pool", "data": {"": f"text:{text}"}, "cache": tmp_path / "cache"}
    assert {t.problem["order"] for t in resolve(**asked).trials} == {"once"}  # 77 k of 88 k tokens
    with pytest.raises(ValueError, match=r"each token is to be seen once: 0.102 M tokens a run, and the training part"):
        resolve(**asked, steps=200)


def test_choosing_trials_keeps_the_judgement() -> None:
    options = Options(device="cpu", data={"": "random"}, margin=0.25)
    some = plan.resolve("convergence", options, only="*control*")
    assert some.judgement["margin"] == 0.25
    assert {t.problem["arm"] for t in some.trials} == {"control"}


def test_without_a_preset_a_gpu_has_one_that_its_seeds_can_decide() -> None:
    asked = resolve(device="cuda", preset="gpt2-short")
    assert resolve(device="cuda") == dataclasses.replace(asked, asked=())
    assert {t.mode for t in asked.trials} == {"cudagraph"}


def test_trials_that_share_a_gpu_say_so() -> None:
    alone, shared = (resolve(device="cuda", share=share).trials for share in (1, 3))
    assert [t.id for t in alone] == [t.id for t in resolve(device="cuda").trials]
    assert {t.problem["share"] for t in shared} == {3}
    assert not {t.id for t in alone} & {t.id for t in shared}
    assert [t.name for t in alone] == [t.name for t in shared]


def test_sharing_is_for_gpus_and_for_losses() -> None:
    with pytest.raises(ValueError, match="--share: only for trials on a GPU; on a CPU they run side by side"):
        resolve(share=2)
    for suite in ("speed", "stress"):
        with pytest.raises(ValueError, match=f"--share: the suite {suite} measures times"):
            resolve(suite, device="cuda", share=2, data={})


@pytest.mark.parametrize(("tokens", "steps"), [(20 * 49152, 20), (20 * 49152 + 1, 21), (1_000_000, 21)])
def test_tokens_are_steps_rounded_up(tokens: int, steps: int) -> None:
    trials = resolve(device="cuda", preset="gpt2", tokens=tokens).trials
    assert {t.problem["steps"] for t in trials} == {steps}
    assert all(1 <= int(str(t.problem["eval_every"])) <= steps for t in trials)
    assert all(int(str(t.problem["warmup"])) < steps for t in trials)


@pytest.mark.parametrize(
    ("device", "asked", "model"),
    [
        ("cpu", {}, "tiny"),
        ("cuda", {}, "gpt2"),
        ("cuda", {"model": "char"}, "char"),
        ("cpu", {"model": "gpt2"}, "gpt2"),
        ("cuda", {"model": "gpt2-medium"}, "gpt2-medium"),
        ("cuda", {"preset": "cpu"}, "tiny"),
        ("cuda", {"preset": "char", "model": "tiny"}, "tiny"),
    ],
)
def test_the_preset_is_the_users_or_the_models_or_the_devices(device: str, asked: dict[str, Any], model: str) -> None:
    assert {t.problem["model"] for t in resolve(device=device, **asked).trials} == {model}


def test_attention_in_fp8_is_an_arm_of_its_own_where_it_is_asked_for() -> None:
    arms = resolve(recipes=("float8_current_scaling", "float8_current_scaling_dpa"), seeds=1).trials
    plain, in_fp8 = (t for t in arms if t.problem["arm"] == "recipe")
    assert dataclasses.replace(in_fp8, recipe=plain.recipe) == plain
    assert len({t.cell for t in arms}) == len(arms)


@pytest.mark.parametrize("suite", ["convergence", "stress", "fp8"])
def test_emulated_recipes_run_where_they_are_asked_for(suite: str) -> None:
    data = {} if suite == "fp8" else {"": "random"}
    asked = {trial.recipe for trial in resolve(suite, recipes=EMULATED, seeds=1, data=data).trials}
    assert asked - {None, "float8_current_scaling"} == set(EMULATED)  # in which convergence plants its fault
    assert not {trial.recipe for trial in resolve(suite, seeds=1, data=data).trials} & set(EMULATED)


def test_recipes_are_those_asked_for() -> None:
    arms = resolve(recipes=("delayed_scaling",), seeds=1).trials
    expected = {"control": None, "aa": None, "recipe": "delayed_scaling", "broken": convergence.FAULTY}
    assert [(t.problem["arm"], t.recipe) for t in arms] == list(expected.items())


def test_text_is_named_by_its_content(tmp_path: Path) -> None:
    text = tmp_path / "play.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    trials = resolve(preset="char", data={"": f"text:{text}"}, cache=tmp_path / "cache").trials
    assert {(t.problem["data"], t.problem["tokenizer"]) for t in trials} == {("text:play.txt", "chars")}
    assert len({t.problem["data_sha256"] for t in trials}) == 1
    assert trials[0].problem["data_sha256"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stress_is_a_ladder_of_learning_rates(device: str) -> None:
    planned = resolve("stress", device).trials
    faults = [t for t in planned if "fault" in t.problem]
    assert {(t.recipe, t.problem["lr_factor"], t.problem["fault"]) for t in faults} == {
        ("delayed_scaling", 1, "nan_at_depth"),
        ("delayed_scaling", 1, "poisoned_token"),
        ("delayed_scaling", 1, "short_history"),
    }
    trials = [t for t in planned if t not in faults]
    assert {t.seed for t in trials} == set(range(6))
    factors = (1, 2, 4, 8, 16, 32, 64)
    asked = {(recipe, factor) for recipe in (None, *RECIPES) for factor in factors}
    assert {(t.recipe, t.problem["lr_factor"]) for t in trials} == asked
    rates = {t.problem["lr_factor"]: t.problem["learning_rate"] for t in trials}
    assert [rate / rates[1] for rate in rates.values()] == list(rates)
    assert len({t.name for t in trials}) == len(trials) == 6 * 7 * (1 + len(RECIPES))
    assert all(not set(ARM) & set(t.problem) for t in trials)


@pytest.mark.parametrize("model", ["llama-114m", "gpt2"])
def test_stress_of_a_long_model_takes_no_more_text_than_the_default_has(model: str) -> None:
    """7 M tokens, of which a run of 100 M, each seen once, would be refused."""
    for asked in ({}, {"steps": 40}):
        problem = resolve("stress", "cuda", model=model, seeds=1, **asked).trials[0].problem
        seen = (problem["model"], problem["steps"], problem["batch"], problem["block"], problem.get("order"))
        assert seen == (model, asked.get("steps", 300), 12, 1024, None)
    assert resolve("stress", "cuda", preset="llama", seeds=1).trials[0].problem["steps"] == 2035  # as asked


@pytest.mark.parametrize(
    ("suite", "asked", "message"),
    [
        ("convergence", {"steps": 0}, "--steps 0: give 1 or more"),
        ("convergence", {"steps": 1}, "--steps 1: so short a run tells nothing of a precision; give 20 or more"),
        ("stress", {"steps": 19}, "--steps 19: so short a run tells nothing of a precision; give 20 or more"),
        ("convergence", {"tokens": -1}, "--tokens -1: give 1 or more"),
        ("convergence", {"learning_rate": 0.0}, "--learning-rate 0: give a number greater than 0, such as 3e-4"),
        ("convergence", {"learning_rate": -1e-3}, "--learning-rate -0.001: give a number greater than 0"),
        ("convergence", {"learning_rate": float("nan")}, "--learning-rate nan: give a number greater than 0"),
        ("stress", {"learning_rate": float("inf")}, "--learning-rate inf: give a number greater than 0"),
        ("convergence", {"warmup": -1}, "--warmup -1: give 0, for none, or more"),
        ("convergence", {"warmup": 150}, "--warmup 150: a run has 150 steps; give fewer"),
        ("stress", {"warmup": 30, "steps": 20}, "--warmup 30: a run has 20 steps; give fewer"),
        ("convergence", {"accumulate": 0}, "--accumulate 0: give 1 or more"),
        (
            "convergence",
            {"accumulate": 2, "weights": "bf16"},
            "--weights: preset cpu: gradients of 2 micro-batches would be summed in bf16, which loses small ones; take 1, "
            "by --accumulate 1, or give --states alone",
        ),
        ("curves", {"learning_rate": 1e-3}, "--learning-rate: the suite curves chooses its learning rates itself"),
        ("curves", {"warmup": 5}, "--warmup: the suite curves chooses its learning rates itself; leave it out"),
        ("curves", {"accumulate": 2}, "--accumulate: the suite curves chooses its batches itself; leave it out"),
        ("convergence", {"steps": 5, "tokens": 5}, "--steps 5 and --tokens 5 both say how long to train: give one"),
        ("convergence", {"margin": 0.0}, "--margin 0: give nats greater than 0"),
        ("convergence", {"margin": float("nan")}, "--margin nan: give nats greater than 0"),
        ("convergence", {"alpha": 0.5}, "--alpha 0.5: give a probability from 0.00001 to below 0.5"),
        ("convergence", {"model": "gpt3"}, "unknown model 'gpt3'. Did you mean gpt2"),
        ("convergence", {"preset": "chars"}, "unknown preset 'chars'. Did you mean char"),
        ("convergence", {"recipes": ("delayed",)}, "unknown recipe 'delayed'. Did you mean delayed_scaling"),
        ("convergence", {"recipes": ()}, "--recipes names none; known: delayed_scaling"),
        ("convergence", {"recipes": ("delayed_scaling",) * 2}, "--recipes: delayed_scaling is named twice"),
        ("convergence", {"budget_s": 5.0}, "--budget: the suite convergence has no time-budget trial"),
        ("convergence", {"design": "pairing"}, "unknown --design 'pairing'. Did you mean pairs"),
        ("stress", {"design": "pool"}, "--design: the suite stress gives no verdict on convergence; leave it out"),
        (
            "stress",
            {"as_pilot": True},
            "--as-pilot: the suite stress has no plan that a pilot could shape; leave it",
        ),
        ("convergence", {"data": {"gpt2": "random"}}, "unknown model of --data 'gpt2'. Known: tiny."),
        ("stress", {"margin": 0.1}, "--margin: the suite stress gives no verdict on convergence; leave it out"),
        ("stress", {"alpha": 0.1}, "--alpha: the suite stress gives no verdict on convergence; leave it out"),
        ("quick", {"model": "tiny"}, "--model: the suite quick chooses its models itself; leave it out"),
        ("quick", {"recipes": ("delayed_scaling",)}, "--recipes: the suite quick chooses its recipes itself"),
        ("quick", {"steps": 5}, "--steps: the suite quick chooses itself how long it trains; leave it out"),
        ("quick", {"tokens": 5}, "--tokens: the suite quick chooses itself how long its sequences are; leave it out"),
        ("quick", {"margin": 0.1}, "--margin: the suite quick gives no verdict on convergence; leave it out"),
        ("quick", {"preset": "cpu"}, "--preset: the suite quick has no presets; leave it out"),
    ],
)
def test_bad_words_are_refused(suite: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(suite, **asked)
    assert str(caught.value).startswith(message)


def test_a_fault_that_is_not_there_or_has_no_recipe_is_refused() -> None:
    broken = next(t for t in resolve(seeds=1).trials if t.problem["arm"] == "broken")
    plan.check(broken)
    with pytest.raises(ValueError, match="unknown fault 'e5m2_foward'"):
        plan.check(dataclasses.replace(broken, problem={**broken.problem, "fault": "e5m2_foward"}))
    with pytest.raises(ValueError, match="a fault is planted into a recipe; choose precision fp8"):
        plan.check(dataclasses.replace(broken, precision="bf16", recipe=None))


@pytest.mark.parametrize("preset", ["gpt2", "cpu-pool", "cpu"])
def test_branches_are_pairs_that_share_the_controls_trunk(preset: str) -> None:
    """Of presets with a pool, too; and without the option nothing is another trial than it was."""
    experiment = resolve(preset=preset, branch_at=75, fused=None)
    assert "pool" not in experiment.judgement
    seeds = range(int(str(experiment.judgement["seeds"])))
    assert len(seeds) >= convergence.TRUNKS
    for seed in seeds:
        arms = [trial for trial in experiment.trials if trial.seed == seed]
        assert arms[0].problem["arm"] == "control"  # which trains the trunk
        assert {trunk_of(trial).id for trial in arms} == {arms[0].id}
        arm = Counter(trial.problem["arm"] for trial in arms)
        assert (arm["control"], arm["aa"], arm["broken"]) == (1, 1, seed < 6)
    assert len({trial.seed for trial in experiment.trials}) == len(seeds)
    assert all(trial.problem["branch_at"] == 75 for trial in experiment.trials)
    assert experiment.title.startswith("Convergence: does FP8 from step 75 on train like bf16?")
    assert all("branch_at" not in trial.problem for trial in resolve(preset=preset).trials)
    assert trunk_of(resolve(preset=preset).trials[0]) is None


def test_a_study_may_begin_with_a_fresh_seed() -> None:
    usual, fresh = (resolve(preset="gpt2", first_seed=first) for first in (None, 4))
    assert {**usual.judgement, "first_seed": 4} == fresh.judgement
    assert [dataclasses.replace(t, seed=t.seed - 4) for t in fresh.trials] == list(usual.trials)
    assert resolve(preset="gpt2", first_seed=0).judgement == usual.judgement
    with pytest.raises(ValueError, match=r"^--first-seed 4: a pool begins with seed 0; give --design pairs$"):
        resolve(preset="gpt2", design="pool", first_seed=4)


def test_recipes_that_end_in_bf16_stand_beside_those_that_do_not(llama: str) -> None:
    """Each that is named, else of the presets that step fused the fastest alone; all other trials are as they were."""

    def ending(**asked: Any) -> list[tuple[Any, ...]]:
        before = {trial.id for trial in resolve(**asked).trials}
        more = [t for t in resolve(bf16_from=75, **asked).trials if t.id not in before]
        assert {trial.problem["bf16_from"] for trial in more} == {75}
        assert all(end_of(trial).precision == "bf16" for trial in more)
        return sorted(((trial.recipe, trial.problem.get("head")) for trial in more), key=str)

    assert ending(preset="gpt2", seeds=1) == [("delayed_scaling", "fp8")]
    named = ("float8_block_scaling", "float8_current_scaling")
    assert ending(preset="llama", seeds=1, recipes=named) == [(name, "chunked") for name in named]
    assert ending(preset="cpu", seeds=1, recipes=named) == [(name, None) for name in named]
    assert ending(preset="gpt2", seeds=1, fused=True, head="bf16") == [
        (E4M3.get(name, name), "chunked") for name in RECIPES
    ]
    own = [(name, head) for name in named for head in ("chunked", None, None)]  # plain modules, and with either head
    assert ending(preset="gpt2", seeds=1, fused=True, model=llama, recipes=named, steps=100) == own
    assert len(ending(preset="gpt2", seeds=1, fused=True, model=llama, steps=100)) == 3 * len(RECIPES)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"branch_at": 0}, r"^--branch-at 0: bf16 trains that many steps before FP8 does: give 1 or more"),
        ({"branch_at": -3}, r"^--branch-at -3: bf16 trains that many steps"),
        ({"branch_at": 150}, r"^--branch-at 150: the training has 150 steps, and FP8 must have some; give fewer"),
        ({"branch_at": 40, "steps": 40}, r"^--branch-at 40: the training has 40 steps"),
        ({"branch_at": 75, "states": "bf16"}, r"^--branch-at 75 with --weights or --states: --branch-at judges FP8"),
        ({"branch_at": 75, "fused": True}, r"^--branch-at 75 with --fused: .* give --preset gpt2 or llama"),
        (
            {"branch_at": 75, "design": "pool"},
            r"^--branch-at 75 with --design pool: runs of one trunk are pairs; leave",
        ),
        ({"bf16_from": 0}, r"^--bf16-from 0: give 1 or more$"),
        ({"bf16_from": 150}, r"^--bf16-from 150: the training has 150 steps, and bf16 must have some; give fewer"),
        ({"bf16_from": 75, "branch_at": 75}, r"^--branch-at 75 with --bf16-from: one judges FP8's begin, the"),
        ({"bf16_from": 75, "weights": "bf16"}, r"^--bf16-from 75 with --weights or --states: --bf16-from judges where"),
        ({"bf16_from": 75, "parallel": "ddp", "gpus_per_trial": 2}, r"^--bf16-from 75 with --parallel: the prec"),
        ({"branch_at": 75, "parallel": "ddp", "gpus_per_trial": 2}, r"^--branch-at 75 with --parallel: a trunk"),
    ],
)
def test_a_branch_that_cannot_be_is_refused_in_a_sentence(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve(preset="cpu", **asked)


def test_other_suites_have_no_branches() -> None:
    with pytest.raises(ValueError, match="--branch-at: the suite stress trains every run from its first step"):
        resolve("stress", branch_at=75)
