"""What each contender must hold and send at least, by the closed formulas of onecopy's planner."""

from __future__ import annotations

import torch

from benchmarks.contenders import ONECOPY, Setting
from benchmarks.model import GPT, SIZES
from onecopy.planner.estimate import elements_sent, state_bytes, widths_of
from onecopy.policies import Precision

__all__ = ["cut_of", "floor_of", "least_bytes_sent", "num_parameters", "states_at_rest"]

ADAM_STATES = 2
CUTS = {"ddp": 0, "zero_redundancy": 1, "fsdp2": 3, "fsdp2-keep": 3}


def cut_of(name: str) -> int | None:
    """The stage that cuts states as a contender does; None for compute alone."""
    if name == "compute":
        return None
    if name in CUTS:
        return CUTS[name]
    if name in ONECOPY and isinstance(ONECOPY[name]["stage"], str):
        return 3
    if name in ONECOPY:
        return int(ONECOPY[name]["stage"])
    return int(name.split("-")[1])


def floor_of(name: str) -> str:
    """The floor that sends as much.

    Parameters that fsdp2-keep has gathered stay until backward: one gather and one reduce.
    """
    cut = 1 if name == "fsdp2-keep" else cut_of(name)
    return f"floor-{1 if cut == 2 else cut}"


def states_at_rest(name: str, setting: Setting) -> int | None:
    """Bytes of model states per rank between backward and the update, as its cut needs them.

    None where there is no formula: states elsewhere, floors.
    """
    cut = cut_of(name)
    if cut is None or name.startswith("floor") or name.endswith(("-cpu", "-nvme")):
        return None
    widths = widths_of(Precision(compute=setting.dtype), ADAM_STATES)
    return state_bytes(cut, num_parameters(setting), setting.nproc, widths).total


def least_bytes_sent(name: str, setting: Setting) -> float | None:
    """Bytes that a rank must send per step; None where values are quantized, or none are sent."""
    cut = cut_of(name)
    if cut is None or ONECOPY.get(name, {}).get("quantize") is not None:
        return None
    if name == "fsdp2-keep":
        cut = 2
    itemsize = {"fp32": 4, "bf16": 2}[setting.dtype]
    return float(elements_sent(cut, setting.nproc) * num_parameters(setting) * itemsize)


def num_parameters(setting: Setting) -> int:
    """Elements of the model, shared ones once."""
    with torch.device("meta"):
        model = GPT(SIZES[setting.size], setting.context)
    return sum(parameter.numel() for parameter in model.parameters())
