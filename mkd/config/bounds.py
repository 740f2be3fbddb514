"""Bounds of every numeric flag: a value outside them can only be a slip, and is refused before any work.

The table has Megatron's flags, by the names of their arguments, and those of `KDConfig` with the prefix `kd_`. A bound
is wide: it does not judge a recipe. NaN and infinities are refused for every flag.
"""

import math
from argparse import Action, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdConfigError

_LONGEST = 40
"""Digits of a number that a message shows."""


@dataclass(frozen=True)
class Bounds:
    """The legal values of a number."""

    low: float
    high: float
    reason: str
    """Reason that a value outside is a slip."""
    without_low: bool = False
    """`low` itself is outside."""
    without_high: bool = False
    """`high` itself is outside."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.without_low else value >= self.low
        return above and (value < self.high if self.without_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.without_low else 'at least'} {_text(self.low)}"
        return f"{low} and {'below' if self.without_high else 'at most'} {_text(self.high)}"


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) and value < 10**6 else f"{value:g}"


_RATE = Bounds(0.0, 100.0, "weights are of size 1, and one step would replace them")
_SHARE = Bounds(0.0, 1.0, "it is a share")
_MOMENTUM = Bounds(0.0, 1.0, "it is the share of the past in a running mean", without_high=True)
_POSITIVE = Bounds(0.0, 1e30, "it is a positive factor within fp32's range", without_low=True)
_FACTOR = Bounds(0.0, 1e6, "it is a factor, and larger ones overflow")
_STEPS = Bounds(0, 10**9, "it counts steps of one run")
_STEPS_FROM_1 = Bounds(1, 10**9, "it counts steps of one run")
_SAMPLES = Bounds(0, 10**13, "it counts samples of one run")
_INTERVAL = Bounds(1, 10**12, "it is an interval in steps")
_INTERVAL_OR_0 = Bounds(0, 10**12, "it is an interval in steps, 0 for never")
_BATCH = Bounds(1, 10**8, "it counts samples of a batch")
_PARALLEL = Bounds(1, 10**6, "it counts ranks")
_LAYERS = Bounds(0, 10**5, "it counts layers")
_WIDTH = Bounds(1, 10**7, "it is a width or a number of heads of the model")
_EXPERTS = Bounds(1, 10**5, "it counts experts of a layer")
_TOKENS = Bounds(1, 10**9, "it counts tokens of a text")
_VOCABULARY = Bounds(0, 10**8, "it counts tokens of a vocabulary")
_TOKEN_ID = Bounds(-1, 10**8, "it is a token id, -1 for none")
_SCALE = Bounds(2.0**-24, 2.0**100, "a loss scale is a factor within fp32's range")
_BYTES = Bounds(0, 2**50, "it counts bytes of a device")
_SECONDS = Bounds(0.0, 1e7, "it is a time in seconds")
_MULTIPROCESSORS = Bounds(0, 10**4, "it counts multiprocessors of a GPU")
_PROCESSES = Bounds(0, 1024, "it counts processes or threads of a rank")
_SMALL = Bounds(0, 10**6, "it is a small count")
_STD = Bounds(0.0, 100.0, "it is the standard deviation of initial weights")
_ROPE = Bounds(0.0, 1e12, "it is a positive number of rotary embeddings", without_low=True)

_GROUPS: tuple[tuple[Bounds, str], ...] = (
    (_RATE, "lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init"),
    (
        Bounds(0.0, 100.0, "weights are multiplied by 1 - lr * weight decay"),
        "weight_decay start_weight_decay end_weight_decay",
    ),
    (_MOMENTUM, "adam_beta1 adam_beta2 lion_beta1 lion_beta2 sgd_momentum muon_momentum"),
    (
        Bounds(0.0, 1.0, "at 0 an element without gradients is 0 / 0, and above 1 no element moves", without_low=True),
        "adam_eps",
    ),
    (Bounds(0.0, 1e30, "it is a norm within fp32's range, 0 for no clipping"), "clip_grad"),
    (_SCALE, "loss_scale initial_loss_scale min_loss_scale"),
    (_STEPS_FROM_1, "loss_scale_window hysteresis"),
    (_FACTOR, "muon_extra_scale_factor head_lr_mult moe_aux_loss_coeff moe_z_loss_coeff dsa_indexer_loss_coeff"),
    (_FACTOR, "mtp_loss_scaling_factor moe_router_bias_update_rate moe_router_topk_scaling_factor"),
    (_FACTOR, "moe_expert_capacity_factor moe_expert_rank_capacity_factor"),
    (_FACTOR, "moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda"),
    (_SMALL, "muon_num_ns_steps cuda_graph_warmup_steps fp8_interval fp8_amax_history_len dist_ckpt_workers"),
    (
        _SHARE,
        "lr_warmup_fraction hidden_dropout attention_dropout optimizer_offload_fraction activation_offload_fraction"
        " moe_router_quantile_balancing_ema moe_input_jitter_eps rotary_percent mid_level_dataset_surplus",
    ),
    (_SHARE, "fim_rate fim_spm_rate fim_fragment_rate sample_rate mask_prob short_seq_prob"),
    (
        _STEPS,
        "train_iters lr_decay_iters lr_wsd_decay_iters lr_warmup_iters start_eval_at_iter iterations_to_skip"
        " override_ckpt_iteration ckpt_step profile_step_start profile_step_end moe_routing_trace_max_training_iters"
        " ft_num_warmup_iters warmup",
    ),
    (Bounds(-1, 10**9, "it counts steps of an evaluation, -1 for a whole split"), "eval_iters"),
    (_SAMPLES, "train_samples lr_decay_samples lr_wsd_decay_samples lr_warmup_samples"),
    (
        _INTERVAL,
        "log_interval tensorboard_log_interval exit_interval train_sync_interval gpu_sniff_test_interval"
        " check_weight_hash_across_dp_replicas_interval adlr_autoresume_interval log_memory_interval",
    ),
    (
        _INTERVAL_OR_0,
        "eval_interval save_interval save_retain_interval save_params_interval save_activations_interval"
        " save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval non_persistent_save_interval"
        " manual_gc_interval",
    ),
    (
        Bounds(0, 10**9, "it is a time in minutes"),
        "exit_duration_in_mins",
    ),
    (Bounds(1, 10**6, "it is a time in minutes, in which the ranks find each other"), "distributed_timeout_minutes"),
    (Bounds(0, 10**9, "it is a time in seconds"), "distributed_timeout_seconds_after_init"),
    (_BATCH, "micro_batch_size global_batch_size eval_micro_batch_size eval_global_batch_size batch_size"),
    (Bounds(0, 10**13, "it counts samples"), "rampup_batch_size"),
    (
        _PARALLEL,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size"
        " expert_tensor_parallel_size model_parallel_size hierarchical_context_parallel_sizes"
        " num_distributed_optimizer_instances tensor_parallel_num_weight_shards "
        " expert_tensor_parallel_num_weight_shards "
        " microbatch_group_size_per_vp_stage",
    ),
    (
        _LAYERS,
        "num_layers encoder_num_layers decoder_num_layers num_layers_per_virtual_pipeline_stage"
        " num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
        " recompute_num_layers mtp_num_layers cpu_offloading_num_layers num_layers_at_start_in_bf16"
        " num_layers_at_end_in_bf16",
    ),
    (
        _WIDTH,
        "hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels moe_ffn_hidden_size"
        " moe_shared_expert_intermediate_size moe_latent_size kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
        " linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads"
        " linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"
        " dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq mup_base_hidden_size"
        " moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size mrope_section"
        " relative_attention_num_buckets relative_attention_max_distance",
    ),
    (Bounds(0, 10**7, "it is a width of the model, 0 for none"), "q_lora_rank dsa_indexer_skip_topk_offset"),
    (_EXPERTS, "num_experts moe_router_topk moe_router_num_groups moe_router_group_topk moe_upcycling_granularity"),
    (_TOKENS, "seq_length encoder_seq_length decoder_seq_length max_position_embeddings max_seqlen_per_dp_cp_rank"),
    (_TOKENS, "yarn_original_max_position_embeddings"),
    (_VOCABULARY, "vocab_size padded_vocab_size vocab_extra_ids tiktoken_num_special_tokens"),
    (Bounds(1, 10**8, "it counts tokens of a vocabulary"), "make_vocab_size_divisible_by"),
    (_TOKEN_ID, "null_tokenizer_eod_id null_tokenizer_pad_id"),
    (
        _ROPE,
        "rotary_base rope_scaling_factor rotary_scaling_factor rotary_seq_len_interpolation_factor  "
        " yarn_beta_fast yarn_beta_slow",
    ),
    (_FACTOR, "mscale mscale_all_dim mup_width_mult mup_embedding_mult mup_output_mult mup_base_head_dim"),
    (_FACTOR, "mup_attn_scale_power qk_clip_threshold activation_func_clamp_value"),
    (_SHARE, "qk_clip_alpha"),
    (
        Bounds(0.0, 1.0, "it is added to a variance, so that it is not a divisor of 0", without_low=True),
        "layernorm_epsilon dsa_indexer_k_norm_epsilon",
    ),
    (_STD, "init_method_std embedding_init_method_std"),
    (Bounds(1, 4 * 10**9, "random generators take positive numbers below 2^32"), "seed fault_injector_seed"),
    (_PROCESSES, "num_workers num_dataset_builder_threads logits_load_decode_threads"),
    (
        _MULTIPROCESSORS,
        "moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing"
        " moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute",
    ),
    (
        _BYTES,
        "min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks moe_paged_stash_page_size ddp_bucket_size"
        " suggested_communication_unit_size",
    ),
    (
        _SMALL,
        "fine_grained_offloading_max_inflight_offloads wgrad_deferral_limit ddp_num_buckets mlp_chunks_for_prefill"
        " mlp_chunks_for_training tensorboard_queue_size empty_unused_memory_level profile_ranks replication_factor"
        " replication_jump timing_log_level logging_level flight_recorder_trace_buffer_size straggler_minmax_count"
        " error_injection_rate fp8_margin",
    ),
    (Bounds(-20, 19, "it is the niceness of a process"), "async_ckpt_cpu_priority"),
    (Bounds(0, 3, "it is an I/O class of a process"), "async_ckpt_io_priority"),
    (Bounds(0, 65535, "it is a port"), "straggler_ctrlr_port inference_coordinator_port"),
    (
        _SECONDS,
        "inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_progress_watchdog_interval"
        " inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout"
        " inprocess_barrier_timeout inprocess_completion_timeout inprocess_last_call_wait"
        " inprocess_termination_grace_time",
    ),
    (_SMALL, "inprocess_max_iterations inprocess_active_world_size fault_injector_num_ranks"),
    (_STEPS, "fault_injector_delay_start_iteration"),
    (_SECONDS, "fault_injector_fault_delay fault_injector_mtti_seconds fault_injector_offset_seconds"),
    # mkd's own flags.
    (
        Bounds(
            0.01,
            1000,
            "below, both distributions put everything on one token; above, nearly nothing is left of their difference",
        ),
        "kd_temperature",
    ),
    (_SHARE, "kd_ratio kd_beta kd_skew kd_rollout_most_repeated kd_rollout_most_cut_off"),
    (Bounds(0.0, 10.0, "it multiplies the square of about 10, beside a CE of about 3"), "kd_z_loss"),
    (Bounds(0.0, 1e6, "it is a factor of a term of the loss", without_low=True), "kd_hidden_loss_weight"),
    (Bounds(0.0, 1e6, "it is a factor of a term of the loss", without_low=True), "kd_teacher_weights"),
    (Bounds(1, 10**8, "it counts tokens of a vocabulary"), "kd_top_k"),
    (Bounds(1, 4095, "it counts samples per token, and records count to 4095"), "kd_teacher_samples"),
    (_TOKENS, "kd_teacher_seq_length kd_loss_chunk_rows kd_packing_multiple"),
    (
        _PARALLEL,
        "kd_teacher_tensor_model_parallel_size kd_teacher_pipeline_model_parallel_size"
        " kd_teacher_context_parallel_size kd_teacher_expert_model_parallel_size"
        " kd_teacher_expert_tensor_parallel_size",
    ),
    (_BATCH, "kd_teacher_micro_batch_size"),
    (Bounds(0, 1000, "it counts steps whose texts are sent ahead"), "kd_teacher_ahead"),
    (Bounds(0.0, 1e5, "it counts GB of host memory"), "kd_teacher_buffer_gb"),
    (Bounds(1.0, 1e6, "it is a time in seconds"), "kd_teacher_timeout kd_rollout_timeout"),
    (_INTERVAL, "kd_save_hf_interval kd_compare_interval"),
    (Bounds(1, 10**6, "it counts folders"), "kd_save_hf_keep kd_keep_last"),
    (Bounds(0.0, 1e6, "it counts passes over the data", without_low=True), "kd_epochs"),
    (Bounds(1, 10**6, "it counts tokens that the student writes"), "kd_sample_tokens kd_eval_tokens kd_rollout_tokens"),
    (Bounds(0.0, 1.0, "it is a share of the rows", without_low=True), "kd_on_policy"),
    (Bounds(0.0, 1000.0, "it divides logits"), "kd_rollout_temperature"),
    (Bounds(0.0, 1.0, "it is a sum of probabilities", without_low=True), "kd_rollout_top_p"),
    (Bounds(0.0, 1e5, "it counts GB of a device", without_low=True), "kd_rollout_memory_gb"),
    (Bounds(1, 10**5, "it counts answers to a prompt"), "kd_rollout_samples"),
    (Bounds(1, 1000, "it counts steps, and older texts are no longer the student's"), "kd_rollout_steps"),
    (Bounds(1, 10**6, "it counts steps"), "kd_rollout_refresh"),
    (Bounds(0.0, 1e9, "it counts tokens of a text", without_low=True), "kd_position_weight"),
)

BOUNDS: Mapping[str, Bounds] = {name: bounds for bounds, names in _GROUPS for name in names.split()}
"""Name of an argument -> its bounds."""

WITHOUT_BOUNDS: Mapping[str, str] = {
    "any finite number is a bias or an offset of the model": "glu_linear_offset moe_router_force_biased",
    "not read: inference, reinforcement learning, images, retrieval, other architectures": (
        "inference_batch_times_seqlen_threshold max_tokens_to_oom inference_max_requests inference_max_seq_length"
        " inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb"
        " inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size"
        " inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens"
        " inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_cuda_graph_mixed_prefill_count"
        " inference_dynamic_batching_unified_memory_level inference_cuda_graph_max_tokens num_speculative_tokens"
        " inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_prefix_caching_mamba_gb"
        " inference_logging_step_interval"
        " rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag grpo_iterations"
        " grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight rl_default_temperature"
        " rl_default_top_p rl_default_top_k rl_importance_sampling_truncation_coef"
        " rl_sequence_packing_max_sequences_per_bin rl_inference_tensor_model_parallel_size"
        " rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size"
        " rl_inference_model_unified_memory_level rl_inference_pipeline_model_parallel_size"
        " logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_load_prefetch_factor"
        " logits_load_msc_prefetch_depth logits_load_kd_loss_alpha"
        " ict_head_size biencoder_projection_dim query_in_block_prob retriever_report_topk_accuracies"
        " indexer_batch_size indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction"
        " data_per_class_fraction mask_factor iter_per_epoch dino_local_img_size dino_local_crops_number"
        " dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer dino_warmup_teacher_temp"
        " dino_teacher_temp dino_warmup_teacher_temp_epochs"
    ),
    "the launcher sets it": "local_rank",
    "argparse lists its choices": "flash_attention_version",
}
"""Reason -> arguments without bounds; NaN and infinities are refused for them too."""


def check_number(flag: str, name: str, value: float) -> None:
    """Raise MkdConfigError for a number outside its bounds, NaN or infinite.

    Args:
        flag: the flag to name.
        name: name of the argument in `BOUNDS`.
        value: the number.
    """
    bounds = BOUNDS.get(name)
    if isinstance(value, float) and not math.isfinite(value):
        legal = "" if bounds is None else f" {bounds}"
        raise MkdConfigError(f"{flag} is {value}; it must be a finite number{legal}")
    if bounds is not None and value not in bounds:
        text = str(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} digits)"
        raise MkdConfigError(f"{flag} is {text}; it must be {bounds} ({bounds.reason})")


def is_numeric(action: Action) -> bool:
    """True if the flag takes numbers."""
    return action.type in (int, float) and action.option_strings != []


def check_given(actions: Iterable[Action], args: Namespace, words: Sequence[str]) -> None:
    """Raise MkdConfigError for the first number on a command line that can only be a slip.

    Args:
        actions: flags of the parser.
        args: values that the parser found.
        words: the command line.
    """
    written = {word.split("=")[0] for word in words}
    for action in actions:
        flags = written.intersection(action.option_strings)
        if flags and is_numeric(action):
            for value in _numbers(getattr(args, action.dest)):
                check_number(min(flags), action.dest, value)


def _numbers(value: Any) -> Iterator[float]:
    """The numbers of a flag, which may be a list or None."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
