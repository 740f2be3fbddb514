"""Requirements of a teacher in FP8."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.fp8_teacher import check_fp8_teacher
from mkd.errors import MkdConfigError

LLAMA_8B = dict(
    num_attention_heads=32,
    kv_channels=128,
    group_query_attention=True,
    num_query_groups=8,
    sequence_parallel=False,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_experts=None,
    multi_latent_attention=False,
    experimental_attention_variant=None,
    seq_length=4096,
    tensor_model_parallel_size=2,
    context_parallel_size=2,
    transformer_impl="transformer_engine",
)

NEMOTRON_8B = dict(
    layer_mixers=["M", "-", "*"],
    ffn_hidden_size=21504,
    mamba_num_heads=128,
    mamba_head_dim=64,
    mamba_num_groups=8,
    mamba_state_dim=128,
)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of compute capability 9.0."""
    monkeypatch.setattr("mkd.cpu.is_target", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def check(sizes: dict[str, Any], micro_batch_size: int = 1, **flags: Any) -> None:
    source = {"teacher_hf": ["T"]} if "teacher_load" not in flags else {}
    kd = KDConfig(**source, ratio=0.5, teacher_dtype="fp8", **flags)
    check_fp8_teacher(Namespace(**{**LLAMA_8B, **sizes}), micro_batch_size, kd)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"context_parallel_size": 512},
        {"tensor_model_parallel_size": 8, "sequence_parallel": True},
        NEMOTRON_8B,
        {**NEMOTRON_8B, "layer_mixers": ["-", "*"], "mamba_num_heads": 1},
        {**NEMOTRON_8B, "layer_mixers": ["M"], "ffn_hidden_size": 3, "kv_channels": 5},
    ],
    ids=str,
)
def test_what_fits(sizes: dict[str, Any]) -> None:
    check(sizes)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("sizes", "flags", "words"),
    [
        ({"transformer_impl": "local"}, {}, "--transformer-impl is local"),
        ({}, {"teacher_load": "T"}, "--kd-teacher-load cannot fill FP8 weights"),
        ({}, {"teacher_offload": True}, "leave --kd-teacher-offload out"),
        ({"num_experts": 8}, {}, "its experts receive any number of tokens"),
        ({"multi_latent_attention": True}, {}, "latent attention"),
        ({"experimental_attention_variant": "gated_delta_net"}, {}, "gated_delta_net is untested in FP8"),
        ({**NEMOTRON_8B, "num_experts": 8}, {}, "its experts receive any number of tokens"),
        ({**NEMOTRON_8B, "mamba_num_heads": 120}, {}, "the teacher has 4096, 10752, 2048, 1024, 3840, 8764 on"),
        (
            {**NEMOTRON_8B, "layer_mixers": ["M"], "ffn_hidden_size": 3, "mamba_state_dim": 127},
            {},
            "4096, 4096, 9272 on",
        ),
        ({}, {"variable_seq_lengths": True}, "leave --kd-variable-seq-lengths out"),
        ({"seq_length": 4104}, {"micro_batch_size": 3}, "--micro-batch-size 3 x 4104 of a row / 2 ranks"),
        ({"seq_length": 4112, "sequence_parallel": True}, {}, "--micro-batch-size 1 x 4112 of a row / 4 ranks"),
        ({"num_query_groups": 9, "kv_channels": 12}, {}, "has 4096, 7168, 192, 108 on a tensor-parallel rank"),
        ({"hidden_size": 4104}, {}, "the teacher has 4104, 7168, 2048, 1024 on a tensor-parallel rank"),
        ({"ffn_hidden_size": 14344}, {}, "the teacher has 4096, 7172, 2048, 1024 on a tensor-parallel rank"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_does_not(sizes: dict[str, Any], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(MkdConfigError, match="--kd-teacher-dtype is fp8, but") as error:
        check(sizes, **flags)
    assert words in str(error.value)


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(MkdConfigError, match=r"compute capability \(8, 0\), below \(8, 9\)"):
        check({})


def test_a_cpu() -> None:
    with pytest.raises(MkdConfigError, match="there is no FP8 on a CPU"):
        check({})
