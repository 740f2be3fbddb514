"""The folder that a running job writes is the one that its model was read from, in every layout and to the last bit."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.checkpoint.live_export import LiveExport, LiveModel
from mkd.config.flags import default_arguments
from mkd.errors import MkdCheckpointError
from tests.dist.test_rollout import FAMILIES
from tests.support.dist.gpt_models import build_chunks, build_from_arguments, layout
from tests.support.hf_folders import make_llama, make_model, read_weights

KINDS = {name: FAMILIES[name] for name in ("qwen3", "gemma3", "qwen3 moe", "moe with sinks", "hybrid moe")}
LAYOUTS = {
    "one rank": (1, {"tp": 1, "pp": 1}),
    "tp2": (2, {"tp": 2, "pp": 1}),
    "pp2": (2, {"tp": 1, "pp": 2}),
    "dp2": (2, {"tp": 1, "pp": 1}),
    "ep2": (2, {"tp": 1, "pp": 1, "ep": 2, "etp": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp("hf") / "m", **sizes) for name, sizes in KINDS.items()}


def live_model(folder: HFFolder) -> LiveModel:
    args = Namespace(**vars(default_arguments()) | read_architecture(folder)[1])
    return LiveModel(args, folder.path, "--kd-rollout-url")


def exported(rank: int, world_size: int, folders: dict[str, Path], sizes: dict[str, int], out: Path) -> None:
    """Load each folder, and write it again from the parameters."""
    with layout(**sizes):
        for name, path in folders.items():
            folder = HFFolder(path, "--hf")
            chunks = build_from_arguments(read_architecture(folder)[1], sizes.get("ep", 1))
            load_hf_weights(chunks, folder)
            (out / name).mkdir(exist_ok=True)
            LiveExport(live_model(folder), chunks).write(out / name)


def assert_equal(one: Path, other: Path) -> None:
    HFFolder(other, "--hf")
    before, after = read_weights(one), read_weights(other)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_folder_is_bit_equal(gloo_pool, folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    ranks, sizes = LAYOUTS[name]
    unfit = {"tp2": {"moe with sinks"}, "ep2": folders.keys() - {"qwen3 moe", "moe with sinks"}}.get(name, set())
    some = {kind: path for kind, path in folders.items() if kind not in unfit}
    gloo_pool(ranks).run(exported, some, sizes, tmp_path)
    for kind, path in some.items():
        assert_equal(path, tmp_path / kind)


def exported_chunks(rank: int, world_size: int, path: Path, out: Path) -> None:
    folder = HFFolder(path, "--hf")
    with layout(2, 2, 2):
        chunks = build_chunks(read_architecture(folder)[1], 2)
        load_hf_weights(chunks, folder)
        LiveExport(live_model(folder), chunks).write(out)


def test_virtual_stages(gloo_pool, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    gloo_pool(4).run(exported_chunks, path, tmp_path / "out")
    assert_equal(path, tmp_path / "out")


def failing_export(rank: int, world_size: int, path: Path, out: Path) -> str:
    """The second rank has no disk left."""
    folder = HFFolder(path, "--hf")
    with layout(2, 1):
        chunks = build_from_arguments(read_architecture(folder)[1])
        load_hf_weights(chunks, folder)
        try:
            LiveExport(live_model(folder), chunks).write(out if rank else out / "missing")
        except OSError as error:
            return type(error).__name__
        return ""


def test_a_rank_that_cannot_write_takes_part_to_the_end(gloo_pool, folders: dict[str, Path], tmp_path: Path) -> None:
    assert gloo_pool(2).run(failing_export, folders["qwen3"], tmp_path) == ["FileNotFoundError", ""]


def other_model(rank: int, world_size: int, path: Path) -> Any:
    folder = HFFolder(path, "--hf")
    with layout(1, 1):
        chunks = build_from_arguments(read_architecture(folder)[1] | {"num_layers": 1})
        with pytest.raises(MkdCheckpointError) as error:
            LiveExport(live_model(folder), chunks)
        return str(error.value)


def faulty_models(rank: int, world_size: int, path: Path) -> list[str]:
    """The second rank does not see `hf_assets`; it has other arguments; a tensor has another shape on all ranks."""
    messages, folder = [], HFFolder(path, "--hf")
    args = read_architecture(folder)[1]
    with layout(2, 1):
        chunks, model = build_from_arguments(args), live_model(folder)
        wrong = Namespace(**vars(model.args) | {"num_layers": 7})
        wide = build_from_arguments(args | {"ffn_hidden_size": 2 * args["ffn_hidden_size"]})
        for one, other in (
            (replace(model, assets_dir=None), chunks),
            (replace(model, args=wrong), chunks),
            (model, wide),
        ):
            with pytest.raises(MkdCheckpointError) as error:
                LiveExport(one if rank else model, other)
            messages.append(str(error.value))
    return messages


def test_faults_are_raised_on_all_ranks(gloo_pool, folders: dict[str, Path]) -> None:
    one, other = gloo_pool(2).run(faulty_models, folders["qwen3"])
    (unseen, *others), (arguments, shape) = zip(one, other, strict=True), one[1:]
    assert all("rank 1 finds another configuration in" in message for message in unseen)
    assert all(mine == theirs for mine, theirs in others)
    assert "--num-layers 7" in arguments
    assert " gives model.layers.0.mlp." in shape


def test_a_model_without_some_tensors_is_refused(gloo_pool, folders: dict[str, Path]) -> None:
    (message,) = gloo_pool(1).run(other_model, folders["qwen3"])
    assert message.startswith("--kd-rollout-url: the student cannot be written as a Hugging Face folder: tensor ")
