"""Every exception of onecopy, as one tree.

OneCopyError
|- ConfigError             a setting is unknown or does not fit (also a ValueError)
|- ShardingError           a model or optimizer cannot be sharded, or was used against its state
|- MismatchError           ranks brought different models, settings or optimizers to `shard`
|- DivergenceError         ranks want different units at the same moment
|- ParameterReleasedError  values of a parameter were touched while its unit is released
|- UnitStateError          an illegal move of a unit (a bug in onecopy, or a caller of internals)
|- CheckpointError         a file of weights is missing, damaged, or does not fit the model
|  `- SavePendingError     a checkpoint of the model is still being written
|- RunError                a run's folder is missing, damaged, or in use by another run
|- SwapError               states on disk cannot be made, read or written
|- ActivationError         a checkpointed activation cannot be kept, or is not what it was
|- CommunicationError      a transfer failed: a peer died, or the connection broke
`- LaunchError             a rank process that onecopy started has failed

Messages say what happened, to which name and on which rank, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ActivationError",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DivergenceError",
    "LaunchError",
    "MismatchError",
    "OneCopyError",
    "ParameterReleasedError",
    "RunError",
    "SavePendingError",
    "ShardingError",
    "SwapError",
    "UnitStateError",
]


class OneCopyError(Exception):
    """Base of every error that onecopy raises on purpose."""


class ConfigError(OneCopyError, ValueError):
    """A setting is unknown, has an impossible value, or contradicts another one."""


class ShardingError(OneCopyError, RuntimeError):
    """A model or optimizer cannot be sharded, or is used in a way its state does not allow."""


class MismatchError(OneCopyError, RuntimeError):
    """Ranks called `shard` with different models, optimizers or settings."""


class DivergenceError(OneCopyError, RuntimeError):
    """Ranks want different units at the same moment, or a rank will never come."""


class ParameterReleasedError(OneCopyError, RuntimeError):
    """Values of a parameter were touched while its unit is released."""


class UnitStateError(OneCopyError, RuntimeError):
    """A unit was asked for a move that its state does not allow."""


class CheckpointError(OneCopyError, RuntimeError):
    """A file of weights is missing or damaged, or does not fit the model."""


class SavePendingError(CheckpointError):
    """A checkpoint of the model is still being written, and the caller did not want to wait."""


class RunError(OneCopyError, RuntimeError):
    """The folder of a run is missing, damaged, or holds another run."""


class SwapError(OneCopyError, RuntimeError):
    """States that are kept on disk cannot be made there, read or written."""


class ActivationError(OneCopyError, RuntimeError):
    """The input of a checkpointed module cannot be kept or fetched, or ranks have others."""


class CommunicationError(OneCopyError, RuntimeError):
    """A transfer between ranks failed."""


class LaunchError(OneCopyError, RuntimeError):
    """A rank process failed; the message names the rank that failed first and why."""
