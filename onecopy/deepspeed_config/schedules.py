"""The section `scheduler`: learning rates of DeepSpeed's schedules, as code for LambdaLR.

DeepSpeed's schedules begin with their first step(), after the first update: the update counted k
from 0 has the rate of step k - 1, and the first one that of before the beginning. Formulas:
DeepSpeed's documentation of learning rate schedulers, and its version 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.deepspeed_config.reading import AUTO, Reading, meant

__all__ = ["OPEN_STEPS", "Schedule", "map_schedule"]

TYPE, PARAMS = "scheduler.type", "scheduler.params"
OWN = "lr"  # the rate that the optimizer's group was made with
WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
# Arguments and DeepSpeed's defaults; total_num_steps has to be given.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {**WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": OWN},
    "WarmupDecayLR": {
        **WARMUP,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "total_num_steps": None,
    },
    "WarmupCosineLR": {
        **WARMUP,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 0.0001,
        "total_num_steps": None,
    },
}
# What "auto" is in the code until somebody writes a number.
OPEN_STEPS = {"warmup_num_steps": 100, "total_num_steps": 1000}
REMEDIES = {
    "OneCycle": "remove the section, and make torch.optim.lr_scheduler.OneCycleLR or CyclicLR",
    "LRRangeTest": "remove the section, and raise the rate step by step in your loop",
}
SHARES = {
    "log": "math.log(done + 1) / math.log(warmup_steps)",
    "linear": "done / warmup_steps",
}
RATES = '''
def learning_rate(update: int, lr: float) -> float:
    """As {name}: of the update counted from 0, for a group made with lr."""
    done = update - 1  # DeepSpeed's schedule begins after the first update
    if done < 0:
        return {first}
    if done < warmup_steps:
        share = {share}
    else:
        {after}
    return {rate}


scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    [
        lambda update, lr=group["lr"]: learning_rate(update, lr) / lr
        for group in optimizer.param_groups
    ],
)
'''
DECAY = {
    "WarmupLR": "share = 1.0",
    "WarmupDecayLR": "left = total_steps - done\n"
    "        share = max(0.0, left / max(1, total_steps - warmup_steps))",
    "WarmupCosineLR": "after = (done - warmup_steps + 1) / max(1, total_steps - warmup_steps)\n"
    "        height = (1 + math.cos(math.pi * min(1.0, after))) / 2\n"
    "        share = {floor} + (1 - {floor}) * height",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule with all its arguments; `open` are those that were "auto"."""

    name: str
    arguments: dict[str, Any]
    open: tuple[str, ...] = ()

    def code(self) -> list[str]:
        """Lines that make `scheduler` for `optimizer`; they need torch and math."""
        given = self.arguments
        share, first = SHARES[given["warmup_type"]], given.get("warmup_min_lr")
        if first is None:
            low, floor = given["warmup_min_ratio"], given["cos_min_ratio"]
            rate, first = "lr * share", "0.0"
            share = f"{low} + (1 - {low}) * {share}" if low else share
            after = DECAY[self.name].format(floor=floor)
        else:
            first, high = float(first), given["warmup_max_lr"]
            rate = f"{first} + ({high} - {first}) * share" if first else f"{high} * share"
            after = DECAY[self.name]
        text = RATES.format(name=self.name, first=first, share=share, after=after, rate=rate)
        return [*self._constants(), "", *text.split("\n")[:-1]]

    def _constants(self) -> list[str]:
        # DeepSpeed warms up in two steps at least.
        constants = {"warmup_steps": ("warmup_num_steps", max(2, self._steps("warmup_num_steps")))}
        if "total_num_steps" in self.arguments:
            constants["total_steps"] = ("total_num_steps", self._steps("total_num_steps"))
        return [
            f"{name} = {value}" + ('  # "auto" in the file: write yours' * (key in self.open))
            for name, (key, value) in constants.items()
        ]

    def _steps(self, name: str) -> int:
        return int(OPEN_STEPS[name] if name in self.open else self.arguments[name])


def map_schedule(reading: Reading) -> Schedule | None:
    """The schedule, where the configuration makes one."""
    name = reading.value(TYPE)
    if name is not None and name not in ARGUMENTS:
        hint = meant(name, ARGUMENTS, "Remove the section, and make one yourself")
        reading.refused(TYPE, REMEDIES.get(name, f"there is no scheduler {name}. {hint}"))
    if name not in ARGUMENTS:
        for key in reading.inside(PARAMS):
            reading.ignored(f"{PARAMS}.{key}", f"{TYPE} is refused, or not there")
        return None
    schedule = _schedule(reading, name)
    reading.left(TYPE, "torch.optim.lr_scheduler.LambdaLR with the same rates, see the code")
    return schedule


def _schedule(reading: Reading, name: str) -> Schedule:
    given = reading.inside(PARAMS)
    open_ = tuple(key for key, value in given.items() if value == AUTO)
    written = {key: value for key, value in given.items() if value not in (AUTO, None)}
    if "total_num_steps" in ARGUMENTS[name] and given.get("total_num_steps") is None:
        reading.refused(TYPE, f"{name} needs params.total_num_steps, the number of updates")
    for key, value in written.items():
        path = f"{PARAMS}.{key}"
        if key == "last_batch_iteration":
            reading.ignored(path, "a checkpoint has the scheduler's state")
        elif key not in ARGUMENTS[name]:
            hint = meant(key, ARGUMENTS[name], "Remove it")
            reading.refused(path, f"{name} does not take it. {hint}")
        elif wrong := _wrong(key, value):
            reading.refused(path, wrong)
        reading.left(path, f"{key} {value!r}, see the code")
    arguments = ARGUMENTS[name] | written
    if "warmup_max_lr" in open_:
        arguments["warmup_max_lr"] = OWN
    for key in set(given) - set(written):
        reading.left(f"{PARAMS}.{key}", f"{key}: write yours, see the code")
    return Schedule(name=name, arguments=arguments, open=open_)


def _wrong(key: str, value: Any) -> str:
    if key == "warmup_type":
        return "" if value in SHARES else 'give "log" or "linear"'
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0:
        return "give one number, the same for all groups" if "lr" in key else "give a number"
    return "give a whole number" if "steps" in key and value != int(value) else ""
