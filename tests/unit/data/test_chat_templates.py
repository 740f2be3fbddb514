"""Vendors' chat templates: which tokens of a conversation are the assistant's, and which conversations are refused."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from mkd.data.sources.chat import EMPTY, ChatTemplate, encode_lines
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.stores import ChatFacts
from mkd.data.sources.text import RawBatch
from mkd.errors import MkdDataError
from tests.support.chats import talk
from tests.support.vendor_templates import FAMILIES, tokenizer_for, trl_templates, without_marks

VENDORS, TRAINING = trl_templates()
TEMPLATES = VENDORS | FAMILIES
needs_trl = pytest.mark.skipif(not VENDORS, reason="trl is not installed")


def answer(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "abc123def", "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": "abc123def", "content": content}


LISTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that take contents as lists of parts only."""
WITHOUT_END = {"glm4moe"}
"""Templates that write no token at the end of an answer: the next message's role ends it."""
USER = {"role": "user", "content": "Where is Kyoto?"}
THANKS = {"role": "user", "content": "And Osaka?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds places.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Its name."}},
            "required": ["place"],
        },
    },
}
CHATS = {
    "one turn": Conversation(talk("Where is Kyoto?", "In Japan.")),
    "two turns": Conversation(talk("Where is Kyoto?", "In Japan.", "And Osaka?", "South of it.")),
    "system, three turns": Conversation(
        talk(
            "Where is Kyoto?",
            "In Japan.",
            "And Osaka?",
            "South.\n\nBy the sea.  ",
            "And Nara?",
            "4",
            system="Be brief.",
        )
    ),
    "same texts": Conversation(talk("Again", "Again", "Again", "Again", "<|x|> assistant\n", "assistant\n<b>\n")),
    "reasoning": Conversation([USER, answer("In Japan.", reasoning_content="A city, surely.")]),
    "reasoning in all turns": Conversation(
        [
            USER,
            answer("In Japan.", reasoning_content="A city, surely."),
            THANKS,
            answer("South of it.", reasoning_content="Another one."),
        ]
    ),
    "reasoning in contents": Conversation(
        talk(
            "Where is Kyoto?",
            "<think>\nA city, surely.\n</think>\n\nIn Japan.",
            "And Osaka?",
            "<think>\nAnother one.\n</think>\n\nSouth of it.",
        )
    ),
    "tools": Conversation(
        [
            USER,
            answer("", tool_calls=[call(place="Kyoto")]),
            result("35 N, 135 E"),
            answer("In Japan."),
            THANKS,
            answer("South of it."),
        ],
        tools=[TOOL],
    ),
    "null content": Conversation(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            answer(None, tool_calls=[call(limit=3)]),
            result("35 N, 135 E"),
            answer(None, tool_calls=[call()]),
            result("nothing"),
            answer("In Japan."),
        ],
        tools=[TOOL],
    ),
    "reasoning and tools": Conversation(
        [
            USER,
            answer("", reasoning_content="I must look.", tool_calls=[call(place="Kyoto")]),
            result("35 N, 135 E"),
            answer("In Japan.", reasoning_content="I know now."),
            THANKS,
            answer("South of it.", reasoning_content="Another one."),
        ],
        tools=[TOOL],
    ),
    "given": Conversation(talk("Where is Kyoto?", "In Japan.", "And Osaka?", "South of it."), given=3),
    "first answer not learned": Conversation(
        [USER, answer("In Japan.", weight=0), *talk("And Osaka?", "South of it.", "And Nara?", "Nearby.")]
    ),
    "arguments as text": Conversation(
        [
            USER,
            answer(
                None, tool_calls=[call(), {**call(), "function": {"name": "lookup", "arguments": '{"place": "Kyoto"}'}}]
            ),
            result("35 N, 135 E"),
            answer("In Japan."),
            THANKS,
            answer("South of it."),
        ],
        tools=[TOOL],
    ),
}


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return tokenizer_for([*TEMPLATES.values(), *TRAINING.values()])


@lru_cache
def chat_template(text: str, name: str) -> ChatTemplate:
    own = copy.copy(tokenizer())
    own.chat_template = text
    return ChatTemplate(own, name)


def template_of(name: str) -> ChatTemplate:
    return chat_template(TEMPLATES[name], name)


def special_tokens(template: ChatTemplate) -> tuple[str, ...]:
    return tuple(token.content for token in template.tokenizer.added_tokens_decoder.values() if token.special)


def runs(mask: np.ndarray) -> Iterator[slice]:
    """Runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return map(slice, edges[::2], edges[1::2])


def learned(template: ChatTemplate, chat: Conversation) -> list[str]:
    """Text of each run of supervised tokens."""
    ids, mask = template.encode(chat)
    return [template.tokenizer.decode(ids[run]) for run in runs(mask)]


def parts_of(message: dict[str, Any]) -> list[str]:
    """Texts that a message's span must hold, apart from reasoning."""
    content = re.sub("<think>.*</think>", "", message["content"] or "", flags=re.DOTALL).strip()
    return [content, *("Kyoto" for made in message.get("tool_calls", []) if "Kyoto" in str(made))]


def render(template: ChatTemplate, chat: Conversation, count: int, prompt: bool) -> str:
    return template.text(replace(chat, messages=chat.messages[:count]), prompt)


def by_prefixes(template: ChatTemplate, chat: Conversation) -> np.ndarray | None:
    """Mask of answers whose bounds are lengths of prefixes of the whole text; None if a rendering is not a prefix."""
    text = template.text(chat)
    coded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(coded["offset_mapping"]).reshape(-1, 2)
    mask = np.zeros(len(offsets), dtype=bool)
    for number in range(1, len(chat.messages)):
        if not chat.is_learned(number):
            continue
        before, after = render(template, chat, number, True), render(template, chat, number + 1, False)
        if not text.startswith(before) or not text.startswith(after):
            return None
        end, message = len(after), text[len(before) : len(after)].rstrip()
        end = len(before) + len(message) if message.endswith(special_tokens(template)) else end
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > len(before))
    return mask


REASONS = {
    "does not write the record's tools": "t",
    "does not write tool_calls": "c",
    "does not write tool call 2": "c",
    "does not write reasoning_content": "r",
    "does not write the <think> block in content": "b",
    "does not write content": "l",
    "refuses the conversation": "x",
    "tokens cannot be found": "p",
}
"""Part of an error -> its letter in OUTCOMES."""
OUTCOMES = {
    "cohere": "++++rr+xxx++x",
    "cohere2": "++++rr+xxx++x",
    "deepseek_r1_distill": "++++rrbttt++t",
    "deepseekv3": "++++rrbxxx++x",
    "diffusion_gemma": "++++++++++++x",
    "gemma": "++x+rr+xxx++x",
    "gemma3": "++++rr+xxx++x",
    "gemma4": "++++rr+++r+++",
    "gemma4_v2": "++++rr+++r+++",
    "gemma4_v3": "++++rr+++r+++",
    "gemma4_v4": "++++rr+++r+++",
    "gemma4_v5": "++++++++++++x",
    "glm4moe": "++++++++++++x",
    "gptoss": "++++++++++++c",
    "idefics3": "lllllllxxxllx",
    "lfm2": "++++rr+ccc++c",
    "lfm2_2_5": "++++++++++++x",
    "lfm2_2_5_v2": "++++++++++++x",
    "lfm2_2_5_vl": "++++++++++++x",
    "lfm2_v2": "++++rr+++r++x",
    "llama3": "++++rr+ttt++t",
    "llama3_1": "++++rr+++r++x",
    "llama3_2": "++++rr+++r++x",
    "llava_next": "xxxxxxxxxxxxx",
    "muse_glimmer": "++++++++++++x",
    "nemotron_3_5_lightning": "++++++++++++x",
    "nemotron_3_nano": "++++++++++++x",
    "nemotron_3_super": "++++++++++++x",
    "nemotron_3_ultra": "++++++++++++x",
    "phi3": "++++rr+ttt++t",
    "phi3_5": "++++rr+ttt++t",
    "qwen2_5": "++++rr+++r+++",
    "qwen2_5_vl": "++++rr+ttt++t",
    "qwen3": "+++++++++++++",
    "qwen3_5_nothink": "++++++++++++x",
    "qwen3_5_think": "++++++++++++x",
    "qwen3_6": "++++++++++++x",
    "qwen3_8": "++++++++++++x",
    "qwen3_instruct_2507": "++++rr+++r+++",
    "qwen3_vl": "++++rr+++r+++",
    "smolvlm": "lllllllxxxllx",
    "mistral": "++x+rr++xr+++",
    "llama 2": "++++rr+ttt++t",
    "smollm2": "++++rr+ttt++t",
    "smollm3": "++++rr+ttt++t",
    "phi 4": "++++rr+ttt++t",
    "granite": "++++rr+ttt++t",
    "tulu": "++++rr+ttt++t",
    "qwq": "++++rrbttt++t",
    "kimi": "++++rr+++r+++",
    "ends with eos": "++++rr+ttt++t",
    "ends with return": "+++++++ttt++t",
}
"""Template -> for each conversation of CHATS `+` if it is learned, or a letter of REASONS if it is refused."""


def outcome(name: str, chat: str) -> tuple[list[str], str]:
    """Learned texts, and the error if there is one."""
    try:
        return learned(template_of(name), CHATS[chat]), ""
    except MkdDataError as error:
        return [], str(error)


def expected_parts(chat: Conversation) -> list[list[str]]:
    """Texts of each answer that is learned. The first message has no prompt, and is not an answer."""
    return [parts_of(message) for i, message in enumerate(chat.messages) if i and chat.is_learned(i)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_learned_or_refused_by_name(name: str) -> None:
    outcomes = ""
    for chat in CHATS:
        texts, error = outcome(name, chat)
        if error:
            assert f"the chat template of --tokenizer-model {name} " in error
            outcomes += next(letter for reason, letter in REASONS.items() if reason in error)
            continue
        outcomes += "+"
        expected = expected_parts(CHATS[chat])
        assert len(texts) == len(expected), chat
        for text, parts in zip(texts, expected, strict=True):
            assert all(part in text for part in parts), chat
            assert chat == "same texts" or not re.search("Where|Osaka|Nara|35 N|Be brief|user\n|Finds", text), chat
            assert text.rstrip().endswith(special_tokens(template_of(name))) or name in WITHOUT_END, chat
    assert outcomes == OUTCOMES.get(name, outcomes)


@needs_trl
def test_number_of_templates_and_conversations() -> None:
    assert len(CHATS) >= 10
    assert len(VENDORS.keys() & OUTCOMES.keys()) >= 35
    assert FAMILIES.keys() < OUTCOMES.keys()


def test_empty_answers_are_left_out() -> None:
    chats = [
        [USER, answer("")],
        [USER, answer(" ", reasoning_content="Hm.")],
        [USER, answer(None), THANKS, answer("South.")],
    ]
    lines = [json.dumps({"messages": messages}).encode() for messages in chats]
    coded = encode_lines(template_of("phi 4"), RawBatch("f.jsonl", 1, lines))
    assert (coded.lengths, coded.skipped[EMPTY]) == ([], 3)


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_prefixes_where_renderings_are_prefixes(name: str) -> None:
    template = template_of(name)
    for chat in CHATS:
        if not outcome(name, chat)[1] and (mask := by_prefixes(template, CHATS[chat])) is not None:
            assert template.marks_assistant or template.encode(CHATS[chat])[1].tolist() == mask.tolist(), chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_find_what_prefixes_find(name: str) -> None:
    """A character before conversations that are not whole prevents that they are prefixes, and changes nothing else."""
    template, compared = chat_template(without_marks(TEMPLATES[name]), name), 0
    for chat in CHATS:
        if outcome(name, chat)[1] or (mask := by_prefixes(template, CHATS[chat])) is None:
            continue
        before = f"{{% if messages | length < {len(CHATS[chat].messages)} %}}{{{{ '~' }}}}{{% endif %}}"
        without_prefixes = chat_template(before + template.tokenizer.chat_template, name)
        assert by_prefixes(without_prefixes, CHATS[chat]) is None, chat
        assert without_prefixes.encode(CHATS[chat])[1].tolist() == mask.tolist(), chat
        compared += 1
    assert compared >= (3 if name in ("cohere", "gemma", "llama3_1", "qwen2_5", "mistral", "phi 4") else 0)


def trl_mask(template: ChatTemplate, chat: Conversation) -> np.ndarray:
    """The mask that transformers makes of {% generation %} blocks."""
    messages = [{**message, "content": message["content"] or ""} for message in chat.messages]
    coded = template.tokenizer.apply_chat_template(
        messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return np.array(coded["assistant_masks"], dtype=bool)


LEARNED_BESIDES_TRL = {"diffusion_gemma": {"<|tool_response>", "<|turn>model\n"}}
"""TRL does not learn the token that ends a tool call, nor what the generation prompt after a result lacks."""


@needs_trl
@pytest.mark.parametrize("variant", ["of the vendor", "of TRL"])
@pytest.mark.parametrize("name", TRAINING)
def test_masks_are_those_of_trl_but_for_documented_differences(name: str, variant: str) -> None:
    """The vendor's template where TRL's training variant writes the same text, and that variant without its marks."""
    text = VENDORS[name] if variant == "of the vendor" else without_marks(TRAINING[name])
    template, training, compared = chat_template(text, name), chat_template(TRAINING[name], f"{name} of TRL"), 0
    for chat in CHATS.values():
        chat = Conversation([{**message, "weight": None} for message in chat.messages], tools=chat.tools)
        try:
            ids, mask = template.encode(chat)
            wanted = trl_mask(training, chat) if template.text(chat) == training.text(chat) else None
        except MkdDataError:
            continue
        if wanted is None:
            continue
        compared += 1
        first = next(i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
        decode, prompt = template.tokenizer.decode, render(template, chat, first, prompt=True)
        for run in runs(wanted):
            inside = run.start + np.flatnonzero(mask[run])
            assert mask[inside[0] : inside[-1] + 1].all()
            before, after = decode(ids[run.start : inside[0]]), decode(ids[inside[-1] + 1 : run.stop])
            assert before.strip() in prompt[-40:], "a beginning that the generation prompt holds"
            assert not after.strip(), "white space after the token that ends the turn"
        assert {decode(ids[run]) for run in runs(mask & ~wanted)} <= LEARNED_BESIDES_TRL.get(name, set())
    assert compared >= (2 if name not in LISTS and (name, variant) != ("glm4moe", "of the vendor") else 0)


TURN = "{{ '<|' + m.role + '|>' }}"
UNCERTAIN = {
    "no end before another message": (
        "{% for m in messages %}"
        + TURN
        + "{{ m.content }}{{ eos_token if loop.last and m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "does not end it as it ends the conversation up to it",
    ),
    "another header": (
        "{% for m in messages %}{{ '' if loop.last else 'old ' }}{{ m.role + ': ' + m.content + eos_token }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'answer:' }}{% endif %}",
        "does not write the generation prompt before it",
    ),
    "all texts twice": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}"
        + TURN
        + "{{ m.content + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "does not ",
    ),
    "reversed": (
        "{% for m in messages | reverse %}" + TURN + "{{ m.content + eos_token }}{% endfor %}",
        "does not write",
    ),
    "length": (
        "{% for m in messages %}" + TURN + "{{ m.content | length ~ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{{ messages | length }}",
        "does not write it, or",
    ),
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_answers_without_a_certain_position_are_refused(case: str) -> None:
    text, reason = UNCERTAIN[case]
    chat = replace(CHATS["two turns"], where="f.jsonl, line 3")
    with pytest.raises(
        MkdDataError, match=rf"f.jsonl, line 3: the chat template of .* renders message 2 \(assistant\) diff.*{reason}"
    ):
        chat_template(text, "folder").encode(chat)


def test_a_special_token_inside_an_answer_does_not_end_it() -> None:
    template = chat_template(FAMILIES["ends with eos"], "folder")
    with pytest.raises(MkdDataError, match=r"message 2 \(assistant\) .*does not end it as"):
        template.encode(Conversation(talk("a", "b<|end|>c", "d", "e")))


def test_reasoning_that_a_template_never_writes_is_an_error() -> None:
    chat = Conversation(talk("Why?", "<think>Hm.</think>So.", "And?", "<think>Hm.</think>Thus."), where="here")
    with pytest.raises(
        MkdDataError, match=r"here: .* does not write the <think> block in content of message 2 \(assist"
    ):
        chat_template(FAMILIES["qwq"], "folder").encode(chat)
    empty = Conversation(talk("Why?", "<think>\n\n</think>So.", "And?", "Thus."))
    assert learned(chat_template(FAMILIES["qwq"], "folder"), empty) == ["So.<|im_end|>", "Thus.<|im_end|>"]


def test_rewritten_answers_are_counted_and_learned_as_the_whole_conversation_has_them() -> None:
    template = chat_template(FAMILIES["ends with return"], "folder")
    chats = [
        CHATS["two turns"],
        Conversation([USER, answer("In Japan.", thinking="Hm."), THANKS, answer("South.", thinking="So.")]),
    ]
    assert [template.encode_chat(chat).rewritten for chat in chats] == [False, True]
    assert learned(template, chats[1]) == [
        "<|channel|>final<|message|>In Japan.<|end|>",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>South.<|return|>",
    ]
    lines = [json.dumps({"messages": chat.messages}).encode() for chat in chats]
    coded = encode_lines(template, RawBatch("f.jsonl", 1, lines))
    assert coded.rewritten == 1
    facts = ChatFacts(2, 100, 20, 300, coded.skipped, rewritten=coded.rewritten)
    assert "20 of the assistant, 1 with earlier answers that the chat template rewrites" in str(facts)
    assert "rewrites" not in str(replace(facts, rewritten=0))


def test_context_of_templates_with_marks_that_rewrite_earlier_turns() -> None:
    """Excluded messages and given ones are located by marks: only the other answers stay in the mask."""
    text = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}{{ m.thinking }}{% endif %}{{ m.content + '<|end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    template = chat_template(text, "folder")
    messages = [USER, answer("In Japan.", thinking="Hm."), THANKS, answer("South.", thinking="So.")]
    assert learned(template, Conversation(messages)) == ["In Japan.<|end|>", "So.South.<|end|>"]
    assert learned(template, Conversation(messages, given=2)) == ["So.South.<|end|>"]
    assert learned(template, Conversation(messages, given=3)) == ["So.South.<|end|>"]
    first = [USER, answer("In Japan.", thinking="Hm.", weight=0), *messages[2:]]
    assert learned(template, Conversation(first)) == ["So.South.<|end|>"]
