"""What each attention backend cannot do, it says, and it never falls back."""

import dataclasses

import pytest
from test_contract import DTYPES, a_problem, draw, run

from te_bench.kernels import attention
from te_bench.kernels.attention.backends import flash4 as flash4_module

# What each cannot do.

FLASH_LIMITS = [
    ({"dtype": "fp32"}, "dtype fp32"),
    ({"capability": (7, 5)}, "7.5 < 8.0"),
]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mem_efficient", {"device": "cpu"}, "NVIDIA GPU"),
        ("mem_efficient", {"head_dim": 12}, "multiple of 8"),
        ("mem_efficient", {"head_dim": 6, "dtype": "fp32"}, "multiple of 4"),
        ("cudnn", {"device": "cpu"}, "NVIDIA GPU"),
        ("cudnn", {"head_dim": 60}, "head_dim 60"),
        ("cudnn", {"head_dim": 136}, "head_dim 136"),
        ("cudnn", {"length": 1}, "length 1"),
        ("flash", {"device": "cpu", "dropout": 0.1}, "dropout"),
        ("flash", {"head_dim": 264}, "head_dim 264 > 256"),
        ("flex", {"device": "cpu"}, "needs a GPU"),
        ("flex", {"dropout": 0.1}, "dropout 0.1"),
        ("flex", {"head_dim": 8}, "head_dim 8 < 16"),
        ("flex", {"v_head_dim": 8}, "head_dim 8 < 16"),
        ("flex", {"mask": True}, "mask"),
        ("flex", {"dtype": "fp64"}, "dtype fp64"),
        ("mem_efficient", {"dtype": "fp64"}, "dtype fp64"),
        ("mem_efficient", {"v_head_dim": 12}, "head_dim 12"),
        ("mem_efficient", {"kv_length": 0}, "length 0"),
        ("cudnn", {"v_head_dim": 32}, "32 of v"),
        ("cudnn", {"kv_length": 1}, "length 1"),
        ("cudnn", {"length": 1, "kv_length": 5, "dropout": 0.1}, "one query"),
        ("cudnn", {"mask": True}, "mask"),
        ("cudnn", {"kv_length": 9}, "1024 queries and 9 keys"),
        ("flash", {"mask": True}, "mask"),
        ("flash", {"kv_length": 9}, "1024 queries and 9 keys"),
        ("flash", {"v_head_dim": 32}, "32 of v"),
        ("flash", {"kv_length": 0}, "length 0"),
        ("cudnn", {"kv_length": 0}, "length 0"),
        ("cudnn", {"length": 0}, "length 0"),
        ("flash4", {"device": "cpu"}, "NVIDIA GPU"),
        ("flash4", {"capability": (8, 0)}, "8.0 < 9.0"),
        ("flash4", {"dtype": "fp32"}, "dtype fp32"),
        ("flash4", {"head_dim": 264}, "head_dim 264"),
        ("flash4", {"head_dim": 256, "capability": (10, 0)}, "head_dim 256"),
        ("flash4", {"v_head_dim": 12}, "head_dim 12"),
        ("flash4", {"dropout": 0.1}, "dropout 0.1"),
        ("flash4", {"mask": True}, "mask"),
        ("flash4", {"kv_length": 9}, "1024 queries and 9 keys"),
        ("triton", {"capability": (7, 5)}, "7.5 < 8.0"),
        ("triton", {"dtype": "fp64"}, "dtype fp64"),
        ("triton", {"head_dim": 264}, "head_dim 264 > 256"),
        ("triton", {"v_head_dim": 264}, "head_dim 264 > 256"),
        *[(name, changes, reason) for name in ("flash", "cudnn") for changes, reason in FLASH_LIMITS],
    ],
)
def test_what_a_backend_cannot_do_it_says(name, changes, reason, monkeypatch):
    monkeypatch.setattr(flash4_module, "INSTALLED", True)
    h200 = dataclasses.replace(a_problem(), capability=(9, 0))
    backend = attention.load(name)
    assert backend.unsupported(h200) is None
    said = backend.unsupported(dataclasses.replace(h200, **changes))
    assert said is not None
    assert reason in said


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4_module, "INSTALLED", False)
    h200 = dataclasses.replace(a_problem(), capability=(9, 0))
    assert attention.load("flash4").unsupported(h200) == "pip install 'flash-attn-4>=4.0.0b3'"


@pytest.mark.parametrize("name", ["auto", "manual", "math"])
def test_ordinary_operators_can_do_everything(name: str) -> None:
    for device in ("cpu", "cuda"):
        for dtype in DTYPES:
            problem = a_problem((1, 1, 3, 5), dtype, dropout=0.5, causal=False, mask=True, kv_length=7, v_head_dim=9)
            assert attention.load(name).unsupported(dataclasses.replace(problem, device=device)) is None


@pytest.mark.parametrize("name", ["mem_efficient", "cudnn"])
def test_a_pinned_kernel_never_falls_back(name: str) -> None:
    problem = a_problem((1, 1, 16, 16), "fp32", "cpu")
    assert attention.load(name).unsupported(problem)
    with pytest.raises(RuntimeError):
        run(attention.load(name), problem, draw(problem))
