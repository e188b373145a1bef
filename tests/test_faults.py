"""What cannot work is refused by name before anything has changed; a lost rank is no hang."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onecopy
import onecopy.handle
from onecopy.errors import ConfigError, OneCopyError, ShardingError
from tests import models
from tests.pool import Pool, RankError
from tests.runs import OPTIMIZERS, full_values


def _blocks(width: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Refused at shard -----------------------------------------------------------------------------


def sharded_twice() -> None:
    model = onecopy.shard(_blocks())
    onecopy.shard(model)


def part_is_sharded() -> None:
    model = _blocks()
    onecopy.shard(model[1])
    onecopy.shard(model)


def one_of_two_is_sharded() -> None:
    sharded, plain = onecopy.shard(_blocks()), _blocks()
    optimizer = torch.optim.SGD([*sharded.parameters(), *plain.parameters()], lr=0.1)
    onecopy.shard([sharded, plain], optimizer)


def no_module() -> None:
    model = _blocks()
    onecopy.shard(torch.optim.SGD(model.parameters(), lr=0.1), model)  # type: ignore[arg-type,type-var]


def no_optimizer() -> None:
    onecopy.shard(_blocks(), "adamw")  # type: ignore[arg-type]


def optimizer_of_another_model() -> None:
    onecopy.shard(_blocks(), torch.optim.SGD(_blocks().parameters(), lr=0.1))


def optimizer_with_strangers() -> None:
    model = _blocks()
    parameters = [*model.parameters(), nn.Parameter(torch.ones(7))]
    onecopy.shard(model, torch.optim.SGD(parameters, lr=0.1))


def optimizer_that_clips() -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.defaults["max_grad_norm"] = 1.0
    onecopy.shard(model, optimizer)


def optimizer_that_distributes() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """As torch.distributed.optim has it."""

    model = _blocks()
    onecopy.shard(model, ZeroRedundancyOptimizer(model.parameters(), lr=0.1))


def refused_optimizer(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    onecopy.shard(model, getattr(torch.optim, name)(model.parameters()))


def derived_optimizer() -> None:
    class Mine(torch.optim.LBFGS):
        """Another name changes nothing."""

    model = _blocks()
    onecopy.shard(model, Mine(model.parameters()))


def setting(**settings: Any) -> None:
    onecopy.shard(_blocks(), **settings)


def config_of_another_kind() -> None:
    onecopy.shard(_blocks(), config={"stage": 3})  # type: ignore[arg-type]


def mesh_of_unknown_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "trial"))
    onecopy.shard(_blocks(), mesh=mesh)


def mesh_without_data() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    onecopy.shard(_blocks(), mesh=mesh["tp"])


def parameter_of(make: Callable[[], Tensor]) -> None:
    model = _blocks()
    model.strange = nn.Parameter(make())
    onecopy.shard(model)


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def not_dense() -> Tensor:
    return torch.ones(4, 4)[:, :2]


def overlapping() -> Tensor:
    return torch.ones(4, 1).expand(4, 3)


def complex_trainable() -> Tensor:
    return torch.ones(3, dtype=torch.complex64)


class Wrapped(Tensor):
    """A subclass that lives by `__torch_dispatch__`, as quantized and distributed tensors do."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if isinstance(result, Tensor) else result


def subclass() -> Tensor:
    return torch.ones(3).as_subclass(Wrapped)


def no_parameters() -> None:
    onecopy.shard(nn.Sequential(nn.ReLU(), nn.Flatten()))


def only_empty_parameters() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    onecopy.shard(model)


REFUSED: dict[str, tuple[Callable[[], None], type[OneCopyError], list[str]]] = {
    "twice": (sharded_twice, ShardingError, ["sharded already", "unshard"]),
    "a part before": (part_is_sharded, ShardingError, ["module 1", "sharded already"]),
    "one of two before": (one_of_two_is_sharded, ShardingError, ["sharded already"]),
    "no module": (no_module, ShardingError, ["SGD", "shard(model, optimizer"]),
    "no optimizer": (no_optimizer, ShardingError, ["'adamw'", "it comes second"]),
    "optimizer of another model": (
        optimizer_of_another_model,
        ShardingError,
        ["SGD", "none of the given models"],
    ),
    "optimizer with strangers": (
        optimizer_with_strangers,
        ShardingError,
        ["1 parameters", "number 6 of group 0", "(7,)"],
    ),
    **{
        name: (partial(refused_optimizer, name), ShardingError, [name, "AdamW"])
        for name in ("LBFGS", "SparseAdam")
    },
    "optimizer that clips": (
        optimizer_that_clips,
        ShardingError,
        ["SGD", "max_grad_norm=1.0", "clip_grad_norm_"],
    ),
    "optimizer that distributes": (
        optimizer_that_distributes,
        ShardingError,
        ["ZeroRedundancyOptimizer", "plain optimizer"],
    ),
    "whole_parameters=1": (
        partial(setting, whole_parameters=1),
        ConfigError,
        ["whole_parameters=1"],
    ),
    "derived optimizer": (derived_optimizer, ShardingError, ["LBFGS"]),
    "unknown key": (
        partial(setting, max_gradnorm=1.0),
        ConfigError,
        ["'max_gradnorm'", "Did you mean 'max_grad_norm'?", "Known settings"],
    ),
    "unknown word": (
        partial(setting, precision="bf-16"),
        ConfigError,
        ["precision='bf-16'", "Did you mean 'bf16'?"],
    ),
    "stage 4": (partial(setting, stage=4), ConfigError, ["stage=4", "0, 1, 2, 3"]),
    "stage True": (partial(setting, stage=True), ConfigError, ["stage=True"]),
    "negative bytes": (partial(setting, prefetch_bytes=-1), ConfigError, ["prefetch_bytes=-1"]),
    "norm of zero": (partial(setting, max_grad_norm=0.0), ConfigError, ["max_grad_norm=0.0"]),
    "units as a string": (partial(setting, units="0"), ConfigError, ["('0',)"]),
    "units of no module": (partial(setting, units=("layers.*",)), ConfigError, ["'layers.*'"]),
    "config as a dict": (config_of_another_kind, ConfigError, ["dict", "onecopy.Config"]),
    "unknown dimensions": (mesh_of_unknown_dimensions, ShardingError, ["'trial'", 'mesh["dp"]']),
    "mesh without data": (mesh_without_data, ShardingError, ["tp", "whole mesh", 'mesh["dp"]']),
    "sparse": (partial(parameter_of, sparse), ShardingError, ["strange", "sparse"]),
    "not dense": (partial(parameter_of, not_dense), ShardingError, ["strange", "contiguous()"]),
    "overlapping": (partial(parameter_of, overlapping), ShardingError, ["strange"]),
    "complex": (partial(parameter_of, complex_trainable), ShardingError, ["view_as_real"]),
    "subclass": (partial(parameter_of, subclass), ShardingError, ["strange", "Wrapped"]),
    "no parameters": (no_parameters, ShardingError, ["Sequential", "no parameters"]),
    "only empty parameters": (only_empty_parameters, ShardingError, ["no parameters"]),
}


def refusals() -> dict[str, tuple[list[str], str]]:
    """The error of each call: its classes and its message."""
    found = {}
    for name, (call, _, _) in REFUSED.items():
        try:
            call()
        except BaseException as error:
            found[name] = ([kind.__name__ for kind in type(error).__mro__], str(error))
    return found


@pytest.fixture(scope="module")
def refused(pool: Pool) -> dict[str, tuple[list[str], str]]:
    found: dict[str, tuple[list[str], str]] = pool.run(1, refusals, record_warnings=True)[0]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(refused: dict[str, tuple[list[str], str]], name: str) -> None:
    """With what it is about and what to do."""
    _, kind, parts = REFUSED[name]
    assert name in refused, "nothing was raised"
    kinds, message = refused[name]
    assert kind.__name__ in kinds, (kinds, message)
    for part in parts:
        assert part in message, message


def nothing_changed() -> bool:
    """A refused optimizer leaves the model plain and in training."""
    model, reference = _blocks(), _blocks()
    reference.load_state_dict(model.state_dict())
    with pytest.raises(ShardingError):
        onecopy.shard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ShardingError):
        parameters = [*model.parameters(), nn.Parameter(torch.ones(7))]
        onecopy.shard(model, torch.optim.SGD(parameters, lr=0.1))
    assert onecopy.handle.find(model) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        _step(model, optimizer)
        _step(reference, plain)
    state = model.state_dict()
    return all(torch.equal(state[name], value) for name, value in reference.state_dict().items())


def test_a_refusal_changes_nothing(pool: Pool) -> None:
    """After the error the same call with other arguments works."""
    assert pool.run(1, nothing_changed) == [True]


# Refused later --------------------------------------------------------------------------------


def unattached_step() -> None:
    model = onecopy.shard(_blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def full_parameters_of_plain() -> None:
    with onecopy.full_parameters(_blocks()):
        pass


def no_sync_of_plain() -> None:
    with onecopy.no_sync(_blocks()):
        pass


def clip_plain() -> None:
    onecopy.clip_grad_norm_(_blocks(), 1.0)


def unshard_plain() -> None:
    onecopy.unshard(_blocks())


def no_sync_of_a_part() -> None:
    model = onecopy.shard(_blocks())
    with onecopy.no_sync(model[0]):
        pass


def step_inside() -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer)
    model(torch.ones(2, 6)).sum().backward()
    with onecopy.full_parameters(model):
        optimizer.step()


def attached_twice() -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer)
    onecopy.shard(model, optimizer)


def copied_in_part() -> None:
    copy.deepcopy(onecopy.shard(_blocks(), stage=2)[0])


def pickled() -> None:
    pickle.dumps(onecopy.shard(_blocks(), stage=2))


MISUSED: dict[str, tuple[Callable[[], None], list[str]]] = {
    "unattached step": (unattached_step, ["AdamW", "0.weight", "onecopy.shard(model, optimizer)"]),
    "full_parameters": (full_parameters_of_plain, ["Sequential is not sharded"]),
    "no_sync": (no_sync_of_plain, ["Sequential is not sharded"]),
    "no_sync of a part": (no_sync_of_a_part, ["Linear is not sharded", "not a part of it"]),
    "clip": (clip_plain, ["Sequential is not sharded"]),
    "unshard": (unshard_plain, ["Sequential is not sharded"]),
    "step inside full_parameters": (step_inside, ["inside full_parameters", "outside"]),
    "attached twice": (attached_twice, ["is attached to this Sequential already"]),
    "deepcopy": (copied_in_part, ["cannot be copied", "copy the whole model"]),
    "pickle": (pickled, ["cannot be pickled", "state_dict()"]),
}


def misuses() -> dict[str, tuple[list[str], str]]:
    """The error of each call: its classes and its message."""
    found = {}
    for name, (call, _) in MISUSED.items():
        try:
            call()
        except BaseException as error:
            found[name] = ([kind.__name__ for kind in type(error).__mro__], str(error))
    return found


@pytest.fixture(scope="module")
def misused(pool: Pool) -> dict[str, tuple[list[str], str]]:
    found: dict[str, tuple[list[str], str]] = pool.run(1, misuses, record_warnings=True)[0]
    return found


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_named(misused: dict[str, tuple[list[str], str]], name: str) -> None:
    """A call that the state of model or optimizer does not allow."""
    assert name in misused, "nothing was raised"
    kinds, message = misused[name]
    assert "ShardingError" in kinds, (kinds, message)
    for part in MISUSED[name][1]:
        assert part in message, message


# unshard --------------------------------------------------------------------------------------


def unshard_and_go_on(
    optimizer_name: str,
    stage: int,
) -> tuple[list[str], dict[str, Tensor], bool]:
    """Two sharded steps, then two plain ones."""
    model = models.build("tied")
    before = {name: (p, type(p)) for name, p in model.named_parameters()}
    attributes = set(vars(model))
    optimizer = OPTIMIZERS[optimizer_name](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    onecopy.shard(model, optimizer, stage=stage)
    for step in range(4):
        if step == 2:
            onecopy.unshard(model)
        models.loss(model, models.batch("tied", step, 0)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    is_plain = (
        all(
            p is before[name][0] and type(p) is before[name][1]
            for name, p in model.named_parameters()
        )
        and all(map(_all_are, groups, (group["params"] for group in optimizer.param_groups)))
        and set(vars(model)) == attributes
        and set(optimizer.state) == set(model.parameters())
    )
    hooks = [
        name
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and value
    ]
    return (
        hooks,
        {name: p.detach() for name, p in copy.deepcopy(model).named_parameters()},
        is_plain,
    )


def _all_are(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 2), (2, 1), (2, 0), (3, 3)])
def test_unshard_gives_back_plain_objects(pool: Pool, world: int, stage: int) -> None:
    """All ranks see the same batches here, so plain training goes on equally."""
    # Adam turns the rounding of a third, where gradients cancel out, into whole steps.
    optimizer_name = "momentum" if world == 3 else "adamw"
    runs = pool.run(world, unshard_and_go_on, optimizer_name, stage)
    model = models.build("tied")
    optimizer = OPTIMIZERS[optimizer_name](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        models.loss(model, models.batch("tied", step, 0)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for hooks, values, is_plain in runs:
        assert hooks == []
        assert is_plain
        for name, value in model.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-5, atol=1e-6)


def unshard_two(together: bool) -> tuple[bool, list[str]]:
    """Two models with one optimizer, made from named parameters."""

    def build() -> tuple[list[nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(0)
        pair: list[nn.Module] = [_blocks(), _blocks()]
        named = [(f"{i}/{n}", p) for i, one in enumerate(pair) for n, p in one.named_parameters()]
        return pair, torch.optim.Adam(named, lr=0.01)

    def step(pair: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        sum(one(torch.ones(2, 6)).square().mean() for one in pair).backward()
        optimizer.step()
        optimizer.zero_grad()

    pair, optimizer = build()
    onecopy.shard(pair, optimizer, stage=3)
    step(pair, optimizer)
    onecopy.unshard(pair if together else pair[0])
    step(pair, optimizer)
    plain, reference = build()
    for _ in range(2):
        step(plain, reference)
    left = [p for one in pair for p in one.parameters()]
    right = [p for one in plain for p in one.parameters()]
    is_equal = all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    return is_equal, optimizer.param_groups[0]["param_names"]


def test_models_with_one_optimizer_are_unsharded_together(pool: Pool) -> None:
    """One alone would leave the other without an optimizer."""
    names = [f"{i}/{j}.{name}" for i in (0, 1) for j in range(3) for name in ("weight", "bias")]
    assert pool.run(2, unshard_two, True) == [(True, names)] * 2
    for error in pool.run(2, unshard_two, False, expect_failures=True):
        assert error.type_name == "ShardingError", str(error)
        assert "unshard([model_a, model_b])" in error.message


def unshard_low_precision() -> bool:
    """Train with fp32 masters; compare what unshard gives with them."""
    model = models.build("tied")
    optimizer = OPTIMIZERS["adamw"](model)
    onecopy.shard(model, optimizer, stage=3, precision="bf16")
    for step in range(2):
        models.loss(model, models.batch("tied", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = full_values(model)
    onecopy.unshard(model)
    return all(torch.equal(p, masters[name]) for name, p in model.named_parameters())


def test_unshard_gives_masters_not_rounded_values(pool: Pool) -> None:
    """The plain model has what the optimizer has updated, to the last bit."""
    assert pool.run(2, unshard_low_precision) == [True, True]


# Lost ranks -----------------------------------------------------------------------------------


def killed_in(where: str) -> None:
    """The last rank dies by SIGKILL in its third step."""
    model = models.build("gpt")
    optimizer = OPTIMIZERS["sgd"](model)
    onecopy.shard(model, optimizer, stage=3)
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(5):
        if is_last and step == 2:
            block = model.get_submodule("blocks.1")
            if where == "vote":
                die()
            if where == "forward":
                block.register_forward_pre_hook(die)
            else:
                block.register_full_backward_hook(die)
        if where == "vote" and step == 2:
            # Nothing is under way that could break: it waits for the others' votes.
            onecopy.handle.of(model).engine.collectives.agreement.agree("the others")
        models.loss(model, models.batch("gpt", step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("world", "where"), [(2, "forward"), (3, "backward"), (3, "vote")])
def test_a_killed_rank_is_an_error_on_the_others(pool: Pool, world: int, where: str) -> None:
    """Not a hang, and not an error of the transport without a name."""
    results = pool.run(world, killed_in, where, expect_failures=True)
    *others, lost = results
    assert lost.type_name == "RankDied"
    for error in others:
        assert isinstance(error, RankError)
        assert error.type_name == "CommunicationError", str(error)
        text = f"the process of rank {lost.rank} has ended without a word"
        assert text in error.message, str(error)
