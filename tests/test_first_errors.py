"""What a newcomer meets first reads like advice: what is wrong, where, and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import cli
from onecopy.comm import groups
from onecopy.errors import (
    CommunicationError,
    ConfigError,
    MismatchError,
    OneCopyError,
    ShardingError,
)
from onecopy.extras import TORCH, check_torch
from tests.pool import Pool
from tests.rank import RankError

ROOT = Path(__file__).resolve().parent.parent


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(2, 4), nn.Sequential(*blocks))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


Call = Callable[[Any, Any], Any]
# What is called with a model and its optimizer, and what the error says.
CALLS: dict[str, tuple[Call, str]] = {
    "swapped": (lambda m, o: onecopy.shard(o, m), "AdamW, an optimizer: the model comes first"),
    "class of a model": (
        lambda m, o: onecopy.shard(nn.Linear, o),
        "the class Linear itself: make a model of it, as in model = Linear(...)",
    ),
    "class of an optimizer": (
        lambda m, o: onecopy.shard(m, torch.optim.AdamW),
        "optimizer = torch.optim.AdamW(model.parameters(), lr=...)",
    ),
    "stage by place": (
        lambda m, o: onecopy.shard(m, 3),
        "settings are given by name, shard(model, optimizer, stage=3)",
    ),
    "parameters": (
        lambda m, o: onecopy.shard(list(m.parameters()), o),
        "takes the model, not its parameters",
    ),
    "state dict": (lambda m, o: onecopy.shard(m.state_dict(), o), "is a OrderedDict, not a torch"),
    "scheduler": (
        lambda m, o: onecopy.shard(m, torch.optim.lr_scheduler.ConstantLR(o)),
        "the optimizer is a ConstantLR",
    ),
    "twice in a list": (lambda m, o: onecopy.shard(m, [o, o]), "passed twice: pass it once"),
    "of another model": (
        lambda m, o: onecopy.shard(m, torch.optim.SGD(make()[0].parameters())),
        "the SGD holds parameters of none of the given models",
    ),
    "sharded twice": (
        lambda m, o: onecopy.shard(onecopy.shard(m, o), o),
        "this AdamW is attached to this Sequential already: one call of shard is enough",
    ),
    "other settings later": (
        lambda m, o: onecopy.shard(onecopy.shard(m), o, stage=2),
        "sharded with stage=3, and a further call of shard only attaches optimizers: leave stage=2",
    ),
    "not sharded": (
        lambda m, o: onecopy.save("run", m, o),
        "is not sharded. Call onecopy.shard(model, optimizer, stage=...) first",
    ),
    "mesh": (lambda m, o: onecopy.shard(m, o, mesh=2), "mesh is a int: give a DeviceMesh, as in"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_work_say_what_was_meant(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ShardingError if "later" not in name else ConfigError) as caught:
        call(*make())
    assert message in str(caught.value)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "stage as text": ({"stage": "3"}, "stage='3' is not one of 0, 1, 2, 3"),
    "what was meant": ({"stage": "3"}, "Did you mean 3?"),
    "stage as a float": ({"stage": 3.0}, "Did you mean 3?"),
    "stage as a switch": ({"stage": True}, "stage=True is not one of"),
    "typo": ({"stag": 3}, "unknown setting 'stag'. Did you mean 'stage'?"),
    "name of others": ({"gradient_clipping": 1.0}, "Did you mean 'max_grad_norm'?"),
    "FSDP's": ({"sharding_strategy": "FULL_SHARD"}, "Did you mean 'stage'?"),
    "torch's dtype": ({"precision": torch.bfloat16}, "Did you mean 'bf16'?"),
    "long name": ({"precision": "float16"}, "Did you mean 'fp16'?"),
    "dict": ({"precision": {"compute": "bf16"}}, 'onecopy.Precision(compute="bf16", ...)'),
    "offload as a switch": ({"offload": True}, 'say offload="cpu"'),
    "offload without path": ({"offload": "nvme"}, '"nvme:/path/to/folder"'),
    "quantize as a switch": ({"quantize": True}, 'say quantize="zero++"'),
    "norm as text": ({"max_grad_norm": "1.0"}, "max_grad_norm='1.0': give a positive norm"),
    "size as text": ({"prefetch_bytes": "1GB"}, "for example prefetch_bytes=10**9"),
    "one name": ({"units": "layers.*"}, "give a tuple of names, ('layers.*',)"),
    "classes": ({"units": (nn.Linear,)}, "give names, not modules or classes"),
    "no names": ({"keep_gathered": 3}, "keep_gathered=3: give a tuple of names"),
    "no such module": ({"units": ("layer.*",)}, "'layer.*' matches no module. The model's"),
    "half a choice": ({"step_in_backward": "yes"}, "not one of False, True, 'two-pass'"),
    "one sink": ({"sinks": print}, "sinks=(print,)"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_work_say_what_to_write(name: str) -> None:
    settings, message = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        onecopy.shard(*make(), **settings)
    assert message in str(caught.value)


RECORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "Config": (lambda: onecopy.Config(stag=3), "'stag'. Did you mean 'stage'?"),
    "by place": (lambda: onecopy.Config(3), "give settings by name, for example Config(stage=3)"),
    "Offload": (
        lambda: onecopy.Offload(gradient="host"),
        "'offload.gradient'. Did you mean 'offload.gradients'?",
    ),
    "Precision": (lambda: onecopy.Precision(dtype="bf16"), "Known settings: precision.cast_inputs"),
    "Quantize": (lambda: onecopy.Quantize(block_size=64), "Did you mean 'quantize.block'?"),
    "Activations": (
        lambda: onecopy.checkpoint_activations(make()[0], plce="host"),
        "'activations.plce'. Did you mean 'activations.place'?",
    ),
    "number": (lambda: onecopy.Offload(fraction="half"), "give a share, from 0 to 1"),
    "scale": (lambda: onecopy.Precision(loss_scale="dynamic"), "or None to let it be found"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_names_of_settings_are_checked_wherever_they_are_written(name: str) -> None:
    call, message = RECORDS[name]
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DDP": (
        DistributedDataParallel,
        "the model is a DistributedDataParallel, which averages gradients itself: pass the model "
        "inside, wrapper.module",
    ),
    "DDP inside": (
        lambda model: nn.Sequential(DistributedDataParallel(model), nn.Tanh()),
        "module 0 of the model is a DistributedDataParallel",
    ),
    "FSDP2": (fully_shard, "is what fully_shard has made"),
    "FSDP1": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "FullyShardedDataParallel, which has cut the model's states already: build the model",
    ),
}


def on_two_ranks() -> dict[str, str]:
    """What each mistake of several ranks is answered with."""
    rank = dist.get_rank()
    said: dict[str, str] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except OneCopyError as error:
            said[name] = f"{type(error).__name__}: {error}"

    for name, (wrap, _) in WRAPPED.items():
        wrapped = wrap(make()[0])
        optimizer = torch.optim.AdamW(wrapped.parameters())
        note(name, lambda model=wrapped, optimizer=optimizer: onecopy.shard(model, optimizer))
    model, _ = make()
    kinds = (torch.optim.AdamW, torch.optim.SGD)
    note("optimizers", lambda: onecopy.shard(model, kinds[rank](model.parameters(), lr=1e-3)))
    model, _ = make()
    by_rank = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    note("rates", lambda: onecopy.shard(model, by_rank))
    model, optimizer = make()
    note("none", lambda: onecopy.shard(model, None if rank else optimizer))
    note("settings", lambda: onecopy.shard(*make(), stage=3 - rank))
    other = nn.Sequential(nn.Linear(2, 4 + rank))
    note("models", lambda: onecopy.shard(other, torch.optim.SGD(other.parameters())))
    sharded = onecopy.shard(*make())
    note("DDP around it", lambda: DistributedDataParallel(sharded))
    onecopy.unshard(sharded)
    note("DDP afterwards", lambda: DistributedDataParallel(sharded))
    return said


def test_ranks_that_differ_and_models_that_are_wrapped(pool: Pool) -> None:
    for said in pool.run(2, on_two_ranks):
        for name, (_, message) in WRAPPED.items():
            assert message in said[name], name
        for name, message in {
            "optimizers": "rank 0 has optimizers AdamW of 6 parameters",
            "rates": "lr=0.1",
            "none": "rank 1 has optimizers none",
            "settings": "rank 0 has setting stage 3, rank 1 has setting stage 2",
            "models": "parameter 0.weight shape (4, 2)",
        }.items():
            assert said[name].startswith(MismatchError.__name__)
            assert message in said[name]
        assert "a sharded model was given to DistributedDataParallel" in said["DDP around it"]
        assert "DDP afterwards" not in said


def save_on_one_rank(folder: str) -> None:
    model, optimizer = make()
    onecopy.shard(model, optimizer)
    if dist.get_rank() == 0:
        onecopy.save(folder, model, optimizer)
    model(torch.ones(1, 2)).sum().backward()


def test_saving_on_one_rank_is_named(pool: Pool, tmp_path: Path) -> None:
    for failed in pool.run(2, save_on_one_rank, str(tmp_path), expect_failures=True):
        assert isinstance(failed, RankError)
        assert "rank 0 wants onecopy.save" in failed.message
        assert "such as `if rank == 0:` around a save" in failed.message


LAUNCHED = (*groups.RENDEZVOUS, *groups.OTHER_LAUNCHERS.values(), "LOCAL_RANK")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher is seen."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set in the environment and RANK, MASTER_ADDR"),
        ({"RANK": "0"}, "RANK is set in the environment and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun --nproc-per-node=N train.py"),
    ],
)
def test_half_an_environment_is_not_waited_in(
    bare: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        onecopy.shard(*make())


def test_a_script_without_a_launcher_hears_of_torchrun(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onecopy")
    onecopy.shard(*make())
    assert "alone" not in caplog.text
    dist.destroy_process_group()
    bare.setattr(torch.accelerator, "is_available", lambda: True)
    bare.setattr(torch.accelerator, "device_count", lambda: 8)
    for _ in range(2):  # and said once
        onecopy.shard(*make())
    message = "on one of 8 accelerators: torchrun --nproc-per-node=8 train.py"
    assert caplog.text.count(message) == 1
    dist.destroy_process_group()
    bare.setenv("SLURM_STEP_NUM_TASKS", "16")
    onecopy.shard(*make())
    assert "as each of the 16 that srun has started" in caplog.text


@pytest.mark.parametrize(("carried", "device"), [("cuda", "cpu"), ("cpu", "cuda:0")])
def test_a_backend_that_cannot_carry_the_model_is_named(carried: str, device: str) -> None:
    """NCCL and a model on the host, Gloo alone and a model on an accelerator."""
    process_group: Any = SimpleNamespace(_device_types=[torch.device(carried)])
    with pytest.raises(ShardingError) as caught:
        groups.check_backend(groups.Group(process_group, (0, 1), 0), torch.device(device))
    message = f"the model lies on {device}, but the process group only carries ['{carried}']: move"
    assert message in str(caught.value)


@pytest.mark.parametrize("error", [dist.DistStoreError, dist.DistNetworkError])
def test_ranks_that_do_not_come_are_named(bare: pytest.MonkeyPatch, error: type[Exception]) -> None:
    for name, value in zip(groups.RENDEZVOUS, ("1", "4", "node-0", "29500"), strict=True):
        bare.setenv(name, value)
    waiting = threading.Event()

    def wait_in_vain(*_: Any, **__: Any) -> None:
        assert waiting.wait(60)
        raise error("Timed out waiting for clients. 1/4 clients joined.")

    bare.setattr(groups, "PATIENCE", 0.01)
    bare.setattr(groups.LOGGER, "warning", lambda *said: (log.append(said), waiting.set()))
    bare.setattr(dist, "init_process_group", wait_in_vain)
    log: list[Any] = []
    with pytest.raises(CommunicationError) as caught:
        onecopy.shard(*make())
    message = "rank 1 of 4 has not met the others at node-0:29500 (Timed out waiting for clients."
    assert message in str(caught.value)
    assert "onecopy doctor" in str(caught.value)
    assert "rank 1 of 4 has waited 0.01 s for the others at node-0:29500" in str(log)


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 .* 2\.9\.1\+cu128 is installed"):
        check_torch()
    for version in ("2.13.0", "2.14.0a0+git123", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        check_torch()
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, TORCH))}" in requirements


def test_a_command_without_torch_says_how_to_get_it() -> None:
    program = "import sys\nsys.modules['torch'] = None\nfrom onecopy import cli\n"
    program += "sys.exit(cli.main(['plan', '7.5B', '--simulate']))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("needs torch, which is not installed here: pip install torch\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "make settings from the configuration of another library"),
        ("checkpoint", "read a checkpoint and compare every checksum"),
        ("trian", "train"),
        ("plan 7.5B --devises 8", "Did you mean --devices?"),
        ("plan 7.5X", "7.5X"),
        ("plan 7.5B --devices many", "--devices"),
        ("checkpoint inspect nowhere", "nowhere is no checkpoint"),
        ("checkpoint inspct nowhere", "inspect"),
        ("report nowhere", "nowhere"),
        ("doctor --device tpu", "tpu"),
        ("config from-deepspeed nowhere.json", "nowhere.json cannot be read: No such file"),
        ("config from-deepsped x", "from-deepspeed"),
    ],
)
def test_commands_say_what_is_wrong(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code in (1, 2)
    assert message in said
    assert "Traceback" not in said
