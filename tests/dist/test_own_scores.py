"""Log-probabilities that the student gives a text on the training ranks: those of transformers, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.distributed.groups import Groups
from mkd.rollout.own_scores import own_scores
from tests.dist.test_rollout import FAMILIES, decoding
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import Layout, Models, build_student, parallel_state
from tests.support.hf_folders import make_model

TEXT = tuple((7 * number) % 131 for number in range(1, 34))
LIMIT = 1e-5


def scores_of_folder(rank: int, world_size: int, path: Path) -> np.ndarray:
    with layout(1, 1):
        folder = HFFolder(path, "--hf")
        chunks = build_from_arguments(read_architecture(folder)[1])
        load_hf_weights(chunks, folder)
        return own_scores(chunks, Groups.from_megatron(), TEXT, decoding())


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_scores_are_those_of_transformers(gloo_pool, tmp_path: Path, name: str) -> None:
    """Tied embeddings, and a softcap of the logits."""
    path = make_model(tmp_path / "m", **FAMILIES[name])
    (found,) = gloo_pool(1).run(scores_of_folder, path)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        truth = model(torch.tensor([TEXT])).logits[0, :-1].double().log_softmax(-1).numpy()
    assert np.abs(found - truth[np.arange(len(truth)), TEXT[1:]]).max() < LIMIT * np.abs(found).max()


def scores_in_layout(rank: int, world_size: int, own: Layout) -> np.ndarray:
    with parallel_state(own):
        groups = Groups.from_megatron()
        chunks = build_student(own, Models(), groups)
        options = decoding(true_vocab=VOCAB, length_multiple=2 * own.cp * own.tp)
        found = own_scores(chunks, groups, [token % VOCAB for token in TEXT], options)
        assert all(chunk.training for chunk in chunks)
        return found


LAYOUTS = {
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "cp2": (2, Layout(cp=2)),
    "pp2 vp2": (2, Layout(pp=2, vp=2, mbs=1)),
    "tp2 sp cp2": (4, Layout(tp=2, cp=2, sp=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_rank_finds_the_same(gloo_pool, name: str) -> None:
    ranks, own = LAYOUTS[name]
    (expected,) = gloo_pool(1).run(scores_in_layout, Layout(mbs=1))
    for found in gloo_pool(ranks).run(scores_in_layout, own):
        assert found == pytest.approx(expected, rel=LIMIT)
