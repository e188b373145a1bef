"""Code to paste: what replaces a configuration of DeepSpeed in a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.deepspeed_config.optimizers import OptimizerCall
from onecopy.deepspeed_config.schedules import Schedule
from onecopy.policies import Offload, Precision, Quantize

__all__ = ["Script", "written_settings"]

LINE = 88


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a configuration says of a script, in plain PyTorch beside the call of shard.

    settings: those of `shard`.
    steps: backwards for each update.
    activations: where inputs of checkpointed blocks go; None for no checkpointing.
    autocast: a dtype, for torch.autocast around forward.
    """

    settings: dict[str, Any]
    optimizer: OptimizerCall | None
    schedule: Schedule | None
    steps: int
    activations: str | None
    autocast: str | None

    def code(self) -> str:
        """Lines that need `model`, `loader` and `loss_of(batch)`, and without a section of an
        optimizer also `optimizer`.
        """
        imports = ["import math", ""] if self.schedule else []
        if self.optimizer or self.schedule or self.autocast:
            imports += ["import torch", ""]
        optimizer, schedule = self._optimizer(), self._schedule()
        yours = "model, " + "optimizer, " * (not optimizer) + "loader and loss_of(batch)"
        lines = [*imports, "import onecopy", "", f"# {yours} are yours", *optimizer]
        lines += call("onecopy.shard", ["model", "optimizer", *written_settings(self.settings)])
        lines += self._activations()
        return "\n".join([*lines, *schedule, "", *self._loop()]) + "\n"

    def _optimizer(self) -> list[str]:
        made = self.optimizer
        if made is None:
            return []
        lines = [f'# "auto" in the file: write your {", ".join(made.open)}'] if made.open else []
        given = [
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value in made.arguments.items()
        ]
        name = f"optimizer = torch.optim.{made.name}"
        return [*lines, *call(name, ["model.parameters()", *given])]

    def _activations(self) -> list[str]:
        if self.activations is None:
            return []
        place = "" if self.activations == "device" else f', place="{self.activations}"'
        return [f"onecopy.checkpoint_activations(model{place})"]

    def _schedule(self) -> list[str]:
        return [] if self.schedule is None else ["", *self.schedule.code()]

    def _loop(self) -> list[str]:
        forward = ["    loss = loss_of(batch)"]
        if self.autocast is not None:
            dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.autocast]
            forward = [
                f"    with torch.autocast(next(model.parameters()).device.type, torch.{dtype}):",
                "        loss = loss_of(batch)",
            ]
        update = ["optimizer.step()", *["scheduler.step()"] * (self.schedule is not None)]
        update.append("optimizer.zero_grad()")
        if self.steps == 1:
            return ["for batch in loader:", *forward, "    loss.backward()", *_indented(update, 1)]
        return [
            "for number, batch in enumerate(loader, start=1):",
            *forward,
            f"    (loss / {self.steps}).backward()",
            f"    if number % {self.steps} == 0:",
            *_indented(update, 2),
        ]


def written_settings(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments of shard."""
    return [f"{name}={_written(value)}" for name, value in settings.items()]


def call(name: str, arguments: list[str]) -> list[str]:
    """A call, in as many lines as it needs."""
    one = f"{name}({', '.join(arguments)})"
    if len(one) <= LINE:
        return [one]
    return [f"{name}(", *(f"    {argument}," for argument in arguments), ")"]


def _written(value: Any) -> str:
    if isinstance(value, Precision):
        if value == Precision(compute=value.compute):
            return f'"{value.compute}"'
        return f"onecopy.{value.written()}"
    if isinstance(value, Quantize):
        return '"zero++"' if value == Quantize() else f"onecopy.{value.written()}"
    if isinstance(value, Offload):
        return value.written()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _indented(lines: list[str], depth: int) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]
