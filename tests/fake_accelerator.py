"""An accelerator that is not there: tensors without values whose device is not the host.

What mixes tensors of both devices raises, as it would on a real one; streams do nothing. It
changes torch for good, so it belongs into a process of its own. Leans on private parts of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import onecopy.core.restore
import onecopy.core.worker
from onecopy.core.owned_slice import OwnedSlice
from onecopy.core.precision import map_tensors
from onecopy.simulator.fake import fake_tensors

NAME = "fakeaccelerator"
DEVICE = f"{NAME}:0"


class Stream:
    """Of nothing; an event, too."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """At once."""

    def synchronize(self) -> None:
        """At once."""

    def record_event(self) -> Stream:
        """This one does."""
        return self

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class AtOnce:
    """A thread that has ended when it is asked: modes of torch belong to one thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it."""
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self) -> None:
        """Nothing to end."""


def _take_master(self: OwnedSlice, master: torch.Tensor) -> None:
    """Fake tensors of two devices cannot trade their data, as real ones can: pieces are new."""
    self._master = master
    for place in self._layout.pieces(self.rank):
        trains = self.pieces[place.index].requires_grad
        self.pieces[place.index] = nn.Parameter(self._part(place), requires_grad=trains)


@contextmanager
def fake_accelerator() -> Iterator[str]:
    """Inside, tensors have no values and may lie on the device whose name this gives."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    make = torch._C._acc.create_empty_tensor
    library.impl(
        "empty_strided", lambda size, stride, dtype=None, **_: make(size, dtype), "PrivateUse1"
    )
    library.impl("copy_", lambda target, source, non_blocking=False: target, "PrivateUse1")
    torch.Stream = Stream
    torch.accelerator.current_stream = lambda device=None: Stream()
    torch.Tensor.record_stream = lambda self, stream: None
    onecopy.core.worker.ThreadPoolExecutor = AtOnce
    OwnedSlice._take_master = _take_master
    # There are no values to pickle.
    onecopy.core.restore._pack = lambda value: value
    onecopy.core.restore._unpack = lambda value, device: map_tensors(
        value, lambda one: one.to(device) if one.dim() else one
    )
    with fake_tensors():
        yield DEVICE
