"""shard() and the user's verbs: the one place that wires the parts together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from onecopy import handle
from onecopy.comm import groups as comm_groups
from onecopy.comm import link_speed
from onecopy.comm import meshes as comm_meshes
from onecopy.comm.coding import Coding
from onecopy.comm.collectives import Collectives
from onecopy.comm.compare import check_equal, number_of_model
from onecopy.comm.neighbours import Neighbours, meet_neighbours
from onecopy.comm.nodes import find_machines, find_nodes, make_groups
from onecopy.comm.quantized import transports_of
from onecopy.comm.watchdog import Watchdog, watch
from onecopy.config import AUTO, Config
from onecopy.core import build
from onecopy.core.arguments import (
    IGNORED_BY_DDP,
    NotForDDP,
    check_models,
    check_modules,
    check_settings,
    describe_optimizer,
)
from onecopy.core.backward import Backward
from onecopy.core.coded import code_frozen
from onecopy.core.conversion import convert_buffers
from onecopy.core.copying import copy_plain
from onecopy.core.dtensors import check_replicas, tensor_groups
from onecopy.core.engine import Engine
from onecopy.core.hooks import Hooks
from onecopy.core.initialise import prepare
from onecopy.core.offload import check_offload, place_units
from onecopy.core.optimizer import (
    Binding,
    clip_gradients,
    refuse_strangers,
    refuse_unattached,
)
from onecopy.core.partition import assign_owners, find_units
from onecopy.core.precision import check_master
from onecopy.core.pretrained import read_pieces
from onecopy.core.restore import restore_models
from onecopy.core.stages import stage_of
from onecopy.core.state_dict import add_state_dict_hooks
from onecopy.core.step_in_backward import check_step_in_backward
from onecopy.errors import ShardingError
from onecopy.events import Events
from onecopy.memory import buffers
from onecopy.policies import Offload, Quantize
from onecopy.report.announce import announce
from onecopy.report.dtypes import describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from onecopy.comm.groups import Group, ImaginedWorld
    from onecopy.core.unit import UnitSpec
    from onecopy.memory.host_buffer import HostBuffer
    from onecopy.planner.real_units import OptimizerOf

__all__ = [
    "clip_grad_norm_",
    "config_of",
    "flush",
    "full_parameters",
    "no_sync",
    "shard",
    "unshard",
]

Models = TypeVar("Models", nn.Module, Sequence[nn.Module])
INSTANCE_ATTRIBUTES = ("no_sync", "zero_grad", "_apply", "__deepcopy__", IGNORED_BY_DDP)


class Pending(Protocol):
    """Something that goes on beside training."""

    def raise_if_lost(self) -> None:
        """Raise where a rank has ended, so that nothing can be done together any more."""

    def settle(self) -> None:
        """Wait for it, and raise what has become of it; all ranks together."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Among whom a model is sharded: all, the nodes that they are in, and who watches over them;
    and the other groups that it is spread over.
    """

    world: Group
    nodes: tuple[tuple[int, ...], ...]
    machines: tuple[tuple[int, ...], ...]
    mesh: DeviceMesh | ImaginedWorld | None
    watchdog: Watchdog | None
    neighbours: Neighbours | None = None
    tensor: tuple[Group, ...] = ()
    pipeline: tuple[Group, ...] = ()

    @property
    def are_first(self) -> bool:
        """This rank speaks for those that have the same to say."""
        return self.world.rank == 0 and not any(group.rank for group in self.tensor)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Handle(handle.NotCopied):
    """What belongs to one sharded model. Lives on the model, under `handle.ATTRIBUTE`."""

    engine: Engine
    backward: Backward
    hooks: Hooks
    events: Events
    mesh: DeviceMesh | ImaginedWorld | None = None
    bindings: list[Binding] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    # Made when the first checkpoint is.
    checkpoint_group: Group | None = None
    # Of async_save: what its copies lie in, and what is being written or was last.
    host_buffer: HostBuffer | None = None
    pending_save: Pending | None = None


def shard(
    model: Models,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    mesh: DeviceMesh | ImaginedWorld | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Models:
    """Partition the states of a model over the data-parallel ranks, in place.

        onecopy.shard(model, optimizer, stage=3)

    The model keeps its class, modules and `nn.Parameter` objects, the optimizer stays the user's
    own object. After this call forward, backward, `optimizer.step()` and `zero_grad()` keep their
    plain PyTorch meaning on the global batch: gradients are the mean over ranks and the sum over
    backwards. All ranks must call it together. Parameters and buffers become those of the first
    rank.

    Called on a model that is sharded already, it attaches one more optimizer. Where parameters have
    been added since (adapters), it partitions anew, with the settings of the first call; each rank
    then holds the whole model for a moment.

    Args:
        model: one model, or several that share optimizers.
        optimizer: one or several optimizers over parameters of these models; None to shard a
            model that is only evaluated, or whose optimizer is attached later.
        mesh: the device mesh of the job, whose dimensions are known by their names ("dp", "tp",
            "pp", ...; see comm/meshes.py), or its data dimensions; two of these say which ranks
            are in one node. None for all ranks. Without a process group one is made from
            torchrun's environment, else a world of one rank.
        config: settings as an object.
        **settings: fields of `Config`, which describes them: stage (what is cut: 1 optimizer
            states, 2 also gradients, 3 also parameters), precision, offload, max_grad_norm, ...

    Returns:
        the model (or the sequence) that was passed.

    Raises:
        ConfigError: a setting is unknown or does not fit, or with stage="auto" no stage does.
        ShardingError: the model or an optimizer cannot be sharded, or is sharded already.
        MismatchError: ranks passed different models or settings.

    Source: ZeRO (Rajbhandari et al. 2020), sections 5 and 7.
    """
    config = Config.make(config, settings)
    models: list[nn.Module] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    models = [handle.inner(one) if isinstance(one, nn.Module) else one for one in models]
    optimizers = _as_list(optimizer)
    sharded = [one for one in models if isinstance(one, nn.Module) and handle.find(one) is not None]
    if sharded and len(sharded) == len(models) and any(map(_has_grown, sharded)):
        _partition_anew(sharded, optimizers)
        return model
    check_models(models, optimizers)
    if sharded:
        check_settings(sharded[0], config, settings)
    check_offload(optimizers, handle.of(sharded[0]).engine.config if sharded else config)
    if not sharded:
        check_modules(models)
        for one in models:
            prepare(one)
        optimizer_of = _optimizer_of(optimizers)
        units = [_units_of(one, optimizer_of, config) for one in models]
        has_begun = comm_groups.has_begun()
        world = comm_meshes.world_group(mesh)
        announce(None if has_begun else comm_groups.advice_alone(world), is_first=True)
        watchdog = watch(world, config.stall_seconds)
        optimizers_said = [describe_optimizer(one) for one in optimizers]
        for one, specs in zip(models, units, strict=True):
            comm_groups.check_backend(world, specs[0].device)
            units_said = [_described(spec) for spec in specs]
            check_equal(world, one, config, units_said, optimizers_said)
        nodes = find_nodes(world, mesh, config.node_size)
        ranks = Ranks(
            world,
            nodes,
            find_machines(world),
            mesh,
            watchdog,
            None if config.neighbours == "send" else meet_neighbours(world, units[0][0].device),
            tensor=tensor_groups(models, world, comm_meshes.model_groups(mesh, "tensor")),
            pipeline=comm_meshes.model_groups(mesh, "pipeline"),
        )
        check_replicas(models, world, ranks.tensor)
        config = _choose_stage(config, ranks, units, optimizer_of)
        announce(_one_node_too_few(config, nodes), is_first=ranks.are_first)
        config = _choose_quantize(config, ranks, units[0][0])
        for one, specs in zip(models, units, strict=True):
            _shard_one(one, specs, ranks, config)
    elif len(sharded) < len(models) or not optimizers:
        raise ShardingError(
            f"this {type(sharded[0]).__name__} is sharded already. To attach an optimizer pass "
            "only sharded models, shard(model, optimizer); to partition it anew call "
            "onecopy.unshard(model) first"
        )
    _attach(models, optimizers)
    return model


def unshard(model: Models) -> Models:
    """Make a sharded model, and its optimizers, plain again, with full values on every rank.

    All ranks must call it together. Owned optimizer states are gathered too; gradients are
    dropped. Models that share an optimizer are made plain together: pass them as a list.

    Raises:
        ShardingError: a model is not sharded, or shares an optimizer with one that was not passed.
    """
    models: list[nn.Module] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    models = [handle.inner(one) for one in models]
    owners: list[Handle] = [handle.of(one) for one in models]
    bindings = list({id(one): one for owner in owners for one in owner.bindings}.values())
    engines = [owner.engine for owner in owners]
    for binding in bindings:
        if any(engine not in engines for engine, _ in binding.engines):
            raise ShardingError(
                f"the {type(binding.optimizer).__name__} of this model has parameters of another "
                "sharded model too: pass all its models, unshard([model_a, model_b])"
            )
    for owner in owners:
        if owner.pending_save is not None:
            owner.pending_save.settle()
    for owner in owners:
        owner.backward.flush()
        owner.engine.owned.hide()
        # Never let go of: the engine ends here, with everything gathered.
        owner.engine.begin_hold()
    restore_models(engines, bindings)
    for binding in bindings:
        binding.remove()
    for one, owner in zip(models, owners, strict=True):
        owner.hooks.remove()
        for registered in owner.handles:
            registered.remove()
        for name in (*INSTANCE_ATTRIBUTES, handle.ATTRIBUTE):
            vars(one).pop(name, None)
        owner.engine.collectives.agreement.close()
    return model


@contextmanager
def full_parameters(model: nn.Module, *, grads: bool = False) -> Iterator[nn.Module]:
    """Inside, every parameter of the model has its full values, to read and to change.

    All ranks must enter together, and make the same changes: each rank's own slice of them
    reaches the masters at the end of the block. Forward passes inside need no communication, so
    ranks may run different ones (generation, evaluation). `optimizer.step()` is refused inside.

    Args:
        grads: also show the reduced gradients: `param.grad` is a plain tensor like the parameter,
            or None where no rank has a gradient. Changes to them count in the next step.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    with engine.hold(), engine.owned.revealed() if grads else nullcontext():
        yield model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside keep their gradients on this rank; the next one outside reduces the sum.

    Saves traffic for the memory of full local gradients, at every stage (as DDP's no_sync). All
    ranks must use it alike. A step without a further backward reduces what is left.

    Raises:
        ShardingError: the model is not sharded.
    """
    backward: Backward = handle.of(model).backward
    before, backward.sync = backward.sync, False
    try:
        yield
    finally:
        backward.sync = before


def config_of(model: nn.Module) -> Config:
    """The settings with which a model is sharded; in the place of "auto" what was chosen.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    return engine.config


def flush(model: nn.Module) -> None:
    """Bring an update that is still running on the host into the parameters.

    With `Offload(delayed_update=...)` the parameters are one update behind; before an evaluation
    with the newest ones, call this on all ranks together. Saving, `state_dict()`, `full_parameters`
    and `unshard` do so by themselves. Without an update under way nothing happens.

    Raises:
        ShardingError: the model is not sharded.
    """
    engine: Engine = handle.of(model).engine
    engine.flush()


def clip_grad_norm_(
    model: nn.Module | Sequence[nn.Module], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`.

    The counterpart of `torch.nn.utils.clip_grad_norm_` for sharded models: the norm is that of
    the whole gradient, over all ranks. All ranks must call it, after backward and before the step.

    Args:
        model: one sharded model, or several whose common norm is meant.
        max_norm: a positive number; inf only measures.
        norm_type: p of the p-norm, inf for the largest magnitude.

    Returns:
        0-d tensor: the norm before clipping, the same on all ranks.

    Raises:
        ShardingError: a model is not sharded.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    owners: list[Handle] = [handle.of(one) for one in models]
    for owner in owners:
        owner.backward.flush()
    return clip_gradients([owner.engine for owner in owners], max_norm, norm_type)


def _has_grown(model: nn.Module) -> bool:
    """Whether parameters were added to a sharded model."""
    engine: Engine = handle.of(model).engine
    return any(engine.find(one) is None for one in model.parameters() if one.numel())


def _partition_anew(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Take sharded models apart and shard them again, with what has been added."""
    owners: list[Handle] = [handle.of(one) for one in models]
    bound = {id(one.optimizer): one for owner in owners for one in owner.bindings}
    new = [one for one in optimizers if id(one) not in bound]
    check_models(models, new)
    known = {id(parameter) for one in models for parameter in one.parameters()}
    for binding in bound.values():
        # Before anything is taken apart.
        groups = [{"params": parameters} for parameters in binding.parameters]
        refuse_strangers(groups, lambda one: id(one) in known)
    new_groups = []
    for binding in bound.values():
        groups = binding.optimizer.param_groups
        first = len(binding.parameters)
        new_groups.append((binding.optimizer, groups[first:]))
        del groups[first:]
    unshard(models)
    for one, added in new_groups:
        one.param_groups.extend(added)
    attached = [one for one, _ in new_groups]
    shard(models, [*attached, *new], mesh=owners[0].mesh, config=owners[0].engine.config)
    for anew, owner in zip(models, owners, strict=True):
        handle.of(anew).events.follow(owner.events)
        if owner.engine.owned.ties:
            warnings.warn(
                "parameters were added, and this model was sharded anew: call "
                "onecopy.parallel.tie(...) again, else its parameter and that of the other "
                "pipeline stage are tied no more",
                stacklevel=3,
            )


# Wiring ---------------------------------------------------------------------------------------


def _as_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]  # type: ignore[list-item]


def _optimizer_of(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerOf:
    """Tells what updates a parameter."""
    known = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return lambda parameter: known.get(id(parameter))


def _units_of(model: nn.Module, optimizer_of: OptimizerOf, config: Config) -> list[UnitSpec]:
    """The units of a model, each with parameters of one optimizer; nothing is changed yet."""
    specs = find_units(model, config, optimizer_of)
    check_master(config.precision_policy, [spec.dtypes.compute for spec in specs])
    check_step_in_backward(config, specs)
    return specs


def _one_node_too_few(config: Config, nodes: tuple[tuple[int, ...], ...]) -> str | None:
    """What to say where states are to be cut inside nodes, and all ranks are in one."""
    stage = stage_of(config.chosen_stage)
    if not stage.needs_nodes or len(nodes) > 1 or len(nodes[0]) == 1:
        return None
    remedy = "Say node_size=... if torchrun does not know of the nodes"
    if config.node_size is not None:
        remedy = f"node_size={config.node_size} makes it one: say less where there are several"
    return (
        f"stage={config.chosen_stage!r} cuts states inside nodes, and all {len(nodes[0])} ranks "
        f"are in one node: here it is {stage.on_one_node.name} ({stage.on_one_node.cuts}). "
        f"{remedy}"
    )


def _choose_stage(
    config: Config, ranks: Ranks, units: list[list[UnitSpec]], optimizer_of: OptimizerOf
) -> Config:
    """`config` with a number in the place of stage="auto", the same on all ranks.

    What few need is imported here: every rank would hold it for the whole run.
    """
    world, nodes = ranks.world, ranks.nodes
    if config.imported is not None:
        from onecopy.report.conversion import tell

        tell(config.imported, world_size=world.size, is_first=ranks.are_first)
    if config.is_auto:
        from onecopy.planner.choose import choose_stage

        config, choice = choose_stage(config, world, units, optimizer_of, nodes)
        announce(choice.reason, is_first=ranks.are_first)
    elif config.offload is not None:
        from onecopy.planner.room import check_room

        check_room(config, world, units, optimizer_of, nodes)
    return config


def _choose_quantize(config: Config, ranks: Ranks, unit: UnitSpec) -> Config:
    """`config` with a decision in the place of quantize="auto", the same on all ranks."""
    if config.quantize != AUTO:
        return config
    cut = stage_of(config.chosen_stage).optimizer
    decision = link_speed.decide(
        make_groups(ranks.world, cut, ranks.nodes, machines=ranks.machines, in_hops=True),
        unit.device,
        values=unit.dtypes.compute,
        gradients=unit.dtypes.reduce,
        native=comm_groups.has_native_collectives(ranks.world, unit.device),
        neighbours=ranks.neighbours,
    )
    announce(decision.reason, is_first=ranks.are_first)
    return Config.make(config, {"quantize": decision.quantize}, origin=decision.reason)


def _shard_one(
    model: nn.Module,
    specs: list[UnitSpec],
    ranks: Ranks,
    config: Config,
) -> None:
    world = ranks.world
    device = specs[0].device
    if device.type == "cpu":
        is_short = isinstance(config.offload, Offload) and config.offload.optimizer == "nvme"
        (buffers.return_freed_blocks if is_short else buffers.reuse_freed_blocks)()
    events = Events(config.sinks)
    number, key = number_of_model(world)
    native = comm_groups.has_native_collectives(world, device)
    stage = stage_of(config.chosen_stage)
    quantize = config.quantize if isinstance(config.quantize, Quantize) else None
    # Native collectives over all ranks know the links themselves.
    in_hops = stage.needs_nodes or not native or quantize is not None
    groups = replace(
        make_groups(world, stage.optimizer, ranks.nodes, machines=ranks.machines, in_hops=in_hops),
        tensor=ranks.tensor,
        pipeline=ranks.pipeline,
    )
    collectives = Collectives(
        groups,
        key=key,
        model_number=number,
        transports=transports_of(
            groups, native=native, quantize=quantize, neighbours=ranks.neighbours
        ),
        events=events,
        watchdog=ranks.watchdog,
    )
    with torch.no_grad():
        if any(build.unmade(model)):
            build.make_buffers(model, device)
        for buffer in model.buffers():
            collectives.broadcast(buffer)
        specs = assign_owners(specs, groups.shard.size)
        releases = stage.releases
        specs = place_units(
            specs, config, releases=releases, rank=world.ranks[world.rank], events=events
        )
        if quantize is not None and quantize.frozen is not None and releases:
            specs = code_frozen(specs, Coding(quantize.frozen, quantize.block))
        sources = build.sources_of(model)
        engine = Engine(model, specs, config, collectives)
        if sources:
            read_pieces(engine, sources)
    announce(describe(engine), is_first=ranks.are_first)
    backward = Backward(engine)
    owner = Handle(engine, backward, Hooks(engine, backward), events, ranks.mesh)
    setattr(model, handle.ATTRIBUTE, owner)
    _add_methods(model, owner)
    owner.handles += add_state_dict_hooks(model, engine)
    watcher = refuse_unattached(weakref.ref(engine), partial(_is_attached, weakref.ref(owner)))
    weakref.finalize(engine, watcher.remove)
    owner.handles.append(watcher)


def _described(spec: UnitSpec) -> str:
    """What ranks must agree on of a unit."""
    num_stored = sum(build.source_of(parameter) is not None for _, parameter in spec.parameters)
    return (
        spec.name
        + (" (whole parameters)" if spec.is_whole else "")
        + (f" ({num_stored} parameters from files)" if num_stored else "")
    )


def _is_attached(reference: weakref.ref[Handle], optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer, which is about to step, has been given to shard."""
    owner = reference()
    if owner is None or all(one.optimizer is not optimizer for one in owner.bindings):
        return False
    if owner.engine.has_unfrozen:
        owner.engine.has_unfrozen = False
        _warn_of_unowned(owner)
    return True


def _attach(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    owners: list[Handle] = [handle.of(one) for one in models]
    engines = [(owner.engine, owner.backward) for owner in owners]
    for optimizer in optimizers:
        for owner in owners:
            _refuse_shared_units(owner, optimizer)
        binding = Binding(optimizer, engines)
        for owner in owners:
            owner.bindings.append(binding)
    for owner in owners:
        _warn_of_unowned(owner)


def _refuse_shared_units(owner: Handle, optimizer: torch.optim.Optimizer) -> None:
    """A delayed update holds whole units: two of them would not go together."""
    offload = owner.engine.config.offload
    if not isinstance(offload, Offload) or not offload.is_delayed:
        return
    taken = {unit: binding.optimizer for binding in owner.bindings for unit in binding.units}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = owner.engine.find(parameter)
            if found is not None and found[0] in taken:
                unit, number = found
                raise ShardingError(
                    f"{unit.names[number]} of this {type(optimizer).__name__} lies in a unit with "
                    f"parameters of the {type(taken[unit]).__name__} that is attached already, and "
                    "delayed_update updates whole units: pass both optimizers to the call of shard "
                    "that partitions the model"
                )


def _warn_of_unowned(owner: Handle) -> None:
    """Parameters in training that no optimizer has are most often a mistake."""
    if not owner.bindings:
        return
    for one in owner.bindings:
        one.adopt_new_groups()
    owned = {id(p) for one in owner.bindings for group in one.parameters for p in group}
    missing = [
        name
        for unit in (gradients.unit for gradients in owner.engine.gradients)
        for name, parameter in zip(unit.names, unit.parameters, strict=True)
        if id(parameter) not in owned and parameter.numel() and parameter.requires_grad
    ]
    if missing:
        warnings.warn(
            f"{len(missing)} trainable parameters are in no optimizer, {missing[0]} for one: their "
            "gradients are reduced all the same. Freeze them (requires_grad_(False)) before shard, "
            "add them to an optimizer (add_param_group), or attach the one that updates them",
            stacklevel=4,
        )


def _add_methods(model: nn.Module, owner: Handle) -> None:
    """What loops, and torch itself, call on the model."""
    reference = weakref.ref(model)

    def bound_no_sync() -> Any:
        """See onecopy.no_sync."""
        return no_sync(_alive(reference))

    def zero_grad(set_to_none: bool = True) -> None:
        """See torch.nn.Module.zero_grad; clears the owned slices too."""
        one = _alive(reference)
        handle.of(one).engine.owned.clear(set_to_none=set_to_none)
        handle.of(one).backward.give_up()
        type(one).zero_grad(one, set_to_none)
        for gradients in handle.of(one).engine.gradients:
            gradients.zero(set_to_none=set_to_none)

    def apply(convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Called by to(), half(), cuda() and their like, of this module or of one around it."""
        one = _alive(reference)
        convert_buffers(handle.of(one).engine, convert)
        return one

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        """A plain model with full values; all ranks copy together."""
        found: Handle = handle.of(_alive(reference))
        handles = [*found.handles, *found.hooks.handles]
        return copy_plain(found.engine, (*INSTANCE_ATTRIBUTES, handle.ATTRIBUTE), handles, memo)

    values = (bound_no_sync, zero_grad, apply, deepcopy, NotForDDP())
    for name, value in zip(INSTANCE_ATTRIBUTES, values, strict=True):
        vars(model)[name] = value


def _alive(reference: weakref.ref[nn.Module]) -> nn.Module:
    model = reference()
    if model is None:
        raise ShardingError("the model of this method no longer exists")
    return model
