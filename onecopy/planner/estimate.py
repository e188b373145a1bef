"""Closed formulas: model-state bytes per rank, and elements sent per rank and step, at each stage.

This file owns arithmetic only. It does not know torch, models or processes, so a plan, a table
or a test can use it anywhere. Two sets of figures live side by side: what this library holds
(`state_bytes`) and what the ZeRO paper states for mixed-precision Adam (`paper_state_bytes`).
They differ because the paper keeps its 16-bit parameters at stage 3 and counts gradients in
16 bit, while this library makes 16-bit parameters from the masters at each gather.

P is the number of parameter elements including padding, N the number of ranks, X that of the ranks
in each of Y nodes. With P the padded number (always a multiple of N) the formulas are exact, not
approximate. A stage is a number, or what `Config.stage` takes besides; without nodes, or with one,
what is cut inside a node is cut over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from onecopy.config import AUTO, Config
from onecopy.core.stages import STAGES, Stage, stage_of
from onecopy.errors import ConfigError
from onecopy.policies import TIERS, Offload, Precision
from onecopy.report.states import StateBytes

# What `Config.stage` takes, or the row of the table that it names.
AnyStage = int | str | Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWidths:
    """Bytes that one parameter element takes in each model state."""

    compute: int = 4  # what forward and backward use
    master: int = 4  # what the optimizer updates
    gradient: int = 4  # the reduced gradient that the optimizer reads; 0 where none is kept
    optimizer: int = 8  # all optimizer states together: Adam keeps two fp32 moments
    remainder: int | None = None  # kept in place of a master where the compute dtype stays
    reduce: int | None = None  # gradients on the wire; None means as wide as the compute dtype

    @property
    def wire(self) -> int:
        """Bytes of one element of a local gradient, as it is kept and sent."""
        return self.compute if self.reduce is None else self.reduce


FP32 = ElementWidths()
BF16 = ElementWidths(compute=2)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAM_STATES_WITH_MASTER = 12  # the paper's K: fp32 master, momentum, variance


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Model-sized messages that one rank takes part in per step, by the kind of event.

    1 means every parameter element once. An all-reduce counts as 2, because it is a reduce
    followed by a gather. Multiply by (N-1)/N for what one rank really sends.
    """

    gather: int
    reduce: int
    refresh: int

    @property
    def total(self) -> int:
        """The sum of the three, in multiples of the number of parameter elements."""
        return self.gather + self.reduce + self.refresh

    def by_kind(self) -> dict[str, int]:
        """The three by the kind of event that carries them."""
        return {"gather": self.gather, "reduce": self.reduce, "refresh": self.refresh}


def state_bytes(
    stage: AnyStage,
    num_parameters: int,
    world_size: int,
    widths: ElementWidths = FP32,
    offload: Offload | None = None,
    *,
    node_size: int | None = None,
) -> StateBytes:
    """Bytes per rank after a backward and before the step, where each term is as wide as its dtype.

    `num_parameters` counts elements (P); where it is not a multiple of the ranks that share it the
    largest rank is meant. Raises ConfigError for an unknown stage or a size below 1.

    - stage 0 cuts nothing
    - stage 1 cuts master, reduced gradient and optimizer states, and keeps the full gradient buffer
      (the reduced gradient of one backward lies in it where it is as wide)
    - stage 2 frees that buffer unit by unit in backward
    - stage 3 holds no full parameters either
    - "mics" has 1/X of everything instead of 1/N
    - "hpz" and "hfsdp" have, beside what stage 3 has, 1/X of the parameters in the compute dtype

    With `offload` (of all of these elements, whatever its fraction) what `tier_bytes` says lies
    elsewhere; the device keeps values in the compute dtype, at stage 3 the owned ones.
    """
    cut = _row_for(stage, world_size, node_size)
    if num_parameters < 1:
        raise ConfigError(f"num_parameters is {num_parameters}: give a model with parameters.")
    owned, in_part = (
        -(-num_parameters // _num_ranks(one, world_size, node_size))
        for one in (cut.optimizer, cut.parameters)
    )
    kept = kept_bytes(cut, num_parameters, num_parameters, in_part, widths)
    states = owned_bytes(cut, owned, widths, offload)
    return StateBytes(
        parameters=kept.parameters + states.parameters,
        gradients=kept.gradients + states.gradients,
        optimizer=states.optimizer,
        host=states.host,
        nvme=states.nvme,
    )


def kept_bytes(
    stage: AnyStage, num_values: int, num_gradients: int, num_in_part: int, widths: ElementWidths
) -> StateBytes:
    """Bytes of what a rank keeps on its device beside the states that it owns.

    Values in the compute dtype where parameters stay, else those that its node keeps together
    (hpZ's secondary slices); and the buffer of full gradients, where that stays.

    Args:
        num_values: elements of the parameters. num_gradients: of the gradient buffer.
        num_in_part: of the parameters that this rank holds for its node.
    """
    cut = row_of(stage)
    held = num_in_part if cut.keeps_secondary else 0
    return StateBytes(
        parameters=(held if cut.releases else num_values) * widths.compute,
        gradients=num_gradients * widths.wire if cut.keeps_gradient_buffer else 0,
        optimizer=0,
    )


def owned_bytes(
    stage: AnyStage, num_owned: int, widths: ElementWidths = FP32, offload: Offload | None = None
) -> StateBytes:
    """Bytes of the elements that a rank owns: masters, mean gradients and optimizer states."""
    if offload is not None and not offload.is_all_on_device:
        parts = {tier: tier_bytes(tier, stage, num_owned, widths, offload) for tier in TIERS}
        return StateBytes(
            parameters=sum(one.parameters for one in parts.values()),
            gradients=sum(one.gradients for one in parts.values()),
            optimizer=sum(one.optimizer for one in parts.values()),
            host=parts["host"].total,
            nvme=parts["nvme"].total,
        )
    return StateBytes(
        parameters=num_owned * _master_on_device(stage, widths),
        gradients=0 if shares_buffer(stage, widths) else num_owned * widths.gradient,
        optimizer=num_owned * widths.optimizer,
    )


def shares_buffer(stage: AnyStage, widths: ElementWidths, offload: Offload | None = None) -> bool:
    """Whether the mean gradients of one backward lie in the buffer of full ones, which is kept."""
    is_here = offload is None or offload.is_all_on_device
    fits = widths.gradient == widths.wire
    return row_of(stage).keeps_gradient_buffer and is_here and fits


def _master_on_device(stage: AnyStage, widths: ElementWidths) -> int:
    """Bytes per owned element of masters that lie on the device, beside the flat buffer."""
    if row_of(stage).releases:
        return widths.master
    if widths.remainder is not None:
        return widths.remainder
    # In full precision the flat buffer is itself the master, as long as the rank keeps it.
    return 0 if widths.compute == widths.master else widths.master


def tier_bytes(
    tier: str, stage: AnyStage, num_owned: int, widths: ElementWidths, offload: Offload | None
) -> StateBytes:
    """What of them lies in a tier, "device", "host" or "nvme", where they are offloaded.

    Masters and optimizer states lie in the optimizer's tier, away from the device in full precision
    too, where a master there is the parameter itself; mean gradients in theirs. What gathers send,
    in the compute dtype, has a tier of its own where the rank does not hold whole parameters.

    Sources: ZeRO-Offload, section 4.2; ZeRO-Infinity, section 5.1; with fp32 gradients.
    """
    if offload is None or offload.is_all_on_device:
        return StateBytes(parameters=0, gradients=0, optimizer=0)
    holds_states = offload.optimizer == tier
    masters = _master_on_device(stage, widths) if tier == "device" else widths.master
    masters = masters if holds_states else 0
    values = values_beside_masters(stage, widths, offload) if offload.parameters == tier else 0
    return StateBytes(
        parameters=num_owned * (masters + values),
        gradients=num_owned * widths.gradient if offload.gradients == tier else 0,
        optimizer=num_owned * widths.optimizer if holds_states else 0,
    )


def values_beside_masters(stage: AnyStage, widths: ElementWidths, offload: Offload) -> int:
    """Bytes per owned element of what gathers send, where that is kept beside the master.

    In host memory it is made from masters that lie there; on NVMe it is read, and is the masters
    themselves where they have the compute dtype.
    """
    if not row_of(stage).releases:
        return 0
    if offload.parameters == offload.optimizer:
        is_read = offload.parameters == "nvme" and widths.compute != widths.master
        return widths.compute if is_read else 0
    return widths.compute


def bytes_moved(
    stage: AnyStage, widths: ElementWidths, offload: Offload | None, backwards: int = 1
) -> int:
    """Bytes that an owned element moves between device and host in a step, at most.

    Its gradient down once a backward, in the dtype on the wire; once a step where it waits on the
    device. From host memory up again, as it is kept there, for an optimizer on the device.
    Its value up once a step, in the compute dtype; with parameters="host" or "nvme", at stage 3, up
    for each gather instead, two a backward, and down once a step if the optimizer is on the device.

    Source: ZeRO-Offload, section 3.3: 4 bytes with 16 bit and one backward, the least.
    """
    if offload is None or offload.is_all_on_device:
        return 0
    is_away = offload.optimizer != "device"
    comes_up = row_of(stage).releases and offload.parameters != "device"
    ups = 2 * backwards if comes_up else int(is_away)
    values = (ups + (comes_up and not is_away)) * widths.compute
    if not widths.gradient:
        return values
    if offload.gradients == "device":
        return values + is_away * widths.wire
    return values + backwards * widths.wire + (0 if is_away else widths.gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTraffic:
    """Bytes that are read from NVMe and written to it."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: DiskTraffic) -> DiskTraffic:
        return DiskTraffic(read=self.read + other.read, written=self.written + other.written)

    def __mul__(self, number: int) -> DiskTraffic:
        return DiskTraffic(read=self.read * number, written=self.written * number)


def optimizer_traffic(stage: AnyStage, widths: ElementWidths, offload: Offload) -> DiskTraffic:
    """Bytes of an owned element that one step of the optimizer reads and writes on NVMe.

    Its master and states both ways, its gradient where that lies there, and the value that gathers
    read, where it is kept beside the master.

    Source: ZeRO-Infinity, sections 4.1 and 5.1.2.
    """
    if offload.optimizer != "nvme":
        return DiskTraffic(read=0, written=0)
    states = widths.master + widths.optimizer
    is_read = offload.parameters == "nvme"
    return DiskTraffic(
        read=states + (widths.gradient if offload.gradients == "nvme" else 0),
        written=states + (values_beside_masters(stage, widths, offload) if is_read else 0),
    )


def gradient_traffic(widths: ElementWidths, offload: Offload, backwards: int = 1) -> DiskTraffic:
    """Bytes of the means of an element that backwards write to NVMe, and read to add to them."""
    if offload.gradients != "nvme":
        return DiskTraffic(read=0, written=0)
    return DiskTraffic(read=(backwards - 1) * widths.gradient, written=backwards * widths.gradient)


def gather_traffic(stage: AnyStage, widths: ElementWidths, offload: Offload) -> DiskTraffic:
    """Bytes of an owned element that a gather reads from NVMe."""
    is_read = row_of(stage).releases and offload.parameters == "nvme"
    return DiskTraffic(read=widths.compute if is_read else 0, written=0)


def disk_traffic(
    stage: AnyStage, widths: ElementWidths, offload: Offload | None, backwards: int = 1
) -> DiskTraffic:
    """Bytes that an owned element in training moves between host and NVMe in a step, at most.

    At stage 3 there are two gathers a backward. The last unit of a forward is still there when its
    backward begins, which saves its second one.
    """
    if offload is None:
        return DiskTraffic(read=0, written=0)
    gathers = gather_traffic(stage, widths, offload) * (2 * backwards)
    gradients = gradient_traffic(widths, offload, backwards)
    return gathers + gradients + optimizer_traffic(stage, widths, offload)


def data_parallel_bytes(num_parameters: int, widths: ElementWidths = FP32) -> StateBytes:
    """Bytes per rank of plain data parallel training: everything whole on every rank."""
    return state_bytes(0, num_parameters, 1, widths)


def paper_state_bytes(
    stage: AnyStage,
    num_parameters: int,
    world_size: int,
    optimizer_bytes: int = ADAM_STATES_WITH_MASTER,
    *,
    node_size: int | None = None,
) -> float:
    """Bytes per rank as the papers state them, optimizer states with their master.

    16-bit parameters and gradients take 2 bytes an element each, `optimizer_bytes` is ZeRO's K.
    Stage 0 is 16 P, stage 1 is P (4 + 12/N), 2 is P (2 + 14/N), 3 is 16 P / N (ZeRO, table 1).
    With X ranks in a node "mics" is 16 P / X (MiCS), "hfsdp" P (4/X + 12/N) (PaRO), and "hpz",
    which has 16-bit parameters in secondary slices, too, P (16/N + 2/X) (ZeRO++, section 3.2).
    """
    cut = _row_for(stage, world_size, node_size)
    states = [(cut.parameters, 2), (cut.gradients, 2), (cut.optimizer, optimizer_bytes)]
    if cut == stage_of("hpz"):
        states.append(("world", 2))
    return num_parameters * sum(
        width / _num_ranks(how_far, world_size, node_size) for how_far, width in states
    )


def largest_model(
    stage: AnyStage, capacity: float, world_size: int, model_parallel: int = 1
) -> float:
    """Parameters whose model states just fill `capacity` bytes per rank (ZeRO, table 2, theory).

    Args:
        world_size: the degree of data parallelism.
        model_parallel: how many ranks share one copy of the model by other means.
    """
    return model_parallel * capacity / paper_state_bytes(stage, 1, world_size)


def traffic(stage: AnyStage, backwards: int = 1, no_sync: bool = False) -> Traffic:
    """Messages per optimizer step with `backwards` backwards in it, by the kind of event.

    With `no_sync` all backwards but the last keep their gradients local and reduce nothing;
    stage 3 still gathers its parameters twice a backward. Raises ConfigError for bad values.

    Where ranks are in nodes these are the hops inside of them; see `traffic_across`.
    """
    cut = row_of(stage)
    reduces = _num_reduces(backwards, no_sync)
    if not cut.shards_anything:
        return Traffic(gather=0, reduce=2 * reduces, refresh=0)
    gathers, refreshes = (2 * backwards, 0) if cut.releases else (0, 1)
    return Traffic(gather=gathers, reduce=reduces, refresh=refreshes)


def traffic_across(stage: AnyStage, backwards: int = 1, no_sync: bool = False) -> Traffic:
    """Of the messages of `traffic`, those that leave the nodes, too.

    Where each node has all states ("mics") that is an all-reduce of gradients alone, counted as 2.
    What nodes keep of the parameters (hpZ) is renewed once a step; where gradients are cut inside a
    node, sums of all backwards go across at once.

    Sources: MiCS (Zhang et al. 2022), section 3; ZeRO++, section 3.2; PaRO (Wu et al. 2023).
    """
    cut, every = row_of(stage), traffic(stage, backwards, no_sync)
    sums = 1 if cut.sums_at_boundary else _num_reduces(backwards, no_sync)
    if cut.optimizer != "world":
        return Traffic(gather=0, reduce=2 * sums, refresh=0)
    gathers = 1 if cut.keeps_secondary else every.gather
    return Traffic(gather=gathers, reduce=sums, refresh=every.refresh)


def _num_reduces(backwards: int, no_sync: bool) -> int:
    if backwards < 1:
        raise ConfigError(f"backwards is {backwards}: a step needs at least one backward.")
    return 1 if no_sync else backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements that one rank sends per step, as exact multiples of the number of parameters.

    inside: to ranks of its node. across: to ranks of others.
    """

    inside: Fraction
    across: Fraction

    @property
    def total(self) -> Fraction:
        """To all."""
        return self.inside + self.across


def elements_sent(
    stage: AnyStage,
    world_size: int,
    backwards: int = 1,
    no_sync: bool = False,
    *,
    node_size: int | None = None,
) -> Fraction:
    """Elements that one rank sends per step, as an exact multiple of the number of parameters.

    Stage 0 sends 2k, stages 1 and 2 k + 1, stage 3 3k times (N-1)/N, with k backwards;
    with `no_sync` on the first k - 1 of them 2, 2, 2 and 2k + 1. What goes in two hops is as much.
    """
    return elements_in_hops(stage, world_size, backwards, no_sync, node_size=node_size).total


def elements_in_hops(
    stage: AnyStage,
    world_size: int,
    backwards: int = 1,
    no_sync: bool = False,
    *,
    node_size: int | None,
) -> Elements:
    """The same, inside the rank's node and across nodes; one node where node_size is None.

    Raises:
        ConfigError: nodes are not equal: `memory.sent_by` counts rank by rank.
    """
    kinds = elements_by_kind(stage, world_size, backwards, no_sync, node_size=node_size).values()
    return Elements(
        inside=sum((one.inside for one in kinds), Fraction()),
        across=sum((one.across for one in kinds), Fraction()),
    )


def elements_by_kind(
    stage: AnyStage,
    world_size: int,
    backwards: int = 1,
    no_sync: bool = False,
    *,
    node_size: int | None,
) -> dict[str, Elements]:
    """The same by the kind of event.

    A message is (X-1)/X inside and (Y-1)/N across, at stage 0 (X-1)/N and (N-X)/N: in one hop.

    Raises:
        ConfigError: nodes are not equal: `memory.sent_by` counts rank by rank.
    """
    cut = _row_for(stage, world_size, node_size)
    in_node = _num_ranks("node", world_size, node_size)
    if world_size % in_node:
        raise ConfigError(
            f"node_size is {in_node} for {world_size} ranks: the closed formula needs equal nodes."
        )
    inside = Fraction(in_node - 1, in_node)
    across = Fraction(world_size // in_node - 1, world_size)
    if not cut.shards_anything:
        inside = Fraction(in_node - 1, world_size)
        across = Fraction(world_size - in_node, world_size)
    hops = traffic(cut, backwards, no_sync).by_kind()
    leaving = traffic_across(cut, backwards, no_sync).by_kind()
    return {
        kind: Elements(inside=times * inside, across=leaving[kind] * across)
        for kind, times in hops.items()
    }


def bytes_sent(messages: int, num_parameters: int, world_size: int, bytes_per_element: int) -> int:
    """Bytes that one rank sends for `messages` model-sized messages (a field of `Traffic`)."""
    whole = messages * num_parameters * bytes_per_element
    return whole * (world_size - 1) // world_size


def row_of(stage: AnyStage) -> Stage:
    """The row of the table that a stage names; ConfigError where there is no such stage."""
    if isinstance(stage, Stage):
        return stage
    if isinstance(stage, str) and stage not in (AUTO,):
        return stage_of(str(Config(stage=stage).stage))
    if stage not in STAGES:
        raise ConfigError(
            f"stage is {stage!r}: choose 0 (plain data parallel), 1 (cut optimizer states), "
            "2 (and gradients) or 3 (and parameters)."
        )
    return stage_of(stage)


def _row_for(stage: AnyStage, world_size: int, node_size: int | None) -> Stage:
    """The same where so many ranks are in nodes of that size; None is one node."""
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}: it counts processes, at least 1.")
    cut = row_of(stage)
    return cut.on_one_node if node_size is None or world_size <= node_size else cut


def _num_ranks(cut: str, world_size: int, node_size: int | None) -> int:
    """Over how many ranks a state is shared out that is cut so far."""
    in_node = min(node_size or world_size, world_size)
    return {"whole": 1, "node": in_node, "world": world_size}[cut]


def widths_of(precision: Precision, optimizer_states: int) -> ElementWidths:
    """Bytes of each state of a trainable fp32 parameter under a precision policy.

    Args:
        optimizer_states: tensors that the optimizer keeps for each parameter, as wide as what it
            updates.
    """
    compute = DTYPE_BYTES[precision.compute or "fp32"]
    is_pure = precision.master == "bf16" and precision.compute == "bf16"
    master = compute if is_pure else DTYPE_BYTES["fp32"]
    is_split = precision.master == "bf16+16" and precision.compute == "bf16"
    return ElementWidths(
        compute=compute,
        master=master,
        gradient=DTYPE_BYTES[precision.gradient] if precision.gradient else master,
        optimizer=optimizer_states * master,
        remainder=master - compute if is_split else None,
        reduce=DTYPE_BYTES[precision.reduce] if precision.reduce else compute,
    )
