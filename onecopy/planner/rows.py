"""One way to train a model, and what it takes: the rows of a plan.

A way is a stage and the choices beside it. A feature that gives more ways (quantized messages,
hybrid groups) adds a field to `Way`, and its cost to `Question.row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from onecopy.planner import estimate, papers
from onecopy.planner.activations import Activations, Batch, activations_of
from onecopy.planner.estimate import DiskTraffic, Elements
from onecopy.planner.memory import Memory, Step, memory_of, moved_by, swapped_by
from onecopy.planner.model_parallel import parts_of
from onecopy.planner.options import PlanOptions
from onecopy.planner.shapes import ModelShape, TransformerShape
from onecopy.planner.traffic import Sent, sent_by
from onecopy.policies import Offload, Precision

__all__ = [
    "ALL_HOST",
    "ALL_NVME",
    "HOST",
    "NVME",
    "NVME_PATH",
    "Outside",
    "Question",
    "Row",
    "Seconds",
    "Way",
    "offloads",
]

# In recommended code, to be replaced.
NVME_PATH = "/nvme"
HOST = Offload(optimizer="host", gradients="host")
ALL_HOST = replace(HOST, parameters="host")
NVME = Offload(optimizer="nvme", gradients="nvme", path=NVME_PATH)
ALL_NVME = replace(NVME, parameters="nvme")

USUAL_SEQUENCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to train.

    recompute: activations of blocks are computed again in backward. offload: which states leave
    the device.
    """

    stage: int | str
    policy: Precision
    recompute: bool = False
    offload: Offload | None = None

    @property
    def name(self) -> str:
        """The stage in words."""
        return f"stage {self.stage}" if isinstance(self.stage, int) else self.stage

    @property
    def is_lean(self) -> bool:
        """Masters are kept split, to the last bit the same training with fewer bytes."""
        return self.policy.master == "bf16+16"

    @property
    def tier(self) -> str:
        """The slowest memory in which states lie: "device", "host" or "nvme"."""
        return "device" if self.offload is None else self.offload.optimizer

    @property
    def moves_parameters(self) -> bool:
        """Each gather brings up what this rank owns of the parameters."""
        return self.offload is not None and self.offload.parameters != "device"


def offloads(tier: str, *, releases: bool) -> list[Offload]:
    """What states in a tier, "host" or "nvme", may mean, the fastest first.

    Args:
        releases: ranks do not keep whole parameters, so that what they own of them may leave, too.
    """
    if tier == "host":
        return [HOST, ALL_HOST] if releases else [HOST]
    on_host = replace(NVME, gradients="host")
    found = [replace(NVME, gradients="device"), on_host, NVME]
    if releases:
        found += [replace(on_host, parameters="host"), replace(NVME, parameters="host"), ALL_NVME]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes in a slower memory than the device's: host memory or NVMe.

    states: of one rank. buffers: of one rank, for what is on its way. node: both, of all ranks of a
    node. capacity: of a node; None where it is not said.
    """

    states: int
    buffers: int
    node: int
    capacity: int | None

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.capacity is None or self.node <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """How long what moves between tiers, and between ranks, takes in a step, where speeds are said.

    link: between a device and its host. nvme: between a host and its drives, reads and writes one
    after the other. computing: share of the time in which the device computes, at the least: as if
    nothing moved between tiers while it did (ZeRO-Infinity, equation 6). inside, across: what is
    sent to ranks of the node, and to other nodes, at the speed of the link alone.
    """

    link: float | None = None
    nvme: float | None = None
    computing: float | None = None
    inside: float | None = None
    across: float | None = None


NO_TRAFFIC = DiskTraffic(read=0, written=0)
NOT_KNOWN = Seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a way takes on one rank.

    memory: bytes on the device at the peak of a step. capacity: bytes that it has.
    paper: bytes of model states as the ZeRO paper counts them; None in full precision.
    sent: bytes per step. elements: the same in elements per parameter.
    largest: parameters of the largest model of such blocks that fits; None where not even one
        block does, where the model has no repeated blocks, or where the capacity of the tier in
        which states lie is not said.
    outside: what lies in host memory and on NVMe, by tier, if anything does.
    moved: bytes between a device and its host per step. swapped: between the host and NVMe, of a
        rank. seconds: how long both take.
    """

    way: Way
    memory: Memory
    capacity: int
    paper: float | None
    sent: Sent
    elements: Elements
    largest: int | None
    outside: Mapping[str, Outside] = field(default_factory=dict)
    moved: int = 0
    swapped: DiskTraffic = NO_TRAFFIC
    seconds: Seconds = NOT_KNOWN

    @property
    def stage(self) -> int | str:
        return self.way.stage

    @property
    def messages(self) -> tuple[Fraction, Fraction]:
        """What is sent, in elements per parameter: less across nodes is better, then in all."""
        return self.elements.across, self.elements.total

    @property
    def fits_device(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def fits(self) -> bool:
        """In all tiers, as far as their capacity is known."""
        return self.fits_device and all(one.fits for one in self.outside.values())

    @property
    def share(self) -> float:
        """Of the device's memory; above 1 where it does not fit."""
        return self.memory.total / self.capacity


@dataclass(frozen=True, slots=True)
class Question:
    """A model and the circumstances; answers with rows."""

    shape: ModelShape
    options: PlanOptions

    @property
    def batch(self) -> Batch:
        """What one rank computes at a time."""
        options, transformer = self.options, self.shape.transformer
        limit = transformer.context if transformer and transformer.context else USUAL_SEQUENCE
        return Batch(
            samples=options.micro_batch,
            sequence=options.sequence or min(USUAL_SEQUENCE, limit),
            backwards=options.accumulate,
        )

    def row(self, way: Way) -> Row:
        """What a way takes."""
        options, devices = self.options, self.options.cluster.devices
        widths = estimate.widths_of(way.policy, options.optimizer_states)
        node_size = options.cluster.devices_per_node
        elements = estimate.elements_in_hops(
            way.stage, devices, options.accumulate, node_size=node_size
        )
        paper = None
        if widths.compute < estimate.FP32.compute:
            # The paper's K: the fp32 master and the optimizer's fp32 states.
            states = 4 + 4 * options.optimizer_states
            numel = -(-self.shape.num_parameters // options.model_parallel)
            paper = estimate.paper_state_bytes(
                way.stage, numel, devices, states, node_size=node_size
            )
        memory = self.memory(way, self.shape)
        # Of one micro-batch: what moves does so once for each.
        parts = parts_of(self.shape, options.tensor, options.pipeline, 1)
        part = max(parts, key=lambda one: one.num_parameters)
        shape = part.with_offload(way.offload)
        moved = moved_by(shape, way.stage, options.cluster, widths, options.accumulate)
        if shape.transformer is not None:
            kept = self._activations(way, shape.transformer, widths.compute)
            # Down in forward, up in backward.
            moved += 2 * options.accumulate * kept.on_host
        sent = sent_by(part, way.stage, options.cluster, widths, options.accumulate)
        swapped = swapped_by(shape, way.stage, options.cluster, widths, options.accumulate)
        return Row(
            way=way,
            memory=memory,
            capacity=options.capacity,
            paper=paper,
            sent=sent,
            elements=elements,
            largest=self._largest(way),
            outside=self.outside(memory),
            moved=moved,
            swapped=swapped,
            seconds=self._seconds(way, moved, swapped, sent),
        )

    def outside(self, memory: Memory) -> dict[str, Outside]:
        """By tier, of those in which something lies."""
        options, found = self.options, {}
        parts = {"host": (memory.host.total, memory.staged), "nvme": (memory.nvme.total, 0)}
        for tier, (states, buffers) in parts.items():
            if states or buffers:
                found[tier] = Outside(
                    states=states,
                    buffers=buffers,
                    node=(states + buffers) * options.per_node,
                    capacity=options.capacity_of(tier),
                )
        return found

    def _seconds(self, way: Way, moved: int, swapped: DiskTraffic, sent: Sent) -> Seconds:
        options = self.options
        link, reads, writes = map(options.speed_of, ("host_link", "nvme_read", "nvme_write"))
        on_link = moved / link if link is not None and moved else None
        on_nvme = None
        if reads is not None and writes is not None and swapped.total:
            # The drives of a node serve all its ranks.
            node = swapped * options.per_node
            on_nvme = node.read / reads + node.written / writes
        is_known = (on_link is not None or not moved) and (on_nvme is not None or not swapped.total)
        seconds = (on_link or 0) + (on_nvme or 0)
        computing = None
        if options.device_tflops is not None and is_known and seconds:
            num_bytes = moved + swapped.total
            computing = papers.efficiency(
                self._operations(way) / num_bytes,
                num_bytes / seconds,
                options.device_tflops * 1e12,
            )
        inside, across = map(options.speed_of, ("node_link", "network"))
        # A node's devices share its way to the others.
        of_node = sent.across * options.per_node
        return Seconds(
            link=on_link,
            nvme=on_nvme,
            computing=computing,
            inside=sent.inside / inside if inside is not None and sent.inside else None,
            across=of_node / across if across is not None and of_node else None,
        )

    def _operations(self, way: Way) -> int:
        """Of a device per step: two a parameter and token in forward, twice that in backward.

        Source: ZeRO-Infinity, section 4.1.
        """
        tokens = self.batch.samples * self.batch.sequence * self.batch.backwards
        numel = self.shape.num_parameters // self.options.model_parallel
        return (8 if way.recompute else 6) * tokens * numel

    def parts(self, shape: ModelShape) -> tuple[ModelShape, ...]:
        """What ranks have of a model before ZeRO cuts it, as far as that differs."""
        options = self.options
        return parts_of(shape, options.tensor, options.pipeline, options.accumulate)

    def memory(self, way: Way, shape: ModelShape) -> Memory:
        """The memory of the fullest rank of those that train `shape`, maybe another size of it."""
        found = (self._memory(way, part) for part in self.parts(shape))
        return max(found, key=lambda one: one.total)

    def _memory(self, way: Way, shape: ModelShape) -> Memory:
        widths = estimate.widths_of(way.policy, self.options.optimizer_states)
        activations = None
        if shape.transformer is not None:
            activations = self._activations(way, shape.transformer, widths.compute)
        step = Step(backwards=self.options.accumulate, activations=activations)
        shape = shape.with_offload(way.offload)
        return memory_of(shape, way.stage, self.options.cluster, widths, step)

    def _activations(self, way: Way, transformer: TransformerShape, width: int) -> Activations:
        return activations_of(
            transformer,
            self.batch,
            width,
            recompute=way.recompute,
            on_host=way.recompute and self.options.moves_inputs,
            num_parts=self.options.tensor if self.options.partitions_inputs else 1,
        )

    def fits(self, way: Way, num_blocks: int) -> bool:
        """Whether the model would fit with so many blocks."""
        return self.fits_all(self.memory(way, self.shape.with_blocks(num_blocks)))

    def fits_all(self, memory: Memory) -> bool:
        """Whether this much of each tier is there, as far as is known."""
        outside = self.outside(memory).values()
        return memory.total <= self.options.capacity and all(one.fits for one in outside)

    def _largest(self, way: Way) -> int | None:
        """Doubles the blocks until they do not fit, then halves the interval.

        With activations computed again wherever that may be chosen.
        """
        if self.options.checkpoint_activations == "auto":
            way = replace(way, recompute=True)
        if way.offload is not None and self.options.capacity_of(way.tier) is None:
            return None
        if not self.shape.num_blocks or not self.fits(way, 1):
            return None
        low, high = 1, 2
        while self.fits(way, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(way, middle) else (low, middle)
        return self.shape.with_blocks(low).num_parameters
