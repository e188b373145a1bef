"""Checkpoints written while training goes on: of the moment of the call, waited for, never lost."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
import onecopy.events
import onecopy.handle
from onecopy import Precision
from onecopy.checkpoint.files import Writer
from onecopy.checkpoint.folder import steps_in
from onecopy.checkpoint.saving import Job
from onecopy.checkpoint.source import open_source
from onecopy.errors import CheckpointError, ConfigError, SavePendingError
from onecopy.events import Event
from onecopy.memory.host_buffer import MIN_BLOCK_BYTES, HostBuffer, HostTensor, _powers_of_two
from onecopy.memory.live_tensors import LiveTensors
from tests import ending_rank
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values

PRECISIONS: dict[str, Any] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "split": {"precision": Precision(compute="bf16", master="bf16+16")},
}
COMBINATIONS = list(
    itertools.product((0, 1, 2, 3), ("adamw", "adamw_fused", "momentum"), PRECISIONS)
)


class Net(nn.Module):
    """Blocks, an odd shape, a tied weight, a buffer, and a weight that is turned in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 12)
        self.head.weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).flatten(1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The plainest loop; ranks have different data."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 2, 2, 2, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(stage: int = 3, kind: str = "adamw", **settings: Any) -> tuple[nn.Module, Any]:
    """A sharded net and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    onecopy.shard(model, optimizer, stage=stage, **settings)
    return model, optimizer


@dataclass
class Held:
    """Background writes wait for `release` before they begin, or after they have ended."""

    release: threading.Event = field(default_factory=threading.Event)

    def later(self, seconds: float = 0.3) -> None:
        threading.Timer(seconds, self.release.set).start()


@contextmanager
def held(*, after: bool = False) -> Iterator[Held]:
    """Inside, what async_save has begun is not written before the test says so."""
    one, write = Held(), Job.write

    def late(job: Job, group: Any) -> Path:
        is_background = threading.current_thread() is not threading.main_thread()
        if is_background and not after:
            assert one.release.wait(30), "the test releases it"
        folder = write(job, group)
        if is_background and after:
            assert one.release.wait(30), "the test releases it"
        return folder

    with mock.patch.object(Job, "write", late):
        try:
            yield one
        finally:
            one.release.set()


@contextmanager
def failing(rank: int, error: Exception) -> Iterator[None]:
    """Inside, this rank cannot write its file."""
    if dist.get_rank() != rank:
        yield
        return
    with mock.patch.object(Writer, "write_data", side_effect=error):
        yield


def items(path: str | Path) -> dict[str, bytes]:
    """Every stored item of a checkpoint, by name and place."""
    source = open_source(path)
    return {
        f"{index.fqn} {index.offset}": source.reader.read_item(index)  # type: ignore[attr-defined]
        for index in source.metadata.storage_data
    }


# What is saved --------------------------------------------------------------------------------


def _at_the_call(root: str, stage: int, kind: str, precision: str) -> dict[str, Tensor]:
    model, optimizer = make(stage, kind, **PRECISIONS[precision])
    train(model, optimizer, range(2))
    extra = {"seen": torch.arange(3), "rank": dist.get_rank()}
    expected = onecopy.save(f"{root}/now", model, optimizer, extra=extra)
    with held() as writes:
        pending = onecopy.async_save(f"{root}/later", model, optimizer, extra=extra)
        extra["seen"].zero_()
        optimizer.param_groups[0]["lr"] *= 2
        train(model, optimizer, range(2, 4))
        model.norm.running_mean.zero_()
        assert not pending.is_done
        writes.release.set()
        assert pending.wait() == pending.folder == Path(root, "later", "step-00000002")
    assert pending.is_done
    if dist.get_rank() == 0:
        assert items(expected) == items(pending.folder)
    return full_values(model)


def _without(stage: int, kind: str, precision: str) -> dict[str, Tensor]:
    model, optimizer = make(stage, kind, **PRECISIONS[precision])
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] *= 2
    train(model, optimizer, range(2, 4))
    return full_values(model)


@pytest.mark.sampled(
    ("stage", "kind", "precision"),
    COMBINATIONS,
    8,
    always=[(3, "adamw", "split"), (3, "adamw", "fp32"), (0, "momentum", "fp32")],
)
@pytest.mark.parametrize("world", [3])
def test_values_are_those_of_the_call(
    pool: Pool, tmp_path: Path, world: int, stage: int, kind: str, precision: str
) -> None:
    """Every stored byte is that of a save at the same moment; training is that without a save."""
    saved = pool.run(world, _at_the_call, str(tmp_path), stage, kind, precision)
    plain = pool.run(world, _without, stage, kind, precision)
    for with_save, without in zip(saved, plain, strict=True):
        assert with_save.keys() == without.keys()
        assert all(torch.equal(with_save[name], without[name]) for name in without)


def _resumed(root: str) -> None:
    model, optimizer = make(2)
    train(model, optimizer, range(2))
    onecopy.async_save(root, model, optimizer, extra="place")
    train(model, optimizer, range(2, 5))
    expected = full_values(model)
    model, optimizer = make(3)
    pending = onecopy.handle.of(model).pending_save
    assert pending is None, "a model that was never saved has nothing pending"
    while not Path(root, "latest").exists():
        time.sleep(0.01)
    loaded = onecopy.load(root, model, optimizer)
    assert (loaded.step, loaded.extra) == (2, "place")
    train(model, optimizer, range(2, 5))
    found = full_values(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_resumes_from_it(pool: Pool, tmp_path: Path) -> None:
    """At another stage, to the same bits."""
    pool.run(2, _resumed, str(tmp_path))


def _many_models(root: str) -> None:
    first, of_first = make(3)
    second, of_second = make(1, "momentum")
    models, optimizers = {"a": first, "b": second}, {"a": of_first, "b": of_second}
    train(first, of_first, range(1))
    train(second, of_second, range(2))
    with held() as writes:
        pending = onecopy.async_save(root, models, optimizers, step=7)
        writes.later()
        onecopy.save(f"{root}/alone", second)
        assert pending.is_done, "a save of one of the models waits for that of all"
    onecopy.save(f"{root}/now", models, optimizers, step=7)
    if dist.get_rank() == 0:
        assert items(pending.wait()) == items(f"{root}/now")


def test_several_models(pool: Pool, tmp_path: Path) -> None:
    """Under their names; each waits for the save of all."""
    pool.run(2, _many_models, str(tmp_path))


def _retention(root: str) -> list[str]:
    model, optimizer = make()
    for step in range(7):
        train(model, optimizer, range(step, step + 1))
        pending = onecopy.async_save(root, model, optimizer, keep=2, keep_every=3)
    pending.wait()
    return [folder.name[-1] for folder in steps_in(Path(root))]


def test_the_last_ones_and_every_third_stay(pool: Pool, tmp_path: Path) -> None:
    """As with save."""
    assert pool.run(2, _retention, str(tmp_path))[0] == ["3", "6", "7"]


# Memory ---------------------------------------------------------------------------------------


def _memory(root: str, stage: int, kind: str, precision: str) -> tuple[int, int, int]:
    model, optimizer = make(stage, kind, **PRECISIONS[precision])
    stages: list[Event] = []
    onecopy.events.add_sink(model, stages.append)
    train(model, optimizer, range(1))
    with LiveTensors() as live:
        onecopy.async_save(root, model, optimizer).wait()
        gc.collect()
        taken, num_storages = live.num_bytes(), live.num_storages()
        live.reset_peak()
        onecopy.async_save(root, model, optimizer).wait()
        gc.collect()
        assert (live.num_bytes(), live.num_storages()) == (taken, num_storages)
        again = live.peak_bytes - taken
    counted = [event.num_bytes for event in stages if event.kind == "stage"]
    assert counted == [taken] * 2, "the events say what was taken"
    written = [event for event in stages if event.kind == "save"]
    assert [event.num_bytes for event in written] == counted
    assert all(event.seconds > 0 for event in stages if event.kind in ("stage", "save"))
    onecopy.unshard(model)
    gc.collect()
    return taken, again, live.num_bytes()


@pytest.mark.parametrize(
    ("stage", "kind", "precision", "per_parameter"),
    [(3, "adamw", "fp32", 12), (2, "momentum", "bf16", 8), (0, "adamw_fused", "split", 12)],
)
def test_memory_is_this_ranks_part(
    pool: Pool, tmp_path: Path, stage: int, kind: str, precision: str, per_parameter: int
) -> None:
    """Masters and states over the ranks, to the byte; taken once, and given back by unshard."""
    model = Net()
    numel = sum(parameter.numel() for parameter in model.parameters())
    expected = per_parameter * numel
    if kind != "momentum":
        expected += 4 * len(list(model.parameters()))  # AdamW's step, a tensor for each parameter
    expected += sum(buffer.nbytes for buffer in model.buffers())
    found = pool.run(3, _memory, str(tmp_path), stage, kind, precision)
    assert sum(taken for taken, _, _ in found) == expected
    slices = [per_parameter * numel / 3] * 3
    for (taken, again, left), part in zip(found, slices, strict=True):
        assert taken < 1.6 * part, "no rank has much more than its part"
        assert again < 1 << 13, "a second save takes memory for messages only"
        assert left == 0


def test_a_buffer_in_blocks() -> None:
    """Values that lie in several blocks come back; the sizes of blocks are powers of two."""
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in (64, 32, 16)]
    buffer = HostBuffer(0)
    buffer._blocks = blocks
    whole = buffer.tensor(8, 24, torch.float32)
    values = torch.randn(24)
    for start, stop in ((0, 13), (13, 14), (14, 23), (23, 24)):
        whole.write(start, values[start:stop])
    for start in range(25):
        for stop in range(start, 25):
            assert torch.equal(whole.read(start, stop), values[start:stop])
    assert torch.equal(torch.cat(blocks)[8:104].view(torch.float32), values)
    assert whole.read(0, 14).data_ptr() == blocks[0].data_ptr() + 8, "no copy within a block"
    assert buffer.tensor(112, 0, torch.int64).read(0, 0).dtype == torch.int64
    assert HostTensor([torch.ones(2)]).read(1, 1).shape == (0,)
    for num_bytes in (0, 1, MIN_BLOCK_BYTES, 3 * MIN_BLOCK_BYTES + 1, 12345678901):
        sizes = _powers_of_two(num_bytes)
        assert all(size.bit_count() == 1 for size in sizes)
        assert 0 <= sum(sizes) - num_bytes < MIN_BLOCK_BYTES


def _growing(root: str) -> None:
    """The first save is of the model alone, the second needs more, the third less."""
    model, optimizer = make()
    sizes = []
    for step, given in enumerate((None, optimizer, None)):
        train(model, optimizer, range(step, step + 1))
        onecopy.save(f"{root}/now", model, given, step=step)
        onecopy.async_save(f"{root}/later", model, given, step=step).wait()
        sizes.append(onecopy.handle.of(model).host_buffer.num_bytes)
        if dist.get_rank() == 0:
            assert items(f"{root}/now") == items(f"{root}/later")
    assert sizes[0] < sizes[1] == sizes[2]


def test_the_buffer_grows(pool: Pool, tmp_path: Path) -> None:
    """Whatever is saved next fits."""
    pool.run(2, _growing, str(tmp_path))


def _let_go(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    with held() as writes:
        pending = onecopy.async_save(root, model, optimizer)
        reference = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert reference() is None, "what is being written does not keep the model alive"
        writes.release.set()
        pending.wait()


def test_a_model_may_go_before_its_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    """The thread has copies only."""
    pool.run(2, _let_go, str(tmp_path))
    assert len(steps_in(tmp_path)) == 1


# Who waits ------------------------------------------------------------------------------------


def _busy(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    rank = dist.get_rank()
    with held(after=True) as writes:
        if rank != 1:
            writes.release.set()  # this rank is done long before rank 1
        first = onecopy.async_save(root, model, optimizer)
        if rank != 1:
            first.wait()
        with pytest.raises(SavePendingError, match=r"rank 1 is still writing .*step-00000001"):
            onecopy.async_save(root, model, optimizer, if_busy="refuse")
        if rank == 1:
            with pytest.raises(TimeoutError, match=r"step 1 .* after 0.01 seconds"):
                first.wait(0.01)
        writes.later()
        train(model, optimizer, range(1, 2))
        second = onecopy.async_save(root, model, optimizer, if_busy="wait")
        assert first.is_done
        writes.release.set()
        second.wait()
        # Others may not have noticed yet that they are done; none is refused for good.
        while True:
            with suppress(SavePendingError):
                third = onecopy.async_save(root, model, optimizer, step=9, if_busy="refuse")
                break
        third.wait()
    with pytest.raises(ConfigError, match='"wait" or "refuse"'):
        onecopy.async_save(root, model, optimizer, if_busy="skip")  # type: ignore[arg-type]


def test_a_second_save_waits_or_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Refused on all ranks, although only one is busy."""
    pool.run(3, _busy, str(tmp_path))
    assert [folder.name[-1] for folder in steps_in(tmp_path)] == ["1", "2", "9"]


def _waiting(root: str, what: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    with held() as writes:
        pending = onecopy.async_save(root, model, optimizer)
        writes.later()
        if what == "save":
            onecopy.save(root, model, optimizer, step=5)
        elif what == "load":
            assert onecopy.load(root, model, optimizer).step == 1
        else:
            onecopy.unshard(model)
        assert pending.is_done
        assert pending.wait() == pending.folder


@pytest.mark.parametrize("what", ["save", "load", "unshard"])
def test_others_wait_for_it(pool: Pool, tmp_path: Path, what: str) -> None:
    """The process group of checkpoints is used by one thread at a time."""
    pool.run(2, _waiting, str(tmp_path), what)


# Errors ---------------------------------------------------------------------------------------


def _fails(root: str, how: str) -> tuple[list[str], str]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as warned, failing(1, OSError(28, "No space left")):
        warnings.simplefilter("always")
        pending = onecopy.async_save(root, model, optimizer)
        buffer = weakref.ref(onecopy.handle.of(model).host_buffer)
        train(model, optimizer, range(1, 3))  # goes on
        while not pending.is_done:
            time.sleep(0.01)
    said = [str(one.message) for one in warned]
    asks = how == "asked by all" or (how == "asked by one" and rank == 0)
    for _ in range(2 if asks else 0):
        with pytest.raises(CheckpointError, match=r"step 1 .* on rank 1"):
            pending.wait()
    if how == "asked by all":
        onecopy.save(root, model, optimizer)
        return said, ""
    with pytest.raises(CheckpointError, match=r"step 1 .* on rank 1") as caught:
        if how == "async_save":
            onecopy.async_save(root, model, optimizer)
        elif how == "load":
            onecopy.load(root, model, optimizer)
        elif how == "unshard":
            onecopy.unshard(model)
        else:
            onecopy.save(root, model, optimizer)
    text = str(caught.value)
    # Told once; then the next one works.
    onecopy.async_save(root, model, optimizer).wait()
    assert onecopy.load(root, model, optimizer).step == 3
    onecopy.unshard(model)
    del caught
    gc.collect()
    assert buffer() is None, "the error does not keep the copies"
    return said, text


@pytest.mark.parametrize(
    "how", ["save", "async_save", "load", "unshard", "asked by one", "asked by all"]
)
def test_an_error_reaches_the_loop(pool: Pool, tmp_path: Path, how: str) -> None:
    """On all ranks alike, once; at once as a warning where it happened and on the first rank."""
    found = pool.run(3, _fails, str(tmp_path), how)
    assert [len(said) for said, _ in found] == [1, 1, 0]
    for said, text in found:
        assert not said or ("No space left" in said[0] and str(tmp_path) in said[0])
        assert text == found[0][1]
    assert [folder.name[-1] for folder in steps_in(tmp_path)] == ["3"]
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def _no_memory(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    cannot = RuntimeError("you tried to allocate 1 byte")
    patched = mock.patch("onecopy.checkpoint.background.HostBuffer", side_effect=cannot)
    with pytest.raises(CheckpointError, match=r"on rank 1: .* allocate 1 byte"):
        with patched if dist.get_rank() == 1 else nullcontext():
            onecopy.async_save(root, model, optimizer)
    assert onecopy.handle.of(model).pending_save is None
    onecopy.async_save(root, model, optimizer).wait()


def test_no_memory_for_the_copy(pool: Pool, tmp_path: Path) -> None:
    """An error on all ranks, and nothing is under way."""
    pool.run(2, _no_memory, str(tmp_path))


def _peer_dies(root: str) -> str:
    model, optimizer = make()
    train(model, optimizer, range(1))
    with held() as writes:
        pending = onecopy.async_save(root, model, optimizer)
        if dist.get_rank() == 1:
            os._exit(3)
        writes.release.set()
        with pytest.raises(CheckpointError, match=r"a rank of .* has ended") as caught:
            pending.wait()
        with pytest.raises(CheckpointError, match=r"a rank of .* has ended"):
            onecopy.save(root, model, optimizer)
    return str(caught.value)


def test_a_rank_that_dies(pool: Pool, tmp_path: Path) -> None:
    """The others hear of it, and do not wait for the timeout of the group."""
    first, second = pool.run(
        2, _peer_dies, str(tmp_path), expect_failures=True, record_warnings=True
    )
    assert "step 1" in first
    assert second.type_name == "RankDied"
    assert not steps_in(tmp_path)


def _loop_fails(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    with held() as writes:
        pending = onecopy.async_save(root, model, optimizer)
        with suppress(ValueError):
            model(torch.randn(5, 2, 2, 2)).square().mean().backward()
            raise ValueError("the loop's own fault")
        optimizer.zero_grad()
        train(model, optimizer, range(1, 2))
        writes.release.set()
        pending.wait()
    assert onecopy.load(root, model, optimizer).step == 1


def test_an_exception_in_the_loop(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint is completed all the same."""
    pool.run(2, _loop_fails, str(tmp_path))


# Surroundings ---------------------------------------------------------------------------------


def _contexts(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    os.makedirs(f"{root}/elsewhere", exist_ok=True)
    before = os.getcwd()
    os.chdir(root)
    try:
        with torch.inference_mode(), torch.device("meta"), held() as writes:
            pending = onecopy.async_save("run", model, optimizer)
            os.chdir("elsewhere")
            writes.release.set()
            assert pending.wait() == Path(root, "run", "step-00000001")
    finally:
        os.chdir(before)
    train(model, optimizer, range(1, 2))
    onecopy.async_save(f"{root}/run", model, optimizer).wait()
    assert onecopy.load(f"{root}/run", model, optimizer).step == 2


def test_whatever_is_set_around_the_call(pool: Pool, tmp_path: Path) -> None:
    """Inference mode, a default device, and a working directory that changes meanwhile."""
    pool.run(2, _contexts, str(tmp_path))


def _forks(root: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    with held() as writes:
        pending = onecopy.async_save(root, model, optimizer)
        child = os.fork()
        if not child:
            with suppress(CheckpointError):
                pending.wait()  # the thread is the parent's
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writes.release.set()
        pending.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns of fork beside threads")
def test_fork_while_it_is_written(pool: Pool, tmp_path: Path) -> None:
    """As loaders of data do: the child neither waits nor writes."""
    pool.run(2, _forks, str(tmp_path))


# The end of the program -------------------------------------------------------------------------

ENDINGS = {"ends": 2, "keeps": 2, "raises": 2, "fails": 2, "alone": 1}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], Path]]:
    """For each ending the exit codes of its ranks, and its folder."""
    folders = {how: tmp_path_factory.mktemp(how) for how in ENDINGS}
    codes = ending_rank.ended(ending_rank.__name__, folders, ENDINGS)
    return {how: (codes[how], folder) for how, folder in folders.items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("how", ENDINGS)
def test_the_end_of_the_program(ended: dict[str, tuple[list[int], Path]], how: str) -> None:
    """It waits for the last checkpoint, with and without its process group; an error is printed.

    And for Gloo: a thread of it that outlives the interpreter aborts the process.
    """
    codes, folder = ended[how]
    errors = [(folder / f"{rank}.err").read_text() for rank in range(ENDINGS[how])]
    assert codes == [1 if how == "raises" else 0] * ENDINGS[how], errors
    root = folder / "run"
    if how == "fails":
        assert not steps_in(root)
        # Where it happened and on the first rank.
        for text in errors:
            assert text.count("onecopy: the checkpoint of step 1") == 1, errors
            assert "No space left on device" in text
    else:
        assert [saved.name for saved in steps_in(root)] == ["step-00000001"], errors
        assert (root / "latest").read_text() == "step-00000001\n"
