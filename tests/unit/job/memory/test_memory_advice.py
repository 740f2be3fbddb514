"""Advice for a run that does not fit, and its effect."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.job.memory import Workload
from mkd.job.memory.advice import CHANGES, advise, needed
from tests.support.memory_jobs import llama_arguments

TP, DP = "tensor_model_parallel_size", "data_parallel_size"
LAST = "decoder_last_pipeline_num_layers"


def work(**changes: Any) -> Workload:
    """Shapes of Llama-3.2-1B (student) and Llama-3.1-8B (teacher) on 8 ranks."""
    shape = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 4, "global_batch_size": 64}
    shape |= {"world_size": 8, DP: 8, **changes}
    student = llama_arguments(16, 2048, 8192, 32, 8, True, **shape)
    teacher = llama_arguments(32, 4096, 14336, 32, 8, False, **shape)
    return Workload(student, [teacher], KDConfig(teacher_hf=["T"], ratio=0.5), on_gpu=True)


def test_each_change_saves_the_reported_bytes():
    run = work()
    alone, _ = advise(run, 1e15)
    by_flags = {advice.flags: advice for advice in alone}
    for advice in alone:
        assert advice.needed + advice.saves == needed(run)
    for flags in (
        "--use-distributed-optimizer",
        "--micro-batch-size 2",
        "--kd-teacher-offload",
        "--kd-teacher-tensor-model-parallel-size 8",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
    ):
        assert flags in by_flags
    assert by_flags["--micro-batch-size 2"].needed == needed(work(micro_batch_size=2))
    assert by_flags["--tensor-model-parallel-size 2"].needed == needed(work(**{TP: 2, DP: 4}))


def test_changes_without_effect_are_not_advised():
    flags = {advice.flags for advice in advise(work(), 1e15)[0]}
    assert not flags & {"--recompute-activations", "--sequence-parallel", "--bf16"}
    done = work(use_distributed_optimizer=True, micro_batch_size=1, recompute_granularity="full")
    done.student.recompute_method, done.student.recompute_num_layers = "uniform", 1
    flags = {advice.flags for advice in advise(done, 1e15)[0]}
    assert not any("recompute" in flag or "microbatch" in flag or "optimizer" in flag for flag in flags)
    local = work(transformer_impl="local")
    assert "--recompute-activations" in {advice.flags for advice in advise(local, 1e15)[0]}
    single = work(params_dtype=torch.float32, bf16=False)
    assert "--bf16" in {advice.flags for advice in advise(single, 1e15)[0]}


@pytest.mark.parametrize("gib", [50, 40, 30, 25])
def test_combination_fits_and_is_minimal(gib):
    run = work()
    _, together = advise(run, gib * 2**30)
    assert together.needed <= gib * 2**30 < needed(run)
    chosen = {}
    current = run
    for flags, change in CHANGES:
        if (changed := change(current)) is not None:
            text = flags(changed) if callable(flags) else flags
            if text in together.flags:
                chosen[text], current = change, changed
    assert needed(current) == together.needed
    for left_out in chosen:
        current = run
        for text, change in chosen.items():
            current = current if text == left_out else (change(current) or current)
        assert needed(current) > gib * 2**30, f"{left_out} is not needed"


def test_no_combination_fits():
    run = work()
    alone, together = advise(run, 2**30)
    assert together is None and alone


def test_impossible_layouts_are_not_advised():
    run = work(world_size=2, **{DP: 2}, num_layers=15, num_query_groups=1)
    flags = " ".join(advice.flags for advice in advise(run, 1e15)[0])
    assert "tensor-model" not in flags and "pipeline-model" not in flags and "context-parallel-size 2" in flags
    flags = [advice.flags for advice in advise(work(seq_length=4098), 1e15)[0]]
    assert "--kd-teacher-tensor-model-parallel-size 2" in flags, "with sequence parallelism"
    for uneven in ({"num_layers": 15, "account_for_loss_in_pipeline_split": True}, {LAST: 5}):
        student = work(pipeline_model_parallel_size=2, **{DP: 4}, **uneven).student
        divided = " ".join(advice.flags for advice in advise(replace(run, student=student), 1e15)[0])
        assert "context-parallel-size 2" in divided and "pipeline-model" not in divided, uneven
    alone = replace(run, teachers=[])
    assert "--kd-teacher-offload" not in " ".join(advice.flags for advice in advise(alone, 1e15)[0])


def test_the_optimizer_leaves_where_texts_need_most_memory():
    run = work()
    kd = replace(run.kd, on_policy=1.0, prompts="P", rollout_memory_gb=200.0, rollout_steps=100)
    advised = {advice.flags: advice for advice in advise(replace(run, kd=kd), 1e15)[0]}
    assert advised["--kd-rollout-offload"].saves > 1e9
    assert "--kd-rollout-offload" not in {advice.flags for advice in advise(run, 1e15)[0]}
    kd = replace(kd, rollout_offload=True)
    assert "--kd-rollout-offload" not in {advice.flags for advice in advise(replace(run, kd=kd), 1e15)[0]}
