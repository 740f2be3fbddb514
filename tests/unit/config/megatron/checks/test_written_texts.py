"""Texts that the student writes: flags that are refused before the work."""

from argparse import Namespace
from copy import copy
from functools import cache
from typing import Any

import pytest

from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.written_texts import check_rollouts, check_sampling, check_tasks
from mkd.errors import MkdConfigError


@cache
def defaults() -> Namespace:
    return default_arguments()


def arguments(**changes: Any) -> Namespace:
    args = copy(defaults())
    given = dict(eval_interval=10, eval_iters=1, seq_length=128, tokenizer_type="HuggingFaceTokenizer")
    vars(args).update({**given, **changes})
    return args


def kd(**changes: Any) -> KDConfig:
    return KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_iters": 0}, "samples are written at evaluations, and --eval-iters is 0"),
        ({"tokenizer_type": "NullTokenizer"}, "needs a HuggingFaceTokenizer, --tokenizer-type is NullTokenizer"),
        ({"seq_length": 64}, "--kd-sample-tokens is 64; it must be below --seq-length 64"),
        ({"tp_comm_overlap": True}, "does not work with --tp-comm-overlap"),
        ({"fp8": "hybrid"}, "does not work with --fp8-format"),
        ({"fp4": "e2m1"}, "does not work with --fp4-format"),
        ({"use_megatron_fsdp": True}, "does not work with --use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "does not work with --use-torch-fsdp2"),
        ({"overlap_moe_expert_parallel_comm": True}, "does not work with --overlap-moe-expert-parallel-comm"),
        ({"moe_expert_capacity_factor": 1.5}, "does not work with --moe-expert-capacity-factor"),
        ({"moe_expert_rank_capacity_factor": 1.5}, "does not work with --moe-expert-rank-capacity-factor"),
        ({"moe_router_load_balancing_type": ["quantile_balancing"]}, "quantile_balancing"),
    ],
)
def test_samples_that_cannot_be_written(changes: dict, words: str) -> None:
    check_sampling(arguments(), kd(sample_prompts="P"))
    check_sampling(arguments(**changes), kd())
    with pytest.raises(MkdConfigError) as caught:
        check_sampling(arguments(**changes), kd(sample_prompts="P"))
    assert words in str(caught.value)


def test_tasks_are_refused_like_samples() -> None:
    check_tasks(arguments(seq_length=512), kd(eval_tasks="F"))
    for changes, words in (
        ({"eval_iters": 0}, "--kd-eval-tasks F: answers are written at evaluations, and --eval-iters is 0"),
        ({"seq_length": 256}, "--kd-eval-tokens is 256; it must be below --seq-length 256"),
        ({"fp8": "hybrid", "seq_length": 512}, "--kd-eval-tasks does not work with --fp8-format"),
    ):
        with pytest.raises(MkdConfigError) as caught:
            check_tasks(arguments(**changes), kd(eval_tasks="F"))
        assert words in str(caught.value)


ON_POLICY = {"on_policy": 0.5, "prompts": "P", "rollout_tokens": 8}

SERVER = ["http://a"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 1}, "--kd-on-policy 0.5 of --global-batch-size 1 is less than one row"),
        (
            {"overlap_param_gather": True},
            "--kd-on-policy 0.5 does not work with --overlap-param-gather and without --us",
        ),
        (
            {"overlap_param_gather_with_optimizer_step": True},
            "--kd-on-policy 0.5 does not work with --overlap-param-gather-with-optimizer-step",
        ),
        ({"fp8": "hybrid", "fp8_param_gather": True}, "--kd-on-policy does not work with --fp8-format"),
        ({"seq_length": 8}, "--kd-rollout-tokens is 8; it must be below --seq-length 8"),
    ],
)
def test_on_policy_in_jobs_where_the_student_cannot_write(changes: dict, words: str) -> None:
    check_rollouts(arguments(global_batch_size=2, eval_iters=0), kd(**ON_POLICY))
    check_rollouts(
        arguments(global_batch_size=2, overlap_param_gather=True, use_distributed_optimizer=True), kd(**ON_POLICY)
    )
    scheduled = kd(**{**ON_POLICY, "on_policy": None, "on_policy_schedule": "linear:0:0.5:9"})
    check_rollouts(arguments(global_batch_size=2), scheduled)
    check_rollouts(arguments(global_batch_size=1, step_batch_size_schedule="0:1 64:8"), scheduled)
    with pytest.raises(MkdConfigError, match=r"schedule linear:0:0\.5:9 of --global-batch-size 1 is less"):
        check_rollouts(arguments(global_batch_size=1), scheduled)
    with pytest.raises(MkdConfigError) as caught:
        check_rollouts(arguments(**{"global_batch_size": 2, **changes}), kd(**ON_POLICY))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("flag", ["optimizer_cpu_offload", "optimizer_cuda_graph"])
def test_optimizers_whose_state_cannot_leave(flag: str) -> None:
    args = arguments(global_batch_size=2, **{flag: True})
    check_rollouts(args, kd(**ON_POLICY))
    with pytest.raises(MkdConfigError, match=f"--kd-rollout-offload does not work with --{flag.replace('_', '-')}"):
        check_rollouts(args, kd(**ON_POLICY, rollout_offload=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"on_policy": 1.5}, "--kd-on-policy is 1.5"),
        ({"on_policy": 0.0}, "--kd-on-policy is 0"),
        ({"prompts": None}, "--kd-on-policy is 0.5, but there are no prompts: give --kd-prompts FILE"),
        ({"on_policy": None}, "--kd-prompts is P, but the student writes nothing: give --kd-on-policy"),
        ({"on_policy": None, "prompts": None}, "--kd-rollout-tokens is 8, but the student writes nothing"),
        ({"rollout_temperature": -1.0}, "--kd-rollout-temperature is -1"),
        ({"rollout_tokens": 0}, "--kd-rollout-tokens is 0; it must be at least 1"),
        ({"on_policy_schedule": "linear:0:1:9"}, "--kd-on-policy 0.5 and --kd-on-policy-schedule linear:0:1:9 both"),
        (
            {"on_policy": None, "on_policy_schedule": "linear:0:2:9"},
            "END of --kd-on-policy-schedule is 2; it is a share",
        ),
        ({"on_policy": None, "on_policy_schedule": "linear:0:0:9"}, "where L is 0 for the whole run: leave it out"),
        ({"on_policy": None, "on_policy_schedule": "cosine:0:1"}, "--kd-on-policy-schedule is 'cosine:0:1'; write"),
        ({"rollout_top_p": 0.0}, "--kd-rollout-top-p is 0"),
        ({"rollout_top_p": 1.5}, "--kd-rollout-top-p is 1.5"),
        ({"rollout_top_p": 0.9, "rollout_temperature": 0.0}, "at --kd-rollout-temperature 0 nothing is sampled"),
        ({"rollout_samples": 0}, "--kd-rollout-samples is 0; it must be at least 1"),
        ({"rollout_samples": 2, "rollout_temperature": 0.0}, "all answers to a prompt are the same"),
        ({"rollout_stop": ["a", ""]}, "--kd-rollout-stop has an empty string"),
        ({"rollout_stop": ["a", "\udced"]}, "udced', which is not UTF-8: no text contains it"),
        (
            {"on_policy": None, "prompts": None, "rollout_tokens": 256, "rollout_stop": ["a"]},
            "--kd-rollout-stop is 'a', ",
        ),
        ({"rollout_cut_off": "keep"}, "--kd-rollout-cut-off is 'keep'; legal values are 'learn', 'drop'"),
        ({"rollout_steps": 0}, "--kd-rollout-steps is 0; it must be at least 1"),
        (
            {"on_policy": None, "prompts": None, "rollout_tokens": 256, "rollout_offload": True},
            "--kd-rollout-offload is True, but the student writes nothing",
        ),
        ({"rollout_refresh": 2}, "--kd-rollout-refresh is 2, but the student writes on the training ranks: give --kd"),
        ({"rollout_weights": "W"}, "--kd-rollout-weights is W, but the student writes on the training ranks"),
        ({"rollout_api": "mkd"}, "--kd-rollout-api is 'mkd'; legal values are 'auto', 'vllm', 'sglang'"),
        ({"rollout_url": SERVER, "rollout_refresh": 0}, "--kd-rollout-refresh is 0; it must be at least 1"),
        ({"rollout_url": SERVER, "rollout_timeout": 0.0}, "--kd-rollout-timeout is 0"),
        ({"rollout_url": SERVER * 2}, "--kd-rollout-url http://a http://a has an address twice"),
        ({"rollout_url": SERVER, "rollout_memory_gb": 1.0}, "http://a does not work with --kd-rollout-memory-gb"),
        ({"rollout_url": SERVER, "rollout_offload": True}, "http://a does not work with --kd-rollout-offload"),
        ({"rollout_url": SERVER, "lora": "4", "student_hf": "S"}, "does not work with --kd-lora (servers load whole"),
        (
            {"on_policy": None, "prompts": None, "rollout_tokens": 256, "rollout_url": SERVER},
            "--kd-rollout-url is 'http://a', but the student writes nothing",
        ),
        ({"position_weight": 0.0}, "--kd-position-weight is 0"),
        ({"rollout_guard": "end"}, "--kd-rollout-guard is 'end'; legal values are 'off', 'warn', 'stop'"),
        ({"rollout_most_repeated": 1.5}, "--kd-rollout-most-repeated is 1.5"),
        (
            {"rollout_guard": "off", "rollout_most_cut_off": 0.5},
            "--kd-rollout-most-cut-off is 0.5, but --kd-r",
        ),
        ({"ratio": 0.0}, "does not work with --kd-ratio 0 (the teacher is not run)"),
        ({"teacher_hf": None, "teacher_cache": "C"}, "does not work with --kd-teacher-cache"),
        (
            {"teacher_hf": None, "teacher_url": ["http://a:1"], "teacher_cache": "C", "top_k": 8},
            "does not work with --kd-teacher-cache",
        ),
        (
            {"balance": True, "on_policy": 1.0},
            "--kd-on-policy is 1, which does not work with --kd-balance (where all te",
        ),
        (
            {"balance": True, "on_policy": None, "on_policy_schedule": "linear:1:0:9"},
            "linear from 1 to 0 over 9 iterations of --kd-on-policy, which does not work with --kd-balance",
        ),
    ],
)
def test_on_policy_with_flags_of_distillation(changes: dict, words: str) -> None:
    kd(**ON_POLICY)
    kd(**ON_POLICY, hidden_loss="1:1")
    kd(**ON_POLICY, teacher_hf=["A", "B"], teachers_mode="select", xtoken_loss="p_kl", balance=True)
    with pytest.raises(MkdConfigError) as caught:
        kd(**{**ON_POLICY, **changes})
    assert words in str(caught.value)


def test_a_folder_for_the_weights_of_servers() -> None:
    for options, flags in (({"save": "S"}, {}), ({"save": None}, {"rollout_weights": "W"})):
        check_rollouts(arguments(global_batch_size=2, **options), kd(**ON_POLICY, rollout_url=SERVER, **flags))
    with pytest.raises(MkdConfigError, match="--kd-rollout-url http://a: there is no folder for the student's weights"):
        check_rollouts(arguments(global_batch_size=2, save=None), kd(**ON_POLICY, rollout_url=SERVER))


def test_flags_without_their_partner() -> None:
    with pytest.raises(MkdConfigError, match="--kd-sample-tokens is 5, but no samples are written"):
        kd(sample_tokens=5)
    with pytest.raises(MkdConfigError, match="--kd-eval-tokens is 5, but no tasks are answered"):
        kd(eval_tokens=5)
    with pytest.raises(MkdConfigError, match="--kd-sample-tokens is 0; it must be at least 1"):
        kd(sample_prompts="P", sample_tokens=0)
    with pytest.raises(MkdConfigError, match="--kd-keep-last is 0; it must be at least 1"):
        kd(keep_last=0)
    with pytest.raises(MkdConfigError, match="--kd-keep-best is accuracy, which is measured with --kd-eval-tasks only"):
        kd(keep_best="accuracy")
