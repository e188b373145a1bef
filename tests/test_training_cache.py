"""Tokens are made once, for all ranks and later runs; whole or not at all; in little memory."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import ConfigError
from onecopy.training import data
from onecopy.training.data import Batches, Corpus, Shard, cache, corpus, sources
from onecopy.training.data.rows import Piece
from onecopy.training.data.token_files import read_part, write_parts
from onecopy.training.data.tokenizer import ByteTokenizer
from onecopy.training.data.windows import Windows
from onecopy.training.options import TrainOptions
from tests.pool import Pool

CONTEXT = 16
WORDS = "".join(f"{number} bottles\n" for number in range(500))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return path


def options(text: Path, **others: Any) -> TrainOptions:
    return TrainOptions(data=(text,), context=CONTEXT, **others)


def folders(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()}


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are filled."""
    made: list[Path] = []
    write = corpus.write_parts

    def write_parts(folder: Path, *arguments: Any, **others: Any) -> Any:
        made.append(folder)
        return write(folder, *arguments, **others)

    monkeypatch.setattr(corpus, "write_parts", write_parts)
    return made


def test_a_later_run_takes_what_was_made(text: Path, tmp_path: Path, makings: list[Path]) -> None:
    kept = tmp_path / "cache"
    first = data.load_corpus(options(text, cache=kept))
    again = data.load_corpus(options(text, cache=kept, seed=7))
    assert len(makings) == 1 and len(folders(kept)) == 1
    assert again.fingerprint == first.fingerprint
    assert torch.equal(again.train.tokens, first.train.tokens)


def test_what_changes_tokens_makes_them_anew(
    text: Path, tmp_path: Path, makings: list[Path]
) -> None:
    kept = tmp_path / "cache"
    data.load_corpus(options(text, cache=kept))
    data.load_corpus(options(text, cache=kept, held_out=0.1))
    data.load_corpus(options(text, cache=kept, train_tokenizer=300))
    data.load_corpus(options(text, cache=kept, train_tokenizer=310))
    data.load_corpus(options(text, cache=kept, eval_data=(text,)))
    assert len(makings) == 5
    text.write_text(WORDS.replace("bottles", "barrels"))
    os.utime(text, (1, 1))  # a clock may be too coarse to tell the two apart
    changed = data.load_corpus(options(text, cache=kept))
    assert len(makings) == 6
    assert "barrels" in changed.tokenizer.decode(changed.train.tokens.tolist())


def test_without_a_cache_nothing_stays(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makings: list[Path]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = data.load_corpus(options(text))
    assert len(makings) == 1 and makings[0].parent == tmp_path
    assert folders(tmp_path) == {"text.txt"}
    tokens = [*made.train.tokens.tolist(), *made.held_out.tokens.tolist()]
    assert made.tokenizer.decode(tokens) == WORDS


def test_an_error_on_the_way_leaves_nothing(text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(WORDS.encode() * 200 + b"\xff")
    kept = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"bad.txt is not UTF-8"):
        data.load_corpus(TrainOptions(data=(text, bad), cache=kept))
    assert folders(kept) == set()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*file.*Give --cache"):
        data.load_corpus(options(text, cache=tmp_path / "file"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_what_a_killed_process_left_is_not_taken(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cache"
    child = os.fork()
    if child == 0:
        sources_of = sources.pieces_of

        def until_killed(*arguments: Any) -> Iterator[Any]:
            yield from sources_of(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(corpus, "pieces_of", until_killed)
        data.load_corpus(options(text, cache=kept))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = folders(kept)
    assert left.startswith(".")
    made = data.load_corpus(options(text, cache=kept))
    assert made.fingerprint == data.load_corpus(options(text)).fingerprint
    assert left in folders(kept), "another run may be making it now"
    # A day later nobody is.
    monkeypatch.setattr(cache, "LEFT_OVER_SECONDS", -1.0)
    (finished,) = folders(kept) - {left}
    (kept / finished).rename(kept / "away")
    data.load_corpus(options(text, cache=kept))
    assert folders(kept) == {"away", finished}


class Wide(ByteTokenizer):
    """Bytes as the last of many tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end = vocab_size - 1

    def encode_all(self, texts: Any, parse_special: Any) -> list[list[int]]:
        return [[self.vocab_size - 256 + byte for byte in one.encode()] for one in texts]


@pytest.mark.parametrize(
    "vocab_size, num_bytes", [(256, 1), (257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)]
)
def test_tokens_take_few_bytes(vocab_size: int, num_bytes: int, tmp_path: Path) -> None:
    tokenizer = Wide(vocab_size)
    pieces = [Piece(text="some text"), Piece(text="\xff", held_out=True)]
    facts = write_parts(tmp_path, pieces, tokenizer, with_counted=False)
    part = read_part(tmp_path, "train", facts["train"], vocab_size)
    assert part.tokens.element_size() == num_bytes
    wanted = [vocab_size - 256 + byte for byte in b"some text"] + [vocab_size - 1]
    assert part.tokens.tolist() == wanted
    windows = Windows(part=part, context=9, by_document=False, pad=0)
    assert windows.take(torch.tensor([0]))[1].tolist() == [wanted[1:]]
    assert part.counts[wanted].tolist() == [wanted.count(token) for token in wanted]
    assert int(part.counts.sum()) == 10


def test_damaged_tokens_are_named(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    data.load_corpus(options(text, cache=kept))
    (folder,) = kept.iterdir()
    tokens = folder / "train" / "tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"damaged: .*train.tokens has .* Remove the folder"):
        data.load_corpus(options(text, cache=kept))


def anonymous_bytes() -> int:
    """What this process holds itself, without maps of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when tokens are made, nor when they are used."""
    held: list[int] = []
    texts = sources._texts

    def watched(*arguments: Any) -> Iterator[Any]:
        for one in texts(*arguments):
            held.append(anonymous_bytes())
            yield one

    monkeypatch.setattr(sources, "_texts", watched)

    def grown(num_bytes: int) -> int:
        path = tmp_path / f"{num_bytes}.txt"
        path.write_text(WORDS * (num_bytes // len(WORDS)))
        held[:] = [anonymous_bytes()]
        made = data.load_corpus(TrainOptions(data=(path,), context=512))
        shard = Shard(rank=0, world_size=1, batch=256)
        batches = Batches(made, shard, seed=0)
        for _ in range(30):
            next(batches)
            held.append(anonymous_bytes())
        return max(held) - held[0]

    grown(4 << 20)  # what is made once in a process is made here
    assert grown(64 << 20) < 16 << 20


def make_together(text: Path, kept: Path | None) -> tuple[str, list[int], bool, list[int]]:
    """On each rank: what it got, whether it made it, and its first batch."""
    made: list[Path] = []
    write = corpus.write_parts
    corpus.write_parts = lambda folder, *args, **others: (  # type: ignore[assignment]
        made.append(folder),
        write(folder, *args, **others),
    )[1]
    try:
        loaded: Corpus = data.load_corpus(options(text, cache=kept))
    finally:
        corpus.write_parts = write
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shard = Shard(rank=rank, world_size=world_size, batch=2)
    first = next(Batches(loaded, shard, seed=0))[0][0]
    return loaded.fingerprint, loaded.train.tokens.tolist(), bool(made), first.flatten().tolist()


def test_one_rank_makes_tokens_for_all(pool: Pool, text: Path, tmp_path: Path) -> None:
    alone = data.load_corpus(options(text))
    whole = next(Batches(alone, Shard(rank=0, world_size=1, batch=6), seed=0))[0][0]
    for kept in (tmp_path / "cache", None):
        ranks = pool.run(3, make_together, text, kept)
        assert {one[0] for one in ranks} == {alone.fingerprint}
        assert all(one[1] == alone.train.tokens.tolist() for one in ranks)
        assert [one[2] for one in ranks] == [True, False, False]
        assert [token for one in ranks for token in one[3]] == whole.flatten().tolist()


def fail_together(path: Path, other: Path) -> str:
    """On each rank, what it is told."""
    chosen = path if torch.distributed.get_rank() == 0 else other
    with pytest.raises(ConfigError) as refused:
        data.load_corpus(options(chosen, cache=path.parent / "cache"))
    return str(refused.value)


def test_what_one_rank_cannot_make_all_are_told(pool: Pool, text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(WORDS.encode() + b"\xff")
    first, second = pool.run(2, fail_together, bad, bad)
    assert first.startswith(f"{bad} is not UTF-8 text")
    assert second == f"rank 0: {first}"
    other = tmp_path / "other.txt"
    other.write_text(WORDS.upper())
    said = pool.run(2, fail_together, text, other)
    assert all(one.startswith("Rank 1 reads another text than rank 0.") for one in said)
