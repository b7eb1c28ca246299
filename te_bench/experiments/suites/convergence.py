"""Does FP8 train like bf16? Compares recipes with bf16 runs, pair by pair or with a pool, and a planted fault.

With --weights or --states: do weights and moments with fewer bits train like float32's?
"""

import dataclasses

from te_bench.experiments import presets, run_options, suite_trials
from te_bench.experiments.adoption import ALL, CHUNKED, adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.training import fewer_bits

ALPHA = 0.05
ASKED = "does FP8 train like bf16"
#: Nats. gpt2 and llama: 0.27 % of GPT-2's loss, 1.82; DeepSeek-V3 reports less than 0.25 % (arXiv:2412.19437, 3.3). Their
#: TIGHTER margin is stated beside it.
#: Preset cpu: its tiny GPT ends within 0.0005 of its A/A arm and within 0.004 of its FP8 arms (5 seeds, 2026-11-22).
#: gpt2-short: at step 200 of 2,035 of four times the tokens, two bf16 runs an ulp apart differ by 0.010 (sd).
MARGINS = {"cpu": 0.01, "cpu-pool": 0.05, "char": 0.01, "gpt2": 0.005, "llama": 0.005, "gpt2-short": 0.02}
TIGHTER = {"gpt2": 0.003, "llama": 0.003}
#: Runs of each recipe.
SEEDS = {"cpu": 6, "cpu-pool": 5, "char": 8, "gpt2": 12, "llama": 12, "gpt2-short": 14}
#: Presets whose recipes share a pool of bf16 runs, unless --design overrides it.
POOLED = frozenset({"cpu-pool"})
PILOT = 3  # rounds of a pilot: with six recipes and three bf16 runs a round, 20 degrees of freedom

#: The broken arm: a fault that is certainly detected (docs/convergence-questions.md), and the recipe that gets it.
FAULT, FAULTY = "flushed_gradients", "float8_current_scaling"

#: Runs of the broken arm in a pool's plan, and in presets whose fault ends far above the margin: 14 (300 steps of GPT-2) or
#: more standard deviations of its gaps. Three pairs show such a fault in over 99 % of studies.
BROKEN = 3
FAR_BROKEN = frozenset({"char", "gpt2", "llama", "gpt2-short"})
#: The same for other pairs and for branches. The tiny GPT's fault ends 3.4 sd above the margin, branched or not (ten seeds
#: on a CPU): three pairs show it in 44 % of studies, six in over 99 %.
BROKEN_NEARER = 6

Way = tuple[str | None, Settings]  # a recipe, None for bf16, and settings added to the problem

E5M2, E4M3 = "delayed_scaling", "delayed_scaling_e4m3"  # by the format of gradients
#: The step that te-bench's published answers recommend, with an FP8 head.
FASTEST_WAY: Way = (E5M2, {"head": "fp8"})
#: The same with E4M3 gradients, whose gap was smaller in exploration (results/h200/convergence-e4m3). It is judged first:
#: in a family of seven recipes, no affordable number of seeds tells its small gap from the margin.
NEAREST_WAY: Way = (E4M3, {"head": "fp8"})

#: Heads of the fused step, by --head; the FP8 head has a verdict of its own.
FUSED_HEADS = {"bf16": CHUNKED, "fp8": "fp8"}

#: Fewest trunks of a verdict on branches, which are always pairs, one a trunk: from fewer, the spread is hardly known.
TRUNKS = 6

HEEDS = presets.TRAINING.union(
    ("model", "recipes", "margin", "alpha", "preset", "branch_at", "bf16_from", "first_seed"),
    ("design", "as_pilot", "fused", "head", "share"),
)


def experiment(options: Options) -> Experiment:
    preset = presets.preset_of(options)
    branch = options.branch_at is not None
    problem = presets.problem_of(options)
    problem |= _branched(options, preset, problem["steps"])
    pooled = options.design == "pool" if options.design else preset in POOLED and not branch
    usual, pilot = SEEDS[preset], PILOT
    if branch:
        usual, pilot = max(TRUNKS, usual), TRUNKS
    seeds = suite_trials.seeds(options, pilot if options.as_pilot else usual)
    ways = _ways(options, preset, problem)
    if ending := _ending_in_bf16(options, problem["steps"]):
        most = FASTEST_WAY if options.recipes is None and FASTEST_WAY in ways else None
        ways += [(recipe, {**parts, **ending}) for recipe, parts in ways if most in (None, (recipe, parts))]
    ratio = best_ratio(len(ways)) if pooled else None
    if options.first_seed and pooled:
        raise ValueError(f"--first-seed {options.first_seed}: a pool begins with seed 0; give --design pairs")
    faults = BROKEN if pooled or (preset in FAR_BROKEN and not branch) else BROKEN_NEARER
    if ratio is None:
        first = options.first_seed or 0
        trials = [
            trial for number in seeds for trial in _some(_arms(options, problem, ways, first + number), number, faults)
        ]
    else:
        trials = [trial for number in seeds for trial in _round(options, problem, ways, number, ratio)]
    return Experiment(
        suite="convergence",
        title=f"Convergence: {_question(options)}? {problem['model']}, {problem['steps']} steps",
        trials=tuple(trials),
        baseline=trials[0].cell,
        judgement={
            "margin": MARGINS[preset] if options.margin is None else options.margin,
            "alpha": ALPHA if options.alpha is None else options.alpha,
            "seeds": len(seeds),
            "steps": problem["steps"],
            # A seed's A/A run is a second bf16 run: the mean of both costs nothing, and varies less than one of them.
            **({"bf16_runs": 2, "fault_runs": faults} if ratio is None else {"pool": ratio}),
            **({"first_seed": options.first_seed} if options.first_seed else {}),
            **({"primary": trials[2].cell} if ratio is None and ways[0] == NEAREST_WAY else {}),
            **({"tighter": TIGHTER[preset]} if preset in TIGHTER and options.margin is None else {}),
            **({"pilot": True} if options.as_pilot else {}),
        },
        heeds=HEEDS,
    )


def _question(options: Options) -> str:
    fewer = run_options.fewer_words(run_options.fewer_bits(options))
    if options.branch_at is not None:
        return f"does FP8 from step {options.branch_at:,} on train like bf16"
    return f"do {' and '.join(fewer)} train like float32" if fewer else ASKED


def _branched(options: Options, preset: str, steps: int) -> Settings:
    """Return the settings of --branch-at. Raise ValueError for conflicting options."""
    if options.branch_at is None:
        return {}
    flag = f"--branch-at {options.branch_at}"
    if options.design == "pool":
        raise ValueError(f"{flag} with --design pool: runs of one trunk are pairs; leave --design out")
    if options.branch_at >= steps:
        raise ValueError(f"{flag}: the training has {steps} steps, and FP8 must have some; give fewer")
    if run_options.fewer_bits(options):
        raise ValueError(
            f"{flag} with --weights or --states: --branch-at judges FP8 that begins there; leave one of them out"
        )
    if options.bf16_from is not None:
        raise ValueError(f"{flag} with --bf16-from: one judges FP8's begin, the other its end; give one")
    if options.parallel is not None:
        raise ValueError(f"{flag} with --parallel: a trunk is trained on one GPU; leave one of them out")
    if options.fused and (preset not in presets.FUSED or adoptee(options) is not None):
        instead = "leave --fused out" if adoptee(options) else f"give --preset {' or '.join(sorted(presets.FUSED))}"
        raise ValueError(f"{flag} with --fused: all branches continue one step, by modules or fused; {instead}")
    return {"branch_at": options.branch_at}


def best_ratio(recipes: int) -> int:
    """Return the bf16 runs per run of a recipe with the least variance of a gap for a given total: about sqrt(recipes).

    One of them is A/A's, so there are at least two. Dunnett 1955, J. Am. Stat. Assoc. 50:1096.
    """
    return min((2, 3, 4), key=lambda ratio: ((recipes + ratio) * (1 + 1 / ratio), -ratio))


def _ways(options: Options, preset: str, problem: Settings) -> list[Way]:
    """Return what is judged: recipes; with --weights or --states, bf16 and the named recipes with these settings."""
    if options.head is not None and not options.fused:
        raise ValueError(f"--head {options.head} needs --fused: it chooses the head of the fused step")
    if fewer := run_options.fewer_bits(options):
        if options.fused:
            raise ValueError("--fused with --weights or --states: a study answers one question; leave --fused out")
        accumulate = problem.get("accumulate", 1)
        if reason := fewer_bits.unsupported(fewer.get("weights"), fewer.get("states"), accumulate=accumulate):
            raise ValueError(f"--weights: preset {preset}: {reason}, by --accumulate 1, or give --states alone")
        own: Settings = {"optimizer": presets.fused_parts(options)["optimizer"], **fewer}
        return [(recipe, own) for recipe in (None, *(options.recipes or ()))]
    recipes = _recipes(options, preset)
    if preset in presets.FUSED and not (options.head or (options.fused and adoptee(options))):  # bf16 is fused, too
        found: list[Way] = [(recipe, {}) for recipe in recipes]
        if options.recipes is None:
            found = [NEAREST_WAY, *found, FASTEST_WAY, (suite_trials.FP8_ATTENTION, {})]
        elif options.fused:
            found += [(recipe, {"head": "fp8"}) for recipe in recipes]
        return _possible(found)
    fused = _fused(options) if options.fused else []
    parts = fused if options.head is not None else [{}, *fused]
    return _possible([(recipe, way) for recipe in recipes for way in parts])


def _recipes(options: Options, preset: str) -> tuple[str, ...]:
    """Return --recipes. By default gpt2-short, --head and users' models have E4M3 gradients in delayed scaling, not E5M2.

    A study shows that it trains like bf16 (docs/convergence.md). Other presets keep the recipes of their published plans.
    """
    recipes = presets.recipes_of(options)
    if options.recipes is None and (preset == "gpt2-short" or options.head or adoptee(options)):
        return tuple(E4M3 if recipe == E5M2 else recipe for recipe in recipes)
    return recipes


def _fused(options: Options) -> list[Settings]:
    """Return the settings of the fused step with each head of --head; of a user's model, the step that advise times.

    Raise ValueError for a bf16 head of a user's model whose head te.convert does not replace: it has only one such step.
    """
    heads: list[str | None] = [FUSED_HEADS[options.head]] if options.head else [*FUSED_HEADS.values()]
    own = adoptee(options)
    if own is None:
        return [{**presets.fused_parts(options), "head": head} for head in heads]
    if not own.facts.head:
        if options.head == "bf16":
            raise ValueError(f"--head bf16: te.convert replaces no head of {own.source.model}; give --head fp8")
        heads = [None]
    parts: Settings = {"parts": ALL}
    if options.device == "cuda" and options.parallel is None and own.optimizer:  # it updates whole parameters
        parts["optimizer"] = own.optimizer
    return [{**parts, "head": head} for head in heads]


def _ending_in_bf16(options: Options, steps: int) -> Settings:
    """Return the settings of --bf16-from. Raise ValueError for conflicting options."""
    if options.bf16_from is None:
        return {}
    flag = f"--bf16-from {options.bf16_from}"
    if options.bf16_from >= steps:
        raise ValueError(f"{flag}: the training has {steps} steps, and bf16 must have some; give fewer")
    if run_options.fewer_bits(options):
        raise ValueError(f"{flag} with --weights or --states: --bf16-from judges where FP8 ends; leave one of them out")
    if options.parallel is not None:
        raise ValueError(f"{flag} with --parallel: the precision can change only on one GPU; leave one of them out")
    return {"bf16_from": options.bf16_from}


def _possible(ways: list[Way]) -> list[Way]:
    """Remove FP8 heads of recipes that refuse one; a study with them would never be complete.

    Raise ValueError if nothing is left, which only --head fp8 can bring about.
    """
    without = suite_trials.without_fp8_head()
    found = [(recipe, parts) for recipe, parts in ways if not (parts.get("head") == "fp8" and recipe in without)]
    if not found:
        raise ValueError("--head fp8: the recipes keep a part of the head out of FP8; give --head bf16")
    return found


def _arms(options: Options, problem: Settings, ways: list[Way], seed: int) -> list[Trial]:
    """Return the arms of one pair; they differ in "arm", "perturb_ulp", "fault", precision and recipe."""
    asked: list[Way] = [
        (None, {"arm": "control"}),
        (None, {"arm": "aa", "perturb_ulp": 1}),
        *((recipe, {"arm": "recipe", **way}) for recipe, way in ways),
        (FAULTY, {"arm": "broken", "fault": FAULT}),
    ]
    return [presets.arm(options, {**problem, **more}, recipe, seed) for recipe, more in asked]


def _round(options: Options, problem: Settings, ways: list[Way], number: int, ratio: int) -> list[Trial]:
    """Return one run of every recipe and `ratio` bf16 runs with their own seeds: the arms are balanced after any round."""
    first = number * ratio
    control, aa, *recipes, broken = _arms(options, problem, ways, first)
    bf16 = [dataclasses.replace(control, seed=seed) for seed in range(first, first + ratio - 1)]
    bf16.append(dataclasses.replace(aa, seed=first + ratio - 1))
    return [*bf16, *_some([*recipes, broken], number, BROKEN)]


def _some(trials: list[Trial], number: int, faults: int) -> list[Trial]:
    """Keep the broken arm in the first rounds only."""
    return [trial for trial in trials if trial.problem["arm"] != "broken" or number < faults]
