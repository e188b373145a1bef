"""The corpus of a run: tokenized once, the same on all ranks, and never held in memory.

This file owns what a corpus depends on, and so when one that was made before is taken again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onecopy.checkpoint.folder import latest
from onecopy.comm.compare import gather_objects
from onecopy.comm.once import world
from onecopy.errors import ConfigError
from onecopy.training.data.cache import made_once
from onecopy.training.data.rows import Chat, Rows
from onecopy.training.data.sources import Piece, find_files, pieces_of, topics_pieces
from onecopy.training.data.token_files import PARTS, Part, read_part, write_parts
from onecopy.training.data.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from onecopy.training.data.windows import Windows
from onecopy.training.options import TrainOptions
from onecopy.training.options.data import BYTES, COMPLETIONS, DOCUMENTS

__all__ = ["TOKENIZER_FOLDER", "UNIFORM_BITS", "Corpus", "load_corpus", "unigram_bits"]

FACTS_FILE = "corpus.json"
TOKENIZER_FOLDER = "tokenizer"
# Of the files; to be raised where the same text would become other files.
FORMAT = 1
UNIFORM_BITS = 8.0  # bits per byte of a model that knows nothing
# A tokenizer learns little from more, and counts every word of it.
MOST_TO_TRAIN_ON = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens to train on, and others held out.

    fingerprint: differs where tokens, documents, or what the loss counts differ.
    context: tokens in a sequence. by_document: each document is a sequence; else sequences are cut
        from all of them in a row.
    """

    name: str
    tokenizer: Tokenizer
    train: Part
    held_out: Part
    fingerprint: str
    context: int
    by_document: bool

    def windows(self, part: Part) -> Windows:
        """The sequences of a part."""
        pad = self.tokenizer.end or 0
        return Windows(part=part, context=self.context, by_document=self.by_document, pad=pad)

    @property
    def sizes(self) -> str:
        """How much there is, in words."""
        kind = _kind(self.tokenizer)
        text = (
            f"{self.train.num_tokens:,} {kind} to train on, {self.held_out.num_tokens:,} held out"
        )
        if not self.by_document:
            return text
        text += f"; {self.train.num_documents:,} documents"
        most = self.context + 1
        num_cut = int((self.train.documents.diff() > most).sum())
        return (
            f"{text}, of which {num_cut:,} are cut off after {most:,} {kind}" if num_cut else text
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What tokens are made of."""

    options: TrainOptions
    files: list[Path]
    eval_files: list[Path]
    tokenizer: Tokenizer | None  # None: to be trained
    chat: Chat

    @property
    def name(self) -> str:
        if not self.files:
            return "Python's reference texts (pydoc_data.topics)"
        return self.files[0].name if len(self.files) == 1 else f"{len(self.files)} files"

    def key(self) -> str:
        """Differs where what is made may differ."""
        options = self.options
        made_of = {
            "format": FORMAT,
            "files": [_stamps(files) for files in (self.files, self.eval_files)],
            "topics": "" if self.files else _digest("".join(p.text for p in topics_pieces(0.0))),
            # That of a resumed run was trained as this one would be: its tokens are there already.
            "tokenizer": options.train_tokenizer or _fingerprint(self.tokenizer),
            "held_out": options.held_out,
            "text_field": options.text_field,
            "loss_on": options.loss_on,
        }
        return _digest(json.dumps(made_of, sort_keys=True))[:32]

    def make(self, folder: Path) -> None:
        """Write all files of a corpus."""
        tokenizer = self.tokenizer or self._trained()
        only_completions = self.options.loss_on == COMPLETIONS
        parts = write_parts(folder, self._pieces(), tokenizer, with_counted=only_completions)
        if tokenizer.fingerprint != BYTES:
            tokenizer.save(folder / TOKENIZER_FOLDER)
        facts = {"name": self.name, "vocab_size": tokenizer.vocab_size, "parts": parts}
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")

    def _pieces(self) -> Iterator[Piece]:
        options = self.options
        only_completions = options.loss_on == COMPLETIONS
        rows = Rows(
            text_field=options.text_field, only_completions=only_completions, chat=self.chat
        )
        share = 0.0 if self.eval_files else options.held_out
        if self.files:
            yield from pieces_of(self.files, rows, share)
        elif only_completions:
            raise ConfigError("--loss-on completions needs --data with prompts and completions.")
        else:
            yield from topics_pieces(share)
        yield from pieces_of(self.eval_files, rows, 1.0)

    def _trained(self) -> Tokenizer:
        vocab_size = self.options.train_tokenizer
        assert vocab_size is not None, "who has no tokenizer trains one"
        total = sum(size for file in self.files for _, size, _ in _stamp(file))
        every = 1 + total // MOST_TO_TRAIN_ON
        texts = (piece.text for piece in self._pieces() if not piece.held_out)
        return train_tokenizer(
            (text for number, text in enumerate(texts) if number % every == 0), vocab_size
        )


def load_corpus(options: TrainOptions) -> Corpus:
    """The tokens of `options.data`, or of Python's own reference texts. All ranks call it together.

    One rank makes them, in `options.cache` if that is given, where later runs find them.

    Raises:
        ConfigError: files are missing, empty, not what they should be, or have too little text
            for one sequence in each part; the tokenizer is not one; ranks read other texts.
    """
    recipe = _recipe(options)
    corpus = made_once(options.cache, recipe.key(), recipe.make, partial(_read, options))
    every = gather_objects(world(), corpus.fingerprint)
    if other := [rank for rank, one in enumerate(every) if one != every[0]]:
        raise ConfigError(
            f"Rank {other[0]} reads another text than rank 0. Give all machines the same files."
        )
    _check_length(corpus, options)
    return corpus


def unigram_bits(corpus: Corpus) -> float:
    """Bits per held-out byte for a model that knows how often each token occurs, and no more.

    Frequencies are those of the training part, each token counted once more than seen, so that a
    token that occurs only in the held-out part does not cost infinitely much.
    """
    counts = corpus.train.counts.double() + 1
    bits = -(counts / counts.sum()).log2()  # (vocab_size,)
    total = float((bits * corpus.held_out.counts).sum())
    return total / corpus.held_out.text_bytes


def _recipe(options: TrainOptions) -> _Recipe:
    path = _tokenizer_path(options)
    tokenizer: Tokenizer | None = None
    if path is not None:
        tokenizer = load_tokenizer(path)
    elif options.train_tokenizer is None:
        tokenizer = ByteTokenizer()
    folder = path if path is None or path.is_dir() else path.parent
    return _Recipe(
        options=options,
        files=find_files(options.data),
        eval_files=find_files(options.eval_data),
        tokenizer=tokenizer,
        chat=Chat(folder),
    )


def _tokenizer_path(options: TrainOptions) -> Path | None:
    """Where the tokenizer is, if it is in a file."""
    if options.train_tokenizer is not None:
        # A run that is resumed has its own already, though the package may now train another.
        root = options.checkpoint
        if root is None or not root.is_dir() or latest(root) is None:
            return None
        saved = root / TOKENIZER_FOLDER
        return saved if (saved / TOKENIZER_FILE).is_file() else None
    if options.tokenizer == BYTES:
        return None
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    model = Path(options.model)
    return model if (model / TOKENIZER_FILE).is_file() else None


def _read(options: TrainOptions, folder: Path) -> Corpus:
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        parts = [
            read_part(folder, name, facts["parts"][name], facts["vocab_size"]) for name in PARTS
        ]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The tokens in {folder} are damaged: {error}. Remove the folder: it is made anew."
        ) from error
    saved = folder / TOKENIZER_FOLDER
    hashes = [facts["parts"][name]["sha256"] for name in PARTS]
    return Corpus(
        name=facts["name"],
        tokenizer=load_tokenizer(saved) if saved.is_dir() else ByteTokenizer(),
        train=parts[0],
        held_out=parts[1],
        fingerprint=_digest(" ".join(hashes)),
        context=options.context,
        by_document=options.packing == DOCUMENTS,
    )


def _check_length(corpus: Corpus, options: TrainOptions) -> None:
    kind = _kind(corpus.tokenizer)
    total = corpus.train.num_tokens + corpus.held_out.num_tokens
    least = 2 if corpus.by_document else options.context + 1
    held_out = "held-out" if options.eval_data else f"held-out ({options.held_out:.3g} of all)"
    for part, what in ((corpus.train, "training"), (corpus.held_out, held_out)):
        if part.num_tokens < least:
            raise ConfigError(
                f"{corpus.name} has {total:,} {kind}, of which {part.num_tokens:,} are the "
                f"{what} part; that is fewer than the {least:,} {kind} one sequence needs. "
                "Give more text with --data, or a smaller --context."
            )
        if not part.text_bytes:
            raise ConfigError(f"In {corpus.name}, all completions of the {what} part are empty.")


def _fingerprint(tokenizer: Tokenizer | None) -> str:
    assert tokenizer is not None, "who trains no tokenizer has one"
    return tokenizer.fingerprint


def _kind(tokenizer: Tokenizer) -> str:
    return "bytes" if tokenizer.fingerprint == BYTES else "tokens"


def _stamp(file: Path) -> list[tuple[str, int, int]]:
    """(name, size, time of change) of a file, or of those in a folder."""
    files = sorted(file.rglob("*")) if file.is_dir() else [file]
    stats = [(str(one.absolute()), one.stat()) for one in files]
    return [(name, found.st_size, found.st_mtime_ns) for name, found in stats]


def _stamps(files: list[Path]) -> list[list[tuple[str, int, int]]]:
    return [_stamp(file) for file in files]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
