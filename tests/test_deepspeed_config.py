"""Configurations of DeepSpeed: every key is answered, and the code to paste does what they say."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import onecopy
from onecopy import cli
from onecopy.config import Config
from onecopy.deepspeed_config import Conversion, catalogue, convert
from onecopy.deepspeed_config.catalogue import ALIASES, KINDS, known_keys
from onecopy.deepspeed_config.optimizers import ARGUMENTS
from onecopy.errors import ConfigError
from onecopy.policies import Offload, Precision, Quantize
from tests.pool import Pool
from tests.rank import RankError

# The names in DeepSpeed 0.19.8's configuration classes and constants, and what 0.14 had beside.
FIELDS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "managed_gradient_accumulation steps_per_print dump_state disable_allgather "
    "communication_data_type seq_parallel_communication_data_type prescale_gradients "
    "gradient_predivide_factor gradient_allreduce_op gradient_clipping sparse_gradients "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown "
    "memory_breakdown use_data_before_expert_parallelism dataloader_drop_last log_level "
    "disable_python_gc vocabulary_size comms_logger tensorboard wandb csv_monitor comet amp "
    "flops_profiler autotuning hybrid_engine pipeline data_efficiency weight_quantization compile "
    "timers tensor_parallel expert_parallel datastates_ckpt compression_training nebula "
    "quantize_training eigenvalue sparse_attention elasticity graph_harvesting "
    "curriculum_learning progressive_layer_drop sequence_parallel_size",
    "optimizer": "type legacy_fusion",
    "scheduler": "type",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads fused_mode",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "bfloat16": "enabled",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write "
    "checkpoint_serialization writer",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events "
    "use_gds",
    "activation_checkpointing": "partition_activations cpu_checkpointing number_checkpoints "
    "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm "
    "compute_grad_norm load_from_fp32_weights elastic_checkpoint zenflow sub_group_size "
    "cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size "
    "stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance param_persistence_threshold "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 "
    "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param "
    "mics_shard_size mics_hierarchical_params_gather memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu "
    "pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory "
    "pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc "
    "convert_grad_on_cpu",
}

ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), "auto")}
SIZES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BUCKETS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": "auto",
}
# In kind what Accelerate ships as templates, and the Hugging Face guide shows.
TEMPLATES: dict[str, tuple[dict[str, Any], Config]] = {
    "stage 1": (
        {
            "fp16": FP16,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {"stage": 1, **BUCKETS},
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            **SIZES,
        },
        Config(stage=1, precision="fp16"),
    ),
    "stage 2": (
        {
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {"stage": 2, **BUCKETS},
            "gradient_clipping": 0.5,
            **SIZES,
        },
        Config(stage=2, precision="bf16", max_grad_norm=0.5),
    ),
    "stage 2, offload": (
        {
            "fp16": {**FP16, "enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                **BUCKETS,
            },
            "wall_clock_breakdown": False,
        },
        Config(stage=2, offload="cpu", max_grad_norm=1.0),
    ),
    "stage 3": (
        {
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
                "sub_group_size": 1e9,
                **BUCKETS,
            },
            "gradient_clipping": "auto",
            **SIZES,
        },
        Config(stage=3, precision="bf16"),
    ),
    "stage 3, offload": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1e9},
                "stage3_prefetch_bucket_size": 5e7,
            },
            "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1},
            "gradient_clipping": 0,
        },
        Config(stage=3, precision="bf16", offload="nvme:/nvme", prefetch_bytes=10**8),
    ),
}


def fates(found: Conversion) -> dict[str, str]:
    return {one.key: one.fate for one in found.answers}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    values: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return values


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_become_settings(name: str) -> None:
    values, expected = TEMPLATES[name]
    assert Config.from_deepspeed(values) == expected


def test_every_field_of_deepspeed_is_known() -> None:
    known = {*known_keys(), *ALIASES, "bfloat16.enabled"}
    for section, names in FIELDS.items():
        for name in names.split():
            assert f"{section}.{name}".lstrip(".") in known


def test_every_key_gets_one_answer(seed: int) -> None:
    """Alone and with any others, whatever their values: nothing passes in silence."""
    draw = random.Random(seed)
    keys = [key for key in [*known_keys(), *ALIASES] if key != "zero_optimization"]
    choices: dict[str, list[Any]] = {
        "switch": [True, False],
        "number": [0, 2, 1e3, 0.5],
        "whole number": [0, 1, 2, 8],
        "text": ["cpu", "nvme", "none", "AdamW", "WarmupLR", "/folder", "Lion"],
        "dtype": ["bf16", "fp16", "float32"],
        "section": [{}, {"err_beta": 0.8}],
    }

    def value_of(key: str) -> Any:
        kind = KINDS.get(ALIASES.get(key, (key,))[0])
        free = [True, False, {}, {"enabled": True}, 3, "text", [1]]
        return draw.choice([*(choices[kind] if kind else free), "auto", None])

    zero = [key for key in keys if key.startswith("zero_optimization.") and not is_mute(key)]
    samples = [draw.sample(keys, 20) for _ in range(100)]
    samples += [draw.sample(zero, 8) for _ in range(200)]
    for chosen in [[key] for key in keys] + samples:
        flat = {key: value_of(key) for key in chosen if _is_alone(key, chosen)}
        found = convert(nested(flat))
        answered = [one.key for one in found.answers if not one.key.endswith("(not there)")]
        assert sorted(answered) == sorted(flat), flat
        assert all(one.text for one in found.answers)
        if not found.refused:
            Config.from_deepspeed(nested(flat))


def is_mute(key: str) -> bool:
    """It has the same answer in every company."""
    return key in (*catalogue.IGNORED, *catalogue.WHOLE, *ALIASES)


def _is_alone(key: str, chosen: list[str]) -> bool:
    """Only one spelling of a key may be there."""
    same = [one for one in chosen if ALIASES.get(one, (one,))[0] == ALIASES.get(key, (key,))[0]]
    return same[0] == key


ZERO_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"stage": 0}),
    "old switch": ({"zero_optimization": True}, {"stage": 1}),
    "stage is left open": ({"zero_optimization": {"stage": "auto"}}, {"stage": 3}),
    "old offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"stage": 2, "offload": "cpu"},
    ),
    "parameters too": (
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}},
        {"offload": Offload(optimizer="host", gradients="host", parameters="host")},
    ),
    "parameters below stage 3": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"stage": 2},
    ),
    "a part": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "ratio": 0.3, "super_offload": True},
            }
        },
        {
            "offload": Offload(
                optimizer="host", gradients="host", fraction=0.3, speculative_step=True
            )
        },
    ),
    "hpz": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 8,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
            }
        },
        {"stage": "hpz", "node_size": 8, "quantize": Quantize(error_feedback=True)},
    ),
    "frozen weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        {"quantize": Quantize(weights=None, gradients=None, frozen="int8")},
    ),
    "mics": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
        {"stage": "mics", "node_size": 4},
    ),
    "dtypes": (
        {
            "bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "communication_data_type": "fp32",
        },
        {"stage": 0, "precision": Precision(compute="bf16", reduce="fp32", master="bf16")},
    ),
    "a fixed scale": (
        {"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": False}},
        {
            "stage": 0,
            "precision": Precision(compute="fp16", loss_scale=128.0, cast_inputs=False),
        },
    ),
}


@pytest.mark.parametrize("name", ZERO_CASES)
def test_keys_become_settings(name: str) -> None:
    values, settings = ZERO_CASES[name]
    expected = Config(max_grad_norm=1.0, **settings)
    assert Config.from_deepspeed(values) == expected


def test_comments_that_are_keys_are_told() -> None:
    found = convert({"_comment": "for the cluster", "bf16": {"//": "on A100", "enabled": True}})
    assert fates(found)["_comment"] == fates(found)["bf16.//"] == "ignored"


def test_old_spellings_say_so() -> None:
    found = convert({"bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True}})
    texts = {one.key: one.text for one in found.answers}
    assert texts["bfloat16.enabled"].endswith("(deprecated spelling of enabled)")
    found = convert({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}})
    assert "deprecated" in found.answers[0].text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "elasticity": ({"elasticity": {"enabled": True}}, "elasticity: remove it: checkpoints load"),
    "optimizer": ({"optimizer": {"type": "OneBitAdam"}}, "1-bit Adam is not among torch.optim"),
    "typo of it": ({"optimizer": {"type": "NAdm"}}, "Did you mean NAdam"),
    "argument": ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "mean momentum"),
    "clipping": ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "gradient_clip"),
    "scheduler": ({"scheduler": {"type": "OneCycle"}}, "OneCycleLR"),
    "no total": ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps"),
    "rate": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}},
        "warmup_max_lr: give one number",
    ),
    "stage": ({"zero_optimization": {"stage": 4}}, "stages are 0, 1, 2 and 3"),
    "drive": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
            }
        },
        'parameters on a drive lie below their masters: say "nvme" in offload_optimizer',
    ),
    "no path": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        "needs nvme_path",
    ),
    "sum": ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
    "both dtypes": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "remove one of both"),
    "batch": (
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
        "no multiple of train_micro_batch_size_per_gpu 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_with_a_remedy(name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_deepspeed(values)


def test_all_that_is_refused_is_said_at_once() -> None:
    values = {key: value for case, _ in REFUSED.values() for key, value in case.items()}
    found = convert(values)
    assert len(found.refused) >= 6
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(values)
    for one in found.refused:
        assert f"  {one.key}: {one.text}" in str(caught.value).splitlines()


MISTAKES: dict[str, tuple[Any, str]] = {
    "typo": ({"zero_optimisation": {"stage": 3}}, "Did you mean zero_optimization"),
    "typo inside": (
        {"zero_optimization": {"overlap_com": True}},
        "no key zero_optimization.overlap_com. Did you mean zero_optimization.overlap_comm?",
    ),
    "wrong section": ({"overlap_comm": True}, "Did you mean zero_optimization.overlap_comm?"),
    "quotes": ({"zero_optimization": {"stage": "3"}}, "stage is '3': give a whole number"),
    "text for a switch": ({"bf16": {"enabled": "true"}}, "give true or false, without quotes"),
    "no section": ({"fp16": True}, "fp16 is a section, and its value is True: give an object"),
    "number": ({"zero_optimization": 3}, "zero_optimization is 3: give an object"),
    "both spellings": (
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        "say the same: remove one",
    ),
    "something else": (3, "takes the path of a JSON file or a dict"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    values, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_deepspeed(values)


FILES = {
    '{"bf16": {"enabled": true}, // comment\n}': "Remove the comments",
    '{"bf16": {"enabled": true},\n}': "Remove the comma before a closing bracket",
    '{"bf16": {"enabled": True}}': "Write true, false and null",
    "{'bf16': {}}": "double quotes",
    "": "The file is empty",
    "[]": "holds a list: a configuration is an object",
    '{"fp16": {}, "fp16": {"enabled": true}}': "the key 'fp16' 2 times",
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_are_not_json_say_what_to_change(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(FILES[text])) as caught:
        Config.from_deepspeed(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: No such file"):
        Config.from_deepspeed("nowhere.json")


def test_arguments_of_optimizers_are_those_of_torch() -> None:
    for name, arguments in ARGUMENTS.items():
        there = [*inspect.signature(getattr(torch.optim, name)).parameters][1:]
        assert sorted(arguments) == sorted(there), name


# What DeepSpeed 0.19.8's own schedulers say for ten updates, of an optimizer made with lr=0.002.
SCHEDULES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
        [1e-5, 1e-5, 0.000505, 0.000794556437857, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001],
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 3, "warmup_type": "linear"},
        [0.0, 0.0, 0.000666666666667, 0.00133333333333, *[0.002] * 6],
    ),
    (
        "WarmupDecayLR",
        {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 3,
            "total_num_steps": 8,
        },
        [0.0, 0.0, 0.000189278926071, 3e-4, 3e-4, 2.4e-4, 1.8e-4, 1.2e-4, 6e-5, 0.0],
    ),
    (
        "WarmupDecayLR",
        {
            "warmup_num_steps": 1,
            "warmup_type": "linear",
            "total_num_steps": 6,
            "warmup_min_lr": 1e-4,
        },
        [1e-4, 1e-4, 0.00055, 0.001, 0.000775, 0.00055, 0.000325, 1e-4, 1e-4, 1e-4],
    ),
    (
        "WarmupCosineLR",
        {
            "warmup_num_steps": 3,
            "total_num_steps": 8,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
        },
        [
            *(0.0, 0.0002, 0.00133567355643, 0.002, 0.00181856614466, 0.00134356614466),
            *(0.000756433855344, 0.000281433855344, 0.0001, 0.0001),
        ],
    ),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
        [0.0, 0.0, 0.001, 0.00170713607051, 0.0010001, 0.000293063929492, *[2e-07] * 4],
    ),
]


def run_code(code: str, num_batches: int) -> tuple[nn.Module, Any, list[float]]:
    """What the code makes of a small model, and the learning rates of its updates."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 1))
    loader = [torch.randn(6, 4) for _ in range(num_batches)]
    rates: list[float] = []
    names: dict[str, Any] = {
        "model": model,
        "loader": loader,
        "loss_of": lambda batch: model(batch).float().square().mean(),
    }
    if "optimizer = " not in code:
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.002)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(note)
    with contextlib.redirect_stderr(io.StringIO()):
        exec(compile(code, "<code to paste>", "exec"), names)
    hook.remove()
    return model, names["optimizer"], rates


@pytest.mark.parametrize(("name", "params", "expected"), SCHEDULES)
def test_code_has_the_learning_rates_of_deepspeed(
    name: str, params: dict[str, Any], expected: list[float]
) -> None:
    code = convert({"scheduler": {"type": name, "params": params}}).code
    _, _, rates = run_code(code, len(expected))
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", TEMPLATES)
def test_code_of_templates_runs(name: str, tmp_path: Path) -> None:
    text = json.dumps(TEMPLATES[name][0]).replace("/nvme", str(tmp_path))
    found = convert(json.loads(text))
    model, optimizer, rates = run_code(found.code, 3)
    assert len(rates) == 3
    assert onecopy.config_of(model) == Config.from_deepspeed(json.loads(text))
    if "optimizer" in TEMPLATES[name][0]:
        # DeepSpeed's AdamW has no decay of its own accord, torch's has.
        assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(
    "name", [name for name in ZERO_CASES if name not in ("mics", "a fixed scale")]
)
def test_code_says_all_settings(name: str) -> None:
    """Executed, it is the configuration again."""
    values, _ = ZERO_CASES[name]
    model, _, _ = run_code(convert(values).code, 1)
    assert onecopy.config_of(model) == Config.from_deepspeed(values)


def test_code_accumulates_and_makes_the_optimizer_that_is_meant() -> None:
    values = {
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    found = convert(values)
    _, optimizer, rates = run_code(found.code, 6)
    assert len(rates) == 2
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.9), 0.0)
    for part in ("(loss / 3).backward()", "torch.autocast(", 'place="host"', "max_grad_norm=1.0"):
        assert part in found.code
    l2 = convert({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}})
    assert "torch.optim.Adam(" in l2.code


def test_batch_sizes_are_checked_where_the_ranks_are_known() -> None:
    values = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    found = convert(values)
    assert found.batch.num_ranks == 4
    assert not convert(values, world_size=4).refused
    with pytest.raises(ConfigError, match="2 on 4 ranks, and here are 8: write 64"):
        convert(values, world_size=8).raise_if_refused()
    del values["gradient_accumulation_steps"]
    assert convert(values, world_size=2).batch.accumulation == 4
    assert convert(values, world_size=3).refused


def shard_twice(values: dict[str, Any]) -> str:
    """What two models sharded by one configuration say on stderr."""
    config = Config.from_deepspeed(values)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            model = nn.Linear(4, 4)
            onecopy.shard(model, torch.optim.SGD(model.parameters()), config=config)
    return said.getvalue()


def test_the_first_rank_shows_the_table_once(pool: Pool) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    values = {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, **sizes}
    first, other = pool.run(2, shard_twice, {**values, "train_batch_size": 16})
    assert first.count("read as a configuration of DeepSpeed: 2 mapped, 3 left to you") == 1
    assert "max_grad_norm=1.0" in first
    assert "DeepSpeed" not in other
    failed = pool.run(2, shard_twice, {**values, "train_batch_size": 32}, expect_failures=True)
    for one in failed:
        assert isinstance(one, RankError)
        assert one.is_a(ConfigError)
        assert "on 4 ranks, and here are 2: write 16" in one.message


def test_command_prints_table_and_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(TEMPLATES["stage 2"][0]))
    assert cli.main(["config", "from-deepspeed", str(path)]) == 0
    printed = capsys.readouterr().out
    for part in ("zero_optimization", "  stage = 2", "mapped", "ignored", "left to you"):
        assert part in printed
    code = printed[printed.index("import math") :]
    _, _, rates = run_code(code, 2)
    assert len(rates) == 2

    assert cli.main(["config", "from-deepspeed", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["stage"] == 2
    assert found["settings"]["precision"]["compute"] == "bf16"
    assert found["code"] == code
    assert {one["fate"] for one in found["keys"]} == {"mapped", "ignored", "left to you"}


def test_command_fails_where_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"optimizer": {"type": "Lamb"}, "train_batch_size": 3}')
    assert cli.main(["config", "from-deepspeed", str(path), "--world", "2"]) == 2
    said = capsys.readouterr()
    assert "refused" in said.out
    assert "import onecopy" not in said.out
    assert "optimizer.type: LAMB is not among torch.optim" in said.err


def test_command_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(TEMPLATES["stage 3"][0]))
    program = (
        "import sys\nfrom onecopy import cli\n"
        f"code = cli.main(['config', 'from-deepspeed', {str(path)!r}])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
