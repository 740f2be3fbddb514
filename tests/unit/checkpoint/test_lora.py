"""The linear layers of a Hugging Face model that have adapters, and their positions in Megatron's layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkd import cpu
from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.adapters.stored import StoredAdapters
from mkd.checkpoint.hf.families import FAMILIES, family_by_name
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.kd_config import KDConfig
from mkd.config.lora import LoraOptions
from mkd.config.megatron.checks.adapters import check_latent_adapters, check_lora_arguments, check_query_groups
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.models.adapted_layers import AdaptedLinear, RowPart
from tests.support.hf_models import HYBRID_MODELS, LATENT_SIZES, MIXER_MODELS

CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def linears_of(text: str, modules: list[str] | None = None, name: str = "LlamaForCausalLM", **keys: Any) -> Any:
    family = family_by_name(name)
    return adapted_linears(family, family.megatron_args({**CONFIG, **keys}), LoraOptions.parse(text, modules))


def test_queries_keys_and_values_share_a_matrix() -> None:
    linears = {(linear.decoder_layer, linear.path): linear for linear in linears_of("4")}
    assert len(linears) == 8
    layer = "model.layers.1.self_attn."
    parts = (RowPart(96, f"{layer}q_proj"), RowPart(32, f"{layer}k_proj"), RowPart(32, f"{layer}v_proj"))
    assert linears[1, "self_attention.linear_qkv"] == AdaptedLinear(1, "self_attention.linear_qkv", 48, parts, groups=2)
    down = linears[0, "mlp.linear_fc2"]
    assert down.is_row_parallel and down.inputs == 72
    assert [factor.shape(4) for factor in down.factors] == [(4, 72), (48, 4)]


def test_some_modules() -> None:
    linears = linears_of("4", ["q_proj", "self_attn.v_proj"])
    assert [linear.path for linear in linears] == ["self_attention.linear_qkv"] * 2
    assert [part.layer is None for part in linears[0].parts] == [False, True, False]
    assert [factor.name for factor in linears[0].factors] == ["A0", "B0", "A1", "B2"]


def test_one_hugging_face_layer_with_several_parts() -> None:
    linear = linears_of("4", ["qkv_proj"], "Phi3ForCausalLM", original_max_position_embeddings=64)[0]
    layer = "model.layers.0.self_attn.qkv_proj"
    assert [(factor.key, factor.first) for factor in linear.factors] == [
        (f"{layer}.lora_A", 0),
        (f"{layer}.lora_B.0", 0),
        (f"{layer}.lora_B.1", 96),
        (f"{layer}.lora_B.2", 128),
    ]


def test_routed_experts_and_routers_have_none() -> None:
    linears = linears_of("4", None, "Qwen2MoeForCausalLM", **EXPERTS)
    paths = {linear.path for linear in linears}
    shared = "mlp.shared_experts.linear_fc"
    assert paths == {"self_attention.linear_qkv", "self_attention.linear_proj", f"{shared}1", f"{shared}2"}


def test_every_family_has_adapters() -> None:
    for family in FAMILIES:
        paths = {entry.megatron.partition("{layer}.")[2] for entry in family.table}
        assert "self_attention.linear_proj.weight" in paths, family.model_type
        has_latent = bool(family.fixed.get("multi_latent_attention"))
        assert ("self_attention.linear_qkv.weight" in paths) != has_latent, family.model_type


def parts_of(linears: Any) -> dict[str, list[tuple[int, str, int]]]:
    """Path -> channels, name and blocks of each part, of the first layers that have one."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    for linear in linears:
        parts = [(part.channels, part.layer.rpartition(".")[2], part.blocks) for part in linear.parts]
        found.setdefault(linear.path, parts)
    return found


def test_latent_attention() -> None:
    linears = linears_of("4", None, "YoutuForCausalLM", **LATENT_SIZES)
    found = parts_of(linears)
    assert len(linears) == 2 * len(found)
    assert found["self_attention.linear_proj"] == [(48, "o_proj", 1)] and linears[8].inputs == 6 * 14
    assert found["self_attention.linear_q_down_proj"] == [(20, "q_a_proj", 1)]
    assert found["self_attention.linear_q_up_proj"] == [(6 * 18, "q_b_proj", 1)]
    assert found["self_attention.linear_kv_down_proj"] == [(12 + 8, "kv_a_proj_with_mqa", 1)]
    assert found["self_attention.linear_kv_up_proj"] == [(6 * 24, "kv_b_proj", 1)]


def test_hybrid_models() -> None:
    """Heads of gated queries, and of the keys of Qwen3-Next's delta nets, are blocks with rows of several parts."""
    hybrid = {key: value for key, value in HYBRID_MODELS["qwen3.5"].items() if key != "model_type"}
    found = parts_of(linears_of("4", None, "Qwen3_5ForCausalLM", **hybrid))
    assert found["self_attention.linear_qkv"] == [
        *[(96, "q_proj", 6), (96, "q_proj", 6)],
        *[(32, "k_proj", 1), (32, "v_proj", 1)],
    ]
    qkv = [(channels, "in_proj_qkv", 1) for channels in (16, 16, 48)]
    others = [(48, "in_proj_z", 1), (4, "in_proj_b", 1), (4, "in_proj_a", 1)]
    assert found["self_attention.in_proj"] == [*qkv, *others]
    assert found["self_attention.out_proj"] == [(48, "out_proj", 1)]
    joined = parts_of(linears_of("4", None, "Qwen3NextForCausalLM", **hybrid, **EXPERTS))["self_attention.in_proj"]
    assert joined == [*[(size, "in_proj_qkvz", 2) for size in (16, 16, 48, 48)], *[(4, "in_proj_ba", 2)] * 2]
    linear = linears_of("4", ["q_proj"], "Qwen3_5ForCausalLM", **hybrid)[0]
    assert [(factor.key.rpartition("q_proj.")[2], factor.first) for factor in linear.factors] == [
        *[("lora_A", 0), ("lora_B.blocks6.0", 0), ("lora_B.blocks6.1", 16)]
    ]
    rows = torch.arange(192).view(192, 1)
    queries, gates = (factor.of(rows).view(-1) for factor in linear.factors[1:])
    assert queries[:17].tolist() == [*range(16), 32] and gates[:17].tolist() == [*range(16, 32), 48]


NAMES = ["experts.gate_up_proj", "mlp.experts.down_proj"]


def test_routed_experts() -> None:
    up, down = linears_of("4", NAMES, "Qwen2MoeForCausalLM", **EXPERTS)[::2]
    experts = "model.layers.0.mlp.experts"
    parts = (RowPart(24, f"{experts}.gate_up_proj"),) * 2
    assert up == AdaptedLinear(0, "mlp.experts.linear_fc1", 48, parts, experts=4)
    parts = (RowPart(48, f"{experts}.down_proj"),)
    assert down == AdaptedLinear(0, "mlp.experts.linear_fc2", 24, parts, is_row_parallel=True, experts=4)
    assert [factor.shape(4) for factor in up.factors] == [(4, 4, 48), (4, 24, 4), (4, 24, 4)]
    both = linears_of("4", ["all-linear", *NAMES], "Qwen2MoeForCausalLM", **EXPERTS)
    assert len(both) == len(linears_of("4", None, "Qwen2MoeForCausalLM", **EXPERTS)) + 4
    assert both[-1].parameters(4) == 4 * 4 * (24 + 48)


def test_names_of_experts_are_those_of_transformers() -> None:
    experts = {**EXPERTS, "num_local_experts": 4}
    linears = linears_of("4", NAMES[:1], "MixtralForCausalLM", **experts)
    assert linears[0].layers == ("model.layers.0.mlp.experts.gate_up_proj",)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    linear = linears_of("4", NAMES[:1], "GptOssForCausalLM", rope_parameters=rope, **experts)[0]
    assert [factor.key.partition("lora_B.")[2] for factor in linear.factors[1:]] == ["blocks72.0", "blocks72.1"]
    rows = torch.arange(4 * 144).view(4, 144, 1)
    gate, up = (factor.of(rows) for factor in linear.factors[1:])
    assert torch.equal(gate[1, :, 0], 144 + torch.arange(0, 144, 2)) and up[3, 5, 0] == 3 * 144 + 11


def linears_of_mixers(name: str, modules: list[str] | None) -> Any:
    mixers = {key: value for key, value in MIXER_MODELS[name].items() if key != "model_type"}
    keys = {**mixers, "num_hidden_layers": 4, "tie_word_embeddings": False}
    return linears_of("4", modules, "NemotronHForCausalLM", **keys)


def test_layers_with_one_mixer() -> None:
    """All linear layers except those that PEFT refuses; experts have no gate."""
    linears = linears_of_mixers("nemotron-h", None)
    found = parts_of(linears)
    projected = [(size, "in_proj", 1) for size in (40, 40, 12, 12, 4)]
    assert found == {
        "self_attention.in_proj": projected,
        "self_attention.linear_qkv": [(96, "q_proj", 1), (32, "k_proj", 1), (32, "v_proj", 1)],
        "self_attention.linear_proj": [(48, "o_proj", 1)],
        "mlp.linear_fc1": [(72, "up_proj", 1)],
        "mlp.linear_fc2": [(48, "down_proj", 1)],
    }
    names = {layer for linear in linears for layer in linear.layers}
    assert {"backbone.layers.3.mixer.in_proj", "backbone.layers.2.mixer.q_proj"} <= names
    up, down = linears_of_mixers("nemotron 3 nano", ["experts.up_proj", "mixer.experts.down_proj"])[::2]
    experts = "backbone.layers.1.mixer.experts"
    parts = (RowPart(24, f"{experts}.up_proj"),)
    assert up == AdaptedLinear(1, "mlp.experts.linear_fc1", 48, parts, experts=4)
    assert down.layers == (f"{experts}.down_proj",) and [linear.inputs for linear in (up, down)] == [48, 24]


@pytest.mark.parametrize("name", ["out_proj", "mixer.out_proj"])
def test_projections_out_of_mamba_layers(name: str) -> None:
    with pytest.raises(MkdConfigError, match=rf"--kd-lora-modules {name}: PEFT refuses it in models .*; give some of"):
        linears_of_mixers("nemotron-h", [name])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelled": (dict(text="4", modules=["q_prj"]), r"no such linear layer \(did you mean q_proj\?\); give some of"),
    "unknown": (dict(text="4", modules=["xyz"]), "no such linear layer; give some of down_proj, gate_proj, k_proj"),
    "LM head": (dict(text="4", modules=["lm_head"]), "the LM head has no adapter"),
    "embedding": (dict(text="4", modules=["embed_tokens"]), "the embedding has no adapter"),
    "rank": (dict(text="33", modules=None), "k_proj is 32 x 48, so that a rank above 32 adds nothing"),
    "routed experts": (
        dict(text="4", modules=["down_proj"], name="Qwen3MoeForCausalLM", **EXPERTS),
        r"only routed experts have layers of this name; .* parameters, experts\.down_proj and experts\.gate_up_proj",
    ),
    "experts of a dense model": (dict(text="4", modules=["experts.down_proj"]), "no such linear layer"),
    "unknown parameter of experts": (
        dict(text="4", modules=["experts.up_proj"], name="Qwen3MoeForCausalLM", **EXPERTS),
        r"no such linear layer \(did you mean experts",
    ),
    "form": (dict(text="a", modules=None), "--kd-lora is 'a'; give RANK or RANK:ALPHA"),
    "rank 0": (dict(text="0", modules=None), "the rank is 0"),
    "alpha": (dict(text="4:0", modules=None), "alpha is 0; it must be above 0"),
    "not a number": (dict(text="4:1e", modules=None), "'1e' is not a number"),
    "all and one": (dict(text="4", modules=["all-linear", "q_proj"]), "all-linear stands alone"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MkdConfigError, match=message):
        linears_of(**values)


def test_options() -> None:
    assert LoraOptions.parse("16", ["all-linear"]) == LoraOptions(16, 16.0)
    assert LoraOptions.parse("16:8", ["q_proj", "q_proj"]) == LoraOptions(16, 8.0, ("q_proj",))
    assert LoraOptions.parse("16:8", None).scale == 0.5


def test_flags_that_do_not_fit() -> None:
    common = dict(teacher_hf=["T"], ratio=0.5)
    for values, message in (
        (dict(lora_modules=["q_proj"]), "there are no adapters: give --kd-lora"),
        (dict(lora="4"), "give the student's Hugging Face folder in --kd-student-hf"),
    ):
        with pytest.raises(MkdConfigError, match=message):
            KDConfig(**common, **values)
    args, options = SimpleNamespace(ckpt_format="torch_dist"), LoraOptions(4, 4.0)
    check_lora_arguments(args, options)
    for name, value in {"fp8": "hybrid", "tp_comm_overlap": True, "finetune": True}.items():
        with pytest.raises(MkdConfigError, match=f"--{name.split('_')[0]}"):
            check_lora_arguments(SimpleNamespace(**vars(args), **{name: value}), options)
    sizes = SimpleNamespace(group_query_attention=True, num_query_groups=2, tensor_model_parallel_size=4)
    with pytest.raises(MkdConfigError, match="does not divide the student's 2 key-value heads"):
        check_query_groups(sizes, options)


def test_projection_to_a_latent_that_every_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    options, args = LoraOptions(4, 4.0), {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    latent = ["kv_a_proj_with_mqa", "o_proj"]
    check_latent_adapters(SimpleNamespace(**args), options, ["kv_b_proj"])
    check_latent_adapters(SimpleNamespace(**{**args, "sequence_parallel": True}), options, latent)
    check_latent_adapters(SimpleNamespace(**{**args, "tensor_model_parallel_size": 1}), options, latent)
    with pytest.raises(MkdConfigError, match=r"adapters of kv_a_proj_with_mqa, .* without --sequence-parallel: add it"):
        check_latent_adapters(SimpleNamespace(**args), options, latent)


def test_checkpoint_without_options() -> None:
    folder = object.__new__(MegatronFolder)
    vars(folder).update(
        args=SimpleNamespace(kd_lora=None), path="F", flag="--load", iteration_dir=SimpleNamespace(name="i")
    )
    with pytest.raises(MkdCheckpointError, match="records no adapters"):
        _ = StoredAdapters(folder).options
