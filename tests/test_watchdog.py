"""When training stands still, one rank tells which ranks wait for what, and what the others do.

No test guesses a time: a rank that is late goes on when it has been told of.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
from onecopy.comm import stall
from onecopy.comm.stall import Answer, Peer, Place, WaitNow
from onecopy.comm.waits import Wait
from onecopy.comm.watchdog import Watchdog
from tests.pool import Pool, RankError
from tests.runs import OPTIMIZERS

SOON = 0.3
# A late rank that was not told of by then says what was told instead.
PATIENCE = 40.0


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class Heard(logging.Handler):
    """What is logged and has all `words`; at the first, `then` is called and the late rank goes on.

    On a busy machine ranks stand still for a moment at other places too, and may come so late to
    where they wait that what is told first is not yet all: that is told again.
    """

    def __init__(
        self, *words: str, late: str = "until_told", then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._words, self._then = (late, *words), then
        logging.getLogger("onecopy").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if all(word in text for word in self._words):
            self.texts.append(text)
            self._then()
            _store().set("told", "")
        else:
            _store().append("told instead", f"\n{text}")

    def close(self) -> None:
        logging.getLogger("onecopy").removeHandler(self)
        super().close()


def until_told() -> None:
    """What a rank does that is late."""
    given_up_at = time.monotonic() + PATIENCE
    while not _store().check(["told"]):
        if time.monotonic() > given_up_at:
            _store().append("told instead", "")
            instead = _store().get("told instead").decode()
            raise AssertionError(f"not told of, but this was: {instead or 'nothing'}")
        time.sleep(0.02)


class Block(nn.Module):
    """Late in one call of its forward on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act()  # late in forward
        return torch.tanh(self.linear(x))


def _sharded(stage: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Ranks that the pool has just started may come one after another.
    dist.barrier()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    optimizer = OPTIMIZERS["sgd"](model)
    settings = {"stall_seconds": SOON, **settings}
    onecopy.shard(model, optimizer, stage=stage, units=("0", "1", "2"), **settings)
    return model, optimizer


def batches(late: int | None) -> Iterator[torch.Tensor]:
    """Three batches; the last is late on this rank."""
    for step in range(3):
        if step == 2 and dist.get_rank() == late:
            until_told()  # late in the data
        yield torch.ones(2, 8)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, late: int | None = None) -> None:
    for batch in batches(late):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def late_data(stage: int) -> list[str]:
    """The last rank's third batch is late; both others wait for it."""
    heard = Heard("ranks 0-1: each waits", "step 3")
    _train(*_sharded(stage, stall_seconds=1.0), late=dist.get_world_size() - 1)
    heard.close()
    return heard.texts


@pytest.mark.parametrize("stage", range(4))
def test_a_late_batch_is_told_with_its_line(pool: Pool, stage: int) -> None:
    """One of two ranks that wait tells, and names verb, unit, step and the line."""
    *waiters, other = pool.run(3, late_data, stage)
    assert other == []
    # Another one tells, too, where the first one falls silent for a moment.
    teller, text = next((rank, text) for rank, texts in enumerate(waiters) for text in texts)
    waiting, late = text.index("ranks 0-1: each waits"), text.index("rank 2 does not wait")
    assert late < waiting, f"those that the others wait for come first: {text}"
    assert "until_told()  # late in the data" in text[late:waiting], text
    assert "between two steps, step 3" in text[late:waiting], text
    verb = "gather" if stage == 3 else "reduce"
    title = (
        rf"training stands still: rank {teller} has waited \d+ s: it waits for the {verb} of unit "
        r".* \(.*, step 3\)"
    )
    assert re.fullmatch(title, text.splitlines()[0]), text
    assert "model(batch)" in text[waiting:], text


def late_forward() -> list[str]:
    """Rank 1 is late inside the second block's forward, with the third under way already."""
    heard = Heard("(backward, step 4)")
    model, optimizer = _sharded(3)
    _train(model, optimizer)
    if dist.get_rank() == 1:
        model[1].act = until_told
    _train(model, optimizer)
    heard.close()
    return heard.texts


def test_a_late_forward_is_told_with_its_line(pool: Pool) -> None:
    """The line is that of the module, inside forward."""
    (text, *_), late = pool.run(2, late_forward)
    assert late == []
    assert "(backward, step 4)" in text.splitlines()[0], text
    row = text[text.index("rank 1 does not wait") : text.index("rank 0 waits")]
    assert "unit 1 (Block), forward, step 4" in row, text
    assert "self.act()  # late in forward" in row, text


def stopped() -> list[str]:
    """Rank 1 is stopped by a signal, and goes on when it was told of."""
    model, optimizer = _sharded(2)
    pids: list[int] = onecopy.handle.of(model).engine.share(os.getpid(), "numbers of processes")
    heard = Heard(late="is stopped (kill", then=lambda: os.kill(int(pids[1]), signal.SIGCONT))
    _train(model, optimizer)
    # It has said where it is before it falls silent: its watchdog looks now and then only.
    while not _store().check([f"onecopy/watchdog/answer/{dist.get_rank()}"]):
        time.sleep(0.02)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _train(model, optimizer)
    heard.close()
    return [text.replace(str(int(pids[1])), "PID") for text in heard.texts]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_stopped_process_is_told_to_be_stopped(pool: Pool) -> None:
    """It does not answer; where it was is what it said last."""
    (text, *_), late = pool.run(2, stopped)
    assert late == []
    assert "rank 1 does not answer, its process is stopped (kill -CONT" in text, text
    assert "(process PID on " in text, text
    assert "last heard of at use " in text, text


def late_save(root: str, how: str) -> list[str]:
    """Rank 1 writes its part of a checkpoint late."""
    from onecopy.checkpoint import saving

    heard = Heard("waits for the others in a checkpoint")
    model, optimizer = _sharded(2)
    _train(model, optimizer)
    if dist.get_rank() == 1:
        write = saving.Writer.write_data

        def late_write(*args: Any) -> Any:
            until_told()  # late on the disk
            return write(*args)

        saving.Writer.write_data = late_write  # type: ignore[method-assign]
    try:
        if how == "save":
            onecopy.save(root, model, optimizer)
        else:
            onecopy.async_save(root, model, optimizer).wait()
    finally:
        if dist.get_rank() == 1:
            saving.Writer.write_data = write  # type: ignore[method-assign]
    heard.close()
    return heard.texts


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_late_part_of_a_checkpoint_is_told(pool: Pool, tmp_path: Path, how: str) -> None:
    """Checkpoints have a group, and perhaps a thread, of their own."""
    (text, *_), late = pool.run(2, late_save, str(tmp_path / "run"), how)
    assert late == []
    title = text.splitlines()[0]
    assert "waits for the others in a checkpoint" in title, text
    assert title.startswith("training" if how == "save" else "a checkpoint"), text
    assert "until_told()  # late on the disk" in text[text.index("rank 1 does not wait") :], text


def late_tensor_rank(root: str) -> list[str]:
    """The only data rank of a model saves, and its tensor parallel rank comes late."""
    heard = Heard("onecopy.save")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = _sharded(2, mesh=mesh)
    _train(model, optimizer)
    if dist.get_rank() == 1:
        until_told()  # late for the save
    onecopy.save(root, model, optimizer)
    heard.close()
    return heard.texts


def test_a_late_tensor_parallel_rank_is_told(pool: Pool, tmp_path: Path) -> None:
    """Also where a model has one data rank, which waits for no other one of them."""
    (text, *_), late = pool.run(2, late_tensor_rank, str(tmp_path / "run"))
    assert late == []
    assert "until_told()  # late for the save" in text, text


def late_shard() -> list[str]:
    """Rank 1 builds its model late: it has no watchdog yet."""
    heard = Heard(late="rank 1 has not come")
    dist.barrier()
    if dist.get_rank() == 1:
        until_told()
    model = nn.Linear(8, 8)
    _train(onecopy.shard(model, stage=1, stall_seconds=SOON), OPTIMIZERS["sgd"](nn.Linear(1, 1)))
    heard.close()
    return heard.texts


def test_a_rank_that_has_not_come_to_shard_is_told(pool: Pool) -> None:
    """The others wait in shard for it."""
    (text, *_), late = pool.run(2, late_shard)
    assert late == []
    assert "rank 1 has not come to onecopy.shard yet" in text, text
    assert "it waits for the others to agree, in shard" in text, text


def diverge() -> None:
    """Each rank wants another block."""
    model, optimizer = _sharded(3, stall_seconds=0.05)
    _train(model, optimizer)
    model[dist.get_rank()](torch.ones(2, 8))


def test_divergence_stays_an_error(pool: Pool) -> None:
    """A watchdog tells and does not decide."""
    for error in pool.run(2, diverge, expect_failures=True):
        assert isinstance(error, RankError)
        assert error.type_name == "DivergenceError", str(error)


def silent() -> tuple[list[str], list[str]]:
    """Without a number of seconds nothing watches; the late rank comes by itself."""
    import threading

    heard = Heard(late="stands still")
    before = threading.enumerate()  # perhaps some of an earlier test, about to end
    model, optimizer = _sharded(3, stall_seconds=None)
    if dist.get_rank() == 1:
        time.sleep(1.0)
    _train(model, optimizer)
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    heard.close()
    return heard.texts, [name for name in names if "watchdog" in name]


def test_it_can_be_switched_off(pool: Pool) -> None:
    """No thread, no text."""
    assert pool.run(2, silent) == [([], []), ([], [])]


def test_the_lowest_rank_that_waits_tells(caplog: pytest.LogCaptureFixture) -> None:
    """It alone, once; another one when it falls silent.

    Both are in this process, and look when told to. The wait is made old here, and is due again
    when it has doubled.
    """
    store = dist.HashStore()
    third, first = (Watchdog(store, rank) for rank in (2, 0))
    for one in (third, first):
        one.stop()
        one.seconds = 1000.0

    def tellers() -> list[str]:
        return re.findall(r"stands still: (rank \d)", caplog.text)

    with Wait("reduce", (0, 2), unit="layers.1") as wait:
        wait.since -= 1500.0
        for _ in range(20):
            third.look()
            first.look()
        assert tellers() == ["rank 0"]
        for _ in range(20):
            third.look()
        assert tellers() == ["rank 0", "rank 2"]


SERVE = (
    "import sys, torch.distributed as dist;"
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
    "print(store.port, flush=True); sys.stdin.read()"
)


def test_a_store_that_does_not_answer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The process that holds it is stopped: nobody can be asked, and that is what is told."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVE], stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        watchdog = Watchdog(store, rank=3)
        watchdog.seconds = SOON
        server.send_signal(signal.SIGSTOP)
        try:
            with Wait("gather", (0, 3), unit="layers.1"):
                while "store has not answered" not in caplog.text:
                    time.sleep(0.02)
        finally:
            server.send_signal(signal.SIGCONT)
        assert "rank 3 has waited" in caplog.text, caplog.text
        assert "in the gather of unit layers.1" in caplog.text, caplog.text
        watchdog.stop()


class Trained:
    """Stands for a sharded model."""

    place = Place(41, "unit layers.2 (Block)", "backward", 7)


def test_a_look_keeps_no_model_alive() -> None:
    """Not even while the store is asked: a model that is deleted then is gone at once."""
    models, gone = [Trained()], []
    reference = weakref.ref(models[0])
    watchdog = Watchdog(dist.HashStore(), rank=0)
    watchdog.stop()
    watchdog.add(models[0])

    def post(_: Answer) -> None:
        models.clear()
        gone.append(reference() is None)

    with mock.patch.object(watchdog, "_post", post):
        watchdog.look()
    assert gone == [True]


# The report -----------------------------------------------------------------------------------

AT = Place(41, "unit layers.2 (Block)", "backward", 7)
WAITS = WaitNow("reduce", "layers.{3}", 61.4, "", ("train.py:9 in main: loss.backward()",))


def _peer(number: int, *waits: WaitNow, state: str = "", **more: Any) -> Peer:
    return Peer(Answer(number, 62.0, AT, waits, **more), "process 7 on node", state)


def test_ranks_that_do_the_same_are_told_together() -> None:
    """64 ranks are a few lines, and the odd ones come first."""
    peers = {rank: _peer(5, WAITS) for rank in range(64)}
    peers[9] = _peer(5, lines=("data.py:3 in read: wait()", "train.py:8 in main: next(data)"))
    peers[20] = _peer(4)
    peers[21] = _peer(4, state="ended")
    peers[22] = Peer(None, "", "")
    text = stall.report(0, WAITS, 5, peers)
    assert text.splitlines() == [
        "training stands still: rank 0 has waited 61 s: it waits for the reduce of unit layers.{3} "
        "(backward, step 7)",
        "  rank 20 does not answer: it is stopped, gone, or in code that keeps Python's lock; last "
        "heard of at use 41, unit layers.2 (Block), backward, step 7 (process 7 on node)",
        "  rank 21 has ended (process 7 on node)",
        "  rank 22 has not come to onecopy.shard yet, or has ended",
        "  rank 9 does not wait; it has not moved for 62 s, after use 41, unit layers.2 (Block), "
        "backward, step 7 (process 7 on node)",
        "      data.py:3 in read: wait()",
        "      train.py:8 in main: next(data)",
        "  ranks 0-8, 10-19, 23-63: each waits for the reduce of unit layers.{3}, for 61 s, at "
        "use 41, unit layers.2 (Block), backward, step 7",
        "      train.py:9 in main: loss.backward()",
    ]


def test_answers_travel_as_text() -> None:
    """What is read is what was written."""
    answer = Answer(3, 1.5, AT, [WAITS], ["a.py:1 in f"], {"onecopy writes step 3": ["b.py:2"]})
    read = Answer.from_json(answer.to_json())
    assert read.place == AT
    assert [one.verb for one in read.waits] == ["reduce"]
    assert read.others == answer.others
    assert Answer.from_json(Answer(0, 0.0, None).to_json()) == Answer(0, 0.0, None, [], [])
