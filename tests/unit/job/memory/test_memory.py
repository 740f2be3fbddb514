"""The memory estimate against sizes by hand and measured peaks. tests/dist/test_memory.py uses real models."""

from copy import copy
from typing import Any

import pytest
import torch

from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.hf.families import family_by_name
from mkd.config.kd_config import KDConfig
from mkd.config.lora import LoraOptions
from mkd.config.megatron.fp8_teacher import compute_in_fp8
from mkd.job.memory import Workload, estimate, fullest, outside_of_torch
from mkd.job.memory.activations import backward_working_bytes, kept_by_layers, layer_bytes
from mkd.job.memory.estimate import (
    ACTIVATIONS,
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    GIB,
    GRADIENTS,
    GRAPH,
    HIDDEN,
    KEYS,
    LOGITS,
    MAPS,
    OPTIMIZER,
    STUDENT_GRAPHS,
    TEACHER,
    WEIGHTS,
    WORKING,
    StageMemory,
)
from mkd.job.memory.logits import logit_bytes
from mkd.job.memory.stage_layers import chunks_of_stage, in_flight
from mkd.models.lora import Lora
from mkd.teacher.waiting_states import ON_DEVICE
from tests.support.memory_jobs import llama_arguments

TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
LAST = "decoder_last_pipeline_num_layers"
CP, DP, SP = "context_parallel_size", "data_parallel_size", {"sequence_parallel": True}


def stages_of(kd: dict[str, Any] | None = None, on_gpu: bool = True, **changes: Any) -> list[StageMemory]:
    """The models of tests/gpu/test_layouts.py: teacher of 0.9e9, student of 0.2e9 parameters."""
    shape = {"padded_vocab_size": 32000, "seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 16, **changes}
    student = llama_arguments(8, 1024, 2816, 16, 4, True, **shape)
    teacher = llama_arguments(16, 2048, 5632, 16, 8, False, **{**shape, VP: None, LAST: None})
    return estimate(Workload(student, [teacher], KDConfig(teacher_hf=["T"], ratio=0.5, **(kd or {})), on_gpu))


MEASURED = [
    (4.54, {}, {}),
    (7.68, {}, {"params_dtype": torch.float32, "bf16": False}),
    (2.35, {}, {TP: 2, **SP}),
    (2.79, {}, {PP: 2}),
    (2.90, {}, {PP: 2, VP: 2}),
    (3.83, {}, {DP: 2, "use_distributed_optimizer": True}),
    (4.19, {}, {CP: 2}),
    (3.94, {"teacher_offload": True}, {}),
    (8.16, {}, {"seq_length": 4096, "micro_batch_size": 4}),
]
"""GiB that torch counted on the last stage of real runs, docs/benchmarks.md."""


@pytest.mark.parametrize("peak, kd, changes", MEASURED, ids=[f"{kd or ''}{c or ''}" for _, kd, c in MEASURED])
def test_measured_peaks(peak, kd, changes):
    assert stages_of(kd, **changes)[-1].peak / GIB == pytest.approx(peak, rel=0.02)


def lora_of_8b(tp: int = 1) -> dict[str, float]:
    """Parts of a job in which adapters of rank 16 on all linear layers of Llama-3.1-8B learn from the model itself."""
    family = family_by_name("LlamaForCausalLM")
    shape = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 8, TP: tp}
    args = llama_arguments(32, 4096, 14336, 32, 8, False, **shape)
    sizes = {**vars(args), "group_query_attention": True, "vocab_size": 128256}
    options = LoraOptions(16, 16.0)
    work = Workload(
        args,
        [args],
        KDConfig(teacher_hf=["T"], ratio=0.5),
        on_gpu=True,
        lora=Lora(options, adapted_linears(family, sizes, options), seed=1),
        shares_teacher=True,
    )
    assert work.lora.parameters == ADAPTERS_OF_8B
    (stage,) = estimate(work)
    return stage.held | {"peak": stage.peak}


ADAPTERS_OF_8B = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
"""41.9e6"""


def test_adapters_of_8b() -> None:
    """The frozen weights exist once, and only adapters have gradients and optimizer state."""
    held = lora_of_8b()
    assert held[WEIGHTS] == pytest.approx(2 * (8.03e9 + ADAPTERS_OF_8B), rel=1e-3)
    assert held[GRADIENTS] == 4 * ADAPTERS_OF_8B
    assert held[OPTIMIZER] == 12 * ADAPTERS_OF_8B
    assert TEACHER not in held
    assert held["peak"] / GIB == pytest.approx(33.61, rel=0.02)  # measured: docs/benchmarks.md
    replicated = 32 * 16 * 7 * 4096  # the A of q, k, v, gate and up, and the B of o and down
    assert lora_of_8b(2)[GRADIENTS] == 4 * (replicated + (ADAPTERS_OF_8B - replicated) / 2)


def test_served_teacher():
    """The last stage has the rows of the LM head of its vocabulary shard, and hidden states; nothing else is loaded."""
    shape = {"padded_vocab_size": 32000, "seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 16}
    for changes, shards in ({}, 1), ({TP: 2, **SP}, 2), ({PP: 2}, 1):
        student = llama_arguments(8, 1024, 2816, 16, 4, True, **shape, **changes)
        served = copy(student)
        served.hidden_size = 2048
        kd = KDConfig(teacher_url=["tcp://a:1"], ratio=0.5)
        *others, last = estimate(Workload(student, [], kd, on_gpu=True, served=[served]))
        *_, alone = estimate(Workload(student, [], kd, on_gpu=True))
        assert last.held[TEACHER] == 2 * 32000 * 2048 / shards
        # Answers wait in host memory, with pipeline stages too; that of the next microbatch, for whole rows, arrives.
        assert last.most(HIDDEN) == 2 * 2 * 1024 * 2048 / shards + 2 * 2 * 1024 * 2048
        assert last.most(LOGITS) > alone.most(LOGITS)
        assert "teacher forward" not in last.phases
        assert [one.held.get(TEACHER, 0) for one in others] == [0] * len(others)


def test_joined_passes_of_the_teacher():
    """Hidden states of one pass are held, and it has the working memory of its rows."""
    microbatch = 2 * 2 * 1024 * 2048
    (one,), (four,) = stages_of(), stages_of({"teacher_micro_batch_size": 8})
    assert (one.most(HIDDEN), four.most(HIDDEN)) == (microbatch, 4 * microbatch)
    working = [stage.phases["teacher forward"][WORKING] for stage in (one, four)]
    assert working[1] == 4 * working[0] + 4 * microbatch
    assert stages_of({"teacher_micro_batch_size": 1000})[0].most(HIDDEN) == 8 * microbatch  # those of a step
    (last,) = stages_of({"teacher_micro_batch_size": 8}, **{PP: 2})[1:]
    assert last.most(HIDDEN) == 8 * microbatch


@pytest.mark.parametrize(
    ("microbatches", "kd", "changes", "held"),
    [
        (8, {}, {}, 8),
        (64, {}, {}, ON_DEVICE),
        (64, {"teacher_signals": "device"}, {}, 64),
        (8, {"teacher_signals": "host"}, {}, ON_DEVICE),
        (2, {"teacher_signals": "host"}, {}, 2),
        (64, {}, {VP: 2}, ON_DEVICE + 2),
        (64, {"hidden_loss": "1:1"}, {}, ON_DEVICE + 64),
    ],
    ids=str,
)
def test_hidden_states_that_wait(microbatches: int, kd: dict, changes: dict, held: int) -> None:
    """On the device there are as many as mkd/teacher/waiting_states.py keeps, however many microbatches there are."""
    last = stages_of(kd, **{PP: 2, "global_batch_size": 2 * microbatches}, **changes)[-1]
    assert last.most(HIDDEN) == held * 2 * 2 * 1024 * 2048


def test_hidden_states_of_two_teachers_that_wait() -> None:
    """One more than twice those of one: see the bound in tests/dist/test_waiting_states.py."""
    shape = {"padded_vocab_size": 32000, "seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 128, PP: 2}
    student = llama_arguments(8, 1024, 2816, 16, 4, True, **shape)
    teacher = llama_arguments(16, 2048, 5632, 16, 8, False, **shape)
    work = Workload(student, [teacher, teacher], KDConfig(teacher_hf=["T", "U"], ratio=0.5), on_gpu=True)
    assert estimate(work)[-1].most(HIDDEN) == (2 * ON_DEVICE + 1) * 2 * 2 * 1024 * 2048


def test_cuda_graph_of_the_teacher():
    """The memory of a pass is held all the time; there is none on a CPU."""
    (plain,), (graph,) = stages_of(), stages_of({"teacher_cuda_graph": True})
    output = 2 * 2 * 1024 * 2048
    assert graph.held[GRAPH] == plain.phases["teacher forward"][WORKING] + output
    assert graph.peak == plain.peak + graph.held[GRAPH]
    assert GRAPH not in stages_of({"teacher_cuda_graph": True}, on_gpu=False)[0].held


@pytest.mark.parametrize(("changes", "in_flight"), [({}, 1), ({PP: 2}, 2)])
def test_cuda_graphs_of_the_student(changes: dict, in_flight: int) -> None:
    """Activations and temporary tensors of the layers are held all the time, with the inputs of each layer."""
    plain, graphs = (stages_of(**changes, cuda_graph_impl=name)[0] for name in ("none", "transformer_engine"))
    backward = plain.phases["student backward"]
    layers = 8 // changes.get(PP, 1)
    inputs = in_flight * layers * 2 * (1024**2 + 1024 * 1024 * 2)
    assert graphs.held[ACTIVATIONS] == backward[ACTIVATIONS]
    assert graphs.held[STUDENT_GRAPHS] == backward[WORKING] + inputs
    forward = graphs.phases["teacher forward"]
    assert forward == plain.phases["teacher forward"]
    assert graphs.peak >= sum(graphs.held.values()) + sum(forward.values())
    (on_cpu,) = stages_of(cuda_graph_impl="transformer_engine", on_gpu=False)
    assert STUDENT_GRAPHS not in on_cpu.held


def test_measured_step_of_8b_and_1b():
    """31.9 GiB without an optimizer."""
    shape = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 2}
    student = llama_arguments(16, 2048, 8192, 32, 8, True, **shape)
    teacher = llama_arguments(32, 4096, 14336, 32, 8, False, **shape)
    (stage,) = estimate(Workload(student, [teacher], KDConfig(teacher_hf=["T"], ratio=0.5), on_gpu=True))
    assert stage.held[WEIGHTS] + stage.held[TEACHER] == pytest.approx(17.3 * GIB, rel=0.01)
    assert stage.held[GRADIENTS] == pytest.approx(4.6 * GIB, rel=0.01)
    assert (stage.peak - stage.held[OPTIMIZER]) / GIB == pytest.approx(31.9, rel=0.01)
    compute_in_fp8(teacher)
    (stage,) = estimate(Workload(student, [teacher], KDConfig(teacher_hf=["T"], ratio=0.5), on_gpu=True))
    assert (stage.peak - stage.held[OPTIMIZER]) / GIB == pytest.approx(25.4, rel=0.01)


@pytest.mark.parametrize(
    ("loss", "impl", "rows", "measured"),
    [
        ("partition_kl", "auto", None, 1.47),
        ("partition_kl", "auto", 1536, 1.00),
        ("partition_kl", "auto", 768, 0.51),
        ("p_kl", "auto", None, 1.49),
        ("gold", "auto", None, 1.48),
        ("p_kl", "eager", None, 2.10),
        ("gold", "eager", None, 1.61),
        ("gold_relaxed", "eager", None, 1.67),
    ],
)
def test_measured_cross_tokenizer_losses(loss: str, impl: str, rows: int | None, measured: float) -> None:
    """GiB including the gradient of the hidden states, from docs/benchmarks.md."""
    shape = {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 1}
    student = llama_arguments(1, 2048, 8192, 32, 8, True, padded_vocab_size=128256, **shape)
    teacher = llama_arguments(1, 4096, 14336, 32, 8, False, padded_vocab_size=151936, **shape)
    kd = KDConfig(teacher_hf=["T"], ratio=0.5, xtoken_loss=loss, loss_impl=impl, loss_chunk_rows=rows)
    seen = logit_bytes(student, [teacher], kd, on_gpu=True) + 2 * 4096 * 2048
    assert seen / GIB == pytest.approx(measured, rel=0.08)


def test_a_layer_by_hand():
    """Width 1024, 16 heads of 64, 4 groups, feed-forward 2816; Korthikanti et al. for the kept tensors."""
    args = llama_arguments(8, 1024, 2816, 16, 4, True, seq_length=512, micro_batch_size=2)
    inputs = 4 * 1024  # inputs of both parts, before and after normalization
    elements = inputs + (1024 + 256 + 256 + 1024) + 3 * 2816  # q, k, v, output; gate and up, and their product
    statistics = 4 * 16
    assert layer_bytes(args, 0, on_gpu=True).kept == 2 * 512 * (2 * elements + statistics)
    args.hidden_dropout = 0.1
    assert layer_bytes(args, 0, on_gpu=True).kept == 2 * 512 * (2 * elements + statistics + 2 * 1024)
    args.hidden_dropout, args.tensor_model_parallel_size = 0.0, 2
    assert layer_bytes(args, 0, on_gpu=True).kept == 512 * (2 * (elements + inputs) + statistics)
    args.sequence_parallel = True
    assert layer_bytes(args, 0, on_gpu=True).kept == 512 * (2 * elements + statistics)
    args.context_parallel_size = 4
    assert layer_bytes(args, 0, on_gpu=True).kept == 128 * (2 * elements + statistics)


def test_recomputation():
    shape = {"seq_length": 512, "micro_batch_size": 2, "transformer_impl": "transformer_engine"}
    args = llama_arguments(8, 1024, 2816, 16, 4, True, **shape)
    layer, layer_input = layer_bytes(args, 0, on_gpu=True).kept, 2 * 512 * 2 * 1024
    assert kept_by_layers(args, range(8), on_gpu=True) == 8 * layer
    plain = backward_working_bytes(args, range(8), on_gpu=True)
    args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1
    assert kept_by_layers(args, range(8), on_gpu=True) == 8 * layer_input
    assert backward_working_bytes(args, range(8), on_gpu=True) == plain + layer
    args.recompute_num_layers = 3
    assert kept_by_layers(args, range(8), on_gpu=True) == 3 * layer_input
    assert backward_working_bytes(args, range(8), on_gpu=True) == plain + 3 * layer
    args.recompute_method = "block"
    assert kept_by_layers(args, range(8), on_gpu=True) == 3 * layer_input + 5 * layer
    args.recompute_granularity, args.recompute_modules = "selective", ["core_attn"]
    assert kept_by_layers(args, range(8), on_gpu=True) == 8 * layer, "a fused kernel keeps no scores"
    args.recompute_modules = ["mlp"]
    assert kept_by_layers(args, range(8), on_gpu=True) == 8 * (layer - 2 * 512 * 2 * (1024 + 3 * 2816))


def test_parts_by_hand():
    (stage,) = stages_of({"loss_chunk_rows": 100})
    hidden = 2 * 1024 * 2 * 2048
    assert stage.phases["loss"][HIDDEN] == hidden
    assert stage.phases["loss"][LOGITS] == (2 + 1) * 100 * 32000 * 2
    first, last = stages_of({"loss_chunk_rows": 100}, **{PP: 2})
    assert first.most(HIDDEN) == first.most(LOGITS) == 0
    assert last.most(HIDDEN) == 8 * hidden, "of all microbatches of a step"
    assert first.held[WEIGHTS] + 2 * 1024 == last.held[WEIGHTS], "an embedding each; the last norm"
    (tp, *_) = stages_of({"loss_chunk_rows": 100}, **{TP: 2})
    assert tp.most(LOGITS) == (2 + 2) * 100 * 16000 * 2
    assert MAPS not in stage.held
    (paired,) = stages_of({"hidden_loss": "1:2,2:4"})
    assert paired.most(HIDDEN) == 3 * hidden and paired.held[MAPS] == 2 * 1024 * 2048 * 18


def test_optimizer_is_sharded_over_data_and_context_parallel_ranks():
    whole = stages_of()[0].held
    assert whole[OPTIMIZER] == 6 * whole[WEIGHTS] and whole[GRADIENTS] == 2 * whole[WEIGHTS]
    cut = stages_of(use_distributed_optimizer=True, **{DP: 2, CP: 4})[0].held
    assert cut[OPTIMIZER] * 8 == whole[OPTIMIZER]
    small = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}
    moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    assert stages_of(**small, **moments)[0].held[OPTIMIZER] == 3 * whole[WEIGHTS]
    assert stages_of(optimizer_cpu_offload=True)[0].held.get(OPTIMIZER, 0) == 0


def test_stages_of_a_pipeline():
    args = llama_arguments(8, 64, 64, 4, 4, True, micro_batch_size=1, global_batch_size=16)
    args.pipeline_model_parallel_size = 4
    assert [chunks_of_stage(args, stage) for stage in (0, 3)] == [[range(2)], [range(6, 8)]]
    assert [in_flight(args, stage) for stage in range(4)] == [4, 3, 2, 1]
    args.virtual_pipeline_model_parallel_size = 2
    assert [chunks_of_stage(args, stage) for stage in (0, 3)] == [
        [range(1), range(4, 5)],
        [range(3, 4), range(7, 8)],
    ]
    assert [in_flight(args, stage) for stage in range(4)] == [11, 9, 7, 5]
    args.virtual_pipeline_model_parallel_size = None
    args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout = 2, "Et*3|t*5L"
    assert [chunks_of_stage(args, stage) for stage in (0, 1)] == [[range(3)], [range(3, 8)]]
    args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout = 4, None
    args.decoder_last_pipeline_num_layers = 2
    assert [chunks_of_stage(args, stage) for stage in range(4)] == [[range(2 * n, 2 * n + 2)] for n in range(4)]
    args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers = 3, 1
    assert [chunks_of_stage(args, stage) for stage in range(4)] == [
        *([range(3)], [range(3, 5)], [range(5, 7)], [range(7, 8)])
    ]
    args.global_batch_size = 1
    assert in_flight(args, 0) == 1


def test_stages_with_different_numbers_of_layers():
    """The first stage has the layers that the last one has not, times its microbatches in flight; those of the teacher
    are even."""
    (even, last_even), (first, last) = (stages_of(**{PP: 2, LAST: layers}) for layers in (None, 2))
    assert first.most(ACTIVATIONS) == even.most(ACTIVATIONS) * 6 / 4
    layer = (even.held[WEIGHTS] - 2 * 32000 * 1024) / 4
    assert first.held[WEIGHTS] == even.held[WEIGHTS] + 2 * layer
    assert last.held[WEIGHTS] == last_even.held[WEIGHTS] - 2 * layer
    assert (first.held[TEACHER], last.held[TEACHER]) == (even.held[TEACHER], last_even.held[TEACHER])


def test_fullest_stage_and_allowances():
    stages = stages_of(**{PP: 4})
    assert fullest(stages).peak == max(stage.peak for stage in stages)
    args = llama_arguments(2, 64, 64, 4, 4, True)
    assert outside_of_torch(args, 0.0) == CONTEXT_BYTES
    assert outside_of_torch(args, 100.0) == CONTEXT_BYTES + 3.0


def test_teacher_with_own_layout():
    """Teacher over eight ranks that each hold a student: the LM head is replicated, the other weights are sharded."""
    shape = {"padded_vocab_size": 32000, "seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 32}
    shape |= {"world_size": 8, DP: 8}
    student = llama_arguments(8, 1024, 2816, 16, 4, True, **shape)
    kd = KDConfig(teacher_hf=["T"], ratio=0.5)

    def stage(**sizes: Any) -> StageMemory:
        teacher = llama_arguments(16, 2048, 5632, 16, 8, False, **{**shape, **sizes})
        (found,) = estimate(Workload(student, [teacher], kd, on_gpu=True))
        return found

    alike, apart, piped = stage(), stage(**{TP: 8}, **SP), stage(**{TP: 2, PP: 4}, **SP)
    head, norms = 2 * 32000 * 2048, 2 * 33 * 2048
    rest = alike.held[TEACHER] - head - norms
    assert apart.held[TEACHER] == rest / 8 + head + norms
    layers = (rest - head) / 16
    assert piped.held[TEACHER] == 4 * layers / 2 + head / 2 + head + 2 * 8 * 2048, "the fullest has the embedding"
    assert apart.most(HIDDEN) == 2 * alike.most(HIDDEN), "of both microbatches of a step"
    assert apart.phases["loss"][LOGITS] == alike.phases["loss"][LOGITS]
    teacher = llama_arguments(2, 64, 64, 4, 4, True, **{TP: 8})
    args = llama_arguments(2, 64, 64, 4, 4, True)
    assert outside_of_torch(args, 0.0, [teacher]) == CONTEXT_BYTES + 2 * COMMUNICATOR_BYTES


def test_parallelism_reduces_the_peak():
    one = stages_of()[0]
    for changes in ({TP: 2}, {TP: 2, **SP}, {CP: 2}, {DP: 2, "use_distributed_optimizer": True}, {PP: 2}):
        assert stages_of(**changes)[0].peak < one.peak
    assert stages_of(**{TP: 2, **SP})[0].most(ACTIVATIONS) < stages_of(**{TP: 2})[0].most(ACTIVATIONS)


def test_keys_and_values_of_written_texts():
    """8 layers of 4 groups of 64 channels in bf16 take 8 KiB per token; a microbatch has 2048 tokens."""
    rollout = {"on_policy": 1.0, "prompts": "P"}
    (stage,) = stages_of(rollout)
    (elsewhere,) = stages_of(rollout | {"rollout_url": ["http://a"]})
    assert "writing" not in elsewhere.phases
    assert elsewhere.phases["export"] == {WORKING: 2 * 2 * 1024 * 32000}, "the embedding, twice"
    assert "export" not in stage.phases
    assert stage.phases["writing"][KEYS] == 2048 * 8192
    assert "writing" not in stages_of()[0].phases and stage.peak == stages_of()[0].peak
    for first in stages_of(rollout, **{PP: 2}):
        assert first.phases["writing"][KEYS] == 2 * 2048 * 4096
    (sharded,) = stages_of(rollout, **{TP: 2, **SP})
    assert sharded.phases["writing"][KEYS] == 2048 * 4096
    (bounded,) = stages_of(rollout | {"rollout_memory_gb": 0.1})
    assert bounded.phases["writing"][KEYS] == pytest.approx(0.1e9, rel=1e-3)
    (most,) = stages_of(rollout | {"rollout_memory_gb": 9.0})
    assert most.phases["writing"][KEYS] == 16 * 1024 * 8192, "all texts of a step"
    assert most.phases["writing"][WORKING] > stage.phases["writing"][WORKING]
    (largest,) = stages_of(rollout | {"rollout_memory_gb": 9.0, "rollout_steps": 4})
    assert largest.phases["writing"][WORKING] == most.phases["writing"][WORKING], "prompts are read in several passes"
    (tasks,) = stages_of({"eval_tasks": "F"})
    assert tasks.phases["writing"][KEYS] == 2048 * 8192
    (wide,) = stages_of(rollout, **{TP: 4, **SP, "micro_batch_size": 1})
    assert wide.phases["writing"][KEYS] == 4 * 1024 * 2048, "the number of texts is a multiple of 4"
    (uncached,) = stages_of(rollout, **{CP: 2})
    assert uncached.phases["writing"][KEYS] == 0


def test_optimizer_state_on_the_host_while_texts_are_written():
    """The memory of the state can hold keys and values, without a higher peak."""
    rollout = {"on_policy": 1.0, "prompts": "P", "rollout_memory_gb": 6.0, "rollout_steps": 100}
    (stayed,), (went,) = (stages_of(rollout | {"rollout_offload": away}) for away in (False, True))
    size = stayed.held[OPTIMIZER]
    assert OPTIMIZER not in went.held and OPTIMIZER not in went.phases["writing"]
    assert went.most(OPTIMIZER) == size > 1.4e9
    assert stayed.peak_phase == went.peak_phase == "writing" and stayed.peak - went.peak == pytest.approx(size)
    (more,) = stages_of(rollout | {"rollout_offload": True, "rollout_memory_gb": 6.0 + size / 1e9})
    assert more.peak == pytest.approx(stayed.peak, rel=1e-6)
    for name in stayed.phases.keys() - {"writing"}:
        assert went.phases[name] == {**stayed.phases[name], OPTIMIZER: size}


def test_top_p_sorts_the_whole_vocabulary():
    """Without it, a kernel samples on a GPU and keeps nothing but the logits."""
    rollout = {"on_policy": 1.0, "prompts": "P", "rollout_tokens": 2}
    texts = 4 * 1024 // 2

    def working(on_gpu: bool, **options: float) -> float:
        return stages_of(rollout | options, on_gpu, **{TP: 4, **SP})[0].phases["writing"][WORKING]

    assert working(True) == working(True, rollout_temperature=0.0) == texts * 8000 * 8
    assert working(False) == texts * 8000 * 44
    assert working(False, rollout_temperature=0.0) < working(False)
    for on_gpu in (True, False):
        assert working(on_gpu, rollout_top_p=0.9) == texts * (8000 * 12 + 32000 * 48), "before it samples"
