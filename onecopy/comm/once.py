"""What some ranks do while the others wait, for as long as it takes: hours, for a large corpus.

A collective would end at the process group's timeout. These waits look into its store instead,
and end with an error as soon as a rank that works has one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from onecopy.comm.compare import gather_objects
from onecopy.comm.groups import Group, as_group
from onecopy.comm.waits import Wait
from onecopy.errors import ConfigError, OneCopyError

__all__ = ["do_while_others_wait", "world"]

LONGEST_PAUSE = 0.5  # seconds between two looks


def world() -> Group:
    """All ranks of the default process group, or this process alone where there is none."""
    group = as_group(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    return group or Group(None, (0,), 0)


def do_while_others_wait(group: Group, works: bool, work: Callable[[], None]) -> None:
    """Call `work` on the ranks that say `works`; come back when all of them are done.

    A collective of the group's ranks.

    Raises:
        ConfigError: on every rank, what `work` has raised on one.
    """
    if group.process_group is None:
        if works:
            work()
        return
    said = gather_objects(group, (works, uuid.uuid4().hex))
    # A name that no run before has left in a store that outlives processes.
    key = f"onecopy/once/{said[0][1]}"
    store = dist.distributed_c10d._get_default_store()
    if works:
        failure: str | None = "it ended before it was done"
        try:
            work()
            failure = None
        except OneCopyError as error:
            failure = str(error)
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            store.set(f"{key}/{group.rank}", json.dumps(failure))
    with Wait("agree", group.ranks):
        for rank in (rank for rank, (does, _) in enumerate(said) if does):
            _await(store, f"{key}/{rank}", group.ranks[rank])


def _await(store: dist.Store, key: str, rank: int) -> None:
    pause = 0.005
    while not store.check([key]):
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, 1.5 * pause)
    failure: str | None = json.loads(store.get(key))
    if failure is not None:
        raise ConfigError(f"rank {rank}: {failure}")
