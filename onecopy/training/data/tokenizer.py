"""Text to tokens and back: bytes, a tokenizer of a folder, or one that is trained on the text.

All are saved as a `tokenizer.json` with its settings, which `from_pretrained` of transformers
reads. The package tokenizers is needed for all but bytes.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from onecopy.errors import ConfigError
from onecopy.extras import require

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer", "train_tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
END = "<|endoftext|>"
# What belongs to a tokenizer in a folder, beside TOKENIZER_FILE; other files are the model's.
OTHER_FILES = (SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja")
# Of tokenizers that are made here.
SETTINGS = json.dumps(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    },
    indent=2,
)


class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer.

    vocab_size: tokens are below it. begin: the tokens that a document starts with. end: the token
    that ends one, None where there is none. fingerprint: differs where tokens may.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def begin(self) -> Sequence[int]: ...
    @property
    def end(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The tokens of a text, without those that begin and end a document.

        parse_special: what is written like a special token is one: in a chat that a template has
        rendered. In other text it is text.
        """

    def encode_all(
        self, texts: Sequence[str], parse_special: Sequence[bool]
    ) -> Sequence[Sequence[int]]:
        """`encode` of each."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def save(self, folder: Path) -> None:
        """Write it to a folder, which is made where it is not there."""


class ByteTokenizer:
    """A token for each byte of UTF-8. Byte 0, which is in no text, ends a document."""

    vocab_size = 256
    begin: tuple[int, ...] = ()
    end = 0
    fingerprint = "bytes"

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The bytes of a text; byte 0 is left out."""
        return list(text.encode().replace(b"\0", b""))

    def encode_all(
        self, texts: Sequence[str], parse_special: Sequence[bool]
    ) -> Sequence[Sequence[int]]:
        """`encode` of each."""
        return [text.encode().replace(b"\0", b"") for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes. A character that is cut off at the end is left out."""
        data = bytes(tokens).replace(b"\0", b"")
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    def save(self, folder: Path) -> None:
        """Write it to a folder, for tokenizers and transformers."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        end = {"id": 0, "content": END, "special": True, "single_word": False}
        vocabulary = {END: 0, **{_letter(byte): byte for byte in range(1, 256)}}
        content = {
            "version": "1.0",
            "added_tokens": [end | {"lstrip": False, "rstrip": False, "normalized": False}],
            "pre_tokenizer": byte_level | {"use_regex": False},
            "decoder": byte_level | {"use_regex": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        (folder / SETTINGS_FILE).write_text(SETTINGS, encoding="utf-8")


class FileTokenizer:
    """A tokenizer of the package tokenizers, with the settings that lie beside its file.

    files: the settings, by file name. content: a tokenizer.json.
    """

    def __init__(self, content: str, files: dict[str, str]) -> None:
        package = require("tokenizers", "a tokenizer other than bytes")
        self._content = content
        self._files = files
        self._tokenizer = package.Tokenizer.from_str(content)
        # Both are for batches of a fixed shape; here sequences are cut later.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.end = self._find_end()
        around = self._tokenizer.encode("").ids
        self.begin: list[int] = [token for token in around if token != self.end]
        text = json.dumps([content, files], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The tokens of a text, without those that begin and end a document."""
        return self.encode_all([text], [parse_special])[0]

    def encode_all(self, texts: Sequence[str], parse_special: Sequence[bool]) -> list[list[int]]:
        """`encode` of each, on all cores."""
        tokens: list[list[int]] = [[] for _ in texts]
        for parses in sorted(set(parse_special)):
            chosen = [i for i, wanted in enumerate(parse_special) if wanted == parses]
            self._tokenizer.encode_special_tokens = not parses
            encoded = self._tokenizer.encode_batch_fast(
                [texts[i] for i in chosen], add_special_tokens=False
            )
            for i, one in zip(chosen, encoded, strict=True):
                tokens[i] = one.ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        """Write it to a folder, with the settings that it was read with."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {TOKENIZER_FILE: self._content, **self._files}.items():
            (folder / name).write_text(text, encoding="utf-8")

    def _find_end(self) -> int | None:
        for name in (SETTINGS_FILE, "special_tokens_map.json"):
            settings = json.loads(self._files.get(name, "{}"))
            end = settings.get("eos_token")
            # Older files have the token with how it is matched.
            end = end.get("content") if isinstance(end, dict) else end
            if end is not None:
                token: int | None = self._tokenizer.token_to_id(end)
                return token
        return None


def load_tokenizer(path: Path) -> FileTokenizer:
    """The tokenizer of a folder, or a tokenizer.json.

    Raises:
        ConfigError: there is none, it is damaged, or the package tokenizers is missing.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        content = file.read_text(encoding="utf-8")
        files = {
            name: (file.parent / name).read_text(encoding="utf-8")
            for name in OTHER_FILES
            if (file.parent / name).is_file()
        }
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no tokenizer {file}. Give a folder with a {TOKENIZER_FILE}, or such a file; "
            "save_pretrained of a fast tokenizer of transformers writes one."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The tokenizer {file} cannot be read: {error}.") from error
    try:
        return FileTokenizer(content, files)
    except ConfigError:
        raise
    except Exception as error:  # the package raises nothing more special
        raise ConfigError(
            f"{file} is not a tokenizer of the package tokenizers: {error}"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Train byte pair encoding on texts: any text becomes tokens, and comes back as it was.

    Raises:
        ConfigError: the package tokenizers is missing.
    """
    package = require("tokenizers", "--train-tokenizer")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return FileTokenizer(tokenizer.to_str(), {SETTINGS_FILE: SETTINGS})


def _letter(byte: int) -> str:
    """The visible letter that stands for a byte in byte-level vocabularies, as GPT-2 chose them."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    hidden = [other for other in range(256) if other not in visible]
    return chr(0x100 + hidden.index(byte))
