"""Ranks of one machine read what they are sent straight from each other's memory.

Gloo sends bytes between processes of one machine through the network stack: copied into the kernel,
cut into packets, copied out again by a thread that has to be woken. Here a rank only *tells* its
neighbour where the bytes lie, and the neighbour copies them from there to where they belong, once
(`process_vm_readv`; MPI calls it cross-memory attach). What is told are records of 24 bytes,
through a socket that no network knows:

    OFFER tag address length    these bytes of mine are yours to read
    READ  tag                   I have them: they may change again

Offers and receives of one tag meet in their order. They are looked after whenever something is
posted, by whoever waits, and else by a thread: no rank waits for what another rank's program does
in the meantime.

Only Linux has the call, and it may be forbidden (by a container, or by Yama). Neighbours try it
when they meet, pair by pair, and send messages where it fails.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import socket
import struct
import sys
import threading
import time
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import Group, has_native_collectives, timeout_of

__all__ = ["Link", "Neighbours", "Post", "meet_neighbours"]

R = TypeVar("R")

OFFER, READ = 0, 1
RECORD = struct.Struct("=IIQQ")  # kind, tag, address, bytes
CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED has them
SECRET_BYTES = 32
MEETING_SECONDS = 20.0
# How long a wait sleeps at most before it looks whether it was interrupted.
LOOK_EVERY_MS = 50
# How often the thread looks, while somebody is due something and nobody waits.
IDLE_SECONDS = 2e-3
# What the bell says when there is nothing to look after any more.
CLOSED = 1 << 32
# How long the end of a program waits for neighbours that are due something.
LAST_WORDS_SECONDS = 10.0
# Those with something posted. They outlive their model: the garbage collector, were it to find both
# at once, would close the connections first, and only then let transfers be waited for.
_busy: set[Neighbours] = set()
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _readv() -> Any | None:
    """process_vm_readv, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        ranges, count = ctypes.POINTER(_Range), ctypes.c_ulong
        call.restype = ctypes.c_ssize_t
        call.argtypes = (ctypes.c_int, ranges, count, ranges, count, count)
    return call


def _read(process: int, address: int, into: int, length: int) -> None:
    """Copy bytes of another process to an address of this one.

    Raises:
        OSError: it has ended, or does not let this one read.
    """
    call = _readv()
    assert call is not None, "only called where it was tried"
    while length:
        here, there = _Range(into, length), _Range(address, length)
        done = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number) if done else "nothing could be read")
        address, into, length = address + done, into + done, length - done


class Post:
    """One side of a message to or from a neighbour; `wait` as a torch work has it."""

    __slots__ = ("_link", "_neighbours", "is_done", "tensor")

    def __init__(self, neighbours: Neighbours, link: Link, tensor: torch.Tensor) -> None:
        self._neighbours, self._link = neighbours, link
        self.tensor = tensor
        self.is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the bytes are here, or have been read there.

        Raises:
            RuntimeError: the neighbour has ended, or time is over.
        """
        if not self.is_done:
            self._neighbours.wait(self, self._link, timeout)
        return True


class Link:
    """One neighbour: its process, the socket to it, and what is posted and not yet met, by tag."""

    def __init__(self, rank: int, process: int, to: socket.socket) -> None:
        self.rank = rank
        self.socket = to
        self.is_closed = False
        self._process = process
        self._offers: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[Post]] = defaultdict(deque)
        self._given: defaultdict[int, deque[Post]] = defaultdict(deque)
        self._incoming, self.outgoing = bytearray(), bytearray()
        self._end = select.poll()
        self._end.register(to, select.POLLRDHUP)
        self.num_posted = 0

    def give(self, post: Post, tag: int) -> None:
        self._given[tag].append(post)
        self.num_posted += 1
        self._tell(OFFER, tag, post.tensor.data_ptr(), post.tensor.nbytes)

    def take(self, post: Post, tag: int) -> None:
        self._wanted[tag].append(post)
        self.num_posted += 1
        self._match(tag)

    def look(self) -> None:
        """Take in what the neighbour has told, and copy what was waited for."""
        if self.outgoing:
            self._flush()
        while not self.is_closed:
            try:
                told = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                told = b""
            if not told:
                self.is_closed = True
                return
            self._incoming += told
            whole = len(self._incoming) // RECORD.size * RECORD.size
            for kind, tag, address, length in RECORD.iter_unpack(self._incoming[:whole]):
                if kind == OFFER:
                    self._offers[tag].append((address, length))
                    self._match(tag)
                else:
                    self._given[tag].popleft().is_done = True
                    self.num_posted -= 1
            del self._incoming[:whole]

    @property
    def is_due(self) -> bool:
        """The neighbour has not read all that was given to it."""
        return not self.is_closed and any(self._given.values())

    def hang_up(self) -> None:
        """The neighbour reads nothing from now on that it could rely on."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _match(self, tag: int) -> None:
        offers, wanted = self._offers[tag], self._wanted[tag]
        while offers and wanted:
            (address, length), post = offers.popleft(), wanted.popleft()
            if length != post.tensor.nbytes:
                raise RuntimeError(
                    f"rank {self.rank} offers {length} bytes where {post.tensor.nbytes} are due"
                )
            try:
                _read(self._process, address, post.tensor.data_ptr(), length)
            except OSError as error:
                raise RuntimeError(
                    f"the memory of rank {self.rank} cannot be read: {error}"
                ) from error
            if self._end.poll(0):
                # Who gives up first closes, then uses its memory for something else.
                raise RuntimeError(f"rank {self.rank} has closed its connection")
            post.is_done = True
            self.num_posted -= 1
            self._tell(READ, tag, 0, 0)

    def _tell(self, kind: int, tag: int, address: int, length: int) -> None:
        self.outgoing += RECORD.pack(kind, tag, address, length)
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self.socket.send(self.outgoing)
        except BlockingIOError:
            # It reads no further at the moment; the rest goes at the next look.
            return
        except OSError:
            # It has ended: known when its end of the socket is read.
            sent = len(self.outgoing)
        del self.outgoing[:sent]


class Neighbours:
    """The other ranks of a model that this rank can read from, and that can read from it.

    links: by their global ranks.

    A failure is one for good, and ends all connections: what has been offered may change then, and
    what was told may have been taken in by half.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.links: dict[int, Link] = {}
        self._process = os.getpid()
        # The garbage collector may run at any moment, so in a thread that has the lock too; and
        # wait for what it finds: see `wait`. The holder is a thread's number.
        self._lock = threading.RLock()
        self._holder = 0
        self._poll = select.poll()
        self._polling = threading.Lock()
        self._failure = ""
        self._num_waiting = 0
        # The thread sleeps on it, from `begin` on. No lock is in it, which a fork or the collector
        # could find held.
        self._bell = -1
        self._is_looked_after = False

    def add(self, rank: int, process: int, to: socket.socket) -> None:
        """A neighbour that has been met."""
        to.setblocking(False)
        self.links[rank] = Link(rank, process, to)
        self._poll.register(to, select.POLLIN)

    def begin(self) -> None:
        """All have been met."""
        sockets = [link.socket for link in self.links.values()]
        reference, bell = weakref.ref(self), os.eventfd(0)
        self._bell = bell
        weakref.finalize(self, _close, sockets, bell, self._process).atexit = False
        atexit.register(_be_read, reference)
        threading.Thread(
            target=_look_after, args=(reference, bell), name="onecopy-neighbours", daemon=True
        ).start()

    def give(self, tensor: torch.Tensor, link: Link, tag: int) -> Post:
        """Let a neighbour read a contiguous tensor; until the post is done it must not change."""
        post = Post(self, link, tensor)
        self._alone(link.give, post, tag)
        _busy.add(self)
        self._ring()
        return post

    def take(self, tensor: torch.Tensor, link: Link, tag: int) -> Post:
        """Read what a neighbour gives, or will give, into a contiguous tensor."""
        post = Post(self, link, tensor)
        self._alone(link.take, post, tag)
        _busy.add(self)
        self._ring()
        return post

    def look(self) -> bool:
        """Go on with all that is possible at once. Returns whether something is still posted."""
        return self._alone(self._look)

    def wait(self, post: Post, link: Link, timeout: timedelta | None) -> None:
        """Until it is done, going on with all others meanwhile."""
        if os.getpid() != self._process:
            # Forked, to load data: what is told to this rank is its parent's to hear.
            raise RuntimeError("only the process that has met its neighbours can wait for them")
        if self._holder == threading.get_ident():
            # The garbage collector has found it in the midst of `_alone`. It is held by its link.
            raise RuntimeError("nothing can be waited for in the midst of a look")
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        self._num_waiting += 1
        try:
            while True:
                self._alone(self._look)
                if post.is_done:
                    return
                if self._failure or link.is_closed:
                    why = self._failure or f"rank {link.rank} has closed its connection"
                    raise RuntimeError(why)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out waiting for rank {link.rank}")
                self._sleep()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._num_waiting -= 1

    def interrupt(self) -> None:
        """From another thread: nothing that is waited for will ever come."""
        self._fail("interrupted")

    def look_while_nobody_waits(self) -> None:
        """For the thread: a wait looks itself, and sleeps until there is something to see."""
        self._is_looked_after = False
        is_posted = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._num_waiting:
                    is_posted = self._alone(self._look)
            except Exception:
                # Whoever waits next is told.
                is_posted = False
            finally:
                self._lock.release()
        if is_posted:
            self._ring()

    def be_read(self) -> None:
        """The program ends: neighbours that are behind may still read what they are due."""
        end = time.monotonic() + LAST_WORDS_SECONDS
        with suppress(RuntimeError):
            while self.look() and any(one.is_due for one in self.links.values()):
                if time.monotonic() > end:
                    return
                time.sleep(IDLE_SECONDS)

    # Details ----------------------------------------------------------------------------------

    def _ring(self) -> None:
        if not self._is_looked_after:
            self._is_looked_after = True
            os.eventfd_write(self._bell, 1)

    def _alone(self, act: Callable[..., R], *arguments: Any) -> R:
        """One thread at a time; what ends in the midst of it is a failure."""
        with self._lock:
            self._holder = threading.get_ident()
            try:
                return act(*arguments)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._holder = 0

    def _fail(self, why: BaseException | str) -> None:
        self._failure = self._failure or str(why) or type(why).__name__
        _busy.discard(self)
        for link in self.links.values():
            link.hang_up()

    def _look(self) -> bool:
        if self._failure:
            _busy.discard(self)
            return False
        links = self.links.values()
        for link in links:
            if not link.is_closed:
                link.look()
                if link.is_closed:
                    self._poll.unregister(link.socket)
        is_posted = any((one.num_posted or one.outgoing) and not one.is_closed for one in links)
        if not is_posted:
            _busy.discard(self)
        return is_posted

    def _sleep(self) -> None:
        """Until a neighbour tells something; not for long."""
        if self._polling.acquire(blocking=False):
            try:
                is_stuck = any(one.outgoing for one in self.links.values())
                self._poll.poll(1 if is_stuck else LOOK_EVERY_MS)
            finally:
                self._polling.release()
        else:
            # Two threads cannot use one poll.
            time.sleep(1e-3)


def _look_after(reference: weakref.ref[Neighbours], bell: int) -> None:
    """Body of the thread: sleeps while nothing is posted."""
    while os.eventfd_read(bell) < CLOSED:
        time.sleep(IDLE_SECONDS)
        neighbours = reference()
        if neighbours is not None:
            neighbours.look_while_nobody_waits()
        del neighbours
    os.close(bell)


def _close(sockets: list[socket.socket], bell: int, process: int) -> None:
    # A process that was forked from this one (to load data) has the same connections, and no
    # thread.
    if os.getpid() == process:
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(bell, CLOSED)
    for one in sockets:
        one.close()


def _be_read(reference: weakref.ref[Neighbours]) -> None:
    neighbours = reference()
    if neighbours is not None:
        neighbours.be_read()


# Meeting --------------------------------------------------------------------------------------


def meet_neighbours(world: Group, device: torch.device) -> Neighbours | None:
    """Find the ranks of this machine that let each other read; a collective of the group.

    None where there are none, and where tensors of `device` do not go through Gloo as messages.
    """
    is_native = has_native_collectives(world, device)
    if world.process_group is None or device.type != "cpu" or is_native:
        return None
    listener, card = _introduce()
    cards = gather_objects(world, card)
    if listener is None:
        gather_objects(world, [])
        return None
    neighbours = Neighbours(timeout_of(world))
    with listener:
        here = [at for at, one in enumerate(cards) if one and one[:2] == card[:2]]
        met = {one[0]: one for one in _connections(world.rank, here, cards, listener)}
    # One side may have lost patience just when the other was content: both have to know.
    lists = gather_objects(world, list(met))
    for at, process, to in met.values():
        if world.rank in lists[at]:
            neighbours.add(world.ranks[at], process, to)
        else:
            to.close()
    if not neighbours.links:
        return None
    neighbours.begin()
    return neighbours


def _introduce() -> tuple[socket.socket | None, tuple[str, str, str, bytes] | tuple[()]]:
    """A socket to be met at, and what others have to know: the machine, its network, the socket's
    name and a secret that only ranks of this group hear.
    """
    if _readv() is None:
        return None, ()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").readlink())
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"onecopy-{uuid.uuid4().hex}"
        # The name is of no file system: nothing is left behind.
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        listener.settimeout(MEETING_SECONDS)
    except OSError:
        return None, ()
    return listener, (boot, network, name, uuid.uuid4().hex.encode())


def _connections(
    me: int, here: list[int], cards: list[Any], listener: socket.socket
) -> Iterator[tuple[int, int, socket.socket]]:
    """Place, process and socket of each neighbour that reads from this rank and is read by it."""
    found: dict[int, socket.socket] = {}
    with suppress(OSError):
        for at in (one for one in here if one < me):
            to = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            to.settimeout(MEETING_SECONDS)
            to.connect(f"\0{cards[at][2]}")
            to.sendall(cards[at][3] + struct.pack("=I", me))
            found[at] = to
        for _ in range(sum(one > me for one in here)):
            to, _ = listener.accept()
            to.settimeout(MEETING_SECONDS)
            hello = _receive(to, SECRET_BYTES + 4)
            if hello[:SECRET_BYTES] == cards[me][3]:
                found[struct.unpack("=I", hello[SECRET_BYTES:])[0]] = to
    _allow_reading()
    secret = ctypes.create_string_buffer(cards[me][3], SECRET_BYTES)
    processes = {at: _process_of(to) for at, to in found.items()}
    for to in found.values():
        _send(to, struct.pack("=Q", ctypes.addressof(secret)))
    works = {at: _can_read(to, processes[at], cards[at][3]) for at, to in found.items()}
    for at, to in found.items():
        _send(to, b"y" if works[at] else b"n")
    for at, to in found.items():
        with suppress(OSError):
            if _receive(to, 1) == b"y" and works[at]:
                yield at, processes[at], to
                continue
        to.close()


def _can_read(to: socket.socket, process: int, secret: bytes) -> bool:
    """Try it, on memory whose bytes are known."""
    seen = ctypes.create_string_buffer(SECRET_BYTES)
    try:
        (address,) = struct.unpack("=Q", _receive(to, 8))
        if not process:
            return False
        _read(process, address, ctypes.addressof(seen), SECRET_BYTES)
    except OSError:
        return False
    return seen.raw == secret


def _process_of(to: socket.socket) -> int:
    """The number of the process at the other end, as it is known here; 0: of none known here."""
    said = to.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(said)
    return process if user == os.geteuid() else 0


def _allow_reading() -> None:
    """Where Yama lets only parents read, say that any process of this user may, as without Yama."""
    with suppress(OSError):
        if YAMA.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)


def _send(to: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        to.sendall(data)


def _receive(to: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = to.recv(length - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data
