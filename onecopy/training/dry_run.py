"""`onecopy train --dry-run`: what a run would do, without training and without memory for weights.

The settings with their origins, the data, how the model is cut, what ranks send each other in a
step, the memory of a rank at its peak, and the plan. The step is real: the simulator runs it by the
engine itself, on tensors that have sizes and no memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

import onecopy
from onecopy import handle
from onecopy.comm.groups import ImaginedWorld
from onecopy.config import Config
from onecopy.errors import ConfigError
from onecopy.events import SENT, Event
from onecopy.launcher import in_launched_process
from onecopy.memory.device import available_bytes
from onecopy.memory.host import free_host_memory, free_space
from onecopy.options import bytes_of
from onecopy.planner.plan import Plan, plan
from onecopy.planner.show import print_plan
from onecopy.report import tables
from onecopy.report.amounts import amount, unit_for
from onecopy.report.progress import plural
from onecopy.simulator.simulate import Simulation, simulate
from onecopy.training import models
from onecopy.training.data import Corpus, Shard, load_corpus, steps_per_epoch
from onecopy.training.learning import make_optimizer
from onecopy.training.lora import add_adapters
from onecopy.training.options import TrainOptions
from onecopy.training.settings_file import to_toml
from onecopy.training.show import print_line
from onecopy.training.trainer import vocabulary_of, with_steps

if TYPE_CHECKING:
    from onecopy.core.engine import Engine

__all__ = ["dry_run"]

WIDTH = 120

# What the planner calls our optimizers; it does not know the others.
PLANNED = {"adamw": "adamw", "sgd": "momentum"}


def dry_run(options: TrainOptions) -> None:
    """Show what `train` would do with these options on `options.nproc` ranks.

    Raises:
        ConfigError: as `train`, as far as that can be known.
    """
    if in_launched_process():
        raise ConfigError("--dry-run needs no launcher: say --nproc N, the ranks of all machines.")
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file has no width of its own.
        console.width = max(console.width, WIDTH)
    corpus = load_corpus(options)
    shard = Shard(rank=0, world_size=options.nproc, batch=options.batch)
    options = with_steps(options, corpus, shard)
    _head(console, "Settings")
    print_line(console, to_toml(options))
    _head(console, "Data")
    _print_data(console, options, corpus, shard)
    planned = _plan(options, corpus)
    config = _config(options, planned)
    if config is not None:
        _print_step(console, options, corpus, config)
    if planned is not None:
        console.print()
        print_plan(console, planned, with_code=False)


def _print_data(console: Console, options: TrainOptions, corpus: Corpus, shard: Shard) -> None:
    print_line(console, f"{corpus.name}: {corpus.sizes}")
    sequences = shard.batch * shard.world_size * options.accumulate
    epoch = steps_per_epoch(corpus, shard, options.accumulate)
    print_line(
        console,
        f"a step has {sequences:,} sequences of {options.context:,} tokens, an epoch "
        f"{epoch:,.1f} steps, and the run {options.steps:,}: "
        f"{options.steps * sequences * options.context:,} tokens",
    )


def _plan(options: TrainOptions, corpus: Corpus) -> Plan | None:
    """Of this model on these ranks; None where the planner does not know the optimizer."""
    if options.optimizer not in PLANNED:
        return None
    recompute = {None: "off", "device": "on"}

    def model() -> nn.Module:
        return _model(options, corpus)

    model.__name__ = Path(options.model).name
    return plan(
        model,
        devices=options.nproc,
        devices_per_node=options.node_size,
        device_memory=str(_device_memory(options)),
        host_memory=_host_memory(options),
        nvme=_nvme(options),
        sequence=options.context,
        micro_batch=options.batch,
        accumulate=options.accumulate,
        optimizer=PLANNED[options.optimizer],
        precision=options.precision,
        checkpoint_activations=recompute.get(options.activations, "host"),
    )


def _device_memory(options: TrainOptions) -> int:
    """What one rank can hold: as said, as the accelerator has, or its share of this machine's."""
    if options.memory is not None:
        return bytes_of(options.memory)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and options.device != "cpu":
        found = available_bytes(accelerator)
    else:
        free = free_host_memory()
        found = None if free is None else free // (options.node_size or options.nproc)
    return bytes_of("80GB") if found is None else found


def _host_memory(options: TrainOptions) -> str | None:
    """What the host of a node has, where something is kept there: as much as this one."""
    free = free_host_memory()
    return None if options.offload is None or free is None else str(free)


def _nvme(options: TrainOptions) -> str | None:
    """What the drive has, where something is kept there."""
    where = (options.offload or "").removeprefix("nvme:")
    found = free_space(Path(where)) if where and where != options.offload else None
    return None if found is None else str(found[1])


def _config(options: TrainOptions, planned: Plan | None) -> Config | None:
    """What is simulated: one memory is followed, so nothing that is kept elsewhere."""
    config = options.config()
    if config.offload is not None or options.activations not in (None, "device"):
        return None
    if config.is_auto:
        if planned is None or planned.recommended is None:
            return None
        return dataclasses.replace(config, stage=planned.recommended.row.stage, memory=None)
    return config


def _model(options: TrainOptions, corpus: Corpus) -> nn.Module:
    """The model, where tensors have no memory."""
    model = models.construct(options, vocabulary_of(corpus))
    if options.lora_rank:
        model = add_adapters(model, options)
    if options.activations is not None:
        onecopy.checkpoint_activations(model, options.activations)
    return model


def _print_step(console: Console, options: TrainOptions, corpus: Corpus, config: Config) -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        with onecopy.init_sharded("cpu") if options.lora_rank else nullcontext():
            built.append(_model(options, corpus))
        return built[0]

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.zeros((options.batch, options.context), dtype=torch.int64)
        return tokens, tokens

    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return models.sum_of_losses(model, *given) / given[0].numel()

    found = simulate(
        build,
        batch,
        ImaginedWorld(options.nproc, native=torch.accelerator.is_available()),
        optimizer=lambda _: make_optimizer(built[0], options),
        loss=loss,
        backwards=options.accumulate,
        config=config,
    )
    _print_partition(console, built[0], config, options)
    _print_schedule(console, found)
    _print_peak(console, found, config, _device_memory(options))


def _print_partition(
    console: Console, model: nn.Module, config: Config, options: TrainOptions
) -> None:
    engine: Engine = handle.of(model).engine
    table = tables.new_table("unit", "parameters", "elements", "padding", "rank's slice")
    for unit in engine.units:
        layout = unit.layout
        numel = sum(parameter.numel() for parameter in unit.parameters)
        table.add_row(
            unit.name or "(root)",
            f"{len(unit.parameters):,}",
            f"{numel:,}",
            f"{layout.padded_numel - numel:,}",
            f"{unit.slice.master.numel():,}",
        )
    console.print()
    ranks = plural(options.nproc, "rank")
    tables.print_table(console, f"Partition: stage {config.stage} on {ranks}, in elements", table)


def _print_schedule(console: Console, found: Simulation) -> None:
    _head(console, "What a rank sends in a step, in order")
    for phase, kind, names, num_bytes in _runs(found.events):
        unit = unit_for(num_bytes)
        print_line(
            console,
            f"{phase:<8}  {kind:<7}  {len(names):>3} x  {amount(num_bytes, unit):>9} {unit}  "
            f"{names[0] if len(names) == 1 else f'{names[0]} ... {names[-1]}'}",
        )


def _runs(events: list[Event]) -> Iterator[tuple[str, str, list[str], int]]:
    """(phase, kind, units, bytes of all of them) of what follows one another and is alike."""
    sent = (event for event in events if event.kind in SENT)
    for (phase, kind), run in itertools.groupby(sent, key=lambda one: (one.phase, one.kind)):
        alike = list(run)
        names = [event.unit or "(root)" for event in alike]
        yield phase, kind, names, sum(event.num_bytes for event in alike)


def _print_peak(console: Console, found: Simulation, config: Config, capacity: int) -> None:
    """What the step really holds, beside what there is."""
    peak = found.peak
    unit = unit_for(peak.total)
    table = tables.new_table("at the peak of a step", f"{unit} of a rank")
    for name in ("parameters", "gradients", "optimizer"):
        table.add_row(name, amount(getattr(peak, name), unit))
    table.add_row("activations and temporaries", amount(peak.rest, unit))
    table.add_row("all of it", amount(peak.total, unit))
    verdict = "it fits" if peak.total <= capacity else "it does not fit"
    table.add_row(f"what there is: {verdict}", amount(capacity, unit))
    console.print()
    where = f"in {peak.phase}, after the {peak.what} of {peak.unit or '(root)'}"
    tables.print_table(console, f"Memory at stage {config.stage}, {where}", table)


def _head(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"), soft_wrap=True)
