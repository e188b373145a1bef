"""One class per contender: how its documentation says to set up a model, and to run a plain loop.

What a habit itself calls is the same everywhere; a side only does what comes before it. `Plain` is
one process without any of them. It runs the batches of all ranks one after another and takes the
mean of their losses: the meaning that the habits have in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onecopy

__all__ = ["SIDES", "WORLD", "NotHere", "Optimizer", "Plain", "make_side"]

WORLD = 2
Optimizer = torch.optim.Optimizer
Maker = Callable[[nn.Module], Optimizer]
Loss = Callable[[int], Tensor | None]


class NotHere(Exception):
    """The contender may well do it, but not on two CPU processes."""


class Plain:
    """One process; the common parts of all sides.

    rank: whose data this process has; the plain one has everybody's.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def start(self, net: nn.Module, *makers: Maker, **hints: Any) -> tuple[Any, list[Any]]:
        """The model to call and the optimizers to use.

        Hints, for those whose documentation has something for the case: unused (ranks use different
        parameters), apart (names of modules of which each rank uses others), methods (called beside
        forward), first (keep the optimizers that were made before).
        """
        optimizers = [make(net) for make in makers]
        return net, optimizers

    def start_pair(self, nets: Sequence[nn.Module], maker: Any) -> tuple[list[Any], Any]:
        """Two models under one optimizer."""
        models = [self.start(net)[0] for net in nets]
        return models, maker(nets)

    def start_fp16(self, net: nn.Module, maker: Maker) -> tuple[Any, list[Any]]:
        """Compute in fp16 where there is a setting for it; the reference computes in fp32."""
        return self.start(net, maker)

    def backward(self, loss: Loss) -> None:
        """Backward of the mean of the ranks' losses; None for a rank that has no batch."""
        losses = [one for one in map(loss, range(WORLD)) if one is not None]
        (sum(losses) / len(losses)).backward()

    def step(self, optimizer: Optimizer) -> None:
        """The update, and no gradients after it."""
        optimizer.step()
        optimizer.zero_grad()

    def batches(self, model: Any, counts: Sequence[int]) -> Iterator[int]:
        """The numbers of this rank's batches, of which `counts` says how many each rank has."""
        yield from range(max(counts))

    def gathered(self, model: Any) -> AbstractContextManager[Any]:
        """Around forwards of which ranks make different numbers."""
        return nullcontext()

    def compile(self, model: Any) -> Any:
        """The whole model compiled."""
        return torch.compile(model, backend="aot_eager")

    def of_first(self, value: Tensor) -> Tensor:
        """What rank 0 has."""
        return value

    def values(self, *nets: nn.Module) -> list[Tensor]:
        """Copies of all parameters, whole."""
        return [one.detach().clone().float() for net in nets for one in net.parameters()]


class Ranked(Plain):
    """Several processes, each with its own data."""

    def backward(self, loss: Loss) -> None:
        own = loss(self.rank)
        assert own is not None, "a rank without a batch does not come here"
        own.backward()

    def batches(self, model: Any, counts: Sequence[int]) -> Iterator[int]:
        yield from range(counts[self.rank])

    def of_first(self, value: Tensor) -> Tensor:
        dist.broadcast(value, 0)
        return value


class Ddp(Ranked):
    """torch.nn.parallel.DistributedDataParallel."""

    def start(self, net: nn.Module, *makers: Maker, **hints: Any) -> tuple[Any, list[Any]]:
        model = DistributedDataParallel(net, find_unused_parameters=hints.get("unused", False))
        return model, [make(net) for make in makers]

    def start_fp16(self, net: nn.Module, maker: Maker) -> tuple[Any, list[Any]]:
        vars(net)["forward"] = torch.autocast("cpu", torch.float16)(net.forward)
        return self.start(net, maker)

    def batches(self, model: Any, counts: Sequence[int]) -> Iterator[int]:
        with model.join(divide_by_initial_world_size=False):
            yield from super().batches(model, counts)


class Fsdp2(Ranked):
    """torch.distributed.fsdp.fully_shard: on each block, then on the root."""

    def start(self, net: nn.Module, *makers: Maker, **hints: Any) -> tuple[Any, list[Any]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        early = [make(net) for make in makers] if hints.get("first") else None
        settings = {"mesh": init_device_mesh("cpu", (WORLD,)), **hints.get("settings", {})}
        for block in getattr(net, "blocks", ()):
            fully_shard(block, **settings)
        fully_shard(net, **settings)
        for name in hints.get("methods", ()):
            register_fsdp_forward_method(net, name)
        return net, [make(net) for make in makers] if early is None else early

    def start_fp16(self, net: nn.Module, maker: Maker) -> tuple[Any, list[Any]]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        return self.start(net, maker, settings={"mp_policy": policy})

    @contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        parts = [one for one in model.modules() if isinstance(one, FSDPModule)]
        model.set_reshard_after_forward(False)
        for one in parts:
            one.unshard()
        yield
        model.set_reshard_after_forward(True)
        for one in parts:
            one.reshard()

    def values(self, *nets: nn.Module) -> list[Tensor]:
        return [
            (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone().float()
            for net in nets
            for one in net.parameters()
        ]


class OneCopy(Ranked):
    """onecopy.shard at a stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def start(self, net: nn.Module, *makers: Maker, **hints: Any) -> tuple[Any, list[Any]]:
        optimizers = [make(net) for make in makers]
        settings = {"keep_gathered": hints.get("apart", ()), **hints.get("settings", {})}
        return onecopy.shard(net, optimizers, stage=self.stage, **settings), optimizers

    def start_pair(self, nets: Sequence[nn.Module], maker: Any) -> tuple[list[Any], Any]:
        optimizer = maker(nets)
        return onecopy.shard(list(nets), optimizer, stage=self.stage), optimizer

    def start_fp16(self, net: nn.Module, maker: Maker) -> tuple[Any, list[Any]]:
        return self.start(net, maker, settings={"precision": "fp16"})

    def batches(self, model: Any, counts: Sequence[int]) -> Iterator[int]:
        yield from onecopy.join(model, range(counts[self.rank]))

    def gathered(self, model: Any) -> AbstractContextManager[Any]:
        return onecopy.full_parameters(model)

    def values(self, *nets: nn.Module) -> list[Tensor]:
        found = []
        for net in nets:
            with onecopy.full_parameters(net):
                found += super().values(net)
        return found


class DeepSpeed(Ranked):
    """deepspeed.initialize with ZeRO stage 3; engine.backward and engine.step in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[Any] = []

    def start(self, net: nn.Module, *makers: Maker, **hints: Any) -> tuple[Any, list[Any]]:
        made = [make(net) for make in makers]
        of_all = made if len(made) > 1 else made[0] if made else None
        engine, optimizer = self._initialize(net, of_all, **hints)
        return engine, made if hints.get("first") else [optimizer][: len(made)]

    def start_pair(self, nets: Sequence[nn.Module], maker: Any) -> tuple[list[Any], Any]:
        optimizer = maker(nets)
        models = [self._initialize(net, optimizer)[0] for net in nets]
        return models, optimizer

    def start_fp16(self, net: nn.Module, maker: Maker) -> tuple[Any, list[Any]]:
        raise NotHere("DeepSpeed refuses fp16 on CPUs")

    def _initialize(self, net: nn.Module, optimizer: Any, **hints: Any) -> tuple[Any, Any]:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **hints.get("settings", {}),
        }
        found = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        self.engines.append(found[0])
        return found[:2]

    def backward(self, loss: Loss) -> None:
        own = loss(self.rank)
        if len(self.engines) > 1:
            own.backward()
        else:
            self.engines[0].backward(own)

    def step(self, optimizer: Optimizer) -> None:
        for engine in self.engines:
            engine.step()

    def gathered(self, model: Any) -> AbstractContextManager[Any]:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(model.parameters()))

    def compile(self, model: Any) -> Any:
        model.compile(backend="aot_eager")
        return model

    def values(self, *nets: nn.Module) -> list[Tensor]:
        found = []
        for net in nets:
            with self.gathered(net):
                found += super().values(net)
        return found


SIDES: dict[str, Callable[[], Plain]] = {
    "plain": Plain,
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "onecopy-2": lambda: OneCopy(2),
    "onecopy-3": lambda: OneCopy(3),
}


def make_side(name: str) -> Plain:
    """A side by its name, in the default process group where there is one."""
    return SIDES[name]()
