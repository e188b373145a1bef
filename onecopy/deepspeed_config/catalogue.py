"""Every key of DeepSpeed's configuration, and who answers it: a sentence here, or a mapping.

Paths have dots between sections. Sources: the configuration classes and constants of DeepSpeed
0.19.8, its documentation of the JSON, and keys of earlier versions that files still have.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ALIASES",
    "ARGUMENTS",
    "IGNORED",
    "KINDS",
    "LEFT",
    "OLD_SECTIONS",
    "SWITCHED",
    "WHOLE",
    "Switched",
    "known_keys",
]

ZERO = "zero_optimization"
RECORD = "onecopy.record(folder, model) writes loss, time, memory and bytes of each step"
LAYOUT = "always so: a unit (most often a block) lies in one buffer, and travels as one message"
SCALER = "the scale is found: it begins at 65536, halves on overflow, doubles after 2000 good steps"
POOL = "a pool of threads reads and writes past the page cache"
SAVING = "a checkpoint of onecopy.save loads on any number of ranks, at any stage"
WATCHED = "ranks that differ get an error that names them, without a setting"

# What mappings answer, and what a value has to be there. A bool is no number.
KINDS: dict[str, str] = {
    "gradient_accumulation_steps": "whole number",
    "train_batch_size": "whole number",
    "train_micro_batch_size_per_gpu": "whole number",
    "gradient_clipping": "number",
    "communication_data_type": "dtype",
    "gradient_allreduce_op": "text",
    "sequence_parallel_size": "whole number",
    "optimizer.type": "text",
    "scheduler.type": "text",
    "fp16.enabled": "switch",
    "fp16.auto_cast": "switch",
    "fp16.loss_scale": "number",
    "fp16.fp16_master_weights_and_grads": "switch",
    "bf16.enabled": "switch",
    "bf16.check_grad_overflow": "switch",
    "bf16.bf16_master_weights_and_grads": "switch",
    "bf16.bf16_optimizer_states": "switch",
    "torch_autocast.enabled": "switch",
    "torch_autocast.dtype": "dtype",
    "data_types.grad_accum_dtype": "dtype",
    "data_types.param_dtype": "dtype",
    "activation_checkpointing.partition_activations": "switch",
    "activation_checkpointing.cpu_checkpointing": "switch",
    "aio.use_gds": "switch",
    ZERO: "switch",
    f"{ZERO}.stage": "whole number",
    f"{ZERO}.stage3_prefetch_bucket_size": "number",
    f"{ZERO}.cpu_offload": "switch",
    f"{ZERO}.cpu_offload_param": "switch",
    f"{ZERO}.offload_optimizer.device": "text",
    f"{ZERO}.offload_optimizer.nvme_path": "text",
    f"{ZERO}.offload_optimizer.ratio": "number",
    f"{ZERO}.offload_optimizer.super_offload": "switch",
    f"{ZERO}.offload_param.device": "text",
    f"{ZERO}.offload_param.nvme_path": "text",
    f"{ZERO}.zero_hpz_partition_size": "whole number",
    f"{ZERO}.mics_shard_size": "whole number",
    f"{ZERO}.zero_quantized_weights": "switch",
    f"{ZERO}.zero_quantized_gradients": "switch",
    f"{ZERO}.zero_quantized_nontrainable_weights": "switch",
    f"{ZERO}.zeropp_loco_param": "section",
}

# What has no meaning here, or needs no setting.
IGNORED: dict[str, str] = {
    "steps_per_print": RECORD,
    "wall_clock_breakdown": RECORD,
    "memory_breakdown": RECORD,
    "dump_state": "onecopy.config_of(model) has the settings, and where each came from",
    "log_level": 'logging.getLogger("onecopy").setLevel(...) is the same',
    "managed_gradient_accumulation": "each optimizer.step() of yours ends a step, without a count",
    "prescale_gradients": "sums of gradients are made in fp32, so they need no scaling before",
    "gradient_predivide_factor": "sums of gradients are made in fp32: the mean is the same",
    "disable_allgather": LAYOUT,
    "allgather_size": LAYOUT,
    "vocabulary_size": "DeepSpeed only warns about sizes that are no multiple of 8",
    "zero_allow_untested_optimizer": "every optimizer of torch.optim, and yours, may be passed",
    "zero_force_ds_cpu_optimizer": "with offload your own optimizer runs on the host",
    "seq_parallel_communication_data_type": "sequence parallelism sends values as they are",
    "optimizer.legacy_fusion": "the optimizer is torch's own",
    "fp16.initial_scale_power": SCALER,
    "fp16.loss_scale_window": SCALER,
    "fp16.hysteresis": SCALER,
    "fp16.consecutive_hysteresis": SCALER,
    "fp16.min_loss_scale": SCALER,
    "fp16.fused_mode": "the optimizer is torch's own",
    "bf16.immediate_grad_update": "always so: a gradient is added to its owner's as it arrives",
    "torch_autocast.lower_precision_safe_modules": "gradients travel in the parameters' own dtype",
    "data_types.buffer_dtype": "buffers keep the dtype that the model gives them",
    "data_types.keep_in_fp32_modules": "buffers keep their dtype, and Hugging Face models' lists "
    "of parameters are honoured; for further modules say Precision(keep_fp32=(...))",
    "activation_checkpointing.number_checkpoints": "memory for inputs is taken as it is needed",
    "activation_checkpointing.contiguous_memory_optimization": "always so: inputs lie in arenas",
    "activation_checkpointing.synchronize_checkpoint_boundary": "streams order themselves",
    "activation_checkpointing.profile": RECORD,
    "aio.block_size": POOL,
    "aio.queue_depth": POOL,
    "aio.intra_op_parallelism": POOL,
    "aio.single_submit": POOL,
    "aio.overlap_events": POOL,
    "checkpoint.tag_validation": "ranks agree on the step when they save",
    "checkpoint.load_universal": SAVING,
    "checkpoint.use_node_local_storage": "all ranks write into one folder, each its own part",
    "checkpoint.checkpoint_serialization": "files are safetensors, and the same for all readers",
    f"{ZERO}.contiguous_gradients": LAYOUT,
    f"{ZERO}.reduce_scatter": LAYOUT,
    f"{ZERO}.reduce_bucket_size": LAYOUT,
    f"{ZERO}.allgather_bucket_size": LAYOUT,
    f"{ZERO}.allgather_partitions": LAYOUT,
    f"{ZERO}.use_multi_rank_bucket_allreduce": LAYOUT,
    f"{ZERO}.round_robin_gradients": LAYOUT,
    f"{ZERO}.parameter_alignment": LAYOUT,
    f"{ZERO}.stage3_module_granularity_threshold": LAYOUT,
    f"{ZERO}.stage3_use_all_reduce_for_fetch_params": LAYOUT,
    f"{ZERO}.stage3_allgather_sequential": LAYOUT,
    f"{ZERO}.legacy_stage1": LAYOUT,
    f"{ZERO}.mics_hierarchical_params_gather": LAYOUT,
    f"{ZERO}.overlap_comm": "always so: communication runs beside computation",
    f"{ZERO}.compute_grad_norm": "a norm is only measured where something asks for it",
    f"{ZERO}.load_from_fp32_weights": "checkpoints always hold the fp32 masters",
    f"{ZERO}.elastic_checkpoint": SAVING,
    f"{ZERO}.pipeline_loading_checkpoint": SAVING,
    f"{ZERO}.sub_group_size": "the host updates unit by unit; Offload(buffer_bytes=...) bounds "
    "what a drive needs",
    f"{ZERO}.cpu_offload_use_pin_memory": "copies go through pinned memory of a fixed size",
    f"{ZERO}.stage3_param_persistence_threshold": "small parameters travel with others of their "
    "unit, in the same message",
    f"{ZERO}.stage3_model_persistence_threshold": "small parameters travel with others of their "
    "unit, in the same message",
    f"{ZERO}.stage3_max_live_parameters": "a unit is released after its use; prefetch_bytes bounds "
    "what is gathered ahead of it",
    f"{ZERO}.stage3_max_reuse_distance": "a unit is released after its use; prefetch_bytes bounds "
    "what is gathered ahead of it",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "model.state_dict() has whole tensors, "
    "and onecopy.export writes safetensors",
    f"{ZERO}.stage3_partition_stream_chunk_size": "onecopy.init_sharded and load_pretrained never "
    "make a whole model",
    f"{ZERO}.ignore_unused_parameters": "parameters without a gradient are left alone",
    f"{ZERO}.memory_efficient_linear": "autograd keeps no gathered weights at stage 3",
    f"{ZERO}.override_module_apply": "writing into parameters reaches their masters",
    f"{ZERO}.log_trace_cache_warnings": WATCHED,
    f"{ZERO}.enable_sanity_checks": WATCHED,
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "Offload(fraction=...) says what stays",
    f"{ZERO}.offload_optimizer.buffer_count": "Offload(buffer_bytes=...), 256 MiB unless said",
    f"{ZERO}.offload_optimizer.pin_memory": "copies go through Offload(pinned_bytes=...), 256 MiB "
    "of pinned memory unless said",
    f"{ZERO}.offload_optimizer.pipeline_read": "always so: reading, updating and writing overlap",
    f"{ZERO}.offload_optimizer.pipeline_write": "always so: reading, updating and writing overlap",
    f"{ZERO}.offload_optimizer.fast_init": "states are made when they are first needed",
    f"{ZERO}.offload_optimizer.convert_grad_on_cpu": "gradients go down in the dtype in which they "
    "travelled, and are summed in fp32",
    f"{ZERO}.offload_optimizer.cpuadam_cores_perc": "OMP_NUM_THREADS says how many cores a rank "
    "takes",
    f"{ZERO}.offload_param.buffer_count": "Offload(buffer_bytes=...), 256 MiB unless said",
    f"{ZERO}.offload_param.buffer_size": "Offload(buffer_bytes=...), 256 MiB unless said",
    f"{ZERO}.offload_param.max_in_cpu": "Offload(buffer_bytes=...), 256 MiB unless said",
    f"{ZERO}.offload_param.pin_memory": "copies go through Offload(pinned_bytes=...), 256 MiB of "
    "pinned memory unless said",
}

# What is a matter of the script.
LEFT: dict[str, str] = {
    "dataloader_drop_last": "DataLoader(..., drop_last=True), if it is true",
    "disable_python_gc": "gc.disable(), and gc.collect() now and then, if it is true",
}

# Sections that are answered as a whole, whatever is in them.
WHOLE: dict[str, str] = {
    "checkpoint.parallel_write": "all ranks write at once",
    "checkpoint.writer": "onecopy.async_save writes while training goes on",
    "timers": RECORD,
    "tensorboard": "onecopy.record(..., trackers=[TensorBoard(folder)]) (docs/observing.md)",
    "wandb": "onecopy.record(..., trackers=[run]) takes a run of wandb (docs/observing.md)",
    "comet": "onecopy.record(..., trackers=[experiment]) (docs/observing.md)",
    "csv_monitor": RECORD,
    "flops_profiler": "onecopy.record(..., trace=3) shows where the time of steps goes",
    "comms_logger": "onecopy.record counts every byte that is sent, by kind and unit",
    f"{ZERO}.leaf_module": "a unit is a whole block, with all experts in it; where ranks may run "
    'different ones, keep_gathered=("experts.*",)',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A feature that is refused where it is on.

    switch: the key inside that says so; None where the section's being there does.
    remedy: what to do instead.
    """

    remedy: str
    switch: str | None = "enabled"


SWITCHED: dict[str, Switched] = {
    "amp": Switched(remedy='Apex is no longer made: say "bf16" or "fp16" instead'),
    "elasticity": Switched(
        remedy="remove it: checkpoints load on any number of ranks, and torchrun --nnodes=1:4 "
        "starts again with those that are left"
    ),
    "autotuning": Switched(remedy='remove it, and say stage="auto", or run onecopy plan'),
    "sparse_attention": Switched(
        switch=None, remedy="remove it; torch's flex_attention computes with sparse masks"
    ),
    "sparse_gradients": Switched(
        switch=None, remedy="remove it: gradients are dense, nn.Embedding(sparse=False)"
    ),
    "compression_training": Switched(
        switch=None, remedy="remove it, and compress the trained model, with torchao for example"
    ),
    "quantize_training": Switched(remedy="remove it, and quantize with torchao"),
    "weight_quantization": Switched(
        switch=None, remedy="remove it; Quantize(frozen=...) keeps frozen weights in fewer bits"
    ),
    "eigenvalue": Switched(remedy="remove it: it belongs to quantize_training"),
    "progressive_layer_drop": Switched(
        remedy="remove it: which layers run is a matter of the model"
    ),
    "curriculum_learning": Switched(remedy="remove it, and order the data in the DataLoader"),
    "data_efficiency": Switched(remedy="remove it, and order the data in the DataLoader"),
    "hybrid_engine": Switched(
        remedy="remove it, and generate inside of onecopy.full_parameters(model)"
    ),
    "expert_parallel": Switched(
        remedy="remove it; experts are cut over all ranks as other parameters are"
    ),
    "use_data_before_expert_parallelism": Switched(switch=None, remedy="remove it"),
    "tensor_parallel": Switched(
        switch="autotp_size",
        remedy="remove it, call parallelize_module, and pass the mesh to shard "
        "(docs/tensor-parallel.md)",
    ),
    "pipeline": Switched(
        switch=None,
        remedy="remove it, and use torch.distributed.pipelining (docs/pipelines.md)",
    ),
    "compile": Switched(
        switch="deepcompile", remedy="remove it, and compile blocks (docs/training-loop.md)"
    ),
    "graph_harvesting": Switched(
        switch=None, remedy="remove it: gathers between blocks cannot be captured in a graph"
    ),
    "nebula": Switched(remedy="remove it: onecopy.async_save saves while training goes on"),
    "datastates_ckpt": Switched(
        switch=None, remedy="remove it: onecopy.async_save saves while training goes on"
    ),
    f"{ZERO}.zenflow": Switched(
        switch=None,
        remedy="remove it; Offload(delayed_update=True) updates beside the next forward and "
        "backward, with all gradients",
    ),
}

# Other names for the same; the value says whether DeepSpeed has given the name up.
ALIASES: dict[str, tuple[str, bool]] = {
    "seq_parallel_comm_data_type": ("seq_parallel_communication_data_type", True),
    "bf16.check_overflow": ("bf16.check_grad_overflow", True),
    "aio.thread_count": ("aio.intra_op_parallelism", True),
    "activation_checkpointing.partitioned_activations": (
        "activation_checkpointing.partition_activations",
        True,
    ),
    f"{ZERO}.cpu_offload_params": (f"{ZERO}.cpu_offload_param", True),
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": (
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        True,
    ),
    **{
        f"{ZERO}.{name}": (f"{ZERO}.stage3_{name}", False)
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        )
    },
}

OLD_SECTIONS = {"bfloat16": "bf16"}

# What is in these depends on the type beside them.
ARGUMENTS = ("optimizer.params", "scheduler.params")


def known_keys() -> list[str]:
    """All paths, under the names that are used here."""
    return [*KINDS, *IGNORED, *LEFT, *WHOLE, *SWITCHED]
