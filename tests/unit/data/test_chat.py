"""Conversations to tokens: which are the assistant's, what is left out, and what is refused before training."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkd.data.sources.chat import ChatTemplate, ChatTokenizer, EncodedChats
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.stores import ChatStore, DocumentStore, chat_base, check_chat_file, is_chat_file, tokenize_chat
from mkd.data.sources.text import RawBatch
from mkd.errors import MkdCheckpointError, MkdDataError
from mkd.job.doctor.peek import first_samples
from tests.support.chats import CALLS, FORGETFUL, MARKED, PLAIN, STRICT, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import END, write_data

TALKS = [
    talk("What is this?", "A test."),
    talk("Grüße, 世界!", "Ünïcödé 🎈 here", system="Be brief."),
    talk("one", "two", "three", "four\n\nwith lines", "five", "\nsix"),
    talk("tail", "of a user", "without an answer"),
]
TAKES_ALL = (0.0, 1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers with templates of all kinds."""
    root = tmp_path_factory.mktemp("tokenizers")
    content = "message['content'] + '<|end|>'"
    templates = {
        "marked": MARKED,
        "plain": PLAIN,
        "forgetful": FORGETFUL,
        "strict": STRICT,
        "none": None,
        "calls": CALLS,
        "writes None": PLAIN.replace(content, "message['content'] ~ '<|end|>'"),
        "without a content": CALLS.replace(
            "message['content'] or ''", "('no content' if message['content'] is undefined else message['content'])"
        ),
        "last reasoning": MARKED.replace("'assistant' %}", "'assistant' %}{{ message.thinking if loop.last }}"),
        "thoughtless": PLAIN.replace(content, "message['content'] | replace('<think>', '') + '<|end|>'"),
    }
    for name, template in templates.items():
        chat_tokenizer(root / name, template)
    return {name: root / name for name in templates}


@pytest.fixture(scope="module")
def templates(folders: dict[str, Path]) -> dict[str, ChatTemplate]:
    return {name: ChatTokenizer(str(folder)).template for name, folder in folders.items() if name != "none"}


def tokenized(file: Path, folder: Path, share: tuple[float, float] = TAKES_ALL) -> ChatStore:
    tokenizer = ChatTokenizer(str(folder))
    base = chat_base(str(file), tokenizer, str(file.parent / "cache"))
    tokenize_chat(str(file), tokenizer, base, lambda text: None)
    return ChatStore(base, share)


def words(template: ChatTemplate, chat: Conversation) -> list[str]:
    """Runs of supervised tokens, as text."""
    ids, supervised = template.encode(chat)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], supervised, [False])).astype(int)))
    return [template.tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("messages", TALKS)
def test_generation_mask_equals_that_of_transformers(templates: dict[str, ChatTemplate], messages: Any) -> None:
    template = templates["marked"]
    ids, supervised = template.encode(Conversation(messages))
    wanted = template.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert ids.tolist() == wanted["input_ids"]
    assert supervised.tolist() == [bool(m) for m in wanted["assistant_masks"]]
    assert supervised.any()
    assert not supervised.all()


@pytest.mark.parametrize("messages", TALKS)
def test_plain_templates_give_the_same_by_prefixes(templates: dict[str, ChatTemplate], messages: Any) -> None:
    for a, b in zip(*(templates[name].encode(Conversation(messages)) for name in ("marked", "plain")), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("name", ["marked", "plain"])
def test_words_and_end_of_turn_are_learned(templates: dict[str, ChatTemplate], name: str) -> None:
    template = templates[name]
    assert words(template, Conversation(TALKS[1])) == [f"Ünïcödé 🎈 here{END}"]
    assert words(template, Conversation(TALKS[2]))[0] == f"two{END}"
    assert len(words(template, Conversation(TALKS[2]))) == 3


@pytest.mark.parametrize("name", ["marked", "plain"])
def test_the_end_token_is_a_target_though_it_pads(templates: dict[str, ChatTemplate], name: str) -> None:
    tokenizer = templates[name].tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, supervised = templates[name].encode(Conversation(TALKS[0]))
    assert tokenizer.eos_token_id in ids[supervised]


@pytest.mark.parametrize("name", ["marked", "plain"])
def test_prompts_are_only_read(templates: dict[str, ChatTemplate], name: str) -> None:
    line = json.dumps({"prompt": talk("a", "not this", "b"), "completion": talk("x", "but this")[1:]}).encode()
    assert words(templates[name], Conversation.parse(line, "f")) == [f"but this{END}"]
    line = json.dumps({"prompt": "question", "completion": "answer"}).encode()
    assert words(templates[name], Conversation.parse(line, "f")) == [f"answer{END}"]


def test_a_first_message_without_a_prompt_is_only_read(templates: dict[str, ChatTemplate]) -> None:
    assert words(templates["plain"], Conversation(talk("x", "hello", "y", "z")[1:])) == [f"z{END}"]


def test_templates_that_cannot_be_used(templates: dict[str, ChatTemplate], folders: dict[str, Path]) -> None:
    with pytest.raises(
        MkdDataError, match=r"f.jsonl, line 3: the chat template of --tokenizer-model .*forgetful rende"
    ):
        templates["forgetful"].encode(Conversation(TALKS[2], where="f.jsonl, line 3"))
    with pytest.raises(MkdDataError, match=r"here: the chat template of .* refuses the conversation: no tools here"):
        templates["strict"].encode(Conversation([{"role": "tool", "content": "42"}], where="here"))
    with pytest.raises(MkdDataError, match="none has no chat template"):
        _ = ChatTokenizer(str(folders["none"])).template


CALL = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
ASK = {"role": "user", "content": "a"}
LOST = {
    "tool calls": ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": CALL}]}, "tool_calls"),
    "calls beside text": ({"messages": [ASK, {"role": "assistant", "content": "b", "tool_calls": CALL}]}, "tool_calls"),
    "earlier calls": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": CALL}, *talk("c", "d")]},
        "tool_calls of message 2",
    ),
    "old calls": (
        {"messages": [ASK, {"role": "assistant", "content": "b", "function_call": {"name": "f"}}]},
        "functio",
    ),
    "reasoning": (
        {"messages": [ASK, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
        "reasoning_con",
    ),
    "thinking": ({"messages": [ASK, {"role": "assistant", "content": "b", "thinking": "c"}]}, "thinking of message 2"),
    "tools": ({"messages": talk("a", "b"), "tools": [{"name": "add"}]}, "the record's tools"),
}


@pytest.mark.parametrize("name", ["marked", "plain"])
@pytest.mark.parametrize("case", LOST)
def test_what_a_template_drops_is_an_error(templates: dict[str, ChatTemplate], name: str, case: str) -> None:
    record, key = LOST[case]
    chat = Conversation.parse(json.dumps(record).encode(), "f.jsonl, line 3")
    with pytest.raises(MkdDataError, match=rf"f.jsonl, line 3: the chat template of .* does not write {key}"):
        templates[name].encode(chat)


def test_keys_that_a_template_writes(templates: dict[str, ChatTemplate]) -> None:
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": CALL, "thinking": "hm "}]
    assert words(templates["calls"], Conversation(messages, tools=CALL)) == [f"hm add{END}"]
    empty = [ASK, {"role": "assistant", "content": "b", "tool_calls": [], "thinking": None, "name": "x"}]
    assert words(templates["plain"], Conversation(empty)) == [f"b{END}"]


def test_reasoning_that_a_template_removes_from_earlier_turns_is_not_lost(templates: dict[str, ChatTemplate]) -> None:
    chat = Conversation([ASK, {"role": "assistant", "content": "b", "thinking": "hm"}, *talk("c", "d")])
    assert words(templates["last reasoning"], chat) == [f"b{END}", f"d{END}"]


def test_a_missing_content_is_empty_where_the_template_needs_a_string(templates: dict[str, ChatTemplate]) -> None:
    calls, text = ({"role": "assistant", "content": None, "tool_calls": CALL}, talk("c", "d"))
    for name in ("marked", "plain", "writes None"):
        assert "None" not in templates[name].text(Conversation([ASK, calls, *text]))
    assert "no content" in templates["without a content"].text(Conversation([ASK, calls]))


def test_an_answer_without_text_is_an_error(templates: dict[str, ChatTemplate]) -> None:
    """The template removes reasoning from the content, and nothing is left."""
    for content in ("<think>", "<think> <think>" * 40):
        with pytest.raises(MkdDataError, match=r"here: .* writes no text for learned answer 2, so"):
            templates["thoughtless"].encode(Conversation(talk("a", "b", "c", content), where="here"))


UNLEARNED = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"train_on_turn": False}]
UNLEARNED += [{"loss": False}, {"weight": 0, "train": False, "loss": None}]


def with_keys(messages: list[dict[str, Any]], number: int, keys: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**message, **keys} if i == number else message for i, message in enumerate(messages)]


@pytest.mark.parametrize("name", ["marked", "plain"])
@pytest.mark.parametrize("keys", UNLEARNED, ids=str)
def test_unlearned_answers_are_only_read(templates: dict[str, ChatTemplate], name: str, keys: dict[str, Any]) -> None:
    """The tokens stay, and of the mask exactly those of one answer with the token that ends it are taken away."""
    template, messages = templates[name], talk("a", "one", "b", "two", "c", "three")
    ids, mask = template.encode(Conversation(messages))
    ends = np.flatnonzero(mask & (ids == template.tokenizer.eos_token_id))
    for answer, number in enumerate((1, 3, 5)):
        chat = Conversation.parse(json.dumps({"messages": with_keys(messages, number, keys)}).encode(), "f")
        expected = mask.copy()
        expected[ends[answer - 1] + 1 if answer else 0 : ends[answer] + 1] = False
        assert [part.tolist() for part in template.encode(chat)] == [ids.tolist(), expected.tolist()]
    first = with_keys(messages[1:], 0, keys)
    assert words(template, Conversation(first)) == [f"two{END}", f"three{END}"]


@pytest.mark.parametrize(
    "keys", [{"weight": 1}, {"weight": 1.0, "train": True}, {"loss": True}, {"train": None}], ids=str
)
def test_learned_answers_are_learned(templates: dict[str, ChatTemplate], keys: dict[str, Any]) -> None:
    for name in ("marked", "plain"):
        for a, b in zip(
            templates[name].encode(Conversation(TALKS[2])),
            templates[name].encode(Conversation(with_keys(TALKS[2], 3, keys))),
            strict=True,
        ):
            assert a.tolist() == b.tolist()


@pytest.mark.parametrize("name", ["marked", "plain"])
def test_fractional_weights(
    templates: dict[str, ChatTemplate], folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """The targets are those of weight 1; the store multiplies those of each message by its weight."""
    messages = talk("a", "one", "b", "two", "c", "three")
    template, (ids, mask) = templates[name], templates[name].encode(Conversation(messages))
    ends = np.flatnonzero(mask & (ids == template.tokenizer.eos_token_id)) + 1
    lines = []
    for weights in ((0.25, 1, 0.5), (1, 1, 1), (0.5, 0, 0.5)):
        weighted = messages
        for number, weight in zip((1, 3, 5), weights, strict=True):
            weighted = with_keys(weighted, number, {"weight": weight})
        lines.append({"messages": weighted})
    store = tokenized(write_lines(tmp_path / "f.jsonl", lines), folders[name])
    for sample, weights in enumerate(((0.25, 1, 0.5), (1, 1, 1), (0.5, 0, 0.5))):
        expected, begin = mask.astype(np.float32), 0
        for end, weight in zip(ends, weights, strict=True):
            expected[begin:end] *= weight
            begin = end
        stored, targets = store.read(sample, 0, len(ids))
        assert (stored.tolist(), targets.tolist()) == (ids.tolist(), expected.tolist())
        for start in range(len(ids) - 2):
            assert store.read(sample, start, 3)[1].tolist() == expected[start : start + 3].tolist()
    assert store.facts.supervised == 3 * mask.sum() - mask[ends[0] : ends[1]].sum()


def test_weights_that_are_missing_are_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": with_keys(TALKS[2], 1, {"weight": 0.5})}])
    tokenized(file, folders["plain"])
    base = chat_base(str(file), ChatTokenizer(str(folders["plain"])), None)
    base.with_name(f"{base.name}.checksums").unlink()
    base.with_name(f"{base.name}.weights").write_bytes(b"")
    with pytest.raises(MkdDataError, match=r"weights is broken \(0 weights of 1\): delete "):
        ChatStore(base, (0.0, 1.0))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("json", {"skipped": []}, "skipped is '\\[\\]'"),
        ("json", {"bad": [3]}, "bad is"),
        ("json", {"skipped": {"a": "b"}}, "skipped is"),
        ("json", {"conversations": True}, "conversations is 'True'"),
        ("checksums", {"../x": "0"}, "the checksum of .*checksums does not match"),
        ("weights", np.array([0, np.nan, 0.5]).tobytes(), "an invalid weight"),
        ("bounds", None, "not a regular file"),
    ],
)
def test_a_set_that_others_made_is_checked(
    folders: dict[str, Path], tmp_path: Path, kind: str, content: Any, message: str
) -> None:
    """Also one with the right checksums, or, as in older versions, without any."""
    file = write_lines(tmp_path / "f.jsonl", [{"messages": with_keys(TALKS[2], 1, {"weight": 0.5})}])
    tokenized(file, folders["plain"])
    base = chat_base(str(file), ChatTokenizer(str(folders["plain"])), None)
    path = base.with_name(f"{base.name}.{kind}")
    if kind != "checksums":
        base.with_name(f"{base.name}.checksums").unlink()
    if content is None:
        path.unlink()
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(MkdDataError, match=message):
        ChatStore(base, (0.0, 1.0))


def test_a_set_of_an_earlier_version_has_no_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": TALKS[2]}])
    store, tokenizer = tokenized(file, folders["plain"]), ChatTokenizer(str(folders["plain"]))
    base = chat_base(str(file), tokenizer, None)
    assert not base.with_name(f"{base.name}.weights").exists() and store.read(0, 0, 9)[1].dtype == bool
    base.with_name(f"{base.name}.checksums").unlink()
    facts = base.with_name(f"{base.name}.json")
    facts.write_text(json.dumps({k: v for k, v in json.loads(facts.read_text()).items() if k != "weight_runs"}))
    tokenize_chat(str(file), tokenizer, base, pytest.fail)
    assert ChatStore(base, (0.0, 1.0)).read(0, 0, 9)[1].tolist() == store.read(0, 0, 9)[1].tolist()


def test_a_conversation_without_a_learned_answer_is_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    lines = [{"messages": TALKS[0]}, {"messages": with_keys(TALKS[0], 1, {"weight": 0})}]
    store = tokenized(write_lines(tmp_path / "f.jsonl", lines), folders["marked"])
    assert store.facts.skipped == {"with an empty message": 0, "without a word of the assistant": 1}


def test_doctor_shows_the_targets_that_are_stored(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": with_keys(TALKS[2], 1, {"train": False})}])
    store, [(ids, targets)] = tokenized(file, folders["plain"]), first_samples(str(file), str(folders["plain"]))
    stored = store.read(0, 0, len(ids))
    assert (stored[0].tolist(), stored[1].tolist()) == (ids.tolist(), targets.tolist())
    assert 0 < targets.sum() < ChatTokenizer(str(folders["plain"])).template.encode(Conversation(TALKS[2]))[1].sum()


@pytest.mark.parametrize(
    ("keys", "record", "versions_without"),
    [
        ({"name": "weight"}, {"id": "system"}, ()),
        ({"weight": 0}, {}, (1,)),
        ({}, {"system": "Be brief."}, (1, 2)),
        ({"contents": ""}, {}, (1, 2, 3)),
        ({"text": ""}, {}, (1, 2, 3)),
        ({"from": "human", "value": ""}, {}, ()),
    ],
    ids=["other keys", "weight", "system", "misnamed content", "text", "ShareGPT"],
)
def test_tokens_of_an_earlier_version_are_made_anew_only_for_files_with_newer_keys(
    folders: dict[str, Path], tmp_path: Path, keys: dict[str, Any], record: dict[str, Any], versions_without: tuple
) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": with_keys(TALKS[2], 1, keys), **record}])
    tokenizer = ChatTokenizer(str(folders["plain"]))
    base, said = chat_base(str(file), tokenizer, None), []
    for version in (1, 2, 3, 4):
        tokenize_chat(str(file), tokenizer, base, said.append)
        facts = json.loads(base.with_name(f"{base.name}.json").read_text())
        base.with_name(f"{base.name}.json").write_text(json.dumps({**facts, "version": version}))
    assert len(said) == 1 + len(versions_without)


def test_changed_weights_are_found(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": with_keys(TALKS[2], 1, {"weight": 0.5})}])
    tokenized(file, folders["plain"])
    base = chat_base(str(file), ChatTokenizer(str(folders["plain"])), None)
    stored = base.with_name(f"{base.name}.weights")
    stored.write_bytes(stored.read_bytes()[:-1] + b"\x00")
    with pytest.raises(MkdDataError, match=r"damaged \(the checksum of .*weights does not match\): delete these files"):
        ChatStore(base, (0.0, 1.0))


BROKEN = {
    "weight": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": 1.5}]}',
        "line 2: message 1 .* weight 1.5, which must be a weight from 0 to 1",
    ),
    "tiny weight": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": 1e-300}]}',
        "line 2: message 1 .* weight 1e-300, which must be a weight from 0 to 1, and at least 1e-06 if it is not 0",
    ),
    "key twice": (
        '{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}',
        r"line 2: broken JSON \(the key 'content' stands twice in an object\)",
    ),
    "fraction": (
        '{"messages": [{"role": "assistant", "content": "a", "train": 0.5}]}',
        "line 2: message 1 .* train 0.5, which must be 0 or false, or 1 or true; a fraction is a weight",
    ),
    "weight of a user": (
        '{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}',
        "has weight 0.5 and the role user, but only",
    ),
    "nan": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": NaN}]}',
        "message 1 of messages has weight nan",
    ),
    "no weight": (
        '{"messages": [{"role": "assistant", "content": "a", "train": "no"}]}',
        "has the str 'no' as train, not",
    ),
    "both": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": 0, "train": true}]}',
        "weight 0, train true, which contradict",
    ),
    "user": (
        '{"messages": [{"role": "user", "content": "a", "loss": true}]}',
        "has loss true and the role user, but only",
    ),
    "detail": (
        '{"messages": [{"role": "assistant", "content": "a", "train_detail": []}]}',
        "train_detail, which is not",
    ),
    "torn": ('{"messages": [', "f.jsonl, line 2: broken JSON"),
    "list": ("[1]", "f.jsonl, line 2: a JSON list"),
    "other keys": ('{"text": "a", "completion": "b"}', r"line 2: neither messages nor .*keys there: completion, text"),
    "no list": ('{"messages": "hi"}', "line 2: messages is a str, not a list of messages"),
    "no message": ('{"messages": ["hi"]}', "line 2: message 1 of messages is a str, not an object"),
    "no role": ('{"messages": [{"content": "a"}]}', "line 2: message 1 of messages has the role None"),
    "role": ('{"messages": [{"role": "robot", "content": "a"}]}', "message 1 of messages has the role 'robot'"),
    "content": ('{"messages": [{"role": "user", "content": [1]}]}', "message 1 .* has a list as content"),
    "misspelled content": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "contents": "b"}]}',
        "message 2 of messages has contents and no content: rename contents to content",
    ),
    "tools": ('{"messages": [], "tools": 1}', "line 2: tools is a int"),
    "surrogate": ('{"prompt": "\\ud800", "completion": "a"}', "line 2: message 1 of prompt: half a surrogate pair"),
    "latin": (b'{"prompt": "\xe4"}', "line 2: not UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lines_are_named(folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    line, message = BROKEN[case]
    file = write_lines(tmp_path / "f.jsonl", [{"messages": TALKS[0]}])
    with file.open("ab") as out:
        out.write(line if isinstance(line, bytes) else line.encode())
    for read in (
        lambda: check_chat_file(str(file), ChatTokenizer(str(folders["plain"]))),
        lambda: tokenized(file, folders["plain"]),
    ):
        with pytest.raises(MkdDataError, match=message):
            read()
    assert not [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".")]


def test_half_a_surrogate_pair_in_a_call(folders: dict[str, Path], tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "\ud800"}}]}
    file = write_lines(tmp_path / "f.jsonl", [{"messages": [*talk("add"), call]}])
    with pytest.raises(MkdDataError, match="line 1: the conversation as the chat template writes it: half a surrogate"):
        tokenized(file, folders["calls"])


def test_a_broken_line_far_down_is_found_before_training(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": TALKS[0]}] * 2000 + [{"messages": 3}])
    check_chat_file(str(file), ChatTokenizer(str(folders["plain"])))
    with pytest.raises(MkdDataError, match="line 2001: messages is a int"):
        tokenized(file, folders["plain"])


def test_invalid_chat_files(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(folders["plain"]))
    with pytest.raises(MkdDataError, match=r"--data-path .*missing.jsonl does not exist"):
        check_chat_file(str(tmp_path / "missing.jsonl"), tokenizer)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(MkdDataError, match=r"empty.jsonl is empty"):
        check_chat_file(str(tmp_path / "empty.jsonl"), tokenizer)
    with pytest.raises(MkdDataError, match=r"no conversation can be used \(0 conversations, .* left out 1 without a"):
        tokenized(write_lines(tmp_path / "user.jsonl", [{"messages": talk("only me")}]), folders["plain"])


def test_skipped_conversations_are_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    empty = [talk("", "a"), talk("a", " \n"), []]
    unsupervised = [talk("nobody answers")]
    calls = [*talk("add"), {"role": "assistant", "content": None, "tool_calls": [1]}, {"role": "tool", "content": ""}]
    file = write_lines(tmp_path / "f.jsonl", [{"messages": m} for m in [*TALKS, *empty, *unsupervised]])
    with file.open("a") as out:
        out.write("\n  \n" + json.dumps({"prompt": talk("a", "b"), "completion": talk("c")}) + "\n")
    store = tokenized(file, folders["marked"])
    assert store.facts.conversations == len(store.lengths) == 4
    assert store.facts.skipped == {"with an empty message": 3, "without a word of the assistant": 2}
    assert "left out 3 with an empty message, left out 2 without a word" in str(store.facts)
    assert not Conversation(calls).has_empty_message


def test_stored_samples_are_the_encoded_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": messages} for messages in TALKS])
    store, half = tokenized(file, folders["plain"]), tokenized(file, folders["plain"], (0.5, 1.0))
    coded = [ChatTokenizer(str(folders["plain"])).template.encode(Conversation(messages)) for messages in TALKS]
    for number, (ids, supervised) in enumerate(coded):
        assert store.lengths[number] == len(ids)
        for part, offset in ((store, 0), *(((half, 2),) if number >= 2 else ())):
            seen = part.read(number - offset, 3, len(ids) - 4)
            assert seen[0].tolist() == ids[3:-1].tolist()
            assert seen[1].tolist() == supervised[3:-1].tolist()
    assert store.facts.tokens == sum(len(ids) for ids, _ in coded)
    assert store.facts.supervised == sum(supervised.sum() for _, supervised in coded)
    assert store.facts.max_token_id == max(ids.max() for ids, _ in coded)
    assert len(half.lengths) == 2


def test_tokens_are_made_anew_when_file_or_template_changes(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": TALKS[0]}])
    plain, marked = (ChatTokenizer(str(folders[name])) for name in ("plain", "marked"))
    first = chat_base(str(file), plain, None)
    assert first == chat_base(str(file), plain, None)
    assert first.parent == tmp_path / "cache"
    assert first != chat_base(str(file), marked, None)
    write_lines(file, [{"messages": TALKS[1]}] * 2)
    assert first != chat_base(str(file), plain, None)


def test_tokenizing_is_done_once_batch_by_batch(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": talk(f"number {i}", str(i))} for i in range(100)])
    whole = tokenized(file, folders["plain"])
    monkeypatch.setattr("mkd.data.sources.text.BATCH_BYTES", 2000)
    tokenizer, said = pickle.loads(pickle.dumps(ChatTokenizer(str(folders["plain"])))), []  # as workers get it
    for _ in range(2):
        tokenize_chat(str(file), tokenizer, tmp_path / "other", said.append)
    assert len(said) == 1
    other = ChatStore(tmp_path / "other", TAKES_ALL)
    assert other.facts == whole.facts
    assert other.lengths.tolist() == whole.lengths.tolist()
    assert all(other.read(i, 0, n)[0].tolist() == whole.read(i, 0, n)[0].tolist() for i, n in enumerate(whole.lengths))


def test_jobs_that_tokenize_at_the_same_time(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"messages": talk(f"number {i}", str(i))} for i in range(20)])
    whole, tokenizer = tokenized(file, folders["plain"]), ChatTokenizer(str(folders["plain"]))
    base = tmp_path / "other"

    def while_another_job_does_it(batch: RawBatch) -> EncodedChats:
        tokenize_chat(str(file), tokenizer, base, lambda text: None)
        return tokenizer(batch)

    tokenize_chat(str(file), while_another_job_does_it, base, lambda text: None)
    assert ChatStore(base, TAKES_ALL).facts == whole.facts
    names = sorted(path.name for path in tmp_path.glob("other*"))
    assert names == ["other.bounds", "other.checksums", "other.json", "other.tokens"]


def test_documents_by_number(tmp_path: Path) -> None:
    prefix = write_data(tmp_path / "text", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    assert not is_chat_file(str(prefix))
    store = DocumentStore(str(prefix), (1 / 3, 1.0))
    assert store.lengths.tolist() == [2, 4]
    ids, targets = store.read(1, 1, 3)
    assert ids.tolist() == [7, 8, 9]
    assert targets.all()


def test_a_template_that_jinja_cannot_read_is_no_broken_record(tmp_path: Path) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path / "tokenizer", "{% for m in messages %}\n{{ m.content }"), "DIR")
    words = r"^the chat template of --tokenizer-model DIR is not valid \(unexpected '}', line 2 of the template\)"
    with pytest.raises(MkdCheckpointError, match=words):
        template.encode(Conversation(TALKS[0], where="f.jsonl, line 1"))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "too long"),
        ("{{ range(10 ** 9) | list | length }}", "range"),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    ],
)
def test_templates_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str) -> None:
    monkeypatch.setattr("mkd.utils.model_folders.chat_template._SECONDS", 0.2)
    tokenizer = ChatTemplate(chat_tokenizer(tmp_path / "tokenizer", template), str(tmp_path))
    with pytest.raises(MkdDataError, match=rf"line 1: the chat template .* refuses the conversation: .*{words}"):
        tokenizer.text(Conversation(talk("a", "b"), where="line 1"))


def test_a_template_that_writes_megabytes_is_refused(tmp_path: Path) -> None:
    """Also where the text is long because the conversation is, it is accepted."""
    template = MARKED + "{{ 'x' * 200000 }}"
    tokenizer = ChatTemplate(chat_tokenizer(tmp_path / "long", template), str(tmp_path))
    with pytest.raises(MkdDataError, match=r"makes 200,\d+ characters of a conversation of \d+: take the template"):
        tokenizer.encode(Conversation(talk("a", "b"), where="line 1"))
    other = ChatTemplate(chat_tokenizer(tmp_path / "other", MARKED), str(tmp_path))
    assert len(other.encode(Conversation(talk("a " * 60_000, "b")))[0]) > 60_000
