"""Damages one file that a command reads, and compares what the command does with what it did before."""

import gzip
import json
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from tests.chaos import mutations
from tests.chaos.lab import Lab, Outcome
from tests.chaos.mutations import (
    BYTES,
    change_header,
    change_json,
    change_template,
    change_text,
    change_words,
    replace_entry,
)
from tests.chaos.sandbox import Ended, run
from tests.chaos.verdicts import EQUAL, OTHER, SILENT, Verdict, differing, failure, metrics, refusal
from tests.chaos.working_copy import WorkingCopy
from tests.support.e2e.small_job import ROOT, SCRIPT

WRITTEN = ROOT / "tests" / "fixtures" / "commit_715961d"
LIMIT_S = 30.0
VOCAB = 272

COMMON: dict[str, Any] = {
    "--kd-student-hf": "student",
    "--kd-teacher-hf": "teacher",
    "--data-cache-path": "data_cache",
    "--split": "80,20,0",
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--train-iters": 2,
    "--lr-decay-iters": 8,
    "--eval-iters": 0,
    "--eval-interval": 1000,
    "--log-interval": 1,
    "--lr": 1e-3,
    "--num-workers": 0,
    "--make-vocab-size-divisible-by": 8,
    "--kd-metrics-file": "m.jsonl",
    "--kd-ratio": 0.5,
}
DOCUMENTS: dict[str, Any] = {"--data-path": "corpus_text_document", "--seq-length": 32}
BLEND = {**DOCUMENTS, "--data-path": ("0.5", "corpus_text_document", "0.5", "other_text_document")}
ROWS: dict[str, Any] = {
    "--data-path": "chats.jsonl",
    "--seq-length": 64,
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 8,
}
OTHER_TOKENIZER = {**ROWS, "--kd-teacher-hf": "other_teacher", "--kd-xtoken-loss": "p_kl"}
RESUME = {
    **DOCUMENTS,
    "--train-iters": 4,
    "--load": "checkpoint",
    "--save": "checkpoint",
    "--save-interval": 2,
    "--kd-metrics-file": None,
}


EVALUATED = {
    **DOCUMENTS,
    "--seq-length": 64,
    "--eval-iters": 1,
    "--kd-eval-tokens": 4,
    "--kd-eval-tasks": "tasks.jsonl",
}
TASKS = [
    {"prompt": "token", "answer": "house", "match": "contains"},
    {"messages": [{"role": "user", "content": "river"}], "answer": "[a-z]+ing", "match": "regex"},
    {"prompt": "water", "answer": 7, "match": "number"},
]
WRITTEN_ROWS = {**DOCUMENTS, "--kd-on-policy": 0.5, "--kd-prompts": "prompts.jsonl", "--kd-rollout-tokens": 4}
PROMPTS = [{"prompt": word} for word in ("token", "river", "water", "blue")]
TARGETS = [
    {
        "input_ids": [3, 4, 5, 6],
        "labels": [-100, 4, 5, 6],
        "target_token_ids": [[1, 2], [4, 7], [5, 8], [6, 9]],
        "target_logprobs": [[-0.2, -2.0], [-0.1, -3.0], [-0.5, -1.0], [-0.3, -2.5]],
    }
] * 4
"""Records of `mkd cache import`."""
RUN_FILE = """models:
  kd-student-hf: student
  kd-teacher-hf: teacher
kd-ratio: 0.5
data:
  data-path: corpus_text_document
  seq-length: 32
lr: 1e-3
train-iters: 2
"""
IN_FILE = dict.fromkeys(
    ("--kd-student-hf", "--kd-teacher-hf", "--kd-ratio", "--data-path", "--seq-length", "--lr", "--train-iters")
)
"""Flags that the file gives."""


def train(**changes: Any) -> list[str]:
    flags = {**COMMON, **changes.pop("flags")}
    words = [str(SCRIPT)]
    for flag, value in flags.items():
        if value is not None:
            words += [flag, *value] if isinstance(value, tuple) else [flag] if value is True else [flag, str(value)]
    return words


def tool(name: str, *words: Any) -> list[str]:
    return [str(ROOT / "tools" / f"{name}.py"), *map(str, words)]


def cached(folder: str) -> list[str]:
    return train(flags={**ROWS, "--kd-teacher-hf": None, "--kd-teacher-cache": folder})


@dataclass(frozen=True)
class Command:
    """words: the command line, run in the work folder.

    removed: patterns of files that are removed first, so that they are made again.
    compared: files whose bytes are compared; metrics are always compared; "stdout" for the output.
    """

    words: Sequence[str]
    removed: Sequence[str] = ()
    compared: Sequence[str] = ()


COMMANDS: dict[str, Command] = {
    "documents": Command(train(flags=DOCUMENTS), removed=["data_cache/*-DocumentRows-*"]),
    "indexed documents": Command(train(flags=DOCUMENTS)),
    "sharded teacher": Command(train(flags={**DOCUMENTS, "--kd-teacher-hf": "sharded"})),
    "blended documents": Command(train(flags=BLEND)),
    "evaluated documents": Command(train(flags=EVALUATED)),
    "written rows": Command(train(flags=WRITTEN_ROWS)),
    "imported targets": Command(
        tool("cache_teacher", "import", "out", "targets.jsonl", "--tokenizer-model", "student", "--teacher", "T"),
        compared=["stdout"],
    ),
    "chats": Command(train(flags=ROWS), removed=["data_cache/*-chat.*"]),
    "stored chats": Command(train(flags=ROWS)),
    "stored pairs": Command(train(flags=OTHER_TOKENIZER)),
    "arrow": Command(train(flags={**ROWS, "--data-path": "chats.arrow"}), removed=["data_cache/*-chat.*"]),
    "table": Command(train(flags={**ROWS, "--data-path": "chats.parquet"}), removed=["data_cache/*-chat.*"]),
    "compressed text": Command(
        tool("preprocess", "--input", "corpus.jsonl.gz", "--output-prefix", "out", "--tokenizer-model", "student"),
        compared=["out_text_document.bin", "out_text_document.idx"],
    ),
    "projection": Command(train(flags={**OTHER_TOKENIZER, "--kd-projection": "projection.safetensors"})),
    "cache_log12": Command(cached("cache_log12")),
    "cache_fp32": Command(cached("cache_fp32")),
    "cache_counts": Command(cached("cache_counts")),
    "old_cache": Command(cached("old_cache")),
    "resume": Command(train(flags=RESUME)),
    "run file": Command(train(flags={**DOCUMENTS, **IN_FILE, "--kd-config": "run.yaml", "--exit-interval": 2})),
    "export": Command(
        tool("convert", "export", "--load", "checkpoint", "--hf", "out"), compared=["out/*.safetensors", "out/*.json"]
    ),
    "inspect": Command(tool("convert", "inspect", "--load", "checkpoint"), compared=["stdout"]),
    "import": Command(tool("convert", "import", "--hf", "teacher", "--save", "out"), compared=["out/release/*.distcp"]),
    "preprocess": Command(
        tool("preprocess", "--input", "corpus.jsonl", "--output-prefix", "out", "--tokenizer-model", "student"),
        compared=["out_text_document.bin", "out_text_document.idx"],
    ),
    "build projection": Command(
        tool("build_projection", "--student", "student", "--teacher", "other_teacher", "--out", "out.safetensors"),
        compared=["out.safetensors"],
    ),
}

type Rule = Callable[[Path, bytes, bytes], str]
"""(file, original, changed) -> why another result is legitimate; "" if it is not."""


def never(file: Path, old: bytes, new: bytes) -> str:
    return ""


def tokens_in_range(file: Path, old: bytes, new: bytes) -> str:
    """As many tokens as before, all in the vocabulary: different data."""
    if len(new) != len(old) or int(np.frombuffer(new, np.uint16).max()) >= VOCAB:
        return ""
    return "other token ids of the vocabulary"


def other_lines(file: Path, old: bytes, new: bytes) -> str:
    try:
        lines = [line for line in new.decode("utf-8").splitlines() if line.strip()]
        return "other text" if all(isinstance(json.loads(line), dict) for line in lines) else ""
    except (ValueError, RecursionError):
        return ""


def other_compressed_lines(file: Path, old: bytes, new: bytes) -> str:
    """The library decompresses other text, such as that of two files in one."""
    try:
        return other_lines(file, gzip.decompress(old), gzip.decompress(new))
    except (OSError, EOFError, zlib.error):
        return ""


def other_rows(file: Path, old: bytes, new: bytes) -> str:
    """The library reads a table with other rows."""
    is_arrow = old.startswith(b"ARROW1")
    try:
        one, other = (
            pyarrow.ipc.open_file(content).read_all().to_pylist()
            if is_arrow
            else parquet.read_table(pyarrow.BufferReader(content), use_threads=False).to_pylist()
            for content in (old, new)
        )
    except Exception:
        return ""
    return "other text" if one != other else ""


def other_template(file: Path, old: bytes, new: bytes) -> str:
    try:
        new.decode("utf-8")
    except ValueError:
        return ""
    return "another template"


def other_weights(file: Path, old: bytes, new: bytes) -> str:
    """The library reads tensors of the same names, shapes and types."""
    from safetensors.torch import load

    try:
        one, other = load(old), load(new)
    except Exception:
        return ""
    same = one.keys() == other.keys() and all(
        one[k].shape == other[k].shape and one[k].dtype == other[k].dtype for k in one
    )
    return "other weights" if same else ""


def other_config(file: Path, old: bytes, new: bytes) -> str:
    """transformers reads another model."""
    from transformers import AutoConfig

    found = []
    kept = file.read_bytes()
    for content in (old, new):
        file.write_bytes(content)
        try:
            found.append(AutoConfig.from_pretrained(file.parent, trust_remote_code=False).to_dict())
        except Exception:
            found.append(None)
    file.write_bytes(kept)
    return "another model by its config" if None not in found and found[0] != found[1] else ""


def other_tokenizer(file: Path, old: bytes, new: bytes) -> str:
    """The library reads another tokenizer."""
    from tokenizers import Tokenizer

    try:
        one, other = (Tokenizer.from_str(content.decode("utf-8")).to_str() for content in (old, new))
    except BaseException:
        return ""
    return "another tokenizer" if one != other else ""


def other_settings(file: Path, old: bytes, new: bytes) -> str:
    try:
        one, other = json.loads(old), json.loads(new)
    except (ValueError, RecursionError):
        return ""
    return "other settings of the tokenizer" if isinstance(other, dict) and one != other else ""


def other_flags(file: Path, old: bytes, new: bytes) -> str:
    """The text is YAML of other flags; those that do not exist are refused."""
    import yaml

    try:
        one, other = (yaml.load(content, yaml.BaseLoader) for content in (old, new))
    except (yaml.YAMLError, ValueError):
        return ""
    return "other flags" if isinstance(other, dict) and one != other else ""


@dataclass(frozen=True)
class Format:
    """files: patterns in the work folder; commands: names; changes: mutations besides those of bytes."""

    files: Sequence[str]
    commands: Sequence[str]
    changes: Sequence[Callable[[bytes, random.Random], tuple[bytes, str]]]
    rule: Rule = never


CACHES = ("cache_log12", "cache_fp32", "cache_counts")
FORMATS: dict[str, Format] = {
    "config.json": Format(
        ["student/config.json", "teacher/config.json"], ["documents", "import"], [change_json], other_config
    ),
    "safetensors": Format(
        ["student/model.safetensors", "teacher/model.safetensors"],
        ["documents", "import"],
        [change_header],
        other_weights,
    ),
    "safetensors index": Format(["sharded/model.safetensors.index.json"], ["sharded teacher"], [change_json]),
    "tokenizer.json": Format(
        ["student/tokenizer.json", "teacher/tokenizer.json", "other_teacher/tokenizer.json"],
        ["chats", "preprocess", "build projection"],
        [change_json],
        other_tokenizer,
    ),
    "tokenizer_config.json": Format(
        ["student/tokenizer_config.json", "teacher/tokenizer_config.json"],
        ["chats", "preprocess"],
        [change_json],
        other_settings,
    ),
    "chat template": Format(["student/chat_template.jinja"], ["chats"], [change_template, change_text], other_template),
    "chats.jsonl": Format(["chats.jsonl"], ["chats"], [change_text], other_lines),
    "text .jsonl": Format(["corpus.jsonl"], ["preprocess"], [change_text], other_lines),
    "Parquet": Format(["chats.parquet"], ["table"], [change_words], other_rows),
    "Arrow": Format(["chats.arrow"], ["arrow"], [change_words], other_rows),
    "tasks .jsonl": Format(["tasks.jsonl"], ["evaluated documents"], [change_text], other_lines),
    "prompts .jsonl": Format(["prompts.jsonl"], ["written rows"], [change_text], other_lines),
    "targets .jsonl": Format(["targets.jsonl"], ["imported targets"], [change_text], other_lines),
    "compressed text": Format(["corpus.jsonl.gz"], ["compressed text"], [change_words], other_compressed_lines),
    ".idx": Format(["corpus_text_document.idx"], ["documents", "indexed documents"], [change_words]),
    ".bin": Format(["corpus_text_document.bin"], ["documents"], [change_words], tokens_in_range),
    "PREFIX.json": Format(["corpus_text_document.json"], ["documents"], [change_json]),
    "data cache, documents": Format(["data_cache/*-DocumentRows-*.npy"], ["indexed documents"], [change_words]),
    "data cache, blends": Format(["data_cache/*-BlendedRows-*.npy"], ["blended documents"], [change_words]),
    "data cache, chats": Format(["data_cache/*-chat.*"], ["stored chats"], [change_words]),
    "data cache, pairs": Format(["data_cache/*-pairs.*"], ["stored pairs"], [change_words]),
    "projection": Format(["projection.safetensors"], ["projection"], [change_header]),
    "cache meta.json": Format([f"{name}/meta.json" for name in CACHES], CACHES, [change_json]),
    "cache shards": Format([f"{name}/shard-*.safetensors" for name in CACHES], CACHES, [change_header, change_words]),
    "cache shard lists": Format([f"{name}/shard-*.json" for name in CACHES], CACHES, [change_json]),
    "checkpoint index": Format(["checkpoint/iter_0000002/.metadata"], ["resume", "export", "inspect"], [change_words]),
    "checkpoint shards": Format(["checkpoint/iter_0000002/*.distcp"], ["resume", "export"], [change_words]),
    "checkpoint facts": Format(
        [
            "checkpoint/iter_0000002/integrity.json",
            "checkpoint/iter_0000002/metadata.json",
            "checkpoint/latest_checkpointed_iteration.txt",
            "checkpoint/kd_config.json",
            "checkpoint/saving_job.txt",
        ],
        ["resume", "inspect"],
        [change_json],
    ),
    "run.yaml": Format(["run.yaml"], ["run file"], [change_text], other_flags),
    "metrics.jsonl": Format(["checkpoint/metrics.jsonl"], ["resume"], [change_text]),
}


def _write_sharded(folder: Path, target: Path) -> None:
    """A copy of a model whose weights are in two files, with an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(folder / "model.safetensors")
    names, places = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, target / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1))


SMALL = ("config.json", "safetensors", ".idx", ".bin", "PREFIX.json", "checkpoint index", "checkpoint facts")
"""Formats of a small session: they need no caches and no conversations."""


class Fuzz:
    """Every format in turn."""

    name = "fuzz"
    cases = 3000

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.work, self.pristine, self.streams = lab.fresh("fuzz/work"), lab.root / "fuzz/pristine", lab.root / "fuzz/s"
        self._formats = {name: FORMATS[name] for name in SMALL} if lab.is_small else FORMATS
        self._expected: dict[str, Any] = {}
        self._make()

    def _make(self) -> None:
        """Write every file with today's code, in the work folder."""
        for name in ("student", "teacher", "other_teacher", "corpus.jsonl", "chats.jsonl"):
            source = WRITTEN / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.work / name)
        (self.work / "run.yaml").write_text(RUN_FILE)
        lines = [json.loads(line) for line in (self.work / "chats.jsonl").read_text().splitlines()]
        parquet.write_table(pyarrow.Table.from_pylist(lines), self.work / "chats.parquet")
        with pyarrow.ipc.new_file(self.work / "chats.arrow", pyarrow.Table.from_pylist(lines).schema) as file:
            file.write_table(pyarrow.Table.from_pylist(lines))
        for name, records in {"tasks": TASKS, "prompts": PROMPTS, "targets": TARGETS}.items():
            (self.work / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (self.work / "corpus.jsonl.gz").write_bytes(gzip.compress((self.work / "corpus.jsonl").read_bytes(), mtime=0))
        _write_sharded(self.work / "teacher", self.work / "sharded")
        words = ["--input", "corpus.jsonl", "--output-prefix", "corpus", "--tokenizer-model", "student"]
        self._must(tool("preprocess", *words))
        self._must(train(flags=RESUME | {"--exit-interval": 2}))
        for suffix in (".bin", ".idx", ".json"):
            shutil.copy2(self.work / f"corpus_text_document{suffix}", self.work / f"other_text_document{suffix}")
        self._must(COMMANDS["documents"].words)
        if not self.lab.is_small:
            self._make_caches()
        (self.work / "m.jsonl").unlink()
        shutil.rmtree(self.pristine, ignore_errors=True)
        shutil.copytree(self.work, self.pristine, symlinks=True)
        self._copy = WorkingCopy(self.pristine, self.work)

    def _make_caches(self) -> None:
        """The projection, teacher caches, and tokens of the conversations in the data cache."""
        words = ["--student", "student", "--teacher", "other_teacher", "--out", "projection.safetensors"]
        self._must(tool("build_projection", *words))
        targets = {
            "cache_log12": ["--top-k", 4],
            "cache_fp32": ["--top-k", 4, "--lossless"],
            "cache_counts": ["--sample", 4],
        }
        flags = train(flags={**ROWS, "--train-iters": 40, "--lr-decay-iters": 40})[1:]
        for name, options in targets.items():
            self._must(tool("cache_teacher", "write", "--out", name, *options, "--", *flags))
        for name in ("chats", "stored pairs", "blended documents"):
            self._must(COMMANDS[name].words)

    def expected(self, name: str) -> Any:
        """The result of a command with the undamaged files, computed when it is first needed."""
        if name not in self._expected:
            self.restore()
            ended = self._run(COMMANDS[name])
            assert ended.status == 0 and failure(ended) is None, f"{name}: {ended.errors[-3000:]}"
            self._expected[name] = self._result(COMMANDS[name], ended)
        return self._expected[name]

    def _must(self, words: Sequence[str]) -> None:
        ended = run(words, self.streams, 120, cwd=self.work)
        assert ended.status == 0, f"{words}\n{ended.output[-2000:]}{ended.errors[-3000:]}"

    def restore(self) -> None:
        """Undo all changes in the work folder."""
        self._copy.restore()

    def _run(self, command: Command) -> Ended:
        for pattern in command.removed:
            for file in self.work.glob(pattern):
                file.unlink()
        return run(command.words, self.streams, LIMIT_S, cwd=self.work)

    def _result(self, command: Command, ended: Ended) -> Any:
        """Everything that is compared."""
        files = [file for pattern in command.compared for file in sorted(self.work.glob(pattern))]
        found: dict[str, Any] = {str(file.relative_to(self.work)): file.read_bytes() for file in files}
        if "stdout" in command.compared:
            found["stdout"] = ended.output
        file = self.work / "m.jsonl"
        resumed = metrics(self.work / "checkpoint" / "metrics.jsonl")
        found["metrics"] = metrics(file) if file.is_file() else [x for x in resumed if x.get("iteration", 0) > 2]
        return found

    def case(self, number: int) -> Outcome:
        draw = self.lab.random(self.name, number)
        name = list(self._formats)[number % len(self._formats)]
        found = self._formats[name]
        self.restore()
        path = draw.choice([file for pattern in found.files for file in sorted(self.work.glob(pattern))])
        commands = [c for c in found.commands if c == path.parts[-2]] or list(found.commands)
        command = draw.choice(commands)
        if command not in self._expected:
            self.expected(command)
            self.restore()
        old = path.read_bytes()
        new, note = self._mutate(path, old, draw, found)
        case = f"{path.relative_to(self.work)}: {note}; {command}"
        if new == old:
            return Outcome(name, case, Verdict(EQUAL))
        return Outcome(name, case, self._judge(command, path, old, new, found.rule))

    def _mutate(self, path: Path, old: bytes, draw: random.Random, found: Format) -> tuple[bytes | None, str]:
        """Damage the file. Returns its new content, None if it is not a file any more, and a note."""
        if draw.random() < 0.04:
            return None, replace_entry(path, draw)
        changes = list(found.changes) if draw.random() < 0.6 else BYTES
        change = draw.choice(changes)
        try:
            new, note = change(old, draw)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # no JSON, for example
            new, note = draw.choice(mutations.BYTES)(old, draw)
        path.write_bytes(new)
        return new, note

    def _judge(self, name: str, path: Path, old: bytes, new: bytes | None, rule: Rule) -> Verdict:
        command = COMMANDS[name]
        ended = self._run(command)
        if (verdict := failure(ended)) is not None:
            return verdict
        if ended.status != 0:
            return refusal(ended)
        seen, expected = self._result(command, ended), self.expected(name)
        if seen == expected or json.dumps(seen, default=str) == json.dumps(expected, default=str):
            return Verdict(EQUAL)
        reason = rule(path, old, new) if new is not None else ""
        if reason:
            return Verdict(OTHER, reason)
        wrong = [key for key in {*seen, *expected} if seen.get(key) != expected.get(key)]
        return Verdict(SILENT, f"{', '.join(wrong)}: {differing(seen['metrics'], expected['metrics'])}")
