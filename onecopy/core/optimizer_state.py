"""What state_dict() of an attached optimizer holds, and what its load_state_dict() takes.

Each rank's optimizer has the states of the pieces that the rank owns, so its state_dict() is local:
no collective, callable on one rank alone (trainers do), and only half the truth there. It says so
itself, in an entry of its own, and is loaded only where the same pieces are. A state_dict() of a
plain torch optimizer, with whole parameters, is cut to this rank's pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onecopy.core.dtensors import local_values
from onecopy.errors import ShardingError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from onecopy.core.optimizer import Binding
    from onecopy.core.unit import Unit

__all__ = ["COUNTERS", "TAG", "register_state_hooks", "slice_state", "tag_of"]

# The entry beside torch's "state" and "param_groups".
TAG = "onecopy"
# States of one number that say how far training has come. A parameter without dimensions has others
# of the same shape: these are told apart by their names.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def register_state_hooks(binding: Binding) -> list[RemovableHandle]:
    """Make the optimizer's state_dict() and load_state_dict() know of ranks; handles to undo it."""

    def before_saving(_: torch.optim.Optimizer) -> None:
        binding.join_update()

    def after_saving(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[TAG] = tag_of(binding)

    def before_loading(
        _: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        binding.adopt_new_groups()
        binding.join_update()
        if TAG in state_dict:
            _check_tag(state_dict[TAG], tag_of(binding))
            return None
        return _cut(state_dict, binding)

    def after_loading(_: torch.optim.Optimizer) -> None:
        binding.unit_steps.settle_states()

    return [
        binding.optimizer.register_state_dict_pre_hook(before_saving),
        binding.optimizer.register_state_dict_post_hook(after_saving),
        binding.optimizer.register_load_state_dict_pre_hook(before_loading),
        binding.optimizer.register_load_state_dict_post_hook(after_loading),
    ]


def tag_of(binding: Binding) -> dict[str, Any]:
    """Whose pieces these are, in plain numbers and names that any file format takes."""
    binding.adopt_new_groups()
    group = binding.engines[0][0].collectives.groups.shard
    pieces = []
    for parameters in binding.parameters:
        found = [binding.find_piece(parameter) for parameter in parameters]
        pieces.append([_describe(*one) for one in found if one is not None])
    return {"rank": group.rank, "world_size": group.size, "pieces": pieces}


def _describe(unit: Unit, number: int) -> list[Any]:
    place = unit.slice.place_of(number)
    return [unit.names[number], place.offset, place.numel]


def _check_tag(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse another rank's states, and those of other pieces.

    Raises:
        ShardingError: says what is different and what to do.
    """
    remedy = (
        "optimizer.state_dict() is local to a rank: save and load one on every rank, or take "
        "whole ones, which load anywhere, from the optimizer after onecopy.unshard(model)"
    )
    for name in ("world_size", "rank"):
        if saved[name] != own[name]:
            raise ShardingError(
                f"this optimizer state was saved by rank {saved['rank']} of {saved['world_size']} "
                f"and holds the pieces of that rank only; this is rank {own['rank']} of "
                f"{own['world_size']}. {remedy}"
            )
    if saved["pieces"] != own["pieces"]:
        was, now = [
            {place[0]: place for group in one["pieces"] for place in group} for one in (saved, own)
        ]
        different = sorted(name for name in was | now if was.get(name) != now.get(name))
        hint = f" (at {different[0]}, for one)" if different else ""
        raise ShardingError(
            f"this optimizer state belongs to other pieces{hint}: it was saved with another model, "
            f"another division into units or another stage. Shard as then; {remedy}"
        )


def _cut(state_dict: dict[str, Any], binding: Binding) -> dict[str, Any]:
    """A plain optimizer's states, cut to the pieces of this rank.

    Raises:
        ShardingError: its groups are not those of this optimizer.
    """
    groups = state_dict["param_groups"]
    saved = [len(group["params"]) for group in groups]
    own = [len(parameters) for parameters in binding.parameters]
    if saved != own:
        raise ShardingError(
            f"this optimizer state has {saved} parameters in its groups, this optimizer has {own}: "
            "it was saved with another model or other groups"
        )
    states: dict[int, dict[str, Any]] = {}
    cut_groups = []
    number = 0
    for group, parameters in zip(groups, binding.parameters, strict=True):
        kept, first = [], number
        for index, parameter in enumerate(parameters):
            found = binding.find_piece(parameter)
            if found is None:
                continue
            kept.append(index)
            state = state_dict["state"].get(group["params"][index])
            if state is not None:
                states[number] = slice_state(state, *found)
            number += 1
        cut = {**group, "params": list(range(first, number))}
        if "param_names" in group:
            cut["param_names"] = [group["param_names"][index] for index in kept]
        cut_groups.append(cut)
    return {**state_dict, "state": states, "param_groups": cut_groups}


def _placed(name: str, value: Any, unit: Unit, number: int) -> Any:
    """A state where its piece lies: an optimizer that was made first knew no device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        raise ShardingError(
            f"the optimizer state {name} of {unit.names[number]} is on the meta device and has no "
            "values, because the optimizer was made from parameters without values: build the "
            "model inside onecopy.init_sharded(), or make the optimizer after onecopy.shard(model) "
            "and attach it by onecopy.shard(model, optimizer)"
        )
    # Counters stay where the optimizer has them, but for those that the host could not read.
    is_moved = value.dim() or unit.slice.is_offloaded
    return value.to(unit.slice.device) if is_moved else value


def slice_state(state: dict[str, Any], unit: Unit, number: int) -> dict[str, Any]:
    """The part of a whole parameter's optimizer state that belongs to this rank's piece.

    Tensors shaped like the parameter are cut, everything else (step counters) is kept. All is kept
    where no parameter is cut.

    Raises:
        ShardingError: a tensor has another shape than the parameter it should belong to, or is of
            a kind that cannot be cut.
    """
    parameter = unit.parameters[number]
    state = {
        name: _placed(name, local_values(parameter, value), unit, number)
        for name, value in state.items()
    }
    if unit.layout.is_whole:
        return state
    shape = unit.views[number].shape
    cut: dict[str, Any] = {}
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == shape and (value.dim() or name not in COUNTERS):
            if type(value) is not torch.Tensor:
                raise ShardingError(
                    f"the optimizer state {name} of {unit.names[number]} is a "
                    f"{type(value).__name__}, which cannot be cut into pieces: shard with "
                    "whole_parameters=True, so that nothing is"
                )
            cut[name] = unit.slice.own_part(number, value).clone()
        elif is_tensor and value.numel() > 1:
            raise ShardingError(
                f"the optimizer state {name} of {unit.names[number]} has shape "
                f"{tuple(value.shape)}, the parameter {tuple(shape)}: it belongs to another model, "
                "or cannot be cut into pieces"
            )
        else:
            cut[name] = value
    return cut
