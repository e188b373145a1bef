"""A linear layer as tiles, and where each tile lies in the plain layer.

A tile is a linear of the same class that computes some of the outputs, so outputs are those of the
plain layer, and so is each gradient of a weight. Tiles are units of their own (see partition.py):
stage 3 gathers, uses and releases one after the other, forward and backward.

Outside of this module tree nothing knows of tiles: state dicts, checkpoints and files of weights
have the plain layer's names and shapes. `place_of_tile` says where in them a parameter lies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onecopy.core import build
from onecopy.core.initialise import copy_count

__all__ = [
    "Kind",
    "TilePlace",
    "TiledLinear",
    "kind_of",
    "persistent_tensors",
    "tiles_in",
    "weight_of",
]


class Kind(NamedTuple):
    """A class of linear layers: its weight's dimension of outputs, its attribute for their number.

    All others of the weight are inputs; a bias has outputs only.
    """

    dim: int
    attribute: str


@dataclass(frozen=True, slots=True)
class TilePlace:
    """Where a parameter of a tile lies in the plain layer's.

    shape: of the plain parameter. dim: the dimension that is cut. first, count: what the tile has
    of it.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    count: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """The tile's first element in each dimension of the plain parameter."""
        return tuple(self.first if dim == self.dim else 0 for dim in range(len(self.shape)))

    def part_of(self, whole: Tensor) -> Tensor:
        """The tile's part of a tensor like the plain parameter, a view."""
        return whole.narrow(self.dim, self.first, self.count)


def kind_of(module: nn.Module) -> Kind | None:
    """How to cut a layer; None where it is none that can be cut.

    Exact classes only: others may be read by their parent, without a call (the projection inside
    MultiheadAttention).
    """
    if type(module) is nn.Linear:
        return Kind(0, "out_features")
    # Not imported: transformers need not be there.
    names = (type(module).__module__, type(module).__name__)
    if names == ("transformers.pytorch_utils", "Conv1D"):
        return Kind(1, "nf")
    return None


def weight_of(linear: nn.Module) -> nn.Parameter:
    """The weight of a layer that `kind_of` knows."""
    weight = linear._parameters["weight"]
    assert weight is not None, "a linear has a weight"
    return weight


class TiledLinear(nn.Module):
    """Computes what `linear` does, tile by tile; takes its parameters' values.

    Args:
        linear: a layer that `kind_of` knows.
        sizes: the number of outputs of each tile; their sum is the layer's.

    Attributes:
        tiles: layers of the same class, in the order of their outputs. Each has its part of the
            bias, too.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        kind = kind_of(linear)
        assert kind is not None, f"a {type(linear).__name__} cannot be tiled"
        self._dim = kind.dim
        self._shapes = {
            key: tuple(parameter.shape)
            for key, parameter in linear._parameters.items()
            if parameter is not None
        }
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        # What code reads of a layer: numbers of inputs and outputs.
        vars(self).update((k, v) for k, v in vars(linear).items() if type(v) is int)
        for key in linear._parameters.keys() - self._shapes.keys():
            self.register_parameter(key, None)
        self._places = [
            {key: self._place(key, first, count) for key in self._shapes}
            for first, count in zip(firsts, sizes, strict=True)
        ]
        self.tiles = nn.ModuleList(_tile_of(linear, kind, places) for places in self._places)
        self.train(linear.training)
        # Functions, not methods: copies and pickles of the layer have hooks of their own.
        layer: nn.Module = self
        layer.register_state_dict_post_hook(_join)
        layer.register_load_state_dict_pre_hook(_split)
        layer.register_load_state_dict_post_hook(_name_missing)

    def _place(self, key: str, first: int, count: int) -> TilePlace:
        return TilePlace(self._shapes[key], self._dim if key == "weight" else 0, first, count)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return torch.cat([tile(inputs) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        """The plain layer's weight, beside the tiles."""
        return f"weight={self._shapes['weight']}"

    def places(self) -> Iterator[tuple[str, list[tuple[str, TilePlace]]]]:
        """Each parameter's name in the plain layer, with its parts' names here, and places."""
        for key in self._shapes:
            yield (
                key,
                [(f"tiles.{n}.{key}", places[key]) for n, places in enumerate(self._places)],
            )

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and name not in vars(self)["_parameters"]:
            raise AttributeError(
                f"a tiled linear has no {name}: it is never in one place. Read or change the "
                f"parts, [tile.{name} for tile in layer.tiles], or the whole in a state_dict(). "
                "Initialise it before tile_linears, within onecopy.init_sharded() where it has no "
                "memory. Where the model's own code needs it, leave this layer out, "
                "tile_linears(..., modules=[...])"
            )
        return super().__getattr__(name)


def _tile_of(linear: nn.Module, kind: Kind, places: Mapping[str, TilePlace]) -> nn.Module:
    """A layer of the same class with some of the outputs. No constructor runs: it would draw."""
    tile = copy.copy(linear)
    # Dicts of its own: what is registered with one tile is not with the others.
    own = {key: copy.copy(v) for key, v in vars(linear).items() if isinstance(v, dict | set)}
    vars(tile).update(own)
    for key, place in places.items():
        tile.register_parameter(key, _part_of(linear._parameters[key], place))
    setattr(tile, kind.attribute, places["weight"].count)
    return tile


def _part_of(parameter: nn.Parameter | None, place: TilePlace) -> nn.Parameter:
    """A parameter of its own with the values of a part of another, which may be unmade."""
    assert parameter is not None, "only parameters have places"
    source = build.source_of(parameter)
    with torch.no_grad():
        part = place.part_of(parameter.detach()).clone(memory_format=torch.contiguous_format)
    tile = nn.Parameter(part, requires_grad=parameter.requires_grad)
    if source is not None:
        build.read_later(tile, source.part(place.dim, place.first, place.count))
    elif not build.has_values(parameter):
        copy_count(tile, parameter)
    return tile


# State dicts ----------------------------------------------------------------------------------


def _join(layer: TiledLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the plain layer's tensors in the place of the tiles'."""
    for key, parts in layer.places():
        names = [prefix + name for name, _ in parts]
        if all(isinstance(state.get(name), Tensor) for name in names):
            state[prefix + key] = torch.cat([state.pop(name) for name in names], parts[0][1].dim)


def _split(layer: TiledLinear, state: dict[str, Any], prefix: str, info: Any, *others: Any) -> None:
    """The other way round."""
    errors: list[str] = others[-1]
    for key, parts in layer.places():
        whole = state.get(prefix + key)
        if not isinstance(whole, Tensor):
            continue
        del state[prefix + key]
        shape = parts[0][1].shape
        if tuple(whole.shape) != shape:
            errors.append(
                f"size mismatch for {prefix}{key}: its shape is {tuple(whole.shape)}, and in this "
                f"model, before it was tiled, {shape}."
            )
            continue
        for name, place in parts:
            part = place.part_of(whole)
            # What becomes a parameter must be dense.
            is_assigned = info.get("assign_to_params_buffers", False)
            state[prefix + name] = part.contiguous() if is_assigned else part


def _name_missing(layer: TiledLinear, keys: Any) -> None:
    """What is missing is said under the plain layer's names."""
    for key, parts in layer.places():
        names = {name for name, _ in parts}
        for number, missing in enumerate(keys.missing_keys):
            name = next((one for one in names if f".{missing}".endswith(f".{one}")), None)
            if name is not None:
                keys.missing_keys[number] = missing.removesuffix(name) + key
    keys.missing_keys[:] = dict.fromkeys(keys.missing_keys)


# Names ----------------------------------------------------------------------------------------


def tiles_in(model: nn.Module) -> dict[int, TilePlace]:
    """By id of a parameter of a tile: its place in the plain layer's."""
    return {
        id(layer.get_parameter(name)): place
        for layer in model.modules()
        if isinstance(layer, TiledLinear)
        for _, parts in layer.places()
        for name, place in parts
    }


def persistent_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a state_dict would hold, under every name; the tiles of one tensor have one name."""
    plain: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        begin = f"{path}." if path else ""
        if isinstance(module, TiledLinear):
            plain |= {f"{begin}tiles.{number}": path for number in range(len(module.tiles))}
        path = plain.get(path, path)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield (f"{path}.{key}" if path else key), tensor
