"""Weights from Hugging Face's files, of which each rank reads the bytes that it owns.

On a sharded model they go into the masters, each rank's own pieces. On a model with parameters
that have no values yet (see build.py) it is written down where these are, and shard reads them
instead of initialising. Real tensors of a plain model are read at once, whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from onecopy import handle
from onecopy.comm.compare import gather_objects
from onecopy.core import build
from onecopy.core.dtensors import box_of, local_of
from onecopy.core.tiled_linear import persistent_tensors, tiles_in
from onecopy.core.unit import UnitState
from onecopy.errors import CheckpointError, ShardingError
from onecopy.memory.tensor_files import StoredTensor, open_directory

if TYPE_CHECKING:
    from onecopy.core.engine import Engine
    from onecopy.core.tiled_linear import TilePlace
    from onecopy.core.unit import Unit

__all__ = ["Keys", "load_pretrained", "read_pieces"]

# Names in an error, before the rest is only counted.
SHOWN = 5


class Keys(NamedTuple):
    """What did not match: parameters without stored values, stored tensors without parameter."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> Keys:
    """Give a model the weights that Hugging Face's `save_pretrained` has written.

    Reads `.safetensors` files, one or several with an index. Before `shard`, on a model built
    with `init_sharded` or on the meta device, nothing is read: where the values are is written
    down, and `shard` reads them instead of initialising. On a sharded model all ranks must call
    it together. Either way each rank reads only its own slices, straight into the masters, so
    that values stored in a higher precision than the model computes in are not rounded. A plain
    model with real parameters is read at once, whole.

    Names may differ by a prefix (`transformer.h.0` and `h.0`, `module.`), tied parameters may be
    stored once, and dtypes are converted. Parameters keep their optimizer states and gradients.

    Args:
        model: a plain model, or one that `shard` was given (not a part of it).
        directory: what `save_pretrained` made, or one `.safetensors` file.
        strict: every parameter and persistent buffer must be stored, and everything that is
            stored must have a place. False leaves the rest as it is.

    Returns:
        the names that did not match; both empty if strict.

    Raises:
        CheckpointError: files are missing, damaged or cut off; names or shapes do not match.
        ShardingError: a part of the model is sharded, or its parameters are being held gathered.
    """
    owner = handle.find(model)
    if owner is None:
        _refuse_parts(model)
        sources, keys = _match(model, directory, strict)
        _load_plain(sources)
        return keys
    engine: Engine = owner.engine
    engine.recover()
    if engine.is_held:
        raise ShardingError(
            "load_pretrained inside full_parameters: the values of the parameters would be written "
            "over those that were read. Load outside of it"
        )
    elsewhere = _names_elsewhere(model, engine)
    with _agreed(engine):
        sources, keys = _match(model, directory, strict, elsewhere)
    _check_equal(engine, [source for _, source in sources])
    engine.rest()
    read_pieces(engine, {id(tensor): source for tensor, source in sources})
    with torch.no_grad():
        for tensor, source in sources:
            if engine.find(tensor) is None:
                source.read(local_of(tensor))
    return keys


def _names_elsewhere(model: nn.Module, engine: Engine) -> set[str]:
    """What other pipeline stages have, and this one need not."""
    names = [name for name, _ in persistent_tensors(model)]
    found = set(names)
    for group in engine.collectives.groups.pipeline:
        found |= {name for theirs in gather_objects(group, sorted(found)) for name in theirs}
    return found - set(names)


def read_pieces(engine: Engine, sources: Mapping[int, StoredTensor]) -> None:
    """Read this rank's pieces of the parameters, by id, and let every rank see the new values."""
    changed = [unit for unit in engine.units if any(id(one) in sources for one in unit.parameters)]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        with _agreed(engine):
            for unit in changed:
                began = time.perf_counter()
                num_bytes = _read_unit(unit, sources)
                seconds = time.perf_counter() - began
                engine.events.emit("read", unit.name, num_bytes=num_bytes, seconds=seconds)
        engine.refresh(changed)


def _read_unit(unit: Unit, sources: Mapping[int, StoredTensor]) -> int:
    """Read this rank's pieces of one unit into its master; returns the bytes read."""
    if unit.state is UnitState.GATHERED:
        # What was written into other parameters of the unit is not to be lost.
        unit.keep_changes()
    num_bytes, master = 0, unit.slice.master
    for place in unit.slice.places:
        source = sources.get(id(unit.parameters[place.index]))
        if source is None:
            continue
        part = master[place.start : place.start + place.numel]
        if unit.views[place.index].stride() == torch.empty(source.shape, device="meta").stride():
            num_bytes += source.read_part(part, place.offset)
            continue
        # The order of the flat buffer is not that of the file (channels_last).
        whole = torch.empty(source.shape, dtype=master.dtype)
        num_bytes += source.read(whole)
        part.copy_(unit.slice.own_part(place.index, whole))
    del master
    unit.slice.rest()
    return num_bytes


def _load_plain(sources: Iterable[tuple[Tensor, StoredTensor]]) -> None:
    with torch.no_grad():
        for tensor, source in sources:
            if build.has_values(tensor):
                source.read(local_of(tensor))
            else:
                build.read_later(tensor, source)


class _agreed:
    """A block that fails on all ranks if it fails on one, so that no rank waits for another."""

    def __init__(self, engine: Engine) -> None:
        self._world = engine.collectives.groups.world

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        mine = None if error is None else f"{type(error).__name__}: {error}"
        everyone = gather_objects(self._world, mine)
        for rank, theirs in zip(self._world.ranks, everyone, strict=True):
            if theirs is not None and mine is None:
                raise CheckpointError(f"rank {rank} cannot load the weights. {theirs}")


def _check_equal(engine: Engine, sources: list[StoredTensor]) -> None:
    """Compare what the ranks have found in their files."""
    world = engine.collectives.groups.world
    described = repr([(one.name, one.dtype, one.shape, one.first_byte) for one in sources])
    digests = gather_objects(world, hashlib.sha256(described.encode()).hexdigest())
    for rank, digest in zip(world.ranks, digests, strict=True):
        if digest != digests[0]:
            raise CheckpointError(
                f"rank {rank} has other files than rank {world.ranks[0]} (other names, shapes or "
                "places): let all ranks read copies of the same directory"
            )


# Names ----------------------------------------------------------------------------------------


def _match(
    model: nn.Module,
    directory: str | os.PathLike[str],
    strict: bool,
    elsewhere: Set[str] = frozenset(),
) -> tuple[list[tuple[Tensor, StoredTensor]], Keys]:
    """Each tensor of the model that is stored, with its source, and the names that are left.

    Args:
        elsewhere: names that are not unexpected, though the model has not got them.

    Raises:
        CheckpointError: shapes differ, or names, if strict.
    """
    wanted = list(persistent_tensors(model))
    stored = open_directory(directory)
    names = _pair_names(model, [*(name for name, _ in wanted), *elsewhere], list(stored))
    found: dict[int, tuple[Tensor, StoredTensor]] = {}
    first_names: dict[int, str] = {}
    for name, tensor in wanted:
        first_names.setdefault(id(tensor), name)
        if name in names:
            found.setdefault(id(tensor), (tensor, stored[names[name]]))
    missing = dict.fromkeys(name for one, name in first_names.items() if one not in found)
    taken = set(names.values())
    keys = Keys(
        _not_ignored(model, "missing", missing),
        _not_ignored(model, "unexpected", (name for name in stored if name not in taken)),
    )
    places = tiles_in(model)
    _check_shapes(wanted, found, places, directory)
    if strict and any(keys):
        raise CheckpointError(
            f"the tensors in {os.fspath(directory)} are not those of this {type(model).__name__}. "
            + _shown("The model has, and they have not: ", keys.missing)
            + _shown("They have, and the model has not: ", keys.unexpected)
            + "Build the model of the configuration that they were saved with, or load with "
            "strict=False, which leaves the rest as it is"
        )
    for key, place in places.items():
        if key in found:
            tile, source = found[key]
            found[key] = tile, source.part(place.dim, place.first, place.count)
    return [(tensor, _own_part(tensor, source)) for tensor, source in found.values()], keys


def _own_part(tensor: Tensor, source: StoredTensor) -> StoredTensor:
    """Of what is stored for a DTensor this rank's part.

    Raises:
        CheckpointError: it is cut where files are not read in parts.
    """
    box = box_of(tensor)
    if box is None:
        return source
    whole = source.shape
    for dim, (first, count) in enumerate(zip(*box, strict=True)):
        if count == whole[dim]:
            continue
        if dim and len(whole) != 2:
            raise CheckpointError(
                f"{source.name} has shape {whole}, and tensor parallelism cuts its dimension "
                f"{dim}: load the model before it is parallelized"
            )
        source = source.part(dim, first, count)
    return source


def _pair_names(model: nn.Module, wanted: list[str], stored: list[str]) -> dict[str, str]:
    """For names of the model the stored ones: the same, or longer or shorter by a prefix."""
    pairs = {name: name for name in stored if name in set(wanted)}
    places = set(wanted)
    prefixes = dict.fromkeys(
        prefix
        for prefix in (
            getattr(model, "base_model_prefix", ""),
            _common_prefix(stored),
            _common_prefix(wanted),
        )
        if prefix
    )
    for name in stored:
        if name in pairs:
            continue
        for prefix in prefixes:
            for other in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
                if other in places:
                    pairs.setdefault(other, name)
    return pairs


def _common_prefix(names: list[str]) -> str:
    """The first part of dotted names, if all have the same."""
    first = {name.split(".", 1)[0] if "." in name else "" for name in names}
    return first.pop() if len(first) == 1 else ""


def _not_ignored(model: nn.Module, kind: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names without those that a Hugging Face model expects to differ."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return tuple(
        name for name in names if not any(re.search(pattern, name) for pattern in patterns)
    )


def _check_shapes(
    wanted: Iterable[tuple[str, Tensor]],
    found: Mapping[int, tuple[Tensor, StoredTensor]],
    places: Mapping[int, TilePlace],
    directory: str | os.PathLike[str],
) -> None:
    wrong = []
    for name, tensor in wanted:
        place = places.get(id(tensor))
        shape = tuple(tensor.shape) if place is None else place.shape
        if id(tensor) in found and shape != found[id(tensor)][1].shape:
            source = found[id(tensor)][1]
            wrong.append(
                f"{name} has shape {shape} in the model and {source.shape} in {source.path.name}"
            )
    if wrong:
        raise CheckpointError(
            f"the tensors in {os.fspath(directory)} have other sizes than the model's. "
            + _shown("", dict.fromkeys(wrong))
            + "Build the model of the configuration that they were saved with, and resize it "
            "(resize_token_embeddings) after they are loaded"
        )


def _shown(what: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}{', '.join(names[:SHOWN])}{rest}. "


def _refuse_parts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if handle.find(module) is not None:
            raise ShardingError(
                f"module {name} of this {type(model).__name__} is sharded: pass that module, with "
                "files that hold its weights alone, or load before shard"
            )
