"""Prompts that the student continues during training (--kd-sample-prompts, --kd-eval-tasks, --kd-on-policy)."""

from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mkd.data.sources.chat import ChatTemplate
from mkd.data.sources.conversation import ASSISTANT, Conversation
from mkd.data.sources.record_forms import is_conversation, renaming_advice
from mkd.data.sources.text import decode, json_object, require_unicode
from mkd.errors import MkdDataError
from mkd.utils.near_paths import near_path_hint

_MOST_BYTES = 1 << 26
_FORMS = '{"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}]}'
"""Forms of a line, for messages."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    """As the model reads it: with the chat template's tokens, if it is a conversation."""
    tokens: tuple[int, ...]
    teacher: str | None = None
    """Name of the only teacher of its answers; None for all."""
    where: str = field(default="", compare=False)
    """Flag, file and line."""
    conversation: Conversation | None = field(default=None, compare=False)
    """The messages before the answer; None for a text."""


@dataclass(frozen=True)
class PromptFile:
    """Limits of a flag that names a file of prompts."""

    flag: str
    tokens_flag: str
    """The flag of the number of tokens that are written."""
    most: int
    """Prompts at most."""


SAMPLES = PromptFile("--kd-sample-prompts", "--kd-sample-tokens", 32)
ON_POLICY = PromptFile("--kd-prompts", "--kd-rollout-tokens", 1_000_000)


def read_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: PromptFile = SAMPLES,
    tokenizer_flag: str = "--tokenizer-model",
) -> list[Prompt]:
    """Read a file of prompts, one JSON object per line.

    {"prompt": TEXT} without an answer is continued as it is. A conversation, in any form of chat data, is rendered by
    the chat template with a generation prompt; answers at its end are left out.

    Args:
        path: the file.
        tokenizer: the student's.
        longest: tokens of a prompt at most.
        limits: of the flag that names the file.
        tokenizer_flag: the flag that named the tokenizer's folder, for messages.

    Raises:
        MkdDataError: the file or a line cannot be used; names the line.
    """
    lines = _lines(path, limits)
    if not lines:
        raise MkdDataError(
            f"{limits.flag} {path} has 0 lines; 1 to {limits.most} prompts are continued: write one per line, {_FORMS}"
        )
    if len(lines) > limits.most:
        raise MkdDataError(
            f"{limits.flag} {path} has {len(lines)} lines; 1 to {limits.most} prompts are continued: give fewer lines, "
            f"such as those of head -n {min(limits.most, 1000)} {path}"
        )
    parser = PromptParser(tokenizer, tokenizer_flag)
    prompts = [parser.parse(line, f"{limits.flag} {path}, line {number}") for number, line in lines]
    for prompt, (number, _) in zip(prompts, lines, strict=True):
        if not 1 <= len(prompt.tokens) <= longest:
            raise MkdDataError(
                f"{limits.flag} {path}, line {number}: the prompt has {len(prompt.tokens)} tokens; it must have 1 to "
                f"{longest}, which is --seq-length without {limits.tokens_flag}"
            )
    return prompts


def has_conversations(path: str) -> bool:
    """True if a line of the file of --kd-prompts is a conversation. Lines that `read_prompts` refuses are skipped."""

    def is_chat(line: bytes) -> bool:
        try:
            return is_conversation(json_object(decode(line, path), path))
        except MkdDataError:
            return False

    return any(is_chat(line) for _, line in _lines(path, ON_POLICY))


def _lines(path: str, limits: PromptFile) -> list[tuple[int, bytes]]:
    """(number, line) of each line of a file that is not blank. Raises MkdDataError if it is too long or missing."""
    if not Path(path).is_file():
        near = near_path_hint(path, Path.is_file)
        raise MkdDataError(f"{limits.flag} {path} does not exist or is not a file{near}")
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise MkdDataError(f"{limits.flag} {path} has more than {_MOST_BYTES:,} bytes; give 1 to {limits.most} prompts")
    numbered = enumerate(content.removeprefix(BOM_UTF8).splitlines(), start=1)
    return [(number, line) for number, line in numbered if line.strip()]


@dataclass
class PromptParser:
    """Reads the prompts of one file."""

    tokenizer: PreTrainedTokenizerBase
    flag: str = "--tokenizer-model"
    """The flag that named the tokenizer's folder, for messages."""
    _is_checked: bool = field(default=False, init=False)
    """True once the chat template is known to write generation prompts."""

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.tokenizer.name_or_path, self.flag)

    def parse(self, line: bytes, where: str) -> Prompt:
        """The prompt of one line; see `read_prompts`. Raises MkdDataError, which begins with `where`."""
        record = json_object(decode(line, where), where)
        teacher = record.get("teacher")
        if not isinstance(teacher, str | None):
            raise MkdDataError(f"{where}: teacher is a {type(teacher).__name__}, not the name of a teacher's folder")
        if not is_conversation(record):
            if not isinstance(record.get("prompt"), str):
                keys = ", ".join(sorted(record)) or "none"
                advice = renaming_advice(record, of_prompt=True) or f"write {_FORMS}"
                raise MkdDataError(f"{where}: neither a text in prompt nor messages (keys there: {keys}): {advice}")
            if record.get("system"):
                raise MkdDataError(
                    f"{where}: a text in prompt is continued as it is, without system: write both as messages"
                )
            require_unicode(record["prompt"], f"{where}: prompt")
            return Prompt(record["prompt"], self._text_tokens(record["prompt"]), teacher, where)
        conversation = Conversation.parse(line, where)
        messages = _without_answers(conversation.messages)
        if not messages:
            raise MkdDataError(f"{where}: there is no message to answer")
        conversation = replace(conversation, messages=messages)
        if not self._is_checked:
            self._template.check_generation_prompt(conversation)
            self._is_checked = True
        text = self._template.text(conversation, prompt=True)
        tokens = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Prompt(text, tokens, teacher, where, conversation)

    def _text_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text to continue, with those that the tokenizer puts before texts, such as <s>."""
        tokens = self.tokenizer(text)["input_ids"]
        return tuple(tokens[: len(tokens) - self._tokens_behind])

    @cached_property
    def _tokens_behind(self) -> int:
        """Number of tokens that the tokenizer puts behind texts, such as </s>: a text that ends is not continued."""
        bare, whole = (self.tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
        behind = range(len(whole) - len(bare), -1, -1)
        return next((n for n in behind if whole[len(whole) - n - len(bare) : len(whole) - n] == bare), 0)


def _without_answers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    end = len(messages)
    while end and messages[end - 1]["role"] == ASSISTANT:
        end -= 1
    return messages[:end]


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and `eos_token_id` of a generation_config.json.

    Raises:
        MkdDataError: `eos_token_id` is not an id or a list of ids.
    """
    given = generation.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise MkdDataError(
            f"generation_config.json in {tokenizer.name_or_path}: eos_token_id is {str(given)[:80]!r}; give an id, or "
            "a list of ids, or remove it"
        )
    return frozenset(one for one in (*ids, tokenizer.eos_token_id) if one is not None)


def require_known_tokens(prompts: Iterable[Prompt], vocabulary: int | None) -> None:
    """Raise MkdDataError for a prompt with a token that the model does not have: its folder has a larger tokenizer.

    Args:
        prompts: the prompts.
        vocabulary: tokens of the model; None if they are unknown, as for the doctor beside other problems.
    """
    for prompt in prompts if vocabulary is not None else ():
        if (largest := max(prompt.tokens)) >= vocabulary:
            raise MkdDataError(
                f"{prompt.where}: the prompt has token id {largest}, but the model's vocabulary has {vocabulary} "
                f"tokens (ids up to {vocabulary - 1}): leave the token out, or give the model's own tokenizer"
            )
