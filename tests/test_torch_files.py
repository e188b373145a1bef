"""Files of torch.save, read without running anything of them."""

from __future__ import annotations

import argparse
import builtins
import collections
import enum
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import set_crc32_options

from onecopy.errors import CheckpointError
from onecopy.memory import torch_files
from onecopy.memory.torch_files import (
    Inert,
    TensorInFile,
    check_archive,
    read_torch_file,
    view_of_bytes,
)


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def value(tensor: TensorInFile) -> torch.Tensor:
    """All of a tensor, contiguous."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.read(target)
    return target


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint16,
    torch.int8,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = (torch.arange(24).reshape(2, 3, 4) % 7).to(dtype)
    (found,) = read_torch_file(save(tmp_path / "t.pt", [saved]))
    assert found.shape == (2, 3, 4) and found.dtype is dtype
    assert torch.equal(value(found).view(torch.uint8), saved.view(torch.uint8))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "columns": lambda t: t[:, :, 1:3],
    "every second": lambda t: t[::2, :, ::2],
    "expanded": lambda t: t[:1].expand(4, 5, 6),
    "one element": lambda t: t[2, 3, 4],
    "empty": lambda t: t[:0],
    "channels last": lambda t: t[None].to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("span", [1 << 22, 5], ids=["small", "larger than the buffer"])
def test_views_of_storages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str, span: int
) -> None:
    monkeypatch.setattr(torch_files, "SPAN_NUMEL", span)
    saved = VIEWS[view](torch.arange(120.0).reshape(4, 5, 6))
    found = read_torch_file(save(tmp_path / "t.pt", saved))
    assert torch.equal(value(found), saved)
    # Into a target that is laid out otherwise, in another dtype.
    target = torch.zeros([n + 1 for n in saved.shape], dtype=torch.float64)
    for dim, size in enumerate(saved.shape):
        target = target.narrow(dim, 1, size)
    found.read(target)
    assert torch.equal(target, saved.double())


def test_a_part_reads_its_bytes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.randn(100, 10)
    found = read_torch_file(save(tmp_path / "t.pt", saved))
    num_bytes = []
    read_part = torch_files.StoredTensor.read_part
    monkeypatch.setattr(
        torch_files.StoredTensor,
        "read_part",
        lambda *a: num_bytes.append(read_part(*a)),
    )
    target = torch.empty(7, 10)
    found.part((20, 0), (7, 10)).read(target)
    assert torch.equal(target, saved[20:27]) and num_bytes == [280]


def test_plain_values_are_themselves(tmp_path: Path) -> None:
    content = {
        "numbers": [1, -(2**40), 2**70, 0.5, True, None],
        "text": "\u00e4",
        "bytes": b"\x00\xff",
        "tuple": (1, (2,), ()),
        "size": torch.Size([2, 3]),
        "ordered": collections.OrderedDict(b=1, a=2),
        "dtype": torch.bfloat16,
        "numpy": [np.float64(0.1), np.float32(0.5), np.int64(-3), np.bool_(True)],
        7: "a number as a key",
    }
    found = read_torch_file(save(tmp_path / "t.pt", content))
    assert found == {**content, "size": (2, 3)}
    assert [type(n) for n in found["numpy"]] == [float, float, int, bool]


def test_parameters_and_state_dicts(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    linear.weight.note = "an attribute"
    content = {"parameter": linear.weight, "state": linear.state_dict()}
    found = read_torch_file(save(tmp_path / "t.pt", content))
    assert torch.equal(value(found["parameter"]), linear.weight)
    assert list(found["state"]) == ["weight", "bias"]
    assert found["state"]["weight"] == found["parameter"], "one storage, one place"


class Colour(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        pass


class Words(list):
    pass


def test_objects_are_inert(tmp_path: Path) -> None:
    inner = Outer.Inner()
    inner.tensor = torch.ones(3)
    words = Words(["a"])
    words.language = "none"
    content = {
        "namespace": argparse.Namespace(seed=1),
        "path": Path("somewhere"),
        "enumeration": Colour.RED,
        "inner": inner,
        "dict": collections.defaultdict(list, a=[1]),
        "list": words,
        "function": os.getcwd,
        "array": np.zeros(3),
        "device": torch.device("cpu"),
    }
    found = read_torch_file(save(tmp_path / "t.pt", content))
    assert found["namespace"].kind == "argparse.Namespace"
    assert found["namespace"].state == {"seed": 1}
    assert torch.equal(value(found["inner"].state["tensor"]), inner.tensor)
    for name, one in found.items():
        kind = one if isinstance(one, type) else type(one)
        assert issubclass(kind, Inert), name


# Hostile files ------------------------------------------------------------------------------------


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments, self.state

    def __call__(self) -> None:
        """Pickle wants what is to be called to be callable."""


def hostile_calls(mark: Path) -> dict[str, Any]:
    """Objects that make the file `mark` when they are unpickled as usual."""
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": Call(os.system, touch),
        "eval": Call(eval, f"__import__('os').system({touch!r})"),
        "exec": Call(exec, code),
        "a method": Call(Path.touch, mark),
        "subprocess": Call(subprocess.call, ["touch", str(mark)]),
        "import": Call(Call(getattr, Call(__import__, "os"), "system"), touch),
        "run of torch's profiler": Call(torch.utils.collect_env.run, touch),
        "torch.load of another pickle": Call(pickle.loads, pickle.dumps(Call(os.system, touch))),
        "map": Call(list, Call(map, os.system, [touch])),
    }


def as_pickle(path: Path, data: bytes) -> Path:
    """A file as torch.save makes it, with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("name", hostile_calls(Path("x")))
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_call_is_made(tmp_path: Path, name: str, protocol: int) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps({"module": [hostile_calls(mark)[name]]}, protocol)
    path = as_pickle(tmp_path / "t.pt", data)
    try:
        read_torch_file(path)
    except CheckpointError as error:
        assert "Nothing of it was run" in str(error)
    assert not mark.exists()
    # The test can fail: the usual way makes the call.
    try:
        pickle.loads(data)
    except TypeError:
        pass  # what the call gave is not what was expected
    assert mark.exists()


def g(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


TENSOR_ARGUMENTS = b"(X\x07\x00\x00\x00storage" + g("torch", "FloatStorage")
TENSOR_ARGUMENTS += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00K\x04\x85K\x01\x85"
TENSOR_ARGUMENTS += b"\x89" + g("collections", "OrderedDict") + b")R"
TENSOR = g("torch._utils", "_rebuild_tensor_v2") + b"(" + TENSOR_ARGUMENTS + b"tR"
CHANGED = b"(N}X\x08\x00\x00\x00functionK\x01stb"  # sets an attribute called "function"
# Pickles that change what they may name, refer to what is not theirs, or are no pickles.
HOSTILE = {
    "changes a function": g("torch._utils", "_rebuild_tensor_v2") + CHANGED + b".",
    "changes a function's dict": g("_codecs", "encode") + b"}X\x01\x00\x00\x00aK\x01sb.",
    "changes a class": g("collections", "OrderedDict") + CHANGED + b".",
    "changes the class of inert objects": g("os", "system") + CHANGED + b".",
    "moves a tensor": TENSOR + b"(K\x00K\x00K\x00K\x00tb.",
    "moves a tensor by its slots": TENSOR + CHANGED + b".",
    "persistent id of another kind": b"(X\x06\x00\x00\x00modulecos\nsystem\nK\x00K\x00K\x00tQ.",
    "persistent id of text": b"Pos.system\n.",
    "another file's storage": TENSOR.replace(
        b"X\x01\x00\x00\x000", b"X\x0e\x00\x00\x00../../etc/hosts"
    )
    + b".",
    "a storage that is too small": TENSOR.replace(b"K\x04tQ", b"K\x05tQ") + b".",
    "a tensor beyond its storage": TENSOR.replace(b"QK\x00K\x04", b"QK\x01K\x04") + b".",
    "a negative place": TENSOR.replace(b"QK\x00K\x04", b"QJ\xff\xff\xff\xffK\x04") + b".",
    "a shape of objects": TENSOR.replace(b"QK\x00K\x04\x85", b"QK\x00cos\nsystem\n\x85") + b".",
    "a tensor without a storage": g("torch._utils", "_rebuild_tensor_v2") + b"(K\x01K\x00))tR.",
    "calls what is inert": g("os", "system") + b"(X\x02\x00\x00\x00idtR(X\x02\x00\x00\x00idtR.",
    "no pickle": b"hello",
    "ends too early": TENSOR,
    "nothing": b"",
}


def test_the_pickle_that_hostile_ones_are_made_of_is_good(tmp_path: Path) -> None:
    found = read_torch_file(as_pickle(tmp_path / "t.pt", b"\x80\x02" + TENSOR + b"."))
    assert torch.equal(value(found), torch.zeros(4))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path: Path, name: str) -> None:
    path = as_pickle(tmp_path / "t.pt", b"\x80\x02" + HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"t\.pt cannot be read.*Nothing of it was run"):
        read_torch_file(path)
    # What it may have changed is as it was.
    test_the_pickle_that_hostile_ones_are_made_of_is_good(tmp_path)


def test_nothing_is_imported(tmp_path: Path) -> None:
    names = ["antigravity Any", "torch onnx", "torch._inductor x", "idlelib.pyshell main"]
    code = b"\x80\x02(" + b"".join(g(*name.split()) for name in names) + b"l."
    path = as_pickle(tmp_path / "t.pt", code)
    before = set(sys.modules)
    found = read_torch_file(path)
    assert all(issubclass(one, Inert) for one in found)
    assert set(sys.modules) == before
    assert not hasattr(builtins, "Any")


# Damaged files ------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    for read in (read_torch_file, check_archive):
        with pytest.raises(CheckpointError, match=r"t\.pt cannot be read: No such file"):
            read(tmp_path / "t.pt")


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.pt")
    for read in (read_torch_file, check_archive):
        with pytest.raises(CheckpointError, match=r"t\.pt cannot be read: it is no regular file"):
            read(tmp_path / "t.pt")


@pytest.mark.parametrize("rest", [0, 1, 100, 1000, -1])
def test_a_file_that_was_cut_off(tmp_path: Path, rest: int) -> None:
    path = save(tmp_path / "t.pt", torch.randn(1000))
    check_archive(path)
    path.write_bytes(path.read_bytes()[:rest])
    with pytest.raises(CheckpointError, match=r"t\.pt is cut off.* Copy it again"):
        check_archive(path)


def test_the_format_before_torch_1_6(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(torch.ones(2), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no file of torch\.save since torch 1\.6"):
        read_torch_file(path)


def test_another_archive(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(CheckpointError, match=r"it has no data\.pkl"):
        read_torch_file(path)


def test_a_compressed_archive(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(1000), buffer)
    path = tmp_path / "t.pt"
    for plain in ((), ("data.pkl",)):
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                kind = zipfile.ZIP_STORED if name.endswith(plain) else zipfile.ZIP_DEFLATED
                new.writestr(name, old.read(name), kind)
        with pytest.raises(CheckpointError, match=r"compressed|as torch\.save writes it"):
            read_torch_file(path)


def test_a_damaged_pickle_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = save(tmp_path / "t.pt", {"some": "words"})
    path.write_bytes(path.read_bytes().replace(b"words", b"wards"))
    with pytest.raises(CheckpointError, match="CRC"):
        read_torch_file(path)


# Bytes in memory -------------------------------------------------------------------------------


def saved_bytes(content: object, with_checksums: bool = True) -> bytearray:
    stream = io.BytesIO()
    set_crc32_options(with_checksums)
    try:
        torch.save(content, stream)
    finally:
        set_crc32_options(True)
    return bytearray(stream.getvalue())


@pytest.mark.parametrize("with_checksums", [True, False])
@pytest.mark.parametrize("view", [name for name in VIEWS if name != "empty"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_a_view_of_its_bytes(
    dtype: torch.dtype, view: str, with_checksums: bool
) -> None:
    saved = VIEWS[view]((torch.arange(120) % 7).reshape(4, 5, 6).to(dtype))
    data = saved_bytes(torch.nn.Parameter(saved, False), with_checksums)
    found = view_of_bytes(memoryview(data))
    assert found is not None and found.dtype is dtype and found.shape == saved.shape
    assert found.stride() == saved.stride()
    expected = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    first = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    assert first < found.data_ptr() < first + len(data), "nothing is copied"


OTHERS: dict[str, object] = {
    "a list": [torch.ones(3)],
    "a number": 3,
    "no elements": torch.ones(0, 3),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "on no device": torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_for_torch_load(name: str) -> None:
    assert view_of_bytes(memoryview(saved_bytes(OTHERS[name]))) is None
    assert view_of_bytes(memoryview(bytearray(b"no archive"))) is None


def test_damage_of_any_byte_is_no_crash() -> None:
    """It is found, or the view has other values or another shape: within the bytes always."""
    saved = torch.arange(6.0).reshape(2, 3).t()
    data = saved_bytes(saved, with_checksums=False)
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            data[place] ^= flip
            found = view_of_bytes(memoryview(data))
            if found is not None and found.numel() < 1000:
                found.clone()
            data[place] ^= flip
    found = view_of_bytes(memoryview(data))
    assert found is not None and torch.equal(found, saved)


def test_conjugated_values_are_not_taken_for_others(tmp_path: Path) -> None:
    saved = torch.ones(3, dtype=torch.complex64)
    found = read_torch_file(save(tmp_path / "t.pt", [saved, saved.conj()]))
    assert isinstance(found[0], TensorInFile) and isinstance(found[1], Inert)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.pt").write_bytes(saved_bytes({"a": torch.arange(3)}, with_checksums=False))
    assert value(read_torch_file(tmp_path / "t.pt")["a"]).tolist() == [0, 1, 2]
