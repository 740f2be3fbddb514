"""Steps whose answers the student writes: against transformers' models in float64, and in every layout.

Without `-m slow`, each layout but TP 2 x PP 2 writes either half of the answers or all of them; `-m slow` runs both
shares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.models import GPTModelBuilder
from torch import Tensor
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.config.kd_config import KDConfig
from mkd.config.loss_spec import Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.data.packing.row_layout import RowLayout
from mkd.distributed.groups import Groups
from mkd.losses.reference.dense import DIVERGENCES
from mkd.rollout.interface import Decoding
from mkd.rollout.on_policy import OnPolicy
from mkd.rollout.rows import WrittenRowOptions
from mkd.rollout.step_rows import StepRows
from mkd.teacher.ensemble import TeacherEnsemble
from mkd.teacher.online import OnlineTeacher
from mkd.train.hidden_layers import HiddenLayers
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


END_TOKENS = frozenset(range(20))


class PackedRows(RowLayout):
    """Rows like those of `kd_samples`, which have eight segment bounds each."""

    def row(self, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        row = super().row(texts)
        del row["max_seqlen"]
        return row | {name: np.pad(row[name], (0, 8 - len(row[name])), "edge") for name in row if "cu_" in name}


def on_policy(
    share: float,
    packed: bool = False,
    teachers: Sequence[int] = (),
    options: WrittenRowOptions = WrittenRowOptions(),  # noqa: B008 (frozen)
    **changes: Any,
) -> OnPolicy:
    given: dict[str, Any] = dict(
        tokens=9, end_tokens=END_TOKENS, true_vocab=VOCAB, rows=2, longest=ROW, temperature=1.0, seed=3
    )
    kind = PackedRows if packed else RowLayout
    layout = kind(ROW, 4 if packed else 8, is_packed=packed, kd_everywhere=False)
    decoding = Decoding(**{**given, **changes})
    return OnPolicy(Schedule.constant(share), PROMPTS, layout, decoding, "cached", teachers=teachers, options=options)


LAYOUTS = {
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "pp2": (2, Layout(pp=2)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout()),
    "pp2 vp2": (2, Layout(pp=2, vp=2)),
    "tp2 pp2": (4, Layout(tp=2, pp=2)),
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


def in_layout(policy: OnPolicy, own: Layout) -> OnPolicy:
    """The policy with the options that a layout needs."""
    multiple = 2 * own.cp if own.cp > 1 else own.tp
    return replace(
        policy,
        decoding=replace(policy.decoding, length_multiple=multiple),
        engine="uncached" if own.cp > 1 else "cached",
    )


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
    policy = in_layout(on_policy(share), own)
    compare(combine(gloo_pool(ranks).run(kd_step, own, Models(), policy)), one_rank[share])


@pytest.fixture(scope="module")
def packed_on_one_rank(gloo_pool) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Losses and gradients of a step with packed rows."""
    return combine(gloo_pool(1).run(kd_step, Layout(), Models(data="packed"), on_policy(0.5, packed=True)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_packed_rows_in_every_layout(gloo_pool, packed_on_one_rank, name: str) -> None:
    ranks, own = LAYOUTS[name]
    policy = in_layout(on_policy(0.5, packed=True), own)
    found = combine(gloo_pool(ranks).run(kd_step, own, Models(data="packed"), policy))
    compare(found, packed_on_one_rank)


def test_packed_rows_have_the_loss_of_rows_with_one_text(gloo_pool, one_rank) -> None:
    """Both steps have the same texts at L = 1."""
    found = combine(gloo_pool(1).run(kd_step, Layout(), Models(data="packed"), on_policy(1.0, packed=True)))
    compare(found, one_rank[1.0])


@pytest.mark.parametrize(
    ("share", "packed"),
    [
        pytest.param(1.0, False, id="written"),
        pytest.param(0.5, False, id="half", marks=pytest.mark.slow),
        pytest.param(0.5, True, id="half packed", marks=pytest.mark.slow),
    ],
)
def test_experts(gloo_pool, share: float, packed: bool) -> None:
    models, policy = Models(moe=True, data="packed") if packed else Models(moe=True), on_policy(share, packed)
    expected = combine(gloo_pool(1).run(kd_step, Layout(), models, policy))
    compare(combine(gloo_pool(2).run(kd_step, Layout(ep=2), models, policy)), expected)


def test_the_share_and_the_seed_change_the_step(gloo_pool, one_rank) -> None:
    """The same step twice is bit-equal."""
    given = combine(gloo_pool(1).run(kd_step, Layout(), Models()))
    again = combine(gloo_pool(1).run(kd_step, Layout(), Models(), on_policy(0.5)))
    other = combine(gloo_pool(1).run(kd_step, Layout(), Models(), on_policy(0.5, seed=4)))
    assert again[0] == one_rank[0.5][0]
    assert all(torch.equal(again[1][key], value) for key, value in one_rank[0.5][1].items())
    assert len({losses["kd"] for losses, _ in (given, again, other, one_rank[1.0])}) == 4


def test_a_teacher_of_its_own(gloo_pool) -> None:
    """If all prompts name one of two teachers, the step equals that of this teacher alone."""
    options = WrittenRowOptions(is_routed=True, half_life=3.0)
    policy = on_policy(1.0, teachers=[1] * len(PROMPTS), options=options)
    both = combine(gloo_pool(1).run(kd_step, Layout(), Models(both=True), policy))
    alone = combine(gloo_pool(1).run(kd_step, Layout(), Models(salt="B"), replace(policy, teachers=())))
    assert both[0]["kd_1"] == 0.0
    names = ("loss", "kd", "kd_first_64")
    compare(({name: both[0][name] for name in names}, both[1]), ({name: alone[0][name] for name in names}, alone[1]))


def test_the_best_teacher_is_the_same_on_each_part_of_a_text(gloo_pool) -> None:
    """Under context parallelism; two prompts name their teacher."""
    policy = on_policy(0.5, teachers=[-1, 0, -1, 1, -1], options=WrittenRowOptions(is_routed=True))
    one, two = (
        combine(gloo_pool(ranks).run(kd_step, own, Models(select=True), in_layout(policy, own)))
        for ranks, own in ((1, Layout()), (2, Layout(cp=2)))
    )
    assert one[0]["selected_1"] + one[0]["selected_2"] == pytest.approx(1.0)
    compare(two, one)


def test_a_step_without_a_text_to_learn_from(gloo_pool) -> None:
    """All texts are cut off and left out: the loss and every gradient are 0."""
    policy = on_policy(1.0, options=WrittenRowOptions(drops_cut_off=True), end_tokens=frozenset())
    losses, gradients = combine(gloo_pool(1).run(kd_step, Layout(), Models(), policy))
    assert losses["loss"] == losses["kd"] == 0.0
    assert not any(value.any() for value in gradients.values())


FOLDER_VOCAB = 131


GIVEN_RATIO = 0.7
"""R of the step with given rows; without them it is 1."""
Text = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and written tokens."""


def given_rows() -> list[dict[str, Tensor]]:
    """Rows of a step with holes in their masks."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, FOLDER_VOCAB, (ROWS, ROW + 1), generator=generator)
    mask = (torch.rand(ROWS, ROW, generator=generator) < 0.6).float()
    positions = torch.arange(ROW).expand(ROWS, ROW)
    names = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}
    return [{name: value[row] for name, value in names.items()} for row in range(ROWS)]


def oracle(
    folders: list[Path],
    texts: Mapping[int, Text],
    spec: LossSpec,
    into: Path,
    names: Mapping[int, int] | None = None,
    hidden_weight: float = 0.0,
    options: WrittenRowOptions = WrittenRowOptions(),  # noqa: B008 (frozen)
) -> tuple[float, list[int]]:
    """Loss of a step in float64, and the teacher of each row; the gradients are saved as weights of a folder like the
    student's.

    Args:
        folders: student and teachers; each row has the teacher with the lowest cross-entropy.
        texts: row of the step -> what the student has written there; the other rows are `given_rows`.
        spec: the divergence.
        into: folder of the gradients.
        names: row -> the teacher that its record names.
        hidden_weight: W of the distance between the outputs of the first layers.
        options: weights of the written tokens.
    """
    student, *teachers = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in folders
    )
    kd, ce, chosen, weights = [], [], [], []
    for number, row in enumerate(given_rows()):
        if number in texts:
            prompt, new = texts[number]
            ids = torch.tensor([[*prompt, *new]])
            used = torch.arange(ids.shape[1]) >= len(prompt) - 1
            used[-1] = False  # no token follows
            labels = torch.tensor(new)
            half_life = options.half_life or torch.inf
            weights.append(0.5 ** (torch.arange(len(new), dtype=torch.float64) / half_life))
            weights[-1] *= not options.drops_cut_off or new[-1] in END_TOKENS
        else:
            ids, used = row["tokens"][None], row["loss_mask"] > 0
            labels = row["labels"][used]
            weights.append(torch.ones(len(labels), dtype=torch.float64))
        output, others = (
            student(ids, output_hidden_states=True),
            [teacher(ids, output_hidden_states=True) for teacher in teachers],
        )
        z, each = output.logits[0, used], [other.logits[0, used].detach() for other in others]
        rates = [torch.nn.functional.cross_entropy(u, labels).item() for u in each]
        chosen.append((names or {}).get(number, rates.index(min(rates))))
        kd.append(DIVERGENCES[spec.divergence](z, each[chosen[-1]], spec))
        if hidden_weight:
            ours, theirs = (one.hidden_states[1][0, used] for one in (output, others[0]))
            kd[-1] = kd[-1] + hidden_weight * (ours - theirs.detach()).square().mean(dim=-1)
        if number not in texts:
            ce.append(torch.nn.functional.cross_entropy(z, row["labels"][used], reduction="none"))
    loss = torch.cat(kd) @ torch.cat(weights) / torch.cat(weights).sum()
    if ce:
        loss = (1.0 - GIVEN_RATIO) * torch.cat(ce).mean() + GIVEN_RATIO * loss
    loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.grad)
    student.float().save_pretrained(into)
    return loss.item(), chosen


def step_of_folders(
    rank: int,
    world_size: int,
    folders: list[Path],
    kind: Divergence,
    share: float,
    names: Sequence[int] = (),
    hidden_weight: float = 0.0,
    options: WrittenRowOptions = WrittenRowOptions(),  # noqa: B008 (frozen)
) -> tuple[dict[int, Text], dict[str, list[float]], dict[str, Tensor]]:
    """Written texts by row, reports (name -> [sum, count]) and gradients of a step.

    Args:
        rank, world_size: of the pool.
        folders: student and teachers, of which each text has the best one.
        kind: of the divergence.
        share: L.
        names: the teacher that the record of each prompt names.
        hidden_weight: see `oracle`.
        options: see `oracle`.
    """
    with parallel_state(Layout()):
        groups = Groups.from_megatron()
        sources = [HFFolder(folder, "--hf") for folder in folders]
        policy = on_policy(
            share, teachers=names, options=replace(options, is_routed=bool(names)), true_vocab=FOLDER_VOCAB
        )
        ratio, several = 1.0 if share == 1.0 else GIVEN_RATIO, len(sources) > 2
        mode = "select" if several else "sum"
        given = dict(teacher_hf=["T"] * (len(sources) - 1), teachers_mode=mode, on_policy=share, prompts="P")
        given |= dict(hidden_loss="1:1", hidden_loss_weight=hidden_weight) if hidden_weight else {}
        kd = KDConfig(ratio=ratio, loss=kind, **given)
        teacher, *others = (
            OnlineTeacher.build(
                config_of(source), groups, load_weights=partial(load_hf_weights, folder=source), fingerprint=""
            )
            for source in sources[1:]
        )
        if several:
            teacher = TeacherEnsemble((teacher, *others), (1.0,) * (1 + len(others)), selecting=True)
        layers = None
        if hidden_weight:
            recorder = teacher.record_layers({1})
            layers = HiddenLayers(kd.layer_pairs, kd.hidden_loss_type, hidden_weight, groups, recorder, seed=1)
        chunks = student_of(sources[0], groups, [layers.attach] if layers else [])
        schedule = TeacherThenStudent(kd, groups, teacher, FOLDER_VOCAB, lambda: 0, layers, on_policy=policy)
        rows = given_rows()
        reports = schedule.around(get_forward_backward_func(pp_size=1, vp_size=None))(
            forward_step_func=ForwardStep(LossContext(groups, FOLDER_VOCAB)),
            data_iterator=iter([default_collate(rows[start : start + 2]) for start in range(0, ROWS, 2)]),
            model=chunks,
            num_microbatches=ROWS // 2,
            seq_length=ROW,
            micro_batch_size=2,
            forward_only=False,
        )
        written = policy.write(student_of(sources[0], groups), groups, StepRows(0, ROWS // 2, 2, groups.dp.size())).rows
        texts = {row: (request.prompt, text.tokens) for row, (request, text) in written.items()}
        sums = {name: sum(report[name].double() for report in reports).tolist() for name in reports[0]}
        given = sum(row["loss_mask"].sum() for number, row in enumerate(rows) if number not in texts)
        kept = [text for _, text in written.values() if text.ended or not options.drops_cut_off]
        assert sums["loss"][1] == (given or sum(len(text.tokens) for text in kept))
        gradients = {name: p.main_grad for name, p in unwrap_model(chunks[0]).named_parameters()}
        return texts, sums, gradients


def config_of(source: HFFolder) -> Any:
    config = config_from_arguments(read_architecture(source)[1])
    config.transformer.calculate_per_token_loss = True
    return config


def student_of(source: HFFolder, groups: Groups, hooks: Sequence[Callable] = ()) -> list:
    config = config_of(source)
    config.pre_wrap_hooks += hooks
    chunks = GPTModelBuilder(config).build_distributed_models(
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


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd", "forward_kl"])
def test_a_step_is_that_of_the_definition(gloo_pool, tmp_path: Path, kind: Divergence, share: float) -> None:
    """Loss and every gradient of a step whose texts are all the student's, or every second one."""
    folders = [make_llama(tmp_path / "student", **SIZES), make_llama(tmp_path / "teacher", **WIDE)]
    ((texts, sums, gradients),) = gloo_pool(1).run(step_of_folders, folders, kind, share)
    assert len({len(new) for _, new in texts.values()}) > 1 and len(texts) == ROWS * share
    loss, _ = oracle(folders, texts, LossSpec(divergence=kind), tmp_path / "gradients")
    assert mean(sums["loss"]) == pytest.approx(loss, rel=FP32)
    compare_gradients(gloo_pool, gradients, tmp_path / "gradients")


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_weights_of_written_tokens(gloo_pool, tmp_path: Path, share: float) -> None:
    """The divisor is the sum of the weights of given and written tokens; texts that are cut off have none."""
    folders = [make_llama(tmp_path / "student", **SIZES), make_llama(tmp_path / "teacher", **WIDE)]
    options = WrittenRowOptions(drops_cut_off=True, half_life=3.0)
    ((texts, sums, gradients),) = gloo_pool(1).run(step_of_folders, folders, "reverse_kl", share, (), 0.0, options)
    assert {new[-1] in END_TOKENS for _, new in texts.values()} == {True, False}
    spec = LossSpec(divergence="reverse_kl")
    loss, _ = oracle(folders, texts, spec, tmp_path / "gradients", options=options)
    assert mean(sums["loss"]) == pytest.approx(loss, rel=FP32)
    compare_gradients(gloo_pool, gradients, tmp_path / "gradients")


@pytest.mark.parametrize(("share", "names"), [(0.5, ()), (1.0, (-1, 0, 1, 1, -1))])
def test_each_text_has_the_teacher_that_predicts_it_best(
    gloo_pool, tmp_path: Path, share: float, names: Sequence[int]
) -> None:
    """Written texts, by the cross-entropy of what the student has written, or the teacher that the record names."""
    folders = [make_llama(tmp_path / "student", **SIZES), make_llama(tmp_path / "teacher", **WIDE)]
    folders.append(nearly_equal(folders[1], tmp_path / "other"))
    ((texts, sums, gradients),) = gloo_pool(1).run(step_of_folders, folders, "reverse_kl", share, names)
    named = {row: names[PROMPTS.index(prompt)] for row, (prompt, _) in texts.items()} if names else {}
    named = {row: number for row, number in named.items() if number >= 0}
    loss, chosen = oracle(folders, texts, LossSpec(divergence="reverse_kl"), tmp_path / "gradients", named)
    assert mean(sums["loss"]) == pytest.approx(loss, rel=FP32)
    best = [[chosen[row] for row in rows] for rows in (texts, range(ROWS))]
    assert len(set(best[0])) == 2 and bool(named) == bool(names)
    assert [sums[f"selected_{n}"] for n in (1, 2)] == [[best[1].count(n), ROWS] for n in (0, 1)]
    assert mean(sums["kd_first_64"]) > 0.0
    compare_gradients(gloo_pool, gradients, tmp_path / "gradients")


def nearly_equal(folder: Path, other: Path) -> Path:
    """A teacher that predicts some texts better than that in `folder` does, and others worse."""
    model, generator = AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape, generator=generator), alpha=0.1)
    model.save_pretrained(other)
    return other


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_pairs_of_layers(gloo_pool, tmp_path: Path, share: float) -> None:
    """The distance between hidden states counts on written tokens as the divergence does, and not while they are
    written."""
    folders = [make_llama(tmp_path / name, **own) for name, own in (("s", SIZES), ("t", {**SIZES, "head_dim": 24}))]
    ((texts, sums, gradients),) = gloo_pool(1).run(step_of_folders, folders, "reverse_kl", share, (), 0.7)
    loss, _ = oracle(folders, texts, LossSpec(divergence="reverse_kl"), tmp_path / "gradients", hidden_weight=0.7)
    assert mean(sums["loss"]) == pytest.approx(loss, rel=FP32) and mean(sums["hidden"]) > 0.0
    compare_gradients(gloo_pool, gradients, tmp_path / "gradients")


def test_pairs_of_layers_on_two_stages(gloo_pool) -> None:
    """The teacher runs first; the layers of some pairs are on different stages."""
    policy, models = on_policy(0.5), Models(hidden_loss="2:6,3:2,4:8")
    one, two = (
        combine(gloo_pool(ranks).run(kd_step, own, models, in_layout(policy, own)))
        for ranks, own in ((1, Layout()), (2, Layout(pp=2)))
    )
    compare(two, one)


SIZES = {"num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WIDE = {**SIZES, "hidden_size": 60, "intermediate_size": 80}


def mean(sums: Sequence[float]) -> float:
    total, count = sums
    return total / count


def compare_gradients(gloo_pool, gradients: Mapping[str, Tensor], folder: Path) -> None:
    (expected,) = gloo_pool(1).run(weights_of, folder)
    assert expected.keys() == gradients.keys()
    for name, value in expected.items():
        assert_close_norm(gradients[name], value, GRADIENT, name)
