"""Students and jobs that are refused with --cuda-graph-impl."""

from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.cuda_graphs import check_student_graphs
from mkd.errors import MkdConfigError
from tests.support.memory_jobs import llama_arguments

ON_POLICY = {"on_policy": 0.5, "prompts": "P"}


def check(changes: dict[str, Any], **flags: Any) -> None:
    args = llama_arguments(2, 64, 128, 4, 2, False, **{"cuda_graph_impl": "transformer_engine", **changes})
    check_student_graphs(args, KDConfig(teacher_hf=["T"], ratio=0.5, **flags))


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"cuda_graph_impl": "local"}, {}, "--cuda-graph-impl local does not work with mkd: it has not been tested"),
        ({"cuda_graph_impl": "full_iteration"}, {}, "for the captured one; give transformer_engine, or leave it out"),
        ({"transformer_impl": "local"}, {}, "needs --transformer-impl transformer_engine, it is local"),
        ({"num_experts": 8}, {}, "graphs with experts are untested"),
        ({"multi_latent_attention": True}, {}, "latent attention"),
        ({"experimental_attention_variant": "gated_delta_net"}, {}, "gated_delta_net"),
        ({"layer_mixers": ["M", "*"]}, {}, "Mamba layers"),
        ({"recompute_granularity": "full"}, {}, "--recompute-granularity full"),
        (
            {"pipeline_model_parallel_size": 2, "step_batch_size_schedule": "0:8 100:16"},
            {},
            "--step-batch-size-schedule 0:8 100:16: 2 pipeline stages",
        ),
        ({}, {"packing": "best_fit"}, "--kd-packing best_fit"),
        ({}, {"variable_seq_lengths": True}, "--kd-variable-seq-lengths"),
        ({}, {"hidden_loss": "1:1"}, "--kd-hidden-loss 1:1"),
        ({}, {"lora": "4", "student_hf": "S"}, "--kd-lora 4"),
        ({}, ON_POLICY, "--kd-on-policy"),
        ({}, {"sample_prompts": "P"}, "--kd-sample-prompts"),
        ({}, {"eval_tasks": "F"}, "--kd-eval-tasks"),
    ],
)
def test_what_a_graph_of_the_student_cannot_repeat(changes: dict, flags: dict, words: str) -> None:
    with pytest.raises(MkdConfigError, match="--cuda-graph-impl") as error:
        check(changes, **flags)
    assert words in str(error.value)
    check({**changes, "cuda_graph_impl": "none"}, **flags)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"step_batch_size_schedule": "0:8 100:16"},
        {"recompute_granularity": "selective"},
    ],
)
def test_jobs_that_may_have_graphs(changes: dict[str, Any]) -> None:
    check(changes, teacher_cuda_graph=True)
