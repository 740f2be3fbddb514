"""Tasks with checkable answers, which the student answers at each evaluation (--kd-eval-tasks)."""

import re
from codecs import BOM_UTF8
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from mkd.data.sources.prompts import Prompt, PromptParser
from mkd.data.sources.text import decode, json_object, require_unicode
from mkd.errors import MkdDataError
from mkd.utils.json_files import MOST_BYTES, read_regular
from mkd.utils.limits import limited
from mkd.utils.near_paths import near_path_hint

FLAG = "--kd-eval-tasks"
MOST_TASKS = 10_000
Match = Literal["exact", "number", "regex", "contains"]
_LONGEST_PATTERN = 1_000
"""Characters of a regular expression."""
_PATTERN_SECONDS = 1.0
"""Time in which an expression must search a text."""
_PROBES = tuple(part * 2_000 for part in ("a", "1", " ", "a ", "1,", "x = 1\n"))
"""Texts on which expressions are tried before the job starts."""
_NUMBER = re.compile(r"[-+]?(?:\d{1,100}(?:,\d{3})*(?:\.\d{1,100})?|(?<![\w.])\.\d{1,100})")
"""A number; without a digit before its point only where that follows no word: the 5 of "step.5" is 5."""


@dataclass(frozen=True)
class Task:
    """A prompt and the answer that is expected."""

    prompt: Prompt
    answer: str
    match: Match

    def is_solved_by(self, text: str) -> bool:
        """True if the text matches the answer; False if a regular expression takes too long."""
        if self.match == "exact":
            return text.strip() == self.answer.strip()
        if self.match == "contains":
            return self.answer in text
        if self.match == "number":
            found = _last_number(text)
            return found is not None and found == _last_number(self.answer)
        try:
            with limited(_PATTERN_SECONDS):
                return re.search(self.answer, text) is not None
        except (TimeoutError, MemoryError):
            return False


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def read_tasks(
    path: str, tokenizer: PreTrainedTokenizerBase, longest: int, tokenizer_flag: str = "--tokenizer-model"
) -> list[Task]:
    """Read a file of tasks, one JSON object per line: a prompt as in `mkd.data.sources.prompts`, `answer` and `match`.

    Args:
        path: the file.
        tokenizer: the student's.
        longest: tokens of a prompt at most.
        tokenizer_flag: the flag that named the tokenizer's folder, for messages.

    Raises:
        MkdDataError: the file or a line cannot be used; names the line.
    """
    if not Path(path).is_file():
        raise MkdDataError(f"{FLAG} {path} does not exist or is not a file{near_path_hint(path, Path.is_file)}")
    try:
        numbered = enumerate(read_regular(Path(path), MOST_BYTES).removeprefix(BOM_UTF8).splitlines(), start=1)
    except ValueError as error:
        raise MkdDataError(f"{FLAG} {path}: {error}") from None
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise MkdDataError(
            f"{FLAG} {path} has 0 lines; 1 to {MOST_TASKS} tasks are answered: write one per line, "
            '{"prompt": TEXT, "answer": TEXT}'
        )
    if len(lines) > MOST_TASKS:
        raise MkdDataError(f"{FLAG} {path} has {len(lines)} lines; 1 to {MOST_TASKS} tasks are answered")
    tasks, parser = [], PromptParser(tokenizer, tokenizer_flag)
    for number, line in lines:
        where = f"{FLAG} {path}, line {number}"
        task = _task(line, where, parser)
        if not 1 <= len(task.prompt.tokens) <= longest:
            raise MkdDataError(
                f"{where}: the prompt has {len(task.prompt.tokens)} tokens; it must have 1 to {longest}, which is "
                "--seq-length without --kd-eval-tokens"
            )
        tasks.append(task)
    patterns: dict[str, str] = {}
    for task in tasks:
        if task.match == "regex":
            patterns.setdefault(task.answer, task.prompt.where)
    for pattern, where in patterns.items():
        _check_pattern(pattern, where)
    return tasks


def _task(line: bytes, where: str, parser: PromptParser) -> Task:
    record = json_object(decode(line, where), where)
    answer, match = record.get("answer"), record.get("match", "exact")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise MkdDataError(f"{where}: there is no answer: give a text or a number in answer")
    require_unicode(answer, f"{where}: answer")
    if match not in get_args(Match):
        raise MkdDataError(f"{where}: match is {_short(match)}; it must be one of {', '.join(get_args(Match))}")
    if match == "number" and _last_number(answer) is None:
        raise MkdDataError(f"{where}: match is number, and answer {_short(answer)} has none: give a number in answer")
    return Task(parser.parse(line, where), answer, match)


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse an expression that is invalid, too long, or takes too long on texts that are hard for many."""
    what = f"{where}: the regular expression {_short(pattern)}"
    if len(pattern) > _LONGEST_PATTERN:
        raise MkdDataError(f"{what} has {len(pattern)} characters; at most {_LONGEST_PATTERN} are used: shorten it")
    try:
        with limited(_PATTERN_SECONDS):
            compiled = re.compile(pattern)
            for text in _PROBES:
                compiled.search(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise MkdDataError(f"{what} in answer is invalid ({' '.join(str(error).split())}): correct it") from None
    except (TimeoutError, MemoryError):
        raise MkdDataError(
            f"{what} took more than {_PATTERN_SECONDS:g} s, or too much memory, on a text of {len(_PROBES[-1])} "
            "characters: leave out nested repetitions"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
