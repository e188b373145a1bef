"""All elementwise optimizers of torch.optim, a user's own, and torchao's, against one process."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests import models, reference
from tests.optimizers import Lion, Replacing, Together, Trained, state_bytes, train
from tests.pool import Pool

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)

# Rules, and what they can be told beside the implementation.
KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "adam_decoupled": (
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw_maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "sgd_dampening": (
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "maximize": True},
    ),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    ),
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1, "alpha": 0.9}),
    "user_written": (Lion, {}),
    "replacing": (Replacing, {}),
}
FUSED = ("adam", "adam_amsgrad", "adamw", "adamw_maximize", "sgd", "sgd_nesterov", "adagrad")
USER_WRITTEN = ("user_written", "replacing")
MODELS = ("mlp", "tied", "unused", "odd")
TENSOR_LR = ("adam", "adamw", "sgd_nesterov", "rmsprop", "adamax", "radam")
VARIANTS = [
    *((name, "plain") for name in KINDS),
    *((name, "foreach") for name in KINDS if name not in USER_WRITTEN),
    *((name, "fused") for name in FUSED),
    *((name, "tensor_lr") for name in TENSOR_LR),
]


def make(kind: str, variant: str, model: nn.Module) -> Together:
    """The optimizer of this name; two groups, so that hyper-parameters stay with theirs."""
    rule, options = KINDS[kind]
    chosen = {
        "plain": {} if kind in USER_WRITTEN else {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        # Single-tensor implementations take one on any device.
        "tensor_lr": {"foreach": False, "lr": torch.tensor(options.get("lr", 1.0))},
    }[variant]
    parameters = list(model.parameters())
    half = len(parameters) // 2
    lower = {} if variant == "tensor_lr" else {"lr": 0.5 * options.get("lr", 0.02)}
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], **lower}]
    return Together([rule(groups, **{**options, **chosen})])


def run(variants: list[tuple[str, str]], name: str, stage: int) -> list[Trained]:
    """Train with each of them, one after the other."""
    return [
        train(lambda model, one=one: make(*one, model).optimizers, name, stage=stage)
        for one in variants
    ]


def check(runs: list[Trained], variant: tuple[str, str], name: str, stage: int) -> None:
    """Losses, parameters and the bytes of states on all ranks equal those of one process."""
    world = len(runs)
    made: list[Together] = []

    def keep(model: nn.Module) -> Any:
        made.append(make(*variant, model))
        return made[0]

    expected = reference.train(partial(models.build, name), models.batches(name, 3, world), keep)
    for rank, one in enumerate(runs):
        assert one.losses == [step[rank] for step in expected.losses], f"losses of rank {rank}"
        for key, value in expected.parameters.items():
            assert torch.equal(one.parameters[key], value), f"{variant}: {key} on rank {rank}"
    held = [one.state_bytes for one in runs]
    whole = state_bytes(made[0].optimizers)
    assert held == [whole] * world if stage == 0 else sum(held) == whole


def test_every_rule(pool: Pool) -> None:
    """Bit for bit, with slice borders through the weights."""
    variants = [variant for variant in VARIANTS if variant[1] == "plain"]
    results = pool.run(3, run, variants, "mlp", 3)
    for number, variant in enumerate(variants):
        check([one[number] for one in results], variant, "mlp", 3)


@pytest.mark.sampled(
    "variant, name, world, stage",
    [
        combination
        for combination in itertools.product(VARIANTS, MODELS, WORLDS, STAGES)
        # torch's fused SGD itself fails where a parameter gets its first gradient in a later step.
        if combination[:2] != (("sgd_nesterov", "fused"), "unused")
    ],
    8,
    always=[(("adamw", "fused"), "tied", 2, 3), (("nadam", "foreach"), "unused", 3, 2)],
)
def test_every_implementation(
    pool: Pool, variant: tuple[str, str], name: str, world: int, stage: int
) -> None:
    """Vectorised over a piece, over many pieces, or not at all: the same bits."""
    runs = pool.run(world, run, [variant], name, stage)
    check([one for (one,) in runs], variant, name, stage)


# torchao --------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Matrices whose states torchao quantizes, from 4096 elements on, and vectors it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def train_quantized(name: str) -> tuple[list[str], int, int]:
    """Names of what differs from a plain model on the same batches; bytes here, and of all."""
    import torchao.optim

    torch.manual_seed(0)
    plain = Narrow()
    sharded = copy.deepcopy(plain)
    pairs = [(one, getattr(torchao.optim, name)(one.parameters())) for one in (plain, sharded)]
    onecopy.shard(*pairs[1], stage=3)
    held = 0
    for step in range(4):
        if step == 3:
            # Quantized states come back whole, and go on.
            held = _quantized_bytes(pairs[1][1])
            onecopy.unshard(sharded)
        for model, optimizer in pairs:
            model(torch.full((2, 64), 0.1 * step + 0.1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    different = [
        key
        for (key, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    return different, held, _quantized_bytes(pairs[0][1])


def _quantized_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors inside quantized states."""
    return sum(
        getattr(value, inner).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "__tensor_flatten__")
        for inner in value.__tensor_flatten__()[0]
        if inner != "qmap"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("c++") is None, reason="torchao compiles its step: no c++ here")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_quantized_states(pool: Pool, name: str) -> None:
    """Blocks are those of whole parameters: the same bits as in one process."""
    pytest.importorskip("torchao", reason="pip install torchao brings optimizers with 8-bit states")
    results = pool.run(2, train_quantized, name, timeout=800, record_warnings=True)
    for different, _, whole in results:
        assert different == []
        assert sum(held for _, held, _ in results) == whole > 0
