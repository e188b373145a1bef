"""Ranks of one machine read each other's memory: the same results, no bytes sent, no new hangs."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
import onecopy.handle
from benchmarks.network import LOOPBACK, CannotMakeNodesError, network, settled
from onecopy.comm import neighbours as module
from onecopy.comm import transport
from onecopy.comm.groups import Group
from onecopy.comm.neighbours import Link, Neighbours, Post
from onecopy.comm.transport import _UnderWay
from onecopy.errors import ConfigError
from tests import models
from tests.pool import Pool
from tests.runs import OPTIMIZERS, full_values


def reason_against() -> str:
    """Why nobody reads here; empty where they do."""
    if module._readv() is None:
        return "the system has no process_vm_readv"
    source, target = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    try:
        module._read(os.getpid(), ctypes.addressof(source), ctypes.addressof(target), 8)
    except OSError as error:
        return f"process_vm_readv is forbidden: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

Pair = tuple[Neighbours, Neighbours]
LONG, SHORT = timedelta(seconds=30), timedelta(milliseconds=50)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Ranks 0 and 1, both of this process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    both = Neighbours(LONG), Neighbours(LONG)
    for rank, (neighbours, end) in enumerate(zip(both, ends, strict=True)):
        neighbours.add(1 - rank, os.getpid(), end)
        neighbours.begin()
    yield both


# The protocol ---------------------------------------------------------------------------------


def test_offers_and_receives_meet_by_tag_and_in_their_order(pair: Pair) -> None:
    """In whatever order both sides post."""
    zero, one = pair
    draw = random.Random(0)
    messages = [(tag, number) for tag in range(4) for number in range(5)]
    posts = []
    for side in (0, 1):
        # Messages of one tag keep their order.
        shuffled = sorted(messages, key=lambda message: (message[1], draw.random()))
        for tag, number in shuffled:
            tensor = torch.full((tag + 1, 7), 10.0 * tag + number)
            if side == 0:
                posts.append((tag, number, zero.give(tensor, zero.links[1], tag)))
            else:
                posts.append((tag, number, one.take(torch.zeros_like(tensor), one.links[0], tag)))
    for tag, number, post in posts:
        assert post.wait()
        assert torch.equal(post.tensor, torch.full((tag + 1, 7), 10.0 * tag + number))


def test_who_waits_for_nothing_is_read_all_the_same(pair: Pair) -> None:
    """A rank gives, and its program does something else: no call of its own is needed."""
    zero, one = pair
    given, taken = (
        zero.give(torch.ones(9), zero.links[1], 3),
        one.take(torch.zeros(9), one.links[0], 3),
    )
    assert taken.wait()
    end = time.monotonic() + 10
    while not given.is_done and time.monotonic() < end:
        time.sleep(0.01)
    assert given.is_done


def test_more_is_offered_than_a_socket_holds(pair: Pair) -> None:
    """10,000 units are refreshed before the first is taken."""
    zero, one = pair
    count = 20_000
    values = torch.arange(float(count))
    given = [zero.give(values[tag : tag + 1], zero.links[1], tag) for tag in range(count)]
    taken = [one.take(torch.zeros(1), one.links[0], tag) for tag in reversed(range(count))]
    assert torch.cat([post.tensor for post in taken if post.wait()]).equal(values.flip(0))
    assert all(post.wait() for post in given)


def test_what_is_never_given_is_named(pair: Pair) -> None:
    zero, _ = pair
    with pytest.raises(RuntimeError, match="timed out waiting for rank 1"):
        zero.take(torch.zeros(1), zero.links[1], 0).wait(SHORT)


def test_other_sizes_are_an_error(pair: Pair) -> None:
    zero, one = pair
    one.give(torch.zeros(3), one.links[0], 0)
    with pytest.raises(RuntimeError, match="rank 1 offers 12 bytes where 8 are due"):
        zero.take(torch.zeros(2), zero.links[1], 0).wait()


def test_an_interrupt_ends_a_wait(pair: Pair) -> None:
    zero, _ = pair
    zero.interrupt()
    with pytest.raises(RuntimeError, match="interrupted"):
        zero.take(torch.zeros(1), zero.links[1], 0).wait()


def test_who_has_gone_is_named(pair: Pair) -> None:
    zero, one = pair
    post = zero.take(torch.zeros(1), zero.links[1], 0)
    for link in one.links.values():
        link.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match="rank 1 has closed its connection"):
        post.wait()


def test_memory_that_is_gone_is_an_error(pair: Pair) -> None:
    """The neighbour frees what it has offered: an error here, no crash."""
    zero, one = pair
    link = one.links[0]
    link._tell(module.OFFER, 5, 4096, 8)
    with pytest.raises(RuntimeError, match="the memory of rank 1 cannot be read"):
        zero.take(torch.zeros(2), zero.links[1], 5).wait()


def test_a_forked_process_does_not_close_the_connection(pair: Pair) -> None:
    """One that loads data has a copy of everything, and lets go of it."""
    zero, one = pair
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            module._close([link.socket for link in zero.links.values()], -1, -1)
        os._exit(0)
    os.waitpid(child, 0)
    given = zero.give(torch.ones(2), zero.links[1], 0)
    assert one.take(torch.zeros(2), one.links[0], 0).wait()
    assert given.wait()


def test_a_forked_process_takes_nothing_from_its_parent(pair: Pair) -> None:
    """Its garbage collector finds a transfer of the parent, and must not hear what is told."""
    zero, one = pair
    taken = zero.take(torch.zeros(2), zero.links[1], 0)
    with zero._lock:
        given = one.give(torch.ones(2), one.links[0], 0)
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                _UnderWay([taken]).__del__()
            os._exit(0)
        os.waitpid(child, 0)
    assert taken.wait(SHORT)
    assert given.wait()


def test_the_garbage_collector_may_come_in_the_midst(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And let go of a transfer, in a thread that is posting another, and in the one that looks."""
    zero, one = pair
    let_go = _UnderWay([zero.take(torch.zeros(2), zero.links[1], 0)])
    before = Link._tell

    def collect(link: Link, *record: int) -> None:
        let_go.__del__()
        before(link, *record)

    monkeypatch.setattr(Link, "_tell", collect)
    thread = Thread(target=zero.give, args=(torch.ones(2), zero.links[1], 1), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert one.take(torch.zeros(2), one.links[0], 1).wait()


def test_two_threads_may_wait(pair: Pair) -> None:
    zero, one = pair
    posts = [zero.take(torch.zeros(1), zero.links[1], tag) for tag in (0, 1)]
    errors = []

    def wait(post: Post) -> None:
        try:
            post.wait(LONG)
        except RuntimeError as error:
            errors.append(error)

    threads = [Thread(target=wait, args=(post,)) for post in posts]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for tag in (0, 1):
        one.give(torch.ones(1), one.links[0], tag)
    for thread in threads:
        thread.join()
    assert not errors
    assert all(post.is_done for post in posts)


@pytest.mark.parametrize("reason", ["time is over", "interrupted", "deleted"])
def test_who_has_given_up_is_not_read(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use the memory for something else, though it is still there."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    zero, one = Neighbours(LONG), Neighbours(LONG)
    zero.add(1, os.getpid(), ends[0])
    one.add(0, os.getpid(), ends[1])
    for side in (zero, one):
        side.begin()
    del side
    tensor = torch.ones(2)
    given = zero.give(tensor, zero.links[1], 0)
    one.look()
    if reason == "time is over":
        with pytest.raises(RuntimeError, match="timed out"):
            given.wait(SHORT)
    elif reason == "interrupted":
        zero.interrupt()
    else:
        # As a model leaves its transfers: they are waited for, and then given up.
        monkeypatch.setattr(transport, "LETTING_GO", SHORT)
        works = _UnderWay([given])
        del zero, given, works
        gc.collect()
    tensor.fill_(666)
    with pytest.raises(RuntimeError, match="rank 0 has closed its connection"):
        one.take(torch.zeros(2), one.links[0], 0).wait()


def test_a_failure_is_one_for_good(pair: Pair) -> None:
    """What was told together with it is not taken in twice; the thread that looks goes on."""
    zero, one = pair
    given = zero.give(torch.ones(1), zero.links[1], 1)
    bad = zero.take(torch.zeros(2), zero.links[1], 2)
    link = one.links[0]
    link.outgoing += module.RECORD.pack(module.READ, 1, 0, 0)
    link._tell(module.OFFER, 2, 0, 4)
    for post in (bad, zero.take(torch.zeros(1), zero.links[1], 3)):
        with pytest.raises(RuntimeError, match="rank 1 offers 4 bytes where 8 are due"):
            post.wait()
        link._tell(module.READ, 1, 0, 0)
    assert given.is_done
    zero.look_while_nobody_waits()
    assert not zero.look()


# Training -------------------------------------------------------------------------------------


def train(stage: int, precision: str, neighbours: str = "read") -> tuple[list[float], int, float]:
    """Losses, how many neighbours, and a sum over the trained values."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["sgd"](model)
    onecopy.shard(model, optimizer, stage=stage, precision=precision, neighbours=neighbours)
    losses = []
    for step in range(3):
        loss = models.loss(model, models.batch("gpt", step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = onecopy.handle.of(model).engine.collectives._transports.plain._neighbours  # type: ignore[attr-defined]
    total = sum(value.double().sum().item() for value in full_values(model).values())
    return losses, 0 if found is None else len(found.links), total


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), (3, "bf16")])
def test_reading_changes_no_bit(pool: Pool, world: int, stage: int, precision: str) -> None:
    read = pool.run(world, train, stage, precision)
    sent = pool.run(world, train, stage, precision, "send")
    assert [one[1] for one in read] == [world - 1] * world
    assert [one[1] for one in sent] == [0] * world
    assert [(losses, total) for losses, _, total in read] == [
        (losses, total) for losses, _, total in sent
    ]


def some_may_not_read(stage: int) -> tuple[list[float], int, float]:
    """As where a container forbids it for one process: rank 1 reads nobody."""
    if dist.get_rank() != 1:
        return train(stage, "fp32")
    before = module._read

    def refuse(*_: int) -> None:
        raise PermissionError("not permitted")

    module._read = refuse
    try:
        return train(stage, "fp32")
    finally:
        module._read = before


@pytest.mark.parametrize("stage", [1, 3])
def test_pairs_that_cannot_read_send(pool: Pool, stage: int) -> None:
    """And the others read: both kinds of messages in one transfer."""
    ranks = pool.run(3, some_may_not_read, stage)
    assert [one[1] for one in ranks] == [1, 0, 1]
    expected = pool.run(3, train, stage, "fp32", "send")
    assert [one[::2] for one in ranks] == [one[::2] for one in expected]


def one_meets_nobody() -> int:
    """Rank 1 loses patience just when rank 0 is content. How many neighbours there are."""
    ranks = tuple(range(dist.get_world_size()))
    world = Group(dist.group.WORLD, ranks, dist.get_rank())
    before = module._connections

    def lose(*arguments: Any) -> Iterator[Any]:
        for _, _, to in before(*arguments):
            to.close()
        return iter(())

    if world.rank == 1:
        module._connections = lose
    try:
        found = module.meet_neighbours(world, torch.device("cpu"))
    finally:
        module._connections = before
    return 0 if found is None else len(found.links)


def test_neighbours_are_such_for_both_or_for_none(pool: Pool) -> None:
    assert pool.run(3, one_meets_nobody) == [1, 0, 1]


def one_looks_while_others_wait() -> float:
    """Values after a step are on their way. Rank 0 wants some, the others wait for it elsewhere."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=1)
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    total = 0.0
    if dist.get_rank() == 0:
        total = model[1].weight.sum().item()
    dist.barrier()
    return total or model[1].weight.sum().item()


def test_one_rank_may_look_at_values_while_others_are_elsewhere(pool: Pool) -> None:
    assert len(set(pool.run(3, one_looks_while_others_wait))) == 1


def one_ends_early() -> float:
    """Rank 1 has nothing more to do after the last step; rank 0 is late, and then wants values."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=1)
    model(torch.ones(2, 256)).square().mean().backward()
    if dist.get_rank() == 0:
        time.sleep(1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        return model(torch.ones(2, 256)).sum().item()
    return 0.0


def one_deletes_early(stage: int, late: float) -> list[torch.Tensor]:
    """Rank 1 deletes its model at once after the last step, which rank 0 has still before it."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=stage)
    models.loss(model, models.batch("gpt", 0, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        time.sleep(late)
    optimizer.step()
    if dist.get_rank() == 0:
        return [parameter.detach().clone() for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    return []


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_may_be_deleted_while_others_still_want_its_values(pool: Pool, stage: int) -> None:
    """The collector closes connections before it lets transfers be waited for, unless held."""
    expected = pool.run(2, one_deletes_early, stage, 0.0)[0]
    found = pool.run(2, one_deletes_early, stage, 2.5)[0]
    assert expected
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("rank_environment")
def test_a_rank_may_end_while_others_still_want_its_values() -> None:
    first, second = onecopy.launch(one_ends_early, 2)
    assert first and not second


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="neighbours"):
        onecopy.Config(neighbours="talk")


def sent_in_steps(neighbours: str) -> int:
    """Bytes that all ranks sent through the loopback interface in three steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3, neighbours=neighbours)
    before = 0
    for step in range(5):
        if step == 2:
            dist.barrier()
            before = settled(LOOPBACK).looped_payload
        model(torch.ones(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    sent = settled(LOOPBACK).looped_payload - before
    onecopy.unshard(model)
    dist.destroy_process_group()
    return sent


@pytest.mark.usefixtures("rank_environment")
def test_nothing_goes_through_the_network() -> None:
    try:
        with network(ranks=(2,)) as nodes:
            read = nodes.launch(sent_in_steps, "read")
            sent = nodes.launch(sent_in_steps, "send")
    except CannotMakeNodesError as reason:
        pytest.skip(f"other programs use the interface: {reason}")
    values = 3 * 3 * 4 * (512 * 512 + 512) * 4
    assert max(read) < 0.02 * values
    assert min(sent) > 0.9 * values
