"""Chat templates of a model folder: Jinja programs, rendered the same on each day and rank, and within limits."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from mkd.utils.limits import limited

_DATE = datetime(2024, 7, 26)
"""The date that templates of Llama write where there is no clock."""
_SECONDS = 10.0
"""A template renders a conversation in a millisecond; loops over loops do not end."""


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """The result of transformers' `apply_chat_template`, the same on each day and rank.

    Args:
        tokenizer: has a template.
        messages: a conversation.
        options: those of transformers, such as `tools` and `tokenize`.

    Raises:
        Exception: any error of Jinja, or of Python in the template's expressions; also of a template that takes too
            much time or memory.
    """
    with limited(_SECONDS), _constant_clock_and_choices():
        return tokenizer.apply_chat_template(list(messages), **options)


class _ConstantClock:
    """Stands for `datetime` where transformers defines `strftime_now` of chat templates."""

    @staticmethod
    def now() -> datetime:
        return _DATE


@contextmanager
def _constant_clock_and_choices() -> Iterator[None]:
    """Inside the `with` block the date of templates is constant, and so is the choice of Jinja's filter `random`.

    A resumed run or another rank would otherwise read other tokens. transformers passes plain data to templates only,
    so that another `strftime_now` cannot be given to them: the clock that it reads is replaced.
    """
    clock, numbers = chat_template_utils.datetime, random.getstate()
    chat_template_utils.datetime = _ConstantClock
    random.seed(0)
    try:
        yield
    finally:
        chat_template_utils.datetime = clock
        random.setstate(numbers)
