"""The largest model that a machine can train, strategy by strategy (ZeRO-Infinity, figure 6a).

Two answers for each: how many parameters' states alone fit, by the papers' closed formulas, and the
largest model of the usual shape that fits here, by the planner's upper bound for one step, with
activations computed again in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onecopy.errors import ConfigError
from onecopy.planner.memory import KINDS, Memory
from onecopy.planner.options import PlanOptions
from onecopy.planner.papers import STRATEGIES, Machine, Strategy
from onecopy.planner.rows import ALL_HOST, ALL_NVME, HOST, Question, Way
from onecopy.planner.sizes import shown
from onecopy.planner.sources import read_model

__all__ = ["HEADER", "LARGEST", "NOTES", "Largest", "heading", "largest_models", "table"]

# What `onecopy plan` is given in the place of a model.
LARGEST = "largest"
SMALLEST = 1_000_000
# Sizes are found to this many of their digits.
PARTS = 1000

# Stage and offload of the strategies that this library has.
THREE_D = "3D parallel"
WAYS = {
    "data parallel": (0, None),
    "ZeRO-2": (2, None),
    "ZeRO-Offload": (2, HOST),
    THREE_D: (1, None),
    "ZeRO-3": (3, None),
    "ZeRO-Infinity, host": (3, ALL_HOST),
    "ZeRO-Infinity, NVMe": (3, ALL_NVME),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What one strategy can train.

    states: parameters whose states alone fit, as the papers count them; None where the capacity of
        a tier is not said. way: how it is done here. here: parameters of the largest model that
        fits; None where that is not known, 0 where none does.
    limit: what is full. options: the circumstances, with the ranks that share a copy of the model.
    """

    strategy: Strategy
    states: float | None
    way: Way
    here: int | None
    options: PlanOptions
    limit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "strategy": self.strategy.name,
            "states_alone": self.states,
            "here": self.here,
            "full": self.limit or None,
            "settings": self.call,
        }

    @property
    def words(self) -> str:
        """Stage and tier, and over how many ranks a copy of the model is spread."""
        tier = "" if self.way.tier == "device" else f" {self.way.tier}"
        return f"{self.way.stage}{tier}" + "".join(
            f", {name} {size}" for name, size in self._spread.items()
        )

    @property
    def _spread(self) -> dict[str, int]:
        sizes = {"pp": self.options.pipeline, "tp": self.options.tensor}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def call(self) -> str:
        """The settings of `shard`."""
        offload = "" if self.way.offload is None else f", offload={self.way.offload.written()}"
        return f"stage={self.way.stage}{offload}" + (", mesh=mesh" if self._spread else "")


def largest_models(**settings: Any) -> tuple[Largest, ...]:
    """For each strategy of figure 6a the largest model on these devices.

    Args:
        settings: fields of `onecopy.planner.options.PlanOptions`; stage, layers and hidden are not
            looked at, models have the usual shape of their size.

    Raises:
        ConfigError: a setting does not fit, or activations are not to be computed again.
    """
    options = PlanOptions.make(settings)
    if options.checkpoint_activations == "off":
        raise ConfigError(
            "the largest model is sought with activations computed again: leave "
            f"--checkpoint-activations out of onecopy plan {LARGEST}"
        )
    machine = Machine(
        devices=options.devices,
        nodes=options.devices // options.per_node,
        device=options.capacity,
        host=options.capacity_of("host"),
        nvme=options.capacity_of("nvme"),
        model_parallel=options.model_parallel,
    )
    return tuple(_largest(strategy, machine, options) for strategy in STRATEGIES)


def _largest(strategy: Strategy, machine: Machine, options: PlanOptions) -> Largest:
    states = strategy.largest(machine)
    stage, offload = WAYS[strategy.name]
    way = Way(stage=stage, policy=options.policy, recompute=True, offload=offload)
    if strategy.name == THREE_D and options.pipeline == 1:
        # As is usual: layers within nodes, blocks over nodes.
        tensor = options.tensor if options.tensor > 1 else options.per_node
        pipeline = options.devices // max(tensor, options.per_node)
        options = replace(options, tensor=tensor, pipeline=pipeline)
    found = Largest(strategy=strategy, states=states, way=way, here=None, options=options)
    if states is None:
        return found
    here, limit = _search(way, options)
    return replace(found, here=here, limit=limit)


def _search(way: Way, options: PlanOptions) -> tuple[int, str]:
    """The largest size that fits, to three digits, and what keeps the next one from fitting.

    Shapes grow in steps, so a size may fit just above one that does not; the first one counts.
    """
    low, high = 0, SMALLEST
    while (limit := _limit(way, options, high)) == "":
        low, high = high, 2 * high
    full = limit
    while high - low > max(high // PARTS, 1) and low:
        middle = (low + high) // 2
        limit = _limit(way, options, middle)
        if limit:
            high, full = middle, limit
        else:
            low = middle
    return low, full


def _limit(way: Way, options: PlanOptions, numel: int) -> str:
    """What is full with a model of this size; empty where it fits."""
    shape, _ = read_model(str(numel), options)
    question = Question(shape, options)
    memory = question.memory(way, shape)
    if memory.total > options.capacity:
        return KINDS[_most(memory)]
    for tier, outside in question.outside(memory).items():
        if not outside.fits:
            return {"host": "host memory", "nvme": "NVMe"}[tier]
    return ""


def _most(memory: Memory) -> str:
    return max(memory.at_peak, key=lambda kind: memory.at_peak[kind])


def heading(settings: Mapping[str, Any]) -> str:
    """The question in one line."""
    options = PlanOptions.make(settings)
    parts = [f"{options.devices:,} x {options.device_memory}"]
    per_node = [("host_memory", "of host memory"), ("nvme", "of NVMe")]
    parts += [
        f"{getattr(options, name)} {words} a node"
        for name, words in per_node
        if getattr(options, name) is not None
    ]
    return "The largest models on " + ", ".join(parts)


NOTES = (
    "States alone: closed formulas of the ZeRO papers, which fill the memory to the last byte.",
    "Here: models of the usual shape of their size, one step of them with the activations of "
    "blocks computed again; full is a tier, or a device, most of all of what is named.",
    "tile_linears cuts wide layers, whose values and gradients fill a device at last "
    "(docs/large-models.md).",
)
HEADER = ("strategy", "states alone", "here", "full", "stage")


def table(found: Iterable[Largest]) -> list[tuple[str, ...]]:
    """A row of words for each."""
    return [
        (
            one.strategy.name,
            "-" if one.states is None else shown(float(f"{one.states:.3g}")),
            "-" if one.here is None else shown(float(f"{one.here:.3g}")) if one.here else "none",
            one.limit or "-",
            one.words,
        )
        for one in found
    ]
