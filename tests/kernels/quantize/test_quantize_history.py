"""The step of delayed scaling against a plain loop over slots, over many steps of changing amaxes."""

import gc
import math
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from te_bench.kernels.quantize import history as _history

MODES = (
    "reference",
    pytest.param(
        "interpreter", marks=pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
ALGORITHMS = ("max", "most_recent")
State = list[Tensor]  # history, scale, limit, nonfinite


def make(length: int, sizes: Sequence[int], device: str) -> list[State]:
    return [
        [
            torch.zeros(length, n, device=device),
            torch.ones(n, device=device),
            torch.full((n,), 448.0 if i % 2 == 0 else 57344.0, device=device),
            torch.zeros(n, dtype=torch.int64, device=device),
        ]
        for i, n in enumerate(sizes)
    ]


def step(states: list[State], mode: str, margin: float, algorithm: str) -> None:
    if mode == "interpreter":
        _history.launch([tuple(state) for state in states], margin, algorithm)
        return
    histories, scales, limits, nonfinite = zip(*states, strict=True)
    _history.update(histories, scales, limits, margin=margin, algorithm=algorithm, nonfinite=nonfinite)


def plainly(
    history: np.ndarray, scale: np.ndarray, limit: float, bad: np.ndarray, margin: float, algorithm: str
) -> None:
    """One slot after the other, as the words of `update` say."""
    for j in range(history.shape[1]):
        if history[0, j] == 0:
            continue
        finite = bool(np.isfinite(history[0, j]))
        if not finite:
            bad[j] += 1
            history[0, j] = 0
        amax = history[0, j] if algorithm == "most_recent" else history[:, j].max()
        if finite and amax > 0:
            with np.errstate(over="ignore"):
                new = np.float32(limit) / np.float32(amax) / np.float32(2.0**margin)
            scale[j] = min(new, np.finfo(np.float32).max)
        column = [*history[1:, j], history[0, j]]
        history[:, j] = column
        history[0, j] = 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 5, 20])
@pytest.mark.parametrize("mode", MODES)
def test_fifty_steps(mode: str, length: int, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_history, "LONGEST", 8)  # so that 20 rows are three pieces
    rng = np.random.default_rng(length)
    sizes, margin = (3, 20), 1.5 if length == 5 else 0
    states = make(length, sizes, "cuda" if mode == "cuda" else "cpu")
    plain = [[t.cpu().numpy().copy() for t in state] for state in states]
    for at in range(20 if mode == "interpreter" else 50):
        for state, (history, scale, limit, bad) in zip(states, plain, strict=True):
            n = history.shape[1]
            staged = (rng.lognormal(size=n) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
            odd = rng.choice([1.0, 0.0, math.inf, math.nan, 1e-42, 3e38], size=n, p=[0.7, 0.1, 0.05, 0.05, 0.05, 0.05])
            staged = np.where(odd == 1, staged, odd).astype(np.float32)
            state[0][0] = torch.from_numpy(staged)
            history[0] = staged
            plainly(history, scale, limit[0], bad, margin, algorithm)
        step(states, mode, margin, algorithm)
        for state, wanted in zip(states, plain, strict=True):
            for ours, theirs in zip(state, wanted, strict=True):
                assert (ours.cpu().numpy() == theirs).all(), at


@pytest.mark.parametrize("mode", MODES)
def test_one_infinity_freezes_nothing(mode: str) -> None:
    (state,) = make(4, (2,), "cuda" if mode == "cuda" else "cpu")
    history, scale, _, nonfinite = state
    for amaxes, scales in (((2.0, 2.0), 224.0), ((math.inf, math.nan), 224.0), ((4.0, 4.0), 112.0)):
        history[0] = torch.tensor(amaxes)
        step([state], mode, 0, "max")
        assert scale.tolist() == [scales, scales]
    assert nonfinite.tolist() == [1, 1]
    assert history.isfinite().all()
    assert history[:, 0].tolist() == [0.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_gathered_nothing_stays_as_it_is(mode: str) -> None:
    (state,) = make(4, (3,), "cuda" if mode == "cuda" else "cpu")
    history, scale, _, _ = state
    history.copy_(torch.arange(12.0).view(4, 3))
    history[0] = torch.tensor([0.0, 5.0, 0.0])
    scale.fill_(7.0)
    step([state], mode, 0, "max")
    assert history[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert history[:, 1].tolist() == [0.0, 7.0, 10.0, 5.0]
    assert scale.tolist() == [7.0, pytest.approx(44.8), 7.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_history_with_infinity_in_it_keeps_the_scale(mode: str) -> None:
    (state,) = make(4, (1,), "cuda" if mode == "cuda" else "cpu")
    state[0][:, 0] = torch.tensor([1.0, math.inf, 2.0, 3.0])
    step([state], mode, 0, "max")
    assert state[1].item() == 1.0
    step([state], mode, 0, "max")
    state[0][0] = 1.0
    step([state], mode, 0, "max")
    assert state[1].item() == pytest.approx(448 / 3)


def test_what_is_wrong_is_named() -> None:
    history, scale, limit, nonfinite = make(4, (3,), "cpu")[0]
    for lists, algorithm, named in (
        (([history], [scale], [limit], [nonfinite]), "median", "median"),
        (([history], [scale[:2]], [limit], [nonfinite]), "max", r"\(2,\)"),
        (([history.t().contiguous().t()], [scale], [limit], [nonfinite]), "max", "contiguous"),
        (([history], [], [limit], [nonfinite]), "max", "shorter"),
    ):
        with pytest.raises(ValueError, match=named):
            _history.update(*lists[:3], margin=0, algorithm=algorithm, nonfinite=lists[3])
    _history.update([], [], [], margin=0, algorithm="max", nonfinite=[])


class Elsewhere(Tensor):
    """A tensor that says it is on the GPU `place`."""

    place: int

    def get_device(self) -> int:
        return self.place


def test_states_of_several_devices_move_on_each_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules of a process take the step together, wherever they are; a launch reaches one GPU."""
    launched: list[list[Tensor]] = []
    monkeypatch.setattr(_history, "launch", lambda states, *how: launched.append([state[0] for state in states]))
    states = make(4, (3, 2, 3, 2), "cpu")
    for state, place in zip(states, (1, 0, -1, 1), strict=True):
        state[0][0] = 2.0
        if place >= 0:
            state[0] = state[0].as_subclass(Elsewhere)
            state[0].place = place
    step(states, "reference", 0, "max")
    assert [[id(history) for history in found] for found in launched] == [
        [id(states[0][0]), id(states[3][0])],
        [id(states[1][0])],
    ]
    assert states[2][1].tolist() == [224.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16, 1024])
def test_many_modules_in_one_launch_and_in_a_graph(length: int) -> None:
    sizes = (3, 2) * 48
    states, wanted = (make(length, sizes, device) for device in ("cuda", "cpu"))
    step(states, "cuda", 0, "max")  # caches the table of addresses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(states, "cuda", 0, "max")
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for ours, theirs in zip(states, wanted, strict=True):
            theirs[0][0] = torch.rand(theirs[0].shape[1], generator=generator)
            ours[0][0] = theirs[0][0].cuda()
        graph.replay()
        step(wanted, "reference", 0, "max")
    for ours, theirs in zip(states, wanted, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_graph_s_table_outlives_those_of_many_models(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the table at each replay and does not keep it: what stood there next would be taken for addresses."""
    monkeypatch.setattr(_history, "_tables", {})
    monkeypatch.setattr(_history, "_captured", {})
    kept, others = {}, [make(2, (3,), "cuda" if mode == "cuda" else "cpu") for _ in range(_history.TABLES + 2)]
    graph = torch.cuda.CUDAGraph() if mode == "cuda" else None
    for capturing in (False, True):
        states = make(2, (3,), "cuda" if mode == "cuda" else "cpu")
        step(states, mode, 0, "max")
        if graph is not None and capturing:
            with torch.cuda.graph(graph):
                step(states, mode, 0, "max")
        elif capturing:
            with monkeypatch.context() as patch:
                patch.setattr(_history, "_capturing", lambda device: True)
                step(states, mode, 0, "max")
        kept[capturing] = states, weakref.ref(list(_history._tables.values())[-1])
    for other in others:
        step(other, mode, 0, "max")
    gc.collect()
    assert kept[False][1]() is None
    assert kept[True][1]() is not None
    if graph is not None:
        torch.cuda.empty_cache()
        ((history, scale, _, _),), _ = kept[True]
        history[0] = 2.0
        graph.replay()
        assert scale.tolist() == [224.0] * 3
