"""Versions, how torch was built, and the accelerators that it sees."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import onecopy
from onecopy.doctor.facts import Accelerator, Package, Software, TorchBuild
from onecopy.memory.system_files import ROOT, read_text

__all__ = ["look_at_accelerators", "look_at_software"]

# What a user has these for; all but the first group may be absent.
REQUIRED = {
    "torch": "tensors, autograd and process groups",
    "safetensors": "files of weights",
    "numpy": "safetensors and torch's object messages go through it",
    "rich": "tables and progress",
}
OPTIONAL = {
    "transformers": "Hugging Face models and their Trainer",
    "accelerate": "Hugging Face's launcher and Trainer",
    "peft": "LoRA adapters",
    "tensorboard": "curves of a run",
    "wandb": "curves of a run",
    "trackio": "curves of a run",
    "lightning": "Lightning's Trainer",
}
BACKENDS = ("gloo", "nccl", "xccl", "mpi", "ucc")


def look_at_software(root: Path = ROOT) -> Software:
    """Versions of everything that matters, and how torch was built."""
    wanted = dict(_wanted())
    packages = [_package(name, use, wanted, is_required=True) for name, use in REQUIRED.items()]
    packages += [_package(name, use, wanted, is_required=False) for name, use in OPTIONAL.items()]
    return Software(
        onecopy=onecopy.__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        container=_container(root),
        driver=_driver(root),
        packages=tuple(packages),
        torch=_torch_build(),
    )


def _package(name: str, purpose: str, wanted: dict[str, str], *, is_required: bool) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    wants = wanted.get(name, "")
    return Package(
        name=name,
        version=version,
        purpose=purpose,
        is_required=is_required,
        wants=wants,
        fits=version is None or fits(version, wants),
    )


def _wanted() -> Iterator[tuple[str, str]]:
    """What the installed onecopy asks for: (package, versions)."""
    try:
        requirements = metadata.requires("onecopy") or []
    except metadata.PackageNotFoundError:
        # From a folder of sources, without an installation: the core's own need.
        requirements = ["torch>=2.13"]
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)", requirement)
        if found and found[2].strip():
            yield found[1], found[2].strip()


def fits(version: str, wants: str) -> bool:
    """Whether a version is among those wanted, such as ">=2.13,<3"; by its numbers alone."""
    return all(_fits_one(version, part.strip()) for part in wants.split(",") if part.strip())


def _fits_one(version: str, wanted: str) -> bool:
    found = re.match(r"(>=|<=|==|!=|~=|>|<)\s*([\w.]+)", wanted)
    if not found:
        return True
    have, want = _numbers(version), _numbers(found[2])
    compared = {
        ">=": have >= want,
        "<=": have <= want,
        "==": have == want,
        "!=": have != want,
        ">": have > want,
        "<": have < want,
        # As the last number given, or higher; the numbers before it are the same.
        "~=": have >= want and have[: found[2].count(".")] == want[: found[2].count(".")],
    }
    return compared[found[1]]


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu is (2, 13), as 2.13 is."""
    numbers = [int(one) for one in re.findall(r"\d+", re.sub(r"[^\d.].*", "", version))]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _container(root: Path) -> str:
    for mark, name in ((".dockerenv", "Docker"), ("run/.containerenv", "Podman")):
        if (root / mark).exists():
            return name
    text = read_text(root / "proc/1/cgroup") or ""
    found = re.search(r"kubepods|docker|containerd|lxc", text)
    return found[0] if found else ""


def _driver(root: Path) -> str | None:
    text = read_text(root / "proc/driver/nvidia/version") or ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    if found:
        return f"NVIDIA {found[0]}"
    amd = read_text(root / "sys/module/amdgpu/version")
    if amd or (root / "sys/module/amdgpu").is_dir():
        return f"AMD {amd or 'of the kernel'}"
    return None


def _torch_build() -> TorchBuild | None:
    try:
        import torch
        from torch import distributed as dist
    except ImportError:
        return None
    if not dist.is_available():
        return TorchBuild(cuda=torch.version.cuda, hip=torch.version.hip)
    return TorchBuild(
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=_nccl_version() if dist.is_nccl_available() else None,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        backends=tuple(name for name in BACKENDS if dist.is_backend_available(name)),
    )


def _nccl_version() -> str | None:
    import torch

    try:
        # Unannotated, and a tuple or a number depending on torch's age.
        version: Any = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def look_at_accelerators() -> tuple[Accelerator, ...]:
    """Every device that torch sees.

    Raises:
        RuntimeError: torch cannot use what there is; the driver says why.
    """
    import torch

    if not torch.accelerator.is_available():
        return ()
    current = torch.accelerator.current_accelerator()
    assert current is not None, "there is one, it was just said"
    module = torch.get_device_module(current)
    return tuple(_device(module, current.type, n) for n in range(torch.accelerator.device_count()))


def _device(module: Any, kind: str, index: int) -> Accelerator:
    free, total = _asked(lambda: module.mem_get_info(index)) or (None, None)
    return Accelerator(
        index=index,
        kind=kind,
        name=_asked(lambda: module.get_device_name(index)),
        total=total,
        free=free,
        bf16=_asked(lambda: bool(module.is_bf16_supported())),
    )


def _asked(question: Any) -> Any:
    """The answer, or None from devices that do not know such questions."""
    try:
        return question()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
