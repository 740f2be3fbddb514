"""Training from a cache has the losses and gradients of training from the teacher's top-k, in any layout, microbatch
size and packing of writer and reader.

Without `-m slow`, each form of the cache is read in one layout, the first in all; `-m slow` reads every form in every
layout.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mkd.data.segments import segment_hash
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter
from tests.support.dist.cached_step import FAULTS, cached_step, meta_of, reads_of_steps, step_without_texts, write_cache
from tests.support.dist.kd_run import kd_run
from tests.support.dist.kd_samples import ROWS, samples
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import total, whole_tensors
from tests.support.dist.pool import Pool, WorkerError
from tests.support.tolerance import FP32, GRADIENT, QUANTIZED, STEP_LOSS, assert_close_norm, norm_error

TOP_K, STORED, SAMPLES = 6, 12, 80
Result = tuple[dict[str, float], dict[str, Tensor]]
LAYOUTS = {
    "dp2-cp2-packed": (4, Layout(cp=2, mbs=2), "packed"),
    "pp2": (2, Layout(pp=2, mbs=4), "padded"),
    "tp2-sp-packed": (2, Layout(tp=2, sp=True, mbs=1), "packed"),
}
QUICK = {"fp32": list(LAYOUTS), "larger": ["tp2-sp-packed"], "log12": ["pp2"]}


@pytest.fixture(scope="module")
def caches(gloo_pool: Callable[[int], Pool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> folder. Written unpacked, one row at a time, with tensor parallelism."""
    root = tmp_path_factory.mktemp("caches")
    metas = {"fp32": meta_of(TOP_K), "log12": meta_of(TOP_K, "log12"), "larger": meta_of(STORED)}
    folders = {name: str(root / name) for name in metas}
    models = Models(data="padded", top_k=STORED)
    pool, layout = gloo_pool(2), Layout(tp=2, mbs=1)
    pool.run(write_cache, layout, models, {folders[name]: meta for name, meta in metas.items()}, [])
    folders["part"] = str(root / "part")
    pool.run(write_cache, layout, models, {folders["part"]: meta_of(TOP_K)}, left_out())
    folders["sampled"] = str(root / "sampled")
    pool.run(write_cache, layout, models, {folders["sampled"]: meta_of(SAMPLES, "counts", samples=SAMPLES)}, [])
    return folders


def left_out() -> list[bytes]:
    """Keys of one text in three."""
    texts = [sample["tokens"][: sample["length"]] for sample in samples("padded", 1)]
    return [segment_hash(text) for text in texts[::3]]


def result_of(found: list[dict[str, Any]]) -> Result:
    """Mean losses, and whole gradients."""
    sums = total([part["reports"] for part in found])
    gradients = whole_tensors([part for one in found for part in one["gradients"]], "gradient")
    return {name: value / count for name, (value, count) in sums.items()}, gradients


@pytest.fixture(scope="module")
def online(gloo_pool: Callable[[int], Pool]) -> Result:
    return result_of(gloo_pool(1).run(cached_step, Layout(), Models(data="padded", top_k=TOP_K), None))


@pytest.fixture(scope="module")
def online_without_texts(gloo_pool: Callable[[int], Pool]) -> Result:
    models = Models(data="padded", top_k=TOP_K)
    return result_of(gloo_pool(1).run(step_without_texts, Layout(), models, left_out()))


def assert_same(seen: Result, truth: Result, gradient: float = GRADIENT, loss: float = STEP_LOSS) -> None:
    assert seen[0] == pytest.approx(truth[0], rel=loss)
    assert seen[1].keys() == truth[1].keys()
    for name, expected in truth[1].items():
        assert expected.norm() > 0
        assert_close_norm(seen[1][name], expected, gradient, name)


@pytest.mark.parametrize(
    ("layout_name", "name"),
    [
        pytest.param(layout_name, name, marks=() if layout_name in quick else pytest.mark.slow)
        for name, quick in QUICK.items()
        for layout_name in LAYOUTS
    ],
)
def test_gradients_are_those_of_the_model(
    gloo_pool: Callable[[int], Pool], caches: dict, online: Result, layout_name: str, name: str
) -> None:
    """`larger` has a larger K than the job: the dropped tokens become part of the tail."""
    ranks, layout, data = LAYOUTS[layout_name]
    models = Models(data=data, top_k=TOP_K, cache=caches[name])
    seen = result_of(gloo_pool(ranks).run(cached_step, layout, models, None))
    if name == "log12":
        assert_same(seen, online, QUANTIZED, QUANTIZED)
    else:
        assert_same(seen, online, loss=FP32)


@pytest.mark.parametrize("planted", [None, *FAULTS])
def test_missing_texts_have_cross_entropy_only(
    gloo_pool: Callable[[int], Pool], caches: dict, online_without_texts: Result, planted: str | None
) -> None:
    truth = online_without_texts
    models = Models(data="packed", top_k=TOP_K, cache=caches["part"], cache_missing="ce_only")
    losses, gradients = result_of(gloo_pool(4).run(cached_step, Layout(cp=2), models, planted))
    needed = [sample["loss_mask"].any() for sample in samples("padded", 1)[::3]]
    assert losses.pop("kd_missing") == sum(needed) > 2
    if planted is None:
        assert_same((losses, gradients), truth, loss=FP32)
    else:
        assert max(norm_error(gradients[key], value) for key, value in truth[1].items()) > 100 * GRADIENT


def test_missing_text_fails_on_all_ranks(gloo_pool: Callable[[int], Pool], caches: dict) -> None:
    """Although only one data-parallel rank needs it, and only the last stage reads."""
    key = left_out()[0].hex()
    models = Models(data="padded", top_k=TOP_K, cache=caches["part"])
    with pytest.raises(WorkerError) as caught:
        gloo_pool(4).run(cached_step, Layout(pp=2, mbs=1), models, None)
    text = str(caught.value)
    assert text.count("MkdCacheError: --kd-teacher-cache") == 4
    assert text.count(f"does not have segment {key} (24 tokens at position 0 of row 0, segment 0 of microbatch 0)") == 4
    assert "of this step: write this data too (mkd cache), or give --kd-cache-missing ce_only" in text


def damaged_copy(cache: str, folder: Path, kind: str) -> tuple[str, str]:
    """A copy with one damaged segment: its folder, and the segment's name in messages."""
    store = TeacherStore(Path(cache), "--cache")
    parts = [part for shard in store.shards for part in shard.segments()]
    number, (key, records) = next((i, part) for i, part in enumerate(parts) if len(part[1]) == 24)
    writer = StoreWriter(folder, store.meta)
    if kind == "not finite":
        records["values"][5] = torch.nan
    writer.add_records(key, records)
    for other, other_records in parts[:number] + parts[number + 1 :]:
        writer.add_records(other, other_records)
    writer.flush()
    [shard] = TeacherStore(folder, "--cache").shards
    if kind == "checksum":
        content = bytearray(shard.path.read_bytes())
        content[-sum(len(part[1]) for part in parts) * shard.records.shape[1] + 3] ^= 16
        shard.path.write_bytes(content)
    return str(folder), f"segment {key.hex()} in shard {shard.path.name}"


@pytest.mark.parametrize("kind", ["checksum", "not finite"])
def test_damage_fails_on_all_ranks(gloo_pool: Callable[[int], Pool], caches: dict, tmp_path: Path, kind: str) -> None:
    folder, segment = damaged_copy(caches["fp32"], tmp_path / "damaged", kind)
    with pytest.raises(WorkerError) as caught:
        gloo_pool(2).run(cached_step, Layout(tp=2, mbs=1), Models(data="packed", top_k=TOP_K, cache=folder), None)
    text = str(caught.value)
    assert text.count("MkdCacheError: --kd-teacher-cache") == 2
    assert text.count(segment) == 2 and kind in text


@pytest.mark.parametrize("sampled", [False, True])
def test_evaluation(gloo_pool: Callable[[int], Pool], caches: dict, sampled: bool) -> None:
    """The teacher's CE is exact; sampled targets do not have the most probable token, so no agreement is reported."""
    truth = gloo_pool(1).run(kd_run, Layout(), Models(data="padded"), 0)
    name = "sampled" if sampled else "log12"
    models = Models(data="packed", cache=caches[name])
    seen = total([part["evaluation"] for part in gloo_pool(4).run(kd_run, Layout(cp=2, mbs=1), models, 0)])
    for term in ("ce", "teacher_ce") if sampled else ("ce", "teacher_ce", "agreement"):
        assert seen[term] == pytest.approx(total([truth[0]["evaluation"]])[term], rel=FP32)
    assert ("agreement" in seen) != sampled


def test_sampled_targets(gloo_pool: Callable[[int], Pool], caches: dict) -> None:
    """The gradient with 80 samples of 83 tokens is near that of the full divergence, and the same in every layout."""
    truth = result_of(gloo_pool(1).run(cached_step, Layout(), Models(data="padded"), None))[1]
    one, other = (
        result_of(gloo_pool(ranks).run(cached_step, layout, Models(data="packed", cache=caches["sampled"]), None))
        for ranks, layout in ((1, Layout()), (4, Layout(cp=2, pp=2, mbs=1)))
    )
    assert_same(other, one, loss=FP32)
    assert max(norm_error(one[1][key], value) for key, value in truth.items()) < 0.5


def test_next_step_is_prefetched(gloo_pool: Callable[[int], Pool], caches: dict) -> None:
    """In a thread and only once, even if Megatron repeats a step."""
    [found] = gloo_pool(1).run(reads_of_steps, caches["fp32"])
    assert found["seen"] == found["expected"]
    first, second, again = found["threads"]
    assert first == [True] * 4 + [False] * 4
    assert second == [] and again == []


def test_samples_and_shards_are_several(caches: dict) -> None:
    assert len(samples("padded", 1)) > ROWS and len(list(Path(caches["fp32"]).glob("*.safetensors"))) > 1
