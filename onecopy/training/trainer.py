"""The ready-made trainer: what `onecopy train` runs in every rank process.

This file owns the loop. It uses the public interface only, so it can be read as an example:
`_train_steps` is a plain PyTorch loop, and the call of `onecopy.shard` is the only line that makes
it a ZeRO run. What is measured on the way is `observer.py`'s business, and what is shown at the end
`show.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

import onecopy
from onecopy import handle
from onecopy.comm.groups import join_launched
from onecopy.errors import ConfigError
from onecopy.launcher import in_launched_process, local_place, was_restarted
from onecopy.report import memory
from onecopy.report.progress import ProgressLine
from onecopy.report.run_folder import Setting
from onecopy.report.tensorboard import TensorBoard
from onecopy.training import data, models, show
from onecopy.training.checkpoints import Checkpoints, join_run
from onecopy.training.data import IGNORED, Batches, Corpus, Shard
from onecopy.training.learning import make_optimizer, share_of_rate
from onecopy.training.lora import has_adapters, save_adapters
from onecopy.training.models import Vocabulary
from onecopy.training.observer import Observer
from onecopy.training.options import TrainOptions
from onecopy.training.results import TrainResult
from onecopy.training.sampling import generate
from onecopy.training.stop import StopRequest, noticed

if TYPE_CHECKING:
    from onecopy.core.engine import Engine

# A model of at most so many bytes is gathered whole, once, to write a sample; a larger one unit by
# unit for each token.
GATHERED_WHOLE = 2**31
# In the place of no targets at all, which a step of nothing but prompts may have on every rank.
FEWEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Where and how this process takes part in a run.

    shard: its part of each batch. console: quiet but on the first rank. resumes: the run has saved
    something already. stop: whether this process is asked to end.
    """

    shard: Shard
    device: torch.device
    console: Console
    resumes: bool
    stop: StopRequest


def train(options: TrainOptions) -> TrainResult:
    """Train, show the results on rank 0, and return them. Every rank calls it.

    Joins the world of torchrun or `onecopy.launch` if this process is one of its ranks, else it
    is a world of its own. With `options.checkpoint`, a run that ended early is resumed, and one
    that is asked to end (SIGTERM, SIGINT, SIGUSR1) saves a checkpoint first.

    Raises ConfigError for a model or data that cannot be trained and for options that are not
    those of the run that is to be resumed, CheckpointError where checkpoints cannot be written or
    read.
    """
    with _world(options) as device, noticed(options.checkpoint is not None) as stop:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if _joined() else (0, 1)
        console = Console(quiet=rank != 0, highlight=False)
        _check_output(options)
        corpus = data.load_corpus(options)
        options, resumes = join_run(options, rank, world_size, corpus, device)
        shard = Shard(rank=rank, world_size=world_size, batch=options.batch)
        options = with_steps(options, corpus, shard)
        session = Session(shard=shard, device=device, console=console, resumes=resumes, stop=stop)
        result = _train(options, corpus, session)
        if not result.is_stopped:
            show.print_result(console, options, world_size, result)
        return result


def with_steps(options: TrainOptions, corpus: Corpus, shard: Shard) -> TrainOptions:
    """The options with the number of steps that `epochs` are, if they say that."""
    if not options.epochs:
        return options
    steps = options.epochs * data.steps_per_epoch(corpus, shard, options.accumulate)
    return replace(options, steps=max(2, math.ceil(steps)))


def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """What the model must know of the tokenizer."""
    return Vocabulary(size=corpus.tokenizer.vocab_size, end=corpus.tokenizer.end)


def _train(options: TrainOptions, corpus: Corpus, session: Session) -> TrainResult:
    shard, console = session.shard, session.console
    torch.manual_seed(options.seed)
    model = models.build(options, vocabulary_of(corpus), session.device)
    optimizer = make_optimizer(model, options)
    if options.activations is not None:
        onecopy.checkpoint_activations(model, options.activations)
    # Clipping is the step's: also where the step is within backward.
    onecopy.shard(
        model, optimizer, config=options.config(), max_grad_norm=options.max_grad_norm or None
    )
    model.train()
    # Dropout is to differ between ranks; checkpoints keep where each is.
    torch.manual_seed(options.seed + shard.rank)
    engine: Engine = handle.of(model).engine
    options = replace(options, stage=engine.config.chosen_stage, memory=None)

    show.print_start(console, options, shard, corpus, model)
    quiet = options.quiet or shard.rank != 0
    with (
        _recorded(model, optimizer, options, session.resumes) as log,
        ProgressLine(console, quiet=quiet) as progress,
    ):
        observer = Observer(model, corpus, shard, options, progress, session.device)
        batches = Batches(corpus, shard, options.seed, options.accumulate)
        is_stopped = _train_steps(model, optimizer, batches, observer, session, log)
    observed = observer.finish()
    if not is_stopped:
        _save_model(model, options, corpus, console, writes=shard.rank == 0)
    return TrainResult(
        stage=options.stage,
        is_quantized=engine.config.quantize is not None,
        node_sizes=tuple(map(len, engine.collectives.groups.node_ranks)) or (shard.world_size,),
        held_out_bits=observed.held_out_bits,
        unigram_bits=data.unigram_bits(corpus),
        num_parameters=sum(one.numel() for one in model.parameters()),
        num_trained=sum(one.numel() for one in model.parameters() if one.requires_grad),
        padded_numel=memory.padded_numel(model),
        memory=observed.memory,
        bytes_per_step=observed.bytes_per_step,
        across_per_step=observed.across_per_step,
        tokens_per_second=observed.tokens_per_second,
        seconds=observed.seconds,
        samples=() if is_stopped else _samples(model, options, corpus),
        is_stopped=is_stopped,
    )


def _train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    observer: Observer,
    session: Session,
    log: Callable[..., None],
) -> bool:
    """Train to the end; returns whether a signal has asked to stop before."""
    options, device = observer.options, session.device
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate(options))
    parts: dict[str, Stateful] = {
        "scheduler": scheduler,
        "batches": batches,
        "observer": observer,
    }
    checkpoints = Checkpoints(options, model, optimizer, parts)
    done = checkpoints.resume(observer.progress) if session.resumes else 0
    if not done:
        observer.evaluate(0)
    for step in range(done, options.steps):
        mean_loss = torch.zeros((), device=device)
        drawn = next(batches)
        num_targets = _counted(drawn)
        # The loss is the mean over the targets of all ranks, of which this one has its share.
        scale = onecopy.loss_weight(model, max(num_targets, FEWEST)) / max(num_targets, 1)
        for tokens, targets in drawn:
            loss = models.sum_of_losses(model, tokens.to(device), targets.to(device)) * scale
            loss.backward()
            mean_loss += loss.detach()
        observer.before_step(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        log(loss=mean_loss, tokens=num_targets, lr=scheduler.get_last_lr()[0])
        stops = observer.after_step(step + 1, mean_loss, session.stop.signal)
        log(**observer.held_out_after(step + 1))
        with observer.paused():
            checkpoints.after_step(step + 1, ends=stops)
        if stops and step + 1 < options.steps:
            observer.progress.note(
                f"asked to end: saved after step {step + 1} of {options.steps}. The same command "
                "goes on from there"
            )
            return True
    return False


def _counted(drawn: list[tuple[Tensor, Tensor]]) -> int:
    return sum(int((targets != IGNORED).sum()) for _, targets in drawn)


def _check_output(options: TrainOptions) -> None:
    folder = options.save_model
    if folder is not None and any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"--save-model {folder} holds a model already: give another folder, or move it away."
        )


def _save_model(
    model: nn.Module, options: TrainOptions, corpus: Corpus, console: Console, *, writes: bool
) -> None:
    folder = options.save_model
    if folder is None:
        return
    if has_adapters(model):
        save_adapters(model, folder, writes=writes)
    else:
        onecopy.export(model, folder)
    if writes:
        corpus.tokenizer.save(folder)
    show.print_line(console, f"saved in {folder}")


def _samples(model: nn.Module, options: TrainOptions, corpus: Corpus) -> tuple[str, ...]:
    if not options.sample:
        return ()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.eval()
    if num_bytes > GATHERED_WHOLE:
        return tuple(_sample(model, options, corpus, prompt) for prompt in options.prompt)
    with onecopy.full_parameters(model):
        return tuple(_sample(model, options, corpus, prompt) for prompt in options.prompt)


def _sample(model: nn.Module, options: TrainOptions, corpus: Corpus, prompt: str) -> str:
    tokenizer = corpus.tokenizer
    begin = [*tokenizer.begin, *tokenizer.encode(prompt)]
    if not begin:
        begin = [0 if tokenizer.end is None else tokenizer.end]
    # All ranks write the same text, because a forward belongs to all of them.
    text = generate(
        model,
        begin,
        options.sample,
        context=options.context,
        seed=options.seed,
        end=tokenizer.end,
    )
    return tokenizer.decode([*begin, *text])


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
        trackers=_trackers(options, options.record),
        trace=options.trace,
        resume=resumes or was_restarted(),
        settings=settings,
    ) as run:
        yield run.log


def _trackers(options: TrainOptions, folder: Path) -> list[Any]:
    """On every rank; only the first one's is told anything."""
    if options.track is None:
        return []
    if options.track == "tensorboard":
        return [TensorBoard(folder / "tensorboard")]
    try:
        tracker: Any = import_module(options.track)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--track {options.track} needs the package {options.track}, which is not installed "
            f"here: pip install {options.track}"
        ) from error
    if not _joined() or dist.get_rank() == 0:
        tracker.init(project="onecopy", name=folder.name)
    return [tracker]
