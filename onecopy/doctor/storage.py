"""What folders lie on, and how fast it is: mount, file system, kind of disk, free space, speed."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from onecopy.doctor.facts import DiskSpeed, Folder
from onecopy.doctor.files import within
from onecopy.memory.system_files import ROOT, read_text

__all__ = ["look_at_folders", "measure_disk"]

ANSWER_SECONDS = 5.0
DIRECTION_SECONDS = 4.0  # a disk that is slower than that is measured with fewer bytes
REQUEST_BYTES = 8 << 20
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
OVER_NETWORK = re.compile(
    r"nfs.*|cifs|smb.*|lustre|gpfs|beegfs.*|ceph.*|glusterfs|afs|9p|virtiofs|fuse\..+"
)
CONTAINER_LAYERS = {"overlay", "aufs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    point: str
    number: str  # of its device, as major:minor
    file_system: str
    source: str


def look_at_folders(
    folders: Mapping[Path, str], num_bytes: int, root: Path = ROOT
) -> tuple[Folder, ...]:
    """What each folder lies on; each mount is measured once, in a folder that can be written.

    Args:
        folders: what each is looked at for.
        num_bytes: to write and to read for a measurement; 0 for none.
    """
    found: list[Folder] = []
    measured: dict[str, str] = {}
    for path, purpose in folders.items():
        try:
            folder = within(ANSWER_SECONDS, lambda p=path, u=purpose: _look(p, u, root))  # type: ignore[misc]
        except OSError as error:
            found.append(Folder(path=str(path), purpose=purpose, not_measured=str(error)))
            continue
        if folder.mount in measured:
            found.append(replace(folder, not_measured=f"as {measured[folder.mount]}"))
            continue
        folder = _measured(folder, num_bytes)
        if folder.mount is not None and folder.speed is not None:
            measured[folder.mount] = folder.path
        found.append(folder)
    return tuple(found)


def _look(path: Path, purpose: str, root: Path) -> Folder:
    path = path.resolve()
    usage = shutil.disk_usage(path)
    mount = _mount_of(path, root)
    name = None if mount is None else _disk(mount.number, root)
    return Folder(
        path=str(path),
        purpose=purpose,
        mount=None if mount is None else mount.point,
        file_system=None if mount is None else mount.file_system,
        device=name or (None if mount is None else mount.source),
        kind=None if mount is None else _kind(mount.file_system, name, root),
        total=usage.total,
        free=usage.free,
    )


def _mount_of(path: Path, root: Path) -> _Mount | None:
    """The last mount whose point is above the path: a later one hides those before it."""
    found = None
    for mount in _mounts(root):
        if path.is_relative_to(mount.point) and (
            found is None or len(mount.point) >= len(found.point)
        ):
            found = mount
    return found


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 2:
            yield _Mount(
                point=_unescaped(fields[4]),
                number=fields[2],
                file_system=kind[0],
                source=_unescaped(kind[1]),
            )


def _unescaped(text: str) -> str:
    """The kernel writes blanks, for one, as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _disk(number: str, root: Path) -> str | None:
    """The whole disk that a device is, or is a part of; the first below a mapped one."""
    start = root / "sys/dev/block" / number
    if not start.exists():
        return None
    device = start.resolve()
    if (device / "partition").exists():
        device = device.parent
    below = sorted((device / "slaves").glob("*")) if (device / "slaves").is_dir() else []
    if below:
        part = below[0].resolve()
        return part.parent.name if (part / "partition").exists() else part.name
    return device.name


def _kind(file_system: str, disk: str | None, root: Path) -> str | None:
    if file_system in IN_MEMORY:
        return "memory"
    if file_system in CONTAINER_LAYERS:
        return "container layer"
    if OVER_NETWORK.fullmatch(file_system):
        return "network"
    if disk is None:
        return None
    if disk.startswith("nvme"):
        return "NVMe"
    if disk.startswith(("vd", "xvd")):
        return "virtual disk"
    rotates = read_text(root / "sys/block" / disk / "queue/rotational")
    return {"1": "hard disk", "0": "SSD"}.get(rotates or "")


# Measuring ------------------------------------------------------------------------------------


def _measured(folder: Folder, num_bytes: int) -> Folder:
    """With its speed, or the reason why there is none."""
    if not num_bytes:
        return replace(folder, not_measured="switched off")
    if folder.kind == "memory":
        return replace(folder, not_measured="it is host memory")
    if folder.free is not None and folder.free < 4 * num_bytes:
        return replace(folder, not_measured="too little space is free")
    try:
        speed = within(
            4 * DIRECTION_SECONDS + ANSWER_SECONDS,
            lambda: measure_disk(Path(folder.path), num_bytes),
        )
    except OSError as error:
        return replace(folder, not_measured=error.strerror or str(error))
    return replace(folder, speed=speed)


def measure_disk(folder: Path, num_bytes: int) -> DiskSpeed:
    """Write and read a file from its start to its end, in requests of 8 MiB.

    Past the system's cache where the file system allows it; else what is written is flushed, and
    dropped from the cache before it is read. The file has no name any more while it is used, so
    nothing stays behind, whatever happens.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    # Anonymous memory lies on a page, as O_DIRECT demands. Zeros could be stored as nothing.
    block = mmap.mmap(-1, min(REQUEST_BYTES, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE))
    block.write(os.urandom(len(block)))
    with _nameless_file(folder) as (handle, is_direct):
        requests = max(1, num_bytes // len(block))
        done, write_seconds = _write(handle, block, requests)
        if not is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        read_seconds = _read(handle, block, done)
    total = done * len(block)
    return DiskSpeed(
        num_bytes=total,
        write=total / write_seconds,
        read=total / read_seconds,
        is_direct=is_direct,
    )


@contextmanager
def _nameless_file(folder: Path) -> Iterator[tuple[int, bool]]:
    """(handle, whether it goes past the cache)."""
    handle, name = tempfile.mkstemp(prefix=".onecopy-doctor-", dir=folder)
    try:
        direct = getattr(os, "O_DIRECT", 0)
        if direct:
            try:
                second = os.open(name, os.O_RDWR | direct)
            except OSError:
                direct = 0  # tmpfs and some network file systems know no O_DIRECT
            else:
                os.close(handle)
                handle = second
        elif sys.platform == "darwin":
            direct = _without_cache(handle)
        os.unlink(name)
        yield handle, bool(direct)
    finally:
        os.close(handle)


def _without_cache(handle: int) -> int:
    """macOS's way to read and write past the cache."""
    import fcntl

    try:
        fcntl.fcntl(handle, getattr(fcntl, "F_NOCACHE", 48), 1)
    except OSError:
        return 0
    return 1


def _write(handle: int, block: mmap.mmap, requests: int) -> tuple[int, float]:
    """How many requests were written, and in how long."""
    begin, done = time.perf_counter(), 0
    while done < requests:
        _whole(os.pwrite(handle, block, done * len(block)), block)
        done += 1
        if time.perf_counter() - begin > DIRECTION_SECONDS:
            break
    os.fsync(handle)
    return done, time.perf_counter() - begin


def _read(handle: int, block: mmap.mmap, requests: int) -> float:
    begin = time.perf_counter()
    for number in range(requests):
        _whole(os.preadv(handle, [block], number * len(block)), block)
    return time.perf_counter() - begin


def _whole(num_bytes: int, block: mmap.mmap) -> None:
    if num_bytes != len(block):
        raise OSError(0, f"a request of {len(block)} bytes ended after {num_bytes}")
