"""From a plan to its rehearsal: what the simulator builds, feeds and steps.

A configuration of transformers and a function give the model itself. A size stands for a GPT of so
many blocks of that width, as in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.comm.groups import ImaginedWorld
from onecopy.core.activations import checkpoint_activations
from onecopy.errors import ConfigError
from onecopy.planner import sources
from onecopy.planner.options import OPTIMIZERS
from onecopy.simulator.simulate import Simulation, simulate

if TYPE_CHECKING:
    from onecopy.planner.plan import Plan
    from onecopy.planner.rows import Row
    from onecopy.planner.shapes import Stack

__all__ = ["Rehearsal", "rehearse"]

# Where a size leaves nothing for an embedding: bytes.
LEAST_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A row of a plan, and what the real engine did in its circumstances."""

    row: Row
    simulation: Simulation

    @property
    def fits(self) -> bool:
        """Whether the peak of live bytes fits the device."""
        return self.simulation.peak.total <= self.row.capacity


def rehearse(plan: Plan, model: Any, batch: str | None = None) -> Rehearsal:
    """Simulate one step of what a plan recommends, or of its last row where nothing fits.

    Args:
        model: what the plan was made of.
        batch: "module:function" that makes one micro-batch, for models whose input is not known: a
            tensor, or a dict of keyword arguments.

    Raises:
        ConfigError: the model cannot be built or fed without values.
    """
    if plan.options.moves_inputs or plan.options.partitions_inputs:
        raise ConfigError(
            "one rank's device is simulated, and --checkpoint-activations "
            f"{plan.options.checkpoint_activations} keeps inputs of blocks elsewhere: say on"
        )
    if plan.options.model_parallel > 1:
        raise ConfigError(
            "a simulation runs one rank of the whole model: leave out --tensor and --pipeline, or "
            "--simulate"
        )
    found = plan.recommended
    # One memory is followed: what goes to another one is not rehearsed.
    on_device = [one for one in plan.rows if one.way.tier == "device"]
    row = found.row if found is not None and found.row in on_device else on_device[-1]
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(_build(plan, model, recompute=row.way.recompute))
        return built[0]

    def feed() -> Any:
        if batch is not None:
            return sources.import_function(batch)()
        return _tokens(plan, built[0])

    options = plan.options
    simulation = simulate(
        build,
        feed,
        ImaginedWorld(options.devices, native=True),
        optimizer=_maker_of(options.optimizer),
        backwards=options.accumulate,
        stage=row.stage,
        node_size=options.cluster.devices_per_node,
        precision=row.way.policy,
    )
    return Rehearsal(row, simulation)


def _maker_of(name: str) -> Any:
    """The optimizer as the plan's code makes it."""
    kind, _, arguments = OPTIMIZERS[name][1].partition("(")

    def make(parameters: Any) -> Any:
        model = SimpleNamespace(parameters=lambda: parameters)
        # A constant of this package: the code that a plan prints.
        return eval(f"kind({arguments}", {"kind": getattr(torch.optim, kind), "model": model})

    return make


def _build(plan: Plan, model: Any, *, recompute: bool) -> nn.Module:
    transformer = plan.model.transformer
    if isinstance(model, str | int) and sources.is_size(str(model)):
        assert transformer is not None, "a size becomes a GPT"
        (stack,) = transformer.stacks
        blocks = sum(sum(unit.numels) * unit.count for unit in plan.model.units[-1:])
        rows = (plan.model.num_parameters - blocks) // stack.hidden
        sequence = plan.question.batch.sequence
        vocabulary = max(rows - sequence, LEAST_VOCABULARY)
        built: nn.Module = _GPT(stack, vocabulary, sequence)
    else:
        built = sources.builder_of(model)()
    if recompute:
        if hasattr(built, "config") and hasattr(built.config, "use_cache"):
            built.config.use_cache = False
        checkpoint_activations(built)
    built.train()
    return built


def _tokens(plan: Plan, model: nn.Module) -> dict[str, torch.Tensor]:
    """Samples of tokens that are their own targets.

    Raises:
        ConfigError: the model does not take tokens by the usual names.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise ConfigError(
            f"what goes into a {type(model).__name__} is not known: say --batch module:function, "
            "which returns one micro-batch, a tensor or a dict of keyword arguments"
        )
    batch = plan.question.batch
    tokens = torch.randint(int(vocabulary), (batch.samples, batch.sequence))
    return {"input_ids": tokens, "labels": tokens}


class _Block(nn.Module):
    """Attention and an MLP, four times as wide, each after a norm: 12 width^2 parameters."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self._num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, sequence, width) in and out."""
        samples, sequence, width = x.shape
        shape = (samples, sequence, 3, self._num_heads, width // self._num_heads)
        heads = self.query_key_value(self.first_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, sequence, width))
        wide = nn.functional.gelu(self.up(self.second_norm(x)))
        return x + self.down(wide)  # type: ignore[no-any-return]


class _GPT(nn.Module):
    """What a size stands for."""

    def __init__(self, stack: Stack, vocabulary: int, sequence: int) -> None:
        super().__init__()
        width = stack.hidden
        num_heads = next(n for n in range(max(1, width // 128), 0, -1) if width % n == 0)
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(_Block(width, num_heads) for _ in range(stack.count))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
