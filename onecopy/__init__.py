"""onecopy: train a PyTorch model on many devices while the cluster keeps one copy of its states.

    onecopy.shard(model, optimizer, stage=3)

The public names are imported when first used, so that commands start without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecopy.api import clip_grad_norm_ as clip_grad_norm_
    from onecopy.api import config_of as config_of
    from onecopy.api import flush as flush
    from onecopy.api import full_parameters as full_parameters
    from onecopy.api import no_sync as no_sync
    from onecopy.api import shard as shard
    from onecopy.api import unshard as unshard
    from onecopy.checkpoint.background import async_save as async_save
    from onecopy.checkpoint.export import export as export
    from onecopy.checkpoint.loading import load as load
    from onecopy.checkpoint.saving import save as save
    from onecopy.config import Config as Config
    from onecopy.core.activations import checkpoint_activations as checkpoint_activations
    from onecopy.core.build import init_sharded as init_sharded
    from onecopy.core.pretrained import load_pretrained as load_pretrained
    from onecopy.core.tiling import tile_linears as tile_linears
    from onecopy.core.uneven import join as join
    from onecopy.core.uneven import loss_weight as loss_weight
    from onecopy.errors import OneCopyError as OneCopyError
    from onecopy.launcher import launch as launch
    from onecopy.planner.plan import plan as plan
    from onecopy.policies import Offload as Offload
    from onecopy.policies import Precision as Precision
    from onecopy.policies import Quantize as Quantize
    from onecopy.recording.record import record as record

__version__ = "0.1.0.dev0"

_WHERE = {
    "Config": "onecopy.config",
    "Offload": "onecopy.policies",
    "OneCopyError": "onecopy.errors",
    "Precision": "onecopy.policies",
    "Quantize": "onecopy.policies",
    "async_save": "onecopy.checkpoint.background",
    "checkpoint_activations": "onecopy.core.activations",
    "clip_grad_norm_": "onecopy.api",
    "config_of": "onecopy.api",
    "flush": "onecopy.api",
    "full_parameters": "onecopy.api",
    "export": "onecopy.checkpoint.export",
    "init_sharded": "onecopy.core.build",
    "join": "onecopy.core.uneven",
    "launch": "onecopy.launcher",
    "load": "onecopy.checkpoint.loading",
    "load_pretrained": "onecopy.core.pretrained",
    "loss_weight": "onecopy.core.uneven",
    "no_sync": "onecopy.api",
    "plan": "onecopy.planner.plan",
    "record": "onecopy.recording.record",
    "save": "onecopy.checkpoint.saving",
    "shard": "onecopy.api",
    "tile_linears": "onecopy.core.tiling",
    "unshard": "onecopy.api",
}

__all__ = [
    "Config",
    "Offload",
    "OneCopyError",
    "Precision",
    "Quantize",
    "async_save",
    "checkpoint_activations",
    "clip_grad_norm_",
    "config_of",
    "export",
    "flush",
    "full_parameters",
    "init_sharded",
    "join",
    "launch",
    "load",
    "load_pretrained",
    "loss_weight",
    "no_sync",
    "plan",
    "record",
    "save",
    "shard",
    "tile_linears",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name in ("errors", "events", "parallel"):
        return import_module(f"onecopy.{name}")
    raise AttributeError(f"module 'onecopy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
