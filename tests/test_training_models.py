"""What `onecopy train` makes of a Hugging Face model: the same as a plain loop in one process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from onecopy.checkpoint.folder import latest, step_of, steps_in
from onecopy.checkpoint.inspect import inspect
from onecopy.errors import ConfigError
from onecopy.training import data, models
from onecopy.training.data import IGNORED, Batches, Shard, held_out_batches
from onecopy.training.learning import make_optimizer, share_of_rate
from onecopy.training.lora import add_adapters
from onecopy.training.observer import Observer
from onecopy.training.options import TrainOptions
from onecopy.training.trainer import TrainResult, train
from tests.pool import Pool, RankFailed

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
CONTEXT, VOCABULARY = 16, 300
SMALL = TrainOptions(
    steps=4, batch=3, context=CONTEXT, eval_every=1, sample=5, warmup=2, lr=1e-2, quiet=True
)
PROMPT = "all work"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which the last sequence is not full: ranks have different numbers of targets."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(("all work and no play makes jack a dull boy; or so they say. " * 9)[:500])
    return file


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes it, of a model that fits bytes."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes, **heads)
    ).save_pretrained(folder)
    return folder


def run(pool: Pool, world_size: int, options: TrainOptions) -> TrainResult:
    """What the first rank says."""
    results: list[TrainResult] = pool.run(world_size, train, options)
    return results[0]


def plainly(options: TrainOptions, model: nn.Module, batch: int) -> list[float]:
    """Held-out losses in bits per byte, of a loop in one process with `batch` sequences a step."""
    corpus = data.load_corpus(options)
    shard = Shard(rank=0, world_size=1, batch=batch)
    optimizer = make_optimizer(model, options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate(options))
    batches = Batches(corpus, shard, options.seed)
    losses = [held_out_loss(model, held_out_batches(corpus, shard))]
    for _ in range(options.steps):
        ((tokens, targets),) = next(batches)
        logits = model(input_ids=tokens).logits.flatten(0, 1)
        functional.cross_entropy(logits, targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(held_out_loss(model, held_out_batches(corpus, shard)))
    per_nat = 1 / corpus.held_out.bytes_per_token / torch.tensor(2.0).log().item()
    return [loss * per_nat for loss in losses]


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model.eval()
    pairs = [
        (functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()), y)
        for x, y in batches
    ]
    model.train()
    counts = [int((y != IGNORED).sum()) for _, y in pairs]
    return sum(float(one) * n for (one, _), n in zip(pairs, counts, strict=True)) / sum(counts)


def assert_close(result: TrainResult, losses: list[float]) -> None:
    measured = [result.held_out_bits[done] for done in range(len(losses))]
    assert measured == pytest.approx(losses, rel=2e-5)
    assert measured[-1] < measured[0]


def test_weights_from_a_folder(pool: Pool, llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    saved = tmp_path / "saved"
    options = dataclasses.replace(SMALL, model=str(llama), data=(text,), save_model=saved)
    result = run(pool, 2, options)
    plain = LlamaForCausalLM.from_pretrained(llama)
    assert_close(result, plainly(options, plain, 6))
    # What is saved is a model again, beside its tokenizer.
    again = LlamaForCausalLM.from_pretrained(saved)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert (saved / "tokenizer.json").is_file()
    assert result.samples[0].startswith("The ")
    with pytest.raises(RankFailed, match="holds a model already"):
        run(pool, 1, options)


def test_completions_of_prompts(pool: Pool, llama: Path, tmp_path: Path) -> None:
    """Sequences of one document each: ranks count different numbers of tokens, some of none."""
    file = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} and {n % 7} is ", "completion": f"{n + n % 7}"} for n in range(45)]
    rows[3] = {"prompt": "a prompt that is longer than the context", "completion": "lost"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dataclasses.replace(
        SMALL, model=str(llama), data=(file,), loss_on="completions", packing="documents", steps=8
    )
    model = models.construct(options, models.Vocabulary(size=256, end=0))
    model.load_state_dict(load_file(llama / "model.safetensors"))
    assert_close(run(pool, 2, options), plainly(options, model, 6))


def test_random_weights_and_the_tokens_of_the_tokenizer(
    pool: Pool, llama: Path, text: Path
) -> None:
    options = dataclasses.replace(
        SMALL, model=str(llama / "config.json"), data=(text,), accumulate=2, activations="device"
    )
    torch.manual_seed(options.seed)
    vocabulary = models.Vocabulary(size=256, end=0)
    plain = models.construct(options, vocabulary)
    assert plain.get_input_embeddings().weight.shape[0] == 256
    assert_close(run(pool, 2, options), plainly(options, plain, 12))


LORA: dict[str, Any] = {"lora_rank": 2, "lora_targets": ("q_proj", "up_proj"), "lora_alpha": 4.0}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_adapters_and_going_on_with_them(
    pool: Pool, llama: Path, text: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: the test extra")
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    root, saved = tmp_path / "run", tmp_path / "saved"
    options = dataclasses.replace(
        SMALL, model=str(llama), data=(text,), checkpoint=root, save_every=1, keep=9, lr=0.3, **LORA
    )
    result = run(pool, 2, options)
    assert 0 < result.num_trained < 0.1 * result.num_parameters
    (model,) = inspect(root).models
    assert model.tensors.num_elements == result.num_trained
    torch.manual_seed(options.seed)
    base = models.construct(options, models.Vocabulary(size=256, end=0))
    base.load_state_dict(load_file(llama / "model.safetensors"))
    plain = add_adapters(base, options)
    assert_close(result, plainly(options, plain, 6))

    # On one rank from the middle on, as if the run had ended there.
    for done in steps_in(root):
        if (step_of(done) or 0) > 2:
            shutil.rmtree(done)
    (root / "latest").write_text("step-00000002\n")
    rest = run(pool, 1, dataclasses.replace(options, save_model=saved))
    assert rest.held_out_bits == pytest.approx(result.held_out_bits, rel=2e-5)
    assert not (saved / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(llama), saved)
    values, mine = again.state_dict(), plain.state_dict()
    for name in (name for name in mine if "lora" in name):
        torch.testing.assert_close(values[name], mine[name], rtol=1e-4, atol=1e-5)


def signalled(options: TrainOptions, rank: int, step: int) -> TrainResult:
    """Rank `rank` is asked to end while it makes a step."""
    before = Observer.before_step

    def ask(self: Observer, number: int, optimizer: torch.optim.Optimizer) -> None:
        if (self._shard.rank, number) == (rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        before(self, number, optimizer)

    Observer.before_step = ask  # type: ignore[method-assign]
    try:
        return train(options)
    finally:
        Observer.before_step = before  # type: ignore[method-assign]


def test_who_is_asked_to_end_saves_first(pool: Pool, text: Path, tmp_path: Path) -> None:
    gpt = dataclasses.replace(
        SMALL, data=(text,), steps=12, layers=1, width=16, heads=2, save_every=100
    )
    whole = run(pool, 2, gpt)
    options = dataclasses.replace(gpt, checkpoint=tmp_path / "run")
    stopped: list[TrainResult] = pool.run(2, signalled, options, 1, 2)
    assert [one.is_stopped for one in stopped] == [True, True]
    found = latest(tmp_path / "run")
    assert found is not None
    assert 3 <= (step_of(found) or 0) <= 8
    rest = run(pool, 2, options)
    assert not rest.is_stopped
    # To the last bit, as on as many ranks.
    assert rest.held_out_bits == whole.held_out_bits
    assert rest.samples == whole.samples


def test_a_frozen_base_in_codes(pool: Pool, llama: Path, text: Path) -> None:
    """A byte for each value, which is rounded: nearly the same losses, and adapters that learn."""
    options = dataclasses.replace(SMALL, model=str(llama), data=(text,), lr=0.3, sample=0, **LORA)
    exact, coded = (
        run(pool, 2, dataclasses.replace(options, frozen=code)) for code in (None, "int8")
    )
    assert coded.held_out_bits == pytest.approx(exact.held_out_bits, rel=1e-2)
    assert coded.held_out_bits != exact.held_out_bits
    assert coded.held_out_bits[4] < coded.held_out_bits[0]
    assert exact.memory is not None and coded.memory is not None
    assert coded.memory.parameters < 0.5 * exact.memory.parameters


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda folder: {"model": str(folder / "nothing")}, "Give gpt, a config.json, or the"),
        (lambda folder: {"context": 17}, "is made for 16 tokens"),
        (lambda folder: {"lora_targets": ("qkv",), "lora_rank": 2}, "qkv"),
        (lambda folder: {"model": "gpt", "lora_rank": 2}, "give --model a folder with weights"),
    ],
)
def test_models_that_do_not_fit(
    change: Callable[[Path], dict[str, Any]], advice: str, llama: Path, text: Path
) -> None:
    options = dataclasses.replace(SMALL, data=(text,), **{"model": str(llama), **change(llama)})
    with pytest.raises(ConfigError, match=advice):
        models.build(options, models.Vocabulary(size=256, end=0), torch.device("cpu"))


def test_a_tokenizer_with_more_tokens_than_the_model(llama: Path) -> None:
    options = dataclasses.replace(SMALL, model=str(llama))
    with pytest.raises(ConfigError, match=r"has 301 tokens, and .* knows 300"):
        models.build(options, models.Vocabulary(size=301, end=0), torch.device("cpu"))


def test_without_transformers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    options = dataclasses.replace(SMALL, model=str(llama))
    with pytest.raises(ConfigError, match=r"pip install 'onecopy\[hf\]'"):
        models.build(options, models.Vocabulary(size=256, end=0), torch.device("cpu"))
