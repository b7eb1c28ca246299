"""list, plan and doctor."""

import json

import pytest
from in_process import Command, gpus

from te_bench import __version__, plugins
from te_bench.cli import look
from te_bench.experiments import doctor, environment
from te_bench.experiments.spec import Trial
from te_bench.models.recipe import rowwise_scaling


@pytest.mark.parametrize("kind", look.KINDS)
def test_list_as_text_and_as_json(command: Command, kind: str) -> None:
    listed = json.loads(command("list", kind, "--json").out)
    assert listed
    assert all(set(row) == {"name", "about"} and row["about"] and "\n" not in row["about"] for row in listed)
    lines = command("list", kind).out.splitlines()
    assert [line.split()[0] for line in lines] == [row["name"] for row in listed]


def test_list_recipes_tells_what_each_does(command: Command) -> None:
    listed = {row["name"]: row["about"] for row in json.loads(command("list", "recipes", "--json").out)}
    current = "float8_current_scaling"
    known = {"delayed_scaling", "float8_block_scaling", current, f"{current}_dpa", f"{current}_e4m3", "rowwise_scaling"}
    known |= {"delayed_scaling_e4m3", "rowwise_scaling_bf16_wgrad"}
    known |= {f"{current}_bf16_{part}" for part in ("end", "first", "wgrad")}
    assert set(listed) == known | {"mxfp8_block_scaling", "nvfp4_block_scaling", "nvfp4_block_scaling_bf16_end"}
    assert "emulated exactly" in listed["nvfp4_block_scaling"]
    assert "amaxes of the steps before" in listed["delayed_scaling"]
    assert "transformer_engine" in command("list", "layers").out


def test_a_plan_says_which_steps_over_ranks_no_machine_can_divide(command: Command) -> None:
    asked = ("plan", "speed", "--device", "cuda", "--seeds", 1, "--gpus-per-trial", 2, "--parallel", "fsdp2")
    refused, planned = {}, json.loads(command(*asked, "--json").out)["trials"]
    for trial in planned:
        p = trial["problem"]
        if "blocks" in p or "optimizer" in p or trial["mode"] == "compile-reduce-overhead":
            refused[trial["name"]] = trial["unsupported"]
        else:
            assert "unsupported" not in trial
    done = command(*asked).out
    for line in done.splitlines()[-len(planned) :]:
        name, *more = line.rpartition("  ")[2].split()
        assert more == (["(unsupported)"] if name in refused else [])
    said = " ".join(done.split())
    fused = sum("blocks" in trial["problem"] for trial in planned)
    assert (
        f"unsupported: {fused} trials: parallel fsdp2: fused blocks pass by the modules that gather the weights;"
        in said
    )
    assert "unsupported: 3 trials: parallel fsdp2: torch.compile's own CUDA graphs have no gathers of weights;" in said
    assert all(f": {reason} " in said for reason in refused.values())


def test_a_plan_says_of_which_of_te_benchs_models_the_layers_do_not_divide(command: Command) -> None:
    """Of a suite that chooses its modes itself, too: GPT-2's 12 heads go to 2 and 4 ranks, and not to 8."""
    asked = ("plan", "scaling", "--device", "cuda", "--seeds", 1, "--only", "*-tp-x*/cudnn/bf16/*")
    planned = json.loads(command(*asked, "--json").out)["trials"]
    refused = {(t["problem"]["world"], t.get("unsupported")) for t in planned if "rival" not in t["problem"]}
    said = "parallel tp: the 12 heads of gpt2 do not divide into 8 ranks; give fewer, or choose ddp"
    assert refused == {(2, None), (4, None), (8, said)}


def test_a_plan_says_which_recipes_weights_are_not_gathered_in_fp8(command: Command) -> None:
    asked = ("plan", "fp8", "--device", "cuda", "--seeds", 1, "--gpus-per-trial", 2, "--parallel", "fsdp2")
    asked += ("--gather", "fp8", "--only", "*/eager/*")
    planned = json.loads(command(*asked, "--json").out)["trials"]
    refused = {trial["recipe"]: trial["unsupported"] for trial in planned if "unsupported" in trial}
    assert set(refused) == {"float8_block_scaling", "rowwise_scaling"}
    assert {trial["recipe"] for trial in planned} - set(refused) == {None, "delayed_scaling", "float8_current_scaling"}
    assert all(": gather fp8: " in reason and "more than one scale a weight" in reason for reason in refused.values())


def test_list_shows_suites_unless_told_otherwise_and_there_is_a_version(command: Command) -> None:
    assert command("list").out == command("list", "suites").out
    done = command("--version")
    assert (done.code, done.out) == (0, f"te-bench {__version__}\n")


def test_plan_gives_the_trials_that_run_would_do(command: Command) -> None:
    shown = json.loads(command("plan", "quick", "--device", "cpu", "--json", "--cache", "cache").out)
    trials = [Trial.from_json({key: one[key] for key in one.keys() - {"id", "name"}}) for one in shown["trials"]]
    assert [(t.id, t.name) for t in trials] == [(trial["id"], trial["name"]) for trial in shown["trials"]]
    assert shown["baseline"] in {t.cell for t in trials}
    text = command("plan", "quick", "--device", "cpu", "--cache", "cache").out.splitlines()
    many = len(trials)
    assert text[0] == f"{many} trials: Quick look: tiny GPT, 2 x 64 tokens"  # the answer first
    assert text[1].startswith("time: not known, because none of these trials has run")
    assert [line.rpartition("  ")[2] for line in text[-many:]] == [t.name for t in trials]  # as --only takes them
    assert text[-many].startswith("train step: PyTorch eager fp32, written-out attention  ")


def test_doctor_says_what_can_run_and_why_not(command: Command) -> None:
    found = json.loads(command("doctor", "--json").out)
    assert {"machine", "packages", "precisions", "modes"} <= set(found)
    assert any(section.startswith("attention (") for section in found)
    shown = command("doctor").out
    assert "attention (" in shown
    assert "te-bench advise --model" in shown.splitlines()[-1]
    assert "next:" not in command("doctor", "--gpu", "H200").out
    assert set(found["FP8 recipes"]) == set(plugins.names("te_bench.models.recipe"))
    assert all(answer.startswith("ok") for answer in found["FP8 recipes"].values())  # emulated where there is no GPU


def test_doctor_promises_neither_a_recipe_that_a_gpu_cannot_run_nor_to_compile_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setattr(rowwise_scaling.RowwiseScaling, "unsupported", lambda self, device, capability: "no rows here")
    monkeypatch.setattr(environment, "nvidia_gpus", list)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = doctor.examine()
    assert found["FP8 recipes"]["rowwise_scaling"] == "no rows here"
    assert found["FP8 recipes"]["delayed_scaling"].startswith("ok")
    assert found["precisions"]["fp8"] == "see the recipes"
    assert found["modes"]["compile"] == "needs a C++ compiler (g++ or clang++)"
    assert found["modes"]["eager"] == "ok"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor.examine()["modes"]["compile"] == "ok"


def test_doctor_says_why_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, cuda=None)
    monkeypatch.setitem(environment.nvidia_gpus()[0], "memory_bytes", 141 * 2**30)
    machine = doctor.examine()["machine"]
    assert machine["device"] == "cpu"
    assert machine["gpu use"].startswith("torch 2.13.0 is built without CUDA")


@pytest.mark.parametrize("arguments", [("doctor",), ("plan", "quick")])
def test_ctrl_c_is_no_verdict(command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """Wherever it hits: 130, for click's own 1 means that FP8 is worse."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    monkeypatch.setattr("te_bench.experiments.plan.resolve", interrupted)
    done = command(*arguments)
    assert done.code == 130
    assert done.err == "\nStopped.\n"


def test_doctor_tells_of_another_gpu_by_its_name(command: Command) -> None:
    found = json.loads(command("doctor", "--gpu", "l40s", "--json").out)
    assert found["GPU"]["name"] == "NVIDIA L40S"
    assert found["GPU"]["shared memory of a program"] == "99 KiB"
    assert found["AdamW"]["triton"] == "compiles, never run"
    done = command("doctor", "--gpu", "GTX 1080")
    assert done.code != 0
    assert "unknown GPU 'GTX 1080'. Did you mean" in done.err
