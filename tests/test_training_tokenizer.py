"""Text to tokens and back, with the package tokenizers and with transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecopy.errors import ConfigError
from onecopy.training import data
from onecopy.training.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from onecopy.training.options import TrainOptions

pytest.importorskip("tokenizers")
SOURCES = [Path(module.__file__ or "") for module in (argparse, dataclasses, textwrap)]
TEXT = "".join(path.read_text(encoding="utf-8") for path in SOURCES)


@cache
def train_once() -> FileTokenizer:
    return train_tokenizer([TEXT], 512)


@pytest.fixture
def trained() -> FileTokenizer:
    return train_once()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizers")
    train_once().save(path / "trained")
    ByteTokenizer().save(path / "bytes")
    return path


def as_of_llama(content: str) -> str:
    """With a token before each text, as tokenizers of Llama put it there."""
    changed = json.loads(content)
    changed["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "!", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"!": {"id": "!", "ids": [1], "tokens": ["!"]}},
    }
    return json.dumps(changed)


def test_a_trained_tokenizer_is_shorter_than_bytes(trained: FileTokenizer) -> None:
    assert trained.vocab_size == 512
    assert trained.end == 0 and trained.begin == []
    tokens = trained.encode(TEXT)
    assert 2 * len(tokens) < len(TEXT.encode())
    assert trained.decode(tokens) == TEXT


@settings(max_examples=50, deadline=None)
@given(st.text(), st.lists(st.sampled_from(["<|endoftext|>", "\n", " def", "\N{SNOWMAN}", "  "])))
def test_any_text_comes_back_as_it_was(text: str, others: list[str]) -> None:
    """What is written like a special token is text, too."""
    text = "".join([text, *others])
    trained = train_once()
    tokens = trained.encode(text)
    assert trained.decode(tokens) == text
    assert trained.end not in tokens
    whole = text.replace("\0", "")
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == whole


def test_half_a_character_at_the_end_is_left_out() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("a\N{SNOWMAN}b\N{SNOWMAN}")
    assert tokenizer.decode(tokens[:-1]) == "a\N{SNOWMAN}b"
    assert tokenizer.decode([*tokens[:2], *tokens[4:]]) == "a\N{REPLACEMENT CHARACTER}b\N{SNOWMAN}"


@pytest.mark.parametrize("name", ["trained", "bytes"])
def test_transformers_reads_what_was_saved(name: str, trained: FileTokenizer, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder / name))
    ours: Tokenizer = trained if name == "trained" else ByteTokenizer()
    text = "def caf\N{LATIN SMALL LETTER E WITH ACUTE}(\N{GRINNING FACE}):\r\n\treturn  1 \x07"
    assert (
        theirs(text)["input_ids"] == ours.encode(text) == load_tokenizer(folder / name).encode(text)
    )
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.end == load_tokenizer(folder / name).end
    assert len(theirs) == ours.vocab_size


def test_what_a_folder_says_of_its_tokenizer_is_kept(
    trained: FileTokenizer, folder: Path, tmp_path: Path
) -> None:
    content = as_of_llama((folder / "trained" / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    end: dict[str, Any] = {"content": "<|endoftext|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    loaded = load_tokenizer(tmp_path)
    assert loaded.begin == [1] and loaded.end == 0
    assert loaded.encode("return") == trained.encode("return")
    loaded.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == loaded.fingerprint != trained.fingerprint
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == loaded.fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).end is None


def test_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no tokenizer .*tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a tokenizer of the package"):
        load_tokenizer(tmp_path)


def test_two_tokenizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="are two tokenizers: give one"):
        TrainOptions(train_tokenizer=300, tokenizer="bytes")
    with pytest.raises(ConfigError, match="--train-tokenizer is 256: give 257 or more"):
        TrainOptions(train_tokenizer=256)


def options(tmp_path: Path, **others: Any) -> TrainOptions:
    return TrainOptions(data=(tmp_path / "text.txt",), context=8, **others)


@pytest.fixture
def text_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    yield path


def test_a_corpus_of_a_trained_tokenizer(text_file: Path, tmp_path: Path) -> None:
    """Its tokens are the text, and a run that is resumed has the tokenizer it began with."""
    corpus = data.load_corpus(options(tmp_path, train_tokenizer=400))
    cut = int(len(TEXT.encode()) * 0.95)
    train, held_out = TEXT.encode()[:cut].decode(), TEXT.encode()[cut:].decode()
    assert corpus.tokenizer.decode(corpus.train.tokens.tolist()) == train
    assert corpus.tokenizer.decode(corpus.held_out.tokens.tolist()) == held_out
    assert corpus.held_out.tokens[-1] == corpus.tokenizer.end
    assert corpus.train.bytes_per_token == len(train.encode()) / corpus.train.num_tokens
    assert data.unigram_bits(corpus) < data.unigram_bits(data.load_corpus(options(tmp_path)))

    other = train_tokenizer([held_out], 400)
    other.save(tmp_path / "run" / data.TOKENIZER_FOLDER)
    wanted = options(tmp_path, train_tokenizer=400, checkpoint=tmp_path / "run")
    # A run that has not saved anything begins anew, maybe on another text.
    assert data.load_corpus(wanted).tokenizer.fingerprint == corpus.tokenizer.fingerprint
    (tmp_path / "run" / "latest").write_text("step-00000002\n")
    resumed = data.load_corpus(wanted)
    assert resumed.tokenizer.fingerprint == other.fingerprint != corpus.tokenizer.fingerprint


def test_a_resumed_run_finds_the_tokens_it_began_with(text_file: Path, tmp_path: Path) -> None:
    kept, run = tmp_path / "cache", tmp_path / "run"
    wanted = options(tmp_path, train_tokenizer=400, cache=kept, checkpoint=run)
    begun = data.load_corpus(wanted)
    begun.tokenizer.save(run / data.TOKENIZER_FOLDER)
    (run / "latest").write_text("step-00000002\n")
    assert data.load_corpus(wanted).fingerprint == begun.fingerprint
    assert len(list(kept.iterdir())) == 1


def test_the_tokenizer_is_the_models_unless_another_is_asked_for(
    text_file: Path, tmp_path: Path, folder: Path
) -> None:
    model = str(folder / "trained")
    corpora = [
        data.load_corpus(options(tmp_path, model=model)),
        data.load_corpus(options(tmp_path, tokenizer=model)),
        data.load_corpus(options(tmp_path, model=model, tokenizer="bytes")),
    ]
    assert [corpus.tokenizer.vocab_size for corpus in corpora] == [512, 512, 256]
    assert corpora[0].fingerprint == corpora[1].fingerprint


def test_documents_begin_and_end_with_the_tokenizers_tokens(tmp_path: Path, folder: Path) -> None:
    content = as_of_llama((folder / "trained" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = tmp_path / "llama"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(content, encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    lines = [json.dumps({"prompt": "return", "completion": " None"})] * 3
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    corpus = data.load_corpus(
        TrainOptions(data=(path,), context=2, tokenizer=str(tokenizer), loss_on="completions")
    )
    inner = corpus.tokenizer.encode("return"), corpus.tokenizer.encode(" None")
    document = [1, *inner[0], *inner[1], 0]
    assert corpus.train.tokens.tolist() == 2 * document
    assert corpus.train.counted is not None
    left_out = 1 + len(inner[0])
    assert corpus.train.counted.tolist() == 2 * ([0] * left_out + [1] * (len(document) - left_out))
