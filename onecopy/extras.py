"""Packages: which extra brings an optional one, said where one is missing; the oldest torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from onecopy.errors import ConfigError

__all__ = ["check_torch", "missing", "require"]

TORCH = (2, 13)

# By package; pyproject.toml names the versions.
EXTRAS = {
    "accelerate": "hf",
    "datasets": "data",
    "lightning": "lightning",
    "peft": "hf",
    "pyarrow": "data",
    "tensorboard": "track",
    "tokenizers": "hf",
    "transformers": "hf",
}


def require(package: str, what: str) -> ModuleType:
    """The imported package, which `what` needs: "OneCopyTrainer", "--lora-rank", ...

    Raises:
        ConfigError: it is not installed; the error has the command that installs it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        # A package that is there, and misses something itself, says better what that is.
        if error.name != package:
            raise
        raise missing(package, what) from error


def missing(package: str, what: str) -> ConfigError:
    """The error that says that `what` needs a package, and how to get it."""
    return ConfigError(
        f"{what} needs the package {package}, which is not installed here: "
        f"pip install 'onecopy[{EXTRAS[package]}]'"
    )


def check_torch() -> None:
    """Raises ConfigError where torch is older than onecopy needs."""
    version: str = import_module("torch").__version__
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if found < TORCH:
        needed = ".".join(map(str, TORCH))
        raise ConfigError(
            f"onecopy needs torch {needed} or newer, and {version} is installed here: "
            f"pip install --upgrade 'torch>={needed}'"
        )
