"""tools/doctor.py finds each planted mistake, names the flag to change, and more than one at a time."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import util
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars

from mkd import cpu
from mkd.cli import doctor
from mkd.job.doctor import environment
from tests.support.e2e import small_job
from tests.support.e2e.small_job import TEACHER, VOCAB, SmallJob, make_model, make_tokenizer, write_data

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
GPU = {"--bf16": True, "--no-gradient-accumulation-fusion": True}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """A job that is right, and beside it what is wrong."""
    root = tmp_path_factory.mktemp("doctor")
    job = small_job.make_small_job(root)
    shutil.copytree(job.teacher, root / "torn")
    weights = root / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    make_sharded(job.teacher, root / "shardless")
    make_model(
        root / "other_words", make_tokenizer(VOCAB, "one two three four " * 9 + small_job.text()[::-1]), 3, TEACHER
    )
    write_data(root / "beyond", [[1, 2, 3] * 50, [VOCAB] + [5] * 99])
    (root / "file").touch()
    return job


def make_sharded(source: Path, folder: Path) -> None:
    """Two shards by index, of which one is not there."""
    shutil.copytree(source, folder)
    whole = folder / "model.safetensors"
    whole.rename(folder / "model-00001-of-00002.safetensors")
    shards = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.fixture
def ask(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Iterator[Callable[..., tuple[int, str]]]:
    """`ask(changes, nproc, gib)`: exit status and output of the doctor about a job for GPUs."""
    monkeypatch.setattr(cpu, "_stands_in", True)
    monkeypatch.setattr(environment, "cards", list)
    before = dict(os.environ)

    def run(changes: dict, nproc: int = 1, gib: float = 80.0) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["doctor.py"])
        os.environ.pop(cpu.DEVICE_VARIABLE, None)
        flags = [word.replace("{root}", str(job.root)) for word in job.flags({**GPU, **changes})]
        status = doctor.main(["--nproc", str(nproc), "--gpu-memory-gib", str(gib), "--", *flags])
        return status, capsys.readouterr().out

    yield run
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    os.environ.clear()
    os.environ.update(before)


def pretend(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Have `find_spec` answer these modules, None for one that is not there."""
    real = util.find_spec

    def find(name: str, package: str | None = None) -> object:
        return modules[name] if name in modules else real(name, package)

    for module in (
        "job.doctor.environment",
        "job.doctor.run",
        "config.megatron.checks.parts",
        "config.megatron.checks.experts",
    ):
        monkeypatch.setattr(f"mkd.{module}.find_spec", find)


@pytest.fixture
def with_te(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, transformer_engine=object(), apex=None)


def problems(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("problem: ")]


LOCAL = {"--no-rope-fusion": True}
MISTAKES = [
    ("wrong path", 1, {"--kd-teacher-hf": "{root}/missing"}, ["--kd-teacher-hf", "/missing", "does not exist"]),
    ("heads", 3, {TP: 3}, [f"{TP} 3", "4 attention heads of the student"]),
    ("tokenizers", 1, {"--kd-teacher-hf": "{root}/other_words"}, ["different tokenizers", "--kd-teacher-hf"]),
    ("torn checkpoint", 1, {"--kd-student-hf": "{root}/torn"}, ["--kd-student-hf", "truncated", "bytes expected"]),
    ("missing shard", 1, {"--kd-teacher-hf": "{root}/shardless"}, ["--kd-teacher-hf", "00002-of-00002", "missing"]),
    ("ids", 1, {"--data-path": "{root}/beyond"}, ["--data-path", f"token id {VOCAB}", "mkd preprocess"]),
    ("world size", 3, {TP: 2}, [f"{TP} 2", "does not divide the 3 ranks"]),
    ("sequence length", 2, {CP: 2, "--seq-length": 34}, ["--seq-length 34", f"2 * {CP} 2"]),
    ("adapters", 1, {"--kd-lora": 0}, ["--kd-lora 0", "the rank is 0"]),
    ("save folder", 1, {"--save": "{root}/file", "--save-interval": 1}, ["--save", "cannot be written"]),
]


@pytest.mark.parametrize("nproc, changes, words", [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_planted_mistake(ask, with_te, nproc, changes, words):
    status, output = ask({**LOCAL, **changes}, nproc)
    assert status == 1
    found, *others = problems(output)
    for word in words:
        assert word in found
    assert all(word in other for other in others for word in words[:1]), "nothing else is wrong"


def test_a_job_that_is_right(ask, with_te, job):
    status, output = ask({**LOCAL, TP: 2, "--sequence-parallel": True, "--global-batch-size": 8}, nproc=4)
    assert status == 0 and "problems: 0" in output, output
    assert "DP 2, TP 2, SP" in output and "computed by triton" in output and "bfloat16" in output
    assert "Assignment statements" in output and "100.0% of the tokens" in output
    assert "activations" in output and "of 80.0 GiB of GPU memory" in output
    assert not (job.root / "cache").exists(), "nothing is written"


def test_teacher_without_tokenizer_files(ask, with_te, job):
    shutil.copytree(job.teacher, job.root / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    status, output = ask({**LOCAL, "--kd-teacher-hf": "{root}/bare"})
    assert status == 0 and "problems: 0" in output, output
    (found,) = [line for line in output.splitlines() if "cannot be compared" in line]
    assert found.startswith(f"warning: the tokenizer of the teacher --kd-teacher-hf {job.root}/bare "), found
    assert "its folder has no tokenizer files" in found


def test_student_without_tokenizer_files(ask, with_te, job):
    """One problem, which names the flag that was given."""
    bare = shutil.copytree(job.student, job.root / "wordless", ignore=shutil.ignore_patterns("tokenizer*"))
    (job.root / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for flags, name in (
        ({"--kd-student-hf": bare}, "--kd-student-hf"),
        ({"--tokenizer-model": bare}, "--tokenizer-model"),
    ):
        status, output = ask({**LOCAL, **flags, "--data-path": "{root}/chat.jsonl"})
        (found,) = problems(output)
        assert status == 1 and f"{name} {bare} holds no tokenizer (none of tokenizer.json, " in found, output
        assert ("--tokenizer-model DIR" in found) == (name == "--kd-student-hf")
    ids = {**LOCAL, "--kd-student-hf": bare}
    assert ask({**ids, "--tokenizer-type": "NullTokenizer"})[0] == 0
    assert ask({**ids, "--tokenizer-model": job.student})[0] == 0


def test_teacher_with_fewer_positions_than_a_row(ask, with_te, job):
    longer = {**LOCAL, "--kd-packing": "best_fit", "--seq-length": 128}
    status, output = ask(longer)
    assert status == 0 and "problems: 0" in output, output
    limit = f"longer than the 96 positions of the teacher --kd-teacher-hf {job.teacher}"
    (found,) = [line for line in output.splitlines() if line.startswith("warning: ") and "positions" in line]
    assert limit in found and "samples are" in found and "(rows have 128) and are split" in found
    assert f"those {limit} are split" in " ".join(output.split()), "the plan"
    assert "longer than the 96" not in ask({**longer, "--seq-length": 96})[1]


def test_transformer_engine_is_missing(ask, monkeypatch):
    pretend(monkeypatch, transformer_engine=None)
    for changes, nproc, word in (
        ({}, 1, "give --transformer-impl local"),
        ({"--kd-packing": "best_fit"}, 1, "--kd-packing best_fit does not work without it"),
        ({CP: 2}, 2, f"{CP} 2 does not work without it"),
    ):
        with monkeypatch.context() as with_a_card:
            with_a_card.setattr(environment, "cards", lambda: [environment.Card("NVIDIA H100", 79.6, "570")])
            status, output = ask(changes, nproc)
        (found,) = problems(output)
        assert status == 1 and word in found and "pip install 'transformer-engine[pytorch]'" in found
        assert "activations" in output, "the rest is examined"
        status, output = ask(changes, nproc)  # a laptop
        assert status == 0 and "warning: not installed here" in output and word in output
    assert ask({"--transformer-impl": "local", **LOCAL})[0] == 0


def test_another_apex(ask, monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    spec = util.spec_from_file_location(
        "apex", tmp_path / "apex/x.py", submodule_search_locations=[str(tmp_path / "apex")]
    )
    pretend(monkeypatch, transformer_engine=object(), apex=spec)
    status, output = ask({**LOCAL, "--no-gradient-accumulation-fusion": None})
    (found,) = problems(output)
    assert status == 1 and "pip uninstall apex" in found and "--no-gradient-accumulation-fusion" in found
    assert ask(LOCAL)[0] == 0
    (tmp_path / "apex/multi_tensor_apply").mkdir()
    status, output = ask({**LOCAL, "--no-gradient-accumulation-fusion": None})
    assert status == 0 and "NVIDIA Apex is not installed" not in problems(output)


def test_too_little_memory(ask, with_te):
    status, output = ask({**LOCAL, "--micro-batch-size": 1024, "--global-batch-size": 1024}, gib=0.95)
    (found,) = problems(output)
    assert status == 1 and "a GPU has 0.9 GiB (--gpu-memory-gib)" in found
    assert "saves GiB" in output and "--micro-batch-size 512" in output


def test_all_at_once(ask, with_te):
    """Also where the first mistake leaves no job."""
    changes = {"--data-path": "{root}/beyond", "--save": "{root}/file", "--save-interval": 1}
    status, output = ask({**LOCAL, **changes})
    assert status == 1 and len(problems(output)) == 2 and "activations" in output
    more = {**changes, TP: 3, "--kd-teacher-hf": "{root}/torn", "--kd-ratio": 2, "--global-batch-size": 5}
    status, output = ask({**LOCAL, **more}, nproc=3)
    told = "\n".join(problems(output))
    for word in (
        "--kd-ratio is 2.0",
        "truncated",
        f"{TP} 3 does not divide the 4",
        "5 is not div",
        "token id",
        "--save",
    ):
        assert word in told
    assert len(problems(output)) == 6
    for sizes, word in (
        ({TP: 0}, f"{TP} is 0"),
        ({PP: 5}, f"{PP} 5"),
        ({"--micro-batch-size": 0}, "micro-batch-size is 0"),
    ):
        status, output = ask({**LOCAL, **sizes})
        assert status == 1 and word in "".join(problems(output))


def test_a_wrong_length_in_epochs_hides_nothing(ask, with_te):
    """The flags that every run needs, and what follows from the others. The length itself is not missing."""
    changes = {"--kd-epochs": 2, "--train-iters": None, "--global-batch-size": None, "--lr": None, "--seq-length": 34}
    told = problems(ask({**LOCAL, CP: 2, **changes}, nproc=2)[1])
    for word in ("--kd-epochs 2 needs --global-batch-size", "--lr is missing (peak learning rate)", "--seq-length 34"):
        assert sum(word in problem for problem in told) == 1, word
    assert len(told) == 3


def test_the_same_text_over_and_over(ask, with_te):
    often = {"--train-iters": 100000, "--eval-iters": 20, "--global-batch-size": 256}
    for changes, count in ((often, 1), ({**often, "--kd-packing": "best_fit", "--eval-iters": 2000}, 2)):
        status, output = ask({**LOCAL, **changes})
        told = [line for line in output.splitlines() if line.startswith("warning: ") and "rows, " in line]
        assert status == 0 and len(told) == count and "training reads" in told[0] and "--train-iters" in told[0], output
    assert "rows wanted, 0.00 epochs" not in output


def test_flags_that_cannot_be_read_hide_nothing(ask, with_te):
    """Nor does one refused value hide the next."""
    unread = {"--kd-temprature": 2, "--lr": "fast", "--bf16": "true", "--kd-student-hf": "{root}/nowhere", TP: 3}
    status, output = ask({**LOCAL, **unread, "--sft": True}, nproc=3)
    told = problems(output)
    for word in (
        "--kd-temprature 2 (did you mean --kd-temperature?)",
        "--lr: invalid float value: 'fast'",
        "unknown on the command line: true",
        "--sft is not supported",
        "nowhere",
        f"{TP} 3 does not divide",
    ):
        assert sum(word in problem for problem in told) == 1, word
    assert status == 1 and len(told) == 6
    refused = {"--kd-ratio": 1.5, "--kd-temperature": 0, "--kd-top-k": 0, "--kd-teacher-hf": None, "--lr": -1}
    refused["--load"] = "{root}/nothing_there"
    status, output = ask({**LOCAL, **refused})
    told = problems(output)
    for word in (
        "--kd-ratio is 1.5",
        "--kd-temperature is 0.0",
        "--kd-top-k is 0",
        "one teacher source",
        "--lr is -1.0; it must be at least 0",
        "--load",
    ):
        assert sum(word in problem for problem in told) == 1, word
    assert status == 1 and len(told) == 6


def test_the_command_itself(job):
    """In a Python of its own: the redirect for a GPU's job is in place before megatron is."""
    flags = ["--nproc", "2", "--gpu-memory-gib", "80", "--", *job.flags({**GPU, **LOCAL, TP: 2})]
    environ = {name: value for name, value in os.environ.items() if name != cpu.DEVICE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "tools/doctor.py", *flags], cwd=small_job.ROOT, env=environ, capture_output=True, text=True
    )
    assert "ranks: 2, nodes: 1, on GPUs" in done.stdout and "DP 1, TP 2" in done.stdout, done.stderr
    assert done.returncode == int("problems: 0" not in done.stdout)
    assert "Traceback" not in done.stderr


def test_warnings_about_the_machine(ask, with_te, job, monkeypatch):
    monkeypatch.setattr(environment, "cards", lambda: [environment.Card("NVIDIA H100", 79.6, "570")])
    monkeypatch.setattr("mkd.job.doctor.run.shutil.disk_usage", lambda path: SimpleNamespace(free=2**10))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    changes = {**LOCAL, TP: 2, "--save": job.root / "new/folder", "--save-interval": 1}
    status, output = ask(changes, nproc=2)
    assert status == 0, output
    for words in ("--nproc is 2, this machine has 1 GPUs", "0.0 GiB are free"):
        assert words in output
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in output, "the job sets it"


def test_hardware_queues_that_megatron_refuses(ask, with_te, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    status, output = ask({**LOCAL, TP: 2}, nproc=2)
    assert status == 1 and "problem: megatron refuses the flags" in output
    assert "CUDA_DEVICE_MAX_CONNECTIONS to 1" in output


SCRIPT_FLAGS = """
    --use-mcore-models --attention-backend fused --init-method-std 0.0134 --train-samples 400 --lr-decay-samples 390
    --lr-warmup-samples 40 --min-lr 1e-5 --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --exit-signal-handler --tokenizer-type HuggingFaceTokenizer
"""
"""Those of Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh but for sizes, batch and paths."""


def test_flags_of_a_script_of_megatron_stay(ask, with_te, job):
    flags: dict[str, object] = {"--train-iters": None, "--tokenizer-model": job.student}
    for words in SCRIPT_FLAGS.replace("--", "\n--").split("\n"):
        if words.strip():
            flag, *values = words.split()
            flags[flag] = values or True
    status, output = ask({**LOCAL, **flags, "--seq-length": 32})
    assert status == 0, output
    removed = {"--use-legacy-models": True, "--spec": ["my.layers", "layer"]}
    status, output = ask({**LOCAL, **flags, **removed})
    assert [line.split(" (")[0].split(": leave")[0] for line in problems(output)] == [
        "problem: unknown on the command line: --use-legacy-models",
        "problem: --spec my.layers is not supported",
    ]
    assert f"(megatron-core {version('megatron-core')} has no such flag, other versions may" in output


@pytest.mark.parametrize("flags", [{"--kd-teacher-dtype": "fp8"}, {"--fp8-format": "hybrid"}], ids=" ".join)
def test_fp8_is_judged_by_the_capability_of_the_job_s_gpus(ask, with_te, monkeypatch, flags):
    """Not by that of the device which stands in for one, and which no card has."""
    ((flag, value),) = flags.items()
    status, output = ask({**LOCAL, **flags})
    assert status == 0 and f"{flag} {value} needs GPUs of compute capability 8.9 or higher" in output, output
    monkeypatch.setattr(cpu, "_capability", (9, 0))
    status, output = ask({**LOCAL, **flags})
    assert status == 0 and "compute capability" not in output
    monkeypatch.setattr(cpu, "_capability", (8, 0))
    status, output = ask({**LOCAL, **flags})
    assert status == 1 and f"{flag} is {value}, but this GPU has compute capability (8, 0)" in problems(output)[0]


def test_all_problems_of_a_file_of_flags_are_found(job: SmallJob, ask: Callable[..., tuple[int, str]]) -> None:
    (job.root / "bad.yaml").write_text("kd-temprature: 2\nseq-length: many\nkd-beta: 7\nkd-loss: jsd\n")
    status, text = ask({"--kd-config": "{root}/bad.yaml", "--seq-length": None})
    assert status == 1
    for problem in ("line 1: no flag is named kd-temprature", "line 2: --seq-length: invalid int", "--kd-beta"):
        assert problem in text
    (job.root / "good.yaml").write_text("seq-length: 32\n")
    assert ask({**LOCAL, "--kd-config": "{root}/good.yaml", "--seq-length": None})[0] == 0


def test_a_file_of_flags_that_cannot_be_read_is_the_only_problem(ask: Callable[..., tuple[int, str]]) -> None:
    """Not one of many: everything that the file may hold would be missing."""
    for flags in ({}, {"--kd-teacher-hf": None, "--lr": None, "--seq-length": None}):
        status, text = ask({**flags, "--kd-config": "{root}/absent.yaml"})
        (problem,) = problems(text)
        assert status == 1 and "absent.yaml cannot be read (No such file" in problem
        assert "cpu mkd doctor ... checks a run on CPU)" in text, "a sentence is not cut at the terminal's width"
    assert any("--kd-temprature" in line for line in problems(ask({"--kd-config": "no", "--kd-temprature": 2})[1]))


def test_a_file_of_flags_may_be_named_alone() -> None:
    assert doctor.parse_arguments(["--kd-config", "a", "b"])[1] == ["--kd-config", "a", "b"]
    assert doctor.parse_arguments(["--kd-config", "a", "--", "--lr", "1"])[1] == ["--kd-config", "a", "--lr", "1"]
    assert doctor.parse_arguments([])[1] is None
