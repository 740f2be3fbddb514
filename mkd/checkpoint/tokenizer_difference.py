"""Differences between two tokenizers: names of control tokens, or anything that concerns ordinary text.

Families rename control tokens between releases (Qwen2.5 and Qwen3, a base model and its R1 distillation) and leave the
rest as it is. Ordinary text then has the same ids in both, and one model can learn from the other id by id.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.checkpoint.tokenizer_hash import merges_of, read_json_object
from mkd.errors import MkdCheckpointError

FILE = "tokenizer.json"
SHOWN = 8
"""Ids that a message lists."""
_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_OF_NAMES = ("vocab", "merges", "unk_token", "unk_id", "dropout")
"""Entries of "model" that are compared otherwise, or do not change how text is split."""


@dataclass(frozen=True)
class TokenizerDifference:
    """Differences between the tokenizers of two folders."""

    names: Mapping[int, tuple[str | None, str | None]]
    """Ids of control tokens that differ -> their names in the first and in the second; None: no such token."""
    ordinary: str | None
    """The first difference that concerns ordinary text; None if there is none."""

    @property
    def is_in_names_only(self) -> bool:
        """True if ordinary text has the same ids in both tokenizers."""
        return self.ordinary is None

    def __str__(self) -> str:
        listed = [
            f"{token} ({' / '.join('none' if name is None else repr(name) for name in pair)})"
            for token, pair in sorted(self.names.items())[:SHOWN]
        ]
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        count = "1 control token differs" if len(self.names) == 1 else f"{len(self.names)} control tokens differ"
        names = f"{count}: id {', '.join(listed)}{more}" if listed else ""
        return "; ".join(filter(None, (self.ordinary, names))) or "no difference in what is compared"


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a tokenizer by id."""

    ordinary: Mapping[int, Any]
    """Token, with its score in a unigram model."""
    control: Mapping[int, str]
    """Added tokens that are not text: special ones, and those named like <think> or [INST]."""

    @classmethod
    def of(cls, content: Mapping[str, Any], origin: str) -> "_Tokens":
        try:
            return cls._read(content)
        except (AttributeError, KeyError, TypeError) as error:
            raise MkdCheckpointError(f"{origin}: {FILE} is damaged ({error})") from error

    @classmethod
    def _read(cls, content: Mapping[str, Any]) -> "_Tokens":
        vocab = content.get("model", {}).get("vocab") or {}
        if isinstance(vocab, dict):
            ordinary = {token_id: token for token, token_id in vocab.items()}
        else:
            ordinary = {i: tuple(entry) if isinstance(entry, list) else entry for i, entry in enumerate(vocab)}
        control: dict[int, str] = {}
        for token in content.get("added_tokens") or []:
            name, token_id = token["content"], token["id"]
            is_control = bool(token.get("special")) or _MARKUP.fullmatch(name) is not None
            ordinary.pop(token_id, None)
            (control if is_control and name.strip() else ordinary)[token_id] = name
        if wrong := [token_id for token_id in (*ordinary, *control) if type(token_id) is not int]:
            raise TypeError(f"the id of a token is {wrong[0]!r:.40}")
        return cls(ordinary, control)


def tokenizer_difference(first: Path, second: Path, flags: tuple[str, str]) -> TokenizerDifference | None:
    """Compare the tokenizers of two folders.

    Compared are all tokens by id, merges, the normalizer, the pre-tokenizer and the options of the model. What a
    tokenizer adds around a text is not: both models read the student's ids.

    Args:
        first, second: folders.
        flags: the flags that named them, for messages.

    Returns:
        None if a folder has no tokenizer.json.

    Raises:
        MkdCheckpointError: a tokenizer.json is damaged.
    """
    if not all((folder / FILE).is_file() for folder in (first, second)):
        return None
    contents = [read_json_object(folder / FILE, flag) for folder, flag in zip((first, second), flags, strict=True)]
    a, b = (
        _Tokens.of(content, f"{flag} {folder}")
        for content, flag, folder in zip(contents, flags, (first, second), strict=True)
    )
    names, ordinary = {}, []
    for token_id in sorted(a.ordinary.keys() | a.control.keys() | b.ordinary.keys() | b.control.keys()):
        if token_id in a.ordinary or token_id in b.ordinary:
            if a.ordinary.get(token_id) != b.ordinary.get(token_id):
                ordinary.append(token_id)
        elif a.control.get(token_id) != b.control.get(token_id):
            names[token_id] = (a.control.get(token_id), b.control.get(token_id))
    return TokenizerDifference(names, _ordinary_difference(contents, (a, b), ordinary))


def _ordinary_difference(contents: list[dict[str, Any]], tokens: tuple[_Tokens, _Tokens], ids: list[int]) -> str | None:
    """The first difference that concerns ordinary text."""
    parts = [_parts(content) for content in contents]
    if parts[0]["type"] != parts[1]["type"]:
        return f"the models are {parts[0]['type']} and {parts[1]['type']}"
    if ids:
        first, second = ({**one.control, **one.ordinary}.get(ids[0]) for one in tokens)
        verb = "token differs" if len(ids) == 1 else "tokens differ"
        shown = ["none" if token is None else repr(token) for token in (first, second)]
        return f"{len(ids):,} ordinary {verb}, the first is id {ids[0]} ({' / '.join(shown)})"
    for name in ("merges", "normalizer", "pre_tokenizer", "options"):
        if parts[0][name] != parts[1][name]:
            return f"the {name.replace('_', '-')} of the two differ"
    return None


def _parts(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content.get("model") or {}
    options = {name: value for name, value in model.items() if name not in (*_OF_NAMES, "type") and value}
    return {
        "type": model.get("type"),
        "merges": merges_of(model),
        "normalizer": _canonical(content.get("normalizer")),
        "pre_tokenizer": _canonical(content.get("pre_tokenizer")),
        "options": options,
    }


def _canonical(part: Any) -> Any:
    """A normalizer or pre-tokenizer without wrappers and options that have no effect."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        inside = [_canonical(one) for one in part.get("normalizers") or part.get("pretokenizers") or []]
        return None if not inside else inside[0] if len(inside) == 1 else inside
    return {name: value for name, value in part.items() if name != "trim_offsets"}
