"""Text as bytes: where it comes from, what is held out, and which sequences a rank trains on.

This file owns the corpus and the split over ranks. Ranks share one seeded generator and each
takes its own part of every draw, so N ranks with B sequences see exactly the batch that one
process with N * B sequences would see: losses stay comparable at any number of ranks, and a run
can be resumed on another number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onecopy.errors import ConfigError

HELD_OUT_SHARE = 0.05
UNIFORM_BITS = 8.0  # bits per byte of a model that knows nothing
IGNORED = -100  # the target that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text as bytes, the end of each file held out. Both tensors are 1-D uint8 on the CPU."""

    name: str
    train: Tensor
    held_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of each batch is this process's: `batch` sequences of `context` bytes."""

    rank: int
    world_size: int
    batch: int
    context: int


def load_corpus(paths: Sequence[Path], context: int) -> Corpus:
    """The text of `paths`, or Python's own reference texts, split into training and held-out.

    Raises ConfigError for files that are missing, empty, not UTF-8, or together too short for
    one sequence of `context` bytes and its successor in each part.
    """
    if paths:
        files = find_files(paths)
        texts = [_read(file) for file in files]
        name = files[0].name if len(files) == 1 else f"{len(files)} files"
    else:
        texts, name = [python_topics()], "Python's reference texts (pydoc_data.topics)"
    cuts = [math.floor(len(text) * (1 - HELD_OUT_SHARE)) for text in texts]
    train = b"".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    held_out = b"".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    for part, what in ((train, "training"), (held_out, "held-out (the last 5 %)")):
        if len(part) < context + 1:
            raise ConfigError(
                f"{name} has {len(train) + len(held_out):,} bytes, of which {len(part):,} are the "
                f"{what} part; that is fewer than the {context + 1:,} bytes one sequence needs. "
                "Give more text with --data, or a smaller --context."
            )
    return Corpus(name=name, train=_as_tensor(train), held_out=_as_tensor(held_out))


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files behind `paths`: files stay, folders become their .txt files in sorted order.

    Raises ConfigError for a path that does not exist, a folder without text, an empty file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.txt"))
            if not found:
                raise ConfigError(
                    f"The folder {path} has no .txt files. Name the files themselves: "
                    "--data FILE [FILE ...]."
                )
            files.extend(found)
        elif path.exists():
            files.append(path)
        else:
            raise ConfigError(
                f"There is no file {path}. Check the spelling; a relative path starts at the "
                f"current folder, {Path.cwd()}."
            )
    for file in files:
        if file.is_file() and file.stat().st_size == 0:
            raise ConfigError(f"The file {file} is empty. Give --data files that hold text.")
    return files


def python_topics() -> bytes:
    """The reference texts that ship with Python, about 450 kB of English, blanks collapsed.

    Runs of blanks are layout, not language: a model would score well by predicting them.
    The text differs a little between Python versions.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "This Python comes without its reference texts (pydoc_data). Train on your own "
            "text instead: --data FILE [FILE ...]."
        ) from error
    text = "\n".join(topics[key] for key in sorted(topics))
    return re.sub(r" {2,}", " ", text).encode()


class Batches:
    """Endless batches of this rank, random but seeded: for each step a list, a pair per backward.

    A pair is (tokens, targets), each (batch, context) int64; `targets` is `tokens` moved on by one
    byte. All ranks must give the same `train`, `accumulate` and `seed`. All ranks' sequences of a
    step are one draw, cut first into backwards and then into ranks: it does not depend on either,
    as long as the number of sequences in a step is the same.
    """

    def __init__(self, train: Tensor, shard: Shard, seed: int, accumulate: int = 1) -> None:
        self._train = train
        self._shard = shard
        self._drawn = (accumulate, shard.world_size, shard.batch)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[tuple[Tensor, Tensor]]:
        """The next step's."""
        context = self._shard.context
        num_starts = len(self._train) - context
        starts = torch.randint(num_starts, self._drawn, generator=self._generator)
        return [_sequences(self._train, part[self._shard.rank], context) for part in starts]

    def state_dict(self) -> dict[str, Tensor]:
        """The place in the data, equal on all ranks."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from that place."""
        self._generator.set_state(state["generator"])


def held_out_batches(
    held_out: Tensor, shard: Shard, max_sequences: int = 512
) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the held-out text as (tokens, targets), each (<= batch, context) int64.

    The sequences do not overlap, are spread evenly over the text, and are the same at any number
    of ranks. Every rank gets equally many batches of equal sizes, because at stage 3 the ranks
    must run equally many forwards: where sequences run out, the first is repeated with targets
    that are `IGNORED`, which the loss leaves out.
    """
    num_sequences = (len(held_out) - 1) // shard.context
    wanted = min(num_sequences, max_sequences)
    chosen = torch.arange(wanted) * num_sequences // wanted  # (wanted,) sequence numbers
    repeats = torch.zeros(-wanted % shard.world_size, dtype=chosen.dtype)
    mine = slice(shard.rank, None, shard.world_size)
    starts = torch.cat([chosen, repeats])[mine] * shard.context
    counts = (torch.arange(wanted + len(repeats)) < wanted)[mine]
    batches = []
    for part, is_counted in zip(starts.split(shard.batch), counts.split(shard.batch), strict=True):
        tokens, targets = _sequences(held_out, part, shard.context)
        batches.append((tokens, targets.masked_fill(~is_counted[:, None], IGNORED)))
    return batches


def unigram_bits(corpus: Corpus) -> float:
    """Bits per held-out byte for a model that knows how often each byte occurs, and no more.

    Frequencies are counted on the training part, each byte once more than seen, so that a
    byte that occurs only in the held-out part does not cost infinitely much.
    """
    counts = torch.bincount(corpus.train.long(), minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()  # (256,)
    return float(bits[corpus.held_out.long()].mean())


def _sequences(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()  # (batch, context + 1)
    return windows[:, :-1], windows[:, 1:]


def _read(file: Path) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from error
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte {error.start:,} is 0x{text[error.start]:02x}). "
            "Give plain text files; other encodings can be converted with iconv."
        ) from error
    return text


def _as_tensor(text: bytes) -> Tensor:
    # bytearray: torch warns about memory that it may not write to.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
