"""Everything a user can get wrong on the command line of pretrain_kd.py: refused before training, in one line that
names the value and the flag.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars

from mkd.config import flags
from mkd.errors import MkdCheckpointError, MkdConfigError, MkdDataError, MkdError, MkdNodeError
from mkd.job.job import Job
from mkd.job.plan.plan import plan
from tests.support.e2e import small_job
from tests.support.e2e.small_job import END, STUDENT, TEACHER, VOCAB, SmallJob, make_model, make_tokenizer, write_data
from tests.support.hf_folders import change_json

TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
CP = "--context-parallel-size"
BATCH, LEVELS = "--global-batch-size", "--hierarchical-context-parallel-sizes"
KD_TP, KD_PP, KD_CP, KD_EP = (flag.replace("--", "--kd-teacher-") for flag in (TP, PP, CP, EP))
SAVE = {"--save": "{root}/never", "--save-interval": 1}
FROM_NOTHING = {
    "--kd-student-hf": None,
    "--num-layers": 4,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--max-position-embeddings": 128,
    "--position-embedding-type": "rope",
    "--tokenizer-type": "HuggingFaceTokenizer",
    "--tokenizer-model": "{root}/student",
}
"""The flags of a random student."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """A job that is right, and beside it all that is wrong."""
    root = tmp_path_factory.mktemp("bad")
    job = small_job.make_small_job(root)
    _bad_models(job)
    _bad_data(root)
    (root / "nothing").mkdir()
    (root / "file").touch()
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to("nothing")
    return job


def _bad_models(job: SmallJob) -> None:
    root, same = job.root, make_tokenizer()
    for name in ("torn", "headless", "other_family", "fewer_layers"):
        shutil.copytree(job.teacher, root / name)
    weights = root / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "headless" / "model.safetensors").write_bytes(b"\x10\x00")
    change_json(root / "other_family" / "config.json", {"architectures": ["MambaForCausalLM"]})
    change_json(root / "fewer_layers" / "config.json", {"num_hidden_layers": 5})
    make_model(root / "five_layers", same, 3, {**TEACHER, "num_hidden_layers": 5})
    make_model(
        root / "nine_heads", same, 3, {**TEACHER, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    )
    make_model(root / "three_groups", same, 3, {**TEACHER, "num_key_value_heads": 3})
    words = "one two three four five six seven eight nine ten eleven twelve "
    make_model(root / "other_words", make_tokenizer(VOCAB, words * 9 + small_job.text()[::-1]), 3, TEACHER)
    make_model(root / "no_tokenizer", make_tokenizer(VOCAB + 5), 3, TEACHER)
    (root / "no_tokenizer" / "tokenizer.json").unlink()


def _bad_data(root: Path) -> None:
    facts = {"documents": 1, "tokens": 150, "max_token_id": 400, "vocab_size": 401, "tokenizer_hash": None}
    facts |= {"eod": None, "dtype": "int32", "skipped": 0}
    for name in ("sidecar_ids", "sidecar_hash", "sidecar_torn", "sidecar_old", "torn_bin", "torn_idx"):
        write_data(root / name, [[1, 2, 3] * 50])
    write_data(root / "two_documents", [[1, 2, 3] * 50, [4, 5] * 50])
    write_data(root / "beyond", [[1, 2, 3] * 50, [VOCAB] + [5] * 99])
    (root / "sidecar_ids.json").write_text(json.dumps(facts))
    (root / "sidecar_hash.json").write_text(json.dumps(facts | {"max_token_id": 3, "tokenizer_hash": "0" * 32}))
    (root / "sidecar_torn.json").write_text("{")
    (root / "sidecar_old.json").write_text(json.dumps(facts | {"tokens": 151, "max_token_id": 3}))
    for name in ("torn_bin.bin", "torn_idx.idx"):
        (root / name).write_bytes((root / name).read_bytes()[:-8])
    for name in ("empty.bin", "empty.idx", "no_index.bin"):
        (root / name).touch()
    for suffix in ("bin", "idx"):
        (root / f"text.{suffix}").write_text("plain text" * 9)


@pytest.fixture
def attempt(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """`attempt(changes, ranks)`: check a command line as rank 0 of `ranks` ranks; it sets megatron's globals."""

    def check(changes: dict, ranks: int = 1) -> Job:
        for name, value in {**small_job.environment(), "WORLD_SIZE": str(ranks)}.items():
            monkeypatch.setenv(name, value)
        flags = [word.replace("{root}", str(job.root)) for word in job.flags(changes)]
        monkeypatch.setattr(sys, "argv", ["pretrain_kd.py", *flags])
        forget_megatron()
        return Job.from_command_line()

    before = dict(os.environ)
    yield check
    forget_megatron()
    os.environ.clear()
    os.environ.update(before)


def forget_megatron() -> None:
    """Leave no global of an earlier command line."""
    destroy_global_vars()
    destroy_num_microbatches_calculator()


def refused(attempt: Callable[..., Job], kind: type[MkdError], changes: dict, words: list[str], ranks: int = 1) -> None:
    with pytest.raises(kind) as caught:
        attempt(changes, ranks)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_job_itself_is_accepted(attempt):
    job = attempt({})
    assert job.true_vocab == VOCAB
    assert job.student_config.transformer.hidden_size == STUDENT["hidden_size"]
    assert job.teacher.config.transformer.hidden_size == TEACHER["hidden_size"]


def test_a_size_flag_that_agrees_with_the_folder_is_accepted(attempt):
    assert attempt({"--hidden-size": 32, "--num-layers": 4}).args.hidden_size == 32


def test_a_random_student_is_accepted(attempt):
    job = attempt(FROM_NOTHING)
    assert job.student_source is None
    assert plan(job)["student"].endswith("weights: random")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "R T^2 forward_kl, R = "),
        ({"--kd-loss": "jsd", "--kd-beta": 0.25}, "R T^2 jsd (beta 0.25), R = "),
        ({"--kd-loss": "skew_reverse_kl", "--kd-temperature": 2.0}, "skew_reverse_kl (skew 0.1) (kd is shown with its"),
    ],
    ids=str,
)
def test_the_plan_tells_the_whole_loss(attempt, flags, said):
    found = plan(attempt(flags))
    assert said in found["loss"]
    assert found["memory"].endswith("comes on top")  # on CPU


def test_a_restarting_job_may_name_the_folder_that_it_will_write(attempt):
    assert "never" in str(attempt({**SAVE, "--load": "{root}/never"}).args.load)


TEACHERS = [
    ("missing", ["the folder does not exist"]),
    ("nothing", ["the folder is empty"]),
    ("file", ["this is a file"]),
    ("torn", ["model.safetensors is truncated", "bytes expected"]),
    ("headless", ["model.safetensors is not a safetensors file"]),
    ("other_family", ["MambaForCausalLM", "LlamaForCausalLM"]),
    ("fewer_layers", ["tensor model.layers.4", "is missing"]),
]


@pytest.mark.parametrize("flag", ["--kd-teacher-hf", "--kd-student-hf"])
@pytest.mark.parametrize("folder, words", TEACHERS, ids=[name for name, _ in TEACHERS])
def test_broken_folder(attempt, flag, folder, words):
    refused(attempt, MkdCheckpointError, {flag: "{root}/" + folder}, [flag, f"/{folder}", *words])


@pytest.mark.parametrize("folder", ["missing", "nothing", "teacher"])
def test_megatron_teacher_without_a_checkpoint(attempt, folder):
    changes = {"--kd-teacher-hf": None, "--kd-teacher-load": "{root}/" + folder}
    refused(attempt, MkdCheckpointError, changes, ["--kd-teacher-load", f"/{folder}"])


SETTINGS = [
    ({"--kd-teacher-hf": None}, ["got none", "--kd-teacher-hf", "--kd-teacher-load"]),
    (
        {**FROM_NOTHING, "--tokenizer-type": "NullTokenizer", "--tokenizer-model": None, "--vocab-size": 99},
        ["--tokenizer-type NullTokenizer has a vocabulary of 99 tokens"],
    ),
    ({"--kd-teacher-load": "some"}, ["got --kd-teacher-hf", "--kd-teacher-load some"]),
    ({"--kd-ratio": None}, ["--kd-ratio is required"]),
    ({"--kd-ratio": 1.5}, ["--kd-ratio is 1.5", "[0, 1]"]),
    ({"--kd-ratio": -0.1}, ["--kd-ratio is -0.1", "[0, 1]"]),
    ({"--kd-ratio": "half"}, ["--kd-ratio", "'half'"]),
    ({"--kd-temperature": 0}, ["--kd-temperature is 0.0", "> 0"]),
    ({"--kd-temperature": -2}, ["--kd-temperature is -2.0", "> 0"]),
    ({"--kd-loss": "kl"}, ["--kd-loss", "'kl'", "forward_kl"]),
    ({"--kd-hidden-loss": "1:2,3"}, ["--kd-hidden-loss is '1:2,3'", "'3' is not a pair"]),
    ({"--kd-hidden-loss": "1:1,5:2"}, ["--kd-hidden-loss has the pair 5:2", "student has no layer 5", "1 to 4"]),
    ({"--kd-hidden-loss": "0:2"}, ["--kd-hidden-loss has the pair 0:2", "student has no layer 0"]),
    ({"--kd-hidden-loss": "1:5"}, ["--kd-hidden-loss has the pair 1:5", "teacher has no layer 5", "1 to 4"]),
    ({"--kd-hidden-loss": "1:1", "--kd-ratio": 0}, ["--kd-hidden-loss is 1:1", "R = 0"]),
    ({"--kd-hidden-loss-type": "l1"}, ["--kd-hidden-loss-type", "'l1'", "mse"]),
    ({"--kd-teacher-dtype": "int8"}, ["--kd-teacher-dtype", "'int8'", "bf16"]),
    ({"--kd-temprature": 2}, ["--kd-temprature 2", "did you mean --kd-temperature?"]),
    ({"--qwertyuiop": True}, ["--qwertyuiop", "--help"]),
    ({"--lr": None}, ["--lr is missing"]),
    ({"--seq-length": None}, ["--seq-length is missing"]),
    ({"--micro-batch-size": None}, ["--micro-batch-size is missing"]),
    ({"--train-iters": None}, ["--train-iters is missing"]),
    ({"--lr-warmup-iters": 9, "--train-iters": 9}, ["--lr-warmup-iters 9", "--train-iters 9"]),
    ({"--lr-warmup-iters": 4, "--lr-decay-iters": 3}, ["--lr-warmup-iters 4", "--lr-decay-iters 3"]),
    ({"--lr": 1e-4, "--min-lr": 1e-3}, ["--min-lr 0.001", "--lr 0.0001"]),
    ({"--eval-interval": 0}, ["--eval-interval is 0", "--eval-iters 0"]),
    ({"--lr-decay-style": "WSD"}, ["--lr-wsd-decay-iters"]),
    (
        {"--no-load-optim": True, "--use-checkpoint-opt-param-scheduler": True},
        ["--use-checkpoint-opt-param-scheduler does not work with --no-load-optim", "leave one of them out"],
    ),
    ({"--kd-student-hf": None}, ["--num-layers is missing", "--kd-student-hf"]),
    ({"--non-persistent-save-interval": 1}, ["--non-persistent-save-interval is not supported", "--kd-keep-last"]),
    ({"--save": "{root}/never", "--save-interval": 1, "--ckpt-format": "torch"}, ["--ckpt-format torch is not"]),
    ({"--adlr-autoresume": True}, ["--adlr-autoresume is not supported", "SIGTERM"]),
    ({"--init-model-with-meta-device": True}, ["--init-model-with-meta-device is not supported"]),
    ({"--exp-avg-dtype": "bf16"}, ["--exp-avg-dtype bf16", "--use-precision-aware-optimizer"]),
    ({**FROM_NOTHING, "--qk-l2-norm": True}, ["--qk-l2-norm", "--transformer-impl transformer_engine"]),
    ({"--save": "{root}/never"}, ["--save ", "--save-interval"]),
    ({"--global-batch-size": 3}, ["--global-batch-size 3", "--micro-batch-size 2"]),
    ({"--fp16": True, "--bf16": True}, ["--bf16 and --fp16", "give one of them"]),
    ({"--fp8-format": "hybrid"}, ["--fp8-format is hybrid"]),
    ({"--split": "1,2,3,4"}, ["--split 1,2,3,4"]),
    ({"--kd-metrics-file": "{root}/pipe"}, ["--kd-metrics-file", "/pipe is a named pipe", "path of a file"]),
    ({"--kd-metrics-file": "{root}/link"}, ["--kd-metrics-file", "/link leads to", "/nothing, which is a folder"]),
]


@pytest.mark.parametrize(
    "changes, words", SETTINGS, ids=[" ".join(map(str, next(iter(c.items())))) for c, _ in SETTINGS]
)
def test_wrong_setting(attempt, changes, words):
    refused(attempt, MkdConfigError, changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--save": "{root}/file", "--save-interval": 1}, ["--save", "/file cannot be written"]),
        ({"--kd-metrics-file": "{root}/file/metrics.jsonl"}, ["--kd-metrics-file", "/file cannot be written"]),
        ({"--tokenizer-model": "{root}/absent"}, ["--tokenizer-model", "/absent cannot be loaded"]),
    ],
)
def test_path_that_this_node_cannot_use(attempt, changes, words):
    """Another node may: SLURM's next attempt is made there."""
    refused(attempt, MkdNodeError, changes, words)


@pytest.mark.parametrize("flag", flags.UNSUPPORTED)
def test_flag_that_is_not_supported(attempt, flag):
    refused(attempt, MkdConfigError, {flag: True}, [f"{flag} is not supported", flags.UNSUPPORTED[flag]])


@pytest.mark.parametrize("value", flags.UNSUPPORTED_VALUES["--dataloader-type"])
def test_value_that_is_not_supported(attempt, value):
    refused(attempt, MkdConfigError, {"--dataloader-type": value}, [f"--dataloader-type {value} is not supported"])


@pytest.mark.parametrize(
    "flag",
    [
        "--logits-load-dir",
        "--logits-save-dir",
        "--export-kd-cfg",
        "--export-kd-teacher-load",
        "--freeze-all-layers",
        "--ddp-average-in-collective",
        "--yaml-cfg",
        "--perform-rl-step",
        "--rl-use-sequence-packing",
        "--grpo-iterations",
        "--hybrid-layer-pattern",
        "--mtp-num-layers",
    ],
)
def test_flag_that_contradicts_distillation(attempt, flag):
    refused(attempt, MkdConfigError, {flag: "value"}, [f"{flag} contradicts distillation", "--kd-"])
    refused(attempt, MkdConfigError, {f"{flag}=value": True}, [f"{flag} contradicts distillation"])


LAYOUTS = [
    (1, {TP: 2}, [f"{TP} 2", "the 1 ranks"]),
    (1, {PP: 2}, [f"{PP} 2", "the 1 ranks"]),
    (4, {TP: 3}, [f"{TP} 3", "the 4 ranks"]),
    (3, {TP: 3}, [f"{TP} 3", "4 attention heads of the student"]),
    (4, {TP: 4}, [f"{TP} 4", "2 key-value heads", "the student"]),
    (3, {PP: 3}, [f"{PP} 3", "4 layers of the student"]),
    (2, {TP: 2, "--kd-teacher-hf": "{root}/nine_heads"}, [f"{TP} 2", "9 attention heads of the teacher"]),
    (2, {TP: 2, "--kd-teacher-hf": "{root}/three_groups"}, [f"{TP} 2", "3 key-value heads", "the teacher"]),
    (2, {PP: 2, "--kd-teacher-hf": "{root}/five_layers"}, [f"{PP} 2", "5 layers of the teacher"]),
    (1, {TP: 0}, [f"{TP} is 0"]),
    (1, {PP: -1}, [f"{PP} is -1"]),
    (1, {CP: 2}, [f"{CP} 2", "the 1 ranks"]),
    (2, {"--seq-length": 34, CP: 2}, ["--seq-length 34", f"2 * {CP} 2"]),
    (2, {EP: 2}, ["num_experts", "expert model parallelism"]),
    (3, {**FROM_NOTHING, EP: 2, "--num-experts": 4}, [f"{EP} 2", "the 3 ranks"]),
    (
        2,
        {**FROM_NOTHING, TP: 2, "--num-experts": 4, "--disable-bias-linear": True},
        [f"{TP} 2", "--sequence-parallel", "4 experts"],
    ),
    (2, {TP: 2, "--sequence-parallel": True, "--seq-length": 33}, ["--seq-length 33", f"{TP} 2"]),
    (2, {PP: 2, "--num-layers-per-virtual-pipeline-stage": 3}, ["virtual pipeline stage"]),
    (2, {PP: 2, "--num-layers-per-virtual-pipeline-stage": 1, BATCH: 2}, [f"{BATCH} 2 gives 1 micro", "virtual"]),
    (4, {BATCH: 8, KD_TP: 3}, [f"{KD_TP} 3", "the 4 ranks"]),
    (4, {BATCH: 8, KD_TP: 4}, [f"{KD_TP} 4", "6 attention heads of the teacher"]),
    (2, {KD_PP: 2, "--kd-teacher-hf": "{root}/five_layers"}, [f"{KD_PP} 2", "5 layers of the teacher"]),
    (2, {KD_TP: 2, "--seq-length": 33}, ["--seq-length 33", f"{KD_TP} 2"]),
    (2, {KD_CP: 2, "--seq-length": 34}, ["--seq-length 34", f"2 * {KD_CP} 2"]),
    (2, {KD_CP: 2, "--kd-packing": "best_fit", "--kd-packing-multiple": 2}, ["--kd-packing-multiple 2", f"{KD_CP} 2"]),
    (2, {KD_EP: 2}, [f"{KD_EP} is 2", "--kd-teacher-hf", "no experts"]),
    (2, {KD_TP: 0}, [f"{KD_TP} is 0"]),
    (2, {KD_PP: 2, "--kd-hidden-loss": "1:1"}, [f"{KD_PP} 2", "--kd-hidden-loss 1:1"]),
    (2, {KD_CP: 2, "--kd-teacher-hf": None, "--kd-teacher-cache": "C"}, [f"{KD_CP} 2", "--kd-teacher-cache C"]),
    (4, {BATCH: 8, "--cp-comm-type": "a2a", KD_CP: 4}, ["--cp-comm-type a2a", "6 attention heads"]),
    (4, {CP: 4, "--cp-comm-type": "a2a+p2p", LEVELS: [2, 2], KD_CP: 2}, [f"{KD_CP} 2", f"{LEVELS} 2 2"]),
]


@pytest.mark.parametrize(
    "ranks, changes, words",
    LAYOUTS,
    ids=[f"{n} ranks {' '.join(map(str, list(c.items())[-1]))}" for n, c, _ in LAYOUTS],
)
def test_layout_that_does_not_divide(attempt, ranks, changes, words):
    refused(attempt, MkdConfigError, changes, words, ranks)


def test_sequence_longer_than_the_positions(attempt):
    assert TEACHER["max_position_embeddings"] == 96 and STUDENT["max_position_embeddings"] == 128
    refused(attempt, MkdConfigError, {"--seq-length": 97}, ["--seq-length 97", "teacher's 96 positions"])
    refused(attempt, MkdConfigError, {"--seq-length": 129}, ["--seq-length 129", "student's 128 positions"])


@pytest.mark.parametrize(
    "flag, value, of_folder",
    [
        ("--hidden-size", 999, 32),
        ("--num-layers", 2, 4),
        ("--num-attention-heads", 8, 4),
        ("--vocab-size", 300, VOCAB),
        ("--rotary-base", 7, 10000),
        ("--glu-linear-offset", 0.5, 0.0),
        ("--activation-func-clamp-value", 7.0, None),
        ("--normalization", "LayerNorm", "RMSNorm"),
        ("--max-position-embeddings", 64, 128),
    ],
)
def test_size_that_contradicts_the_student_folder(attempt, flag, value, of_folder):
    words = [f"{flag} is {value}", "--kd-student-hf", f"has {of_folder}"]
    refused(attempt, MkdConfigError, {flag: value}, words)


def test_other_tokenizer(attempt, job):
    words = ["different tokenizers", "--kd-student-hf", "--kd-teacher-hf", "/other_words", "--kd-xtoken-loss"]
    refused(attempt, MkdConfigError, {"--kd-teacher-hf": "{root}/other_words"}, words)
    words = [f"vocabulary of {VOCAB} tokens", f"one of {VOCAB + 5}", "/no_tokenizer", "--kd-xtoken-loss"]
    refused(attempt, MkdConfigError, {"--kd-teacher-hf": "{root}/no_tokenizer"}, words)
    changes = {"--tokenizer-model": "{root}/other_words"}
    refused(attempt, MkdConfigError, changes, ["--tokenizer-model", "/other_words", "--kd-student-hf"])
    refused(attempt, MkdDataError, {"--tokenizer-model": "{root}/nothing"}, ["--tokenizer-model", "/nothing"])


def test_starting_points_without_a_checkpoint(attempt):
    for folder in ("missing", "nothing"):
        refused(attempt, MkdCheckpointError, {"--load": "{root}/" + folder}, ["--load", f"/{folder}", "no checkpoint"])
    changes = {**FROM_NOTHING, "--pretrained-checkpoint": "{root}/missing"}
    refused(attempt, MkdCheckpointError, changes, ["--pretrained-checkpoint", "/missing"])
    changes = {"--pretrained-checkpoint": "{root}/missing"}
    refused(attempt, MkdConfigError, changes, ["--pretrained-checkpoint", "--kd-student-hf", "give one of them"])


DATA = [
    ("missing", ["missing.idx does not exist"]),
    ("no_index", ["no_index.idx does not exist"]),
    ("empty", ["empty.idx is empty"]),
    ("text", ["text.idx is not an index"]),
    ("torn_idx", ["torn_idx.idx is truncated"]),
    ("torn_bin", ["torn_bin.bin has 592 bytes", "600"]),
    ("beyond", [f"token id {VOCAB}", f"{VOCAB} tokens", "mkd preprocess"]),
    ("sidecar_ids", ["token id 400", f"{VOCAB} tokens", "mkd preprocess"]),
    ("sidecar_hash", ["sidecar_hash.json", "a different tokenizer", "--tokenizer-model"]),
    ("sidecar_torn", ["sidecar_torn.json is broken"]),
    ("sidecar_old", ["sidecar_old.json describes 151 tokens"]),
]


@pytest.mark.parametrize("prefix, words", DATA, ids=[name for name, _ in DATA])
def test_wrong_data(attempt, prefix, words):
    refused(attempt, MkdDataError, {"--data-path": "{root}/" + prefix}, [prefix, *words])


def test_every_part_of_a_blend_is_checked(attempt, job):
    good, bad = str(job.data), "{root}/missing"
    words = ["/missing.idx does not exist"]
    refused(attempt, MkdDataError, {"--data-path": ["0.3", good, "0.7", bad]}, words)
    refused(attempt, MkdDataError, {"--data-path": [good, good, bad]}, words)
    refused(attempt, MkdDataError, {"--data-path": None, "--train-data-path": good, "--valid-data-path": bad}, words)
    listed = job.root / "blend.txt"
    listed.write_text(f"1 {good} 2 {job.root}/missing")
    refused(attempt, MkdDataError, {"--data-path": None, "--data-args-path": listed}, words)


def test_no_data(attempt, job):
    refused(attempt, MkdDataError, {"--data-path": None}, ["--data-path"])
    per_split = {"--data-path": None, "--split": None, "--train-data-path": job.data}
    refused(attempt, MkdDataError, per_split, ["no validation data", "--valid-data-path", "--eval-iters 0"])
    assert attempt({**per_split, "--eval-iters": 0}).args.eval_iters == 0
    assert attempt({**per_split, "--valid-data-path": job.data}).args.eval_iters == 1


@pytest.mark.parametrize(
    "split, words",
    [
        ("100,0,0", ["no validation data", "--split (now 100,0,0)", "--eval-iters 0"]),
        ("0,100,0", ["no training data", "--split (now 0,100,0)"]),
        ("90,10,0", ["--split 90,10,0", "none of the 2 documents", "for validation"]),
        ("50,50,1", ["--split 50,50,1", "none of the 2 documents", "for test"]),
    ],
)
def test_split_without_a_document(attempt, split, words):
    """Megatron itself would count the epochs of an empty split for ever."""
    refused(attempt, MkdDataError, {"--data-path": "{root}/two_documents", "--split": split}, words)
    assert attempt({"--data-path": "{root}/two_documents", "--split": "50,50,0"})


COMMANDS = [
    ({"--kd-teacher-hf": "{root}/torn", **SAVE}, ["--kd-teacher-hf", "truncated"]),
    ({"--kd-temprature": 2, **SAVE}, ["--kd-temprature", "--kd-temperature"]),
    ({"--data-path": "{root}/sidecar_ids", **SAVE}, ["--data-path", "token id 400"]),
]


@pytest.mark.parametrize("changes, words", COMMANDS, ids=[next(iter(c)) for c, _ in COMMANDS])
def test_the_command_fails_with_one_line(job, changes, words):
    """Exit status, stderr and traceback of the command; nothing is written."""
    flags = [word.replace("{root}", str(job.root)) for word in job.flags(changes)]
    result = small_job.run(flags)
    assert result.status == 1
    lines = [line for line in result.errors.splitlines() if line and not line.startswith(("INFO:", "WARNING:"))]
    assert len(lines) == 1, result.errors
    assert lines[0].startswith("pretrain_kd.py: error: ")
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.output + result.errors
    assert "iteration" not in result.output
    assert not (job.root / "never").exists()


def test_dry_run_prints_the_plan_and_writes_nothing(job):
    before = sorted(path for path in job.root.rglob("*"))
    folders = {"--save": job.root / "never", "--tensorboard-dir": job.root / "never" / "board"}
    flags = job.flags({"--kd-dry-run": True, "--save-interval": 1, **folders})
    result = small_job.run(flags)
    assert result.status == 0, result.errors
    plan = dict(line[5:].split(None, 1) for line in result.output.splitlines() if line.startswith("mkd: "))
    assert str(job.teacher) in plan["teacher"] and str(job.student) in plan["student"]
    assert "R = 0.5" in plan["loss"] and plan["steps"] == "3 iterations"
    assert plan["rate"].startswith("0.001, ")
    assert plan["vocabulary"] == f"{VOCAB} tokens, padded to 384"
    assert "are for CPU" in plan["plan"] and "memory of each rank in GiB, on CPU" in result.output
    assert f"training   {job.data}: concatenated documents, about " in result.output
    assert "; 12 rows wanted, 0.0" in result.output and "warning" not in plan["data"]
    assert result.output.splitlines()[-1] == "mkd: checked: no problem was found, nothing was written"
    assert sorted(path for path in job.root.rglob("*")) == before
    assert END not in result.output


def test_data_without_a_tokenizer_is_accepted(attempt):
    assert attempt({"--tokenizer-type": "NullTokenizer"}).true_vocab == VOCAB
