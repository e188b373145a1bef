"""Config and its policies: frozen dataclasses, validated with errors that read like advice.

Free of torch, so that commands and planners can read a configuration without loading it. Dtypes
are therefore names ("fp32", "bf16", "fp16"); `core/precision.py` turns them into torch dtypes.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.options import bytes_of, unknown_setting

__all__ = ["Config", "Offload", "Precision", "Quantize"]

DTYPE_NAMES = ("fp32", "bf16", "fp16")
MASTERS = ("fp32", "bf16+16", "bf16")
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
SAVED_TENSORS = ("auto", "always")
# Codes of block quantization; comm/coding.py says what they are.
CODES = ("int8", "int4", "fp8")
# So few that scales would be half of what is sent, and so many that scales say nothing.
MIN_BLOCK, MAX_BLOCK = 16, 1 << 16
# From the fastest and smallest to the slowest and largest.
TIERS = ("device", "host", "nvme")
BUFFER_BYTES = 256 << 20
PINNED_BYTES = 256 << 20
# A page for each of the parts that copies go through; see memory/staging.py.
MIN_PINNED_BYTES = 4 * 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Which dtype serves where.

    compute: dtype of the parameters that forward and backward see, "fp32", "bf16" or "fp16"; None
        keeps each parameter's own.
    reduce: dtype of gradients on the wire; None means the compute dtype. Whatever it is, sums are
        made in fp32.
    keep_fp32: modules that stay in fp32 under a lower compute dtype, by class name or by module
        name, shell patterns allowed ("RMSNorm", "layers.*.router"), with all that is inside them.
        Their floating-point inputs are cast to fp32 and their outputs back. Norms with running
        statistics in fp32 (batch norms) are always kept, and what Hugging Face models list.
    cast_inputs: cast floating-point inputs of the sharded model to the compute dtype.
    cast_outputs: cast its floating-point outputs to this dtype; None leaves them as they are
        computed, except that fp16 becomes fp32: gradients are then scaled before they are fp16.
    loss_scale: a fixed factor on fp16 gradients, 1.0 to switch scaling off; None finds it
        (see `core/loss_scale.py`). The loop need not know of it.
    master: the slice that the optimizer updates, where the compute dtype is bf16. None or "fp32":
        kept in fp32 (mixed precision as in Micikevicius et al., ICLR 2018). "bf16+16": the same
        values to the last bit, kept as the bf16 parameter and 16 more bits, which saves 2 bytes an
        owned element where parameters stay (stages 0 to 2). "bf16": no fp32 values at all; updates
        smaller than half a unit in the last place are lost.
    gradient: dtype in which owners keep the mean gradient, "fp32" or "bf16"; None means that of
        the values that the optimizer updates. Sums are made in fp32 and rounded when kept.
    """

    compute: str | None = None
    reduce: str | None = None
    keep_fp32: tuple[str, ...] = ()
    cast_inputs: bool = True
    cast_outputs: str | None = None
    loss_scale: float | None = None
    master: str | None = None
    gradient: str | None = None

    def __post_init__(self) -> None:
        _check_choice("precision.compute", self.compute, (*DTYPE_NAMES, None))
        _check_choice("precision.reduce", self.reduce, (*DTYPE_NAMES, None))
        _check_choice("precision.cast_outputs", self.cast_outputs, (*DTYPE_NAMES, None))
        object.__setattr__(self, "keep_fp32", _names("precision.keep_fp32", self.keep_fp32))
        if self.loss_scale is not None and not 0 < self.loss_scale < math.inf:
            raise ConfigError(
                f"precision.loss_scale={self.loss_scale}: give a positive factor, 1.0 for no "
                "scaling, or None to let it be found"
            )
        _check_choice("precision.master", self.master, (*MASTERS, None))
        _check_choice("precision.gradient", self.gradient, ("fp32", "bf16", None))
        if self.master not in (None, "fp32") and self.compute not in (None, "bf16"):
            raise ConfigError(
                f"precision.master={self.master!r} needs parameters that compute in bf16, but "
                f'precision.compute={self.compute!r}: say compute="bf16", or leave master out'
            )

    def written(self) -> str:
        """The call that makes it: Precision(compute="bf16", ...)."""
        settings = (
            f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
            for name, value in _changed(self)
        )
        return f"Precision({', '.join(settings)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Where states lie: each of the three on the "device", in "host" memory, or on "nvme".

    optimizer: masters and optimizer states; away from the device, the optimizer runs on the host.
    gradients: the means that this rank owns, until the step takes them, unit by unit. On "nvme"
        where the optimizer's states are, too.
    parameters: what this rank owns of the parameters, at stage 3: each gather brings it up. On the
        device it is brought up once a step. On "nvme" where the optimizer's states are, too.
    fraction: from 0 to 1, the share of the model whose states these are: its first units. The
        states of the others stay on the device.
    delayed_update: the optimizer runs while the next forward and backward run, so that gradients
        are taken one update earlier. True begins after 40 steps; a number is that of the first
        step whose update is delayed, 1 the very first.
    speculative_step: the host updates each unit as soon as its gradient has arrived, while the rest
        of the backward runs, and the step keeps what clipping, overflow or the loop have not made
        wrong. Values are the same to the last bit, for the memory of a second copy of masters and
        optimizer states (SuperOffload, Lian et al. 2025).
    path: with "nvme", a folder on the drive, the same on every node; each rank makes a private one
        below it, which goes when training ends.
    pinned_bytes: host memory that each rank may pin for copies to and from an accelerator, whatever
        their size; without an accelerator none is.
    buffer_bytes: with "nvme", host memory of each rank for what is being read, updated and written.

    Sources: ZeRO-Offload (Ren et al. 2021), ZeRO-Infinity (Rajbhandari et al. 2021).
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    fraction: float = 1.0
    delayed_update: bool | int = False
    speculative_step: bool = False
    path: str | Path | None = None
    buffer_bytes: int = BUFFER_BYTES
    pinned_bytes: int = PINNED_BYTES

    def __post_init__(self) -> None:
        for name in ("optimizer", "gradients", "parameters"):
            _check_choice(f"offload.{name}", getattr(self, name), TIERS)
        self._check_tiers()
        self._check_nvme()
        if isinstance(self.fraction, bool) or not 0 <= self.fraction <= 1:
            raise ConfigError(f"offload.fraction={self.fraction}: give a share, from 0 to 1")
        if not isinstance(self.delayed_update, int) or self.delayed_update < self.is_delayed:
            raise ConfigError(
                f"offload.delayed_update={self.delayed_update!r}: give True, False, or the number "
                "of the first step whose update is delayed, 1 or more"
            )
        places = self.optimizer, self.gradients, self.parameters
        if self.is_delayed and places != ("host", "host", "device"):
            raise ConfigError(
                "offload.delayed_update: the optimizer runs on the host while the device computes "
                'with the values from before. Say optimizer="host", gradients="host", '
                'parameters="device"'
            )
        if self.is_delayed and self.fraction < 1:
            raise ConfigError(
                f"offload.delayed_update and offload.fraction={self.fraction}: some units would be "
                "updated by gradients of another age than others. Leave one of both out"
            )
        self._check_speculative_step()

    def _check_speculative_step(self) -> None:
        if not isinstance(self.speculative_step, bool):
            raise ConfigError(
                f"offload.speculative_step={self.speculative_step!r}: give True or False"
            )
        if self.speculative_step and (self.optimizer, self.gradients) != ("host", "host"):
            raise ConfigError(
                f"offload.speculative_step with offload.optimizer={self.optimizer!r} and "
                f"offload.gradients={self.gradients!r}: it is the host that updates ahead of the "
                'step, in its own memory. Say optimizer="host", gradients="host", or leave '
                "speculative_step out"
            )
        if self.speculative_step and self.is_delayed:
            raise ConfigError(
                "offload.speculative_step and offload.delayed_update: the one updates before the "
                "step, within the backward, the other after it. Leave one of both out"
            )

    def _check_tiers(self) -> None:
        """The device and host memory go together as one likes; a drive is below both."""
        for name in ("gradients", "parameters"):
            if getattr(self, name) == "nvme" != self.optimizer:
                raise ConfigError(
                    f"offload.{name}='nvme', but offload.optimizer={self.optimizer!r}: nothing "
                    f'lies below the masters. Say {name}="host", or optimizer="nvme" too'
                )

    def _check_nvme(self) -> None:
        if self.path is not None:
            # One form, so that ranks and files compare and write it.
            object.__setattr__(self, "path", str(self.path))
        if self.optimizer == "nvme" and not self.path:
            raise ConfigError(
                'offload.optimizer="nvme" needs offload.path: a folder on the drive that is to '
                "hold the states"
            )
        if self.optimizer != "nvme" and self.path is not None:
            raise ConfigError(
                f"offload.path={self.path!r} is for states on NVMe, and optimizer="
                f'{self.optimizer!r}: say optimizer="nvme", gradients="nvme", or leave path out'
            )
        size = self.buffer_bytes
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"offload.buffer_bytes={size!r}: give a number of bytes, 1 or more")
        size = self.pinned_bytes
        if not isinstance(size, int) or isinstance(size, bool) or size < MIN_PINNED_BYTES:
            raise ConfigError(
                f"offload.pinned_bytes={size!r}: give a number of bytes. The parts that copies go "
                f"through need {MIN_PINNED_BYTES} at least; {PINNED_BYTES} is what is taken unasked"
            )

    @classmethod
    def from_short_form(cls, text: str) -> Offload:
        """What "cpu", or "nvme:/path", is short for.

        Raises:
            ConfigError: it is neither.
        """
        kind, _, path = text.partition(":")
        if kind == "nvme":
            if not path:
                raise ConfigError(
                    f'offload={text!r} needs a folder on the drive: "nvme:/path/to/folder"'
                )
            return cls(optimizer="nvme", gradients="nvme", parameters="nvme", path=path)
        _check_choice("offload", text, ("cpu", "nvme:/path"))
        return cls(optimizer="host", gradients="host")

    def written(self) -> str:
        """What `shard` is given, as short as it can be: "cpu", "nvme:/path" or Offload(...)."""
        for short in ("cpu", f"nvme:{self.path}"):
            if self == Offload.from_short_form(short):
                return json.dumps(short)
        settings = (f"{name}={json.dumps(value)}" for name, value in _changed(self))
        return f"onecopy.Offload({', '.join(settings)})"

    @property
    def is_all_on_device(self) -> bool:
        """Nothing is offloaded."""
        return {self.optimizer, self.gradients, self.parameters} == {"device"}

    @property
    def is_all_on_nvme(self) -> bool:
        """Everything that a stage cuts is on NVMe: what "nvme:/path" means at each stage."""
        return {self.optimizer, self.gradients, self.parameters} == {"nvme"}

    @property
    def is_delayed(self) -> bool:
        """Updates run beside the next forward and backward."""
        return self.delayed_update is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """What travels in fewer bits: blocks of values share a scale, and are sent as codes.

    Masters and optimizer states stay exact, and so do sums, checkpoints and state dicts.

    weights: code of the parameters that leave a node in a gather (where there is one node: that
        leave a rank), "int8", "int4" or "fp8"; None sends them as they are.
    gradients: codes of gradients inside a node and across nodes, each one of these or None; None
        alone is None for both. Where there is one node, the first counts.
    block: how many values share a scale, an even number.
    error_feedback: keep what gradients lose, coded in 8 bits, and add it to the next ones.
    frozen: code in which owners keep the parameters of units in which nothing is trained, where
        parameters are cut; None keeps them as they are. Values are rounded for good, once, at
        `shard`.

    Sources: qwZ and qgZ of ZeRO++ (Wang et al. 2023); error feedback of LoCo (Xie et al. 2024).
    """

    weights: str | None = "int8"
    gradients: tuple[str | None, str | None] | None = ("int8", "int4")
    block: int = 2048
    error_feedback: bool = False
    frozen: str | None = None

    def __post_init__(self) -> None:
        # In files 0 stands for None.
        object.__setattr__(self, "weights", self.weights or None)
        _check_choice("quantize.weights", self.weights, (*CODES, None))
        object.__setattr__(self, "frozen", self.frozen or None)
        _check_choice("quantize.frozen", self.frozen, (*CODES, None))
        object.__setattr__(self, "gradients", _pair_of_codes(self.gradients))
        block = self.block
        is_number = isinstance(block, int) and not isinstance(block, bool)
        if not is_number or not MIN_BLOCK <= block <= MAX_BLOCK or block % 2:
            raise ConfigError(
                f"quantize.block={block!r}: give an even number of values from {MIN_BLOCK} to "
                f"{MAX_BLOCK}; 2048 is usual, fewer cost bytes for scales and lose less"
            )
        if not isinstance(self.error_feedback, bool):
            raise ConfigError(f"quantize.error_feedback={self.error_feedback!r}: True or False")
        if self.error_feedback and self.gradients is None:
            raise ConfigError(
                "quantize.error_feedback keeps what quantized gradients lose, and "
                "quantize.gradients is None: leave one of both out"
            )
        if {self.weights, self.gradients, self.frozen} == {None}:
            raise ConfigError(
                "quantize with weights=None and gradients=None quantizes nothing: say quantize=None"
            )

    def written(self) -> str:
        """The call that makes it: Quantize(weights="int4", ...)."""
        return f"Quantize({', '.join(f'{name}={value!r}' for name, value in _changed(self))})"


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
    saved_tensors: "auto" watches the tensors that autograd saves while the order of use is being
        recorded, and goes on only where a unit is needed that no hook would have gathered;
        "always" watches every step.
    stall_seconds: how long a rank may wait for others before a report says which rank waits for
        what, and what the others are doing; None, or 0, for no reports. Ranks are waited for all
        the same, until the timeout of the process group. See docs/observing.md.
    sinks: callables that receive every event (see `onecopy.events`).

    Where values came from is kept in `origins`, see `origin_of`.
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
    saved_tensors: str = "auto"
    stall_seconds: float | None = 30.0
    sinks: tuple[Callable[..., Any], ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_stage(self.stage)
        _check_node_size(self.node_size)
        _check_memory(self)
        _check_choice("saved_tensors", self.saved_tensors, SAVED_TENSORS)
        if not isinstance(self.whole_parameters, bool):
            raise ConfigError(f"whole_parameters={self.whole_parameters!r}: give True or False")
        if isinstance(self.precision, str):
            _check_choice("precision", self.precision, DTYPE_NAMES)
            object.__setattr__(self, "precision", Precision(compute=self.precision))
        self._take_offload()
        self._take_quantize()
        if self.units is not None:
            object.__setattr__(self, "units", _names("units", self.units))
        object.__setattr__(self, "keep_gathered", _names("keep_gathered", self.keep_gathered))
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ConfigError(
                f"prefetch_bytes={self.prefetch_bytes}: give a number of bytes, 0 to switch "
                "prefetch off, or None for one unit ahead"
            )
        _check_stall_seconds(self.stall_seconds)
        if self.stall_seconds == 0:
            object.__setattr__(self, "stall_seconds", None)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm={self.max_grad_norm}: give a positive norm, or None for no clipping"
            )

        if not isinstance(self.step_in_backward, bool):
            _check_choice("step_in_backward", self.step_in_backward, ("two-pass",))
            if self.max_grad_norm is None:
                raise ConfigError(
                    'step_in_backward="two-pass" measures the gradients in order to clip them: '
                    "give max_grad_norm too, or say step_in_backward=True"
                )

    def _take_quantize(self) -> None:
        if not isinstance(self.quantize, Quantize):
            if self.quantize in CODES:
                raise ConfigError(
                    f"quantize={self.quantize!r} does not say what is coded: give "
                    f'Quantize(weights="{self.quantize}", gradients=None) for parameters only, or '
                    '"zero++" for parameters in int8 and gradients in int8 and int4'
                )
            _check_choice("quantize", self.quantize, (AUTO, ZEROPP, None))
        if self.quantize == ZEROPP:
            object.__setattr__(self, "quantize", Quantize())

    def _take_offload(self) -> None:
        if isinstance(self.offload, str):
            object.__setattr__(self, "offload", Offload.from_short_form(self.offload))
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

    def origin_of(self, name: str) -> str:
        """Where the value of a setting came from.

        "default", "config object" (a `Config` that a program has made), the name of a TOML file,
        "argument of shard", or who else has made it by `make`.
        """
        is_default = getattr(self, name) == _settings_of(type(self))[name].default
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
        known = _settings_of(cls)
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
        return made


# The settings that are records of their own, and tables in TOML.
_POLICIES: dict[str, type[Precision | Offload | Quantize]] = {
    "precision": Precision,
    "offload": Offload,
    "quantize": Quantize,
}


def _settings_of(record: type[Config | Offload | Precision | Quantize]) -> dict[str, Field[Any]]:
    """The settings of a policy."""
    return {item.name: item for item in fields(record) if item.init}


def _check_stage(stage: int | str) -> None:
    """A number, "auto", a preset, or three cuts of which none is coarser than the one before."""
    cuts = stage.split("/") if isinstance(stage, str) else []
    if len(cuts) != 3:
        if stage == ZEROPP:
            raise ConfigError(
                'stage="zero++" is two settings: say stage="hpz" and quantize="zero++"'
            )
        if len(cuts) > 1:
            raise ConfigError(
                f"stage={stage!r}: give three cuts, of parameters, gradients and optimizer states, "
                'each "whole", "node" or "world", for example "whole/node/world"'
            )
        _check_choice("stage", stage, (*STAGES, AUTO, *HYBRIDS))
        return
    for cut, what in zip(cuts, ("parameters", "gradients", "optimizer states"), strict=True):
        _check_choice(f"stage={stage!r}: what it says of {what}", cut, CUTS)
    if sorted(cuts, key=CUTS.index) != cuts:
        raise ConfigError(
            f"stage={stage!r} cuts parameters, gradients and optimizer states in this order: what "
            "comes first may not be cut further than what comes after it, as who updates a part "
            "needs that part of the others"
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


def _changed(record: Config | Offload | Precision | Quantize) -> list[tuple[str, Any]]:
    """The fields of a policy that differ from their defaults."""
    return [
        (name, getattr(record, name))
        for name, item in _settings_of(type(record)).items()
        if getattr(record, name) != item.default
    ]


def _toml_lines(
    record: Config | Offload | Precision | Quantize, leave_out: tuple[str, ...] = ()
) -> list[str]:
    # JSON writes strings, numbers, booleans and lists as TOML does. TOML has no word for None:
    # where that is not the default, 0 says the same.
    return [
        f"{name} = {json.dumps(_without_none(value))}"
        for name, value in _changed(record)
        if name not in leave_out
    ]


def _without_none(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_none(one) for one in value]
    return 0 if value is None else value


def _pair_of_codes(value: object) -> tuple[str | None, str | None] | None:
    """The codes inside and across nodes; None where neither quantizes."""
    if not value:
        return None
    if isinstance(value, str) or not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(
            f"quantize.gradients={value!r}: give two codes, inside a node and across nodes, for "
            'example ("int8", "int4"); either may be None'
        )
    inside, across = (one or None for one in value)
    _check_choice("quantize.gradients, inside a node,", inside, (*CODES, None))
    _check_choice("quantize.gradients, across nodes,", across, (*CODES, None))
    return None if inside is across is None else (inside, across)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _names(setting: str, value: tuple[str, ...] | str) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ConfigError(f"{setting}={value!r}: give a tuple of names, ({value!r},)")
    return tuple(value)


def _check_stall_seconds(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"stall_seconds={value!r}: give seconds, or None (in a file 0) for no reports"
        )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value in choices and not isinstance(value, bool):
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(repr(choice) for choice in choices)
    raise ConfigError(f"{name}={value!r} is not one of {listed}.{hint}")
