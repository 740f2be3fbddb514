"""Tokenizers and models that transformers loads from a folder; no code of the folder runs.

A folder's `auto_map` names Python classes in the folder or on a hub. transformers reads the terminal before it runs
them, and a "y" on standard input is an answer. Everything here is loaded from disk with `trust_remote_code=False`; this
is the only module that calls `from_pretrained`, and `tests/unit/utils/model_folders/test_pretrained.py` checks that.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants as hub_constants
from transformers import AutoTokenizer, PreTrainedTokenizerBase, dynamic_module_utils

from mkd.errors import MkdCheckpointError, MkdDataError
from mkd.utils.json_files import read_json
from mkd.utils.limits import call_within
from mkd.utils.model_folders.hub_folder import download_hint, model_folder
from mkd.utils.model_folders.regular_files import require_regular_files
from mkd.utils.model_folders.tokenizer_files import TOKENIZER_MARKERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBES = tuple(
    (part * 2000)[:2000] + end for part in ("a", " ", "1", "aB1 ,", "\u00e9\u4e2d") for end in ("!", "\x00")
)
"""Texts that a tokenizer encodes in a millisecond each."""
_PROBE_SECONDS = 15
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_ADAPTER = "adapter_config.json"
"""File of the package peft, which may name another folder."""
_CONFIGS = ("tokenizer_config.json", "config.json")
"""Files that may hold an `auto_map`."""


def load_tokenizer(directory: str, flag: str = "--tokenizer-model") -> PreTrainedTokenizerBase:
    """Read the tokenizer of a Hugging Face folder, from disk only.

    Raises MkdDataError if the folder is missing, holds no tokenizer files, needs its own code, or transformers cannot
    read it.
    """
    path = model_folder(directory, flag)
    if not path.is_dir():
        raise MkdDataError(f"{flag} {directory} does not exist or is not a folder{download_hint(directory)}")
    require_tokenizer_files(path, f"{flag} {directory}")
    try:
        require_regular_files(path)
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return _probed(tokenizer)
    except Exception as error:
        reason = code_needed(path, ("AutoTokenizer", "AutoConfig"), error)
        reason = reason or f"cannot be read by transformers: {' '.join(str(error).split())}"
        raise MkdDataError(f"{flag} {directory} {reason}") from error


def token_rules(tokenizer: PreTrainedTokenizerBase, template: object) -> list[object]:
    """JSON values that determine the tokens of a text and of a conversation: template, rules, special tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    return [template, rules, str(tokenizer.special_tokens_map)]


def tokenizer_fingerprint(directory: str, flag: str) -> str:
    """128-bit hex hash that changes whenever a token of a text or of a conversation may change; errors as
    `load_tokenizer`."""
    tokenizer = load_tokenizer(directory, flag)
    rules = token_rules(tokenizer, tokenizer.chat_template)
    return blake2b(json.dumps(rules).encode(), digest_size=16).hexdigest()


def holds_tokenizer(folder: Path) -> bool:
    """True if a folder has tokenizer files."""
    return any((folder / name).is_file() for name in TOKENIZER_MARKERS)


def require_tokenizer_files(folder: Path, origin: str, remedy: str = "") -> None:
    """Raise MkdDataError if a folder has no tokenizer files.

    Args:
        folder: the folder.
        origin: its flag and name, for messages.
        remedy: the end of the message.
    """
    if not holds_tokenizer(folder):
        raise MkdDataError(f"{origin} holds no tokenizer (none of {', '.join(TOKENIZER_MARKERS)}){remedy}")


def _probed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, after it has encoded texts on which patterns that backtrack take exponential time.

    Raises:
        ValueError: it did not do so in time.
    """

    def encode() -> None:
        for text in _PROBES:
            with suppress(Exception):  # a vocabulary without these characters, and without a token for others
                tokenizer(text, verbose=False)

    # A library that has used its threads prints a warning when the process forks, as it does for an asynchronous save.
    given = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        call_within(_PROBE_SECONDS, encode)
    except (TimeoutError, RuntimeError) as error:
        raise ValueError(
            f"it does not encode {len(_PROBES)} texts of {len(_PROBES[0]):,} characters in {_PROBE_SECONDS} s "
            f"({error}): a pattern in its tokenizer.json backtracks"
        ) from error
    finally:
        del os.environ[_PARALLELISM]
        if given is not None:
            os.environ[_PARALLELISM] = given
    return tokenizer


def load_model(path: Path, flag: str, is_vision_language: bool = False, **options: Any) -> "PreTrainedModel":
    """Read a causal language model of a Hugging Face folder, from safetensors on disk only.

    Args:
        path: the folder.
        flag: the flag that named it, for messages.
        is_vision_language: the folder's model has a vision tower.
        options: of `from_pretrained`.

    Raises:
        MkdCheckpointError: the model needs the folder's own code, or a kernel from a hub.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # seconds, which a training never needs

    _refuse_hub_kernels(path, flag)
    if (path / _ADAPTER).exists():
        raise MkdCheckpointError(
            f"{flag} {path} has an {_ADAPTER}, which transformers would load on top of the model: merge the adapter "
            "into the weights, or remove the file"
        )
    model = AutoModelForImageTextToText if is_vision_language else AutoModelForCausalLM
    try:
        require_regular_files(path)
        return model.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
        )
    except ValueError as error:
        if (reason := code_needed(path, (model.__name__, "AutoConfig"), error)) is None:
            raise
        raise MkdCheckpointError(f"{flag} {path} {reason}") from error


def code_needed(folder: str | Path, keys: tuple[str, ...], error: BaseException) -> str | None:
    """The reason why transformers refuses a folder, and the remedy, if it is the folder's own code; else None.

    Args:
        folder: a Hugging Face folder.
        keys: the entries of `auto_map` that concern the caller.
        error: the exception of transformers, or of a library around it.
    """
    if "trust_remote_code" not in str(error) and "custom code" not in str(error):
        return None
    found = [text for name in _CONFIGS for text in _mapped_classes(Path(folder) / name, keys)]
    return (
        f"needs code of its own ({', '.join(found) or 'its auto_map'}), and mkd runs no code of a folder: convert it "
        "to a class of transformers (a tokenizer to a tokenizer.json) and remove auto_map"
    )


@contextmanager
def from_disk_alone() -> Iterator[None]:
    """Inside the `with` block, transformers refuses a folder's code without asking on the terminal, and downloads
    nothing.

    For code of other libraries, such as Megatron's tokenizers, which leaves `trust_remote_code` unset and reads some of
    them from the hub.
    """
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE, hub_constants.HF_HUB_OFFLINE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE, hub_constants.HF_HUB_OFFLINE = 0, True
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE, hub_constants.HF_HUB_OFFLINE = before


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _mapped_classes(path: Path, keys: tuple[str, ...]) -> list[str]:
    """Class -> file, as `auto_map` of a configuration file states it; an old form of it lists a tokenizer's classes."""
    mapped = _json_of(path).get("auto_map")
    if isinstance(mapped, list):
        mapped = {"AutoTokenizer": mapped}
    if not isinstance(mapped, dict):
        return []
    found = []
    for key, value in mapped.items():
        if key in keys:
            classes = " or ".join(map(str, filter(None, value))) if isinstance(value, list) else value
            found.append(f"auto_map {key}: {classes} in {path.name}")
    return found


def _refuse_hub_kernels(path: Path, flag: str) -> None:
    """transformers downloads and runs an attention implementation whose name is that of a repository."""
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        value = _json_of(path / "config.json").get(key)
        if value is not None and "/" in json.dumps(value):
            raise MkdCheckpointError(
                f"{flag} {path}: {key} in config.json is {value!r}, a kernel from a hub, and mkd runs no code from "
                "there; remove the key"
            )
