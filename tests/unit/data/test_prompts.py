"""Files of --kd-sample-prompts."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from mkd.data.sources.prompts import SAMPLES, end_tokens, read_prompts, require_known_tokens
from mkd.errors import MkdDataError
from mkd.utils.model_folders.pretrained import load_tokenizer
from tests.support.chats import FORGETFUL, MARKED, PLAIN, chat_tokenizer
from tests.support.tokenizers_of_kinds import transformers_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer") / "chat"
    chat_tokenizer(folder, MARKED)
    return load_tokenizer(str(folder))


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return str(path)


def test_texts_and_conversations(tokenizer: Any, tmp_path: Path) -> None:
    question = {"role": "user", "content": "hello there"}
    answer = {"role": "assistant", "content": "hi"}
    path = write(
        tmp_path / "p.jsonl", {"prompt": "hello"}, "", {"messages": [question]}, {"messages": [question, answer]}
    )
    text, chat, answered = read_prompts(path, tokenizer, 100)
    assert (text.text, list(text.tokens)) == ("hello", tokenizer("hello")["input_ids"])
    expected = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    assert chat.text == expected and answered == chat
    lines = (
        {"conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]},
        {"prompt": "hello there", "completion": "hi"},
    )
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, lines)).encode())
    assert read_prompts(str(tmp_path / "bom.jsonl"), tokenizer, 100) == [chat, chat]
    ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(chat.tokens) == ids


@pytest.mark.parametrize(("single", "before"), [("$A </s>", []), ("<s> $A </s>", ["<s>"]), ("<s> $A", ["<s>"])])
def test_a_text_does_not_end_before_it_is_continued(tmp_path: Path, single: str, before: list[str]) -> None:
    """Some tokenizers put an end token behind every text."""
    tokenizer = copy.deepcopy(transformers_tokenizer("metaspace_bpe"))
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    path = write(tmp_path / "p.jsonl", {"prompt": "The class"}, {"prompt": "a </s>"}, *([{"prompt": ""}] * len(before)))
    for prompt in read_prompts(path, tokenizer, 100):
        words = tokenizer.tokenize(prompt.text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(prompt.tokens) == [*before, *words]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], 'has 0 lines; 1 to 32 prompts are continued: write one per line, {"prompt": TEXT} or {"messages": ['),
        ([{"promt": "x"}], "messages (keys there: promt): rename promt to prompt"),
        ([{"convs": [{"from": "human", "value": "x"}]}], "(keys there: convs): rename convs to conversations"),
        ([{"text": "x"}], '(keys there: text): write {"prompt": TEXT} or {"messages": ['),
        ([{"prompt": "x"}] * (SAMPLES.most + 1), "has 33 lines"),
        ([{"prompt": "x"}, {"text": "x"}], "line 2: neither a text in prompt nor messages (keys there: text)"),
        (["{"], "line 1"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "line 1: there is no message to answer"),
        ([{"prompt": "x", "system": "y"}], "line 1: a text in prompt is continued as it is, without system: write"),
        ([{"prompt": "a\ud800"}], "line 1: prompt: half a surrogate pair at character 1"),
        ([{"prompt": ""}], "line 1: the prompt has 0 tokens; it must have 1 to 9"),
        ([{"prompt": "hello " * 50}], "it must have 1 to 9, which is --seq-length without --kd-sample-tokens"),
    ],
)
def test_invalid_files(tokenizer: Any, tmp_path: Path, records: list, words: str) -> None:
    path = write(tmp_path / "p.jsonl", *records)
    with pytest.raises(MkdDataError) as caught:
        read_prompts(path, tokenizer, 9)
    assert words in str(caught.value) and str(caught.value).startswith("--kd-sample-prompts")
    assert "\n" not in str(caught.value)


def test_missing_file(tokenizer: Any) -> None:
    with pytest.raises(MkdDataError, match="--kd-sample-prompts nowhere does not exist"):
        read_prompts("nowhere", tokenizer, 9)


@pytest.mark.parametrize(
    ("config", "more"), [({}, set()), ({"eos_token_id": 3}, {3}), ({"eos_token_id": [3, 4]}, {3, 4})]
)
def test_end_tokens(tokenizer: Any, config: dict, more: set[int]) -> None:
    assert end_tokens(tokenizer, config) == more | {tokenizer.eos_token_id}


@pytest.mark.parametrize("given", ["x", [[1]], -5, True, 1e5, {"a": 1}])
def test_invalid_end_tokens(tokenizer: Any, given: Any) -> None:
    with pytest.raises(MkdDataError, match=r"generation_config.json in .*: eos_token_id is .*; give an id, or a list"):
        end_tokens(tokenizer, {"eos_token_id": given})


def test_tokens_that_the_model_does_not_have(tokenizer: Any, tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}), tokenizer, 9)
    largest = max(prompts[0].tokens)
    require_known_tokens(prompts, largest + 1)
    with pytest.raises(MkdDataError, match=f"p.jsonl, line 1: the prompt has token id {largest}, but the model's voc"):
        require_known_tokens(prompts, largest)


ASKED = "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{% endif %}"
INSTRUCTIONS = "{% for m in messages %}" + ASKED + "{% endfor %}"
"""As in Llama 2: the end of a question is the generation prompt."""


def test_dates_and_random_choices_of_a_template_are_constant(tmp_path: Path) -> None:
    """Else a resumed run, or another rank, would read other prompts."""
    chat_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }} {{ range(99999) | random }}" + PLAIN)
    path = write(tmp_path / "p.jsonl", *[{"messages": [{"role": "user", "content": "hello"}]}] * 2)
    numbers = random.getstate()
    one, other = read_prompts(path, load_tokenizer(str(tmp_path)), 99)
    assert one.text.startswith("26 Jul 2024 ") and one == other
    assert random.getstate() == numbers


@pytest.mark.parametrize(
    ("template", "is_refused"),
    [(PLAIN, False), (INSTRUCTIONS, False), (FORGETFUL, True), (PLAIN.partition("{% if add_gen")[0], True)],
)
def test_generation_prompt(tmp_path: Path, template: str, is_refused: bool) -> None:
    chat_tokenizer(tmp_path, template)
    path = write(tmp_path / "p.jsonl", {"prompt": "x"}, {"messages": [{"role": "user", "content": "hello"}]})
    if not is_refused:
        assert len(read_prompts(path, load_tokenizer(str(tmp_path)), 99)) == 2
        return
    with pytest.raises(MkdDataError, match=r"line 2: the chat template of .* has no generation prompt, so that"):
        read_prompts(path, load_tokenizer(str(tmp_path)), 99)
