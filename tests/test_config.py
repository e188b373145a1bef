"""Configurations as TOML: what is written is read, and mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecopy import Config, Precision, Quantize
from onecopy.errors import ConfigError

CONFIGS = [
    Config(),
    Config(stage=2, precision="bf16", max_grad_norm=1.0, prefetch_bytes=0),
    Config(units=("layers.*", 'a "quoted" one'), keep_gathered=("tower",), whole_parameters=True),
    Config(stall_seconds=None),
    Config(stall_seconds=2.5),
    Config(
        stage=0,
        precision=Precision(compute="fp16", keep_fp32=("LayerNorm",), loss_scale=8.0),
        step_in_backward="two-pass",
        max_grad_norm=0.5,
    ),
    Config(quantize="auto"),
    Config(quantize=Quantize()),
    Config(quantize="zero++"),
    Config(quantize=Quantize(weights=None, gradients=(None, "fp8"), block=64)),
    Config(quantize=Quantize(weights="int4", gradients=None)),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_written_is_read(config: Config, tmp_path: Path) -> None:
    text = config.to_toml()
    assert Config.from_toml(text) == config
    file = tmp_path / "onecopy.toml"
    file.write_text(text)
    assert Config.from_toml(file) == Config.from_toml(str(file)) == config


def test_only_what_was_changed_is_written() -> None:
    text = Config(precision=Precision(compute="bf16", master="bf16+16")).to_toml()
    assert text == 'stage = 3\n\n[precision]\ncompute = "bf16"\nmaster = "bf16+16"\n'


def test_short_forms_are_read() -> None:
    assert Config.from_toml('precision = "bf16"\n') == Config(precision="bf16")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("stage = 4\n", "stage=4 is not one of"),
        ("stagee = 2\n", "Did you mean 'stage'"),
        ("[precision]\ncomputes = 'bf16'\n", r"Did you mean 'precision\.compute'"),
        ("stage 2\n", "the text is not TOML"),
        ("stall_seconds = -1\n", "stall_seconds=-1: give seconds, or None"),
        ("stall_seconds = 'long'\n", "stall_seconds='long': give seconds, or None"),
        ("stage = 'zero++'\n", r'say stage="hpz" and quantize="zero\+\+"'),
        ("stage = 'node/world'\n", 'give three cuts, .* for example "whole/node/world"'),
        ("quantize = 'zero+'\n", r"quantize='zero\+' is not one of 'auto', 'zero\+\+', None"),
        ("quantize = 'int8'\n", r'does not say what is coded: give .*weights="int8"'),
        ("[quantize]\nweights = 'int6'\n", r"quantize\.weights='int6' is not one of 'int8'"),
        ("[quantize]\ngradients = 'int8'\n", "give two codes, inside a node and across nodes"),
        ("[quantize]\ngradients = ['int8', 'int']\n", "across nodes,='int' is not one of"),
        ("[quantize]\nblock = 63\n", r"quantize\.block=63: give an even number"),
        ("[quantize]\nweights = 0\ngradients = 0\n", "quantizes nothing: say quantize=None"),
        (
            "[quantize]\ngradients = [0, 0]\nerror_feedback = true\n",
            r"quantize\.gradients is None: leave one",
        ),
        ("no/such/file.toml", r"no/such/file\.toml cannot be read"),
    ],
)
def test_mistakes_are_told(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Config.from_toml(text)


@pytest.mark.parametrize(
    "policy",
    [
        Precision(),
        Precision(compute="bf16", keep_fp32=("a", "b"), cast_inputs=False),
        Quantize(weights=None, gradients=("fp8", None)),
    ],
)
def test_policies_as_code(policy: Precision | Quantize) -> None:
    assert eval(policy.written()) == policy


def test_where_values_came_from(tmp_path: Path) -> None:
    """Each value of a configuration knows its origin, through objects, files and arguments."""
    file = tmp_path / "run.toml"
    file.write_text("stage = 2\n")
    config = Config.make(Config.from_toml(file), {"max_grad_norm": 1.0})
    assert config.origin_of("stage") == str(file)
    assert config.origin_of("max_grad_norm") == "argument of shard"
    assert config.origin_of("units") == "default"
    assert Config.make(Config(stage=1), {}).origin_of("stage") == "config object"
    assert Config.make(Config(stage=1), {}) == Config(stage=1), "origins are no settings"
