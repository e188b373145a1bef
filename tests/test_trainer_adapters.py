"""LoRA by PEFT in the Trainer, and TRL's trainers: as with DistributedDataParallel."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("transformers", reason="transformers is not installed: the test extra")
pytest.importorskip("peft", reason="peft is not installed: the test extra")

import onecopy
from tests import models
from tests.pool import Pool
from tests.trainers import Seen, launched, quiet, seen_of, trainer_of


def with_lora(seed: int = 5) -> Any:
    """A frozen Llama with adapters, and a head that is trained whole."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model: Any = models.build("hf_llama")
    with warnings.catch_warnings():
        # peft asks transformers for something that transformers wants to rename.
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def train(stage: int | None, folder: Path, resume: Path | None = None) -> Seen:
    """Four steps, and the best model, which is the one after two; then merged."""
    with launched(), quiet():
        trainer = trainer_of(
            stage,
            with_lora(seed=5 if resume is None else 99),
            folder,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        trainer.save_model(str(folder / "final"))
        seen = seen_of(trainer)
        if stage is not None:
            onecopy.unshard(trainer.model)
        merged = trainer.model.merge_and_unload()
        tokens = torch.arange(8).view(1, 8)
        with torch.no_grad():
            seen.values["merged"] = merged(input_ids=tokens).logits
        return seen


def train_all(runs: list[tuple[int | None, Path, Path | None]]) -> list[Seen]:
    return [train(*run) for run in runs]


def check(found: Seen, expected: Seen) -> None:
    # The last is the mean loss of one call of train(), which may be half of a run.
    assert found.logs[:-1] == pytest.approx(expected.logs[:-1], rel=1e-6)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-6, atol=1e-6)


def test_lora_is_trained_saved_and_resumed(pool: Pool, tmp_path: Path) -> None:
    ddp, ours, other, resumed = (tmp_path / name for name in ("ddp", "ours", "other", "resumed"))
    runs = [(None, ddp, None), (3, ours, None), (1, other, None)]
    runs += [(2, resumed, ours / "checkpoint-2")]
    of_ddp, *others = pool.run(2, train_all, runs, timeout=240)[0]
    for one in others:
        check(one, of_ddp)

    # PEFT's files are what they are without onecopy, and the base model is in none.
    adapters = load_file(ddp / "final" / "adapter_model.safetensors")
    found = load_file(ours / "final" / "adapter_model.safetensors")
    assert set(found) == set(adapters)
    for name, value in adapters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
    (folder,) = (ours / "checkpoint-2" / "onecopy").glob("step-*")
    stored = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert not [key for key in stored if "base_layer" in key or "mlp" in key]


def tokenizer() -> Any:
    """One that knows the words w0 to w89."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number + 2 for number in range(90)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def train_by_trl(kind: str, stage: int | None, folder: Path) -> Seen:
    """SFT, SFT with LoRA, or DPO."""
    import peft
    import trl
    from datasets import Dataset

    from onecopy.integrations.huggingface import OneCopyMixin

    name = "DPO" if kind == "dpo" else "SFT"
    base, arguments = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    if stage is not None:
        base = type("Ours", (OneCopyMixin, base), {})
    texts = [" ".join(f"w{(i * 7 + j * 3) % 90}" for j in range(5 + i % 7)) for i in range(32)]
    rows = [{"text": text} for text in texts]
    if kind == "dpo":
        rows = [{"prompt": "w1 w2", "chosen": f" {one}", "rejected": " w3 w4"} for one in texts]
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    others = {"ref_model": models.build("hf_llama", seed=1)} if kind == "dpo" else {}
    with launched(), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of trl and peft
        trainer = trainer_of(
            stage,
            models.build("hf_llama"),
            folder,
            base=base,
            arguments=arguments,
            data=Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=lora if kind == "sft, lora" else None,
            bf16=False,
            max_length=16,
            **others,
        )
        trainer.train()
        return seen_of(trainer)


def train_all_by_trl(runs: list[tuple[str, int | None]], folder: Path) -> list[Seen]:
    return [train_by_trl(kind, stage, folder) for kind, stage in runs]


def test_trainers_of_trl(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed: the test extra")
    kinds = ("sft", "sft, lora", "dpo")
    runs = [(kind, stage) for kind in kinds for stage in (None, 1, 3)]
    for found in pool.run(2, train_all_by_trl, runs, tmp_path, timeout=280, record_warnings=True):
        for number in range(len(kinds)):
            of_ddp, *ours = found[3 * number : 3 * number + 3]
            for one in ours:
                check(one, of_ddp)
