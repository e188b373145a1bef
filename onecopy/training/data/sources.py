"""Where text comes from: files and folders as a stream of pieces, few of them in memory at once.

A source is a UTF-8 text file (one document), JSON lines (.jsonl, .ndjson, .json, and those with
.gz), a Parquet or Arrow file, or a folder that `save_to_disk` of the package datasets has written.
Those other than text have rows; `rows.py` makes documents of them.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from onecopy.errors import ConfigError
from onecopy.extras import require
from onecopy.training.data.rows import Piece, Rows

__all__ = ["Piece", "find_files", "pieces_of", "topics_pieces"]

LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
TABLES = (".parquet", ".arrow")
IN_FOLDERS = (".txt", ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz", *TABLES)
# A saved Dataset has the first of them, a DatasetDict the second.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Bytes of a text file that are one piece: some are tokenized at once, each on a core.
BLOCK = 1 << 16


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The sources behind `paths`: files stay, folders become the files in them, in sorted order.

    A folder that the package datasets has saved stays, too.

    Raises:
        ConfigError: a path does not exist, a folder has no text, a file is empty.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(_files_in(path))
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


def _files_in(folder: Path) -> list[Path]:
    if (folder / SAVED).is_file():
        return [folder]
    if (folder / SAVED_SPLITS).is_file():
        splits = sorted(one.parent.name for one in folder.glob(f"*/{SAVED}"))
        raise ConfigError(
            f"{folder} holds the splits {', '.join(splits)}: give the one to train on, "
            f"--data {folder / splits[0] if splits else folder / 'train'}, and to measure the loss "
            "on another, name it with --eval-data."
        )
    found = sorted(one for one in folder.iterdir() if one.name.endswith(IN_FOLDERS))
    if not found:
        raise ConfigError(
            f"The folder {folder} has no {', '.join(IN_FOLDERS)} files. Name the files themselves: "
            "--data FILE [FILE ...]."
        )
    return found


def pieces_of(files: Sequence[Path], rows: Rows, held_out: float) -> Iterator[Piece]:
    """All text of `files`, in pieces.

    Of a text file the end is held out, `held_out` of its bytes; of files with rows every so many
    rows, from the first one on.

    Raises:
        ConfigError: a file cannot be read, or is not what its name says.
    """
    for file in files:
        if file.is_dir() or file.name.endswith(TABLES):
            yield from _of_rows(_table_rows(file), rows, held_out)
        elif file.name.endswith(LINES):
            yield from _of_rows(_json_rows(file), rows, held_out)
        else:
            yield from _of_text(file, held_out)


def topics_pieces(held_out: float) -> Iterator[Piece]:
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
    text = re.sub(r" {2,}", " ", "\n".join(topics[key] for key in sorted(topics)))
    cut = math.floor(len(text) * (1 - held_out))
    yield Piece(text=text[:cut], held_out=False, ends=cut == len(text))
    if cut < len(text):
        yield Piece(text=text[cut:], held_out=True)


@dataclass(frozen=True, slots=True)
class _Row:
    where: str  # for errors: the file, and the line or row
    values: Any


def _of_rows(found: Iterable[_Row], rows: Rows, held_out: float) -> Iterator[Piece]:
    for number, row in enumerate(found):
        is_held_out = math.ceil((number + 1) * held_out) > math.ceil(number * held_out)
        for piece in rows.pieces(row.values, row.where):
            yield replace(piece, held_out=is_held_out)


def _json_rows(file: Path) -> Iterator[_Row]:
    opened: Any = gzip.open(file) if file.name.endswith(".gz") else file.open("rb")
    number = 0
    try:
        with opened as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _Row(f"{file}, line {number}", _parsed(line.rstrip(), file, number))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file} is damaged after line {number}: {error}.") from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _parsed(line: bytes, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}, line {number} is not UTF-8 (byte {error.start:,} of the line is "
            f"0x{line[error.start]:02x}). Other encodings can be converted with iconv."
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}, line {number} is not JSON: {error.msg} at column {error.colno}. Each line "
            "must be one JSON object."
        ) from error


def _table_rows(file: Path) -> Iterator[_Row]:
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    datasets = require("datasets", f"--data {file}")
    try:
        if file.is_dir():
            table = datasets.load_from_disk(str(file))
        else:
            table = datasets.Dataset.from_file(str(file))
    except Exception as error:  # of its many kinds
        raise ConfigError(f"{file} cannot be read by the package datasets: {error}") from error
    for number, values in enumerate(table):
        yield _Row(f"{file}, row {number}", values)


def _parquet_rows(file: Path) -> Iterator[_Row]:
    require("pyarrow", f"--data {file}")
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    yield _Row(f"{file}, row {number}", values)
                    number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        raise ConfigError(f"{file} is not a readable Parquet file: {error}") from error


def _of_text(file: Path, held_out: float) -> Iterator[Piece]:
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            cut = _character_start(opened, math.floor(size * (1 - held_out)))
            for is_held_out, start, stop in ((False, 0, cut), (True, cut, size)):
                opened.seek(start)
                begins = True
                for text, is_last in _texts(file, opened, start, stop):
                    # What is held out goes on with the same document: the first part has no end.
                    ends = is_last and stop == size
                    yield Piece(text=text, held_out=is_held_out, begins=begins, ends=ends)
                    begins = False
    except OSError as error:
        raise _unreadable(file, error) from error


def _texts(file: Path, opened: BinaryIO, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    """The text from byte `start` to `stop` in blocks of whole lines, and whether it is the last."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place, line = start, ""
    while place < stop:
        data = opened.read(min(BLOCK, stop - place))
        pending = len(decoder.getstate()[0])
        is_last = place + len(data) >= stop or not data
        try:
            text = line + decoder.decode(data, final=is_last)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ConfigError(
                f"{file} is not UTF-8 text (byte {place - pending + error.start:,} is "
                f"0x{byte:02x}). Give plain text files; other encodings can be converted with "
                "iconv."
            ) from error
        place += len(data)
        # Tokens may span a cut: between lines they seldom do.
        whole = len(text) if is_last else text.rfind("\n") + 1 or len(text)
        text, line = text[:whole], text[whole:]
        yield text, is_last
        if is_last:
            return


def _character_start(file: BinaryIO, place: int) -> int:
    """The first byte from `place` on that does not continue a character of UTF-8."""
    file.seek(place)
    following = file.read(4)
    return place + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Cannot read {file}: {error.strerror or error}.")
