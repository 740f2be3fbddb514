"""Written texts of teachers with other tokenizers: against transformers' models in float64, and in every layout.

Without `-m slow`, each layout has one kind of teachers; `-m slow` runs packed rows in all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.config.kd_config import KDConfig
from mkd.config.loss_spec import LossSpec
from mkd.config.values import XTokenLoss
from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.aligned_streams import to_tensors
from mkd.data.packing.row_layout import RowLayout
from mkd.data.sources.aligned import AlignedSample, TeacherText
from mkd.data.sources.prompts import Prompt
from mkd.distributed.groups import Groups
from mkd.rollout.on_policy import OnPolicy
from mkd.rollout.rows import WrittenRowOptions, WrittenViews
from mkd.rollout.step_rows import StepRows
from mkd.teacher.online import OnlineTeacher
from mkd.train.cross_tokenizer import CrossTokenizer
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from mkd.xtoken.loss import reference
from mkd.xtoken.text.samples import Passage, align_sample
from mkd.xtoken.text.tokens import SpanTokenizer
from mkd.xtoken.text.written import TeacherPrompt, TokenSpeller, WrittenAligner, WrittenView, names_of
from mkd.xtoken.vocabulary.build import build_projection
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary
from tests.dist.test_layouts import combine
from tests.dist.test_on_policy import (
    SIZES,
    WIDE,
    compare,
    compare_gradients,
    config_of,
    in_layout,
    mean,
    on_policy,
    student_of,
)
from tests.e2e.test_xtoken_oracle import chunks_of, cuts, ids_of, projection, same_tokens
from tests.support.dist import kd_pairs
from tests.support.dist.kd_step import Layout, Models, kd_step, parallel_state
from tests.support.e2e.small_job import END, save_tokenizer, text
from tests.support.hf_folders import make_llama
from tests.support.tolerance import FP32

PROMPTS = ("The import", "x", "A class is", "when a name", "It")
TEXTS = ("The imported module", "x", " assigned to", "import  the\n\nNow", "is", "class C:", "no names", "finally it")
RATIO, ROW, VOCAB = 0.7, 32, 150


def ascii_tokenizer(vocab_size: int, corpus: str) -> Tokenizer:
    """Byte-level without bytes above 127, so that every text of its tokens is one of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("".join(map(chr, (10, *range(32, 127)))))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(set("".join(letters))), show_progress=False
    )
    tokenizer.train_from_iterator([corpus.encode("ascii", "ignore").decode()], trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Student and teacher with tokenizers of their own."""
    root, made = tmp_path_factory.mktemp("folders"), []
    for name, size, sizes, corpus in (("s", VOCAB, SIZES, text()), ("t", 190, WIDE, "many names " * 9 + text()[::2])):
        tokenizer = ascii_tokenizer(size, corpus)
        made.append(make_llama(root / name, **sizes, vocab_size=tokenizer.get_vocab_size()))
        save_tokenizer(tokenizer, made[-1])
    return made


def given_rows(student: SpanTokenizer, teacher: SpanTokenizer, layout: AlignedRowLayout) -> list[dict]:
    rows = []
    for words in TEXTS:
        found = align_sample(student, teacher, [Passage(words)])
        chunks = found.alignment.teacher_chunk, found.alignment.student_chunk
        other = TeacherText(found.teacher_ids, found.teacher_targets, *chunks)
        rows.append(to_tensors(layout.row([AlignedSample(found.student_ids, found.student_targets, (other,))])))
    return rows


def step_of_folders(
    rank: int, world_size: int, folders: list[Path], kind: XTokenLoss, share: float
) -> tuple[dict[int, tuple[int, list[int]]], dict[str, list[float]], dict[str, Tensor]]:
    """Number of the prompt and written tokens by row, reports (name -> [sum, count]) and gradients of a step."""
    with parallel_state(Layout()):
        groups = Groups.from_megatron()
        sources = [HFFolder(folder, "--hf") for folder in folders]
        student, teacher = (SpanTokenizer(folder) for folder in folders)
        found = build_projection(student, teacher)
        chunks = student_of(sources[0], groups)
        shared = found.ids.long(), found.weights, found.common
        sizes = dict(student_vocab=student.size, teacher_vocab=teacher.size)
        width = unwrap_model(chunks[0]).embedding.word_embeddings.weight.shape[0]
        vocabulary = CrossVocabulary.of(kind, *shared, **sizes, student_width=width)
        rows = RowLayout(ROW, 8, is_packed=False, kd_everywhere=False)
        views = WrittenViews(aligner_of(student, teacher), AlignedRowLayout(rows, (rows,)))
        ids = [tuple(student.encode(prompt).ids.tolist()) for prompt in PROMPTS]
        ends = frozenset(range(0, student.size, 6))
        policy = replace(
            on_policy(share, true_vocab=student.size, end_tokens=ends), prompts=ids, layout=rows, views=views
        )
        kd = KDConfig(
            teacher_hf=["T"],
            ratio=1.0 if share == 1.0 else RATIO,
            loss="reverse_kl",
            on_policy=share,
            prompts="P",
            xtoken_loss=kind,
        )
        load = partial(load_hf_weights, folder=sources[1])
        how = dict(load_weights=load, fingerprint="", view=0, head_columns=vocabulary.teacher_columns)
        online = OnlineTeacher.build(config_of(sources[1]), groups, **how)
        schedule = TeacherThenStudent(kd, groups, online, student.size, lambda: 0, on_policy=policy)
        given = given_rows(student, teacher, views.layout)
        reports = schedule.around(get_forward_backward_func(pp_size=1, vp_size=None))(
            forward_step_func=ForwardStep(LossContext(groups, student.size, cross=(CrossTokenizer(vocabulary),))),
            data_iterator=iter([default_collate(given[start : start + 2]) for start in range(0, len(given), 2)]),
            model=chunks,
            num_microbatches=len(given) // 2,
            seq_length=ROW,
            micro_batch_size=2,
            forward_only=False,
        )
        step = StepRows(0, len(given) // 2, 2, groups.dp.size())
        written = policy.write(student_of(sources[0], groups), groups, step).rows
        texts = {row: (request.number, list(text.tokens)) for row, (request, text) in written.items()}
        gradients = {name: p.main_grad for name, p in unwrap_model(chunks[0]).named_parameters()}
        return (
            texts,
            {name: sum(report[name].double() for report in reports).tolist() for name in reports[0]},
            gradients,
        )


def aligner_of(student: SpanTokenizer, teacher: SpanTokenizer) -> WrittenAligner:
    names = names_of(teacher, {student.tokenizer.eos_token_id: teacher.tokenizer.eos_token_id})
    prompts = tuple(TeacherPrompt.of(Prompt(prompt, ()), teacher) for prompt in PROMPTS)
    view = WrittenView(teacher, prompts, names, names, None, ROW + 1)
    return WrittenAligner(TokenSpeller.of(student), "", (view,))


Chunk = tuple[range, range]


def written_chunks(
    views: Sequence[Tokenizer], prompt: str, new: Sequence[int]
) -> tuple[list[int], list[int], list[Chunk]]:
    """Tokens of both models and their chunks behind the prompt, one character at a time."""
    pieces = [views[0].decode([token], skip_special_tokens=False) for token in new]
    asked = views[0].encode(prompt).ids
    at, mine = len(prompt), {len(prompt): len(asked)}
    for number, piece in enumerate(pieces, start=1):
        at += len(piece)
        mine[at] = len(asked) + number
    whole = prompt + "".join(pieces)
    its = cuts(views[1], whole)
    shared = [(mine[at], its[at]) for at in sorted(mine.keys() & its.keys())]
    chunks = [(range(s, s_end), range(t, t_end)) for (s, t), (s_end, t_end) in pairwise(shared)]
    return [*asked, *new], views[1].encode(whole).ids, chunks


def relaxed_pairs(matrix: torch.Tensor) -> torch.Tensor:
    """[n, 2] pairs of a student token and the teacher token with at least 0.6 of its projection; of several student
    tokens with one teacher token the one with the most."""
    best: dict[int, tuple[float, int]] = {}
    for number, row in enumerate(matrix.tolist()):
        share = max(row)
        if share >= 0.6 and share > best.get(row.index(share), (0.0, 0))[0]:
            best[row.index(share)] = share, number
    return torch.tensor([(number, its) for its, (_, number) in best.items()])


def oracle(folders: list[Path], texts: Mapping[int, tuple[int, list[int]]], kind: XTokenLoss, into: Path) -> float:
    """Loss of a step in float64; the gradients are saved as weights of a folder like the student's."""
    views = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in folders
    )
    pairs, matrix, spec = same_tokens(views), projection(views), LossSpec(divergence="reverse_kl")
    kd, ce = [], []
    for number, words in enumerate(TEXTS):
        if number in texts:
            prompt, new = texts[number]
            ids, other, chunks = written_chunks(views, PROMPTS[prompt], new)
        else:
            ids, other, chunks = *(ids_of(side, words) for side in views), list(chunks_of(views, words))
        mine, its = torch.tensor(ids), torch.tensor(other)
        z, u = student(mine[None]).logits[0], teacher(its[None]).logits[0].detach()
        if number not in texts:
            ce.append(torch.nn.functional.cross_entropy(z[:-1], mine[1:], reduction="none"))
        for s, t in chunks:
            rows = z[s.start - 1 : s.stop - 1], u[t.start - 1 : t.stop - 1]
            if kind == "partition_kl":
                kd.append(reference.partition_kl(*rows, mine[s.start : s.stop], its[t.start : t.stop], pairs, spec))
            elif kind in ("gold", "gold_relaxed"):
                common = pairs if kind == "gold" else relaxed_pairs(matrix)
                kd.append(reference.gold(*rows, common, spec, uncommon_top_k=8192))
            else:
                kd.append(reference.p_kl(*rows, matrix, spec))
    loss = torch.stack(kd).mean()
    if ce:
        loss = (1.0 - RATIO) * torch.cat(ce).mean() + RATIO * loss
    loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.grad)
    student.float().save_pretrained(into)
    return loss.item()


@pytest.mark.parametrize(
    ("kind", "share"),
    [("partition_kl", 0.5), ("partition_kl", 1.0), ("p_kl", 0.5), ("gold", 1.0), ("gold_relaxed", 0.5)],
)
def test_a_step_is_that_of_the_definition(
    gloo_pool, folders: list[Path], tmp_path: Path, kind: XTokenLoss, share: float
) -> None:
    """Loss and every gradient of a step whose texts are all the student's, or every second one."""
    ((texts, sums, gradients),) = gloo_pool(1).run(step_of_folders, folders, kind, share)
    assert len(texts) == len(TEXTS) * share and len({len(new) for _, new in texts.values()}) > 1
    loss = oracle(folders, texts, kind, tmp_path / "gradients")
    assert mean(sums["loss"]) == pytest.approx(loss, rel=FP32)
    assert 0.5 < mean(sums["written_aligned"]) <= 1.0 and mean(sums["kd_first_64"]) > 0.0
    compare_gradients(gloo_pool, gradients, tmp_path / "gradients")


@dataclass(frozen=True)
class RandomTexts:
    """Stands in for an aligner: tokens and chunks that depend on prompt and length."""

    def texts(self, number: int, prompt: Sequence[int], new: Sequence[int]) -> tuple[TeacherText, ...]:
        random = np.random.RandomState(100 * number + len(new))
        size = random.randint(1, 2 * len(new) + 1)
        count = max(1, min(len(new), size) // 2)
        kept = random.rand(count) < 0.85
        numbers = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
        ours, theirs = (
            np.concatenate([np.full(before, -1, np.int32), np.repeat(numbers, kd_pairs._composition(n, count, random))])
            for before, n in ((len(prompt), len(new)), (4, size))
        )
        ids = random.randint(0, kd_pairs.TEACHER_VOCAB, 4 + size)
        return (TeacherText(ids, theirs >= 0, theirs, ours),)


def with_views(share: float, packed: bool = False, teachers: Sequence[int] = ()) -> OnPolicy:
    """Weights of later tokens are smaller."""
    options = WrittenRowOptions(half_life=3.0, is_routed=bool(teachers))
    student, other = (
        RowLayout(length, kd_pairs.MULTIPLE, packed, kd_everywhere=False)
        for length in (kd_pairs.ROW, kd_pairs.TEACHER_ROW)
    )
    views = WrittenViews(RandomTexts(), AlignedRowLayout(student, (other,)))
    return replace(on_policy(share, teachers=teachers, options=options), layout=student, views=views)


PARTITION = Models(teacher_layers=2, data="pairs", xtoken="partition_kl")
KINDS = {
    "alone": (PARTITION, ()),
    "p_kl": (replace(PARTITION, xtoken="p_kl"), ()),
    "routed": (replace(PARTITION, mixed=True), (-1, 0, 1, 1, -1)),
    "select": (replace(PARTITION, mixed=True, select=True), (-1, -1, 1, -1, 0)),
}
LAYOUTS = {
    "tp2 sp": (2, Layout(tp=2, sp=True), "alone", 0.5),
    "pp2": (2, Layout(pp=2), "p_kl", 1.0),
    "cp2": (2, Layout(cp=2), "routed", 0.5),
    "dp2": (2, Layout(), "select", 0.5),
}


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param(name, packed, marks=pytest.mark.slow if packed and name != "cp2" else ())
        for name in LAYOUTS
        for packed in (False, True)
    ],
)
def test_every_layout_has_the_same_loss_and_gradients(gloo_pool, name: str, packed: bool) -> None:
    ranks, own, kind, share = LAYOUTS[name]
    models, teachers = KINDS[kind]
    if packed:
        models = replace(models, data="packed pairs")
    policy = with_views(share, packed, teachers)
    one = combine(gloo_pool(1).run(kd_step, Layout(), models, policy))
    compare(combine(gloo_pool(ranks).run(kd_step, own, models, in_layout(policy, own))), one)
    assert one[0]["kd"] > 0.0


def test_a_teacher_of_its_own(gloo_pool) -> None:
    """If all prompts name the teacher with another tokenizer, the step equals that of this teacher alone."""
    policy = with_views(1.0, teachers=[1] * 5)
    both = combine(gloo_pool(1).run(kd_step, Layout(), KINDS["routed"][0], policy))
    alone = combine(gloo_pool(1).run(kd_step, Layout(), PARTITION, replace(policy, teachers=())))
    assert both[0]["kd_1"] == 0.0
    assert both[0]["kd"] == pytest.approx(1.9 * alone[0]["kd"], rel=1e-5)
