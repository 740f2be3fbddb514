"""Lines that show how chat data is read: the form of its records, and one sample with its learned part in signs."""

from collections import Counter
from itertools import groupby

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.data.sources.chat import ChatTokenizer, Conversation
from mkd.data.sources.record_forms import form_of
from mkd.data.sources.stores import first_records
from mkd.data.sources.text import decode, json_object
from mkd.errors import MkdDataError

BEGIN, END = "[[", "]]"
"""Signs around supervised tokens."""
_MOST_CHARACTERS, _MOST_RUNS = 240, 8
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


def preview(name: str, tokenizer: ChatTokenizer) -> list[str]:
    """The form of the first records of chat data, and the first conversation with an answer.

    Raises:
        MkdDataError: a file is missing, or a record is invalid and not left out.
    """
    batch, options = first_records(name), tokenizer.options
    forms: Counter[str] = Counter()
    sample = None
    for where, line in batch.located():
        if not line.strip():
            continue
        try:
            forms[form_of(json_object(decode(line, where), where), options.form, where)] += 1
            if sample is None:
                sample = _marked_sample(Conversation.parse(line, where, options), tokenizer)
        except MkdDataError:
            if not options.skips_bad:
                raise
    found = " and ".join(forms) or "no form"
    source = "as given in" if options.form else f"recognized in the first {sum(forms.values())} records; else give"
    lines = [f"{name}: {found} ({source} --kd-data-format)"]
    return lines if sample is None else [*lines, f"{name}: learned between {BEGIN} and {END}: {sample}"]


def _marked_sample(chat: Conversation, tokenizer: ChatTokenizer) -> str | None:
    """The conversation's text; None if nothing of it is learned."""
    if chat.has_empty_message or not chat.has_answer:
        return None
    ids, supervised = tokenizer.template.encode(chat)
    return marked_text(ids, supervised, tokenizer.template.tokenizer) if supervised.any() else None


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
