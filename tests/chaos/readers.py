"""Damages one file and reads it in this process, thousands of times a minute: accepted, or refused in one line.

The fuzz of whole commands finds silent changes, but most of its damage is found by a checksum. Here the files are also
those of somebody who computes checksums, or who leaves them out as earlier versions of mkd did.
"""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

from mkd.checkpoint.describe import describe
from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.folder import WHOLE_MODEL, HFFolder, store_assets
from mkd.checkpoint.hf.model_card import model_card
from mkd.checkpoint.hf.whole_model import WholeModel
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.integrity import changed_files, find_damage
from mkd.checkpoint.tokenizer_hash import ASSETS, tokenizer_hash
from mkd.config.run_file import read_file, record_of
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.indexed import IndexedText
from mkd.data.sources.record_files import open_records
from mkd.data.sources.stores import ChatStore
from mkd.data.sources.token_files import check_index
from mkd.errors import MkdCheckpointError, MkdError
from mkd.job.cache_build.import_axolotl import ImportedText, read_records
from mkd.report.html.page import write_report
from mkd.report.trackers import RunIds
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import recover
from mkd.utils.limits import limited
from mkd.utils.model_folders.hub_folder import model_folder
from mkd.xtoken.vocabulary.projection import Projection
from tests.chaos import mutations
from tests.chaos.fuzz import RUN_FILE, TARGETS, WRITTEN
from tests.chaos.lab import Lab, Outcome
from tests.chaos.mutations import Draw, change_header, change_json, change_text, change_words
from tests.chaos.sandbox import GROWTH
from tests.chaos.verdicts import GREW, HANG, OTHER, REFUSED, TRACEBACK, UNCLEAR, Verdict
from tests.support.vision_language import make_whole

LIMIT_S = 30.0
LONGEST_LINE = 10_000

type Change = Callable[[bytes, Draw], tuple[bytes, str]]


@dataclass(frozen=True)
class Reader:
    """file: what is damaged; read: called with it; changes: mutations besides those of bytes."""

    file: Path
    read: Callable[[Path], object]
    changes: Sequence[Change]


class Readers:
    """Every reader in turn."""

    name = "readers"
    cases = 20_000

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._root = lab.fresh("readers")
        logging.getLogger("mkd").setLevel(logging.ERROR)
        self._readers = _readers(self._root)
        for name, reader in self._readers.items():
            try:
                reader.read(reader.file)
            except MkdError as error:
                assert name == "projection", f"{name}: {error}"  # its tokenizers are others

    def case(self, number: int) -> Outcome:
        draw = self.lab.random(self.name, number)
        name = list(self._readers)[number % len(self._readers)]
        reader = self._readers[name]
        beside = {path: path.read_bytes() for path in reader.file.parent.iterdir() if path.is_file()}
        old = beside[reader.file]
        try:
            new, note = (draw.choice(reader.changes) if draw.random() < 0.7 else draw.choice(mutations.BYTES))(
                old, draw
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # no JSON, for example
            new, note = draw.choice(mutations.BYTES)(old, draw)
        reader.file.write_bytes(new)
        verdict = _verdict(reader)
        for path, content in beside.items():
            if not path.is_file() or path == reader.file or path.read_bytes() != content:
                path.write_bytes(content)
        return Outcome(name, f"{reader.file.name}: {note}", verdict)


def _verdict(reader: Reader) -> Verdict:
    try:
        with limited(LIMIT_S, GROWTH):
            reader.read(reader.file)
    except (MkdError, OSError) as error:
        text = str(error)
        is_line = "\n" not in text and len(text) < LONGEST_LINE and text.isprintable()
        return Verdict(REFUSED if is_line else UNCLEAR, text[:300])
    except TimeoutError:
        return Verdict(HANG, f"{LIMIT_S:g} s")
    except MemoryError:
        return Verdict(GREW, f"{GROWTH / 2**30:g} GiB")
    except Exception as error:
        return Verdict(TRACEBACK, f"{type(error).__name__}: {error}"[:300])
    return Verdict(OTHER, "accepted")


def _readers(root: Path) -> dict[str, Reader]:
    """Name -> reader, of files in a folder that is filled."""
    for path in WRITTEN.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, root / path.name)
    (root / "run.yaml").write_text(f"{RUN_FILE}about:\n  host: a\n  versions: {{torch: 2.11.0}}\n")
    (root / "targets.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TARGETS))
    table = pyarrow.Table.from_pylist([json.loads(line) for line in (root / "chats.jsonl").read_text().splitlines()])
    parquet.write_table(table, root / "chats.parquet")
    with pyarrow.ipc.new_file(root / "chats.arrow", table.schema) as file:
        file.write_table(table)
    for folder in ("refs", "snapshots/a"):
        (root / "hub" / folder).mkdir(parents=True)
    (root / "hub" / "refs" / "main").write_text("a")
    checkpoint = root / "documents"
    (checkpoint / "trackers.json").write_text('{"MLflow  E": "run-7"}')
    opened = Path(shutil.copytree(checkpoint, root / "unchecked"))
    hashed, unhashed = (next(folder.glob("iter_*")) for folder in (checkpoint, opened))
    (unhashed / "integrity.json").unlink(missing_ok=True)
    student, corpus = root / "student", root / "corpus_text_document"
    found = {
        "config.json": Reader(student / "config.json", _read_model, [change_json]),
        "safetensors": Reader(student / "model.safetensors", _read_model, [change_header]),
        **_readers_of_whole_model(root),
        "tokenizer.json": Reader(student / "tokenizer.json", lambda f: tokenizer_hash(f.parent, "--hf"), [change_json]),
        "checkpoint index": Reader(hashed / ".metadata", lambda f: _require_whole(f.parent), [change_words]),
        "checkpoint index, no hashes": Reader(
            unhashed / ".metadata", lambda f: describe(None, str(f.parent)), [change_words]
        ),
        "checkpoint shard, no hashes": Reader(
            unhashed / "__0_0.distcp", lambda f: MegatronFolder(f.parent, "--load").args, [change_words]
        ),
        "integrity.json": Reader(hashed / "integrity.json", lambda f: _require_whole(f.parent), [change_json]),
        "metadata.json": Reader(
            hashed / "metadata.json",
            lambda f: (_require_whole(f.parent), MegatronFolder(f.parent, "--load")),
            [change_json],
        ),
        "kd_config.json": Reader(checkpoint / "kd_config.json", _read_run, [change_json]),
        "metrics.jsonl": Reader(checkpoint / "metrics.jsonl", _read_run, [change_text]),
        "trackers.json": Reader(checkpoint / "trackers.json", lambda f: RunIds(str(f.parent)), [change_json]),
        "run.yaml": Reader(
            root / "run.yaml", lambda f: (record_of(f.read_text("utf-8", "replace")), read_file(f)), [change_text]
        ),
        "projection": Reader(root / "projection.safetensors", lambda f: Projection.load(f, "a", "b"), [change_header]),
        ".idx": Reader(corpus.with_suffix(".idx"), lambda f: check_index(str(f.with_suffix(""))), [change_words]),
        "PREFIX.json": Reader(
            corpus.with_suffix(".json"), lambda f: IndexedText.load(str(f.with_suffix(""))), [change_json]
        ),
        "chats.jsonl": Reader(root / "chats.jsonl", _read_chats, [change_text]),
        "Parquet": Reader(root / "chats.parquet", _read_chats, [change_words]),
        "Arrow": Reader(root / "chats.arrow", _read_chats, [change_words]),
        "targets .jsonl": Reader(root / "targets.jsonl", _read_targets, [change_text]),
        "refs/main": Reader(
            root / "hub" / "refs" / "main", lambda f: model_folder(root / "hub", "--hf"), [change_text]
        ),
    }
    for name in ("cache_log12", "cache_fp32", "cache_counts"):
        found |= _readers_of_cache(root / name, name)
    return found | _readers_of_store(root / "stores" / "chat")


def _readers_of_cache(folder: Path, name: str) -> dict[str, Reader]:
    """Readers of the files of a teacher cache, whose properties have no checksum."""
    meta = json.loads((folder / "meta.json").read_text())
    meta.pop("checksum", None)
    (folder / "meta.json").write_text(json.dumps(meta))
    shard = next(folder.glob("*.safetensors"))

    def read(file: Path) -> object:
        return TeacherStore(folder, "--kd-teacher-cache")

    def complete(file: Path) -> object:
        file.with_suffix(".json").unlink(missing_ok=True)
        return recover(folder)

    return {
        f"{name}, properties": Reader(folder / "meta.json", read, [change_json]),
        f"{name}, shard": Reader(shard, read, [change_header, change_words]),
        f"{name}, list": Reader(shard.with_suffix(".json"), read, [change_json]),
        f"{name}, shard without a list": Reader(shard, complete, [change_header]),
    }


def _readers_of_whole_model(root: Path) -> dict[str, Reader]:
    """Readers of a vision-language folder, and of a checkpoint's reference to it."""
    folder, checkpoint = root / "whole", Path(shutil.copytree(root / "documents", root / "whole_checkpoint"))
    make_whole(folder, "qwen2_5_vl")
    store_assets(HFFolder(folder, "--hf"), checkpoint)
    record = checkpoint / ASSETS / WHOLE_MODEL
    return {
        "config.json, vision-language": Reader(folder / "config.json", _read_model, [change_json]),
        "safetensors, vision-language": Reader(folder / "model.safetensors", _read_model, [change_header]),
        "vision-language folder of a checkpoint": Reader(
            record, lambda file: WholeModel.of_checkpoint(MegatronFolder(checkpoint, "--load")), [change_json]
        ),
    }


def _readers_of_store(base: Path) -> dict[str, Reader]:
    """Readers of a chat file's tokens in the data cache, which have no checksums."""
    base.with_name(f"{base.name}.checksums").unlink(missing_ok=True)
    kinds = {"json": change_json, "bounds": change_words, "tokens": change_words}
    return {
        f"data cache, {kind}": Reader(
            base.with_name(f"{base.name}.{kind}"), lambda file: ChatStore(base, (0.0, 1.0)), [change]
        )
        for kind, change in kinds.items()
    }


def _read_model(file: Path) -> None:
    folder = HFFolder(file.parent, "--hf")
    check_tensors(folder, read_architecture(folder)[0])


def _require_whole(folder: Path) -> None:
    """Raise MkdCheckpointError where a job would not use the checkpoint."""
    if problem := find_damage(folder) or next(iter(changed_files(folder)), None):
        raise MkdCheckpointError(f"{folder}: {problem}")


def _read_run(file: Path) -> None:
    model_card(MegatronFolder(file.parent, "--load"))
    write_report(file.parent, file.parent.parent / "report.html")


def _read_chats(file: Path) -> None:
    with open_records(str(file)) as records:
        for number, line in enumerate(records.documents, start=1):
            if line.strip():
                Conversation.parse(line, f"{file}, record {number}")


def _read_targets(file: Path) -> None:
    for where, record in read_records(file):
        ImportedText.of(where, record, "token")
