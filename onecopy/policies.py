"""The policies of a `Config`: frozen dataclasses, validated with errors that read like advice.

Free of torch, so that commands and planners can read a configuration without loading it. Dtypes
are therefore names ("fp32", "bf16", "fp16"); `core/precision.py` turns them into torch dtypes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecopy.checks import check_choice, check_number, check_switch, named_settings, names_of
from onecopy.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Activations",
    "Offload",
    "Precision",
    "Quantize",
]

DTYPE_NAMES = ("fp32", "bf16", "fp16")
MASTERS = ("fp32", "bf16+16", "bf16")
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


@named_settings
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
        check_choice("precision.compute", self.compute, (*DTYPE_NAMES, None))
        check_choice("precision.reduce", self.reduce, (*DTYPE_NAMES, None))
        check_choice("precision.cast_outputs", self.cast_outputs, (*DTYPE_NAMES, None))
        object.__setattr__(self, "keep_fp32", names_of("precision.keep_fp32", self.keep_fp32))
        check_switch("precision.cast_inputs", self.cast_inputs)
        if self.loss_scale is not None:
            advice = "give a positive factor, 1.0 for no scaling, or None to let it be found"
            check_number("precision.loss_scale", self.loss_scale, advice)
            if not 0 < self.loss_scale < math.inf:
                raise ConfigError(f"precision.loss_scale={self.loss_scale}: {advice}")
        check_choice("precision.master", self.master, (*MASTERS, None))
        check_choice("precision.gradient", self.gradient, ("fp32", "bf16", None))
        if self.master not in (None, "fp32") and self.compute not in (None, "bf16"):
            raise ConfigError(
                f"precision.master={self.master!r} needs parameters that compute in bf16, but "
                f'precision.compute={self.compute!r}: say compute="bf16", or leave master out'
            )

    def written(self) -> str:
        """The call that makes it: Precision(compute="bf16", ...)."""
        return f"Precision({_arguments(changed(self))})"


@named_settings
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
            check_choice(f"offload.{name}", getattr(self, name), TIERS)
        self._check_tiers()
        self._check_nvme()
        check_number("offload.fraction", self.fraction, "give a share, from 0 to 1")
        if not 0 <= self.fraction <= 1:
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
        check_switch("offload.speculative_step", self.speculative_step)
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
        check_choice("offload", text, ("cpu", "nvme:/path"))
        return cls(optimizer="host", gradients="host")

    def written(self) -> str:
        """What `shard` is given, as short as it can be: "cpu", "nvme:/path" or Offload(...)."""
        for short in ("cpu", f"nvme:{self.path}"):
            if self == Offload.from_short_form(short):
                return json.dumps(short)
        return f"onecopy.Offload({_arguments(changed(self))})"

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


@named_settings
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
        check_choice("quantize.weights", self.weights, (*CODES, None))
        object.__setattr__(self, "frozen", self.frozen or None)
        check_choice("quantize.frozen", self.frozen, (*CODES, None))
        object.__setattr__(self, "gradients", _pair_of_codes(self.gradients))
        block = self.block
        is_number = isinstance(block, int) and not isinstance(block, bool)
        if not is_number or not MIN_BLOCK <= block <= MAX_BLOCK or block % 2:
            raise ConfigError(
                f"quantize.block={block!r}: give an even number of values from {MIN_BLOCK} to "
                f"{MAX_BLOCK}; 2048 is usual, fewer cost bytes for scales and lose less"
            )
        check_switch("quantize.error_feedback", self.error_feedback)
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
        return f"Quantize({_arguments(changed(self))})"


@named_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Which modules keep only their inputs from forward to backward, and where these lie.

    place: where an input is kept: on the "device", in "host" memory, or on "nvme". Away from the
        device it is fetched before it is needed, in the reverse order of keeping.
    partition: a group of ranks that all have the same inputs (tensor parallelism): each keeps an
        equal part, and one all-gather makes the whole again before recomputation. A device mesh of
        one dimension, or a process group; None keeps inputs whole.
    path: with "nvme", a folder on the drive, the same on every node; each rank makes a private one
        below it, which goes when training ends.
    every: each k-th of the chosen modules, beginning with the first; the others run as they are.
    modules: which ones: shell patterns of names ("layers.*"), or a function of a module's name and
        the module that says so. Of modules inside one another the outermost counts. None for the
        model's repeated blocks.

    Source: ZeRO (Rajbhandari et al. 2020), section 6.1 (P_a, P_a+cpu); activation checkpointing of
    Chen et al. 2016.
    """

    place: str = "device"
    partition: DeviceMesh | ProcessGroup | None = None
    path: str | Path | None = None
    every: int = 1
    modules: tuple[str, ...] | str | Callable[[str, nn.Module], bool] | None = None

    def __post_init__(self) -> None:
        if self.place == "cpu":
            raise ConfigError('activations.place="cpu": say place="host", the memory of the host')
        check_choice("activations.place", self.place, TIERS)
        if self.path is not None:
            object.__setattr__(self, "path", str(self.path))
        if self.place == "nvme" and not self.path:
            raise ConfigError(
                'activations.place="nvme" needs activations.path: a folder on the drive that is to '
                "hold them"
            )
        if self.place != "nvme" and self.path is not None:
            raise ConfigError(
                f"activations.path={self.path!r} is for what is kept on NVMe, and place="
                f'{self.place!r}: say place="nvme", or leave path out'
            )
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigError(
                f"activations.every={self.every!r}: give a whole number, 1 for every one of the "
                "chosen modules, 2 for every second"
            )
        if isinstance(self.modules, str):
            object.__setattr__(self, "modules", (self.modules,))
        elif self.modules is not None and not callable(self.modules):
            object.__setattr__(self, "modules", tuple(self.modules))


def settings_of(record: type[Any]) -> dict[str, Field[Any]]:
    """The settings of a policy, or of a `Config`, by name."""
    return {item.name: item for item in fields(record) if item.init}


def changed(record: Any) -> list[tuple[str, Any]]:
    """The settings that differ from their defaults."""
    return [
        (name, getattr(record, name))
        for name, item in settings_of(type(record)).items()
        if getattr(record, name) != item.default
    ]


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
    check_choice("quantize.gradients, inside a node,", inside, (*CODES, None))
    check_choice("quantize.gradients, across nodes,", across, (*CODES, None))
    return None if inside is across is None else (inside, across)


def _arguments(settings: list[tuple[str, Any]]) -> str:
    """Settings as a call has them, with texts in double quotes."""
    written = (
        f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
        for name, value in settings
    )
    return ", ".join(written)
