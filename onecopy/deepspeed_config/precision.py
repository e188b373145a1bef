"""The sections of dtypes: what forward computes in, what travels, what masters and sums are."""

from __future__ import annotations

from typing import Any

from onecopy.deepspeed_config.keys import DTYPES
from onecopy.deepspeed_config.reading import Reading
from onecopy.policies import Precision

__all__ = ["BYTES", "autocast_dtype", "map_precision"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP16, BF16 = "fp16.enabled", "bf16.enabled"
AUTOCAST = "torch_autocast.enabled"


def map_precision(reading: Reading) -> Precision | None:
    """The policy; None where the parameters' own dtypes stay."""
    settings: dict[str, Any] = _compute(reading)
    settings |= _fp16(reading, is_on=settings.get("compute") == "fp16")
    settings |= _bf16(reading, is_on=settings.get("compute") == "bf16")
    key = "communication_data_type"
    if reading.value(key) is not None:
        settings["reduce"] = DTYPES[reading.value(key).lower()]
        reading.mapped(key, f'Precision(reduce="{settings["reduce"]}"); sums are made in fp32')
    reading.ignored(key, "gradients travel in the dtype that is computed in")
    settings |= _gradient(reading)
    return Precision(**settings) if settings else None


def autocast_dtype(reading: Reading) -> str | None:
    """The dtype of torch.autocast around forward, where it is asked for."""
    if not reading.value(AUTOCAST, False):
        for key in (AUTOCAST, "torch_autocast.dtype"):
            reading.ignored(key, "off")
        return None
    dtype = DTYPES[str(reading.value("torch_autocast.dtype", "bf16")).lower()]
    for key in (AUTOCAST, "torch_autocast.dtype"):
        reading.left(key, "torch.autocast around forward, see the code")
    return dtype


def _compute(reading: Reading) -> dict[str, Any]:
    on = [name for name, key in (("fp16", FP16), ("bf16", BF16)) if reading.value(key, False)]
    if len(on) > 1:
        reading.refused(BF16, "fp16 is enabled too: remove one of both")
        on = on[:1]
    for name, key in (("fp16", FP16), ("bf16", BF16)):
        if name in on:
            reading.mapped(key, f'precision="{name}", with fp32 masters')
        reading.ignored(key, "off")
    key = "data_types.param_dtype"
    dtype = reading.value(key)
    if dtype is not None:
        on = [DTYPES[dtype.lower()]]
        reading.mapped(key, f'Precision(compute="{on[0]}")')
    reading.ignored(key, "not set")
    return {"compute": on[0]} if on else {}


def _fp16(reading: Reading, *, is_on: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    cast, scale = "fp16.auto_cast", "fp16.loss_scale"
    masters = "fp16.fp16_master_weights_and_grads"
    if is_on and reading.value(masters, False):
        reading.refused(
            masters,
            "masters in fp16 lose most updates: remove it; with bf16 there is "
            'Precision(master="bf16") (docs/memory-lean.md)',
        )
    if is_on and reading.value(scale, 0) < 0:
        reading.refused(scale, "give a positive factor, or 0 to let it be found")
    elif is_on and reading.value(scale, 0) > 0:
        settings["loss_scale"] = float(reading.value(scale))
        reading.mapped(scale, f"Precision(loss_scale={settings['loss_scale']})")
    if is_on and reading.value(cast) is not None:
        if not reading.value(cast):
            settings["cast_inputs"] = False
        reading.mapped(cast, f"Precision(cast_inputs={bool(reading.value(cast))})")
    for key in (masters, scale, cast):
        reading.ignored(key, "the scale is found by itself" if is_on and key == scale else "off")
    return settings


def _bf16(reading: Reading, *, is_on: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    masters, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    check = "bf16.check_grad_overflow"
    if is_on and reading.value(masters, False):
        settings["master"] = "bf16"
        reading.mapped(masters, 'Precision(master="bf16"): small updates are lost')
        if reading.value(states, False):
            reading.mapped(states, "the same: states have the dtype of what is updated")
        elif reading.value(states) is False:
            reading.refused(
                states,
                "states have the dtype of what is updated, bf16: say true, or remove "
                "bf16_master_weights_and_grads",
            )
    if is_on and reading.value(check, False):
        reading.left(
            check,
            "steps with gradients that are not finite are not skipped in bf16: look at the norm "
            "that clip_grad_norm_ returns",
        )
    for key in (masters, states, check):
        reading.ignored(key, "off")
    return settings


def _gradient(reading: Reading) -> dict[str, Any]:
    key = "data_types.grad_accum_dtype"
    dtype = reading.value(key)
    if dtype is None:
        reading.ignored(key, "owners keep gradients in the dtype of their masters")
        return {}
    name = DTYPES[dtype.lower()]
    if name == "fp16":
        reading.refused(key, 'sums in fp16 overflow: give "fp32" or "bf16"')
        return {}
    reading.mapped(key, f'Precision(gradient="{name}")')
    return {"gradient": name}
