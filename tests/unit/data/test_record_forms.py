"""Conversations in other forms and files: the same tokens as in messages, or an error that names the conversion."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.preview import preview
from mkd.data.sources.record_forms import AS_FOUND, RecordOptions, standard_record
from mkd.data.sources.stores import ChatStore, chat_base, check_chat_file, tokenize_chat
from mkd.data.sources.text import BadRecords, with_ellipsis
from mkd.errors import MkdDataError
from tests.support.chats import CALLS, MARKED, chat_tokenizer, talk, write_lines
from tests.support.data_forms import FILES, FORMS, TALKS, sharegpt

EVERYTHING = (0.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(root, MARKED)
    return str(root)


def store_of(name: Path, folder: str, cache: Path, options: RecordOptions = AS_FOUND) -> tuple[ChatStore, list[str]]:
    said: list[str] = []
    tokenizer = ChatTokenizer(folder, options)
    check_chat_file(str(name), tokenizer)
    base = chat_base(str(name), tokenizer, str(cache))
    tokenize_chat(str(name), tokenizer, base, said.append)
    return ChatStore(base, EVERYTHING), said


def samples(store: ChatStore) -> list[tuple[list[int], list[bool]]]:
    read = [store.read(number, 0, int(length)) for number, length in enumerate(store.lengths)]
    return [(ids.tolist(), targets.tolist()) for ids, targets in read]


@pytest.fixture(scope="module")
def expected(folder: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[bool]]]:
    root = tmp_path_factory.mktemp("expected")
    file = write_lines(root / "chats.jsonl", [{"messages": messages} for messages in TALKS])
    return samples(store_of(file, folder, root)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", FILES)
def test_every_form_in_every_file_gives_the_same_samples(
    folder: str, expected: list[Any], tmp_path: Path, form: str, file: str
) -> None:
    """The null keys that a table adds to objects of other rows are not part of a record."""
    name = FILES[file](tmp_path / file, [FORMS[form](messages) for messages in TALKS])
    store, _ = store_of(name, folder, tmp_path / "cache")
    assert samples(store) == expected
    assert not (Path(str(name)).parent / "cache").exists() or (tmp_path / "cache").exists()


@pytest.mark.parametrize("answer", ["completion", "response"])
def test_prompt_and_response(folder: str, tmp_path: Path, answer: str) -> None:
    """The same as a conversation of two messages; in lists of messages, the prompt's answers are context only."""
    records = [
        {"prompt": "one", answer: "two"},
        {"prompt": talk("a", "b", "c"), answer: [{"role": "assistant", "content": "d"}]},
    ]
    store, _ = store_of(write_lines(tmp_path / "f.jsonl", records), folder, tmp_path)
    whole, _ = store_of(
        write_lines(tmp_path / "g.jsonl", [{"messages": talk("one", "two")}, {"messages": talk("a", "b", "c", "d")}]),
        folder,
        tmp_path,
    )
    assert samples(store)[0] == samples(whole)[0]
    ids, targets = samples(store)[1]
    assert ids == samples(whole)[1][0]
    assert 0 < sum(targets) < sum(samples(whole)[1][1])


def test_tools_as_json_and_calls_of_functions(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path, CALLS)
    template = ChatTokenizer(str(tmp_path)).template
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [("human", "1 + 1?"), ("function_call", json.dumps({"name": "add", "arguments": {"a": 1}}))]
    turns += [("observation", "2"), ("GPT", "It is 2.")]
    found = {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": json.dumps(tools)}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    seen, wanted = (
        Conversation.parse(json.dumps(record).encode(), "f")
        for record in (found, {"messages": messages, "tools": tools})
    )
    assert seen == wanted
    assert template.encode(seen)[0].tolist() == template.encode(wanted)[0].tolist()


def test_weights_of_turns_are_kept(folder: str) -> None:
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}
    assert not Conversation.parse(json.dumps(record).encode(), "f").has_answer


def test_a_table_of_lists_in_place_of_a_list_of_objects() -> None:
    record = {"conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}}
    assert standard_record(record, None, "f") == standard_record(sharegpt(talk("a", "b")), None, "f")


def test_a_system_prompt_beside_the_messages() -> None:
    """The first message, in every form; an empty one and an equal one change nothing."""
    whole = talk("a", "b", system="Be brief.")
    for system, messages in (("Be brief.", whole[1:]), ("", whole), (None, whole), ("Be brief.", whole)):
        assert standard_record({"messages": messages, "system": system}, None, "f")["messages"] == whole
    for prompt in ("a", talk("a")):
        found = standard_record({"prompt": prompt, "completion": "b", "system": "Be brief."}, None, "f")
        assert (found["prompt"], found["completion"]) == (whole[:2], "b")
    assert standard_record({"prompt": "a", "response": "b"}, None, "f")["prompt"] == "a"


def test_instruction_and_input_are_one_message() -> None:
    found = standard_record({"instruction": "Add.", "input": "1, 2", "output": "3"}, None, "f")
    assert found["messages"] == talk("Add.\n1, 2", "3")


REFUSED = {
    "unknown": ({"a": 1, "b": None}, r"line 1: neither messages .*\(keys there: a\): rename the keys of question and"),
    "question": ({"question": "a", "answer": "b"}, "rename question to prompt and answer to completion"),
    "dolly": ({"instruction": "a", "context": "", "response": "b"}, "rename instruction to prompt and response to"),
    "preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rename chosen to completion"),
    "text": ({"text": "a"}, r"plain text is made into token files by mkd preprocess"),
    "key of turns": (
        {"convs": sharegpt(talk("a", "b"))["conversations"], "id": 1},
        r"keys there: convs, id\): rename convs to conversations; --kd-bad-records skip leaves such records out",
    ),
    "key of messages": ({"dialog": talk("a", "b"), "text": "c"}, "rename dialog to messages"),
    "misspelled list": ({"mesages": "a"}, "rename mesages to messages"),
    "misspelled": ({"instructions": "a", "Output": "b"}, "rename Output to output and instructions to instruction"),
    "misspelled answer": ({"prompt": "a", "completions": "b"}, "rename completions to completion"),
    "tokens": ({"input_ids": [1], "labels": [1]}, "token ids are read from Megatron's files only"),
    "message": ({"role": "user", "content": "a"}, "put its messages into a list under messages"),
    "ambiguous": (
        {"conversations": [], "instruction": "a", "output": "b"},
        r"keys of several forms \(sharegpt, alpaca; keys there: conversations, instruction, output\): "
        "keep those of one, or in --data-path of mkd train name the one to read with --kd-data-format",
    ),
    "images": ({**sharegpt(talk("a", "b")), "image": "a.png"}, "line 1: the record has image, and models here read"),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "message 1 of messages has a list as content whose part 1 is of type 'image_url', and models here read text",
    ),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "message 1 of messages has a list as content whose part 1 is not part of text",
    ),
    "role": ({"conversations": [{"from": "narrator", "value": "a"}]}, "message 1 of .* has the role 'narrator'"),
    "misspelled role": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gtp", "value": "b"}]},
        r"message 2 of conversations has the role 'gtp' \(from\); known are human, gpt, .*"
        r"\(did you mean 'gpt'\?\); --kd-bad-records skip leaves such records out",
    ),
    "misspelled role of messages": (
        {"messages": [{"role": "Assistent", "content": "a"}]},
        r"message 1 of messages has the role 'Assistent'; known are .* \(did you mean 'assistant'\?\)",
    ),
    "role of another form": (
        {"messages": [{"role": "human", "content": "a"}]},
        r"has the role 'human'; known are .* \(did you mean 'user'\?\)",
    ),
    "turns as messages": (
        {"messages": [{"from": "human", "value": "a"}]},
        "message 1 of messages has from and value, as in conversations, not role and content: rename the list to",
    ),
    "no role key": ({"messages": [{"rol": "user", "content": "a"}]}, r"has the role None \(keys there: rol, content\)"),
    "no value": (
        {"conversations": [{"from": "gpt", "valeu": "a"}]},
        r"message 1 of conversations has from and no value \(keys there: from, valeu\): write its text as value",
    ),
    "no role": ({"conversations": [{"text": "a"}]}, "message 1 of conversations has neither from and value nor role"),
    "value": ({"conversations": [{"from": "gpt", "value": 1}]}, "message 1 of conversations has a int as value"),
    "turn": ({"conversations": ["a"]}, "message 1 of conversations is a str, not an object with from and value"),
    "turns": ({"conversations": "a"}, "conversations is a str, not a list of messages"),
    "call": (
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "value is not the JSON of calls with name",
    ),
    "tools": ({"messages": talk("a", "b"), "tools": "f(a)"}, "tools is a str that is not JSON"),
    "one tool": ({"messages": talk("a", "b"), "tools": "{}"}, "tools is the JSON of a dict, not of a list"),
    "output": ({"instruction": "a", "output": ["b"]}, "line 1: output is a list, not a string"),
    "history": ({"instruction": "a", "output": "b", "history": [["c"]]}, "entry 1 of history is not a pair of"),
    "systems": (
        {**sharegpt(talk("a", "b", system="c")), "system": "d"},
        "system differs from the first message, which is a system prompt: keep one",
    ),
    "systems of messages": ({"messages": talk("a", "b", system="c"), "system": "d"}, "system differs from the first"),
    "system": ({"prompt": "a", "completion": "b", "system": ["c"]}, "line 1: system is a list, not a string"),
    "messages and system": ({"messages": "a", "system": ["c"]}, "line 1: system is a list, not a string"),
    "message and system": ({"messages": ["a"], "system": "c"}, "message 2 of messages is a str, not an object with"),
    "turns before": (
        {"prompt": "a", "response": "b", "history": [["c", "d"]]},
        "the record has history, which is read next to instruction and output only: write the earlier turns into",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_advice(folder: str, tmp_path: Path, case: str) -> None:
    record, message = REFUSED[case]
    file = write_lines(tmp_path / "f.jsonl", [record])
    with pytest.raises(MkdDataError, match=message) as caught:
        store_of(file, folder, tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{file}, line 1: ")


def test_a_form_can_be_named(folder: str, tmp_path: Path) -> None:
    record = {**sharegpt(talk("a", "b")), "instruction": "c", "output": "d", "messages": talk("e", "f")}
    read = {form: standard_record(record, form, "f")["messages"] for form in ("sharegpt", "alpaca", "messages", None)}
    assert read == {
        "sharegpt": talk("a", "b"),
        "alpaca": talk("c", "d"),
        "messages": talk("e", "f"),
        None: talk("e", "f"),
    }
    named = {"convs": sharegpt(talk("a", "b"))["conversations"]}
    with pytest.raises(MkdDataError, match=r"keys there: convs\): rename convs to conversations$"):
        standard_record(named, "sharegpt", "f")
    with pytest.raises(
        MkdDataError,
        match=r"no conversations, which --kd-data-format sharegpt reads \(keys there: messages; it looks like messages",
    ):
        standard_record({"messages": []}, "sharegpt", "f")
    file = write_lines(tmp_path / "f.jsonl", [record])
    names = {chat_base(str(file), ChatTokenizer(folder, RecordOptions(form)), None) for form in ("alpaca", None)}
    assert len(names) == 2, "the tokens of one form are not taken for those of another"


BAD = ["{", '{"messages": 1}', '{"messages": [{"role": "robot"}]}', "[1]", b"\xff", '{"text": "a"}', "[" * 100_000]


def test_broken_records_are_skipped_on_request(folder: str, expected: list[Any], tmp_path: Path) -> None:
    good = [json.dumps({"messages": messages}) for messages in TALKS]
    lines = [*BAD, good[0], BAD[0], *good[1:], BAD[0]]
    file = tmp_path / "f.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    with pytest.raises(MkdDataError, match="line 1: broken JSON"):
        store_of(file, folder, tmp_path)
    skipping = RecordOptions(skips_bad=True)
    for _ in range(2):  # stored by the first
        store, _ = store_of(file, folder, tmp_path, skipping)
        assert samples(store) == expected
        assert store.facts.skipped["that are broken"] == len(BAD) + 2
        text = str(store.facts)
        assert f"left out {len(BAD) + 2} that are broken ({file}, lines 1, 9: broken JSON" in text
        assert f"{file}, line 5: not UTF-8" in text and text.endswith("; ...)") and "line 6" not in text
    file.write_text("\n".join(line for line in BAD if isinstance(line, str)))
    with pytest.raises(
        MkdDataError, match=r"no conversation can be used \(0 conv.* left out 6 that are broken \(.*line 1"
    ):
        store_of(file, folder, tmp_path, skipping)


def test_broken_records_are_named_once_per_reason() -> None:
    records = BadRecords()
    for number in range(1, 8):
        records.add(MkdDataError(f"a, b.jsonl, line {number}: no template"))
    for message in ("a, b.jsonl, line 9: broken JSON (x)", "c.parquet, row 1: no template", "other"):
        records.add(MkdDataError(message))
    later = BadRecords()
    for message in ("a, b.jsonl, line 12: broken JSON (x)", "d, line 1: " + "y" * 900, "e, line 1: z", "other"):
        later.add(MkdDataError(message))
    records.merge(later)
    assert records.count == 14
    assert records.first == [
        "a, b.jsonl, lines 1, 2, 3, 4, 5, ...: no template",
        "a, b.jsonl, lines 9, 12: broken JSON (x)",
        "c.parquet, row 1: no template",
        "other",
        f"d, line 1: {'y' * 197}...",
    ]
    assert with_ellipsis(["f, lines 1, 2: x", "f, line 3: y"], 3)[-1] == "f, line 3: y"
    assert with_ellipsis(["f, lines 1, 2: x", "f, line 3: y"], 4)[-1] == "..."
    assert with_ellipsis(records.first, 14) == records.first


def test_the_form_and_a_sample_are_shown(folder: str, tmp_path: Path) -> None:
    records = [{"messages": talk("", "empty")}, sharegpt(talk("What\nis it?", "a  test")), sharegpt(talk("x", "y"))]
    file = write_lines(tmp_path / "f.jsonl", records)
    lines = preview(str(file), ChatTokenizer(folder))
    assert lines == [
        f"{file}: messages and sharegpt (recognized in the first 3 records; else give --kd-data-format)",
        f"{file}: learned between [[ and ]]: <|start|>user⏎What⏎is it?<|end|>⏎<|start|>assistant⏎[[a  test<|end|>]]⏎",
    ]
    write_lines(file, [{"messages": talk("a", "b"), "id": 1, "k\n": 2, "none": None, **{f"x{n}": n for n in range(9)}}])
    line = preview(str(file), ChatTokenizer(folder))[0]
    assert line.endswith(r"else give --kd-data-format); not read: id, 'k\n', x0, x1, x2, x3, x4, x5, ...")
    table = FILES["table.parquet"](
        tmp_path / "t.parquet", [{**sharegpt(talk("a", "b")), "prompt": "c", "system_prompt": "d"}]
    )
    assert preview(str(table), ChatTokenizer(folder))[0].endswith("; not read: prompt, system_prompt")
    write_lines(file, [sharegpt(talk("word " * 500, "answer " * 500))])
    line = preview(str(file), ChatTokenizer(folder, RecordOptions("sharegpt")))
    assert line[0].endswith("sharegpt (as given in --kd-data-format)")
    assert len(line[1]) < 1000 and "[[answer" in line[1] and " ... " in line[1]


GENERATION = ("{% generation %}", "{% endgeneration %}")


@pytest.mark.parametrize("marks", [("", ""), GENERATION], ids=["plain", "generation"])
@pytest.mark.parametrize(("end", "warns"), [("<|end|>", False), ("<|end|>\n", False), ("", True), ("\n", True)])
def test_answers_without_an_end_are_named(tmp_path: Path, end: str, warns: bool, marks: tuple[str, str]) -> None:
    """White space behind the end, which {% generation %} may include, is none."""
    begin, answer = "{% for m in messages %}<|start|>{{ m.role }}\n", "{{ m.content }}" + end
    marked = "{% if m.role == 'assistant' %}" + answer.join(marks) + "{% else %}" + answer + "{% endif %}{% endfor %}"
    chat_tokenizer(tmp_path, begin + marked + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
    lines = preview(str(write_lines(tmp_path / "f.jsonl", [sharegpt(talk("x", "y"))])), ChatTokenizer(str(tmp_path)))
    assert ["the student does not learn where an answer ends" in line for line in lines] == [False, False, True][
        : 2 + warns
    ]


def test_stored_tokens_of_files_that_could_be_read_before_keep_their_name(folder: str, tmp_path: Path) -> None:
    """The name is a hash of path, size, time, and of what the tokenizer and template are; nothing new is part of it."""
    from hashlib import blake2b

    file = write_lines(tmp_path / "f.jsonl", [{"messages": talk("a", "b")}])
    tokenizer, state = ChatTokenizer(folder), file.stat()
    inner = tokenizer.template.tokenizer
    parts = [inner.get_chat_template(), inner.backend_tokenizer.to_str(), str(inner.special_tokens_map)]
    fingerprint = blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    whole = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} 1 {fingerprint}"
    name = f"f-{blake2b(whole.encode(), digest_size=16).hexdigest()}-chat"
    assert chat_base(str(file), tokenizer, None) == tmp_path / "cache" / name
    store, _ = store_of(file, folder, tmp_path)
    stored = json.loads(next(tmp_path.glob("*-chat.json")).read_text())
    assert list(stored) == ["conversations", "tokens", "supervised", "max_token_id", "skipped", "version"]
    assert np.array_equal(store.lengths, [len(samples(store)[0][0])])
