"""Lines that show how chat data is read: the form of its records, and one sample with its learned part in signs."""

from collections import Counter
from itertools import groupby

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.config.values import DataForm
from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.record_forms import columns_to_read, form_of, unread_keys
from mkd.data.sources.stores import first_records
from mkd.data.sources.text import decode, json_object
from mkd.errors import MkdDataError

BEGIN, END = "[[", "]]"
"""Signs around supervised tokens."""
_MOST_CHARACTERS, _MOST_RUNS = 240, 8
_MOST_KEYS, _MOST_KEY_CHARACTERS = 8, 40
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


def preview(name: str, tokenizer: ChatTokenizer) -> list[str]:
    """The form of the first records of chat data with the keys that are not read, the first conversation with an
    answer, and a warning if that answer has no end.

    Raises:
        MkdDataError: a file is missing, or a record is invalid and not left out.
    """
    keys: set[str] = set()

    def columns(names: list[str]) -> list[str] | None:
        keys.update(names)
        return columns_to_read(names)

    batch, options = first_records(name, columns=columns), tokenizer.options
    forms: Counter[DataForm] = Counter()
    sample = None
    for where, line in batch.located():
        if not line.strip():
            continue
        try:
            record = json_object(decode(line, where), where)
            forms[form_of(record, options.form, where)] += 1
            keys.update(key for key, value in record.items() if value is not None)
            if sample is None:
                sample = _sample(Conversation.parse(line, where, options), tokenizer)
        except MkdDataError as error:
            if not options.skips_bad:
                raise options.unskipped(error) from error
    found = " and ".join(forms) or "no form"
    source = "as given in" if options.form else f"recognized in the first {sum(forms.values())} records; else give"
    unread = unread_keys(keys, forms)
    shown = ", ".join([*map(_key, unread[:_MOST_KEYS]), *(["..."] if len(unread) > _MOST_KEYS else [])])
    ignored = f"; not read: {shown}" if unread else ""
    lines = [f"{name}: {found} ({source} --kd-data-format){ignored}"]
    if sample is not None:
        lines.append(f"{name}: learned between {BEGIN} and {END}: {marked_text(*sample, tokenizer.template.tokenizer)}")
        if not _has_end(*sample, tokenizer.template.tokenizer):
            lines.append(
                f"{name}: warning: the last learned token there is no special token, so the student does not learn "
                "where an answer ends: change the chat template so that it writes one after each answer (inside "
                "{% generation %}, if it has that)"
            )
    return lines


def _key(name: str) -> str:
    """A key in one line."""
    short = name if len(name) <= _MOST_KEY_CHARACTERS else f"{name[: _MOST_KEY_CHARACTERS - 3]}..."
    return short if short.isprintable() else repr(short)


def _sample(chat: Conversation, tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray] | None:
    """[n] token ids of the conversation, and [n] bool, which of them are learned; None if none is."""
    if chat.has_empty_message or not chat.has_answer:
        return None
    ids, supervised = tokenizer.template.encode(chat)
    return (ids, supervised) if supervised.any() else None


def _has_end(ids: np.ndarray, supervised: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the last supervised token is one at which a model can stop; white space may follow it."""
    ends = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    learned = ids[supervised][::-1].tolist()
    return next((token for token in learned if token in ends or tokenizer.decode(token).strip()), None) in ends


def marked_text(ids: np.ndarray, supervised: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as one line of text, with signs around runs of supervised ones; long runs are shortened in the middle.

    Args:
        ids: [n] token ids.
        supervised: [n] bool.
        tokenizer: tokenizer of the ids.
    """
    parts = []
    for is_supervised, group in groupby(range(len(ids)), key=lambda position: bool(supervised[position])):
        if len(parts) == _MOST_RUNS:
            parts.append("...")
            break
        text = tokenizer.decode([int(ids[position]) for position in group]).translate(_VISIBLE)
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
        parts.append(f"{BEGIN}{text}{END}" if is_supervised else text)
    return "".join(parts)
