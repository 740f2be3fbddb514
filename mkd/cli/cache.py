"""Run a teacher once and store its targets for any number of training runs.

    torchrun --nproc-per-node 8 -m mkd cache write --out CACHE --top-k 64 -- FLAGS OF mkd train
    mkd cache info CACHE
    mkd cache verify CACHE [-- FLAGS OF mkd train]
    mkd cache merge CACHE PART PART ...
    mkd cache import CACHE FILE.parquet --tokenizer-model HF_DIR --teacher NAME

`write` takes the launch line of a training run with --kd-teacher-hf or --kd-teacher-load: it reads the same data in the
same layout, ignores the flags of the student, and refuses those of a teacher that need one. See docs/teachers.md.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mkd.cli.job_process import exit_status_of_rank, prepare
from mkd.cli.usage import command_parser, parse_own
from mkd.errors import MkdCacheError, visible

STOPPED = 75
"""Exit status of a `write` that a signal stopped (EX_TEMPFAIL); the same command resumes."""


def write(args: argparse.Namespace, flags: list[str]) -> None:
    """Write a cache, or resume writing it."""
    prepare(flags)
    from megatron.training import initialize_megatron

    from mkd.checkpoint.megatron.resume_point import check_same_teacher_everywhere
    from mkd.compat.refusals import megatron_refusals
    from mkd.compat.stopping import StopSignals
    from mkd.distributed.groups import Groups
    from mkd.distributed.rank_env import check_rendezvous
    from mkd.job.cache_build.job import CacheJob, CacheOptions
    from mkd.job.cache_build.progress import print_cache_plan
    from mkd.job.cache_build.write import CacheBuilder, rows_to_read
    from mkd.utils.logging import logger

    temperatures = tuple(args.temperature)
    options = CacheOptions(
        out=Path(args.out), top_k=args.top_k, samples=args.sample, lossless=args.lossless, temperatures=temperatures
    )
    job = CacheJob.from_command_line(options)
    job.check_folder()
    print_cache_plan(job)
    if job.kd.dry_run:
        job.data.check_all()
        return
    check_rendezvous()
    with megatron_refusals("the flags"):
        initialize_megatron()
    check_same_teacher_everywhere(job.meta.teacher, job.teacher.source.origin)
    groups, rows = Groups.from_megatron(), rows_to_read(job)
    with StopSignals() as stop:
        is_complete = CacheBuilder(job, groups, job.teacher.build(groups), rows, stop).run()
    if not is_complete:
        logger.info(f"{args.out} is not complete: the same command resumes it")
        sys.exit(STOPPED)


def info(args: argparse.Namespace, flags: list[str]) -> None:
    """Print the contents of a cache."""
    from mkd.job.cache_build.inspect import describe

    for name, text in describe(Path(args.folder), "info").items():
        print(visible(f"{name:11s} {text}"))


def verify(args: argparse.Namespace, flags: list[str]) -> None:
    """Read a whole cache; after --, with the flags it was written with, also recompute the targets of some texts.

    Raises:
        MkdCacheError: something in it is damaged, or the targets differ.
    """
    if flags:
        prepare(flags)
    from mkd.job.cache_build.inspect import problems

    folder = Path(args.folder)
    found = problems(folder, "verify")
    if found:
        if os.environ.get("RANK", "0") == "0":
            print(*found, sep="\n", file=sys.stderr)
        raise MkdCacheError(
            f"{folder}: {len(found)} problems, named above: remove damaged shards with their .json files, and write "
            "what is missing again"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: every record is intact", flush=True)
    if flags:
        compare(folder, args.segments)


def compare(folder: Path, segments: int) -> None:
    """Recompute targets with the teacher of `sys.argv`, and compare."""
    from megatron.training import initialize_megatron

    from mkd.compat.refusals import megatron_refusals
    from mkd.distributed.groups import Groups
    from mkd.distributed.rank_env import check_rendezvous
    from mkd.job.cache_build.job import CacheJob, CacheOptions
    from mkd.job.cache_build.verify import recompute_and_compare
    from mkd.job.cache_build.write import rows_to_read
    from mkd.teacher.cache.meta import CacheMeta

    meta = CacheMeta.read(folder, "verify")
    job = CacheJob.from_command_line(CacheOptions.of(folder, meta))
    if differences := meta.differences(job.meta):
        raise MkdCacheError(f"verify {folder} was written with other flags (there, here: {'; '.join(differences)})")
    check_rendezvous()
    with megatron_refusals("the flags"):
        initialize_megatron()
    groups, rows = Groups.from_megatron(), rows_to_read(job)
    seen = recompute_and_compare(job, groups, job.teacher.build(groups), rows, segments)
    if job.args.rank == 0:
        print(
            f"{folder}: recomputed targets match those of {seen.segments:,} texts ({seen.tokens:,} tokens): distance "
            f"of the distributions {seen.total / seen.tokens:.2g} on average, {seen.largest:.2g} at most (0 to 1)"
        )


def merge(args: argparse.Namespace, flags: list[str]) -> None:
    """Merge several caches into one."""
    from mkd.job.cache_build import inspect as folders

    duplicates = folders.merge(Path(args.out), [Path(part) for part in args.parts], "merge")
    print(f"{args.out}: {duplicates:,} duplicates left out")
    info(argparse.Namespace(folder=args.out), [])


def import_files(args: argparse.Namespace, flags: list[str]) -> None:
    """Import targets that another tool has collected into a cache."""
    from mkd import cpu

    if cpu.wanted():
        cpu.activate()
    from mkd.checkpoint.tokenizer_hash import tokenizer_hash
    from mkd.job.cache_build.import_axolotl import ImportOptions, import_targets

    folder = Path(args.tokenizer_model)
    meta, counts = import_targets(
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
    print(
        f"{args.out}: {counts.stored:,} texts" + (f", {counts.incomplete:,} without targets" * (counts.incomplete > 0))
    )
    if not meta.has_tail:
        print(
            "the probabilities of a token add up to 1, so its tail is not known: train with --kd-top-k-tail renormalize"
        )
    info(argparse.Namespace(folder=args.out), [])


def vocabulary_of(folder: Path) -> int:
    """vocab_size of the model's config.json, else the size of the tokenizer."""
    from mkd.checkpoint.hf.families.vision_language import vision_language_of
    from mkd.checkpoint.tokenizer_hash import read_json_object

    if (folder / "config.json").is_file():
        config = read_json_object(folder / "config.json", "--tokenizer-model")
        if (known := vision_language_of(config)) is not None:
            config = known.text_config(config, has_own_head=True)
        found = config.get("vocab_size")
        if found is not None:
            return found
    from mkd.utils.model_folders.pretrained import load_tokenizer

    return len(load_tokenizer(str(folder)))


def parser_of_commands() -> argparse.ArgumentParser:
    """The command line before `--`."""
    parser = command_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "write",
        help="run the teacher and store its targets",
        usage="%(prog)s --out DIR (--top-k K | --sample N) [--lossless] [--temperature T ...] -- FLAGS OF mkd train",
    )
    command.add_argument("--out", required=True, metavar="DIR", help="the cache: a new folder, or one to resume")
    command.add_argument("--top-k", type=int, metavar="K", help="store the K most probable tokens per position")
    command.add_argument(
        "--sample", type=int, metavar="N", help="store N sampled targets per position instead: unbiased"
    )
    command.add_argument("--lossless", action="store_true", help="with --top-k: 32 bits per logit instead of 12")
    command.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[],
        metavar="T",
        help="temperatures of the training runs; with --sample, that of the samples (default: 1 and --kd-temperature)",
    )
    command.set_defaults(run=write)
    command = commands.add_parser("info", help="print the contents of a cache")
    command.add_argument("folder", metavar="DIR")
    command.set_defaults(run=info)
    command = commands.add_parser(
        "verify",
        help="check every record; after --, also recompute the targets of some texts",
        usage="%(prog)s DIR [--segments N] [-- FLAGS OF mkd train]",
    )
    command.add_argument("folder", metavar="DIR")
    command.add_argument("--segments", type=int, default=64, metavar="N", help="texts to recompute (64)")
    command.set_defaults(run=verify)
    command = commands.add_parser("merge", help="merge caches of the same teacher and options")
    command.add_argument("out", metavar="OUT", help="a new folder")
    command.add_argument("parts", nargs="+", metavar="DIR", help="caches; a segment in several of them is kept once")
    command.set_defaults(run=merge)
    add_import(commands)
    return parser


def add_import(commands: Any) -> None:
    """Add the `import` subcommand."""
    command = commands.add_parser("import", help="import the columns target_token_ids and target_logprobs")
    command.add_argument("out", metavar="OUT", help="the cache: a new folder, or one to add to")
    command.add_argument(
        "files", nargs="+", metavar="FILE", help=".jsonl or .parquet, also with the columns input_ids and labels"
    )
    command.add_argument(
        "--tokenizer-model", required=True, metavar="HF_DIR", help="folder of the model that the token ids belong to"
    )
    command.add_argument(
        "--teacher", required=True, metavar="NAME", help="name of the teacher that computed the targets"
    )
    command.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size of the student (from config.json in HF_DIR)"
    )
    command.add_argument(
        "--top-k", type=int, metavar="K", help="ids to keep per token (default: the number that every token has)"
    )
    command.add_argument("--lossless", action="store_true", help="32 bits per logit instead of 12")
    command.add_argument(
        "--align",
        choices=["token", "next"],
        default="token",
        help="list t is for token t itself (token: axolotl, vLLM), or for the token after it (next)",
    )
    command.set_defaults(run=import_files)


def run(argv: list[str]) -> None:
    """Run one command.

    Raises:
        MkdError: a flag or file is wrong.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser = parser_of_commands()
    args = parse_own(parser, argv[:split])
    args.run(args, argv[split + 1 :])


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    words = sys.argv[1:] if argv is None else argv
    return exit_status_of_rank(lambda: run(words))
