"""On a GPU: gradients that Transformer Engine's layers add to Megatron's buffers are those that Megatron's DDP adds.

pytest -m gpu tests/gpu/test_weight_gradients.py -s
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mkd.compat.weight_gradients import accumulate_in_layers
from mkd.errors import MkdConfigError
from tests.gpu.test_teacher_graph import models, train
from tests.support.gpu.family_gradients import one_rank
from tests.support.gpu.layout_runs import KEYS, difference
from tests.support.gpu.weight_gradients import STUDENTS, compare, step

__all__ = ["models"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS = re.compile(r"\.linear_\w+\.weight\d*$")
"""Weights of linear layers, which are all Transformer Engine's but for the LM head."""


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("name", STUDENTS)
def test_gradients(rank: None, name: str) -> None:
    if "FP8" in name and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8")
    found = compare(STUDENTS[name])
    print(f"{name}: {len(found.weights)} weights, {found.worst()}, without {found.noise():.1e}")
    trained = found.plain[0].values
    assert len(found.weights) == sum(LAYERS.search(path) is not None for path in trained)
    assert (len(found.weights) > 0) == (name != "LoRA")
    assert all(fused.losses == found.plain[0].losses for fused in found.fused)
    # The gradient of each microbatch was rounded to bf16 before.
    assert found.worst()[1] < (1e-4 if "fp32" in name else 0.01)


def test_a_weight_that_is_read_elsewhere_ends_the_job(rank: None) -> None:
    chunk = STUDENTS["dense"].build()
    accumulate_in_layers([chunk])
    with pytest.raises(MkdConfigError, match=r"linear_fc2\.weight.*--no-gradient-accumulation-fusion"):
        step(chunk, lambda model: model.decoder.layers[0].mlp.linear_fc2.weight.float().sum())


def test_training(models: Path) -> None:
    jobs = {"fused": [], "not fused": ["--no-gradient-accumulation-fusion"]}
    with ThreadPoolExecutor() as pool:
        fused, plain = pool.map(lambda job: train(models, job[0], *job[1]), jobs.items())
    assert fused[0]["loss"] == plain[0]["loss"]
    assert all(difference(fused, plain, key) < 0.02 for key in KEYS)
