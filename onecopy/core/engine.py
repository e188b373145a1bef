"""What one sharded model does with its units: demand, prefetch, release, refresh, rest.

Hooks decide nothing, they call these verbs; the schedule says what is foreseen, the agreement
makes sure that all ranks do the same, the units change their own state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.core.loss_scale import make_loss_scale
from onecopy.core.owned import OwnedGradients
from onecopy.core.precision import dtypes_of
from onecopy.core.schedule import Schedule
from onecopy.core.stages import Stage, stage_of
from onecopy.core.touch import Touch
from onecopy.core.unit import Unit, UnitSpec, UnitState
from onecopy.errors import ShardingError
from onecopy.policies import Offload

if TYPE_CHECKING:
    from onecopy.comm.collectives import Collectives
    from onecopy.config import Config
    from onecopy.core.gradients import Gradients

__all__ = ["Engine"]

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# Units that are read from disk before their turn (ZeRO-Infinity, section 6.2).
FETCHED_AHEAD = 3
# Values that are refreshed as codes at once.
CODED_NUMEL = 1 << 24


class Engine:
    """The units of one model and the verbs on them.

    Attributes:
        gradients: those of the trainable units, in the same order.
        units: in the order root first, then module order; `unit.number` is the place here.
        owned: what parameters show as their gradients after a reduce.
        loss_scale: where gradients are fp16; see `core/loss_scale.py`.
        used: units in the order of their first use in forward.
        finish_failed_step: set while an optimizer steps; still there if the step raised.
        updates: bring updates that are under way into the parameters; see delayed.py.
        arrivals: are told of each unit whose owned gradient has a mean more; see speculative.py.
        trainability: a number for each choice of parameters in training that there has been.
        has_unfrozen: units that were frozen at shard are trained now, and nobody has looked yet
            whether an optimizer has their parameters.
        forwards: keys of the forwards since the last backward; they name the backward's segment.
        kept_in_state_dict: tells by the name what this rank wants of a state_dict() that all take
            part in; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Iterable[UnitSpec],
        config: Config,
        collectives: Collectives,
    ) -> None:
        self.model = model
        self.config = config
        stage = stage_of(config.chosen_stage)
        self.stage = stage if collectives.groups.num_nodes > 1 else stage.on_one_node
        self.collectives = collectives
        self.events = collectives.events
        self.schedule = Schedule()
        self.touch = Touch(self)
        self.units = [
            Unit(number, spec, self._stage_of(spec), collectives, self.touch)
            for number, spec in enumerate(specs)
        ]
        collectives.unit_names = [unit.name for unit in self.units]
        self.gradients = [unit.gradients for unit in self.units if unit.gradients is not None]
        self.loss_scale = make_loss_scale(self.gradients, config.precision_policy.loss_scale)
        self.owned = OwnedGradients(self.units, collectives)
        self.used: dict[Unit, None] = {}
        self.has_unfrozen = False
        self.finish_failed_step: Callable[[], None] | None = None
        self.updates: list[Callable[[], None]] = []
        self.arrivals: list[Callable[[Unit], None]] = []
        self.trainability = 0
        self.kept_in_state_dict: Callable[[str], bool] | None = None
        self._pattern: tuple[bool, ...] = ()
        self._patterns: dict[tuple[bool, ...], int] = {}
        self.forwards: list[Hashable] = []
        self._held = 0
        self._keeps = 0
        # What was released with its values kept, inside `keep`.
        self._kept: dict[Unit, None] = {}
        # Gathers send what is on disk.
        self._reads_ahead = isinstance(config.offload, Offload) and config.offload.path is not None
        # Gathered units that somebody has demanded, in order.
        self._live: dict[Unit, None] = {}
        self._wishes = [f"unit {unit.name} ({type(unit.module).__name__})" for unit in self.units]
        self._of_module: dict[int, tuple[Unit, ...]] = {}
        for unit in self.units:
            key = id(unit.module)
            self._of_module[key] = (*self._of_module.get(key, ()), unit)
        self._insides = {
            unit: frozenset(
                other for module in unit.module.modules() for other in self.units_of(module)
            )
            for unit in self.units
        }
        self._by_parameter = {
            id(parameter): (unit, index)
            for unit in self.units
            for index, parameter in enumerate(unit.parameters)
        }
        self._holders = [
            (module._parameters, key, f"{name}.{key}" if name else key, parameter)
            for name, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._structure = _structure_of(model)

    def _stage_of(self, spec: UnitSpec) -> Stage:
        return self.stage.with_whole_parameters if spec.stays else self.stage

    # Looking up -------------------------------------------------------------------------------

    def find(self, parameter: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit of a parameter and its number there, or None if it is not of this model."""
        return self._by_parameter.get(id(parameter))

    def units_of(self, module: nn.Module) -> tuple[Unit, ...]:
        """The units that are gathered around this module's forward."""
        return self._of_module.get(id(module), ())

    @property
    def is_held(self) -> bool:
        """Everything is gathered and stays so (inside full_parameters)."""
        return self._held > 0

    @property
    def keeps(self) -> bool:
        """What is released keeps its bytes (inside keep_gathered)."""
        return self._keeps > 0

    @property
    def gathers(self) -> bool:
        """A pass that begins now has its values from other ranks."""
        has_kept = any(unit.state is UnitState.KEPT for unit in self._kept)
        return not self._held and not has_kept

    def check_parameters(self) -> None:
        """Refuse to go on where parameters are not what they were at shard.

        Raises:
            ShardingError: one was replaced, so that its new values would be neither trained nor
                saved.
        """
        for held, key, name, parameter in self._holders:
            if held.get(key, parameter) is not parameter:
                raise ShardingError(
                    f"parameter {name} was replaced by another one after shard (an assignment to "
                    "the module, or load_state_dict(assign=True) of a part), which is neither "
                    "trained nor saved: change the values of the old one inside "
                    "onecopy.full_parameters(model), or replace it before shard (where "
                    "parallelize_module belongs, too)"
                )

        self.owned.settle(uncounted=True)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for unit in self.units:
                if unit.state is UnitState.GATHERED:
                    # Where parameters stay, changes made in between are kept here.
                    unit.keep_changes()

    def refuse_strangers(self) -> None:
        """A forward begins: nothing averages the gradients of parameters that came after shard.

        Raises:
            ShardingError: there are some, in training.
        """
        for module, held, count in self._structure:
            if held != tuple(module._modules.values()) or count != len(module._parameters):
                break
        else:
            return
        strangers = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.numel() and self.find(parameter) is None
        ]
        if strangers:
            raise ShardingError(
                f"{len(strangers)} trainable parameters were added to this "
                f"{type(self.model).__name__} after shard, {strangers[0]} for one: nothing would "
                "average their gradients over the ranks. Add them before shard (with PEFT: "
                "get_peft_model, then shard), or call onecopy.shard(model, optimizer) once more, "
                "with the model that was given to shard and an optimizer that has them"
            )
        self._structure = _structure_of(self.model)

    def look_at_trainability(self) -> list[Gradients]:
        """A forward begins: which parameters are in training? Returns gradients that are new."""
        with torch._C.DisableTorchFunctionSubclass():
            # A list first: no call for each parameter.
            pattern = tuple([one.requires_grad for unit in self.units for one in unit.parameters])
        if pattern == self._pattern:
            return []
        self._pattern = pattern
        self.trainability = self._patterns.setdefault(pattern, len(self._patterns))
        return self._unfreeze()

    def _unfreeze(self) -> list[Gradients]:
        """Units that were frozen and have a parameter in training now: all ranks train them."""
        with torch._C.DisableTorchFunctionSubclass():
            units = [
                unit
                for unit in self.units
                if unit.gradients is None and any(one.requires_grad for one in unit.parameters)
            ]
        new = []
        for unit in units:
            self.collectives.agreement.agree(f"unit {unit.name} is trained from now on")
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                new.append(self._unfreeze_one(unit))
        if new:
            self.gradients = [unit.gradients for unit in self.units if unit.gradients is not None]
            before, self.owned = self.owned, OwnedGradients(self.units, self.collectives)
            self.owned.follow(before)
            self.has_unfrozen = True
        return new

    def _unfreeze_one(self, unit: Unit) -> Gradients:
        """Raises ShardingError where gradients need a loss scale that there is not."""
        if unit.state is UnitState.GATHERED:
            unit.keep_changes()
        is_kept = unit.dtypes.compute == torch.float32
        trained = next(one for one in unit.parameters if one.requires_grad)
        dtypes = dtypes_of(trained, self.config.precision_policy, kept=is_kept)
        if torch.float16 in (dtypes.compute, dtypes.reduce) and self.loss_scale is None:
            if self.config.precision_policy.loss_scale != 1.0:
                raise ShardingError(
                    f"unit {unit.name} computes in fp16 and is trained from now on, in a model "
                    "that had no fp16 gradients to scale at shard: call requires_grad_(True) "
                    "before shard and freeze afterwards"
                )
        gradients = unit.unfreeze(dtypes)
        if self.loss_scale is not None:
            gradients.scale_by(self.loss_scale)
        return gradients

    def share(self, value: float, what: str) -> list[float]:
        """One number of every rank, in rank order; a collective named `what`."""
        return self.collectives.share(value, what, self.units[0].flat.device)

    # Verbs ------------------------------------------------------------------------------------

    def begin_segment(self, key: Hashable) -> None:
        """A forward, a backward or a block of `hold` begins, with nothing gathered by touch."""
        if self._live and not self.schedule.is_running:
            self.rest()
        self.schedule.begin(key)

    def demand(self, unit: Unit, wish: str | None = None, *, exactly: bool = False) -> None:
        """The unit's values are needed now: gathered when this returns, the next under way.

        Args:
            wish: how the ranks name this use when they agree on it; None for a module's.
            exactly: somebody looks at them outside of forward and backward; what is not gathered
                yet is not quantized for that.
        """
        if unit.state is UnitState.GATHERED:
            return
        if not unit.releases:
            unit.finish_gather()
            return
        self._live[unit] = None
        self._agree(unit, wish or self._wishes[unit.number])
        if self._reads_ahead:
            for other in (unit, *islice(self.schedule.upcoming(), FETCHED_AHEAD)):
                if other.state is UnitState.SHARDED and other.secondary is None:
                    other.slice.start_fetch()
        if self.collectives.quantizes_values and exactly != unit.is_exact:
            # What was kept is for the other kind of use. That there was one must change nothing.
            unit.forget()
        if unit.state is UnitState.KEPT:
            unit.resume()
        elif unit.state is UnitState.SHARDED:
            unit.start_gather(exactly=exactly)
        self._prefetch()
        if unit.state is UnitState.GATHERING:
            unit.finish_gather()

    def _agree(self, unit: Unit, wish: str) -> None:
        """Count a use of a unit; where it is not foreseen, all ranks must want the same.

        Where the node keeps its values, and a forward has written into them on some rank, these
        have to come from their owners once more. A rank that only learns of it in a use that is
        foreseen would hang: an error names both.
        """
        agreement, is_foreseen = self.collectives.agreement, self.schedule.use(unit)
        if unit.secondary is None:
            (agreement.scheduled if is_foreseen else agreement.agree)(wish)
        elif not is_foreseen:
            hidden = str(int(unit.has_hidden_writes))
            news = agreement.exchange(wish, f"{int(unit.has_news)}{hidden}")
            unit.has_hidden_writes = any(one[1] == "1" for one in news)
            if any(one[0] == "1" for one in news):
                unit.drop_secondary()
        elif unit.has_news:
            agreement.agree(f"{wish}, into which its own forward has written")
            unit.drop_secondary()
        else:
            agreement.scheduled(wish)

    def _prefetch(self) -> None:
        """Start the gathers of the next units, as far ahead as the configuration allows."""
        limit, ahead = self.config.prefetch_bytes, 0
        for unit in self.schedule.upcoming():
            if unit.state in (UnitState.GATHERED, UnitState.KEPT):
                # In use now, and needed again later: it will be gathered then.
                continue
            ahead += unit.flat.numel() * unit.flat.itemsize
            if unit.has_news or (limit is not None and ahead > limit):
                return
            if unit.state is UnitState.SHARDED:
                unit.start_gather()
            if limit is None:
                return

    def release(self, unit: Unit, *, settled: bool = False) -> None:
        """The unit's values are not needed for now (nothing happens where they are kept)."""
        if unit.releases and not self._held and unit.state is UnitState.GATHERED:
            self._live.pop(unit, None)
            if self._keeps:
                self._kept[unit] = None
            unit.release(settled=settled, keep=self._keeps > 0)
            if _is_any_autocast_enabled():
                # Its cache would keep a cast copy of the values that were just given back.
                torch.clear_autocast_cache()

    def release_passed(self, unit: Unit) -> list[Unit]:
        """Backward has come to `unit`: release, and return, the others that it has left behind.

        Units whose module contains the unit's, like the root, are still needed; units inside may
        be (an output of the root can be an output of a block).
        """
        passed = [
            other
            for other in self._live
            if unit not in self._insides[other] and other not in self._insides[unit]
        ]
        for other in passed:
            self.release(other)
        return passed

    def release_untouched(self, touched: Collection[Unit]) -> None:
        """Others than these units are touched no longer; tensors of them keep their memory.

        All ranks do the same, whoever holds tensors.
        """
        for unit in list(self._live):
            if unit not in touched:
                self.release(unit)

    def rest(self) -> None:
        """End of a segment: nothing stays gathered, prefetched units that nobody used neither."""
        if not self.stage.releases or self._held:
            return
        for unit in self.units:
            if unit.releases:
                if unit.state is UnitState.GATHERING:
                    unit.finish_gather()
                self.release(unit)
                unit.tidy()

    def note_use(self, unit: Unit) -> None:
        """Remember the order in which units are first used: reduces go the other way."""
        self.used.setdefault(unit)

    def refresh(self, units: Iterable[Unit]) -> None:
        """After a step on these units: let every rank see the new values, in order of use."""
        chosen = {unit for unit in units if not unit.releases}
        if not chosen:
            return
        in_order = [*self.used, *(unit for unit in self.units if unit not in self.used)]
        # What is refreshed travels into its place. As codes it takes memory until it is there, and
        # that must not grow with the model (C_B: ZeRO, section 6.2): the first are waited for.
        is_coded, under_way, num_coded = self.collectives.quantizes_values, deque[Unit](), 0
        for unit in (one for one in in_order if one in chosen):
            if unit.state is UnitState.GATHERING:
                unit.finish_gather()
            unit.refresh()
            if is_coded:
                under_way.append(unit)
                num_coded += unit.flat.numel()
            while len(under_way) > 1 and num_coded > CODED_NUMEL:
                first = under_way.popleft()
                num_coded -= first.flat.numel()
                if first.state is UnitState.GATHERING:
                    first.finish_gather()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather everything, on all ranks together, and keep it until the end of the block.

        What was changed by then goes to the masters.
        """
        self.begin_hold()
        try:
            yield
        finally:
            self.end_hold()

    def begin_hold(self) -> None:
        """See `hold`."""
        if not self._held:
            self.flush()
            if self.finish_failed_step is not None:
                self.finish_failed_step()
            if self.stage.releases:
                self.begin_segment(("full parameters",))
            elif not all(unit.is_exact for unit in self.units):
                self.collectives.agreement.agree("full parameters")
            for unit in self.units:
                self.demand(unit, exactly=True)
                unit.gather_exactly()
                unit.drop_secondary()
                # Now, so that what is changed inside can be told from what is not.
                unit.slice.join_master()
            self.schedule.end()
        self._held += 1

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Inside, what is released keeps its bytes, and is not gathered again.

        Everything else is as outside: uses are agreed on, recorded and foreseen, guards are worn.
        So inside and outside follow the same schedule.
        """
        if self.finish_failed_step is not None:
            self.finish_failed_step()
        self._keeps += 1
        try:
            yield
        finally:
            self._keeps -= 1
            if not self._keeps:
                self._forget()

    def _forget(self) -> None:
        """Give back what `keep` has kept."""
        for unit in self._kept:
            unit.forget()
        self._kept.clear()

    def flush(self) -> None:
        """Bring updates that are under way into the parameters; all ranks together."""
        if self.updates:
            self._forget()
        for publish in self.updates:
            publish()

    def recover(self) -> None:
        """A forward or a step begins: no step can still be under way."""
        if self.finish_failed_step is not None:
            self.finish_failed_step()

    def end_hold(self) -> None:
        """See `hold`."""
        self._held -= 1
        if self._held:
            return
        for unit in self.units:
            if unit.state is UnitState.GATHERED:
                unit.take_values()
                unit.slice.rest()
                self.release(unit, settled=True)
                unit.forget()
                if unit.state is UnitState.GATHERED:
                    unit.show_as_sent()


def _structure_of(model: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]:
    """What holds parameters: each module with its children and its number of parameters."""
    return [
        (module, tuple(module._modules.values()), len(module._parameters))
        for module in model.modules()
    ]
