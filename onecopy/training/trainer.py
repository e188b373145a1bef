"""The ready-made trainer: what `onecopy train` runs in every rank process.

This file owns the loop and what is shown at its end. It uses the public interface only, so it
can be read as an example: `_train_steps` is a plain PyTorch loop, and the call of
`onecopy.shard` is the only line that makes it a ZeRO run. What is measured on the way is
`observer.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.text import Text
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import onecopy
from onecopy import handle
from onecopy.comm.groups import join_launched
from onecopy.launcher import in_launched_process, local_place, was_restarted
from onecopy.planner import estimate
from onecopy.report import memory, tables
from onecopy.report.progress import ProgressLine, count, duration, plural
from onecopy.report.run_folder import Setting
from onecopy.report.states import StateBytes
from onecopy.training import data
from onecopy.training.checkpoints import Checkpoints, join_run
from onecopy.training.data import Batches, Corpus, Shard
from onecopy.training.model import GPT, GPTConfig, generate
from onecopy.training.observer import Observer
from onecopy.training.options import TrainOptions

if TYPE_CHECKING:
    from onecopy.core.engine import Engine

PROMPT = b"The "


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run measured, equal on all ranks. Bits are per held-out byte, averaged over ranks."""

    stage: int | str
    is_quantized: bool
    node_sizes: tuple[int, ...]  # how many ranks each node has
    held_out_bits: dict[int, float]  # by the number of steps done
    unigram_bits: float
    num_parameters: int  # of the model
    padded_numel: int  # with the padding of its flat buffers
    memory: StateBytes | None  # of the rank that holds most; None if not measured
    bytes_per_step: dict[str, float]  # sent by a rank, by kind of event; empty if not measured
    across_per_step: float  # those of them that leave its node
    tokens_per_second: float  # of all ranks together; 0 if not measured
    seconds: float  # with those of the runs that this one goes on from
    sample: str

    @property
    def node_size(self) -> int | None:
        """Ranks in each node; None where nodes differ, and formulas count rank by rank."""
        return self.node_sizes[0] if len(set(self.node_sizes)) == 1 else None

    @property
    def final_bits(self) -> float:
        """The held-out loss after the last step, in bits per byte."""
        return self.held_out_bits[max(self.held_out_bits)]


def train(options: TrainOptions) -> TrainResult:
    """Train, show the results on rank 0, and return them. Every rank calls it.

    Joins the world of torchrun or `onecopy.launch` if this process is one of its ranks, else it
    is a world of its own. With `options.checkpoint`, a run that ended early is resumed.

    Raises ConfigError for data that cannot be trained on and for options that are not those of
    the run that is to be resumed, CheckpointError where checkpoints cannot be written or read.
    """
    with _world(options) as device:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if _joined() else (0, 1)
        console = Console(quiet=rank != 0, highlight=False)
        corpus = data.load_corpus(options)
        options, resumes = join_run(options, rank, world_size, corpus, device)
        shard = Shard(rank=rank, world_size=world_size, batch=options.batch)
        result = _train(options, shard, corpus, device, console, resumes)
        _show(console, options, world_size, result)
        return result


def _train(
    options: TrainOptions,
    shard: Shard,
    corpus: Corpus,
    device: torch.device,
    console: Console,
    resumes: bool,
) -> TrainResult:
    torch.manual_seed(options.seed)
    model = GPT(
        GPTConfig(
            context=options.context,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
        )
    ).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    onecopy.shard(
        model,
        optimizer,
        stage=options.stage,
        memory=options.memory,
        node_size=options.node_size,
        precision=options.precision,
        quantize=options.quantize,
    )
    engine: Engine = handle.of(model).engine
    options = replace(options, stage=engine.config.chosen_stage, memory=None)

    _show_start(console, options, shard, corpus, f"{num_parameters:,} parameters on {device.type}")
    quiet = options.quiet or shard.rank != 0
    with (
        _recorded(model, optimizer, options, resumes) as log,
        ProgressLine(console, quiet=quiet) as progress,
    ):
        observer = Observer(model, corpus, shard, options, progress, device)
        batches = Batches(corpus, shard, options.seed, options.accumulate)
        _train_steps(model, optimizer, batches, observer, resumes, log)
    observed = observer.finish()
    return TrainResult(
        stage=options.stage,
        is_quantized=engine.config.quantize is not None,
        node_sizes=tuple(map(len, engine.collectives.groups.node_ranks)) or (shard.world_size,),
        held_out_bits=observed.held_out_bits,
        unigram_bits=data.unigram_bits(corpus),
        num_parameters=num_parameters,
        padded_numel=memory.padded_numel(model),
        memory=observed.memory,
        bytes_per_step=observed.bytes_per_step,
        across_per_step=observed.across_per_step,
        tokens_per_second=observed.tokens_per_second,
        seconds=observed.seconds,
        sample=_sample(model, options),
    )


def _train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    observer: Observer,
    resumes: bool,
    log: Callable[..., None],
) -> None:
    options, device = observer.options, observer.device
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, one_cycle(options))
    parts: dict[str, Stateful] = {
        "scheduler": scheduler,
        "batches": batches,
        "observer": observer,
    }
    checkpoints = Checkpoints(options, model, optimizer, parts)
    done = checkpoints.resume(observer.progress) if resumes else 0
    if not done:
        observer.evaluate(0)
    for step in range(done, options.steps):
        mean_loss, num_tokens = torch.zeros((), device=device), 0
        for tokens, targets in next(batches):
            loss = model(tokens.to(device), targets.to(device)) / options.accumulate
            loss.backward()
            mean_loss += loss.detach()
            num_tokens += tokens.numel()
        if options.max_grad_norm:
            onecopy.clip_grad_norm_(model, options.max_grad_norm)
        observer.before_step(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        log(loss=mean_loss, tokens=num_tokens, lr=scheduler.get_last_lr()[0])
        observer.after_step(step + 1, mean_loss)
        log(**observer.held_out_after(step + 1))
        with observer.paused():
            checkpoints.after_step(step + 1)


def one_cycle(options: TrainOptions) -> Callable[[int], float]:
    """The learning rate at each step, as a share of the highest: a linear rise, then a cosine."""
    rising = max(1, round(options.warmup * options.steps))

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        falling = (step - rising) / max(1, options.steps - rising)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, falling)))

    return share


def _sample(model: nn.Module, options: TrainOptions) -> str:
    if not options.sample:
        return ""
    # All ranks write the same text, because a forward belongs to all of them.
    with onecopy.full_parameters(model):
        text = generate(model, PROMPT, options.sample, options.context, options.seed)
    written = (PROMPT + text).decode("utf-8", errors="replace")
    # A terminal would obey control characters, which an untrained model writes.
    return "".join(c for c in written if c == "\n" or c.isprintable())


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _world(options: TrainOptions) -> Iterator[torch.device]:
    """Join the launcher's world, if there is one; on a clean end, leave what was joined here."""
    device = _device(options)
    found = _joined()
    if not found and in_launched_process():
        if device.type == "cpu":
            join_launched("gloo")
        else:
            torch.accelerator.set_device_index(device)
            join_launched(dist.get_default_backend_for_device(device), device)
    yield device
    # After an error the other ranks may be anywhere: a collective farewell could hang.
    if not found and _joined():
        dist.destroy_process_group()


def _device(options: TrainOptions) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    number, local_size = local_place()
    if options.device == "cpu" or accelerator is None:
        return torch.device("cpu")
    if torch.accelerator.device_count() < local_size:
        return torch.device("cpu")
    return torch.device(accelerator.type, number)


@contextmanager
def _recorded(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions, resumes: bool
) -> Iterator[Callable[..., None]]:
    """What is called with the numbers of each step; they are kept where there is a run's folder."""
    if options.record is None:
        yield lambda **_: None
        return
    settings = {
        item.name: Setting(
            value=getattr(options, item.name),
            origin=options.origin_of(item.name),
            is_default=getattr(options, item.name) == item.default,
        )
        for _, item in options.settings()
    }
    with onecopy.record(
        options.record,
        model,
        optimizer,
        trace=options.trace,
        resume=resumes or was_restarted(),
        settings=settings,
    ) as run:
        yield run.log


def _show_start(
    console: Console, options: TrainOptions, shard: Shard, corpus: Corpus, model: str
) -> None:
    if options.quiet:
        return
    processes = plural(shard.world_size, "process", "processes")
    lines = [
        f"onecopy train  stage {options.stage}  {processes}  {options.precision}",
        f"byte-level GPT, {model}",
        f"{corpus.name}: {corpus.sizes}",
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _show(console: Console, options: TrainOptions, world_size: int, result: TrainResult) -> None:
    console.print()
    tables.print_losses(
        console,
        {
            "all bytes alike (uniform)": data.UNIFORM_BITS,
            "how often each byte occurs (unigram)": result.unigram_bits,
            "this model before training": result.held_out_bits[0],
            f"this model after {options.steps} steps": result.final_bits,
        },
        "Held-out loss",
    )
    if result.memory is not None and result.node_size is not None:
        _show_memory(console, options, world_size, result, result.memory)
    if world_size > 1 and result.bytes_per_step and result.node_size is not None:
        _show_bytes_sent(console, options, world_size, result)
    if len(result.node_sizes) > 1 and result.bytes_per_step:
        *smaller, largest = sorted(set(result.node_sizes))
        sizes = " or ".join([*map(str, smaller), plural(largest, "rank")])
        console.print(
            f"{len(result.node_sizes)} nodes of {sizes}: a rank sends "
            f"{result.across_per_step / 1000:,.1f} kB per step to other nodes"
        )
        console.print()
    if result.sample:
        console.print(Text(f"A sample, {options.sample} bytes", style="bold"))
        console.print(Text(result.sample), soft_wrap=True)
        console.print()
    parts = [duration(result.seconds)]
    if result.tokens_per_second:
        parts.append(
            f"{count(result.tokens_per_second)} tokens/s over {plural(world_size, 'rank')}"
        )
    console.print(", ".join(parts))
    if options.record is not None:
        told = f"recorded in {options.record}; to see it: onecopy report {options.record}"
        console.print(Text(told), soft_wrap=True)


def _show_memory(
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


def _show_bytes_sent(
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
