"""Intervals and --kd-sample-prompts: values that are refused before the work."""

from argparse import Namespace
from copy import copy
from functools import cache
from typing import Any

import pytest

from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import check_intervals, check_saving
from mkd.config.sample_prompts import check_sampling
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
        ({"eval_iters": -1}, "--eval-iters is -1; it must be at least 0, which never evaluates"),
        ({"eval_interval": 0}, "--eval-interval is 0; it must be at least 1"),
        ({"log_interval": 0}, "--log-interval is 0; it must be at least 1"),
        ({"tensorboard_log_interval": 0}, "--tensorboard-log-interval is 0; it must be at least 1"),
        ({"train_iters": -5}, "--train-iters is -5; it must be at least 1"),
        ({"train_samples": -5}, "--train-samples is -5; it must be at least 1"),
        ({"save_interval": -1}, "--save-interval is -1; it must be at least 1"),
        ({"save": "S"}, "--save S needs --save-interval"),
    ],
)
def test_intervals(changes: dict, words: str) -> None:
    check_intervals(arguments())
    with pytest.raises(MkdConfigError) as caught:
        check_intervals(arguments(**changes))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_iters": 0}, "samples are written at evaluations, and --eval-iters is 0"),
        ({"tokenizer_type": "NullTokenizer"}, "needs a HuggingFaceTokenizer, --tokenizer-type is NullTokenizer"),
        ({"seq_length": 64}, "--kd-sample-tokens is 64; it must be below --seq-length 64"),
        ({"cuda_graph_impl": "local"}, "does not work with --cuda-graph-impl"),
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


def test_flags_without_their_partner() -> None:
    with pytest.raises(MkdConfigError, match="--kd-sample-tokens is 5, but no samples are written"):
        kd(sample_tokens=5)
    with pytest.raises(MkdConfigError, match="--kd-sample-tokens is 0; it must be at least 1"):
        kd(sample_prompts="P", sample_tokens=0)
    with pytest.raises(MkdConfigError, match="--kd-keep-last is 0; it must be at least 1"):
        kd(keep_last=0)
    with pytest.raises(MkdConfigError, match="--kd-keep-last is 2, but there is no folder to save in"):
        check_saving(arguments(save=None), kd(keep_last=2))
    with pytest.raises(MkdConfigError, match="--kd-keep-last needs --ckpt-format torch_dist, not torch"):
        check_saving(arguments(save="S", ckpt_format="torch"), kd(keep_last=2))
