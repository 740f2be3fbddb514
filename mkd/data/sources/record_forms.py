"""Forms of conversations in data as it is found, converted to the two that `Conversation` reads.

| form | keys of a record |
|---|---|
| messages | `messages`: role, content |
| prompt_completion | `prompt` and `completion` or `response`: strings, or lists of messages |
| sharegpt | `conversations`: from, value |
| alpaca | `instruction`, `output`; optional `input`, `history` |

In all of them `system` may be a system prompt, `tools` a list or a JSON string, and a content a list of parts of text.
Conversion changes neither the text nor the order of messages; other keys of a record are ignored.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mkd.config.values import BadRecordsMode, DataForm, DataFormat, nearest_hint
from mkd.errors import MkdDataError
from mkd.utils.json_files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of chat templates."""
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
"""Roles of ShareGPT files -> those of chat templates; other roles keep their name."""
FUNCTION_CALL = "function_call"
"""Role of an assistant's call of a tool, as JSON, in ShareGPT files."""
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Keys of a record whose content cannot be text."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_ROW_KEYS = ("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "response")
COLUMNS = (*_ROW_KEYS, "system", "history", "tools", *MEDIA)
"""Columns of a table that are read, if its form is known."""
_KEYS_OF_FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "input", "output", "history"),
    "prompt_completion": ("prompt", "completion", "response"),
}
"""Form -> its keys beside those of all forms."""
_KEYS_IN_LISTS = (({"from", "value"}, "conversations"), ({"role", "content"}, "messages"))
"""(Keys of a message, key of the list of such messages.)"""
_NAMED = ("messages", "conversations", "instruction", "output", "prompt", "completion", "response")
"""Keys by which a form is recognized."""
_COMPARED_KEYS, _COMPARED_CHARACTERS = 50, 50
"""Keys of a record, and characters of each, that are compared with known ones for an error message."""


@dataclass(frozen=True)
class RecordOptions:
    """Options of reading records of chat data; pickled to worker processes."""

    form: DataForm | None = None
    """None to recognize each record by its keys."""
    skips_bad: bool = False
    """Leave out broken records and count them; else the first one is an error."""

    @classmethod
    def of(cls, data_format: DataFormat, bad_records: BadRecordsMode) -> "RecordOptions":
        """Options from the values of the flags --kd-data-format and --kd-bad-records."""
        return cls(None if data_format == "auto" else data_format, bad_records == "skip")

    @property
    def key(self) -> list[str]:
        """Options that change the tokens, as a part of the hash of their name; empty for the defaults."""
        return [] if self == AS_FOUND else [str(self.form), str(self.skips_bad)]

    @staticmethod
    def unskipped(error: MkdDataError) -> MkdDataError:
        """The error of a broken record that ends the job, with the flag that leaves out such records."""
        return type(error)(f"{error}; --kd-bad-records skip leaves such records out")


AS_FOUND = RecordOptions()
"""Every record in the form that its keys show; a broken one is an error."""


def forms_of(keys: Collection[str]) -> list[DataForm]:
    """Forms that a record with these keys may have. `messages`, and `prompt` with `completion`, exclude the others."""
    if "messages" in keys:
        return ["messages"]
    if "prompt" in keys and "completion" in keys:
        return ["prompt_completion"]
    found: list[DataForm] = []
    if "conversations" in keys:
        found.append("sharegpt")
    if "instruction" in keys and "output" in keys:
        found.append("alpaca")
    if "prompt" in keys and "response" in keys:
        found.append("prompt_completion")
    return found


def is_conversation(record: Mapping[str, Any]) -> bool:
    """True if the keys of a record are those of a conversation."""
    return bool(forms_of(_present(record)))


def columns_to_read(names: list[str]) -> list[str] | None:
    """Columns of a table of conversations; None, for all, if its form is unknown and a message has to list them."""
    return [name for name in names if name in COLUMNS] if forms_of(names) else None


def unread_keys(keys: Collection[str], forms: Collection[DataForm]) -> list[str]:
    """Keys of records that are read in none of the forms."""
    read = {"system", "tools", *MEDIA, *(key for form in forms for key in _KEYS_OF_FORMS[form])}
    return sorted(set(keys) - read)


def form_of(record: Mapping[str, Any], form: DataForm | None, where: str) -> DataForm:
    """The form of a record.

    Args:
        record: an object of a file.
        form: the form that is expected; None to recognize it by the keys.
        where: file and line, for messages.

    Raises:
        MkdDataError: the record has another form, none that is known, or keys of several.
    """
    keys = _present(record)
    found = forms_of(keys)
    if form is not None:
        wanted = {
            "messages": ("messages",),
            "sharegpt": ("conversations",),
            "alpaca": ("instruction", "output"),
            "prompt_completion": ("prompt", "response" if "response" in keys else "completion"),
        }[form]
        missing = [key for key in wanted if key not in keys]
        if missing:
            other = f"; it looks like {found[0]}" if len(found) == 1 else ""
            renaming = "" if found else renaming_advice(record)
            raise MkdDataError(
                f"{where}: no {' and '.join(missing)}, which --kd-data-format {form} reads (keys there: "
                f"{_listed(keys)}{other}){renaming and f': {renaming}'}"
            )
        return form
    if len(found) > 1:
        raise MkdDataError(
            f"{where}: keys of several forms ({', '.join(found)}; keys there: {_listed(keys)}): keep those of one, or "
            "in --data-path of mkd train name the one to read with --kd-data-format"
        )
    if not found:
        raise MkdDataError(
            f"{where}: neither messages nor prompt and completion, nor another known form (keys there: "
            f"{_listed(keys)}): {key_advice(record)}"
        )
    return found[0]


def _present(record: Mapping[str, Any]) -> list[str]:
    return sorted(str(key) for key, value in record.items() if value is not None)


def _listed(keys: Collection[str]) -> str:
    return ", ".join(keys) or "none"


def renaming_advice(record: Mapping[str, Any], *, of_prompt: bool = False) -> str:
    """Advice on keys that are misspelled, or hold a list of messages under another name; empty if none is found.

    A list of messages is recognized by the keys of its first message, other keys by their spelling.

    Args:
        record: an object of a file, of an unknown form.
        of_prompt: True if a `prompt` without an answer can be read, too.
    """
    keys = _present(record)
    others = [key for key in keys if key not in COLUMNS][:_COMPARED_KEYS]
    for key in others:
        turns = _as_list(record[key])
        first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
        for names, right in _KEYS_IN_LISTS:
            if names <= first.keys():
                return f"rename {key} to {right}"
    renamed = {}
    for key in others:
        free = [name for name in _NAMED if name not in keys and name not in renamed.values()]
        if guesses := get_close_matches(key[:_COMPARED_CHARACTERS].lower(), free, n=1, cutoff=0.75):
            renamed[key] = guesses[0]
    is_readable = forms_of([renamed.get(key, key) for key in keys]) or (of_prompt and "prompt" in renamed.values())
    if not renamed or not is_readable:
        return ""
    return "rename " + " and ".join(f"{key} to {right}" for key, right in renamed.items())


def key_advice(record: Mapping[str, Any]) -> str:
    """Advice on the conversion of a record of an unknown form."""
    keys = _present(record)
    if {"prompt", "chosen"} <= set(keys):
        return "of preference pairs, rename chosen to completion"
    if renaming := renaming_advice(record):
        return renaming
    if "text" in keys:
        return "plain text is made into token files by mkd preprocess first"
    if "input_ids" in keys:
        return "token ids are read from Megatron's files only; give the texts"
    if {"role", "content"} <= set(keys):
        return "a conversation is one record; put its messages into a list under messages"
    for question in ("question", "query", "input", "instruction", "problem", "prompt"):
        for answer in ("answer", "response", "output", "solution", "completion", "target"):
            if question in keys and answer in keys:
                return f"rename {question} to prompt and {answer} to completion"
    return (
        "rename the keys of question and answer to prompt and completion, or write messages, a list of objects with "
        "role and content, or conversations, one with from and value (docs/data.md)"
    )


def standard_record(record: dict[str, Any], form: DataForm | None, where: str) -> dict[str, Any]:
    """A record in the form of `messages`, or of `prompt` and `completion`, with `tools` as a list.

    Args:
        record: an object of a file.
        form: the form that is expected; None to recognize it by the keys.
        where: file and line, for messages.

    Raises:
        MkdDataError: another form; images, sound or other parts that are not text; broken values.
    """
    form = form_of(record, form, where)
    for key in MEDIA:
        if record.get(key):
            raise MkdDataError(f"{where}: the record has {key}, and models here read text only: remove such records")
    if form != "alpaca" and record.get("history"):
        raise MkdDataError(
            f"{where}: the record has history, which is read next to instruction and output only: write the earlier "
            "turns into the list of messages"
        )
    if form == "messages":
        standard = {"messages": _plain(record["messages"], "messages", where)}
    elif form == "sharegpt":
        standard = {"messages": _from_sharegpt(record, where)}
    elif form == "alpaca":
        standard = {"messages": _from_alpaca(record, where)}
    else:
        answer = "completion" if record.get("completion") is not None else "response"
        standard = {
            "prompt": _plain(record["prompt"], "prompt", where),
            "completion": _plain(record[answer], answer, where),
        }
    first = "prompt" if "prompt" in standard else "messages"
    standard[first] = _with_system(record.get("system"), standard[first], where)
    return {**standard, "tools": _tools(record.get("tools"), where)}


def _tools(tools: Any, where: str) -> Any:
    if not isinstance(tools, str):
        return tools
    if not tools.strip():
        return None
    try:
        found = parse_json(tools)
    except ValueError:
        raise MkdDataError(f"{where}: tools is a str that is not JSON: write a list of tools") from None
    if found is not None and not isinstance(found, list):
        raise MkdDataError(f"{where}: tools is the JSON of a {type(found).__name__}, not of a list")
    return found


def _plain(value: Any, key: str, where: str) -> Any:
    """A list of messages whose contents are strings; another value is returned unchanged."""
    value = _as_list(value)
    if not isinstance(value, list):
        return value
    return [
        {**message, "content": _joined(message["content"], f"{where}: message {number} of {key}")}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for number, message in enumerate(value, start=1)
    ]


def _joined(parts: list[Any], name: str) -> str:
    """The text of a content that is a list of parts. Nothing stands between them, as in templates that take lists."""
    texts = []
    for number, part in enumerate(parts, start=1):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS:
            raise MkdDataError(
                f"{name} has a list as content whose part {number} is of type {kind!r}, and models here read text "
                "only: remove such records"
            )
        if not isinstance(text, str):
            raise MkdDataError(f"{name} has a list as content whose part {number} is not part of text")
        texts.append(text)
    return "".join(texts)


def _from_sharegpt(record: Mapping[str, Any], where: str) -> list[Any]:
    turns, messages = _as_list(record["conversations"]), []
    if not isinstance(turns, list):
        raise MkdDataError(f"{where}: conversations is a {type(turns).__name__}, not a list of messages")
    for number, turn in enumerate(turns, start=1):
        name = f"{where}: message {number} of conversations"
        if not isinstance(turn, dict):
            raise MkdDataError(f"{name} is a {type(turn).__name__}, not an object with from and value")
        messages.append(_from_turn(turn, name))
    return _plain(messages, "conversations", where)


def _as_list(value: Any) -> Any:
    """An object of lists of the same length, which `datasets` may store in place of a list of objects, as the latter;
    another value is returned unchanged."""
    if isinstance(value, dict):
        lengths = {len(column) if isinstance(column, list) else -1 for column in value.values()}
        if len(lengths) == 1 and -1 not in lengths:
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return value


def _from_turn(turn: dict[str, Any], name: str) -> dict[str, Any]:
    """A message of one turn; keys other than role and text are kept."""
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    if role_key not in turn:
        raise MkdDataError(f"{name} has neither from and value nor role and content (keys there: {_listed(turn)})")
    if text_key == "value" and "value" not in turn:
        raise MkdDataError(f"{name} has from and no value (keys there: {_listed(turn)}): write its text as value")
    role, text = turn[role_key], turn.get(text_key)
    others = {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    if not isinstance(role, str):
        raise MkdDataError(f"{name} has the role {role!r}, not a name")
    if role.lower() == FUNCTION_CALL:
        return {"role": "assistant", "tool_calls": _calls(text, name), **others}
    if text_key == "value" and not isinstance(text, str | list):
        raise MkdDataError(f"{name} has a {type(text).__name__} as value, not a string")
    standard = ROLE_ALIASES.get(role.lower(), role.lower())
    if standard not in ROLES:
        known = (*ROLE_ALIASES, FUNCTION_CALL, *(name for name in ROLES if name not in ROLE_ALIASES))
        raise MkdDataError(
            f"{name} has the role {role!r} ({role_key}); known are {', '.join(known)}"
            f"{nearest_hint(role.lower(), known)}"
        )
    return {"role": standard, "content": text, **others}


def unknown_role(message: Mapping[str, Any]) -> str:
    """The rest of the error of a message in `messages`, `prompt` or `completion` whose role is not one of `ROLES`."""
    role = message.get("role")
    if role is None and {"from", "value"} <= message.keys():
        return "has from and value, as in conversations, not role and content: rename the list to conversations"
    if role is None:
        return f"has the role None (keys there: {_listed(message)}); known are {', '.join(ROLES)}"
    name = str(role).lower()
    alias = ROLE_ALIASES.get(name)
    hint = f" (did you mean {alias!r}?)" if alias else nearest_hint(name, ROLES)
    return f"has the role {role!r}; known are {', '.join(ROLES)}{hint}"


def _calls(text: Any, name: str) -> list[dict[str, Any]]:
    """Calls of tools from the JSON of one, or of a list, with name and arguments."""
    try:
        calls = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise MkdDataError(
            f"{name} has the role {FUNCTION_CALL}, but its value is not the JSON of calls with name and arguments"
        )
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _from_alpaca(record: Mapping[str, Any], where: str) -> list[Any]:
    """Instruction and input are one user message, on lines of their own."""
    texts = {key: record.get(key) or "" for key in ("instruction", "input", "output")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise MkdDataError(f"{where}: {key} is a {type(value).__name__}, not a string")
    messages = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise MkdDataError(f"{where}: history is a {type(history).__name__}, not a list of pairs")
    for number, pair in enumerate(history, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise MkdDataError(f"{where}: entry {number} of history is not a pair of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text.strip())
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]
    return messages


def _with_system(system: Any, messages: Any, where: str) -> Any:
    """The messages after the system prompt of a record, unless it is empty or the first message already.

    Args:
        system: value of the key in the record.
        messages: a list of messages, or the text of a user's; another value is returned unchanged.
        where: file and line, for messages.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise MkdDataError(f"{where}: system is a {type(system).__name__}, not a string")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") == "system":
        if first.get("content") != system:
            raise MkdDataError(f"{where}: system differs from the first message, which is a system prompt: keep one")
        return messages
    return [{"role": "system", "content": system}, *messages]
