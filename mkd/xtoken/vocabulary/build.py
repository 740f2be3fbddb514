"""Build projections from two tokenizers, once for all processes that use the same one."""

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from mkd.errors import MkdCacheError, MkdConfigError
from mkd.xtoken.text.token_bytes import TokenBytes, read_token_bytes
from mkd.xtoken.text.tokens import Role, SpanTokenizer
from mkd.xtoken.vocabulary.projection import VERSION, Projection, ProjectionOptions

_BATCH = 4096
"""Student tokens between two reports of progress."""


def build_projection(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    options: ProjectionOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Projection:
    """Project the student's vocabulary into the teacher's. Deterministic: the same input gives the same bits.

    A student token whose bytes are a token of the teacher maps to that token. Any other maps to the tokens that the
    teacher encodes its bytes to, the j-th (from 0) with weight decay^j over their sum. Special tokens are paired by the
    options, by role (EOS, BOS, padding), and by name. All other special tokens, and bytes that the teacher cannot
    encode, have no teacher tokens.

    Args:
        student, teacher: the tokenizers.
        options: k, decay, pairs of special tokens.
        progress: called with the student tokens done and their total.

    Raises:
        MkdConfigError: a pair names a token that does not exist, or a vocabulary has no known byte form.
    """
    options = options or ProjectionOptions()
    student_bytes, teacher_bytes = read_token_bytes(student), read_token_bytes(teacher)
    common = {**_same_bytes_once(student_bytes, teacher_bytes), **_special_pairs(student, teacher, options)}
    ids = np.full((student.size, options.k), -1, dtype=np.int32)
    weights = np.zeros((student.size, options.k), dtype=np.float32)
    same = _same_bytes(student_bytes, teacher_bytes)
    for token, teacher_token in {**same, **common}.items():
        ids[token, 0], weights[token, 0] = teacher_token, 1
    rest = [token for token, string in enumerate(student_bytes.of_id) if string is not None and token not in same]
    cut = 0
    for begin in range(0, len(rest), _BATCH):
        batch = rest[begin : begin + _BATCH]
        encoded = teacher_bytes.encode([student_bytes.of_id[token] for token in batch])
        for token, teacher_tokens in zip(batch, encoded, strict=True):
            cut += len(teacher_tokens) > options.k
            _fill(ids[token], weights[token], teacher_tokens[: options.k], options.decay)
        if progress:
            progress(begin + len(batch), len(rest))
    return Projection(
        ids=torch.from_numpy(ids),
        weights=torch.from_numpy(weights),
        common=torch.tensor(sorted(common.items()), dtype=torch.int64).reshape(-1, 2),
        teacher_size=teacher.size,
        cut=cut,
        student_hash=student.hash,
        teacher_hash=teacher.hash,
        options=options,
    )


def _fill(ids: np.ndarray, weights: np.ndarray, tokens: list[int], decay: float) -> None:
    """Write ids and weights of one student token, [k] each. Weights of a repeated teacher token are added up; tokens
    whose weight rounds to 0 are left out."""
    weight_of: dict[int, float] = {}
    for position, token in enumerate(tokens):
        weight_of[token] = weight_of.get(token, 0.0) + decay**position
    total = sum(weight_of.values())
    ordered = sorted(weight_of, key=lambda token: -weight_of[token])  # stable: equal weights stay in the text's order
    kept = [token for token in ordered if np.float32(weight_of[token] / total) > 0]
    ids[: len(kept)] = kept
    weights[: len(kept)] = [weight_of[token] / total for token in kept]


def _first_ids(vocabulary: TokenBytes) -> dict[tuple[bytes, bool], int]:
    """(bytes, is a fallback byte) -> lowest id."""
    found: dict[tuple[bytes, bool], int] = {}
    for token, string in enumerate(vocabulary.of_id):
        if string is not None:
            found.setdefault((string, bool(vocabulary.is_fallback[token])), token)
    return found


def _same_bytes(student: TokenBytes, teacher: TokenBytes) -> dict[int, int]:
    """Student id -> teacher id with the same bytes; a fallback byte is preferred for a fallback byte, and text for
    text."""
    target = _first_ids(teacher)
    found = {}
    for token, string in enumerate(student.of_id):
        fallback = bool(student.is_fallback[token])
        match = target.get((string, fallback), target.get((string, not fallback))) if string is not None else None
        if match is not None:
            found[token] = match
    return found


def _same_bytes_once(student: TokenBytes, teacher: TokenBytes) -> dict[int, int]:
    """The one-to-one part of `_same_bytes`; pairs of a fallback byte and text come last."""
    same = _same_bytes(student, teacher)
    taken: set[int] = set()
    pairs = {}
    for token in sorted(same, key=lambda n: (bool(student.is_fallback[n] != teacher.is_fallback[same[n]]), n)):
        if same[token] not in taken:
            taken.add(same[token])
            pairs[token] = same[token]
    return pairs


def _special_pairs(student: SpanTokenizer, teacher: SpanTokenizer, options: ProjectionOptions) -> dict[int, int]:
    """Student id -> teacher id of equivalent special tokens, one-to-one."""
    candidates = [_named_pair(student, teacher, pair) for pair in options.pairs]
    for role in ("eos", "bos", "pad"):
        candidates.append(tuple(getattr(model.tokenizer, f"{role}_token_id") for model in (student, teacher)))
    id_of = teacher.tokenizer.get_vocab()
    for name, token in sorted(student.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if student.role_of_id[token] == Role.OTHER:
            candidates.append((token, id_of.get(name)))
    pairs: dict[int, int] = {}
    for token, other in candidates:
        is_special = None not in (token, other) and teacher.role_of_id[other] not in (Role.CONTENT, Role.UNK)
        if is_special and token not in pairs and other not in pairs.values():
            pairs[token] = other
    return pairs


def _named_pair(student: SpanTokenizer, teacher: SpanTokenizer, pair: tuple[str, str]) -> tuple[int, int]:
    ids = []
    for model, name in zip((student, teacher), pair, strict=True):
        token = model.tokenizer.get_vocab().get(name)
        if token is None or model.role_of_id[token] in (Role.CONTENT, Role.UNK):
            raise MkdConfigError(f"--pair {'='.join(pair)}: {model.flag} {model.name} has no special token {name!r}")
        ids.append(token)
    return tuple(ids)


def projection_for(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    options: ProjectionOptions | None,
    folder: str | Path,
    log: Callable[[str], None] = lambda line: None,
) -> Projection:
    """Read the projection from a cache; the first process builds it while the others wait.

    Args:
        student, teacher, options: see `build_projection`.
        folder: the cache; the file name is a hash of everything that the projection depends on.
        log: called with a line before building, which may take minutes.

    Raises:
        MkdConfigError: see `build_projection`.
        MkdCacheError: the folder cannot be written, or holds a damaged file.
    """
    options = options or ProjectionOptions()
    key = json.dumps([VERSION, student.hash, teacher.hash, asdict(options)], sort_keys=True)
    path = Path(folder) / f"projection-{blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.is_file():
                    log(f"building the projection from {student.name} to {teacher.name}: {path}")
                    build_projection(student, teacher, options).save(path)
    except OSError as error:
        raise MkdCacheError(f"the projection cannot be kept in {folder} ({error}): name another folder") from error
    remedy = "delete the file, and the next job builds it again"
    return Projection.load(path, student.hash, teacher.hash, "the projection in the data cache,", remedy)
