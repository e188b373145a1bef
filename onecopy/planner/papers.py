"""What the papers after ZeRO-DP calculate: ZeRO-R, ZeRO-Offload, ZeRO-Infinity and ZeRO++.

This file owns arithmetic only, in the papers' own terms, so that each of their tables can be
checked. Nothing here says what this library can do; `estimate.py` has ZeRO-DP itself. Where a
paper prints a figure that its own formula does not give, the formula is what is written here and
the test names the misprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from onecopy.errors import ConfigError

__all__ = [
    "STRATEGIES",
    "Machine",
    "Placement",
    "Quantized",
    "Strategy",
    "Transformer",
    "Zeropp",
    "compute_intensity",
    "efficiency",
    "gathered_linear_bytes",
    "offload_gpu_bytes",
    "offload_traffic_bytes",
    "two_hop_bytes",
]

HALF = 2  # bytes of a 16-bit element
INFINITY_STATE_BYTES = 20  # ZeRO-Infinity counts an fp32 gradient: 2 + 2 + 4 x 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A transformer as the papers count it: blocks of 12 hidden^2 parameters, nothing else.

    layers, hidden, heads: of the model. sequence: tokens of one sample.
    """

    layers: int
    hidden: int
    heads: int = 1
    sequence: int = 1024

    @property
    def num_parameters(self) -> int:
        """12 nl hd^2 (ZeRO-Infinity, equation 1)."""
        return 12 * self.layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Bytes of model states of the whole model, 20 a parameter (ZeRO-Infinity, section 3)."""
        return INFINITY_STATE_BYTES * self.num_parameters

    def checkpoint_elements(self, batch: int, interval: int = 1) -> Fraction:
        """Elements of activation checkpoints, one block's input each `interval` blocks."""
        whole = batch * self.sequence * self.hidden * self.layers
        return Fraction(whole, interval)

    def checkpoint_bytes(self, batch: int, interval: int = 1, partitions: int = 1) -> Fraction:
        """Bytes of them in 16 bit, cut over `partitions` ranks (P_a: ZeRO, section 6.1)."""
        return self.checkpoint_elements(batch, interval) * HALF / partitions

    def working_bytes(self, batch: int, interval: int = 1) -> int:
        """Bytes of activations between two checkpoints (AWM: ZeRO-Infinity, equation 5)."""
        tokens = batch * self.sequence * interval
        return tokens * (16 * self.hidden + 2 * self.heads * self.sequence)

    def activation_bytes(self, batch: int) -> int:
        """Bytes of all activations without checkpoints: the same of every block."""
        return self.layers * self.working_bytes(batch)

    def model_parallel_elements(self, batch: int) -> int:
        """Elements that Megatron's six all-reduces send per block and step (ZeRO, section 8)."""
        return 12 * batch * self.sequence * self.hidden

    def partitioned_elements(self, batch: int) -> int:
        """Elements that P_a sends more than that, per block and step: one gather."""
        return batch * self.sequence * self.hidden


def gathered_linear_bytes(hidden: int, tiles: int = 1) -> Fraction:
    """Bytes of the largest operator, hd -> 4 hd, values and gradients in 16 bit, cut in tiles.

    Source: MSWM, ZeRO-Infinity equation 4; memory-centric tiling, section 5.1.3.
    """
    return Fraction(2 * HALF * hidden * 4 * hidden, tiles)


# ZeRO-Offload ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What lies on the host: the 16-bit gradients, and the update with its fp32 states."""

    gradients_on_host: bool
    update_on_host: bool


def offload_gpu_bytes(placement: Placement) -> int:
    """Bytes per parameter left on the GPU, of 16 (ZeRO-Offload, table 1)."""
    gradients = 0 if placement.gradients_on_host else HALF
    states = 0 if placement.update_on_host else 12
    return HALF + gradients + states


def offload_traffic_bytes(placement: Placement) -> int:
    """Bytes per parameter and step between GPU and host (ZeRO-Offload, section 3).

    Either the gradients go down and, for an update on the GPU, up again, or they go down and the
    parameters come back.
    """
    return 2 * HALF if placement.gradients_on_host or placement.update_on_host else 0


# ZeRO-Infinity's model of bandwidth -----------------------------------------------------------


def compute_intensity(state: str, *, batch: int, sequence: int, hidden: int = 0) -> Fraction:
    """Flops per byte that moves, for a state that lives in slow memory (section 4.1).

    Args:
        state: "parameters" (with gradients), "optimizer", or "checkpoints".
        batch: samples per device.

    Raises:
        ConfigError: for another state.
    """
    intensities = {
        "parameters": Fraction(batch * sequence),
        "optimizer": Fraction(batch * sequence, 4),
        "checkpoints": Fraction(24 * hidden),
    }
    if state not in intensities:
        raise ConfigError(f"state is {state!r}: choose one of {', '.join(intensities)}.")
    return intensities[state]


def efficiency(intensity: float, bandwidth: float, peak: float = 70e12) -> float:
    """Share of a device's `peak` flops per second that `bandwidth` bytes per second allow.

    Source: ZeRO-Infinity, equation 6; 70 Tflops is what its V100s reach.
    """
    return float(intensity * bandwidth / (intensity * bandwidth + peak))


# The largest model of a machine (ZeRO-Infinity, figure 6a) ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Capacities in bytes: of one device, and of the host and the drives of one node.

    None where one is not known. model_parallel: devices that share a copy of the model by other
    means than ZeRO.
    """

    devices: int
    nodes: int = 1
    device: float
    host: float | None = None
    nvme: float | None = None
    model_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How model states are spread, in bytes per parameter with mixed-precision Adam.

    whole, cut: on devices, on each of them and shared out over all. host, nvme: outside, shared out
    over all ranks.
    """

    name: str
    whole: int = 0
    cut: int = 0
    host: int = 0
    nvme: int = 0

    def largest(self, machine: Machine) -> float | None:
        """Parameters whose states alone fill the first tier; None where its size is not known."""
        limits: list[float] = []
        if self.whole or self.cut:
            degree = machine.model_parallel
            each = self.whole + self.cut * degree / machine.devices
            limits.append(degree * machine.device / each)
        for width, capacity in ((self.host, machine.host), (self.nvme, machine.nvme)):
            if width and capacity is None:
                return None
            if width and capacity is not None:
                limits.append(machine.nodes * capacity / width)
        return min(limits)


# In the order of the figure. ZeRO-Infinity counts a gradient in fp32 beside that in 16 bit.
STRATEGIES = (
    Strategy(name="data parallel", whole=16),
    Strategy(name="ZeRO-2", whole=HALF, cut=14),
    Strategy(name="ZeRO-Offload", whole=HALF, host=14),
    Strategy(name="3D parallel", cut=16),
    Strategy(name="ZeRO-3", cut=16),
    Strategy(name="ZeRO-Infinity, host", host=INFINITY_STATE_BYTES),
    Strategy(name="ZeRO-Infinity, NVMe", nvme=INFINITY_STATE_BYTES),
)


# ZeRO++ ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Numbers sent as `bits` each, with one fp32 scale for each block of them."""

    bits: int
    block: int | None = None

    @property
    def factor(self) -> Fraction:
        """Their bytes as a share of 16-bit ones; without a block, scales count as nothing."""
        scale = Fraction(32, self.block) if self.block else Fraction(0)
        return (self.bits + scale) / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeropp:
    """Which parts of ZeRO++ are in use.

    weights: qwZ, how gathers travel. gradients: qgZ, how reduces do across nodes.
    secondary: hpZ, a second copy of the parameters inside each node.
    """

    weights: Quantized | None = None
    gradients: Quantized | None = None
    secondary: bool = False

    def across_nodes(self, backwards: int = 1) -> Fraction:
        """What crosses nodes per step, as a multiple of the parameters' 16-bit bytes.

        ZeRO-3's gathers in forward and backward and its reduce, each times its factor; with a
        secondary copy only the first forward of a step gathers across nodes.
        """
        gather = self.weights.factor if self.weights else Fraction(1)
        reduce = self.gradients.factor if self.gradients else Fraction(1)
        gathers = 1 if self.secondary else 2 * backwards
        return gathers * gather + backwards * reduce

    @staticmethod
    def secondary_bytes(world_size: int, group_size: int) -> Fraction:
        """Bytes per parameter and rank of ZeRO-3 with the second copy cut over `group_size`."""
        return Fraction(16, world_size) + Fraction(HALF, group_size)


def two_hop_bytes(nodes: int, ranks_per_node: int, compression: int) -> tuple[Fraction, Fraction]:
    """qgZ's two all-to-alls: what a rank sends inside its node and across nodes.

    Both as multiples of the gradients' bytes (ZeRO++, section 3.3).
    """
    inside = Fraction(ranks_per_node - 1, ranks_per_node * compression)
    across = Fraction(nodes - 1, nodes * ranks_per_node * compression)
    return inside, across
