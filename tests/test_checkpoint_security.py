"""A checkpoint is data: whatever somebody has put into one, loading it runs nothing of it.

What does not belong there is refused by name, and what is said of the stored bytes is not believed.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import onecopy
from onecopy.checkpoint.manifest import MANIFEST, Manifest, checksum
from onecopy.checkpoint.source import open_source
from onecopy.checkpoint.unpickle import load_object, read_metadata
from onecopy.checkpoint.values import read_tensor
from onecopy.errors import CheckpointError
from tests.pool import Pool

SOMEWHERE = Path("somewhere/.metadata")


class Calls:
    """Its pickle asks for a function to be called."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def touch(path: Path) -> Calls:
    """What an attacker would do; here it makes a file, which must not be there afterwards."""
    return Calls(os.system, f"touch {path}")


# Metadata: a pickle ---------------------------------------------------------------------------


def metadata_with(planner_data: Any) -> Metadata:
    return Metadata(state_dict_metadata={}, planner_data=planner_data)


class ByName(pickle.Pickler):
    """Names members of enums as early versions of Python 3.11 do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_members_of_enums_are_found_by_name() -> None:
    """Whichever Python has pickled them; nothing else is found so."""
    properties = TensorProperties(dtype=torch.float32)
    stream = io.BytesIO()
    ByName(stream).dump(
        Metadata({"a": TensorStorageMetadata(properties, torch.Size([0]), [])}, storage_data={})
    )
    assert b"getattr" in stream.getvalue()
    found: Any = read_metadata(SOMEWHERE, stream.getvalue()).state_dict_metadata["a"]
    assert found.properties == properties
    for kind, name in ((torch.Size, "numel"), (Metadata, "__init__"), (TensorProperties, "x")):
        with pytest.raises(CheckpointError, match=r"calls builtins\.getattr"):
            read_metadata(SOMEWHERE, pickle.dumps(metadata_with(Calls(getattr, kind, name))))


def test_functions_are_not_called(tmp_path: Path) -> None:
    """At the top and deep within what is allowed; by every way of naming one."""
    target = tmp_path / "made"
    with pytest.raises(CheckpointError, match=r"names (posix|nt)\.system.*Nothing of it was run"):
        read_metadata(SOMEWHERE, pickle.dumps(touch(target)))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        nested = metadata_with({"a": [OrderedDict(b=(touch(target),))]})
        with pytest.raises(CheckpointError):
            read_metadata(SOMEWHERE, pickle.dumps(nested, protocol=protocol))
    assert not target.exists()


GADGETS = {
    "eval": ("builtins", "eval"),
    "exec": ("builtins", "exec"),
    "import": ("importlib", "import_module"),
    "partial": ("functools", "partial"),
    "reconstruct": ("copyreg", "_reconstructor"),
    "torch.load": ("torch", "load"),
    "torch.hub": ("torch.hub", "load"),
    "storage": ("torch.storage", "_load_from_bytes"),
    "shell of torch": ("torch.utils.collect_env", "run"),
    "method of what is allowed": ("collections", "OrderedDict.fromkeys"),
    "module through what is allowed": ("torch.distributed.checkpoint.metadata", "os.system"),
    "neighbour of what is allowed": ("torch.distributed.checkpoint.filesystem", "FileSystem"),
    "a path that opens files": ("pathlib", "Path"),
}


@pytest.mark.parametrize("name", GADGETS)
def test_nothing_else_can_be_named(name: str) -> None:
    """By GLOBAL, and by STACK_GLOBAL, which takes dotted names."""
    module, attribute = GADGETS[name]
    spoken = f"{module}.{attribute}"
    old = f"c{module}\n{attribute}\n.".encode()
    new = b"".join(
        (
            b"\x80\x04",
            *(b"\x8c" + bytes([len(w)]) + w.encode() for w in (module, attribute)),
            b"\x93.",
        )
    )
    for data in (old, new):
        with pytest.raises(CheckpointError) as caught:
            read_metadata(SOMEWHERE, data)
        assert f"names {spoken}" in str(caught.value)


ALLOWED_TYPES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    filesystem._StorageInfo,
    OrderedDict,
    torch.Size,
    torch.float32,
)


def named(thing: Any) -> bytes:
    """A pickle's beginning that puts a class, or a dtype, on the stack."""
    if isinstance(thing, torch.dtype):
        return b"ctorch\n" + str(thing).removeprefix("torch.").encode() + b"\n"
    return f"c{thing.__module__}\n{thing.__qualname__}\n".encode()


OTHERS = (
    b"ctorch.serialization\n_get_layout\n",
    b"cpathlib\nPosixPath\n",
    b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
)


@pytest.mark.parametrize(
    "begin",
    [*map(named, ALLOWED_TYPES), *OTHERS],
    ids=lambda one: one.split(b"\n")[1].decode(),
)
def test_what_is_allowed_cannot_be_changed(begin: bytes) -> None:
    """BUILD sets attributes of whatever is on the stack: of a class, for the whole program."""
    plain = b"}X\x06\x00\x00\x00__eq__K\x01s"  # {"__eq__": 1}
    states = (plain, b"(N" + plain + b"t", b"(" + plain + plain + b"t")
    before = {kind: dict(vars(kind)) for kind in ALLOWED_TYPES if isinstance(kind, type)}
    before |= {
        kind: dict(vars(kind)) for kind in (torch.serialization._get_layout, type(SOMEWHERE))
    }
    for state in states:
        with pytest.raises(CheckpointError):
            read_metadata(SOMEWHERE, begin + state + b"b.")
    for kind, attributes in before.items():
        assert dict(vars(kind)) == attributes


@pytest.mark.parametrize("kind", ALLOWED_TYPES[:-3])
def test_classes_cannot_be_called_with_arguments(kind: type) -> None:
    """A constructor does more than to hold what it is given."""
    for call in (b"(K\x01tR.", b"(K\x01t\x81."):
        with pytest.raises(CheckpointError, match=f"calls {kind.__name__}"):
            read_metadata(SOMEWHERE, named(kind) + call)


def test_odd_pickles_are_refused() -> None:
    """Cut off, of other things, endless, with references to nothing."""
    good = pickle.dumps(metadata_with(None))
    for data in (
        b"",
        good[:-1],
        good[: len(good) // 2],
        b"\x80\x04\x95" + b"\xff" * 8,
        b"B\xff\xff\xff\x7f.",
        b"h\x05.",
        b"P0\n.",
        b"\x82\x01.",
        b"(" * 100_000,
        pickle.dumps({"state_dict_metadata": {}}),
        pickle.dumps([1]),
        b"not a pickle",
    ):
        with pytest.raises(CheckpointError, match="Nothing of it was run"):
            read_metadata(SOMEWHERE, data)


def stored(tmp_path: Path, **tensors: Any) -> Path:
    """A folder as torch.distributed.checkpoint writes it."""
    folder = tmp_path / "stored"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)


def test_what_torch_writes_is_read_as_it_is(tmp_path: Path) -> None:
    """All dtypes, layouts of memory, numbers of dimensions, objects, nested dicts."""
    plain = {dtype: torch.zeros(2, 3, dtype=getattr(torch, dtype)) for dtype in DTYPES}
    shapes = {str(size): torch.zeros(size) for size in ((), (0,), (1,), (2, 0, 3), (1, 2, 3, 4, 5))}
    last = {"last": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)}
    folder = stored(tmp_path, plain=plain, shapes=shapes, last=last, deep={"er": [1, {"x": "y"}]})
    data = (folder / ".metadata").read_bytes()
    expected = pickle.loads(data)
    found = read_metadata(folder / ".metadata", data)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    assert found.version == expected.version
    assert type(next(iter(found.storage_data))) is MetadataIndex


# What the metadata says -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stored(tmp_path, weight=torch.arange(12.0).view(3, 4), other=torch.ones(4))


def rewrite(folder: Path, change: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, **values: Any) -> None:
    """Change what is said of the place of `weight`."""
    index = MetadataIndex("weight", torch.Size((0, 0)))
    for name, value in values.items():
        setattr(metadata.storage_data[index], name, value)


def entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["weight"]


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Other parts, all of which lie where the only one lay."""

    def change(metadata: Metadata) -> None:
        info = metadata.storage_data[MetadataIndex("weight", torch.Size((0, 0)))]
        entry(metadata).chunks = [chunk(*box) for box in boxes]
        for offsets, _ in boxes:
            metadata.storage_data[MetadataIndex("weight", torch.Size(offsets))] = info

    return change


LIES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "absolute path": (lambda m: place(m, relative_path="/etc/passwd"), "outside of its folder"),
    "path above": (lambda m: place(m, relative_path="../stored/__0_0.distcp"), "outside"),
    "path within": (lambda m: place(m, relative_path="a/../../x"), "outside"),
    "path with an end": (lambda m: place(m, relative_path="__0_0.distcp\0"), "outside"),
    "no path": (lambda m: place(m, relative_path=""), "outside"),
    "path of another type": (lambda m: place(m, relative_path=7), "damaged"),
    "no such file": (lambda m: place(m, relative_path="gone"), "gone cannot be read: No such file"),
    "a folder": (lambda m: place(m, relative_path="."), "is no regular file"),
    "beyond the end": (lambda m: place(m, offset=1 << 50), "is cut off: it has"),
    "longer than all memory": (lambda m: place(m, length=1 << 60), "is cut off: it has"),
    "negative": (lambda m: place(m, offset=-1), "is at "),
    "a number that is none": (lambda m: place(m, length=1.5), "is at "),
    "extension": (lambda m: place(m, transform_descriptors=["zstd"]), "the extension 'zstd'"),
    "no place": (lambda m: m.storage_data.clear(), "does not say where weight is"),
    "other size": (lambda m: setattr(entry(m), "size", torch.Size((3, 5))), "holds 12 of the 15"),
    "no size": (lambda m: setattr(entry(m), "size", (3, 4)), "has the size (3, 4)"),
    "other dtype": (
        lambda m: setattr(entry(m).properties, "dtype", torch.int32),
        "is torch.float32 [3, 4], where .metadata says torch.int32 [3, 4]",
    ),
    "no dtype": (lambda m: setattr(entry(m).properties, "dtype", "float"), "no dtype"),
    "missing part": (chunks(((0, 0), (2, 4))), "holds 8 of the 12 elements"),
    "part twice": (
        chunks(((0, 0), (2, 4)), ((1, 0), (1, 4))),
        "holds parts of weight twice, those from [0, 0] and [1, 0] overlap",
    ),
    "parts that are all of it": (
        chunks(((0, 0), (2, 4)), ((2, 0), (1, 4))),
        "weight in ",
    ),
    "part of other dimensions": (chunks(((0,), (12,))), "another number of dimensions"),
    "part larger than all": (chunks(((0, 0), (3, 1 << 40))), "where .metadata says"),
    "no parts": (chunks(), "holds 0 of the 12"),
    "another tensor's place": (
        lambda m: place(m, **vars(m.storage_data[MetadataIndex("other", torch.Size((0,)))])),
        "is torch.float32 [4], where .metadata says torch.float32 [3, 4]",
    ),
    "no tensor": (
        lambda m: m.state_dict_metadata.update(weight=copy.copy(MetadataIndex("a"))),
        "weight is a MetadataIndex",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_what_is_said_is_compared_with_what_is_there(folder: Path, name: str) -> None:
    """Or one would train on another tensor, on a part of one, or run out of memory."""
    change, message = LIES[name]
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        source = open_source(folder)
        assert isinstance(source.metadata, Metadata)
        read_tensor(source, "weight")
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_links_are_followed_and_pipes_are_not_waited_for(folder: Path) -> None:
    """Stores of files with shared contents are made of links; nobody writes into a pipe."""
    file = folder / "__0_0.distcp"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")
    assert (
        read_tensor(open_source(folder), "weight").tolist()
        == torch.arange(12.0).view(3, 4).tolist()
    )
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is no regular file"):
        read_tensor(open_source(folder), "weight")
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(CheckpointError, match=r"has no onecopy\.json, \.metadata"):
        open_source(folder)


# Items: what torch.save has written -----------------------------------------------------------


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


class Mine:
    """A class of the program."""


def test_objects_are_plain_data(tmp_path: Path) -> None:
    """Numbers, strings, containers, tensors, arrays; else it says what was refused."""
    plain = {
        "tensor": torch.arange(3),
        "array": numpy.arange(3),
        "scalar": numpy.float64(0.5),
        "nested": [1, (2.0, "three"), {4: None, "five": {True, b"six"}}],
        "dtype": torch.bfloat16,
        "size": torch.Size((1, 2)),
        "ordered": OrderedDict(a=1),
    }
    found = load_object("extra", saved(plain))
    assert found["nested"] == plain["nested"]
    assert torch.equal(found["tensor"], plain["tensor"])
    assert numpy.array_equal(found["array"], plain["array"])
    assert {key: found[key] for key in ("scalar", "dtype", "size", "ordered")} == {
        key: plain[key] for key in ("scalar", "dtype", "size", "ordered")
    }
    target = tmp_path / "made"
    for hostile, name in (
        (touch(target), "posix.system"),
        ({"a": [touch(target)]}, "posix.system"),
        (Calls(eval, "1"), "eval"),
        (Calls(getattr, Path, "write_text"), "getattr"),
        (Mine(), "Mine"),
        (Calls(torch.load, "x"), "torch.serialization.load"),
        (numpy.array([touch(target)], dtype=object), "Can only build Tensor"),
    ):
        with pytest.raises(CheckpointError) as caught:
            load_object("extra in somewhere", saved(hostile))
        assert "extra in somewhere cannot be read as plain data" in str(caught.value)
        assert name in str(caught.value)
        assert "never runs code" in str(caught.value)
    assert not target.exists()


def test_classes_that_the_program_trusts_are_read() -> None:
    """torch.serialization.add_safe_globals is the program's own word, not the checkpoint's."""
    mine = Mine()
    mine.value = 3  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([Mine]):
        assert load_object("extra", saved(mine)).value == 3


def repacked(data: bytes, compression: int, members: dict[str, bytes] | None = None) -> bytes:
    """The same archive, packed otherwise, with other contents of some members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for info in old.infolist():
            contents = (members or {}).get(info.filename.partition("/")[2], old.read(info))
            new.writestr(info.filename, contents)
    return stream.getvalue()


def test_bombs_are_refused() -> None:
    """A few bytes that become gigabytes, or say that they are."""
    bomb = repacked(saved(torch.zeros(1 << 20)), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 14
    with pytest.raises(CheckpointError, match="it is compressed"):
        load_object("weight", bomb)
    good = saved(torch.zeros(4))
    assert load_object("weight", repacked(good, zipfile.ZIP_STORED)).tolist() == [0.0] * 4
    pickled = zipfile.ZipFile(io.BytesIO(good)).read("archive/data.pkl")
    for count in (b"M\xff\xff", b"J\xff\xff\xff\x7f"):
        claim = pickled.replace(b"K\x04", count)
        assert claim != pickled
        with pytest.raises(CheckpointError, match="cannot be read as plain data"):
            load_object("weight", repacked(good, zipfile.ZIP_STORED, {"data.pkl": claim}))
    old = saved([1, 2], _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not a zip file"):
        load_object("weight", old)
    for end in (0, 1, len(good) // 2, len(good) - 1):
        with pytest.raises(CheckpointError):
            load_object("weight", good[:end])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("text", "str"),
        ([torch.zeros(3, 4)], "list"),
        (torch.zeros(1, 4), "torch.float32 [1, 4]"),
        (torch.zeros(4), "torch.float32 [4]"),
        (torch.zeros(()), "torch.float32 []"),
        (torch.zeros(3, 4, 1), "torch.float32 [3, 4, 1]"),
        (torch.zeros(3, 4, dtype=torch.float64), "torch.float64 [3, 4]"),
        (torch.zeros(3, 4).to_sparse(), "torch.float32 [3, 4], torch.sparse_coo"),
        (torch.zeros(3, 4, device="meta"), "torch.float32 [3, 4], meta"),
    ],
    ids=str,
)
def test_items_are_what_the_metadata_says(folder: Path, value: Any, found: str) -> None:
    """copy_ would broadcast a row over all of them, and cast."""
    data = saved(value)
    (folder / "item").write_bytes(data)
    rewrite(folder, lambda m: place(m, relative_path="item", offset=0, length=len(data)))
    with pytest.raises(CheckpointError) as caught:
        read_tensor(open_source(folder), "weight")
    assert f"weight in {folder}/item is {found}" in str(caught.value)


# The manifest ---------------------------------------------------------------------------------


def manifest(**values: Any) -> bytes:
    """With a right checksum: an attacker can make one."""
    good = Manifest(
        step=1, time=0.0, version="0", torch_version="0", world_size=1, models={}, extras=["a"]
    )
    entries = json.loads(good.to_bytes())
    del entries["crc32"]
    before = json.dumps(entries | values)[:-1].encode()
    return before + f',\n"crc32":{checksum(before)}}}\n'.encode()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": "1"}, "'1' is no int"),
        ({"world_size": None}, "None is no int"),
        ({"extras": "a"}, "'a' is no list"),
        ({"extras": [1]}, "1 is no str"),
        ({"models": {"": []}}, r"\[\] is no dict"),
        ({"models": []}, "damaged"),
        ({"files": {"../x": {"num_bytes": 1, "items": []}}}, "'../x' is no name of a file"),
        ({"files": {"/x": {"num_bytes": 1, "items": []}}}, "'/x' is no name of a file"),
        ({"files": {"x": {"items": []}}}, "damaged"),
        ({"configs": {"": {"../../.bashrc": "x"}}}, "'../../.bashrc' is no name of a file"),
        ({"unknown": 1}, "damaged"),
        ({"format": 99}, "update onecopy"),
        ({"aliases": {"a": ["b"]}}, "no str"),
    ],
)
def test_manifests_are_looked_at(values: dict[str, Any], message: str) -> None:
    path = Path("run") / MANIFEST
    assert Manifest.from_bytes(path, manifest()).extras == ["a"]
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_bytes(path, manifest(**values))


def test_manifests_that_are_too_deep() -> None:
    deep = b"[" * 100_000
    text = b'{"step":1,"models":' + deep
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(Path(MANIFEST), text + f',\n"crc32":{checksum(text)}}}'.encode())


# All of it, on ranks --------------------------------------------------------------------------


def load_hostile(folder: str, where: str) -> str:
    """A checkpoint that was changed by somebody who can make checksums."""
    root, target = Path(folder) / "run", Path(folder) / "made"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    onecopy.shard(model, optimizer)
    step = onecopy.save(root, model, optimizer, extra={"a": 1})
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        _poison(step, where, touch(target))
    torch.distributed.barrier()
    try:
        onecopy.load(root, model, optimizer)
    except CheckpointError as error:
        message = str(error)
    assert not target.exists()
    return message


def _poison(step: Path, where: str, hostile: Calls) -> None:
    names = json.loads((step / MANIFEST).read_bytes())
    del names["crc32"]
    metadata = pickle.loads((step / ".metadata").read_bytes())
    if where == "metadata":
        metadata.planner_data = {"a": hostile}
    else:
        index = next(one for one in metadata.storage_data if one.fqn == where)
        info = metadata.storage_data[index]
        path = step / info.relative_path
        data = saved(hostile)
        info.offset, info.length = path.stat().st_size, len(data)
        names["files"][path.name]["items"].append((info.offset, len(data), checksum(data)))
        with path.open("ab") as file:
            file.write(data)
    packed = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(packed)
    names["files"][".metadata"] = {
        "num_bytes": len(packed),
        "items": [(0, len(packed), checksum(packed))],
    }
    fresh = Manifest(**{**names, "files": {}})
    files = {
        name: onecopy.checkpoint.manifest.FileItems(one["num_bytes"], one["items"])
        for name, one in names["files"].items()
    }
    object.__setattr__(fresh, "files", files)
    (step / MANIFEST).write_bytes(fresh.to_bytes())


@pytest.mark.parametrize(
    "where",
    ["metadata", "0.weight", "onecopy.extra.0", "onecopy.rng.1", "optimizer.param_groups.0.lr"],
)
def test_a_hostile_checkpoint_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path, where: str
) -> None:
    """Nothing of it has run on any of them."""
    first, second = pool.run(2, load_hostile, str(tmp_path), where)
    assert first == second
    assert "posix.system" in first
    assert str(tmp_path / "run" / "step-00000000") in first
    if where != "metadata":
        assert where in first
