"""The section `zero_optimization`: stages, offload, hierarchies of ranks, fewer bits."""

from __future__ import annotations

from typing import Any

from onecopy.deepspeed_config.catalogue import ZERO
from onecopy.deepspeed_config.reading import Reading
from onecopy.errors import ConfigError
from onecopy.policies import Offload, Quantize

__all__ = ["map_zero"]

OPTIMIZER, PARAMETERS = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
HPZ, MICS = f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.mics_shard_size"
# What DeepSpeed cuts over all ranks, by the number of its stage.
CUT = {
    0: frozenset[str](),
    1: frozenset({"optimizer states"}),
    2: frozenset({"optimizer states", "gradients"}),
    3: frozenset({"optimizer states", "gradients", "parameters"}),
}
TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
CODES = {"weights": "int8", "gradients": ("int8", "int4"), "frozen": "int8"}
QUANTIZED = {
    f"{ZERO}.zero_quantized_weights": "weights",
    f"{ZERO}.zero_quantized_gradients": "gradients",
    f"{ZERO}.zero_quantized_nontrainable_weights": "frozen",
}
LOCO = f"{ZERO}.zeropp_loco_param"
# What err_beta and reset_T of LoCo are here, too.
LOCO_SETTINGS = {"err_beta": 0.8, "reset_T": 1024}


def map_zero(reading: Reading, num_bytes: int) -> dict[str, Any]:
    """Settings of ours; `num_bytes` is what a parameter takes where it is computed with."""
    number = _number_of(reading)
    cut = CUT[3 if number is None else number]
    settings: dict[str, Any] = {} if number is None else {"stage": number}
    settings |= _map_nodes(reading, cut)
    settings |= _map_prefetch(reading, cut, num_bytes)
    offload = _map_offload(reading, cut)
    if offload is not None:
        settings["offload"] = offload
    quantize = _map_quantize(reading, cut)
    if quantize is not None:
        settings["quantize"] = quantize
    return settings


def _number_of(reading: Reading) -> int | None:
    """The number of the stage; None where somebody else is to say it."""
    key = f"{ZERO}.stage"
    if reading.is_auto(key) or reading.is_auto(ZERO):
        return None
    if ZERO in reading:
        # Old files say true for what was there then.
        number = int(reading.value(ZERO, False))
        reading.mapped(ZERO, f"stage={number}; write an object with a stage (deprecated spelling)")
        return number
    number = int(reading.value(key, 0))
    if number not in CUT:
        reading.refused(key, "stages are 0, 1, 2 and 3")
        return 0
    reading.default(key, 0, "stage=0: DeepSpeed cuts nothing unless it is told to")
    reading.mapped(key, f"stage={number}")
    return number


def _map_nodes(reading: Reading, cut: frozenset[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    wanted = {"hpz": (HPZ, reading.value(HPZ, 1)), "mics": (MICS, reading.value(MICS, -1))}
    asked = {name: (key, int(size)) for name, (key, size) in wanted.items() if size > 1}
    if len(asked) > 1:
        reading.refused(MICS, f"with {HPZ} there are two ways to cut: remove one of both")
    for name, (key, size) in asked.items():
        if "parameters" not in cut:
            reading.ignored(key, "parameters are cut at stage 3 only")
        else:
            settings = {"stage": name, "node_size": size}
            reading.mapped(key, f'stage="{name}", node_size={size}')
    for key in (HPZ, MICS):
        reading.ignored(key, "1, 0 or -1 is off")
    return settings


def _map_prefetch(reading: Reading, cut: frozenset[str], num_bytes: int) -> dict[str, Any]:
    key = f"{ZERO}.stage3_prefetch_bucket_size"
    if "parameters" not in cut:
        reading.ignored(key, "parameters are gathered at stage 3 only")
    elements = reading.value(key)
    if elements is None or "parameters" not in cut:
        return {}
    if elements < 0:
        reading.refused(key, "give 0 or more elements")
        return {}
    size = int(elements) * num_bytes
    reading.mapped(key, f"prefetch_bytes={size}: {num_bytes} bytes for each element")
    return {"prefetch_bytes": size}


def _map_offload(reading: Reading, cut: frozenset[str]) -> Offload | None:
    places = {
        "optimizer": _tier_of(reading, OPTIMIZER, f"{ZERO}.cpu_offload"),
        "parameters": _tier_of(reading, PARAMETERS, f"{ZERO}.cpu_offload_param"),
    }
    if not cut:
        _ignore_all(reading, OPTIMIZER, "DeepSpeed offloads at stages 1 to 3")
        places["optimizer"] = "device"
    if "parameters" not in cut:
        _ignore_all(reading, PARAMETERS, "DeepSpeed offloads parameters at stage 3")
        places["parameters"] = "device"
    places["gradients"] = places["optimizer"]
    if places["parameters"] == "nvme" != places["optimizer"]:
        reading.refused(
            f"{PARAMETERS}.device",
            'parameters on a drive lie below their masters: say "nvme" in offload_optimizer too, '
            'or "cpu" here',
        )
        for section in (OPTIMIZER, PARAMETERS):
            _ignore_all(reading, section, "where states lie is refused")
        return None
    settings: dict[str, Any] = {name: tier for name, tier in places.items() if tier != "device"}
    settings |= _path_of(reading, places) | _fraction_of(reading, cut, places)
    settings |= _super_offload(reading, places)
    _answer_devices(reading, places)
    if not settings:
        return None
    try:
        return Offload(**settings)
    except ConfigError as error:
        reading.refused(f"{OPTIMIZER}.device", str(error))
        return None


def _tier_of(reading: Reading, section: str, old: str) -> str:
    key = f"{section}.device"
    if key not in reading and reading.value(old, False):
        return "host"
    device = str(reading.value(key, "none"))
    if device not in TIERS:
        reading.refused(key, 'give "none", "cpu" or "nvme"')
    return TIERS.get(device, "device")


def _answer_devices(reading: Reading, places: dict[str, str]) -> None:
    optimizer, parameters = places["optimizer"], places["parameters"]
    said = f'Offload(optimizer="{optimizer}", gradients="{optimizer}")'
    for key in (f"{OPTIMIZER}.device", f"{ZERO}.cpu_offload"):
        reading.mapped(key, said if optimizer != "device" else "no offload")
    said = f'Offload(parameters="{parameters}")'
    for key in (f"{PARAMETERS}.device", f"{ZERO}.cpu_offload_param"):
        reading.mapped(key, said if parameters != "device" else "no offload")


def _path_of(reading: Reading, places: dict[str, str]) -> dict[str, Any]:
    keys = {f"{OPTIMIZER}.nvme_path": "optimizer", f"{PARAMETERS}.nvme_path": "parameters"}
    paths = {
        key: reading.value(key)
        for key, what in keys.items()
        if places[what] == "nvme" and reading.value(key) is not None
    }
    for key, path in paths.items():
        if path == next(iter(paths.values())):
            reading.mapped(key, f'Offload(path="{path}")')
        else:
            reading.refused(key, "parameters and masters lie in one folder: give one path for both")
    for key, what in keys.items():
        if places[what] == "nvme" and not paths:
            where = f"{key.rpartition('.')[0]}.device"
            reading.refused(where, "a drive needs nvme_path, a folder on it: add it to the section")
        reading.ignored(key, "nothing of this lies on a drive")
    return {"path": next(iter(paths.values()))} if paths else {}


def _fraction_of(reading: Reading, cut: frozenset[str], places: dict[str, str]) -> dict[str, Any]:
    key = f"{OPTIMIZER}.ratio"
    ratio = reading.value(key, 1.0)
    if not 0 <= ratio <= 1:
        reading.refused(key, "give a share, from 0 to 1")
    elif "parameters" in cut and places["optimizer"] != "device" and ratio < 1:
        reading.mapped(key, f"Offload(fraction={ratio})")
        return {"fraction": float(ratio)}
    reading.ignored(key, "all states are offloaded, or none")
    return {}


def _super_offload(reading: Reading, places: dict[str, str]) -> dict[str, Any]:
    key = f"{OPTIMIZER}.super_offload"
    if reading.value(key, False) and places["optimizer"] == "host":
        reading.mapped(key, "Offload(speculative_step=True)")
        return {"speculative_step": True}
    reading.ignored(key, "off, or nothing is updated in host memory")
    return {}


def _ignore_all(reading: Reading, section: str, reason: str) -> None:
    old = {OPTIMIZER: f"{ZERO}.cpu_offload", PARAMETERS: f"{ZERO}.cpu_offload_param"}[section]
    for key in (old, *(f"{section}.{name}" for name in ("device", "nvme_path", "ratio"))):
        reading.ignored(key, reason)
    reading.ignored(f"{section}.super_offload", reason)


def _map_quantize(reading: Reading, cut: frozenset[str]) -> Quantize | None:
    chosen: dict[str, Any] = {"weights": None, "gradients": None}
    for key, name in QUANTIZED.items():
        if not reading.value(key, False):
            reading.ignored(key, "off")
        elif "parameters" not in cut:
            reading.ignored(key, "DeepSpeed quantizes at stage 3 only")
        else:
            chosen[name] = CODES[name]
            reading.mapped(key, f"Quantize({name}={CODES[name]!r})")
    if LOCO in reading:
        chosen |= _map_loco(reading, chosen)
    return None if set(chosen.values()) == {None} else Quantize(**chosen)


def _map_loco(reading: Reading, chosen: dict[str, Any]) -> dict[str, Any]:
    if chosen["gradients"] is None or reading.value(LOCO) is None:
        reading.ignored(LOCO, "gradients are not quantized")
        return {}
    asked = reading.value(LOCO)
    other = [name for name in asked if asked[name] != LOCO_SETTINGS.get(name)]
    if other:
        listed = ", ".join(f"{name} {value}" for name, value in LOCO_SETTINGS.items())
        reading.refused(LOCO, f"{', '.join(other)}: only {listed} are there. Give these")
        return {}
    reading.mapped(LOCO, "Quantize(error_feedback=True)")
    return {"error_feedback": True}
