"""What the ranks of tests/test_lightning_checkpoints.py run: trainers that save and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onecopy.events
import onecopy.handle
from tests.lightning_runs import Run, launched, module_of, samples, trainer_of, values


def fit_and_save(run: Run, folder: str) -> dict[str, Any]:
    """Two epochs, each saved by ModelCheckpoint; and by hand without optimizers."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    with launched():
        module = module_of(run)
        torch.manual_seed(dist.get_rank())
        keeper = ModelCheckpoint(
            folder, filename="{epoch}", monitor="val", save_top_k=2, save_last=True
        )
        trainer = trainer_of(
            run, enable_checkpointing=True, callbacks=[keeper, EarlyStopping("val", patience=5)]
        )
        trainer.fit(module, samples(), samples())
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        saved = sorted(one.name for one in Path(folder).iterdir())
        trainer.save_checkpoint(f"{folder}/by_hand.ckpt")
        trainer.save_checkpoint(f"{folder}/by_hand.ckpt")
        whole = trainer.strategy.lightning_module_state_dict()
        assert all(torch.equal(whole[name], value) for name, value in values(module).items())
        tested = trainer.test(module, samples(), verbose=False)
        predicted = trainer.predict(module, samples())
        return {
            "values": values(module),
            "losses": module.losses,
            "saved": saved,
            "best": Path(keeper.best_model_path).name,
            "tested": tested,
            "predicted": torch.cat(predicted),
        }


def resume(run: Run, path: str) -> dict[str, Any]:
    """Go on from a checkpoint with another model."""
    with launched():
        module, trainer = module_of(run), trainer_of(run)
        torch.manual_seed(7)
        trainer.fit(module, samples(), samples(), ckpt_path=path)
        return {
            "values": values(module),
            "losses": module.losses,
            "step": trainer.global_step,
            "rates": trainer.optimizers[0].param_groups[0]["lr"],
        }


def evaluate(run: Run, path: str) -> dict[str, Any]:
    """A trainer that only tests, from a checkpoint."""
    with launched():
        module, trainer = module_of(run), trainer_of(run)
        tested = trainer.test(module, samples(), ckpt_path=path, verbose=False)
        return {"tested": tested, "values": values(module)}


def evaluate_after_training(run: Run, folder: str) -> dict[str, Any]:
    """A trainer that evaluates what it has saved before the end, as with ckpt_path="best"."""
    with launched():
        module, trainer = module_of(run), trainer_of(run)
        trainer.fit(module, samples())
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        trainer.optimizers[0].param_groups[0]["lr"] = 0.125
        trainer.test(module, samples(), ckpt_path=f"{folder}/one.ckpt", verbose=False)
        return {"rate": trainer.optimizers[0].param_groups[0]["lr"]}


def save_with_events(run: Run, folder: str) -> list[str]:
    """What a checkpoint does with units."""
    with launched():
        module, trainer = module_of(run), trainer_of(run)
        trainer.fit(module, samples())
        seen: list[str] = []
        onecopy.events.add_sink(module, lambda event: seen.append(event.kind))
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        return seen


def fit_twice(run: Run) -> list[Any]:
    """A module is validated, trained, and trained again by another trainer."""
    with launched():
        module = module_of(run)
        trainer_of(run).validate(module, samples(), verbose=False)
        trainer_of(run).fit(module, samples())
        trainer_of(run).fit(module, samples())
        return [values(module), module.losses]


def load_from_file(run: Run, file: str) -> dict[str, Any]:
    """A module alone, as it is loaded for inference."""
    with launched():
        return values(type(module_of(run)).load_from_checkpoint(file, run=run))
