"""Steps whose answers the student writes: against transformers' models in float64, and in every layout.

Without `-m slow`, each layout writes either half of the answers or all of them; `-m slow` runs both shares.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.models import GPTModelBuilder
from torch import Tensor
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.config.kd_config import Divergence, KDConfig
from mkd.config.loss_spec import LossSpec
from mkd.data.packing.row_layout import RowLayout
from mkd.distributed.groups import Groups
from mkd.losses.reference.dense import DIVERGENCES
from mkd.models.gpt import gpt_config
from mkd.rollout.interface import Decoding
from mkd.rollout.on_policy import OnPolicy
from mkd.teacher.online import OnlineTeacher
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from tests.dist.test_layouts import combine
from tests.support.dist.gpt_models import build_from_arguments, config_from_arguments
from tests.support.dist.kd_samples import ROW, ROWS, VOCAB
from tests.support.dist.kd_step import Layout, Models, kd_step, parallel_state
from tests.support.hf_folders import make_llama
from tests.support.tolerance import FP32, GRADIENT, STEP_LOSS, assert_close_norm

PROMPTS = ((5, 9, 77), (1,), tuple(range(40, 50)), (30, 2), (8, 8, 8, 8))


def on_policy(share: float, **changes: Any) -> OnPolicy:
    options: dict[str, Any] = dict(
        tokens=9, end_tokens=frozenset(range(20)), true_vocab=VOCAB, rows=2, longest=ROW, temperature=1.0, seed=3
    )
    layout = RowLayout(ROW, 8, is_packed=False, kd_everywhere=False)
    return OnPolicy(share, PROMPTS, layout, Decoding(**{**options, **changes}), "cached")


LAYOUTS = {
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "pp2": (2, Layout(pp=2)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout()),
    "tp2 sp pp2 vp2": (4, Layout(tp=2, pp=2, vp=2, sp=True)),
}


@pytest.fixture(scope="module")
def one_rank(gloo_pool) -> dict[float, tuple[dict[str, float], dict[str, Tensor]]]:
    """Share -> losses and gradients."""
    return {share: combine(gloo_pool(1).run(kd_step, Layout(), Models(), on_policy(share))) for share in (0.5, 1.0)}


def compare(found: tuple, expected: tuple) -> None:
    losses, gradients = expected
    assert found[0].keys() == losses.keys()
    for name, value in losses.items():
        assert found[0][name] == pytest.approx(value, rel=STEP_LOSS), name
    for key, value in gradients.items():
        assert value.norm() > 0, key
        assert_close_norm(found[1][key], value, GRADIENT, key)


QUICK = {0.5: ["tp2 sp", "dp2", "tp2 sp pp2 vp2"], 1.0: ["pp2", "cp2"]}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=() if name in quick else pytest.mark.slow)
        for share, quick in QUICK.items()
        for name in LAYOUTS
    ],
)
def test_every_layout_trains_on_the_same_texts(gloo_pool, one_rank, name: str, share: float) -> None:
    ranks, own = LAYOUTS[name]
    multiple = 2 * own.cp if own.cp > 1 else own.tp
    policy = on_policy(share, length_multiple=multiple)
    if own.cp > 1:
        policy = replace(policy, engine="uncached")
    compare(combine(gloo_pool(ranks).run(kd_step, own, Models(), policy)), one_rank[share])


def test_experts(gloo_pool) -> None:
    models = Models(moe=True)
    expected = combine(gloo_pool(1).run(kd_step, Layout(), models, on_policy(1.0)))
    compare(combine(gloo_pool(2).run(kd_step, Layout(ep=2), models, on_policy(1.0))), expected)


def test_the_share_and_the_seed_change_the_step(gloo_pool, one_rank) -> None:
    """The same step twice is bit-equal."""
    given = combine(gloo_pool(1).run(kd_step, Layout(), Models()))
    again = combine(gloo_pool(1).run(kd_step, Layout(), Models(), on_policy(0.5)))
    other = combine(gloo_pool(1).run(kd_step, Layout(), Models(), on_policy(0.5, seed=4)))
    assert again[0] == one_rank[0.5][0]
    assert all(torch.equal(again[1][key], value) for key, value in one_rank[0.5][1].items())
    assert len({losses["kd"] for losses, _ in (given, again, other, one_rank[1.0])}) == 4


FOLDER_VOCAB = 131


def oracle(
    folders: list[Path], texts: list[tuple[tuple[int, ...], tuple[int, ...]]], spec: LossSpec, into: Path
) -> float:
    """Loss of a step on written texts, in float64; the gradients are saved as weights of a folder like the student's."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in folders
    )
    values = []
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]])
        positions = slice(len(prompt) - 1, ids.shape[1] - 1)
        z, u = student(ids).logits[0, positions], teacher(ids).logits[0, positions].detach()
        values.append(DIVERGENCES[spec.divergence](z, u, spec))
    loss = torch.cat(values).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.grad)
    student.float().save_pretrained(into)
    return loss.item()


def step_of_folders(rank: int, world_size: int, folders: list[Path], kind: Divergence) -> tuple[list, dict, dict]:
    """Texts, loss and gradients of a step at R = 1 and L = 1."""
    with parallel_state(Layout()):
        groups = Groups.from_megatron()
        sources = [HFFolder(folder, "--hf") for folder in folders]
        chunks = student_of(sources[0], groups)
        policy = on_policy(1.0, true_vocab=FOLDER_VOCAB)
        kd = KDConfig(teacher_hf=["T"], ratio=1.0, loss=kind, on_policy=1.0, prompts="P")
        teacher = OnlineTeacher(
            config_of(sources[1]), groups, load_weights=partial(load_hf_weights, folder=sources[1]), fingerprint=""
        )
        schedule = TeacherThenStudent(kd, groups, teacher, FOLDER_VOCAB, lambda: 0, on_policy=policy)
        given = {name: torch.zeros(2, ROW, dtype=torch.long) for name in ("tokens", "labels")}
        given |= {"loss_mask": torch.ones(2, ROW), "position_ids": torch.arange(ROW).expand(2, ROW)}
        reports = schedule.around(get_forward_backward_func(pp_size=1, vp_size=None))(
            forward_step_func=ForwardStep(LossContext(groups, FOLDER_VOCAB)),
            data_iterator=iter([given] * (ROWS // 2)),
            model=chunks,
            num_microbatches=ROWS // 2,
            seq_length=ROW,
            micro_batch_size=2,
            forward_only=False,
        )
        written = policy.write(student_of(sources[0], groups), groups, 0, ROWS // 2, 2).rows
        texts = [(request.prompt, text.tokens) for request, text in written.values()]
        total, count = sum(report["loss"].double() for report in reports).tolist()
        assert count == sum(len(new) for _, new in texts)
        gradients = {name: p.main_grad for name, p in unwrap_model(chunks[0]).named_parameters()}
        return texts, {"loss": total / count}, gradients


def config_of(source: HFFolder) -> Any:
    config = config_from_arguments(read_architecture(source)[1])
    config.transformer.calculate_per_token_loss = True
    return config


def student_of(source: HFFolder, groups: Groups) -> list:
    chunks = GPTModelBuilder(config_of(source)).build_distributed_models(
        pg_collection=groups.collection,
        ddp_config=DistributedDataParallelConfig(),
        data_parallel_random_init=False,
    )
    load_hf_weights([unwrap_model(chunk) for chunk in chunks], source)
    for chunk in chunks:
        chunk.zero_grad_buffer()
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    return chunks


def weights_of(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Parameters of a folder under Megatron's names."""
    with parallel_state(Layout()):
        source = HFFolder(folder, "--hf")
        chunks = build_from_arguments(read_architecture(source)[1])
        load_hf_weights(chunks, source)
        return {name: p.detach() for name, p in chunks[0].named_parameters()}


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd", "forward_kl"])
def test_a_step_is_that_of_the_definition(gloo_pool, tmp_path: Path, kind: Divergence) -> None:
    """Loss and every gradient of a step whose texts are all the student's."""
    sizes = {"num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    folders = [
        make_llama(tmp_path / "student", **sizes),
        make_llama(tmp_path / "teacher", hidden_size=60, intermediate_size=80, **sizes),
    ]
    ((texts, found, gradients),) = gloo_pool(1).run(step_of_folders, folders, kind)
    assert len({len(new) for _, new in texts}) > 1 and len(texts) == ROWS
    loss = oracle(folders, texts, LossSpec(divergence=kind), tmp_path / "gradients")
    assert found["loss"] == pytest.approx(loss, rel=FP32)
    (expected,) = gloo_pool(1).run(weights_of, tmp_path / "gradients")
    assert expected.keys() == gradients.keys()
    for name, value in expected.items():
        assert_close_norm(gradients[name], value, GRADIENT, name)
