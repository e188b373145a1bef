"""What run.json says of a run: models, settings with their origins, versions, machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

import onecopy
from onecopy import handle
from onecopy.config import Config
from onecopy.planner.optimizers import num_states
from onecopy.planner.sharded import memory_at_peak, model_traffic
from onecopy.recording.environment import chosen_variables
from onecopy.report.run_folder import FORMAT, Setting

if TYPE_CHECKING:
    from torch import nn

    from onecopy.core.engine import Engine
    from onecopy.core.unit import Unit

__all__ = ["describe_run", "device_name"]

PACKAGES = ("numpy", "transformers", "peft", "accelerate", "safetensors", "lightning")


def describe_run(
    models: Mapping[str, nn.Module], settings: Mapping[str, Any], hosts: list[str], started: float
) -> dict[str, Any]:
    """The contents of run.json at the begin of a run; see `onecopy.report.run_folder`."""
    return {
        "format": FORMAT,
        "status": "running",
        "error": None,
        "started": started,
        "seconds": None,
        "command": sys.argv,
        "world_size": len(hosts),
        "hosts": hosts,
        "versions": _versions(),
        "environment": chosen_variables(),
        "settings": {name: asdict(_setting(value)) for name, value in settings.items()},
        "models": [_model(name, model) for name, model in models.items()],
    }


def device_name(device: torch.device) -> str:
    """What the maker calls it, where torch knows that."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


def _setting(value: Any) -> Setting:
    if isinstance(value, Setting):
        return value
    return Setting(value=value, origin="argument of record")


def _model(name: str, model: nn.Module) -> dict[str, Any]:
    engine: Engine = handle.of(model).engine
    return {
        "name": name,
        "kind": type(model).__name__,
        "num_parameters": sum(one.numel() for one in model.parameters()),
        "units": [
            {
                "name": unit.name,
                "num_parameters": sum(one.numel() for one in unit.parameters),
                "num_bytes": unit.flat.numel() * unit.flat.itemsize,
                "trainable": unit.gradients is not None,
            }
            for unit in engine.units
        ],
        "settings": _settings_of(engine.config),
        "estimate": _estimate(model, engine),
    }


def _settings_of(config: Config) -> dict[str, dict[str, Any]]:
    """Without `sinks`, which are code; of a policy what differs from its defaults."""
    found = {}
    for item in fields(config):
        if item.compare:
            value = getattr(config, item.name)
            is_record = is_dataclass(value) and not isinstance(value, type)
            setting = Setting(
                value=_differing(value) if is_record else value,
                origin=config.origin_of(item.name),
                is_default=value == item.default,
            )
            found[item.name] = asdict(setting)
    return found


def _differing(policy: Any) -> dict[str, Any]:
    return {
        item.name: getattr(policy, item.name)
        for item in fields(policy)
        if getattr(policy, item.name) != item.default
    }


def _estimate(model: nn.Module, engine: Engine) -> dict[str, dict[str, int]]:
    states: dict[Unit, int | None] = {}
    for binding in handle.of(model).bindings:
        groups = binding.optimizer.param_groups
        pieces = [piece for group in groups for piece in group["params"]]
        of_optimizer, is_known = num_states(binding.optimizer, pieces)
        states.update((unit, of_optimizer if is_known else None) for unit in binding.units)
    traffic = model_traffic(engine, {0: states})
    return {
        "memory": memory_at_peak(engine, states),
        "sent": {
            "gather": 2 * traffic.gather + traffic.gather_once,
            "reduce": traffic.reduce + traffic.reduce_once,
            "refresh": traffic.refresh[0],
        },
    }


def _versions() -> dict[str, str]:
    found = {
        "onecopy": onecopy.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in PACKAGES:
        # Only what the program uses: looking for others takes time.
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found
