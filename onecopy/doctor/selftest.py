"""The self-test as one rank runs it: meet, connect, send, train a step. Nothing waits forever.

The work is done in a thread, because what waits for another rank cannot be interrupted from
within. A rank that gets no further reports how far it came, and what the others were at.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from onecopy.comm.groups import Group
from onecopy.comm.meshes import world_group
from onecopy.comm.neighbours import meet_neighbours
from onecopy.doctor.environment import launched, variables_of_user
from onecopy.doctor.meeting import Meeting, first_line
from onecopy.doctor.network import look_at_network
from onecopy.doctor.results import Card, RankReport
from onecopy.doctor.software import look_at_software
from onecopy.doctor.step import compare_step
from onecopy.doctor.transfers import copy_speed, measure
from onecopy.errors import OneCopyError
from onecopy.launcher import local_place

__all__ = ["MEET", "RankTest", "test_rank"]

MEET, EXCHANGE, CONNECT = "reaching the store", "waiting for the other ranks", "connecting"
MARGIN = 5.0  # seconds beyond the limit, in which what waits gives up by itself
COMPARED = ("onecopy", "python", "torch", "numpy", "safetensors")


def test_rank(device: str, limit: float) -> RankReport:
    """The self-test in a process that a launcher has made; every rank calls it.

    Args:
        device: auto or cpu, see DoctorOptions.
        limit: seconds that one thing may take.
    """
    test = RankTest(device, limit)
    return test.run()


class RankTest:
    """One rank's part of the self-test.

    Attributes:
        meeting: where ranks meet; None if this one did not get there.
    """

    def __init__(self, device: str, limit: float) -> None:
        self.meeting: Meeting | None = None
        self._limit = limit
        self._device = _device(device)
        here = launched()
        assert here is not None, "a launcher has made this process"
        self._last_step = time.monotonic()
        self._report = RankReport(
            rank=here.rank, world_size=here.world_size, device=self._device.type, reached=MEET
        )

    def run(self) -> RankReport:
        """How far this rank came, and what it found on the way."""
        begin = time.monotonic()
        worker = threading.Thread(target=self._work, daemon=True, name="onecopy-doctor-test")
        worker.start()
        # What waits for others gives up by itself after the limit, if all is well.
        while worker.is_alive() and time.monotonic() - self._last_step < self._limit + MARGIN:
            worker.join(0.1)
        if worker.is_alive():
            waited = time.monotonic() - self._last_step
            self._found(error=f"nothing has happened for {waited:.0f} s")
        if self._report.error:
            # The first rank speaks for all; a launcher that sees another one fail ends the first.
            atexit.register(_exit_at_once, 0 if self._report.rank and self.meeting else 1)
            self._found(others={} if self.meeting is None else self.meeting.others())
        self._found(seconds=time.monotonic() - begin)
        return self._report

    def _found(self, **values: object) -> None:
        self._report = replace(self._report, **values)  # type: ignore[arg-type]

    def _at(self, what: str) -> None:
        self._last_step = time.monotonic()
        self._found(reached=what)
        if self.meeting is not None:
            self.meeting.say(what)

    def _work(self) -> None:
        try:
            self._meet()
            self._at(CONNECT)
            self._connect()
            self._send()
            self._at("a training step")
            rank, size = self._report.rank, self._report.world_size
            self._found(training=compare_step(rank, size, self._device))
            self._at("the end")
        except (OneCopyError, RuntimeError, ValueError, OSError) as error:
            self._found(error=first_line(error))
        finally:
            self._leave()

    def _meet(self) -> None:
        meeting = Meeting(self._limit)
        self.meeting = meeting
        self._at(EXCHANGE)
        cards = meeting.exchange(_card(meeting.rank))
        self._found(cards=cards, clocks=meeting.compare_clocks(cards))

    def _connect(self) -> None:
        assert self.meeting is not None, "ranks have met"
        device = self._device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else None,
            store=dist.PrefixStore("group", self.meeting.store),
            rank=self.meeting.rank,
            world_size=self.meeting.world_size,
            timeout=timedelta(seconds=self._limit),
            device_id=None if device.type == "cpu" else device,
        )
        world = dist.group.WORLD
        assert world is not None, "it was just made"
        self._found(backend=world._get_backend(device).name())

    def _send(self) -> None:
        world: Group = world_group()
        self._found(copy=copy_speed(self._device))
        if world.process_group is None:
            return  # one rank alone sends nothing
        neighbours = meet_neighbours(world, self._device)
        self._found(neighbours=() if neighbours is None else tuple(neighbours.links))
        for transfer in measure(world, self._device, self._at, neighbours):
            self._found(transfers=(*self._report.transfers, transfer))

    def _leave(self) -> None:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _device(wish: str) -> torch.device:
    """An accelerator of this rank's own, or the CPU where there are too few."""
    local_rank, local_size = local_place()
    if wish == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    if torch.accelerator.device_count() < local_size:
        return torch.device("cpu")
    current = torch.accelerator.current_accelerator()
    assert current is not None, "there is one, it was just said"
    return torch.device(current.type, local_rank)


def _card(rank: int) -> Card:
    network = look_at_network(variables_of_user())
    software = look_at_software()
    known = {"onecopy": software.onecopy, "python": software.python}
    return Card(
        rank=rank,
        host=socket.gethostname(),
        address=network.gloo_address,
        interface=network.gloo_interface,
        versions={name: known.get(name) or software.version_of(name) for name in COMPARED},
        is_first_here=local_place()[0] == 0,
    )


def _exit_at_once(code: int) -> None:
    """A normal exit would wait for threads that are in calls which may never return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
