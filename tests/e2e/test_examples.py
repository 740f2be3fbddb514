"""The launch scripts of examples/: the commands that they start, and short trainings on CPU."""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkd.checkpoint.megatron.folder import TRACKER
from tests.support.chats import MARKED, chat_tokenizer, talk, write_lines
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, VOCAB, SmallJob, free_port, make_small_job, text
from tests.support.hf_folders import make_model

LLAMA = ROOT / "examples/llama/8b_to_1b.sh"
QWEN = ROOT / "examples/qwen/32b_to_8b.sh"
BOTH = pytest.mark.parametrize("script", [LLAMA, QWEN], ids=lambda path: path.parent.name)
SHORT = {"SEQ_LENGTH": "64", "GLOBAL_BATCH_SIZE": "4", "TRAIN_ITERS": "3", "SAVE_INTERVAL": "2", "EVAL_ITERS": "1"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def executables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quick `python`, and a `torchrun` that prints its arguments."""
    with serving(tmp_path_factory.mktemp("python")) as folder:
        torchrun = folder / "torchrun"
        torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        torchrun.chmod(0o755)
        yield folder


@pytest.fixture
def paths(job: SmallJob, tmp_path: Path) -> dict[str, str]:
    """Variables that the scripts require."""
    data = write_lines(tmp_path / "chats.jsonl", [])
    found = {"TEACHER": job.teacher, "STUDENT": job.student, "DATA": data, "SAVE": tmp_path / "save"}
    return {name: str(path) for name, path in found.items()}


def start(script: Path, executables: Path, variables: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MKD_DEVICE", "RANK", "WORLD_SIZE")
    }
    environment |= {"PATH": f"{executables}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", script, *flags], env=environment, cwd="/", capture_output=True, text=True, timeout=300
    )


def words(script: Path, executables: Path, variables: dict[str, str], *flags: str) -> list[str]:
    """The arguments that torchrun received."""
    done = start(script, executables, variables, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def train(script: Path, executables: Path, variables: dict[str, str], *flags: str) -> None:
    """Train three steps on two ranks, started like ranks of srun or torchrun."""
    common = {"MKD_DEVICE": "cpu", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **common, **SHORT, **variables, "PATH": f"{executables}:{os.environ['PATH']}"}
    ranks = [
        subprocess.Popen(
            ["bash", script, *flags],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    output = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], output[0][-3000:] + output[1][-3000:]
    save = Path(variables["SAVE"])
    assert (save / TRACKER).read_text() == "3"
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "grad_norm" in line] == [1, 2, 3]


def test_llama_trains(job: SmallJob, executables: Path, paths: dict[str, str]) -> None:
    train(LLAMA, executables, {**paths, "DATA": str(job.data)}, "--split", "90,10,0")


def test_qwen_trains_with_tensor_parallelism(executables: Path, paths: dict[str, str], tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, wide in (("teacher", 64), ("student", 32)):
        make_model(tmp_path / name, "qwen3", hidden_size=wide, intermediate_size=2 * wide, **sizes)
        chat_tokenizer(tmp_path / name, MARKED)
    draw, vocabulary = random.Random(0), text().split()
    chats = [talk(*(" ".join(draw.choices(vocabulary, k=draw.randrange(2, 9))) for _ in range(2))) for _ in range(100)]
    write_lines(Path(paths["DATA"]), [{"messages": messages} for messages in chats])
    models = {"TEACHER": str(tmp_path / "teacher"), "STUDENT": str(tmp_path / "student")}
    # Its random teacher is worse than uniform guessing.
    train(QWEN, executables, {**paths, **models}, "--split", "80,20,0", "--kd-allow-bad-teacher")


@BOTH
def test_one_node_and_several(script: Path, executables: Path, paths: dict[str, str]) -> None:
    one = words(script, executables, paths, "--kd-dry-run")
    assert one[:4] == ["--standalone", "--nproc-per-node", "8", str(ROOT / "pretrain_kd.py")]
    assert "--bf16" in one
    assert one[-1] == "--kd-dry-run"
    four = words(script, executables, {**paths, "NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "first"})
    assert " ".join(four).startswith(
        "--nnodes 4 --node-rank 2 --master-addr first --master-port 29500 --nproc-per-node 8 "
    )
    # More nodes are more replicas: the run stays the same.
    assert one[4:-1] == four[four.index(one[3]) + 1 :]


@BOTH
def test_a_cpu_trial_has_no_gpu_flags(script: Path, executables: Path, paths: dict[str, str]) -> None:
    trial = words(script, executables, {**paths, "MKD_DEVICE": "cpu"})
    assert trial[2] == "2"
    assert "--bf16" not in trial


@BOTH
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TEACHER": ""}, "TEACHER is not set: the teacher's Hugging Face folder"),
        ({"STUDENT": "/nowhere"}, "STUDENT is /nowhere, which does not exist"),
        ({"DATA": ""}, "DATA is not set"),
        ({"SAVE": ""}, "SAVE is not set"),
        ({"NNODES": "2"}, "NODE_RANK is not set: the number of this node, from 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"TP": "3"}, "8 is not a multiple of 3: NNODES x GPUS_PER_NODE ranks by TP x PP x CP"),
        ({"GLOBAL_BATCH_SIZE": "33"}, "GLOBAL_BATCH_SIZE by DP x MICRO_BATCH_SIZE"),
    ],
)
def test_missing_variables_and_indivisible_sizes(
    script: Path, changes: dict[str, str], message: str, executables: Path, paths: dict[str, str]
) -> None:
    done = start(script, executables, {**paths, **changes})
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"{script.name}: error: ")
    assert message in done.stderr
    assert done.stdout == ""
