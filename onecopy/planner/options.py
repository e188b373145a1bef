"""What a plan can be told: one record for `onecopy.plan` and for the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import gcd
from pathlib import Path
from typing import Any

from onecopy.config import HYBRIDS, STAGES
from onecopy.errors import ConfigError
from onecopy.options import (
    bytes_of,
    check_choices,
    check_least,
    describe,
    speed_of,
    unknown_setting,
)
from onecopy.planner.cluster import Cluster
from onecopy.policies import DTYPE_NAMES, Precision

__all__ = ["OPTIMIZERS", "CommandOptions", "PlanOptions"]

# Tensors of a parameter's size that the optimizer keeps, and how it is written in code.
OPTIMIZERS: dict[str, tuple[int, str]] = {
    "adamw": (2, "AdamW(model.parameters(), lr=3e-4, fused=True)"),
    "adam": (2, "Adam(model.parameters(), lr=3e-4, fused=True)"),
    "adamax": (2, "Adamax(model.parameters(), lr=3e-4)"),
    "rmsprop": (1, "RMSprop(model.parameters(), lr=3e-4)"),
    "adagrad": (1, "Adagrad(model.parameters(), lr=1e-2)"),
    "momentum": (1, "SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"),
    "sgd": (0, "SGD(model.parameters(), lr=0.1, fused=True)"),
}
# "hsdp" is another word for "mics".
IN_NODES = ("hpz", "hfsdp", "mics")
NODE = 8  # accelerators in one machine, where nothing else is said


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Everything a plan can be told beside the model. Raises ConfigError for bad values."""

    devices: int = field(
        default=1, metadata=describe("devices to train on, one process each, over all nodes")
    )
    devices_per_node: int | None = field(
        default=None,
        metadata=describe("devices in one node; without it 8, or all where there are fewer"),
    )
    tensor: int = field(
        default=1,
        metadata=describe(
            "tensor parallel ranks that share each layer; neighbours, so as far as there are as "
            "many, they are in one node"
        ),
    )
    pipeline: int = field(
        default=1, metadata=describe("pipeline stages that share the blocks of the model")
    )
    device_memory: str = field(
        default="80GB",
        metadata=describe(
            "what one device can hold for training; leave out what its driver and other programs "
            "take",
            metavar="SIZE",
        ),
    )
    host_memory: str | None = field(
        default=None,
        metadata=describe(
            "what the host of a node can hold for all its devices; shows what offload would do",
            metavar="SIZE",
        ),
    )
    nvme: str | None = field(
        default=None,
        metadata=describe(
            "what the NVMe drives of a node can hold for all its devices; shows what states on "
            "them would do",
            metavar="SIZE",
        ),
    )
    nvme_read: str | None = field(
        default=None,
        metadata=describe(
            "what the drives of a node read per second, all together: 6GB/s; with --nvme-write "
            "bytes become seconds (onecopy doctor --nvme measures both)",
            metavar="SPEED",
        ),
    )
    nvme_write: str | None = field(
        default=None,
        metadata=describe("what they write per second", metavar="SPEED"),
    )
    host_link: str | None = field(
        default=None,
        metadata=describe(
            "what one device and its host exchange per second, in each direction: 12GB/s",
            metavar="SPEED",
        ),
    )
    node_link: str | None = field(
        default=None,
        metadata=describe(
            "what one device sends per second to others of its node: 100GB/s; bytes that are sent "
            "become seconds",
            metavar="SPEED",
        ),
    )
    network: str | None = field(
        default=None,
        metadata=describe(
            "what a node sends per second to other nodes, for all its devices: 12.5GB/s, or "
            "100Gbit/s",
            metavar="SPEED",
        ),
    )
    device_tflops: float | None = field(
        default=None,
        metadata=describe(
            "10^12 operations that a device really does per second; with the speeds, which share "
            "of the time it computes"
        ),
    )
    sequence: int | None = field(
        default=None,
        metadata=describe(
            "tokens in a sample; without it 2048, or the model's limit where it is lower"
        ),
    )
    micro_batch: int = field(
        default=1, metadata=describe("samples that one device computes at a time")
    )
    accumulate: int = field(default=1, metadata=describe("backwards per optimizer step"))
    optimizer: str = field(
        default="adamw",
        metadata=describe("whose states are counted", choices=tuple(OPTIMIZERS)),
    )
    precision: str | Precision = field(
        default="bf16",
        metadata=describe(
            "dtype of forward and backward; the optimizer always updates fp32 masters",
            choices=DTYPE_NAMES,
        ),
    )
    checkpoint_activations: str = field(
        default="auto",
        metadata=describe(
            "compute activations again in backward instead of keeping them; auto does where they "
            "would not fit; partition cuts the inputs of blocks, which are kept, over tensor "
            "parallel ranks, host keeps them in host memory",
            choices=("auto", "on", "partition", "host", "partition+host", "off"),
        ),
    )
    stage: int | str | None = field(
        default=None,
        metadata=describe(
            "show only this stage; mics, hfsdp and hpz cut some states inside nodes, and are shown "
            "where --devices-per-node says how large these are",
            choices=(*STAGES, *HYBRIDS),
        ),
    )
    layers: int | None = field(
        default=None, metadata=describe("blocks of the model, where only its size is given")
    )
    hidden: int | None = field(
        default=None,
        metadata=describe("width of the model, where only its size is given"),
    )

    def __post_init__(self) -> None:
        check_least(self, _LEAST)
        if isinstance(self.precision, Precision):
            # Any policy, from code.
            checked = PlanOptions(optimizer=self.optimizer, stage=self.stage)
            check_choices(checked)
        else:
            check_choices(self)
        per_node = self.per_node
        if per_node > self.devices:
            raise ConfigError(
                f"--devices-per-node is {per_node}, but --devices, over all nodes, is "
                f"{self.devices}: say how many there are in all."
            )
        if self.devices % per_node:
            raise ConfigError(
                f"--devices is {self.devices} with {per_node} devices in a node, which leaves a "
                f"node with {self.devices % per_node}: say --devices-per-node too, a divisor of "
                f"{self.devices}."
            )
        self._check_model_parallel()
        bytes_of(self.device_memory)
        for size in (self.host_memory, self.nvme):
            if size is not None:
                bytes_of(size)
        speeds = self.nvme_read, self.nvme_write, self.host_link, self.node_link, self.network
        for speed in speeds:
            if speed is not None:
                speed_of(speed)
        if (self.nvme_read is None) != (self.nvme_write is None):
            raise ConfigError(
                "a step reads from NVMe and writes to it: say --nvme-read and --nvme-write, or none"
            )

    def _check_model_parallel(self) -> None:
        if self.devices % self.model_parallel:
            raise ConfigError(
                f"--devices is {self.devices}, which --tensor {self.tensor} times --pipeline "
                f"{self.pipeline} does not divide: each copy of the model takes "
                f"{self.model_parallel} devices"
            )
        if self.partitions_inputs and self.tensor == 1:
            raise ConfigError(
                f"--checkpoint-activations {self.checkpoint_activations} cuts inputs of blocks "
                "over tensor parallel ranks: say how many, --tensor, or leave partition out"
            )

    @property
    def per_node(self) -> int:
        """Devices in one node."""
        return self.devices_per_node or min(self.devices, NODE)

    @property
    def partitions_inputs(self) -> bool:
        """Of the inputs of checkpointed blocks each tensor parallel rank keeps a part."""
        return "partition" in self.checkpoint_activations

    @property
    def moves_inputs(self) -> bool:
        """They are in host memory."""
        return "host" in self.checkpoint_activations

    @property
    def model_parallel(self) -> int:
        """Devices that share one copy of the model by other means than ZeRO."""
        return self.tensor * self.pipeline

    @property
    def cluster(self) -> Cluster:
        """The data-parallel ranks, over which ZeRO cuts, and how many of them share a node.

        Tensor parallel ranks are neighbours, then come data-parallel ones.
        """
        ranks = self.devices // self.model_parallel
        in_node = gcd(max(1, self.per_node // self.tensor), ranks)
        per_node = self.per_node if self.model_parallel == 1 else in_node
        return Cluster(devices=ranks, devices_per_node=per_node)

    @property
    def stages(self) -> tuple[int | str, ...]:
        """Those to compare; that cut states inside nodes where it is said how large these are."""
        in_nodes = self.devices_per_node is not None and self.cluster.num_nodes > 1
        return (*STAGES, *(IN_NODES if in_nodes else ()))

    @property
    def capacity(self) -> int:
        """Bytes of one device."""
        return bytes_of(self.device_memory)

    def capacity_of(self, tier: str) -> int | None:
        """Bytes of a node's host memory or NVMe ("host", "nvme"); None where it is not said."""
        size = {"host": self.host_memory, "nvme": self.nvme}.get(tier)
        return None if size is None else bytes_of(size)

    def speed_of(self, lane: str) -> int | None:
        """Bytes per second of a lane, "host_link" for example; None if it is not said."""
        speed: str | None = getattr(self, lane)
        return None if speed is None else speed_of(speed)

    @property
    def policy(self) -> Precision:
        """`precision` as an object."""
        if isinstance(self.precision, Precision):
            return self.precision
        return Precision(compute=self.precision)

    @property
    def optimizer_states(self) -> int:
        """Tensors that the optimizer keeps for each parameter."""
        return OPTIMIZERS[self.optimizer][0]

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> PlanOptions:
        """From keyword arguments.

        Raises:
            ConfigError: a setting is unknown (with the nearest known name) or does not fit.
        """
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                raise unknown_setting(name, known)
        return cls(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions(PlanOptions):
    """What `onecopy plan` takes: the model, the options of a plan, and where it goes."""

    model: str = field(
        metadata=describe(
            "a size (7.5B), a Hugging Face config.json or a folder with one, or module:function "
            "that returns the model; or the word largest, for the largest models that these "
            "devices can train",
            metavar="MODEL",
        ),
    )
    simulate: bool = field(
        default=False,
        metadata=describe(
            "also run one step of what is recommended through the real engine, on tensors without "
            "memory, and show its memory and its messages"
        ),
    )
    batch: str | None = field(
        default=None,
        metadata=describe(
            "with --simulate: the function that makes one micro-batch, a tensor or a dict of "
            "keyword arguments, for models that do not take input_ids and labels",
            metavar="MODULE:FUNCTION",
        ),
    )
    json: bool = field(default=False, metadata=describe("print the plan as JSON"))
    html: Path | None = field(
        default=None, metadata=describe("also write the plan as a page", metavar="FILE")
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the plan itself."""
        return {item.name: getattr(self, item.name) for item in fields(PlanOptions)}


_LEAST: dict[str, float] = {
    "devices": 1,
    "devices_per_node": 1,
    "tensor": 1,
    "pipeline": 1,
    "sequence": 1,
    "micro_batch": 1,
    "accumulate": 1,
    "layers": 1,
    "hidden": 1,
    "device_tflops": 1e-9,
}
