"""Flags for models that wait for the host, against the rows of docs/benchmarks.md."""

from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.job.plan.launch_bound import layer_times, student_launches, teacher_launches
from tests.support.memory_jobs import llama_arguments

H200 = 989.0
TP, FP8 = {"tensor_model_parallel_size": 2}, {"fp8": "e4m3"}
SHAPES = {"8B": (32, 4096, 14336, 32, 8, False), "1B": (16, 2048, 8192, 32, 8, True)}


def text(shape: str, length: int, rows: int, teacher: dict[str, Any], **kd: Any) -> str | None:
    sizes = {"padded_vocab_size": 128256, "seq_length": length, "micro_batch_size": rows, "global_batch_size": 16}
    args = llama_arguments(*SHAPES["1B"], **sizes, world_size=1)
    args.data_parallel_size = 1
    own = llama_arguments(*SHAPES[shape], **sizes, world_size=1)
    vars(own).update(teacher)
    return teacher_launches(own, args, KDConfig(teacher_hf=["T"], ratio=0.5, **kd), H200)


def test_time_of_a_layer() -> None:
    """Llama-3.1-8B has 218e6 parameters per layer; attention reads 2048 of 4096 positions on average."""
    own = llama_arguments(*SHAPES["8B"], padded_vocab_size=128256, seq_length=4096, world_size=1)
    flops = 2 * 8192 * (218e6 + 2 * 4096 * 2048)
    assert layer_times(own, 2, 1000.0) == (pytest.approx(flops / 600e12 * 1e3, rel=0.01), 2.0)
    own.fp8, own.tensor_model_parallel_size = "e4m3", 2
    assert layer_times(own, 2, 1000.0) == (pytest.approx(flops / 4 / 600e12 * 1e3, rel=0.01), 4.5)


@pytest.mark.parametrize(
    ("shape", "length", "rows", "teacher", "flag"),
    [
        ("8B", 4096, 2, {}, None),  # 414 ms with and without graphs
        ("8B", 4096, 1, FP8, "--kd-teacher-micro-batch-size 2 "),  # 548 and 268 ms
        ("8B", 4096, 2, FP8, None),
        ("1B", 512, 1, {}, "--kd-teacher-micro-batch-size"),  # 480 and 30 ms
        ("8B", 4096, 2, TP, "--kd-teacher-cuda-graph"),  # 1.00 and 0.91 s
        ("8B", 4096, 2, TP | FP8, "--kd-teacher-cuda-graph"),
    ],
)
def test_proposals(shape: str, length: int, rows: int, teacher: dict[str, Any], flag: str | None) -> None:
    found = text(shape, length, rows, teacher)
    assert found is None if flag is None else flag in f"{found} "


def test_flags_that_are_refused_or_given_are_not_proposed() -> None:
    assert "--kd-teacher-cuda-graph" not in text("1B", 512, 1, {}, packing="best_fit")
    assert "--kd-teacher-cuda-graph" not in text("1B", 512, 1, {"context_parallel_size": 2})
    assert text("1B", 512, 1, {}, teacher_micro_batch_size=16, packing="best_fit") is None
    assert text("1B", 512, 1, {}, teacher_cuda_graph=True) is None


GRAPHS = "--cuda-graph-impl transformer_engine"
LARGER = "--micro-batch-size 4"


@pytest.mark.parametrize(
    ("changes", "flags", "proposed"),
    [
        (TP, {}, {LARGER, GRAPHS}),  # a step: 2.49, 1.67 and 1.73 s; with teacher and graphs of both
        ({}, {}, set()),  # the student adds 0.66 s to the teacher's 0.80: the sum of both alone
        (TP, {"packing": "best_fit"}, {LARGER}),
        (TP | {"cuda_graph_impl": "transformer_engine"}, {}, set()),
        (TP | {"transformer_impl": "local"}, {}, {LARGER}),
        (TP | {"pipeline_model_parallel_size": 2}, {}, {GRAPHS}),
        (TP | {"data_parallel_size": 8}, {}, {GRAPHS}),
        (TP | {"rampup_batch_size": ["4", "4", "100"]}, {}, {GRAPHS}),
    ],
)
def test_flags_of_the_student(changes: dict[str, Any], flags: dict[str, Any], proposed: set[str]) -> None:
    sizes = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 16}
    args = llama_arguments(*SHAPES["1B"], **sizes)
    vars(args).update({"data_parallel_size": 1} | changes)
    found = student_launches(args, KDConfig(teacher_hf=["T"], ratio=0.5, **flags), H200)
    assert {flag for flag in (LARGER, GRAPHS) if flag in (found or "")} == proposed
