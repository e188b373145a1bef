"""Config: everything that `shard` can be told, validated with errors that read like advice.

Free of torch, as its policies are; see policies.py.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecopy.checks import check_choice, check_number, check_switch, named_settings, names_of
from onecopy.errors import ConfigError
from onecopy.options import bytes_of, unknown_setting
from onecopy.policies import (
    CODES,
    DTYPE_NAMES,
    Offload,
    Precision,
    Quantize,
    changed,
    settings_of,
)

if TYPE_CHECKING:
    from onecopy.deepspeed_config import Conversion

__all__ = ["Config"]

AUTO = "auto"
# The codes of the paper, which are the defaults of Quantize.
ZEROPP = "zero++"
# How far a state is cut, from not at all on; a stage says it of parameters, gradients and optimizer
# states.
CUTS = ("whole", "node", "world")
STAGES = {
    0: "whole/whole/whole",
    1: "whole/whole/world",
    2: "whole/world/world",
    3: "world/world/world",
}
HYBRIDS = {
    "mics": "node/node/node",
    "hsdp": "node/node/node",
    "hfsdp": "node/node/world",
    "hpz": "node/world/world",
}
NEIGHBOURS = ("read", "send")
SAVED_TENSORS = ("auto", "always")


@named_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything `shard` can be told. Only `stage` is worth a thought at first.

    stage: 0 keeps every state whole on every rank (plain data parallel), 1 cuts optimizer states,
        2 also gradients, 3 also parameters (Rajbhandari et al. 2020, sections 5 and 7). "auto" lets
        `shard` ask the planner: of those that fit into `memory`, the one that sends least.
        Where ranks are in nodes: "hpz" is 3 with a second copy of the parameters in each node,
        "mics" (or "hsdp") cuts all states inside a node only, "hfsdp" optimizer states over all
        ranks and the rest inside a node; any other choice is written as three cuts, of parameters,
        gradients and optimizer states, as in "whole/node/world". See docs/slow-networks.md.
    node_size: how many ranks a node has, where that is not what torchrun says; 1 or more.
    memory: for stage="auto", what the device of one rank can hold, "80GiB" or bytes; None means
        what the accelerator has. 70 % of it may go to model states and buffers.
    precision: "fp32", "bf16", "fp16" or a `Precision`; None keeps the parameters' own dtypes.
    units: names of the modules to gather as one unit each, shell patterns allowed
        ("encoder.layers.*"); None finds the repeated blocks by itself.
    keep_gathered: names of modules whose parameters stay whole on every rank at stage 3, as at
        stage 2, shell patterns allowed: ranks may use them or not, in any order (a text batch here,
        an image batch there). Their gradients are reduced when a backward ends.
    prefetch_bytes: how many bytes of units may be gathered ahead of their use; None means one
        unit ahead, whatever its size; 0 switches prefetch off.
    max_grad_norm: clip the global gradient norm to this value in each optimizer step.
    whole_parameters: cut no parameter: each has one rank as its owner, balanced over the ranks,
        and the optimizer sees it in its own shape. For optimizers of your own that look at whole
        matrices, and for optimizers attached later; those that are known to need it (Muon,
        Adafactor, Shampoo, ...) get it for their parameters without being asked.
    step_in_backward: True updates each unit as soon as its gradients are reduced, within backward,
        so that no gradient is kept; optimizer.step() then only completes the step. max_grad_norm
        clips by the norm of the step before; with "two-pass" by the step's own: then
        optimizer.step(closure) runs the closure twice. See docs/memory-lean.md.
    offload: an `Offload`; "cpu" for optimizer states and gradients in host memory, "nvme:/path" for
        these and, at stage 3, parameters on a drive; None keeps all on the device. See
        docs/offload.md.
    quantize: a `Quantize`: gradients, and parameters that travel far, are sent in fewer bits.
        "zero++" is that with its defaults, those of the paper; "auto" lets `shard` decide from the
        speed of the network; None sends everything as it is. See docs/slow-networks.md.
    neighbours: "read" lets ranks on CPUs of one machine read what they are sent straight from each
        other's memory, where the system allows it; "send" has all go through the process group.
        See docs/design.md.
    saved_tensors: "auto" watches the tensors that autograd saves while the order of use is being
        recorded, and goes on only where a unit is needed that no hook would have gathered;
        "always" watches every step.
    stall_seconds: how long a rank may wait for others before a report says which rank waits for
        what, and what the others are doing; None, or 0, for no reports. Ranks are waited for all
        the same, until the timeout of the process group. See docs/hangs.md.
    sinks: callables that receive every event (see `onecopy.events`).

    Where values came from is kept in `origins`, see `origin_of`; `imported` is what was made of a
    configuration of DeepSpeed, see `from_deepspeed`.
    """

    stage: int | str = 3
    node_size: int | None = None
    memory: int | str | None = None
    precision: Precision | str | None = None
    units: tuple[str, ...] | None = None
    keep_gathered: tuple[str, ...] = ()
    prefetch_bytes: int | None = None
    max_grad_norm: float | None = None
    step_in_backward: bool | str = False
    whole_parameters: bool = False
    offload: Offload | str | None = None
    quantize: Quantize | str | None = None
    neighbours: str = "read"
    saved_tensors: str = "auto"
    stall_seconds: float | None = 30.0
    sinks: tuple[Callable[..., Any], ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    imported: Conversion | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_stage(self.stage)
        _check_node_size(self.node_size)
        _check_memory(self)
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        check_choice("saved_tensors", self.saved_tensors, SAVED_TENSORS)
        check_switch("whole_parameters", self.whole_parameters)
        self._take_precision()
        self._take_offload()
        self._take_quantize()
        if self.units is not None:
            object.__setattr__(self, "units", names_of("units", self.units))
        object.__setattr__(self, "keep_gathered", names_of("keep_gathered", self.keep_gathered))
        _check_prefetch_bytes(self.prefetch_bytes)
        _check_stall_seconds(self.stall_seconds)
        if self.stall_seconds == 0:
            object.__setattr__(self, "stall_seconds", None)
        _check_max_grad_norm(self.max_grad_norm)
        _check_step_in_backward(self)
        _check_sinks(self.sinks)

    def _take_precision(self) -> None:
        if self.precision is None or isinstance(self.precision, Precision):
            return
        if isinstance(self.precision, Mapping):
            raise ConfigError(
                f'precision={self.precision!r}: give a name, as precision="bf16", or '
                'onecopy.Precision(compute="bf16", ...)'
            )
        check_choice("precision", self.precision, DTYPE_NAMES)
        object.__setattr__(self, "precision", Precision(compute=self.precision))

    def _take_quantize(self) -> None:
        if not isinstance(self.quantize, Quantize):
            if self.quantize in CODES:
                raise ConfigError(
                    f"quantize={self.quantize!r} does not say what is coded: give "
                    f'Quantize(weights="{self.quantize}", gradients=None) for parameters only, or '
                    '"zero++" for parameters in int8 and gradients in int8 and int4'
                )
            if isinstance(self.quantize, bool | Mapping):
                raise ConfigError(
                    f'quantize={self.quantize!r}: say quantize="zero++", or what is coded, as in '
                    'onecopy.Quantize(weights="int8", gradients=("int8", "int4"))'
                )
            check_choice("quantize", self.quantize, (AUTO, ZEROPP, None))
        if self.quantize == ZEROPP:
            object.__setattr__(self, "quantize", Quantize())

    def _take_offload(self) -> None:
        if isinstance(self.offload, str):
            object.__setattr__(self, "offload", Offload.from_short_form(self.offload))
        elif self.offload is not None and not isinstance(self.offload, Offload):
            raise ConfigError(
                f'offload={self.offload!r}: say offload="cpu", offload="nvme:/path/to/folder", or '
                'onecopy.Offload(optimizer="host", ...)'
            )
        if not isinstance(self.offload, Offload) or not self.step_in_backward:
            return
        if self.offload.speculative_step:
            raise ConfigError(
                "offload.speculative_step and step_in_backward: both update within the backward, "
                "the one what the step may still undo, the other for good. Leave one of both out"
            )
        if self.offload.is_delayed:
            raise ConfigError(
                "offload.delayed_update and step_in_backward: the one updates after the next "
                "backward, the other within this one. Leave one of both out"
            )

    def to_toml(self) -> str:
        """The stage and the settings that differ from their defaults, as TOML for `from_toml`.

        `sinks` are code, so no file can have them.
        """
        found = {name: getattr(self, name) for name in _POLICIES}
        policies = {name: one for name, one in found.items() if isinstance(one, _POLICIES[name])}
        own = _toml_lines(self, leave_out=("stage", "sinks", *policies))
        tables: list[str] = []
        for name, policy in policies.items():
            tables += ["", f"[{name}]", *_toml_lines(policy)]
        return "\n".join([f"stage = {json.dumps(self.stage)}", *own, *tables]) + "\n"

    @classmethod
    def from_toml(cls, source: str | Path) -> Config:
        """A configuration from a TOML file, or from its text.

        Args:
            source: a path, or text with at least one line end.

        Raises:
            ConfigError: there is no such file, it is no TOML, or a setting is unknown or does not
                fit.
        """
        name = "the text"
        if isinstance(source, Path) or "\n" not in source:
            name, source = str(source), _read(Path(source))
        try:
            settings = tomllib.loads(source)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is not TOML: {error}") from error
        for key, value in settings.items():
            if isinstance(value, list):
                settings[key] = tuple(value)
        for policy, kind in _POLICIES.items():
            table = settings.get(policy)
            if not isinstance(table, dict):
                continue
            known = [item.name for item in fields(kind)]
            for key in table:
                if key not in known:
                    raise unknown_setting(f"{policy}.{key}", [f"{policy}.{one}" for one in known])
            settings[policy] = kind(**table)
        return cls.make(None, settings, name)

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> Config:
        """A configuration from DeepSpeed's: a JSON file, or the dict that it holds.

        Each of its keys is mapped, left to you, ignored with a reason, or refused; the first
        `shard` shows the table. Optimizer, scheduler, accumulation and checkpointing of activations
        are no settings: `onecopy config from-deepspeed FILE` prints them as code to paste.

        Raises:
            ConfigError: it cannot be read, a key is unknown or of a wrong kind, or something is
                refused: all of that at once, each with what to do.
        """
        # Few need it, and every rank would hold it.
        from onecopy.deepspeed_config import convert

        found = convert(source)
        found.raise_if_refused()
        made = cls.make(None, found.settings, found.source)
        object.__setattr__(made, "imported", found)
        return made

    def origin_of(self, name: str) -> str:
        """Where the value of a setting came from.

        "default", "config object" (a `Config` that a program has made), the name of a TOML file,
        "argument of shard", or who else has made it by `make`.
        """
        is_default = getattr(self, name) == settings_of(type(self))[name].default
        return self.origins.get(name, "default" if is_default else "config object")

    @property
    def is_auto(self) -> bool:
        """The planner is to choose the stage."""
        return str(self.stage) == AUTO

    @property
    def chosen_stage(self) -> int | str:
        """`stage`, which is not "auto" any more from the moment at which `shard` cuts."""
        assert not self.is_auto, "shard has asked the planner what auto means"
        return self.stage

    @property
    def capacity(self) -> int | None:
        """`memory` in bytes."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def precision_policy(self) -> Precision:
        """`precision` as an object; without one, everything keeps its own dtype."""
        return self.precision if isinstance(self.precision, Precision) else Precision()

    @classmethod
    def make(
        cls,
        config: Config | None,
        settings: Mapping[str, Any],
        origin: str = "argument of shard",
    ) -> Config:
        """`config` with `settings` on top, which are of this origin.

        Raises:
            ConfigError: a setting is unknown (with the nearest known name) or does not fit.
        """
        known = settings_of(cls)
        for name in settings:
            if name not in known:
                raise unknown_setting(name, known)
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"config is a {type(config).__name__}: pass a onecopy.Config, or its fields as "
                "keyword arguments of shard"
            )
        base = {} if config is None else {name: getattr(config, name) for name in known}
        made = cls(**{**base, **settings})
        origins = {} if config is None else {name: config.origin_of(name) for name in known}
        object.__setattr__(made, "origins", {**origins, **dict.fromkeys(settings, origin)})
        object.__setattr__(made, "imported", None if config is None else config.imported)
        return made


# The settings that are records of their own, and tables in TOML.
_POLICIES: dict[str, type[Precision | Offload | Quantize]] = {
    "precision": Precision,
    "offload": Offload,
    "quantize": Quantize,
}


def _check_stage(stage: int | str) -> None:
    """A number, "auto", a preset, or three cuts of which none is coarser than the one before."""
    cuts = stage.split("/") if isinstance(stage, str) else []
    if len(cuts) != 3:
        if str(stage) == ZEROPP:
            raise ConfigError(
                'stage="zero++" is two settings: say stage="hpz" and quantize="zero++"'
            )
        if len(cuts) > 1:
            raise ConfigError(
                f"stage={stage!r}: give three cuts, of parameters, gradients and optimizer states, "
                'each "whole", "node" or "world", for example "whole/node/world"'
            )
        check_choice("stage", stage, (*STAGES, AUTO, *HYBRIDS))
        return
    for cut, what in zip(cuts, ("parameters", "gradients", "optimizer states"), strict=True):
        check_choice(f"stage={stage!r}: what it says of {what}", cut, CUTS)
    if sorted(cuts, key=CUTS.index) != cuts:
        raise ConfigError(
            f"stage={stage!r} cuts parameters, gradients and optimizer states in this order: what "
            "comes first may not be cut further than what comes after it, as who updates a part "
            "needs that part of the others"
        )


def _check_prefetch_bytes(value: int | None) -> None:
    if value is None:
        return
    advice = (
        "give a number of bytes, 0 to switch prefetch off, or None for one unit ahead; for example "
        "prefetch_bytes=10**9"
    )
    check_number("prefetch_bytes", value, advice, whole=True)
    if value < 0:
        raise ConfigError(f"prefetch_bytes={value}: {advice}")


def _check_max_grad_norm(value: float | None) -> None:
    if value is None:
        return
    advice = "give a positive norm, or None for no clipping"
    check_number("max_grad_norm", value, advice)
    if not value > 0:
        raise ConfigError(f"max_grad_norm={value}: {advice}")


def _check_step_in_backward(config: Config) -> None:
    if isinstance(config.step_in_backward, bool):
        return
    check_choice("step_in_backward", config.step_in_backward, (False, True, "two-pass"))
    if config.max_grad_norm is None:
        raise ConfigError(
            'step_in_backward="two-pass" measures the gradients in order to clip them: '
            "give max_grad_norm too, or say step_in_backward=True"
        )


def _check_sinks(value: object) -> None:
    sinks = value if isinstance(value, tuple | list) else (None,)
    if not all(callable(one) for one in sinks):
        raise ConfigError(
            f"sinks={value!r}: give a tuple of functions, each of which takes an event: "
            "sinks=(print,)"
        )


def _check_node_size(size: object) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigError(
            f"node_size={size!r}: give the number of ranks in a node, 1 or more, or None for what "
            "torchrun says"
        )


def _check_memory(config: Config) -> None:
    if config.memory is None:
        return
    is_number = isinstance(config.memory, int) and not isinstance(config.memory, bool)
    if not isinstance(config.memory, str) and not (is_number and int(config.memory) > 0):
        raise ConfigError(
            f'memory={config.memory!r}: give a size such as "80GiB", or a number of bytes'
        )
    _ = config.capacity
    if not config.is_auto:
        raise ConfigError(
            f'memory={config.memory!r} is read for stage="auto" only, and stage is '
            f"{config.stage}: leave one of the two out"
        )


def _toml_lines(
    record: Config | Offload | Precision | Quantize, leave_out: tuple[str, ...] = ()
) -> list[str]:
    # JSON writes strings, numbers, booleans and lists as TOML does. TOML has no word for None:
    # where that is not the default, 0 says the same.
    return [
        f"{name} = {json.dumps(_without_none(value))}"
        for name, value in changed(record)
        if name not in leave_out
    ]


def _without_none(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_none(one) for one in value]
    return 0 if value is None else value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _check_stall_seconds(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"stall_seconds={value!r}: give seconds, or None (in a file 0) for no reports"
        )
