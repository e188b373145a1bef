"""Where the trainer's text comes from, and how its sequences are split over ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onecopy.errors import ConfigError
from onecopy.training import data
from onecopy.training.data import Corpus, Shard


def shard(rank: int, world_size: int, batch: int = 3, context: int = 8) -> Shard:
    return Shard(rank=rank, world_size=world_size, batch=batch, context=context)


TEXT = torch.arange(1000, dtype=torch.int64).remainder(251).to(torch.uint8)


def test_python_topics_are_english_without_runs_of_blanks() -> None:
    text = data.python_topics()
    assert len(text) > 200_000
    assert b"  " not in text
    assert text.count(b" the ") > 1000


def test_the_last_twentieth_of_each_file_is_held_out(tmp_path: Path) -> None:
    for name, letter in (("b.txt", "b"), ("a.txt", "a")):
        (tmp_path / name).write_text(letter * 200)
    corpus = data.load_corpus([tmp_path], context=8)
    assert bytes(corpus.train.tolist()) == b"a" * 190 + b"b" * 190
    assert bytes(corpus.held_out.tolist()) == b"a" * 10 + b"b" * 10


def test_text_is_utf8_bytes(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("\N{GREEK SMALL LETTER ALPHA}" * 200, encoding="utf-8")
    corpus = data.load_corpus([file], context=8)
    assert corpus.name == "text"
    assert len(corpus.train) + len(corpus.held_out) == 400


def test_bad_files_give_advice(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "folder").mkdir()
    cases = {
        "missing": "no file .*missing",
        "empty": "is empty",
        "short": "fewer than the 9 bytes",
        "latin": "not UTF-8 text .byte 3 is 0xe9",
        "folder": "has no .txt files",
    }
    for name, advice in cases.items():
        with pytest.raises(ConfigError, match=advice):
            data.load_corpus([tmp_path / name], context=8)


def test_ranks_together_see_the_batch_of_one_process() -> None:
    whole = data.Batches(TEXT, shard(0, 1, batch=6), seed=1)
    parts = [data.Batches(TEXT, shard(rank, 2), seed=1) for rank in range(2)]
    for _ in range(3):
        ((tokens, targets),) = next(whole)
        seen = [next(part)[0] for part in parts]
        assert torch.equal(tokens, torch.cat([part[0] for part in seen]))
        assert torch.equal(targets, torch.cat([part[1] for part in seen]))
        assert not torch.equal(seen[0][0], seen[1][0])


def steps(splits: list[tuple[int, int, int]], num: int) -> list[Tensor]:
    """Sequences of each step, sorted; after each step all ranks go on as the next split says."""
    sequences = []
    place = data.Batches(TEXT, shard(0, 1), seed=1).state_dict()
    for number in range(num):
        world_size, batch, accumulate = splits[number % len(splits)]
        ranks = [
            data.Batches(TEXT, shard(rank, world_size, batch), 1, accumulate)
            for rank in range(world_size)
        ]
        for one in ranks:
            one.load_state_dict(place)
        drawn = [next(one) for one in ranks]
        assert all(len(one) == accumulate for one in drawn)
        sequences.append(torch.cat([tokens for one in drawn for tokens, _ in one]))
        places = [one.state_dict() for one in ranks]
        place = places[0]
        assert all(torch.equal(one["generator"], place["generator"]) for one in places)
    return [one[one.argsort(dim=0)[:, 0]] for one in sequences]


def test_resumed_on_other_ranks_the_steps_have_the_same_sequences() -> None:
    expected = steps([(1, 12, 1)], 6)
    assert len({str(one) for one in expected}) == 6
    for splits in ([(1, 3, 4)], [(2, 6, 1), (3, 4, 1), (1, 6, 2), (2, 3, 2)], [(12, 1, 1)]):
        for one, other in zip(steps(splits, 6), expected, strict=True):
            assert torch.equal(one, other)


def test_targets_are_the_next_bytes_and_seeds_matter() -> None:
    ((tokens, targets),) = next(data.Batches(TEXT, shard(0, 2), seed=1))
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == torch.int64
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert not torch.equal(tokens, next(data.Batches(TEXT, shard(0, 2), seed=2))[0][0])


def test_every_start_can_be_drawn() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    drawn = itertools.islice(data.Batches(text, shard(0, 1), seed=0), 50)
    firsts = {int(first) for ((tokens, _),) in drawn for first in tokens[:, 0]}
    assert firsts == {0, 1}


@pytest.mark.parametrize("world_size", [1, 2, 3, 200])
def test_held_out_batches_are_alike_on_all_ranks(world_size: int) -> None:
    """As many and of the same sizes; what is counted is each of the 124 sequences once."""
    of_ranks = [data.held_out_batches(TEXT, shard(rank, world_size)) for rank in range(world_size)]
    shapes = [[tokens.shape for tokens, _ in batches] for batches in of_ranks]
    assert all(shape == shapes[0] for shape in shapes)
    counted = [
        tuple(sequence.tolist())
        for batches in of_ranks
        for tokens, targets in batches
        for sequence in torch.cat([tokens[:, :1], targets], dim=1)
        if not (sequence == data.IGNORED).any()
    ]
    assert len(counted) == len(set(counted)) == 124
    assert sum(len(tokens) for tokens, _ in of_ranks[0]) == math.ceil(124 / world_size)


def test_held_out_batches_are_limited_and_spread() -> None:
    batches = data.held_out_batches(TEXT, shard(0, 1, batch=2), max_sequences=4)
    assert [tokens[0, 0].item() for tokens, _ in batches] == [0, (62 * 8) % 251]


def test_unigram_baseline() -> None:
    halves = torch.tensor([0, 1] * 4000, dtype=torch.uint8)
    corpus = Corpus(name="halves", train=halves, held_out=halves[:100])
    assert data.unigram_bits(corpus) == pytest.approx(1.0, abs=0.05)
    unseen = Corpus(name="unseen", train=halves, held_out=halves[:1] + 7)
    assert data.unigram_bits(unseen) == pytest.approx(math.log2(8000 + 256))
