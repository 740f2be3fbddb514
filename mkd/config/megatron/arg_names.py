"""Names of Megatron's arguments, one entry per name with its roles in a student, a teacher and a checkpoint.

Every list of such names in mkd is a query on `ARGS`. A new argument of Megatron's model groups needs an entry here
(tests/unit/config/megatron/test_arg_names.py): give it the roles that apply, and it is compared when a job resumes,
adopted with --use-checkpoint-args, or shared with the teacher.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any


class ArgRole(Flag):
    """Meaning and use of an argument. An argument may have several roles."""

    SHAPE = auto()
    """Gives parameters their shape: must equal the checkpoint's, also with --finetune."""
    MEANING = auto()
    """Gives parameters their meaning: must equal the checkpoint's when a job resumes."""
    ADOPTED = auto()
    """Read from the checkpoint by mkd with --use-checkpoint-args, because megatron-core 0.19 leaves it out and would
    compute another model without a message."""
    LAYOUT = auto()
    """A parallel size: the teacher has the student's or its own."""
    STAGES = auto()
    """Divides the student's layers unevenly among its pipeline stages; those of a teacher are even."""
    SHARED = auto()
    """Determines kernels and ranks: the teacher has the student's value. Includes every `LAYOUT`."""
    RUN_CHOICE = auto()
    """A model's folder may suggest a value and a training run may choose another: the weights do not depend on it."""
    CHECKED_BY_LAYOUT = auto()
    """Megatron and mkd check the layout against it: a job without a student has the teacher's value."""
    SAMPLES = auto()
    """Determines which samples a number of consumed samples stands for."""
    MODEL = auto()
    """Describes the architecture; Megatron restores it from a checkpoint, or no supported family has it."""
    COMPUTE = auto()
    """Kernels, precision, communication and memory: chosen by each run, and Megatron's default in the teacher."""
    TRAINING = auto()
    """Initialization, regularization and losses of training: no part of a frozen model."""


_UNSET = object()


@dataclass(frozen=True)
class MegatronArg:
    """One argument by its name in Megatron's `Namespace`."""

    name: str
    roles: ArgRole
    frozen: Any = _UNSET
    """Value in a frozen teacher, regardless of the arguments in the teacher's checkpoint."""
    without_student: Any = _UNSET
    """Value in a job that fills a teacher cache, which has no student and no training."""
    label: str | None = None
    """Name for people where a folder's sizes are listed."""


_SHAPE, _MEANING, _ADOPTED, _LAYOUT = ArgRole.SHAPE, ArgRole.MEANING, ArgRole.ADOPTED, ArgRole.LAYOUT | ArgRole.SHARED
_SHARED, _CHECKED, _MODEL, _COMPUTE, _STAGES, _TRAINING = (
    ArgRole.SHARED,
    ArgRole.CHECKED_BY_LAYOUT,
    ArgRole.MODEL,
    ArgRole.COMPUTE,
    ArgRole.COMPUTE | ArgRole.STAGES,
    ArgRole.TRAINING,
)


def _alike(roles: ArgRole, names: str) -> tuple[MegatronArg, ...]:
    """Entries of names that have the same roles and nothing else."""
    return tuple(MegatronArg(name, roles) for name in names.split())


_SIZES = (
    MegatronArg("num_layers", _SHAPE | _CHECKED, label="layers"),
    MegatronArg("hidden_size", _SHAPE | _CHECKED, label="width"),
    MegatronArg("ffn_hidden_size", _SHAPE | _CHECKED, label="feed-forward"),
    MegatronArg("num_attention_heads", _SHAPE | _CHECKED, label="heads"),
    MegatronArg("num_query_groups", _SHAPE | _CHECKED, label="key-value heads"),
    MegatronArg("kv_channels", _SHAPE | _CHECKED),
    MegatronArg("group_query_attention", _CHECKED),
)

_EXPERTS = (
    MegatronArg("num_experts", _SHAPE | _CHECKED, label="experts"),
    MegatronArg("moe_router_topk", _MEANING | _CHECKED, label="experts per token"),
    MegatronArg("moe_ffn_hidden_size", _SHAPE | _CHECKED),
    MegatronArg("moe_shared_expert_intermediate_size", _SHAPE),
    MegatronArg("moe_layer_freq", _SHAPE | _CHECKED),
    *_alike(_MEANING, "moe_router_pre_softmax moe_router_score_function"),
    *_alike(_SHAPE | _ADOPTED, "moe_shared_expert_gate"),
    *_alike(_MEANING | _ADOPTED, "moe_router_num_groups moe_router_group_topk"),
    *_alike(_MEANING | _ADOPTED, "router_group_best normalized_single_expert"),
    *_alike(_SHARED, "moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion"),
    *_alike(ArgRole.RUN_CHOICE, "moe_aux_loss_coeff moe_router_dtype"),
    *_alike(_SHAPE | _MODEL, "moe_latent_size moe_router_enable_expert_bias"),
    *_alike(
        _MEANING | _MODEL,
        "moe_apply_probs_on_input moe_mlp_glu_interleave_size moe_router_topk_scaling_factor"
        " moe_shared_expert_glu_interleave_size",
    ),
    *_alike(_MODEL, "moe_router_force_biased moe_single_grouped_bias moe_single_grouped_weight"),
    *_alike(
        _TRAINING,
        "moe_enable_routing_replay moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_input_jitter_eps"
        " moe_pad_expert_input_to_capacity moe_router_bias_update_rate moe_router_force_load_balancing"
        " moe_router_load_balancing_type moe_router_quantile_balancing_ema moe_token_drop_policy"
        " moe_upcycling_granularity moe_use_upcycling moe_z_loss_coeff",
    ),
    *_alike(
        _COMPUTE,
        "moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms"
        " moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms"
        " moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute"
        " moe_ncclep_static_shape moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference moe_paged_stash"
        " moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size"
        " moe_per_layer_logging moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_fp8"
        " moe_router_padding_for_quantization moe_shared_expert_overlap",
    ),
)

_VOCABULARY = (
    MegatronArg("vocab_size", _SHAPE, label="tokens"),
    MegatronArg("untie_embeddings_and_output_weights", _SHAPE),
    MegatronArg("max_position_embeddings", _MODEL, label="positions"),
    MegatronArg("padded_vocab_size", _SHARED),
    *_alike(_COMPUTE, "make_vocab_size_divisible_by"),
)

_FEED_FORWARD = (
    *_alike(_SHAPE, "swiglu add_bias_linear"),
    *_alike(_MEANING | _ADOPTED, "quick_geglu glu_linear_offset activation_func_clamp_value gelu_tanh"),
    *_alike(_MEANING | _MODEL, "squared_relu"),
    *_alike(_MODEL, "openai_gelu"),
)

_ATTENTION = (
    MegatronArg("multi_latent_attention", _SHAPE | _ADOPTED, without_student=False),
    *_alike(_SHAPE | _ADOPTED, "qk_layernorm"),
    *_alike(_SHAPE | _ADOPTED, "whole_width_qk_norms"),
    *_alike(_MEANING | _ADOPTED, "attention_softcap logit_softcap local_rotary_base softmax_scale"),
    *_alike(_SHAPE, "add_qkv_bias"),
    *_alike(_SHAPE | _ADOPTED, "attention_output_bias"),
    *_alike(_MEANING | _ADOPTED, "residual_multiplier norms_with_rope_only distant_attention"),
    *_alike(_MEANING | _ADOPTED, "latent_norm_epsilon"),
    *_alike(_MEANING | _ADOPTED, "window_size window_attn_skip_freq softmax_type"),
    *_alike(_SHAPE | _ADOPTED, "attention_output_gate"),
    *_alike(_MEANING | _ADOPTED, "qk_l2_norm no_rope_freq"),
    *_alike(_SHAPE | _ADOPTED, "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim"),
    *_alike(_SHAPE | _ADOPTED, "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"),
    *_alike(_SHAPE | _ADOPTED, "layer_mixers mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"),
    *_alike(_MEANING | _ADOPTED, "least_time_step"),
    *_alike(_SHAPE | _ADOPTED, "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"),
    *_alike(_MODEL, "apply_query_key_layer_scaling"),
    *_alike(
        _MODEL,
        "dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_n_heads"
        " dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu"
        " dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq",
    ),
    *_alike(_TRAINING, "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss qk_clip qk_clip_alpha qk_clip_threshold"),
    *_alike(_COMPUTE, "cache_mla_latents dsa_kernel_backend mla_down_proj_fusion"),
)

_NORMS = (
    *_alike(_MEANING, "normalization"),
    *_alike(_MEANING | _ADOPTED, "layernorm_epsilon layernorm_zero_centered_gamma"),
    *_alike(_SHAPE | _ADOPTED, "norm_placement parallel_block"),
    *_alike(_MODEL, "apply_residual_connection_post_layernorm"),
)

_POSITIONS = (
    *_alike(_MEANING, "position_embedding_type rotary_base rotary_percent"),
    *_alike(_MEANING | _ADOPTED, "use_rope_scaling rope_scaling_factor"),
    *_alike(_MEANING, "rotary_interleaved"),
    *_alike(_MEANING | _ADOPTED, "rope_frequencies"),
    *_alike(_MEANING | _ADOPTED, "rotary_seq_len_interpolation_factor rope_type rotary_scaling_factor"),
    *_alike(_MEANING | _ADOPTED, "mscale mscale_all_dim original_max_position_embeddings beta_fast beta_slow"),
    *_alike(_MEANING | _ADOPTED, "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow"),
    *_alike(_MEANING | _ADOPTED, "yarn_correction_range_round_to_int"),
    *_alike(
        _MODEL,
        "add_position_embedding mrope_section relative_attention_max_distance relative_attention_num_buckets"
        " use_rotary_position_embeddings",
    ),
)

_OTHER_ARCHITECTURES = (
    *_alike(_MEANING | _ADOPTED, "use_mup mup_embedding_mult mup_output_mult embedding_scale_in_params_dtype"),
    *_alike(
        _MODEL,
        "bert_binary_head decoder_num_layers encoder_num_layers heterogeneous_layers_config_encoded_json"
        " heterogeneous_layers_config_path is_hybrid_model mtp_hybrid_override_pattern mtp_standalone"
        " mtp_use_repeated_layer",
    ),
    *_alike(_MEANING | _MODEL, "mup_attn_scale_power mup_base_head_dim mup_base_hidden_size"),
    *_alike(_MODEL, "mup_width_mult"),
    MegatronArg("mtp_num_layers", _MODEL, frozen=None),
    *_alike(_TRAINING, "mtp_detach_heads mtp_loss_scaling_factor"),
    *_alike(_COMPUTE, "use_mamba_mem_eff_path"),
)

_PARALLELISM = (
    *_alike(_LAYOUT, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    *_alike(_LAYOUT, "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel"),
    *_alike(_SHARED, "rank world_size"),
    *_alike(_SHARED, "cp_comm_type hierarchical_context_parallel_sizes distributed_timeout_minutes"),
    MegatronArg("virtual_pipeline_model_parallel_size", _COMPUTE, frozen=None),
    MegatronArg("num_layers_per_virtual_pipeline_stage", _COMPUTE, without_student=None),
    MegatronArg("num_virtual_stages_per_pipeline_rank", _COMPUTE, without_student=None),
    MegatronArg("pipeline_model_parallel_layout", _STAGES, frozen=None, without_student=None),
    MegatronArg("decoder_first_pipeline_num_layers", _STAGES, frozen=None, without_student=None),
    MegatronArg("decoder_last_pipeline_num_layers", _STAGES, frozen=None, without_student=None),
    MegatronArg("account_for_embedding_in_pipeline_split", _STAGES, frozen=False, without_student=False),
    MegatronArg("account_for_loss_in_pipeline_split", _STAGES, frozen=False, without_student=False),
    MegatronArg("overlap_p2p_comm", _COMPUTE, frozen=False),
    MegatronArg("tp_comm_overlap", _COMPUTE, frozen=False, without_student=False),
    MegatronArg("tensor_parallel_num_weight_shards", _COMPUTE, frozen=None),
    MegatronArg("gtp_weight_remat_size", _COMPUTE, frozen=1),
    MegatronArg("expert_tensor_parallel_num_weight_shards", _COMPUTE, frozen=None),
    MegatronArg("expert_gtp_weight_remat_size", _COMPUTE, frozen=1),
    *_alike(
        _COMPUTE,
        "clone_scatter_output_in_embedding ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"
        " hybrid_context_parallel max_seqlen_per_dp_cp_rank microbatch_group_size_per_vp_stage"
        " overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm overlap_p2p_comm_warmup_flush"
        " pipeline_model_parallel_comm_backend symmetric_ar_type tp_comm_bootstrap_backend tp_comm_bulk_dgrad"
        " tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag"
        " tp_comm_split_rs use_ring_exchange_p2p",
    ),
)

_KERNELS = (
    *_alike(_SHARED, "transformer_impl attention_backend use_cpu_initialization no_persist_layer_norm"),
    *_alike(_SHARED, "apply_rope_fusion masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion"),
    *_alike(_SHARED, "bias_dropout_fusion gradient_accumulation_fusion deterministic_mode"),
    MegatronArg("cuda_graph_impl", _COMPUTE, frozen="none"),
    MegatronArg("cross_entropy_loss_fusion", _COMPUTE, frozen=False),
    *_alike(
        _COMPUTE,
        "batch_invariant_mode config_logger_dir cross_entropy_fusion_impl cuda_graph_warmup_steps"
        " defer_embedding_wgrad_compute delay_wgrad_compute disable_bf16_reduced_precision_matmul enable_cuda_graph"
        " external_cuda_graph flash_attention_version flash_decode fused_residual_rmsnorm kitchen_attention_backend"
        " init_model_with_meta_device onnx_safe use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp"
        " use_grouped_gemm_for_shared_expert use_kitchen_attention use_te_activation_func"
        " use_transformer_engine_op_fuser wgrad_deferral_limit",
    ),
    *_alike(
        _COMPUTE,
        "inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication"
        " inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels"
        " inference_moe_token_dispatcher_type mlp_chunks_for_prefill mlp_chunks_for_training"
        " nccl_all_reduce_for_prefill",
    ),
)

_PRECISION = (
    MegatronArg("fp8", _COMPUTE, frozen=None),
    MegatronArg("fp4", _COMPUTE, frozen=None),
    MegatronArg("fp8_param_gather", _COMPUTE, frozen=False),
    MegatronArg("fp4_param_gather", _COMPUTE, frozen=False),
    *_alike(
        _COMPUTE,
        "bf16 first_last_layers_bf16 fp16 fp32_residual_connection fp4_quantizer_factory fp4_recipe"
        " fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_output_proj fp8_quantizer_factory"
        " fp8_recipe fp8_wgrad num_layers_at_end_in_bf16 num_layers_at_start_in_bf16",
    ),
)

_MEMORY = (
    MegatronArg("recompute_granularity", _COMPUTE, frozen=None, without_student=None),
    MegatronArg("recompute_method", _COMPUTE, frozen=None),
    MegatronArg("recompute_num_layers", _COMPUTE, frozen=None),
    *_alike(
        _COMPUTE,
        "activation_offload_fraction cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers"
        " delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks distribute_saved_activations"
        " fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size"
        " offload_modules recompute_modules",
    ),
)

_REGULARIZATION = (
    MegatronArg("attention_dropout", ArgRole.RUN_CHOICE, frozen=0.0),
    MegatronArg("hidden_dropout", ArgRole.RUN_CHOICE, frozen=0.0),
    MegatronArg("perform_initialization", _TRAINING, frozen=False),
    *_alike(_TRAINING, "calculate_per_token_loss embedding_init_method_std init_method_std"),
)

_RUN = (
    *_alike(ArgRole.SAMPLES, "data_path train_data_path data_args_path split seed"),
    MegatronArg("seq_length", _SHARED | ArgRole.SAMPLES),
    MegatronArg("save", _TRAINING, without_student=None),
    MegatronArg("load", _TRAINING, without_student=None),
    MegatronArg("pretrained_checkpoint", _TRAINING, without_student=None),
    MegatronArg("use_checkpoint_args", _TRAINING, without_student=False),
    MegatronArg("async_save", _TRAINING, without_student=False),
    MegatronArg("lr", _TRAINING, without_student=0.0),
    MegatronArg("min_lr", _TRAINING, without_student=0.0),
    MegatronArg("lr_decay_style", _TRAINING, without_student="constant"),
    MegatronArg("lr_decay_iters", _TRAINING, without_student=None),
    MegatronArg("lr_decay_samples", _TRAINING, without_student=None),
    MegatronArg("lr_warmup_init", _TRAINING, without_student=0.0),
    MegatronArg("lr_warmup_iters", _TRAINING, without_student=0),
    MegatronArg("lr_warmup_samples", _TRAINING, without_student=0),
    MegatronArg("lr_warmup_fraction", _TRAINING, without_student=None),
    MegatronArg("override_opt_param_scheduler", _TRAINING, without_student=False),
    MegatronArg("use_checkpoint_opt_param_scheduler", _TRAINING, without_student=False),
    MegatronArg("eval_interval", _TRAINING, without_student=1),
)

ARGS: Mapping[str, MegatronArg] = {
    arg.name: arg
    for section in (
        *(_SIZES, _EXPERTS, _VOCABULARY, _FEED_FORWARD, _ATTENTION, _NORMS, _POSITIONS, _OTHER_ARCHITECTURES),
        *(_PARALLELISM, _KERNELS, _PRECISION, _MEMORY, _REGULARIZATION, _RUN),
    )
    for arg in section
}
"""Name -> entry."""


def names_with(role: ArgRole) -> tuple[str, ...]:
    """Names of the arguments that have a role, in the order of the list."""
    return tuple(arg.name for arg in ARGS.values() if role in arg.roles)


def frozen_values() -> dict[str, Any]:
    """Name -> value of the arguments that a frozen teacher has its own value of."""
    return {arg.name: arg.frozen for arg in ARGS.values() if arg.frozen is not _UNSET}


def values_without_student() -> dict[str, Any]:
    """Name -> value of the arguments of the student and its training in a job that has neither."""
    return {arg.name: arg.without_student for arg in ARGS.values() if arg.without_student is not _UNSET}


def labels() -> dict[str, str]:
    """Name -> label of the sizes that people are shown."""
    return {arg.name: arg.label for arg in ARGS.values() if arg.label is not None}


_MOST_LAYERS = 1 << 16
_MARKS_OF_LAYERS: Mapping[str, tuple[int, int, Any]] = {
    "moe_layer_freq": (1, 0, 1),
    "window_attn_skip_freq": (0, -1, _MOST_LAYERS),
    "linear_attention_freq": (0, -1, None),
    "no_rope_freq": (1, -1, _MOST_LAYERS),
}
"""Name -> (mark of every N-th layer in the list of all layers, remainder of the index of such a layer divided by N, N
that stands for None). All other layers have 1 minus the mark."""


def in_order(found: Iterable[str]) -> list[str]:
    """Names in the order of the list, sizes first; unknown ones last."""
    places = {name: place for place, name in enumerate(ARGS)}
    return sorted(found, key=lambda name: (places.get(name, len(places)), name))


_OFF_IF_MISSING = frozenset({"whole_width_qk_norms", "gelu_tanh", "embedding_scale_in_params_dtype"})
"""Arguments without a flag that --kd-student-hf sets, also to False; the size flags of a script do not."""

_MEGATRON_IF_MISSING: Mapping[str, Any] = {
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
}
"""Values that Megatron computes with where a flag without a default is not given."""


def comparable(name: str, values: Mapping[str, Any]) -> Any:
    """The value of an argument in the form in which two jobs are compared: equal values mean the same model.

    Megatron has several spellings of some facts. Without --group-query-attention each head has keys and values of its
    own, whatever the number in --num-query-groups is: 1 by default, and the number of heads once Megatron has counted
    operations. Kinds of layers are a list, or a number N for every N-th layer.

    Args:
        name: of the argument.
        values: the arguments of the job, by name.
    """
    value = values.get(name)
    if name in _OFF_IF_MISSING:
        return bool(value)
    if value is None and name in _MEGATRON_IF_MISSING:
        return _MEGATRON_IF_MISSING[name]
    if name in ("num_query_groups", "group_query_attention"):
        heads = values.get("num_attention_heads")
        groups = values.get("num_query_groups") or heads if values.get("group_query_attention") else heads
        return groups if name == "num_query_groups" else groups != heads
    if name in _MARKS_OF_LAYERS:
        layers = values.get("num_layers")
        mark, remainder, every = _MARKS_OF_LAYERS[name]
        every = every if value is None else value
        if type(layers) is int and type(every) is int and 0 < layers < _MOST_LAYERS and every > 0:
            return [mark if layer % every == remainder % every else 1 - mark for layer in range(layers)]
    return value
