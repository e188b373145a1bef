"""`onecopy train`, whose rank 1 writes its events into a pipe, and waits until they are read."""

from __future__ import annotations

import os
import sys
from typing import Any

import onecopy
from onecopy import api
from onecopy.cli import main
from onecopy.events import Event, add_sink

# Where the pipe lies, in the environment.
PIPE = "ONECOPY_TEST_PIPE"


def shard(model: Any, *arguments: Any, **settings: Any) -> Any:
    """As onecopy.shard; every event of the model goes into the pipe."""
    sharded = api.shard(model, *arguments, **settings)
    pipe = open(os.environ[PIPE], "w", buffering=1)  # until the process ends

    def write(event: Event) -> None:
        pipe.write(f"{event}\n")

    add_sink(sharded, write)
    return sharded


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        vars(onecopy)["shard"] = shard
    sys.exit(main(["train", *sys.argv[1:]]))
