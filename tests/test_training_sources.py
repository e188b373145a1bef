"""Where text comes from: JSON lines, tables, prompts and chats, and what the loss counts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import ConfigError
from onecopy.training import data
from onecopy.training.data import Corpus
from onecopy.training.data.tokenizer import ByteTokenizer
from onecopy.training.options import TrainOptions

CONTEXT = 4
ROWS = [{"text": f"text {number}", "number": number} for number in range(40)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load(path: Path, **options: Any) -> Corpus:
    return data.load_corpus(TrainOptions(data=(path,), context=CONTEXT, **options))


def write_lines(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def documents(tokens: torch.Tensor) -> list[str]:
    return bytes(tokens.tolist()).decode().split("\0")[:-1]


def counted(part: Any) -> str:
    """The text that the loss counts, an end of a document as a stroke."""
    chosen = part.tokens[part.counted.bool()].tolist()
    return bytes(chosen).decode().replace("\0", "|")


def make_tables(folder: Path) -> list[Path]:
    """ROWS as a folder that datasets has saved, an Arrow file and a Parquet file."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    datasets.disable_progress_bars()
    made.save_to_disk(str(folder / "saved"))
    made.to_parquet(str(folder / "rows.parquet"))
    (folder / "rows.arrow").write_bytes(next((folder / "saved").glob("*.arrow")).read_bytes())
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(folder / "splits"))
    return [folder / "saved", folder / "rows.arrow", folder / "rows.parquet"]


def test_the_same_rows_are_the_same_corpus_in_every_kind_of_file(tmp_path: Path) -> None:
    lines = [
        write_lines(tmp_path / name, ROWS) for name in ("rows.jsonl", "rows.json", "rows.jsonl.gz")
    ]
    corpora = [load(path) for path in [*lines, *make_tables(tmp_path)]]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    for corpus in corpora:
        texts = [row["text"] for row in ROWS]
        # Every twentieth row is held out, from the first on.
        assert documents(corpus.held_out.tokens) == [texts[0], texts[20]]
        assert documents(corpus.train.tokens) == texts[1:20] + texts[21:]
        assert corpus.train.num_documents == 38
    with pytest.raises(ConfigError, match=r"holds the splits test, train: .*--data .*test"):
        load(tmp_path / "splits")
    splits = tmp_path / "splits"
    corpus = load(splits / "train", eval_data=(splits / "test",))
    assert torch.equal(corpus.train.tokens, corpus.held_out.tokens)


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 20)
    write_lines(tmp_path / "b.jsonl", ROWS[:2])
    (tmp_path / "notes").write_text("not data")
    corpus = load(tmp_path)
    assert corpus.name == "2 files"
    assert documents(corpus.train.tokens) == ["a" * 19 + "text 1"]
    assert documents(corpus.held_out.tokens) == ["a", "text 0"]


def test_fields_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"body": f"body {n}"} for n in range(30)])
    assert documents(load(path, text_field="body").train.tokens)[0] == "body 1"
    with pytest.raises(
        ConfigError, match=r"a.jsonl, line 1 has neither 'text'.* but 'body'\. .*--"
    ):
        load(path)


@pytest.mark.parametrize(
    "line, advice",
    [
        (b'{"text": "x"', "line 3 is not JSON: Expecting ',' delimiter at column 13"),
        (b"[1, 2]", r"line 3 is no JSON object but \[1, 2\]"),
        (b'{"text": 5}', "line 3: 'text' is no text but 5"),
        (b'{"text": "caf\xe9"}', r"line 3 is not UTF-8 \(byte 13 of the line is 0xe9"),
        (b'{"text": "\\ud800"}', "line 3: 'text' has half a surrogate pair"),
        (b'{"prompt": "a", "completion": 1}', "line 3: 'completion' is no text but 1"),
        (b'{"messages": "hello"}', "line 3, 'messages' is no list of messages but 'hello'"),
        (b'{"messages": [{"content": ""}]}', "line 3, 'messages': a message has no 'role'"),
        (b'{"messages": [{"role": "user"}]}', "line 3, 'messages' is a chat, but the tokenizer"),
    ],
)
def test_a_line_that_is_not_right_is_named(line: bytes, advice: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "four"}\n')
    with pytest.raises(ConfigError, match=f"rows.jsonl, {advice}"):
        load(path)


def test_files_that_are_not_what_they_say_are_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "one"}\n' * 99)[:-12])
    for name in ("bad.parquet", "bad.arrow", "bad.jsonl.gz"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
    cases = {
        "cut.jsonl.gz": "is damaged after line",
        "bad.parquet": "is not a readable Parquet file",
        "bad.arrow": "cannot be read by the package datasets",
        "bad.jsonl.gz": "is damaged after line 0",
    }
    for name, advice in cases.items():
        with pytest.raises(ConfigError, match=f"{name} {advice}"):
            load(tmp_path / name)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("pyarrow", "a.parquet"), ("datasets", "a.arrow")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ConfigError, match=rf"{name} needs .*pip install 'onecopy\[data\]'"):
            load(tmp_path / name)


def test_completions_alone_are_counted_if_asked(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)]
    path = write_lines(tmp_path / "sums.jsonl", rows)
    plain = load(path)
    assert plain.train.counted is None
    assert documents(plain.train.tokens)[:2] == ["1+1=2", "2+1=3"]
    asked = load(path, loss_on="completions")
    assert torch.equal(asked.train.tokens, plain.train.tokens)
    assert counted(asked.train) == "2|3|4|5|6|7|8|9|"
    assert asked.fingerprint != plain.fingerprint
    # The bits of a byte are those of bytes that are counted: each of eight is as likely.
    assert (asked.train.text_bytes, asked.train.bytes_per_token) == (8, 0.5)
    assert int(asked.train.counts.sum()) == 16
    with pytest.raises(ConfigError, match="line 1 has a text without a prompt"):
        load(write_lines(tmp_path / "texts.jsonl", ROWS), loss_on="completions")
    with pytest.raises(ConfigError, match="needs --data with prompts"):
        data.load_corpus(TrainOptions(loss_on="completions"))


def test_chats_are_rendered_by_the_tokenizers_template(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tokenizer"
    ByteTokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chat = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "TWO"},
        {"role": "user", "content": "bye"},
    ]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat}] * 2)
    plain = load(path, tokenizer=str(folder))
    rendered = "<user>one?</><assistant>ONE</><user>two?</><assistant>TWO</><user>bye</>"
    assert plain.tokenizer.decode(plain.train.tokens.tolist()) == rendered
    asked = load(path, tokenizer=str(folder), loss_on="completions")
    assert torch.equal(asked.train.tokens, plain.train.tokens)
    assert counted(asked.train) == "ONE</>TWO</>"
    by_name = write_lines(tmp_path / "named.jsonl", [{"talk": chat}] * 2)
    named = load(by_name, tokenizer=str(folder), text_field="talk")
    assert named.fingerprint == plain.fingerprint


def test_a_template_that_rewrites_what_was_before_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tokenizer"
    ByteTokenizer().save(folder)
    (folder / "chat_template.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    chat = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "ONE"}]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat}] * 2)
    with pytest.raises(ConfigError, match="line 1, 'messages': the chat template writes message 1"):
        load(path, tokenizer=str(folder), loss_on="completions")
