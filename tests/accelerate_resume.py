"""What the ranks of tests/test_accelerate_states.py run: scripts that save, load and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerate_scripts import Loop, accelerator, loader, prepare, values
from tests.loops import net


class Counter:
    """Something of the user's that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Resumable:
    """A model with dropout, so that random states count, and all that Accelerate saves."""

    def __init__(self, accelerator: Any, stage: int | None, seed: int = 0) -> None:
        model = nn.Sequential(net(seed), nn.Dropout(0.2))
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        self.accelerator, self.counter = accelerator, Counter()
        self.loop = Loop(
            accelerator,
            *prepare(accelerator, stage, model, loader(4), optimizer, scheduler),
        )
        accelerator.register_for_checkpointing(self.counter)

    def go_on(self) -> dict[str, Any]:
        """An epoch; everything that it has seen, or that a checkpoint should bring back."""
        self.loop.seen = {"losses": [], "norms": [], "rates": [], "skipped": []}
        self.counter.count += 1
        begin = self.state()
        self.loop.epoch()
        return {"begin": begin, "seen": self.loop.seen, "end": self.state()}

    def state(self) -> dict[str, Any]:
        """What is to be as it was."""
        return {
            "values": values(self.accelerator, self.loop.model),
            "rate": self.loop.scheduler.get_last_lr()[0],
            "count": self.counter.count,
            "step": self.accelerator.step,
            "random": torch.get_rng_state(),
        }


def save_and_go_on(folder: str, stage: int | None) -> dict[str, Any]:
    """An epoch, `save_state`, and one more epoch."""
    with accelerator(gradient_accumulation_steps=3) as its_accelerator:
        script = Resumable(its_accelerator, stage)
        script.go_on()
        its_accelerator.save_state(folder)
        return script.go_on()


def load_and_go_on(folder: str, stage: int | None) -> dict[str, Any]:
    """Other values, `load_state`, and an epoch."""
    with accelerator(gradient_accumulation_steps=3) as its_accelerator:
        script = Resumable(its_accelerator, stage, seed=1)
        its_accelerator.load_state(folder)
        return script.go_on()


def save_often(folder: str) -> dict[str, Any]:
    """Automatic names, of which one is kept; `load_state` at once, without a barrier between."""
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    with accelerator(project_config=project) as its_accelerator:
        script = Resumable(its_accelerator, 3)
        for _ in range(3):
            script.go_on()
            saved = script.state()
            its_accelerator.save_state()
            its_accelerator.load_state()
        loaded = script.state()
    with accelerator() as its_accelerator:
        script = Resumable(its_accelerator, 3)
        its_accelerator.save_state(f"{folder}/fixed")
        script.go_on()
        its_accelerator.save_state(f"{folder}/fixed")
        saved_again = script.state()
        script.go_on()
        its_accelerator.load_state(f"{folder}/fixed")
        loaded = [loaded, script.state()]
    names = sorted(one.name for one in Path(folder, "checkpoints").iterdir())
    steps = sorted(one.name for one in Path(folder, "fixed", "onecopy").iterdir())
    return {"saved": [saved, saved_again], "loaded": loaded, "names": names, "steps": steps}


def save_models(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save the model, twice into the same folder; its values, and what Accelerate reads again."""
    from accelerate import load_checkpoint_in_model

    with accelerator() as its_accelerator:
        script = Resumable(its_accelerator, 3)
        model = script.loop.model
        assert its_accelerator.unwrap_model(model) is model
        its_accelerator.save_model(model, f"{folder}/whole", max_shard_size="0.2KB")
        script.go_on()
        its_accelerator.save_model(model, f"{folder}/whole")
        its_accelerator.save_model(model, f"{folder}/parts", max_shard_size="0.2KB")
        its_accelerator.save_model(model, f"{folder}/pickled", safe_serialization=False)
        its_accelerator.wait_for_everyone()
        loaded = nn.Sequential(net(1), nn.Dropout(0.2))
        load_checkpoint_in_model(loaded, f"{folder}/parts")
        return its_accelerator.get_state_dict(model), loaded.state_dict()


def two_models(folder: str, stage: int | None) -> dict[str, Any]:
    """A generator and a critic, with an optimizer each, and a third that Accelerate has alone."""
    with accelerator() as its_accelerator:
        models = [net(0), net(1)]
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in models]
        teacher = net(2).requires_grad_(False)
        results = prepare(its_accelerator, stage, models[0], optimizers[0], models[1])
        optimizers = [results[1], prepare(its_accelerator, stage, optimizers[1])]
        models = [results[0], results[2]]
        teacher = its_accelerator.prepare_model(teacher, evaluation_mode=True)
        before = [one.clone() for one in teacher.parameters()]
        _play(its_accelerator, models, optimizers)
        its_accelerator.save_state(folder)
        expected = [values(its_accelerator, one) for one in models]
        _play(its_accelerator, models, optimizers)
        with torch.no_grad():
            teacher[0].weight.zero_()
        its_accelerator.load_state(folder)
        assert all(map(torch.equal, before, teacher.parameters()))
        loaded = [values(its_accelerator, one) for one in models]
        _play(its_accelerator, models, optimizers)
        after = [values(its_accelerator, one) for one in models]
        its_accelerator.free_memory(*models, *optimizers)
        its_accelerator.save_state(f"{folder}/empty")
    return {"expected": expected, "loaded": loaded, "after": after}


def _play(its_accelerator: Any, models: list[Any], optimizers: list[Any]) -> None:
    for x, y in its_accelerator.prepare(loader(4)):
        for model, other, optimizer in zip(models, reversed(models), optimizers, strict=True):
            target = other(x).detach() + y
            its_accelerator.backward(nn.functional.mse_loss(model(x), target))
            its_accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def load_of_ddp(folder: str) -> None:
    """A checkpoint of Accelerate's own, given to a sharded model."""
    with accelerator() as its_accelerator:
        Resumable(its_accelerator, None)
        its_accelerator.save_state(folder)
        its_accelerator.wait_for_everyone()
    with accelerator() as its_accelerator:
        Resumable(its_accelerator, 3)
        its_accelerator.load_state(folder)
