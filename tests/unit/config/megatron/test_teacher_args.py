"""Megatron's arguments of a teacher."""

import itertools
from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.config import flags
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.teacher_args import teacher_arguments
from mkd.errors import MkdConfigError
from mkd.models.gpt import gpt_config
from tests.support.hf_folders import LLAMA3_ROPE, make_llama

ROPE = {**LLAMA3_ROPE, "rope_theta": 5000.0}

TEACHER = {"rope_parameters": ROPE, "tie_word_embeddings": True, "rms_norm_eps": 3e-4, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The architecture of a teacher that differs from Megatron's defaults in every value."""
    folder = make_llama(tmp_path_factory.mktemp("teacher"), **TEACHER)
    return read_architecture(HFFolder(folder, "--kd-teacher-hf"))[1]


def student(odd: bool) -> Namespace:
    """A student's arguments. If `odd`, everything that is not the layout's or the machine's has a strange value."""
    args = flags.default_arguments()
    if odd:
        numbers = itertools.count(7)
        for name, value in vars(args).items():
            kinds = {bool: not value, int: next(numbers), float: next(numbers) + 0.5}
            if name not in names_with(ArgRole.SHARED):
                setattr(args, name, kinds.get(type(value), "odd"))
    on_cpu = {"transformer_impl": "local", "use_cpu_initialization": True, "apply_rope_fusion": False}
    vars(args).update(on_cpu, rank=0, world_size=1, seq_length=32, padded_vocab_size=256, params_dtype=torch.float32)
    vars(args).update(bias_swiglu_fusion=False, gradient_accumulation_fusion=False, no_persist_layer_norm=True)
    return args


def test_nothing_of_the_student_leaks_into_the_teacher(architecture):
    assert not set(architecture) & set(names_with(ArgRole.SHARED))
    plain = teacher_arguments(architecture, student(odd=False), None)
    odd = teacher_arguments(architecture, student(odd=True), None)
    assert vars(odd) == vars(plain)
    assert vars(student(odd=True)) != vars(student(odd=False))
    a, b = gpt_config(plain), gpt_config(odd)
    assert {**vars(a), "transformer": None} == {**vars(b), "transformer": None}
    different = {
        name
        for name, value in vars(a.transformer).items()
        if value != getattr(b.transformer, name) and not callable(value)
    }
    assert different == set()


def test_the_teacher_is_what_its_config_json_says(architecture):
    config = gpt_config(teacher_arguments(architecture, student(odd=True), "bf16"))
    t = config.transformer
    assert (t.num_layers, t.hidden_size, t.ffn_hidden_size) == (3, 48, 72)
    assert (t.num_attention_heads, t.num_query_groups, t.kv_channels) == (6, 2, 16)
    assert (t.normalization, t.layernorm_epsilon, t.add_bias_linear, t.gated_linear_unit) == (
        "RMSNorm",
        3e-4,
        False,
        True,
    )
    assert (config.rotary_base, config.rope_scaling, config.rope_scaling_factor) == (5000, True, 32.0)
    assert config.share_embeddings_and_output_weights
    assert config.position_embedding_type == "rope"
    assert (t.hidden_dropout, t.attention_dropout, t.bf16, t.params_dtype) == (0.0, 0.0, True, torch.bfloat16)
    assert t.virtual_pipeline_model_parallel_size is None and t.fp8 is None


@pytest.mark.parametrize(
    "dtype, expected",
    [
        *((None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)),
        ("fp8", torch.bfloat16),
    ],
)
def test_dtype_of_the_teacher(architecture, dtype, expected):
    args = teacher_arguments(architecture, student(odd=False), dtype)
    assert args.params_dtype == expected
    assert args.fp8_param_gather == bool(args.fp8) == (dtype == "fp8")
    assert (args.bf16, args.fp16) == (expected == torch.bfloat16, expected == torch.float16)


def test_sequences_may_be_as_long_as_the_teacher_knows_positions(architecture):
    args = student(odd=False)
    args.seq_length = 96
    assert teacher_arguments(architecture, args, None).seq_length == 96
    args.seq_length = 97
    with pytest.raises(MkdConfigError, match="--seq-length 97 is longer than the teacher's 96 positions"):
        teacher_arguments(architecture, args, None)
    assert teacher_arguments(architecture, args, None, is_packed=True).seq_length == 97
    table = {**architecture, "position_embedding_type": "learned_absolute"}
    with pytest.raises(MkdConfigError, match="the teacher's 96 positions"):
        teacher_arguments(table, args, None, is_packed=True)


def test_no_code_that_a_checkpoint_names(architecture):
    with pytest.raises(MkdConfigError, match="imports none that a checkpoint names"):
        teacher_arguments({**architecture, "spec": ["os", "path"]}, student(odd=False), None)


def test_a_dense_teacher_ignores_the_students_expert_parallelism(architecture):
    args = student(odd=False)
    args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.num_experts = 2, 1, 4
    teacher = teacher_arguments(architecture, args, None)
    assert (teacher.num_experts, teacher.expert_model_parallel_size) == (None, 1)


def test_a_checkpoint_of_another_layout_is_a_teacher_in_this_one(architecture):
    """Megatron stores into how many parts the job that wrote it cut each weight."""
    stored = {"tensor_parallel_num_weight_shards": 1, "expert_tensor_parallel_num_weight_shards": 1}
    args = student(odd=False)
    args.tensor_model_parallel_size = 2
    config = gpt_config(teacher_arguments({**architecture, **stored}, args, None))
    assert config.transformer.tensor_model_parallel_size == 2
