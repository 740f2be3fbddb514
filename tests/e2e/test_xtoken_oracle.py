"""From text to loss and gradient: what the first training step reports, against definitions in float64.

Nothing of mkd's alignment, data, models or fast losses is used here: the texts are tokenized, cut into chunks one
character at a time, run through transformers' models, and compared chunk by chunk with `mkd.xtoken.loss.reference`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from mkd.config.loss_spec import LossSpec
from mkd.xtoken.loss import reference
from tests.e2e.test_pretrain import steps, trained
from tests.support.e2e.small_job import END, STUDENT, TEACHER, SmallJob, make_model, make_tokenizer, text, write_data
from tests.support.tolerance import FP32

RATIO, SPEC = 0.6, LossSpec(divergence="forward_kl", temperature=2.0)
TEXTS = ("The café's imported module was 日本, not a class.", "x", " assigned to names", "import  the statement\n\nNow")
"""In two microbatches of different numbers of chunks; of the second one only the end can be a chunk."""

Chunk = tuple[range, range]
"""Tokens of the student and of the teacher."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    root = tmp_path_factory.mktemp("oracle")
    ours, theirs = make_tokenizer(), make_tokenizer(411, "many imported names in another order " * 9 + text()[::2])
    return SmallJob(
        root,
        make_model(root / "teacher", theirs, 3, TEACHER),
        make_model(root / "student", ours, 2, STUDENT),
        write_data(root / "texts", [ids_of(ours, part) for part in TEXTS]),
    )


def ids_of(tokenizer: Tokenizer, words: str) -> list[int]:
    return [*tokenizer.encode(words).ids, tokenizer.token_to_id(END)]


def cuts(tokenizer: Tokenizer, words: str) -> dict[int, int]:
    """Characters before each place where the text can be cut -> tokens before it."""
    spans = tokenizer.encode(words).offsets
    places = [at for at in range(len(words) + 1) if not any(begin < at < end for begin, end in spans)]
    return {at: sum(end <= at for _, end in spans) for at in places}


def chunks_of(sides: Sequence[Tokenizer], words: str) -> Iterator[Chunk]:
    """Those whose tokens are all predicted; the last one is the ends of the text."""
    mine, its = (cuts(tokenizer, words) for tokenizer in sides)
    shared = [(mine[at], its[at]) for at in sorted(mine.keys() & its.keys())]
    shared.append((shared[-1][0] + 1, shared[-1][1] + 1))
    for (s, t), (s_end, t_end) in pairwise(shared):
        if s > 0 and t > 0:
            yield range(s, s_end), range(t, t_end)


def same_tokens(sides: Sequence[Tokenizer]) -> Tensor:
    """[n, 2] ids of the tokens that both have; both are byte-level, so that equal ones are spelled alike."""
    ours, theirs = (tokenizer.get_vocab() for tokenizer in sides)
    return torch.tensor([(ours[token], theirs[token]) for token in ours if token in theirs])


def projection(sides: Sequence[Tokenizer]) -> Tensor:
    """[V_s, V_t]: a token is itself, or the first 4 that the teacher writes it in, each with a tenth of the weight."""
    ours, theirs = sides
    matrix = torch.zeros(ours.get_vocab_size(), theirs.get_vocab_size(), dtype=torch.float64)
    for token, number in ours.get_vocab().items():
        same = theirs.token_to_id(token)
        pieces = theirs.encode(ours.decode([number])).ids[:4] if same is None else [same]
        for place, piece in enumerate(pieces):
            matrix[number, piece] += 0.1**place
    return matrix / matrix.sum(dim=1, keepdim=True)


def expected(job: SmallJob, kind: str) -> dict[str, float]:
    """Every mean of the step over all texts, and the norm of its gradient."""
    sides = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (job.student, job.teacher)]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in (job.student, job.teacher)
    )
    pairs, matrix = same_tokens(sides), projection(sides)
    ce, kd = [], []
    for words in TEXTS:
        mine, its = (torch.tensor(ids_of(tokenizer, words)) for tokenizer in sides)
        z, u = student(mine[None]).logits[0], teacher(its[None]).logits[0].detach()
        ce.append(torch.nn.functional.cross_entropy(z[:-1], mine[1:], reduction="none"))
        for s, t in chunks_of(sides, words):
            rows = z[s.start - 1 : s.stop - 1], u[t.start - 1 : t.stop - 1]
            if kind == "partition_kl":
                labels = mine[s.start : s.stop], its[t.start : t.stop]
                kd.append(reference.partition_kl(*rows, *labels, pairs, SPEC))
            elif kind == "gold":
                kd.append(reference.gold(*rows, pairs, SPEC, uncommon_top_k=8192))
            else:
                kd.append(reference.p_kl(*rows, matrix, SPEC))
    means = {"ce": torch.cat(ce).mean(), "kd": torch.stack(kd).mean()}
    means["loss"] = (1 - RATIO) * means["ce"] + RATIO * means["kd"]
    means["loss"].backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm()
    return {name: value.item() for name, value in means.items()} | {"grad_norm": norm.item()}


@pytest.mark.parametrize("kind", ["partition_kl", "p_kl", "gold"])
def test_a_step_is_what_the_definitions_say(job: SmallJob, tmp_path: Path, kind: str) -> None:
    packed = kind == "partition_kl"
    flags = {
        "--kd-xtoken-loss": kind,
        "--kd-ratio": RATIO,
        "--kd-temperature": SPEC.temperature,
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--train-iters": 1,
        "--seq-length": 48,
        "--micro-batch-size": 1 if packed else 2,
        "--global-batch-size": 2 if packed else 4,
        "--kd-metrics-file": tmp_path / "m.jsonl",
    }
    if packed:
        flags |= {"--kd-packing": "best_fit", "--kd-packing-multiple": 8}
    (step,) = steps(trained(job, flags))
    for name, value in expected(job, kind).items():
        assert step[name] == pytest.approx(value, rel=FP32), name
