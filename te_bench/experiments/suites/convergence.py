"""Does FP8 train like BF16? Pairs of the same weights and batches: bf16 twice, each recipe, and a planted fault."""

from te_bench.experiments import presets, suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial

ALPHA = 0.05
#: Nats. gpt2: 0.1 % of 3.28, and 1.5 times the sd between seeds of nanoGPT speedruns (0.0019). The tiny GPT of preset cpu
#: ends within 0.0005 of its A/A arm and within 0.004 of its FP8 arms (5 seeds, 2026-11-22). gpt2-short: at step 200 of
#: gpt2's, of four times the tokens, bf16 is 0.010 (sd) from itself an ulp away.
MARGINS = {"cpu": 0.01, "char": 0.01, "gpt2": 0.003, "gpt2-low-rate": 0.003, "gpt2-short": 0.02}
SEEDS = {"cpu": 6, "char": 8, "gpt2": 5, "gpt2-low-rate": 5, "gpt2-short": 14}

#: The broken arm: a fault that is seen for certain (docs/convergence.md), and the recipe that it is planted into.
FAULT, FAULTY = "flushed_gradients", "float8_current_scaling"

#: Seeds before the first look of a plan that may stop early: 3 to 6 save as many on average, and an earlier look sees sooner
#: what is broken.
FIRST_LOOK = 4
WORTH_LOOKING = 12  # seeds from which stopping early saves a fifth of them; of 8 a fifteenth (docs/convergence.md)

#: Heads of the fused step: the FP8 one is an option of its own, with a verdict of its own.
FUSED_HEADS = ("chunked", "fp8")

HEEDS = frozenset(
    {"model", "batch", "recipes", "steps", "tokens", "margin", "alpha", "preset", "stop_early", "fused", "share"}
)


def experiment(options: Options) -> Experiment:
    preset = presets.preset_of(options)
    problem = presets.problem_of(options)
    seeds = suite_trials.seeds(options, SEEDS[preset])
    trials = [trial for seed in seeds for trial in _arms(options, problem, seed)]
    return Experiment(
        suite="convergence",
        title=f"Convergence: does FP8 train like BF16? {problem['model']}, {problem['steps']} steps",
        trials=tuple(trials),
        baseline=trials[0].cell,
        judgement={
            "margin": MARGINS[preset] if options.margin is None else options.margin,
            "alpha": ALPHA if options.alpha is None else options.alpha,
            "seeds": len(seeds),
            "steps": problem["steps"],
            **_looks(options, len(seeds)),
        },
        heeds=HEEDS,
    )


def _looks(options: Options, seeds: int) -> Settings:
    """The first look of a plan that may stop early. Raises ValueError where no seed would be left to spare after it."""
    if not options.stop_early:
        return {}
    if seeds <= FIRST_LOOK:
        raise ValueError(
            f"--stop-early: the first look is after {FIRST_LOOK} seeds, so {seeds} leave none to spare; give --seeds "
            f"{WORTH_LOOKING} or more ({FIRST_LOOK + 1} at least), or leave it out"
        )
    return {"first_look": FIRST_LOOK}


def _arms(options: Options, problem: Settings, seed: int) -> list[Trial]:
    """The arms of one pair: what differs between them is in "arm", "perturb_ulp" and "fault", precision and recipe."""
    ways: list[Settings] = [{}]
    if options.fused:
        fast = {"blocks": "fused", "optimizer": "triton" if options.device == "cuda" else "reference"}
        ways += [{**fast, "head": head} for head in FUSED_HEADS]
    asked: list[tuple[str | None, Settings]] = [
        (None, {"arm": "control"}),
        (None, {"arm": "aa", "perturb_ulp": 1}),
        *((recipe, {"arm": "recipe", **way}) for recipe in presets.recipes_of(options) for way in ways),
        (FAULTY, {"arm": "broken", "fault": FAULT}),
    ]
    return [presets.arm(options, {**problem, **more}, recipe, seed) for recipe, more in asked]
