"""tools/preprocess.py and mkd.data: what is written is what was read, and every bad input is one clear line."""

import gzip
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.data.sources import parallel, record_files, text
from mkd.data.sources.indexed import IndexedText, dataset_prefix, default_workers
from mkd.data.sources.text import RawBatch, parse
from mkd.errors import MkdDataError
from mkd.utils.atomic_files import only_writer
from tests.support.data_forms import FILES
from tests.support.fork_server import fork_server

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess.py"


@pytest.fixture(scope="module")
def preprocess():
    return importlib.import_module("mkd.cli.preprocess")


def byte_tokenizer(folder: Path, extra: int = 0, **special: str) -> str:
    """A tokenizer with one token a byte, `extra` unused tokens, and the special tokens given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *(f"<unused{i}>" for i in range(extra))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> str:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), eos_token="<|end|>")


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return str(path)


def documents_of(prefix: Path | str) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices
    return [np.concatenate([dataset[i] for i in range(a, b)]).tolist() for a, b in pairwise(bounds)]


def expected(tokenizer_dir: str, texts: list[str], eod: bool = True) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    end = [tokenizer.eos_token_id] if eod else []
    return [tokenizer(t, add_special_tokens=False)["input_ids"] + end for t in texts]


TEXTS = ["first document", "zweites, mit Umläuten: äöü €", "three\nlines\n\nhere", "x"]


def test_jsonl_becomes_megatron_files(preprocess, tokenizer_dir, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "new" / "folder" / "corpus"
    assert preprocess.main(["--input", source, "--output-prefix", str(out), "--tokenizer-model", tokenizer_dir]) == 0
    prefix = f"{out}_text_document"
    want = expected(tokenizer_dir, TEXTS)
    assert documents_of(prefix) == want
    assert "4 documents" in capsys.readouterr().out
    facts = IndexedText.load(prefix)
    assert (facts.documents, facts.tokens) == (4, sum(map(len, want)))
    assert facts.max_token_id == max(map(max, want)) == 256
    assert (facts.vocab_size, facts.eod, facts.dtype) == (257, 256, "uint16")
    assert facts.tokenizer_hash == tokenizer_hash(Path(tokenizer_dir), "") is not None
    assert sorted(p.name for p in out.parent.iterdir()) == [f"corpus_text_document.{s}" for s in ("bin", "idx", "json")]


def test_several_files_other_key_no_eod(preprocess, tokenizer_dir, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", TEXTS[:1], key="body")
    b = write_jsonl(tmp_path / "b.json", TEXTS[1:], key="body")
    args = ["--input", b, a, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main([*args, "--json-key", "body", "--no-append-eod"]) == 0
    assert documents_of(tmp_path / "c_body_document") == expected(tokenizer_dir, TEXTS[1:] + TEXTS[:1], eod=False)
    assert IndexedText.load(str(tmp_path / "c_body_document")).eod is None


@pytest.mark.parametrize(
    ("flags", "pieces"), [([], ["one\n\ntwo\f\nthree\f \n\f"]), (["--split-on", r"\f"], ["one\n\ntwo", "\nthree"])]
)
def test_text_file_is_one_document_or_split(preprocess, tokenizer_dir, tmp_path, flags, pieces):
    source = tmp_path / "a.txt"
    source.write_text("one\n\ntwo\f\nthree\f \n\f")
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main([*args, *flags]) == 0
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, pieces)


@pytest.mark.parametrize("file", FILES)
def test_texts_in_all_files_are_the_same_documents(preprocess, tokenizer_dir, tmp_path, file):
    source = FILES[file](tmp_path / file, [{"text": t, "n": i, "meta": None} for i, t in enumerate(TEXTS)])
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main(args) == 0
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, TEXTS)


def test_plain_text_with_a_byte_order_mark_and_compressed(preprocess, tokenizer_dir, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone|two")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three|four"))
    args = ["--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir, "--split-on", "|"]
    assert preprocess.main(["--input", str(tmp_path / "*.txt*"), *args]) == 0
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, ["one", "two", "three", "four"])


def test_broken_records_are_skipped_on_request(preprocess, tokenizer_dir, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n{"text": \n\n{"text": 7}\n{"text": "b"}\n' + "{\n" * 9)
    args = ["--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir, "--bad-records", "skip"]
    assert preprocess.main(["--input", str(source), *args]) == 0
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, ["a", "b"])
    said = capsys.readouterr()
    assert f"warning: 11 broken records left out: {source}, line 2: broken JSON" in said.err
    assert "line 4: the value of 'text' is a int" in said.err
    assert f"; {source}, lines 6, 7, 8, 9, 10, ...: broken JSON" in said.err
    assert "2 documents, 1 empty ones skipped" in said.out
    source.write_text("{\n")
    assert preprocess.main(["--input", str(source), *args]) == 1
    assert "no document can be used (1 broken records left out: " in capsys.readouterr().err
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, ["a", "b"])


def test_conversations_are_sent_to_the_training_command(preprocess, tokenizer_dir, tmp_path, capsys):
    source = tmp_path / "a.json"
    source.write_text('[{"conversations": [{"from": "human", "value": "a"}]}]')
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main(args) == 1
    error = capsys.readouterr().err
    assert "a.json, record 1: no key 'text' (keys there: conversations); conversations need no preprocessing" in error


def test_separator_across_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(text, "BATCH_BYTES", 5)
    monkeypatch.setattr(record_files, "_BLOCK_BYTES", 5)
    source = tmp_path / "a.txt"
    source.write_text("abc<sep>defghijkl<sep>m")
    batches = list(text.read_batches([str(source)], split_on="<sep>"))
    assert [d for b in batches for d in b.documents] == [b"abc", b"defghijkl", b"m"]
    assert [b.first for b in batches] == [1, 3]


def test_workers_keep_the_order(preprocess, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BATCH_BYTES", 200)  # in this process: many small batches, each a job of its own
    monkeypatch.setattr(parallel, "get_context", lambda method: fork_server())  # spawned in the test of bad input
    texts = [f"document {i} " + "x" * (i % 37) for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers in ("1", "3"):
        args = ["--input", source, "--output-prefix", str(tmp_path / workers), "--tokenizer-model", tokenizer_dir]
        assert preprocess.main([*args, "--workers", workers]) == 0
    assert documents_of(tmp_path / "3_text_document") == expected(tokenizer_dir, texts)
    for suffix in ("bin", "idx", "json"):
        one, three = (tmp_path / f"{n}_text_document.{suffix}" for n in "13")
        assert one.read_bytes() == three.read_bytes()


def test_empty_documents_are_skipped_and_counted(preprocess, tokenizer_dir, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n\n{"text": "  "}\n{"text": "b"}\n')
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main(args) == 0
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, ["a", "b"])
    assert "2 empty ones skipped" in capsys.readouterr().out


@pytest.mark.parametrize(("extra", "dtype"), [(65_499 - 257, "uint16"), (65_500 - 257, "int32")])
def test_dtype_follows_the_vocabulary(preprocess, tmp_path, extra, dtype):
    folder = byte_tokenizer(tmp_path / "tokenizer", extra=extra, eos_token="<|end|>")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert (
        preprocess.main(["--input", source, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", folder]) == 0
    )
    facts = IndexedText.load(str(tmp_path / "c_text_document"))
    assert (facts.dtype, facts.max_token_id) == (dtype, 256 + extra)
    assert documents_of(tmp_path / "c_text_document") == expected(folder, TEXTS)


BAD_LINES = {
    "broken JSON": ('{"text": "a"}\n{"text": \n', "a.jsonl, line 2: broken JSON"),
    "not an object": ('{"text": "a"}\n[1]\n', "a.jsonl, line 2: a JSON list"),
    "missing key": ('{"text": "a"}\n\n{"body": "b"}\n', "a.jsonl, line 3: no key 'text' (keys there: body)"),
    "not a string": ('{"text": 7}\n', "a.jsonl, line 1: the value of 'text' is a int"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8"),
    "half a surrogate pair": ('{"text": "ab\\ud800"}\n', "a.jsonl, line 1: half a surrogate pair at character 2"),
    "nothing but whitespace": (' \n{"text": ""}\n', "every document contains only whitespace"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize(("case", "workers"), [*((case, "1") for case in BAD_LINES), ("missing key", "2")])
def test_bad_input_is_one_line_and_writes_nothing(preprocess, tokenizer_dir, tmp_path, capsys, case, workers):
    content, message = BAD_LINES[case]
    source = tmp_path / "a.jsonl"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main([*args, "--workers", workers]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_flags(preprocess, tokenizer_dir, tmp_path, capsys):
    good = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    parquet = tmp_path / "a.parquet"
    parquet.write_bytes(b"PAR1")
    table = tmp_path / "a.csv"
    table.write_text("text\na\n")
    empty_folder = tmp_path / "nothing"
    empty_folder.mkdir()
    no_eos = byte_tokenizer(tmp_path / "no_eos")
    torn = Path(byte_tokenizer(tmp_path / "torn", eos_token="<|end|>"))
    (torn / "tokenizer.json").write_text('{"version": "1.0", "mod')
    cases = [
        ([str(tmp_path / "none.jsonl")], tokenizer_dir, [], "none.jsonl does not exist"),
        ([good, str(table)], tokenizer_dir, [], "a.csv ends in '.csv'"),
        ([str(parquet)], tokenizer_dir, [], "a.parquet cannot be read as parquet"),
        ([str(empty_folder)], tokenizer_dir, [], "is a folder without data files"),
        ([good], str(tmp_path / "none"), [], "none does not exist"),
        ([good], str(empty_folder), [], "nothing holds no tokenizer"),
        ([good], str(torn), [], "tokenizer.json is not readable JSON"),
        ([good], no_eos, [], "has no eos_token"),
        ([good], tokenizer_dir, ["--workers", "0"], "--workers is 0"),
        ([good], tokenizer_dir, ["--split-on", ""], "--split-on is empty"),
    ]
    for inputs, tokenizer, flags, message in cases:
        args = ["--input", *inputs, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer, *flags]
        assert preprocess.main(args) == 1, message
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("c_*"))
    args = ["--input", good, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", no_eos, "--no-append-eod"]
    assert preprocess.main(args) == 0


def test_failed_run_leaves_the_older_data_set(preprocess, tokenizer_dir, tmp_path):
    source = tmp_path / "a.jsonl"
    write_jsonl(source, TEXTS)
    args = ["--input", str(source), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main(args) == 0
    source.write_text('{"text": "new"}\nbroken\n')
    assert preprocess.main(args) == 1
    assert documents_of(tmp_path / "c_text_document") == expected(tokenizer_dir, TEXTS)


def run_script(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def test_killed_run_leaves_nothing_whole_and_can_be_repeated(tokenizer_dir, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["word " * 40_000] * 200)
    out = tmp_path / "c"
    command = [
        sys.executable,
        str(TOOL),
        "--output-prefix",
        str(out),
        "--tokenizer-model",
        tokenizer_dir,
        "--workers",
        "1",
    ]
    process = fork_server().Process(target=run_script, args=([*command[1:], "--input", source],))
    process.start()
    partial_file = Path(f"{out}_text_document.bin.partial")
    deadline = time.monotonic() + 60
    while not (partial_file.exists() and partial_file.stat().st_size > 0):
        assert process.exitcode is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("c_*")] == [partial_file.name]
    small = write_jsonl(tmp_path / "small.jsonl", TEXTS)
    torch_finds_cuda = {**os.environ, "CUDA_HOME": str(tmp_path)}
    done = subprocess.run([*command, "--input", small], capture_output=True, text=True, env=torch_finds_cuda)
    assert (done.returncode, done.stderr) == (0, ""), "a short run says its summary and nothing else"
    assert documents_of(f"{out}_text_document") == expected(tokenizer_dir, TEXTS)
    assert not partial_file.exists()


def test_sidecar_of_other_data_is_refused(preprocess, tokenizer_dir, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    preprocess.main(["--input", source, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir])
    prefix = str(tmp_path / "c_text_document")
    binary = Path(f"{prefix}.bin")
    binary.write_bytes(binary.read_bytes()[:-2])
    with pytest.raises(MkdDataError, match="bytes: delete"):
        IndexedText.load(prefix)
    Path(f"{prefix}.json").write_text('{"documents": 3}')
    with pytest.raises(MkdDataError, match="is broken"):
        IndexedText.load(prefix)
    Path(f"{prefix}.json").unlink()
    assert IndexedText.load(prefix) is None


def test_sidecar_of_other_data_of_the_same_size_is_refused(preprocess, tokenizer_dir, tmp_path):
    """Another tool, which writes no PREFIX.json, has made the data again."""
    prefix = tmp_path / "c_text_document"
    for tokens, facts in (("aaaa", True), ("bbbb", False)):
        source = write_jsonl(tmp_path / "a.jsonl", [tokens, tokens])
        kept = Path(f"{prefix}.json").read_text() if not facts else None
        preprocess.main(["--input", source, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", tokenizer_dir])
        if kept is not None:
            Path(f"{prefix}.json").write_text(kept)
    with pytest.raises(MkdDataError, match=r"describes other tokens than those in .*\.bin.*: delete .*\.json"):
        IndexedText.load(str(prefix))
    older = json.loads(kept)
    del older["fingerprint"]
    Path(f"{prefix}.json").write_text(json.dumps(older))
    assert IndexedText.load(str(prefix)).documents == 2, "facts of an older version are read as before"


def test_progress_counts_from_the_beginning_of_the_work(preprocess, capsys, monkeypatch):
    times = iter([0.0, 100.0, 120.0, 140.0])
    monkeypatch.setattr(preprocess.time, "monotonic", lambda: next(times))
    line = preprocess.ProgressLine(4_000_000)
    for size in (0, 1_000_000, 4_000_000):
        line(size // 1000, size // 4, size)
    [said] = capsys.readouterr().err.splitlines()
    assert said == " 25.0%  1,000 documents (50/s)  250,000 tokens  0.05 MB/s  ETA 00:01:00"


def test_small_input_gets_one_worker(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert default_workers([source]) == 1


def write_at_once(preprocess, barrier, argv: list[str], errors: Path) -> None:
    with errors.open("w") as sys.stderr:
        barrier.wait()
        status = preprocess.main(argv)
    os._exit(status)


@pytest.mark.parametrize("attempt", range(12))
def test_two_processes_with_one_prefix_lose_no_data(preprocess, tokenizer_dir, tmp_path, attempt) -> None:
    context, prefix = get_context("fork"), tmp_path / "out"
    barrier, texts = context.Barrier(2), ["a" * (20 + attempt), "b" * (20_000 if attempt % 2 else 40)]
    jobs = []
    for number, content in enumerate(texts):
        source = write_jsonl(tmp_path / f"{number}.jsonl", [content] * 50)
        argv = ["--input", source, "--output-prefix", str(prefix), "--tokenizer-model", tokenizer_dir, "--workers", "1"]
        arguments = (preprocess, barrier, argv, tmp_path / f"errors{number}")
        jobs.append(context.Process(target=write_at_once, args=arguments))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    states = [job.exitcode for job in jobs]
    assert set(states) <= {0, 1} and 0 in states
    for number in range(2):
        errors = (tmp_path / f"errors{number}").read_text().splitlines()
        assert not states[number] or "another process is writing it" in errors[-1]
        assert "Traceback" not in "".join(errors)
    name = dataset_prefix(str(prefix), "text")
    found, tokenizer = documents_of(name), AutoTokenizer.from_pretrained(tokenizer_dir)
    written = {len(tokenizer(texts[number])["input_ids"]) + 1 for number in range(2) if states[number] == 0}
    assert len(found) == 50 and {len(ids) for ids in found} <= written and len({len(ids) for ids in found}) == 1
    assert IndexedText.load(name).documents == 50
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".partial", ".lock"))]


def test_a_data_set_that_another_process_writes_is_refused(preprocess, tokenizer_dir, tmp_path, capsys) -> None:
    source, prefix = write_jsonl(tmp_path / "in.jsonl", ["abc"]), tmp_path / "out"
    argv = ["--input", source, "--output-prefix", str(prefix), "--tokenizer-model", tokenizer_dir]
    with only_writer(Path(dataset_prefix(str(prefix), "text"))):
        assert preprocess.main(argv) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith(f"error: {prefix}_text_document: another process is writing it")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    assert preprocess.main(argv) == 0


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_pipe_in_place_of_a_file_is_refused(suffix, preprocess, tokenizer_dir, tmp_path, capsys) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["abc"])
    pipe = tmp_path / f"out_text_document{suffix}"
    os.mkfifo(pipe)
    argv = ["--input", source, "--output-prefix", str(tmp_path / "out"), "--tokenizer-model", tokenizer_dir]
    assert preprocess.main(argv) == 1
    assert f"--output-prefix {pipe} is a named pipe" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_word_of_20_mb(kind: str) -> None:
    """It would take minutes and gigabytes."""
    word = "a" * 20_000_000
    line = word.encode() if kind == "txt" else json.dumps({"messages": [{"content": f"b {word}"}]}).encode()
    with pytest.raises(MkdDataError, match=r"20,000,000 characters without whitespace; at most 1,048,576"):
        parse(RawBatch("f", 1, [line], "line" if kind == "jsonl" else "document"), "text")
    assert parse(RawBatch("f", 1, [b"ab " * 600_000], "document"), "text")


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"text": ' + b"1" * 5000 + b"}", b'{"a": ' * 150 + b"1" + b"}" * 150]
)
def test_json_bombs_name_their_line(line: bytes) -> None:
    with pytest.raises(MkdDataError, match=r"^f, line 7: broken JSON \("):
        parse(RawBatch("f", 7, [line]), "text")
