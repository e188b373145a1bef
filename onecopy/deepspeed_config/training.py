"""What a configuration says of the loop: batches, clipping, checkpointing of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.deepspeed_config.reading import Reading

__all__ = ["Batch", "map_activations", "map_batch", "map_loop", "wrong_world"]

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
CLIP = "gradient_clipping"
PARTITION = "activation_checkpointing.partition_activations"
ON_HOST = "activation_checkpointing.cpu_checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """train = micro x accumulation x ranks, with None for what is not said or follows.

    num_ranks: the data-parallel ranks for which the three are right; None where any number is.
    """

    train: int | None
    micro: int | None
    accumulation: int | None
    num_ranks: int | None = None

    @property
    def steps(self) -> int:
        """Backwards for each update, as far as the configuration says."""
        return self.accumulation or 1


def map_batch(reading: Reading, world_size: int | None) -> Batch:
    """The three sizes, checked against each other and the number of ranks, where that is known."""
    sizes = {key: reading.value(key) for key in (TRAIN, MICRO, STEPS)}
    for key, size in sizes.items():
        if size is not None and size < 1:
            reading.refused(key, "give 1 or more")
            sizes[key] = None
    train, micro, steps = (None if size is None else int(size) for size in sizes.values())
    num_ranks = None
    if train is not None and micro is not None:
        each = micro * (steps or 1)
        if train % each:
            said = f"{MICRO} {micro}" + (f" x {STEPS} {steps}" if steps else "")
            reading.refused(TRAIN, f"no multiple of {said}: make it one, or remove one of them")
        elif steps is not None:
            num_ranks = train // each
        elif world_size is not None:
            steps = _steps_that_follow(reading, train // micro, world_size)
    batch = Batch(train=train, micro=micro, accumulation=steps, num_ranks=num_ranks)
    if world_size is not None and num_ranks not in (None, world_size):
        reading.refused(TRAIN, wrong_world(batch, world_size))
    rows = "rows that a rank's DataLoader gives at once"
    reading.left(MICRO, f"{rows}: DataLoader(..., batch_size={micro})")
    reading.left(STEPS, f"backwards for each update: divide the loss by {batch.steps}")
    reading.left(TRAIN, "rows of all ranks for one update: follows from the other two")
    return batch


def wrong_world(batch: Batch, world_size: int) -> str:
    """What to say where the three sizes are right for other ranks than there are."""
    return (
        f"{TRAIN} {batch.train} is {MICRO} {batch.micro} x {STEPS} {batch.steps} on "
        f"{batch.num_ranks} ranks, and here are {world_size}: write "
        f"{(batch.micro or 1) * batch.steps * world_size}, or remove {TRAIN}, which follows"
    )


def _steps_that_follow(reading: Reading, rows: int, world_size: int) -> int | None:
    if rows % world_size:
        reading.refused(
            TRAIN, f"no multiple of {MICRO} x {world_size} ranks: make it one, or remove it"
        )
        return None
    return rows // world_size


def map_loop(reading: Reading) -> dict[str, Any]:
    """Clipping, and what is only refused."""
    settings: dict[str, Any] = {}
    clip = reading.value(CLIP, None if CLIP in reading else 1.0)
    reading.default(
        CLIP, 1.0, f'max_grad_norm=1.0: DeepSpeed\'s documented default. "{CLIP}": 0 is off'
    )
    if clip is not None and clip < 0:
        reading.refused(CLIP, "give a positive norm, or 0 for no clipping")
    elif clip:
        settings["max_grad_norm"] = float(clip)
        reading.mapped(CLIP, f"max_grad_norm={float(clip)}")
    reading.ignored(CLIP, "no clipping")
    operation = str(reading.value("gradient_allreduce_op", "mean")).lower()
    if operation != "mean":
        reading.refused(
            "gradient_allreduce_op",
            "gradients are means over ranks: remove it, and multiply the loss by their number",
        )
    reading.ignored("gradient_allreduce_op", "gradients are means over ranks")
    if reading.value("sequence_parallel_size", 1) > 1:
        reading.refused(
            "sequence_parallel_size",
            'remove it, and call onecopy.parallel.sequence_parallel(model, mesh["sp"]) '
            "(docs/sequence.md)",
        )
    reading.ignored("sequence_parallel_size", "off")
    if reading.value("aio.use_gds", False):
        reading.refused("aio.use_gds", "drives are read through host memory: remove it")
    reading.ignored("aio.use_gds", "off")
    return settings


def map_activations(reading: Reading) -> str | None:
    """Where inputs of checkpointed blocks go, where the configuration has that section."""
    if PARTITION not in reading and ON_HOST not in reading:
        return None
    place = "host" if reading.value(ON_HOST, False) else "device"
    call = "onecopy.checkpoint_activations(model"
    if reading.value(PARTITION, False):
        reading.left(PARTITION, f'{call}, partition=mesh["tp"]), where there is a tensor group')
    reading.ignored(PARTITION, "off")
    reading.left(ON_HOST, f'{call}, place="{place}"), in the place of deepspeed.checkpointing')
    return place
