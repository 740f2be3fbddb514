"""Prompts of --kd-on-policy that are refused before the work."""

import json
from argparse import Namespace
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mkd.checkpoint.source import EnsembleSource
from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError, MkdDataError
from mkd.job.plan.rollout import rollout_plan
from mkd.job.rollout.on_policy import on_policy_of
from mkd.job.teachers.common import SourceAtAddresses
from mkd.utils.model_folders.tokenizer_flag import adopt_tokenizer
from tests.support.chats import MARKED, chat_tokenizer
from tests.support.hf_folders import change_json
from tests.support.inference_server import StandIn, table_model

defaults = cache(default_arguments)


def arguments(folder: Path, **changes: Any) -> Namespace:
    args = copy(defaults())
    given: dict[str, Any] = dict(seq_length=64, max_position_embeddings=64, micro_batch_size=2, eval_micro_batch_size=2)
    given["virtual_pipeline_model_parallel_size"] = None
    vars(args).update({**given, "tokenizer_model": str(folder), **changes})
    return args


def kd(prompts: Path, **changes: Any) -> KDConfig:
    given = dict(teacher_hf=["T"], ratio=1.0, on_policy=1.0, prompts=str(prompts), rollout_tokens=16)
    return KDConfig(**{**given, **changes})


def named(folder: Path, *teachers: str | int) -> Path:
    """Prompts with teachers."""
    lines = [{"prompt": "The import", "teacher": teacher} for teacher in teachers]
    (folder / "named.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "named.jsonl"


def test_teachers_of_records(folder: Path) -> None:
    def found(prompts: Path, **changes: Any) -> list[int]:
        return list(on_policy_of(arguments(folder), kd(prompts, **changes), 307, None).teachers)

    two = {"teacher_hf": ["a/one", "b/two"]}
    assert found(named(folder, "two", "one", "a/one"), **two) == [1, 0, 0]
    assert found(folder / "p.jsonl", **two) == []
    assert found(named(folder, "T"), teacher_hf=["T"]) == [0]
    for teacher, changes, words in (
        ("three", two, r"line 2: teacher 'three' is not a teacher of this job: give one of a/one, b/two, or remove it"),
        ("x", {"teacher_hf": ["a/x", "b/x"]}, "line 2: teacher 'x' is the name of several teachers"),
        (3, two, "line 2: teacher is a int, not the name of a teacher's folder"),
        ("one", two | {"teachers_mode": "averaged_logits"}, "cannot be alone with --kd-teachers-mode averaged_logits"),
    ):
        first = changes["teacher_hf"][0]
        with pytest.raises(MkdDataError, match=words):
            found(named(folder, first, teacher), **changes)


class Elsewhere(SourceAtAddresses):
    """A teacher behind addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.positions = addresses, None


def test_teachers_elsewhere_are_named_by_their_addresses(folder: Path) -> None:
    one, two = Elsewhere("tcp://a:1", "tcp://b:1"), Elsewhere("tcp://c:1")
    urls = {"teacher_hf": None, "teacher_url": ["tcp://a:1", "tcp://c:1", "tcp://b:1"], "teacher_weights": [1.0, 2.0]}

    def found(*teachers: str, source: Any) -> list[int]:
        prompts = named(folder, *teachers)
        return list(on_policy_of(arguments(folder), kd(prompts, **urls), 307, None, source=source).teachers)

    assert found("tcp://c:1", "tcp://b:1", source=EnsembleSource((one, two))) == [1, 0]
    assert found("tcp://b:1", source=one) == [0]
    assert found("tcp://c:1", source=None) == [0], "the doctor without the services"
    with pytest.raises(
        MkdDataError, match=r"teacher 'd' is not a teacher of this job: give one of tcp://a:1, tcp://c:1, or"
    ):
        found("d", source=EnsembleSource((one, two)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer and two prompts."""
    chat_tokenizer(tmp_path, MARKED)
    lines = ({"prompt": "The import"}, {"messages": [{"role": "user", "content": "hello"}]})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_servers_in_the_place_of_the_training_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank alone finds them."""
    with StandIn(table_model(307), vocab=307) as server:
        server.load = lambda _: server.model
        args = arguments(folder, save=str(folder / "save"), tokenizer_type="HuggingFaceTokenizer")
        flags = kd(folder / "p.jsonl", rollout_url=[server.url], rollout_refresh=4, rollout_steps=2)
        writer = on_policy_of(args, flags, 307, None).writer
        assert [str(one) for one in writer.servers] == [f"--kd-rollout-url {server.url}"]
        assert writer.refresh == 4 and 16 < len(writer.text) <= 64 and max(writer.text) < 307
        (line,) = rollout_plan(args, flags).items()
        assert line[0] == "servers" and line[1].startswith("100% of the rows from ")
        assert line[1].endswith(f": {server.url}, new weights in {folder}/save/rollout after 4 steps")
        monkeypatch.setenv("RANK", "1")
        assert on_policy_of(args, flags, 307, None).writer.servers == []
        with pytest.raises(MkdConfigError, match="--kd-rollout-url is ftp://a; the address of an inference server is"):
            on_policy_of(args, kd(folder / "p.jsonl", rollout_url=["ftp://a"]), 307, None)


def test_prompts_and_positions(folder: Path) -> None:
    found = on_policy_of(arguments(folder), kd(folder / "p.jsonl"), 307, None)
    assert len(found.prompts) == 2 and found.decoding.longest == 64 and found.decoding.end_tokens
    for changes, longest, words in (
        ({}, 20, "line 1: the prompt has 7 tokens; it must have 1 to 4, which is --seq-length without"),
        ({"max_position_embeddings": 20}, None, "line 1: the prompt has 7 tokens; it must have 1 to 4"),
    ):
        with pytest.raises(MkdDataError, match=words):
            on_policy_of(arguments(folder, **changes), kd(folder / "p.jsonl"), 307, longest)
    with pytest.raises(MkdConfigError, match="--kd-rollout-tokens is 16; it must be below 16, the positions of the m"):
        on_policy_of(arguments(folder), kd(folder / "p.jsonl"), 307, 16)


@pytest.mark.parametrize(
    "changes", [{"context_parallel_size": 2}, {"kd": {"packing": "best_fit", "packing_multiple": 4}}]
)
def test_padding_of_the_longest_text_fits_into_the_positions(folder: Path, changes: dict[str, Any]) -> None:
    """Rows are longer than the 23 positions of a model."""
    flags = kd(folder / "p.jsonl", **changes.pop("kd", {}))
    for args, longest in (
        (arguments(folder, **changes), 23),
        (arguments(folder, max_position_embeddings=23, **changes), None),
    ):
        with pytest.raises(MkdDataError, match=r"line 1: the prompt has 7 tokens; it must have 1 to 4, which"):
            on_policy_of(args, flags, 307, longest)


def test_no_end_token(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", {"eos_token": None})
    with pytest.raises(MkdDataError, match=r"--tokenizer-model .* has no end token, and every text .* would be cut"):
        on_policy_of(arguments(folder), kd(folder / "p.jsonl"), 307, None)


@pytest.mark.parametrize(
    ("missing", "words"), [("eos_token", "has no end token, and every text"), ("chat_template", "has no chat template")]
)
def test_messages_name_the_flag_of_the_tokenizer(folder: Path, missing: str, words: str) -> None:
    """That of the model whose tokenizer the job takes."""
    change_json(folder / "tokenizer_config.json", {missing: None})
    if missing == "chat_template":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    args = arguments(folder)
    with pytest.raises(MkdDataError, match=f"--tokenizer-model {folder} {words}"):
        on_policy_of(args, kd(folder / "p.jsonl"), 307, None)
    adopt_tokenizer(args, str(folder), f"--kd-student-hf {folder}")
    with pytest.raises(MkdDataError, match=f"--kd-student-hf {folder} {words}"):
        on_policy_of(args, kd(folder / "p.jsonl"), 307, None)


def test_memory_of_keys_and_values(folder: Path) -> None:
    """2 layers of 2 groups of 8 channels in fp32 take 256 bytes per token."""
    model = dict(
        num_layers=2, num_query_groups=2, group_query_attention=True, kv_channels=8, params_dtype=torch.float32
    )
    args, prompts = arguments(folder, **model), folder / "p.jsonl"
    assert on_policy_of(args, kd(prompts), 307, None).decoding.cache_tokens is None
    assert on_policy_of(args, kd(prompts, rollout_memory_gb=1e-3), 307, None).decoding.cache_tokens == 3906
    with pytest.raises(MkdConfigError) as caught:
        on_policy_of(args, kd(prompts, rollout_memory_gb=5e-6), 307, None)
    words = "is 5e-06, which holds keys and values of 19 tokens, but the longest prompt with its answer takes 48: give"
    assert words in str(caught.value)
    args = arguments(folder, **model, context_parallel_size=2)
    with pytest.raises(MkdConfigError, match=r"no keys and values are cached \(context parallelism\): leave"):
        on_policy_of(args, kd(prompts, rollout_memory_gb=1.0), 307, None)
