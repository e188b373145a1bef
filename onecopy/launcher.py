"""Rank processes on this machine, without torchrun: `onecopy.launch(fn, nproc, *args)`.

This file owns starting, watching and ending the processes. It is for notebooks, commands and
tests on one machine; several machines are torchrun's work.

How processes are made: `spawn` where it can work, because a fresh interpreter is always sound.
A function typed into a notebook or a prompt cannot be imported by a fresh interpreter, so there
the processes are forked, with one thread each: OpenMP hangs in a forked process that uses more.

How they meet: this process hosts the store on a port that the system picks, so no port is
guessed and none can be taken in between. How they end: the first failure ends all ranks, and a
rank whose launcher has died ends itself.
"""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from onecopy.errors import ConfigError, LaunchError, OneCopyError

# Ranks that lose a peer fail a moment later; waiting for them finds the one that was first.
GRACE_SECONDS = 2.0


# What usually sends a signal, and what helps.
HINTS = {
    "SIGABRT": "; a library gave up, and has said why in what it printed above",
    "SIGBUS": "; most often /dev/shm is full: a DataLoader's workers pass batches through it. "
    "`onecopy doctor` shows its size; in Docker, --shm-size=8g",
    "SIGILL": "; a library was built for another processor: install it anew on this machine",
    "SIGKILL": "; the system does this when memory runs out: try a higher stage, a smaller batch "
    "or fewer processes",
    "SIGSEGV": "; a library crashed: run with PYTHONFAULTHANDLER=1 to see where",
    "SIGTERM": "; somebody asked it to end, a job scheduler for example",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    when: float  # seconds since the epoch, comparable between processes of one machine
    what: str
    details: str  # a traceback, or nothing where the message is advice already


_Report = _Done | _Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    number: int
    process: BaseProcess
    reports: connection.Connection[Any, Any]


def launch(fn: Callable[..., Any], nproc: int = 2, *args: Any) -> list[Any]:
    """Run `fn(*args)` in `nproc` processes with torchrun's environment; return what each returned.

    The processes find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on as under torchrun, so
    `onecopy.shard` and `torch.distributed.init_process_group()` work in `fn` as they are. Each
    gets an equal part of the cores as threads, unless OMP_NUM_THREADS says otherwise.

    In a script, call it under `if __name__ == "__main__":`, because spawned processes import the
    script. In a notebook, call it before anything has used an accelerator.

    Args:
        fn: a function at the top level of a module, or one that was typed in at a prompt.
        nproc: how many processes, on this machine; several machines are torchrun's work.
        args: what each process calls it with.

    Returns:
        what the processes returned, in the order of their ranks; tensors are copies.

    Raises:
        LaunchError: a rank has failed; it names the one that failed first. All have ended then.
        ConfigError: an argument cannot work, or this process is a rank itself.
    """
    _check_place(nproc)
    method = _start_method(fn)
    _check_arguments(fn, args, method)
    # Lives until the ranks have ended: they meet here.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        for number in range(nproc):
            environment = _environment(number, nproc, store.port)
            threads = 1 if method == "fork" else _threads(nproc)
            ranks.append(_start(method, number, (environment, threads, fn, args)))
        reports = _watch(ranks)
    except BaseException:
        _end(ranks, seconds=5.0, ask=True)
        raise
    _end(ranks, seconds=30.0)
    del store
    return [report.value for _, report in sorted(reports.items())]


def in_launched_process() -> bool:
    """Whether a launcher (torchrun, or `launch`) has made this process one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    """Whether torchrun has started this process in the place of one that was lost."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def local_place() -> tuple[int, int]:
    """This process's number among the ranks of its machine, and how many those are."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _start_method(fn: Callable[..., Any]) -> str:
    script = getattr(sys.modules["__main__"], "__file__", None)
    if fn.__module__ != "__main__" or (script and os.path.exists(script)):
        return "spawn"
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"{_name(fn)} was typed in at a prompt, and this system cannot fork. Put it into a "
            "module and import it from there."
        )
    if torch.accelerator.is_available() and _accelerator_in_use():
        raise ConfigError(
            "An accelerator was already used in this session, so its processes cannot be forked. "
            "Restart the kernel and call launch() first, or put the function into a module."
        )
    return "fork"


def _accelerator_in_use() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator)
    initialized = getattr(module, "is_initialized", None)
    return bool(initialized and initialized())


def _check_place(nproc: int) -> None:
    if nproc < 1:
        raise ConfigError(f"nproc is {nproc}: it counts processes, at least 1.")
    if in_launched_process():
        raise ConfigError(
            "launch() was called in a process that a launcher started. Call the function "
            "itself: torchrun (or an outer launch) has made the ranks already."
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A rank that imports the script that starts it: it would start ranks of its own.
        raise ConfigError(
            "launch() was called while a rank process imports the script. Put the call under "
            '`if __name__ == "__main__":`, and everything else that only the first process is to '
            "do; the function that the ranks run stays above it."
        )


def _check_arguments(fn: Callable[..., Any], args: tuple[Any, ...], method: str) -> None:
    """Find out here what a spawned process could only say in a traceback."""
    if method == "fork":
        return
    try:
        pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{_name(fn)} and its arguments cannot be sent to other processes: {error}. Use a "
            "function at the top level of a module, and arguments that pickle can copy."
        ) from error


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch's own switch for "the store exists already, connect to it".
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "onecopy",
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would look for this machine's address by its host name, which may not resolve.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _threads(nproc: int) -> int:
    wish = os.environ.get("OMP_NUM_THREADS", "")
    if wish.isdigit() and int(wish) > 0:
        return int(wish)
    return max(1, _cores() // nproc)


def _cores() -> int:
    """Those that this process may run on: a scheduler often gives it only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(method: str, number: int, work: tuple[Any, ...]) -> _Rank:
    context: BaseContext = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(  # type: ignore[attr-defined]  # typeshed: only on subclasses
        target=_run_rank, args=(sender, *work), name=f"rank {number}", daemon=False
    )
    process.start()
    # Only the rank may hold this end, or its death would not close the pipe.
    sender.close()
    return _Rank(number=number, process=process, reports=receiver)


def _run_rank(
    reports: connection.Connection[Any, Any],
    environment: dict[str, str],
    threads: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The main function of a rank process."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    try:
        report: _Report = _Done(value=fn(*args))
        _wait_for_threads()
    except KeyboardInterrupt:
        # The launcher got the same Ctrl-C and speaks for all ranks.
        os._exit(130)
    except BaseException as error:
        report = _describe(error)
    try:
        # Plain pickle: multiprocessing's own would pass tensors by shared memory, which goes with
        # this process.
        message = pickle.dumps(report)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = f"{_name(fn)} returned something that cannot be sent back: {error}"
        report = _Failed(when=time.time(), what=advice, details="")
        message = pickle.dumps(report)
    reports.send_bytes(message)
    reports.close()
    if isinstance(report, _Failed):
        sys.stdout.flush()
        # A normal exit would first wait for collectives that a failed rank can never finish.
        os._exit(1)


def _wait_for_threads() -> None:
    """What still runs is part of the work: a checkpoint that is being written, for one.

    Not the workers of a pool that is still there: they wait for more until the process exits,
    which finishes what they have begun.
    """
    workers = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon or thread in workers:
            continue
        thread.join()


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank process always has a launcher"
    connection.wait([parent.sentinel])
    os._exit(1)


def _describe(error: BaseException) -> _Failed:
    what = f"{type(error).__name__}: {error}"
    # Our own errors say what to do; a traceback would only hide that.
    details = "" if isinstance(error, OneCopyError) else traceback.format_exc()
    return _Failed(when=time.time(), what=what, details=details)


def _watch(ranks: list[_Rank]) -> dict[int, _Done]:
    """Wait for every rank's report; raise LaunchError after the first failure."""
    done: dict[int, _Done] = {}
    failed: dict[int, _Failed] = {}
    waiting = {rank.number: rank for rank in ranks}
    deadline: float | None = None
    while waiting:
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            break
        ready = connection.wait([rank.reports for rank in waiting.values()], timeout)
        for rank in [rank for rank in waiting.values() if rank.reports in ready]:
            del waiting[rank.number]
            report = _receive(rank)
            if isinstance(report, _Done):
                done[rank.number] = report
            else:
                failed[rank.number] = report
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failed:
        raise LaunchError(_summary(failed, len(ranks)))
    return done


def _receive(rank: _Rank) -> _Report:
    try:
        report: _Report = pickle.loads(rank.reports.recv_bytes())
    except EOFError:
        # Dead without a word: nothing else can have been first, so it counts as before all others.
        rank.process.join()
        return _Failed(when=0.0, what=_death(rank.process.exitcode), details="")
    return report


def _death(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return (
            f"the process ended with exit code {exitcode} before its function had returned, "
            "without telling why; see what it has printed above. Exit code 1 is most often a "
            "script that a new process cannot import: launch() belongs under "
            '`if __name__ == "__main__":`, and the function that it is given stays above that. Any '
            "code may come from os._exit(), or from a library that ends the process"
        )
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"  # a real-time one has no name
    return f"the process was ended by {name}{HINTS.get(name, '')}"


def _summary(failed: dict[int, _Failed], nproc: int) -> str:
    first = min(failed, key=lambda number: failed[number].when)
    others = sorted(number for number in failed if number != first)
    lines = [f"rank {first} of {nproc} failed: {failed[first].what}"]
    if failed[first].details:
        lines += ["", failed[first].details.rstrip()]
    # Without a report nobody knows when: it may be the cause, and it may be the same one.
    silent = [number for number in others if failed[number].when == failed[first].when]
    later = [number for number in others if number not in silent]
    if silent:
        same = all(failed[number].what == failed[first].what for number in silent)
        lines += [
            "",
            f"({'the same with' if same else 'also gone without a word:'} {_ranks(silent)})",
        ]
    if later:
        lines += ["", f"(failed later, most likely because of rank {first}: {_ranks(later)})"]
    return "\n".join(lines)


def _ranks(numbers: list[int]) -> str:
    return "rank " + ", ".join(map(str, numbers))


def _end(ranks: list[_Rank], *, seconds: float, ask: bool = False) -> None:
    """Leave no process behind: give all together `seconds` to exit, asked or not, then insist."""
    if ask:
        for rank in ranks:
            rank.process.terminate()
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.reports.close()


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{getattr(fn, '__qualname__', repr(fn))}"
