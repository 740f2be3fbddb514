"""mkd/job/resume/: what a job compares with the checkpoint that it resumes from."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.config.kd_config import KDConfig
from mkd.config.run_state import RunState
from mkd.errors import MkdConfigError
from mkd.job.resume import position
from mkd.job.resume.optimizer import check_optimizer_layout, check_same_optimizer
from mkd.job.resume.position import check_position
from tests.support.chats import MARKED, PLAIN, chat_tokenizer
from tests.support.e2e.small_job import write_data

POINT = ResumePoint(Path("S"), "iter_0000004")


def arguments(*names: str, **changes: Any) -> Namespace:
    given = dict(data_path=list(names), data_args_path=None, train_data_path=None, valid_data_path=None)
    given |= dict(tokenizer_type="NullTokenizer", tokenizer_model=None)
    given |= dict(test_data_path=None, per_split_data_args_path=None, mock_data=False, fim_data=False)
    return Namespace(**{**given, "split": "90,10,0", "seed": 1, "seq_length": 64, "finetune": False, **changes})


def kd(**changes: Any) -> KDConfig:
    return KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, **changes})


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Documents, and a chat file."""
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    return [str(write_data(tmp_path / "text", [[1, 2, 3]] * 4)), str(tmp_path / "chat.jsonl")]


def resumed(
    monkeypatch: pytest.MonkeyPatch, stored: Namespace, args: Namespace, options: KDConfig | None = None
) -> list[str]:
    monkeypatch.setattr(position, "MegatronFolder", lambda path, flag: SimpleNamespace(args=stored))
    return check_position(args, options or kd(), RunState(), POINT)


def saved(args: Namespace, options: KDConfig | None = None) -> Namespace:
    """The arguments in a checkpoint of this job."""
    state, stored = RunState(), Namespace(**vars(args), consumed_train_samples=1200)
    assert check_position(args, options or kd(), state, None) == []
    state.write_to(stored)
    vars(stored).update({f"kd_{name}": value for name, value in vars(options or kd()).items()})
    return stored


def test_the_same_data_in_another_folder(monkeypatch, names, tmp_path) -> None:
    stored = saved(arguments(*names))
    moved = str(write_data(tmp_path / "moved", [[1, 2, 3]] * 4))
    assert resumed(monkeypatch, stored, arguments(moved, names[1])) == []


@pytest.mark.parametrize("which", [0, 1])
def test_changed_content(monkeypatch, names, which) -> None:
    stored = saved(arguments(*names))
    if which == 0:
        write_data(Path(names[0]), [[1, 2, 3]] * 4 + [[4, 5]])
    else:
        Path(names[1]).write_text('{"messages": []}\n' * 2)
    (note,) = resumed(monkeypatch, stored, arguments(*names))
    assert note == (
        f"the rows of the training data, by the content of {names[which]} in --data-path: the run continues at row "
        "1,200 of the new order, so it skips some text and reads some again"
    )


@pytest.mark.parametrize(
    ("changes", "options", "flag"),
    [
        ({"seq_length": 32}, {}, "--seq-length"),
        ({"seed": 2}, {}, "--seed"),
        ({"split": "80,20,0"}, {}, "--split"),
        ({}, {"packing": "best_fit"}, "--kd-packing"),
        ({}, {"long_samples": "drop"}, "--kd-long-samples"),
    ],
)
def test_changed_rows(monkeypatch, names, changes: dict, options: dict, flag: str) -> None:
    (note,) = resumed(monkeypatch, saved(arguments(*names)), arguments(*names, **changes), kd(**options))
    assert f"by {flag}: the run continues at row 1,200 of the new order" in note


def test_a_file_is_left_out(monkeypatch, names) -> None:
    (note,) = resumed(monkeypatch, saved(arguments(*names)), arguments(names[0]))
    assert "by the content of a file that is left out in --data-path" in note


@pytest.mark.parametrize("has_chats", [True, False])
def test_changed_prompts_and_templates(monkeypatch, names, tmp_path, has_chats: bool) -> None:
    """Rows of chats, and prompts, depend on the tokenizer and its chat template; rows of documents do not."""
    chat_tokenizer(tmp_path / "tokenizer", PLAIN)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    options = kd(on_policy=0.5, prompts=str(tmp_path / "prompts.jsonl"))
    args = arguments(*names[: 1 + has_chats], tokenizer_type="HuggingFaceTokenizer")
    args.tokenizer_model = str(tmp_path / "tokenizer")
    stored = saved(args, options)
    assert resumed(monkeypatch, stored, args, options) == []
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "b"}\n')
    (note,) = resumed(monkeypatch, stored, args, options)
    prompts = f"the prompts of --kd-prompts, by the content of {tmp_path}/prompts.jsonl"
    assert note.startswith(f"{prompts}: the run continues at the same position")
    chat_tokenizer(tmp_path / "tokenizer", MARKED)
    *rows, note = resumed(monkeypatch, stored, args, options)
    assert note.startswith(f"{prompts} and tokenizer or chat template in {tmp_path}/tokenizer:")
    assert len(rows) == has_chats and all(f"by tokenizer or chat template in {tmp_path}/tokenizer:" in r for r in rows)
    del stored.kd_prompts_fingerprint, stored.kd_tokenizer_fingerprints  # as in a checkpoint of an earlier version
    assert resumed(monkeypatch, stored, args, options) == []


def test_changed_tasks(monkeypatch, names, tmp_path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    options = kd(eval_tasks=str(tmp_path / "tasks.jsonl"))
    stored = saved(arguments(*names), options)
    assert resumed(monkeypatch, stored, arguments(*names), options) == []
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "c"}\n')
    (note,) = resumed(monkeypatch, stored, arguments(*names), options)
    assert note == f"the content of --kd-eval-tasks {tmp_path}/tasks.jsonl: accuracies are of other tasks now"
    options = kd(eval_tasks=str(tmp_path / "tasks.jsonl"), keep_best="accuracy", keep_last=1)
    (note,) = resumed(monkeypatch, stored, arguments(*names), options)
    assert note.endswith("now, with which --kd-keep-best compares those before")


def test_no_note_without_a_position(monkeypatch, names) -> None:
    """A checkpoint of an earlier version holds no fingerprints; --finetune starts at the first row."""
    stored = saved(arguments(*names))
    del stored.kd_data_fingerprints
    write_data(Path(names[0]), [[1, 2]] * 4)
    assert resumed(monkeypatch, stored, arguments(*names)) == []
    stored = saved(arguments(*names))
    assert resumed(monkeypatch, stored, arguments(*names, finetune=True, seq_length=32)) == []


SIZES = dict(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=None,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=1,
)
LAYOUT = dict(
    **SIZES,
    num_layers=6,
    pipeline_model_parallel_layout=None,
    decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None,
    account_for_embedding_in_pipeline_split=False,
    account_for_loss_in_pipeline_split=False,
)


def optimizer(stored: dict, format: str | None, **changes: Any) -> str | None:
    folder = SimpleNamespace(args=Namespace(**{**LAYOUT, **stored}), optimizer_format=format)
    args = Namespace(**{**LAYOUT, "use_distributed_optimizer": True, "no_load_optim": None, **changes})
    try:
        return check_optimizer_layout(args, folder, "--load S")
    except MkdConfigError as error:
        return str(error)


FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
DIVISION = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, 4) for name in SIZES), (FIRST, 4), (LAST, 2), (DIVISION, "Ett|ttttL")],
)
def test_an_optimizer_of_another_layout_is_refused_before_models_are_loaded(name: str, value: Any) -> None:
    text = optimizer({name: value}, "dp_reshardable")
    assert f"--{name.replace('_', '-')} {value} (here {LAYOUT[name]})" in text
    assert "--dist-ckpt-optim-fully-reshardable" in text and "--no-load-optim" in text


WITH_VIRTUAL = {"virtual_pipeline_model_parallel_size": 2, "num_layers": 8}
PADDED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        ({}, {DIVISION: "Ettt|tttL"}),
        ({}, {FIRST: 3}),
        ({}, PADDED),
        ({LAST: 2}, {FIRST: 4}),
        ({LAST: 2}, {DIVISION: "Etttt|ttL"}),
        (WITH_VIRTUAL, {**WITH_VIRTUAL, DIVISION: "Ett|tt|tt|ttL"}),
        ({name: LAYOUT[name] for name in ("num_layers", *SIZES)}, {LAST: 2}),
    ],
)
def test_the_same_division_of_the_layers_by_other_flags_is_the_same_layout(stored: dict, changes: dict) -> None:
    folder = SimpleNamespace(args=Namespace(**{**LAYOUT, **stored}), optimizer_format="dp_reshardable")
    if len(stored) > len(WITH_VIRTUAL):
        folder.args = Namespace(**stored)  # of a version without these flags
    given = {"use_distributed_optimizer": True, "no_load_optim": None}
    assert check_optimizer_layout(Namespace(**{**LAYOUT, **given, **changes}), folder, "--load S") is None


def test_other_virtual_stages_are_another_layout() -> None:
    text = optimizer(WITH_VIRTUAL, "dp_reshardable", **WITH_VIRTUAL, **{DIVISION: "Ett|ttt|t|ttL"})
    assert f"--{DIVISION.replace('_', '-')} None (here Ett|ttt|t|ttL)" in text


def test_optimizers_that_can_be_read() -> None:
    other = {"tensor_model_parallel_size": 2}
    assert optimizer({"world_size": 4, "context_parallel_size": 2}, "dp_reshardable") is None
    assert optimizer(other, "fully_reshardable") is None
    assert optimizer(other, None) is None
    assert optimizer(other, "dp_reshardable", no_load_optim=True) is None
    assert optimizer(other, "dp_reshardable", use_distributed_optimizer=False) is None
    assert optimizer({**other, "no_save_optim": True}, "dp_reshardable") is None


ADAM = dict(optimizer="adam", adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, sgd_momentum=0.9, no_load_optim=None)
ADAM |= dict(use_distributed_optimizer=False, bf16=False, fp16=False, decoupled_lr=None)
DISTRIBUTED = {"use_distributed_optimizer": True}


def same_optimizer(stored: dict, changes: dict, format: str | None = None) -> str | None:
    folder = SimpleNamespace(args=Namespace(**{**ADAM, **stored}), optimizer_format=format)
    try:
        return check_same_optimizer(Namespace(**{**ADAM, **changes}), folder, "--load S")
    except MkdConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("stored", "changes", "format", "named"),
    [
        ({}, {"optimizer": "sgd"}, None, "--optimizer adam (here sgd)"),
        ({}, {"adam_beta1": 0.5, "adam_eps": 1e-6}, None, "--adam-beta1 0.9 (here 0.5), --adam-eps 1e-08 (here 1e-06)"),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "sgd_momentum": 0.0}, None, "--sgd-momentum 0.9 (here 0.0)"),
        ({}, DISTRIBUTED, None, "--use-distributed-optimizer False (here True)"),
        (DISTRIBUTED, {}, "fully_reshardable", "--use-distributed-optimizer True (here False)"),
        ({}, {"bf16": True}, None, "--bf16 False (here True)"),
        ({}, {"decoupled_lr": 1e-3}, None, "--decoupled-lr None (here 0.001)"),
        ({"decoupled_lr": 1e-3}, {}, None, "--decoupled-lr 0.001 (here None)"),
        ({"fp16": True}, {}, None, "--fp16 True (here False)"),
        (DISTRIBUTED, {**DISTRIBUTED, "bf16": True}, "dp_reshardable", "--bf16 False (here True)"),
    ],
)
def test_the_state_of_another_optimizer(stored: dict, changes: dict, format: str | None, named: str) -> None:
    """Each of these jobs ended after its models were loaded, or trained with the checkpoint's option."""
    text = same_optimizer(stored, changes, format)
    assert text.startswith(f"--load S has the state of an optimizer with {named}: give the same flags, or --no-load-")
    assert same_optimizer(stored, {**changes, "no_load_optim": True}, format) is None


def test_a_state_that_was_not_saved() -> None:
    text = same_optimizer({"no_save_optim": True}, {})
    assert text.startswith("--load S has no state of the optimizer") and "give --no-load-optim" in text
    assert same_optimizer({"no_save_optim": True}, {"no_load_optim": True}) is None


def test_states_that_are_read_in_another_precision() -> None:
    assert same_optimizer({}, {}) is None
    assert same_optimizer({"bf16": True}, {"fp16": True}) is None
    assert same_optimizer({**DISTRIBUTED, "decoupled_lr": 1e-3}, DISTRIBUTED) is None
    assert same_optimizer(DISTRIBUTED, {**DISTRIBUTED, "bf16": True}, "fully_reshardable") is None
    assert same_optimizer({"optimizer": "sgd", "adam_beta1": 0.5}, {"optimizer": "sgd"}) is None
