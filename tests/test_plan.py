"""The plan: its figures, what it recommends, how it looks, and that its code runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.handle
from onecopy import cli
from onecopy.errors import ConfigError
from onecopy.options import speed_of
from onecopy.planner import page
from onecopy.planner.options import PlanOptions
from onecopy.planner.rows import ALL_HOST, ALL_NVME, HOST, NVME, Seconds
from onecopy.planner.sizes import parse_parameters
from onecopy.report.amounts import amount
from tests.pool import Pool

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the config of a tiny model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model of somebody's own, for module:function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Net()


def fails() -> nn.Module:
    raise RuntimeError("the weights are at home")


def three() -> int:
    return 3


# Figures ----------------------------------------------------------------------------------------


def test_zero_figure_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("plan 7.5B --devices 64".split()) == 0
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if line.startswith("states in the ZeRO paper")]
    assert line.split()[-4:] == ["120.0", "31.4", "16.6", "1.9"]


def test_what_onecopy_holds_is_said_beside_it() -> None:
    plan = onecopy.plan("7.5B", devices=64)
    billions = [7.5 * factor for factor in (18, 4 + 16 / 64, 2 + 16 / 64, 16 / 64)]
    held = [row.memory.states / 1e9 for row in plan.rows]
    # Padding and flags come on top.
    assert held == pytest.approx(billions, rel=1e-4)
    assert all(one >= other for one, other in zip(held, billions, strict=True))


def test_full_precision_has_no_figure_in_the_paper() -> None:
    plan = onecopy.plan("1B", devices=4, precision="fp32")
    assert [row.paper for row in plan.rows] == [None] * 4
    held = [row.memory.states / 1e9 for row in plan.rows]
    assert held == pytest.approx([16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4], rel=1e-4)
    assert "ZeRO paper" not in str(plan)


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adamw", 2), ("rmsprop", 1), ("momentum", 1), ("sgd", 0)]
)
def test_states_of_the_optimizer(optimizer: str, states: int) -> None:
    row = onecopy.plan("1B", optimizer=optimizer, stage=0).rows[0]
    assert row.memory.optimizer == pytest.approx(4e9 * states, rel=1e-4)
    assert row.paper == pytest.approx((2 + 2 + 4 + 4 * states) * 1e9)


def test_layers_and_hidden_say_how_a_size_is_cut() -> None:
    plan = onecopy.plan("1.5B", layers=48, hidden=1600, devices=4)
    embedding, blocks = plan.model.units
    assert (blocks.count, sum(blocks.numels)) == (48, 12 * 1600**2 + 13 * 1600)
    assert plan.model.num_parameters == 1_500_000_000
    assert sum(embedding.numels) == 1_500_000_000 - 48 * sum(blocks.numels)
    assert not any("assumed" in note for note in plan.notes)
    # More blocks than the size has room for are lighter ones.
    assert onecopy.plan("1.0B", layers=48, hidden=1600).model.units[-1].count == 48


def test_samples_make_activations_and_nothing_else() -> None:
    one, four = (onecopy.plan("1B", devices=8, micro_batch=n, stage=2).rows[0] for n in (1, 4))
    assert four.memory.activations == 4 * (one.memory.activations or 0)
    assert four.memory.states == one.memory.states


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("devices", [1, 8, 48])
def test_the_largest_model_fits_and_one_block_more_does_not(stage: int, devices: int) -> None:
    settings: dict[str, Any] = {"devices": devices, "stage": stage, "device_memory": "24GB"}
    plan = onecopy.plan("1.3B", layers=24, hidden=2048, **settings)
    largest = plan.rows[0].largest
    assert largest is not None
    embedding, block = (sum(unit.numels) for unit in plan.model.units)
    layers, rest = divmod(largest - embedding, block)
    assert rest == 0
    for more, fits in ((0, True), (1, False)):
        size = embedding + (layers + more) * block
        other = onecopy.plan(
            size, layers=layers + more, hidden=2048, checkpoint_activations="on", **settings
        )
        assert other.model.num_parameters == size
        assert other.rows[0].fits is fits


def test_nodes() -> None:
    rows = [onecopy.plan("1B", devices=16, devices_per_node=n, stage=3).rows[0] for n in (4, 16)]
    assert rows[0].sent.total == rows[1].sent.total
    # Every message to another node goes there once, however many ranks it has.
    assert rows[0].sent.across == rows[0].sent.total * 3 // 15
    assert rows[1].sent.across == 0


IN_NODES: dict[str, Any] = {"devices": 64, "devices_per_node": 8}


def test_stages_that_cut_inside_nodes_are_shown_where_these_are_said() -> None:
    """Bytes of states of 7.5e9 parameters by the papers' formulas; what they send by PAPERS 2.3."""
    numbers = onecopy.plan("7.5B", devices=64)
    assert [row.stage for row in numbers.rows] == [0, 1, 2, 3]
    one_node = onecopy.plan("7.5B", devices=8, devices_per_node=8)
    assert [row.stage for row in one_node.rows] == [0, 1, 2, 3]
    rows = {row.stage: row for row in onecopy.plan("7.5B", **IN_NODES, accumulate=3).rows}
    assert list(rows) == [0, 1, 2, 3, "hpz", "hfsdp", "mics"]
    paper = {"hpz": 16 / 64 + 2 / 8, "hfsdp": 4 / 8 + 12 / 64, "mics": 16 / 8}
    across = {1: 4, 2: 4, 3: 9, "hpz": 4, "hfsdp": 2, "mics": 2}
    for stage, per_parameter in paper.items():
        assert rows[stage].paper == 7.5e9 * per_parameter
    for stage, times in across.items():
        assert rows[stage].elements.across == times * Fraction(7, 64)
        assert rows[stage].sent.across == pytest.approx(7.5e9 * 2 * times * 7 / 64, rel=1e-3)
    only = onecopy.plan("7.5B", **IN_NODES, stage="hpz")
    assert [row.stage for row in only.rows] == ["hpz"]


def test_the_command_takes_names_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--devices 16 --devices-per-node 8 --stage hpz --sequence 16 --simulate"
    assert cli.main(["plan", "2M", "--layers", "2", "--hidden", "128", *options.split()]) == 0
    printed = capsys.readouterr().out
    assert "Recommended: hpz" in printed
    assert 'onecopy.shard(model, optimizer, stage="hpz", precision="bf16")' in printed
    assert "Simulated: hpz, one rank of 16" in printed


def test_seconds_of_links() -> None:
    """Eight devices share what leaves a node; one node has nobody to send to."""
    speeds = {"node_link": "100GB/s", "network": "12.5GB/s"}
    for row in onecopy.plan("7.5B", **IN_NODES, **speeds).rows:
        assert row.seconds.inside == row.sent.inside / 100e9
        assert row.seconds.across == 8 * row.sent.across / 12.5e9
    alone = onecopy.plan("7.5B", devices=8, **speeds)
    assert {row.seconds.across for row in alone.rows} == {None}
    text = str(onecopy.plan("7.5B", **IN_NODES, network="12.5GB/s"))
    assert "s a step across nodes" in text
    assert "s a step inside nodes" not in text


@pytest.mark.parametrize(
    ("memory", "accumulate", "expected"),
    [
        # With several backwards, less crosses nodes than at stage 2.
        ("80GB", 4, "hfsdp"),
        ("80GB", 1, 2),
        # Of those that send as little, the one that holds least.
        ("18GB", 1, "hpz"),
        ("14GB", 1, 3),
    ],
)
def test_what_crosses_nodes_counts_first(memory: str, accumulate: int, expected: int | str) -> None:
    settings = {"device_memory": memory, "checkpoint_activations": "off"}
    found = onecopy.plan("7.5B", **IN_NODES, accumulate=accumulate, **settings).recommended
    assert found is not None
    assert found.row.stage == found.config.stage == expected
    assert f"stage={json.dumps(expected)}" in found.code
    assert onecopy.Config.from_toml(found.toml).stage == expected


# What is recommended ------------------------------------------------------------------------------


def chosen(**settings: Any) -> tuple[int, bool, str | None]:
    found = onecopy.plan("7.5B", **settings).recommended
    assert found is not None
    return found.row.stage, found.row.way.recompute, found.config.precision_policy.master


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"devices": 1, "device_memory": "200GB"}, (0, False, None)),
        # The same bytes are sent at stages 0 to 2; 2 holds least.
        ({"devices": 64, "device_memory": "200GB"}, (2, False, None)),
        ({"devices": 64, "device_memory": "28GB"}, (2, False, None)),
        # Less is sent than at stage 3, at whatever else it costs.
        ({"devices": 64, "device_memory": "27.2GB"}, (2, False, "bf16+16")),
        ({"devices": 64, "device_memory": "20GB"}, (2, True, None)),
        ({"devices": 64, "device_memory": "14GB"}, (3, False, None)),
        ({"devices": 64, "device_memory": "8GB"}, (3, True, None)),
        ({"devices": 64, "device_memory": "14GB", "checkpoint_activations": "on"}, (3, True, None)),
        # Stages 1 and 2 send k + 1 times the model, stage 0 sends 2k times.
        ({"devices": 8, "accumulate": 4, "device_memory": "200GB"}, (2, False, None)),
    ],
)
def test_the_fastest_that_fits(
    settings: dict[str, Any], expected: tuple[int, bool, str | None]
) -> None:
    assert chosen(**settings) == expected


def test_reasons_name_what_was_set_aside() -> None:
    found = onecopy.plan("7.5B", devices=64, device_memory="8GB").recommended
    assert found is not None
    text = "\n".join(found.reasons)
    for words in ("less does not fit: stage 2 needs", "activation checkpointing: with all", "bf16"):
        assert words in text


GRADIENTS_ON_DEVICE = replace(NVME, gradients="device")
GRADIENTS_ON_HOST = replace(NVME, gradients="host")
MIXED = replace(NVME, parameters="host")
TIGHT: dict[str, Any] = {"devices": 2, "device_memory": "40GB"}


def test_states_in_host_memory_where_nothing_fits_on_the_devices() -> None:
    """Least communication, then least offload; bytes by the table of docs/offload.md."""
    plan = onecopy.plan("7.5B", **TIGHT, checkpoint_activations="on")
    found = plan.recommended
    assert found is not None
    assert found.config.offload == HOST
    assert 'stage=2, precision="bf16", offload="cpu")' in found.code
    assert "[offload]" in found.toml
    text = "\n".join(found.reasons)
    assert "GB in host memory for that, which is not checked: say --host-memory" in text
    offloaded = [row for row in plan.rows if row.way.tier == "host"]
    assert [row.stage for row in offloaded] == [0, 1, 2, 3, 3]
    on_device = [row.memory.states / 7.5e9 for row in offloaded]
    assert on_device == pytest.approx([2, 4, 2, 1, 0], rel=1e-4)
    on_host = [row.outside["host"].states / 7.5e9 for row in offloaded]
    assert on_host == pytest.approx([16, 8, 8, 8, 8], rel=1e-4)
    moved = [row.moved / 7.5e9 for row in offloaded]
    assert moved == pytest.approx([4, 2, 2, 2, 3], rel=1e-4)
    hosts = [row.outside["host"] for row in offloaded]
    assert all(one.node == 2 * (one.states + one.buffers) for one in hosts)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # All that fits on devices comes first, whatever it sends.
        ({"devices": 64, "device_memory": "14GB"}, (3, None)),
        ({"devices": 4, "device_memory": "20GB"}, (2, HOST)),
        ({"devices": 4, "device_memory": "15GB"}, (3, HOST)),
        ({"devices": 4, "device_memory": "5GB"}, (3, ALL_HOST)),
        ({"devices": 4, "device_memory": "5GB", "host_memory": "119GB", "nvme": "80GB"}, None),
        # Then NVMe, and of that as little as possible: what is not said has no limit.
        ({"devices": 4, "device_memory": "15GB", "host_memory": "20GB"}, (3, GRADIENTS_ON_DEVICE)),
        ({"devices": 4, "device_memory": "14GB", "host_memory": "100GB"}, (3, GRADIENTS_ON_HOST)),
        ({"devices": 4, "device_memory": "14GB", "host_memory": "20GB", "nvme": "1TB"}, (3, NVME)),
        ({"devices": 4, "device_memory": "5GB", "host_memory": "25GB", "nvme": "1TB"}, (3, MIXED)),
        (
            {"devices": 4, "device_memory": "5GB", "host_memory": "10GB", "nvme": "1TB"},
            (3, ALL_NVME),
        ),
        # Stage 0 would have every state once a rank.
        ({"devices": 1, "device_memory": "25GB"}, (0, HOST)),
        ({"devices": 4, "device_memory": "2GB"}, None),
    ],
)
def test_the_fastest_of_all_tiers(settings: dict[str, Any], expected: Any) -> None:
    found = onecopy.plan("7.5B", **{"host_memory": "1TB", **settings}).recommended
    assert (found and (found.row.stage, found.row.way.offload)) == expected


def test_a_host_that_is_too_small_is_said() -> None:
    plan = onecopy.plan("7.5B", **TIGHT, host_memory="100GB", nvme="80GB")
    assert plan.recommended is None
    text = "\n".join(plan.advice)
    for words in ("but each node takes 12", " of 100.0 GB in host memory", "GB on NVMe"):
        assert words in text, text
    tiny = onecopy.plan("7.5B", devices=2, device_memory="1GB", host_memory="1TB")
    assert "with states in host memory stage 3 still needs" in "\n".join(tiny.advice)


def test_the_largest_model_with_and_without_the_host() -> None:
    rows = onecopy.plan("7.5B", devices=8, host_memory="1TB", stage=3).rows
    alone, host, everything = (row.largest for row in rows)
    assert alone and host and everything
    assert alone < host <= everything
    # 16 bytes a parameter of the node's hosts.
    assert 0.97e12 < 16 * everything <= 1e12
    # Without a limit there is no answer.
    unknown = onecopy.plan("7.5B", **TIGHT, stage=3).rows
    assert [row.largest is None for row in unknown] == [False, True, True]


def test_states_on_nvme() -> None:
    """The next tier: bytes by rank, by node and by what a step moves, in bf16 with Adam."""
    settings: dict[str, Any] = {"devices": 8, "device_memory": "30GB", "host_memory": "100GB"}
    plan = onecopy.plan("70B", **settings, nvme="8TB")
    found = plan.recommended
    assert found is not None
    assert found.row.way.tier == "nvme"
    assert found.config.offload == ALL_NVME
    assert 'offload="nvme:/nvme")' in found.code
    assert "# /nvme: a folder on each node's drive" in found.code
    assert onecopy.Config.from_toml(found.toml) == found.config
    assert "a rank reads 175.0 GB from NVMe a step and writes 157.5 GB" in "\n".join(found.reasons)
    nvme = [row for row in plan.rows if row.way.tier == "nvme"]
    owned = [70e9, *(4 * [70e9 / 8])]
    assert [row.way.offload for row in nvme] == [NVME] * 4 + [ALL_NVME]

    def each(values: list[int]) -> list[float]:
        return [value / numel for value, numel in zip(values, owned, strict=True)]

    states = each([row.outside["nvme"].states for row in nvme])
    assert states == pytest.approx([16, 16, 16, 16, 18], rel=1e-4)
    read = each([row.swapped.read for row in nvme])
    assert read == pytest.approx([16, 16, 16, 16, 20], rel=1e-4)
    written = each([row.swapped.written for row in nvme])
    assert written == pytest.approx([16, 16, 16, 16, 18], rel=1e-4)
    assert "NVMe" not in str(onecopy.plan("70B", devices=8))


def test_seconds_and_the_share_of_computing() -> None:
    """Only where speeds are said; the share is the paper's equation 6."""
    settings: dict[str, Any] = {"devices": 8, "device_memory": "40GB", "host_memory": "200GB"}
    settings |= {"nvme": "8TB", "stage": 3, "checkpoint_activations": "on"}
    silent = onecopy.plan("70B", **settings)
    assert all(row.seconds == Seconds() for row in silent.rows)
    assert "How long reads and writes take is not known" in str(silent)
    speeds = {"nvme_read": "6GB/s", "nvme_write": "3GB/s", "host_link": "10GB/s"}
    row = onecopy.plan("70B", **settings, **speeds, device_tflops=100).rows[-1]
    assert row.way.offload == ALL_NVME
    assert row.seconds.link == row.moved / 10e9
    nvme = 8 * row.swapped.read / 6e9 + 8 * row.swapped.written / 3e9
    assert row.seconds.nvme == pytest.approx(nvme)
    computing = 8 * 2048 * 70e9 / 100e12
    share = computing / (computing + nvme + row.moved / 10e9)
    assert row.seconds.computing == pytest.approx(share)
    for wrong, words in (
        ({"nvme_read": "1GB/s"}, "--nvme-write"),
        ({"host_link": "x"}, "no speed"),
    ):
        with pytest.raises(ConfigError, match=words):
            onecopy.plan("70B", **settings, **wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": 64},
        {**TIGHT, "host_memory": "1TB", "nvme": "8TB"},
        {"devices": 2, "device_memory": "4GB", "host_memory": "1GB"},
    ],
)
def test_table_json_and_page_show_the_same(settings: dict[str, Any]) -> None:
    plan = onecopy.plan("7.5B", **settings)
    printed, shown = str(plan), plan._repr_html_()
    cells = [
        "".join(cell.itertext()) for row in ElementTree.fromstring(shown).iter("tr") for cell in row
    ]
    tables = printed.split("GB per rank")[1:]
    of_text = [
        word
        for line in "".join(tables).splitlines()
        for word in re.findall(r"(?<= )(?:-|too much|[\d,.]+(?: %|B)?)(?=\s|$)", line)
    ]
    rows = plan.to_json()["rows"]
    for row in rows:
        for name, size in row["memory"].items():
            assert size is None or amount(size, "GB") in cells, name
            assert size is None or not size or amount(size, "GB") in of_text, name
        for outside in row["outside"].values():
            for name in ("states", "buffers", "node"):
                assert not outside[name] or amount(outside[name], "GB") in cells, name
        for size in (row["moved"], *row["swapped"].values()):
            assert not size or amount(size, "GB") in of_text
    assert shown.count("<table") == len(tables) == len({row["tier"] for row in rows})


def test_what_helps_where_nothing_fits() -> None:
    settings: dict[str, Any] = {"host_memory": "100GB", "nvme": "100GB", "micro_batch": 4}
    plan = onecopy.plan("70B", devices=2, device_memory="40GB", **settings)
    assert plan.recommended is None
    text = "\n".join(plan.advice)
    for words in ("comes nearest", "--micro-batch 1", "64 devices like these would do"):
        assert words in text
    assert "Nothing fits" in str(plan)
    assert "Nothing fits" in plan._repr_html_()
    assert plan.to_json()["recommended"] is None
    assert onecopy.plan("70B", devices=128, device_memory="40GB").recommended is not None


def test_what_helps_depends_on_what_was_asked() -> None:
    plan = onecopy.plan(
        "70B", stage=2, precision="fp32", host_memory="1GB", checkpoint_activations="off"
    )
    text = "\n".join(plan.advice)
    for words in ("leave --stage out", "--precision bf16", "--checkpoint-activations auto"):
        assert words in text


# The largest ----------------------------------------------------------------------------------

DGX_2 = "largest --devices 16 --devices-per-node 16 --device-memory 32GB --host-memory 1.5TB"


def test_the_largest_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the order of ZeRO-Infinity's figure 6a, and each by its own plan: more does not fit."""
    arguments = f"plan {DGX_2} --nvme 28TB --sequence 1024".split()
    assert cli.main([*arguments, "--json", "--html", str(tmp_path / "largest.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    here = [one["here"] for one in found if one["strategy"] != "3D parallel"]
    assert here == sorted(here)
    # What was trained there: 1.4, 10, 13, 20, 70 and 1000; wide layers are whole on a device here.
    trained = [1.4e9, 10e9, 13e9, 20e9, 70e9]
    assert all(1 <= ours / theirs < 1.4 for ours, theirs in zip(here, trained, strict=False))
    assert 300e9 < here[-1] < 400e9
    for one in found:
        if one["here"] is not None and "Infinity, NVMe" not in one["strategy"]:
            assert one["here"] < 1.3 * one["states_alone"]
    settings: dict[str, Any] = {"devices": 16, "devices_per_node": 16, "device_memory": "32GB"}
    settings |= {"host_memory": "1.5TB", "sequence": 1024, "checkpoint_activations": "on"}
    for one, stage in ((found[1], 2), (found[4], 3)):
        fits = [
            onecopy.plan(int(one["here"] * factor), stage=stage, **settings).rows[0].fits
            for factor in (1, 1.02)
        ]
        assert fits == [True, False]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    shown = (tmp_path / "largest.html").read_text()
    for word in ("ZeRO-Infinity, NVMe", "1.4T", "host memory", "gradients on their way"):
        assert word in printed
        assert word in shown
    ElementTree.fromstring(shown.partition("\n")[2])


def test_the_largest_without_a_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("plan largest --devices 8 --device-memory 1MB --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["here"] for one in found} == {0, None}
    assert cli.main("plan largest --simulate".split()) == 2
    assert "give that instead of largest" in capsys.readouterr().err
    assert cli.main("plan largest --checkpoint-activations off".split()) == 2


# Where models come from ---------------------------------------------------------------------------


def test_all_ways_to_name_a_model(llama: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the test extra")
    folder = onecopy.plan(llama)
    for same in (str(llama), llama / "config.json"):
        assert onecopy.plan(same).model.units == folder.model.units
    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    assert folder.model.num_parameters == sum(p.numel() for p in model.parameters())
    for other in (config, model, lambda: transformers.LlamaForCausalLM(config)):
        found = onecopy.plan(other)
        assert [row.memory for row in found.rows] == [row.memory for row in folder.rows]
    assert onecopy.plan(7_500_000_000).model.num_parameters == 7_500_000_000


def test_a_function_is_called_where_tensors_have_no_memory() -> None:
    plan = onecopy.plan("tests.test_plan:build_model", devices=2)
    assert plan.model.num_parameters == sum(p.numel() for p in Net().parameters())
    assert [unit.name for unit in plan.model.units if unit.count > 1] == ["blocks.0"]
    # How wide its values are is not known.
    assert plan.rows[0].memory.activations is None
    assert "Activations are not counted" in str(plan)
    assert onecopy.plan(Net, layers=4, hidden=64).rows[0].memory.activations


def test_frozen_parameters_have_no_states() -> None:
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    trainable = sum(p.numel() for p in model.head.parameters())
    row = onecopy.plan(model, stage=0, precision="fp32").rows[0]
    assert row.memory.optimizer < 8 * trainable + 8 * 64
    assert row.memory.parameters >= 4 * sum(p.numel() for p in model.parameters())


def test_modules_kept_in_fp32_are_counted_so(llama: Path) -> None:
    pytest.importorskip("transformers", reason="the test extra")
    policy = onecopy.Precision(compute="bf16", keep_fp32=("LlamaRMSNorm",))
    kept, plain = (onecopy.plan(llama, precision=one, stage=0) for one in (policy, "bf16"))
    norms = (2 * 4 + 1) * 64
    # An fp32 parameter is its own master: 4 bytes in place of 6.
    saved = plain.rows[0].memory.parameters - kept.rows[0].memory.parameters
    assert abs(saved - 2 * norms) < 10 * 64 * 6
    assert kept.model.num_parameters == plain.model.num_parameters
    assert sum(unit.widths is not None for unit in kept.model.units) >= 1


def test_what_transformers_keeps_in_fp32_is_counted_so(tmp_path: Path) -> None:
    """T5's wo, under fp16."""
    pytest.importorskip("transformers", reason="the test extra")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
    text = json.dumps({"model_type": "t5", "vocab_size": 500, **sizes})
    (tmp_path / "config.json").write_text(text)
    fp16, bf16 = (onecopy.plan(tmp_path, precision=one, stage=0) for one in ("fp16", "bf16"))
    assert fp16.model.num_parameters == bf16.model.num_parameters
    outputs = 6 * 64 * 128
    saved = bf16.rows[0].memory.parameters - fp16.rows[0].memory.parameters
    assert abs(saved - 2 * outputs) < 30 * 64 * 6
    assert fp16.recommended is not None
    assert "T5ForConditionalGeneration(AutoConfig" in fp16.recommended.code


def test_other_families_are_built_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the test extra")
    config = {
        **{key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures")},
        "model_type": "olmo2",
        "pad_token_id": 0,
    }
    file = tmp_path / "olmo.json"
    file.write_text(json.dumps(config))
    plan = onecopy.plan(file, devices=2)
    assert plan.model.num_parameters > 200_000
    assert [unit.count for unit in plan.model.units if unit.count > 1] == [4]
    assert any("not known" in note for note in plan.notes)
    assert "Olmo2ForCausalLM(AutoConfig" in (plan.recommended.code if plan.recommended else "")


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("7.5Q", "write it as 7.5B"),
        ("0B", "no model size"),
        ("gpt2-xl", "there is no file or folder"),
        ("no/such/config.json", "there is no file or folder"),
        ("no_such_module:build", "importing no_such_module failed"),
        ("tests.test_plan:nothing", "has no 'nothing'"),
        ("tests.test_plan:LLAMA", "is a dict, not a function"),
        ("tests.test_plan:fails", "the weights are at home"),
        ("tests.test_plan:three", "returned a int"),
        (3.5, "give a size"),
        (nn.ReLU, "has no parameters"),
    ],
)
def test_models_that_cannot_be_planned(model: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        onecopy.plan(model)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no model_type"),
        ('{"hidden_size": 3}', "has no model_type"),
        ('{"model_type": "llama", "hidden_size": 0}', "hidden_size=0: give a whole number"),
        ('{"model_type": "no_such_family"}', "cannot build a model of type 'no_such_family'"),
    ],
)
def test_configs_that_cannot_be_read(tmp_path: Path, text: str, advice: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=advice):
        onecopy.plan(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        onecopy.plan(tmp_path)


@pytest.mark.parametrize("speed", ["100Gbit/s", "100 Gb/s", "100gbps", "12.5GB/s", "12.5gB"])
def test_speeds_of_networks_in_bits_and_in_bytes(speed: str) -> None:
    """Networks are sold in bits: 100 Gb/s, as onecopy doctor shows them, is not 100 GB/s."""
    assert speed_of(speed) == 12_500_000_000


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"devises": 2}, "Did you mean 'devices'"),
        ({"devices": 0}, "--devices is 0: give 1 or more"),
        ({"devices": 12}, "say --devices-per-node too"),
        ({"devices": 8, "devices_per_node": 3}, "leaves a node with 2"),
        ({"devices": 4, "devices_per_node": 8}, "but --devices, over all nodes, is 4"),
        ({"network": "fast"}, "in bytes, or 25Gbit/s in bits"),
        ({"network": "1gb/s"}, "in bytes, or 25Gbit/s in bits"),
        ({"device_memory": "much"}, "no size: say 5GB"),
        ({"host_memory": "much"}, "no size: say 5GB"),
        ({"nvme": "much"}, "no size: say 5GB"),
        ({"micro_batch": 0}, "--micro-batch is 0"),
        ({"optimizer": "sophia"}, "choose one of adamw"),
        ({"precision": "fp8"}, "choose one of fp32, bf16"),
        ({"stage": 4}, "choose one of 0, 1, 2, 3"),
        ({"checkpoint_activations": "maybe"}, "choose one of auto, on, partition, host"),
    ],
)
def test_bad_settings_give_advice(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        onecopy.plan("1B", **settings)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7.5B", 7_500_000_000),
        ("350m", 350_000_000),
        ("1.5 T", 15 * 10**11),
        ("124_439_808", 124439808),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_parameters(text) == number


def test_split_masters_that_were_asked_for_have_all_their_rows() -> None:
    policy = onecopy.Precision(compute="bf16", master="bf16+16")
    rows = onecopy.plan("1B", devices=4, precision=policy, host_memory="1TB").rows
    # They keep half of each master on the device, so none of it is offloaded.
    assert [(row.stage, row.way.tier) for row in rows] == [(n, "device") for n in (0, 1, 2, 3)]


def test_policies_from_code() -> None:
    policy = onecopy.Precision(compute="bf16", gradient="bf16")
    plan = onecopy.plan("1B", devices=4, precision=policy)
    assert plan.rows[2].memory.states == pytest.approx((2 + 14 / 4) * 1e9, rel=1e-4)
    assert plan.recommended is not None
    assert 'onecopy.Precision(compute="bf16", gradient="bf16")' in plan.recommended.code


# How it looks -----------------------------------------------------------------------------------


def test_sizes_and_configs_need_no_torch(llama: Path) -> None:
    program = (
        "import sys\n"
        "from onecopy import cli\n"
        f"for model in ('7.5B', {str(llama)!r}):\n"
        "    assert cli.main(['plan', model, '--devices', '64', '--html', sys.argv[1]]) == 0\n"
        "    assert cli.main(['plan', model, '--json']) == 0\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(llama / "plan.html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_json(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(llama), "--devices", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = onecopy.plan(llama, devices=2)
    assert found == json.loads(json.dumps(plan.to_json()))
    row = found["rows"][1]
    assert sum(row["at_peak"].values()) == row["memory"]["total"]
    assert all(row["at_peak"][kind] <= row["memory"][kind] for kind in row["at_peak"])
    assert onecopy.Config.from_toml(found["recommended"]["toml"]).stage == 2


@pytest.mark.parametrize("memory", ["80GB", "5MB", "2MB"])
def test_pages(llama: Path, memory: str) -> None:
    plan = onecopy.plan(llama, devices=2, device_memory=memory)
    part = plan._repr_html_()
    # Well-formed: every tag ends.
    tree = ElementTree.fromstring(part)
    assert len(tree.findall(".//table//tr")) > 10
    space = "{http://www.w3.org/2000/svg}"
    bars = tree.findall(f".//{space}rect")
    kinds = [value for row in plan.rows for value in row.memory.at_peak.values() if value]
    widths = [float(bar.attrib["width"].removesuffix("%")) for bar in bars]
    assert len(widths) == len(kinds)
    scale = sum(widths) / sum(kinds)
    assert widths == pytest.approx([scale * value for value in kinds], abs=0.01)
    assert page.as_page(plan).startswith("<!DOCTYPE html>")
    assert part in page.as_page(plan)


def test_a_page_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("plan 1B --html no/such/folder/plan.html".split()) == 2
    assert "make the folder first" in capsys.readouterr().err


def test_names_of_models_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert "&lt;b&gt;" in onecopy.plan(folder)._repr_html_()
    assert "<b>" not in onecopy.plan(folder)._repr_html_()


# The code runs ----------------------------------------------------------------------------------


def run_code(code: str, toml: str, kind: str) -> tuple[float, float, int, str | None, int]:
    """Run recommended code and train: two losses, stage, master, and forwards a backward."""
    space: dict[str, Any] = {"build_model": build_model}
    exec(compile(code, "<recommended>", "exec"), space)
    model, optimizer = space["model"], space["optimizer"]
    config = onecopy.handle.of(model).engine.config
    assert onecopy.Config.from_toml(toml) == config
    forwards = []
    first = next(m for m in model.modules() if m is not model and type(m) is nn.Linear)
    first.register_forward_pre_hook(lambda *_: forwards.append(1))
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(12):
        if kind == "llama":
            ids = torch.arange(32).view(2, 16)
            loss = model(input_ids=ids, labels=ids).loss
        else:
            loss = (model(torch.ones(4, 64)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    master = config.precision_policy.master
    return losses[0], losses[-1], config.stage, master, len(forwards) // 12


CASES = [
    ("llama", {"device_memory": "80GB"}),
    ("llama", {"checkpoint_activations": "on"}),
    ("llama", {"stage": 3, "checkpoint_activations": "on"}),
    ("llama", {"stage": 0, "optimizer": "momentum", "precision": "fp32"}),
    ("tests.test_plan:build_model", {"stage": 3, "checkpoint_activations": "on"}),
    ("tests.test_plan:Net", {"stage": 1, "optimizer": "adagrad"}),
    ("133K", {"stage": 2, "optimizer": "rmsprop"}),
    ("llama", {"device_memory": "1.1MB", "host_memory": "1GB", "sequence": 16}),
    ("tests.test_plan:Net", {"device_memory": "0.5MB"}),
    ("133K", {"device_memory": "1.95MB", "sequence": 1, "layers": 4, "hidden": 4}),
]


@pytest.mark.parametrize(("model", "settings"), CASES)
def test_recommended_code_runs(
    pool: Pool, llama: Path, model: str, settings: dict[str, Any]
) -> None:
    if model == "llama":
        pytest.importorskip("transformers", reason="the test extra")
    plan = onecopy.plan(llama if model == "llama" else model, devices=2, **settings)
    found = plan.recommended
    assert found is not None
    for before, after, stage, master, forwards in pool.run(
        2, run_code, found.code, found.toml, model
    ):
        assert after < before
        assert (stage, master) == (found.row.stage, found.config.precision_policy.master)
        assert forwards == (2 if found.row.way.recompute else 1)


def test_options_are_documented() -> None:
    page_text = (Path(__file__).parent.parent / "docs/planner.md").read_text()
    for name in PlanOptions.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in page_text, name


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page_text = (Path(__file__).parent.parent / "docs/planner.md").read_text()
    shown, *_ = re.findall(r"```console\n\$ onecopy (.*?)\n(.*?)```", page_text, re.DOTALL)
    assert cli.main(shown[0].split()) == 0
    assert capsys.readouterr().out.rstrip() == shown[1].rstrip()
