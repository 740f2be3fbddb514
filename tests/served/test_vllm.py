"""A real vLLM on CPU teaches a student of half of its layers: the numbers of the same teacher on the student's ranks.

    bash tests/served/setup_vllm.sh
    pytest -m served tests/served -s

The teacher is the quickstart's, SmolLM2-135M-Instruct. About five minutes on two cores for each of the three servers.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mkd.teacher.inference.http import HttpServer, ServerAddress
from mkd.teacher.inference.probe import wait_for_server
from tests.support.e2e.small_job import ROOT, Result, free_port, run, text, write_data

VLLM = ROOT / os.environ.get("MKD_VLLM", ".venv-vllm") / "bin/vllm"
TOP_K, LENGTH, STEPS = 64, 128, 10
TEXTS = 4 * STEPS
pytestmark = [
    pytest.mark.served,
    pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: bash tests/served/setup_vllm.sh"),
]


def _run(*words: object) -> None:
    environment = os.environ | {"MKD_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=environment, check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """teacher, student and data; MKD_SERVED names a folder that is kept from run to run."""
    kept = os.environ.get("MKD_SERVED")
    folder = tmp_path_factory.mktemp("served") if kept is None else Path(kept)
    if not (folder / "teacher").exists():
        _run("examples/quickstart/make_teacher.py", "--out", folder / "teacher")
    if not (folder / "student").exists():
        _run("-m", "mkd", "prune", "depth", "--hf", folder / "teacher", "--out", folder / "student", "--every", 2)
    if not (folder / "data.idx").exists():
        ids = Tokenizer.from_file(str(folder / "teacher/tokenizer.json")).encode(text()).ids
        pieces = [ids[start : start + LENGTH - 16 * (start % 3)] for start in range(0, len(ids), LENGTH)]
        write_data(folder / "data", pieces[: TEXTS + 5])
    return folder


@contextmanager
def vllm(folder: Path, name: str, *options: object) -> Iterator[str]:
    """The address of a server of the teacher. MKD_SERVED_URL names one that runs already, for options of this name as
    MKD_SERVED_URL_FLOAT32 and so on."""
    known = "MKD_SERVED_URL" + (f"_{name.upper()}" if name else "")
    if known in os.environ:
        yield os.environ[known]
        return
    with serving(folder / "teacher", folder / f"vllm{name}.log", ["--max-model-len", LENGTH + 2, *options]) as url:
        yield url


@contextmanager
def serving(model: Path, log: Path, flags: Sequence[object], **variables: str) -> Iterator[str]:
    """The address of a vLLM that serves a folder."""
    port = free_port()
    command = [VLLM, "serve", model, "--served-model-name", "smol", "--host", "127.0.0.1", "--port", port, *flags]
    command += ["--max-num-seqs", 8, "--enforce-eager"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {**own, "PYTHONPATH": str(ROOT / "tests/served"), **variables}
    with log.open("w") as out:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=out)
    try:
        address = ServerAddress.parse("url", f"http://127.0.0.1:{port}")
        wait_for_server(lambda: HttpServer(address, 60.0).get("/v1/models", 1 << 20), "vLLM", 600.0)
        yield str(address)
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def online(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The teacher on the student's rank, with all of its distribution."""
    return train(folder, tmp_path_factory.mktemp("online"), {"--kd-top-k": None})


def train(folder: Path, save: Path, changes: dict[str, Any]) -> Result:
    flags: dict[str, Any] = {
        "--kd-teacher-hf": folder / "teacher",
        "--kd-student-hf": folder / "student",
        "--kd-ratio": 0.9,
        "--kd-top-k": TOP_K,
        "--kd-packing": "best_fit",
        "--data-path": folder / "data",
        "--data-cache-path": save / "cache",
        "--split": "90,10,0",
        "--seq-length": LENGTH,
        "--micro-batch-size": 2,
        "--global-batch-size": 4,
        "--train-iters": STEPS,
        "--eval-iters": 1,
        "--eval-interval": STEPS,
        "--log-interval": 1,
        "--lr": 1e-4,
        "--num-workers": 0,
        "--save": save,
        "--save-interval": 1000,
        **changes,
    }
    pairs = [(flag, value) for flag, value in flags.items() if value is not None]
    result = run([str(word) for pair in pairs for word in pair], timeout=560)
    assert result.status == 0, result.output[-3000:] + result.errors[-3000:]
    return result


def _sent(result: Result) -> tuple[int, int]:
    """Numbers of texts that were sent, and that were in the cache."""
    found = re.search(r"([\d,]+) texts were sent to the server, ([\d,]+) were in the cache", result.output)
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def largest_differences(result: Result, truth: Result) -> dict[str, float]:
    """Largest differences of metrics over all steps and evaluations."""
    largest = {"ce": 0.0, "kd": 0.0, "valid_kd": 0.0, "valid_teacher_ce": 0.0}
    for line, expected in zip(result.metrics, truth.metrics, strict=True):
        for name in largest.keys() & expected.keys():
            largest[name] = max(largest[name], abs(line[name] - expected[name]))
    return largest


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_hidden_states(folder: Path, online: Result, tmp_path: Path, dtype: str, most: float) -> None:
    """The whole distribution. Chunks of a text are computed one after the other, with 96 tokens at a time."""
    states = Path(os.environ.get("MKD_SERVED_STATES", tmp_path / "states")) / dtype
    states.mkdir(parents=True, exist_ok=True)
    extracting = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [30]}}
    extracting = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": extracting}
    writing = {"kv_connector": "CpuStates", "kv_connector_module_path": "cpu_states", "kv_role": "kv_producer"}
    writing |= {"kv_connector_extra_config": {"shared_storage_path": str(states)}}
    options = ["--dtype", dtype, "--max-num-batched-tokens", 96, "--speculative-config", json.dumps(extracting)]
    with vllm(folder, dtype, *options, "--kv-transfer-config", json.dumps(writing)) as url:
        own = {"--kd-teacher-hf": None, "--kd-teacher-url": url, "--kd-top-k": None}
        own |= {"--kd-teacher-states-dir": states, "--kd-teacher-head-hf": folder / "teacher"}
        served = train(folder, tmp_path / "served", own)
    found = largest_differences(served, online)
    print(f"{dtype}: largest differences {found}, first step {served.metrics[0]}")
    assert max(found.values()) < most
    assert not list(states.iterdir())


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with vllm(folder, "", "--max-logprobs", TOP_K) as url:
        yield url


def test_vllm(folder: Path, url: str, tmp_path: Path) -> None:
    online = train(folder, tmp_path / "online", {})
    own = {"--kd-teacher-hf": None, "--kd-teacher-url": url, "--kd-teacher-cache": tmp_path / "kept"}
    served = train(folder, tmp_path / "served", own)
    largest = largest_differences(served, online)
    print(f"largest differences {largest}, first step {served.metrics[0]}")
    assert largest["valid_teacher_ce"] < 1e-2 and largest["kd"] < 2e-2
    texts, _ = _sent(served)
    again = train(folder, tmp_path / "again", own | {"--train-iters": 2 * STEPS})
    sent, found = _sent(again)
    print(f"first run: {texts} texts sent; second run, of two epochs: {sent} sent, {found} found")
    assert sent == 0 and found >= texts
    assert [again.metrics[1][name] for name in ("loss", "kd")] == [served.metrics[1][name] for name in ("loss", "kd")]
