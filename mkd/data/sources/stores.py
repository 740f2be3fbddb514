"""Random access to samples: tokenized documents and tokenized conversations, memory-mapped.

A chat file is tokenized once, whole, before the first step: packing needs every length, and a broken line must not stop
a run in the middle of an epoch. The tokens are kept in the data cache under a name that depends on the file and the
tokenizer; later runs, and loader processes, only map them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin

import numpy as np

from mkd.data.sources.chat import SUPERVISED, ChatTokenizer
from mkd.data.sources.chat_versions import FACTS_VERSION, mentions_newer_keys
from mkd.data.sources.data_files import data_files, is_glob, is_record_data
from mkd.data.sources.indexed import data_fingerprint, default_workers, file_fingerprint
from mkd.data.sources.parallel import map_in_order
from mkd.data.sources.record_files import ColumnChoice
from mkd.data.sources.record_forms import columns_to_read
from mkd.data.sources.text import BROKEN, BadRecords, RawBatch, read_batches, with_ellipsis
from mkd.data.sources.token_files import TokenFile
from mkd.errors import MkdDataError
from mkd.utils.atomic_files import hash_of, naming, publish_files, scratch_folder
from mkd.utils.json_files import read_json
from mkd.utils.logging import current_rank
from mkd.utils.mapped_files import SizeGuard
from mkd.utils.progress import ByteProgress

_FORMAT = 1
"""Version of the stored format; increased when the content stored for the same file changes."""
OPTIONAL_FACTS = ("bad", "weight_runs", "rewritten")
"""Statistics that are written only where there are some: the file of other data stays as older versions wrote it."""
_CHECKSUMS = "checksums"
"""Suffix of the file with the hashes of a set's other files; sets of older versions have none."""
_MOST_WORKERS = 32
"""Limit of worker processes, each of which holds a tokenizer in host memory."""
_PROBED_BYTES = 1 << 16
"""Bytes of a chat file that are checked before the job starts."""


def is_chat_file(name: str) -> bool:
    """True if a name in --data-path is that of chat data: a file, folder or glob; else it is the PREFIX of .bin and
    .idx."""
    return is_record_data(name)


def chat_files(name: str) -> list[str]:
    """The files of chat data. Raises MkdDataError as `data_files` does."""
    return data_files(name, "--data-path")


def chat_batches(name: str, size: int | None = None, columns: ColumnChoice = columns_to_read) -> Iterator[RawBatch]:
    """Read the records of chat data, about `size` bytes at a time. Raises MkdDataError for damaged files."""
    return read_batches(chat_files(name), columns=columns, size=size)


class SampleStore(Protocol):
    """Samples 0 to n - 1, each with token ids and a mask of targets."""

    lengths: np.ndarray
    """[n] integers, tokens of each sample."""
    all_targets: bool
    """True if every token of every sample is a target; then no sample is read to check for targets."""

    def read(self, sample: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` tokens of a sample from `start` on: ids [count] integers, and targets [count]: bool, or their weights
        (float32, 0 for tokens that are not targets) in a store with other weights than 0 and 1."""
        ...


class DocumentStore:
    """Documents of PREFIX.bin and PREFIX.idx; every token is a target."""

    all_targets = True

    def __init__(self, prefix: str, share: tuple[float, float], true_vocab: int | None = None) -> None:
        """Open the documents between two shares (0 to 1), rounded as megatron does; see `TokenFile`."""
        self._documents = TokenFile(prefix, true_vocab)
        lengths = self._documents.sequence_lengths
        self._part = part_of(len(lengths), share)
        self.lengths = lengths[self._part].copy()  # the original is memory of the IndexedDataset

    def read(self, sample: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._documents.get(self._part.start + sample, offset=start, length=count)
        return ids, np.ones(count, dtype=bool)


def part_of(count: int, share: tuple[float, float]) -> slice:
    """Samples between two shares (0 to 1) of `count`."""
    return slice(round(share[0] * count), round(share[1] * count))


@dataclass(frozen=True)
class ChatFacts:
    """Statistics of a tokenized chat file."""

    conversations: int
    tokens: int
    supervised: int
    """Tokens of the assistant."""
    max_token_id: int
    skipped: dict[str, int]
    """Reason -> conversations left out."""
    version: int = 1
    """See `mkd.data.sources.chat_versions.FACTS_VERSION`."""
    bad: list[str] = field(default_factory=list)
    """Messages about the first broken records."""
    weight_runs: int = 0
    """Runs of tokens whose weight is neither 0 nor 1."""
    rewritten: int = 0
    """Conversations with an answer that the chat template writes differently once others follow."""

    def __str__(self) -> str:
        left_out = "".join(f", left out {count} {reason}" for reason, count in self.skipped.items() if count)
        text = f"{self.conversations} conversations, {self.tokens} tokens, {self.supervised} of the assistant{left_out}"
        rewritten = (
            f", {self.rewritten} with earlier answers that the chat template rewrites (without their reasoning, for "
            "example), which are learned as it writes them in the whole conversation"
        )
        return text + named_records(self.skipped, self.bad) + (rewritten if self.rewritten else "")


def named_records(skipped: dict[str, int], bad: Sequence[str]) -> str:
    """The first broken records in parentheses, for messages; empty if there are none."""
    return f" ({'; '.join(with_ellipsis(bad, skipped.get(BROKEN, 0)))})" if bad else ""


def _changed_file(base: Path) -> str | None:
    """The first file of a stored set that is not what was written; None if there is none, or no checksums."""
    checksums = file_of(base, _CHECKSUMS)
    if not checksums.is_file():
        return None
    try:
        files = [(file_of(base, kind), digest) for kind, digest in dict(read_json(checksums)).items()]
    except (ValueError, TypeError):  # also a kind that is not part of a file name
        return checksums.name
    return next((file.name for file, digest in files if not file.is_file() or hash_of(file) != digest), None)


class MappedSamples:
    """The words and bounds of stored samples, memory-mapped."""

    def __init__(self, base: Path, samples: int, kind: str) -> None:
        """Map the files and check that they fit together.

        Args:
            base: path in the data cache, without suffix.
            samples: number of samples, from the statistics.
            kind: suffix of the file of words, which are uint32.

        Raises:
            MkdDataError: the bounds do not rise from 0 to the number of words, or a file is missing or empty.
        """
        self._base, paths = base, [file_of(base, "bounds"), file_of(base, kind)]
        if current_rank() == 0 and (name := _changed_file(base)) is not None:
            raise self._damage(f"the checksum of {name} does not match")
        if not all(map(Path.is_file, paths)):
            raise self._damage(f"{paths[0].name} or {paths[1].name} is missing, or not a regular file")
        try:
            self.bounds, self.words = np.memmap(paths[0], np.int64, "r"), np.memmap(paths[1], np.uint32, "r")
        except (OSError, ValueError) as error:
            raise self._damage(str(error)) from error
        bounds = self.bounds
        rises = len(bounds) == samples + 1 and bounds[0] == 0 and bounds[-1] == len(self.words)
        if not rises or (np.diff(bounds) < 0).any():
            raise self._damage(f"{len(bounds)} bounds of {samples} samples do not rise from 0 to {len(self.words)}")
        self._guard = SizeGuard(paths)

    def _damage(self, text: str) -> MkdDataError:
        return MkdDataError(f"{self._base}.* in the data cache is damaged ({text}): delete these files")

    def check_ids(self, ids: np.ndarray, true_vocab: int | None, sample: int) -> None:
        """Raise MkdDataError if a sample has an id ([n] integers) that is not in the vocabulary."""
        if true_vocab is not None and len(ids) and (largest := int(ids.max())) >= true_vocab:
            raise self._damage(f"sample {sample} has token id {largest}, the model's vocabulary {true_vocab} tokens")

    def check(self) -> None:
        """Raise MkdDataError if a file became shorter."""
        if (problem := self._guard.problem()) is not None:
            raise self._damage(problem)


class ChatStore:
    """Conversations that `tokenize_chat` has written."""

    all_targets = False

    def __init__(self, base: Path, share: tuple[float, float], true_vocab: int | None = None) -> None:
        """Open the conversations between two shares (0 to 1); ids from `true_vocab` up are errors."""
        self.facts = read_facts(base, ChatFacts)
        self._true_vocab = true_vocab
        self._files = files = MappedSamples(base, self.facts.conversations, "tokens")
        part = part_of(self.facts.conversations, share)
        self._bounds = files.bounds[part.start : part.stop + 1]
        self.lengths = np.diff(self._bounds)
        self._tokens, self._first = files.words, part.start
        self._weights = read_weights(base, self.facts.weight_runs)

    def read(self, sample: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        self._files.check()
        begin = int(self._bounds[sample]) + start
        stored = np.asarray(self._tokens[begin : begin + count])
        ids = (stored & ~SUPERVISED).astype(np.int64)
        self._files.check_ids(ids, self._true_vocab, self._first + sample)
        targets = (stored & SUPERVISED) != 0
        return ids, targets if self._weights is None else with_weights(targets, begin, self._weights)


def read_weights(base: Path, runs: int) -> np.ndarray | None:
    """[runs, 3] float64: begin, end and weight of runs of tokens whose weight is neither 0 nor 1; None without any.

    Raises:
        MkdDataError: the file does not hold that many.
    """
    if runs == 0:  # as in every set of an earlier version of mkd, which has no such file
        return None
    file = file_of(base, "weights")
    found = np.fromfile(file, np.float64) if file.is_file() else np.empty(0)
    if found.size != 3 * runs:
        raise MkdDataError(f"{file} is broken ({found.size / 3:g} weights of {runs}): delete {file_of(base, 'json')}")
    if not np.isfinite(found).all() or found.min() < 0:
        raise MkdDataError(f"{file} is broken (an invalid weight): delete {file_of(base, 'json')}")
    return found.reshape(runs, 3)


def with_weights(targets: np.ndarray, begin: int, weights: np.ndarray) -> np.ndarray:
    """[n] float32 weights of the tokens from `begin` on, whose targets are [n] bool; `weights` as in `read_weights`."""
    found = targets.astype(np.float32)
    first = int(np.searchsorted(weights[:, 1], begin, side="right"))
    last = int(np.searchsorted(weights[:, 0], begin + len(targets)))
    for start, end, weight in weights[first:last]:
        found[max(int(start) - begin, 0) : int(end) - begin] *= np.float32(weight)
    return found


def content_fingerprint(name: str) -> str:
    """128-bit hex hash of an entry of --data-path, chat data or a prefix; its name is not part of it."""
    if is_chat_file(name):
        files = [file_fingerprint(Path(file)) for file in chat_files(name)]
        return files[0] if len(files) == 1 else blake2b(" ".join(files).encode(), digest_size=16).hexdigest()
    return data_fingerprint(Path(f"{name}.bin"), Path(f"{name}.idx"))


def chat_base(name: str, tokenizer: ChatTokenizer, cache: str | None) -> Path:
    """Path in the data cache of the tokens of chat data, without suffix.

    Args:
        name: file, folder or glob.
        tokenizer: tokenizer and template.
        cache: --data-cache-path; None for a folder beside the file.
    """
    return cache_base(name, chat_files(name), f"{_FORMAT} {tokenizer.fingerprint}", cache, "chat")


def cache_base(name: str, files: Sequence[str], key: str, cache: str | None, kind: str) -> Path:
    """Path in the data cache of data derived from files, without suffix.

    Args:
        name: name of the data; the path begins with it.
        files: path, size and modification time of each are part of the key.
        key: everything else that the derived data depends on.
        cache: --data-cache-path; None for a folder beside the first file.
        kind: end of the path.
    """
    paths = [Path(file).resolve() for file in files]
    states = [(path, path.stat()) for path in paths]
    whole = " ".join([*(f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states), key])
    folder = paths[0].parent / "cache" if cache is None else Path(cache)
    label = re.sub(r"[*?\[\]]+", "_", Path(name).stem) if is_glob(name) else Path(name).stem
    return folder / f"{label}-{blake2b(whole.encode(), digest_size=16).hexdigest()}-{kind}"


def check_chat_file(name: str, tokenizer: ChatTokenizer) -> None:
    """Raise MkdDataError if a file of chat data is missing or empty, or the first records are invalid."""
    tokenizer(first_records(name))


def first_records(name: str, size: int = _PROBED_BYTES, columns: ColumnChoice = columns_to_read) -> RawBatch:
    """First records of chat data. Raises MkdDataError if a file is missing or empty, or there are no records."""
    batch = next(chat_batches(name, size, columns), None)
    if batch is None:
        raise MkdDataError(f"--data-path {name} has no records")
    return batch


def tokenize_chat(name: str, tokenizer: ChatTokenizer, base: Path, log: Callable[[str], None]) -> None:
    """Tokenize chat data as a whole, unless the cache holds its tokens.

    Args:
        name: file, folder or glob.
        tokenizer: tokenizer and template.
        base: path from `chat_base`.
        log: called with a line before tokenizing, which may take minutes.

    Raises:
        MkdDataError: an invalid line (names file and line); no conversation can be used; the cache cannot be written.
    """
    if is_stored(name, base, ChatFacts):
        return
    log(f"{name}: tokenizing, once")
    files = chat_files(name)
    progress = ByteProgress(f"{name}: tokenizing", sum(Path(file).stat().st_size for file in files))
    lengths, skipped, bad, largest, supervised = [], Counter(), BadRecords(), 0, 0
    weights, before, rewritten = [], 0, 0
    with new_files(name, base, ("tokens", "bounds", "weights", "json")) as partial:
        with partial["tokens"].open("wb") as file, progress:
            batches = chat_batches(name)
            for batch in map_in_order(tokenizer, batches, workers_for(files), f"{name} has too long records"):
                progress.advance(batch.size)
                batch.tokens.tofile(file)
                lengths.append(np.array(batch.lengths, dtype=np.int64))
                weights += [(begin + before, end + before, weight) for begin, end, weight in batch.weights]
                before += len(batch.tokens)
                skipped.update(batch.skipped)
                bad.merge(batch.bad)
                largest = max(largest, int((batch.tokens & ~SUPERVISED).max(initial=0)))
                supervised += int((batch.tokens >= SUPERVISED).sum())
                rewritten += batch.rewritten
        bounds = np.concatenate(([0], np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))))
        left_out = dict(skipped) | ({BROKEN: bad.count} if bad.count else {})
        numbers = (len(bounds) - 1, int(bounds[-1]), supervised, largest)
        facts = ChatFacts(*numbers, left_out, FACTS_VERSION, bad.first, len(weights), rewritten)
        if facts.conversations == 0:
            raise MkdDataError(f"--data-path {name}: no conversation can be used ({facts})")
        bounds.tofile(partial["bounds"])
        if weights:
            np.array(weights, dtype=np.float64).tofile(partial["weights"])
        partial["json"].write_text(json_of_facts(facts))


def is_stored(name: str, base: Path, kind: Callable[..., Any]) -> bool:
    """True if the data cache holds a complete set for the data, and an earlier version of mkd would store the same.

    Args:
        name: name in --data-path.
        base: path in the cache, without suffix.
        kind: type of the set's statistics, with a `version`.
    """
    if not file_of(base, "json").is_file():
        return False
    if not is_chat_file(name) or (version := read_facts(base, kind).version) >= FACTS_VERSION:
        return True
    return not any(mentions_newer_keys(batch.documents, version) for batch in chat_batches(name))


def workers_for(files: Sequence[str]) -> int:
    """Number of worker processes that tokenize the files."""
    return min(default_workers(files), _MOST_WORKERS)


def json_of_facts(facts: Any) -> str:
    """The json file of a set: the fields of a dataclass, without those of OPTIONAL_FACTS that are empty or 0."""
    values = {key: value for key, value in asdict(facts).items() if value or key not in OPTIONAL_FACTS}
    return json.dumps(values, indent=1) + "\n"


@contextmanager
def new_files(name: str, base: Path, kinds: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Files of the data cache that are renamed into place together, after all of them are written.

    Args:
        name: name of the data, for messages.
        base: path in the cache, without suffix.
        kinds: suffixes of the files; the last one is renamed last and marks a complete set.

    Yields:
        Suffix -> path to write to; a file that is not written is not renamed.

    Raises:
        MkdDataError: the cache cannot be written.
    """
    try:
        # A folder of its own: jobs that start at the same time must not write into each other's files.
        with scratch_folder(base) as folder, naming(base.parent):
            partial = {kind: folder / kind for kind in kinds}
            yield partial
            *written, last = (kind for kind in kinds if partial[kind].exists())
            hashes = {kind: hash_of(partial[kind]) for kind in (*written, last)}
            partial[_CHECKSUMS] = folder / _CHECKSUMS
            partial[_CHECKSUMS].write_text(json.dumps(hashes))
            publish_files({partial[kind]: file_of(base, kind) for kind in (*written, _CHECKSUMS, last)})
    except OSError as error:
        raise MkdDataError(
            f"--data-path {name}: its tokens cannot be written to {base.parent} ({error}): give another "
            "--data-cache-path"
        ) from error


def read_facts[Facts](base: Path, kind: Callable[..., Facts]) -> Facts:
    """Read the json file of a set of `new_files`. Raises MkdDataError if it is missing or broken."""
    file = file_of(base, "json")
    try:
        facts = kind(**read_json(file))
        for field in fields(facts):
            if not _fits(value := getattr(facts, field.name), field.type):
                raise ValueError(f"{field.name} is {str(value)[:40]!r}")
        return facts
    except FileNotFoundError as error:
        raise MkdDataError(
            f"{file} is missing, which rank 0 has written: --data-cache-path must show the same files on every node"
        ) from error
    except (ValueError, TypeError) as error:
        raise MkdDataError(f"{file} is broken ({error}): delete it") from error


def _fits(value: Any, kind: Any) -> bool:
    """True if a value of a JSON file is of the type of a field: int, str, or a list or dict of them."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(part, *get_args(kind)) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(part, get_args(kind)[1]) for part in value.values())
    return type(value) is kind


def file_of(base: Path, kind: str) -> Path:
    """Path of one file of the data cache."""
    return base.with_name(f"{base.name}.{kind}")
