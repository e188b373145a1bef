"""The section `optimizer`: the call of torch.optim that makes the same optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onecopy.deepspeed_config.reading import AUTO, Reading, meant

__all__ = ["ARGUMENTS", "OptimizerCall", "map_optimizer"]

TYPE, PARAMS = "optimizer.type", "optimizer.params"
COMMON = ("lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable")
ADAM = (*COMMON, "betas", "eps", "amsgrad", "fused")
# What each class of torch.optim takes.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "Adam": (*ADAM, "decoupled_weight_decay"),
    "AdamW": ADAM,
    "Adadelta": (*COMMON, "rho", "eps"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adagrad": (
        *("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
        *("foreach", "maximize", "differentiable", "fused"),
    ),
    "Adamax": (*COMMON, "betas", "eps"),
    "ASGD": (*COMMON, "lambd", "alpha", "t0"),
    "NAdam": (*COMMON, "betas", "eps", "momentum_decay", "decoupled_weight_decay"),
    "RAdam": (*COMMON, "betas", "eps", "decoupled_weight_decay"),
    "RMSprop": (*COMMON, "alpha", "eps", "centered", "momentum"),
    "Rprop": ("lr", "etas", "step_sizes", "maximize", "foreach", "capturable", "differentiable"),
    "SGD": (
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach"),
        *("differentiable", "fused"),
    ),
}
# DeepSpeed looks for these without regard to case, and makes them itself.
OWN = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
# What only chooses among DeepSpeed's implementations, and the values that change nothing.
CHOICES = {
    "torch_adam": (True, False),
    "adam_w_mode": (True, False),
    "fp32_optimizer_states": (True,),
    "bias_correction": (True,),
    "set_grad_none": (True,),
}
REFUSED = {
    "lamb": "LAMB",
    "onebitadam": "1-bit Adam",
    "zerooneadam": "0/1 Adam",
    "onebitlamb": "1-bit LAMB",
    "lion": "Lion",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}
YOUR_OWN = "remove the section, make an optimizer of any class yourself, and pass it to shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCall:
    """torch.optim.NAME(model.parameters(), ...); `open` are the arguments that were "auto"."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    open: tuple[str, ...] = ()


def map_optimizer(reading: Reading) -> OptimizerCall | None:
    """The call, where the configuration makes an optimizer."""
    kind = reading.value(TYPE)
    name = None if kind is None else _class_of(reading, kind)
    if name is None:
        for key in reading.inside(PARAMS):
            reading.ignored(f"{PARAMS}.{key}", f"{TYPE} is refused, or not there")
        return None
    call = _call(reading, name, kind.lower() in OWN)
    reading.left(TYPE, f"torch.optim.{call.name}, see the code")
    return call


def _class_of(reading: Reading, kind: str) -> str | None:
    """The class of torch.optim, or None where it is refused."""
    if kind.lower() in OWN:
        return OWN[kind.lower()]
    if kind.lower() == "muon":
        reading.refused(
            TYPE,
            "remove the section, and make torch.optim.Muon for matrices and AdamW for the rest, as "
            "in docs/optimizers.md",
        )
    elif kind.lower() in REFUSED:
        reading.refused(TYPE, f"{REFUSED[kind.lower()]} is not among torch.optim: {YOUR_OWN}")
    elif kind not in ARGUMENTS:
        refusal = f"torch.optim has no {kind} that could be sharded."
        hint = meant(kind, ARGUMENTS, "")
        reading.refused(TYPE, " ".join(filter(None, (refusal, hint, YOUR_OWN))))
    else:
        return kind
    return None


def _call(reading: Reading, name: str, is_own: bool) -> OptimizerCall:
    given = reading.inside(PARAMS)
    choices = {key: given.pop(key) for key in CHOICES if is_own and key in given}
    for key, value in choices.items():
        if value == AUTO or value in CHOICES[key]:
            reading.ignored(f"{PARAMS}.{key}", "it says which of DeepSpeed's optimizers is meant")
        else:
            reading.refused(f"{PARAMS}.{key}", f"torch.optim.{name} has no such mode: remove it")
    # Type Adam means AdamW, unless it says otherwise.
    if name == "Adam" and choices.get("adam_w_mode", True):
        name = "AdamW"
    for key in given:
        _answer_argument(reading, name, key, given[key])
    if is_own and name == "AdamW" and choices.get("torch_adam", False) in (False, AUTO):
        # DeepSpeed's own has none unless told; torch's has 0.01.
        given.setdefault("weight_decay", 0.0)
    return OptimizerCall(
        name=name,
        arguments={key: value for key, value in given.items() if value != AUTO},
        open=tuple(key for key in ARGUMENTS[name] if given.get(key) == AUTO),
    )


def _answer_argument(reading: Reading, name: str, key: str, value: Any) -> None:
    path = f"{PARAMS}.{key}"
    if key == "max_grad_norm":
        reading.refused(path, "remove it, and say gradient_clipping, at the top")
    elif key not in ARGUMENTS[name]:
        hint = meant(key, ARGUMENTS[name], "Remove it")
        reading.refused(path, f"torch.optim.{name} does not take it. {hint}")
    reading.left(path, f"torch.optim.{name}({key}={value!r}), see the code")
