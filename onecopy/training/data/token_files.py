"""Tokens in files: written once, piece by piece, and mapped into memory by every rank.

Nothing is held that grows with the corpus. A part of a corpus (`train`, `held_out`) is some files:
`tokens`, in as few bytes each as the vocabulary allows; `documents`, int64, where each begins and
where the last ends; `counted`, a byte per token, 0 where the loss leaves it out, only where some
may be; `counts`, int64, how often each token of the vocabulary is counted.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.training.data.sources import Piece
from onecopy.training.data.tokenizer import Tokenizer

__all__ = ["Part", "read_part", "write_parts"]

PARTS = ("train", "held_out")
# Characters that are tokenized at once: enough for all cores, and little to hold.
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is trained on, or what is held out. Tensors are maps of files, on the CPU.

    tokens: (num_tokens,) uint8, uint16 or int32. documents: (num_documents + 1,) int64, where each
        begins, and where the last ends. counted: (num_tokens,) uint8, or None where all are.
    counts: (vocab_size,) int64, how often the loss counts each token. text_bytes: of their text, in
        UTF-8.
    """

    tokens: Tensor
    documents: Tensor
    counted: Tensor | None
    counts: Tensor
    text_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens, with those that begin and end documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents, of which the last may be the beginning of one that is held out."""
        return len(self.documents) - 1

    @property
    def bytes_per_token(self) -> float:
        """Of what the loss counts, on average: nats per token divided by it are nats per byte."""
        return self.text_bytes / int(self.counts.sum())


def write_parts(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, *, with_counted: bool
) -> dict[str, dict[str, Any]]:
    """Tokenize `pieces` into the files of both parts; by part, what `read_part` needs to know.

    Raises:
        OSError: a file cannot be written.
    """
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(_Writer(folder / name, tokenizer, with_counted))
            for name in PARTS
        }
        for block in _blocks(pieces):
            texts = [piece.text for piece in block]
            encoded = tokenizer.encode_all(texts, [piece.is_rendered for piece in block])
            for piece, ids in zip(block, encoded, strict=True):
                writers["held_out" if piece.held_out else "train"].add(piece, ids)
    return {name: writer.facts for name, writer in writers.items()}


def read_part(folder: Path, name: str, facts: dict[str, Any], vocab_size: int) -> Part:
    """A part that was written to `folder`, mapped into memory.

    Raises:
        ValueError: a file is not as long as it was written.
    """
    num_tokens, num_documents = facts["tokens"], facts["documents"]

    def mapped(kind: str, size: int, dtype: torch.dtype) -> Tensor:
        return _map(folder / name / kind, size, dtype)

    return Part(
        tokens=mapped("tokens", num_tokens, _DTYPES[_typecode(vocab_size)]),
        documents=mapped("documents", num_documents + 1, torch.int64),
        counted=mapped("counted", num_tokens, torch.uint8) if facts["has_counted"] else None,
        counts=mapped("counts", vocab_size, torch.int64),
        text_bytes=facts["text_bytes"],
    )


class _Writer:
    """Writes the files of one part."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, with_counted: bool) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        kinds = {"tokens": _typecode(tokenizer.vocab_size), "documents": "q"}
        if with_counted:
            kinds["counted"] = "B"
        self._buffers = {kind: array(typecode) for kind, typecode in kinds.items()}
        self._files: dict[str, Any] = {}
        self._hash = hashlib.sha256()
        self._counts = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
        self._num_tokens = self._num_documents = self._text_bytes = 0
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> _Writer:
        self._folder.mkdir()
        self._files = {kind: (self._folder / kind).open("wb") for kind in self._buffers}
        return self

    def add(self, piece: Piece, ids: Sequence[int]) -> None:
        """The next piece, and the tokens of its text."""
        if piece.begins:
            self._buffers["documents"].append(self._num_tokens)
            self._num_documents += 1
            if not piece.is_rendered:
                self._add(self._tokenizer.begin, False)
        self._add(ids, piece.counted)
        end = self._tokenizer.end
        if piece.ends and not piece.is_rendered and end is not None:
            self._add([end], piece.counted)
        if piece.counted:
            self._text_bytes += len(piece.text.encode())
        if len(self._buffers["tokens"]) >= BLOCK:
            self._flush()

    def _add(self, ids: Sequence[int], counted: bool) -> None:
        tokens = self._buffers["tokens"]
        tokens.extend(array(tokens.typecode, ids))
        if "counted" in self._buffers:
            self._buffers["counted"].extend([counted] * len(ids))
        self._num_tokens += len(ids)

    def _flush(self) -> None:
        self._counts += _counts(self._buffers, len(self._counts))
        for kind, values in self._buffers.items():
            data = values.tobytes()
            self._files[kind].write(data)
            self._hash.update(data)
            del values[:]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in self._files.values():
                file.close()

    def _finish(self) -> None:
        self._buffers["documents"].append(self._num_tokens)
        self._flush()
        self._files["counts"] = (self._folder / "counts").open("wb")
        self._files["counts"].write(array("q", self._counts.tolist()).tobytes())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.facts = {
            "tokens": self._num_tokens,
            "documents": self._num_documents,
            "has_counted": "counted" in self._buffers,
            "text_bytes": self._text_bytes,
            "sha256": self._hash.hexdigest(),
        }


_DTYPES = {"B": torch.uint8, "H": torch.uint16, "i": torch.int32}


def _counts(buffers: dict[str, array[int]], vocab_size: int) -> Tensor:
    tokens = buffers["tokens"]
    if not tokens:
        return torch.zeros(vocab_size, dtype=torch.int64)
    found = torch.frombuffer(tokens, dtype=_DTYPES[tokens.typecode]).int()
    if "counted" in buffers:
        found = found[torch.frombuffer(buffers["counted"], dtype=torch.uint8).bool()]
    return torch.bincount(found, minlength=vocab_size)


def _typecode(vocab_size: int) -> str:
    return "B" if vocab_size <= 1 << 8 else "H" if vocab_size <= 1 << 16 else "i"


def _blocks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    block: list[Piece] = []
    length = 0
    for piece in pieces:
        block.append(piece)
        length += len(piece.text)
        if length >= BLOCK:
            yield block
            block, length = [], 0
    if block:
        yield block


def _map(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    found = path.stat().st_size
    if found != size * dtype.itemsize:
        raise ValueError(f"{path} has {found:,} bytes, not {size * dtype.itemsize:,}")
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)
