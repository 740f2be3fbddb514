"""Run a teacher once and keep its answers for any number of trainings.

    torchrun --nproc-per-node 8 tools/cache_teacher.py write --out CACHE --top-k 64 -- FLAGS OF pretrain_kd.py
    python tools/cache_teacher.py info CACHE
    python tools/cache_teacher.py verify CACHE [-- FLAGS OF pretrain_kd.py]
    python tools/cache_teacher.py merge CACHE PART PART ...
    python tools/cache_teacher.py import CACHE FILE.parquet --tokenizer-model HF_DIR --teacher NAME

`write` takes the launch line of a training as it is, with --kd-teacher-hf or --kd-teacher-load: it reads the same data
in the same layout, and ignores what is about the student. docs/teachers.md describes all of it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd.errors import MkdCacheError, MkdError


def prepare(flags: list[str]) -> None:
    """Get ready for Megatron, which is imported only then: the CPU backend must be in place first."""
    from mkd import compat, cpu
    from mkd.compat.quiet import silence_megatron
    from mkd.distributed.rank_env import default_rank_env

    default_rank_env()
    if cpu.wanted():
        cpu.activate()
    silence_megatron(flags)
    compat.use_prebuilt_dataset_helpers()
    sys.argv[1:] = flags


STOPPED = 75
"""Exit status of a `write` that a signal has ended: EX_TEMPFAIL, the same command goes on."""


def write(args: argparse.Namespace, flags: list[str]) -> None:
    """Fill a cache, or go on filling it."""
    prepare(flags)
    from megatron.training import initialize_megatron

    from mkd.cache_build.job import CacheJob, CacheOptions
    from mkd.cache_build.progress import print_plan
    from mkd.cache_build.write import Writing, rows_of
    from mkd.checkpoint.resume import check_same_teacher_everywhere
    from mkd.compat.stopping import StopSignals
    from mkd.distributed.groups import Groups
    from mkd.distributed.rank_env import check_rendezvous
    from mkd.teacher.cache.writer import check_folder
    from mkd.utils.logging import logger

    temperatures = tuple(args.temperature)
    options = CacheOptions(
        out=Path(args.out), top_k=args.top_k, samples=args.sample, lossless=args.lossless, temperatures=temperatures
    )
    job = CacheJob.from_command_line(options)
    check_folder(job.out, job.meta, "--out")
    print_plan(job)
    if job.kd.dry_run:
        job.data.check_all()
        return
    check_rendezvous()
    initialize_megatron()
    check_same_teacher_everywhere(job.meta.teacher, job.teacher.source.origin)
    groups, rows = Groups.from_megatron(), rows_of(job)
    with StopSignals() as stop:
        is_whole = Writing(job, groups, job.teacher.build(groups), rows, stop).run()
    if not is_whole:
        logger.info(f"{args.out} is not complete: the same command resumes it")
        sys.exit(STOPPED)


def info(args: argparse.Namespace, flags: list[str]) -> None:
    """Say what a cache holds."""
    from mkd.cache_build.inspect import describe

    for name, text in describe(Path(args.folder), "info").items():
        print(f"{name:11s} {text}")


def verify(args: argparse.Namespace, flags: list[str]) -> None:
    """Read all of a cache; after --, with the flags it was written with, ask the teacher again about some texts."""
    if flags:
        prepare(flags)
    from mkd.cache_build.inspect import problems

    folder = Path(args.folder)
    found = problems(folder, "verify")
    if found:
        raise MkdCacheError(
            "\n".join([*found, "remove damaged shards with their .json files, and write what is missing again"])
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: every record is as it was written", flush=True)
    if flags:
        compare(folder, args.segments)


def compare(folder: Path, segments: int) -> None:
    """Ask the teacher of `sys.argv` again."""
    from megatron.training import initialize_megatron

    from mkd.cache_build.job import CacheJob, CacheOptions
    from mkd.cache_build.verify import ask_again
    from mkd.cache_build.write import rows_of
    from mkd.distributed.groups import Groups
    from mkd.distributed.rank_env import check_rendezvous
    from mkd.teacher.cache.store import CacheMeta

    meta = CacheMeta.read(folder, "verify")
    job = CacheJob.from_command_line(CacheOptions.of(folder, meta))
    if differences := meta.differences(job.meta):
        raise MkdCacheError(f"verify {folder} was written with something else (there, here: {'; '.join(differences)})")
    check_rendezvous()
    initialize_megatron()
    groups, rows = Groups.from_megatron(), rows_of(job)
    seen = ask_again(job, groups, job.teacher.build(groups), rows, segments, "verify")
    if job.args.rank == 0:
        print(
            f"{folder}: the teacher says what is stored of {seen.segments:,} texts ({seen.tokens:,} tokens): distance "
            f"of the distributions {seen.total / seen.tokens:.2g} in the mean, {seen.largest:.2g} at most (0 to 1)"
        )


def merge(args: argparse.Namespace, flags: list[str]) -> None:
    """Make one cache of several."""
    from mkd.cache_build import inspect as folders

    doubles = folders.merge(Path(args.out), [Path(part) for part in args.parts], "merge")
    print(f"{args.out}: {doubles:,} doubles left out")
    info(argparse.Namespace(folder=args.out), [])


def import_files(args: argparse.Namespace, flags: list[str]) -> None:
    """Make a cache of answers that another tool has collected."""
    from mkd import cpu

    if cpu.wanted():
        cpu.activate()
    from mkd.cache_build.import_axolotl import ImportOptions, import_answers
    from mkd.checkpoint.tokenizer_files import tokenizer_hash

    folder = Path(args.tokenizer_model)
    meta, done = import_answers(
        ImportOptions(
            out=Path(args.out),
            files=tuple(map(Path, args.files)),
            teacher=args.teacher,
            tokenizer=tokenizer_hash(folder, "--tokenizer-model"),
            vocab=args.vocab_size or vocabulary_of(folder),
            top_k=args.top_k,
            lossless=args.lossless,
            align=args.align,
        )
    )
    print(f"{args.out}: {done.stored:,} texts" + (f", {done.incomplete:,} without answers" * (done.incomplete > 0)))
    if not meta.has_tail:
        print("the probabilities of a row add up to 1, so its tail is not known: --kd-top-k-tail renormalize")
    info(argparse.Namespace(folder=args.out), [])


def vocabulary_of(folder: Path) -> int:
    """What the model's config.json says, or the size of the tokenizer."""
    if (folder / "config.json").is_file():
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
        if found is not None:
            return found
    from mkd.data.sources.text import load_tokenizer

    return len(load_tokenizer(str(folder)))


def parser_of_commands() -> argparse.ArgumentParser:
    """The command line before `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("write", help="run the teacher and store what it says")
    command.add_argument("--out", required=True, metavar="DIR", help="the cache: new, or one to go on with")
    command.add_argument("--top-k", type=int, metavar="K", help="store the K most probable tokens of each place")
    command.add_argument("--sample", type=int, metavar="N", help="store N draws from the teacher instead: unbiased")
    command.add_argument("--lossless", action="store_true", help="with --top-k: 32 bits a logit instead of 12")
    command.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[],
        metavar="T",
        help="temperatures at which training will read it; with --sample, of the draws (1 and --kd-temperature)",
    )
    command.set_defaults(run=write)
    command = commands.add_parser("info", help="say what a cache holds")
    command.add_argument("folder", metavar="DIR")
    command.set_defaults(run=info)
    command = commands.add_parser("verify", help="check every record; after --, ask the teacher again about some texts")
    command.add_argument("folder", metavar="DIR")
    command.add_argument("--segments", type=int, default=64, metavar="N", help="texts to ask about again (64)")
    command.set_defaults(run=verify)
    command = commands.add_parser("merge", help="make one cache of several of the same teacher and settings")
    command.add_argument("out", metavar="OUT", help="a new folder")
    command.add_argument("parts", nargs="+", metavar="DIR", help="caches; of a segment that several have, one is kept")
    command.set_defaults(run=merge)
    add_import(commands)
    return parser


def add_import(commands: Any) -> None:
    """The flags of `import`."""
    command = commands.add_parser("import", help="make a cache of the columns target_token_ids and target_logprobs")
    command.add_argument("out", metavar="OUT", help="the cache: new, or one to add to")
    command.add_argument("files", nargs="+", metavar="FILE", help=".jsonl or .parquet, with input_ids and labels too")
    command.add_argument("--tokenizer-model", required=True, metavar="HF_DIR", help="of the ids: the model's folder")
    command.add_argument("--teacher", required=True, metavar="NAME", help="who gave the answers")
    command.add_argument("--vocab-size", type=int, metavar="N", help="of the student (what config.json in HF_DIR says)")
    command.add_argument("--top-k", type=int, metavar="K", help="ids of each row to keep (those of the shortest row)")
    command.add_argument("--lossless", action="store_true", help="32 bits a logit instead of 12")
    command.add_argument(
        "--align",
        choices=["token", "next"],
        default="token",
        help="what row t of the answers is about: token t itself (axolotl, vLLM), or the one after it",
    )
    command.set_defaults(run=import_files)


def main(argv: list[str] | None = None) -> None:
    """Run one command.

    Raises:
        MkdError: a user's error.
    """
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    parser = parser_of_commands()
    args, others = parser.parse_known_args(words[:split])
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)} (flags of pretrain_kd.py stand behind --)")
    args.run(args, words[split + 1 :])


if __name__ == "__main__":
    try:
        main()
    except (MkdError, OSError) as error:
        # All ranks fail alike; the first one speaks, and torchrun ends the others while they wait.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)
        print(f"cache_teacher.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
