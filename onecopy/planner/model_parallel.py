"""What one rank has of a model that is spread over tensor parallel ranks and pipeline stages.

Parameters are taken to be cut evenly by tensor parallelism; what its ranks hold whole in truth
(norms, biases of rows) is less than 1/hidden of a block. Blocks are shared out evenly over the
pipeline stages, and schedules are taken to be 1F1B: the first stage keeps the activations of as
many micro-batches as there are stages. Integers only: no torch.
"""

from __future__ import annotations

from dataclasses import replace

from onecopy.planner.shapes import ModelShape, Saved, Stack, TransformerShape, UnitShape

__all__ = ["input_elements", "parts_of", "pipeline_elements", "tensor_elements"]

# Of the 34 bytes that a block keeps for each element between blocks: those that every tensor
# parallel rank has (around norms and dropouts). Source: Korthikanti et al. 2022, equation 2.
ON_ALL, IN_ALL = 10, 34


def parts_of(
    shape: ModelShape, tensor: int, pipeline: int, backwards: int
) -> tuple[ModelShape, ...]:
    """What a rank of the first pipeline stage has, and one of the last; one where these are one.

    Args:
        backwards: micro-batches of a step.
    """
    shapes: tuple[ModelShape, ...] = (shape,)
    if pipeline > 1:
        shapes = _first(shape, pipeline, min(pipeline, backwards)), _last(shape, pipeline)
    return tuple(_cut(one, tensor) for one in shapes)


def _first(shape: ModelShape, pipeline: int, in_flight: int) -> ModelShape:
    """With what comes before the blocks; the root, which may have tied weights, has all."""
    units = list(shape.units)
    last = max((number for number, unit in enumerate(units) if unit.count > 1), default=len(units))
    kept = [unit for n, unit in enumerate(units) if n <= last or unit.surrounds]
    transformer = _some_blocks(shape.transformer, pipeline, in_flight)
    if transformer is not None:
        transformer = replace(transformer, vocabulary=0)
    return replace(shape, units=_some_units(kept, pipeline), transformer=transformer)


def _last(shape: ModelShape, pipeline: int) -> ModelShape:
    """With what comes after the blocks."""
    units = list(shape.units)
    first = next((number for number, unit in enumerate(units) if unit.count > 1), 0)
    kept = [unit for n, unit in enumerate(units) if n >= first or unit.surrounds]
    transformer = _some_blocks(shape.transformer, pipeline, 1)
    return replace(shape, units=_some_units(kept, pipeline), transformer=transformer)


def _some_units(units: list[UnitShape], pipeline: int) -> tuple[UnitShape, ...]:
    return tuple(replace(unit, count=-(-unit.count // pipeline)) for unit in units)


def _some_blocks(
    transformer: TransformerShape | None, pipeline: int, in_flight: int
) -> TransformerShape | None:
    if transformer is None:
        return None
    stacks = tuple(
        replace(stack, count=-(-stack.count // pipeline) * in_flight)
        for stack in transformer.stacks
    )
    return replace(transformer, stacks=stacks)


def _cut(shape: ModelShape, tensor: int) -> ModelShape:
    """A tensor parallel rank's part."""
    if tensor == 1:
        return shape
    units = tuple(
        replace(unit, numels=tuple(-(-numel // tensor) for numel in unit.numels))
        for unit in shape.units
    )
    transformer = shape.transformer
    if transformer is not None:
        stacks = tuple(_cut_stack(stack, tensor) for stack in transformer.stacks)
        transformer = replace(transformer, stacks=stacks)
    return replace(shape, units=units, transformer=transformer)


def _cut_stack(stack: Stack, tensor: int) -> Stack:
    """Inputs of blocks stay whole, as without sequence parallelism."""
    saved = stack.saved
    part = ON_ALL * tensor + IN_ALL - ON_ALL
    return replace(
        stack,
        widest=-(-stack.widest // tensor),
        saved=Saved(
            compute=-(-saved.compute * part // (IN_ALL * tensor)),
            fp32=saved.fp32,
            masks=saved.masks,
            positions=-(-saved.positions // tensor),
        ),
    )


def tensor_elements(transformer: TransformerShape, tokens: int, *, recompute: bool) -> int:
    """Elements that Megatron's all-reduces send for one micro-batch through these blocks.

    Two in forward and two in backward, two more where blocks are computed again; each counts twice.
    Of them (T-1)/T leave a rank. Source: ZeRO, section 8.
    """
    reduces = 6 if recompute else 4
    return sum(2 * reduces * tokens * stack.hidden * stack.count for stack in transformer.stacks)


def input_elements(transformer: TransformerShape, tokens: int) -> int:
    """Elements of the inputs of blocks, which are made whole of parts once for a micro-batch.

    Of them (T-1)/T leave a rank. Source: ZeRO, section 8.
    """
    return sum(tokens * stack.hidden * stack.count for stack in transformer.stacks)


def pipeline_elements(transformer: TransformerShape, tokens: int) -> int:
    """Elements that a pipeline stage sends for one micro-batch: its output, and a gradient."""
    return 2 * tokens * transformer.stacks[0].hidden
