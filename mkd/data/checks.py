"""Checks of the files and shares of the data, before any weight is loaded."""

import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from mkd.data.sources.data_files import RECORDS, FileFormat, unknown_suffix
from mkd.data.sources.indexed import IndexedText
from mkd.data.sources.stores import is_chat_file
from mkd.data.sources.token_files import check_index
from mkd.errors import MkdDataError
from mkd.utils.near_paths import near_path

# Without PREFIX.json the smallest and largest id are searched in this many windows of this many tokens.
_PROBES, _PROBE_TOKENS = 256, 1 << 18


def check_data(prefixes: Iterable[str], true_vocab: int, tokenizer_hash: str | None) -> None:
    """Check files and vocabulary before any weight is loaded.

    Args:
        prefixes: PREFIX of each PREFIX.bin and PREFIX.idx.
        true_vocab: vocabulary size of the model, without padding.
        tokenizer_hash: hash of the model's tokenizer; None if unknown.

    Raises:
        MkdDataError: a file is missing, empty or incomplete, was made with another tokenizer, or holds ids outside the
        model's vocabulary.
    """
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            file = Path(prefix + suffix)
            if not file.is_file():
                raise MkdDataError(f"--data-path {prefix}: {_missing(prefix, file)}")
            if file.stat().st_size == 0:
                raise MkdDataError(f"--data-path {prefix}: {file} is empty")
        dtype = check_index(prefix).dtype
        facts = IndexedText.load(prefix)
        if facts is not None and facts.tokenizer_hash and tokenizer_hash and facts.tokenizer_hash != tokenizer_hash:
            raise MkdDataError(
                f"--data-path {prefix}: according to {prefix}.json the data was made with a different tokenizer from "
                "the model's; run mkd preprocess with --tokenizer-model set to the model's folder"
            )
        smallest, largest = _tokens_seen(prefix, dtype) if facts is None else (0, facts.max_token_id)
        if smallest < 0:
            raise MkdDataError(
                f"--data-path {prefix} has token id {smallest}: {prefix}.bin is damaged, or {prefix}.idx has another "
                "dtype than it; make the data again (mkd preprocess)"
            )
        if largest >= true_vocab:
            raise MkdDataError(
                f"--data-path {prefix} has token id {largest}, but the model's vocabulary has {true_vocab} tokens: the "
                "data was made with another tokenizer; run mkd preprocess with the model's own"
            )


def _missing(prefix: str, file: Path) -> str:
    """The message about a missing file of token ids, with what the name may stand for."""
    path, found = Path(prefix), FileFormat.of(prefix)
    if prefix.endswith((".bin", ".idx")) and path.is_file():
        return f"token files are named by their PREFIX: give {path.with_suffix('')}"
    if path.is_file() and found is not None:
        return "plain text is made into token files first, by mkd preprocess --input"
    if path.is_file():
        return unknown_suffix(path, RECORDS)
    text = f"{file} does not exist (mkd preprocess makes it)"
    if (made := _made_of(path)) is not None:
        return f"{text}; did you mean {made}?"
    if (near := near_path(file, Path.is_file)) is not None:
        return f"{text}; did you mean {near.with_suffix('')}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", prefix) and not path.parent.exists():
        text += (
            f"; a data set of the Hugging Face Hub is downloaded first: hf download --repo-type dataset {prefix} "
            "--local-dir DIR"
        )
    return text


def _made_of(output_prefix: Path) -> Path | None:
    """The PREFIX that mkd preprocess makes of its --output-prefix, which is often given in its place; None without
    exactly one."""
    try:
        found = list(output_prefix.parent.glob(f"{escape(output_prefix.name)}_*_document.idx"))
    except (OSError, ValueError):  # a folder that cannot be listed, or a path that the system refuses
        return None
    return found[0].with_suffix("") if len(found) == 1 else None


def check_splits(config: GPTDatasetConfig, evaluates: bool) -> None:
    """Refuse a split without a document: megatron-core 0.19 would loop forever over its epochs.

    Args:
        config: Megatron's, after `check_data` of its prefixes.
        evaluates: True if validation data is required.

    Raises:
        MkdDataError: a split that has a share, or is required, is empty.
    """
    if config.mock:
        return
    needed = {"training": True, "validation": evaluates, "test": False}
    shares = config.blend_per_split if config.split_matrix is None else config.split_matrix
    for (name, is_needed), share in zip(needed.items(), shares, strict=True):
        if share is None and is_needed:
            share_of_split = f"a share in --split (now {config.split}) or " if config.split else ""
            raise MkdDataError(
                f"there is no {name} data: give it {share_of_split}a --{name[:5]}-data-path"
                + (", or set --eval-iters 0" if name == "validation" else "")
            )
        if share is None or config.split_matrix is None:
            continue
        for prefix in (name for name in config.blend[0] if not is_chat_file(name)):
            documents = check_index(prefix).sequences
            if round(share[0] * documents) == round(share[1] * documents):  # as megatron rounds
                raise MkdDataError(
                    f"--split {config.split} leaves none of the {documents} documents of --data-path {prefix} for "
                    f"{name}: give {name} a larger share or 0, or cut the text into more documents"
                )


def _tokens_seen(prefix: str, dtype: np.dtype) -> tuple[int, int]:
    """Smallest and largest token id in data from another tool: of all tokens of a small file, of windows spread over a
    large one."""
    size = Path(f"{prefix}.bin").stat().st_size // dtype.itemsize
    smallest = largest = 0
    with open(f"{prefix}.bin", "rb") as file:
        for start in range(0, size, max(size // _PROBES, _PROBE_TOKENS)):
            file.seek(start * dtype.itemsize)
            tokens = np.fromfile(file, dtype, _PROBE_TOKENS)
            smallest, largest = min(smallest, int(tokens.min())), max(largest, int(tokens.max()))
    return smallest, largest
