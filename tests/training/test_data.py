from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from te_bench.training.corpus import Corpus
from te_bench.training.data import RANDOM_WINDOWS, Batches, validation, windows

Make = Callable[..., Corpus]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A corpus whose training tokens count up from 0 and whose validation tokens count up from 1000."""

    def build(train: int = 500, val: int = 101, vocab: int = 2000) -> Corpus:
        np.arange(train, dtype="<u2").tofile(tmp_path / "train.bin")
        np.arange(1000, 1000 + val, dtype="<u2").tofile(tmp_path / "val.bin")
        paths = {"train": tmp_path / "train.bin", "val": tmp_path / "val.bin"}
        return Corpus("text:x", "bytes", "0", vocab, **paths, train_tokens=train, val_tokens=val, dtype="uint16")

    return build


def batches(corpus: Corpus | None, **changes: Any) -> Batches:
    return Batches(corpus, **{"block": 8, "batch": 4, "vocab": 2000, "seed": 1, **changes})


def test_windows_are_runs_of_the_training_part(make: Make) -> None:
    x, y = batches(make()).at(0)
    assert x.shape == y.shape == (4, 8)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(x, x[:, :1] + torch.arange(8))
    assert torch.equal(y, x + 1)


def test_every_window_can_come_and_none_leaves_the_file(make: Make) -> None:
    stream = batches(make(train=12), batch=64)
    starts = torch.cat([stream.at(step)[0][:, 0] for step in range(10)])
    assert sorted(set(starts.tolist())) == [0, 1, 2, 3]  # 12 tokens hold 4 windows of 8 + 1
    assert starts.bincount().min() > 100  # 160 expected of 640, standard deviation 11


def test_the_smallest_corpus_has_one_window(make: Make) -> None:
    x, y = batches(make(train=9, val=9)).at(3)
    assert x[:, 0].unique().tolist() == [0]
    assert y[:, -1].unique().tolist() == [8]


def test_a_batch_depends_on_seed_and_step_alone(make: Make) -> None:
    corpus = make()
    forwards = [batches(corpus).at(step)[0] for step in range(5)]
    again = batches(corpus)
    backwards = [again.at(step)[0] for step in reversed(range(5))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    others = [batches(corpus, seed=2).at(0)[0], *forwards[1:]]
    assert not any(torch.equal(forwards[0], other) for other in others)


@pytest.mark.parametrize("random", [False, True])
def test_neither_evaluation_nor_the_global_generators_change_training(make: Make, random: bool) -> None:
    corpus = None if random else make()
    alone = [batches(corpus).at(step)[0] for step in range(6)]
    stream, mixed = batches(corpus), []
    for step in range(6):
        torch.manual_seed(step)
        np.random.seed(step)
        torch.rand(step + 1)
        list(validation(corpus, block=8, batch=5, vocab=2000))
        mixed.append(stream.at(step)[0])
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


@pytest.mark.parametrize("random", [False, True])
def test_data_draws_nothing_from_the_global_generators(make: Make, random: bool) -> None:
    corpus = None if random else make()
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0)
    np.random.seed(0)
    batches(corpus).at(0)
    list(validation(corpus, block=8, batch=5, vocab=2000))
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])


def test_validation_is_every_whole_window_once_and_in_order(make: Make) -> None:
    corpus = make(val=101)
    found = list(validation(corpus, block=8, batch=5, vocab=2000))
    assert [x.shape[0] for x, _ in found] == [5, 5, 2]
    assert torch.cat([x for x, _ in found]).flatten().tolist() == list(range(1000, 1096))
    assert torch.cat([y for _, y in found]).flatten().tolist() == list(range(1001, 1097))
    assert windows(corpus, 8) == 12


@pytest.mark.parametrize(("val", "count"), [(9, 1), (16, 1), (17, 2), (18, 2)])
def test_the_last_target_must_be_there(make: Make, val: int, count: int) -> None:
    assert sum(x.shape[0] for x, _ in validation(make(val=val), block=8, batch=5, vocab=2000)) == count


def test_max_tokens_takes_the_first_windows(make: Make) -> None:
    corpus = make()
    (x, _), *rest = validation(corpus, block=8, batch=5, vocab=2000, max_tokens=31)
    assert x[:, 0].tolist() == [1000, 1008, 1016]
    assert not rest
    spread = validation(corpus, block=8, batch=5, vocab=2000, every=5)
    assert torch.cat([x for x, _ in spread])[:, 0].tolist() == [1000, 1040, 1080]
    assert windows(corpus, 8, 10**9) == windows(corpus, 8)
    with pytest.raises(ValueError, match="max_tokens 7 is less than a block of 8"):
        validation(corpus, block=8, batch=5, vocab=2000, max_tokens=7)


def test_random_tokens_fill_the_vocabulary() -> None:
    x, y = batches(None, batch=64, block=64, vocab=7, seed=3).at(0)
    assert torch.equal(x[:, 1:], y[:, :-1])
    counts = torch.bincount(x.flatten(), minlength=7)
    assert len(counts) == 7
    assert (counts - 64 * 64 / 7).abs().max() < 120  # five standard deviations of 22.4


def test_random_validation_is_fixed_and_is_not_the_training_stream() -> None:
    first, again = (torch.cat([x for x, _ in validation(None, block=8, batch=7, vocab=50)]) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (RANDOM_WINDOWS, 8)
    stream = batches(None, batch=RANDOM_WINDOWS, vocab=50, seed=0)
    assert not torch.equal(first, stream.at(0)[0])


def test_a_vocabulary_too_small_for_the_tokens_is_refused(make: Make) -> None:
    corpus = make(vocab=300)
    batches(corpus, vocab=300)
    with pytest.raises(ValueError, match="'bytes' has 300 tokens and the model's vocabulary 299"):
        batches(corpus, vocab=299)
    with pytest.raises(ValueError, match="at least 300"):
        validation(corpus, block=8, batch=1, vocab=299)


@pytest.mark.parametrize("changes", [{"block": 0}, {"batch": 0}, {"vocab": 0}, {"seed": -1}])
def test_sizes_out_of_range_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        batches(None, **changes)


def test_a_corpus_shorter_than_a_block_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"shorter than a block.*train part has 8 tokens.*needs 9"):
        batches(make(train=8))
    with pytest.raises(ValueError, match=r"shorter than a block.*val part has 8 tokens.*needs 9"):
        validation(make(val=8), block=8, batch=1, vocab=2000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gets_the_batches_of_the_cpu(make: Make) -> None:
    corpus = make()
    on_gpu = Batches(corpus, block=8, batch=4, vocab=2000, seed=1, device="cuda")
    for step in range(20):
        for ours, theirs in zip(on_gpu.at(step), batches(corpus).at(step), strict=True):
            assert ours.is_cuda
            assert torch.equal(ours.cpu(), theirs)


def test_each_window_comes_once_in_an_order_of_the_seed(make: Make) -> None:
    corpus = make(train=8 * 12 + 1)  # 12 windows of 8 and the last one's targets
    starts = []
    for seed in (1, 2):
        stream = batches(corpus, seed=seed, once=True)
        x, y = (torch.cat(part) for part in zip(*(stream.at(step) for step in range(3)), strict=True))
        assert sorted(x.flatten().tolist()) == list(range(96))  # each token once
        assert torch.equal(y, x + 1)
        starts.append(x[:, 0].tolist())
        with pytest.raises(ValueError, match="step 3 of 4 windows: the text has 12 that are each taken once"):
            stream.at(3)
    assert starts[0] != starts[1] != sorted(starts[1])
    again = batches(corpus, seed=2, once=True)
    assert again.at(2)[0][:, 0].tolist() == starts[1][8:]  # whatever came before


def test_random_tokens_have_no_last_window() -> None:
    assert batches(None, once=True).at(10**6)[0].shape == (4, 8)
