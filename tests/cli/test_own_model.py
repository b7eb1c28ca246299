"""A user's model from the command line to the report."""

import json
from pathlib import Path

import pytest
from driving import rows, te_bench
from in_process import Command
from own_models import MODULE

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32},
    **{"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "only", "named"),
    [("own:make", "*64/own/bf16*,*64/flash/bf16*", "own-make"), ("./llama", "*64/own/fp8/float8*", "llama")],
)
def test_a_model_is_checked_timed_and_reported(model: str, only: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    sizes = ["--model", model, "--batch", "2", "--tokens", "8", "--device", "cpu", "--only", only]
    done = te_bench("run", "speed", *sizes, cwd=tmp_path, timeout=300, main=None)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(tmp_path / "runs" / f"speed-{named}")
    assert {row["outcome"] for row in written} == {"ok"}
    for row in written:
        assert row["check"]["reference"] == "math attention, fp64, same weights"
        assert len(row["samples"]["latency_s"]) == 20
        if row["trial"]["precision"] == "fp8":
            assert row["work"]["ran"]["gemm_fp8"] >= 3 * 8
        if row["trial"]["attention"] == "own":
            assert row["work"]["chosen"] == "flash"
    assert "left out: heads, fused blocks" in done.stdout


@pytest.mark.usefixtures("asked_here")
def test_a_model_that_raises_is_one_sentence_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    done = command("run", "speed", "--model", "own:raises", "--device", "cpu")
    assert done == (2, "", "te-bench: own:raises: it raised RuntimeError: no such thing\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("verb", [("run", "nanogpt"), ("run", "memory"), ("advise",)])
def test_a_model_beyond_this_machine_s_memory_is_one_sentence_and_leaves_nothing(verb, command, tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    done = command(*verb, "--model", "own:huge", "--device", "cpu", "--tokens", "16")
    assert done.code == 2
    assert "te-bench: own:huge: weights, gradients and AdamW's moments of" in done.err
    assert done.err.endswith("give it fewer or narrower layers, or take a machine with more memory\n")
    assert not (tmp_path / "runs").exists()
