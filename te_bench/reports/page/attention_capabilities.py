"""Make the table of docs/attention.md: what each attention backend can do, by the backends' own answers."""

from collections.abc import Callable
from dataclasses import replace

from te_bench.kernels import attention
from te_bench.kernels.attention import Backend, Problem
from te_bench.reports.page.table import Table, filled, word

#: GPT-2's shape on an H200; the other problems differ from it in one setting.
H200 = Problem(
    batch=12,
    heads=12,
    length=1024,
    head_dim=64,
    dtype="bf16",
    causal=True,
    dropout=0.0,
    device="cuda",
    capability=(9, 0),
)
WIDTHS = (64, 128, 256, 512)
DTYPES = ("bf16", "fp16", "fp32", "fp64")


def table() -> Table:
    """Return a row for each backend: yes, no, or what it does instead."""
    rows = []
    for name in attention.names():
        if name == attention.AUTO:
            continue
        can = _asker(attention.load(name))
        rows.append(
            {
                "Backend": name,
                "CPU": _yes(can(replace(H200, device="cpu", capability=None, dtype="fp32"))),
                "GPUs from": _gpus(can),
                "dtypes": ", ".join(dtype for dtype in DTYPES if can(replace(H200, dtype=dtype))),
                "Widest head": max((width for width in WIDTHS if can(replace(H200, head_dim=width))), default=0),
                "Head of 60": _yes(can(replace(H200, head_dim=60))),
                "Values of 32": _yes(can(replace(H200, v_head_dim=32))),
                "Shared heads": _yes(can(replace(H200, kv_heads=4))),
                "Mask": _yes(can(replace(H200, causal=False, mask=True))),
                "Window": _instead(attention.load(name), can, replace(H200, window=(255, 0)), "as a mask"),
                "Packed": _instead(attention.load(name), can, replace(H200, packed=True), "padded"),
                "Dropout": _yes(can(replace(H200, dropout=0.1))),
                "Causal, T ≠ S": _yes(can(replace(H200, kv_length=2048))),
            }
        )
    shown = [{title: word(said) for title, said in row.items()} for row in rows]
    return filled("capabilities", "What a backend can", shown, text_columns=len(rows[0]))


def _asker(backend: Backend) -> Callable[[Problem], bool]:
    """Return a function that says whether the backend can do a problem, if its package is installed."""

    def can(problem: Problem) -> bool:
        reason = backend.unsupported(problem)
        return reason is None or reason.startswith("pip install")

    return can


def _gpus(can: Callable[[Problem], bool]) -> str:
    """Return the least compute capability that suffices; "only" if later ones do not."""
    asked = [replace(H200, dtype=dtype) for dtype in ("bf16", "fp32")]
    named = {"any": (7, 5), "8.0": (8, 0), "8.9": (8, 9), "9.0": (9, 0), "more": (10, 0)}
    enough = [name for name, capability in named.items() if any(can(replace(p, capability=capability)) for p in asked)]
    return "no" if not enough else enough[0] if enough[-1] == "more" else f"{enough[0]} only"


def _instead(backend: Backend, can: Callable[[Problem], bool], problem: Problem, otherwise: str) -> str:
    """Return yes if the backend does the problem itself, `otherwise` if it can pose it so, else no."""
    posed = attention.posed(backend, problem)
    if not can(posed):
        return "no"
    return "yes" if posed == problem else otherwise


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
