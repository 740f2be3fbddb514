"""Texts that an inference server writes for several ranks: the same on all, and so are failures."""

import errno
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.compat.stopping import WaitAborted
from mkd.distributed.groups import Groups
from mkd.errors import MkdError
from mkd.rollout.interface import Request
from mkd.rollout.served.apis import WRITING_APIS
from mkd.rollout.served.server import StudentServer
from mkd.rollout.served.text_files import TextFiles
from mkd.rollout.served.weights import WeightFolders
from mkd.rollout.served.writer import ServedWriter
from mkd.rollout.write import write_texts
from mkd.teacher.inference.http import ROLLOUT, HttpServer, ServerAddress
from tests.dist.test_live_export import live_model
from tests.dist.test_rollout import PROMPTS, decoding
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import make_llama
from tests.support.inference_server import LogProbs, StandIn

VOCAB = 131
REQUESTS = [Request(tuple(prompt), number) for number, prompt in enumerate(PROMPTS)]
SIZES = {"num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def model_in(folder: str) -> LogProbs:
    model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def log_probs(ids: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1).double().numpy()

    return log_probs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("hf") / "m", **SIZES)


@pytest.fixture
def server(path: Path) -> Iterator[StandIn]:
    with StandIn(model_in(str(path)), vocab=VOCAB) as server:
        server.load = model_in
        yield server


def writer_at(url: str, folder: HFFolder, out: Path, rank: int, timeout_s: float = 20.0) -> ServedWriter:
    http = HttpServer(ServerAddress.parse(ROLLOUT.url, url), timeout_s, 8, ROLLOUT)
    servers = [StudentServer(http, WRITING_APIS["vllm"](), "t", VOCAB)] if rank == 0 else []
    text = tuple((7 * number) % VOCAB for number in range(1, 34))
    return ServedWriter(
        servers, WeightFolders(out), live_model(folder), text, refresh=2, timeout_s=timeout_s, files=TextFiles(out, 2)
    )


def served_texts(
    rank: int, world_size: int, path: Path, url: str, out: Path, sizes: tuple[int, int]
) -> tuple[list[list[int]], list[list[list[int]]], list[int]]:
    """Texts of this rank's own engine, those of three rollouts, and the iterations of their weights."""
    with layout(*sizes):
        folder, groups = HFFolder(path, "--hf"), Groups.from_megatron()
        chunks = build_from_arguments(read_architecture(folder)[1])
        load_hf_weights(chunks, folder)
        chunks[0].config.overlap_p2p_comm = False  # as megatron's checks set it without virtual stages
        options = decoding(tokens=6)
        own = [list(text.tokens) for text in write_texts(chunks, groups, REQUESTS, options, "cached")]
        writer, found, steps = writer_at(url, folder, out, rank), [], []
        for iteration in (3, 4, 5):
            with torch.no_grad():  # each step changes the weights
                for parameter in chunks[0].parameters():
                    parameter.mul_(1.0 if iteration < 5 else 1.1)
            texts, weights_at = writer.write(chunks, groups, REQUESTS, options, iteration)
            assert writer.write(chunks, groups, list(REQUESTS), options, iteration) == (texts, weights_at), "run again"
            found.append(texts)
            steps.append(weights_at)
        again = writer_at(url, folder, out, rank)
        assert again.write(chunks, groups, REQUESTS, options, 5) == (found[2], 5), "the job was killed"
        assert again.write(chunks, groups, REQUESTS, options, 4) == (found[2], 4), "with other weights than before"
        return own, found, steps


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_all_ranks_have_the_texts(gloo_pool, path: Path, server: StandIn, tmp_path: Path, sizes: tuple) -> None:
    (own, found, steps), other = gloo_pool(2).run(served_texts, path, server.url, tmp_path / "w", sizes)
    assert found[0] == found[1] == own and found[2] != own
    assert other[1] == found and steps == other[2] == [3, 3, 5]
    assert server.loaded == [str(tmp_path / "w" / f"step_000000{step}") for step in (3, 5, 4)]
    assert len(server.written) == 4 * len(REQUESTS)
    left = ["step_0000004", "texts_0000004.json", "texts_0000005.json", "writing_job.txt"]
    assert sorted(one.name for one in (tmp_path / "w").iterdir()) == left


def failure(rank: int, world_size: int, path: Path, url: str, out: Path, stops: bool) -> str:
    """The error of a rank; `stops`: the second rank has received a signal."""
    with layout(1, 1):
        folder, groups = HFFolder(path, "--hf"), Groups.from_megatron()
        chunks = build_from_arguments(read_architecture(folder)[1])
        load_hf_weights(chunks, folder)
        writer = writer_at(url, folder, out, rank, 20.0 if stops else 0.5)
        try:
            writer.write(chunks, groups, REQUESTS, decoding(tokens=6), 0, lambda: stops and rank == 1)
        except (MkdError, WaitAborted) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize(
    ("fault", "stops", "words"),
    [
        ("short", False, "MkdTeacherError: http.* cut off after 1 tokens"),
        ("keeps", False, "MkdTeacherError: --kd-rollout-url http.* has other weights than the student"),
        ("busy", False, "MkdTeacherTimeout: no server of --kd-rollout-url has answered for"),
        ("busy", True, "WaitAborted: "),
    ],
)
def test_all_ranks_raise(
    gloo_pool, path: Path, server: StandIn, tmp_path: Path, fault: str, stops: bool, words: str
) -> None:
    other = make_llama(tmp_path / "other", **SIZES | {"rms_norm_eps": 0.3})
    server.model, server.fault = model_in(str(other)), fault
    found = gloo_pool(2).run(failure, path, server.url, tmp_path / "w", stops)
    for message in found:
        assert re.match(words, message), message


def unwritable(rank: int, world_size: int, path: Path, url: str, out: Path) -> str:
    return failure(rank, world_size, path, url, out / "file" / "w", stops=False)


def test_a_folder_that_cannot_be_written(gloo_pool, path: Path, server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in gloo_pool(2).run(unwritable, path, server.url, tmp_path):
        folder = tmp_path / "file" / "w"
        assert message.startswith(f"MkdCheckpointError: --kd-rollout-weights {folder}: rank 0 cannot write there, or")


def full_disk(rank: int, world_size: int, out: Path) -> str:
    def write(folder: Path) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")  # of a write: it names no file

    with pytest.raises(MkdError) as caught:
        WeightFolders(out).add(1, write)
    return str(caught.value)


def test_a_full_disk(gloo_pool, tmp_path: Path) -> None:
    for message in gloo_pool(2).run(full_disk, tmp_path / "w"):
        assert message.startswith(f"--kd-rollout-weights {tmp_path / 'w'}: rank 1 cannot write there, or")
        assert message.endswith("No space left on device")


def weights_beside_others(rank: int, world_size: int, out: Path) -> list[str]:
    """Names after a second write, and the error of a write whose name another program has."""
    folders = WeightFolders(out)

    def write(folder: Path) -> None:
        (folder / f"weights{rank}").write_text("1")

    folders.add(1, write)
    folders.remove_others(folders.add(2, write))
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))  # another rank may be ahead
    try:
        folders.add(1000, write)
    except MkdError as error:
        return [*names, str(error)]
    return names


def test_folders_of_other_programs_are_not_removed(gloo_pool, tmp_path: Path) -> None:
    (tmp_path / "step_0001000").mkdir()
    (tmp_path / "step_0001000" / "model.safetensors").write_text("mine")
    for *names, error in gloo_pool(2).run(weights_beside_others, tmp_path):
        assert names == ["step_0000002", "step_0001000"]
        assert "step_0001000 exists and was not written by --kd-rollout-weights: give a folder" in error
    assert (tmp_path / "step_0001000" / "model.safetensors").read_text() == "mine"


def second_job(rank: int, world_size: int, out: Path) -> tuple[str, list[str]]:
    """The error of a job in whose folder another one has begun, and the names in the folder."""
    first, second = WeightFolders(out), WeightFolders(out)
    for folders in (first, first, second, second):
        folders.claim()
    second.add(1, lambda folder: None)
    with pytest.raises(MkdError) as caught:
        first.claim()
    return str(caught.value), sorted(path.name for path in out.iterdir())


def test_two_jobs_in_one_folder(gloo_pool, tmp_path: Path) -> None:
    """The earlier one ends before it removes what the servers of the other one load."""
    out = tmp_path / "w"
    for error, names in gloo_pool(2).run(second_job, out):
        assert error.startswith(f"--kd-rollout-weights {out}: another job has claimed this folder: process ")
        assert error.endswith("). This job ends; give each job a folder of its own")
        assert names == ["step_0000001", "writing_job.txt"]
