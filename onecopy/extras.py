"""Optional packages: which extra of onecopy brings each, said where one is missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from onecopy.errors import ConfigError

__all__ = ["missing", "require"]

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
