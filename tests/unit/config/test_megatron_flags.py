"""Every Megatron flag about data, training and losses is passed on, supported with a test, or refused.

A new flag of the installed megatron-core fails here until somebody has found out what it does to rows, samplers, losses
and steps, and has entered it in one of the tables.
"""

from argparse import Action, ArgumentParser
from functools import cache
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from mkd.config.flags import UNSUPPORTED, UNSUPPORTED_VALUES, refuse_contradictions
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.errors import MkdConfigError

TESTS = Path(__file__).resolve().parents[2]

GROUPS = (
    "data and dataloader",
    "training",
    "validation",
    "regularization",
    "learning rate and weight decay",
    "RNG and initialization",
    "mixed precision",
    "tokenizer",
    "sft",
    "rl",
    "rerun engine",
    "Logits Distillation",
)
"""Titles of Megatron's groups that are walked, besides the arguments of models with `ArgRole.TRAINING`."""

PASSED = {
    "the optimizer's or the model's own arithmetic, after or before mkd's loss": (
        "weight_decay apply_wd_to_qk_layernorm no_weight_decay_cond_type clip_grad adam_beta1 adam_beta2 adam_eps"
        " sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec"
        " muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer"
        " lion_beta1 lion_beta2 optimizer start_weight_decay end_weight_decay lr_wsd_decay_style lr_decay_samples"
        " lr_wsd_decay_samples lr_warmup_init decoupled_lr decoupled_min_lr grad_reduce_in_bf16 loss_scale"
        " initial_loss_scale loss_scale_window hysteresis attention_softmax_in_fp32"
        " accumulate_allreduce_grads_in_fp32 use_checkpoint_opt_param_scheduler qk_clip qk_clip_alpha"
        " qk_clip_threshold"
    ),
    "the first values of weights, and random numbers inside layers": (
        "te_rng_tracker data_parallel_random_init perform_initialization init_method_std embedding_init_method_std"
        " moe_use_upcycling moe_upcycling_granularity"
    ),
    "routing of the student's tokens to its experts, inside Megatron's layers": (
        "moe_enable_routing_replay moe_router_bias_update_rate moe_router_quantile_balancing_ema"
        " moe_router_force_load_balancing moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor"
        " moe_pad_expert_input_to_capacity moe_token_drop_policy moe_expert_rank_capacity_factor"
        " moe_router_load_balancing_type"
    ),
    "when a job checks itself, collects garbage or ends; the steps are the same": (
        "empty_unused_memory_level check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval"
        " train_sync_interval exit_duration_in_mins exit_signal exit_signal_handler"
        " exit_signal_handler_for_dataloader manual_gc manual_gc_interval manual_gc_eval check_for_large_grads"
        " check_for_nan_in_loss_and_grad error_injection_rate error_injection_type rerun_mode"
    ),
    "kernels, memory and communication": (
        "recompute_activations tp_comm_overlap_cfg masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion"
        " bias_dropout_fusion apply_rope_fusion rope_type use_flash_attn optimizer_cpu_offload optimizer_cuda_graph"
        " optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d"
        " dump_param_to_param_group_map pin_cpu_grads pin_cpu_params no_persist_layer_norm"
        " gradient_accumulation_fusion reuse_grad_buf_for_mxfp8_param_ag"
    ),
    "how files are read; the rows are the same": (
        "mmap_bin_files num_dataset_builder_threads mid_level_dataset_surplus create_attention_mask_in_dataloader"
        " per_split_data_args_path test_data_path"
    ),
    "the tokenizer of random students and of Megatron's own formats": (
        "padded_vocab_size pad_vocab_size vocab_file merge_file vocab_extra_ids metadata_path special_tokens"
        " tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy"
        " tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast"
        " tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id"
    ),
}
"""Effect -> arguments that Megatron applies and that do not reach rows, samplers or mkd's losses."""

UNREAD = {
    "Megatron itself refuses or replaces it": (
        "batch_size warmup checkpoint_activations deprecated_use_mcore_models encoder_seq_length"
    ),
    "it would only make the start of a job faster": (
        "per_dataset_sequences_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap"
        " object_storage_cache_path"
    ),
    "for inference, reinforcement learning or another architecture": (
        "inference_rng_tracker test_mode mamba_training_ssm_states_dtype refit_method"
    ),
    "an option of a flag that is refused": (
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token"
        " fim_suffix_token fim_pad_token fim_eod_token langrl_env_config mtp_loss_scaling_factor mtp_detach_heads"
        " dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss"
    ),
    "mkd sets it": "calculate_per_token_loss",
    "the check of --global-batch-size refuses the batches that it would make smaller": "decrease_batch_size_if_needed",
}
"""Reason -> arguments without an effect on a job, whatever their value."""

SUPPORTED = {
    "e2e/test_bad_input.py": (
        "micro_batch_size global_batch_size train_iters lr lr_decay_style lr_decay_iters lr_wsd_decay_iters"
        " lr_warmup_iters min_lr eval_iters eval_interval data_path train_data_path valid_data_path data_args_path"
        " split seq_length vocab_size tokenizer_type tokenizer_model pretrained_checkpoint"
    ),
    "e2e/test_megatron_flags.py": (
        "dataloader_type step_batch_size_schedule train_samples lr_warmup_samples eval_micro_batch_size"
        " eval_global_batch_size start_eval_at_iter eod_mask_loss"
    ),
    "e2e/test_cached_teacher.py": "seed",
    "e2e/test_cache_tool.py": "reset_position_ids",
    "e2e/test_check_invariance.py": "exit_interval",
    "e2e/test_chat.py": "num_workers save load",
    "e2e/test_pretrain.py": "use_checkpoint_args",
    "e2e/test_resume.py": "override_opt_param_scheduler async_save",
    "support/e2e/small_job.py": "data_cache_path",
    "unit/checkpoint/megatron/test_lr_schedule.py": "lr_warmup_fraction weight_decay_incr_style",
    "unit/data/test_row_sets.py": "mock_data",
    "unit/train/test_nan_check.py": "min_loss_scale",
}
"""File under tests/ -> arguments that it runs with. All of them may change rows, samplers, losses or steps."""


@cache
def actions() -> dict[str, Action]:
    """The walked arguments by their names."""
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    found = {action.dest: action for action in parser._actions if action.dest in names_with(ArgRole.TRAINING)}
    for title in GROUPS:
        (group,) = (group for group in parser._action_groups if group.title == title)
        assert group._group_actions, "Megatron renamed the group"
        found |= {action.dest: action for action in group._group_actions}
    return found


def is_refused(action: Action) -> bool:
    """True if each flag that turns it on is refused with any value."""
    for flag in action.option_strings:
        if flag.startswith("--no-rl-"):
            continue  # the default of an option of reinforcement learning
        try:
            refuse_contradictions([flag, "value"])
        except MkdConfigError:
            continue
        return False
    return True


def names_in(table: dict[str, str]) -> list[str]:
    return " ".join(table.values()).split()


def test_each_flag_is_passed_supported_or_refused() -> None:
    classified = {*names_in(PASSED), *names_in(UNREAD), *names_in(SUPPORTED)}
    refused = {name for name, action in actions().items() if is_refused(action)}
    unknown = sorted(actions().keys() - classified - refused)
    assert unknown == [], "enter these in a table here, or refuse them in mkd/config/flags.py"


def test_each_entry_is_one_flag_in_one_table() -> None:
    names = names_in(PASSED) + names_in(UNREAD) + names_in(SUPPORTED)
    assert len(names) == len(set(names))
    assert sorted(set(names) - actions().keys()) == []
    assert [name for name in names if is_refused(actions()[name])] == []


@pytest.mark.parametrize("file", SUPPORTED)
def test_supported_flags_are_tested_there(file: str) -> None:
    text = (TESTS / file).read_text()
    missing = [
        name
        for name in SUPPORTED[file].split()
        if name not in text and not any(flag in text for flag in actions()[name].option_strings)
    ]
    assert missing == []


def test_refused_flags_exist() -> None:
    every = add_megatron_arguments(ArgumentParser(allow_abbrev=False))._actions
    known = {flag for action in every for flag in action.option_strings}
    others = {"--defer-embedding-wgrad-compute", "--no-data-sharding", "--lazy-mpu-init"}
    assert sorted(UNSUPPORTED.keys() - known - others) == []
    for flag, values in UNSUPPORTED_VALUES.items():
        (action,) = (action for action in every if flag in action.option_strings)
        assert set(values) < set(action.choices)


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, of in UNSUPPORTED_VALUES.items() for value in of])
def test_refused_values(flag: str, value: str) -> None:
    for words in ([flag, value], [f"{flag}={value}"], ["--lr", "1", flag, value, "--bf16"]):
        with pytest.raises(MkdConfigError, match=f"{flag} {value} is not supported: "):
            refuse_contradictions(words)
    refuse_contradictions([flag, "single", value])
    refuse_contradictions([f"{flag}=single", "--save", value])
