"""`onecopy plan --simulate`: the plan's own choice, run by the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from onecopy.cli import main
from onecopy.errors import ConfigError
from onecopy.planner.plan import plan
from onecopy.simulator.rehearsal import rehearse

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A folder with the configuration of a small Llama."""
    made = LlamaConfig(**LLAMA)
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(tmp_path)
    return str(tmp_path)


def build_own() -> nn.Module:
    """A model whose input only its author knows."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def batch_of_own() -> torch.Tensor:
    """What goes into it."""
    return torch.randn(4, 8)


OWN = f"{__name__}:build_own"
FEED = f"{__name__}:batch_of_own"


@pytest.mark.parametrize("stage", range(4))
def test_plan_is_an_upper_bound_of_the_step(config: str, stage: int) -> None:
    """The engine sends what the plan says, and holds no more."""
    found = plan(config, devices=8, stage=stage, micro_batch=2, sequence=64)
    rehearsal = rehearse(found, config)
    row, simulation = rehearsal.row, rehearsal.simulation
    assert row.stage == stage
    assert simulation.num_parameters == found.model.num_parameters
    assert simulation.peak.total <= row.memory.total
    sent = sum(event.num_bytes for event in simulation.events if event.unit)
    assert sent == pytest.approx(row.sent.inside + row.sent.across, rel=0.02)
    assert rehearsal.fits


def test_size_stands_for_a_gpt_of_that_size() -> None:
    """To a row of its embedding."""
    found = plan("3M", devices=4, layers=2, hidden=256, sequence=32)
    rehearsal = rehearse(found, "3M")
    assert rehearsal.simulation.num_parameters == pytest.approx(3e6, rel=0.01)


@pytest.mark.slow
def test_a_trillion_parameters_on_1024_ranks() -> None:
    """ZeRO's claim, by the real code: 16 bytes a parameter, over the ranks; units on top."""
    found = plan("1.01T", devices=1024, stage=3, layers=128, hidden=25_600, sequence=1024)
    simulation = rehearse(found, "1.01T").simulation
    numel = simulation.num_parameters
    assert numel == pytest.approx(1.01e12, rel=0.01)
    assert simulation.peak.optimizer == pytest.approx(8 * numel / 1024, rel=0.01)
    assert min(at.parameters for at in simulation.timeline) == pytest.approx(
        4 * numel / 1024, rel=0.01
    )
    sent = sum(one.num_bytes for one in simulation.events if one.unit)
    assert sent == pytest.approx(3 * 2 * numel, rel=0.02)


def test_activations_are_computed_again_where_the_plan_says_so(config: str) -> None:
    """Less of them is held, and each block is gathered as often."""
    peaks = []
    for again in ("off", "on"):
        circumstances = {"sequence": 64, "micro_batch": 8, "checkpoint_activations": again}
        found = plan(config, devices=4, stage=3, **circumstances)
        peaks.append(rehearse(found, config).simulation.peak)
    assert peaks[1].rest < peaks[0].rest / 2


def test_accumulation_reduces_in_each_backward(config: str) -> None:
    """Twice the messages of one backward."""
    events = []
    for accumulate in (1, 2):
        found = plan(config, devices=4, stage=2, sequence=16, accumulate=accumulate)
        simulated = rehearse(found, config).simulation
        events.append(sum(event.kind == "reduce" for event in simulated.events))
    assert events[1] == 2 * events[0]


def test_function_with_a_batch_of_its_own() -> None:
    """For models that do not take tokens."""
    found = plan(OWN, devices=2, stage=3)
    assert rehearse(found, OWN, FEED).simulation.peak.total > 0
    with pytest.raises(ConfigError, match="--batch module:function"):
        rehearse(found, OWN)


def test_config_objects_and_modules() -> None:
    """A config is built; a module is there already, and too late."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    found = plan(config, devices=2, stage=3)
    assert rehearse(found, config).simulation.num_parameters == found.model.num_parameters
    model = build_own()
    with pytest.raises(ConfigError, match="give the function that builds it"):
        rehearse(plan(model, devices=2), model)


def test_command_shows_and_writes_it(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, as JSON and as a page."""
    page = tmp_path / "plan.html"
    circumstances = ["plan", config, "--devices", "4", "--sequence", "32", "--simulate"]
    assert main([*circumstances, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "Simulated: stage" in shown
    assert "activations and temporaries" in shown
    assert "Along the step" in shown
    assert page.read_text().count("<polygon") == 4
    assert main([*circumstances, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["simulation"]
    assert found["peak"]["total"] == max(
        [found["peak"]["total"], *(at["total"] for at in found["timeline"])]
    )
    assert {one["kind"] for one in found["collectives"]} <= {"gather", "reduce", "refresh"}


def test_command_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """Found from where the command is started."""
    before = list(sys.path)
    try:
        assert main(["plan", OWN, "--devices", "2", "--simulate", "--batch", FEED]) == 0
    finally:
        sys.path[:] = before
    assert "one rank of 2" in capsys.readouterr().out
