"""Lightning: `Trainer(strategy="onecopy")`, or `Trainer(strategy=OneCopyStrategy(stage=3, ...))`.

The strategy is Lightning's own for DistributedDataParallel, from launching to logging, but for the
model: it is sharded where DDP would wrap it, and stays what it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer

from onecopy import handle
from onecopy.api import no_sync, shard, unshard
from onecopy.config import Config
from onecopy.core import build
from onecopy.errors import ConfigError
from onecopy.extras import require

require("lightning", "OneCopyStrategy")

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging  # noqa: E402
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.plugins.io import CheckpointIO  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from onecopy.integrations import lightning_checkpoints as checkpoints  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

__all__ = ["OneCopyStrategy", "consolidate"]

consolidate = checkpoints.consolidate
AVERAGES = (StochasticWeightAveraging, WeightAveraging)


class OneCopyStrategy(DDPStrategy):
    """Trains a LightningModule whose states are sharded by onecopy.

    Args:
        config, **settings: those of `onecopy.shard`: stage, precision, offload, ...
        process_group_backend: "nccl", "gloo", ...; None for the one of the device.
        timeout: of the process group; None for that of torch.
        start_method: how processes are started where no launcher has: "popen" runs the script
            again, "spawn", "fork" and "forkserver" as in multiprocessing.

    Raises:
        ConfigError: a setting is unknown or does not fit.
    """

    def __init__(
        self,
        *,
        config: Config | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Any,
    ) -> None:
        given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            process_group_backend=process_group_backend, start_method=start_method, **given
        )
        self._config = Config.make(config, settings)
        # Whether the last checkpoint has brought the states with it, so that Lightning need not.
        self._has_loaded = False

    # Setup ------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around `configure_model`: the model is built without memory, see `init_sharded`."""
        with build.init_sharded(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, and attach the optimizers where it will be trained."""
        assert self.accelerator is not None, "the trainer has set it"
        assert self.model is not None, "the trainer has connected it"
        _refuse_averages(trainer)
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if handle.find(self.model) is None:
            if is_fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            if not any(build.unmade(self.model)):
                self.model_to_device()
        if is_fitting:
            self.setup_optimizers(trainer)
        elif handle.find(self.model) is None:
            shard(self.model, config=self._config)
        self.precision_plugin = _adapted(self.precision_plugin, self._parameters_of)
        self.setup_precision_plugin()
        checkpoints.leave_out_states(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and attach them; those of an earlier `fit` are let go of."""
        model = self._module
        if handle.find(model) is not None and handle.of(model).bindings:
            unshard(model)
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        # Where configure_optimizers makes none, Lightning puts one of its own there.
        made = [one for one in self.optimizers if not type(one).__module__.startswith("lightning.")]
        shard(model, made, config=self._config)
        # Lightning's wrappers have the methods of the class, and attaching has given the optimizer
        # one of its own, which clears also what this rank keeps beside the pieces.
        for wrapper in self._lightning_optimizers:
            vars(wrapper)["zero_grad"] = wrapper.optimizer.zero_grad
        if len(made) > 1:
            _toggle_parameters(model, self)

    def teardown(self) -> None:
        """End; the model stays sharded, and where it is."""
        if self._lightning_module is not None:
            for name in TOGGLES:
                vars(self._lightning_module).pop(name, None)
        assert self.cluster_environment is not None, "the trainer has set it"
        assert self.accelerator is not None, "the trainer has set it"
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Training ---------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around all but the last backward of an accumulation."""
        with no_sync(self._module):
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing is to be done: a sharded model is the same in manual optimization."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing, either."""

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None, "the trainer has connected it"
        return self.lightning_module

    def _parameters_of(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """The parameters of the model that an optimizer has; in its groups there are pieces."""
        optimizer = _plain(optimizer)
        for binding in handle.of(self._module).bindings:
            if binding.optimizer is optimizer:
                for group in binding.parameters:
                    yield from group

    # Checkpoints ------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank reads what it owns, which is known then."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether states of optimizers are in the file that Lightning has read."""
        return not self._has_loaded

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads files of Lightning, and removes checkpoints."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        raise ConfigError(
            f"the plugin {type(io).__name__} would write checkpoints as one file, and those of "
            'strategy="onecopy" are written by all ranks: leave it out'
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: states go into checkpoints from where they are."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a folder that loads on any number of ranks; all ranks together.

        Raises:
            ConfigError: the place is not in a file system, or has options.
            CheckpointError: see `onecopy.save`.
        """
        path = checkpoints.local_path(self.broadcast(filepath), storage_options)
        optimizers = self._attached() if "optimizer_states" in checkpoint else []
        checkpoints.write(path, checkpoint, self._module, optimizers)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load such a folder, or a file of Lightning that another strategy has written.

        Raises:
            CheckpointError: see `onecopy.load`.
        """
        path = self.broadcast(checkpoint_path)
        self._has_loaded = self.broadcast(checkpoints.is_folder(path))
        if not self._has_loaded:
            return super().load_checkpoint(path, weights_only=weights_only)
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        # Lightning restores states of optimizers only to fit: an evaluation leaves them alone.
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers = self._attached() if is_fitting else []
        return checkpoints.read(path, self._module, optimizers, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Of a file of Lightning; a folder has been loaded already."""
        if not self._has_loaded:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of a file of Lightning, whose states are whole: each rank takes its part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _attached(self) -> list[Optimizer]:
        bound = [id(one.optimizer) for one in handle.of(self._module).bindings]
        return [one for one in map(_plain, self.optimizers) if id(one) in bound]


def _plain(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _refuse_averages(trainer: Trainer) -> None:
    """Raises ConfigError for callbacks that keep a second model, whole, on each rank."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, AVERAGES):
            raise ConfigError(
                f"{type(callback).__name__} keeps a second, whole model on each rank, which "
                'strategy="onecopy" does not save: leave it out, and average the weights of '
                "several checkpoints afterwards"
            )


# Precision ------------------------------------------------------------------------------------


class _MixedPrecision(MixedPrecision):
    """Mixed precision on optimizers that step on parts.

    They ask a GradScaler to leave both unscaling and overflow to them. Lightning refuses to clip
    then; but they take gradients that were unscaled before as well.
    """

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Unscale after the closure's backward, before hooks and clipping see gradients."""

        def closure_then_unscale() -> Any:
            result = closure()
            if self.scaler is not None and not (result is None and model.automatic_optimization):
                self.scaler.unscale_(optimizer)
            return result

        return super().optimizer_step(optimizer, model, closure_then_unscale, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip, without asking whether the optimizer unscales by itself."""
        Precision.clip_gradients(self, *args, **kwargs)


# The plugin's state is saved under this name.
_MixedPrecision.__qualname__ = MixedPrecision.__qualname__


def _adapted(
    plugin: Precision, parameters_of: Callable[[Optimizer], Iterator[nn.Parameter]]
) -> Precision:
    """The precision plugin; it clips what the model has, by the norm over all ranks."""
    if type(plugin) is MixedPrecision:
        precision: Any = plugin.precision
        plugin = _MixedPrecision(precision, plugin.device, plugin.scaler)
    plugin.main_params = parameters_of  # type: ignore[method-assign, assignment]
    return plugin


# Several optimizers ---------------------------------------------------------------------------

TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def _toggle_parameters(model: nn.Module, strategy: OneCopyStrategy) -> None:
    """Let `toggle_optimizer` freeze parameters of the model; in the optimizers there are pieces.

    Functions, not methods: a copy of the model must not take the strategy along.
    """
    reference = weakref.ref(strategy)
    before: dict[nn.Parameter, bool] = {}

    def toggle_optimizer(optimizer: Optimizer) -> None:
        """See LightningModule.toggle_optimizer."""
        found = reference()
        assert found is not None, "its trainer trains"
        own = set(found._parameters_of(optimizer))
        for one in found.optimizers:
            for parameter in found._parameters_of(one):
                before.setdefault(parameter, parameter.requires_grad)
                parameter.requires_grad = before[parameter] and parameter in own

    def untoggle_optimizer(optimizer: Optimizer) -> None:
        """See LightningModule.untoggle_optimizer."""
        for parameter, requires_grad in before.items():
            parameter.requires_grad = requires_grad
        before.clear()

    vars(model).update(zip(TOGGLES, (toggle_optimizer, untoggle_optimizer), strict=True))


StrategyRegistry.register(
    "onecopy", OneCopyStrategy, description="Model states sharded by onecopy, at stage 3"
)
