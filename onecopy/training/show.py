"""What the trainer prints: what is trained when it begins, what came of it when it ends."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from torch import nn

from onecopy.planner import estimate
from onecopy.report import tables
from onecopy.report.progress import count, duration, plural
from onecopy.report.states import StateBytes
from onecopy.training import data
from onecopy.training.data import Corpus, Shard
from onecopy.training.options import TrainOptions
from onecopy.training.results import TrainResult

__all__ = ["print_line", "print_result", "print_start"]


def print_start(
    console: Console, options: TrainOptions, shard: Shard, corpus: Corpus, model: nn.Module
) -> None:
    """Say what is trained, on what, and where."""
    if options.quiet:
        return
    processes = plural(shard.world_size, "process", "processes")
    parameters = list(model.parameters())
    total = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    of_them = "" if trained == total else f", of which {trained:,} are trained,"
    lines = [
        f"onecopy train  stage {options.stage}  {processes}  {options.precision}",
        f"{type(model).__name__} ({options.model}), {total:,} parameters{of_them} "
        f"on {parameters[0].device.type}",
        f"{corpus.name}: {corpus.sizes}",
    ]
    print_line(console, "\n".join(lines))


def print_line(console: Console, text: str) -> None:
    """A line as it is, however long."""
    console.print(Text(text), soft_wrap=True)


def print_result(
    console: Console, options: TrainOptions, world_size: int, result: TrainResult
) -> None:
    """Show the loss, the memory of states and the bytes sent, beside the formulas."""
    console.print()
    tables.print_losses(
        console,
        {
            "all bytes alike (uniform)": data.UNIFORM_BITS,
            "how often each token occurs (unigram)": result.unigram_bits,
            "this model before training": result.held_out_bits[0],
            f"this model after {options.steps} steps": result.final_bits,
        },
        "Held-out loss",
    )
    if _has_formulas(options, result):
        if result.memory is not None:
            _print_memory(console, options, world_size, result, result.memory)
        if world_size > 1 and result.bytes_per_step:
            _print_bytes_sent(console, options, world_size, result)
    if len(result.node_sizes) > 1 and result.bytes_per_step:
        *smaller, largest = sorted(set(result.node_sizes))
        sizes = " or ".join([*map(str, smaller), plural(largest, "rank")])
        console.print(
            f"{len(result.node_sizes)} nodes of {sizes}: a rank sends "
            f"{result.across_per_step / 1000:,.1f} kB per step to other nodes"
        )
        console.print()
    for sample in result.samples:
        console.print(Text(f"A sample, {plural(options.sample, 'token')}", style="bold"))
        # A terminal would obey control characters, which an untrained model writes.
        print_line(console, "".join(c for c in sample if c == "\n" or c.isprintable()))
        console.print()
    parts = [duration(result.seconds)]
    if result.tokens_per_second:
        parts.append(
            f"{count(result.tokens_per_second)} tokens/s over {plural(world_size, 'rank')}"
        )
    console.print(", ".join(parts))
    if options.record is not None:
        print_line(
            console, f"recorded in {options.record}; to see it: onecopy report {options.record}"
        )


def _has_formulas(options: TrainOptions, result: TrainResult) -> bool:
    """Whether the README's table says what a rank holds and sends: not of adapters, for one."""
    is_plain = options.optimizer == "adamw" and not options.step_in_backward
    is_whole = result.num_trained == result.num_parameters and options.offload is None
    is_a_preset = "/" not in str(result.stage)
    return is_plain and is_whole and is_a_preset and result.node_size is not None


def _print_memory(
    console: Console,
    options: TrainOptions,
    world_size: int,
    result: TrainResult,
    measured: StateBytes,
) -> None:
    widths = estimate.FP32 if options.precision == "fp32" else estimate.BF16
    padded = result.padded_numel
    tables.print_memory(
        console,
        tables.MemoryFigures(
            measured=measured,
            formula=estimate.state_bytes(
                result.stage, padded, world_size, widths, node_size=result.node_size
            ),
            data_parallel=estimate.data_parallel_bytes(result.num_parameters, widths),
        ),
        f"Model states at stage {result.stage} on {plural(world_size, 'rank')}, after backward "
        f"({result.num_parameters:,} parameters, {padded:,} with padding)",
    )


def _print_bytes_sent(
    console: Console, options: TrainOptions, world_size: int, result: TrainResult
) -> None:
    # Gradients travel in the compute dtype, as parameters do.
    width = (estimate.FP32 if options.precision == "fp32" else estimate.BF16).compute
    elements = estimate.elements_by_kind(
        result.stage, world_size, options.accumulate, node_size=result.node_size
    )
    formula = {
        kind: int(times.total * result.padded_numel * width) for kind, times in elements.items()
    }
    title = "Sent to other ranks"
    if result.is_quantized:
        title += "; the formula is for values that are sent as they are"
    tables.print_bytes_sent(console, result.bytes_per_step, formula, title)
