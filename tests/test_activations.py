"""Checkpointed activations on one rank: which modules, what they keep, and that nothing changes."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.handle
from onecopy import cli
from onecopy.core.keeper import Keeper
from onecopy.errors import ActivationError, ConfigError, ShardingError
from onecopy.events import Event
from onecopy.memory.live_tensors import LiveTensors
from onecopy.policies import Activations
from onecopy.report.run_folder import read_run
from onecopy.report.trace import spans_of
from tests import hf_models, models, runs

PLACES = ("device", "host", "nvme")


def settings(place: str, folder: Path) -> dict[str, Any]:
    """Those of a place."""
    return {"place": place, "path": str(folder) if place == "nvme" else None}


def gradients(model: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    """Of a loss, and the loss itself."""
    model.zero_grad()
    loss = step(model)
    loss.backward()
    return [
        loss.detach(),
        *(one.grad.clone() for one in model.parameters() if one.grad is not None),
    ]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """To the last bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def checkpointed(model: nn.Module) -> list[str]:
    """The names of the modules whose forward is another one."""
    return [name for name, one in model.named_modules() if "forward" in vars(one)]


class Block(nn.Module):
    """Draws random numbers, takes a mask, a number and a text, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(8)
        self.calls: list[str] = []

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        *,
        scale: float,
        mode: str = "",
        state: Any = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls.append(mode)
        inner = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.3)
        result = x * scale + self.down(inner) * mask
        return result, {"aside": inner.sum() + (0 if state is None else state["hidden"].sum())}


class Stack(nn.Module):
    """Blocks that share a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.first(x), x > 0
        aside, state = x.new_zeros(()), {"hidden": x}
        for number, block in enumerate(self.blocks):
            x, more = block(x, mask, scale=1.0 + number, mode="train", state=state)
            aside = aside + more["aside"]
        return x.float().square().mean() + aside.float() * 0.01


def run_stack(model: nn.Module) -> torch.Tensor:
    """With the same random numbers in each run."""
    torch.manual_seed(3)
    return model(torch.randn(4, 8))


# Which modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"every": 2}, ["blocks.0", "blocks.2"]),
        # Of modules inside one another the outermost.
        ({"modules": "blocks.*"}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"modules": ("blocks.1.up", "head", "blocks.1")}, ["blocks.1", "head"]),
        ({"modules": lambda name, one: isinstance(one, nn.LayerNorm), "every": 3},
         ["blocks.0.norm1", "blocks.1.norm2", "norm"]),
    ],
)  # fmt: skip
def test_which_modules(given: dict[str, Any], names: list[str]) -> None:
    """By default the units' blocks."""
    model = models.build("gpt")
    before = [(name, type(one)) for name, one in model.named_modules()], list(model.state_dict())
    onecopy.checkpoint_activations(model, **given)
    assert checkpointed(model) == names
    assert before == (
        [(name, type(one)) for name, one in model.named_modules()],
        list(model.state_dict()),
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"place": "cpu"}, 'place="cpu": say place="host"'),
        ({"place": "nvme"}, "needs activations.path"),
        ({"path": "/tmp"}, 'say place="nvme", or leave path out'),
        ({"place": "nvme", "path": "/nowhere"}, "'/nowhere' is no folder that can be written"),
        ({"every": 0}, "every=0: give a whole number"),
        ({"modules": "layers.*"}, "matches no module"),
        ({"modules": "blocks"}, "blocks is a ModuleList, which is never called itself"),
        ({"modules": lambda name, one: False}, "the function in modules= has chosen none"),
        (
            {"where": "host"},
            "unknown setting 'activations.where'. Known settings: activations.every",
        ),
        ({"policy": "disk:/tmp"}, "place='disk' is not one of"),
        ({"policy": "host", "every": 2}, "give a policy, or its settings"),
        ({"policy": 3}, "the policy is 3"),
        ({"partition": 3}, "activations.partition is 3"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], says: str) -> None:
    """And the model stays as it is."""
    model = models.build("gpt")
    with pytest.raises(ConfigError, match=says):
        onecopy.checkpoint_activations(model, **given)
    assert checkpointed(model) == []


def test_models_without_blocks() -> None:
    """The error says what to write."""
    with pytest.raises(ConfigError, match="no container of alike blocks was found"):
        onecopy.checkpoint_activations(models.build("mlp"))
    with pytest.raises(ShardingError, match="the model is a str"):
        onecopy.checkpoint_activations("model")  # type: ignore[arg-type]


def test_the_last_call_counts_and_can_be_undone() -> None:
    """Somebody's own forward stays."""
    model = models.build("gpt")
    own = vars(model.blocks[1])["forward"] = lambda x: x  # type: ignore[index]
    undo_first = onecopy.checkpoint_activations(model)
    undo = onecopy.checkpoint_activations(model, place="host", every=2)
    assert checkpointed(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert vars(model.blocks[1])["forward"] is own  # type: ignore[index]
    undo_first()
    assert checkpointed(model) == ["blocks.0", "blocks.1", "blocks.2"]
    undo()
    undo()
    assert checkpointed(model) == ["blocks.1"]


# The same values -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("autocast", [False, True])
def test_whatever_is_inside(tmp_path: Path, place: str, autocast: bool) -> None:
    """Dropout, autocast, batch norms, arguments by name, tuples: the same bits, and statistics."""
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    onecopy.checkpoint_activations(model, **settings(place, tmp_path))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            assert same(gradients(model, run_stack), gradients(plain, run_stack))
    assert same(list(model.buffers()), list(plain.buffers()))
    assert all(len(block.calls) == 4 for block in model.blocks)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("place", PLACES)
def test_several_forwards_before_the_backwards(tmp_path: Path, place: str) -> None:
    """As pipelines do: in any order, and twice over one graph."""
    plain, model = models.build("gpt"), models.build("gpt")
    onecopy.checkpoint_activations(model, **settings(place, tmp_path))
    want, got = [], []
    for one, found in ((plain, want), (model, got)):
        losses = [models.loss(one, models.batch("gpt", 0, 0, micro)) for micro in range(4)]
        for number in (0, 3, 1, 2):
            losses[number].backward(retain_graph=number == 1)
        losses[1].backward()
        found += [parameter.grad for parameter in one.parameters()]
    assert same(got, want)


@pytest.mark.parametrize("place", PLACES)
def test_inside_other_checkpoints(tmp_path: Path, place: str) -> None:
    """Theirs has the inputs; what lies deeper is kept while it is computed again."""

    class Outer(nn.Module):
        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            self.inner, self.reentrant = models.build("gpt").blocks, reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.inner:  # type: ignore[union-attr]
                x = x if self.reentrant is None else x * 1.0
                x = block(x) if self.reentrant is None else self._checkpointed(block, x)
            return x.square().mean()

        def _checkpointed(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            twice = lambda x: block(block(x)) - block(x)  # noqa: E731
            result: torch.Tensor = checkpoint(twice, x, use_reentrant=self.reentrant)
            return result

    x = torch.randn(2, 3, 16, requires_grad=True)
    for reentrant in (None, True, False):
        plain, model = Outer(reentrant), Outer(reentrant)
        onecopy.checkpoint_activations(model, **settings(place, tmp_path))
        assert same(gradients(model, lambda one: one(x)), gradients(plain, lambda one: one(x)))


def test_without_gradients_nothing_is_kept() -> None:
    """Evaluation runs as it did."""
    model = Stack()
    onecopy.checkpoint_activations(model, place="host")
    with torch.no_grad():
        run_stack(model)
    assert [block.calls for block in model.blocks] == [["train"]] * 3  # type: ignore[union-attr]


def test_second_derivatives() -> None:
    """Through what is computed again."""

    def penalty(model: nn.Module) -> torch.Tensor:
        x = torch.ones(2, 3, 16, requires_grad=True)
        y = x
        for block in model.blocks:  # type: ignore[union-attr]
            y = block(y)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return grad.square().mean()

    # Fused attention has no second derivative on CPUs.
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        plain, model = models.build("gpt"), models.build("gpt")
        onecopy.checkpoint_activations(model, place="host")
        assert same(gradients(model, penalty), gradients(plain, penalty))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("more", [{"offload": "cpu"}, {"precision": "bf16"}, {"tile": True}])
def test_with_other_ways_to_save_memory(stage: int, more: dict[str, Any]) -> None:
    """Offloaded states, bf16, tiles: as without checkpointing."""
    found = []
    for is_checkpointed in (False, True):
        model = models.build("gpt")
        if "tile" in more:
            onecopy.tile_linears(model, 2, modules=["blocks.*.up", "blocks.*.down"])
        optimizer = runs.OPTIMIZERS["adamw"](model)
        if is_checkpointed:
            onecopy.checkpoint_activations(model, "host")
        given = {name: value for name, value in more.items() if name != "tile"}
        onecopy.shard(model, optimizer, stage=stage, **given)
        for step in range(2):
            models.loss(model, models.batch("gpt", step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(runs.full_values(model).values()))
        onecopy.unshard(model)
    assert same(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks() -> None:
    """A block's own forward, compiled, runs in forward and again in backward."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    plain, model = models.build("gpt"), models.build("gpt")
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    onecopy.checkpoint_activations(model, "host")
    onecopy.shard(model, stage=3)
    batch = models.batch("gpt", 0, 0)
    models.loss(model, batch).backward()
    want = gradients(plain, lambda one: models.loss(one, batch))[1:]
    with onecopy.full_parameters(model, grads=True):
        assert same([one.grad for one in model.parameters()], want)  # type: ignore[misc]
    # Alike blocks share one.
    assert len(graphs) == 1


def test_caches_are_left_out() -> None:
    """What transformers fills in training, unless told otherwise, it would fill twice."""

    class Cache:
        def __init__(self) -> None:
            self.filled = 0

    class Attention(models.Block):
        def forward(self, x: torch.Tensor, past: Any, use_cache: bool = False) -> torch.Tensor:  # type: ignore[override]
            assert (past is None) is not use_cache
            return super().forward(x)

    blocks = nn.ModuleList(Attention(16, 2) for _ in range(2))
    model = nn.Module()
    model.blocks = blocks
    onecopy.checkpoint_activations(model)
    x = torch.randn(1, 2, 16)
    with pytest.warns(UserWarning, match="blocks.0 gets a Cache, .*use_cache = False"):
        blocks[0](x, Cache(), use_cache=True)
    blocks[0](x, past=Cache(), use_cache=True)
    with torch.no_grad():
        blocks[0](x, past=Cache(), use_cache=True)


class Shared(nn.Module):
    """Blocks that get a part of a parameter of somebody else's, and that parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Lent() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.outside.weight.t(), bias=self.outside.bias)
        return x.square().mean()


class _Lent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lent: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) @ lent + bias)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_among_the_arguments(stage: int) -> None:
    """Their memory is the engine's, which gives it back in between: they are not moved."""
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Shared()
        optimizer, events = torch.optim.SGD(model.parameters(), lr=0.1), list[Event]()
        onecopy.shard(model, optimizer, stage=stage)
        if is_checkpointed:
            onecopy.checkpoint_activations(model, "host")
        onecopy.events.add_sink(model, events.append)
        for _ in range(3):
            model(torch.ones(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(runs.full_values(model).values()))
        # The first block's other input needs no gradient.
        kept = [one.unit for one in events if one.kind == "keep"]
        assert kept == ["blocks.1", "blocks.2"] * 3 * is_checkpointed
        onecopy.unshard(model)
    assert same(*found)


# What is kept ----------------------------------------------------------------------------------


def test_what_several_blocks_take_is_kept_once() -> None:
    """A hidden state that all of them get, as of an encoder."""
    model, events = Stack(), list[Event]()
    onecopy.shard(model, torch.optim.SGD(model.parameters()), stage=2)
    onecopy.events.add_sink(model, events.append)
    onecopy.checkpoint_activations(model, "host")
    loss = run_stack(model)
    kept = [one.unit for one in events if one.kind == "keep"]
    # The first block gets it twice.
    assert kept == ["blocks.0", "blocks.1", "blocks.2"]
    loss.backward()


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_memory_is_taken_once(tmp_path: Path, place: str) -> None:
    """The first step takes it; those after it, and graphs without a backward, take no more."""
    model = models.build("gpt")
    onecopy.checkpoint_activations(model, **settings(place, tmp_path))
    loss = models.loss(model, models.batch("gpt", 0, 0))
    (kept_in,) = _keeper(model)._places.values()
    arena = kept_in._arena  # type: ignore[attr-defined]
    taken, used = arena.num_bytes, arena.used_bytes
    assert used >= 3 * 2 * 6 * 16 * 4
    for step in range(3):
        del loss
        loss = models.loss(model, models.batch("gpt", step, 0))
        if step == 1:
            loss.backward()
    assert (arena.num_bytes, arena.used_bytes) == (taken, used)
    del loss
    gc.collect()
    arena.tidy()
    # What was kept last may still be on its way to the disk.
    assert arena.used_bytes <= (used * 2 // 3 if place == "nvme" else 0)


def _keeper(model: nn.Module) -> Keeper:
    keeper: Keeper = vars(model.blocks[0])["forward"].keeper  # type: ignore[index]
    return keeper


def test_what_is_alive_between_forward_and_backward() -> None:
    """The inputs, or nothing: less than half of what is alive without."""
    alive = []
    for place in (None, "device", "host"):
        model = models.build("gpt")
        if place is not None:
            onecopy.checkpoint_activations(model, place)
        with LiveTensors() as live:
            loss = models.loss(model, models.batch("gpt", 0, 0))
            alive.append(live.num_bytes())
        del loss
    assert alive[1] < alive[0] / 2
    # The states of random numbers are as many.
    assert alive[1] - alive[2] == 3 * 2 * 6 * 16 * 4


def test_a_plan_knows_what_host_memory_takes() -> None:
    """As many bytes as a run keeps there, and moves down and up; so many less on the device."""
    tokens = torch.randint(2, 101, (2, 16))
    plans = {
        choice: onecopy.plan(
            hf_models.llama(),
            devices=1,
            micro_batch=2,
            sequence=16,
            precision="fp32",
            checkpoint_activations=choice,
        )
        for choice in ("on", "host")
    }
    model, events = hf_models.llama(), list[Event]()
    onecopy.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    onecopy.checkpoint_activations(model, "host")
    onecopy.events.add_sink(model, events.append)
    model(input_ids=tokens, labels=tokens).loss.backward()
    kept, fetched = (
        sum(one.num_bytes for one in events if one.kind == kind) for kind in ("keep", "fetch")
    )
    for on_device, on_host in zip(plans["on"].rows, plans["host"].rows, strict=True):
        assert on_host.memory.staged - on_device.memory.staged == kept
        assert on_host.moved - on_device.moved == kept + fetched
    found = plans["host"].recommended
    assert found is not None
    assert 'onecopy.checkpoint_activations(model, place="host")' in found.code


def test_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its page and its trace know what is kept, and for what the rank waits."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onecopy.shard(model, optimizer, stage=3)
    onecopy.checkpoint_activations(model, **settings("nvme", tmp_path))
    with onecopy.record(tmp_path / "run", model, trace=2):
        for step in range(4):
            models.loss(model, models.batch("gpt", step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    run = read_run(tmp_path / "run")
    (rank,) = run.ranks
    kinds = Counter((one.kind, one.what) for one in rank.events)
    assert kinds["keep", "nvme"] == kinds["wait", "keep"] == 3 * 2
    assert kinds["fetch", "host"] + kinds["fetch", "nvme"] == kinds["wait", "fetch"] == 3 * 2
    assert {"wait keep blocks.0", "wait fetch blocks.0"} <= {one.name for one in spans_of(rank)}
    said = capsys.readouterr().out
    assert "async_save" not in said or "activations are kept on disk" not in said


# Copies and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_copies_compute_with_themselves(sharded: bool) -> None:
    """A deep copy is checkpointed, too, and reports nothing to the model that it is of."""
    model, events = models.build("gpt"), list[Event]()
    onecopy.checkpoint_activations(model, place="host")
    if sharded:
        onecopy.shard(model, stage=3)
        onecopy.events.add_sink(model, events.append)
    copied = copy.deepcopy(model)
    assert onecopy.handle.find(copied) is None
    assert checkpointed(copied) == ["blocks.0", "blocks.1", "blocks.2"]
    events.clear()
    batch = models.batch("gpt", 0, 0)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    plain = models.build("gpt")
    plain.load_state_dict(copied.state_dict())
    want = gradients(plain, lambda one: models.loss(one, batch))
    assert same(gradients(copied, lambda one: models.loss(one, batch)), want)
    assert events == []
    if not sharded:
        again = pickle.loads(pickle.dumps(copied))
        assert same(gradients(again, lambda one: models.loss(one, batch)), want)
    alone = copy.deepcopy(copied.blocks[0])  # type: ignore[index]
    alone(torch.randn(1, 2, 16)).sum().backward()


class InPlace(models.Block):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1, :1].expand(3, 5, 8),
    "expanded columns": lambda x: x[..., :1].expand(3, 5, 8),
    "expanded and transposed": lambda x: x[:1].transpose(0, 1).expand(5, 4, 8)[1:],
    "sliced": lambda x: x[:, 1:4],
    "overlapping": lambda x: x.unfold(1, 3, 1).permute(0, 1, 3, 2),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_inputs_come_back_as_they_lay(tmp_path: Path, layout: str) -> None:
    """Else an operator might take another way than in forward."""
    torch.manual_seed(0)
    first = nn.Linear(4, 8)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(3, 5, 4)
    found = []
    for place in ("", "host", "nvme"):
        model = copy.deepcopy(nn.Sequential(first, blocks))
        if place:
            path = str(tmp_path) if place == "nvme" else None
            onecopy.checkpoint_activations(model, place=place, path=path, modules="1.*")
        model[1](LAYOUTS[layout](model[0](x))).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_inputs_that_are_changed() -> None:
    """Within the block an error; after it, what was kept is what counts."""
    model = nn.ModuleList([InPlace(16, 2), InPlace(16, 2)])
    onecopy.checkpoint_activations(model, place="host")
    x = torch.randn(1, 2, 16, requires_grad=True)
    with pytest.raises(ActivationError, match="0 has changed its own input in place"):
        model[0](x * 1)

    def after(model: nn.Module) -> torch.Tensor:
        x = torch.ones(1, 2, 16, requires_grad=True) * 1
        y = model.blocks[0](x)  # type: ignore[index]
        return (x.mul_(3) + y).square().mean()

    plain, model = models.build("gpt"), models.build("gpt")
    onecopy.checkpoint_activations(model, place="host")
    got = gradients(model, after)
    with torch.no_grad():
        want = after(plain)
    assert torch.equal(got[0], want)


def test_a_disk_or_a_host_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the module, the rank and what to do."""
    from onecopy.memory import places, swap_files

    model = models.build("gpt")
    onecopy.checkpoint_activations(model, **settings("nvme", tmp_path))
    loss = models.loss(model, models.batch("gpt", 0, 0))

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    def fail_to_map(num_bytes: int) -> torch.Tensor:
        raise MemoryError(f"{num_bytes} bytes")

    monkeypatch.setattr(swap_files.DirectFile, "read", fail)
    with pytest.raises(ActivationError, match=r"rank 0 cannot fetch the input of blocks.0 .*nvme"):
        loss.backward()
    monkeypatch.setattr(swap_files.DirectFile, "reserve", fail)
    onecopy.checkpoint_activations(model, **settings("nvme", tmp_path))
    with pytest.raises(ActivationError, match=r"rank 0 cannot keep the input of .*Make ro"):
        models.loss(model, models.batch("gpt", 0, 0))
    monkeypatch.setattr(places, "host_memory", fail_to_map)
    onecopy.checkpoint_activations(model, "host")
    with pytest.raises(ActivationError, match=r"blocks.0 \(on host\): 16777216 bytes. Fewer tok"):
        models.loss(model, models.batch("gpt", 0, 0))


def test_folders_do_not_stay(tmp_path: Path) -> None:
    """They go with the model."""
    model = models.build("gpt")
    onecopy.checkpoint_activations(model, **settings("nvme", tmp_path))
    models.loss(model, models.batch("gpt", 0, 0)).backward()
    assert len(list(tmp_path.iterdir())) == 1
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_policies_as_objects() -> None:
    """What is written is what is read."""
    made = Activations(place="nvme", path=Path("/drive"), modules="layers.*")
    assert (made.path, made.modules) == ("/drive", ("layers.*",))
    assert made == Activations(place="nvme", path="/drive", modules=["layers.*"])  # type: ignore[arg-type]
