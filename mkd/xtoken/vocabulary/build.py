"""Makes projections from two tokenizers, once for all processes that need the same one."""

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
"""Rows between two reports of progress."""


def build_projection(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    options: ProjectionOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Projection:
    """Project the student's vocabulary into the teacher's. Deterministic: the same input gives the same bits.

    A student token whose bytes are a token of the teacher is that token. Another one is what the teacher writes its
    bytes with, the j-th token (from 0) with a weight of decay^j over the sum of them. Special tokens are paired by the
    options, by role (end, beginning, padding), and by spelling. All others, and what the teacher cannot write, have an
    empty row.

    Args:
        student, teacher: the tokenizers.
        options: k, decay, pairs of special tokens.
        progress: gets rows done and rows in all.

    Raises:
        MkdConfigError: a pair names a token that is not there, or a vocabulary that cannot be read as bytes.
    """
    options = options or ProjectionOptions()
    ours, theirs = read_token_bytes(student), read_token_bytes(teacher)
    common = {**_same_bytes(ours, theirs), **_special_pairs(student, teacher, options)}
    ids = np.full((student.size, options.k), -1, dtype=np.int32)
    weights = np.zeros((student.size, options.k), dtype=np.float32)
    same = _same_surface(ours, theirs)
    for row, piece in {**same, **common}.items():
        ids[row, 0], weights[row, 0] = piece, 1
    others = [row for row, surface in enumerate(ours.of_id) if surface is not None and row not in same]
    cut = 0
    for begin in range(0, len(others), _BATCH):
        rows = others[begin : begin + _BATCH]
        pieces = theirs.pieces([ours.of_id[row] for row in rows])
        for row, tokens in zip(rows, pieces, strict=True):
            cut += len(tokens) > options.k
            _fill(ids[row], weights[row], tokens[: options.k], options.decay)
        if progress:
            progress(begin + len(rows), len(others))
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
    """Write one row, [k] each: a token that comes twice has both weights, and tokens without weight are left out."""
    mass: dict[int, float] = {}
    for place, token in enumerate(tokens):
        mass[token] = mass.get(token, 0.0) + decay**place
    total = sum(mass.values())
    ordered = sorted(mass, key=lambda token: -mass[token])  # stable: equal ones stay in the text's order
    kept = [token for token in ordered if np.float32(mass[token] / total) > 0]
    ids[: len(kept)] = kept
    weights[: len(kept)] = [mass[token] / total for token in kept]


def _first_ids(surfaces: TokenBytes) -> dict[tuple[bytes, bool], int]:
    """Surface and whether it stands in for other text -> the lowest id."""
    found: dict[tuple[bytes, bool], int] = {}
    for number, surface in enumerate(surfaces.of_id):
        if surface is not None:
            found.setdefault((surface, bool(surfaces.is_fallback[number])), number)
    return found


def _same_surface(ours: TokenBytes, theirs: TokenBytes) -> dict[int, int]:
    """Student id -> teacher id with the same bytes, of the same sort if there are a byte and a letter."""
    target = _first_ids(theirs)
    found = {}
    for number, surface in enumerate(ours.of_id):
        sort = bool(ours.is_fallback[number])
        match = target.get((surface, sort), target.get((surface, not sort))) if surface is not None else None
        if match is not None:
            found[number] = match
    return found


def _same_bytes(ours: TokenBytes, theirs: TokenBytes) -> dict[int, int]:
    """The one-to-one part of `_same_surface`; ordinary tokens come before bytes that stand in for text."""
    same = _same_surface(ours, theirs)
    taken: set[int] = set()
    pairs = {}
    for number in sorted(same, key=lambda n: (bool(ours.is_fallback[n] != theirs.is_fallback[same[n]]), n)):
        if same[number] not in taken:
            taken.add(same[number])
            pairs[number] = same[number]
    return pairs


def _special_pairs(student: SpanTokenizer, teacher: SpanTokenizer, options: ProjectionOptions) -> dict[int, int]:
    """Student id -> teacher id of special tokens that mean the same, one-to-one."""
    wanted = [_named_pair(student, teacher, pair) for pair in options.pairs]
    for role in ("eos", "bos", "pad"):
        wanted.append(tuple(getattr(side.tokenizer, f"{role}_token_id") for side in (student, teacher)))
    named = teacher.tokenizer.get_vocab()
    for token, number in sorted(student.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if student.role_of_id[number] == Role.OTHER:
            wanted.append((number, named.get(token)))
    pairs: dict[int, int] = {}
    for ours, theirs in wanted:
        is_special = None not in (ours, theirs) and teacher.role_of_id[theirs] not in (Role.CONTENT, Role.UNK)
        if is_special and ours not in pairs and theirs not in pairs.values():
            pairs[ours] = theirs
    return pairs


def _named_pair(student: SpanTokenizer, teacher: SpanTokenizer, pair: tuple[str, str]) -> tuple[int, int]:
    ids = []
    for side, token in zip((student, teacher), pair, strict=True):
        number = side.tokenizer.get_vocab().get(token)
        if number is None or side.role_of_id[number] in (Role.CONTENT, Role.UNK):
            raise MkdConfigError(f"--pair {'='.join(pair)}: {side.flag} {side.name} has no special token {token!r}")
        ids.append(number)
    return tuple(ids)


def projection_for(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    options: ProjectionOptions | None,
    folder: str | Path,
    say: Callable[[str], None] = lambda line: None,
) -> Projection:
    """The projection from a cache; built by the first process that comes, while others wait for it.

    Args:
        student, teacher, options: as `build_projection`.
        folder: for a file whose name depends on all that the projection depends on.
        say: gets a line before what may take minutes.

    Raises:
        MkdConfigError: as `build_projection`.
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
                    say(f"building the projection from {student.name} to {teacher.name}: {path}")
                    build_projection(student, teacher, options).save(path)
    except OSError as error:
        raise MkdCacheError(f"the projection cannot be kept in {folder} ({error}): name another folder") from error
    remedy = "delete the file, and the next job makes it anew"
    return Projection.load(path, student.hash, teacher.hash, "the projection in the data cache,", remedy)
