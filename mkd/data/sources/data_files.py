"""Names of data on a command line, and the files that each stands for.

A name is a file, a folder of files, a folder that `datasets.save_to_disk` has written, or a glob in quotes. The files
of a folder or a glob are read in the order of their sorted names.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mkd.errors import MkdDataError
from mkd.utils.encoding import is_text
from mkd.utils.json_files import read_json
from mkd.utils.near_paths import near_path_hint

Content = Literal["json", "text", "parquet", "arrow"]
"""Contents of a file: JSON lines or one JSON array, plain text, or a table of records."""

RECORDS: tuple[Content, ...] = ("json", "parquet", "arrow")
"""Contents that hold records, as conversations do."""
TEXTS: tuple[Content, ...] = (*RECORDS, "text")
"""Contents that hold texts."""

_CONTENT_OF: dict[str, Content] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_METADATA = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
"""Files of `datasets` beside the data."""
_OWN = re.compile(r"-[0-9a-f]{32}-(chat|pairs)\.json$")
"""Statistics in a data cache."""
_SPLIT = re.compile(r"^(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
_SPLIT_NAMES = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}
_NAMED = 6
"""Names that a message lists at most."""


@dataclass(frozen=True)
class FileFormat:
    """The format that a file's suffixes stand for."""

    content: Content
    compression: Literal["gzip", "zstd"] | None

    @classmethod
    def of(cls, name: str) -> "FileFormat | None":
        """None if the suffixes are unknown. Tables have compression of their own, and none around them."""
        stem, compression = name.lower(), None
        for suffix, kind in _COMPRESSIONS.items():
            if stem.endswith(suffix):
                stem, compression = stem.removesuffix(suffix), kind
        for suffix, content in _CONTENT_OF.items():
            if stem.endswith(suffix) and (compression is None or content in ("json", "text")):
                return cls(content, compression)
        return None


def is_glob(name: str) -> bool:
    """True if a name has wildcards and no file or folder is called so."""
    return any(character in name for character in "*?[") and not Path(name).exists()


def is_record_data(name: str) -> bool:
    """True if a name in --data-path stands for files of records; else it is the PREFIX of .bin and .idx."""
    found = FileFormat.of(name)
    if found is not None:
        return found.content in RECORDS
    return not Path(f"{name}.idx").is_file() and (is_glob(name) or Path(name).is_dir())


def data_files(name: str, flag: str, contents: Collection[Content] = RECORDS) -> list[str]:
    """The files that a name stands for, in the order in which they are read.

    Args:
        name: file, folder or glob.
        flag: flag that named it, for messages.
        contents: contents that can be read.

    Raises:
        MkdDataError: there are none, one cannot be read or is empty, or a folder does not list which of its files are
            meant.
    """
    where = f"{flag} {name}"
    if Path(name).is_dir():
        files = _files_of_folder(Path(name), where, contents)
    elif is_glob(name):
        files = _files_of_glob(name, where, contents)
    else:
        files = [name]
    for file in files:
        _check_file(file, flag, contents)
    return files


def _check_file(file: str, flag: str, contents: Collection[Content]) -> None:
    if not is_text(file):
        raise MkdDataError(f"{flag} {file}: the name is not UTF-8 text; rename it")
    path = Path(file)
    if not path.is_file():
        raise MkdDataError(f"{flag} {file} does not exist or is not a file{near_path_hint(file, Path.is_file)}")
    if path.stat().st_size == 0:
        raise MkdDataError(f"{flag} {file} is empty")
    found = FileFormat.of(file)
    if found is None or found.content not in contents:
        raise MkdDataError(f"{flag} {file} {unknown_suffix(path, contents)}")


def unknown_suffix(path: Path, contents: Collection[Content]) -> str:
    """The end of a message about a file that cannot be read: its suffix, the known ones, and how to convert it."""
    known = [f"records must end in {_suffixes('json')} (also with .gz or .zst), .parquet or .arrow"]
    if "text" in contents:
        known.append(f"plain text in {_suffixes('text')} (also with .gz or .zst)")
    text = f"ends in {path.suffix!r}: {', '.join(known)}"
    if path.suffix.lower() in (".csv", ".tsv"):
        options = ", parse_options=c.ParseOptions(delimiter='\\t')" if path.suffix.lower() == ".tsv" else ""
        text += (
            f'; convert it with python -c "import pyarrow.csv as c, pyarrow.parquet as p; '
            f"p.write_table(c.read_csv('{path.name}'{options}), '{path.stem}.parquet')\""
        )
    return text


def _suffixes(content: Content) -> str:
    return " or ".join(suffix for suffix, kind in _CONTENT_OF.items() if kind == content)


def _files_of_folder(folder: Path, where: str, contents: Collection[Content]) -> list[str]:
    if (folder / "dataset_dict.json").is_file():
        return _files_of_folder(_only_split(folder, where), where, contents)
    if (folder / "state.json").is_file():
        return _saved_files(folder, where)
    files = sorted(str(path) for path in folder.iterdir() if _is_data(path.name, contents))
    if not files:
        raise MkdDataError(f"{where} is a folder without data files{_hint(folder)}")
    kinds = sorted({FileFormat.of(file).content for file in files})
    if len(kinds) > 1:
        suffixes = sorted({"".join(Path(file).suffixes[-2:]) for file in files})
        raise MkdDataError(
            f"{where} has files of several kinds ({', '.join(suffixes[:_NAMED])}), which may hold the same data: name "
            f"one kind by a glob in quotes, such as '{folder}/*{suffixes[0]}'"
        )
    splits = sorted(set(map(_split_of, files)) - {None})
    if len(splits) > 1:
        first = Path(next(file for file in files if _split_of(file) == splits[-1])).name
        pattern = f"{_SPLIT.match(first)[0]}*{Path(first).suffix}"
        raise MkdDataError(
            f"{where} has files of several splits ({', '.join(splits)}): name those of one by a glob in quotes, such "
            f"as '{folder}/{pattern}' (mkd train: in --train-data-path, and the others in --valid-data-path)"
        )
    return files


def _is_data(name: str, contents: Collection[Content]) -> bool:
    found = FileFormat.of(name)
    is_own = name in _METADATA or _OWN.search(name) is not None or name.startswith(".")
    return found is not None and found.content in contents and not is_own


def _split_of(file: str) -> str | None:
    found = _SPLIT.match(Path(file).name)
    return None if found is None else _SPLIT_NAMES.get(found[1].lower(), found[1].lower())


def _hint(folder: Path) -> str:
    index = next(iter(sorted(folder.glob("*.idx"))), None)
    if index is not None:
        return f": token files are named by their PREFIX, such as {index.with_suffix('')}"
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if inside:
        return f": name one of its folders ({', '.join(inside[:_NAMED])}), or give a glob in quotes"
    return ": see docs/data.md for the files that can be read"


def _only_split(folder: Path, where: str) -> Path:
    """The folder of the only split of a saved `DatasetDict`."""
    splits = _state(folder / "dataset_dict.json", where).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_plain_name, splits)):
        raise MkdDataError(f"{where}: {folder / 'dataset_dict.json'} lists no splits: save the data set again")
    if len(splits) > 1:
        raise MkdDataError(
            f"{where} has the splits {', '.join(splits[:_NAMED])}: name one, such as {folder / splits[0]} "
            "(mkd train: with --train-data-path, and another one with --valid-data-path)"
        )
    inner = folder / splits[0]
    if not inner.is_dir() or (inner / "dataset_dict.json").exists():
        raise MkdDataError(f"{where}: {inner} is not the folder of a saved split: save the data set again")
    return inner


def _saved_files(folder: Path, where: str) -> list[str]:
    """Arrow files of a saved `Dataset`, in the order of its state.json."""
    state = _state(folder / "state.json", where)
    files = state.get("_data_files")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files] if files else []
    if not isinstance(files, list) or not names or not all(map(_is_plain_name, names)):
        raise MkdDataError(f"{where}: {folder / 'state.json'} lists no data files: save the data set again")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise MkdDataError(
            f"{where} is saved with a list of row numbers, which is not read: save it again with a current version of "
            "datasets, or call flatten_indices() first"
        )
    return [str(folder / name) for name in names]


def _is_plain_name(name: Any) -> bool:
    """True for the name of an entry of the same folder."""
    return isinstance(name, str) and bool(name) and name not in (".", "..") and Path(name).name == name


def _state(path: Path, where: str) -> dict[str, Any]:
    try:
        state = read_json(path)
    except ValueError as error:
        raise MkdDataError(f"{where}: {path} is broken ({error}): save the data set again") from None
    if not isinstance(state, dict):
        raise MkdDataError(f"{where}: {path} is a JSON {type(state).__name__}, not an object: save the data set again")
    return state


def _files_of_glob(name: str, where: str, contents: Collection[Content]) -> list[str]:
    files = sorted(str(path) for path in _matches(name, where) if _is_data(path.name, contents) and not path.is_dir())
    if not files:
        raise MkdDataError(f"{where} matches no data file (docs/data.md lists the suffixes)")
    return files


def _matches(name: str, where: str) -> Iterator[Path]:
    """Paths that match, without those in hidden folders. Links to folders are not followed below `**`, so that a link
    to a folder above ends there."""
    parts = Path(name).parts
    first = next(number for number, part in enumerate(parts) if any(character in part for character in "*?["))
    base, pattern = Path(*parts[:first]), "/".join(parts[first:])
    try:
        for path in base.glob(pattern):
            inside = path.relative_to(base).parts
            if not any(part.startswith(".") for part in inside):
                yield path
    except (ValueError, re.error, RecursionError) as error:
        raise MkdDataError(f"{where} is not a glob ({error})") from None
